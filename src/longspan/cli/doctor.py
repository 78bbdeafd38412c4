"""``longspan doctor``: what runs on this machine and why, and what the caches hold."""

import importlib.metadata
import shutil
import time
from pathlib import Path

from .parser import Parser, make

COLUMN = 16  # where values begin
WIDTH, REPEATED = 256, 3  # of the products that are timed: milliseconds even where they are slow
SLOW = 1.5  # times as long as in float32, from which on half the memory is not worth it


def parser() -> Parser:
    parser = make(
        "doctor",
        "Tell what runs on this machine and why: versions, devices, the native CPU kernels by family (those of the "
        "installation, else compiled now if need be), optional packages, and the cache folder, which the environment "
        "variable LONGSPAN_CACHE can move.",
        "longspan doctor",
        "longspan doctor --clear",
    )
    parser.add_argument(
        "--clear",
        action="store_true",
        help="delete the kernels compiled here, and what is remembered of failures; data sets stay",
    )
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
        print(f"{name:<{COLUMN}}{value}")
    return 0


def facts(folder: Path) -> dict[str, str]:
    """What to tell, by name."""
    import torch

    from ..bench import guard
    from ..compat.transformers import report
    from . import dispatch

    machine = guard.machine()
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {
        "longspan": importlib.metadata.version("longspan"),
        "torch": f"{machine['torch']}, {machine['threads']} threads",
        "python": str(machine["python"]),
        "machine": f"{machine['processor']}, {machine['cores']} cores, {machine['system']}",
        "accelerator": str(device or "none"),
        "bfloat16": precision(bfloat16_ratio()),
        **dispatch.kernels_facts(),
        "cache": f"{folder} ({', '.join(parts(folder)) or 'empty'})",
        "  compiled": f"\n{'':<{COLUMN}}".join(compiled(folder / "native")) or "nothing",
        "transformers": report.summary(),
        "extras": ", ".join(f"{name}: {state}" for name, state in extras().items()),
    }


def bfloat16_ratio() -> float:
    """How many times as long as in float32 torch takes for a product in bfloat16, on the processor."""
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
    """What such a ratio means for the precision of a model.

    >>> precision(5.83)
    'a product takes 5.8 times as long as in float32: float32 is the better choice here'
    >>> precision(0.412)
    'a product takes 0.41 times as long as in float32'
    """
    told = f"a product takes {ratio:.2g} times as long as in float32"
    return f"{told}: float32 is the better choice here" if ratio > SLOW else told


def extras() -> dict[str, str]:
    """Optional packages: there, or how to get them."""
    from importlib.util import find_spec

    from .._utils.optional_deps import EXTRAS

    return {name: "there" if find_spec(name) else f"pip install longspan[{extra}]" for name, extra in EXTRAS.items()}


def compiled(folder: Path) -> list[str]:
    """Each compilation in a folder of kernels: the family, the compiler, and the library or why it failed."""
    from ..ops.native.build import store

    seals = sorted(store.seals(folder), key=lambda seal: seal.family)
    return [f"{seal.family or 'all'}, {seal.compiler}: {seal.failed or seal.library}" for seal in seals]


def parts(folder: Path) -> list[str]:
    """What a cache holds, with sizes."""
    if not folder.is_dir():
        return []
    return [f"{path.name}: {size(path):,} bytes" for path in sorted(folder.iterdir())]


def size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(p.stat().st_size for p in (path, *path.rglob("*")) if p.is_file())
