"""Copying beyond the trained lengths, by a Universal Transformer and plain ones."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._utils import spec
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder, DecoderState
from longspan.models.stacks.universal import UniversalState
from longspan.modules.positions import parse

from .._utils import plots
from .._utils.tables import Table
from .experiment import Buildable, Experiment, Place, Result, Row, generator, setting
from .learning import Learning, fresh, learn, parameters

UNIVERSAL, TIED, DEEP = "universal", "plain, as many weights", "plain, as wide"
VARIANTS = (UNIVERSAL, TIED, DEEP)


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale."""

    attention: str = setting("softmax", "attention of all models")
    positions: str = setting(
        "sinusoidal; relative", "positions, separated by semicolons; every model is trained with each"
    )
    longest: int = setting(8, "symbols of the longest training sequence; lengths start at 1", least=1, quick=3)
    tests: tuple[int, ...] = setting(
        (4, 8, 12, 16, 24), "numbers of symbols of the test sequences", least=1, quick=(2, 4)
    )
    symbols: int = setting(10, "number of different symbols", least=1, quick=3)
    offset: int = setting(32, "upper bound of the random start of sinusoidal positions in training", least=1, quick=4)
    steps: int = setting(
        4, "repetitions of the universal block; number of blocks of the plain models", least=1, quick=2
    )
    dim: int = setting(64, "width of the universal model and of the equally wide plain one", least=1, quick=8)
    narrow: int = setting(32, "width of the plain model with equally many weights", least=1, quick=4)
    heads: int = setting(4, "heads of each attention", least=1, quick=2)
    batch: int = setting(32, "sequences per update", least=1, quick=3)
    updates: int = setting(700, "number of updates", least=1, quick=4)
    rate: float = setting(3e-3, "peak learning rate of a cosine schedule", positive=True)
    count: int = setting(64, "test sequences of each length", least=1, quick=3)
    seed: int = setting(0, "seed of weights and sequences", least=0)

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for positions in spec.split(self.positions):
            for kind in VARIANTS:
                self.config(kind, positions)
            fresh(self.config(UNIVERSAL, positions), self.seed)

    def config(self, kind: str, positions: str) -> DecoderConfig:
        """A model's config. Raises ValueError for inconsistent sizes."""
        dim, depth, stack = (self.narrow if kind == TIED else self.dim), self.steps, "plain"
        if kind == UNIVERSAL:
            both = positions == "sinusoidal"
            # As published, these are added before every step; relative positions act in every step anyway.
            depth, positions = 1, "none" if both else positions
            stack = f"universal(steps={self.steps}, coordinates={'both' if both else 'step'!r})"
        same = self.same("heads", "attention")
        size = {"dim": dim, "depth": depth, "feedforward": 2 * dim, "vocab": self.symbols + 1}
        return DecoderConfig(positions=positions, stack=stack, **size, **same)


def points(settings: Settings) -> list[Row]:
    """Every model with all positions."""
    return [{"positions": name, "kind": kind} for name in spec.split(settings.positions) for kind in VARIANTS]


def sequences(settings: Settings, count: int, length: int, *names: object) -> Tensor:
    """A separator (0), symbols, a separator, the same symbols, (B,2 length+2): the same for the same names."""
    made = torch.randint(1, settings.symbols + 1, (count, length), generator=generator(settings.seed, *names))
    part = F.pad(made, (1, 0))
    return torch.cat([part, part], 1)


def begun(model: Decoder, offsets: Tensor) -> DecoderState:
    """The state before the first token, whose position is one of these (B,) instead of 0."""
    state = model.init_state(len(offsets))
    layers = state.layers
    if isinstance(layers, UniversalState):
        layers = layers._replace(position=offsets)
    return DecoderState(offsets, layers)


