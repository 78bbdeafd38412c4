"""Attention under a pattern where queries are the last of the tokens and with capped scores: as it is defined."""

import pytest
import torch

import longspan
from longspan import patterns
from longspan.ops import sparse
from longspan.ops.backends import backend
from longspan.ops.native.call import available
from longspan.ops.sparse import blockwise, sums
from longspan.testing.pairs import all_pairs

# Windows, blocks of other sizes, far tokens that become classes, heads that differ, rows that see nothing.
PATTERNS = (
    "causal",
    "causal & band(40)",
    "band(30)",
    "causal & block(48)",
    "causal & (band(9) | globals(4))",
    "causal & dilated(3, stride=17)",
    "causal - band(40)",
    "strided(20)",
    "random(2)",
)
WAYS = ["torch", pytest.param("native", marks=pytest.mark.skipif(not available(), reason="no kernels here"))]


def operands(n, m, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(n + m)
    shapes = (2, 4, n, 24), (2, 2, m, 24), (2, 2, m, 19)
    return [(scale * torch.randn(s, generator=generator, dtype=dtype)).requires_grad_() for s in shapes]


def definition(q, k, v, pattern, cap, mask=None):
    """By the dense matrix of the last rows: output, log-sums."""
    n, m = q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = q @ k.mT * q.shape[-1] ** -0.5
    if cap:
        logits = cap * torch.tanh(logits / cap)
    allowed = patterns.parse(pattern).dense(m, heads=q.shape[1])[..., m - n :, :]
    logits = logits.masked_fill(~allowed, -torch.inf)
    lse = logits.logsumexp(-1)
    p = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return p @ v, lse


def close(found, right, within):
    for a, b in zip(found, right, strict=True):
        a, b = a.detach().double(), b.detach().double()
        assert float((a - b).abs().max()) < within * max(1.0, float(b.abs().max()))


def gradients(results, leaves):
    """Gradients of a sum in which every row and every log-sum has a separate weight."""
    total = sum(
        (x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).nan_to_num(0, 0, 0).sum() for x in results
    )
    return torch.autograd.grad(total, leaves)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "row",
    all_pairs(pattern=PATTERNS, sizes=((1, 200), (37, 200), (64, 192), (130, 131), (90, 90)), cap=(1.5, 0.0)),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_output_and_gradients_are_those_of_the_definition(row, way):
    pattern, (n, m), cap = row.values()  # queries, tokens
    exact = operands(n, m)
    right = definition(*exact, pattern, cap)
    dtype, within = (torch.float32, 2e-5) if way == "native" else (torch.float64, 1e-10)
    leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
    with backend(way):
        out = sparse.attend(*leaves, patterns.parse(pattern), softcap=cap)
        lse = blockwise.attend(*leaves, pattern, layer=0, scale=24**-0.5, softcap=cap)[1]
    found = gradients([out], leaves)
    close([out], right[:1], within)
    seen = right[1] > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    close([lse[seen]], [right[1][seen]], within)
    close(found, gradients(right[:1], exact), within)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("pattern", ["causal & band(40)", "causal & dilated(3, stride=17)"])
def test_log_sums_have_gradients(pattern, cap, way):
    exact = operands(37, 200)
    right = gradients(definition(*exact, pattern, cap), exact)
    dtype, within = (torch.float32, 2e-5) if way == "native" else (torch.float64, 1e-10)
    leaves = [x.detach().to(dtype).requires_grad_() for x in exact]
    with backend(way):
        found = gradients(sums.attend(*leaves, patterns.parse(pattern), scale=24**-0.5, softcap=cap), leaves)
    close(found, right, within)


@pytest.mark.skipif(not available(), reason="no kernels here")
def test_half_precision_is_as_near_as_its_inputs_allow():
    q, k, v = operands(37, 200, torch.bfloat16)
    with backend("native"), torch.no_grad():
        out = longspan.sparse_attention(q, k, v, "causal", softcap=1.5)
    right = definition(*(x.detach().double() for x in (q, k, v)), "causal", 1.5)[0]
    close([out], [right], 1e-2)


@pytest.mark.parametrize("cap", [1e-2, 50.0])
@pytest.mark.skipif(not available(), reason="no kernels here")
def test_caps_far_below_and_above_the_scores(cap):
    exact = operands(60, 60, scale=6.0)
    leaves = [x.detach().float().requires_grad_() for x in exact]
    with backend("native"):
        out = longspan.sparse_attention(*leaves, "causal", softcap=cap)
    right = definition(*exact, "causal", cap)[:1]
    close([out], right, 2e-5)
    close(gradients([out], leaves), gradients(right, exact), 5e-5)


@pytest.mark.parametrize("packed", ["mask", "bias", "segments"])
def test_a_cap_with_padding_a_bias_and_packed_rows(packed):
    q, k, v = operands(60, 60)
    at = torch.arange(60)
    mask = at >= torch.tensor([[5], [0]])
    segments = (at >= 23).long().expand(2, -1)
    bias = torch.linspace(-1, 1, 3600, dtype=torch.float64).view(1, 60, 60)
    pattern = patterns.parse("causal & band(9)")
    given = {"mask": {"mask": mask}, "bias": {"bias": bias}, "segments": {"segments": segments}}[packed]
    out = sparse.attend(q, k, v, pattern, softcap=1.5, **given)
    logits = 1.5 * torch.tanh(q @ k.repeat_interleave(2, 1).mT * 24**-0.5 / 1.5)
    allowed = pattern.dense(60)[0].expand(2, 1, -1, -1)
    if packed == "bias":
        logits = logits + bias
    if packed == "mask":
        allowed = allowed & mask[:, None, None]
    if packed == "segments":
        allowed = allowed & (segments[:, None, :, None] == segments[:, None, None])
    p = logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)
    right = p @ v.repeat_interleave(2, 1)
    if packed == "mask":
        right = right.masked_fill(~mask[:, None, :, None], 0.0)
    close([out], [right], 1e-10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"softcap": 0.0}, "softcap=0.0 must be positive and finite"),
        ({"softcap": -1.0}, "softcap=-1.0 must be positive"),
        ({"softcap": float("inf")}, "softcap=inf must be positive and finite"),
        ({"mask": torch.ones(2, 10, dtype=torch.bool)}, "as many keys as queries with a mask or a bias"),
        (
            {"bias": torch.zeros(1, 10, 20, dtype=torch.float64)},
            "as many keys as queries with a mask or a bias|bias must",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        longspan.sparse_attention(*operands(10, 20), "causal", **given)


def test_more_queries_than_keys_are_refused():
    with pytest.raises(ValueError, match="at least as many keys as queries"):
        longspan.sparse_attention(*operands(20, 10), "causal")


def test_compiled_without_a_break():
    q, k, v = (x.detach().float() for x in operands(37, 200))

    def call(q, k, v):
        return longspan.sparse_attention(q, k, v, "causal & band(40)", softcap=1.5)

    close([torch.compile(call, backend="eager", fullgraph=True)(q, k, v)], [call(q, k, v)], 1e-6)
