"""``longspan bench``: time and memory, beside other libraries and against the limits of the machine."""

import contextlib
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import jsonargparse

from ..spec import known
from .bench_depth import KIND as DEPTH
from .parser import Parser, make, positive

COMMON = (
    "Candidates take turns round by round; samples on a busy machine are rejected and counted; figures are medians, "
    "and ratios are of one run. Every candidate first has to agree with a float64 definition; one that does not is "
    "named and gets no figure. Writes a JSON, a CSV and a PNG file; what there is before the end, or is left by Ctrl-C "
    "or SIGTERM, is in KIND.partial.json."
)


class Kind(NamedTuple):
    """One of the benchmarks."""

    about: str
    examples: tuple[str, ...]
    options: Callable[[Parser], None]
    measure: Callable[[Any], tuple[Generator[dict, None, None], Callable[[dict], list]]]
    """-> results, as they grow, which are measured while they are asked for; and their tables"""


class _Bench(Parser):
    def read(self, words: list[str]) -> jsonargparse.Namespace:
        if not words or words[0].startswith("-"):
            return super().read(words)
        kind = known(words[0], KINDS, "benchmark")
        args = subparser(kind).read(words[1:])
        args.kind = kind
        return args


def parser() -> Parser:
    parser = make(
        "bench",
        f"Measure this machine and what runs on it. {COMMON} longspan bench KIND --help has the options of each kind.",
        *(example for kind in KINDS.values() for example in kind.examples[:1]),
        cls=_Bench,
    )
    lines = ";\n".join(f"{name}: {kind.about}" for name, kind in KINDS.items())
    parser.add_argument("kind", type=str, help=f"one of: {lines}")
    return parser


def subparser(name: str) -> Parser:
    """The parser of ``longspan bench NAME``."""
    kind = KINDS[name]
    parser = make(f"bench {name}", f"{kind.about[0].upper()}{kind.about[1:]}. {COMMON}", *kind.examples)
    kind.options(parser)
    parser.add_argument("--out", type=str, default="bench", help="folder for the files")
    return parser


def run(args) -> int:
    from ..bench import report

    out = Path(args.out)
    results, tables = KINDS[args.kind].measure(args)
    with report.claimed(out, args.kind):
        result = report.collect(out, args.kind, results)
    print(report.show(result, tables))
    endings = [".json", ".csv", ".png"]
    if args.kind == "members":
        from .. import checkpoint
        from ..bench import members

        checkpoint.write_text(out / "members.md", members.page(result))
        endings.append(".md")
    print(f"Files: {', '.join(str(out / (args.kind + ending)) for ending in endings)}")
    return 1 if any(one["ours"] for one in result.get("refused", [])) else 0


def _candidates(parser: Parser, default: str) -> None:
    parser.add_argument(
        "candidates", type=str, nargs="*", help=f"what to measure, other libraries too; without any: {default}"
    )
    parser.add_argument("--peers", action="store_true", help="ft and performer too, or those of the two that are named")
    parser.add_argument(
        "--peers-python",
        type=str,
        default="",
        help="the Python that has them after make peers (LONGSPAN_PEERS, else .venv-peers/bin/python)",
    )


def _attention_options(parser: Parser) -> None:
    _candidates(
        parser,
        "linear linear@torch sdpa; a candidate is SPEC, SPEC@BACKEND, either with @module for the whole module with "
        "its projections (specs that no function serves are always measured so), or sdpa",
    )
    parser.add_argument("--lengths", type=str, default="1024,4096,16384,65536", help="tokens, separated by commas")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--heads", type=int, default=8, help="heads")
    parser.add_argument("--size", type=int, default=64, help="channels of a head")
    parser.add_argument("--dtype", type=str, default="float32", help="float32 or bfloat16")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each candidate")
    parser.add_argument("--no-backward", action="store_true", help="forward only")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds; leave out calls expected to take longer")


