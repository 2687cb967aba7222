"""python -m pytest -q test_model.py

Tests of every script, against independent computation: float64 transcriptions of the equations, finite differences,
scipy, closed forms, the paper's numbers. No GPU is needed; the fused kernels run in Triton's interpreter.

    Shared helpers and fixtures
    prepare.py        -k prepare
    model.py          -k model
    route_kernel.py   -k kernel
    train.py          -k train
    eval.py           -k eval
    stats.py          -k stats
"""
from __future__ import annotations

import collections
import contextlib
import dataclasses
import errno
import hashlib
import http.server
import itertools
import json
import math
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on the CPU

import eval as evaluation
import prepare
import route_kernel as rk
import stats
import train
from model import (ARMS, GPT, GPTConfig, HeadLoss, Routes, canonical, find_arm, logits_apart,
                   rms_norm, setting)
from prepare import BadInput, Failed, open_data, parse_flags
from route_kernel import Depth, choose_backend, route

ROOT = Path(__file__).resolve().parent
torch.set_num_threads(1)  # the shapes are tiny: a second thread would wait for the first
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def hasten_interpreter():
    """Triton's interpreter prepares its language for every call of a device function, most of its time here, though
    the launch has done it: let it do so once for every module that such functions come from."""
    from triton.runtime import interpreter
    prepared = {rk.__name__}

    def call(self, *args, **kwargs):
        if self.fn.__module__ not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(self.fn.__module__)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


if rk.triton is not None and rk.INTERPRETED:
    hasten_interpreter()


def pytest_generate_tests(metafunc):
    """-k also matches the name of a file: without another one, `-k model` would select every test in test_model.py."""
    metafunc.definition.getparent(pytest.Module).name = "tests"


# ---------------------------------------------------------------------------------------------------------
# Shared


TINY = dict(n_layer=6, n_embd=32, n_head=2, block_layers=2, context=16, vocab_size=61)


def tiny(arch="rd", seed=1, backend="reference", **kw):
    return GPT(GPTConfig(arch=arch, backend=backend, **{**TINY, **kw}), seed=seed)


def tokens(B=2, T=16, seed=0, vocab=61):
    ids = torch.randint(vocab, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def stir(model, scale=0.5, seed=3):
    """Gains, and all that mixes over depth and learns, away from their start."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.dim() == 1:
                p += scale * torch.randn(p.shape, generator=g) * p.requires_grad
        g.manual_seed(seed + 1)
        for p in map(model.get_parameter, sorted(model.routing_names())):
            if p.dim() != 1:
                p += 0.2 * scale * torch.randn(p.shape, generator=g)
    return model


def tie(rd, block):
    """Give `rd` the parameters of `block`, its V query those of the QK query."""
    with torch.no_grad():
        rd.load_from(block.state_dict())
    return rd


def on_backend(backend):
    """Skip, with the reason, where the fused kernels cannot run."""
    try:
        choose_backend(backend, DEVICE)
    except BadInput as e:
        pytest.skip(str(e))


def write_bin(path, n, vocab=61, seed=0):
    np.random.RandomState(seed).randint(0, vocab, n).astype("<u2").tofile(path)
    return path


FLAGS = dict(scale="nano", n_layer=4, n_embd=32, n_head=2, block_layers=2, context=16, batch_size=4, micro_batch=4,
             max_steps=12,
             eval_tokens=320, device="cpu", dtype="float32", lr=3e-3, ckpt_every=3)


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A data folder of random words, prepared for real."""
    folder = tmp_path_factory.mktemp("toy")
    rng = np.random.RandomState(0)
    words = ["".join(rng.choice(list("abcdefghij"), rng.randint(2, 7))) for _ in range(60)]
    docs = [" ".join(rng.choice(words, 6)) for _ in range(60)]  # so little that twelve steps pass the end of an epoch
    pq.write_table(pa.table({"text": docs}), folder / "toy.parquet")
    done = run_command("prepare.py", f"--source={folder / 'toy.parquet'}", f"--out={folder / 'data'}",
                       "--vocab_size=300",
                       "--val_fraction=0.45", "--test_fraction=0.1", "--workers=1")
    assert done.returncode == 0, done.stderr
    return folder / "data"


def run_command(*args, env=None, timeout=120):
    """`python ARGS` from the project's folder, one thread, as a user would."""
    return subprocess.run([sys.executable, *map(str, args)], cwd=ROOT, capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})})


def as_flags(**kw):
    return [f"--{k}={v}" for k, v in {**FLAGS, **kw}.items()]


def train_here(out, toy, **kw):
    """train.main in this process; (exit code, run folder)."""
    before = set(Path(out).glob("nano-*"))
    code = train.main(as_flags(data=toy, out=out, **kw))
    new = sorted(set(Path(out).glob("nano-*")) - before)
    return code, new[0] if len(new) == 1 else new


def timeless(folder):
    """The lines of a run's metrics without what may differ between identical runs."""
    lines = [json.loads(x) for x in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in x.items() if k not in ("seconds", "tokens_per_s", "peak_memory_bytes")} for x in lines]


def same_state(a, b):
    a, b = (torch.load(Path(x) / "ckpt.pt", weights_only=True) for x in (a, b))
    assert a["step"] == b["step"]
    for k in a["model"]:
        assert torch.equal(a["model"][k], b["model"][k]), k
    for i, state in a["optimizer"]["state"].items():
        for k, v in state.items():
            assert torch.equal(v, b["optimizer"]["state"][i][k])


@pytest.fixture(scope="session")
def toy_runs(toy, tmp_path_factory):
    """block and rd, trained as a pair; a folder of runs."""
    out = tmp_path_factory.mktemp("runs")
    assert train.main(as_flags(data=toy, out=out, arch="block,rd")) == 0
    return out


def the_run(runs, arch):
    return next(Path(runs).glob(f"nano-{arch}-s123-*"))


# ---------------------------------------------------------------------------------------------------------
# prepare.py


def test_prepare_flags_take_every_usual_form():
    parse = lambda *argv: parse_flags(train.Flags, list(argv), "", lists=True)
    f = parse("--lr=1", "--max_steps=1e3", "--compile=false", "--no-deterministic", "--data=a=b", "--seed", "7",
              "--force")[0]
    assert (f.lr, f.max_steps, f.data, f.seed) == (1.0, 1000, "a=b", 7)
    assert (f.compile, f.deterministic, f.force) == (False, False, True)
    pairs = [(x.arch, x.seed) for x in parse("--arch=block,rd", "--seed=1,2")]
    assert pairs == [("block", 1), ("block", 2), ("rd", 1), ("rd", 2)]
    with pytest.raises(BadInput, match="--lr needs a value"):
        parse("--lr")


PREP_SCRIPT = Path(prepare.__file__).resolve()
PREP_BINS = ("train.bin", "val.bin", "test.bin", "tokenizer.json", "meta.json")
PREP_HOSTILE = [
    "plain words, it's don't we'll I'VE 's't're x's", "  two  spaces\n\n\n and\ttabs \r\n end  ", " ", "\n",
    "\t\n ", "a", "'", "''s",
    "<|eos|> <|endoftext|> <|pad|><|unk|> </s> <eos>", "héllo 😀 世界 \u0000 nul \ufeff bom \u202e rtl \U0010ffff",
    "e\u0301 vs é",
    "a\r\nb\rc\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029\u3000x", "½ cup ² ③ Ⅷ ٣ १२ x²y",
    "x" * 5000, "ab " * 3000, "\n" * 3000 + "z",
    "\u200b\u200d\u2060\u00ad\u180e a\u00a0b", "\U0001fae8 \U00031350 \u0897 \U0001ccd6 new code points",
    "ſ K 'ſ 'S", "ﬁ ǅ ª º ʰ ⅓",
    "cat cat\0 cat\0\0 cat catdog", "a  \u2028\n b \u2028  \u2029 c",
    " ".join(f"prefixed{a}{b}" for a in "abcdefgh" for b in "stuvwxyz"),
]


def prep_write(path, texts, kind=pa.string(), rows=40):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": pa.array(texts, kind), "n": range(len(texts))}), path, row_group_size=rows)


def prep_texts(n, seed=0):
    """Deterministic prose of a few thousand characters a document, with rare words and foreign letters."""
    random = np.random.default_rng(seed)
    words = ["".join(chr(97 + c) for c in random.integers(0, 26, random.integers(1, 9))) for _ in range(3000)]
    words += ["Ünïcode", "naïve", "don't", "1984", "…", "—", "世界"]
    return [" ".join(words[int(i)] for i in random.zipf(1.3, 60 + k % 300) % len(words)) + f" {seed}.{k}"
            for k in range(n)]


def prep_run(*flags, **kw):
    return subprocess.run([sys.executable, PREP_SCRIPT, *map(str, flags)], capture_output=True, text=True,
                          timeout=120, **kw)


def prep_make(source, out, *flags):
    prepare.main([f"--source={source}", f"--out={out}", "--vocab_size=500", *flags])
    return Path(out)


def prep_refused(source, out, *flags):
    with pytest.raises((prepare.BadInput, prepare.Failed)) as e:
        prep_make(source, out, *flags)
    assert "\n" not in str(e.value) and not (Path(out) / "meta.json").exists()
    return str(e.value)


def prep_documents(folder, split):
    """The split's documents, decoded from its bin."""
    data = prepare.open_data(folder, prepare.SPLITS)
    tokenizer, ids = data.tokenizer(), np.array(data.tokens(split))
    ends = np.flatnonzero(ids == data.eos_id)
    assert len(ids) == 0 or ends[-1] == len(ids) - 1
    return [tokenizer.decode(d[:-1].tolist(), skip_special_tokens=False) for d in np.split(ids, ends + 1)[:-1]]


def prep_split(text, salt="rd-attnres", val=0.005, test=0.005):
    """An independent statement of method.md, section 4, in whole numbers."""
    h = int(hashlib.blake2b(text.encode(), digest_size=8, salt=salt.encode()).hexdigest(), 16)
    return "train" if h < round((1 - val - test) * 2**64) else "val" if h < round((1 - test) * 2**64) else "test"


def prep_same(a, b):
    return all((Path(a) / name).read_bytes() == (Path(b) / name).read_bytes() for name in PREP_BINS)


@pytest.fixture(scope="module")
def prep_corpus(tmp_path_factory):
    """Three files, 900 documents; two of the files in a subfolder. And the folder made of them by one process."""
    root = tmp_path_factory.mktemp("prep")
    texts = [prep_texts(300, seed) for seed in range(3)]
    texts[1][5] = texts[0][7]  # a duplicate
    for k, name in enumerate(("a.parquet", "b/c.parquet", "b/d.parquet")):
        prep_write(root / "source" / name, texts[k])
    made = prep_make(root / "source", root / "made", "--workers=1", "--val_fraction=0.1", "--test_fraction=0.1")
    return root / "source", made, sum(texts, [])


def test_prepare_splits_and_round_trip(prep_corpus):
    source, made, texts = prep_corpus
    meta = prepare.open_data(made, prepare.SPLITS).meta
    for split in prepare.SPLITS:
        expected = [t for t in texts if prep_split(t, val=0.1, test=0.1) == split]
        assert prep_documents(made, split) == expected
        assert meta["splits"][split]["documents"] == len(expected) > 50
        assert meta["splits"][split]["bytes"] == sum(len(t.encode()) for t in expected)
        assert meta["splits"][split]["sha256"] == hashlib.sha256((made / f"{split}.bin").read_bytes()).hexdigest()
        assert meta["splits"][split]["tokens"] * 2 == (made / f"{split}.bin").stat().st_size
    assert meta["vocab_size"] == 500 and meta["eos_id"] == 3 and meta["salt"] == "rd-attnres"


def test_prepare_split_fractions():
    counts = np.bincount([prepare.split_of(b"document %d" % i, "rd-attnres", 0.005, 0.005) for i in range(100_000)])
    assert abs(counts[1] - 500) < 70 and abs(counts[2] - 500) < 70  # three standard deviations
    sample = sum(prepare.in_sample(b"document %d" % i, "rd-attnres", 1 / 20) for i in range(100_000))
    assert abs(sample - 5000) < 210
    assert [prepare.split_of(t.encode(), "s", 0.3, 0.3) for t in PREP_HOSTILE] == [
        prepare.SPLITS.index(prep_split(t, "s", 0.3, 0.3)) for t in PREP_HOSTILE]


def test_prepare_bytes_do_not_depend_on_workers_or_hash_seed(prep_corpus, tmp_path, monkeypatch):
    source, made, _ = prep_corpus
    flags = ["--vocab_size=500", "--val_fraction=0.1", "--test_fraction=0.1"]
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import prepare; prepare.PART_BYTES = int(sys.argv[2]); "
            "prepare.WORKER_BYTES = 1; prepare.main(sys.argv[3:])")
    for workers, part in ((1, 1), (2, 1), (2, 100_000)):
        out = tmp_path / f"{workers}-{part}"
        script = tmp_path / "run.py"  # spawn imports the main script again: it must be a file with a guard
        script.write_text(f"if __name__ == '__main__':\n    {code}\n")
        run = subprocess.run([sys.executable, script, PREP_SCRIPT.parent, str(part), f"--source={source}",
                              f"--out={out}",
                              f"--workers={workers}", *flags], capture_output=True, text=True, timeout=120,
                             env={**os.environ, "PYTHONHASHSEED": str(workers), "RAYON_NUM_THREADS": str(workers)})
        assert run.returncode == 0, run.stderr
        assert prep_same(out, made)


def test_prepare_tokenizer_does_not_depend_on_order():
    texts = prep_texts(100)
    assert prepare.train_tokenizer(texts, 600) == prepare.train_tokenizer(texts[::-1], 600)


def test_prepare_hostile_documents_come_back(tmp_path):
    texts = PREP_HOSTILE + prep_texts(100)
    prep_write(tmp_path / "h.parquet", texts[:50] + [None, "", None] + texts[50:])
    made = prep_make(tmp_path / "h.parquet", tmp_path / "made", "--val_fraction=0", "--test_fraction=0")
    assert prep_documents(made, "train") == texts
    assert prepare.read_json(made / "meta.json")["report"]["skipped"] == {"null": 2, "empty": 1, "not UTF-8": 0}
    data = prepare.open_data(made, prepare.SPLITS)
    ids = np.array(data.tokens("train"))
    assert data.tokens("val").shape == (0,) and data.tokens("train").dtype == np.uint16
    assert not np.isin(ids, [0, 1, 2]).any() and (ids == 3).sum() == len(texts)  # no text became a control id
    assert data.token_bytes()[ids].sum() == sum(len(t.encode()) for t in texts)


def test_prepare_encoder_equals_the_tokenizer(tmp_path, monkeypatch):
    texts = PREP_HOSTILE[::-1] + prep_texts(50, 9) + ["".join(PREP_HOSTILE)] + [f"é{t} {t}" for t in PREP_HOSTILE]
    random = np.random.default_rng(0)
    pieces = [" ", "  ", "\n", "'s", "'", "a", "B", "7", "é", "½", ".",
              "\u3000", "\u0301", "😀", "\x1c", "世", "\u0897"]
    texts += ["".join(random.choice(pieces, 40)) for _ in range(500)]
    (tmp_path / "t.json").write_text(prepare.train_tokenizer(prep_texts(200), 700), encoding="utf-8")
    plain = prepare.load_tokenizer(tmp_path / "t.json")
    expected = [plain.encode(text, add_special_tokens=False).ids for text in texts]
    for most in (prepare.Encoder.MOST, 3):  # the latter: a memo that is full at once
        monkeypatch.setattr(prepare.Encoder, "MOST", most)
        encoder = prepare.Encoder(tmp_path / "t.json", 3)
        assert encoder.fast
        for _ in range(2):  # cold and warm
            for text, ids in zip(texts, expected):
                assert np.frombuffer(encoder.encode(text), "<u2").tolist() == [*ids, 3], text
        assert len(encoder) <= most and all(len(piece) <= encoder.LONG for piece in encoder)


def test_prepare_encoder_and_every_code_point(tmp_path):
    """Code points among spaces, letters and digits: all that white space is among, and a sample of the others; the
    common ones in more places, and random neighbours."""
    (tmp_path / "t.json").write_text(prepare.train_tokenizer(prep_texts(50), 600), encoding="utf-8")
    encoder = prepare.Encoder(tmp_path / "t.json", 3)
    points = [chr(c) for c in [*range(0x3100), *range(0x3100, 0xD800, 13), *range(0xE000, 0x110000, 61)]]
    common = [chr(c) for c in [*range(256), *range(0x2000, 0x2030)]]
    texts = ["".join(f"x {c} y{c}{c} 1{c}" for c in points[i:i + 100]) for i in range(0, len(points), 100)]
    texts += [f"a{c}b {c}{c} 1{c} '{c}s  {c} a{c}\n  {c}" for c in common]
    random = np.random.default_rng(0)
    texts += ["".join(random.choice(list(" \n'aé1½.") + pool, 60))
              for pool in (common[1::3], points[::1500]) for _ in range(500)]
    for text in texts:
        ids = encoder.tokenizer.encode(text, add_special_tokens=False).ids
        assert np.frombuffer(encoder.encode(text), "<u2").tolist() == [*ids, 3], ascii(text)


