"""Objectives: what a kind of model is trained to do, from the examples of a step to the figures of an evaluation.

The engine knows steps, checkpoints and reports, and an objective knows the model and its data. ``build`` finds the one
that a model is trained by; ``OBJECTIVES`` has one per kind of model.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils import _pytree as pytree

from ..attention import Attention
from ..data import Dataset
from ..data.labelled import Batch as Texts
from ..data.order import batch_indices
from ..data.pairs import Batch
from ..data.streams import Stream, Stretch, row_windows
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..models.seq2seq import Seq2Seq
from ..ops.edges import reinforce
from ..ops.tensors import upcast_half
from . import streaming_eval
from .auxiliary import Auxiliary
from .config import TrainConfig
from .evaluate import classified, default_batch_size, evaluate_seq2seq, total
from .learned import learned
from .tbptt import Carry


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

    def __init__(self, run: TrainConfig, dataset: Any):
        super().__init__()
        self.run, self.dataset = run, dataset
        # What the layers with statistics have counted since the last step.
        self.statistics: dict[int, Any] = {}

    def prepare(self, model: Any) -> None:
        """Add what this run trains beside the model. Raises ValueError for a field that this objective cannot serve."""
        for name, usual in (("stream", False), ("intermediate", False), ("targets", 1)):
            if getattr(self.run, name) != usual:
                raise ValueError(f"{name}={getattr(self.run, name)} is for decoders, which predict the next token")

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

    def count(self, attentions: list[Attention], layers: list[dict[str, Any]], first: int = 0) -> None:
        """Add what a stack's layers have told in one micro-batch, in each step of a stack that repeats them.

        ``first`` is the place of its first layer among all ``attentions``.
        """
        for layer, attention in enumerate(attentions, first):
            for told in layers[layer - first :: len(attentions)] if attention.statistics else ():
                new, sums = told["statistics"], self.statistics.get(layer)
                self.statistics[layer] = new if sums is None else pytree.tree_map(torch.add, sums, new)

    def update(self, model: Any) -> None:
        """After an optimizer's step: statistics move buffers, and parameters with a range are moved back into it."""
        for attention in self.attentions(model):
            attention.project()
        for layer, statistics in self.statistics.items():
            self.attentions(model)[layer].update({"statistics": statistics})
        self.statistics.clear()

    def weighed(self, loss: Tensor, nats: Tensor, told: list[dict[str, Any]], rewards: Tensor) -> Loss:
        """The loss and the weighted penalties that records have told; ``nats`` () is reported, ``rewards`` (B,) earned.

        Picks that were drawn, such as those of sac, learn from each row's reward, its mean log-likelihood.
        """
        if not self.run.penalty:
            return Loss(loss, {"loss": nats.detach()})
        penalty = torch.zeros_like(nats)
        for record in told:
            penalty = penalty + record.get("penalty", 0.0)
            if "log_prob" in record:
                # Of weight 1, its gradient is that of the expected loss.
                penalty = penalty + reinforce(record["log_prob"], rewards)
        return Loss(loss + self.run.penalty * penalty, {"loss": nats.detach(), "penalty": penalty.detach()})

    def learned(self, model: Any) -> dict[str, Any]:
        """What the model has learned to choose for itself, as plain values; see ``learned.learned``."""
        return {}

    @abstractmethod
    def attentions(self, model: Any) -> list[Attention]:
        """All layers whose statistics are counted, those of one stack after those of another."""


