"""Linear attention with a feature map and a normalizer."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..modules.rotary import check_rotary, rotate
from ..ops import linear
from ..ops.linear.features import FeatureMap
from ..ops.linear.features import feature_map as choose
from ..ops.prefix import join
from ..ops.tensors import merge, positions, split, upcast_half, visible
from ..states.sums import ContextSums, across
from .base import Attention
from .validation import check_width


class LinearState(NamedTuple):
    """The sums over all tokens so far, in float32 or better."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k)


class LinearRotaryState(NamedTuple):
    """The sums over all tokens so far with rotary positions, in float32 or better."""

    sums: Tensor  # (B,H,F,E+1) sum of rotated phi(k) v^T; last column: sum of unrotated phi(k)
    position: Tensor  # (B,) int64, real tokens so far


class Linear(Attention[LinearState | LinearRotaryState | ContextSums]):
    r"""Attention with a dot product of feature maps in place of softmax, with a state of fixed size.

    ``feature_map``: $\phi$, elu ($\mathrm{elu}(x) + 1$), relu, squared_relu or exp. ``eps``: $\epsilon$, added to the
    denominator. ``rotary``: the base of rotary positions (0: none), applied to $\phi(q)$ and $\phi(k)$ in the numerator
    only, since the denominator must stay positive. ``rotary_layout``: halves or interleaved. ``context_dim``: the width
    of the context of cross attention (0: dim).

    The class, but not a spec, also accepts a function (..., D) -> (..., F) without negative values:
    ``Linear(dim, heads, feature_map=f)``.

    Source: Katharopoulos et al. 2020, section 3.2-3.4; rotary positions as in Su et al. 2021, eq. 19.
    """

    name, paper, cost = "linear", "2006.16236", "N D^2"
    family = "linear"
    learned_state = ("sums",)
    parallel_by = "sums"
    equations = (
        r"o_i = \frac{S_i^\top \phi(q_i)}{z_i \cdot \phi(q_i) + \epsilon}, \quad "
        r"S_i = \sum_{j \in \mathcal{A}_i} \phi(k_j) v_j^\top, \quad z_i = \sum_{j \in \mathcal{A}_i} \phi(k_j)",
        r"\text{causal:} \quad S_i = S_{i-1} + \phi(k_i) v_i^\top, \quad z_i = z_{i-1} + \phi(k_i)",
    )
    citation = (
        "Katharopoulos, Angelos and Vyas, Apoorv and Pappas, Nikolaos and Fleuret, Francois",
        "Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention",
        2020,
    )
    examples = (
        "linear",
        "linear(feature_map='squared_relu', eps=0.01)",
        "linear(feature_map='exp')",
        "linear(rotary=100.0)",
    )
    states, contexts = (LinearState, LinearRotaryState), (ContextSums,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        feature_map: str | FeatureMap = "elu",
        eps: float = 1e-6,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
        context_dim: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        if eps < 0:
            raise ValueError(f"eps={eps} must not be negative: it is added to the denominator")
        check_rotary(rotary, rotary_layout, dim // heads)
        self.feature_map, self.eps, self.context_dim = feature_map, eps, context_dim
        self.rotary, self.rotary_layout = rotary, rotary_layout
        self.phi = choose(feature_map, dim // heads)
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)

    def start(self, batch: int, capacity: int) -> LinearState | LinearRotaryState:
        size = self.dim // self.heads
        features = self.phi(self.weight_like.new_zeros(1, size)).shape[-1]
        sums = upcast_half(self.weight_like.new_zeros(batch, self.heads, features, size + 1))
        if not self.rotary:
            return LinearState(sums)
        return LinearRotaryState(sums, torch.zeros(batch, dtype=torch.long, device=sums.device))

    def attend(
        self,
        x: Tensor,
        state: LinearState | LinearRotaryState | ContextSums | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, LinearState | LinearRotaryState | ContextSums | None]:
        q = self.query(x)
        check_width(q, self.dim)
        q = split(q, self.heads)
        if isinstance(state, ContextSums):
            read = self.phi(upcast_half(q)) @ state.sums
            return self.out(merge(linear.normalize(read, self.eps).to(x.dtype))), state
        if context is not None:
            return self._cross(q, context, context_mask, record)
        k, v = split(self.key(x), self.heads), split(self.value(x), self.heads)
        sums, numerator, make = (None if state is None else state.sums), None, LinearState
        fq = fk = None
        if self.rotary:
            start = state.position if isinstance(state, LinearRotaryState) else None
            at, end = positions(x, start, mask=mask, segments=segments)
            make = partial(LinearRotaryState, position=end)
            fq, fk = (self.phi(upcast_half(t)) for t in (q, k))
            turn = at, self.rotary, self.rotary_layout
            numerator = rotate(fq, *turn), rotate(fk, *turn)
        if record is not None:
            allowed = visible(x, causal=self.causal, mask=mask, segments=segments)
            allowed = allowed if prefix is None else join(allowed, prefix)
            fq, fk = (self.phi(upcast_half(t)) for t in (q, k))
            given = {"segments": segments, "state": sums}
            record.update(
                mask=allowed, matrix=linear.matrix(fq, fk, allowed, eps=self.eps, numerator=numerator, **given)
            )
        if prefix is not None:
            key = numerator and numerator[1]
            sums, mask = linear.fold(self.phi(upcast_half(k)), v, prefix, mask=mask, state=sums, key=key)
        call: linear.LinearCall = {"causal": self.causal, "eps": self.eps, "mask": mask, "segments": segments}
        call["state"], call["donate"] = sums, donate
        if self.rotary and fq is not None and fk is not None:
            o, sums = linear.attend(fq, fk, v, numerator=numerator, **call)
        else:
            o, sums = self._operation()(q, k, v, **call)
        return self.out(merge(o)), None if state is None else make(sums)

    def _operation(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """The op on raw queries and keys, with this feature map."""
        if isinstance(self.feature_map, str):
            return partial(linear.named, feature_map=self.feature_map)
        phi = self.phi

        def attend(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> tuple[Tensor, Tensor]:
            return linear.attend(phi(upcast_half(q)), phi(upcast_half(k)), v, **given)

        return attend

    def _cross(
        self, q: Tensor, context: Tensor, context_mask: Tensor | None, record: dict[str, Any] | None
    ) -> tuple[Tensor, ContextSums]:
        if self.rotary:
            raise ValueError("context= needs rotary=0.0: rotary positions relate tokens of one sequence")
        k, v = split(self.key(context), self.heads), split(self.value(context), self.heads)
        if record is not None:
            allowed = across(q.transpose(1, 2), context, context_mask)
            fq, fk = (self.phi(upcast_half(t)) for t in (q, k))
            record.update(mask=allowed, matrix=linear.matrix(fq, fk, allowed, eps=self.eps))
        o, sums = self._operation()(q, k, v, causal=False, eps=self.eps, mask=context_mask)
        return self.out(merge(o)), ContextSums(sums)
