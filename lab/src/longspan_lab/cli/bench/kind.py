"""The interface of a benchmark, and parsing of lists of numbers."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from longspan.cli.parser import Parser

DIGITS = 9  # largest number of digits of a number in a list


class Benchmark(NamedTuple):
    """A kind of benchmark: summary, examples, flags and measurement."""

    about: str
    examples: tuple[str, ...]
    options: Callable[[Parser], None]
    measure: Callable[[Any], tuple[Generator[dict, None, None], Callable[[dict], list]]]
    """returns a generator, which measures and yields the growing results, and a function from a result to tables"""


def numbers(args: Any, name: str) -> tuple[int, ...]:
    """Parse numbers separated by commas; return each once, ascending. Raises ValueError for anything else."""
    text = getattr(args, name)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= DIGITS and int(word) for word in words):
        raise ValueError(
            f"--{name}={text}: expected positive integers of at most {DIGITS} digits, separated by commas, such as "
            "1,64,1024"
        )
    return tuple(sorted({int(word) for word in words}))


def seconds(args: Any) -> float:
    """The value of --limit in seconds. Raises ValueError unless it is positive."""
    if not args.limit > 0:
        raise ValueError(f"--limit={args.limit} must be a positive number of seconds")
    return args.limit
