"""Copying a sequence of symbols: how fast transformers learn it, by their attention."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._utils import spec
from longspan.attention import build
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, rate

from .._utils import palette, plots
from .._utils.tables import Table
from . import paper
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
from .learning import finite, fresh, keep, resumed

EVERY, KEEP = 50, 200
GOAL = 1e-2


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale.

    The publication gives no width; at the paper scale it is that of its image models.
    """

    specs: str = setting(f"softmax; linear; {paper.LSH}", "attentions, separated by semicolons; one model each")
    seeds: tuple[int, ...] = setting(
        (0,),
        "seeds of weights and sequences; one training per attention and seed",
        least=0,
        quick=(0, 1),
        gpu=(0, 1, 2),
    )
    length: int = setting(128, "even number of tokens: twice a separator and the symbols", least=4, quick=10)
    symbols: int = setting(10, "number of different symbols, without the separator", least=1, quick=3)
    dim: int = setting(128, "width of the models", least=1, quick=8, gpu=256)
    depth: int = setting(4, "number of blocks", least=1, quick=1)
    heads: int = setting(8, "heads of each attention", least=1, quick=2)
    feedforward: int = setting(256, "inner width of the feed-forward networks", least=1, quick=16, gpu=1024)
    positions: str = setting("sinusoidal", "positions: none, sinusoidal, learned or rotary")
    batch: int = setting(16, "sequences per update", least=1, quick=3, gpu=64)
    steps: int = setting(1500, "number of updates", least=1, quick=20, gpu=10_000)
    rate: float = setting(1e-3, "initial learning rate of RAdam", positive=True)
    drop_at: int = setting(1200, "updates after which the learning rate drops to a tenth", least=1, quick=10, gpu=3000)
    tests: int = setting(64, f"test sequences, every {EVERY} updates", least=1, quick=2)
    device: str = setting("cpu", "device: cpu or cuda", among=DEVICES, gpu="cuda")

    def __post_init__(self):
        super().__post_init__()
        if self.length % 2:
            raise ValueError(f"length={self.length} must be even: a separator and the symbols come twice")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for name in spec.split(self.specs):
            build(name, self.dim, self.heads)
            self.config(name)

    def config(self, attention: str) -> DecoderConfig:
        """The config of the decoder. Raises ValueError for inconsistent sizes."""
        same = self.same("dim", "depth", "heads", "feedforward", "length", "positions")
        return DecoderConfig(attention=attention, vocab=self.symbols + 1, **same)


def points(settings: Settings) -> list[Row]:
    """Every training, seed by seed. Raises ValueError if the requested GPU is missing."""
    check_device(settings.device)
    return [{"seed": seed, "spec": name} for seed in settings.seeds for name in spec.split(settings.specs)]


def draw(settings: Settings, count: int, seed: int, *names: object) -> Tensor:
    """Sequences of separator (0), random symbols, separator, the same symbols: (B,N), the same for the same names."""
    half = settings.length // 2 - 1
    symbols = torch.randint(1, settings.symbols + 1, (count, half), generator=generator(seed, *names))
    part = F.pad(symbols, (1, 0))
    return torch.cat([part, part], 1)


