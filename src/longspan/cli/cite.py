"""``longspan cite``: BibTeX for the papers behind specs and trained models."""

from pathlib import Path

from .parser import Parser, make, model_help

ATTENTIONS = ("encoder_attention", "cross_attention", "attention")


def parser() -> Parser:
    parser = make(
        "cite",
        "Print BibTeX for the papers behind mechanisms, stacks or trained models. Each paper is printed once.",
        "longspan cite linear",
        'longspan cite "linear; softmax"',
        "longspan cite runs/digits",
    )
    parser.add_argument(
        "specs", nargs="+", type=str, metavar="SPEC|MODEL", help=f"a spec, several separated by ';', or {model_help()}"
    )
    return parser


def run(args) -> int:
    from ..attention import citation, specs
    from ..models import checkpoint

    found = []
    for text in args.specs:
        # A spec has no slash outside brackets; a missing folder is reported as such, not as an unknown name.
        if Path(text).is_dir() or "/" in text.partition("(")[0]:
            config = checkpoint.read_config(checkpoint.resolve(text))["config"]
            # An encoder-decoder has three attentions.
            text = "; ".join(config[name] for name in ATTENTIONS if name in config)
        found += [cls for _, cls in specs.parts(text)]
    print("\n\n".join(dict.fromkeys(citation.bibtex(cls) for cls in found)))
    return 0
