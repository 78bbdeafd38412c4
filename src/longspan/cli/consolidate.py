"""``longspan consolidate``: gather the weights of a checkpoint in parts into one file."""

from .parser import Parser, make

MEMORY = "the weights, which must fit into memory"


def parser() -> Parser:
    parser = make(
        "consolidate",
        "Gather the weights of a checkpoint that --run.strategy fsdp has written in parts, one file for each process, "
        "into one file, model.safetensors. A run does so for its best and its last checkpoint when it ends. longspan "
        "eval, generate and resume also read checkpoints in parts. The file is added to the checkpoint; --out writes a "
        "checkpoint with the weights only.",
        "longspan consolidate runs/book",
        "longspan consolidate runs/book --which last --out models/book",
        "longspan consolidate runs/book/checkpoints/step-00001000",
    )
    parser.add_argument("folder", type=str, metavar="RUN", help="training run, or one of its checkpoints")
    parser.add_argument(
        "--which", type=str, choices=("best", "last"), default="best", help="checkpoint of a training run"
    )
    parser.add_text("--out", "FOLDER", "folder for a checkpoint with the weights")
    return parser


def run(args) -> int:
    from ..models import checkpoint, parts

    found = parts.consolidate(checkpoint.resolve(args.folder, prefer=args.which), args.out or None)
    print(f"wrote {found / checkpoint.WEIGHTS}")
    return 0
