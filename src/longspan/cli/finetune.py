"""``longspan finetune``: adapt a trained model to texts, pairs or chats."""

import dataclasses
import math
from typing import Any

import jsonargparse

from .._utils import signals
from .parser import SEEDS, Number, Parser, make, natural_int, number, positive_int

MEMORY = "--batch or --length"
OWN: set[str | int] = {"source", "checkpointing"}  # fields of ``FinetuneConfig`` that are not flags of the same kind


def parser() -> Parser:
    from ..finetune import FinetuneConfig

    parser = make(
        "finetune",
        "Adapt a trained model to texts, pairs or chats. DATA is a text, a folder of .txt, .md and .jsonl files, or a "
        '.jsonl file with an object on each line: {"prompt": ..., "completion": ...}, {"messages": [...]}, which the '
        'chat template of the model renders, or {"text": ...}. The loss is that of completions, and of the turns of '
        "the assistant.\n\nThe run directory gets the metrics, the checkpoints and the result: adapter/, an adapter of "
        "peft; adapter.safetensors, a state adapter; or model/, a whole model, which other commands take. Ctrl-C, "
        "SIGTERM or SIGHUP saves a checkpoint and stops; the same command with --resume continues, bit for bit as if "
        "the run had not stopped.",
        "longspan finetune ./Qwen3.5-0.8B --data chats.jsonl --out runs/support --merge",
        "longspan finetune text --data letters.txt --method state --out runs/letters",
        "longspan finetune ./mamba2-370m --data pairs.jsonl --weights int8 --precision bf16 --checkpointing",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a run, a checkpoint, the pretrained model text, a GGUF file, or a folder with a config.json of "
        "transformers",
    )
    parser.add_argument("--data", type=str, required=True, metavar="DATA", help="a file or a folder")
    parser.add_argument("--out", type=str, default="runs/finetuned", metavar="DIR", help="run directory")
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in --out")
    # The docstrings under the fields become the help of the flags.
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser.add_class_arguments(FinetuneConfig, skip=OWN)
    parser.numbers.update(rank=positive_int(65536), alpha=positive_int(10**6))
    parser.add_argument("--merge", action="store_true", help="with lora: also write the whole model, to model/")
    parser.add_argument(
        "--loss",
        choices=("completions", "all"),
        default="completions",
        help="whether prompts, and turns of the user, have a loss too",
    )
    parser.add_argument(
        "--validation",
        type=Number(float, 0.0, 0.9),
        default=0.1,
        help="share of the sequences that is held out; 0: validate on those of training",
    )
    parser.add_argument(
        "--length",
        type=positive_int(10**6),
        default=1024,
        help="tokens of a row, which several sequences share without reading each other",
    )
    parser.add_argument("--epochs", type=Number(float, 0.0, 1e6), default=3.0, help="times that all rows are read")
    parser.add_argument("--steps", type=natural_int(), default=0, help="optimizer steps in place of --epochs")
    parser.add_argument("--batch", type=positive_int(10**6), default=4, help="rows per micro-batch")
    parser.add_argument("--accumulate", type=positive_int(), default=1, help="micro-batches per step")
    parser.add_argument(
        "--learning_rate",
        type=number(1e3),
        default=None,
        help="peak learning rate; by default 3e-4 for lora, 2e-5 for full, 0.1 for state",
    )
    parser.add_argument("--schedule", choices=("cosine", "constant", "wsd"), default="cosine", help="as run.schedule")
    parser.add_argument("--warmup", type=natural_int(), default=0, help="steps of linear warm-up")
    parser.add_argument("--weight_decay", type=number(1e3), default=0.0, help="decoupled weight decay of matrices")
    parser.add_argument(
        "--precision", choices=("32", "bf16"), default="32", help="bf16: autocast; frozen weights stay as they are"
    )
    parser.add_argument(
        "--checkpointing", action="store_true", help="save memory: store the inputs of blocks, compute them again"
    )
    parser.add_argument("--evaluate_every", type=natural_int(), default=0, help="steps; 0: after each epoch")
    parser.add_argument("--seconds", type=number(1e9), default=0.0, help="stop after this time; 0: no limit")
    parser.add_argument("--seed", type=natural_int(SEEDS), default=0, help="seed of changes and of the order of rows")
    return parser


def run(args: Any) -> int:
    from .. import finetune as tuning
    from ..finetune import FinetuneConfig
    from ..finetune.completions import KIND
    from ..train.config import TrainConfig
    from .serve import loaded

    given = {field.name: args[field.name] for field in dataclasses.fields(FinetuneConfig) if field.name not in OWN}
    if args.merge and (args.weights or args.method != "lora"):
        raise ValueError("--merge requires --method lora without --weights")
    config = FinetuneConfig(source=args.model, checkpointing=args.checkpointing, **given)
    model, codec, *_ = loaded(args.model, "")
    if codec is None:
        raise ValueError(f"{args.model} has no text, and a fine-tuning learns from texts")
    data = tuning.load(
        args.data,
        codec,
        vocab=codec.vocab,
        start=tuning.start_of(model),
        length=args.length,
        held=args.validation,
        every=args.loss == "all",
        packed=tuning.can_pack(model),
    )
    epoch = data.count("train") / (args.batch * args.accumulate)
    steps = args.steps or max(1, math.ceil(args.epochs * epoch))
    every = args.evaluate_every or max(1, math.ceil(epoch))
    settings = TrainConfig(
        data=f"{KIND}:{args.data}",
        length=args.length,
        steps=steps,
        batch=args.batch,
        accumulate=args.accumulate,
        learning_rate=tuning.METHODS[args.method] if args.learning_rate is None else args.learning_rate,
        schedule=args.schedule,
        warmup=args.warmup,
        weight_decay=args.weight_decay,
        precision=args.precision,
        evaluate_every=every,
        save_every=every,
        seconds=args.seconds,
        seed=args.seed,
        out=args.out,
    )
    try:
        result = tuning.finetune(model, data, config, settings, merge=args.merge, resume=args.resume)
    except KeyboardInterrupt as error:
        text = str(error).replace("continue with resume=True", "continue with the same command and --resume")
        raise signals.with_text(error, text or "interrupted") from error
    bits = result.bits["validation"]
    print(f"{result.folder}: {result.steps} steps, {result.seconds:.1f} s, {bits:.3f} bits/token on validation")
    return 0
