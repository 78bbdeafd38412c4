"""Patterns as a GPU computes them: packed and padded rows under FlexAttention, masks of tiles, the recompile limit."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from longspan import patterns
from longspan.ops import sparse
from longspan.ops.backends import backend
from longspan.ops.sparse import blockwise, flex, schedule, tiles

EXPRESSIONS = (
    "causal & band(150)",
    "everywhere",
    "causal",
    "band(9, right=140) - block(7)",
    "causal & (band(63) | globals(3) | random(2, seed=5))",
    "by_head(band(5), causal & random(3, block=64))",
    "by_head(band(5, right=2), causal)",
)
PLAIN = torch.device("cpu")
N = 391
# Lengths of packed sequences: borders at blocks' borders, within blocks, several in a block, one of all tokens.
LENGTHS = ([128, 128, 135], [100, 28, 5, 1, 3, 200, 54], [391], [1, 390])


def inputs(n=N, *, groups=2, dtype=torch.float64, batch=4):
    g = torch.Generator().manual_seed(n)
    return [torch.randn(batch, h, n, d, generator=g, dtype=dtype) for h, d in ((2, 16), (groups, 16), (groups, 5))]


def packed():
    """Ids (B,N) of ``LENGTHS``, and real tokens (B,N) with padding on the left, within and on the right."""
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    real = torch.rand(ids.shape, generator=torch.Generator().manual_seed(3)) < 0.7
    real[0, :130] = False
    real[1, 200:] = False
    real[2] = False
    return ids, real


@pytest.fixture
def uncompiled(monkeypatch):
    """FlexAttention by its definition: all pairs, by the predicate alone."""
    monkeypatch.setattr(flex, "_compiled", flex._flex)


@pytest.mark.parametrize("which", ["segments", "mask", "both"])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_blocks_of_packed_rows_hold_what_the_pattern_allows(text, which):
    pattern, (ids, real) = patterns.parse(text), packed()
    segments, mask = ids if which != "mask" else None, real if which != "segments" else None
    starts = flex.sequence_starts(mask, segments, torch.empty(len(ids), 2, N, 0))
    pairs = flex.blocks_of(repr(pattern), N, 2 if pattern.per_head else 1, 1, PLAIN)
    block = flex.packed_mask(pairs, starts)
    at = torch.arange(N) - starts
    allowed = sparse.allowed_at(pattern, at, at, 2, 1)
    alike = (starts[:, :, None] == starts[:, None]) & (starts >= 0)[:, None]
    expected = allowed & alike[:, None]
    lists = block.kv_num_blocks, block.kv_indices, block.full_kv_num_blocks, block.full_kv_indices
    assert all(one.is_contiguous() for one in lists)  # the kernels do not read their strides
    b, h, place = torch.arange(len(ids))[:, None, None, None], torch.arange(2)[:, None, None], torch.arange(N)
    by_pair = block.mask_mod(b, h, place[:, None], place[None])
    torch.testing.assert_close(by_pair, expected.expand_as(by_pair), rtol=0, atol=0)
    found, whole = (
        torch.zeros(index.shape, dtype=torch.bool).scatter(
            -1, index.long(), torch.arange(index.shape[-1]) < count[..., None]
        )
        for count, index in (
            (block.kv_num_blocks, block.kv_indices),
            (block.full_kv_num_blocks, block.full_kv_indices),
        )
    )
    wide, full = (x.repeat_interleave(128, 2).repeat_interleave(128, 3)[..., :N, :N] for x in (found, whole))
    assert not (wide & full).any()
    torch.testing.assert_close((full | (wide & by_pair)).expand_as(by_pair), by_pair, rtol=0, atol=0)


def test_packed_rows_skip_blocks():
    starts = flex.sequence_starts(None, packed()[0], torch.empty(len(LENGTHS), 2, N, 0))
    block = flex.packed_mask(flex.blocks_of("causal", N, 1, 0, PLAIN), starts)
    # Three sequences of about 128 tokens: one block each, the last of 135 two more.
    assert block.kv_num_blocks[0, 0].tolist() == [1, 1, 1, 2]
    # One sequence: below the diagonal all pairs, except in the last block, which is not full of tokens.
    assert block.full_kv_num_blocks[2, 0].tolist() == [0, 1, 2, 0]
    assert block.kv_num_blocks[2, 0].tolist() == [1, 1, 1, 4]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
@pytest.mark.parametrize("which", ["segments", "mask", "both"])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_packed_and_padded_rows_agree_with_separate_calls(text, which, uncompiled):
    q, k, v = inputs(groups=1)
    ids, real = packed()
    own = {"segments": ids if which != "mask" else None, "mask": real if which != "segments" else None}
    if own["mask"] is not None:
        hidden = ~real[:, None, :, None]
        q, k, v = (x.masked_fill(hidden, float("nan")) for x in (q, k, v))
    pattern = patterns.parse(text)
    found, lse = flex.attend(q, k, v, repr(pattern), 1, 0.3, own["mask"], own["segments"])
    with backend("reference"):
        expected = sparse.attend(q, k, v, pattern, scale=0.3, layer=1, **own)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    empty = (expected == 0).all(-1)
    assert (lse.isneginf() == empty).all()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:return_lse is deprecated:FutureWarning")
@pytest.mark.parametrize("queries", [N, 200])
def test_packed_rows_take_one_call(queries, uncompiled, monkeypatch):
    calls, call = [], flex._call
    monkeypatch.setattr(flex, "_call", lambda *a: calls.append(a) or call(*a))
    monkeypatch.setattr(flex, "why_not", lambda *a: "")
    q, k, v = inputs(groups=1)
    q, (ids, real), pattern = q[:, :, N - queries :], packed(), patterns.parse("by_head(band(5, right=2), causal)")
    with backend("flex"):
        found = sparse.attend(q, k, v, pattern, mask=real, segments=ids)
    assert len(calls) == 1
    with backend("reference"):
        expected = sparse.attend(q, k, v, pattern, mask=real, segments=ids)
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
def test_kernels_see_packed_rows(monkeypatch):
    # Inductor cannot place the writes that spoil fresh memory in tests.
    for place, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(place, name, getattr(place, name).__wrapped__)
    # With dynamic sizes Inductor writes C++ for a CPU that does not compile.
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = inputs(dtype=torch.float32)
    v = torch.cat([v, v, v, v[..., :1]], -1)
    ids, _ = packed()
    for text in ("causal & band(150)", "by_head(band(5), causal & random(3, block=64))"):
        pattern = patterns.parse(text)
        pairs = flex.blocks_of(text, N, 2 if pattern.per_head else 1, 0, PLAIN)
        found = compiled(q, k, v, block_mask=flex.packed_mask(pairs, flex.sequence_starts(None, ids, q)))
        with backend("reference"):
            expected = sparse.attend(q, k, v, pattern, segments=ids)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("which", ["segments", "mask", "both"])
@pytest.mark.parametrize("text", EXPRESSIONS)
def test_on_a_gpu_packed_rows_agree_in_value_and_gradients(text, which, monkeypatch):
    calls, call = [], flex._call
    monkeypatch.setattr(flex, "_call", lambda *a: calls.append(a) or call(*a))
    ids, real = packed()
    own = {"segments": ids if which != "mask" else None, "mask": real if which != "segments" else None}
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
    ids, real = (x.cuda() for x in packed())
    q, k, v = (x.cuda() for x in inputs(dtype=torch.float32))
    pattern = patterns.parse("causal & band(150)")
    for _ in range(2):
        # The first call compiles, and makes the tables of the pattern.
        sparse.attend(q, k, v, pattern, mask=real, segments=ids)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse.attend(q, k, v, pattern, mask=real, segments=ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
