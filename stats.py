"""Pair the runs that differ in nothing but the arm, and say what their differences support.

    python stats.py runs/                              # conclusions, one table of estimates, what was left out
    python stats.py runs/ --json                       # everything as JSON only
    python stats.py runs/ --out=report                 # also every table (md, csv, tex, json) and figure (png, pdf)
    python stats.py runs/ --control=plain              # any arm can be the control
    python stats.py runs/ --allow=lr --split=test      # each arm at its best lr, chosen on val, compared on test
    python stats.py runs/ --margin=0.005               # also: which arms differ from the control by less than that
    python stats.py runs/ --speed=rd=0.90:0.89:0.91    # also: what rd's 90% of the control's speed costs in equal time
    python stats.py runs/ --strict                     # refuse pairs that differ in backend, dtype, versions or code

A pair is two runs of one scale and seed, equal in every setting but the arm, at the same step of the same schedule.
Differences are NLL(treatment) - NLL(control) in nats per token: negative favours the treatment.
"""
from __future__ import annotations

import contextlib
import csv
import dataclasses
import datetime
import json
import math
import os
import re
import textwrap
import typing
from pathlib import Path

import numpy as np

from prepare import BadInput, atomic_file, did_you_mean, flag, parse_flags, read_json, run_script, to_json

# ---------------------------------------------------------------------------------------------------------
# Estimates: functions of differences alone. scipy.special is imported where it is used: it takes longer than the rest

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
    n, mean, sd = len(d), float(d.mean()), 0.0
    if n == 1:
        return Paired(n, mean)
    if d.min() == d.max():  # said apart, so that rounding makes no spread out of equal numbers
        mean = float(d[0])
        return Paired(n, mean, sd, (mean, mean), (mean, mean))
    if n <= 7:
        sums = np.zeros(1)
        for _ in range(n):
            sums = np.add.outer(sums, d).ravel()
    else:
        rng = np.random.default_rng(0)
        sums = np.concatenate([d[rng.integers(0, n, (5_000, n))].sum(1) for _ in range(20)])
    low, high = np.percentile(sums / n, [2.5, 97.5])
    sd = float(d.std(ddof=1))
    return Paired(n, mean, sd, t_interval(mean, sd, n), (float(low), float(high)))


