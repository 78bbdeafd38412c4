"""Flip bits, zero blocks, cut and swap files: a load refuses, naming the file, or gives exactly what was written.

Of a checkpoint, of one in parts as ``run.strategy=fsdp`` writes it, and of a state.
"""

import contextlib
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.utils import _pytree as pytree

import longspan
from longspan.models import checkpoint, parts
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder

from . import Case

SHORT, LONG = 60, 20_000
BLOCK = 4096
CONFIG = DecoderConfig(dim=16, depth=2, heads=2, feedforward=32, attention="linear; softmax", vocab=17, length=29)
CHECKPOINT = ("model.safetensors", "training.pt", "config.json")
PARTS = (".metadata", "__0_0.distcp")
# The folder of each file.
FOLDERS = dict.fromkeys(CHECKPOINT, "c") | dict.fromkeys(PARTS, "p") | {"state": "."}


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    with _alone(folder):
        yield from _cases(seed, count, folder)


def _cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    whole = [_made(folder / name, number) for number, name in enumerate(("one", "other"))]
    for number in range(count):
        choice = random.Random(f"{seed}/{number}")
        name = choice.choice(tuple(FOLDERS))
        way = choice.choice((_flip, _flip, _zero, _cut, _lengthen, _swap))
        yield (
            f"{number}-{way.__name__[1:]}-{name}",
            lambda name=name, way=way, choice=choice: _attack(folder, name, way, choice, whole[0]),
        )


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process, which can write checkpoints in parts."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _made(folder: Path, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Decoder(CONFIG).eval()
        training = {"step": seed, "moments": [torch.randn(500), torch.randn(3)]}
        checkpoint.save(model, folder / "c", training=training, extra={"step": seed, "run": {"data": "digits"}})
        tensors = {f"model.{n}": t.detach() for n, t in model.state_dict().items()}
        parts.save(model, tensors, folder / "p", training=training, extra={"step": seed})
        with torch.no_grad():
            _, state = model(torch.randint(17, (3, 7)), model.init_state(3))
        longspan.states.save(state, folder / "state")
    return _read(folder, "all")


def _read(folder: Path, name: str) -> Any:
    """What the files of ``folder`` hold: plain values and tensors."""
    if name == "state":
        return longspan.states.load(folder / "state", Decoder(CONFIG).init_state(1))
    if name in PARTS:
        # As a resume does, which begins with the index.
        given = {name: torch.zeros(size, dtype=dtype) for name, (size, dtype) in parts.shapes(folder / "p").items()}
        return [parts.restore(folder / "p", given), given, checkpoint.load(folder / "p").state_dict()]
    model = checkpoint.load(folder / "c")
    found = [model.config.to_dict(), model.state_dict(), checkpoint.load_training(folder / "c")]
    found.append(checkpoint.read_config(folder / "c"))
    return (
        {"whole": found, "parts": _read(folder, PARTS[0]), "state": _read(folder, "state")} if name == "all" else found
    )


def _attack(folder: Path, name: str, way: Callable, choice: random.Random, whole: Any) -> str | None:
    place = folder / "attacked"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "one", place)
    path = place / FOLDERS[name] / name
    other = folder / "other" / path.relative_to(place)
    path.write_bytes(way(path.read_bytes(), choice, other))
    try:
        found = _read(place, name)
    except ValueError as error:
        # Of files that were exchanged, it is the others that no longer fit.
        named = (*CHECKPOINT, *PARTS) if way is _swap else (path.name,)
        return None if any(file in str(error) for file in named) else f"refused without the file's name: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    wanted = whole["state" if name == "state" else "parts" if name in PARTS else "whole"]
    if way is _swap and name == "state":
        return None  # whole as it is, and another's
    return None if _equal(found, wanted) else "other values than were written"


def _equal(a: Any, b: Any) -> bool:
    (one, first), (other, second) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    same = first == second and len(one) == len(other)
    return same and all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in zip(one, other, strict=True)
    )


def _flip(content: bytes, choice: random.Random, other: Path) -> bytes:
    at = choice.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << choice.randrange(8)]) + content[at + 1 :]


def _zero(content: bytes, choice: random.Random, other: Path) -> bytes:
    at = choice.randrange(-(-len(content) // BLOCK)) * BLOCK
    zeros = bytes(len(content[at : at + BLOCK]))
    return content[:at] + zeros + content[at + BLOCK :]


def _cut(content: bytes, choice: random.Random, other: Path) -> bytes:
    return content[: choice.randrange(len(content))]


def _lengthen(content: bytes, choice: random.Random, other: Path) -> bytes:
    return content + choice.randbytes(choice.randrange(1, 100))


def _swap(content: bytes, choice: random.Random, other: Path) -> bytes:
    return other.read_bytes()
