"""A long short-term memory, token by token, where every row has its own number of tokens."""

import torch
from torch import Tensor

Memory = tuple[Tensor, Tensor]


def step(gates: Tensor, recur: Tensor, memory: Memory) -> Memory:
    """The memory (hidden, cell), (B,F) each, after a token whose part of the gates is (B,4F); recur (4F,F).

    The gates are those of input, forgetting, new content and output, in this order, as in ``nn.LSTM``.

    Source: Hochreiter and Schmidhuber 1997; the gate of forgetting, Gers et al. 2000.
    """
    hidden, cell = memory
    enter, forget, new, leave = (gates + hidden @ recur.mT).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def run(gates: Tensor, recur: Tensor, memory: Memory, real: Tensor | None) -> tuple[Tensor, Memory]:
    """Step after step: gates (B,N,4F) -> outputs (B,N,F) and the memory at the end; real (B,N), None where all are."""
    outs = []
    for t in range(gates.shape[1]):
        after = step(gates[:, t], recur, memory)
        if real is not None:
            there = real[:, t, None]
            after = torch.where(there, after[0], memory[0]), torch.where(there, after[1], memory[1])
        memory = after
        outs.append(memory[0])
    return torch.stack(outs, 1), memory
