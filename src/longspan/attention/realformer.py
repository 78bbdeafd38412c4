"""Softmax attention with residual scores: every layer adds its own to those of the layer below."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, split, upcast_half
from ..states import kv_cache
from ..states.kv_cache import CachedContext, KeyValues
from .base import Attention


class RealFormer(Attention):
    r"""Softmax attention that adds the scores of the layer below to its own, head by head.

    $L^\prime$ are the scores of the next lower layer of this kind in a stack, and 0 in the first one. What goes from
    layer to layer (``carry``) is $L$ before any mask, (B,H,N,M),
    float32 at least: a call's N queries against the M keys that it sees, those of the state included, so that steps
    and packed or padded rows get what one whole call gives. It is no part of the state. Memory is N M numbers per head
    from each layer to the next, which no fused kernel spares.

    ``context_dim``: width of the context of cross attention (0: dim).

    The scores are written out, which fused softmax does without, so that it is slower than that at every length.

    Source: He et al. 2020, section 3. Raises ValueError for a carry that is not of this call's tokens and keys.
    """

    name, paper, cost = "realformer", "2012.11747", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in \mathcal{A}_i} L_{ij}, \quad "
        r"L_{ij} = \frac{q_i \cdot k_j}{\sqrt D} + L_{ij}^\prime",
    )
    citation = (
        "He, Ruining and Ravula, Anirudh and Kanagal, Bhargav and Ainslie, Joshua",
        "RealFormer: Transformer Likes Residual Attention",
        2020,
    )
    has_layer_carry, states, contexts = True, (KeyValues,), (CachedContext,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, context_dim: int = 0):
        super().__init__(dim, heads, causal=causal)
        self.context_dim = context_dim
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def start(self, batch, capacity):
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def init_carry(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Zeros (B,1,1,1), which stand for scores of 0 against however many keys the call will see."""
        return upcast_half(x.new_zeros(len(x), 1, 1, 1))

    def cut_carry(self, carry, segments, part):
        if carry.shape[1:] == (1, 1, 1):
            return part.rows(carry)
        slots = carry.shape[3] - segments.shape[1]  # of a state, in front of the tokens; another sequence has none
        own = part.rows(carry)[:, :, part.start : part.stop]
        new = own[..., slots + part.start : slots + part.stop]
        return torch.cat([own[..., :slots], new], -1) if part.first else new

    def join_carry(self, segments, parts, handed):
        batch, n = segments.shape
        slots = handed[0].shape[3] - (parts[0].stop - parts[0].start)
        rows: list[list[Tensor]] = [[] for _ in range(batch)]
        for part, total in zip(parts, handed, strict=True):
            new = F.pad(total[..., slots if part.first else 0 :], (part.start, n - part.stop))
            old = total[..., :slots] if part.first else total.new_zeros(*total.shape[:3], slots)
            rows[part.row].append(torch.cat([old, new], -1))
        return torch.cat([torch.cat(row, 2) for row in rows])

    def _project(self, x):
        return split(self.key(x), self.heads), split(self.value(x), self.heads)

    def attend(
        self,
        x,
        state,
        *,
        mask=None,
        segments=None,
        prefix=None,
        context=None,
        context_mask=None,
        carry=None,
        record=None,
        donate=False,
    ):
        q = split(self.query(x), self.heads)
        view, state = kv_cache.view(
            self._project,
            x,
            state,
            causal=self.causal,
            context=context,
            context_mask=context_mask,
            mask=mask,
            segments=segments,
            prefix=prefix,
            donate=donate,
        )
        allowed = view.allowed(q.shape[2])
        total = scores.products(q, view.keys)
        if carry is not None:
            check_carry(carry, total)
            total = total + carry
        # The mask comes in only here: what stands for -inf, summed over layers, would overflow.
        p = scores.weights(total, allowed)
        if record is not None:
            record.update(mask=allowed, matrix=p)
        y = self.out(merge(similarity.attend(p, view.values)))
        return (y, state) if carry is None else (y, state, total)


def check_carry(carry, total: Tensor) -> None:
    """Raise ValueError unless ``carry`` has the shape and dtype of ``total`` (B,H,N,M), or is ``init_carry``'s."""
    fits = isinstance(carry, Tensor) and carry.dtype == total.dtype
    if not fits or carry.shape not in (total.shape, torch.Size((len(total), 1, 1, 1))):
        came = f"{carry.dtype} {tuple(carry.shape)}" if isinstance(carry, Tensor) else type(carry).__name__
        raise ValueError(
            f"carry must be the scores {total.dtype} {tuple(total.shape)} of the layer below for the same tokens, "
            f"from states that have seen the same calls, or what init_carry gives, not {came}"
        )
