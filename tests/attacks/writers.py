"""Several processes and threads save to one folder while others load: each load gives one save, whole, and none fails.

A case is a round of saves. Model number k has all weights k, and k in its config, header and training state.
"""

import multiprocessing
import os
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder

from . import Case

SHORT, LONG = 3, 150
PROCESSES, THREADS, SAVES = 2, 2, 6
NUMBERS = 97


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        for number in range(count):
            choice = random.Random(f"{seed}/{number}")
            yield f"round-{number}", lambda choice=choice: _round(folder / "round", choice, pool)


def _round(folder: Path, choice: random.Random, pool: Any) -> str | None:
    shutil.rmtree(folder, ignore_errors=True)
    place = folder / "c"
    _save(place, 0)
    numbers = [[choice.randrange(NUMBERS) for _ in range(SAVES)] for _ in range(PROCESSES)]
    writing = pool.starmap_async(_write, [(place, mine) for mine in numbers])
    said = None
    while not writing.ready():
        said = said or _read(place)
    refused = [line for lines in writing.get() for line in lines]
    if said or refused:
        return said or refused[0]
    if left := sorted(set(os.listdir(folder)) - {"c"}):
        return f"{left[0]} is left"
    _save(place, 1)
    return _read(place, wanted=1)


def _write(place: Path, numbers: list[int]) -> list[str]:
    def save(number: int) -> str:
        try:
            _save(place, number)
        except Exception as error:
            return f"a save failed: {type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(THREADS) as threads:
        return [line for line in threads.map(save, numbers) if line]


def _save(place: Path, number: int) -> None:
    model = _model(number)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    checkpoint.save(model, place, training={"number": number}, extra={"number": number})


def _model(number: int) -> Decoder:
    return Decoder(DecoderConfig(dim=4, depth=1, heads=2, feedforward=4, vocab=5, length=3, dropout=number / NUMBERS))


def _read(place: Path, wanted: int | None = None) -> str | None:
    """What is wrong with what is there now, if anything is."""
    try:
        loaded, model = checkpoint.load(place), _model(0)
        training, header = checkpoint.restore(place, model), checkpoint.read_config(place)
    except Exception as error:
        return f"a load failed: {type(error).__name__}: {error}"
    for name, found, number in (
        ("load", loaded, round(loaded.config.dropout * NUMBERS)),
        ("restore", model, training["number"]),
        ("read_config", _filled(header["number"]), round(header["config"]["dropout"] * NUMBERS)),
    ):
        values = {value for parameter in found.parameters() for value in parameter.unique().tolist()}
        if values != {number} or wanted not in (None, number):
            return f"{name} mixed {number} with {sorted(values)}"
    return None


def _filled(number: int) -> torch.nn.Module:
    return torch.nn.ParameterList([torch.full((1,), float(number))])
