"""Benchmarks that compare candidates of longspan and of other libraries."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any

from longspan.cli.parser import MODEL, MOST, Parser, model_help, positive_int

from .kind import Benchmark, Measured, add_flags, values


@dataclass(frozen=True)
class Compared(Benchmark):
    """A benchmark of named candidates, each in a separate process."""

    default: str
    """the candidates that are measured by default, in words"""

    def options(self, parser: Parser) -> None:
        """Add the flags."""
        parser.add_argument(
            "candidates", type=str, nargs="*", metavar="CANDIDATE", help=f"what to measure, by default {self.default}"
        )
        parser.add_flag(
            "--peers", "also measure the libraries ft and performer, or those of the two that are candidates"
        )
        parser.add_text(
            "--peers-python",
            "FILE",
            "the Python of the environment made by make peers; by default LONGSPAN_PEERS, or else "
            ".venv-peers/bin/python",
        )
        add_flags(parser, self.module.Options)

    def settings(self, args: Any) -> Any:
        """The settings of the benchmark."""
        return self.module.Options(**values(args, self.module.Options))

    def measure(self, args: Any) -> Measured:
        """Return the results, as they grow, and the function that shows them."""
        from longspan._utils.progress import track

        from ...bench import candidates, peers

        module, options = self.module, self.settings(args)
        named = [name for name in args.candidates if name in peers.SUBJECTS]
        if args.peers_python and not (args.peers or named):
            raise ValueError("--peers-python requires --peers, or ft or performer as a candidate")
        ours = [name for name in args.candidates if name not in peers.SUBJECTS]
        names = tuple(dict.fromkeys(ours if args.candidates else module.DEFAULT))
        others = tuple(named or peers.SUBJECTS) if args.peers or named else ()
        remotes = candidates.find_peers(args.peers_python, others) if others else []

        def results() -> Generator[dict, None, None]:
            with contextlib.ExitStack() as stack:
                weigher = candidates.weigher()
                for process in (*remotes, weigher):
                    stack.callback(process.close)
                about = candidates.versions(remotes)
                for result in module.run(names, remotes, weigher, options, track):
                    yield {**result, "machine": result["machine"] | about}

        return results(), module.text


SIZES = {"dim": (256, "width"), "depth": (8, "layers"), "heads": (8, "heads"), "feedforward": (1024, "inner width")}


class Decoding(Compared):
    """A benchmark of whole decoders, whose sizes are flags too."""

    def options(self, parser: Parser) -> None:
        """Add the flags."""
        super().options(parser)
        for field, (default, what) in SIZES.items():
            parser.add_argument(f"--{field}", type=positive_int(MOST), default=default, help=f"{what} of the decoder")
        parser.add_text("--like", MODEL, f"use the sizes of a trained decoder: {model_help('mnist, text')}")

    def settings(self, args: Any) -> Any:
        """The settings of the benchmark. Raises ValueError for sizes that are given twice."""
        from longspan.cli.trained import sizes

        shape = {field: getattr(args, field) for field in SIZES}
        if args.like:
            given = [f"--{field}" for field, (default, _) in SIZES.items() if shape[field] != default]
            if given:
                raise ValueError(f"--like={args.like} determines the sizes; leave out {', '.join(given)}")
            shape = sizes(args.like, *SIZES, "vocab")
        return replace(super().settings(args), shape=replace(self.module.SHAPE, **shape))


COMPARED: dict[str, Benchmark] = {
    "attention": Compared(
        "attention",
        "time and peak memory of attention by length, forward and backward",
        (
            "longspan bench attention --lengths 256,512 --rounds 2",
            "longspan bench attention linear linear@native softmax@module linear@module --lengths 4096",
            "longspan bench attention --peers",
        ),
        "linear linear@torch sdpa. A candidate is SPEC, SPEC@BACKEND or sdpa. SPEC@module measures the whole module "
        "with its projections, as does any spec that has no functional form",
    ),
    "step": Compared(
        "step",
        "time of one layer's decode step by batch size, compared with scaling its state in place",
        ("longspan bench step --peers", "longspan bench step kernel linear --batches 64"),
        "kernel linear linear@torch; kernel is the bare native function",
    ),
    "generate": Decoding(
        "decoding",
        "tokens and images per second of whole decoders, by position and batch size",
        ("longspan bench generate --peers", "longspan bench generate linear@plain --positions 784 --images 0"),
        "linear@engine linear@plain linear@engine@bf16 softmax@engine softmax@plain; @engine runs the decode engine, "
        "@plain calls the model layer by layer, @bf16 stores weights in bfloat16",
    ),
}
