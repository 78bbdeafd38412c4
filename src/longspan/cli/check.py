"""``longspan check``: the laws that every attention keeps, measured."""

from .parser import SEEDS, Parser, make, natural_int


def parser() -> Parser:
    parser = make(
        "check",
        "Measure the laws that every attention keeps: each with its largest error, the error allowed, and whether it "
        "passed, failed or does not apply, and why. The exit code is 1 if one failed.",
        "longspan check linear",
        'longspan check "linear; softmax"',
        'longspan check linear --stack "universal(steps=3)"',
    )
    parser.add_argument("spec", type=str, help="a spec or a stack of specs")
    parser.add_argument(
        "--stack",
        type=str,
        default="",
        help="how blocks around them are run: plain, universal(steps=3), act(steps=4), "
        "reversible; without it one attention is measured by itself",
    )
    parser.add_argument("--seed", type=natural_int(SEEDS), default=0, help="of the random weights and inputs")
    return parser


def run(args) -> int:
    from .. import testing
    from .._utils.progress import track

    # A mistake in the spec is reported before any progress is.
    subject = testing.Subject(args.spec, args.seed, args.stack)
    subject.make()
    laws = testing.laws()
    rows = [testing.check(law, args.spec, seed=args.seed, stack=args.stack) for law in track(laws, len(laws), "laws")]
    report = testing.Report(subject.named, tuple(rows))
    print(report)
    return 0 if report.ok else 1
