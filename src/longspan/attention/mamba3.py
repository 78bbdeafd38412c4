"""Mamba-3: a state space with the trapezoidal rule, whose keys and queries are rotated by angles of the tokens."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.init import time_steps
from ..modules.norms import expanded
from ..ops import gated, scan
from ..ops.tensors import merge, rms_normalize, softplus, split, upcast_half
from .base import Attention

FLOOR = 1e-4  # smallest rate of decay


class Mamba3State(NamedTuple):
    """The sums, and what the next token's rule needs of the last one; float32 or wider."""

    sums: Tensor  # (B,H,channels,E)
    key: Tensor  # (B,H,channels) last key, rotated
    value: Tensor  # (B,H,E) last value
    angle: Tensor  # (B,H,A) float64, sum of all angles


class Mamba3(Attention[Mamba3State]):
    r"""The core of Mamba-3: Mamba-2 with a trapezoidal rule, rotations that depend on the token, and no convolution.

    The step size $\Delta_t > 0$, the decay $a_t = e^{A_t \Delta_t}$ and $\lambda_t$ in (0, 1) are numbers per head,
    $\lambda_t = 1$ is the rule of Mamba-2. $R(\theta)$ rotates pairs of neighboring channels, the first ``rotation`` of
    all channels; the change of angle $\omega_t$ of a pair is shared by all heads. u, B and C are linear in x; B and C
    are RMS-normed, with a bias per head.

    ``channels``: size of B and C. ``key_heads``: pairs of B and C, each shared by heads / key_heads consecutive heads.
    ``expand_v``: width of u as a multiple of dim. ``rotation``: share of the channels that are rotated.

    Source: Lahoti et al. 2026 (2603.15569), the form with one input and one output (SISO). Defaults and initialization
    ($\Delta$ log-uniform in 0.001 ... 0.1, biases and $d_h$ 1) as in the authors' Mamba3 module.

    Raises:
        ValueError: For ``key_heads`` that do not divide heads, a ``rotation`` outside of 0 ... 1 or of less than two
            channels, or an ``expand_v`` that leaves each head a fraction of a channel.
    """

    name, paper, cost = "mamba3", "2603.15569", "N D^2"
    family = "gated"
    learned_state = ("sums",)
    equations = (
        r"S_t = a_t S_{t-1} + (1 - \lambda_t) \Delta_t a_t k_{t-1} u_{t-1}^\top + \lambda_t \Delta_t k_t u_t^\top, "
        r"\quad o_t = S_t^\top q_t + d_h u_t",
        r"k_t = R(\theta_t)(\mathrm{norm}(B_t) + b), \quad q_t = R(\theta_t)(\mathrm{norm}(C_t) + c), \quad "
        r"\theta_t = \theta_{t-1} + \pi \Delta_t \tanh(\omega_t)",
        r"\log a_t = -\Delta_t \, \mathrm{softplus}(w \cdot x_t), \quad \lambda_t = \sigma(u \cdot x_t), \quad "
        r"y_t = W_o \, (o_t \odot \mathrm{silu}(W_g x_t))",
    )
    citation = (
        "Lahoti, Aakash and Li, Kevin Y. and Chen, Berlin and Wang, Caitlin and Bick, Aviv and Kolter, J. Zico and "
        "Dao, Tri and Gu, Albert",
        "Mamba-3: Improved Sequence Modeling using State Space Principles",
        2026,
    )
    examples = ("mamba3(channels=6)", "mamba3(channels=4, key_heads=2, expand_v=1.5, rotation=1.0)")
    directions, states = ("causal",), (Mamba3State,)
    no_decay = ("key_bias", "query_bias")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        channels: int = 128,
        key_heads: int = 1,
        expand_v: float = 2.0,
        rotation: float = 0.5,
    ):
        super().__init__(dim, heads, causal=causal)
        if key_heads < 1 or heads % key_heads:
            raise ValueError(f"key_heads={key_heads} must divide heads={heads}")
        self.angles = int(channels * rotation) // 2 if 0 < rotation <= 1 else 0
        if self.angles < 1:
            raise ValueError(
                f"rotation={rotation} of channels={channels} must be at least two channels, and at most all of them"
            )
        self.channels, self.key_heads, self.expand_v, self.rotation = channels, key_heads, expand_v, rotation
        self.size = expanded(dim // heads, expand_v, "expand_v")
        width, keys = heads * self.size, key_heads * channels
        self.value, self.out_gate = (nn.Linear(dim, width, bias=False) for _ in range(2))
        self.key, self.query = (nn.Linear(dim, keys, bias=False) for _ in range(2))
        self.dt, self.decay, self.blend = (nn.Linear(dim, heads, bias=False) for _ in range(3))
        self.angle = nn.Linear(dim, self.angles, bias=False)
        self.dt_bias = nn.Parameter(time_steps(heads))
        self.key_scale, self.query_scale = (nn.Parameter(torch.ones(channels)) for _ in range(2))
        self.key_bias, self.query_bias = (nn.Parameter(torch.ones(heads, channels)) for _ in range(2))
        self.skip = nn.Parameter(torch.ones(heads))
        self.out = nn.Linear(width, dim, bias=False)

    def start(self, batch: int, capacity: int) -> Mamba3State:
        like, heads = upcast_half(self.weight_like), self.heads
        return Mamba3State(
            like.new_zeros(batch, heads, self.channels, self.size),
            like.new_zeros(batch, heads, self.channels),
            like.new_zeros(batch, heads, self.size),
            like.new_zeros(batch, heads, self.angles, dtype=torch.float64),
        )

    def attend(
        self,
        x: Tensor,
        state: Mamba3State | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Mamba3State | None]:
        before = self.start(x.shape[0], 0) if state is None else state
        v = split(upcast_half(self.value(x)), self.heads)
        dt = softplus(upcast_half(self.dt(x)) + upcast_half(self.dt_bias))  # (B,N,H)
        decay = -softplus(upcast_half(self.decay(x))).clamp(min=FLOOR) * dt
        blend = upcast_half(self.blend(x)).sigmoid()
        k = self._normed(self.key(x), self.key_scale, self.key_bias)
        q = self._normed(self.query(x), self.query_scale, self.query_bias)
        angle = upcast_half(self.angle(x))
        o, after = trapezoid(q, k, v, dt, decay, blend, angle, before, mask=mask, segments=segments)
        o = o + upcast_half(self.skip)[:, None, None] * v
        y = self.out((merge(o) * F.silu(upcast_half(self.out_gate(x)))).to(x.dtype))
        return y, None if state is None else after

    def _normed(self, x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        """x (B,N,G*D) -> normed, with the bias of each head (B,H,N,D)."""
        x = split(upcast_half(x), self.key_heads)
        x = rms_normalize(x, 1e-5) * upcast_half(scale)
        return x.repeat_interleave(self.heads // self.key_heads, 1) + upcast_half(bias)[:, None]


def trapezoid(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dt: Tensor,
    decay: Tensor,
    blend: Tensor,
    angle: Tensor,
    before: Mamba3State,
    *,
    mask: Tensor | None = None,
    segments: Tensor | None = None,
) -> tuple[Tensor, Mamba3State]:
    """Rotate keys and queries, and run the recurrence without the skip.

    Args:
        q: (B,H,N,D), before the rotation.
        k: (B,H,N,D), before the rotation.
        v: (B,H,N,E).
        dt: Step sizes (B,N,H).
        decay: Logarithms of the decays (B,N,H).
        blend: Weights of the token itself (B,N,H), in 0 ... 1.
        angle: Changes of the angles (B,N,A), before tanh.
        before: The state before the first token.
        mask: (B,N) bool.
        segments: (B,N) int64.

    Returns:
        o (B,H,N,E), the next state.
    """
    # In float64: the sum grows with the number of tokens, its cosine must not lose precision.
    turn = math.pi * (dt[..., None] * angle.tanh()[:, :, None]).double()  # (B,N,H,A)
    flat = turn.flatten(2)
    theta, last = scan.diagonal(
        flat, torch.zeros_like(flat), mask=mask, segments=segments, state=before.angle.flatten(1)
    )
    theta = theta.unflatten(-1, (turn.shape[2], -1)).transpose(1, 2)  # (B,H,N,A)
    k, q = rotate(k, theta), rotate(q, theta)
    # A token is written twice: with its own weight, and with that of its successor, whose decay applies to both.
    again, first = following(((1 - blend) * dt).mT, mask, segments)
    sums = before.sums + (first[..., None] * before.key)[..., None] * before.value[..., None, :]
    own = (blend * dt).mT
    o, sums = gated.recur(
        q,
        k,
        v * (own + again)[..., None],
        log_decay=decay.mT,
        scale=1.0,
        mask=mask,
        segments=segments,
        state=sums,
        donate=True,
    )
    # A token does not read its own second write.
    o = o - (again * (q * k).sum(-1))[..., None] * v
    key, value = (last_real(t, kept, mask, segments) for t, kept in ((k, before.key), (v, before.value)))
    return o, Mamba3State(sums, key, value, last.unflatten(-1, (turn.shape[2], -1)))


def rotate(x: Tensor, angle: Tensor) -> Tensor:
    """Rotate pairs of neighboring channels: x (B,H,N,D), angle (B,H,N,A) of the first 2A channels."""
    size = 2 * angle.shape[-1]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0:size:2], x[..., 1:size:2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([turned, x[..., size:]], -1)


def following(x: Tensor, mask: Tensor | None, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return for each token the value of the next real token of its segment, 0 without one.

    Args:
        x: (B,H,N).
        mask: (B,N) bool.
        segments: (B,N) int64.

    Returns:
        (B,H,N), and the value of the first real token of the first segment (B,H).
    """
    n = x.shape[-1]
    if not n:
        return x, x.new_zeros(x.shape[:2])
    if mask is None and segments is None:
        return F.pad(x[..., 1:], (0, 1)), x[..., 0]
    at = torch.arange(n, device=x.device).expand(x.shape[0], n)
    real = at if mask is None else torch.where(mask, at, n)
    # The first real token from each place on; n if there is none.
    real = F.pad(real.flip(1).cummin(1).values.flip(1), (0, 1), value=n)  # (B,N+1)
    there = real < n
    if segments is not None:
        own = torch.cat([segments[:, :1], segments], 1)
        there = there & (segments.gather(1, real.clamp(max=n - 1)) == own)
    found = x.gather(2, real.clamp(max=n - 1)[:, None].expand(-1, x.shape[1], -1)).masked_fill(~there[:, None], 0.0)
    return found[..., 1:], found[..., 0]


def last_real(x: Tensor, before: Tensor, mask: Tensor | None, segments: Tensor | None) -> Tensor:
    """Return the last real token of the last segment: x (B,H,N,D), before (B,H,D), the token before the first."""
    n = x.shape[2]
    if not n:
        return before.clone()
    if mask is None:
        return x[:, :, -1].clone()
    at = torch.where(mask, torch.arange(n, device=x.device), -1).amax(1)[:, None]  # (B,1)
    found = x.gather(2, at.clamp(min=0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))[:, :, 0]
    found = torch.where((at >= 0)[..., None], found, before)
    if segments is None:
        return found
    # Without real tokens the last segment is at its start, unless it is also the first.
    begun = torch.where(at >= 0, segments.gather(1, at.clamp(min=0)), segments[:, :1]) == segments[:, -1:]
    return found.masked_fill(~begun[..., None], 0.0)
