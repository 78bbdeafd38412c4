"""``longspan bench``: time and memory, beside other libraries and against the limits of the machine."""

from pathlib import Path

import jsonargparse

from ..._utils.spec import known
from ..parser import Parser, make
from . import compared, own
from .kind import Benchmark

MEMORY = "the sizes and lengths"
BENCHMARKS: dict[str, Benchmark] = compared.COMPARED | own.OWN

COMMON = (
    "Candidates take turns round by round; samples on a busy machine are rejected and counted; figures are medians, "
    "and ratios are of one run. Every candidate first has to agree with a float64 definition; one that does not is "
    "named and gets no figure. Writes a JSON, a CSV and a PNG file; what there is before the end, or is left by Ctrl-C "
    "or SIGTERM, is in KIND.partial.json."
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
    parser = make(
        "bench",
        f"Measure this machine and what runs on it. {COMMON} longspan bench KIND --help has the options of each kind.",
        *(example for kind in BENCHMARKS.values() for example in kind.examples[:1]),
        cls=_Bench,
    )
    lines = ";\n".join(f"{name}: {kind.about}" for name, kind in BENCHMARKS.items())
    parser.add_argument("kind", type=str, help=f"one of: {lines}")
    return parser


def subparser(name: str) -> Parser:
    """The parser of ``longspan bench NAME``."""
    kind = BENCHMARKS[name]
    parser = make(f"bench {name}", f"{kind.about[0].upper()}{kind.about[1:]}. {COMMON}", *kind.examples)
    kind.options(parser)
    parser.add_argument("--out", type=str, default="bench", help="folder for the files")
    return parser


def run(args) -> int:
    from ...bench import report

    out = Path(args.out)
    results, tables = BENCHMARKS[args.kind].measure(args)
    with report.claimed(out, args.kind):
        result = report.collect(out, args.kind, results)
    print(report.show(result, tables))
    endings = [".json", ".csv", ".png"]
    if args.kind == "members":
        from ...bench import members
        from ...models import checkpoint

        checkpoint.write_text(out / "members.md", members.page(result))
        endings.append(".md")
    print(f"Files: {', '.join(str(out / (args.kind + ending)) for ending in endings)}")
    return 1 if any(one["ours"] for one in result.get("refused", [])) else 0
