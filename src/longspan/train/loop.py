"""The engine: Lightning's loop with our checkpoints, order of examples and reports."""

import contextlib
import itertools
import logging
import math
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.io import CheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from .._utils import atomic_io, signals
from ..models import checkpoint as checkpoints
from ..models.decoder import Decoder
from ..models.stacks import Stack
from . import launch, loggers, together
from . import run_dir as runs
from .average import ENTRY, Average
from .config import TrainConfig, rate, step_seed
from .groups import parameter_groups
from .learned import Diary, scalars, summary
from .objectives import Objective
from .place import KEPT, PLACE, placed
from .report import EVERY, Bar, Clock, Table
from .sequence import Rows, reader
from .speed import flops_per_token, peak_of

# Lightning 2.6 on torch 2.13; each is a regular expression for the beginning of a message.
REMARKS = (
    (r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning),
    # No loss changes the outputs in place.
    (r"FSDP2-wrapped module .* returned a view tensor", UserWarning),
)


class Batches:
    """An endless sequence of (index, batch); each batch is a function of its index, so the state is one integer."""

    def __init__(self, objective: Objective, start: int, rank: int, world: int):
        self.objective, self.start, self.rank, self.world = objective, start, rank, world

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for index in itertools.count(self.start):
            yield index, self.objective.batch(index, self.rank, self.world)


class Task(LightningModule):
    """The training task: the loss of an objective, with the weights of the model and of the objective."""

    def __init__(self, model: nn.Module, run: TrainConfig, objective: Objective):
        super().__init__()
        self.model, self.run, self.objective = model, run, objective
        # Count micro-batches, not steps, so that prefetching and accumulation cannot shift it.
        self.micro = 0
        self.best, self.evaluated, self.best_step = math.inf, 0, 0
        self.parts: list[dict[str, Tensor]] = []
        self.norm = math.nan
        self.average = Average(run.ema) if run.ema else None
        # Steps without an update: all, and those in a row up to now.
        self.skipped = self.skipped_in_row = 0
        self.sharded = False

    def configure_model(self) -> None:
        if self.run.strategy == "fsdp" and not self.sharded:
            from .sharded import shard_task

            mesh = self.device_mesh
            assert mesh is not None
            shard_task(self, mesh["data_parallel"], self.trainer.strategy.root_device)
            self.sharded = True

    def setup(self, stage: str) -> None:
        self.objective.rows = Rows.of(self.run)

    def train_dataloader(self) -> Batches:
        return Batches(self.objective, self.micro, reader(self.run, self.global_rank), self.run.readers)

    def on_train_batch_start(self, batch: tuple[int, Any], batch_idx: int) -> None:
        torch.manual_seed(step_seed(self.run.seed, batch[0], self.global_rank))

    def training_step(self, batch: tuple[int, Any], batch_idx: int) -> Tensor:
        index, examples = batch
        loss, parts = self.objective.loss(self.model, examples)
        self.parts.append(parts)
        self.micro = index + 1
        return loss

    def means(self) -> dict[str, Tensor]:
        """The mean of each part of the loss over the micro-batches since ``parts`` was cleared."""
        return {name: torch.stack([one[name] for one in self.parts]).double().mean() for name in self.parts[0]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        groups = parameter_groups(self, self.run.weight_decay)
        if self.run.optimizer == "radam":
            return torch.optim.RAdam(groups, lr=self.run.learning_rate, decoupled_weight_decay=True)
        fused = {"fused": True} if self.run.fused else {}
        return torch.optim.AdamW(groups, lr=self.run.learning_rate, betas=(0.9, 0.95), **fused)

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        # The gradient is the mean over ranks, so all of them stop here together.
        norm: Any = torch.nn.utils.clip_grad_norm_(self.parameters(), self.run.clip or math.inf)
        # Sharded gradients have a sharded norm.
        self.norm = float(norm.full_tensor() if self.sharded else norm)
        if not math.isfinite(self.norm):
            loss = float(self.means()["loss"])
            what = f"the gradient's norm became {self.norm}" if math.isfinite(loss) else f"the loss became {loss}"
            if self.skipped_in_row >= self.run.skip_nonfinite:
                raise ValueError(self.broken(what))
            # Optimizers leave alone what has no gradient.
            for parameter in self.parameters():
                parameter.grad = None
            self.skipped, self.skipped_in_row = self.skipped + 1, self.skipped_in_row + 1
        else:
            self.skipped_in_row = 0
        for group in optimizer.param_groups:
            group["lr"] = rate(self.run, self.trainer.global_step)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["longspan"] = {name: getattr(self, name) for name in KEPT}
        checkpoint["longspan"][PLACE] = self.micro * self.run.batch * self.run.readers
        if self.run.skip_nonfinite:
            checkpoint["skipped"] = [self.skipped, self.skipped_in_row]
        if self.average:
            checkpoint[ENTRY] = self.average.values

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        for name in KEPT:
            setattr(self, name, checkpoint["longspan"][name])

        self.skipped, self.skipped_in_row = checkpoint.get("skipped", (0, 0))
        if self.average:
            self.average.values = checkpoint[ENTRY]

    def broken(self, what: str) -> str:
        """The message of an error that ends the training in all processes."""
        strategy: Any = self.trainer.strategy
        if self.run.async_checkpoints and (problem := strategy.settle()):
            what = f"{problem}; {what}"
        return (
            f"{what} at step {self.trainer.global_step}; {runs.kept(Path(self.run.out))}; "
            "a lower learning_rate, clip or precision=32 may help"
        )


class FolderIO(CheckpointIO):
    """Store Lightning's checkpoints as our checkpoint directories, without pickle."""

    def __init__(self, model: Any, run: TrainConfig, extra: dict[str, Any]):
        self.model, self.run, self.extra = model, run, extra

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        training = {name: value for name, value in checkpoint.items() if name != "state_dict"}
        own = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("objective.")}
        training |= {"objective": own} if own else {}
        extra = self.extra | {"step": checkpoint["global_step"]}
        checkpoints.save(self.model, path, training=training, extra=extra)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = True) -> dict[str, Any]:
        training = placed(path, checkpoints.restore(path, self.model), self.run)
        weights = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        return training | {"state_dict": weights | training.get("objective", {})}

    def remove_checkpoint(self, path: Any) -> None:
        shutil.rmtree(path)


