"""Cost of a classifier's training step by mechanism: seconds and peak memory."""

import sys

import torch

from longspan._utils.machine import machine
from longspan.attention import plugins
from longspan.ops.buffers import return_pages

from ..bench import case, worker
from ..bench.candidates import Process
from ..bench.worker import Call, Makers, Task
from ..data.arena import Batch
from .experiment import Row, Track
from .lra_models import Classifier, Shape


def stepping(shape: Shape, batch: int, tokens: int, device: str) -> Call:
    """One training step on random tokens: forward, loss, backward, and AdamW's update."""
    model = Classifier(shape, 0).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(shape.vocab, (batch, shape.towers, tokens), generator=generator)
    labels = torch.randint(shape.classes, (batch,), generator=generator)
    example = Batch(rows, None, labels).to(device)

    def step() -> None:
        loss = model.loss(example)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.update()
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def find(_: str) -> Makers:
    """The makers of every subject, for a worker process."""

    def train(task: Task) -> Call:
        return_pages()  # as ``train`` does to save memory
        return stepping(Shape(*task["shape"]), task["batch"], task["length"], "cpu")

    return {"train": train}


def weigher() -> Process:
    """The process that measures memory, each step in a separate child."""
    # The experiments' defaults are checked as they are imported, which computes; a child of a process whose other
    # threads have computed would wait for them forever.
    alone = "import torch; torch.set_num_threads(1); "
    code = "from longspan_lab.bench.worker import serve; from longspan_lab.experiments import lra_cost; "
    code += "serve(lra_cost.find)"
    return Process([sys.executable, "-P", "-c", alone + plugins.again() + code])


def weighed(shape: Shape, batch: int, device: str) -> float | None:
    """Peak MB of a step, beyond weights and inputs; on a GPU with these. None if the system does not report it.

    Raises Refused where the step fails.
    """
    if device == "cuda":
        step = stepping(shape, batch, shape.length, device)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() / 2**20
    if sys.platform != "linux":
        return None
    sizes = {"batch": batch, "length": shape.length, "threads": machine()["threads"]}
    task = {"what": "train", "shape": shape, **sizes}
    process = weigher()
    try:
        return process.ask(do="memory", subject=shape.spec, task=task)["mb"]
    finally:
        process.close()


def cost(shape: Shape, batch: int, device: str, rounds: int, track: Track) -> Row:
    """Training steps a second, the median of ``rounds`` samples, and ``mb``, see ``weighed``.

    -> also ``rejected`` and ``disturbed``: samples taken while the machine was busy, and discarded or kept. Raises
    Refused where a step fails.
    """
    mb = weighed(shape, batch, device)
    step = stepping(shape, batch, shape.length, device)
    sampler = {"step": lambda repeat: worker.timed(step, repeat)}
    found, _ = case.take(sampler, rounds, shape.spec, track)
    figure = found["step"]
    return {
        "steps_per_second": round(1 / figure.seconds, 4),
        "mb": None if mb is None else round(mb, 2),
        "rejected": figure.rejected,
        "disturbed": figure.disturbed,
    }
