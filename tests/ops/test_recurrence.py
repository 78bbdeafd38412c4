"""The recurrence: chunks, spans, segments and derivatives against the loop that defines it."""

from itertools import pairwise

import pytest
import torch

from longspan import backend, linear_attention
from longspan.ops.linear import recurrence
from longspan.ops.native.call import available
from longspan.ops.segments import cut
from ops.families import FAMILIES, cast


def numbers(n, seed=0, dtype=torch.float64, b=2, h=2, d=3, e=5):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, h, n, d), (b, h, n, d), (b, h, n, e), (b, h, d, e)]
    return [torch.randn(s, dtype=torch.float64, generator=generator).to(dtype).requires_grad_() for s in shapes]


SUM = FAMILIES["decay-none"]
SEGMENTS = torch.tensor([[0] * 7 + [2] * 11 + [5] * 11, [1] * 29])


@pytest.mark.skipif(not available(), reason="there are no native kernels here")
@pytest.mark.parametrize(("d", "e"), [(1, 1500), (1100, 65), (2, 2)])
def test_the_kernels_take_any_number_of_features(d, e):
    given = SUM.operands(70, (d, e), batch=1, repeats=1, dtype=torch.float32)
    found = SUM.outcome("native", given, scale=1.0)
    for name, right in SUM.outcome("reference", cast(given, torch.float64), scale=1.0).items():
        assert (found[name] - right).norm() <= 1e-6 * right.norm()


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1023, 1024, 1025, 1100, 4097])
def test_spans_cover_every_token_once(n):
    spans = cut(n, 64, 1024)
    covered = [t for start, groups, chunk in spans for t in range(start, start + groups * chunk)]
    assert covered == list(range(n))
    assert max(groups * chunk for _, groups, chunk in spans) <= 1024


@pytest.mark.parametrize("way", ["torch", "native"])
def test_backward_keeps_no_states_per_token(way):
    """What forward saves grows with N (D + E), not with N D E: inputs, and one state per span."""
    if way == "native" and not available():
        pytest.skip("there are no native kernels here")
    n, d, e, saved = 3072, 16, 16, []
    inputs = numbers(n, b=1, h=1, d=d, e=e, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t), backend(way):
        recurrence.scan(*inputs)
    assert sum(saved) <= n * (2 * d + e) + 7 * d * e


def test_total_is_the_sum_over_all_keys():
    q, k, v, _ = numbers(29)
    out, sums = recurrence.total(q, k, v)
    torch.testing.assert_close(sums, torch.einsum("bhnd,bhne->bhde", k, v))
    torch.testing.assert_close(out, torch.einsum("bhnd,bhde->bhne", q, sums))
    packed, _ = recurrence.total(q, k, v, SEGMENTS)
    same = (SEGMENTS[:, :, None] == SEGMENTS[:, None, :])[:, None]
    torch.testing.assert_close(packed, ((q @ k.mT) * same) @ v)


def test_a_forced_backend_that_cannot_serve_says_so():
    q, k, v, _ = numbers(5)
    with backend("flex"), pytest.raises(ValueError, match="backend 'flex' .* does not serve a running sum of outer"):
        linear_attention(q, k, v, feature_map=torch.exp)
    with backend("native"), pytest.raises(ValueError, match="a running sum of outer products: they take float32"):
        linear_attention(q, k, v, feature_map=torch.exp)


def test_an_unknown_backend_is_refused_and_the_choice_ends_with_the_block():
    from longspan import ops

    with pytest.raises(ValueError, match=r"unknown backend 'torhc' \(did you mean 'torch'\?\)"), backend("torhc"):
        pass
    with backend("reference"):
        assert ops.backends._backend == "reference"
    assert ops.backends._backend == "auto"


class TestLinearAttention:
    def test_a_callable_map(self):
        q, k, v, _ = numbers(29)
        torch.testing.assert_close(
            linear_attention(q, k, v, feature_map=torch.nn.functional.softplus),
            linear_attention(q.exp().log1p().log(), k.exp().log1p().log(), v, feature_map="exp"),
        )

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"query": torch.zeros(2, 5, 3)},
                r"^query .*torch.float32 \(2, 5, 3\)",
            ),
            ({"key": torch.zeros(2, 2, 5, 4)}, "do not fit"),
            ({"query": torch.zeros(2, 2, 4, 3)}, "4 queries and 5 keys"),
            (
                {"state": torch.zeros(2, 2, 3, 6), "feature_map": lambda x: torch.cat([x.exp(), (-x).exp()], -1)},
                r"= \(2, 2, 6, 6\), not torch.float32 \(2, 2, 3, 6\)",
            ),
            ({"state": torch.zeros(2, 2, 3, 6), "causal": False}, "state=.*causal=False"),
            ({"feature_map": "cos"}, "unknown feature map 'cos'"),
            ({"feature_map": torch.tanh}, "feature map 'tanh' .*-1"),
            ({"feature_map": 3}, "feature_map .*int"),
        ],
    )
    def test_bad_arguments(self, change, message):
        good = {"query": torch.zeros(2, 2, 5, 3), "key": torch.zeros(2, 2, 5, 3), "value": torch.zeros(2, 2, 5, 5)}
        with pytest.raises(ValueError, match=message):
            linear_attention(**(good | change))


CUTS = torch.tensor([0, 0, 5, 6, 29], dtype=torch.int32)


class TestOffsets:
    """``cu_seqlens``; the laws compare causal sequences with separate calls."""

    def test_bidirectional_sequences_equal_separate_calls(self):
        q, k, v, _ = numbers(29, b=1)
        o, states = linear_attention(q, k, v, causal=False, cu_seqlens=CUTS, return_state=True)
        parts = [[t[:, :, begin:end] for t in (q, k, v)] for begin, end in pairwise(CUTS.tolist())]
        apart = [linear_attention(*part, causal=False, return_state=True) for part in parts]
        torch.testing.assert_close((o, states), tuple(map(torch.cat, zip(*apart, strict=True), (2, 0))))

    def test_no_sequence(self):
        q = torch.zeros(1, 2, 0, 4)
        o, state = linear_attention(q, q, q, cu_seqlens=torch.tensor([0]), return_state=True)
        assert (o.shape, state.shape) == ((1, 2, 0, 4), (0, 2, 4, 5))
