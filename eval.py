"""Evaluate trained runs, look at what their depth routes do, and test what depends on it.

    python eval.py runs/S-rd-s123                                  # as training logged it, from the last checkpoint
    python eval.py runs/nano-block-s123 runs/nano-rd-s123          # several runs, one table; --by_position
    python eval.py runs/nano-rd-s123 --report                      # depth weights, entropy, JS: tables and a figure
    python eval.py runs/nano-rd-s123 --intervene=v:qk,v:uniform    # NLL with V reads changed; --layers=2-4, --by_layer
    python eval.py runs/nano-rd-s123 --compare_backends            # reference against fused routes
    python eval.py runs/nano-rd-s123 --sample="It is a truth"      # continue a prompt
    python eval.py runs/S-rd-s123 --split=test                     # for the last word only: nothing is chosen on it

--intervene takes a comma list of READ:FROM. READ is a read of the arm (qk, v, ...; mlp; out) or several of its reads
(qkv); FROM is another read (v:qk), uniform, source0 (the embedding; source-1 the newest), layer3 (the query of layer 3)
or run=FOLDER (the query of another run). swap exchanges the two attention reads. A query moves alone: key-norm gains stay.

Everything is stored in the run's folder: evaluations as eval/<split>-<step>.json and .npy, where stats.py finds them,
the rest beside them as report-, intervene-, position- and backends-<split>-<step>.json and .png.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import os
import re
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import GPT, GPTConfig, Routes, find_arm
from prepare import (BadInput, Failed, Progress, atomic_file, did_you_mean, flag, open_data, parse_flags, read_json,
                     run_script, write_json)
from route_kernel import Depth, choose_backend, route

# Dimension letters: B windows in a batch, T tokens of a window, L layers, K sources, R reads, N = B * T.
COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito's


def js_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence in nats between p and q, float32 [K, ...] summing to one over dim 0: [...]."""
    m = 0.5 * (p + q)
    kl = [torch.xlogy(a, a / m).nan_to_num_(0.0).sum(0) for a in (p, q)]  # 0 / 0 where a weight underflowed to 0
    return (0.5 * (kl[0] + kl[1])).clamp_min_(0.0)


def js_pair(model: GPT) -> tuple[int, int] | None:
    """Which of an attention's reads the JS divergence compares: those that feed K and V, or Q and K where K and V
    share one. None for an arm with one read. `average` feeds all three from its mean: its two reads are compared."""
    arm = find_arm(model.config.arch)
    if len(arm.reads) < 2 or not issubclass(arm.depth, Depth):  # or weights that are no distributions
        return None
    q, k, v = model.layers[0].feeds
    return (0, 1) if arm.combine else (k, v) if k != v else (q, k)


def source_count(c: GPTConfig, i: int) -> int:
    """Sources of read i, counted as in `record`: attention and MLP of each layer, then the output's."""
    l, mlp = divmod(i, 2)
    if find_arm(c.arch).sources == "full":
        return i + 1
    return 1 + l // c.block_layers + (mlp or l % c.block_layers > 0) if l < c.n_layer else 1 - -c.n_layer // c.block_layers


