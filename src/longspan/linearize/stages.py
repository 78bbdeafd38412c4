"""The stages of a linearization: the losses, and the jobs that ``train_job`` runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data import Dataset, Tokens
from ..models import checkpoint
from ..models.decoder import Decoder
from ..train import Made
from ..train import run_dir as runs
from ..train.config import TrainConfig
from ..train.evaluate import chosen_examples, default_batch_size, evaluating
from ..train.objectives import Loss, NextToken, Objective

LOOKED_AT = 16  # examples whose layers are compared at an evaluation of a run


class Pair(NamedTuple):
    """What a teacher's layer reads and writes."""

    inputs: Tensor  # (B,N,dim)
    outputs: Tensor  # (B,N,dim)


@torch.no_grad()
def pairs(teacher: Decoder, inputs: Tensor, layers: Sequence[int]) -> list[Pair]:
    """Run a teacher on tokens (B,N) -> what the attentions of these layers read and wrote."""
    found: dict[int, Pair] = {}
    attentions = teacher.stack.attentions()

    def keeper(layer: int) -> Callable[[nn.Module, Any, Any], None]:
        def keep(_: nn.Module, given: Any, came: Any) -> None:
            found[layer] = Pair(given[0], came[0])

        return keep

    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.callback(attentions[layer].register_forward_hook(keeper(layer)).remove)
        # Without the output layer, which no layer reads.
        teacher.stack(teacher.embedding(inputs)[0])
    return [found[layer] for layer in layers]


def squares(student: Decoder, teacher: Decoder, inputs: Tensor, layers: Sequence[int]) -> Tensor:
    """Squared errors of the student's layers and squared outputs of the teacher's: (layers,2), both summed."""
    attentions, found = student.stack.attentions(), []
    for layer, pair in zip(layers, pairs(teacher, inputs, layers), strict=True):
        y = attentions[layer](pair.inputs)[0]
        found.append(torch.stack([(y - pair.outputs).square().sum(), pair.outputs.square().sum()]))
    return torch.stack(found)


@torch.no_grad()
def errors(
    student: Decoder, teacher: Decoder, data: Dataset | Tokens, layers: Sequence[int], split: str, examples: int = 0
) -> list[float]:
    """Return the relative error of each layer, |student - teacher| / |teacher|, if it reads what the teacher's does.

    ``examples``: number of evenly spaced examples; 0: the whole split.
    """
    rows = chosen_examples(data.count(split), examples, 0, 1)
    sums = torch.zeros(len(layers), 2, dtype=torch.float64)
    with evaluating(student):
        for part in rows.split(default_batch_size(data.length, data.vocab)):
            tokens = data.take(split, part).to(student.device)
            sums += squares(student, teacher, student.shift(tokens), layers).double().cpu()
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


class Layers(NextToken):
    """Each converted layer has the outputs of the teacher's layer: the mean of their relative squared errors.

    All layers read what the teacher's read, so that they do not depend on each other.
    """

    nats = False
    teacher: Decoder

    def __init__(self, run: TrainConfig, dataset: Dataset | Tokens, teacher: Decoder, layers: Sequence[int]):
        super().__init__(run, dataset)
        # Not a submodule, since those of an objective are trained.
        object.__setattr__(self, "teacher", teacher)
        self.layers = layers

    def loss(self, model: Decoder, batch: Tensor) -> Loss:
        sums = squares(model, self.teacher.to(model.device), model.shift(batch), self.layers)
        shares = sums[:, 0] / sums[:, 1]
        return Loss(shares.sum(), {"loss": shares.detach().mean()})

    def learned(self, model: Decoder) -> dict[str, Any]:
        found = errors(model, self.teacher, self.dataset, self.layers, "validation", LOOKED_AT)
        return {"errors": [[layer, round(error, 4)] for layer, error in zip(self.layers, found, strict=True)]}

    def remark(self, found: dict[str, Any]) -> str:
        return "; errors of layers " + ", ".join(f"{layer}: {error:.1%}" for layer, error in found["errors"])


class Logits(NextToken):
    """The distribution of each token is the teacher's: mean KL divergence in nats, and a share of the text's loss."""

    nats = False
    teacher: Decoder

    def __init__(self, run: TrainConfig, dataset: Dataset | Tokens, teacher: Decoder, text: float):
        super().__init__(run, dataset)
        object.__setattr__(self, "teacher", teacher)
        self.text = text

    def loss(self, model: Decoder, batch: Tensor) -> Loss:
        inputs = model.shift(batch)
        with torch.no_grad():
            wanted = model.likelihood.log_probs(self.teacher.to(model.device)(inputs)[0])
        outputs = model(inputs)[0]
        found = model.likelihood.log_probs(outputs)
        loss = (wanted.exp() * (wanted - found)).sum(-1).mean()
        if self.text:
            loss = (1 - self.text) * loss - self.text * model.likelihood.log_prob(outputs, batch).mean()
        return Loss(loss, {"loss": loss.detach()})


class Stage:
    """A job: a stage of a linearization.

    Args:
        start: Returns the student that the stage begins with.
        objective: Makes the objective.
        data: The data.
        trained: The layers whose attention alone is trained; None: all weights are.
    """

    def __init__(
        self,
        start: Callable[[], Decoder],
        objective: Callable[[TrainConfig], Objective],
        data: Dataset | Tokens,
        config: Any,
        trained: Sequence[int] | None,
    ):
        self.start, self.objective, self.data, self.config, self.trained = start, objective, data, config, trained

    def make(self, run: TrainConfig, start: Path | None) -> Made:
        if start:
            runs.check_data(start, run.data, self.data)
        torch.manual_seed(run.seed)
        student = self.start()
        if self.trained is not None:
            student.requires_grad_(False)
            for layer in self.trained:
                student.stack.attentions()[layer].requires_grad_(True)
        counted = sum(p.numel() for p in student.parameters() if p.requires_grad)
        what = "all weights" if self.trained is None else f"{len(self.trained)} layers, each to the teacher's outputs"
        opening = (
            f"training {what}: {counted:,} numbers; {self.data.name}: {self.data.count('train'):,} examples of "
            f"{self.data.length} tokens, {run.step_examples} per step"
        )
        return Made(student, self.objective(run), opening)

    def best(self, folder: Path, made: Made) -> tuple[Any, Objective]:
        return checkpoint.load(folder), made.objective


@contextlib.contextmanager
def replaced(model: Decoder, other: Decoder, layers: Sequence[int]) -> Iterator[Decoder]:
    """Give a model the attentions that another one has in these layers."""
    blocks, others = list(model.stack.blocks), other.stack.attentions()
    own = [block.attention for block in blocks]
    try:
        for layer in layers:
            blocks[layer].attention = others[layer]
        yield model
    finally:
        for layer in layers:
            blocks[layer].attention = own[layer]
