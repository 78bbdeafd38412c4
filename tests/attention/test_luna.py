"""Packing and unpacking against dense attentions, and the causal form against its sums written out."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan.attention.luna import softplus
from longspan.ops.softmax import dense
from longspan.ops.tensors import merge, split
from support.tensors import close, data, same

N = 11
SEGMENTS = torch.tensor([[0] * 4 + [3] * 5 + [7] * 2, [1] * 11])


def build(options="slots=4", causal=True) -> Any:
    torch.manual_seed(0)
    return longspan.build(f"luna({options})", 6, 2, causal=causal).double()


def causal_definition(module, x, p=None) -> tuple[Any, Any]:
    """Rows without padding, pair by pair of tokens: -> y (B,N,dim), the effective matrix (B,H,N,N)."""
    q, k, c = (split(part(x), 2) for part in (module.query, module.value, module.pack))
    slots = split(module.pack_query(module.memory[None] if p is None else p), 2)
    b = c @ slots.mT * 3**-0.5
    a = torch.log1p(torch.exp2(b)) / math.log(2) if module.activation == "softplus" else F.elu(b) + 1
    rows, outputs = [], []
    for t in range(x.shape[1]):
        products = (q[:, :, t, None] * k[:, :, : t + 1]).sum(-1, keepdim=True) * 3**-0.5
        u = ((products * a[:, :, : t + 1]).sum(2) / (t + 1)).softmax(-1)  # (B,H,l)
        weights = [(u * a[:, :, j]).sum(-1) / (t + 1) for j in range(t + 1)]
        outputs.append(sum(w[..., None] * k[:, :, j] for j, w in enumerate(weights)))
        rows.append(F.pad(torch.stack(weights, -1), (0, x.shape[1] - t - 1)))
    return module.out(merge(torch.stack(outputs, 2))), torch.stack(rows, 2)


def definition(module, x, p):
    """Two dense attentions: x (B,N,dim), p (B,l,dim) -> y (B,N,dim), what is handed on (B,l,dim)."""
    keys = split(module.pack(x), 2)
    read = merge(dense.weights(split(module.pack_query(p), 2), keys)[0] @ keys)
    slots = split(module.value(read), 2)
    y = module.out(merge(dense.weights(split(module.query(x), 2), slots)[0] @ slots))
    return y, F.layer_norm(p + read, (6,))


class TestCausal:
    @pytest.mark.parametrize("activation", ["softplus", "elu"])
    def test_it_equals_the_sums_written_out(self, activation):
        module, x = build(f"slots=4, activation={activation!r}"), data(2, N, 6).requires_grad_()
        record = {}
        found, (expected, matrix) = module(x, record=record)[0], causal_definition(module, x)
        close(record["matrix"], matrix)
        assert record["mask"].expand(2, 1, N, N).equal(torch.ones(2, 1, N, N, dtype=torch.bool).tril())
        same(found, expected, (x, *module.parameters()))

    def test_it_returns_its_carry(self):
        module, x, carry = build(), data(2, N, 6), data(2, 4, 6, seed=1)
        y, _, handed = module(x, carry=carry)
        assert handed is carry
        close(y, causal_definition(module, x, module.memory + carry)[0])
        state, outputs = module.init_state(2), []
        for token in x.split(1, 1):
            y_t, state, _ = module(token, state, carry=carry)
            outputs.append(y_t)
        close(torch.cat(outputs, 1), y)


class TestBidirectional:
    def test_it_is_two_attentions(self):
        module, x = build(causal=False), data(2, N, 6).requires_grad_()
        found, expected = module(x)[0], definition(module, x, module.memory.expand(2, -1, -1))[0]
        same(found, expected, (x, *module.parameters()))

    @pytest.mark.parametrize("rows", [1, 2])
    def test_the_carry_is_added_and_handed_on(self, rows):
        module, x, carry = build(causal=False), data(2, N, 6), data(rows, 4, 6, seed=1)
        y, _, handed = module(x, carry=carry)
        close([y, handed], [*definition(module, x, (module.memory + carry).expand(2, -1, -1))])

    def test_packed_rows_hand_on_the_slots_of_separate_rows(self):
        module, x = build(causal=False), data(2, N, 6)
        # Four packed sequences, each with separate slots, in the same order for the next layer.
        carry = module.init_carry(x, None)
        for _ in range(2):
            y, _, handed = module(x, segments=SEGMENTS, carry=carry)
            assert handed.shape == (4, 4, 6)
            pieces = [(0, slice(0, 4)), (0, slice(4, 9)), (0, slice(9, 11)), (1, slice(0, 11))]
            for number, (row, part) in enumerate(pieces):
                p = (module.memory + (carry if len(carry) == 1 else carry[number]))[None].reshape(1, 4, 6)
                alone = definition(module, x[row : row + 1, part], p)
                close([y[row, part], handed[number]], [t[0] for t in alone])
            carry = handed


class TestContext:
    @pytest.mark.parametrize("causal", [True, False])
    def test_it_is_packed_once_and_kept(self, causal):
        module, x, context = build(causal=causal), data(2, N, 6), data(2, 7, 6, seed=1)
        mask = torch.arange(7) < torch.tensor([[7], [5]])
        y, state = module(x, context=context.masked_fill(~mask[..., None], torch.nan), context_mask=mask)
        assert state.slots.shape == (2, 2, 4, 3)
        for row, length in enumerate((7, 5)):
            keys = split(module.pack(context[row : row + 1, :length]), 2)
            read = merge(dense.attend(split(module.pack_query(module.memory[None]), 2), keys, keys))
            slots = split(module.value(read), 2)
            expected = module.out(merge(dense.attend(split(module.query(x[row : row + 1]), 2), slots, slots)))
            close(y[row : row + 1], expected)
        close(module(x[:, 3:], state)[0], y[:, 3:])

    def test_it_carries_nothing(self):
        module, x = build(causal=False), data(1, 3, 6)
        with pytest.raises(ValueError, match="carry= and context="):
            module(x, context=x, carry=module.init_carry(x, None))


def test_softplus_is_exact():
    x = torch.tensor([-2000.0, -3.0, 0.0, 1.0, 30.0, 50.0, 70.0, 2000.0], dtype=torch.float64)
    expected = [0.0, math.log2(1.125), 1.0, math.log2(3), math.log2(1 + 2.0**30), 50.0 + 2.0**-50, 70.0, 2000.0]
    assert softplus(x).tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: build("slots=0"), "slots=0 must be at least 1"),
        (lambda: build("activation='relu'"), "unknown activation 'relu' .*; known: elu, softplus"),
        (
            lambda: build("activation='elu'", causal=False),
            "activation='elu' needs causal=True",
        ),
        (
            lambda: build()(data(2, 3, 6), carry=data(2, 5, 6)),
            r"carry must be the slots \(B, 4, 6\) of the layer below, not \(2, 5, 6\)",
        ),
        (lambda: build()(data(2, 3, 6), carry=1), r"carry must be the slots \(B, 4, 6\) of the layer below, not int"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
