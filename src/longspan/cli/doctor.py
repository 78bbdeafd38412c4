"""``longspan doctor``: versions, backends, native kernels and caches of this machine."""

import importlib.metadata
import shutil
import time
from pathlib import Path

from .._utils import terminal
from .parser import Parser, make

COLUMN = 16  # at which values begin
WIDTH, REPEATED = 256, 3  # size and samples of the timed products: milliseconds even if they are slow
SLOW = 1.5  # ratio from which on half the memory does not justify the time


def parser() -> Parser:
    parser = make(
        "doctor",
        "Report versions, devices, the native CPU kernels by family, optional packages and the cache folder. Kernels "
        "that the installation does not bring are compiled now. The environment variable LONGSPAN_CACHE moves the "
        "cache, and LONGSPAN_ISA forces an instruction set.",
        "longspan doctor",
        "longspan doctor --clear",
    )
    parser.add_flag("--clear", "delete the compiled kernels and the records of failed compilations; data sets are kept")
    return parser


def run(args) -> int:
    from .._utils.cache_dirs import cache_folder

    folder = cache_folder()
    if args.clear:
        freed = size(folder / "native")
        shutil.rmtree(folder / "native", ignore_errors=True)
        print(f"deleted the compiled kernels in {folder / 'native'}: {freed:,} bytes")
        return 0
    for name, value in facts(folder).items():
        print("\n".join(terminal.entry(name, [value] if isinstance(value, str) else value, COLUMN)))
    return 0


def facts(folder: Path) -> dict[str, str | list[str]]:
    """The lines of the report, by label; several lines as a list."""
    import torch

    from .._utils.machine import machine
    from ..compat.transformers import report
    from . import dispatch

    found = machine()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "longspan": importlib.metadata.version("longspan"),
        "torch": f"{found['torch']}, {found['threads']} threads",
        "python": str(found["python"]),
        "machine": f"{found['processor']}, {found['cores']} cores, {found['system']}",
        "accelerator": str(device or "none"),
        "bfloat16": precision(bfloat16_ratio()),
        **dispatch.kernels_facts(),
        "cache": f"{folder} ({', '.join(parts(folder)) or 'empty'})",
        "  compiled": compiled(folder / "native") or "nothing",
        "transformers": report.summary(),
        "extras": extras(),
    }


def bfloat16_ratio() -> float:
    """Time of a matrix product in bfloat16 over that in float32, on the CPU."""
    import torch
    import torch.nn.functional as F

    def seconds(dtype: torch.dtype) -> float:
        x, taken = torch.ones(WIDTH, WIDTH, dtype=dtype), []
        for _ in range(REPEATED):
            begin = time.perf_counter()
            F.linear(x, x)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    return seconds(torch.bfloat16) / seconds(torch.float32)


def precision(ratio: float) -> str:
    """Describe such a ratio, and recommend float32 if bfloat16 is much slower.

    >>> precision(5.83)
    'a product takes 5.8 times as long as in float32: float32 is the better choice here'
    >>> precision(0.412)
    'a product takes 0.41 times as long as in float32'
    """
    text = f"a product takes {ratio:.2g} times as long as in float32"
    return f"{text}: float32 is the better choice here" if ratio > SLOW else text


def extras() -> list[str]:
    """The installed optional packages, and for each missing one the command that installs it."""
    from importlib.util import find_spec

    from .._utils.optional_deps import EXTRAS, install

    there = [name for name in EXTRAS if find_spec(name)]
    missing = [f"{name} is missing: {install(extra)}" for name, extra in EXTRAS.items() if name not in there]
    return [f"installed: {', '.join(there) or 'none'}", *missing]


def compiled(folder: Path) -> list[str]:
    """Each compilation in a folder of kernels: family, compiler, and the library or why it failed."""
    from ..ops.native.build import store

    seals = sorted(store.seals(folder), key=lambda seal: seal.family)
    found = [f"{seal.family or 'all'}, {seal.compiler}: {seal.failed or seal.library}" for seal in seals]
    return list(dict.fromkeys(found))


def parts(folder: Path) -> list[str]:
    """The entries of a cache folder, with sizes."""
    if not folder.is_dir():
        return []
    return [f"{path.name}: {size(path):,} bytes" for path in sorted(folder.iterdir())]


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(p.stat().st_size for p in (path, *path.rglob("*")) if p.is_file())
