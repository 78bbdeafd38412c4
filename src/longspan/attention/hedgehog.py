"""Hedgehog: linear attention with feature maps that learn to match softmax, and a window of softmax on request."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import HeadNorm
from ..modules.rotary import check_rotary, rotate
from ..ops import linear
from ..ops.linear import recurrence
from ..ops.operands import zero_masked
from ..ops.rows import map_sequences, pick
from ..ops.tensors import merge, per_root, positions, split, upcast_half, with_ones
from .base import Attention

BLOCK = 32  # fewest queries that read a window together


class HedgehogState(NamedTuple):
    """The sums over all tokens so far, in float32 or better."""

    sums: Tensor  # (B,H,2D,E+1) sum of phi(k) v^T; last column: sum of phi(k)
    position: Tensor  # (B,) int64, real tokens so far


class HedgehogWindowState(NamedTuple):
    """The sums over the tokens before the window, in float32 or better, and the window, whose last token is newest."""

    sums: Tensor  # (B,H,2D,E+1) as above
    keys: Tensor  # (B,H,window,D)
    values: Tensor  # (B,H,window,E)
    position: Tensor  # (B,) int64, real tokens so far


class Hedgehog(Attention[HedgehogState | HedgehogWindowState]):
    r"""Linear attention whose feature maps are trained to match softmax attention.

    $\phi_q$ and $\phi_k$ have one matrix W per head each, which begins as the identity; they have 2 D features.
    ``longspan linearize`` trains them in place of a softmax layer.

    ``window``: w, the number of tokens, the token itself included, that each query reads by softmax; all earlier ones
    are read by features (0: all of them are). $c_i$ is the largest score in the window, and $\gamma$ a learned number
    per head, which begins at 1. In the bidirectional form the window has w - 1 tokens on either side, and all others
    are read by features. ``eps``: $\epsilon$, added to the denominator without a window. ``rotary``: the base of rotary
    positions (0: none), which turn queries and keys before the feature maps. ``rotary_layout``: halves or interleaved.
    ``head_dim`` and ``qk_norm``: as in ``softmax``.

    Source: Zhang et al. 2024 (2402.04347), section 4; the window: Zhang et al. 2024 (2410.10254), section 3.3.
    """

    name, paper, cost = "hedgehog", "2402.04347", "N (D + w) D"
    family = "linear"
    equations = (
        r"o_i = \frac{S_i^\top \phi_q(q_i)}{z_i \cdot \phi_q(q_i) + \epsilon}, \quad "
        r"S_i = \sum_{j \in \mathcal{A}_i} \phi_k(k_j) v_j^\top, \quad z_i = \sum_{j \in \mathcal{A}_i} \phi_k(k_j), "
        r"\quad \phi(x) = \mathrm{softmax}([W x; -W x])",
        r"\text{window:} \quad o_i = \frac{\gamma \sum_{j = i - w + 1}^i e^{s_{ij} - c_i} v_j + "
        r"S_{i - w}^\top \phi_q(q_i)}{\gamma \sum_{j = i - w + 1}^i e^{s_{ij} - c_i} + z_{i - w} \cdot \phi_q(q_i)}, "
        r"\quad s_{ij} = \frac{q_i \cdot k_j}{\sqrt D}",
    )
    citation = (
        "Zhang, Michael and Bhatia, Kush and Kumbong, Hermann and Ré, Christopher",
        "The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry",
        2024,
    )
    examples = (
        "hedgehog",
        "hedgehog(rotary=100.0)",
        "hedgehog(window=5, rotary=100.0, head_dim=6, qk_norm=1e-06)",
    )
    states = (HedgehogState, HedgehogWindowState)
    no_decay = ("query_map", "key_map")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        window: int = 0,
        eps: float = 1e-6,
        rotary: float = 0.0,
        rotary_layout: str = "halves",
        head_dim: int = 0,
        qk_norm: float = 0.0,
    ):
        super().__init__(dim, heads, causal=causal)
        if window < 0:
            raise ValueError(f"window={window} must be at least 1, the token itself, or 0 for no window")
        if eps < 0:
            raise ValueError(f"eps={eps} must not be negative: it is added to the denominator")
        if head_dim < 0 or qk_norm < 0:
            raise ValueError(f"head_dim={head_dim} and qk_norm={qk_norm} must not be negative")
        self.window, self.eps, self.rotary, self.rotary_layout = window, eps, rotary, rotary_layout
        self.head_dim, self.qk_norm, self.size = head_dim, qk_norm, head_dim or dim // heads
        size = self.size
        check_rotary(rotary, rotary_layout, size)
        self.query, self.key, self.value = (nn.Linear(dim, heads * size) for _ in range(3))
        self.query_norm, self.key_norm = (HeadNorm(size, eps=qk_norm) if qk_norm else None for _ in range(2))
        self.out = nn.Linear(heads * size, dim)
        self.query_map, self.key_map = (nn.Parameter(torch.eye(size).repeat(heads, 1, 1)) for _ in range(2))
        self.gate = nn.Parameter(torch.zeros(heads)) if window else None

    @property
    def positional(self) -> bool:
        return bool(self.window or self.rotary)

    def start(self, batch: int, capacity: int) -> HedgehogState | HedgehogWindowState:
        size, like = self.size, self.weight_like
        sums = upcast_half(like.new_zeros(batch, self.heads, 2 * size, size + 1))
        position = torch.zeros(batch, dtype=torch.long, device=like.device)
        if not self.window:
            return HedgehogState(sums, position)
        keys = like.new_zeros(batch, self.heads, self.window, size)
        return HedgehogWindowState(sums, keys, keys.clone(), position)

    def attend(
        self,
        x: Tensor,
        state: HedgehogState | HedgehogWindowState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, HedgehogState | HedgehogWindowState | None]:
        if self.window and not x.shape[1]:
            return self.out(x), state
        if self.window:
            run = self._windowed if self.causal else self._centered
            return map_sequences(run, x, state, mask, segments, causal=self.causal, width=self.dim)
        at, end = positions(x, state and state.position, mask=mask, segments=segments)
        q, k, v = self._projected(x, at)
        call: linear.LinearCall = {"causal": self.causal, "eps": self.eps, "mask": mask, "segments": segments}
        call["state"], call["donate"] = (None if state is None else state.sums), donate
        o, sums = linear.attend(_features(q, self.query_map), _features(k, self.key_map), v, **call)
        return self.out(merge(o)), None if state is None else HedgehogState(sums, end)

    def _projected(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, turned by their positions (B,N), and values: (B,H,N,D) each."""
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if self.rotary:
            q, k = (rotate(t, at, self.rotary, self.rotary_layout) for t in (q, k))
        return q, k, v

    def _windowed(
        self, x: Tensor, state: HedgehogWindowState | None, real: Tensor | None
    ) -> tuple[Tensor, HedgehogWindowState | None]:
        """Rows of single sequences that begin with their real tokens (B,N)."""
        n, slots = x.shape[1], torch.arange(self.window + x.shape[1], device=x.device)
        before = self.start(len(x), 0) if state is None else state
        assert isinstance(before, HedgehogWindowState)
        assert self.gate is not None
        count = torch.full_like(before.position, n) if real is None else real.sum(1)
        q, k, v = (upcast_half(t) for t in self._projected(x, before.position[:, None] + slots[:n]))
        keys, values = (torch.cat([old.to(t.dtype), t], 2) for old, t in ((before.keys, k), (before.values, v)))
        used = slots >= self.window - before.position[:, None]  # (B,window+N)
        with torch.autocast(x.device.type, enabled=False):
            # A token joins the sums when it leaves the window: ``window`` tokens after it came.
            left = used[:, :n] & (slots[:n] < count[:, None])
            features = _features(keys[:, :, :n], self.key_map).masked_fill(~left[:, None, :, None], 0.0)
            sums = before.sums.to(q.dtype)
            far, sums = recurrence.scan(_features(q, self.query_map), features, with_ones(values[:, :, :n]), sums)
            gate = upcast_half(self.gate).exp()[:, None, None]
            both = gate * _near(q * per_root(q.shape[-1]), keys, with_ones(values), used, self.window) + far
            o = merge(both[..., :-1] / both[..., -1:])
        y = self.out(o.to(x.dtype))
        if state is None:
            return y, None
        kept = count[:, None] + slots[: self.window]
        after = (sums, pick(keys, kept, 2), pick(values, kept, 2), state.position + count)
        return y, HedgehogWindowState._make(new.to(old.dtype) for new, old in zip(after, state, strict=True))

    def _centered(self, x: Tensor, state: None, real: Tensor | None) -> tuple[Tensor, None]:
        """The bidirectional form, for rows of single sequences that begin with their real tokens (B,N)."""
        n, pad = x.shape[1], (self.window, self.window - 1)
        at = torch.arange(n, device=x.device).expand(len(x), -1)
        real = torch.ones_like(at, dtype=torch.bool) if real is None else real
        assert self.gate is not None
        q, k, v = (upcast_half(t) for t in self._projected(x.masked_fill(~real[..., None], 0.0), at))
        k, v = zero_masked(real, k, v)
        with torch.autocast(x.device.type, enabled=False):
            queries, values = _features(q, self.query_map), with_ones(v)
            features = _features(k, self.key_map).masked_fill(~real[:, None, :, None], 0.0)
            far = queries @ (features.mT @ values)
            k, features, values = (F.pad(t, (0, 0, *pad)) for t in (k, features, values))
            used, span = F.pad(real, pad), 2 * self.window - 1
            # The sums are those of all tokens, so that the window's leave them.
            far = far - _near(queries, features, values, used, span, soft=False)
            near = _near(q * per_root(q.shape[-1]), k, values, used, span)
            both = upcast_half(self.gate).exp()[:, None, None] * near + far
            o = merge(both[..., :-1] / both[..., -1:].masked_fill(~real[:, None, :, None], 1.0))
        return self.out(o.to(x.dtype)), None


