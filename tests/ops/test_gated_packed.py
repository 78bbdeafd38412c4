"""Packed sequences with a state each, and queries and keys that are normalized inside: every form is the definition."""

import itertools

import pytest
import torch
from test_gated import KINDS, arguments, assert_close, outcome
from test_gated_native import ROUNDED, widened

import longspan
from longspan import backend
from longspan.ops import gated
from longspan.ops.gated import native as kernels
from longspan.ops.native.call import available

WAYS = ("torch", *(("native",) if available() else ()))
needs_kernels = pytest.mark.skipif(not available(), reason="no native kernels here")


def packed(n, *, states, **options):
    """Operands of one row, and a state for each sequence."""
    given = {name: t if t is None else t[:1] for name, t in arguments(n, **options).items()}
    generator = torch.Generator().manual_seed(n)
    shape = (states, *given["state"].shape[1:])
    state = torch.randn(shape, generator=generator, dtype=torch.float64).to(given["state"].dtype)
    return given | {"state": state}


def cuts(*lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def run(name, given, **options):
    with backend(name):
        return outcome(gated.recur, given, **options)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("decay", "delta"), list(itertools.product(KINDS, (False, True))))
def test_packed_sequences_equal_separate_runs(name, decay, delta):
    """Lengths below and above a chunk of 32 and a span of 512 tokens, empty ones too; values and all gradients."""
    for lengths, repeats, normalize in (((0, 1, 30, 0, 64, 3, 0), 2, "l2"), ((517, 3, 600), 1, None)):
        if name == "torch" and lengths[0]:
            continue
        offsets, n = cuts(*lengths), sum(lengths)
        dtype = torch.float32 if name == "native" else torch.float64
        given = packed(n, states=len(lengths), decay=decay, delta=delta, repeats=repeats, dtype=dtype)
        exact, options = widened(given), {"scale": 0.7, "normalize": normalize}
        inputs = {which: None if t is None else t.clone().requires_grad_() for which, t in exact.items()}
        out, ends = [], []
        for s, (begin, end) in enumerate(itertools.pairwise(offsets.tolist())):
            part = {which: t if t is None else t[:, :, begin:end] for which, t in inputs.items() if which != "state"}
            with backend("torch"):
                o, last = gated.recur(**part, state=inputs["state"][s : s + 1], **options)
            out.append(o)
            ends.append(last)
        outputs = [torch.cat(out, 2), torch.cat(ends)]
        generator = torch.Generator().manual_seed(9)
        upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(given["v"]) for t in outputs]
        leaves = [t for t in inputs.values() if t is not None]
        expected = [*outputs, *torch.autograd.grad(outputs, leaves, [t.double() for t in upstream])]
        found = run(name, given, cu_seqlens=offsets, **options)
        assert_close(found, expected, ROUNDED if name == "native" else 1e-12)


@pytest.mark.parametrize("name", ["reference", *WAYS])
def test_no_token_sees_another_sequence(name):
    """Not even one that is not finite."""
    given = packed(67, states=3, dtype=torch.float32)
    offsets = cuts(29, 5, 33)
    with backend(name):
        o, state = gated.recur(**given, cu_seqlens=offsets)
        for t in given.values():
            t[:, :, 29:34] = torch.nan if t is not given["state"] else t[:, :, 29:34]
        after, last = gated.recur(**given, cu_seqlens=offsets)
    for kept in (slice(0, 29), slice(34, 67)):
        assert after[:, :, kept].equal(o[:, :, kept])
    assert last[::2].equal(state[::2])


@needs_kernels
def test_packed_rows_may_be_masked():
    given, offsets = packed(67, states=2, dtype=torch.float32), cuts(29, 38)
    mask = torch.rand(1, 67, generator=torch.Generator().manual_seed(1)) < 0.7
    options = {"scale": 0.7, "cu_seqlens": offsets, "mask": mask, "normalize": "l2"}
    for which in ("q", "k", "v"):
        given[which] = given[which].masked_fill(~mask[:, None, :, None], torch.nan)
    assert_close(run("native", given, **options), run("torch", widened(given), **options), ROUNDED)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("decay", "delta"), list(itertools.product(KINDS, (False, True))))
