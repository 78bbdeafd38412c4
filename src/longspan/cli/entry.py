"""The command line: runs a command, and turns an error into one line and an exit code.

Commands of longspan-lab join by entry points of the group ``longspan.commands``: the name of a command, and the
module that has its ``parser()`` and ``run(args)``.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Collection, Sequence
from types import ModuleType
from typing import Any

from .._utils import signals, terminal
from .._utils.optional_deps import install
from .._utils.spec import known

GROUP = "longspan.commands"
LAB = "longspan_lab"
# command -> (module in cli/, or LAB, summary)
COMMANDS = {
    "demo": (LAB, "Train linear and softmax attention on digits and compare them."),
    "tokenize": ("tokenize", "Encode texts as tokens on disk, for training."),
    "train": ("train", "Train a model from a recipe or from flags."),
    "finetune": ("finetune", "Adapt a trained model to texts, pairs or chats."),
    "linearize": ("linearize", "Turn a model with softmax attention into a linear or hybrid one."),
    "eval": ("evaluate", "Evaluate a trained model: bits per token, exact match or accuracy."),
    "generate": ("generate", "Generate images, text or target sequences from a trained model."),
    "chat": ("chat", "Talk with a model in the terminal."),
    "serve": ("serve", "Serve a trained decoder over HTTP, many streams at a time."),
    "transcribe": ("transcribe", "Transcribe recordings of speech, offline or streaming."),
    "consolidate": ("consolidate", "Gather the weights of a sharded training run into one file."),
    "export": ("export", "Export a trained decoder to ONNX (prefill and decode step)."),
    "list": ("listing", "List the mechanisms with their cost, forms and paper."),
    "show": ("show", "Show one mechanism, pattern, training run or saved model."),
    "compare": (LAB, "Compare training runs in a table and plot their curves."),
    "cite": ("cite", "Print BibTeX for the papers behind a spec or a trained model."),
    "bench": (LAB, "Measure time and memory on this machine."),
    "reproduce": (LAB, "Reproduce published results at laptop scale."),
    "doctor": ("doctor", "Report versions, backends, native kernels and caches."),
    "check": ("check", "Run the conformance checks on an attention or a stack."),
}

# Options that every command accepts -> meaning.
OPTIONS = {
    "COMMAND --help": "print the options of a command and examples",
    "--version": "print the version",
    "COMMAND --debug": "print the traceback of an error",
    "COMMAND --import MODULE": "load mechanisms from a module or package",
}

OK, FAILED, WRONG, PIPE_CLOSED = 0, 1, 2, 141
SIGNAL = 128  # plus the number of the signal that ended the command
INTERRUPTED = SIGNAL + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after ``longspan``, such as ``["list"]``. None: the arguments of this process.

    Returns:
        The exit code. 0: success. 1: a check failed, an experiment failed, or a library ended the process. 2: a user or
        system error, which is printed as one line on stderr (``--debug`` adds the traceback). 128 + N: ended by signal
        N, so 130 after Ctrl-C and 143 after SIGTERM. 141: the reader of the output closed the pipe.

    Example:

    >>> main(["--version"])  # doctest: +ELLIPSIS
    longspan ...
    0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words, modules = _imports([word for word in words if word != "--debug"])
    try:
        with signals.raised(), warnings.catch_warnings():
            # Python's parser may warn about a spec, in addition to our error message.
            warnings.simplefilter("ignore", SyntaxWarning)
            code = _run(words, modules)
            sys.stdout.flush()
        return code
    except SystemExit as exit_:
        # --help and --print_config have returned, so a library ended the process, which is not a success.
        code = exit_.code if isinstance(exit_.code, int) and exit_.code else FAILED
        return _fail(f"error: a library ended the command: {exit_!r}", code, debug)
    except KeyboardInterrupt as error:
        if argv is None:
            # A second Ctrl-C during exit would print a traceback over this message.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return _fail(str(error) or "interrupted", SIGNAL + signals.number(error), debug)
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except ImportError as error:
        # Only a missing extra is a user error; its message names what to install.
        if "pip install" not in str(error):
            raise
        return _fail(f"error: {error}", WRONG, debug)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else "standard output: " if _drop_output() else ""
        return _fail(f"error: {where}{error.strerror or error}", WRONG, debug)
    except ValueError as error:
        return _fail(f"error: {error}", WRONG, debug)


def _drop_output() -> bool:
    """Redirect a broken stdout to the null device, so that Python's flush at exit does not fail."""
    try:
        # A line, since without a buffer there is nothing to flush.
        print(flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            stdout = sys.stdout.fileno()
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), stdout)
        return True
    return False