def outputs_of(model: Decoder, tokens: Tensor, offsets: Tensor | None) -> Tensor:
    """Logits for the symbols of the second half."""
    half = tokens.shape[1] // 2 - 1
    outputs, _ = model(model.shift(tokens), None if offsets is None else begun(model, offsets))
    return outputs[:, -half:]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training -> ``weights``: how many numbers learn; ``curve``: rows of ``step`` and ``right``, the part of the
    symbols of the longest training length that are right; ``right``: [symbols, part right, part of the sequences that
    are right throughout] for each length of the tests. What came before each symbol is given.
    """
    kind, positions = point["kind"], point["positions"]
    moved = parse(positions).kind == "sinusoidal"

    def loss(model: Decoder, step: int) -> Tensor:
        drawn = generator(settings.seed, "length", step)
        length = int(torch.randint(1, settings.longest + 1, (), generator=drawn))
        tokens = sequences(settings, settings.batch, length, "train", step)
        offsets = torch.randint(0, settings.offset, (settings.batch,), generator=drawn) if moved else None
        outputs = outputs_of(model, tokens, offsets)
        return F.cross_entropy(outputs.flatten(0, 1), tokens[:, -length:].flatten())

    def look(model: Decoder) -> Row:
        return {"right": copied(model, settings, settings.longest)[1]}

    model = fresh(settings.config(kind, positions), settings.seed)
    name = f"{spec.split(settings.positions).index(positions)}-{VARIANTS.index(kind)}"
    curve = learn(model, Learning(name, settings.seed, settings.updates, settings.rate, loss, look), place)
    right = [copied(model, settings, length) for length in settings.tests]
    return {"weights": parameters(model), "curve": curve, "right": right}


@torch.no_grad()
def copied(model: Decoder, settings: Settings, length: int) -> list[float]:
    """[symbols, part of the symbols that are right, part of the sequences that are so throughout]."""
    tokens = sequences(settings, settings.count, length, "test", length)
    right = outputs_of(model, tokens, None).argmax(-1) == tokens[:, -length:]
    return [length, round(right.double().mean().item(), 4), round(right.all(1).double().mean().item(), 4)]


def tables(result: Result) -> list[Table]:
    """Right symbols and right sequences by length."""
    lengths = result["settings"]["tests"]
    found = []
    for column, what in ((1, "symbols right, %"), (2, "sequences right, %")):
        table: Table = [[what, "positions", "weights", *(f"{n} symbols" for n in lengths)]]
        for row in result["rows"]:
            cells = (f"{100 * one[column]:.1f}" for one in row["right"])
            table.append([row["kind"], row["positions"], f"{row['weights']:,}", *cells])
        found.append(table)
    return found


def draw(plt: Any, result: Result) -> Any:
    """Right symbols by length, a panel for each kind of positions; and as they were learned."""
    kinds = list(dict.fromkeys(row["positions"] for row in result["rows"]))
    figure, axes = plt.subplots(2, len(kinds), figsize=(3.7 * len(kinds), 7.0), layout="constrained", squeeze=False)
    for (top, bottom), positions in zip(axes.T, kinds, strict=True):
        for row in result["rows"]:
            if row["positions"] == positions:
                look = {"color": f"C{VARIANTS.index(row['kind'])}", "label": row["kind"]}
                top.plot([n for n, *_ in row["right"]], [100 * one for _, one, _ in row["right"]], "o-", **look)
                bottom.plot([one["step"] for one in row["curve"]], [100 * one["right"] for one in row["curve"]], **look)
        top.axvline(result["settings"]["longest"], color="grey", linewidth=1, linestyle="--")
        top.set_xticks(result["settings"]["tests"])
        top.set(title=f"positions {positions}", ylabel="symbols right, %", ylim=(0, 102))
        top.set_xlabel("symbols to copy\n(dashes: the longest of the training)")
        bottom.set(xlabel="updates", ylabel="right at the longest length, %", ylim=(0, 102))
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
    plots.legend(figure, axes.flat, 3)
    return figure


EXPERIMENT = Experiment(
    about="copying sequences longer than in training: a Universal Transformer and plain transformers",
    scales=Settings.scales(),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source="Dehghani et al. 2018 (1807.03819), section 3.3, where models learn 40 symbols and copy 400",
    differs=(
        "The publication has encoder-decoder models, 40 symbols in training and 400 in the test, large models, and "
        "one kind of positions. Here small decoders train for minutes on lengths from 1 on, and read up to three "
        "times as many symbols. The correct earlier symbols are given, so one mistake causes no others. As published, "
        "sinusoidal positions start at a random offset in training."
    ),
    minutes=1.5,
)
