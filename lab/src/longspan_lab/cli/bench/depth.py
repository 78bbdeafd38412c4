"""``longspan bench depth``: peak memory of a training step by the number of blocks."""

import contextlib
from collections.abc import Callable, Generator

from longspan.cli.parser import LONG, MOST, Parser, natural_int, number, positive_int

from .kind import Benchmark, numbers


def _options(parser: Parser) -> None:
    from ...bench.depth import Options

    depths = ",".join(map(str, Options.depths))
    parser.add_argument("--depths", type=str, default=depths, metavar="N,...", help="numbers of blocks")
    parser.add_argument("--length", type=positive_int(), default=Options.length, help="length in tokens")
    parser.add_argument(
        "--attention",
        type=str,
        default=Options.attention,
        metavar="SPEC",
        help="a spec, or several separated by ';', tiled over the depth",
    )
    parser.add_argument("--dim", type=positive_int(MOST), default=Options.dim, help="width of the model, in channels")
    parser.add_argument("--heads", type=positive_int(MOST), default=Options.heads, help="attention heads")
    parser.add_argument(
        "--feedforward",
        type=positive_int(MOST),
        default=Options.feedforward,
        help="inner width of the feed-forward network",
    )
    parser.add_argument(
        "--feedforward-chunk",
        type=natural_int(),
        default=0,
        help="tokens per chunk of the feed-forward network; 0: no chunks",
    )
    parser.add_argument(
        "--limit",
        type=number(LONG),
        default=Options.limit,
        help="skip steps expected to take more than X MB, extrapolated linearly",
    )


def _measure(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import depth

    if not args.limit > 0:
        raise ValueError(f"--limit={args.limit} must be a positive number of MB")
    sizes = {name: getattr(args, name) for name in ("length", "attention", "dim", "heads", "feedforward", "limit")}
    options = depth.Options(depths=numbers(args, "depths"), feedforward_chunk=args.feedforward_chunk, **sizes)

    def results() -> Generator[dict, None, None]:
        with contextlib.closing(depth.weigher()) as weigher:
            yield from depth.run(options, weigher, track)

    return results(), depth.text


KIND = Benchmark(
    "peak memory of a training step by depth: plain, checkpointed and reversible blocks",
    (
        "longspan bench depth --depths 2,4 --length 512",
        "longspan bench depth --attention 'gla; softmax' --depths 2,4,8 --length 2048 --feedforward-chunk 256",
    ),
    _options,
    _measure,
)
