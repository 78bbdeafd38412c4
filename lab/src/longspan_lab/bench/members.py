"""What every mechanism costs by length: time forward and with backward, memory, state, and one token more."""

import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from longspan._utils.machine import machine
from longspan._utils.spec import head
from longspan.attention import build, list_mechanisms, plugins
from longspan.attention.base import Attention
from longspan.attention.families import FAMILIES
from longspan.attention.registry import mechanism
from longspan.states import clone, nbytes

from .._utils.tables import Table, duration
from . import case, figures, oracle
from .candidates import Local, Process, Refused, Sampler
from .case import Watch
from .options import lengths, limit, option, rounds
from .worker import Makers, Task

MODES = ("forward", "forward+backward", "step")
BASELINE = "softmax"  # fused, over all pairs
ROOM = 0.8  # part of the memory that is free that a mechanism may be expected to take
CHUNK = 512  # tokens read at once before the one that is timed
SPARE = 1024  # tokens that a growing state has room for after those


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    members: tuple[str, ...] = option(
        (), "specs, separated by ';'; by default every mechanism", "specs", metavar="SPECS"
    )
    lengths: tuple[int, ...] = lengths(1024, 4096, 16384)
    dim: int = option(256, "width of the model, in channels")
    heads: int = option(4, "attention heads")
    rounds: int = rounds(5, "samples per mechanism")
    backward: bool = option(True, "measure the forward pass and the decode step only")
    limit: float = limit(20.0)


def built(spec: str, dim: int, heads: int) -> Attention:
    """An attention with weights that are the same in every process, in evaluation mode; causal where it can be."""
    cls = mechanism(head(spec) or spec)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return build(spec, dim, heads, causal="causal" in cls.directions).eval()


def made(spec: str, task: Task) -> Attention:
    """``built`` for a task's sizes."""
    return built(spec, task["heads"] * task["size"], task["heads"])


def find(spec: str) -> Makers:
    """The makers of a spec for a worker."""

    def attention(task: Task) -> Any:
        module = made(spec, task)
        return lambda x: module(x)[0]

    return {"attention": attention}


def weigher() -> Process:
    """The process that measures memory, with a child process for each call."""
    code = "from longspan_lab.bench import members, worker; worker.serve(members.find)"
    return Process([sys.executable, "-P", "-c", plugins.again() + code])


@torch.no_grad()
def stepping(module: Attention, length: int) -> tuple[int, Sampler]:
    """Read ``length`` tokens -> bytes of the state then, and what times one token more."""
    donate = "donate" in module.supported_args
    x, state = torch.randn(1, length, module.dim), module.init_state(1, length + SPARE)
    for part in x.split(CHUNK, 1):
        _, state = module(part, state, donate=donate)
    # Capacity for more tokens is not part of the state after these.
    spare = nbytes(module.init_state(1, length + SPARE)) - nbytes(module.init_state(1, length))
    token, size = torch.randn(1, 1, module.dim), nbytes(state) - spare

    @torch.no_grad()
    def sample(repeat: int) -> float:
        # Each sample goes on from a copy, so that it stays at this length and may give its state away.
        now = clone(state)
        begin = time.perf_counter()
        for _ in range(repeat):
            _, now = module(token, now, donate=donate)
        return (time.perf_counter() - begin) / repeat

    sample(1)  # a mechanism that cannot continue at this length fails here
    return size, sample


