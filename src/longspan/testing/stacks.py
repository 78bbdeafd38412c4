"""Laws of stacks: checkpointing, reversible blocks and adaptive computation time."""

from typing import Any

import torch
from torch import Tensor, nn

from ..models.stacks.universal import Act
from .gauge import BATCH, DIM, TOKENS, Gauge, Subject

CHUNKS = (1, 8, TOKENS + 1)
# Biases of the halting unit: all steps are taken, some, one.
LEANINGS = (-6.0, -1.0, 0.5, 6.0)


def less_memory(subject: Subject, gauge: Gauge) -> None:
    """Checkpointed blocks have bitwise equal gradients, dropout included; feed-forward chunks equal up to rounding."""
    plain = _gradients(subject, {})
    gauge.close(_gradients(subject, {"checkpointing": True}), plain, "checkpointed blocks", 0.0)
    for chunk in CHUNKS:
        found = _gradients(subject, {"feedforward_chunk": chunk, "dropout": 0.0})
        gauge.close(
            found, _gradients(subject, {"dropout": 0.0}), f"{chunk} tokens of the feed-forward network at a time"
        )


def reversible(subject: Subject, gauge: Gauge) -> None:
    """A reversible stack has autograd's gradients, dropout included; its backward draws no random numbers."""
    found, expected = (_gradients(subject, {}, wrapped) for wrapped in (lambda module: module, _Walked))
    gauge.close(found, expected, "gradients against those of autograd")


def ponder(subject: Subject, gauge: Gauge) -> None:
    """Halting weights sum to one, also at the step limit; the cost is N + R and its gradient that of R."""
    module, constant = subject.make(), subject.data()
    module.norm = nn.Identity()
    act: Act = module.run
    for block in module.blocks:
        # Every step returns the same vectors, so the output is these times the sum of the weights.
        block.register_forward_hook(lambda _m, _i, made: (constant, *made[1:]))
    for leaning in LEANINGS:
        with torch.no_grad():
            act.bias.fill_(leaning)
            act.halt.copy_(torch.linspace(-0.5, 0.5, DIM, device=subject.device))
        for state in (None, module.init_state(BATCH) if subject.causal else None):
            record: dict[str, Any] = {"penalty": None}
            what = f"a halting unit with bias {leaning:g}{'' if state is None else ', with a state'}"
            y, _ = module(constant, state, record=record)
            gauge.close(y, constant, f"{what}: the sum of the weights")
            h = torch.sigmoid(constant @ act.halt + act.bias)
            # The first n with n h >= 1 - eps, or the cap.
            count = torch.ceil((1 - act.threshold) / h).clamp(1, act.steps)
            gauge.close(record["steps"], count, f"{what}: steps", 0.0)
            gauge.close(record["ponder"], count + 1 - (count - 1) * h, f"{what}: N + R")
            gauge.close(record["penalty"], record["ponder"].mean(), f"{what}: the penalty")
            (slope,) = torch.autograd.grad(record["penalty"], act.bias)
            gauge.close(slope, (-(count - 1) * h * (1 - h)).mean(), f"{what}: the gradient of the penalty")


class _Walked(nn.Module):
    """A reversible stack without its own backward, for autograd."""

    def __init__(self, module: Any):
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        one = two = x
        for block in self.module.blocks:
            one = one + block.attention_branch(two)[0]
            two = two + block.ffn_branch(one)
        return self.module.norm((one + two) / 2), None


def _gradients(subject: Subject, fields: dict[str, Any], wrapped: Any = lambda module: module) -> list[Tensor]:
    """Outputs, gradients of x and of all weights in training mode, and the generator's state afterwards."""
    module = wrapped(subject.make(fields={"dropout": 0.2} | fields)).train()
    x = subject.data().requires_grad_()
    with subject.fork_generators():
        torch.manual_seed(3)
        y, _ = module(x)
        upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        found = torch.autograd.grad(y, [x, *module.parameters()], upstream, allow_unused=True)
        after = subject.generator_state()
    wanted = [x, *module.parameters()]
    return [y, *(torch.zeros_like(w) if g is None else g for w, g in zip(wanted, found, strict=True)), after]
