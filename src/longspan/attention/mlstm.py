"""mLSTM: the matrix memory of xLSTM, with an exponential input gate."""

from typing import Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import HeadNorm, expanded
from ..ops import gated
from ..ops.tensors import merge, split, upcast_half, with_ones
from .base import Attention, TokenArguments

EPS = 1e-6  # added to the normalizer


class MLSTMState(NamedTuple):
    """The memory and its normalizer, both divided by e^peak."""

    sums: Tensor  # (B,H,D,E+1) decayed sum of gated k v^T, and of gated k in the last column; float32 or wider
    peak: Tensor  # (B,H) float64, the running maximum of the log weights


class MLSTM(Attention[MLSTMState]):
    r"""Linear attention with a forget gate and an exponential input gate per head, divided by a bounded normalizer.

    $i_t = e^{a_t}$ is the input gate, $f_t = \sigma(b_t)$ the forget gate; $a_t$ and $b_t$ are linear in $x_t$,
    with a bias. The sums are kept divided by $e^{m_t}$, $m_t = \max(\log f_t + m_{t-1}, a_t)$, $m_0 = 0$, so that
    $e^{a_t}$ cannot overflow. The result does not depend on $m_t$ apart from an $\epsilon$ of $10^{-6}$ in the divisor.

    ``expand_k``: key dimension D of a head, as a multiple of dim / heads. ``expand_v``: value dimension E of a head, as
    a multiple of dim / heads. ``cap``: soft limit of the gates' logits, $c \tanh(a / c)$; 0: none. ``norm``: norm
    of each head's output: ``rms``, ``group`` (mean and variance, without weights) or ``none``.

    The biases of the forget gates begin evenly spaced between 3 and 6, those of the input gates at 0.

    Source: Beck et al. 2024 (2405.04517), eq. 19 to 27; the stabilized form is in appendix A. The soft limit with c =
    15, and expand_k = 0.5, are those of xLSTM 7B, Beck et al. 2025 (2503.13427).

    Raises:
        ValueError: For a negative ``cap``, or an ``expand_k`` or ``expand_v`` that leaves each head a fraction of a
            channel.
    """

    name, paper, cost = "mlstm", "2405.04517", "N D^2"
    family = "gated"
    learned_state = ("sums",)
    equations = (
        r"C_t = f_t C_{t-1} + i_t k_t v_t^\top, \quad n_t = f_t n_{t-1} + i_t k_t, \quad "
        r"h_t = \frac{C_t^\top q_t / \sqrt D}{\max(|n_t \cdot q_t / \sqrt D|, 1)}",
        r"i_t = e^{w \cdot x_t + a}, \quad f_t = \sigma(u \cdot x_t + b), \quad "
        r"y_t = W_o \, (\mathrm{norm}(h_t) \odot \sigma(W_g x_t))",
    )
    citation = (
        'Beck, Maximilian and P{\\"o}ppel, Korbinian and Spanring, Markus and Auer, Andreas and Prudnikova, '
        'Oleksandra and Kopp, Michael and Klambauer, G{\\"u}nter and Brandstetter, Johannes and Hochreiter, Sepp',
        "xLSTM: Extended Long Short-Term Memory",
        2024,
    )
    examples = ("mlstm", "mlstm(expand_k=0.5, expand_v=1.5, cap=15.0, norm='none')")
    directions, states = ("causal",), (MLSTMState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        cap: float = 0.0,
        norm: Literal["rms", "group", "none"] = "rms",
    ):
        super().__init__(dim, heads, causal=causal)
        if not 0 <= cap < float("inf"):
            raise ValueError(f"cap={cap} must be 0, for no limit of the gates, or a positive number")
        self.expand_k, self.expand_v, self.cap, self.norm = expand_k, expand_v, cap, norm
        self.sizes = expanded(dim // heads, expand_k, "expand_k"), expanded(dim // heads, expand_v, "expand_v")
        keys, values = heads * self.sizes[0], heads * self.sizes[1]
        self.query, self.key, self.value, self.out_gate = (
            nn.Linear(dim, width, bias=False) for width in (keys, keys, values, values)
        )
        self.write, self.forget = nn.Linear(dim, heads), nn.Linear(dim, heads)
        nn.init.zeros_(self.write.bias)
        with torch.no_grad():
            self.forget.bias.copy_(torch.linspace(3.0, 6.0, heads))
        self.head_norm = None if norm == "none" else HeadNorm(self.sizes[1], kind=norm)
        self.out = nn.Linear(values, dim, bias=False)

    def start(self, batch: int, capacity: int) -> MLSTMState:
        like = self.weight_like
        sums = like.new_zeros(batch, self.heads, self.sizes[0], self.sizes[1] + 1)
        return MLSTMState(upcast_half(sums), like.new_zeros(batch, self.heads, dtype=torch.float64))

    def attend(
        self, x: Tensor, state: MLSTMState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, MLSTMState | None]:
        mask, segments = given.get("mask"), given.get("segments")
        sums, peak = self.start(x.shape[0], 0) if state is None else state
        write, forget = (self._logits(gate, x) for gate in (self.write, self.forget))
        keep, write = F.logsigmoid(forget).mT, write.mT
        # The maximum only scales: the results have no gradient by it.
        before, m = running_peak(keep.detach().double(), write.detach().double(), peak, mask, segments)
        decay = keep + (before - m)
        # Where the maximum decays with the sums, this is 0 but for rounding. A clamp would stop the gradient of the
        # forget gate there.
        decay = decay - decay.detach().clamp(min=0.0)
        wide = keep.dtype
        weight = (write - m).to(wide).exp()
        q, k = (upcast_half(split(layer(x), self.heads)) for layer in (self.query, self.key))
        v = with_ones(upcast_half(self.value(x)).unflatten(-1, (self.heads, -1)))  # (B,N,H,E+1)
        o, sums = gated.recur(
            q,
            k,
            (v * weight.mT[..., None]).transpose(1, 2),
            log_decay=decay.to(wide),
            state=sums,
            **given,
        )
        floor = (-m).to(wide).exp()[..., None]
        h = o[..., :-1] / (torch.maximum(o[..., -1:].abs(), floor) + EPS)
        h = h if self.head_norm is None else self.head_norm(h)
        y = self.out((merge(h) * upcast_half(self.out_gate(x)).sigmoid()).to(x.dtype))
        if state is None:
            return y, None
        return y, MLSTMState(sums, m[..., -1].clone() if x.shape[1] else peak.clone())

    def _logits(self, gate: nn.Module, x: Tensor) -> Tensor:
        """x (B,N,dim) -> the logits of a gate (B,N,H), in float32 at least."""
        a = upcast_half(gate(x))
        return self.cap * torch.tanh(a / self.cap) if self.cap else a


def running_peak(
    keep: Tensor, write: Tensor, peak: Tensor, mask: Tensor | None, segments: Tensor | None
) -> tuple[Tensor, Tensor]:
    r"""Return $m_{t-1}$ and $m_t = \max(g_t + m_{t-1}, a_t)$ for all tokens: (B,H,N) each.

    Args:
        keep: $g_t$ (B,H,N) float64: differences of its sums over the whole row must be exact.
        write: $a_t$ (B,H,N) float64.
        peak: (B,H), the value before the first token. Later segments begin with 0.
        mask: (B,N) bool; masked tokens change nothing.
        segments: (B,N) int64.
    """
    if not keep.shape[-1]:
        return keep, keep
    if mask is not None:
        keep = keep.masked_fill(~mask[:, None], 0.0)

    def candidates(total: Tensor, begin: Tensor) -> Tensor:
        """Return max(a_t - total_t, m_0): masked tokens contribute the latter."""
        run = write - total
        return torch.maximum(begin, run if mask is None else torch.where(mask[:, None], run, begin))

    total, begin = keep.cumsum(-1), peak[..., None].expand_as(keep)
    if segments is None:
        m = total + candidates(total, begin).cummax(-1).values
        return torch.cat([peak[..., None], m[..., :-1]], -1), m
    border = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0))
    number = border.cumsum(1)[:, None]
    at = torch.where(border, torch.arange(keep.shape[-1], device=keep.device), 0).cummax(1).values
    total = total - (total - keep).gather(-1, at[:, None].expand_as(total))
    begin = torch.where(number == 0, begin, 0.0)
    run = candidates(total, begin)
    # Each segment is lifted above all earlier ones, so that one running maximum serves all of them.
    lift = (run.amax(-1, keepdim=True) - run.amin(-1, keepdim=True) + 1.0) * number
    m = total + ((run + lift).cummax(-1).values - lift)
    return torch.where(border[:, None], begin, torch.cat([peak[..., None], m[..., :-1]], -1)), m
