"""Text as bytes: a file, a folder of text files, or the sources of the running Python's standard library."""

import sysconfig
from pathlib import Path

import numpy as np
import torch

from .dataset import Dataset, sha256
from .download import read

STDLIB = "stdlib"  # the text that every machine has
_SUFFIXES = (".txt", ".txt.gz", ".txt.xz")
_STDLIB_BYTES = 8_000_000
# How packed files begin; bytes of theirs are no text, and a model would learn noise. An archive of tar says so later.
_PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
# Foreign packages, tests, tables of code points, and files that differ between builds of one version.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


def load(source: str, length: int) -> Dataset:
    """The bytes of ``source`` ("stdlib" or a path), in windows of ``length`` (0 means 256).

    The files of a folder (.txt, .txt.gz, .txt.xz, at any depth) follow one another in the order of their paths. Of the
    whole, the first 90 % are for training, the next 5 % for validation, the last 5 % for the test. Each file is a
    document. Bytes are taken as they are: a byte order mark at the beginning of a file is three of them.

    Raises ValueError without a source, for a missing or unreadable path, a packed file, a folder without text, and a
    text that is too short for one window in each held-out part.
    """
    length = length or 256
    files = documents_of(source)
    data = b"".join(files)
    held = len(data) // 20
    if held < length:
        raise ValueError(
            f"text:{source} has {len(data)} bytes; windows of {length} need at least {20 * length}, so that each "
            "held-out part (5 %) has one; choose a smaller length"
        )
    content = np.frombuffer(bytearray(data), np.uint8)
    train, validation, test = torch.from_numpy(content).split([len(data) - 2 * held, held, held])
    splits = {"train": train, "validation": validation, "test": test}
    documents, begin = {}, 0
    ends = torch.tensor([len(file) for file in files]).cumsum(0)
    for split, part in splits.items():
        # What a split cuts begins anew in it.
        inside = ends[(begin < ends) & (ends < begin + len(part))] - begin
        documents[split] = torch.cat([inside.new_zeros(1), inside.unique()])
        begin += len(part)
    return Dataset(f"text:{source}", 256, length, (), "byte", sha256([content]), splits, {}, documents)


def documents_of(source: str) -> list[bytes]:
    """The contents of the files of ``source``, in the order in which a text has them; what is raised as in ``load``."""
    if not source:
        raise ValueError("text needs a source: text:stdlib, or text:PATH with a file or a folder of .txt files")
    return _modules() if source == STDLIB else _read(Path(source).expanduser())


def _modules() -> list[bytes]:
    """The first 8,000,000 bytes of the standard library's Python sources: modules first, then packages, by path.

    Left out are tests, the encodings' tables, installed packages and files that a build generates.

    Raises ValueError where Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted((len(p.parts) > 1, p.as_posix()) for p in (p.relative_to(root) for p in root.rglob("*.py")))
    files: list[bytes] = []
    room = _STDLIB_BYTES
    for _, name in found:
        parts = name.split("/")
        if not _SKIPPED.intersection(parts) and not parts[0].startswith(_SKIPPED_PREFIXES):
            files.append(read(root / name)[:room])
            room -= len(files[-1])
        if not room:
            break
    if room == _STDLIB_BYTES:
        raise ValueError(f"no Python sources in {root}; use text:PATH")
    return files


def _read(path: Path) -> list[bytes]:
    """The contents of a file, or of each one in a folder."""
    if not path.exists():
        raise ValueError(f"no text at {path.absolute()}: there is no such file or folder")
    if not path.is_dir():
        return [unpacked(path)]
    files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.name.endswith(_SUFFIXES))
    if not files:
        raise ValueError(f"no text in the folder {path}: looked for {', '.join('*' + s for s in _SUFFIXES)}")
    return [unpacked(path / name) for name in files]


def unpacked(path: Path) -> bytes:
    """The bytes of one file, those inside it where its name ends in .gz or .xz; packed ones raise ValueError."""
    data = read(path)
    kind = next((kind for begin, kind in _PACKED.items() if data.startswith(begin)), "")
    if data[257:262] == b"ustar":
        kind = "tar"
    if kind:
        raise ValueError(
            f"{path.absolute()} is no text but packed by {kind}; unpack it first (one file by gzip or xz is read as it "
            f"is, where its name ends in .gz or .xz)"
        )
    return data
