"""ABC: attention with a memory of bounded size, whose slots average the tokens."""

from typing import NamedTuple, Unpack

from torch import Tensor, nn

from ..modules.norms import expanded
from ..ops.gated import slots as op
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments


class ABCState(NamedTuple):
    """The keys and values of the slots, and the sums of their weights, in float32 or better."""

    keys: Tensor  # (B,H,D,slots)
    values: Tensor  # (B,H,slots,E)
    total: Tensor  # (B,H,slots) the logarithm of the sum of the weights of all tokens


class ABC(Attention[ABCState]):
    r"""Softmax attention to a fixed number of slots, each a weighted average of all tokens so far.

    K and V have a row per slot; $a_{tj}$ has a weight per slot, and the weights of all tokens sum to 1.

    ``slots``: the number of rows of K and V. ``expand_k``: the width of queries and keys as a multiple of dim.

    Source: Peng et al. 2021 (2110.02488), eq. 1 to 4, with the control of section 3.3 (ABC-MLP).

    Raises:
        ValueError: For slots < 1, or an ``expand_k`` that leaves each head a fraction of a channel.
    """

    name, paper, cost = "abc", "2110.02488", "N D^2"
    family = "gated"
    equations = (
        r"K_t = \sum_{j \le t} a_{tj} k_j^\top, \quad V_t = \sum_{j \le t} a_{tj} v_j^\top, \quad "
        r"a_{tj} = \frac{e^{W_a x_j}}{\sum_{i \le t} e^{W_a x_i}}",
        r"o_t = V_t^\top \, \mathrm{softmax}\left(\frac{K_t q_t}{\sqrt D}\right)",
    )
    citation = (
        "Peng, Hao and Kasai, Jungo and Pappas, Nikolaos and Yogatama, Dani and Wu, Zhaofeng and Kong, Lingpeng and "
        "Schwartz, Roy and Smith, Noah A.",
        "ABC: Attention with Bounded-memory Control",
        2021,
    )
    examples = ("abc(slots=3)", "abc(slots=5, expand_k=0.5)")
    directions, states = ("causal",), (ABCState,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, slots: int = 64, expand_k: float = 1.0):
        super().__init__(dim, heads, causal=causal)
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1")
        self.slots, self.expand_k = slots, expand_k
        self.sizes = expanded(dim // heads, expand_k, "expand_k"), dim // heads
        self.query, self.key = (nn.Linear(dim, heads * self.sizes[0]) for _ in range(2))
        self.value, self.control = nn.Linear(dim, dim), nn.Linear(dim, heads * slots, bias=False)
        self.out = nn.Linear(dim, dim)

    def start(self, batch: int, capacity: int) -> ABCState:
        (keys, values), like = self.sizes, upcast_half(self.weight_like)
        shapes = (keys, self.slots), (self.slots, values)
        first, second = (like.new_zeros(batch, self.heads, *shape) for shape in shapes)
        return ABCState(first, second, like.new_full((batch, self.heads, self.slots), op.NOTHING))

    def attend(
        self, x: Tensor, state: ABCState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, ABCState | None]:
        keys, values, total = self.start(x.shape[0], 0) if state is None else state
        q, k, v = (split(project(x), self.heads) for project in (self.query, self.key, self.value))
        logits = split(upcast_half(self.control(x)), self.heads)
        write, log_decay, total = op.running_softmax(logits, total, given.get("mask"), given.get("segments"))
        o, after = op.attend(q, k, v, write, log_decay=log_decay, state=(keys, values), **given)
        return self.out(merge(o)), None if state is None else ABCState(*after, total)
