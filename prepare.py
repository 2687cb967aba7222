"""Turn parquet text into train.bin, val.bin and test.bin, and hold what every script shares.

    python prepare.py --source=demo                          # the bundled novels, a few seconds
    python prepare.py                                        # FineWeb-Edu sample/10BT, as in the paper
    python prepare.py --shards=3                             # as much of it as a full S or M run reads
    python prepare.py --source=my.parquet --out=data/mine    # any parquet file or folder of them
    torchrun --nproc-per-node=2 prepare.py                   # several machines over one shared folder

FineWeb-Edu, by number of shards (time estimated for 2 and for 16 cores, without the download):
    shards   documents   tokens   download   disk at the end   time
         1      0.73 M   0.75 B     2.2 GB            3.7 GB   4 min, 1 min
         3      2.19 M   2.26 B     6.5 GB             11 GB   12 min, 3 min
        14      9.67 M   9.99 B    28.5 GB             49 GB   50 min, 10 min

It may be killed at any moment: the same command continues, and the bytes written are the same.
"""
from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import difflib
import errno
import gc
import hashlib
import io
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import struct
import sys
import threading
import time
import typing
from pathlib import Path

# ---------------------------------------------------------------------------------------------------------
# Shared by every script: errors of one line, typed flags, writes that cannot be half done, progress


class BadInput(Exception):
    """What the user gave cannot be used: one clear line (or one per problem) on stderr, exit code 2."""


class Failed(Exception):
    """The work ran and failed: one line on stderr, exit code 1."""


def run_script(main: typing.Callable[[list[str]], int | None]) -> typing.NoReturn:
    """Call `main(argv)` and turn what it raises into this project's exit codes (0, 1, 2, 130)."""
    try:
        code = main(sys.argv[1:]) or 0
        sys.stdout.flush()
    except (BadInput, Failed) as e:
        for line in str(e).splitlines():
            print("error:", line, file=sys.stderr)
        code = 2 if isinstance(e, BadInput) else 1
    except BrokenPipeError:  # the reader of our output went away (`| head`): nothing to say, no one to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as e:
        if e.errno is None:  # raised by a library with a sentence of its own: a bug until proven otherwise
            raise
        where = f" ({e.filename})" if e.filename else ""
        full = e.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = ": free some space, then run the same command again" if full else ""
        print(f"error: {os.strerror(e.errno)}{where}{advice}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    sys.exit(code)


def flag(default, help: str, choices=None, least=None, most=None, **more):
    """A dataclass field that is a command-line flag; its type annotation is the flag's type. `choices`, or the bounds `least`
    and `most`, both inclusive, are checked where flags are parsed; `more` is for whoever reads the field's metadata."""
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, least=least, most=most, **more))


def out_of_bounds(value, metadata: typing.Mapping) -> str | None:
    """What is wrong with a number by a field's `least` and `most`, None where nothing is."""
    least, most = metadata.get("least"), metadata.get("most")
    if least is not None and most is not None and not least <= value <= most:
        return f"must lie between {least:g} and {most:g}"
    if least is not None and value < least:
        return f"must be at least {least:g}"
    return None


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def convert(text: str, kind: type):
    """`text` as a bool, int, float or str. Whole numbers may be written 1e3. Raises ValueError."""
    if kind is bool:
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
        raise ValueError("wants true or false")
    if kind is int:
        try:
            value = int(text)
        except ValueError:
            try:
                value = int(float(text))
                if value != float(text):
                    raise ValueError
            except (ValueError, OverflowError):
                raise ValueError("wants a whole number") from None
        return value
    if kind is float:
        try:
            value = float(text)
        except ValueError:
            raise ValueError("wants a number") from None
        if value != value or value in (float("inf"), float("-inf")):
            raise ValueError("wants a finite number")
        return value
    return text


def parse_flags(cls, argv: list[str], doc: str, positional: str | None = None, lists: bool = False):
    """Fill the dataclass `cls` from `argv`; with `lists`, a comma list in any flag makes one instance per value.

    Flags are `--name=value` or `--name value`; booleans also `--name` and `--no-name`. `positional` names the
    field (a list of str) that takes the arguments without a flag. Returns an instance, or with `lists` the list
    of instances, the first flag on the command line varying slowest. Raises BadInput naming every problem.
    """
    fields = {f.name: f for f in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    kinds = {}
    for name in fields:  # `int | None` is an int that may be left out
        args = [a for a in typing.get_args(hints[name]) if a is not type(None)]
        kinds[name] = args[0] if args and name != positional else hints[name]
    flags = [n for n in fields if n != positional]

    plain, rest, problems = [], list(argv), []
    while rest:  # a boolean never takes the next word, unless that word is true or false
        word = rest.pop(0)
        name = word[2:] if word.startswith("--") else ""
        if name in flags and kinds[name] is bool:
            follows = rest[0].lower() in ("true", "false") if rest else False
            plain.append(f"--{name}={rest.pop(0) if follows else 'true'}")
        elif name.startswith("no-") and name[3:] in flags and kinds[name[3:]] is bool:
            plain.append(f"--{name[3:]}=false")
        elif name in flags and rest and not rest[0].startswith("--"):
            plain.append(f"{word}={rest.pop(0)}")
        elif name in flags:
            problems.append(f"--{name} needs a value, as in --{name}={fields[name].default or 'VALUE'}")
        else:
            plain.append(word)

    class Parser(argparse.ArgumentParser):
        def error(self, message):
            raise BadInput(message)

    parser = Parser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    if positional:
        parser.add_argument(positional, nargs="*", help=fields[positional].metadata["help"])
    for name in flags:
        f, kind = fields[name], kinds[name]
        choices = f" ({' | '.join(f.metadata['choices'])})" if f.metadata.get("choices") else ""
        default = "" if f.default is None else f" [{f.default}]"
        parser.add_argument(f"--{name}", metavar=kind.__name__.upper(), default=argparse.SUPPRESS,
                            help=(f.metadata["help"] + choices + default).replace("%", "%%"))
    known, unknown = parser.parse_known_args(plain)
    for word in unknown:
        name = word.split("=")[0]
        problems.append(f"unknown flag {name}" + did_you_mean(name, [f"--{n}" for n in flags])
                        if word.startswith("-") else f"unexpected argument {word!r}: a flag is --name=value")

    values: dict[str, list] = {}
    order = [n for w in plain if (n := w[2:].split("=")[0]) in flags and w.startswith("--")]
    for name in dict.fromkeys(order):
        values[name] = []
        for text in getattr(known, name).split(",") if lists else [getattr(known, name)]:
            try:
                value = convert(text, kinds[name])
                choices = fields[name].metadata.get("choices")
                if choices and value not in choices:
                    raise ValueError(f"wants one of {', '.join(choices)}{did_you_mean(str(value), choices)}")
                if wrong := out_of_bounds(value, fields[name].metadata):
                    raise ValueError(wrong)
                values[name].append(value)
            except ValueError as e:
                problems.append(f"--{name}={text} {e}")
    if problems:
        raise BadInput("\n".join(problems))
    fixed = {positional: getattr(known, positional)} if positional else {}
    made = [cls(**dict(zip(values, combination)), **fixed) for combination in itertools.product(*values.values())]
    return made if lists else made[0]


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike, mode: str = "wb"):
    """Open `path` for writing so that it appears whole or not at all: temporary name, flush, fsync, rename.

    The temporary name is fixed (`.NAME.tmp`), so that what a killed process left is overwritten, not collected;
    whoever writes holds the folder's lock.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
        with open(temporary, mode, **text) as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def sync_folder(folder: str | os.PathLike) -> None:
    """Make a rename in `folder` survive a power cut (file systems that cannot do this are let off)."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def to_json(value, indent: int | None = None) -> str:
    """Strict JSON: a NaN or an infinity raises ValueError instead of writing what other readers refuse."""
    return json.dumps(value, indent=indent, allow_nan=False, ensure_ascii=False)


