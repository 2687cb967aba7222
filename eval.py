"""Evaluate trained runs: NLL, perplexity, bits per byte, JS divergence between depth reads, and text.

    python eval.py runs/S-rd-s123                                  # as training logged it, from the last checkpoint
    python eval.py runs/nano-block-s123 runs/nano-rd-s123          # several runs, one table
    python eval.py runs/nano-rd-s123 --sample="It is a truth"      # continue a prompt
    python eval.py runs/S-rd-s123 --split=test                     # for the last word only: nothing is chosen on it

Every evaluation is stored in the run's folder, eval/<split>-<step>.json and .npy, where stats.py finds it.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from model import GPT, GPTConfig, find_arm
from prepare import BadInput, Progress, atomic_file, flag, open_data, parse_flags, read_json, run_script, write_json

# Dimension letters: B windows in a batch, T tokens of a window, L layers, K sources, R reads, N = B * T.


def js_divergence(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Jensen-Shannon divergence in nats between p and q, float32 [K, ...] summing to one over dim 0: [...]."""
    m = 0.5 * (p + q)
    kl = [torch.xlogy(a, a / m).nan_to_num_(0.0).sum(0) for a in (p, q)]  # 0 / 0 where a weight underflowed to 0
    return (0.5 * (kl[0] + kl[1])).clamp_min_(0.0)


def js_pair(model: GPT) -> tuple[int, int] | None:
    """Which of an attention's reads the JS divergence compares: those that feed K and V, or Q and K where K and V
    share one. None for an arm with one read. `average` feeds all three from its mean: its two reads are compared."""
    arm = find_arm(model.config.arch)
    if len(arm.reads) < 2:
        return None
    q, k, v = model.layers[0].feeds
    return (0, 1) if arm.combine else (k, v) if k != v else (q, k)


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
             rank: int = 0, ranks: int = 1, stop=lambda: False, label: str | None = None) -> dict | None:
    """NLL over the first `windows` non-overlapping windows of `split`, `batch` at a time, shared among the ranks.

    `autocast` is a function returning the context to run under. Sums are float64, window by window, so that the result
    does not depend on `batch` or `ranks` beyond the products' own rounding. Returns nll (nats), ppl, bits_per_byte,
    eval_tokens, js_mean, js, js_of_mean (per layer, nats) and window_nll, float64 [windows]; None when `stop()` said so.
    """
    T, pair, L = model.config.context, js_pair(model), model.config.n_layer
    tokens = data.tokens(split)
    token_bytes = data.token_bytes() if token_bytes is None else token_bytes
    nll = torch.zeros(windows, dtype=torch.float64)
    n_bytes = torch.zeros(1, dtype=torch.float64)
    js = torch.zeros(L, dtype=torch.float64)
    means = [None] * L  # per layer: weights [2, K] summed over tokens
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
            record = [] if pair else None
            with autocast():
                token_nll = model.token_nll(x, y, record)
            nll[index] = token_nll.double().mean(1).cpu()
            n_bytes += float(token_bytes[ids[:, 1:].numpy()].sum())
            for l in range(L if pair else 0):
                weights = record[2 * l][list(pair)]  # the attention's record; the MLP's is the next
                js[l] += js_divergence(weights[0], weights[1]).sum(dtype=torch.float64).cpu()
                total = weights.sum(-1, dtype=torch.float64).cpu()
                means[l] = total if means[l] is None else means[l] + total
            if rank == 0:
                progress.update(len(index) * T)
    if ranks > 1:
        sums = [nll, n_bytes, js]
        if pair:  # a rank that had no window still takes part
            widths = [1 + l // model.config.block_layers + (l % model.config.block_layers > 0) for l in range(L)]
            means = [torch.zeros(2, k, dtype=torch.float64) if m is None else m for m, k in zip(means, widths)]
            sums += means
        for s in sums:
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
          suffix: str = "") -> Path:
    """Write eval/<split>-<step>.json and .npy in a run's folder, the .npy first: the .json says that both are whole."""
    path = folder / "eval" / f"{split}-{step:06d}{suffix}.json"
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
    names = {f.name for f in dataclasses.fields(GPTConfig)}
    return GPTConfig(**{k: v for k, v in c.items() if k in names})


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
                return torch.load(path, map_location="cpu", weights_only=True)
            except Exception as e:  # torch raises many kinds for a file that is cut short
                broken.append(f"{path} does not load ({type(e).__name__}); delete it to start from the one before, or anew")
    if broken:
        raise BadInput("\n".join(broken))
    return None


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
    wrong = [f"{n}: {tuple(state[n].shape)} saved, {tuple(p.shape)} in config.json" for n, p in model.state_dict().items()
             if n in state and state[n].shape != p.shape]
    wrong += [f"{n} is missing" for n in model.state_dict() if n not in state] + [f"{n} is not of this arm" for n in state
                                                                                 if n not in model.state_dict()]
    if wrong:
        raise BadInput(f"{folder}: the checkpoint does not fit its config.json: {'; '.join(wrong[:3])}"
                       + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""))
    model.load_state_dict(state)
    return model.to(device).eval(), config, step


