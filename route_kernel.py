"""The depth route: every read of the residual memory, exact, in plain torch and as fused Triton kernels.

    python route_kernel.py              # check the kernels here, and time them on a GPU

`Depth` is what the model uses, `route` the same read on its own. A read is one autograd function that returns its
sources beside its mixtures; whoever reads next takes the returned ones, so that a backward pass receives each source's
gradient so far and hands it on with its own share added: autograd itself never adds two [N, d] tensors.

Needs torch, and triton for the kernels (Linux); nothing else of this repository.

Letters: N token rows, d width, K sources, R queries of a read, Q queries scored in one pass.
"""
from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from typing import List, NamedTuple, Optional

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # macOS and Windows have none: the reference path runs there
    triton = None

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's own switch, read when it decorates a kernel
MAX_SOURCES = 64


# ---------------------------------------------------------------------------------------------------------
# What the model uses


def route(sources, queries, key_gain, out_gain=None, eps=1e-6, backend="auto"):
    """The mixtures of `sources` that `queries` select, one per query (paper, equation 1, then the norm of equation 2).

    sources: tuple of K tensors [..., d] of one dtype; queries [R, d]; key_gain [d]; out_gain [d] or None.
    Returns a tuple of R tensors [..., d] in the sources' dtype, RMS-normalised with out_gain where it is given.
    Scores, softmax and sums are float32. Raises ValueError for shapes that do not belong together and for a backend
    that cannot run here.
    """
    sources = tuple(sources)
    if not sources:
        raise ValueError("route needs at least one source")
    shape, dtype, d = sources[0].shape, sources[0].dtype, sources[0].shape[-1]
    for i, s in enumerate(sources):
        if s.shape != shape or s.dtype != dtype:
            raise ValueError(f"source {i} is {tuple(s.shape)} {s.dtype} but source 0 is {tuple(shape)} {dtype}: "
                           "the sources of a read share one shape and dtype")
    if queries.dim() != 2 or queries.shape[1] != d or not len(queries):
        raise ValueError(f"queries are {tuple(queries.shape)}: want [R, {d}], one row a query")
    for name, gain in (("key_gain", key_gain), ("out_gain", out_gain)):
        if gain is not None and gain.shape != (d,):
            raise ValueError(f"{name} is {tuple(gain.shape)}: want [{d}]")
    chosen, _ = choose_backend(backend, sources[0].device)
    if chosen == "fused":
        check_fused(len(sources), len(queries), dtype)
    return read(sources, queries, key_gain, out_gain, eps, chosen).mixtures


def check_fused(K: int, R: int, dtype: torch.dtype) -> None:
    if K > MAX_SOURCES or R > 3 or dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"the fused route takes up to {MAX_SOURCES} sources and 3 queries, in float32, bfloat16 or "
                       f"float16, not {K}, {R} and {dtype}: use --backend=reference")


def choose_backend(requested: str, device) -> tuple[str, str]:
    """(backend, reason) for `requested` (auto, reference or fused) on `device`; ValueError where fused cannot run."""
    device = torch.device(device)
    if requested not in ("auto", "reference", "fused"):
        raise ValueError(f"backend {requested!r}: want auto, reference or fused")
    if requested == "reference":
        return "reference", "asked for"
    cause = None
    if triton is None:
        cause = "triton is not installed (pip install triton; Linux only)"
    elif device.type == "cuda":
        if torch.version.hip:
            cause = "this is an AMD GPU (ROCm), and the kernels are written and compiled for NVIDIA's"
        elif torch.cuda.get_device_capability(device) < (8, 0):
            cause = "this GPU is older than compute capability 8.0, which the kernels are written for"
    elif not (INTERPRETED and device.type == "cpu"):
        cause = f"the device is {device.type} and the fused kernels run on CUDA GPUs (a CPU only interprets them, " \
                "for tests: TRITON_INTERPRET=1)"
    if requested == "fused":
        if cause:
            raise ValueError(f"--backend=fused cannot run: {cause}")
        return "fused", "asked for" + (", in Triton's interpreter" if device.type == "cpu" else "")
    if device.type != "cuda":
        return "reference", f"the device is {device.type}: the fused kernels are for CUDA GPUs"
    return ("reference", cause) if cause else ("fused", "a CUDA GPU with triton")


class Depth:
    """The depth memory of one forward pass: the embedding, the completed blocks, and the block being summed.

    A read hands out mixtures over all of them, a write adds a sub-layer's output to the block being summed, and
    `finish_block` makes that block a source of its own. How a layer uses them is the method (paper, section 3).

    x: the embedding [..., d] in the residual stream's dtype. backend: reference or fused. record: None or a list
    to which every read appends its weights, float32 [R, K, N], sources in order and the block being summed last.
    """

    def __init__(self, x: Tensor, backend: str = "reference", eps: float = 1e-6, record: list | None = None):
        self.backend, self.eps, self.record = backend, eps, record
        self.sources = [x]  # completed ones first, then the block being summed, when it holds anything
        self.n_completed = 1
        self.pending = None  # a sub-layer's output that the next read adds to the last source on its way
        self.opened = None  # what `ahead` prepared: see `read`

    def read(self, queries: Tensor, key_gain: Tensor, out_gain: Tensor | None = None, ahead=None, last: bool = False):
        """R mixtures [..., d] of all sources for `queries` [R, d], normalised by `out_gain` [d] where it is given.

        ahead: (queries, key_gain) of the read to come after the next write. Queries are parameters, so the fused
        route scores the completed sources for it in this same pass over them, and the read itself only adds the
        block being summed. It changes no result but by rounding: the mixture so far is kept in the sources' dtype, so
        below float32 it is rounded once more. It may never come. last: no read follows this one.
        """
        fused = self.backend == "fused"
        if fused:
            check_fused(len(self.sources), len(queries), self.sources[0].dtype)
        opened, self.opened = self.opened, None
        if opened and opened.queries is queries and opened.key_gain is key_gain \
                and opened.count == len(self.sources) - 1:
            done = read((opened.mixture, self.sources[-1]), queries, key_gain, out_gain, self.eps, self.backend,
                        self.pending, given=opened.lse)
            self.sources[-1] = done.sources[1]
            scores = torch.cat([opened.scores[:, None], done.scores[..., 1:]], -1)
        else:
            hint = ahead if fused and ahead is not None and len(ahead[0]) == 1 else None
            done = read(self.sources, queries, key_gain, out_gain, self.eps, self.backend, self.pending, hint,
                        self.n_completed)
            self.sources, self.opened, scores = list(done.sources), done.opened, done.scores
        self.pending = None
        if last:  # handing the sources on would only keep them alive
            self.sources, self.n_completed, self.opened = [], 0, None
        if self.record is not None:
            self.record.append(scores.detach().softmax(-1).permute(1, 2, 0).float())
        return done.mixtures

    def write(self, out: Tensor) -> None:
        """Add a sub-layer's output [..., d] to the block being summed, in the residual stream's dtype."""
        out = out.to(self.sources[0].dtype)
        if len(self.sources) == self.n_completed:
            self._add_pending()
            self.sources.append(out)
        elif self.backend == "fused":
            self._add_pending()
            self.pending = out
        else:
            self.sources[-1] = self.sources[-1] + out

    def finish_block(self) -> None:
        """The block being summed becomes a source of its own (nothing happens when it is empty)."""
        self.n_completed = len(self.sources)

    def _add_pending(self) -> None:
        if self.pending is not None:
            self.sources[-1], self.pending = self.sources[-1] + self.pending, None

    @property
    def completed(self) -> list[Tensor]:
        """The embedding and the completed blocks, [..., d] each."""
        self._add_pending()
        return self.sources[:self.n_completed]

    @property
    def partial(self) -> Tensor | None:
        """The block being summed [..., d], or None while it is empty."""
        self._add_pending()
        return self.sources[-1] if len(self.sources) > self.n_completed else None


