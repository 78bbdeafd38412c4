"""The engine: Lightning's loop, with our checkpoints, our order of examples and our reports in place of its own."""

import contextlib
import logging
import math
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.utils import _pytree as pytree

from .. import checkpoint as checkpoints
from .. import signals
from ..data import Dataset
from ..data.order import batch_indices
from ..model import Decoder
from ..ops.edges import reinforce
from . import folder as runs
from .evaluate import roomy, total
from .report import EVERY, Bar, Clock, Events, Table
from .run import Run, rate, step_seed

# Lightning 2.6 on torch 2.13; each is a regular expression for the beginning of a message.
REMARKS = ((r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),)

# What a task knows beside its weights, and a checkpoint of it holds.
KEPT = ("micro", "best", "evaluated", "best_step")


class Batches:
    """An endless row of (index, tokens), each a function of its index: all that is to be known of it is one integer."""

    def __init__(self, dataset: Dataset, run: Run, start: int, rank: int, world: int):
        self.dataset, self.run, self.start, self.rank, self.world = dataset, run, start, rank, world

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        count, index = self.dataset.count("train"), self.start
        while True:
            indices = batch_indices(count, self.run.seed, index, self.run.batch, self.rank, self.world)
            yield index, self.dataset.take("train", indices)
            index += 1


class Task(LightningModule):
    """What is to be minimised: the mean negative log-likelihood, in nats per token, and the weighted penalty."""

    def __init__(self, model: Decoder, run: Run, dataset: Dataset):
        super().__init__()
        self.model, self.run, self.dataset = model, run, dataset
        # Micro-batches, not steps: a loader that looks ahead or a step that accumulates cannot shift it.
        self.micro = 0
        self.best, self.evaluated, self.best_step = math.inf, 0, 0
        self.losses: list[Tensor] = []
        self.penalties: list[Tensor] = []
        self.norm = math.nan
        # The layers whose buffers their own statistics move, and these since the last step.
        self.counted = [i for i, attention in enumerate(model.stack.attentions()) if attention.statistics]
        self.statistics: dict[int, Any] = {}

    def train_dataloader(self) -> Batches:
        return Batches(self.dataset, self.run, self.micro, self.global_rank, self.trainer.world_size)

    def on_train_batch_start(self, batch: tuple[int, Tensor], batch_idx: int) -> None:
        torch.manual_seed(step_seed(self.run.seed, batch[0], self.global_rank))

    def training_step(self, batch: tuple[int, Tensor], batch_idx: int) -> Tensor:
        index, tokens = batch
        weighted = bool(self.run.penalty)
        wanted = {"penalty": weighted, "log_prob": weighted, "statistics": self.counted}
        record: dict[str, Any] | None = {name: None for name, asked in wanted.items() if asked} or None
        outputs, _ = self.model(self.model.shift(tokens), record=record)
        likelihood = self.model.likelihood.log_prob(outputs, tokens)  # (B,N)
        loss = -likelihood.mean()
        penalty = torch.zeros_like(loss)
        if record and weighted:
            penalty = record.get("penalty", penalty)
            if "log_prob" in record:
                # Of weight 1, its gradient is that of the expected loss.
                penalty = penalty + reinforce(record["log_prob"], likelihood.flatten(1).mean(1))
        self._count(record)
        self.losses.append(loss.detach())
        self.penalties.append(penalty.detach())
        self.micro = index + 1
        return loss + self.run.penalty * penalty if self.run.penalty else loss

    def _count(self, record: dict[str, Any] | None) -> None:
        """Add what the layers have counted in one micro-batch, in each step of a stack that repeats them."""
        count = len(self.model.stack.attentions())
        for layer in self.counted:
            assert record is not None
            for told in record["layers"][layer::count]:
                new, sums = told["statistics"], self.statistics.get(layer)
                self.statistics[layer] = new if sums is None else pytree.tree_map(torch.add, sums, new)

    def update(self) -> None:
        """Move what no gradient moves, after an optimizer's step: by what all of its micro-batches have counted."""
        for layer, statistics in self.statistics.items():
            self.model.stack.attentions()[layer].update({"statistics": statistics})
        self.statistics.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.run.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        if self.run.optimizer == "radam":
            return torch.optim.RAdam(groups, lr=self.run.learning_rate, decoupled_weight_decay=True)
        return torch.optim.AdamW(groups, lr=self.run.learning_rate, betas=(0.9, 0.95))

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        # The gradient is the ranks' mean, so that all of them stop here together.
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.clip or math.inf)
        self.norm = float(norm)
        if not math.isfinite(self.norm):
            loss = float(torch.stack(self.losses).mean())
            what = f"the gradient's norm became {self.norm}" if math.isfinite(loss) else f"the loss became {loss}"
            raise ValueError(self.broken(what))
        for group in optimizer.param_groups:
            group["lr"] = rate(self.run, self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["longspan"] = {name: getattr(self, name) for name in KEPT}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name, value in checkpoint["longspan"].items():
            setattr(self, name, value)

    def broken(self, what: str) -> str:
        return (
            f"{what} at step {self.trainer.global_step}; {runs.kept(Path(self.run.out))}; "
            "a lower learning_rate, clip or precision=32 may help"
        )


class FolderIO(CheckpointIO):
    """Lightning's checkpoints as our folders; no pickle of its own is ever written or read."""

    def __init__(self, model: Decoder, extra: dict[str, Any]):
        self.model, self.extra = model, extra

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        training = {name: value for name, value in checkpoint.items() if name != "state_dict"}
        extra = self.extra | {"step": checkpoint["global_step"]}
        checkpoints.save(path, self.model, training=training, extra=extra)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        training = checkpoints.restore(path, self.model)
        if set(training.get("longspan", ())) != set(KEPT):
            raise ValueError(f"{path} holds no state of a run, as training writes it; it cannot be resumed")
        return training | {"state_dict": {f"model.{name}": value for name, value in self.model.state_dict().items()}}

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path)


