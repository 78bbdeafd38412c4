"""Softmax attention over the keys with the largest logits."""

import torch
from torch import Tensor

from ..attention_registry import AttentionRegistry, Int, Optional
from ..events import EventDispatcher
from ..masking import Masks, visible
from .attention_layer import SequenceAttention
from .full_attention import SOFTMAX_PARAMETERS, Softmax


class ExactTopKAttention(Softmax, SequenceAttention):
    """Each query sees its ``topk`` allowed keys with the largest products; all products are computed.

    Args:
        topk: number of keys.
        softmax_temp: factor of the products; None means 1 / sqrt(E).
        attention_dropout: probability of dropout of the weights.
        event_dispatcher: a dispatcher, or its name.

    Raises:
        ValueError: ``topk`` is below one.
    """

    def __init__(
        self,
        topk: int = 32,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        if topk < 1:
            raise ValueError(f"topk={topk} must be at least 1: a query sees at least one key")
        self.topk = topk

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D)."""
        q, k, v = (x.transpose(1, 2) for x in (queries, keys, values))
        mask, causal = visible(masks.attention, masks.keys)
        with torch.no_grad():
            products = self.scaled(q) @ k.mT
            allowed = torch.ones_like(products, dtype=torch.bool)
            if mask is not None:
                allowed = allowed & mask
            if causal:
                allowed = allowed.tril()
            best = products.masked_fill(~allowed, -torch.inf).topk(min(self.topk, k.shape[2]), -1).indices
            chosen = torch.zeros_like(allowed).scatter_(-1, best, True) & allowed
        return self.read(q, k, v, chosen).transpose(1, 2).contiguous()


AttentionRegistry.register("exact-topk", ExactTopKAttention, [*SOFTMAX_PARAMETERS, ("topk", Optional(Int, 32))])