def slice_windows(data, split: str, context: int, eval_tokens: int | None) -> tuple[int, bool]:
    """(whole windows of `split` from token 0 that cover `eval_tokens`, or all; whether the split holds that many).
    Raises BadInput for a split with not even one window."""
    have = (data.meta["splits"][split]["tokens"] - 1) // context
    if have < 1:
        raise BadInput(f"{data.path}: the {split} split holds {data.meta['splits'][split]['tokens']} tokens, less than one "
                       f"window of {context} + 1: prepare more text or a larger --{split}_fraction, or lower --context")
    want = have if eval_tokens is None else max(1, eval_tokens // context)
    return min(want, have), want <= have


@torch.no_grad()
def evaluate(model: GPT, data, split: str, windows: int, batch: int, device: torch.device, autocast, token_bytes=None,
             rank: int = 0, ranks: int = 1, stop=lambda: False, label: str | None = None, observe=None) -> dict | None:
    """NLL over the first `windows` non-overlapping windows of `split`, `batch` at a time, shared among the ranks.

    `autocast` is a function returning the context to run under. Sums are float64, window by window. A CPU takes one window
    at a time whatever `batch` is, so that nothing depends on `batch` or `ranks`: a product's rounding follows its shape. Returns nll (nats), ppl, bits_per_byte,
    eval_tokens, js_mean, js, js_of_mean (per layer, nats) and window_nll, float64 [windows]; None when `stop()` said so.
    `observe(token_nll, record)` is called with every batch: NLL [B, T] and the weights [R, K, N] of each read.
    """
    T, pair, L = model.config.context, js_pair(model), model.config.n_layer
    tokens = data.tokens(split)
    token_bytes = data.token_bytes() if token_bytes is None else token_bytes
    nll = torch.zeros(windows, dtype=torch.float64)
    n_bytes = torch.zeros(1, dtype=torch.float64)
    js = torch.zeros(L, dtype=torch.float64)
    means = [torch.zeros(2, source_count(model.config, 2 * l), dtype=torch.float64) for l in range(L if pair else 0)]
    batch = 1 if device.type == "cpu" else batch
    mine = list(range(rank, windows, ranks))
    progress = Progress(label or f"evaluating {split}", len(mine) * T, "tokens") if rank == 0 else contextlib.nullcontext()
    with progress:
        for start in range(0, -(-windows // ranks), batch):  # the same number of rounds, and of stop() calls, on every rank
            if stop():
                return None
            index = mine[start:start + batch]
            if not index:
                continue
            ids = torch.from_numpy(np.stack([tokens[i * T:i * T + T + 1] for i in index]).astype(np.int64))
            x, y = ids[:, :-1].to(device), ids[:, 1:].to(device)
            record = [] if pair or observe else None
            with autocast():
                token_nll = model.token_nll(x, y, record)
            nll[index] = token_nll.double().mean(1).cpu()
            if observe:
                observe(token_nll, record or [])
            n_bytes += float(token_bytes[ids[:, 1:].numpy()].sum())
            for l in range(L if pair else 0):
                layer = [w.weights for w in record if w.layer == l]  # the attention's reads, then the MLP's
                weights = torch.stack([layer[i] for i in pair])
                js[l] += js_divergence(weights[0], weights[1]).sum(dtype=torch.float64).cpu()
                means[l] += weights.sum(-1, dtype=torch.float64).cpu()  # [2, K]
            if rank == 0:
                progress.update(len(index) * T)
    if ranks > 1:
        for s in (nll, n_bytes, js, *means):  # a rank that had no window takes part too
            moved = s.to(device)
            torch.distributed.all_reduce(moved)
            s.copy_(moved.cpu())
    n = windows * T
    mean = nll.mean().item()
    out = dict(nll=mean, ppl=math.exp(mean) if mean < 700 else None, eval_tokens=n, js_mean=None, js=None, js_of_mean=None,
               bits_per_byte=mean * n / (math.log(2) * n_bytes.item()) if n_bytes.item() else None,
               window_nll=nll.numpy())
    if pair:
        of_mean = [js_divergence(*(m / n)).item() for m in means]
        js = (js / n).tolist()
        out.update(js=js, js_of_mean=of_mean, js_mean=sum(js[1:]) / (L - 1) if L > 1 else None)
    return out


def store(folder: Path, result: dict, run: str, split: str, step: int, tokens: int, backend: str, fingerprint: str,
          path: Path | None = None) -> Path:
    """Write eval/<split>-<step>.json (or `path`) and .npy in a run's folder, the .npy first: the .json says both are whole."""
    path = path or folder / "eval" / f"{split}-{step:06d}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path.with_suffix(".npy")) as f:
        np.save(f, result["window_nll"])
    facts = {k: v for k, v in result.items() if k != "window_nll"}
    write_json(path, dict(run=run, split=split, step=step, tokens=tokens, windows=len(result["window_nll"]),
                          backend=backend, data_fingerprint=fingerprint, **facts))
    return path


# ---------------------------------------------------------------------------------------------------------
# The machine, and runs on disk


def pick_device(requested: str) -> torch.device:
    """The device to compute on. Raises BadInput when a GPU is there but cannot be used, instead of going slow."""
    if requested == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        try:
            torch.ones(1, device=device).add_(1).item()
        except RuntimeError as e:
            raise BadInput(f"the GPU {torch.cuda.get_device_name(device)} is here but cannot run this torch "
                           f"({str(e).splitlines()[0]}); install a torch built for it, or pass --device=cpu") from None
        torch.cuda.set_device(device)
        return device
    if os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidia0"):
        why = ("this torch is a CPU build" if torch.version.cuda is None
               else f"the driver is too old for CUDA {torch.version.cuda}, or another process blocks it")
        raise BadInput(f"an NVIDIA GPU is here but torch cannot use it: {why}; see the README's install table, "
                       "or pass --device=cpu")
    if requested == "cuda":
        raise BadInput("--device=cuda: no GPU is visible to torch")
    return torch.device("cpu")


def pick_dtype(requested: str, device: torch.device) -> tuple[str, str]:
    """(dtype of the products, why)."""
    if requested != "auto":
        return requested, "asked for"
    if device.type == "cuda":
        ok = torch.cuda.get_device_capability(device) >= (8, 0)
        return ("bfloat16", "the GPU multiplies bfloat16") if ok else ("float32", "this GPU has no bfloat16 products")
    if getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)():
        return "bfloat16", "this CPU has AMX, which multiplies bfloat16 about four times faster than float32"
    return "float32", "this CPU has no AMX, without which bfloat16 is slower than float32"


def model_config(c: dict) -> GPTConfig:
    """The GPTConfig inside a run's config.json."""
    return GPTConfig.from_run(c)


def make_autocast(device: torch.device, dtype: str):
    """A function that returns the autocast context of `dtype` on `device`."""
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def load_checkpoint(folder: Path) -> dict | None:
    """The newest checkpoint that loads; None when there is none. Raises BadInput when there are some and none loads."""
    paths = [folder / "ckpt.pt", *sorted(folder.glob("ckpt-*.pt"), key=lambda p: -int(p.stem[5:] or 0))]
    broken = []
    for path in paths:
        if path.exists():
            try:
                saved = torch.load(path, map_location="cpu", weights_only=True)
                break
            except Exception as e:  # torch raises many kinds for a file that is cut short
                broken.append(f"{path} does not load ({type(e).__name__}); delete it to start from the one before, or anew")
    else:
        if broken:
            raise BadInput("\n".join(broken))
        return None
    reads = find_arm(saved["arch"]).reads
    if saved["format"] == 1 and list(reads) != sorted(reads):
        raise BadInput(f"{path} has format 1, in which the queries of {saved['arch']} stand under each other's names: train it anew")
    return saved


def load_state(folder: Path) -> tuple[dict, dict, int]:
    """(parameters, config, step) of a run's last checkpoint, on the CPU. Raises BadInput."""
    config, saved = read_json(folder / "config.json"), load_checkpoint(folder)
    if saved is None:
        raise BadInput(f"{folder} has no ckpt.pt: the run has not reached its first checkpoint")
    return saved["model"], config, saved["step"]


def load_run(folder: Path, device: torch.device, backend: str | None = None) -> tuple[GPT, dict, int]:
    """(model at its last checkpoint, config, step) of a run folder. Raises BadInput."""
    state, config, step = load_state(folder)
    model = GPT(model_config(config | ({"backend": backend} if backend else {})))
    want = model.state_dict()
    wrong = [f"{n}: {tuple(state[n].shape)} saved, {tuple(p.shape)} in config.json" if n in state else f"{n} is missing"
             for n, p in want.items() if n not in state or state[n].shape != p.shape]
    wrong += [f"{n} is not of this arm" for n in state if n not in want]
    if wrong:
        raise BadInput(f"{folder}: the checkpoint does not fit its config.json: {'; '.join(wrong[:3])}"
                       + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    model.config.backend, _ = choose_backend(model.config.backend, device)
    model.load_state_dict(state)
    return model.to(device).eval(), config, step


class Case:
    """One run, loaded, and what it is evaluated on. Raises BadInput where they are not whole or do not belong together."""

    def __init__(self, folder: Path, f: "Flags", device: torch.device):
        if not folder.is_dir():
            raise BadInput(f"{folder} is not a folder")
        self.folder, self.flags, self.device, self.name, self.split = folder, f, device, folder.resolve().name, f.split
        self.model, self.config, self.step = load_run(folder, device, f.backend)
        c, self.data = self.config, open_data(Path(f.data or self.config["data"]), splits=(f.split,))
        if self.data.meta["tokenizer_sha256"] != c["tokenizer_sha256"]:
            raise BadInput(f"{self.data.path} was encoded with another tokenizer than {self.name} was trained with: prepare it "
                           f"with --tokenizer={c['data']}/tokenizer.json")
        self.elsewhere = self.data.fingerprint != c["data_fingerprint"]
        if self.elsewhere and not f.data:
            raise BadInput(f"{self.data.path} has changed since {self.name} was trained on it ({c['data_fingerprint']} then, "
                           f"{self.data.fingerprint} now); --data={self.data.path} evaluates on it all the same")
        self.windows, self.enough = slice_windows(self.data, f.split, c["context"], f.eval_tokens or c["eval_tokens"])
        self.autocast = make_autocast(device, c["dtype"])

    def measure(self, observe=None, label: str | None = None) -> dict:
        return evaluate(self.model, self.data, self.split, self.windows, self.flags.eval_batch or self.config["micro_batch"],
                        self.device, self.autocast, label=label or self.name, observe=observe)

    def facts(self) -> dict:
        return dict(run=self.config["name"], arch=self.config["arch"], split=self.split, step=self.step, windows=self.windows,
                    eval_tokens=self.windows * self.config["context"], backend=self.model.config.backend,
                    data_fingerprint=self.data.fingerprint)

    def path(self, kind: str = "") -> Path:
        """A .json in the run's eval/ folder. stats.py takes those that begin with the split for evaluations of the run: what
        was measured on other data, and every `kind` but "", begins otherwise."""
        facts = self.facts()
        name = kind + f"on-{self.data.path.resolve().name}-" * self.elsewhere + f"{self.split}-{self.step:06d}"
        name += f"-{facts['backend']}" * (facts["backend"] != self.config["backend"])
        return self.folder / "eval" / (name + f"-{facts['eval_tokens']}" * bool(self.flags.eval_tokens) + ".json")


def table(header: list, rows: typing.Iterable[list]) -> str:
    return "\n".join(f"| {' | '.join(map(str, r))} |" for r in (header, ["---"] * len(header), *rows))


@contextlib.contextmanager
def figure(path: Path, **layout):
    """Figure and axes to draw on; the PNG appears, whole, when the block ends."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    with plt.rc_context({"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}):
        fig, axes = plt.subplots(squeeze=False, layout="constrained", **layout)
        yield fig, axes[0]
        with atomic_file(path) as out:
            fig.savefig(out, format="png", dpi=200, metadata={"Software": None})
        plt.close(fig)


# ---------------------------------------------------------------------------------------------------------
# What the routes do


class RouteReport:
    """Observes an evaluation: weights and entropy of every read, JS divergence, each with its spread over tokens."""

    def __init__(self, case: Case):
        self.c, self.pair, self.n, self.sums, self.js = case.model.config, js_pair(case.model), 0, {}, {}
        self.arm, self.rows = case.model.arm, case.model.recorded()
        self.stride = -(-case.windows * self.c.context // 2 ** 20)  # a million tokens are enough for deciles

    def __call__(self, token_nll: torch.Tensor, record: list[torch.Tensor]) -> None:
        self.n += token_nll.numel()
        for i, w in enumerate(record):
            entropy = -torch.xlogy(w, w).sum(1)
            new = [x.sum(-1, dtype=torch.float64).cpu() for x in (w, w.square(), entropy, entropy.square())]
            self.sums[i] = [a + b for a, b in zip(self.sums.get(i, [0] * 4), new)]
        for l in range(self.c.n_layer if self.pair else 0):
            js = js_divergence(*record[2 * l][list(self.pair)])
            self.js.setdefault(l, []).append(js[::self.stride].cpu().numpy())

    def result(self, measured: dict) -> dict:
        """`reads`: for each its layer, mean weights and their sd [K] over tokens, entropy and its sd in nats, and whether its
        last source is a block still being summed; `js`: for each layer mean, sd, deciles. `measured`: of evaluate."""
        reads, js, names = [], [], self.arm.reads
        routes = issubclass(self.arm.depth, Depth)  # others' weights are no distributions: they have no entropy
        for i, sums in self.sums.items():
            l, rows = self.rows[i]
            w, w2, e, e2 = (s / self.n for s in sums)
            w_sd, e_sd = ((x2 - x.square()).clamp_min(0).sqrt().tolist() for x, x2 in ((w, w2), (e, e2)))
            running = routes and self.arm.sources == "block" and l < self.c.n_layer and w.shape[1] > 1 + l // self.c.block_layers
            reads += [dict(layer=l, read=name, running=running, weights=w[r].tolist(), weights_sd=w_sd[r],
                           entropy=e[r].item() if routes else None, entropy_sd=e_sd[r] if routes else None)
                      for r, name in enumerate(rows)]
        for l, parts in self.js.items():
            x = np.concatenate(parts).astype(np.float64)
            js.append(dict(layer=l, mean=measured["js"][l], sd=x.std(), **{f"q{q}": np.percentile(x, q) for q in (10, 50, 90)},
                           of_mean=measured["js_of_mean"][l]))
        return dict(reads=reads, js=js, js_reads=[names[i] for i in self.pair or ()], js_mean=measured["js_mean"])


def report_text(report: dict) -> str:
    K, rows = max(len(r["weights"]) for r in report["reads"]), []
    for r in report["reads"]:
        cells = [f"{m:.3f} ± {s:.3f}" for m, s in zip(r["weights"], r["weights_sd"])]
        cells[-1] += "*" * r["running"]
        rows.append([r["layer"], r["read"], *cells, *[""] * (K - len(cells)), *(["-"] * 2 if r["entropy"] is None else
                     [f"{r['entropy']:.3f} ± {r['entropy_sd']:.3f}", f"{math.log(len(cells)):.3f}"])])
    text = "\nDepth weights, mean ± sd over tokens (source 0 the embedding, source k block k, * the block being summed):\n\n" \
        + table(["layer", "read", *(f"source {k}" for k in range(K)), "entropy", "at most"], rows)
    if report["js"]:
        text += f"\n\nJS divergence of {' and '.join(report['js_reads'])} in nats, over tokens:\n\n" + table(
            ["layer", "mean", "sd", "10%", "median", "90%", "of mean weights"],
            [[j["layer"], *(f"{x:.5f}" for x in list(j.values())[1:])] for j in report["js"]])
    return text


def draw_report(path: Path, report: dict) -> None:
    """Depth heat maps of the attention's reads side by side, and the JS profile."""
    reads, js = [r for r in report["reads"] if r["read"] not in ("mlp", "out")], report["js"]
    names, layers = list(dict.fromkeys(r["read"] for r in reads))[:8], list(dict.fromkeys(r["layer"] for r in reads))
    K, n = max(len(r["weights"]) for r in reads), len(names) + bool(js)
    with figure(path, ncols=n, figsize=(1 + n * (1 + 0.4 * K), 1.4 + 0.24 * max(len(layers), 6)), sharey=True) as (fig, axes):
        for ax, name in zip(axes, names):
            grid = np.full((max(layers) + 1, K), np.nan)
            for r in (r for r in reads if r["read"] == name):
                for k, x in enumerate(r["weights"]):
                    grid[r["layer"], k] = x
                    star = "*" * (r["running"] and k == len(r["weights"]) - 1)
                    ax.text(k, r["layer"], f"{x:.2f}{star}", ha="center", va="center", fontsize=6, color="k" if x > 0.5 else "w")
            image = ax.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            ax.set(title=f"{name.upper()} read", xlabel="source", yticks=layers)
            ax.set_xticks(range(K), ["emb", *range(1, K)])
        axes[0].set_ylabel("layer")
        fig.colorbar(image, ax=list(axes[:len(names)]), label="mean depth weight", pad=0.01)
        if js:
            ax, (mean, low, high, of_mean) = axes[-1], ([j[k] for j in js] for k in ("mean", "q10", "q90", "of_mean"))
            ax.fill_betweenx(layers, low, high, color=COLOURS[0], alpha=0.25, lw=0, label="10% to 90% of tokens")
            ax.plot(mean, layers, "o-", ms=3, color=COLOURS[0], label="mean over tokens")
            ax.plot(of_mean, layers, "s--", ms=3, color=COLOURS[1], label="of mean weights")
            ax.set(title=" and ".join(x.upper() for x in report["js_reads"]), xlabel="JS divergence (nats)", xlim=(0, None))
            ax.locator_params(axis="x", nbins=4)
            ax.legend(fontsize=6)
        fig.suptitle(f"{report['run']}, step {report['step']:,}, {report['split']} (* the block being summed)", fontsize=8)


# ---------------------------------------------------------------------------------------------------------
# Interventions


class Altered(Routes):
    """A depth memory some of whose reads are altered. `changes`: by number of the read, counted as in `record`, and by row
    of its queries, the query [d] to use instead, or the index of the only source to read."""

    def __init__(self, *args, changes: dict[int, dict[int, torch.Tensor | int]], **kw):
        super().__init__(*args, **kw)
        self.changes, self.count = changes, 0

    def read(self, queries, key_gain, out_gain=None, ahead=None, last=False):
        rows = self.changes.get(self.count, {})
        self.count += 1
        single = {r: s for r, s in rows.items() if isinstance(s, int)}
        sources = [*self.completed, *([] if self.partial is None else [self.partial])] if single else []
        other = queries.clone()
        for r in rows.keys() - single:
            other[r] = rows[r]
        if torch.equal(other, queries):  # stays the same object, by which the fused route knows a read it opened ahead
            other = queries
        mixtures = list(super().read(other, key_gain, out_gain, ahead, last))
        for r, s in single.items():  # through the route itself: where a layer has one source this repeats it to the bit
            (mixtures[r],) = route((sources[s],), queries[r:r + 1], key_gain, out_gain, self.eps, self.backend)
            if self.record is not None:
                self.record[-1][r] = 0.0
                self.record[-1][r, s] = 1.0
        return tuple(mixtures)


def parse_layers(text: str | None, n_layer: int) -> list[int]:
    """5,6 or 2-4 as a list of layers; all of them for None. Raises BadInput."""
    parts = [re.fullmatch(r"(\d+)(?:-(\d+))?", p) for p in (text or f"0-{n_layer - 1}").split(",")]
    if not all(parts):
        raise BadInput(f"--layers={text} wants layers or ranges of them, as in 5,6 or 2-4")
    layers = sorted({l for m in parts for l in range(int(m[1]), int(m[2] or m[1]) + 1)})
    if not layers or layers[-1] >= n_layer:
        raise BadInput(f"--layers={text} is out of range: the layers are 0 to {n_layer - 1}")
    return layers


def plan(model: GPT, text: str, layers: list[int]) -> dict[int, dict[int, torch.Tensor | int]]:
    """The changes (see Altered) that the intervention `text` makes in `layers`; none where a read would only get its own
    query. Raises BadInput for what is no intervention, or not one of this arm."""
    c, pair, state = model.config, js_pair(model), model.state_dict()
    reads = model.arm.reads if model.arm.depth is Routes else ()  # what it alters is the routes' own
    read, _, source = text.partition(":")
    kinds = dict(source=r"source-?\d+", layer=r"layer\d+", uniform="uniform", run="run=.+")
    kind = next((k for k, pattern in kinds.items() if re.fullmatch(pattern, source)), None)
    number = int(source[len(kind):]) if kind in ("source", "layer") else 0
    serving = lambda x: next((r for r in reads if x and set(x) <= set(r)), None)
    has = f"{c.arch} has the reads {', '.join((*reads, 'mlp', 'out') if reads else ['none'])}"
    fail = lambda why: BadInput(f"--intervene={text}: {why}; {has}")
    if text == "swap" and reads:
        moves = {reads[a]: reads[b] for a, b in (pair, pair[::-1])} if pair else {}
    elif serving(read) and serving(read) == serving(source):
        moves = {}
    elif not reads or not (kind or serving(source)):
        known = ["swap", *(f"{r}:{s}" for r in (*reads, "mlp", "out") for s in (*reads, "uniform", "source0", "layer0"))]
        raise fail(f"unknown{did_you_mean(text, known)} READ:FROM takes as FROM a read, uniform, sourceN, layerN or run=FOLDER")
    else:
        moves = {r: source for r in ((read,) if read in ("mlp", "out") else reads) if set(r) <= set(read)}
        if not moves or sorted("".join(moves)) != sorted(read):
            raise fail(f"{read!r} is no read of its own")
    if kind == "run":
        state = load_state(Path(source[4:]))[0]

    def query(l: int, read: str) -> torch.Tensor:
        part = "out_read" if read == "out" and l == c.n_layer else f"layers.{l}.{'mlp' if read == 'mlp' else 'attn'}_read"
        hit = [n for n in state if n.startswith(f"{part}.query.") and set(read) <= set(n.rsplit(".", 1)[1])]
        if not hit or state[hit[0]].shape != model.out_norm.shape:
            raise fail(f"layer {l} is out of range (0 to {c.n_layer - 1}) or has no {part}.query.{read} of width {c.n_embd}")
        return state[hit[0]].to(model.wte.device)

    changes = {}
    for l in layers if read != "out" else [c.n_layer]:
        K = source_count(c, i := 2 * l + (read == "mlp"))
        for name, new in moves.items() if kind != "source" or -K <= number < K else ():
            changes.setdefault(i, {})[reads.index(name) if name in reads else 0] = \
                number % K if kind == "source" else torch.zeros_like(model.out_norm) if kind == "uniform" else \
                query(number if kind == "layer" else l, name if kind in ("layer", "run") else new)
    if moves and not changes:
        raise fail("no such source in these layers")
    return changes


def effect(case: Case, before: dict, changes: dict, label: str) -> dict:
    """NLL with `changes`, and its difference from `before` on the same windows with a paired 95% t interval."""
    from stats import t_interval
    case.model.memory = functools.partial(Altered, changes=changes)
    try:
        after = case.measure(label=label)
    finally:
        del case.model.memory
    d = after["window_nll"] - before["window_nll"]
    mean, sd = float(d.mean()), float(d.std(ddof=1)) if len(d) > 1 else None
    return dict(reads=len(changes), nll_before=before["nll"], nll_after=after["nll"], delta=mean, sd=sd, js_mean=after["js_mean"],
                t_ci=t_interval(mean, sd, len(d)) if len(d) > 1 else None)


def run_interventions(case: Case, before: dict, wanted: dict[str, dict], layers: list[int]) -> None:
    """Measure, print and store the interventions `wanted`: {text: changes}."""
    found, profiles, where = {}, {}, case.flags.layers
    for text, changes in wanted.items():
        text = re.sub(r"run=.*/(?=.)", "run=", text)
        e = found[text] = dict(layers=layers, **effect(case, before, changes, text))
        if case.flags.by_layer and not text.startswith("out:"):
            alone = lambda l: {i: x for i, x in changes.items() if i // 2 == l}
            e["by_layer"] = [dict(layer=l, **effect(case, before, alone(l), f"{text}, layer {l}")) for l in layers]
            profiles[text] = e["by_layer"]
    path, facts = case.path("intervene-"), dict(case.facts(), nll_before=before["nll"])
    old = read_json(path) if path.exists() else {}
    old = old["interventions"] if all(old.get(k) == v for k, v in facts.items()) else {}  # measured against the same
    write_json(path, dict(facts, interventions={**old, **{text + f"@{where}" * bool(where): e for text, e in found.items()}}))
    show = lambda e: f"{e['delta']:+.6f}" + (" [{:+.6f}, {:+.6f}]".format(*e["t_ci"]) if e["t_ci"] else "")
    print(f"\n{case.name}: reads changed in {f'layers {where}' if where else 'all layers'}; NLL on the same "
          f"{case.windows:,} windows, paired 95% t interval (windows taken as independent)\n\n" + table(
              ["intervention", "reads changed", "NLL before", "NLL after", "difference"],
              [[text, e["reads"], f"{e['nll_before']:.6f}", f"{e['nll_after']:.6f}", show(e)] for text, e in found.items()]))
    if profiles:
        rows = [[l, *map(show, row)] for l, *row in zip(layers, *profiles.values())]
        print("\nOne layer at a time:\n\n" + table(["layer", *profiles], rows))
        with figure(path.with_suffix(".png"), figsize=(5.2, 3.2)) as (fig, (ax,)):
            for k, (text, effects) in enumerate(profiles.items()):
                ax.errorbar([l + 0.5 * ((k + 0.5) / len(profiles) - 0.5) for l in layers], [e["delta"] for e in effects],
                            [e["t_ci"][1] - e["delta"] if e["t_ci"] else 0 for e in effects], fmt="os^Dv<>"[k % 7] + "-", ms=3.5,
                            lw=0.8, capsize=2, color=COLOURS[k % 7], label=text)
            ax.axhline(0, color="0.6", lw=0.8, zorder=0)
            ax.set(xlabel="layer changed", ylabel="change in NLL (nats per token)", xticks=layers)
            ax.set_title(f"{case.name}, {case.split}: one layer at a time, 95% t intervals over windows", fontsize=8)
            ax.legend(fontsize=7)
    print(f"\nstored in {path}" + " and .png" * bool(profiles))


# ---------------------------------------------------------------------------------------------------------
# Crossed backends, text, and the command

# What the two backends may differ by: the norm of the logits' difference over their norm, NLL and JS in nats.
TOLERANCE = {"float32": dict(logits=1e-5, nll=1e-5, js=1e-5), "bfloat16": dict(logits=2e-2, nll=2e-3, js=1e-3)}


@torch.no_grad()
def compare_backends(case: Case) -> dict:
    """Logits (of the first window), NLL and JS of one checkpoint with reference and with fused routes, stored and printed."""
    both, logits, path = [], [], case.path("backends-")
    dtype = case.config["dtype"] if case.device.type == "cuda" else "float32"  # Triton's interpreter cuts bfloat16 short
    case.autocast, limit = make_autocast(case.device, dtype), TOLERANCE[dtype]
    ids = torch.from_numpy(case.data.tokens(case.split)[:case.config["context"]].astype(np.int64))[None].to(case.device)
    for backend in ("fused", "reference"):
        case.model.config.backend, _ = choose_backend(backend, case.device)
        with case.autocast():
            logits.append(case.model(ids).double())
        both.append(case.measure(label=f"{case.name}, {backend}"))
    (a, b), d = both, logits[0] - logits[1]
    found = dict(logits=(d.norm() / logits[1].norm()).item(), nll=abs(a["nll"] - b["nll"]),
                 js=max(abs(x - y) for x, y in zip(a["js"], b["js"])) if a["js"] else 0.0, logits_max=d.abs().max().item(),
                 logits_mean=d.abs().mean().item(), nll_window_max=abs(a["window_nll"] - b["window_nll"]).max(),
                 nll_fused=a["nll"], nll_reference=b["nll"], dtype=dtype, tolerance=limit)
    found["within"] = all(found[k] <= v for k, v in limit.items())
    write_json(path, {**case.facts(), **found, "backend": "fused, reference"})
    print(f"{case.name}: fused and reference routes, {case.windows:,} windows, {dtype}; stored in {path}\n\n"
          + table(["", "difference", "tolerance"], [[k, f"{found[k]:.3g}", v] for k, v in limit.items()])
          + "\n\nlogits: norm of the difference over norm; at most {logits_max:.3g}, on average {logits_mean:.3g}; nll: "
          "{nll_fused:.7f} and {nll_reference:.7f}, of a window at most {nll_window_max:.3g}; js: the largest of a layer"
          .format(**found), flush=True)
    return found


@dataclass
class Flags:
    runs: list[str] = dataclasses.field(default_factory=list, metadata={"help": "run folders"})
    split: str = flag("val", "which split to evaluate", ("val", "test", "train"))
    data: str | None = flag(None, "another data folder with the same tokenizer [the run's own]")
    backend: str | None = flag(None, "how routes are computed [as in training]", ("auto", "reference", "fused"))
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda"))
    eval_tokens: int | None = flag(None, "predicted tokens [as in training]")
    eval_batch: int | None = flag(None, "sequences at a time [the run's micro_batch]")
    by_position: bool = flag(False, "also NLL by position in the context")
    report: bool = flag(False, "also depth weights, entropy and JS of every read, with a figure")
    intervene: str | None = flag(None, "also NLL with reads changed: a comma list of READ:FROM, or swap (see above)")
    layers: str | None = flag(None, "layers that --intervene changes, as in 5,6 or 2-4 [all]")
    by_layer: bool = flag(False, "--intervene in one layer at a time too, with a figure")
    compare_backends: bool = flag(False, "compare reference and fused routes instead; exit 1 beyond tolerance")
    sample: str | None = flag(None, "continue this text instead of evaluating")
    new_tokens: int = flag(100, "how many tokens to add to --sample")
    temperature: float = flag(0.8, "of sampling; 0 takes the likeliest token")
    top_k: int = flag(200, "sample among the likeliest so many tokens; 0 among all")
    seed: int = flag(1, "of sampling")


def sample(f: Flags, case: Case) -> str:
    """The prompt and its continuation as text; generation stops at no token, EOS shows as a blank line."""
    tokenizer, eos, device = case.data.tokenizer(), case.data.eos_id, case.device
    ids = tokenizer.encode(f.sample).ids or [eos]
    generator = torch.Generator(device).manual_seed(f.seed)
    with case.autocast():
        out = case.model.generate(torch.tensor([ids], device=device), f.new_tokens, f.temperature, f.top_k or None, generator)
    documents = itertools.groupby(out[0].tolist(), lambda token: token == eos)
    return "\n\n".join(tokenizer.decode(list(d)) for end, d in documents if not end)


def evaluate_run(case: Case) -> dict:
    """One evaluation and what was asked for beside it, printed and stored."""
    f, n, T = case.flags, case.windows, case.config["context"]
    layers = parse_layers(f.layers, case.model.config.n_layer)  # what is wrong is said before the work
    wanted = {text: plan(case.model, text, layers) for text in f.intervene.split(",")} if f.intervene else {}
    report, position = RouteReport(case) if f.report and case.model.recorded() else None, torch.zeros(T, dtype=torch.float64)

    def observe(token_nll, record):
        position.add_(token_nll.sum(0, dtype=torch.float64).cpu())
        if report:
            report(token_nll, record)
    result, facts = case.measure(observe), case.facts()
    path = store(case.folder, result, facts["run"], case.split, case.step, case.step * case.config["tokens_per_step"],
                 facts["backend"], facts["data_fingerprint"], case.path())
    print(f"{case.name}: step {case.step:,}, {n:,} windows x {T:,} = {n * T:,} tokens of {case.split} in {case.data.path}"
          + ("" if case.enough else ", all there is") + f"; stored in {path}", flush=True)
    if f.by_position:
        result["position"] = (position / n).tolist()
        write_json(case.path("position-"), dict(facts, nll=result["position"]))
    if report:
        found = dict(facts, **report.result(result))
        write_json(path := case.path("report-"), found)
        draw_report(path.with_suffix(".png"), found)
        print(f"{report_text(found)}\n\nstored in {path} and .png", flush=True)
    elif f.report:
        print(f"{case.name}: {case.config['arch']} has no depth reads to report")
    if wanted:
        run_interventions(case, result, wanted, layers)
    return result


def main(argv: list[str]) -> None:
    f = parse_flags(Flags, argv, __doc__, positional="runs")
    least = dict(eval_tokens=1, eval_batch=1, new_tokens=0, top_k=0, temperature=0)
    problems = [f"--{k}={x} must be at least {low}" for k, low in least.items() if (x := getattr(f, k)) is not None and x < low]
    problems += [f"--{k} goes with --intervene" for k in ("layers", "by_layer") if getattr(f, k) and not f.intervene]
    if problems := problems + ["name at least one run folder, as in python eval.py runs/nano-rd-s123"] * (not f.runs):
        raise BadInput("\n".join(problems))
    device, rows, apart = pick_device(f.device), {}, []
    if f.split == "test":
        print("warning: the test split is for the last word: choose nothing by it", file=sys.stderr)
    for folder in map(Path, f.runs):
        case = Case(folder, f, device)
        if f.sample is not None:
            print(sample(f, case))
        elif f.compare_backends:
            apart += [case.name] * (not compare_backends(case)["within"])
        else:
            rows[case.name] = evaluate_run(case)
    if apart:
        raise Failed(f"reference and fused routes differ by more than the tolerance: {', '.join(apart)}")
    if not rows:
        return
    error = lambda w: f"{w.std(ddof=1) / math.sqrt(len(w)):.5f}" if len(w) > 1 else "-"
    number = lambda x, digits: "-" if x is None else f"{x:.{digits}f}"
    print("\n" + table(["run", "NLL", "+- s.e. of windows", "perplexity", "bits/byte", "JS"], [
        [name, number(r["nll"], 6), error(r["window_nll"]), number(r["ppl"], 4), number(r["bits_per_byte"], 5),
         number(r["js_mean"], 5)] for name, r in rows.items()]))
    if any(r["js"] for r in rows.values()):
        print("\nJS divergence in nats between the depth reads that feed K and V (q_kv: Q and K), layer by layer:\n"
              + "\n".join(f"  {name}: " + " ".join(f"{x:.4f}" for x in r["js"]) for name, r in rows.items() if r["js"]))
    if f.by_position:
        longest = max(len(r["position"]) for r in rows.values())
        ends = [0, *(2 ** i for i in range((longest - 1).bit_length() + 1))]
        print("\nNLL by position in the context:\n\n" + table(["position", *rows], [
            [f"{a + 1} to {b}", *(number(np.mean(r["position"][a:b]) if r["position"][a:b] else None, 4) for r in rows.values())]
            for a, b in zip(ends, ends[1:])]))


if __name__ == "__main__":
    run_script(main)
