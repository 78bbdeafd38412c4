"""``longspan bench rewind``: what undoing tokens costs."""

from collections.abc import Callable, Generator

from longspan._utils.spec import known
from longspan.cli.parser import MOST, ROUNDS, Parser, positive_int

from .kind import Benchmark, numbers

DTYPES = ("float32", "bfloat16")


def _options(parser: Parser) -> None:
    from ...bench.rewind import Options

    parser.add_argument("--length", type=positive_int(), default=Options.length, help="tokens of the edited prompt")
    parser.add_argument("--rooms", type=str, default="16,32", metavar="N,...", help="states in the server's cache")
    parser.add_argument("--edits", type=positive_int(ROUNDS), default=Options.edits, help="edits at random places")
    parser.add_argument("--drafts", type=str, default="1,2,4,8", metavar="N,...", help="tokens read in one call")
    parser.add_argument("--tokens", type=positive_int(), default=Options.tokens, help="tokens of each text")
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=Options.rounds, help="samples per candidate")
    parser.add_argument("--dtypes", type=str, default=",".join(DTYPES), metavar="DTYPE,...", help=" or ".join(DTYPES))
    for name, what in (("dim", "width, in channels"), ("depth", "layers"), ("heads", "attention heads")):
        default = getattr(Options, name)
        parser.add_argument(f"--{name}", type=positive_int(MOST), default=default, help=f"large model: {what}")


def _measure(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import rewind

    dtypes = tuple(word.strip() for word in args.dtypes.split(","))
    for dtype in dtypes:
        known(dtype, dict.fromkeys(DTYPES), "dtype")
    lists = {name: numbers(args, name) for name in ("rooms", "drafts")}
    sizes = {name: getattr(args, name) for name in ("length", "edits", "tokens", "rounds", "dim", "depth", "heads")}
    return rewind.run(rewind.Options(**lists, **sizes, dtypes=dtypes), track), rewind.text


KIND = Benchmark(
    "what undoing tokens costs: an edit in a long prompt, calls that verify drafts, texts with drafts",
    (
        "longspan bench rewind --length 512 --edits 2 --tokens 20 --rounds 1 --dim 64 --depth 2 --heads 2",
        "longspan bench rewind",
    ),
    _options,
    _measure,
)
