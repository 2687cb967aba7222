"""Evaluate trained runs, look at what their depth routes do, and test what depends on it.

    python eval.py runs/S-rd-s123                                  # as training logged it, from the last checkpoint
    python eval.py runs/nano-*                                     # several runs, one table; --by_position
    python eval.py runs/nano-rd-s123 --report                      # depth weights, entropy, JS: tables and a figure
    python eval.py runs/nano-rd-s123 --intervene=v:qk,v:uniform    # NLL with V reads changed; --layers=2-4, --by_layer
    python eval.py runs/nano-rd-s123 --compare_backends            # reference against fused routes
    python eval.py runs/nano-rd-s123 --sample="It is a truth"      # continue a prompt
    python eval.py runs/nano-rd-s123 --export=rd                   # weights for others, without this script
    python eval.py runs/S-rd-s123 --split=test                     # for the last word only: nothing is chosen on it

--intervene takes a comma list of READ:FROM. READ is a read of the arm (qk, v, ...; mlp; out) or several of its reads
(qkv); FROM is who gives the query: another read, named by what it serves (v:qk, v:k), uniform, layer3 (the same read
there) or run=FOLDER (the same read in another run); or source0 (the embedding alone; source-1 the newest alone). swap
exchanges the two attention reads. A query moves alone: key-norm gains stay.

--export=DIR writes model.safetensors, config.json and tokenizer.json. With model.py and route_kernel.py at hand:

    config = json.load(open("DIR/config.json"))
    model = GPT(GPTConfig.from_run(config), seed=None)
    model.load_state_dict(safetensors.torch.load_file("DIR/model.safetensors"))

Everything else is stored in the run's folder: evaluations as eval/<split>-<step>.json and .npy, where stats.py finds
them, the rest beside them as report-, intervene-, position- and backends-<split>-<step>.json and .png.
"""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib.util
import itertools
import math
import os
import re
import sys
import textwrap
import typing
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: threads that spin starve beside a busy process

import numpy as np
import torch

from model import GPT, Arm, GPTConfig, Weights
from prepare import (BadInput, Failed, Progress, atomic_file, check_tokenizer, did_you_mean, flag, load_tokenizer,
                     open_data, parse_flags, read_json, run_script, sha256_of, write_json)
from route_kernel import choose_backend

# Dimension letters: B windows in a batch, T tokens of a window, L layers, K sources of a read, N = B * T.

# ---------------------------------------------------------------------------------------------------------
# One evaluation


