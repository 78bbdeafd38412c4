"""Longformer against the dense definition with two sets of projections, and its bounded state."""

import pytest
import torch

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


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_the_definition(form, causal):
    module, x = make(*form, causal=causal), data(N)
    same(module(x)[0], oracle(module, x, causal), module.parameters())


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
