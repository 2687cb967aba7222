"""Train one arm, or a sweep of arms, seeds and settings, under the paper's protocol.

    python train.py --arch=block,rd --scale=nano --seed=123       # a matched pair on the bundled novels, on a laptop
    python train.py --arch=rd --scale=S --seed=123                # the paper's 120M run (data: python prepare.py)
    torchrun --nproc_per_node=8 train.py --arch=rd --scale=M      # the same numbers, on eight GPUs
    python train.py --benchmark --arch=plain,block,rd --scale=S   # speed and memory, no data needed

The same command again continues an unfinished run and skips a finished one. `-h` explains every flag.
"""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import fnmatch
import functools
import gc
import hashlib
import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import eval as evaluation
from model import ARMS, GPT, SCALES, GPTConfig, canonical, find_arm, logits_apart
from prepare import (BadInput, Failed, atomic_file, flag, human_time, open_data, parse_flags, read_json, run_script,
                     sha256_of, to_json, write_json)
from route_kernel import choose_backend

# Dimension letters: B sequences a step, T context, n step (counted from 1), N steps of the schedule, W warm-up steps.

ROOT = Path(__file__).resolve().parent

# What the protocol fixes per scale (paper, Table 4 and section 4); nano is the CPU demo's.
PROTOCOL: dict[str, dict] = {
    "S": dict(lr=3e-4, batch_size=32, micro_batch=8, max_tokens=2_000_000_000, eval_tokens=10_485_760),
    "M": dict(lr=2e-4, batch_size=32, micro_batch=4, max_tokens=2_000_000_000, eval_tokens=10_485_760),
    "nano": dict(lr=1e-3, batch_size=8, micro_batch=8, max_tokens=262_144, eval_tokens=None),
}


@dataclass
class Flags:
    # what to run
    arch: str = flag("rd", f"arm: {', '.join(ARMS)}; a comma list in any flag makes a sweep")
    scale: str = flag("S", "shape and protocol", tuple(PROTOCOL))
    seed: int = flag(123, "of the initial weights and the data order")
    backend: str = flag("auto", "how routes are computed", ("auto", "reference", "fused"))
    data: str | None = flag(None, "folder written by prepare.py [data/demo for nano, data/fineweb-edu for S and M]")
    out: str = flag("runs", "folder of runs")
    tag: str = flag("", "appended to the run's name")
    init_from: str | None = flag(None, "start from the weights of this run folder instead of from noise")
    freeze: str | None = flag(None, "keep parameters whose names match this pattern at their start, e.g. *.query.v")
    # how long
    max_steps: int | None = flag(None, "steps of the schedule")
    max_tokens: int | None = flag(None, "length of the schedule in tokens, rounded up to whole steps [2e9 for S and M]")
    stop_tokens: int | None = flag(None, "stop there with the schedule unchanged; such a run is complete")
    repeat_data: bool = flag(False, "S and M: allow more training tokens than the data folder holds (epochs)")
    # batch
    batch_size: int | None = flag(None, "sequences a step [32; nano 8]")
    micro_batch: int | None = flag(None, "sequences at a time on one device [S 8, M 4, nano 8]")
    eval_tokens: int | None = flag(None, "predicted tokens of an evaluation [10485760; nano: the whole split]")
    eval_batch: int | None = flag(None, "sequences at a time in an evaluation [micro_batch]")
    # optimiser
    lr: float | None = flag(None, "peak learning rate [S 3e-4, M 2e-4, nano 1e-3]")
    route_lr_mult: float = flag(1.0, "factor on the learning rate of the route queries")
    grad_clip: float = flag(1.0, "global gradient norm; 0 does not clip")
    weight_decay: float = flag(0.1, "on matrices, the tied embedding included; never on routes or gains")
    beta1: float = flag(0.9, "AdamW")
    beta2: float = flag(0.95, "AdamW")
    adam_eps: float = flag(1e-8, "AdamW")
    warmup_ratio: float = flag(0.02, "share of the schedule that warms up, at least one step")
    min_lr_ratio: float = flag(0.1, "learning rate at the end over its peak")
    # shape
    context: int | None = flag(None, "tokens a sequence")
    n_layer: int | None = flag(None, "layers")
    n_embd: int | None = flag(None, "width")
    n_head: int | None = flag(None, "heads")
    block_layers: int | None = flag(None, "layers per residual block")
    # machine
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda"))
    dtype: str = flag("auto", "of the products (autocast)", ("auto", "float32", "bfloat16"))
    residual_dtype: str | None = flag(None, "of the residual stream [the compute dtype]", ("float32", "bfloat16"))
    compile: bool = flag(False, "torch.compile each layer's attention and MLP")
    deterministic: bool = flag(False, "deterministic algorithms only, so that GPU runs repeat bit for bit (slower)")
    # keeping
    ckpt_every: int = flag(1000, "steps between checkpoints")
    keep: int = flag(1, "how many of the latest checkpoints stay")
    keep_milestones: bool = flag(False, "keep the checkpoint of every milestone too")
    force: bool = flag(False, "take over a run folder whose lock another host left")
    wandb: str | None = flag(None, "also log to this Weights & Biases project")
    primary: str | None = flag(None, "the arm that a sweep is made to judge; stands in plan.json, as does")
    margin: float | None = flag(None, "a difference in NLL too small to matter")
    # other uses
    benchmark: bool = flag(False, "time the arms on random tokens, interleaved, and write nothing")
    rounds: int = flag(7, "rounds of a benchmark")
    dry_run: bool = flag(False, "print what would run: parameters, FLOPs, memory, disk, time; train nothing")
    together = ()  # not a flag: the arms of the whole command


# ---------------------------------------------------------------------------------------------------------
# The schedule and the data order: pure functions of the settings


def warmup_steps(N: int, ratio: float) -> int:
    return min(N, max(1, round(ratio * N)))


def lr_at(n: int, N: int, W: int, peak: float, min_ratio: float = 0.1) -> float:
    """Learning rate of update n = 1..N: linear to the peak at W, then a cosine that ends at min_ratio * peak."""
    if n <= W:
        return peak * n / W
    return peak * (min_ratio + (1 - min_ratio) / 2 * (1 + math.cos(math.pi * (n - W) / (N - W))))


def milestones(N: int, stop: int | None) -> list[int]:
    """Steps after which the whole evaluation slice is measured: an eighth, a quarter, half and all of the schedule,
    and where the run stops."""
    end = stop or N
    return sorted({m for m in (math.ceil(N / 8), math.ceil(N / 4), math.ceil(N / 2), N) if m <= end} | {end})


