"""Turn text into train.bin, val.bin and test.bin, and hold what every script shares.

    python prepare.py --source=demo                          # the bundled novels, a few seconds
    python prepare.py                                        # FineWeb-Edu sample/10BT, as in the paper
    python prepare.py --shards=3                             # as much of it as a full S or M run reads
    python prepare.py --source=my.parquet --out=data/mine    # a .parquet, .jsonl or .jsonl.gz file, or a folder of them

FineWeb-Edu, by number of shards (time estimated for 2 and for 16 cores, without the download):
    shards   documents   tokens   download   disk at the end   time
         1      0.73 M   0.75 B     2.2 GB            3.7 GB   4 min, 1 min
         3      2.19 M   2.26 B     6.5 GB             11 GB   12 min, 3 min
        14      9.67 M   9.99 B    28.5 GB             49 GB   50 min, 10 min

It may be killed at any moment: the same command continues, and the bytes written are the same. Of a folder, files and
folders whose names begin with . or _ are left out, and a file that links reach twice is read once. A source counts as
changed when its size or its time of change is another than at the start.
"""
from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import difflib
import errno
import fcntl
import functools
import glob
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import struct
import sys
import textwrap
import threading
import time
import typing
import zlib
from pathlib import Path

from tqdm import tqdm

# ---------------------------------------------------------------------------------------------------------
# Shared by every script: errors of one line, typed flags, writes that cannot be half done, progress


class BadInput(Exception):
    """What the user gave cannot be used: one clear line (or one per problem) on stderr, exit code 2."""


class Failed(Exception):
    """The work ran and failed: one line on stderr, exit code 1."""


def run_script(main: typing.Callable[[list[str]], int | None]) -> typing.NoReturn:
    """Call `main(argv)` and turn what it raises into this project's exit codes (0, 1, 2, 130).

    An OSError of the system (a full disk, a file that may not be read) is one line and 2; one without a number is a
    library's own sentence, a bug until proven otherwise. Text that a terminal cannot show comes out escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
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
        if e.errno is None:
            raise
        where = f" ({e.filename})" if e.filename else ""
        advice = ": free some space, then run the same command again" if e.errno in DISK_FULL else ""
        print(f"error: {os.strerror(e.errno)}{where}{advice}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        code = 130
    sys.exit(code)


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def flag(default, help: str, choices=None, least=None, most=None, **more):
    """A dataclass field that is a command-line flag; its type annotation is the flag's type. `choices`, or the bounds
    `least` and `most`, both inclusive, are checked where flags are parsed, and `path=True` turns ~ into the home
    folder there; the rest of `more` is for whoever reads the field's metadata."""
    return dataclasses.field(default=default, metadata=dict(help=help, choices=choices, least=least, most=most, **more))


def out_of_bounds(value, metadata: typing.Mapping) -> str | None:
    """What is wrong with a number by a field's `least` and `most`, None where nothing is."""
    least, most = metadata.get("least"), metadata.get("most")
    if (least is None or value >= least) and (most is None or value <= most):
        return None
    if least is not None and most is not None:
        return f"must lie between {least:g} and {most:g}"
    return f"must be at least {least:g}" if most is None else f"must be at most {most:g}"


def did_you_mean(word: str, known: typing.Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def convert(text: str, kind: type, metadata: typing.Mapping):
    """`text` as a bool, int, float or str, held to a flag's metadata. Raises ValueError."""
    if kind is bool:
        if text.lower() not in BOOLEANS:
            raise ValueError("wants true or false")
        return BOOLEANS[text.lower()]
    value = text
    if kind in (int, float):
        try:
            value = kind(float(text)) if kind is float or not text.lstrip("+-").isdecimal() else int(text)
            if not math.isfinite(value) or kind is int and value != float(text):
                raise ValueError
        except (ValueError, OverflowError):  # a whole number may be written 1e3
            raise ValueError(f"wants a {'whole' if kind is int else 'finite'} number") from None
        if wrong := out_of_bounds(value, metadata):
            raise ValueError(wrong)
    elif text.encode(errors="replace").decode() != text:
        raise ValueError("is not UTF-8")
    choices = metadata.get("choices")
    if choices and value not in choices:
        raise ValueError(f"wants one of {', '.join(map(str, choices))}{did_you_mean(text, map(str, choices))}")
    return os.path.expanduser(value) if metadata.get("path") else value


def parse_flags(cls, argv: list[str], doc: str, positional: str | None = None, lists: bool = False):
    """Fill the dataclass `cls` from `argv`; with `lists`, a comma list in any flag makes one instance per value.

    Flags are `--name=value` or `--name value`; booleans also `--name` and `--no-name`. `positional` names the
    field (a list of str) that takes the arguments without a flag. Returns an instance, or with `lists` the list
    of instances, the first flag on the command line varying slowest. Raises BadInput naming every problem.
    """
    fields, kinds = {f.name: f for f in dataclasses.fields(cls)}, typing.get_type_hints(cls)
    for name, hint in kinds.items():  # `int | None` is an int that may be left out
        kinds[name] = next((kind for kind in typing.get_args(hint) if kind is not type(None)), hint)
    given, words, problems, rest = {}, [], [], list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        if word in ("-h", "--help"):
            print_help(fields, kinds, positional, doc)
        if not word.startswith("-"):
            words.append(word)
        elif name.startswith("no-") and kinds.get(name[3:]) is bool and not equals:
            given[name[3:]] = "false"
        elif name not in fields or name == positional:
            flag = word.split("=")[0]
            problems.append(f"unknown flag {flag}" + did_you_mean(flag, [f"--{known}" for known in fields]))
        elif equals:
            given[name] = text
        elif kinds[name] is bool:  # takes the next word only if that is true, false, 0, 1 and so on
            given[name] = rest.pop(0) if rest and rest[0].lower() in BOOLEANS else "true"
        elif rest and not rest[0].startswith("--"):
            given[name] = rest.pop(0)
        else:
            problems.append(f"--{name} needs a value, as in --{name}={fields[name].default or 'VALUE'}")

    values = {}
    for name, whole in given.items():
        values[name] = []
        for text in [text.strip() for text in whole.split(",")] if lists else [whole]:
            try:
                if whole and not text:
                    raise ValueError("has an empty place in its list")
                values[name].append(convert(text, kinds[name], fields[name].metadata))
            except ValueError as e:
                problems.append(f"--{name}={whole} {e}")
    if not positional:
        problems += [f"unexpected argument {word!r}: a flag is --name=value" for word in words]
    if problems:
        raise BadInput("\n".join(problems))
    fixed = {positional: [convert(word, str, fields[positional].metadata) for word in words]} if positional else {}
    made = [cls(**dict(zip(values, combination)), **fixed) for combination in itertools.product(*values.values())]
    return made if lists else made[0]


def print_help(fields: dict, kinds: dict, positional: str | None, doc: str) -> typing.NoReturn:
    """What -h says: `doc`, then each flag with its type, choices and default. Ends the script."""
    print(doc.strip(), end="\n\n")
    for name, f in fields.items():
        choices = f" ({' | '.join(map(str, f.metadata['choices']))})" if f.metadata.get("choices") else ""
        default = f" [{f.default}]" if f.default not in (None, dataclasses.MISSING) else ""
        usage = f"{name.upper()} ..." if name == positional else f"--{name}={kinds[name].__name__.upper()}"
        print(textwrap.fill(f"{usage:23} {f.metadata['help']}{choices}{default}", 100, subsequent_indent=24 * " ",
                            break_on_hyphens=False))
    sys.exit(0)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike, mode: str = "wb"):
    """Open `path` for writing so that it appears whole or not at all: temporary name, flush, fsync, rename.

    Two processes may write one file at once: each has a temporary name of its own, and the file is in the end one of
    theirs, whole. A writer holds a lock on its temporary file; what a killed one left has none and is removed here.
    """
    path = Path(path)
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with contextlib.suppress(OSError), open(left, "r+b") as f:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a live writer's raises BlockingIOError
            if time.time() - left.stat().st_mtime > 5:  # its writer had the time to lock it
                left.unlink()
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    text = {} if "b" in mode else {"encoding": "utf-8", "newline": "\n"}
    try:
        with open(temporary, mode, **text) as f:
            with contextlib.suppress(OSError):  # a file system without locks: nothing is removed there
                fcntl.flock(f, fcntl.LOCK_EX)
            yield f
            f.flush()
            os.fsync(f.fileno())
            os.replace(temporary, path)
        with contextlib.suppress(OSError):  # makes the rename survive a power cut, where a folder can be synced
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


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
    with open(path, "rb", buffering=0) as f, Progress(f"reading {path}", os.path.getsize(path), "B") as progress:
        while block := f.read(1 << 22):
            digest.update(block)
            progress.update(len(block))
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


