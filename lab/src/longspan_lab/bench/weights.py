"""Products with weights of few bits, by format and rows, against torch and reading memory; then whole decode steps."""

import copy
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import longspan
from longspan._utils.machine import machine
from longspan._utils.spec import known
from longspan.generation.native_decoder import Engine
from longspan.ops.quantized import formats, multiply, pack
from longspan.ops.quantized.operands import ACTIVATIONS, Map
from longspan.ops.quantized.packing import Packed

from .._utils.tables import Table, duration
from . import case
from .candidates import Sampler
from .case import Watch
from .options import option, rounds

READ, PLAIN = "read", ("float32", "bfloat16")
# Errors relative to the product with the dequantized weight, by what is rounded.
ALLOWED = {"float32": 1e-5, "int16": 1e-4, "int8": 2e-2, "bfloat16": 2e-2}
VOCABULARY = 8192


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    inputs: int = option(1024, "inputs of the product, and width of the decoder")
    outputs: int = option(3584, "outputs of the product, and inner width of the decoder")
    rows: tuple[int, ...] = option((1, 4, 16, 64), "rows of activations", "sizes")
    formats: tuple[str, ...] = option(
        ("Q8_0", "Q4_0", "Q4_K", "Q6_K"), "formats of weights; Q4_K and Q6_K are random blocks", "words"
    )
    depth: int = option(4, "layers of the decoder", "count")
    batches: tuple[int, ...] = option((1, 64), "sequences of the decode step", "sizes")
    megabytes: int = option(128, "MB of weights that each candidate reads in turn, more than the caches")
    rounds: int = rounds(21)


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure; yield the growing result for ``report.collect``."""
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    how = (
        f"product: rows times a weight ({options.outputs}, {options.inputs}), {options.megabytes} MB of them in turn; "
        f"read: the sum of as many bytes of float32 in torch; of read: bytes of weights per second, relative to that; "
        f"error: root of the mean square, relative to the product with the dequantized weight; decoder: one token of "
        f"{options.depth} layers of gated_deltanet in the decode engine, embedding and head of {VOCABULARY} tokens; "
        f"medians of {options.rounds} rounds on {torch.get_num_threads()} threads"
    )

    def result() -> dict[str, Any]:
        about = {"benchmark": "weights", "how": how, "machine": machine(), "options": asdict(options)}
        return about | {"rows": rows, "refused": refused}

    for count in options.rows:
        products = _products(options, count)
        samplers: dict[str, Sampler] = {}
        errors, sizes = {}, {}
        for name, (call, size, right, error) in products.items():
            errors[name], sizes[name] = right, size
            if error:
                refused.append({"candidate": f"{name} {count} rows", "reason": error, "ours": name not in PLAIN})
                continue
            samplers[name] = case.bound(call)
        found, failed = case.take(samplers, options.rounds, f"products of {count} rows", watch)
        refused += [{"candidate": f"{n} {count} rows", "reason": r, "ours": True} for n, r in failed.items()]
        rate = sizes[READ] / found[READ].seconds
        for name, figure in found.items():
            speed = sizes[name] / figure.seconds
            row = {"candidate": name, "what": "product", "rows": count, **figure.row(), "GB_per_second": speed / 1e9}
            rows.append(row | {"of_read": speed / rate, "error": errors[name]})
        yield result()
    if options.depth:
        engines = _engines(options)
        for batch in options.batches:
            samplers = {name: case.bound(_step(model, engine, batch)) for name, (model, engine) in engines.items()}
            found, failed = case.take(samplers, options.rounds, f"decoder, batch {batch}", watch)
            refused += [{"candidate": f"{n} decoder", "reason": r, "ours": True} for n, r in failed.items()]
            for name, figure in found.items():
                row = {"candidate": name, "what": "decoder", "rows": batch, **figure.row()}
                megabytes = engines[name][1].weights.bytes / 2**20
                rows.append(row | {"tokens_per_second": batch / figure.seconds, "megabytes": megabytes})
            yield result()


Product = tuple[Callable[[], object], int, float, str]
"""a call, the bytes of weights that it reads, its error, and why it is refused"""


def _products(options: Options, count: int) -> dict[str, Product]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(options.outputs, options.inputs, generator=generator) / options.inputs**0.5
    x = torch.randn(count, options.inputs, generator=generator)
    numbers = options.megabytes * 2**18
    array = torch.ones(numbers)
    found: dict[str, Product] = {READ: (array.sum, 4 * numbers, 0.0, "")}
    for kind in PLAIN:
        own, given = (t.to(getattr(torch, kind)) for t in (weight, x))
        found[kind] = _product(lambda w, given=given: F.linear(given, w), [own], weight, x, kind, options)
    for name in options.formats:
        form = formats.FORMATS[known(name, formats.FORMATS, "format of blocks")]
        if form.write is None:
            # Bytes below 60, so that no float16 number is large.
            shape = options.outputs, form.row_bytes(options.inputs)
            blocks = formats.Blocks(
                torch.randint(60, shape, dtype=torch.uint8, generator=generator), name, options.inputs
            )
        else:
            blocks = formats.quantize(weight, name)
        packed, exact = pack(blocks), formats.dequantize(blocks)
        for activations in ACTIVATIONS:

            def call(*parts: Tensor, packed: Packed = packed, activations: str = activations) -> Tensor:
                quants, scales, factors = parts
                own = packed._replace(quants=quants, scales=scales, factors=factors)
                return multiply(Map(x, None, *own, activations))

            found[f"{name} {activations}"] = _product(call, packed[:3], exact, x, activations, options)
    return found


def _product(
    call: Callable[..., Tensor], parts: Sequence[Tensor], weight: Tensor, x: Tensor, kind: str, options: Options
) -> Product:
    """A call that takes another copy of the weight each time."""
    size = sum(t.nbytes for t in parts)
    copies = [[t.clone() for t in parts] for _ in range(max(options.megabytes * 2**20 // size, 1))]
    turn = itertools.cycle(copies)
    right = x.double() @ weight.double().T
    error = float((call(*parts).double() - right).norm() / right.norm())
    return lambda: call(*next(turn)), size, error, "" if error <= ALLOWED[kind] else f"its error is {error:.1e}"


def _engines(options: Options) -> dict[str, tuple[longspan.Decoder, Engine]]:
    config = longspan.DecoderConfig(
        dim=options.inputs,
        feedforward=options.outputs,
        depth=options.depth,
        attention="gated_deltanet",
        heads=max(options.inputs // 64, 1),
        positions="none",
        activation="swiglu",
        vocab=VOCABULARY,
    )
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        plain = longspan.Decoder(config).eval()
    models = {"float32": plain, "bfloat16": copy.deepcopy(plain).bfloat16()}
    for weights, activations in (("int8", "int16"), ("int4", "int16"), ("int4", "int8")):
        model = models[f"{weights} {activations}"] = copy.deepcopy(plain)
        longspan.quantize(model, weights, activations=activations)
    return {name: (model, Engine(model)) for name, model in models.items()}


def _step(model: longspan.Decoder, engine: Engine, batch: int) -> Callable[[], None]:
    tokens, state = torch.zeros(batch, 1, dtype=torch.long), model.init_state(batch)

    def step() -> None:
        nonlocal state
        _, state = engine(tokens, state)

    return step


def text(result: dict[str, Any]) -> list[Table]:
    """The tables of a result."""
    tables = []
    for what, cell in (("product", _product_cell), ("decoder", _decoder_cell)):
        rows = [row for row in result["rows"] if row["what"] == what]
        counts = list(dict.fromkeys(row["rows"] for row in rows))
        at = {(row["candidate"], row["rows"]): row for row in rows}
        names = list(dict.fromkeys(name for name, _ in at))
        head = [what, *(f"{n} row{'s' * (n > 1)}" for n in counts)]
        table = [[name, *(cell(at[name, n]) if (name, n) in at else "" for n in counts)] for name in names]
        if what == "product" and rows:
            head.append("error")
            table = [[*line, f"{at[line[0], counts[0]]['error']:.1e}" if line[0] != READ else ""] for line in table]
        if rows:
            tables.append([head, *table])
    return tables


def _product_cell(row: dict[str, Any]) -> str:
    return f"{duration(row['seconds'])} ({row['of_read']:.2f} of read)"


def _decoder_cell(row: dict[str, Any]) -> str:
    return f"{row['tokens_per_second']:.4g} tokens/s, {row['megabytes']:.4g} MiB"
