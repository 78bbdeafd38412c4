"""Softmax attention over a window around each query."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_registry import AttentionRegistry, Int
from ..events import EventDispatcher
from ..masking import Masks, keys_of
from .attention_layer import SequenceAttention
from .full_attention import SOFTMAX_PARAMETERS, Softmax


class LocalAttention(Softmax, SequenceAttention):
    """Query l sees the allowed keys from l - c // 2 up to and without l + (c + 1) // 2; c = local_context.

    Blocks of queries share the keys of their windows: O(L c) time and memory.

    Args:
        local_context: number of keys of a window.
        softmax_temp: factor of the products; None means 1 / sqrt(E).
        attention_dropout: probability of dropout of the weights.
        event_dispatcher: a dispatcher, or its name.

    Raises:
        ValueError: ``local_context`` is below one.
    """

    def __init__(
        self,
        local_context: int,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        if local_context < 1:
            raise ValueError(f"local_context={local_context} must be at least 1: a window has at least one key")
        self.local_context = local_context

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,D)."""
        batch, length, size, context = len(queries), queries.shape[1], keys.shape[1], self.local_context
        if not (length and size):
            return values.new_zeros(*queries.shape[:3], values.shape[-1])
        block = max(context, 32)
        blocks, left, width = -(-length // block), context // 2, block + context - 1
        q = F.pad(queries, (0, 0, 0, 0, 0, blocks * block - length)).unflatten(1, (blocks, block))
        # Window w of keys starts ``left`` before block w of queries.
        right = blocks * block + context - 1 - left - size
        k, v = (F.pad(x, (0, 0, 0, 0, left, right)).unfold(1, width, block) for x in (keys, values))
        q = q.flatten(0, 1).transpose(1, 2)  # (N blocks, H, block, E)
        k, v = (x.flatten(0, 1).mT for x in (k, v))  # (N blocks, H, width, E)
        mask = self._mask(masks.attention, masks.keys, blocks, block, width, (length, size), queries.device)
        out = self.read(q, k, v, mask.expand(batch, -1, -1, -1).flatten(0, 1)[:, None])
        return out.transpose(1, 2).unflatten(0, (batch, blocks)).flatten(1, 2)[:, :length].contiguous()

    def _mask(self, attn_mask, key_lengths, blocks, block, width, sizes, device) -> Tensor:
        """Return which key of its window each query of a block sees: bool (N|1, blocks, block, width)."""
        (length, size), left = sizes, self.local_context // 2
        starts = torch.arange(blocks, device=device)[:, None] * block
        at = starts + torch.arange(block, device=device)  # (blocks, block)
        to = starts - left + torch.arange(width, device=device)  # (blocks, width)
        behind = to[:, None, :] - at[:, :, None] + left
        allowed = ((behind >= 0) & (behind < self.local_context) & ((to >= 0) & (to < size))[:, None, :])[None]
        near, seen = at.clamp(max=length - 1), to.clamp(0, size - 1)
        if not attn_mask.all_ones:
            allowed = allowed & attn_mask.bool_matrix[near[:, :, None], seen[:, None, :]]
        real = keys_of(key_lengths)
        return allowed if real is None else allowed & real[:, seen][:, :, None, :]


AttentionRegistry.register("local", LocalAttention, [*SOFTMAX_PARAMETERS, ("local_context", Int)])