class Progress(tqdm):
    """Progress of long work with its rate and the time left: a bar on a terminal once a second has passed, else a plain
    line every `every` seconds. Nothing of it goes to stdout. A context manager; `update(n)` counts n more units."""
    monitor_interval = 0  # no thread that watches the bar

    def __init__(self, label: str, total: int | None, unit: str, every: float = 15.0, scale: bool = True,
                 initial: int = 0):
        self.plain, self.every, self.last = not sys.stderr.isatty(), every, time.monotonic()
        look = {"delay": math.inf, "bar_format": "{desc}: {n_fmt} of {total_fmt} {unit}, {rate_fmt}, {remaining} left"
                                                 "{postfix}"} if self.plain else {"delay": 1, "dynamic_ncols": True}
        super().__init__(desc=label, total=total, unit=unit, unit_scale=scale, initial=initial, **look)

    def update(self, n: int, note: str = "") -> None:
        self.set_postfix_str(note, refresh=False)
        super().update(n)
        if self.plain and time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            print(self, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------
# A finished data folder, as the other scripts read it

SPLITS = ("train", "val", "test")


@dataclasses.dataclass
class DataFolder:
    """A data folder that `open_data` found whole. Its bins stay open: what `tokens` gives is what was opened, even when
    another process replaces the folder's files meanwhile, which `check` notices."""
    path: Path
    meta: dict
    fingerprint: str
    vocab_size: int
    eos_id: int
    bins: dict[str, typing.BinaryIO] = dataclasses.field(repr=False)

    def tokens(self, split: str):
        """uint16 [tokens of the split], read-only; a new memory map each call, so that its pages can be let go."""
        import numpy as np
        bin = self.bins[split]
        return np.memmap(bin, dtype="<u2", mode="r") if os.fstat(bin.fileno()).st_size else np.empty(0, dtype="<u2")

    def check(self) -> None:
        """Raise BadInput when the folder now holds another data set, or a bin was written into, since it was opened.
        Cheap: a bin is read again only if its size or time of change is another; the same bytes are no change."""
        now = read_json(self.path / "meta.json").get("fingerprint")
        if now != self.fingerprint:
            raise BadInput(f"{self.path} was prepared anew while it was in use (fingerprint {self.fingerprint} then, "
                           f"{now} now)")
        for bin in open_data(self.path, self.bins).bins.values():
            bin.close()

    def tokenizer(self):
        return load_tokenizer(self.path / "tokenizer.json")

    def token_bytes(self):
        """int64 [vocab_size]: UTF-8 bytes of each token id; 0 for the special ids and for those never used."""
        import numpy as np
        tokenizer, sizes = self.tokenizer(), np.zeros(self.vocab_size, dtype=np.int64)
        added = tokenizer.get_added_tokens_decoder()
        for token, i in tokenizer.get_vocab(with_added_tokens=True).items():
            if i not in added:
                sizes[i] = len(token)  # the byte-level alphabet writes each byte as one character
            elif not added[i].special:
                sizes[i] = len(token.encode())  # an added token is written as it is
        return sizes


def fingerprint_of(meta: dict) -> str:
    """Changes whenever a token would: a hash of the vocabulary's size, the end-of-text id, and the files' hashes."""
    identity = [meta["vocab_size"], meta["eos_id"], meta["tokenizer_sha256"],
                *(meta["splits"][split]["sha256"] for split in SPLITS)]
    return hashlib.sha256(to_json(identity).encode()).hexdigest()[:16]


def wrong_meta(meta: dict) -> str | None:
    """What in meta.json does not fit the rest of it, None where all does."""
    try:
        numbers = {key: meta[key] for key in ("vocab_size", "eos_id")}
        for split in SPLITS:
            numbers |= {f"{split}.{key}": meta["splits"][split][key] for key in ("documents", "tokens", "bytes")}
        fingerprint = fingerprint_of(meta)
    except (KeyError, TypeError, ValueError):
        return "has no entry for a split, or one of the wrong kind"
    for key, value in numbers.items():
        if type(value) is not int or value < 0:
            return f"says {key} = {value!r}"
    if not meta["eos_id"] < meta["vocab_size"] <= MOST_IDS:
        return f"says vocab_size = {meta['vocab_size']}, eos_id = {meta['eos_id']}"
    if meta.get("fingerprint") != fingerprint:
        return f"says fingerprint = {meta.get('fingerprint')!r}, and its other entries give {fingerprint}"
    return None


def open_data(folder: str | os.PathLike, splits: typing.Iterable[str] = ("train", "val"),
              verify: bool = True) -> DataFolder:
    """The data folder `folder`, once meta.json fits itself, and the tokenizer and the bins of `splits` are those that
    it describes: sizes each time, hashes once for each state of a file (with `verify=False`, sizes only).

    Raises BadInput that names what is wrong and the command that puts it right.
    """
    folder, bins = Path(folder), {}
    command = f"run python prepare.py --source={folder.name if folder.name in ('demo', HUB) else 'PATH'} --out={folder}"
    if not (folder / "meta.json").is_file():
        if (folder / ".work").is_dir():
            raise BadInput(f"{folder} is not finished: continue it with the command that began it ({command[4:]})")
        what = "has no meta.json" if folder.is_dir() else "is no folder" if folder.exists() else "does not exist"
        raise BadInput(f"{folder} {what}: {command}")
    meta = read_json(folder / "meta.json")
    if wrong := wrong_meta(meta):
        raise BadInput(f"{folder}/meta.json {wrong}: {command} --overwrite")
    for name in ("tokenizer", *splits):
        path = folder / ("tokenizer.json" if name == "tokenizer" else f"{name}.bin")
        if not path.is_file():
            raise BadInput(f"{path} is missing: {command} --overwrite")
        sha256 = meta["tokenizer_sha256"]
        if name in SPLITS:
            sha256, size = meta["splits"][name]["sha256"], 2 * meta["splits"][name]["tokens"]
            bins[name] = open(path, "rb")
            if (found := os.fstat(bins[name].fileno()).st_size) != size:
                raise BadInput(f"{path} holds {found:,} bytes where meta.json says {size:,}: {command} --overwrite")
        if verify and not verified(path, sha256):
            raise BadInput(f"{path} is not the file that meta.json describes (another sha256): {command} --overwrite")
    ids = load_tokenizer(folder / "tokenizer.json").get_vocab(with_added_tokens=True).values()
    if max(ids) >= meta["vocab_size"] or meta["eos_id"] not in ids:
        raise BadInput(f"{folder}/meta.json says vocab_size = {meta['vocab_size']}, eos_id = {meta['eos_id']}, and its "
                       f"tokenizer has other ids: {command} --overwrite")
    return DataFolder(folder, meta, meta["fingerprint"], meta["vocab_size"], meta["eos_id"], bins)


def state_of(path: Path) -> list[int]:
    """By what a file is known to be unchanged: its size in bytes and its time of change in nanoseconds."""
    return [path.stat().st_size, path.stat().st_mtime_ns]


def verified(path: Path, sha256: str) -> bool:
    """Whether `path` has this hash. `.verified.json` beside it remembers what was read, at which size and time of
    change, so that a file is read again only when one of them is another."""
    memory, known = path.with_name(".verified.json"), {}
    with contextlib.suppress(BadInput):
        known = read_json(memory)
    if known.get(path.name) != [sha256, *state_of(path)]:
        if sha256_of(path) != sha256:
            return False
        with contextlib.suppress(OSError):  # a folder that cannot be written is read in full each time
            write_json(memory, known | {path.name: [sha256, *state_of(path)]})
    return True


# ---------------------------------------------------------------------------------------------------------
# Splits, tokenizer, encoder

SPECIALS = ("<|pad|>", "<|unk|>", "<|bos|>", "<|eos|>")  # ids 0 to 3
MOST_IDS = 1 << 16  # what 16 bits hold


def split_of(document: bytes, salt: str, val_fraction: float, test_fraction: float) -> int:
    """0, 1 or 2 (train, val, test) by u = BLAKE2b-64(document, salt) / 2^64, the hash read big-endian."""
    u = int.from_bytes(hashlib.blake2b(document, digest_size=8, salt=salt.encode()).digest(), "big") / 2**64
    if u < round(1 - val_fraction - test_fraction, 12):
        return 0
    return 1 if u < round(1 - test_fraction, 12) else 2


def in_sample(document: bytes, salt: str, fraction: float) -> bool:
    """Whether a train document trains the tokenizer: by a second hash, with a personalisation of its own."""
    h = hashlib.blake2b(document, digest_size=8, salt=salt.encode(), person=b"tokenizer").digest()
    return int.from_bytes(h, "big") / 2**64 < fraction


def load_tokenizer(path: str | os.PathLike):
    """The tokenizers.Tokenizer in `path`, set so that the same text gives the same ids: text which looks like a special
    token stays text (a setting that tokenizer.json does not keep), nothing is cut or padded, no merge is dropped at
    random. Raises BadInput."""
    from tokenizers import Tokenizer, decoders
    try:
        tokenizer = Tokenizer.from_str(Path(path).read_text(encoding="utf-8"))
    except Exception as e:  # the library raises plain Exception for whatever it cannot read
        raise BadInput(f"{path} cannot be read as a tokenizer.json ({e})") from None
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    if tokenizer.decoder is None:
        tokenizer.decoder = decoders.ByteLevel()
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


PROBE = "The cat\tDIDN'T  na\u00efve \u4e16\u754c \U0001f600\u03a9mega 1984;\r\n\n  \x00\x7f \u00a0end "


def check_tokenizer(path: Path) -> tuple[int, int]:
    """(size of the vocabulary, id of the end of text) of a tokenizer that was made before. Raises BadInput unless each
    text comes back from it and none becomes the end of text."""
    from tokenizers import pre_tokenizers
    tokenizer, beside = load_tokenizer(path), path.with_name("meta.json")
    ids, added = tokenizer.get_vocab(with_added_tokens=True), tokenizer.get_added_tokens_decoder()
    lost = set(pre_tokenizers.ByteLevel.alphabet()) - ids.keys()
    if lost:
        raise BadInput(f"--tokenizer={path} is not byte-level or lacks {len(lost)} of the 256 bytes: it loses text")
    end = next((token for token in (SPECIALS[3], "<|endoftext|>", "</s>", "<eos>") if token in ids), None)
    if end is None:
        raise BadInput(f"--tokenizer={path} has no end-of-text token, such as {SPECIALS[3]} or <|endoftext|>")
    merges = json.loads(tokenizer.to_str())["model"].get("merges", ())
    merged = {merge.replace(" ", "") if isinstance(merge, str) else "".join(merge) for merge in merges}
    if ids[end] not in added or not added[ids[end]].special or end in merged:
        raise BadInput(f"--tokenizer={path}: text can become its end of text, {end}: that must be a special token")
    back = tokenizer.decode(tokenizer.encode(PROBE + end, add_special_tokens=False).ids, skip_special_tokens=True)
    if back.removeprefix(" ") != PROBE + end:
        raise BadInput(f"--tokenizer={path} does not give back the text that it was given")
    size = max(ids.values()) + 1
    if beside.is_file() and read_json(beside).get("tokenizer_sha256") == sha256_of(path):
        size = read_json(beside)["vocab_size"]  # ids that stayed unused there count too
    if size > MOST_IDS:
        raise BadInput(f"--tokenizer={path} has {size:,} ids, added tokens included, and 16 bits hold {MOST_IDS:,}")
    return size, ids[end]


class Encoder(dict):
    """Encodes documents exactly as their tokenizer does, and faster: a memo, piece of text -> its ids as bytes.

    GPT-2's rule, by which byte-level tokenizers cut text into words, cuts before a space that a character other than
    white space follows, and between an ASCII letter and white space or punctuation. So does PIECE, nowhere else: what
    lies between goes to the tokenizer as a whole. A tokenizer of another make than ours gets each document uncut.
    """
    PIECE = re.compile(r" ?[A-Za-z]+(?=[ ,.;:!?\n])|(?s:.+?)(?= \S|\Z)")
    MOST, LONG = 1 << 18, 64  # pieces remembered (some 60 MB); a longer piece is not worth remembering

    def __init__(self, path: str | os.PathLike, eos_id: int):
        self.tokenizer, self.eos = load_tokenizer(path), struct.pack("<H", eos_id)
        made = json.loads(self.tokenizer.to_str())
        pre = made["pre_tokenizer"] or {}
        self.fast = (made["model"]["type"] == "BPE" and not made["normalizer"] and pre.get("type") == "ByteLevel"
                     and pre.get("use_regex", True) and not pre["add_prefix_space"]
                     and all(token["special"] for token in made["added_tokens"]))

    def __missing__(self, piece: str) -> bytes:
        ids = self.tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0].ids
        made = struct.pack(f"<{len(ids)}H", *ids)  # an id that does not fit raises: nothing wraps
        if len(piece) <= self.LONG:
            if len(self) >= self.MOST:
                self.clear()
            self[piece] = made
        return made

    def encode(self, document: str) -> bytes:
        """uint16, little-endian: the ids of a document, and the end of text after them."""
        pieces = self.PIECE.findall(document) if self.fast else [document]
        return b"".join([*map(self.__getitem__, pieces), self.eos])