# ---------------------------------------------------------------------------------------------------------
# A read as an autograd function


class Opened(NamedTuple):
    """A softmax over the completed sources only: its mixture [..., d], log-sum-exp [N] and scores [N, count]."""
    queries: Tensor
    key_gain: Tensor
    count: int
    mixture: Tensor
    lse: Tensor
    scores: Tensor


class Done(NamedTuple):
    mixtures: tuple
    sources: tuple  # to be handed to the next read
    scores: Tensor  # [N, R, K]
    opened: Opened | None


def read(sources, queries, key_gain, out_gain, eps, backend, pending=None, ahead=None, n_ahead=0, given=None) -> Done:
    """One read over `sources`, after adding `pending` to the last of them.

    ahead: (queries [1, d], key_gain) to open over the first n_ahead sources. given: the score [N] of source 0, where
    that is an opened mixture: softmax over it and the rest is the softmax over everything it is made of, exactly.
    """
    R, A = len(queries), int(ahead is not None)
    out = Read.apply(eps, backend, n_ahead, given, pending, queries, key_gain, out_gain, *(ahead or (None, None)),
                     *sources)
    scores = out[R] if backend == "reference" else out[R][..., :-1].transpose(1, 2)
    opened = Opened(*ahead, n_ahead, out[R + 1], out[R + 2], scores[:, R, :n_ahead]) if A else None
    return Done(out[:R], out[R + 1 + 2 * A:], scores[:, :R], opened)


def rows_of(x):
    """x [..., d] as contiguous rows [N, d]: only a strided or expanded tensor is copied."""
    return None if x is None else x.reshape(-1, x.shape[-1]).contiguous()


class Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, backend, n_ahead, given, pending, *tensors):
        ctx.set_materialize_grads(False)
        parameters, sources = tensors[:5], tensors[5:]  # queries, key_gain, out_gain, ahead, ahead_gain
        shape, R = sources[0].shape, len(parameters[0])
        A, P = int(parameters[3] is not None), int(pending is not None)
        rows = [rows_of(s) for s in sources]
        out = read_op(rows, rows_of(pending), given, parameters, n_ahead, eps, backend)
        opened, state = out[R + P:R + P + 2 * A], out[R + P + 2 * A:]
        if P:
            rows[-1] = out[R]
            sources = (*sources[:-1], out[R].view(shape))
        ctx.save_for_backward(*parameters, *opened[1:], *rows, *state)
        ctx.rest = backend, n_ahead, R, A, P, len(rows), given is not None
        ctx.mark_non_differentiable(state[0])
        opened = (opened[0].view(shape), opened[1]) if A else ()
        return (*(h.view(shape) for h in out[:R]), state[0], *opened, *sources)

    @staticmethod
    def backward(ctx, *grads):
        backend, n_ahead, R, A, P, K, given = ctx.rest
        saved = ctx.saved_tensors  # once: checkpointing allows no second look
        parameters, lse, rows, state = saved[:5], saved[5:5 + A], saved[5 + A:5 + A + K], saved[5 + A + K:]
        dmix, dopened, running = grads[:R], grads[R + 1:R + 1 + 2 * A], grads[R + 1 + 2 * A:]
        shape = next((g.shape for g in (*dmix, *dopened[:1], *running) if g is not None), None)
        if shape is None:
            return (None,) * (10 + K)
        needed = list(ctx.needs_input_grad[10:])
        needed[-1] = needed[-1] or ctx.needs_input_grad[4]
        dmix = [torch.zeros_like(rows[0]) if g is None else rows_of(g) for g in dmix]
        if any(g is not None for g in dopened):  # otherwise the read that `ahead` announced never came
            dopened = [torch.zeros_like(x) if g is None else g.reshape(x.shape).contiguous()
                       for g, x in zip(dopened, (rows[0], *lse))] + [*lse]
        else:
            dopened = []
        out = read_backward_op(rows, [rows_of(g) for g in running], needed, dmix, dopened, parameters, state, n_ahead,
                               given, backend)
        dparameters, dgiven = [g if g.numel() else None for g in out[:5]], out[5] if given else None
        ds = [g.view(shape) if want else None for g, want in zip(out[6:], needed)]
        return (None, None, None, dgiven, ds[-1] if P else None, *dparameters, *ds)


# The passes as opaque operations, so that torch.compile takes a read as one node and never looks inside


@torch.library.custom_op("depth_route::read", mutates_args=())
def read_op(sources: List[Tensor], pending: Optional[Tensor], given: Optional[Tensor],
            parameters: List[Optional[Tensor]], n_ahead: int, eps: float, backend: str) -> List[Tensor]:
    """The R mixtures [N, d], [last source + pending], [mixture [N, d] and log-sum-exp [N] of `ahead`], then the state.

    The state is what the backward needs, fp32. Reference: scores [N, R, K] and 1 / rms of each source [N, K]; fused:
    both in one [N, K, Q + 1], and each softmax's log-sum-exp [N, R]. Then 1 / rms of each mixture [N, R], keys [Q, d].
    """
    forward = fused_read if backend == "fused" else reference_read
    return forward(sources, pending, given, parameters, n_ahead, eps, backend)


