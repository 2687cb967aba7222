"""Pair the runs that differ in nothing but the arm, and say what their differences support.

    python stats.py runs/                          # Markdown: every pair, the difference, its intervals, the audit
    python stats.py runs/ --json                   # the same as JSON only
    python stats.py runs/ --out=report             # also tables (md, csv, tex, json) and figures (png, pdf)
    python stats.py runs/ --control=plain          # any arm can be the control
    python stats.py runs/ --allow=lr --split=test  # each arm at its best lr, chosen on val, compared on test
    python stats.py runs/ --strict                 # refuse pairs that differ in backend, dtype, versions or code

A pair is two runs of one scale and seed, equal in every setting but the arm, at the same step of the same schedule.
Differences are NLL(treatment) - NLL(control) in nats per token: negative favours the treatment.
"""
from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import math
import re
import textwrap
import typing
from pathlib import Path

import numpy as np

from prepare import BadInput, atomic_file, did_you_mean, flag, parse_flags, read_json, run_script, to_json

# ---------------------------------------------------------------------------------------------------------
# Estimates

# Percent of studies in which the nominal 95% percentile bootstrap interval of n normal differences holds the
# true mean (simulated, 12,000 studies or more for each n); the t interval holds it in 95 at every n.
COVERAGE = {2: 48, 3: 67, 4: 80, 5: 84, 6: 86, 7: 87, 8: 89, 10: 90, 15: 92, 20: 93, 30: 94}


class Paired(typing.NamedTuple):
    """n differences: their mean, sample sd (n - 1) and 95% intervals (low, high) of the mean; None where n = 1."""
    n: int
    mean: float
    sd: float | None = None
    t_ci: tuple[float, float] | None = None
    bootstrap_ci: tuple[float, float] | None = None


def paired(deltas: typing.Sequence[float]) -> Paired:
    """Student-t and bootstrap percentile intervals (appendix D) of differences [n]; ValueError of none or a NaN.

    Up to n = 7 the bootstrap lists all n^n resamples and needs no random numbers; beyond, 100,000 seeded ones.
    """
    d = np.asarray(deltas, dtype=np.float64)
    if d.ndim != 1 or len(d) == 0:
        raise ValueError("no pair, no estimate: paired() wants a list of at least one difference")
    if not np.isfinite(d).all():
        raise ValueError(f"a difference is {d[~np.isfinite(d)][0]}: leave that run out by name, not in silence")
    n, mean = len(d), float(d.mean())
    if d.min() == d.max():  # said apart, so that rounding makes no spread out of equal numbers
        mean = float(d[0])
        return Paired(n, mean) if n == 1 else Paired(n, mean, 0.0, (mean, mean), (mean, mean))
    if n <= 7:
        sums = np.zeros(1)
        for _ in range(n):
            sums = np.add.outer(sums, d).ravel()
    else:
        rng = np.random.default_rng(0)
        sums = np.concatenate([d[rng.integers(0, n, (5_000, n))].sum(1) for _ in range(20)])
    low, high = np.percentile(sums / n, [2.5, 97.5])
    return Paired(n, mean, float(d.std(ddof=1)), t_interval(mean, float(d.std(ddof=1)), n), (float(low), float(high)))


def t_interval(mean: float, sd: float, n: int, level: float = 0.95) -> tuple[float, float]:
    from scipy import special
    half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * sd / math.sqrt(n)
    return mean - half, mean + half


def sign_flip(deltas: typing.Sequence[float]) -> float | None:
    """Exact two-sided sign-flip p of a zero mean, at least 2 / 2^n; None beyond n = 20 (a million sign patterns)."""
    sums = np.zeros(1)
    for x in deltas if len(deltas) <= 20 else ():
        sums = np.concatenate([sums + x, sums - x])
    tie = 1e-12 * np.abs(deltas).sum()  # the same sum, added in another order
    return float(np.mean(np.abs(sums) >= abs(sum(deltas)) - tie)) if len(deltas) <= 20 else None


def pairs_needed(sd: float, difference: float = 0.01, power: float = 0.8) -> int:
    """Pairs at which a two-sided 5% paired t test finds `difference` with `power` (noncentral t)."""
    from scipy import special
    least = int(((special.ndtri(0.975) + special.ndtri(power)) * sd / difference) ** 2)  # were sd known
    n = np.arange(max(2, least), least + 10)
    shift, limit = difference * np.sqrt(n) / max(sd, 1e-3 * difference), special.stdtrit(n - 1, 0.975)
    found = 1 - special.nctdtr(n - 1, shift, limit) + special.nctdtr(n - 1, shift, -limit)
    return int(n[np.argmax(~(found < power))])  # NaN: so far beyond the limit that the function gives up


# ---------------------------------------------------------------------------------------------------------
# What pairs with what

# A difference in any setting refuses a pair, also in one that this file has never heard of, but for these:
# the same function rounded otherwise is shown beside the pair, and refused by --strict;
MARKED = ("backend", "dtype", "residual_dtype", "compile", "micro_batch", "ranks", "deterministic", "device",
          "device_name", "kernel_sha256", "torch", "triton", "evaluation_backend")
# bookkeeping, what follows from other settings, and where in its schedule a run was stopped, are not compared.
OWN = set("""name arch arm tag data started finished host command git_commit git_dirty git_diff python platform numpy
    cuda driver backend_reason dtype_reason milestones stop_steps stop_tokens max_tokens probe out ckpt_every keep
    wandb force workers""".split())
CROSSED = ("backend", "dtype", "residual_dtype", "device")  # a study that runs both arms in two of these is crossed
WORDS = {"data_fingerprint": "data", "tokenizer_sha256": "tokenizer", "init_sha256": "starting weights", "max_steps":
         "schedule length", "freeze": "frozen parameters", "eval_tokens": "evaluation tokens"}


def as_text(value) -> str:
    text = f"{value:.7g}" if isinstance(value, float) else "none" if value is None else (
        value if isinstance(value, str) else json.dumps(value))
    return text if len(text) <= 99 else text[:96] + "..."


