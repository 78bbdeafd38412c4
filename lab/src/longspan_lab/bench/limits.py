"""What this machine can do at most: matrix products, and moving bytes."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import torch

from longspan._utils.machine import machine

from . import case
from .candidates import Sampler
from .case import Watch
from .options import rounds
from .worker import Call

SIZES = (512, 1024, 2048)  # of square matrices
MEGABYTES = (0.5, 2.0, 8.0, 64.0, 256.0)  # of one array: second-level cache, last-level cache, memory
FRESH = 64.0  # MB from which on glibc gives every array fresh pages
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Options:
    """The settings of the benchmark."""

    rounds: int = rounds(7, "samples per figure")


def gemm(size: int, dtype: str) -> Call:
    """A product of two square matrices, into memory that is there; 2 size^3 operations."""
    a, b, out = (torch.randn(size, size).to(getattr(torch, dtype)) for _ in range(3))
    return lambda: torch.mm(a, b, out=out)


def gemms(dtype: str) -> dict[str, Sampler]:
    """Products whose best rate stands for the machine's peak in a comparison."""
    return {f"gemm {size}": case.bound(gemm(size, dtype)) for size in (1024, 2048)}


def rate(name: str, seconds: float) -> float:
    """GFLOP/s of a product called ``gemm SIZE``."""
    return 2 * int(name.split()[1]) ** 3 / seconds / 1e9


def peak(figures: dict[str, case.Figure]) -> float:
    """The best rate among the products of a case, in GFLOP/s."""
    return max(rate(name, figure.seconds) for name, figure in figures.items() if name.startswith("gemm "))


def copy(numbers: int) -> Call:
    """Read one array, write another."""
    source, target = torch.ones(numbers), torch.ones(numbers)
    return lambda: target.copy_(source)


def scale(numbers: int) -> Call:
    """Read and write one array in place."""
    array = torch.ones(numbers)
    return lambda: array.mul_(1.0)


def read(numbers: int) -> Call:
    """Read one array."""
    array = torch.ones(numbers)
    return lambda: array.sum()


def fill(numbers: int) -> Call:
    """Write an array whose pages are fresh, which the system must clear one by one."""
    return lambda: torch.empty(numbers).fill_(1.0)


# name -> maker, bytes that cross per byte of array
TRAFFIC: dict[str, tuple[Callable[[int], Call], int]] = {
    "copy": (copy, 2),
    "scale in place": (scale, 2),
    "read": (read, 1),
    "fill fresh pages": (fill, 1),
}


def run(options: Options, watch: Watch) -> Generator[dict[str, Any], None, None]:
    """Measure the limits -> what ``report.write`` takes, as it grows."""
    rows: list[dict[str, Any]] = []
    for dtype in DTYPES:
        samplers = {f"gemm {size}": case.bound(gemm(size, dtype)) for size in SIZES}
        found, _ = case.take(samplers, options.rounds, f"matrix products, {dtype}", watch)
        for name, figure in found.items():
            value = rate(name, figure.seconds)
            rows.append(
                {
                    "limit": "gemm",
                    "dtype": dtype,
                    "size": int(name.split()[1]),
                    "value": value,
                    "unit": "GFLOP/s",
                    **figure.row(),
                }
            )
        yield _result(options.rounds, rows)
    for megabytes in MEGABYTES:
        numbers = int(megabytes * 2**20 / 4)
        kinds = {name: kind for name, kind in TRAFFIC.items() if megabytes >= FRESH or name != "fill fresh pages"}
        samplers = {name: case.bound(make(numbers)) for name, (make, _) in kinds.items()}
        found, _ = case.take(samplers, options.rounds, f"arrays of {megabytes:g} MB", watch)
        for name, figure in found.items():
            value = kinds[name][1] * 4 * numbers / figure.seconds / 1e9
            rows.append(
                {"limit": name, "dtype": "float32", "size": megabytes, "value": value, "unit": "GB/s", **figure.row()}
            )
        yield _result(options.rounds, rows)


def _result(rounds: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result so far."""
    how = (
        f"medians of {rounds} rounds; gemm: square matrices into memory that is there; "
        f"copy and scale count what they read and what they write"
    )
    return {"benchmark": "limits", "how": how, "machine": machine(), "rows": rows}


def text(result: dict[str, Any]) -> list[list[list[str]]]:
    """The tables of a result."""
    rows = result["rows"]
    products = [["GEMM, GFLOP/s", *map(str, SIZES)]]
    for dtype in DTYPES:
        found = {row["size"]: row["value"] for row in rows if row["limit"] == "gemm" and row["dtype"] == dtype}
        products.append([dtype, *(f"{found[size]:.0f}" for size in SIZES)])
    traffic = [["GB/s by MB of array", *(f"{megabytes:g}" for megabytes in MEGABYTES)]]
    for name in TRAFFIC:
        found = {row["size"]: row["value"] for row in rows if row["limit"] == name}
        traffic.append([name, *(f"{found[mb]:.1f}" if mb in found else "" for mb in MEGABYTES)])
    return [products, traffic]