def js_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence in nats between p and q, float [K, ...] each summing to one over dim 0: [...].
    Where one has fewer sources than the other, its missing ones, the last, have weight 0."""
    missing = len(p) - len(q)
    if missing > 0:
        q = torch.cat((q, q.new_zeros(missing, *q.shape[1:])))
    if missing < 0:
        p = torch.cat((p, p.new_zeros(-missing, *p.shape[1:])))
    m = 0.5 * (p + q)
    kl = [torch.xlogy(a, a / m).nan_to_num_(0.0).sum(0) for a in (p, q)]  # 0 / 0 where a weight underflowed to 0
    return (0.5 * (kl[0] + kl[1])).clamp_min_(0.0)


def read_pair(arm: Arm) -> tuple[str, str] | None:
    """The two reads of an attention that are set against each other: those that feed K and V, or Q and K where K and V
    share one; the first two where a mean of all feeds all. None for an arm with one read."""
    if len(arm.reads) < 2:
        return None
    if arm.combine is not None:
        return arm.reads[0], arm.reads[1]
    q, k, v = (arm.reads[i] for i in arm.serving())
    return (k, v) if k != v else (q, k)


def js_reads(arm: Arm) -> tuple[str, str] | None:
    """The two reads that the JS divergence compares; None where their weights are no distributions, or one for each
    slice of the width."""
    return read_pair(arm) if arm.depth.softmax and arm.heads == 1 else None


class Divergence:
    """The JS divergence of an arm's two reads, layer by layer, summed over tokens in float64 on `device`; and their
    mean weights, so that the JS of the means stands beside the mean JS."""

    def __init__(self, reads: tuple[str, str], n_layer: int, device: torch.device):
        self.reads, most = reads, 2 * n_layer + 1  # sources: the embedding, and at most every sub-layer's output
        self.js = torch.zeros(n_layer, dtype=torch.float64, device=device)
        self.weights = torch.zeros(n_layer, 2, most, dtype=torch.float64, device=device)

    def add(self, record: list[Weights]) -> dict[int, torch.Tensor]:
        """Add the tokens of `record`; returns their JS, float32 [N] for each layer that reads over depth."""
        by_name, found = {(w.layer, w.read): w.weights for w in record}, {}
        first, second = self.reads
        for l in range(len(self.js)):
            if (l, first) not in by_name:  # an arm whose first layers do not read
                continue
            pair = by_name[l, first], by_name[l, second]
            found[l] = js_divergence(*pair)
            self.js[l] += found[l].sum(dtype=torch.float64)
            for total, w in zip(self.weights[l], pair):
                total[:len(w)] += w.sum(-1, dtype=torch.float64)
        return found

    def result(self, n: int) -> dict:
        """js and js_of_mean (per layer, nats) and js_mean (over layers 1 to L - 1) of n tokens."""
        js, of_mean = (self.js / n).tolist(), []
        for weights in (self.weights / n).cpu():
            of_mean.append(js_divergence(*weights[:, weights.any(0)]).item())  # without sources that are not there
        return dict(js=js, js_of_mean=of_mean, js_mean=sum(js[1:]) / (len(js) - 1) if len(js) > 1 else None)


def slice_windows(data, split: str, context: int, eval_tokens: int | None) -> tuple[int, bool]:
    """(whole windows of `split` from token 0 that cover `eval_tokens`, or all; whether the split holds that many).
    Raises BadInput for a split with not even one window."""
    tokens = data.meta["splits"][split]["tokens"]
    have = (tokens - 1) // context
    if have < 1:
        raise BadInput(f"{data.path}: the {split} split holds {tokens} tokens, less than one window of {context} + 1: "
                       f"prepare more text or a larger --{split}_fraction, or lower --context")
    want = have if eval_tokens is None else max(1, eval_tokens // context)
    return min(want, have), want <= have


@torch.no_grad()
def evaluate(model: GPT, data, split: str, windows: int, batch: int, device: torch.device, autocast, token_bytes=None,
             rank: int = 0, ranks: int = 1, stop=lambda: False, label: str | None = None, observe=None) -> dict | None:
    """NLL over the first `windows` non-overlapping windows of `split`, `batch` at a time, shared among the ranks.

    `autocast` is a function returning the context to run under. Sums are float64, window by window. A CPU takes one
    window at a time whatever `batch` is, so that nothing depends on `batch` or `ranks`: a product's rounding follows
    its shape. Returns nll (nats), ppl, bits_per_byte, eval_tokens, js_mean, js, js_of_mean (per layer, nats) and
    window_nll, float64 [windows]; None when `stop()` said so. `observe(token_nll, record, js)` is called with every
    batch: NLL [B, T], the Weights of each read, and the JS of its tokens by layer. Raises BadInput for a token that the
    model does not know.
    """
    T, pair = model.config.context, js_reads(model.arm)
    tokens, token_bytes = data.tokens(split), data.token_bytes() if token_bytes is None else token_bytes
    nll, n_bytes = torch.zeros(windows, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    divergence = Divergence(pair, model.config.n_layer, device) if pair else None
    batch = 1 if device.type == "cpu" else batch
    mine, progress = list(range(rank, windows, ranks)), contextlib.nullcontext()
    if rank == 0:
        progress = Progress(label or f"evaluating {split}", len(mine) * T, "tokens")
    with progress:
        for start in range(0, -(-windows // ranks), batch):  # as many rounds, and calls of stop(), on every rank
            if stop():
                return None
            index = mine[start:start + batch]
            if not index:
                continue
            rows = np.stack([tokens[i * T:i * T + T + 1] for i in index]).astype(np.int64)
            if rows.max() >= model.config.vocab_size:
                raise BadInput(f"{data.path}: the {split} split holds token {rows.max()}, and the model knows "
                               f"{model.config.vocab_size:,}: prepare the data anew with the run's tokenizer")
            ids = torch.from_numpy(rows).to(device)
            record = [] if pair or observe else None
            with autocast():
                token_nll = model.token_nll(ids[:, :-1], ids[:, 1:], record)
            js = divergence.add(record) if pair else {}
            if observe:
                observe(token_nll, record, js)
            n_bytes += float(token_bytes[rows[:, 1:]].sum())
            nll[index] = token_nll.double().mean(1).cpu()  # the one wait for the device
            if rank == 0:
                progress.update(len(index) * T)
    sums = [nll, n_bytes]
    if pair:
        sums += [divergence.js, divergence.weights]
    if ranks > 1:
        for s in sums:
            moved = s.to(device)
            torch.distributed.all_reduce(moved)  # a rank that had no window takes part too
            s.copy_(moved)
    n, mean = windows * T, nll.mean().item()
    result = dict(nll=mean, ppl=math.exp(mean) if mean < 700 else None, eval_tokens=n, js_mean=None, js=None,
                  js_of_mean=None, bits_per_byte=None, window_nll=nll.numpy())
    if n_bytes.item():
        result["bits_per_byte"] = mean * n / (math.log(2) * n_bytes.item())
    if pair:
        result.update(divergence.result(n))
    return result


def store(folder: Path, result: dict, run: str, split: str, step: int, tokens: int, backend: str, fingerprint: str,
          path: Path | None = None) -> Path:
    """Write eval/<split>-<step>.json (or `path`) and .npy in a run's folder, the .npy first: the .json says that both
    are whole."""
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
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"the driver is too old for CUDA {torch.version.cuda}, or another process blocks it"
        if torch.version.cuda is None:
            why = "this torch is a CPU build; see the README's install table"
        elif shown in ("", "-1"):
            why = f"none is visible to it, because CUDA_VISIBLE_DEVICES={shown!r}: unset that"
        elif shown is not None:
            why += f", or CUDA_VISIBLE_DEVICES={shown!r} names none that is here"
        raise BadInput(f"an NVIDIA GPU is here but torch cannot use it: {why}, or pass --device=cpu")
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


def make_autocast(device: torch.device, dtype: str):
    """A function that returns the autocast context of `dtype` on `device`."""
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == "bfloat16")


def model_config(c: dict) -> GPTConfig:
    """The GPTConfig inside a run's config.json. Raises BadInput."""
    try:
        return GPTConfig.from_run(c)
    except ValueError as e:
        raise BadInput(str(e)) from None


def load_checkpoint(folder: Path) -> dict | None:
    """The newest checkpoint that loads; None when there is none. Raises BadInput when there are some and none loads."""
    older = [p for p in folder.glob("ckpt-*.pt") if re.fullmatch(r"\d+", p.stem[5:])]
    broken = []
    for path in [folder / "ckpt.pt", *sorted(older, key=lambda p: -int(p.stem[5:]))]:
        if not path.exists():
            continue
        try:
            saved = torch.load(path, map_location="cpu", weights_only=True)
            form, arch = saved["format"], saved["arch"]
        except Exception as e:  # torch raises many kinds for a file that is cut short
            broken.append(f"{path} does not load ({type(e).__name__}); delete it to start from the one before, or anew")
            continue
        if form == 1 and arch in ("q_kv", "q_k_v", "mudd"):  # reads in another order than that of their names
            raise BadInput(f"{path} has format 1, in which the queries of {arch} stand under each other's names: train "
                           "it anew")
        return saved
    if broken:
        raise BadInput("\n".join(broken))
    return None


