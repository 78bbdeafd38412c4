"""The demo: train on real images, generate new ones as an RNN, and compare the time with softmax."""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import data
from .._utils import atomic_io, plots, png
from .._utils.locks import exclusive_lock
from ..bench import guard, throughput
from ..bench import report as report_files
from ..data import Dataset
from ..generation.sampling import generate
from ..models import checkpoint
from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..states import nbytes
from ..train import TrainConfig, begun, fit

SPECS = ("linear", "softmax")
DIGITS = DecoderConfig(dim=128, depth=4, heads=4, feedforward=512, vocab=17, positions="learned", length=64)
TRAINING = TrainConfig(
    data="digits",
    steps=600,
    batch=32,
    learning_rate=2e-3,
    warmup=50,
    weight_decay=0.1,
    evaluate_every=100,
    save_every=100,
)
# Katharopoulos et al. 2020, section 4.2.1: 8 layers, 8 heads of 32, mixture of 10 logistics over 784 pixels.
PAPER = DecoderConfig(
    dim=256, depth=8, heads=8, feedforward=1024, vocab=256, likelihood="logistics(mixtures=10)", length=784
)
LOCK = ".lock"
FILES = {LOCK, "demo.json", "demo.csv", "throughput.png", *SPECS, *(f"samples_{spec}.png" for spec in SPECS)}
BATCH = 256
ROUNDS = 3


def run(
    out: Path | str, *, steps: int = TRAINING.steps, paper: DecoderConfig = PAPER, batch: int = BATCH, seed: int = 0
) -> dict:
    """Train ``linear`` and ``softmax`` of equal size on the embedded digits, sample, and time generation.

    ``steps`` of training each; ``paper`` is the model that is timed, untrained, over ``paper.length`` tokens for
    ``batch`` images. Resumes the training of an earlier demo in the same folder. Writes ``demo.json``,
    ``demo.csv``, ``samples_linear.png``, ``samples_softmax.png`` and ``throughput.png`` into the folder ``out`` and
    returns what ``demo.json`` holds.

    Raises ValueError where ``out`` cannot be written, is in use or holds something else, ImportError without extras.
    """
    out = Path(out)
    _claim(out)
    with exclusive_lock(out / LOCK, str(out)):
        return _run(out, steps, paper, batch, seed)


def _run(out: Path, steps: int, paper: DecoderConfig, batch: int, seed: int) -> dict:
    begin = time.monotonic()
    dataset = data.load("digits")
    result: dict[str, Any] = {"bits_per_dim": {}, "images_per_second": {}, "state_bytes": {}, "samples": {}}
    models: dict[str, Decoder] = {}
    for spec in SPECS:
        _say(f"training {spec} on {dataset.count('train')} images of {dataset.name}, {steps} steps")
        folder = out / spec
        settings = replace(TRAINING, steps=steps, warmup=min(TRAINING.warmup, steps), out=str(folder), seed=seed)
        # Reuse the finished trainings of an earlier, interrupted demo.
        trained = fit(replace(DIGITS, attention=spec), settings, resume=begun(folder))
        models[spec] = checkpoint.load(folder)  # type: ignore[assignment]
        result["bits_per_dim"][spec] = trained.bits["test"]
    result["bits_per_dim"]["histogram"] = histogram_bits(dataset)
    for spec, model in models.items():
        _say(f"sampling {batch} images from {spec}")
        images = generate(model, max_new_tokens=dataset.length, batch=batch, seed=seed)
        png.save(out / f"samples_{spec}.png", dataset.picture(images))
        result["samples"][spec] = likeness(images, dataset)
    _say("timing generation at the digits' length, with the trained models")
    result["images_per_second"]["digits"] = _digits_speed(models, dataset.length, batch)
    result["state_bytes"]["digits"] = _state_bytes(models, dataset.length)
    _say(f"timing generation at {paper.length} tokens, with untrained models of the paper's size")
    speed, details = _paper_speed(paper, batch)
    result["images_per_second"]["mnist_784"] = speed
    result["state_bytes"]["mnist_784"] = details.pop("state_bytes")
    result |= {"mnist_784": details, "machine": guard.machine(), "steps": steps, "seed": seed}
    result["seconds"] = round(time.monotonic() - begin, 1)
    _write(out, result)
    print(report(result))
    return result


