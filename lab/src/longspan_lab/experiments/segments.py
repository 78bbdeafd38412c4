"""Text in segments: memory, learned spans and auxiliary losses, and the speed of evaluation by states."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from longspan import data
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, streaming_eval
from longspan.train.evaluate import Share, default_batch_size, total
from longspan.train.learned import history

from .._utils.tables import Table
from .experiment import Buildable, Experiment, Place, Result, Row, setting, training
from .learning import curve, parameters, train_decoder

VANILLA, XL, SPANS, AUXILIARY = "vanilla", "Transformer-XL", "XL + adaptive span", "vanilla + auxiliary losses"
VARIANTS = {VANILLA: "vanilla", XL: "xl", SPANS: "spans", AUXILIARY: "auxiliary"}
STREAMS = (XL, SPANS)
WAYS = {"alone": "segments by themselves", "sliding": "a window that slides", "carried": "states carried"}


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    data: str = setting("text:stdlib", "a text: text:stdlib or text:PATH")
    length: int = setting(128, "bytes per segment", quick=16)
    memory: int = setting(128, "bytes of earlier segments in the memory of a layer", quick=16)
    span: int = setting(256, "maximum span of a head", quick=16)
    ramp: int = setting(32, "tokens over which the weights fall at the end of a span", quick=4)
    initial: float = setting(96.0, "initial span of all heads", quick=8.0)
    penalty: float = setting(1e-5, "weight of the spans in the loss: nats per token of mean span, per layer")
    targets: int = setting(2, "tokens that each position predicts with auxiliary losses", least=1)
    dim: int = setting(96, "width of the models", quick=8)
    depth: int = setting(4, "number of blocks", quick=2)
    heads: int = setting(4, "heads of each attention", quick=2)
    steps: int = setting(800, "training steps, with equally many bytes for each model", quick=4)
    batch: int = setting(8, "segments per training step", quick=2)
    learning_rate: float = setting(3e-3, "peak learning rate of a cosine schedule")
    warmup: int = setting(50, "number of warm-up steps", quick=1)
    evaluate_every: int = setting(100, "steps between two evaluations on validation text", quick=2)
    evaluate_examples: int = setting(64, "validation segments per evaluation; 0: all", quick=4)
    tests: int = setting(256, "test segments at the end; 0: all", least=0, quick=6)
    stride: int = setting(8, "stride of the test window in bytes", least=1)
    attended: tuple[int, ...] = setting(
        (128, 256, 512, 1024, 2048), "numbers of visible tokens in the speed measurements", least=1, quick=(16, 32)
    )
    rounds: int = setting(3, "timing rounds", least=1, quick=1)
    seed: int = setting(0, "seed of weights and order of the examples")

    def __post_init__(self):
        super().__post_init__()
        if self.data.partition(":")[0] != "text":
            raise ValueError(f"data={self.data}: segments are those of a text, text:stdlib or text:PATH")
        if self.stride > self.length:
            raise ValueError(f"stride={self.stride} must not be above length={self.length}")
        for kind in VARIANTS:
            self.run(kind, Path("work"))

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for kind in VARIANTS:
            with torch.random.fork_rng(devices=[]):
                Decoder(self.config(kind))

    def config(self, kind: str) -> DecoderConfig:
        """A model's config. Raises ValueError for inconsistent sizes."""
        memory = f"transformer_xl(memory={self.memory}, same_length=False, segment={self.length})"
        spans = f"adaptive_span(span={self.span}, ramp={self.ramp}, initial={self.initial})"
        attention = {XL: memory, SPANS: f"{memory}; {spans}"}.get(kind, "softmax")
        positions = {"positions": "none"} if kind in STREAMS else {"positions": "learned", "length": self.length}
        return _model(self, attention, **positions)

    def run(self, kind: str, folder: Path) -> TrainConfig:
        """A training in a folder. Raises ValueError for a field out of range."""
        run = training(self, folder, stream=kind in STREAMS, penalty=self.penalty if kind == SPANS else 0.0)
        return replace(run, intermediate=True, targets=self.targets) if kind == AUXILIARY else run


