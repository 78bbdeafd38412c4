"""Time and peak memory of attention by length, forward and with backward."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from longspan._utils.machine import machine
from longspan._utils.spec import known

from .._utils.tables import Table, duration
from . import case, figures, limits, local, oracle
from .candidates import Candidate, Local, Process, Refused, Remote
from .case import Watch
from .options import lengths, limit, option, rounds
from .worker import Task

DEFAULT = ("linear", "linear@torch", "sdpa")
MODES = ("forward", "forward+backward")
ROOM = 0.8  # part of the memory that is free that a candidate may be expected to take
SERVES = ("ft", "performer")  # of the other libraries' subjects


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    lengths: tuple[int, ...] = lengths(1024, 4096, 16384, 65536)
    batch: int = option(1, "batch size")
    heads: int = option(8, "attention heads")
    size: int = option(64, "channels per head")
    dtype: str = option("float32", "float32 or bfloat16", metavar="DTYPE")
    rounds: int = rounds(7)
    backward: bool = option(True, "measure the forward pass only")
    limit: float = limit(20.0)

    def __post_init__(self):
        known(self.dtype, oracle.ALLOWED, "dtype")


class AttentionRun:
    """A run that predicts the cost of the next length from earlier ones."""

    def __init__(self, candidates: dict[str, Candidate], names: dict[str, local.Name], options: Options, watch: Watch):
        self.candidates, self.names, self.options, self.watch = candidates, names, options, watch
        self.rows: list[dict[str, Any]] = []
        self.refused: dict[str, str] = {}
        self.left_out: list[dict[str, str]] = []
        self.peaks: list[float] = []

    def compare(self, length: int, mode: str) -> None:
        """Check, weigh and time every candidate at one length."""
        task = {**asdict(self.options), "what": "attention", "length": length, "backward": mode != MODES[0]}
        del task["lengths"]
        task["threads"] = machine()["threads"]
        label = f"N {length} {mode}"
        megabytes, errors, samplers = {}, {}, {}
        names = [n for n in self.candidates if n not in self.refused and not self._too_much(n, length, mode)]
        for name in self.watch(names, len(names), f"{label}: checks"):
            candidate, asked = self.candidates[name], task | {"module": self.names[name].module}
            try:
                megabytes[name] = candidate.memory(asked) if sys.platform == "linux" else math.nan
                errors[name] = max(oracle.check_attention(candidate, self.names[name], asked).values())
                samplers[name] = candidate.sampler(asked)
            except Refused as error:
                self.refused[name] = str(error)
        samplers |= limits.gemms(self.options.dtype)
        found, failed = case.take(samplers, self.options.rounds, label, self.watch)
        self.refused |= failed
        for candidate in self.candidates.values():
            candidate.release()
        self.peaks.append(limits.peak(found))
        for name in (name for name in self.candidates if name in found):
            self._row(name, task, mode, found[name], megabytes[name], errors[name])

    def _row(self, name: str, task: Task, mode: str, figure: case.Figure, megabytes: float, error: float) -> None:
        tokens, size = task["batch"] * task["heads"] * task["length"], task["size"]
        row = {
            "candidate": name,
            "group": group(self.names[name]),
            "mode": mode,
            "length": task["length"],
            **figure.row(),
            "error": error,
        }
        if not math.isnan(megabytes):
            row |= {"mb": megabytes, "units": megabytes * 2**20 / (tokens * size * (2 if "16" in task["dtype"] else 4))}
        if not self.names[name].module and self.names[name].spec != "sdpa":
            # By the definition as an RNN: 4 D M forward, 10 D M backward, per token and head.
            row["gflops"] = (14 if task["backward"] else 4) * size**2 * tokens / figure.seconds / 1e9
        self.rows.append(row)

    def _too_much(self, name: str, length: int, mode: str) -> bool:
        """Whether this length is expected to take too long or too much memory, by the longest one so far."""
        before = [row for row in self.rows if row["candidate"] == name and row["mode"] == mode]
        known = any(one["candidate"] == name and one["mode"] == mode for one in self.left_out)
        if not before:
            return known
        last = max(before, key=lambda row: row["length"])
        growth = length / last["length"]
        seconds = last["seconds"] * growth ** figures.declared(self.names[name].cost)
        megabytes = last.get("mb", 0.0) * growth
        reason = ""
        if seconds > self.options.limit:
            reason = f"a call would take about {seconds:.0f} s, longer than the limit of {self.options.limit:g} s"
        elif megabytes > ROOM * case.available():
            reason = f"it would need about {megabytes:,.0f} MB of memory; {case.available():,.0f} are free"
        if reason and not known:
            self.left_out.append({"candidate": name, "mode": mode, "reason": f"{mode} from N {length} on: {reason}"})
        return bool(reason)


def group(name: local.Name) -> str:
    """What a candidate is compared with: only what does the same work."""
    return "module" if name.module else "op"


def run(
    names: Sequence[str], remotes: Sequence[Remote], weigher: Process, options: Options, watch: Watch
) -> Iterator[dict]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError for a name that is not known."""
    read = {name: local.read(name) for name in names}
    for name, one in read.items():
        if one.spec == "kernel":
            raise ValueError(f"{name} is one token; longspan bench step measures it")
    candidates: dict[str, Candidate] = {
        name: Local(name, local.find(name), weigher, ours=name != "sdpa") for name in read
    }
    for remote in remotes:
        if remote.name in SERVES:
            # The others' op is ours by default, and so is its definition.
            candidates[remote.name], read[remote.name] = remote, local.read("linear")
    one = AttentionRun(candidates, read, options, watch)
    for length in sorted(options.lengths):
        for mode in MODES[: 1 + options.backward]:
            one.compare(length, mode)
            yield _result(one)