# ---------------------------------------------------------------------------------------------------------
# Sources: parquet and JSONL, read in parts

BATCH_BYTES = 1 << 22  # of text that is at hand at a time
PART_BYTES = 1 << 26  # of text that a worker encodes at a time, and that a kill costs
WORKER_BYTES = 1 << 23  # of text, for which a worker process is worth starting
JSONL = (".jsonl", ".jsonl.gz")


class Part(typing.NamedTuple):
    """Row groups first to last - 1 of one parquet file, or a whole JSONL file."""
    name: str
    path: Path
    first: int
    last: int
    size: int  # bytes of text, about
    state: list  # state_of the file when the build began


def walk(folder: Path, met: set[str]) -> typing.Iterator[Path]:
    """The parquet and JSONL files under `folder`, each real one once; what is left out for a reason is said."""
    for path in sorted(folder.iterdir()):
        real = os.path.realpath(path)
        if path.name.startswith("."):
            continue
        if path.name.startswith("_") or real in met:
            why = "its name begins with _" if path.name.startswith("_") else f"it is another name of {real}"
            print(f"note: {path} is not read: {why}", file=sys.stderr)
            continue
        met.add(real)
        if path.is_dir():
            yield from walk(path, met)
        elif path.name.endswith((".parquet", *JSONL)):
            yield path


