"""Read sound files and streams block by block."""

import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._utils import atomic_io, optional_deps
from ..data.download import take

LEAST, MOST = 1_000, 400_000  # samples per second that a recording may have
LOUDEST = 2.0**31  # the largest sample that files of floating-point numbers may have
NO_COUNT = 2**63 - 1  # what libsndfile has for the samples of a file that does not say how many
BLOCK = 1.0  # seconds that ``read`` takes at a time
# Programs that write to a pipe do not know the size of the data. They announce 0, 2 * 10**9, 0x7ffff000, 0xffffffff.
UNKNOWN = 2_000_000_000
FORMAT = 64  # bytes of a format chunk that are read; the fields that matter are the first 40
# Other chunks that may come before the samples, and their bytes, so that no stream is searched without an end.
CHUNKS, HEAD = 1000, 2**26
PCM, EXTENSIBLE = 1, 0xFFFE
PCM_ID = bytes.fromhex("0100000000001000800000aa00389b71")  # the sub-format of an extensible header
WANTED = "a wav file of one channel and 16 bits"
PAGE = 27 + 255 + 255 * 255  # bytes of the largest page of an Ogg file
# Formats whose headers do not say where the samples end, or not in a way that is compared here.
UNCOMPARED = ("AVR", "IRCAM", "MAT4", "MAT5", "MPC2K", "PAF", "PVF", "SD2", "SDS", "VOC", "WVE", "XI")


class Container(NamedTuple):
    """The layout of a format of chunks, each with a name, a size and a content."""

    begin: int  # bytes before the first chunk
    name: int  # bytes of a chunk's name
    size: int  # bytes of its size
    order: Literal["little", "big"]
    samples: tuple[bytes, ...]  # names of the chunk with the samples
    whole: bool = False  # whether a size counts its name and itself
    align: int = 2  # chunks begin at a multiple of this


# By the first four bytes: wav of other byte order and sizes, Sony Wave64, AIFF and 8SVX, Apple's CAF.
CONTAINERS = {
    b"RIFF": Container(12, 4, 4, "little", (b"data",)),
    b"RIFX": Container(12, 4, 4, "big", (b"data",)),
    b"RF64": Container(12, 4, 4, "little", (b"data",)),
    b"riff": Container(40, 16, 8, "little", (b"data" + bytes.fromhex("f3acd3118cd100c04f8edb8a"),), True, 8),
    b"FORM": Container(12, 4, 4, "big", (b"SSND", b"BODY")),
    b"caff": Container(8, 4, 8, "big", (b"data",), align=1),
}


class Header(NamedTuple):
    """The header of a RIFF WAVE file."""

    code: int  # the format's number, PCM also for an extensible header of PCM
    channels: int
    rate: int
    bits: int
    size: int  # bytes of samples that are announced

    @property
    def plain(self) -> bool:
        """Whether the samples are 16 bit PCM of one channel, which needs no library."""
        return (self.code, self.channels, self.bits) == (PCM, 1, 16)

    @property
    def known(self) -> bool:
        """Whether the size is real, not the placeholder of a program that streams."""
        return 0 < self.size < UNKNOWN


def read(path: str | Path) -> tuple[Tensor, int]:
    """Read a recording: samples (N,) float32 from -1 to 1, and the sample rate. Errors as in ``chunks``."""
    return _joined(chunks(path, BLOCK))


def parsed(file: BinaryIO, name: str) -> tuple[Tensor, int]:
    """Read a whole ``stream``: samples (N,) float32 from -1 to 1, and the sample rate."""
    return _joined(stream(file, name, BLOCK))


def chunks(path: str | Path, seconds: float) -> Iterator[tuple[Tensor, int]]:
    """Read a recording in blocks, each with the sample rate; only one block is in memory.

    Mono 16-bit wav files are read directly, also from a named pipe. Other files are decoded by soundfile: wav files of
    other widths, flac, ogg, mp3, aiff, au, and other formats of libsndfile that say where the samples end.

    Args:
        path: the file.
        seconds: largest duration of a block.

    Raises:
        ValueError: with the name of the file, if it cannot be read or decoded, is empty or truncated, has several
            channels, an unusual sample rate or samples that are not finite, and for ``seconds`` without a sample.
        ImportError: if soundfile is needed and missing.
    """
    path = Path(path)
    name = str(path)
    with atomic_io.reading(path), atomic_io.open_stream(path) as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            yield from stream(file, name, seconds)
            return
        if not about.st_size:
            raise ValueError(f"{name} is empty")
        if _is_wave(file.read(12)):
            header = _header(file, name)
            _checked(header.channels, header.rate, name, seconds)
            if header.plain:
                yield from _pcm(file, header, name, seconds)
                return
        _refuse_cut(file, about.st_size, name)
        yield from _decoded(path, seconds)