class MembersRun:
    """A run that predicts the cost of the next length from earlier ones."""

    def __init__(self, specs: list[str], weigher: Process, options: Options, watch: Watch):
        self.modules = {spec: built(spec, options.dim, options.heads) for spec in specs}
        self.candidates = {spec: Local(spec, find(spec), weigher) for spec in specs}
        self.options, self.watch = options, watch
        self.rows: list[dict[str, Any]] = []
        self.refused: dict[str, str] = {}
        self.left_out: list[dict[str, str]] = []

    def task(self, length: int, mode: str) -> Task:
        options = self.options
        return {
            "what": "attention",
            "batch": 1,
            "length": length,
            "heads": options.heads,
            "size": options.dim // options.heads,
            "dtype": "float32",
            "module": True,
            "backward": mode == MODES[1],
            "threads": machine()["threads"],
        }

    def check(self) -> None:
        """Refuse what does not agree with its own definition in float64."""
        task = self.task(min(self.options.lengths), MODES[int(self.options.backward)])
        for spec in self.watch([*self.candidates], len(self.candidates), "checks"):
            try:
                oracle.check_module(self.candidates[spec], lambda asked, spec=spec: made(spec, asked), task)
            except Refused as error:
                self.refused[spec] = str(error)

    def compare(self, length: int, mode: str) -> None:
        """Weigh and time every mechanism at one length."""
        samplers, facts = {}, {}
        wanted = [spec for spec in self.candidates if self._takes_part(spec, length, mode)]
        for spec in self.watch(wanted, len(wanted), f"N {length} {mode}: memory"):
            try:
                samplers[spec], facts[spec] = self._prepared(spec, length, mode)
            except Refused as error:
                self._leave_out(spec, mode, length, str(error))
        found, failed = case.take(samplers, self.options.rounds, f"N {length} {mode}", self.watch)
        for spec, reason in failed.items():
            self._leave_out(spec, mode, length, reason)
        for spec, figure in found.items():
            module = self.modules[spec]
            row = {
                "candidate": spec,
                "family": module.family,
                "causal": module.causal,
                "mode": mode,
                "length": length,
                **figure.row(),
                **facts[spec],
            }
            if BASELINE in found:
                row["ratio"] = found[BASELINE].seconds / figure.seconds
            self.rows.append(row)

    def _prepared(self, spec: str, length: int, mode: str) -> tuple[Sampler, dict[str, Any]]:
        """What times it, and the facts of its row. Raises Refused."""
        if mode == "step":
            try:
                size, sampler = stepping(self.modules[spec], length)
            except Exception as error:
                raise Refused(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
            return sampler, {"state_bytes": size}
        candidate, task = self.candidates[spec], self.task(length, mode)
        weight = {"mb": candidate.memory(task)} if sys.platform == "linux" else {}
        if weight and weight["mb"] > ROOM * case.available():
            raise Refused(f"it needs {weight['mb']:,.0f} MB of memory; {case.available():,.0f} are free")
        return candidate.sampler(task), weight

    def _takes_part(self, spec: str, length: int, mode: str) -> bool:
        """Whether it is still in, has this mode, and is expected to take neither too long nor too much memory."""
        if spec in self.refused or (mode == "step" and not self.modules[spec].causal):
            return False
        if any(one["candidate"] == spec and one["mode"] == mode for one in self.left_out):
            return False
        # Before a token is timed, as much is read as forward reads.
        before = {
            row["length"]: row
            for row in self.rows
            if row["candidate"] == spec
            and row["mode"] == (MODES[0] if mode == "step" else mode)
            and row["length"] <= length
        }
        if not before:
            return True
        last, power = before[max(before)], figures.declared(self.modules[spec].cost)
        growth = length / last["length"]
        seconds = last["seconds"] * growth**power
        if seconds > self.options.limit:
            reason = f"a call would take about {seconds:.0f} s, longer than the limit of {self.options.limit:g} s"
            self._leave_out(spec, mode, length, reason)
            return False
        if mode == "step" or "mb" not in last:
            return True
        # All pairs are held by some and not by others, which two lengths tell.
        sizes = {n: max(before[n]["mb"], 1e-3) for n in sorted(before)[-2:]}
        megabytes = last["mb"] * growth ** (max(figures.exponent(sizes), 1.0) if len(sizes) > 1 else power)
        if megabytes > ROOM * case.available():
            reason = f"it would need about {megabytes:,.0f} MB of memory; {case.available():,.0f} are free"
            self._leave_out(spec, mode, length, reason)
            return False
        return True

    def _leave_out(self, spec: str, mode: str, length: int, reason: str) -> None:
        self.left_out.append({"candidate": spec, "mode": mode, "reason": f"{mode} from N {length} on: {reason}"})

    def result(self) -> dict[str, Any]:
        """The result so far."""
        return {
            "benchmark": "members",
            "how": "; ".join(_how(self.options)),
            "machine": machine(),
            "options": asdict(self.options),
            "rows": self.rows,
            "growth": [growth for spec in self.modules if (growth := self._growth(spec))],
            "refused": [{"candidate": spec, "reason": said, "ours": True} for spec, said in self.refused.items()],
            "left_out": self.left_out,
        }

    def _growth(self, spec: str) -> dict[str, Any]:
        """Fitted exponents of time and memory, and the declared cost; empty without measurements."""
        rows, module = [row for row in self.rows if row["candidate"] == spec], self.modules[spec]
        if not rows:
            return {}
        found = {mode: {row["length"]: row["seconds"] for row in rows if row["mode"] == mode} for mode in MODES}
        # No growth at all is measured as nothing, whose logarithm is none.
        for mode in MODES[:2]:
            found[f"memory, {mode}"] = {
                r["length"]: max(r["mb"], 1e-3) for r in rows if r["mode"] == mode and "mb" in r
            }
        # Memory is exact at any size; times are not.
        fitted = {
            what: figures.exponent(values)
            for what, values in found.items()
            if len(values) >= figures.LENGTHS and (what not in MODES or not figures.unfitted(values))
        }
        return {
            "candidate": spec,
            "family": module.family,
            "causal": module.causal,
            "cost": module.cost,
            "declared": figures.declared(module.cost),
            **fitted,
        }


def run(options: Options, weigher: Process, watch: Watch) -> Iterator[dict[str, Any]]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError for a spec that is not possible."""
    specs = list(options.members) or list_mechanisms()
    order = [*FAMILIES]
    one = MembersRun(list(dict.fromkeys([BASELINE, *specs])), weigher, options, watch)
    one.modules = dict(sorted(one.modules.items(), key=lambda item: (order.index(item[1].family), item[0])))
    one.check()
    for length in sorted(options.lengths):
        for mode in MODES:
            if options.backward or mode != MODES[1]:
                one.compare(length, mode)
                yield one.result()


def _how(options: Options) -> list[str]:
    return [
        f"one sequence x (1,N,{options.dim}) through the whole attention with {options.heads} heads, projections "
        f"included, float32, medians of {options.rounds} rounds; causal where it has that form",
        "memory: resident memory of one call in a fresh process beyond its inputs, of which the upstream gradient is "
        "one",
        "state: its bytes after N tokens; step: one token more, on a state that it may overwrite",
        "exponents are fitted to all lengths measured, where these are 3 or more and far enough apart",
        f"each first agreed with its own reference in float64 on {min(oracle.COMPARED, *options.lengths)} tokens",
    ]


def table(result: dict[str, Any]) -> Table:
    """One row for each mechanism, by family: figures at all lengths, and how they grow."""
    lengths = sorted({row["length"] for row in result["rows"]})
    at = {(row["candidate"], row["mode"], row["length"]): row for row in result["rows"]}
    several = " / ".join(map(str, lengths))
    rows = [
        [
            "family",
            "mechanism",
            f"forward at {several}",
            "with backward",
            "peak MB",
            "state kB",
            "one token",
            "declared",
            "time",
            "memory",
        ]
    ]

    def cells(spec: str, mode: str, show: Any) -> str:
        shown = [show(at[spec, mode, n]) if (spec, mode, n) in at else "-" for n in lengths]
        return " / ".join(shown) if set(shown) != {"-"} else "-"

    # Memory of a training step where that is measured.
    most = MODES[int(result["options"]["backward"])]
    for one in result["growth"]:
        spec = one["candidate"]
        rows.append(
            [
                one["family"],
                spec if one["causal"] else f"{spec}, bidirectional",
                *(cells(spec, mode, lambda row: duration(row["seconds"])) for mode in MODES[:2]),
                cells(spec, most, lambda row: f"{row['mb']:.3g}" if "mb" in row else "-"),
                cells(spec, "step", lambda row: f"{row['state_bytes'] / 1024:.4g}"),
                cells(spec, "step", lambda row: duration(row["seconds"])),
                one["cost"],
                *(f"N^{one[what]:.2f}" if what in one else "-" for what in (most, f"memory, {most}")),
            ]
        )
    return rows


def text(result: dict[str, Any]) -> list[Table]:
    """The tables, one for each family."""
    first, *rows = table(result)
    families = dict.fromkeys(row[0] for row in rows)
    return [[[FAMILIES[family], *first[2:]], *(row[1:] for row in rows if row[0] == family)] for family in families]


def page(result: dict[str, Any]) -> str:
    """The table as Markdown, followed by missing mechanisms with reasons."""
    first, *rows = table(result)
    lines = [f"| {' | '.join(row)} |" for row in (first, ["---"] * len(first), *rows)]
    missing = [f"* `{one['candidate']}`: {one['reason']}" for one in (*result["refused"], *result["left_out"])]
    facts = "; ".join(f"{name} {value}" for name, value in result["machine"].items())
    return "\n".join([*lines, "", *missing, *[""] * bool(missing), f"{result['how']}.", "", f"Machine: {facts}.", ""])
