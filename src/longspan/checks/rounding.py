"""How much of an error is rounding: the change of exact answers when their data move by as much as a rounding.

Where a sum may vanish in a denominator, roundings are magnified without bound, in the definition, too. What one can ask
for then is what numerical analysis asks for: the exact answer to nearly the same question.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .gauge import Broken, Gauge

NEIGHBOURS, AMPLE = 8, 8  # how many such questions are asked, and how many of their largest changes are granted


def close(
    gauge: Gauge,
    found: list[Tensor],
    expected: list[Tensor],
    what: str,
    tolerance: float,
    question: tuple[Callable[..., list[Tensor]], nn.Module, tuple[Tensor, ...]],
    dtype: torch.dtype,
    *,
    sums: int = 0,
) -> None:
    """Tensors are equal up to ``tolerance``; where that does not do, as far as those of nearly the same question.

    ``question``: a function, the module in float64 and the inputs, whose answer function(module, *inputs) is
    ``expected``. Inputs and weights move by up to the eps of ``dtype``, relatively. Each element is granted its own
    change, AMPLE times. The last ``sums`` tensors are sums over all tokens, in which large terms may cancel before and
    after a move alike; their elements are granted the largest relative change of all tensors besides.
    """
    try:
        gauge.close(found, expected, what, tolerance)
    except Broken:
        expected = [e.detach() for e in expected]
        changes = _changes(expected, *question, eps=torch.finfo(dtype).eps)
        scales = [e.abs().max().clamp(min=1) if e.numel() else torch.ones(()) for e in expected]
        relative = max(float((c / s).max()) for c, s in zip(changes, scales, strict=True) if c.numel())
        for i in range(len(expected) - sums, len(expected)):
            changes[i] = changes[i] + relative * scales[i]
        gauge.close(found, expected, what, tolerance, [AMPLE * change for change in changes])


def _changes(
    expected: list[Tensor], call: Callable[..., list[Tensor]], module: Any, inputs: tuple[Tensor, ...], *, eps: float
) -> list[Tensor]:
    """The largest change of each element; none is granted to one that is not finite."""
    generator = torch.Generator().manual_seed(6)

    def moved(t: Tensor) -> Tensor:
        return t.double() * (1 + eps * (2 * torch.rand(t.shape, generator=generator, dtype=torch.float64) - 1))

    changes = [torch.zeros_like(e) for e in expected]
    for _ in range(NEIGHBOURS):
        near = copy.deepcopy(module)
        with torch.no_grad():
            for weight in near.parameters():
                weight.copy_(moved(weight))
        answers = call(near, *map(moved, inputs))
        now = [(y.detach() - e).abs().nan_to_num(0.0, 0.0) for y, e in zip(answers, expected, strict=True)]
        changes = list(map(torch.maximum, changes, now))
    return changes
