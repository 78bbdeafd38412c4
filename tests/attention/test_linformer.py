"""Slots that are sums over tokens: identities with dense attention, positions, and what the length allows."""

from typing import Any

import pytest
import torch

import longspan
from longspan.ops.softmax import dense
from longspan.ops.tensors import merge, split
from support.tensors import close, data, same

MASK = torch.tensor([[True] * 3 + [False] * 2 + [True] * 6, [False] + [True] * 10])
N = 11


def build(options="length=11, slots=4") -> Any:
    torch.manual_seed(0)
    return longspan.build(f"linformer({options})", 6, 2, causal=False).double()


def projected(module, x):
    return [split(part(x), 2) for part in (module.query, module.key, module.value)]


def fill(module, key_slots, value_slots):
    with torch.no_grad():
        module.key_slots.copy_(key_slots)
        module.value_slots.copy_(value_slots)


def test_a_case_by_hand():
    """One channel, two tokens, one slot: the softmax has one term, so the output is the weighted sum of the values."""
    module = longspan.build("linformer(length=3, slots=1)", 1, 1, causal=False).double()
    for part in (module.query, module.key, module.value, module.out):
        torch.nn.init.ones_(part.weight)
        torch.nn.init.zeros_(part.bias)
    fill(module, torch.tensor([5.0, 7.0, 9.0]), torch.tensor([2.0, 3.0, 100.0]))
    x = torch.tensor([[[1.0], [10.0]]], dtype=torch.float64)
    assert module(x)[0].flatten().tolist() == [32.0, 32.0]
    # Two slots with keys 0 and ln 3 for a query of 1: weights 1/4 and 3/4 of values 4 and 8.
    module = longspan.build("linformer(length=1, slots=2)", 1, 1, causal=False).double()
    for part in (module.query, module.key, module.value, module.out):
        torch.nn.init.ones_(part.weight)
        torch.nn.init.zeros_(part.bias)
    fill(module, torch.tensor([[0.0], [1.0986122886681098]]), torch.tensor([[4.0], [8.0]]))
    assert module(torch.ones(1, 1, 1).double())[0].item() == pytest.approx(7.0)


def test_rows_of_one_entry_select_keys():
    module, x, chosen = build("length=11, slots=3"), data(2, N, 6), [7, 0, 4]
    fill(module, *[torch.eye(11)[chosen]] * 2)
    q, k, v = projected(module, x)
    close(module(x)[0], module.out(merge(dense.attend(q, k[:, :, chosen], v[:, :, chosen]))))


def test_block_means_are_attention_to_block_means():
    module, x = build("length=12, slots=4"), data(2, 12, 6)
    fill(module, *[torch.eye(4, dtype=torch.float64).repeat_interleave(3, 1) / 3] * 2)
    q, k, v = projected(module, x)
    means = [t.unflatten(2, (4, 3)).mean(3) for t in (k, v)]
    close(module(x)[0], module.out(merge(dense.attend(q, *means))))


def test_keys_and_values_have_separate_matrices():
    """E projects the keys and F the values; compared with a dense form, head by head."""
    for share in ("none", "headwise"):
        module, x = build(f"length=13, slots=4, share={share!r}"), data(2, N, 6)
        q, k, v = projected(module, x)
        e, f = module.key_slots[..., :N], module.value_slots[..., :N]
        p = (q @ (e @ k).mT * 3**-0.5).softmax(-1)
        close(module(x)[0], module.out(merge(p @ (f @ v))))
        record = {}
        module(x, record=record)
        close(record["matrix"], p @ f)
    assert build("length=13, slots=4, share='none'").key_slots.shape == (2, 4, 13)
    assert not hasattr(build("length=13, slots=4, share='key-value'"), "value_slots")


@pytest.mark.parametrize("share", ["none", "headwise", "key-value"])
def test_the_recorded_matrix_is_the_definition(share):
    """Outputs and gradients of dense products under the recorded matrix, with padding and packing."""
    module, x = build(f"length=13, slots=4, share={share!r}"), data(2, N, 6).requires_grad_()
    segments = torch.tensor([[0] * 4 + [2] * 7, [1] * 11])
    for arguments in ({}, {"mask": MASK}, {"segments": segments}, {"mask": MASK, "segments": segments}):
        record, real = {}, arguments.get("mask", torch.ones_like(MASK))
        y = module(x, record=record, **arguments)[0]
        expected = module.out(merge(record["matrix"] @ split(module.value(x), 2)))
        assert not record["matrix"].masked_select(~record["mask"]).any()
        same(y[real], expected[real], (x, module.key.weight, module.value.weight))


