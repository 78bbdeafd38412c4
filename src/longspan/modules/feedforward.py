"""The feed-forward network, plain and gated."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class FeedForward(nn.Module):
    """The feed-forward network W2 act(W1 x), or gated W2 (act(W1 x) * W3 x): (B,N,dim) -> (B,N,dim).

    Args:
        dim: Width of input and output.
        inner: Inner width.
        activation: relu, gelu, gelu_tanh (gelu approximated by tanh, as in GPT-2), silu, squared_relu, geglu or swiglu;
            the last two are gated.

    References:
        Vaswani et al. 2017 (1706.03762), eq. 2; Shazeer 2020 (2002.05202) for geglu and swiglu.
    """

    def __init__(self, dim: int, inner: int, activation: str):
        super().__init__()
        self.activation = activation
        self.gated = activation in ("geglu", "swiglu")
        self.expand = nn.Linear(dim, 2 * inner if self.gated else inner)
        self.contract = nn.Linear(inner, dim)

    def forward(self, x: Tensor, *, chunk: int = 0) -> Tensor:
        """Process ``chunk`` tokens at a time (0: all); inner activations are recomputed in the backward pass."""
        if not chunk or x.shape[1] <= chunk:
            return self._fed(x)
        parts = x.split(chunk, 1)
        if not torch.is_grad_enabled():
            return torch.cat([self._fed(part) for part in parts], 1)
        return torch.cat(
            [checkpoint(self._fed, part, use_reentrant=False, preserve_rng_state=False) for part in parts], 1
        )

    def _fed(self, x: Tensor) -> Tensor:
        hidden = self.expand(x)
        if self.gated:
            hidden, gate = hidden.chunk(2, -1)
            return self.contract((F.gelu(hidden) if self.activation == "geglu" else F.silu(hidden)) * gate)
        match self.activation:
            case "squared_relu":
                return self.contract(F.relu(hidden).square())
            case "gelu_tanh":
                return self.contract(F.gelu(hidden, approximate="tanh"))
            case name:
                return self.contract(getattr(F, name)(hidden))
