"""Packed rows in which one sequence holds NaN, infinity or the largest numbers: the others stay what they are alone.

Any mechanism, backend and type, with states or without, in outputs and in gradients.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import longspan
from longspan import backend
from longspan.ops.native.call import available

from . import Case

SHORT, LONG = 40, 3000
DIM, HEADS = 8, 2
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-9}


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    """See the package."""
    names = longspan.list_mechanisms()
    for i in range(count):
        dice = random.Random(f"{seed}-{i}")
        # Every mechanism in turn.
        spec = dice.choice(longspan.mechanism_examples(names[(seed + i) % len(names)]))
        yield f"{i}-{spec.partition('(')[0]}", lambda spec=spec, i=i: attack(spec, random.Random(f"{seed}-{i}-inside"))


def attack(spec: str, dice: random.Random) -> str | None:
    """One row of a few sequences, one of which is spoilt."""
    torch.manual_seed(dice.randrange(10**6))
    kind = dice.choice(["auto", "auto", "torch", "reference", *(["native"] if available() else [])])
    dtype = dice.choice([torch.float32, torch.float64])
    module = built(spec, dice.random() < 0.5).to(dtype).eval()
    if "segments" not in module.supported_args:
        return None
    lengths = [dice.choice([1, 2, 5, 17, 30]) for _ in range(dice.choice([2, 3, 4]))]
    which = dice.randrange(len(lengths))
    segments = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None]
    x = torch.randn(1, sum(lengths), DIM, dtype=dtype)
    spoilt = segments == which
    bad = x.clone()
    content = dice.choice([float("nan"), float("inf"), -float("inf"), torch.finfo(dtype).max, 1e25])
    if dice.random() < 0.5:
        bad[spoilt] = content
    else:
        start = sum(lengths[:which])
        bad[0, start + dice.randrange(lengths[which]), dice.randrange(DIM)] = content
    mask = (torch.rand(1, sum(lengths)) < 0.8) if dice.random() < 0.3 else None
    # A state belongs to the first sequence.
    state = module.causal and dice.random() < 0.4
    factor = dice.choice([1.0, float("nan")])
    try:
        with backend(kind):
            wanted = outcome(module, x, segments, spoilt, mask, state, 1.0)
            found = outcome(module, bad, segments, spoilt, mask, state, factor)
    except ValueError as error:
        refused = f"backend {kind!r}" in str(error)
        return None if refused else f"ValueError: {str(error)[:200]} ({spec}, {kind}, {dtype})"
    except Exception as error:  # any error counts as a failed answer
        return f"{type(error).__name__}: {str(error).splitlines()[0][:200]} ({spec}, {kind}, {dtype})"
    where = f"{spec}, causal={module.causal}, backend {kind}, {dtype}, {lengths}, {content} in number {which}"
    for what, a, b in zip(("outputs", "gradients"), found, wanted, strict=True):
        error = (a - b).abs().max().item() if a.numel() else 0.0
        if not error <= TOLERANCES[dtype] * max(1.0, b.abs().max().item() if b.numel() else 0.0):
            return f"{what} of other sequences are off by {error:.1e} ({where})"
    return None


def built(spec: str, causal: bool) -> torch.nn.Module:
    """In this direction, where there is one."""
    try:
        return longspan.build(spec, DIM, HEADS, causal=causal)
    except ValueError:
        return longspan.build(spec, DIM, HEADS, causal=not causal)


def outcome(module, x: Tensor, segments: Tensor, spoilt: Tensor, mask: Tensor | None, state: bool, factor: float):
    """Outputs and gradients of the sequences that are not spoilt."""
    x = x.clone().requires_grad_()
    carry = {"carry": module.init_carry(x, mask)} if module.has_layer_carry else {}
    y = module(x, module.init_state(1) if state else None, segments=segments, mask=mask, **carry)[0]
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y).clone()
    upstream[spoilt] *= factor
    (grad,) = torch.autograd.grad(y, [x], upstream)
    return y[~spoilt].detach(), grad[~spoilt]
