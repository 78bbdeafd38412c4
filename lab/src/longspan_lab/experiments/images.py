"""Images, pixel by pixel: what linear and softmax transformers of equal size learn and generate, and how fast."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from longspan import data
from longspan._utils import png, spec
from longspan.attention import build
from longspan.data import Dataset
from longspan.generation.sampling import generate
from longspan.models import likelihood
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import TrainConfig, bits
from longspan.train.evaluate import default_batch_size

from . import images_report, images_speed, paper
from .experiment import Buildable, Experiment, Place, Row, setting, training
from .learning import curve, parameters, slug, train_decoder, trained

DATA = ("digits", "mnist", "cifar10")


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale.

    At the paper scale: Katharopoulos et al. 2020, section 4.2.1, 250 epochs of 55,000 images; the last 5000 of 60,000
    are for validation.
    """

    data: str = setting("mnist", "mnist, cifar10 (each also with :FOLDER) or digits", quick="digits")
    attentions: str = setting(
        f"linear; softmax; {paper.LSH}",
        "attentions, separated by semicolons; one model each, compared with the first",
        quick="linear; softmax",
        gpu=f"linear; softmax; {paper.LSH_IMAGES}",
    )
    dim: int = setting(128, "width of the models", quick=8, gpu=256)
    depth: int = setting(4, "number of blocks", quick=1, gpu=8)
    heads: int = setting(4, "heads of each attention", quick=2, gpu=8)
    likelihood: str = setting(
        "categorical",
        "likelihood of a pixel: categorical, or a mixture such as logistics(mixtures=10)",
        quick="logistics(mixtures=2)",
        gpu="logistics(mixtures=10)",
    )
    steps: int = setting(120, "number of training steps for each model", quick=4, gpu=50_000, paper=1_375_000)
    batch: int = setting(10, "images per training step", quick=3, gpu=40, paper=10)
    optimizer: str = setting("adamw", "optimizer: adamw | radam", paper="radam")
    learning_rate: float = setting(3e-3, "peak learning rate", gpu=1e-3, paper=1e-4)
    schedule: str = setting("cosine", "learning rate schedule: cosine | constant", paper="constant")
    warmup: int = setting(20, "number of warm-up steps", quick=1, gpu=500, paper=0)
    weight_decay: float = setting(0.05, "weight decay of matrices", paper=0.0)
    precision: str = setting("32", "training precision: 32 | bf16", gpu="bf16", paper="32")
    evaluate_every: int = setting(
        40, "steps between two evaluations on validation images", quick=2, gpu=1000, paper=5500
    )
    evaluate_examples: int = setting(100, "validation images per evaluation; 0: all", quick=2, gpu=1000)
    tests: int = setting(500, "test images at the end, evenly spaced; 0: all", least=0, quick=3, gpu=0)
    samples: int = setting(
        16, "images that each model generates; it completes about half as many", least=1, quick=4, gpu=64
    )
    top: float = setting(0.5, "given part of each completed image")
    batches: tuple[int, ...] = setting((1, 64), "batch sizes of the speed measurements", least=1, quick=(1, 2))
    lengths: tuple[int, ...] = setting(
        (98, 392, 784, 1568, 3072), "numbers of tokens before the timed one", least=1, quick=(7, 70)
    )
    rounds: int = setting(3, "timing rounds", least=1, quick=1)
    seed: int = setting(0, "seed of weights, order of the images and samples")

    def __post_init__(self):
        super().__post_init__()
        spec.known(self.data.partition(":")[0], dict.fromkeys(DATA), "data set of images")
        if not 0 < self.top < 1:
            raise ValueError(f"top={self.top} must lie between 0 and 1: the part of each image that is given")
        likelihood.build(self.likelihood, 256)
        if len(set(map(slug, self.names()))) < len(self.names()):
            raise ValueError(f"attentions={self.attentions}: each of them must come once")
        self.run(Path("work"))

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for name in self.names():
            self.config(name)
            build(name, self.dim, self.heads)

    def names(self) -> list[str]:
        """The attentions, one per model."""
        return spec.split(self.attentions)

    def config(self, attention: str, vocab: int = 256, length: int = 784) -> DecoderConfig:
        """A model's config. Raises ValueError for inconsistent sizes."""
        kind = {"likelihood": self.likelihood, "positions": "learned", "vocab": vocab, "length": length}
        return DecoderConfig(
            attention=attention, feedforward=4 * self.dim, **self.same("dim", "depth", "heads"), **kind
        )

    def run(self, folder: Path) -> TrainConfig:
        """A training in a folder. Raises ValueError for a field out of range."""
        return training(self, folder, **self.same("optimizer", "schedule", "weight_decay", "precision"))


