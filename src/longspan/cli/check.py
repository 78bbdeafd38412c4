"""``longspan check``: the conformance checks."""

from .._utils import terminal
from .parser import SEEDS, Parser, make, natural_int

INDENT = 4


def parser() -> Parser:
    parser = make(
        "check",
        "Run the conformance checks on an attention or a stack. Each line has the name of a check, its result, the "
        "largest error and the tolerance. A check that does not apply has the reason instead. The exit code is 1 if a "
        "check failed.",
        "longspan check linear",
        'longspan check "linear; softmax"',
        'longspan check linear --stack "universal(steps=3)"',
        "longspan check linear --device cuda",
    )
    parser.add_argument("spec", type=str, metavar="SPEC", help="a spec, or several separated by ';' for a stack")
    parser.add_text(
        "--stack",
        "STACK",
        "check a whole stack that runs its blocks in this way: plain, universal(steps=3), act(steps=4) or "
        "reversible; by default a single spec is checked alone",
    )
    parser.add_text(
        "--device",
        "DEVICE",
        "device that runs the checks: cpu, cuda, cuda:1, ...; it needs float64 numbers",
        default="cpu",
    )
    parser.add_argument("--seed", type=natural_int(SEEDS), default=0, help="seed of the random weights and inputs")
    return parser


def run(args) -> int:
    from .. import testing
    from .._utils.progress import track

    # Build first, so that a mistake in the spec is reported before the progress bar starts.
    subject = testing.Subject(args.spec, args.seed, args.stack, args.device)
    subject.make()
    laws = testing.laws()
    rows = [
        testing.check(law, args.spec, seed=args.seed, stack=args.stack, device=args.device)
        for law in track(laws, len(laws), "checks")
    ]
    report = testing.Report(subject.named, tuple(rows))
    print(show(report))
    return 0 if report.ok else 1


def show(report) -> str:
    """The report as text that fits the terminal: a line for each check, and what it checks below."""
    width = max(len(row.law) for row in report.rows)
    lines = [report.spec]
    for row in report.rows:
        error = f"{row.error:.1e} of {row.tolerance:.0e}" if row.status == "passed" and row.tolerance else ""
        lines.append(f"  {row.law:<{width}}  {row.status:<14}  {error}".rstrip())
        beyond = f" Beyond: {row.excused:.1e}, from amplified rounding of the data." if row.excused else ""
        lines += terminal.wrapped(f"{row.note}{beyond}".replace("``", ""), INDENT)
    return "\n".join(lines)
