"""``longspan chat``: talk with a model in the terminal."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .parser import (
    SEEDS,
    Parser,
    add_adapter_option,
    add_sampling_options,
    make,
    natural_int,
    positive_int,
    sampling_options,
)

COMMANDS = """\
/undo         take back the last turn
/reset        begin anew
/branch       list the branches
/branch NAME  go to a branch; a new name keeps this point under it and goes on
/save FILE    save the state of the chat
/load FILE    go on with a saved one
/help         these commands
/quit         end, as Ctrl-D does
A text may have several lines between two lines of \"\"\"."""
QUOTES = '"""'


def parser() -> Parser:
    parser = make(
        "chat",
        "Talk with a model in the terminal. A model with a chat template answers messages; another one continues the "
        "text. Ctrl-C stops an answer.\n\n" + COMMANDS,
        "longspan chat ./Qwen3.5-0.8B --system 'Answer in one sentence.'",
        "longspan chat model.gguf --tokens 200 --draft prompt-lookup",
        "longspan chat text --temperature 0.7",
        "longspan chat ./Qwen3.5-0.8B --adapter runs/support/adapter",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, a checkpoint, the pretrained model text, a GGUF file, or a folder with a config.json of "
        "transformers",
    )
    parser.add_argument("--system", type=str, default="", metavar="TEXT", help="a first message of the system")
    parser.add_argument("--load", type=str, default="", metavar="FILE", help="go on with a saved chat")
    parser.add_argument("--tokens", type=positive_int(10**9), default=512, help="most tokens of an answer")
    parser.add_argument(
        "--capacity", type=positive_int(10**9), default=8192, help="tokens of a chat, for models with a KV cache"
    )
    parser.add_argument("--seed", type=natural_int(SEEDS), default=0, help="seed of the answers")
    add_sampling_options(parser)
    parser.add_argument("--stop", type=str, default="", metavar="TOKEN", help="a token that ends an answer")
    parser.add_argument(
        "--draft",
        choices=("prompt-lookup",),
        help="prompt-lookup: read several tokens in one step where the text repeats itself",
    )
    parser.add_argument("--weights", choices=("int8", "int4"), help="round the weights of the model to 8 or 4 bits")
    add_adapter_option(parser)
    return parser


def run(args: Any) -> int:
    from ..models.sampling import Sampling
    from ..ops.buffers import reuse_pages
    from ..serving import Pool
    from ..serving.conversation import Conversation
    from .serve import loaded

    reuse_pages()
    model, codec, _, adapter = loaded(args.model, args.stop, args.weights, args.adapter)
    if codec is None:
        raise ValueError(f"{args.model} has no text; longspan generate draws its images or tokens")
    pool = Pool(model, slots=1, queue=1, capacity=args.capacity)
    talk = Conversation(
        pool,
        codec,
        system=args.system,
        max_tokens=args.tokens,
        sampling=Sampling(**sampling_options(args, 1.0, args.seed)),
        draft=args.draft,
        adapter=adapter,
    )
    if args.load:
        talk.load(Path(args.load))
    shown = sys.stdin.isatty() and sys.stdout.isatty()
    if shown:
        kind = "answers messages" if talk.template else "has no chat template and continues your text"
        print(f"{args.model} {kind}; /help lists the commands")
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (input then has a history)
    branches: dict[str, tuple[Any, list[Any]]] = {}
    for text in _texts(shown):
        if text.startswith("/"):
            try:
                if not _command(talk, branches, text):
                    break
            except ValueError as error:
                print(error)
            continue
        _answer(talk, text)
    return 0


def _texts(shown: bool) -> Iterator[str]:
    """Yield what the user enters, until the end of the input."""
    while True:
        try:
            text = input("> " if shown else "")
            if text.strip() == QUOTES:
                lines = []
                while (line := input("  " if shown else "")).strip() != QUOTES:
                    lines.append(line)
                text = "\n".join(lines)
        except EOFError:
            if shown:
                print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D or /quit ends the chat")
            continue
        if text.strip():
            yield text


def _command(talk: Any, branches: dict[str, Any], text: str) -> bool:
    """Run a command -> whether the chat goes on. Raises ValueError for one that cannot be run."""
    name, _, argument = text.partition(" ")
    argument = argument.strip()
    if name in ("/save", "/load") and not argument:
        raise ValueError(f"{name} needs a file")
    if name not in ("/save", "/load", "/branch") and argument:
        raise ValueError(
            f"{name} takes nothing after it; a text that begins with / can stand between lines of {QUOTES}"
        )
    match name:
        case "/quit":
            return False
        case "/help":
            print(COMMANDS)
        case "/undo":
            print("undone" if talk.undo() else "nothing to undo: the chat has no turns")
        case "/reset":
            talk.reset()
        case "/branch" if not argument:
            print("\n".join(f"{branch}: {len(point[0].tokens)} tokens" for branch, point in branches.items()) or "none")
        case "/branch" if argument in branches:
            talk.session, talk.turns = branches[argument][0], [*branches[argument][1]]
            print(f"at {argument}")
        case "/branch":
            branches[argument] = talk.session, [*talk.turns]
            print(f"kept as {argument}")
        case "/save":
            talk.save(Path(argument))
            print(f"saved to {argument}")
        case "/load":
            talk.load(Path(argument))
            print(f"{len(talk.session.tokens)} tokens from {argument}")
        case _:
            raise ValueError(f"unknown command {name}; /help lists the commands")
    return True


def _answer(talk: Any, text: str) -> None:
    """Print the answer to a text. Ctrl-C stops it."""
    from ..serving.requests import RequestError

    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        if stopped:
            raise KeyboardInterrupt
        stopped = True

    before = signal.signal(signal.SIGINT, stop)
    pieces = talk.ask(text)
    try:
        with contextlib.closing(pieces):
            for piece in pieces:
                _write(piece)
                if stopped:
                    break
    except RequestError as error:
        _write(error.message)
    except (ValueError, RuntimeError) as error:
        _write(str(error))
    finally:
        signal.signal(signal.SIGINT, before)
    _write("\n")


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    # What a model writes must not move the cursor or change the terminal.
    plain = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text) if sys.stdout.isatty() else text
    sys.stdout.write(plain.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