def _claim(out: Path) -> None:
    if out.is_dir() and (foreign := sorted({path.name for path in out.iterdir()} - FILES)):
        raise ValueError(f"{out} holds {foreign[0]!r}, which is not the demo's; choose another folder")
    png.claim_folder(out)
    for name in ("samples_linear.png", "throughput.png"):
        png.check(out / name)
    for name in ("demo.json", "demo.csv"):
        atomic_io.check_output(out / name)
    _pyplot()


def histogram_bits(dataset: Dataset) -> float:
    """Bits per dim on the test split of the best static model: one histogram of levels per pixel, add-one smoothed."""
    train, test = dataset.splits["train"].long(), dataset.splits["test"].long()
    counts = torch.ones(dataset.length, dataset.vocab, dtype=torch.float64)
    counts.scatter_add_(1, train.T, torch.ones_like(train.T, dtype=torch.float64))
    nats = (counts / counts.sum(1, keepdim=True)).log()
    return -nats.gather(1, test.T).mean().item() / math.log(2)


def likeness(images: Tensor, dataset: Dataset) -> dict[str, Any]:
    """Compare samples (B,N) with the data by their nearest training images (Euclidean).

    ``smallest_class``: share of samples in the rarest class, by their nearest neighbour's label; ``distance_ratio``:
    the samples' mean distance to their nearest neighbour, over that of the held-out test images.
    """
    train = dataset.splits["train"].double()
    nearest = torch.cdist(images.double(), train).min(1)
    held_out = torch.cdist(dataset.splits["test"].double(), train).min(1).values.mean()
    labels = dataset.labels["train"]
    shares = torch.bincount(labels[nearest.indices], minlength=int(labels.max()) + 1) / len(images)
    return {
        "smallest_class": shares.min().item(),
        "classes": [round(share, 4) for share in shares.tolist()],
        "distance_ratio": (nearest.values.mean() / held_out).item(),
    }


