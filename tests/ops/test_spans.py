"""Linear attention span by span: memory, strides, compilation, and sequences that are read in both directions.

``test_span_laws.py`` compares causal spans with the definition.
"""

import itertools

import pytest
import torch
from torch import Tensor

from longspan import backend
from longspan.ops import buffers, linear
from longspan.ops.linear import features, workspace
from longspan.ops.linear.operands import LinearOperands

EPS = 1e-3  # large enough to be seen
D, E = 3, 5


def numbers(n: int, *, m: int | None = None, b: int = 2, h: int = 3, dtype=torch.float64, seed: int = 0):
    """q, k, v as a model has them, heads side by side per token, and a state, whose sums are positive."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, n, h, D), (b, m or n, h, D), (b, m or n, h, E)]
    q, k, v = (torch.randn(s, generator=generator, dtype=torch.float64).transpose(1, 2) for s in shapes)
    state = torch.rand(b, h, D, E + 1, generator=generator, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    return [x.to(dtype).detach().requires_grad_() for x in (q, k, v)] + [state.to(wide).requires_grad_()]


def definition(q, k, v, state=None, *, feature_map="elu", causal=True, mask=None, segments=None):
    """The token loop for causal attention; one weight per pair of tokens for the others."""
    phi = features.MAPS[feature_map]
    fq, fk = phi(q), phi(k)
    if causal:
        with backend("reference"):
            return linear.attend(fq, fk, v, causal=True, eps=EPS, mask=mask, segments=segments, state=state)
    allowed = torch.ones(len(q), 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if mask is not None:
        allowed = allowed & mask[:, None, None]
        fk = fk * mask[:, None, :, None]
    if segments is not None:
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None])
    sums = torch.cat([fk.mT @ v, fk.sum(-2)[..., None]], -1)
    return linear.matrix(fq, fk, allowed, eps=EPS) @ v, sums


def causal(q, k, v, state=None, *, feature_map="elu", chunk=7, mask=None, segments=None):
    return linear.causally.attend(LinearOperands(q, k, v, state, mask, segments, feature_map, EPS, chunk=chunk))


def bidirectional(q, k, v, *, feature_map="elu", mask=None, segments=None):
    return linear.bidirectional.attend(LinearOperands(q, k, v, None, mask, segments, feature_map, EPS, causal=False))


def gradients(outputs, inputs) -> tuple[Tensor, ...]:
    """Of a function of both outputs."""
    return torch.autograd.grad(outputs[0].sin().sum() + (outputs[1] / outputs[1].shape[-1]).cos().sum(), inputs)


def same(found, wanted, inputs, tolerance=1e-10):
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(gradients(found, inputs), gradients(wanted, inputs), atol=tolerance, rtol=tolerance)


def compiled(function):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


# Dynamo itself makes an instance of a traced autograd.Function, and torch warns of that.
traced = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


def half_masked(n: int) -> Tensor:
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(1)) < 0.6
    mask[1, : n // 3] = False
    return mask


def packed(n: int) -> Tensor:
    """One row of many lengths, one token among them, and a row that is one sequence."""
    cuts = torch.tensor([3, 4, 11, 30, 31, n // 2, n - 2])
    return torch.stack([(torch.arange(n)[:, None] >= cuts).sum(-1), torch.full((n,), 4)])


@pytest.fixture(params=["one group of rows", "row by row"])
def small(request, monkeypatch):
    """Spans of 21 tokens, with all rows of the batch together or each separately."""
    monkeypatch.setattr(linear.causally, "SPAN", 21)
    monkeypatch.setattr(linear.bidirectional, "SHORT", 5)
    tokens = 21 if request.param == "row by row" else 10_000
    monkeypatch.setattr(linear.causally, "BUDGET", tokens * 4 * 3 * (2 * D + 2 * E + 7))
    monkeypatch.setattr(linear.bidirectional, "BUDGET", 21 * 4 * 3 * 2 * (D + E))


class TestCausal:
    @pytest.mark.parametrize("n", [257, 1031, 2100])
    def test_true_sizes(self, n):
        inputs = numbers(n, b=1, h=2)
        same(causal(*inputs, chunk=linear.causally.CHUNK), definition(*inputs), inputs, 1e-8)

    def test_merging_heads_is_a_view(self, small):
        out, _ = causal(*numbers(50))
        assert out.transpose(1, 2).is_contiguous()

    def test_only_what_is_asked_for(self, small):
        """Gradients of some inputs, through one of the two outputs."""
        inputs = numbers(50)
        for which, part in itertools.product([(0, 3), (1,), (2,)], [0, 1]):
            given = [x if i in which else x.detach() for i, x in enumerate(inputs)]
            wanted = [inputs[i] for i in which]
            found, expected = (
                torch.autograd.grad(f(*given)[part].sin().sum(), wanted, allow_unused=True, materialize_grads=True)
                for f in (causal, definition)
            )
            torch.testing.assert_close(found, expected)

    def test_the_backward_pass_keeps_inputs_outputs_and_a_state_per_span(self):
        n, saved = 4 * linear.causally.SPAN, {}
        *inputs, state = numbers(n, b=1, h=1, dtype=torch.float32)

        def pack(x):
            saved[x.data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            causal(*inputs, state, chunk=linear.causally.CHUNK)
        assert sum(saved.values()) <= n * (2 * D + E) + n * E + n + 4 * D * (E + 1)

    def test_autocast_leaves_it_alone(self, small):
        inputs = [x.detach().float() for x in numbers(50)]
        expected = causal(*inputs)
        with torch.autocast("cpu", torch.bfloat16):
            found = causal(*inputs)
        assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("direction", [causal, bidirectional])
def test_only_inputs_and_outputs_of_half_precision_are_rounded(dtype, direction, small):
    """Against the same numbers in float64: half a unit in the last place for the rounding, and as much again."""
    inputs = numbers(50, dtype=dtype)[: 4 if direction is causal else 3]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found, wanted = direction(*inputs), definition(*exact, causal=direction is causal)
    assert (found[0].dtype, found[1].dtype) == (dtype, torch.float32)
    tolerance = torch.finfo(dtype).eps
    torch.testing.assert_close(found[0].double(), wanted[0], atol=tolerance / 10, rtol=tolerance)
    torch.testing.assert_close(found[1].double(), wanted[1], atol=1e-5, rtol=1e-5)
    changes, expected = (
        torch.autograd.grad(y, x, list(map(torch.ones_like, y))) for y, x in ((found, inputs), (wanted, exact))
    )
    for change, x, right in zip(changes, inputs, expected, strict=True):
        assert change.dtype is x.dtype
        # The gradient through the denominator is computed from the rounded output.
        torch.testing.assert_close(change.double(), right, atol=8 * tolerance, rtol=8 * tolerance)


class TestBidirectional:
    @pytest.mark.parametrize("m", [2, 21, 43, 50])
    @pytest.mark.parametrize("masked", [False, True])
    def test_equals_the_definition(self, m, masked, small):
        inputs = numbers(50, m=m)[:3]
        mask = half_masked(m) if masked else None
        found, wanted = bidirectional(*inputs, mask=mask), definition(*inputs, causal=False, mask=mask)
        same(found, wanted, inputs)

    def test_packed_sequences(self, small):
        inputs = numbers(50)[:3]
        for arguments in ({"segments": packed(50)}, {"segments": packed(50), "mask": half_masked(50)}):
            same(bidirectional(*inputs, **arguments), definition(*inputs, causal=False, **arguments), inputs)

    @pytest.mark.parametrize("feature_map", features.MAPS)
    @pytest.mark.parametrize("n", [31, 701])
    def test_every_map(self, feature_map, n):
        inputs = numbers(n)[:3]
        wanted = definition(*inputs, feature_map=feature_map, causal=False)
        same(bidirectional(*inputs, feature_map=feature_map), wanted, inputs, 1e-8)

    def test_masked_numbers_are_not_read(self, small):
        mask, inputs = half_masked(50), numbers(50)[:3]
        hidden = ~mask[:, None, :, None]
        poisoned = [inputs[0].detach(), *(x.detach().masked_fill(hidden, float("nan")) for x in inputs[1:])]
        poisoned = [x.requires_grad_() for x in poisoned]
        found, wanted = bidirectional(*poisoned, mask=mask), bidirectional(*inputs, mask=mask)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(gradients(found, poisoned), gradients(wanted, inputs))

    @pytest.mark.parametrize(("n", "m"), [(0, 50), (50, 0), (0, 0)])
    def test_nothing_to_read(self, n, m, small):
        q, k, v = numbers(0)[:3] if n == 0 else numbers(n)[:3]
        k, v = (numbers(50)[1:3] if m else numbers(0)[1:3]) if n != m else (k, v)
        out, sums = bidirectional(q, k, v)
        assert out.shape == (2, 3, n, E)
        assert sums.shape == (2, 3, D, E + 1)
        assert m or not out.any()

    def test_derivatives(self, small):
        inputs = [x.detach()[:1, :1].requires_grad_() for x in numbers(8, m=6)[:3]]
        mask = torch.arange(6)[None] != 2
        for options in ({}, {"mask": mask}):
            call = lambda *x, options=options: bidirectional(*x, **options)  # noqa: E731
            assert torch.autograd.gradcheck(call, inputs)
            assert torch.autograd.gradgradcheck(call, inputs)

    def test_the_backward_pass_keeps_inputs_outputs_and_sums(self):
        n, saved = 1000, []
        inputs = numbers(n, b=1, h=1, dtype=torch.float32)[:3]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
            bidirectional(*inputs)
        assert sum(saved) <= n * (2 * D + E) + n * E + n + D * (E + 1)

    @traced
    def test_compiles_as_one_graph(self, small):
        inputs, mask = numbers(50, m=31)[:3], half_masked(31)
        same(compiled(bidirectional)(*inputs, mask=mask), bidirectional(*inputs, mask=mask), inputs, 1e-12)


class TestMaps:
    X = torch.cat([torch.linspace(-40, 40, 1001, dtype=torch.float64), torch.tensor([0.0, -0.0, 30.0, 1e-30, -1e-9])])

    @pytest.mark.parametrize("name", features.MAPS)
    def test_written_in_place_they_are_the_same(self, name):
        for x in (self.X, self.X.float()):
            out, spare = torch.empty_like(x), torch.empty_like(x)
            expected = features.MAPS[name](x)
            assert torch.equal(features.WRITERS[name](x, out, spare), expected)
            assert torch.equal(features.WRITERS[name](out.copy_(x), out, spare), expected)

    @pytest.mark.parametrize("name", features.MAPS)
    def test_slopes_are_derivatives(self, name):
        x = self.X.clone().requires_grad_()
        y = features.MAPS[name](x)
        (wanted,) = torch.autograd.grad(y.sum(), x)
        torch.testing.assert_close(features.SLOPES[name](x.detach(), y.detach().clone()), wanted, rtol=1e-14, atol=0)

    @pytest.mark.parametrize("name", features.MAPS)
    def test_a_hidden_key_has_no_slope(self, name):
        """Its feature is set to zero, whatever it is; so must its slope be."""
        x = torch.tensor([-1.0, 0.0, 2.0, 40.0, float("nan"), float("inf"), -float("inf")])
        assert not features.SLOPES[name](x, torch.zeros_like(x)).any()

    def test_elu_keeps_its_digits(self):
        """(e^x - 1) + 1 would not."""
        x = torch.linspace(-80, -1, 80)
        torch.testing.assert_close(features.elu(x).double(), x.double().exp(), rtol=1e-5, atol=0)


def test_buffers_of_one_name_share_memory_though_it_grew():
    make = buffers.Buffers(torch.zeros(1))
    first = make("a", 4)
    grown, small, other = make("a", 2, 8), make("a", 4), make("b", 4)
    assert small.data_ptr() == grown.data_ptr() != first.data_ptr()
    assert other.data_ptr() not in (grown.data_ptr(), first.data_ptr())


def test_spans_fit_the_budget_and_cover_every_row_and_token():
    for b, h, n, d in ((1, 8, 16384, 64), (64, 8, 512, 64), (3, 1, 100, 16), (2, 128, 300, 128), (7, 4, 131, 32)):
        q = torch.empty(1).expand(b, h, n, d)
        parts, cuts = linear.causally._plan(q, q, None, linear.causally.CHUNK)
        assert [i for part in parts for i in range(b)[part]] == list(range(b))
        assert [t for start, g, c in cuts for t in range(start, start + g * c)] == list(range(n))
        tokens, rows = max(g * c for _, g, c in cuts), max(len(range(b)[part]) for part in parts)
        size = 4 * rows * tokens * h * (4 * d + linear.causally.CHUNK)
        assert size <= workspace.BUDGET or (rows, tokens) == (1, linear.causally.CHUNK)
        assert tokens <= linear.causally.SPAN


@pytest.mark.cuda
class TestOnTheGPU:
    def test_both_directions(self):
        inputs = numbers(701, m=300)[:3]
        there = [x.detach().cuda().requires_grad_() for x in inputs]
        found, wanted = bidirectional(*there), definition(*inputs, causal=False)
        torch.testing.assert_close([x.cpu() for x in found], list(wanted), atol=1e-9, rtol=1e-9)
        found, wanted = gradients(found, there), gradients(wanted, inputs)
        torch.testing.assert_close([x.cpu() for x in found], list(wanted), atol=1e-9, rtol=1e-9)

    def test_without_borders_all_chunks_are_one_span(self):
        q = torch.empty(1, 2, 5000, 16, device="cuda")
        assert [g * c for _, g, c in linear.causally._plan(q, q, None, 64)[1]] == [4992, 8]
