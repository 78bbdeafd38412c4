"""Parsers whose errors are one line, and which name the known options where an unknown one comes."""

import argparse
import re
import textwrap
from typing import Any, NoReturn

import jsonargparse

from ..spec import known

LONGEST = 400  # characters of a message


class _Formatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows types and defaults, and leaves the examples' lines as they are."""


class Parser(jsonargparse.ArgumentParser):
    """An argument parser that raises ValueError, with one line, instead of printing its usage and leaving."""

    def read(self, words: list[str]) -> jsonargparse.Namespace:
        """Parse the words of a command line. Raises ValueError for what cannot be read; --help raises SystemExit."""
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
                words[place] = options[known(kebab(name), near, "option")] + equals + value
        return self.parse_args(words)

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


def positive(args: Any, *names: str) -> None:
    """Raise ValueError unless each of these options is at least 1."""
    for name in names:
        if getattr(args, name) < 1:
            raise ValueError(f"--{kebab(name)}={getattr(args, name)} must be at least 1")