def _digits_speed(models: dict[str, Decoder], length: int, batch: int) -> dict[str, float]:
    few = max(batch // 16, 1)  # recomputation is as fast per image for few images as for many
    calls: dict[str, Callable[[], object]] = {
        "linear": lambda: throughput.whole(models["linear"], length, batch),
        "softmax_cached": lambda: throughput.whole(models["softmax"], length, batch),
        "softmax_recompute": lambda: throughput.whole_recomputed(models["softmax"], length, few),
    }
    images = {"linear": batch, "softmax_cached": batch, "softmax_recompute": few}
    timings = guard.interleave(calls, ROUNDS, patience=1)
    return {name: images[name] / timing.seconds for name, timing in timings.items()}


def _paper_speed(config: DecoderConfig, batch: int) -> tuple[dict[str, float], dict[str, Any]]:
    torch.manual_seed(0)
    models = {spec: Decoder(replace(config, attention=spec)).eval() for spec in SPECS}
    named = {"linear": models["linear"], "softmax_cached": models["softmax"], "softmax_recompute": models["softmax"]}
    found = throughput.by_position(named, config.length, batch, ROUNDS)
    seconds = {
        name: throughput.integrate(list(timings), [t.seconds for t in timings.values()], config.length)
        for name, timings in found.items()
    }
    images = {name: 1 if name == "softmax_recompute" else batch for name in named}
    _say(f"one full run of linear, {config.length} steps for {batch} images, to verify the integral")
    full = throughput.whole(models["linear"], config.length, batch)
    details = {
        "how": f"untrained weights; steps timed at {len(found['linear'])} positions, {ROUNDS} rounds, and integrated; "
        f"softmax_recompute at batch 1, the others at batch {batch}; caches filled with random numbers",
        "batch": images,
        "step_seconds": {n: {p: t.seconds for p, t in timings.items()} for n, timings in found.items()},
        "rejected_samples": {n: sum(t.rejected for t in timings.values()) for n, timings in found.items()},
        "disturbed_samples": {n: sum(t.disturbed for t in timings.values()) for n, timings in found.items()},
        "linear_full_run_seconds": full,
        "linear_integrated_seconds": seconds["linear"],
        "state_bytes": _state_bytes(models, config.length),
    }
    return {name: images[name] / seconds[name] for name in named}, details


def _state_bytes(models: dict[str, Decoder], length: int) -> dict[str, int]:
    """Bytes of one image's state after ``length`` tokens."""
    return {spec: nbytes(model.init_state(1, length).layers) for spec, model in models.items()}


def _write(out: Path, result: dict[str, Any]) -> None:
    checkpoint.write_text(out / "demo.json", json.dumps(result, indent=2) + "\n")
    rows = [
        (group, *key)
        for group in ("bits_per_dim", "images_per_second", "state_bytes", "samples")
        for key in _flat(result[group])
    ]
    table: list[dict[str, Any]] = [dict(zip(("figure", "name", "value"), row, strict=True)) for row in rows]
    checkpoint.write_text(out / "demo.csv", report_files.rows_csv(table))
    _draw(out / "throughput.png", result)


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows = []
    for key, value in values.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows


def report(result: dict[str, Any]) -> str:
    """The figures of ``demo.json`` as text."""
    bits, speed, held = result["bits_per_dim"], result["images_per_second"], result["state_bytes"]
    lines = ["", f"{'':<22}{'linear':>12}{'softmax':>12}{'histogram':>12}"]
    lines.append(f"{'test bits/dim':<22}{bits['linear']:12.3f}{bits['softmax']:12.3f}{bits['histogram']:12.3f}")
    for part, length in (("digits", "64"), ("mnist_784", "784")):
        lines.append(f"{'state bytes, N = ' + length:<22}{held[part]['linear']:12,}{held[part]['softmax']:12,}")
    lines += [
        "",
        f"{'images/s':<22}{'linear':>12}{'KV cache':>12}{'recompute':>12}{'linear / KV':>12}{'/ recomp.':>12}",
    ]
    for part, what in (("digits", "digits, N = 64"), ("mnist_784", "MNIST size, N = 784")):
        a, b, c = (speed[part][name] for name in ("linear", "softmax_cached", "softmax_recompute"))
        lines.append(f"{what:<22}{a:12.2f}{b:12.2f}{c:12.3f}{a / b:11.1f}x{a / c:11.0f}x")
    return "\n".join([*lines, "", f"{result['seconds']:.0f} s in all"])


def _draw(path: Path, result: dict[str, Any]) -> None:
    plt = _pyplot()
    details, speed = result["mnist_784"], result["images_per_second"]
    labels = {
        "linear": "linear, as an RNN",
        "softmax_cached": "softmax, KV cache",
        "softmax_recompute": "softmax, recomputing",
    }
    colours = {"linear": "tab:blue", "softmax_cached": "tab:orange", "softmax_recompute": "tab:red"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for name, steps in details["step_seconds"].items():
        per_image = [1e3 * seconds / details["batch"][name] for seconds in steps.values()]
        left.plot([int(p) for p in steps], per_image, "o-", color=colours[name], label=labels[name])
    left.set(
        xlabel="position in the image", ylabel="ms per token and image", yscale="log", title="one step, by position"
    )
    left.legend()
    left.grid(alpha=0.3)
    for i, name in enumerate(labels):
        values = [speed[part][name] for part in ("digits", "mnist_784")]
        bars = right.bar([i + 4 * j for j in range(2)], values, color=colours[name], label=labels[name])
        right.bar_label(bars, [f"{value:.3g}" for value in values])
    right.set(yscale="log", ylabel="images per second", title="whole images")
    right.set_xticks(
        [1, 5],
        [
            "digits, 64 tokens\n(trained)",
            f"MNIST size, {max(map(int, details['step_seconds']['linear'])) + 1} tokens\n(untrained)",
        ],
    )
    right.margins(y=0.15)
    figure.suptitle(f"{result['machine']['processor']}, {result['machine']['threads']} threads", fontsize=9)
    plots.save(plt, figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('the demo draws with matplotlib: pip install "longspan[demo]"') from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
