"""Rows over two or three processes, padded anywhere, up to whole ranks: results and gradients are those of one process.

Any mechanism with an exact form on shards, with packed documents or without, after a state or none.
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

import longspan
import ranks
import shard_cases
from longspan.distributed import parallel

from . import Case

SHORT, LONG = 12, 2000
LIMIT = 1e-9
PATIENCE = 10  # seconds that a rank waits


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    names = [name for name in longspan.list_mechanisms() if specs(name)]
    with Ranks() as run:
        for i in range(count):
            dice = random.Random(f"{seed}-{i}")
            # Every mechanism in turn.
            spec = dice.choice(specs(names[(seed + i) % len(names)]))
            yield f"{i}-{spec.partition('(')[0]}", lambda spec=spec, dice=dice: attack(run, spec, dice)


def specs(name: str) -> list[str]:
    """The examples of a mechanism that have an exact form on shards."""
    found = []
    for spec in longspan.mechanism_examples(name):
        with contextlib.suppress(ValueError):
            if not parallel._why_not(longspan.build(spec, shard_cases.DIM, shard_cases.HEADS)):
                found.append(spec)
    return found


class Ranks:
    """A pool of three processes, which is started anew after a call that failed."""

    def __enter__(self) -> "Ranks":
        self.stack, self.run = contextlib.ExitStack(), None
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def __call__(self, *arguments: object, **options: object) -> list[float]:
        if self.run is None:
            self.run = self.stack.enter_context(ranks.pool(3, timeout=PATIENCE))
        try:
            return self.run(*arguments, **options)[0]
        except Exception:
            self.stack.close()
            self.run = None
            raise


def attack(run: Callable[..., list[float]], spec: str, dice: random.Random) -> str | None:
    """One row with shards, padding and documents of random lengths."""
    lengths = [dice.choice([1, 2, 3, 7]) for _ in range(dice.choice([2, 3]))]
    given = {"mask": padding(lengths, dice)}
    if dice.random() < 0.4:
        given["segments"] = documents(sum(lengths), dice)
    given["stated"] = dice.choice([False, True, "continued"])
    where = f"{spec}, shards {lengths}, {given}"
    try:
        gaps = run(len(lengths), shard_cases.attention_gaps, spec, lengths, **given)
    except Exception as error:  # any error counts as a failed answer
        return f"{type(error).__name__}: {str(error)[:300]} ({where})"
    if not max(gaps) <= LIMIT:
        return f"outputs, state, gradients of inputs and of weights differ by {gaps} ({where})"
    return None


def padding(lengths: list[int], dice: random.Random) -> Tensor:
    """A mask (2,N) of which whole shards of a row are padding, or parts, or nothing."""
    rows = []
    for _ in range(shard_cases.BATCH):
        row = []
        for length in lengths:
            share = dice.choice([0.0, 0.0, 0.5, 1.0])
            row += [dice.random() < share for _ in range(length)]
        rows.append(row)
    return torch.tensor(rows)


def documents(tokens: int, dice: random.Random) -> Tensor:
    """Ids (2,N) that never decrease."""
    steps = [[dice.random() < 0.2 for _ in range(tokens)] for _ in range(shard_cases.BATCH)]
    return torch.tensor(steps).long().cumsum(1)
