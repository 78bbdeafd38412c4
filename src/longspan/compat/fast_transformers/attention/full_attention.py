"""Softmax attention over all keys that a mask allows."""

import torch.nn.functional as F
from torch import Tensor, nn

from ....ops.softmax import dense
from ..attention_registry import AttentionRegistry, EventDispatcherInstance, Float, Optional
from ..events import AttentionEvent, EventDispatcher
from ..masking import Masks, visible
from .attention_layer import SequenceAttention


class Softmax(nn.Module):
    """Base class of softmax attentions.

    Args:
        softmax_temp: factor of the products; None means 1 / sqrt(E).
        attention_dropout: probability of dropout of the weights.
        event_dispatcher: a dispatcher, or its name.
    """

    def __init__(
        self,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        self.softmax_temp = softmax_temp
        self.dropout = nn.Dropout(attention_dropout)
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def scaled(self, q: Tensor) -> Tensor:
        """Scale queries (..., E) so that their products, divided by sqrt(E), are the logits."""
        return q if self.softmax_temp is None else q * (self.softmax_temp * q.shape[-1] ** 0.5)

    def read(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Attend: q (N,H,L,E), k (N,H,S,E), v (N,H,S,D), mask bool to (N,H,L,S) -> (N,H,L,D); zero without keys."""
        p = self.dropout.p if self.training else 0.0
        return dense.attend(self.scaled(q), k, v, mask=mask, causal=causal, dropout=p)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
        """Call ``read``, or compute the matrix and dispatch it as an AttentionEvent if there is a listener."""
        if not self.event_dispatcher.listening:
            return self.read(q, k, v, mask, causal)
        weights, _ = dense.weights(self.scaled(q), k, mask=mask, causal=causal)
        weights = F.dropout(weights, self.dropout.p, self.training)
        # A recurrent model has no axis for its single query.
        shown = weights if q.shape[2] != 1 or not self.recurrent else weights[:, :, 0]
        self.event_dispatcher.dispatch(AttentionEvent(self, shown))
        return weights @ v

    recurrent = False


class FullAttention(Softmax, SequenceAttention):
    """Softmax attention under any mask; a query that sees no key gets zero. Arguments as in ``Softmax``."""

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D)."""
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        return self.attend(q, k, v, *visible(masks.attention, masks.keys)).transpose(1, 2).contiguous()


SOFTMAX_PARAMETERS = [
    ("softmax_temp", Optional(Float)),
    ("attention_dropout", Optional(Float, 0.1)),
    ("event_dispatcher", Optional(EventDispatcherInstance, "")),
]
AttentionRegistry.register("full", FullAttention, SOFTMAX_PARAMETERS)
