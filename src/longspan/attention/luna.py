"""Attention through a short extra sequence: it packs the tokens, and they read what it has packed."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.spec import known
from ..ops import gated, rows
from ..ops.linear.features import elu
from ..ops.softmax import dense
from ..ops.tensors import merge, positions, split, upcast_half, visible
from .base import Attention


def softplus(x: Tensor) -> Tensor:
    """log2(1 + 2^x), which is 1 at 0."""
    # Beyond the threshold it is x to the last digit.
    return F.softplus(x, beta=math.log(2.0), threshold=40.0)


ACTIVATIONS = {"softplus": softplus, "elu": elu}


class LunaState(NamedTuple):
    """Of fixed size, float32 at least."""

    keys: Tensor  # (B,H,D,slots) sum of k a^T
    values: Tensor  # (B,H,slots,D) sum of a v^T
    count: Tensor  # (B,) int64, real tokens so far


class LunaContext(NamedTuple):
    """All that queries need of a context, whatever its length."""

    slots: Tensor  # (B,H,slots,D) keys, which are values as well


class Luna(Attention):
    r"""Tokens are packed into the slots of a learned sequence P, and unpacked by queries: two attentions, both linear.

    $p_s = W_p P_s$, $c_j = W_c x_j$. Keys are values as well, in both attentions, which is the default of the published
    code (``tie_kv``). ``slots``: l, rows of P.

    The bidirectional form is two softmax attentions, of P over the tokens and of the tokens over the slots. In a stack
    its layers hand norm(P + r) on (``carry``, (B,l,dim), by a norm without weights; one for each packed sequence where
    there are ``segments``), which the next one adds to a P of its own. With ``context`` it packs that.

    The causal form divides by t, the number of real tokens so far, where the other one has a softmax, and by nothing
    else, so weights do not sum to one; a fixed-size state keeps two running sums. It hands on what it got.
    ``activation``: $\omega$ of the causal form, softplus ($\log_2(1 + 2^x)$) or elu ($\mathrm{elu}(x) + 1$).

    Source: Ma et al. 2021, sections 3.1-3.3, with the softplus of the published code. Raises ValueError for slots < 1,
    an unknown activation or one for the bidirectional form, and for a carry of another shape, or with ``context``.
    """

    name, paper, cost = "luna", "2106.01540", "N l D"
    family = "compressed"
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
                raise ValueError(f"activation={activation!r} is one of the causal form; the other one has a softmax")
            self.directions = ("causal",)
        if not causal:
            self.supported_args = self.supported_args - {"record"}
        self.memory = nn.Parameter(torch.randn(slots, dim))
        self.pack_query, self.pack, self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(5))

    def start(self, batch, capacity):
        size = self.dim // self.heads
        sums = upcast_half(self.weight_like.new_zeros(batch, self.heads, size, self.slots))
        return LunaState(sums, sums.mT.clone(), torch.zeros(batch, dtype=torch.long, device=sums.device))

    def init_carry(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Zeros (1,1,1), which stand for any number of rows or packed sequences."""
        return x.new_zeros(1, 1, 1)

    def cut_carry(self, carry, segments, part):
        return carry if len(carry) == 1 else part.rows(carry)

    def join_carry(self, segments, parts, handed):
        if handed[0].shape == (1, 1, 1):
            return handed[0]
        return torch.cat([own for part, own in zip(parts, handed, strict=True) if part.first])

    def attend(
        self,
        x,
        state,
        *,
        mask=None,
        segments=None,
        context=None,
        context_mask=None,
        carry=None,
        record=None,
        donate=False,
    ):
        if context is not None or isinstance(state, LunaContext):
            if carry is not None:
                raise ValueError("carry= is for layers that pack their own tokens, not for those of context=")
            if context is not None:
                packed, _ = self._packed(context, self._memory(self.init_carry(x, None)), context_mask)
                state = LunaContext(split(self.value(packed), self.heads))
            return self._unpacked(x, state.slots), state
        p = self._memory(self.init_carry(x, mask) if carry is None else carry)
        if self.causal:
            y, state = self._causal(x, p, state, mask, segments, record, donate)
            return (y, state) if carry is None else (y, state, carry)
        y, handed = self._both(x, p, mask, segments)
        return (y, None) if carry is None else (y, None, handed)

    def _memory(self, carry):
        shapes = (1, 1, 1), (self.slots, self.dim)
        if not isinstance(carry, Tensor) or (carry.shape != shapes[0] and carry.shape[1:] != shapes[1]):
            came = tuple(carry.shape) if isinstance(carry, Tensor) else type(carry).__name__
            raise ValueError(f"carry must be the slots (B, {self.slots}, {self.dim}) of the layer below, not {came}")
        return self.memory + carry

    def _both(self, x, p, mask, segments):
        """x (B,N,dim), p (1|B,l,dim) -> y (B,N,dim), the next layer's slots (B,l,dim)."""
        if segments is None:
            packed, handed = self._packed(x, p, mask)
            return self._unpacked(x, split(self.value(packed), self.heads)), handed
        found, numbers = [x.new_zeros(0, self.slots, self.dim)], [segments.new_zeros(0)]

        def run(number, tokens):
            y, handed = self._both(tokens, p if len(p) == 1 else p[number], None, None)
            found.append(handed)
            numbers.append(number)
            return y

        y = rows.cut(run, (x,), x, mask, segments, exact=True)
        return y, torch.cat(found)[torch.cat(numbers).argsort()]

    def _packed(self, x, p, mask):
        """What P reads from x (B,N,dim), and its norm with P: both (B,l,dim)."""
        keys = split(self.pack(x), self.heads)
        q = split(self.pack_query(p.to(x.dtype)), self.heads).expand(len(x), -1, -1, -1)
        read = merge(dense.attend(q.to(keys.dtype), keys, keys, mask=None if mask is None else mask[:, None, None]))
        return read, F.layer_norm(p + read, (self.dim,))

    def _unpacked(self, x, slots):
        return self.out(merge(dense.attend(split(self.query(x), self.heads).to(slots.dtype), slots, slots)))

    def _causal(self, x, p, state, mask, segments, record, donate):
        before = self.start(x.shape[0], 0) if state is None else state
        q, k, c = (upcast_half(split(part(x), self.heads)) for part in (self.query, self.value, self.pack))
        at, count = positions(x, before.count, mask=mask, segments=segments)
        t = (at + 1).clamp(min=1)[:, None, :, None]
        scale = q.shape[-1] ** -0.5
        slots = upcast_half(split(self.pack_query(p.to(x.dtype)), self.heads))
        with torch.autocast(x.device.type, enabled=False):
            a = ACTIVATIONS[self.activation](c @ slots.mT * scale)  # (B,H,N,l)
            options = {"mask": mask, "segments": segments, "donate": donate}
            scores, keys = gated.recur(q, k, a, scale=scale, state=before.keys, **options)
            u = (scores / t).softmax(-1)
            o, values = gated.recur(u, a, k, scale=1.0, state=before.values, **options)
            if record is not None:
                allowed = visible(x, causal=True, mask=mask, segments=segments)
                record.update(mask=allowed, matrix=u @ a.mT * allowed / t)
        y = self.out(merge((o / t).to(x.dtype)))
        return y, None if state is None else LunaState(keys, values, count)