class Keeper(Callback):
    """Before the first step: write the recipe. After each step: report, evaluate, save, stop."""

    def __init__(self, run: TrainConfig, interrupt: "Interrupt", bar: Bar | None, watch: together.Watch):
        self.run, self.interrupt, self.bar, self.watch = run, interrupt, bar, watch
        self.folder = Path(run.out) / "checkpoints"
        self.window: list[dict[str, float]] = []
        self.stopped = ""
        self.opened = contextlib.ExitStack()

    def setup(self, trainer: Trainer, task: Task, stage: str) -> None:
        # By now the processes have compared their runs.
        if trainer.is_global_zero:
            model: Any = task.model
            content = yaml.safe_dump(runs.recipe(model.config, self.run), sort_keys=False)
            checkpoints.write_text(Path(self.run.out) / runs.CONFIG, content)

    def on_train_start(self, trainer: Trainer, task: Task) -> None:
        run, step = self.run, trainer.global_step
        self.clock = Clock(run.step_examples * task.objective.tokens)
        peak = peak_of(run) * 1e12 * trainer.world_size
        # Share of the peak at one token per second; None where the peak is unknown.
        self.share = flops_per_token(task.model) / peak if peak and isinstance(task.model, Decoder) else None
        # Lightning has installed its signal handlers by now; its SIGTERM would end the run without a checkpoint.
        self.interrupt.take()
        if trainer.is_global_zero:
            self.table = Table(Path(run.out) / "metrics.csv", step)
            self.diary = Diary(Path(run.out), step)
            model: Any = task.model
            logger = loggers.build(run, step, {"model": model.config.to_dict(), "run": asdict(run)})
            self.events = self.opened.enter_context(contextlib.closing(logger))
            self._point(task.best_step, step)
        if self.bar:
            self.bar.start(step)
            self.opened.callback(self.bar.stop)
        if step and step % run.evaluate_every == 0 and task.evaluated < step:
            _, improved = self._evaluate(trainer, task)
            if improved:
                self._save(trainer, step, improved)
        self._go_on(step)

    def on_train_batch_end(self, trainer: Trainer, task: Task, *_: Any) -> None:
        if task.micro % self.run.accumulate:
            return
        run, step, speed = self.run, trainer.global_step, self.clock.lap()
        parts, pressed, late = self._agree(trainer, task)
        # An infinite loss can have a finite gradient: that of a term that does not depend on the weights.
        if not math.isfinite(loss := parts["loss"]) and not task.skipped_in_row:
            raise ValueError(task.broken(f"the loss became {loss}"))
        self.names = tuple(parts)
        if task.skipped_in_row:
            task.objective.skip(task.model)
            if self.bar:
                self.bar.line(f"step {step}: skipped, its gradient is not finite; {task.skipped} skipped so far")
        else:
            task.objective.update(task.model)
            self.window.append(parts)
            if task.average:
                task.average.update(task.model, step)
        last = step >= run.steps
        if self.bar:
            recent = self._recent()
            self.bar.step(step, recent["loss"], task.objective.nats, speed, recent.get("penalty"))
        evaluated, improved = None, False
        # No evaluation after an interruption: on_train_start of the resumed run does it.
        if last or (not pressed and (late or step % run.evaluate_every == 0)):
            evaluated, improved = self._evaluate(trainer, task)
        if step % EVERY == 0 or evaluated is not None:
            self._report(trainer, task, speed, evaluated, improved)
        if last or pressed or late or improved or step % run.save_every == 0:
            self._save(trainer, step, improved, final=last or pressed or late)
        if pressed or (late and not last):
            self.stopped = "interrupted" if pressed else "out of time"
            trainer.should_stop = True
        self._go_on(step)

    def _go_on(self, step: int) -> None:
        self.watch.enter(f"step {step + 1}")
        self.clock.resume()

    def teardown(self, trainer: Trainer, task: Task, stage: str) -> None:
        self.opened.close()

    def on_exception(self, trainer: Trainer, task: Task, exception: BaseException) -> None:
        self.opened.close()

    def _recent(self) -> dict[str, float]:
        """Mean parts of the loss since the last report."""
        if not self.window:  # all steps were skipped
            return dict.fromkeys(self.names, math.nan)
        return {name: sum(parts[name] for parts in self.window) / len(self.window) for name in self.window[0]}

    def _agree(self, trainer: Trainer, task: Task) -> tuple[dict[str, float], bool, bool]:
        """Mean parts of the loss over ranks, and whether any rank must stop, so that all decide alike."""
        means = task.means()
        task.parts.clear()
        late = 0 < self.run.seconds <= self.clock.seconds
        flags = torch.tensor([len(self.interrupt.came) > 0, late], dtype=torch.float64, device=means["loss"].device)
        values = trainer.strategy.reduce(torch.cat([torch.stack([*means.values()]), flags]), reduce_op="sum")
        *shares, pressed, late = values.tolist()
        return {name: x / trainer.world_size for name, x in zip(means, shares, strict=True)}, pressed > 0, late > 0

    def _evaluate(self, trainer: Trainer, task: Task) -> tuple[dict[str, float], bool]:
        """The metrics of the validation split, and whether its bits are the lowest so far."""
        self.watch.enter(f"the evaluation after step {trainer.global_step}")
        # The rest of a model in parts is with processes that would be done earlier.
        together = task.sharded and not task.objective.even
        part = (0, 1) if together else (reader(self.run, trainer.global_rank), self.run.readers)
        sums = task.objective.sums(task.model, "validation", *part)
        if not together or self.run.sequence_parallel > 1:
            sums = trainer.strategy.reduce(sums.to(trainer.strategy.root_device), reduce_op="sum")
        evaluated = task.objective.figures(sums)
        improved = evaluated["bits"] < task.best
        task.evaluated = trainer.global_step
        if improved:  # not by min(), which takes a NaN where it comes first
            task.best, task.best_step = evaluated["bits"], trainer.global_step
        return evaluated, improved

    def _report(
        self, trainer: Trainer, task: Task, speed: float, evaluated: dict[str, float] | None, improved: bool
    ) -> None:
        parts = self._recent()
        self.window.clear()
        # All processes run a sharded model together.
        chosen = (
            {}
            if evaluated is None or not (task.sharded or trainer.is_global_zero)
            else task.objective.learned(task.model)
        )
        if not trainer.is_global_zero:
            return
        step, bits = trainer.global_step, parts["loss"] / math.log(2)
        row = {"loss": parts["loss"], "learning_rate": rate(self.run, step - 1)}
        row |= {"bits": bits} if task.objective.nats else {}
        row |= {"gradient_norm": task.norm, "tokens_per_second": speed, "seconds": self.clock.seconds}
        row |= {"mfu": self.share * speed} if self.share else {}
        row |= {"skipped": task.skipped} if self.run.skip_nonfinite else {}
        row |= parts | {f"validation_{name}": value for name, value in (evaluated or {}).items()}
        row |= summary(chosen)
        self.diary.write(step, chosen)
        self.table.write({"step": step, **row})
        self.events.write(row | scalars(chosen), step)
        if self.bar and evaluated is not None:
            star = "  (best so far)" if improved else ""
            train = f"training {bits:.3f}" if task.objective.nats else f"training loss {parts['loss']:.4g}"
            train += f", validation {task.objective.shown(evaluated['bits'])}"
            own = f", exact {evaluated['exact']:.1%}" if "exact" in evaluated else ""
            own += f", accuracy {evaluated['accuracy']:.1%}" if "accuracy" in evaluated else ""
            own += f", penalty {parts['penalty']:.4g}" if "penalty" in parts else ""
            own += task.objective.remark(chosen)
            self.bar.line(f"step {step}: {train}{own}{star}")

    def _save(self, trainer: Trainer, step: int, improved: bool, final: bool = False) -> None:
        def complete() -> None:
            self._point(step if improved else 0, step)
            self._prune()

        strategy: Any = trainer.strategy
        self.watch.enter(f"the checkpoint of step {step}")
        try:
            if self.run.async_checkpoints:
                strategy.after_save = complete
            trainer.save_checkpoint(self.folder / _name(step))
            if self.run.async_checkpoints and final:
                strategy.finish()
        except ValueError as error:
            raise ValueError(f"{error}; {runs.kept(Path(self.run.out))}") from error
        if trainer.is_global_zero and not self.run.async_checkpoints:
            complete()

    def _point(self, best: int, last: int) -> None:
        """Point ``best`` and ``last`` to the checkpoints of these steps; step 0 changes nothing."""
        # First `best`: a run killed in between resumes from the older `last` and repeats this step.
        for pointer, step in (("best", best), ("last", last)):
            path, text = self.folder / pointer, f"{_name(step)}\n"
            if (
                step
                and (self.folder / _name(step)).is_dir()
                and not (path.exists() and atomic_io.read(path) == text.encode())
            ):
                checkpoints.write_text(path, text)

    def _prune(self) -> None:
        pointed = {runs.pointer(self.folder / p) for p in ("best", "last") if (self.folder / p).exists()}
        names = sorted(path.name for path in self.folder.glob("step-*"))
        for name in names[: -self.run.keep]:
            if name not in pointed:
                # Renamed first: a process killed meanwhile leaves no checkpoint that lacks files.
                leaving = atomic_io.sibling_path(self.folder / name, "tmp")
                (self.folder / name).rename(leaving)
                atomic_io.remove(leaving)
        for name in {path.name.split(".")[1] for path in self.folder.glob(".step-*")}:
            checkpoints.tidy(self.folder / name)


