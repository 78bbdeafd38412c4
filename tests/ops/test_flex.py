"""FlexAttention reads our lists of blocks: together with their masks they are the pattern, and the answers agree.

Also for packed and padded rows; with masks of tiles as on a GPU, and at torch's limit of recompilations.
"""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from longspan import patterns
from longspan.ops import sparse
from longspan.ops.backends import backend
from longspan.ops.sparse import blockwise, flex, schedule, tiles

EXPRESSIONS = (
    "causal",
    "everywhere",
    "nowhere",
    "causal & band(150)",
    "band(9, right=140) - block(7)",
    "causal & (band(63) | globals(3) | random(2, seed=5))",
    "local1d(64, memory=32) & causal",
    "by_head(band(5), causal & random(3, block=64))",
    "by_head(band(5, right=2), causal)",
)
PLAIN = torch.device("cpu")
N = 391
# Lengths of packed sequences: borders at blocks' borders, within blocks, several in a block, one of all tokens.
LENGTHS = ([128, 128, 135], [100, 28, 5, 1, 3, 200, 54], [391], [1, 390])
WHICH = ("segments", "mask", "both")
# Said by torch where FlexAttention runs by its definition: all pairs, by the predicate alone.
pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning"),
]


def inputs(n=N, *, heads=2, groups=2, dim=16, values=5, dtype=torch.float64, batch=4):
    g = torch.Generator().manual_seed(n)
    shapes = ((heads, dim), (groups, dim), (groups, values))
    return [torch.randn(batch, h, n, d, generator=g, dtype=torch.float64).to(dtype) for h, d in shapes]


def packed(which="both"):
    """Ids (B,N) of ``LENGTHS``, and real tokens (B,N) with padding on the left, within and on the right."""
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    real = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    real[0, :130] = False
    real[1, 200:] = False
    real[2] = False
    return {
        "segments": ids if which in ("segments", "both") else None,
        "mask": real if which in ("mask", "both") else None,
    }


def seen(block, n, rows=1, heads=1):
    """What the kernels see: full blocks without a question, partial ones pair by pair; and the predicate alone."""
    found = []
    for count, index in ((block.kv_num_blocks, block.kv_indices), (block.full_kv_num_blocks, block.full_kv_indices)):
        assert count.is_contiguous()  # the kernels do not read their strides
        assert index.is_contiguous()
        listed = torch.arange(index.shape[-1]) < count[..., None]
        blocks = torch.zeros(index.shape, dtype=torch.bool).scatter(-1, index.long(), listed)
        found.append(blocks.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :n, :n])
    partial, full = found
    assert not (partial & full).any()
    at = torch.arange(n)
    by_pair = block.mask_mod(
        torch.arange(rows)[:, None, None, None], torch.arange(heads)[:, None, None], at[:, None], at
    )
    by_pair = by_pair.expand(rows, heads, n, n)
    return (full | (partial & by_pair)).expand_as(by_pair), by_pair


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(flex, "_compiled", flex._flex)


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("n", [1, 128, N])
def test_blocks_and_predicate_are_the_pattern(text, n):
    pattern = patterns.parse(text)
    heads = 2 if pattern.per_head else 1
    expected = pattern.dense(n, heads=heads, layer=1)[None]
    for found in seen(flex.block_mask(repr(pattern), n, heads, 1, PLAIN), n, heads=heads):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_range_of_distances_needs_no_masks():
    for text in ("causal", "everywhere", "band(200)", "causal & band(9, right=3)", "by_head(band(5), band(7))"):
        pairs = flex.blocks_of(text, 300, 2 if "head" in text else 1, 0, PLAIN)
        assert pairs.range is not None
        assert len(pairs.masks) == 2
    assert flex.blocks_of("dilated(2, stride=3)", 300, 1, 0, PLAIN).range is None


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_blocks_of_packed_rows_hold_what_the_pattern_allows(text, which):
    pattern, own = patterns.parse(text), packed(which)
    starts = flex.sequence_starts(own["mask"], own["segments"], torch.empty(len(LENGTHS), 2, N, 0))
    pairs = flex.blocks_of(repr(pattern), N, 2 if pattern.per_head else 1, 1, PLAIN)
    at = torch.arange(N) - starts
    alike = (starts[:, :, None] == starts[:, None]) & (starts >= 0)[:, None]
    expected = sparse.allowed_at(pattern, at, at, 2, 1) & alike[:, None]
    for found in seen(flex.packed_mask(pairs, starts), N, len(LENGTHS), 2):
        torch.testing.assert_close(found, expected.expand_as(found), rtol=0, atol=0)


