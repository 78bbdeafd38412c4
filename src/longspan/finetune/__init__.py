"""Fine-tuning of trained models: all weights, low-rank changes of linear layers, or initial states.

A fine-tuning is a run of ``longspan.train`` with another model and other data. Its checkpoints have the trained weights
alone. At its end the run directory gets the result.

| in the run directory | content |
|---|---|
| ``adapter/`` | with ``method="lora"``: the adapter in the format of peft |
| ``adapter.safetensors`` | with ``method="state"``: the initial states, for ``longspan.adapt.load`` |
| ``model/`` | with ``method="full"`` or ``merge``: the whole model |
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import Attention
from ..models import checkpoint, quantization
from ..train import Made, Result, train_job
from ..train import run_dir as runs
from ..train.config import TrainConfig, refuse_new_model
from ..train.evaluate import Share, default_batch_size, evaluating
from ..train.objectives import Loss, Objective
from .completions import Batch, Completions, load
from .tuned import METHODS, FinetuneConfig, Tuned, adapted, can_pack, start_of

__all__ = [
    "METHODS",
    "CompletionLoss",
    "Completions",
    "FinetuneConfig",
    "Tuned",
    "adapted",
    "can_pack",
    "finetune",
    "load",
    "start_of",
]


class CompletionLoss(Objective):
    """The next token of the positions that have a loss: mean nats over those of all micro-batches of a step."""

    dataset: Completions

    @property
    def tokens(self) -> float:
        return self.dataset.mean("train")

    def attentions(self, model: Tuned) -> list[Attention]:
        return model.decoder.stack.attentions() if model.decoder and model.config.method == "full" else []

    def batch(self, index: int, rank: int, world: int) -> Batch:
        data, size = self.dataset, self.run.accumulate
        count, first = data.count("train"), index - index % size
        rows = [self.order(count, i, r, world) for i in range(first, first + size) for r in range(world)]
        every = data.splits["train"].counted[torch.cat(rows)].sum()
        # The step divides by the number of micro-batches.
        return data.take("train", self.order(count, index, rank, world))._replace(share=size * world / every)

    def loss(self, model: Tuned, batch: Batch) -> Loss:
        batch = Batch(*batch)
        total = model.nats(batch) * batch.share
        return Loss(total, {"loss": total.detach()})

    @torch.no_grad()
    def sums(self, model: Tuned, split: str, rank: int = 0, world: int = 1) -> Tensor:
        data = self.dataset
        rows = Share(self.run.evaluate_examples, rank, world).chosen(data.count(split))
        nats = 0.0
        with evaluating(model):
            for part in rows.split(default_batch_size(data.length, data.vocab)):
                found = Batch(*(t.to(model.model.device) for t in data.take(split, part)))
                nats += float(model.nats(found))
        return torch.tensor([nats, int(data.splits[split].counted[rows].sum())], dtype=torch.float64)

    def figures(self, sums: Tensor) -> dict[str, float]:
        nats, tokens = sums.tolist()
        return {"bits": nats / tokens / math.log(2)}


class _Tuning:
    """A job: a part of a trained model."""

    tuned: Tuned

    def __init__(self, model: Any, data: Completions, config: FinetuneConfig):
        self.model, self.data, self.config = model, data, config

    def make(self, run: TrainConfig, start: Path | None) -> Made:
        data, model = self.data, self.model
        refuse_new_model(run, "a fine-tuning")
        if start:
            runs.check_data(start, run.data, data)
        torch.manual_seed(run.seed)
        self.tuned = Tuned(model, self.config, wide=run.precision == "32")
        counted, cut = int(data.splits["train"].counted.sum()), f" ({data.cut} longer than a row)" if data.cut else ""
        opening = (
            f"{self.tuned.opening}\n{data.documents:,} sequences{cut}; training on {data.count('train'):,} rows of up "
            f"to {data.length} tokens, {counted:,} of them with a loss, {run.step_examples} rows per step; "
            f"validation on {data.count('validation'):,} rows"
        )
        return Made(self.tuned, CompletionLoss(run, data), opening)

    def best(self, folder: Path, made: Made) -> tuple[Any, Objective]:
        checkpoint.restore(checkpoint.resolve(folder), made.model)
        return made.model, made.objective


def finetune(
    model: Any,
    data: Completions,
    config: FinetuneConfig,
    run: TrainConfig,
    *,
    merge: bool = False,
    resume: bool = False,
    progress: bool = True,
) -> Result:
    """Fine-tune a model, as ``longspan.train.fit`` trains one, and write the result into the run directory.

    Args:
        model: As for ``Tuned``. It is changed.
        data: Rows of the tokens of its text.
        config: What is trained.
        run: The optimizer, the lengths and the run directory; ``data`` and ``length`` are recorded, not read.
        merge: With ``method="lora"``: also write the whole model, with the changes in its weights.
        resume: Continue from the last checkpoint, or start if there is none yet.
        progress: Print what is trained, a bar or occasional lines, and a line per evaluation, on stderr.

    Returns:
        The ``Result``, with the figures of the best checkpoint on ``validation``.

    Raises:
        ImportError: Without the extra ``train``, and for ``method="lora"`` without ``lora``.
        ValueError: As ``fit`` and ``Tuned`` do, and for a merge into weights of few bits, or into weights that layers
            with different changes share.
        KeyboardInterrupt: As ``fit`` does.
    """
    if merge and config.method != "lora":
        raise ValueError(f"merge=True requires method='lora', not {config.method!r}")
    if merge and (config.weights or quantization.described(model)):
        raise ValueError("merge=True requires weights that are not of 8 or 4 bits; pass merge=False")
    weights = [id(m.weight) for m in model.modules() if type(m) is nn.Linear]
    if merge and len({*weights}) < len(weights):
        raise ValueError("merge=True cannot add different changes to a weight that layers share; pass merge=False")
    job = _Tuning(model, data, config)
    result = train_job(job, run, resume, progress)
    job.tuned.write(result.folder, merge)
    return result
