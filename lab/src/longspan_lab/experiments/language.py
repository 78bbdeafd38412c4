"""Byte models of every family and an LSTM: what equal numbers of weights learn in equal time."""

import math
import time
from dataclasses import dataclass
from typing import Any, cast

import torch

from longspan import data
from longspan._utils import spec
from longspan.data import Dataset
from longspan.data.order import batch_indices
from longspan.models.decoder import Decoder
from longspan.ops.buffers import reuse_pages
from longspan.train import TrainConfig, objectives, streaming_eval
from longspan.train.evaluate import Share, default_batch_size, total

from .._utils import palette, plot_labels, plots
from .._utils.tables import Table
from . import families, published
from .experiment import (
    DEVICES,
    Buildable,
    Experiment,
    Place,
    Result,
    Row,
    check_device,
    drawing,
    generator,
    setting,
)
from .families import FAMILIES, Model, Size
from .learning import finite, keep, parameters, resumed, update

BUDGETS = {"seconds": "each model trains for the same time", "steps": "for the same number of steps"}


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale.

    At the GPU scale half an hour of one GPU for each model. The published figures are for enwik8: pass it as text:FILE.
    """

    data: str = setting("text:stdlib", "a text: text:stdlib or text:PATH")
    models: str = setting(
        "; ".join(FAMILIES), "models, separated by semicolons", quick="softmax; transformer_xl; gla; lstm"
    )
    length: int = setting(256, "bytes per example, and per segment of the model with a memory", quick=16, gpu=1024)
    window: int = setting(64, "tokens in the local window", quick=4, gpu=256)
    dim: int = setting(96, "width of the models; the feed-forward networks equalize their size", quick=8, gpu=512)
    depth: int = setting(4, "number of blocks", quick=1, gpu=8)
    heads: int = setting(4, "heads of each attention", quick=2, gpu=8)
    layers: int = setting(2, "layers of the LSTM, whose width equalizes its size", least=1, quick=1)
    budget: str = setting("seconds", "equal budget of all models: seconds | steps", among=BUDGETS, quick="steps")
    seconds: float = setting(
        45.0, "seconds of training for each model with --budget seconds, without evaluations", positive=True, gpu=1800.0
    )
    steps: int = setting(500, "steps of training for each model with --budget steps", least=1, quick=4)
    batch: int = setting(8, "examples per training step", least=1, quick=2, gpu=32)
    learning_rate: float = setting(
        3e-3, "peak learning rate of a cosine schedule over the budget", positive=True, gpu=1e-3
    )
    warmup: int = setting(20, "number of warm-up steps", least=0, quick=1, gpu=200)
    looks: int = setting(
        10, "number of evaluations on validation text, evenly spaced over the budget", least=1, quick=2, gpu=20
    )
    evaluate_examples: int = setting(64, "validation examples per evaluation; 0: all", least=0, quick=4, gpu=256)
    tests: int = setting(512, "test examples at the end; 0: all", least=0, quick=20, gpu=0)
    context: int = setting(
        1000, "bytes before the timed generation; the state is measured after them", least=1, quick=9, gpu=4000
    )
    tokens: int = setting(100, "bytes of the timed generation", least=1, quick=3, gpu=500)
    batches: tuple[int, ...] = setting((1, 16), "batch sizes of the generation", least=1, quick=(1, 2), gpu=(1, 64))
    rounds: int = setting(3, "timing rounds", least=1, quick=1)
    device: str = setting("cpu", "device: cpu or cuda", among=DEVICES, gpu="cuda")
    seed: int = setting(0, "seed of weights and order of the examples")

    def __post_init__(self):
        super().__post_init__()
        if self.data.partition(":")[0] != "text":
            raise ValueError(f"data={self.data}: the models read bytes of a text, text:stdlib or text:PATH")
        for name in self.names():
            spec.known(name, FAMILIES, "model")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        # One of several equal blocks is enough.
        for name in {*self.names(), families.REFERENCE} - {families.LSTM_NAME}:
            depth = self.depth if len(spec.split(FAMILIES[name].attention)) > 1 else 1
            families.config(name, self.size()._replace(depth=depth))

    def names(self) -> list[str]:
        """The models in training order."""
        return spec.split(self.models)

    def size(self) -> Size:
        """What the models have in common."""
        return Size(self.dim, self.depth, self.heads, self.layers, self.window, self.length)

    def part(self, step: int, seconds: float) -> float:
        """The spent part of the budget, from 0."""
        return step / self.steps if self.budget == "steps" else seconds / self.seconds

    def rate(self, step: int, part: float) -> float:
        """The learning rate of step number ``step``, counted from 0, when this part of the budget is spent."""
        rise = min(1.0, (step + 1) / max(1, self.warmup))
        return self.learning_rate * rise * (1 + math.cos(math.pi * min(1.0, part))) / 2


def points(settings: Settings) -> list[Row]:
    """The models. Raises ValueError if the requested GPU is missing."""
    check_device(settings.device)
    return [{"model": name} for name in settings.names()]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """Train one model, or resume it, then test it and time its generation.

    -> ``attention``, ``parameters``; ``steps``, ``seconds`` of training and ``processor``, the seconds of all cores in
    them; ``curve``: [steps made, seconds, validation bits per byte]; ``test``: bits per byte with the last weights;
    ``training``: bytes per second; ``generation``: batch -> bytes per second; ``state``: bytes of that of one text.
    A model that reads the text in order is tested with its state carried along, the others by examples.
    """
    name = point["model"]
    reuse_pages()  # as training and generation do
    dataset = data.load(settings.data, settings.length)
    model = born(settings, name).to(settings.device)
    kept = train(settings, name, model, dataset, place)
    bits = held_out(settings, name, model, dataset, "test", settings.tests)
    model.eval()
    prompt = torch.randint(families.VOCAB, (1, settings.context), generator=generator(settings.seed, "prompt"))
    prompt = prompt.to(settings.device)
    speeds = {
        str(batch): families.speed(model, prompt.expand(batch, -1).contiguous(), settings.tokens, settings.rounds)
        for batch in settings.batches
    }
    return {
        "attention": FAMILIES[name].attention.format(window=settings.window, length=settings.length),
        "parameters": parameters(model),
        "steps": kept["step"],
        "seconds": round(kept["seconds"], 2),
        "processor": round(kept["processor"], 2),
        "curve": kept["curve"],
        "test": round(bits, 5),
        "training": round(kept["step"] * settings.batch * settings.length / kept["seconds"], 1),
        "generation": {batch: round(rate, 1) for batch, rate in speeds.items()},
        "state": families.state_bytes(model, prompt),
    }


def born(settings: Settings, name: str) -> Model:
    """A model before training; it depends on the seed alone."""
    with drawing(settings.seed, "weights"):
        return families.build(name, settings.size())


class Reader:
    """The loss of a model on one step's batch, with a state carried between steps where the text is read in order."""

    def __init__(self, settings: Settings, name: str, model: Model, dataset: Dataset):
        self.settings, self.model, self.dataset = settings, model, dataset
        run = TrainConfig(
            data=settings.data, length=settings.length, batch=settings.batch, seed=settings.seed, stream=True
        )
        self.stream = objectives.Streams(run, dataset) if FAMILIES[name].stream else None

    def loss(self, step: int) -> torch.Tensor:
        """Mean nats per byte of batch number ``step``."""
        if self.stream is not None:
            decoder: Any = self.model
            stretch = self.stream.batch(step, 0, 1)
            kind: Any = type(stretch)
            batch = kind(*(None if part is None else part.to(decoder.device) for part in stretch))
            return self.stream.loss(decoder, batch).total
        chosen = batch_indices(self.dataset.count("train"), self.settings.seed, step, self.settings.batch)
        tokens = self.dataset.take("train", chosen).to(self.model.device)
        outputs, _ = self.model(self.model.shift(tokens))
        return -self.model.likelihood.log_prob(outputs, tokens).mean()

    def state_dict(self) -> dict[str, Any]:
        """The carried state, for a file."""
        return {} if self.stream is None else self.stream.get_extra_state()

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        """Resume from a saved state."""
        if self.stream is not None:
            self.stream.set_extra_state(kept)


