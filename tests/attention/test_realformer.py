"""Residual scores: the carry of single layers and stacks, for whole sequences and single steps."""

import math

import pytest
import torch

import longspan
from longspan import testing
from longspan.models.config import StackConfig
from longspan.models.stacks import Stack
from support.tensors import data

MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
SEGMENTS = torch.tensor([[0] * 4 + [1] * 7, [2] * 11])


def build(seed=0, causal=True):
    torch.manual_seed(seed)
    return longspan.build("realformer", 8, 2, causal=causal).double()


def split(part, x):
    return part(x).unflatten(-1, (2, -1)).transpose(1, 2)


def scores(module, x):
    return split(module.query, x) @ split(module.key, x).mT / math.sqrt(4)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_carry_of_zeros_is_softmax(causal, first):
    module, x = build(causal=causal), data(2, 11, 8)
    other = longspan.build("softmax", 8, 2, causal=causal).double()
    other.load_state_dict(module.state_dict())
    carry = module.init_carry(x, None) if first else torch.zeros(2, 2, 11, 11, dtype=torch.float64)
    for arguments in ({}, {"mask": MASK}, {"segments": SEGMENTS}):
        y, _, _ = module(x, carry=carry, **arguments)
        torch.testing.assert_close(y, other(x, **arguments)[0], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(y, module(x, **arguments)[0], rtol=0, atol=0)


def test_scores_add_up_and_are_masked_last():
    """Three layers on one x: weights are those of the sum, and the carry has no mask."""
    x, total = data(2, 11, 8).masked_fill(~MASK[..., None], 0.0), 0
    allowed = torch.ones(11, 11, dtype=torch.bool).tril() & MASK[:, None, None, :]
    carry = build().init_carry(x, MASK)
    for seed in range(3):
        module = build(seed)
        total = total + scores(module, x)
        y, _, carry = module(x, mask=MASK, carry=carry)
        torch.testing.assert_close(carry, total, rtol=1e-10, atol=1e-10)
        o = total.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num() @ split(module.value, x)
        expected = module.out(o.transpose(1, 2).flatten(-2))
        torch.testing.assert_close(y[MASK], expected[MASK], rtol=1e-10, atol=1e-10)


def test_a_stack_carries_scores_past_another_mechanism():
    torch.manual_seed(0)
    stack = Stack(StackConfig(8, 3, 2, "realformer; linear; realformer", feedforward=8)).double()
    seen = []
    for attention in stack.attentions():
        attention.register_forward_hook(lambda module, inputs, out: seen.append((module, inputs[0], out)))
    stack(data(2, 11, 8))
    (first, x, out), _, (last, above, end) = seen
    torch.testing.assert_close(out[2], scores(first, x), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(end[2], out[2] + scores(last, above), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("law", ["parallel_is_recurrent", "state", "padding", "packed", "prefix_mode", "gradients"])
def test_a_stack_keeps_the_laws(law):
    row = testing.check(law, "realformer; realformer; realformer")
    assert row.status == "passed", row.note


def test_the_carry_of_a_step_is_the_last_row_of_the_whole():
    """(B,H,1,M) for the M keys so far, without padding."""
    module, x = build(), data(2, 11, 8)
    mask = MASK.clone()
    mask[:, -1] = True
    with torch.no_grad():
        _, state = module(x[:, :-1], module.init_state(2), mask=mask[:, :-1])
        _, _, carry = module(x[:, -1:], state, carry=module.init_carry(x, None))
    assert carry.shape == (2, 2, 1, 10)
    for row, length in enumerate((9, 10)):
        whole = scores(module, x[row : row + 1, mask[row]])[0, :, -1:]
        torch.testing.assert_close(carry[row, :, :, :length], whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("carry", "came"),
    [
        (torch.zeros(2, 2, 11, 10, dtype=torch.float64), r"torch.float64 \(2, 2, 11, 10\)"),
        (torch.zeros(2, 2, 11, 11), r"torch.float32 \(2, 2, 11, 11\)"),
        (torch.zeros(1, 1, 1, 1, dtype=torch.float64), r"torch.float64 \(1, 1, 1, 1\)"),
        (0, "int"),
    ],
)
def test_a_wrong_carry_is_refused(carry, came):
    message = r"carry must be torch.float64 \(2, 2, 11, 11\), .* not "
    with pytest.raises(ValueError, match=message + came):
        build()(data(2, 11, 8), carry=carry)


def test_a_carry_from_a_state_of_another_length_is_refused():
    """Scores against other keys cannot be added."""
    first, second, x = build(), build(1), data(2, 11, 8)
    _, state = first(x[:, :5], first.init_state(2))
    _, _, carry = first(x[:, 5:], state, carry=first.init_carry(x, None))
    with pytest.raises(ValueError, match=r"carry must be .* \(2, 2, 6, 6\)"):
        second(x[:, 5:], second.init_state(2), carry=carry)