def pair_check(a: dict, b: dict, allow: typing.Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Whether runs with the configs `a` and `b` may stand as a pair: (what refuses it, what only marks it).

    Each difference is a line with both values. Settings in `allow` only mark, and say so. Arms, parameter counts
    and where a run stopped are not compared; code is compared by what it does (`code_difference`).
    """
    refused, marked = [], []
    for key in sorted((a.keys() | b.keys()) - OWN):
        if (a.get(key) == b.get(key) and (key in a) == (key in b) or key.startswith(("n_params", "flops", "arm_"))
                or key == "kernel_sha256" and not a.get("backend") == b.get("backend") == "fused"  # ran in one at most
                or key == "device_name" and not a.get("device") == b.get("device") == "cuda"
                or key == "init_from" and a.get(key) and b.get(key) and a.get("init_sha256")):  # two paths, one hash
            continue
        word = f"{WORDS[key]} ({key})" if key in WORDS else key
        if (key in a) != (key in b):
            lacking = b if key in a else a
            marked.append(f"{word} is not recorded by {lacking.get('name') or lacking.get('arch')}")
        else:
            line = f"{word}: {as_text(a[key])} against {as_text(b[key])}"
            (marked if key in allow or key in MARKED else refused).append(line + " (allowed)" * (key in allow))
    if code := code_difference(a, b):
        marked.append(f"code: {code}" + " (allowed)" * ("probe" in allow))
    return refused, marked


def code_difference(a: dict, b: dict) -> str | None:
    """How the code of two runs differs, by the probes both stored of either arm (1e-5 relative). An arm that is newer
    than one of the runs is no difference; without probes, one clean commit is as good."""
    probes = [c["probe"] if isinstance(c.get("probe"), dict) else {} for c in (a, b)]
    arms = sorted({str(c.get("arch")).split(":")[0] for c in (a, b)})
    shared = [arm for arm in arms if all(arm in p for p in probes)]
    for arm in shared:
        with contextlib.suppress(TypeError, ValueError):  # nulls, lists of two lengths: they do not compare
            x, y = (np.asarray(p[arm], dtype=np.float64) for p in probes)
            if x.size and (np.abs(x - y) <= 1e-5 * np.maximum(np.abs(x), np.abs(y))).all():  # false for NaN
                continue
        return f"probe of {arm}: {as_text(probes[0][arm])} against {as_text(probes[1][arm])}"
    commits = {(c.get("git_commit"), bool(c.get("git_dirty"))) for c in (a, b)}
    clean = len(commits) == 1 and all(commit and not dirty for commit, dirty in commits)
    return None if shared or clean else f"no probe of {' or '.join(arms)} in both runs, nor one clean commit"


def launch_report(config: dict, runs_folder: str | Path, control: str = "block") -> list[str]:
    """Lines for a run about to start: which runs in `runs_folder` it pairs with, what stands against the others, and
    what that means for the table. Reads their config.json alone."""
    arm, place, lines, partners = config.get("arch"), (config.get("scale"), config.get("seed")), [], 0
    for path in sorted(Path(runs_folder).glob("*/config.json")):
        name = path.parent.name
        with contextlib.suppress(BadInput):  # stats.py itself names what it cannot read
            other = read_json(path)
            if name == config.get("name") or (other.get("scale"), other.get("seed")) != place:
                continue
            refused, marked = pair_check(other, config)
            if other.get("arch") == arm:
                lines += [f"a rerun of {name}: the table takes one, both show the noise"] * (not refused)
            elif control in (arm, other.get("arch")):
                partners += not refused
                lines.append(f"not with {name}: {'; '.join(refused)}" if refused else f"with {name}" +
                             f", marked (--strict refuses it): {'; '.join(marked)}" * bool(marked))
    other_arm = "another arm" if arm == control else control
    return lines + ["the table gains a pair once both runs have reached a milestone" if partners else
                    f"in no table until {other_arm} has a run with these settings, scale {place[0]}, seed {place[1]}"]


# ---------------------------------------------------------------------------------------------------------
# Run folders


def read_metrics(path: Path, samples: int = 64) -> list[dict]:
    """Every record of a metrics.jsonl but the train ones, and `samples` of those (the paper's length makes 10 MB of
    them). A line that cannot be a record raises ValueError; a last line without its end is still being written."""
    data, records = path.read_bytes(), []
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n"))
    wanted = {*range(0, len(ends), max(1, len(ends) // samples)), *range(len(ends))[-1:],
              *np.searchsorted(ends, [m.start() for m in re.finditer(b'"eval"', data)]),
              *np.flatnonzero(np.frombuffer(data, np.uint8)[ends - 1] != ord("}"))}  # torn lines, for their error
    for i in sorted(i for i in wanted if i < len(ends)):
        try:
            records.append(json.loads(data[ends[i - 1] + 1 if i else 0:ends[i]]))
            records[-1]["kind"]
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"corrupt: line {i + 1} of {path.name} is not a record") from None
    return records


class Run:
    """A run folder: config, status, step of its last record, evaluations by step, speed and memory. Its settings are
    attributes (`run.seed`), None where config.json lacks them. Raises what tells why the run cannot be used."""

    def __init__(self, path: Path, name: str, split: str):
        self.path, self.name, self.config = path, name, {"name": name, **read_json(path / "config.json")}
        if lacking := [k for k in ("scale", "arch", "seed", "max_steps") if self.config.get(k) is None]:
            raise ValueError(f"config.json lacks {', '.join(lacking)}")
        records = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
        end = records[-1] if records and records[-1]["kind"] == "end" else {}
        self.status, self.last = end.get("status", "unfinished"), max((r.get("step", 0) for r in records), default=0)
        if self.status == "diverged":
            raise ValueError(f"diverged at step {self.last}" + f" ({end.get('why')})" * bool(end.get("why")))
        # an evaluation on another backend than training's has the longer name, and gives way to the run's own
        files = sorted((path / "eval").glob(f"{split}-*.json"), key=lambda p: (-len(p.name), p.name))
        logged, stored = [r for r in records if r["kind"] == "eval"], [read_json(f) for f in files]
        for step, nll in ((r.get("step"), r.get("nll")) for r in logged + stored):
            if not isinstance(step, int) or not isinstance(nll, (int, float)) or not 0 <= nll < 700:  # e^700 overflows
                raise ValueError(f"the NLL at step {step} is {nll}")
        self.val = {r["step"]: r for r in logged}
        self.evals = {r["step"]: r for r in stored + logged * (split == "val")}  # step -> evaluation on the split
        if not self.evals:
            raise ValueError(f"no evaluation yet, at step {self.last}" if split == "val" else
                             f"no {split} evaluation: python eval.py {path} --split={split}")
        self.speed = float(np.median([r["tokens_per_s"] for r in records if r.get("tokens_per_s")] or [0])) or None
        self.memory = max((r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")), default=None)

    def __getattr__(self, key):
        return self.__dict__["config"].get(key)

    def tokens(self, step: int) -> int | None:
        return step * self.tokens_per_step if self.tokens_per_step else self.evals[step].get("tokens")

    def windows(self, split: str, step: int) -> np.ndarray | None:
        """Mean NLL of each evaluation window, float64 [windows], where eval/ has them and they give the run's NLL."""
        with contextlib.suppress(OSError, ValueError, EOFError):
            w = np.load(self.path / "eval" / f"{split}-{step:06d}.npy", allow_pickle=False)
            return w if w.ndim == 1 and len(w) > 1 and abs(w.mean() - self.evals[step]["nll"]) < 1e-5 else None


def load_folders(folders: list[str], split: str, problem: typing.Callable) -> tuple[list[Run], list[str]]:
    """The usable runs in `folders` (folders of runs, or runs), and the names of those still to come; `problem` gets
    the others. Raises BadInput where there is no run."""
    found, coming, runs = {}, [], []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise BadInput(f"{folder}: no such folder; give the folder that train.py writes its runs to")
        marks = ("config.json", "metrics.jsonl", "ckpt.pt")
        inside = [folder] if (folder / marks[0]).exists() else [
            p for p in folder.iterdir() if p.name[0] != "." and any((p / f).exists() for f in marks)]
        if not inside:
            raise BadInput(f"{folder} holds no runs: a run is a folder with config.json and metrics.jsonl")
        names = {p.resolve().name: p.resolve() for p in inside}
        for name, p in sorted(names.items()):
            found.setdefault(p, name if name not in found.values() else str(p))
        if (folder / "plan.json").exists():
            try:
                plan = {str(name) for entry in read_json(folder / "plan.json")["plans"] for name in entry["runs"]}
            except (BadInput, KeyError, TypeError) as e:
                problem("plan.json", f"cannot be read ({e}): planned and missing runs are not known")
                continue
            coming += sorted(plan - names.keys())
            for name in sorted(plan ^ names.keys()):
                problem(name, "planned, and missing" if name in plan else "not planned: plan.json lacks it")
    for path, name in sorted(found.items(), key=lambda item: item[1]):
        try:
            run = Run(path, name, split)
            runs.append(run)
            if run.status != "complete" or run.last < (run.stop_steps or run.max_steps):
                problem(name, f"{run.status}: at step {run.last} of {run.stop_steps or run.max_steps}")
        except (BadInput, ValueError, OSError) as e:
            coming += [name] * str(e).startswith("no evaluation yet")
            problem(name, f"left out: {getattr(e, 'strerror', None) or str(e).replace(f'{path}/', '')}")
    return runs, coming


# ---------------------------------------------------------------------------------------------------------
# From runs to comparisons

# What the paper found for rd - block after 61,036 steps (section 5.1, appendix D)
PAPER = {"S": dict(mean=-0.030118, sd=0.003036, t_ci=(-0.033887, -0.026348), bootstrap_ci=(-0.032828, -0.028064),
                   change=(-0.0301, 0.0030), ppl_reduction=0.0297, won="5/5", n=5),
         "M": dict(mean=-0.024691, sd=0.011983, t_ci=(-0.039570, -0.009812), bootstrap_ci=(-0.034742, -0.016267),
                   change=(-0.0247, 0.0120), ppl_reduction=0.0243, won="5/5", n=5)}
SAME_AS_BLOCK = {
    "average": "Average is degenerate: its two queries start equal, get equal gradients and stay equal, so it is "
               "block up to rounding and clipping: a noise floor; q_kv, k_qv, q_k_v test parameters and two routes.",
    "tied": "Tied computes block's function with block's parameters: a noise floor."}


def pair_steps(c: Run, t: Run, allow: typing.Collection[str], strict: bool) -> tuple[dict[int, tuple], list[str]]:
    """{step: (control, treatment, marks)} where `c` and `t` make a pair, or what stands against it."""
    steps, why = {}, pair_check(c.config, t.config, allow)[0] or ["no step at which both were evaluated"]
    parts = ("eval_tokens", "windows", "backend", "data_fingerprint")
    for step in sorted(c.evals.keys() & t.evals.keys()):
        both = [{f"evaluation_{k}": r.evals[step][k] for k in parts if k in r.evals[step]} | r.config for r in (c, t)]
        refused, marked = pair_check(*both, allow)
        if against := refused + [m for m in marked if strict and not m.endswith("(allowed)")]:
            why = against
        else:
            steps[step] = (c, t, marked)
    return steps, why


def best_of(runs: list[Run], keys: list[str], problem: typing.Callable, notes: list) -> list[Run]:
    """Of one arm's runs those whose value of `keys` has the lowest validation NLL, over the seeds and at the last step
    that all values share; all of them where they share none."""
    values: dict[str, list[Run]] = {}
    for r in runs:
        values.setdefault("/".join(as_text(r.config.get(k)) for k in keys), []).append(r)
    seeds = set.intersection(*({r.seed for r in rs} for rs in values.values()))
    steps = set.intersection(*({s for r in rs for s in r.val if r.seed in seeds} for rs in values.values()))
    if len(values) < 2 or not steps:
        return runs
    score = {v: np.mean([r.val[max(steps)]["nll"] for r in rs if r.seed in seeds and max(steps) in r.val])
             for v, rs in values.items()}
    best = min(values, key=lambda v: (score[v], v))
    ranking = ", ".join(f"{v} (NLL {score[v]:.5f})" for v in sorted(values))
    notes.append((runs[0], f"{runs[0].arch}: {'/'.join(keys)} = {best} is the best on validation of {ranking}, over "
                  f"seeds {', '.join(map(str, sorted(seeds)))}."))
    for r in (r for r in runs if r not in values[best]):
        problem(r.name, f"left out: {'/'.join(keys)} = {best} is better on validation")
    return values[best]


def analyse(folders: list[str], control: str = "block", split: str = "val", allow: typing.Collection[str] = (),
            strict: bool = False) -> dict:
    """All that tables and figures show: `comparisons` (each arm against the control, at the last step that a pair has
    reached), `milestones` (the same at every step), `crossed` (arm by backend), `floor` (differences that are noise),
    `problems`, `refused`."""
    out = dict(control=control, split=split, refused=0, comparisons=[], milestones=[], crossed=[], floor=[], problems=[])
    notes, used, seen, groups = [], set(), {}, []

    def problem(run: str, why: str) -> None:
        out["problems"].append({"run": run, "why": why})
        out["refused"] += why.startswith("refused")

    runs, coming = load_folders(folders, split, problem)
    arms, settings = {r.arch for r in runs}, {k for r in runs for k in r.config} - {"scale", "seed", "arch"}
    if runs and control not in arms | {"block"}:
        raise BadInput(f"--control={control}: the arms here: {', '.join(sorted(arms))}" + did_you_mean(control, arms))
    for key in (k for k in allow if runs and k not in settings):
        raise BadInput(f"--allow={key}: not a setting in which two runs can differ" + did_you_mean(key, settings))
    for r in list(runs):
        o = seen.setdefault((r.scale, r.arch, r.evals[max(r.evals)]["nll"]), r)
        if o.seed != r.seed and all(r.evals[s]["nll"] == o.evals[s]["nll"] for s in r.evals.keys() & o.evals.keys()):
            problem(r.name, f"refused: its NLLs equal those of {o.name} to the last digit, though the seeds are "
                    f"{o.seed} and {r.seed}: a copied folder, or a seed without effect")
            runs.remove(r)
    size = {r.scale: r.n_params or 0 for r in runs}
    for r in sorted(runs, key=lambda r: (size[r.scale], str(r.scale), r.arch != "rd", r.arch, r.name)):
        home = next((g for g in groups if g[0].arch == r.arch and not pair_check(
            *({**x.config, "seed": 0, "init_sha256": 0} for x in (g[0], r)), allow)[0]), None)
        groups.append([r]) if home is None else home.append(r)  # a group: one arm at one setting, whatever the seeds
    if keys := [k for k in allow if k not in MARKED and k != "probe"]:
        groups = [best_of(g, keys, problem, notes) for g in groups]

    for group in (g for g in groups if g[0].arch != control):
        scale, arm, pairs = group[0].scale, group[0].arch, []  # pairs: (variant, step, control, treatment, marks)
        for t in group:
            tried = [(c, *pair_steps(c, t, allow, strict)) for g in groups for c in g
                     if (c.arch, c.scale, c.seed) == (control, scale, t.seed)]
            variant = tuple(str(t.config.get(k)) for k in CROSSED)
            pairs += [(variant, step, *pair) for _, steps, _ in tried for step, pair in steps.items()]
            if not any(steps for _, steps, _ in tried):
                near, _, why = min(tried, key=lambda x: (len(x[2]), x[0].name), default=(None, None, None))
                problem(t.name, f"refused with {near.name}: {'; '.join(why)}" if near else
                        f"no partner: no usable run of {control} at scale {scale}, seed {t.seed}")
        crossed = len({(p[0], p[3].seed) for p in pairs}) > len({p[3].seed for p in pairs})  # a comparison per backend
        variants = sorted({p[0] for p in pairs}, key=lambda v: (v[0] != "reference", v)) if crossed else [None]
        siblings = [setting_words(r) for g in groups for r in g if (r.scale, r.arch) == (scale, arm)]
        labels, cells = {}, {}  # cells: {(variant, step): {seed: (control, treatment, marks)}}
        for v in variants if pairs else ():
            some = [p for p in pairs if v in (None, p[0])]
            words = [w for w in setting_words(some[0][3]) if not all(w in s for s in siblings)]
            if crossed:
                words = [x for i, x in enumerate(v) if any(o[i] != x for o in variants)] + [
                    w for w in words if not w.startswith(CROSSED)]
            labels[v] = " ".join(words)
            for step in sorted({p[1] for p in some}):
                best = {}  # one pair a seed: the least marked one, then that of the longest runs
                for _, _, c, t, marked in sorted((p for p in some if p[1] == step), key=lambda p: (
                        str(type(p[2].seed)), p[2].seed, len(p[4]), -p[2].last, -p[3].last, p[2].name, p[3].name)):
                    best.setdefault(t.seed, (c, t, marked))
                used |= {r.name for p in best.values() for r in p[:2]}
                cells[v, step] = best
                row = compare(list(best.values()), step, split, step == max(p[1] for p in some), labels[v])
                out["milestones"].append(row)
            starts = tuple(f"{scale}-{a.replace(':', '_').replace('=', '')}-s" for a in (control, arm))
            waiting = sorted({r.name for p in some for r in p[2:4] if r.status != "complete"})
            waiting += [name for name in coming if name.startswith(starts)]
            about = [text for r, text in notes if r.scale == scale and r.arch in (control, arm)]
            row.update(waiting=waiting, interim=bool(waiting), budget=row["budget"] + ", interim" * bool(waiting),
                       notes=about + [SAME_AS_BLOCK[a] for a in (arm, control) if a in SAME_AS_BLOCK])
            out["comparisons"].append(row)
        out["crossed"] += [row for v in variants[1:] if (row := interaction(cells, variants[0], v, labels))]

    named = used | {p["run"] for p in out["problems"] if re.match("left out|refused|no partner", p["why"])}
    for r, group in ((r, g) for g in groups for r in g):
        twins = [o for o in group if o is not r and o.seed == r.seed]
        if r.name not in named:
            twin = next((o.name for o in twins if o.name in used), None)
            problem(r.name, f"duplicate of {twin}, which the table takes: same arm, seed and settings" if twin else
                    "no partner: no run of another arm with its scale, seed and settings")
        for o in (o for o in twins if o.name > r.name and o.evals.keys() & r.evals.keys()):
            step = max(o.evals.keys() & r.evals.keys())
            out["floor"].append(compare([(r, o, pair_check(r.config, o.config)[1])], step, split))
    intervals = sum(c["n"] > 1 for c in out["comparisons"])
    for c in out["comparisons"]:
        if {c["control"], c["treatment"]} <= {"block", *SAME_AS_BLOCK}:
            out["floor"].append(c)
        if c["n"] > 1 and intervals > 1:
            c["simultaneous_t_ci"] = t_interval(c["mean"], c["sd"], c["n"], 1 - 0.05 / intervals)
        c["evidence"] = evidence(c)
    return out


def setting_words(run: Run) -> list[str]:
    """The settings that a run's name carries: `nano-rd-s123-lr0.002-b16` has lr0.002 and b16."""
    return run.name.partition(f"-s{run.seed}")[2].split("-")[1:]


def interaction(cells: dict, first: tuple, second: tuple, labels: dict) -> dict | None:
    """Arm by backend: how the arms' difference changes from variant `first` to `second`, at the last step and over the
    seeds where both arms ran in both; None where there is none."""
    for step in sorted({step for v, step in cells if v == first}, reverse=True):
        sides = [cells.get((v, step), {}) for v in (first, second)]
        seeds = [seed for seed in sides[0] if seed in sides[1] and all(  # no pair of two backends
            c.config.get(k) == t.config.get(k) for c, t, _ in (side[seed] for side in sides) for k in CROSSED)]
        if not seeds:
            continue
        nll = np.array([[[r.evals[step]["nll"] for r in side[seed][:2]] for seed in seeds] for side in sides])
        deltas, shifts = nll[..., 1] - nll[..., 0], nll[1] - nll[0]  # [variant, seed], [seed, arm]
        c, t, _ = sides[0][seeds[0]]
        est = paired(deltas[1] - deltas[0])
        return {"scale": t.scale, "arms": f"{t.arch} - {c.arch}", "control": c.arch, "treatment": t.arch, "step": step,
                "budget": count(t.tokens(step)), "seeds": seeds, "first": labels[first], "second": labels[second],
                "first_change": spread(deltas[0]), "second_change": spread(deltas[1]), "control_shift":
                spread(shifts[:, 0]), "treatment_shift": spread(shifts[:, 1]), "interaction": est.mean, **est._asdict()}
    return None


def spread(values: typing.Iterable[float | None]) -> tuple[float, float | None] | None:
    """(mean, sample sd), of one value (mean, None), of none None."""
    v = np.asarray([x for x in values if x is not None])
    return (float(v.mean()), float(v.std(ddof=1)) if len(v) > 1 else None) if len(v) else None


def error(windows: np.ndarray | None) -> float | None:
    """Standard error of the mean over evaluation windows [windows]."""
    return None if windows is None else float(windows.std(ddof=1) / math.sqrt(len(windows)))


def compare(pairs: list[tuple[Run, Run, list[str]]], step: int, split: str, last=False, label="") -> dict:
    """One comparison at one step, as in `--json`. Windows are read for the `last` one; `label` follows the arm's name
    where two comparisons of one arm must be told apart."""
    rows, gaps, (c0, t0, _) = [], [], pairs[0]
    for c, t, marked in pairs:
        wx, wy = (r.windows(split, step) if last else None for r in (c, t))
        gaps.append(wy - wx if wx is not None and wy is not None and wx.shape == wy.shape else None)
        rows.append({"seed": c.seed, "delta_se": error(gaps[-1]), "marks": "; ".join(marked)})
        for arm, r, w in (("control", c, wx), ("treatment", t, wy)):
            e = r.evals[step]
            at = {"nll": e["nll"], "se": error(w), "ppl": math.exp(e["nll"]), "bits_per_byte": e.get("bits_per_byte"),
                  "backend": r.backend, "speed": r.speed, "gb": r.memory and r.memory / 1e9}
            rows[-1].update({arm: r.name, **{f"{arm}_{k}": v for k, v in at.items()}})
        delta = t.evals[step]["nll"] - c.evals[step]["nll"]
        rows[-1].update(delta=delta, ppl_reduction=-math.expm1(delta))
        for k, x, y in (("speed", c.speed, t.speed), ("memory", c.memory, t.memory)):
            alike = (c.backend, c.device_name) == (t.backend, t.device_name)
            rows[-1][f"{k}_ratio"] = y / x - 1 if alike and x and y else None
    deltas, tokens, ends = [r["delta"] for r in rows], t0.tokens(step), [t.evals[step] for _, t, _ in pairs]
    est, whole = paired(deltas), all(g is not None and g.shape == gaps[0].shape for g in gaps)
    ours = (c0.arch, t0.arch, step, tokens, split) == ("block", "rd", 61_036, 2_000_027_648, "val")
    arm = f"{t0.arch} {label}".rstrip()
    rest = f" of {count((tokens or 0) * t0.max_steps // step)}, mid-schedule" if 0 < step < t0.max_steps else ""
    return {"scale": t0.scale, "control": c0.arch, "treatment": t0.arch, "tokens": tokens, **est._asdict(),
            "seeds": [r["seed"] for r in rows], "deltas": deltas, "wins": sum(d < 0 for d in deltas),
            "ppl_reduction": float(np.mean([r["ppl_reduction"] for r in rows])), "split": split, "step": step,
            "max_steps": t0.max_steps, "mid_schedule": step < t0.max_steps, "interim": False, "waiting": [],
            "notes": [], "arm": arm, "arms": f"{arm} - {c0.arch}", "budget": count(tokens) + rest,
            "change": (est.mean, est.sd), "won": f"{sum(d < 0 for d in deltas)}/{est.n}",
            "paper": PAPER.get(t0.scale) if ours else None,
            **{f"{arm}_nll": spread(r[f"{arm}_nll"] for r in rows) for arm in ("control", "treatment")},
            "sign_flip_p": sign_flip(deltas), "smallest_p": 2.0 ** (1 - est.n), "simultaneous_t_ci": None,
            "pairs_needed": None if est.sd is None else pairs_needed(est.sd),
            "seed_se": None if est.sd is None else est.sd / math.sqrt(est.n),
            "slice_se": error(np.mean(gaps, axis=0)) if whole else None,  # every seed has the same windows
            **{k: [spread(v) for v in zip(*(r[k] for r in ends if r.get(k)))] for k in ("js", "js_of_mean")},
            "js_mean": spread(r.get("js_mean") for r in ends), "pairs": rows, "runs": [p[:2] for p in pairs]}


def count(n: int | None) -> str:
    return next((f"{n / v:.3g} {w}" for v, w in ((1e9, "B"), (1e6, "M"), (1e3, "k")) if n >= v), str(n)) if n else "?"


def evidence(c: dict) -> str:
    """What these pairs support, what they do not, and which interval to trust."""
    run, n, (low, high) = c["runs"][0][1], c["n"], c["t_ci"] or (-math.inf, math.inf)
    says = ("a direction, no more" if n == 1 else f"{c['treatment']} better than {c['control']}" if high < 0 else
            f"{c['treatment']} worse than {c['control']}" if low > 0 else "neither arm (the t interval holds 0)")
    trust = ("One pair has no interval: its difference cannot be told from the noise between seeds." if n == 1 else
             f"All {n} differences are equal: intervals without width say nothing (copies?)." if not c["sd"] else
             f"Trust the t interval: at n = {n} a nominal 95% bootstrap percentile interval covers the true mean in "
             f"about {COVERAGE[max(k for k in COVERAGE if k <= n)]}% of studies, the t interval in about 95%.")
    lrs = sorted({as_text(r.lr) for pair in c["runs"] for r in pair})
    marks = sorted({re.split(r":| is not", m)[0] for p in c["pairs"] for m in p["marks"].split("; ") if m})
    seeds, lr = ", ".join(map(str, c["seeds"])), " and ".join(lrs) + (", chosen per arm" if lrs[1:] else ", not tuned")
    return (f"{n} pair{'s' * (n > 1)} ({count(run.n_params)} parameters; {c['budget']} tokens of {run.data}; seeds "
            f"{seeds}; lr {lr}) support: {says}. Not supported: other scales, corpora, longer training, tuned "
            f"learning rates{', the arm apart from ' * bool(marks)}{', '.join(marks)}. {trust}")


# ---------------------------------------------------------------------------------------------------------
# Tables and figures

# key|header|format; a tuple is (mean, sd), to four places, under a format with ± to its places, with [ an interval
COLUMNS = {c.split("|")[0]: (c + "||").split("|")[1:3] for c in """
scale|Scale; arms|Arms; budget|Tokens; seed|Seed; n|n|d; won|Wins; control_nll|Control NLL|.5f;
treatment_nll|Treatment NLL|.5f; delta|Δ NLL|+.5f; change|Δ NLL|+.4f; sd|sd|.6f; ppl_reduction|PPL ↓|.2%; mean|Mean
Δ|+.6f; t_ci|95% t|[.6f; simultaneous_t_ci|Simultaneous t|[.6f; bootstrap_ci|95% bootstrap|[.6f;
sign_flip_p|Sign-flip p|.4f; smallest_p|Least p|.4f; pairs_needed|Pairs needed|,d; seed_se|Error, seeds|.6f;
slice_se|Error, slice|.6f; control_se|± slice|.4f; treatment_se|± slice|.4f; delta_se|± slice|.5f;
control_ppl|Control PPL|.3f; treatment_ppl|Treatment PPL|.3f; marks|Marked; control_bits_per_byte|Control
bits/byte|.4f; treatment_bits_per_byte|Treatment bits/byte|.4f; arm|Arm; layer|Layer; js|JS|.4f; js_of_mean|JS of
mean weights|.4f; control|Control; treatment|Treatment; arch|Arm; n_layer|Layers|d; n_embd|Width|d; n_head|Heads|d;
head_dim|Head dim|d; hidden|MLP hidden|,d; block_layers|Block layers|d; context|Context|,d; vocab_size|Vocabulary|,d;
n_params|Parameters|,d; extra|Over control|+,d; lr|Peak lr|g; batch_size|Batch|d; micro_batch|Micro-batch|d;
max_steps|Steps|,d; control_backend|Control backend; treatment_backend|Treatment backend; control_speed|Control
tokens/s|,.0f; treatment_speed|Treatment tokens/s|,.0f; speed_ratio|Change|+.1%; control_gb|Control peak GB|.3f;
treatment_gb|Treatment peak GB|.3f; memory_ratio|Change|+.1%; first|First; second|Second; first_change|Δ NLL,
first|±+.6f; second_change|Δ NLL, second|±+.6f; control_shift|Control, second - first|±+.6f;
treatment_shift|Treatment, second - first|±+.6f; interaction|Interaction|+.6f""".strip().replace("\n", " ").split("; ")}
TABLES = [  # name, title, rows, columns, note
    ("table1_summary", "Summary (Table 1)", "summary",
     "scale arms budget control_nll treatment_nll change ppl_reduction won",
     "Mean ± sample sd over seeds. Δ is treatment - control, by seed; PPL ↓ averages the reductions within seeds."),
    ("estimates", "Estimates", "summary", "scale arms budget n mean sd t_ci simultaneous_t_ci bootstrap_ci "
     "sign_flip_p smallest_p pairs_needed seed_se slice_se",
     "Simultaneous (Bonferroni) intervals hold together in 95% of studies. Least p: the smallest that n "
     "allows. Pairs needed: for 80% power at 0.01. Errors: of the mean Δ, over seeds and over evaluation windows."),
    ("table2_controls", "Controls (Table 2)", "controls", "scale arms budget n control_nll treatment_nll change won",
     "The last step that most arms have reached. " + SAME_AS_BLOCK["average"]),
    ("table3_pairs", "Every pair (Table 3)", "pairs", "scale arms budget seed control_nll control_se treatment_nll "
     "treatment_se delta delta_se control_ppl treatment_ppl ppl_reduction control_bits_per_byte "
     "treatment_bits_per_byte marks", "± slice: standard error over evaluation windows, of Δ over their differences "
     "(neighbours share documents: a floor)."),
    ("milestones", "Milestones (Figure 3)", "milestones",
     "scale arms budget n control_nll treatment_nll change t_ci won", ""),
    ("js_by_layer", "JS divergence by layer (Figure 4)", "js", "scale arm layer js js_of_mean",
     "Nats, mean ± sd over seeds; layer 0 has one source."),
    ("crossed", "Arm by backend", "crossed", "scale arms budget n first second first_change second_change control_shift "
     "treatment_shift interaction sd t_ci", "Δ between the arms under the first and the second backend, each arm's own change from "
     "first to second, and last the interaction, Δ under the second - Δ under the first, by seed: what the backend does "
     "to the comparison."),
    ("noise_floor", "Noise floor: A/A comparisons", "floor", "treatment control seed budget delta marks",
     "A difference of this size is noise."),
    ("table4_configurations", "Configurations (Table 4)", "configs", "scale arch n_layer n_embd n_head head_dim "
     "hidden block_layers context vocab_size n_params extra lr batch_size micro_batch max_steps", ""),
    ("efficiency", "Efficiency (Appendix E)", "pairs", "scale arms seed control_backend treatment_backend "
     "control_speed treatment_speed speed_ratio control_gb treatment_gb memory_ratio",
     "Changes on one backend and device only. The paper, reference route, seed 123: S 56,158 and 50,505 tokens/s "
     "(-10.1%), 16.005 and 17.647 GB; M 21,616 and 19,697 (-8.9%), 21.015 and 23.132 GB.")]


def tables(out: dict) -> dict[str, tuple[str, list[tuple[str, str, str]], list[dict], str]]:
    """{name: (title, [(key, header, format)], rows, note)} of every table that has rows."""
    rows = {"summary": [], "pairs": [], "js": [], "controls": [], "milestones": out["milestones"],
            "crossed": out["crossed"],
            "floor": [{**c, **p} for c in out["floor"] for p in c["pairs"]]}
    steps, configs = {}, {}
    for c in out["milestones"]:
        steps.setdefault((c["scale"], c["max_steps"]), {}).setdefault(c["step"], []).append(c)
    for by_step in steps.values():
        most = by_step[max(by_step, key=lambda step: (len(by_step[step]), step))]
        rows["controls"] += most if len(most) > 1 else []
    for c in out["comparisons"]:
        who = {"scale": c["scale"], "arms": c["arms"] + ", the paper", "budget": c["budget"]}
        rows["summary"] += [c, {**who, **c["paper"]}] if c["paper"] else [c]
        rows["pairs"] += [{**c, **p} for p in c["pairs"]]
        means = c["js_of_mean"] or [None] * len(c["js"])
        rows["js"] += [{**c, "layer": i, "js": x, "js_of_mean": y} for i, (x, y) in enumerate(zip(c["js"], means))]
        rows["js"] += [{**c, "layer": "1 to last", "js": c["js_mean"], "js_of_mean": None}] * bool(c["js"])
        for control, r in ((pair[0], r) for pair in c["runs"] for r in pair):
            width = r.n_embd or 0
            configs.setdefault((r.scale, r.arch, r.lr, r.max_steps), {
                **r.config, "head_dim": r.n_head and width // r.n_head, "hidden": round(width * (r.mlp_ratio or 0)),
                "extra": (r.n_params or 0) - (control.n_params or 0) or None})
    rows["configs"] = list(configs.values())
    made = {}
    for name, title, kind, keys, note in TABLES:
        rare = ("marks", "simultaneous_t_ci")
        keys = [k for k in keys.split() if k not in rare or any(r.get(k) for r in rows[kind])]
        if rows[kind]:
            made[name] = (title, [(k, *COLUMNS[k]) for k in keys], rows[kind], note)
    return made


def show(value, spec: str) -> str:
    """One cell as text; an empty one is a dash."""
    if isinstance(value, tuple):
        parts = [format(v, spec[1:] if spec[:1] in ("[", "±") else ".4f") for v in value if v is not None]
        return f"[{', '.join(parts)}]" if "[" in spec else " ± ".join(parts)
    return "-" if value is None else format(value, spec) if spec else str(value)


def markdown(title: str, columns: list, rows: list[dict], note: str) -> str:
    lines = [[h for _, h, _ in columns], ["---:" if spec else "---" for _, _, spec in columns]]
    lines += [[show(r.get(k), spec) for k, _, spec in columns] for r in rows]
    lines = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"### {title}", "", *lines, "", *[note, ""] * bool(note)])


