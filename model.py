"""The whole model: a Pre-Norm decoder whose sub-layers read a learned mixture over depth, and its arms.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig.from_scale("S", "rd"))     # logits = model(idx); _, loss = model(idx, targets)
    python model.py                                  # the arms and their exact parameter counts

An ablation of your own is one entry in ARMS, plus the few lines that are its idea. The command line of train.py,
the tests, the pairing and the statistics take it from there.

Dimension letters: B batch, T tokens of context, N = B * T, d width, L layers, H heads, V vocabulary,
K sources of a read, R reads made in one pass.
"""
from __future__ import annotations

import dataclasses
import hashlib
import math
import typing
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from prepare import BadInput, did_you_mean
from route_kernel import Depth, choose_backend, inverse_rms

# ---------------------------------------------------------------------------------------------------------
# Reading depth: `read` hands a sub-layer its normalised input, `write` takes its output, blocks end with `finish_block`


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where it is wider."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [..., d] of any float dtype, gain [d] or None: RMSNorm computed in float32, returned in x's dtype."""
    return F.rms_norm(wide(x), x.shape[-1:], gain, eps).to(x.dtype)


def lean(function, *args):
    """function(*args), out of autocast; for the backward it keeps `args` alone and computes again what lies between.
    Mixing over depth keeps K sources by reference this way, where its intermediates would be K float32 copies a read."""
    with torch.autocast(args[-1].device.type, enabled=False):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def weighted_sum(weights: torch.Tensor, sources: typing.Sequence[torch.Tensor]) -> torch.Tensor:
    """sum_i weights[..., i] * sources[i] in float32: weights [..., K], each source [..., d]."""
    return sum(w[..., None] * wide(s) for w, s in zip(weights.unbind(-1), sources))


def keep_weights(record: list | None, weights: torch.Tensor) -> None:
    """Append weights [..., R, K] to `record` as [R, K, N]."""
    if record is not None:
        record.append(weights.detach().flatten(0, -3).permute(1, 2, 0))


class Mixer(nn.Module):
    """Parameters of one sub-layer that mix over depth. Called, it gives the first two arguments of its depth's `read`.

    They do not enter the pairing of starting weights, and none is decayed, one rule for all arms (MUDDFormer's release
    decays all of its, mHC-lite's every tensor of two or more dimensions). A mixer sets its own starting values, all but
    those in `random`, which are drawn like any matrix, with that deviation."""

    random: dict[str, float] = {}
    names: tuple[str, ...] = ()  # of the R mixtures whose weights a pass records

    def __init__(self, c: "GPTConfig", arm: "Arm", k: int, feeds: tuple[str, ...]):
        """k: the sub-layer, 2l for layer l's attention, 2l + 1 for its MLP, 2L for the output. feeds: its reads."""
        super().__init__()
        self.eps, self.feeds = c.eps, feeds
        self.start(c, arm, k, feeds)

    def forward(self):
        return self, None


