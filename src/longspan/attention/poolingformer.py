"""Softmax attention at two levels: a near window of single keys, then a far window of pooled keys."""

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

POOLS = {"mean": "the mean", "max": "the largest, by channel", "dynamic": "a mean weighted by the middle token"}
AT_ONCE = 512  # new tokens of a call that attend to the state together


class PoolingformerState(NamedTuple):
    """Keys and values of the near window, slots of the far window, and tokens of the next slots."""

    near: Window
    far: Window  # positions are the numbers of the slots
    keys: Tensor  # (B,H,K-1,D)
    values: Tensor  # (B,H,K-1,D)
    position: Tensor  # (B,) int64, tokens so far


class Poolingformer(Attention[PoolingformerState]):
    r"""The sum of attention in a near window and attention to pooled keys in a far window.

    The near window reads $y_i$. The second level projects its queries, keys and values from the y of all heads. Slot s
    pools the keys $k^\prime_j$ of the K tokens from s S on to $\tilde k_s$, and their values to $\tilde v_s$. A causal
    query sees a slot once the slot's last token is not ahead of it. A query without a slot reads $z_i = 0$. In the
    bidirectional form the last slot may hold fewer tokens. Positions count real tokens.

    ``window``: $w_1$, near tokens to the left, and to the right if bidirectional. ``far_window``: $w_2$, the same for
    the far window. ``kernel``: K, tokens per slot. ``stride``: S, tokens between the beginnings of two slots. ``pool``:
    mean; max, by channel; dynamic, a mean whose weights are a softmax over $W u$, where u is the key (or value) of the
    slot's middle token and each head has its own W.

    The state is a ring of $w_1 + 1$ keys and values, a ring of the slots in $w_2$, and the last K - 1 tokens.

    Source: Zhang et al. 2021, section 3. The paper pools the window of each query. Here all slots begin at multiples of
    S, and a slot belongs to a window if its first token does, so results differ at the ends of a window. The causal
    form is ours. The choice of the token that weights the dynamic pool, and separate weights per head, are our reading.

    Raises:
        ValueError: For window < 0, stride < 1, kernel < stride, an unknown pool, or far_window < kernel + stride - 2,
            with which some queries would see no slot.
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
            raise ValueError(f"stride={stride} must be between 1 and kernel={kernel}, so that every token is in a slot")
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

    def start(self, batch: int, capacity: int) -> PoolingformerState:
        size, like = self.dim // self.heads, self.weight_like
        near = window.empty(batch, self.heads, self.window + 1, size, like)
        far = window.empty(batch, self.heads, self.far_window // self.stride + 1, size, like)
        pending = like.new_zeros(batch, self.heads, self.kernel - 1, size)
        return PoolingformerState(near, far, pending, pending.clone(), near.position.clone())

    def attend(
        self,
        x: Tensor,
        state: PoolingformerState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, PoolingformerState | None]:
        return rows.map_sequences(self._run, x, state, mask, segments, causal=self.causal, width=self.dim)

    def _run(
        self, x: Tensor, state: PoolingformerState | None, real: Tensor | None
    ) -> tuple[Tensor, PoolingformerState | None]:
        """x (B,N,dim), real tokens first in each row."""
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
        # A prompt without a mask is read as a whole sequence.
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

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """The far output of whole sequences (B,H,N,D); ``real`` (B,N) marks real tokens."""
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
        # The slots that a row of this length would have alone.
        ready = (slots == 0) | ((slots - 1) * self.stride + self.kernel < lengths[:, None])
        seen = pool.visible(at, slots, **place, causal=False, window=self.far_window) & ready[:, None]
        return dense.attend(q, k, v, mask=seen[:, None])

    def _go_on(
        self, q: Tensor, k: Tensor, v: Tensor, state: PoolingformerState, lengths: Tensor, *, read: bool
    ) -> tuple[Tensor, PoolingformerState]:
        """The far output of some tokens after a state, and the state after them."""
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

    def _pooled(self, tokens: Tensor, there: Tensor | None, mix: str) -> Tensor:
        """tokens (B,H,slots,K,D) -> (B,H,slots,D)."""
        if self.pool == "mean":
            return pool.mean(tokens, there)
        if self.pool == "max":
            return pool.largest(tokens, there)
        return pool.mixed(tokens, getattr(self, mix).to(tokens.dtype), there)
