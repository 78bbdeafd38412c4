"""Training objectives: batches, losses and evaluation metrics for each kind of model.

The engine handles steps, checkpoints and reports; an objective handles the model and its data. ``build`` makes the
objective of a model; ``OBJECTIVES`` has one per kind of model.
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
from ..data import Dataset, Tokens
from ..data.labeled import Batch as Texts
from ..data.order import batch_indices
from ..data.pairs import Batch
from ..data.streams import Stream, Stretch, row_windows
from ..models.checkpoint import model_class
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..models.seq2seq import Seq2Seq
from ..ops.edges import reinforce
from ..ops.tensors import upcast_half
from . import streaming_eval
from .auxiliary import Auxiliary
from .config import TrainConfig
from .evaluate import Share, classified, default_batch_size, evaluate_seq2seq, total
from .learned import learned
from .sequence import Rows
from .tbptt import Carry

# Fields of a run that only decoders support, with the values that turn them off.
NEXT_TOKEN = (("stream", False), ("segments", False), ("intermediate", False), ("targets", 1), ("sequence_parallel", 1))


class Loss(NamedTuple):
    """The loss of one micro-batch."""

    total: Tensor  # (), minimized by the step
    parts: dict[str, Tensor]  # () each, detached: ``loss``, as a rule in nats per token, and columns of metrics.csv


class Objective(nn.Module, ABC):
    """How a model is trained on a data set: drawing of batches, loss, and evaluation metrics.

    Its parameters, such as heads that only training needs, are trained with those of the model. They and its buffers,
    such as states carried between micro-batches, are part of the checkpoint for a resume, but not of the model's
    weights. Buffers belong to one process, so an objective with buffers refuses ``devices`` > 1.
    """

    nats = True
    """whether the loss is in nats per token, so that it is reported in bits too"""
    even = True
    """whether all ranks call a sharded model equally often in ``sums``; else each of them evaluates the whole split"""

    def __init__(self, run: TrainConfig, dataset: Any):
        super().__init__()
        self.run, self.dataset = run, dataset
        # Statistics of layers since the last step.
        self.statistics: dict[int, Any] = {}
        # The engine replaces it once there are several processes.
        self.rows = Rows()

    def prepare(self, model: Any) -> None:
        """Add modules that only this run trains. Raises ValueError for a field that is not supported."""
        for name, usual in NEXT_TOKEN:
            if getattr(self.run, name) != usual:
                raise ValueError(f"{name}={getattr(self.run, name)} requires a decoder, which predicts the next token")

    @property
    def tokens(self) -> float:
        """Tokens per example, for the reported tokens per second."""
        return self.dataset.length

    def batch(self, index: int, rank: int, world: int) -> Any:
        """The examples of micro-batch ``index`` on ``rank``, a pytree of tensors that depends on the arguments only."""
        return self.dataset.take("train", self.order(self.dataset.count("train"), index, rank, world))

    def order(self, count: int, index: int, rank: int, world: int) -> Tensor:
        """The numbers of the examples of micro-batch ``index`` among ``count``, (B,) int64."""
        # Data sets that are too large for a permutation in memory say so.
        keyed = {"keyed": True} if getattr(self.dataset, "keyed", False) else {}
        return batch_indices(count, self.run.seed, index, self.run.batch, rank, world, **keyed)

    @abstractmethod
    def loss(self, model: Any, batch: Any) -> Loss:
        """The loss of one micro-batch in training mode. Statistics of layers are kept for ``update``."""

    @abstractmethod
    def sums(self, model: Any, split: str, rank: int = 0, world: int = 1) -> Tensor:
        """Sums over ``rank``'s part of a split, (n,) float64; ``figures`` takes their total over ranks."""

    @abstractmethod
    def figures(self, sums: Tensor) -> dict[str, float]:
        """The metrics of an evaluation: ``bits`` per token (lower is better), and others."""

    def score(self, model: Any, split: str) -> dict[str, float]:
        """Evaluate a split in one process. Raises ValueError for a split without examples."""
        if not self.dataset.count(split):
            raise ValueError(f"split {split!r} of {self.dataset.name} has no examples")
        return self.figures(self.sums(model, split))

    def wanted_record(self, attentions: list[Attention]) -> dict[str, Any] | None:
        """The record that training requests from these layers: auxiliary losses if weighted, and statistics."""
        wanted = {
            "penalty": bool(self.run.penalty),
            "log_prob": bool(self.run.penalty),
            "statistics": any(attention.statistics for attention in attentions),
        }
        return {name: None for name, wants in wanted.items() if wants} or None

    def count(self, attentions: list[Attention], layers: list[dict[str, Any]], first: int = 0) -> None:
        """Add the statistics of a stack's layers in one micro-batch, over all steps of a stack that repeats them.

        ``first``: the index of its first layer among all ``attentions``.
        """
        for layer, attention in enumerate(attentions, first):
            for record in layers[layer - first :: len(attentions)] if attention.statistics else ():
                new, sums = record["statistics"], self.statistics.get(layer)
                self.statistics[layer] = new if sums is None else pytree.tree_map(torch.add, sums, new)

    def update(self, model: Any) -> None:
        """After an optimizer step: apply statistics to buffers, and project parameters back into their range."""
        for attention in self.attentions(model):
            attention.project()
        for layer, statistics in self.statistics.items():
            self.attentions(model)[layer].update({"statistics": statistics})
        self.statistics.clear()

    def skip(self, model: Any) -> None:
        """After a step without an update, because its gradient was not finite: drop what its micro-batches left."""
        self.statistics.clear()

    def weighed(self, loss: Tensor, nats: Tensor, records: list[dict[str, Any]], rewards: Tensor) -> Loss:
        """Add the weighted penalties in ``records`` to the loss; ``nats`` () is the reported loss.

        Sampled choices, such as those of sac, learn from ``rewards`` (B,), the mean log-likelihood of each row.
        """
        if not self.run.penalty:
            return Loss(loss, {"loss": nats.detach()})
        penalty = torch.zeros_like(nats)
        for record in records:
            penalty = penalty + record.get("penalty", 0.0)
            if "log_prob" in record:
                # With weight 1 its gradient is that of the expected loss.
                penalty = penalty + reinforce(record["log_prob"], rewards)
        return Loss(loss + self.run.penalty * penalty, {"loss": nats.detach(), "penalty": penalty.detach()})

    def shown(self, bits: float) -> str:
        """The metric ``bits`` of an evaluation, in words."""
        return f"{bits:.3f} bits/{self.dataset.unit}"

    def learned(self, model: Any) -> dict[str, Any]:
        """Learned spans and ponder times as plain values; see ``learned.learned``."""
        return {}

    def remark(self, found: dict[str, Any]) -> str:
        """The end of the line about an evaluation, from what ``learned`` returned."""
        return ""

    @abstractmethod
    def attentions(self, model: Any) -> list[Attention]:
        """All attention layers, stack by stack."""