def test_packed_rows_skip_blocks():
    starts = flex.sequence_starts(None, packed()["segments"], torch.empty(len(LENGTHS), 2, N, 0))
    block = flex.packed_mask(flex.blocks_of("causal", N, 1, 0, PLAIN), starts)
    # Three sequences of about 128 tokens: one block each, the last of 135 two more.
    assert block.kv_num_blocks[0, 0].tolist() == [1, 1, 1, 2]
    # One sequence: below the diagonal all pairs, except in the last block, which is not full of tokens.
    assert block.full_kv_num_blocks[2, 0].tolist() == [0, 1, 2, 0]
    assert block.kv_num_blocks[2, 0].tolist() == [1, 1, 1, 4]


@pytest.mark.parametrize("text", EXPRESSIONS)
@pytest.mark.parametrize("sizes", [{}, {"heads": 6, "groups": 2, "dim": 5, "values": 3}], ids=["plain", "odd"])
def test_its_definition_agrees_with_ours(text, sizes, uncompiled):
    q, k, v = inputs(141, dtype=torch.float32, batch=2, **sizes)
    pattern = patterns.parse(text)
    found, lse = flex.attend(q, k, v, repr(pattern), 1, 0.3)
    with backend("torch"):
        expected, sums = blockwise.attend(q, k, v, pattern, layer=1, scale=0.3)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(lse, sums, rtol=0, atol=2e-6)
    assert found.shape == expected.shape


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_packed_and_padded_rows_agree_with_separate_calls(text, which, uncompiled):
    q, k, v = inputs(groups=1)
    own = packed(which)
    if own["mask"] is not None:
        hidden = ~own["mask"][:, None, :, None]
        q, k, v = (x.masked_fill(hidden, float("nan")) for x in (q, k, v))
    pattern = patterns.parse(text)
    found, lse = flex.attend(q, k, v, repr(pattern), 1, 0.3, own["mask"], own["segments"])
    with backend("reference"):
        expected = sparse.attend(q, k, v, pattern, scale=0.3, layer=1, **own)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    empty = (expected == 0).all(-1)
    assert (lse.isneginf() == empty).all()


@pytest.mark.parametrize("queries", [N, 200])
def test_packed_rows_take_one_call(queries, uncompiled, monkeypatch):
    calls, call = [], flex._call
    monkeypatch.setattr(flex, "_call", lambda *a: calls.append(a) or call(*a))
    monkeypatch.setattr(flex, "why_not", lambda *a: "")
    q, k, v = inputs(groups=1)
    q, own, pattern = q[:, :, N - queries :], packed(), patterns.parse("by_head(band(5, right=2), causal)")
    with backend("flex"):
        found = sparse.attend(q, k, v, pattern, **own)
    assert len(calls) == 1
    with backend("reference"):
        expected = sparse.attend(q, k, v, pattern, **own)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "text", ["band(40) | globals(2)", "causal & strided(17)", "causal & (band(20) | random(2, seed=5))"]
)
def test_tiles_with_masks_on_the_device_agree(text, monkeypatch):
    """The hidden pairs of tiles, as kept on a GPU, give the values and gradients of the biases on a CPU."""
    plan, used = schedule.plan, []

    def placed(text, n, head, layer, classes_alone, device):
        length, parts = plan(text, n, head, layer, classes_alone)
        used.extend(parts)
        return length, tuple(schedule._moved(part, device) for part in parts)

    monkeypatch.setattr(blockwise, "placed", placed)
    monkeypatch.setattr(tiles, "_budget", lambda limits, x: max(2**26, x.numel()))
    operands = [x.requires_grad_() for x in inputs(150, batch=2)]
    # A cap, since without one a CPU takes a fused kernel in the forward pass.
    with backend("torch"):
        found = sparse.sparse_attention(*operands, text, softcap=5.0)
    with backend("reference"):
        expected = sparse.sparse_attention(*operands, text, softcap=5.0)
    assert any(part.mask is not None for part in used)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    ours, right = (torch.autograd.grad((o * weights).sum(), operands) for o in (found, expected))
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_one_kind_of_call_too_many_raises(monkeypatch):
    """At torch's limit of recompilations FlexAttention would fall back to a form of O(N^2) memory."""
    torch._dynamo.reset()
    compiled = torch.compile(flex._flex(), backend="eager", dynamic=False)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    monkeypatch.setattr(flex, "COMPILED", 2)
    with torch._dynamo.config.patch(recompile_limit=1):
        for n in (5, 6):
            flex.attend(*inputs(n, batch=1), "causal", 0, 1.0)
        with pytest.raises(RuntimeError, match=r"compiled for 2 kinds of calls .*q \(1, 2, 7, 16\)"):
            flex.attend(*inputs(7, batch=1), "causal", 0, 1.0)
        assert torch._dynamo.config.recompile_limit == 1
    torch._dynamo.reset()


