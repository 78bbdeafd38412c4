"""Agents of equal size: recurrent networks that map observations to action logits and values."""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from longspan._utils import model_memory
from longspan._utils.spec import known
from longspan.models.config import StackConfig
from longspan.models.stacks import Stack
from longspan.ops import lstm

from .experiment import drawing
from .learning import closest, parameters

# name -> attention ("" for an LSTM), whether sub-layers are pre-norm, how they join the residual stream
CORES: dict[str, tuple[str, bool, str]] = {
    "LSTM": ("", False, "add"),
    "TrXL": ("transformer_xl(memory={memory})", False, "add"),
    "TrXL-I": ("transformer_xl(memory={memory})", True, "add"),
    "GTrXL": ("transformer_xl(memory={memory})", True, "gru"),
    "gated_deltanet": ("gated_deltanet", True, "add"),
}


class Transformer(nn.Module):
    """A stack in which an episode sees its observations alone."""

    def __init__(self, config: StackConfig):
        super().__init__()
        self.stack = Stack(config)

    def start(self, batch: int) -> Any:
        """The state before the first observation."""
        return self.stack.init_state(batch)

    def forward(self, x: Tensor, first: Tensor, state: Any) -> tuple[Tensor, Any]:
        """x (B,N,dim), first (B,N) bool, the state before column 0 -> y (B,N,dim), the state after."""
        episodes = F.pad(first[:, 1:].long().cumsum(1), (1, 0))
        return self.stack(x, state, segments=episodes if x.shape[1] > 1 else None)


class LSTM(nn.Module):
    """One layer of a long short-term memory; arguments as in ``Transformer``."""

    def __init__(self, dim: int):
        super().__init__()
        self.dim = dim
        self.enter = nn.Linear(dim, 4 * dim)
        self.recur = nn.Parameter(torch.empty(4 * dim, dim).uniform_(-(dim**-0.5), dim**-0.5))

    def start(self, batch: int) -> lstm.Memory:
        zeros = self.recur.new_zeros(batch, self.dim)
        return zeros, zeros.clone()

    def forward(self, x: Tensor, first: Tensor, state: lstm.Memory) -> tuple[Tensor, lstm.Memory]:
        gates, outs = self.enter(x), []
        for t in range(x.shape[1]):
            if t:
                begins = first[:, t, None]
                state = state[0].masked_fill(begins, 0.0), state[1].masked_fill(begins, 0.0)
            state = lstm.step(gates[:, t], self.recur, state)
            outs.append(state[0])
        return torch.stack(outs, 1), state


class Agent(nn.Module):
    """``logits, values, state = agent(observations, first, state)``, one step or many per call, with equal results.

    observations (B,N,observed); first (B,N) bool, where an episode begins, which does not see earlier ones ->
    logits (B,N,actions), values (B,N), the state after them. ``kind``: one of KINDS, ``depth`` blocks of which have a
    feed-forward network twice as wide as themselves; an LSTM has one layer.

    Raises ValueError for an unknown kind, and for sizes that do not fit each other.
    """

    def __init__(self, kind: str, dim: int, observed: int, actions: int, *, depth: int, heads: int, memory: int):
        super().__init__()
        attention, prenorm, residual = CORES[known(kind, CORES, "agent")]
        self.read = nn.Linear(observed, dim)
        if attention:
            config = StackConfig(dim=dim, depth=depth, heads=heads, feedforward=2 * dim, activation="relu")
            spec = attention.format(memory=memory)
            self.core: Any = Transformer(replace(config, attention=spec, prenorm=prenorm, residual=residual))
        else:
            self.core = LSTM(dim)
        self.policy, self.value = nn.Linear(dim, actions), nn.Linear(dim, 1)
        with torch.no_grad():
            # All actions are about equally likely at first.
            self.policy.weight.mul_(0.01)

    def init_state(self, batch: int) -> Any:
        """The state before the first observation."""
        return self.core.start(batch)

    def forward(self, observations: Tensor, first: Tensor, state: Any) -> tuple[Tensor, Tensor, Any]:
        """Apply the model; the class documents the shapes."""
        if first[:, 0].any():
            fresh, begins = self.init_state(len(first)), first[:, 0]
            state = pytree.tree_map(
                lambda new, old: torch.where(begins.view(-1, *(1,) * (old.dim() - 1)), new, old), fresh, state
            )
        y, state = self.core(self.read(observations), first, state)
        return self.policy(y), self.value(y)[..., 0], state


def count(kind: str, dim: int, observed: int, actions: int, **sizes: int) -> int:
    """Count the parameters of an agent of this width."""
    return parameters(model_memory.shapes(lambda: Agent(kind, dim, observed, actions, **sizes)))


def fitting(kind: str, wanted: int, observed: int, actions: int, *, heads: int, **sizes: int) -> int:
    """The width, a multiple of ``heads``, whose parameter count is closest to the given one."""
    sizes |= {"heads": heads}
    return heads * closest(lambda width: count(kind, width * heads, observed, actions, **sizes), wanted)


def born(seed: int, kind: str, dim: int, observed: int, actions: int, **sizes: int) -> Agent:
    """An agent with initial weights that depend on the seed alone."""
    with drawing(seed, "weights"):
        return Agent(kind, dim, observed, actions, **sizes)
