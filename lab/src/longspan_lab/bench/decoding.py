"""Generation by whole decoders: one token by position and batch, and whole images, sampling included."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from longspan._utils.machine import machine
from longspan.generation.native_decoder import Engine
from longspan.generation.sampling import generate
from longspan.models.config import DecoderConfig
from longspan.ops.buffers import reuse_pages

from .._utils.tables import Table, duration
from . import case, decoders, oracle, throughput, worker
from .attention import ROOM
from .candidates import Candidate, Local, Process, Refused, Remote, Sampler
from .case import Watch
from .options import length, limit, option, rounds
from .worker import Task

DEFAULT = ("linear@engine", "linear@plain", "linear@engine@bf16", "softmax@engine", "softmax@plain")
BOUNDS = ("parameters", "gemm", "state")
# Katharopoulos et al. 2020, section 4.2.1, with one logit per level.
SHAPE = DecoderConfig(dim=256, depth=8, heads=8, feedforward=1024, vocab=256, positions="none")
SMALL = DecoderConfig(dim=15, depth=2, heads=3, feedforward=7, vocab=11, positions="none")


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    positions: tuple[int, ...] = option((784, 3072, 16384), "tokens before the timed one", "sizes")
    batches: tuple[int, ...] = option((1, 256), "batch sizes", "sizes")
    rounds: int = rounds(7)
    images: int = option(3, "samples of whole images; 0: do not measure them", "count")
    tokens: int = length(784, "tokens per image")
    limit: float = limit(150.0, "images")
    shape: DecoderConfig = SHAPE


class DecodingRun:
    """One run over batches and positions."""

    def __init__(self, candidates: dict[str, Candidate], options: Options, watch: Watch):
        self.candidates, self.options, self.watch = candidates, options, watch
        self.rows: list[dict[str, Any]] = []
        self.refused: dict[str, str] = {}
        self.left_out: list[dict[str, str]] = []

    def task(self, batch: int, name: str, config: DecoderConfig) -> Task:
        """What a candidate is asked to do. ft normalizes after its sub-layers, whatever is asked."""
        asked = replace(config, prenorm=name != "ft")
        return {
            "what": "model",
            **decoders.shape(asked),
            "batch": batch,
            "threads": torch.get_num_threads(),
            "dtype": "bfloat16" if _half(name) else "float32",
        }

    def check(self, name: str, batch: int) -> float | None:
        """Hold a candidate to the definition, at small odd sizes and at the real ones -> error, None if refused."""
        error = 0.0
        spec = "linear" if name == "ft" else decoders.read(name).spec
        for config, rows in ((SMALL, 2), (self.options.shape, batch)):
            task = self.task(rows, name, config)
            config = replace(config, attention=spec, prenorm=task["prenorm"])
            weights = decoders.random_weights(config)
            if task["dtype"] == "bfloat16":
                weights = {key: tensor.bfloat16() for key, tensor in weights.items()}
            try:
                error = max(error, oracle.check_model(self.candidates[name], config, weights, task))
            except Refused as refusal:
                self.refused[name] = str(refusal)
                return None
        return error

    def steps(self, batch: int) -> Iterator[int]:
        """One token at each position, for one batch -> the positions, as they are done."""
        names = [name for name in self.candidates if name not in self.refused]
        errors = {name: self.check(name, batch) for name in self.watch(names, len(names), f"batch {batch}: checks")}
        names = [name for name, error in errors.items() if error is not None]
        for position in self.options.positions:
            samplers = self._samplers(names, batch, position)
            limits: dict[str, Sampler] = {}
            for half in sorted({_half(name) for name in samplers}):
                plain = decoders.Name("linear", False, half)
                model = decoders.build(plain, self.task(batch, "linear", self.options.shape))
                limits |= {name: case.bound(call) for name, call in decoders.bounds(model, batch).items()}
            label = f"batch {batch} position {position}"
            found, failed = case.take(samplers | limits, self.options.rounds, label, self.watch)
            self.refused |= failed
            for name, figure in found.items():
                row = {"candidate": name, "what": "step", "batch": batch, "position": position, **figure.row()}
                if name in samplers:
                    kind = " bf16" if _half(name) else ""
                    parameters, gemm, state = (found[bound + kind].seconds for bound in BOUNDS)
                    row["tokens_per_second"] = batch / figure.seconds
                    row["to_parameters"] = figure.seconds / parameters
                    row["to_gemm_and_state"] = figure.seconds / (gemm + state)
                    row["error"] = errors[name]
                    if "ft" in found:
                        row["ratio"] = found["ft"].seconds / figure.seconds
                self.rows.append(row)
            for candidate in self.candidates.values():
                candidate.release()
            yield position

    def _samplers(self, names: list[str], batch: int, position: int) -> dict[str, Sampler]:
        samplers: dict[str, Sampler] = {}
        states: dict[tuple[str, bool], Any] = {}
        for name in names:
            task, candidate = self.task(batch, name, self.options.shape), self.candidates[name]
            if isinstance(candidate, Remote):
                samplers[name] = candidate.sampler(task)
                continue
            read = decoders.read(name)
            model, key = decoders.build(read, task), (read.spec, read.half)
            if key not in states:
                needed = decoders.cache_megabytes(model, batch, position + decoders.AHEAD)
                if needed > ROOM * case.available():
                    reason = f"batch {batch}, position {position}: its state would need {needed:,.0f} MB of memory; "
                    self.left_out.append({"candidate": name, "reason": f"{reason}{case.available():,.0f} are free"})
                    continue
                states[key] = throughput.state_at(model, batch, position, position + decoders.AHEAD)
            # Candidates of one mechanism share one state: two caches might not fit.
            samplers[name] = decoders.sampler(decoders.stepping(read, model), states[key], position)
        return samplers

    def whole(self, batch: int) -> None:
        """Whole images, by each mechanism's fastest way, which ``generate`` takes of itself."""
        samplers: dict[str, Sampler] = {}
        kinds = dict.fromkeys(decoders.read(name).spec for name in self._left() if name != "ft")
        for name in [*kinds, *(name for name in self._left() if name == "ft")]:
            steps = [
                row["seconds"]
                for row in self.rows
                if row["what"] == "step" and row["batch"] == batch and row["candidate"].split("@")[0] == name
            ]
            expected = min(steps, default=0.0) * self.options.tokens
            if expected > self.options.limit:
                reason = f"batch {batch}: an image takes about {expected:.0f} s, more than {self.options.limit:g} s"
                self.left_out.append({"candidate": f"{name}, whole images", "reason": reason})
                continue
            task = self.task(batch, name, self.options.shape) | {"tokens": self.options.tokens}
            if name == "ft":
                samplers[name] = self.candidates[name].sampler(task)
            else:
                samplers[name] = _images(name, task)
        label = f"batch {batch}: whole images"
        found, failed = case.take(samplers, self.options.images, label, self.watch, warm=False)
        self.refused |= failed
        for name, figure in found.items():
            row = {
                "candidate": name,
                "what": "images",
                "batch": batch,
                **figure.row(),
                "images_per_second": batch / figure.seconds,
                "tokens_per_second": batch * self.options.tokens / figure.seconds,
            }
            if "ft" in found:
                row["ratio"] = found["ft"].seconds / figure.seconds
            self.rows.append(row)
        for candidate in self.candidates.values():
            candidate.release()

    def _left(self) -> list[str]:
        return [name for name in self.candidates if name not in self.refused]


