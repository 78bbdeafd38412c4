"""Rows of states: joined, and written into the slots of a pool."""

import pytest
import torch
from torch.utils import _pytree as pytree

import longspan
from longspan import states

DIM, HEADS = 8, 2


def specs():
    """Every example of a causal mechanism with a state."""
    found = []
    for name in longspan.list_mechanisms():
        for spec in longspan.mechanism_examples(name):
            try:
                attention = longspan.build(spec, dim=DIM, heads=HEADS)
                attention.init_state(1)
            except ValueError:
                continue
            found.append(spec)
    return found


SPECS = specs()


def row(attention, n, seed):
    """The state after n tokens of one row, and the next token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, n + 1, DIM, generator=generator, dtype=torch.float64)
    return attention(x[:, :n], attention.init_state(1))[1], x[:, n:]


def close(actual, expected):
    assert torch.allclose(actual, expected, rtol=0, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_joined_rows_continue_like_each_alone(spec):
    torch.manual_seed(0)
    attention = longspan.build(spec, dim=DIM, heads=HEADS).double().eval()
    rows = [row(attention, n, n) for n in (5, 5, 11)]
    if not attention.joinable:
        with pytest.raises(ValueError, match="differs beyond the rows"):
            states.join([state for state, _ in rows])
        rows = rows[:2]
    joined = states.join([state for state, _ in rows])
    torch.manual_seed(1)
    together, _ = attention(torch.cat([x for _, x in rows]), joined)
    for i, (state, x) in enumerate(rows):
        torch.manual_seed(1)
        alone, _ = attention(x, state)
        if "sac" not in spec:  # it draws at random, once per row
            close(together[i], alone[0])


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_a_slot_holds_what_was_put(spec):
    torch.manual_seed(0)
    attention = longspan.build(spec, dim=DIM, heads=HEADS).double().eval()
    one, other = row(attention, 7, 0)[0], row(attention, 7, 1)[0]
    pool = states.join([other] * 3)
    addresses = [t.data_ptr() for t in pytree.tree_leaves(pool)]
    for t in pytree.tree_leaves(pool):
        t[1] = float("nan") if t.is_floating_point() else t[1]
    found = states.put(pool, [1], one)
    assert found is pool
    assert [t.data_ptr() for t in pytree.tree_leaves(pool)] == addresses
    for i, expected in enumerate((other, one, other)):
        for a, b in zip(pytree.tree_leaves(pool), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(a[i], b[0])


def test_a_pool_with_more_slots_takes_a_shorter_cache():
    attention = longspan.build("softmax", dim=8, heads=2)
    pool = states.fix_capacity(attention.init_state(3), 20)
    _, one = attention(torch.randn(1, 4, 8), states.fix_capacity(attention.init_state(1), 6))
    states.put(pool, torch.tensor([2]), one)
    assert pool.length.tolist() == [0, 0, 4]
    assert torch.equal(pool.keys[2, :, :4], one.keys[0, :, :4])
    _, long = attention(torch.randn(1, 30, 8), states.fix_capacity(attention.init_state(1), 30))
    before = states.clone(pool)
    with pytest.raises(ValueError, match=r"keys.*does not fit 1 rows"):
        states.put(pool, [0], long)
    assert all(torch.equal(a, b) for a, b in zip(pool, before, strict=True))


@pytest.mark.parametrize(
    ("rows", "kind", "message"),
    [
        ([4], IndexError, "4 rows"),
        ([-5], IndexError, "4 rows"),
        ([1, 1], ValueError, "repeat"),
        ([2, -2], ValueError, "repeat"),
        ([-1, -1], ValueError, "repeat"),
        ([0, 1], ValueError, "2 rows"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, kind, message):
    attention = longspan.build("linear", dim=8, heads=2)
    with pytest.raises(kind, match=message):
        states.put(attention.init_state(4), rows, attention.init_state(1))


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_no_rows_are_an_empty_batch(spec):
    torch.manual_seed(0)
    attention = longspan.build(spec, dim=DIM, heads=HEADS).double().eval()
    state, x = row(attention, 5, 0)
    none = states.select(state, [])
    assert all(a.shape == b[:0].shape for a, b in zip(*map(pytree.tree_leaves, (none, state)), strict=True))
    assert attention(x[:0], none)[0].shape == (0, 1, DIM)
    for same in (states.join([none, state, none]), states.put(states.clone(state), [], none)):
        assert all(torch.equal(a, b) for a, b in zip(*map(pytree.tree_leaves, (same, state)), strict=True))


@pytest.mark.parametrize("rows", [[1.7], [True, False], torch.tensor([1.0]), [[0], [1]]], ids=str)
def test_rows_that_are_no_integers_are_refused(rows):
    state = longspan.build("linear", dim=8, heads=2).init_state(2)
    for call in (lambda: states.select(state, rows), lambda: states.put(state, rows, state)):
        with pytest.raises(ValueError, match=r"rows must be integers \(R,\), not torch\."):
            call()


def test_different_states_are_refused():
    linear, gla = (longspan.build(spec, dim=8, heads=2).init_state(1) for spec in ("linear", "gla"))
    for call in (lambda: states.join([linear, gla]), lambda: states.put(linear, [0], gla)):
        with pytest.raises(ValueError, match=r"one mechanism or stack, not .*State"):
            call()
    with pytest.raises(ValueError, match="at least one"):
        states.join([])
    with pytest.raises(ValueError, match="float64"):
        states.join([linear, linear._replace(sums=linear.sums.double())])
