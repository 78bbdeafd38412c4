"""Features of NaN, and second derivatives of one operand alone."""

import pytest
import torch

import longspan
from longspan.ops.native.call import available
from ops.families import FAMILIES, assert_close


@pytest.fixture(autouse=True)
def compiled():
    if not available():
        pytest.skip("no native kernels here")


@pytest.mark.parametrize("feature_map", ["elu", "relu", "squared_relu", "exp"])
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("where", ["query", "key"])
def test_a_nan_stays_one_in_features_and_their_slopes(feature_map, tokens, where):
    """A weight that has become NaN must not go unseen, whichever backend computes it."""
    attention = longspan.build(f"linear(feature_map={feature_map!r})", dim=8, heads=2)
    x = torch.randn(2, tokens, 8)
    with torch.no_grad():
        # With a payload in its low bits.
        getattr(attention, where).weight[0] = torch.tensor(0x7FC00001, dtype=torch.int32).view(torch.float32)
    found = {}
    for name in ("native", "torch", "reference"):
        with longspan.backend(name):
            attention.zero_grad()
            y, _ = attention(x, attention.init_state(2))
            y.sum().backward()
        grads = [p.grad.isnan() for p in attention.parameters() if p.grad is not None]
        found[name] = [y.isnan(), *grads]
    assert found["native"][0].any()
    for name in ("torch", "reference"):
        # Where they multiply slopes of 0 by a NaN or leave them out, they differ among each other.
        assert not any((others & ~mine).any() for mine, others in zip(found["native"], found[name], strict=True))


@pytest.mark.parametrize("form", ["native", "torch"])
@pytest.mark.parametrize("name", ["linear", "decay-head", "delta-head"])
def test_queries_alone_have_second_derivatives(name, form):
    """The end state comes of no query, and has no gradient to pass on."""
    family, found = FAMILIES[name], []
    for way, dtype in ((form, torch.float32), ("reference", torch.float64)):
        given = {name: t for name, t in family.operands(3, (4, 4), dtype=dtype).items() if name != "state"}
        q = given["query"].requires_grad_()
        (first,) = torch.autograd.grad(family.run(way, given)[0].square().sum(), q, create_graph=True)
        found += torch.autograd.grad(first.square().sum(), q)
    assert_close(found[:1], found[1:], 1e-5)


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_one_parameter_of_a_convolution_has_second_derivatives(which):
    x, given = torch.randn(1, 5, 6), {"weight": torch.randn(6, 4), "bias": torch.randn(6)}
    given[which].requires_grad_()
    out, _ = longspan.causal_convolution(x, **given, activation="silu")
    (first,) = torch.autograd.grad(out.square().sum(), given[which], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), given[which])
    assert second.isfinite().all()
    assert second.abs().sum() > 0
