"""Mechanisms of longspan as layers of flash-linear-attention, under the original's names of weights."""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from ....ops.tensors import rms_normalize, upcast_half
from .mixer import Call, Mixer, RMSNorm

QKV = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}


class Mechanism(Mixer):
    """A layer that is a mechanism, which a subclass extends too: ``class Layer(Mechanism, attention.moba.MoBA)``.

    ``names`` has the original's names by ours. A subclass calls ``rename`` after the mechanism's ``__init__``.
    """

    names: ClassVar[Mapping[str, str]] = QKV
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def rename(self, hidden: int, qkv_bias: bool = False) -> None:
        """Give the modules the original's names and, in place of projections of x, new ones of ``hidden`` channels."""
        for ours, theirs in self.names.items():
            module = self._modules.pop(ours, None)
            if isinstance(module, nn.Linear):
                bias = module.bias is not None and (ours not in QKV or qkv_bias)
                module = nn.Linear(hidden, module.out_features, bias=bias)
            setattr(self, theirs, module)
        out = self._modules.pop("out")
        assert isinstance(out, nn.Linear)
        self.o_proj = nn.Linear(out.in_features, hidden, bias=False)
        self.dim, self.q_norm, self.k_norm = hidden, None, None

    def __getattr__(self, name: str) -> Any:
        """Return a module by either name."""
        return super().__getattr__(self.names.get(name, name))

    def extra_repr(self) -> str:
        return self.name  # pyright: ignore[reportReturnType] (the mechanism's)

    def start(self, batch: int, capacity: int = 0) -> Any:
        return super(Mixer, self).start(batch, capacity)  # pyright: ignore[reportAttributeAccessIssue] (the mechanism's)

    def forward(self, x: Tensor, state: Any, call: Call) -> tuple[Tensor, Any]:
        return self.attend(x, state, **call.packing)

    def heads_of(
        self, x: Tensor, at: Tensor | None = None, real: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the mechanism, with norms before the rotation if the layer has them."""
        if self.q_norm is None or self.k_norm is None:
            return super().heads_of(x, at, real)  # pyright: ignore[reportAttributeAccessIssue]
        q, k, v = super().heads_of(x, None, real)  # pyright: ignore[reportAttributeAccessIssue]
        return *self.rotated(self.q_norm(q), self.k_norm(k), at), v

    def out(self, o: Tensor) -> Tensor:
        """Return o (B,N,width) as it is: ``_run`` projects it after the layer's gate."""
        return o

    def _run(self, x: Tensor, state: Any, real: Tensor | None, donate: bool) -> tuple[Tensor, Any]:
        o, after = super()._run(x, state, real, donate)  # pyright: ignore[reportAttributeAccessIssue]
        return self.o_proj(self.gated(o, x)), after

    def gated(self, o: Tensor, x: Tensor) -> Tensor:
        """Apply the output norm or gate of a layer to o (B,N,width); x (B,N,hidden) is its input."""
        return o


class HeadNorm(RMSNorm):
    """An RMS norm of each head with its own weights; x (B,H,N,D)."""

    def __init__(self, heads: int, size: int):
        super().__init__(heads * size, 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        y = rms_normalize(upcast_half(x), self.eps)
        assert self.weight is not None
        return (y * self.weight.to(y.dtype).view(x.shape[1], 1, -1)).to(x.dtype)