@read_op.register_fake
def read_buffers(sources, pending, given, parameters, n_ahead, eps, backend):
    s, R, K, A = sources[0], len(parameters[0]), len(sources), int(parameters[3] is not None)
    N, d = s.shape
    work = torch.float64 if s.dtype == torch.float64 else torch.float32
    shapes = [(N, R, K), (N, K)] if backend == "reference" else [(N, K, R + A + 1), (N, R)]
    return [*(torch.empty_like(s) for _ in range(R + int(pending is not None) + A)), *[s.new_empty(N, dtype=work)] * A,
            *(s.new_empty(shape, dtype=work) for shape in (*shapes, (N, R), (R + A, d)))]


@torch.library.custom_op("depth_route::read_backward", mutates_args=())
def read_backward_op(sources: List[Tensor], running: List[Optional[Tensor]], needed: List[bool], dmix: List[Tensor],
                     dopened: List[Tensor], parameters: List[Optional[Tensor]], state: List[Tensor], n_ahead: int,
                     given: bool, backend: str) -> List[Tensor]:
    """Gradients of the five parameters, of given, then of the sources, each source's gradient from later reads
    (`running`) included; an empty tensor stands for one that is absent or not needed. dopened: the gradients of the
    opened mixture and log-sum-exp and the log-sum-exp itself, or nothing."""
    backward = fused_read_backward if backend == "fused" else reference_read_backward
    return backward(sources, running, needed, dmix, dopened, parameters, state, n_ahead, given, backend)


@read_backward_op.register_fake
def backward_buffers(sources, running, needed, dmix, dopened, parameters, state, n_ahead, given, backend):
    def like(x):
        return dmix[0].new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)

    return [*(like(x) for x in (*parameters, state[1][:, 0] if given else None)),
            *(like(s if want else None) for s, want in zip(sources, needed))]


# ---------------------------------------------------------------------------------------------------------
# The reference: what a student reads, and what the kernels are held to


