"""Softmax attention with residual scores: each layer adds the scores of the layer below."""

from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.isolated import Part
from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, split, upcast_half
from ..states import kv_cache
from ..states.kv_cache import CachedContext, KeyValues
from .base import AllArguments, Attention


class RealFormer(Attention[KeyValues | CachedContext]):
    r"""Softmax attention that adds the scores of the layer below to its scores, head by head.

    $L^\prime$ are the scores of the next lower layer of this kind in a stack, and 0 in the first one. The ``carry``
    from layer to layer is $L$ before any mask: (B,H,N,M), float32 or wider, a call's N queries against the M keys that
    it sees, including those of the state. Single steps, packed rows and padded rows therefore give the outputs of one
    whole call. The carry is not part of the state. It takes N M numbers per head from each layer to the next.

    ``context_dim``: width of the context of cross attention (0: dim).

    It materializes the scores, so it is slower than fused softmax at every length.

    Source: He et al. 2020, section 3.

    Raises:
        ValueError: For a carry that does not belong to the tokens and keys of the call.
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

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def init_carry(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The carry of the first layer: zeros (B,1,1,1), which broadcast to the scores of any number of keys."""
        return upcast_half(x.new_zeros(len(x), 1, 1, 1))

    def cut_carry(  # pyright: ignore[reportIncompatibleVariableOverride]  # a method where the base class has None
        self, carry: Tensor, segments: Tensor, part: Part
    ) -> Tensor:
        if carry.shape[1:] == (1, 1, 1):
            return part.rows(carry)
        # Columns of a state come before those of the tokens; only the first sequence of a row has them.
        slots = carry.shape[3] - segments.shape[1]
        own = part.rows(carry)[:, :, part.start : part.stop]
        new = own[..., slots + part.start : slots + part.stop]
        return torch.cat([own[..., :slots], new], -1) if part.first else new

    def join_carry(  # pyright: ignore[reportIncompatibleVariableOverride]  # a method where the base class has None
        self, segments: Tensor, parts: list[Part], handed: list[Tensor]
    ) -> Tensor:
        batch, n = segments.shape
        slots = handed[0].shape[3] - (parts[0].stop - parts[0].start)
        rows: list[list[Tensor]] = [[] for _ in range(batch)]
        for part, total in zip(parts, handed, strict=True):
            new = F.pad(total[..., slots if part.first else 0 :], (part.start, n - part.stop))
            old = total[..., :slots] if part.first else total.new_zeros(*total.shape[:3], slots)
            rows[part.row].append(torch.cat([old, new], -1))
        return torch.cat([torch.cat(row, 2) for row in rows])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return split(self.key(x), self.heads), split(self.value(x), self.heads)

    def attend(
        self,
        x: Tensor,
        state: KeyValues | CachedContext | None,
        *,
        carry: Tensor | None = None,
        **given: Unpack[AllArguments],
    ) -> tuple[Tensor, KeyValues | CachedContext | None] | tuple[Tensor, KeyValues | CachedContext | None, Tensor]:
        q = split(self.query(x), self.heads)
        view, state = kv_cache.view(self._project, x, state, causal=self.causal, **given)
        allowed = view.allowed(q.shape[2])
        total = scores.products(q, view.keys)
        if carry is not None:
            check_carry(carry, total)
            total = total + carry
        # The mask is applied last: the number that stands for -inf would overflow when summed over layers.
        p = scores.weights(total, allowed)
        if (record := given.get("record")) is not None:
            record["matrix"] = p
        y = self.out(merge(similarity.attend(p, view.values)))
        return (y, state) if carry is None else (y, state, total)


def check_carry(carry: Any, total: Tensor) -> None:
    """Raise ValueError unless ``carry`` has the shape and dtype of ``total`` (B,H,N,M), or is ``init_carry``'s."""
    fits = isinstance(carry, Tensor) and carry.dtype == total.dtype
    if not fits or carry.shape not in (total.shape, torch.Size((len(total), 1, 1, 1))):
        found = f"{carry.dtype} {tuple(carry.shape)}" if isinstance(carry, Tensor) else type(carry).__name__
        raise ValueError(
            f"carry must be {total.dtype} {tuple(total.shape)}, the scores of the layer below for the same tokens and "
            f"states after the same calls, or the result of init_carry, not {found}"
        )
