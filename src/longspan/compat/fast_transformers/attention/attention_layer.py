"""Projections around an attention: split into heads, and join the outputs of the heads."""

from torch import Tensor, nn

from ..events import EventDispatcher, QKVEvent
from ..masking import BaseMask, Masks


class SequenceAttention(nn.Module):
    """Base class of attentions over whole sequences; each class says which masks it supports."""

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:
        """Attend to a sequence.

        Args:
            queries: (N,L,H,E).
            keys: (N,S,H,E).
            values: (N,S,H,D).
            attn_mask: (L,S).
            query_lengths: (N,L).
            key_lengths: (N,S).

        Returns:
            (N,L,H,D).
        """
        return self.compute(queries, keys, values, Masks(attn_mask, query_lengths, key_lengths))

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Attend; see ``forward``."""
        raise NotImplementedError(f"{type(self).__name__} must define compute")


class Projections(nn.Module):
    """Four projections around an ``inner_attention``, with the original's parameter names; see ``AttentionLayer``."""

    def __init__(
        self,
        attention: nn.Module,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
        d_model_keys: int | None = None,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        d_keys, d_values = d_keys or d_model // n_heads, d_values or d_model // n_heads
        d_model_keys = d_model_keys or d_model
        self.inner_attention = attention
        self.query_projection = nn.Linear(d_model, d_keys * n_heads)
        self.key_projection = nn.Linear(d_model_keys, d_keys * n_heads)
        self.value_projection = nn.Linear(d_model_keys, d_values * n_heads)
        self.out_projection = nn.Linear(d_values * n_heads, d_model)
        self.n_heads = n_heads
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """Project and split into heads: (..., d_model) -> (..., H, E)."""
        return projection(x).unflatten(-1, (self.n_heads, -1))

    def dispatch(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Dispatch a QKVEvent."""
        if self.event_dispatcher.listening:
            self.event_dispatcher.dispatch(QKVEvent(self, queries, keys, values))


class AttentionLayer(Projections):
    """Multi-head attention over whole sequences.

    Args:
        attention: a module, called with queries (N,L,H,E), keys (N,S,H,E), values (N,S,H,D) and the three masks, that
            returns (N,L,H,D).
        d_model: width of the model.
        n_heads: number of heads.
        d_keys: key dim of a head; None means d_model // n_heads.
        d_values: value dim of a head; None means d_model // n_heads.
        d_model_keys: width of keys and values before their projection; None means d_model.
        event_dispatcher: a dispatcher, or its name.
    """

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: BaseMask,
        query_lengths: BaseMask,
        key_lengths: BaseMask,
    ) -> Tensor:
        """Attend to a sequence.

        Args:
            queries: (N,L,d_model).
            keys: (N,S,d_model_keys).
            values: (N,S,d_model_keys).
            attn_mask: (L,S).
            query_lengths: (N,L).
            key_lengths: (N,S).

        Returns:
            (N,L,d_model).
        """
        q = self.heads(self.query_projection, queries)
        k, v = self.heads(self.key_projection, keys), self.heads(self.value_projection, values)
        self.dispatch(q, k, v)
        out = self.inner_attention(q, k, v, attn_mask, query_lengths, key_lengths)
        return self.out_projection(out.flatten(-2))