class Read(Mixer):
    """The parameters of one depth read: R zero-initialised queries, named by what they feed, one key-norm gain. Called, it
    gives (queries [R, d], key gain [d]) in float32; with nothing to feed, as in `plain`, (None, None)."""

    def start(self, c, arm, k, feeds):
        feeds = feeds if arm.reads and (arm.depth.ends or 0 < k < 2 * c.n_layer) else ()
        width = min(arm.rank or c.n_embd, c.n_embd)
        self.names = feeds if arm.heads == 1 else tuple(f"{f}{i}" for f in feeds for i in range(arm.heads))
        self.query = nn.ParameterDict()
        for f in feeds:  # one by one: a ParameterDict that is given a dict sorts its keys, and rows go by this order
            self.query[f] = nn.Parameter(torch.zeros(width), requires_grad=f not in arm.frozen)
        self.key_gain = nn.Parameter(torch.ones(width)) if feeds and not arm.rank else None

    def forward(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (torch.stack(list(self.query.values())), self.key_gain) if self.query else (None, None)


class Routes(Depth):
    """route_kernel's Depth, with blocks of `block_layers` layers or, `sources="full"`, of one sub-layer."""

    ends = True  # the first sub-layer and the output read too

    def __init__(self, x: torch.Tensor, c: "GPTConfig", arm: "Arm", record: list | None):
        backend, _ = choose_backend(c.backend if arm.fused else "reference", x.device)
        super().__init__(x, backend=backend, eps=c.eps, record=record)
        self.arm, self.full, self.past = arm, arm.sources == "full", []

    def write(self, out: torch.Tensor) -> None:
        if self.full:
            self.finish_block()
        super().write(out)


class SlicedRoutes(Routes):
    """Routes whose query is cut: into heads that each mix their own slice (Multi-Head AttnRes, 2607.27230), or down
    to the last `rank` coordinates (sliced Low-Rank AttnRes, 2607.09694; jon123boss/LR-AttnRes). In plain torch."""

    def read(self, queries, key_gain, out_gain=None, ahead=None, last: bool = False):
        h, weights = lean(self.mix, queries[0], key_gain, out_gain, *self.sources)
        keep_weights(self.record, weights)
        return (h,)

    def mix(self, query, key_gain, out_gain, *sources):
        """query [r], key_gain [r] or None. Returns the normalised mixture [..., d] and weights [..., heads, K]."""
        w, heads, scores = query if key_gain is None else query * key_gain, self.arm.heads, []
        wides = [wide(s) for s in sources]  # one float32 copy of each, for its key and for the mixture
        for key in (s[..., -len(w):] for s in wides):
            scale = inverse_rms(key, w.new_full((), self.eps))[..., None]  # the score is that of the normalised key
            scores.append((key * w).unflatten(-1, (heads, -1)).sum(-1) * scale)
        weights = torch.stack(scores, dim=-1).softmax(-1)
        mixture = weighted_sum(weights, [s.unflatten(-1, (heads, -1)) for s in wides]).flatten(-2)
        return rms_norm(mixture, out_gain, self.eps).to(sources[0].dtype), weights


class DeltaRoutes(Routes):
    """Delta AttnRes (2605.18855): the ordinary stream, plus a mixture of the embedding and what was added to it since, by
    each sub-layer or in blocks: then the block being summed is no source. The release (wdlctc/delta-attention-residuals-code)
    starts its queries at random, and its blocks push alternating sums instead of increments; this follows the paper."""

    ends = False

    def __init__(self, x: torch.Tensor, *rest):
        super().__init__(x, *rest)
        self.x, self.held = x, None

    def read(self, queries, key_gain, out_gain=None, ahead=None, last: bool = False):
        h = wide(self.x)
        if queries is not None:
            h = h + wide(super().read(queries, key_gain)[0])
        return (rms_norm(h, out_gain, self.eps).to(self.x.dtype),)

    def write(self, out: torch.Tensor) -> None:
        out = out.to(self.x.dtype)
        self.x, self.held = self.x + out, out if self.held is None else self.held + out
        if self.full:
            self.finish_block()

    def finish_block(self) -> None:
        if self.held is not None:
            Depth.write(self, self.held)
            self.held = None
        super().finish_block()


class Stream:
    """The ordinary residual stream behind Depth's interface: every read is the stream itself."""

    def __init__(self, x: torch.Tensor, c: "GPTConfig", arm: "Arm", record: list | None):
        self.x, self.eps, self.record, self.past = x, c.eps, record, []

    def read(self, queries, key_gain, out_gain: torch.Tensor, ahead=None, last: bool = False) -> tuple[torch.Tensor, ...]:
        return (rms_norm(self.x, out_gain, self.eps),)

    def write(self, out: torch.Tensor) -> None:
        self.x = self.x + out.to(self.x.dtype)

    def finish_block(self) -> None:
        pass


class DenseStream(Stream):
    """A stream that is replaced, before every layer but the first and before the output, by mixtures of its history:
    the embedding and all layers' outputs, each as it left its layer (DenseFormer, MUDDFormer)."""

    def read(self, mixer, _, out_gain, ahead=None, last: bool = False):
        if not mixer.names:
            self.past = self.past or [self.x]
            return super().read(None, None, out_gain) * max(1, len(mixer.feeds))
        self.past = [*self.past, self.x]
        *mixed, weights = lean(mixer.mix, *self.past)
        keep_weights(self.record, weights)
        self.x = mixed[-1]
        return tuple(rms_norm(h, gain, self.eps) for h, gain in zip(mixed, (out_gain, *mixer.gains.values())))


class StaticWeights(Mixer):
    """DenseFormer (2402.02622; epfml/DenseFormer): one learned weight a source, at first all on the newest."""

    def start(self, c, arm, k, feeds):
        self.gains = nn.ParameterDict()
        if k and k % 2 == 0:  # none before an MLP and in layer 0
            self.names = feeds if k == 2 * c.n_layer else (*feeds, "stream")
            self.static = nn.Parameter(torch.zeros(len(self.names), k // 2 + 1))
            nn.init.ones_(self.static[:, -1])

    def weights(self, x: torch.Tensor) -> torch.Tensor:  # x [..., d], the newest source: weights [..., ways, K]
        return self.static.expand(*x.shape[:-1], -1, -1)

    def mix(self, *history):
        history, dtype = [wide(h) for h in history], history[0].dtype
        weights = self.weights(history[-1])
        return *(weighted_sum(w, history).to(dtype) for w in weights.unbind(-2)), weights


class DynamicWeights(StaticWeights):
    """MUDDFormer (2502.12170; Caiyun-AI/MUDDFormer): to these a small MLP on the newest output adds its own at every token,
    a way for each read, through a norm of its own, and one for the stream. FFN widths are not re-allocated."""

    def start(self, c, arm, k, feeds):
        super().start(c, arm, k, feeds)
        if self.names:
            n = self.static.numel()
            hidden = (n * (4 if k == 2 * c.n_layer else 1) // 64 + 1) * 64
            self.w1, self.random = nn.Parameter(torch.empty(hidden, c.n_embd)), {"w1": c.n_embd ** -0.5}
            self.w2 = nn.Parameter(torch.zeros(n, hidden))
            for f in feeds[1:]:
                self.gains[f] = nn.Parameter(torch.ones(c.n_embd))

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(F.linear(rms_norm(x, None, self.eps), self.w1))
        return F.linear(hidden, self.w2).unflatten(-1, self.static.shape) + self.static


class Streams(Stream):
    """n copies of the stream; a sub-layer reads one mixture of them and writes to all, while they mix (2409.19606)."""

    def __init__(self, x: torch.Tensor, *rest):
        super().__init__(x[..., None, :].expand(*x.shape[:-1], HyperWeights.n, -1), *rest)

    def read(self, mixer, _, out_gain, ahead=None, last: bool = False):
        if last:
            return (rms_norm(wide(self.x).sum(-2), out_gain, self.eps).to(self.x.dtype),)
        h, pre, self.keep, self.post = lean(mixer.mix, self.x)
        keep_weights(self.record, pre[..., None, :])
        return (rms_norm(h, out_gain, self.eps).to(self.x.dtype),)

    def write(self, out: torch.Tensor) -> None:
        mix = lambda x, keep, post, out: (keep.mT @ wide(x) + post[..., None] * wide(out)[..., None, :]).to(x.dtype)
        self.x = lean(mix, self.x, self.keep, self.post, out)


class HyperWeights(Mixer):
    """Hyper-Connections (2409.19606; lucidrains/hyper-connections, whose RMSNorm this takes for the paper's LayerNorm):
    weights static + scale * tanh(norm(H) W), at first the ordinary stream n times over."""

    n = 4

    def start(self, c, arm, k, feeds):
        if k < 2 * c.n_layer:  # the output reads the sum of the streams
            self.names = ("mlp" if k % 2 else "attn",)
            self.create(c.n_embd, self.n, torch.eye(self.n)[k % self.n])

    def create(self, d: int, n: int, own: torch.Tensor) -> None:  # own [n]: one at the stream that is read at first
        self.norm = nn.Parameter(torch.ones(d))
        self.static_in = nn.Parameter(torch.cat((own[:, None], torch.eye(n)), dim=1))  # [A_m, A_r]
        self.static_out = nn.Parameter(torch.ones(n))  # B
        self.w_in, self.w_out = nn.Parameter(torch.zeros(d, n + 1)), nn.Parameter(torch.zeros(d))
        self.scale_in, self.scale_out = nn.Parameter(torch.tensor(0.01)), nn.Parameter(torch.tensor(0.01))

    def mix(self, streams):
        """streams [..., n, d]: the input [..., d], the weights A_m [..., n], A_r [..., n, n] and B [..., n]."""
        pre, keep, post = self.weights(wide(streams))
        return weighted_sum(pre, streams.unbind(-2)), pre, keep, post

    def weights(self, streams):
        h = rms_norm(streams, self.norm, self.eps)
        into = self.static_in + self.scale_in * torch.tanh(h @ self.w_in)
        return into[..., 0], into[..., 1:], self.static_out + self.scale_out * torch.tanh(h @ self.w_out)


class ManifoldWeights(HyperWeights):
    """mHC (2512.24880; FFTYYY/mhc-lite): weights from all streams at once; those that read and write are positive, and a
    doubly stochastic matrix mixes the streams, so that their sum passes unchanged."""

    def create(self, d: int, n: int, own: torch.Tensor) -> None:
        self.norm, self.phi = nn.Parameter(torch.ones(n * d)), nn.Parameter(torch.zeros(n * d, 2 * n + n * n))
        self.bias = nn.Parameter(torch.cat((2 * own - 1, 2 * own - 1, (-8 * (1 - torch.eye(n))).flatten())))  # read, write, mix
        self.scale = nn.Parameter(torch.full((3,), 0.01))

    def weights(self, streams):
        z, sizes = rms_norm(streams.flatten(-2), self.norm, self.eps) @ self.phi, (self.n, self.n, self.n ** 2)
        pre, post, keep = (a * x + b for a, x, b in zip(self.scale, z.split(sizes, dim=-1), self.bias.split(sizes)))
        keep = keep.unflatten(-1, (self.n, self.n))
        for _ in range(20):  # Sinkhorn, in logarithms
            keep = keep.log_softmax(-2).log_softmax(-1)
        return pre.sigmoid(), keep.exp(), 2 * post.sigmoid()


class ValueResidual(Mixer):
    """ResFormer (2410.17897; Zcchill/Value-Residual-Learning): every later layer's V is half layer 0's. Learnable: one
    weight a layer in a convex sum, where the release has two free ones."""

    def start(self, c, arm, k, feeds):
        self.weight = nn.Parameter(torch.tensor(0.5)) if arm.learnable and k else 0.5

    def forward(self, q, k, v, depth):
        depth.past = depth.past or [v]  # layer 0's own: half of it and half of it
        return (self.weight * depth.past[0] + (1 - self.weight) * v).to(v.dtype)


class DepthAttention(Mixer):
    """Depth-Attention (2606.05014; hyq718/Depth-Attention): at each token and head the query attends to its own layer and
    two earlier ones, and V is the mixture. Its authors normalise Q and K, which no arm here does."""

    def start(self, c, arm, k, feeds):
        self.names = tuple(f"head{i}" for i in range(c.n_head))
        self.kept = k // 2 % max(1, c.n_layer // 2) == 0  # layers 0 and L/2 are seen from above

    def forward(self, q, k, v, depth):  # [B, T, heads, head_dim]; RoPE turns q and k alike and leaves their product
        layers = [*depth.past, (k, v)]
        scores = torch.stack([(wide(q) * wide(key)).sum(-1) for key, _ in layers], dim=-1)
        weights = (scores / math.sqrt(q.shape[-1])).softmax(-1)
        keep_weights(depth.record, weights)
        v = weighted_sum(weights, [value for _, value in layers]).to(v.dtype)
        depth.past = [*depth.past, (k, v)] if self.kept else depth.past
        return v


# ---------------------------------------------------------------------------------------------------------
# The arms


@dataclass(frozen=True)
class Arm:
    """What distinguishes an arm. Everything not named here is the same code for all of them."""

    idea: str  # one line, shown by `python model.py`
    reads: tuple[str, ...] = ("qkv",)  # which projections share a depth read; () is the stream, or a single input
    combine: typing.Callable | None = None  # joins the R mixtures into one before the attention norm
    frozen: tuple[str, ...] = ()  # reads whose query stays at zero: a uniform mixture
    depth: type = Routes  # what a sub-layer reads from and writes to
    mixer: typing.Callable = Read  # its parameters, by sub-layer
    values: type | None = None  # a Mixer that replaces V once it is projected
    fused: bool = True  # whether all its mixing over depth can run in the fused kernels, or it has none
    options: tuple[str, ...] = ()  # which of these `arm:option=value` may set:
    sources: str = "block"  # or full: every sub-layer's output is a source of its own
    heads: int = 1  # slices of a query
    rank: int = 0  # coordinates of a key, at most d; 0: the whole width and a gain
    learnable: bool = False  # the value residual's weights


stream = dict(reads=(), depth=Stream)
sliced, dense, streams = (dict(depth=x, fused=False) for x in (SlicedRoutes, DenseStream, Streams))

ARMS: dict[str, Arm] = {
    # The paper, sections 3 and 4 (its parent: Block AttnRes, arXiv 2603.15031), and the groupings
    "plain": Arm("Pre-Norm without depth routes", **stream),
    "block": Arm("Block AttnRes, the parent: one read feeds Q, K and V"),
    "rd": Arm("RD-AttnRes: Q and K share a read, V has its own", reads=("qk", "v")),
    "tied": Arm("control: one query serves the QK and the V read, so it is the parent"),
    # Symmetric in two queries that both start at zero: they get equal gradients and stay equal for ever, so this
    # arm is the parent up to round-off. It is the paper's control; q_kv, k_qv and q_k_v test what it cannot.
    "average": Arm("control: two reads, averaged before the projections", reads=("qk", "v"), combine=lambda h: sum(h) / len(h)),
    "frozen_v": Arm("control: the V query stays at zero, a uniform V read", reads=("qk", "v"), frozen=("v",)),
    "q_kv": Arm("grouping: Q alone, K and V share", reads=("q", "kv")),
    "k_qv": Arm("grouping: K alone, Q and V share", reads=("k", "qv")),
    "q_k_v": Arm("grouping: three reads", reads=("q", "k", "v")),
    # Rivals; the source of each stands with its class
    "full": Arm("Full AttnRes (2603.15031): every sub-layer's output is a source", sources="full"),
    "full_rd": Arm("Full AttnRes with a V read of its own", reads=("qk", "v"), sources="full"),
    "mhar": Arm("Multi-Head AttnRes: a softmax for each slice of the width", heads=2, options=("heads", "sources"), **sliced),
    "lowrank": Arm("sliced Low-Rank AttnRes: keys are the last coordinates", rank=64, options=("rank", "sources"), **sliced),
    "delta": Arm("Delta AttnRes: the stream plus a read of its increments", depth=DeltaRoutes, sources="full"),
    "delta_block": Arm("Delta AttnRes over completed blocks' increments", depth=DeltaRoutes),
    "denseformer": Arm("DenseFormer: static averages of all layers' outputs", reads=(), mixer=StaticWeights, **dense),
    "resformer": Arm("Value Residual: V is half layer 0's", values=ValueResidual, options=("learnable",), **stream),
    "block_resformer": Arm("Block AttnRes with Value Residual", values=ValueResidual, options=("learnable",)),
    "depth_attention": Arm("Depth-Attention: V attends to earlier layers'", values=DepthAttention, fused=False, **stream),
    "mudd": Arm("MUDDFormer: dynamic averages for Q, K, V and the stream", reads=("q", "k", "v"), mixer=DynamicWeights, **dense),
    "mudd_rd": Arm("MUDDFormer with one way for Q and K, matched to RD", reads=("qk", "v"), mixer=DynamicWeights, **dense),
    "hc": Arm("Hyper-Connections, 4 streams", reads=(), mixer=HyperWeights, **streams),
    "mhc": Arm("manifold-constrained Hyper-Connections, 4 streams", reads=(), mixer=ManifoldWeights, **streams),
}
CHOICES = {"sources": ("block", "full"), "learnable": ("false", "true")}

# The paper's Table 4 and section 4. `nano` shows the whole mechanism on a laptop: four blocks of two layers.
SCALES: dict[str, dict] = {
    "S": dict(n_layer=16, n_embd=576, n_head=36, block_layers=4, context=1024, vocab_size=32768),
    "M": dict(n_layer=24, n_embd=832, n_head=52, block_layers=4, context=1024, vocab_size=32768),
    "nano": dict(n_layer=8, n_embd=128, n_head=8, block_layers=2, context=256, vocab_size=4096),
}


def find_arm(spec: str) -> Arm:
    """The arm of `name` or `name:option=value[:option=value]`. Raises BadInput with the nearest name."""
    name, *given = spec.split(":")
    if name not in ARMS:
        raise BadInput(f"--arch={spec}: no such arm{did_you_mean(name, ARMS) or '.'} The arms: {', '.join(ARMS)}")
    arm, values = ARMS[name], {}
    for key, _, text in (word.partition("=") for word in given):
        choices = CHOICES.get(key)
        if key not in arm.options or key in values:
            why = f"{key} is given twice" if key in values else f"no such option {key!r}{did_you_mean(key, arm.options)}"
            raise BadInput(f"--arch={spec}: {why} ({name} takes {', '.join(arm.options) or 'none'})")
        if not (text in choices if choices else text.isascii() and text.isdigit() and int(text)):
            raise BadInput(f"--arch={spec}: {key} wants {' or '.join(choices) if choices else 'a whole number of at least 1'}")
        values[key] = text if key == "sources" else text == "true" if choices else int(text)
    return dataclasses.replace(arm, **values)


def canonical(spec: str) -> str:
    """The one name of an arm: its options in the table's order, without those at their default."""
    name, made = spec.split(":")[0], find_arm(spec)
    given = ((key, getattr(made, key)) for key in made.options if getattr(made, key) != getattr(ARMS[name], key))
    return ":".join([name, *(f"{key}={value}".lower() for key, value in given)])


@dataclass
class GPTConfig:
    """Shape and arm of a model. Raises BadInput naming every setting that cannot be."""

    arch: str = "rd"
    n_layer: int = 16
    n_embd: int = 576
    n_head: int = 36
    block_layers: int = 4  # layers per residual block
    context: int = 1024
    vocab_size: int = 32768
    mlp_ratio: int = 5  # SwiGLU hidden width over d
    eps: float = 1e-6  # of every RMSNorm, the routes' key norm included
    rope_base: float = 10000.0
    init_std: float = 0.02  # every matrix; the output projections are not scaled by depth
    backend: str = "auto"  # auto | reference | fused: how a route is computed, see route_kernel.py
    residual_dtype: str | None = None  # None: the compute dtype, for every arm; "float32" raises it for all alike

    def __post_init__(self):
        arm = find_arm(self.arch)
        problems = [f"{name} must be at least 1, not {getattr(self, name)}"
                    for name in ("n_layer", "n_embd", "n_head", "block_layers", "context", "vocab_size", "mlp_ratio")
                    if getattr(self, name) < 1]
        if not problems and self.n_embd % self.n_head:
            near = min((h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0 and self.n_embd // h % 2 == 0),
                       key=lambda h: abs(h - self.n_head), default=1)
            problems.append(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; nearest n_head: {near}")
        elif not problems and self.n_embd // self.n_head % 2:
            problems.append(f"the head dimension n_embd / n_head = {self.n_embd // self.n_head} must be even for RoPE")
        if not problems and (self.n_embd % arm.heads or "rank=" in self.arch and arm.rank > self.n_embd):
            problems.append(f"--arch={self.arch}: heads must divide n_embd={self.n_embd}, and rank not exceed it")
        if self.backend == "fused" and not arm.fused:
            problems.append(f"--arch={self.arch} has no fused path: use --backend=reference, or auto, which takes it")
        if self.residual_dtype not in (None, "float32", "bfloat16", "float16"):
            problems.append(f"residual_dtype={self.residual_dtype} must be float32, bfloat16 or float16")
        if problems:
            raise BadInput("\n".join(problems))

    @classmethod
    def from_scale(cls, scale: str, arch: str = "rd", **overrides) -> "GPTConfig":
        """A scale of SCALES with any field overridden."""
        if scale not in SCALES:
            raise BadInput(f"--scale={scale}: no such scale{did_you_mean(scale, SCALES) or '.'} The scales: {', '.join(SCALES)}")
        return cls(**{**SCALES[scale], "arch": arch, **overrides})


# ---------------------------------------------------------------------------------------------------------
# The transformer


class Layer(nn.Module):
    """Attention and SwiGLU MLP, each fed by a depth read (paper, equations 1 to 5)."""

    def __init__(self, c: GPTConfig, arm: Arm, l: int):
        super().__init__()
        d, hidden = c.n_embd, c.mlp_ratio * c.n_embd
        self.n_head, self.eps, self.combine = c.n_head, c.eps, arm.combine
        self.attn_norm, self.mlp_norm = nn.Parameter(torch.ones(d)), nn.Parameter(torch.ones(d))
        self.w_qkv, self.w_o = nn.Parameter(torch.empty(3 * d, d)), nn.Parameter(torch.empty(d, d))
        self.w_gate_up, self.w_down = nn.Parameter(torch.empty(2 * hidden, d)), nn.Parameter(torch.empty(d, hidden))
        self.attn_read, self.mlp_read = arm.mixer(c, arm, 2 * l, arm.reads), arm.mixer(c, arm, 2 * l + 1, ("mlp",))
        self.values = arm.values and arm.values(c, arm, 2 * l, arm.reads)
        # which of the mixtures feeds Q, K and V
        joined = arm.combine is not None or not arm.reads
        self.feeds = [0 if joined else next(i for i, r in enumerate(arm.reads) if role in r) for role in "qkv"]

    def forward(self, depth: Routes | Stream, rope: torch.Tensor) -> None:
        attn, mlp = self.attn_read(), self.mlp_read()
        # `ahead` lets the attention's pass over the sources begin the MLP's read of them; it changes no result
        if self.combine is None:
            hs = depth.read(*attn, self.attn_norm, ahead=mlp)
        else:
            hs = (rms_norm(self.combine(depth.read(*attn, None, ahead=mlp)), self.attn_norm, self.eps),)
        depth.write(self.attention(hs, rope, depth))
        (h,) = depth.read(*mlp, self.mlp_norm)
        depth.write(self.mlp(h))

    def attention(self, hs: tuple[torch.Tensor, ...], rope: torch.Tensor, depth: Routes | Stream | None = None) -> torch.Tensor:
        """hs: normalised mixtures [B, T, d], one per read. Returns [B, T, d].

        Q and K are one product where they share a read, and V is a product of its own in every arm: the same
        matrix shapes whether V shares the read or not is what makes `rd` with tied queries the parent bit for bit.
        """
        B, T, d = hs[0].shape
        hq, hk, hv = (hs[i] for i in self.feeds)
        if hq is hk:
            w_qk, w_v = self.w_qkv.split((2 * d, d))
            qk = F.linear(hq, w_qk)
        else:
            w_q, w_k, w_v = self.w_qkv.split(d)
            qk = torch.cat((F.linear(hq, w_q), F.linear(hk, w_k)), dim=-1)
        v = F.linear(hv, w_v).view(B, T, self.n_head, -1)
        q, k = rotate(qk.view(B, T, 2 * self.n_head, -1), rope).split(self.n_head, dim=2)
        if self.values is not None:
            v = self.values(q, k, v, depth)
        y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        return F.linear(y.reshape(B, T, d), self.w_o)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(h, self.w_gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_down)


def portable_normal(n: int, generator: torch.Generator) -> torch.Tensor:
    """n standard normal numbers, float64, the same bits on every CPU: Marsaglia's polar method out of operations that IEEE 754
    rounds exactly. (torch's own normal_ takes logarithms and cosines from vector units, which differ in the last bit.)"""
    found, have = [], 0
    while have < n:
        pairs = min(n - have, 1 << 15) * 2 // 3 + 16  # pi / 4 of them fall into the circle
        v = torch.rand(2, pairs, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
        square = v[0] * v[0] + v[1] * v[1]
        inside = (square > 0) & (square < 1)
        v, square = v[:, inside], square[inside]
        mantissa, exponent = torch.frexp(square)
        t = (mantissa - 1) / (mantissa + 1)  # log(mantissa) = 2 artanh(t), |t| <= 1 / 3: a power series
        t2, log = t * t, torch.full_like(t, 1 / 43)
        for k in range(41, 0, -2):
            log.mul_(t2).add_(1 / k)
        log.mul_(t).mul_(2).add_(exponent.double().mul_(math.log(2)))
        found.append((v * log.mul_(-2).div_(square).sqrt_()).flatten())
        have += found[-1].numel()
    return torch.cat(found)[:n]


def rope_table(context: int, head_dim: int, base: float) -> torch.Tensor:
    """cos and sin of every position's angles: float32 [context, 1, head_dim / 2, 2]."""
    angle = torch.arange(context)[:, None] * base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    return torch.stack((angle.cos(), angle.sin()), dim=-1)[:, None].float()


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """RoPE on neighbouring pairs of x [B, T, heads, head_dim], in float32."""
    pairs, rope = wide(x).unflatten(-1, (-1, 2)), rope[: x.shape[1]]
    if torch.compiler.is_compiling():  # the compiler fuses real arithmetic, and does not know complex numbers
        (a, b), (cos, sin) = pairs.unbind(-1), rope.unbind(-1)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1)
    else:  # one complex product is twice as fast as its six parts
        turned = torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope))
    return turned.flatten(-2).to(x.dtype)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Scaled dot-product attention over [B, H, T, head_dim], each position seeing itself and what came before."""
    if q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16):
        # at head dimension 16 torch's CPU kernel is 1.3 to 2.5 times faster in float32 than in bfloat16
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True).to(q.dtype)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def nll_of_rows(h: torch.Tensor, low: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """NLL [n] of targets [n] under the head low [V, d], and the softmax as numerators [n, V] and sums [n, 1]: float32.
    h [n, d] in low's dtype."""
    logits = (h @ low.t()).float()
    logits.sub_(logits.amax(-1, keepdim=True))
    of_target = logits.gather(1, targets[:, None])
    powers = logits.exp_()
    total = powers.sum(-1, keepdim=True)
    return (total.log() - of_target).squeeze(1), powers, total


class HeadLoss(torch.autograd.Function):
    """Mean next-token NLL of h [N, d] under the tied head w [V, d], without ever holding [N, V] logits.

    Rows go through in chunks, and a chunk's gradient is formed while its logits are at hand: the memory is one chunk
    of logits. Products in h's dtype; softmax in float32; the sum in float64. (torch's own linear_cross_entropy, 2.13,
    rounds a bfloat16 loss to bfloat16, 10.5 for 10.538, and took five times as long on a CPU.)
    """

    @staticmethod
    def forward(ctx, h, w, targets, chunk):
        want_h, want_w = ctx.needs_input_grad[:2]
        low, N = w.to(h.dtype), len(h)
        total = torch.zeros((), dtype=torch.float64, device=h.device)
        dh = torch.empty_like(h) if want_h else None
        dw = torch.empty_like(w, dtype=torch.float32) if want_w else None
        for i in range(0, N, chunk):
            rows, t = h[i:i + chunk], targets[i:i + chunk]
            nll, powers, sums = nll_of_rows(rows, low, t)
            total += nll.sum(dtype=torch.float64)
            if want_h or want_w:  # d mean NLL / d logits = (softmax - onehot) / N
                grad = powers.mul_((N * sums).reciprocal_())
                grad = grad.scatter_add_(1, t[:, None], torch.full_like(sums, -1 / N)).to(h.dtype)
            if want_h:
                torch.mm(grad, low, out=dh[i:i + chunk])
            if want_w and grad.dtype == dw.dtype:
                dw.addmm_(grad.t(), rows, beta=int(i > 0))
            elif want_w:
                dw.add_(grad.t() @ rows) if i else dw.copy_(grad.t() @ rows)
        ctx.save_for_backward(dh, dw)
        return (total / N).float()

    @staticmethod
    def backward(ctx, g):
        dh, dw = ctx.saved_tensors
        return None if dh is None else dh * g.to(dh.dtype), None if dw is None else dw * g, None, None


class GPT(nn.Module):
    """Decoder-only transformer with the depth routes of `config.arch`.

    `model(idx)` gives logits [B, T, V] float32; `model(idx, targets)` gives (None, mean NLL), a float32 scalar in nats.
    idx and targets: int64 [B, T], T at most `config.context`. Under autocast the products run in its dtype.
    Initial values depend on `seed` and on each parameter's name alone, so that all arms of a pair start from the
    same parent weights.
    """

    memory = None  # what a pass reads and writes, where an experiment replaces the arm's own

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = c = config
        self.arm = arm = find_arm(c.arch)
        self.wte = nn.Parameter(torch.empty(c.vocab_size, c.n_embd))  # tied: also the head
        self.layers = nn.ModuleList(Layer(c, arm, l) for l in range(c.n_layer))
        self.out_read = arm.mixer(c, arm, 2 * c.n_layer, ("out",))
        self.out_norm = nn.Parameter(torch.ones(c.n_embd))
        self.register_buffer("rope", rope_table(c.context, c.n_embd // c.n_head, c.rope_base), persistent=False)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """N(0, init_std) for every matrix, each from a generator of its own; gains one, queries zero."""
        routing = self.routing_names()
        stds = {f"{m}.{n}": std for m, module in self.named_modules() if isinstance(module, Mixer) for n, std in module.random.items()}
        for name, p in self.named_parameters():
            std = stds.get(name, self.config.init_std if p.dim() >= 2 and name not in routing else None)
            if std is not None:
                digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
                if p.device.type != "meta":
                    p.copy_((std * portable_normal(p.numel(), generator)).view(p.shape))

    def hidden(self, idx: torch.Tensor, record: list | None = None) -> torch.Tensor:
        """The normalised state [B, T, d] that the head reads. `record` collects the weights [R, K, N] of every
        mixture over depth, in order: attention and MLP of each layer, then the output, where the arm has them."""
        c = self.config
        if idx.shape[-1] > c.context:
            raise BadInput(f"{idx.shape[-1]} tokens do not fit the context of {c.context}")
        # cast once, so that every arm, plain included, adds its residuals in the same precision
        x = F.embedding(idx, self.wte).to(self.residual_dtype())
        depth = (self.memory or self.arm.depth)(x, c, self.arm, record)
        for l, layer in enumerate(self.layers):
            if l % (1 if self.arm.sources == "full" else c.block_layers) == 0:  # a full form ends its own at the MLP as well
                depth.finish_block()
            layer(depth, self.rope)
        depth.finish_block()
        (h,) = depth.read(*self.out_read(), self.out_norm, last=True)
        return h

    def residual_dtype(self) -> torch.dtype:
        if self.config.residual_dtype:
            return getattr(torch, self.config.residual_dtype)
        device = self.wte.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.wte.dtype

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, record: list | None = None):
        h = self.hidden(idx, record)
        if targets is None:
            return F.linear(h, self.wte).float()
        with torch.autocast(h.device.type, enabled=False):
            return None, HeadLoss.apply(*self.head_inputs(h, targets), self.head_chunk(h.device))

    @torch.no_grad()
    def token_nll(self, idx: torch.Tensor, targets: torch.Tensor, record: list | None = None) -> torch.Tensor:
        """NLL of every target in nats, float32 [B, T]."""
        h, w, t = self.head_inputs(self.hidden(idx, record), targets)
        with torch.autocast(h.device.type, enabled=False):
            low, chunk = w.to(h.dtype), self.head_chunk(h.device)
            nll = [nll_of_rows(a, low, b)[0] for a, b in zip(h.split(chunk), t.split(chunk))]
        return torch.cat(nll).view(targets.shape)

    def head_inputs(self, h: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """h [N, d] in the compute dtype, the head [V, d], targets [N]."""
        low = torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else self.wte.dtype
        return h.flatten(0, 1).to(low), self.wte, targets.flatten()

    @staticmethod
    def head_chunk(device: torch.device) -> int:
        return 512 if device.type == "cpu" else 2048  # rows; at 32,768 entries 64 MB or 256 MB of float32 logits

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 generator: torch.Generator | None = None) -> torch.Tensor:
        """Continue idx [B, T] by `max_new_tokens`, each drawn given the last `context` tokens; temperature 0 takes the
        likeliest. Returns [B, T + max_new_tokens]. The same generator state gives the same tokens."""
        for _ in range(max_new_tokens):
            h = self.hidden(idx[:, -self.config.context:])[:, -1]
            logits = F.linear(h, self.wte).float()
            if temperature == 0:
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                new = torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)
            idx = torch.cat((idx, new), dim=1)
        return idx

    @torch.no_grad()
    def load_from(self, state: dict[str, torch.Tensor], arch: str) -> None:
        """Take over the parameters of a model of another arm, so that this one computes its function. A query that it
        lacks is that of its read which feeds the same projection: `rd` from a trained `block` is the parent, bit for
        bit. From `plain`, queries stay at zero. Frozen queries stay as they are.
        Raises BadInput where the two mix over depth in different ways, or a parameter has no counterpart or another shape."""
        alike = lambda spec: dataclasses.replace(find_arm(spec), idea="", reads=(), combine=None, frozen=(), options=())
        mine, theirs, routing = alike(self.config.arch), alike(arch), self.routing_names()
        new = theirs == alike("plain") and mine.depth is Routes and mine.values is None  # at zero queries, plain's function
        if mine != theirs and not new:
            raise BadInput(f"{self.config.arch} cannot start from {arch}: they mix over depth in different ways")
        for name, p in self.named_parameters():
            if name in routing and (new or not p.requires_grad):
                continue
            source = name
            if name not in state and ".query." in name:
                prefix, feeds = name.rsplit(".", 1)
                source = next((n for n in state if n.startswith(prefix + ".") and set(feeds) <= set(n.rsplit(".", 1)[1])), name)
            if source not in state:
                raise BadInput(f"{self.config.arch} cannot start from {arch}: it has nothing for {name}")
            if state[source].shape != p.shape:
                raise BadInput(f"{name} is {tuple(p.shape)} here and {tuple(state[source].shape)} in the run to start from")
            p.copy_(state[source])

    # -- what the optimiser and the log need to know --------------------------------------------------------

    def routing_names(self) -> set[str]:
        """Names of all parameters that mix over depth: queries, key-norm gains, and whatever else a Mixer holds."""
        return {f"{m}.{p}" for m, module in self.named_modules() if isinstance(module, Mixer)
                for p, _ in module.named_parameters()}

    def recorded(self) -> list[tuple[int, tuple[str, ...]]]:
        """For each entry of a pass's `record`: its layer (L for the output) and the names of its R mixtures."""
        mixers = [(l, m) for l, layer in enumerate(self.layers) for m in (layer.attn_read, layer.values, layer.mlp_read)]
        return [(l, m.names) for l, m in (*mixers, (len(self.layers), self.out_read)) if m is not None and m.names]

    def param_groups(self, lr: float, weight_decay: float, route_lr_mult: float = 1.0) -> list[dict]:
        """AdamW groups: decay on matrices (the tied embedding included), none on one-dimensional or routing
        parameters. Route queries learn at `lr * route_lr_mult`. Frozen parameters are in no group."""
        routing = self.routing_names()
        groups = [dict(kind="matrices", weight_decay=weight_decay, mult=1.0), dict(kind="gains", weight_decay=0.0, mult=1.0),
                  dict(kind="queries", weight_decay=0.0, mult=route_lr_mult)]
        for g in groups:
            g.update(params=[], names=[], lr=lr * g["mult"])
        for name, p in self.named_parameters():
            if p.requires_grad:
                i = 2 if ".query." in name else 0 if p.dim() >= 2 and name not in routing else 1
                groups[i]["params"].append(p)
                groups[i]["names"].append(name)
        return [g for g in groups if g["params"]]

    def count(self) -> dict[str, int]:
        """Parameters: total, of the routes, frozen; and FLOPs of one training token, forward and backward.

        FLOPs: 6 for each weight of a matrix product (the head included, the embedding's look-up not) and
        6 L T d for causal attention's two products; routes, norms and activations are left out.
        """
        c, routing = self.config, self.routing_names()
        sizes = {n: p.numel() for n, p in self.named_parameters()}
        matrices = sum(p.numel() for n, p in self.named_parameters() if p.dim() >= 2 and n not in routing)
        return dict(total=sum(sizes.values()), routing=sum(sizes[n] for n in routing),
                    frozen=sum(p.numel() for p in self.parameters() if not p.requires_grad),
                    flops_per_token=6 * matrices + 6 * c.n_layer * c.context * c.n_embd)


def main() -> None:
    scales = ("S", "M", "nano")
    print(f"{'arm':16}" + "".join(f"{s:>14}" for s in scales) + "   idea")
    for name, arm in ARMS.items():
        with torch.device("meta"):
            counts = [GPT(GPTConfig.from_scale(s, name)).count()["total"] for s in scales]
        print(f"{name:16}" + "".join(f"{n:14,}" for n in counts) + f"   {arm.idea}")


if __name__ == "__main__":
    main()
