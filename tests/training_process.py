"""Tiny runs for the tests; and one in a separate process, to be killed or started twice: ``python THIS_FILE JOB``.

JOB is JSON: ``model`` and ``run`` (fields), ``resume``, ``pause`` (seconds before each micro-batch), ``record`` (the
folder to which each rank writes the examples it took and its weights at the end), ``double`` (train in float64), and
``writing`` (``step`` of a checkpoint in parts, and the ``seconds`` that each process then waits before it writes its
part, or the ``rank`` that fails to).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from longspan._utils import signals
from longspan.models import checkpoint, shards
from longspan.models.config import DecoderConfig
from longspan.train import TrainConfig, fit, loop, objectives

HANGS = 300  # seconds after which a process counts as hanging
TINY = DecoderConfig(dim=10, depth=1, heads=2, feedforward=14, vocab=17, length=64, dropout=0.1)


def tiny(folder, **fields):
    return TrainConfig(
        **{
            "steps": 11,
            "batch": 5,
            "evaluate_every": 4,
            "evaluate_examples": 7,
            "save_every": 3,
            "warmup": 2,
            "out": str(folder / "run"),
        }
        | fields
    )


def weights(folder, name=None):
    at = folder / "run" / "checkpoints"
    return (at / (name or (at / "last").read_text().strip()) / "model.safetensors").read_bytes()


def in_parts(folder, prefix):
    """The whole tensors of a checkpoint in parts whose names begin with ``prefix``."""
    return shards.read(folder, shards.parse_index(folder, (folder / checkpoint.INDEX).read_bytes()), prefix)


def checkpoints(folder):
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


def best_at(monkeypatch, step):
    """Make the validation bits of a run fall until ``step`` and rise from there."""
    evaluate = loop.Keeper._evaluate

    def scripted(keeper, trainer, task):
        nats = abs(trainer.global_step - step) + 1.0
        monkeypatch.setattr(objectives, "total", lambda *_, **options: torch.tensor([nats, 1.0]))
        return evaluate(keeper, trainer, task)

    monkeypatch.setattr(loop.Keeper, "_evaluate", scripted)


def impede(step, seconds=0.0, rank=-1):
    write = shards.FileSystemWriter.write_data

    def impeded(self, *arguments):
        if f"step-{step:08d}" in str(self.path):
            time.sleep(seconds)
            if os.environ.get("LOCAL_RANK", "0") == str(rank):
                raise OSError(28, "No space left on device")
        return write(self, *arguments)

    shards.FileSystemWriter.write_data = impeded


def train(job: dict[str, Any], change: Callable[[Any, str, Any], None] = setattr) -> None:
    """Do a job, with functions of the loop replaced by ``change``."""
    if job["writing"]:
        impede(**job["writing"])
    seed, order, original = loop.step_seed, objectives.batch_indices, loop.train
    taken: dict[int, list[int]] = {}

    def slow(*arguments):
        time.sleep(job["pause"])
        return seed(*arguments)

    def recorded(count, run_seed, index, *rest):
        indices = order(count, run_seed, index, *rest)
        taken[index] = indices.tolist()
        return indices

    def kept(model, *rest):
        result = original(model, *rest)
        rank = os.environ.get("LOCAL_RANK", "0")
        (Path(job["record"]) / f"taken-{rank}.json").write_text(json.dumps(taken))
        # Sharded weights are gathered by all processes together.
        own = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in model.state_dict().items()}
        torch.save(own, Path(job["record"]) / f"weights-{rank}.pt")
        return result

    change(loop, "step_seed", slow)
    change(objectives, "batch_indices", recorded)
    change(loop, "train", kept)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64 if job["double"] else dtype)
    try:
        fit(checkpoint.config_of(job["model"]), TrainConfig(**job["run"]), resume=job["resume"])
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)


def main() -> None:
    try:
        train(json.loads(sys.argv[1]))
    except KeyboardInterrupt as interruption:
        print(interruption, file=sys.stderr)
        sys.exit(128 + signals.number(interruption))


if __name__ == "__main__":
    main()
