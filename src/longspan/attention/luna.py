"""Luna: two nested attentions, through a short learned sequence of slots."""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.spec import known
from ..ops import gated, rows
from ..ops.isolated import Part
from ..ops.linear.features import elu
from ..ops.softmax import dense
from ..ops.tensors import merge, positions, split, upcast_half, visible
from .base import Attention, TokenArguments


def softplus(x: Tensor) -> Tensor:
    """Return log2(1 + 2^x), which is 1 at 0."""
    # Above the threshold the result equals x in float64.
    return F.softplus(x, beta=math.log(2.0), threshold=40.0)


ACTIVATIONS = {"softplus": softplus, "elu": elu}


class LunaState(NamedTuple):
    """Running sums of fixed size, in float32 or better."""

    keys: Tensor  # (B,H,D,slots) sum of k a^T
    values: Tensor  # (B,H,slots,D) sum of a v^T
    count: Tensor  # (B,) int64, real tokens so far  # pyright: ignore[reportIncompatibleMethodOverride] hides tuple.count


class LunaContext(NamedTuple):
    """The slots of a context, of fixed size."""

    slots: Tensor  # (B,H,slots,D) keys, which are also the values


class Luna(Attention[LunaState | LunaContext]):
    r"""Two nested attentions in linear time: learned slots read the tokens, and the tokens read the slots.

    P is the learned sequence of slots; $p_s = W_p P_s$, $c_j = W_c x_j$. In both attentions the keys are also the
    values, the default of the published code (``tie_kv``).

    ``slots``: l, the number of rows of P. ``activation``: $\omega$ of the causal form, softplus ($\log_2(1 + 2^x)$) or
    elu ($\mathrm{elu}(x) + 1$).

    The bidirectional form is two softmax attentions, of P over the tokens and of the tokens over the slots. In a stack
    each layer passes norm(P + r) to the next one (``carry``, (B,l,dim)), which adds it to its P. The norm has no
    weights. With ``segments`` the carry has one entry per packed sequence. With ``context``, P reads the context.

    The causal form divides by t, the number of real tokens so far, instead of a softmax over the tokens, so that
    weights do not sum to one. Its state is two running sums of fixed size. It returns its carry unchanged.

    Source: Ma et al. 2021, sections 3.1-3.3, with the softplus of the published code. Raises ValueError for slots < 1,
    an unknown activation or one for the bidirectional form, and for a carry of another shape, or with ``context``.
    """

    name, paper, cost = "luna", "2106.01540", "N l D"
    family = "compressed"
    learned_state = ("keys", "values")
    equations = (
        r"r_s = \sum_j a_{sj} c_j, \quad a_{sj} = \mathrm{softmax}_j \frac{p_s \cdot c_j}{\sqrt D}",
        r"o_i = \sum_{s=1}^l u_{is} k_s, \quad u_{is} = \mathrm{softmax}_s \frac{q_i \cdot k_s}{\sqrt D}, \quad "
        r"k_s = W_k r_s",
        r"\text{causal:} \quad a_{sj} = \omega\left(\frac{p_s \cdot c_j}{\sqrt D}\right), \quad "
        r"u_{ts} = \mathrm{softmax}_s \frac{1}{t} \sum_{j \le t} \frac{q_t \cdot k_j}{\sqrt D} a_{sj}, \quad "
        r"o_t = \frac{1}{t} \sum_{j \le t} \sum_s u_{ts} a_{sj} k_j",
    )
    citation = (
        "Ma, Xuezhe and Kong, Xiang and Wang, Sinong and Zhou, Chunting and May, Jonathan and Ma, Hao and "
        "Zettlemoyer, Luke",
        "Luna: Linear Unified Nested Attention",
        2021,
    )
    examples = ("luna(slots=5)", "luna(slots=3, activation='elu')")
    has_layer_carry, states, contexts = True, (LunaState,), (LunaContext,)
    no_decay = ("memory",)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, slots: int = 16, activation: str = "softplus"):
        super().__init__(dim, heads, causal=causal)
        if slots < 1:
            raise ValueError(f"slots={slots} must be at least 1")
        self.apart = not causal
        self.slots, self.activation = slots, known(activation, ACTIVATIONS, "activation")
        if activation != "softplus":
            if not causal:
                raise ValueError(f"activation={activation!r} needs causal=True; the bidirectional form has a softmax")
            self.directions = ("causal",)
        if not causal:
            self.supported_args = self.supported_args - {"record"}
        self.memory = nn.Parameter(torch.randn(slots, dim))
        self.pack_query, self.pack, self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(5))

    def start(self, batch: int, capacity: int) -> LunaState:
        size = self.dim // self.heads
        sums = upcast_half(self.weight_like.new_zeros(batch, self.heads, size, self.slots))
        return LunaState(sums, sums.mT.clone(), torch.zeros(batch, dtype=torch.long, device=sums.device))

    def init_carry(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return zeros (1,1,1), which broadcast to any number of rows or packed sequences."""
        return x.new_zeros(1, 1, 1)

    def cut_carry(self, carry: Tensor, segments: Tensor, part: Part) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] a method in place of None
        """Return the carry of one packed sequence."""
        return carry if len(carry) == 1 else part.rows(carry)

    def join_carry(self, segments: Tensor, parts: list[Part], carries: list[Tensor]) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride] a method in place of None
        """Return the carry of all packed sequences."""
        if carries[0].shape == (1, 1, 1):
            return carries[0]
        return torch.cat([own for part, own in zip(parts, carries, strict=True) if part.first])

    def attend(
        self,
        x: Tensor,
        state: LunaState | LunaContext | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        carry: Any = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, LunaState | LunaContext | None] | tuple[Tensor, LunaState | None, Tensor]:
        if context is not None or isinstance(state, LunaContext):
            if carry is not None:
                raise ValueError("carry= and context= exclude each other: a layer with context= has no carry")
            if context is not None:
                packed, _ = self._packed(context, self._memory(self.init_carry(x, None)), context_mask)
                state = LunaContext(split(self.value(packed), self.heads))
            return self._unpacked(x, cast(LunaContext, state).slots), state
        p = self._memory(self.init_carry(x, mask) if carry is None else carry)
        if self.causal:
            given: TokenArguments = {"mask": mask, "segments": segments, "donate": donate}
            y, state = self._causal(x, p, state, record, given)
            return (y, state) if carry is None else (y, state, carry)
        y, following = self._both(x, p, mask, segments)
        return (y, None) if carry is None else (y, None, following)

    def _memory(self, carry: Any) -> Tensor:
        shapes = (1, 1, 1), (self.slots, self.dim)
        if not isinstance(carry, Tensor) or (carry.shape != shapes[0] and carry.shape[1:] != shapes[1]):
            found = tuple(carry.shape) if isinstance(carry, Tensor) else type(carry).__name__
            raise ValueError(f"carry must be the slots (B, {self.slots}, {self.dim}) of the layer below, not {found}")
        return self.memory + carry

    def _both(self, x: Tensor, p: Tensor, mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor]:
        """x (B,N,dim), p (1|B,l,dim) -> y (B,N,dim), the next layer's slots (B,l,dim)."""
        if segments is None:
            packed, following = self._packed(x, p, mask)
            return self._unpacked(x, split(self.value(packed), self.heads)), following
        found, numbers = [x.new_zeros(0, self.slots, self.dim)], [segments.new_zeros(0)]

        def run(number: Tensor, tokens: Tensor) -> Tensor:
            y, following = self._both(tokens, p if len(p) == 1 else p[number], None, None)
            found.append(following)
            numbers.append(number)
            return y

        y = rows.cut(run, (x,), x, mask, segments, exact=True)
        return y, torch.cat(found)[torch.cat(numbers).argsort()]

    def _packed(self, x: Tensor, p: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """What P reads from x (B,N,dim), and the norm of its sum with P: both (B,l,dim)."""
        keys = split(self.pack(x), self.heads)
        q = split(self.pack_query(p.to(x.dtype)), self.heads).expand(len(x), -1, -1, -1)
        read = merge(dense.attend(q.to(keys.dtype), keys, keys, mask=None if mask is None else mask[:, None, None]))
        return read, F.layer_norm(p + read, (self.dim,))

    def _unpacked(self, x: Tensor, slots: Tensor) -> Tensor:
        return self.out(merge(dense.attend(split(self.query(x), self.heads).to(slots.dtype), slots, slots)))

    def _causal(
        self, x: Tensor, p: Tensor, state: LunaState | None, record: dict[str, Any] | None, given: TokenArguments
    ) -> tuple[Tensor, LunaState | None]:
        mask, segments = given.get("mask"), given.get("segments")
        before = self.start(x.shape[0], 0) if state is None else state
        q, k, c = (upcast_half(split(part(x), self.heads)) for part in (self.query, self.value, self.pack))
        at, count = positions(x, before.count, mask=mask, segments=segments)
        t = (at + 1).clamp(min=1)[:, None, :, None]
        scale = q.shape[-1] ** -0.5
        slots = upcast_half(split(self.pack_query(p.to(x.dtype)), self.heads))
        with torch.autocast(x.device.type, enabled=False):
            a = ACTIVATIONS[self.activation](c @ slots.mT * scale)  # (B,H,N,l)
            scores, keys = gated.recur(q, k, a, scale=scale, state=before.keys, **given)
            u = (scores / t).softmax(-1)
            o, values = gated.recur(u, a, k, scale=1.0, state=before.values, **given)
            if record is not None:
                allowed = visible(x, causal=True, mask=mask, segments=segments)
                record.update(mask=allowed, matrix=u @ a.mT * allowed / t)
        y = self.out(merge((o / t).to(x.dtype)))
        return y, None if state is None else LunaState(keys, values, count)
