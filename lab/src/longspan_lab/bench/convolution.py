"""The causal depth-wise convolution, on whole sequences and by tokens, against moving its bytes once."""

from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan import ops
from longspan._utils.machine import machine
from longspan.ops.buffers import reuse_pages
from longspan.ops.convolution import causal_convolution

from .._utils.tables import Table, duration
from . import case
from .candidates import Sampler
from .case import Watch
from .options import length, option, rounds

DTYPES = ("float32", "bfloat16")
BOUNDS = {"sequence": "copy", "step": "state in place"}
# Largest difference from float64 for values of about 1: a few roundings of this dtype.
ALLOWED = {"float32": 1e-5, "bfloat16": 3e-2}
PLAIN = "without silu"
TRIED = 33  # tokens on which each candidate first has to agree with the definition


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    length: int = length(2048)
    channels: int = option(4096, "channels")
    width: int = option(4, "width of the kernel, in tokens")
    batches: tuple[int, ...] = option((1, 64), "batch sizes of the decode step", "sizes")
    rounds: int = rounds(21)


Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""x (B,N,C), weight (C,K), bias (C,), state (B,K-1,C)"""


def operands(options: Options, rows: int, tokens: int, dtype: str) -> Operands:
    """Random ones; all, the state too, in one precision, as models in that precision hold them."""
    kind, draw = getattr(torch, dtype), torch.Generator().manual_seed(0)
    shapes = (
        (rows, tokens, options.channels),
        (options.channels, options.width),
        (options.channels,),
        (
            rows,
            options.width - 1,
            options.channels,
        ),
    )
    x, weight, bias, state = (torch.randn(shape, generator=draw).to(kind) for shape in shapes)
    return x, weight, bias, state


def ours(given: Operands, backend: str = "auto", activation: str | None = "silu") -> Tensor:
    """The public function; the state is overwritten."""
    x, weight, bias, state = given
    with ops.backend(backend):
        return causal_convolution(x, weight, bias, state, activation=activation, donate=True)[0]


def conv1d(given: Operands) -> Tensor:
    """As models write it: channels first, ``conv1d`` with a group for each channel, the end cut off; from zeros."""
    x, weight, bias, _ = given
    y = F.conv1d(x.mT, weight[:, None], bias, padding=weight.shape[1] - 1, groups=weight.shape[0])
    return F.silu(y[..., : x.shape[1]]).mT


WAYS: dict[str, Callable[[Operands], Tensor]] = {
    "longspan": ours,
    PLAIN: partial(ours, activation=None),
    "longspan@torch": partial(ours, backend="torch"),
    "conv1d": conv1d,
}


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure; yield the growing result for ``report.collect``."""
    reuse_pages()
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    for dtype in DTYPES:
        for what, batch in (("sequence", 1), *(("step", batch) for batch in options.batches)):
            samplers: dict[str, Sampler] = {}
            tokens = options.length if what == "sequence" else 1
            # conv1d begins from zeros, so it is no step.
            for name in (name for name in WAYS if what == "sequence" or name != "conv1d"):
                if found := _wrong(name, options, what, dtype):
                    refused.append({"candidate": f"{name} {what} {dtype}", "reason": found, "ours": name != "conv1d"})
                    continue
                samplers[name] = case.bound(partial(WAYS[name], operands(options, batch, tokens, dtype)))
            given = operands(options, batch, tokens, dtype)
            samplers |= {name: case.bound(call) for name, call in _bounds(what, given).items()}
            found, failed = case.take(samplers, options.rounds, f"{dtype}, {what}, {batch} rows", watch)
            refused += [{"candidate": f"{n} {what} {dtype}", "reason": r, "ours": True} for n, r in failed.items()]
            bound = found[BOUNDS[what]].seconds
            rows += [
                {
                    "candidate": name,
                    "what": what,
                    "batch": batch,
                    "dtype": dtype,
                    **figure.row(),
                    "to_bound": figure.seconds / bound,
                }
                for name, figure in found.items()
            ]
            yield {
                "benchmark": "convolution",
                "how": _how(options),
                "machine": machine(),
                "options": asdict(options),
                "rows": rows,
                "refused": refused,
            }


def _bounds(what: str, given: Operands) -> dict[str, Callable[[], object]]:
    x, _, _, state = given
    target = torch.empty_like(x)
    if what == "step":
        return {BOUNDS["step"]: lambda: state.mul_(1.0)}
    return {BOUNDS["sequence"]: lambda: target.copy_(x), "copy to new memory": x.clone}


def _wrong(name: str, options: Options, what: str, dtype: str) -> str:
    """How a candidate differs from the definition in float64; "" where it does not."""
    given = operands(options, 2, TRIED if what == "sequence" else 1, dtype)
    if name == "conv1d":
        given[3].zero_()
    x, weight, bias, state = (one.double() for one in given)
    with ops.backend("reference"):
        defined, _ = causal_convolution(x, weight, bias, state, activation=None if name == PLAIN else "silu")
    error = float((WAYS[name](given).double() - defined).abs().max() / defined.abs().max())
    return "" if error <= ALLOWED[dtype] else f"it differs from the definition by {error:.2g}"


def _how(options: Options) -> str:
    return (
        f"{options.channels} channels, each with its own last {options.width} values, bias and silu; sequence: "
        f"{options.length} tokens of one row, copy: reading x and writing as much, into memory that is there; step: "
        f"one token, the state of {options.width - 1} values donated, state in place: state.mul_(1.0); without silu: "
        f"longspan's, the arithmetic of silu left out; conv1d: torch's, channels first, with its own silu; weights and "
        f"states in the same precision; medians of {options.rounds} rounds; freed memory is kept, as in training; each "
        f"candidate first agreed with a float64 definition"
    )


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    rows = result["rows"]
    cases = list(dict.fromkeys((row["what"], row["batch"], row["dtype"]) for row in rows))
    tables = []
    for what in dict.fromkeys(what for what, _, _ in cases):
        columns = [(batch, dtype) for kind, batch, dtype in cases if kind == what]
        at = {(r["candidate"], r["batch"], r["dtype"]): r for r in rows if r["what"] == what}
        head = [what, *(f"{dtype}, {batch} row{'s' * (batch > 1)}" for batch, dtype in columns)]
        names = list(dict.fromkeys(name for name, _, _ in at))
        tables.append([head, *([name, *(_cell(at.get((name, *column))) for column in columns)] for name in names)])
    return tables


def _cell(row: dict[str, Any] | None) -> str:
    return f"{duration(row['seconds'])} ({row['to_bound']:.2f} of bound)" if row else ""