def test_permuting_tokens_with_their_columns_changes_nothing():
    module, x, order = build(), data(2, N, 6), torch.randperm(N, generator=torch.Generator().manual_seed(3))
    y = module(x)[0]
    assert (module(x[:, order])[0] - y[:, order]).abs().max() > 1e-3
    fill(module, module.key_slots[..., order].clone(), module.value_slots[..., order].clone())
    close(module(x[:, order])[0], y[:, order])


def test_values_of_one_give_the_sum_of_their_weights():
    module, x = build(), data(2, N, 6)
    record = {}
    module(x, record=record)
    q, k, _ = projected(module, x)
    p = (q @ (module.key_slots @ k).mT * 3**-0.5).softmax(-1)
    close(record["matrix"].sum(-1), (p * module.value_slots[0].sum(-1)).sum(-1))


class TestContext:
    def test_it_is_packed_once_and_kept(self):
        module, x, context = build("length=9, slots=4"), data(2, N, 6), data(2, 7, 6, seed=1)
        y, state = module(x, context=context)
        assert [tuple(t.shape) for t in state] == [(2, 2, 4, 3)] * 2
        q, k, v = split(module.query(x), 2), split(module.key(context), 2), split(module.value(context), 2)
        e, f = module.key_slots[..., :7], module.value_slots[..., :7]
        close(y, module.out(merge(dense.attend(q, e @ k, f @ v))))
        close(module(x[:, 3:], state)[0], y[:, 3:])

    def test_the_record_describes_the_context(self):
        module, x, context = build("length=9, slots=4"), data(2, N, 6), data(2, 7, 6, seed=1)
        mask = torch.arange(7) < torch.tensor([[7], [5]])
        record = {}
        y, _ = module(x, context=context, context_mask=mask, record=record)
        assert record["mask"].expand(2, 1, N, 7).equal(mask[:, None, None].expand(2, 1, N, 7))
        close(y, module.out(merge(record["matrix"] @ split(module.value(context), 2))))


class TestLength:
    message = "12 tokens are more than length=11"

    def test_longer_sequences_are_refused(self):
        module, x = build(), data(2, 12, 6)
        with pytest.raises(ValueError, match=self.message):
            module(x)
        with pytest.raises(ValueError, match=self.message):
            module(x, mask=torch.ones(2, 12, dtype=torch.bool))
        with pytest.raises(ValueError, match=self.message):
            module(x[:, :3], context=x)

    @pytest.mark.parametrize("counts", [(12, 3), (3, 12), (12, 0)])
    def test_a_row_that_is_too_long_is_refused_next_to_a_short_one(self, counts):
        module, x = build(), data(2, 14, 6)
        mask = torch.arange(14) < torch.tensor(counts)[:, None]
        with pytest.raises(ValueError, match=self.message):
            module(x, mask=mask)
        with pytest.raises(ValueError, match=self.message):
            module(x[:, :3], context=x, context_mask=mask)

    def test_padding_does_not_count(self):
        module, x = build(), data(2, 12, 6)
        mask = torch.arange(12) != 4
        close(module(x, mask=mask.expand(2, -1))[0][:, mask], module(x[:, mask])[0])
        close(module(x, mask=~mask.expand(2, -1))[0][:, ~mask], module(x[:, ~mask])[0])

    def test_a_shorter_one_uses_the_first_columns(self):
        module, short, x = build("length=29, slots=4"), build(), data(2, N, 6)
        weights = module.state_dict()
        short.load_state_dict({n: w[..., :N] if "slots" in n else w for n, w in weights.items()})
        close(module(x)[0], short(x)[0])


@pytest.mark.parametrize("share", ["none", "headwise", "key-value"])
@pytest.mark.parametrize("slots", [4, 64])
def test_slots_have_variance_1_over_their_number(slots, share):
    """Theorem 2 of the paper: E and F are normal with mean 0 and variance 1 / S, so that sizes are kept on average."""
    module = build(f"length={65536 // slots}, slots={slots}, share={share!r}")
    assert {n for n, _ in module.named_parameters() if "slots" in n} == (
        {"key_slots"} if share == "key-value" else {"key_slots", "value_slots"}
    )
    for name, weight in module.named_parameters():
        if "slots" in name:
            # The standard error of the variance of 65536 numbers is 0.6 %.
            assert weight.var().item() * slots == pytest.approx(1.0, abs=0.03), name
            assert abs(weight.mean().item()) * slots**0.5 < 0.03, name
            within = (weight.abs() < slots**-0.5).double().mean().item()
            assert within == pytest.approx(0.6827, abs=0.01), name
