"""What the library is for, in one command: training, time and memory by length, generation, Hugging Face layers."""

import base64
import csv
import html
import importlib
import io
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from longspan import data
from longspan._utils import atomic_io, png, progress
from longspan._utils.locks import exclusive_lock
from longspan._utils.machine import machine
from longspan._utils.optional_deps import install
from longspan.compat import transformers as on_cpu
from longspan.data import Dataset
from longspan.generation.sampling import generate
from longspan.models import checkpoint, pretrained
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.ops.buffers import reuse_pages
from longspan.states import nbytes
from longspan.train import TrainConfig, begun, fit

from .._utils import palette, plots
from ..bench import guard, members, throughput
from ..bench import report as report_files
from ..bench.worker import timed

SPECS = ("linear", "softmax")
COMPARED = ("softmax", "local", "linear", "gated_deltanet")
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
STEPS = 200
LEGIBLE = 1000  # steps after which most digits of the trained models can be read
MNIST = (28, 28)
SHIPPED = "mnist"
LOCK = ".lock"
PICTURES = (
    "training.png",
    "training-dark.png",
    *(f"samples_{spec}.png" for spec in SPECS),
    "time-and-state.png",
    "time-and-state-dark.png",
    "drawn.png",
    "completed.png",
)
FILES = {LOCK, "demo.json", "demo.csv", "index.html", *PICTURES, *SPECS}
GROUPS = ("bits_per_dim", "images_per_second", "state_bytes", "samples", "layer")
WAYS = ("transformers", "longspan")

