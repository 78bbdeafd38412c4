"""Poolingformer against its definition, slot by slot, and special cases of kernels and windows."""

import pytest
import torch

from longspan.ops.compress import pool
from longspan.testing.pairs import all_pairs
from support.sparse import build, data, heads_of, pairs, past, softmax
from support.tensors import same

N = 23
BOTH = pytest.mark.parametrize("causal", [True, False])
FORMS = [(3, 9, 3, 2), (0, 3, 1, 1), (2, 7, 4, 4), (5, 11, 5, 4), (1, 8, 5, 3), (2, 40, 3, 2), (2, 4, 3, 3)]
FIRST, SECOND = ("query", "key", "value"), ("far_query", "far_key", "far_value")


def make(w1, w2, kernel, stride, kind="mean", causal=True):
    spec = f"poolingformer(window={w1}, far_window={w2}, kernel={kernel}, stride={stride}, pool='{kind}')"
    return build(spec, causal=causal)


def one_slot(module, tokens, mix):
    """(B,H,m,D) -> (B,H,D), over the m tokens of the slot."""
    if module.pool == "mean":
        return tokens.mean(2)
    if module.pool == "max":
        return tokens.amax(2)
    m = tokens.shape[2]
    logits = torch.einsum("bhd,hdk->bhk", tokens[:, :, min((module.kernel - 1) // 2, m - 1)], mix)[..., :m]
    return (logits.softmax(-1)[..., None] * tokens).sum(2)


def starts_of(module, n):
    """The first tokens of the slots: whole ones if causal, or as many as it takes to hold all tokens."""
    found = []
    for start in range(0, n, module.stride):
        if module.causal and start + module.kernel > n:
            break
        found.append(start)
        if start + module.kernel >= n:
            break
    return found


def definition(module, x):
    n, kernel, starts = x.shape[1], module.kernel, starts_of(module, x.shape[1])
    near = pairs(n, lambda i, j: abs(i - j) <= module.window)
    y = softmax(near & past(n) if module.causal else near, *heads_of(module, x, *FIRST))
    q, k, v = heads_of(module, y.transpose(1, 2).flatten(-2), *SECOND)
    if not starts:
        return module.out(y.transpose(1, 2).flatten(-2))
    mixes = (getattr(module, name, None) for name in ("mix_key", "mix_value"))
    k, v = (
        torch.stack([one_slot(module, x[:, :, s : s + kernel], mix) for s in starts], 2)
        for x, mix in zip((k, v), mixes, strict=True)
    )
    seen = [
        [abs(i - s) <= module.far_window and (not module.causal or s + kernel - 1 <= i) for s in starts]
        for i in range(n)
    ]
    return module.out((y + softmax(torch.tensor(seen), q, k, v)).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("row", all_pairs(form=FORMS, kind=["mean", "max", "dynamic"], causal=[True, False]), ids=str)
def test_it_equals_the_definition(row):
    form, kind, causal = row.values()
    for n in (1, 5, N, N + 1):
        module, x = make(*form, kind=kind, causal=causal), data(n).requires_grad_()
        same(module(x)[0], definition(module, x), (x, *module.parameters()))


@BOTH
@pytest.mark.parametrize("kind", ["mean", "max", "dynamic"])
def test_padding_does_not_shift_the_slots_in_compiled_code(kind, causal, monkeypatch):
    """It has a dense mask."""
    monkeypatch.setattr("longspan.ops.rows.followed", lambda: True)
    module, x = make(3, 9, 5, 2, kind, causal), data(N)
    alone = module(x)[0]
    torch.testing.assert_close(module(x, mask=torch.ones(2, N, dtype=torch.bool))[0], alone, rtol=0, atol=1e-12)
    for left, right in ((1, 0), (2, 5), (0, 3), (3, 1)):
        padded = torch.nn.functional.pad(x, (0, 0, left, right), value=7.0)
        mask = torch.zeros(2, left + N + right, dtype=torch.bool)
        mask[:, left : left + N] = True
        y = module(padded, mask=mask)[0][:, left : left + N]
        torch.testing.assert_close(y, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", ["mean", "largest"])
def test_missing_tokens_of_a_slot_do_not_count(kind):
    """Negative numbers, so that a zero would change the result."""
    x = -1 - data(5)[:, None].abs()
    found, there = pool.windows(x, 4, 3, whole=False, lengths=torch.tensor([5, 2]))
    slots = getattr(pool, kind)(found, there)
    one = (lambda t: t.mean(1)) if kind == "mean" else (lambda t: t.amax(1))
    expected = [one(x[0, :, :4]), one(x[0, :, 3:5]), one(x[1, :, :2]), torch.zeros(1, 6, dtype=torch.float64)]
    torch.testing.assert_close(slots[:, :, [0, 1]].transpose(1, 2).flatten(0, 1), torch.stack(expected))


def test_a_slot_without_tokens_is_never_negative_infinity():
    x = data(4)[:, None].requires_grad_()
    found, there = pool.windows(x, 2, 2, whole=False, lengths=torch.tensor([0, 3]))
    for slots in (pool.mean(found, there), pool.largest(found, there)):
        assert slots.isfinite().all()
        (grad,) = torch.autograd.grad(slots.sum(), x, retain_graph=True)
        assert not grad[0].any()


@pytest.mark.parametrize("given", [{"null": True, "window": 3}, {"null": True, "kernel": 3}, {"window": 0}])
def test_slots_that_do_not_fit_are_refused(given):
    q, k = data(6)[:, None], data(3)[:, None]
    message = "a null slot" if "null" in given else "window=0 is too small"
    with pytest.raises(ValueError, match=message):
        pool.attend(q, k, k, **({"kernel": 2, "stride": 2, "causal": False} | given))
