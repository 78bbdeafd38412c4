"""Proteins of a bacterium: residues predicted from the earlier ones, or from all others."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from longspan._utils import model_memory, spec
from longspan.data.order import batch_indices
from longspan.models.config import DecoderConfig, EncoderConfig
from longspan.models.decoder import Decoder
from longspan.models.encoder import Encoder

from .._utils import palette, plots
from .._utils.tables import Table
from ..data import proteins
from ..data.proteins import Proteins
from . import published, residues
from .experiment import DEVICES, Buildable, Experiment, Place, Result, Row, check_device, generator, setting
from .learning import Learning, born, learn, parameters
from .residues import Asked, Rows

CAUSAL, MASKED = "causal", "masked"
TASKS = (CAUSAL, MASKED)
UNIGRAM = "frequencies alone"
SPECS = ("softmax", "performer(map='relu', features=64)", "performer(features=64)", "linear")


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale.

    At the paper scale as deep, wide and long as published, for one GPU and your data; heads, rate and steps are ours.
    """

    data: str = setting(
        "protein", "protein:FILE, a FASTA file of proteins; protein:FOLDER, with one; or synthetic", quick="synthetic"
    )
    specs: str = setting(
        "; ".join(SPECS), "attentions, separated by semicolons; one model each", quick="softmax; performer(map='relu')"
    )
    length: int = setting(
        512, "residues per row; a row holds several proteins, and longer ones are cut", least=1, quick=64, gpu=1024
    )
    dim: int = setting(64, "width of the models", least=1, quick=8, gpu=256, paper=512)
    depth: int = setting(2, "number of blocks", least=1, quick=1, gpu=6, paper=36)
    heads: int = setting(4, "heads of each attention", least=1, quick=2, gpu=8)
    steps: int = setting(400, "number of training steps", least=1, quick=4, gpu=5000, paper=100_000)
    batch: int = setting(8, "rows per training step", least=1, quick=2, gpu=16)
    rate: float = setting(3e-3, "peak learning rate of a cosine schedule", positive=True, gpu=1e-3)
    every: int = setting(
        50, "steps between two evaluations on validation proteins", least=1, quick=2, gpu=250, paper=1000
    )
    looked: int = setting(0, "validation rows per evaluation, evenly spaced; 0: all", least=0, quick=2)
    draws: int = setting(
        2, f"of {residues.SHARES} parts of the test's residues as many are masked, each in its turn", least=1, quick=1
    )
    seeds: tuple[int, ...] = setting((0,), "seed of weights, order, masks and synthetic proteins", least=0)
    device: str = setting("cpu", "device: cpu or cuda", among=DEVICES, gpu="cuda")

    def __post_init__(self):
        super().__post_init__()
        if self.draws > residues.SHARES:
            raise ValueError(f"draws={self.draws}: there are {residues.SHARES} parts of the residues to be masked")
        if self.data == "synthetic" and len(self.seeds) > 1:
            raise ValueError("data=synthetic is made from the seed, so that several seeds would have several data")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for one in spec.split(self.specs):
            for task in TASKS:
                model_memory.shapes(lambda one=one, task=task: made(replace(self.config(task, one), depth=1)))

    def config(self, task: str, attention: str) -> DecoderConfig | EncoderConfig:
        """Config of the model of one task."""
        size = self.same("dim", "depth", "heads")
        size |= {"feedforward": 4 * self.dim, "attention": attention, "positions": "sinusoidal"}
        if task == CAUSAL:
            return DecoderConfig(vocab=residues.LEVELS, **size)
        # One more token, the mask.
        return EncoderConfig(vocab=residues.LEVELS + 1, outputs=residues.LEVELS, **size)

    def model(self, task: str, attention: str, seed: int) -> Decoder | Encoder:
        """A model of one task with initial weights that depend on the seed alone."""
        return born(lambda: made(self.config(task, attention)), seed)


def made(config: DecoderConfig | EncoderConfig) -> Decoder | Encoder:
    """The decoder or the encoder of a config."""
    return Decoder(config) if isinstance(config, DecoderConfig) else Encoder(config)


def points(settings: Settings) -> list[Row]:
    """For each task the residue frequencies, then the trainings. Raises ValueError without a GPU that is asked
    for.
    """
    check_device(settings.device)
    found: list[Row] = []
    for task in TASKS:
        found.append({"task": task, "model": UNIGRAM})
        trained = [(seed, name) for seed in settings.seeds for name in spec.split(settings.specs)]
        found += [{"task": task, "model": name, "seed": seed} for seed, name in trained]
    return found


