"""How much of an error is rounding: the change of exact answers when their data move by as much as a rounding.

Where a sum may vanish in a denominator, roundings are magnified without bound, in the definition, too. What one can ask
for then is what numerical analysis asks for: the exact answer to nearly the same question.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .gauge import Broken, Gauge

NEIGHBOURS, AMPLE = 8, 8  # how many such questions are asked, and how many of their largest changes are granted


class Question:
    """A function, a module in float64 and inputs, whose exact answer is function(module, *inputs): a list of tensors.

    The last ``sums`` of them are sums over all tokens, in which large terms may cancel before and after a move alike.
    """

    def __init__(self, function: Callable[..., list[Tensor]], module: Any, *inputs: Tensor, sums: int = 0):
        self.function, self.module, self.inputs, self.sums = function, module, inputs, sums
        self.answer = [t.detach() for t in function(module, *inputs)]
        self._changes: dict[float, list[Tensor]] = {}

    def close(self, gauge: Gauge, found: list[Tensor], what: str, tolerance: float, dtype: torch.dtype) -> None:
        """Tensors equal the answer up to ``tolerance``, or else are as near as answers to nearly the same question.

        Inputs and weights move by up to the eps of ``dtype``, relatively. Each element is granted its own change, AMPLE
        times, and elements of ``sums`` the largest relative change of all tensors besides.
        """
        try:
            gauge.close(found, self.answer, what, tolerance)
        except Broken:
            granted = [AMPLE * change for change in self._moves(torch.finfo(dtype).eps)]
            gauge.close(found, self.answer, what, tolerance, granted)

    def _moves(self, eps: float) -> list[Tensor]:
        """The largest change of each element, and what is granted to sums."""
        if eps not in self._changes:
            self._changes[eps] = changes = self._elements(eps)
            scales = [e.abs().max().clamp(min=1) if e.numel() else torch.ones(()) for e in self.answer]
            relative = max(float((c / s).max()) for c, s in zip(changes, scales, strict=True) if c.numel())
            for i in range(len(changes) - self.sums, len(changes)):
                changes[i] = changes[i] + relative * scales[i]
        return self._changes[eps]

    def _elements(self, eps: float) -> list[Tensor]:
        """The largest change of each element; none is granted to one that is not finite."""
        generator = torch.Generator().manual_seed(6)

        def moved(t: Tensor) -> Tensor:
            return t.double() * (1 + eps * (2 * torch.rand(t.shape, generator=generator, dtype=torch.float64) - 1))

        changes = [torch.zeros_like(e) for e in self.answer]
        for _ in range(NEIGHBOURS):
            near = copy.deepcopy(self.module)
            with torch.no_grad():
                for weight in near.parameters():
                    weight.copy_(moved(weight))
            answers = self.function(near, *map(moved, self.inputs))
            now = [(y.detach() - e).abs().nan_to_num(0.0, 0.0) for y, e in zip(answers, self.answer, strict=True)]
            changes = list(map(torch.maximum, changes, now))
        return changes
