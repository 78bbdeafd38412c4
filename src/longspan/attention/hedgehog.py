"""Hedgehog: linear attention with feature maps that learn to match softmax, and a window of softmax on request."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import HeadNorm
from ..modules.rotary import check_rotary, rotate
from ..ops import linear
from ..ops.linear import recurrence
from ..ops.rows import map_sequences, pick
from ..ops.tensors import merge, per_root, positions, split, upcast_half, with_ones
from .base import Attention

BLOCK = 32  # fewest queries that read a window together
CACHED = 2**20  # scores of windows computed together, so that they fit into the cache


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
    are read by features (0: all of them are). In the bidirectional form, the window has w - 1 tokens on each side of
    the query. $c_i$ is the largest score in the window, and $\gamma$ a learned number per head, which begins at 1.
    ``eps``: $\epsilon$, added to the denominator without a window. ``rotary``: the base of rotary positions (0: none),
    which turn queries and keys before the feature maps. ``rotary_layout``: halves or interleaved. ``head_dim`` and
    ``qk_norm``: as in ``softmax``.

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
        r"\text{window, bidirectional:} \quad \text{softmax over } |i - j| < w, "
        r"\text{ and } S_i = \sum_{|i - j| \ge w} \phi(k_j) v_j^\top \text{ in place of } S_{i - w}",
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
        if self.window and not self.causal:
            return map_sequences(self._surrounded, x, None, mask, segments, causal=False, width=self.dim)
        if self.window:
            return map_sequences(self._windowed, x, state, mask, segments, causal=True, width=self.dim)
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
            both = self._near(q, keys, with_ones(values), used) + far
            o = merge(both[..., :-1] / both[..., -1:])
        y = self.out(o.to(x.dtype))
        if state is None:
            return y, None
        kept = count[:, None] + slots[: self.window]
        after = (sums, pick(keys, kept, 2), pick(values, kept, 2), state.position + count)
        return y, HedgehogWindowState._make(new.to(old.dtype) for new, old in zip(after, state, strict=True))

    def _surrounded(self, x: Tensor, _: None, real: Tensor | None) -> tuple[Tensor, None]:
        """Rows of single sequences that begin with their real tokens (B,N), read in both directions."""
        n, window = x.shape[1], self.window
        slots = torch.arange(n, device=x.device)
        q, k, v = (upcast_half(t) for t in self._projected(x, slots.expand(len(x), n)))
        used = torch.ones(len(x), n, dtype=torch.bool, device=x.device) if real is None else real
        with torch.autocast(x.device.type, enabled=False):
            values = with_ones(v)
            queries = _features(q, self.query_map)
            keys = _features(k, self.key_map).masked_fill(~used[:, None, :, None], 0.0)
            # The sums over all tokens, less those in the window, which softmax reads.
            far = queries @ (keys.mT @ values)
            around = (window, window)
            k, values, keys = (F.pad(t, (0, 0, *around)) for t in (k, values, keys))
            both = far + self._near(q, k, values, F.pad(used, around), (queries, keys))
            o = merge(both[..., :-1] / both[..., -1:])
        return self.out(o.to(x.dtype)), None

    def _near(
        self, q: Tensor, keys: Tensor, values: Tensor, used: Tensor, far: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Sums of gamma e^(s-c) v over the window: q (B,H,N,D), the rest over slots -> (B,H,N,E+1).

        The slots are the window before the N tokens, these, and in the bidirectional form the window after them. There
        ``far`` has the features of the queries (B,H,N,2D) and of the slots, whose products are subtracted.
        """
        n, window = q.shape[2], self.window
        block = min(n, max(window, BLOCK))
        rest, width = -n % block, keys.shape[2] - n + block

        def rows(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 0, rest)).unflatten(2, (-1, block))  # (B,H,blocks,block,.)

        def columns(x: Tensor) -> Tensor:
            return F.pad(x, (0, 0, 0, rest)).unfold(2, width, block)  # (B,H,blocks,.,width)

        there = F.pad(used, (0, rest)).unfold(1, width, block)[:, None, :, None]
        query, slot = (torch.arange(size, device=q.device) for size in (block, width))
        band = (slot > query[:, None]) & (slot < query[:, None] + (window + 1 if far is None else 2 * window))
        # Queries in the padding see themselves, so that they have a score.
        near = band & there | (slot == query[:, None] + window)
        hidden, inside = ~near, band.to(q.dtype)
        assert self.gate is not None

        def read(q: Tensor, keys: Tensor, values: Tensor, gate: Tensor, *far: Tensor) -> Tensor:
            shares = (rows(q) @ columns(keys)).masked_fill(hidden, -torch.inf).softmax(-1)
            # The largest share has e^(s-c) = 1.
            weights = shares * (gate / shares.amax(-1, keepdim=True))
            if far:
                weights = torch.addcmul(weights, rows(far[0]) @ columns(far[1]), inside, value=-1)
            return (weights @ columns(values).mT).flatten(2, 3)[:, :, :n]

        # Few heads at a time, so that their scores stay in the cache.
        few = max(1, CACHED // hidden.numel())
        gates = upcast_half(self.gate).exp()[None, :, None, None, None]
        given = (q * per_root(q.shape[-1]), keys, values, gates, *(far or ()))
        return torch.cat([read(*part) for part in zip(*(t.split(few, 1) for t in given), strict=True)], 1)


def _features(x: Tensor, maps: Tensor) -> Tensor:
    """softmax([W x; -W x]): x (B,H,N,D), W (H,D,D) -> (B,H,N,2D), in float32 or better."""
    with torch.autocast(x.device.type, enabled=False):
        y = upcast_half(x) @ upcast_half(maps).mT
        return torch.cat([y, -y], -1).softmax(-1)