def _attention(args) -> tuple[Generator, Callable]:
    from ..bench import attention, oracle

    positive(args, "batch", "heads", "size", "rounds")
    known(args.dtype, oracle.ALLOWED, "dtype")
    options = attention.Options(
        lengths=_numbers(args, "lengths"), batch=args.batch, heads=args.heads, size=args.size, dtype=args.dtype,
        rounds=args.rounds, backward=not args.no_backward, limit=_seconds(args),
    )  # fmt: skip
    return _compared(args, attention, options)


def _step_options(parser: Parser) -> None:
    _candidates(parser, "kernel linear linear@torch; kernel is the native function alone")
    parser.add_argument("--batches", type=str, default="1,64,1024", help="sequences, separated by commas")
    parser.add_argument("--heads", type=int, default=8, help="heads")
    parser.add_argument("--size", type=int, default=64, help="channels of a head")
    parser.add_argument("--rounds", type=int, default=21, help="samples of each candidate")


def _step(args) -> tuple[Generator, Callable]:
    from ..bench import step

    positive(args, "heads", "size", "rounds")
    options = step.Options(_numbers(args, "batches"), args.heads, args.size, args.rounds)
    return _compared(args, step, options)


SIZES = {"dim": (256, "width"), "depth": (8, "layers"), "heads": (8, "heads"), "feedforward": (1024, "inner width")}


def _generate_options(parser: Parser) -> None:
    _candidates(
        parser,
        "linear@engine linear@plain linear@engine@bf16 softmax@engine softmax@plain; @engine is the decode engine, "
        "@plain the model called layer by layer, @bf16 has bfloat16 weights",
    )
    parser.add_argument("--positions", type=str, default="784,3072,16384", help="tokens before the one that is timed")
    parser.add_argument("--batches", type=str, default="1,256", help="sequences, separated by commas")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each candidate")
    parser.add_argument("--images", type=int, default=3, help="samples of whole images; 0: none")
    parser.add_argument("--tokens", type=int, default=784, help="tokens of an image")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds; leave out images expected to take longer")
    for field, (default, what) in SIZES.items():
        parser.add_argument(f"--{field}", type=int, default=default, help=f"{what} of the decoder")
    parser.add_argument(
        "--like",
        type=str,
        default="",
        help="a trained decoder, a folder or a model inside longspan such as mnist: its sizes instead of these",
    )


def _generate(args) -> tuple[Generator, Callable]:
    from dataclasses import replace

    from ..bench import decoding
    from .trained import sizes

    positive(args, "rounds", "tokens")
    if args.images < 0:
        raise ValueError(f"--images={args.images} must not be negative; 0 measures no whole images")
    shape = {field: getattr(args, field) for field in SIZES}
    if args.like:
        given = [f"--{field}" for field, (default, _) in SIZES.items() if shape[field] != default]
        if given:
            raise ValueError(f"--like={args.like} has sizes of its own; leave out {', '.join(given)}")
        shape = sizes(args.like, *SIZES, "vocab")
    options = decoding.Options(
        positions=_numbers(args, "positions"), batches=_numbers(args, "batches"), rounds=args.rounds,
        images=args.images, tokens=args.tokens, limit=_seconds(args), shape=replace(decoding.SHAPE, **shape),
    )  # fmt: skip
    return _compared(args, decoding, options)


def _gated_options(parser: Parser) -> None:
    parser.add_argument("rules", type=str, nargs="*", help="what to measure; without any, all: decay, 'channel decay', "
                        "delta, 'gated delta', 'channel delta'")  # fmt: skip
    parser.add_argument("--length", type=int, default=4096, help="tokens")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--heads", type=int, default=8, help="heads of values")
    parser.add_argument("--key-heads", type=int, default=0, help="heads of queries and keys (0: as many)")
    parser.add_argument("--size", type=int, default=64, help="channels of a head")
    parser.add_argument("--batches", type=str, default="1,64,1024", help="sequences of the token step; 0: no step")
    parser.add_argument("--rounds", type=int, default=7, help="samples of each candidate; three times that of steps")


