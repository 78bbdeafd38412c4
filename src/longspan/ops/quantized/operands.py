"""The operands of a quantized linear map, as one value that every form takes."""

from typing import NamedTuple

from torch import Tensor

from .packing import Packed


class Map(NamedTuple):
    """Operands of ``quantized_linear``; the fields from ``quants`` on are those of ``Packed``."""

    x: Tensor  # (...,K)
    bias: Tensor | None  # (N,)
    quants: Tensor
    scales: Tensor
    factors: Tensor
    format: str
    outputs: int
    inputs: int
    activations: str  # a key of ACTIVATIONS

    @property
    def weight(self) -> Packed:
        """The weight."""
        return Packed(*self[2:8])


OP = "the quantized linear map"
ACTIVATIONS = {"int16": 32639, "int8": 127, "float32": 0}
"""The largest integer to which activations are rounded; 0: they are not"""
TINY = 1e-30
"""A block of activations that are all smaller counts as zeros"""