def _imports(words: list[str]) -> tuple[list[str], list[str]]:
    """Split the words into those without ``--import MODULE`` or ``--import=MODULE``, and the modules."""
    kept, modules = [], []
    line = iter(words)
    for word in line:
        name, equals, value = word.partition("=")
        if word == "--":
            kept += [word, *line]
        elif name == "--import":
            modules.append(value if equals else next(line, ""))
        else:
            kept.append(word)
    return kept, modules


def _run(words: list[str], modules: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return OK
    if words[0] == "--version":
        print(f"longspan {importlib.metadata.version('longspan')}")
        return OK
    if words[0].startswith("-"):
        raise ValueError(
            f"unknown option {words[0]!r}; known: --debug, --help, --import, --version; see longspan --help"
        )
    name = known(words[0], COMMANDS, "command")
    if any("\0" in word for word in words):
        raise ValueError("an argument contains a NUL character, which file names and numbers cannot contain")
    command: Any = load(name)
    if modules:
        from ..attention import plugins

        plugins.bring(*modules)
    try:
        args = command.parser().read(words[1:])
    except SystemExit:
        # --help and --print_config have printed their output and exit; mistakes raise ValueError.
        return OK
    try:
        return command.run(args)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        size = re.search(r"(?:tried to allocate|Unable to allocate) ([\d.]+ \w+)", str(error))
        reduce = getattr(command, "MEMORY", "")
        raise ValueError(
            f"out of memory{f' while allocating {size[1]}' if size else ''}{f'; reduce {reduce}' if reduce else ''}"
        ) from error


def load(name: str) -> ModuleType:
    """Import the module of a command, so that each command pays only for its own imports.

    Raises ImportError, with the line that installs it, for a command of longspan-lab where that is not installed.
    """
    module, _ = COMMANDS[name]
    if module != LAB:
        return importlib.import_module(f".{module}", __package__)
    for point in importlib.metadata.entry_points(group=GROUP, name=name):
        return point.load()
    raise ImportError(f"longspan {name} is a command of longspan-lab; {install('lab')}", name=LAB)


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed. On the CPU PyTorch raises a plain RuntimeError, so its text decides."""
    words = (
        "DefaultCPUAllocator",
        "can't allocate memory",
        "out of memory",
        "bad_alloc",
        "Storage size calculation",
    )
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _help() -> str:
    options = [line for name, does in OPTIONS.items() for line in terminal.entry(f"  {name}", [does], 30)]
    lab = {name for name, (module, _) in COMMANDS.items() if module == LAB}
    # A look-up of the entry points would take longer than all of this.
    if importlib.util.find_spec(LAB):
        lists = ["commands:", *_rows(COMMANDS)]
    else:
        title = f"commands of longspan-lab, which is not installed ({install('lab')}):"
        lists = ["commands:", *_rows(COMMANDS.keys() - lab), "", *terminal.wrapped(title, 0), *_rows(lab)]
    return "\n".join(
        (
            "usage: longspan COMMAND [options]",
            "",
            "Efficient attention for PyTorch: train as a transformer, run as an RNN.",
            "",
            *lists,
            "",
            "options:",
            *options,
        )
    )


def _rows(names: Collection[str]) -> list[str]:
    """Lines with these commands, in the order of ``COMMANDS``, and their summaries."""
    indent = max(map(len, COMMANDS)) + 4
    return [
        line
        for name, (_, does) in COMMANDS.items()
        if name in names
        for line in terminal.entry(f"  {name}", [does.rstrip(".")], indent)
    ]


def _fail(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    # After SIGHUP the terminal is closed.
    with contextlib.suppress(OSError):
        print(f"longspan: {' '.join(text.split())}", file=sys.stderr)
    return code