def t_interval(mean: float, sd: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Student-t interval (low, high) of a mean of n values with sample sd `sd`."""
    from scipy import special
    half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * sd / math.sqrt(n)
    return mean - half, mean + half


def next_interval(mean: float, sd: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Prediction interval (low, high) of one further normal value: wider than that of the mean by sqrt(n + 1)."""
    return t_interval(mean, sd * math.sqrt(n + 1), n, level)


def t_test(mean: float, sd: float, n: int) -> float:
    """Two-sided p of a zero mean, paired t test."""
    from scipy import special
    return float(2 * special.stdtr(n - 1, -abs(mean) / (sd / math.sqrt(n))))


def equivalence_test(mean: float, sd: float, n: int, margin: float) -> float:
    """p of |mean| >= margin by two one-sided t tests: below 0.05 exactly where the 90% interval lies inside."""
    from scipy import special
    return float(special.stdtr(n - 1, -(margin - abs(mean)) / (sd / math.sqrt(n))))


def holm(p: typing.Sequence[float]) -> list[float]:
    """Holm's step-down adjustment of p values [m], in their order: one below 0.05 holds among all m at 5%."""
    adjusted, least = [0.0] * len(p), 0.0
    for rank, i in enumerate(np.argsort(p, kind="stable")):
        least = max(least, min(1.0, (len(p) - rank) * p[i]))
        adjusted[i] = least
    return adjusted


def sign_flip(deltas: typing.Sequence[float]) -> float | None:
    """Exact two-sided sign-flip p of a zero mean, at least 2 / 2^n; None beyond n = 20 (a million sign patterns)."""
    if len(deltas) > 20:
        return None
    sums = np.zeros(1)
    for x in deltas:
        sums = np.concatenate([sums + x, sums - x])
    tie = 1e-12 * np.abs(deltas).sum()  # the same sum, added in another order
    return float(np.mean(np.abs(sums) >= abs(sum(deltas)) - tie))


def power(n: int, effect: float) -> float:
    """Chance that a two-sided 5% paired t test of n normal differences finds a mean of `effect` standard deviations.

    By integration over the sample sd, given which the mean is normal: scipy's noncentral t gives up far out.
    """
    from scipy import special
    limit, share = special.stdtrit(n - 1, 0.975), (np.arange(20_000) + 0.5) / 20_000
    sd = np.sqrt(special.chdtri(n - 1, share) / (n - 1))  # equally likely sample standard deviations
    shift = effect * math.sqrt(n)
    return float(np.mean(special.ndtr(shift - limit * sd) + special.ndtr(-shift - limit * sd)))


def pairs_needed(sd: float, difference: float = 0.01, wanted: float = 0.8) -> int:
    """Pairs at which a two-sided 5% paired t test finds `difference` with power `wanted`."""
    from scipy import special
    if not sd:
        return 2
    effect = difference / sd
    n = max(2, int(((special.ndtri(0.975) + special.ndtri(wanted)) / effect) ** 2))  # as if the sd were known: too few
    while power(n, effect) < wanted:
        n += 1
    return n


# ---------------------------------------------------------------------------------------------------------
# What pairs with what

# A difference in any setting refuses a pair, also in one that this file has never heard of, but for these:
# the same function rounded otherwise is shown beside the pair, and refused by --strict;
MARKED = ("backend", "dtype", "residual_dtype", "compile", "micro_batch", "ranks", "threads", "deterministic", "device",
          "device_name", "kernel_sha256", "torch", "triton", "resumed", "evaluation_backend")
# bookkeeping, what follows from other settings, and where in its schedule a run was stopped, are not compared.
OWN = frozenset((
    "name", "arch", "arm", "tag", "out", "data", "command", "started", "finished", "host", "pid", "platform", "python",
    "numpy", "cuda", "driver", "omp_wait_policy", "git_commit", "git_dirty", "git_diff", "probe", "backend_reason",
    "dtype_reason", "milestones", "stop_steps", "stop_tokens", "max_tokens", "primary", "margin", "ckpt_every", "keep",
    "keep_milestones", "repeat_data", "wandb", "force", "workers", "eval_batch", "benchmark", "rounds", "dry_run"))
COUNTS = ("n_params", "flops", "arm_")  # beginnings of what differs between arms by design
OF_A_SEED = ("seed", "init_sha256", "data_order")  # what differs between the seeds of one setting
CROSSED = ("backend", "dtype", "residual_dtype", "device")  # a study that runs both arms in two of these is crossed
MATCHED = (*CROSSED, "evaluation_backend")  # beside the full estimate, one without pairs that differ in these
WORDS = {"data_fingerprint": "data", "tokenizer_sha256": "tokenizer", "init_sha256": "starting weights", "data_order":
         "order of the data", "max_steps": "schedule length", "freeze": "frozen parameters", "eval_tokens":
         "evaluation tokens"}


def as_text(value) -> str:
    """A setting's value, at most 99 characters."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.7g}"
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 99 else text[:96] + "..."


def pair_check(a: dict, b: dict, allow: typing.Collection[str] = ()) -> tuple[list[str], list[str]]:
    """Whether runs with the configs `a` and `b` may stand as a pair: (what refuses it, what only marks it).

    Each difference is a line with both values. Settings in `allow` only mark, and say so. Arms, parameter counts
    and where a run stopped are not compared; code is compared by what it does (`code_difference`).
    """
    refused, marked = [], []
    for key in sorted((a.keys() | b.keys()) - OWN):
        if key.startswith(COUNTS) or alike(key, a, b):
            continue
        word = f"{WORDS[key]} ({key})" if key in WORDS else key
        if (key in a) != (key in b) and key != "resumed":  # a run that was never resumed has no such line
            lacking = b if key in a else a
            marked.append(f"{word} is not recorded by {lacking.get('name') or lacking.get('arch')}")
            continue
        line = f"{word}: {as_text(a.get(key))} against {as_text(b.get(key))}"
        if key in allow:
            marked.append(line + " (allowed)")
        elif key in MARKED:
            marked.append(line)
        else:
            refused.append(line)
    if code := code_difference(a, b):
        marked.append(f"code: {code} (allowed)" if "probe" in allow else f"code: {code}")
    return refused, marked


def alike(key: str, a: dict, b: dict) -> bool:
    """Whether two configs agree in a setting, or their difference in it can have had no effect."""
    x, y = a.get(key), b.get(key)
    if x == y and (key in a) == (key in b):
        return True
    if key == "kernel_sha256":  # it ran in one of them at most
        return not a.get("backend") == b.get("backend") == "fused"
    if key == "device_name":
        return not a.get("device") == b.get("device") == "cuda"
    return key == "init_from" and bool(x and y and a.get("init_sha256"))  # two paths: the starting weights are compared


def code_difference(a: dict, b: dict) -> str | None:
    """How the code of two runs differs, by the probes both stored of block or of either arm.

    A probe is what the code computes on a fixed tiny model. It holds `block` and the run's own arm, in float64, and
    agrees to 1e-9 of each number; an old one, known by its lack of `data_order`, holds every arm in float32, to 1e-5.
    An arm that is newer than one of the runs is no difference; without probes, one clean commit is as good.
    """
    probes = [c["probe"] if isinstance(c.get("probe"), dict) else {} for c in (a, b)]
    digests = [c.get("data_order", p.get("data_order")) for c, p in zip((a, b), probes)]
    tolerance = 1e-5 if None in digests else 1e-9
    arms = {str(c.get("arch")) for c in (a, b)}
    arms = sorted(arms | {arm.split(":")[0] for arm in arms})
    shared = [arm for arm in dict.fromkeys(["block", *arms]) if all(arm in p for p in probes)]
    for arm in shared:
        with contextlib.suppress(TypeError, ValueError):  # nulls, lists of two lengths: they do not compare
            x, y = (np.asarray(p[arm], dtype=np.float64) for p in probes)
            if x.size and (np.abs(x - y) <= tolerance * np.maximum(np.abs(x), np.abs(y))).all():  # false for NaN
                continue
        return f"probe of {arm}: {as_text(probes[0][arm])} against {as_text(probes[1][arm])}"
    commits = {(as_text(c.get("git_commit")), bool(c.get("git_dirty"))) for c in (a, b)}
    clean = len(commits) == 1 and all(commit != "none" and not dirty for commit, dirty in commits)
    return None if shared or clean else f"no probe of {' or '.join(arms)} in both runs, nor one clean commit"


def launch_report(config: dict, runs_folder: str | Path, control: str = "block") -> list[str]:
    """Lines for a run about to start: which runs in `runs_folder` it pairs with, what stands against the others, and
    what that means for the table. Reads their config.json alone."""
    arm, place, lines, partners = config.get("arch"), (config.get("scale"), config.get("seed")), [], 0
    for path in sorted(Path(runs_folder).glob("*/config.json")):
        name = path.parent.name
        try:
            other = read_json(path)
        except (BadInput, RecursionError):  # stats.py itself names what it cannot read
            continue
        if name == config.get("name") or (other.get("scale"), other.get("seed")) != place:
            continue
        refused, marked = pair_check(other, config)
        if other.get("arch") == arm:
            if not refused:
                lines.append(f"a rerun of {name}: the table takes one, both show the noise")
        elif refused and control in (arm, other.get("arch")):
            lines.append(f"not with {name}: {'; '.join(refused)}")
        elif control in (arm, other.get("arch")):
            partners += 1
            lines.append(f"with {name}")
            if marked:
                lines[-1] += f", marked (--strict refuses it): {'; '.join(marked)}"
    if partners:
        return lines + ["the table gains a pair once both runs have reached a milestone"]
    other_arm = "another arm" if arm == control else control
    return lines + [f"in no table until {other_arm} has a run with these settings, scale {place[0]}, seed {place[1]}"]


# ---------------------------------------------------------------------------------------------------------
# Run folders. Whatever cannot be used is a ValueError with the reason: `load_folders` names the run and goes on

CONFIG = dict(scale=str, arch=str, seed=int, max_steps=int)  # what a run must record, and
CONFIG_TOO = dict(  # what it may
    name=str, backend=str, data=str, device=str, device_name=str, stop_steps=int, tokens_per_step=int, n_params=int,
    n_layer=int, n_embd=int, n_head=int, block_layers=int, context=int, vocab_size=int, batch_size=int, micro_batch=int,
    lr=float, mlp_ratio=float)
RECORDS = {"train": (dict(step=int, loss=float), dict(tokens_per_s=float, peak_memory_bytes=float)),
           "eval": (dict(step=int, nll=float), dict(tokens=int, bits_per_byte=float, js_mean=float, js=list,
                                                    js_of_mean=list, data_fingerprint=str)),
           "end": (dict(status=str), dict(step=int, why=str))}
KINDS = {int: "a whole number of at most 2^63", float: "a finite number", str: "text", list: "a list of numbers"}


def is_a(kind: type, value) -> bool:
    """Whether a value from JSON is what a report can compute with."""
    if kind is str:
        return isinstance(value, str) and value.isprintable()
    if kind is list:
        return isinstance(value, list) and all(is_a(float, x) for x in value)
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        return False
    return abs(value) < 2 ** 63 if kind is int else math.isfinite(value) and abs(value) < 1e300


def checked(record: dict, required: dict[str, type], optional: dict[str, type], what: str) -> dict:
    """`record`, where it holds what is required and nothing of a wrong type. Raises ValueError."""
    lacking = [key for key in required if record.get(key) in (None, "")]
    if lacking:
        raise ValueError(f"{what} lacks {', '.join(lacking)}")
    for key, kind in (required | optional).items():
        if record.get(key) is not None and not is_a(kind, record[key]):
            raise ValueError(f"{what}: {key} is {as_text(record[key])}, not {KINDS[kind]}")
    return record


def checked_evaluation(record: dict, what: str) -> dict:
    required, optional = RECORDS["eval"]
    checked(record, required, optional, what)
    if not 0 <= record["nll"] < 700:  # e^700 overflows
        raise ValueError(f"{what}: the NLL at step {record['step']} is {record['nll']}")
    return record


def read_metrics(path: Path, samples: int | None = 64) -> list[dict]:
    """The records of a metrics.jsonl: every one but the train ones, and about `samples` of those (the paper's length
    makes 10 MB of them; None: all), first and second among them. Raises ValueError at a line that is no such record; a
    last line without its end is still being written. Each gets its `line`, counted from 1."""
    data, records = path.read_bytes(), []
    text = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])[:len(ends)]
    stride = 1 if samples is None else max(1, len(ends) // samples)
    torn = np.flatnonzero((text[starts] != ord("{")) | (text[ends - 1] != ord("}")))  # read for their error
    others = np.searchsorted(ends, [m.start() for m in re.finditer(rb'"(?:eval|end)"', data)])
    wanted = {0, 1, *range(0, len(ends), stride), *range(len(ends))[-3:], *others.tolist(), *torn.tolist()}
    for i in sorted(wanted):
        if i >= len(ends):
            break
        what = f"line {i + 1} of {path.name}"
        try:
            record = json.loads(data[starts[i]:ends[i]])
            kind = record["kind"]
            if not isinstance(kind, str):
                raise ValueError
        except (ValueError, TypeError, KeyError, RecursionError):
            raise ValueError(f"corrupt: {what} is not a record") from None
        if kind == "eval":
            checked_evaluation(record, what)
        elif kind in ("train", "end"):
            checked(record, *RECORDS[kind], what)
        records.append({**record, "line": i + 1})
    return records


def lost_lines(records: list[dict]) -> int:
    """How many steps a log lacks that begins with consecutive ones, as train.py's does: 0 where none can be told."""
    train = [r for r in records if r["kind"] == "train"]
    if len(train) < 2 or train[1]["step"] != train[0]["step"] + 1:
        return 0
    others = sum(r["kind"] != "train" and r["line"] < train[-1]["line"] for r in records)
    return train[-1]["step"] - (train[-1]["line"] - others)


def read_evaluations(folder: Path, name: str, split: str) -> tuple[dict[int, dict], list[str]]:
    """{step: evaluation} of a run's eval/<split>-<step>[-...].json, and what is wrong with the files left out.

    A file says its run, split and step; `name` is the run's in config.json. One on another backend than training's has
    the longer name, and gives way to the run's own."""
    found, wrong = {}, []
    for path in sorted((folder / "eval").glob(f"{split}-*.json"), key=lambda p: (-len(p.name), p.name)):
        step = re.fullmatch(rf"{split}-(\d+)(-.*)?\.json", path.name)
        try:
            if not step:
                raise ValueError(f"its name is not {split}-<step>.json")
            record = read_json(path)
            for key, want in (("run", name), ("split", split), ("step", int(step[1]))):
                if record.get(key) != want:
                    raise ValueError(f"it says {key} {as_text(record.get(key))}, not {as_text(want)}")
            found[record["step"]] = checked_evaluation(record, "it")
        except (BadInput, ValueError, OSError, RecursionError) as e:
            wrong.append(f"eval/{path.name} left out: {plain_reason(e, folder)}")
    return found, wrong


class Run:
    """A run folder: its config, status, step of its last record, evaluations by step, speed and memory. Raises what
    tells why the run cannot be used; `remarks` says what is wrong with one that can."""

    def __init__(self, path: Path, name: str, split: str):
        self.path, self.name = path, name
        self.config = {"name": name, **checked(read_json(path / "config.json"), CONFIG, CONFIG_TOO, "config.json")}
        self.arch, self.scale, self.seed = (self.config[k] for k in ("arch", "scale", "seed"))
        self.max_steps, self.tokens_per_step = self.config["max_steps"], self.config.get("tokens_per_step")
        self.end = self.config.get("stop_steps") or self.max_steps  # where the run was to stop
        records = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
        last = records[-1] if records else {}
        self.last = max((r.get("step", 0) for r in records), default=0)
        self.status = last["status"] if last.get("kind") == "end" else "unfinished"
        if self.status == "diverged":
            why = f" ({last['why']})" if last.get("why") else ""
            raise ValueError(f"diverged at step {self.last}{why}")
        self.val = {r["step"]: r for r in records if r["kind"] == "eval"}
        stored, self.remarks = read_evaluations(path, self.config["name"], split)
        for step, logged in self.val.items() if split == "val" else ():
            again = stored.get(step, logged)
            if again["nll"] != logged["nll"] and again.get("backend") in (None, self.config.get("backend")):
                self.remarks.append(f"eval/val-{step:06d}.json left out: it says NLL {again['nll']}, the log "
                                    f"{logged['nll']}")
        self.evals = {**stored, **self.val} if split == "val" else stored  # step -> evaluation on the split
        for step, record in self.evals.items():
            data = self.config.get("data_fingerprint")
            if record.get("data_fingerprint", data) != data:
                raise ValueError(f"evaluated at step {step} on other data ({record['data_fingerprint']}) than it was "
                                 "trained on")
        if not self.evals and split == "val":
            raise ValueError(f"no evaluation yet, at step {self.last}")
        if not self.evals:
            raise ValueError(f"no {split} evaluation: python eval.py {path} --split={split}")
        if lost := lost_lines(records):
            self.remarks.append(f"metrics.jsonl lacks {lost:,} of its {self.last:,} steps")
        if self.status != "complete" or self.last < self.end:
            self.remarks.append(f"{self.status}: at step {self.last} of {self.end}")
        speeds = [r["tokens_per_s"] for r in records if r.get("tokens_per_s")]
        self.speed = float(np.median(speeds)) if speeds else None
        self.memory = max((r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")), default=None)

    def tokens(self, step: int) -> int | None:
        return step * self.tokens_per_step if self.tokens_per_step else self.evals[step].get("tokens")

    def windows(self, split: str, step: int) -> np.ndarray | None:
        """Mean NLL of each evaluation window, float64 [windows], where eval/ has them and they give the run's NLL."""
        with contextlib.suppress(OSError, ValueError, EOFError, MemoryError):
            w = np.load(self.path / "eval" / f"{split}-{step:06d}.npy", allow_pickle=False)
            if w.ndim == 1 and w.dtype.kind == "f" and len(w) > 1 and abs(w.mean() - self.evals[step]["nll"]) < 1e-5:
                return w
        return None


class Problems(list):
    """What --json calls `problems`: {run, why} of each run left out or pair refused, and what else is wrong."""

    def add(self, run: str, why: str) -> None:
        if {"run": run, "why": why} not in self:
            self.append({"run": run, "why": why})

    def of(self, *beginnings: str) -> list[dict]:
        return [p for p in self if p["why"].startswith(beginnings)]


def plain_reason(e: Exception, folder: Path) -> str:
    if isinstance(e, RecursionError):
        return "nested too deep to be read"
    return getattr(e, "strerror", None) or str(e).replace(f"{folder}/", "")


def read_plan(path: Path, names: typing.Collection[str], problems: Problems) -> tuple[list[dict], list[str]]:
    """The plans in a plan.json, and the planned runs that `names` lacks; says which runs nobody planned."""
    plans = []
    try:
        entries = read_json(path)["plans"]
        for i, plan in enumerate(entries):
            if not isinstance(plan, dict) or not isinstance(plan.get("runs"), list) or not all(
                    is_a(str, name) for name in plan["runs"]):
                raise ValueError(f"plan {i + 1} names no runs")
            plans.append(plan)
    except (BadInput, ValueError, TypeError, KeyError, RecursionError) as e:
        reason = "no list of plans" if isinstance(e, (TypeError, KeyError)) else plain_reason(e, path.parent)
        problems.add("plan.json", f"cannot be read ({reason}): planned and missing runs are not known")
        return [], []
    planned = {name for plan in plans for name in plan["runs"]}
    missing = sorted(planned - set(names))
    for name in missing:
        problems.add(name, "planned, and missing")
    for name in sorted(set(names) - planned):
        problems.add(name, "not planned: plan.json lacks it")
    return plans, missing


def is_run(folder: Path) -> bool:
    try:
        return any((folder / mark).exists() for mark in ("config.json", "metrics.jsonl", "ckpt.pt"))
    except OSError:  # it may not be read: named where its config.json is
        return True


def find_folders(arguments: list[str], problems: Problems) -> tuple[dict[Path, str], dict[Path, set[str]]]:
    """Run folders {path: name} in what the command line names (folders of runs, runs, plan.json, as `runs/*` gives),
    and {plan.json: names of the runs beside it}. What is no run is said and skipped; BadInput where there is none."""
    found, homes, plans = {}, {}, {}
    for path in map(Path, arguments):
        if not path.exists():
            raise BadInput(f"{path}: no such folder; give the folder that train.py writes its runs to")
        if path.is_file() and path.name == "plan.json":
            plans[path.resolve()] = set()
            continue
        try:
            if not path.is_dir():
                raise ValueError("not a folder")
            inside = [path] if is_run(path) else [p for p in sorted(path.iterdir()) if p.is_dir() and is_run(p)]
            inside = [p for p in inside if not p.name.startswith(".") or p is path]
            if inside != [path] and (path / "plan.json").exists():
                plans[(path / "plan.json").resolve()] = set()
            elif not inside:
                raise ValueError("holds no runs")
        except (OSError, ValueError) as e:
            problems.add(str(path), f"skipped: {plain_reason(e, path)}")
            continue
        for p in inside:
            name = os.fsencode(p.resolve().name).decode("utf-8", "backslashreplace")
            found.setdefault(p.resolve(), name if name not in found.values() else str(p))
            homes.setdefault((p.absolute().parent / "plan.json").resolve(), set()).add(name)
    if not found and not plans:
        raise BadInput(f"{', '.join(arguments)} holds no runs: a run is a folder with config.json and metrics.jsonl")
    return found, {path: homes.get(path, set()) for path in plans}


def load_folders(arguments: list[str], split: str, problems: Problems) -> tuple[list[Run], list[str], list[dict]]:
    """The usable runs, the names of those still to come, and the plans. One bad folder is named and left out."""
    found, plan_files = find_folders(arguments, problems)
    runs, coming, plans = [], [], []
    for path, names in plan_files.items():
        entries, missing = read_plan(path, names, problems)
        plans += entries
        coming += missing
    for path, name in sorted(found.items(), key=lambda item: item[1]):
        try:
            run = Run(path, name, split)
        except (BadInput, ValueError, OSError, RecursionError) as e:
            reason = plain_reason(e, path)
            problems.add(name, f"left out: {reason}")
            if reason.startswith("no "):  # no evaluation: not yet, or not on this split
                coming.append(name)
            continue
        runs.append(run)
        for remark in run.remarks:
            problems.add(name, remark)
    return runs, coming, plans


# ---------------------------------------------------------------------------------------------------------
# From runs to comparisons

# What the paper found for rd - block after 61,036 steps (section 5.1, appendix D)
PAPER = {"S": dict(mean=-0.030118, sd=0.003036, t_ci=(-0.033887, -0.026348), bootstrap_ci=(-0.032828, -0.028064),
                   change=(-0.0301, 0.0030), ppl_reduction=0.0297, won="5/5", n=5),
         "M": dict(mean=-0.024691, sd=0.011983, t_ci=(-0.039570, -0.009812), bootstrap_ci=(-0.034742, -0.016267),
                   change=(-0.0247, 0.0120), ppl_reduction=0.0243, won="5/5", n=5)}
SAME_AS_BLOCK = {
    "average": "Average is degenerate: its two queries start equal, get equal gradients and stay equal, so it is "
               "block up to rounding and clipping, a noise floor; q_kv, k_qv, q_k_v test parameters and two routes.",
    "tied": "Tied computes block's function with block's parameters: a noise floor."}


class Pair(typing.NamedTuple):
    """Two runs that differ in the arm, and what marks them at each step at which they may be compared."""
    control: Run
    treatment: Run
    marks: dict[int, list[str]]

    def confounds(self, step: int) -> list[str]:
        """The settings that mark the pair, but for those that the user allowed."""
        marks = [m for m in self.marks[step] if not m.endswith("(allowed)")]
        return sorted({re.split(r" \(|: | is not recorded", m)[0] for m in marks})


def analyse(folders: list[str], control: str = "block", split: str = "val", allow: typing.Collection[str] = (),
            strict: bool = False, primary: str | None = None, margin: float | None = None, speed: str | None = None
            ) -> dict:
    """All that tables and figures show: `comparisons` (each arm against the control, at the last step that a pair has
    reached), `milestones` (the same at every step), `trends` (how a difference changes between milestones), `crossed`
    (arm by backend), `floor` (differences that are noise), `problems`."""
    problems = Problems()
    out = dict(control=control, split=split, comparisons=[], milestones=[], trends=[], crossed=[], floor=[],
               problems=problems)
    runs, coming, plans = load_folders(folders, split, problems)
    check_choices(runs, control, allow, primary)
    speeds = read_speeds(speed, control)
    runs = without_copies(runs, problems)
    groups, choices = choose_settings(group_runs(runs, allow), allow, split, problems)
    used = set()
    for group in groups:
        if group[0].arch == control:
            continue
        pairs = find_pairs(group, groups, control, allow, strict, problems)
        variants = split_variants(pairs, [r for g in groups for r in g])
        cells = {label: {step: best_pairs(some, step) for step in sorted({s for p in some for s in p.marks})}
                 for label, some in variants.items()}
        for label, by_step in cells.items():
            used |= {r.name for best in by_step.values() for p in best.values() for r in p[:2]}
            end = max(by_step)
            rows = [compare(list(best.values()), step, split, step == end, label) for step, best in by_step.items()]
            out["milestones"] += rows
            trends = [trend(by_step, a, b, label) for a, b in spans(list(by_step))]
            out["trends"] += [t for t in trends if t]
            row = rows[-1]
            row["trend"] = trends[-1] if trends else None
            row["waiting"], row["missing"] = not_there(row, variants[label], coming, problems)
            row["interim"] = bool(row["waiting"])
            row["equal_time"] = equal_time(row, speeds)
            mine = [(control, row["scale"]), (row["treatment"], row["scale"])]
            row["notes"] = [text for arm, scale, text in choices if (arm, scale) in mine]
            row["notes"] += [SAME_AS_BLOCK[arm] for arm in (row["treatment"], control) if arm in SAME_AS_BLOCK]
            out["comparisons"].append(row)
        labels = list(cells)
        crossings = [interaction(cells[labels[0]], cells[label], labels[0], label) for label in labels[1:]]
        out["crossed"] += [row for row in crossings if row]
    name_unused(groups, used, problems)
    out["floor"] = reruns(groups, split) + [c for c in out["comparisons"] if {c["control"], c["treatment"]} <= {
        "block", *SAME_AS_BLOCK}]
    judge(out["comparisons"], plans, primary)
    test_equivalence(out["comparisons"], plans, margin)
    for c in out["comparisons"]:
        c["evidence"] = "\n".join(conclusion(c))
    return out


def check_choices(runs: list[Run], control: str, allow: typing.Collection[str], primary: str | None) -> None:
    """Raises BadInput for an arm or a setting that no run has."""
    arms, settings = {r.arch for r in runs}, {k for r in runs for k in r.config} - {"scale", "seed", "arch"}
    for word, arm in (("control", control), ("primary", primary)):
        if runs and arm is not None and arm not in arms | {"block"}:
            raise BadInput(f"--{word}={arm}: the arms here: {', '.join(sorted(arms))}" + did_you_mean(arm, arms))
    for key in allow:
        if runs and key not in settings:
            raise BadInput(f"--allow={key}: not a setting in which two runs can differ" + did_you_mean(key, settings))


def without_copies(runs: list[Run], problems: Problems) -> list[Run]:
    """The runs but for those whose every NLL is that of another seed."""
    seen, kept = {}, []
    for r in runs:
        o = seen.setdefault((r.scale, r.arch, r.evals[max(r.evals)]["nll"]), r)
        if o.seed != r.seed and all(r.evals[s]["nll"] == o.evals[s]["nll"] for s in r.evals.keys() & o.evals.keys()):
            problems.add(r.name, f"refused: its NLLs equal those of {o.name} to the last digit, though the seeds are "
                         f"{o.seed} and {r.seed}: a copied folder, or a seed without effect")
        else:
            kept.append(r)
    return kept


def group_runs(runs: list[Run], allow: typing.Collection[str]) -> list[list[Run]]:
    """Runs of one arm at one setting, whatever the seed; by size, `rd` before the other arms."""
    groups, size = [], {r.scale: r.config.get("n_params") or 0 for r in runs}
    for r in sorted(runs, key=lambda r: (size[r.scale], r.scale, r.arch != "rd", r.arch, r.name)):
        for group in groups:
            configs = [{**x.config, **dict.fromkeys(OF_A_SEED, 0)} for x in (group[0], r)]
            if group[0].arch == r.arch and not pair_check(*configs, allow)[0]:
                group.append(r)
                break
        else:
            groups.append([r])
    return groups


def choose_settings(groups: list[list[Run]], allow: typing.Collection[str], split: str, problems: Problems
                    ) -> tuple[list[list[Run]], list[tuple[str, str, str]]]:
    """With settings allowed to differ: of each group the runs at the value of them that is best on validation, over the
    seeds and at the last step that all values share; and what to say of it: [(arm, scale, sentence)]."""
    keys = [k for k in allow if k not in MARKED and k != "probe"]
    if not keys:
        return groups, []
    what, kept, notes, grids = "/".join(keys), [], [], {}
    for group in groups:
        values: dict[str, list[Run]] = {}
        for r in group:
            values.setdefault("/".join(as_text(r.config.get(k)) for k in keys), []).append(r)
        arm, scale = group[0].arch, group[0].scale
        grids.setdefault(scale, {})[arm] = len(values)
        seeds = set.intersection(*({r.seed for r in rs} for rs in values.values()))
        steps = set.intersection(*({s for r in rs for s in r.val if r.seed in seeds} for rs in values.values()))
        if len(values) == 1 or not steps:
            kept.append(group)
            continue
        at = max(steps)
        score = {v: float(np.mean([r.val[at]["nll"] for r in rs if r.seed in seeds and at in r.val]))
                 for v, rs in values.items()}
        best = min(values, key=lambda v: (score[v], v))
        kept.append(values[best])
        ranking = ", ".join(f"{v} (NLL {score[v]:.5f})" for v in sorted(values, key=numeric))
        text = f"{arm}: {what} = {best}, chosen on val as the best of {ranking}, over seeds {listed(seeds)}"
        if best in (min(values, key=numeric), max(values, key=numeric)):
            text += "; it lies at the edge of what was tried, so a better one may lie beyond"
        notes.append((arm, scale, text + "."))
        for r in group:
            if r not in values[best]:
                problems.add(r.name, f"left out: {what} = {best} is better on validation")
    for scale, tried in grids.items():
        for arm, n in tried.items():
            if n == 1 and max(tried.values()) > 1:
                notes.append((arm, scale, f"Only one {what} was tried for {arm}, and several for another arm: what is "
                                          f"compared is also how well each was tuned."))
        if split == "val" and max(tried.values()) > 1:
            text = (f"{what} was chosen and is compared on the same split, which flatters the arm with more tries: "
                    "compare with --split=test.")
            notes += [(arm, scale, text) for arm, n in tried.items() if n > 1]
    return kept, notes


def numeric(text: str) -> tuple:
    """Sorts numbers by size and other values after them."""
    try:
        return 0, float(text), text
    except ValueError:
        return 1, 0.0, text


def shared_steps(c: Run, t: Run, allow: typing.Collection[str], strict: bool) -> tuple[dict[int, list[str]], list[str]]:
    """{step: marks} at which `c` and `t` may be compared, and what stands against them where there is none."""
    why = pair_check(c.config, t.config, allow)[0]
    if why:
        return {}, why
    steps, why = {}, ["no step at which both were evaluated"]
    for step in sorted(c.evals.keys() & t.evals.keys()):
        both = []
        for r in (c, t):
            found = {f"evaluation_{k}": r.evals[step][k] for k in (
                "eval_tokens", "windows", "backend", "data_fingerprint") if k in r.evals[step]}
            both.append(found | r.config)
        refused, marked = pair_check(*both, allow)
        if strict:
            refused += [m for m in marked if not m.endswith("(allowed)")]
        if refused:
            why = refused
        else:
            steps[step] = marked
    return steps, why


def find_pairs(group: list[Run], groups: list[list[Run]], control: str, allow: typing.Collection[str], strict: bool,
               problems: Problems) -> list[Pair]:
    """Every pair of a run of the group with a run of the control, also those that share no evaluation yet."""
    pairs = []
    for t in group:
        tried = []
        for c in (c for g in groups for c in g):
            if (c.arch, c.scale, c.seed) == (control, t.scale, t.seed):
                steps, why = shared_steps(c, t, allow, strict)
                tried.append((len(why), c.name, why, Pair(c, t, steps)))
        good = [pair for *_, pair in tried if pair.marks]
        pairs += good or [pair for *_, why, pair in tried if why == ["no step at which both were evaluated"]]
        if not tried:
            problems.add(t.name, f"no partner: no usable run of {control} at scale {t.scale}, seed {t.seed}")
        elif not good:
            _, near, why, _ = min(tried, key=lambda x: x[:2])
            problems.add(t.name, f"refused with {near}: {'; '.join(why)}")
    return pairs


def split_variants(pairs: list[Pair], runs: list[Run]) -> dict[str, list[Pair]]:
    """{label: pairs}. One comparison, as a rule, whose label holds the settings that tell it from others of its arm;
    where a seed ran in two of the CROSSED settings, a comparison for each of them."""
    pairs = [p for p in pairs if p.marks] and pairs
    if not pairs:
        return {}
    arm = pairs[0].treatment
    siblings = [setting_words(r) for r in runs if (r.scale, r.arch) == (arm.scale, arm.arch)]
    words = [w for w in setting_words(arm) if not all(w in s for s in siblings)]
    variant_of = lambda p: tuple(str(p.treatment.config.get(k)) for k in CROSSED)
    variants = sorted({variant_of(p) for p in pairs if p.marks}, key=lambda v: (v[0] != "reference", v))
    seeds_twice = {(variant_of(p), p.treatment.seed) for p in pairs}
    if len(seeds_twice) == len({seed for _, seed in seeds_twice}):
        return {" ".join(words): pairs}
    words = [w for w in words if not w.startswith(CROSSED)]
    labels = {v: [x for i, x in enumerate(v) if any(o[i] != x for o in variants)] + words for v in variants}
    return {" ".join(label): [p for p in pairs if variant_of(p) == v] for v, label in labels.items()}


def setting_words(run: Run) -> list[str]:
    """The settings that a run's name carries: `nano-rd-s123-lr0.002-b16` has lr0.002 and b16."""
    return run.name.partition(f"-s{run.seed}")[2].split("-")[1:]


def best_pairs(pairs: list[Pair], step: int) -> dict[int, Pair]:
    """{seed: pair} at a step: the least marked one, then that of the longest runs."""
    def order(p: Pair) -> tuple:
        return len(p.marks[step]), -p.control.last, -p.treatment.last, p.control.name, p.treatment.name
    best = {}
    for p in sorted((p for p in pairs if step in p.marks), key=order):
        best.setdefault(p.treatment.seed, p)
    return dict(sorted(best.items()))


def not_there(row: dict, pairs: list[Pair], coming: list[str], problems: Problems) -> tuple[list[str], list[str]]:
    """What the comparison `row` lacks: runs that may still come, or lost the evaluation that the others have, and runs
    that were left out, with the reason."""
    waiting = {r.name for p in pairs for r in p[:2] if r.status != "complete"}
    for r in (r for p in pairs if p.treatment.seed not in row["seeds"] for r in p[:2]):
        if row["step"] in r.evals:
            continue
        if r.end >= row["step"]:
            waiting.add(r.name)
            if r.status == "complete":  # of an unfinished run it is said already
                problems.add(r.name, f"no evaluation at step {row['step']}: seed {r.seed} is missing there")
        else:
            problems.add(r.name, f"ends at step {r.end}: seed {r.seed} is not in the comparison at step {row['step']}")
    arms = [arm.replace(":", "_").replace("=", "") for arm in (row["control"], row["treatment"])]
    mine = tuple(f"{row['scale']}-{arm}-s" for arm in arms)
    waiting |= {name for name in coming if name.startswith(mine)}
    lost = [f"{p['run']} ({p['why'].partition(': ')[2]})" for p in problems.of("left out")
            if p["run"].startswith(mine) and p["run"] not in waiting and "better on validation" not in p["why"]]
    return sorted(waiting), lost


def name_unused(groups: list[list[Run]], used: set[str], problems: Problems) -> None:
    named = used | {p["run"] for p in problems.of("left out", "refused", "no partner")}
    for group in groups:
        for r in group:
            twin = next((o.name for o in group if o is not r and o.seed == r.seed and o.name in used), None)
            if r.name in named:
                continue
            problems.add(r.name, f"duplicate of {twin}, which the table takes: same arm, seed and settings" if twin else
                         "no partner: no run of another arm with its scale, seed and settings")


def reruns(groups: list[list[Run]], split: str) -> list[dict]:
    """Comparisons of a run with another of its arm, seed and setting: what two trainings differ by."""
    found = []
    for group in groups:
        for r in group:
            for o in group:
                if o.seed == r.seed and o.name > r.name and o.evals.keys() & r.evals.keys():
                    step = max(o.evals.keys() & r.evals.keys())
                    found.append(compare([Pair(r, o, {step: pair_check(r.config, o.config)[1]})], step, split))
    return found


def interaction(first: dict, second: dict, first_label: str, second_label: str) -> dict | None:
    """Arm by backend: how the arms' difference changes from one variant to another, at the last step and over the
    seeds where both arms ran in both; None where there is none. `first`, `second`: {step: {seed: pair}}."""
    for step in sorted(first.keys() & second.keys(), reverse=True):
        sides = first[step], second[step]
        one_backend = lambda p: all(p.control.config.get(k) == p.treatment.config.get(k) for k in CROSSED)
        seeds = [s for s in sides[0] if s in sides[1] and one_backend(sides[0][s]) and one_backend(sides[1][s])]
        if not seeds:
            continue
        nll = np.array([[[r.evals[step]["nll"] for r in side[seed][:2]] for seed in seeds] for side in sides])
        deltas, shifts = nll[..., 1] - nll[..., 0], nll[1] - nll[0]  # [variant, seed], [seed, arm]
        c, t, _ = sides[0][seeds[0]]
        est = paired(deltas[1] - deltas[0])
        return {"scale": t.scale, "arms": f"{t.arch} - {c.arch}", "control": c.arch, "treatment": t.arch, "step": step,
                "budget": count(t.tokens(step)), "seeds": seeds, "first": first_label, "second": second_label,
                "first_change": spread(deltas[0]), "second_change": spread(deltas[1]),
                "control_shift": spread(shifts[:, 0]), "treatment_shift": spread(shifts[:, 1]),
                "interaction": est.mean, **est._asdict()}
    return None


def spans(steps: list[int]) -> list[tuple[int, int]]:
    """Milestones between which a trend is tested: neighbours, and last the first with the last."""
    pairs = list(zip(steps, steps[1:]))
    return pairs + [(steps[0], steps[-1])] if len(steps) > 2 else pairs


def trend(cells: dict[int, dict[int, Pair]], start: int, end: int, label: str) -> dict | None:
    """Change of the difference from step `start` to `end`, by seed, over the same runs at both."""
    pairs = [p for seed, p in cells[end].items() if cells[start].get(seed, (None,))[:2] == p[:2]]
    if not pairs or not start:
        return None
    deltas = np.array([[p.treatment.evals[s]["nll"] - p.control.evals[s]["nll"] for p in pairs] for s in (start, end)])
    c, t, _ = pairs[0]
    arm, est = f"{t.arch} {label}".rstrip(), paired(deltas[1] - deltas[0])
    before, after = deltas.mean(axis=1)
    if not est.sd or est.t_ci[0] <= 0 <= est.t_ci[1]:
        word = "no trend is shown"
    elif before * after < 0:
        word = "it changes sign"
    else:
        word = "it narrows" if abs(after) < abs(before) else "it widens"
    return {"scale": t.scale, "arms": f"{arm} - {c.arch}", "arm": arm, "seeds": [p.control.seed for p in pairs],
            "from_step": start, "to_step": end, "from_budget": count(t.tokens(start)), "budget": count(t.tokens(end)),
            "from_change": spread(deltas[0]), "change": spread(deltas[1]), "verdict": word, **est._asdict()}


def spread(values: typing.Iterable[float | None]) -> tuple[float, float | None] | None:
    """(mean, sample sd), of one value (mean, None), of none None."""
    v = np.asarray([x for x in values if x is not None])
    if not len(v):
        return None
    return float(v.mean()), float(v.std(ddof=1)) if len(v) > 1 else None


def error(windows: np.ndarray | None) -> float | None:
    """Standard error of the mean over evaluation windows [windows]."""
    return None if windows is None else float(windows.std(ddof=1) / math.sqrt(len(windows)))


def count(n: int | None) -> str:
    for value, word in ((1e9, " B"), (1e6, " M"), (1e3, " k"), (1, "")):
        if n and n >= value:
            return f"{n / value:.3g}{word}"
    return "?"


def listed(seeds: typing.Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def compare(pairs: list[Pair], step: int, split: str, last: bool = False, label: str = "") -> dict:
    """One comparison at one step, as in `--json`. Windows are read for the `last` one; `label` follows the arm's name
    where two comparisons of one arm must be told apart."""
    rows, gaps, (c0, t0, _) = [], [], pairs[0]
    for p in pairs:
        row, gap = pair_row(p, step, split, last)
        rows.append(row)
        gaps.append(gap)
    deltas, tokens, ends = [r["delta"] for r in rows], t0.tokens(step), [p.treatment.evals[step] for p in pairs]
    est, wins = paired(deltas), sum(d < 0 for d in deltas)
    same_windows = all(g is not None and g.shape == gaps[0].shape for g in gaps)
    ours = (c0.arch, t0.arch, step, tokens, split) == ("block", "rd", 61_036, 2_000_027_648, "val")
    arm = f"{t0.arch} {label}".rstrip()
    budget = count(tokens)
    if 0 < step < t0.max_steps:
        budget += f" of {count((tokens or 0) * t0.max_steps // step)}, mid-schedule"
    alone = [d for d, r in zip(deltas, rows) if not set(r["confounds"]) & set(MATCHED)]
    tested = est.n > 1 and est.sd > 0
    return {"scale": t0.scale, "control": c0.arch, "treatment": t0.arch, "tokens": tokens, **est._asdict(),
            "seeds": [r["seed"] for r in rows], "deltas": deltas, "wins": wins,
            "ppl_reduction": float(np.mean([r["ppl_reduction"] for r in rows])), "split": split, "step": step,
            "max_steps": t0.max_steps, "mid_schedule": step < t0.max_steps, "interim": False, "waiting": [],
            "missing": [], "notes": [], "arm": arm, "arms": f"{arm} - {c0.arch}", "budget": budget,
            "change": (est.mean, est.sd), "won": f"{wins}/{est.n}", "paper": PAPER.get(t0.scale) if ours else None,
            "control_nll": spread(r["control_nll"] for r in rows),
            "treatment_nll": spread(r["treatment_nll"] for r in rows),
            "matched": paired(alone)._asdict() if alone and len(alone) < len(rows) else None,
            "confounds": confounds(rows),
            "next_ci": next_interval(est.mean, est.sd, est.n) if tested else None,
            "t_test_p": t_test(est.mean, est.sd, est.n) if tested else None, "holm_p": None, "simultaneous_t_ci": None,
            "sign_flip_p": sign_flip(deltas) if tested else None, "smallest_p": 2.0 ** (1 - est.n),
            "pairs_needed": None if est.sd is None else pairs_needed(est.sd),
            "seed_se": None if est.sd is None else est.sd / math.sqrt(est.n),
            "slice_se": error(np.mean(gaps, axis=0)) if same_windows else None,  # every seed has the same windows
            "js": by_layer(ends, "js"), "js_of_mean": by_layer(ends, "js_of_mean"),
            "js_mean": spread(r.get("js_mean") for r in ends), "pairs": rows, "runs": pairs}


def by_layer(records: list[dict], key: str) -> list[tuple[float, float | None]]:
    """(mean, sd) over seeds of each layer's value."""
    return [spread(values) for values in zip(*(r[key] for r in records if r.get(key)))]


def confounds(rows: list[dict]) -> dict[str, int]:
    """{setting: how many pairs differ in it}."""
    names = [name for r in rows for name in r["confounds"]]
    return {name: names.count(name) for name in sorted(set(names))}


def pair_row(pair: Pair, step: int, split: str, last: bool) -> tuple[dict, np.ndarray | None]:
    """A pair as a row of Table 3, and the differences of its evaluation windows [windows] where both have the same."""
    c, t, _ = pair
    delta = t.evals[step]["nll"] - c.evals[step]["nll"]
    row = {"seed": c.seed, "delta": delta, "ppl_reduction": -math.expm1(delta), "marks": "; ".join(pair.marks[step]),
           "confounds": pair.confounds(step)}
    windows = [r.windows(split, step) if last else None for r in (c, t)]
    for arm, r, w in zip(("control", "treatment"), (c, t), windows):
        nll = r.evals[step]["nll"]
        row |= {arm: r.name, f"{arm}_nll": nll, f"{arm}_se": error(w), f"{arm}_ppl": math.exp(nll),
                f"{arm}_bits_per_byte": r.evals[step].get("bits_per_byte"), f"{arm}_backend": r.config.get("backend"),
                f"{arm}_speed": r.speed, f"{arm}_gb": r.memory and r.memory / 1e9}
    one_machine = all(c.config.get(k) == t.config.get(k) for k in ("backend", "device_name"))
    for name, x, y in (("speed", c.speed, t.speed), ("memory", c.memory, t.memory)):
        row[f"{name}_ratio"] = y / x - 1 if one_machine and x and y else None
    x, y = windows
    gap = y - x if x is not None and y is not None and x.shape == y.shape else None
    row["delta_se"] = error(gap)
    return row, gap


# ---------------------------------------------------------------------------------------------------------
# What the comparisons support

LEVEL = 0.05


def judge(comparisons: list[dict], plans: list[dict], primary: str | None) -> None:
    """Verdicts: by the Bonferroni t interval over all comparisons of the report that have one, Holm's p beside it. A
    primary comparison that was planned before its first step is judged by its own interval (with other primary ones of
    its scale, were there several)."""
    families: dict[str, list[dict]] = {}
    for c in comparisons:
        plan = plan_of(c, plans, primary=c["treatment"])
        if plan and not c["interim"]:
            c["primary"] = "planned"
        elif plan or c["treatment"] in (primary, *(p.get("primary") for p in plans)):
            c["primary"] = "interim" if plan else "named after the runs"
        else:
            c["primary"] = None
        if c["t_test_p"] is not None:
            families.setdefault(c["scale"] if c["primary"] == "planned" else "", []).append(c)
        c["family"], c["verdict"] = 0, "undecided"
    for family in families.values():
        for c, p in zip(family, holm([c["t_test_p"] for c in family])):
            c["family"], c["holm_p"] = len(family), p
            c["simultaneous_t_ci"] = t_interval(c["mean"], c["sd"], c["n"], 1 - LEVEL / len(family))
            low, high = c["simultaneous_t_ci"]
            if high < 0 or low > 0:
                c["verdict"] = "better" if high < 0 else "worse"
    for c in comparisons:
        if c["t_test_p"] is None:  # one pair, or differences without spread
            c["verdict"] = "same function" if not any(c["deltas"]) else "no test"


def plan_of(c: dict, plans: list[dict], **wanted) -> dict | None:
    """The plan with these entries (margin=None: any margin) that names every run of a comparison and its last step, and
    was written before the first of the runs began."""
    runs = [r for pair in c["runs"] for r in pair[:2]]
    for plan in plans:
        if any(plan.get(k) != v if v is not None else plan.get(k) is None for k, v in wanted.items()):
            continue
        arms, end = plan.get("arms"), plan.get("stop_steps") or plan.get("max_steps")
        if not isinstance(arms, list) or c["step"] != end or c["control"] != ("block" if "block" in arms else arms[0]):
            continue
        if {r.config["name"] for r in runs} <= set(plan["runs"]) and all(before(plan, r.config) for r in runs):
            return plan
    return None


def before(plan: dict, config: dict) -> bool:
    """Whether a plan was written before a run began; False where either does not say when."""
    try:
        written, began = (datetime.datetime.fromisoformat(str(x["started"])) for x in (plan, config))
        return written <= began
    except (KeyError, ValueError, TypeError):  # TypeError: one with a time zone, one without
        return False


def test_equivalence(comparisons: list[dict], plans: list[dict], margin: float | None) -> None:
    """Whether arm and control differ by less than a margin, the command line's or the plan's: two one-sided t tests at
    5%, each comparison by itself."""
    for c in comparisons:
        c["equivalence"] = None
        plan = plan_of(c, plans, margin=None)
        planned = plan["margin"] if plan and is_a(float, plan["margin"]) and plan["margin"] > 0 else None
        limit = planned if margin is None else margin
        if limit is None or c["t_test_p"] is None:
            continue
        interval = t_interval(c["mean"], c["sd"], c["n"], 1 - 2 * LEVEL)
        c["equivalence"] = {"margin": limit, "planned": limit == planned, "t_ci_90": interval,
                            "p": equivalence_test(c["mean"], c["sd"], c["n"], limit),
                            "equivalent": -limit < interval[0] and interval[1] < limit}


def read_speeds(text: str | None, control: str) -> list[dict]:
    """`--speed`: a comma list of ratios to the control's tokens per second, arm=RATIO[:LEAST:MOST], or of files of
    `train.py --benchmark`; as [{arm, scale (None: any), ratio, least, most, source}]. Raises BadInput."""
    speeds = []
    for item in text.split(",") if text else ():
        if Path(item).is_file():
            speeds += speeds_of(read_json(item), item, control)
            continue
        arm, _, numbers = item.rpartition("=")
        try:
            ratio, *rest = map(float, numbers.split(":"))
            least, most = rest or (ratio, ratio)
            if not arm or not 0.01 < least <= ratio <= most < 100:
                raise ValueError
        except ValueError:
            raise BadInput(f"--speed={item}: no such file, and not a ratio with its range, as in rd=0.97:0.95:0.99"
                           ) from None
        speeds.append(dict(arm=arm, scale=None, ratio=ratio, least=least, most=most, source="given by hand"))
    return speeds


def speeds_of(saved: dict, path: str, control: str) -> list[dict]:
    """The same from what `train.py --benchmark` saved, turned to the control where it was taken against another arm."""
    arms, found = saved.get("arms"), []
    try:
        base, against = arms[control], [1.0, 1.0, 1.0]
        if saved["reference"] != control:
            against = [base[k] for k in ("ratio", "ratio_max", "ratio_min")]
        for arm, at in arms.items():
            values = [float(at[k]) / by for k, by in zip(("ratio", "ratio_min", "ratio_max"), against)]
            if not all(0.01 < x < 100 for x in values):
                raise ValueError
            found.append(dict(zip(("ratio", "least", "most"), values), arm=arm, scale=saved.get("scale"),
                              source=f"{path}, {saved.get('device')}, {saved.get('rounds')} rounds"))
    except (TypeError, KeyError, ValueError, ZeroDivisionError):
        raise BadInput(f"--speed={path}: not a benchmark of {control} and other arms as train.py --benchmark saves it"
                       ) from None
    return found


def time_cost(run: Run, step: int, ratio: float) -> float | None:
    """What `ratio` of the tokens costs in validation NLL by a run's own curve, log-linear between its evaluations; None
    where none lies far enough back. A faster arm's gain is what the control would have lacked at its tokens."""
    at = step * min(ratio, 1 / ratio)
    steps = sorted(s for s in run.val if 0 < s <= step)
    if step not in run.val or at < steps[0]:
        return None
    cost = float(np.interp(math.log(at), np.log(steps), [run.val[s]["nll"] for s in steps])) - run.val[step]["nll"]
    return cost if ratio <= 1 else -cost


def equal_time(c: dict, speeds: list[dict]) -> dict | None:
    """The difference at equal time, had the arm had the tokens that its speed allows while the control trained: by
    seed, the difference plus `time_cost`. A bound: between milestones the learning rate has not decayed."""
    mine = [s for s in speeds if s["arm"] == c["treatment"] and s["scale"] in (None, c["scale"])]
    if not mine:
        return None
    speed, costs = mine[-1], {}
    for k in ("ratio", "most", "least"):
        costs[k] = [time_cost(pair.control, c["step"], speed[k]) for pair in c["runs"]]
        if None in costs[k]:
            return {**speed, "cost": None}
    mean = {k: float(np.mean(values)) for k, values in costs.items()}
    return {**speed, "cost": mean["ratio"], "cost_range": [mean["most"], mean["least"]],
            "max_tokens": c["tokens"] and round(c["tokens"] * speed["ratio"]),
            **paired(np.add(c["deltas"], costs["ratio"]))._asdict()}


def plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def signed(x: float, places: int = 5) -> str:
    return f"{x:+.{places}f}"


def interval_text(pair: typing.Sequence[float], places: int = 5) -> str:
    return f"[{pair[0]:.{places}f}, {pair[1]:.{places}f}]"


def verdict_text(c: dict) -> str:
    """The first sentence of a conclusion: what the pairs support, by which interval."""
    arm, control, n = c["arm"], c["control"], c["n"]
    change = f"{signed(c['mean'], 6)} nats per token, perplexity {-c['ppl_reduction']:+.2%}"
    if c["verdict"] == "same function":
        return f"{arm} and {control} are the same function bit for bit: every NLL is equal. No test, no verdict."
    if n == 1:
        return f"{change}: a direction, no more. One pair has no interval, so it cannot be told from seed noise."
    if c["verdict"] == "no test":
        return (f"{change}, the same in all {n} pairs to the last digit: no spread, no test, no verdict (copied "
                "folders?).")
    if c["family"] > 1:
        level = f"{100 * (1 - LEVEL / c['family']):.4g}"
        by = (f"{level}% t interval {interval_text(c['simultaneous_t_ci'])} (Bonferroni, {c['family']} comparisons; "
              f"Holm p = {c['holm_p']:.2g})")
    else:
        by = f"95% t interval {interval_text(c['t_ci'])}, p = {c['t_test_p']:.2g}"
    says = {"better": f"{arm} is better than {control}", "worse": f"{arm} is worse than {control}",
            "undecided": f"neither {arm} nor {control} is shown to be better"}[c["verdict"]]
    if c["interim"]:
        says = f"so far {says}"
    return f"{says}: {change}, {by}; lower in {c['wins']} of {n} pairs."


def confound_text(c: dict) -> str:
    """What else the pairs differ in, and what remains without those of two backends; "" where there is nothing."""
    texts, n = [], c["n"]
    for name, k in c["confounds"].items():
        if name not in MATCHED:
            texts.append(f"{k} of {plural(n, 'pair')} {'differs' if k == 1 else 'differ'} in {name}")
        elif k == n:
            texts.append(f"every pair compares two {name}s, so what is the arm's and what the {name}'s cannot be told")
        else:
            texts.append(f"{k} of {n} pairs {'compares' if k == 1 else 'compare'} two {name}s")
    if c["matched"]:
        m = c["matched"]
        rest = "the one that does not" if m["n"] == 1 else f"the {m['n']} that do not"
        interval = f", 95% t interval {interval_text(m['t_ci'])}" if m["n"] > 1 else ""
        texts.append(f"{rest} (n = {m['n']}): {signed(m['mean'])}{interval}")
    return "; ".join(texts) + "." if texts else ""


def conclusion(c: dict) -> list[str]:
    """What the pairs of a comparison support, what they do not and why, in sentences for the report."""
    run, lrs = c["runs"][0].treatment, sorted({as_text(r.config.get("lr")) for p in c["runs"] for r in p[:2]})
    lines = [verdict_text(c)]
    starred = lambda row: " (two backends)" if "backend" in row["confounds"] else ""
    lines.append("By seed: " + ", ".join(f"{r['seed']} {signed(r['delta'])}{starred(r)}" for r in c["pairs"]) + "; lr "
                 + " and ".join(lrs) + ".")
    if text := confound_text(c):
        lines.append(text)
    if c["primary"] == "planned":
        lines.append(f"Primary: plan.json named {c['treatment']} before the first step; it is judged by itself.")
    elif c["primary"]:
        why = "not all its runs are complete" if c["primary"] == "interim" else (
            "named after the runs: no plan.json named it, with these runs and this endpoint, before their first step")
        lines.append(f"Primary: {why}; it is judged with the others.")
    if e := c["equivalence"]:
        source = "the plan's margin" if e["planned"] else "a margin chosen after the runs"
        says = "they differ by less than" if e["equivalent"] else "not shown to differ by less than"
        lines.append(f"Equivalence: {says} {e['margin']:g} ({source}): 90% t {interval_text(e['t_ci_90'])}, two "
                     f"one-sided tests p = {e['p']:.2g}.")
    if c["next_ci"]:
        lines.append(f"Prediction: the next seed's difference lies in {interval_text(c['next_ci'], 3)} with 95%. To "
                     f"find a difference of 0.01 with 80% power takes {plural(c['pairs_needed'], 'seed')}.")
    t = c["trend"]
    if t and t["sd"]:
        before, after = signed(t["from_change"][0], 4), signed(t["change"][0], 4)
        lines.append(f"From {t['from_budget']} to {t['budget']} tokens the difference goes from {before} to {after}: "
                     f"{t['verdict']} (change by seed {signed(t['mean'], 4)}, 95% t {interval_text(t['t_ci'], 4)}, "
                     f"n = {t['n']}).")
    if c["equal_time"]:
        lines.append(equal_time_text(c))
    if c["interim"]:
        few = len(c["waiting"]) <= 3
        names = ", ".join(c["waiting"]) if few else f"{len(c['waiting'])} runs, {c['waiting'][0]} to {c['waiting'][-1]}"
        lines.insert(0, f"Interim, not a result: waiting for {names}.")
    if c["missing"]:
        lines.append(f"Missing: {'; '.join(c['missing'])}.")
    return lines + c["notes"]


def equal_time_text(c: dict) -> str:
    e = c["equal_time"]
    control = c["control"]
    at = (f"Equal time, {e['arm']} at {e['ratio']:.3g} ({e['least']:.3g} to {e['most']:.3g}) of {control}'s speed "
          f"({e['source']})")
    if e["cost"] is None:
        return f"{at}: no evaluation of {control} lies far enough back to say what that costs."
    ci = f", 95% t {interval_text(e['t_ci'], 4)}" if e["n"] > 1 else ""
    least, most = (signed(x, 4) for x in e["cost_range"])
    return (f"{at}: at most {signed(e['cost'], 4)} ({least} to {most}), so {signed(e['mean'], 4)}{ci}. Interpolated on "
            f"{control}'s own curve between milestones, where the learning rate has not decayed: a bound. Unbiased: "
            f"{e['arm']} with --max_tokens={e['max_tokens']}.")


def trust(comparisons: list[dict]) -> list[str]:
    """What holds for every conclusion of a report."""
    ns = sorted({c["n"] for c in comparisons if c["t_test_p"] is not None})
    if not comparisons:
        return []
    lines = ["Shown for these scales, this corpus, this length and these learning rates; nothing is said about others."]
    if ns:
        share = [f"{COVERAGE[max(k for k in COVERAGE if k <= n)]}%" for n in (ns[0], ns[-1])]
        sizes = f"{ns[0]} to {ns[-1]}" if len(ns) > 1 else f"{ns[0]}"
        cover = " to ".join(dict.fromkeys(share))
        lines.append(f"Trust the t intervals: with {sizes} pairs a nominal 95% percentile bootstrap holds the true "
                     f"mean in about {cover} of studies, a t interval in about 95%. Other seeds, not other evaluation "
                     "text, are what an interval speaks of.")
        if any(c["verdict"] == "undecided" and c["holm_p"] and c["holm_p"] < LEVEL for c in comparisons):
            lines.append("Verdicts follow the Bonferroni interval, so one with Holm p below 0.05 can stay undecided.")
        least = 2.0 ** (1 - ns[0])
        if least > LEVEL:
            lines.append(f"A sign-flip test of {plural(ns[0], 'pair')} cannot give less than p = {least:g}, whatever "
                         "the differences.")
    return lines


# ---------------------------------------------------------------------------------------------------------
# Tables. A new column is a key in the rows (`compare`, `pair_row`) and a Column here


class Column(typing.NamedTuple):
    """A column: the key in its rows, its header, the format of a number ("" for text), and what a tuple is: an
    interval, or a spread (mean, sd)."""
    key: str
    header: str
    spec: str = ""
    kind: typing.Literal["value", "interval", "spread"] = "value"

    def show(self, row: dict) -> str:
        value = row.get(self.key)
        if value is None:
            return "-"
        if self.kind == "value":
            return format(value, self.spec) if self.spec else " ".join(str(value).split())
        if self.kind == "interval":
            return f"[{value[0]:{self.spec}}, {value[1]:{self.spec}}]"
        mean, sd = value
        return f"{mean:{self.spec}}" if sd is None else f"{mean:{self.spec}} ± {sd:{self.spec.lstrip('+')}}"


class Table(typing.NamedTuple):
    name: str
    title: str
    rows: list[dict]
    columns: list[Column]
    note: str = ""


SCALE, ARMS, TOKENS = Column("scale", "Scale"), Column("arms", "Arms"), Column("budget", "Tokens")
SEED, N, WON = Column("seed", "Seed"), Column("n", "n", "d"), Column("won", "Lower")
CONTROL_NLL = Column("control_nll", "Control NLL", ".4f", "spread")
TREATMENT_NLL = Column("treatment_nll", "Treatment NLL", ".4f", "spread")
CHANGE = Column("change", "Δ NLL", "+.4f", "spread")
MEAN, SD = Column("mean", "Mean Δ", "+.6f"), Column("sd", "sd", ".6f")
T_CI = Column("t_ci", "95% t", ".6f", "interval")
BOOTSTRAP_CI = Column("bootstrap_ci", "95% bootstrap", ".6f", "interval")
PERPLEXITY = Column("perplexity", "Perplexity", "+.2%")
MARKS = Column("marks", "Marked")


def screen_table(out: dict) -> Table:
    """The one table that is printed under the conclusions."""
    return Table("estimates", "Estimates", with_paper(out), [
        SCALE, ARMS, TOKENS, N, Column("mean", "Difference", "+.6f"), SD, T_CI,
        Column("bootstrap_ci", "95% bootstrap", ".6f", "interval"), Column("sign_flip_p", "Sign-flip p", ".4f"),
        Column("holm_p", "Holm p", ".2g"), PERPLEXITY])


def with_paper(out: dict) -> list[dict]:
    """A row for each comparison, under it what the paper found where it is the paper's."""
    rows = []
    for c in out["comparisons"]:
        rows.append({**c, "perplexity": -c["ppl_reduction"]})
        if c["paper"]:
            who = {"scale": c["scale"], "arms": f"{c['arms']}, the paper", "budget": c["budget"]}
            rows.append({**who, **c["paper"], "perplexity": -c["paper"]["ppl_reduction"]})
    return rows


def tables(out: dict) -> list[Table]:
    """Every table that has rows."""
    rows = with_paper(out)
    pairs = [{**c, **p, "perplexity": -p["ppl_reduction"]} for c in out["comparisons"] for p in c["pairs"]]
    made = [
        Table("table1_summary", "Summary (Table 1)", rows, [
            SCALE, ARMS, TOKENS, CONTROL_NLL, TREATMENT_NLL, CHANGE, PERPLEXITY, WON],
            "Mean ± sample sd over seeds. Δ is treatment - control, by seed; the change of perplexity is the mean of "
            "those within seeds."),
        Table("estimates", "Estimates", rows, [
            SCALE, ARMS, TOKENS, N, MEAN, SD, T_CI, BOOTSTRAP_CI,
            Column("simultaneous_t_ci", "Bonferroni t", ".6f", "interval"),
            Column("next_ci", "Next seed, 95%", ".6f", "interval"), Column("t_test_p", "t test p", ".2g"),
            Column("holm_p", "Holm p", ".2g"), Column("sign_flip_p", "Sign-flip p", ".4f"),
            Column("smallest_p", "Sign-flip p, least possible", ".4f"),
            Column("pairs_needed", "Seeds to find 0.01", ",d"), Column("seed_se", "Standard error, seeds", ".6f"),
            Column("slice_se", "Standard error, evaluation text", ".6f")],
            "Bonferroni intervals hold together in 95% of studies. Seeds to find 0.01: for a paired t test at 5% with "
            "80% power. Standard errors are of the mean Δ, over seeds and over evaluation windows."),
        controls_table(out),
        Table("table3_pairs", "Every pair (Table 3)", pairs, [
            SCALE, ARMS, TOKENS, SEED, Column("control_nll", "Control NLL", ".5f"),
            Column("control_se", "± text", ".4f"), Column("treatment_nll", "Treatment NLL", ".5f"),
            Column("treatment_se", "± text", ".4f"), Column("delta", "Δ NLL", "+.5f"),
            Column("delta_se", "± text", ".5f"),
            Column("control_ppl", "Control PPL", ".3f"), Column("treatment_ppl", "Treatment PPL", ".3f"), PERPLEXITY,
            Column("control_bits_per_byte", "Control bits/byte", ".4f"),
            Column("treatment_bits_per_byte", "Treatment bits/byte", ".4f"), MARKS],
            "± text: standard error over evaluation windows, of Δ over their differences (neighbours share documents: "
            "a floor)."),
        Table("milestones", "Milestones", out["milestones"], [
            SCALE, ARMS, TOKENS, N, CONTROL_NLL, TREATMENT_NLL, CHANGE, T_CI, WON]),
        Table("trends", "Change of Δ between milestones (Figure 3)", out["trends"], [
            SCALE, ARMS, Column("from_budget", "From"), Column("budget", "To"), N,
            Column("from_change", "Δ from", "+.4f", "spread"), Column("change", "Δ to", "+.4f", "spread"),
            Column("mean", "Change", "+.6f"), SD, T_CI, Column("verdict", "Reading")],
            "By seed, with a 95% t interval, each by itself. At all but the last milestone the learning rate has "
            "not decayed."),
        js_table(out),
        Table("crossed", "Arm by backend", out["crossed"], [
            SCALE, ARMS, TOKENS, N, Column("first", "First"), Column("second", "Second"),
            Column("first_change", "Δ NLL, first", "+.6f", "spread"),
            Column("second_change", "Δ NLL, second", "+.6f", "spread"),
            Column("control_shift", "Control, second - first", "+.6f", "spread"),
            Column("treatment_shift", "Treatment, second - first", "+.6f", "spread"),
            Column("interaction", "Interaction", "+.6f"), SD, T_CI],
            "Δ between the arms under the first and the second backend, each arm's own change from first to second, "
            "and last the interaction, Δ under the second - Δ under the first, by seed: what the backend does to the "
            "comparison."),
        Table("noise_floor", "Noise floor: A/A comparisons", [{**c, **p} for c in out["floor"] for p in c["pairs"]], [
            Column("treatment", "Treatment"), Column("control", "Control"), SEED, TOKENS,
            Column("delta", "Δ NLL", "+.5f"), MARKS],
            "A difference of this size is noise."),
        configurations_table(out),
        efficiency_table(pairs)]
    return [t for t in made if t.rows]


def efficiency_table(pairs: list[dict]) -> Table:
    return Table("efficiency", "Efficiency (Appendix E)", pairs, [
        SCALE, ARMS, SEED, Column("control_backend", "Control backend"),
        Column("treatment_backend", "Treatment backend"), Column("control_speed", "Control tokens/s", ",.0f"),
        Column("treatment_speed", "Treatment tokens/s", ",.0f"), Column("speed_ratio", "Change", "+.1%"),
        Column("control_gb", "Control peak GB", ".3f"), Column("treatment_gb", "Treatment peak GB", ".3f"),
        Column("memory_ratio", "Change", "+.1%")],
        "Changes on one backend and device only; speeds of a shared machine are no comparison (train.py --benchmark "
        "is). The paper, reference route, seed 123: S 56,158 and 50,505 tokens/s (-10.1%), 16.005 and 17.647 GB; M "
        "21,616 and 19,697 (-8.9%), 21.015 and 23.132 GB.")


def controls_table(out: dict) -> Table:
    """Table 2: a row for each scale, at the last step that most arms have reached. All its arms share their seeds:
    those that every arm has, or else the seed that most have, and the others a dash."""
    rows, steps, arms = [], {}, {}
    for c in out["milestones"]:
        steps.setdefault((c["scale"], c["max_steps"]), {}).setdefault(c["step"], []).append(c)
    for (scale, _), by_step in steps.items():
        here = by_step[max(by_step, key=lambda step: (len(by_step[step]), step))]
        if len(here) < 2:
            continue
        seeds = set.intersection(*(set(c["seeds"]) for c in here))
        if not seeds:
            every = [seed for c in here for seed in c["seeds"]]
            seeds = {max(sorted(set(every)), key=every.count)}
        row = {"scale": scale, "budget": here[0]["budget"], "seeds": listed(seeds)}
        for c in here:
            own = [p for p in c["pairs"] if p["seed"] in seeds]
            if len(own) == len(seeds):
                row.setdefault("control", float(np.mean([p["control_nll"] for p in own])))
                row[f"arm {c['arm']}"] = float(np.mean([p["treatment_nll"] for p in own]))
                arms[f"arm {c['arm']}"] = c["arm"]
        rows.append(row)
    columns = [SCALE, TOKENS, Column("seeds", "Seeds"), Column("control", out["control"], ".4f")]
    columns += [Column(key, arm, ".4f") for key, arm in arms.items()]
    return Table("table2_controls", "Controls (Table 2)", rows, columns,
                 "NLL over the same seeds in a row. " + SAME_AS_BLOCK["average"])


def js_table(out: dict) -> Table:
    rows = []
    for c in out["comparisons"]:
        means = c["js_of_mean"] or [None] * len(c["js"])
        for layer, (js, of_mean) in enumerate(zip(c["js"], means)):
            rows.append({**c, "layer": layer, "js": js, "js_of_mean": of_mean})
        if c["js"]:
            rows.append({**c, "layer": "1 to last", "js": c["js_mean"], "js_of_mean": None})
    return Table("js_by_layer", "JS divergence by layer (Figure 4)", rows, [
        SCALE, Column("arm", "Arm"), Column("layer", "Layer"), Column("js", "JS", ".4f", "spread"),
        Column("js_of_mean", "JS of mean weights", ".4f", "spread")],
        "Nats (at most ln 2 = 0.6931), mean ± sd over seeds; layer 0 has one source.")


def configurations_table(out: dict) -> Table:
    rows = {}
    for c in out["comparisons"]:
        for pair in c["runs"]:
            control = pair.control.config.get("n_params")
            for r in pair[:2]:
                f, width = r.config, r.config.get("n_embd") or 0
                rows.setdefault((r.scale, r.arch, f.get("lr"), r.max_steps), {
                    **f, "head_dim": width // f["n_head"] if f.get("n_head") else None,
                    "hidden": round(width * f["mlp_ratio"]) if f.get("mlp_ratio") else None,
                    "extra": f["n_params"] - control if control and f.get("n_params", control) != control else None})
    return Table("table4_configurations", "Configurations (Table 4)", list(rows.values()), [
        SCALE, Column("arch", "Arm"), Column("n_layer", "Layers", "d"), Column("n_embd", "Width", "d"),
        Column("n_head", "Heads", "d"), Column("head_dim", "Head dim", "d"), Column("hidden", "MLP hidden", ",d"),
        Column("block_layers", "Block layers", "d"), Column("context", "Context", ",d"),
        Column("vocab_size", "Vocabulary", ",d"), Column("n_params", "Parameters", ",d"),
        Column("extra", "Over control", "+,d"), Column("lr", "Peak lr", "g"), Column("batch_size", "Batch", "d"),
        Column("micro_batch", "Micro-batch", "d"), Column("max_steps", "Steps", ",d")])


def markdown(t: Table) -> str:
    """A Markdown table whose columns also line up as plain text."""
    cells = [[c.header for c in t.columns]]
    cells += [[c.show(row).replace("|", "\\|") for c in t.columns] for row in t.rows]
    widths = [max(3, *map(len, column)) for column in zip(*cells)]
    rule = ["-" * (w - 1) + ":" if c.spec else "-" * w for c, w in zip(t.columns, widths)]
    lines = []
    for line in (cells[0], rule, *cells[1:]):
        aligned = [x.rjust(w) if c.spec else x.ljust(w) for x, w, c in zip(line, widths, t.columns)]
        lines.append(f"| {' | '.join(aligned)} |")
    return "\n".join([f"### {t.title}", "", *lines, ""] + ([t.note, ""] if t.note else []))


def latex(t: Table) -> str:
    """A booktabs tabular, to be \\input."""
    def cell(text: str, spec: str) -> str:
        text = re.sub(r"([&%$#_{}])", r"\\\1", text)
        for sign, tex in (("±", r"\pm"), ("Δ", r"\Delta")):
            text = text.replace(sign, tex if spec else f"${tex}$")
        return f"${text}$" if spec and text != "-" else text
    lines = [[cell(c.header, "") for c in t.columns]]
    lines += [[cell(c.show(row), c.spec) for c in t.columns] for row in t.rows]
    head, *body = (" & ".join(line) + r" \\" for line in lines)
    align = "".join("r" if c.spec else "l" for c in t.columns)
    return "\n".join([f"% {t.title}. {t.note}", rf"\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule", *body,
                      r"\bottomrule", r"\end{tabular}", ""])


def csv_rows(t: Table) -> typing.Iterator[list]:
    """Unrounded; an interval and a spread take two columns."""
    ends = {"value": ("",), "interval": (" low", " high"), "spread": ("", " sd")}
    yield [c.header + end for c in t.columns for end in ends[c.kind]]
    for row in t.rows:
        line = []
        for c in t.columns:
            value = row.get(c.key)
            line += [value] if c.kind == "value" else value or (None, None)
        yield line


def report(out: dict, figures: dict[str, str] | None = None) -> str:
    """Conclusions, estimates, and what is wrong; with `figures` {name: caption} every table and figure too."""
    comparisons = out["comparisons"]
    lines = [f"# {plural(len(comparisons), 'comparison')} with {out['control']} on the {out['split']} split", ""]
    if len(comparisons) > 2:
        lines += [wrapped(text) for text in summary(comparisons)] + [""]
    for c in comparisons:
        size = count(c["runs"][0].treatment.config.get("n_params"))
        pairs = plural(c["n"], "pair")
        lines.append(f"**{c['scale']}, {c['arms']}** ({pairs}; {size} parameters; tokens: {c['budget']})")
        lines += [wrapped(text) for text in c["evidence"].splitlines()] + [""]
    lines += [textwrap.fill(" ".join(trust(comparisons)), 158), ""] if comparisons else []
    if figures is None:
        lines.append(markdown(screen_table(out))) if comparisons else None
    else:
        lines += [markdown(t) for t in tables(out)]
        lines += [f"![{caption}]({name}.png)\n" for name, caption in figures.items()]
    if out["problems"]:
        lines += ["### Left out, refused, unfinished, unplanned or missing", ""]
        reasons: dict[str, list[str]] = {}
        for p in out["problems"]:
            reasons.setdefault(p["why"], []).append(p["run"])
        for why, runs in reasons.items():
            if len(runs) == 1:
                lines.append(wrapped(f"{runs[0]}: {why}"))
            else:
                lines.append(wrapped(f"{len(runs)} runs, {why}: {', '.join(runs)}"))
    if figures is None and comparisons:
        lines.append("" if out["problems"] else "Nothing was left out.")
        lines.append("Pairs, milestones, JS by layer, configurations, efficiency and figures: --out=FOLDER.")
    return "\n".join(lines).rstrip()


def summary(comparisons: list[dict]) -> list[str]:
    """Which arms got which verdict, a sentence for each verdict."""
    lines = []
    words = {"better": "Better than {}", "worse": "Worse than {}", "undecided": "Not decided against {}",
             "same function": "The same function as {}", "no test": "No test against {}"}
    for verdict, text in words.items():
        arms = [f"{c['scale']} {c['arm']}" for c in comparisons if c["verdict"] == verdict]
        if arms:
            lines.append(f"{text.format(comparisons[0]['control'])}: {', '.join(arms)}.")
    return lines


def wrapped(text: str) -> str:
    return textwrap.fill(text, 158, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                         break_on_hyphens=False)


# ---------------------------------------------------------------------------------------------------------
# Figures. Captions stand in report.md, not in the pictures

COLOURS = ["#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito's
DASHES = ["-", "--", "-.", ":"]  # with the colours, 28 curves that differ
ZERO = dict(color="0.6", lw=0.8, ls="--")
STYLE = {"font.size": 7, "axes.spines.top": False, "axes.spines.right": False, "pdf.fonttype": 42,
         "legend.frameon": False,
         "figure.constrained_layout.use": True, "legend.handlelength": 2.8}


def draw(out: dict, folder: Path) -> dict[str, str]:
    """Write the figures as png and pdf; returns {name: caption}. Every comparison is in figures 2 and 3, every arm with
    two reads in figure 4."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    shown, captions = out["comparisons"], {}
    reads = [c for c in shown if c["js"] and c["treatment"] not in SAME_AS_BLOCK]
    with plt.rc_context(STYLE):
        for name, drawing, of in (
                ("figure2_effects", draw_effects, shown), ("figure3_milestones", draw_milestones, shown),
                ("figure4_js", draw_js, reads), ("training_curves", draw_curves, shown[:1])):
            if not of:
                continue
            fig, caption = drawing(plt, of, out)
            for kind, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):  # nothing of today
                with atomic_file(folder / f"{name}.{kind}") as f:
                    fig.savefig(f, format=kind, dpi=300, metadata=metadata)
            plt.close(fig)
            captions[name] = f"{caption} {sample_sizes(of)}"
    return captions


def sample_sizes(of: list[dict]) -> str:
    """S rd, q_kv: n = 5 (seeds ...); M rd: n = 1 (seed 123)."""
    arms: dict[str, list[str]] = {}
    for c in of:
        word = "seed" if c["n"] == 1 else "seeds"
        arms.setdefault(f"n = {c['n']} ({word} {listed(c['seeds'])})", []).append(f"{c['scale']} {c['arm']}")
    return "; ".join(f"{', '.join(names)}: {n}" for n, names in arms.items()) + "."


def curve(ax, x: typing.Sequence[float], points: list[tuple[float, float | None]], k: int, label: str, **style) -> None:
    """Means [points], with bands of one sd where there is one."""
    mean, sd = (np.array([p[i] or 0 for p in points]) for i in (0, 1))
    ax.plot(x, mean, color=COLOURS[k % 7], ls=DASHES[k % 4], lw=1.2, label=label, **style)
    ax.fill_between(x, mean - sd, mean + sd, color=COLOURS[k % 7], alpha=0.12, lw=0)


def draw_effects(plt, of: list[dict], out: dict):
    """Figure 2: every pair's difference, the mean, its t interval, and the bootstrap interval as a lighter line."""
    fig, ax = plt.subplots(figsize=(3.4, 1.0 + 0.36 * len(of)))
    for i, c in enumerate(of):
        if c["t_test_p"] is not None:
            ax.plot(c["bootstrap_ci"], [i + 0.16] * 2, color="0.7", lw=2.2, solid_capstyle="butt")
            ax.plot(c["t_ci"], [i, i], color="black", lw=1.0, marker="|", ms=4)
        ax.plot(c["deltas"], np.full(c["n"], i - 0.16), "o", ms=3, mew=0, color=COLOURS[1], alpha=0.7)
        ax.plot([c["mean"]] * 2, [i - 0.28, i + 0.28], color=COLOURS[0], lw=2)
    ax.axvline(0, **ZERO)
    ax.set_yticks(range(len(of)), [f"{c['scale']} {c['arms']}\n{c['budget']}" for c in of])
    ax.set_ylim(len(of) - 0.5, -0.5)
    ax.set_xlabel("difference in NLL (nats per token)")
    return fig, ("Paired NLL differences: points are seeds, thick marks means, black lines 95% t intervals, grey ones "
                 "bootstrap intervals, which are too short at these n; below 0 the treatment is better.")


def draw_milestones(plt, of: list[dict], out: dict):
    """Figure 3: the difference to the control against tokens."""
    scales = list(dict.fromkeys(c["scale"] for c in of))
    most = max(sum(c["scale"] == scale for c in of) for scale in scales)
    columns = min(2, len(scales))
    fig, axes = plt.subplots(-(-len(scales) // columns), columns, squeeze=False, sharey=True,
                             figsize=(3.4, (1.5 + 0.11 * most) * -(-len(scales) // columns) + 0.5))
    for ax in axes.flat[len(scales):]:
        ax.set_visible(False)
    for ax, scale in zip(axes.flat, scales):
        for k, c in enumerate(c for c in of if c["scale"] == scale):
            path = [m for m in out["milestones"] if (m["scale"], m["arms"]) == (scale, c["arms"]) and m["tokens"]]
            curve(ax, [m["tokens"] / 1e6 for m in path], [m["change"] for m in path], k, c["arm"], marker="o", ms=2.5)
        ax.axhline(0, **ZERO)
        ax.set(title=scale, xlabel="tokens (M)", xscale="log")
        ticks = sorted({m["tokens"] / 1e6 for m in out["milestones"] if m["scale"] == scale and m["tokens"]})
        ax.set_xticks(ticks, [f"{t:,.0f}" if t >= 100 else f"{t:.3g}" for t in ticks], minor=False)
        ax.set_xticks([], minor=True)
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2 if columns == 1 else 1, fontsize=6)
    for row in axes:
        row[0].set_ylabel("difference in NLL (nats per token)")
    return fig, (f"Difference in {out['split']} NLL to {out['control']} at each milestone: means over seeds, bands of "
                 "one sd.")


def draw_js(plt, of: list[dict], out: dict):
    """Figure 4: JS divergence of the reads that feed K and V, by attention layer."""
    fig, ax = plt.subplots(figsize=(3.4, 2.2 + 0.06 * len(of)))
    for k, c in enumerate(of):
        curve(ax, range(1, len(c["js"])), c["js"][1:], k, f"{c['scale']} {c['arm']}")
    ax.set(xlabel="attention layer", ylabel="JS divergence (nats)", ylim=(0, None))
    fig.legend(loc="outside lower center", ncols=3, fontsize=6)
    return fig, "JS divergence of the reads of K and V: means over seeds, bands of one sd; layer 0 has one source."


def draw_curves(plt, of: list[dict], out: dict):
    """Training loss of the first pair of the report, and its difference."""
    pair, curves, broken = of[0]["runs"][0][:2], [], ""
    for run in pair:
        try:
            log = read_metrics(run.path / "metrics.jsonl", samples=None)
            curves.append({r["step"]: r["loss"] for r in log if r["kind"] == "train"})
        except (ValueError, OSError) as e:
            out["problems"].add(run.name, f"training curves not drawn: {plain_reason(e, run.path)}")
            curves.append({})
    steps = np.array(sorted(curves[0].keys() & curves[1].keys()))
    bins = np.array_split(steps, min(100, len(steps))) if len(steps) else []
    x, means = [b.mean() for b in bins], [[np.mean([loss[s] for s in b]) for b in bins] for loss in curves]
    fig, (top, low) = plt.subplots(2, 1, figsize=(3.4, 3.0), sharex=True, height_ratios=(3, 2))
    for k, run in enumerate(pair):
        curve(top, x, [(m, 0) for m in means[k]], k, run.arch)
    low.plot(x, np.subtract(means[1], means[0]), color=COLOURS[2])
    low.axhline(0, **ZERO)
    top.set(ylabel="training loss (nats per token)")
    top.legend()
    low.set(xlabel="step", ylabel="difference")
    names = " and ".join(run.name for run in pair)
    return fig, f"Training loss of {names}, the first of the pairs, in {len(x)} bins; below, treatment - control."


# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Flags:
    folders: list[str] = dataclasses.field(default_factory=list, metadata={"help": "folders of runs, or run folders"})
    control: str = flag("block", "the arm that the others are compared with")
    split: str = flag("val", "evaluation split", choices=("val", "test"))
    allow: str | None = flag(None, "comma list of settings in which the two runs of a pair may differ")
    primary: str | None = flag(None, "arm whose comparison is judged by itself, if plan.json named it before the runs")
    margin: float | None = flag(None, "difference in NLL too small to matter [the plan's]", least=1e-9)
    speed: str | None = flag(None, "the arms' speed over the control's: arm=RATIO[:LEAST:MOST], or what train.py "
                             "--benchmark saved")
    json: bool = flag(False, "print JSON only")
    out: str | None = flag(None, "folder for tables (md, csv, tex, json) and figures (png, pdf)", path=True)
    strict: bool = flag(False, "refuse pairs that differ in backend, dtype, compile, device, versions or code")


def public(out: dict) -> dict:
    """What --json prints: everything but the runs themselves."""
    kinds = ("comparisons", "problems", "milestones", "trends", "crossed", "floor")
    return {kind: [{k: v for k, v in row.items() if k != "runs"} for row in out[kind]] for kind in kinds}


def write_report(out: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figures = draw(out, folder)
    texts = {"report.md": report(out, figures) + "\n", "stats.json": to_json(public(out), indent=1) + "\n"}
    for t in tables(out):
        if t.name.startswith(("table1", "table2", "table3")):
            texts[f"{t.name}.tex"] = latex(t)
        with atomic_file(folder / f"{t.name}.csv", "w") as f:
            csv.writer(f, lineterminator="\n").writerows(csv_rows(t))
    for name, text in texts.items():
        with atomic_file(folder / name, "w") as f:
            f.write(text)


def main(argv: list[str]) -> int:
    flags = parse_flags(Flags, argv, __doc__, positional="folders")
    if not flags.folders:
        raise BadInput("which runs? python stats.py runs/")
    allow = [k.strip() for k in (flags.allow or "").split(",") if k.strip()]
    out = analyse(flags.folders, flags.control, flags.split, allow, flags.strict, flags.primary, flags.margin,
                  flags.speed)
    if flags.out:
        write_report(out, Path(flags.out).expanduser())
    print(to_json(public(out), indent=1) if flags.json else report(out))
    return 1 if flags.strict and out["problems"].of("refused") else 0


if __name__ == "__main__":
    run_script(main)
