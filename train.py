"""Train one arm, or a sweep of arms, seeds and settings, under the paper's protocol.

    python train.py --arch=block,rd --scale=nano --seed=123       # a matched pair on the bundled novels, on a laptop
    python train.py --arch=rd --scale=S --seed=123                # the paper's 120M run (data: python prepare.py)
    torchrun --nproc_per_node=8 train.py --arch=rd --scale=M      # the same numbers, on eight GPUs
    python train.py --benchmark --arch=plain,block,rd --scale=S   # speed and memory, no data needed

The same command again continues an unfinished run and skips a finished one. `-h` explains every flag; every field of
GPTConfig is one, so a setting that is added there needs nothing here.
"""
from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import errno
import fnmatch
import functools
import gc
import hashlib
import importlib.util
import json
import math
import multiprocessing
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
import typing
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that spin starve beside a busy process

import filelock
import numpy as np
import torch
import torch.distributed as dist

import eval as evaluation
import prepare
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


def model_flag(name: str):
    """The flag of a field of GPTConfig; left out, it is the scale's value or the field's default."""
    field = GPTConfig.__dataclass_fields__[name]
    usual = {scale: shape[name] for scale, shape in SCALES.items() if name in shape}
    usual = ", ".join(f"{scale} {value}" for scale, value in usual.items()) or field.default
    help = field.metadata["help"] + ("" if usual is None else f" [{usual}]")
    most = None if field.metadata["most"] == math.inf else field.metadata["most"]
    return flag(None, help, field.metadata["choices"], field.metadata["least"], most,
                word=field.metadata["word"] or name)


@dataclass
class RunFlags:
    """What is not the model's. A flag with a `word` changes the numbers: it enters the run's name by that word, in
    this order, when it is not the scale's default, and a run is not continued with another value."""

    # what to run
    arch: str = flag("rd", f"arm: {', '.join(ARMS)}; a comma list in any flag makes a sweep")
    scale: str = flag("S", "shape and protocol", tuple(PROTOCOL))
    seed: int = flag(123, "of the initial weights and the data order", least=0, most=2 ** 32 - 1)
    data: str | None = flag(None, "folder written by prepare.py [data/demo for nano, data/fineweb-edu for S and M]",
                            path=True, word="data")
    out: str = flag("runs", "folder of runs; with --benchmark a .json file to write", path=True)
    tag: str = flag("", "appended to the run's name")
    # how long
    max_steps: int | None = flag(None, "steps of the schedule", least=1, most=10 ** 9, word="steps")
    max_tokens: int | None = flag(None, "length of the schedule in tokens, rounded up to whole steps [2e9 for S and M]",
                                  least=1, most=10 ** 15)
    stop_tokens: int | None = flag(None, "stop there with the schedule unchanged; such a run is complete", least=1,
                                   word="stop")
    repeat_data: bool = flag(False, "S and M: allow more training tokens than the data folder holds (epochs)")
    # batch
    batch_size: int | None = flag(None, "sequences a step [32; nano 8]", least=1, most=10 ** 6, word="batch")
    micro_batch: int | None = flag(None, "sequences at a time on one device [S 8, M 4, nano 8]", least=1)
    # shape: the fields of GPTConfig come here
    # optimiser
    lr: float | None = flag(None, "peak learning rate [S 3e-4, M 2e-4, nano 1e-3]", least=0, most=10, word="lr")
    route_lr_mult: float = flag(1.0, "factor on the learning rate of the route queries", least=0, most=1e4,
                                word="routelr")
    grad_clip: float = flag(1.0, "global gradient norm; 0 does not clip", least=0, most=1e9, word="clip")
    weight_decay: float = flag(0.1, "on matrices, the tied embedding included; never on routes or gains", least=0,
                               most=10, word="decay")
    beta1: float = flag(0.9, "AdamW", least=0, most=0.99999, word="beta1_")
    beta2: float = flag(0.95, "AdamW", least=0, most=0.99999, word="beta2_")
    adam_eps: float = flag(1e-8, "AdamW", least=0, most=1, word="eps")
    warmup_ratio: float = flag(0.02, "share of the schedule that warms up, at least one step", least=0, most=1,
                               word="warmup")
    min_lr_ratio: float = flag(0.1, "learning rate at the end over its peak", least=0, most=1, word="minlr")
    init_from: str | None = flag(None, "start from the weights of this run folder instead of from noise", path=True,
                                 word="from")
    freeze: str | None = flag(None, "keep parameters whose names match this pattern at their start, e.g. *.query.v",
                              word="freeze")
    # evaluation
    eval_tokens: int | None = flag(None, "predicted tokens of an evaluation [10485760; nano: the whole split]", least=1,
                                   word="eval")
    eval_batch: int | None = flag(None, "sequences at a time in an evaluation on a GPU [micro_batch]", least=1)
    # machine
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda"))
    dtype: str = flag("auto", "of the products (autocast)", ("auto", "float32", "bfloat16"), word="dtype")
    residual_dtype: str | None = model_flag("residual_dtype")
    backend: str | None = model_flag("backend")
    compile: bool = flag(False, "torch.compile each layer's attention and MLP")
    deterministic: bool = flag(False, "deterministic algorithms only, so that GPU runs repeat bit for bit (slower)")
    # keeping
    ckpt_every: int = flag(1000, "steps between checkpoints", least=1)
    keep: int = flag(1, "how many of the latest checkpoints stay", least=1)
    keep_milestones: bool = flag(False, "keep the checkpoint of every milestone too")
    force: bool = flag(False, "take over a run folder whose lock's owner cannot be judged from here")
    wandb: str | None = flag(None, "also log to this Weights & Biases project")
    primary: str | None = flag(None, "the arm that a sweep is made to judge; stands in plan.json, as does")
    margin: float | None = flag(None, "a difference in NLL too small to matter", least=1e-9)
    # other uses
    benchmark: bool = flag(False, "time the arms on random tokens, interleaved, and train nothing")
    rounds: int | None = flag(None, "rounds of a benchmark [7]", least=1)
    dry_run: bool = flag(False, "print what would run: parameters, FLOPs, memory, disk, time; train nothing")


def add_model_flags(own) -> type:
    """`own` with a flag for every field of GPTConfig that it lacks, before the optimiser's; not for the vocabulary's
    size, which is the data's. Raises TypeError for two settings of one name."""
    hints, types = typing.get_type_hints(own), typing.get_type_hints(GPTConfig)
    fields = [(field.name, hints[field.name], field) for field in dataclasses.fields(own)]
    ours = {name for name, _, field in fields if name not in ("arch", "residual_dtype", "backend")}
    for name in ours & types.keys():
        raise TypeError(f"GPTConfig.{name} is no flag: --{name} of train.py is another setting of that name")
    model = [(name, kind | None, model_flag(name)) for name, kind in types.items()
             if name not in (*hints, "vocab_size")]
    place = list(hints).index("lr")
    return dataclasses.make_dataclass("Flags", fields[:place] + model + fields[place:])


Flags = add_model_flags(RunFlags)
MODEL = [field.name for field in dataclasses.fields(GPTConfig) if field.name not in ("arch", "vocab_size")]
WORDS = {f.name: f.metadata["word"] for f in dataclasses.fields(Flags) if f.metadata.get("word")}
# What a run must share with its beginning to be continued; of the rest, what is worth a line when it changed.
SAME = ["arch", "scale", "seed", "vocab_size", "data_fingerprint", "tokenizer_sha256", "stop_steps", "milestones",
        *(name for name in WORDS if name not in ("data", "stop_tokens"))]