def _gated(args) -> tuple[Generator, Callable]:
    from ..bench import gated
    from ..progress import track

    positive(args, "length", "batch", "heads", "size", "rounds")
    if args.key_heads < 0:
        raise ValueError(f"--key-heads={args.key_heads} must not be negative")
    options = gated.Options(
        rules=tuple(args.rules) or tuple(gated.RULES), length=args.length, batch=args.batch, heads=args.heads,
        key_heads=args.key_heads or args.heads, size=args.size, rounds=args.rounds,
        batches=() if args.batches == "0" else _numbers(args, "batches"),
    )  # fmt: skip
    return gated.run(options, track), gated.text


def _pattern_options(parser: Parser) -> None:
    from ..bench.pattern import DEFAULT, Options

    parser.add_argument("--patterns", type=str, default="; ".join(DEFAULT), help="patterns, separated by semicolons")
    parser.add_argument("--lengths", type=str, default="1024,4096,16384,65536", help="tokens, separated by commas")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--heads", type=int, default=8, help="heads")
    parser.add_argument("--size", type=int, default=64, help="channels of a head")
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="samples of each candidate")
    parser.add_argument("--no-backward", action="store_true", help="forward only")
    parser.add_argument(
        "--matrix", type=int, default=Options.matrix, help="tokens up to which sdpa mask and flex take part"
    )
    parser.add_argument(
        "--limit", type=float, default=Options.limit, help="seconds; leave out calls expected to take longer"
    )
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, forward only; its compilation is slow")


def _pattern(args) -> tuple[Generator, Callable]:
    from .. import patterns
    from ..bench import pattern
    from ..progress import track
    from ..spec import split

    positive(args, "batch", "heads", "size", "rounds")
    if args.matrix < 0:
        raise ValueError(f"--matrix={args.matrix} must not be negative; 0: no candidate that needs all pairs")
    texts = tuple(split(args.patterns))
    for text in texts:
        patterns.parse(text)
    options = pattern.Options(
        patterns=texts, lengths=_numbers(args, "lengths"), batch=args.batch, heads=args.heads, size=args.size,
        rounds=args.rounds, backward=not args.no_backward, matrix=args.matrix, limit=_seconds(args), flex=args.flex,
    )  # fmt: skip

    def results() -> Generator[dict, None, None]:
        with contextlib.closing(pattern.weigher()) as weigher:
            yield from pattern.run(options, weigher, track)

    return results(), pattern.text


def _members_options(parser: Parser) -> None:
    from ..bench.members import Options

    parser.add_argument(
        "--members", type=str, default="", help="specs, separated by semicolons; otherwise every mechanism by its name"
    )
    parser.add_argument("--lengths", type=str, default="1024,4096,16384", help="tokens, separated by commas")
    parser.add_argument("--dim", type=int, default=Options.dim, help="width of the model")
    parser.add_argument("--heads", type=int, default=Options.heads, help="heads")
    parser.add_argument("--rounds", type=int, default=Options.rounds, help="samples of each mechanism")
    parser.add_argument("--no-backward", action="store_true", help="forward and token step only")
    parser.add_argument(
        "--limit", type=float, default=Options.limit, help="seconds; leave out calls expected to take longer"
    )


def _members(args) -> tuple[Generator, Callable]:
    from ..bench import members
    from ..progress import track
    from ..spec import split

    positive(args, "dim", "heads", "rounds")
    specs = tuple(split(args.members)) if args.members else ()
    options = members.Options(
        members=specs, lengths=_numbers(args, "lengths"), dim=args.dim, heads=args.heads, rounds=args.rounds,
        backward=not args.no_backward, limit=_seconds(args),
    )  # fmt: skip

    def results() -> Generator[dict, None, None]:
        with contextlib.closing(members.weigher()) as weigher:
            yield from members.run(options, weigher, track)

    return results(), members.text


