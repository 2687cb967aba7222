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

import collections
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
from scipy import special

from prepare import BadInput, atomic_file, did_you_mean, flag, parse_flags, read_json, run_script, to_json

# ---------------------------------------------------------------------------------------------------------
# Estimates: functions of differences alone

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
    half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * sd / math.sqrt(n)
    return mean - half, mean + half


def next_interval(mean: float, sd: float, n: int, level: float = 0.95) -> tuple[float, float]:
    """Prediction interval (low, high) of one further normal value: wider than that of the mean by sqrt(n + 1)."""
    return t_interval(mean, sd * math.sqrt(n + 1), n, level)


def t_test(mean: float, sd: float, n: int) -> float:
    """Two-sided p of a zero mean, paired t test."""
    return float(2 * special.stdtr(n - 1, -abs(mean) / (sd / math.sqrt(n))))


def equivalence_test(mean: float, sd: float, n: int, margin: float) -> float:
    """p of |mean| >= margin by two one-sided t tests: below 0.05 exactly where the 90% interval lies inside."""
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
    limit, share = special.stdtrit(n - 1, 0.975), (np.arange(20_000) + 0.5) / 20_000
    sd = np.sqrt(special.chdtri(n - 1, share) / (n - 1))  # equally likely sample standard deviations
    shift = effect * math.sqrt(n)
    return float(np.mean(special.ndtr(shift - limit * sd) + special.ndtr(-shift - limit * sd)))


def pairs_needed(sd: float, difference: float = 0.01, wanted: float = 0.8) -> int:
    """Pairs at which a two-sided 5% paired t test finds `difference` with power `wanted`."""
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
        except BadInput:  # stats.py itself names what it cannot read
            continue
        if name == config.get("name") or (other.get("scale"), other.get("seed")) != place:
            continue
        refused, marked = pair_check(other, config)
        if other.get("arch") == arm:
            if not refused:
                lines.append(f"a rerun of {name}: the table takes one, both show the noise")
        elif control not in (arm, other.get("arch")):
            continue
        elif refused:
            lines.append(f"not with {name}: {'; '.join(refused)}")
        else:
            partners += 1
            marks = f", marked (--strict refuses it): {'; '.join(marked)}" if marked else ""
            lines.append(f"with {name}{marks}")
    if partners:
        return lines + ["the table gains a pair once both runs have reached a milestone"]
    other_arm = "another arm" if arm == control else control
    return lines + [f"in no table until {other_arm} has a run with these settings, scale {place[0]}, seed {place[1]}"]


# ---------------------------------------------------------------------------------------------------------
# Run folders. Whatever cannot be used is an error with the reason: `load_folders` names the run and goes on

# What a report computes with or prints: its type wherever it stands, in config.json, metrics.jsonl and eval/*.json
FIELDS = dict(
    name=str, arch=str, scale=str, backend=str, data=str, device=str, device_name=str, data_fingerprint=str, status=str,
    why=str, seed=int, max_steps=int, stop_steps=int, tokens_per_step=int, step=int, tokens=int, n_params=int,
    n_layer=int, n_embd=int, n_head=int, block_layers=int, context=int, vocab_size=int, batch_size=int, micro_batch=int,
    lr=float, mlp_ratio=float, loss=float, nll=float, bits_per_byte=float, js_mean=float, tokens_per_s=float,
    peak_memory_bytes=float, js=list, js_of_mean=list)
REQUIRED = {"config": ("scale", "arch", "seed", "max_steps"), "train": ("step", "loss"), "eval": ("step", "nll"),
            "end": ("status",)}
KINDS = {int: "a whole number of at most 2^63", float: "a finite number", str: "text", list: "a list of numbers"}
UNUSABLE = (BadInput, ValueError, OSError)


def is_a(kind: type, value) -> bool:
    """Whether a value from JSON is what a report can compute with."""
    if kind is str:
        return isinstance(value, str) and value.isprintable()
    if kind is list:
        return isinstance(value, list) and all(is_a(float, x) for x in value)
    if isinstance(value, bool) or not isinstance(value, (int, kind)):
        return False
    return abs(value) < 2 ** 63 if kind is int else math.isfinite(value) and abs(value) < 1e300


def checked(record: dict, kind: str, what: str) -> dict:
    """`record`, where it holds what its kind must and nothing of a wrong type. Raises ValueError."""
    lacking = [key for key in REQUIRED.get(kind, ()) if record.get(key) in (None, "")]
    if lacking:
        raise ValueError(f"{what} lacks {', '.join(lacking)}")
    for key, value in record.items():
        if key in FIELDS and value is not None and not is_a(FIELDS[key], value):
            raise ValueError(f"{what}: {key} is {as_text(value)}, not {KINDS[FIELDS[key]]}")
    if kind == "eval" and not 0 <= record["nll"] < 700:  # e^700 overflows
        raise ValueError(f"{what}: the NLL at step {record['step']} is {record['nll']}")
    return record