def _model(settings: Settings, attention: str, **fields: Any) -> DecoderConfig:
    size = settings.same("dim", "depth", "heads")
    return DecoderConfig(attention=attention, feedforward=4 * settings.dim, vocab=256, **size, **fields)


def points(settings: Settings) -> list[Row]:
    """The models; and the speed of evaluation by the tokens in view."""
    speeds = [{"what": "speed", "attended": tokens} for tokens in settings.attended]
    return [*({"what": "training", "kind": kind} for kind in VARIANTS), *speeds]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training, possibly resumed, and its tests; or a comparison of speed.

    A training -> ``parameters``; ``curve``: [steps made, seconds, validation bits per byte], of states carried where
    there are any; ``span``: the mean of the learned spans, None without; ``tests``: by way of evaluation, bits per byte
    of the checkpoint with the best validation, and tokens per second. A speed: see ``speed``.
    """
    if point["what"] == "speed":
        return speed(settings, point["attended"])
    kind = point["kind"]
    folder, dataset = place.folder / VARIANTS[kind], data.load(settings.data, settings.length)
    model = train_decoder(settings.config(kind), settings.run(kind, folder))
    chosen = settings.tests
    rows = streaming_eval.rows(dataset, "test", chosen)
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "alone": lambda: total(model, dataset, "test", default_batch_size(dataset.length), Share(chosen)),
        "sliding": lambda: streaming_eval.sliding(model, dataset, "test", settings.stride, rows, chosen, place.track),
    }
    if kind in STREAMS:
        ways["carried"] = lambda: streaming_eval.carried(model, dataset, "test", rows, Share(chosen), place.track)
    recorded = history(folder)
    spans = [z for _, heads in recorded[-1]["spans"] for z in heads] if recorded else None
    return {
        "parameters": parameters(model),
        "curve": curve(folder),
        "span": round(mean(spans), 2) if spans else None,
        "tests": {way: _tested(ways[way]) for way in ways},
    }


def _tested(evaluate: Callable[[], torch.Tensor]) -> dict[str, float]:
    begin = time.perf_counter()
    nats, tokens = evaluate().tolist()
    return {"bits": round(nats / tokens / math.log(2), 5), "rate": round(tokens / (time.perf_counter() - begin), 1)}


@torch.no_grad()
def speed(settings: Settings, attended: int) -> Row:
    """Tokens per second of untrained models: ``sliding``, of a vanilla one whose window of ``attended``
    tokens is computed anew for each token; ``carried``, of a Transformer-XL with a memory of as many, a segment a call.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        vanilla = Decoder(_model(settings, "softmax", positions="learned", length=attended)).eval().to(device)
        memory = Decoder(_model(settings, f"transformer_xl(memory={attended})", positions="none")).eval().to(device)
        windows = torch.randint(256, (default_batch_size(attended), attended), device=device)
        text = torch.randint(256, (settings.batch, attended + settings.length), device=device)
    _, full = memory(text[:, :attended], memory.init_state(settings.batch))

    def carried() -> int:
        memory(text[:, attended:], full)
        return text[:, attended:].numel()

    def sliding() -> int:
        vanilla(windows)
        return len(windows)  # only the last token of each counts

    return {"sliding": _fastest(sliding, settings.rounds), "carried": _fastest(carried, settings.rounds)}


def _fastest(call: Callable[[], int], rounds: int) -> float:
    """Tokens per second of the fastest call, after a warm-up."""
    call()
    found = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        tokens = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(tokens / (time.perf_counter() - begin))
    return round(max(found), 2)


def _split(result: Result) -> tuple[list[Row], list[Row]]:
    rows = result["rows"]
    return [row for row in rows if row["what"] == "training"], [row for row in rows if row["what"] == "speed"]


