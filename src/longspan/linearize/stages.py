"""The stages of a linearization: the losses, and the jobs that ``train_job`` runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention import Attention
from ..models import checkpoint
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..train import Made
from ..train import run_dir as runs
from ..train.config import TrainConfig
from ..train.evaluate import evaluating
from ..train.learned import learned
from ..train.objectives import Loss, Objective
from .tasks import Task

LOOKED_AT = 16  # examples whose layers are compared at an evaluation of a run


class Pair(NamedTuple):
    """What a teacher's layer reads and writes."""

    inputs: Tensor  # (B,N,dim)
    outputs: Tensor  # (B,N,dim)


@torch.no_grad()
def pairs(teacher: Decoder | Encoder, inputs: Tensor, layers: Sequence[int]) -> list[Pair]:
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
        if isinstance(teacher, Encoder):
            teacher.features(inputs)
        else:
            teacher.stack(teacher.embedding(inputs)[0])
    return [found[layer] for layer in layers]


def squares(student: Decoder | Encoder, teacher: Decoder | Encoder, inputs: Tensor, layers: Sequence[int]) -> Tensor:
    """Squared errors of the student's layers and squared outputs of the teacher's: (layers,2), both summed."""
    attentions, found = student.stack.attentions(), []
    for layer, pair in zip(layers, pairs(teacher, inputs, layers), strict=True):
        y = attentions[layer](pair.inputs)[0]
        found.append(torch.stack([(y - pair.outputs).square().sum(), pair.outputs.square().sum()]))
    return torch.stack(found)


@torch.no_grad()
def errors(student: Decoder | Encoder, task: Task, layers: Sequence[int], split: str, examples: int = 0) -> list[float]:
    """Return the relative error of each layer, |student - teacher| / |teacher|, if it reads what the teacher's does.

    ``examples``: number of evenly spaced examples; 0: the whole split.
    """
    sums = torch.zeros(len(layers), 2, dtype=torch.float64)
    with evaluating(student):
        for inputs in task.read(split, examples):
            sums += squares(student, task.teacher, inputs.to(student.device), layers).double().cpu()
    return (sums[:, 0] / sums[:, 1]).sqrt().tolist()


class Distillation(Objective):
    """A student learns from the teacher of a task, and is evaluated by the task."""

    nats = False
    task: Task

    def __init__(self, run: TrainConfig, task: Task):
        super().__init__(run, task.data)
        # Not a submodule, since those of an objective are trained.
        object.__setattr__(self, "task", task)

    def attentions(self, model: Any) -> list[Attention]:
        return model.stack.attentions()

    def batch(self, index: int, rank: int, world: int) -> Any:
        return self.task.framed(super().batch(index, rank, world), index)

    def teacher(self, model: Any) -> Any:
        """The teacher, on the device of the student."""
        return self.task.teacher.to(model.device)

    def sums(self, model: Any, split: str, rank: int = 0, world: int = 1) -> Tensor:
        return self.task.sums(model, split, self.run.evaluate_examples)

    def figures(self, sums: Tensor) -> dict[str, float]:
        return {"bits": self.task.loss(sums)}

    def shown(self, bits: float) -> str:
        return self.task.shown(bits)


class Layers(Distillation):
    """Each converted layer has the outputs of the teacher's layer: the mean of their relative squared errors.

    All layers read what the teacher's read, so that they do not depend on each other.
    """

    def __init__(self, run: TrainConfig, task: Task, layers: Sequence[int]):
        super().__init__(run, task)
        self.layers = layers

    def loss(self, model: Any, batch: Tensor) -> Loss:
        sums = squares(model, self.teacher(model), self.task.inputs(batch), self.layers)
        shares = sums[:, 0] / sums[:, 1]
        return Loss(shares.sum(), {"loss": shares.detach().mean()})

    def learned(self, model: Any) -> dict[str, Any]:
        found = errors(model, self.task, self.layers, "validation", LOOKED_AT)
        return {"errors": [[layer, round(error, 4)] for layer, error in zip(self.layers, found, strict=True)]}

    def remark(self, found: dict[str, Any]) -> str:
        return "; errors of layers " + ", ".join(f"{layer}: {error:.1%}" for layer, error in found["errors"])


