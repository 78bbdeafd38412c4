"""Mutated command lines of every ``longspan`` command: a documented exit code, and one line on stderr if it is wrong.

Words that are missing, doubled, misspelt, of another type, beyond all sizes, no Unicode. What could start long work has
an invalid word or --help; ``show``, ``cite`` and ``list`` run as they are.
"""

import contextlib
import functools
import io
import os
import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from longspan._utils import model_memory
from longspan.cli import entry
from longspan.cli.parser import Parser
from longspan_lab.cli import bench, reproduce
from longspan_lab.experiments import EXPERIMENTS

from . import Case
from ._bounds import bounded, complaint

SHORT, LONG = 60, 3_000
SECONDS, GIB = 20.0, 1.0
DOCUMENTED = (entry.OK, 1, entry.WRONG, entry.INTERRUPTED, entry.PIPE_CLOSED)
VALUES = (
    *("", " ", "x", "-1", "0", "1.5", "nan", "inf", "1e999", "99999999999999999999999", "-9223372036854775809", "[]"),
    *("{}", "null", "true", "\0", "\udcff", "\u2028", "\U0001f600", "../..", "/", "a" * 3000, "(" * 3000, "1,,2"),
    *("1,-2",),
    *("linaer", "linear(", "linear(eps=())", "star(cycles=2147483648)", ";", "--", "---", "-", "=", "--=", "-h=1"),
)
QUICK = ("show", "cite", "list")
# No command serves any of these, wherever it stands.
POISON = ("--no-such-option", "--no-such-option=1", "--=x", "--\udcff", "--\0=1")


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    draw = random.Random(seed)
    parsers = _parsers()
    for i in range(count):
        words = _words(draw, parsers)
        yield f"{i} {words!r}"[:200], functools.partial(_run, words, folder)


def _parsers() -> dict[tuple[str, ...], Parser]:
    found = {("bench", name): bench.subparser(name) for name in bench.BENCHMARKS}
    found |= {("reproduce", name): reproduce.subparser(name) for name in EXPERIMENTS}
    return found | {(name,): entry.load(name).parser() for name in entry.COMMANDS}


def _words(draw: random.Random, parsers: dict[tuple[str, ...], Parser]) -> list[str]:
    start = draw.choice(list(parsers))
    options = [option for option in parsers[start]._option_string_actions if option not in ("-h", "--help")]
    words = []
    for _ in range(draw.randint(0, 4)):
        value, option = draw.choice(VALUES), draw.choice(options or ["--x"])
        words += draw.choice(([f"{option}={value}"], [option, value], [option], [value], [option, option]))
    words = [word for word in words if word != "--"]
    numbers = [a.option_strings[0] for a in parsers[start]._actions if type(a.default) is int and a.option_strings]
    if start[0] not in QUICK:
        # What is no number is found when all before it has been read.
        words.append(
            f"{draw.choice(numbers)}=x" if numbers and draw.random() < 0.7 else draw.choice((*POISON, "--help"))
        )
    elif draw.random() < 0.2:
        words.insert(draw.randint(0, len(words)), draw.choice(POISON))
    line = [*start, *words]
    match draw.randrange(12):
        case 0:
            line[0] = draw.choice(VALUES)
        case 1:
            line[0] = line[0][:-1] + draw.choice("aex\0")
        case 2:
            line.insert(0, draw.choice(("--debug", "--version", "--help", "-x", "")))
        case 3:
            line = line[: draw.randint(0, 1)]
            # Alone they would begin their work.
            line += ["--help"] if line in (["demo"], ["train"]) else []
    return line


def _run(words: list[str], folder: Path) -> str | None:
    out, err, before = io.StringIO(), io.StringIO(), Path.cwd()
    try:
        os.chdir(folder)
        with bounded(SECONDS, GIB), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            with mock.patch.object(model_memory, "memory", return_value=1 << 28):
                code = entry.main(words)
    except Exception as error:
        return complaint(error) or f"a ValueError came through: {error}"
    finally:
        os.chdir(before)
    said = err.getvalue()
    if code not in DOCUMENTED:
        return f"exit code {code}"
    if code == entry.WRONG and "--debug" not in words and (said.count("\n") != 1 or len(said) > 3500):
        return f"{said.count(chr(10))} lines and {len(said)} characters on stderr: {said[:300]!r}"
    if code == entry.OK and said:
        return f"exit code 0 and {said[:200]!r}"
    if words[:1] != ["show"] and any(folder.iterdir()):
        return f"it left {sorted(path.name for path in folder.iterdir())}"
    return None
