"""Where the time of the native CPU kernels goes: shares of their bound, page faults, stages, and token steps.

The bound is the rate of matrix products, or, for scans and the convolution, a copy of as many bytes as the operands and
results have. Useful operations per token and head, by the definition as an RNN with keys of D and values of E channels:
4 D E forward for linear attention and decay, 14 D E with the backward pass; 6 D E and 20 D E for the delta rule; 8 D E
and 28 D E for the general one.
"""

import ctypes
import math
import resource
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._utils.machine import machine
from longspan._utils.spec import known
from longspan.ops import gated as op
from longspan.ops.backends import backend
from longspan.ops.buffers import reuse_pages
from longspan.ops.convolution import causal_convolution
from longspan.ops.gated.general import general_delta_rule
from longspan.ops.linear import linear_attention
from longspan.ops.native import build
from longspan.ops.native.build import instruction_sets
from longspan.ops.native.build.openmp import threads
from longspan.ops.native.call import LARGEST, MAPS, TYPES, available, pointers
from longspan.ops.scan import diagonal_scan, selective_scan

from .._utils.tables import Table, duration
from . import case, gated, limits, oracle
from .candidates import Refused
from .case import Watch
from .options import lengths, option, rounds
from .worker import Call

MODES = gated.MODES[:2]
# In the order of the enum in ops/native/shared/stages.h.
STAGES = (
    "waiting",
    "states",
    "reading",
    "mapping",
    "scoring",
    "from state",
    "within chunk",
    "solving",
    "updating",
    "scanning",
    "convolving",
    "summing",
    "writing",
)
WAITING = STAGES[0]
STEPS = ("linear", "decay", "delta", "gated delta")  # kernels whose token steps are measured
OWN = "native"  # the name of the measured kernels among the candidates of a case
EMPTY = "empty call"
MOST_CALLS, SPENT = 200, 0.2  # calls, and about the seconds, that page faults and stages are counted over


GEMM, COPY = BOUNDS = ("GEMM", "copy")
STATES, TAPS = 16, 4  # of a channel in the selective scan, and of the convolution


class Kernel(NamedTuple):
    """A kernel of sequences, and the work of a token."""

    family: str
    """of ``ops.native.build``"""
    forward: int
    """GEMM: useful operations per head, in units of D E; COPY: numbers per channel that are read or written"""
    backward: int
    """the same with the backward pass"""
    bound: str = GEMM
    """of its time: that of matrix products with as many operations, or of a copy of as many bytes"""
    shared: tuple[int, int] = (0, 0)
    """COPY: numbers that all channels share, forward and with the backward pass"""


KERNELS = {
    "linear": Kernel("linear", 4, 14),
    "decay": Kernel("gated", 4, 14),
    "channel decay": Kernel("gated", 4, 14),
    "delta": Kernel("gated", 6, 20),
    "gated delta": Kernel("gated", 6, 20),
    "general delta": Kernel("general", 8, 28),
    # Of the inputs, the output, and the gradients of both; a backward pass reads its inputs again.
    "diagonal scan": Kernel("scan", 3, 3 + 5, COPY),
    "selective scan": Kernel("scan", 4, 4 + 7, COPY, (2 * STATES, 2 * STATES + 4 * STATES)),
    "convolution": Kernel("convolution", 2, 2 + 3, COPY),
}
Operands = dict[str, Tensor | None]
Step = Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    kernels: tuple[str, ...] = option(
        tuple(KERNELS),
        f"what to measure, by default all: {', '.join(repr(name) if ' ' in name else name for name in KERNELS)}",
        "positional",
        metavar="KERNEL",
    )
    lengths: tuple[int, ...] = lengths(512, 4096, 16384, 65536)
    heads: int = option(8, "attention heads; scans and the convolution have heads x size channels")
    size: int = option(64, "channels per head")
    batches: tuple[int, ...] = option(
        (1, 16, 64, 1024), "batch sizes of the decode step; 0: do not measure it", "optional"
    )
    rounds: int = rounds(7, "samples per kernel and length; three times as many for the decode step")
    backward: bool = option(True, "measure the forward pass and the decode step only")


