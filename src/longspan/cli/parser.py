"""Argument parsers that report a mistake in one line and list the known options for an unknown one."""

import argparse
import functools
import math
import re
from typing import Any, NamedTuple, NoReturn

import jsonargparse

from .._utils import terminal
from .._utils.aliases import suggestion
from .._utils.spec import known
from .._utils.typecheck import format_value
from ..models.sampling import OPTIONS

LONGEST = 400  # characters of a message
FEW = 30  # options that a message lists in addition to a guess
MANY = 10**9  # the largest count of steps, tokens or samples that an option accepts
MOST = 1_000_000  # the largest size of a model or an operand that an option accepts
BEAMS = 100_000  # the largest beam size
ROUNDS = 100_000  # the largest number of samples of a measurement
LONG = 1e9  # the largest number of seconds, or of MB
HUGE = 1e19  # the largest number of any other kind
SEEDS = 2**63 - 1  # the largest seed: torch's generators take 64 bits
MODEL = "MODEL"  # the metavar of a trained model in every command
DRAWS = {option.name: option.default for option in OPTIONS} | {"temperature": None, "seed": 0}  # defaults of sampling


METAVARS = {int: "N", float: "X"}  # of numeric options without a metavar


class Number(NamedTuple):
    """The type of a numeric option, ``int`` or ``float``, and its smallest and largest value."""

    kind: type
    low: float
    high: float

    def check(self, option: str, value: Any) -> None:
        """Raise ValueError, with the bound, if the value is outside it or NaN. None: the option was not given."""
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
    """An integer from 1 to ``high``."""
    return Number(int, 1, high)


def natural_int(high: int = MANY) -> Number:
    """An integer from 0 to ``high``."""
    return Number(int, 0, high)


def number(high: float) -> Number:
    """A number from 0 to ``high``."""
    return Number(float, 0.0, high)


def default_of(action: argparse.Action) -> str:
    """The default of an option as text; "" if it carries no information."""
    if not action.option_strings or action.nargs == 0 or action.default in (None, "", argparse.SUPPRESS):
        return ""
    return str(action.default).lower() if isinstance(action.default, bool) else str(action.default)


