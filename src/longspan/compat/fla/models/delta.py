"""What the layers with a delta rule share: projections, short convolutions, output norm and gate."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....modules.init import time_steps
from ....ops import gated
from ....ops.gated.decays import log_decay
from ....ops.tensors import merge, upcast_half
from .mixer import Call, ConvolvedMixer, RMSNorm, ShortConv, heads, whole


class DeltaState(NamedTuple):
    """The fast weights, and the tokens of the convolutions of queries, keys and values; without them (B,0,0)."""

    sums: Tensor  # (B,H,D,E)
    q: Tensor  # (B,taps-1,widths[0])
    k: Tensor  # (B,taps-1,widths[1])
    v: Tensor  # (B,taps-1,widths[2])


class DeltaMixer(ConvolvedMixer):
    """S = P + b k (v - P^T k)^T; subclasses define the decay of P and what is written.

    Args:
        hidden: Width of the input.
        groups: Heads of queries and keys.
        count: Heads of values.
        sizes: Channels of a head of keys, and of values.
        steps: Writes of a token.
        conv: Taps of the convolutions; 0 for none.
        activation: Activation of queries and keys: ``silu``, ``relu``, ``elu`` (plus 1) or ``identity``.
    """

    def __init__(
        self,
        hidden: int,
        groups: int,
        count: int,
        sizes: tuple[int, int],
        *,
        conv: int,
        steps: int = 1,
        activation: str = "silu",
    ):
        super().__init__()
        self.groups, self.heads, self.sizes, self.steps, self.activation = groups, count, sizes, steps, activation
        widths = groups * sizes[0], groups * sizes[0] * steps, count * sizes[1] * steps
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, width, bias=False) for width in widths)
        of_keys = activation if activation == "silu" else None
        kinds = of_keys, of_keys, "silu"
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            ShortConv(width, conv, activation=kind) if conv else None for width, kind in zip(widths, kinds, strict=True)
        )

    def finish(self, hidden: int, eps: float, gate: Callable[[Tensor], Tensor] | None) -> None:
        """Add the output norm and projection; ``gate`` is the activation of ``g_proj``, None for no gate."""
        self.gate = gate
        self.o_norm = RMSNorm(self.sizes[1], eps)
        self.o_proj = nn.Linear(self.heads * self.sizes[1], hidden, bias=False)

    def start(self, batch: int) -> DeltaState:
        sums = upcast_half(self.like.new_zeros(batch, self.heads, *self.sizes))
        return DeltaState(sums, *self.start_convs(batch))

    def forward(self, x: Tensor, state: DeltaState | None, call: Call) -> tuple[Tensor, DeltaState | None]:
        sums, *recent = self.start(len(x)) if state is None else state
        (q, k, v), recent = self.project(x, recent, call)
        if self.v_conv1d is None:
            v = F.silu(v)
        if self.q_conv1d is None and self.activation == "silu":
            q, k = F.silu(q), F.silu(k)
        elif self.activation == "relu":
            q, k = q.relu(), k.relu()
        elif self.activation == "elu":
            q, k = F.elu(q) + 1, F.elu(k) + 1
        o, sums = self.recur(x, q, k, v, sums, call)
        y = self.o_norm(o) if self.gate is None else self.o_norm(o, self.gating(x), self.gate)
        return self.o_proj(merge(y)), None if state is None else DeltaState(sums, *recent)

    def gating(self, x: Tensor) -> Tensor:
        """Return the gate before its activation, (B,H,N,E)."""
        return heads(self.get_submodule("g_proj")(x), self.sizes[1])

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        """Run the recurrence on projections (B,N,width) -> o (B,H,N,E), the next fast weights."""
        raise NotImplementedError

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sums: Tensor,
        beta: Tensor,
        call: Call,
        *,
        decay: Tensor | None = None,
        normalize: str | None = "l2",
    ) -> tuple[Tensor, Tensor]:
        """``gated.recur`` on q, k (B,N,GD), v (B,N,HE), beta (B,N,H)."""
        q, k, v = heads(q, self.sizes[0]), heads(k, self.sizes[0]), heads(v, self.sizes[1])
        return gated.recur(q, k, v, log_decay=decay, beta=beta.mT, normalize=normalize, state=sums, **call.packing)


class WithDecay(DeltaMixer):
    """Adds the decay of Mamba-2 and Gated DeltaNet: g = -e^a softplus(w x + b), per head of values."""

    def add_decay(self, hidden: int) -> None:
        """Add ``a_proj``, ``A_log`` and ``dt_bias``."""
        self.a_proj = nn.Linear(hidden, self.heads, bias=False)
        self.A_log = nn.Parameter((16 * (1 - torch.rand(self.heads))).log())
        self.dt_bias = nn.Parameter(time_steps(self.heads))

    def log_decay(self, x: Tensor) -> Tensor:
        """Return g (B,H,N) in float32 at least."""
        return log_decay(self.A_log, self.a_proj(x), self.dt_bias).mT


def head_sizes(config: Any) -> tuple[int, int]:
    """Return the channels of a head of keys and of values, from ``head_dim`` and ``expand_v``."""
    return config.head_dim, whole(config.head_dim * config.expand_v, "head_dim * expand_v")


def check_heads(config: Any) -> str:
    """Return why the numbers of heads do not fit; "" if they do."""
    more = getattr(config, "num_v_heads", None) or config.num_heads
    if more % config.num_heads:
        return f"num_v_heads={more} must be a multiple of num_heads={config.num_heads}"
    return ""