def operations(kernel: str, mode: str, size: int, tokens: int) -> int:
    """Useful operations of a call; ``tokens`` of all heads, each head with ``size`` channels of keys and values.

    Of a kernel whose bound is GEMM.
    """
    return (KERNELS[kernel].forward if mode == MODES[0] else KERNELS[kernel].backward) * size**2 * tokens


def traffic(kernel: str, mode: str, channels: int, tokens: int) -> int:
    """Numbers of a call that are read or written: operands and results of each pass, once, without parameters.

    Of a kernel whose bound is COPY.
    """
    _, forward, backward, _, shared = KERNELS[kernel]
    each, once = (forward, shared[0]) if mode == MODES[0] else (backward, shared[1])
    return (each * channels + once) * tokens


def operands(kernel: str, batch: int, length: int, heads: int, size: int) -> Operands:
    """Operands as projections give them.

    (B,N,H*D) taken apart into (B,H,N,D), with keys of norm 1 for rules that erase, or (B,N,channels) with H*D channels.
    """
    channels = heads * size

    def random(*sizes: int) -> Tensor:
        return torch.randn(batch, length, *sizes)

    def split() -> Tensor:
        return random(heads, size).transpose(1, 2)

    match kernel:
        case "linear":
            return {name: split() for name in "qkv"}
        case "general delta":
            read = F.normalize(split(), dim=-1)
            given: Operands = {
                "q": split(),
                "k": split(),
                "v": split(),
                "read": read,
                "erase": read * split().sigmoid(),
            }
            return given | {"log_decay": -math.exp(-0.5) * split().sigmoid()}
        case "diagonal scan":
            return {"x": random(channels), "log_decay": -0.1 * random(channels).abs()}
        case "selective scan":
            tokens: Operands = {"x": random(channels), "dt": random(channels), "z": random(channels)}
            # Step sizes of about 0.02, as in new models.
            bias, skip = torch.randn(channels) - 4.0, torch.randn(channels)
            rates = -torch.arange(1.0, STATES + 1.0).repeat(channels, 1)
            return tokens | {"A": rates, "B": random(STATES), "C": random(STATES), "D": skip, "dt_bias": bias}
        case "convolution":
            return {"x": random(channels), "weight": torch.randn(channels, TAPS), "bias": torch.randn(channels)}
        case _:
            return gated.operands(kernel, batch, length, gated.Options(heads=heads, key_heads=heads, size=size))


def ours(kernel: str, name: str, given: Operands) -> Tensor:
    """The public function on a backend, on a whole sequence."""
    own: dict[str, Any] = dict(given)
    with backend(name):
        match kernel:
            case "linear":
                return linear_attention(**_renamed(given))
            case "general delta":  # as RWKV-7 calls it
                rest = {name: own[name] for name in ("read", "erase", "log_decay")}
                return general_delta_rule(**_renamed(given), **rest, scale=1.0, read_before_decay=True)
            case "diagonal scan":
                return diagonal_scan(**own)
            case "selective scan":  # as Mamba calls it
                return selective_scan(**own, softplus=True)
            case "convolution":
                return causal_convolution(**own, activation="silu")[0]
            case _:
                return op.recur(**own)[0]


def _renamed(given: Operands) -> dict[str, Any]:
    return {"query": given["q"], "key": given["k"], "value": given["v"]}


def check(kernel: str, length: int, options: Options, *, backward: bool) -> float:
    """The largest relative error against the definition in float64. Raises Refused if it is too large."""
    given = operands(kernel, 1, min(length, oracle.COMPARED), options.heads, options.size)
    upstream = _upstream(given)
    exact = {name: None if t is None else t.double() for name, t in given.items()}
    expected = gated.outcome(partial(ours, kernel, "reference"), exact, upstream.double(), backward=backward)
    found = gated.outcome(partial(ours, kernel, OWN), given, upstream, backward=backward)
    return _judged(found, expected, f"{upstream.shape[-2]} tokens")