class Keeper(Callback):
    """After each step: report, evaluate, save, stop."""

    def __init__(self, run: Run, interrupt: "Interrupt", bar: Bar | None):
        self.run, self.interrupt, self.bar = run, interrupt, bar
        self.folder = Path(run.out) / "checkpoints"
        self.window: list[tuple[float, float]] = []
        self.stopped = ""
        self.opened = contextlib.ExitStack()

    def on_train_start(self, trainer: Trainer, task: Task) -> None:  # type: ignore[override]
        run, step = self.run, trainer.global_step
        self.clock = Clock(run.batch * run.accumulate * trainer.world_size * task.dataset.length)
        # Lightning has put its own in their place by now, whose SIGTERM would end the run without a checkpoint.
        self.interrupt.take()
        if trainer.is_global_zero:
            self.table = Table(Path(run.out) / "metrics.csv", step)
            self.events = self.opened.enter_context(contextlib.closing(Events(Path(run.out) / "tensorboard", step)))
            self._point(task.best_step, step)
        if self.bar:
            self.bar.start(step)
            self.opened.callback(self.bar.stop)
        if step and step % run.evaluate_every == 0 and task.evaluated < step:
            _, improved = self._evaluate(trainer, task)
            if improved:
                self._save(trainer, step, improved)
        self.clock.resume()

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:  # type: ignore[override]
        if task.micro % self.run.accumulate:
            return
        run, step, speed = self.run, trainer.global_step, self.clock.lap()
        loss, penalty, pressed, late = self._agree(trainer, task)
        # An infinite loss can have a finite gradient: that of a term that does not depend on the weights.
        if not math.isfinite(loss):
            raise ValueError(task.broken(f"the loss became {loss}"))
        task.update()
        self.window.append((loss, penalty))
        last = step >= run.steps
        if self.bar:
            recent, penalty = self._recent()
            self.bar.step(step, recent, recent / math.log(2), speed, penalty if run.penalty else None)
        evaluated, improved = None, False
        # Who interrupts does not want to wait for an evaluation: on_train_start of the resumed run makes up for it.
        if last or (not pressed and (late or step % run.evaluate_every == 0)):
            evaluated, improved = self._evaluate(trainer, task)
        if step % EVERY == 0 or evaluated is not None:
            self._report(trainer, task, speed, evaluated, improved)
        if last or pressed or late or improved or step % run.save_every == 0:
            self._save(trainer, step, improved)
        if pressed or (late and not last):
            self.stopped = "interrupted" if pressed else "out of time"
            trainer.should_stop = True
        self.clock.resume()

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:  # type: ignore[override]
        self.opened.close()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:  # type: ignore[override]
        self.opened.close()

    def _recent(self) -> list[float]:
        """Mean loss and penalty since the last report."""
        return [sum(values) / len(values) for values in zip(*self.window, strict=True)]

    def _agree(self, trainer: Trainer, task: Task) -> tuple[float, float, bool, bool]:
        """The ranks' mean loss and penalty, and whether any of them is to stop: all must take the same decisions."""
        means = torch.stack([torch.stack(parts).double().mean() for parts in (task.losses, task.penalties)])
        task.losses.clear()
        task.penalties.clear()
        late = 0 < self.run.seconds <= self.clock.seconds
        flags = torch.tensor([len(self.interrupt.came) > 0, late], dtype=torch.float64, device=means.device)
        values = trainer.strategy.reduce(torch.cat([means, flags]), reduce_op="sum")
        loss, penalty, pressed, late = values.tolist()
        return loss / trainer.world_size, penalty / trainer.world_size, pressed > 0, late > 0

    def _evaluate(self, trainer: Trainer, task: Task) -> tuple[float, bool]:
        """Bits on the validation split, and whether they are the fewest so far."""
        data, rank, world = task.dataset, trainer.global_rank, trainer.world_size
        share = total(task.model, data, "validation", roomy(data.length), self.run.evaluate_examples, rank, world)
        nats, tokens = trainer.strategy.reduce(share.to(trainer.strategy.root_device), reduce_op="sum").tolist()
        evaluated = nats / tokens / math.log(2)
        improved = evaluated < task.best
        task.best, task.evaluated = min(evaluated, task.best), trainer.global_step
        task.best_step = trainer.global_step if improved else task.best_step
        return evaluated, improved

    def _report(self, trainer: Trainer, task: Task, speed: float, evaluated: float | None, improved: bool) -> None:
        loss, penalty = self._recent()
        self.window.clear()
        if not trainer.is_global_zero:
            return
        step = trainer.global_step
        row = {"loss": loss, "bits": loss / math.log(2), "learning_rate": rate(self.run, step - 1)}
        row |= {"gradient_norm": task.norm, "tokens_per_second": speed, "seconds": self.clock.seconds}
        row |= {"penalty": penalty} if self.run.penalty else {}
        if evaluated is not None:
            row["validation_bits"] = evaluated
        self.table.write({"step": step, **row})
        self.events.write(row, step)
        if self.bar and evaluated is not None:
            star = "  (best so far)" if improved else ""
            train = f"training {loss / math.log(2):.3f}, validation {evaluated:.3f} bits/{task.dataset.unit}"
            own = f", penalty {penalty:.4g}" if self.run.penalty else ""
            self.bar.line(f"step {step}: {train}{own}{star}")

    def _save(self, trainer: Trainer, step: int, improved: bool) -> None:
        try:
            trainer.save_checkpoint(self.folder / _name(step))
        except ValueError as error:
            raise ValueError(f"{error}; {runs.kept(Path(self.run.out))}") from error
        if trainer.is_global_zero:
            self._point(step if improved else 0, step)
            self._prune()

    def _point(self, best: int, last: int) -> None:
        """Let the pointers name the checkpoints of these steps; what is there already, and step 0, stays unnamed."""
        # The best first: a run killed in between goes on from the older `last`, and meets this step again.
        for pointer, step in (("best", best), ("last", last)):
            path, text = self.folder / pointer, f"{_name(step)}\n"
            if (
                step
                and (self.folder / _name(step)).is_dir()
                and not (path.exists() and path.read_bytes() == text.encode())
            ):
                checkpoints.write_text(path, text)

    def _prune(self) -> None:
        pointed = {runs.pointer(self.folder / p) for p in ("best", "last") if (self.folder / p).exists()}
        names = sorted(path.name for path in self.folder.glob("step-*"))
        for name in names[: -self.run.keep]:
            if name not in pointed:
                shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in {path.name.split(".")[1] for path in self.folder.glob(".step-*")}:
            checkpoints.tidy(self.folder / name)