def write_json(path: str | os.PathLike, value) -> None:
    with atomic_file(path, "w") as f:
        f.write(to_json(value, indent=1) + "\n")


def read_json(path: str | os.PathLike) -> dict:
    """The JSON object in `path`. Raises BadInput when it is missing, unreadable or not an object."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise BadInput(f"{path}: {os.strerror(e.errno)}") from None
    except (ValueError, RecursionError) as e:  # the latter: nested deeper than this Python's parser follows
        raise BadInput(f"{path} is not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise BadInput(f"{path} holds {type(value).__name__}, not a JSON object")
    return value


def sha256_of(path: str | os.PathLike) -> str:
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def human_time(seconds: float) -> str:
    """41 s, 3 min 20 s, 5 h 7 min, 2 d 3 h."""
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    if s < 86400:
        return f"{s // 3600} h {s % 3600 // 60} min"
    return f"{s // 86400} d {s % 86400 // 3600} h"


class Progress:
    """Progress of long work with its rate and the time left: a tqdm bar on a terminal, else a plain line every
    `every` seconds. Nothing of it goes to stdout. Use as a context manager; `update(n)` counts n more units."""

    def __init__(self, label: str, total: int | None, unit: str, every: float = 15.0, scale: bool = True,
                 initial: int = 0):
        self.label, self.total, self.unit, self.every, self.done = label, total, unit, every, initial
        self.initial, self.start = initial, time.monotonic()
        self.last, self.bar = self.start, None
        if sys.stderr.isatty():
            from tqdm import tqdm
            self.bar = tqdm(desc=label, total=total, unit=unit, unit_scale=scale, initial=initial, dynamic_ncols=True)

    def update(self, n: int, note: str = "") -> None:
        self.done += n
        if self.bar is not None:
            self.bar.set_postfix_str(note, refresh=False)
            self.bar.update(n)
        elif time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            rate = (self.done - self.initial) / (self.last - self.start)
            left = f", {human_time((self.total - self.done) / rate)} left" if self.total and rate > 0 else ""
            of = f" of {self.total:,}" if self.total else ""
            print(f"{self.label}: {self.done:,}{of} {self.unit}, {rate:,.0f} {self.unit}/s{left} {note}".rstrip(),
                  file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        if self.bar is not None:
            self.bar.close()


# ---------------------------------------------------------------------------------------------------------
# A finished data folder, as the other scripts read it

SPLITS = ("train", "val", "test")


@dataclasses.dataclass
class DataFolder:
    """A data folder that `open_data` found whole."""
    path: Path
    meta: dict
    fingerprint: str
    vocab_size: int
    eos_id: int

    def tokens(self, split: str):
        """uint16 [tokens of the split], read-only; a new memory map each call, so that its pages can be let go."""
        import numpy as np
        path = self.path / f"{split}.bin"
        return np.memmap(path, dtype="<u2", mode="r") if path.stat().st_size else np.empty(0, dtype="<u2")

    def tokenizer(self):
        return load_tokenizer(self.path / "tokenizer.json")

    def token_bytes(self):
        """int64 [vocab_size]: UTF-8 bytes of each token id; 0 for the special ids and for those never used."""
        import numpy as np
        tokenizer, sizes = self.tokenizer(), np.zeros(self.vocab_size, dtype=np.int64)
        added = tokenizer.get_added_tokens_decoder()
        for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
            # the byte-level alphabet writes each byte as one character; an added token is written as it is
            sizes[i] = len(token) if i not in added else 0 if added[i].special else len(token.encode())
        return sizes


def open_data(folder: str | os.PathLike, splits: typing.Iterable[str] = ("train", "val"),
              verify: bool = True) -> DataFolder:
    """The data folder `folder`, once the bins of `splits` and the tokenizer are found to be those that meta.json
    describes: sizes each time, hashes once for each state of a file (with `verify=False`, sizes only).

    Raises BadInput that names what is wrong and the command that puts it right.
    """
    folder = Path(folder)
    source = {"demo": " --source=demo", "fineweb-edu": ""}.get(folder.name, " --source=PATH")
    command = "python prepare.py" + source + (f" --out={folder}" if folder.parts != ("data", folder.name) or
                                              source == " --source=PATH" else "")
    if not (folder / "meta.json").is_file():
        if (folder / ".work").is_dir():
            raise BadInput(f"{folder} is not finished: continue it with the command that began it ({command})")
        what = "has no meta.json" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise BadInput(f"{folder} {what}: run {command}")
    meta = read_json(folder / "meta.json")
    try:
        files = {"tokenizer.json": (None, meta["tokenizer_sha256"])}
        for split in splits:
            files[f"{split}.bin"] = (2 * meta["splits"][split]["tokens"], meta["splits"][split]["sha256"])
        data = DataFolder(folder, meta, meta["fingerprint"], meta["vocab_size"], meta["eos_id"])
    except (KeyError, TypeError) as e:
        raise BadInput(f"{folder}/meta.json lacks {e}: run {command} --overwrite") from None
    for name, (size, sha256) in files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found is None or size not in (None, found):
            what = "is missing" if found is None else f"holds {found:,} bytes where meta.json says {size:,}"
            raise BadInput(f"{path} {what}: run {command} --overwrite")
        if verify and not verified(path, sha256):
            raise BadInput(f"{path} is not the file that meta.json describes (another sha256): run {command} "
                           "--overwrite")
    return data


def verified(path: Path, sha256: str) -> bool:
    """Whether `path` has this hash. `.verified.json` beside it remembers what was read, at which size and time of
    change, so that a file is read again only when one of them is another."""
    stat, memory = path.stat(), path.with_name(".verified.json")
    try:
        known = read_json(memory)
    except BadInput:
        known = {}
    state = [sha256, stat.st_size, stat.st_mtime_ns]
    if known.get(path.name) != state:
        if sha256_of(path) != sha256:
            return False
        with contextlib.suppress(OSError):  # a folder that cannot be written is read in full each time
            write_json(memory, {**known, path.name: state})
    return True


# ---------------------------------------------------------------------------------------------------------
# Splits, tokenizer, encoder

SPECIALS = ("<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>")  # ids 0 to 3
SKIPS = ("null", "empty", "not UTF-8")
MEMO, LONG = 1 << 18, 64  # words in an encoder's memo (some 30 MB); a longer word is not worth keeping
SLOT_BITS, PROBES = 19, 4  # its hash table, and how many slots in turn may hold a word
LETTER, DIGIT, OTHER, SPACE, BLANK, END, RARE = range(7)  # what a byte can be


def split_of(document: bytes, salt: str, val_fraction: float, test_fraction: float) -> int:
    """0, 1 or 2 (train, val, test) by u = BLAKE2b-64(document, salt) / 2^64, the hash read big-endian."""
    u = int.from_bytes(hashlib.blake2b(document, digest_size=8, salt=salt.encode()).digest(), "big") / 2**64
    return 0 if u < round(1 - val_fraction - test_fraction, 12) else 1 if u < round(1 - test_fraction, 12) else 2


def in_sample(document: bytes, salt: str, fraction: float) -> bool:
    """Whether a train document trains the tokenizer: by a second hash, with a personalisation of its own."""
    h = hashlib.blake2b(document, digest_size=8, salt=salt.encode(), person=b"tokenizer").digest()
    return int.from_bytes(h, "big") / 2**64 < fraction


def load_tokenizer(path: str | os.PathLike):
    """The tokenizers.Tokenizer in `path`, set so that text which looks like a special token stays text (a setting
    that tokenizer.json does not keep) and nothing is cut or padded. Raises BadInput."""
    from tokenizers import Tokenizer
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except Exception as e:  # the library raises plain Exception for whatever it cannot read
        raise BadInput(f"{path} cannot be read as a tokenizer.json ({e})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(documents: typing.Iterable[str], vocab_size: int) -> str:
    """A byte-level BPE tokenizer as JSON; the whole byte alphabet is in it, so that no text is ever lost. Neither
    the order of the documents nor the number of threads changes it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(SPECIALS), min_frequency=2, show_progress=sys.stderr.isatty(),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    return tokenizer.to_str(pretty=True)