def _result(one: AttentionRun) -> dict[str, Any]:
    """The result so far."""
    baselines = _compare(one.rows)
    peak = max(one.peaks)
    for row in one.rows:
        if "gflops" in row:
            row["share"] = row["gflops"] / peak
    return {
        "benchmark": "attention",
        "how": "; ".join(_how(one.options)),
        "machine": machine(),
        "options": asdict(one.options),
        "gemm_gflops": peak,
        "baselines": baselines,
        "rows": one.rows,
        "growth": _growth(one.rows, one.names),
        "refused": [
            {"candidate": name, "reason": reason, "ours": one.candidates[name].ours}
            for name, reason in one.refused.items()
        ],
        "left_out": one.left_out,
    }


def _how(options: Options) -> list[str]:
    return [
        f"causal, B {options.batch}, H {options.heads}, D {options.size}, {options.dtype}, medians of {options.rounds} "
        f"rounds",
        "op: queries, keys and values (B,N,H,D) as projections give them to (B,N,H*D) as the output projection takes "
        "it, feature map and normalizer included",
        "module: x (B,N,H*D) through the whole attention, projections included; compared with modules only",
        "memory: resident memory of one call in a fresh process beyond its inputs, of which the upstream gradient is "
        "one; a unit is one (B,N,H,D)",
        "GEMM: the best of two sizes in the same rounds",
        "each candidate first agreed with a float64 definition, in values and gradients",
    ]


def _compare(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Give each row its ratio to the baseline of its group -> group -> baseline."""
    chosen = {}
    for one in dict.fromkeys(row["group"] for row in rows):
        there = list(dict.fromkeys(row["candidate"] for row in rows if row["group"] == one))
        preferred = ("ft", "sdpa") if one == "op" else ("softmax", "softmax@module")
        chosen[one] = next((name for name in preferred if name in there), there[0])
        cases = dict.fromkeys((row["length"], row["mode"]) for row in rows if row["group"] == one)
        for length, mode in cases:
            same = [row for row in rows if (row["group"], row["length"], row["mode"]) == (one, length, mode)]
            seconds = {row["candidate"]: row["seconds"] for row in same}
            if chosen[one] in seconds:
                found = figures.ratios(seconds, chosen[one])
                for row in same:
                    row["ratio"] = found[row["candidate"]]
    return chosen


def _growth(rows: list[dict[str, Any]], names: dict[str, local.Name]) -> list[dict[str, Any]]:
    """Fitted exponents against the declared ones, and where each candidate overtakes softmax."""
    found = []
    for name, one in names.items():
        for mode in MODES:
            seconds = {row["length"]: row["seconds"] for row in rows if (row["candidate"], row["mode"]) == (name, mode)}
            if not seconds:
                continue
            entry: dict[str, Any] = {"candidate": name, "mode": mode, "declared": figures.declared(one.cost)}
            if reason := figures.unfitted(seconds):
                entry["unfitted"] = reason
            else:
                entry["exponent"] = figures.exponent(seconds)
            exact = _exact(group(one), names)
            softmax = {r["length"]: r["seconds"] for r in rows if (r["candidate"], r["mode"]) == (exact, mode)}
            if name != exact and softmax:
                entry["faster_than_sdpa" if exact == "sdpa" else "faster_than_softmax"] = figures.crossover(
                    seconds, softmax
                )
            found.append(entry)
    return found


def _exact(group: str, names: dict[str, local.Name]) -> str:
    """The candidate of a group that is softmax attention; "" where there is none."""
    if group == "op":
        return "sdpa"
    return next((name for name, one in names.items() if one.module and one.spec == "softmax"), "")


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    tables = []
    for one, baseline in result["baselines"].items():
        for mode in MODES:
            rows = [row for row in result["rows"] if (row["group"], row["mode"]) == (one, mode)]
            if rows:
                tables += _tables(f"{one}, {mode}", rows, baseline)
    growth = [["time grows as", "mode", "fitted", "declared", "faster than softmax"]]
    for entry in result["growth"]:
        fitted = f"N^{entry['exponent']:.2f}" if "exponent" in entry else f"none: {entry.get('unfitted', 'one length')}"
        growth.append(
            [
                entry["candidate"],
                entry["mode"],
                fitted,
                f"N^{entry['declared']:g}",
                entry.get("faster_than_sdpa") or entry.get("faster_than_softmax", ""),
            ]
        )
    return [*tables, growth, [[f"GEMM peak {result['gemm_gflops']:.0f} GFLOP/s"]]]


def _tables(title: str, rows: list[dict[str, Any]], baseline: str) -> list[Table]:
    lengths, names = sorted({row["length"] for row in rows}), list(dict.fromkeys(row["candidate"] for row in rows))
    at = {(row["candidate"], row["length"]): row for row in rows}

    def table(head: str, cell: Any) -> Table:
        body = [[name, *(cell(at[name, n]) if (name, n) in at else "" for n in lengths)] for name in names]
        return [[head, *(f"N {n}" for n in lengths)], *body]

    def time(row: dict[str, Any]) -> str:
        return duration(row["seconds"]) + (f" ({row['ratio']:.2f}x)" if "ratio" in row else "")

    made = [table(f"{title}: time (speed-up over {baseline})", time)]
    if any("share" in row for row in rows):
        made.append(
            table(
                f"{title}: useful GFLOP/s, share of GEMM",
                lambda row: f"{row['gflops']:.1f} ({row['share']:.1%})" if "share" in row else "",
            )
        )
    if any("mb" in row for row in rows):
        made.append(table(f"{title}: peak MB (units)", lambda row: f"{row['mb']:.1f} ({row['units']:.1f})"))
    return made
