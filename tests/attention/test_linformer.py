"""Slots that are sums over tokens: identities with dense attention, positions, and what the length allows."""

from typing import Any

import pytest
import torch

import longspan
from longspan.ops.tensors import merge, split
from support.tensors import close, data

N = 11


def build(options="length=11, slots=4") -> Any:
    torch.manual_seed(0)
    return longspan.build(f"linformer({options})", 6, 2, causal=False).double()


def projected(module, x):
    return [split(part(x), 2) for part in (module.query, module.key, module.value)]


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


class TestContext:
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
