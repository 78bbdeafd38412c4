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
    paths, after a relu; with ``prenorm`` what a sub-layer reads is normalised and the stream is not, which is the
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

    def forward(self, x: Tensor, state: Any = None, *, carry: Any = None, **arguments: Any) -> tuple[Tensor, Any, Any]:
        """x (B,N,dim), the attention's state, carry and arguments -> x (B,N,dim), state, carry.

        An attention that carries gets what the layer below handed on, or as the first one its own beginning. With cross
        attention the state is a ``CrossState``; where there is none, ``context`` (B,M,dim) and ``context_mask`` (B,M)
        come.
        """
        given = _context(arguments)
        own, kept = state if isinstance(state, CrossState) else (state, None)
        y, own, carry = self._attended(x, own, carry, arguments)
        x = self.join1(x, y)
        x = x if self.prenorm else self.norm1(x)
        if self.cross is not None:
            y, kept = self._crossed(x, kept, given, arguments.get("mask"))
            x = self.join3(x, y)
            x = x if self.prenorm else self.norm3(x)
        x = self.join2(x, self.fed(x))
        new = None if own is None else own if self.cross is None else CrossState(own, kept)
        return x if self.prenorm else self.norm2(x), new, carry

    def attended(self, x: Tensor, state: Any = None, **arguments: Any) -> tuple[Tensor, Any]:
        """What both attentions add to x (B,N,dim), and the state after, for blocks whose paths are summed, prenorm."""
        given = _context(arguments)
        own, kept = state if isinstance(state, CrossState) else (state, None)
        y, own, _ = self._attended(x, own, None, arguments)
        if self.cross is None:
            return y, own
        more, kept = self._crossed(x + y, kept, given, arguments.get("mask"))
        return y + more, None if own is None else CrossState(own, kept)

    def _attended(self, x: Tensor, state: Any, carry: Any, arguments: dict[str, Any]) -> tuple[Tensor, Any, Any]:
        read = self.norm1(x) if self.prenorm else x
        if not self.attention.has_layer_carry:
            y, state = self.attention(read, state, **arguments)
        else:
            if carry is None:
                carry = self.attention.init_carry(read, arguments.get("mask"))
            y, state, carry = self.attention(read, state, carry=carry, **arguments)
        return self.dropout(y), state, carry

    def _crossed(self, x: Tensor, kept: Any, given: dict[str, Any], mask: Tensor | None) -> tuple[Tensor, Any]:
        assert self.cross is not None
        read = self.norm3(x) if self.prenorm else x
        y, kept = self.cross(read, kept, **given) if given else self.cross(read, kept)
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


def _context(arguments: dict[str, Any]) -> dict[str, Any]:
    """Take what belongs to the cross attention out of the arguments of a call."""
    return {name: arguments.pop(name) for name in ("context", "context_mask") if name in arguments}
