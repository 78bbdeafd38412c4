"""Softmax attention under a pattern, compared with torch with a dense mask and with all pairs, by length."""

import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan import patterns
from longspan._utils.machine import machine
from longspan.ops import sparse
from longspan.ops.backends import backend
from longspan.ops.native.call import available
from longspan.ops.sparse import schedule
from longspan.patterns import Pattern

from .._utils.tables import Table, duration
from . import case, figures, oracle
from .candidates import Local, Process, Refused
from .case import Watch
from .options import lengths, limit, option, rounds
from .worker import Function, Makers, Task, inputs

DEFAULT = (
    "band(255)",
    "causal & (band(127) | strided(128))",
    "causal & (band(63) | globals(2) | random(3, block=64))",
)
MODES = ("forward", "forward+backward", "layout")
OURS = ("native", "torch")
WAYS = (*OURS, "sdpa all", "sdpa mask", "flex")
LAYOUTS = ("blocks", "listed", "plan")
MATRICES = ("sdpa mask", "flex")  # candidates that need the dense pattern
ALLOWED = oracle.ALLOWED["float32"]
COMPARED, ROWS = 509, 17  # tokens of which all are compared; queries that are of longer sequences
COUNTED = 128  # queries whose keys are counted
CHUNK = 256  # rows of a dense mask that are made at once
ROOM = 0.8  # part of the free memory that a candidate may be expected to take


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    patterns: tuple[str, ...] = option(DEFAULT, "patterns, separated by ';'", "specs", metavar="PATTERNS")
    lengths: tuple[int, ...] = lengths(1024, 4096, 16384, 65536)
    batch: int = option(1, "batch size")
    heads: int = option(8, "attention heads")
    size: int = option(64, "channels per head")
    rounds: int = rounds(5)
    backward: bool = option(True, "measure the forward pass only")
    matrix: int = option(4096, "largest length at which sdpa with a dense mask and flex are measured", "count")
    limit: float = limit(5.0)
    flex: bool = option(False, "also measure the forward pass of FlexAttention, which compiles slowly")

    def __post_init__(self):
        for text in self.patterns:
            patterns.parse(text)


def find(name: str) -> Makers:
    """The makers of a candidate of this benchmark, ``WAY@PATTERN``; a layout is made anew at each call."""
    way, _, text = name.partition("@")
    if way in LAYOUTS:
        return {"attention": lambda task: lambda q, k, v: lay(way, text, q.shape[1])}  # pyright: ignore[reportReturnType] (no tensor)
    return {"attention": lambda task: _attention(way, text, task)}


def lay(way: str, text: str, n: int) -> object:
    """The block list of head 0 (``blocks``), the kernels' (``listed``) or torch's tiles and classes (``plan``)."""
    match way:
        case "listed":
            return schedule.listed.__wrapped__(text, n, 0, 0)
        case "plan":
            return schedule.plan.__wrapped__(text, n, 0, 0)
    pattern = patterns.parse(text).at(0, 0)
    return pattern.blocks(n, schedule.grain(pattern) or schedule.block_size(pattern, n))


def _attention(way: str, text: str, task: Task) -> Function:
    """f(q, k, v), (B,N,H,D) each as projections give them -> (B,N,H*D) as the output projection takes it."""
    pattern = patterns.parse(text)
    function: Callable[..., Tensor]
    match way:
        case "native" | "torch":
            function = partial(_ours, way, pattern)
        case "sdpa all":
            function = partial(F.scaled_dot_product_attention, is_causal=pattern.lookahead == 0)
        case "sdpa mask":
            # Made at the first call, so that it counts as memory but not as time.
            mask = lru_cache(maxsize=1)(partial(matrix, pattern, heads=task["heads"]))
            # Of four dimensions: with fewer the fused kernel is not taken.
            function = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q.shape[2])[None])  # noqa: E731
        case _:
            function = _flex(pattern, task["heads"])
    return lambda q, k, v: function(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2).flatten(2)


