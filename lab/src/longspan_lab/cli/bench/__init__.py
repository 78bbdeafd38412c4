"""``longspan bench``: time and memory of mechanisms, other libraries and the machine."""

from pathlib import Path

import jsonargparse

from longspan._utils import terminal
from longspan._utils.spec import known
from longspan.cli.parser import Parser, make

from . import compared, own
from .kind import Benchmark

MEMORY = "the sizes and lengths"
BENCHMARKS: dict[str, Benchmark] = compared.COMPARED | own.OWN

COMMON = (
    "Candidates are timed in turns, round by round, and figures are medians. Samples taken while the machine is busy "
    "are rejected and counted. Each candidate is first checked against a float64 reference; one that disagrees is "
    "reported and not timed. Ratios compare candidates of the same run.\n\nWrites KIND.json, KIND.csv and KIND.png. "
    "Results so far are in KIND.partial.json, also after Ctrl-C or SIGTERM."
)


class _Bench(Parser):
    def read(self, words: list[str]) -> jsonargparse.Namespace:
        if not words or words[0].startswith("-"):
            return super().read(words)
        kind = known(words[0], BENCHMARKS, "benchmark")
        args = subparser(kind).read(words[1:])
        args.kind = kind
        return args


def parser() -> Parser:
    lines = "\n".join(f"  {name}: {kind.about}" for name, kind in BENCHMARKS.items())
    parser = make(
        "bench",
        f"Measure time and memory on this machine. {COMMON}\n\nlongspan bench KIND --help prints the options of a "
        f"kind. Kinds:\n\n{lines}",
        *(example for kind in BENCHMARKS.values() for example in kind.examples[:1]),
        cls=_Bench,
    )
    parser.add_argument("kind", type=str, metavar="KIND", help="a kind of benchmark")
    return parser


def subparser(name: str) -> Parser:
    """The parser of ``longspan bench NAME``."""
    kind = BENCHMARKS[name]
    parser = make(f"bench {name}", f"{kind.about[0].upper()}{kind.about[1:]}. {COMMON}", *kind.examples)
    kind.options(parser)
    parser.add_text("--out", "DIR", "output directory", default="bench")
    return parser


def run(args) -> int:
    from ...bench import report

    out = Path(args.out)
    results, tables = BENCHMARKS[args.kind].measure(args)
    with report.claimed(out, args.kind):
        result = report.collect(out, args.kind, results)
    print(report.show(result, tables, terminal.columns()))
    endings = [".json", ".csv", ".png"]
    if args.kind == "members":
        from longspan.models import checkpoint

        from ...bench import members

        checkpoint.write_text(out / "members.md", members.page(result))
        endings.append(".md")
    print(f"Files: {', '.join(str(out / (args.kind + ending)) for ending in endings)}")
    return 1 if any(one["ours"] for one in result.get("refused", [])) else 0
