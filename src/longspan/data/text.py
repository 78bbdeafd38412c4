"""Text as bytes: a file, a folder of text files, or the sources of the running Python's standard library."""

import itertools
import sysconfig
from pathlib import Path

import numpy as np
import torch

from .._utils.cache_dirs import expanded
from .dataset import Dataset, sha256
from .download import append, read

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
    data, sizes = _gathered(source)
    held = len(data) // 20
    if held < length:
        raise ValueError(
            f"text:{source} has {len(data)} bytes; windows of {length} need at least {20 * length}, so that each "
            "held-out part (5 %) has one; choose a smaller length"
        )
    content = np.frombuffer(data, np.uint8)
    train, validation, test = torch.from_numpy(content).split([len(data) - 2 * held, held, held])
    splits = {"train": train, "validation": validation, "test": test}
    documents, begin = {}, 0
    ends = torch.tensor(sizes).cumsum(0)
    for split, part in splits.items():
        # What a split cuts begins anew in it.
        inside = ends[(begin < ends) & (ends < begin + len(part))] - begin
        documents[split] = torch.cat([inside.new_zeros(1), inside.unique()])
        begin += len(part)
    return Dataset(f"text:{source}", 256, length, (), "byte", sha256([content]), splits, {}, documents)


def documents_of(source: str) -> list[bytes]:
    """The contents of the files of ``source``, in the order in which a text has them; what is raised as in ``load``."""
    data, sizes = _gathered(source)
    ends = itertools.accumulate(sizes)
    return [bytes(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _gathered(source: str) -> tuple[bytearray, list[int]]:
    """The files of ``source``, one after the other in a single buffer, and the size of each."""
    if not source:
        raise ValueError("text needs a source: text:stdlib, or text:PATH with a file or a folder of .txt files")
    return _modules() if source == STDLIB else _read(expanded(source))


def _modules() -> tuple[bytearray, list[int]]:
    """The first 8,000,000 bytes of the standard library's Python sources: modules first, then packages, by path.

    Left out are tests, the encodings' tables, installed packages and files that a build generates.

    Raises ValueError where Python comes without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted((len(p.parts) > 1, p.as_posix()) for p in (p.relative_to(root) for p in root.rglob("*.py")))
    data, sizes = bytearray(), []
    for _, name in found:
        parts = name.split("/")
        if not _SKIPPED.intersection(parts) and not parts[0].startswith(_SKIPPED_PREFIXES):
            content = read(root / name)[: _STDLIB_BYTES - len(data)]
            data += content
            sizes.append(len(content))
        if len(data) == _STDLIB_BYTES:
            break
    if not data:
        raise ValueError(f"no Python sources in {root}; use text:PATH")
    return data, sizes


def _read(path: Path) -> tuple[bytearray, list[int]]:
    """The content of a file, or of each one in a folder, and their sizes."""
    if not path.exists():
        raise ValueError(f"no text at {path.absolute()}: there is no such file or folder")
    if not path.is_dir():
        data = unpacked(path)
        return data, [len(data)]
    files = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.name.endswith(_SUFFIXES))
    if not files:
        raise ValueError(f"no text in the folder {path}: looked for {', '.join('*' + s for s in _SUFFIXES)}")
    data, sizes = bytearray(), []
    for name in files:
        begin = len(data)
        unpacked(path / name, data)
        sizes.append(len(data) - begin)
    return data, sizes


def unpacked(path: Path, into: bytearray | None = None, times: int = 2) -> bytearray:
    """The bytes of one file, those inside it where its name ends in .gz or .xz, appended to ``into``.

    ``times``: how many times its size must be free in memory. Raises ValueError for packed ones, and as
    ``download.read`` does.
    """
    data = bytearray() if into is None else into
    begin = len(data)
    append(path, data, times=times)
    head = data[begin : begin + 512]
    kind = next((kind for first, kind in _PACKED.items() if head.startswith(first)), "")
    if head[257:262] == b"ustar":
        kind = "tar"
    if kind:
        raise ValueError(
            f"{path.absolute()} is no text but packed by {kind}; unpack it first (one file by gzip or xz is read as it "
            f"is, where its name ends in .gz or .xz)"
        )
    return data
