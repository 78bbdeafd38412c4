"""The container of GGUF files, versions 2 and 3: metadata and tensors by name.

A file is a header, the metadata, a description of each tensor, and the tensors' bytes, all little-endian. Everything is
checked against the size of the file before anything is allocated, and tensors are mapped into memory.

References:
    ggml, docs/gguf.md.
"""

import itertools
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._utils import atomic_io
from ..._utils.typecheck import format_value
from ...ops.quantized.formats import FORMATS, Blocks

MAGIC, VERSION, ALIGNMENT = b"GGUF", 3, 32
# Numbers by their type in the metadata; 8 is a text and 9 an array.
_NUMBERS = {
    number: np.dtype(code)
    for number, code in enumerate("u1 i1 <u2 <i2 <u4 <i4 <f4 ? - - <u8 <i8 <f8".split())
    if code != "-"
}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS, _LONGEST_NAME = 4, 1 << 16
# Types of tensors that are numbers; those of FORMATS are blocks.
FLOATS = {"F32": (0, torch.float32), "F16": (1, torch.float16), "BF16": (30, torch.bfloat16)}
# Other types, for messages.
_OTHERS = {
    **dict(zip((9, 10, 11, 15), ("Q8_1", "Q2_K", "Q3_K", "Q8_K"), strict=True)),
    **dict(enumerate("IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M".split(), 16)),
    **{34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


class Kind(NamedTuple):
    """A type of tensors."""

    number: int
    """in a file"""
    block: int
    """numbers in a block"""
    size: int
    """bytes of a block"""


KINDS = {name: Kind(number, 1, dtype.itemsize) for name, (number, dtype) in FLOATS.items()} | {
    name: Kind(form.number, form.block, form.size) for name, form in FORMATS.items()
}
_NAMES = {kind.number: name for name, kind in KINDS.items()}


class Place(NamedTuple):
    """Where a tensor is in a file."""

    shape: tuple[int, ...]
    """in the order of torch: the last dimension is contiguous"""
    kind: str
    """a key of ``KINDS``"""
    start: int
    """its first byte in the file"""
    size: int
    """bytes"""


class Container:
    """A GGUF file, mapped into memory.

    Args:
        path: The file.

    Raises:
        ValueError: It cannot be read, is cut or damaged, or has a version or types of tensors that are not supported.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        """numbers, texts, and arrays: lists of texts, numpy arrays of numbers"""
        self.tensors: dict[str, Place] = {}
        with atomic_io.reading(self.path), atomic_io.open_regular(self.path) as file:
            self._size = os.fstat(file.fileno()).st_size
            if self._size < 24:
                raise self.damaged(f"it has {self._size} bytes, fewer than a header")
            # Private to this process, so that torch accepts it; nothing writes to it.
            self._bytes = np.memmap(file, np.uint8, "c")
        # Slices of it take a tenth of the time.
        self._view = self._bytes.data
        self._at = 0
        self._read()

    def damaged(self, why: str) -> ValueError:
        """Return the error for a file that is not as it should be."""
        return ValueError(f"cannot load {self.path}: {why}")

    def read(self, name: str) -> Tensor | Blocks:
        """Return a tensor: its numbers, or its blocks as a matrix, whose rows are those of all other dimensions."""
        place = self.tensors[name]
        data = self._bytes[place.start : place.start + place.size]
        if place.kind in FLOATS:
            return torch.from_numpy(data).view(FLOATS[place.kind][1]).view(place.shape)
        width = place.shape[-1]
        return Blocks(torch.from_numpy(data).view(math.prod(place.shape[:-1]), -1), place.kind, width)

    def release(self) -> None:
        """Let the system take back the memory of tensors that were read; they can be read again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self._bytes._mmap.madvise(mmap.MADV_DONTNEED)  # pyright: ignore[reportAttributeAccessIssue] (missing in the stubs)

    def _read(self) -> None:
        if self._take(4) != MAGIC:
            raise self.damaged("it is not a GGUF file, which begins with GGUF")
        version = self._number(4)
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "big"), "little")
            why = "it is big-endian" if swapped in (1, 2, 3) else f"its version is {version}"
            raise self.damaged(f"{why}; versions 2 and 3 are supported, little-endian")
        tensors, entries = self._number(8), self._number(8)
        # An entry has at least a length, a type and a byte; a tensor a length, a count, a size, a type and an offset.
        for count, what, least in ((tensors, "tensors", 32), (entries, "entries of metadata", 13)):
            if count > (self._size - self._at) // least:
                raise self.damaged(f"it is cut: {count:,} {what} do not fit into its {self._size:,} bytes")
        for _ in range(entries):
            name = self._text("the name of an entry")
            if name in self.metadata:
                raise self.damaged(f"{format_value(name)} is in its metadata twice")
            self.metadata[name] = self._value(self._number(4), name)
        self._places([self._place() for _ in range(tensors)])

    def _places(self, found: list[tuple[str, tuple[int, ...], int, int]]) -> None:
        """Check the places of all tensors."""
        alignment = self.metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment & (alignment - 1):
            raise self.damaged(f"general.alignment={format_value(alignment)} must be a power of two from 8 on")
        begin = -(-self._at // alignment) * alignment
        for name, shape, number, offset in found:
            if name in self.tensors:
                raise self.damaged(f"it has the tensor {format_value(name)} twice")
            if number not in _NAMES:
                known = _OTHERS.get(number, f"the number {number}")
                raise self.damaged(f"{format_value(name)} has the type {known}; supported are {', '.join(KINDS)}")
            kind = KINDS[_NAMES[number]]
            if shape[-1] % kind.block:
                rows = f"rows of {shape[-1]:,} numbers; {_NAMES[number]} needs multiples of {kind.block}"
                raise self.damaged(f"{format_value(name)} has {rows}")
            size = math.prod(shape) // kind.block * kind.size
            if offset % alignment or begin + offset + size > self._size:
                raise self.damaged(
                    f"{format_value(name)} takes {size:,} bytes from {begin + offset:,} on, and the file has "
                    f"{self._size:,} bytes and an alignment of {alignment}"
                )
            self.tensors[name] = Place(shape, _NAMES[number], begin + offset, size)
        ordered = sorted(self.tensors.items(), key=lambda item: item[1].start)
        for (name, one), (after, other) in itertools.pairwise(ordered):
            if one.start + one.size > other.start:
                raise self.damaged(f"the tensors {format_value(name)} and {format_value(after)} overlap")

    def _place(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the description of a tensor: name, shape, type, offset."""
        name = self._text("the name of a tensor")
        dimensions = self._number(4)
        if not 1 <= dimensions <= _MOST_DIMENSIONS:
            raise self.damaged(f"{format_value(name)} has {dimensions:,} dimensions, and 1 to 4 are possible")
        shape = tuple(reversed([self._number(8) for _ in range(dimensions)]))
        if not all(shape):
            raise self.damaged(f"{format_value(name)} has a dimension of size 0: {shape}")
        return name, shape, self._number(4), self._number(8)

    def _take(self, count: int) -> memoryview:
        if count > self._size - self._at:
            raise self.damaged(f"it is cut: {count:,} bytes from {self._at:,} on, and it has {self._size:,}")
        self._at += count
        return self._view[self._at - count : self._at]

    def _number(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self, what: str, most: int = _LONGEST_NAME) -> str:
        length = self._number(8)
        if length > most:
            raise self.damaged(f"{what} has {length:,} bytes, and {most:,} are allowed")
        try:
            return str(self._take(length), "utf-8")
        except UnicodeDecodeError as error:
            raise self.damaged(f"{what} is not UTF-8") from error

    def _value(self, kind: int, name: str) -> Any:
        """Read a value of the metadata."""
        if kind == _TEXT:
            return self._text(format_value(name), self._size)
        if kind in _NUMBERS:
            return self._numbers(kind, 1, name)[0].item()
        if kind != _ARRAY:
            raise self.damaged(f"{format_value(name)} has the unknown type {kind}")
        inner, count = self._number(4), self._number(8)
        if inner == _TEXT:
            if count > (self._size - self._at) // 8:
                raise self.damaged(f"it is cut: {format_value(name)} has {count:,} texts")
            return [self._text(format_value(name), self._size) for _ in range(count)]
        if inner not in _NUMBERS:
            raise self.damaged(f"{format_value(name)} is an array of the unknown type {inner}")
        return self._numbers(inner, count, name).copy()

    def _numbers(self, kind: int, count: int, name: str) -> np.ndarray:
        dtype = _NUMBERS[kind]
        data = np.frombuffer(self._take(count * dtype.itemsize), np.uint8)
        if dtype == np.bool_ and (data > 1).any():
            raise self.damaged(f"{format_value(name)} has a truth value other than 0 and 1")
        return data.view(dtype)


class Content(NamedTuple):
    """A tensor to write."""

    shape: tuple[int, ...]
    """in the order of torch"""
    data: Tensor | Blocks
    """numbers of a type in ``FLOATS``, or blocks"""


def write(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Content]) -> None:
    """Write a GGUF file atomically.

    Args:
        path: The file; an existing one is replaced.
        metadata: Texts, truth values, whole numbers (written with 32 bits where they fit), numbers with a fraction
            (written as float32), and lists of one of these.
        tensors: By name.

    Raises:
        OSError: The file cannot be written.
    """
    atomic_io.write(path, pieces(metadata, tensors))


def pieces(metadata: Mapping[str, Any], tensors: Mapping[str, Content]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file; arguments as in ``write``."""
    head = [MAGIC, struct.pack("<IQQ", VERSION, len(tensors), len(metadata))]
    head += [_packed(name) + _packed_value(value) for name, value in metadata.items()]
    offset = 0
    for name, one in tensors.items():
        kind = KINDS[_kind(one.data)]
        head.append(_packed(name) + struct.pack("<I", len(one.shape)))
        head.append(struct.pack(f"<{len(one.shape)}QIQ", *reversed(one.shape), kind.number, offset))
        offset += -(-math.prod(one.shape) // kind.block * kind.size // ALIGNMENT) * ALIGNMENT
    piece: bytes | memoryview = b"".join(head)
    for one in tensors.values():
        yield piece
        yield bytes(-len(piece) % ALIGNMENT)
        data = one.data.data if isinstance(one.data, Blocks) else one.data.detach().cpu()
        piece = data.contiguous().view(torch.uint8).numpy().data.cast("B")
    yield piece
    yield bytes(-len(piece) % ALIGNMENT)


def _kind(data: Tensor | Blocks) -> str:
    if isinstance(data, Blocks):
        return data.format
    return next(name for name, (_, dtype) in FLOATS.items() if dtype == data.dtype)


def _packed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _packed_value(value: Any) -> bytes:
    """Return the type of a value and its bytes."""
    if isinstance(value, list | tuple):
        code = _code(value[0] if value else "")
        if code[1] in "iu":  # as llama.cpp requires it of the types of tokens
            code = "<i4" if -(1 << 31) <= min(value) and max(value) < 1 << 31 else "<i8"
        body = b"".join(map(_packed, value)) if code == "text" else np.array(value, code).tobytes()
        return struct.pack("<IIQ", _ARRAY, _TYPES[code], len(value)) + body
    code = _code(value)
    return struct.pack("<I", _TYPES[code]) + (_packed(value) if code == "text" else np.array(value, code).tobytes())


_TYPES = {dtype.str: number for number, dtype in _NUMBERS.items()} | {"text": _TEXT}


def _code(value: Any) -> str:
    match value:
        case str():
            return "text"
        case bool():
            return "|b1"
        case float():
            return "<f4"
        case _:
            small = -(1 << 31) <= value < 1 << 32
            return ("<u4" if small else "<u8") if value >= 0 else "<i4" if small else "<i8"
