"""Settings of benchmarks: fields of a dataclass, each of which is a flag of the command."""

from dataclasses import field
from typing import Any


def option(default: Any, what: str, kind: str = "size", *, metavar: str = "") -> Any:
    """Declare a field of a benchmark's settings, and its flag.

    Args:
        default: the value without the flag. A flag of one that is True is ``--no-NAME``.
        what: the help.
        kind: of an int ``size``, ``length``, ``rounds`` or ``count`` (from 0); of a float the unit in which it is a
            limit, ``seconds`` or ``MB``; of numbers separated by commas ``sizes``, or ``optional`` where 0 stands for
            none; of several texts ``words`` with commas, ``specs`` with semicolons, or ``positional``.
        metavar: stands for the value in the help.
    """
    return field(default=default, metadata={"help": what, "kind": kind, "metavar": metavar})


def length(default: int, what: str = "length in tokens") -> Any:
    """A number of tokens."""
    return option(default, what, "length")


def lengths(*default: int) -> Any:
    """Numbers of tokens."""
    return option(default, "lengths in tokens", "sizes")


def rounds(default: int, what: str = "samples per candidate") -> Any:
    """How often each candidate is measured."""
    return option(default, what, "rounds")


def limit(default: float, what: str = "calls", unit: str = "seconds") -> Any:
    """A limit for what is measured at all."""
    return option(default, f"skip {what} expected to take more than X {unit}", unit)
