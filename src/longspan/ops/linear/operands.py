"""The operands of linear attention, as one value that every form takes."""

from typing import NamedTuple, Required, TypedDict

from torch import Tensor

from ..arguments import CallOptions
from .features import FeatureMap


class LinearOptions(CallOptions, total=False):
    """Keyword arguments of ``linear_attention``."""

    causal: bool
    feature_map: str | FeatureMap
    eps: float


class LinearCall(TypedDict, total=False):
    """Keyword arguments of ``linear.named`` and ``linear.attend``, as in ``linear_attention``."""

    causal: Required[bool]
    eps: Required[float]
    mask: Tensor | None
    segments: Tensor | None
    state: Tensor | None
    donate: bool


class LinearOperands(NamedTuple):
    """Operands of ``linear_attention`` before the feature map, for N queries and M keys; N = M if causal."""

    q: Tensor  # (B,H,N,D)
    k: Tensor  # (B,H,M,D)
    v: Tensor  # (B,H,M,E)
    state: Tensor | None  # (B,H,D,E+1), whose last column is the normalizer; None for zeros
    mask: Tensor | None  # (B,M)
    segments: Tensor | None  # (B,M)
    feature_map: str  # a name in ``features.MAPS``
    eps: float  # added to the denominator
    causal: bool = True
    chunk: int = 0  # tokens of a chunk of the form in torch; 0 chooses by the processor

    TOKENS = ("q", "k", "v")
    AXIS, OUTPUT, op = 2, "v", "linear attention"

    @property
    def token(self) -> bool:
        """Whether the call is one token after a state."""
        return self.causal and self.state is not None and self.q.shape[2] == 1