def _ours(name: str, pattern: Pattern, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with backend(name):
        return sparse.sparse_attention(q, k, v, pattern)


def _flex(pattern: Pattern, heads: int) -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def see(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return pattern.see(i, j, head, 0)  # pyright: ignore[reportArgumentType] (flex passes tensors)

    compiled = torch.compile(flex_attention, dynamic=False)

    @lru_cache(maxsize=1)
    def block_mask(n: int) -> Any:
        return create_block_mask(see, None, heads if pattern.per_head else None, n, n, device="cpu")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q.contiguous(), k.contiguous(), v.contiguous(), block_mask=block_mask(q.shape[2]))

    return run


def matrix(pattern: Pattern, n: int, heads: int) -> Tensor:
    """``pattern.dense``, some rows at a time to save memory: bool (heads|1, n, n)."""
    mask = torch.empty(heads if pattern.per_head else 1, n, n, dtype=torch.bool)
    for rows in torch.arange(n).split(CHUNK):
        mask[:, rows] = allowed(pattern, rows, n, heads)
    return mask


def allowed(pattern: Pattern, rows: Tensor, n: int, heads: int) -> Tensor:
    """Which of n keys some queries see: bool (heads|1, rows, n)."""
    keys = torch.arange(n)
    count = heads if pattern.per_head else 1
    return torch.stack([pattern.allow(rows[:, None], keys, head=head) for head in range(count)])


def keys_per_query(pattern: Pattern, n: int, heads: int) -> float:
    """How many keys a query sees, the mean over the heads and over at most 128 queries at even distances."""
    rows = ((torch.arange(min(n, COUNTED)) + 0.5) * n / min(n, COUNTED)).long()
    counts = [allowed(pattern, some, n, heads).sum(-1) for some in rows.split(64)]
    return float(torch.cat(counts, 1).double().mean())


def definition(pattern: Pattern, q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """What the queries ``rows`` get, (B,R,H*D) for q, k, v (B,N,H,D), in their precision; no code of the fast path."""
    n, scale = q.shape[1], q.shape[-1] ** -0.5
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if len(rows) == n:
        out = sparse.dense(q, k, v, pattern, sparse.Logits(scale))[0]
    else:
        logits = (q[:, :, rows] @ k.mT * scale).masked_fill(~allowed(pattern, rows, n, q.shape[1]), -torch.inf)
        blind = (logits == -torch.inf).all(-1, keepdim=True)
        out = logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0) @ v
    return out.transpose(1, 2).flatten(2)


def check(candidate: Local, pattern: Pattern, task: Task) -> float:
    """The largest relative error of values, and with ``backward`` of gradients, against the definition in float64.

    All of the first tokens are compared, and some queries of the whole length. Raises Refused where one is too large.
    """
    worst, length = 0.0, task["length"]
    for n in dict.fromkeys((min(length, COMPARED), length)):
        rows = torch.arange(n) if n <= COMPARED else torch.linspace(0, n - 1, ROWS).long()
        given = inputs(task | {"length": n})
        upstream = torch.zeros(task["batch"], n, task["heads"] * task["size"])
        upstream[:, rows] = torch.randn(task["batch"], len(rows), upstream.shape[-1])
        named = {f"input{i}": t for i, t in enumerate(given)} | {"upstream": upstream}
        found = candidate.answer(task | {"length": n}, named)
        exact = [t.double().requires_grad_(task["backward"]) for t in given]
        output = definition(pattern, *exact, rows=rows)
        expected = {"output": output.detach()}
        if task["backward"]:
            grads = torch.autograd.grad(output, exact, upstream[:, rows].double())
            expected |= {f"grad{i}": grad for i, grad in enumerate(grads)}
        found["output"] = found["output"][:, rows]
        errors = oracle.relative(found, expected)
        oracle.judge(errors, ALLOWED, f"N {n}")
        worst = max(worst, *errors.values())
    return worst


class PatternRun:
    """A run that predicts the cost of the next length from earlier ones."""

    def __init__(self, options: Options, weigher: Process, watch: Watch):
        self.options, self.weigher, self.watch = options, weigher, watch
        self.rows: list[dict[str, Any]] = []
        self.refused: dict[tuple[str, str], str] = {}
        self.left_out: dict[tuple[str, str, str], str] = {}

    def ways(self, mode: str) -> tuple[str, ...]:
        """The candidates of a mode."""
        if mode == "layout":
            return LAYOUTS
        able = [way for way in WAYS if way != "native" or available("pattern")]
        return tuple(way for way in able if way != "flex" or (self.options.flex and mode == "forward"))

    def compare(self, text: str, n: int, mode: str, keys: float) -> None:
        """Check, weigh and time every candidate under one pattern at one length."""
        options, pattern = self.options, patterns.parse(text)
        task = {
            "what": "attention",
            "length": n,
            "backward": mode == MODES[1],
            "dtype": "float32",
            "batch": options.batch,
            "heads": options.heads,
            "size": options.size,
            "threads": machine()["threads"],
        }
        label, megabytes, errors, samplers = f"{text}, N {n}, {mode}", {}, {}, {}
        names = [w for w in self.ways(mode) if (text, w) not in self.refused and not self._too_much(text, w, n, mode)]
        for way in self.watch(names, len(names), f"{label}: checks"):
            candidate = Local(f"{way}@{text}", find(f"{way}@{text}"), self.weigher)
            try:
                if way not in LAYOUTS:
                    errors[way] = check(candidate, _answers(way, pattern), task)
                if sys.platform == "linux":
                    megabytes[way] = candidate.memory(task)
                samplers[way] = candidate.sampler(task)
            except Refused as error:
                # Shorten the error of a compiler.
                self.refused[text, way] = textwrap.shorten(str(error), 300, placeholder=" ...")
        found, failed = case.take(samplers, options.rounds, label, self.watch)
        self.refused |= {(text, way): reason for way, reason in failed.items()}
        for way, figure in found.items():
            row = {"pattern": text, "mode": mode, "candidate": way, "length": n, "keys": keys, "density": keys / n}
            row |= figure.row() | ({"mb": megabytes[way]} if way in megabytes else {})
            if way in errors:
                row["error"] = errors[way]
                row |= {f"times_{other}": found[other].seconds / figure.seconds for other in WAYS if other in found}
            self.rows.append(row)

    def _too_much(self, text: str, way: str, n: int, mode: str) -> bool:
        """Whether a length is expected to take too long or too much memory, by the longest one so far."""
        if way in MATRICES and n > self.options.matrix:
            reason = f"it needs all {n} x {n} pairs; the limit is {self.options.matrix} tokens"
            self.left_out.setdefault((text, way, mode), f"{mode} from N {n} on: {reason}")
            return True
        before = [r for r in self.rows if (r["pattern"], r["candidate"], r["mode"]) == (text, way, mode)]
        if not before or (text, way, mode) in self.left_out:
            return (text, way, mode) in self.left_out
        last, reason = max(before, key=lambda row: row["length"]), ""
        growth = n / last["length"]
        seconds = last["seconds"] * growth ** (1 if way in OURS else 2)
        megabytes = last.get("mb", 0.0) * growth ** (2 if way in MATRICES else 1)
        if seconds > self.options.limit:
            reason = f"a call would take about {seconds:.0f} s, longer than the limit of {self.options.limit:g} s"
        elif megabytes > ROOM * case.available():
            reason = f"it would need about {megabytes:,.0f} MB of memory; {case.available():,.0f} are free"
        if reason:
            self.left_out[text, way, mode] = f"{mode} from N {n} on: {reason}"
        return bool(reason)


def _answers(way: str, pattern: Pattern) -> Pattern:
    """The pattern under which a candidate works: another one for that with all pairs."""
    if way != "sdpa all":
        return pattern
    return patterns.causal() if pattern.lookahead == 0 else patterns.everywhere()


def weigher() -> Process:
    """The process that measures memory."""
    return Process(
        [sys.executable, "-P", "-c", "from longspan_lab.bench import pattern, worker; worker.serve(pattern.find)"]
    )


def run(options: Options, weigher: Process, watch: Watch) -> Iterator[dict[str, Any]]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError for a pattern that is none."""
    parsed = {text: patterns.parse(text) for text in options.patterns}
    one = PatternRun(options, weigher, watch)
    for text, pattern in parsed.items():
        for n in sorted(options.lengths):
            keys = keys_per_query(pattern, n, options.heads)
            for mode in ("forward", *(["forward+backward"] if options.backward else []), "layout"):
                one.compare(text, n, mode, keys)
                yield _result(one)


def _result(one: PatternRun) -> dict[str, Any]:
    """The result so far."""
    return {
        "benchmark": "pattern",
        "how": "; ".join(_how(one.options)),
        "machine": machine(),
        "options": asdict(one.options),
        "rows": one.rows,
        "growth": _growth(one.rows),
        "refused": [
            {"candidate": f"{text}, {way}", "reason": reason, "ours": way in (*OURS, *LAYOUTS)}
            for (text, way), reason in one.refused.items()
        ],
        "left_out": [
            {"candidate": f"{text}, {way}", "mode": mode, "reason": reason}
            for (text, way, mode), reason in one.left_out.items()
        ],
    }


def _how(options: Options) -> list[str]:
    return [
        f"B {options.batch}, H {options.heads}, D {options.size}, float32, medians of {options.rounds} rounds",
        "queries, keys and values (B,N,H,D) as projections give them to (B,N,H*D) as the output projection takes it",
        "native, torch: sparse_attention on our two backends; sdpa mask: scaled_dot_product_attention with the "
        "pattern as a dense mask, which is made before the clock starts; sdpa all: the same without a mask, causal "
        "where the pattern is",
        "blocks: Pattern.blocks; listed: what the kernels take; plan: what torch's tiles and classes take; of one "
        "head, made anew at each call, where attention keeps what it has made",
        f"keys: per query, the mean over the heads and over up to {COUNTED} queries at even distances",
        "memory: resident memory of one call in a fresh process beyond its inputs, mask and layout included",
        f"each candidate first agreed with a float64 definition in values and gradients, all of {COMPARED} tokens and "
        f"{ROWS} queries of the whole length",
    ]


def _growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fitted exponents of time, and from where on each candidate is faster than all pairs."""
    found = []
    for text, mode, way in dict.fromkeys((r["pattern"], r["mode"], r["candidate"]) for r in rows):

        def seconds(way: str, text: str = text, mode: str = mode) -> dict[int, float]:
            same = (r for r in rows if (r["pattern"], r["mode"], r["candidate"]) == (text, mode, way))
            return {r["length"]: r["seconds"] for r in same}

        entry: dict[str, Any] = {"pattern": text, "mode": mode, "candidate": way}
        if reason := figures.unfitted(seconds(way)):
            entry["unfitted"] = reason
        else:
            entry["exponent"] = figures.exponent(seconds(way))
        if way not in (*LAYOUTS, "sdpa all") and seconds("sdpa all"):
            entry["faster_than_all"] = figures.crossover(seconds(way), seconds("sdpa all"))
        found.append(entry)
    return found


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    tables: list[Table] = []
    for pattern in dict.fromkeys(row["pattern"] for row in result["rows"]):
        here = [row for row in result["rows"] if row["pattern"] == pattern]
        lengths = sorted({row["length"] for row in here})
        keys = {row["length"]: f"{row['keys']:.0f} ({row['density']:.2%})" for row in here}
        tables.append([[pattern, *(f"N {n}" for n in lengths)], ["keys per query", *(keys[n] for n in lengths)]])
        for mode in dict.fromkeys(row["mode"] for row in here):
            at = {(row["candidate"], row["length"]): row for row in here if row["mode"] == mode}
            ways = list(dict.fromkeys(way for way, _ in at))
            head = mode if mode == "layout" else f"{mode}: time (speed-up over sdpa all); peak MB"
            tables.append(
                [
                    [head, *(f"N {n}" for n in lengths)],
                    *([way, *(_cell(at.get((way, n))) for n in lengths)] for way in ways),
                ]
            )
    growth = [["time grows as", "mode", "candidate", "fitted", "faster than sdpa all"]]
    for entry in result["growth"]:
        fitted = f"N^{entry['exponent']:.2f}" if "exponent" in entry else f"none: {entry.get('unfitted', 'one length')}"
        growth.append(
            [*(entry[name] for name in ("pattern", "mode", "candidate")), fitted, entry.get("faster_than_all", "")]
        )
    return [*tables, growth]


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    times = f" ({row['times_sdpa all']:.2f}x)" if "times_sdpa all" in row else ""
    return f"{duration(row['seconds'])}{times}" + (f"; {row['mb']:.1f}" if "mb" in row else "")
