"""Turn the best checkpoint of a training run into a model that ships with the package.

    longspan train --config mnist
    python -m longspan_lab.tools shipped runs/mnist --data mnist

writes ``src/longspan/models/pretrained/mnist``: the weights in bfloat16, and ``record.json`` with the settings of the
training, its curve (steps, seconds, validation bits per dim, byte or token) and the test scores. Run it on the machine
of the training, because the record names the machine. For a model of text:

    longspan train --config text --run.data text:FILE
    python -m longspan_lab.tools shipped runs/text --data text:FILE --about "Tolstoy, War and Peace, in English"

For one of tokens, here with weights of 8 bits and words of which each text begins with one:

    longspan train --config poems
    python -m longspan_lab.tools shipped runs/poems --data tokens:poems/tokens --name poems --weights int8 \\
        --forms 五絕 七絕 五律 七律 詩 --about "Poems of Tang and Song" --license package/LICENSE --cpu-seconds 3000
"""

import argparse
import json
import math
import shlex
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from torch import Tensor

from longspan import data
from longspan.data import Dataset
from longspan.generation.sampling import generate, log_likelihood
from longspan.models import checkpoint, pretrained
from longspan.models.config import DecoderConfig
from longspan.models.quantization import WEIGHTS, quantize
from longspan.serving import hub
from longspan.serving.text import Bytes, decoded
from longspan.serving.tokenized import Tokenized
from longspan.states.utils import nbytes
from longspan.train import TrainConfig, bits, recipes
from longspan.train.evaluate import default_batch_size
from longspan.train.streaming_eval import apart

from ..bench import throughput
from ..experiments import images, learning, provenance

SAMPLES, SEED, STEPPED, TRAIN, BROKEN, SURE = 500, 0, 100, 20_000, 2000, 0.5
BYTES, TEMPERATURE = 400, 0.7
PROMPTS = ("The prince ", '"My dear," said ', "On the morning of the battle ")
SIZES = (1, 4, 7)  # pixels of a side of the pieces of broken images
# Fields that may differ from the recipe: the places that a run reads and writes.
PLACES = ("data", "out")


def ship(
    run: Path, source: str, name: str = "", samples: int = SAMPLES, about: str = "", weights: str = "", **more: Any
) -> dict[str, Any]:
    """Write a run's best checkpoint as the model ``name`` (default: its recipe's) and return the record.

    ``source``: the data, as for ``longspan.data.load``; ``about``: a description, required for texts; ``weights``: as
    in ``longspan.quantize``, by default bfloat16; ``more``: further entries of the record, such as ``forms``. Raises
    ValueError for a folder without a training run, for data of another kind than the training's, and for texts without
    a description.
    """
    header = checkpoint.read_config(checkpoint.resolve(run))
    kind = source.partition(":")[0]
    trained_on = header.get("run", {}).get("data", "")
    if trained_on.partition(":")[0] != kind:
        raise ValueError(f"{run} was trained on {trained_on!r}, not on {kind}")
    if kind in ("text", "tokens") and not about:
        raise ValueError("a text needs a description: pass --about, for example --about 'Tolstoy, War and Peace'")
    name, dataset = name or kind, data.load(source, header["run"]["length"])
    commit = provenance.commit()  # before the files below change the folder
    settings = {**header["run"], "data": kind, "out": f"runs/{name}"}
    # The package must not contain folder names of this machine.
    model = checkpoint.load(run)
    parameters = sum(p.numel() for p in model.parameters())
    if weights:
        quantize(model, weights)
    checkpoint.save(
        model if weights else model.bfloat16(),
        pretrained.FOLDER / name,
        extra={"run": settings, "step": header["step"]},
    )
    model, curve = pretrained.load(name), learning.curve(run)
    record = {
        "command": command(header["config"], settings, name),
        **({"about": about} if about else {}),
        **({"weights": weights} if weights else {}),
        **more,
        "seed": settings["seed"],
        "commit": commit,
        "versions": provenance.versions(),
        "machine": provenance.machine(),
        "data": {kind: dataset.checksum},
        "parameters": parameters,
        "steps": header["step"],
        "seconds": next(seconds for step, seconds, _ in curve if step == header["step"]),
        "curve": curve,
        f"bits_per_{dataset.unit}": {
            "validation": min(value for _, _, value in curve),
            "test": round(tested(model, dataset, settings["segments"]), 5),
        },
        "stepping": stepping(model, dataset, STEPPED),
        **(drawing(model, dataset, samples) if dataset.grid else writing(model, dataset.unit, more.get("forms", ()))),
    }
    checkpoint.write_text(
        pretrained.FOLDER / name / pretrained.RECORD, json.dumps(record, indent=2, ensure_ascii=False) + "\n"
    )
    return record


def tested(model: Any, dataset: Any, segments: bool) -> float:
    """Bits per dim, byte or token of the test split, with documents kept apart if the training did."""
    batch = default_batch_size(dataset.length, dataset.vocab)
    if not segments:
        return bits(model, dataset, "test", batch)
    nats, tokens = apart(model, dataset, "test", batch).tolist()
    return nats / tokens / math.log(2)