def chunks(N: int, numbers_a_row: int, device) -> int:
    """Rows to take at a time: on a CPU as many as keep a chunk's fp32 numbers in the cores' caches, elsewhere all."""
    return N if device.type != "cpu" else min(N, 512, max(16, 600_000 // numbers_a_row // 16 * 16))


def inverse_rms(x: Tensor, eps: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1)
    return torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


def reference_read(sources, pending, given, parameters, n_ahead, eps, backend):
    queries, key_gain, out_gain = parameters[:3]
    with torch.autocast(sources[0].device.type, enabled=False):
        (N, d), K, R = sources[0].shape, len(sources), len(queries)
        out = read_buffers(sources, pending, given, parameters, n_ahead, eps, backend)
        mixtures, (scores, rms, rstd, w) = out[:R], out[R:]
        torch.mul(queries.to(w), key_gain.to(w), out=w)
        gain, eps = None if out_gain is None else out_gain.to(w), w.new_full((), eps)
        step = chunks(N, K * d, w.device)
        numbers, h = w.new_empty(K * step * d), w.new_empty(step, 1, d)
        a = 0
        for *s_in, in zip(*(x.split(step) for x in sources)):
            n = len(s_in[0])
            b = a + n
            s = numbers[:K * n * d].view(K, n, d)  # the sources of these rows, fp32
            for x, y in zip(s.unbind(0), s_in):
                x.copy_(y)
            inv = inverse_rms(s, eps)  # [K, n]
            rms[a:b] = inv.t()
            for r in range(R):  # each query on its own: its numbers must not depend on who shares the pass
                e = scores[a:b, r].copy_(torch.mv(s.view(K * n, d), w[r]).view(K, n).mul_(inv).t())
                alpha = e.softmax(-1)
                y = torch.bmm(alpha[:, None], s.transpose(0, 1), out=h[:n]).view(n, d)
                if gain is not None:
                    y.mul_(rstd[a:b, r].copy_(inverse_rms(y, eps))[:, None]).mul_(gain)
                mixtures[r][a:b].copy_(y)
            a = b
        return out


def reference_read_backward(sources, running, needed, dmix, dopened, parameters, state, n_ahead, given, backend):
    out = backward_buffers(sources, running, needed, dmix, dopened, parameters, state, n_ahead, given, backend)
    (queries, key_gain, out_gain), (scores, rms, rstd, w) = parameters[:3], state
    with torch.autocast(w.device.type, enabled=False):
        (N, d), K, R, some = sources[0].shape, len(sources), len(queries), any(needed)
        gain = None if out_gain is None else out_gain.to(w)
        dw, dgain = torch.zeros_like(w), w.new_zeros(d)
        step = chunks(N, (K + 2 * R) * d // 2, w.device)
        numbers, sums = w.new_empty((K + 2 * R) * step * d), w.new_empty(step, K, d)
        h, dyh, ones = w.new_empty(step, 1, d), w.new_empty(step, d), w.new_ones(step)

        alphas = scores.softmax(-1)  # [N, R, K]
        pull = scores * (rms * rms / d)[:, None]
        # a source's gradient is a sum over sources, mixtures' gradients and keys: mix[n, k] holds its coefficients
        mix = w.new_zeros(N, K, K + 2 * R)
        mix[:, :, K:K + R] = alphas.transpose(1, 2)
        own = mix[:, :, :K].diagonal(dim1=1, dim2=2)
        for a in range(0, N, step):
            b = min(a + step, N)
            n = b - a
            all = numbers[:(K + 2 * R) * n * d].view(K + 2 * R, n, d)
            s, dh, by_row = all[:K], all[K:K + R], all.transpose(0, 1)
            for x, y in zip(all.unbind(0), (*sources, *dmix)):
                x.copy_(y[a:b])
            alpha = alphas[a:b]
            for r in range(R if gain is not None else 0):  # through the norm: y = gain * h / rms(h)
                inv = rstd[a:b, r, None]
                y = torch.bmm(alpha[:, r:r + 1], by_row[:, :K], out=h[:n]).view(n, d).mul_(inv)
                torch.mul(dh[r], y, out=dyh[:n])
                dgain.addmv_(dyh[:n].t(), ones[:n])
                along = torch.mv(dyh[:n], gain / d)
                dh[r].mul_(gain).addcmul_(y, along[:, None], value=-1).mul_(inv)
            dalpha = torch.bmm(by_row[:, K:K + R], by_row[:, :K].transpose(1, 2))  # [n, R, K]
            mean = (alpha * dalpha).sum(-1, keepdim=True)
            de = alpha * (dalpha - mean)
            dekey = de * rms[a:b, None]
            dw.addmm_(dekey.permute(1, 2, 0).reshape(R, K * n), s.view(K * n, d))
            if some:
                all[K + R:] = w[:, None]
                own[a:b] = (de * pull[a:b]).sum(1).neg_()
                mix[a:b, :, K + R:] = dekey.transpose(1, 2)
                ds = sums[:n]
                for x, y in zip(ds.unbind(1), running):
                    x.zero_() if y is None else x.copy_(y[a:b])
                ds.baddbmm_(mix[a:b], by_row)
                for x, y, want in zip(ds.unbind(1), out[6:], needed):
                    if want:
                        y[a:b].copy_(x)
        out[0].copy_(dw * key_gain)
        out[1].copy_((dw * queries).sum(0))
        if gain is not None:
            out[2].copy_(dgain)
        return out


# ---------------------------------------------------------------------------------------------------------
# Launches

GROUP = 8  # sources held in registers at once: up to so many are known when a kernel is compiled, more go in groups
BACKWARD_GROUP = 4  # of a backward whose sources go in groups: with 8 it would spill at M, and be slower by a tenth
PROGRAMS_PER_SM = 4  # in a backward: as many as the registers hold at once, for each adds to what is summed after
# fused multiply-add, whose default is about to change; every register, since with fewer some kernels would spill
OPTIONS = {"enable_fp_fusion": True, "maxnreg": 255}


def warps_for(d: int, numbers: int) -> int:
    """Warps a row with at most `numbers` of its columns a lane. By width alone: a query's bits must not depend on how
    many share its pass, nor a run's on what a tuner timed."""
    return triton.next_power_of_2(triton.cdiv(d, 32 * numbers))


def programs(N: int, per_sm: int, device) -> int:
    """How many programs share the rows: fixed per device, as the last bits of sums over rows depend on it."""
    cuda = device.type == "cuda"
    most = per_sm * torch.cuda.get_device_properties(device).multi_processor_count if cuda else 3
    return max(1, min(most, N))


def launch(kernel, grid, device, *args, **constants):
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*args, **constants, **OPTIONS)


def offsets(device, *lists):
    """For more than GROUP sources: where each tensor of `lists` lies, in elements from the first source, int64 [lists,
    sources]; and whether all keep the first one's alignment."""
    first, size = lists[0][0].data_ptr(), lists[0][0].element_size()
    table = [[(t.data_ptr() - first) // size for t in tensors] for tensors in lists]
    aligned = all(offset % 16 == 0 for row in table for offset in row)
    table = torch.tensor(table, dtype=torch.int64, pin_memory=device.type == "cuda")
    return table.to(device, non_blocking=True), 16 if aligned else 1


def fused_read(sources, pending, given, parameters, n_ahead, eps, backend):
    out = read_buffers(sources, pending, given, parameters, n_ahead, eps, backend)
    parameters = [p if p is None else p.contiguous() for p in parameters]
    (N, d), K, R, device = sources[0].shape, len(sources), len(parameters[0]), sources[0].device
    P, A = int(pending is not None), int(parameters[3] is not None)
    opened = out[R + P:R + P + 2] if A else (None, None)
    old, src, once, table, align = None, (*sources[:K - P], *out[R:R + P]), K <= GROUP, None, 1
    if once and P:
        old = sources[-1]
    elif not once:
        if P:
            torch.add(sources[-1], pending, out=out[R])
            pending = None
        table, align = offsets(device, [*src, *[src[0]] * (-K % GROUP)])
    num_warps = warps_for(d, 20)
    launch(read_kernel, (programs(N, 16, device),), device, src if once else src[:1], table, old, pending, given,
           *parameters, tuple(out[:R]), *opened, *out[-4:], N, K, n_ahead, eps, d=d, R=R, AHEAD=A,
           PENDING=int(pending is not None), GIVEN=int(given is not None), NORM=int(parameters[2] is not None),
           G=min(K, GROUP), ONCE=once, ALIGN=align, LANES=32 * num_warps, num_warps=num_warps)
    return out


def fused_read_backward(sources, running, needed, dmix, dopened, parameters, state, n_ahead, given, backend):
    out = backward_buffers(sources, running, needed, dmix, dopened, parameters, state, n_ahead, given, backend)
    *dparameters, dgiven = (g if g.numel() else None for g in out[:6])
    ds = [g if want else None for g, want in zip(out[6:], needed)]
    (N, d), K, R, device = sources[0].shape, len(sources), len(parameters[0]), sources[0].device
    A, norm, once = len(dopened) // 3, int(parameters[2] is not None), K <= GROUP
    group = K if once else BACKWARD_GROUP
    if not A:  # what was opened and never closed has no gradient
        for g in out[3:5]:
            g.zero_()
        parameters, dparameters = [*parameters[:3], None, None], [*dparameters[:3], None, None]
    scores, lse, rstd, keys = state
    P = programs(N, PROGRAMS_PER_SM, device)
    parts = torch.empty(P, R + A + 1, d, dtype=torch.float32, device=device)
    run, want = (sum(1 << i for i, g in enumerate(gs) if g is not None) for gs in (running, ds))
    table, align, pointers = None, 1, [tuple(s if g is None else g for s, g in zip(sources, gs))
                                       for gs in (sources, running, ds)]
    if not once:  # absent running gradients are zeros, and gradients that nobody wants are written and dropped
        zero, drop, pad = torch.zeros_like(sources[0]), torch.empty_like(sources[0]), [None] * (-K % group)
        lists = [[filler if t is None else t for t in (*ts, *pad)]
                 for ts, filler in ((sources, sources[0]), (running, zero), (ds, drop))]
        table, align = offsets(device, *lists)
        pointers, run, want = [p[:1] for p in pointers], 2 ** group - 1, 2 ** group - 1
    num_warps = warps_for(d, 13)
    launch(read_backward_kernel, (P,), device, *pointers, table, tuple(dmix), *(dopened or (None,) * 3), dgiven, keys,
           parameters[2], scores, lse, rstd, parts, N, K, n_ahead, d=d, R=R, AHEAD=A, STORED=scores.shape[2],
           GIVEN=int(given), NORM=norm, G=group, ONCE=once, ALIGN=align, RUN=run, WANT=want,
           LANES=32 * num_warps, num_warps=num_warps)
    parameters = [p if p is None else p.contiguous() for p in parameters]
    launch(finish_kernel, (-(-d // 16),), device, parts, *parameters[:2], *parameters[3:], *dparameters, P,
           d=d, R=R, AHEAD=A, NORM=norm, ROWS=128, BLOCK=16, num_warps=4)
    return out


# ---------------------------------------------------------------------------------------------------------
# Kernels. A row of width d lies on LANES lanes (32 a warp), V numbers each, in chunks [LANES, 8], ... [LANES, 8] and
# what is left of V in [LANES, 4], [LANES, 2], [LANES, 1]: no column is wasted where LANES divides d, and a lane's
# loads are wide. A row is a tuple of such chunks, and a program walks over many rows.

if triton is not None:
    @triton.constexpr_function
    def numbers(d, LANES):
        return (d + LANES - 1) // LANES

    @triton.constexpr_function
    def chunk_sizes(d, LANES):
        V = numbers(d, LANES)
        return [8] * (V // 8) + [n for n in (4, 2, 1) if V & n]

    @triton.constexpr_function
    def chunk_count(d, LANES):
        return len(chunk_sizes(d, LANES))

    @triton.constexpr_function
    def chunk_start(c, d, LANES):
        return sum(chunk_sizes(d, LANES)[:c]) * LANES

    @triton.constexpr_function
    def chunk_size(c, d, LANES):
        return chunk_sizes(d, LANES)[c]

    @triton.jit
    def columns(c: tl.constexpr, d: tl.constexpr, LANES: tl.constexpr):
        W: tl.constexpr = chunk_size(c, d, LANES)
        START: tl.constexpr = chunk_start(c, d, LANES)
        return START + tl.arange(0, LANES)[:, None] * W + tl.arange(0, W)[None, :]

    @triton.jit
    def load(pointer, c: tl.constexpr, d: tl.constexpr, LANES: tl.constexpr):
        col = columns(c, d, LANES)
        if d % LANES == 0:
            return tl.load(pointer + col)
        else:
            return tl.load(pointer + col, mask=col < d, other=0.0)

    @triton.jit
    def store(pointer, x, c: tl.constexpr, d: tl.constexpr, LANES: tl.constexpr):
        col = columns(c, d, LANES)
        if d % LANES == 0:
            tl.store(pointer + col, x.to(pointer.dtype.element_ty))
        else:
            tl.store(pointer + col, x.to(pointer.dtype.element_ty), mask=col < d)

    @triton.jit
    def load_row(pointer, d: tl.constexpr, LANES: tl.constexpr):
        out = ()
        for c in tl.static_range(chunk_count(d, LANES)):
            out = out + (load(pointer, c, d, LANES),)
        return out

    @triton.jit
    def zero_row(d: tl.constexpr, LANES: tl.constexpr):
        out = ()
        for c in tl.static_range(chunk_count(d, LANES)):
            out = out + (tl.zeros([LANES, chunk_size(c, d, LANES)], tl.float32),)
        return out

    @triton.jit
    def dot(x, y, d: tl.constexpr, LANES: tl.constexpr):
        """The sum over columns of x y, both rows in any dtype: chunks of 8 add up lane by lane before lanes do."""
        FULL: tl.constexpr = numbers(d, LANES) // 8
        if FULL > 0:
            products = x[0].to(tl.float32) * y[0].to(tl.float32)
            for c in tl.static_range(1, FULL):
                products += x[c].to(tl.float32) * y[c].to(tl.float32)
            total = tl.sum(products, axis=1)
        else:
            total = tl.zeros([LANES], tl.float32)
        for c in tl.static_range(FULL, chunk_count(d, LANES)):
            total += tl.sum(x[c].to(tl.float32) * y[c].to(tl.float32), axis=1)
        return tl.sum(total, axis=0)

    @triton.jit
    def plus(h, a, x, d: tl.constexpr, LANES: tl.constexpr):
        """The row h + a x."""
        out = ()
        for c in tl.static_range(chunk_count(d, LANES)):
            out = out + (h[c] + a * x[c].to(tl.float32),)
        return out

    @triton.jit
    def address(pointers, table, i, j: tl.constexpr, ONCE: tl.constexpr, ALIGN: tl.constexpr):
        """Of tensor j of a group that starts at i."""
        if ONCE:
            return pointers[j]
        else:
            return pointers[0] + tl.multiple_of(tl.load(table + i + j), ALIGN)

    @triton.jit
    def load_group(src, table, i, row, d: tl.constexpr, G: tl.constexpr, ONCE: tl.constexpr, ALIGN: tl.constexpr,
                   LANES: tl.constexpr):
        out = ()
        for j in tl.static_range(G):
            out = out + (load_row(address(src, table, i, j, ONCE, ALIGN) + row * d, d, LANES),)
        return out

    @triton.jit
    def add_group(h, top, total, raw, w, given, state, i, row, K, n_ahead, eps, d: tl.constexpr, R: tl.constexpr,
                  Q: tl.constexpr, GIVEN: tl.constexpr, G: tl.constexpr, ONCE: tl.constexpr, LANES: tl.constexpr):
        """Sources i to i + G into each query's mixture, which stays to be divided by its sum of exponentials."""
        scores = ()
        for j in tl.static_range(G):
            at = state + (row * K + i + j) * (Q + 1)
            if GIVEN and j == 0:  # an opened mixture: it comes with its score, which no key takes part in
                inv = 0.0
            else:
                inv = tl.rsqrt(dot(raw[j], raw[j], d, LANES) / d + eps)
            tl.store(at + Q, inv, mask=i + j < K)
            for q in tl.static_range(Q):
                if GIVEN and j == 0:
                    e = tl.load(given + row)
                else:
                    e = dot(raw[j], w[q], d, LANES) * inv
                tl.store(at + q, e, mask=i + j < K)
                scores = scores + (tl.where(i + j < (K if q < R else n_ahead), e, float("-inf")),)
        new_h, new_top, new_total = (), (), ()
        for q in tl.static_range(Q):
            m = top[q]
            for j in tl.static_range(G):
                m = tl.maximum(m, scores[j * Q + q])
            hq, sum = h[q], total[q]
            if not ONCE:
                fade = tl.exp(top[q] - m)
                sum = sum * fade
                hq = plus(zero_row(d, LANES), fade, hq, d, LANES)
            for j in tl.static_range(G):
                p = tl.exp(scores[j * Q + q] - m)
                sum += p
                hq = plus(hq, p, raw[j], d, LANES)
            new_h, new_top, new_total = new_h + (hq,), new_top + (m,), new_total + (sum,)
        return new_h, new_top, new_total

    @triton.jit(do_not_specialize=["N", "K", "n_ahead"])
    def read_kernel(src, table, old, pending, given, queries, key_gain, out_gain, ahead, ahead_gain, mixtures, opened,
                    opened_lse, state, lse, rstd, keys, N, K, n_ahead, eps,
                    d: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr, PENDING: tl.constexpr, GIVEN: tl.constexpr,
                    NORM: tl.constexpr, G: tl.constexpr, ONCE: tl.constexpr, ALIGN: tl.constexpr,
                    LANES: tl.constexpr):
        Q: tl.constexpr = R + AHEAD  # scored here: R queries to be closed, then the one only opened
        C: tl.constexpr = chunk_count(d, LANES)
        w, zeros, lows, nothing = (), (), (), ()
        for q in tl.static_range(Q):
            key = ()
            for c in tl.static_range(C):
                x = load(queries + q * d if q < R else ahead, c, d, LANES).to(tl.float32)
                x *= load(key_gain if q < R else ahead_gain, c, d, LANES).to(tl.float32)
                if tl.program_id(0) == 0:
                    store(keys + q * d, x, c, d, LANES)  # once, for the backward
                key = key + (x,)
            w, zeros = w + (key,), zeros + (zero_row(d, LANES),)
            lows, nothing = lows + (float("-inf"),), nothing + (0.0,)
        for row32 in range(tl.program_id(0), N, tl.num_programs(0)):
            row = tl.cast(row32, tl.int64)  # offsets pass 2^31 elements
            h, top, total = zeros, lows, nothing
            if ONCE:  # K is G then, and known when this is compiled
                raw = load_group(src, table, 0, row, d, G - PENDING, ONCE, ALIGN, LANES)
                if PENDING:  # the addition that the last write left to this pass, rounded as torch rounds it
                    fresh = ()
                    for c in tl.static_range(C):
                        before = load(old + row * d, c, d, LANES).to(tl.float32)
                        after = before + load(pending + row * d, c, d, LANES).to(tl.float32)
                        fresh = fresh + (after.to(old.dtype.element_ty),)
                        store(src[G - 1] + row * d, fresh[c], c, d, LANES)
                    raw = raw + (fresh,)
                h, top, total = add_group(h, top, total, raw, w, given, state, 0, row, G, n_ahead, eps, d, R, Q,
                                          GIVEN, G, ONCE, LANES)
            else:
                top, total = (), ()
                for q in tl.static_range(Q):
                    top, total = top + (eps * 0 - float("inf"),), total + (eps * 0,)
                for i in range(0, K, G):
                    raw = load_group(src, table, i, row, d, G, ONCE, ALIGN, LANES)
                    h, top, total = add_group(h, top, total, raw, w, given, state, i, row, K, n_ahead, eps, d, R, Q,
                                              GIVEN, G, ONCE, LANES)
            for q in tl.static_range(Q):
                tl.store(lse + row * R + q if q < R else opened_lse + row, top[q] + tl.log(total[q]))
                scale = 1.0 / total[q]
                if NORM and q < R:
                    inv = tl.rsqrt(dot(h[q], h[q], d, LANES) * (scale * scale) / d + eps)
                    tl.store(rstd + row * R + q, inv)
                    scale *= inv
                for c in tl.static_range(C):
                    y = h[q][c] * scale
                    if NORM and q < R:
                        y *= load(out_gain, c, d, LANES).to(tl.float32)
                    store((mixtures[q] if q < R else opened) + row * d, y, c, d, LANES)

    @triton.jit
    def load_weights(state, norm, i, row, K, n_ahead, R: tl.constexpr, Q: tl.constexpr, STORED: tl.constexpr,
                     G: tl.constexpr):
        """The weights of sources i to i + G, those of one source together."""
        alpha = ()
        for j in tl.static_range(G):
            for q in tl.static_range(Q):
                x = tl.load(state + (row * K + i + j) * STORED + q, mask=i + j < K, other=0.0)
                alpha = alpha + (tl.where(i + j < (K if q < R else n_ahead), tl.exp(x - norm[q]), 0.0),)
        return alpha

    @triton.jit
    def mix(h, alpha, raw, d: tl.constexpr, Q: tl.constexpr, G: tl.constexpr, LANES: tl.constexpr):
        out = ()
        for q in tl.static_range(Q):
            hq = h[q]
            for j in tl.static_range(G):
                hq = plus(hq, alpha[j * Q + q], raw[j], d, LANES)
            out = out + (hq,)
        return out

    @triton.jit
    def group_backward(dw, raw, alpha, dh, mean, running, dsrc, table, dlse, dgiven, keys, state, i, row, K,
                       n_ahead, d: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, STORED: tl.constexpr,
                       GIVEN: tl.constexpr, G: tl.constexpr, ONCE: tl.constexpr, ALIGN: tl.constexpr,
                       RUN: tl.constexpr, WANT: tl.constexpr, LANES: tl.constexpr):
        """Gradients of sources i to i + G; returns dw, chunk by chunk and query by query, with their share added."""
        de, pull = (), ()
        for j in tl.static_range(G):
            inv = tl.load(state + (row * K + i + j) * STORED + STORED - 1, mask=i + j < K, other=0.0)
            p = 0.0
            for q in tl.static_range(Q):
                x = alpha[j * Q + q] * (dot(dh[q], raw[j], d, LANES) - mean[q])
                x = tl.where((K if q < R else n_ahead) == 1, 0.0, x)  # exactly: a single source's weight is 1
                if q == R:
                    x += alpha[j * Q + q] * tl.load(dlse + row)
                if GIVEN and j == 0:
                    tl.store(dgiven + row, x)
                x *= inv
                # loaded again rather than kept in registers; the policy keeps the two loads from being merged
                p += x * tl.load(state + (row * K + i + j) * STORED + q, mask=i + j < K, other=0.0,
                                 eviction_policy="evict_last")
                de = de + (x,)
            pull = pull + (p * inv / d,)
        span = tl.cdiv(K, G) * G
        sums = ()
        for c in tl.static_range(chunk_count(d, LANES)):
            w, sum = (), dw[c]
            for q in tl.static_range(Q):
                w = w + (load(keys + q * d, c, d, LANES),)
            for j in tl.static_range(G):
                s = raw[j][c].to(tl.float32)
                ds = -pull[j] * s
                if RUN >> j & 1:
                    run = address(running, table, span + i, j, ONCE, ALIGN)
                    ds += load(run + row * d, c, d, LANES).to(tl.float32)
                new = ()
                for q in tl.static_range(Q):
                    ds += alpha[j * Q + q] * dh[q][c]
                    ds += de[j * Q + q] * w[q]
                    new = new + (sum[q] + de[j * Q + q] * s,)
                sum = new
                if WANT >> j & 1:
                    store(address(dsrc, table, 2 * span + i, j, ONCE, ALIGN) + row * d, ds, c, d, LANES)
            sums = sums + (sum,)
        return sums

    @triton.jit(do_not_specialize=["N", "K", "n_ahead"])
    def read_backward_kernel(src, running, dsrc, table, dmix, dopened, dlse, opened_lse, dgiven, keys, out_gain, state,
                             lse, rstd, parts, N, K, n_ahead,
                             d: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr, STORED: tl.constexpr,
                             GIVEN: tl.constexpr, NORM: tl.constexpr, G: tl.constexpr, ONCE: tl.constexpr,
                             ALIGN: tl.constexpr, RUN: tl.constexpr, WANT: tl.constexpr, LANES: tl.constexpr):
        Q: tl.constexpr = R + AHEAD
        C: tl.constexpr = chunk_count(d, LANES)
        dw, dgain, zeros = (), zero_row(d, LANES), ()
        for c in tl.static_range(C):
            sums = ()
            for q in tl.static_range(Q):
                sums = sums + (tl.zeros([LANES, chunk_size(c, d, LANES)], tl.float32),)
            dw = dw + (sums,)
        for q in tl.static_range(Q):
            zeros = zeros + (zero_row(d, LANES),)
        for row32 in range(tl.program_id(0), N, tl.num_programs(0)):
            row = tl.cast(row32, tl.int64)
            norm = ()
            for q in tl.static_range(Q):
                norm = norm + (tl.load(lse + row * R + q if q < R else opened_lse + row),)

            # the mixtures again; then the gradient of each, and the weighted mean over sources of <dh, source>
            h = zeros
            if ONCE:
                raw = load_group(src, table, 0, row, d, G, ONCE, ALIGN, LANES)
                alpha = load_weights(state, norm, 0, row, G, n_ahead, R, Q, STORED, G)
                h = mix(h, alpha, raw, d, Q, G, LANES)
            else:
                for i in range(0, K, G):
                    group = load_group(src, table, i, row, d, G, ONCE, ALIGN, LANES)
                    seen = load_weights(state, norm, i, row, K, n_ahead, R, Q, STORED, G)
                    h = mix(h, seen, group, d, Q, G, LANES)
            dh, mean = (), ()
            for q in tl.static_range(Q):
                g = plus(zero_row(d, LANES), 1.0, load_row((dmix[q] if q < R else dopened) + row * d, d, LANES), d,
                         LANES)
                if NORM and q < R:
                    rms = tl.load(rstd + row * R + q)
                    gained, scaled = (), ()
                    for c in tl.static_range(C):
                        scaled = scaled + (dgain[c] + g[c] * rms * h[q][c],)
                        gained = gained + (g[c] * load(out_gain, c, d, LANES).to(tl.float32) * rms,)
                    dgain = scaled
                    g = plus(gained, -dot(gained, h[q], d, LANES) * rms * rms / d, h[q], d, LANES)
                dh, mean = dh + (g,), mean + (dot(g, h[q], d, LANES),)

            if ONCE:
                dw = group_backward(dw, raw, alpha, dh, mean, running, dsrc, table, dlse, dgiven, keys, state, 0,
                                    row, G, n_ahead, d, R, Q, STORED, GIVEN, G, ONCE, ALIGN, RUN, WANT, LANES)
            else:
                for i in range(0, K, G):
                    group = load_group(src, table, i, row, d, G, ONCE, ALIGN, LANES)
                    weights = load_weights(state, norm, i, row, K, n_ahead, R, Q, STORED, G)
                    dw = group_backward(dw, group, weights, dh, mean, src, src, table, dlse, dgiven, keys,
                                        state, i, row, K, n_ahead, d, R, Q, STORED, GIVEN, G, ONCE, ALIGN, RUN, WANT,
                                        LANES)
        out = parts + tl.program_id(0) * (Q + 1) * d  # this program's share of the sums over rows
        for c in tl.static_range(C):
            for q in tl.static_range(Q):
                store(out + q * d, dw[c][q], c, d, LANES)
            store(out + Q * d, dgain[c], c, d, LANES)

    @triton.jit(do_not_specialize=["P"])
    def finish_kernel(parts, queries, key_gain, ahead, ahead_gain, dqueries, dkey, dgain, dahead, dahead_gain, P,
                      d: tl.constexpr, R: tl.constexpr, AHEAD: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
                      BLOCK: tl.constexpr):
        """The P programs' shares summed in a fixed order: gradients of queries and gains. The loads of a round do not
        wait for one another."""
        S: tl.constexpr = R + AHEAD + 1
        col = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        within = col < d
        totals = ()
        for q in tl.static_range(S):
            totals = totals + (tl.zeros([ROWS, BLOCK], tl.float32),)
        for p in range(0, P, ROWS):
            share, new = p + tl.arange(0, ROWS)[:, None], ()
            for q in tl.static_range(S):
                new = new + (totals[q] + tl.load(parts + (share * S + q) * d + col[None, :],
                                                 mask=(share < P) & within[None, :], other=0.0),)
            totals = new
        gain, key = tl.load(key_gain + col, mask=within).to(tl.float32), tl.zeros([BLOCK], tl.float32)
        for q in tl.static_range(R):
            total = tl.sum(totals[q], axis=0)
            key += total * tl.load(queries + q * d + col, mask=within).to(tl.float32)
            tl.store(dqueries + q * d + col, (total * gain).to(dqueries.dtype.element_ty), mask=within)
        tl.store(dkey + col, key.to(dkey.dtype.element_ty), mask=within)
        if AHEAD:
            total = tl.sum(totals[R], axis=0)
            query = total * tl.load(ahead_gain + col, mask=within).to(tl.float32)
            tl.store(dahead + col, query.to(dahead.dtype.element_ty), mask=within)
            key = total * tl.load(ahead + col, mask=within).to(tl.float32)
            tl.store(dahead_gain + col, key.to(dahead_gain.dtype.element_ty), mask=within)
        if NORM:
            tl.store(dgain + col, tl.sum(totals[S - 1], axis=0).to(dgain.dtype.element_ty), mask=within)


# ---------------------------------------------------------------------------------------------------------
# python route_kernel.py


def written_route(sources, queries, key_gain, out_gain, eps=1e-6):
    """The read as its equations stand, under autograd: in float64, what everything above is checked against."""
    scores = [(s @ (queries * key_gain).t()) * torch.rsqrt(s.square().mean(-1, keepdim=True) + eps) for s in sources]
    alpha = torch.stack(scores).softmax(0)  # [K, N, R]
    mixtures = [sum(a[..., r, None] * s for a, s in zip(alpha, sources)) for r in range(len(queries))]
    return tuple(h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * out_gain for h in mixtures)


def example(N, d, K, R, dtype, device, seed=0):
    """One read's [queries, key_gain, out_gain, *sources], and upstream gradients of its mixtures."""
    g = torch.Generator().manual_seed(seed)
    shapes = [(R, d), (d,), (d,), *[(N, d)] * K, *[(N, d)] * R]
    drawn = [torch.randn(shape, generator=g) for shape in shapes]
    drawn[0] *= d ** -0.5
    drawn = [x.to(device, torch.float32 if i < 3 else dtype).requires_grad_(i < 3 + K) for i, x in enumerate(drawn)]
    return drawn[:3 + K], drawn[3 + K:]


def differences(backend, N, d, K, R, dtype, device):
    """Relative errors against float64 autograd: the worst of the mixtures, and of the gradients."""
    inputs, up = example(N, d, K, R, dtype, device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, want = route(inputs[3:], *inputs[:3], backend=backend), written_route(exact[3:], *exact[:3])
    grads, wanted = torch.autograd.grad(out, inputs, up), torch.autograd.grad(want, exact, [u.double() for u in up])

    def worst(got, want):
        return max(((a.double() - b).norm() / (b.norm() if b.norm() > 0 else 1)).item() for a, b in zip(got, want))

    return worst(out, want), worst(grads, wanted)


def check_numbers(shapes, dtypes, device) -> bool:
    print("\nrelative error against float64: mixtures, worst gradient\n"
          "width  K  R    dtype    fused             reference")
    good = True
    for N, d, K, R in shapes:
        for dtype in dtypes:
            fused, plain = (differences(b, N, d, K, R, dtype, device) for b in ("fused", "reference"))
            # in fp32 a bound; in bf16 one final rounding (relative 2^-9) more than the reference has
            fine = max(fused) < 1e-5 if dtype == torch.float32 else all(f < p + 2 ** -9 for f, p in zip(fused, plain))
            good &= fine
            print(f"{d:5} {K:2} {R:2} {str(dtype)[6:]:>8}", *(f"  {a:.1e} {b:.1e}" for a, b in (fused, plain)),
                  "" if fine else "  <- too far", flush=True)
    return good


def timed(calls, repeats=5) -> float:
    """Seconds a call, running through `calls` (each on memory of its own) in turn; the median of `repeats` rounds."""
    seconds = []
    for _ in range(repeats + 1):  # the first round warms up
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return sorted(seconds[1:])[repeats // 2]


def show_times(rows: int, working_set: int = 512 * 2 ** 20, device="cuda", widths=(576, 832), most=7) -> None:
    """Reads of S and M shape against a device copy, each over `working_set` bytes, so that no cache serves twice."""
    print(f"\n{torch.cuda.get_device_name()}: {rows:,} rows, bf16, norm fused, gradients running; GB/s of what a read "
          "has to move\nwidth  K  R  pass           us    GB/s  of copy  torch.compile of the written form, us")
    compiled = torch.compile(lambda sources, *parameters: [
        h.bfloat16() for h in written_route([s.float() for s in sources], *parameters)], dynamic=False)
    for d in widths:
        unit = rows * d * 2
        sets = range(max(2, working_set // (2 * unit) + 1))
        pairs = [[torch.zeros(rows, d, device=device, dtype=torch.bfloat16) for _ in range(2)] for _ in sets]
        copy = 2 * unit / timed([lambda a=a, b=b: b.copy_(a) for a, b in pairs])
        print(f"{d:5}        copy   {2 * unit / copy * 1e6:9.1f} {copy / 1e9:7,.0f}")
        del pairs
        for K, R in ((K, R) for K in range(2, most + 1) for R in (1, 2)):
            torch._dynamo.reset()  # every shape compiles anew: past the recompile limit it would run eagerly
            calls = {name: [] for name in ("forward", "backward", "compiled forward", "compiled backward")}
            for seed in range(max(2, working_set // ((3 * K + 2 * R) * unit) + 1)):
                inputs, up = example(rows, d, K, R, torch.bfloat16, device, seed)
                parameters, sources = inputs[:3], inputs[3:]
                run = [torch.zeros_like(s) for s in sources]
                for prefix, call in (("", lambda s=sources, p=parameters: read(s, *p, 1e-6, "fused")),
                                     ("compiled ", lambda s=sources, p=parameters: compiled(s, *p))):
                    out, up_all = call(), up
                    if not prefix:
                        out, up_all = (*out.mixtures, *out.sources), (*up, *run)
                    calls[prefix + "forward"].append(call)
                    calls[prefix + "backward"].append(lambda out=out, x=inputs, up=up_all: torch.autograd.grad(
                        out, x, up, retain_graph=True))
            for name, units in (("forward", K + R), ("backward", 3 * K + R)):
                fused, plain = timed(calls[name]), timed(calls["compiled " + name])
                speed = units * unit / fused
                print(f"{d:5} {K:2} {R:2}  {name:8} {fused * 1e6:8.1f} {speed / 1e9:7,.0f} {speed / copy:8.0%} "
                      f"{plain * 1e6:8.1f}", flush=True)


def check_here() -> bool:
    """The kernels against float64 on whatever this machine has; times too, on a GPU."""
    if torch.cuda.is_available():
        print("%s: %s" % choose_backend("fused", "cuda"))
        shapes = [(4096, d, K, R) for d in (576, 832) for K in (1, 2, 5, 9) for R in (1, 2, 3)]
        return check_numbers(shapes, (torch.float32, torch.bfloat16), "cuda")
    if INTERPRETED:
        return check_numbers([(5, d, K, R) for d in (24, 576) for K in (1, 2, 5, 9) for R in (1, 3)],
                             (torch.float32,), "cpu")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") == ""
    print("no GPU is visible here" + (': CUDA_VISIBLE_DEVICES is set to "", which hides them' if hidden else "") +
          "; the kernels run in Triton's interpreter")
    interpreter = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([sys.executable, __file__], env=interpreter).returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=8192, help="token rows of the timed reads (%(default)s)")
    rows = parser.parse_args().rows
    if rows < 1:
        parser.error(f"--rows={rows}: want at least 1")
    if triton is None:
        parser.error("triton is not installed (pip install triton; Linux only), so there is no kernel to check")
    try:
        good = check_here()
    except ValueError as e:
        parser.error(str(e))
    if good and torch.cuda.is_available():
        show_times(rows)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