def _judged(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> float:
    errors = oracle.relative(found, expected)
    oracle.judge(errors, oracle.ALLOWED["float32"], where)
    return max(errors.values())


def _upstream(given: Operands) -> Tensor:
    """A gradient of the output, which has the shape of the values, or of the inputs of scans and the convolution."""
    like = given["v"] if "v" in given else given["x"]
    assert like is not None
    return torch.randn_like(like)


def ticks(library: ctypes.CDLL) -> list[list[int]]:
    """The time in ``STAGES`` by thread since the last call, in ticks of one clock.

    Args:
        library: what ``build.staged`` returns.

    Returns:
        A list for each of ``build.CLOCKS`` threads, most of which never ran. All have the same sum, the time since the
        last call.
    """
    count = library.longspan_stage_count()
    if count != len(STAGES):
        raise ValueError(f"the kernels measure {count} stages, not the {len(STAGES)} of STAGES")
    spent = (ctypes.c_uint64 * (build.CLOCKS * count))()
    library.longspan_stages(spent)
    return [list(spent[i : i + count]) for i in range(0, len(spent), count)]


def shares(spent: Sequence[Sequence[int]], threads: int) -> dict[str, float]:
    """Shares of the time of a call, by stage.

    Args:
        spent: what ``ticks`` returns after the call.
        threads: the threads of the call.

    Returns:
        ``waiting``: the part of threads x wall time in which they did not run a kernel, including the time of Python.
        ``stage NAME`` for each other stage: its part of the rest, in which they did. Empty if no kernel ran.
    """
    total = [sum(column) for column in zip(*spent, strict=True)]
    busy = sum(total[1:])
    if not busy:
        return {}
    named = {f"stage {name}": one / busy for name, one in zip(STAGES[1:], total[1:], strict=True)}
    return {WAITING: 1 - busy / (threads * sum(spent[0])), **named}


def staged(families: Sequence[str]) -> tuple[dict[str, ctypes.CDLL], str]:
    """The kernels that measure their stages, by family, and why they are missing if they cannot be compiled."""
    try:
        return {family: build.staged(family) for family in families}, ""
    except build.Unavailable as error:
        return {}, str(error)


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure; yield the growing result for ``report.collect``.

    Raises ValueError for an unknown kernel, and without native kernels.
    """
    for kernel in options.kernels:
        known(kernel, KERNELS, "kernel")
    families = list(dict.fromkeys(KERNELS[kernel].family for kernel in options.kernels))
    if not available(*families):
        raise ValueError("native kernels are not available; longspan doctor reports the reason")
    if options.batches and options.size >= LARGEST and {*options.kernels} & {*STEPS}:
        raise ValueError(f"--size={options.size}: token steps serve less than {LARGEST} channels; pass --batches 0")
    reuse_pages()  # as train and generate do
    libraries, missing = staged(families)
    rows: list[dict[str, Any]] = []
    refused: dict[str, str] = {}
    peak = 0.0

    def result() -> dict[str, Any]:
        for row in rows:
            if "gflops" in row:
                row["share"] = row["gflops"] / peak
        return {
            "benchmark": "profile",
            "how": _how(options),
            "machine": machine() | {"instruction set": _instruction_set(families[0])},
            "options": asdict(options),
            "gemm_gflops": peak,
            "rows": rows,
            "refused": [{"candidate": name, "reason": reason, "ours": True} for name, reason in refused.items()],
            "left_out": [{"candidate": "stages", "reason": missing}] if missing else [],
        }

    for kernel in options.kernels:
        for mode in MODES[: 1 + options.backward]:
            for length in options.lengths:
                try:
                    row, reached = _sequence(kernel, mode, length, options, libraries, watch)
                except Refused as error:
                    refused[f"{kernel}, {mode}, N {length}"] = str(error)
                else:
                    peak = max(peak, reached)
                    rows.append(row)
                yield result()
    for kernel in (name for name in options.kernels if name in STEPS):
        for batch in options.batches:
            try:
                rows.append(_step(kernel, batch, options, watch))
            except Refused as error:
                refused[f"{kernel}, step, batch {batch}"] = str(error)
            yield result()


def _instruction_set(family: str) -> str:
    library = build.loaded(build.interface.units(family)[0])
    assert library is not None
    return instruction_sets.of(library) or "not reported"


def _how(options: Options) -> str:
    return (
        f"causal, B 1, H {options.heads}, D = E = {options.size}, float32, medians of {options.rounds} rounds; GEMM: "
        f"the best of two sizes in all rounds; useful operations per token and head: 4 D E forward and 14 D E with "
        f"backward for linear attention and decay, 6 D E and 20 D E for the delta rule, 8 D E and 28 D E for the "
        f"general one, called as in RWKV-7; scans and convolution: {options.heads * options.size} channels, {STATES} "
        f"states of the selective scan, with gate and softplus as in Mamba, {TAPS} taps, bias and silu; copy: as many "
        f"bytes as each pass has operands and results, half of them read and half written, into memory that is there; "
        f"share: of the rate of GEMM, or the time of the copy relative to that of the call; page faults and system "
        f"time per call, of all threads; stages: shares of the processor time inside the kernels, from a second "
        f"library with clocks; waiting: the share of threads x wall time outside the kernels in its calls, in which "
        f"threads wait for others or for Python; step: one token through the public op, state donated, medians of "
        f"{3 * options.rounds} rounds; state in place: state.mul_(1.0); kernel: the C function alone; {EMPTY}: the "
        f"public op on one row and head of one channel; freed memory is kept, as in training; each candidate first "
        f"agreed with a float64 definition"
    )


def _sequence(
    kernel: str, mode: str, length: int, options: Options, libraries: dict[str, ctypes.CDLL], watch: Watch
) -> tuple[dict[str, Any], float]:
    """The row of one call on a sequence, and the best GFLOP/s of a matrix product in its rounds, else 0.

    Raises Refused.
    """
    backward, family, bound = mode == MODES[1], KERNELS[kernel].family, KERNELS[kernel].bound
    error = check(kernel, length, options, backward=backward)
    given = operands(kernel, 1, length, options.heads, options.size)
    call = partial(gated.outcome, partial(ours, kernel, OWN), given, _upstream(given), backward=backward)
    samplers = {OWN: case.bound(call)}
    moved = traffic(kernel, mode, options.heads * options.size, length) if bound == COPY else 0
    samplers |= {COPY: case.bound(limits.copy(moved // 2))} if bound == COPY else limits.gemms("float32")
    found, failed = case.take(samplers, options.rounds, f"{kernel}, {mode}, N {length}", watch)
    if failed:
        raise Refused("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    seconds = found[OWN].seconds
    row = {"what": "sequence", "kernel": kernel, "mode": mode, "length": length, **found[OWN].row(), "error": error}
    row["bound"] = bound
    if bound == COPY:
        copied = found[COPY].seconds
        row |= {"bytes": 4 * moved, "bound_seconds": copied, "share": copied / seconds}
    else:
        row["gflops"] = operations(kernel, mode, options.size, options.heads * length) / seconds / 1e9
    del samplers  # and with them the memory of the copy
    calls = max(options.rounds, min(MOST_CALLS, round(SPENT / seconds)))
    row |= paging(call, calls)
    if family in libraries:
        row |= stages(call, calls, libraries[family], family)
    return row, 0.0 if bound == COPY else limits.peak(found)


def paging(call: Call, calls: int) -> dict[str, float]:
    """Minor page faults and system time of a call, as ``faults`` and ``system_seconds``; the mean of several calls."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    for _ in range(calls):
        call()
    after = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "faults": (after.ru_minflt - before.ru_minflt) / calls,
        "system_seconds": (after.ru_stime - before.ru_stime) / calls,
    }


