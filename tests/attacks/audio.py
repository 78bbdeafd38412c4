"""Recordings with damaged or hostile headers, as files and on standard input: words, or one line that names the file.

Sizes, rates, channels, formats and widths of all kinds, random bytes, other containers, truncations, samples that are
not finite; each read whole or by ``--stream``. No case may take more than 1 GiB or half a minute.
"""

import contextlib
import importlib.util
import io
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from longspan.cli import entry
from longspan_lab.speech.digits import SPOKEN

from . import Case
from ._bounds import TooLong, bounded

SHORT, LONG = 40, 4000
SECONDS, GIB = 30.0, 1.0
SIZES = (0, 1, 2, 15, 16, 18, 40, 2**16, 2_000_000_000, 2**31 - 1, 2**31, 2**32 - 1)
RATES = (0, 1, 999, 1000, 7999, 8000, 8001, 16_000, 44_100, 192_000, 399_989, 400_001, 2**31, 2**32 - 1)
CHANNELS = (0, 2, 6, 255, 1024, 65_535)
CODES = (0, 2, 3, 6, 7, 0x11, 0x31, 0x55, 0xFFFE, 0xFFFF)
BITS = (0, 1, 4, 8, 12, 24, 32, 64, 65_535)
GUID = bytes.fromhex("000000001000800000aa00389b71")
KINDS = (
    "WAV FLOAT",
    "WAV PCM_24",
    "WAV IMA_ADPCM",
    "FLAC PCM_16",
    "OGG VORBIS",
    "MP3 MPEG_LAYER_III",
    "W64 PCM_16",
    "RF64 PCM_16",
    "AIFF PCM_16",
    "AU ULAW",
    "CAF ALAC_16",
)


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    for i in range(count):
        dice = random.Random(f"{seed}-{i}")
        make = dice.choice([header, header, container])
        by = dice.choice(["file", "stdin"])
        options = dice.choice([[], ["--stream"], ["--beam", "2"]])
        path = folder / f"{i}.wav"
        yield (
            f"{i}-{make.__name__}-{by}{''.join(options[:1])}",
            lambda make=make, dice=dice, by=by, options=options, path=path: attack(make(dice), by, options, path),
        )


def header(dice: random.Random) -> bytes:
    """A RIFF WAVE file, right in most fields."""

    def field(right: int, others: tuple[int, ...], odds: float = 0.07) -> int:
        return dice.choice(others) if dice.random() < odds else right

    data = dice.randbytes(2 * dice.choice([0, 1, 100, 1600, 4000]))
    code, channels, bits = field(1, CODES), field(1, CHANNELS), field(16, BITS)
    rate = field(dice.choice([8000, 16_000]), RATES, 0.15)
    more = b""
    if dice.random() < 0.3:
        code, more = 0xFFFE, struct.pack("<HHI", 22, 16, 4) + struct.pack("<H", field(1, CODES)) + GUID
    fields = struct.pack("<HHIIHH", code, channels, rate, 2 * rate & 0xFFFFFFFF, field(2, BITS), bits) + more
    junk = dice.choice([b"", b"", b"LIST\3\0\0\0abc\0", b"junk" + struct.pack("<I", field(4, SIZES)) + b"abcd"])
    head = b"WAVEfmt " + struct.pack("<I", field(len(fields), SIZES)) + fields + junk
    head += b"data" + struct.pack("<I", field(len(data), SIZES, 0.2))
    return damaged(b"RIFF" + struct.pack("<I", field(len(head) + len(data), SIZES)) + head + data, dice)


def container(dice: random.Random) -> bytes:
    """A file of another format that libsndfile writes, or random bytes where it is not installed."""
    kind, subtype = dice.choice(KINDS).split()
    if importlib.util.find_spec("soundfile") is None:
        return dice.randbytes(dice.randrange(300))
    import numpy as np
    import soundfile

    samples = np.random.default_rng(dice.randrange(2**32)).uniform(-1, 1, dice.choice([0, 1, 4000]))
    if subtype == "FLOAT" and len(samples):
        samples[0] = dice.choice([0.0, np.nan, np.inf, -np.inf, 1e38])
    file = io.BytesIO()
    soundfile.write(file, samples, dice.choice([8000, 16_000, 44_100]), format=kind, subtype=subtype)
    return damaged(file.getvalue(), dice)


def damaged(content: bytes, dice: random.Random) -> bytes:
    """The same, some bytes changed, or without its end, now and then."""
    changed = bytearray(content)
    if changed and dice.random() < 0.3:
        for _ in range(dice.choice([1, 1, 2, 8])):
            changed[dice.randrange(min(len(changed), dice.choice([48, len(changed)])))] = dice.randrange(256)
    if dice.random() < 0.15:
        del changed[dice.randrange(min(len(changed), dice.choice([60, len(changed) + 1])) + 1) :]
    return bytes(changed)


def attack(content: bytes, by: str, options: list[str], path: Path) -> str | None:
    """One recording."""
    path.write_bytes(content)
    name, given = (str(path), b"") if by == "file" else ("standard input", content)
    out, err = io.StringIO(), io.StringIO()
    stdin = io.TextIOWrapper(io.BytesIO(given))
    try:
        with (
            bounded(SECONDS, GIB),
            mock.patch.object(sys, "stdin", stdin),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = entry.main(["transcribe", "digits", str(path) if by == "file" else "-", *options])
    except (TooLong, Exception) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    finally:
        path.unlink()
    words, said = out.getvalue(), err.getvalue()
    if code == entry.OK:
        wrong = set(words.split()) - set(SPOKEN)
        return f"words that no digit has, or a message: {words[:100]!r}, {said[:100]!r}" if wrong or said else None
    if code != entry.WRONG:
        return f"exit code {code}: {said[:200]!r}"
    if not said.startswith("longspan: error: ") or said.count("\n") != 1 or not said.endswith("\n"):
        return f"no line of an error: {said[:200]!r}"
    installed = importlib.util.find_spec("soundfile") and importlib.util.find_spec("kaldi_native_fbank")
    return f"does not name {name}: {said[:200]!r}" if installed and name not in said else None