class Logits(Distillation):
    """The distribution of each token is the teacher's: mean KL divergence in nats, and a share of the text's loss."""

    def __init__(self, run: TrainConfig, task: Task, text: float):
        super().__init__(run, task)
        self.text = text

    def loss(self, model: Decoder, batch: Tensor) -> Loss:
        inputs = self.task.inputs(batch)
        with torch.no_grad():
            wanted = model.likelihood.log_probs(self.teacher(model)(inputs)[0])
        outputs = model(inputs)[0]
        found = model.likelihood.log_probs(outputs)
        loss = (wanted.exp() * (wanted - found)).sum(-1).mean()
        if self.text:
            loss = (1 - self.text) * loss - self.text * model.likelihood.log_prob(outputs, batch).mean()
        return Loss(loss, {"loss": loss.detach()})

    def learned(self, model: Decoder) -> dict[str, Any]:
        return learned(model, self.dataset)


class Vectors(Distillation):
    """Embeddings and outputs of tokens are the teacher's: 1 - cosine of embeddings, and relative squared errors.

    ``share``: that of the loss on the outputs of tokens; the rest is on the embeddings.
    """

    def __init__(self, run: TrainConfig, task: Task, share: float):
        super().__init__(run, task)
        self.share = share

    def loss(self, model: Encoder, batch: Tensor) -> Loss:
        teacher = self.teacher(model)
        with torch.no_grad():
            wanted = teacher.features(batch).float()
            goal = teacher.pooled(wanted)
        found = model.features(batch).float()
        far = 1 - F.cosine_similarity(model.pooled(found), goal, dim=-1).mean()
        error = (found - wanted).square().sum() / wanted.square().sum()
        loss = (1 - self.share) * far + self.share * error
        return Loss(loss, {"loss": loss.detach()})


class Stage:
    """A job: a stage of a linearization.

    Args:
        start: Returns the student that the stage begins with.
        objective: Makes the objective.
        config: The student's config.
        trained: The layers whose attention alone is trained; None: all weights are.
        frozen: With None, names of parts of the model that are not trained.
    """

    def __init__(
        self,
        start: Callable[[], Any],
        objective: Callable[[TrainConfig], Objective],
        config: Any,
        trained: Sequence[int] | None,
        frozen: Sequence[str] = (),
    ):
        self.start, self.objective, self.config, self.trained, self.frozen = start, objective, config, trained, frozen

    def make(self, run: TrainConfig, start: Path | None) -> Made:
        objective = self.objective(run)
        data = objective.dataset
        if start:
            runs.check_data(start, run.data, data)
        torch.manual_seed(run.seed)
        student = self.start()
        if self.trained is not None:
            student.requires_grad_(False)
            for layer in self.trained:
                student.stack.attentions()[layer].requires_grad_(True)
        for part in self.frozen:
            student.get_submodule(part).requires_grad_(False)
        counted = sum(p.numel() for p in student.parameters() if p.requires_grad)
        what = f"all weights but those of {self.frozen[0]}" if self.frozen else "all weights"
        if self.trained is not None:
            what = f"{len(self.trained)} layers, each to the teacher's outputs"
        opening = (
            f"training {what}: {counted:,} numbers; {data.name}: {data.count('train'):,} examples of "
            f"{data.length} tokens, {run.step_examples} per step"
        )
        return Made(student, objective, opening)

    def best(self, folder: Path, made: Made) -> tuple[Any, Objective]:
        return checkpoint.load(folder), made.objective


@contextlib.contextmanager
def replaced(model: Any, other: Any, layers: Sequence[int]) -> Iterator[Any]:
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