def stages(call: Call, calls: int, library: ctypes.CDLL, family: str) -> dict[str, float]:
    """``shares`` of several calls with the kernels of ``library``, and the mean time of one as ``staged_seconds``."""
    with build.using(family, library):
        call()
        ticks(library)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        seconds = time.perf_counter() - begin
        return {"staged_seconds": seconds / calls, **shares(ticks(library), threads())}


def _step(kernel: str, batch: int, options: Options, watch: Watch) -> dict[str, Any]:
    """The row of the token step for one batch. Raises Refused."""
    error = _check_step(kernel, batch, options)
    token = Token(kernel, batch, options.heads, options.size)
    # With one channel the call and its checks remain, and next to no work.
    empty = Token(kernel, 1, 1, 1)
    names = (OWN, "kernel", gated.BOUND, EMPTY)
    calls = (token.public(), token.alone(), partial(torch.ones_like(token.state).mul_, 1.0), empty.public())
    samplers = {name: case.bound(call) for name, call in zip(names, calls, strict=True)}
    found, failed = case.take(samplers, 3 * options.rounds, f"{kernel}, step, batch {batch}", watch)
    if failed:
        raise Refused("; ".join(f"{name}: {reason}" for name, reason in failed.items()))
    whole, alone, bound, nothing = (found[name].seconds for name in names)
    return {
        "what": "step",
        "kernel": kernel,
        "batch": batch,
        **found[OWN].row(),
        "error": error,
        "kernel_seconds": alone,
        "bound_seconds": bound,
        "empty_seconds": nothing,
        "to_bound": whole / bound,
        "kernel_to_bound": alone / bound,
        "to_empty": whole / nothing,
    }


