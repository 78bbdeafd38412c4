"""Files of states with other shapes, dtypes, values or trees: ``load_state`` refuses, or what it gives goes on.

The digest of each file fits what is in it, so that it is the content that must be seen.
"""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.utils import _pytree as pytree

import longspan
from longspan.generation.native_decoder import Engine
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.states import utils as states

from . import Case

SHORT, LONG = 100, 20_000
STACKS = ("linear; softmax", "retention; local(window=3)", "average; performer", "synthesizer; gla")
DTYPES = (torch.int8, torch.int32, torch.int64, torch.float16, torch.float64, torch.bool, torch.uint8, torch.float32)
NUMBERS = (-(2**63), -(10**6), -100, -1, 0, 1, 2, 5, 6, 7, 10**6, 2**31, 2**53, 2**62)


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    made: dict[tuple[str, str], tuple[Decoder, Any]] = {}
    for number in range(count):
        choice = random.Random(f"{seed}/{number}")
        key = choice.choice(STACKS), choice.choice(("none", "rotary") if number % 2 else ("none", "learned"))
        way = choice.choice((_reshape, _retype, _count, _count, _value, _rename, _rows))
        yield (
            f"{number}-{way.__name__[1:]}-{key[0]}-{key[1]}",
            lambda key=key, way=way, choice=choice: _attack(folder / "state", _made(made, *key), way, choice),
        )


def _made(made: dict, stack: str, positions: str) -> tuple[Decoder, Any]:
    positions = "none" if positions == "rotary" and stack != STACKS[0] else positions
    if (stack, positions) not in made:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            config = DecoderConfig(8, 2, 2, stack, 8, vocab=5, length=29, positions=positions)
            model = Decoder(config).eval()
            made[stack, positions] = model, model(torch.randint(5, (3, 6)), model.init_state(3))[1]
    return made[stack, positions]


def _attack(path: Path, made: tuple[Decoder, Any], way: Callable, choice: random.Random) -> str | None:
    model, state = made
    leaves = way({name: leaf.clone() for name, leaf in states.named(state).items()}, choice)
    metadata = {"longspan": "state", "tree": states._shape(state), "sha256": states._digest(leaves)}
    save_file(leaves, path, metadata=metadata)
    like = choice.choice((model.init_state(1), model.init_state(2, capacity=4), state))
    try:
        loaded = longspan.states.load(path, like)
    except ValueError as error:
        return None if str(path) in str(error) and "\n" not in str(error) else f"refused without its name: {error}"
    except Exception as error:
        return f"load_state: {type(error).__name__}: {error}"
    try:
        return _goes_on(model, loaded)
    except ValueError:
        return None  # such as a position beyond the table of learned ones
    except Exception as error:
        return f"a call: {type(error).__name__}: {error}"


@torch.no_grad()
def _goes_on(model: Decoder, state: Any) -> str | None:
    rows = len(state.position)
    tokens = torch.zeros(rows, 2, dtype=torch.int64)
    outputs, after = model(tokens, state)
    steps = [model(tokens, state)[0], model(tokens, after)[0]]
    if Engine.why_not(model) == "":
        steps.append(Engine(model)(tokens[:, :1], longspan.states.clone(state))[0])
    if outputs.shape != (rows, 2, 5):
        return f"outputs of shape {tuple(outputs.shape)}"
    clean = all(leaf.isfinite().all() for leaf in pytree.tree_leaves(state) if leaf.is_floating_point())
    bounded = all(leaf.abs().max() < 1e6 for leaf in pytree.tree_leaves(state) if leaf.is_floating_point() and rows)
    if clean and bounded and not all(step.isfinite().all() for step in steps):
        return "outputs that are not finite"
    return None


def _reshape(leaves: dict[str, Tensor], choice: random.Random) -> dict[str, Tensor]:
    name = choice.choice(sorted(leaves))
    shape = list(leaves[name].shape)
    shape[choice.randrange(len(shape))] = choice.choice((0, 1, 2, 4, 5, 6, 7, 13))
    if choice.random() < 0.2:
        shape = shape[1:] if choice.random() < 0.5 else [*shape, 1]
    return leaves | {name: torch.zeros(shape, dtype=leaves[name].dtype)}


def _retype(leaves: dict[str, Tensor], choice: random.Random) -> dict[str, Tensor]:
    name = choice.choice(sorted(leaves))
    return leaves | {name: leaves[name].to(choice.choice(DTYPES))}


def _count(leaves: dict[str, Tensor], choice: random.Random) -> dict[str, Tensor]:
    name = choice.choice(sorted(n for n in leaves if not leaves[n].is_floating_point()))
    counts = leaves[name]
    counts[choice.randrange(len(counts)) if choice.random() < 0.5 else slice(None)] = choice.choice(NUMBERS)
    return leaves


def _value(leaves: dict[str, Tensor], choice: random.Random) -> dict[str, Tensor]:
    name = choice.choice(sorted(n for n in leaves if leaves[n].is_floating_point() and leaves[n].numel()))
    flat = leaves[name].view(-1)
    flat[choice.randrange(len(flat))] = choice.choice((float("nan"), float("inf"), -1e38, 0.0, -5.0))
    return leaves


def _rename(leaves: dict[str, Tensor], choice: random.Random) -> dict[str, Tensor]:
    """Two leaves in each other's place."""
    one, other = choice.sample(sorted(leaves), 2)
    return leaves | {one: leaves[other], other: leaves[one]}


def _rows(leaves: dict[str, Tensor], choice: random.Random) -> dict[str, Tensor]:
    rows = choice.choice((0, 1, 2))
    chosen = sorted(leaves) if choice.random() < 0.5 else choice.sample(sorted(leaves), 1)
    return leaves | {name: leaves[name][:rows].clone() for name in chosen}
