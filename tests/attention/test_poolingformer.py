"""Poolingformer against its definition, slot by slot, and special cases of kernels and windows."""

import pytest
import torch

import longspan
from longspan.ops.compress import pool
from support.sparse import build, by_hand, data, heads_of, pairs, past, softmax
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


def test_by_hand():
    """y = 1, 2, 5.5, 10 are means of neighbors; slots hold 1.5 and 7.75; the last token is too far from the first."""
    even, same = ("query", "key", "far_query", "far_key"), ("value", "far_value", "out")
    parts = dict.fromkeys(even, (0, 0)) | dict.fromkeys(same, (1, 0))
    spec = "poolingformer(window=1, far_window=2, kernel=2, stride=2)"
    assert by_hand(spec, [1.0, 3.0, 8.0, 12.0], **parts) == [1.0, 3.5, 7.0, 17.75]


@BOTH
@pytest.mark.parametrize("kind", ["mean", "max", "dynamic"])
@pytest.mark.parametrize("form", FORMS)
def test_it_equals_the_definition(form, kind, causal):
    for n in (1, 2, 5, N, N + 1, N + 2):
        module, x = make(*form, kind=kind, causal=causal), data(n).requires_grad_()
        same(module(x)[0], definition(module, x), (x, *module.parameters()))


@BOTH
def test_single_tokens_as_slots_are_a_window_over_what_the_first_reads(causal):
    module, x = make(3, 6, 1, 1, causal=causal), data(N)
    second = build(f"sparse(pattern='band(6, right={0 if causal else 6})')", causal=causal)
    for mine, theirs in zip(SECOND, FIRST, strict=True):
        getattr(second, theirs).load_state_dict(getattr(module, mine).state_dict())
    torch.nn.init.eye_(second.out.weight)
    torch.nn.init.zeros_(second.out.bias)
    near = pairs(N, lambda i, j: abs(i - j) <= 3)
    y = softmax(near & past(N) if causal else near, *heads_of(module, x, *FIRST)).transpose(1, 2).flatten(-2)
    torch.testing.assert_close(module(x)[0], module.out(y + second(y)[0]), rtol=0, atol=1e-10)


@BOTH
def test_windows_of_all_tokens_are_two_full_attentions(causal):
    module, x = make(N, N, 1, 1, causal=causal), data(N)
    allowed = past(N) if causal else torch.ones(N, N, dtype=torch.bool)
    y = softmax(allowed, *heads_of(module, x, *FIRST)).transpose(1, 2)
    z = softmax(allowed, *heads_of(module, y.flatten(-2), *SECOND)).transpose(1, 2)
    torch.testing.assert_close(module(x)[0], module.out((y + z).flatten(-2)), rtol=0, atol=1e-10)


@BOTH
def test_values_of_one_give_two(causal):
    """The sum of two means; a causal token that sees no slot has only the first."""
    module, x = make(3, 9, 3, 2, causal=causal), data(N)
    for part in (module.value, module.far_value):
        torch.nn.init.zeros_(part.weight)
        torch.nn.init.ones_(part.bias)
    expected = torch.full((2, N, 6), 2.0, dtype=torch.float64)
    if causal:
        expected[:, :2] = 1.0
    torch.testing.assert_close(module(x)[0], module.out(expected), rtol=0, atol=1e-10)


@BOTH
@pytest.mark.parametrize("kind", ["mean", "max", "dynamic"])
@pytest.mark.parametrize("traced", [False, True])
def test_padding_does_not_shift_the_slots(kind, causal, traced, monkeypatch):
    """``traced``: with the dense mask that compiled code uses."""
    if traced:
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


@pytest.mark.parametrize("cuts", [[1] * N, [2, 3, 18], [1, 22], [19, 4]])
@pytest.mark.parametrize("form", FORMS)
def test_the_state_is_two_rings_and_the_remaining_tokens(form, cuts, monkeypatch):
    monkeypatch.setattr("longspan.attention.poolingformer.AT_ONCE", 5)
    module, x = make(*form), data(N)
    state, outs = module.init_state(2), []
    size = longspan.states.nbytes(state)
    for part in x.split(cuts, 1):
        y, state = module(part, state)
        outs.append(y)
    torch.testing.assert_close(torch.cat(outs, 1), definition(module, x), rtol=0, atol=1e-10)
    assert longspan.states.nbytes(state) == size
    assert state.near.keys.shape[2] == form[0] + 1
    assert state.far.keys.shape[2] == form[1] // form[3] + 1
    assert state.keys.shape[2] == form[2] - 1


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
