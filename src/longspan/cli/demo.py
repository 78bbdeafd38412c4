"""``longspan demo``: linear and softmax attention at equal size, trained on digits and compared."""

from pathlib import Path

from .parser import SEEDS, Parser, make, natural_int, positive_int


def parser() -> Parser:
    parser = make(
        "demo",
        "Train linear and softmax attention at equal size on images of digits, then measure how fast each generates. "
        "Writes demo.json, demo.csv, samples_linear.png, samples_softmax.png and throughput.png.",
        "longspan demo",
        "longspan demo --out demo --seed 1",
    )
    parser.add_argument("--out", type=str, default="demo", help="folder for the figures and the pictures")
    parser.add_argument("--steps", type=positive_int(), default=200, help="training steps of each of the two models")
    parser.add_argument(
        "--seed", type=natural_int(SEEDS), default=0, help="of the weights, the order of the data and the samples"
    )
    return parser


def run(args) -> int:
    from .._utils import optional_deps, png, signals

    optional_deps.need("the demo", "lightning", "tensorboard", "sklearn", "matplotlib", "PIL")
    out = Path(args.out)
    png.claim_folder(out)
    from ..experiments import demo

    try:
        demo.run(out, steps=args.steps, seed=args.seed)
    except KeyboardInterrupt as error:
        said = str(error).removesuffix("; go on with resume") or f"interrupted; what is trained is in {out}"
        raise signals.told(error, f"{said}; the same command goes on from there") from error
    return 0
