"""The whole model: a Pre-Norm decoder whose sub-layers read a learned mixture over depth, and its arms.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig.from_scale("S", "rd"))     # logits = model(idx); _, loss = model(idx, targets)
    python model.py                                  # the arms and their exact parameter counts

First the method: the shape, what a depth read is, the transformer. Then the rivals, each with its source. Last the
table ARMS: an ablation of your own is one entry there, plus the few lines that are its idea. The command line of
train.py, the tests, the pairing and the statistics take it from there. Needs torch and route_kernel.py alone.

Dimension letters: B batch, T tokens of context, N = B * T, d width, L layers, H heads, V vocabulary,
K sources of a read, R reads made in one pass.
"""
from __future__ import annotations

import dataclasses
import difflib
import hashlib
import math
import os
import sys
import typing
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from route_kernel import Depth, choose_backend, inverse_rms

# ---------------------------------------------------------------------------------------------------------
# The shape

# The paper's Table 4 and section 4. `nano` shows the whole mechanism on a laptop: four blocks of two layers.
SCALES: dict[str, dict] = {
    "S": dict(n_layer=16, n_embd=576, n_head=36, block_layers=4, context=1024, vocab_size=32768),
    "M": dict(n_layer=24, n_embd=832, n_head=52, block_layers=4, context=1024, vocab_size=32768),
    "nano": dict(n_layer=8, n_embd=128, n_head=8, block_layers=2, context=256, vocab_size=4096),
}


def setting(default, help: str, word: str | None = None, least=None, most=math.inf, choices=None):
    """A field of GPTConfig, declared once: train.py makes its flag, its bounds, its word in a run's name, its line in
    config.json and its part in resuming and pairing out of this."""
    metadata = dict(help=help, word=word, least=least, most=most, choices=choices)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class GPTConfig:
    """Shape and arm of a model. Raises ValueError, a line for every setting that cannot be."""

    arch: str = setting("rd", "arm of the table in model.py, with its options: mhar:heads=4")
    context: int = setting(1024, "tokens a sequence", "context", least=1)
    n_layer: int = setting(16, "layers", "layers", least=1)
    n_embd: int = setting(576, "width", "width", least=1)
    n_head: int = setting(36, "heads", "heads", least=1)
    block_layers: int = setting(4, "layers per residual block", "block", least=1)
    mlp_ratio: int = setting(5, "hidden width of the SwiGLU MLP over the width", "mlp", least=1)
    eps: float = setting(1e-6, "of every RMSNorm, the routes' key norm included", "normeps", least=1e-12, most=1)
    rope_base: float = setting(10000.0, "base of the rotary embedding's wavelengths", "rope", least=1, most=1e12)
    init_std: float = setting(0.02, "of every matrix at its start; none is scaled by depth", "init", least=0, most=10)
    vocab_size: int = setting(32768, "entries of the vocabulary", least=1)
    residual_dtype: str | None = setting(None, "of the residual stream, in every arm [the compute dtype]", "residual",
                                         choices=("float32", "bfloat16"))
    backend: str = setting("auto", "how routes are computed, see route_kernel.py", "backend",
                           choices=("auto", "reference", "fused"))

    def __post_init__(self):
        problems = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            wrong = complaint(value, field)
            if wrong:
                problems.append(f"{field.name}={value!r} {wrong}")
        if isinstance(self.arch, str):
            try:
                arm = find_arm(self.arch)
            except ValueError as e:
                problems.append(str(e))
        if not problems:  # what follows compares settings that are sound by themselves
            problems = self.misfits(arm)
        if problems:
            raise ValueError("\n".join(problems))

    def misfits(self, arm: Arm) -> list[str]:
        """What is wrong between settings that are each possible."""
        d, found = self.n_embd, []
        if d % (2 * self.n_head):
            fitting = [h for h in range(1, d + 1) if d % (2 * h) == 0]
            near = min(fitting, key=lambda h: abs(h - self.n_head), default="none, n_embd is odd")
            found.append(f"n_embd={d} is not divisible by n_head={self.n_head} into heads of an even width, which RoPE "
                         f"needs; nearest n_head: {near}")
        if d % arm.heads:
            found.append(f"--arch={self.arch}: heads={arm.heads} must divide n_embd={d}")
        if arm.rank > d and "rank=" in self.arch:  # the table's own rank gives way to a small width
            found.append(f"--arch={self.arch}: rank={arm.rank} must not exceed n_embd={d}")
        if self.backend == "fused" and not arm.fused:
            found.append(f"--arch={self.arch} has no fused path: use --backend=reference, or auto, which takes it")
        return found

    @classmethod
    def from_scale(cls, scale: str, arch: str = "rd", **overrides) -> GPTConfig:
        """A scale of SCALES with any field overridden."""
        if scale not in SCALES:
            raise ValueError(f"--scale={scale}: no such scale{nearest(scale, SCALES)}. The scales: {', '.join(SCALES)}")
        return cls(**{**SCALES[scale], "arch": arch, **overrides})

    @classmethod
    def from_run(cls, config: dict) -> GPTConfig:
        """The model of a run's config.json, whatever else stands in it."""
        return cls(**{f.name: config[f.name] for f in dataclasses.fields(cls) if f.name in config})


