"""Preconditioned Gated DeltaNet and KDA (Tumma, Loo and Rus 2026, 2604.21100): steps scaled by past keys."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .....modules.init import time_steps
from .....ops.gated import preconditioned
from .....ops.gated.decays import log_decay
from .....ops.tensors import unit, upcast_half
from ..delta import DeltaMixer, DeltaState
from ..family import Family
from ..mixer import Call, heads
from . import gated_deltanet, kda


class Curvature(DeltaMixer):
    """S = P + b M k (v - P^T k)^T with M = x^(-u / (1 + |u|)), u = log(A + eps) - c and A = e^f A + w k^2.

    The last column of the sums is A.
    """

    def add_curvature(self, count: int, span: float) -> None:
        """Add the parameters of A and M, for ``count`` heads."""
        self.span = span
        self.log_atk_scale = nn.Parameter(torch.full((count,), -0.2))
        self.A_log_atk = nn.Parameter((16 * (1 - torch.rand(count))).log())
        self.dt_bias_atk = nn.Parameter(time_steps(count))

    def start(self, batch: int) -> DeltaState:
        state = super().start(batch)
        return state._replace(sums=F.pad(state.sums, (0, 1)))

    def curved(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sums: Tensor,
        call: Call,
        *,
        beta: Tensor,
        decay: Tensor,
        fade: Tensor,
        weight: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return o (B,H,N,E) and the next sums.

        Args:
            q: (B,N,GD).
            k: (B,N,GD).
            v: (B,N,HE).
            sums: (B,H,D,E+1).
            call: The call.
            beta: (B,N,G or H), before its sigmoid, as ``weight``.
            decay: g (B,H,N) or (B,H,N,D).
            fade: (B,N,G or H), the logits of f.
            weight: (B,N,G or H).
        """
        factor = 2.0 if getattr(self, "negative", False) else 1.0
        q, k, v = heads(q, self.sizes[0]), heads(k, self.sizes[0]), heads(v, self.sizes[1])
        beta, weight = upcast_half(beta).sigmoid().mT * factor, upcast_half(weight).sigmoid()
        fade = log_decay(self.A_log_atk, fade, self.dt_bias_atk)
        q, k, beta = (t.repeat_interleave(self.heads // t.shape[1], 1) for t in (q, k, beta))
        fade, weight = (t.repeat_interleave(self.heads // t.shape[2], 2) for t in (fade, weight))
        center = upcast_half(self.log_atk_scale)
        o, (sums, curvature) = preconditioned.attend(
            unit(upcast_half(q)),
            unit(upcast_half(k)),
            v,
            beta=beta,
            log_decay=decay,
            weight=weight,
            log_fade=fade,
            center=center.repeat_interleave(self.heads // len(center)),
            span=self.span,
            state=(sums[..., :-1].contiguous(), sums[..., -1].contiguous()),
            **call.packing,
        )
        return o, torch.cat([sums, curvature[..., None]], -1)


class PrecondGatedDeltaNet(Curvature, gated_deltanet.GatedDeltaNet):
    """Gated DeltaNet with a preconditioner per head of keys."""

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.a_atk_proj, self.b_atk_proj = (nn.Linear(config.hidden_size, self.groups, bias=False) for _ in range(2))
        self.add_curvature(self.groups, config.squash_x)

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        gates = {"beta": self.b_proj(x), "fade": self.a_atk_proj(x), "weight": self.b_atk_proj(x)}
        return self.curved(q, k, v, sums, call, decay=self.log_decay(x), **gates)


class PrecondKDA(Curvature, kda.KimiDeltaAttention):
    """KDA with a preconditioner per head of values."""

    def __init__(self, config: Any, layer: int):
        super().__init__(config, layer)
        self.b_proj = nn.Linear(config.hidden_size, self.groups, bias=False)
        self.a_proj, self.b_atk_proj = (nn.Linear(config.hidden_size, self.heads, bias=False) for _ in range(2))
        self.add_curvature(self.heads, config.squash_x)

    def recur(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, sums: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        gates = {"beta": self.b_proj(x), "fade": self.a_proj(x), "weight": self.b_atk_proj(x)}
        return self.curved(q, k, v, sums, call, decay=self.log_decay(x), **gates)


def _checked(family: Family, model_type: str, title: str, mixer: Any) -> Family:
    """Return a family of the delta rule with the options of the preconditioner."""

    def check(config: Any) -> str:
        if not 1 < config.squash_x <= 2:
            return f"squash_x={config.squash_x} must be above 1 and at most 2"
        if config.squash_eps != preconditioned.EPS:
            return f"squash_eps={config.squash_eps} must be {preconditioned.EPS}"
        return family.check(config)

    options = {**family.options, "squash_x": 1.5, "squash_eps": preconditioned.EPS}
    # They choose initial values.
    ignored = ("log_atk_scale_init", "a_log_init_lower")
    return Family(model_type, title, mixer, options=options, ignored=ignored, check=check)


FAMILIES = (
    _checked(gated_deltanet.FAMILIES[0], "precond_gated_deltanet", "PrecondGatedDeltaNet", PrecondGatedDeltaNet),
    _checked(kda.FAMILIES[0], "precond_kda", "PrecondKDA", PrecondKDA),
)