def source_files(source: Path, limit: int | None) -> list[dict]:
    """The files under `source` (or itself), sorted by path, each with its size and time of change. Raises BadInput."""
    if not source.exists():
        raise BadInput(f"--source={source}: no such file or folder{did_you_mean(str(source), ('demo', HUB))}")
    found = {source.name: source}
    if source.is_dir():
        found = {path.relative_to(source).as_posix(): path for path in walk(source, {os.path.realpath(source)})}
    files = []
    for name, path in sorted(found.items())[:limit]:
        if name.encode(errors="replace").decode() != name:
            raise BadInput(f"{ascii(str(path))}: this name is not UTF-8: rename it")
        if not path.is_file():
            raise BadInput(f"{path} is no regular file")
        size, mtime_ns = state_of(path)
        files.append({"path": name, "size": size, "mtime_ns": mtime_ns})
    if not files:
        raise BadInput(f"--source={source}: no parquet file there, and no JSONL")
    return files


def parts_of(paths: list[Path], column: str) -> list[Part]:
    """All parts of the source, in order. Raises BadInput naming each file that cannot be read."""
    parts, problems = [], []
    for k, path in enumerate(paths):
        try:
            if path.name.endswith(JSONL):
                next(read_jsonl(path, column), None)
                sizes = [path.stat().st_size]
            else:
                sizes = open_parquet(path, column)[1]
        except BadInput as e:
            problems.append(str(e))
            continue
        first = size = 0
        for group, group_bytes in enumerate(sizes, 1):
            size += group_bytes
            if group == len(sizes) or size + sizes[group] > PART_BYTES:
                parts.append(Part(f"{k:05}-{first:05}-{group:05}", path, first, group, size, state_of(path)))
                first, size = group, 0
    if problems:
        raise BadInput("\n".join(problems))
    return parts