class _Formatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Prints defaults that carry information, and keeps the lines of examples."""

    def _get_help_string(self, action: argparse.Action) -> str:
        if action.dest == "help":
            return "print this help and exit"
        if action.dest == "print_config":
            return "print the resulting recipe as YAML and exit"
        default = default_of(action)
        return f"{action.help} (default: {default})" if default else action.help or ""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        # jsonargparse keeps a type in this attribute, argparse in ``type``.
        kind = getattr(action, "_typehint", None) or action.type
        return METAVARS.get(kind) or super()._get_default_metavar_for_optional(action)


class Parser(jsonargparse.ArgumentParser):
    """An argument parser that raises ValueError with one line, instead of printing its usage and exiting."""

    about = ""
    """the description, unwrapped"""
    examples: tuple[str, ...] = ()
    """command lines that show its use"""

    def add_argument(self, *names: str, type: Any = None, **options: Any) -> Any:
        """Add an argument as in ``argparse``. ``type`` may be a ``Number``; ``read`` checks its bounds."""
        if isinstance(type, Number):
            action: Any = super().add_argument(*names, type=type.kind, **options)
            self.numbers[action.dest] = type
            return action
        return super().add_argument(*names, **options if type is None else {**options, "type": type})

    def add_text(self, option: str, metavar: str, help: str, *, default: str = "") -> None:
        """Add an option with a text as its value."""
        self.add_argument(option, type=str, default=default, metavar=metavar, help=help)

    def add_flag(self, option: str, help: str) -> None:
        """Add an option without a value, which is False if it is not given."""
        self.add_argument(option, action="store_true", help=help)

    @functools.cached_property
    def numbers(self) -> dict[str, Number]:
        """The numeric options, by destination."""
        return {}

    def read(self, words: list[str]) -> jsonargparse.Namespace:
        """Parse the words of a command line.

        Raises:
            ValueError: for an unknown option, a value of another type, or a number out of bounds.
            SystemExit: after --help.
        """
        options = {kebab(option): option for option in self._option_string_actions if option.startswith("--")}
        words = list(words)
        for place, word in enumerate(words):
            if word == "--":
                break
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                # A recipe has about forty fields; those of the same group are enough to find the right one.
                group = name.partition(".")[0] + "."
                near = {option: None for option in options if option.startswith(group)} or options
                words[place] = options[self._known(kebab(name), near)] + equals + value
        args = self.parse_args(words)
        for name, kind in self.numbers.items():
            kind.check(f"--{kebab(name)}", args[name])
        return args

    def _known(self, name: str, options: dict[str, Any]) -> str:
        """``spec.known``, without the list if there is a guess and the list is long."""
        guess = suggestion(name, options)
        if name not in options and guess and len(options) > FEW:
            raise ValueError(f"unknown option {format_value(name)} (did you mean {guess!r}?); see {self.prog} --help")
        return known(name, options, "option")

    def format_help(self) -> str:
        """The help, with hyphens in options; a recipe's fields have underscores."""
        return re.sub(r"(?<![\w-])--[a-z][\w.-]*", lambda option: kebab(option[0]), super().format_help())

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise ValueError with the message on one line."""
        message = re.sub(r'[Pp]arser key "([^"]*)":', lambda key: f"--{kebab(key[1])}:", " ".join(message.split()))
        message = re.sub(r"Expected an? <class '(\w+)'>\. Got value: ", r"expected \1, got ", message)
        # Positional arguments are named as in the usage.
        usage = {action.dest: str(action.metavar or action.dest) for action in self._actions}
        message = re.sub(
            r"(?<=required: )[\w, ]+",
            lambda found: ", ".join(usage.get(name, name) for name in found[0].split(", ")),
            message,
        )
        # The value may have any length; the beginning and the end of the message are enough.
        message = message if len(message) <= LONGEST else f"{message[: LONGEST // 2]} ... {message[-LONGEST // 4 :]}"
        raise ValueError(f"{message}; see {self.prog} --help") from ex


def make(command: str, description: str, *examples: str, cls: type[Parser] = Parser) -> Parser:
    """Make the parser of ``longspan COMMAND``.

    Args:
        command: the words after ``longspan``.
        description: paragraphs, separated by blank lines.
        examples: command lines, printed below the options.
        cls: the class of the parser.
    """
    lines = "\n".join(f"  {example}" for example in examples)
    parser = cls(
        prog=f"longspan {command}",
        description=fill(description),
        epilog=f"examples:\n{lines}\n\n{fill(COMMON)}",
        formatter_class=_Formatter,
        allow_abbrev=False,
    )
    parser.examples, parser.about = examples, description
    return parser


COMMON = (
    "--debug prints the traceback of an error. --import MODULE loads mechanisms from a module or package; it can be "
    "repeated. Both can stand anywhere on the line."
)


def fill(text: str) -> str:
    """Wrap each line of a text to the terminal; what continues an indented line is indented further."""
    lines: list[str] = []
    for line in text.split("\n"):
        indent = len(line) - len(line.lstrip())
        lines += terminal.wrapped(line.strip(), indent + 2 * bool(indent), first=" " * indent) or [""]
    return "\n".join(lines)


def model_help(names: str = "") -> str:
    """The help of a MODEL argument; ``names``: the pretrained models that the command accepts."""
    if not names:
        return "a run directory or a checkpoint directory"
    return f"a run directory, a checkpoint directory, or a pretrained model ({names})"


def kebab(option: str) -> str:
    """An option with hyphens: ``--run.save-every`` for ``--run.save_every``. Both spellings are accepted."""
    return option.replace("_", "-")


def add_sampling_options(parser: Parser) -> None:
    """Add the options of ``Sampling``. The temperature's default depends on the model."""
    for one in OPTIONS:
        default = DRAWS[one.name]
        text = one.description if default is not None else f"{one.description}. By default 1, and 0 for a target"
        # Sampling itself refuses numbers between 0 and its lower bound, and says why.
        parser.add_argument(f"--{one.name}", type=Number(one.kind, 0, one.high), default=default, help=text)


def sampling_options(args: Any, temperature: float, seed: int) -> dict[str, Any]:
    """Return the options of ``Sampling``, with this temperature where none is given."""
    given = {name: getattr(args, name) for name in DRAWS}
    return given | {"seed": seed, "temperature": temperature if args.temperature is None else args.temperature}


def add_adapter_option(parser: Parser) -> None:
    """Add the option of an adapter."""
    parser.add_text(
        "--adapter",
        "ADAPTER",
        "what longspan finetune has written for this model: a state adapter, or the folder of an adapter of peft, "
        "whose changes are added to the weights",
    )
