"""The command line: finds the command, and turns what goes wrong into one line and an exit code."""

import contextlib
import importlib
import importlib.metadata
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Sequence

from .._utils import signals
from .._utils.spec import known

# command -> (module in cli/, what it does)
COMMANDS = {
    "demo": ("demo", "train linear and softmax attention on images of digits, and compare how fast they generate"),
    "train": ("train", "train a model from a recipe or from flags"),
    "eval": ("evaluate", "bits per dimension, byte or token of a trained model, and exact targets"),
    "generate": ("generate", "pictures, text or targets of sources from a trained model"),
    "transcribe": ("transcribe", "the words of recordings, whole or while they are read"),
    "export": ("export", "a trained model as an ONNX file: prefill and step in one graph"),
    "list": ("listing", "the mechanisms that there are"),
    "show": ("show", "one mechanism: options, parameters, FLOPs, state, backend; or a training run"),
    "compare": ("compare", "training runs side by side: a table, and curves in one picture"),
    "cite": ("cite", "BibTeX of the papers behind a spec or a trained model"),
    "bench": ("bench", "time and memory, beside other libraries and against the machine's limits"),
    "reproduce": ("reproduce", "reproduce published results at laptop scale"),
    "doctor": ("doctor", "what runs here and why: backends, kernels, caches"),
    "check": ("check", "measure the laws that every attention keeps"),
}

OK, FAILED, WRONG, PIPE_CLOSED = 0, 1, 2, 141
SIGNAL = 128  # and the number of the signal that ended the command
INTERRUPTED = SIGNAL + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: ``main(["list"])``; ``None`` reads the process's own arguments.

    -> exit code: 0 done; 1 a law of ``check`` failed, or a library left by itself; 2 a mistake of the caller or of the
    system, said in one line on stderr; 128 and the number of the signal that ended it: 130 after Ctrl-C, 143 after
    SIGTERM; 141 where nobody reads the output any more. ``--debug`` shows the traceback as well.

    >>> main(["--version"])  # doctest: +ELLIPSIS
    longspan ...
    0
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words, modules = _imports([word for word in words if word != "--debug"])
    try:
        with signals.raised(), warnings.catch_warnings():
            # Python's parser has its own opinion of a spec, beside the line that refuses it.
            warnings.simplefilter("ignore", SyntaxWarning)
            code = _run(words, modules)
            sys.stdout.flush()
        return code
    except SystemExit as exit_:
        # --help and --print_config have returned, so somebody else wants to leave, which is no success.
        code = exit_.code if isinstance(exit_.code, int) and exit_.code else FAILED
        return _say(f"error: a library ended the command: {exit_!r}", code, debug)
    except KeyboardInterrupt as error:
        if argv is None:
            # What Python would print if another one came on the way out would hide what is said now.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        return _say(str(error) or "interrupted", SIGNAL + signals.number(error), debug)
    except BrokenPipeError:
        _drop_output()
        return PIPE_CLOSED
    except ImportError as error:
        # Only a missing extra is the caller's; it says what to install.
        if "pip install" not in str(error):
            raise
        return _say(f"error: {error}", WRONG, debug)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else "standard output: " if _drop_output() else ""
        return _say(f"error: {where}{error.strerror or error}", WRONG, debug)
    except ValueError as error:
        return _say(f"error: {error}", WRONG, debug)


def _drop_output() -> bool:
    """Where stdout takes no more, let it go where nobody reads: Python would complain when it flushes it at its end."""
    try:
        # A line, since without a buffer there would be nothing to flush.
        print(flush=True)
    except OSError:
        with contextlib.suppress(OSError, ValueError):
            stdout = sys.stdout.fileno()
            with open(os.devnull, "wb") as nobody:
                os.dup2(nobody.fileno(), stdout)
        return True
    return False


def _imports(words: list[str]) -> tuple[list[str], list[str]]:
    """The words without every ``--import MODULE`` and ``--import=MODULE`` -> the others, the modules."""
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
    module, _ = COMMANDS[known(words[0], COMMANDS, "command")]
    if any("\0" in word for word in words):
        raise ValueError("an argument holds a NUL character, which no name of a file and no number has")
    # Imported now, so that each command pays for its own imports only.
    command = importlib.import_module(f".{module}", __package__)
    if modules:
        from ..attention import plugins

        plugins.bring(*modules)
    try:
        args = command.parser().read(words[1:])
    except SystemExit:
        # --help and --print_config leave this way, having printed what was asked for; mistakes raise ValueError.
        return OK
    try:
        return command.run(args)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        size = re.search(r"(?:tried to allocate|Unable to allocate) ([\d.]+ \w+)", str(error))
        reduce = getattr(command, "MEMORY", "")
        raise ValueError(
            f"out of memory{f', allocating {size[1]}' if size else ''}{f'; reduce {reduce}' if reduce else ''}"
        ) from error


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed: PyTorch raises a RuntimeError, on the CPU one that only its words tell apart."""
    words = (
        "DefaultCPUAllocator",
        "can't allocate memory",
        "out of memory",
        "bad_alloc",
        "Storage size calculation",
    )
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(
        (
            "usage: longspan COMMAND [options]",
            "",
            "Efficient transformers behind one call: train as a transformer, run as an RNN.",
            "",
            "commands:",
            *lines,
            "",
            "longspan COMMAND --help    the command's options and an example",
            "longspan --version         the version",
            "longspan COMMAND --debug   shows the traceback of an error",
            "longspan COMMAND --import MODULE    loads mechanisms of your own, from a module or a package",
        )
    )


def _say(text: str, code: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    # After SIGHUP there is no terminal any more.
    with contextlib.suppress(OSError):
        print(f"longspan: {' '.join(text.split())}", file=sys.stderr)
    return code
