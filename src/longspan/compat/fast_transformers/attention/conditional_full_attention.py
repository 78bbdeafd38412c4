"""Softmax attention for short sequences, another attention for long ones."""

from torch import Tensor, nn

from ..attention_registry import AttentionRegistry, Int, Optional
from ..events import EventDispatcher
from ..masking import Masks
from .attention_layer import SequenceAttention
from .full_attention import SOFTMAX_PARAMETERS, FullAttention


class ConditionalFullAttention(SequenceAttention):
    """Softmax attention up to ``length_limit`` queries and keys, ``other_attention`` beyond.

    A builder makes it by ``attention_type="conditional-full:linear"``. Lengths are those of the tensors, with padding.

    Args:
        other_attention: the attention for long sequences.
        length_limit: largest number of queries and keys for softmax attention.
        softmax_temp: factor of the products; None means 1 / sqrt(E).
        attention_dropout: probability of dropout of the softmax weights.
        event_dispatcher: a dispatcher, or its name.
    """

    def __init__(
        self,
        other_attention: nn.Module,
        length_limit: int = 512,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        self.full_attention = FullAttention(softmax_temp, attention_dropout, event_dispatcher)
        self.other_attention = other_attention
        self.length_limit = length_limit
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D)."""
        long = max(queries.shape[1], keys.shape[1]) > self.length_limit
        attention = self.other_attention if long else self.full_attention
        return attention(queries, keys, values, masks.attention, masks.queries, masks.keys)


AttentionRegistry.register(
    "conditional-full", ConditionalFullAttention, [*SOFTMAX_PARAMETERS, ("length_limit", Optional(Int, 512))]
)
