"""FlexAttention reads our lists of blocks: together with their masks they are the pattern, and the answers agree."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from longspan import patterns
from longspan.ops import sparse
from longspan.ops.backends import backend
from longspan.ops.sparse import blockwise, flex

EXPRESSIONS = (
    "causal",
    "everywhere",
    "nowhere",
    "band(200)",
    "band(9, right=140) - block(7)",
    "causal & (band(63) | globals(3) | random(2, seed=5))",
    "local1d(64, memory=32) & causal",
    "by_head(band(5), causal & random(3, block=64))",
)
PLAIN = torch.device("cpu")


def inputs(n, *, heads=2, groups=2, dim=16, values=16, dtype=torch.float32, device="cpu"):
    g = torch.Generator().manual_seed(n)
    shapes = ((heads, dim), (groups, dim), (groups, values))
    return [torch.randn(2, h, n, d, generator=g, dtype=torch.float64).to(device, dtype) for h, d in shapes]


def spread(count, index):
    """Lists of blocks (B,H,nb) and (B,H,nb,nb) -> bool (B,H,nb,nb)."""
    listed = torch.arange(index.shape[-1]) < count[..., None]
    return torch.zeros(index.shape, dtype=torch.bool).scatter(-1, index.long(), listed)


def seen(mask, n):
    """What the kernels see: full blocks without a question, partial ones pair by pair; and the predicate alone."""
    blocks = spread(mask.kv_num_blocks, mask.kv_indices)
    full = spread(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (blocks & full).any()
    rows, heads = blocks.shape[:2]
    b, h, at = torch.arange(rows)[:, None, None, None], torch.arange(heads)[:, None, None], torch.arange(n)
    by_pair = mask.mask_mod(b, h, at[:, None], at[None]).expand(rows, heads, n, n)
    wide = [x.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :n, :n] for x in (blocks, full)]
    return wide[1] | (wide[0] & by_pair), by_pair


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("n", [1, 100, 128, 391])
def test_blocks_and_predicate_are_the_pattern(text, n):
    pattern = patterns.parse(text)
    found, by_pair = seen(flex.block_mask(repr(pattern), n, 2 if pattern.per_head else 1, 1, PLAIN), n)
    expected = pattern.dense(n, heads=2, layer=1)[None]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(by_pair, expected, rtol=0, atol=0)


def test_a_range_of_distances_needs_no_masks():
    for text in ("causal", "everywhere", "band(200)", "causal & band(9, right=3)", "by_head(band(5), band(7))"):
        pairs = flex.blocks_of(text, 300, 2 if "head" in text else 1, 0, PLAIN)
        assert pairs.range is not None
        assert len(pairs.masks) == 2
    assert flex.blocks_of("dilated(2, stride=3)", 300, 1, 0, PLAIN).range is None


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("sizes", [{}, {"heads": 6, "groups": 2, "dim": 5, "values": 3}], ids=["plain", "odd"])
def test_its_definition_agrees_with_ours(text, sizes, monkeypatch):
    # Without compilation it computes all pairs, by the predicate alone.
    monkeypatch.setattr(flex, "_compiled", flex._flex)
    q, k, v = inputs(141, **sizes)
    pattern = patterns.parse(text)
    found, lse = flex.attend(q, k, v, repr(pattern), 1, 0.3)
    with backend("torch"):
        expected, sums = blockwise.attend(q, k, v, pattern, layer=1, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, sums, rtol=0, atol=2e-6)
    assert found.shape == expected.shape


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore")
def test_its_kernels_agree_with_ours(monkeypatch):
    # Inductor cannot place the writes that spoil fresh memory in tests.
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, getattr(place, name).__wrapped__)
    compiled = torch.compile(flex_attention)
    for text in ("causal & (band(63) | globals(3))", "band(200) | random(2, seed=5)"):
        for n in (141, 391):
            q, k, v = inputs(n, heads=2, groups=1)
            found = compiled(q, k, v, block_mask=flex.block_mask(text, n, 1, 0, PLAIN), enable_gqa=True)
            logits = (q @ k.mT / 4).masked_fill(~patterns.parse(text).dense(n)[0], -torch.inf)
            expected = logits.softmax(-1) @ v
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_on_a_gpu_it_is_taken_and_agrees_in_value_and_gradients(text, monkeypatch):
    calls = []
    call = flex._call
    monkeypatch.setattr(flex, "_call", lambda *a: calls.append(a) or call(*a))
    operands = inputs(391, groups=1)
    there = [x.cuda().requires_grad_() for x in operands]
    found = sparse.sparse_attention(*there, text)
    assert calls
    plain = [x.double().requires_grad_() for x in operands]
    expected = sparse.sparse_attention(*plain, text)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=1e-4)
    weights = inputs(391, values=16)[0].double()
    ours = torch.autograd.grad((found * weights.to(found)).sum(), there)
    right = torch.autograd.grad((expected * weights).sum(), plain)
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=1e-3)


def test_it_says_what_it_cannot():
    q, k, v = inputs(50)
    with (
        backend("flex"),
        pytest.raises(ValueError, match="'flex' cannot serve .* under a pattern: .*cpu"),
    ):
        sparse.sparse_attention(q, k, v, "band(3)")
    if torch.cuda.is_available():
        q, k, v = (x.cuda() for x in (q, k, v))
        with backend("flex"):
            with pytest.raises(ValueError, match="classes of tokens"):
                sparse.sparse_attention(q, k, v, "causal & strided(17)")
            with pytest.raises(ValueError, match="float32, bfloat16 and float16, not torch.float64"):
                sparse.sparse_attention(q.double(), k.double(), v.double(), "band(3)")
