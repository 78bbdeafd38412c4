"""Polynomial attention is exact: it equals the quadratic form, span by span, in bounded memory."""

import pytest
import torch

import longspan
from longspan.ops.backends import backend
from longspan.ops.linear import polynomial
from support.tensors import data


def pair(constant, **place):
    """The mechanism and the quadratic kernel that it equals, with the same weights."""
    torch.manual_seed(0)
    module = longspan.build(f"polynomial(constant={constant}, eps=0.0)", 8, 2, **place).double()
    kernel = longspan.build(f"kernel(similarity='polynomial', constant={constant})", 8, 2, **place).double()
    kernel.load_state_dict(module.state_dict())
    return module, kernel


def test_by_hand():
    """One channel, c = 1: the second token weighs keys 1 and 2 by (2 * 1 + 1)^2 = 9 and (2 * 2 + 1)^2 = 25."""
    for taylor, expected in ((False, (9 + 2 * 25) / (9 + 25)), (True, (5 + 2 * 13) / (5 + 13))):  # 1 + 2 + 2, 1 + 4 + 8
        module = longspan.build(f"polynomial(taylor={taylor}, eps=0.0)", 1, 1).double()
        for part in (module.query, module.key, module.value, module.out):
            torch.nn.init.ones_(part.weight)
            torch.nn.init.zeros_(part.bias)
        found = module(torch.tensor([[[1.0], [2.0]]]).double())[0]
        torch.testing.assert_close(found[0, :, 0], torch.tensor([1.0, expected]).double())


# Several spans of 64 tokens, as heads are small, with borders and padding inside and across them.
N = 211
MASK = torch.rand(2, N, generator=torch.Generator().manual_seed(3)) < 0.8
SEGMENTS = torch.tensor([[0] * 64 + [1] * 30 + [2] * 100 + [7] * 17, [0] * N])


@pytest.mark.parametrize("constant", [0.0, 1.0, 0.3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("names", ["", "mask", "segments", "mask segments", "context"])
def test_it_equals_the_quadratic_form(constant, causal, names):
    known = {"mask": MASK, "segments": SEGMENTS, "context": data(2, 150, 8, seed=2)}
    arguments = {name: known[name] for name in names.split()}
    module, kernel = pair(constant, causal=causal)
    x = data(2, N, 8)
    torch.testing.assert_close(module(x, **arguments)[0], kernel(x, **arguments)[0], rtol=1e-10, atol=1e-10)


def test_the_taylor_form_is_the_exponential_to_second_order():
    torch.manual_seed(0)
    module = longspan.build("polynomial(taylor=True, channels=3, eps=0.0)", 8, 2).double()
    x = data(2, N, 8)
    q, k, v = (p(x).unflatten(-1, (2, -1)).transpose(1, 2) for p in (module.query, module.key, module.value))
    s = q @ k.mT * 3**-0.5
    weights = (1 + s + s**2 / 2).tril()
    expected = module.out((weights / weights.sum(-1, keepdim=True) @ v).transpose(1, 2).flatten(-2))
    torch.testing.assert_close(module(x)[0], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_across_spans_are_those_of_the_quadratic_form(causal):
    module, kernel = pair(1.0, causal=causal)
    x, found = data(2, N, 8).requires_grad_(), []
    for part in (module, kernel):
        y = part(x, mask=MASK, segments=SEGMENTS)[0]
        found.append(torch.autograd.grad((y * data(2, N, 8, seed=5)).sum(), [x, *part.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_features_exist_for_one_span_at_a_time(monkeypatch):
    lengths, kept = [], []

    def watched(x, constant, taylor, original=polynomial.features):
        lengths.append(x.shape[-2])
        return original(x, constant, taylor)

    monkeypatch.setattr(polynomial, "features", watched)
    module, x = pair(1.0)[0], data(1, 1000, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        y = module(x)[0]
    forward = len(lengths)
    y.sum().backward()
    assert max(lengths) == 64
    # The backward pass makes them again: none was kept, since only they have 15 columns and as many rows as a span.
    assert len(lengths) == 2 * forward
    assert not [shape for shape in kept if shape[-1] == 15]


def test_spans_have_limits():
    values = torch.zeros(1, 1, 1, 65)
    kernel = polynomial.Kernel(1.0, False, 0.0)
    spans = [polynomial._span(torch.zeros(1, dim), values[..., : dim + 1], kernel) for dim in (1, 16, 64)]
    assert spans == [64, 162, 512]


def test_the_reference_is_the_same():
    module, x = pair(0.5)[0], data(2, N, 8)
    with backend("reference"):
        expected = module(x, segments=SEGMENTS, mask=MASK)[0]
    torch.testing.assert_close(module(x, segments=SEGMENTS, mask=MASK)[0], expected, rtol=1e-10, atol=1e-10)
    with backend("flex"), pytest.raises(ValueError, match="backend 'flex'.* does not serve polynomial attention"):
        module(x)


def test_a_state_is_overwritten_only_when_it_is_given_away():
    module, x = pair(1.0)[0], data(2, 7, 8)
    with torch.no_grad():
        _, state = module(x, module.init_state(2))
        before = state.sums.clone()
        _, after = module(x[:, :1], state)
        assert torch.equal(state.sums, before)
        _, given = module(x[:, :1], state, donate=True)
    assert given.sums.data_ptr() == state.sums.data_ptr()
    assert torch.equal(given.sums, after.sums)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("polynomial(constant=-1.0)", "constant=-1.0 must not be negative"),
        ("polynomial(taylor=True, constant=2.0)", "constant=2.0 .*taylor=False"),
        ("polynomial(channels=-1)", "channels=-1 must be positive, or 0"),
        ("polynomial(eps=-1.0)", "eps=-1.0 is added to the denominator and must not be negative"),
    ],
)
def test_bad_specs_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        longspan.build(spec, 8, 2)