def _near(q: Tensor, keys: Tensor, values: Tensor, used: Tensor, span: int, soft: bool = True) -> Tensor:
    """Sums of e^(s-c) v, or of s v, where query i reads the slots i + 1, ..., i + span.

    q (B,H,N,D), keys (B,H,span+N,D), values (B,H,span+N,E+1), used (B,span+N) -> (B,H,N,E+1).
    """
    n = q.shape[2]
    block = min(n, max(span, BLOCK))
    rest = -n % block
    q = F.pad(q, (0, 0, 0, rest)).unflatten(2, (-1, block))  # (B,H,blocks,block,D)
    keys, values = (F.pad(t, (0, 0, 0, rest)).unfold(2, span + block, block) for t in (keys, values))
    # Queries in the padding see themselves, so that they have a score.
    there = F.pad(used, (0, rest), value=True).unfold(1, span + block, block)[:, None, :, None]
    query, slot = (torch.arange(size, device=q.device) for size in (block, span + block))
    seen = (slot > query[:, None]) & (slot <= query[:, None] + span) & there
    scores = q @ keys
    if soft:
        scores = scores.masked_fill(~seen, -torch.inf)
        # A query without a score, which is not a real token, reads nothing.
        peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
        weights = (scores - peak).exp()
    else:
        weights = scores.masked_fill(~seen, 0.0)
    return (weights @ values.mT).flatten(2, 3)[:, :, :n]


def _features(x: Tensor, maps: Tensor) -> Tensor:
    """softmax([W x; -W x]): x (B,H,N,D), W (H,D,D) -> (B,H,N,2D), in float32 or better."""
    with torch.autocast(x.device.type, enabled=False):
        y = upcast_half(x) @ upcast_half(maps).mT
        return torch.cat([y, -y], -1).softmax(-1)