def open_parquet(path: Path, column: str):
    """The pyarrow ParquetFile at `path`, found to hold text in `column`, and the uncompressed bytes of that column
    in each row group. Raises BadInput."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    with open(path, "rb") as f:
        start = f.read(8)
    if start == b"version ":
        raise BadInput(f"{path} is a Git LFS pointer, not the data: run git lfs pull")
    if start[:4] != b"PAR1":
        raise BadInput(f"{path} is {'not a parquet file' if start else 'empty'}")
    try:
        # without these two settings a whole row group is held, which may be of any size
        file = pq.ParquetFile(path, page_checksum_verification=True, buffer_size=1 << 20, pre_buffer=False)
        schema, footer = file.schema_arrow, file.metadata
    except (pa.ArrowException, OSError) as e:
        raise BadInput(f"{path} is cut off or damaged ({str(e).splitlines()[0]}): fetch it again") from None
    kinds = {f.name: str(f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema}
    texts = [name for name, kind in kinds.items() if kind in ("string", "large_string", "string_view")]
    if column not in texts and kinds.get(column) not in ("binary", "large_binary", "binary_view", "null"):
        what = f"holds {kinds[column]}, not text" if column in kinds else "is not there"
        raise BadInput(f"{path}: column {column!r} {what}: give --text_column (text: {', '.join(texts) or 'none'})")
    if schema.names.count(column) > 1:
        raise BadInput(f"{path}: column {column!r} is there twice")
    places = [i for i in range(footer.num_columns) if footer.schema.column(i).path == column]  # others may be encrypted
    return file, [sum(footer.row_group(group).column(i).total_uncompressed_size for i in places)
                  for group in range(footer.num_row_groups)]


def read_parquet(path: Path, column: str, first: int, last: int) -> typing.Iterator[bytes | None]:
    """The documents of row groups first to last - 1, page checksums verified, with about BATCH_BYTES of them at hand;
    a null is None. Raises BadInput where the file is damaged."""
    import pyarrow as pa
    file, sizes = open_parquet(path, column)
    row = 0
    try:
        for group in range(first, last):
            rows = file.metadata.row_group(group).num_rows
            at_once = max(1, min(1024, BATCH_BYTES * rows // max(1, sizes[group])))
            for batch in file.iter_batches(at_once, row_groups=[group], columns=[column]):
                values = batch.column(batch.schema.get_field_index(column))
                values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
                for document in values.cast(pa.large_binary()).to_pylist():
                    yield document
                    row, rows = row + 1, rows - 1
            if rows:
                raise OSError(f"{rows} more promised")
    except (pa.ArrowException, OSError) as e:
        raise BadInput(f"{path} is damaged after row {row} of row group {first} ({str(e).splitlines()[0]}): "
                       "fetch it again") from None


def read_jsonl(path: Path, column: str) -> typing.Iterator[bytes | None]:
    """The documents in `path`, a JSON object a line, of which only `column` is looked at: the first line must have it,
    elsewhere it may be missing or null. A lone surrogate comes as bytes that are not UTF-8. Raises BadInput."""
    number = 0
    try:
        with gzip.open(path) if path.name.endswith(".gz") else open(path, "rb") as f:
            for number, line in enumerate(f, 1):
                line = line.removeprefix(b"\xef\xbb\xbf").strip()
                if not line:
                    continue
                record = json.loads(line.decode(errors="surrogateescape"))
                if not isinstance(record, dict) or number == 1 and column not in record:
                    raise ValueError(f"an object with {column!r} is expected: see --text_column")
                if not isinstance(text := record.get(column), str | None):
                    raise ValueError(f"{column!r} is no text")
                yield text if text is None else text.encode(errors="surrogatepass")
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path}: line {number:,} cannot be used ({e})") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as e:
        raise BadInput(f"{path} is damaged after line {number:,} ({e}): fetch it again") from None


def read_documents(part: Part, column: str) -> typing.Iterator[bytes | None]:
    """The part's documents, in order, None for a null. Raises BadInput where the file is damaged or was changed."""
    if part.path.name.endswith(JSONL):
        yield from read_jsonl(part.path, column)
    else:
        yield from read_parquet(part.path, column, part.first, part.last)
    if state_of(part.path) != part.state:
        raise BadInput(f"{part.path} was changed while it was read: run the same command again")


# ---------------------------------------------------------------------------------------------------------
# The Hub

HUB = "fineweb-edu"
REPO = "HuggingFaceFW/fineweb-edu"
REVISION = "87f09149ef4734204d70ed1d046ddc9ca3f2b8f9"  # its sample/10BT: 14 files, 28,518,193,415 bytes
PATIENCE = (2, 10, 30, 60, 120)  # seconds between attempts, each of which is several of huggingface_hub's