class Token:
    """One token for a state (B,H,D,E), or (B,H,D,E+1) of linear attention, which each call overwrites."""

    def __init__(self, kernel: str, batch: int, heads: int, size: int):
        self.kernel = kernel
        self.given = operands(kernel, batch, 1, heads, size)
        self.state = torch.rand(batch, heads, size, size + (kernel == "linear"))

    def public(self) -> Step:
        """The public op with a donated state; its output (B,H,1,E) and the state."""
        if self.kernel == "linear":
            given = _renamed(self.given)
            return partial(linear_attention, **given, state=self.state, return_state=True, donate=True)  # pyright: ignore[reportReturnType] (the overload without return_state)
        return partial(op.recur, **self.given, state=self.state, donate=True)  # pyright: ignore[reportArgumentType] (a mixed dict)

    def defined(self) -> tuple[Tensor, Tensor]:
        """The output and the next state by the definition in float64."""
        exact = {name: None if t is None else t.double() for name, t in self.given.items()}
        with backend("reference"):
            if self.kernel == "linear":
                return linear_attention(**_renamed(exact), state=self.state.double(), return_state=True)
            return op.recur(**exact, state=self.state.double())  # pyright: ignore[reportArgumentType] (a mixed dict)

    def alone(self) -> Step:
        """Only the C function; its output and the state. Not for other operands than those of ``operands``."""
        library = build.loaded(f"{KERNELS[self.kernel].family}/step")
        assert library is not None
        q, k, v = (t.contiguous() for name, t in self.given.items() if name in ("q", "k", "v") and t is not None)
        out, rows, size = torch.empty_like(v), v.shape[0] * v.shape[1], v.shape[3]
        tensors = [self.state, q, k, v, out]
        if self.kernel == "linear":
            options = (rows, size, size, MAPS["elu"], 1e-6, TYPES[torch.float32], threads())
            return partial(_run, library.longspan_linear_step, (*pointers(*tensors), *options), tensors)
        decay, beta = (None if t is None else t.contiguous() for t in (self.given["log_decay"], self.given["beta"]))
        # One decay per head, and as many heads of keys as of values; no normalization.
        options = (rows, 1, size, size, int(decay is not None), 0, TYPES[torch.float32], size**-0.5, threads())
        arguments = (*pointers(*tensors[:4], decay, beta, out), *options)
        return partial(_run, library.longspan_gated_step, arguments, [*tensors, decay, beta])