class Encoder:
    """Encodes documents exactly as `tokenizers` does, many times faster: numpy cuts a batch into words by GPT-2's
    rule and finds their ids in a table that the tokenizer itself fills, one entry for each new word.

    The rule is applied to ASCII, to the Latin-1 letters and to the common dashes and quotes. Unicode versions, and so
    libraries, differ on the class of thousands of other characters; but a space before a character that is none of
    the spaces begins a word in each version. So the stretch between two such spaces goes to the tokenizer as one
    word when it holds a rare character. A tokenizer of another make than ours gets every document whole.
    """

    def __init__(self, path: str | os.PathLike, eos_id: int, salt: str, val_fraction: float, test_fraction: float):
        import numpy as np
        self.np, self.tokenizer, self.split = np, load_tokenizer(path), (salt, val_fraction, test_fraction)
        made = json.loads(self.tokenizer.to_str())
        pre = made["pre_tokenizer"] or {}
        self.fast = (made["model"]["type"] == "BPE" and not made["model"].get("dropout") and not made["normalizer"]
                     and pre.get("type") == "ByteLevel" and pre.get("use_regex", True)
                     and not pre["add_prefix_space"] and all(token["special"] for token in made["added_tokens"]))
        kinds = [LETTER if chr(b).isalpha() else DIGIT if chr(b).isdigit() else OTHER if 32 < b < 127 else
                 SPACE if b == 32 else BLANK if 9 <= b <= 13 else RARE for b in range(128)] + [RARE] * 127 + [END]
        self.kinds, self.eos = np.array(kinds, np.uint8), eos_id
        self.masks = np.array([(1 << 8 * n) - 1 for n in range(9)], np.uint64)
        self.forget()

    def forget(self) -> None:
        """An empty memo: word number -> where its ids are in the pool; table of 16-byte words, dict of the others."""
        np = self.np
        self.table, self.numbers = np.zeros((2, 1 << SLOT_BITS), np.uint64), np.zeros(1 << SLOT_BITS, np.int64)
        self.others, self.ends, self.pool = {}, np.zeros(1, np.int64), np.zeros(0, "<u2")
        self.add([b"\xff"], np.array([self.eos]), np.array([1]))

    def add(self, words: list[bytes], ids, counts) -> None:
        np = self.np
        fresh = np.arange(len(self.ends) - 1, len(self.ends) - 1 + len(words))
        self.ends = np.concatenate([self.ends, self.ends[-1] + np.cumsum(counts)])
        self.pool = np.concatenate([self.pool, ids.astype("<u2")])
        short = np.array([len(word) <= 16 and b"\0" not in word for word in words])
        keys = np.frombuffer(b"".join(w.ljust(16, b"\0") for w, s in zip(words, short) if s), "<u8").reshape(-1, 2).T
        left = np.flatnonzero(short)
        slots = self.slots(keys)
        for _ in range(PROBES):
            free = self.table[0, slots] == 0
            self.table[:, slots[free]], self.numbers[slots[free]] = keys[:, free], fresh[left[free]]
            lost = self.numbers[slots] != fresh[left]  # taken before, or by another new word just now
            left, keys, slots = left[lost], keys[:, lost], (slots[lost] + 1) % (1 << SLOT_BITS)
        for i in np.concatenate([left, np.flatnonzero(~short)]).tolist():
            self.others[words[i]] = int(fresh[i])

    def slots(self, keys):
        np = self.np
        mixed = keys[0] * np.uint64(0x9E3779B97F4A7C15) ^ keys[1] * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed = (mixed ^ mixed >> np.uint64(29)) * np.uint64(0xBF58476D1CE4E5B9)
        return (mixed >> np.uint64(64 - SLOT_BITS)).astype(np.int64)

    def cut(self, data):
        """Where words begin in `data`, uint8 [n], documents that each end with byte 255: int64 [words]."""
        np = self.np
        kind = self.kinds[data]
        rare = np.flatnonzero(kind == RARE)
        rare = rare[rare < len(data) - 2]
        first, second, third = data[rare], data[rare + 1], data[rare + 2]
        at = rare[(first == 0xE2) & (second == 0x80) & (third >= 0x90) & (third <= 0xA7)]  # dashes, quotes, dots
        kind[at] = kind[at + 1] = kind[at + 2] = OTHER
        latin = first == 0xC3
        at, multiply = rare[latin], (second[latin] == 0x97) | (second[latin] == 0xB7)
        kind[at] = kind[at + 1] = np.where(multiply, OTHER, LETTER)

        before = np.concatenate([[np.uint8(END)], kind[:-1]])
        after = np.concatenate([kind[1:], [np.uint8(END)]])
        blank, solid = (kind == SPACE) | (kind == BLANK), kind <= OTHER
        begins = solid & (kind != before) & (before != SPACE) | (kind == END) | (before == END)
        begins |= blank & (before != SPACE) & (before != BLANK)  # a run of blanks; its last one stands alone or leads
        begins |= blank & (after != SPACE) & (after != BLANK) & (after != END)
        at = np.flatnonzero((data == 39) & begins)
        at = at[at < len(data) - 2]
        one, two = data[at + 1], data[at + 2]
        for ends in (b"s", b"t", b"m", b"d", b"re", b"ve", b"ll"):
            hit = at[(one == ends[0]) & ((two == ends[-1]) | (len(ends) == 1))]
            begins[hit + 1], begins[hit + 1 + len(ends)] = False, True
        if len(rare := np.flatnonzero(kind == RARE)):
            sure = np.flatnonzero((kind == SPACE) & (after <= OTHER) | (before == END) | (kind == END))
            k = np.unique(np.searchsorted(sure, rare, "right") - 1)
            step = np.zeros(len(data) + 1, np.int8)
            step[sure[k] + 1] += 1
            step[sure[k + 1]] -= 1
            begins &= np.cumsum(step[:-1], dtype=np.int8) == 0
        return np.flatnonzero(begins)

    def encode(self, documents: list[bytes]) -> bytes:
        """The ids of valid UTF-8 documents, each with EOS after it."""
        np = self.np
        if not documents:
            return b""
        if not self.fast:
            made = (self.tokenizer.encode(d.decode(), add_special_tokens=False).ids for d in documents)
            ids = [i for document in made for i in (*document, self.eos)]
            return struct.pack(f"<{len(ids)}H", *ids)  # an id that does not fit raises: nothing wraps
        if len(self.ends) > MEMO:
            self.forget()
        text = b"\xff".join([*documents, b""])
        data = np.frombuffer(text, np.uint8)
        starts = self.cut(data)
        stops = np.append(starts[1:], len(data))
        sizes = stops - starts
        eight = np.ndarray(len(data) + 8, "<u8", text + bytes(16), strides=(1,))  # eight bytes from each byte on
        keys = np.stack([eight[starts] & self.masks[np.minimum(sizes, 8)],
                         eight[np.minimum(starts + 8, len(data))] & self.masks[np.clip(sizes - 8, 0, 8)]])
        numbers, left = np.full(len(starts), -1), np.flatnonzero(sizes <= 16)
        slots = self.slots(keys[:, left])
        for _ in range(PROBES):
            same = (self.table[0, slots] == keys[0, left]) & (self.table[1, slots] == keys[1, left])
            numbers[left[same]] = self.numbers[slots[same]]
            left, slots = left[~same], (slots[~same] + 1) % (1 << SLOT_BITS)
        if 0 in text:  # in a key it looks like the end of a shorter word
            numbers[np.searchsorted(starts, np.flatnonzero(data == 0), "right") - 1] = -1
        left, known = np.flatnonzero(numbers < 0), len(self.ends)
        words = [text[a:b] for a, b in zip(starts[left].tolist(), stops[left].tolist())]
        new = sorted({word for word in words if word not in self.others}, key=len)  # those to forget are the last
        if new:
            encoding = self.tokenizer.encode([w.decode() for w in new], is_pretokenized=True, add_special_tokens=False)
            counts = np.bincount(encoding.word_ids, minlength=len(new))
            self.add(new, np.array(encoding.ids), counts)
        fresh = dict(zip(new, range(known - 1, known - 1 + len(new))))
        numbers[left] = [fresh[word] if word in fresh else self.others[word] for word in words]
        counts = self.ends[numbers + 1] - self.ends[numbers]
        shift = self.ends[numbers] - (np.cumsum(counts) - counts)
        made = self.pool[np.repeat(shift, counts) + np.arange(counts.sum())].tobytes()
        if new and len(new[-1]) > LONG:
            keep = known + sum(len(word) <= LONG for word in new)
            self.ends, self.pool = self.ends[:keep], self.pool[:self.ends[keep - 1]]
            for word in new[keep - known:]:
                del self.others[word]
        return made

    def __call__(self, documents: list[bytes | None]) -> tuple[list[bytes], list[int], list[int], list[int]]:
        """Per split the token ids, the number of documents and their UTF-8 bytes; last, what was skipped and why."""
        kept, skipped = ([], [], []), [0] * len(SKIPS)
        for raw in documents:
            try:
                if raw and raw.decode():
                    kept[split_of(raw, *self.split)].append(raw)
                else:
                    skipped[0 if raw is None else 1] += 1
            except UnicodeDecodeError:
                skipped[2] += 1
        return [self.encode(k) for k in kept], [len(k) for k in kept], [sum(map(len, k)) for k in kept], skipped


