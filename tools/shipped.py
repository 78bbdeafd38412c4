"""Turn the best checkpoint of a training run into a model that comes with the package.

    longspan train --config mnist
    python tools/shipped.py runs/mnist --data mnist

writes ``src/longspan/models/mnist``: the weights in bfloat16, and ``record.json``, which holds what they were trained
with, the curve of the training (steps, seconds, validation bits per dim or byte) and what they score. To be run where
the run was made, since the record names the machine. A model of a text likewise:

    longspan train --config text --run.data text:FILE
    python tools/shipped.py runs/text --data text:FILE --about "Tolstoy, War and Peace, in English"
"""

import argparse
import json
import shlex
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from longspan import data
from longspan.bench import throughput
from longspan.data import Dataset
from longspan.experiments import images, provenance
from longspan.generation.sampling import generate, log_likelihood
from longspan.models import checkpoint, pretrained
from longspan.models.config import DecoderConfig
from longspan.states.utils import nbytes
from longspan.train import TrainConfig, bits, recipes
from longspan.train.evaluate import default_batch_size

SAMPLES, SEED, STEPPED, TRAIN, BROKEN, SURE = 500, 0, 100, 20_000, 2000, 0.5
BYTES, TEMPERATURE = 400, 0.7
PROMPTS = ("The prince ", '"My dear," said ', "On the morning of the battle ")
SIZES = (1, 4, 7)  # pixels of a side of the pieces of broken images
# What a run may say otherwise than its recipe: where it reads and writes, not what.
PLACES = ("data", "out")


def ship(run: Path, source: str, name: str = "", samples: int = SAMPLES, about: str = "") -> dict[str, Any]:
    """Write the model that a run's best checkpoint is, under ``name`` (that of its recipe) -> its record.

    ``source``: the data, as ``longspan.data.load`` takes it; ``about``: which they are, in words, where their kind does
    not say it. Raises ValueError for a folder without a training run, for data that it was not trained on, and for a
    text of which nothing is said.
    """
    header = checkpoint.read_config(checkpoint.resolve(run))
    kind = source.partition(":")[0]
    trained_on = header.get("run", {}).get("data", "")
    if trained_on.partition(":")[0] != kind:
        raise ValueError(f"{run} was trained on {trained_on!r}, not on {kind}")
    if kind == "text" and not about:
        raise ValueError("which text was it? Name it by --about, in words; its checksum alone tells nobody")
    name, dataset = name or kind, data.load(source, header["run"]["length"])
    commit = provenance.commit()  # before what is written below changes the folder
    settings = {**header["run"], "data": kind, "out": f"runs/{name}"}
    # What is in the package must not know the folders of the machine that made it.
    checkpoint.save(
        checkpoint.load(run).bfloat16(),
        pretrained.FOLDER / name,
        extra={"run": settings, "step": header["step"]},
    )
    model, curve = pretrained.load(name), images.curve(run)
    record = {
        "command": command(header["config"], settings, name),
        **({"about": about} if about else {}),
        "seed": settings["seed"],
        "commit": commit,
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "data": {kind: dataset.checksum},
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": header["step"],
        "seconds": next(seconds for step, seconds, _ in curve if step == header["step"]),
        "curve": curve,
        f"bits_per_{dataset.unit}": {
            "validation": min(value for _, _, value in curve),
            "test": round(bits(model, dataset, "test", default_batch_size(dataset.length)), 5),
        },
        "stepping": stepping(model, dataset, STEPPED),
        **(drawing(model, dataset, samples) if dataset.grid else writing(model)),
    }
    checkpoint.write_text(pretrained.FOLDER / name / pretrained.RECORD, json.dumps(record, indent=2) + "\n")
    return record


def drawing(model: Any, dataset: Dataset, count: int) -> dict[str, Any]:
    """What a model of images draws, how fast, and what classifiers see in it."""
    drawn = generate(model, max_new_tokens=dataset.length, batch=count, seed=SEED)
    rates = {str(batch): round(batch / throughput.whole(model, dataset.length, batch), 3) for batch in (1, 64)}
    return {"images_per_second": rates, "samples": {"count": count, "seed": SEED, **recognised(drawn, dataset)}}


def writing(model: Any) -> dict[str, Any]:
    """How fast a model of text writes, what it keeps of a text of any length, and what comes of some beginnings."""
    rates = {str(batch): round(batch * BYTES / throughput.whole(model, BYTES, batch), 1) for batch in (1, 64)}
    texts = [continued(model, prompt) for prompt in PROMPTS]
    same = {"seed": SEED, "temperature": TEMPERATURE}
    state = nbytes(model.init_state(1, BYTES).layers)
    return {"bytes_per_second": rates, "state_bytes": state, "samples": {**same, "texts": texts}}


