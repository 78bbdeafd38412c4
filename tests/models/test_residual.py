"""Residual gates, checkpointing and chunks: how sub-layers join the stream, and what only takes less memory."""

import math

import pytest
import torch

from longspan.models.stacks import gates
from stack_cases import data, stack


class TestGates:
    @pytest.mark.parametrize("name", sorted(gates.GATES))
    def test_a_large_bias_is_the_identity(self, name):
        if name in ("add", "input"):
            pytest.skip("adds the sub-layer's output whatever its gate is")
        torch.manual_seed(0)
        gate = gates.build(f"{name}(bias=40.0)", 8).double()
        x, y = torch.randn(2, 3, 5, 8, dtype=torch.float64)
        torch.testing.assert_close(gate(x, y), x, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("y", [3.0, -3.0])
    @pytest.mark.parametrize("name", ["add", "input", "output", "highway", "sigtanh"])
    def test_by_hand(self, name, y):
        """One channel, x = 2: W (of sigtanh the gate) is 0.1, U 0.2, b 0.5; the gates read relu(y)."""
        gate = gates.build(name if name == "add" else f"{name}(bias=0.5)", 1).double()
        weights = {"stream": 0.1, "gate": 0.1, "value": 0.2}
        with torch.no_grad():
            for part in getattr(gate, "linear", ()):
                gate.linear[part].weight.fill_(weights[part])
        x, r = 2.0, max(y, 0.0)
        sigmoid = lambda t: 1 / (1 + math.exp(-t))  # noqa: E731
        s = sigmoid(0.1 * x + 0.5)
        expected = {
            "add": x + y,
            "input": s * x + r,
            "output": x + sigmoid(0.1 * x - 0.5) * r,
            "highway": s * x + (1 - s) * r,
            "sigtanh": x + sigmoid(0.1 * r - 0.5) * math.tanh(0.2 * r),
        }[name]
        found = gate(torch.full((1, 1, 1), x, dtype=torch.float64), torch.full((1, 1, 1), y, dtype=torch.float64))
        assert found.item() == pytest.approx(expected, rel=1e-12)

    def test_gru_by_hand(self):
        gate = gates.build("gru(bias=0.5)", 1)
        with torch.no_grad():
            for i, name in enumerate(gate.linear):
                gate.linear[name].weight.fill_(0.1 * (i + 1))  # reset y x, update y x, new y x: 0.1 to 0.6
        x, y = 2.0, 3.0
        sigmoid = lambda t: 1 / (1 + math.exp(-t))  # noqa: E731
        r, z = sigmoid(0.1 * y + 0.2 * x), sigmoid(0.3 * y + 0.4 * x - 0.5)
        h = math.tanh(0.5 * y + 0.6 * r * x)
        found = gate(torch.full((1, 1, 1), x), torch.full((1, 1, 1), y))
        assert found.item() == pytest.approx((1 - z) * x + z * h)
        # What the relu takes away is 0.
        assert gate(torch.ones(1, 1, 1), -torch.ones(1, 1, 1)) == gate(torch.ones(1, 1, 1), torch.zeros(1, 1, 1))

    @pytest.mark.parametrize("name", sorted(gates.GATES))
    @pytest.mark.parametrize("prenorm", [True, False])
    def test_any_gate_any_norm(self, name, prenorm):
        made, x = stack(residual=name, prenorm=prenorm), data()
        whole, _ = made(x)
        first, state = made(x[:, :6], made.init_state(2))
        second, _ = made(x[:, 6:], state)
        torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-9, atol=1e-9)


class TestLessMemory:
    @pytest.mark.parametrize(
        ("kind", "attention"), [("plain", "realformer"), ("act(steps=3)", "adaptive_span(span=7, ramp=4)")]
    )
    def test_checkpointing_changes_nothing(self, kind, attention):
        fields = {"stack": kind, "attention": attention, "dropout": 0.2}
        found = []
        for checkpointing in (False, True):
            made, x = stack(checkpointing=checkpointing, **fields).train(), data().requires_grad_()
            torch.manual_seed(5)
            record = {"penalty": None}
            y, _ = made(x, record=record)
            loss = y.square().sum() + record.get("penalty", 0.0)
            found.append((y, torch.autograd.grad(loss, [x, *made.parameters()], allow_unused=True)))
        assert torch.equal(found[0][0], found[1][0])
        for one, two in zip(found[0][1], found[1][1], strict=True):
            assert one is None or torch.equal(one, two)
