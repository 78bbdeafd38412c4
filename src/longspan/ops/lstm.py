"""A long short-term memory, token by token, with a separate number of tokens per row."""

import torch
from torch import Tensor

Memory = tuple[Tensor, Tensor]


def step(gates: Tensor, recur: Tensor, memory: Memory) -> Memory:
    """Return the memory after one token.

    Args:
        gates: (B,4F), the part of the gates that the token gives: input, forget, cell and output, as in ``nn.LSTM``.
        recur: (4F,F), the recurrent weights.
        memory: (hidden, cell), (B,F) each.

    Returns:
        The next (hidden, cell).

    References:
        Hochreiter and Schmidhuber 1997; the forget gate, Gers et al. 2000.
    """
    hidden, cell = memory
    enter, forget, new, leave = (gates + hidden @ recur.mT).chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def run(gates: Tensor, recur: Tensor, memory: Memory, real: Tensor | None) -> tuple[Tensor, Memory]:
    """Run ``step`` on gates (B,N,4F) -> outputs (B,N,F) and the last memory; real (B,N) bool, None = all tokens."""
    outs = []
    for t in range(gates.shape[1]):
        after = step(gates[:, t], recur, memory)
        if real is not None:
            there = real[:, t, None]
            after = torch.where(there, after[0], memory[0]), torch.where(there, after[1], memory[1])
        memory = after
        outs.append(memory[0])
    return torch.stack(outs, 1), memory