def stream(file: BinaryIO, name: str, seconds: float) -> Iterator[tuple[Tensor, int]]:
    """Read a mono 16-bit wav stream, such as standard input, in blocks of up to ``seconds``.

    With a placeholder as data size (0, or at least 2 * 10**9 bytes) the samples end with the stream.

    Raises ValueError, with ``name`` for the stream, for another format, and as in ``chunks``.
    """
    if not _is_wave(file.read(12)):
        raise ValueError(f"{name} is not a RIFF WAVE stream; convert it to {WANTED}")
    header = _header(file, name)
    if not header.plain:
        raise ValueError(
            f"{name} has {header.channels} channels of {header.bits} bits in format {header.code:#06x}; convert it to "
            f"{WANTED} of PCM (format 0x0001)"
        )
    yield from _pcm(file, header, name, seconds)


def _joined(blocks: Iterator[tuple[Tensor, int]]) -> tuple[Tensor, int]:
    samples, rates = zip(*blocks, strict=True)
    return torch.cat(samples), rates[0]


def _is_wave(begin: bytes) -> bool:
    return begin[:4] == b"RIFF" and begin[8:12] == b"WAVE"


def _header(file: BinaryIO, name: str) -> Header:
    """Read the chunks of a RIFF WAVE file up to its samples. Raises ValueError for invalid chunks."""
    found, left = None, HEAD
    for _ in range(CHUNKS):
        chunk = take(file, 8)
        if len(chunk) < 8:
            raise ValueError(f"{name} ends too early: it has no data chunk")
        kind, size = chunk[:4], int.from_bytes(chunk[4:], "little")
        if kind == b"data":
            if found is None:
                raise ValueError(f"{name} has a data chunk before its format chunk, which must come first")
            return found._replace(size=size)
        padded = size + size % 2
        left -= len(chunk) + padded
        if left < 0:
            raise ValueError(
                f"{name} has a chunk {kind!r} of {size} bytes before its data chunk; {HEAD} bytes may come before it"
            )
        content = take(file, min(padded, FORMAT))
        if kind == b"fmt ":
            if size < 16 or len(content) < min(padded, FORMAT):
                raise ValueError(
                    f"{name} has a format chunk of {min(size, len(content))} bytes; at least 16 are needed"
                )
            found = _format(content[:size])
        _skip(file, padded - len(content))
    raise ValueError(f"{name} has no data chunk among its first {CHUNKS} chunks")


def _format(content: bytes) -> Header:
    code, channels = (int.from_bytes(content[at : at + 2], "little") for at in (0, 2))
    rate, bits = int.from_bytes(content[4:8], "little"), int.from_bytes(content[14:16], "little")
    if code == EXTENSIBLE and content[24:40] == PCM_ID:
        code = PCM
    return Header(code, channels, rate, bits, 0)


def _refuse_cut(file: BinaryIO, total: int, name: str) -> None:
    """Raise ValueError for a regular file of ``total`` bytes that has fewer samples than its header announces.

    libsndfile takes what is there as the whole, except in flac, mp3 and some other formats.
    """
    file.seek(0)
    begin = take(file, 1024)
    announced, at = 0, 0
    if layout := CONTAINERS.get(begin[:4]):
        announced, at = _samples_chunk(file, total, layout)
    elif begin[:4] in (b".snd", b"dns."):
        order = "big" if begin[:1] == b"." else "little"
        at, announced = (int.from_bytes(begin[i : i + 4], order) for i in (4, 8))
    elif found := re.match(rb"NIST_1A\s+(\d+)\s", begin):
        fields = (re.search(rb"\n" + field + rb" -i (\d+)", begin) for field in (b"sample_count", b"sample_n_bytes"))
        # Files of mu-law and A-law do not name their one byte.
        count, width = (int(field[1]) if field else 1 for field in fields)
        at, announced = int(found[1]), count * width
    elif begin[:4] == b"OggS":
        file.seek(max(0, total - PAGE))
        last = file.read(PAGE)
        # A page begins with its name, a version 0, and flags, of which 4 ends the stream.
        pages = [place for place in range(len(last) - 26) if last.startswith(b"OggS\0", place)]
        page = last[pages[-1] :] if pages else b""
        if not page or not page[5] & 4 or len(page) < 27 + page[26] + sum(page[27 : 27 + page[26]]):
            raise ValueError(f"{name} ends too early: its last page is not there")
    placeholder = UNKNOWN if not layout or (layout.size == 4 and begin[:4] != b"RF64") else NO_COUNT // 2
    if 0 < announced < placeholder and (there := max(0, total - at)) < announced:
        raise ValueError(f"{name} ends too early: {there} bytes of samples came where {announced} were announced")


