"""Longformer against the dense definition with two sets of projections, and its bounded state."""

import pytest
import torch

import longspan
from support.hand import plain, read
from support.sparse import build, data, heads_of, pairs, past, softmax
from support.tensors import same

N = 37
FORMS = [(3, 2, 1), (3, 9, 1), (2, 2, 3), (0, 1, 1), (4, 41, 1)]  # window, globals, dilation; globals in and out of it
LOCAL, GLOBAL = ("query", "key", "value"), ("query_global", "key_global", "value_global")


def make(w, g, dilation, causal=True):
    return build(f"longformer(window={w}, globals={g}, dilation={dilation})", causal=causal)


def seen(n, w, g, dilation, causal):
    """(H,N,N): a window, which is dilated in the second head, and the columns of the first tokens."""
    tables = []
    for apart in (1, dilation):
        table = pairs(n, lambda i, j, apart=apart: (abs(i - j) <= w * apart and (i - j) % apart == 0) or j < g)
        tables.append(table & past(n) if causal else table)
    return torch.stack(tables)


def oracle(module, x, causal):
    """Every row by the local projections, and then the first ones again by the global ones, over all keys."""
    n, g = x.shape[1], module.globals
    o = softmax(seen(n, module.window, g, module.dilation, causal), *heads_of(module, x, *LOCAL))
    everything = past(n) if causal else torch.ones(n, n, dtype=torch.bool)
    again = softmax(everything, *heads_of(module, x, *GLOBAL))
    o = torch.cat([again[:, :, :g], o[:, :, g:]], 2)
    return module.out(o.transpose(1, 2).flatten(-2))


def test_by_hand():
    """All keys tie: a token reads the mean of itself, the one before and the global one, which reads threefold."""
    module = plain("longformer(window=1, globals=1)", asking=False)
    torch.nn.init.constant_(module.value_global.weight, 3.0)
    assert read(module, 1.0, 2.0, 4.0, 8.0) == pytest.approx([3.0, 1.5, 7 / 3, 13 / 3])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_the_definition(form, causal):
    module, x = make(*form, causal=causal), data(N)
    same(module(x)[0], oracle(module, x, causal), module.parameters())


@pytest.mark.parametrize("causal", [True, False])
def test_with_one_set_of_projections_it_is_softmax_under_one_pattern(causal):
    module, x = make(3, 2, 1, causal), data(N)
    for name in LOCAL:
        getattr(module, f"{name}_global").load_state_dict(getattr(module, name).state_dict())
    pattern = longspan.patterns.parse("band(3, right=3) | globals(2)")
    allowed = pattern.dense(N)[0] & past(N) if causal else pattern.dense(N)[0]
    o = softmax(allowed, *heads_of(module, x, *LOCAL))
    torch.testing.assert_close(module(x)[0], module.out(o.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-10)


def test_if_all_tokens_are_global_it_is_softmax_by_the_global_projections():
    module, x = make(1, 41, 1, False), data(N)
    o = softmax(torch.ones(N, N, dtype=torch.bool), *heads_of(module, x, *GLOBAL))
    torch.testing.assert_close(module(x)[0], module.out(o.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("given", [("mask",), ("segments",), ("mask", "segments")])
def test_global_tokens_are_the_first_real_ones_of_each_sequence(causal, given):
    module, x, mask = make(3, 2, 1, causal), data(N), torch.ones(2, N, dtype=torch.bool)
    arguments = {"segments": torch.tensor([[0] * 13 + [4] * 24, [1] * N])}
    if "mask" in given:
        mask[0, [0, 4, 5, 20]], mask[1, 30:] = False, False
    y = module(x, **{name: (arguments | {"mask": mask})[name] for name in given})[0]
    cut = [slice(0, 13), slice(13, N)] if "segments" in given else [slice(0, N)]
    for row, part in (*((0, part) for part in cut), (1, slice(0, N))):
        keep = mask[row, part]
        expected = oracle(module, x[row : row + 1, part][:, keep], causal)
        torch.testing.assert_close(y[row : row + 1, part][:, keep], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cut", [[1] * N, [2, 3, 32], [1, 5, 1, 30], [30, 1, 6]])
def test_cuts_inside_and_after_the_global_tokens_give_one_answer(form, cut):
    module, x = make(*form), data(N)
    # Without gradients, steps after the global tokens do without their projections.
    for gradients in (True, False):
        state, outs = module.init_state(2), []
        with torch.set_grad_enabled(gradients):
            for part in x.split(cut, 1):
                y, state = module(part, state)
                outs.append(y)
        torch.testing.assert_close(torch.cat(outs, 1), oracle(module, x, True), rtol=0, atol=1e-10)


@pytest.mark.parametrize("gradients", [True, False])
def test_rows_of_unlike_length_share_a_call(monkeypatch, gradients):
    """One row still reads its global tokens while the other is past them; calls are worked off in parts."""
    monkeypatch.setattr("longspan.attention.longformer.AT_ONCE", 4)
    module, x = make(2, 5, 1), data(N)
    mask = torch.arange(N)[None] >= torch.tensor([[0], [11]])
    state, outs = module.init_state(2), []
    with torch.set_grad_enabled(gradients):
        for part, real in zip(x.split([12, 25], 1), mask.split([12, 25], 1), strict=True):
            y, state = module(part, state, mask=real)
            outs.append(y)
    y, expected = torch.cat(outs, 1), oracle(module, x[1:, 11:], True)
    torch.testing.assert_close(y[:1], oracle(module, x[:1], True), rtol=0, atol=1e-10)
    torch.testing.assert_close(y[1:, 11:], expected, rtol=0, atol=1e-10)
    if gradients:
        upstream, wanted = data(N - 11, batch=1, seed=9), list(module.parameters())
        for a, b in zip(*(torch.autograd.grad(o, wanted, upstream) for o in (y[1:, 11:], expected)), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def test_the_state_does_not_grow():
    module, x = make(3, 2, 2), data(N)
    start = module.init_state(2)
    _, after = module(x, start)
    assert start.window.keys.shape == (2, 2, 3 * 2 + 1, 3)
    assert start.keys.shape == (2, 4, 2, 3)
    assert longspan.states.nbytes(after) == longspan.states.nbytes(start)


@pytest.mark.parametrize(
    ("options", "heads", "message"),
    [
        ("globals=0", 2, "globals=0 must be at least 1"),
        ("window=-1", 2, "left=-1 must be a whole number of at least 0"),
        ("dilation=0", 2, "stride=0 must be a whole number of at least 1"),
        ("dilation=2", 1, "dilation=2 .*heads=1"),
    ],
)
def test_bad_options_are_refused(options, heads, message):
    with pytest.raises(ValueError, match=message):
        build(f"longformer({options})", heads=heads)