@lru_cache(maxsize=1)
def loaded(name: str, seed: int) -> Proteins:
    """The proteins, read once."""
    return proteins.load(name, seed)


@lru_cache(maxsize=1)
def packed(name: str, seed: int, length: int) -> dict[str, Rows]:
    """Each split as rows."""
    found = loaded(name, seed)
    return {
        split: residues.rows([found.sequences[i] for i in chosen.tolist()], length)
        for split, chosen in found.splits.items()
    }


def data(settings: Settings) -> dict[str, str]:
    """The checksum of the file; nothing for synthetic proteins."""
    found = loaded(settings.data, settings.seeds[0])
    return {"protein": found.checksum} if found.checksum else {}


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One task by one model, on proteins of unseen families.

    -> ``accuracy`` and ``perplexity`` on the requested residues of the test. Of a training also ``curve``, the
    same on validation proteins by step, and ``parameters``; of the frequencies ``validation``, and ``splits``: how many
    families, proteins and residues each split has.
    """
    found = packed(settings.data, settings.seeds[0], settings.length)
    looked = _some(found["validation"], settings.looked)
    task = point["task"]
    questions = {
        "validation": (looked, asked(task, looked, generator(settings.seeds[0], "validation"), 1)),
        "test": (found["test"], asked(task, found["test"], generator(settings.seeds[0], "test"), settings.draws)),
    }
    if point["model"] == UNIGRAM:
        counts = torch.bincount(found["train"].tokens[found["train"].real], minlength=residues.LEVELS)
        shares = {split: unigram(counts, *question) for split, question in questions.items()}
        return {**shares["test"], "validation": shares["validation"], "splits": _sizes(settings, found)}
    model = settings.model(task, point["model"], point["seed"]).to(settings.device)
    train, seed = found["train"], point["seed"]

    def loss(model: Decoder | Encoder, step: int) -> Tensor:
        rows = train.take(batch_indices(len(train.tokens), seed, step, settings.batch))
        question = residues.causal(rows) if task == CAUSAL else residues.masked(rows, generator(seed, "mask", step))
        return F.cross_entropy(*replies(model, rows, question))

    order = spec.split(settings.specs).index(point["model"])
    name = f"{task}-{spec.head(point['model'])}-{order}-{seed}"

    def look(model: Decoder | Encoder) -> Row:
        return tested(model, *questions["validation"], settings.batch)

    curve = learn(model, Learning(name, seed, settings.steps, settings.rate, loss, look, settings.every), place)
    figures = tested(model, *questions["test"], settings.batch)
    return {**figures, "curve": curve, "parameters": parameters(model)}


def asked(task: str, rows: Rows, random: torch.Generator, draws: int) -> list[Asked]:
    """Inputs and requested residues of a test."""
    return [residues.causal(rows)] if task == CAUSAL else residues.parts(rows, random, draws)


def answers(model: Decoder | Encoder, rows: Rows, question: Asked) -> Tensor:
    """Logits of a model (B,N,LEVELS), where the model is."""
    device = next(model.parameters()).device
    found = model(question.inputs.to(device), segments=rows.segments.to(device))
    return found[0] if isinstance(model, Decoder) else found


def replies(model: Decoder | Encoder, rows: Rows, question: Asked) -> tuple[Tensor, Tensor]:
    """Logits of the requested residues (A,LEVELS), and these residues (A,), on the device of the model."""
    logits = answers(model, rows, question)
    return logits[question.asked.to(logits.device)], rows.tokens[question.asked].to(logits.device)


@torch.no_grad()
def tested(model: Decoder | Encoder, rows: Rows, questions: list[Asked], batch: int) -> Row:
    """``accuracy`` and ``perplexity`` on all requested residues."""
    right, nats, count = 0, 0.0, 0
    for question in questions:
        for chosen in torch.arange(len(rows.tokens)).split(batch):
            part, put = rows.take(chosen), Asked(*(one[chosen] for one in question))
            logits, targets = replies(model, part, put)
            right += int((logits.argmax(-1) == targets).sum())
            nats += float(F.cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    return _figures(right, nats, count)


def unigram(counts: Tensor, rows: Rows, questions: list[Asked]) -> Row:
    """The same for one distribution for all places: each residue's share of ``counts`` (LEVELS,), each plus one."""
    share = (counts + 1).double() / (counts + 1).sum()
    targets = torch.cat([rows.tokens[question.asked] for question in questions])
    right = int((targets == counts.argmax()).sum())
    return _figures(right, -float(share[targets].log().sum()), len(targets))


def _figures(right: int, nats: float, count: int) -> Row:
    return {"accuracy": round(right / count, 5), "perplexity": round(math.exp(nats / count), 4)}