def _samples_chunk(file: BinaryIO, total: int, layout: Container) -> tuple[int, int]:
    """The announced size of the chunk with the samples, and where its content begins; 0 and 0 if there is none."""
    place, long_size = layout.begin, 0
    for _ in range(CHUNKS):
        file.seek(place)
        head = take(file, layout.name + layout.size)
        kind, size = head[: layout.name], int.from_bytes(head[layout.name :], layout.order)
        content = place + len(head)
        if place >= total or len(head) < layout.name + layout.size:
            break
        if kind in layout.samples:
            return long_size if long_size and size == 2**32 - 1 else size - len(head) * layout.whole, content
        if kind == b"ds64":
            # The sizes of the file and of the samples, which RF64 has no room for elsewhere.
            long_size = int.from_bytes(take(file, 16)[8:], "little")
        end = content + size - len(head) * layout.whole
        place = end + -end % layout.align
        if place <= content - len(head):
            break
    return 0, 0


def _skip(file: BinaryIO, count: int) -> None:
    while count and (content := file.read(min(count, io.DEFAULT_BUFFER_SIZE))):
        count -= len(content)


def _pcm(file: BinaryIO, header: Header, name: str, seconds: float) -> Iterator[tuple[Tensor, int]]:
    """The samples of 16 bit PCM that follow a header."""
    count = _checked(header.channels, header.rate, name, seconds)
    announced = header.size // 2 if header.size else None
    done = 0
    while announced is None or done < announced:
        wanted = count if announced is None else min(count, announced - done)
        content = take(file, 2 * wanted)
        some = len(content) // 2
        if some:
            samples = np.frombuffer(content, "<i2", some).astype(np.float32) / 32768
            yield torch.from_numpy(samples), header.rate
        done += some
        if some < wanted:
            break
    if header.known and announced is not None and done < announced:
        raise ValueError(f"{name} ends too early: {done} of {announced} announced samples")
    if not done:
        raise ValueError(f"{name} has no samples")


def _decoded(path: Path, seconds: float) -> Iterator[tuple[Tensor, int]]:
    """The samples of a file that libsndfile supports."""
    optional_deps.need(f"recordings other than {WANTED}", "soundfile")
    import soundfile

    class Forward(soundfile.SoundFile):
        """A file without redundant seeks, which corrupt the next samples of an mp3."""

        def seekable(self) -> bool:
            return False

    name = str(path)
    # Names that are no UTF-8 must come as bytes, except on Windows, where every name is text.
    place = name if os.name == "nt" else os.fsencode(path)
    try:
        # A TypeError is raised for files named .raw, which have no header.
        with Forward(place) as sound:  # pyright: ignore[reportArgumentType] (soundfile takes bytes)
            rate = sound.samplerate
            if sound.format in UNCOMPARED:
                raise ValueError(
                    f"{name} is of the format {sound.format}, in which a missing end is not noticed; convert it to "
                    f"{WANTED}"
                )
            count = _checked(sound.channels, rate, name, seconds)
            done = 0
            while done < sound.frames and len(block := sound.read(count, dtype="float32")):
                if not (np.abs(block) <= LOUDEST).all():
                    raise ValueError(f"{name} has samples that are not finite, or larger than {LOUDEST:g}")
                yield torch.from_numpy(block), rate
                done += len(block)
            if done < sound.frames < NO_COUNT:
                raise ValueError(f"{name} ends too early: {done} of {sound.frames} announced samples")
            if not done:
                raise ValueError(f"{name} has no samples")
    except (soundfile.SoundFileError, TypeError) as error:
        reason = getattr(error, "error_string", "files named .raw do not say how they are written")
        raise ValueError(f"{name} cannot be decoded ({reason}); convert it to {WANTED}") from error


def _checked(channels: int, rate: int, name: str, seconds: float) -> int:
    """The samples of a block. Raises ValueError for an unsupported number of channels or rate."""
    if channels != 1:
        raise ValueError(f"{name} has {channels} channels; convert it to one channel")
    if not LEAST <= rate <= MOST:
        raise ValueError(f"{name} has {rate} samples per second; expected {LEAST} to {MOST}")
    if seconds * rate < 1:
        raise ValueError(f"{seconds} s have no sample at {rate} samples per second")
    return int(seconds * rate)