def points(settings: Settings) -> list[Row]:
    """The trainings; whole images by batch size; one token by batch size and by the tokens before it."""
    trainings = [{"what": "training", "attention": name} for name in settings.names()]
    images = [{"what": "images", "batch": batch} for batch in settings.batches]
    pairs = product(settings.batches, settings.lengths)
    return [*trainings, *images, *({"what": "token", "batch": batch, "tokens": tokens} for batch, tokens in pairs)]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training with its samples, or one comparison of speed by the models trained before.

    Raises ValueError if those are missing.
    """
    if point["what"] == "training":
        return train(settings, point["attention"], place)
    models = {name: trained(place.folder / slug(name)) for name in settings.names()}
    batch, rounds = point["batch"], settings.rounds
    if point["what"] == "images":
        return images_speed.images(models, data.load(settings.data).length, batch, rounds, place.track)
    return images_speed.token(models, point["tokens"], batch, rounds, place.track)


def train(settings: Settings, attention: str, place: Place) -> Row:
    """Train, or resume an interrupted training; then generate and complete images.

    -> ``parameters``; ``curve``: [steps made, seconds spent on them, validation bits per dim]; ``validation``: the
    fewest of these; ``test``: test bits of the checkpoint that had them.
    """
    dataset, folder = data.load(settings.data), place.folder / slug(attention)
    config = settings.config(attention, dataset.vocab, dataset.length)
    model = train_decoder(config, settings.run(folder), lines=True)
    found = bits(model, dataset, "test", default_batch_size(dataset.length), examples=settings.tests)
    for kind, images, columns in draw(settings, model, dataset, attention, place):
        path = place.folder.parent / f"images-{kind}-{slug(attention)}.png"
        png.save(path, dataset.picture(images.cpu()), columns=columns)
    line = curve(folder)
    return {
        "parameters": parameters(model),
        "curve": line,
        "validation": min(row[2] for row in line),
        "test": round(found, 5),
    }


def draw(
    settings: Settings, model: Decoder, dataset: Dataset, attention: str, place: Place
) -> list[tuple[str, Tensor, int]]:
    """-> (kind, images (B,N), columns): samples; and completions, each as given, completed, and original."""
    count, seed = settings.samples, settings.seed
    steps = generate(model, max_new_tokens=dataset.length, batch=count, seed=seed, stream=True)
    samples = torch.stack(list(place.track(steps, dataset.length, f"samples of {attention}")), 1)
    # Whole columns of three pictures each.
    originals = examples(dataset, "test", max(count // 6, 1) * 3).to(model.device)
    known = given(dataset, settings.top)
    steps = generate(model, originals[:, :known], max_new_tokens=dataset.length - known, seed=seed, stream=True)
    rest = torch.stack(list(place.track(steps, dataset.length - known, f"completions by {attention}")), 1)
    upper, hidden = originals[:, :known], torch.full_like(rest, dataset.vocab // 2)
    shown = torch.stack([torch.cat([upper, hidden], 1), torch.cat([upper, rest], 1), originals], 1)
    return [("samples", samples, 0), ("completions", shown.flatten(0, 1), 9)]


def examples(dataset: Dataset, split: str, count: int) -> Tensor:
    """``count`` evenly spaced images of a split: (count, length)."""
    indices = (torch.arange(count) * dataset.count(split)).div(count, rounding_mode="floor")
    return dataset.take(split, indices)


def given(dataset: Dataset, top: float) -> int:
    """Number of given tokens: whole rows of pixels, at least one and not all."""
    height = dataset.grid[0]
    return min(max(round(top * height), 1), height - 1) * dataset.length // height


EXPERIMENT = Experiment(
    about="image generation by linear and softmax transformers of equal size: bits per dim, samples, speed",
    scales=Settings.scales("gpu", "paper"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=images_report.tables,
    draw=images_report.draw,
    source=paper.IMAGES_SOURCE,
    differs=(
        "At laptop scale the models are smaller, see fewer images, and predict each pixel by one logit per level "
        "instead of a mixture of logistics. Except at paper scale, AdamW with a cosine schedule replaces RAdam at a "
        "constant rate; at equal time the slower model is therefore evaluated before its rate has fallen. The models "
        "are pre-norm, and 5000 training images of MNIST are kept for validation. Speed is measured on a CPU; "
        "published images per second are those of a GPU. Softmax with a state uses a KV cache and our decode engine. "
        "Beyond the length of an image the learned positions repeat, which does not change the time. Reformer (lsh-1, "
        "lsh-4) was published with chunks cut from all pixels sorted by bucket, which does not permit a state. Our "
        "chunks are counted inside a bucket, so nothing leaks and generation uses a state of fixed size. It has 32 "
        "buckets and chunks of 32, at larger scales the published 64 and 29."
    ),
    data=lambda settings: {settings.data.partition(":")[0]: data.load(settings.data).checksum},
    minutes=21.4,
)