def latex(title: str, columns: list, rows: list[dict], note: str) -> str:
    """A booktabs tabular, to be \\input."""
    def cell(text: str, spec: str) -> str:
        text = re.sub(r"([&%$#_{}])", r"\\\1", text)
        for sign, tex in (("±", r"\pm"), ("Δ", r"\Delta"), ("↓", r"\downarrow")):
            text = text.replace(sign, tex if spec else f"${tex}$")
        return f"${text}$" if spec and text != "-" else text
    lines = [[cell(h, "") for _, h, _ in columns]]
    lines += [[cell(show(r.get(k), spec), spec) for k, _, spec in columns] for r in rows]
    head, *body = (" & ".join(line) + r" \\" for line in lines)
    align = "".join("r" if spec else "l" for _, _, spec in columns)
    return "\n".join([f"% {title}. {note}", rf"\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule", *body,
                      r"\bottomrule", r"\end{tabular}", ""])


def csv_rows(title: str, columns: list, rows: list[dict], note: str) -> typing.Iterator[list]:
    """Unrounded; a (mean, sd) and an interval take two columns."""
    ends = {k: (" low", " high") if "[" in spec else ("", " sd") for k, _, spec in columns
            if any(isinstance(r.get(k), tuple) for r in rows)}
    yield [h + end for k, h, _ in columns for end in ends.get(k, ("",))]
    for r in rows:
        yield [v for k, _, _ in columns for v in ((r.get(k) or (None, None)) if k in ends else (r.get(k),))]


