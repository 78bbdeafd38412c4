"""What one kind of benchmark is to the command, and how the numbers on its line are read."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from ..parser import Parser

DIGITS = 9  # of a number in a list


class Benchmark(NamedTuple):
    """One of the benchmarks."""

    about: str
    examples: tuple[str, ...]
    options: Callable[[Parser], None]
    measure: Callable[[Any], tuple[Generator[dict, None, None], Callable[[dict], list]]]
    """-> results, as they grow, which are measured while they are asked for; and their tables"""


def numbers(args: Any, name: str) -> tuple[int, ...]:
    """Numbers separated by commas, each once, in order. Raises ValueError for anything else."""
    text = getattr(args, name)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= DIGITS and int(word) for word in words):
        raise ValueError(
            f"--{name}={text}: expected whole numbers from 1 on, separated by commas, of at most {DIGITS} digits: "
            "1,64,1024"
        )
    return tuple(sorted({int(word) for word in words}))


def seconds(args: Any) -> float:
    """The value of --limit. Raises ValueError unless it is positive."""
    if not args.limit > 0:
        raise ValueError(f"--limit={args.limit} must be a positive number of seconds")
    return args.limit