def _name(step: int) -> str:
    return f"step-{step:08d}"


class Interrupt:
    """Ctrl-C and similar signals: the first one finishes the step and saves, the second one stops immediately."""

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
        self.say(f"{name}: finishing the step and saving; {again} to stop immediately")


class End(NamedTuple):
    """How a training ended in one of its processes."""

    steps: int
    """steps done, including those before a resume"""
    why: str
    """why it stopped early; "" after the last step"""
    signal: int
    """number of the signal that stopped it; 0 for none"""
    first: bool
    """whether this process is rank 0"""


def train(
    model: nn.Module, run: TrainConfig, objective: Objective, extra: dict[str, Any], start: Path | None, bar: Bar | None
) -> End:
    """Train ``model`` in place, from the checkpoint ``start`` if there is one; ``extra`` goes into each config.json."""
    gpu = torch.cuda.is_available()
    if run.compile:
        for block in blocks_of(model):
            block.compile()
    with quiet(), Interrupt(bar.line if bar else lambda text: None) as interrupt, together.Watch(run) as watch:
        keeper = Keeper(run, interrupt, bar, watch)
        trainer = Trainer(
            accelerator="gpu" if gpu else "cpu",
            devices=run.devices,
            num_nodes=run.nodes,
            strategy=strategy(model, run, extra, start, "nccl" if gpu else "gloo"),
            precision="bf16-mixed" if run.precision == "bf16" else "32-true",
            max_steps=run.steps,
            max_epochs=-1,
            accumulate_grad_batches=run.accumulate,
            logger=False,
            callbacks=[keeper],
            plugins=[] if run.strategy == "fsdp" else [FolderIO(model, run, extra)],
            default_root_dir=run.out,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_autolog_hparams=False,
        )
        if (trainer.world_size, trainer.is_global_zero) != (run.world, launch.first()):
            raise ValueError(
                f"this process is {trainer.global_rank} of {trainer.world_size} for Lightning, but the run has "
                f"{run.world}; start the command with torchrun, or unset the launcher's variables in the environment"
            )
        why, watch.rank = "", trainer.global_rank
        try:
            trainer.fit(Task(model, run, objective), ckpt_path=start)
        # After a second signal any exception is possible, such as the exit of Lightning or a broken process group.
        except BaseException as error:
            if len(interrupt.came) < 2 and not (interrupt.came and isinstance(error, SystemExit)):
                if not (lost := watch.explain(error)):
                    raise
                # Processes that Lightning has started would outlive this one, stopped as they may be.
                if trainer.strategy.launcher is not None:
                    trainer.strategy.launcher.kill(signal.SIGKILL)
                raise ValueError(f"{lost}; {runs.kept(Path(run.out))}") from error
            why = "stopped immediately"
        why = why or ("interrupted" if interrupt.came else keeper.stopped)
        # A signal to another process of this training stops all of them.
        number = interrupt.came[0] if interrupt.came else signal.SIGTERM if why == "interrupted" else 0
        return End(trainer.global_step, why, number, trainer.is_global_zero)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of all stacks of a model."""
    return [block for module in model.modules() if isinstance(module, Stack) for block in module.blocks]


class ReplicatedStrategy(DDPStrategy):
    """Lightning's strategy for processes with all weights each."""

    def __init__(self, run: TrainConfig, backend: str, same: Mapping[str, Any]):
        super().__init__(process_group_backend=backend, timeout=timedelta(seconds=run.timeout))
        self.same = same

    def setup_distributed(self) -> None:
        """Connect the processes, and refuse those of another run."""
        super().setup_distributed()
        together.require_same(self.same)


def strategy(model: Any, run: TrainConfig, extra: dict[str, Any], start: Path | None, backend: str) -> Any:
    """How Lightning distributes the run."""
    parts = runs.recipe(model.config, run)
    same = {f"{part}.{name}": value for part, fields in parts.items() for name, value in fields.items()}
    same |= {checkpoints.DATA: extra[checkpoints.DATA], "resumed checkpoint": start.name if start else ""}
    if run.strategy == "fsdp":
        from .sharded import ShardedStrategy, check

        check(model)
        return ShardedStrategy(model, run, extra, backend, same)
    return ReplicatedStrategy(run, backend, same) if run.world > 1 else "auto"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence Lightning's tips and known warnings, but not errors."""
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