def loss(model: Decoder, tokens: Tensor) -> Tensor:
    """Cross entropy of the symbols of the second half, in nats a symbol."""
    half = tokens.shape[1] // 2 - 1
    outputs, _ = model(model.shift(tokens))
    return F.cross_entropy(outputs[:, -half:].flatten(0, 1), tokens[:, -half:].flatten())


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training -> ``curve``: [updates, test loss in nats]; ``test``: the last of these; ``reached``: updates until
    the test loss was first below GOAL, None for never.
    """
    seed, name = point["seed"], f"{point['spec']}-{point['seed']}"
    model = fresh(settings.config(point["spec"]), seed).to(settings.device)
    optimizer = torch.optim.RAdam(model.parameters(), lr=settings.rate)
    tests = draw(settings, settings.tests, seed, "test").to(settings.device)
    run = TrainConfig(steps=settings.steps, learning_rate=settings.rate, schedule="drop", drop_at=settings.drop_at)
    first, curve = 0, [[0, test(model, tests)]]
    if kept := resumed(place, name, model=model, optimizer=optimizer):
        first, curve = kept["step"], kept["curve"]
    for step in place.track(range(first, settings.steps), settings.steps - first, f"copy {point['spec']}, seed {seed}"):
        optimizer.param_groups[0]["lr"] = rate(run, step)
        tokens = draw(settings, settings.batch, seed, "train", step).to(settings.device)
        optimizer.zero_grad()
        with drawing(seed, "step", step):
            finite(loss(model, tokens), f"at step {step} of {point['spec']}").backward()
        optimizer.step()
        done = step + 1
        if done % EVERY == 0 or done == settings.steps:
            curve.append([done, test(model, tests)])
        if done % KEEP == 0:
            keep(place, name, {"step": done, "curve": curve}, model=model, optimizer=optimizer)
    reached = next((done for done, value in curve if value < GOAL), None)
    return {"curve": curve, "test": curve[-1][1], "reached": reached}


@torch.no_grad()
def test(model: Decoder, tokens: Tensor) -> float:
    """The loss on given sequences, with six digits."""
    return float(f"{loss(model, tokens).item():.6g}")


def tables(result: Result) -> list[Table]:
    """Of every training the last loss, and when the goal was reached."""
    table = [["test loss, nats a symbol", "seed", "at the end", f"updates until below {GOAL:g}"]]
    for row in sorted(result["rows"], key=lambda row: (_order(result).index(row["spec"]), row["seed"])):
        table.append([row["spec"], str(row["seed"]), f"{row['test']:.3g}", str(row["reached"] or "not reached")])
    return [table]


def draw_curves(plt: Any, result: Result) -> Any:
    """Loss by updates, a line for each training: one color for each attention."""
    figure, axis = plt.subplots(figsize=(7.6, 4.6), layout="constrained")
    settings = result["settings"]
    looks = palette.looks(_order(result))
    for name in _order(result):
        rows = [row for row in result["rows"] if row["spec"] == name]
        for j, row in enumerate(rows):
            label = f"{name}, seed {', '.join(str(one['seed']) for one in rows)}" if j == 0 else None
            look = {"color": looks[name].color, "linestyle": looks[name].linestyle}
            axis.plot(*zip(*row["curve"], strict=True), linewidth=1.2, alpha=0.8, label=label, **look)
    axis.axhline(GOAL, color="grey", linewidth=1, linestyle=":")
    axis.axvline(settings["drop_at"], color="grey", linewidth=1, linestyle="--")
    axis.set(yscale="log", xlabel="updates (dashes: the learning rate drops)", ylabel="test loss, nats a symbol")
    axis.set_title(f"copying {settings['length'] // 2 - 1} symbols")
    axis.grid(alpha=0.3)
    plots.legend(figure, [axis], 2)
    return figure


def _order(result: Result) -> list[str]:
    return spec.split(result["settings"]["specs"])


EXPERIMENT = Experiment(
    about="how fast a transformer learns to copy a sequence, by its attention",
    scales=Settings.scales("gpu", "paper"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw_curves,
    source="Katharopoulos et al. 2020 (2006.16236), section 4.1.1 and figure 2, of which no figures are published",
    differs=(
        "The publication does not state the width of its models or their kind of positions, and its sequences have at "
        "most 128 tokens. Here all have 128: a separator and 63 symbols, twice. To train in minutes, the models are "
        "128 wide with feed-forward networks of 256, an update has 16 sequences instead of 64, and the learning rate "
        "drops before 3000 updates. Weights start as PyTorch initializes them, not with the deviation of 0.02 of our "
        "decoders, which suits wider models. `--scale paper` uses the published batch and rates, and the width of the "
        "publication's image models. Reformer, the publication's lsh-1 and lsh-4, is our implementation: its causal "
        "chunks are counted inside a bucket, so that later tokens do not leak. Each figure names the attentions that "
        "it has."
    ),
    minutes=37.0,
)
