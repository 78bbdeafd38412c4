"""Adapt a model to a new domain from few examples: the held-out loss of LoRA and of tuned states, with equal data.

    python examples/few_examples.py
    python examples/few_examples.py --model runs/book --rates 0.001 0.01 --epochs 20

The domain is Python code: beginnings of modules of the standard library. Each method reads the same examples in one
order, once for each of the learning rates. The rate and the checkpoint are chosen on further examples, and the loss is
that of others again.
It requires pip install ".[train,lora]".
"""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from longspan.cli.serve import loaded
from longspan.data import text
from longspan.finetune import CompletionLoss, FinetuneConfig, Tuned, finetune, load, start_of
from longspan.train import TrainConfig

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="text", help="a model of longspan with text")
parser.add_argument("--examples", type=int, default=50, help="examples to learn from")
parser.add_argument("--bytes", type=int, default=400, help="bytes of an example")
parser.add_argument("--epochs", type=int, default=10, help="times that the examples are read")
parser.add_argument("--rates", type=float, nargs="+", help="learning rates; by default several for each method")
parser.add_argument("--rank", type=int, default=8, help="rank of LoRA")
args = parser.parse_args()

RATES, BATCH = {"lora": (1e-3, 3e-3, 1e-2, 3e-2), "state": (3e-2, 1e-1, 3e-1, 1.0, 3.0)}, 5
beginnings = [content[: args.bytes].decode("utf-8", "ignore") for content in text.documents_of("stdlib")]
beginnings = [words for words in beginnings if len(words) > args.bytes // 2]
# Neighbours are in different parts, so that these are alike.
parts = {"train": beginnings[::4], "validation": beginnings[1::4], "test": beginnings[2::4]}
parts = {name: some[: args.examples if name == "train" else 100] for name, some in parts.items()}


def rows(folder, codec, model):
    """All parts as packed rows: the splits train, validation and test."""
    found = {}
    for name, some in parts.items():
        (folder / name).mkdir(exist_ok=True)
        for i, words in enumerate(some):
            (folder / name / f"{i:03}.txt").write_text(words, encoding="utf-8")
        options = {"vocab": codec.vocab, "start": start_of(model), "every": False, "packed": True}
        found[name] = load(str(folder / name), codec, length=2 * args.bytes, held=0.0, **options)
    return replace(found["train"], splits={name: one.splits["train"] for name, one in found.items()})


with tempfile.TemporaryDirectory() as name:
    folder, found, before = Path(name), {}, 0.0
    for method in RATES:
        for rate in args.rates or RATES[method]:
            model, codec, *_ = loaded(args.model, "")
            data = rows(folder, codec, model)
            steps = args.epochs * -(-data.count("train") // BATCH)
            options = {"steps": steps, "batch": BATCH, "learning_rate": rate, "evaluate_every": max(1, steps // 10)}
            run = TrainConfig(data=data.name, logger="csv", out=str(folder / f"{method}-{rate}"), **options)
            before = CompletionLoss(run, data).score(Tuned(model, FinetuneConfig(method="state")), "test")["bits"]
            config = FinetuneConfig(source=args.model, method=method, rank=args.rank)
            result = finetune(model, data, config, run, progress=False)
            print(f"{method}, learning rate {rate:g}: {result.bits}, {result.seconds:.0f} s", flush=True)
            found[method] = min(found.get(method, (9e9, 0, 0)), (result.bits["validation"], rate, result.bits["test"]))
    print(f"{len(parts['train'])} examples of {args.bytes} bytes, {args.epochs} epochs; bits per token on others:")
    print(f"before {before:.4f}")
    for method, (_, rate, bits) in found.items():
        print(f"{method} {bits:.4f}, {before - bits:.4f} less; learning rate {rate:g}")
    share = (before - found["state"][2]) / (before - found["lora"][2])
    print(f"tuned states have {share:.0%} of the reduction of LoRA")