def test_prepare_other_tokenizers_take_the_slow_road(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    made = Tokenizer.from_str(prepare.train_tokenizer(prep_texts(50), 600))
    made.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    made.enable_truncation(5)
    made.save(str(tmp_path / "a.json"))
    made.add_tokens(["zq qz"])
    made.save(str(tmp_path / "b.json"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    made.save(str(tmp_path / "c.json"))
    for name, fast in (("a", True), ("b", False), ("c", False)):
        encoder = prepare.Encoder(tmp_path / f"{name}.json", 3)
        assert encoder.fast == fast
        plain = prepare.load_tokenizer(tmp_path / f"{name}.json")
        for text in ["one zq qz two", *PREP_HOSTILE]:
            ids = np.frombuffer(encoder.encode(text), "<u2").tolist()
            assert ids == [*plain.encode(text, add_special_tokens=False).ids, 3]
    prep_write(tmp_path / "s.parquet", ["one zq qz two <|endoftext|>"] * 3)
    flag = f"--tokenizer={tmp_path / 'b.json'}"
    made = prep_make(tmp_path / "s.parquet", tmp_path / "out", flag, "--vocab_size=602")
    assert prepare.open_data(made).token_bytes()[np.array(prepare.open_data(made).tokens("train"))].sum() == 3 * 27
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    big = Tokenizer(models.BPE(vocab={**{c: i for i, c in enumerate(letters)}, "<|eos|>": 65536}, merges=[]))
    big.add_special_tokens(["<|eos|>"])
    big.pre_tokenizer = pre_tokenizers.ByteLevel()
    big.save(str(tmp_path / "big.json"))
    with pytest.raises(prepare.BadInput, match="65,537"):
        prepare.main([f"--source={tmp_path}", f"--out={tmp_path / 'no'}", f"--tokenizer={tmp_path / 'big.json'}"])
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("phase", ["tokenizer", "encoding", "joining", "meta"])
def test_prepare_continues_after_a_kill(prep_corpus, tmp_path, phase):
    """SIGKILL in each phase; the next run keeps the finished parts and ends with the undisturbed run's bytes."""
    source, made, _ = prep_corpus
    out, script = tmp_path / "out", tmp_path / "run.py"
    script.write_text(f"""if __name__ == "__main__":
    import os, signal, sys
    sys.path.insert(0, {str(PREP_SCRIPT.parent)!r})
    import prepare
    prepare.PART_BYTES, phase, calls = 1, {phase!r}, 0
    def die(*a, **k):
        os.kill(os.getpid(), signal.SIGKILL)
    def at(name, call, n):  # the n-th of these calls does not come back
        def counted(*a, **k):
            global calls
            calls += phase == name
            return die() if calls == n else call(*a, **k)
        return counted
    prepare.train_tokenizer = at("tokenizer", prepare.train_tokenizer, 1)
    prepare.make_part = at("encoding", prepare.make_part, 8)
    prepare.Path.unlink = at("joining", prepare.Path.unlink, 11)
    prepare.describe = at("meta", prepare.describe, 1)
    prepare.main(sys.argv[1:])
""")
    flags = [f"--source={source}", f"--out={out}", "--vocab_size=500", "--val_fraction=0.1", "--test_fraction=0.1"]
    run = subprocess.run([sys.executable, script, *flags, "--workers=1"], capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL, run.stderr
    with pytest.raises(prepare.BadInput, match="not finished"):
        prepare.open_data(out)
    kept = {p: p.stat().st_mtime_ns for p in (out / ".work").glob("0*.json")}
    assert len(kept) == {"tokenizer": 0, "encoding": 7}.get(phase, 24)
    again = prep_run(*flags, "--workers=1")
    assert again.returncode == 0, again.stderr
    assert prep_same(out, made) and not (out / ".work").exists()


def test_prepare_dead_worker_and_ctrl_c_leave_no_process(tmp_path):
    """A killed worker is one line; Ctrl-C ends the workers; a killed parent takes its workers along."""
    prep_write(tmp_path / "s.parquet", prep_texts(2000))
    script = tmp_path / "run.py"
    script.write_text(f"""import sys, time
sys.path.insert(0, {str(PREP_SCRIPT.parent)!r})
import prepare
prepare.PART_BYTES, prepare.WORKER_BYTES = 1, 1
encode = prepare.Encoder.encode
prepare.Encoder.encode = lambda self, document: (time.sleep(0.01), encode(self, document))[1]
if __name__ == "__main__":
    prepare.run_script(prepare.main)
""")

    def children(pid):
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                if b"spawn_main" in Path(f"/proc/{p}/cmdline").read_bytes()]
    for act, code in (("worker", 1), ("ctrl-c", 130), ("parent", -9)):
        flags = [f"--source={tmp_path / 's.parquet'}", f"--out={tmp_path / act}", "--vocab_size=500", "--workers=2"]
        run = subprocess.Popen([sys.executable, script, *flags], stderr=subprocess.PIPE, text=True,
                               start_new_session=True)
        deadline = time.monotonic() + 30
        while len(workers := children(run.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.8)  # into the work
        if act == "worker":
            os.kill(workers[0], signal.SIGKILL)
        elif act == "ctrl-c":
            os.killpg(run.pid, signal.SIGINT)
        else:
            run.kill()
        stderr = run.communicate(timeout=30)[1]
        assert run.returncode == code, stderr
        assert "Traceback" not in stderr and ("worker process died" in stderr) == (act == "worker")
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{w}").exists() for w in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(Path(f"/proc/{w}").exists() for w in workers)


def test_prepare_says_it_is_finished_and_refuses_other_settings(prep_corpus, tmp_path, capsys):
    source, made, _ = prep_corpus
    folder = shutil.copytree(made, tmp_path / "made")
    flags = ["--val_fraction=0.1", "--test_fraction=0.1"]
    prep_make(source, folder, *flags)
    assert "finished already" in capsys.readouterr().out
    with pytest.raises(prepare.BadInput, match="salt is rd-attnres there and other here.*--overwrite"):
        prep_make(source, folder, *flags, "--salt=other")
    copy = shutil.copytree(source, tmp_path / "source")
    prep_write(copy / "b" / "d.parquet", prep_texts(300, 5))
    with pytest.raises(prepare.BadInput, match="made otherwise: b/d.parquet is"):
        prep_make(copy, folder, *flags)
    assert prepare.open_data(folder).fingerprint == prepare.open_data(made).fingerprint
    prep_make(copy, folder, *flags, "--overwrite")
    assert prepare.open_data(folder).fingerprint != prepare.open_data(made).fingerprint
    (folder / "meta.json").unlink()
    with pytest.raises(prepare.BadInput, match="bins without a meta.json"):
        prep_make(source, folder, *flags)


@pytest.mark.parametrize("name, line", [
    ("no_rows", "no document"), ("wrong_column", "'text' is not there.*content"),
    ("int_column", "holds int64, not text"),
    ("truncated", "cut off or damaged"), ("second_bad", "2.parquet is cut off or damaged"), ("zero_bytes", "is empty"),
    ("lfs", "Git LFS pointer"), ("incomplete", "no parquet file"), ("no_files", "no parquet file"),
    ("not_parquet", "not a parquet file"), ("flipped", "is damaged after row"), ("missing", "no such file or folder"),
])
def test_prepare_bad_sources(tmp_path, name, line):
    folder, texts = tmp_path / name, prep_texts(200)
    folder.mkdir()
    prep_write(folder / "1.parquet", texts)
    good = (folder / "1.parquet").read_bytes()
    if name == "no_rows":
        prep_write(folder / "1.parquet", [])
    if name == "wrong_column":
        pq.write_table(pa.table({"content": texts}), folder / "1.parquet")
    if name == "int_column":
        pq.write_table(pa.table({"text": range(9)}), folder / "1.parquet")
    if name == "truncated":
        (folder / "1.parquet").write_bytes(good[:len(good) // 2])
    if name == "second_bad":
        (folder / "2.parquet").write_bytes(good[:len(good) // 2])
    if name == "zero_bytes":
        (folder / "1.parquet").write_bytes(b"")
    if name == "lfs":
        (folder / "1.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 21\n")
    if name == "incomplete":
        (folder / "1.parquet").rename(folder / "1.parquet.incomplete")
    if name == "no_files":
        (folder / "1.parquet").unlink()
    if name == "not_parquet":
        (folder / "1.parquet").write_text("{'text': 'a'}\n")
    if name == "flipped":  # a page whose checksum no longer holds
        pq.write_table(pa.table({"text": texts}), folder / "1.parquet", write_page_checksum=True, compression="none",
                       use_dictionary=False)
        data = bytearray((folder / "1.parquet").read_bytes())
        data[len(data) // 3] ^= 1
        (folder / "1.parquet").write_bytes(data)
    if name == "missing":
        folder = tmp_path / "nowhere"
    assert re.search(line, prep_refused(folder, tmp_path / "out"))


def test_prepare_skips_what_is_not_utf8_and_reads_binary_and_dictionary_columns(tmp_path):
    texts = prep_texts(50)
    raw = [t.encode() for t in texts] + [b"bad \xff", b"\xed\xa0\x80 surrogate"]
    prep_write(tmp_path / "b.parquet", raw, pa.binary())
    offsets = pa.array([0, 3, 6], pa.int32()).buffers()[1]
    bad = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab\xffok.")])
    pq.write_table(pa.table({"text": bad}), tmp_path / "c.parquet")
    pq.write_table(pa.table({"text": pa.array(["ok.", "ok.", "x", None]).dictionary_encode()}), tmp_path / "d.parquet")
    made = prep_make(tmp_path, tmp_path / "out", "--val_fraction=0", "--test_fraction=0")
    assert prep_documents(made, "train") == texts + ["ok.", "ok.", "ok.", "x"]
    assert prepare.read_json(made / "meta.json")["report"]["skipped"] == {"null": 1, "empty": 0, "not UTF-8": 3}


@pytest.mark.parametrize("flags, line", [
    (["--vocab_size=65537"], "between 260 and 65536"), (["--vocab_size=100"], "between 260 and 65536"),
    (["--salt=\udcff"], "is not UTF-8"),
    (["--salt=" + "x" * 17], "longer than 16 bytes"),
    (["--val_fraction=0.6", "--test_fraction=0.4"], "together below 1"),
    (["--workers=0"], "--workers=0 must be at least 1"),
    (["--tokenizer=/nowhere.json"], "cannot be read as a tokenizer"),
    (["--worker=2"], "did you mean --workers"), (["--source=/nowhere"], "no such file"),
    (["--source=dmeo"], "did you mean demo"),
])
def test_prepare_bad_flags(tmp_path, flags, line):
    run = prep_run("--source=demo", f"--out={tmp_path / 'out'}", *flags)
    assert run.returncode == 2 and run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert line in run.stderr and run.stdout == ""


def test_prepare_full_disk(prep_corpus, tmp_path, monkeypatch, capsys):
    """Too little space is said beforehand; a disk that fills up later is one line, exit code 2, and a later start."""
    source, made, _ = prep_corpus
    flags = [f"--source={source}", f"--out={tmp_path / 'out'}", "--vocab_size=500", "--val_fraction=0.1",
             "--test_fraction=0.1"]
    with monkeypatch.context() as m:
        m.setattr(prepare.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 1000))
        with pytest.raises(OSError, match="GB are free"):
            prepare.main(flags)
    for limit in (3_000, 60_000):  # bytes a file may have: in the tokenizer, in a bin
        run = prep_run(*flags, preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
                                                   resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))))
        assert run.returncode == 2 and "free some space, then run the same command again" in run.stderr, run.stderr
        assert "Traceback" not in run.stderr and not (tmp_path / "out" / "meta.json").exists()
    assert prep_run(*flags).returncode == 0
    assert prep_same(tmp_path / "out", made)


def test_prepare_open_data_refuses_what_is_not_whole(prep_corpus, tmp_path):
    _, made, _ = prep_corpus
    folder = shutil.copytree(made, tmp_path / "demo")
    prepare.open_data(folder, prepare.SPLITS)

    def refused(pattern):
        with pytest.raises(prepare.BadInput, match=pattern) as e:
            prepare.open_data(folder, prepare.SPLITS)
        assert "python prepare.py --source=demo --out=" in str(e.value)
    data = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(data[:-1])
    refused("train.bin holds .* bytes where meta.json says")
    (folder / "train.bin").write_bytes(data[:-2] + b"zz")
    refused("train.bin is not the file that meta.json describes")
    (folder / "train.bin").write_bytes(b"")
    refused("train.bin holds 0 bytes")
    (folder / "train.bin").unlink()
    refused("train.bin is missing")
    (folder / "train.bin").write_bytes(data)
    prepare.open_data(folder)
    tokenizer = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(tokenizer + " ")
    refused("tokenizer.json is not the file")
    (folder / "tokenizer.json").write_text(tokenizer)
    meta = json.loads((folder / "meta.json").read_text())
    del meta["fingerprint"]
    (folder / "meta.json").write_text(json.dumps(meta))
    refused("says fingerprint = None")
    (folder / "meta.json").unlink()
    refused("has no meta.json")
    shutil.rmtree(folder)
    refused("does not exist")


def test_prepare_open_data_reads_a_file_again_only_when_it_changed(prep_corpus, tmp_path, monkeypatch):
    folder = shutil.copytree(prep_corpus[1], tmp_path / "made")
    (folder / ".verified.json").unlink(missing_ok=True)
    read, hashed = [], prepare.sha256_of
    monkeypatch.setattr(prepare, "sha256_of", lambda path: (read.append(Path(path).name), hashed(path))[1])
    prepare.open_data(folder)
    prepare.open_data(folder)
    assert sorted(read) == ["tokenizer.json", "train.bin", "val.bin"]
    os.utime(folder / "val.bin")
    prepare.open_data(folder)
    assert read[3:] == ["val.bin"]


@contextlib.contextmanager
def prep_hub(files, shas=None, cut=(), fail=0):
    """A stand-in for the Hub: its listing of a folder, and files with ranges; the first request for a name in `cut`
    breaks off in the middle, the first `fail` requests are answered 503. Yields (its address, requests so far)."""
    log, cut, left = [], set(cut), [fail]

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_HEAD(self):
            self.do_GET()

        def do_GET(self):
            log.append((self.path, self.headers.get("Range")))
            name, status, body = self.path.split("/")[-1].split("?")[0], 200, b""
            if left[0] > 0:
                left[0] -= 1
                status = 503
            elif "/tree/" in self.path:
                body = json.dumps([{
                    "type": "file", "path": f"sample/10BT/{n}", "size": len(d), "oid": "0" * 40,
                    "lfs": {"oid": (shas or {}).get(n) or hashlib.sha256(d).hexdigest(), "size": len(d),
                            "pointerSize": 1}} for n, d in files.items()]).encode()
            elif name in files:
                start = int((self.headers.get("Range") or "bytes=0-")[6:].rstrip("-"))
                status, body = 206 if start else 200, files[name][start:]
            else:
                status = 404
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if name in files:
                self.send_header("ETag", f'"{hashlib.sha256(files[name]).hexdigest()}"')
                self.send_header("X-Repo-Commit", "0" * 40)
            self.end_headers()
            if self.command == "HEAD":
                return
            if name in cut:
                cut.discard(name)
                self.wfile.write(body[:len(body) // 2])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            else:
                self.wfile.write(body)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", log
    finally:
        server.shutdown()
        server.server_close()


def test_prepare_from_the_hub(tmp_path):
    files, texts = {}, [prep_texts(150, seed) for seed in range(3)]
    for k in range(3):
        prep_write(tmp_path / "parquet" / "sample" / "10BT" / f"{k:03}.parquet", texts[k])
        files[f"{k:03}.parquet"] = (tmp_path / "parquet" / "sample" / "10BT" / f"{k:03}.parquet").read_bytes()
    expected = prep_make(tmp_path / "parquet", tmp_path / "local")

    def run(out, hub, *flags):
        env = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
        env.pop("HF_HUB_OFFLINE", None)
        return prep_run(f"--out={tmp_path / out}", "--vocab_size=500", *flags, env=env)
    with prep_hub(files, cut=["001.parquet"], fail=1) as (hub, log):
        made = run("hub", hub)
        assert made.returncode == 0, made.stderr
        assert all((tmp_path / "hub" / f).read_bytes() == (expected / f).read_bytes() for f in PREP_BINS[:4])
        asked = len(log)
        again = run("hub", hub)
        assert again.returncode == 0 and "finished already" in again.stdout and len(log) == asked
    with prep_hub(files, shas={"002.parquet": "0" * 64}) as (hub, log):
        made = run("flip", hub)
        assert made.returncode == 1 and made.stderr.splitlines()[-1].endswith("than the Hub lists: it is not used")
        assert "Traceback" not in made.stderr and not (tmp_path / "flip" / "meta.json").exists()
        assert not (tmp_path / "flip" / "parquet" / "sample" / "10BT" / "002.parquet").exists()


@pytest.mark.parametrize("change, line", [
    ("bytes", "lacks 1 of the 256 bytes"), ("added", "text can become its end of text"), ("dropout", None)])
def test_prepare_tokenizers_that_lose_text_are_refused(tmp_path, change, line):
    """No whole byte alphabet (D1), an end of text that text can become (D2); dropout is off (D3)."""
    made = json.loads(prepare.train_tokenizer(prep_texts(50), 600))
    if change == "bytes":
        made["model"]["vocab"]["gone"] = made["model"]["vocab"].pop("\u0100")
    if change == "added":
        made["added_tokens"][3]["special"] = False
    (tmp_path / "plain.json").write_text(json.dumps(made))
    made["model"]["dropout"] = 0.5 if change == "dropout" else None
    (tmp_path / "t.json").write_text(json.dumps(made))
    prep_write(tmp_path / "s.parquet", prep_texts(20))

    def make(name):
        prepare.main([f"--source={tmp_path / 's.parquet'}", f"--out={tmp_path / name}",
                      f"--tokenizer={tmp_path / name}.json"])
        return (tmp_path / name / "train.bin").read_bytes()
    if line is None:
        assert make("t") == make("plain")
        return
    with pytest.raises(BadInput, match=line):
        make("t")
    assert not (tmp_path / "t").exists()


def test_prepare_reads_an_encrypted_file_views_and_names_with_dots(tmp_path):
    """An encrypted column beside the text (D4) ends no process; string_view, and text{x} beside text.x (D11)."""
    texts = ["one", "two"]
    nested = pa.StructArray.from_arrays([pa.array(["no", "no"])], ["x"])
    pq.write_table(pa.table({"text": nested, "text.x": texts}), tmp_path / "dots.parquet")
    pq.write_table(pa.table({"text.x": pa.array(texts, pa.string_view())}), tmp_path / "view.parquet")
    made = prep_make(tmp_path, tmp_path / "out", "--text_column=text.x", "--val_fraction=0", "--test_fraction=0")
    assert prep_documents(made, "train") == texts * 2
    try:
        import pyarrow.parquet.encryption as pe
    except ImportError:
        pytest.skip("this pyarrow writes no encrypted file")

    class Keys(pe.KmsClient):
        def __init__(self, config):
            super().__init__()

        def wrap_key(self, key, name):
            return key.hex()

        def unwrap_key(self, key, name):
            return bytes.fromhex(key)
    encrypted = tmp_path / "encrypted" / "e.parquet"
    encrypted.parent.mkdir()
    config = pe.EncryptionConfiguration(footer_key="f", column_keys={"c": ["secret"]}, plaintext_footer=True)
    factory = pe.CryptoFactory(Keys)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    table = pa.table({"text": texts, "secret": texts})
    with pq.ParquetWriter(encrypted, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    run = prep_run(f"--source={encrypted}", f"--out={tmp_path / 'e'}", "--vocab_size=300", "--val_fraction=0",
                   "--test_fraction=0")
    if run.returncode == 0:
        assert prep_documents(tmp_path / "e", "train") == texts
    else:
        assert run.returncode == 2 and run.stderr.count("\n") == 1, run.stderr


def test_prepare_a_refused_source_leaves_nothing_and_the_advice_works(tmp_path):
    """D5."""
    pq.write_table(pa.table({"content": prep_texts(20)}), tmp_path / "s.parquet")
    assert "(text: content)" in prep_refused(tmp_path / "s.parquet", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    prep_make(tmp_path / "s.parquet", tmp_path / "out", "--text_column=content")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": 1}\n')  # found in the middle of the work
    assert "line 2 cannot be used" in prep_refused(tmp_path / "bad.jsonl", tmp_path / "mended")
    assert not (tmp_path / "mended").exists()
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n')
    prep_make(tmp_path / "bad.jsonl", tmp_path / "mended")


def test_prepare_reads_each_file_once_and_no_hidden_ones(tmp_path, capsys):
    """Links (D6), names that begin with _ (P9)."""
    for name in ("a.parquet", "_temporary/b.parquet", "_old.parquet", ".c.parquet"):
        prep_write(tmp_path / "s" / name, [name])
    (tmp_path / "s" / "latest").symlink_to(".")
    (tmp_path / "s" / "z.parquet").symlink_to("a.parquet")
    assert [f["path"] for f in prepare.source_files(tmp_path / "s", None)] == ["a.parquet"]
    said = capsys.readouterr().err
    assert all(name in said for name in ("latest", "z.parquet", "_temporary", "_old.parquet"))


def test_prepare_a_finished_folder_is_looked_at_again(prep_corpus, tmp_path):
    """D7: a bin that is gone or changed is named. D9: so is a source file that was touched."""
    source, made, _ = prep_corpus
    flags = ["--val_fraction=0.1", "--test_fraction=0.1"]
    folder = shutil.copytree(made, tmp_path / "made")
    data = bytearray((folder / "train.bin").read_bytes())
    data[len(data) // 2] ^= 1
    (folder / "train.bin").write_bytes(data)
    with pytest.raises(BadInput, match="train.bin is not the file.*--overwrite"):
        prep_make(source, folder, *flags)
    (folder / "train.bin").unlink()
    with pytest.raises(BadInput, match="train.bin is missing.*--overwrite"):
        prep_make(source, folder, *flags)
    prep_make(source, folder, *flags, "--overwrite")
    assert prep_same(folder, made)
    copy = shutil.copytree(source, tmp_path / "source")
    os.utime(copy / "a.parquet")
    with pytest.raises(BadInput, match="made otherwise: a.parquet is"):
        prep_make(copy, folder, *flags)


@pytest.mark.parametrize("key, value", [
    ("vocab_size", 70000), ("vocab_size", None), ("vocab_size", 300), ("eos_id", 600), ("eos_id", 5),
    ("fingerprint", "0" * 16), ("tokens", "1650441"), ("tokens", -1), ("splits", [])])
def test_prepare_meta_must_fit_itself(prep_corpus, tmp_path, key, value):
    """D8."""
    folder = shutil.copytree(prep_corpus[1], tmp_path / "made")
    meta = prepare.read_json(folder / "meta.json")
    (meta["splits"]["train"] if key == "tokens" else meta)[key] = value
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(BadInput, match="meta.json (says|has)"):
        open_data(folder)


def test_prepare_reads_jsonl(tmp_path):
    """D10, P10: long lines, an id that changes its type; a lone surrogate is skipped and counted."""
    texts = ["word " * 600_000, "y " * 600_000, "z\n \u00e9\U0001f600"]
    with open(tmp_path / "s.jsonl", "w", encoding="utf-8") as f:
        for k, text in enumerate(texts):
            f.write(json.dumps({"id": [1, "one", None][k], "text": text}) + "\n\n")
        f.write('{"text": "lone \\ud800"}\n{"text": null}\n{"id": 3}\n{"text": ""}\n')
    made = prep_make(tmp_path / "s.jsonl", tmp_path / "out", "--val_fraction=0", "--test_fraction=0")
    assert prep_documents(made, "train") == texts
    assert open_data(made, ["train"]).meta["report"]["skipped"] == {"null": 2, "empty": 1, "not UTF-8": 1}


def test_prepare_odd_names_and_pipes(tmp_path):
    """D11: one line each, and none waits."""
    os.mkfifo(tmp_path / "f.parquet")
    (tmp_path / "bad").mkdir()
    prep_write(tmp_path / "ok.parquet", ["a"])
    os.rename(tmp_path / "ok.parquet", os.fsencode(tmp_path / "bad") + b"/\xff.parquet")
    for source, line in ((tmp_path / "f.parquet", "no regular file"), (tmp_path / "bad", "is not UTF-8")):
        run = prep_run(f"--source={source}", f"--out={tmp_path / 'out'}")
        assert run.returncode == 2 and line in run.stderr and run.stderr.count("\n") == 1, run.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("status, kind, line", [
    (404, BadInput, "--subset"), (401, BadInput, "HF_TOKEN"), (403, BadInput, "HF_TOKEN"), (503, Failed, "attempts"),
    (None, BadInput, "--subset")])
def test_prepare_says_at_once_what_will_not_pass(monkeypatch, status, kind, line):
    """D13: only a fault of the server is waited for; D12: the sentence says what is kept."""
    waits = []
    monkeypatch.setattr(prepare.time, "sleep", waits.append)
    name = "HfHubHTTPError" if status else "TooManyRedirects"

    def action():
        error = type(name, (Exception,), {})(f"answer {status}")
        error.response = SimpleNamespace(status_code=status or 302)
        raise error
    with pytest.raises(kind, match=line):
        prepare.patiently("x", action)
    assert bool(waits) == (status == 503)


@pytest.mark.parametrize("name", ["../../../evil.parquet", "/evil.parquet", "a\\..\\evil.parquet"])
def test_prepare_a_listing_stays_in_its_folder(monkeypatch, name):
    """D14."""
    import huggingface_hub
    listed = [SimpleNamespace(path=name, size=1, lfs=SimpleNamespace(sha256="0"))]
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_tree", lambda *a, **k: listed)
    with pytest.raises(BadInput, match="outside the folder"):
        prepare.hub_files("sample/10BT", "0" * 40, None)


def test_prepare_two_at_once_and_the_home_folder(tmp_path):
    """P8: the second waits. P13: ~ is the home folder; a terminal without UTF-8 gets plain text."""
    prep_write(tmp_path / "\u00e9.parquet", prep_texts(20))
    env = {**os.environ, "HOME": str(tmp_path), "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    source = f"--source={tmp_path / chr(233)}.parquet"
    command = [sys.executable, PREP_SCRIPT, source, "--out=~/out", "--vocab_size=300"]
    runs = [subprocess.Popen(command, env=env, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    assert open_data(tmp_path / "out", prepare.SPLITS) and not (tmp_path / "~").exists()


def test_prepare_two_writers_of_one_file(tmp_path):
    """P11: both end, the file is one of theirs; what a killed writer left is removed."""
    left = tmp_path / ".a.json.1-0.tmp"
    left.write_text("half")
    os.utime(left, (0, 0))
    with prepare.atomic_file(tmp_path / "a.json", "w") as first:
        with prepare.atomic_file(tmp_path / "a.json", "w") as second:
            second.write("second")
        first.write("first")
    assert (tmp_path / "a.json").read_text() == "first" and [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_prepare_a_folder_made_anew_is_noticed(prep_corpus, tmp_path):
    """P1: what was opened is read to the end, and check() names the change."""
    folder = shutil.copytree(prep_corpus[1], tmp_path / "made")
    data = open_data(folder)
    before = np.array(data.tokens("val"))
    data.check()
    prep_make(prep_corpus[0], folder, "--val_fraction=0.1", "--test_fraction=0.1", "--salt=other", "--overwrite")
    assert np.array_equal(data.tokens("val"), before)
    with pytest.raises(BadInput, match="prepared anew"):
        data.check()


def test_prepare_demo_from_anywhere(tmp_path):
    run = prep_run("--source=demo", cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    data = prepare.open_data(tmp_path / "data" / "demo", prepare.SPLITS)
    texts = pq.read_table(PREP_SCRIPT.parent / "data" / "austen.parquet")["text"].to_pylist()
    for split in prepare.SPLITS:
        expected = [t for t in texts if prep_split(t, val=0.05, test=0.05) == split]
        assert prep_documents(data.path, split) == expected != []
    assert data.vocab_size == 4096 and data.meta["source"] == "demo"


# ---------------------------------------------------------------------------------------------------------
# model.py


RIVALS = ("full full_rd mhar lowrank delta delta_block denseformer resformer block_resformer depth_attention mudd "
          "mudd_rd hc mhc").split()
PAPER = [arch for arch in ARMS if arch not in RIVALS]
OPTIONS = ["mhar:heads=4:sources=full", "lowrank:rank=8", "lowrank:rank=8:sources=full", "resformer:learnable=true",
           "block_resformer:learnable=true"]
SPECS = [*ARMS, *OPTIONS]
FEEDS = {  # by which query the inputs of Q, K and V are read
    "rd": ("qk", "qk", "v"), "average": ("qk", "qk", "v"), "frozen_v": ("qk", "qk", "v"), "full_rd": ("qk", "qk", "v"),
    "q_kv": ("q", "kv", "kv"), "k_qv": ("qv", "k", "qv"), "q_k_v": ("q", "k", "v"), "mudd": ("q", "k", "v"),
    "mudd_rd": ("qk", "qk", "v")}


class Oracle:
    """Logits [B, T, V] in float64 of any arm, from the equations of the papers alone: lists of sources, loops over
    them, and parameters by their names. `seen` holds every mixture's weights by (layer, name): ([K, N], running)."""

    def __init__(self, model, eps=None):
        c, self.P = model.config, {n: p.detach().double() for n, p in model.named_parameters()}
        self.name, *options = c.arch.split(":")
        self.options = dict(option.split("=") for option in options)
        self.full = self.name in ("full", "full_rd", "delta") or self.options.get("sources") == "full"
        self.feeds = FEEDS.get(self.name, ("qkv",) * 3)
        self.L, self.M, self.H, self.base = c.n_layer, c.block_layers, c.n_head, c.rope_base
        self.eps, self.seen, self.first_value, self.anchors = eps or c.eps, {}, None, []

    def __call__(self, idx):
        ways = dict.fromkeys(("plain", "resformer", "depth_attention", "denseformer"), self.stream)
        ways |= dict.fromkeys(("mudd", "mudd_rd"), self.ways) | dict.fromkeys(("hc", "mhc"), self.streams)
        ways |= dict.fromkeys(("delta", "delta_block"), self.deltas)
        state = ways.get(self.name, self.routed)(self.P["wte"][idx])
        return self.norm(state) * self.P["out_norm"] @ self.P["wte"].T

    def note(self, layer, name, weights, running=False):  # weights: K of [B, T]
        self.seen[layer, name] = torch.stack(list(weights)).flatten(1), running

    def norm(self, x):
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.eps)

    def rotated(self, x):  # [B, T, H, e], neighbouring pairs
        T, e = x.shape[1], x.shape[-1]
        angle = torch.arange(T).double()[:, None] * self.base ** (-2 * torch.arange(e // 2).double() / e)
        cos, sin, a, b = angle.cos()[:, None], angle.sin()[:, None], x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

    def attention(self, l, hq, hk, hv, gains=None):
        gains = gains or [self.P[f"layers.{l}.attn_norm"]] * 3
        q, k, v = ((self.norm(h) * g @ w.T).unflatten(-1, (self.H, -1))
                   for h, g, w in zip((hq, hk, hv), gains, self.P[f"layers.{l}.w_qkv"].chunk(3)))
        if "resformer" in self.name and l == 0:
            self.first_value = v
        elif "resformer" in self.name:
            share = self.P.get(f"layers.{l}.values.weight", 0.5)
            v = share * self.first_value + (1 - share) * v
        if self.name == "depth_attention":
            seen = [*self.anchors, (k, v)]
            e = torch.stack([(q * key).sum(-1) / math.sqrt(q.shape[-1]) for key, _ in seen]).softmax(0)
            v = sum(e[i][..., None] * value for i, (_, value) in enumerate(seen))
            for head in range(self.H):
                self.note(l, f"head{head}", e[..., head])
            if l == 0 or l == self.L // 2:
                self.anchors.append((k, v))
        T = q.shape[1]
        scores = torch.einsum("bthe,bshe->bhts", self.rotated(q), self.rotated(k)) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        return torch.einsum("bhts,bshe->bthe", scores.softmax(-1), v).flatten(-2) @ self.P[f"layers.{l}.w_o"].T

    def mlp(self, l, h):
        x = self.norm(h) * self.P[f"layers.{l}.mlp_norm"]
        gate, up = (x @ self.P[f"layers.{l}.w_gate_up"].T).chunk(2, -1)
        return (gate * gate.sigmoid() * up) @ self.P[f"layers.{l}.w_down"].T

    def route(self, l, place, name, done, running=None):
        """h = sum_i softmax_i(q . RMSNorm(s_i)) s_i, for each slice of the query (Multi-Head) or the last r
        coordinates of a key (Low-Rank)."""
        q, sources = self.P[f"{place}_read.query.{name}"], done + [running] * (running is not None)
        gain, heads = self.P.get(f"{place}_read.key_gain", 1.0), 1
        if self.name == "mhar":
            heads = int(self.options.get("heads", 2))
        keys, slices = [self.norm(s[..., -len(q):]) * gain * q for s in sources], []
        for i in range(heads):
            a = torch.stack([key.chunk(heads, -1)[i].sum(-1) for key in keys]).softmax(0)
            slices.append(sum(w[..., None] * s.chunk(heads, -1)[i] for w, s in zip(a, sources)))
            self.note(l, f"{name}{i}" if heads > 1 else name, a, running is not None)
        return torch.cat(slices, -1)

    def routed(self, x):
        done, running = [x], None
        for l in range(self.L):
            if l % self.M == 0 and running is not None:
                done, running = [*done, running], None
            for sub in ("attn", "mlp"):
                place = f"layers.{l}.{sub}"
                if sub == "mlp":
                    out = self.mlp(l, self.route(l, place, "mlp", done, running))
                else:
                    hs = [self.route(l, place, feed, done, running) for feed in self.feeds]
                    if self.name == "average":
                        hs = [(hs[0] + hs[2]) / 2] * 3
                    out = self.attention(l, *hs)
                running = out if running is None else running + out
                if self.full:
                    done, running = [*done, running], None
        return self.route(self.L, "out", "out", done if running is None else [*done, running])

    def deltas(self, x):
        sources, start = [x], x
        for l in range(self.L):
            if self.name == "delta_block" and l and l % self.M == 0:
                sources, start = [*sources, x - start], x
            for sub in ("attn", "mlp"):
                h = x
                if (l, sub) != (0, "attn"):
                    h = x + self.route(l, f"layers.{l}.{sub}", "mlp" if sub == "mlp" else "qkv", sources)
                out = self.mlp(l, h) if sub == "mlp" else self.attention(l, h, h, h)
                x = x + out
                if self.full:
                    sources = [*sources, out]
        return x

    def stream(self, x):
        outputs = [x]
        for l in range(self.L):
            x = x + self.attention(l, x, x, x)
            x = x + self.mlp(l, x)
            outputs.append(x)
            if self.name == "denseformer":
                last = l + 1 == self.L
                w = self.P["out_read.static" if last else f"layers.{l + 1}.attn_read.static"][0]
                x = sum(a * out for a, out in zip(w, outputs, strict=True))
                self.note(l + 1, "out" if last else "stream", [a.expand(x.shape[:2]) for a in w])
        return x

    def ways(self, x):
        outputs, way = [x], dict.fromkeys((*self.feeds, "stream"), x)
        for l in range(self.L):
            gains = [self.P.get(f"layers.{l}.attn_read.gains.{f}", self.P[f"layers.{l}.attn_norm"]) for f in self.feeds]
            h = way["stream"] + self.attention(l, *(way[f] for f in self.feeds), gains)
            outputs.append(h + self.mlp(l, h))
            place, names = f"layers.{l + 1}.attn_read.", [*dict.fromkeys(self.feeds), "stream"]
            if l + 1 == self.L:
                place, names = "out_read.", ["out"]
            hidden = self.norm(outputs[-1]) @ self.P[place + "w1"].T
            hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
            A = (hidden @ self.P[place + "w2"].T).unflatten(-1, (len(names), l + 2)) + self.P[place + "static"]
            for i, name in enumerate(names):
                way[name] = sum(A[..., i, j, None] * outputs[j] for j in range(l + 2))
                self.note(l + 1, name, A[..., i, :].unbind(-1))
        return way["out"]

    def streams(self, x):
        xs, n = [x] * 4, range(4)
        for k in range(2 * self.L):
            sub = "mlp" if k % 2 else "attn"
            p = {name: self.P[f"layers.{k // 2}.{sub}_read.{name}"] for name in
                 ("norm static_in static_out w_in w_out scale_in scale_out" if self.name == "hc" else
                  "norm phi bias scale").split()}
            read, keep, write = (self.hyper if self.name == "hc" else self.manifold)(xs, p)
            self.note(k // 2, sub, read)
            h = sum(read[s][..., None] * xs[s] for s in n)
            out = self.mlp(k // 2, h) if k % 2 else self.attention(k // 2, h, h, h)
            xs = [sum(keep[s][t][..., None] * xs[s] for s in n) + write[t][..., None] * out for t in n]
        return sum(xs)

    def hyper(self, xs, p):
        normed = [self.norm(x) * p["norm"] for x in xs]
        into = [row + p["scale_in"] * torch.tanh(h @ p["w_in"]) for row, h in zip(p["static_in"], normed)]
        write = [b + p["scale_out"] * torch.tanh(h @ p["w_out"]) for b, h in zip(p["static_out"], normed)]
        return [i[..., 0] for i in into], [[i[..., 1 + t] for t in range(4)] for i in into], write

    def manifold(self, xs, p):
        z, a, b = self.norm(torch.cat(xs, -1)) * p["norm"] @ p["phi"], p["scale"], p["bias"]
        read = [(a[0] * z[..., s] + b[s]).sigmoid() for s in range(4)]
        write = [2 * (a[1] * z[..., 4 + s] + b[4 + s]).sigmoid() for s in range(4)]
        R = (a[2] * z[..., 8:] + b[8:]).unflatten(-1, (4, 4)).exp()
        for _ in range(20):
            R = R / R.sum(-2, keepdim=True)
            R = R / R.sum(-1, keepdim=True)
        return read, [[R[..., s, t] for t in range(4)] for s in range(4)], write


def published_forward(model, idx):
    return Oracle(model)(idx)


def apart(a, b):
    """Relative distance of two models' logits, or of two tensors."""
    if isinstance(a, torch.nn.Module):
        with torch.no_grad():
            a, b = (model(tokens()[0]) for model in (a, b))
    return ((a - b).norm() / b.norm()).item()


def autocast(dtype="bfloat16"):
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16")


@pytest.mark.parametrize("arch", SPECS)
def test_model_computes_its_equations(arch):
    """Logits, loss and every recorded weight against the oracle, at parameters far from their start: blocks that do
    not divide the layers, one layer, a block longer than the model, blocks of one layer."""
    for layers, block in ((5, 2), (1, 2), (3, 9), (4, 1)):
        check_equations(stir(tiny(arch, n_layer=layers, block_layers=block)))


def check_equations(model):
    (x, y), oracle, record = tokens(), Oracle(model), []
    want = oracle(x)
    loss = F.cross_entropy(want.flatten(0, 1), y.flatten())
    assert abs(model(x, y)[1] - loss) < 3e-6 and apart(model(x), want) < 3e-6
    model.double()
    with torch.no_grad():
        assert apart(F.linear(model.hidden(x, record), model.wte), want) < 1e-6
    assert {(w.layer, w.read) for w in record} == set(oracle.seen) and len(record) == len(oracle.seen)
    assert [w.layer for w in record] == sorted(w.layer for w in record)
    for w in record:
        weights, running = oracle.seen[w.layer, w.read]
        assert w.weights.shape == weights.shape and (w.weights - weights).abs().max() < 1e-6
        assert w.running == running and not w.weights.requires_grad


@pytest.mark.parametrize("arch", SPECS)
def test_model_gradients_against_finite_differences(arch):
    """In float64, every parameter's gradient along a random direction; none that learns is left without one."""
    model, (x, y) = stir(tiny(arch, n_layer=3, block_layers=1)).double(), tokens(1, 8)

    def loss():
        return F.cross_entropy(F.linear(model.hidden(x), model.wte).flatten(0, 1), y.flatten())
    loss().backward()
    g = torch.Generator().manual_seed(5)
    for name, p in model.named_parameters():
        if not p.requires_grad:
            assert p.grad is None
            continue
        assert p.grad is not None, f"{name} would stall DistributedDataParallel"
        way, h = torch.randn(p.shape, generator=g, dtype=torch.float64), 1e-7
        with torch.no_grad():
            p += h * way
            up = loss()
            p -= 2 * h * way
            down = loss()
            p += h * way
        assert abs((p.grad * way).sum() - (up - down) / (2 * h)) < 1e-6, name
    learning = [p for p in map(model.get_parameter, model.routing_names()) if p.requires_grad]
    assert sum(p.grad.norm() > 0 for p in learning) >= 0.6 * len(learning)


# q_kv and k_qv read as rd does, and frozen_v but for a gradient that is not taken
@pytest.mark.parametrize("arch", [a for a in ARMS if ARMS[a].fused and issubclass(ARMS[a].depth, Depth)
                                  and a not in ("q_kv", "k_qv")])
def test_model_fused_model_equals_reference(arch):
    on_backend("fused")
    x, y = tokens(1, 6)
    a, b = (stir(tiny(arch, n_layer=3, backend=k)) for k in ("reference", "fused"))
    assert apart(a(x), b(x)) <= 1e-5
    a(x, y)[1].backward(), b(x, y)[1].backward()
    exact = stir(tiny(arch, n_layer=3)).double()  # full_rd loses 2e-5 in float32 on either path: hold both to float64
    F.cross_entropy(F.linear(exact.hidden(x), exact.wte).flatten(0, 1), y.flatten()).backward()
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), exact.parameters()):
        if p.grad is not None:
            assert (q.grad - r.grad).norm() <= 1e-5 * r.grad.norm() + 2 * (p.grad - r.grad).norm(), name
            assert arch not in PAPER or (p.grad - q.grad).norm() <= 1e-5 * p.grad.norm(), name
    records = [], []
    with torch.no_grad():
        a(x[:, :2], record=records[0]), b(x[:, :2], record=records[1])
    assert len(records[0]) == len(records[1]) > 0
    for u, v in zip(*records):
        assert u[:2] == v[:2] and u.running == v.running and (u.weights - v.weights).abs().max() < 1e-5


class Passes(TorchDispatchMode):
    """Units that a forward and a backward move between their products: one is a [N, d] bfloat16 tensor read or written.

    Additions as torch dispatches them, kernels by the tensors they are launched with, norms outside the kernels by
    number (torch takes several operations for one on a CPU and one on a GPU). A launch does no work here, so that a
    model of any depth is counted at once. Products, attention and the inside of an MLP are left out: they move the
    same in every arm."""

    def __init__(self, N, d):
        super().__init__()
        self.N, self.d, self.units = N, d, collections.Counter()

    def of(self, *values):
        tensors = {t.data_ptr(): t for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
        mine = (t for t in tensors.values() if t.dim() > 1 and t.shape[-1] == self.d and t.numel() == self.N * self.d)
        return sum(t.element_size() / 2 for t in mine)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket is torch.ops.aten.add:
            self.units["additions"] += self.of(args, out)
        return out

    def launch(self, kernel, grid, device, *args, **constants):
        self.units["reads"] += self.of(args if constants.get("ONCE", True) else args[4:])

    def offsets(self, device, *lists):
        """Sources in groups: their pointers lie in a table, and a backward goes through them twice."""
        again = lists[0] if len(lists) > 1 else []
        self.units["reads"] += len(again) + sum(map(len, lists))
        return None, 16

    def norm(self, x, gain, eps):
        self.units["norms"] += 1
        return x * 1


def units_of_reads(L, M, R):
    """The same from the method: blocks of M layers, or sources of one sub-layer (M = 0)."""
    def read(K, R, ahead, pending, last=False):
        if K > rk.GROUP:  # in whole groups, sources twice in a backward, absent gradients as zeros
            return -(-K // rk.GROUP) * rk.GROUP + 4 * -(-K // rk.BACKWARD_GROUP) * rk.BACKWARD_GROUP + 2 * (R + ahead)
        forward = K + R + ahead + 2 * pending  # the sum is read in two parts and written
        return forward + 2 * K + R + ahead + (0 if last else K)

    closing, total = 2 + 1 + 2 + 2 + 1 + 1, 0  # what `ahead` opened and the last source, which alone has a gradient
    for l in range(L):
        K = 2 * l + 1 if not M else l // M + 1 + (l % M > 0)
        total += read(K, R, 1, M and l > 0) + closing + 2 * (M and l % M > 0)
    return total + read(1 + (2 * L if not M else -(-L // M)), 1, 0, M > 0, last=True)


@pytest.mark.parametrize("arch, R, additions", [
    ("plain", 0, 15), ("resformer", 0, 15), ("block", 1, 3), ("tied", 1, 3), ("block_resformer", 1, 3), ("rd", 2, 0),
    ("frozen_v", 2, 0), ("average", 2, 8), ("q_kv", 2, 3), ("k_qv", 2, 3), ("q_k_v", 3, 0), ("full", 1, 3),
    ("full_rd", 2, 0)])
def test_model_passes_over_the_residual_memory(arch, R, additions, monkeypatch):
    """What a step moves is what the method says. `additions`: units a layer, of two residuals and their gradients
    (plain), of two reads' mean and its gradient (average), and of the two gradients that one input of two products
    gets (all but rd and its kind). The Delta arms, whose stream is no part of a read, are not counted."""
    on_backend("fused")
    for scale in ("S", "M") if arch in ("block", "rd") else ("S",):
        c = GPTConfig.from_scale(scale, arch, n_embd=32, n_head=2, context=7, vocab_size=61, backend="fused")
        model, (x, y), passes = GPT(c), tokens(1, 7), Passes(7, 32)
        monkeypatch.setattr(rk, "launch", passes.launch)
        monkeypatch.setattr(rk, "offsets", passes.offsets)
        monkeypatch.setattr("model.rms_norm", passes.norm)
        with passes:
            with autocast():
                loss = model(x, y)[1]
            loss.backward()
        blocks = 0 if arch.startswith("full") else c.block_layers
        got = {"reads": 0, "norms": 0, "additions": 0, **passes.units}
        reads, norms = units_of_reads(c.n_layer, blocks, R), 0
        if arch == "average":  # its two mixtures are joined before the norm, and get one gradient
            reads, norms = reads - c.n_layer, c.n_layer
        elif R == 0:
            reads, norms = 0, 2 * c.n_layer + 1
        assert got == {"reads": reads, "norms": norms, "additions": additions * c.n_layer}
        assert arch != "rd" or round(reads / c.n_layer, 1) == {"S": 32.6, "M": 36.5}[scale]


@pytest.mark.parametrize("backend", ["reference", "fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_tied_queries_are_the_parent_bit_for_bit(dtype, backend):
    """Paper, appendix B: two reads with one query's value, and that query's gradient is the sum over the reads. The
    arm `tied` is one read, and the parent too."""
    on_backend(backend)
    block = stir(tiny("block", n_layer=3, backend=backend))
    x, y = tokens(1, 4) if backend == "fused" else tokens()  # the interpreter is slow
    rd, tied = (tie(tiny(arch, n_layer=3, backend=backend), block) for arch in ("rd", "tied"))
    assert not torch.equal(rd.layers[2].attn_read.query["v"], torch.zeros(32))
    with autocast(dtype):
        if backend == "reference":
            assert torch.equal(block(x), rd(x))
        assert torch.equal(block(x), tied(x))
        (_, a), (_, b) = block(x, y), rd(x, y)
    assert torch.equal(a, b)
    if (backend, dtype) == ("fused", "bfloat16"):
        return  # so few tokens leave little of a gradient in bfloat16
    a.backward(), b.backward()
    tolerance = 1e-5 if dtype == "float32" else 2e-2  # sums of two bfloat16-rounded gradients
    for mine, theirs in zip(rd.layers, block.layers):
        parent = theirs.attn_read.query["qkv"].grad
        both = mine.attn_read.query["qk"].grad + mine.attn_read.query["v"].grad
        assert (both - parent).norm() <= tolerance * parent.norm() + 1e-9


def test_model_layer_zero_and_zero_queries_get_no_gradient():
    """One source leaves nothing to choose; at zero queries a key gain cannot matter (method: exactly 0)."""
    x, y = tokens()
    model = tiny("q_k_v")
    model(x, y)[1].backward()
    for layer in model.layers:
        assert all(r.key_gain.grad.abs().max() == 0 for r in (layer.attn_read, layer.mlp_read))
    assert model.layers[1].attn_read.query["v"].grad.abs().max() > 0
    model = stir(tiny("q_k_v"))
    model(x, y)[1].backward()
    first = model.layers[0].attn_read
    assert first.key_gain.grad.abs().max() == 0 and all(q.grad.abs().max() == 0 for q in first.query.values())
    assert model.layers[1].attn_read.key_gain.grad.abs().max() > 0


def test_model_average_is_degenerate():
    """Two queries that start equal and enter symmetrically get equal gradients, and never part (README, limits)."""
    models = tiny("average"), tiny("block")
    optimizers = [torch.optim.AdamW([{k: g[k] for k in ("params", "lr", "weight_decay")}
                                     for g in m.param_groups(0.01, 0.1)], betas=(0.9, 0.95)) for m in models]
    for n in range(5):
        x, y = tokens(seed=n)
        for model, optimizer in zip(models, optimizers):
            optimizer.zero_grad()
            model(x, y)[1].backward()
            optimizer.step()
        for layer in models[0].layers:
            assert torch.equal(layer.attn_read.query["qk"], layer.attn_read.query["v"])
    a, b = (model(x, y)[1].item() for model in models)
    assert abs(a - b) < 1e-4 and models[0].layers[3].attn_read.query["v"].abs().max() > 0


def test_model_exchanged_queries_are_the_edited_model():
    """A read asked for its parts in another order is the model whose parameters were exchanged by hand."""
    x, _ = tokens()
    for arch, order in (("q_kv", ("kv", "q")), ("rd", ("v", "qk")), ("q_k_v", ("v", "q", "k"))):
        model = stir(tiny(arch))

        class Exchanged(Routes):
            def read(self, read, *rest, **kw):
                return super().read(read, *rest, **kw, feeds=order if len(read.feeds) > 1 else ())
        before, model.memory = model(x), Exchanged
        asked, model.memory = model(x), None
        with torch.no_grad():
            for layer in model.layers:
                old = {feed: q.clone() for feed, q in layer.attn_read.query.items()}
                for feed, takes in zip(ARMS[arch].reads, order):
                    model.get_parameter(f"layers.{layer.attn_read.layer}.attn_read.query.{feed}").copy_(old[takes])
        assert torch.equal(model(x), asked) and apart(asked, before) > 1e-3
        assert apart(asked, Oracle(model)(x)) < 3e-6


# -- precision: bfloat16 under autocast is what trains


@pytest.mark.parametrize("arch", ARMS)
def test_model_causality(arch):
    model, (x, _) = stir(tiny(arch)), tokens()
    changed = x.clone()
    changed[:, 9] = (x[:, 9] + 1) % 61
    for dtype in ("float32", "bfloat16"):
        with autocast(dtype), torch.no_grad():
            a, b = model(x), model(changed)
        assert torch.equal(a[:, :9], b[:, :9]) and not torch.equal(a[:, 9:], b[:, 9:]), dtype


@pytest.mark.parametrize("arch", ARMS)
def test_model_residual_dtype(arch):
    """The stream, its sources and what a read hands out: autocast's dtype, or the one that is asked for."""
    x, y = tokens()
    for asked in (None, "float32", "bfloat16"):
        model, seen = tiny(arch, n_layer=3, residual_dtype=asked), set()

        class Watched(model.arm.depth):
            def read(self, *args, **kw):
                hs = super().read(*args, **kw)
                seen.update(h.dtype for h in hs)
                return hs

            def write(self, out):
                super().write(out)
                streams = [self.x] if hasattr(self, "x") else self.sources
                seen.update(t.dtype for t in streams)
        model.memory = Watched
        with autocast():
            loss = model(x, y)[1]
            assert model(x).dtype == loss.dtype == torch.float32
        loss.backward()
        assert seen == {getattr(torch, asked or "bfloat16")}
    with pytest.raises(ValueError, match="needs autocast"):
        model(x)


def walk(model, x, outs):
    """What every read of a pass hands out, and every V, where sub-layer k's output is outs[k]."""
    depth, found = model.arm.depth(x, model.config, model.arm, []), []
    for l, layer in enumerate(model.layers):
        if l % model.config.block_layers == 0:
            depth.finish_block()
        found += depth.read(layer.attn_read, layer.attn_norm)
        if layer.values is not None:
            q, k, v = (outs[i].unflatten(-1, (2, -1)) for i in (2 * l, 2 * l + 1, 0))
            found.append(layer.values(q, k, v, depth))
        depth.write(outs[2 * l])
        found += depth.read(layer.mlp_read, layer.mlp_norm)
        depth.write(outs[2 * l + 1])
    depth.finish_block()
    return [*found, *depth.read(model.out_read, model.out_norm, last=True)]


@pytest.mark.parametrize("arch", SPECS)
def test_model_mixes_over_depth_in_float32(arch):
    """A float32 stream under bfloat16 autocast, against the same pass in float64: bfloat16 anywhere is 1e-3 off."""
    model, g = stir(tiny(arch)), torch.Generator().manual_seed(1)
    x, *outs = torch.randn(13, 2, 16, 32, generator=g).unbind(0)
    with autocast(), torch.no_grad():
        got = walk(model, x, outs)
    model.double()
    with torch.no_grad():
        want = walk(model, x.double(), [out.double() for out in outs])
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.dtype == torch.float32 and apart(a.double(), b) < 1e-5


def test_model_rms_norm_in_bfloat16_is_rounded_once():
    g = torch.Generator().manual_seed(0)
    x, gain = torch.randn(200, 64, generator=g).bfloat16(), 1 + torch.randn(64, generator=g) / 4
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain.double()
    got = rms_norm(x, gain, 1e-6)
    assert got.dtype == torch.bfloat16 and (got == exact.bfloat16()).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_model_head_loss_against_float64(dtype):
    """Loss and both gradients at the scale of one and of three micro-batches, in chunks that do not divide the rows."""
    g = torch.Generator().manual_seed(0)
    h = torch.randn(370, 32, generator=g).to(dtype).requires_grad_()
    w = torch.randn(50, 32, generator=g).to(dtype).float().requires_grad_()  # what the product sees in either dtype
    t = torch.randint(50, (370,), generator=g)
    h64, w64 = h.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    want = F.cross_entropy(h64 @ w64.T, t)
    exact = torch.autograd.grad(want, (h64, w64))
    got, low = HeadLoss.apply(h, w, t, 100), dtype == torch.bfloat16
    assert got.dtype == torch.float32 and abs(got - want) < (2e-2 if low else 1e-6)
    for scale in (1, 3):
        found = torch.autograd.grad(got / scale, (h, w), retain_graph=True)
        for mine, e in zip(found, exact):
            mine, e = mine.double().flatten(), e.flatten() / scale
            assert (mine - e).norm() < (1e-2 if low else 1e-6) * e.norm()
            assert abs(mine @ e / (e @ e) - 1) < (5e-4 if low else 1e-6), "its size is off, not its last bits"


def test_model_generation_obeys_temperature_and_top_k():
    """The shares of 8,000 drawn tokens against softmax(logits / temperature), within five standard errors."""
    model, n = stir(tiny()), 8_000
    with torch.no_grad():
        model.out_norm *= 3 / model(tokens(1, 2)[0])[0, -1].std()  # so that temperatures differ
        logits = model(tokens(1, 2)[0])[0, -1].double()
    prompt, g = tokens(1, 2)[0].expand(n, -1), torch.Generator().manual_seed(7)
    for temperature, top_k in ((0.5, None), (1.0, None), (3.0, None), (2.0, 3)):
        want = (logits / temperature).softmax(0)
        if top_k:
            want = torch.where(logits >= logits.topk(top_k).values[-1], want, 0)
            want /= want.sum()
        drawn = model.generate(prompt, 1, temperature, top_k, generator=g)[:, -1]
        shares = drawn.bincount(minlength=61) / n
        assert ((shares - want).abs() <= 5 * (want * (1 - want) / n).sqrt() + 1e-12).all(), (temperature, top_k)
        assert want.max() < 0.999, "or any temperature would do"


def test_model_generation_repeats_and_takes_long_prompts():
    prompt = torch.arange(40)[None] % 61  # longer than the context of 16
    for model in map(tiny, ARMS):
        a, b = (model.generate(prompt, 5, top_k=20, generator=torch.Generator().manual_seed(7)) for _ in range(2))
        assert torch.equal(a, b) and a.shape == (1, 45)
        likeliest = model(prompt[:, -16:])[0, -1].argmax()
        assert all(model.generate(prompt, 1, temperature=t)[0, -1] == likeliest for t in (0, 1e-40))


def saved_numbers(arch, dtype):
    """Bytes that a forward pass keeps for its backward, each storage once."""
    model, held = tiny(arch, n_layer=8, n_embd=64, context=64, block_layers=4), {}
    x, y = tokens(1, 64)

    def pack(t):
        held[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t
    with autocast(dtype):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(x, y)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return sum(s.nbytes() for k, s in held.items() if k not in weights)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_model_rivals_keep_little_for_the_backward(dtype):
    """Every read keeps its sources by reference: nothing grows with the square of depth."""
    block = saved_numbers("block", dtype)
    for arch in ("full", "full_rd", "delta", "mhar:sources=full", "lowrank:sources=full", "denseformer", "mudd_rd"):
        assert saved_numbers(arch, dtype) < 1.5 * block, arch


# -- parameters: counts, starting values, groups, other models' weights


def routing_count(arch, d, L):
    """Parameters beyond plain's at width d and L layers (the arithmetic of the method and of the rivals' papers)."""
    read = 2 * d  # a query and a key gain
    reads = (2 * L + 1) * read  # one a sub-layer and the output's
    if arch in ("mudd", "mudd_rd"):
        ways, total = len(dict.fromkeys(FEEDS[arch])) + 1, 0
        for i in range(1, L + 1):  # after layer i: W1, W2 and the static weights
            n, widen = (i + 1) * (ways if i < L else 1), 4 if i == L else 1
            hidden = (n * widen // 64 + 1) * 64
            total += d * hidden + hidden * n + n
        return total + (L - 1) * (ways - 2) * d  # and the attention norms beside the layer's own
    return {"plain": 0, "resformer": 0, "depth_attention": 0, "denseformer": L * (L + 3) // 2,
            "rd": reads + L * d, "average": reads + L * d, "frozen_v": reads + L * d, "full_rd": reads + L * d,
            "q_kv": reads + L * d, "k_qv": reads + L * d, "q_k_v": reads + 2 * L * d, "lowrank": (2 * L + 1) * 64,
            "delta": (2 * L - 1) * read, "delta_block": (2 * L - 1) * read,
            "hc": 2 * L * (d + d * 5 + d + 4 * 5 + 4 + 2),  # norm, W_in, W_out, static A, static B, two scales
            "mhc": 2 * L * (4 * d + 4 * d * 24 + 24 + 3)}.get(arch, reads)  # norm, phi, bias, three scales


def test_model_parameter_and_flop_counts():
    """S and M exactly, from the arithmetic; what the paper's Table 4 and the rivals' specifications state in digits."""
    extra = {}
    for scale, d, L in (("S", 576, 16), ("M", 832, 24)):
        for arch in ARMS:
            with torch.device("meta"):
                counts = GPT(GPTConfig.from_scale(scale, arch)).count()
            extra[scale, arch] = routing_count(arch, d, L)
            matrices = 32768 * d + L * (4 * d * d + 15 * d * d)
            assert counts["total"] == matrices + (2 * L + 1) * d + extra[scale, arch], (scale, arch)
            assert counts["routing"] == extra[scale, arch] and counts["frozen"] == L * d * (arch == "frozen_v")
            assert counts["flops_per_token"] == 6 * matrices + 6 * L * 1024 * d  # causal: half of 12 L T d
    stated = dict(plain=0, block=38_016, rd=47_232, q_k_v=56_448, full=38_016, full_rd=47_232, mhar=38_016,
                  lowrank=2_112, delta=35_712, denseformer=152, mudd=722_221, mudd_rd=663_846, hc=129_856,
                  mhc=1_844_064)
    assert {arch: extra["S", arch] for arch in stated} == stated
    assert 119_753_280 + extra["S", "block"] == 119_791_296 and 119_753_280 + extra["S", "rd"] == 119_800_512
    assert 342_957_888 + extra["M", "block"] == 343_039_424 and 342_957_888 + extra["M", "rd"] == 343_059_392
    for spec, routing in (("resformer:learnable=true", 15), ("mhar:heads=9:sources=full", 38_016)):
        with torch.device("meta"):
            assert GPT(GPTConfig.from_scale("S", spec)).count()["routing"] == routing


def test_model_every_arm_starts_as_plain_and_from_the_same_weights():
    """And in no arm is a parameter decayed that mixes over depth, or one of those missing that are."""
    x, y = tokens()
    plain = tiny("plain", n_embd=64)
    base = plain(x, y)[1].item()
    for arch in ARMS:
        model = tiny(arch, n_embd=64)
        for name, p in plain.named_parameters():
            assert torch.equal(p, model.get_parameter(name)), f"{arch}: {name} starts elsewhere"
        assert abs(model(x, y)[1].item() / base - 1) < 1e-2
        groups = {g["kind"]: g["names"] for g in model.param_groups(1e-3, 0.1)}
        assert {n.split(".")[-1] for n in groups["matrices"]} == {"wte", "w_qkv", "w_o", "w_gate_up", "w_down"}, arch
        more = dict(model.named_parameters()).keys() - dict(plain.named_parameters()).keys()
        assert more == model.routing_names()
    for arch in ("denseformer", "mudd", "mudd_rd"):
        assert apart(tiny(arch, n_embd=64), plain) < 1e-6
    assert not torch.equal(plain.wte, tiny("plain", n_embd=64, seed=2).wte)
    assert abs(plain.layers[0].w_o.std() - 0.02) < 0.001, "output projections are not scaled by depth"


def test_model_starting_weights_are_the_same_bits_on_every_cpu():
    """Whatever vector units torch finds, and normal: mean, deviation and tails of 120,000 draws."""
    code = """
import hashlib
from model import GPT, GPTConfig
found = hashlib.sha256()
for arch in ("rd", "mudd"):
    for p in GPT(GPTConfig.from_scale("nano", arch)).parameters():
        found.update(p.detach().numpy().tobytes())
print(found.hexdigest())"""
    units = ["default", "avx2"] if torch.backends.cpu.get_cpu_capability().startswith("AVX") else ["default"]
    done = [run_command("-c", code, env=dict(ATEN_CPU_CAPABILITY=unit)) for unit in units]
    here = hashlib.sha256()
    for model in (GPT(GPTConfig.from_scale("nano", arch)) for arch in ("rd", "mudd")):
        for p in model.parameters():
            here.update(p.detach().numpy().tobytes())
    assert [d.stdout.strip() for d in done] == [here.hexdigest()] * len(units), done[0].stderr
    drawn = GPT(GPTConfig.from_scale("nano", "plain")).layers[0].w_gate_up.detach().flatten().numpy() / 0.02
    assert scipy.stats.kstest(drawn, "norm").pvalue > 0.01


def test_model_rivals_starting_values():
    """MUDD's W1 is drawn by its name, fan-in normal; hyper-connections start at one stream each."""
    a, b, other = tiny("mudd", n_embd=64), tiny("mudd_rd", n_embd=64), tiny("mudd", n_embd=64, seed=2)
    w = a.layers[1].attn_read.w1
    assert torch.equal(w, b.layers[1].attn_read.w1), "drawn by its name, not by its arm"
    assert not torch.equal(w, other.layers[1].attn_read.w1) and w.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert a.out_read.w2.abs().max() == 0 and a.out_read.w1.shape == (64, 64)
    hc, mhc = tiny("hc"), tiny("mhc")
    for k in range(12):  # sub-layer k starts at stream k mod 4
        h, m = ((x.layers[k // 2].mlp_read if k % 2 else x.layers[k // 2].attn_read) for x in (hc, mhc))
        assert torch.equal(h.static_in, torch.cat((torch.eye(4)[:, [k % 4]], torch.eye(4)), 1))
        assert h.static_out.tolist() == [1] * 4 and h.w_in.abs().max() == h.w_out.abs().max() == 0
        assert (h.scale_in.item(), h.scale_out.item()) == pytest.approx((0.01, 0.01))
        own = [1.0 if s == k % 4 else -1.0 for s in range(4)]
        assert m.bias.tolist() == own + own + [0.0 if s == t else -8.0 for s in range(4) for t in range(4)]
        assert m.scale.tolist() == pytest.approx([0.01] * 3) and m.phi.abs().max() == 0
    x, _ = tokens()
    for arch in ("resformer", "block_resformer"):
        assert torch.equal(tiny(arch)(x), tiny(arch + ":learnable=true")(x)), "the learnable form starts as the fixed"


def test_model_decay_groups():
    """Decay on matrices, the tied embedding included; none on gains or routes; frozen queries nowhere."""
    model = tiny("frozen_v")
    groups = {g["kind"]: g for g in model.param_groups(1e-3, 0.1, 2.0)}
    assert {n.split(".")[-1] for n in groups["gains"]["names"]} == {"attn_norm", "mlp_norm", "out_norm", "key_gain"}
    assert {n.split(".")[-1] for n in groups["queries"]["names"]} == {"qk", "mlp", "out"}
    assert [groups[k]["weight_decay"] for k in ("matrices", "gains", "queries")] == [0.1, 0, 0]
    assert [groups[k]["lr"] for k in ("matrices", "gains", "queries")] == [1e-3, 1e-3, 2e-3]
    named = [n for g in groups.values() for n in g["names"]]
    assert sorted(named) == sorted(n for n, p in model.named_parameters() if p.requires_grad)
    # a stacked [L, d] tensor of queries is two-dimensional, and a routing parameter all the same
    model.layers[0].attn_read.key_gain = torch.nn.Parameter(torch.ones(4, 32))
    assert "layers.0.attn_read.key_gain" in {g["kind"]: g["names"] for g in model.param_groups(1e-3, 0.1)}["gains"]


GROUPED = ("rd", "average", "q_kv", "k_qv", "q_k_v")
STARTS = {  # of which trained arms an arm computes the function, once it starts from their weights, beside its own
    "plain": {"block", "tied", *GROUPED, "frozen_v", "full", "full_rd", "mhar", "lowrank", "delta", "denseformer",
              "hc"},
    "block": {"tied", *GROUPED}, "tied": {"block", *GROUPED}, "rd": {"q_k_v"}, "q_kv": {"q_k_v"}, "k_qv": {"q_k_v"},
    "frozen_v": {"rd", "q_k_v"}, "full": {"full_rd"}, "resformer": {"block_resformer"},
    "lowrank": {"block", "tied", *GROUPED}}  # at this width its rank is all of it, and gains stay at one


def test_model_starting_one_arm_from_another():
    """All 23 x 23 pairs: the same function by the oracle, or refused: by load_from, or by a distance of its own."""
    x, _ = tokens()
    trained = {arch: stir(tiny(arch, n_layer=3)) for arch in ARMS}
    wanted = {arch: Oracle(model, eps=1e-18)(x) for arch, model in trained.items()}
    for theirs, parent in trained.items():
        for mine in ARMS:
            model, same = tiny(mine, n_layer=3), mine == theirs or mine in STARTS.get(theirs, ())
            try:
                model.load_from(parent.state_dict())
            except ValueError as e:
                assert not same and "in the model to start from" in str(e), (mine, theirs)
                continue
            far = logits_apart((model.config, model.state_dict()), (parent.config, parent.state_dict()))
            exact = apart(Oracle(model, eps=1e-18)(x), wanted[theirs])
            assert (far < 1e-6 and exact < 1e-9) if same else (far > 1e-4 and exact > 1e-4), (mine, theirs, far, exact)


def test_model_another_models_weights():
    model = tiny("q_k_v")
    assert model.load_from(stir(tiny("block")).state_dict()) == []
    kept = tiny("rd").load_from(tiny("plain").state_dict())
    assert len(kept) == 6 * 5 + 2 and all(".query." in n or n.endswith("key_gain") for n in kept)
    frozen = tiny("frozen_v")
    kept = frozen.load_from(stir(tiny("block")).state_dict())
    assert kept == [f"layers.{l}.attn_read.query.v" for l in range(6)]
    assert all(frozen.get_parameter(n).abs().max() == 0 for n in kept), "or it were that control no more"
    with pytest.raises(ValueError, match=r"wte is \(61, 32\) here and \(61, 64\) in the model to start from"):
        tiny("block").load_from(tiny("block", n_embd=64).state_dict())


# -- settings, arms by name, and the file alone


def test_model_config_names_every_problem():
    with pytest.raises(ValueError) as e:
        GPTConfig(n_layer=0, n_embd=-1, eps="small", mlp_ratio=2.5, residual_dtype="int8", arch="blok")
    lines = str(e.value).splitlines()
    assert len(lines) == 6 and "did you mean block" in lines[-1]
    with pytest.raises(ValueError, match="nearest n_head: 36"):
        GPTConfig(n_embd=576, n_head=37)
    for wrong in (dict(eps=-1), dict(eps=math.nan), dict(rope_base=0.5), dict(init_std=-1), dict(mlp_ratio=0)):
        (name, value), = wrong.items()
        with pytest.raises(ValueError, match=f"^{name}={value} must be at least"):
            GPTConfig(**wrong)
    with pytest.raises(ValueError, match="no such scale; did you mean nano"):
        GPTConfig.from_scale("nana")
    with pytest.raises(ValueError, match="17 tokens do not fit the context of 16"):
        tiny()(torch.zeros(1, 17, dtype=torch.long))


def test_model_every_setting_acts_and_comes_back_from_a_run():
    x, _ = tokens()
    for name, value in dict(mlp_ratio=4, eps=1e-2, rope_base=50.0, init_std=0.01, block_layers=3, n_head=4,
                            n_layer=5, arch="plain").items():
        c = GPTConfig(**{**TINY, "arch": "rd", name: value})
        assert not torch.equal(GPT(c)(x), GPT(GPTConfig(**TINY, arch="rd"))(x)), name
        assert GPTConfig.from_run({**dataclasses.asdict(c), "lr": 1, "kind": "else"}) == c

    @dataclasses.dataclass
    class More(GPTConfig):
        window: int = setting(8, "a field of one's own", "window", least=1, most=99)
    assert More.from_run({**TINY, "window": 9}).window == 9
    with pytest.raises(ValueError, match="window=0 must be at least 1 and at most 99"):
        More(window=0)


@pytest.mark.parametrize("spec, name", [
    ("rd", "rd"), ("mhar:sources=full:heads=04", "mhar:heads=4:sources=full"), ("mhar:heads=2:sources=block", "mhar"),
    ("resformer:learnable=true", "resformer:learnable=true"), ("lowrank:sources=full:rank=64", "lowrank:sources=full")])
def test_model_an_arm_has_one_name(spec, name):
    assert canonical(spec) == name and find_arm(spec) == find_arm(name)


@pytest.mark.parametrize("spec, words", [
    ("mhar:head=2", "no such option 'head'; did you mean heads?"), ("mhar:heads=two", "heads wants a whole number"),
    ("mhar:heads=0", "at least 1"), ("mhar:heads=5", "must divide n_embd=32"), ("mhar:heads=2:heads=4", "given twice"),
    ("mhar:sources=all", "sources wants block or full"), ("rd:heads=2", "rd takes none"),
    ("mhra", "did you mean mhar?"), ("lowrank:rank=33", "rank=33 must not exceed n_embd=32"),
    ("resformer:learnable=yes", "learnable wants false or true"), ("mhar:", "no such option ''"),
    ("full:sources=block", "full takes none")])
def test_model_bad_arm_options(spec, words):
    with pytest.raises(ValueError) as e:
        tiny(spec)
    assert words in str(e.value) and len(str(e.value).splitlines()) == 1


def test_model_arms_without_a_fused_path_refuse_it():
    for arch in ARMS:
        if ARMS[arch].fused:
            GPTConfig(arch=arch, backend="fused")
        else:
            with pytest.raises(ValueError, match=f"{arch} has no fused path"):
                GPTConfig(arch=arch, backend="fused")


def test_model_buffers_do_not_follow_the_default_dtype():
    want = tiny().rope
    try:
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            model = tiny("mhc")
            assert model.wte.dtype == dtype and [b.dtype for b in model.buffers()] == [torch.float32]
            assert torch.equal(model.rope, want)
        assert model(*tokens())[1].dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_model_and_its_kernels_alone(tmp_path):
    """The two files in an empty folder: a step of training, and a table whose reader may leave."""
    for name in ("model.py", "route_kernel.py"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "step.py").write_text("""
import sys, torch
from model import GPT, GPTConfig
for arch in ("rd", "mhar"):
    model, idx = GPT(GPTConfig.from_scale("nano", arch)), torch.arange(128).view(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[1] < losses[0]
assert "prepare" not in sys.modules
""")
    for command in ("python step.py", "set -o pipefail; python model.py | head -1 | grep -q idea"):
        command = command.replace("python", sys.executable)
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=120,
                              env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert (done.returncode, done.stderr) == (0, "")


# ---------------------------------------------------------------------------------------------------------
# route_kernel.py


ROUTE_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUTE_BACKENDS = ["reference"]
if rk.triton is not None and (rk.INTERPRETED or ROUTE_DEVICE == "cuda"):
    ROUTE_BACKENDS.append("fused")
route_fused = pytest.mark.skipif("fused" not in ROUTE_BACKENDS, reason="needs triton")


def published_route(sources, queries, key_gain, out_gain=None, eps=1e-6):
    """The read in the form its authors publish: stack, normalise, two einsums. Slow, plain, and the oracle here."""
    values = torch.stack(sources)
    keys = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * key_gain
    weights = torch.einsum("rd,k...d->rk...", queries, keys).softmax(1)
    mixtures = torch.einsum("rk...,k...d->r...d", weights, values)
    if out_gain is not None:
        mixtures = mixtures * torch.rsqrt(mixtures.square().mean(-1, keepdim=True) + eps) * out_gain
    return tuple(mixtures)


class PublishedDepth:
    """Depth's interface over `published_route`, with residual additions by autograd."""

    def __init__(self, x):
        self.completed, self.partial = [x], None

    def read(self, queries, key_gain, out_gain=None, ahead=None, last=False):
        sources = self.completed + ([] if self.partial is None else [self.partial])
        return published_route(sources, queries, key_gain, out_gain)

    def write(self, out):
        self.partial = out if self.partial is None else self.partial + out

    def finish_block(self):
        if self.partial is not None:
            self.completed, self.partial = self.completed + [self.partial], None


def route_error(a, b):
    """|a - b| / |b| over the whole tensor; |a - b| where b is 0."""
    b = b.double()
    return ((a.double() - b).norm() / (b.norm() if b.norm() > 0 else 1)).item()


def route_example(d, K, R, norm=True, shape=(5,), dtype=torch.float32, seed=0):
    """Parameters [queries, key_gain(, out_gain)], sources and upstream gradients."""
    g = torch.Generator().manual_seed(seed)

    def draw(*size, scale=1.0):
        return (torch.randn(*size, generator=g) * scale).to(ROUTE_DEVICE)

    parameters = [draw(R, d, scale=d ** -0.5), draw(d)] + ([draw(d)] if norm else [])
    sources = [draw(*shape, d).to(dtype) for _ in range(K)]
    return parameters, sources, [draw(*shape, d).to(dtype) for _ in range(R)]


def route_errors(backend, parameters, sources, up, leaf=lambda x: x):
    """Errors of mixtures and of every gradient against float64 autograd of the published form; `leaf` maps each
    source's leaf to what is read (a view, say)."""
    def run(f, dtype, *more):
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in (*parameters, *sources)]
        p, s = leaves[:len(parameters)], [leaf(x) for x in leaves[len(parameters):]]
        out = f(tuple(s), *p, *([None] if len(p) == 2 else []), *more)
        return (*out, *torch.autograd.grad(out, leaves, [u.to(out[0].dtype) for u in up]))

    got = run(lambda *a: route(*a, backend=backend), None)
    want = run(published_route, torch.float64)
    assert all(g.shape == w.shape for g, w in zip(got, want))
    return [route_error(g, w) for g, w in zip(got, want)]


ROUTE_CASES = [(24, 3, 1), (24, 7, 2), (24, 33, 2), (24, 9, 3), (100, 1, 1), (100, 2, 3), (100, 5, 2), (576, 1, 2),
               (576, 5, 2), (576, 2, 1), (832, 5, 2), (832, 2, 3), (832, 7, 1), (1025, 3, 2), (1025, 1, 3),
               (1025, 5, 1)]


# the interpreter is slow: widths with and without a rest, one source, a full group, groups with a rest, both norms
ROUTE_FUSED = [(24, 19, 2, True), (100, 1, 1, False), (100, 8, 3, True), (576, 5, 2, True), (1025, 3, 2, False)]


@pytest.mark.parametrize("backend,d,K,R,norm", [
    *(("reference", *case, norm) for case in ROUTE_CASES for norm in (True, False)),
    *(("fused", *case) for case in ROUTE_FUSED if "fused" in ROUTE_BACKENDS)])
def test_kernel_route_is_the_published_one(backend, d, K, R, norm):
    assert max(route_errors(backend, *route_example(d, K, R, norm, shape=(2, 3)))) < 1e-5


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_route_puts_eps_where_the_method_does(backend):
    parameters, sources, up = route_example(24, 3, 2)
    assert max(route_errors(backend, parameters, [s * 1e-3 for s in sources], up)) < 1e-5  # mean squares near eps


@pytest.mark.parametrize("d,K,R", [(24, 3, 2), (100, 5, 2), (576, 5, 3), (832, 1, 2)])
def test_kernel_route_reference_in_bf16_is_as_good_as_its_roundings(d, K, R):
    """Mixtures and source gradients are rounded once (half an ulp is 2^-9); what is summed over rows, hardly."""
    errors = route_errors("reference", *route_example(d, K, R, shape=(600,), dtype=torch.bfloat16))
    assert max(errors[:R]) < 2 ** -9 and max(errors[R + 3:]) < 2 ** -9
    assert max(errors[R:R + 3]) < 1e-5


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_route_takes_any_layout(backend):
    parameters, sources, up = route_example(100, 3, 2, shape=(3, 2))
    up = [torch.ones((), device=ROUTE_DEVICE).expand(3, 2, 100)] * 2  # what .sum().backward() sends: stride 0
    for leaf in (lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), lambda x: x[:1].expand(3, 2, 100),
                 lambda x: x.flip(0)[::2].repeat_interleave(2, 0)[:3],
                 lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1)):
        assert max(route_errors(backend, parameters, sources, up, leaf)) < 1e-5


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_route_gold_vector(backend):
    one, two = torch.eye(4, device=ROUTE_DEVICE)[:2]
    query = torch.tensor([[2.0, 0, 0, 0]], device=ROUTE_DEVICE)
    (h,) = route((one, two), query, torch.ones(4, device=ROUTE_DEVICE), eps=1e-12, backend=backend)
    assert h[0].item() == pytest.approx(0.9820138, abs=1e-7) and h[1].item() == pytest.approx(1 - 0.9820138, abs=1e-7)


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_route_gradients_that_are_exactly_zero(backend):
    def grads(K, zero):
        parameters, sources, up = route_example(24, K, 2)
        queries, key_gain, out_gain = (p.requires_grad_() for p in parameters)
        queries = (queries.detach() * (0 if zero else 1)).requires_grad_()
        mixtures = route(sources, queries, key_gain, out_gain, backend=backend)
        return torch.autograd.grad(mixtures, [queries, key_gain, out_gain], up)

    queries, key_gain, out_gain = grads(1, False)  # one source: its weight is 1 whatever the score
    assert not queries.any() and not key_gain.any() and out_gain.all()
    queries, key_gain, out_gain = grads(3, True)  # a gain reaches the score through the query only
    assert queries.all() and not key_gain.any()


def depth_walk(memory, parameters, layers, block_layers=2, ahead=True):
    """The model's order of reads and writes with stand-ins for its sub-layers. Returns the output read."""
    given = iter(parameters)
    for i in range(layers):
        queries, gain, norm, mlp_query, mlp_gain, mlp_norm, weight = (next(given) for _ in range(7))
        if i % block_layers == 0:
            memory.finish_block()
        mixtures = memory.read(queries, gain, norm, ahead=(mlp_query, mlp_gain) if ahead else None)
        memory.write(torch.tanh(sum((j + 1) * h for j, h in enumerate(mixtures)) @ weight.to(mixtures[0].dtype)))
        (h,) = memory.read(mlp_query, mlp_gain, mlp_norm)
        memory.write(torch.tanh(h @ weight.t().to(h.dtype)))
    memory.finish_block()
    query, gain, norm = given
    return memory.read(query, gain, norm, last=True)[0]


def depth_parameters(R, layers, d=24, seed=0, shape=(2, 3)):
    g = torch.Generator().manual_seed(seed)

    def read(R):
        return [torch.randn(R, d, generator=g) * 0.2, *(torch.rand(2, d, generator=g) + 0.5)]

    out = [x for _ in range(layers) for x in (*read(R), *read(1), torch.randn(d, d, generator=g) / d ** 0.5)] + read(1)
    return [torch.randn(*shape, d, generator=g).to(ROUTE_DEVICE)] + [x.to(ROUTE_DEVICE) for x in out]


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
@pytest.mark.parametrize("R,ahead", [(1, True), (2, True), (2, False), (3, True)])
def test_kernel_depth_is_the_published_method(backend, R, ahead):
    layers = 5 if backend == "reference" else 3
    inputs = depth_parameters(R, layers)

    def run(make, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        y = depth_walk(make(leaves[0]), leaves[1:], layers, ahead=ahead)
        up = torch.linspace(-1, 1, y.numel(), device=y.device, dtype=dtype).view(y.shape)
        return (y, *torch.autograd.grad(y, leaves, up))

    got, want = run(lambda x: Depth(x, backend), torch.float32), run(PublishedDepth, torch.float64)
    assert max(route_error(g, w) for g, w in zip(got, want)) < 1e-5


@pytest.mark.parametrize("backend,dtype", [(b, t) for b in ROUTE_BACKENDS for t in (torch.float32, torch.bfloat16)])
def test_kernel_depth_equal_queries_give_the_parent_bit_for_bit(backend, dtype):
    """R = 2 and 3 with copies of one query against R = 1, through the whole walk, and the gradient identity."""
    for d, K in ((24, 2), (100, 5), (576, 3)):
        (queries, *gains), sources, up = route_example(d, K, 1, shape=(4,), dtype=dtype)
        (alone,) = route(sources, queries, *gains, backend=backend)
        for R in (2, 3):
            assert all(torch.equal(h, alone) for h in route(sources, queries.expand(R, d), *gains, backend=backend))
    parameters = depth_parameters(1, layers=2, shape=(1, 2))
    x, parameters = parameters[0].to(dtype), parameters[1:]
    one = [p.requires_grad_() for p in parameters]
    two = [(torch.cat([p, p]) if i in (0, 7) else p).detach().requires_grad_() for i, p in enumerate(parameters)]

    class Second(Depth):  # attention takes the mean of equal mixtures: exact in floating point
        def read(self, queries, *args, **kwargs):
            mixtures = super().read(queries, *args, **kwargs)
            return mixtures if len(mixtures) == 1 else ((mixtures[0] + mixtures[1]) / 2,)

    a, b = (depth_walk(kind(x, backend), p, 2, block_layers=1) for kind, p in ((Depth, one), (Second, two)))
    assert torch.equal(a, b)
    if dtype == torch.float32:
        a.square().sum().backward()
        b.square().sum().backward()
        for p, q in zip(one, two):
            assert route_error(q.grad.sum(0, keepdim=True) if len(q) > len(p) else q.grad, p.grad) < 1e-5


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_depth_in_any_order_of_calls(backend):
    """Hints that never come true, writes in a row, empty blocks, reads in a row, mixed dtypes."""
    inputs = [x.double() for x in depth_parameters(1, layers=2, d=16)]

    def walk(make, dtype):
        x, q, g, n, q2, g2, n2, w, *_ = [x.to(dtype).requires_grad_() for x in inputs]
        m, outs = make(x), []
        m.finish_block()
        m.write(torch.tanh(x @ w))
        m.finish_block()
        outs += m.read(q, g, n, ahead=(q2, g2))
        m.finish_block()
        outs += m.read(q2, g2, n2)  # announced, but nothing was written
        outs += m.read(q, g, n, ahead=(q2, g2))
        m.write(outs[-1] * 2)
        m.write(outs[0] @ w)
        outs += m.read(q2, g2)  # announced, and closed without a norm after two writes
        outs += m.read(q, g, n, ahead=(q2, g2))
        m.write(outs[1] @ w)
        m.finish_block()
        outs += m.read(q2, g2, n2)  # announced before the block was finished
        outs += m.read(q, g, n, ahead=(q2, g2))
        m.write(outs[-1] * 0.5)
        outs += m.read(q, g, n)  # another read than the one announced
        m.write(outs[2])
        outs += [*m.completed, m.partial] if isinstance(m, Depth) else [*m.completed, m.partial]
        leaves = (x, q, g, n, q2, g2, n2, w)
        return (*outs, *torch.autograd.grad(sum(o.square().sum() * (i + 1) for i, o in enumerate(outs)), leaves))

    got, want = walk(lambda x: Depth(x, backend), torch.float32), walk(PublishedDepth, torch.float64)
    assert max(route_error(g, w) for g, w in zip(got, want)) < 1e-5
    depth = Depth(torch.randn(3, 16, device=ROUTE_DEVICE), backend)
    depth.write(torch.ones(3, 16, device=ROUTE_DEVICE, dtype=torch.bfloat16))
    assert depth.partial.dtype == torch.float32 and len(depth.completed) == 1


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_depth_adds_as_torch_adds(backend):
    # the interpreter cuts bf16 off where a GPU rounds, so it is asked about fp16
    dtype = torch.float16 if backend == "fused" and rk.INTERPRETED else torch.bfloat16
    x, a, b = (torch.randn(4, 384, device=ROUTE_DEVICE).to(dtype) for _ in range(3))
    q, g = torch.zeros(1, 384, device=ROUTE_DEVICE), torch.ones(384, device=ROUTE_DEVICE)
    depth = Depth(x, backend)
    depth.write(a)
    depth.write(b)
    depth.read(q, g)
    assert torch.equal(depth.partial, a + b)
    depth.read(q, g, ahead=(q, g))
    depth.write(x)
    depth.finish_block()
    depth.read(q, g)
    assert torch.equal(depth.completed[1], a + b + x)


class Rounded(torch.autograd.Function):
    """A tensor as bfloat16 holds it, and its gradient too, both still float32: what a GPU does at the end of a kernel,
    and the interpreter does not."""

    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx, g):
        return g.bfloat16().float()


@route_fused
def test_kernel_depth_a_read_ahead_costs_one_rounding_in_bf16():
    """Opened over three sources and closed with the fourth, against one read of all four, both held to float64."""
    (query, key_gain, out_gain), sources, (up,) = route_example(100, 4, 1, shape=(4,))
    sources = [s.bfloat16().float() for s in sources]
    leaves = [x.requires_grad_() for x in (query, key_gain, out_gain, *sources)]

    def opened(query, key_gain, out_gain, *sources):
        ahead = rk.read(sources[:3], query * 0, key_gain, None, 1e-6, "fused", None, (query, key_gain), 3).opened
        given = Rounded.apply(ahead.mixture), sources[3]
        return rk.read(given, query, key_gain, out_gain, 1e-6, "fused", given=ahead.lse).mixtures[0]

    def whole(query, key_gain, out_gain, *sources):
        return route(sources, query, key_gain, out_gain, backend="reference")[0]

    def run(read, *leaves):
        h = read(*leaves[:3], *map(Rounded.apply, leaves[3:]))
        return (Rounded.apply(h), *torch.autograd.grad(Rounded.apply(h), leaves, up))

    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = published_route(exact[3:], *exact[:3])[0]
    want = (want, *torch.autograd.grad(want, exact, up.double()))
    for a, b, w in zip(run(opened, *leaves), run(whole, *leaves), want):
        assert route_error(a, w) < route_error(b, w) + 2 ** -9


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_depth_records_weights(backend):
    inputs = depth_parameters(2, layers=3)
    record = []
    with torch.no_grad():
        depth_walk(Depth(inputs[0], backend, record=record), inputs[1:], 3)
    assert [tuple(w.shape[:2]) for w in record] == [(2, 1), (1, 2), (2, 2), (1, 2), (2, 2), (1, 3), (1, 3)]
    first = inputs[0]
    assert all(w.dtype == torch.float32 and (w.sum(1) - 1).abs().max() < 1e-6 for w in record)
    again = []
    depth_walk(Depth(first, "reference", record=again), inputs[1:], 3)
    assert max(route_error(a, b) for a, b in zip(record, again)) < 1e-5 and not any(w.requires_grad for w in again)


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_depth_backward_under_autograds_features(backend):
    """Pruned, repeated, frozen and checkpointed backward passes give what the whole one gives."""
    from torch.utils.checkpoint import checkpoint
    inputs = depth_parameters(2, layers=2, shape=(1, 2))

    def walk(leaves):
        return depth_walk(Depth(leaves[0], backend), leaves[1:], 2)

    before = [x.clone() for x in inputs]
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = walk(leaves)
    up = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.device)
    kept = up.clone()
    whole = torch.autograd.grad(y, leaves, up, retain_graph=True)
    again = torch.autograd.grad(y, leaves, up, retain_graph=True)
    assert torch.equal(up, kept) and all(map(torch.equal, whole, again))  # to the bit, and nothing written into `up`
    for i in (0, 4, 7):
        (one,) = torch.autograd.grad(y, [leaves[i]], up, retain_graph=True)
        assert route_error(one, whole[i]) < 1e-6
    for frozen in ((0, 7), (1, 2, 4), tuple(range(1, len(inputs)))):
        some = [x.clone().requires_grad_(i not in frozen) for i, x in enumerate(inputs)]
        walk(some).backward(up)
        for i, (x, g) in enumerate(zip(some, whole)):
            assert x.grad is None if i in frozen else route_error(x.grad, g) < 1e-6
    saved = [x.clone().requires_grad_() for x in inputs]
    checkpoint(lambda *a: walk(a), *saved, use_reentrant=False).backward(up)
    assert all(torch.equal(x.grad, g) for x, g in zip(saved, whole))
    with torch.no_grad():
        assert torch.equal(walk(inputs), y)
    assert all(map(torch.equal, inputs, before)) and all(map(torch.equal, leaves, before))


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_route_with_mixtures_and_sources_left_unused(backend):
    """Upstream gradients that are None: of one mixture, of the returned sources, of an opened read."""
    (queries, key_gain, out_gain), sources, up = route_example(24, 3, 2)
    leaves = [x.requires_grad_() for x in (queries, key_gain, out_gain, *sources)]
    h = route(sources, queries, key_gain, out_gain, backend=backend)[1]
    h64 = published_route([s.double() for s in sources], queries.double(), key_gain.double(), out_gain.double())[1]
    for g, w in zip(torch.autograd.grad(h, leaves, up[1]), torch.autograd.grad(h64, leaves, up[1].double())):
        assert route_error(g, w) < 1e-5
    depth = Depth(sources[0] * 1, backend)
    depth.write(sources[1] * 1)
    depth.read(queries, key_gain, ahead=(queries[:1], out_gain))  # nobody uses its mixtures
    assert torch.equal(torch.autograd.grad(depth.partial, [sources[1]], up[0])[0], up[0])


def test_kernel_route_computes_in_fp32_under_autocast():
    parameters, sources, _ = route_example(100, 3, 2)
    want = route(sources, *parameters, backend="reference")
    with torch.autocast(ROUTE_DEVICE, torch.bfloat16):
        got = route(sources, *parameters, backend="reference")
    assert all(map(torch.equal, got, want))


def test_kernel_route_reference_does_not_depend_on_chunks(monkeypatch):
    parameters, sources, up = route_example(100, 3, 2, shape=(70,))
    sizes = iter([16, 16, 70, 70])
    monkeypatch.setattr(rk, "chunks", lambda *a: next(sizes))
    first, second = (route_errors("reference", parameters, sources, up) for _ in range(2))
    assert max(first) < 1e-5 and max(second) < 1e-5


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_route_ops_pass_opcheck(backend):
    (queries, key_gain, out_gain), sources, up = route_example(24, 3, 2)
    fused = backend == "fused"
    parameters = [queries, key_gain, out_gain, *((queries[:1] * 2, out_gain) if fused else (None, None))]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    args = (sources, up[0] if fused else None, None, parameters, 2, 1e-6, backend)
    torch.library.opcheck(rk.read_op, args, test_utils=tests)
    out = rk.read_op(*args)
    dopened = [up[0], up[0][:, 0].contiguous(), out[4]] if fused else []
    running, needed = [up[0], None, up[1]], [True, False, True]
    args = (sources, running, needed, up, dopened, parameters, out[-4:], 2, False, backend)
    torch.library.opcheck(rk.read_backward_op, args, test_utils=tests)


@pytest.mark.parametrize("backend", ROUTE_BACKENDS)
def test_kernel_depth_compiles_whole_once_a_shape(backend):
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    inputs = depth_parameters(2, layers=2, shape=(1, 2))
    compiles = []

    def count(graph, example):
        compiles.append(graph)
        return make_boxed_func(graph.forward)

    def walk(*leaves):
        return depth_walk(Depth(leaves[0], backend), leaves[1:], 2)

    torch._dynamo.reset()
    compiled = torch.compile(walk, fullgraph=True, backend=aot_autograd(fw_compiler=count))
    eager, fast = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    for _ in range(2):
        a, b = walk(*eager), compiled(*fast)
        a.square().sum().backward()
        b.square().sum().backward()
    assert torch.equal(a, b) and all(route_error(y.grad, x.grad) < 1e-6 for x, y in zip(eager, fast))
    assert len(compiles) == 2  # one forward, one backward


def test_kernel_route_says_what_cannot_be():
    parameters, sources, _ = route_example(24, 2, 1)
    queries, key_gain, out_gain = parameters
    a, b = sources
    for bad in (((), queries, key_gain), ((a, b[:2]), queries, key_gain), ((a, b.double()), queries, key_gain),
                (sources, queries[0], key_gain), (sources, queries, key_gain[:3])):
        with pytest.raises(ValueError):
            route(*bad, backend="reference")
    assert choose_backend("reference", "cpu")[0] == "reference"
    assert choose_backend("auto", "cpu")[0] == "reference" and "cpu" in choose_backend("auto", "cpu")[1]
    with pytest.raises(ValueError, match="want auto, reference or fused"):
        choose_backend("fast", "cpu")


def test_kernel_route_without_triton_or_gpu_is_said(monkeypatch):
    monkeypatch.setattr(rk, "INTERPRETED", False)
    with pytest.raises(ValueError, match="CUDA|triton"):
        choose_backend("fused", "cpu")
    monkeypatch.setattr(rk, "triton", None)
    with pytest.raises(ValueError, match="triton is not installed"):
        choose_backend("fused", "cuda")
    backend, why = choose_backend("auto", "cuda")
    assert backend == "reference" and "triton is not installed" in why


# ---------------------------------------------------------------------------------------------------------
# train.py


def test_train_schedule():
    """Method, section 2, at the paper's length."""
    N = math.ceil(2e9 / 32768)
    W = train.warmup_steps(N, 0.02)
    assert (N, W) == (61036, 1221)
    assert train.lr_at(1, N, W, 3e-4) == pytest.approx(3e-4 / 1221, rel=1e-12)
    assert train.lr_at(W, N, W, 3e-4) == 3e-4 and train.lr_at(N, N, W, 3e-4) == pytest.approx(3e-5, rel=1e-12)
    middle = (N + W) // 2
    cosine = math.cos(math.pi * (middle - W) / (N - W))
    assert train.lr_at(middle, N, W, 3e-4) == pytest.approx(3e-4 * (0.1 + 0.45 * (1 + cosine)), rel=1e-12)
    assert [m * 32768 for m in train.milestones(N, None)] == [250_019_840, 500_006_912, 1_000_013_824, 2_000_027_648]
    assert train.milestones(N, 15_259) == [7630, 15259]
    assert train.milestones(1, None) == [1] and train.lr_at(1, 1, train.warmup_steps(1, 0.02), 1.0) == 1.0
    assert train.milestones(N, 10) == [10]


def test_train_data_order(tmp_path):
    """Pure in (seed, B, T, n); every window once an epoch; batches run across epoch ends; shifted targets."""
    path = write_bin(tmp_path / "train.bin", 16 * 10 + 5)
    bin = open(path, "rb")
    b = train.Batches(bin, 16, 4, seed=5, vocab_size=61)
    assert b.n == 10
    flat = np.concatenate([b.indices(s) for s in range(5)])  # two epochs of 10 in five batches of 4
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10)) and list(flat[:10]) != list(flat[10:])
    expect = np.concatenate([np.random.RandomState([5, e]).permutation(10) for e in (0, 1)])
    assert np.array_equal(flat, expect)
    again = train.Batches(bin, 16, 4, seed=5, vocab_size=61)
    assert np.array_equal(b.indices(3), again.indices(3)), "a later step alone gives the same"
    bin = np.fromfile(path, "<u2")
    for ranks in (1, 2, 4):
        for micro in (1, 4 // ranks):
            rows = [torch.cat((x, y[:, -1:]), 1) for r in range(ranks) for x, y in b.micro(2, micro, r, ranks)]
            got = sorted(map(tuple, torch.cat(rows).tolist()))
            assert got == sorted(tuple(bin[i * 16:i * 16 + 17].tolist()) for i in b.indices(2))


def test_train_a_run_is_what_the_contract_says(toy_runs):
    folder = the_run(toy_runs, "rd")
    shape = "steps12-batch4-context16-layers4-width32-heads2"
    assert folder.name == f"nano-rd-s123-datadata-{shape}-lr3e-3-eval320-dtypefloat32"
    c = json.loads((folder / "config.json").read_text())
    assert {"arch", "scale", "seed", "backend", "max_steps", "tokens_per_step", "n_params", "data_fingerprint",
            "torch", "triton", "python",
            "device", "git_commit", "git_dirty", "probe", "init_sha256"} <= set(c)
    assert not any(isinstance(v, dict) for k, v in c.items() if k != "probe")
    lines = timeless(folder)
    steps = [x for x in lines if x["kind"] == "train"]
    assert [x["step"] for x in steps] == list(range(1, 13))
    assert [x["tokens"] for x in steps] == [64 * n for n in range(1, 13)]
    assert [x["lr"] for x in steps] == [train.lr_at(n, 12, 1, 3e-3) for n in range(1, 13)]
    evals = [x for x in lines if x["kind"] == "eval"]
    assert [x["step"] for x in evals] == [2, 3, 6, 12]
    assert all(x["eval_tokens"] == 320 and len(x["js"]) == 4 for x in evals)
    assert evals[-1]["js"][0] == 0 and evals[-1]["js_mean"] == pytest.approx(sum(evals[-1]["js"][1:]) / 3, rel=1e-12)
    assert lines[-1] == dict(kind="end", status="complete", step=12, tokens=768)
    windows = np.load(folder / "eval" / "val-000012.npy")
    assert windows.dtype == np.float64 and windows.shape == (20,)
    assert windows.mean() == pytest.approx(evals[-1]["nll"], abs=1e-12)
    assert evals[-1]["ppl"] == pytest.approx(math.exp(evals[-1]["nll"]))
    plan = json.loads((toy_runs / "plan.json").read_text())["plans"][0]
    assert plan["arms"] == ["block", "rd"] and plan["runs"][1] == folder.name
    a, b = (json.loads((the_run(toy_runs, x) / "config.json").read_text()) for x in ("block", "rd"))
    assert a["init_sha256"] == b["init_sha256"]


def test_train_first_loss_is_before_the_first_update(toy_runs, toy):
    """The logged loss of step 1 is that before the update, on the windows that the data order names."""
    folder = the_run(toy_runs, "block")
    c = json.loads((folder / "config.json").read_text())
    bin = np.fromfile(toy / "train.bin", "<u2").astype(np.int64)
    index = np.random.RandomState([123, 0]).permutation((len(bin) - 1) // 16)[:4]
    ids = torch.from_numpy(np.stack([bin[i * 16:i * 16 + 17] for i in index]))
    want = published_forward(GPT(evaluation.model_config(c), seed=123), ids[:, :-1])
    want = F.cross_entropy(want.flatten(0, 1), ids[:, 1:].flatten()).item()
    assert timeless(folder)[0]["loss"] == pytest.approx(want, abs=1e-6)


def test_train_twice_the_same_command_twice_the_same_run(toy_runs, toy, tmp_path):
    code, folder = train_here(tmp_path, toy, arch="rd")
    assert code == 0 and timeless(folder) == timeless(the_run(toy_runs, "rd"))
    same_state(folder, the_run(toy_runs, "rd"))


@pytest.mark.parametrize("stop_at", [1, 3, 7, 12])
def test_train_resume_is_exact(toy_runs, toy, tmp_path, stop_at, monkeypatch):
    """A signal at any step, then the same command: the bytes of an undisturbed run, across an epoch end as well."""
    real, number = train.step, signal.SIGINT if stop_at == 7 else signal.SIGTERM
    bin = toy / "train.bin"
    assert (bin.stat().st_size // 2 - 1) // 16 < 12 * 4, "the run is to cross an epoch's end"

    def step(optimizer, lr):
        step.calls += 1
        if step.calls == stop_at:
            train.STOP["signal"] = number
        real(optimizer, lr)
    train.probe("block"), train.probe("rd")  # their own steps do not count
    step.calls = 0
    monkeypatch.setattr(train, "step", step)
    code, folder = train_here(tmp_path, toy, arch="rd")
    train.STOP["signal"] = 0
    assert code == 128 + number and timeless(folder)[-1]["status"] == "stopped"
    assert torch.load(folder / "ckpt.pt", weights_only=True)["step"] == stop_at
    monkeypatch.undo()
    assert train.main(as_flags(data=toy, out=tmp_path, arch="rd")) == 0
    assert timeless(folder) == timeless(the_run(toy_runs, "rd"))
    same_state(folder, the_run(toy_runs, "rd"))


def test_train_kill_during_a_save_leaves_the_previous_checkpoint(toy, tmp_path):
    """SIGKILL at the moment of the rename, the worst one; the restart ends as if nothing had been."""
    script = ("import os, sys, train\n"
              "real, calls = os.replace, [0]\n"
              "def replace(a, b):\n"
              "    if str(b).endswith('ckpt.pt'):\n"
              "        calls[0] += 1\n"
              "        if calls[0] == 3: os.kill(os.getpid(), 9)\n"
              "    real(a, b)\n"
              "os.replace = replace\n"
              "train.main(sys.argv[1:])\n")
    flags = as_flags(data=toy, out=tmp_path, arch="block")
    done = run_command("-c", script, *flags)
    folder = next(tmp_path.glob("nano-*"))
    assert done.returncode == -9 and torch.load(folder / "ckpt.pt", weights_only=True)["step"] == 3
    assert (folder / "lock").exists(), "the killed process could not remove its lock; the next one takes it over"
    assert train.main(flags) == 0
    code, straight = train_here(tmp_path / "straight", toy, arch="block")
    assert timeless(folder) == timeless(straight)
    same_state(folder, straight)
    assert not (folder / "lock").exists()


def test_train_accumulation_changes_nothing(toy, tmp_path):
    runs = [train_here(tmp_path / str(m), toy, arch="rd", micro_batch=m, tag=f"m{m}")[1] for m in (4, 2, 1)]
    first = timeless(runs[0])
    for other in map(timeless, runs[1:]):
        for a, b in zip(first, other):
            for key in ("loss", "grad_norm", "nll"):
                assert key not in a or a[key] == pytest.approx(b[key], rel=1e-6)
    a, b = (torch.load(r / "ckpt.pt", weights_only=True)["model"] for r in (runs[0], runs[2]))
    moved = math.sqrt(sum((a[k] - b[k]).square().sum().item() for k in a) / sum(a[k].square().sum().item() for k in a))
    assert moved < 1e-5


def test_train_early_stop_keeps_the_schedule(toy_runs, toy, tmp_path):
    code, folder = train_here(tmp_path, toy, arch="rd", stop_tokens=6 * 64)
    lines, whole = timeless(folder), timeless(the_run(toy_runs, "rd"))
    assert "-stop6-" in folder.name and lines[-1] == dict(kind="end", status="complete", step=6, tokens=384)
    assert lines[:-1] == [x for x in whole if x["step"] <= 6]


def test_train_finished_runs_are_skipped_and_a_failing_one_does_not_end_a_sweep(toy, tmp_path, capsys):
    flags = as_flags(data=toy, out=tmp_path, arch="block", seed="1,2", max_steps=4)
    settings = "datadata-steps4-batch4-context16-layers4-width32-heads2-lr3e-3-eval320-dtypefloat32"
    foreign = tmp_path / f"nano-block-s1-{settings}"
    foreign.mkdir()
    (foreign / "ckpt.pt").write_bytes(b"not a checkpoint")
    (foreign / "config.json").write_text("{}")
    assert train.main(flags) == 1
    out = capsys.readouterr().out
    assert "1 failed; 1 complete" in out and "s1-" in out.split("not trained here: ")[1]
    assert train.main(flags) == 1
    assert "1 done" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "plan.json").read_text())["plans"]) == 1


def test_train_divergence_is_caught_and_marked(toy, tmp_path, monkeypatch):
    real = train.accumulate
    calls = [0]

    def accumulate(*a):
        calls[0] += 1
        return real(*a) * (math.nan if calls[0] == 8 else 1)
    monkeypatch.setattr(train, "accumulate", accumulate)
    with pytest.raises(Failed, match="step 8 is not finite"):
        train_here(tmp_path, toy, arch="rd")
    folder = next(tmp_path.glob("nano-*"))
    lines = timeless(folder)  # strict JSON: json.loads would let NaN through, so look
    assert "NaN" not in (folder / "metrics.jsonl").read_text()
    assert lines[-1]["status"] == "diverged" and lines[-1]["step"] == 8 and lines[-2]["step"] == 7
    assert torch.load(folder / "ckpt.pt", weights_only=True)["step"] == 6
    with pytest.raises(Failed, match="diverged; the same command"):
        train.main(as_flags(data=toy, out=tmp_path, arch="rd"))


def test_train_resume_with_other_settings_is_refused(toy_runs, toy, tmp_path):
    """A folder that was begun with other settings, data or code is not continued; every difference is named. A complete
    run that other code made is left alone: whether it pairs is for stats.py to say."""
    folder = tmp_path / the_run(toy_runs, "rd").name
    shutil.copytree(the_run(toy_runs, "rd"), folder)
    c, metrics = json.loads((folder / "config.json").read_text()), (folder / "metrics.jsonl").read_text()
    before = (folder / "ckpt.pt").read_bytes()
    go = lambda: train.main(as_flags(data=toy, out=tmp_path, arch="rd"))
    for change, words in ((dict(lr=1.0, data_fingerprint="x"),
                           ["lr: 1.0 before, 0.003 now", "data_fingerprint: x before"]),
                          (dict(probe={**c["probe"], "rd": [0.0] * 7}), ["the code:"])):
        (folder / "config.json").write_text(json.dumps({**c, **change}))
        (folder / "metrics.jsonl").write_text(metrics.replace('"complete"', '"stopped"'))
        with pytest.raises(BadInput) as e:
            go()
        assert all(w in str(e.value) for w in words)
    (folder / "metrics.jsonl").write_text(metrics)
    assert go() == 0
    (folder / "config.json").write_text(json.dumps({**c, "lr": 1.0}))
    with pytest.raises(BadInput, match="lr: 1.0 before"):
        go()
    assert (folder / "ckpt.pt").read_bytes() == before and (folder / "metrics.jsonl").read_text() == metrics


def test_train_a_lock_is_respected_and_a_dead_one_taken_over(tmp_path, monkeypatch):
    """A killed owner on this host is taken over; a living one, one of another host, container or boot, and one that
    cannot be read keep the lock until --force. No hard links are needed."""
    lock, origin, host = tmp_path / "lock", tmp_path / "lock.origin", socket.gethostname()
    monkeypatch.setattr(os, "link", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no links")))

    def held_by(words):
        with pytest.raises(train.Busy, match=words):
            with train.claim(lock, "it", wait=0.1):
                pass

    with train.claim(lock, "it"):
        held_by(f"is being run by process {os.getpid()} of this host")
    assert list(tmp_path.iterdir()) == []
    dead = subprocess.Popen([sys.executable, "-c",
                             f"import filelock, os; lock = filelock.SoftFileLock({str(lock)!r}); lock.acquire(); "
                             "os.kill(os.getpid(), 9)"])
    dead.wait()
    held_by(f"process {dead.pid} of this host, as it was called in another container")
    origin.write_text(train.home())
    with train.claim(lock, "it"):
        assert train.owner_of(lock) == (str(os.getpid()), host)
    for text, words in (("1\nelsewhere\n", "process 1 of elsewhere"), ("", "nobody can tell whose"),
                        ("[1]", "nobody can"),
                        ("{}", "nobody can")):
        lock.write_text(text)
        held_by(words + ".*--force")
        with train.claim(lock, "it", force=True):
            pass
    assert list(tmp_path.iterdir()) == []


def test_train_upcycling_starts_as_its_parent(toy_runs, toy, tmp_path):
    parent = the_run(toy_runs, "block")
    code, folder = train_here(tmp_path, toy, arch="rd", init_from=parent, max_steps=4)
    first = next(x for x in timeless(folder) if x["kind"] == "eval")
    last = [x for x in timeless(parent) if x["kind"] == "eval"][-1]
    assert first["step"] == 0 and first["nll"] == last["nll"] and first["js"] == [0.0] * 4
    with pytest.raises(BadInput, match="would mean something else, n_head is 2 there and 4 here"):
        train_here(tmp_path, toy, arch="rd", init_from=parent, max_steps=4, n_head=4)


def test_train_freeze(toy, tmp_path):
    _, folder = train_here(tmp_path, toy, arch="rd", freeze="*.query.v", max_steps=4)
    model, c, _ = evaluation.load_run(folder, torch.device("cpu"))
    assert all(x.attn_read.query["v"].abs().max() == 0 for x in model.layers) and c["n_params_frozen"] == 4 * 32
    assert model.layers[1].attn_read.query["qk"].abs().max() > 0
    for pattern, word in (("nothing", "no"), ("*", "every")):
        with pytest.raises(BadInput, match=f"matches {word} parameter"):
            train_here(tmp_path, toy, arch="rd", freeze=pattern, max_steps=4)


def test_train_names():
    """Settings that are not the scale's default enter a run's name, in order; machine settings never."""
    name = lambda **kw: train.resolve(train.Flags(device="cpu", **kw), torch.device("cpu"), 1)["name"]
    assert name(arch="rd", scale="S", seed=123) == "S-rd-s123"
    usual = dict(lr=3e-4, max_tokens=2_000_000_000, batch_size=32, context=1024)
    assert name(arch="rd", scale="S", seed=7, **usual) == "S-rd-s7"
    assert name(arch="rd", scale="nano", lr=6e-4) == "nano-rd-s123-lr6e-4"
    assert name(arch="block", scale="S", micro_batch=2, compile=True, tag="x") == "S-block-s123-x"
    assert name(arch="rd", scale="S", stop_tokens=500_000_000) == "S-rd-s123-stop15259"
    assert name(arch="rd", scale="M", backend="reference", grad_clip=0.0, residual_dtype="float32") \
        == "M-rd-s123-clip0-residualfloat32-backendreference"


def test_train_micro_batch_and_ranks():
    resolve = lambda ranks, **kw: train.resolve(train.Flags(scale="S", device="cpu", **kw), torch.device("cpu"), ranks)
    assert resolve(1)["micro_batch"] == 8 and resolve(4, batch_size=12)["micro_batch"] == 3
    with pytest.raises(BadInput, match="batch_size=32 does not divide among 3 ranks; nearest: 30 or 33"):
        resolve(3)
    with pytest.raises(BadInput, match="micro_batch=5 .*nearest: 4 or 8"):
        resolve(1, micro_batch=5)


@pytest.mark.parametrize("words, flags", [
    (["unknown flag --lrr; did you mean --lr?"], ["--lrr=1"]),
    (["--max_steps=1.5 wants a whole number", "--lr=x wants a finite number"], ["--max_steps=1.5", "--lr=x"]),
    (["did you mean frozen_v?"], ["--arch=frozenv", "--scale=nano"]),
    (["--scale=L wants one of S, M, nano"], ["--scale=L"]),
    (["give --max_steps or --max_tokens, not both"], ["--max_steps=5", "--max_tokens=1e6"]),
    (["data/none", "prepare.py"], ["--data=data/none"]),
    (["lies beyond the schedule"], ["--max_steps=5", "--stop_tokens=1e9"]),
    (["--batch_size=0 must lie between 1 and 1e+06"], ["--batch_size=0"]),
    (["no GPU is visible"], ["--device=cuda"]),
    (["is not a usable folder name"], ["--scale=nano", "--tag=a/b"]),
    (["--eps=-1 must lie between 1e-12 and 1", "--init_std=-1", "--rope_base=0 "],
     ["--eps=-1", "--init_std=-1", "--rope_base=0"]),
    (["--seed=1,4294967296 must lie between 0 and 4.29497e+09"], ["--seed=1,4294967296"]),
    (["--rounds is of a benchmark"], ["--rounds=3"]), (["give several arms or seeds"], ["--primary=rd"]),
    (["--primary=tied is no arm of this sweep"], ["--primary=tied", "--arch=rd,block"]),
    (["a folder of runs, or with --benchmark a .json file"], ["--out=x.json"]),
    (["a folder of runs, or with --benchmark a .json file"], ["--out=x", "--benchmark"]),
    (["--wandb needs the package"], ["--scale=nano", "--wandb=x"]), (["--device=mps wants one of"], ["--device=mps"]),
    (["/nonexistent does not exist"],
     ["--dry_run", "--scale=nano", "--n_layer=2", "--data=/nonexistent", "--device=cpu"]),
    (["--arch=rd,,blok has an empty place in its list"], ["--arch=rd,,blok"]),
    (["did you mean block?"], ["--arch=rd,blok"]),
])
def test_train_bad_training_input(words, flags, tmp_path):
    if "--device=cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(BadInput) as e:
        train.main([*flags, *([] if any(f.startswith("--out") for f in flags) else [f"--out={tmp_path}"])])
    assert all(w in str(e.value) for w in words), str(e.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script, flags", [
    ("train.py", ["--lrr=1", "--lr=x", "--seed=-1"]), ("train.py", ["--arch=blok", "--scale=nano"]),
    ("eval.py", ["runs/none"]), ("stats.py", ["runs/none"]), ("prepare.py", ["--source=none", "--out=none/out"]),
    ("route_kernel.py", ["--rows=x"])])
def test_train_every_script_ends_bad_input_with_lines_and_code_2(script, flags, tmp_path):
    done = run_command(script, *flags)
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.strip()
    if script != "route_kernel.py":  # which stands alone: argparse's own words
        assert all(line.startswith("error: ") for line in done.stderr.strip().splitlines())


@pytest.mark.parametrize("words, flags", [
    (["tokens, the paper's slice is 10,485,760", "--shards=3"], dict(scale="S", context=16)),
    (["training tokens are asked for and", "--repeat_data"],
     dict(scale="S", eval_tokens=64, context=16, max_tokens=10 ** 7)),
    (["less than one window of 4096 + 1"], dict(scale="nano", context=4096)),
])
def test_train_data_too_small_for_the_run(words, flags, toy, tmp_path):
    with pytest.raises(BadInput) as e:
        train.main([f"--{k}={v}" for k, v in flags.items()] + [f"--data={toy}", f"--out={tmp_path}", "--device=cpu"])
    assert all(w in str(e.value) for w in words) and not list(tmp_path.iterdir())


def test_train_a_benchmark_times_every_arm_beside_the_first(tmp_path, capsys, monkeypatch):
    """Interleaved rounds of processes that end with it; the file is what stats.py reads."""
    monkeypatch.setattr(train, "matmul_rate", lambda *_: 1e9)
    monkeypatch.setattr(train, "bench_worker", bench_worker_of_tests)
    out = tmp_path / "speed.json"
    assert train.main(["--benchmark", "--arch=block,plain,rd", "--scale=nano", "--rounds=2", "--device=cpu",
                       f"--out={out}"]) == 0
    text = capsys.readouterr().out
    for row in ("| block | reference, float32 | 128 | 1.000 (1.000-1.000) | 12.8% |",
                "round 2: block 128  plain 256  rd 64",
                "| plain | reference, float32 | 256 | 2.000 (2.000-2.000) | 25.6% |",
                "| rd | reference, float32 | 64 | 0.500 (0.500-0.500) | 6.4% |"):
        assert row in text
    speeds = {s["arm"]: s["ratio"] for s in stats.read_speeds(str(out), "block")}
    assert speeds == {"block": 1.0, "plain": 2.0, "rd": 0.5}


def bench_worker_of_tests(c, device, parent):
    """Stands for train.bench_worker: an arm that takes so many seconds a step."""
    parent.send(dict(routing=3, flops_per_token=10 ** 6))
    with contextlib.suppress(EOFError):
        while True:
            parent.send((parent.recv() * {"block": 2.0, "plain": 1.0, "rd": 4.0}[c["arch"]], 10 ** 9))


def test_train_every_field_of_the_model_is_a_flag(tmp_path):
    """Declared once, in GPTConfig: flag, bounds, name, config.json, resuming; so is one that a user adds."""
    f, = parse_flags(train.Flags,
                     ["--scale=nano", "--mlp_ratio=4", "--eps=1e-5", "--rope_base=50000", "--init_std=0.01"],
                     "", lists=True)
    c = train.resolve(f, torch.device("cpu"), 1)
    assert c["name"] == "nano-rd-s123-mlp4-normeps1e-5-rope5e4-init0.01"
    assert GPTConfig.from_run({**c, "vocab_size": 99}) == GPTConfig.from_scale(
        "nano", "rd", mlp_ratio=4, eps=1e-5, rope_base=5e4, init_std=0.01, backend=c["backend"], vocab_size=99)
    assert set(train.MODEL) <= set(c) and set(train.MODEL) <= set(train.SAME)
    with pytest.raises(BadInput, match="rope_base: 10000.0 before, 50000.0 now"):
        train.check_resume({**c, "rope_base": 10000.0}, c, tmp_path, code=False)
    for name in ("prepare.py", "train.py", "eval.py", "stats.py", "route_kernel.py"):
        shutil.copy(ROOT / name, tmp_path)
    text = (ROOT / "model.py").read_text()
    line = '    block_layers: int = setting(4, "layers per residual block", "block", least=1)\n'
    assert line in text
    more = line + '    wobble: float = setting(0.5, "new", "wob", least=0)\n'
    (tmp_path / "model.py").write_text(text.replace(line, more))
    script = """
import os, torch, train
assert os.environ["OMP_WAIT_POLICY"] == "passive"
make = lambda *words: train.parse_flags(train.Flags, ["--scale=nano", *words], "", lists=True)[0]
a, b = (train.resolve(make(*words), torch.device("cpu"), 1) for words in ((), ("--wobble=2", "--lr=1")))
assert (a["name"], a["wobble"], b["name"], b["wobble"]) == ("nano-rd-s123", 0.5, "nano-rd-s123-wob2-lr1", 2.0)
assert train.GPTConfig.from_run(b).wobble == 2
for attempt in (lambda: make("--wobble=-1"), lambda: train.check_resume({**b, "wobble": 0.5}, b, "x", code=False)):
    try:
        attempt()
    except train.BadInput as e:
        assert "wobble" in str(e)
    else:
        raise SystemExit("accepted")
train.GPTConfig.lr = train.dataclasses.field(default=1)
train.GPTConfig.__annotations__["lr"] = "int"
try:
    train.add_model_flags(train.RunFlags)
except TypeError as e:
    assert "another setting of that name" in str(e)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_train_every_flag_is_read():
    """One that no line reads would be accepted and do nothing."""
    text = (ROOT / "train.py").read_text()
    for name in {field.name for field in dataclasses.fields(train.RunFlags)} - {"residual_dtype"}:  # the model's
        assert re.search(rf"\b(f|m|first|flags|members\[0\])\.{name}\b|c\[\"{name}\"\]", text), name


def stopped(toy_runs, tmp_path, arch="rd"):
    """A copy of a toy run, as a signal at its last step left it."""
    folder = tmp_path / the_run(toy_runs, arch).name
    shutil.copytree(the_run(toy_runs, arch), folder)
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('"complete"', '"stopped"'))
    return folder


@pytest.mark.parametrize("fault, words", [
    ("checkpoint", "its checkpoint is that of another run, nano-block"), ("no log", "metrics.jsonl lacks records"),
    ("log cut", "metrics.jsonl lacks records"), ("no evaluation", "metrics.jsonl lacks records"),
    ("no record", "line 4 is no record"), ("config", "folder of another run: its config.json says nano-x"),
    ("no config", "config.json: No such file"), ("probe", "on a fixed tiny model, arm rd gave"),
    ("order", "the order of the data was"), ("plan", "plan.json holds no list of plans"),
    ("lock", "nobody can tell whose")])
def test_train_a_folder_that_is_not_whole_is_refused(toy_runs, toy, tmp_path, fault, words):
    folder = stopped(toy_runs, tmp_path)
    config, log = json.loads((folder / "config.json").read_text()), (folder / "metrics.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    if fault == "checkpoint":
        shutil.copy(the_run(toy_runs, "block") / "ckpt.pt", folder)
    elif fault == "no log":
        log.unlink()
    elif fault == "log cut":
        log.write_text("".join(lines[:-4]))
    elif fault == "no evaluation":
        log.write_text("".join(line for line in lines if '"eval"' not in line or '"step": 6' not in line))
    elif fault == "no record":
        log.write_text("".join([*lines[:3], "[]\n", *lines[3:]]))
    elif fault == "config":
        config["name"] = "nano-x"
    elif fault == "probe":
        config["probe"]["rd"][3] *= 1 + 1e-8
    elif fault == "order":
        config["data_order"] = "other"
    elif fault == "plan":
        (tmp_path / "plan.json").write_text("{}")
    elif fault == "lock":
        (folder / "lock").write_text("[1, 2]")
    (folder / "config.json").write_text(json.dumps(config))
    if fault == "no config":
        (folder / "config.json").unlink()
    with pytest.raises(BadInput, match=words):
        train.main(as_flags(data=toy, out=tmp_path, arch="rd,block" if fault == "plan" else "rd"))


def test_train_a_half_written_last_line_and_other_files_do_no_harm(toy_runs, toy, tmp_path):
    folder = stopped(toy_runs, tmp_path)
    with open(folder / "metrics.jsonl", "a") as f:
        f.write('{"kind": "tr')
    (folder / "ckpt-backup.pt").write_bytes(b"mine")
    assert train.main(as_flags(data=toy, out=tmp_path, arch="rd")) == 0
    assert timeless(folder) == timeless(the_run(toy_runs, "rd"))
    assert (folder / "tokenizer.json").read_bytes() == (toy / "tokenizer.json").read_bytes()


def test_train_weights_that_become_infinite_are_divergence(toy, tmp_path, monkeypatch):
    """Said once, at the next save, which keeps the last finite checkpoint."""
    real, calls = train.step, [0]

    def step(optimizer, lr):
        real(optimizer, lr)
        calls[0] += 1
        if calls[0] == 3 + 6:  # the probe of block and rd takes six
            optimizer.param_groups[0]["params"][0].data[0, 0] = math.inf
    train.probe.cache_clear()
    monkeypatch.setattr(train, "step", step)
    with pytest.raises(Failed, match="a weight of step 3 is not finite"):
        train_here(tmp_path, toy, arch="rd")
    folder = next(tmp_path.glob("nano-*"))
    assert timeless(folder)[-1] == dict(kind="end", status="diverged", step=3, tokens=192, why="a weight is not finite")
    assert torch.load(folder / "ckpt.pt", weights_only=True)["step"] == 2


def test_train_data_replaced_under_a_run_are_noticed(toy, tmp_path, monkeypatch):
    data = shutil.copytree(toy, tmp_path / "data")
    real = train.save_checkpoint

    def save(*a):
        real(*a)
        if a[-1] == 6:
            bin = (data / "val.bin").read_bytes()
            (data / "val.bin").write_bytes(bin[2:] + bin[:2])
    monkeypatch.setattr(train, "save_checkpoint", save)
    with pytest.raises(BadInput, match="val.bin is not the file that meta.json describes"):
        train_here(tmp_path / "out", data, arch="rd")
    folder = next((tmp_path / "out").glob("nano-*"))
    assert [x["step"] for x in timeless(folder) if x["kind"] == "eval"] == [2, 3]


def test_train_bins_that_do_not_fit_the_model(tmp_path):
    path = write_bin(tmp_path / "train.bin", 16 * 10 + 5)
    with open(path, "rb") as bin:
        with pytest.raises(BadInput, match="holds token .* and the model knows 30"):
            list(train.Batches(bin, 16, 4, 5, vocab_size=30).micro(0, 4, 0, 1))
        batches = train.Batches(bin, 16, 4, 5, vocab_size=61)
        os.truncate(path, 40)
        with pytest.raises(BadInput, match="became shorter"):
            list(batches.micro(0, 4, 0, 1))


def test_train_no_room_for_a_checkpoint_is_the_systems_error(tmp_path):
    """torch turns it into "unexpected pos"."""
    model = tiny("rd")
    c = dict(name="x", arch="rd", tokens_per_step=1, milestones=[], lr=1.0, weight_decay=0.0, route_lr_mult=1.0,
             beta1=0.0, beta2=0.0, adam_eps=1.0)
    optimizer = train.make_optimizer(model, c)
    train.save_checkpoint(tmp_path, c, train.Flags(), model, optimizer, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError) as e:
            train.save_checkpoint(tmp_path, c, train.Flags(), model, optimizer, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert e.value.errno in prepare.DISK_FULL
    assert torch.load(tmp_path / "ckpt.pt", weights_only=True)["step"] == 1 and len(list(tmp_path.iterdir())) == 1


def test_train_signals_and_readers_that_go_away(toy, tmp_path):
    """SIGHUP, and Ctrl-C of `train.py ... | tee`: the checkpoint comes first. Under nohup SIGHUP does nothing."""
    for number, ignored in ((signal.SIGINT, False), (signal.SIGHUP, True)):
        out = tmp_path / number.name
        script = ["train.py"]
        if ignored:
            script = ["-c", "import runpy, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); "
                            "runpy.run_path('train.py', run_name='__main__')"]
        flags = as_flags(data=toy, out=out, max_steps=12 if ignored else 100_000, eval_tokens=16, ckpt_every=10 ** 6)
        process = subprocess.Popen(
            [sys.executable, *script, *flags],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"})
        for line in process.stdout:
            if line.startswith("step"):
                break
        process.stdout.close()
        process.send_signal(number)
        assert process.wait(60) == (0 if ignored else 130)
        assert len(list(out.glob("*/ckpt.pt"))) == 1
        folder = next(out.glob("nano-*"))
        assert timeless(folder)[-1]["status"] == ("complete" if ignored else "stopped")


def test_train_a_busy_member_of_a_sweep_is_no_success(toy_runs, toy, tmp_path, capsys):
    folder = stopped(toy_runs, tmp_path)
    (folder / "lock").write_text("7\nelsewhere\n")
    (folder / "lock.origin").write_text("another boot")
    assert train.main(as_flags(data=toy, out=tmp_path, arch="rd", seed="123,5", max_steps=12)) == 1
    out = capsys.readouterr().out
    assert f"not trained here: {folder.name}" in out and "1 busy; 1 complete" in out and "process 7 of elsewhere" in out


def test_train_a_repository_without_a_commit(tmp_path, monkeypatch):
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr(train, "ROOT", tmp_path)
    made = train.provenance()
    assert made["git_commit"] is None and made["git_dirty"] is None


def test_train_compiled_and_plain_checkpoints_are_the_same_file(monkeypatch):
    """No _orig_mod. prefixes, no second copy of the tied weights; compiled layers compute the same."""
    a, b = stir(tiny("rd")), stir(tiny("rd"), seed=4)
    train.compile_layers(a, backend="eager")  # needs no C++ compiler
    x, y = tokens()
    a(x, y)[1].backward()
    assert list(a.state_dict()) == list(b.state_dict()) and "lm_head" not in str(list(a.state_dict()))
    b.load_state_dict(a.state_dict())
    assert torch.allclose(a(x), b(x), atol=1e-6)
    a.load_state_dict(b.state_dict())
    assert a.wte.grad is not None and sum(p.numel() for p in a.parameters()) == a.count()["total"]
    torch._dynamo.reset()


def test_train_a_full_disk_loses_nothing(toy, tmp_path, monkeypatch):
    """No space during a save: one line, exit code 2, and the previous checkpoint loads."""
    real, calls = torch.save, [0]

    def save(obj, f):
        calls[0] += 1
        if calls[0] == 3:
            f.write(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        real(obj, f)
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(OSError):
        train_here(tmp_path, toy, arch="rd")
    folder = next(tmp_path.glob("nano-*"))
    assert torch.load(folder / "ckpt.pt", weights_only=True)["step"] == 3
    assert not list(folder.glob(".*")), "nothing half written stays"
    monkeypatch.undo()
    code, straight = train_here(tmp_path / "straight", toy, arch="rd")
    assert train.main(as_flags(data=toy, out=tmp_path, arch="rd")) == 0
    assert timeless(folder) == timeless(straight)


def test_train_too_little_disk_is_said_before_the_start(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(BadInput, match="need .* GB and 0.00 GB are free"):
        train_here(tmp_path, toy, arch="rd")


def test_train_two_ranks_train_as_one(toy, toy_runs, tmp_path):
    """gloo, two processes: the same samples, losses and norms within float32's rounding; only rank 0 writes."""
    done = run_command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py",
                       *as_flags(data=toy, out=tmp_path, arch="rd", micro_batch=2))
    assert done.returncode == 0, done.stderr[-2000:]
    two, one = timeless(next(tmp_path.glob("nano-*"))), timeless(the_run(toy_runs, "rd"))
    assert len(two) == len(one)
    for a, b in zip(two, one):
        for key in ("loss", "grad_norm"):
            assert key not in a or a[key] == pytest.approx(b[key], rel=1e-6)
        assert "nll" not in a or abs(a["nll"] - b["nll"]) < 1e-6


def test_train_starting_from_another_run_names_what_does_not_fit(own_run, toy, tmp_path):
    for words, kw in (("is .* here and .* in the model to start from", dict(init_from=own_run, n_embd=16)),
                      ("No such file", dict(init_from=tmp_path / "none")),
                      ("does not compute what rd does|layers.4", dict(init_from=own_run, n_layer=6))):
        with pytest.raises(BadInput, match=words):
            train_here(tmp_path / "out", toy, arch="q_k_v", max_steps=2, **kw)
        assert not list((tmp_path / "out").glob("*/ckpt.pt"))


def test_train_one_arm_under_two_names_runs_once(capsys):
    assert train.main(["--arch=mhar,mhar:heads=2,mhar:heads=4", "--scale=nano", "--n_layer=2", "--n_embd=32",
                       "--n_head=2",
                       "--context=16", "--dry_run"]) == 0
    names = [line.split(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert [name.split("-")[1] for name in names] == ["mhar", "mhar_heads4"]


@pytest.mark.parametrize("arch", ["full_rd", "delta", "mudd", "mhc", "depth_attention",
                                  "block_resformer:learnable=true"])
def test_train_rivals_resume_and_are_measured(arch, toy, tmp_path, monkeypatch):
    """Stopped in the middle and continued: the same bytes; then evaluated by itself and sampled from."""
    code, straight = train_here(tmp_path / "a", toy, arch=arch)
    real, calls = train.step, [0]

    def step(*a):
        calls[0] += 1
        if calls[0] == 7:
            train.STOP["signal"] = signal.SIGTERM
        real(*a)
    monkeypatch.setattr(train, "step", step)
    stopped, folder = train_here(tmp_path / "b", toy, arch=arch)
    train.STOP["signal"] = 0
    monkeypatch.undo()
    assert (code, stopped) == (0, 143) and train.main(as_flags(data=toy, out=tmp_path / "b", arch=arch)) == 0
    assert timeless(folder) == timeless(straight)
    same_state(folder, straight)
    evaluation.main([str(straight), "--device=cpu"])
    last = [x for x in timeless(straight) if x["kind"] == "eval"][-1]
    assert (last["js"] is not None) == (arch == "full_rd")


def test_train_two_ranks_train_rivals_as_one(toy, tmp_path):
    """Every parameter gets a gradient in every step, and a rank without a window knows how many sources there are."""
    arms = ("full_rd", "delta_block", "mudd_rd", "hc")
    flags = dict(data=toy, arch=",".join(arms), max_steps=3, eval_tokens=16)
    done = run_command("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "train.py",
                       *as_flags(out=tmp_path / "two", micro_batch=2, **flags))
    assert done.returncode == 0, done.stderr[-2000:]
    train_here(tmp_path / "one", toy, **{k: v for k, v in flags.items() if k != "data"})
    for arch in arms:
        two, one = (timeless(the_run(tmp_path / n, arch)) for n in ("two", "one"))
        assert len(two) == len(one)
        for a, b in zip(two, one):
            for key in ("loss", "grad_norm", "nll"):
                assert key not in a or a[key] == pytest.approx(b[key], rel=2e-6)


# ---------------------------------------------------------------------------------------------------------
# eval.py


def eval_here(*args):
    return evaluation.main(["--device=cpu"] + [str(a) for a in args])


def stored(folder, name):
    return json.loads((folder / "eval" / f"{name}.json").read_text())


def make_run(folder, toy, arch="rd", seed=3, format=2, **kw):
    """A run's folder as training leaves it, with routes far from uniform. Nothing was trained."""
    data = open_data(toy)
    model = stir(tiny(arch, **{"n_layer": 4, "vocab_size": data.vocab_size, **kw}), seed=seed)
    config = dict(dataclasses.asdict(model.config), name=folder.name, data=str(toy), dtype="float32", eval_tokens=320,
                  micro_batch=4, tokens_per_step=64, tokenizer_sha256=data.meta["tokenizer_sha256"], seed=seed,
                  data_fingerprint=data.fingerprint)
    folder.mkdir(parents=True)
    prepare.write_json(folder / "config.json", config)
    shutil.copy(toy / "tokenizer.json", folder)
    torch.save(dict(format=format, step=12, name=folder.name, arch=arch, model=model.state_dict()), folder / "ckpt.pt")
    return folder


@pytest.fixture()
def own_run(toy, tmp_path):
    """The folder of an rd run, and beside it that of a block run."""
    make_run(tmp_path / "block", toy, "block", seed=4)
    return make_run(tmp_path / "rd", toy)


def measure_model(model, toy, windows=20):
    cpu = torch.device("cpu")
    return evaluation.evaluate(model, open_data(toy), "val", windows, 20, cpu, evaluation.make_autocast(cpu, "float32"))


def test_eval_command_repeats_what_the_run_logged(toy_runs, toy):
    folder = the_run(toy_runs, "rd")
    logged = [x for x in timeless(folder) if x["kind"] == "eval"][-1]
    files = [folder / "eval" / f"val-000012.{kind}" for kind in ("npy", "json")]
    before = [path.read_bytes() for path in files]
    for path in files:
        path.unlink()
    done = run_command("eval.py", folder, "--device=cpu")
    assert done.returncode == 0, done.stderr
    assert f"{logged['nll']:.6f}" in done.stdout and f"{logged['bits_per_byte']:.5f}" in done.stdout
    assert [path.read_bytes() for path in files] == before
    # bits per byte by hand: NLL over ln 2 and the UTF-8 bytes of the targets, EOS counting 0
    ids = np.fromfile(toy / "val.bin", "<u2")[1:321]
    n_bytes = len(open_data(toy).tokenizer().decode([i for i in ids if i != 3], skip_special_tokens=False).encode())
    assert logged["bits_per_byte"] == pytest.approx(logged["nll"] * 320 / math.log(2) / n_bytes, rel=1e-9)


def test_eval_evaluation_does_not_depend_on_its_batch(own_run, toy):
    model, cpu = evaluation.load_run(own_run, torch.device("cpu"))[0], torch.device("cpu")
    data, autocast = open_data(toy), evaluation.make_autocast(cpu, "float32")
    results = [evaluation.evaluate(model, data, "val", 20, batch, cpu, autocast) for batch in (1, 3, 20)]
    for r in results[1:]:
        assert np.array_equal(r.pop("window_nll"), results[0]["window_nll"])
        assert r == {k: v for k, v in results[0].items() if k != "window_nll"}


def test_eval_js_divergence():
    from scipy.spatial.distance import jensenshannon
    p, q = torch.tensor([0.9, 0.1, 0.0]), torch.tensor([0.2, 0.3, 0.5])
    got = evaluation.js_divergence(p[:, None], q[:, None]).item()
    assert got == pytest.approx(jensenshannon(p.double(), q.double()) ** 2, abs=1e-6)
    assert evaluation.js_divergence(torch.eye(2)[0], torch.eye(2)[1]).item() == pytest.approx(math.log(2), abs=1e-6)
    short = torch.tensor([0.25, 0.75])  # the third source is missing: it has the weight 0
    for a, b in ((short, q), (q, short)):
        want = jensenshannon([0.25, 0.75, 0], q.double()) ** 2
        assert evaluation.js_divergence(a, b).item() == pytest.approx(want, abs=1e-6)


BAD_RUNS = {"missing": "does not exist", "no checkpoint": "has no ckpt.pt", "backup": "has no ckpt.pt",
            "cut short": "does not load", "other run": "is that of another run, block",
            "other arm": "is that of another run, rd, of rd", "other shape": "does not fit its config.json",
            "wrong setting": "n_head", "no setting": "lacks data", "not JSON": "not valid JSON",
            "other tokenizer": "another tokenizer"}


@pytest.mark.parametrize("what", BAD_RUNS)
def test_eval_bad_runs_are_found_before_the_work(own_run, tmp_path, what, capsys):
    folder = tmp_path / "run"
    if what != "missing":
        shutil.copytree(own_run, folder)
        c, state = json.loads((folder / "config.json").read_text()), (folder / "ckpt.pt").read_bytes()
        changes = {"other shape": {"n_embd": 64}, "other arm": {"arch": "average"},
                   "other tokenizer": {"tokenizer_sha256": "0" * 64}, "wrong setting": {"n_head": 5}}
        text = json.dumps({**c, **changes.get(what, {})})
        if what == "no setting":
            text = json.dumps({k: v for k, v in c.items() if k != "data"})
        (folder / "config.json").write_text(text[:9] if what == "not JSON" else text)
        if what in ("no checkpoint", "backup"):
            (folder / "ckpt.pt").unlink()
        if what == "backup":  # no name that training gives
            (folder / "ckpt-backup.pt").write_bytes(state)
        if what == "cut short":
            (folder / "ckpt.pt").write_bytes(state[:5000])
        if what == "other run":
            shutil.copy(own_run.parent / "block" / "ckpt.pt", folder)
    with pytest.raises(BadInput, match=BAD_RUNS[what]):
        eval_here(own_run, folder)
    assert not (own_run / "eval").exists() and "| rd |" not in capsys.readouterr().out


def test_eval_skips_what_is_no_run_and_prints_its_table_in_any_case(own_run, tmp_path, monkeypatch, capsys):
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (own_run.parent / "block" / "eval").write_text("no folder: nothing can be stored here")
    with pytest.raises(BadInput, match="block/eval/val-000012.json could not be written"):
        eval_here(*sorted(tmp_path.iterdir()))
    said = capsys.readouterr()
    for name in ("plan.json", "empty"):
        assert f"skipped: {tmp_path / name} holds no config.json" in said.err
    assert "\n| rd | " in said.out and "\n| block | " in said.out and stored(own_run, "val-000012")["windows"] == 20
    with pytest.raises(BadInput, match="no run folder is given"):
        eval_here(tmp_path / "empty")
    monkeypatch.setattr(evaluation, "run_interventions", lambda *a: 1 / 0)  # what breaks in a later run
    with pytest.raises(ZeroDivisionError):
        eval_here(own_run.parent / "block", own_run, "--intervene=swap", "--by_position")
    assert "| rd |" not in capsys.readouterr().out and not evaluation.Flags(export="x").evaluates()


def test_eval_route_report_against_numpy_and_scipy(own_run, toy, capsys):
    from scipy.spatial.distance import jensenshannon
    from scipy.stats import entropy
    eval_here(own_run, "--report")
    report, text = stored(own_run, "report-val-000012"), capsys.readouterr().out
    model, _, _ = evaluation.load_run(own_run, torch.device("cpu"))
    ids = torch.from_numpy(np.fromfile(toy / "val.bin", "<u2")[:320].astype(np.int64)).view(20, 16)
    record = []
    with torch.no_grad():
        model(ids, record=record)
    weights = [w.weights.double().numpy() for w in record]  # [K, tokens] of each read
    assert [(r["layer"], r["read"]) for r in report["reads"]] == \
        [(l, read) for l in range(4) for read in ("qk", "v", "mlp")] + [(4, "out")]
    assert [len(r["weights"]) for r in report["reads"]] == [1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3]
    assert [r["running"] for r in report["reads"]] == [False, False, True, True, True, True] * 2 + [False]
    for r, w in zip(report["reads"], weights):
        assert np.allclose(r["weights"], w.mean(1), atol=1e-6) and np.allclose(r["weights_sd"], w.std(1), atol=1e-5)
        assert r["entropy"] == pytest.approx(entropy(w).mean(), abs=1e-6)
        assert r["entropy_sd"] == pytest.approx(entropy(w).std(), abs=1e-5)
    for l, found in enumerate(report["js"]):
        js = np.array([jensenshannon(a, b) ** 2 for a, b in zip(weights[3 * l].T, weights[3 * l + 1].T)])
        of_mean = jensenshannon(weights[3 * l].mean(1), weights[3 * l + 1].mean(1)) ** 2
        want = dict(mean=js.mean(), sd=js.std(), of_mean=of_mean, q50=np.median(js), q90=np.percentile(js, 90))
        for key, value in want.items():
            assert found[key] == pytest.approx(value, abs=2e-6)
    assert report["js"][0]["mean"] == 0 and report["js"][3]["mean"] > 1e-3
    assert f"{report['reads'][4]['weights'][0]:.3f} ± {report['reads'][4]['weights_sd'][0]:.3f}" in text
    assert (own_run / "eval" / "report-val-000012.png").read_bytes().startswith(b"\x89PNG")
    eval_here(own_run.parent / "block", "--report")  # one read: no JS
    assert stored(own_run.parent / "block", "report-val-000012")["js"] == []


def test_eval_titles_are_wrapped_to_their_figure(tmp_path):
    name = "nano-rd-s123-" + "datademo-steps600-batch16-lr0.003-routelr3-" * 4 + "w" * 50
    for width in (3, 8):
        with evaluation.figure(tmp_path / "x.png", f"{name}, step 600, val", width, 3) as (fig, _):
            fig.canvas.draw()
            inside, title = fig.bbox, fig._suptitle.get_window_extent()
            assert inside.x0 <= title.x0 < title.x1 <= inside.x1 and title.y1 <= inside.y1
    assert list(tmp_path.iterdir()) == [tmp_path / "x.png"]


def test_eval_interventions_equal_edited_weights(own_run, toy, capsys):
    """Each intervention gives, to the last bit, the NLL of a model whose parameters were edited by hand."""
    from scipy.stats import ttest_1samp
    block = own_run.parent / "block"
    other = evaluation.load_state(block)[0]

    def edit(change):
        model, _, _ = evaluation.load_run(own_run, torch.device("cpu"))
        with torch.no_grad():
            for l, layer in enumerate(model.layers):
                change(l, layer.attn_read.query, layer.mlp_read.query)
        return model

    def swap(l, q, _):
        q["qk"], q["v"] = q["v"], q["qk"]
    model = evaluation.load_run(own_run, torch.device("cpu"))[0]
    third = {k: p.clone() for k, p in model.layers[3].attn_read.query.items()}
    edits = {"v:qk": lambda l, q, _: q["v"].copy_(q["qk"]), "qk:v": lambda l, q, _: q["qk"].copy_(q["v"]), "swap": swap,
             "v:uniform": lambda l, q, _: q["v"].zero_(),
             "qkv:uniform": lambda l, q, _: [p.zero_() for p in q.values()],
             "mlp:uniform": lambda l, q, m: m["mlp"].zero_(), "mlp:v": lambda l, q, m: m["mlp"].copy_(q["v"]),
             "qk:layer3": lambda l, q, _: q["qk"].copy_(third["qk"]),
             f"v:run={block}/": lambda l, q, _: q["v"].copy_(other[f"layers.{l}.attn_read.query.qkv"])}
    windows = 5
    before, few = measure_model(model, toy, windows), ["--eval_batch=20", f"--eval_tokens={16 * windows}"]
    eval_here(own_run, f"--intervene={', '.join(edits)}", *few)
    eval_here(own_run, "--intervene=swap,v:uniform", "--by_layer", *few)
    found = stored(own_run, "intervene-val-000012-80")["interventions"]
    for text, change in edits.items():
        after, e = measure_model(edit(change), toy, windows), found[text.replace(f"{own_run.parent}/", "")]
        assert (e["nll_before"], e["nll_after"]) == (before["nll"], after["nll"]) and e["delta"] != 0, text
        d = after["window_nll"] - before["window_nll"]
        assert np.allclose(e["t_ci"], ttest_1samp(d, 0).confidence_interval(0.95)) and e["delta"] == d.mean()
        if text in ("swap", "v:uniform"):
            one = measure_model(edit(lambda l, *q: change(l, *q) if l == 2 else None), toy, windows)
            assert e["by_layer"][2]["nll_after"] == one["nll"], text
    assert found["v:qk"]["js_mean"] == 0 and before["js_mean"] > 0
    assert (own_run / "eval" / "intervene-val-000012-80.png").exists()
    assert f"{found['swap']['nll_after']:.6f}" in capsys.readouterr().out
    eval_here(own_run, "--intervene=v:qk", "--layers=2-3,1", *few)  # beside what was stored, not in its place
    again = stored(own_run, "intervene-val-000012-80")["interventions"]
    assert again["swap"] == found["swap"]
    some = measure_model(edit(lambda l, q, _: l and edits["v:qk"](l, q, _)), toy, windows)
    assert again["v:qk@2-3,1"]["nll_after"] == some["nll"]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), evaluation.changed(model, evaluation.plan(model, "swap", [2])):
        assert not torch.equal(state["layers.2.attn_read.query.v"], model.layers[2].attn_read.query["v"])
        1 / 0
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items()), "afterwards the model is as it was"


def test_eval_a_single_source_is_what_a_read_gets():
    """V of layer 3 from each of its sources, against the layer run by hand; the recorded weights say so."""
    from model import rms_norm
    model, (x, y) = stir(tiny("rd", n_layer=4)), tokens()
    for text, s in (("v:source0", 0), ("v:source1", 1), ("v:source-1", 2)):
        record = []
        with evaluation.changed(model, evaluation.plan(model, text, [3])):
            got = model(x, record=record)
        depth = Depth(F.embedding(x, model.wte))
        for l, layer in enumerate(model.layers):
            if l % 2 == 0:
                depth.finish_block()
            sources = depth.completed + [depth.partial]
            hs = list(depth.read(*layer.attn_read(), layer.attn_norm))
            if l == 3:
                hs[1] = rms_norm(sources[s], layer.attn_norm, 1e-6)
            depth.write(layer.attention(hs, model.rope, depth))
            depth.write(layer.mlp(*depth.read(*layer.mlp_read(), layer.mlp_norm)))
        depth.finish_block()
        want = F.linear(*depth.read(*model.out_read(), model.out_norm), model.wte)
        assert (got - want).norm() <= 1e-6 * want.norm() and (got - model(x)).norm() > 1e-3 * want.norm()
        weights = {(w.layer, w.read): w.weights for w in record}
        assert torch.equal(weights[3, "v"], torch.eye(3)[s][:, None].expand(3, 32)) and (weights[3, "qk"] < 1).all()
    with evaluation.changed(model, evaluation.plan(model, "out:source0", [0])):
        got = model(x)
    e = model.wte[x]
    want = e / (e.square().mean(-1, keepdim=True) + 1e-6).sqrt() * model.out_norm @ model.wte.T
    assert (got - want).norm() <= 1e-6 * want.norm()


def test_eval_interventions_that_change_nothing_report_exactly_zero(own_run, capsys):
    nothing = dict(delta=0.0, sd=0.0, t_ci=[0.0, 0.0])
    rd, block = own_run, own_run.parent / "block"
    for folder, layers, texts in (
            (rd, "--layers=0", f"v:qk,qk:v,swap,v:uniform,v:source0,v:source-1,v:layer2,qkv:uniform,v:run={block}"),
            (rd, "--layers=3", f"v:layer3,qk:layer3,mlp:layer3,v:run={rd},mlp:run={rd}"),
            (block, "--layers=0-3", f"v:qk,k:q,swap,qkv:run={block},out:run={block}")):
        eval_here(folder, f"--intervene={texts}", layers, "--eval_tokens=48")
        found = stored(folder, "intervene-val-000012-48")["interventions"]
        for text in texts.split(","):
            e = found[f"{text}@{layers[9:]}".replace(f"{own_run.parent}/", "")]
            assert {k: e[k] for k in nothing} == nothing and e["nll_after"] == e["nll_before"], text
    model, (x, _) = tiny("frozen_v"), tokens()
    with evaluation.changed(model, evaluation.plan(model, "v:uniform", range(6))):
        assert torch.equal(model(x), tiny("frozen_v")(x))


def test_eval_interventions_on_fused_routes():
    on_backend("fused")
    x, _ = tokens(1, 2)
    both = [stir(tiny("rd", n_layer=2, backend=b)) for b in ("reference", "fused")]
    for texts in (("swap", "mlp:source1"), ("v:source-1", "mlp:uniform", "out:source1")):  # two slow passes, not five
        logits = []
        for model in both:
            change = {}
            for text in texts:
                change |= evaluation.plan(both[0], text, [1])
            with evaluation.changed(model, change):
                logits.append(model(x))
        assert (logits[0] - logits[1]).norm() <= 1e-5 * logits[0].norm(), texts
        assert (logits[0] - both[0](x)).norm() > 1e-3 * logits[0].norm(), texts


@pytest.mark.parametrize("arch, words, flags", [
    ("rd", "there is no v read in layer 4", ["--intervene=v:layer4"]),
    ("rd", "--layers=2,9 is out of range: the layers are 0 to 3", ["--intervene=v:qk", "--layers=2,9"]),
    ("rd", "--layers=3-2 is out of range", ["--intervene=v:qk", "--layers=3-2"]),
    ("rd", "--layers=a wants layers", ["--intervene=v:qk", "--layers=a"]),
    ("rd", "--layers and --by_layer go with --intervene", ["--layers=1"]),
    ("rd", "unknown; did you mean v:uniform", ["--intervene=v:unifrom"]),
    ("rd", "unknown; did you mean v:qk", ["--intervene=v:qkk"]),
    ("rd", "'vv' is no read of its own", ["--intervene=vv:uniform"]),
    ("rd", "unknown", ["--intervene="]),
    ("rd", "unknown", ["--intervene=swap,"]),
    ("rd", "rd has the reads qk, v, mlp, out", ["--intervene=k:v"]),
    ("block", "'v' is no read of its own; block has the reads qkv", ["--intervene=v:uniform"]),
    ("rd", "no such source", ["--intervene=v:source7"]),
    ("rd", "there is no out read in layer 1", ["--intervene=out:layer1"]),
    ("rd", "config.json: No such file", ["--intervene=v:run=nowhere"]),
    ("block", "has no qkv read in layer 0", ["--intervene=qkv:run=RD"]),
    ("rd", "--temperature=1e40 must lie between 0 and 100", ["--temperature=1e40"]),
    ("block", "--export=RD is a run's folder", ["--export=RD"]),
    ("rd", "--export takes one run", ["BLOCK", "--export=x"]),
])
def test_eval_bad_flags(own_run, arch, words, flags):
    places = {"RD": str(own_run), "BLOCK": str(own_run.parent / "block")}
    for word, path in places.items():
        words, flags = words.replace(word, path), [f.replace(word, path) for f in flags]
    with pytest.raises(BadInput, match=words) as e:
        eval_here(own_run.parent / arch, *flags)
    assert len(str(e.value).splitlines()) == 1 and not (own_run.parent / arch / "eval").exists()


def test_eval_interventions_of_every_arm(toy):
    """They go by what an arm declares; arms without queries over depth have none."""
    for arch, text, feeds in (("q_kv", "swap", "q kv"), ("q_kv", "kv:q", "kv"), ("rd", "v:k", "v"),
                              ("k_qv", "k:qv", "k"), ("q_k_v", "qk:v", "q k"), ("average", "qkv:uniform", "qk v"),
                              ("q_k_v", "swap", "k v")):
        assert {(p.layer, p.feed) for p in evaluation.plan(tiny(arch), text, [1])} == {(1, f) for f in feeds.split()}
    for arch in ("full_rd", "mhar:heads=4", "lowrank:rank=8", "delta", "delta_block", "block_resformer"):
        model, (x, _) = stir(tiny(arch, n_layer=4)), tokens()
        before, source = model(x), dict(layers=[3], text="mlp:source1")
        edited, record = stir(tiny(arch, n_layer=4)), []
        with torch.no_grad():
            edited.layers[3].mlp_read.query["mlp"].zero_()
        with evaluation.changed(model, evaluation.plan(model, "mlp:uniform", [3])):
            assert torch.equal(model(x), edited(x)) and not torch.equal(model(x), before), arch
        with evaluation.changed(model, evaluation.plan(model, **source)):
            assert not torch.equal(model(x, record=record), before)
        weights = [w.weights for w in record if w.layer == 3 and w.read.startswith("mlp")]
        assert all((w[1] == 1).all() and (w.sum(0) == 1).all() for w in weights) and weights, arch
        assert torch.equal(model(x), before)
    for arch in ("plain", "resformer", "depth_attention", "denseformer", "mudd_rd", "hc", "mhc"):
        with pytest.raises(BadInput, match=f"{arch} has the reads none"):
            evaluation.plan(tiny(arch), "mlp:uniform", [1])


class CompletedV(Routes):
    """An arm as a user adds it: V does not see the block being summed."""

    def read(self, read, out_gain, ahead=None, last=False, feeds=()):
        if "v" not in (feeds or read.feeds) or self.partial is None:
            return super().read(read, out_gain, ahead, last, feeds)
        (qk,) = super().read(read, out_gain, feeds=("qk",))
        running, self.sources = self.sources[self.n_completed:], self.completed
        (v,) = super().read(read, out_gain, feeds=("v",))
        self.sources = self.sources + running
        return qk, v


def test_eval_knows_the_arm_that_a_user_adds(toy, tmp_path, monkeypatch):
    from scipy.spatial.distance import jensenshannon
    monkeypatch.setitem(ARMS, "mine", dataclasses.replace(ARMS["rd"], depth=CompletedV))
    folder = make_run(tmp_path / "mine", toy, "mine")
    eval_here(folder, "--report", "--intervene=swap,v:qk,v:source-1,qk:source-1", "--layers=3",
              "--eval_tokens=48")
    report, found = (stored(folder, f"{kind}-val-000012-48") for kind in ("report", "intervene"))
    found = found["interventions"]
    assert [len(r["weights"]) for r in report["reads"] if r["layer"] == 3] == [3, 2, 3]
    model, (x, _) = evaluation.load_run(folder, torch.device("cpu"))[0], tokens(vocab=300)
    record = []
    model(x, record=record)
    w = {read.read: read.weights.double().T.numpy() for read in record if read.layer == 3}
    js = [jensenshannon(a, [*b, 0]) ** 2 for a, b in zip(w["qk"], w["v"])]
    divergence = evaluation.Divergence(("qk", "v"), 4, torch.device("cpu"))
    divergence.add(record)
    assert divergence.result(32)["js"][3] == pytest.approx(np.mean(js), abs=1e-6)
    with torch.no_grad():
        model.layers[3].attn_read.query["v"].copy_(model.layers[3].attn_read.query["qk"])
    assert found["v:qk@3"]["nll_after"] == measure_model(model, toy, 3)["nll"]
    assert len({e["nll_after"] for e in found.values()}) == 4


def test_eval_other_evaluations_stay_out_of_the_statistics(toy_runs, toy, tmp_path, capsys, monkeypatch):
    """Another split, number of tokens or data: stored beside the run, named so that stats.py takes what it should."""
    own_run = tmp_path / "rd"
    for arch in ("rd", "block"):
        shutil.copytree(the_run(toy_runs, arch), tmp_path / arch)
    before = stats.Run(own_run, "rd", "val").evals
    monkeypatch.chdir(tmp_path)
    other = tmp_path / "other"
    pq.write_table(pa.table({"text": [f"abc {i} def ghi" * 20 for i in range(60)]}), tmp_path / "other.parquet")
    done = run_command("prepare.py", f"--source={tmp_path / 'other.parquet'}", f"--out={other}",
                       f"--tokenizer={toy / 'tokenizer.json'}", "--val_fraction=0.3", "--test_fraction=0.3",
                       "--workers=1")
    assert done.returncode == 0, done.stderr
    eval_here(own_run, f"--data={other}", "--split=test")
    with pytest.raises(ValueError, match="no test evaluation"):
        stats.Run(own_run, "rd", "test")
    eval_here(own_run, own_run.parent / "block", "--split=test", "--by_position")
    said = capsys.readouterr()
    assert "warning: the test split" in said.err and "| position | rd | block |" in said.out
    x, position = stored(own_run, "test-000012"), stored(own_run, "position-test-000012")
    assert np.mean(position["nll"]) == pytest.approx(x["nll"], abs=1e-9) and len(position["nll"]) == 16
    model = evaluation.load_run(own_run, torch.device("cpu"))[0]
    ids = torch.from_numpy(np.fromfile(toy / "test.bin", "<u2")[:x["eval_tokens"] + 1].astype(np.int64))
    with torch.no_grad():
        nll = F.cross_entropy(model(ids[:-1].view(-1, 16)).flatten(0, 1), ids[1:], reduction="none").view(-1, 16)
    assert np.allclose(position["nll"], nll.mean(0), atol=1e-5)
    assert stats.Run(own_run, "rd", "test").evals[12]["nll"] == x["nll"]
    eval_here(own_run, "--eval_tokens=64", "--report", "--intervene=swap")
    assert stored(own_run, "val-000012-64")["windows"] == 4
    assert stats.Run(own_run, "rd", "val").evals == before
    config = json.loads((own_run / "config.json").read_text())
    (own_run / "config.json").write_text(json.dumps({**config, "data_fingerprint": "other"}))
    with pytest.raises(BadInput, match="has changed since rd was trained"):
        eval_here(own_run)


def test_eval_crossed_backends(own_run, toy, monkeypatch, capsys):
    on_backend("fused")
    for arch, words in (("mhar", "no fused path"), ("hc", "no fused path"), ("plain", "nothing to compare")):
        with pytest.raises(BadInput, match=f"{arch} has .*{words}"):
            eval_here(make_run(own_run.parent / arch, toy, arch), "--compare_backends")
    folder = make_run(own_run.parent / "small", toy, n_layer=2, context=2)  # the interpreter is slow
    measured, real = [], evaluation.evaluate
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **kw: measured.append(real(*a, **kw)) or measured[-1])
    eval_here(folder, "--compare_backends", "--eval_tokens=2")
    found, (fused, reference) = stored(folder, "backends-val-000012-2"), measured
    assert found["within"] and 0 < found["logits"] < 1e-5 and found["js"] < 1e-5 and found["dtype"] == "float32"
    assert (found["nll_fused"], found["nll_reference"]) == (fused["nll"], reference["nll"])
    assert found["nll"] == abs(fused["nll"] - reference["nll"]) < 1e-5
    reference["nll"] += 2e-5  # what lies beyond the tolerance, without another pass
    monkeypatch.setattr(evaluation, "evaluate", lambda *a, **kw: measured.pop(0))
    with pytest.raises(Failed, match="differ by more than the tolerance: small"):
        eval_here(folder, "--compare_backends", "--eval_tokens=2")
    assert not stored(folder, "backends-val-000012-2")["within"]


def test_eval_sampling_needs_the_run_folder_alone(own_run, capsys):
    config = json.loads((own_run / "config.json").read_text())
    for folder in (own_run, own_run.parent / "block"):
        (folder / "config.json").write_text(json.dumps({**config, "name": folder.name, "arch": folder.name,
                                                        "data": "on/another/machine"}))

    def said(*flags):
        eval_here(own_run, own_run.parent / "block", "--sample=abc def", "--new_tokens=10", *flags)
        return capsys.readouterr().out
    assert said() == said("--seed=1") != said("--seed=2")
    assert said("--temperature=0") == said("--temperature=0", "--seed=2") == said("--top_k=1") and said("--top_k=0")
    assert said("--temperature=1e-40") == said("--temperature=0")
    assert said("--sample=" + "abc " * 60).startswith("abc abc") and said("--sample=")
    (own_run / "tokenizer.json").unlink()
    with pytest.raises(BadInput, match="neither .* is the tokenizer that it was trained with"):
        said()


def test_eval_does_all_that_is_asked_at_once(own_run, capsys):
    eval_here(own_run, "--report", "--sample=abc", "--new_tokens=3", f"--export={own_run.parent / 'out'}")
    said = capsys.readouterr().out
    assert "Depth weights" in said and "\nabc" in said and "| rd |" in said and "exported to" in said


def test_eval_export_loads_where_only_the_model_is(own_run, tmp_path, monkeypatch):
    """The lines of -h, in a folder with the model's two files alone, and no other script to be found."""
    out, alone = tmp_path / "out", tmp_path / "alone"
    eval_here(own_run, f"--export={out}")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert not (own_run / "eval").exists()
    alone.mkdir()
    for name in ("model.py", "route_kernel.py"):
        shutil.copy(ROOT / name, alone)
    recipe = re.search(r"^    config = json.*?\n\n", evaluation.__doc__, re.M | re.S)[0]
    lines = ["import json", "import safetensors.torch, torch", "from model import GPT, GPTConfig",
             *(line.strip().replace("DIR", str(out)) for line in recipe.splitlines()),
             "torch.save(model(torch.arange(16)[None]), 'logits.pt')"]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], cwd=alone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    model = evaluation.load_run(own_run, torch.device("cpu"))[0]
    assert torch.equal(torch.load(alone / "logits.pt"), model(torch.arange(16)[None]))
    assert (out / "tokenizer.json").read_bytes() == (own_run / "tokenizer.json").read_bytes()
    monkeypatch.setattr(os, "fsync", lambda fd: 1 / 0)  # a writing that breaks off leaves no file that is half new
    with pytest.raises(ZeroDivisionError):
        eval_here(own_run, f"--export={out}")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize("arch", ["full_rd", "mhar:heads=4", "delta", "mudd_rd", "denseformer", "hc", "depth_attention",
                                  "resformer"])
def test_eval_reports_on_rivals(arch, toy, tmp_path, capsys):
    """`--report` shows the weights of every arm that mixes over depth, by layer and source."""
    folder = make_run(tmp_path / "run", toy, arch)
    eval_here(folder, "--report", "--eval_tokens=16")
    assert ("no depth reads to report" in capsys.readouterr().out) == (arch == "resformer")
    if arch == "resformer":
        return
    reads, record = stored(folder, "report-val-000012-16")["reads"], []
    model = evaluation.load_run(folder, torch.device("cpu"))[0]
    model(tokens(vocab=300)[0], record=record)
    assert [(r["layer"], r["read"], len(r["weights"])) for r in reads] == [(*w[:2], len(w.weights)) for w in record]
    for r in reads:
        if model.arm.depth.softmax:
            assert sum(r["weights"]) == pytest.approx(1, abs=1e-5)
            assert r["entropy"] <= math.log(len(r["weights"])) + 1e-6
        else:
            assert r["entropy"] is None


def test_eval_checkpoints_of_format_1(toy, tmp_path):
    """Their queries stand in sorted order: right for most arms, wrong for some."""
    for arch in ("rd", "k_qv"):
        assert evaluation.load_run(make_run(tmp_path / arch, toy, arch, format=1), torch.device("cpu"))[2] == 12
    for arch in (arch for arch, arm in ARMS.items() if list(arm.reads) != sorted(arm.reads)):
        torch.save(dict(format=1, arch=arch), tmp_path / "ckpt.pt")
        with pytest.raises(BadInput, match="has format 1, in which the queries .* train it anew"):
            evaluation.load_checkpoint(tmp_path)


def test_eval_refuses_a_token_that_the_model_does_not_know(own_run, toy):
    model, data = evaluation.load_run(own_run, torch.device("cpu"))[0], open_data(toy)
    data.tokens = lambda split: np.full(17, 4000, dtype="<u2")
    with pytest.raises(BadInput, match="the val split holds token 4000, and the model knows 300"):
        evaluation.evaluate(model, data, "val", 1, 1, torch.device("cpu"), contextlib.nullcontext)


def test_eval_says_why_no_gpu_can_be_used(monkeypatch):
    real = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: str(path).startswith(("/proc/driver", "/dev/nv")) or real(path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for cuda, shown, words in (("13.0", "", "none is visible to it, because CUDA_VISIBLE_DEVICES='': unset that"),
                               ("13.0", "7", "or CUDA_VISIBLE_DEVICES='7' names none"), (None, "", "is a CPU build")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
        with pytest.raises(BadInput, match=words):
            evaluation.pick_device("auto")
    assert evaluation.pick_device("cpu").type == "cpu"


def test_eval_threads_wait_passively_unless_the_user_says_otherwise():
    code = ("import os, sys\nclass Finder:\n    def find_spec(self, name, *rest):\n        if name == 'torch':\n"
            "            print(os.environ['OMP_WAIT_POLICY'], flush=True)\n            os._exit(0)\n"
            "sys.meta_path.insert(0, Finder())\nimport eval")
    bare = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    for env, want in ((bare, "passive"), ({**bare, "OMP_WAIT_POLICY": "active"}, "active")):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.stdout.strip() == want, done.stderr


# ---------------------------------------------------------------------------------------------------------
# stats.py


PAPER_TABLE3 = {
    "S": {123: (3.16700, 3.13796), 2025: (3.15800, 3.13104), 2026: (3.17461, 3.14524), 3407: (3.17806, 3.14798),
          7777: (3.18425, 3.14912)},
    "M": {123: (3.02462, 3.00649), 2025: (3.03657, 3.00736), 2026: (3.03451, 2.99146), 3407: (3.03080, 3.00973),
          7777: (3.01297, 3.00097)}}


def stats_config(arch, scale="S", seed=123, **changes):
    shape = {"S": (16, 576, 36), "M": (24, 832, 52)}.get(scale, (8, 128, 8))
    config = dict(
        name="", arch=arch, scale=scale, seed=seed, tag=None, data="data/fineweb-edu", data_fingerprint="d" * 64,
        tokenizer_sha256="t" * 64, vocab_size=32768, n_layer=shape[0], n_embd=shape[1], n_head=shape[2],
        block_layers=4, context=1024, mlp_ratio=5, batch_size=32, tokens_per_step=32768, micro_batch=8, ranks=1,
        compile=False, dtype="bfloat16", residual_dtype="bfloat16", device="cuda", device_name="NVIDIA RTX 5090",
        backend="reference", deterministic=False, max_steps=61036, max_tokens=2_000_000_000, stop_steps=None,
        stop_tokens=None, warmup_steps=1221, warmup_ratio=0.02, milestones=[7630, 15259, 30518, 61036],
        lr=3e-4 if scale != "M" else 2e-4,
        min_lr_ratio=0.1, beta1=0.9, beta2=0.95, adam_eps=1e-8, weight_decay=0.1, grad_clip=1.0, route_lr_mult=1.0,
        init_from=None, freeze=None, init_sha256=f"{scale}{seed}", eval_tokens=10_485_760,
        n_params={"S": 119_791_296, "M": 343_039_424}.get(scale, 2_000_000) + (arch != "block") * shape[0] * shape[1],
        n_params_route=0, torch="2.13.0", triton="3.9.0", python="3.12.3",
        git_commit="c0ffee", git_dirty=False, kernel_sha256=None, command="python train.py",
        started="2026-01-01T00:00:00", host="h",
        probe={a: [8.3, 8.2, 8.1, 1.0, 1.1, 0.9, 8.0 + i] for i, a in enumerate(("block", "rd", "average"))})
    return {**config, **changes}


def stats_run(runs, config, nlls, status="complete", windows=None, train=8, name=None, end=True, js=True, split="val"):
    """A run folder; `nlls` maps steps to NLLs."""
    seed, arm = config["seed"], config["arch"].replace(":", "_").replace("=", "")
    name = name or f"{config['scale']}-{arm}-s{seed}"
    folder = Path(runs) / name
    (folder / "eval").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**config, "name": name}))
    last = max(nlls)
    lines = [{"kind": "train", "step": s, "tokens": s * config["tokens_per_step"],
              "loss": 3.5 + 4 * math.exp(-6 * s / last), "lr": 3e-4, "grad_norm": 0.3, "tokens_per_s": 56158.0,
              "peak_memory_bytes": 16_005_000_000, "seconds": 0.6}
             for s in sorted({max(1, round(last * i / train)) for i in range(1, train + 1)})]
    layer_js = None
    if js and config["arch"] not in ("block", "plain", "tied"):
        layer_js = [0.0] + [0.2 + 0.05 * math.sin(i + seed) for i in range(1, config["n_layer"])]
    for step, nll in nlls.items():
        lines.append({"kind": "eval", "step": step, "tokens": step * config["tokens_per_step"], "nll": nll, "ppl": 0,
                      "bits_per_byte": nll / 3 if nll is not None else None, "eval_tokens": config["eval_tokens"],
                      "split": split, "js_mean": float(np.mean(layer_js[1:])) if layer_js else None, "js": layer_js,
                      "js_of_mean": layer_js, "milestone": True, "seconds": 1.0})
        if windows is not None:
            np.save(folder / "eval" / f"{split}-{step:06d}.npy", windows - windows.mean() + nll)
    lines.sort(key=lambda r: (r["step"], r["kind"] == "eval"))
    if end:
        lines.append({"kind": "end", "status": status, "step": last, "tokens": last * config["tokens_per_step"],
                      "seconds": 1.0})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x, separators=(",", ":")) + "\n" for x in lines))
    return folder


def stats_paper_runs(runs, scales="SM"):
    for scale in scales:
        for seed, (block, rd) in PAPER_TABLE3[scale].items():
            for arm, nll in (("block", block), ("rd", rd)):
                stats_run(runs, stats_config(arm, scale, seed), {61036: nll})


def stats_cli(capsys, *argv):
    """(exit code, stdout, stderr) of `python stats.py ARGV`."""
    with pytest.raises(SystemExit) as stop, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["stats.py", *map(str, argv)])
        stats.run_script(stats.main)
    text = capsys.readouterr()
    return stop.value.code, text.out, text.err


def stats_json(capsys, *argv):
    code, text, _ = stats_cli(capsys, *argv, "--json")
    return code, json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


STATS_EXPECTED = {  # from the five-decimal table; the second numbers are appendix D, from the unrounded one
    "S": dict(mean=-0.030116, sd=0.003034, t_ci=(-0.033883, -0.026349), bootstrap_ci=(-0.032826, -0.028066), ppl=2.97,
              paper=(-0.030118, 0.003036, -0.033887, -0.026348, -0.032828, -0.028064)),
    "M": dict(mean=-0.024692, sd=0.011986, t_ci=(-0.039575, -0.009809), bootstrap_ci=(-0.034746, -0.016266), ppl=2.43,
              paper=(-0.024691, 0.011983, -0.039570, -0.009812, -0.034742, -0.016267))}


@pytest.mark.parametrize("scale", ["S", "M"])
def test_stats_paired_gives_the_papers_table_and_what_scipy_and_enumeration_give(scale):
    deltas = [rd - block for block, rd in PAPER_TABLE3[scale].values()]
    got, want = stats.paired(deltas), STATS_EXPECTED[scale]
    assert got.n == 5 and round(got.mean, 6) == want["mean"] and round(got.sd, 6) == want["sd"]
    assert tuple(round(x, 6) for x in got.t_ci) == want["t_ci"]
    assert tuple(round(x, 6) for x in got.bootstrap_ci) == want["bootstrap_ci"]
    assert np.allclose((got.mean, got.sd, *got.t_ci, *got.bootstrap_ci), want["paper"], rtol=0, atol=6e-6)
    blocks, rds = zip(*PAPER_TABLE3[scale].values())
    interval = scipy.stats.ttest_rel(rds, blocks).confidence_interval(0.95)
    assert np.allclose(got.t_ci, interval, rtol=1e-12)
    means = [sum(r) / 5 for r in itertools.product(deltas, repeat=5)]
    assert np.allclose(got.bootstrap_ci, np.percentile(means, [2.5, 97.5]), rtol=1e-12)
    flips = [abs(sum(s * d for s, d in zip(signs, deltas))) for signs in itertools.product((1, -1), repeat=5)]
    assert stats.sign_flip(deltas) == np.mean([f >= abs(sum(deltas)) - 1e-12 for f in flips]) == 0.0625


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 20])
def test_stats_paired_at_every_n(n):
    deltas = np.random.default_rng(n).normal(-0.03, 0.01, n)
    got = stats.paired(deltas.tolist())
    assert (got.n, got.mean, got.sd) == (n, pytest.approx(deltas.mean()), pytest.approx(deltas.std(ddof=1)))
    assert got.t_ci == pytest.approx(tuple(scipy.stats.ttest_1samp(deltas, 0).confidence_interval(0.95)), rel=1e-12)
    if n <= 6:
        exact = np.percentile([np.mean(r) for r in itertools.product(deltas, repeat=n)], [2.5, 97.5])
    elif n <= 8:  # by multinomial counts: how often each difference is drawn, and in how many orders
        counts = np.array([np.bincount(r, minlength=n) for r in itertools.combinations_with_replacement(range(n), n)])
        orders = [math.factorial(n) // math.prod(math.factorial(int(k)) for k in c) for c in counts]
        assert sum(orders) == n ** n
        exact = np.percentile(np.repeat(counts @ deltas / n, orders), [2.5, 97.5])
    else:
        exact = scipy.stats.bootstrap((deltas,), np.mean, n_resamples=200_000, method="percentile",
                                      rng=1).confidence_interval
    noise = 0.05 * deltas.std() / n ** 0.5  # four standard errors of a 2.5th percentile of 100,000 resamples, about
    assert got.bootstrap_ci == pytest.approx(tuple(exact), abs=1e-12 if n <= 7 else noise)
    assert got == stats.paired(deltas.tolist())
    p = stats.sign_flip(deltas)
    assert 2.0 ** (1 - n) <= p <= 1
    if n <= 8:
        assert p == scipy.stats.permutation_test((deltas, 0 * deltas), lambda x, y: np.mean(x - y), vectorized=False,
                                                 permutation_type="samples", n_resamples=np.inf).pvalue


def test_stats_paired_of_one_none_nan_and_equal_differences():
    assert stats.paired([-0.03]) == (1, -0.03, None, None, None)
    for n in (2, 5, 8, 20):  # 0.1 * 3 / 3 is not 0.1: equal differences must have no spread all the same
        assert stats.paired([0.1] * n) == (n, 0.1, 0.0, (0.1, 0.1), (0.1, 0.1))
    for bad in ([], [math.nan, 0.1], [math.inf, 0.1], [[0.1, 0.2]]):
        with pytest.raises(ValueError, match="pair|difference"):
            stats.paired(bad)
    assert stats.sign_flip([0.0] * 21) is None


def test_stats_pairs_needed_against_power_by_integration():
    def power(n, effect):  # not by the noncentral t: over the chi density of the sample sd, given which it is normal
        limit, df = scipy.stats.t.ppf(0.975, n - 1), n - 1
        s = np.linspace(1e-9, 12, 400_001) / df ** 0.5 if df < 40 else np.linspace(0.2, 2, 400_001)
        weight = scipy.stats.chi.pdf(s * df ** 0.5, df) * df ** 0.5
        shift, normal = effect * n ** 0.5, scipy.stats.norm
        return np.trapezoid(weight * (normal.sf(limit * s - shift) + normal.cdf(-limit * s - shift)), s)
    for sd in (0.0005, 0.003034, 0.011986, 0.05, 0.3):
        n = stats.pairs_needed(sd)
        assert power(n, 0.01 / sd) >= 0.8 and (n == 2 or power(n - 1, 0.01 / sd) < 0.8), sd
    assert stats.pairs_needed(0.0) == 2 and stats.pairs_needed(0.01) == 10  # 10: Cohen's table for d = 1, one sample
    # where the noncentral t of scipy gives up
    assert [stats.pairs_needed(sd) for sd in (0.00175, 0.001667, 0.00182)] == [3, 3, 3]
    many = [stats.pairs_needed(sd) for sd in np.linspace(0.0005, 0.02, 12)]
    assert many == sorted(many) and many[0] == 2 and many[-1] > 30


def test_stats_paper_runs_give_the_papers_tables(tmp_path, capsys):
    stats_paper_runs(tmp_path)
    code, out = stats_json(capsys, tmp_path)
    assert code == 0 and out["problems"] == [] and [c["scale"] for c in out["comparisons"]] == ["S", "M"]  # by size
    for c in out["comparisons"]:
        want = STATS_EXPECTED[c["scale"]]
        assert (c["control"], c["treatment"], c["tokens"], c["n"], c["wins"]) == ("block", "rd", 2_000_027_648, 5, 5)
        assert c["seeds"] == [123, 2025, 2026, 3407, 7777]
        assert c["deltas"] == pytest.approx([r - b for b, r in PAPER_TABLE3[c["scale"]].values()], abs=1e-12)
        assert round(c["mean"], 6) == want["mean"]
        assert [round(x, 6) for x in c["bootstrap_ci"]] == [*want["bootstrap_ci"]]
        assert round(100 * c["ppl_reduction"], 2) == want["ppl"] and c["sign_flip_p"] == c["smallest_p"] == 0.0625
        assert not c["mid_schedule"] and not c["interim"] and c["paper"]["mean"] == want["paper"][0]
        assert c["simultaneous_t_ci"][0] < c["t_ci"][0] and c["confounds"] == {}
    code, text, _ = stats_cli(capsys, tmp_path)
    whole = stats.report(stats.analyse([tmp_path]), figures={})
    for cell in ("3.1724 ± 0.0102", "3.1423 ± 0.0076", "-0.0301 ± 0.0030", "2.97%", "2.43%", "5/5", "-0.030116",
                 "0.003034", "[-0.033883, -0.026349]", "[-0.032826, -0.028066]", "0.0625", "rd - block, the paper",
                 "23.736"):
        assert cell in whole, cell
    assert "about 84% of studies" in text and "Trust the t intervals" in text and "the next seed" in text
    assert len(text.splitlines()) < 60 and "23.736" not in text  # a screen and a half; the pairs go to --out
    assert stats_cli(capsys, tmp_path)[1] == text  # two calls, the same bytes


# One difference at a time: what it is called, and whether it refuses the pair or only marks it
STATS_REFUSED = {
    "data_fingerprint": "e" * 64, "tokenizer_sha256": "u" * 64, "vocab_size": 4096, "n_layer": 8, "n_embd": 640,
    "n_head": 9, "block_layers": 2, "context": 512, "mlp_ratio": 4, "batch_size": 16, "tokens_per_step": 16384,
    "max_steps": 30518, "warmup_steps": 10, "warmup_ratio": 0.01, "lr": 6e-4, "min_lr_ratio": 0.0,
    "beta1": 0.8, "beta2": 0.99, "adam_eps": 1e-6, "weight_decay": 0.0, "grad_clip": 0.5, "route_lr_mult": 2.0,
    "init_sha256": "other", "init_from": "runs/x/ckpt.pt",
    "freeze": "route", "eval_tokens": 1024, "eps": 1e-5, "rope_base": 500, "init_std": 0.1, "a_field_of_tomorrow": 5}
STATS_MARKED = {
    "backend": "fused", "dtype": "float32", "residual_dtype": "float32", "compile": True, "micro_batch": 4, "ranks": 2,
    "device": "cpu", "device_name": "NVIDIA H200", "torch": "2.12.0", "triton": "3.8.0", "deterministic": True}


@pytest.mark.parametrize("key", [*STATS_REFUSED, *STATS_MARKED])
def test_stats_pair_check_names_one_difference_with_both_values(key):
    a = stats_config("block")
    a.setdefault(key, 4)  # a field of the model, or a setting that stats.py has never heard of
    b = stats_config("rd", **{key: {**STATS_REFUSED, **STATS_MARKED}[key]})
    for x, y in ((a, b), (b, a)):
        refused, marked = stats.pair_check(x, y)
        assert (marked, refused)[key not in STATS_MARKED] and not (refused, marked)[key not in STATS_MARKED]
        (line,) = refused + marked
        assert key in line and line.endswith(f"{stats.as_text(x[key])} against {stats.as_text(y[key])}")
        refused, (allowed,) = stats.pair_check(x, y, allow=[key])
        assert refused == [] and allowed == line + " (allowed)"
    assert stats.pair_check(b, b) == ([], [])


def test_stats_pair_check_passes_over_what_is_no_setting():
    a = stats_config("block")
    b = stats_config("rd", name="x", tag="t", stop_steps=15259, stop_tokens=500_000_000, n_params=1, n_params_route=2,
                     host="i", max_tokens=None, started="later", command="c", git_dirty=True, python="3.13",
                     milestones=[1])
    assert stats.pair_check(a, b) == ([], [])
    assert stats.pair_check(a, {**b, "kernel_sha256": "k"}) == ([], [])  # the kernel ran in neither
    fused = [stats_config(arch, backend="fused", kernel_sha256=k) for arch, k in (("block", "k"), ("rd", "l"))]
    assert stats.pair_check(*fused)[1] == ["kernel_sha256: k against l"]
    del b["lr"], b["compile"]  # an older run
    del b["freeze"]  # null in the other: not known is not the same
    refused, marked = stats.pair_check(a, b)
    assert refused == []
    assert marked == [f"{k} is not recorded by x" for k in ("compile", "frozen parameters (freeze)", "lr")]


def test_stats_pair_check_compares_code_by_what_it_does():
    probe = {"block": [8.0, 0.5, 0.0], "rd": [8.0, 0.25, 1e-9]}
    a, b = stats_config("block", probe=probe), stats_config("rd", probe=probe, git_commit="another", git_dirty=True)
    check = lambda pa, pb, **more: stats.pair_check({**a, "probe": pa, **more}, {**b, "probe": pb, **more})[1]
    assert check(probe, probe) == []
    assert check(probe, {**probe, "rd": [8.0 * (1 + 0.9e-5), 0.25, 1e-9]}) == []
    for arm in ("block", "rd"):  # either arm's entry counts, and each number is held to 1e-5 of itself
        for i in range(2):
            other = list(probe[arm])
            other[i] *= 1 + 1.2e-5
            (line,) = check(probe, {**probe, arm: other})
            assert line.startswith(f"code: probe of {arm}: ") and " against " in line
    assert check(probe, {**probe, "tied": [1.0]}) == []  # an arm that neither run has
    assert check({"block": probe["block"]}, probe) == []  # the control is of yesterday, the new arm of today
    for broken in ([8.0, None, 0.0], [8.0, 0.5], [], None, [8.0, math.nan, 0.0]):
        assert check({**probe, "block": broken}, probe)[0].startswith("code: probe of block")
    assert check(None, probe) == ["code: no probe of block or rd in both runs, nor one clean commit"]
    assert check(None, None, git_commit="c0ffee", git_dirty=False) == []
    assert check(None, None, git_commit="c0ffee", git_dirty=True) != []
    assert stats.pair_check({**a, "probe": probe}, {**b, "arch": "rd:eps=1", "probe": {**probe, "rd": [1.0]}})[1] != []
    assert stats.pair_check(a, {**b, "probe": {**probe, "rd": [1.0]}}, allow=["probe"])[1][0].endswith(" (allowed)")


@pytest.mark.parametrize("key, value, words", [
    ("lr", 6e-4, "lr: 0.0003 against 0.0006"), ("data_fingerprint", "e" * 64, "data (data_fingerprint): ddd"),
    ("max_steps", 30518, "schedule length (max_steps): 61036 against 30518"),
    ("init_sha256", "x", "starting weights (init_sha256): S123 against x")])
def test_stats_a_refused_pair_is_listed_with_both_values_and_allow_pairs_it(tmp_path, capsys, key, value, words):
    stats_run(tmp_path, stats_config("block"), {30518: 3.3, 61036: 3.1})
    stats_run(tmp_path, stats_config("rd", **{key: value}), {30518: 3.2})
    code, out = stats_json(capsys, tmp_path, "--strict")
    assert code == 1 and out["comparisons"] == []
    why = {p["run"]: p["why"] for p in out["problems"]}["S-rd-s123"]
    assert "refused with S-block-s123" in why and words in why
    assert stats_json(capsys, tmp_path)[0] == 0  # without --strict a refusal is named, and not a failure
    code, out = stats_json(capsys, tmp_path, f"--allow={key}", "--strict")
    assert code == 0 and [c["n"] for c in out["comparisons"]] == [1]
    assert "(allowed)" in out["comparisons"][0]["pairs"][0]["marks"]


@pytest.mark.parametrize("key", ["backend", "torch"])
def test_stats_a_marked_pair_stands_but_for_strict(tmp_path, capsys, key):
    stats_run(tmp_path, stats_config("block"), {61036: 3.1})
    stats_run(tmp_path, stats_config("rd", **{key: STATS_MARKED[key]}), {61036: 3.0})
    code, out = stats_json(capsys, tmp_path)
    assert code == 0 and out["problems"] == []
    assert out["comparisons"][0]["pairs"][0]["marks"].startswith(key) and key in out["comparisons"][0]["evidence"]
    code, out = stats_json(capsys, tmp_path, "--strict")
    assert code == 1 and out["comparisons"] == [] and key in out["problems"][0]["why"]
    assert stats_json(capsys, tmp_path, "--strict", f"--allow={key}")[0] == 0


def test_stats_bad_runs_are_named_and_never_counted(tmp_path, capsys):
    seeds = range(1, 13)
    for s in seeds:
        stats_run(tmp_path, stats_config("block", seed=s), {30518: 3.3 + s / 100, 61036: 3.1 + s / 100})
        if s != 9:
            stats_run(tmp_path, stats_config("rd", seed=s), {30518: 3.25 + s / 99, 61036: 3.05 + s / 99}, train=400)
    log = {s: tmp_path / f"S-rd-s{s}" / "metrics.jsonl" for s in seeds}
    text = {s: log[s].read_text() for s in seeds if log[s].exists()}
    log[2].write_text(text[2].replace('"complete"', '"diverged","why":"loss is nan"'))
    log[3].write_text(text[3].replace(f'"nll":{3.05 + 3 / 99}', '"nll":NaN'))
    log[4].write_text(text[4].replace(f'"nll":{3.05 + 4 / 99}', '"nll":null'))
    line = text[5].splitlines()[40]  # a line torn in the middle of the file
    log[5].write_text(text[5].replace(line, line[:50]))
    log[6].write_text(text[6][:text[6].index('{"kind":"eval","step":61036')] + '{"kind":"tra')  # still being written
    (tmp_path / "S-rd-s7" / "config.json").write_text("{not json")
    log[8].unlink()
    shutil.copytree(tmp_path / "S-rd-s1", tmp_path / "S-rd-s1-again")
    shutil.copy(tmp_path / "S-block-s10" / "metrics.jsonl", tmp_path / "S-block-s11")  # a seed that had no effect
    log[12].write_text(text[12][:text[12].index('{"kind":"eval"')])
    code, out = stats_json(capsys, tmp_path)
    (c,) = out["comparisons"]
    why = {p["run"]: p["why"] for p in out["problems"]}
    assert code == 0 and c["seeds"] == [1, 10]
    for run, words in {
            "S-rd-s2": "diverged at step 61036 (loss is nan)", "S-rd-s3": "nll is nan, not a finite number",
            "S-rd-s4": "of metrics.jsonl lacks nll", "S-rd-s5": "corrupt: line 41 of metrics.jsonl",
            "S-rd-s6": "unfinished: at step 61036 of 61036", "S-rd-s7": "config.json is not valid JSON",
            "S-rd-s8": "no evaluation yet, at step 0", "S-block-s9": "no partner",
            "S-rd-s1-again": "duplicate of S-rd-s1", "S-block-s11": "to the last digit, though the seeds are 10 and 11",
            "S-rd-s11": "no partner: no usable run of block at scale S, seed 11",
            "S-rd-s12": "no evaluation yet"}.items():
        assert words in why.pop(run), run
    assert set(why) == {f"S-block-s{s}" for s in (2, 3, 4, 5, 7, 8, 12)}
    assert all("no partner" in w for w in why.values())
    assert c["interim"] and c["waiting"] == ["S-rd-s12", "S-rd-s6", "S-rd-s8"]


def test_stats_stopped_runs_pair_with_milestones_and_are_labelled(tmp_path, capsys):
    stats_run(tmp_path, stats_config("block"), {7630: 3.9, 15259: 3.5416, 61036: 3.167}, windows=np.linspace(3, 4, 64))
    stats_run(tmp_path, stats_config("rd"), {7630: 3.8, 15259: 3.4994, 61036: 3.138}, windows=np.linspace(2.9, 4, 64))
    for arm, nll in (("average", 3.5410), ("tied", 3.5413)):
        stats_run(tmp_path, stats_config(arm, stop_steps=15259, stop_tokens=500_000_000), {7630: 3.9, 15259: nll},
                  name=f"S-{arm}-s123-stop5e8")
    code, out = stats_json(capsys, tmp_path)
    rd, average, tied = out["comparisons"]
    assert code == 0 and out["problems"] == [] and not rd["mid_schedule"] and rd["step"] == 61036
    assert (average["tokens"], average["mid_schedule"], average["interim"]) == (500_006_912, True, False)
    assert [m["step"] for m in out["milestones"] if m["treatment"] == "rd"] == [7630, 15259, 61036]
    assert "degenerate" in average["notes"][0] and len(out["floor"]) == 2
    (pair,) = rd["pairs"]  # the standard errors of the slice, from the windows
    a, b = np.linspace(3, 4, 64), np.linspace(2.9, 4, 64)
    assert pair["control_se"] == pytest.approx(a.std(ddof=1) / 8)
    assert pair["delta_se"] == pytest.approx((b - a).std(ddof=1) / 8)
    # windows of another NLL than the run's are not its own
    np.save(tmp_path / "S-rd-s123" / "eval" / "val-061036.npy", b)
    assert stats_json(capsys, tmp_path)[1]["comparisons"][0]["pairs"][0]["treatment_se"] is None
    assert rd["sd"] is None and rd["t_ci"] is None and "One pair has no interval" in rd["evidence"]
    assert "500 M of 2 B, mid-schedule" in stats_cli(capsys, tmp_path)[1]
    table = stats.markdown(stats.controls_table(stats.analyse([tmp_path])))
    assert "500 M of 2 B, mid-schedule" in table and "3.5416" in table and "3.5410" in table and "3.4994" in table


def test_stats_an_unfinished_study_shows_the_latest_shared_milestone_as_interim(tmp_path, capsys):
    for seed in (1, 2):
        stats_run(tmp_path, stats_config("block", seed=seed), {7630: 3.9 + seed, 15259: 3.5 + seed, 61036: 3.1 + seed})
        stats_run(tmp_path, stats_config("rd", seed=seed), {7630: 3.8 + seed, 15259: 3.4 + seed / 2}, end=False)
    names = [f"S-{a}-s{s}" for a in ("block", "rd") for s in (1, 2, 3)]
    (tmp_path / "plan.json").write_text(json.dumps({"plans": [{"runs": names[:-2] + names[-1:],
                                                               "arms": ["block", "rd"]}]}))
    code, out = stats_json(capsys, tmp_path)
    (c,), why = out["comparisons"], {(p["run"], p["why"]) for p in out["problems"]}
    assert (c["step"], c["n"], c["interim"], c["mid_schedule"]) == (15259, 2, True, True)
    assert set(c["waiting"]) == {"S-rd-s1", "S-rd-s2", "S-block-s3", "S-rd-s3"}
    assert {("S-block-s3", "planned, and missing"), ("S-rd-s3", "planned, and missing"),
            ("S-rd-s2", "not planned: plan.json lacks it"), ("S-rd-s2", "unfinished: at step 15259 of 61036")} <= why
    text = stats_cli(capsys, tmp_path)[1]
    assert "500 M of 2 B, mid-schedule" in text and "Interim, not a result: waiting for 4 runs" in text


def test_stats_allow_takes_each_arms_best_value_on_validation_and_shows_it_on_test(tmp_path, capsys):
    best = {("block", 3e-4): 3.30, ("block", 6e-4): 3.20, ("rd", 3e-4): 3.10, ("rd", 6e-4): 3.15}
    for (arm, lr), nll in best.items():
        for seed in (1, 2):
            folder = stats_run(tmp_path, stats_config(arm, seed=seed, lr=lr), {61036: nll + seed / 10},
                               name=f"S-{arm}-s{seed}-lr{lr:g}")
            (folder / "eval" / "test-061036.json").write_text(json.dumps(
                {"run": folder.name, "split": "test", "step": 61036, "nll": 3.5 + seed - lr * (arm == "rd"),
                 "eval_tokens": 9}))
    code, out = stats_json(capsys, tmp_path)
    assert sorted(c["arm"] for c in out["comparisons"]) == ["rd lr0.0003", "rd lr0.0006"]  # each with its own lr
    code, out = stats_json(capsys, tmp_path, "--allow=lr", "--split=test")
    (c,) = out["comparisons"]
    assert {p["control"][-6:] for p in c["pairs"]} == {"0.0006"}
    assert {p["treatment"][-6:] for p in c["pairs"]} == {"0.0003"}
    assert c["deltas"] == pytest.approx([-3e-4, -3e-4])
    assert "rd: lr = 0.0003, chosen on val as the best of 0.0003" in " ".join(c["notes"])
    assert sum("better on validation" in p["why"] for p in out["problems"]) == 4
    (tmp_path / "S-rd-s1-lr0.0003" / "eval" / "test-061036.json").unlink()
    why = {p["run"]: p["why"] for p in stats_json(capsys, tmp_path, "--split=test")[1]["problems"]}
    assert "no test evaluation: python eval.py" in why["S-rd-s1-lr0.0003"]


def test_stats_a_crossed_backend_study_gives_a_comparison_each_and_reruns_give_a_noise_floor(tmp_path, capsys):
    for backend, shift in (("reference", 0.0), ("fused", 1e-4)):
        for arm in ("block", "rd"):
            for seed in (1, 2):
                stats_run(tmp_path, stats_config(arm, seed=seed, backend=backend),
                          {61036: 3.1 + seed - 0.03 * (arm == "rd") + shift * seed * (1 + (arm == "rd"))},
                          name=f"S-{arm}-s{seed}-kept" + "-backendfused" * (backend == "fused"))
    code, out = stats_json(capsys, tmp_path, "--strict")
    assert code == 0 and [c["arm"] for c in out["comparisons"]] == ["rd reference", "rd fused"]
    assert all(c["n"] == 2 for c in out["comparisons"])
    assert all(p["marks"] == "" for c in out["comparisons"] for p in c["pairs"])
    (row,) = out["crossed"]  # rd moves by 2e-4 and 4e-4 where block moves by half of that
    assert (row["first"], row["second"], row["seeds"]) == ("reference", "fused", [1, 2])
    assert row["mean"] == pytest.approx(1.5e-4) and row["sd"] == pytest.approx(1e-4 / 2 ** 0.5)
    assert row["control_shift"][0] == pytest.approx(1.5e-4) and row["treatment_shift"][0] == pytest.approx(3e-4)
    assert row["first_change"][0] == pytest.approx(-0.03) and row["second_change"][0] == pytest.approx(-0.02985)
    whole = stats.report(stats.analyse([tmp_path]), figures={})
    assert "| S     | rd - block | 2 B    |   2 | reference | fused  |" in whole
    assert len(out["floor"]) == 4 and {round(abs(f["mean"]), 6) for f in out["floor"]} == {1e-4, 2e-4, 4e-4}
    assert out["floor"][0]["pairs"][0]["marks"] == "backend: reference against fused"


def test_stats_refuses_bad_input_in_one_line(tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    stats_run(tmp_path / "runs", stats_config("block"), {61036: 3.1})
    for argv, words in (((tmp_path / "empty",), "holds no runs"), ((tmp_path / "none",), "no such folder"),
                        ((), "which runs?"),
                        ((tmp_path / "runs", "--control=blok"), "did you mean block?"),
                        ((tmp_path / "runs", "--allow=lrr"), "which two runs can differ; did you mean lr?"),
                        ((tmp_path / "runs", "--allow=seed"), "not a setting in which"),
                        ((tmp_path / "runs", "--split=train"), "wants one of")):
        code, text, error = stats_cli(capsys, *argv)
        assert (code, text) == (2, "") and words in error, error
        assert error.startswith("error: ") and error.count("\n") == 1
    code, out = stats_json(capsys, tmp_path / "runs")
    assert code == 0 and out["comparisons"] == [] and "no partner" in out["problems"][0]["why"]


def test_stats_equal_differences_and_other_controls(tmp_path, capsys):
    for seed in (1, 2, 3):
        # exact in binary, so that the differences are equal
        for arm, nll in (("plain", 3.0), ("block", 3.25), ("rd", 3.5)):
            stats_run(tmp_path, stats_config(arm, seed=seed), {61036: nll + seed})
    code, out = stats_json(capsys, tmp_path, "--control=plain")
    assert [(c["control"], c["treatment"], c["sd"], c["wins"]) for c in out["comparisons"]] == [
        ("plain", "rd", 0.0, 0), ("plain", "block", 0.0, 0)]
    (rd, block) = out["comparisons"]
    assert rd["verdict"] == "no test" and "the same in all 3 pairs" in rd["evidence"] and "better" not in rd["evidence"]
    for seed in (1, 2, 3):
        stats_run(tmp_path, stats_config("tied", seed=seed), {61036: 3.0 + seed})
    (tied,) = [c for c in stats_json(capsys, tmp_path, "--control=plain")[1]["comparisons"] if c["treatment"] == "tied"]
    assert tied["verdict"] == "same function" and "the same function bit for bit" in tied["evidence"]
    assert tied["sign_flip_p"] is tied["t_test_p"] is tied["holm_p"] is None


def test_stats_old_runs_with_few_settings_still_pair(tmp_path, capsys):
    few = ("arch", "scale", "seed", "max_steps", "tokens_per_step")
    for arm, nll in (("block", 3.1), ("rd", 3.0)):
        folder = stats_run(tmp_path, stats_config(arm), {61036: nll})
        (folder / "config.json").write_text(json.dumps({k: v for k, v in stats_config(arm).items() if k in few}))
        (folder / "metrics.jsonl").write_text(f'{{"kind": "eval", "step": 61036, "nll": {nll}}}\n'
                                              '{"kind": "end", "status": "complete", "step": 61036}\n')
    code, out = stats_json(capsys, tmp_path, f"--out={tmp_path / 'report'}")
    assert code == 0 and out["comparisons"][0]["mean"] == pytest.approx(-0.1)
    assert "no probe" in out["comparisons"][0]["pairs"][0]["marks"]


def test_stats_slices_of_other_tokens_are_refused(tmp_path, capsys):
    for arm, nll in (("block", 3.1), ("rd", 3.0)):
        folder = stats_run(tmp_path, stats_config(arm), {30518: nll + 0.2, 61036: nll})
    log = folder / "metrics.jsonl"
    log.write_text(log.read_text().replace('"eval_tokens":10485760', '"eval_tokens":512'))
    code, out = stats_json(capsys, tmp_path)
    assert out["comparisons"] == [] and "evaluation_eval_tokens: 10485760 against 512" in out["problems"][0]["why"]


def test_stats_launch_report_says_what_a_run_will_pair_with(tmp_path):
    me = stats_config("rd", name="S-rd-s123")
    assert stats.launch_report(me, tmp_path / "none") == [
        "in no table until block has a run with these settings, scale S, seed 123"]
    stats_run(tmp_path, stats_config("block", lr=6e-4), {61036: 3.1}, name="S-block-s123-lr6e-4")
    assert stats.launch_report(me, tmp_path) == [
        "not with S-block-s123-lr6e-4: lr: 0.0006 against 0.0003",
        "in no table until block has a run with these settings, scale S, seed 123"]
    stats_run(tmp_path, stats_config("block", backend="fused"), {61036: 3.1})
    stats_run(tmp_path, stats_config("block", seed=5), {61036: 3.2})
    stats_run(tmp_path, stats_config("rd"), {61036: 3.1})
    stats_run(tmp_path, stats_config("rd"), {61036: 3.1}, name="S-rd-s123-b")
    assert stats.launch_report(me, tmp_path) == [
        "with S-block-s123, marked (--strict refuses it): backend: fused against reference",
        "not with S-block-s123-lr6e-4: lr: 0.0006 against 0.0003",
        "a rerun of S-rd-s123-b: the table takes one, both show the noise",
        "the table gains a pair once both runs have reached a milestone"]


def test_stats_out_writes_the_same_tables_and_figures_twice(tmp_path, capsys):
    for seed in (123, 2025):
        for arm, shift in (("block", 0.0), ("rd", -0.03), ("frozen_v", -0.01)):
            stats_run(tmp_path / "runs", stats_config(arm, seed=seed),
                      {7630: 3.8 + shift, 61036: 3.1 + shift - seed / 1e5}, train=20)
    for out in ("a", "b"):
        assert stats_cli(capsys, tmp_path / "runs", f"--out={tmp_path / out}")[0] == 0
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    figures = ["figure2_effects", "figure3_milestones", "figure4_js", "training_curves"]
    assert {f"{f}.{kind}" for f in figures for kind in ("png", "pdf")} <= set(names)
    assert {"report.md", "stats.json", "table1_summary.tex", "table3_pairs.tex", "table1_summary.csv",
            "estimates.csv", "milestones.csv",
            "js_by_layer.csv", "table4_configurations.csv", "efficiency.csv"} <= set(names)
    table = (tmp_path / "a" / "table3_pairs.csv").read_text().splitlines()
    assert table[1].split(",")[:5] == ["S", "rd - block", "2 B", "123", "3.09877"]
    tex = (tmp_path / "a" / "table1_summary.tex").read_text()
    assert tex.count(r"\\") == 4 and r"\toprule" in tex and r"$-0.0300 \pm 0.0000$" in tex
    assert r"frozen\_v - block" in tex
    if shutil.which("pdflatex"):
        (tmp_path / "a" / "all.tex").write_text(r"\documentclass{article}\usepackage{booktabs}\begin{document}\tiny"
                                                r"\input{table1_summary}\input{table3_pairs}\end{document}")
        subprocess.run(["pdflatex", "-halt-on-error", "-interaction=nonstopmode", "all"], cwd=tmp_path / "a",
                       check=True, stdout=subprocess.DEVNULL)
    assert "n = 2 (seeds 123, 2025)" in (tmp_path / "a" / "report.md").read_text()


@pytest.mark.parametrize("n, effect", [(2, 1.0), (5, 1.5), (10, 1.0), (40, 0.3)])
def test_stats_power_is_that_of_the_noncentral_t_and_of_a_simulation(n, effect):
    limit, shift = scipy.stats.t.ppf(0.975, n - 1), effect * n ** 0.5
    want = scipy.stats.nct.sf(limit, n - 1, shift) + scipy.stats.nct.cdf(-limit, n - 1, shift)
    assert stats.power(n, effect) == pytest.approx(want, abs=2e-5)
    draws = np.random.default_rng(n).normal(effect, 1, (40_000, n))
    t = draws.mean(1) / draws.std(1, ddof=1) * n ** 0.5
    assert stats.power(n, effect) == pytest.approx(np.mean(np.abs(t) > limit), abs=0.011)  # 4 standard errors


def test_stats_holm_is_its_definition_and_controls_the_family():
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])  # Holm's own arithmetic
    assert stats.holm([0.2]) == [0.2] and stats.holm([]) == [] and stats.holm([0.9, 0.8]) == [1.0, 1.0]
    p = np.random.default_rng(0).uniform(size=(20_000, 6))  # six true nulls: one or more found in at most 5%
    found = np.mean([min(stats.holm(row)) < 0.05 for row in p])
    assert found == pytest.approx(1 - (1 - 0.05 / 6) ** 6, abs=0.0062)  # 4 standard errors


@pytest.mark.parametrize("mean, sd, n, margin", [
    (-0.001, 0.002, 5, 0.005), (0.004, 0.002, 5, 0.005), (0.0, 0.01, 3, 0.005)])
def test_stats_equivalence_is_two_one_sided_tests_and_the_90_percent_interval(mean, sd, n, margin):
    d = np.random.default_rng(0).normal(size=n)
    d = mean + sd * (d - d.mean()) / d.std(ddof=1)
    both = max(scipy.stats.ttest_1samp(d, -margin, alternative="greater").pvalue,
               scipy.stats.ttest_1samp(d, margin, alternative="less").pvalue)
    assert stats.equivalence_test(mean, sd, n, margin) == pytest.approx(both, rel=1e-9)
    low, high = scipy.stats.ttest_1samp(d, 0).confidence_interval(0.90)
    assert (both < 0.05) == (-margin < low and high < margin)
    assert stats.t_interval(mean, sd, n, 0.9) == pytest.approx((low, high), rel=1e-9)


@pytest.mark.parametrize("sign", [1, -1])
def test_stats_equivalence_needs_both_sides_of_the_interval(tmp_path, capsys, sign):
    for seed in range(1, 6):
        stats_run(tmp_path, stats_config("block", seed=seed), {61036: 3.1 + seed / 8})
        stats_run(tmp_path, stats_config("rd", seed=seed), {61036: 3.1 + seed / 8 + sign * (0.004 + 0.0003 * seed)})
    for margin, equivalent in ((0.005, False), (0.01, True)):
        (c,) = stats_json(capsys, tmp_path, f"--margin={margin}")[1]["comparisons"]
        assert c["equivalence"]["equivalent"] == equivalent and c["mean"] == pytest.approx(sign * 0.0049)


def test_stats_next_interval_holds_the_next_seed_in_95_percent():
    draws = np.random.default_rng(3).normal(-0.03, 0.003, (20_000, 6))
    held = [low <= d[5] <= high for d in draws
            for low, high in [stats.next_interval(d[:5].mean(), d[:5].std(ddof=1), 5)]]
    assert np.mean(held) == pytest.approx(0.95, abs=0.0062)
    for scale, want in (("S", [-0.039, -0.021]), ("M", [-0.061, 0.012])):
        est = stats.paired([rd - block for block, rd in PAPER_TABLE3[scale].values()])
        assert [round(x, 3) for x in stats.next_interval(est.mean, est.sd, 5)] == want


def test_stats_says_which_of_the_papers_pairs_cross_backends_and_what_remains(tmp_path, capsys):
    crossed = {"S": {7777: ("fused", "reference")},
               "M": dict.fromkeys([2025, 2026, 3407, 7777], ("reference", "fused"))}
    for scale, seeds in PAPER_TABLE3.items():
        for seed, nlls in seeds.items():
            for arm, nll, backend in zip(("block", "rd"), nlls, crossed[scale].get(seed, ("reference",) * 2)):
                stats_run(tmp_path, stats_config(arm, scale, seed, backend=backend), {61036: nll})
    s, m = stats_json(capsys, tmp_path)[1]["comparisons"]
    assert (m["confounds"], m["matched"]["n"], round(m["matched"]["mean"], 5)) == ({"backend": 4}, 1, -0.01813)
    assert (s["confounds"], s["matched"]["n"], round(s["matched"]["mean"], 5)) == ({"backend": 1}, 4, -0.02886)
    assert "4 of 5 pairs compare two backends; the one that does not (n = 1): -0.01813" in m["evidence"]
    assert "1 of 5 pairs compares two backends; the 4 that do not (n = 4): -0.02886, 95% t interval" in s["evidence"]
    assert "next seed's difference lies in [-0.061, 0.012]" in m["evidence"]
    assert round(100 * s["ppl_reduction"], 4) == 2.9663 and round(100 * m["ppl_reduction"], 4) == 2.4334


@pytest.mark.parametrize("plan_at, primary, says", [
    ("2025-12-31T00:00:00", None, "plan.json named rd before the first step"),
    ("2026-01-02T00:00:00", None, "named after the runs"), (None, "rd", "named after the runs"), (None, None, None)])
def test_stats_judges_all_comparisons_together_but_for_a_planned_primary_one(tmp_path, capsys, plan_at, primary, says):
    rng, names = np.random.default_rng(1), []
    arms = ["block", "rd", *(f"mhar:heads={k}" for k in (2, 3, 4, 6, 8, 9, 12, 18, 36))]
    for arm in arms:
        for seed in range(1, 6):
            noise = rng.normal(0, 0.003) if arm != "rd" else 0.003 * (seed - 3)
            nll = 3.1 + seed / 10
            if arm != "block":
                nll += noise - (0.0085 if arm == "rd" else 0)
            folder = stats_run(tmp_path, stats_config(arm, seed=seed), {61036: nll})
            names.append(folder.name)
    if plan_at:
        (tmp_path / "plan.json").write_text(json.dumps({"plans": [dict(
            runs=names, arms=arms, max_steps=61036, stop_steps=None, started=plan_at, primary="rd", margin=0.005)]}))
    out = stats_json(capsys, tmp_path, *([f"--primary={primary}"] if primary else []))[1]
    rd, *others = out["comparisons"]
    assert len(others) == 9 and rd["t_ci"][1] < 0 and (says or "By seed") in rd["evidence"]
    exempt = plan_at is not None and plan_at < "2026"
    assert rd["family"] == (1 if exempt else 10) and {c["family"] for c in others} == {9 if exempt else 10}
    assert rd["verdict"] == ("better" if exempt else "undecided")  # 0 lies in the interval that holds for all ten
    low, high = rd["simultaneous_t_ci"]
    half = scipy.stats.t.ppf(1 - 0.025 / rd["family"], 4) * rd["sd"] / 5 ** 0.5
    assert (low, high) == pytest.approx((rd["mean"] - half, rd["mean"] + half))
    holm = stats.holm([c["t_test_p"] for c in (others if exempt else out["comparisons"])])
    assert [c["holm_p"] for c in (others if exempt else out["comparisons"])] == pytest.approx(holm)
    assert all((c["equivalence"] is not None) == (plan_at is not None and exempt) for c in out["comparisons"])


def test_stats_trend_equal_time_and_a_margin_given_by_hand(tmp_path, capsys):
    early, late = [-0.05, -0.06, -0.055], [-0.02, -0.028, -0.024]
    for seed in range(3):
        stats_run(tmp_path / "runs", stats_config("block", seed=seed), {30518: 3.3 + seed, 61036: 3.1 + seed})
        stats_run(tmp_path / "runs", stats_config("rd", seed=seed),
                  {30518: 3.3 + seed + early[seed], 61036: 3.1 + seed + late[seed]})
    saved = tmp_path / "speed.json"
    saved.write_text(json.dumps({"reference": "block", "device": "cpu", "rounds": 5, "scale": "S", "torch": "2",
                                 "arms": {
        "block": {"tokens_per_s": 100, "ratio": 1, "ratio_min": 1, "ratio_max": 1},
        "rd": {"tokens_per_s": 90, "ratio": 0.9, "ratio_min": 0.88, "ratio_max": 0.92}}}))
    cost = 0.2 * math.log(1 / 0.9) / math.log(2)  # log-linear between 3.3 at half the tokens and 3.1
    for speed in (saved, "rd=0.9:0.88:0.92"):
        (c,) = stats_json(capsys, tmp_path / "runs", f"--speed={speed}", "--margin=0.03")[1]["comparisons"]
        assert c["equal_time"]["cost"] == pytest.approx(cost) and "a bound" in c["evidence"]
        assert c["equal_time"]["mean"] == pytest.approx(c["mean"] + cost)
    change = np.subtract(late, early)
    assert c["trend"]["mean"] == pytest.approx(change.mean()) and c["trend"]["verdict"] == "it narrows"
    assert c["trend"]["t_ci"] == pytest.approx(tuple(scipy.stats.ttest_1samp(change, 0).confidence_interval(0.95)))
    low, high = scipy.stats.ttest_1samp(late, 0).confidence_interval(0.90)
    assert c["equivalence"]["equivalent"] == (low > -0.03) and "a margin chosen after the runs" in c["evidence"]
    for bad in ("rd=x", "rd=0.9:0.95:0.99", "none.json"):
        assert stats_cli(capsys, tmp_path / "runs", f"--speed={bad}")[0] == 2


def stats_config_with(**changes):
    def change(run):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps({**config, **changes}))
    return change


def stats_log_with(old, new):
    def change(run):
        log = run / "metrics.jsonl"
        assert old in log.read_text()
        log.write_text(log.read_text().replace(old, new))
    return change


def stats_eval_with(name="val-061036.json", **changes):
    record = dict(run="S-rd-s1", split="val", step=61036, nll=3.0)
    return lambda run: (run / "eval" / name).write_text(json.dumps({**record, **changes}))


STATS_BROKEN = [  # what is done to S-rd-s1, a word of what is said of it, and whether the run still counts
    (stats_config_with(arch=["rd"]), "arch", False), (stats_config_with(arch=""), "arch", False),
    (stats_config_with(scale={}), "scale", False), (stats_config_with(scale="S\x1b[2J"), "scale", False),
    (stats_config_with(seed="1"), "seed", False), (stats_config_with(seed=1.5), "seed", False),
    (stats_config_with(seed=True), "seed", False), (stats_config_with(seed=10 ** 40), "seed", False),
    (stats_config_with(max_steps="61036"), "max_steps", False), (stats_config_with(max_steps=None), "max_steps", False),
    (stats_config_with(tokens_per_step=[1]), "tokens_per_step", False), (stats_config_with(lr="3e-4"), "lr", False),
    (stats_config_with(n_params="many"), "n_params", False), (stats_config_with(stop_steps="x"), "stop_steps", False),
    (lambda run: (run / "config.json").write_text("[" * 10_000), "config.json", False),
    (lambda run: (run / "config.json").write_text("[1]"), "config.json", False),
    (lambda run: (run / "config.json").write_bytes(b"\xff\xfe{}"), "config.json", False),
    (lambda run: (run / "config.json").unlink(), "config.json", False),
    (stats_log_with('"kind":"eval","step":61036', '"kind":"eval","step":null'), "step", False),
    (stats_log_with('"nll":3.0,', '"nll":true,'), "nll", False),
    (stats_log_with('"nll":3.0,', '"nll":"3.0",'), "nll", False),
    (stats_log_with('"nll":3.0,', '"nll":-1,'), "NLL", False),
    (stats_log_with('"nll":3.0,', '"nll":1e999,'), "nll", False),
    (stats_log_with('"nll":3.0,', '"nll":' + "[" * 5000 + "]" * 5000 + ","), "not a record", False),
    (stats_log_with('"kind":"eval"', '"kind":["eval"]'), "not a record", False),
    (stats_log_with('"loss":', '"lost":'), "loss", False),
    (stats_log_with('"js_mean":', '"js":["a"],"js_mean":"x","x":'), "js", False),
    (stats_eval_with(nll=3.5), "the log 3.0", True), (stats_eval_with("val-zzz.json"), "val-zzz.json left out", True),
    (stats_eval_with(run="S-rd-s2"), "it says run S-rd-s2", True),
    (stats_eval_with(split="test"), "it says split", True),
    (stats_eval_with(step=7), "it says step 7", True), (stats_eval_with(nll=True), "nll", True),
    (lambda run: (run / "eval" / "val-061036.json").mkdir(), "val-061036.json left out", True),
    (lambda run: (run / "metrics.jsonl").write_text((run / "metrics.jsonl").read_text().replace(
        (run / "metrics.jsonl").read_text().splitlines()[-2], (run / "metrics.jsonl").read_text().splitlines()[-3])),
     "no evaluation", False)]


@pytest.mark.parametrize("broken", range(len(STATS_BROKEN)))
def test_stats_a_broken_folder_is_named_and_kills_no_report(tmp_path, capsys, broken):
    breaks, word, counts = STATS_BROKEN[broken]
    for seed in (1, 2, 3):
        stats_run(tmp_path, stats_config("block", seed=seed), {61036: 3.1 + seed / 8 - 0.125})
        stats_run(tmp_path, stats_config("rd", seed=seed), {61036: 3.0 + (seed - 1) / 7})
    breaks(tmp_path / "S-rd-s1")
    code, out = stats_json(capsys, tmp_path)  # strict JSON
    said = " ".join(p["why"] for p in out["problems"] if p["run"] == "S-rd-s1")
    assert code == 0 and word in said, out["problems"]
    assert out["comparisons"][0]["seeds"] == ([1, 2, 3] if counts else [2, 3])
    assert "S-rd-s1" in stats_cli(capsys, tmp_path)[1]


def test_stats_a_pair_that_lost_its_last_evaluation_is_named_and_the_rest_interim(tmp_path, capsys):
    for seed in range(5):
        stats_run(tmp_path, stats_config("block", seed=seed), {30518: 3.3 + seed, 61036: 3.1 + seed})
        stats_run(tmp_path, stats_config("rd", seed=seed), {30518: 3.2 + seed / 2, 61036: 3.0 + seed / 3})
    log = tmp_path / "S-rd-s2" / "metrics.jsonl"
    log.write_text("".join(x for x in log.read_text().splitlines(True) if '"eval","step":61036' not in x))
    out = stats_json(capsys, tmp_path)[1]
    (c,) = out["comparisons"]
    assert (c["n"], c["interim"], c["waiting"]) == (4, True, ["S-rd-s2"])
    assert out["problems"] == [{"run": "S-rd-s2", "why": "no evaluation at step 61036: seed 2 is missing there"}]


def test_stats_controls_table_compares_on_shared_seeds(tmp_path):
    for arm, seeds in (("block", 5), ("rd", 5), ("average", 1), ("q_kv", 1)):
        for seed in range(seeds):
            stats_run(tmp_path, stats_config(arm, seed=seed), {15259: 3.5 + seed / 10 - 0.01 * (arm == "rd")})
    (row,) = stats.controls_table(stats.analyse([tmp_path])).rows
    assert row["seeds"] == "0" and row["control"] == 3.5 and row["arm rd"] == pytest.approx(3.49)


def test_stats_every_arm_is_drawn(tmp_path):
    names = ["rd", *(f"mhar:heads={k}" for k in range(1, 12))]
    for arm in ["block", *names]:
        for seed in (1, 2):
            stats_run(tmp_path / "runs", stats_config(arm, seed=seed),
                      {30518: 3.3 + seed, 61036: 3.1 + seed / 9 - len(arm) / 500})
    out = stats.analyse([tmp_path / "runs"])
    (tmp_path / "out").mkdir()
    captions = stats.draw(out, tmp_path / "out")
    for name in ("figure2_effects", "figure3_milestones", "figure4_js"):
        assert all(f"S {arm}" in captions[name] for arm in names), name
        assert (tmp_path / "out" / f"{name}.png").stat().st_size > 5000


def test_stats_skips_what_is_no_run_and_says_so(tmp_path, capsys):
    for arm in ("block", "rd"):
        stats_run(tmp_path, stats_config(arm), {61036: 3.1 - len(arm) / 100})
    (tmp_path / "plan.json").write_text('{"plans": [{"runs": [], "arms": [], "max_steps": 61036}]}')
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    code, out = stats_json(capsys, *sorted(tmp_path.iterdir()))
    why = {Path(p["run"]).name: p["why"] for p in out["problems"]}
    assert code == 0 and out["comparisons"][0]["n"] == 1
    assert "skipped" in why["notes.txt"] and "skipped" in why["empty"]


def test_stats_a_run_whose_data_were_replaced_under_it_is_named(tmp_path, capsys):
    for arm in ("block", "rd"):
        stats_run(tmp_path, stats_config(arm), {61036: 3.1 - len(arm) / 100})
    stats_log_with('"split":"val"', '"split":"val","data_fingerprint":"other"')(tmp_path / "S-rd-s123")
    out = stats_json(capsys, tmp_path)[1]
    assert out["comparisons"] == [] and "on other data" in out["problems"][0]["why"]


def test_stats_long_logs_are_read_fast(tmp_path):
    folder = stats_run(tmp_path, stats_config("rd"), {30518: 3.3, 61036: 3.1}, train=61036)
    start = time.process_time()
    for _ in range(5):
        run = stats.Run(folder, "S-rd-s123", "val")
    assert run.val[61036]["nll"] == 3.1 and run.speed == 56158.0 and run.memory == 16_005_000_000
    assert (time.process_time() - start) / 5 < 0.2  # 200 such runs in well under a minute even on a slow machine
