"""Parsers whose errors are one line, and which name the known options where an unknown one comes."""

import argparse
import functools
import math
import re
import textwrap
from typing import Any, NamedTuple, NoReturn

import jsonargparse

from .._utils.aliases import suggestion
from .._utils.spec import known
from .._utils.typecheck import format_value

LONGEST = 400  # characters of a message
FEW = 30  # options that a message lists beside a guess
MANY = 10**9  # the largest count of steps, tokens or samples that an option accepts
MOST = 1_000_000  # the largest size of a model or an operand that an option accepts
BEAMS = 100_000  # the most sequences that a search follows
ROUNDS = 100_000  # the most samples of a measurement
LONG = 1e9  # the largest number of seconds, or of MB
HUGE = 1e19  # the largest number of any other kind
SEEDS = 2**63 - 1  # the largest seed: torch's generators take 64 bits


class Number(NamedTuple):
    """The type of a numeric option: ``int`` or ``float``, and the least and the largest value that it accepts."""

    kind: type
    low: float
    high: float

    def check(self, option: str, value: Any) -> None:
        """Raise ValueError where the value lies outside, with the bound that it misses; NaN lies outside.

        None stands for an option that is not given.
        """
        if value is None or self.low <= value <= self.high:
            return
        if math.isnan(value):
            wrong = f"must be a number from {self.low} to {self.high}"
        elif value > self.high:
            wrong = f"must be at most {self.high:g}" if self.kind is float else f"must be at most {self.high}"
        else:
            wrong = "must not be negative" if self.low == 0 else f"must be at least {self.low}"
        raise ValueError(f"{option}={format_value(value)} {wrong}")


def positive_int(high: int = MANY) -> Number:
    """A whole number from 1 to ``high``."""
    return Number(int, 1, high)


def natural_int(high: int = MANY) -> Number:
    """A whole number from 0 to ``high``."""
    return Number(int, 0, high)


def number(high: float) -> Number:
    """A number from 0 to ``high``."""
    return Number(float, 0.0, high)


class _Formatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows types and defaults, and leaves the examples' lines as they are."""


class Parser(jsonargparse.ArgumentParser):
    """An argument parser that raises ValueError, with one line, instead of printing its usage and leaving."""

    def add_argument(self, *names: str, type: Any = None, **options: Any) -> Any:
        """As in ``argparse``; ``type`` may be a ``Number``, whose bounds ``read`` checks."""
        if isinstance(type, Number):
            action: Any = super().add_argument(*names, type=type.kind, **options)
            self.numbers[action.dest] = type
            return action
        return super().add_argument(*names, **options if type is None else {**options, "type": type})

    @functools.cached_property
    def numbers(self) -> dict[str, Number]:
        """The numeric options, by the names of their values."""
        return {}

    def read(self, words: list[str]) -> jsonargparse.Namespace:
        """Parse the words of a command line.

        Raises ValueError for what cannot be read and for numbers out of bounds; --help raises SystemExit.
        """
        options = {kebab(option): option for option in self._option_string_actions if option.startswith("--")}
        words = list(words)
        for place, word in enumerate(words):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                # A recipe has some forty fields; those of the same group are enough to find the right one.
                group = name.partition(".")[0] + "."
                near = {option: None for option in options if option.startswith(group)} or options
                words[place] = options[self._known(kebab(name), near)] + equals + value
        args = self.parse_args(words)
        for name, kind in self.numbers.items():
            kind.check(f"--{kebab(name)}", args[name])
        return args

    def _known(self, name: str, options: dict[str, Any]) -> str:
        """``spec.known``, without the list where there is a guess and the list would fill lines."""
        guess = suggestion(name, options)
        if name not in options and guess and len(options) > FEW:
            raise ValueError(f"unknown option {format_value(name)} (did you mean {guess!r}?); see {self.prog} --help")
        return known(name, options, "option")

    def format_help(self) -> str:
        """The help, with options as they are best typed: fields are named as in a recipe, with underscores."""
        return re.sub(r"(?<![\w-])--[a-z][\w.-]*", lambda option: kebab(option[0]), super().format_help())

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ValueError with the message on one line."""
        message = re.sub(r'[Pp]arser key "([^"]*)":', lambda key: f"--{kebab(key[1])}:", " ".join(message.split()))
        message = re.sub(r"Expected an? <class '(\w+)'>\. Got value: ", r"expected \1, got ", message)
        # What came may be of any length; its beginning and the message's end say what is wrong.
        message = message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} ... {message[-LONGEST // 4 :]}"
        raise ValueError(f"{message}; see {self.prog} --help") from ex


def make(command: str, description: str, *examples: str, cls: type[Parser] = Parser) -> Parser:
    """A parser for ``longspan COMMAND``, with examples under its help."""
    lines = "\n".join(f"  {example}" for example in examples)
    return cls(
        prog=f"longspan {command}",
        description=textwrap.fill(description, 100),
        epilog=f"examples:\n{lines}\n\n--debug, anywhere on the line, shows the traceback of an error;\n"
        "--import MODULE, as often as need be, loads mechanisms that a module or package of your own registers.",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )


def kebab(option: str) -> str:
    """``--run.save-every`` for ``--run.save_every``: the spelling of options; the other one is understood, too."""
    return option.replace("_", "-")
