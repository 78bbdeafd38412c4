"""Whole models of RWKV-7: longspan's kernels compared with ``rwkv``, the package of the model's author."""

import contextlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspan._utils.machine import machine
from longspan._utils.optional_deps import need
from longspan.compat.fla import models
from longspan.compat.fla.models.rwkv_files import save_pth
from longspan.ops.backends import backend
from longspan.ops.buffers import reuse_pages

from .._utils.tables import Table, duration
from . import case, worker
from .candidates import Refused, Sampler
from .case import Watch
from .hybrids import COMPARED, DECODED, PROMPT
from .options import length, option, rounds

PACKAGE, OURS, TORCH = "rwkv", "longspan", "longspan, torch operations"
MODES = ("prefill", "training step", "decoding")
ALLOWED = 1e-4  # relative distance of outputs, all numbers together


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    length: int = length(2048, "tokens per prompt and training step")
    layers: int = option(3, "layers of the model")
    width: int = option(1024, "width of the model, a multiple of 64")
    vocabulary: int = option(32000, "tokens of the vocabulary", "length")
    rounds: int = rounds(3)

    def config(self) -> Any:
        """The model's config: the published sizes of a width, with fewer layers. Raises ValueError for a width."""
        if self.width % 64:
            raise ValueError(f"width={self.width} must be a multiple of 64, the size of a head")
        return models.supported()["rwkv7"].config(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            vocab_size=self.vocabulary,
            head_dim=64,
            norm_first=True,
            fuse_norm=False,
        )


def build(options: Options) -> Any:
    """A model with random weights, none of which are zero."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        made = models.supported()["rwkv7"].model(options.config()).eval()
        with torch.no_grad():
            for name, weight in made.named_parameters():
                if name.startswith("model.layers.") and not name.endswith("norm.weight"):
                    weight.add_(0.02 * torch.randn_like(weight))
    return made


def package(made: Any) -> Any:
    """The same model by the package ``rwkv``. Raises Refused without it."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            save_pth(made, Path(folder, "model.pth"))
            # The package reads its options from the environment, once, and prints what it does.
            os.environ.update(RWKV_V7_ON="1", RWKV_JIT_ON="1", RWKV_CUDA_ON="0")
            with contextlib.redirect_stdout(io.StringIO()):
                from rwkv.model import RWKV  # pyright: ignore[reportMissingImports] (optional)

                return RWKV(model=str(Path(folder, "model")), strategy="cpu fp32")
    except ImportError as error:
        raise Refused("not installed: pip install rwkv") from error


def tokens(options: Options, count: int) -> Tensor:
    """(1,N) of them, drawn once."""
    return torch.randint(1, options.vocabulary, (1, count), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def check(made: Any, theirs: Any, options: Options) -> float:
    """Relative distance between the outputs of both. Raises Refused where it is too large."""
    x = tokens(options, min(COMPARED, options.length))
    with torch.random.fork_rng([]):
        exact, _ = theirs.forward(x[0].tolist(), None, full_output=True)
    found = made(x, use_cache=False).logits[0]
    error = float((found - exact).norm() / exact.norm())
    if not error <= ALLOWED:
        raise Refused(f"its outputs differ from those of the package by {error:.2g}, more than {ALLOWED:.2g}")
    return error


def samplers(mode: str, made: Any, theirs: Any, options: Options) -> dict[str, Sampler]:
    """The candidates of one mode. The package does not train on a CPU."""
    prefill, _, decoding = MODES
    x = tokens(options, PROMPT if mode == decoding else options.length)

    @torch.no_grad()
    def prompt() -> Any:
        return made(x, use_cache=True, logits_to_keep=1)

    def step() -> None:
        made.train()
        made(x, labels=x, use_cache=False).loss.backward()
        made.zero_grad(set_to_none=True)
        made.eval()

    def by_torch(call: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            with backend("torch"):
                return call()

        return run

    @torch.no_grad()
    def decoded(repeat: int) -> float:
        cache = prompt().past_key_values
        begin = time.perf_counter()
        for _ in range(repeat * DECODED):
            made(x[:, :1], past_key_values=cache, use_cache=True)
        return (time.perf_counter() - begin) / (repeat * DECODED)

    def decoded_by_package(repeat: int) -> float:
        _, state = theirs.forward(x[0].tolist(), None)
        begin = time.perf_counter()
        for _ in range(repeat * DECODED):
            _, state = theirs.forward([1], state)
        return (time.perf_counter() - begin) / (repeat * DECODED)

    def timed(call: Callable[[], Any]) -> Sampler:
        return lambda repeat: worker.timed(call, repeat)

    if mode == decoding:
        return {PACKAGE: decoded_by_package, OURS: decoded} if theirs is not None else {OURS: decoded}
    call = prompt if mode == prefill else step
    found = {TORCH: timed(by_torch(call)), OURS: timed(call)}
    if mode == prefill and theirs is not None:
        return {PACKAGE: timed(lambda: theirs.forward(x[0].tolist(), None)), **found}
    return found


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure; yield the growing result for ``report.collect``. Raises ValueError for invalid sizes."""
    need("the benchmark of RWKV-7", "transformers")
    options.config()
    reuse_pages()  # as train and generate do
    rows: list[dict[str, Any]] = []
    refused: list[dict[str, Any]] = []
    made, theirs, error = build(options), None, None
    try:
        theirs = package(made)
        error = check(made, theirs, options)
    except Refused as reason:
        refused.append(
            {"candidate": PACKAGE if theirs is None else OURS, "reason": str(reason), "ours": theirs is not None}
        )
    for mode in MODES if theirs is None or error is not None else ():
        figures, failed = case.take(samplers(mode, made, theirs, options), options.rounds, f"RWKV-7 {mode}", watch)
        refused += [{"candidate": name, "reason": reason, "ours": True} for name, reason in failed.items()]
        count = 1 if mode == MODES[2] else options.length
        for name, figure in figures.items():
            row = {"mode": mode, "candidate": name, **figure.row(), "tokens_per_second": count / figure.seconds}
            rows.append(row | {"times_longspan": figure.seconds / figures[OURS].seconds, "error": error})
        yield _result(options, rows, refused, error)
    yield _result(options, rows, refused, error)


def _result(options: Options, rows: list, refused: list, error: float | None) -> dict[str, Any]:
    versions = {}
    with contextlib.suppress(metadata.PackageNotFoundError):
        versions[PACKAGE] = metadata.version(PACKAGE)
    return {
        "benchmark": "rwkv7",
        "how": (
            f"RWKV-7 of width {options.width} with {options.layers} layers, heads of 64 and a vocabulary of "
            f"{options.vocabulary}, random weights, float32; prefill: {options.length} tokens, outputs of the last one "
            f"and the state; training step: loss and all gradients of {options.length} tokens; decoding: a token after "
            f"{PROMPT} others; medians of {options.rounds} rounds in which the candidates take turns"
            + (f"; outputs first agreed with the package on {min(COMPARED, options.length)} tokens" if error else "")
        ),
        "machine": machine() | versions,
        "options": asdict(options),
        "rows": rows,
        "refused": refused,
    }


def text(result: dict[str, Any]) -> list[Table]:
    """The table: time and tokens per second by mode, and how many times longspan's time each candidate takes."""
    table: Table = [["mode", "candidate", "time", "tokens/s", "times longspan"]]
    for row in result["rows"]:
        table.append(
            [
                row["mode"],
                row["candidate"],
                duration(row["seconds"]),
                f"{row['tokens_per_second']:,.4g}",
                f"{row['times_longspan']:.2f}",
            ]
        )
    return [table]