def continued(model: Any, prompt: str) -> str:
    """A beginning and what the model writes after it, as ``longspan generate`` does with the same seed."""
    tokens = torch.tensor([list(prompt.encode())])
    drawn = generate(model, tokens, max_new_tokens=BYTES, temperature=TEMPERATURE, seed=SEED, stream=True)
    return prompt + bytes(int(token) for token in drawn).decode("utf-8", "replace")


def command(config: dict[str, Any], run: dict[str, Any], name: str) -> str:
    """The line that trains the model: its recipe, and what differs from it as flags; a text is a file of one's own."""
    recipe = yaml.safe_load(recipes.find(name).read_text(encoding="utf-8"))
    words = ["longspan", "train", "--config", name, *(["--run.data", "text:FILE"] if run["data"] == "text" else [])]
    for part, fields, asked in (
        ("model", config, asdict(DecoderConfig(**recipe["model"]))),
        ("run", run, asdict(TrainConfig(**recipe["run"]))),
    ):
        for field, value in fields.items():
            if value != asked[field] and not (part == "run" and field in PLACES):
                words += [f"--{part}.{field}", str(value)]
    return shlex.join(words)


def stepping(model: Any, dataset: Dataset, count: int) -> dict[str, Any]:
    """Log-likelihoods of test examples in one parallel pass against those of the RNN: nats per example."""
    tokens = images.examples(dataset, "test", count)
    whole, stepped = log_likelihood(model, tokens), log_likelihood(model, tokens, chunk=1)
    what = "images" if dataset.grid else "examples"
    return {what: count, "largest_difference": (whole - stepped).abs().max().item(), "mean": -whole.mean().item()}


def recognised(drawn: Tensor, dataset: Dataset) -> dict[str, Any]:
    """What classifiers see in images (B,N), and in test images and broken ones beside them.

    ``recognised``: the share that a classifier of ten digits is sure of, by more than a half; ``classes``: how many of
    each digit it takes all of them for. Such a classifier is sure of nearly anything, so ``recognised_strictly`` is by
    one that has also learned to tell images put together from pieces of several: one pixel, 4x4 or 7x7 of them, each
    at its place. ``digits`` and ``broken`` are the same shares of test images, and of test images in pieces.
    """
    test = pixels(dataset.splits["test"])
    kinds = {"samples": pixels(drawn), "digits": test, "broken": in_pieces(test, len(drawn), seed=1)}
    found: dict[str, Any] = {}
    for word, strict in (("recognised", False), ("recognised_strictly", True)):
        judge = classifier(dataset, strict)
        chances = {kind: judge.predict_proba(rows)[:, :10] for kind, rows in kinds.items()}
        found[word] = {kind: float((p.max(1) > SURE).mean()) for kind, p in chances.items()}
        if not strict:
            found["classes"] = np.bincount(chances["samples"].argmax(1), minlength=10).tolist()
            right = chances["digits"].argmax(1) == dataset.labels["test"].numpy()
            found["accuracy_on_digits"] = float(right.mean())
    return found


def classifier(dataset: Dataset, strict: bool) -> Any:
    """A small network of scikit-learn's, trained on the first images; ``strict``: with broken ones as a class."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    rows, labels = pixels(dataset.splits["train"][:TRAIN]), dataset.labels["train"][:TRAIN].numpy()
    if strict:
        broken = in_pieces(rows, BROKEN * len(SIZES), seed=0)
        rows, labels = np.concatenate([rows, broken]), np.concatenate([labels, np.full(len(broken), 10)])
    make: Any = MLPClassifier  # whose annotations are narrower than what it takes
    network = make((128,), batch_size=min(200, len(rows)), max_iter=8, random_state=SEED)
    with warnings.catch_warnings():
        # Eight epochs are enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return network.fit(rows, labels)


def in_pieces(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """``count`` images (count,N) of square pieces, each from an image of its own; the sizes of the pieces in turn."""
    random, side, found = np.random.default_rng(seed), round(rows.shape[1] ** 0.5), []
    pictures = rows.reshape(-1, side, side)
    y, x = np.indices((side, side))
    for i in range(count):
        size = SIZES[i % len(SIZES)]
        across = -(-side // size)
        which = random.integers(0, len(rows), across * across)[y // size * across + x // size]
        found.append(pictures[which, y, x].ravel())
    return np.stack(found)


def pixels(rows: Tensor) -> np.ndarray:
    """Grey levels 0 ... 255 as numbers from 0 to 1."""
    return rows.numpy() / 255


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("--data", default="mnist", help="the data it was trained on: mnist, mnist:FOLDER or text:FILE")
    parser.add_argument("--about", default="", help="of a text: which it is, in words")
    parsed = parser.parse_args(arguments)
    print(json.dumps(ship(parsed.run, parsed.data, about=parsed.about), indent=2))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as problem:
        sys.exit(f"shipped: {problem}")