def drawing(model: Any, dataset: Dataset, count: int) -> dict[str, Any]:
    """Measure a model of images: speed, and what classifiers see in its samples."""
    drawn = generate(model, max_new_tokens=dataset.length, batch=count, seed=SEED)
    rates = {str(batch): round(batch / throughput.whole(model, dataset.length, batch), 3) for batch in (1, 64)}
    return {"images_per_second": rates, "samples": {"count": count, "seed": SEED, **recognised(drawn, dataset)}}


def writing(model: Any, unit: str, forms: Sequence[str] = ()) -> dict[str, Any]:
    """Measure a model of text: speed, bytes of the state, and continuations of some prompts."""
    rates = {str(batch): round(batch * BYTES / throughput.whole(model, BYTES, batch), 1) for batch in (1, 64)}
    texts = [continued(model, prompt) for prompt in [f"{form}《春夜》\n" for form in forms] or PROMPTS]
    same = {"seed": SEED, "temperature": TEMPERATURE}
    state = nbytes(model.init_state(1, BYTES).layers)
    return {f"{unit}s_per_second": rates, "state_bytes": state, "samples": {**same, "texts": texts}}


def continued(model: Any, prompt: str) -> str:
    """Return a prompt and its continuation, as ``longspan generate`` with the same seed."""
    codec = Tokenized(model.tokenizer, ends=hub.ends(model.tokenizer, "")) if model.tokenizer else Bytes()
    tokens = torch.tensor([codec.encode(prompt)])
    end = next(iter(codec.ends), None)
    drawn = generate(model, tokens, max_new_tokens=BYTES, temperature=TEMPERATURE, seed=SEED, stop=end)
    return prompt + decoded(codec, drawn[0].tolist())


def command(config: dict[str, Any], run: dict[str, Any], name: str) -> str:
    """Return the command that trains the model: its recipe, with flags for differing fields; a text is your file."""
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
    """Compare log-likelihoods of test examples in one parallel pass and step by step: nats per example."""
    tokens = images.examples(dataset, "test", count)
    whole, stepped = log_likelihood(model, tokens), log_likelihood(model, tokens, chunk=1)
    what = "images" if dataset.grid else "examples"
    return {what: count, "largest_difference": (whole - stepped).abs().max().item(), "mean": -whole.mean().item()}


def recognised(drawn: Tensor, dataset: Dataset) -> dict[str, Any]:
    """Classify images (B,N), and for comparison test images and broken ones.

    ``recognised``: the share to which a classifier of ten digits gives more than one half; ``classes``: the number of
    images per digit. Such a classifier is sure of nearly anything, so ``recognised_strictly`` uses one that has also
    learned a class of images assembled from pieces of several: one pixel, 4x4 or 7x7 pixels, each at its place.
    ``digits`` and ``broken`` are the same shares of test images, and of test images in pieces.
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
    """A small network of scikit-learn, trained on the first images; ``strict``: with broken ones as a class."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPClassifier

    rows, labels = pixels(dataset.splits["train"][:TRAIN]), dataset.labels["train"][:TRAIN].numpy()
    if strict:
        broken = in_pieces(rows, BROKEN * len(SIZES), seed=0)
        rows, labels = np.concatenate([rows, broken]), np.concatenate([labels, np.full(len(broken), 10)])
    make: Any = MLPClassifier  # its annotations are narrower than what it accepts
    network = make((128,), batch_size=min(200, len(rows)), max_iter=8, random_state=SEED)
    with warnings.catch_warnings():
        # Eight epochs are enough.
        warnings.simplefilter("ignore", ConvergenceWarning)
        return network.fit(rows, labels)


def in_pieces(rows: np.ndarray, count: int, seed: int) -> np.ndarray:
    """``count`` images (count,N) of square pieces, each from a different image; the piece sizes take turns."""
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
    """Gray levels 0 ... 255 as numbers from 0 to 1."""
    return rows.numpy() / 255


def main(*arguments: str) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of the training run")
    parser.add_argument("--data", default="mnist", help="its training data: mnist[:FOLDER], text:FILE or tokens:DIR")
    parser.add_argument("--about", default="", help="description of a text")
    parser.add_argument("--name", default="", help="name of the model, by default that of the kind of data")
    parser.add_argument("--weights", choices=WEIGHTS, default="", help="round the weights; by default bfloat16")
    parser.add_argument("--forms", nargs="+", help="words of which each text begins with one")
    parser.add_argument("--license", type=Path, help="the licence of the data, copied to the weights")
    parser.add_argument("--cpu-seconds", type=float, help="processor time of the training")
    parsed = parser.parse_args(arguments)
    more = {name: getattr(parsed, name) for name in ("forms", "cpu_seconds") if getattr(parsed, name) is not None}
    record = ship(parsed.run, parsed.data, parsed.name, about=parsed.about, weights=parsed.weights, **more)
    if parsed.license:
        folder = pretrained.FOLDER / (parsed.name or parsed.data.partition(":")[0])
        checkpoint.write_text(folder / "LICENSE", parsed.license.read_text(encoding="utf-8").strip() + "\n")
    print(json.dumps(record, indent=2, ensure_ascii=False))
