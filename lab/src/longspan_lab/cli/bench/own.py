"""Benchmarks of longspan and of the machine: flags and runs."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

from longspan._utils.spec import split
from longspan.cli.parser import LONG, MOST, ROUNDS, Parser, natural_int, number, positive_int

from .depth import KIND as DEPTH
from .kind import Benchmark, numbers, seconds
from .rewind import KIND as REWIND


def _gated_options(parser: Parser) -> None:
    parser.add_argument(
        "rules",
        type=str,
        nargs="*",
        metavar="RULE",
        help="what to measure, by default all: decay, 'channel decay', delta, 'gated delta', 'channel delta'",
    )
    parser.add_argument("--length", type=positive_int(), default=4096, help="length in tokens")
    parser.add_argument("--batch", type=positive_int(MOST), default=1, help="batch size")
    parser.add_argument("--heads", type=positive_int(MOST), default=8, help="value heads")
    parser.add_argument(
        "--key-heads", type=natural_int(MOST), default=0, help="heads of queries and keys; 0: as many as value heads"
    )
    parser.add_argument("--size", type=positive_int(MOST), default=64, help="channels per head")
    parser.add_argument(
        "--batches",
        type=str,
        default="1,64,1024",
        metavar="N,...",
        help="batch sizes of the decode step; 0: do not measure it",
    )
    parser.add_argument(
        "--rounds",
        type=positive_int(ROUNDS),
        default=7,
        help="samples per candidate; three times as many for the decode step",
    )


def _gated(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import gated

    options = gated.Options(
        rules=tuple(args.rules) or tuple(gated.RULES),
        length=args.length,
        batch=args.batch,
        heads=args.heads,
        key_heads=args.key_heads or args.heads,
        size=args.size,
        rounds=args.rounds,
        batches=() if args.batches == "0" else numbers(args, "batches"),
    )
    return gated.run(options, track), gated.text


def _pattern_options(parser: Parser) -> None:
    from ...bench.pattern import DEFAULT, Options

    parser.add_argument(
        "--patterns", type=str, default="; ".join(DEFAULT), metavar="PATTERNS", help="patterns, separated by ';'"
    )
    parser.add_argument(
        "--lengths", type=str, default="1024,4096,16384,65536", metavar="N,...", help="lengths in tokens"
    )
    parser.add_argument("--batch", type=positive_int(MOST), default=1, help="batch size")
    parser.add_argument("--heads", type=positive_int(MOST), default=8, help="attention heads")
    parser.add_argument("--size", type=positive_int(MOST), default=64, help="channels per head")
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=Options.rounds, help="samples per candidate")
    parser.add_argument("--no-backward", action="store_true", help="measure the forward pass only")
    parser.add_argument(
        "--matrix",
        type=natural_int(),
        default=Options.matrix,
        help="largest length at which sdpa with a dense mask and flex are measured",
    )
    parser.add_argument(
        "--limit", type=number(LONG), default=Options.limit, help="skip calls expected to take more than X seconds"
    )
    parser.add_argument(
        "--flex", action="store_true", help="also measure the forward pass of FlexAttention, which compiles slowly"
    )


def _pattern(args) -> tuple[Generator, Callable]:
    from longspan import patterns
    from longspan._utils.progress import track

    from ...bench import pattern

    texts = tuple(split(args.patterns))
    for text in texts:
        patterns.parse(text)
    options = pattern.Options(
        patterns=texts,
        lengths=numbers(args, "lengths"),
        batch=args.batch,
        heads=args.heads,
        size=args.size,
        rounds=args.rounds,
        backward=not args.no_backward,
        matrix=args.matrix,
        limit=seconds(args),
        flex=args.flex,
    )

    def results() -> Generator[dict, None, None]:
        with contextlib.closing(pattern.weigher()) as weigher:
            yield from pattern.run(options, weigher, track)

    return results(), pattern.text


def _members_options(parser: Parser) -> None:
    from ...bench.members import Options

    parser.add_argument(
        "--members", type=str, default="", metavar="SPECS", help="specs, separated by ';'; by default every mechanism"
    )
    parser.add_argument("--lengths", type=str, default="1024,4096,16384", metavar="N,...", help="lengths in tokens")
    parser.add_argument("--dim", type=positive_int(MOST), default=Options.dim, help="width of the model, in channels")
    parser.add_argument("--heads", type=positive_int(MOST), default=Options.heads, help="attention heads")
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=Options.rounds, help="samples per mechanism")
    parser.add_argument("--no-backward", action="store_true", help="measure the forward pass and the decode step only")
    parser.add_argument(
        "--limit", type=number(LONG), default=Options.limit, help="skip calls expected to take more than X seconds"
    )


def _members(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import members

    specs = tuple(split(args.members)) if args.members else ()
    options = members.Options(
        members=specs,
        lengths=numbers(args, "lengths"),
        dim=args.dim,
        heads=args.heads,
        rounds=args.rounds,
        backward=not args.no_backward,
        limit=seconds(args),
    )

    def results() -> Generator[dict, None, None]:
        with contextlib.closing(members.weigher()) as weigher:
            yield from members.run(options, weigher, track)

    return results(), members.text


def _hybrids_options(parser: Parser) -> None:
    from ...bench.hybrids import DTYPES, MODELS, Options

    parser.add_argument(
        "models", type=str, nargs="*", metavar="MODEL", help=f"which of {', '.join(MODELS)} to measure, by default all"
    )
    parser.add_argument(
        "--length", type=positive_int(), default=Options.length, help="tokens per prompt and training step"
    )
    parser.add_argument(
        "--dtypes", type=str, default=",".join(DTYPES), metavar="DTYPES", help="dtypes, separated by commas"
    )
    parser.add_argument(
        "--rounds", type=positive_int(ROUNDS), default=Options.rounds, help="samples per implementation"
    )
    parser.add_argument(
        "--small", action="store_true", help="use models a few channels wide, as a smoke test of seconds"
    )


def _hybrids(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import hybrids

    options = hybrids.Options(
        models=tuple(args.models) or tuple(hybrids.MODELS),
        length=args.length,
        dtypes=tuple(args.dtypes.split(",")),
        rounds=args.rounds,
        small=args.small,
    )
    return hybrids.run(options, track), hybrids.text


def _rwkv7_options(parser: Parser) -> None:
    from ...bench.rwkv7 import Options

    parser.add_argument(
        "--length", type=positive_int(), default=Options.length, help="tokens per prompt and training step"
    )
    parser.add_argument("--layers", type=positive_int(MOST), default=Options.layers, help="layers of the model")
    parser.add_argument(
        "--width", type=positive_int(MOST), default=Options.width, help="width of the model, a multiple of 64"
    )
    parser.add_argument(
        "--vocabulary", type=positive_int(10**7), default=Options.vocabulary, help="tokens of the vocabulary"
    )
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=Options.rounds, help="samples per candidate")


def _rwkv7(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import rwkv7

    names = ("length", "layers", "width", "vocabulary", "rounds")
    return rwkv7.run(rwkv7.Options(**{name: getattr(args, name) for name in names}), track), rwkv7.text


def _serve_options(parser: Parser) -> None:
    from ...bench.serve import Options
    from ...bench.serve_peer import PEERS
    from ...bench.serve_peer import Options as Compared

    parser.add_argument(
        "model",
        nargs="?",
        default="",
        metavar="MODEL",
        help=f"a run, a checkpoint or a pretrained model, by default {Options.model}; with --peer a folder of a model "
        f"of transformers, or a model of longspan bench transformers with random weights, by default {Compared.model}",
    )
    streams, compared = (",".join(map(str, kind.streams)) for kind in (Options, Compared))
    parser.add_argument(
        "--streams",
        type=str,
        default="",
        metavar="N,...",
        help=f"numbers of streams; by default {streams}, with --peer {compared}",
    )
    parser.add_argument("--prompt", type=positive_int(), default=Options.prompt, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive_int(), default=Options.tokens, help="tokens drawn for each stream")
    parser.add_argument(
        "--rounds",
        type=positive_int(ROUNDS),
        default=Options.rounds,
        help="samples of a step; with --peer loads of each server",
    )
    parser.add_argument("--no-http", action="store_true", help="measure the pool only, without a server")
    parser.add_argument(
        "--peer",
        type=str,
        default="",
        metavar="NAME",
        help=f"compare longspan serve with another server on the same folder: {', '.join(PEERS)}",
    )


def _serve(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track
    from longspan.cli import trained

    from ...bench import serve, serve_peer

    given: dict[str, Any] = {name: getattr(args, name) for name in ("prompt", "tokens", "rounds")}
    given |= {"model": args.model} if args.model else {}
    given |= {"streams": numbers(args, "streams")} if args.streams else {}
    if args.peer:
        if args.no_http:
            raise ValueError("--no-http measures the pool only, and --peer compares servers; pass one of them")
        return serve_peer.run(serve_peer.Options(peer=args.peer, **given), track), serve_peer.text
    options = serve.Options(http=not args.no_http, **given)
    model, *_ = trained.model(options.model, "", "decoder")
    return serve.run(model, options, track), serve.text


def _convolution_options(parser: Parser) -> None:
    from ...bench.convolution import Options

    parser.add_argument("--length", type=positive_int(), default=Options.length, help="length in tokens")
    parser.add_argument("--channels", type=positive_int(MOST), default=Options.channels, help="channels")
    parser.add_argument(
        "--width", type=positive_int(MOST), default=Options.width, help="width of the kernel, in tokens"
    )
    parser.add_argument("--batches", type=str, default="1,64", metavar="N,...", help="batch sizes of the decode step")
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=Options.rounds, help="samples per candidate")


def _convolution(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import convolution

    options = convolution.Options(
        length=args.length,
        channels=args.channels,
        width=args.width,
        batches=numbers(args, "batches"),
        rounds=args.rounds,
    )
    return convolution.run(options, track), convolution.text


def _profile_options(parser: Parser) -> None:
    from ...bench.profile import KERNELS, Options

    kernels = ", ".join(f"'{name}'" if " " in name else name for name in KERNELS)
    parser.add_argument(
        "kernels", type=str, nargs="*", metavar="KERNEL", help=f"what to measure, by default all: {kernels}"
    )
    lengths, batches = (",".join(map(str, numbers)) for numbers in (Options.lengths, Options.batches))
    parser.add_argument("--lengths", type=str, default=lengths, metavar="N,...", help="lengths in tokens")
    parser.add_argument(
        "--heads",
        type=positive_int(MOST),
        default=Options.heads,
        help="attention heads; scans and the convolution have heads x size channels",
    )
    parser.add_argument("--size", type=positive_int(MOST), default=Options.size, help="channels per head")
    parser.add_argument(
        "--batches",
        type=str,
        default=batches,
        metavar="N,...",
        help="batch sizes of the decode step; 0: do not measure it",
    )
    parser.add_argument(
        "--rounds",
        type=positive_int(ROUNDS),
        default=Options.rounds,
        help="samples per kernel and length; three times as many for the decode step",
    )
    parser.add_argument("--no-backward", action="store_true", help="measure the forward pass and the decode step only")


def _profile(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import profile

    options = profile.Options(
        kernels=tuple(args.kernels) or tuple(profile.KERNELS),
        lengths=numbers(args, "lengths"),
        heads=args.heads,
        size=args.size,
        batches=() if args.batches == "0" else numbers(args, "batches"),
        rounds=args.rounds,
        backward=not args.no_backward,
    )
    return profile.run(options, track), profile.text


def _limits_options(parser: Parser) -> None:
    parser.add_argument("--rounds", type=positive_int(ROUNDS), default=7, help="samples per figure")


def _limits(args) -> tuple[Generator, Callable]:
    from longspan._utils.progress import track

    from ...bench import limits

    return limits.run(args.rounds, track), limits.text


OWN = {
    "gated": Benchmark(
        "decay and the delta rule: native kernels, chunked form, plain loop, and the code of transformers",
        (
            "longspan bench gated --length 256 --rounds 2 --batches 1",
            "longspan bench gated 'gated delta' --size 128 --heads 32 --key-heads 16 --length 2048",
        ),
        _gated_options,
        _gated,
    ),
    "pattern": Benchmark(
        "softmax attention under patterns by length and density, compared with a dense mask and with all pairs",
        (
            "longspan bench pattern --lengths 256,512 --rounds 1",
            "longspan bench pattern --patterns 'band(255); causal & (band(63) | globals(4))' --no-backward",
        ),
        _pattern_options,
        _pattern,
    ),
    "members": Benchmark(
        "every mechanism compared with fused softmax: time, memory, state and decode step by length",
        (
            "longspan bench members --lengths 256,512 --rounds 1",
            "longspan bench members --members 'linear; gla; local(window=64)' --no-backward",
        ),
        _members_options,
        _members,
    ),
    "convolution": Benchmark(
        "the short causal convolution of recurrent layers, compared with moving its bytes once",
        (
            "longspan bench convolution",
            "longspan bench convolution --length 512 --channels 1024 --batches 1,16 --rounds 5",
        ),
        _convolution_options,
        _convolution,
    ),
    "depth": DEPTH,
    "rewind": REWIND,
    "transformers": Benchmark(
        "hybrid models of transformers, stock and accelerated by longspan: prefill, training, decoding",
        (
            "longspan bench transformers --small --length 64 --rounds 1",
            "longspan bench transformers kimi mamba2 --dtypes float32",
        ),
        _hybrids_options,
        _hybrids,
    ),
    "rwkv7": Benchmark(
        "RWKV-7 as a whole, compared with its author's package rwkv: prefill, training, decoding",
        (
            "longspan bench rwkv7 --length 64 --layers 2 --width 64 --vocabulary 97 --rounds 1",
            "longspan bench rwkv7",
        ),
        _rwkv7_options,
        _rwkv7,
    ),
    "serve": Benchmark(
        "load on a pool and on longspan serve: tokens per second, time to the first token, gaps, memory",
        (
            "longspan bench serve --streams 4 --tokens 8 --rounds 1",
            "longspan bench serve text --streams 64,512,4096",
            "longspan bench serve mamba2 --peer transformers --streams 1,8,64",
        ),
        _serve_options,
        _serve,
    ),
    "profile": Benchmark(
        "where the time of the native kernels goes: share of their bound, page faults, stages, decode steps",
        (
            "longspan bench profile --lengths 64 --batches 1 --rounds 1",
            "longspan bench profile 'gated delta' --lengths 4096,16384 --no-backward",
            "longspan bench profile 'selective scan' convolution --lengths 4096",
        ),
        _profile_options,
        _profile,
    ),
    "limits": Benchmark(
        "the limits of this machine: matrix products and memory bandwidth",
        ("longspan bench limits",),
        _limits_options,
        _limits,
    ),
}