def _limits_options(parser: Parser) -> None:
    parser.add_argument("--rounds", type=int, default=7, help="samples of each figure")


def _limits(args) -> tuple[Generator, Callable]:
    from ..bench import limits
    from ..progress import track

    positive(args, "rounds")
    return limits.run(args.rounds, track), limits.text


def _compared(args, benchmark: Any, options: Any) -> tuple[Generator, Callable]:
    """Measure candidates, with the processes that this needs."""
    from ..bench import candidates, peers
    from ..progress import track

    named = [name for name in args.candidates if name in peers.SUBJECTS]
    if args.peers_python and not (args.peers or named):
        raise ValueError("--peers-python says where the other libraries are; measure them by --peers")
    ours = [name for name in args.candidates if name not in peers.SUBJECTS]
    names = tuple(dict.fromkeys(ours if args.candidates else benchmark.DEFAULT))
    others = tuple(named or peers.SUBJECTS) if args.peers or named else ()
    remotes = candidates.find_peers(args.peers_python, others) if others else []

    def results() -> Generator[dict, None, None]:
        with contextlib.ExitStack() as stack:
            weigher = candidates.weigher()
            for process in (*remotes, weigher):
                stack.callback(process.close)
            about = candidates.versions(remotes)
            for result in benchmark.run(names, remotes, weigher, options, track):
                yield {**result, "machine": result["machine"] | about}

    return results(), benchmark.text


def _numbers(args: Any, name: str) -> tuple[int, ...]:
    """Numbers separated by commas, each once, in order. Raises ValueError for anything else."""
    text = getattr(args, name)
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(f"--{name}={text}: expected whole numbers from 1 on, separated by commas: 1,64,1024")
    return tuple(sorted({int(word) for word in words}))


def _seconds(args: Any) -> float:
    if not args.limit > 0:
        raise ValueError(f"--limit={args.limit} must be a positive number of seconds")
    return args.limit


KINDS = {
    "attention": Kind(
        "time and peak memory of attention by length, forward and with backward",
        (
            "longspan bench attention --lengths 256,512 --rounds 2",
            "longspan bench attention linear linear@native softmax@module linear@module --lengths 4096",
            "longspan bench attention --peers",
        ),
        _attention_options,
        _attention,
    ),
    "step": Kind(
        "one layer's token step by batch, against scaling its state in place",
        ("longspan bench step --peers", "longspan bench step kernel linear --batches 64"),
        _step_options,
        _step,
    ),
    "generate": Kind(
        "tokens and images per second of whole decoders, by position and batch",
        ("longspan bench generate --peers", "longspan bench generate linear@plain --positions 784 --images 0"),
        _generate_options,
        _generate,
    ),
    "gated": Kind(
        "decay and the delta rule: kernels, chunks, a plain loop, the code of transformers",
        (
            "longspan bench gated --length 256 --rounds 2 --batches 1",
            "longspan bench gated 'gated delta' --size 128 --heads 32 --key-heads 16 --length 2048",
        ),
        _gated_options,
        _gated,
    ),
    "pattern": Kind(
        "softmax attention under patterns by length and density, against a dense mask and against all pairs",
        (
            "longspan bench pattern --lengths 256,512 --rounds 1",
            "longspan bench pattern --patterns 'band(255); causal & (band(63) | globals(4))' --no-backward",
        ),
        _pattern_options,
        _pattern,
    ),
    "members": Kind(
        "every mechanism beside fused softmax: time, memory, state and token step by length, in families",
        (
            "longspan bench members --lengths 256,512 --rounds 1",
            "longspan bench members --members 'linear; gla; local(window=64)' --no-backward",
        ),
        _members_options,
        _members,
    ),
    "depth": Kind(*DEPTH),
    "limits": Kind(
        "what this machine can do at most: matrix products, and moving bytes",
        ("longspan bench limits",),
        _limits_options,
        _limits,
    ),
}