def train(settings: Settings, name: str, model: Model, dataset: Dataset, place: Place) -> Row:
    """Train in place until the budget is spent -> ``step``, ``seconds``, ``processor`` and ``curve``, see ``measure``.

    Saves after each evaluation. Raises ValueError for a loss that is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    now: Row = {"step": 0, "seconds": 0.0, "processor": 0.0, "curve": []}
    reader = Reader(settings, name, model, dataset)
    if kept := resumed(place, name, model=model, optimizer=optimizer, reader=reader):
        now = {key: kept[key] for key in now}
    else:
        # Compilation and allocation in the first call are not timed.
        Reader(settings, name, model, dataset).loss(0).backward()
    model.train()
    first = len(now["curve"])
    for look in place.track(range(first + 1, settings.looks + 1), settings.looks - first, name):
        while (part := settings.part(now["step"], now["seconds"])) < look / settings.looks:
            begin, processor = time.perf_counter(), time.process_time()
            with drawing(settings.seed, name, "step", now["step"]):
                _step(reader, optimizer, settings.rate(now["step"], part), now["step"])
            now["step"] += 1
            now["seconds"] += time.perf_counter() - begin
            now["processor"] += time.process_time() - processor
        bits = held_out(settings, name, model, dataset, "validation", settings.evaluate_examples)
        now["curve"] = [*now["curve"], [now["step"], round(now["seconds"], 2), round(bits, 5)]]
        keep(place, name, now, model=model, optimizer=optimizer, reader=reader)
    return now


def _step(reader: Reader, optimizer: torch.optim.Optimizer, rate: float, step: int) -> None:
    optimizer.param_groups[0]["lr"] = rate
    update(reader.model, optimizer, finite(reader.loss(step), f"at step {step}", "--learning-rate"))


def held_out(settings: Settings, name: str, model: Model, dataset: Dataset, split: str, examples: int) -> float:
    """Bits per byte of a split, of about ``examples`` windows; 0: all."""
    if FAMILIES[name].stream:
        rows = streaming_eval.rows(dataset, split, examples)
        # The LSTM of ``families`` is called as a decoder is.
        nats = streaming_eval.carried(cast(Decoder, model), dataset, split, rows, Share(examples))
    else:
        nats = total(cast(Decoder, model), dataset, split, default_batch_size(dataset.length), Share(examples))
    return float(nats[0] / nats[1]) / math.log(2)


def tables(result: Result) -> list[Table]:
    """Quality and cost of each model, and published bits of larger models on another text."""
    equal, batches = result["settings"]["budget"], [str(batch) for batch in result["settings"]["batches"]]
    context = result["settings"]["context"]
    head = [f"equal {equal}", "test bits per byte", "parameters", "steps", "seconds", "cores busy"]
    speeds = [f"generated, batch {batch}" for batch in batches]
    table = [[*head, "bytes per second: trained", *speeds, f"bytes of state after {context:,}"]]
    for row in sorted(result["rows"], key=lambda row: row["test"]):
        facts = [f"{row['parameters']:,}", f"{row['steps']:,}", f"{row['seconds']:.1f}"]
        facts.append(f"{row['processor'] / row['seconds']:.2f}")
        rates = [f"{rate:,.0f}" for rate in (row["training"], *(row["generation"][batch] for batch in batches))]
        table.append([row["model"], f"{row['test']:.4f}", *facts, *rates, f"{row['state']:,}"])
    theirs = [["published, enwik8", "test bits per byte", "parameters", "source"]]
    for row in published.TEXT:
        theirs.append([row.name, f"{row.bits:.2f}", f"{row.millions} M", row.source])
    return [table, theirs]


def draw(plt: Any, result: Result) -> Any:
    """Validation bits by time and by step; test bits by the bytes of the state; how fast each generates."""
    figure, axes = plt.subplots(2, 2, figsize=(9.4, 8.2), layout="constrained")
    by_time, by_step, held, fast = axes.flat
    rows = {row["model"]: row for row in result["rows"]}
    looks = palette.looks(rows)
    for name, row in rows.items():
        steps, seconds, bits = zip(*row["curve"], strict=True)
        look = {"color": looks[name].color, "linewidth": 1.3, "markersize": 4}
        by_time.plot(seconds, bits, ".-", label=name, **look)
        by_step.plot(steps, bits, ".-", label=name, **look)
        held.plot(row["state"], row["test"], looks[name].marker, color=looks[name].color, markersize=7)
    by_time.set(title="by time", xlabel="seconds of training", ylabel="validation bits per byte")
    by_step.set(title="by step", xlabel="training steps", ylabel="validation bits per byte")
    held.set(title="what is kept of a text", ylabel="test bits per byte", xscale="log")
    held.set_xlabel(f"bytes of the state after {result['settings']['context']:,} bytes of text")
    held.margins(x=0.2)
    order, batches = sorted(rows, key=lambda name: -rows[name]["training"]), result["settings"]["batches"]
    kinds = {"trained": [rows[name]["training"] for name in order]}
    kinds |= {f"generated, {b} at once": [rows[name]["generation"][str(b)] for name in order] for b in batches}
    for i, (label, rates) in enumerate(kinds.items()):
        fast.plot(rates, range(len(order)), "osD^v"[i % 5], color=f"C{i}", label=label)
    fast.set_yticks(range(len(order)), order)
    fast.set_ylim(len(order) - 0.5, -0.5)
    fast.set(title="how fast", xlabel="bytes per second", xscale="log")
    fast.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=1)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    equal = "time" if result["settings"]["budget"] == "seconds" else "steps"
    figure.suptitle(f"byte models of as many weights, trained for equal {equal}", fontsize=10)
    plots.legend(figure, [by_time], 5)
    held_rows = list(rows.values())
    plot_labels.put(
        held, list(rows), [row["state"] for row in held_rows], [row["test"] for row in held_rows], [49.0] * len(rows)
    )
    return figure


EXPERIMENT = Experiment(
    about="byte models of every family and an LSTM, of equal size, in equal time: bits, speed, state",
    scales=Settings.scales("gpu"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source=published.TEXT_SOURCE,
    differs=(
        "Published models have 40 to 300 million weights and train on 90 million bytes of Wikipedia for days. Here "
        "each has half a million weights and about a minute, so the figures do not compare, and the order found here "
        "is that of the start of training: it favors what trains fast. All models have the same width, number of "
        "blocks, learning rate and optimizer. Feed-forward networks are sized for equal numbers of weights, and the "
        "LSTM is wider. Equal time depends on the machine; `--budget steps` gives each the same number of steps. "
        "Transformer-XL reads the text in order, in training and in the test, and so sees earlier segments; the "
        "others see separate examples. Generation starts from random bytes. `linear` and `softmax` use the decode "
        "engine, the others step in Python."
    ),
    data=lambda settings: {settings.data.partition(":")[0]: data.load(settings.data, settings.length).checksum},
    minutes=18.4,
)
