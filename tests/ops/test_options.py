"""Numbers among the options of the public operations: finite, and epsilons not negative."""

import math

import pytest
import torch

import longspan
from longspan.compat.fla import ops as fla

Q, K, V = torch.randn(3, 1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
DECAY, BETA = -torch.ones(1, 2, 5), torch.ones(1, 2, 5)
SCALED = {
    "sparse_attention": lambda scale: longspan.sparse_attention(Q, K, V, "causal", scale=scale),
    "decay_attention": lambda scale: longspan.decay_attention(Q, K, V, log_decay=DECAY, scale=scale),
    "delta_rule": lambda scale: longspan.delta_rule(Q, K, V, beta=BETA, scale=scale),
    "a token of decay_attention": lambda scale: longspan.decay_attention(
        Q[:, :, :1], K[:, :, :1], V[:, :, :1], log_decay=DECAY[..., :1], scale=scale, state=torch.zeros(1, 2, 8, 8)
    ),
    "fla": lambda scale: fla.chunk_delta_rule(
        Q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2), BETA.transpose(1, 2), scale=scale
    ),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, "1", [1.0]])
def test_a_scale_is_finite(name, scale):
    with pytest.raises(ValueError, match="scale=.* must be a finite number, or None"):
        SCALED[name](scale)
    SCALED[name](0.5)
    SCALED[name](None)


@pytest.mark.parametrize("eps", [-1.0, -1e-9, math.nan, math.inf, "x", None])
@pytest.mark.parametrize("state", [None, torch.zeros(1, 2, 8, 9)])
def test_an_epsilon_is_not_negative(eps, state):
    few = (slice(None), slice(None), slice(1 if state is not None else 5))
    with pytest.raises(ValueError, match="eps=.* must be a finite number >= 0"):
        longspan.linear_attention(Q[few], K[few], V[few], eps=eps, state=state)
    longspan.linear_attention(Q[few], K[few], V[few], eps=0.0, state=state)


def test_an_operand_is_a_tensor():
    with pytest.raises(ValueError, match="query must be a floating-point .*, not list"):
        longspan.linear_attention([1.0], K, V)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in longspan.list_mechanisms()
        if "context_dim" in longspan.attention.base.own_options(longspan.attention.REGISTRY[name])
    ],
)
def test_a_context_has_no_negative_width(name):
    cls = longspan.attention.REGISTRY[name]
    with pytest.raises(ValueError, match=f"{name}: context_dim=-1 must not be negative"):
        cls(8, 2, causal="causal" in cls.directions, context_dim=-1)
