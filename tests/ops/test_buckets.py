"""Attention inside buckets against loops: who sees whom and what rules are refused."""

import itertools
import re
import warnings

import pytest
import torch
from torch.func import jvp

from longspan import backend, ops
from longspan.ops import buckets
from longspan.ops.buckets import Rule, lists, windows
from longspan.ops.native.call import available
from support.tensors import data

BUCKETS, SCALE = 4, 0.7
ALIGNED = [
    Rule(chunk=5),
    Rule(chunk=3, lookback=2, alone=True),
    Rule(chunk=1, alone=True),
    Rule(alone=True),
    Rule(causal=False, chunk=5, alone=True),
    Rule(causal=False, chunk=3, lookback=0),
    Rule(causal=False),
]
WHOLE = [
    Rule(bool(causal), 4, lookback, 0, True, bool(cross), bool(wrap), bool(alone))
    for causal, lookback, cross, wrap, alone in itertools.product((0, 1), (0, 1, 2), (0, 1), (0, 1), (0, 1))
]
ALONE = [Rule(window=4), Rule(window=6, alone=True), Rule(window=1, alone=True)]


def drawn(rounds, n, seed=0):
    return torch.randint(0, BUCKETS, (2, 2, rounds, n), generator=torch.Generator().manual_seed(seed))


def by_loops(groups, rule, real):
    """How many rounds show j to i: groups (R,N) and which tokens exist (N,), of one head, -> (N,N)."""
    rounds, n = groups.shape
    shown = torch.zeros(n, n, dtype=torch.long)
    for r in range(rounds):
        g = groups[r].tolist()
        order = sorted((t for t in range(n) if real[t]), key=lambda t, g=g: (g[t], t))
        count = -(-len(order) // rule.chunk) if rule.chunk else 1
        for i, j in itertools.product(order, order):
            if rule.whole:
                ci, cj = order.index(i) // rule.chunk, order.index(j) // rule.chunk
                back = [(ci - s) % count if rule.wrap else ci - s for s in range(rule.lookback + 1)]
                seen = cj in back and (rule.cross or g[i] == g[j])
            else:
                own = [t for t in order if g[t] == g[i]]
                if g[i] != g[j]:
                    continue
                ri, rj = own.index(i), own.index(j)
                seen = 0 <= ri // rule.chunk - rj // rule.chunk <= rule.lookback if rule.chunk else True
                seen = seen and not (rule.window and ri - rj >= rule.window)
            seen = seen and (j <= i or not rule.causal) and (i != j or not rule.alone)
            shown[i, j] += seen
    for i in range(n):
        if rule.alone and real[i] and not shown[i].any():
            shown[i, i] = 1
    return shown


def dense(q, k, v, mask):
    logits = (q @ k.mT * SCALE).masked_fill(~mask, -torch.inf)
    blind = ~mask.any(-1, keepdim=True)
    p = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(~mask, 0.0)
    return p @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("n", [1, 2, 19])
@pytest.mark.parametrize("rule", [*ALIGNED, *WHOLE, *ALONE], ids=repr)
def test_the_mask_is_that_of_loops(rule, n):
    groups = drawn(1 if rule.window else 3, n)
    mask = None if rule.wrap else torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < 0.8
    seen, shown = buckets.multiplicity(groups, BUCKETS, rule, mask)
    real = torch.ones(2, n, dtype=torch.bool) if mask is None else mask
    for b, h in itertools.product(range(2), range(2)):
        expected = by_loops(groups[b, h], rule, real[b])
        assert torch.equal(shown[b, h][real[b]], expected[real[b]])
        assert torch.equal(seen, shown > 0)


@pytest.mark.parametrize(("tile", "held"), [(3, 500), (16, 2**19), (64, 2**19)])
@pytest.mark.parametrize(
    ("rule", "masked"),
    [*((rule, False) for rule in (*ALIGNED, *WHOLE, *ALONE)), *((rule, True) for rule in (*ALIGNED, *ALONE))],
    ids=repr,
)
def test_it_is_softmax_under_the_mask(rule, masked, tile, held, monkeypatch):
    """Outputs, log-sums and gradients, whatever the tiles and how many are worked off at once."""
    monkeypatch.setattr(windows, "TILE", tile)
    monkeypatch.setitem(windows.LOGITS, "cpu", held)
    # The kernels take tiles of at least 16 tokens.
    ways = [("torch", torch.float64)] if tile == 3 else [("native", torch.float32)] if available() else []
    n = 139 if tile > 3 else 41
    groups = drawn(1 if rule.window else 3, n, 1)
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(2)) < 0.8 if masked else None
    keep = (torch.ones(2, n, dtype=torch.bool) if mask is None else mask)[:, None].expand(-1, 2, -1)
    operands = [data(2, 2, n, width, seed=width + i) for i, width in enumerate((4, 4, 3))]
    upstream = data(2, 2, n, 3, seed=9) * keep[..., None]
    leaves = [t.clone().requires_grad_() for t in operands]
    o, lse = dense(*leaves, buckets.multiplicity(groups, BUCKETS, rule, mask)[0])
    expected = [o[keep], lse[keep].detach(), *torch.autograd.grad(o, leaves, upstream)]
    for way, dtype in (("reference", torch.float64), *ways):
        leaves = [t.to(dtype).requires_grad_() for t in operands]
        with backend(way):
            found, sums = buckets.attend(*leaves, groups, BUCKETS, rule, mask=mask, scale=SCALE)
            grads = torch.autograd.grad(found, leaves, upstream.to(dtype))
        # Single precision, and as many terms as a query has keys.
        rtol, atol = (1e-4, 1e-5) if dtype == torch.float32 else (1e-10, 1e-10)
        for one, right in zip((found[keep], sums[keep], *grads), expected, strict=True):
            torch.testing.assert_close(one.double(), right, rtol=rtol, atol=atol)


