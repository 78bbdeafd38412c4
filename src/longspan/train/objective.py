"""Objectives: what a kind of model is trained to do, from the examples of a step to the figures of an evaluation.

The engine knows steps, checkpoints and reports, and an objective knows the model and its data. ``build`` finds the one
that a model is trained by; ``OBJECTIVES`` has one per kind of model.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..attention import Attention
from ..data import Dataset
from ..data.order import batch_indices
from ..model import Decoder
from ..ops.edges import reinforce
from .evaluate import roomy, total
from .run import Run


class Loss(NamedTuple):
    """What came of one micro-batch."""

    total: Tensor  # (), what the step goes down
    parts: dict[str, Tensor]  # () each, detached: ``loss`` in nats per token, and further columns of metrics.csv


class Objective(nn.Module, ABC):
    """What a model is trained to do on a data set: how a batch is drawn, its loss, and what an evaluation reports.

    Parameters of its own, such as heads that only training needs, are trained with the model's; they and its buffers,
    such as states that are carried from one micro-batch to the next, are part of the checkpoint a run goes on from, and
    never of the model's weights. Buffers are those of one process, so what carries them refuses ``devices`` > 1.
    """

    def __init__(self, run: Run, dataset: Dataset):
        super().__init__()
        self.run, self.dataset = run, dataset
        # What the layers with statistics have counted since the last step.
        self.statistics: dict[int, Any] = {}

    @property
    def tokens(self) -> float:
        """Tokens of an example, for the figure of tokens per second."""
        return self.dataset.length

    def batch(self, index: int, rank: int, world: int) -> Any:
        """The examples of micro-batch number ``index`` on ``rank``, a function of these alone: a pytree of tensors."""
        count = self.dataset.count("train")
        return self.dataset.take("train", batch_indices(count, self.run.seed, index, self.run.batch, rank, world))

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Loss:
        """The loss of one micro-batch, the model in training mode. What the layers count is kept for ``update``."""

    @abstractmethod
    def sums(self, model: Any, split: str, rank: int = 0, world: int = 1) -> Tensor:
        """Sums over ``rank``'s part of a split, to be added over the ranks and read by ``figures``: float64 (n,)."""

    @abstractmethod
    def figures(self, sums: Tensor) -> dict[str, float]:
        """What an evaluation reports: ``bits`` per token, of which the fewest are the best, and other figures."""

    def score(self, model: Any, split: str) -> dict[str, float]:
        """The figures of a whole evaluation in one process. Raises ValueError for a split without examples."""
        if not self.dataset.count(split):
            raise ValueError(f"split {split!r} of {self.dataset.name} has no examples")
        return self.figures(self.sums(model, split))

    def asked(self, attentions: list[Attention]) -> dict[str, Any] | None:
        """The record that training asks of these layers: their own losses where these weigh, and what they count."""
        wanted = {
            "penalty": bool(self.run.penalty),
            "log_prob": bool(self.run.penalty),
            "statistics": any(attention.statistics for attention in attentions),
        }
        return {name: None for name, wants in wanted.items() if wants} or None

    def count(self, attentions: list[Attention], layers: list[dict[str, Any]]) -> None:
        """Add what the layers have told in one micro-batch, in each step of a stack that repeats them."""
        for layer, attention in enumerate(attentions):
            for told in layers[layer :: len(attentions)] if attention.statistics else ():
                new, sums = told["statistics"], self.statistics.get(layer)
                self.statistics[layer] = new if sums is None else pytree.tree_map(torch.add, sums, new)

    def update(self, model: Any) -> None:
        """Move what no gradient moves, after an optimizer's step: by what all of its micro-batches have counted."""
        for layer, statistics in self.statistics.items():
            self.attentions(model)[layer].update({"statistics": statistics})
        self.statistics.clear()

    @abstractmethod
    def attentions(self, model: Any) -> list[Attention]:
        """The layers whose statistics are counted, as ``count`` is given them."""


class NextToken(Objective):
    """A decoder predicts each token from those before it: mean nats per token, and the weighted penalty."""

    def attentions(self, model: Decoder) -> list[Attention]:
        return model.stack.attentions()

    def loss(self, model: Decoder, batch: Tensor) -> Loss:
        record = self.asked(self.attentions(model))
        outputs, _ = model(model.shift(batch), record=record)
        likelihood = model.likelihood.log_prob(outputs, batch)  # (B,N)
        loss = -likelihood.mean()
        if record:
            self.count(self.attentions(model), record["layers"])
        if not self.run.penalty:
            return Loss(loss, {"loss": loss.detach()})
        penalty = torch.zeros_like(loss)
        if record:
            penalty = record.get("penalty", penalty)
            if "log_prob" in record:
                # Of weight 1, its gradient is that of the expected loss.
                penalty = penalty + reinforce(record["log_prob"], likelihood.flatten(1).mean(1))
        return Loss(loss + self.run.penalty * penalty, {"loss": loss.detach(), "penalty": penalty.detach()})

    def sums(self, model: Decoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        return total(model, data, split, roomy(data.length), self.run.evaluate_examples, rank, world)

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, tokens = sums.tolist()
        return {"bits": nats / tokens / math.log(2)}


OBJECTIVES: Mapping[type, type[Objective]] = {Decoder: NextToken}


def build(model: nn.Module, run: Run, dataset: Dataset) -> Objective:
    """The objective by which this kind of model is trained."""
    return OBJECTIVES[type(model)](run, dataset)