def report(out: dict, figures: dict[str, str]) -> str:
    """Everything as Markdown."""
    made = {name: markdown(*t) for name, t in tables(out).items()}
    n = len(out["comparisons"])
    lines = [f"# {n} comparison{'s' * (n != 1)} with {out['control']}, {out['split']} split", ""]
    lines += [made.pop(name) for name in ("table1_summary", "estimates") if name in made]
    for c in out["comparisons"]:
        lines += [f"- {c['scale']}, {c['arms']}: {c['evidence']}", *(f"  {n}" for n in c["notes"])]
        lines += [f"  Interim: waiting for {', '.join(c['waiting'])}."] * c["interim"]
    lines += ["", *made.values(), *(f"![{caption}]({name}.png)\n" for name, caption in figures.items())]
    lines += ["### Left out, refused, unfinished, unplanned or missing", ""] * bool(out["problems"])
    return "\n".join(lines + [f"- {p['run']}: {p['why']}" for p in out["problems"]]).rstrip()


def draw(out: dict, folder: Path) -> dict[str, str]:
    """Write the paper's figures 2 to 4 and the training curves of a pair as png and pdf; returns {name: caption}."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    colours = ["#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]  # Okabe and Ito's
    captions, shown, zero = {}, out["comparisons"], dict(color="0.6", lw=0.8, ls="--")

    def save(fig, name: str, caption: str, of: list[dict]) -> None:
        seeds: dict[str, list[str]] = {}
        for c in of:
            key = f"n = {c['n']} (seed{'s' * (c['n'] > 1)} {', '.join(map(str, c['seeds']))})"
            seeds.setdefault(key, []).append(f"{c['scale']} {c['arm']}")
        captions[name] = caption + " " + "; ".join(f"{', '.join(arms)}: {n}" for n, arms in seeds.items()) + "."
        fig.supxlabel(textwrap.fill(captions[name], 62), fontsize=7, x=0.02, ha="left")
        for kind, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):  # nothing of today
            with atomic_file(folder / f"{name}.{kind}") as f:
                fig.savefig(f, format=kind, dpi=300, metadata=metadata)
        plt.close(fig)

    def band(ax, x, points: list[tuple], k: int, label: str, **style) -> None:
        mean, sd = (np.array([p[i] or 0 for p in points]) for i in (0, 1))
        ax.plot(x, mean, color=colours[k], ls=("-", "--", "-.", ":")[k % 4], lw=1.2, label=label, **style)
        ax.fill_between(x, mean - sd, mean + sd, color=colours[k], alpha=0.2, lw=0)

    with plt.rc_context({"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42,
                         "figure.constrained_layout.use": True, "legend.frameon": False, "legend.handlelength": 2.8}):
        fig, ax = plt.subplots(figsize=(3.4, 1.2 + 0.32 * len(shown)))
        for i, c in enumerate(shown):
            ax.plot(c["deltas"], i + np.linspace(-0.2, 0.2, c["n"] + 2)[1:-1], "o", ms=3, color=colours[2], alpha=0.8)
            ax.plot(c["bootstrap_ci"] or (c["mean"],) * 2, [i, i], color=colours[0], lw=0.8)
            ax.plot([c["mean"]] * 2, [i - 0.28, i + 0.28], color=colours[1], lw=2.2)
        ax.axvline(0, **zero)
        ax.set_yticks(range(len(shown)), [f"{c['scale']} {c['arms']}\n{c['budget']}" for c in shown])
        ax.invert_yaxis()
        ax.set_xlabel("Δ NLL (nats per token)")
        save(fig, "figure2_effects", "Paired NLL differences: points are seeds, thick bars means, thin bars bootstrap "
             "95% intervals; below 0 the treatment is better.", shown)

        scales = list(dict.fromkeys(c["scale"] for c in shown))
        tall, wide = (len(scales) + 1) // 2, min(2, len(scales))
        fig, axes = plt.subplots(tall, wide, figsize=(3.4, 0.6 + 2 * tall), squeeze=False)
        drawn = []
        for ax, scale in zip(axes.flat, scales):
            here = [c for c in shown if c["scale"] == scale][:6]  # as many as there are colours
            drawn += here
            for k, c in enumerate(here, 1):
                path = [m for m in out["milestones"] if (m["scale"], m["arm"]) == (scale, c["arm"]) and m["tokens"]]
                for side, colour in (("control", 0), ("treatment", k))[k > 1:]:
                    band(ax, [m["tokens"] / 1e6 for m in path], [m[f"{side}_nll"] for m in path], colour,
                         c["arm" if colour else side], marker="o", ms=2.5)
            ax.set(title=scale, xlabel="tokens (M)", ylabel="NLL (nats per token)" if ax in axes[:, 0] else "")
            ax.legend(fontsize=5 if len(here) > 3 else None)
        save(fig, "figure3_milestones", f"NLL on the {out['split']} split: means over seeds, bands ±1 sd.", drawn)

        if reads := [c for c in shown if c["js"] and c["treatment"] not in SAME_AS_BLOCK][:7]:
            fig, ax = plt.subplots(figsize=(3.4, 2.6))
            for k, c in enumerate(reads):
                band(ax, range(1, len(c["js"])), c["js"][1:], k, f"{c['scale']} {c['arm']}")
            ax.set(xlabel="attention layer", ylabel="JS divergence (nats)", ylim=(0, None))
            ax.legend()
            save(fig, "figure4_js", "JS divergence of the reads of K and V: means over seeds, bands ±1 sd.", reads)

        c, pair = shown[0], shown[0]["runs"][0]
        logs = [read_metrics(run.path / "metrics.jsonl", samples=10 ** 9) for run in pair]
        curves = [{r["step"]: r["loss"] for r in log if r["kind"] == "train"} for log in logs]
        steps = np.array(sorted(curves[0].keys() & curves[1].keys()))
        bins = np.array_split(steps, min(100, len(steps))) if len(steps) else []
        x, means = [b.mean() for b in bins], [[np.mean([curve[s] for s in b]) for b in bins] for curve in curves]
        fig, (top, low) = plt.subplots(2, 1, figsize=(3.4, 3.4), sharex=True, height_ratios=(3, 2))
        for k, run in enumerate(pair):
            band(top, x, [(m, 0) for m in means[k]], k, run.arch)
        low.plot(x, np.subtract(means[1], means[0]), color=colours[2])
        low.axhline(0, **zero)
        top.set(ylabel="training loss (nats per token)")
        top.legend()
        low.set(xlabel="step", ylabel="difference")
        names = " and ".join(run.name for run in pair)
        save(fig, "training_curves", f"Training loss of {names} in {len(x)} bins; below, treatment - control.",
             [{**c, "n": 1, "seeds": c["seeds"][:1]}])
    return captions


@dataclasses.dataclass
class Flags:
    folders: list[str] = dataclasses.field(default_factory=list, metadata={"help": "folders of runs, or run folders"})
    control: str = flag("block", "the arm that the others are compared with")
    split: str = flag("val", "evaluation split", choices=("val", "test"))
    allow: str | None = flag(None, "comma list of settings in which the two runs of a pair may differ")
    json: bool = flag(False, "print JSON only")
    out: str | None = flag(None, "folder for tables (md, csv, tex, json) and figures (png, pdf)")
    strict: bool = flag(False, "refuse pairs that differ in backend, dtype, compile, device, versions or code")


def main(argv: list[str]) -> int:
    flags = parse_flags(Flags, argv, __doc__, positional="folders")
    if not flags.folders:
        raise BadInput("which runs? python stats.py runs/")
    allow = [k for k in (flags.allow or "").split(",") if k]
    out = analyse(flags.folders, flags.control, flags.split, allow, flags.strict)
    public = {k: [{n: v for n, v in c.items() if n != "runs"} for c in out[k]] for k in (
        "comparisons", "problems", "milestones", "crossed", "floor")}
    if flags.out:
        folder = Path(flags.out)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {"report.md": report(out, draw(out, folder) if out["comparisons"] else {}) + "\n",
                 "stats.json": to_json(public, indent=1) + "\n"}
        for name, t in tables(out).items():
            texts |= {f"{name}.tex": latex(*t)} if name.startswith(("table1", "table3")) else {}
            with atomic_file(folder / f"{name}.csv", "w") as f:
                csv.writer(f, lineterminator="\n").writerows(csv_rows(*t))
        for name, text in texts.items():
            with atomic_file(folder / name, "w") as f:
                f.write(text)
    print(to_json(public, indent=1) if flags.json else report(out, {}))
    return 1 if flags.strict and out["refused"] else 0


if __name__ == "__main__":
    run_script(main)
