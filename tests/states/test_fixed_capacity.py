"""A KV cache of fixed capacity gives the outputs of a growing one, for every mechanism that has one."""

import pytest
import torch

import longspan
from longspan.attention.registry import REGISTRY
from longspan.states import fix_capacity
from longspan.states.kv_cache import FixedKeyValues, KeyValues

X = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0)).double()


def cached():
    for name, cls in sorted(REGISTRY.items()):
        if "causal" in cls.directions and KeyValues in cls.states:
            for spec in longspan.mechanism_examples(name):
                attention = longspan.build(spec, 16, 2)
                if isinstance(attention.init_state(1), KeyValues):
                    yield spec


def built(spec="softmax"):
    torch.manual_seed(0)
    return longspan.build(spec, 16, 2).double().eval()


@pytest.mark.parametrize("spec", list(cached()))
@torch.no_grad()
def test_outputs_equal_those_of_a_growing_cache(spec):
    attention = built(spec)
    ragged = torch.tensor([[True] * 5, [False, True, True, False, True]])
    for mask in (None, ragged):
        for donate in (False, True):
            _, growing = attention(X[:, :5], attention.init_state(2, 9), mask=mask)
            state = fix_capacity(growing, 9)
            for i in range(5, 9):
                expected, growing = attention(X[:, i : i + 1], growing)
                before, old = state, longspan.states.clone(state)
                found, state = attention(X[:, i : i + 1], state, donate=donate)
                torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
                assert isinstance(state, FixedKeyValues)
                assert state.keys.shape[2] == 9
                assert (state.keys.data_ptr() == before.keys.data_ptr()) == donate
                assert donate or all(torch.equal(a, b) for a, b in zip(before, old, strict=True))
            assert torch.equal(state.length, growing.length)


@pytest.mark.parametrize("donate", [False, True])
@torch.no_grad()
def test_calls_with_more_tokens_keep_the_capacity(donate):
    attention = built()
    expected, _ = attention(X)
    state = fix_capacity(attention.init_state(2), 9)
    for part in (slice(0, 4), slice(4, 5), slice(5, 9)):
        found, state = attention(X[:, part], state, donate=donate)
        torch.testing.assert_close(found, expected[:, part], atol=1e-12, rtol=0)
        assert isinstance(state, FixedKeyValues)
        assert state.keys.shape[2] == 9


@torch.no_grad()
def test_a_full_cache_refuses_tokens():
    attention = built()
    _, state = attention(X[:, :5], fix_capacity(attention.init_state(2), 5))
    with pytest.raises(ValueError, match="all 5 slots .* in use"):
        attention(X[:, :1], state)
    with pytest.raises(ValueError, match=r"capacity=5 is too small for the 7 tokens"):
        attention(X[:, :2], state)
    with pytest.raises(ValueError, match=r"capacity=4 is too small for the 5 tokens"):
        fix_capacity(state, 4)


def test_whole_stacks_and_other_states():
    stack = longspan.Stack(longspan.StackConfig(dim=8, depth=2, heads=2, feedforward=8, attention="softmax; linear"))
    state = stack.init_state(2, 5)
    first, second = fix_capacity(state, 5)
    assert isinstance(first, FixedKeyValues)
    assert first.keys.data_ptr() == state[0].keys.data_ptr()
    assert second is state[1]
    # A smaller or larger capacity moves what is in use.
    for capacity in (3, 8):
        assert fix_capacity(first, capacity).keys.shape[2] == capacity


def test_functions_of_states_keep_the_kind(tmp_path):
    state = fix_capacity(built().init_state(2, 5), 5)
    selected = longspan.states.select(state, [1, 1, 0])
    longspan.states.save(selected, tmp_path / "state")
    for found in (longspan.states.clone(state), selected, longspan.states.load(tmp_path / "state", like=state)):
        assert type(found) is FixedKeyValues
