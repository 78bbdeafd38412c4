"""Softmax attention in a near window, and again in a far one, whose keys are pooled."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops import rows
from ..ops.compress import pool
from ..ops.softmax import dense
from ..ops.tensors import merge, positions, split
from ..patterns import Pattern, band
from ..states import lookback, window
from ..states.window import Window
from .base import Attention

POOLS = {"mean": "the mean", "max": "the largest, by channel", "dynamic": "a mean whose weights the middle token gives"}
AT_ONCE = 512  # new tokens of one call that meet the state's slots together


class PoolingformerState(NamedTuple):
    """The last keys and values of the near window, the last slots of the far one, and tokens of the next."""

    near: Window
    far: Window  # slots by their numbers
    keys: Tensor  # (B,H,K-1,D)
    values: Tensor  # (B,H,K-1,D)
    position: Tensor  # (B,) int64, tokens so far


class Poolingformer(Attention):
    r"""A near window with single keys, and from what it reads a far window with keys that are pooled: their sum.

    Attention in the near window reads $y_i$. Queries, keys and values of the second level are projections of all heads'
    y, side by side; slot s pools the keys $k^\prime_j$ of the K tokens from s S on, and likewise the values, to
    $\tilde k_s$ and $\tilde v_s$. A causal query sees a slot once its last token is not ahead; without any it reads
    $z_i = 0$. In the bidirectional form the last slot holds what tokens there are. Positions count real tokens.

    ``window``: $w_1$, and ``far_window``: $w_2$, so many tokens to each side, or to the left. ``kernel``: K.
    ``stride``: S. ``pool``: mean; max, by channel; dynamic, a mean whose weights are a softmax over $W u$, u being the
    key (or value) of the slot's middle token, with a W for each head.

    The state is a ring of $w_1 + 1$ keys and values, one of the slots in $w_2$, and the last K - 1 tokens.

    Source: Zhang et al. 2021, section 3. The paper pools the window of each query; here slots lie at multiples of S for
    all, and one belongs to a window if its first token does, which differs at the window's ends. The causal form is our
    own. Which token chooses dynamic weights, and that heads have their own, is our reading.
    Raises ValueError for window < 0, stride < 1, kernel < stride, far_window < kernel + stride - 2, with which some
    queries would see no slot, and an unknown pool.
    """

    name, paper, cost = "poolingformer", "2105.04371", "N (W + V / S) D"
    family = "compressed"
    equations = (
        r"o_i = y_i + z_i, \quad y_i = \sum_{j \in P_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot k_j}{\sqrt D}, \quad "
        r"P_i = \lbrace j \in \mathcal{A}_i : \lvert i - j \rvert \le w_1 \rbrace",
        r"z_i = \sum_{s \in C_i} p_{is}^\prime \tilde v_s, \quad "
        r"p_{is}^\prime = \mathrm{softmax}_{s \in C_i} \frac{q_i^\prime \cdot \tilde k_s}{\sqrt D}, \quad "
        r"C_i = \lbrace s : \lvert i - s S \rvert \le w_2 \rbrace",
        r"\text{causal:} \quad C_i = \lbrace s : i - w_2 \le s S \text{ and } s S + K - 1 \le i \rbrace",
    )
    citation = (
        "Zhang, Hang and Gong, Yeyun and Shen, Yelong and Li, Weisheng and Lv, Jiancheng and Duan, Nan and "
        "Chen, Weizhu",
        "Poolingformer: Long Document Modeling with Pooling Attention",
        2021,
    )
    examples = (
        "poolingformer(window=3, far_window=9, kernel=3, stride=2)",
        "poolingformer(window=2, far_window=7, kernel=2, stride=2, pool='max')",
        "poolingformer(window=2, far_window=11, kernel=5, stride=4, pool='dynamic')",
    )
    states = (PoolingformerState,)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        window: int = 128,
        far_window: int = 512,
        kernel: int = 5,
        stride: int = 4,
        pool: str = "mean",
    ):
        super().__init__(dim, heads, causal=causal)
        if not 1 <= stride <= kernel:
            raise ValueError(f"stride={stride} must be between 1 and kernel={kernel}, so that a slot holds every token")
        if far_window < kernel + stride - 2:
            raise ValueError(f"far_window={far_window} must be at least kernel + stride - 2 = {kernel + stride - 2}")
        self.window, self.far_window, self.kernel, self.stride = window, far_window, kernel, stride
        self.pool = known(pool, POOLS, "pool")
        self.near: Pattern = band(window, right=0 if causal else window)
        self.max_lookahead = window
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.far_query, self.far_key, self.far_value = (nn.Linear(dim, dim) for _ in range(3))
        if pool == "dynamic":
            size = dim // heads
            self.mix_key, self.mix_value = (
                nn.Parameter(torch.randn(heads, size, kernel) * size**-0.5) for _ in range(2)
            )

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch, capacity):
        size, like = self.dim // self.heads, self.weight_like
        near = window.empty(batch, self.heads, self.window + 1, size, like)
        far = window.empty(batch, self.heads, self.far_window // self.stride + 1, size, like)
        pending = like.new_zeros(batch, self.heads, self.kernel - 1, size)
        return PoolingformerState(near, far, pending, pending.clone(), near.position.clone())

    def attend(self, x, state, *, mask=None, segments=None, donate=False):
        return rows.map_sequences(self._run, x, state, mask, segments, causal=self.causal, width=self.dim)

    def _run(self, x, state, real):
        """Rows that begin with their real tokens, (B,N,dim)."""
        if not x.numel():
            return self.out(x), state
        parts = (self.query, self.key, self.value)
        q, k, v = (split(part(x), self.heads) for part in parts)
        y, near = lookback.attend(q, k, v, state and state.near, self.near, mask=real)
        far = merge(y)
        q, k, v = (split(part(far), self.heads) for part in (self.far_query, self.far_key, self.far_value))
        if state is None:
            return self.out(merge(y + self._whole(q, k, v, real))), None
        lengths = torch.full_like(state.position, x.shape[1]) if real is None else real.sum(1)
        # A prompt reads as a whole sequence does.
        traced = torch.compiler.is_compiling()
        first = x.shape[1] > 1 and real is None and not traced and not bool(state.position.any())
        outs = [self._whole(q, k, v, None)] if first else []
        for begin in range(0, x.shape[1], AT_ONCE):
            some = slice(begin, begin + AT_ONCE)
            few = (lengths - begin).clamp(0, q[:, :, some].shape[2])
            z, state = self._go_on(q[:, :, some], k[:, :, some], v[:, :, some], state, few, read=not first)
            outs.append(z)
        z = outs[0] if first else torch.cat(outs, 2)
        return self.out(merge(y + z.to(y.dtype))), state._replace(near=near)

    def _whole(self, q, k, v, real):
        """What the heads read from the slots of whole rows, of which ``real`` says which tokens there are."""
        lengths = None if real is None or self.causal else real.sum(1)
        place = {"kernel": self.kernel, "stride": self.stride}
        k, there = pool.windows(k, **place, whole=self.causal, lengths=lengths)
        v, _ = pool.windows(v, **place, whole=self.causal, lengths=lengths)
        k, v = self._pooled(k, there, "mix_key"), self._pooled(v, there, "mix_value")
        if lengths is None:
            return pool.attend(
                q, k, v, kernel=self.kernel, stride=self.stride, causal=self.causal, window=self.far_window
            )
        at, slots = (torch.arange(size, device=q.device)[None] for size in (q.shape[2], k.shape[2]))
        # As many slots as a row of this length has alone.
        ready = (slots == 0) | ((slots - 1) * self.stride + self.kernel < lengths[:, None])
        seen = pool.visible(at, slots, **place, causal=False, window=self.far_window) & ready[:, None]
        return dense.attend(q, k, v, mask=seen[:, None])

    def _go_on(self, q, k, v, state, lengths, *, read):
        """Some tokens after those that the state tells of: what the heads read from slots, and the state with them."""
        place = {"kernel": self.kernel, "stride": self.stride}
        k, whole, keys = pool.fresh(state.keys, k, state.position, lengths, **place)
        v, _, values = pool.fresh(state.values, v, state.position, lengths, **place)
        k, v = self._pooled(k, None, "mix_key"), self._pooled(v, None, "mix_value")
        view, far = window.extend(state.far, k, v, mask=whole)
        z = q
        if read:
            at, _ = positions(q.transpose(1, 2), state.position)
            seen = pool.visible(at, view.slots, **place, causal=True, window=self.far_window) & view.visible[:, :1]
            z = dense.attend(q.to(view.keys.dtype), view.keys, view.values, mask=seen[:, None])
        return z, PoolingformerState(state.near, far, keys, values, state.position + lengths)

    def _pooled(self, tokens, there, mix):
        """tokens (B,H,slots,K,D) -> (B,H,slots,D)."""
        if self.pool == "mean":
            return pool.mean(tokens, there)
        if self.pool == "max":
            return pool.largest(tokens, there)
        return pool.mixed(tokens, getattr(self, mix).to(tokens.dtype), there)
