"""``longspan cite``: BibTeX of the papers behind specs and trained models."""

from pathlib import Path

from ..attention import citation, specs
from .parser import Parser, make

ATTENTIONS = ("encoder_attention", "cross_attention", "attention")


def parser() -> Parser:
    parser = make(
        "cite",
        "BibTeX of the papers behind mechanisms, stacks of them, and trained models.",
        "longspan cite linear",
        'longspan cite "linear; softmax"',
        "longspan cite runs/digits",
    )
    parser.add_argument(
        "specs", nargs="+", type=str, metavar="SPEC", help="a spec, a stack of specs, or the folder of a trained model"
    )
    return parser


def run(args) -> int:
    from ..models import checkpoint

    found = []
    for text in args.specs:
        # A spec has no slash outside brackets, so that a folder that is not there is told from a misspelt name.
        if Path(text).is_dir() or "/" in text.partition("(")[0]:
            config = checkpoint.read_config(checkpoint.resolve(text))["config"]
            # An encoder-decoder has three.
            text = "; ".join(config[name] for name in ATTENTIONS if name in config)
        found += [cls for _, cls in specs.parts(text)]
    print("\n\n".join(dict.fromkeys(citation.bibtex(cls) for cls in found)))
    return 0
