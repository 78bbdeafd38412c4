"""Attention under a pattern by tiles and classes of tokens equals the dense definition, in value and gradient."""

import random

import pytest
import torch

import longspan
from longspan import patterns
from longspan.ops import sparse
from longspan.ops.native.call import available
from longspan.ops.sparse import schedule

EXPRESSIONS = (
    "causal",
    "nowhere",
    "everywhere",
    "band(9)",
    "band(3, right=4)",
    "band(70) | globals(2)",
    "causal & (band(20) | strided(17))",
    "strided(16)",
    "causal & dilated(3, stride=20)",
    "causal - band(40)",
    "block(32) & causal",
    "local1d(32, memory=32) & causal",
    "random(3, seed=1)",
    "causal & (band(2) | random(2, block=32))",
    "causal & (fixed(32, summary=3) | block(32))",
    "by_head(band(3), strided(19) & causal)",
    "causal & (strided(17) | strided(23) | band(5))",
    "causal | prefix(11)",
    # One mask serves all rows of tiles only where their size moves the pattern onto itself.
    "causal & block(40)",
    "causal & local1d(40, memory=24)",
    "blockwise(40, 1)",
    "block(40)",
)
ATOMS = (
    *("causal", "band(3)", "band(40, right=2)", "block(8)", "block(32)", "strided(5)", "strided(18)", "globals(3)"),
    *("dilated(2, stride=17)", "random(2, seed=3)", "fixed(8, summary=2)", "prefix(9)", "by_head(band(1), band(30))"),
)


def drawn(count: int) -> list[str]:
    """Random expressions, the same in every run."""
    source = random.Random(7)

    def draw(depth: int) -> str:
        if not depth or source.random() < 0.3:
            return source.choice(ATOMS)
        return f"({draw(depth - 1)} {source.choice('&|-')} {draw(depth - 1)})"

    return [draw(3) for _ in range(count)]


def inputs(n: int, heads: int = 2, dim: int = 5, values: int = 3, groups: int = 0, batch: int = 2):
    g = torch.Generator().manual_seed(n)
    shapes = ((heads, dim), (groups or heads, dim), (groups or heads, values))
    return [torch.randn(batch, h, n, d, dtype=torch.float64, generator=g).requires_grad_() for h, d in shapes]


