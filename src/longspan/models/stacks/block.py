"""One block: attention, optional cross attention and feed-forward network, each with a residual path."""

from typing import Any, NamedTuple

from torch import Tensor, nn

from ...attention import Attention
from ...modules.feedforward import FeedForward
from ...modules.norms import norm
from ..config import StackConfig
from . import gates


class CrossState(NamedTuple):
    """State of a block with cross attention: that of its self-attention, and that of the context."""

    own: Any
    context: Any


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual path.

    With ``config.prenorm``, the inputs of sub-layers are normalized, and the residual stream is not. The option
    ``config.residual`` selects how the output of a sub-layer joins the stream: by addition or by a gate.

    Args:
        config: Sizes and options of the block.
        attention: The self-attention.
        cross: A cross attention between the two, or None.

    References:
        Vaswani et al. 2017, section 3.1; Parisotto et al. 2019, section 3.1, for prenorm ("identity map reordering").
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
        """Run the block.

        Args:
            x: (B,N,dim) inputs.
            state: The state of the attention, or a ``CrossState`` with cross attention.
            carry: The carry of the layer below, for attentions with ``has_layer_carry``; None for the first layer.
            context: (B,M,dim) context of the cross attention, if the state does not hold it.
            context_mask: (B,M) bool, True on real tokens of the context.
            **arguments: Checked arguments of the attention.

        Returns:
            The outputs (B,N,dim), the next state and the carry for the layer above.
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
            y, kept = self._cross_branch(self.cross, x, kept, context, context_mask, arguments.get("mask"))
            x = self.join3(x, y)
            x = x if self.prenorm else self.norm3(x)
        x = self.join2(x, self.ffn_branch(x))
        if own is not None and self.cross is not None:
            own = CrossState(own, kept)
        return x if self.prenorm else self.norm2(x), own, carry

    def attention_branch(
        self,
        x: Tensor,
        state: Any = None,
        *,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        **arguments: Any,
    ) -> tuple[Tensor, Any]:
        """Return what both attentions add to x (B,N,dim), and the next state; for prenorm blocks without gates."""
        own, kept = state if isinstance(state, CrossState) else (state, None)
        y, own = self.attention(self.norm1(x), own, **arguments)
        y = self.dropout(y)
        if self.cross is None:
            return y, own
        more, kept = self._cross_branch(self.cross, x + y, kept, context, context_mask, arguments.get("mask"))
        return y + more, None if own is None else CrossState(own, kept)

    def _cross_branch(
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

    def cross_state(self, context: Tensor, mask: Tensor | None) -> Any:
        """Return the state of the cross attention for a context (B,M,dim) with mask (B,M)."""
        assert self.cross is not None
        given = {"context": context} | ({} if mask is None else {"context_mask": mask})
        return self.cross(context[:, :0], None, **given)[1]

    def ffn_branch(self, x: Tensor) -> Tensor:
        """Return what the feed-forward network adds to x (B,N,dim), ``feedforward_chunk`` tokens at a time."""
        read = self.norm2(x) if self.prenorm else x
        return self.dropout(self.feedforward(read, chunk=self.chunk))