def read_metrics(path: Path, samples: int | None = 64) -> list[dict]:
    """The records of a metrics.jsonl, each with its `line`, counted from 1: of the train ones, 61,036 at the paper's
    length, only about `samples` (None: all), first, second and last among them. Raises ValueError at a line that is no
    such record; a last line without its end is still being written."""
    data, records = path.read_bytes(), []
    text = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(text == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1])[:len(ends)]
    torn = np.flatnonzero((text[starts] != ord("{")) | (text[ends - 1] != ord("}")))  # read for their error
    marks = [m.start() for kind in (b'"eval"', b'"end"') for m in re.finditer(kind, data)]
    others = np.searchsorted(ends, marks)
    sampled = range(0, len(ends), max(1, len(ends) // samples) if samples else 1)
    wanted = {0, 1, *sampled, *range(len(ends))[-3:], *others.tolist(), *torn.tolist()}
    for i in sorted(wanted & set(range(len(ends)))):
        what = f"line {i + 1} of {path.name}"
        try:
            record = json.loads(data[starts[i]:ends[i]])
            known = isinstance(record["kind"], str)
        except (ValueError, TypeError, KeyError, RecursionError):
            known = False
        if not known:
            raise ValueError(f"corrupt: {what} is not a record")
        records.append({**checked(record, record["kind"], what), "line": i + 1})
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
            for key, want in dict(run=name, split=split, step=int(step[1])).items():
                if record.get(key) != want:
                    raise ValueError(f"it says {key} {as_text(record.get(key))}, not {as_text(want)}")
            found[record["step"]] = checked(record, "eval", "it")
        except UNUSABLE as e:
            wrong.append(f"eval/{path.name} left out: {plain_reason(e, folder)}")
    return found, wrong


class Run:
    """A run folder: its config, status, step of its last record, evaluations by step, speed and memory. Raises what
    tells why the run cannot be used; `remarks` says what is wrong with one that can."""

    def __init__(self, path: Path, name: str, split: str):
        self.path, self.name = path, name
        self.config = c = {"name": name, **checked(read_json(path / "config.json"), "config", "config.json")}
        self.arch, self.scale, self.seed, self.max_steps = c["arch"], c["scale"], c["seed"], c["max_steps"]
        self.tokens_per_step = c.get("tokens_per_step")
        self.end = c.get("stop_steps") or self.max_steps  # where the run was to stop
        records = read_metrics(path / "metrics.jsonl") if (path / "metrics.jsonl").exists() else []
        last = records[-1] if records else {}
        self.last = max((r.get("step", 0) for r in records), default=0)
        self.status = last["status"] if last.get("kind") == "end" else "unfinished"
        if self.status == "diverged":
            why = f" ({last['why']})" if last.get("why") else ""
            raise ValueError(f"diverged at step {self.last}{why}")
        self.val = {r["step"]: r for r in records if r["kind"] == "eval"}
        self.evals, self.remarks = self.evaluations(split)  # step -> evaluation on the split
        if lost := lost_lines(records):
            self.remarks.append(f"metrics.jsonl lacks {lost:,} of its {self.last:,} steps")
        if self.status != "complete" or self.last < self.end:
            self.remarks.append(f"{self.status}: at step {self.last} of {self.end}")
        speeds = [r["tokens_per_s"] for r in records if r.get("tokens_per_s")]
        self.speed = float(np.median(speeds)) if speeds else None
        self.memory = max((r["peak_memory_bytes"] for r in records if r.get("peak_memory_bytes")), default=None)

    def evaluations(self, split: str) -> tuple[dict[int, dict], list[str]]:
        """Those of the split that were stored, and of `val` before them those of the log."""
        found, remarks = read_evaluations(self.path, self.config["name"], split)
        for step, logged in self.val.items() if split == "val" else ():
            again = found.get(step, logged)
            if again["nll"] != logged["nll"] and again.get("backend") in (None, self.config.get("backend")):
                remarks.append(f"eval/val-{step:06d}.json left out: it says NLL {again['nll']}, the log "
                               f"{logged['nll']}")
            found[step] = logged
        data = self.config.get("data_fingerprint")
        for step, record in found.items():
            if record.get("data_fingerprint", data) != data:
                raise ValueError(f"evaluated at step {step} on other data ({record['data_fingerprint']}) than it was "
                                 "trained on")
        if not found and split == "val":
            raise ValueError(f"no evaluation yet, at step {self.last}")
        if not found:
            raise ValueError(f"no {split} evaluation: python eval.py {self.path} --split={split}")
        return found, remarks

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
    return getattr(e, "strerror", None) or str(e).replace(f"{folder}/", "")


def read_plan(path: Path, names: set[str], problems: Problems) -> tuple[list[dict], list[str]]:
    """The plans in a plan.json, and the planned runs that `names` lacks; says which runs nobody planned."""
    try:
        plans = read_json(path).get("plans")
        if not isinstance(plans, list):
            raise ValueError("no list of plans")
        for i, plan in enumerate(plans):
            runs = plan.get("runs") if isinstance(plan, dict) else None
            if not isinstance(runs, list) or not all(is_a(str, name) for name in runs):
                raise ValueError(f"plan {i + 1} names no runs")
    except UNUSABLE as e:
        problems.add("plan.json", f"cannot be read ({plain_reason(e, path.parent)}): planned and missing runs are not "
                     "known")
        return [], []
    planned = {name for plan in plans for name in plan["runs"]}
    missing = sorted(planned - names)
    for name in missing:
        problems.add(name, "planned, and missing")
    for name in sorted(names - planned):
        problems.add(name, "not planned: plan.json lacks it")
    return plans, missing


def is_run(folder: Path) -> bool:
    try:
        return any((folder / mark).exists() for mark in ("config.json", "metrics.jsonl", "ckpt.pt"))
    except OSError:  # it may not be read: named where its config.json is
        return True


def find_folders(arguments: list[str], problems: Problems) -> tuple[dict[Path, tuple[str, Path]], list[Path]]:
    """Run folders {path: (name, the plan.json that would be beside it)} in what the command line names (folders of
    runs, runs, plan.json, as `runs/*` gives), and the plans. What is no run is said and skipped; BadInput where there
    is none."""
    found, plans = {}, []
    for path in map(Path, arguments):
        if not path.exists():
            raise BadInput(f"{path}: no such folder; give the folder that train.py writes its runs to")
        plan, inside = path / "plan.json", []
        try:
            if path.name == "plan.json" and path.is_file():
                plan = path
            elif not path.is_dir():
                raise ValueError("not a folder")
            elif is_run(path):
                inside = [path]
            else:
                inside = [p for p in sorted(path.iterdir()) if p.is_dir() and is_run(p) and p.name[0] != "."]
            if inside != [path] and plan.exists():
                plans.append(plan.resolve())
            elif not inside:
                raise ValueError("holds no runs")
        except (OSError, ValueError) as e:
            problems.add(str(path), f"skipped: {plain_reason(e, path)}")
        for p in inside:
            name = os.fsencode(p.resolve().name).decode("utf-8", "backslashreplace")
            taken = any(name == other for other, _ in found.values())
            found.setdefault(p.resolve(), (str(p) if taken else name, (p.absolute().parent / "plan.json").resolve()))
    if not found and not plans:
        raise BadInput(f"{', '.join(arguments)} holds no runs: a run is a folder with config.json and metrics.jsonl")
    return found, list(dict.fromkeys(plans))


def load_folders(arguments: list[str], split: str, problems: Problems) -> tuple[list[Run], list[str], list[dict]]:
    """The usable runs, the names of those still to come, and the plans. One bad folder is named and left out."""
    found, plan_files = find_folders(arguments, problems)
    runs, coming, plans = [], [], []
    for path in plan_files:
        entries, missing = read_plan(path, {Path(name).name for name, plan in found.values() if plan == path}, problems)
        plans += entries
        coming += missing
    for path, (name, _) in sorted(found.items(), key=lambda item: item[1]):
        try:
            runs.append(Run(path, name, split))
        except UNUSABLE as e:
            reason = plain_reason(e, path)
            problems.add(name, f"left out: {reason}")
            if reason.startswith("no "):  # no evaluation: not yet, or not on this split
                coming.append(name)
            continue
        for remark in runs[-1].remarks:
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
UNSHARED = "no step at which both were evaluated"


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
    groups, choices = choose_settings(group_runs(without_copies(runs, problems), allow), allow, split, problems)
    used = set()
    for group in groups:
        if group[0].arch == control:
            continue
        variants = split_variants(find_pairs(group, groups, control, allow, strict, problems), groups)
        cells = []  # of each variant {step: {seed: pair}}
        for label, pairs in variants.items():
            by_step = {step: best_pairs(pairs, step) for step in sorted({s for p in pairs for s in p.marks})}
            cells.append(by_step)
            used |= {r.name for best in by_step.values() for p in best.values() for r in p[:2]}
            rows = [compare(list(best.values()), step, split, step == max(by_step), label)
                    for step, best in by_step.items()]
            row, trends = rows[-1], trends_of(by_step, label)
            row["trend"] = trends[-1]
            row["waiting"], row["missing"] = not_there(row, pairs, coming, problems)
            row["interim"] = bool(row["waiting"])
            row["equal_time"] = equal_time(row, speeds)
            row["notes"] = [text for arm, scale, text in choices
                            if scale == row["scale"] and arm in (control, row["treatment"])]
            row["notes"] += [SAME_AS_BLOCK[arm] for arm in (row["treatment"], control) if arm in SAME_AS_BLOCK]
            out["milestones"] += rows
            out["trends"] += [t for t in trends if t]
            out["comparisons"].append(row)
        labels = list(variants)
        crossings = [interaction(cells[0], cell, labels[0], label) for cell, label in zip(cells[1:], labels[1:])]
        out["crossed"] += [row for row in crossings if row]
    name_unused(groups, used, problems)
    out["floor"] = reruns(groups, split) + [
        c for c in out["comparisons"] if {c["control"], c["treatment"]} <= {"block", *SAME_AS_BLOCK}]
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
    what, kept, notes, grids = "/".join(keys), [], [], {}
    for group in groups if keys else ():
        values: dict[str, list[Run]] = {}
        for r in sorted(group, key=lambda r: [numeric(r.config.get(k)) for k in keys]):
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
        kept.append([r for r in group if r in values[best]])
        ranking = ", ".join(f"{v} (NLL {score[v]:.5f})" for v in values)
        edge = best in (list(values)[0], list(values)[-1])
        text = f"{arm}: {what} = {best}, chosen on val as the best of {ranking}, over seeds {listed(seeds)}"
        notes.append((arm, scale, text + ("; it lies at the edge of what was tried, so a better one may lie beyond."
                                          if edge else ".")))
        for r in group:
            if r not in values[best]:
                problems.add(r.name, f"left out: {what} = {best} is better on validation")
    for scale, tried in grids.items():
        several = [arm for arm, n in tried.items() if n > 1]
        for arm in sorted(tried.keys() - several) if several else ():
            notes.append((arm, scale, f"Only one {what} was tried for {arm}, and several for another arm: what is "
                                      "compared is also how well each was tuned."))
        for arm in several if split == "val" else ():
            notes.append((arm, scale, f"{what} was chosen and is compared on the same split, which flatters the arm "
                                      "with more tries: compare with --split=test."))
    return kept if keys else groups, notes


def numeric(value) -> tuple:
    """Sorts numbers by size and other values after them."""
    return (0, value, "") if is_a(float, value) else (1, 0, as_text(value))


def shared_steps(c: Run, t: Run, allow: typing.Collection[str], strict: bool) -> tuple[dict[int, list[str]], list[str]]:
    """{step: marks} at which `c` and `t` may be compared, and what stands against them where there is none."""
    why = pair_check(c.config, t.config, allow)[0]
    steps, shared = {}, () if why else sorted(c.evals.keys() & t.evals.keys())
    for step in shared:
        both = []
        for r in (c, t):
            measured = {f"evaluation_{k}": r.evals[step][k] for k in (
                "eval_tokens", "windows", "backend", "data_fingerprint") if k in r.evals[step]}
            both.append(measured | r.config)
        refused, marked = pair_check(*both, allow)
        if strict:
            refused += [m for m in marked if not m.endswith("(allowed)")]
        if refused:
            why = refused
        else:
            steps[step] = marked
    return steps, why or [UNSHARED]


def find_pairs(group: list[Run], groups: list[list[Run]], control: str, allow: typing.Collection[str], strict: bool,
               problems: Problems) -> list[Pair]:
    """Every pair of a run of the group with a run of the control, also those that share no evaluation yet."""
    pairs, controls = [], [c for g in groups for c in g if c.arch == control]
    for t in group:
        good, apart, refused = [], [], []
        for c in (c for c in controls if (c.scale, c.seed) == (t.scale, t.seed)):
            steps, why = shared_steps(c, t, allow, strict)
            (good if steps else apart if why == [UNSHARED] else []).append(Pair(c, t, steps))
            refused.append((len(why), c.name, why))
        pairs += good or apart
        if not refused:
            problems.add(t.name, f"no partner: no usable run of {control} at scale {t.scale}, seed {t.seed}")
        elif not good:
            _, near, why = min(refused)
            problems.add(t.name, f"refused with {near}: {'; '.join(why)}")
    return pairs


def split_variants(pairs: list[Pair], groups: list[list[Run]]) -> dict[str, list[Pair]]:
    """{label: pairs}. One comparison, as a rule, whose label holds the settings that tell it from others of its arm;
    where a seed ran in two of the CROSSED settings, a comparison for each of them."""
    if not any(p.marks for p in pairs):
        return {}
    arm = pairs[0].treatment

    def words_of(r: Run) -> list[str]:  # `nano-rd-s123-lr0.002-b16` has lr0.002 and b16
        return r.name.partition(f"-s{r.seed}")[2].split("-")[1:]

    def variant_of(p: Pair) -> tuple[str, ...]:
        return tuple(str(p.treatment.config.get(k)) for k in CROSSED)
    siblings = [words_of(r) for g in groups for r in g if (r.scale, r.arch) == (arm.scale, arm.arch)]
    words = [w for w in words_of(arm) if not all(w in s for s in siblings)]
    twice = {(variant_of(p), p.treatment.seed) for p in pairs}
    if len(twice) == len({seed for _, seed in twice}):
        return {" ".join(words): pairs}
    variants = sorted({variant_of(p) for p in pairs if p.marks}, key=lambda v: (v[0] != "reference", v))
    words = [w for w in words if not w.startswith(CROSSED)]
    labels = {v: [x for i, x in enumerate(v) if any(o[i] != x for o in variants)] + words for v in variants}
    return {" ".join(label): [p for p in pairs if variant_of(p) == v] for v, label in labels.items()}


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
        for r in (r for r in group if r.name not in named):
            why = "no partner: no run of another arm with its scale, seed and settings"
            for o in group:
                if o.seed == r.seed and o.name in used:
                    why = f"duplicate of {o.name}, which the table takes: same arm, seed and settings"
                    break
            problems.add(r.name, why)


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


def trends_of(cells: dict[int, dict[int, Pair]], label: str) -> list[dict | None]:
    """Changes of the difference between neighbouring steps, and last from the first to the last, each by seed over the
    same runs at both; None where there is none. `cells`: {step: {seed: pair}}."""
    steps, found = list(cells), []
    spans = list(zip(steps, steps[1:]))
    if len(steps) > 2:
        spans.append((steps[0], steps[-1]))
    for start, end in spans:
        pairs = [p for seed, p in cells[end].items() if cells[start].get(seed, (None,))[:2] == p[:2]]
        if not pairs or not start:
            found.append(None)
            continue
        c, t, _ = pairs[0]
        first, last = (np.array([p.treatment.evals[s]["nll"] - p.control.evals[s]["nll"] for p in pairs])
                       for s in (start, end))
        est, before, after, word = paired(last - first), first.mean(), last.mean(), "no trend is shown"
        if est.sd and not est.t_ci[0] <= 0 <= est.t_ci[1]:
            word = "it narrows" if abs(after) < abs(before) else "it widens"
            if before * after < 0:
                word = "it changes sign"
        arm = f"{t.arch} {label}".rstrip()
        found.append({
            "scale": t.scale, "arms": f"{arm} - {c.arch}", "arm": arm, "seeds": [p.control.seed for p in pairs],
            "from_step": start, "to_step": end, "from_budget": count(t.tokens(start)), "budget": count(t.tokens(end)),
            "from_change": spread(first), "change": spread(last), "verdict": word, **est._asdict()})
    return found or [None]


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
            "confounds": dict(sorted(collections.Counter(name for r in rows for name in r["confounds"]).items())),
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
VERDICTS = {"better": "Better than", "worse": "Worse than", "undecided": "Not decided against",
            "same function": "The same function as", "no test": "No test against"}
PRIMARY = {
    "planned": "plan.json named {} before the first step; it is judged by itself",
    "interim": "not all its runs are complete; it is judged with the others",
    "named after the runs": "named after the runs: no plan.json named it, with these runs and this endpoint, before "
                            "their first step; it is judged with the others"}


def judge(comparisons: list[dict], plans: list[dict], primary: str | None) -> None:
    """Verdicts: by the Bonferroni t interval over all comparisons of the report that have one, Holm's p beside it. A
    primary comparison that was planned before its first step is judged by its own interval (with other primary ones of
    its scale, were there several)."""
    families: dict[str, list[dict]] = {}
    named = {primary, *(p["primary"] for p in plans if is_a(str, p.get("primary")))}
    for c in comparisons:
        c["primary"], c["family"], c["verdict"] = None, 0, "undecided"
        if any(plan.get("primary") == c["treatment"] for plan in plans_of(c, plans)):
            c["primary"] = "interim" if c["interim"] else "planned"
        elif c["treatment"] in named:
            c["primary"] = "named after the runs"
        if c["t_test_p"] is not None:
            families.setdefault(c["scale"] if c["primary"] == "planned" else "", []).append(c)
        else:  # one pair, or differences without spread
            c["verdict"] = "no test" if any(c["deltas"]) else "same function"
    for family in families.values():
        for c, p in zip(family, holm([c["t_test_p"] for c in family])):
            c["family"], c["holm_p"] = len(family), p
            c["simultaneous_t_ci"] = low, high = t_interval(c["mean"], c["sd"], c["n"], 1 - LEVEL / len(family))
            if high < 0 or low > 0:
                c["verdict"] = "better" if high < 0 else "worse"


def plans_of(c: dict, plans: list[dict]) -> list[dict]:
    """The plans that name every run of a comparison, its control and its last step, and were written before the first
    of the runs began; where either does not say when, that is not shown."""
    configs, fitting = [r.config for pair in c["runs"] for r in pair[:2]], []
    for plan in plans:
        arms, end = plan.get("arms"), plan.get("stop_steps") or plan.get("max_steps")
        if not isinstance(arms, list) or not arms or c["step"] != end:
            continue
        control = "block" if "block" in arms else arms[0]
        if c["control"] != control or not {f["name"] for f in configs} <= set(plan["runs"]):
            continue
        with contextlib.suppress(KeyError, ValueError, TypeError):  # TypeError: one with a time zone, one without
            written, *began = (datetime.datetime.fromisoformat(str(x["started"])) for x in (plan, *configs))
            if all(written <= at for at in began):
                fitting.append(plan)
    return fitting


def test_equivalence(comparisons: list[dict], plans: list[dict], margin: float | None) -> None:
    """Whether arm and control differ by less than a margin, the command line's or the plan's: two one-sided t tests at
    5%, each comparison by itself."""
    for c in comparisons:
        c["equivalence"] = None
        margins = [plan["margin"] for plan in plans_of(c, plans) if is_a(float, plan.get("margin"))]
        planned = margins[0] if margins and margins[0] > 0 else None
        limit = planned if margin is None else margin
        if limit is None or c["t_test_p"] is None:
            continue
        interval = t_interval(c["mean"], c["sd"], c["n"], 1 - 2 * LEVEL)
        c["equivalence"] = {"margin": limit, "planned": limit == planned, "t_ci_90": interval,
                            "p": equivalence_test(c["mean"], c["sd"], c["n"], limit),
                            "equivalent": -limit < interval[0] and interval[1] < limit}


def read_speeds(text: str | None, control: str) -> list[dict]:
    """`--speed`: a comma list of ratios to the control's tokens per second, arm=RATIO[:LEAST:MOST], or of files of
    `train.py --benchmark`, turned to the control where they were taken against another arm; as [{arm, scale (None:
    any), ratio, least, most, source}]. Raises BadInput."""
    speeds = []
    for item in text.split(",") if text else ():
        try:
            if Path(item).is_file():
                saved = read_json(item)
                source = f"{item}, {saved.get('device')}, {saved.get('rounds')} rounds"
            else:
                arm, _, numbers = item.rpartition("=")
                ratio, least, most = numbers.split(":") if ":" in numbers else [numbers] * 3
                saved, source = {"arms": {arm: dict(ratio=ratio, ratio_min=least, ratio_max=most)}}, "given by hand"
            against = [1.0, 1.0, 1.0]
            if saved.get("reference", control) != control:
                against = [saved["arms"][control][k] for k in ("ratio", "ratio_max", "ratio_min")]
            for arm, at in saved["arms"].items():
                ratio, least, most = (float(at[k]) / by for k, by in zip(("ratio", "ratio_min", "ratio_max"), against))
                if not arm or not 0.01 < least <= ratio <= most < 100:
                    raise ValueError
                speeds.append(dict(arm=arm, scale=saved.get("scale"), ratio=ratio, least=least, most=most,
                                   source=source))
        except (TypeError, KeyError, ValueError, ZeroDivisionError, AttributeError):
            raise BadInput(f"--speed={item}: neither a ratio to {control} with its range, as in rd=0.97:0.95:0.99, nor "
                           f"a file of train.py --benchmark with {control} in it") from None
    return speeds


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
    by = f"95% t interval {interval_text(c['t_ci'])}, p = {c['t_test_p']:.2g}"
    if c["family"] > 1:
        level = f"{100 * (1 - LEVEL / c['family']):.4g}"
        by = (f"{level}% t interval {interval_text(c['simultaneous_t_ci'])} (Bonferroni, {c['family']} comparisons; "
              f"Holm p = {c['holm_p']:.2g})")
    says = f"{arm} is {c['verdict']} than {control}"
    if c["verdict"] == "undecided":
        says = f"neither {arm} nor {control} is shown to be better"
    so_far = "so far " if c["interim"] else ""
    return f"{so_far}{says}: {change}, {by}; lower in {c['wins']} of {n} pairs."


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
    lines, waiting = [], c["waiting"]
    if c["interim"]:
        names = ", ".join(waiting) if len(waiting) <= 3 else f"{len(waiting)} runs, {waiting[0]} to {waiting[-1]}"
        lines.append(f"Interim, not a result: waiting for {names}.")
    lines.append(verdict_text(c))
    seeds = [f"{r['seed']} {signed(r['delta'])}" + (" (two backends)" if "backend" in r["confounds"] else "")
             for r in c["pairs"]]
    lrs = sorted({as_text(r.config.get("lr")) for p in c["runs"] for r in p[:2]})
    lines.append(f"By seed: {', '.join(seeds)}; lr {' and '.join(lrs)}.")
    lines.append(confound_text(c))
    if c["primary"]:
        lines.append(f"Primary: {PRIMARY[c['primary']].format(c['treatment'])}.")
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
    if c["missing"]:
        lines.append(f"Missing: {'; '.join(c['missing'])}.")
    return [line for line in lines if line] + c["notes"]


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


def trust(comparisons: list[dict]) -> str:
    """What holds for every conclusion of a report."""
    text = "Shown for these scales, this corpus, this length and these learning rates; nothing is said about others."
    ns = sorted({c["n"] for c in comparisons if c["t_test_p"] is not None})
    if not ns:
        return text
    cover = dict.fromkeys(f"{COVERAGE[max(k for k in COVERAGE if k <= n)]}%" for n in (ns[0], ns[-1]))
    sizes = " to ".join(map(str, dict.fromkeys((ns[0], ns[-1]))))
    text += (f" Trust the t intervals: with {sizes} pairs a nominal 95% percentile bootstrap holds the true mean in "
             f"about {' to '.join(cover)} of studies, a t interval in about 95%. Other seeds, not other evaluation "
             "text, are what an interval speaks of.")
    if any(c["verdict"] == "undecided" and c["holm_p"] and c["holm_p"] < LEVEL for c in comparisons):
        text += " Verdicts follow the Bonferroni interval, so one with Holm p below 0.05 can stay undecided."
    least = 2.0 ** (1 - ns[0])
    if least > LEVEL:
        text += (f" A sign-flip test of {plural(ns[0], 'pair')} cannot give less than p = {least:g}, whatever the "
                 "differences.")
    return text


# ---------------------------------------------------------------------------------------------------------
# Tables. A new column is a key in the rows (`compare`, `pair_row`), its line here, and its place in a table

TEXTS = dict(  # key in the rows: header
    scale="Scale", arms="Arms", arm="Arm", arch="Arm", treatment_run="Treatment", control_run="Control",
    budget="Tokens",
    from_budget="From", seed="Seed", seeds="Seeds", layer="Layer", won="Lower", first="First", second="Second",
    control_backend="Control backend", treatment_backend="Treatment backend", verdict="Reading", marks="Marked")
NUMBERS = dict(  # key: (header, format)
    n=("n", "d"), mean=("Mean Δ", "+.6f"), sd=("sd", ".6f"), interaction=("Interaction", "+.6f"),
    t_test_p=("t test p", ".2g"), holm_p=("Holm p", ".2g"), sign_flip_p=("Sign-flip p", ".4f"),
    smallest_p=("Sign-flip p, least possible", ".4f"), pairs_needed=("Seeds to find 0.01", ",d"),
    seed_se=("Standard error, seeds", ".6f"), slice_se=("Standard error, evaluation text", ".6f"),
    perplexity=("Perplexity", "+.2%"), delta=("Δ NLL", "+.5f"), delta_se=("± text", ".5f"),
    control_at=("Control NLL", ".5f"), control_se=("± text", ".4f"), control_ppl=("Control PPL", ".3f"),
    treatment_at=("Treatment NLL", ".5f"), treatment_se=("± text", ".4f"), treatment_ppl=("Treatment PPL", ".3f"),
    control_bits_per_byte=("Control bits/byte", ".4f"), treatment_bits_per_byte=("Treatment bits/byte", ".4f"),
    control_speed=("Control tokens/s", ",.0f"), treatment_speed=("Treatment tokens/s", ",.0f"),
    control_gb=("Control peak GB", ".3f"), treatment_gb=("Treatment peak GB", ".3f"),
    speed_ratio=("Change", "+.1%"), memory_ratio=("Change", "+.1%"),
    n_layer=("Layers", "d"), n_embd=("Width", "d"), n_head=("Heads", "d"), head_dim=("Head dim", "d"),
    hidden=("MLP hidden", ",d"), block_layers=("Block layers", "d"), context=("Context", ",d"),
    vocab_size=("Vocabulary", ",d"), n_params=("Parameters", ",d"), extra=("Over control", "+,d"), lr=("Peak lr", "g"),
    batch_size=("Batch", "d"), micro_batch=("Micro-batch", "d"), max_steps=("Steps", ",d"))
SPREADS = dict(  # key of a (mean, sd): (header, format)
    control_nll=("Control NLL", ".4f"), treatment_nll=("Treatment NLL", ".4f"), change=("Δ NLL", "+.4f"),
    from_change=("Δ from", "+.4f"), js=("JS", ".4f"), js_of_mean=("JS of mean weights", ".4f"),
    first_change=("Δ NLL, first", "+.6f"), second_change=("Δ NLL, second", "+.6f"),
    control_shift=("Control, second - first", "+.6f"), treatment_shift=("Treatment, second - first", "+.6f"))
INTERVALS = dict(t_ci="95% t", bootstrap_ci="95% bootstrap", simultaneous_t_ci="Bonferroni t", next_ci="Next seed, 95%")


class Column(typing.NamedTuple):
    """A column: the key in its rows, its header, the format of a number ("" for text), and what stands behind the
    header in CSV, one column for each."""
    key: str
    header: str
    spec: str = ""
    ends: tuple[str, ...] = ("",)

    def show(self, row: dict) -> str:
        value, spec = row.get(self.key), self.spec
        if value is None:
            return "-"
        if self.key in INTERVALS:
            return f"[{value[0]:{spec}}, {value[1]:{spec}}]"
        if self.key in SPREADS:
            mean, sd = value
            return f"{mean:{spec}}" if sd is None else f"{mean:{spec}} ± {sd:{spec.lstrip('+')}}"
        return format(value, spec) if spec else " ".join(str(value).split())


COLUMNS = {key: Column(key, header) for key, header in TEXTS.items()}
COLUMNS |= {key: Column(key, *line) for key, line in NUMBERS.items()}
COLUMNS |= {key: Column(key, *line, ends=("", " sd")) for key, line in SPREADS.items()}
COLUMNS |= {key: Column(key, header, ".6f", (" low", " high")) for key, header in INTERVALS.items()}


class Table(typing.NamedTuple):
    name: str
    title: str
    rows: list[dict]
    keys: tuple[str, ...]
    note: str = ""
    headers: dict[str, str] = {}  # other ones than COLUMNS has; the header of a number that COLUMNS lacks

    def columns(self) -> list[Column]:
        columns = [COLUMNS.get(key) or Column(key, "", ".4f") for key in self.keys]
        return [c._replace(header=self.headers.get(c.key, c.header)) for c in columns]


def screen_table(out: dict) -> Table:
    """The one table that is printed under the conclusions."""
    return Table("estimates", "Estimates", with_paper(out), (
        "scale", "arms", "budget", "n", "mean", "sd", "t_ci", "bootstrap_ci", "sign_flip_p", "holm_p", "perplexity"),
        headers={"mean": "Difference"})


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
    pairs = [{**c, **p, "control_at": p["control_nll"], "treatment_at": p["treatment_nll"],
              "perplexity": -p["ppl_reduction"]} for c in out["comparisons"] for p in c["pairs"]]
    floor = [{**c, **p, "control_run": p["control"], "treatment_run": p["treatment"]}
             for c in out["floor"] for p in c["pairs"]]
    what = ("scale", "arms", "budget")
    made = [
        Table("table1_summary", "Summary (Table 1)", rows, (
            *what, "control_nll", "treatment_nll", "change", "perplexity", "won"),
            "Mean ± sample sd over seeds. Δ is treatment - control, by seed; the change of perplexity is the mean of "
            "those within seeds."),
        Table("estimates", "Estimates", rows, (
            *what, "n", "mean", "sd", "t_ci", "bootstrap_ci", "simultaneous_t_ci", "next_ci", "t_test_p", "holm_p",
            "sign_flip_p", "smallest_p", "pairs_needed", "seed_se", "slice_se"),
            "Bonferroni intervals hold together in 95% of studies. Seeds to find 0.01: for a paired t test at 5% with "
            "80% power. Standard errors are of the mean Δ, over seeds and over evaluation windows."),
        controls_table(out),
        Table("table3_pairs", "Every pair (Table 3)", pairs, (
            *what, "seed", "control_at", "control_se", "treatment_at", "treatment_se", "delta", "delta_se",
            "control_ppl", "treatment_ppl", "perplexity", "control_bits_per_byte", "treatment_bits_per_byte", "marks"),
            "± text: standard error over evaluation windows, of Δ over their differences (neighbours share "
            "documents: a floor)."),
        Table("milestones", "Milestones", out["milestones"], (
            *what, "n", "control_nll", "treatment_nll", "change", "t_ci", "won")),
        Table("trends", "Change of Δ between milestones (Figure 3)", out["trends"], (
            "scale", "arms", "from_budget", "budget", "n", "from_change", "change", "mean", "sd", "t_ci", "verdict"),
            "By seed, with a 95% t interval, each by itself. At all but the last milestone the learning rate has "
            "not decayed.", {"budget": "To", "change": "Δ to", "mean": "Change"}),
        js_table(out),
        Table("crossed", "Arm by backend", out["crossed"], (
            *what, "n", "first", "second", "first_change", "second_change", "control_shift", "treatment_shift",
            "interaction", "sd", "t_ci"),
            "Δ between the arms under the first and the second backend, each arm's own change from first to second, "
            "and last the interaction, Δ under the second - Δ under the first, by seed: what the backend does to the "
            "comparison."),
        Table("noise_floor", "Noise floor: A/A comparisons", floor, (
            "treatment_run", "control_run", "seed", "budget", "delta", "marks"), "A difference of this size is noise."),
        configurations_table(out),
        Table("efficiency", "Efficiency (Appendix E)", pairs, (
            "scale", "arms", "seed", "control_backend", "treatment_backend", "control_speed", "treatment_speed",
            "speed_ratio", "control_gb", "treatment_gb", "memory_ratio"),
            "Changes on one backend and device only; speeds of a shared machine are no comparison (train.py "
            "--benchmark is). The paper, reference route, seed 123: S 56,158 and 50,505 tokens/s (-10.1%), 16.005 and "
            "17.647 GB; M 21,616 and 19,697 (-8.9%), 21.015 and 23.132 GB.")]
    return [t for t in made if t.rows]


def controls_table(out: dict) -> Table:
    """Table 2: a row for each scale, at the last step that most arms have reached. All its arms share their seeds:
    those that every arm has, or else the seed that most have, and the others a dash."""
    rows, steps, headers = [], {}, {"control": out["control"]}
    for c in out["milestones"]:
        steps.setdefault((c["scale"], c["max_steps"]), {}).setdefault(c["step"], []).append(c)
    for (scale, _), by_step in steps.items():
        here = by_step[max(by_step, key=lambda step: (len(by_step[step]), step))]
        if len(here) < 2:
            continue
        every = [seed for c in here for seed in c["seeds"]]
        most = max(sorted(set(every)), key=every.count)
        seeds = {seed for seed in every if every.count(seed) == len(here)} or {most}
        row = {"scale": scale, "budget": here[0]["budget"], "seeds": listed(seeds)}
        for c in here:
            own = [p for p in c["pairs"] if p["seed"] in seeds]
            if len(own) == len(seeds):
                row.setdefault("control", float(np.mean([p["control_nll"] for p in own])))
                row[f"arm {c['arm']}"] = float(np.mean([p["treatment_nll"] for p in own]))
                headers[f"arm {c['arm']}"] = c["arm"]
        rows.append(row)
    return Table("table2_controls", "Controls (Table 2)", rows, ("scale", "budget", "seeds", *headers),
                 "NLL over the same seeds in a row. " + SAME_AS_BLOCK["average"], headers)


def js_table(out: dict) -> Table:
    rows = []
    for c in out["comparisons"]:
        means = c["js_of_mean"] or [None] * len(c["js"])
        layers = list(zip(range(len(c["js"])), c["js"], means))
        if c["js"]:
            layers.append(("1 to last", c["js_mean"], None))
        rows += [{**c, "layer": layer, "js": js, "js_of_mean": of_mean} for layer, js, of_mean in layers]
    return Table("js_by_layer", "JS divergence by layer (Figure 4)", rows, (
        "scale", "arm", "layer", "js", "js_of_mean"),
        "Nats (at most ln 2 = 0.6931), mean ± sd over seeds; layer 0 has one source.")


def configurations_table(out: dict) -> Table:
    rows = {}
    for pair in (pair for c in out["comparisons"] for pair in c["runs"]):
        control = pair.control.config.get("n_params")
        for r in pair[:2]:
            f, width = r.config, r.config.get("n_embd") or 0
            rows.setdefault((r.scale, r.arch, f.get("lr"), r.max_steps), {
                **f, "head_dim": width // f["n_head"] if f.get("n_head") else None,
                "hidden": round(width * f["mlp_ratio"]) if f.get("mlp_ratio") else None,
                "extra": f["n_params"] - control if control and f.get("n_params", control) != control else None})
    return Table("table4_configurations", "Configurations (Table 4)", list(rows.values()), (
        "scale", "arch", "n_layer", "n_embd", "n_head", "head_dim", "hidden", "block_layers", "context", "vocab_size",
        "n_params", "extra", "lr", "batch_size", "micro_batch", "max_steps"))


def markdown(t: Table) -> str:
    """A Markdown table whose columns also line up as plain text."""
    lines = []
    columns = [[c.header, *(c.show(row).replace("|", "\\|") for row in t.rows)] for c in t.columns()]
    for c, cells in zip(t.columns(), columns):
        width = max(3, *map(len, cells))
        cells.insert(1, "-" * (width - 1) + ":" if c.spec else "-" * width)
        lines.append([cell.rjust(width) if c.spec else cell.ljust(width) for cell in cells])
    table = "\n".join(f"| {' | '.join(row)} |" for row in zip(*lines))
    return f"### {t.title}\n\n{table}\n" + (f"\n{t.note}\n" if t.note else "")


def latex(t: Table) -> str:
    """A booktabs tabular, to be \\input."""
    def cell(text: str, spec: str) -> str:
        text = re.sub(r"([&%$#_{}])", r"\\\1", text)
        for sign, tex in (("±", r"\pm"), ("Δ", r"\Delta")):
            text = text.replace(sign, tex if spec else f"${tex}$")
        return f"${text}$" if spec and text != "-" else text
    columns = t.columns()
    lines = [[cell(c.header, "") for c in columns]]
    lines += [[cell(c.show(row), c.spec) for c in columns] for row in t.rows]
    head, *body = (" & ".join(line) + r" \\" for line in lines)
    align = "".join("r" if c.spec else "l" for c in columns)
    return "\n".join([f"% {t.title}. {t.note}", rf"\begin{{tabular}}{{{align}}}", r"\toprule", head, r"\midrule", *body,
                      r"\bottomrule", r"\end{tabular}", ""])


def csv_rows(t: Table) -> typing.Iterator[list]:
    """Unrounded; an interval and a spread take two columns."""
    columns = t.columns()
    yield [c.header + end for c in columns for end in c.ends]
    for row in t.rows:
        line = []
        for c in columns:
            value = row.get(c.key)
            line += [value] if len(c.ends) == 1 else value or (None, None)
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
    if comparisons:
        lines += [textwrap.fill(trust(comparisons), 158), ""]
    if figures is not None:
        lines += [markdown(t) for t in tables(out)]
        lines += [f"![{caption}]({name}.png)\n" for name, caption in figures.items()]
    elif comparisons:
        lines.append(markdown(screen_table(out)))
    if out["problems"]:
        lines += ["### Left out, refused, unfinished, unplanned or missing", ""]
    reasons: dict[str, list[str]] = {}
    for p in out["problems"]:
        reasons.setdefault(p["why"], []).append(p["run"])
    for why, runs in reasons.items():
        one = len(runs) == 1
        lines.append(wrapped(f"{runs[0]}: {why}" if one else f"{len(runs)} runs, {why}: {', '.join(runs)}"))
    if figures is None and comparisons:
        lines.append("" if out["problems"] else "Nothing was left out.")
        lines.append("Pairs, milestones, JS by layer, configurations, efficiency and figures: --out=FOLDER.")
    return "\n".join(lines).rstrip()


def summary(comparisons: list[dict]) -> list[str]:
    """Which arms got which verdict, a sentence for each verdict."""
    lines, control = [], comparisons[0]["control"]
    for verdict, text in VERDICTS.items():
        arms = [f"{c['scale']} {c['arm']}" for c in comparisons if c["verdict"] == verdict]
        if arms:
            lines.append(f"{text} {control}: {', '.join(arms)}.")
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
         "legend.frameon": False, "figure.constrained_layout.use": True, "legend.handlelength": 2.8}


def draw(out: dict, folder: Path) -> dict[str, str]:
    """Write the figures as png and pdf; returns {name: caption}. Every comparison is in figures 2 and 3, every arm with
    two reads in figure 4."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    shown, captions = out["comparisons"], {}
    reads = [c for c in shown if c["js"] and c["treatment"] not in SAME_AS_BLOCK]
    figures = {"figure2_effects": (draw_effects, shown), "figure3_milestones": (draw_milestones, shown),
               "figure4_js": (draw_js, reads), "training_curves": (draw_curves, shown[:1])}
    with plt.rc_context(STYLE):
        for name, (drawing, of) in figures.items():
            if not of:
                continue
            fig, caption = drawing(plt, of, out)
            for kind, metadata in (("png", {"Software": None}), ("pdf", {"CreationDate": None})):  # nothing of today
                with atomic_file(folder / f"{name}.{kind}") as f:
                    fig.savefig(f, format=kind, dpi=300, metadata=metadata)
            plt.close(fig)
            seeds: dict[str, list[str]] = {}
            for c in of:
                seeds.setdefault(listed(c["seeds"]), []).append(f"{c['scale']} {c['arm']}")
            sizes = [f"{', '.join(arms)}: n = {s.count(',') + 1} (seed{'s' if ',' in s else ''} {s})"
                     for s, arms in seeds.items()]
            captions[name] = f"{caption} {'; '.join(sizes)}."
    return captions


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
    """Figure 3: the difference to the control against tokens, a panel for each scale."""
    scales = list(dict.fromkeys(c["scale"] for c in of))
    most = max(sum(c["scale"] == scale for c in of) for scale in scales)
    columns = min(2, len(scales))
    rows = math.ceil(len(scales) / columns)
    fig, axes = plt.subplots(rows, columns, squeeze=False, sharey=True, figsize=(3.4, (1.5 + 0.11 * most) * rows + 0.5))
    for ax in axes.flat[len(scales):]:
        ax.set_visible(False)
    for ax, scale in zip(axes.flat, scales):
        points = [m for m in out["milestones"] if m["scale"] == scale and m["tokens"]]
        for k, c in enumerate(c for c in of if c["scale"] == scale):
            path = [m for m in points if m["arms"] == c["arms"]]
            curve(ax, [m["tokens"] / 1e6 for m in path], [m["change"] for m in path], k, c["arm"], marker="o", ms=2.5)
        ax.axhline(0, **ZERO)
        ax.set(title=scale, xlabel="tokens (M)", xscale="log")
        ticks = sorted({m["tokens"] / 1e6 for m in points})
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
# The command


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
