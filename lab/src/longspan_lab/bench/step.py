"""One layer's decode step by batch size, compared with scaling its state in place."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from longspan._utils.machine import machine

from .._utils.tables import Table, duration
from . import case, local, oracle
from .candidates import Candidate, Local, Process, Refused, Remote
from .case import Watch
from .options import option, rounds

DEFAULT = ("kernel", "linear", "linear@torch")
BOUND = "state in place"


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    batches: tuple[int, ...] = option((1, 64, 1024), "batch sizes", "sizes")
    heads: int = option(8, "attention heads")
    size: int = option(64, "channels per head")
    rounds: int = rounds(21)


def run(
    names: Sequence[str], remotes: Sequence[Remote], weigher: Process, options: Options, watch: Watch
) -> Iterator[dict]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError for other candidates."""
    candidates: dict[str, Candidate] = {}
    for name in names:
        if "step" not in (makers := local.find(name)):
            raise ValueError(f"{name!r} has no decode step; choose kernel, linear or linear@BACKEND")
        candidates[name] = Local(name, makers, weigher)
    candidates |= {remote.name: remote for remote in remotes if remote.name == "ft"}
    rows, refused = [], {}
    for batch in options.batches:
        task = {
            "what": "step",
            "batch": batch,
            "length": 1,
            "heads": options.heads,
            "size": options.size,
            "dtype": "float32",
            "threads": machine()["threads"],
        }
        samplers, errors = {}, {}
        for name, candidate in candidates.items():
            if name in refused:
                continue
            try:
                errors[name] = oracle.check_step(candidate, _defined(name), task)
                samplers[name] = candidate.sampler(task)
            except Refused as error:
                refused[name] = str(error)
        state = torch.ones(batch, options.heads, options.size, options.size + 1)
        samplers[BOUND] = case.bound(lambda state=state: state.mul_(1.0))
        found, failed = case.take(samplers, options.rounds, f"batch {batch}", watch)
        refused |= failed
        for name, figure in found.items():
            row = {"candidate": name, "batch": batch, **figure.row(), "to_bound": figure.seconds / found[BOUND].seconds}
            if name in errors:
                row["error"] = errors[name]
            if "ft" in found:
                row["ratio"] = found["ft"].seconds / figure.seconds
            rows.append(row)
        for candidate in candidates.values():
            candidate.release()
        yield {
            "benchmark": "step",
            "how": _how(options),
            "machine": machine(),
            "options": asdict(options),
            "rows": rows,
            "refused": [{"candidate": n, "reason": r, "ours": candidates[n].ours} for n, r in refused.items()],
        }


def _how(options: Options) -> str:
    return (
        f"one token of one layer, H {options.heads}, D {options.size}, float32, state donated, medians of "
        f"{options.rounds} rounds; kernel: the native function alone; the others are called through their public "
        f"functions; {BOUND}: state.mul_(1.0), which reads and writes what a step must; each candidate first agreed "
        f"with a float64 definition"
    )


def _defined(name: str) -> dict[str, Any]:
    """The options of the definition that a candidate is held to."""
    return {} if name in ("kernel", "ft") else local.options(local.read(name).spec)


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    rows, batches = result["rows"], result["options"]["batches"]
    at = {(row["candidate"], row["batch"]): row for row in rows}
    names = list(dict.fromkeys(row["candidate"] for row in rows))

    def cell(row: dict[str, Any]) -> str:
        ratio = f", {row['ratio']:.2f}x ft" if "ratio" in row else ""
        return f"{duration(row['seconds'])} ({row['to_bound']:.2f} of bound{ratio})"

    body = [[name, *(cell(at[name, b]) if (name, b) in at else "" for b in batches)] for name in names]
    return [[["one token", *(f"batch {batch}" for batch in batches)], *body]]
