"""Train a small softmax transformer on text, and turn it into linear and hybrid ones with a part of its tokens.

    python examples/linearize.py
    python examples/linearize.py --size large --text book.txt --out runs/linearize

For each student it prints the loss after each stage, and that of the same architecture trained from scratch on as many
tokens as the student. The share recovered is that of the gap between ``linear`` trained from scratch on all tokens and
the teacher. A second run resumes the first. ``--size`` chooses width, depth and steps; ``large`` has 10 million weights
and takes one to two hours of one core with ``--precision bf16``.
"""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import longspan
from longspan import data
from longspan.linearize import LinearizeConfig, linearize, plan
from longspan.train import TrainConfig, begun, fit


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its training."""

    dim: int
    depth: int
    heads: int
    length: int
    batch: int
    steps: int
    rate: float


SIZES = {
    "tiny": Size(dim=16, depth=2, heads=2, length=32, batch=2, steps=20, rate=3e-3),
    "small": Size(dim=64, depth=2, heads=4, length=128, batch=8, steps=800, rate=4e-3),
    "large": Size(dim=320, depth=6, heads=5, length=256, batch=4, steps=1500, rate=1e-3),
}
SPECS = "linear | hedgehog | hedgehog(window=16) | gated_deltanet | hedgehog(window=16); softmax"

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", default="stdlib", help="a file or folder; default: Python's own library")
parser.add_argument("--size", choices=SIZES, default="small", help="default: %(default)s")
parser.add_argument("--specs", default=SPECS, help="one or more students, separated by |; default: %(default)s")
parser.add_argument("--share", type=float, default=0.05, help="tokens of a student, as a share of the teacher's")
parser.add_argument("--keep", type=int, default=0, help="softmax layers that each student keeps, chosen by measurement")
parser.add_argument("--precision", choices=("32", "bf16"), default="32", help="default: %(default)s")
parser.add_argument("--out", default="runs/linearize", help="folder of all runs; default: %(default)s")
args = parser.parse_args()
size, out = SIZES[args.size], Path(args.out)

config = longspan.DecoderConfig(
    dim=size.dim, depth=size.depth, heads=size.heads, feedforward=4 * size.dim, attention="softmax",
    positions="rotary", norm="rms", activation="swiglu", vocab=256,
)  # fmt: skip
run = TrainConfig(
    data=f"text:{args.text}", length=size.length, steps=size.steps, batch=size.batch, learning_rate=size.rate,
    warmup=min(50, size.steps // 10), weight_decay=0.1, evaluate_every=size.steps, save_every=max(1, size.steps // 4),
    evaluate_examples=128, precision=args.precision, logger="csv",
)  # fmt: skip


def trained(config: longspan.DecoderConfig, name: str, run: TrainConfig) -> float:
    """Train a model from scratch, or what is left of it -> bits per byte of the test part."""
    folder = out / name
    return fit(config, replace(run, out=str(folder)), resume=begun(folder)).bits["test"]


# Students read smaller batches, for more steps with few tokens.
small = max(1, size.batch // 4)
few = max(2, round(args.share * size.steps * size.batch / small))
short = replace(run, batch=small, warmup=few // 20, evaluate_every=few, save_every=few)
stages = replace(short, weight_decay=0.0, learning_rate=size.rate / 4)
best = trained(config, "teacher", run)
teacher, text = longspan.load(out / "teacher"), data.load(run.data, size.length)
worst = trained(plan(teacher, "linear").config, "linear", run)
print(
    f"{size.steps * size.batch * size.length:,} tokens: teacher {best:.4f} bits/byte, linear from scratch {worst:.4f}"
)
print(f"{few * small * size.length:,} tokens:")
rows: list[tuple[str, ...]] = [("student", "carried over", "layers", "logits", "recovered", "from scratch")]
for i, spec in enumerate(args.specs.split("|")):
    job = LinearizeConfig(attention=spec.strip(), keep=args.keep, layer_steps=few // 2, layer_learning_rate=size.rate)
    folder = out / f"student-{i}"
    half = replace(stages, steps=few - few // 2, out=str(folder))
    found = linearize(teacher, text, job, half, resume=folder.exists())
    scratch = trained(longspan.load(folder / "model").config, f"scratch-{i}", replace(short, steps=few))
    bits = [found.losses[name] for name in ("carried over", "layers", "logits")]
    share = (worst - found.losses[found.best]) / (worst - best)
    rows.append((found.attention, *(f"{value:.4f}" for value in bits), f"{share:.1%}", f"{scratch:.4f}"))
widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
for row in rows:
    print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)))