def patiently(what: str, action: typing.Callable):
    """`action()`, tried again after what may pass: a dropped connection, too many requests, a fault of the server.
    Raises BadInput for what will not pass, Failed at the end of patience, and our own OSErrors as they are."""
    for wait in (*PATIENCE, None):
        try:
            return action()
        except Exception as e:  # the HTTP library below huggingface_hub has no fixed types: the status tells
            if type(e).__name__ == "LocalEntryNotFoundError" and e.__cause__:
                e = e.__cause__
            status = getattr(getattr(e, "response", None), "status_code", 0)
            why = str(e).partition("\n")[0] or type(e).__name__
            if getattr(e, "errno", None) in (*DISK_FULL, errno.EACCES, errno.EROFS):
                raise e from None
            if status in (401, 403):
                raise BadInput(f"{what}: the Hub refuses access ({status}, {why}): HF_TOKEN must be a token that may "
                               f"read https://huggingface.co/datasets/{REPO}") from None
            lasting = type(e).__name__ in ("TooManyRedirects", "OfflineModeIsEnabled")
            if lasting or 300 <= status < 500 and status not in (408, 429):
                raise BadInput(f"{what}: {why} (see --subset and --revision)") from None
            if wait is None:
                raise Failed(f"{what}: {why} ({len(PATIENCE) + 1} attempts; whole files are kept, this one begins "
                             "again: run the same command again)") from None
            print(f"{what}: {why}; again in {wait} s", file=sys.stderr, flush=True)
            time.sleep(wait)


def hub_files(subset: str, revision: str, limit: int | None) -> tuple[str, list[dict]]:
    """The commit that `revision` names, and its parquet files in `subset` with the Hub's sizes and hashes."""
    from huggingface_hub import HfApi, logging
    logging.set_verbosity_error()
    print(f"asking the Hub for the files in {subset}", file=sys.stderr, flush=True)
    if not re.fullmatch("[0-9a-f]{40}", revision):
        revision = patiently(f"revision {revision}", lambda: HfApi().dataset_info(REPO, revision=revision).sha)
    listed = patiently(f"listing {subset}", lambda: list(
        HfApi().list_repo_tree(REPO, subset, recursive=True, revision=revision, repo_type="dataset")))
    files = [{"path": f.path, "size": f.size, "sha256": f.lfs.sha256} for f in listed if f.path.endswith(".parquet")]
    for f in files:
        if f["path"].startswith("/") or ".." in f["path"].split("/") or "\\" in f["path"]:
            raise BadInput(f"the Hub's listing names {f['path']!r}, a place outside the folder: nothing was fetched")
    if not files:
        raise BadInput(f"--subset={subset}: no parquet file there")
    return revision, sorted(files, key=lambda f: f["path"])[:limit]


def fetch(files: list[dict], revision: str, folder: Path) -> None:
    """Bring `files` into `folder`, one at a time; each stays only with the Hub's hash."""
    import huggingface_hub as hub
    hub.constants.DOWNLOAD_CHUNK_SIZE = 1 << 14  # all that a connection which breaks may lose: each one gets further
    with Progress("downloading", sum(f["size"] for f in files), "B", every=0) as progress:
        for f in files:
            path = folder / f["path"]
            get = functools.partial(hub.hf_hub_download, REPO, f["path"], repo_type="dataset", revision=revision,
                                    local_dir=folder)
            for last in (False, False, True):
                if path.is_file() and verified(path, f["sha256"]):
                    break
                path.unlink(missing_ok=True)
                if last:
                    raise Failed(f"{f['path']} came twice with another sha256 than the Hub lists: it is not used")
                patiently(f["path"], get)
            progress.update(f["size"])


# ---------------------------------------------------------------------------------------------------------
# The work: plan, fetch, train the tokenizer, encode part by part, join


@dataclasses.dataclass
class Flags:
    source: str = flag(HUB, f"demo, {HUB}, or the path of a parquet or JSONL file or of a folder of them", path=True)
    out: str = flag(None, "folder to write; by default data/NAME", path=True)
    text_column: str = flag("text", "the column that holds the documents")
    vocab_size: int = flag(None, "entries of the tokenizer that is trained [32768; demo: 4096]", None, 260, MOST_IDS)
    tokenizer: str = flag(None, "encode with this tokenizer.json instead, so that corpora compare", path=True)
    val_fraction: float = flag(None, "share of the documents kept for validation [0.005; demo: 0.05]", None, 0, 1)
    test_fraction: float = flag(None, "share of the documents kept for test [0.005; demo: 0.05]", None, 0, 1)
    salt: str = flag("rd-attnres", "decides which document falls into which split; 16 bytes at most")
    workers: int = flag(None, "processes that encode [one a core]; the bytes written do not depend on it", least=1)
    shards: int = flag(None, "take the first N files only", least=1)
    subset: str = flag("sample/10BT", f"folder of {REPO}")
    revision: str = flag(REVISION, f"commit or branch of {REPO}")
    overwrite: bool = flag(False, "build again what --out holds from other settings")


def settings_of(flags: Flags) -> dict:
    """What decides the bytes to be written. Raises BadInput with every problem, before any work."""
    kind, hub, problems = flags.source if flags.source in ("demo", HUB) else "files", flags.source == HUB, []
    vocab_size, fraction = (4096, 0.05) if kind == "demo" else (32768, 0.005)
    vocab_size, eos_id, tokenizer = flags.vocab_size or vocab_size, SPECIALS.index("<|eos|>"), None
    val = fraction if flags.val_fraction is None else flags.val_fraction
    test = fraction if flags.test_fraction is None else flags.test_fraction
    if val + test >= 1:
        problems.append(f"--val_fraction={val} --test_fraction={test}: together below 1")
    if len(flags.salt.encode()) > 16:
        problems.append(f"--salt={flags.salt} is longer than 16 bytes")
    if flags.tokenizer:
        vocab_size, eos_id = check_tokenizer(Path(flags.tokenizer))
        tokenizer = sha256_of(flags.tokenizer)
        if flags.vocab_size not in (None, vocab_size):
            problems.append(f"--vocab_size={flags.vocab_size}: --tokenizer has {vocab_size}")
    if problems:
        raise BadInput("\n".join(problems))
    return {"source": kind, "text_column": flags.text_column, "subset": flags.subset.strip("/") if hub else None,
            "revision": flags.revision if hub else None, "shards": flags.shards, "salt": flags.salt,
            "val_fraction": val, "test_fraction": test, "vocab_size": vocab_size, "eos_id": eos_id,
            "tokenizer": tokenizer}