def _half(name: str) -> bool:
    return name != "ft" and decoders.read(name).half


def _images(spec: str, task: Task) -> Sampler:
    model = decoders.build(decoders.Name(spec, False, False), task)

    def images() -> None:
        throughput.consume(generate(model, max_new_tokens=task["tokens"], batch=task["batch"], seed=0, stream=True))

    return lambda repeat: worker.timed(images, repeat)


def run(
    names: Sequence[str], remotes: Sequence[Remote], weigher: Process, options: Options, watch: Watch
) -> Iterator[dict]:
    """Measure; yield the growing result for ``report.collect``.

    Raises ValueError for a name that is not known, and for a mechanism without a definition to hold it to.
    """
    reuse_pages()  # as generate does
    candidates: dict[str, Candidate] = {}
    left_out = []
    for name in names:
        read = decoders.read(name)
        if read.spec not in ("linear", "softmax"):
            raise ValueError(f"{name!r}: whole decoders are measured for linear and softmax, which have a definition")
        model = decoders.build(read, decoders.shape(options.shape))
        if read.engine and (reason := Engine.why_not(model)):
            left_out.append({"candidate": name, "reason": reason})
        else:
            candidates[name] = Local(name, decoders.makers(name), weigher)
    candidates |= {remote.name: remote for remote in remotes if remote.name == "ft"}
    one = DecodingRun(candidates, options, watch)
    one.left_out += left_out
    for batch in options.batches:
        for _ in one.steps(batch):
            yield _result(one)
        if options.images:
            one.whole(batch)
            yield _result(one)


