"""``longspan linearize``: turn a model with softmax attention into a linear or hybrid one."""

from typing import Any

from .._utils import signals
from .parser import SEEDS, Number, Parser, make, natural_int, number, positive_int

MEMORY = "--batch or --length"


def parser() -> Parser:
    parser = make(
        "linearize",
        "Turn a trained model with softmax attention into a linear or hybrid one. The weights are carried over; each "
        "converted layer learns the outputs of the model's layer; then the whole model learns the model's distribution "
        "of the next token, or an encoder's embeddings of texts.\n\nThe folder gets a run for each stage, the report "
        "(report.json, report.md, report.png) and the result, model/, which other commands take. Ctrl-C, SIGTERM or "
        "SIGHUP saves a checkpoint and stops; the same command with --resume continues, bit for bit as if it had not "
        "stopped.",
        "longspan linearize runs/softmax --data text:book.txt --out runs/linear",
        'longspan linearize runs/softmax --attention "hedgehog(window=64)" --keep 2 --data tokens:data/books',
        'longspan linearize runs/softmax --attention "gated_deltanet; gated_deltanet; softmax" --data text:book.txt',
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, a checkpoint, a pretrained model, or a folder of transformers with a Llama, Qwen3, GPT-2, BERT, "
        "RoBERTa or ModernBERT, or of sentence-transformers",
    )
    parser.add_argument(
        "--data", type=str, required=True, metavar="DATA", help="a text or tokens: text:PATH, tokens:FOLDER"
    )
    parser.add_argument(
        "--attention",
        type=str,
        default="hedgehog",
        metavar="SPEC",
        help="what softmax layers become: one spec, or several separated by ';' and tiled over these layers; softmax "
        "keeps a layer, and other layers stay. Options that a spec leaves out take the sizes and the rotary positions "
        "of the model's layer",
    )
    parser.add_argument(
        "--keep",
        type=natural_int(),
        default=0,
        metavar="N",
        help="keep N further softmax layers: those whose conversion is measured to cost most after the first stage",
    )
    parser.add_argument(
        "--keep_layers", type=str, default="", metavar="LAYERS", help="keep these layers, such as 0,5; from 0"
    )
    parser.add_argument("--out", type=str, default="runs/linearized", metavar="DIR", help="folder of the result")
    parser.add_argument("--resume", action="store_true", help="continue the linearization in --out")
    parser.add_argument("--length", type=natural_int(10**6), default=0, help="tokens per example; 0: as in training")
    parser.add_argument("--layer_steps", type=natural_int(), default=500, help="steps of the first stage; 0: none")
    parser.add_argument("--steps", type=positive_int(), default=1000, help="steps of the second stage")
    parser.add_argument(
        "--layer_learning_rate", type=number(1e3), default=1e-3, help="peak learning rate of the first stage"
    )
    parser.add_argument("--learning_rate", type=number(1e3), default=3e-4, help="that of the second stage")
    parser.add_argument(
        "--text", type=Number(float, 0.0, 1.0), default=0.0, help="share of the loss on the text in the second stage"
    )
    parser.add_argument(
        "--tokens", type=Number(float, 0.0, 1.0), default=0.5, help="share of an encoder's loss on outputs of tokens"
    )
    parser.add_argument(
        "--positions",
        type=natural_int(10**6),
        default=0,
        metavar="N",
        help="learned positions of an encoder's student, which repeat the model's; 0: as many",
    )
    parser.add_argument("--batch", type=positive_int(10**6), default=32, help="examples per micro-batch")
    parser.add_argument("--accumulate", type=positive_int(), default=1, help="micro-batches per step")
    parser.add_argument("--schedule", choices=("cosine", "constant", "wsd"), default="cosine", help="as run.schedule")
    parser.add_argument("--warmup", type=natural_int(), default=0, help="steps of linear warm-up in each stage")
    parser.add_argument("--weight_decay", type=number(1e3), default=0.0, help="decoupled weight decay of matrices")
    parser.add_argument("--precision", choices=("32", "bf16"), default="32", help="bf16: autocast")
    parser.add_argument("--evaluate_every", type=positive_int(), default=200, help="steps between evaluations")
    parser.add_argument(
        "--evaluate_examples", type=natural_int(), default=0, help="examples per evaluation; 0: the whole split"
    )
    parser.add_argument("--seed", type=natural_int(SEEDS), default=0, help="seed of new weights and the order of rows")
    return parser


def run(args: Any) -> int:
    from ..linearize import KIND, LinearizeConfig, linearize, report
    from ..serving import hub
    from ..train.config import TrainConfig
    from . import trained

    config = LinearizeConfig(
        source=args.model,
        attention=args.attention,
        keep=args.keep,
        keep_layers=_numbers(args.keep_layers),
        layer_steps=args.layer_steps,
        layer_learning_rate=args.layer_learning_rate,
        text=args.text,
        tokens=args.tokens,
        positions=args.positions,
    )
    if hub.is_foreign(args.model):
        from ..compat.transformers import load_any

        found = trained.Trained(load_any(args.model), args.data, 0, "")
    else:
        found = trained.teacher(args.model, args.data)
    data = trained.dataset(found, args.length)
    settings = TrainConfig(
        data=KIND,
        length=data.length,
        steps=args.steps,
        batch=args.batch,
        accumulate=args.accumulate,
        learning_rate=args.learning_rate,
        schedule=args.schedule,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        precision=args.precision,
        evaluate_every=args.evaluate_every,
        evaluate_examples=args.evaluate_examples,
        save_every=args.evaluate_every,
        seed=args.seed,
        out=args.out,
    )
    try:
        result = linearize(found.model, data, config, settings, resume=args.resume)
    except KeyboardInterrupt as error:
        text = str(error).replace("continue with resume=True", "continue with the same command and --resume")
        raise signals.with_text(error, text or "interrupted") from error
    print(report.read(result.folder))
    print(f"{result.folder / 'model'}: {result.attention}")
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    """Layers separated by commas. Raises ValueError."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if odd := [word for word in words if not word.isdecimal()]:
        raise ValueError(f"--keep-layers={text!r} must be layers separated by commas, such as 0,5, not {odd[0]!r}")
    return tuple(map(int, words))