@dataclass
class Flags:
    runs: list[str] = dataclasses.field(default_factory=list, metadata={"help": "run folders"})
    split: str = flag("val", "which split to evaluate", ("val", "test", "train"))
    data: str | None = flag(None, "another data folder with the same tokenizer [the run's own]")
    backend: str | None = flag(None, "how routes are computed [as in training]", ("auto", "reference", "fused"))
    device: str = flag("auto", "where to compute", ("auto", "cpu", "cuda"))
    eval_tokens: int | None = flag(None, "predicted tokens [as in training]")
    eval_batch: int | None = flag(None, "sequences at a time [the run's micro_batch]")
    sample: str | None = flag(None, "continue this text instead of evaluating")
    new_tokens: int = flag(100, "how many tokens to add to --sample")
    temperature: float = flag(0.8, "of sampling; 0 takes the likeliest token")
    top_k: int = flag(200, "sample among the likeliest so many tokens; 0 among all")
    seed: int = flag(1, "of sampling")


def sample(f: Flags, model: GPT, data, device: torch.device, autocast) -> str:
    """The prompt and its continuation as text; generation stops at no token, EOS shows as a blank line."""
    ids = data.tokenizer().encode(f.sample).ids or [data.eos_id]
    generator = torch.Generator(device).manual_seed(f.seed)
    with autocast():
        out = model.generate(torch.tensor([ids], device=device), f.new_tokens, f.temperature, f.top_k or None, generator)
    pieces, tokenizer = [], data.tokenizer()
    for token in out[0].tolist():
        if token == data.eos_id or not pieces:
            pieces.append([])
        if token != data.eos_id:
            pieces[-1].append(token)
    return "\n\n".join(tokenizer.decode(p) for p in pieces if p)


def main(argv: list[str]) -> None:
    f = parse_flags(Flags, argv, __doc__, positional="runs")
    if not f.runs:
        raise BadInput("name at least one run folder, as in python eval.py runs/nano-rd-s123")
    device = pick_device(f.device)
    rows = []
    for folder in map(Path, f.runs):
        if not folder.is_dir():
            raise BadInput(f"{folder} is not a folder")
        model, c, step = load_run(folder, device, f.backend)
        data = open_data(Path(f.data or c["data"]), splits=(f.split,))
        if data.meta["tokenizer_sha256"] != c["tokenizer_sha256"]:
            raise BadInput(f"{data.path} was encoded with another tokenizer than {folder.name} was trained with: prepare it with "
                           f"--tokenizer={c['data']}/tokenizer.json")
        autocast = make_autocast(device, c["dtype"])
        if f.sample is not None:
            print(sample(f, model, data, device, autocast))
            continue
        if f.split == "test":
            print("the test split is for the last word: choose nothing by it", flush=True)
        windows, enough = slice_windows(data, f.split, c["context"], f.eval_tokens or c["eval_tokens"])
        result = evaluate(model, data, f.split, windows, f.eval_batch or c["micro_batch"], device, autocast, label=folder.name)
        backend = model.config.backend
        usual = f.data is None and f.eval_tokens is None
        suffix = ("" if backend == c["backend"] else f"-{backend}") + ("" if usual else f"-{data.path.name}-{windows * c['context']}")
        path = store(folder, result, c["name"], f.split, step, step * c["tokens_per_step"], backend, data.fingerprint, suffix)
        rows.append((folder.name, result))
        print(f"{folder.name}: step {step:,}, {windows:,} windows x {c['context']:,} = {result['eval_tokens']:,} tokens of {f.split}"
              + ("" if enough else ", all there is") + f"; stored in {path}", flush=True)
    if not rows:
        return
    print("\n| run | NLL | +- s.e. of windows | perplexity | bits/byte | JS |\n|---|---|---|---|---|---|")
    for name, r in rows:
        w = r["window_nll"]
        error = f"{w.std(ddof=1) / math.sqrt(len(w)):.5f}" if len(w) > 1 else "-"
        bpb = "-" if r["bits_per_byte"] is None else f"{r['bits_per_byte']:.5f}"
        js = "-" if r["js_mean"] is None else f"{r['js_mean']:.5f}"
        print(f"| {name} | {r['nll']:.6f} | {error} | {r['ppl']:.4f} | {bpb} | {js} |")
    if any(r["js"] for _, r in rows):
        print("\nJS divergence in nats between the depth reads that feed K and V (q_kv: Q and K), layer by layer:")
        for name, r in rows:
            if r["js"]:
                print(f"  {name}: " + " ".join(f"{x:.4f}" for x in r["js"]))


if __name__ == "__main__":
    run_script(main)