def _some(rows: Rows, count: int) -> Rows:
    """``count`` rows, evenly spaced; all of them for 0 or more than there are."""
    size = len(rows.tokens)
    return rows if not count or count >= size else rows.take(torch.arange(count) * size // count)


def _sizes(settings: Settings, found: dict[str, Rows]) -> dict[str, list[int]]:
    """Split -> families, proteins, residues that are read."""
    all_of = loaded(settings.data, settings.seeds[0])
    return {
        split: [len(all_of.families[chosen].unique()), len(chosen), int(found[split].real.sum())]
        for split, chosen in all_of.splits.items()
    }


def tables(result: Result) -> list[Table]:
    """Accuracy and perplexity of both tasks, ours and the published; sizes of the splits."""
    names = list(dict.fromkeys((row["model"], row.get("seed")) for row in result["rows"]))
    several = len(result["settings"]["seeds"]) > 1
    head = [f"{task}: {what}" for task in TASKS for what in ("accuracy, %", "perplexity")]
    first = [["test", *head, "parameters"]]
    for name, seed in names:
        rows = [row for row in result["rows"] if (row["model"], row.get("seed")) == (name, seed)]
        by = {row["task"]: row for row in rows}
        cells = [_cells(by.get(task)) for task in TASKS]
        title = f"{name}, seed {seed}" if several and seed is not None else name
        sizes = [f"{row['parameters']:,}" for row in rows if "parameters" in row]
        first.append([title, *cells[0], *cells[1], ", ".join(dict.fromkeys(sizes))])
    second = [["published, on TrEMBL", "accuracy, %", "perplexity", "families held out: accuracy, %", "perplexity"]]
    for row in published.PROTEIN:
        figures = (row.accuracy, row.perplexity, *row.families)
        second.append([f"{row.task}: {row.name}", *(f"{value:.2f}" for value in figures)])
    third = [["split", "families", "proteins", "residues"]]
    splits = next((row["splits"] for row in result["rows"] if "splits" in row), {})
    third += [[split, *(f"{count:,}" for count in counts)] for split, counts in splits.items()]
    return [first, second, third]


def _cells(row: Row | None) -> list[str]:
    return ["", ""] if row is None else [f"{100 * row['accuracy']:.2f}", f"{row['perplexity']:.2f}"]


def draw(plt: Any, result: Result) -> Any:
    """Accuracy on validation proteins by training step: causal, and masked."""
    figure, axes = plt.subplots(1, 2, figsize=(9.0, 4.3), layout="constrained")
    looks = palette.looks(spec.split(result["settings"]["specs"]))
    for axis, task in zip(axes, TASKS, strict=True):
        for row in (row for row in result["rows"] if row["task"] == task):
            if "curve" not in row:
                axis.axhline(100 * row["validation"]["accuracy"], color="grey", linestyle="--", label=row["model"])
                continue
            x, y = zip(*((one["step"], 100 * one["accuracy"]) for one in row["curve"]), strict=True)
            first = row["seed"] == result["settings"]["seeds"][0]
            look = {**looks[row["model"]]._asdict(), "markersize": 4}
            axis.plot(x, y, label=row["model"] if first else None, **look)
        axis.set(title=task, xlabel="training steps", ylabel="accuracy on validation residues, %")
        axis.grid(alpha=0.3)
    plots.legend(figure, axes, 2)
    return figure


EXPERIMENT = Experiment(
    about="amino acids predicted from the earlier ones or from all others: Performer, softmax, linear",
    scales=Settings.scales("gpu", "paper"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=tables,
    draw=draw,
    source=f"{published.PROTEIN_SOURCE}; figure 6 has the curves",
    differs=(
        "Published models have 36 layers, are 512 wide, and train on TrEMBL, a hundred million proteins, on TPUs. "
        "Here they are small enough for minutes and train on the few thousand proteins of one bacterium. `--scale "
        "paper` has the published sizes, for the data that `--data protein:FILE` names. Several proteins share a row "
        "and do not see each other. A protein longer than a row is cut; the paper cuts at 1024. Families are not "
        "known here. Two proteins belong to one family if one shares a hundredth of its words of six residues with "
        "the other, and at least two words; families are the connected groups. This finds relatives that agree in "
        "about half of their residues, and no distant ones, so families are narrower than the Pfam families that the "
        "paper holds out. Training masks residues as in BERT. Tests mask every residue to be predicted, because a "
        "model could copy those that BERT leaves unchanged. Performers draw their rows once."
    ),
    data=data,
    minutes=7.4,
)