def complaint(value, field: dataclasses.Field) -> str | None:
    """Why `value` cannot stand in `field`, or None where it can."""
    rules, kind = field.metadata, type(field.default)
    if rules["choices"]:
        fits = value is field.default or value in rules["choices"]
        return None if fits else f"must be {' or '.join(rules['choices'])}"
    if kind is bool:
        return None if isinstance(value, bool) else "must be true or false"
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else kind):
        return {str: "must be text", int: "must be a whole number", float: "must be a number"}[kind]
    if rules["least"] is not None and not rules["least"] <= value <= rules["most"]:
        most = f" and at most {rules['most']:g}" if rules["most"] < math.inf else ""
        return f"must be at least {rules['least']:g}{most}"
    return None


def nearest(word: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


# ---------------------------------------------------------------------------------------------------------
# Reading depth: `read` hands a sub-layer its normalised input, `write` takes its output, blocks end with `finish_block`


def wide(x: torch.Tensor) -> torch.Tensor:
    """x in float32, or as it is where it is wider."""
    return x if x.dtype == torch.float64 else x.float()


def rms_norm(x: torch.Tensor, gain: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x [..., d] of any float dtype, gain [d] or None: RMSNorm computed in float32, returned in x's dtype."""
    return F.rms_norm(wide(x), x.shape[-1:], gain, eps).to(x.dtype)


class Weights(typing.NamedTuple):
    """One mixture of a forward pass, as it is recorded."""

    layer: int  # L for the output
    read: str
    weights: torch.Tensor  # float32 [K, N], sources in order
    running: bool = False  # whether the last source is a block still being summed


class Mixer(nn.Module):
    """Parameters of one sub-layer that mix over depth.

    They do not enter the pairing of starting weights, and none is decayed, one rule for all arms (MUDDFormer's release
    decays all of its, mHC-lite's every tensor of two or more dimensions). A mixer sets its own starting values, all but
    those in `random`, which are drawn like any matrix, with that deviation."""

    random: dict[str, float] = {}
    names: tuple[str, ...] = ()  # of the mixtures that a pass records
    fused = True  # what it does is no work of the depth's kernels

    def __init__(self, c: GPTConfig, arm: Arm, k: int, feeds: tuple[str, ...]):
        """k: the sub-layer, 2l for layer l's attention, 2l + 1 for its MLP, 2L for the output. feeds: its reads."""
        super().__init__()
        self.eps, self.layer, self.feeds = c.eps, k // 2, feeds
        self.start(c, arm, k)

    def keep(self, record: list | None, weights: torch.Tensor, running: bool = False) -> None:
        """Append weights [..., R, K], a row for each of `names`, to `record`."""
        if record is not None:
            by_row = weights.detach().flatten(0, -3).permute(1, 2, 0)
            record += [Weights(self.layer, name, w, running) for name, w in zip(self.names, by_row)]


class Read(Mixer):
    """The parameters of one depth read: a query for each of its R mixtures, named by what that feeds and zero at the
    start, and one key-norm gain for all (paper, section 3; with nothing to feed, as in `plain`, neither)."""

    def start(self, c, arm, k):
        if not (arm.reads and (arm.depth.ends or 0 < k < 2 * c.n_layer)):
            self.feeds = ()
        width = min(arm.rank or c.n_embd, c.n_embd)
        self.names = self.feeds
        if arm.heads > 1:
            self.names = tuple(f"{feed}{i}" for feed in self.feeds for i in range(arm.heads))
        self.query = nn.ParameterDict()
        for feed in self.feeds:  # one by one: a ParameterDict that is given a dict sorts its keys
            self.query[feed] = nn.Parameter(torch.zeros(width), requires_grad=feed not in arm.frozen)
        self.key_gain = nn.Parameter(torch.ones(width)) if self.feeds and not arm.rank else None

    def forward(self, feeds: tuple[str, ...] = ()) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(queries [R, d], key gain [d] or None) in float32, of all reads or of those in `feeds`, in that order."""
        return torch.stack([self.query[feed] for feed in feeds or self.feeds]), self.key_gain


class Routes(Depth):
    """route_kernel's Depth, with blocks of `block_layers` layers or, `sources="full"`, of one sub-layer.

    What others ask of a depth is declared here, never guessed from its class."""

    ends = True  # the first sub-layer and the output read too
    softmax = True  # weights are distributions over the sources: they have an entropy, and a distance
    fused = True  # all of it can run in the fused kernels (or there is nothing to run)
    whole_layers = False  # torch.compile takes a layer whole; here fused reads stand between its products

    def __init__(self, x: torch.Tensor, c: GPTConfig, arm: Arm, record: list | None):
        backend, _ = choose_backend(c.backend if arm.fused else "reference", x.device)
        super().__init__(x, backend=backend, eps=c.eps, record=None if record is None else [])
        self.arm, self.full = arm, arm.sources == "full"
        self.kept, self.past, self.parameters = record, [], {}

    def read(self, read: Read, out_gain: torch.Tensor | None, ahead: Read | None = None, last: bool = False,
             feeds: tuple[str, ...] = ()) -> tuple[torch.Tensor, ...]:
        """The mixtures [..., d] that `read` (or its part `feeds`) selects, normalised with out_gain [d] if given.

        ahead: the read to come after the next write, which this pass over the sources may begin; it changes no result.
        last: no read follows this one."""
        begun = None if ahead is None else self.of(ahead)
        hs = super().read(*self.of(read, feeds), out_gain, begun, last)
        if self.kept is not None:
            running = not last and self.partial is not None
            named = zip(feeds or read.feeds, self.record.pop())
            self.kept += [Weights(read.layer, name, w, running) for name, w in named]
        return hs

    def of(self, read: Read, feeds: tuple[str, ...] = ()):
        """The parameters of a read, made once: it is by them that a read begun ahead is known again."""
        if (read, feeds) not in self.parameters:
            self.parameters[read, feeds] = read(feeds)
        return self.parameters[read, feeds]

    def write(self, out: torch.Tensor) -> None:
        super().write(out)
        if self.full:
            self.finish_block()


class Stream:
    """The ordinary residual stream behind the same interface: every read is the stream itself."""

    ends, softmax, fused, whole_layers = False, False, True, True

    def __init__(self, x: torch.Tensor, c: GPTConfig, arm: Arm, record: list | None):
        self.x, self.eps, self.kept, self.past = x, c.eps, record, []

    def read(self, read: Mixer, out_gain: torch.Tensor, ahead=None, last: bool = False) -> tuple[torch.Tensor, ...]:
        return (rms_norm(self.x, out_gain, self.eps),)

    def write(self, out: torch.Tensor) -> None:
        self.x = self.x + out.to(self.x.dtype)

    def finish_block(self) -> None:
        pass


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
        self.attn_read = arm.mixer(c, arm, 2 * l, arm.reads)
        self.mlp_read = arm.mixer(c, arm, 2 * l + 1, ("mlp",))
        self.values = arm.values and arm.values(c, arm, 2 * l, arm.reads)
        self.feeds = arm.serving()

    def forward(self, depth: Routes | Stream, rope: torch.Tensor) -> None:
        if self.combine is None:
            hs = depth.read(self.attn_read, self.attn_norm, ahead=self.mlp_read)
        else:
            joined = self.combine(depth.read(self.attn_read, None, ahead=self.mlp_read))
            hs = (rms_norm(joined, self.attn_norm, self.eps),)
        depth.write(self.attention(hs, rope, depth))
        (h,) = depth.read(self.mlp_read, self.mlp_norm)
        depth.write(self.mlp(h))

    def attention(self, hs: tuple[torch.Tensor, ...], rope: torch.Tensor, depth: Routes | Stream) -> torch.Tensor:
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


def nll_of_rows(h: torch.Tensor, low: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """NLL [n] of targets [n] under the head low [V, d], and the softmax as numerators [n, V] and sums [n, 1]: float32.
    h [n, d] in low's dtype."""
    logits = (h @ low.t()).float()
    logits.sub_(logits.amax(-1, keepdim=True))
    of_target = logits.gather(1, targets[:, None])
    powers = logits.exp_()
    total = powers.sum(-1, keepdim=True)
    return (total.log() - of_target).squeeze(1), powers, total


def head_chunk(device: torch.device) -> int:
    """Rows of logits held at once: at 32,768 entries 64 MB or 256 MB of float32."""
    return 512 if device.type == "cpu" else 2048


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
            nll, powers, sums = nll_of_rows(rows, low, t)
            total += nll.sum(dtype=torch.float64)
            if want_h or want_w:  # d mean NLL / d logits = (softmax - onehot) / N
                grad = powers.mul_((N * sums).reciprocal_())
                grad = grad.scatter_add_(1, t[:, None], torch.full_like(sums, -1 / N)).to(h.dtype)
            if want_h:
                torch.mm(grad, low, out=dh[i:i + chunk])
            if want_w and grad.dtype == dw.dtype:
                dw.addmm_(grad.t(), rows)
            elif want_w:
                dw += grad.t() @ rows
        ctx.save_for_backward(dh, dw)
        return (total / N).float()

    @staticmethod
    def backward(ctx, g):
        dh, dw = ctx.saved_tensors
        if dh is not None:
            dh = (wide(dh) * g).to(dh.dtype)  # g is 1 / micro-batches, a third say: not to be rounded to bfloat16
        if dw is not None:
            dw = dw * g
        return dh, dw, None, None


class GPT(nn.Module):
    """Decoder-only transformer with the depth routes of `config.arch`.

    `model(idx)` gives logits [B, T, V] float32; `model(idx, targets)` gives (None, mean NLL), a float32 scalar in nats.
    idx and targets: int64 [B, T], T at most `config.context`. Under autocast the products run in its dtype.
    Initial values depend on `seed` and on each parameter's name alone, so that all arms of a pair start from the
    same parent weights, and are the same bits on every CPU.
    """

    memory = None  # what a pass reads and writes, where an experiment replaces the arm's own

    def __init__(self, config: GPTConfig, seed: int | None = 0):
        """seed: of the starting weights; None leaves them unset, for weights to be loaded."""
        super().__init__()
        self.config = c = config
        self.arm = arm = find_arm(c.arch)
        self.wte = nn.Parameter(torch.empty(c.vocab_size, c.n_embd))  # tied: also the head
        self.layers = nn.ModuleList(Layer(c, arm, l) for l in range(c.n_layer))
        self.out_read = arm.mixer(c, arm, 2 * c.n_layer, ("out",))
        self.out_norm = nn.Parameter(torch.ones(c.n_embd))
        self.register_buffer("rope", rope_table(c.context, c.n_embd // c.n_head, c.rope_base), persistent=False)
        if seed is not None and self.wte.device.type != "meta":
            self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """N(0, init_std) for every matrix, each from a generator of its own; gains one, queries zero."""
        deviations = {name: self.config.init_std for name, kind in self.kinds().items() if kind == "matrices"}
        for prefix, mixer in self.mixers().items():
            deviations.update({f"{prefix}.{name}": std for name, std in mixer.random.items()})
        for name, std in deviations.items():
            digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            p = self.get_parameter(name)
            p.copy_((std * portable_normal(p.numel(), generator)).view(p.shape))

    def hidden(self, idx: torch.Tensor, record: list | None = None) -> torch.Tensor:
        """The normalised state [B, T, d] that the head reads. `record` collects the Weights of every mixture over
        depth, in order: attention and MLP of each layer, then the output, where the arm has them."""
        c = self.config
        if idx.shape[-1] > c.context:
            raise ValueError(f"{idx.shape[-1]} tokens do not fit the context of {c.context}")
        # cast once, so that every arm, plain included, adds its residuals in the same precision
        dtype = getattr(torch, c.residual_dtype) if c.residual_dtype else self.compute_dtype()
        if dtype != self.wte.dtype and not torch.is_autocast_enabled(idx.device.type):
            raise ValueError(f"residual_dtype={c.residual_dtype} beside products in another dtype needs autocast")
        x = F.embedding(idx, self.wte).to(dtype)
        depth = (self.memory or self.arm.depth)(x, c, self.arm, record)
        for l, layer in enumerate(self.layers):
            if l % c.block_layers == 0:
                depth.finish_block()
            layer(depth, self.rope)
        depth.finish_block()
        (h,) = depth.read(self.out_read, self.out_norm, last=True)
        return h

    def compute_dtype(self) -> torch.dtype:
        """Autocast's where it is on, else that of the parameters."""
        device = self.wte.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.wte.dtype

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, record: list | None = None):
        h = self.hidden(idx, record)
        if targets is None:
            return F.linear(h, self.wte).float()
        rows = h.flatten(0, 1).to(self.compute_dtype())
        with torch.autocast(h.device.type, enabled=False):
            return None, HeadLoss.apply(rows, self.wte, targets.flatten(), head_chunk(h.device))

    @torch.no_grad()
    def token_nll(self, idx: torch.Tensor, targets: torch.Tensor, record: list | None = None) -> torch.Tensor:
        """NLL of every target in nats, float32 [B, T]."""
        rows, chunk = self.hidden(idx, record).flatten(0, 1).to(self.compute_dtype()), head_chunk(idx.device)
        with torch.autocast(idx.device.type, enabled=False):
            low = self.wte.to(rows.dtype)
            pairs = zip(rows.split(chunk), targets.flatten().split(chunk))
            return torch.cat([nll_of_rows(h, low, t)[0] for h, t in pairs]).view(targets.shape)

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, temperature: float = 1.0, top_k: int | None = None,
                 generator: torch.Generator | None = None) -> torch.Tensor:
        """Continue idx [B, T] by `max_new_tokens`, each drawn given the last `context` tokens; temperature 0 takes the
        likeliest. Returns [B, T + max_new_tokens]. The same generator state gives the same tokens."""
        if not temperature >= 0:
            raise ValueError(f"temperature={temperature} must be at least 0")
        for _ in range(max_new_tokens):
            h = self.hidden(idx[:, -self.config.context:])[:, -1]
            logits = F.linear(h, self.wte).float()
            if temperature < 1e-30:  # float32 would divide by nothing, and the likeliest is all but certain
                new = logits.argmax(-1, keepdim=True)
            else:
                if top_k is not None:
                    kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                    logits = logits.masked_fill(logits < kth, -math.inf)
                below = logits - logits.amax(-1, keepdim=True)  # so that a cold temperature overflows nothing
                new = torch.multinomial(F.softmax(below / temperature, dim=-1), 1, generator=generator)
            idx = torch.cat((idx, new), dim=1)
        return idx

    @torch.no_grad()
    def load_from(self, state: dict[str, torch.Tensor]) -> list[str]:
        """Take over the parameters in `state`, of a model of any arm; returns the names of those that found none and
        keep their start. A query goes by what it feeds: `rd` from a trained `block` is the parent, bit for bit.

        Whether this model then computes the other's function is for `logits_apart` to say. Frozen queries stay as
        they are. Raises ValueError where shapes differ."""
        kept = []
        for name, p in self.named_parameters():
            source, (prefix, _, feeds) = name, name.rpartition(".")
            if name not in state and prefix.endswith(".query"):
                others = [n for n in state if n.startswith(prefix + ".")]
                source = next((n for n in others if set(feeds) & set(n[len(prefix) + 1:])), name)
            if source not in state or not p.requires_grad:
                kept.append(name)
            elif state[source].shape != p.shape:
                theirs = tuple(state[source].shape)
                raise ValueError(f"{name} is {tuple(p.shape)} here and {theirs} in the model to start from")
            else:
                p.copy_(state[source])
        return kept

    # -- what the optimiser and the log need to know -----------------------------------------------------------

    def mixers(self) -> dict[str, Mixer]:
        return {name: module for name, module in self.named_modules() if isinstance(module, Mixer)}

    def routing_names(self) -> set[str]:
        """Names of all parameters that mix over depth: queries, key-norm gains, and whatever else a Mixer holds."""
        return {f"{m}.{name}" for m, mixer in self.mixers().items() for name, _ in mixer.named_parameters()}

    def kinds(self) -> dict[str, str]:
        """The kind of every parameter: `matrices`, `queries` of a depth read, or `gains`, which is all else."""
        routing, kinds = self.routing_names(), {}
        for name, p in self.named_parameters():
            kinds[name] = "matrices" if p.dim() >= 2 and name not in routing else "gains"
            if ".query." in name:
                kinds[name] = "queries"
        return kinds

    def param_groups(self, lr: float, weight_decay: float, route_lr_mult: float = 1.0) -> list[dict]:
        """AdamW groups: decay on matrices (the tied embedding included), none on one-dimensional or routing
        parameters. Route queries learn at `lr * route_lr_mult`. Frozen parameters are in no group."""
        groups, kinds = [], self.kinds()
        for kind in ("matrices", "gains", "queries"):
            named = {name: p for name, p in self.named_parameters() if kinds[name] == kind and p.requires_grad}
            mult = route_lr_mult if kind == "queries" else 1.0
            decay = weight_decay if kind == "matrices" else 0.0
            if named:
                groups.append(dict(kind=kind, names=list(named), params=list(named.values()), lr=lr * mult, mult=mult,
                                   weight_decay=decay))
        return groups

    def count(self) -> dict[str, int]:
        """Parameters: total, of the routes, frozen; and FLOPs of one training token, forward and backward.

        FLOPs: 6 for each weight of a matrix product (the head included, the embedding's look-up not) and
        6 L T d for causal attention's two products; routes, norms and activations are left out.
        """
        c, kinds, routing = self.config, self.kinds(), self.routing_names()
        sizes = {name: p.numel() for name, p in self.named_parameters()}
        matrices = sum(n for name, n in sizes.items() if kinds[name] == "matrices")
        return dict(total=sum(sizes.values()), routing=sum(sizes[name] for name in routing),
                    frozen=sum(p.numel() for p in self.parameters() if not p.requires_grad),
                    flops_per_token=6 * matrices + 6 * c.n_layer * c.context * c.n_embd)


@torch.no_grad()
def logits_apart(one: tuple[GPTConfig, dict], other: tuple[GPTConfig, dict]) -> float:
    """How far two models, each (config, state_dict), are from computing the same function: the norm of the difference
    of their logits over that of the first one's, on a few random tokens, in float64 and without the eps of the norms,
    by which a uniform mixture differs from the stream that it is a share of."""
    context = min(one[0].context, other[0].context, 32)
    vocabulary = min(one[0].vocab_size, other[0].vocab_size)
    idx = torch.randint(vocabulary, (1, context), generator=torch.Generator().manual_seed(0))
    logits = []
    for config, state in (one, other):
        bare = dataclasses.replace(config, backend="reference", residual_dtype=None, eps=1e-12)
        model = GPT(bare, seed=None).double()
        model.load_state_dict(state)
        logits.append(model(idx))
    if logits[0].shape != logits[1].shape:
        return math.inf
    return ((logits[0] - logits[1]).norm() / logits[0].norm()).item()


def portable_normal(n: int, generator: torch.Generator) -> torch.Tensor:
    """n standard normal numbers, float64, the same bits on every CPU: Marsaglia's polar method out of operations that
    IEEE 754 rounds exactly. (torch's normal_ takes logarithms and cosines from vector units, which differ in the last
    bit from one CPU to another.)"""
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


# ---------------------------------------------------------------------------------------------------------
# The rivals: other ways to reach for earlier layers, each with its source. The method itself ends above


def lean(function, *args):
    """function(*args), out of autocast; for the backward it keeps `args` alone and computes again what lies between.
    Mixing over depth keeps K sources by reference so, where its intermediates would be K float32 copies a read."""
    with torch.autocast(args[-1].device.type, enabled=False):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def weighted_sum(weights: torch.Tensor, sources: typing.Sequence[torch.Tensor]) -> torch.Tensor:
    """sum_i weights[..., i] * sources[i] in float32: weights [..., K], each source [..., d]."""
    return sum(w[..., None] * wide(s) for w, s in zip(weights.unbind(-1), sources))


class SlicedRoutes(Routes):
    """Routes whose query is cut, in plain torch: into heads that each mix their own slice (Multi-Head AttnRes,
    2607.27230), or down to the last `rank` coordinates (sliced Low-Rank AttnRes, 2607.09694; jon123boss/LR-AttnRes).

    The release of the former has 8 heads over every sub-layer's output; here 2 over blocks are the default, for they
    are two routes at no parameter, and `mhar:heads=8:sources=full` is the release's form. The latter's repository
    divides the sum of a block by its number of sub-layers; here a block is the sum, as in every other arm."""

    fused = False

    def read(self, read, out_gain, ahead=None, last=False, feeds=()):
        queries, key_gain = self.of(read, feeds)
        h, weights = lean(self.mix, queries[0], key_gain, out_gain, *self.sources)
        read.keep(self.kept, weights, not last and self.partial is not None)
        return (h,)

    def mix(self, query, key_gain, out_gain, *sources):
        """query [r], key_gain [r] or None. Returns the normalised mixture [..., d] and weights [..., heads, K]."""
        w = query if key_gain is None else query * key_gain
        heads, scores = self.arm.heads, []
        wides = [wide(s) for s in sources]  # one float32 copy of each, for its key and for the mixture
        for key in (s[..., -len(w):] for s in wides):
            scale = inverse_rms(key, w.new_full((), self.eps))[..., None]  # the score is that of the normalised key
            scores.append((key * w).unflatten(-1, (heads, -1)).sum(-1) * scale)
        weights = torch.stack(scores, dim=-1).softmax(-1)
        mixture = weighted_sum(weights, [s.unflatten(-1, (heads, -1)) for s in wides]).flatten(-2)
        return rms_norm(mixture, out_gain, self.eps).to(sources[0].dtype), weights


class DeltaRoutes(Routes):
    """Delta AttnRes (2605.18855): the ordinary stream, plus a mixture of the embedding and what was added to it since,
    by each sub-layer or in blocks: then the block being summed is no source. This follows the paper; its release
    (wdlctc/delta-attention-residuals-code) starts queries at random, and its blocks push alternating sums instead of
    increments."""

    ends = False

    def __init__(self, x: torch.Tensor, *rest):
        super().__init__(x, *rest)
        self.x, self.held = x, None

    def read(self, read, out_gain, ahead=None, last=False, feeds=()):
        h = wide(self.x)
        if read.feeds:
            h = h + wide(super().read(read, None)[0])
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


class DenseStream(Stream):
    """A stream that is replaced, before every layer but the first and before the output, by mixtures of its history:
    the embedding and all layers' outputs, each as it left its layer (DenseFormer, MUDDFormer)."""

    fused, whole_layers = False, False

    def read(self, mixer, out_gain, ahead=None, last=False):
        if not mixer.names:
            self.past = self.past or [self.x]
            return super().read(mixer, out_gain) * max(1, len(mixer.feeds))
        self.past = [*self.past, self.x]
        *mixed, weights = lean(mixer.mix, *self.past)
        mixer.keep(self.kept, weights)
        self.x = mixed[-1]
        return tuple(rms_norm(h, gain, self.eps) for h, gain in zip(mixed, (out_gain, *mixer.gains.values())))


class StaticWeights(Mixer):
    """DenseFormer (2402.02622; epfml/DenseFormer): one learned weight a source, at first all on the newest."""

    def start(self, c, arm, k):
        self.gains = nn.ParameterDict()
        if k and k % 2 == 0:  # none before an MLP and in layer 0
            self.names = self.feeds if k == 2 * c.n_layer else (*self.feeds, "stream")
            self.static = nn.Parameter(torch.zeros(len(self.names), k // 2 + 1))
            nn.init.ones_(self.static[:, -1])

    def weights(self, x: torch.Tensor) -> torch.Tensor:  # x [..., d], the newest source: weights [..., ways, K]
        return self.static.expand(*x.shape[:-1], -1, -1)

    def mix(self, *history):
        dtype, history = history[0].dtype, [wide(h) for h in history]
        weights = self.weights(history[-1])
        return *(weighted_sum(w, history).to(dtype) for w in weights.unbind(-2)), weights


class DynamicWeights(StaticWeights):
    """MUDDFormer (2502.12170; Caiyun-AI/MUDDFormer): to these a small MLP on the newest output adds its own at every
    token, a way for each read, through a norm of its own, and one for the stream. FFN widths are not re-allocated."""

    def start(self, c, arm, k):
        super().start(c, arm, k)
        if self.names:
            n = self.static.numel()
            widen = 4 if k == 2 * c.n_layer else 1
            hidden = (n * widen // 64 + 1) * 64
            self.w1, self.random = nn.Parameter(torch.empty(hidden, c.n_embd)), {"w1": c.n_embd ** -0.5}
            self.w2 = nn.Parameter(torch.zeros(n, hidden))
            for feed in self.feeds[1:]:
                self.gains[feed] = nn.Parameter(torch.ones(c.n_embd))

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.gelu(F.linear(rms_norm(x, None, self.eps), self.w1))
        return F.linear(hidden, self.w2).unflatten(-1, self.static.shape) + self.static


class Streams(Stream):
    """n copies of the stream; a sub-layer reads one mixture of them and writes to all, while they mix (2409.19606)."""

    fused, whole_layers = False, False

    def __init__(self, x: torch.Tensor, *rest):
        super().__init__(x[..., None, :].expand(*x.shape[:-1], HyperWeights.n, -1), *rest)

    def read(self, mixer, out_gain, ahead=None, last=False):
        if last:
            return (rms_norm(wide(self.x).sum(-2), out_gain, self.eps).to(self.x.dtype),)
        h, pre, self.keep, self.post = lean(mixer.mix, self.x)
        mixer.keep(self.kept, pre[..., None, :])
        return (rms_norm(h, out_gain, self.eps).to(self.x.dtype),)

    def write(self, out: torch.Tensor) -> None:
        def mix(x, keep, post, out):
            return (keep.mT @ wide(x) + post[..., None] * wide(out)[..., None, :]).to(x.dtype)
        self.x = lean(mix, self.x, self.keep, self.post, out)


class HyperWeights(Mixer):
    """Hyper-Connections (2409.19606; lucidrains/hyper-connections, whose RMSNorm this takes for the paper's LayerNorm):
    weights static + scale * tanh(norm(H) W), at first the ordinary stream n times over. The paper starts each
    sub-layer's output projection smaller by a power of sqrt(n); here they start as in every other arm."""

    n = 4

    def start(self, c, arm, k):
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
    """mHC (2512.24880; FFTYYY/mhc-lite): weights from all streams at once; those that read and write are positive, and
    a doubly stochastic matrix mixes the streams, so that their sum passes unchanged. The 20 rounds of Sinkhorn are 40
    small launches a sub-layer, forward and again in the backward: on a GPU they bind."""

    def create(self, d: int, n: int, own: torch.Tensor) -> None:
        self.norm, self.phi = nn.Parameter(torch.ones(n * d)), nn.Parameter(torch.zeros(n * d, 2 * n + n * n))
        apart = -8 * (1 - torch.eye(n))
        self.bias = nn.Parameter(torch.cat((2 * own - 1, 2 * own - 1, apart.flatten())))  # read, write, mix
        self.scale = nn.Parameter(torch.full((3,), 0.01))

    def weights(self, streams):
        z, sizes = rms_norm(streams.flatten(-2), self.norm, self.eps) @ self.phi, (self.n, self.n, self.n ** 2)
        pre, post, keep = (a * x + b for a, x, b in zip(self.scale, z.split(sizes, dim=-1), self.bias.split(sizes)))
        keep = keep.unflatten(-1, (self.n, self.n))
        for _ in range(20):  # Sinkhorn, in logarithms
            keep = keep.log_softmax(-2).log_softmax(-1)
        return pre.sigmoid(), keep.exp(), 2 * post.sigmoid()


class ValueResidual(Mixer):
    """ResFormer (2410.17897; Zcchill/Value-Residual-Learning): every later layer's V is half layer 0's, as in the
    release, which has no learnable form. `learnable` is ours: one weight a layer, and V a convex sum by it."""

    def start(self, c, arm, k):
        self.weight = nn.Parameter(torch.tensor(0.5)) if arm.learnable and k else 0.5

    def forward(self, q, k, v, depth):
        depth.past = depth.past or [v]  # layer 0's own: half of it and half of it
        return (self.weight * depth.past[0] + (1 - self.weight) * v).to(v.dtype)


class DepthAttention(Mixer):
    """Depth-Attention (2606.05014; hyq718/Depth-Attention): at each token and head the query attends to its own layer
    and two earlier ones, and V is the mixture. Its authors normalise Q and K, which no arm here does."""

    fused = False

    def start(self, c, arm, k):
        self.names = tuple(f"head{i}" for i in range(c.n_head))
        self.kept = self.layer % max(1, c.n_layer // 2) == 0  # layers 0 and L/2 are seen from above

    def forward(self, q, k, v, depth):  # [B, T, heads, head_dim]; RoPE turns q and k alike and leaves their product
        layers = [*depth.past, (k, v)]
        scores = torch.stack([(wide(q) * wide(key)).sum(-1) for key, _ in layers], dim=-1)
        weights = (scores / math.sqrt(q.shape[-1])).softmax(-1)
        self.keep(depth.kept, weights)
        v = weighted_sum(weights, [value for _, value in layers]).to(v.dtype)
        if self.kept:
            depth.past = [*depth.past, (k, v)]
        return v


# ---------------------------------------------------------------------------------------------------------
# The arms


def mean(mixtures: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return sum(mixtures) / len(mixtures)


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
    options: tuple[str, ...] = ()  # which of these `arm:option=value` may set:
    sources: str = "block"  # or full: every sub-layer's output is a source of its own
    heads: int = 1  # slices of a query
    rank: int = 0  # coordinates of a key, at most d; 0: the whole width and a gain
    learnable: bool = False  # the value residual's weights

    @property
    def fused(self) -> bool:
        """Whether all its mixing over depth can run in the fused kernels, or it has none."""
        return self.depth.fused and (self.values is None or self.values.fused)

    def serving(self) -> tuple[int, int, int]:
        """Which of the mixtures feeds Q, which K, which V."""
        if self.combine is not None or not self.reads:
            return 0, 0, 0
        return tuple(next(i for i, read in enumerate(self.reads) if role in read) for role in "qkv")


stream = dict(reads=(), depth=Stream)
dense = dict(depth=DenseStream)
mudd = dict(mixer=DynamicWeights, **dense)
streams = dict(reads=(), depth=Streams)
heads, rank = (dict(depth=SlicedRoutes, options=(option, "sources")) for option in ("heads", "rank"))

ARMS: dict[str, Arm] = {
    # The paper, sections 3 and 4 (its parent: Block AttnRes, arXiv 2603.15031), and the groupings
    "plain": Arm("Pre-Norm without depth routes", **stream),
    "block": Arm("Block AttnRes, the parent: one read feeds Q, K and V"),
    "rd": Arm("RD-AttnRes: Q and K share a read, V has its own", reads=("qk", "v")),
    "tied": Arm("control: one query serves the QK and the V read, so it is the parent"),
    # Symmetric in two queries that both start at zero: they get equal gradients and stay equal for ever, so this
    # arm is the parent up to round-off. It is the paper's control; q_kv, k_qv and q_k_v test what it cannot.
    "average": Arm("control: two reads, averaged before the projections", reads=("qk", "v"), combine=mean),
    "frozen_v": Arm("control: the V query stays at zero, a uniform V read", reads=("qk", "v"), frozen=("v",)),
    "q_kv": Arm("grouping: Q alone, K and V share", reads=("q", "kv")),
    "k_qv": Arm("grouping: K alone, Q and V share", reads=("k", "qv")),
    "q_k_v": Arm("grouping: three reads", reads=("q", "k", "v")),
    # Rivals; the source of each stands with its class
    "full": Arm("Full AttnRes (2603.15031): every sub-layer's output is a source", sources="full"),
    "full_rd": Arm("Full AttnRes with a V read of its own", reads=("qk", "v"), sources="full"),
    "mhar": Arm("Multi-Head AttnRes: a softmax for each slice of the width", heads=2, **heads),
    "lowrank": Arm("sliced Low-Rank AttnRes: keys are the last coordinates", rank=64, **rank),
    "delta": Arm("Delta AttnRes: the stream plus a read of its increments", depth=DeltaRoutes, sources="full"),
    "delta_block": Arm("Delta AttnRes over completed blocks' increments", depth=DeltaRoutes),
    "denseformer": Arm("DenseFormer: static averages of all layers' outputs", reads=(), mixer=StaticWeights, **dense),
    "resformer": Arm("Value Residual: V is half layer 0's", values=ValueResidual, options=("learnable",), **stream),
    "block_resformer": Arm("Block AttnRes with Value Residual", values=ValueResidual, options=("learnable",)),
    "depth_attention": Arm("Depth-Attention: V attends to earlier layers'", values=DepthAttention, **stream),
    "mudd": Arm("MUDDFormer: dynamic averages for Q, K, V and the stream", reads=("q", "k", "v"), **mudd),
    "mudd_rd": Arm("MUDDFormer with one way for Q and K, matched to RD", reads=("qk", "v"), **mudd),
    "hc": Arm("Hyper-Connections, 4 streams", mixer=HyperWeights, **streams),
    "mhc": Arm("manifold-constrained Hyper-Connections, 4 streams", mixer=ManifoldWeights, **streams),
}
CHOICES = {  # values of an option by their text; the others are whole numbers
    "sources": {"block": "block", "full": "full"},
    "learnable": {"false": False, "true": True},
}


def find_arm(spec: str) -> Arm:
    """The arm of `name` or `name:option=value[:option=value]`. Raises ValueError with the nearest name."""
    if not isinstance(spec, str):
        raise ValueError(f"arch={spec!r} must be text")
    name, *words = spec.split(":")
    if name not in ARMS:
        raise ValueError(f"--arch={spec}: no such arm{nearest(name, ARMS) or '.'} The arms: {', '.join(ARMS)}")
    arm, values = ARMS[name], {}
    for word in words:
        key, _, text = word.partition("=")
        known = CHOICES.get(key)
        if key not in arm.options:
            problem = f"no such option {key!r}{nearest(key, arm.options)}"
        elif key in values:
            problem = f"{key} is given twice"
        elif known:
            problem = None if text in known else f"{key} wants {' or '.join(known)}"
        else:
            whole = text.isascii() and text.isdigit() and int(text) > 0
            problem = None if whole else f"{key} wants a whole number of at least 1"
        if problem:
            raise ValueError(f"--arch={spec}: {problem} ({name} takes {', '.join(arm.options) or 'none'})")
        values[key] = known[text] if known else int(text)
    return dataclasses.replace(arm, **values)


def canonical(spec: str) -> str:
    """The one name of an arm: its options in the table's order, without those at their default."""
    name, made = spec.split(":")[0], find_arm(spec)
    given = ((key, getattr(made, key)) for key in made.options if getattr(made, key) != getattr(ARMS[name], key))
    return ":".join([name, *(f"{key}={value}".lower() for key, value in given)])


def main() -> None:
    scales = ("S", "M", "nano")
    print(f"{'arm':16}" + "".join(f"{s:>14}" for s in scales) + "   idea")
    for name, arm in ARMS.items():
        with torch.device("meta"):
            counts = [GPT(GPTConfig.from_scale(s, name)).count()["total"] for s in scales]
        print(f"{name:16}" + "".join(f"{n:14,}" for n in counts) + f"   {arm.idea}")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
