"""Peak memory of a training step by depth: blocks as they are, checkpointed, and reversible."""

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

from longspan._utils.machine import machine
from longspan._utils.spec import split
from longspan.attention import build, plugins
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.ops.buffers import MAPPED, return_pages

from .._utils.tables import Table
from . import case, figures
from .candidates import Process, Refused
from .case import Watch
from .options import length, option
from .worker import Call, Makers, Task

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"checkpointing": True},
    "reversible": {"stack": "reversible"},
}
ROOM = 0.8  # part of the memory that is free that a step may be expected to take


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    depths: tuple[int, ...] = option((2, 4, 8, 16, 24, 64), "numbers of blocks", "sizes")
    length: int = length(16384)
    attention: str = option("linear", "a spec, or several separated by ';', tiled over the depth", metavar="SPEC")
    dim: int = option(128, "width of the model, in channels")
    heads: int = option(4, "attention heads")
    feedforward: int = option(512, "inner width of the feed-forward network")
    feedforward_chunk: int = option(0, "tokens per chunk of the feed-forward network; 0: no chunks", "count")
    limit: float = option(20_000.0, "skip steps expected to take more than X MB, extrapolated linearly", "MB")

    def config(self, kind: str, depth: int) -> DecoderConfig:
        """The decoder's. Raises ValueError where the sizes do not fit each other."""
        names = ("attention", "dim", "heads", "feedforward", "feedforward_chunk")
        return DecoderConfig(
            **{name: getattr(self, name) for name in names}, **VARIANTS[kind], depth=depth, positions="sinusoidal"
        )


def find(kind: str) -> Makers:
    """The makers of one kind of stack for a worker."""

    def train(task: Task) -> Call:
        return_pages()  # as train does for what is to need less memory
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**task["config"])).train()
        tokens = torch.randint(0, 256, (task["batch"], task["length"]))

        def step() -> None:
            outputs, _ = model(model.shift(tokens))
            F.cross_entropy(outputs.flatten(0, 1), tokens.flatten()).backward()

        return step

    return {"train": train}


def weigher() -> Process:
    """The process that measures memory, with a child process for each step."""
    code = "from longspan_lab.bench import depth, worker; worker.serve(depth.find)"
    return Process([sys.executable, "-P", "-c", plugins.again() + code])


def run(options: Options, weigher: Process, watch: Watch) -> Iterator[dict[str, Any]]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError for invalid sizes."""
    for spec in split(options.attention):
        build(spec, options.dim, options.heads)
    for kind in VARIANTS:
        for depth in options.depths:
            options.config(kind, depth)
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    todo = [(kind, depth) for depth in sorted(options.depths) for kind in VARIANTS]
    for kind, depth in watch(todo, len(todo), "memory by depth"):
        config = options.config(kind, depth).to_dict()
        task = {
            "what": "train",
            "batch": 1,
            "length": options.length,
            "config": config,
            "threads": machine()["threads"],
        }
        row = {"candidate": kind, "depth": depth, "length": options.length}
        expected, room = line(rows, kind, depth), min(options.limit, ROOM * case.available())
        if expected > room:
            # Two depths give a line, and memory is one.
            rows.append({**row, "expected_mb": round(expected, 1)})
            reason = f"depth {depth} would take about {expected:,.0f} MB, and {room:,.0f} may be taken"
            left_out.append({"candidate": kind, "reason": reason})
        else:
            try:
                rows.append({**row, "mb": weigher.ask(do="memory", subject=kind, task=task)["mb"]})
            except Refused as error:
                left_out.append({"candidate": kind, "reason": f"depth {depth}: {error}"})
        yield {
            "benchmark": "depth",
            "how": _how(options),
            "machine": machine(),
            "options": asdict(options),
            "rows": rows,
            "refused": [],
            "left_out": left_out,
        }


def line(rows: list[dict[str, Any]], kind: str, depth: int) -> float:
    """MB expected at a depth, from the two largest that were measured; 0 without two."""
    found = sorted((row["depth"], row["mb"]) for row in rows if row["candidate"] == kind and "mb" in row)
    if len(found) < 2:
        return 0.0
    (m, a), (n, b) = found[-2:]
    return b + (b - a) / (n - m) * (depth - n)


def _how(options: Options) -> str:
    return (
        f"resident memory of one training step (forward, loss, backward with the gradients of all weights) of a "
        f"decoder of {options.attention} attention, {options.dim} wide, {options.heads} heads, feed-forward network of "
        f"{options.feedforward}, one sequence of {options.length} tokens, float32, at its peak, in a fresh process and "
        f"beyond the weights; freed tensors go back to the system at once (MALLOC_MMAP_THRESHOLD_={MAPPED}); figures "
        f"with ~ are on the line through the two largest depths measured"
    )


def table(result: dict[str, Any]) -> Table:
    """MB by depth, how they grow, and what a block adds."""
    depths = sorted({row["depth"] for row in result["rows"]})
    at = {(row["candidate"], row["depth"]): row for row in result["rows"]}
    found: Table = [["peak MB", *(f"depth {depth}" for depth in depths), "MB a block"]]
    for kind in dict.fromkeys(row["candidate"] for row in result["rows"]):
        cells = [_cell(at.get((kind, depth), {})) for depth in depths]
        measured = {depth: at[kind, depth]["mb"] for depth in depths if "mb" in at.get((kind, depth), {})}
        found.append([kind, *cells, f"{figures.slope(measured):.1f}" if len(measured) > 1 else "-"])
    return found


def _cell(row: dict[str, Any]) -> str:
    return f"{row['mb']:,.0f}" if "mb" in row else f"~{row['expected_mb']:,.0f}" if "expected_mb" in row else "-"


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    return [table(result)]
