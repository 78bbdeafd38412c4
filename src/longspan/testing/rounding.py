"""Estimates how much of an error is rounding: the change of the exact answer under rounding of its inputs and weights.

Where a sum may vanish in a denominator, the exact formula magnifies rounding without bound. The criterion is then
backward stability, as in numerical analysis: the result is the exact answer for slightly changed data.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .gauge import Broken, Gauge

NEIGHBORS, AMPLE = 8, 8  # changed data sets that are evaluated; multiple of their largest change that is allowed


class Question:
    """The exact answer ``function(module, *inputs)``, a list of tensors, for a module in float64.

    The last ``sums`` tensors are sums over all tokens, in which large terms may cancel.
    """

    def __init__(self, function: Callable[..., list[Tensor]], module: Any, *inputs: Tensor, sums: int = 0):
        self.function, self.module, self.inputs, self.sums = function, module, inputs, sums
        self.answer = [t.detach() for t in function(module, *inputs)]
        self._changes: dict[float, list[Tensor]] = {}

    def close(self, gauge: Gauge, found: list[Tensor], what: str, tolerance: float, dtype: torch.dtype) -> None:
        """Require tensors to equal the answer up to ``tolerance``, or up to the effect of rounding the data.

        Inputs and weights change by up to the eps of ``dtype``, relatively. An element may deviate by AMPLE times its
        own change. Elements of ``sums`` may also deviate by the largest relative change of all tensors.
        """
        try:
            gauge.close(found, self.answer, what, tolerance)
        except Broken:
            granted = [AMPLE * change for change in self._moves(torch.finfo(dtype).eps)]
            gauge.close(found, self.answer, what, tolerance, granted)

    def _moves(self, eps: float) -> list[Tensor]:
        """The allowed change of each element, before the factor AMPLE."""
        if eps not in self._changes:
            self._changes[eps] = changes = self._elements(eps)
            scales = [e.abs().max().clamp(min=1) if e.numel() else torch.ones((), device=e.device) for e in self.answer]
            relative = max(float((c / s).max()) for c, s in zip(changes, scales, strict=True) if c.numel())
            for i in range(len(changes) - self.sums, len(changes)):
                changes[i] = changes[i] + relative * scales[i]
        return self._changes[eps]

    def _elements(self, eps: float) -> list[Tensor]:
        """The largest change of each element; 0 for elements that are not finite."""
        generator = torch.Generator().manual_seed(6)

        def moved(t: Tensor) -> Tensor:
            drawn = torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.device)
            return t.double() * (1 + eps * (2 * drawn - 1))

        changes = [torch.zeros_like(e) for e in self.answer]
        for _ in range(NEIGHBORS):
            near = copy.deepcopy(self.module)
            with torch.no_grad():
                for weight in near.parameters():
                    weight.copy_(moved(weight))
            answers = self.function(near, *map(moved, self.inputs))
            now = [(y.detach() - e).abs().nan_to_num(0.0, 0.0) for y, e in zip(answers, self.answer, strict=True)]
            changes = list(map(torch.maximum, changes, now))
        return changes