def load_state(folder: Path) -> tuple[dict, dict, int]:
    """(parameters, config, step) of a run's last checkpoint, on the CPU. Raises BadInput."""
    config, saved = read_json(folder / "config.json"), load_checkpoint(folder)
    if saved is None:
        raise BadInput(f"{folder} has no ckpt.pt: the run has not reached its first checkpoint")
    name, arch = saved.get("name"), saved["arch"]
    if name not in (None, config.get("name")) or arch != config.get("arch"):
        raise BadInput(f"{folder}: its checkpoint is that of another run, {name or 'without a name'}, of {arch}")
    return saved["model"], config, saved["step"]


def load_run(folder: Path, device: torch.device, backend: str | None = None) -> tuple[GPT, dict, int]:
    """(model at its last checkpoint, config, step) of a run folder. Raises BadInput."""
    state, config, step = load_state(folder)
    if backend:
        config = config | {"backend": backend}
    model = GPT(model_config(config), seed=None)
    try:
        model.load_state_dict(state)
        model.config.backend, _ = choose_backend(model.config.backend, device)
    except RuntimeError as e:  # it lists every parameter that is wrong
        why = textwrap.shorten(str(e), 300, placeholder=" ...")
        raise BadInput(f"{folder}: the checkpoint does not fit its config.json: {why}") from None
    except ValueError as e:
        raise BadInput(str(e)) from None
    return model.to(device).eval(), config, step


def runs_among(paths: list[str]) -> list[Path]:
    """Those of `paths` that are run folders; the others, as `runs/*` brings them, are named on stderr. Raises BadInput
    for a path that does not exist, and where nothing is left."""
    folders = []
    for path in map(Path, paths):
        if not os.path.exists(path):
            raise BadInput(f"{path} does not exist: name run folders, as in python eval.py runs/nano-rd-s123")
        if os.path.exists(path / "config.json"):  # False too where it may not be looked at
            folders.append(path)
        else:
            print(f"skipped: {path} holds no config.json that may be read, so it is no run", file=sys.stderr)
    if not folders:
        raise BadInput("no run folder is given: name one, as in python eval.py runs/nano-rd-s123")
    return folders


def tokenizer_of(folder: Path, config: dict, data: str | None) -> Path:
    """The tokenizer.json that a run was trained with: the one in its folder, or the data's. Raises BadInput."""
    tried = [folder / "tokenizer.json", Path(data or config["data"]) / "tokenizer.json"]
    for path in tried:
        if path.is_file() and sha256_of(path) == config["tokenizer_sha256"]:
            return path
    raise BadInput(f"{folder}: neither {tried[0]} nor {tried[1]} is the tokenizer that it was trained with: copy that "
                   "one into the run's folder")


NEEDED = ("name", "data", "dtype", "eval_tokens", "micro_batch", "tokens_per_step", "tokenizer_sha256",
          "data_fingerprint")  # of a run's config.json, beside the model's


class Case:
    """One run, loaded, and what is asked of it. Raises BadInput where the parts are not whole, do not belong together
    or cannot do what is asked, before any work."""

    def __init__(self, folder: Path, f: Flags, device: torch.device):
        self.folder, self.flags, self.device, self.name = folder, f, device, folder.resolve().name
        self.model, self.config, self.step = load_run(folder, device, f.backend)
        missing = [key for key in NEEDED if key not in self.config]
        if missing:
            raise BadInput(f"{folder}/config.json lacks {', '.join(missing)}: it is not one that train.py wrote")
        self.autocast = make_autocast(device, self.config["dtype"])
        self.unstored = []  # why what was measured could not be written
        self.layers, self.interventions = parse_layers(f.layers, self.model.config.n_layer), {}
        if f.intervene is not None:
            for text in f.intervene.split(","):
                self.interventions[text.strip()] = plan(self.model, text.strip(), self.layers)
        if f.compare_backends:
            load_run(folder, device, "fused")  # refuses an arm, or a machine, without the fused path
            if "queries" not in self.model.kinds().values():
                raise BadInput(f"--compare_backends: {self.config['arch']} has no depth reads, so there is nothing to "
                               "compare")
        if f.sample is not None or f.export:
            self.tokenizer = tokenizer_of(folder, self.config, f.data)
        if f.evaluates() or f.compare_backends:
            self.open_data()

    def open_data(self) -> None:
        c, f = self.config, self.flags
        self.data = open_data(Path(f.data or c["data"]), splits=(f.split,))
        if self.data.meta["tokenizer_sha256"] != c["tokenizer_sha256"]:
            raise BadInput(f"{self.data.path} was encoded with another tokenizer than {self.name} was trained with: "
                           f"prepare it with --tokenizer={c['data']}/tokenizer.json")
        self.elsewhere = self.data.fingerprint != c["data_fingerprint"]
        if self.elsewhere and not f.data:
            raise BadInput(f"{self.data.path} has changed since {self.name} was trained on it ({c['data_fingerprint']} "
                           f"then, {self.data.fingerprint} now); --data={self.data.path} evaluates on it all the same")
        self.windows, self.enough = slice_windows(self.data, f.split, c["context"], f.eval_tokens or c["eval_tokens"])
        self.facts = dict(run=c["name"], arch=c["arch"], split=f.split, step=self.step, windows=self.windows,
                          eval_tokens=self.windows * c["context"], backend=self.model.config.backend,
                          data_fingerprint=self.data.fingerprint)

    def measure(self, label: str, observe=None, autocast=None) -> dict:
        batch = self.flags.eval_batch or self.config["micro_batch"]
        return evaluate(self.model, self.data, self.flags.split, self.windows, batch, self.device,
                        autocast or self.autocast, label=label, observe=observe)

    def path(self, kind: str = "") -> Path:
        """A .json in the run's eval/ folder. stats.py takes those that begin with the split for evaluations of the run:
        what was measured on other data, and every `kind` but "", begins otherwise."""
        parts = [kind] if kind else []
        if self.elsewhere:
            parts.append(f"on-{self.data.path.resolve().name}")
        parts += [self.flags.split, f"{self.step:06d}"]
        if self.facts["backend"] != self.config["backend"]:
            parts.append(self.facts["backend"])
        if self.flags.eval_tokens:
            parts.append(str(self.facts["eval_tokens"]))
        return self.folder / "eval" / f"{'-'.join(parts)}.json"

    def keep(self, write: typing.Callable, path: Path, *args) -> str:
        """write(path, *args) and say where that is; where the system forbids it, note it: what was measured is yet to
        be printed."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, *args)
            return f"stored in {path}"
        except OSError as e:
            self.unstored.append(f"{path} could not be written ({os.strerror(e.errno)}): its numbers stand above")
            return "not stored"


def table(header: list, rows: typing.Iterable[list]) -> str:
    return "\n".join(f"| {' | '.join(map(str, r))} |" for r in (header, ["---"] * len(header), *rows))


def number(x: float | None, digits: int, sd: float | None = None) -> str:
    text = "-" if x is None else f"{x:.{digits}f}"
    return text if sd is None else f"{text} ± {sd:.{digits}f}"


COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]  # Okabe and Ito's


@contextlib.contextmanager
def figure(path: Path, title: str, width: float, height: float, **layout):
    """Figure and axes to draw on, in inches, under a title that is wrapped to the width; the PNG appears, whole, when
    the block ends."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    look = {"font.size": 8, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False}
    with plt.rc_context(look):
        fig, axes = plt.subplots(squeeze=False, layout="constrained", figsize=(width, height), **layout)
        letters = int(10 * width)  # of that size, even the widest
        fig.suptitle(textwrap.fill(title, letters), fontsize=8)
        yield fig, axes[0]
        with atomic_file(path) as out:
            fig.savefig(out, format="png", dpi=200, metadata={"Software": None})
        plt.close(fig)


