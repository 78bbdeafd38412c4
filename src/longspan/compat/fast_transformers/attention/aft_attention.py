"""Attention Free Transformer: separate weights for each channel, from the keys and the positions."""

import torch
from torch import Tensor, nn

from ..attention_registry import AttentionRegistry, EventDispatcherInstance, Int, Optional
from ..events import EventDispatcher
from ..masking import Masks, keys_of
from .attention_layer import SequenceAttention

_QUERIES = 32  # queries per block, whose weights over all keys are computed together


class AFTFullAttention(SequenceAttention):
    r"""AFT-full: $\sigma(q_l) \sum_s \mathrm{softmax}_s(k_s + u_l \cdot v_s) v_s$, channel by channel.

    Its cost is quadratic in the length. A query that sees no key gets zero.

    Args:
        max_sequence_length: number of positions, each with rows u and v of the bias.
        aft_parameterization: channels of u and v.
        event_dispatcher: a dispatcher, or its name.

    References:
        Zhai et al. 2021 (2105.14103), eq. 2, with the factorized bias of section 3.1.
    """

    def __init__(
        self,
        max_sequence_length: int = 1024,
        aft_parameterization: int = 64,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__()
        self.u = nn.Parameter(torch.randn(max_sequence_length, aft_parameterization) * 0.01)
        self.v = nn.Parameter(torch.randn(max_sequence_length, aft_parameterization) * 0.01)
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,E) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,E).

        Raises:
            ValueError: values and queries differ in channels, or a length exceeds ``max_sequence_length``.
        """
        _check_sizes(queries, values)
        length, size = queries.shape[1], keys.shape[1]
        if max(length, size) > len(self.u):
            raise ValueError(f"max_sequence_length={len(self.u)} is too small for {length} queries and {size} keys")
        bias = self.u[:length] @ self.v[:size].mT
        allowed = masks.attention.bool_matrix[None]
        real = keys_of(masks.keys)
        allowed = allowed if real is None else allowed & real[:, None, :]
        parts = []
        for start in range(0, length, _QUERIES):
            rows = slice(start, start + _QUERIES)
            logits = keys[:, None] + bias[rows, :, None, None]  # (N,block,S,H,E)
            parts.append(_weighted(logits, values[:, None], allowed[:, rows, :, None, None]))
        out = torch.cat(parts, 1) if parts else torch.zeros_like(queries)
        return (queries.sigmoid() * out).contiguous()


class AFTSimpleAttention(SequenceAttention):
    r"""AFT-simple: $\sigma(q_l) \sum_s \mathrm{softmax}_s(k_s) v_s$, channel by channel, over all or past keys.

    References:
        Zhai et al. 2021 (2105.14103), section 3.2.
    """

    def __init__(self, event_dispatcher: str | EventDispatcher = ""):
        super().__init__()
        self.event_dispatcher = EventDispatcher.get(event_dispatcher)

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,E) for queries (N,L,H,E), keys (N,S,H,E) and values (N,S,H,E).

        The cost is O(L E) for all keys and O(32 L E) for a causal mask.

        Raises:
            ValueError: values and queries differ in channels, the mask is neither all ones nor triangular, or the mask
                is causal and L and S differ.
        """
        _check_sizes(queries, values)
        real = keys_of(masks.keys)
        allowed = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device) if real is None else real
        allowed = allowed[:, :, None, None]
        if masks.attention.all_ones:
            return (queries.sigmoid() * _weighted(keys, values, allowed)[:, None]).contiguous()
        if not masks.attention.lower_triangular or queries.shape[1] != keys.shape[1]:
            raise ValueError(
                "AFTSimpleAttention needs an attn_mask of all ones, or a triangular one with equal numbers of queries "
                "and keys; use AFTFullAttention for other masks"
            )
        return (queries.sigmoid() * _causal(keys, values, allowed)).contiguous()


def _check_sizes(queries: Tensor, values: Tensor) -> None:
    if queries.shape[-1] != values.shape[-1]:
        raise ValueError(
            f"queries gate the values channel by channel, but queries have {queries.shape[-1]} channels and values "
            f"have {values.shape[-1]}; make query_dimensions and value_dimensions equal"
        )


def _weighted(logits: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """Compute softmax over the keys, axis -3: logits, values, allowed (..., S,H,E) -> (..., H,E); zero without keys."""
    logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
    return (logits.softmax(-3) * allowed * values).sum(-3)


def _causal(keys: Tensor, values: Tensor, allowed: Tensor) -> Tensor:
    """Compute softmax over the keys up to each query: (N,L,H,E), allowed (N,L,1,1) -> (N,L,H,E), block by block."""
    lowest = torch.finfo(keys.dtype).min
    keys = keys.masked_fill(~allowed, lowest)
    top = torch.full_like(keys[:, :1], lowest)
    above = below = torch.zeros_like(top)
    parts = []
    for start in range(0, keys.shape[1], _QUERIES):
        rows = slice(start, start + _QUERIES)
        k, v, real = keys[:, rows], values[:, rows], allowed[:, rows]
        # The largest key so far, so that no exponent is positive and the largest does not underflow.
        peak = torch.maximum(k.detach().cummax(1).values, top)  # (N,C,H,E)
        seen = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).tril()
        seen = seen[None, :, :, None, None] & real[:, None]
        weights = (k[:, None] - peak[:, :, None]).masked_fill(~seen, lowest).exp() * seen  # (N,C,C,H,E)
        carried = (top - peak).exp()
        above = carried * above + (weights * v[:, None]).sum(2)
        below = carried * below + weights.sum(2)
        parts.append(above / torch.where(below > 0, below, 1))
        top, above, below = peak[:, -1:], above[:, -1:], below[:, -1:]
    return torch.cat(parts, 1) if parts else torch.zeros_like(values)


_EVENTS = ("event_dispatcher", Optional(EventDispatcherInstance, ""))
AttentionRegistry.register("aft-simple", AFTSimpleAttention, [_EVENTS])
AttentionRegistry.register(
    "aft-full",
    AFTFullAttention,
    [("max_sequence_length", Optional(Int, 1024)), ("aft_parameterization", Optional(Int, 64)), _EVENTS],
)