# Recurrent layers of transformers, of which the first one that is there is timed: title, module, configuration, layer,
# and the options of a layer of the published width.
LAYERS: tuple[tuple[str, str, str, str, dict[str, Any]], ...] = (
    (
        "Kimi-Linear's delta attention",
        "kimi_linear",
        "KimiLinearConfig",
        "KimiLinearDeltaAttention",
        {"hidden_size": 1024, "linear_num_heads": 8, "linear_head_dim": 128, "num_hidden_layers": 1}
        | {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"]},
    ),
    (
        "Mamba-2's mixer",
        "mamba2",
        "Mamba2Config",
        "Mamba2Mixer",
        {"hidden_size": 1024, "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1},
    ),
)


@dataclass(frozen=True)
class Scale:
    """How much is measured and drawn."""

    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """tokens of the sequences that are timed"""
    dim: int = 256
    heads: int = 4
    limit: float = 8.0
    """seconds; a length is left out where one call is expected to take longer"""
    batch: int = 256
    """images that each trained model draws"""
    drawn: int = 30
    """images that the shipped model draws"""
    tops: int = 5
    """how many of these are completed anew from their upper half"""
    ways: int = 5
    """completions of each"""
    tokens: int = 1024
    """tokens that the layer of transformers reads"""
    rounds: int = 3


def run(out: Path | str, *, steps: int = STEPS, seed: int = 0, scale: Scale = Scale()) -> dict[str, Any]:
    """Train, measure and draw; write the figures, the pictures and a page with all of them.

    Args:
        out: the folder. Training continues from an earlier demo in the same folder.
        steps: training steps of each of the two models.
        seed: seed of the weights, the order of the data and the samples.
        scale: how much is measured and drawn.

    Returns:
        What ``demo.json`` holds. The folder also has ``demo.csv``, ``index.html`` and the pictures in ``PICTURES``.

    Raises:
        ValueError: ``out`` cannot be written, is in use, or holds files that are not the demo's.
        ImportError: an optional package is missing.
    """
    out = Path(out)
    _claim(out)
    with exclusive_lock(out / LOCK, str(out)):
        return _run(out, steps, seed, scale)


def _run(out: Path, steps: int, seed: int, scale: Scale) -> dict[str, Any]:
    begin, processor = time.monotonic(), time.process_time()
    # As generate does: without it, every large tensor starts with cleared pages.
    reuse_pages()
    dataset = data.load("digits")
    result: dict[str, Any] = {"machine": machine(), "steps": steps, "seed": seed}
    _head(1, f"train two transformers on {dataset.count('train')} images of digits, {steps} steps each")
    models, trained = _train(out, dataset, steps, seed)
    result |= trained
    result["samples"], drawn = {}, {}
    for spec, model in models.items():
        drawn[spec] = generate(model, max_new_tokens=dataset.length, batch=scale.batch, seed=seed)
        png.save(out / f"samples_{spec}.png", dataset.picture(drawn[spec][:40]), columns=10)
        result["samples"][spec] = likeness(drawn[spec], dataset)
    result["images_per_second"] = _speed(models, dataset.length, scale)
    result["state_bytes"] = {spec: _state_bytes(model, dataset.length) for spec, model in models.items()}
    _head(2, "measure one attention layer by length: time, and bytes of the state")
    result["lengths"] = _lengths(scale)
    _head(3, f"draw and complete digits with the model that comes with longspan ({SHIPPED})")
    result["shipped"] = _shipped(out, seed, scale)
    _head(4, "time one recurrent layer of Hugging Face transformers, stock and accelerated")
    result["layer"] = _layer(scale)
    if why := result["layer"].get("skipped"):
        progress.say(f"      skipped: {why}")
    result["seconds"] = round(time.monotonic() - begin, 1)
    result["processor_seconds"] = round(time.process_time() - processor, 1)
    _write(out, result)
    print(report(result))
    print(out / "index.html")
    return result


def _head(number: int, text: str) -> None:
    progress.say(f"[{number}/4] {text}")


def _claim(out: Path) -> None:
    if out.is_dir() and (foreign := sorted({path.name for path in out.iterdir()} - FILES)):
        raise ValueError(f"{out} holds {foreign[0]!r}, which is not the demo's; choose another folder")
    png.claim_folder(out)
    for name in PICTURES:
        png.check(out / name)
    for name in ("demo.json", "demo.csv", "index.html"):
        atomic_io.check_output(out / name)
    plots.pyplot()


def _train(out: Path, dataset: Dataset, steps: int, seed: int) -> tuple[dict[str, Decoder], dict[str, Any]]:
    """Train both models -> the models, and the figures of their training."""
    models: dict[str, Decoder] = {}
    curves, found = {}, {"bits_per_dim": {}, "parameters": {}, "training_seconds": {}}
    for spec in SPECS:
        progress.say(f"      {spec}:")
        folder = out / spec
        settings = replace(TRAINING, steps=steps, warmup=min(TRAINING.warmup, steps), out=str(folder), seed=seed)
        # What an earlier, interrupted demo has trained is not trained again.
        trained = fit(replace(DIGITS, attention=spec), settings, resume=begun(folder))
        models[spec] = checkpoint.load(folder)
        found["bits_per_dim"][spec] = trained.bits["test"]
        found["parameters"][spec] = sum(parameter.numel() for parameter in models[spec].parameters())
        curves[spec] = _curve(folder / "metrics.csv")
        found["training_seconds"][spec] = round(curves[spec][-1][2], 1) if curves[spec] else 0.0
    found["bits_per_dim"]["histogram"] = histogram_bits(dataset)
    _draw_training(out / "training.png", curves, found["bits_per_dim"])
    return models, found


def _curve(path: Path) -> list[tuple[int, float, float]]:
    """(step, training bits, seconds) from a run's metrics."""
    rows = csv.DictReader(io.StringIO(atomic_io.read_text(path)))
    return [(int(row["step"]), float(row["bits"]), float(row["seconds"])) for row in rows if row["bits"]]


def histogram_bits(dataset: Dataset) -> float:
    """Bits per dim on the test split of the best static model: one histogram of levels per pixel, add-one smoothed."""
    train, test = dataset.splits["train"].long(), dataset.splits["test"].long()
    counts = torch.ones(dataset.length, dataset.vocab, dtype=torch.float64)
    counts.scatter_add_(1, train.T, torch.ones_like(train.T, dtype=torch.float64))
    nats = (counts / counts.sum(1, keepdim=True)).log()
    return -nats.gather(1, test.T).mean().item() / math.log(2)


def likeness(images: Tensor, dataset: Dataset) -> dict[str, Any]:
    """Compare samples (B,N) with the data, by their nearest training images (Euclidean).

    ``smallest_class``: share of samples in the rarest class, by their nearest neighbor's label; ``distance_ratio``:
    the samples' mean distance to their nearest neighbor, over that of the held-out test images.
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


def _speed(models: dict[str, Decoder], length: int, scale: Scale) -> dict[str, float]:
    """Images per second of the trained models."""
    few = max(scale.batch // 16, 1)  # recomputing is as fast per image with a few images as with many
    calls: dict[str, Callable[[], object]] = {
        "linear": lambda: throughput.whole(models["linear"], length, scale.batch),
        "softmax_cached": lambda: throughput.whole(models["softmax"], length, scale.batch),
        "softmax_recompute": lambda: throughput.whole_recomputed(models["softmax"], length, few),
    }
    images = {"linear": scale.batch, "softmax_cached": scale.batch, "softmax_recompute": few}
    timings = guard.interleave(calls, scale.rounds, patience=1)
    return {name: images[name] / timing.seconds for name, timing in timings.items()}


def _state_bytes(model: Decoder, length: int) -> int:
    """Bytes of one image's state when ``length`` tokens have been read."""
    return nbytes(model.init_state(1, length).layers)


def _lengths(scale: Scale) -> dict[str, Any]:
    """Time of one layer forward and backward, and bytes of its state, by length."""
    modules = {spec: members.built(spec, scale.dim, scale.heads) for spec in COMPARED}
    points = [(length, spec) for length in sorted(scale.lengths) for spec in COMPARED]
    rows: list[dict[str, Any]] = []
    last: dict[str, tuple[int, float]] = {}
    labels = [f"{spec}, {length} tokens" for length, spec in points]
    for (length, spec), _ in zip(points, progress.track(labels, len(labels), "layers"), strict=True):
        row: dict[str, Any] = {"candidate": spec, "length": length}
        row["state_bytes"] = nbytes(modules[spec].init_state(1, length))
        before, seconds = last.get(spec, (length, 0.0))
        if seconds * (length / before) ** 2 <= scale.limit or spec != "softmax":
            row["seconds"] = _seconds(modules[spec], torch.randn(1, length, scale.dim), scale.rounds)
            last[spec] = length, row["seconds"]
        rows.append(row)
    how = f"one layer, causal, {scale.dim} channels, {scale.heads} heads, projections included, float32, one sequence"
    return {"how": how, "limit": scale.limit, "rows": rows}


def _seconds(module: nn.Module, x: Tensor, rounds: int) -> float:
    """Seconds of one call forward and backward: the median of ``rounds``, or of fewer where one takes seconds."""

    def call() -> None:
        given = x.clone().requires_grad_()
        output = module(given)
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        module.zero_grad(set_to_none=True)

    once = timed(call)
    repeat = max(1, min(20, int(0.03 / max(once, 1e-6))))
    rounds = max(1, min(rounds, int(6.0 / max(once, 1e-6))))
    return median(timed(call, repeat) for _ in range(rounds))


def _shipped(out: Path, seed: int, scale: Scale) -> dict[str, Any]:
    """Draw digits with the shipped model, and complete upper halves of some of them in several ways."""
    model, length = pretrained.load(SHIPPED), math.prod(MNIST)
    half = length // 2
    begin = time.monotonic()
    images = _tokens(model, None, scale.drawn, length, seed)
    seconds = time.monotonic() - begin
    png.save(out / "drawn.png", images.reshape(-1, *MNIST).byte(), columns=6, size=112)
    tops = images[: scale.tops, :half]
    found = _tokens(model, tops.repeat_interleave(scale.ways, 0), 0, length - half, seed + 1)
    completed = torch.cat([tops.repeat_interleave(scale.ways, 0), found], 1).view(len(tops), scale.ways, length)
    # What is not given is shown in a middle grey.
    given = torch.cat([tops, torch.full_like(images[: scale.tops, half:], 128)], 1)[:, None]
    rows = torch.cat([given, completed], 1).reshape(-1, *MNIST)
    png.save(out / "completed.png", rows.byte(), columns=scale.ways + 1, size=112)
    return {
        "drawn": scale.drawn,
        "images_per_second": scale.drawn / seconds,
        "completed": len(tops) * scale.ways,
        "state_bytes": _state_bytes(model, length),
    }


def _tokens(model: Decoder, prompt: Tensor | None, batch: int, count: int, seed: int) -> Tensor:
    """(B,count) new tokens, with a bar."""
    given = {"batch": batch} if prompt is None else {}
    steps = generate(model, prompt, max_new_tokens=count, seed=seed, stream=True, **given)  # pyright: ignore[reportCallIssue, reportArgumentType] (a mixed dict)
    return torch.stack(list(progress.track(steps, count, "pixels")), 1)


def _layer(scale: Scale) -> dict[str, Any]:
    """Seconds of a recurrent layer by stock code and by longspan's kernels; ``skipped`` names the reason for none."""
    if find_spec("transformers") is None:
        return {"skipped": f"transformers is not installed; {install('transformers')}"}
    on_cpu.restore()
    try:
        title, layer, width = _build_layer()
        on_cpu.accelerate()
    except (ImportError, ValueError) as error:
        return {"skipped": " ".join(str(error).split())}
    x = torch.randn(1, scale.tokens, width, generator=torch.Generator().manual_seed(0))
    found: dict[str, Any] = {"title": title, "tokens": scale.tokens, "prefill": {}, "training step": {}}
    outputs = {}
    try:
        for way in progress.track(WAYS, len(WAYS), "layer"):
            on_cpu.restore()
            if way == WAYS[1]:
                on_cpu.accelerate()
            with torch.no_grad():
                outputs[way] = _first(layer(x))
                found["prefill"][way] = median(timed(partial(layer, x)) for _ in range(scale.rounds))
            layer.train()
            found["training step"][way] = _seconds(layer, x, scale.rounds)
            layer.eval()
    finally:
        on_cpu.restore()
    difference = (outputs[WAYS[1]] - outputs[WAYS[0]]).norm() / outputs[WAYS[0]].norm()
    found["relative_difference"] = float(difference)
    found["transformers"] = importlib.import_module("transformers").__version__
    return found


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _build_layer() -> tuple[str, nn.Module, int]:
    """Title, layer with random weights, and width. Raises ImportError where transformers has none of ``LAYERS``."""
    # Its remarks about missing GPU kernels do not concern a CPU.
    importlib.import_module("transformers.utils.logging").set_verbosity_error()
    for title, kind, config, layer, options in LAYERS:
        try:
            settings = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
            file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        except ImportError:
            continue
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            made = getattr(file, layer)(getattr(settings, config)(**options), 0)
            for name, weight in made.named_parameters():
                # Layers outside of a model leave some weights uninitialized.
                if not torch.isfinite(weight).all() or name.endswith(("A_log", "dt_bias")):
                    nn.init.uniform_(weight, 0.0, 1.0)
        return title, made.eval(), options["hidden_size"]
    raise ImportError("this version of transformers has no recurrent layer that the demo knows")


def _write(out: Path, result: dict[str, Any]) -> None:
    checkpoint.write_text(out / "demo.json", json.dumps(result, indent=2) + "\n")
    table: list[dict[str, Any]] = [
        {"figure": group, "name": name, "value": value} for group in GROUPS for name, value in _flat(result[group])
    ]
    for row in result["lengths"]["rows"]:
        for key in ("seconds", "state_bytes"):
            if key in row:
                name = f"{row['candidate']}.{row['length']}"
                table.append({"figure": f"lengths_{key}", "name": name, "value": row[key]})
    checkpoint.write_text(out / "demo.csv", report_files.rows_csv(table))
    plt = plots.pyplot()
    plots.save(plt, plots.time_and_state(plt, result["lengths"]["rows"]), out / "time-and-state.png", dark=True)
    checkpoint.write_text(out / "index.html", page(out, result))


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows = []
    for key, value in values.items():
        rows += _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]
    return rows


def tables(result: dict[str, Any]) -> dict[str, list[list[str]]]:
    """The figures of ``demo.json`` as tables: title -> rows, of which the first is the head."""
    bits, speed, held = result["bits_per_dim"], result["images_per_second"], result["state_bytes"]
    found = {
        f"digits, trained for {result['steps']} steps": [
            ["", "linear", "softmax"],
            ["test bits per pixel", f"{bits['linear']:.3f}", f"{bits['softmax']:.3f}"],
            ["seconds of training", *(f"{result['training_seconds'][spec]:.1f}" for spec in SPECS)],
            ["images per second", f"{speed['linear']:,.0f}", f"{speed['softmax_cached']:,.0f}"],
            ["state of one image", *(plots.readable_bytes(held[spec]) for spec in SPECS)],
        ]
    }
    rows = result["lengths"]["rows"]
    lengths = sorted({row["length"] for row in rows})
    titles = {
        "seconds": "milliseconds of one attention layer, forward + backward",
        "state_bytes": "its state after N tokens",
    }
    for key, title in titles.items():
        table = [["tokens", *(f"{length:,}" for length in lengths)]]
        for spec in COMPARED:
            at = {row["length"]: row[key] for row in rows if row["candidate"] == spec and key in row}
            table.append([spec, *(_cell(key, at.get(length)) for length in lengths)])
        found[title] = table
    layer = result["layer"]
    if "skipped" not in layer:
        table = [["", *WAYS, "speed-up"]]
        for mode in ("prefill", "training step"):
            seconds = layer[mode]
            cells = [f"{1e3 * seconds[way]:.0f} ms" for way in WAYS]
            table.append([mode, *cells, f"{seconds[WAYS[0]] / seconds[WAYS[1]]:.1f}x"])
        found[f"{layer['title']} in Hugging Face transformers, {layer['tokens']:,} tokens"] = table
    return found


def _cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key != "seconds":
        return plots.readable_bytes(value)
    return f"{1e3 * value:.3g}" if value < 1 else f"{1e3 * value:,.0f}"


def report(result: dict[str, Any]) -> str:
    """The figures of ``demo.json`` as text of at most 80 columns."""
    lines = []
    for title, table in tables(result).items():
        lines += ["", f"{title}:"]
        lines += [f"  {row[0]:<20}" + "".join(f"{cell:>13}" for cell in row[1:]) for row in table]
    shipped = result["shipped"]
    lines += ["", f"{SHIPPED}: {shipped['images_per_second']:,.0f} images per second of 28 x 28 pixels"]
    if why := result["layer"].get("skipped"):
        lines.append(f"transformers: skipped; {why}")
    lines.append(f"{result['seconds']:.0f} s in all ({result['processor_seconds']:.0f} s of processor time)")
    return "\n".join(lines)


def _draw_training(path: Path, curves: dict[str, list], bits: dict[str, float]) -> None:
    plt = plots.pyplot()
    figure, axis = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    looks = palette.looks(SPECS)
    for spec, curve in curves.items():
        if curve:
            steps, values, _ = zip(*curve, strict=True)
            axis.plot(steps, values, color=looks[spec].color, label=f"{spec} (test: {bits[spec]:.2f})")
    axis.axhline(bits["histogram"], color=palette.BASELINE, linestyle=":", label="a histogram of each pixel, test")
    axis.set(xlabel="training steps", ylabel="bits per pixel", title="training on digits, equal sizes")
    axis.grid(alpha=0.3)
    plots.legend(figure, [axis])
    plots.save(plt, figure, path, dark=True)


STYLE = """
:root { color-scheme: light dark; --text: #1c2024; --back: #ffffff; --soft: #f2f4f6; --line: #d8dde2; --key: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ea; --back: #16191d; --soft: #20252a; --line: #3a4148; --key: #6bb8e8; }
}
body { font: 16px/1.55 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 760px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 2rem; margin: 0 0 .2rem; } h2 { font-size: 1.3rem; margin: 2.4rem 0 .4rem; }
.machine { color: var(--text); opacity: .75; margin: 0 0 1.2rem; }
img { max-width: 100%; height: auto; border-radius: 8px; display: block; margin: .8rem 0; }
img.pixels { image-rendering: pixelated; border-radius: 4px; }
@media (max-width: 600px) { .scroll img { max-width: none; width: 640px; } }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; margin: .6rem 0; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
code, pre { font: .88rem/1.5 ui-monospace, monospace; background: var(--soft); border-radius: 5px; }
code { padding: .1em .35em; } pre { padding: .8rem 1rem; overflow-x: auto; } pre code { padding: 0; }
.pair { display: flex; flex-wrap: wrap; gap: 1rem; } .pair figure { margin: 0; flex: 1 1 300px; }
figcaption { font-size: .9rem; opacity: .8; } a { color: var(--key); }
"""


def page(out: Path, result: dict[str, Any]) -> str:
    """A page of all figures and pictures, in one file: the pictures in ``out`` are embedded."""
    facts, found = result["machine"], tables(result)
    machine = (
        f"{facts['processor']}, {facts['threads']} threads, {facts['system']}, Python {facts['python']}, "
        f"torch {facts['torch']}; {result['seconds']:.0f} s in all"
    )
    digits, by_time, by_state, *layer = found.values()
    shipped = result["shipped"]
    left_out = any("seconds" not in row for row in result["lengths"]["rows"])
    parts = [
        "<h1>longspan demo</h1>",
        f'<p class="machine">{html.escape(machine)}</p>',
        "<p>Everything on this page was trained, measured and drawn on this machine by <code>longspan demo</code>.</p>",
        "<h2>Train as a transformer, run as an RNN</h2>",
        "<p>Two decoders of equal size learn images of digits, pixel by pixel. They differ only in "
        "<code>attention=</code>. A model without attention, a histogram of each pixel, needs "
        f"{result['bits_per_dim']['histogram']:.3f} bits per pixel.</p>",
        _chart(out / "training.png", "Bits per pixel by training step"),
        _table(digits),
        *_trained(out, result),
        "<h2>Time and memory by length</h2>",
        f"<p>{html.escape(_sentence(result['lengths']['how']))} <code>softmax</code> compares all pairs of tokens and "
        "stores every key and value; <code>local</code> has a window; <code>linear</code> and "
        "<code>gated_deltanet</code> have a state of fixed size.</p>",
        _chart(out / "time-and-state.png", "Time and size of the state by length"),
        "<p>Milliseconds forward and backward, by tokens:</p>",
        _table(by_time),
        f"<p>A dash: left out, as one call would take more than {result['lengths']['limit']:g} s.</p>" * left_out,
        "<p>The state after N tokens:</p>",
        _table(by_state),
        "<h2>A trained model in the package</h2>",
        f"<p>A linear transformer that was trained on MNIST generated these {shipped['drawn']} digits, "
        f"{shipped['images_per_second']:.2g} per second, with a state of "
        f"{plots.readable_bytes(shipped['state_bytes'])} for each.</p>",
        _image(out / "drawn.png", "Digits generated by the model", pixels=True),
        "<p>Left: the upper half of a digit. Right of it: completions by the same model.</p>",
        _image(out / "completed.png", "Upper halves and their completions", pixels=True),
        _code(
            "longspan generate mnist --out digits.png",
            "longspan generate mnist --complete test    # of real test images; downloads MNIST",
        ),
        "<h2>Hugging Face models on a CPU</h2>",
        *_layer_part(result["layer"], layer),
        "<h2>Next</h2>",
        _code("longspan list", "longspan train --config digits", "longspan bench attention"),
    ]
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>longspan demo</title>\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _trained(out: Path, result: dict[str, Any]) -> list[str]:
    """What to know about the trained models, and their images if those can be read."""
    bits, steps = result["bits_per_dim"], result["steps"]
    parts = []
    if bits["linear"] > bits["softmax"]:
        parts.append(
            f"<p>After {steps} steps <code>linear</code> is behind <code>softmax</code>. Its weights are less sharp, "
            "so it needs more steps to learn which earlier pixels matter. The difference shrinks with training: on the "
            "developers' machine from 0.09 bits after 200 steps to 0.02 bits after 1,000.</p>"
        )
    if steps < LEGIBLE:
        more = "The images that these models generate cannot be read after so few steps. To see them after more:"
        return [*parts, f"<p>{more}</p>", _code(f"longspan demo --steps {LEGIBLE} --out demo-{LEGIBLE}")]
    figures = (_figure(out / f"samples_{spec}.png", f"generated by the {spec} model") for spec in SPECS)
    return [*parts, '<div class="pair">', *figures, "</div>"]


def _layer_part(facts: dict[str, Any], table: list[list[list[str]]]) -> list[str]:
    example = _code("import longspan.compat.transformers as on_cpu", "on_cpu.accelerate()")
    if why := facts.get("skipped"):
        return [f"<p>Skipped: {html.escape(why)}</p>", example]
    said = (
        f"One layer with random weights by the stock code of transformers {facts['transformers']} and on longspan's "
        f"kernels. Outputs differ by {facts['relative_difference']:.1g} of their norm."
    )
    return [f"<p>{html.escape(said)}</p>", *(_table(one) for one in table), example]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _code(*lines: str) -> str:
    return f"<pre><code>{html.escape(chr(10).join(lines))}</code></pre>"


def _table(rows: list[list[str]]) -> str:
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return f'<div class="scroll"><table><thead><tr>{cells}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _image(path: Path, alt: str, pixels: bool = False) -> str:
    kind = ' class="pixels"' if pixels else ""
    return f'<img{kind} alt="{html.escape(alt)}" src="{_embedded(path)}">'


def _chart(path: Path, alt: str) -> str:
    """A picture that follows the color scheme of the page, and scrolls on a phone."""
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_embedded(plots.dark_path(path))}">'
    return f'<div class="scroll"><picture>{dark}{_image(path, alt)}</picture></div>'


def _embedded(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(atomic_io.read(path)).decode('ascii')}"


def _figure(path: Path, caption: str) -> str:
    return f"<figure>{_image(path, caption, pixels=True)}<figcaption>{html.escape(caption)}</figcaption></figure>"
