"""Tasks that need a memory, by name, with the interface of gymnasium, and batches of them."""

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Packages that must be installed.
PACKAGES = ("gymnasium", "popgym", "minigrid")


class Task(NamedTuple):
    """Location and properties of an environment.

    ``scale``: factor of its rewards during learning only. ``blind``: what an agent
    without a memory can expect per episode, None if unknown: one suit of four is the right one.
    """

    module: str
    name: str
    scale: float
    blind: float | None


TASKS = {
    "repeat_previous": Task("popgym.envs.repeat_previous", "RepeatPreviousEasy", 10.0, -0.5),
    "repeat_previous_medium": Task("popgym.envs.repeat_previous", "RepeatPreviousMedium", 10.0, -0.5),
    "repeat_previous_hard": Task("popgym.envs.repeat_previous", "RepeatPreviousHard", 10.0, -0.5),
    "autoencode": Task("popgym.envs.autoencode", "AutoencodeEasy", 10.0, -0.5),
    "autoencode_medium": Task("popgym.envs.autoencode", "AutoencodeMedium", 10.0, -0.5),
    "autoencode_hard": Task("popgym.envs.autoencode", "AutoencodeHard", 10.0, -0.5),
    "memory_s7": Task("minigrid", "MiniGrid-MemoryS7-v0", 1.0, None),
}


def make(name: str) -> Any:
    """Return an environment of gymnasium with vector observations and discrete actions.

    Cards and modes are one-hot; of MiniGrid what the agent sees is, 7 by 7 squares, without the direction and the
    mission, which is always the same.

    Source: popgym, Morad et al. 2023 (2303.01859), section 4; MiniGrid, Chevalier-Boisvert et al. 2023 (2306.13831).
    """
    import gymnasium

    task = TASKS[name]
    module: Any = importlib.import_module(task.module)
    if task.module == "minigrid":
        wrappers: Any = importlib.import_module("minigrid.wrappers")
        made = wrappers.ImgObsWrapper(wrappers.OneHotPartialObsWrapper(gymnasium.make(task.name)))
    else:
        made = getattr(module, task.name)()
    return gymnasium.wrappers.FlattenObservation(made)


class Batch:
    """Several environments of one kind, each of which begins its next episode as soon as one has ended.

    ``observations`` (B,observed) and ``first`` (B,), whether they are those before the first action of an episode.
    """

    def __init__(self, environments: Sequence[Any], device: str = "cpu"):
        self.environments, self.device = environments, device
        self.observed: int = environments[0].observation_space.shape[0]
        self.actions = int(environments[0].action_space.n)

    def begin(self, seeds: Sequence[int]) -> None:
        """A first episode in each environment; all that follow come from these seeds, too."""
        begun = [one.reset(seed=seed)[0] for one, seed in zip(self.environments, seeds, strict=True)]
        self._see(begun, [True] * len(begun))
        self._returns = [0.0] * len(begun)

    def step(self, actions: Sequence[int]) -> tuple[Tensor, list[float]]:
        """One action in each -> rewards (B,), and the returns of the episodes that have ended with it.

        An episode that ran out of time has ended like any other: in these tasks the time is part of the task.
        """
        seen, rewards, ended, returns = [], [], [], []
        for i, (one, action) in enumerate(zip(self.environments, actions, strict=True)):
            observation, reward, terminated, truncated, _ = one.step(action)
            self._returns[i] += reward
            if terminated or truncated:
                observation, _ = one.reset()
                returns.append(self._returns[i])
                self._returns[i] = 0.0
            seen.append(observation)
            rewards.append(float(reward))
            ended.append(terminated or truncated)
        self._see(seen, ended)
        return torch.tensor(rewards, device=self.device), returns

    def _see(self, observations: Sequence[Any], first: Sequence[bool]) -> None:
        vectors = torch.stack([torch.as_tensor(one, dtype=torch.float32) for one in observations])
        self.observations, self.first = vectors.to(self.device), torch.tensor(first, device=self.device)
