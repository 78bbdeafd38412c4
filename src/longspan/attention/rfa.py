"""Random feature attention: softmax attention over unit vectors, estimated by random features, with a forget gate."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.spec import known
from ..ops import gated
from ..ops.linear import random_features, stabilized
from ..ops.tensors import merge, split, unit, upcast_half, visible, with_ones
from ..states import sums
from ..states.sums import ContextSums
from .base import AllArguments, Attention, SequenceArguments

MAPS = {"gaussian": random_features.fourier, "arccos": random_features.generalized}
# Largest logit of the gate. As e^-40 = 4e-18, 1e12 tokens still have equal weights; beyond it 1 - g could become 0.
MOST = 40.0


class RFAState(NamedTuple):
    """The state without a gate; float32 or wider."""

    sums: Tensor  # (B,H,F,E+1) sum of phi(k) v^T; last column: sum of phi(k); float32 at least


class GatedState(NamedTuple):
    """The state with a gate; float32 or wider."""

    sums: Tensor  # (B,H,F,E+1) as above, each key with its weight
    mass: Tensor  # (B,H) sum of those weights


class RFA(Attention[RFAState | GatedState | ContextSums]):
    r"""Softmax attention over unit vectors by random features, with an optional forget gate.

    q and k are divided by their norms and multiplied by a learned vector $s_h$ per head, an inverse temperature. The
    mean of $\phi(q) \cdot \phi(k)$ is $e^{\hat q \cdot \hat k}$, up to factors that cancel. Without ``gate`` all keys
    have equal weights. With it, each head has one gate $g_t$ per token, and key j has the weight $(1 - g_j) g_{j+1}
    \ldots g_t$. The gate needs an order, so it requires causal attention without prefix. The keys of a ``context``
    always have equal weights.

    ``map``: gaussian, whose products may be negative; or arccos, $\mathrm{relu}(w \cdot \hat x)$, another kernel.
    ``gate``: learn how much each token forgets. ``features``: rows w drawn for each head (0: one per channel).
    ``rows``: iid as in the paper, or orthogonal in blocks of D. ``seed``: seed of the rows, together with the layer and
    the head. ``eps``: the denominator d becomes $\mathrm{sign}(d) \max(\lvert d \rvert, \epsilon)$; with ``gate`` it is
    first divided by the sum of the weights, since both vanish together. ``context_dim``: width of the context of cross
    attention (0: dim).

    If negative products bring a denominator near zero, rounding errors are magnified. More features or orthogonal rows
    make this rare. The rows are a buffer in the ``state_dict``. Only ``redraw(step)`` changes them.

    Source: Peng et al. 2021, sections 3.1 and 3.2; the arc-cosine kernel is from Cho and Saul (2009).

    Raises:
        ValueError: For an unknown map or rows, features < 0, eps <= 0, or a gate without ``causal``.
    """

    name, paper, cost = "rfa", "2103.02143", "N D^2"
    family = "linear"
    learned_state = ("sums",)
    parallel_by = "sums"
    equations = (
        r"o_i = \frac{\sum_{j \in \mathcal{A}_i} (\phi(q_i) \cdot \phi(k_j)) v_j}{\sum_{j \in \mathcal{A}_i} "
        r"\phi(q_i) \cdot \phi(k_j)}, \quad "
        r"\phi(x) = \frac{1}{\sqrt m} [\cos w_r \cdot \hat x, \sin w_r \cdot \hat x]_{r = 1, \ldots, m}, \quad "
        r"\hat x = s_h \odot \frac{x}{\lVert x \rVert}",
        r"\text{gate:} \quad o_t = \frac{S_t^\top \phi(q_t)}{z_t \cdot \phi(q_t)}, \quad g_t = \sigma(w \cdot x_t + b)",
        r"S_t = g_t S_{t-1} + (1 - g_t) \phi(k_t) v_t^\top, \quad z_t = g_t z_{t-1} + (1 - g_t) \phi(k_t)",
    )
    citation = (
        "Peng, Hao and Pappas, Nikolaos and Yogatama, Dani and Schwartz, Roy and Smith, Noah A. and Kong, Lingpeng",
        "Random Feature Attention",
        2021,
    )
    examples = ("rfa(features=31)", "rfa(gate=True, features=101)", "rfa(map='arccos', features=13, rows='orthogonal')")
    states, contexts = (RFAState, GatedState), (ContextSums,)
    no_decay = ("sigma",)
    projection: Tensor  # (H,m,D)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        layer: int = 0,
        map: str = "gaussian",
        gate: bool = False,
        features: int = 0,
        rows: str = "iid",
        seed: int = 0,
        eps: float = 1e-6,
        context_dim: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        known(map, MAPS, "map")
        if gate and not causal:
            raise ValueError("gate=True needs causal=True, since it forgets in the order of the tokens")
        if gate:
            self.directions, self.supported_args = ("causal",), self.supported_args - {"prefix"}
        if features < 0:
            raise ValueError(f"features={features} must be positive, or 0 for one row per channel")
        if eps <= 0:
            raise ValueError(f"eps={eps} must be positive: the denominator can vanish")
        self.layer, self.map, self.gate, self.features, self.rows = layer, map, gate, features, rows
        self.seed, self.eps, self.context_dim = seed, eps, context_dim
        self.query = nn.Linear(dim, dim)
        self.key, self.value = (nn.Linear(context_dim or dim, dim) for _ in range(2))
        self.out = nn.Linear(dim, dim)
        self.decay = nn.Linear(dim, heads) if gate else None
        self.sigma = nn.Parameter(torch.ones(heads, 1, dim // heads))
        self.register_buffer("projection", self._draw(0).to(self.out.weight))

    def redraw(self, step: int) -> None:
        """Replace the rows by those of redraw ``step``, a function of step, seed, layer and head.

        Call it between updates, with the same step on every process. Earlier states cannot be continued afterwards.

        Args:
            step: Number of the redraw; 0 gives the initial rows.
        """
        self.projection.copy_(self._draw(step))

    def _draw(self, step: int) -> Tensor:
        """(H,m,D) float64."""
        size = self.dim // self.heads
        options = {"rows": self.rows, "seed": self.seed, "layer": self.layer, "step": step}
        return random_features.projections(self.heads, self.features or size, size, **options)

    def _parts(self, x: Tensor) -> random_features.Parts:
        """Features of projected tokens (B,N,dim), all heads at once: (B,H,N,F)."""
        with torch.autocast(x.device.type, enabled=False):
            x = unit(upcast_half(split(x, self.heads))) * upcast_half(self.sigma)
            return MAPS[self.map](x, upcast_half(self.projection))

    def start(self, batch: int, capacity: int) -> RFAState | GatedState:
        features = self.projection.shape[1] * (2 if self.map == "gaussian" else 1)
        zeros = upcast_half(self.weight_like.new_zeros(batch, self.heads, features, self.dim // self.heads + 1))
        return GatedState(zeros, zeros.new_zeros(zeros.shape[:2])) if self.gate else RFAState(zeros)

    def attend(
        self, x: Tensor, state: RFAState | GatedState | ContextSums | None, **given: Unpack[AllArguments]
    ) -> tuple[Tensor, RFAState | GatedState | ContextSums | None]:
        q = self._parts(self.query(x))
        if self.decay is not None and given.get("context") is None and not isinstance(state, ContextSums):
            assert not isinstance(state, RFAState)
            k, v = self._project(x)
            o, state = self._gated(self.decay(x), q.features(), k.features(), v, state, given)
            return self.out(merge(o)), state
        form = sums.stable(lambda found: RFAState(found.sums), self.eps)
        o, state = sums.attend(form, q, self._project, x, state, causal=self.causal, **given)
        return self.out(merge(o)), state

    def _project(self, x: Tensor) -> tuple[random_features.Parts, Tensor]:
        return self._parts(self.key(x)), split(self.value(x), self.heads)

    def _gated(
        self, logit: Tensor, q: Tensor, k: Tensor, v: Tensor, state: GatedState | None, given: SequenceArguments
    ) -> tuple[Tensor, GatedState | None]:
        mask, segments, record = given.get("mask"), given.get("segments"), given.get("record")
        logit = upcast_half(logit).clamp(max=MOST)  # (B,N,H)
        log_decay, write = F.logsigmoid(logit).mT, (-logit).sigmoid().mT[..., None]  # (B,H,N), (B,H,N,1)
        past, mass = (None, None) if state is None else (state.sums, state.mass[..., None, None])
        options: gated.RecurrenceOptions = {"log_decay": log_decay, "scale": 1.0, "mask": mask, "segments": segments}
        options["state"] = mass
        with torch.autocast(v.device.type, enabled=False):
            # The same recurrence sums the weights, with keys and queries of ones.
            total, mass = gated.recur(torch.ones_like(write), torch.ones_like(write), write, **options)
            total = total.masked_fill(total == 0, 1.0)  # before the first token
            if record is not None:
                allowed = visible(logit, causal=True, mask=mask, segments=segments)
                matrix = self._matrix(q, k, log_decay, write, total, allowed, mask, segments, past)
                record.update(mask=allowed, matrix=matrix)
            values = with_ones(upcast_half(v)) * write
            options["state"] = past
            found, past = gated.recur(q, k, values, donate=given.get("donate", False), **options)
            o = stabilized.divide(found / total, self.eps).to(v.dtype)
        return o, None if state is None else GatedState(past, mass[..., 0, 0])

    def _matrix(
        self,
        q: Tensor,
        k: Tensor,
        log_decay: Tensor,
        write: Tensor,
        total: Tensor,
        allowed: Tensor,
        mask: Tensor | None,
        segments: Tensor | None,
        past: Tensor | None,
    ) -> Tensor:
        """The weights (B,H,N,N) that the gated form gives to the keys of this call."""
        lost = log_decay if mask is None else log_decay.masked_fill(~mask[:, None], 0.0)
        lost = lost.cumsum(-1)[..., None]
        weights = (q @ k.mT) * write.mT * (lost - lost.mT).masked_fill(~allowed, -torch.inf).exp()
        below = weights.sum(-1, keepdim=True)
        if past is not None:
            first = 1.0 if segments is None else (segments == segments[:, :1])[:, None, :, None]
            below = below + q @ past[..., -1:] * lost.exp() * first
        return stabilized.divide(torch.cat([weights, below], -1) / total, self.eps)
