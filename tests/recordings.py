"""Small recordings that are made, and transcribers too small to know anything."""

import io
import struct
import wave
from pathlib import Path

import numpy as np
import torch

from longspan.models.config import TranscriberConfig
from longspan.models.transcriber import Transcriber


def wav_bytes(samples: np.ndarray, rate: int = 8000, channels: int = 1, width: int = 2) -> bytes:
    """int16 samples as a wav file; other widths and channels get the same bytes."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(np.asarray(samples, "<i2").tobytes())
    return file.getvalue()


def riff(
    data: bytes,
    *,
    size: int | None = None,
    code: int = 1,
    bits: int = 16,
    rate: int = 8000,
    channels: int = 1,
    more: bytes = b"",
    before: bytes = b"",
) -> bytes:
    """Return samples behind a header of any content: ``more`` of the format chunk, chunks ``before`` the samples."""
    width = channels * bits // 8
    fields = struct.pack("<HHIIHH", code, channels, rate, width * rate & 0xFFFFFFFF, width & 0xFFFF, bits) + more
    size = len(data) if size is None else size
    head = b"WAVEfmt " + struct.pack("<I", len(fields)) + fields + before + b"data" + struct.pack("<I", size)
    return b"RIFF" + struct.pack("<I", min(len(head) + size, 0xFFFFFFFF)) + head + data


def noise(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9000, 9000, count, dtype=np.int16)


def write(path: Path, samples: np.ndarray, rate: int = 8000) -> Path:
    path.write_bytes(wav_bytes(samples, rate))
    return path


def config(**fields) -> TranscriberConfig:
    usual = {"dim": 8, "depth": 2, "heads": 2, "feedforward": 16, "features": 5, "labels": "| a b", "positions": "none"}
    return TranscriberConfig(**(usual | fields))


def transcriber(seed: int = 0, **fields) -> Transcriber:
    """Return a float64 model with weights large enough to give labels; channels have a mean and a deviation."""
    torch.manual_seed(seed)
    model = Transcriber(config(**fields)).double().eval()
    with torch.no_grad():
        model.head.weight.mul_(6)
    model.front.calibrate(3 + 2 * torch.randn(50, model.config.features, dtype=torch.float64))
    return model


def fsdd(folder: Path, speakers: tuple[str, ...] = ("ann", "bob", "cy"), indices=(0, 5, 10)) -> Path:
    """A folder of recordings of noise, named as those of the Free Spoken Digit Dataset."""
    folder.mkdir(exist_ok=True)
    for i, speaker in enumerate(speakers):
        for digit in (0, 7):
            for index in indices:
                name = f"{digit}_{speaker}_{index}.wav"
                (folder / name).write_bytes(wav_bytes(noise(1600 + 80 * digit + index, seed=100 * i + index)))
    return folder
