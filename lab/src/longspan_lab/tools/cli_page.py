"""Generate docs/reference/cli.md, the reference of the command line, from its parsers."""

import argparse
import os
import re
from collections.abc import Iterable, Iterator

from longspan.cli.entry import COMMANDS, OPTIONS, load
from longspan.cli.parser import METAVARS, Parser, default_of, kebab
from longspan.cli.train import CONFIG_CLASSES
from longspan.cli.train import parser_of as train

from ..cli.bench import BENCHMARKS
from ..cli.bench import subparser as bench
from ..cli.reproduce import subparser as reproduce
from ..experiments import EXPERIMENTS
from . import DOCS

HEAD = """# Command line

`longspan` has the commands below. `longspan COMMAND --help` prints the options of a command. Options are accepted with
hyphens and with underscores. The exit code is 0 after success, 1 if a check or an experiment failed, 2 after an error
in the arguments, and 128 + N after signal N.
"""


def page() -> str:
    """The page as Markdown: a section for each command with usage, arguments and examples."""
    # The usage depends on the width of the terminal.
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "90"
    try:
        return "\n\n".join([HEAD.strip(), *_sections()]) + "\n"
    finally:
        os.environ.pop("COLUMNS") if before is None else os.environ.update(COLUMNS=before)


def _sections() -> Iterator[str]:
    yield _table(
        ("command", "purpose"),
        ((f"[`longspan {name}`](#longspan-{name})", does) for name, (_, does) in COMMANDS.items()),
    )
    yield "Options of `longspan` itself, or of every command:"
    yield _table(("option", "meaning"), ((f"`{name}`", does) for name, does in OPTIONS.items()))
    for name in COMMANDS:
        yield f"(longspan-{name})=\n## longspan {name}"
        if name == "train":
            yield from _train()
            continue
        yield from _command(load(name).parser())
        for kind in BENCHMARKS if name == "bench" else ():
            yield f"### longspan bench {kind}"
            yield from _command(bench(kind), BENCHMARKS[kind].about)
        for experiment in EXPERIMENTS if name == "reproduce" else ():
            yield f"### longspan reproduce {experiment}"
            yield from _command(reproduce(experiment), EXPERIMENTS[experiment].about)


def _command(parser: Parser, about: str = "") -> Iterator[str]:
    """The description, usage, arguments and examples of a command; ``about`` replaces the description."""
    yield f"{about[0].upper()}{about[1:]}." if about else _prose(parser.about)
    yield f"```text\n{kebab_usage(parser)}\n```"
    yield _arguments(parser._actions)
    yield _examples(parser)


def _train() -> Iterator[str]:
    """``train`` has the fields of a model and of a run as flags; each kind of model has a table."""
    parsers = {kind: train(kind) for kind in CONFIG_CLASSES}
    first = parsers["decoder"]
    yield _prose(first.about)
    yield "```text\nusage: longspan train [--config RECIPE] [--resume] [--print-config] [--model.FIELD VALUE] " + (
        "[--run.FIELD VALUE]\n```"
    )
    yield _arguments(action for action in first._actions if "." not in action.dest or action.dest == "model.kind")
    yield _examples(first)
    yield "### Fields of a run"
    yield _arguments(action for action in first._actions if action.dest.startswith("run."))
    for kind, parser in parsers.items():
        yield f"### Fields of a model of kind {kind}"
        yield _arguments(
            action for action in parser._actions if action.dest.startswith("model.") and action.dest != "model.kind"
        )


def kebab_usage(parser: Parser) -> str:
    """The usage, with hyphens in options."""
    return parser.format_help().partition("\n\n")[0]


def _arguments(actions: Iterable[argparse.Action]) -> str:
    rows = []
    for action in actions:
        if action.dest == "help" or action.help is argparse.SUPPRESS:
            continue
        # ``--model FILE`` and ``--run FILE`` read one section of a recipe, which --config does better.
        if action.option_strings in (["--model"], ["--run"]):
            continue
        flag = kebab(action.option_strings[-1]) if action.option_strings else ""
        value = "" if action.nargs == 0 or action.dest == "print_config" else _value(action)
        text = "print the resulting recipe as YAML and exit" if action.dest == "print_config" else action.help or ""
        default = default_of(action)
        rows.append((f"`{' '.join(filter(None, (flag, value)))}`", f"`{default}`" if default else "", _cell(text)))
    return _table(("argument", "default", "meaning"), rows)


def _value(action: argparse.Action) -> str:
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if not metavar:
        kind = getattr(action, "_typehint", None) or action.type
        metavar = "true|false" if kind is bool else METAVARS.get(kind) or kebab(action.dest.rpartition(".")[2]).upper()
    return {"*": f"[{metavar} ...]", "+": f"{metavar} ...", "?": f"[{metavar}]"}.get(str(action.nargs), metavar)


def _examples(parser: Parser) -> str:
    return "```sh\n" + "\n".join(parser.examples) + "\n```"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    rows = list(rows)
    if not rows:
        return "It has no arguments."
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in lines)


def _prose(text: str) -> str:
    """The description: flags as code, indented lines as a list."""
    return "\n".join(f"* {_cell(line)}" if line.startswith("  ") else _cell(line) for line in text.split("\n"))


def _cell(text: str) -> str:
    """Text on one line in which Markdown has no special characters, apart from the flags, which are code."""
    text = " ".join(text.split())
    text = re.sub(r"([_*<>$\[\]](?! ))", r"\\\1", text)
    return re.sub(r"(?<![\w`-])(--[a-z][\w.-]*\w)", r"`\1`", text)


PAGES = {DOCS / "reference" / "cli.md": page}