class NextToken(Objective):
    """Next-token prediction with a decoder: mean nats per token, plus the weighted penalty."""

    def __init__(self, run: TrainConfig, dataset: Dataset | Tokens):
        super().__init__(run, dataset)
        self.auxiliary: Auxiliary | None = None

    def prepare(self, model: Any) -> None:
        run = self.run
        if run.sequence_parallel > 1:
            from ..distributed.parallel import check

            check(model)
        if run.intermediate or run.targets > 1:
            self.auxiliary = Auxiliary(
                model, intermediate=run.intermediate, targets=run.targets, steps=run.steps, seed=run.seed
            )

    def attentions(self, model: Decoder) -> list[Attention]:
        return model.stack.attentions()

    def loss(self, model: Decoder, batch: Tensor) -> Loss:
        record = self.wanted_record(self.attentions(model))
        if self.auxiliary:
            self.auxiliary.listen()
        likelihood, targets, segments = self.read(model, batch, record)
        loss = self.rows.mean(-likelihood)
        if record:
            self.count(self.attentions(model), record["layers"])
        whole, more = loss, {}
        if self.auxiliary:
            found = self.auxiliary(model, targets, segments)
            whole, more = whole + found, {"auxiliary": found.detach()}
        weighed = self.weighed(whole, loss, [record or {}], likelihood.flatten(1).mean(1))
        return Loss(weighed.total, weighed.parts | more)

    def read(self, model: Decoder, batch: Any, record: dict | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Run the model on a batch: log-probabilities of targets, both (B, N), and their documents (None: one).

        N is the length of this process's part of the rows.
        """
        inputs, targets = self.rows.part(model.shift(batch)), self.rows.part(batch)
        with self.rows.shared(model):
            return model(inputs, targets=targets, record=record)[0], targets, None

    def update(self, model: Decoder) -> None:
        super().update(model)
        if self.auxiliary:
            self.auxiliary.made += 1

    def learned(self, model: Decoder) -> dict[str, Any]:
        return learned(model, self.dataset)

    def sums(self, model: Decoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        batch = default_batch_size(data.length, data.vocab)
        return total(model, data, split, batch, Share(self.run.evaluate_examples, rank, world), self.rows)

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, tokens = sums.tolist()
        return {"bits": nats / tokens / math.log(2)}


class Segments(NextToken):
    """Next-token prediction on disjoint windows whose documents are kept apart, in training and in evaluations.

    Raises ValueError for images, and for a text without a whole window.
    """

    even = False

    def __init__(self, run: TrainConfig, dataset: Dataset | Tokens):
        super().__init__(run, dataset)
        self.stream = Stream(dataset, "train")

    def batch(self, index: int, rank: int, world: int) -> Stretch:
        return self.stream.take(self.order(self.stream.count, index, rank, world), fresh=True)

    def read(self, model: Decoder, batch: Any, record: dict | None) -> tuple[Tensor, Tensor, Tensor | None]:
        stretch, part = Stretch(*batch), self.rows.part
        segments, targets = None if stretch.segments is None else part(stretch.segments), part(stretch.targets)
        with self.rows.shared(model):
            likelihood = model(part(stretch.inputs), segments=segments, targets=targets, record=record)[0]
        return likelihood, targets, segments

    def sums(self, model: Decoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        batch = default_batch_size(data.length, data.vocab)
        share = Share(self.run.evaluate_examples, rank, world)
        return streaming_eval.apart(model, data, split, batch, share, self.rows)


class Streams(NextToken):
    """Next-token prediction on a text in order, with states carried between micro-batches.

    The checkpoint holds the states of all rows, in the order of a single process with the same number of rows. The
    position of a row in the text is a function of the micro-batch number. Evaluations carry states, too.

    Raises ValueError for images, and for a text that is too short for the number of rows.
    """

    even = False

    def __init__(self, run: TrainConfig, dataset: Dataset | Tokens):
        super().__init__(run, dataset)
        self.stream = Stream(dataset, "train")
        row_windows(self.stream.count, 0, run.batch, 0, run.world)
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
        given = {"segments": stretch.segments, "targets": stretch.targets, "record": record}
        likelihood, state = model(stretch.inputs, state, **given)
        assert state is not None
        self.carry.end(state)
        return likelihood, stretch.targets, stretch.segments

    def skip(self, model: Any) -> None:
        super().skip(model)
        # A state that is not finite would stay so; rows begin anew.
        if self.carry is not None and not self.carry.finite():
            self.carry.state = None

    def get_extra_state(self) -> dict[str, list[Tensor]]:
        """The states of all rows, for the checkpoint; every rank must call."""
        return {"leaves": self.saved if self.carry is None else self.carry.leaves(_place()[1])}

    def set_extra_state(self, state: dict[str, list[Tensor]]) -> None:
        """Restore the states from a checkpoint for the next micro-batch."""
        self.carry, self.saved = None, state["leaves"]

    def sums(self, model: Decoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        share = Share(self.run.evaluate_examples, rank, world)
        rows = streaming_eval.rows(self.dataset, split, share.examples)
        return streaming_eval.carried(model, self.dataset, split, rows, share)


class Target(Objective):
    """Sequence-to-sequence training: mean smoothed nats per real token, plus the weighted penalty.

    The reported loss is without smoothing, so that it is comparable with evaluations.
    """

    # Greedy decoding ends when all targets of a batch have ended.
    even = False

    @property
    def tokens(self) -> float:
        return self.dataset.mean("train")

    def attentions(self, model: Seq2Seq) -> list[Attention]:
        return [*model.encoder.attentions(), *model.stack.attentions()]

    def loss(self, model: Seq2Seq, batch: Batch) -> Loss:
        record = self.wanted_record(self.attentions(model))
        outputs = model(
            batch.source, model.shift(batch.target), source_mask=batch.source_mask, mask=batch.mask, record=record
        )
        likelihood = model.likelihood.log_prob(outputs, batch.target).masked_fill(~batch.mask, 0.0)  # (B,N)
        nats = -likelihood.sum() / batch.mask.sum()
        loss = model.loss(outputs, batch.target, mask=batch.mask) if model.config.smoothing else nats
        records = [record[name] for name in ("encoder", "decoder")] if record else []
        first = 0
        for stack, one in zip((model.encoder, model.stack), records, strict=False):
            self.count(stack.attentions(), one["layers"], first)
            first += len(stack.attentions())
        return self.weighed(loss, nats, records, likelihood.sum(1) / batch.mask.sum(1))

    def sums(self, model: Seq2Seq, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        share = Share(self.run.evaluate_examples, rank, world)
        return evaluate_seq2seq(model, data, split, default_batch_size(data.length), share)

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, tokens, exact, pairs = sums.tolist()
        return {"bits": nats / tokens / math.log(2), "exact": exact / pairs}


class Labels(Objective):
    """Classification of texts with an encoder: mean cross-entropy in nats, plus the weighted penalty."""

    @property
    def tokens(self) -> float:
        return self.dataset.mean("train")

    def attentions(self, model: Encoder) -> list[Attention]:
        return model.stack.attentions()

    def loss(self, model: Encoder, batch: Texts) -> Loss:
        record = self.wanted_record(self.attentions(model))
        tokens, mask, labels = batch
        logits = upcast_half(model(tokens, mask=mask, record=record))
        nats = F.cross_entropy(logits, labels, reduction="none")  # (B,)
        if record:
            self.count(self.attentions(model), record["layers"])
        total, parts = self.weighed(nats.mean(), nats.mean(), [record or {}], -nats)
        return Loss(total, parts | {"accuracy": (logits.argmax(-1) == labels).to(nats.dtype).mean()})

    def sums(self, model: Encoder, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        share = Share(self.run.evaluate_examples, rank, world)
        return classified(model, data, split, default_batch_size(data.length), share)

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, right, texts = sums.tolist()
        return {"bits": nats / texts / math.log(2), "accuracy": right / texts}


def _place() -> tuple[int, int]:
    """The rank of this process and the number of processes."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


OBJECTIVES: Mapping[type, type[Objective]] = {Decoder: NextToken, Seq2Seq: Target, Encoder: Labels}


def build(model: nn.Module, run: TrainConfig, dataset: Any) -> Objective:
    """Make the objective for a kind of model. Raises ValueError for a run that it does not support."""
    kind = OBJECTIVES[model_class(model)]
    if kind is NextToken:
        kind = Streams if run.stream else Segments if run.segments else NextToken
    objective: Objective = kind(run, dataset)
    objective.prepare(model)
    return objective