def agree(fast, slow, leaves, tolerance=1e-10):
    """Two outputs and the gradients of the same weighted sum of them."""
    torch.testing.assert_close(fast, slow, rtol=0, atol=tolerance)
    weights = torch.randn(slow.shape, dtype=slow.dtype, generator=torch.Generator().manual_seed(0))
    ours, right = (
        torch.autograd.grad((o * weights).sum(), leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
        for o in (fast, slow)
    )
    for a, b in zip(ours, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def hold(text: str, n: int, **sizes):
    q, k, v = inputs(n, **sizes)
    pattern = patterns.parse(text)
    wide = (k.repeat_interleave(2 // k.shape[1], 1), v.repeat_interleave(2 // k.shape[1], 1))
    agree(
        sparse.attend(q, k, v, pattern, layer=1),
        sparse.dense(q, *wide, pattern, sparse.Logits(5**-0.5, layer=1))[0],
        (q, k, v),
    )


@pytest.mark.parametrize("n", [1, 37, 131, 300])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_tiles_equal_the_dense_form(text, n):
    hold(text, n)


@pytest.mark.parametrize("part", range(8))
def test_tiles_equal_the_dense_form_for_random_expressions(part):
    for i, text in enumerate(drawn(240)[part::8]):
        hold(text, (29, 67, 150)[i % 3], batch=1)


def test_the_dense_form_is_a_softmax_over_the_allowed_keys():
    q, k, v = (x[0, 0].detach() for x in inputs(23))
    pattern = patterns.parse("causal - band(2)")
    found = sparse.dense(q[None, None], k[None, None], v[None, None], pattern, sparse.Logits(1.0))[0][0, 0]
    for i in range(23):
        seen = [j for j in range(23) if j <= i - 3]
        weights = [float((q[i] @ k[j]).exp()) for j in seen]
        right = sum(w * v[j] for w, j in zip(weights, seen, strict=True)) / sum(weights) if seen else 0 * v[i]
        torch.testing.assert_close(found[i], right, rtol=1e-12, atol=1e-12)


class Slope:
    """A score that depends on the query and on a parameter."""

    def __init__(self, rate):
        self.rate = rate

    def score(self, q_tile, i, j):
        return -self.rate * q_tile[..., :1].square() * (i[:, None] - j[None]).abs()


@pytest.mark.parametrize("text", ["band(9)", "causal & (band(3) | strided(17))", "by_head(band(3), causal)"])
def test_scores_and_their_gradients(text):
    q, k, v = inputs(67)
    rate = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    pattern = patterns.parse(text)
    slow = sparse.dense(q, k, v, pattern, sparse.Logits(5**-0.5, Slope(rate)))[0]
    agree(sparse.attend(q, k, v, pattern, bias=Slope(rate)), slow, (q, k, v, rate))


def test_a_tensor_of_scores_and_its_gradient():
    q, k, v = inputs(37)
    table = torch.randn(2, 37, 37, dtype=torch.float64, requires_grad=True)
    pattern = patterns.parse("band(9)")
    slow = sparse.dense(q, k, v, pattern, sparse.Logits(5**-0.5, table))[0]
    agree(longspan.sparse_attention(q, k, v, "band(9)", bias=table), slow, (q, k, v, table))
    mask = torch.ones(2, 37, dtype=torch.bool)
    agree(longspan.sparse_attention(q, k, v, "band(9)", bias=table, mask=mask), slow, (q, k, v, table))


def test_scale_is_that_of_scaled_dot_product_attention():
    q, k, v = inputs(37)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(longspan.sparse_attention(q, k, v, "causal"), right, rtol=0, atol=1e-12)
    right = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    torch.testing.assert_close(
        longspan.sparse_attention(q, k, v, patterns.causal(), scale=0.3), right, rtol=0, atol=1e-12
    )


def narrow(text: str, n: int, dtype: torch.dtype, way: str, **sizes) -> float:
    """The largest error of output and gradients in ``dtype``, as a multiple of its epsilon."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs(n, **sizes)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    with longspan.backend(way):
        out = sparse.attend(*leaves, patterns.parse(text), scale=0.4)
    wide = [x.repeat_interleave(exact[0].shape[1] // x.shape[1], 1) for x in exact]
    right = sparse.dense(*wide, patterns.parse(text), sparse.Logits(0.4))[0]
    assert out.dtype == dtype
    found, expected = (
        [o, *torch.autograd.grad(o.sum(), x, allow_unused=True, materialize_grads=True)]
        for o, x in ((out, leaves), (right, exact))
    )
    worst = max((a.double() - b).abs().max().item() for a, b in zip(found, expected, strict=True))
    return worst / torch.finfo(dtype).eps


@pytest.mark.parametrize("way", ["torch", "native"])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_float32_by_both_backends(text, way):
    if way == "native" and not available():
        pytest.skip("there are no kernels here")
    for n, sizes in ((1, {}), (67, {"dim": 37, "values": 64}), (150, {"heads": 4, "groups": 2, "batch": 1})):
        assert narrow(text, n, torch.float32, way, **sizes) < 100


@pytest.mark.parametrize(
    ("dtype", "way"), [(torch.bfloat16, "torch"), (torch.float16, "torch"), (torch.bfloat16, "native")]
)
def test_half_precision(dtype, way):
    if way == "native" and not available():
        pytest.skip("there are no kernels here")
    assert narrow("causal & (band(9) | strided(17))", 67, dtype, way) < 16


def test_kernels_take_any_strides_and_any_number_of_threads(threads):
    if not available():
        pytest.skip("there are no kernels here")
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 90, 3, 20, generator=g).transpose(1, 2) for _ in range(3))
    pattern, found = patterns.parse("band(40) | globals(3)"), []
    for count in (1, 2):
        threads(count)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with longspan.backend("native"):
            out = sparse.attend(*leaves, pattern)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    torch.testing.assert_close(found[0][0], sparse.attend(*(x.contiguous() for x in (q, k, v)), pattern))


@pytest.mark.parametrize("way", ["torch", "native"])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_values_get_a_gradient_exactly_where_the_pattern_is(text, way):
    if way == "native" and not available():
        pytest.skip("no native kernels here")
    n = 67
    q, k = (x.detach().float() for x in inputs(n)[:2])
    v = torch.eye(n).expand(2, 2, n, n).clone().requires_grad_()
    with longspan.backend(way):
        out = sparse.attend(q, k, v, patterns.parse(text))
    (grad,) = torch.autograd.grad(out, v, torch.eye(n).expand_as(out))
    allowed = patterns.parse(text).dense(n, heads=2).expand(2, 2, n, n)
    assert torch.equal(out != 0, allowed)
    assert torch.equal(grad.mT != 0, allowed)


@pytest.mark.parametrize("given", ["nothing", "bias", "mask"])
def test_compiled_without_a_break(given):
    q, k, v = inputs(67)
    options = {}
    # With a mask or a bias a compiler takes the value, not its spec.
    pattern = "band(9)" if given == "nothing" else patterns.band(9)
    if given == "bias":
        options["bias"] = torch.randn(2, 67, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if given == "mask":
        options["mask"] = torch.arange(67).expand(2, -1) < torch.tensor([[67], [50]])

    def call(q, k, v):
        return longspan.sparse_attention(q, k, v, pattern, **options)

    agree(torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v), call(q, k, v), (q, k, v))


def test_members_make_up_their_pattern():
    for text in (*EXPRESSIONS, *drawn(60)):
        pattern = patterns.parse(text).at(0, 0)
        union = torch.stack([m.dense(50)[0] for m in schedule.members(pattern)]).any(0)
        assert torch.equal(union, pattern.dense(50)[0]), text


def test_periods_and_steps_are_true():
    for text in (*EXPRESSIONS, *drawn(60)):
        pattern = patterns.parse(text).at(0, 0)
        dense, by = pattern.dense(200)[0], pattern.period
        if by:
            assert torch.equal(dense[: 200 - by, : 200 - by], dense[by:, by:]), text
        i, j = dense.nonzero(as_tuple=True)
        assert not ((i - j) % pattern.apart).any(), text


@pytest.mark.parametrize(
    "text", ["band(255)", "causal & (band(127) | strided(128))", "causal & (band(63) | globals(2))"]
)
def test_no_matrix_of_all_pairs(text, monkeypatch):
    """64k tokens in tiles of which the largest tensor is far from N x N."""
    monkeypatch.setattr(patterns.Pattern, "dense", None)
    n = 2**16
    _, parts = schedule.plan(text, n, 0, 0)
    held = sum(part.mask.numel() for part in parts if part.mask is not None)
    pairs = sum(p.keys.numel() * p.size**2 for p in parts if isinstance(p, schedule.Tiles))
    assert held <= n * 1024
    assert pairs <= n * 1024


def test_nothing_to_see_is_nothing_under_a_score():
    q, k, v = inputs(37)
    assert not sparse.attend(q, k, v, patterns.nowhere(), bias=Slope(1.0)).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key": torch.zeros(1, 2, 5, 4), "value": torch.zeros(1, 2, 5, 4)}, "at least as many keys as queries"),
        ({"key": torch.zeros(1, 2, 7, 5)}, r"key must be \(B,G,M,D\)"),
        ({"value": torch.zeros(1, 3, 7, 4)}, r"key must be \(B,G,M,D\)"),
        ({"query": torch.zeros(2, 7, 4)}, r"query must be \(B,H,N,D\)"),
        ({"mask": torch.zeros(1, 7)}, r"mask must be bool \(1, 7\)"),
        ({"pattern": "bond(3)"}, "unknown name 'bond'"),
        ({"bias": torch.zeros(7, 7)}, r"bias .* \(H\|1,N,N\)"),
    ],
)
def test_wrong_arguments(change, message):
    given = {name: torch.zeros(1, 2, 7, 4) for name in ("query", "key", "value")} | {"pattern": "causal"} | change
    with pytest.raises(ValueError, match=message):
        longspan.sparse_attention(**given)
