"""Proximal policy optimization for recurrent agents: step-by-step acting, learning from whole rows in one call."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .learning import finite
from .tasks import Batch

# logits (B,N,actions), values (B,N), state = agent(observations (B,N,observed), first (B,N) bool, state)
Agent = Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor, Any]]


class Learning(NamedTuple):
    """How an agent learns from a rollout."""

    discount: float  # discount of future rewards, per step
    trace: float  # lambda of the generalized advantage estimate
    clip: float  # clipping range of the ratio of probabilities
    entropy: float  # weight of the entropy in the loss
    value: float  # weight of the values' squared error
    epochs: int  # epochs per rollout
    parts: int  # updates per epoch, each of whole rows
    norm: float = 0.5  # maximum gradient norm


class Rollout(NamedTuple):
    """N steps of B environments and the agent.

    ``first``: an episode begins with this observation; ``ended``: one ends with this action. ``state`` is the agent's
    before the first step, ``after`` (B,) the value after the last one.
    """

    observations: Tensor  # (B,N,observed)
    first: Tensor  # (B,N) bool
    actions: Tensor  # (B,N) int64
    log_probs: Tensor  # (B,N)
    values: Tensor  # (B,N)
    rewards: Tensor  # (B,N)
    ended: Tensor  # (B,N) bool
    state: Any
    after: Tensor

    def rows(self, rows: Tensor) -> "Rollout":
        """The given rows of everything."""
        return pytree.tree_map(lambda t: t[rows], self)


@torch.no_grad()
def play(
    agent: Agent, batch: Batch, state: Any, steps: int, generator: torch.Generator, scale: float = 1.0
) -> tuple[Rollout, Any, list[float]]:
    """Act for some steps with sampled actions -> the rollout, the agent's state after it, and
    the returns of all finished episodes. ``scale`` multiplies the rollout's rewards, not the returns.
    """
    begun, kept, returns = state, [], []
    for _ in range(steps):
        seen, first = batch.observations, batch.first
        logits, values, state = agent(seen[:, None], first[:, None], state)
        chances = logits[:, 0].log_softmax(-1)
        # Sampled on the CPU, so that every device draws the same actions.
        actions = torch.multinomial(chances.exp().cpu(), 1, generator=generator).to(chances.device)
        rewards, done = batch.step(actions[:, 0].tolist())
        taken = chances.gather(1, actions)[:, 0]
        kept.append((seen, first, actions[:, 0], taken, values[:, 0], rewards * scale, batch.first))
        returns += done
    _, after, _ = agent(batch.observations[:, None], batch.first[:, None], state)
    seen, first, actions, taken, values, rewards, ended = (torch.stack(column, 1) for column in zip(*kept, strict=True))
    return Rollout(seen, first, actions, taken, values, rewards, ended, begun, after[:, 0]), state, returns


def advantages(rollout: Rollout, discount: float, trace: float) -> Tensor:
    """Generalized advantage estimates (B,N).

    A_t = delta_t + discount trace A_{t+1}, delta_t = r_t + discount V_{t+1} - V_t; nothing follows the last action of
    an episode.

    Source: Schulman et al. 2015 (1506.02438), eq. 16.
    """
    found, value, advantage = [], rollout.after, torch.zeros_like(rollout.after)
    for t in reversed(range(rollout.rewards.shape[1])):
        goes_on = discount * (~rollout.ended[:, t]).to(value.dtype)
        delta = rollout.rewards[:, t] + goes_on * value - rollout.values[:, t]
        advantage = delta + goes_on * trace * advantage
        value = rollout.values[:, t]
        found.append(advantage)
    return torch.stack(found[::-1], 1)


def clipped(ratio: Tensor, advantage: Tensor, clip: float) -> Tensor:
    """-min(ratio A, clamp(ratio, 1 - clip, 1 + clip) A), for each action.

    Source: Schulman et al. 2017 (1707.06347), eq. 7.
    """
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)


def objective(agent: Agent, rollout: Rollout, advantage: Tensor, learning: Learning) -> Tensor:
    """The loss of some rows, read in one call from the state before them, episode after episode.

    ``advantage`` (B,N); it is standardized here. The values learn advantage + old value.

    Source: Schulman et al. 2017 (1707.06347), eq. 9.
    """
    logits, values, _ = agent(rollout.observations, rollout.first, rollout.state)
    chances = logits.log_softmax(-1)
    taken = chances.gather(-1, rollout.actions[..., None])[..., 0]
    even = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    policy = clipped((taken - rollout.log_probs).exp(), even, learning.clip).mean()
    error = F.mse_loss(values, advantage + rollout.values) / 2
    entropy = -(chances.exp() * chances).sum(-1).mean()
    return policy + learning.value * error - learning.entropy * entropy


def learn(
    agent: nn.Module, optimizer: torch.optim.Optimizer, rollout: Rollout, learning: Learning, generator: torch.Generator
) -> None:
    """Make all updates from one rollout. Its initial state stays fixed while the weights change."""
    advantage = advantages(rollout, learning.discount, learning.trace)
    for _ in range(learning.epochs):
        for rows in torch.randperm(len(advantage), generator=generator).chunk(learning.parts):
            loss = finite(objective(agent, rollout.rows(rows), advantage[rows], learning), "in an update of an agent")
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), learning.norm)
            optimizer.step()