# ---------------------------------------------------------------------------------------------------------
# What the routes do


class RouteReport:
    """Observes an evaluation: weights and entropy of every read, JS divergence, each with its spread over tokens."""

    def __init__(self, case: Case):
        self.pair, self.softmax = js_reads(case.model.arm), case.model.arm.depth.softmax
        self.n, self.sums, self.running, self.js = case.facts["eval_tokens"], {}, {}, {}
        self.stride = -(-self.n // 2 ** 20)  # a million tokens are enough for deciles

    def __call__(self, token_nll: torch.Tensor, record: list[Weights], js: dict[int, torch.Tensor]) -> None:
        for layer, read, w, running in record:
            self.running[layer, read], per_token = running, {"weights": w}
            if self.softmax:  # others' weights are no distributions: they have no entropy
                per_token["entropy"] = -torch.xlogy(w, w).sum(0)
            sums = self.sums.setdefault((layer, read), {})
            for name, x in per_token.items():
                total, square = sums.get(name, (0, 0))
                sums[name] = total + x.sum(-1, dtype=torch.float64), square + x.square().sum(-1, dtype=torch.float64)
        for layer, x in js.items():
            self.js.setdefault(layer, []).append(x[::self.stride])

    def result(self, measured: dict) -> dict:
        """`reads`: for each its layer, mean weights and their sd [K] over tokens, entropy and its sd in nats, and
        whether its last source is a block still being summed; `js`: for each layer mean, sd, deciles. `measured`: of
        evaluate."""
        reads, js = [], []
        for (layer, read), sums in self.sums.items():
            found = dict(layer=layer, read=read, running=self.running[layer, read], weights=None, weights_sd=None,
                         entropy=None, entropy_sd=None)
            for name, (total, square) in sums.items():
                mean = (total / self.n).cpu()
                sd = ((square / self.n).cpu() - mean.square()).clamp_min(0).sqrt()
                found |= {name: mean.tolist(), f"{name}_sd": sd.tolist()}
            reads.append(found)
        for layer, parts in self.js.items():
            x = torch.cat(parts).double().cpu().numpy()
            deciles = {f"q{q}": np.percentile(x, q) for q in (10, 50, 90)}
            js.append(dict(layer=layer, mean=measured["js"][layer], sd=x.std(), **deciles,
                           of_mean=measured["js_of_mean"][layer]))
        return dict(reads=reads, js=js, js_reads=list(self.pair or ()), js_mean=measured["js_mean"])


def report_text(report: dict) -> str:
    most, rows = max(len(r["weights"]) for r in report["reads"]), []
    for r in report["reads"]:
        cells = [number(mean, 3, sd) for mean, sd in zip(r["weights"], r["weights_sd"])]
        limit = None if r["entropy"] is None else math.log(len(cells))
        if r["running"]:
            cells[-1] += "*"
        cells += [""] * (most - len(cells))
        rows.append([r["layer"], r["read"], *cells, number(r["entropy"], 3, r["entropy_sd"]), number(limit, 3)])
    header = ["layer", "read", *(f"source {k}" for k in range(most)), "entropy", "at most"]
    text = ("\nDepth weights, mean ± sd over tokens (source 0 the embedding, source k block k, * the block being "
            f"summed):\n\n{table(header, rows)}")
    if report["js"]:
        header = ["layer", "mean", "sd", "10%", "median", "90%", "of mean weights"]
        keys = ("mean", "sd", "q10", "q50", "q90", "of_mean")
        rows = [[j["layer"], *(number(j[key], 5) for key in keys)] for j in report["js"]]
        text += f"\n\nJS divergence of {' and '.join(report['js_reads'])} in nats, over tokens:\n\n"
        text += table(header, rows)
    return text


def draw_report(path: Path, report: dict) -> None:
    """Depth heat maps of the attention's reads side by side, and the JS profile."""
    reads, js = [r for r in report["reads"] if r["read"] not in ("mlp", "out")], report["js"]
    reads = reads or report["reads"]  # an arm that mixes elsewhere
    names, most = list(dict.fromkeys(r["read"] for r in reads))[:8], max(len(r["weights"]) for r in reads)
    layers, n = list(range(max(r["layer"] for r in reads) + 1)), len(names) + bool(js)
    numbered = most <= 12  # more have no room for numbers in their cells
    width, height = 1 + n * (1 + (0.4 if numbered else 0.1) * most), 1.4 + 0.24 * max(len(layers), 6)
    title = f"{report['run']}, step {report['step']:,}, {report['split']} (* the block being summed)"
    with figure(path, title, width, height, ncols=n, sharey=True) as (fig, axes):
        for ax, name in zip(axes, names):
            grid = np.full((len(layers), most), np.nan)
            for r in reads:
                if r["read"] == name:
                    grid[r["layer"], :len(r["weights"])] = r["weights"]
                    if numbered:
                        write_weights(ax, r)
            image = ax.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
            ax.set(title=f"{name.upper()} read", xlabel="source", yticks=layers)
            sources = range(0, most, 1 if numbered else 4)
            ax.set_xticks(sources, [k or "emb" for k in sources])
        axes[0].set_ylabel("layer")
        fig.colorbar(image, ax=list(axes[:len(names)]), label="mean depth weight", pad=0.01)
        if js:
            ax, at = axes[-1], [j["layer"] for j in js]
            mean, low, high, of_mean = ([j[key] for j in js] for key in ("mean", "q10", "q90", "of_mean"))
            ax.fill_betweenx(at, low, high, color=COLOURS[0], alpha=0.25, lw=0, label="10% to 90% of tokens")
            ax.plot(mean, at, "o-", ms=3, color=COLOURS[0], label="mean over tokens")
            ax.plot(of_mean, at, "s--", ms=3, color=COLOURS[1], label="of mean weights")
            pair = " and ".join(read.upper() for read in report["js_reads"])
            ax.set(title=pair, xlabel="JS divergence (nats)", xlim=(0, None))
            ax.locator_params(axis="x", nbins=4)
            ax.legend(fontsize=6)


def write_weights(ax, read: dict) -> None:
    """The numbers in one row of a heat map."""
    last = len(read["weights"]) - 1
    for k, x in enumerate(read["weights"]):
        star = "*" if read["running"] and k == last else ""
        colour = "k" if x > 0.5 else "w"
        ax.text(k, read["layer"], f"{x:.2f}{star}", ha="center", va="center", fontsize=6, color=colour)


# ---------------------------------------------------------------------------------------------------------
# Interventions


class Place(typing.NamedTuple):
    """One depth read whose query is a parameter."""

    layer: int  # L for the output
    feed: str
    name: str  # of the parameter
    n_sources: int


Change = dict[Place, torch.Tensor | int]  # what a read gets: another query [d], or one source alone, by its index


@torch.no_grad()
def places_of(model: GPT) -> list[Place]:
    """The reads of a softmax mixture over depth; how many sources each has is seen in a pass."""
    if not model.arm.depth.softmax:
        return []
    record, kinds, found = [], model.kinds(), []
    model.hidden(torch.zeros(1, 1, dtype=torch.int64, device=model.wte.device), record)
    n_sources = {(w.layer, w.read): len(w.weights) for w in record}
    for prefix, mixer in model.mixers().items():
        for feed in mixer.feeds:
            name = f"{prefix}.query.{feed}"
            recorded = feed if feed in mixer.names else f"{feed}0"  # a read in heads is recorded by head
            if kinds.get(name) == "queries":
                found.append(Place(mixer.layer, feed, name, n_sources[mixer.layer, recorded]))
    return found


def one_source(depth: type, sources: dict[tuple[int, str], int]) -> type:
    """The depth memory `depth`, some of whose reads get one of their sources alone: for they are made once more with
    that source as the only one, where a softmax gives it the weight 1."""

    class OneSource(depth):
        def read(self, read, out_gain, ahead=None, last=False):
            picked = [(i, feed) for i, feed in enumerate(read.feeds) if (read.layer, feed) in sources]
            if not picked:
                return super().read(read, out_gain, ahead, last)
            all_sources = [*self.completed, self.partial]
            hs = list(super().read(read, out_gain, ahead, last))
            for i, feed in picked:
                s, alone = sources[read.layer, feed], copy.copy(self)
                alone.sources, alone.n_completed, alone.opened = [all_sources[s]], 1, None
                alone.kept = alone.record = None
                (hs[i],) = depth.read(alone, read, out_gain, feeds=(feed,))
                if self.kept is not None:
                    heads = len(read.names) // len(read.feeds)
                    first = len(self.kept) - len(read.names) + i * heads
                    for k in range(first, first + heads):
                        weights = torch.zeros_like(self.kept[k].weights)
                        weights[s] = 1
                        self.kept[k] = self.kept[k]._replace(weights=weights)
            return tuple(hs)

    return OneSource


@contextlib.contextmanager
def changed(model: GPT, change: Change):
    """`model` with `change`; afterwards it is as it was, bit for bit."""
    queries = {place.name: x for place, x in change.items() if isinstance(x, torch.Tensor)}
    sources = {(place.layer, place.feed): x for place, x in change.items() if isinstance(x, int)}
    before = {name: model.get_parameter(name).detach().clone() for name in queries}
    try:
        model.load_state_dict(queries, strict=False)
        if sources:
            model.memory = one_source(model.arm.depth, sources)
        yield
    finally:
        model.load_state_dict(before, strict=False)
        model.memory = None


def parse_layers(text: str | None, n_layer: int) -> list[int]:
    """5,6 or 2-4 as a list of layers; all of them for None. Raises BadInput."""
    if text is None:
        return list(range(n_layer))
    layers = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        if not match:
            raise BadInput(f"--layers={text} wants layers or ranges of them, as in 5,6 or 2-4")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < n_layer:
            raise BadInput(f"--layers={text} is out of range: the layers are 0 to {n_layer - 1}")
        layers.update(range(first, last + 1))
    return sorted(layers)


def serving(reads: tuple[str, ...], roles: str) -> str | None:
    """The read that feeds all of `roles`, letters out of q, k and v, each once."""
    for read in reads:
        if roles and all(read.count(role) == roles.count(role) for role in roles):
            return read
    return None


def moves_of(arm: Arm, text: str) -> dict[str, str]:
    """Which read gets what, by the intervention `text`: another read's query, uniform, sourceN, layerN or run=FOLDER;
    empty where a read would only get its own query. Raises ValueError."""
    reads = arm.reads
    if text == "swap":
        pair = read_pair(arm) or ()
        return dict(zip(pair, reversed(pair)))
    target, _, source = text.partition(":")
    if not re.fullmatch(r"uniform|source-?\d+|layer\d+|run=.+", source, re.ASCII):
        giver = serving(reads, source)
        if giver is None:
            words = (*reads, "uniform", "source0", "layer0")
            known = ["swap", *(f"{read}:{word}" for read in (*reads, "mlp", "out") for word in words)]
            raise ValueError(f"unknown{did_you_mean(text, known)} READ:FROM takes as FROM a read, uniform, sourceN, "
                             "layerN or run=FOLDER")
        if giver == serving(reads, target):
            return {}
        source = giver
    if target in ("mlp", "out"):
        return {target: source}
    targets = [read for read in reads if set(read) <= set(target)]
    if not targets or sorted("".join(targets)) != sorted(target):
        raise ValueError(f"{target!r} is no read of its own")
    return dict.fromkeys(targets, source)


def plan(model: GPT, text: str, layers: list[int]) -> Change:
    """The Change that the intervention `text` makes in `layers`. Raises BadInput for what is no intervention, or not
    one of this arm."""
    places, state, change = places_of(model), model.state_dict(), {}
    has = ", ".join((*model.arm.reads, "mlp", "out")) if places else "none"
    try:
        if not places:
            raise ValueError("its weights over depth are no softmax of queries, or it has none")
        moves = moves_of(model.arm, text)
        if "run=" in text:
            state = load_state(Path(text.partition("run=")[2]).expanduser())[0]
        for place in places:
            if place.feed in moves and (place.layer in layers or place.feed == "out"):
                new = given(state, place, moves[place.feed], model.get_parameter(place.name))
                if new is not None:
                    change[place] = new
        if moves and not change:
            raise ValueError("no such source in these layers")
    except ValueError as e:
        raise BadInput(f"--intervene={text}: {e}; {model.config.arch} has the reads {has}") from None
    return change


def given(state: dict, place: Place, source: str, own: torch.Tensor) -> torch.Tensor | int | None:
    """What `source` gives to the read at `place` in place of its `own` query, out of `state`: the model's, or that of
    the run which `source` names. None for a source that is not there. Raises ValueError where it has no such query."""
    layer, feed, prefix = place.layer, place.feed, place.name.removesuffix(place.feed)
    if source == "uniform":
        return torch.zeros_like(own)
    if source.startswith("source"):
        s = int(source[6:])
        return s % place.n_sources if -place.n_sources <= s < place.n_sources else None
    if source.startswith("layer"):
        layer = int(source[5:])
        prefix = f"layers.{layer}." + prefix.removeprefix(f"layers.{place.layer}.")  # the output's is in none
    elif not source.startswith("run="):  # another read of the attention
        feed, prefix = source, prefix.replace("mlp_read", "attn_read")
    for name, query in state.items():
        if name.startswith(prefix) and set(feed) <= set(name[len(prefix):]) and query.shape == own.shape:
            return query.clone()
    whose = f"{source[4:]} has" if source.startswith("run=") else "there is"
    raise ValueError(f"{whose} no {feed} read in layer {layer} with a query of width {len(own)}")


def effect(case: Case, before: dict, change: Change, label: str) -> dict:
    """NLL with `change`, and its difference from `before` on the same windows with a paired 95% t interval."""
    from stats import t_interval
    with changed(case.model, change):
        after = case.measure(label)
    d = after["window_nll"] - before["window_nll"]
    mean, sd, interval = float(d.mean()), None, None
    if len(d) > 1:
        sd = float(d.std(ddof=1))
        interval = t_interval(mean, sd, len(d))
    return dict(reads=len(change), nll_before=before["nll"], nll_after=after["nll"], delta=mean, sd=sd,
                js_mean=after["js_mean"], t_ci=interval)


def with_interval(effect: dict) -> str:
    text = f"{effect['delta']:+.6f}"
    if effect["t_ci"]:
        text += " [{:+.6f}, {:+.6f}]".format(*effect["t_ci"])
    return text


def run_interventions(case: Case, before: dict) -> None:
    """Measure, print and store the interventions of `case`."""
    found, profiles, where = {}, {}, case.flags.layers
    for text, change in case.interventions.items():
        text = re.sub(r"run=.*/(?=.)", "run=", text)
        e = found[text] = dict(layers=case.layers, **effect(case, before, change, text))
        if case.flags.by_layer and not text.startswith("out:"):
            e["by_layer"] = profiles[text] = []
            for l in case.layers:
                alone = {place: x for place, x in change.items() if place.layer == l}
                profiles[text].append(dict(layer=l, **effect(case, before, alone, f"{text}, layer {l}")))
    header = ["intervention", "reads changed", "NLL before", "NLL after", "difference"]
    rows = []
    for text, e in found.items():
        rows.append([text, e["reads"], number(e["nll_before"], 6), number(e["nll_after"], 6), with_interval(e)])
    print(f"\n{case.name}: reads changed in {f'layers {where}' if where else 'all layers'}; NLL on the same "
          f"{case.windows:,} windows, paired 95% t interval (windows taken as independent)\n\n{table(header, rows)}")
    if profiles:
        rows = [[l, *map(with_interval, row)] for l, *row in zip(case.layers, *profiles.values())]
        print(f"\nOne layer at a time:\n\n{table(['layer', *profiles], rows)}")
    if where:
        found = {f"{text}@{where}": e for text, e in found.items()}
    path = case.path("intervene")
    print(f"\n{case.keep(add_interventions, path, dict(case.facts, nll_before=before['nll']), found)}")
    if profiles:
        print(case.keep(draw_profiles, path.with_suffix(".png"), case, profiles), flush=True)


def add_interventions(path: Path, facts: dict, found: dict) -> None:
    """Write `found` to `path`, beside what was measured against the same `facts` before."""
    old = read_json(path) if path.exists() else {}
    if {key: old.get(key) for key in facts} == facts:
        found = old["interventions"] | found
    write_json(path, dict(facts, interventions=found))


def draw_profiles(path: Path, case: Case, profiles: dict[str, list[dict]]) -> None:
    """What each intervention does in one layer at a time."""
    title = f"{case.name}, {case.flags.split}: one layer at a time, 95% t intervals over windows"
    with figure(path, title, 5.2, 3.4) as (_, (ax,)):
        for k, (text, effects) in enumerate(profiles.items()):
            aside = 0.5 * ((k + 0.5) / len(profiles) - 0.5)  # so that the bars of one layer stand side by side
            half = [e["t_ci"][1] - e["delta"] if e["t_ci"] else 0 for e in effects]
            ax.errorbar([l + aside for l in case.layers], [e["delta"] for e in effects], half, label=text, ms=3.5,
                        lw=0.8, capsize=2, fmt="os^Dv<>"[k % 7] + "-", color=COLOURS[k % 7])
        ax.axhline(0, color="0.6", lw=0.8, zorder=0)
        ax.set(xlabel="layer changed", ylabel="change in NLL (nats per token)", xticks=case.layers)
        ax.legend(fontsize=7)


# ---------------------------------------------------------------------------------------------------------
# Crossed backends, text, weights for others

# What the two backends may differ by: the norm of the logits' difference over their norm, NLL and JS in nats.
TOLERANCE = {"float32": dict(logits=1e-5, nll=1e-5, js=1e-5), "bfloat16": dict(logits=2e-2, nll=2e-3, js=1e-3)}


@torch.no_grad()
def compare_backends(case: Case) -> bool:
    """Logits (of the first window), NLL and JS of one checkpoint with reference and with fused routes, printed and
    stored; whether they agree."""
    both, logits, config = [], [], case.model.config
    dtype = case.config["dtype"]
    if case.device.type == "cpu":  # Triton's interpreter cuts bfloat16 off where it should round
        dtype = "float32"
    autocast, limit = make_autocast(case.device, dtype), TOLERANCE[dtype]
    ids = torch.from_numpy(case.data.tokens(case.flags.split)[:config.context].astype(np.int64))[None].to(case.device)
    for backend in ("fused", "reference"):
        config.backend = backend
        with autocast():
            logits.append(case.model(ids).double())
        both.append(case.measure(f"{case.name}, {backend}", autocast=autocast))
    config.backend = case.facts["backend"]
    (a, b), d = both, logits[0] - logits[1]
    found = dict(logits=(d.norm() / logits[1].norm()).item(), nll=abs(a["nll"] - b["nll"]), js=0.0,
                 logits_max=d.abs().max().item(), logits_mean=d.abs().mean().item(),
                 nll_window_max=abs(a["window_nll"] - b["window_nll"]).max(), nll_fused=a["nll"],
                 nll_reference=b["nll"], dtype=dtype, tolerance=limit)
    if a["js"]:
        found["js"] = max(abs(x - y) for x, y in zip(a["js"], b["js"]))
    found["within"] = all(found[k] <= v for k, v in limit.items())
    rows = [[k, f"{found[k]:.3g}", v] for k, v in limit.items()]
    stored = case.keep(write_json, case.path("backends"), {**case.facts, **found, "backend": "fused, reference"})
    print(f"{case.name}: fused and reference routes, {case.windows:,} windows, {dtype}\n\n"
          f"{table(['', 'difference', 'tolerance'], rows)}\n\n"
          f"logits: norm of the difference over norm; at most {found['logits_max']:.3g}, on average "
          f"{found['logits_mean']:.3g}; nll: {found['nll_fused']:.7f} and {found['nll_reference']:.7f}, of a window at "
          f"most {found['nll_window_max']:.3g}; js: the largest of a layer\n\n{stored}", flush=True)
    return found["within"]


def sample(case: Case) -> str:
    """The prompt and its continuation as text; generation stops at no token, EOS shows as a blank line."""
    f, tokenizer, (_, eos) = case.flags, load_tokenizer(case.tokenizer), check_tokenizer(case.tokenizer)
    ids = tokenizer.encode(f.sample).ids or [eos]
    generator = torch.Generator(case.device).manual_seed(f.seed)
    with case.autocast():
        out = case.model.generate(torch.tensor([ids], device=case.device), f.new_tokens, f.temperature, f.top_k or None,
                                  generator)
    documents = itertools.groupby(out[0].tolist(), lambda token: token == eos)
    return "\n\n".join(tokenizer.decode(list(d)) for end, d in documents if not end)


def export(case: Case, folder: Path) -> None:
    """Write the weights, the model's settings and the tokenizer, model.safetensors last: where it is, all are."""
    import safetensors.torch
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").unlink(missing_ok=True)
    settings = dataclasses.asdict(case.model.config) | {"backend": "auto"}  # for the machine that loads it
    origin = {key: case.config.get(key) for key in ("name", "seed", "data_fingerprint", "tokenizer_sha256")}
    write_json(folder / "config.json", {**settings, **origin, "step": case.step})
    with atomic_file(folder / "tokenizer.json") as f:
        f.write(case.tokenizer.read_bytes())
    with atomic_file(folder / "model.safetensors") as f:
        f.write(safetensors.torch.save(case.model.state_dict(), {"format": "pt"}))
    print(f"{case.name}: step {case.step:,} exported to {folder}; python eval.py -h says how to load it", flush=True)


# ---------------------------------------------------------------------------------------------------------
# The command


@dataclass
class Flags:
    runs: list[str] = dataclasses.field(default_factory=list, metadata={"help": "run folders", "path": True})
    split: str = flag("val", "which split to evaluate", ("val", "test", "train"))
    data: str | None = flag(None, "another data folder with the same tokenizer [the run's own]", path=True)
    backend: str | None = flag(None, "how routes are computed [as in training]", ("auto", "reference", "fused"))
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda"))
    eval_tokens: int | None = flag(None, "predicted tokens [as in training]", least=1)
    eval_batch: int | None = flag(None, "sequences at a time [the run's micro_batch]", least=1)
    by_position: bool = flag(False, "also NLL by position in the context")
    report: bool = flag(False, "also depth weights, entropy and JS of every read, with a figure")
    intervene: str | None = flag(None, "also NLL with reads changed: a comma list of READ:FROM, or swap (see above)")
    layers: str | None = flag(None, "layers that --intervene changes, as in 5,6 or 2-4 [all]")
    by_layer: bool = flag(False, "--intervene in one layer at a time too, with a figure")
    compare_backends: bool = flag(False, "compare reference and fused routes instead; exit 1 beyond tolerance")
    sample: str | None = flag(None, "continue this text; evaluates only if one of the above asks for it")
    new_tokens: int = flag(100, "how many tokens to add to --sample", least=0)
    temperature: float = flag(0.8, "of sampling; 0 takes the likeliest token", least=0, most=100)
    top_k: int = flag(200, "sample among the likeliest so many tokens; 0 among all", least=0)
    seed: int = flag(1, "of sampling", least=0, most=2 ** 63 - 1)
    export: str | None = flag(None, "write the weights of one run to this folder (see above); evaluates as --sample",
                              path=True)

    def evaluates(self) -> bool:
        """Whether an evaluation is asked for: by name, or by nothing else."""
        named = self.by_position or self.report or self.intervene is not None
        return named or not (self.compare_backends or self.export or self.sample is not None)


def evaluate_run(case: Case) -> dict:
    """One evaluation and what was asked for beside it, printed and stored."""
    f, c, facts, n = case.flags, case.config, case.facts, case.windows
    report, position = RouteReport(case), torch.zeros(c["context"], dtype=torch.float64, device=case.device)

    def observe(token_nll, record, js):
        position.add_(token_nll.sum(0, dtype=torch.float64))
        if f.report:
            report(token_nll, record, js)

    result = case.measure(case.name, observe)

    def write(path):
        store(case.folder, result, c["name"], f.split, case.step, case.step * c["tokens_per_step"], facts["backend"],
              facts["data_fingerprint"], path)

    print(f"{case.name}: step {case.step:,}, {n:,} windows x {c['context']:,} = {facts['eval_tokens']:,} tokens of "
          f"{f.split} in {case.data.path}{'' if case.enough else ', all there is'}; {case.keep(write, case.path())}",
          flush=True)
    result["position"] = (position / n).tolist()
    if f.by_position:
        case.keep(write_json, case.path("position"), dict(facts, nll=result["position"]))
    if f.report and report.sums:
        found, path = dict(facts, **report.result(result)), case.path("report")
        print(report_text(found))
        print(f"\n{case.keep(write_json, path, found)}\n{case.keep(draw_report, path.with_suffix('.png'), found)}",
              flush=True)
    elif f.report:
        print(f"{case.name}: {c['arch']} has no depth reads to report")
    if case.interventions:
        run_interventions(case, result)
    return result


def summary(results: list[tuple[str, dict]], by_position: bool) -> str:
    """The tables at the end: a row for each run."""
    rows = []
    for name, r in results:
        w = r["window_nll"]
        error = w.std(ddof=1) / math.sqrt(len(w)) if len(w) > 1 else None
        rows.append([name, number(r["nll"], 6), number(error, 5), number(r["ppl"], 4), number(r["bits_per_byte"], 5),
                     number(r["js_mean"], 5)])
    text = "\n" + table(["run", "NLL", "+- s.e. of windows", "perplexity", "bits/byte", "JS"], rows)
    with_js = [(name, r["js"]) for name, r in results if r["js"]]
    if with_js:
        text += "\n\nJS divergence in nats between the depth reads that feed K and V (q_kv: Q and K), layer by layer:\n"
        text += "\n".join(f"  {name}: {' '.join(number(x, 4) for x in js)}" for name, js in with_js)
    if by_position:
        longest, rows = max(len(r["position"]) for _, r in results), []
        ends = [0, *(2 ** i for i in range((longest - 1).bit_length() + 1))]
        for a, b in zip(ends, ends[1:]):
            cells = [r["position"][a:b] for _, r in results]
            rows.append([f"{a + 1} to {b}", *(number(np.mean(x) if x else None, 4) for x in cells)])
        text += "\n\nNLL by position in the context:\n\n" + table(["position", *(name for name, _ in results)], rows)
    return text


def main(argv: list[str]) -> None:
    f = parse_flags(Flags, argv, __doc__, positional="runs")
    if f.intervene is None and (f.layers or f.by_layer):
        raise BadInput("--layers and --by_layer go with --intervene")
    folders, device = runs_among(f.runs), pick_device(f.device)
    if f.export:
        if len(folders) > 1:
            raise BadInput("--export takes one run")
        if (Path(f.export) / "ckpt.pt").exists() or (Path(f.export) / "metrics.jsonl").exists():
            raise BadInput(f"--export={f.export} is a run's folder: name another")
        if importlib.util.find_spec("safetensors") is None:
            raise BadInput("--export needs safetensors: pip install -r requirements.txt")
    if f.split == "test":
        print("warning: the test split is for the last word: choose nothing by it", file=sys.stderr)
    for folder in folders[1:]:  # what is wrong with any is said before the work; one at a time fits the memory
        Case(folder, f, device)
    results, apart, unstored = [], [], []
    try:
        for folder in folders:
            case = Case(folder, f, device)
            if f.evaluates():
                results.append((case.name, evaluate_run(case)))
            if f.compare_backends and not compare_backends(case):
                apart.append(case.name)
            if f.sample is not None:
                print(sample(case))
            if f.export:
                export(case, Path(f.export))
            unstored += case.unstored
    finally:  # whatever becomes of a later run, the table of those before it is printed
        if results:
            print(summary(results, f.by_position), flush=True)
    if apart:
        raise Failed(f"reference and fused routes differ by more than the tolerance: {', '.join(apart)}")
    if unstored:
        raise BadInput("\n".join(unstored))


if __name__ == "__main__":
    run_script(main)