def _run(function: Callable[..., int], arguments: tuple[Any, ...], tensors: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """Call a step of C; ``tensors``, the state first and the output at 4, hold the memory of ``arguments``."""
    failed = function(*arguments)
    assert not failed
    return tensors[4], tensors[0]


def _check_step(kernel: str, batch: int, options: Options) -> float:
    """The largest relative error of a token, through the public op and by the C function. Raises Refused."""
    worst = 0.0
    for make in (Token.public, Token.alone):
        token = Token(kernel, min(batch, 2), options.heads, options.size)
        output, state = token.defined()
        expected = {"output": output, "state": state}
        output, state = make(token)()
        worst = max(worst, _judged({"output": output, "state": state}, expected, f"one token of batch {min(batch, 2)}"))
    return worst


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    rows = [row for row in result["rows"] if row["what"] == "sequence"]
    steps = [row for row in result["rows"] if row["what"] == "step"]
    tables: list[Table] = []
    for mode in MODES:
        for bound in BOUNDS:
            if here := [row for row in rows if row["mode"] == mode and bound_of(row) == bound]:
                tables += [_times(f"{mode}: time (share of {bound})", here), _details(mode, here)]
    if steps:
        tables.append(_steps(steps))
    return [*tables, [[f"GEMM peak {peak:.0f} GFLOP/s"]]] if (peak := result["gemm_gflops"]) else tables


def bound_of(row: dict[str, Any]) -> str:
    """The bound of a sequence; older results have only one."""
    return row.get("bound", GEMM)


def _times(title: str, rows: list[dict[str, Any]]) -> Table:
    at = {(row["kernel"], row["length"]): row for row in rows}
    lengths = sorted({length for _, length in at})

    def cell(row: dict[str, Any] | None) -> str:
        return f"{duration(row['seconds'])} ({row['share']:.1%})" if row else ""

    body = [[kernel, *(cell(at.get((kernel, n))) for n in lengths)] for kernel in dict.fromkeys(k for k, _ in at)]
    return [[title, *(f"N {n}" for n in lengths)], *body]


def _details(mode: str, rows: list[dict[str, Any]]) -> Table:
    """Page faults, system time and stages, for each kernel and length; stages that none of them has are left out."""
    names = [name for name in STAGES[1:] if any(row.get(f"stage {name}") for row in rows)]
    waiting = [WAITING] if names else []
    table = [[f"{mode}: stages", "N", "page faults", "system time", *waiting, *names]]
    for row in rows:
        cells = [f"{row[key]:.1%}" if key in row else "" for key in (*waiting, *(f"stage {name}" for name in names))]
        faults = [f"{row['faults']:,.0f}", duration(row["system_seconds"])]
        table.append([row["kernel"], str(row["length"]), *faults, *cells])
    return table


def _steps(rows: list[dict[str, Any]]) -> Table:
    ratios = {"to bound": "to_bound", "kernel to bound": "kernel_to_bound", f"to {EMPTY}": "to_empty"}
    times = {"time": "seconds", "kernel": "kernel_seconds", gated.BOUND: "bound_seconds", EMPTY: "empty_seconds"}
    table = [["step", "batch", *times, *ratios]]
    for row in rows:
        cells = [*(duration(row[key]) for key in times.values()), *(f"{row[key]:.2f}" for key in ratios.values())]
        table.append([row["kernel"], str(row["batch"]), *cells])
    return table
