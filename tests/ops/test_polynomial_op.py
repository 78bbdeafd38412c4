"""Polynomial attention is exact: it equals the quadratic form, span by span, in bounded memory."""

import pytest
import torch

import longspan
from longspan.ops.backends import backend
from longspan.ops.linear import polynomial, products
from longspan.ops.native.call import available
from support.tensors import data


def pair(constant, **place):
    """The mechanism and the quadratic kernel that it equals, with the same weights."""
    torch.manual_seed(0)
    module = longspan.build(f"polynomial(constant={constant}, eps=0.0)", 8, 2, **place).double()
    kernel = longspan.build(f"kernel(similarity='polynomial', constant={constant})", 8, 2, **place).double()
    kernel.load_state_dict(module.state_dict())
    return module, kernel


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


def test_features_exist_for_one_span_at_a_time(monkeypatch):
    lengths, kept = [], []

    def watched(rows, pairs, scales, original=products.features):
        lengths.append(rows.shape[-1])
        return original(rows, pairs, scales)

    monkeypatch.setattr(products, "features", watched)
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
    def span(dim):
        return polynomial._span(
            torch.zeros(1, dim), torch.zeros(1, dim + 1), polynomial.polynomial(dim, 1.0, False, 0.0)
        )

    assert [span(dim) for dim in (1, 16, 64)] == [64, 162, 256]


def test_a_backend_that_does_not_serve_it_is_refused():
    with backend("flex"), pytest.raises(ValueError, match="backend 'flex'.* does not serve polynomial attention"):
        pair(0.5)[0](data(2, N, 8))


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


@pytest.mark.skipif(not available(products.UNIT), reason="no native kernels here")
@pytest.mark.parametrize(
    ("make", "dim", "options", "values", "n"),
    [
        ("power", 5, (2,), 3, 9),
        ("power", 64, (2,), 65, 131),
        ("power", 7, (4,), 16, 300),
        ("polynomial", 16, (0.7, False), 33, 64),
        ("polynomial", 9, (1.0, True), 17, 70),
    ],
)
def test_kernels_are_the_composed_form(make, dim, options, values, n, monkeypatch):
    """In values and gradients, and one token in one pass, with and without decays; for any number of threads."""
    kernel = getattr(polynomial, make)(dim, *options, 0.0)
    q, k, v, sums = (
        data(2, 3, n, dim),
        data(2, 3, n, dim, seed=1),
        data(2, 3, n, values),
        data(2, 3, kernel.size, values),
    )
    right = products.Products(kernel.rows(q), kernel.rows(k), v, sums, *kernel.tables(q))
    right = right._replace(q=right.q.contiguous(), k=right.k.contiguous())
    leaves = [t.requires_grad_() for t in right[:4]]
    wide = list(products.composed(right))
    ups = [data(*t.shape, seed=7) for t in wide]
    wide += torch.autograd.grad(wide, leaves, ups)
    narrow = products.Products(*(t.detach().float() if t.is_floating_point() else t for t in right))
    for count in (1, 3):
        monkeypatch.setattr(products, "threads", lambda count=count: count)
        given = [t.requires_grad_() for t in narrow[:4]]
        found = list(products.native(narrow))
        found += torch.autograd.grad(found, given, [t.float() for t in ups])
        for ours, theirs in zip(found, wide, strict=True):
            size = theirs.abs().max().item()
            torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=3e-6 * max(1.0, size))
    with torch.no_grad():
        one = narrow._replace(q=narrow.q[..., :1], k=narrow.k[..., :1], v=narrow.v[:, :, :1])
        for left in (None, torch.rand(2, 3, 1)):
            o, after = products.step(one, left, False)
            kept = sums if left is None else sums * left[..., None].double()
            now = (
                kept
                + products.composed(products.Products(*(t.double() if t.is_floating_point() else t for t in one)))[1]
            )
            torch.testing.assert_close(after.double(), now, rtol=1e-5, atol=1e-5)
            expected = kernel.features(q[:, :, :1]) @ now
            torch.testing.assert_close(o.double(), expected, rtol=0, atol=3e-6 * max(1.0, expected.abs().max().item()))
