"""One block: attention, attention to a context where there is one, and a feed-forward network, each with a residual."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ...attention import Attention
from ...modules.feedforward import FeedForward
from ...modules.norms import norm
from ..config import StackConfig
from . import gates


class CrossState(NamedTuple):
    """What a block with cross attention keeps: the state of its own attention, and what the other read."""

    own: Any
    context: Any


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual path around it (Vaswani et al. 2017, section 3.1).

    ``cross``: a second attention between them, which reads a context. With ``residual`` a gate of GTrXL joins the two
    paths, after a relu; with ``prenorm`` what a sub-layer reads is normalized and the stream is not, which is the
    identity map reordering of Parisotto et al. 2019, section 3.1.
    """

    def __init__(self, config: StackConfig, attention: Attention, cross: Attention | None = None):
        super().__init__()
        self.prenorm, self.chunk = config.prenorm, config.feedforward_chunk
        self.attention = attention
        self.feedforward = FeedForward(config.dim, config.feedforward, config.activation)
        self.norm1, self.norm2 = norm(config.norm, config.dim), norm(config.norm, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.join1, self.join2 = (gates.build(config.residual, config.dim) for _ in range(2))
        self.cross = cross
        if cross is not None:
            self.norm3, self.join3 = norm(config.norm, config.dim), gates.build(config.residual, config.dim)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        carry: Any = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Any, Any]:
        """x (B,N,dim), the attention's state, carry and checked arguments -> x (B,N,dim), state, carry.

        An attention that carries gets what the layer below handed on, or as the first one its own beginning. With cross
        attention the state is a ``CrossState``; where there is none, ``context`` (B,M,dim) and ``context_mask`` (B,M)
        come.
        """
        own, kept = state if isinstance(state, CrossState) else (state, None)
        read = self.norm1(x) if self.prenorm else x
        if self.attention.has_layer_carry:
            arguments["carry"] = self.attention.init_carry(read, arguments.get("mask")) if carry is None else carry
            y, own, carry = self.attention(read, own, **arguments)
        else:
            y, own = self.attention(read, own, **arguments)
        x = self.join1(x, self.dropout(y))
        x = x if self.prenorm else self.norm1(x)
        if self.cross is not None:
            y, kept = self._crossed(self.cross, x, kept, context, context_mask, arguments.get("mask"))
            x = self.join3(x, y)
            x = x if self.prenorm else self.norm3(x)
        x = self.join2(x, self.fed(x))
        new = None if own is None else own if self.cross is None else CrossState(own, kept)
        return x if self.prenorm else self.norm2(x), new, carry

    def attended(
        self,
        x: Tensor,
        state: Any = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Any]:
        """What both attentions add to x (B,N,dim), and the state after, for blocks whose paths are summed, prenorm."""
        own, kept = state if isinstance(state, CrossState) else (state, None)
        y, own = self.attention(self.norm1(x), own, **arguments)
        y = self.dropout(y)
        if self.cross is None:
            return y, own
        more, kept = self._crossed(self.cross, x + y, kept, context, context_mask, arguments.get("mask"))
        return y + more, None if own is None else CrossState(own, kept)

    def _crossed(
        self,
        cross: Attention,
        x: Tensor,
        kept: Any,
        context: Tensor | None,
        context_mask: Tensor | None,
        mask: Tensor | None,
    ) -> tuple[Tensor, Any]:
        y, kept = cross(self.norm3(x) if self.prenorm else x, kept, context=context, context_mask=context_mask)
        return self.dropout(y if mask is None else y.masked_fill(~mask[..., None], 0.0)), kept

    def reads(self, context: Tensor, mask: Tensor | None) -> Any:
        """What the cross attention keeps of a context (B,M,dim), mask (B,M)."""
        assert self.cross is not None
        given = {"context": context} | ({} if mask is None else {"context_mask": mask})
        return self.cross(context[:, :0], None, **given)[1]

    def fed(self, x: Tensor) -> Tensor:
        """What the feed-forward network adds to x (B,N,dim), ``feedforward_chunk`` tokens at a time."""
        read = self.norm2(x) if self.prenorm else x
        return self.dropout(self.feedforward(read, chunk=self.chunk))
