"""Reinforcement learning with a memory: GTrXL, transformers without its gates, and an LSTM."""

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch

from longspan._utils.spec import known

from .._utils import palette, plots
from .._utils.tables import Table
from . import agents, tasks
from .experiment import DEVICES, Buildable, Experiment, Place, Result, Row, check_device, generator, setting
from .learning import keep, parameters, resumed
from .ppo import Learning, learn, play

LAST = 0.1  # last part of the curve that the table averages


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    tasks: tuple[str, ...] = setting(
        ("repeat_previous", "autoencode"),
        f"of {', '.join(tasks.TASKS)}",
        quick=("repeat_previous",),
        gpu=("repeat_previous", "autoencode", "memory_s7"),
    )
    agents: tuple[str, ...] = setting(
        tuple(agents.CORES), f"of {', '.join(agents.CORES)}", quick=("LSTM", "GTrXL", "gated_deltanet")
    )
    seeds: tuple[int, ...] = setting(
        (0, 1, 2), "seeds of weights, episodes and actions; one training each", least=0, quick=(0, 1)
    )
    steps: int = setting(90_000, "environment steps per training", least=1, quick=220, gpu=3_000_000)
    environments: int = setting(32, "number of parallel environments", least=1, quick=2, gpu=64)
    rollout: int = setting(
        104, "steps per environment between two updates; gradients reach that far", least=1, quick=55, gpu=128
    )
    block: int = setting(2, "rollouts after which all episodes restart and the training is saved", least=1, quick=1)
    parameters: int = setting(
        60_000, "number of parameters per agent, which sets its width", least=1, quick=600, gpu=400_000
    )
    depth: int = setting(2, "number of transformer blocks; an LSTM has one layer", least=1, quick=1, gpu=3)
    heads: int = setting(2, "heads of each attention", least=1, gpu=4)
    memory: int = setting(128, "observations in the memory of a Transformer-XL", least=1, quick=8)
    rate: float = setting(2e-3, "initial learning rate; it falls linearly to 0", positive=True, gpu=5e-4)
    discount: float = setting(0.5, "discount of future rewards, per step", gpu=0.99)
    trace: float = setting(0.95, "lambda of the generalized advantage estimate")
    clip: float = setting(0.2, "clipping range of the ratio of new and old probabilities")
    entropy: float = setting(0.01, "weight of the entropy")
    value: float = setting(0.5, "weight of the values' squared error")
    epochs: int = setting(4, "epochs per rollout", least=1, quick=1)
    parts: int = setting(4, "updates per epoch", least=1, quick=2)
    device: str = setting("cpu", "device of the agents: cpu | cuda", among=DEVICES, gpu="cuda")

    def __post_init__(self):
        super().__post_init__()
        for name in self.tasks:
            known(name, tasks.TASKS, "task")
        for name in ("discount", "trace", "clip"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must be in [0, 1]")
        for name in ("entropy", "value"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if self.parts > self.environments:
            raise ValueError(f"parts={self.parts} of environments={self.environments}: each needs one at least")
        if self.environments * self.rollout // self.parts < 2:
            raise ValueError("an update needs two steps at least; take more environments or longer rollouts")
        if self.steps < self.each:
            raise ValueError(
                f"steps={self.steps} is less than a block: {self.block} rollouts of {self.rollout} steps in each of "
                f"{self.environments} environments are {self.each}"
            )

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for kind in self.agents:
            agents.count(kind, self.heads, 4, 4, **self.sizes)

    @property
    def each(self) -> int:
        """Steps of a block."""
        return self.environments * self.rollout * self.block

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that the agents share."""
        return {"depth": self.depth, "heads": self.heads, "memory": self.memory}

    @property
    def learning(self) -> Learning:
        """How they learn."""
        return Learning(self.discount, self.trace, self.clip, self.entropy, self.value, self.epochs, self.parts)


def points(settings: Settings) -> list[Row]:
    """Every agent in every task, once for each seed. Raises ValueError if the requested GPU is missing."""
    check_device(settings.device)
    return [
        {"task": task, "agent": kind, "seed": seed}
        for task in settings.tasks
        for seed in settings.seeds
        for kind in settings.agents
    ]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training -> ``parameters`` and ``dim`` of the agent; ``curve``: [steps so far, mean return of the episodes
    that ended in the block before, None where none has].
    """
    task, kind, seed = point["task"], point["agent"], point["seed"]
    batch = tasks.Batch([tasks.make(task) for _ in range(settings.environments)], settings.device)
    seen = batch.observed, batch.actions
    dim = agents.fitting(kind, settings.parameters, *seen, **settings.sizes)
    agent = agents.born(seed, kind, dim, *seen, **settings.sizes).to(settings.device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=settings.rate, eps=1e-5)
    name, blocks, first, curve = f"{task}-{kind}-{seed}", settings.steps // settings.each, 0, []
    if kept := resumed(place, name, agent=agent, optimizer=optimizer):
        first, curve = kept["blocks"], kept["curve"]
    for block in place.track(range(first, blocks), blocks - first, name):
        returns = trained(settings, agent, optimizer, batch, task, seed, block)
        curve.append([(block + 1) * settings.each, round(mean(returns), 5) if returns else None])
        keep(place, name, {"blocks": block + 1, "curve": curve}, agent=agent, optimizer=optimizer)
    return {"parameters": parameters(agent), "dim": dim, "curve": curve}


def trained(
    settings: Settings,
    agent: agents.Agent,
    optimizer: torch.optim.Optimizer,
    batch: tasks.Batch,
    task: str,
    seed: int,
    block: int,
) -> list[float]:
    """Learn for a block, which depends only on the weights and the optimizer before it -> the returns of
    the episodes that ended in it.
    """
    chance = generator(seed, task, "episodes", block)
    batch.begin(torch.randint(1 << 31, (settings.environments,), generator=chance).tolist())
    state, returns = agent.init_state(settings.environments), []
    for i in range(settings.block):
        gone = (block + i / settings.block) / (settings.steps // settings.each)
        optimizer.param_groups[0]["lr"] = settings.rate * (1 - gone)
        rollout, state, ended = play(agent, batch, state, settings.rollout, chance, tasks.TASKS[task].scale)
        learn(agent, optimizer, rollout, settings.learning, chance)
        returns += ended
    return returns


def ends(row: Row) -> float | None:
    """The mean return over the last tenth of a training; None where no episode has ended in it."""
    curve = [value for _, value in row["curve"][-max(1, round(LAST * len(row["curve"]))) :] if value is not None]
    return mean(curve) if curve else None


def _grouped(result: Result) -> Iterator[tuple[str, str, list[Row]]]:
    """(task, agent, its trainings), in the order of the settings."""
    for task in result["settings"]["tasks"]:
        for kind in result["settings"]["agents"]:
            if rows := [row for row in result["rows"] if (row["task"], row["agent"]) == (task, kind)]:
                yield task, kind, rows


def tables(result: Result) -> list[Table]:
    """Return of each agent at the end of its training: the mean over the seeds, and every one."""
    seeds = result["settings"]["seeds"]
    head = ["return at the end", "parameters", "width", "mean", *(f"seed {seed}" for seed in seeds), "without memory"]
    found: dict[str, Table] = {}
    for task, kind, rows in _grouped(result):
        values = {row["seed"]: ends(row) for row in rows}
        known_ = [value for value in values.values() if value is not None]
        cells = [_shown(mean(known_) if known_ else None), *(_shown(values.get(seed)) for seed in seeds)]
        table = found.setdefault(task, [[f"{task}: {head[0]}", *head[1:]]])
        facts = [f"{rows[0]['parameters']:,}", str(rows[0]["dim"])]
        table.append([kind, *facts, *cells, _shown(tasks.TASKS[task].blind)])
    return list(found.values())


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def draw(plt: Any, result: Result) -> Any:
    """Return by steps, a panel for each task: the mean over the seeds, and the range between the least and the most."""
    names = [task for task in result["settings"]["tasks"] if any(row["task"] == task for row in result["rows"])]
    figure, axes = plt.subplots(
        1, len(names), figsize=(4.5 * max(len(names), 1), 4.0), layout="constrained", squeeze=False
    )
    panels = dict(zip(names, axes[0], strict=True))
    looks = palette.looks(agents.CORES)
    for task, kind, rows in _grouped(result):
        curves = [[value for _, value in row["curve"]] for row in rows]
        values = [[v for v in column if v is not None] for column in zip(*curves, strict=True)]
        known = [(step, column) for (step, _), column in zip(rows[0]["curve"], values, strict=True) if column]
        steps = [step for step, _ in known]
        color = looks[kind].color
        panels[task].plot(steps, [mean(column) for _, column in known], ".-", color=color, label=kind)
        least, most = [min(column) for _, column in known], [max(column) for _, column in known]
        panels[task].fill_between(steps, least, most, color=color, alpha=0.15, linewidth=0)
    for task, axis in panels.items():
        if (blind := tasks.TASKS[task].blind) is not None:
            axis.axhline(blind, color="grey", linewidth=1, linestyle="--", label="without memory")
        axis.set(title=task, xlabel="steps in the environment", ylabel="mean return of an episode")
        axis.grid(alpha=0.3)
    plots.legend(figure, axes.flat)
    return figure


EXPERIMENT = Experiment(
    about="tasks that need a memory, learned by PPO: GTrXL, Transformer-XL without gates, and an LSTM of equal size",
    scales=Settings.scales("gpu"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source=(
        "Parisotto et al. 2019 (1910.06764), section 4, where GTrXL, Transformer-XL and LSTMs play DMLab-30 and other "
        "games; the tasks are those of Morad et al. 2023 (2303.01859), section 4, and of MiniGrid"
    ),
    differs=(
        "Published agents are far larger, see pictures, and train much longer with another algorithm, V-MPO. Here "
        "small agents learn card games of popgym, or MiniGrid's MemoryS7, by PPO, with the same number of steps each. "
        "All have about the same number of parameters, so an LSTM of one layer and a Transformer-XL without gates are "
        "wider than GTrXL. TrXL normalizes after each sub-layer, as Transformer-XL was published. TrXL-I normalizes "
        "before it, which is the identity map reordering without gates. GTrXL adds gates (GRU) to that. The last two "
        "have one more normalization at the end, and TrXL-I has no ReLU before its sums. Feed-forward networks are "
        "twice as wide as the model. Learning rate and discount were chosen by short trainings of LSTM and GTrXL on "
        "repeat_previous, and not for each agent. States carry over from rollout to rollout and restart with each "
        "episode; gradients reach back to the start of a rollout. Every few rollouts all episodes restart, so that an "
        "interrupted training resumes with the same numbers. An episode that runs out of time counts as ended. Card "
        "rewards are multiplied by 10 for learning and not in the figures. At laptop scale the discount is 0.5, "
        "because actions do not influence the cards. A curve shows training episodes, with sampled actions."
    ),
    needs=tasks.PACKAGES,
    minutes=10.5,
)