class Batches:
    """Windows of train.bin in the order that the seed fixes: sample j of step s (from 0) has index k = s B + j and is
    window perm(seed, k // n)[k mod n] of the n windows; it depends on nothing else.

    Windows are read with pread, not through a memory map: resident memory stays flat over weeks.
    """

    def __init__(self, path: Path, context: int, batch_size: int, seed: int):
        self.T, self.B, self.seed = context, batch_size, seed
        self.n = (path.stat().st_size // 2 - 1) // context
        if self.n < 1:
            raise BadInput(f"{path} holds {path.stat().st_size // 2} tokens, less than one window of {context} + 1")
        self.fd = os.open(path, os.O_RDONLY)
        # RandomState's streams are frozen by numpy's compatibility policy; a Generator's may change with a release
        self.perm = functools.lru_cache(2)(
            lambda epoch: np.random.RandomState([self.seed & 0xFFFFFFFF, epoch]).permutation(self.n).astype(np.uint32))

    def indices(self, step: int) -> np.ndarray:
        """Window of each sample of step `step` (from 0): int64 [B]."""
        k = np.arange(step * self.B, (step + 1) * self.B)
        return np.array([self.perm(int(e))[i] for e, i in zip(k // self.n, k % self.n)], dtype=np.int64)

    def micro(self, step: int, micro: int, rank: int, ranks: int):
        """This rank's micro-batches of a step: pairs of int64 [micro, T] inputs and targets."""
        index = self.indices(step)
        for start in range(rank * micro, self.B, ranks * micro):
            rows = [np.frombuffer(os.pread(self.fd, 2 * (self.T + 1), 2 * int(i) * self.T), dtype="<u2")
                    for i in index[start:start + micro]]
            ids = torch.from_numpy(np.stack(rows).astype(np.int64))
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def close(self) -> None:
        os.close(self.fd)


# ---------------------------------------------------------------------------------------------------------
# From flags to resolved settings


def arm_folder(arch: str) -> str:
    """mhar:heads=8:sources=full -> mhar_heads8_sourcesfull"""
    return arch.replace(":", "_").replace("=", "")


def short(value) -> str:
    """A setting inside a folder name: 6e-4, 5e8, 300, demo."""
    if isinstance(value, (bool, str)):
        return str(value).replace("/", "_")
    text = f"{value:.6e}" if isinstance(value, float) and 0 < value < 0.01 or value >= 100_000 else f"{value:.6g}"
    if "e" not in text:
        return text
    digits, exponent = text.split("e")
    return f"{digits.rstrip('0').rstrip('.') if '.' in digits else digits}e{int(exponent)}"


# Settings that change a run's numbers, in the order in which they enter its name, and how they are written there.
NAMED = dict(data="data", max_steps="steps", stop_steps="stop", batch_size="batch", context="context", n_layer="layers",
             n_embd="width", n_head="heads", block_layers="block", lr="lr", route_lr_mult="routelr", grad_clip="clip",
             weight_decay="decay", beta1="beta1_", beta2="beta2_", adam_eps="eps", warmup_ratio="warmup",
             min_lr_ratio="minlr", init_from="from", freeze="freeze", eval_tokens="eval", dtype="dtype",
             residual_dtype="residual", backend="backend")


def sweep_backend(f: Flags, device: torch.device) -> tuple[str, str]:
    """(backend, reason): with auto, one that this machine and every arm of the command has, so that arms differ in
    nothing else."""
    backend, reason = choose_backend(f.backend, device)
    slow = [arch for arch in (f.arch, *Flags.together) if not find_arm(arch).fused]
    if f.backend == "auto" and backend == "fused" and slow:
        return "reference", f"{slow[0]} has no fused path" + ("" if slow[0] == f.arch else ", and one backend serves the sweep")
    return backend, reason


def resolve(f: Flags, device: torch.device, ranks: int) -> dict:
    """Every setting of a run, as config.json holds it (contract: flat). Raises BadInput naming all that is wrong."""
    proto, problems = PROTOCOL[f.scale], []
    pick = lambda name: getattr(f, name) if getattr(f, name) is not None else proto.get(name)
    c = {k: getattr(f, k) for k in ("arch scale seed tag out init_from freeze route_lr_mult grad_clip weight_decay beta1 "
         "beta2 adam_eps warmup_ratio min_lr_ratio residual_dtype compile deterministic").split()}
    c["data"] = f.data or str(Path("data") / ("demo" if f.scale == "nano" else "fineweb-edu"))
    for name in ("lr", "batch_size", "eval_tokens"):
        c[name] = pick(name)
    shape = {k: getattr(f, k) for k in ("context", "n_layer", "n_embd", "n_head", "block_layers") if getattr(f, k) is not None}
    try:
        gpt = GPTConfig.from_scale(f.scale, f.arch, backend=f.backend, **shape)
        c.update({k: getattr(gpt, k) for k in ("n_layer", "n_embd", "n_head", "block_layers", "context", "mlp_ratio")})
    except ValueError as e:
        problems += str(e).splitlines()
        c["context"] = shape.get("context") or SCALES[f.scale]["context"]
    if f.max_steps is not None and f.max_tokens is not None:
        problems.append("give --max_steps or --max_tokens, not both: one follows from the other")
    for name in ("max_steps", "max_tokens", "stop_tokens", "batch_size", "micro_batch", "eval_tokens", "eval_batch",
                 "ckpt_every", "keep", "rounds", "context"):
        value = getattr(f, name)
        if value is not None and value < 1:
            problems.append(f"--{name}={value} must be at least 1")
    for name, low, high in (("lr", 0, 10), ("route_lr_mult", 0, 1e4), ("grad_clip", 0, 1e9), ("weight_decay", 0, 10),
                            ("beta1", 0, 0.99999), ("beta2", 0, 0.99999), ("adam_eps", 0, 1), ("warmup_ratio", 0, 1), ("min_lr_ratio", 0, 1)):
        if not low <= c[name] <= high:
            problems.append(f"--{name}={c[name]} must lie between {low} and {high:g}")
    B, T = c["batch_size"], c["context"]
    c["tokens_per_step"] = tps = max(1, B * T)
    per_rank = B // ranks
    if B % ranks:
        low, high = B // ranks * ranks, -(-B // ranks) * ranks
        problems.append(f"--batch_size={B} does not divide among {ranks} ranks; nearest: {' or '.join(str(x) for x in (low, high) if x)}")
    else:
        micro = f.micro_batch
        divisors = [m for m in range(1, per_rank + 1) if per_rank % m == 0] or [1]
        if micro is None:  # the default gives way to the batch; what was asked for does not
            micro = max(m for m in divisors if m <= max(1, proto["micro_batch"]))
        elif micro not in divisors:
            near = {max((m for m in divisors if m < micro), default=1), min((m for m in divisors if m > micro), default=per_rank)}
            problems.append(f"--micro_batch={micro} on {ranks} rank{'s' * (ranks > 1)} does not divide --batch_size={B}; "
                            f"nearest: {' or '.join(map(str, sorted(near)))}")
        c["micro_batch"] = micro
    if problems:
        raise BadInput("\n".join(dict.fromkeys(problems)))
    c["max_steps"] = N = f.max_steps or math.ceil((f.max_tokens or proto["max_tokens"]) / tps)
    c["max_tokens"] = N * tps
    stop = math.ceil(f.stop_tokens / tps) if f.stop_tokens else None
    if stop and stop > N:
        raise BadInput(f"--stop_tokens={f.stop_tokens:,} lies beyond the schedule of {N * tps:,} tokens")
    c["stop_steps"] = stop if stop != N else None
    c["stop_tokens"] = c["stop_steps"] and stop * tps
    c["warmup_steps"], c["milestones"] = warmup_steps(N, f.warmup_ratio), milestones(N, c["stop_steps"])
    c["ranks"], c["device"] = ranks, device.type
    c["device_name"] = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    c["dtype"], c["dtype_reason"] = evaluation.pick_dtype(f.dtype, device)
    c["backend"], c["backend_reason"] = sweep_backend(f, device)
    # the name: scale, arm, seed, and every setting that is not the scale's default
    asked = {**{k: getattr(f, k) for k in NAMED if hasattr(f, k)}, **{k: c[k] for k in ("max_steps", "stop_steps")}}
    usual = dict(data=None, stop_steps=None, dtype="auto", backend="auto", max_steps=math.ceil(proto["max_tokens"] / (proto["batch_size"]
                 * SCALES[f.scale]["context"])), **{k: proto[k] for k in ("lr", "batch_size", "eval_tokens")},
                 **{k: SCALES[f.scale][k] for k in ("context", "n_layer", "n_embd", "n_head", "block_layers")})
    parts = [f"{f.scale}-{arm_folder(f.arch)}-s{f.seed}"]
    for key, word in NAMED.items():
        default = usual.get(key, Flags.__dataclass_fields__[key].default if key in Flags.__dataclass_fields__ else None)
        value = asked.get(key)
        if value is None or value == default:
            continue
        if key == "data":
            if Path(value).resolve() == Path("data", "demo" if f.scale == "nano" else "fineweb-edu").resolve():
                continue
            value = Path(value).resolve().name
        if key == "init_from" and len(value := Path(value).name) > 40:
            value = f"{value[:31]}~{hashlib.sha1(value.encode()).hexdigest()[:8]}"
        parts.append(word + short(value).replace("*", "_"))
    c["name"] = "-".join(parts + ([f.tag] if f.tag else []))
    if any(ch in c["name"] for ch in '/\\:\0') or len(c["name"]) > 200:
        raise BadInput(f"the run's name {c['name']!r} is not a usable folder name; change --tag")
    return c


def provenance() -> dict:
    """Where a run was made: versions, commit, command."""
    git = lambda *a: subprocess.run(["git", "-C", str(ROOT), *a], capture_output=True, text=True).stdout.strip()
    commit = dirty = None
    with contextlib.suppress(OSError):
        commit = git("rev-parse", "HEAD") or None
        dirty = bool(git("status", "--porcelain", "--untracked-files=no")) if commit else None
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return dict(torch=torch.__version__, triton=triton_version, python=platform.python_version(), platform=platform.platform(),
                git_commit=commit, git_dirty=dirty, host=socket.gethostname(), command=shlex.join(sys.argv),
                started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))


@functools.lru_cache(1)
def probe() -> dict[str, list[float]]:
    """What the code computes, so that runs made before and after an edit can be told to be comparable: for every
    option-free arm the losses and gradient norms of three optimiser steps, and an evaluation, of a tiny float32
    model on the CPU."""
    found = {}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(61, (4, 2, 17), generator=generator)
    for arch in ARMS:
        model = GPT(GPTConfig(arch=arch, n_layer=4, n_embd=32, n_head=2, block_layers=2, context=16, vocab_size=61,
                              backend="reference"), seed=1)
        optimizer = make_optimizer(model, dict(lr=0.03, weight_decay=0.1, route_lr_mult=1.0, beta1=0.9, beta2=0.95, adam_eps=1e-8))
        losses, norms = [], []
        for n in (1, 2, 3):
            loss = model(ids[n, :, :-1], ids[n, :, 1:])[1]
            loss.backward()
            losses.append(loss.detach())
            norms.append(update(model, optimizer, lr_at(n, 3, 1, 0.03), 1.0))
        final = model.token_nll(ids[0, :, :-1], ids[0, :, 1:]).double().mean()
        found[arch] = [round(float(x), 9) for x in (*losses, *norms, final)]
    return found


# ---------------------------------------------------------------------------------------------------------
# One step


def make_optimizer(model: GPT, c: dict) -> torch.optim.AdamW:
    groups = model.param_groups(c["lr"], c["weight_decay"], c["route_lr_mult"])
    return torch.optim.AdamW([{k: v for k, v in g.items() if k != "names"} for g in groups], lr=c["lr"],
                             betas=(c["beta1"], c["beta2"]), eps=c["adam_eps"], fused=True)


def update(model: GPT, optimizer: torch.optim.AdamW, lr: float, grad_clip: float) -> torch.Tensor:
    """Clip, step, forget the gradients. Returns the gradient's global norm before clipping, still on the device."""
    parameters = [p for g in optimizer.param_groups for p in g["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if grad_clip > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    for g in optimizer.param_groups:
        g["lr"] = lr * g["mult"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def accumulate(model, batches, count: int, device: torch.device, autocast) -> torch.Tensor:
    """Gradients of the mean loss over this rank's `count` micro-batches of a step; returns that loss."""
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(batches):
        if device.type == "cuda":
            x, y = (t.pin_memory().to(device, non_blocking=True) for t in (x, y))
        # ranks exchange gradients once a step, after the last micro-batch
        wait = model.no_sync() if hasattr(model, "no_sync") and i + 1 < count else contextlib.nullcontext()
        with wait:
            with autocast():
                loss = model(x, y)[1] / count
            loss.backward()
        total += loss.detach()
    return total


def keep_freed_memory() -> None:
    """Have glibc reuse the pages of freed tensors instead of giving them back: faulting in fresh ones for every large
    tensor took 6% of an S step on a CPU, in any arm."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


def compile_layers(model: GPT, backend: str = "inductor") -> None:
    """torch.compile each layer, or its attention and MLP where depth routes, which are fused already, stand between them:
    one compilation serves all layers. What does not compile raises, nothing falls back to eager without a word."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    for layer in model.layers:
        for part in ("forward",) if model.arm.depth.whole_layers else ("attention", "mlp"):
            setattr(layer, part, torch.compile(getattr(layer, part), dynamic=False, fullgraph=True, backend=backend))


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def out_of_memory(e: BaseException, micro: int) -> Failed | None:
    """The error to show for an allocation that failed, None for anything else."""
    text = str(e)
    if not isinstance(e, torch.OutOfMemoryError) and "can't allocate memory" not in text and not isinstance(e, MemoryError):
        return None
    advice = f"try --micro_batch={micro // 2} (the batch and the numbers stay the same)" if micro > 1 \
        else "at --micro_batch=1: a smaller --context or --scale, or a larger device, is needed"
    return Failed(f"out of memory at --micro_batch={micro}; {advice}")


# ---------------------------------------------------------------------------------------------------------
# Ranks, stop signals, locks, files


STOP = {"signal": 0}  # set by the handler, read between steps and between evaluation batches


def heed_signals() -> None:
    """SIGINT, SIGTERM and SIGUSR1 end the run after the step at hand, saved; a second one ends it at once."""
    def handler(number, frame):
        if STOP["signal"]:
            raise KeyboardInterrupt
        STOP["signal"] = number
        print(f"\n{signal.Signals(number).name}: saving after this step (again to quit at once)", file=sys.stderr, flush=True)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handler)


class World:
    """The ranks that train together (one, unless torchrun started several) and what they agree on."""

    def __init__(self, device: torch.device):
        self.ranks, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        self.control = None
        if self.ranks > 1:
            wait = datetime.timedelta(minutes=30)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=wait)
            # flags travel on the CPU, so that asking for a stop never waits for the GPU
            self.control = dist.new_group(backend="gloo", timeout=wait)

    def stop(self) -> int:
        """The signal that any rank received, at the same step on all of them; 0 for none."""
        if self.ranks == 1:
            return STOP["signal"]
        flag = torch.tensor(STOP["signal"])
        dist.all_reduce(flag, dist.ReduceOp.MAX, group=self.control)
        STOP["signal"] = int(flag)
        return STOP["signal"]

    def from_rank0(self, make):
        """`make()` on rank 0, its value (or its error) on every rank."""
        if self.ranks == 1:
            return make()
        box = [None, None]
        if self.rank == 0:
            try:
                box[0] = make()
            except (BadInput, Failed, OSError) as e:
                box[1] = e if isinstance(e, (BadInput, Failed)) else BadInput(str(e))
        dist.broadcast_object_list(box, src=0, group=self.control)
        if box[1] is not None:
            raise box[1]
        return box[0]


def say(world: World, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


class Busy(BadInput):
    """Another process has this run."""


def started_at(pid: int) -> str | None:
    """When process `pid` of this host started, in its kernel's ticks: tells it from a later one of the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        try:
            os.kill(pid, 0)
            return "alive"
        except PermissionError:
            return "alive"
        except OSError:
            return None


@contextlib.contextmanager
def claim(path: Path, what: str, force: bool = False):
    """Hold the exclusive lock file `path` (host, process, time). A lock whose process is dead is taken over; a living
    one, or one of another host without `force`, raises Busy with one line about who holds it."""
    mine = dict(host=socket.gethostname(), pid=os.getpid(), started=started_at(os.getpid()), time=time.strftime("%F %T"))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{mine['host']}.{mine['pid']}")
    draft.write_text(to_json(mine) + "\n")
    try:
        for _ in range(3):
            try:
                os.link(draft, path)  # whole or not at all, also over NFS
                break
            except FileExistsError:
                pass
            try:
                text = path.read_text()
                held = json.loads(text)
            except FileNotFoundError:
                continue
            except ValueError:
                text, held = "", {}
            local = held.get("host") == mine["host"]
            if local and started_at(held["pid"]) == held["started"]:
                raise Busy(f"{what} is being run by process {held['pid']} of this host since {held['time']}")
            if held and not local and not force:
                raise Busy(f"{what} is locked by {held.get('host')} (process {held.get('pid')}, since {held.get('time')}); "
                           "if that host is gone, pass --force")
            aside = path.with_name(f".{path.name}.stale.{mine['pid']}")
            with contextlib.suppress(FileNotFoundError):
                os.rename(path, aside)
                if aside.read_text() != text:  # somebody else took it over in between: give theirs back
                    os.link(aside, path)
                aside.unlink()
        else:
            raise Busy(f"{what}: its lock {path} changes hands faster than it can be read; try again")
    finally:
        draft.unlink()
    try:
        yield
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


class Metrics:
    """metrics.jsonl: one strict-JSON object a line, flushed line by line."""

    def __init__(self, path: Path, upto: int):
        """Open for appending, cut back to step `upto` and without its end line, as if never interrupted."""
        kept = []
        if path.exists() and upto:
            for line in path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(ValueError):  # the last line of a killed run may be half written
                    record = json.loads(line)
                    if record["kind"] != "end" and record["step"] <= upto:
                        kept.append(line)
        with atomic_file(path, "w") as f:
            f.write("".join(line + "\n" for line in kept))
        self.evaluated = {r["step"] for r in map(json.loads, kept) if r["kind"] == "eval"}
        self.file = open(path, "a", encoding="utf-8")

    def write(self, **record) -> None:
        self.file.write(to_json(record) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def last_status(folder: Path) -> str | None:
    """complete, stopped or diverged, from the last line of a run's metrics; None while it has no end."""
    try:
        with open(folder / "metrics.jsonl", "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 8192))
            record = json.loads(f.read().splitlines()[-1])
        return record.get("status") if record.get("kind") == "end" else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def save_checkpoint(folder: Path, c: dict, keep: int, keep_milestones: bool, model: GPT, optimizer, step: int) -> None:
    """ckpt.pt, whole or not at all; older ones stay as ckpt-<step>.pt while `keep` or a milestone holds them."""
    with atomic_file(folder / "ckpt.pt") as f:
        torch.save(dict(format=2, step=step, tokens=step * c["tokens_per_step"], name=c["name"], arch=c["arch"],
                        model=model.state_dict(), optimizer=optimizer.state_dict()), f)
    if keep > 1 or keep_milestones and step in c["milestones"]:
        path = folder / f"ckpt-{step:06d}.pt"
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        try:
            os.link(folder / "ckpt.pt", path)
        except OSError:  # a file system without links
            shutil.copyfile(folder / "ckpt.pt", path)
    old = sorted((int(p.stem[5:]), p) for p in folder.glob("ckpt-*.pt") if p.stem[5:].isdigit())  # as numbers, not names
    recent = {s for s, _ in old[-keep:]} if keep > 1 else set()
    for s, path in old:
        if s not in recent and not (keep_milestones and s in c["milestones"]):
            path.unlink()


# Settings that a resumed run must share with its beginning; the others may change and are said.
SAME = ("arch scale seed data_fingerprint tokenizer_sha256 vocab_size n_layer n_embd n_head block_layers context mlp_ratio "
        "batch_size max_steps stop_steps warmup_steps milestones lr min_lr_ratio beta1 beta2 adam_eps weight_decay grad_clip "
        "route_lr_mult init_from freeze eval_tokens dtype residual_dtype backend").split()
MAY_DIFFER = "micro_batch ranks compile device device_name torch triton deterministic".split()


def check_resume(old: dict, new: dict, folder: Path, code: bool) -> list[str]:
    """Lines about settings that changed harmlessly since the run began. Raises BadInput listing what must not change,
    with `code` what the code computes as well."""
    bad = [f"{k}: {old.get(k)} before, {new.get(k)} now" for k in SAME if old.get(k) != new.get(k)]
    ours = (old.get("probe") or {}).get(new["arch"])
    if code and ours is not None and not np.allclose(ours, new["probe"][new["arch"]], rtol=1e-5, atol=0):
        bad.append(f"the code: on a fixed tiny model, arm {new['arch']} gave {ours} before, {new['probe'][new['arch']]} now")
    if bad:
        raise BadInput(f"{folder} was begun with other settings and cannot be continued with these; use --tag for a new run, "
                       "or move the folder away\n" + "\n".join(bad))
    return [f"{k}: {old.get(k)} before, {new.get(k)} now" for k in MAY_DIFFER if old.get(k) != new.get(k)]


# ---------------------------------------------------------------------------------------------------------
# One run


def open_run_data(c: dict, f: Flags, world: World):
    """The data folder of a run, checked against what the run asks of it; fills in the settings that depend on it."""
    folder = Path(c["data"])
    if not folder.exists() and not f.data and f.scale == "nano":
        def make():
            say(world, f"{folder} is missing: preparing the bundled corpus")
            subprocess.run([sys.executable, str(ROOT / "prepare.py"), "--source=demo", f"--out={folder}"], check=True)
        world.from_rank0(make)
    world.from_rank0(lambda: open_data(folder) and None)  # one rank says what is wrong with it; open files do not travel
    data = open_data(folder)
    windows, enough = evaluation.slice_windows(data, "val", c["context"], c["eval_tokens"])
    strict = f.scale in ("S", "M")
    have = data.meta["splits"]
    if not enough and strict and f.eval_tokens is None:
        raise BadInput(f"{folder}: validation holds {have['val']['tokens']:,} tokens, the paper's slice is {c['eval_tokens']:,}; prepare "
                       "3 shards or more (python prepare.py --shards=3: about 2.24 B training and 11.4 M validation tokens), or pass --eval_tokens")
    need = (c["stop_steps"] or c["max_steps"]) * c["tokens_per_step"]
    if need > have["train"]["tokens"] and strict and not f.repeat_data:
        raise BadInput(f"{folder}: {need:,} training tokens are asked for and {have['train']['tokens']:,} are there; prepare more shards (1: about "
                       "0.75 B, 2: 1.49 B, 3: 2.24 B, 14: 9.9 B), lower --max_tokens, or pass --repeat_data to train in epochs")
    c.update(eval_tokens=windows * c["context"], vocab_size=data.vocab_size, data_fingerprint=data.fingerprint,
             tokenizer_sha256=data.meta["tokenizer_sha256"])
    return data, windows, enough


def build_model(c: dict, device: torch.device, begin: bool = True) -> GPT:
    """The model of config `c` on `device`, with `begin` at its starting weights."""
    model = GPT(evaluation.model_config(c), seed=c["seed"])
    if c["init_from"] and begin:
        state, parent, _ = evaluation.load_state(Path(c["init_from"]))
        differ = [f"{k} is {parent[k]} there and {c[k]} here" for k in ("n_head", "block_layers", "tokenizer_sha256") if parent[k] != c.get(k, parent[k])]
        if differ:
            raise BadInput(f"--init_from={c['init_from']}: the weights would mean something else, {'; '.join(differ)}")
        try:
            model.load_from(state)
        except ValueError as e:
            raise BadInput(f"--init_from={c['init_from']}: {e}") from None
        far = logits_apart((model.config, model.state_dict()), (evaluation.model_config(parent), state))
        if far > 1e-5:
            raise BadInput(f"--init_from={c['init_from']}: {c['arch']} with these weights does not compute what {parent['arch']} "
                           f"does (logits differ by {far:.2g} of their norm)")
    if c["freeze"]:
        hit = [p.requires_grad_(False) for n, p in model.named_parameters() if fnmatch.fnmatchcase(n, c["freeze"])]
        if not hit or not any(p.requires_grad for p in model.parameters()):
            names = [n for n, _ in model.named_parameters() if n.startswith(("layers.1.", "out", "wte"))]
            raise BadInput(f"--freeze={c['freeze']} matches {'every' if hit else 'no'} parameter; names look like {', '.join(names)}")
    return model.to(device)


def starting_hash(model: GPT) -> str:
    """sha256 of the starting values of the parameters that every arm has, by name."""
    digest, routing = hashlib.sha256(), model.routing_names()
    for name, p in sorted(model.named_parameters()):
        if name not in routing:
            digest.update(name.encode())
            digest.update(p.detach().cpu().numpy().data)
    return digest.hexdigest()[:16]


def describe(c: dict, f: Flags, model: GPT, data, windows: int, enough: bool) -> list[str]:
    """What is about to run, every number with where it comes from."""
    n, B, T, tps = model.count(), c["batch_size"], c["context"], c["tokens_per_step"]
    usual = SCALES[c["scale"]]
    same_shape = all(c[k] == usual[k] for k in ("n_layer", "n_embd", "n_head"))
    train_tokens = data.meta["splits"]["train"]["tokens"]
    used = (c["stop_steps"] or c["max_steps"]) * tps
    groups = [f"{g['kind']} {sum(p.numel() for p in g['params']):,} in {len(g['params'])} tensors (decay {g['weight_decay']:g})"
              for g in model.param_groups(c["lr"], c["weight_decay"], c["route_lr_mult"])]
    return [
        f"run         {c['name']}: {find_arm(c['arch']).idea}",
        f"parameters  {n['total']:,}, of them {n['routing']:,} in routes" + (f", {n['frozen']:,} frozen" if n["frozen"] else "")
        + (f" (not the paper's count: vocabulary {c['vocab_size']:,} instead of {usual['vocab_size']:,})"
           if c["scale"] in ("S", "M") and same_shape and c["vocab_size"] != usual["vocab_size"] else ""),
        f"optimiser   AdamW ({c['beta1']}, {c['beta2']}), clip {c['grad_clip']:g}: " + "; ".join(groups),
        f"tokens/step {B} sequences x {T:,} = {tps:,}: {B // c['ranks'] // c['micro_batch']} micro-batch(es) of {c['micro_batch']} on "
        f"{c['ranks']} rank(s)",
        f"schedule    {c['max_steps']:,} steps = {c['max_tokens']:,} tokens, warm-up {c['warmup_steps']:,}, peak lr {c['lr']:g}, end "
        f"{c['lr'] * c['min_lr_ratio']:g}; evaluated after {', '.join(f'{m:,}' for m in c['milestones'])}"
        + (f"; stops at step {c['stop_steps']:,}, mid-schedule" if c["stop_steps"] else ""),
        f"data        {c['data']} {c['data_fingerprint']}: {train_tokens:,} training tokens, {used / train_tokens:.2f} epochs",
        f"evaluation  {windows:,} windows x {T:,} = {windows * T:,} tokens of {data.meta['splits']['val']['tokens']:,} in validation"
        + ("" if enough else f" (all there is; {f.eval_tokens or PROTOCOL[f.scale]['eval_tokens']:,} were asked for)"),
        f"compute     {c['device_name'] or c['device']}, {c['dtype']} ({c['dtype_reason']}), residual stream "
        f"{c['residual_dtype'] or c['dtype']}, routes {c['backend']} ({c['backend_reason']})" + (", compiled" if c["compile"] else ""),
    ]


def run_one(f: Flags, world: World, device: torch.device) -> str:
    """Train or continue one run; returns complete, stopped, diverged, or done when it already was."""
    c = resolve(f, device, world.ranks)
    folder = Path(c["out"]) / c["name"]
    if world.from_rank0(lambda: last_status(folder)) == "diverged":
        raise Failed(f"{folder} diverged; the same command would diverge again: change a setting, or delete the folder")
    data, windows, enough = open_run_data(c, f, world)
    with claim(folder / "lock", str(folder), f.force) if world.rank == 0 else contextlib.nullcontext():
        c.update(provenance(), kernel_sha256=sha256_of(ROOT / "route_kernel.py") if c["backend"] == "fused" else None)
        old = world.from_rank0(lambda: read_json(folder / "config.json") if (folder / "config.json").exists() else None)
        status = world.from_rank0(lambda: last_status(folder) or (folder / "ckpt.pt").exists() and "begun")
        if old is None or status != "complete":  # a finished run is skipped without training the probe's models
            c["probe"] = world.from_rank0(probe)
        if old is not None and status:
            changed = check_resume(old, c, folder, code=status != "complete")
            if status == "complete":
                say(world, f"{c['name']} is complete: skipped")
                return "done"
            for line in changed:
                say(world, f"continued with another {line}")
            if changed and world.rank == 0:
                write_json(folder / "config.json", {**old, "resumed": old.get("resumed", []) + changed})
        try:
            return train(f, c, folder, world, device, data, windows, enough)
        except (RuntimeError, MemoryError) as e:
            raise out_of_memory(e, c["micro_batch"]) or e


def train(f: Flags, c: dict, folder: Path, world: World, device: torch.device, data, windows: int, enough: bool) -> str:
    if c["deterministic"]:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    state, start = evaluation.load_checkpoint(folder), 0
    model = build_model(c, device, begin=state is None)
    counts = model.count()
    c.update(n_params=counts["total"], n_params_route=counts["routing"], n_params_frozen=counts["frozen"])
    optimizer = make_optimizer(model, c)
    autocast = evaluation.make_autocast(device, c["dtype"])
    if state is None:
        c["init_sha256"] = starting_hash(model)
        if world.rank == 0:
            write_json(folder / "config.json", c)
            if c["git_dirty"]:  # what the commit alone does not tell
                diff = subprocess.run(["git", "-C", str(ROOT), "diff", "HEAD"], capture_output=True).stdout
                with atomic_file(folder / "diff.patch") as out:
                    out.write(diff)
    else:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
        c["init_sha256"] = read_json(folder / "config.json").get("init_sha256")
        del state
    need = 12 * counts["total"] * (f.keep + 1 + f.keep_milestones * len(c["milestones"])) + 250 * c["max_steps"]
    free = shutil.disk_usage(folder).free
    if free < need:
        raise BadInput(f"{folder}: checkpoints and logs need {need / 1e9:.2f} GB and {free / 1e9:.2f} GB are free")
    for line in describe(c, f, model, data, windows, enough):
        say(world, line)
    if world.rank == 0:
        from stats import launch_report
        for line in launch_report(c, c["out"]):
            print(f"pairs       {line}")
        if start:
            print(f"continuing after step {start:,}")
    if c["compile"]:
        compile_layers(model)
    network = model
    if world.ranks > 1:
        network = torch.nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None,
                                                            gradient_as_bucket_view=True)
    micro, end, tps = c["micro_batch"], c["stop_steps"] or c["max_steps"], c["tokens_per_step"]
    count = c["batch_size"] // world.ranks // micro
    token_bytes = data.token_bytes()

    def measure(windows: int, label: str | None = None):
        return evaluation.evaluate(model, data, "val", windows, f.eval_batch or micro, device, autocast, token_bytes,
                                   world.rank, world.ranks, world.stop, label)
    measure(min(windows, 2 * (f.eval_batch or micro) * world.ranks), "rehearsal")  # what would fail at the first milestone fails now
    batches = Batches(data.path / "train.bin", c["context"], c["batch_size"], c["seed"])
    metrics = Metrics(folder / "metrics.jsonl", start) if world.rank == 0 else None
    evaluated = world.from_rank0(lambda: metrics.evaluated)
    log = None
    if f.wandb and world.rank == 0:
        import wandb
        log = wandb.init(project=f.wandb, name=c["name"], config=c, resume="allow", id=hashlib.sha1(c["name"].encode()).hexdigest()[:16])

    began = mark = spoken = time.monotonic()
    pending, done, spent = [], 0, 0.0  # steps since the last flush; steps and seconds of this process, first steps left out
    every = 1 if device.type == "cpu" else 10  # reading a loss waits for the GPU: not at every step

    def flush() -> float | None:
        """Write the steps since the last flush; the step of a loss or gradient that is not finite, if any."""
        nonlocal pending, mark, done, spent, spoken
        if not pending:
            return None
        losses = torch.stack([loss for _, _, loss, _ in pending])
        if world.ranks > 1:
            dist.all_reduce(losses)
            losses /= world.ranks
        losses, norms = losses.tolist(), torch.stack([norm for *_, norm in pending]).tolist()
        now = time.monotonic()
        seconds = now - mark
        if pending[0][0] > start + 1:  # the first flush holds compilation and warm-up: not for the time left
            done, spent = done + len(pending), spent + seconds
        rate = tps * len(pending) / seconds
        bad = None
        for (n, lr, _, _), loss, norm in zip(pending, losses, norms):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                bad = n
                break
            if metrics:
                record = dict(kind="train", step=n, tokens=n * tps, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=round(rate, 1),
                              peak_memory_bytes=peak_memory(device), seconds=round(now - began, 3))
                metrics.write(**record)
                if log:
                    log.log(record, step=n)
        if world.rank == 0 and bad is None and (now - spoken > 5 or n in (start + 1, end)):
            left = f"{human_time((end - n) * spent / done)} left" if done else "estimating time"
            print(f"step {n:>6,}/{end:,}  loss {loss:.4f}  lr {lr:.2e}  |g| {norm:.3f}  {rate:,.0f} tokens/s  {left}", flush=True)
            spoken = now
        pending, mark = [], time.monotonic()
        return bad

    def finish(status: str, n: int, **more) -> str:
        if metrics:
            metrics.write(kind="end", status=status, step=n, tokens=n * tps, seconds=round(time.monotonic() - began, 3), **more)
            metrics.close()
        if log:
            log.finish()
        batches.close()
        return status

    def milestone(n: int) -> bool:
        """Measure the whole slice after step n; False when a signal cut it short."""
        nonlocal mark
        result = measure(windows)
        if result is None:
            return False
        if world.rank == 0:
            evaluation.store(folder, result, c["name"], "val", n, n * tps, c["backend"], c["data_fingerprint"])
            facts = {k: v for k, v in result.items() if k != "window_nll"}
            metrics.write(kind="eval", step=n, tokens=n * tps, **facts, milestone=True, split="val", seconds=round(time.monotonic() - began, 3))
            bpb, js = result["bits_per_byte"], result["js_mean"]
            print(f"step {n:>6,}  validation NLL {result['nll']:.5f}  perplexity {result['ppl']:.3f}"
                  + (f"  bits/byte {bpb:.4f}" if bpb else "") + (f"  JS {js:.4f}" if js is not None else ""), flush=True)
            if log:
                log.log({k: v for k, v in facts.items() if not isinstance(v, list)}, step=n)
        mark = time.monotonic()
        return True

    due = [0] if c["init_from"] and start == 0 else [start] if start in c["milestones"] else []
    if any(n not in evaluated and not milestone(n) for n in due):  # step 0 of a run that starts from another's weights,
        return finish("stopped", start)                            # or a milestone saved but not yet measured
    for n in range(start + 1, end + 1):
        loss = accumulate(network, batches.micro(n - 1, micro, world.rank, world.ranks), count, device, autocast)
        lr = lr_at(n, c["max_steps"], c["warmup_steps"], c["lr"], c["min_lr_ratio"])
        pending.append((n, lr, loss, update(model, optimizer, lr, c["grad_clip"])))
        stop = world.stop()
        save = bool(stop) or n in c["milestones"] or n % f.ckpt_every == 0
        if save or len(pending) >= every:
            bad = flush()
            if bad is not None:
                finish("diverged", bad, why="the loss or the gradient norm is not finite")
                raise Failed(f"{c['name']}: the loss or the gradient norm of step {bad:,} is not finite; the run is marked diverged"
                             + (f", its last good checkpoint is {folder / 'ckpt.pt'}" if (folder / "ckpt.pt").exists() else ""))
        if save and world.rank == 0:  # before the evaluation: what has been trained is safe first
            save_checkpoint(folder, c, f.keep, f.keep_milestones, model, optimizer, n)
            mark = time.monotonic()
        if stop or n in c["milestones"] and not milestone(n):
            return finish("stopped", n)
    say(world, f"{c['name']}: done in {human_time(time.monotonic() - began)}")
    return finish("complete", end)


# ---------------------------------------------------------------------------------------------------------
# Sweeps, benchmark, dry run


def write_plan(members: list[Flags], configs: list[dict], out: Path) -> None:
    """Add to runs/plan.json what this sweep is going to run, once."""
    first, made = configs[0], provenance()
    plan = dict(runs=[c["name"] for c in configs], arms=list(dict.fromkeys(c["arch"] for c in configs)),
                seeds=list(dict.fromkeys(c["seed"] for c in configs)), scale=first["scale"], max_steps=first["max_steps"],
                stop_steps=first["stop_steps"], primary=members[0].primary, margin=members[0].margin, started=made["started"], git_commit=made["git_commit"], command=made["command"])
    for attempt in range(50):  # copies of one sweep start together: each waits for the other's short turn
        try:
            with claim(out / ".plan.lock", "plan.json"):
                path = out / "plan.json"
                plans = read_json(path)["plans"] if path.exists() else []
                if not any(p["runs"] == plan["runs"] for p in plans):
                    write_json(path, dict(plans=plans + [plan]))
                return
        except Busy:
            time.sleep(0.1)


def run_sweep(members: list[Flags], world: World, device: torch.device) -> int:
    """Every member in turn; one that fails is reported and the others go on. Returns the exit code."""
    configs, problems = [], []
    for m in members:
        try:
            configs.append(resolve(m, device, world.ranks))
        except BadInput as e:
            problems += [f"{line} (--arch={m.arch} --scale={m.scale})" for line in str(e).splitlines()]
    names = [c["name"] for c in configs]
    problems += [f"{n} occurs {names.count(n)} times in this sweep" for n in dict.fromkeys(names) if names.count(n) > 1]
    if problems:
        raise BadInput("\n".join(dict.fromkeys(problems)))
    if len(members) > 1:
        world.from_rank0(lambda: write_plan(members, configs, Path(configs[0]["out"])))
    outcome = {}
    for i, (m, c) in enumerate(zip(members, configs)):
        if len(members) > 1:
            say(world, f"\n[{i + 1}/{len(members)}] {c['name']}")
        try:
            outcome[c["name"]] = run_one(m, world, device)
        except (Busy, Failed, BadInput) as e:
            if len(members) == 1:
                raise
            outcome[c["name"]] = "busy" if isinstance(e, Busy) else "failed"
            say(world, f"{'left to its owner' if isinstance(e, Busy) else 'error'}: {e}")
        if STOP["signal"]:
            break
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    if len(members) > 1:
        kinds = {k: [n for n, s in outcome.items() if s == k] for k in dict.fromkeys(outcome.values())}
        say(world, "\nsweep: " + "; ".join(f"{len(v)} {k}" for k, v in kinds.items())
            + ("" if "failed" not in kinds else "\nfailed: " + ", ".join(kinds["failed"])))
    if STOP["signal"]:
        return 128 + STOP["signal"]
    return 1 if "failed" in outcome.values() else 0


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product on this device: the peak that an MFU is measured against."""
    n = 8192 if device.type == "cuda" else 2048
    a = torch.randn(n, n, device=device).to(dtype)
    best = math.inf
    for _ in range(5):
        t = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - t)
    return 2 * n ** 3 / best


class Bench:
    """One arm on random tokens, ready to time steps."""

    def __init__(self, f: Flags, device: torch.device):
        if f.batch_size is None and device.type == "cpu":  # a step of the paper's batch takes a CPU a minute
            f.batch_size = f.micro_batch or 1
        c = self.c = resolve(f, device, 1)
        c["vocab_size"] = SCALES[f.scale]["vocab_size"]
        self.device, self.model = device, build_model(c, device)
        if c["compile"]:
            compile_layers(self.model)
        self.optimizer, self.autocast = make_optimizer(self.model, c), evaluation.make_autocast(device, c["dtype"])
        self.count = c["batch_size"] // c["micro_batch"]
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(c["vocab_size"], (c["micro_batch"], c["context"] + 1), generator=generator)

    def seconds(self, steps: int) -> float:
        sync = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        sync()
        t = time.perf_counter()
        for _ in range(steps):
            pair = self.ids[:, :-1].contiguous(), self.ids[:, 1:].contiguous()
            accumulate(self.model, [pair] * self.count, self.count, self.device, self.autocast)
            update(self.model, self.optimizer, 1e-5, 1.0)
        sync()
        return time.perf_counter() - t


def to_argv(f: Flags) -> list[str]:
    return [f"--{x.name}={getattr(f, x.name)}" for x in dataclasses.fields(f) if getattr(f, x.name) != x.default]


def bench_worker(f: Flags, device: torch.device) -> None:
    """Answer each line `steps` on stdin with a line of JSON: the seconds they took, and the peak memory so far."""
    bench = Bench(f, device)
    tell = lambda **facts: print("BENCH " + json.dumps(facts), flush=True)
    bench.seconds(2)
    tell(seconds=bench.seconds(1), memory=peak_memory(device), tokens=bench.c["tokens_per_step"],
         **{k: bench.c[k] for k in ("dtype", "backend", "micro_batch", "batch_size")}, **bench.model.count())
    for line in sys.stdin:
        tell(seconds=bench.seconds(int(line)), memory=peak_memory(device))
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the others' turn


def free_memory(device: torch.device) -> float:
    """Bytes that may still be taken on `device`; where the system does not say, infinitely many."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, TypeError):
        return 1024 * int(re.search(r"MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text())[1])
    return math.inf


def benchmark(members: list[Flags], device: torch.device) -> int:
    """Time the members in turn, round by round, each in a process of its own; print ratios to the first one. Where
    memory does not hold all of them at once, groups of them are timed, the first one in each."""
    varied = [x.name for x in dataclasses.fields(Flags) if len({getattr(m, x.name) for m in members}) > 1] or ["arch"]
    labels = [" ".join(str(getattr(m, v)) for v in varied) for m in members]
    print(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}; {members[0].rounds} interleaved rounds, "
          "each arm in its own process, random tokens", flush=True)
    workers, facts, rates, ratios = {}, {}, [[] for _ in members], [[] for _ in members]

    def start(j: int) -> None:
        workers[j] = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *to_argv(members[j])], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, text=True, env=dict(os.environ, RD_BENCH_WORKER="1"))
        facts[j] = ask(workers[j], None, labels[j])

    def stop(j: int) -> None:
        workers[j].kill()
        workers.pop(j).wait()

    try:
        start(0)
        steps, todo = max(1, math.ceil(4.0 / facts[0]["seconds"])), list(range(1, len(members)))
        while todo or not rates[0]:
            while todo and (len(workers) == 1 or free_memory(device) > 2 * max(facts[j]["memory"] for j in workers)):
                start(todo.pop(0))
            for i in range(members[0].rounds):
                now = {}
                for j in list(workers)[::1 if i % 2 else -1]:  # turn about, so that no arm always comes first
                    said = ask(workers[j], steps, labels[j])
                    now[j], facts[j]["memory"] = steps * facts[j]["tokens"] / said["seconds"], said["memory"]
                for j in workers:
                    rates[j].append(now[j])
                    ratios[j].append(now[j] / now[0])
                print(f"round {i + 1}: " + "  ".join(f"{labels[j]} {now[j]:,.0f}" for j in workers), flush=True)
            for j in [j for j in workers if j]:
                stop(j)
    finally:
        for j in list(workers):
            stop(j)
    peak = {x["dtype"]: matmul_rate(device, getattr(torch, x["dtype"])) for x in facts.values()}
    print(f"\n{steps} step(s) a round of {facts[0]['batch_size']} x {facts[0]['tokens'] // facts[0]['batch_size']:,} tokens, micro-batch "
          f"{facts[0]['micro_batch']}; measured matrix product rate: " + ", ".join(f"{r / 1e12:.2f} TFLOP/s {d}" for d, r in peak.items()))
    print(f"\n| {' '.join(varied)} | routes | tokens/s | ratio to {labels[0]} (min-max) | MFU | peak memory |\n|---|---|---|---|---|---|")
    for j, label in enumerate(labels):
        x, rate = facts[j], float(np.median(rates[j]))
        mfu = rate * x["flops_per_token"] / peak[x["dtype"]]
        routes = x["backend"] if x["routing"] else "none"
        print(f"| {label} | {routes}, {x['dtype']} | {rate:,.0f} | {np.median(ratios[j]):.3f} ({min(ratios[j]):.3f}-{max(ratios[j]):.3f}) | "
              f"{mfu:.1%} | {x['memory'] / 1e9:.2f} GB |")
    print("\nMFU counts 6 FLOPs per matrix weight and token and causal attention's products; memory is "
          + ("allocated on the GPU" if device.type == "cuda" else "resident, weights and optimiser included") + ".")
    return 0


def ask(worker: subprocess.Popen, steps: int | None, label: str) -> dict:
    if steps is not None:
        worker.stdin.write(f"{steps}\n")
        worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("BENCH "):
            return json.loads(line[6:])
    raise Failed(f"{label} ended during the benchmark with exit code {worker.wait()}")


def dry_run(members: list[Flags], world: World, device: torch.device) -> int:
    """Say what each member would cost; the time is from one measured micro-batch."""
    for m in members:
        c = resolve(m, device, world.ranks)
        b = Bench(dataclasses.replace(m, batch_size=c["micro_batch"], micro_batch=c["micro_batch"], max_tokens=None, max_steps=100,
                                      stop_tokens=None), device)
        b.seconds(1)
        n, second = b.model.count(), b.seconds(1)
        tokens = (c["stop_steps"] or c["max_steps"]) * c["tokens_per_step"]
        disk = 12 * n["total"] * (m.keep + m.keep_milestones * len(c["milestones"])) + 250 * tokens // c["tokens_per_step"]
        hours = tokens / (c["micro_batch"] * c["context"]) * second / world.ranks
        print(f"{c['name']}: {n['total']:,} parameters, {tokens:,} tokens, {n['flops_per_token'] * tokens:.3g} FLOPs, about {human_time(hours)} here "
              f"(one micro-batch of {c['micro_batch']} took {second:.2f} s), peak memory {peak_memory(device) / 1e9:.1f} GB, disk {disk / 1e9:.2f} GB", flush=True)
        del b
        gc.collect()
    return 0


def main(argv: list[str]) -> int:
    members: list[Flags] = parse_flags(Flags, argv, __doc__, lists=True)
    problems = []
    for m in members:
        try:
            m.arch = canonical(m.arch)
        except ValueError as e:
            problems.append(str(e))
    if problems:
        raise BadInput("\n".join(dict.fromkeys(problems)))
    members = list({dataclasses.astuple(m): m for m in members}.values())  # mhar and mhar:heads=2 are one
    Flags.together = tuple(m.arch for m in members)
    device = evaluation.pick_device(members[0].device)
    if device.type == "cpu":
        keep_freed_memory()
    if os.environ.get("RD_BENCH_WORKER"):
        bench_worker(members[0], device)
        return 0
    if members[0].benchmark:
        for m in members:
            resolve(m, device, 1)
        return benchmark(members, device)
    heed_signals()
    world = World(device)
    try:
        return dry_run(members, world, device) if members[0].dry_run else run_sweep(members, world, device)
    except BadInput:
        if world.rank:  # every rank finds the same; one says it
            sys.exit(2)
        raise
    finally:
        if world.ranks > 1:
            dist.destroy_process_group()


if __name__ == "__main__":
    run_script(main)