# ---------------------------------------------------------------------------------------------------------
# Reading parquet

BATCH_BYTES = 1 << 19  # of text, for one call of the encoder
WORKER_BYTES = 1 << 23  # of text, for which a worker process is worth starting


def parquet_files(source: Path, limit: int | None) -> list[dict]:
    """The parquet files under `source` (or itself), sorted by path, each with its size and a hash of its last
    64 KiB, where parquet keeps the places and statistics of all the rest. Hidden files are left out."""
    if not source.exists():
        hint = did_you_mean(str(source), ("demo", "fineweb-edu"))
        raise BadInput(f"--source={source}: no such file or folder{hint}")
    names, files = [] if source.is_dir() else [""], []
    for folder, folders, found in os.walk(source, followlinks=True):
        folders[:] = [f for f in folders if not f.startswith(".")]
        names += [Path(folder, f).relative_to(source).as_posix() for f in found if not f.startswith(".")]
    for name in names:
        if name.endswith((".incomplete", ".part", ".crdownload")):
            print(f"note: {source / name} looks like an unfinished download: not read", file=sys.stderr)
    for name in sorted(f for f in names if f.endswith(".parquet") or not f)[:limit]:
        with open(source / name, "rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(0, size - (1 << 16)))
            tail = hashlib.sha256(f.read()).hexdigest()
        files.append({"path": name or source.name, "size": size, "tail_sha256": tail})
    if not files:
        raise BadInput(f"--source={source}: no parquet file there (the README turns JSONL or text into parquet)")
    return files


def open_parquet(path: Path, column: str):
    """The pyarrow ParquetFile at `path`, found to hold text in `column`, and the uncompressed bytes of that column
    in each row group. Raises BadInput."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    with open(path, "rb") as f:
        start = f.read(24)
    if start[:4] != b"PAR1":
        raise BadInput(f"{path} is " + ("empty" if not start else "a Git LFS pointer, not the data: run git lfs pull"
                                        if start[:8] == b"version " else "not a parquet file"))
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True, buffer_size=1 << 20)
        schema, footer = file.schema_arrow, file.metadata
        groups = [sum(c.total_uncompressed_size for c in map(footer.row_group(g).column, range(footer.num_columns))
                      if c.path_in_schema == column) for g in range(footer.num_row_groups)]
    except (pa.ArrowException, OSError) as e:
        raise BadInput(f"{path} is cut off or damaged ({str(e).splitlines()[0]}): fetch it again") from None
    texts = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.null())
    kinds = {f.name: f.type.value_type if pa.types.is_dictionary(f.type) else f.type for f in schema}
    if kinds.get(column) not in texts or schema.names.count(column) > 1:
        what = f"holds {kinds[column]}, not text" if column in kinds else "is not there"
        others = ", ".join(name for name, kind in kinds.items() if kind in texts[:2])
        raise BadInput(f"{path}: column {column!r} {what}: give --text_column (text: {others or 'none'})")
    return file, groups


def read_documents(path: Path, column: str, start: int = 0) -> typing.Iterator[tuple[int, list[bytes | None]]]:
    """Yield (rows read so far, documents) from row `start` on, about BATCH_BYTES of text at a time, page
    checksums verified; a null is None. Raises BadInput where the file is damaged."""
    import pyarrow as pa
    file, groups = open_parquet(path, column)
    row, batch, size = 0, [], 0
    try:
        for group, group_bytes in enumerate(groups):
            rows = file.metadata.row_group(group).num_rows
            if row + rows <= start:
                row += rows
                continue
            at_once = max(1, min(1024, 8 * BATCH_BYTES * rows // max(1, group_bytes)))
            for table in file.iter_batches(at_once, row_groups=[group], columns=[column]):
                values = table.column(0)
                values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
                for document in values.cast(pa.large_binary()).to_pylist():
                    row += 1
                    if row > start:
                        batch.append(document)
                        size += len(document or b"")
                    if size >= BATCH_BYTES or len(batch) == 4096:
                        yield row, batch
                        batch, size = [], 0
        if row != file.metadata.num_rows:
            raise OSError(f"{file.metadata.num_rows} rows promised")
    except (pa.ArrowException, OSError) as e:
        raise BadInput(f"{path} is damaged after row {row} ({str(e).splitlines()[0]}): fetch it again") from None
    finally:
        file.close()
    yield row, batch


# ---------------------------------------------------------------------------------------------------------
# The Hub

REPO = "HuggingFaceFW/fineweb-edu"
REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"  # its sample/10BT: 14 files, 28,518,193,415 bytes
PAPER = {"train": (9_575_157, 9_892_016_691), "val": (48_683, 50_328_166), "test": (48_261, 49_144_462)}
PATIENCE = (2, 10, 30, 60, 120)  # seconds between attempts, each of which is several of huggingface_hub's
REFUSALS = {
    "GatedRepoError": f"access must be asked for, at https://huggingface.co/datasets/{REPO}",
    "RepositoryNotFoundError": f"the Hub has no dataset {REPO}, or not for you (HF_TOKEN)",
    "RevisionNotFoundError": "no such revision: see --revision",
    "EntryNotFoundError": f"not in {REPO} at this revision: see --subset",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set",
}


def patiently(what: str, action: typing.Callable, waits: tuple = PATIENCE[:2]):
    """`action()`, tried again after what may pass: a dropped connection, too many requests, a fault of the server."""
    for attempt, wait in enumerate((*waits, None), 1):
        try:
            return action()
        except Exception as e:  # the HTTP library below huggingface_hub, and so the errors' types, are not fixed
            if known := [REFUSALS[c.__name__] for c in type(e).__mro__ if c.__name__ in REFUSALS]:
                raise BadInput(f"{what}: {known[0]}") from None
            if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS):
                raise  # ours, not the network's
            answer, why = getattr(e, "response", None), (str(e).splitlines() or [type(e).__name__])[0]
            if wait is None or answer is not None and answer.status_code in (400, 401, 403):
                raise Failed(f"{what}: {why} ({attempt} attempts; what was fetched is kept: run the same command "
                             "again)") from None
            with contextlib.suppress(AttributeError, KeyError, ValueError):
                wait = max(wait, min(300, int(answer.headers["Retry-After"])))
            print(f"{what}: {why}; again in {wait} s", file=sys.stderr, flush=True)
            time.sleep(wait)


def hub_files(subset: str, revision: str, limit: int | None) -> tuple[str, list[dict]]:
    """The commit that `revision` names, and its parquet files in `subset` with the Hub's sizes and hashes."""
    from huggingface_hub import HfApi, logging
    logging.set_verbosity_error()
    print(f"asking the Hub for the files in {subset}", file=sys.stderr, flush=True)
    if not re.fullmatch("[0-9a-f]{40}", revision):
        revision = patiently(f"revision {revision}", lambda: HfApi().dataset_info(REPO, revision=revision).sha)
    files = patiently(f"listing {subset}", lambda: [
        {"path": f.path, "size": f.size, "sha256": f.lfs.sha256}
        for f in HfApi().list_repo_tree(REPO, subset, recursive=True, revision=revision, repo_type="dataset")
        if f.path.endswith(".parquet")])
    if not files:
        raise BadInput(f"--subset={subset}: no parquet file there")
    return revision, sorted(files, key=lambda f: f["path"])[:limit]


def fetch(files: list[dict], revision: str, folder: Path) -> None:
    """Bring `files` into `folder`: each continues where a killed download stopped, and stays only with its hash."""
    import huggingface_hub as hub
    from huggingface_hub.file_download import http_get  # hf_hub_download begins again after a kill
    hub.utils.disable_progress_bars()

    class Counted(io.BufferedRandom):
        def write(self, data):
            progress.update(len(data))
            return super().write(data)

    missing = [f for f in files if not (p := folder / f["path"]).is_file() or not verified(p, f["sha256"])]
    with Progress("downloading", sum(f["size"] for f in missing), "B") as progress:
        for f in missing:
            path, part = folder / f["path"], folder / (f["path"] + ".part")
            part.parent.mkdir(parents=True, exist_ok=True)
            url = hub.hf_hub_url(REPO, f["path"], repo_type="dataset", revision=revision)

            def get():
                with Counted(io.FileIO(part, "ab+")) as file:
                    have = file.seek(0, os.SEEK_END)
                    have = have if have <= f["size"] else file.truncate(0)
                    http_get(url, file, resume_size=have, expected_size=f["size"],
                             headers=hub.utils.build_hf_headers())
                    file.flush()
                    os.fsync(file.fileno())

            for _ in range(2):
                patiently(f["path"], get, PATIENCE)
                os.replace(part, path)
                if verified(path, f["sha256"]):
                    break
                path.unlink()
            else:
                raise Failed(f"{f['path']} came twice with another sha256 than the Hub lists: it is not used")


# ---------------------------------------------------------------------------------------------------------
# The work: plan, fetch, train the tokenizer, encode file by file, join


@dataclasses.dataclass
class Config:
    source: str = flag("fineweb-edu", "demo, fineweb-edu, or the path of a parquet file or a folder of them")
    out: str = flag(None, "folder to write; by default data/NAME")
    text_column: str = flag("text", "the column that holds the documents")
    vocab_size: int = flag(None, "entries of the tokenizer that is trained [32768; demo: 4096]")
    tokenizer: str = flag(None, "encode with this tokenizer.json instead of training one, so that corpora compare")
    val_fraction: float = flag(None, "share of the documents kept for validation [0.005; demo: 0.05]")
    test_fraction: float = flag(None, "share of the documents kept for test [0.005; demo: 0.05]")
    salt: str = flag("rd-attnres", "decides which document falls into which split; 16 bytes at most")
    workers: int = flag(None, "processes that encode [one a core]; the bytes written do not depend on it")
    shards: int = flag(None, "take the first N files only")
    subset: str = flag("sample/10BT", f"folder of {REPO}")
    revision: str = flag(REVISION, f"commit or branch of {REPO}")
    keep_parquet: bool = flag(True, "keep each downloaded file when it is encoded")
    overwrite: bool = flag(False, "build again what --out holds from other settings")
    benchmark: bool = flag(False, "measure speed and memory on --source instead, beside the tokenizer's own rate")


def settings_of(config: Config) -> dict:
    """What decides the bytes to be written. Raises BadInput with every problem, before any work."""
    demo, hub, problems = config.source == "demo", config.source == "fineweb-edu", []
    val, test = (f if f is not None else 0.05 if demo else 0.005 for f in (config.val_fraction, config.test_fraction))
    vocab_size, eos_id, tokenizer = config.vocab_size or (4096 if demo else 32768), 3, None
    if min(val, test) < 0 or val + test >= 1:
        problems.append(f"--val_fraction={val} --test_fraction={test}: neither below 0, together below 1")
    if len(config.salt.encode()) > 16:
        problems.append(f"--salt={config.salt} is longer than 16 bytes")
    problems += [f"--{name} must be at least 1" for name in ("workers", "shards", "vocab_size")
                 if getattr(config, name) is not None and getattr(config, name) < 1]
    if config.tokenizer:
        made, beside = load_tokenizer(config.tokenizer), Path(config.tokenizer).with_name("meta.json")
        ids, tokenizer = made.get_vocab(with_added_tokens=True), sha256_of(config.tokenizer)
        vocab_size = max(ids.values()) + 1
        if beside.is_file() and read_json(beside).get("tokenizer_sha256") == tokenizer:
            vocab_size = read_json(beside)["vocab_size"]  # ids that stayed unused there count too
        if config.vocab_size and config.vocab_size != vocab_size:
            problems.append(f"--vocab_size={config.vocab_size}: --tokenizer has {vocab_size}")
        eos_id = next((ids[t] for t in (SPECIALS[3], "<|endoftext|>", "</s>", "<eos>") if t in ids), None)
        if eos_id is None or '"ByteLevel"' not in json.dumps(json.loads(made.to_str())["pre_tokenizer"]):
            problems.append(f"--tokenizer={config.tokenizer} must be byte-level and have an end-of-text token")
    if not 260 <= vocab_size <= 65536:
        problems.append(f"a vocabulary of {vocab_size:,} (added tokens included) does not do: 260 hold the bytes and "
                        "the special tokens, and 65,536 fit into 16 bits")
    if problems:
        raise BadInput("\n".join(problems))
    return {"source": config.source if demo or hub else "files", "text_column": config.text_column,
            "subset": config.subset.strip("/") if hub else None, "revision": config.revision if hub else None,
            "shards": config.shards, "salt": config.salt, "val_fraction": val, "test_fraction": test,
            "vocab_size": vocab_size, "eos_id": eos_id, "tokenizer": tokenizer}


def make_plan(out: Path, lock: int, root: Path, settings: dict, overwrite: bool) -> dict | None:
    """The plan in OUT/.work: the one that is there when it has these settings and files, else a new one; None when
    `out` is finished with them. Locks the folder's descriptor `lock`. Raises BadInput when `out` holds anything else
    or another process is at work in it."""
    import fcntl  # not on Windows, where the other scripts may still want this file's helpers
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadInput(f"another prepare.py is at work in {out}") from None
    work, finished, hub = out / ".work", (out / "meta.json").is_file(), settings["source"] == "fineweb-edu"
    if not overwrite and (finished or (work / "plan.json").is_file()):
        plan = read_json(out / "meta.json" if finished else work / "plan.json")
        old = plan.get("settings", {})
        differ = [f"{key} is {old.get(key)!r} there and {settings.get(key)!r} here" for key in {**old, **settings}
                  if old.get(key) != settings.get(key)]
        if not differ and not hub:
            then, now = ({f["path"]: f for f in files} for files in
                         (plan["files"], parquet_files(root, settings["shards"])))
            differ = [f"source file {name} {'was changed' if name in now and name in then else 'came or went'}"
                      for name in sorted({*then, *now}) if then.get(name) != now.get(name)]
        if differ:
            raise BadInput(f"{out} was {'made' if finished else 'begun'} with other settings: {'; '.join(differ)}. "
                           "Give --overwrite to make it anew, or another --out")
        if finished:  # a kill after meta.json was written leaves the rest behind
            shutil.rmtree(work, ignore_errors=True)
        return None if finished else plan
    if not overwrite and any((out / f"{split}.bin").exists() for split in SPLITS):
        raise BadInput(f"{out} holds bins without a meta.json: give --overwrite to replace them, or another --out")
    revision, files = (hub_files(settings["subset"], settings["revision"], settings["shards"]) if hub
                       else (None, parquet_files(root, settings["shards"])))
    with contextlib.suppress(FileNotFoundError):  # without its plan an old .work counts for nothing
        (work / "plan.json").unlink()
    shutil.rmtree(work, ignore_errors=True)
    (out / "meta.json").unlink(missing_ok=True)
    work.mkdir()
    plan = {"settings": settings, "revision": revision, "files": files}
    write_json(work / "plan.json", plan)
    return plan


class Shard:
    """The bins of one source file while they grow. What a killed process wrote after its last commit is cut off."""

    def __init__(self, work: Path, index: int):
        self.journal, self.pending = work / f"{index:05d}.json", 0
        self.bins = [work / f"{index:05d}.{split}" for split in SPLITS]
        self.state = read_json(self.journal) if self.journal.exists() else {
            "rows": 0, "done": False, "tokens": [0] * 3, "documents": [0] * 3, "bytes": [0] * 3,
            "skipped": [0] * len(SKIPS)}

    def __enter__(self):
        self.files = [open(path, "ab") for path in self.bins]
        for file, tokens in zip(self.files, self.state["tokens"]):
            if file.tell() < 2 * tokens:
                raise BadInput(f"{file.name} is shorter than its journal says: give --overwrite to begin again")
            file.truncate(2 * tokens)
        return self

    def __exit__(self, *exc):
        for file in self.files:
            file.close()

    def add(self, bins: list[bytes], documents: list[int], sizes: list[int], skipped: list[int]) -> None:
        for file, data in zip(self.files, bins):
            file.write(data)
        for key, new in (("tokens", [len(b) // 2 for b in bins]), ("documents", documents), ("bytes", sizes),
                         ("skipped", skipped)):
            self.state[key] = [a + b for a, b in zip(self.state[key], new)]
        self.pending += sum(sizes)

    def commit(self, rows: int, done: bool) -> None:
        for file in self.files:
            file.flush()
            os.fsync(file.fileno())
        self.state |= {"rows": rows, "done": done}
        write_json(self.journal, self.state)
        self.pending = 0


encoder_here = None  # a worker process has one


def start_worker(settings: tuple) -> None:
    """A worker leaves Ctrl-C to its parent, and ends with it."""
    global encoder_here
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    gc.disable()  # an Encoder makes no cycles, and many small objects
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    encoder_here = Encoder(*settings)


def encode_here(documents: list[bytes | None]):
    return encoder_here(documents)


def encode_all(tasks: typing.Iterator, settings: tuple, workers: int) -> typing.Iterator:
    """For each (place, documents) of `tasks`, in order, yield (place, what an Encoder made of them)."""
    if workers < 2:
        encoder = Encoder(*settings)
        yield from ((place, encoder(documents)) for place, documents in tasks)
        return
    pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker,
                                                  (settings,))
    waiting = collections.deque()
    try:
        for place, documents in tasks:
            waiting.append((place, pool.submit(encode_here, documents)))
            if len(waiting) > 2 * workers:
                place, future = waiting.popleft()
                yield place, future.result()
        for place, future in waiting:
            yield place, future.result()
    except concurrent.futures.BrokenExecutor:
        raise Failed("a worker process died, killed perhaps for lack of memory; what is encoded is kept: run the same "
                     f"command again, with --workers={workers // 2}") from None
    finally:
        pool.shutdown(cancel_futures=True)  # waits for what is being encoded: a moment


def encode_shards(shards: list[Shard], paths: list[Path], settings: dict, tokenizer: Path, total: int, workers: int,
                  drop: bool = False) -> None:
    """Encode `paths` into `shards` from where each stands. A kill costs at most 16 batches a worker."""
    def tasks():
        for k, (shard, path) in enumerate(zip(shards, paths)):
            rows = shard.state["rows"]
            for rows, documents in read_documents(path, settings["text_column"], rows):
                yield (k, rows, False), documents
            yield (k, rows, True), []

    encoder = [tokenizer, *(settings[key] for key in ("eos_id", "salt", "val_fraction", "test_fraction"))]
    workers = max(1, min(workers, total // WORKER_BYTES))
    with contextlib.ExitStack() as stack:
        before = sum(sum(shard.state["bytes"]) for shard in shards)
        progress = stack.enter_context(Progress("encoding", total, "B", initial=before))
        made = stack.enter_context(contextlib.closing(encode_all(tasks(), tuple(encoder), workers)))
        for k in range(len(shards)):
            with shards[k] as shard:
                for (_, rows, done), result in made:
                    shard.add(*result)
                    progress.update(sum(result[2]))
                    if done or shard.pending >= 12 * workers * BATCH_BYTES:
                        shard.commit(rows, done)
                    if done:
                        break
            if drop:
                paths[k].unlink()


def sample_texts(paths: list[Path], settings: dict, total: int, fraction: float) -> typing.Iterator[str]:
    """The train documents that train the tokenizer."""
    split, n, size = [settings[key] for key in ("salt", "val_fraction", "test_fraction")], 0, 0
    with Progress("choosing text for the tokenizer", total, "B") as progress:
        for path in paths:
            for _, documents in read_documents(path, settings["text_column"]):
                progress.update(sum(len(d) for d in documents if d))
                for d in documents:
                    if d and in_sample(d, settings["salt"], fraction) and split_of(d, *split) == 0:
                        with contextlib.suppress(UnicodeDecodeError):
                            yield d.decode()
                            n, size = n + 1, size + len(d)
    print(f"tokenizer: learning from {n:,} train documents, {size:,} bytes", file=sys.stderr, flush=True)
    if n == 0 and fraction < 1:  # a corpus of a few documents
        yield from sample_texts(paths, settings, total, 1.0)


def join(out: Path, work: Path, shards: list[Shard]) -> None:
    """Append the shards' bins in order, each removed once it is safe in its place, and put the whole into `out`."""
    state = read_json(work / "joined.json") if (work / "joined.json").exists() else {"shards": 0, "sizes": [0] * 3}
    with contextlib.ExitStack() as stack:
        for shard in shards[state["shards"]:]:
            wholes = [stack.enter_context(open(work / f"{split}.bin", "ab")) for split in SPLITS]
            for whole, size, path in zip(wholes, state["sizes"], shard.bins):
                whole.truncate(size)
                with open(path, "rb") as f:
                    shutil.copyfileobj(f, whole, 1 << 20)
                whole.flush()
                os.fsync(whole.fileno())
            state = {"shards": state["shards"] + 1, "sizes": [whole.tell() for whole in wholes]}
            stack.close()
            write_json(work / "joined.json", state)
            for path in shard.bins:
                path.unlink()
    for name in ("train.bin", "val.bin", "test.bin", "tokenizer.json"):
        if (work / name).exists():
            os.replace(work / name, out / name)
    sync_folder(out)


def finish(out: Path, work: Path, plan: dict, shards: list[Shard]) -> None:
    """Join, check, report, and last of all write meta.json."""
    join(out, work, shards)
    settings, splits, tokenizer_sha256 = plan["settings"], {}, sha256_of(out / "tokenizer.json")
    total = {key: [sum(column) for column in zip(*(s.state[key] for s in shards))]
             for key in ("documents", "tokens", "bytes", "skipped")}
    for k, split in enumerate(SPLITS):
        path = out / f"{split}.bin"
        splits[split] = {key: total[key][k] for key in ("documents", "tokens", "bytes")} | {"sha256": sha256_of(path)}
        if path.stat().st_size != 2 * splits[split]["tokens"]:
            raise Failed(f"{path} holds {path.stat().st_size:,} bytes, {2 * splits[split]['tokens']:,} were written")
    rows, kept = sum(s.state["rows"] for s in shards), sum(total["documents"])
    skipped = dict(zip(SKIPS, total["skipped"]))
    vocab_size, ids = settings["vocab_size"], load_tokenizer(out / "tokenizer.json").get_vocab_size()
    identity = [vocab_size, settings["eos_id"], tokenizer_sha256, *(splits[split]["sha256"] for split in SPLITS)]
    meta = {"vocab_size": vocab_size, "eos_id": settings["eos_id"], "salt": settings["salt"],
            "source": settings["source"] if settings["source"] != "files" else plan["files"][0]["path"],
            "fingerprint": hashlib.sha256(to_json(identity).encode()).hexdigest()[:16],
            "tokenizer_sha256": tokenizer_sha256, "splits": splits,
            "report": {"rows": rows, "kept": kept, "skipped": skipped, "unused_ids": vocab_size - ids}, **plan}
    if not kept:
        raise BadInput(f"{out}: no document in the source ({rows} rows; skipped: {skipped})")
    write_json(out / "meta.json", meta)
    shutil.rmtree(work, ignore_errors=True)
    print(f"{out}: {rows:,} documents read, {kept:,} kept; skipped: "
          + ", ".join(f"{n:,} {why}" for why, n in skipped.items()))
    print(f"{'split':5} {'documents':>12} {'tokens':>15} {'bytes':>15} {'bytes/token':>11}")
    for split, s in splits.items():
        rate = s["bytes"] / max(1, s["tokens"])
        print(f"{split:5} {s['documents']:12,} {s['tokens']:15,} {s['bytes']:15,} {rate:11.2f}")
        if not s["documents"]:
            print(f"warning: {split} is empty: train.py and eval.py will refuse to use it")
    if settings["subset"] == "sample/10BT" and len(shards) == 14:
        print("paper " + ", ".join(f"{k} {d:,} documents, {t:,} tokens" for k, (d, t) in PAPER.items())
              + ": its salt is not published, so splits agree in proportion only")
    print(f"vocabulary {vocab_size:,} ids, {vocab_size - ids:,} of them never used; fingerprint {meta['fingerprint']}")


def prepare(config: Config, distributed: bool = False) -> None:
    """Make the data folder that `config` asks for, or continue it. Raises BadInput and Failed."""
    settings = settings_of(config)
    rank, world = 0, int(os.environ.get("WORLD_SIZE", 1)) if distributed else 1
    if world > 1:
        import datetime
        import torch.distributed as dist
        dist.init_process_group("gloo", timeout=datetime.timedelta(days=2))
        rank = dist.get_rank()

    def share(value=None):
        """Rank 0's `value` on every rank, once all of them are here."""
        box = [value]
        if world > 1:
            dist.broadcast_object_list(box)
            dist.barrier()
        return box[0]

    hub, demo, column = settings["source"] == "fineweb-edu", config.source == "demo", settings["text_column"]
    root = Path(__file__).resolve().parent / "data" / "austen.parquet" if demo else Path(config.source)
    out = Path(config.out or f"data/{config.source if hub or demo else root.resolve().stem}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    workers = config.workers or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1) if world > 1 else 1))
    if config.benchmark:
        return benchmark(root if not hub else out / "parquet", settings, config.tokenizer, workers)
    out.mkdir(parents=True, exist_ok=True)
    work, lock = out / ".work", os.open(out, os.O_RDONLY)
    try:
        plan = share(make_plan(out, lock, root, settings, config.overwrite) if rank == 0 else None)
        if plan is None:
            if rank == 0:
                print(f"{out} is finished already, with these settings: nothing to do")
            return
        root = out / "parquet" if hub else root.parent if root.is_file() else root
        files, paths = plan["files"], [root / f["path"] for f in plan["files"]]
        shards = [Shard(work, k) for k in range(len(files))]
        left = [k for k, shard in enumerate(shards) if not shard.state["done"]]
        mine = [k for k in left if k % world == rank]
        kept = sum(sum(shard.state["tokens"]) for shard in shards)
        if hub:
            size = sum(f["size"] for f in files)
            if rank == 0:
                print(f"{len(files)} shards, {size / 1e9:.1f} GB of parquet: about {size * 0.339e-9:.2f} M documents, "
                      f"{size * 0.35034e-9:.2f} B tokens, {size * 1.7007e-9:.1f} GB on disk in the end", flush=True)
                check_disk(out, sum(files[k]["size"] for k in left if not paths[k].exists()), size * 0.7007 - 2 * kept)
            fetch([files[k] for k in mine], plan["revision"], root)
            share()
        total = 0
        for k in left:
            file, groups = open_parquet(paths[k], column)
            file.close()
            total += sum(groups)
        if rank == 0:
            if not hub:
                check_disk(out, 0, total / 2 - 2 * kept)
            if left and not (work / "tokenizer.json").exists():
                text = (Path(config.tokenizer).read_text(encoding="utf-8") if config.tokenizer else train_tokenizer(
                    sample_texts(paths, settings, total, 1.0 if demo else 1 / 20), settings["vocab_size"]))
                with atomic_file(work / "tokenizer.json", "w") as f:
                    f.write(text)
            if kept:
                print(f"continuing: {kept:,} tokens of {sum(shard.state['rows'] for shard in shards):,} rows are kept",
                      file=sys.stderr, flush=True)
        share()
        encode_shards([shards[k] for k in mine], [paths[k] for k in mine], settings, work / "tokenizer.json", total,
                      workers, drop=hub and not config.keep_parquet)
        share()
        if rank == 0:
            finish(out, work, plan, [Shard(work, k) for k in range(len(files))])
    finally:
        os.close(lock)


def check_disk(out: Path, download: float, bins: float) -> None:
    """Raise BadInput unless `out` has room for that many bytes of parquet and of token ids."""
    free, need = shutil.disk_usage(out).free, download + max(0, bins)
    if need > free:
        raise BadInput(f"{out} needs about {need / 1e9:.3f} GB more ({download / 1e9:.3f} to download, "
                       f"{max(0, bins) / 1e9:.3f} of token ids), and {free / 1e9:.3f} GB are free")


def benchmark(root: Path, settings: dict, tokenizer: str | None, workers: int) -> None:
    """Print the rate of the whole way from parquet to bins, the tokenizer's own on the same text, and peak memory."""
    import resource
    import tempfile
    files = parquet_files(root, settings["shards"])
    paths = [root / f["path"] if root.is_dir() else root for f in files]
    total = sum(sum(open_parquet(path, settings["text_column"])[1]) for path in paths)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(tokenizer or f"{folder}/tokenizer.json")
        if not tokenizer:
            sample = sample_texts(paths, settings, total, 1 / 20)
            made.write_text(train_tokenizer(sample, settings["vocab_size"]), encoding="utf-8")
        shards, start = [Shard(Path(folder), k) for k in range(len(paths))], time.perf_counter()
        encode_shards(shards, paths, settings, made, total, workers)
        seconds, raw = time.perf_counter() - start, 0.0
        scale = 2**20 if sys.platform == "darwin" else 2**10
        usage = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        memory = [used.ru_maxrss / scale for used in usage]
        plain = load_tokenizer(made)
        for path in paths:
            for _, documents in read_documents(path, settings["text_column"]):
                texts = [d.decode(errors="replace") for d in documents if d]
                start = time.perf_counter()
                plain.encode_batch_fast(texts, add_special_tokens=False)
                raw += time.perf_counter() - start
    documents, tokens, size = (sum(sum(s.state[key]) for s in shards) for key in ("documents", "tokens", "bytes"))
    print(f"parquet to bins, {workers} workers: {documents / seconds:,.0f} documents/s, {size / seconds / 1e6:.1f} "
          f"MB/s, {tokens / seconds / 1e6:.2f} M tokens/s ({size / 1e6:.0f} MB, {seconds:.1f} s)")
    print(f"encode_batch_fast alone, all threads: {size / raw / 1e6:.1f} MB/s; ours is {raw / seconds:.2f} times that")
    print(f"peak memory: {memory[0]:,.0f} MB, and {memory[1]:,.0f} MB the largest worker")


def main(argv: list[str], distributed: bool = False) -> None:
    prepare(parse_flags(Config, argv, __doc__), distributed)


if __name__ == "__main__":
    run_script(lambda argv: main(argv, distributed=True))