MAY_DIFFER = ["micro_batch", "ranks", "compile", "device", "device_name", "threads", "deterministic", "torch", "triton"]


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
    """Windows of a train.bin in the order that the seed fixes: sample j of step s (from 0) has index k = s B + j and is
    window perm(seed, k // n)[k mod n] of the n windows; it depends on nothing else.

    Windows are read with pread, not through a memory map: resident memory stays flat over weeks.
    """

    def __init__(self, bin: typing.BinaryIO, context: int, batch_size: int, seed: int, vocab_size: int):
        self.bin, self.T, self.B, self.seed, self.vocab_size = bin, context, batch_size, seed, vocab_size
        tokens = os.fstat(bin.fileno()).st_size // 2
        self.n = (tokens - 1) // context
        if self.n < 1:
            raise BadInput(f"{bin.name} holds {tokens} tokens, less than one window of {context} + 1")
        self.perm = functools.lru_cache(2)(self.permutation)

    def permutation(self, epoch: int) -> np.ndarray:
        """The windows in the order of an epoch: uint32 [n]."""
        # RandomState's streams are frozen by numpy's compatibility policy; a Generator's may change with a release
        return np.random.RandomState([self.seed, epoch]).permutation(self.n).astype(np.uint32)

    def indices(self, step: int) -> np.ndarray:
        """Window of each sample of step `step` (from 0): int64 [B]."""
        k = np.arange(step * self.B, (step + 1) * self.B)
        return np.array([self.perm(int(e))[i] for e, i in zip(k // self.n, k % self.n)], dtype=np.int64)

    def digest(self) -> str:
        """Of the windows of the first 256 samples, or steps: another code or seed gives another."""
        windows = np.concatenate([self.indices(step) for step in range(-(-256 // self.B))])
        return hashlib.sha256(windows[:256].astype("<i8").tobytes()).hexdigest()[:16]

    def micro(self, step: int, micro: int, rank: int, ranks: int):
        """This rank's micro-batches of a step: pairs of int64 [micro, T] inputs and targets. Raises BadInput."""
        index = self.indices(step)
        for start in range(rank * micro, self.B, ranks * micro):
            rows = [os.pread(self.bin.fileno(), 2 * (self.T + 1), 2 * int(i) * self.T)
                    for i in index[start:start + micro]]
            ids = np.frombuffer(b"".join(rows), dtype="<u2")
            if len(ids) != len(rows) * (self.T + 1):
                raise BadInput(f"{self.bin.name} became shorter while it was in use")
            if ids.max() >= self.vocab_size:
                raise BadInput(f"{self.bin.name} holds token {ids.max()}, and the model knows {self.vocab_size:,}: "
                               "prepare the data anew")
            ids = torch.from_numpy(ids.astype(np.int64).reshape(len(rows), -1))
            yield ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


# ---------------------------------------------------------------------------------------------------------
# From flags to resolved settings


def usual(name: str, scale: str):
    """The value of a setting that nobody gave."""
    if name == "max_steps":
        return math.ceil(PROTOCOL[scale]["max_tokens"] / (PROTOCOL[scale]["batch_size"] * SCALES[scale]["context"]))
    for defaults in (PROTOCOL[scale], SCALES[scale]):
        if name in defaults:
            return defaults[name]
    owner = GPTConfig if name in MODEL else Flags
    return owner.__dataclass_fields__[name].default


def short(value) -> str:
    """A setting inside a folder name: 6e-4, 5e8, 300, demo."""
    if isinstance(value, (bool, str)):
        return str(value).replace("/", "_").replace("*", "_")
    small_or_large = isinstance(value, float) and (0 < value < 0.01 or value >= 10_000)
    text = f"{value:.6e}" if small_or_large or value >= 100_000 else f"{value:.6g}"
    if "e" not in text:
        return text
    digits, exponent = text.split("e")
    if "." in digits:
        digits = digits.rstrip("0").rstrip(".")
    return f"{digits}e{int(exponent)}"


def run_name(f: Flags, c: dict) -> str:
    """Scale, arm, seed, every setting that changes the numbers and is not the scale's default, tag."""
    parts = [f"{f.scale}-{c['arch'].replace(':', '_').replace('=', '')}-s{f.seed}"]  # mhar:heads=8 is mhar_heads8
    for name, word in WORDS.items():
        value = getattr(f, name) if name in ("dtype", "backend") else c[name]  # those name what was asked for
        if name == "stop_tokens":
            value = c["stop_steps"]
        if name == "data":
            default = Path(default_data(f.scale)).resolve()
            value = None if Path(value).resolve() == default else Path(value).resolve().name
        if name == "init_from" and value is not None:
            value = Path(value).resolve().name
            if len(value) > 40:
                value = f"{value[:31]}~{hashlib.sha1(value.encode()).hexdigest()[:8]}"
        if value is not None and value != usual(name, f.scale):
            parts.append(word + short(value))
    if f.tag:
        parts.append(f.tag)
    name = "-".join(parts)
    if re.search(r"[/\\:\s\0]", name) or not name.isprintable() or len(name.encode()) > 200:
        raise BadInput(f"the run's name {name!r} is not a usable folder name; change --tag")
    return name


def default_data(scale: str) -> str:
    return str(Path("data") / ("demo" if scale == "nano" else "fineweb-edu"))


def resolve_backend(f: Flags, device: torch.device, arms: typing.Iterable[str]) -> tuple[str, str]:
    """(backend, reason): with auto, one that this machine and every arm of the command has, so that arms differ in
    nothing else."""
    try:
        backend, reason = choose_backend(f.backend or "auto", device)
    except ValueError as e:
        raise BadInput(str(e)) from None
    if f.backend in (None, "auto") and backend == "fused":
        for arch in (f.arch, *arms):
            if not find_arm(arch).fused:
                return "reference", f"{arch} has no fused path, and one backend serves a whole sweep"
    return backend, reason


def resolve_micro_batch(f: Flags, batch_size: int, ranks: int) -> int:
    """Sequences at a time on one rank: a divisor of its share of a step. Raises BadInput with the nearest that are."""
    if batch_size % ranks:
        near = [x for x in (batch_size // ranks * ranks, -(-batch_size // ranks) * ranks) if x]
        raise BadInput(f"--batch_size={batch_size} does not divide among {ranks} ranks; nearest: "
                       f"{' or '.join(map(str, near))}")
    share = batch_size // ranks
    divisors = [m for m in range(1, share + 1) if share % m == 0]
    if f.micro_batch is None:  # the default gives way to the batch; what was asked for does not
        return max(m for m in divisors if m <= PROTOCOL[f.scale]["micro_batch"])
    if f.micro_batch not in divisors:
        below = [m for m in divisors if m < f.micro_batch][-1:]
        above = [m for m in divisors if m > f.micro_batch][:1]
        where = f"{ranks} rank{'s' if ranks > 1 else ''}"
        raise BadInput(f"--micro_batch={f.micro_batch} on {where} does not divide --batch_size={batch_size}; nearest: "
                       f"{' or '.join(map(str, below + above))}")
    return f.micro_batch


def resolve(f: Flags, device: torch.device, ranks: int, arms: typing.Iterable[str] = ()) -> dict:
    """Every setting of a run, flat, as config.json holds it. arms: of the whole command. Raises BadInput naming all
    that is wrong."""
    problems = []
    c = {name: getattr(f, name) for name in ("arch", "scale", "seed", "tag", "out", "compile", "deterministic")}
    for name in WORDS:
        c[name] = usual(name, f.scale) if getattr(f, name) is None else getattr(f, name)
    c["data"] = os.path.normpath(f.data or default_data(f.scale))
    c["init_from"] = f.init_from and os.path.normpath(f.init_from)
    try:
        GPTConfig.from_scale(f.scale, f.arch, **{name: c[name] for name in MODEL})
    except ValueError as e:
        problems += str(e).splitlines()
    if f.max_steps is not None and f.max_tokens is not None:
        problems.append("give --max_steps or --max_tokens, not both: one follows from the other")
    try:
        c["micro_batch"] = resolve_micro_batch(f, c["batch_size"], ranks)
    except BadInput as e:
        problems.append(str(e))
    c["tokens_per_step"] = tps = c["batch_size"] * c["context"]
    c["max_steps"] = N = f.max_steps or math.ceil((f.max_tokens or PROTOCOL[f.scale]["max_tokens"]) / tps)
    c["max_tokens"] = N * tps
    stop = math.ceil(f.stop_tokens / tps) if f.stop_tokens else N
    if stop > N:
        problems.append(f"--stop_tokens={f.stop_tokens:,} lies beyond the schedule of {N * tps:,} tokens")
    if problems:
        raise BadInput("\n".join(problems))
    c["stop_steps"], c["stop_tokens"] = (stop, stop * tps) if stop < N else (None, None)
    c["warmup_steps"], c["milestones"] = warmup_steps(N, f.warmup_ratio), milestones(N, c["stop_steps"])
    c["ranks"], c["device"], c["threads"] = ranks, device.type, torch.get_num_threads()
    c["device_name"] = platform.processor() or platform.machine()
    if device.type == "cuda":
        c["device_name"] = torch.cuda.get_device_name(device)
    c["dtype"], c["dtype_reason"] = evaluation.pick_dtype(f.dtype, device)
    c["backend"], c["backend_reason"] = resolve_backend(f, device, arms)
    c["name"] = run_name(f, c)
    return c


def git(*words: str) -> bytes:
    """What git says of this folder; nothing where there is no git or no commit."""
    with contextlib.suppress(OSError):
        return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True).stdout
    return b""


def provenance() -> dict:
    """Where a run was made: versions, commit, command."""
    commit = git("rev-parse", "--verify", "--quiet", "HEAD").decode().strip() or None
    dirty = bool(git("status", "--porcelain", "--untracked-files=no").strip()) if commit else None
    try:
        import triton
        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    return dict(torch=torch.__version__, triton=triton_version, numpy=np.__version__,
                python=platform.python_version(), platform=platform.platform(), git_commit=commit, git_dirty=dirty,
                host=socket.gethostname(), command=shlex.join(sys.argv), omp_wait_policy=os.environ["OMP_WAIT_POLICY"],
                started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))


@functools.lru_cache(None)
def probe(arch: str) -> tuple[float, ...]:
    """What the code computes of an arm with its options, so that runs made before and after an edit can be told to be
    comparable: the losses and gradient norms of three optimiser steps, and the loss after them, of a tiny model. In
    float64, so that another CPU's kernels agree to 1e-9 and another formula does not."""
    arm = find_arm(arch)
    unit = math.lcm(4, arm.heads)  # two heads of an even width, and as many slices as the arm asks for
    width = unit * math.ceil(max(32, arm.rank) / unit)
    model = GPT(GPTConfig(arch=arch, n_layer=4, n_embd=width, n_head=2, block_layers=2, context=16, vocab_size=61,
                          backend="reference"), seed=1).double()
    ids = torch.randint(61, (4, 2, 17), generator=torch.Generator().manual_seed(0))
    optimizer = make_optimizer(model, dict(lr=0.03, weight_decay=0.1, route_lr_mult=1.0, beta1=0.9, beta2=0.95,
                                           adam_eps=1e-8))

    def loss_of(batch: torch.Tensor) -> torch.Tensor:  # model(x, y) rounds its loss to float32
        logits = torch.nn.functional.linear(model.hidden(batch[:, :-1]), model.wte)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    losses, norms = [], []
    for n in (1, 2, 3):
        loss = loss_of(ids[n])
        loss.backward()
        losses.append(loss.item())
        norms.append(clip(optimizer, 1.0).item())
        step(optimizer, lr_at(n, 3, 1, 0.03))
    with torch.no_grad():
        final = loss_of(ids[0]).item()
    return tuple(round(x, 12) for x in (*losses, *norms, final))


# ---------------------------------------------------------------------------------------------------------
# One step


def make_optimizer(model: GPT, c: dict) -> torch.optim.AdamW:
    groups = model.param_groups(c["lr"], c["weight_decay"], c["route_lr_mult"])
    for group in groups:
        del group["names"]
    return torch.optim.AdamW(groups, lr=c["lr"], betas=(c["beta1"], c["beta2"]), eps=c["adam_eps"], fused=True)


def accumulate(model, batches, count: int, device: torch.device, autocast) -> torch.Tensor:
    """Forward and backward: gradients of the mean loss over this rank's `count` micro-batches of a step; returns that
    loss, still on the device."""
    total = torch.zeros((), device=device)
    for i, (x, y) in enumerate(batches):
        if device.type == "cuda":
            x, y = (t.pin_memory().to(device, non_blocking=True) for t in (x, y))
        wait = contextlib.nullcontext()
        if i + 1 < count and hasattr(model, "no_sync"):  # ranks exchange gradients once a step, after the last one
            wait = model.no_sync()
        with wait:
            with autocast():
                loss = model(x, y)[1] / count
            loss.backward()
        total += loss.detach()
    return total


def clip(optimizer: torch.optim.AdamW, most: float) -> torch.Tensor:
    """Scale the gradients so that their global norm is at most `most`, if that is not 0. Returns the norm before, still
    on the device."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if most > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def step(optimizer: torch.optim.AdamW, lr: float) -> None:
    """Update the parameters and forget their gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["mult"]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def keep_freed_memory() -> None:
    """Have glibc reuse the pages of freed tensors instead of giving them back: faulting in fresh ones for every large
    tensor took 6% of an S step on a CPU, in any arm."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD
        libc.mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD


def compile_layers(model: GPT, backend: str = "inductor") -> None:
    """torch.compile each layer, or its attention and MLP where depth routes, which are fused already, stand between
    them: one compilation serves all layers. What does not compile raises, nothing falls back to eager in silence."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.recompile_limit = max(32, torch._dynamo.config.recompile_limit)
    parts = ["forward"] if model.arm.depth.whole_layers else ["attention", "mlp"]
    for layer in model.layers:
        for part in parts:
            setattr(layer, part, torch.compile(getattr(layer, part), dynamic=False, fullgraph=True, backend=backend))


def peak_memory(device: torch.device) -> int:
    """Bytes: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def out_of_memory(e: BaseException, micro: int) -> Failed | None:
    """The error to show for an allocation that failed (torch's, cuBLAS's, Triton's), None for anything else."""
    if not isinstance(e, MemoryError) and not re.search("out of memory|allocate memory|ALLOC_FAILED", str(e)):
        return None
    advice = "at --micro_batch=1: a smaller --context or --scale, or a larger device, is needed"
    if micro > 1:
        advice = f"try --micro_batch={micro // 2} (the batch and the numbers stay the same)"
    return Failed(f"out of memory at --micro_batch={micro}; {advice}")


# ---------------------------------------------------------------------------------------------------------
# Ranks, stop signals, locks, files


STOP = {"signal": 0}  # set by the handler, read between steps and between evaluation batches


def heed_signals() -> None:
    """A signal to end, of a user, a scheduler or a lost terminal, ends the run after the step at hand, saved; a second
    one ends it at once. A SIGHUP that is ignored already, as under nohup, stays ignored."""
    def handler(number, frame):
        if STOP["signal"]:
            raise KeyboardInterrupt
        STOP["signal"] = number
        text = f"\n{signal.Signals(number).name}: saving after this step (again to quit at once)\n"
        with contextlib.suppress(OSError):
            os.write(2, text.encode())  # a print may have been interrupted half-way

    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):
        number = getattr(signal, name)
        if name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, handler)


class Patient:
    """A stream for text whose reader may go away, as `| tee` does at Ctrl-C: what cannot be written is dropped, and the
    training goes on to its checkpoint."""

    def __init__(self, stream):
        self.stream = stream

    def __getattr__(self, name: str):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        return self.attempt(self.stream.write, text)

    def flush(self) -> None:
        self.attempt(self.stream.flush)

    def attempt(self, action, *args):
        try:
            return action(*args)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
            return len("".join(args))


class World:
    """The ranks that train together (one, unless torchrun started several) and what they agree on."""

    def __init__(self, device: torch.device):
        self.ranks, self.rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
        if self.ranks > 1:
            wait = datetime.timedelta(minutes=30)
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=wait)
            # flags travel on the CPU, so that asking for a stop never waits for the GPU
            self.control = dist.new_group(backend="gloo", timeout=wait)

    def stop(self) -> int:
        """The signal that any rank received, at the same step on all of them; 0 for none."""
        if self.ranks > 1:
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
            except (BadInput, Failed) as e:
                box[1] = e
            except OSError as e:
                box[1] = BadInput(str(e))
        dist.broadcast_object_list(box, src=0, group=self.control)
        if box[1] is not None:
            raise box[1]
        return box[0]


def say(text: str) -> None:
    """Print once, whatever the number of ranks."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


class Busy(BadInput):
    """Another process has this run."""


def home() -> str:
    """Where a process number means something: this boot of this host, and this container of it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + " " + os.readlink("/proc/self/ns/pid")
    return socket.gethostname()


def from_here(origin: Path) -> bool:
    """Whether the owner of a lock, known by the file `origin`, can be judged by its process number."""
    try:
        return origin.read_text() == home()
    except OSError:
        return False


@contextlib.contextmanager
def claim(path: Path, what: str, force: bool = False, wait: float = 1.0):
    """Hold the lock file `path`, waiting up to `wait` seconds for it. One whose process was killed on this host is
    taken over; a living owner, or one that cannot be judged from here, raises Busy with one line about who it is.
    `force` takes the lock from whoever has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    origin = path.with_name(f"{path.name}.origin")  # filelock's own record lacks the boot and the container
    if force:
        for left in (path, origin):
            left.unlink(missing_ok=True)
    lock, until = filelock.SoftFileLock(path), time.monotonic() + wait
    while not lock.is_locked:
        if not path.exists() or from_here(origin) and owner_of(path):
            with contextlib.suppress(filelock.Timeout):
                lock.acquire(timeout=0)
                break
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    if not lock.is_locked:
        owner = owner_of(path)
        if owner is None:
            raise Busy(f"{what}: nobody can tell whose its lock {path} is; if nothing trains there, pass --force")
        who = f"process {owner[0]} of {'this host' if owner[1] == socket.gethostname() else owner[1]}"
        if from_here(origin):
            raise Busy(f"{what} is being run by {who}")
        raise Busy(f"{what} is locked by {who}, as it was called in another container or before a restart; if that is "
                   "gone, pass --force")
    try:
        origin.write_text(home())
        yield
    finally:
        origin.unlink(missing_ok=True)
        lock.release()


def owner_of(path: Path) -> tuple[str, str] | None:
    """(process, host) in the lock file that filelock wrote; None where there is none or it says something else."""
    try:
        process, host, *_ = path.read_text().splitlines()
    except (OSError, ValueError):
        return None
    return (process, host) if process.isdecimal() else None


def read_metrics(path: Path, upto: int, due: typing.Iterable[int]) -> list[dict]:
    """The records of metrics.jsonl up to step `upto`, without an end. Raises BadInput where it lacks any that a run at
    that step has written: each step, and the evaluation at each step of `due`."""
    records, lines = [], []
    if upto and path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for i, line in enumerate(lines):
        try:
            record = json.loads(line)
            if record["kind"] != "end" and record["step"] <= upto:
                records.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            if i + 1 < len(lines):  # the last line of a killed run may be half written
                raise BadInput(f"{path}: line {i + 1} is no record of a run; restore the file, or delete the run's "
                               "folder to start anew") from None
    steps = [r["step"] for r in records if r["kind"] == "train"]
    measured = {r["step"] for r in records if r["kind"] == "eval"}
    if steps != list(range(1, upto + 1)) or not measured >= {n for n in due if n < upto}:
        raise BadInput(f"{path} lacks records of steps up to {upto:,}, where the checkpoint is; restore the file, or "
                       "delete the run's folder to start anew")
    return records


def last_status(folder: Path) -> str | None:
    """complete, stopped or diverged, from the last line of a run's metrics; None while it has no end."""
    try:
        with open(folder / "metrics.jsonl", "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 8192))
            record = json.loads(f.read().splitlines()[-1])
        return record.get("status") if record.get("kind") == "end" else None
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def save_checkpoint(folder: Path, c: dict, f: Flags, model: GPT, optimizer, step: int) -> None:
    """ckpt.pt, whole or not at all; older ones stay as ckpt-<step>.pt while `--keep` or a milestone holds them."""
    with atomic_file(folder / "ckpt.pt") as out:
        try:
            torch.save(dict(format=2, step=step, tokens=step * c["tokens_per_step"], name=c["name"], arch=c["arch"],
                            model=model.state_dict(), optimizer=optimizer.state_dict()), out)
        except RuntimeError as e:  # torch hides the system's error behind "unexpected pos"
            if "unexpected pos" not in str(e) and "writing file" not in str(e):
                raise
            raise OSError(errno.ENOSPC, "", str(folder / "ckpt.pt")) from None
    path = folder / f"ckpt-{step:06d}.pt"
    if f.keep > 1 or f.keep_milestones and step in c["milestones"]:
        path.unlink(missing_ok=True)
        try:
            os.link(folder / "ckpt.pt", path)
        except OSError:  # a file system without links
            shutil.copyfile(folder / "ckpt.pt", path)
    older = {int(p.stem[5:]): p for p in folder.glob("ckpt-*.pt") if p.stem[5:].isdigit()}
    recent = sorted(older)[-f.keep:] if f.keep > 1 else []
    for at, path in older.items():
        if at not in recent and not (f.keep_milestones and at in c["milestones"]):
            path.unlink()


# ---------------------------------------------------------------------------------------------------------
# One run


class Log:
    """What a run writes as it goes: metrics.jsonl (strict JSON, a line a record), the terminal, Weights & Biases."""

    def __init__(self, folder: Path, c: dict, f: Flags, world: World, device: torch.device, start: int):
        """Continues a log as if it had never been interrupted: cut back to step `start`, without its end."""
        self.c, self.world, self.device, self.start = c, world, device, start
        self.end_step, self.file, self.wandb = c["stop_steps"] or c["max_steps"], None, None
        due = [0] * bool(c["init_from"]) + c["milestones"]
        records = world.from_rank0(lambda: read_metrics(folder / "metrics.jsonl", start, due))
        self.evaluated = {r["step"] for r in records if r["kind"] == "eval"}
        if world.rank == 0:
            with atomic_file(folder / "metrics.jsonl", "w") as out:
                out.write("".join(to_json(record) + "\n" for record in records))
            self.file = open(folder / "metrics.jsonl", "a", encoding="utf-8")
        if f.wandb and world.rank == 0:
            import wandb
            self.wandb = wandb.init(project=f.wandb, name=c["name"], config=c, resume="allow",
                                    id=hashlib.sha1(c["name"].encode()).hexdigest()[:16])
        self.began = self.mark = self.spoken = time.monotonic()
        self.pending, self.done, self.spent = [], 0, 0.0  # steps and seconds of this process, the first ones left out
        self.every = 1 if device.type == "cpu" else 10  # reading a loss waits for the GPU: not at every step

    def write(self, kind: str, n: int, **facts) -> None:
        if self.file:
            record = dict(kind=kind, step=n, tokens=n * self.c["tokens_per_step"], **facts,
                          seconds=round(time.monotonic() - self.began, 3))
            self.file.write(to_json(record) + "\n")
            self.file.flush()
            if self.wandb:
                self.wandb.log({k: v for k, v in record.items() if isinstance(v, (int, float))}, step=n)

    def step(self, n: int, lr: float, loss: torch.Tensor, norm: torch.Tensor) -> None:
        self.pending.append((n, lr, loss, norm))
        if len(self.pending) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Write the steps that wait. Raises Failed at a loss or gradient norm that is not finite."""
        pending, self.pending = self.pending, []
        if not pending:
            return
        losses = torch.stack([loss for _, _, loss, _ in pending])
        if self.world.ranks > 1:
            dist.all_reduce(losses)
            losses /= self.world.ranks
        norms = torch.stack([norm for *_, norm in pending]).tolist()
        now = time.monotonic()
        seconds = now - self.mark
        if pending[0][0] > self.start + 1:  # compilation and warm-up tell nothing about the time left
            self.done, self.spent = self.done + len(pending), self.spent + seconds
        rate = self.c["tokens_per_step"] * len(pending) / seconds
        for (n, lr, *_), loss, norm in zip(pending, losses.tolist(), norms):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                self.diverged(n, "the loss or the gradient norm")
            self.write("train", n, loss=loss, lr=lr, grad_norm=norm, tokens_per_s=round(rate, 1),
                       peak_memory_bytes=peak_memory(self.device))
        if now - self.spoken > 5 or n in (self.start + 1, self.end_step):
            left = "estimating time"
            if self.done:
                left = f"{human_time((self.end_step - n) * self.spent / self.done)} left"
            say(f"step {n:>6,}/{self.end_step:,}  loss {loss:.4f}  lr {lr:.2e}  |g| {norm:.3f}  {rate:,.0f} tokens/s  "
                f"{left}")
            self.spoken = now
        self.mark = time.monotonic()

    def sync(self) -> None:
        """Have the records as safe on the disk as the checkpoint that is about to count on them."""
        self.flush()
        if self.file:
            os.fsync(self.file.fileno())

    def evaluation(self, n: int, result: dict) -> None:
        facts = {k: v for k, v in result.items() if k != "window_nll"}
        self.write("eval", n, **facts, milestone=True, split="val", data_fingerprint=self.c["data_fingerprint"])
        line = f"step {n:>6,}  validation NLL {result['nll']:.5f}  perplexity {result['ppl'] or math.inf:.3f}"
        if result["bits_per_byte"]:
            line += f"  bits/byte {result['bits_per_byte']:.4f}"
        if result["js_mean"] is not None:
            line += f"  JS {result['js_mean']:.4f}"
        say(line)

    def diverged(self, n: int, what: str) -> typing.NoReturn:
        self.end("diverged", n, why=f"{what} is not finite")
        raise Failed(f"{self.c['name']}: {what} of step {n:,} is not finite; the run is marked diverged, and what its "
                     "last checkpoint holds, if there is one, is finite")

    def end(self, status: str, n: int, **facts) -> str:
        self.write("end", n, status=status, **facts)
        self.sync()
        self.close()
        return status

    def close(self) -> None:
        if self.file:
            self.file.close()
        if self.wandb:
            self.wandb.finish()


def open_run_data(c: dict, f: Flags, world: World):
    """(data folder, windows of an evaluation, whether those are all that was asked for), checked against what the run
    asks of it; fills in the settings that depend on it. Raises BadInput."""
    folder = Path(c["data"])
    if f.data is None and f.scale == "nano" and not (folder / "meta.json").exists():
        say(f"{folder} is missing: preparing the bundled corpus")  # or waiting for another that does
        world.from_rank0(lambda: prepare.main(["--source=demo", f"--out={folder}"]))
    world.from_rank0(lambda: open_data(folder) and None)  # one rank says what is wrong; open files do not travel
    data = open_data(folder)
    windows, enough = evaluation.slice_windows(data, "val", c["context"], c["eval_tokens"])
    splits, need = data.meta["splits"], (c["stop_steps"] or c["max_steps"]) * c["tokens_per_step"]
    if f.scale in ("S", "M") and not enough and f.eval_tokens is None:
        raise BadInput(f"{folder}: validation holds {splits['val']['tokens']:,} tokens, the paper's slice is "
                       f"{c['eval_tokens']:,}; prepare 3 shards or more (python prepare.py --shards=3: about 2.24 B "
                       "training and 11.4 M validation tokens), or pass --eval_tokens")
    if f.scale in ("S", "M") and need > splits["train"]["tokens"] and not f.repeat_data:
        raise BadInput(f"{folder}: {need:,} training tokens are asked for and {splits['train']['tokens']:,} are there; "
                       "prepare more shards (1: about 0.75 B, 2: 1.49 B, 3: 2.24 B, 14: 9.9 B), lower --max_tokens, or "
                       "pass --repeat_data to train in epochs")
    c.update(eval_tokens=windows * c["context"], vocab_size=data.vocab_size, data_fingerprint=data.fingerprint,
             tokenizer_sha256=data.meta["tokenizer_sha256"])
    return data, windows, enough


def build_model(c: dict, device: torch.device, begin: bool = True) -> GPT:
    """The model of config `c` on `device`, with `begin` at its starting weights. Raises BadInput."""
    model = GPT(evaluation.model_config(c), seed=c["seed"] if begin else None)
    if c["init_from"] and begin:
        load_parent(model, c)
    if c["freeze"]:
        frozen = [name for name, _ in model.named_parameters() if fnmatch.fnmatchcase(name, c["freeze"])]
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        if not frozen or not any(p.requires_grad for p in model.parameters()):
            names = [n for n, _ in model.named_parameters() if n.startswith(("layers.1.", "out", "wte"))]
            raise BadInput(f"--freeze={c['freeze']} matches {'every' if frozen else 'no'} parameter; names look like "
                           f"{', '.join(names)}")
    return model.to(device)


def load_parent(model: GPT, c: dict) -> None:
    """Take the weights of the run `init_from`. Raises BadInput unless the model then computes what that run does."""
    state, parent, _ = evaluation.load_state(Path(c["init_from"]))
    what = f"--init_from={c['init_from']}"
    differ = [f"{k} is {parent[k]} there and {c[k]} here" for k in ("n_head", "block_layers", "tokenizer_sha256")
              if k in c and parent.get(k) != c[k]]
    if differ:
        raise BadInput(f"{what}: the weights would mean something else, {'; '.join(differ)}")
    try:
        model.load_from(state)
    except ValueError as e:
        raise BadInput(f"{what}: {e}") from None
    far = logits_apart((model.config, model.state_dict()), (evaluation.model_config(parent), state))
    if not far <= 1e-5:
        raise BadInput(f"{what}: {c['arch']} with these weights does not compute what {parent['arch']} does (logits "
                       f"differ by {far:.2g} of their norm)")


def starting_hash(model: GPT) -> str:
    """sha256 of the starting values of the parameters that every arm has, by name."""
    digest, routing = hashlib.sha256(), model.routing_names()
    for name, p in sorted(model.named_parameters()):
        if name not in routing:
            digest.update(name.encode())
            digest.update(p.detach().cpu().numpy().data)
    return digest.hexdigest()[:16]


def describe(c: dict, f: Flags, model: GPT, data, enough: bool) -> list[str]:
    """What is about to run, every number with where it comes from."""
    n, B, T, tps = model.count(), c["batch_size"], c["context"], c["tokens_per_step"]
    train_tokens, val_tokens = (data.meta["splits"][split]["tokens"] for split in ("train", "val"))
    used = (c["stop_steps"] or c["max_steps"]) * tps
    parameters = f"{n['total']:,}, of them {n['routing']:,} in routes"
    if n["frozen"]:
        parameters += f", {n['frozen']:,} frozen"
    if c["scale"] in ("S", "M") and c["vocab_size"] != SCALES[c["scale"]]["vocab_size"]:
        parameters += f" (not the paper's count: vocabulary {c['vocab_size']:,})"
    groups = [f"{g['kind']} {sum(p.numel() for p in g['params']):,} in {len(g['params'])} tensors (decay "
              f"{g['weight_decay']:g})" for g in model.param_groups(c["lr"], c["weight_decay"], c["route_lr_mult"])]
    schedule = (f"{c['max_steps']:,} steps = {c['max_tokens']:,} tokens, warm-up {c['warmup_steps']:,}, peak lr "
                f"{c['lr']:g}, end {c['lr'] * c['min_lr_ratio']:g}; evaluated after "
                f"{', '.join(f'{m:,}' for m in c['milestones'])}")
    if c["stop_steps"]:
        schedule += f"; stops at step {c['stop_steps']:,}, mid-schedule"
    evaluated = f"{c['eval_tokens'] // T:,} windows x {T:,} = {c['eval_tokens']:,} tokens of {val_tokens:,}"
    if not enough:
        evaluated += f" (all there is; {f.eval_tokens or usual('eval_tokens', f.scale):,} were asked for)"
    return [
        f"run         {c['name']}: {find_arm(c['arch']).idea}",
        f"parameters  {parameters}",
        f"optimiser   AdamW ({c['beta1']}, {c['beta2']}), clip {c['grad_clip']:g}: {'; '.join(groups)}",
        f"tokens/step {B} sequences x {T:,} = {tps:,}: {B // c['ranks'] // c['micro_batch']} micro-batch(es) of "
        f"{c['micro_batch']} on {c['ranks']} rank(s)",
        f"schedule    {schedule}",
        f"data        {c['data']} {c['data_fingerprint']}: {train_tokens:,} training tokens, {used / train_tokens:.2f} "
        "epochs",
        f"evaluation  {evaluated}",
        f"compute     {c['device_name'] or c['device']}, {c['threads']} thread(s), {c['dtype']} ({c['dtype_reason']}), "
        f"residual stream {c['residual_dtype'] or c['dtype']}, routes {c['backend']} ({c['backend_reason']})"
        + (", compiled" if c["compile"] else ""),
    ]


def check_resume(old: dict, new: dict, folder: Path, code: bool) -> list[str]:
    """Lines about settings that changed harmlessly since the run began. Raises BadInput listing what must not change,
    with `code` what the code computes as well."""
    if old.get("name") != new["name"]:
        raise BadInput(f"{folder} is the folder of another run: its config.json says {old.get('name')}")
    bad = [f"{k}: {old[k]} before, {new[k]} now" for k in SAME if k in old and old[k] != new[k]]
    if code and old.get("data_order") not in (None, new["data_order"]):
        bad.append(f"the code: the order of the data was {old['data_order']} before, is {new['data_order']} now")
    probes = old.get("probe") or {}
    for arch, now in new["probe"].items() if code and "data_order" in old else ():  # an older probe was in float32
        if arch in probes and not np.allclose(probes[arch], now, rtol=1e-9, atol=0):
            bad.append(f"the code: on a fixed tiny model, arm {arch} gave {probes[arch]} before, {list(now)} now")
    if bad:
        raise BadInput(f"{folder} was begun with other settings and cannot be continued with these; use --tag for a "
                       "new run, or move the folder away\n" + "\n".join(bad))
    return [f"{k}: {old[k]} before, {new[k]} now" for k in MAY_DIFFER if k in old and old[k] != new[k]]


def run_one(f: Flags, c: dict, world: World, device: torch.device) -> str:
    """Train or continue one run; returns complete, stopped, or done when it already was. Raises BadInput and Failed."""
    folder = Path(c["out"]) / c["name"]
    if f.wandb and not importlib.util.find_spec("wandb"):
        raise BadInput("--wandb needs the package: pip install wandb")
    data, windows, enough = open_run_data(c, f, world)
    with claim(folder / "lock", str(folder), f.force) if world.rank == 0 else contextlib.nullcontext():
        c.update(provenance(), kernel_sha256=sha256_of(ROOT / "route_kernel.py") if c["backend"] == "fused" else None)
        status = world.from_rank0(lambda: last_status(folder))
        if status == "diverged":
            raise Failed(f"{folder} diverged; the same command would diverge again: change a setting, or delete the "
                         "folder")
        begun = world.from_rank0(lambda: status or (folder / "ckpt.pt").exists())
        if status != "complete":  # a finished run is skipped without training the probe's models
            c["probe"] = {arch: list(probe(arch)) for arch in ("block", c["arch"])}
            batches = Batches(data.bins["train"], c["context"], c["batch_size"], c["seed"], c["vocab_size"])
            c["data_order"] = batches.digest()
        if begun:
            old = world.from_rank0(lambda: read_json(folder / "config.json"))
            changed = check_resume(old, c, folder, code=status != "complete")
            if status == "complete":
                say(f"{c['name']} is complete: skipped")
                return "done"
            for line in changed:
                say(f"continued with another {line}")
            if changed and world.rank == 0:
                write_json(folder / "config.json", {**old, "resumed": old.get("resumed", []) + changed})
        try:
            return train(f, c, folder, world, device, data, windows, enough, batches)
        except (RuntimeError, MemoryError) as e:
            problem = out_of_memory(e, c["micro_batch"])
            if problem is None:
                raise
            if world.ranks > 1:  # the others wait for this rank: the job ends, it does not go on to the next run
                print(f"error: rank {world.rank}: {problem}", file=sys.stderr, flush=True)
                os._exit(1)
            raise problem from None


def begin(c: dict, folder: Path, device: torch.device, data, world: World):
    """(model, optimizer, steps done): at the run's checkpoint, or at its start, written down in the folder. Raises
    BadInput for a checkpoint of another run, and where the disk is too full for the next ones."""
    state = evaluation.load_checkpoint(folder)
    if state and (state.get("name"), state["arch"]) != (c["name"], c["arch"]):
        raise BadInput(f"{folder}: its checkpoint is that of another run, {state.get('name')}; move it away")
    model = build_model(c, device, begin=state is None)
    if state:
        try:
            model.load_state_dict(state["model"])
        except RuntimeError:
            raise BadInput(f"{folder}: its checkpoint holds other parameters than its config.json asks for") from None
    optimizer = make_optimizer(model, c)
    if state:
        optimizer.load_state_dict(state["optimizer"])
        return model, optimizer, state["step"]
    counts = model.count()
    c.update(n_params=counts["total"], n_params_route=counts["routing"], n_params_frozen=counts["frozen"],
             init_sha256=starting_hash(model))
    if world.rank == 0:
        (folder / "metrics.jsonl").unlink(missing_ok=True)  # of a start that left no checkpoint
        with atomic_file(folder / "tokenizer.json") as out:
            out.write((data.path / "tokenizer.json").read_bytes())
        if c["git_dirty"]:  # what the commit alone does not tell
            with atomic_file(folder / "diff.patch") as out:
                out.write(git("diff", "HEAD"))
        write_json(folder / "config.json", c)
    return model, optimizer, 0


def check_disk(f: Flags, c: dict, folder: Path, model: GPT) -> None:
    """Raise BadInput unless `folder` has room for the checkpoints and logs to come."""
    checkpoints = f.keep + 1 + (len(c["milestones"]) if f.keep_milestones else 0)
    need, free = 12 * model.count()["total"] * checkpoints + 250 * c["max_steps"], shutil.disk_usage(folder).free
    if free < need:
        raise BadInput(f"{folder}: checkpoints and logs need {need / 1e9:.2f} GB and {free / 1e9:.2f} GB are free")


def finite(values: typing.Iterable[torch.Tensor]) -> bool:
    return all(torch.isfinite(x).all().item() for x in values)


def announce(f: Flags, c: dict, model: GPT, data, enough: bool, start: int) -> None:
    from stats import launch_report
    for line in describe(c, f, model, data, enough):
        say(line)
    for line in launch_report(c, c["out"]):
        say(f"pairs       {line}")
    if start:
        say(f"continuing after step {start:,}")


def train(f: Flags, c: dict, folder: Path, world: World, device: torch.device, data, windows: int, enough: bool,
          batches: Batches) -> str:
    """The run of config `c`, from its start or its checkpoint; returns complete or stopped. Raises Failed where it
    diverges. Whatever it ends by, the same call continues it to the same bytes."""
    torch.use_deterministic_algorithms(c["deterministic"])
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    model, optimizer, start = begin(c, folder, device, data, world)
    world.from_rank0(lambda: check_disk(f, c, folder, model))
    announce(f, c, model, data, enough, start)
    if c["compile"]:
        compile_layers(model)
    network = model
    if world.ranks > 1:
        network = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True,
            broadcast_buffers=False)
    micro, end = c["micro_batch"], c["stop_steps"] or c["max_steps"]
    count = c["batch_size"] // world.ranks // micro
    autocast, batch = evaluation.make_autocast(device, c["dtype"]), f.eval_batch or micro
    measure = functools.partial(evaluation.evaluate, model, data, "val", batch=batch, device=device, autocast=autocast,
                                token_bytes=data.token_bytes(), rank=world.rank, ranks=world.ranks, stop=world.stop)
    measure(min(windows, 2 * batch * world.ranks), label="rehearsal")  # what would fail at a milestone fails now
    log = Log(folder, c, f, world, device, start)
    due = {0, *c["milestones"]} if c["init_from"] else set(c["milestones"])
    try:
        for n in range(start, end + 1):
            if n > start:
                # one step: batch, forward and backward, clip, step, log
                lr = lr_at(n, c["max_steps"], c["warmup_steps"], c["lr"], c["min_lr_ratio"])
                pairs = batches.micro(n - 1, micro, world.rank, world.ranks)
                loss = accumulate(network, pairs, count, device, autocast)
                norm = clip(optimizer, c["grad_clip"])
                step(optimizer, lr)
                log.step(n, lr, loss, norm)
                stop = world.stop()
                # save, before the evaluation: what has been trained is safe first
                if stop or n in due or n % f.ckpt_every == 0:
                    log.sync()
                    if not finite(model.parameters()):
                        log.diverged(n, "a weight")
                    if world.rank == 0:
                        save_checkpoint(folder, c, f, model, optimizer, n)
                    log.mark = time.monotonic()
                if stop:
                    return log.end("stopped", n)
            # evaluate, also what the checkpoint's step lacks of it
            if n in due and n not in log.evaluated:
                world.from_rank0(data.check)  # the text is still the one that training began with
                result = measure(windows)
                if result is None:
                    return log.end("stopped", n)
                if not math.isfinite(result["nll"]):
                    log.diverged(n, "the evaluation")
                if world.rank == 0:
                    evaluation.store(folder, result, c["name"], "val", n, n * c["tokens_per_step"], c["backend"],
                                     c["data_fingerprint"])
                log.evaluation(n, result)
        say(f"{c['name']}: done in {human_time(time.monotonic() - log.began)}")
        return log.end("complete", end)
    finally:
        log.close()


# ---------------------------------------------------------------------------------------------------------
# Sweeps, benchmark, dry run


def write_plan(members: list[Flags], configs: list[dict], out: Path) -> None:
    """Add to runs/plan.json what this sweep is going to run, once. Raises BadInput for a plan.json that is none."""
    first, made, path = configs[0], provenance(), out / "plan.json"
    plan = dict(runs=[c["name"] for c in configs], arms=list(dict.fromkeys(c["arch"] for c in configs)),
                seeds=list(dict.fromkeys(c["seed"] for c in configs)), scale=first["scale"],
                max_steps=first["max_steps"], stop_steps=first["stop_steps"], primary=members[0].primary,
                margin=members[0].margin, started=made["started"], git_commit=made["git_commit"],
                command=made["command"])
    with claim(out / ".plan.lock", "plan.json", wait=30):  # copies of one sweep start together
        plans = read_json(path).get("plans") if path.exists() else []
        if not isinstance(plans, list) or not all(isinstance(p, dict) and "runs" in p for p in plans):
            raise BadInput(f"{path} holds no list of plans; move it away")
        if plan["runs"] not in [p["runs"] for p in plans]:
            write_json(path, dict(plans=[*plans, plan]))


def resolve_all(members: list[Flags], device: torch.device, ranks: int) -> list[dict]:
    """The settings of every member of a command. Raises BadInput naming all that is wrong with any."""
    configs, problems, arms = [], [], [m.arch for m in members]
    for m in members:
        try:
            configs.append(resolve(m, device, ranks, arms))
        except BadInput as e:
            where = f" (--arch={m.arch} --scale={m.scale})" if len(members) > 1 else ""
            problems += [f"{line}{where}" for line in str(e).splitlines()]
    names = [c["name"] for c in configs]
    problems += [f"{name} occurs {names.count(name)} times in this sweep" for name in names if names.count(name) > 1]
    if problems:
        raise BadInput("\n".join(dict.fromkeys(problems)))
    return configs


def run_sweep(members: list[Flags], world: World, device: torch.device) -> int:
    """Every member in turn; one that fails is reported and the others go on. Returns the exit code."""
    configs = resolve_all(members, device, world.ranks)
    if len(members) == 1:
        run_one(members[0], configs[0], world, device)
        return 128 + STOP["signal"] if STOP["signal"] else 0
    world.from_rank0(lambda: write_plan(members, configs, Path(configs[0]["out"])))
    outcome = {}
    for i, (m, c) in enumerate(zip(members, configs)):
        say(f"\n[{i + 1}/{len(members)}] {c['name']}")
        try:
            status = run_one(m, c, world, device)
        except Busy as e:
            status = "busy"
            say(f"left to its owner: {e}")
        except (Failed, BadInput) as e:
            status = "failed"
            say(f"error: {e}")
        outcome.setdefault(status, []).append(c["name"])
        if STOP["signal"]:
            break
        gc.collect()
        torch.cuda.empty_cache()
        torch._dynamo.reset()
    say("\nsweep: " + "; ".join(f"{len(names)} {status}" for status, names in outcome.items()))
    untrained = outcome.get("failed", []) + outcome.get("busy", [])
    if untrained:
        say(f"not trained here: {', '.join(untrained)}")
    return 128 + STOP["signal"] if STOP["signal"] else 1 if untrained else 0


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large square product on this device: the peak that an MFU is measured against."""
    n = 8192 if device.type == "cuda" else 2048
    a, best = torch.randn(n, n, device=device).to(dtype), math.inf
    for _ in range(20 if device.type == "cuda" else 5):  # a GPU's clock takes a while to rise
        t = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - t)
    return 2 * n ** 3 / best


class Bench:
    """One arm on random tokens, ready to time steps."""

    def __init__(self, c: dict, device: torch.device):
        self.c, self.device = {**c, "vocab_size": SCALES[c["scale"]]["vocab_size"]}, device
        torch.use_deterministic_algorithms(c["deterministic"])
        self.model = build_model(self.c, device)
        if c["compile"]:
            compile_layers(self.model)
        self.optimizer, self.autocast = make_optimizer(self.model, c), evaluation.make_autocast(device, c["dtype"])
        ids = torch.randint(self.c["vocab_size"], (c["micro_batch"], c["context"] + 1),
                            generator=torch.Generator().manual_seed(0))
        self.pair = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def seconds(self, steps: int) -> float:
        """What so many steps take, by the clock."""
        sync = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        count = self.c["batch_size"] // self.c["micro_batch"]
        sync()
        t = time.perf_counter()
        for _ in range(steps):
            accumulate(self.model, [self.pair] * count, count, self.device, self.autocast)
            clip(self.optimizer, 1.0)
            step(self.optimizer, 1e-5)
        sync()
        return time.perf_counter() - t


def bench_worker(c: dict, device: torch.device, parent) -> None:
    """In a process of its own: answer each number of steps that comes through the pipe with (seconds that they took,
    peak memory so far); the first answer, unasked, is the model's counts."""
    bench = Bench(c, device)
    bench.seconds(2)
    parent.send(bench.model.count())
    with contextlib.suppress(EOFError, KeyboardInterrupt):  # the parent has all it wants
        while True:
            parent.send((bench.seconds(parent.recv()), peak_memory(device)))


def ask(pipe, label: str):
    """The next answer of a worker. Raises Failed where it has ended."""
    try:
        return pipe.recv()
    except EOFError:
        raise Failed(f"{label} ended during the benchmark, perhaps for lack of memory: all arms are in memory at once "
                     "(fewer arms, or a smaller --micro_batch)") from None


def benchmark(members: list[Flags], configs: list[dict], device: torch.device) -> int:
    """Time the members in turn, round by round, each in a process of its own; print ratios to the first one."""
    varied = [x.name for x in dataclasses.fields(Flags) if len({getattr(m, x.name) for m in members}) > 1] or ["arch"]
    labels, rounds = [" ".join(str(getattr(m, v)) for v in varied) for m in members], members[0].rounds or 7
    say(f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}; {rounds} interleaved rounds, each "
        "arm in its own process, random tokens")
    context, pipes, facts, rates, steps = multiprocessing.get_context("spawn"), {}, {}, {}, 1
    for label, c in zip(labels, configs):
        pipes[label], theirs = context.Pipe()
        context.Process(target=bench_worker, args=(c, device, theirs), daemon=True).start()
        theirs.close()  # so that a worker's end is the end of its pipe
        facts[label], rates[label] = {**c, **ask(pipes[label], label)}, []
    for i in range(rounds + 1):  # the first round tells how many steps fill four seconds
        for label in labels if i % 2 else reversed(labels):  # turn about, so that no arm always comes first
            pipes[label].send(steps)
            seconds, facts[label]["memory"] = ask(pipes[label], label)
            rates[label].append(steps * facts[label]["tokens_per_step"] / seconds)
        if i == 0:
            steps = math.ceil(4 * rates[labels[0]].pop() / configs[0]["tokens_per_step"])
            rates = {label: [] for label in labels}
        else:
            say(f"round {i}: " + "  ".join(f"{label} {rates[label][-1]:,.0f}" for label in labels))
    report_benchmark(members[0], device, facts, rates, steps, " ".join(varied))
    return 0


def report_benchmark(f: Flags, device: torch.device, facts: dict, rates: dict, steps: int, varied: str) -> None:
    """Print the table of a benchmark, and write it where --out is a .json file (stats.py --speed reads it)."""
    reference, x = next(iter(facts)), next(iter(facts.values()))
    peaks = {y["dtype"]: matmul_rate(device, getattr(torch, y["dtype"])) for y in facts.values()}
    peak_text = ", ".join(f"{rate / 1e12:.2f} TFLOP/s {dtype}" for dtype, rate in peaks.items())
    say(f"\n{steps} step(s) a round of {x['batch_size']} x {x['tokens_per_step'] // x['batch_size']:,} tokens, "
        f"micro-batch {x['micro_batch']}; measured matrix product rate: {peak_text}\n")
    say(f"| {varied} | routes | tokens/s | ratio to {reference} (min-max) | MFU | peak memory |")
    say("|---|---|---|---|---|---|")
    arms = {}
    for label, x in facts.items():
        ratios = [rate / by for rate, by in zip(rates[label], rates[reference])]
        rate, ratio = float(np.median(rates[label])), float(np.median(ratios))
        mfu = rate * x["flops_per_token"] / peaks[x["dtype"]]
        arms[label] = dict(ratio=ratio, ratio_min=min(ratios), ratio_max=max(ratios), tokens_per_s=rate, mfu=mfu,
                           peak_memory_bytes=x["memory"], backend=x["backend"], dtype=x["dtype"])
        say(f"| {label} | {x['backend'] if x['routing'] else 'none'}, {x['dtype']} | {rate:,.0f} | {ratio:.3f} "
            f"({min(ratios):.3f}-{max(ratios):.3f}) | {mfu:.1%} | {x['memory'] / 1e9:.2f} GB |")
    where = "allocated on the GPU" if device.type == "cuda" else "resident, weights and optimiser included"
    say(f"\nMFU counts 6 FLOPs per matrix weight and token and causal attention's products; memory is {where}.")
    if f.out.endswith(".json"):
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        write_json(f.out, dict(reference=reference, scale=f.scale, device=name, rounds=len(rates[reference]),
                               steps_a_round=steps, arms=arms, **provenance()))


def dry_run(members: list[Flags], world: World, device: torch.device) -> int:
    """Say what each member would cost; the time is from one measured micro-batch."""
    for m, c in zip(members, resolve_all(members, device, world.ranks)):
        if m.data:
            open_data(m.data)
        bench = Bench({**c, "batch_size": c["micro_batch"]}, device)
        bench.seconds(1)
        n, seconds = bench.model.count(), bench.seconds(1)
        steps = c["stop_steps"] or c["max_steps"]
        tokens = steps * c["tokens_per_step"]
        checkpoints = m.keep + (len(c["milestones"]) if m.keep_milestones else 0)
        disk = 12 * n["total"] * checkpoints + 250 * steps
        total = tokens / (c["micro_batch"] * c["context"]) * seconds / world.ranks
        say(f"{c['name']}: {n['total']:,} parameters, {tokens:,} tokens, {n['flops_per_token'] * tokens:.3g} FLOPs, "
            f"about {human_time(total)} here (one micro-batch of {c['micro_batch']} took {seconds:.2f} s), peak memory "
            f"{peak_memory(device) / 1e9:.1f} GB, disk {disk / 1e9:.2f} GB")
        del bench
        gc.collect()
    return 0


def check_use(members: list[Flags]) -> None:
    """Raise BadInput for an unknown arm, and for a flag that can have no effect in what is asked."""
    problems, f = [], members[0]
    for m in members:
        try:
            m.arch = canonical(m.arch)
        except ValueError as e:
            problems.append(str(e))
    if f.rounds and not f.benchmark:
        problems.append("--rounds is of a benchmark: give --benchmark too")
    if f.out.endswith(".json") != (f.benchmark and f.out != "runs"):
        problems.append(f"--out={f.out}: a folder of runs, or with --benchmark a .json file")
    if (f.primary or f.margin) and len(members) == 1:
        problems.append("--primary and --margin stand in a sweep's plan.json: give several arms or seeds")
    if f.primary and f.primary not in [m.arch for m in members]:
        problems.append(f"--primary={f.primary} is no arm of this sweep")
    if f.eval_batch and f.device == "cpu":
        problems.append("--eval_batch has no effect on a CPU, which evaluates a window at a time")
    if problems:
        raise BadInput("\n".join(dict.fromkeys(problems)))


def main(argv: list[str]) -> int:
    members = parse_flags(Flags, argv, __doc__, lists=True)
    check_use(members)
    members = list({dataclasses.astuple(m): m for m in members}.values())  # mhar and mhar:heads=2 are one
    if any(m.deterministic for m in members):  # read at the first product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = evaluation.pick_device(members[0].device)
    if device.type == "cpu":
        keep_freed_memory()
    if members[0].benchmark:
        for m in members:
            if m.batch_size is None and device.type == "cpu":  # a step of the paper's batch takes a CPU a minute
                m.batch_size = m.micro_batch or 1
        return benchmark(members, resolve_all(members, device, 1), device)
    heed_signals()
    world = World(device)
    try:
        code = dry_run(members, world, device) if members[0].dry_run else run_sweep(members, world, device)
    except BadInput:
        if world.rank:  # every rank finds the same; one says it
            sys.exit(2)
        raise
    if world.ranks > 1:
        dist.destroy_process_group()  # after a clean end only: it waits for ranks that may be gone
    return code


if __name__ == "__main__":
    sys.stdout, sys.stderr = Patient(sys.stdout), Patient(sys.stderr)
    run_script(main)
