"""Recordings: wav files of one channel and 16 bits, whole or a little at a time."""

import contextlib
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from .. import files

LEAST, MOST = 1_000, 400_000  # samples per second that a recording may have


def read(path: str | Path) -> tuple[Tensor, int]:
    """A recording -> samples (N,) float32 from -1 to 1, and how many of them are a second.

    Raises ValueError, which names the file, for one that cannot be read, is no wav file, is compressed, has several
    channels or other than 16 bits, or ends too early.
    """
    path = Path(path)
    with files.reading(path), open(path, "rb") as file:
        return parsed(file, str(path))


def parsed(file: BinaryIO, name: str) -> tuple[Tensor, int]:
    """``read`` of an open file, which messages call ``name``."""
    with _opened(file, name) as found:
        return _samples(found, found.getnframes(), name), found.getframerate()


def chunks(path: str | Path, seconds: float) -> Iterator[tuple[Tensor, int]]:
    """The same samples, so many seconds at a time, and the rate with each; no more than these are ever in memory.

    Raises ValueError as ``read`` does, and for ``seconds`` in which there is no sample.
    """
    path = Path(path)
    with files.reading(path), open(path, "rb") as file, _opened(file, str(path)) as found:
        rate, left = found.getframerate(), found.getnframes()
        count = int(seconds * rate)
        if count < 1:
            raise ValueError(f"{seconds} s have no sample at {rate} samples per second")
        while left:
            some = min(count, left)
            yield _samples(found, some, str(path)), rate
            left -= some


@contextlib.contextmanager
def _opened(file: BinaryIO, name: str) -> Iterator[wave.Wave_read]:
    try:
        found = wave.open(file)
    except (wave.Error, EOFError) as error:
        raise ValueError(
            f"{name} is no wav file of 16 bit PCM ({str(error) or 'it ends too early'}); convert it to one channel of "
            "16 bits"
        ) from error
    with found:
        channels, bits, rate = found.getnchannels(), 8 * found.getsampwidth(), found.getframerate()
        if channels != 1 or bits != 16:
            raise ValueError(f"{name} has {channels} channels of {bits} bits; convert it to one channel of 16 bits")
        if not LEAST <= rate <= MOST:
            raise ValueError(f"{name} has {rate} samples per second; speech has {LEAST} to {MOST}")
        yield found


def _samples(found: wave.Wave_read, count: int, name: str) -> Tensor:
    content = found.readframes(count)
    if len(content) != 2 * count:
        raise ValueError(f"{name} ends too early: {len(content) // 2} samples came where {count} were announced")
    return torch.from_numpy(np.frombuffer(content, "<i2").astype(np.float32) / 32768)