def _result(one: DecodingRun) -> dict[str, Any]:
    """The result so far."""
    options, ours = one.options, {name: candidate.ours for name, candidate in one.candidates.items()}
    return {
        "benchmark": "generate",
        "how": "; ".join(_how(options)),
        "machine": machine(),
        "options": asdict(options),
        "rows": one.rows,
        "left_out": one.left_out,
        "refused": [{"candidate": n, "reason": r, "ours": ours[n]} for n, r in one.refused.items()],
    }


def _how(options: Options) -> list[str]:
    shape = options.shape
    return [
        f"decoder of {shape.depth} layers, d {shape.dim}, H {shape.heads}, feed-forward {shape.feedforward}, "
        f"vocabulary {shape.vocab}, no positions, untrained; medians of {options.rounds} rounds",
        f"a step is one token for the whole batch without sampling, at up to {decoders.AHEAD} positions from the one "
        f"given; caches hold random numbers",
        "ft: RecurrentTransformerEncoder between an embedding and a head of the same size, one norm fewer",
        f"images: {options.tokens} tokens with sampling, {options.images} rounds, ours by longspan.generate",
        "parameters: the sum of as many bytes; gemm: torch.mm of the linear maps; state: the linear states scaled in "
        "place",
        "each candidate first agreed with a float64 definition, token by token",
    ]


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    tables = []
    steps = [row for row in result["rows"] if row["what"] == "step"]
    for batch in result["options"]["batches"]:
        rows = [row for row in steps if row["batch"] == batch]
        at = {(row["candidate"], row["position"]): row for row in rows}
        names, positions = list(dict.fromkeys(r["candidate"] for r in rows)), result["options"]["positions"]
        body = [[name, *(_step(at[name, p]) if (name, p) in at else "" for p in positions)] for name in names]
        tables.append([[f"step, batch {batch}", *(f"position {p}" for p in positions)], *body])
    images = [row for row in result["rows"] if row["what"] == "images"]
    if images:
        body = [
            [
                row["candidate"],
                str(row["batch"]),
                f"{row['images_per_second']:.3g}",
                f"{row['tokens_per_second']:.4g}",
                f"{row['ratio']:.2f}x" if "ratio" in row else "",
            ]
            for row in images
        ]
        tables.append([["whole images", "batch", "images/s", "tokens/s", "speed-up over ft"], *body])
    return tables


def _step(row: dict[str, Any]) -> str:
    if "to_parameters" not in row:
        return duration(row["seconds"])
    limit, name = ("to_parameters", "parameters") if row["batch"] == 1 else ("to_gemm_and_state", "gemm + state")
    ratio = f", {row['ratio']:.2f}x ft" if "ratio" in row else ""
    return f"{duration(row['seconds'])} ({row[limit]:.2f} of {name}{ratio})"
