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

from prepare import BadInput, did_you_mean
from route_kernel import Depth, choose_backend

# ---------------------------------------------------------------------------------------------------------
# The arms


@dataclass(frozen=True)
class Arm:
    """What distinguishes an arm. Everything not named here is the same code for all of them."""

    idea: str  # one line, shown by `python model.py`
    reads: tuple[str, ...] = ("qkv",)  # which projections share a depth read; () is the ordinary residual stream
    combine: typing.Callable | None = None  # joins the R mixtures into one before the attention norm
    frozen: tuple[str, ...] = ()  # reads whose query stays at zero: a uniform mixture


def average(mixtures: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum(mixtures) / len(mixtures)


# Source of every entry but the groupings: the paper, sections 3 and 4 (parent: Block AttnRes, arXiv 2603.15031).
ARMS: dict[str, Arm] = {
    "plain": Arm("Pre-Norm without depth routes", reads=()),
    "block": Arm("Block AttnRes, the parent: one read feeds Q, K and V"),
    "rd": Arm("RD-AttnRes: Q and K share a read, V has its own", reads=("qk", "v")),
    "tied": Arm("control: one query serves the QK and the V read, so it is the parent"),
    # Symmetric in two queries that both start at zero: they get equal gradients and stay equal for ever, so this
    # arm is the parent up to round-off. It is the paper's control; q_kv, k_qv and q_k_v test what it cannot.
    "average": Arm("control: two reads, averaged before the projections", reads=("qk", "v"), combine=average),
    "frozen_v": Arm("control: the V query stays at zero, a uniform V read", reads=("qk", "v"), frozen=("v",)),
    "q_kv": Arm("grouping: Q alone, K and V share", reads=("q", "kv")),
    "k_qv": Arm("grouping: K alone, Q and V share", reads=("k", "qv")),
    "q_k_v": Arm("grouping: three reads", reads=("q", "k", "v")),
}

# The paper's Table 4 and section 4. `nano` shows the whole mechanism on a laptop: four blocks of two layers.
SCALES: dict[str, dict] = {
    "S": dict(n_layer=16, n_embd=576, n_head=36, block_layers=4, context=1024, vocab_size=32768),
    "M": dict(n_layer=24, n_embd=832, n_head=52, block_layers=4, context=1024, vocab_size=32768),
    "nano": dict(n_layer=8, n_embd=128, n_head=8, block_layers=2, context=256, vocab_size=4096),
}


def find_arm(name: str) -> Arm:
    """The entry of ARMS called `name`. Raises BadInput with the nearest name."""
    if name not in ARMS:
        raise BadInput(f"--arch={name}: no such arm{did_you_mean(name, ARMS)} The arms: {', '.join(ARMS)}")
    return ARMS[name]


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
        find_arm(self.arch)
        problems = [f"{name} must be at least 1, not {getattr(self, name)}"
                    for name in ("n_layer", "n_embd", "n_head", "block_layers", "context", "vocab_size", "mlp_ratio")
                    if getattr(self, name) < 1]
        if not problems and self.n_embd % self.n_head:
            near = min((h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0 and self.n_embd // h % 2 == 0),
                       key=lambda h: abs(h - self.n_head), default=1)
            problems.append(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; nearest n_head: {near}")
        elif not problems and self.n_embd // self.n_head % 2:
            problems.append(f"the head dimension n_embd / n_head = {self.n_embd // self.n_head} must be even for RoPE")
        if self.residual_dtype not in (None, "float32", "bfloat16", "float16"):
            problems.append(f"residual_dtype={self.residual_dtype} must be float32, bfloat16 or float16")
        if problems:
            raise BadInput("\n".join(problems))

    @classmethod
    def from_scale(cls, scale: str, arch: str = "rd", **overrides) -> "GPTConfig":
        """A scale of SCALES with any field overridden."""
        if scale not in SCALES:
            raise BadInput(f"--scale={scale}: no such scale{did_you_mean(scale, SCALES)} The scales: {', '.join(SCALES)}")
        return cls(**{**SCALES[scale], "arch": arch, **overrides})


# ---------------------------------------------------------------------------------------------------------
# Reading depth


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where it is wider."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., d] of any float dtype, gain [d]: RMSNorm computed in float32, returned in x's dtype."""
    return F.rms_norm(wide(x), gain.shape, gain, eps).to(x.dtype)


class Read(nn.Module):
    """The parameters of one depth read: R zero-initialised queries, named by what they feed, one key-norm gain.

    Called, it gives (queries [R, d], key gain [d]) in float32; with nothing to feed, as in `plain`, (None, None).
    """

    def __init__(self, d: int, feeds: tuple[str, ...], frozen: tuple[str, ...] = ()):
        super().__init__()
        self.query = nn.ParameterDict({f: nn.Parameter(torch.zeros(d), requires_grad=f not in frozen) for f in feeds})
        self.key_gain = nn.Parameter(torch.ones(d)) if feeds else None

    def forward(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return (torch.stack(list(self.query.values())), self.key_gain) if self.query else (None, None)


class Stream:
    """The ordinary residual stream behind Depth's interface: every read is the stream itself."""

    def __init__(self, x: torch.Tensor, eps: float):
        self.x, self.eps = x, eps

    def read(self, queries, key_gain, out_gain: torch.Tensor, ahead=None, last: bool = False) -> tuple[torch.Tensor]:
        return (rms_norm(self.x, out_gain, self.eps),)

    def write(self, out: torch.Tensor) -> None:
        self.x = self.x + out.to(self.x.dtype)

    def finish_block(self) -> None:
        pass


# ---------------------------------------------------------------------------------------------------------
# The transformer


class Layer(nn.Module):
    """Attention and SwiGLU MLP, each fed by a depth read (paper, equations 1 to 5)."""

    def __init__(self, c: GPTConfig):
        super().__init__()
        d, hidden, arm = c.n_embd, c.mlp_ratio * c.n_embd, find_arm(c.arch)
        self.n_head, self.eps, self.combine = c.n_head, c.eps, arm.combine
        self.attn_norm = nn.Parameter(torch.ones(d))
        self.mlp_norm = nn.Parameter(torch.ones(d))
        self.w_qkv = nn.Parameter(torch.empty(3 * d, d))
        self.w_o = nn.Parameter(torch.empty(d, d))
        self.w_gate_up = nn.Parameter(torch.empty(2 * hidden, d))
        self.w_down = nn.Parameter(torch.empty(d, hidden))
        self.attn_read = Read(d, arm.reads, arm.frozen)
        self.mlp_read = Read(d, ("mlp",) if arm.reads else ())
        # which of the mixtures feeds Q, K and V
        joined = arm.combine is not None or not arm.reads
        self.feeds = [0 if joined else next(i for i, r in enumerate(arm.reads) if role in r) for role in "qkv"]

    def forward(self, depth: Depth | Stream, rope: torch.Tensor) -> None:
        attn, mlp = self.attn_read(), self.mlp_read()
        # `ahead` lets the attention's pass over the sources begin the MLP's read of them; it changes no result
        if self.combine is None:
            hs = depth.read(*attn, self.attn_norm, ahead=mlp)
        else:
            hs = (rms_norm(self.combine(depth.read(*attn, None, ahead=mlp)), self.attn_norm, self.eps),)
        depth.write(self.attention(hs, rope))
        (h,) = depth.read(*mlp, self.mlp_norm)
        depth.write(self.mlp(h))

    def attention(self, hs: tuple[torch.Tensor, ...], rope: torch.Tensor) -> torch.Tensor:
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
        y = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)
        return F.linear(y.reshape(B, T, d), self.w_o)

    def mlp(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(h, self.w_gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.w_down)


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
    """Logits [n, V], their log-sum-exp [n] and the NLL [n] of targets [n], in float32; h [n, d] and low [V, d] alike."""
    logits = (h @ low.t()).float()
    lse = logits.logsumexp(-1)
    return logits, lse, lse - logits.gather(1, targets[:, None]).squeeze(1)


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
        dw = torch.zeros_like(w, dtype=torch.float32) if want_w else None
        for i in range(0, N, chunk):
            rows, t = h[i:i + chunk], targets[i:i + chunk]
            logits, lse, nll = nll_of_rows(rows, low, t)
            total += nll.sum(dtype=torch.float64)
            if want_h or want_w:  # d mean NLL / d logits = (softmax - onehot) / N
                grad = logits.sub_(lse[:, None]).exp_()
                grad.scatter_add_(1, t[:, None], torch.full_like(lse, -1.0)[:, None])
                grad = grad.div_(N).to(h.dtype)
                if want_h:
                    dh[i:i + chunk] = grad @ low
                if want_w:
                    dw += grad.t() @ rows
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

    memory = Depth  # the depth memory of a forward pass; an experiment may put a subclass in its place

    def __init__(self, config: GPTConfig, seed: int = 0):
        super().__init__()
        self.config = c = config
        arm = find_arm(c.arch)
        self.wte = nn.Parameter(torch.empty(c.vocab_size, c.n_embd))  # tied: also the head
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.n_layer))
        self.out_read = Read(c.n_embd, ("out",) if arm.reads else ())
        self.out_norm = nn.Parameter(torch.ones(c.n_embd))
        self.register_buffer("rope", rope_table(c.context, c.n_embd // c.n_head, c.rope_base), persistent=False)
        self.routed = bool(arm.reads)
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """N(0, init_std) for every matrix, each from a generator of its own; gains one, queries zero."""
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
                p.copy_(torch.empty(p.shape).normal_(0.0, self.config.init_std, generator=generator))

    def hidden(self, idx: torch.Tensor, record: list | None = None) -> torch.Tensor:
        """The normalised state [B, T, d] that the head reads. `record` collects every read's weights [R, K, N], in
        order: attention and MLP of each layer, then the output's."""
        c = self.config
        if idx.shape[-1] > c.context:
            raise BadInput(f"{idx.shape[-1]} tokens do not fit the context of {c.context}")
        # cast once, so that every arm, plain included, adds its residuals in the same precision
        x = F.embedding(idx, self.wte).to(self.residual_dtype())
        if self.routed:
            backend, _ = choose_backend(c.backend, x.device)
            depth = self.memory(x, backend=backend, eps=c.eps, record=record)
        else:
            depth = Stream(x, c.eps)
        for l, layer in enumerate(self.layers):
            if l % c.block_layers == 0:
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
            nll = [nll_of_rows(a, low, b)[2] for a, b in zip(h.split(chunk), t.split(chunk))]
        return torch.cat(nll).view(targets.shape)

    def head_inputs(self, h: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """h [N, d] in the compute dtype, the head [V, d], targets [N]."""
        low = torch.get_autocast_dtype(h.device.type) if torch.is_autocast_enabled(h.device.type) else self.wte.dtype
        return h.flatten(0, 1).to(low), self.wte, targets.flatten()

    @staticmethod
    def head_chunk(device: torch.device) -> int:
        return 512 if device.type == "cpu" else 4096  # rows: a cache's worth on a CPU, 0.5 GB of logits on a GPU

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
        Raises BadInput where a parameter has no counterpart, here or there, or another shape."""
        routing, theirs = self.routing_names(), any(".query." in name for name in state)
        if theirs and not routing:
            raise BadInput(f"{self.config.arch} cannot start from {arch}: it would drop the depth routes")
        for name, p in self.named_parameters():
            if name in routing and (not theirs or not p.requires_grad):
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
        """Names of the queries and key-norm gains."""
        return {f"{m}.{p}" for m, module in self.named_modules() if isinstance(module, Read)
                for p, _ in module.named_parameters()}

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
    print(f"{'arm':10}" + "".join(f"{s:>14}" for s in scales) + "   idea")
    for name, arm in ARMS.items():
        with torch.device("meta"):
            counts = [GPT(GPTConfig.from_scale(s, name)).count()["total"] for s in scales]
        print(f"{name:10}" + "".join(f"{n:14,}" for n in counts) + f"   {arm.idea}")


if __name__ == "__main__":
    main()
