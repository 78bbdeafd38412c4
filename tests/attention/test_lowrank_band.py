"""The sum of a band and a low-rank part, each against the mechanism that it is alone."""

from typing import Any

import pytest
import torch

import longspan
from support.hand import plain, read
from support.tensors import data, same

N = 13
MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 8, [False] + [True] * 12])
SEGMENTS = torch.tensor([[0] * 5 + [1] * 8, [2] * 13])


def build(causal=True, rank=2, window=4) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"lowrank_band(rank={rank}, window={window})", 6, 2, causal=causal).double()


def project(module, x, *names):
    return (getattr(module, name)(x).unflatten(-1, (2, -1)).transpose(1, 2) for name in names)


def dense(q, k, v, allowed):
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0) @ v


def definition(module, x, mask, segments):
    at = mask.long().cumsum(1) - 1
    allowed = mask[:, None, :] & (segments[:, :, None] == segments[:, None, :])
    distance = at[:, :, None] - at[:, None, :]
    if module.causal:
        allowed = allowed & (distance >= 0)
    near = allowed & (distance.abs() < module.window)
    q, k, v = project(module, x, "query", "key", "value")
    far_q, far_k, far_v = project(module, x, "far_query", "far_key", "far_value")
    o = dense(q, k, v, near[:, None]) + dense(far_q, far_k, far_v, allowed[:, None])
    return module.out(o.transpose(1, 2).flatten(-2))


def test_by_hand():
    """All keys tie in both parts: the mean of the last two and the mean of all are added."""
    module = plain("lowrank_band(rank=1, window=2)", asking=False)
    assert read(module, 1.0, 2.0, 4.0, 8.0) == pytest.approx([2.0, 3.0, 3 + 7 / 3, 6 + 15 / 4])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rank", [1, 5])
def test_it_equals_the_definition(causal, rank):
    module, everything = build(causal, rank), torch.ones_like(MASK)
    for arguments in ({}, {"mask": MASK}, {"segments": SEGMENTS}):
        x = data(2, N, 6).requires_grad_()
        mask, segments = arguments.get("mask", everything), arguments.get("segments", torch.zeros_like(SEGMENTS))
        found, expected = module(x, **arguments)[0][mask], definition(module, x, mask, segments)[mask]
        same(found, expected, (x, *module.parameters()))


@pytest.mark.parametrize("causal", [True, False])
def test_each_part_equals_a_separate_mechanism(causal):
    module, x = build(causal, rank=3), data(2, N, 6)  # heads of 3 channels, so that the far part is plain attention
    shared = ("query", "key", "value", "out")
    for silent, other, prefix in (("far_value", "local(window=4)", ""), ("value", "softmax", "far_")):
        alone = longspan.build(other, 6, 2, causal=causal).double()
        weights = module.state_dict()
        names = {name: name if name == "out" else prefix + name for name in shared}
        alone.load_state_dict({f"{n}.{p}": weights[f"{m}.{p}"] for n, m in names.items() for p in ("weight", "bias")})
        kept = {name: p.clone() for name, p in weights.items()}
        for p in getattr(module, silent).parameters():
            torch.nn.init.zeros_(p)
        torch.testing.assert_close(module(x)[0], alone(x)[0], rtol=1e-10, atol=1e-10)
        module.load_state_dict(kept)


def test_the_state_is_a_ring_and_narrow_keys():
    module, x = build(rank=1, window=4), data(2, N, 6)
    _, state = module(x, module.init_state(2))
    assert state.near.keys.shape == (2, 2, 4, 3)
    assert state.far.keys.shape == (2, 2, N, 1)
    assert state.far.values.shape == (2, 2, N, 3)