class NextToken(Objective):
    """A decoder predicts each token from those before it: mean nats per token, and the weighted penalty."""

    def __init__(self, run: TrainConfig, dataset: Dataset):
        super().__init__(run, dataset)
        self.auxiliary: Auxiliary | None = None

    def prepare(self, model: Any) -> None:
        run = self.run
        if run.intermediate or run.targets > 1:
            options: dict[str, Any] = {"intermediate": run.intermediate, "targets": run.targets}
            self.auxiliary = Auxiliary(model, **options, steps=run.steps, seed=run.seed)

    def attentions(self, model: Decoder) -> list[Attention]:
        return model.stack.attentions()

    def loss(self, model: Decoder, batch: Tensor) -> Loss:
        record = self.asked(self.attentions(model))
        if self.auxiliary:
            self.auxiliary.listen()
        outputs, targets, segments = self.read(model, batch, record)
        likelihood = model.likelihood.log_prob(outputs, targets)  # (B,N)
        loss = -likelihood.mean()
        if record:
            self.count(self.attentions(model), record["layers"])
        whole, more = loss, {}
        if self.auxiliary:
            found = self.auxiliary(model, targets, segments)
            whole, more = whole + found, {"auxiliary": found.detach()}
        weighed = self.weighed(whole, loss, [record or {}], likelihood.flatten(1).mean(1))
        return Loss(weighed.total, weighed.parts | more)

    def read(self, model: Decoder, batch: Any, record: dict | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """A batch -> the model's outputs (B,N,size), their targets (B,N), and the documents of these, None for one."""
        return model(model.shift(batch), record=record)[0], batch, None

    def update(self, model: Decoder) -> None:
        super().update(model)
        if self.auxiliary:
            self.auxiliary.made += 1

    def learned(self, model: Decoder) -> dict[str, Any]:
        return learned(model, self.dataset)

    def sums(self, model: Decoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        return total(model, data, split, default_batch_size(data.length), self.run.evaluate_examples, rank, world)

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, tokens = sums.tolist()
        return {"bits": nats / tokens / math.log(2)}


class Streams(NextToken):
    """A decoder predicts each token of a text from those before it, also from those of earlier micro-batches.

    The states of the rows are part of the checkpoint, those of all ranks in the order of one process with as many rows;
    where the rows stand in the text follows from the number of the micro-batch. Evaluations carry states, too.

    Raises ValueError for images, and for a text too short for a stretch a row.
    """

    def __init__(self, run: TrainConfig, dataset: Dataset):
        super().__init__(run, dataset)
        self.stream = Stream(dataset, "train")
        row_windows(self.stream.count, 0, run.batch, 0, run.devices)
        self.carry: Carry | None = None
        self.saved: list[Tensor] = []

    def batch(self, index: int, rank: int, world: int) -> Stretch:
        windows = row_windows(self.stream.count, index, self.run.batch, rank, world)
        return self.stream.take(windows, fresh=index == 0)

    def read(self, model: Decoder, batch: Any, record: dict | None) -> tuple[Tensor, Tensor, Tensor | None]:
        stretch = Stretch(*batch)
        if self.carry is None:
            self.carry = Carry(model, self.run.batch)
            if self.saved:
                self.carry.restore(self.saved, *_place())
                self.saved = []
        state = self.carry.begin(stretch.fresh)
        outputs, state = model(stretch.inputs, state, segments=stretch.segments, record=record)
        assert state is not None
        self.carry.end(state)
        return outputs, stretch.targets, stretch.segments

    def get_extra_state(self) -> dict[str, list[Tensor]]:
        """The rows' states, for the checkpoint; every rank must call."""
        return {"leaves": self.saved if self.carry is None else self.carry.leaves(_place()[1])}

    def set_extra_state(self, state: dict[str, list[Tensor]]) -> None:
        """Take them from a checkpoint; the first micro-batch goes on with them."""
        self.carry, self.saved = None, state["leaves"]

    def sums(self, model: Decoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        examples = self.run.evaluate_examples
        rows = streaming_eval.rows(self.dataset, split, examples)
        return streaming_eval.carried(model, self.dataset, split, rows, examples, rank, world)


class Target(Objective):
    """An encoder-decoder writes the target of a source: mean nats per real token, smoothed, and the weighted penalty.

    Reported is the loss without smoothing, so that its bits are those of an evaluation.
    """

    @property
    def tokens(self) -> float:
        return self.dataset.mean("train")

    def attentions(self, model: Seq2Seq) -> list[Attention]:
        return [*model.encoder.attentions(), *model.stack.attentions()]

    def loss(self, model: Seq2Seq, batch: Batch) -> Loss:
        record = self.asked(self.attentions(model))
        outputs = model(
            batch.source, model.shift(batch.target), source_mask=batch.source_mask, mask=batch.mask, record=record
        )
        likelihood = model.likelihood.log_prob(outputs, batch.target).masked_fill(~batch.mask, 0.0)  # (B,N)
        nats = -likelihood.sum() / batch.mask.sum()
        loss = model.loss(outputs, batch.target, mask=batch.mask) if model.config.smoothing else nats
        told = [record[name] for name in ("encoder", "decoder")] if record else []
        first = 0
        for stack, one in zip((model.encoder, model.stack), told, strict=False):
            self.count(stack.attentions(), one["layers"], first)
            first += len(stack.attentions())
        return self.weighed(loss, nats, told, likelihood.sum(1) / batch.mask.sum(1))

    def sums(self, model: Seq2Seq, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        return evaluate_seq2seq(
            model, data, split, default_batch_size(data.length), self.run.evaluate_examples, rank, world
        )

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, tokens, exact, pairs = sums.tolist()
        return {"bits": nats / tokens / math.log(2), "exact": exact / pairs}


class Labels(Objective):
    """An encoder tells the label of a text: mean cross-entropy in nats, and the weighted penalty."""

    @property
    def tokens(self) -> float:
        return self.dataset.mean("train")

    def attentions(self, model: Encoder) -> list[Attention]:
        return model.stack.attentions()

    def loss(self, model: Encoder, batch: Texts) -> Loss:
        record = self.asked(self.attentions(model))
        tokens, mask, labels = batch
        logits = upcast_half(model(tokens, mask=mask, record=record))
        nats = F.cross_entropy(logits, labels, reduction="none")  # (B,)
        if record:
            self.count(self.attentions(model), record["layers"])
        total, parts = self.weighed(nats.mean(), nats.mean(), [record or {}], -nats)
        return Loss(total, parts | {"accuracy": (logits.argmax(-1) == labels).to(nats.dtype).mean()})

    def sums(self, model: Encoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        return classified(model, data, split, default_batch_size(data.length), self.run.evaluate_examples, rank, world)

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, right, texts = sums.tolist()
        return {"bits": nats / texts / math.log(2), "accuracy": right / texts}


def _place() -> tuple[int, int]:
    """The rank of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


OBJECTIVES: Mapping[type, type[Objective]] = {Decoder: NextToken, Seq2Seq: Target, Encoder: Labels}


def build(model: nn.Module, run: TrainConfig, dataset: Any) -> Objective:
    """The objective by which this kind of model is trained. Raises ValueError for a run that it cannot serve."""
    kind = OBJECTIVES[type(model)]
    objective: Objective = Streams(run, dataset) if run.stream and kind is NextToken else kind(run, dataset)
    objective.prepare(model)
    return objective
