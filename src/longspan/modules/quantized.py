"""Linear maps and embeddings whose weights are blocks of few bits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .._utils.spec import known
from ..ops.quantized import check_packed, multiply
from ..ops.quantized.operands import ACTIVATIONS, Map
from ..ops.quantized.packing import Packed, rows, select


class Quantized(nn.Module):
    """A packed weight (N,K) in buffers, which keep their integers in any dtype of the module.

    Args:
        weight: The weight.
        dtype: The dtype of the weights that it replaces, which ``weight`` reports and an embedding returns.

    Raises:
        ValueError: The tensors do not have the shapes of their sizes.
    """

    def __init__(self, weight: Packed, dtype: torch.dtype):
        super().__init__()
        check_packed(weight)
        self.format, self.outputs, self.inputs = weight.format, weight.outputs, weight.inputs
        self.quants: Tensor
        self.scales: Tensor
        self.factors: Tensor
        self.like: Tensor
        for name in ("quants", "scales", "factors"):
            self.register_buffer(name, getattr(weight, name))
        # It follows ``to(dtype)``.
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=weight.quants.device), persistent=False)

    @property
    def packed(self) -> Packed:
        """The weight."""
        return Packed(self.quants, self.scales, self.factors, self.format, self.outputs, self.inputs)

    @property
    def weight(self) -> Tensor:
        """The weight as a tensor (N,K) that is computed when an operation reads it, not for its dtype or shape."""
        return Dequantized(self)

    def dequantize(self) -> Tensor:
        """Return the weight (N,K) in the dtype that it had."""
        return rows(self.packed, 0, self.outputs).to(self.like.dtype)


class QuantizedLinear(Quantized):
    """A linear map with a frozen weight in blocks of few bits: (...,K) -> (...,N).

    Args:
        weight: (N,K), from ``longspan.ops.quantized.pack``.
        bias: (N,) or None.
        activations: As in ``longspan.quantized_linear``.
        dtype: The dtype of the weights that it replaces.

    Raises:
        ValueError: The weight is invalid, or ``activations`` is unknown.
    """

    def __init__(
        self,
        weight: Packed,
        bias: nn.Parameter | None = None,
        *,
        activations: str = "int16",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(weight, dtype)
        self.activations = known(activations, ACTIVATIONS, "kind of activations")
        self.bias = bias

    @property
    def in_features(self) -> int:
        """K, as in ``nn.Linear``."""
        return self.inputs

    @property
    def out_features(self) -> int:
        """N, as in ``nn.Linear``."""
        return self.outputs

    def forward(self, x: Tensor) -> Tensor:
        """(...,K) -> (...,N) in x's dtype."""
        return multiply(Map(x, self.bias, *self.packed, self.activations))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.inputs}, {self.outputs}, {self.format}, bias={self.bias is not None}, {self.activations}"


class QuantizedEmbedding(Quantized):
    """An embedding whose rows are blocks of few bits; ``project`` is the output layer that shares them.

    Args:
        weight: (N,K), from ``longspan.ops.quantized.pack``.
        activations: Those of ``project``.
        dtype: The dtype of the outputs.

    Raises:
        ValueError: The weight is invalid, or ``activations`` is unknown.
    """

    def __init__(self, weight: Packed, *, activations: str = "int16", dtype: torch.dtype = torch.float32):
        super().__init__(weight, dtype)
        self.activations = known(activations, ACTIVATIONS, "kind of activations")

    @property
    def num_embeddings(self) -> int:
        """N, as in ``nn.Embedding``."""
        return self.outputs

    @property
    def embedding_dim(self) -> int:
        """K, as in ``nn.Embedding``."""
        return self.inputs

    def forward(self, indices: Tensor) -> Tensor:
        """Indices (...) -> rows (...,K). Raises IndexError for one out of range."""
        return select(self.packed, indices).to(self.like.dtype)

    def project(self, x: Tensor) -> Tensor:
        """(...,K) -> (...,N) in x's dtype."""
        return multiply(Map(x, None, *self.packed, self.activations))

    def extra_repr(self) -> str:
        """What ``print`` shows."""
        return f"{self.outputs}, {self.inputs}, {self.format}"


class Dequantized(Tensor):
    """The weight of a ``Quantized`` module in floating-point numbers, which each operation on it computes again."""

    @staticmethod
    def __new__(cls, layer: Quantized):  # pyright: ignore[reportIncompatibleMethodOverride] (a subclass by a wrapper)
        return Tensor._make_wrapper_subclass(  # pyright: ignore[reportAttributeAccessIssue] (torch's stubs lack it)
            cls, (layer.outputs, layer.inputs), dtype=layer.like.dtype, device=layer.like.device
        )

    def __init__(self, layer: Quantized):
        self.layer = layer

    def __repr__(self) -> str:
        return f"Dequantized({self.layer.extra_repr()})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda t: t.layer.dequantize(), (args, kwargs or {}))
        return func(*args, **kwargs)
