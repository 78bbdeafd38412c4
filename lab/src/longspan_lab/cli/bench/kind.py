"""The interface of a benchmark: its flags and its run, both from the settings of its module."""

import contextlib
import importlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, fields
from typing import Any

from longspan._utils.spec import split
from longspan.cli.parser import LONG, MOST, ROUNDS, Parser, kebab, natural_int, number, positive_int

DIGITS = 9  # largest number of digits of a number in a list
NUMBERS = {"size": positive_int(MOST), "length": positive_int(), "rounds": positive_int(ROUNDS), "count": natural_int()}
Measured = tuple[Generator[dict, None, None], Callable[[dict], list]]
"""a generator, which measures and yields the growing results, and a function from a result to tables"""


@dataclass(frozen=True)
class Benchmark:
    """A kind of benchmark: a module of ``longspan_lab.bench`` with ``Options``, ``run`` and ``text``."""

    name: str
    about: str
    examples: tuple[str, ...]

    @property
    def module(self) -> Any:
        """The module."""
        return importlib.import_module(f"...bench.{self.name}", __package__)

    def options(self, parser: Parser) -> None:
        """Add the flags."""
        add_flags(parser, self.module.Options)

    def measure(self, args: Any) -> Measured:
        """Return the results, as they grow, and the function that shows them."""
        from longspan._utils.progress import track

        module = self.module
        options = module.Options(**values(args, module.Options))
        if not hasattr(module, "weigher"):
            return module.run(options, track), module.text

        def results() -> Generator[dict, None, None]:
            with contextlib.closing(module.weigher()) as weigher:
                yield from module.run(options, weigher, track)

        return results(), module.text


def _options(kind: type) -> dict[str, tuple[Any, Any]]:
    """Name -> default and metadata of the fields that are flags."""
    return {one.name: (one.default, one.metadata) for one in fields(kind) if one.metadata}


def add_flags(parser: Parser, kind: type) -> None:
    """Add a flag for each ``option`` of a dataclass."""
    for name, (default, option) in _options(kind).items():
        what = {"help": option["help"]} | ({"metavar": option["metavar"]} if option["metavar"] else {})
        if option["kind"] == "positional":
            parser.add_argument(name, type=str, nargs="*", **what)
        elif isinstance(default, bool):
            parser.add_argument(f"--{'no-' * default}{name}", action="store_true", **what)
        elif isinstance(default, tuple):
            between = "; " if option["kind"] == "specs" else ","
            what = {"metavar": "N,..."} | what
            parser.add_argument(f"--{name}", type=str, default=between.join(map(str, default)), **what)
        else:
            kinds = {int: NUMBERS.get(option["kind"]), float: number(LONG), str: str}
            parser.add_argument(f"--{kebab(name)}", type=kinds[type(default)], default=default, **what)


def values(args: Any, kind: type) -> dict[str, Any]:
    """Return the values of the flags that ``add_flags`` has added. Raises ValueError for one out of range."""
    return {name: _value(args, name, *about) for name, about in _options(kind).items()}


def _value(args: Any, name: str, default: Any, option: Any) -> Any:
    if isinstance(default, bool):
        return args[name] if not default else not args[f"no_{name}"]
    value, kind = args[name], option["kind"]
    if isinstance(default, float) and not value > 0:
        raise ValueError(f"--{name}={value} must be a positive number of {kind}")
    if not isinstance(default, tuple):
        return value
    if kind == "positional":
        return tuple(value) or default
    if kind == "specs":
        return tuple(split(value)) if value or default else ()
    if kind == "words":
        return tuple(value.split(","))
    return () if kind == "optional" and value == "0" else numbers(args, name)


def numbers(args: Any, name: str) -> tuple[int, ...]:
    """Parse numbers separated by commas; return each once, ascending. Raises ValueError for anything else."""
    text = args[name]
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= DIGITS and int(word) for word in words):
        raise ValueError(
            f"--{name}={text}: expected positive integers of at most {DIGITS} digits, separated by commas, such as "
            "1,64,1024"
        )
    return tuple(sorted({int(word) for word in words}))