def find_plan(out: Path, settings: dict, files: list[dict] | None, overwrite: bool) -> dict | None:
    """What is being made (.work/plan.json) or was made (meta.json) in `out`, when it is of these settings and files;
    None when a new build may begin. Raises BadInput when `out` holds anything else."""
    finished, problem = (out / "meta.json").exists(), None
    path = out / ("meta.json" if finished else ".work/plan.json")
    if finished and overwrite:
        return None
    if path.exists():
        plan = read_json(path)
        listed = plan.get("files", [])
        then = plan.get("settings", {}) | {f["path"]: f for f in listed}
        now = settings | {f["path"]: f for f in (listed if files is None else files)}
        differ = [f"{key} is {then.get(key)} there and {now.get(key)} here" for key in (then | now)
                  if then.get(key) != now.get(key)]
        if not differ:
            return plan
        problem = f"was made otherwise: {'; '.join(differ)}"
    elif any((out / f"{split}.bin").exists() for split in SPLITS):
        problem = "holds bins without a meta.json"
    if problem and not overwrite:
        raise BadInput(f"{out} {problem}: give --overwrite to make it anew, or another --out")
    return None


def sample_texts(parts: list[Part], settings: dict, fraction: float) -> typing.Iterator[str]:
    """The train documents that train the tokenizer."""
    rule = [settings[key] for key in ("salt", "val_fraction", "test_fraction")]
    n = size = 0
    with Progress("choosing text for the tokenizer", sum(part.size for part in parts), "B") as progress:
        for raw in (raw for part in parts for raw in read_documents(part, settings["text_column"])):
            progress.update(len(raw or b""))
            if raw and in_sample(raw, settings["salt"], fraction) and split_of(raw, *rule) == 0:
                with contextlib.suppress(UnicodeDecodeError):
                    yield raw.decode()
                    n, size = n + 1, size + len(raw)
    print(f"tokenizer: learning from {n:,} train documents, {size:,} bytes", file=sys.stderr, flush=True)
    if n == 0 and fraction < 1:  # a corpus of a few documents
        yield from sample_texts(parts, settings, 1.0)


encoder_of = functools.lru_cache(maxsize=1)(Encoder)  # one for all parts of a process: its memo grows with them


def make_part(part: Part, work: Path, settings: dict) -> int:
    """Write the part's three bins and, last, its counts. Returns its size."""
    encoder = encoder_of(work / "tokenizer.json", settings["eos_id"])
    rule = [settings[key] for key in ("salt", "val_fraction", "test_fraction")]
    counts = {split: {"documents": 0, "tokens": 0, "bytes": 0} for split in SPLITS}
    skipped = counts["skipped"] = {"null": 0, "empty": 0, "not UTF-8": 0}
    with contextlib.ExitStack() as stack:
        bins = {split: stack.enter_context(atomic_file(work / f"{part.name}.{split}")) for split in SPLITS}
        for raw in read_documents(part, settings["text_column"]):
            if not raw:
                skipped["null" if raw is None else "empty"] += 1
                continue
            try:
                ids = encoder.encode(raw.decode())
            except UnicodeDecodeError:
                skipped["not UTF-8"] += 1
                continue
            split = SPLITS[split_of(raw, *rule)]
            bins[split].write(ids)
            counts[split]["documents"] += 1
            counts[split]["tokens"] += len(ids) // 2
            counts[split]["bytes"] += len(raw)
    write_json(work / f"{part.name}.json", counts)
    return part.size


