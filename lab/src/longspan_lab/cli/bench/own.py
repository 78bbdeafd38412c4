"""Benchmarks of longspan and of the machine."""

from typing import Any

from longspan.cli.parser import Parser

from .kind import Benchmark, Measured, add_flags, numbers, values


class Serve(Benchmark):
    """A load on a pool and a server, or on two servers."""

    def options(self, parser: Parser) -> None:
        """Add the flags."""
        from ...bench.serve import Options
        from ...bench.serve_peer import PEERS
        from ...bench.serve_peer import Options as Compared

        parser.add_argument(
            "model",
            nargs="?",
            default="",
            metavar="MODEL",
            help=f"a run, a checkpoint or a pretrained model, by default {Options.model}; with --peer a folder of a "
            "model of transformers, or a model of longspan bench transformers with random weights, by default "
            f"{Compared.model}",
        )
        streams, compared = (",".join(map(str, kind.streams)) for kind in (Options, Compared))
        parser.add_text("--streams", "N,...", f"numbers of streams; by default {streams}, with --peer {compared}")
        add_flags(parser, Options)
        parser.add_text(
            "--peer", "NAME", f"compare longspan serve with another server on the same folder: {', '.join(PEERS)}"
        )

    def measure(self, args: Any) -> Measured:
        """Return the results, as they grow, and the function that shows them."""
        from longspan._utils.progress import track
        from longspan.cli import trained

        from ...bench import serve, serve_peer

        given = values(args, serve.Options)
        given |= {"model": args.model} if args.model else {}
        given |= {"streams": numbers(args, "streams")} if args.streams else {}
        if args.peer:
            if not given.pop("http"):
                raise ValueError("--no-http measures the pool only, and --peer compares servers; pass one of them")
            return serve_peer.run(serve_peer.Options(peer=args.peer, **given), track), serve_peer.text
        options = serve.Options(**given)
        model, *_ = trained.model(options.model, "", "decoder")
        return serve.run(model, options, track), serve.text


OWN: dict[str, Benchmark] = {
    "gated": Benchmark(
        "gated",
        "decay and the delta rule: native kernels, chunked form, plain loop, and the code of transformers",
        (
            "longspan bench gated --length 256 --rounds 2 --batches 1",
            "longspan bench gated 'gated delta' --size 128 --heads 32 --key-heads 16 --length 2048",
        ),
    ),
    "pattern": Benchmark(
        "pattern",
        "softmax attention under patterns by length and density, compared with a dense mask and with all pairs",
        (
            "longspan bench pattern --lengths 256,512 --rounds 1",
            "longspan bench pattern --patterns 'band(255); causal & (band(63) | globals(4))' --no-backward",
        ),
    ),
    "members": Benchmark(
        "members",
        "every mechanism compared with fused softmax: time, memory, state and decode step by length",
        (
            "longspan bench members --lengths 256,512 --rounds 1",
            "longspan bench members --members 'linear; gla; local(window=64)' --no-backward",
        ),
    ),
    "convolution": Benchmark(
        "convolution",
        "the short causal convolution of recurrent layers, compared with moving its bytes once",
        (
            "longspan bench convolution",
            "longspan bench convolution --length 512 --channels 1024 --batches 1,16 --rounds 5",
        ),
    ),
    "weights": Benchmark(
        "weights",
        "products with weights of 8 and 4 bits by format, and decode steps with them, compared with reading memory",
        (
            "longspan bench weights --inputs 256 --outputs 96 --megabytes 1 --depth 1 --rounds 1",
            "longspan bench weights --inputs 3584 --outputs 1024 --rows 1 --formats Q8_0,Q4_0 --depth 0",
        ),
    ),
    "depth": Benchmark(
        "depth",
        "peak memory of a training step by depth: plain, checkpointed and reversible blocks",
        (
            "longspan bench depth --depths 2,4 --length 512",
            "longspan bench depth --attention 'gla; softmax' --depths 2,4,8 --length 2048 --feedforward-chunk 256",
        ),
    ),
    "rewind": Benchmark(
        "rewind",
        "what undoing tokens costs: an edit in a long prompt, calls that verify drafts, texts with drafts",
        (
            "longspan bench rewind --length 512 --edits 2 --tokens 20 --rounds 1 --dim 64 --depth 2 --heads 2",
            "longspan bench rewind",
        ),
    ),
    "transformers": Benchmark(
        "hybrids",
        "hybrid models of transformers, stock and accelerated by longspan: prefill, training, decoding",
        (
            "longspan bench transformers --small --length 64 --rounds 1",
            "longspan bench transformers kimi mamba2 --dtypes float32",
        ),
    ),
    "rwkv7": Benchmark(
        "rwkv7",
        "RWKV-7 as a whole, compared with its author's package rwkv: prefill, training, decoding",
        (
            "longspan bench rwkv7 --length 64 --layers 2 --width 64 --vocabulary 97 --rounds 1",
            "longspan bench rwkv7",
        ),
    ),
    "serve": Serve(
        "serve",
        "load on a pool and on longspan serve: tokens per second, time to the first token, gaps, memory",
        (
            "longspan bench serve --streams 4 --tokens 8 --rounds 1",
            "longspan bench serve text --streams 64,512,4096",
            "longspan bench serve mamba2 --peer transformers --streams 1,8,64",
        ),
    ),
    "profile": Benchmark(
        "profile",
        "where the time of the native kernels goes: share of their bound, page faults, stages, decode steps",
        (
            "longspan bench profile --lengths 64 --batches 1 --rounds 1",
            "longspan bench profile 'gated delta' --lengths 4096,16384 --no-backward",
            "longspan bench profile 'selective scan' convolution --lengths 4096",
        ),
    ),
    "limits": Benchmark(
        "limits",
        "the limits of this machine: matrix products and memory bandwidth",
        ("longspan bench limits",),
    ),
}
