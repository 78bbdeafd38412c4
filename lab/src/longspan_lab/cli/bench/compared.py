"""Benchmarks that compare candidates of longspan and of other libraries: flags and runs."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from longspan._utils.spec import known
from longspan.cli.parser import LONG, MODEL, MOST, ROUNDS, Parser, model_help, natural_int, number, positive_int

from .kind import Benchmark, numbers, seconds


def _candidates(parser: Parser, default: str) -> None:
    parser.add_argument(
        "candidates", type=str, nargs="*", metavar="CANDIDATE", help=f"what to measure, by default {default}"
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="also measure the libraries ft and performer, or those of the two that are candidates",
    )
    parser.add_argument(
        "--peers-python",
        type=str,
        default="",
        metavar="FILE",
        help="the Python of the environment made by make peers; by default LONGSPAN_PEERS, or else "
        ".venv-peers/bin/python",
    )


def _attention_options(parser: Parser) -> None:
    _candidates(
        parser,
        "linear linear@torch sdpa. A candidate is SPEC, SPEC@BACKEND or sdpa. SPEC@module measures the whole module "
        "with its projections, as does any spec that has no functional form",
    )
    parser.add_argument(
        "--lengths", type=str, default="1024,4096,16384,65536", metavar="N,...", help="lengths in tokens"
    )
    parser.add_argument("--batch", type=positive_int(MOST), default=1, help="batch size")
    parser.add_argument("--heads", type=positive_int(MOST), default=8, help="attention heads")
    parser.add_argument("--size", type=positive_int(MOST), default=64, help="channels per head")
    parser.add_argument("--dtype", type=str, default="float32", metavar="DTYPE", help="float32 or bfloat16")
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=7, help="samples per candidate")
    parser.add_argument("--no-backward", action="store_true", help="measure the forward pass only")
    parser.add_argument(
        "--limit", type=number(LONG), default=20.0, help="skip calls expected to take more than X seconds"
    )


def _attention(args) -> tuple[Generator, Callable]:
    from ...bench import attention, oracle

    known(args.dtype, oracle.ALLOWED, "dtype")
    options = attention.Options(
        lengths=numbers(args, "lengths"),
        batch=args.batch,
        heads=args.heads,
        size=args.size,
        dtype=args.dtype,
        rounds=args.rounds,
        backward=not args.no_backward,
        limit=seconds(args),
    )
    return _compared(args, attention, options)


def _step_options(parser: Parser) -> None:
    _candidates(parser, "kernel linear linear@torch; kernel is the bare native function")
    parser.add_argument("--batches", type=str, default="1,64,1024", metavar="N,...", help="batch sizes")
    parser.add_argument("--heads", type=positive_int(MOST), default=8, help="attention heads")
    parser.add_argument("--size", type=positive_int(MOST), default=64, help="channels per head")
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=21, help="samples per candidate")


def _step(args) -> tuple[Generator, Callable]:
    from ...bench import step

    options = step.Options(numbers(args, "batches"), args.heads, args.size, args.rounds)
    return _compared(args, step, options)


SIZES = {"dim": (256, "width"), "depth": (8, "layers"), "heads": (8, "heads"), "feedforward": (1024, "inner width")}


def _generate_options(parser: Parser) -> None:
    _candidates(
        parser,
        "linear@engine linear@plain linear@engine@bf16 softmax@engine softmax@plain; @engine runs the decode engine, "
        "@plain calls the model layer by layer, @bf16 stores weights in bfloat16",
    )
    parser.add_argument(
        "--positions", type=str, default="784,3072,16384", metavar="N,...", help="tokens before the timed one"
    )
    parser.add_argument("--batches", type=str, default="1,256", metavar="N,...", help="batch sizes")
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=7, help="samples per candidate")
    parser.add_argument(
        "--images", type=natural_int(), default=3, help="samples of whole images; 0: do not measure them"
    )
    parser.add_argument("--tokens", type=positive_int(), default=784, help="tokens per image")
    parser.add_argument(
        "--limit", type=number(LONG), default=150.0, help="skip images expected to take more than X seconds"
    )
    for field, (default, what) in SIZES.items():
        parser.add_argument(f"--{field}", type=positive_int(MOST), default=default, help=f"{what} of the decoder")
    parser.add_argument(
        "--like",
        type=str,
        default="",
        metavar=MODEL,
        help=f"use the sizes of a trained decoder: {model_help('mnist, text')}",
    )


def _generate(args) -> tuple[Generator, Callable]:
    from dataclasses import replace

    from longspan.cli.trained import sizes

    from ...bench import decoding

    shape = {field: getattr(args, field) for field in SIZES}
    if args.like:
        given = [f"--{field}" for field, (default, _) in SIZES.items() if shape[field] != default]
        if given:
            raise ValueError(f"--like={args.like} determines the sizes; leave out {', '.join(given)}")
        shape = sizes(args.like, *SIZES, "vocab")
    options = decoding.Options(
        positions=numbers(args, "positions"),
        batches=numbers(args, "batches"),
        rounds=args.rounds,
        images=args.images,
        tokens=args.tokens,
        limit=seconds(args),
        shape=replace(decoding.SHAPE, **shape),
    )
    return _compared(args, decoding, options)


def _compared(args, benchmark: Any, options: Any) -> tuple[Generator, Callable]:
    """Measure candidates in separate processes."""
    from longspan._utils.progress import track

    from ...bench import candidates, peers

    named = [name for name in args.candidates if name in peers.SUBJECTS]
    if args.peers_python and not (args.peers or named):
        raise ValueError("--peers-python requires --peers, or ft or performer as a candidate")
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


COMPARED = {
    "attention": Benchmark(
        "time and peak memory of attention by length, forward and backward",
        (
            "longspan bench attention --lengths 256,512 --rounds 2",
            "longspan bench attention linear linear@native softmax@module linear@module --lengths 4096",
            "longspan bench attention --peers",
        ),
        _attention_options,
        _attention,
    ),
    "step": Benchmark(
        "time of one layer's decode step by batch size, compared with scaling its state in place",
        ("longspan bench step --peers", "longspan bench step kernel linear --batches 64"),
        _step_options,
        _step,
    ),
    "generate": Benchmark(
        "tokens and images per second of whole decoders, by position and batch size",
        ("longspan bench generate --peers", "longspan bench generate linear@plain --positions 784 --images 0"),
        _generate_options,
        _generate,
    ),
}