def tables(result: Result) -> list[Table]:
    """What each model reaches at equal steps, and the speed of its tests; and the speed by the tokens in view."""
    models, speeds = _split(result)
    bits = [["test bits per byte", "parameters", "training, s", "mean span", "validation", *WAYS.values()]]
    rates = [["test, tokens per second", *WAYS.values()]]
    for row in models:
        tests = [row["tests"].get(way) for way in WAYS]
        span = "" if row["span"] is None else f"{row['span']:.1f}"
        best = f"{min(value for *_, value in row['curve']):.4f}"
        facts = [f"{row['parameters']:,}", f"{row['curve'][-1][1]:.0f}", span, best]
        bits.append([row["kind"], *facts, *("" if one is None else f"{one['bits']:.4f}" for one in tests)])
        rates.append([row["kind"], *("" if one is None else f"{one['rate']:,.0f}" for one in tests)])
    last = [["tokens in view", "sliding by 1, tokens per second", "states carried, tokens per second", "ratio"]]
    for row in speeds:
        ratio = f"{row['carried'] / row['sliding']:.0f}"
        last.append([str(row["attended"]), f"{row['sliding']:,.1f}", f"{row['carried']:,.0f}", ratio])
    return [bits, rates, last]


def draw(plt: Any, result: Result) -> Any:
    """Validation bits by step and by time; test bits by way of evaluation; the ratio of the speeds."""
    figure, grid = plt.subplots(2, 2, figsize=(9.0, 7.8), layout="constrained")
    axes = grid.flat
    models, speeds = _split(result)
    for i, row in enumerate(models):
        steps, seconds, bits = zip(*row["curve"], strict=True)
        axes[0].plot(steps, bits, ".-", color=f"C{i}", label=row["kind"])
        axes[1].plot(seconds, bits, ".-", color=f"C{i}", label=row["kind"])
        for way, one in row["tests"].items():
            mark, name = "osD"[list(WAYS).index(way)], WAYS[way] if i == 1 else None
            axes[2].plot(one["rate"], one["bits"], mark, color=f"C{i}", label=name)
    axes[0].set(title="at equal steps", xlabel="training steps", ylabel="validation bits per byte")
    axes[1].set(title="by time", xlabel="seconds of training", ylabel="validation bits per byte")
    axes[2].set(title="tests", xlabel="tokens per second", ylabel="test bits per byte", xscale="log")
    axes[2].xaxis.set_major_locator(plt.LogLocator(subs=(1, 3)))
    axes[2].xaxis.set_major_formatter("{x:,.0f}")
    axes[2].xaxis.set_minor_formatter(plt.NullFormatter())  # the default labels overlap below two decades
    attended = [row["attended"] for row in speeds]
    axes[3].plot(attended, [row["carried"] / row["sliding"] for row in speeds], "o-", color="C1")
    axes[3].set(title="states carried, or sliding by 1", xlabel="tokens in view", ylabel="ratio of tokens per second")
    axes[3].set(xscale="log")
    axes[3].set_xticks(attended, [str(tokens) for tokens in attended])
    axes[3].minorticks_off()
    for axis in axes:
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=9)
    return figure


EXPERIMENT = Experiment(
    about="text in segments: vanilla, with memory, learned spans or auxiliary losses; evaluation by states",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source=(
        "Dai et al. 2019 (1901.02860), byte text with and without a memory, and the abstract's evaluation that is up "
        "to 1,800 times as fast; Sukhbaatar et al. 2019 (1905.07799); Al-Rfou et al. 2018 (1808.04444), section 3"
    ),
    differs=(
        "Published models are large and train on enwik8 and text8 for days. Here small models train on source code "
        "for minutes, each on equally many bytes. Every other layer of the third model has spans, and the others the "
        "memory; in the paper all layers have spans, with relative positions. Auxiliary losses were published for 64 "
        "layers, where training failed without them. Evaluation by carried states and by a sliding window reads the "
        "same bytes; evaluation by separate segments reads as many, at even distances. For the speed measurements the "
        "vanilla window is as long as the memory, and both models are untrained. Published ratios are those of a GPU."
    ),
    data=lambda settings: {settings.data.partition(":")[0]: data.load(settings.data, settings.length).checksum},
    minutes=13.0,
)
