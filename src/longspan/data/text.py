"""Text as bytes: a file, a folder of text files, or the sources of Python's standard library."""

import itertools
import sysconfig
from pathlib import Path

import numpy as np
import torch

from .._utils.cache_dirs import expanded
from .dataset import Dataset, even, sha256
from .download import append, read

STDLIB = "stdlib"  # available on every machine
_SUFFIXES = (".txt", ".txt.gz", ".txt.xz")
_STDLIB_BYTES = 8_000_000
# First bytes of packed files, which are not text. A tar archive is recognized at byte 257.
_PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
# Foreign packages, tests, tables of code points, and files that differ between builds of one version.
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "__pycache__"}
_SKIPPED_PREFIXES = ("config-", "_sysconfigdata")


def load(source: str, length: int, short: bool = False) -> Dataset:
    """Load a text as bytes.

    The files of a folder (.txt, .txt.gz, .txt.xz, at any depth) are concatenated in the order of their paths. The first
    90 % are for training, the next 5 % for validation, the last 5 % for the test. Each file is a document. Bytes are
    not decoded; a byte order mark counts as three bytes.

    Args:
        source: "stdlib" or a path.
        length: window size in bytes; 0: 256.
        short: as in ``data.load``.

    Raises:
        ValueError: without a source, for a missing or unreadable path, a packed file, a folder without text, and a text
            that is empty, or without ``short`` too short for one window in each held-out part.
    """
    length = length or 256
    data, sizes = _gathered(source)
    held = len(data) // 20
    whole = short and 0 < len(data) and held < length
    if held < length and not whole:
        raise ValueError(
            f"text:{source} has {len(data)} bytes; windows of {length} need at least {20 * length}, so that each "
            "held-out part (5 %) has one; pass a smaller length or a longer text"
        )
    content = np.frombuffer(data, np.uint8)
    stream, names = torch.from_numpy(content), ("train", "validation", "test")
    if whole:
        length, splits = even(len(data), length), dict.fromkeys(names, stream)
    else:
        splits = dict(zip(names, stream.split([len(data) - 2 * held, held, held]), strict=True))
    documents, begin = {}, 0
    ends = torch.tensor(sizes).cumsum(0)
    for split, part in splits.items():
        # A document that a split cuts starts again in the next split.
        inside = ends[(begin < ends) & (ends < begin + len(part))] - begin
        documents[split] = torch.cat([inside.new_zeros(1), inside.unique()])
        begin += 0 if whole else len(part)
    return Dataset(f"text:{source}", 256, length, (), "byte", sha256([content]), splits, {}, documents)


def documents_of(source: str) -> list[bytes]:
    """The contents of the files of ``source``, in the order of ``load``, with its errors."""
    data, sizes = _gathered(source)
    ends = itertools.accumulate(sizes)
    return [bytes(data[end - size : end]) for end, size in zip(ends, sizes, strict=True)]


def _gathered(source: str) -> tuple[bytearray, list[int]]:
    """The files of ``source`` in a single buffer, and the size of each."""
    if not source:
        raise ValueError("text requires a source: pass text:stdlib, or text:PATH with a file or a folder of .txt files")
    return _modules() if source == STDLIB else _read(expanded(source))


def _modules() -> tuple[bytearray, list[int]]:
    """The first 8,000,000 bytes of the standard library's Python sources: modules first, then packages, by path.

    Tests, tables of encodings, installed packages and generated files are skipped.

    Raises ValueError if Python is installed without its sources.
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
        raise ValueError(f"no Python sources in {root}; pass text:PATH")
    return data, sizes


def _read(path: Path) -> tuple[bytearray, list[int]]:
    """The content of a file, or of all files in a folder, and their sizes."""
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
    """Append the bytes of a file to ``into``; .gz and .xz files are unpacked.

    ``times``: memory that must be free, as a multiple of the size. Raises ValueError for other packed files, and as in
    ``download.read``.
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
            f"{path.absolute()} is packed by {kind}; unpack it first (single files packed by gzip or xz are read if "
            "their names end in .gz or .xz)"
        )
    return data