@pytest.mark.inductor
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("plain_memory")
def test_its_kernels_agree_with_ours():
    compiled = torch.compile(flex_attention)
    for text in ("causal & (band(63) | globals(3))", "band(200) | random(2, seed=5)"):
        for n in (141, N):
            q, k, v = inputs(n, groups=1, values=16, dtype=torch.float32, batch=2)
            found = compiled(q, k, v, block_mask=flex.block_mask(text, n, 1, 0, PLAIN), enable_gqa=True)
            logits = (q @ k.mT / 4).masked_fill(~patterns.parse(text).dense(n)[0], -torch.inf)
            torch.testing.assert_close(found, logits.softmax(-1) @ v, rtol=0, atol=1e-5)
    # With dynamic sizes Inductor writes C++ for a CPU that does not compile.
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = inputs(values=16, dtype=torch.float32)
    ids = packed()["segments"]
    for text in ("causal & band(150)", "by_head(band(5), causal & random(3, block=64))"):
        pattern = patterns.parse(text)
        pairs = flex.blocks_of(text, N, 2 if pattern.per_head else 1, 0, PLAIN)
        found = compiled(q, k, v, block_mask=flex.packed_mask(pairs, flex.sequence_starts(None, ids, q)))
        with backend("reference"):
            expected = sparse.attend(q, k, v, pattern, segments=ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("which", ["none", *WHICH])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_on_a_gpu_it_is_taken_and_agrees_in_value_and_gradients(text, which, monkeypatch):
    calls, call = [], flex._call
    monkeypatch.setattr(flex, "_call", lambda *a: calls.append(a) or call(*a))
    own = packed(which)
    there = {name: None if x is None else x.cuda() for name, x in own.items()}
    plain = [x.requires_grad_() for x in inputs(groups=1)]
    on_gpu = [x.detach().float().cuda().requires_grad_() for x in plain]
    pattern = patterns.parse(text)
    found = sparse.attend(*on_gpu, pattern, layer=1, **there)
    assert len(calls) == 1
    with backend("reference"):
        expected = sparse.attend(*plain, pattern, layer=1, **own)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=1e-4)
    weights = torch.randn_like(expected)
    ours = torch.autograd.grad((found * weights.to(found)).sum(), on_gpu)
    right = torch.autograd.grad((expected * weights).sum(), plain)
    for one, other in zip(ours, right, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=0, atol=1e-3)


@pytest.mark.cuda
def test_on_a_gpu_packed_rows_wait_for_nothing():
    own = {name: x.cuda() for name, x in packed().items()}
    q, k, v = (x.cuda() for x in inputs(dtype=torch.float32))
    pattern = patterns.parse("causal & band(150)")
    for _ in range(2):
        # The first call compiles, and makes the tables of the pattern.
        sparse.attend(q, k, v, pattern, **own)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse.attend(q, k, v, pattern, **own)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_it_says_what_it_cannot():
    q, k, v = inputs(50, values=16, dtype=torch.float32)
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
