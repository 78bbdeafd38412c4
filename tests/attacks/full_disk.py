"""Let the disk fill up at any byte of a save: one line reports it, the older file stays, and nothing else is left.

Files that may not grow stand in for the disk, so that no other program meets it.
"""

import os
import random
import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import longspan
from longspan._utils import png
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan_lab._utils import plots

from . import Case

SHORT, LONG = 25, 3000


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    # As large as the largest file of each.
    largest = {"c": 60_000, "state": 4000, "text": 9000, "picture.png": 700, "figure.png": 1400}
    for name in largest:
        _write(folder, name, 1)
    for number in range(count):
        choice = random.Random(f"{seed}/{number}")
        name = choice.choice(sorted(largest))
        limit = choice.randrange(largest[name])
        yield f"{number}-{name}-{limit}", lambda name=name, limit=limit: _attack(folder, name, limit)


def _attack(folder: Path, name: str, limit: int) -> str | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    said = ""
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        _write(folder, name, 2)
    except (ValueError, OSError) as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    if sorted(os.listdir(folder)) != ["c", "figure.png", "picture.png", "state", "text"]:
        return f"it left {sorted(os.listdir(folder))}"
    if said and (str(folder / name) not in said or "\n" in said or "File too large" not in said):
        return f"it said {said!r}"
    if _number(folder, name) != (1 if said else 2):
        return "the older one was changed by a save that failed, or stayed after one that did not"
    if not said:
        _write(folder, name, 1)
    return None


def _write(folder: Path, name: str, number: int) -> None:
    match name:
        case "c":
            checkpoint.save(_model(number), folder / name, training=_training(number))
        case "state":
            longspan.states.save(_state(number), folder / name)
        case "picture.png":
            png.save(folder / name, _images(number), size=1)
        case "figure.png":
            plt = plots.pyplot()
            figure = plt.figure(figsize=(1, 1), facecolor=(number / 2, 0.0, 0.0))
            figure.text(0, 0, "longspan")
            plots.save(plt, figure, folder / name)
        case _:
            checkpoint.write_text(folder / name, str(number) * 9000)


def _number(folder: Path, name: str) -> int:
    match name:
        case "c":
            model = checkpoint.load(folder / name)
            values = {v for p in model.parameters() for v in p.unique().tolist()}
            values |= set(checkpoint.load_training(folder / name)["moments"].unique().tolist())
        case "state":
            values = set(longspan.states.load(folder / name, _state(0)).sums.unique().tolist())
        case "picture.png":
            values = {_pixels(folder / name)[4:28, 4:28].mean() / 100}
        case "figure.png":
            values = {round(_pixels(folder / name)[0, 0, 0] / 127.5)}
        case _:
            values = set(map(int, (folder / name).read_text()))
    return int(values.pop()) if len(values) == 1 else -1


def _images(number: int) -> torch.Tensor:
    """Return an image with a mean of 100 times the number, and enough levels to make its file large."""
    noise = torch.randint(50, (1, 24, 12), dtype=torch.int16, generator=torch.Generator().manual_seed(0))
    return (100 * number + torch.cat([noise, -noise], 2)).to(torch.uint8)


def _pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def _model(number: int) -> Decoder:
    model = Decoder(DecoderConfig(dim=16, depth=1, heads=2, feedforward=16, vocab=5, length=3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model


def _training(number: int) -> dict:
    return {"moments": torch.full((14_000,), float(number))}


def _state(number: int) -> longspan.attention.linear.LinearState:
    return longspan.attention.linear.LinearState(torch.full((1, 2, 20, 21), float(number)))