def test_normalized_inside_is_normalized_before(name, decay, delta):
    dtype = torch.float32 if name == "native" else torch.float64
    for n, sizes, repeats in ((1, (5, 3), 1), (29, (17, 33), 2), (139, (64, 7), 1)):
        given = arguments(n, decay=decay, delta=delta, repeats=repeats, dtype=dtype, sizes=sizes)
        given["k"] = given["k"] * torch.logspace(-5, 2, n, dtype=dtype)[:, None]  # some as short as the root's 1e-6
        exact = {which: None if t is None else t.double().requires_grad_() for which, t in given.items()}
        q, k = (exact[x] / (exact[x].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in "qk")
        outputs = gated.definition.attend(gated.Recurrence(**exact | {"q": q, "k": k}, scale=0.7))
        generator = torch.Generator().manual_seed(9)
        upstream = [torch.randn(t.shape, generator=generator, dtype=torch.float64).to(dtype).double() for t in outputs]
        leaves = [t for t in exact.values() if t is not None]
        expected = [*outputs, *torch.autograd.grad(outputs, leaves, upstream)]
        found = run(name, given, scale=0.7, normalize="l2") if n > 1 or name == "torch" else None
        if found is not None:
            for a, b in zip(found, expected, strict=True):
                assert (a.double() - b).abs().max() <= (ROUNDED if name == "native" else 1e-12) * b.abs().max().clamp(1)
        if n == 1 and name == "native":
            with torch.no_grad(), backend(name):
                assert_close(gated.recur(**given, scale=0.7, normalize="l2"), expected[:2], ROUNDED)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalize", [None, "l2"])
@pytest.mark.parametrize(("decay", "delta"), list(itertools.product(KINDS, (False, True))))
def test_a_step_in_half_precision_has_a_state_in_float32(decay, delta, normalize, dtype):
    """Only the output is rounded: the state is that of the same operands in float64."""
    for sizes, repeats in (((5, 3), 2), ((17, 64), 1), ((64, 128), 2), ((11, 119), 1)):
        given = arguments(1, decay=decay, delta=delta, repeats=repeats, dtype=torch.float32, sizes=sizes)
        low = given | {name: t.to(dtype) for name, t in given.items() if t is not None and name != "state"}
        exact = run("torch", widened(low), scale=0.7, normalize=normalize)[:2]
        before = low["state"].clone()
        with torch.no_grad(), backend("native"):
            for donate in (False, True):
                o, state = gated.recur(**low, scale=0.7, normalize=normalize, donate=donate)
                assert o.dtype is dtype
                assert_close([state], exact[1:], ROUNDED)
                assert_close([o], exact[:1], torch.finfo(dtype).eps)
                assert donate or low["state"].equal(before)
        assert state.data_ptr() == low["state"].data_ptr()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_so_has_a_step_of_linear_attention(dtype):
    for d, e in ((5, 3), (37, 64), (64, 119)):
        generator = torch.Generator().manual_seed(d)
        q, k, v = (torch.randn(3, 2, 1, size, generator=generator).to(dtype) for size in (d, d, e))
        state = torch.rand(3, 2, d, e + 1, generator=generator)
        with torch.no_grad(), backend("torch"):
            exact = longspan.linear_attention(
                q.double(), k.double(), v.double(), state=state.double(), return_state=True
            )
        with torch.no_grad(), backend("native"):
            o, end = longspan.linear_attention(q, k, v, state=state, return_state=True, donate=True)
        assert end.data_ptr() == state.data_ptr()
        assert o.dtype is dtype
        assert_close([end], exact[1:], ROUNDED)
        assert_close([o], exact[:1], torch.finfo(dtype).eps)


@needs_kernels
def test_no_normalized_copies_are_kept():
    given, kept = arguments(67, dtype=torch.float32), []
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    with backend("native"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        gated.recur(**leaves, normalize="l2")
    ours = {t.data_ptr() for t in leaves.values()}
    (starts,) = (t for t in kept if t.data_ptr() not in ours)
    assert starts.shape[2] == -(-67 // kernels.SPAN)


@needs_kernels
@pytest.mark.parametrize("normalize", [None, "l2"])
def test_gradients_that_can_be_differentiated_are_the_gradients(normalize):
    given = packed(67, states=2, dtype=torch.float32)
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    with backend("native"):
        o, end = gated.recur(**leaves, normalize=normalize, cu_seqlens=cuts(29, 38))
    loss = o.sin().sum() + end.square().sum()
    plain = torch.autograd.grad(loss, list(leaves.values()), retain_graph=True)
    assert_close(torch.autograd.grad(loss, list(leaves.values()), create_graph=True), plain, ROUNDED)


@needs_kernels
def test_transposed_operands_are_read_where_they_are():
    """As layers hand them over: heads taken from the channels of one projection, (B,N,H D)."""
    for n, dtype in ((67, torch.float32), (1, torch.float32), (1, torch.bfloat16)):
        mixed = torch.randn(3, n, 2 * 8 * 2 + 4 * 16).to(dtype)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(mixed.split([16, 16, 64], -1), (2, 2, 4), strict=True)
        )
        decay, beta = -torch.rand(3, n, 4).mT, torch.rand(3, n, 4).mT
        given = {"log_decay": decay, "beta": beta, "state": torch.randn(3, 4, 8, 16), "normalize": "l2"}
        with torch.no_grad(), backend("native"):
            found = gated.recur(q, k, v, **given)
            expected = gated.recur(*(t.contiguous() for t in (q, k, v)), **given)
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
        assert found[0].transpose(1, 2).is_contiguous()


class TestFunctional:
    """What the public functions promise."""

    @property
    def given(self):
        return {name: torch.zeros(1, 2, 7, 5) for name in ("query", "key", "value")}

    @property
    def rates(self):
        return {"beta": torch.ones(1, 2, 7)}

    def test_the_states_are_those_of_the_sequences(self):
        _, state = longspan.delta_rule(**self.given, **self.rates, cu_seqlens=cuts(3, 0, 4), return_state=True)
        assert state.shape == (3, 2, 5, 5)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"normalize": "l1"}, "unknown norm of queries and keys 'l1'.*; known: l2"),
            ({"cu_seqlens": cuts(3, 3)}, r"rise from 0 to the number of tokens, 7, not \[0, 3, 6\]"),
            ({"cu_seqlens": cuts(3, 4), "state": torch.zeros(1, 2, 5, 5)}, r"\(B, H, D, E\) = \(2, 2, 5, 5\), not"),
            ({"cu_seqlens": cuts(7), "segments": torch.zeros(1, 7, dtype=torch.int64)}, "segments and cu_seqlens"),
            ({"cu_seqlens": cuts(7).float()}, r"cu_seqlens must be int32 or int64"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, changes, message):
        with pytest.raises(ValueError, match=message):
            longspan.delta_rule(**self.given, **self.rates | changes)

    def test_one_token_of_an_unknown_norm_is_refused(self):
        given = {name: t[:, :, :1] for name, t in self.given.items()}
        with pytest.raises(ValueError, match="unknown norm"):
            longspan.delta_rule(**given, beta=torch.ones(1, 2, 1), state=torch.zeros(1, 2, 5, 5), normalize="L2")