def start_worker() -> None:
    """A worker ends with its parent, and has one thread."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def encode_parts(parts: list[Part], work: Path, settings: dict, workers: int) -> None:
    """Make `parts`. A kill costs those at hand."""
    total = sum(part.size for part in parts)
    workers = min(workers, len(parts), total // WORKER_BYTES)
    encoder_of.cache_clear()  # of another build in this process
    with Progress("encoding", total, "B") as progress:
        if workers < 2:
            for part in parts:
                progress.update(make_part(part, work, settings))
            return
        pool = concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), start_worker)
        try:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which the workers inherit: Ctrl-C is ours
            made = [pool.submit(make_part, part, work, settings) for part in parts]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            for future in concurrent.futures.as_completed(made):
                progress.update(future.result())
        except concurrent.futures.BrokenExecutor:
            raise Failed("a worker process died, killed perhaps for lack of memory; finished parts are kept: run the "
                         f"same command again, with --workers={workers // 2}") from None
        finally:
            pool.shutdown(cancel_futures=True)


def join(parts: list[Part], counts: list[dict], work: Path, out: Path) -> None:
    """Copy the parts' bins to their places in the whole ones, in order; each goes once it is safe there. Whatever a
    kill left half copied is written again, the same bytes in the same place."""
    for split in SPLITS:
        at = 0
        (out / f"{split}.bin").touch()
        with open(out / f"{split}.bin", "r+b") as whole:
            for part, made in zip(parts, counts):
                piece = work / f"{part.name}.{split}"
                if piece.exists():
                    whole.seek(at)
                    with open(piece, "rb") as f:
                        shutil.copyfileobj(f, whole, 1 << 20)
                    whole.flush()
                    os.fsync(whole.fileno())
                    piece.unlink()
                at += 2 * made[split]["tokens"]


def describe(counts: list[dict], out: Path, plan: dict, source: str) -> dict:
    """meta.json of the joined bins. Raises Failed when they do not hold what was counted."""
    settings = plan["settings"]
    total = {group: {key: sum(made[group][key] for made in counts) for key in counts[0][group]} for group in counts[0]}
    skipped = total.pop("skipped")
    for split in SPLITS:
        path, size = out / f"{split}.bin", 2 * total[split]["tokens"]
        if path.stat().st_size != size:
            raise Failed(f"{path} holds {path.stat().st_size:,} bytes, {size:,} were made: give --overwrite")
        total[split]["sha256"] = sha256_of(path)
    kept = sum(total[split]["documents"] for split in SPLITS)
    unused = settings["vocab_size"] - load_tokenizer(out / "tokenizer.json").get_vocab_size()
    meta = {**{key: settings[key] for key in ("vocab_size", "eos_id", "salt")}, "source": source,
            "tokenizer_sha256": sha256_of(out / "tokenizer.json"), "splits": total,
            "report": {"rows": kept + sum(skipped.values()), "kept": kept, "skipped": skipped, "unused_ids": unused}}
    return {"fingerprint": fingerprint_of(meta), **meta, **plan}


def report(out: Path, meta: dict) -> None:
    facts = meta["report"]
    skipped = ", ".join(f"{n:,} {why}" for why, n in facts["skipped"].items())
    print(f"{out}: {facts['rows']:,} documents read, {facts['kept']:,} kept; skipped: {skipped}")
    print(f"{'split':5} {'documents':>12} {'tokens':>15} {'bytes':>15} {'bytes/token':>11}")
    for split, s in meta["splits"].items():
        rate = s["bytes"] / max(1, s["tokens"])
        print(f"{split:5} {s['documents']:12,} {s['tokens']:15,} {s['bytes']:15,} {rate:11.2f}")
        if not s["documents"]:
            print(f"warning: {split} is empty: train.py and eval.py will refuse to use it")
    print(f"vocabulary {meta['vocab_size']:,} ids, {facts['unused_ids']:,} of them never used; "
          f"fingerprint {meta['fingerprint']}")


def check_disk(out: Path, download: float, bins: float) -> None:
    """Raise OSError unless `out` has room for that many bytes of parquet and of token ids."""
    free, need = shutil.disk_usage(out).free, download + bins
    if need > free:
        raise OSError(errno.ENOSPC, "", f"{out} needs about {need / 1e9:.3f} GB more, {download / 1e9:.3f} to download "
                      f"and {bins / 1e9:.3f} of token ids; {free / 1e9:.3f} GB are free")


def build(flags: Flags, plan: dict, out: Path, root: Path) -> None:
    """From a plan to a finished folder, or on from where the last build was killed; meta.json comes last."""
    work, settings, files = out / ".work", plan["settings"], plan["files"]
    paths = [root / f["path"] for f in files]
    if settings["source"] == HUB:
        size, here = sum(f["size"] for f in files), sum(path.stat().st_size for path in paths if path.exists())
        print(f"{len(files)} shards, {size / 1e9:.1f} GB of parquet: about {size * 0.339e-9:.2f} M documents, "
              f"{size * 0.35034e-9:.2f} B tokens, {size * 1.7007e-9:.1f} GB on disk in the end", flush=True)
        check_disk(out, size - here, size * 0.7007)
        fetch(files, plan["revision"], root)
    parts = parts_of(paths, settings["text_column"])
    left = [part for part in parts if not (work / f"{part.name}.json").exists()]
    check_disk(out, 0, sum(part.size for part in left) / 2)
    if not (work / "tokenizer.json").exists():
        if flags.tokenizer:
            text = Path(flags.tokenizer).read_text(encoding="utf-8")
        else:
            fraction = 1.0 if settings["source"] == "demo" else 1 / 20
            text = train_tokenizer(sample_texts(parts, settings, fraction), settings["vocab_size"])
        with atomic_file(work / "tokenizer.json", "w") as f:
            f.write(text)
    if len(left) < len(parts):
        print(f"continuing: {len(parts) - len(left)} of {len(parts)} parts are made", file=sys.stderr, flush=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    encode_parts(left, work, settings, flags.workers or cores)
    counts = [read_json(work / f"{part.name}.json") for part in parts]
    if not any(made[split]["documents"] for made in counts for split in SPLITS):
        raise BadInput("no document in the source that is neither null nor empty, and is UTF-8")
    join(parts, counts, work, out)
    with atomic_file(out / "tokenizer.json") as f:
        f.write((work / "tokenizer.json").read_bytes())
    write_json(out / "meta.json", describe(counts, out, plan, flags.source))


@contextlib.contextmanager
def held(out: Path):
    """Hold the folder `out`, made if need be, against other prepare.py, which wait; one that stays empty is removed."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / ".lock", "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another prepare.py is at work in {out}: waiting until it ends", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            if os.listdir(out) == [".lock"]:
                shutil.rmtree(out)


def prepare(flags: Flags) -> None:
    """Make the data folder that `flags` ask for, or continue it. Raises BadInput and Failed."""
    settings, root, files, revision = settings_of(flags), Path(flags.source), None, None
    if settings["source"] == "demo":
        root = Path(__file__).resolve().parent / "data" / "austen.parquet"
    out = Path(flags.out or f"data/{root.resolve().stem if settings['source'] == 'files' else flags.source}")
    work = out / ".work"
    if settings["source"] == HUB:
        root = out / "parquet"
    else:  # a source that is refused leaves no folder behind
        files = source_files(root, flags.shards)
        root = root if root.is_dir() else root.parent
        parts_of([root / f["path"] for f in files], flags.text_column)
    with held(out):
        plan = find_plan(out, settings, files, flags.overwrite)
        if plan and (out / "meta.json").exists():
            open_data(out, SPLITS)
            shutil.rmtree(work, ignore_errors=True)
            print(f"{out} is finished already, with these settings: nothing to do")
            return
        if plan is None:
            if files is None:
                revision, files = hub_files(settings["subset"], settings["revision"], flags.shards)
            shutil.rmtree(work, ignore_errors=True)
            for name in ("meta.json", *(f"{split}.bin" for split in SPLITS)):  # unlinked: a run that reads them goes on
                (out / name).unlink(missing_ok=True)
            work.mkdir()
            plan = {"settings": settings, "revision": revision, "files": files}
            write_json(work / "plan.json", plan)
        try:
            build(flags, plan, out, root)
        except BadInput:
            shutil.rmtree(work)
            raise
        shutil.rmtree(work)
    report(out, read_json(out / "meta.json"))


def main(argv: list[str]) -> None:
    prepare(parse_flags(Flags, argv, __doc__))


if __name__ == "__main__":
    run_script(main)