def _name(step: int) -> str:
    return f"step-{step:08d}"


class Interrupt:
    """Ctrl-C and its kin: at the first the step in hand is finished and saved, at the second all ends at once."""

    def __init__(self, say: Callable[[str], None]):
        self.came: list[int] = []
        self.say = say

    def __enter__(self) -> "Interrupt":
        self.stack = contextlib.ExitStack()
        self.take = self.stack.enter_context(signals.handled(self._press))
        return self

    def __exit__(self, *_: Any) -> None:
        self.stack.close()

    def _press(self, number: int) -> None:
        self.came.append(number)
        if len(self.came) > 1:
            raise signals.Interrupted(number=number)
        name = "interrupted" if number == signal.SIGINT else signal.Signals(number).name
        again = "press Ctrl-C again" if number == signal.SIGINT else "send it again"
        self.say(f"{name}: finishing the step and saving; {again} to stop at once")


class End(NamedTuple):
    """How a training ended in one of its processes."""

    steps: int
    """done since the very beginning"""
    why: str
    """it stopped early; "" for its last step"""
    signal: int
    """that stopped it; 0 for none"""
    first: bool
    """whether this process is rank 0"""


def train(
    model: Decoder, run: Run, dataset: Dataset, extra: dict[str, Any], start: Path | None, bar: Bar | None
) -> End:
    """Train ``model`` in place, from the checkpoint ``start`` if there is one; ``extra`` goes into each config.json."""
    gpu = torch.cuda.is_available()
    distributed = DDPStrategy(process_group_backend="nccl" if gpu else "gloo")
    with quiet(), Interrupt(bar.line if bar else lambda text: None) as interrupt:
        keeper = Keeper(run, interrupt, bar)
        trainer = Trainer(
            accelerator="gpu" if gpu else "cpu",
            devices=run.devices,
            strategy=distributed if run.devices > 1 else "auto",
            precision="bf16-mixed" if run.precision == "bf16" else "32-true",
            max_steps=run.steps,
            max_epochs=-1,
            accumulate_grad_batches=run.accumulate,
            logger=False,
            callbacks=[keeper],
            plugins=[FolderIO(model, extra)],
            default_root_dir=run.out,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_autolog_hparams=False,
        )
        why = ""
        try:
            trainer.fit(Task(model, run, dataset), ckpt_path=start)
        # At the second signal anything may come out: Lightning's own exit, or a process group that has lost its others.
        except BaseException as error:
            if len(interrupt.came) < 2 and not (interrupt.came and isinstance(error, SystemExit)):
                raise
            why = "stopped at once"
        why = why or ("interrupted" if interrupt.came else keeper.stopped)
        # One that came to another process only, of those that share the training, must have been meant for all.
        number = interrupt.came[0] if interrupt.came else signal.SIGTERM if why == "interrupted" else 0
        return End(trainer.global_step, why, number, trainer.is_global_zero)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Lightning's advertisements and its remarks on what we do on purpose stay unsaid; errors do not."""
    loggers = [logging.getLogger(name) for name in ("lightning", "lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for message, category in REMARKS:
                warnings.filterwarnings("ignore", message, category)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
