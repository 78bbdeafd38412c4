"""``longspan demo``: training, time and memory by length, generation and a Hugging Face layer, on one page."""

from pathlib import Path

from longspan.cli.parser import SEEDS, Parser, make, natural_int, positive_int


def parser() -> Parser:
    parser = make(
        "demo",
        "Show what the library does, in a few minutes: train a linear and a softmax transformer on images of "
        "digits, measure time and memory of four mechanisms by length, draw and complete digits with the model that "
        "comes with longspan, and time a recurrent layer of Hugging Face transformers, if it is installed. Writes a "
        "page, index.html, whose path is the last line printed; its pictures, demo.json and demo.csv are next to it.",
        "longspan demo",
        "longspan demo --out demo --seed 1",
    )
    parser.add_argument("--out", type=str, default="demo", help="folder of the page, the pictures and the figures")
    parser.add_argument("--steps", type=positive_int(), default=200, help="training steps of each of the two models")
    parser.add_argument(
        "--seed", type=natural_int(SEEDS), default=0, help="seed of the weights, the order of the data and the samples"
    )
    return parser


def run(args) -> int:
    from longspan._utils import optional_deps, png, signals

    optional_deps.need("the demo", "lightning", "tensorboard", "sklearn", "matplotlib", "PIL")
    out = Path(args.out)
    png.claim_folder(out)
    from ..experiments import demo

    try:
        demo.run(out, steps=args.steps, seed=args.seed)
    except KeyboardInterrupt as error:
        said = str(error).removesuffix("; continue with resume=True") or f"interrupted; what is trained is in {out}"
        raise signals.with_text(error, f"{said}; the same command goes on from there") from error
    return 0
