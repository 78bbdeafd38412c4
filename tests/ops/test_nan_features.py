"""Features of NaN, and second derivatives of one operand alone."""

import pytest
import torch

import longspan
from longspan.ops.native.call import available


@pytest.fixture(autouse=True)
def compiled():
    if not available():
        pytest.skip("no native kernels here")


def operands(tokens=1):
    torch.manual_seed(0)
    return torch.rand(3, 1, 2, tokens, 4)


STEPS = {
    "linear": lambda q, k, v, state, **more: longspan.linear_attention(q, k, v, state=state, **more),
    "decay": lambda q, k, v, state, **more: longspan.decay_attention(
        q, k, v, log_decay=torch.full(q.shape[:3], -0.1, dtype=q.dtype), state=state, **more
    ),
    "delta": lambda q, k, v, state, **more: longspan.delta_rule(
        q, k, v, beta=torch.full(q.shape[:3], 0.5, dtype=q.dtype), state=state, **more
    ),
}


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


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
@pytest.mark.parametrize("name", STEPS)
def test_queries_alone_have_second_derivatives(name, backend):
    """The end state comes of no query, and has no gradient to pass on."""
    q, k, v = operands(3)
    q.requires_grad_()
    with longspan.backend(backend):
        out = STEPS[name](q, k, v, None)
        (first,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), q)
    step = 1e-3 * torch.randn_like(q)

    def slope(q):
        q = q.detach().double().requires_grad_()
        with longspan.backend("reference"):
            out = STEPS[name](q, k.double(), v.double(), None)
        return torch.autograd.grad(out.square().sum(), q)[0].square().sum()

    expected = (slope(q.detach() + step) - slope(q.detach() - step)) / 2
    torch.testing.assert_close(float((second * step).sum()), float(expected), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_one_parameter_of_a_convolution_has_second_derivatives(which):
    x, given = torch.randn(1, 5, 6), {"weight": torch.randn(6, 4), "bias": torch.randn(6)}
    given[which].requires_grad_()
    out, _ = longspan.causal_convolution(x, **given, activation="silu")
    (first,) = torch.autograd.grad(out.square().sum(), given[which], create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), given[which])
    assert second.isfinite().all()
    assert second.abs().sum() > 0
