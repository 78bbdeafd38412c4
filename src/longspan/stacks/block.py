"""One block: an attention and a feed-forward network, each with a residual path around it."""

from typing import Any

from torch import Tensor, nn

from ..attention import Attention
from ..config import StackConfig
from ..layers import FeedForward, norm
from . import gates


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual path around it (Vaswani et al. 2017, section 3.1).

    With ``residual`` a gate of GTrXL joins the two paths, after a relu; with ``prenorm`` what a sub-layer reads is
    normalised and the stream is not, which is the identity map reordering of Parisotto et al. 2019, section 3.1.
    """

    def __init__(self, config: StackConfig, attention: Attention):
        super().__init__()
        self.prenorm, self.chunk = config.prenorm, config.feedforward_chunk
        self.attention = attention
        self.feedforward = FeedForward(config.dim, config.feedforward, config.activation)
        self.norm1, self.norm2 = norm(config.norm, config.dim), norm(config.norm, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.join1, self.join2 = (gates.build(config.residual, config.dim) for _ in range(2))

    def forward(self, x: Tensor, state: Any = None, *, carry: Any = None, **arguments: Any) -> tuple[Tensor, Any, Any]:
        """x (B,N,dim), the attention's state, carry and arguments -> x (B,N,dim), state, carry.

        An attention that carries gets what the layer below handed on, or as the first one its own beginning.
        """
        y, state, carry = self.attended(x, state, carry=carry, **arguments)
        x = self.join1(x, y)
        x = x if self.prenorm else self.norm1(x)
        x = self.join2(x, self.fed(x))
        return x if self.prenorm else self.norm2(x), state, carry

    def attended(self, x: Tensor, state: Any = None, *, carry: Any = None, **arguments: Any) -> tuple[Tensor, Any, Any]:
        """What the first residual path adds to x (B,N,dim), and the state and carry after."""
        read = self.norm1(x) if self.prenorm else x
        if not self.attention.carries:
            y, state = self.attention(read, state, **arguments)
        else:
            if carry is None:
                carry = self.attention.init_carry(read, arguments.get("mask"))
            y, state, carry = self.attention(read, state, carry=carry, **arguments)
        return self.dropout(y), state, carry

    def fed(self, x: Tensor) -> Tensor:
        """What the second residual path adds to x (B,N,dim), ``feedforward_chunk`` tokens at a time."""
        read = self.norm2(x) if self.prenorm else x
        return self.dropout(self.feedforward(read, chunk=self.chunk))
