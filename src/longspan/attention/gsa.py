"""Gated slot attention: softmax over a fixed number of slots that forget."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import expanded
from ..ops.gated import slots as op
from ..ops.tensors import merge, rms_normalize, split, upcast_half
from .base import Attention, TokenArguments


class GSAState(NamedTuple):
    """The keys and values of the slots, in float32 or better."""

    keys: Tensor  # (B,H,D,slots)
    values: Tensor  # (B,H,slots,E)


class GSA(Attention[GSAState]):
    r"""Softmax attention to a fixed number of slots, each of which forgets as it is written to.

    K and V have a row per slot, $\alpha_t$ a factor per slot; the norm is RMS, over all heads.

    ``slots``: the number of rows of K and V. ``temperature``: $\tau$; a larger value makes the initial decay slower.
    ``expand_k``: the width of queries and keys as a multiple of dim. ``expand_v``: the width of values as a multiple of
    dim.

    Source: Zhang et al. 2024 (2409.07146), eq. 7 to 9 and section 3.2, whose sizes are the defaults.

    Raises:
        ValueError: For slots < 1, a temperature that is not positive, or an ``expand_k`` or ``expand_v`` that leaves
            each head a fraction of a channel.
    """

    name, paper, cost = "gsa", "2409.07146", "N D^2"
    family = "gated"
    learned_state = ("keys", "values")
    equations = (
        r"K_t = \mathrm{Diag}(\alpha_t) K_{t-1} + (1 - \alpha_t) k_t^\top, \quad "
        r"V_t = \mathrm{Diag}(\alpha_t) V_{t-1} + (1 - \alpha_t) v_t^\top, \quad "
        r"\alpha_t = \sigma(W_\alpha x_t)^{1/\tau}",
        r"o_t = V_t^\top \, \mathrm{softmax}(K_t q_t), \quad [q_t; k_t; v_t] = \mathrm{silu}(W x_t)",
        r"y_t = W_o \, \mathrm{norm}(\mathrm{silu}(o_t))",
    )
    citation = (
        "Zhang, Yu and Yang, Songlin and Zhu, Ruijie and Zhang, Yue and Cui, Leyang and Wang, Yiqiao and Wang, Bolun "
        "and Shi, Freda and Wang, Bailin and Bi, Wei and Zhou, Peng and Fu, Guohong",
        "Gated Slot Attention for Efficient Linear-Time Sequence Modeling",
        2024,
    )
    examples = ("gsa(slots=3)", "gsa(slots=5, temperature=2.0, expand_k=0.5, expand_v=1.5)")
    directions, states = ("causal",), (GSAState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        slots: int = 64,
        temperature: float = 8.0,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
    ):
        super().__init__(dim, heads, causal=causal)
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1")
        if not temperature > 0:
            raise ValueError(f"temperature={temperature} must be positive: it divides the logarithm of the decay")
        self.slots, self.temperature, self.expand_k, self.expand_v = slots, temperature, expand_k, expand_v
        self.sizes = expanded(dim // heads, expand_k, "expand_k"), expanded(dim // heads, expand_v, "expand_v")
        keys, values = (heads * size for size in self.sizes)
        self.query, self.key = (nn.Linear(dim, keys, bias=False) for _ in range(2))
        self.value, self.decay = nn.Linear(dim, values, bias=False), nn.Linear(dim, heads * slots, bias=False)
        self.scale = nn.Parameter(torch.ones(values))
        self.out = nn.Linear(values, dim, bias=False)

    def start(self, batch: int, capacity: int) -> GSAState:
        (keys, values), like = self.sizes, self.weight_like
        shapes = (keys, self.slots), (self.slots, values)
        return GSAState(*(upcast_half(like.new_zeros(batch, self.heads, *shape)) for shape in shapes))

    def attend(
        self, x: Tensor, state: GSAState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, GSAState | None]:
        q, k, v = (split(F.silu(project(x)), self.heads) for project in (self.query, self.key, self.value))
        log_decay = split(F.logsigmoid(upcast_half(self.decay(x))) / self.temperature, self.heads)
        o, after = op.attend(q, k, v, -log_decay.expm1(), log_decay=log_decay, scale=1.0, state=state, **given)
        o = rms_normalize(upcast_half(F.silu(merge(o))), 1e-5) * upcast_half(self.scale)
        return self.out(o.to(x.dtype)), None if state is None else GSAState(*after)