@pytest.mark.skipif(not available(), reason="there are no native kernels")
def test_kernels_that_cannot_serve_say_why():
    texts = {torch.float64: "float32 or bfloat16", torch.float32: "41 tokens .* 16"}
    for dtype, text in texts.items():
        # Twice as many are a tile of 64.
        n = 41 if dtype == torch.float32 else 82
        x = data(1, 1, n, 3).to(dtype)
        given = x, x, x, drawn(2, n)[:1, :1], BUCKETS, Rule(chunk=3)
        with backend("native"), pytest.raises(ValueError, match=f"'native' cannot serve this call of .*{text}"):
            buckets.attend(*given)
        with ops.watch() as seen:
            buckets.attend(*given)
        ((_, way, reason),) = seen
        assert way == "torch"
        assert re.search(text, reason)


def test_a_transform_takes_the_plain_form():
    q, k, v = (data(1, 1, 9, 3, seed=i) for i in range(3))
    groups = drawn(2, 9)[:1, :1]

    def call(q, k, v):
        return buckets.attend(q, k, v, groups, BUCKETS, Rule(chunk=3, alone=True))[0]

    with warnings.catch_warnings():
        # torch compiles some rules on first use, by what it calls deprecated itself.
        warnings.simplefilter("ignore")
        o, tangent = jvp(call, (q, k, v), (k, v, q))
    torch.testing.assert_close(o, call(q, k, v))
    ahead, behind = (call(q + s * k, k + s * v, v + s * q) for s in (1e-6, -1e-6))
    torch.testing.assert_close(tangent, (ahead - behind) / 2e-6, rtol=1e-5, atol=1e-7)
    with backend("torch"), pytest.raises(ValueError, match="cannot serve this call of attention inside buckets"):
        jvp(call, (q, k, v), (k, v, q))


@pytest.mark.parametrize("n", [0, 1])
def test_hardly_any_tokens(n):
    q = data(2, 2, n, 3)
    o, lse = buckets.attend(q, q, q, drawn(2, n), BUCKETS, Rule(chunk=3))
    assert o.shape == (2, 2, n, 3)
    assert lse.shape == (2, 2, n)


@pytest.mark.parametrize(
    ("rule", "rounds", "text"),
    [
        (Rule(chunk=-1), 1, "chunk=-1, window=0 and lookback=1 must not be negative"),
        (Rule(chunk=3, window=2), 1, "window="),
        (Rule(window=2), 2, "window="),
        (Rule(causal=False, window=2), 1, "window="),
        (Rule(whole=True), 1, "so chunk= must be at least 1"),
        (Rule(chunk=3, cross=True), 1, "cross=True and wrap=True"),
        (Rule(chunk=3, whole=True, wrap=True), 1, "so mask= must be None"),
    ],
)
def test_a_rule_that_contradicts_itself_is_refused(rule, rounds, text):
    mask = torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(ValueError, match=text):
        buckets.attend(*[data(2, 2, 5, 3)] * 3, drawn(rounds, 5), BUCKETS, rule, mask=mask)


def test_more_buckets_than_can_be_told_apart_are_refused():
    with pytest.raises(ValueError, match="1000000000 buckets of up to 8 chunks are too many"):
        buckets.attend(*[data(2, 2, 5, 3)] * 3, drawn(1, 5), 10**9, Rule(chunk=2))


class TestLists:
    def test_members_are_the_best_by_position(self):
        scores = torch.tensor([[[[0.1, 3.0, 2.0, 5.0], [4.0, 1.0, 2.0, 3.0]]]])
        assert lists.members(scores, 2).tolist() == [[[[1, 3], [0, 3]]]]
        assert lists.members(scores, 9).tolist() == [[[[0, 1, 2, 3]] * 2]]

    @pytest.mark.parametrize("causal", [True, False])
    def test_it_is_the_mean_of_dense_lists(self, causal):
        q, k, v = (data(2, 2, 17, width, seed=width + i).requires_grad_() for i, width in enumerate((4, 4, 3)))
        queries, keys = (lists.members(data(2, 2, 3, 17, seed=seed), 6) for seed in (5, 6))
        keys = queries if causal else keys
        o = lists.attend(q, k, v, queries, keys, causal=causal)
        p, seen = lists.matrix(q, k, queries, keys, causal=causal)
        upstream = data(*o.shape, seed=8)
        torch.testing.assert_close(o, p @ v, rtol=1e-10, atol=1e-10)
        found, expected = (torch.autograd.grad(y, (q, k, v), upstream, retain_graph=True) for y in (o, p @ v))
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        assert torch.equal(p > 0, seen)
        # Three lists of six: some tokens are in none, some in several.
        listed = torch.zeros(2, 2, 17).scatter_add(2, queries.flatten(2), torch.ones(2, 2, 18))
        assert {0.0, 1.0, 2.0} <= set(listed.flatten().tolist())
        assert not o[listed == 0].any()
        torch.testing.assert_close(p.sum(-1), (listed > 0).double())
