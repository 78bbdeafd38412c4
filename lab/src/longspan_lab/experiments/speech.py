"""Speech recognition with CTC: encoders of equal size, errors on unseen speakers, training time."""

from dataclasses import dataclass, replace
from functools import lru_cache

from longspan._utils import spec
from longspan.attention import build
from longspan.models import checkpoint
from longspan.models.config import TranscriberConfig
from longspan.models.transcriber import Transcriber

from ..bench import case
from ..speech import corpora
from ..speech.corpus import Corpus
from . import published, speech_report, speech_train
from .experiment import DEVICES, Buildable, Experiment, Place, Row, check_device, setting
from .learning import parameters, slug
from .speech_train import LSTM, Training

DIRECTIONS = ("bidirectional", "causal")


@dataclass(frozen=True)
class Settings(Buildable):
    """Settings of the experiment; the defaults are those of the laptop scale.

    At the paper scale: Katharopoulos et al. 2020, section 4.3; their batches are as large as the GPU's memory.
    """

    data: str = setting("fsdd", "fsdd (a download), fsdd:PATH, an4:FOLDER, or tones (synthetic)", quick="tones")
    units: str = setting("letters", "predicted and counted units: letters | phonemes | words")
    speaker: str = setting("", "held-out speaker of fsdd; empty: the last by name")
    longest: int = setting(24, "maximum digits per string; lengths start at 1", least=1, quick=3)
    encoders: str = setting(
        "lstm; softmax; reformer(rounds=4); linear",
        "attentions and lstm, separated by semicolons; one model each",
        quick="lstm; softmax; linear",
    )
    direction: str = setting("bidirectional", "direction of the encoders: bidirectional | causal (for --stream)")
    dim: int = setting(96, "width of the models", quick=16, gpu=192)
    depth: int = setting(3, "number of blocks, and of LSTM layers", quick=1, gpu=9)
    heads: int = setting(4, "heads of each attention", quick=2, gpu=6)
    positions: str = setting("sinusoidal", "positions of the attentions: sinusoidal | rotary | none")
    stride: int = setting(2, "frames of 10 ms between two tokens")
    context: int = setting(8, "frames per token")
    epochs: int = setting(40, "epochs for each encoder", least=1, quick=2, gpu=80)
    batch: int = setting(4, "utterances per update", least=1, gpu=16)
    learning_rate: float = setting(2e-3, "peak learning rate", positive=True, gpu=1e-4)
    evaluate_every: int = setting(4, "epochs between two evaluations on validation utterances", least=1, quick=1)
    beams: int = setting(8, "beam size of the final test", least=1, quick=2)
    lengths: tuple[int, ...] = setting(
        (800, 1200, 1600, 2000, 2400), "frames per utterance in the timed steps", least=1, quick=(200, 400)
    )
    step_stride: int = setting(1, "frames between two tokens in the timed steps", least=1)
    step_batch: int = setting(2, "utterances per timed step", least=1, gpu=16)
    rounds: int = setting(3, "timing rounds", least=1, quick=1)
    device: str = setting("cpu", "device: cpu or cuda", among=DEVICES, gpu="cuda")
    seed: int = setting(0, "seed of weights, strings of digits and order")

    def __post_init__(self):
        super().__post_init__()
        corpora.check(self.data, self.units)
        spec.known(self.direction, dict.fromkeys(DIRECTIONS), "direction")
        if len(set(map(slug, self.names()))) < len(self.names()):
            raise ValueError(f"encoders={self.encoders}: each of them must come once")

    def buildable(self) -> None:
        """Raise ValueError for settings that cannot be built."""
        for name in self.names():
            config = self.config(name)
            build(config.attention, self.dim, self.heads, causal=config.causal, positions=self.positions)

    def names(self) -> list[str]:
        """The encoders, one per model."""
        return spec.split(self.encoders)

    def config(self, encoder: str, corpus: Corpus | None = None) -> TranscriberConfig:
        """A model's config; the LSTM has the size of softmax's. Raises ValueError where the sizes do not fit."""
        given = self.same("dim", "depth", "heads", "positions", "stride", "context")
        if corpus is not None:
            given |= {"labels": corpus.labels, "features": corpus.features, "rate": corpus.rate}
        attention = "softmax" if encoder == LSTM else encoder
        return TranscriberConfig(
            attention=attention, feedforward=4 * self.dim, causal=self.direction == "causal", **given
        )

    def corpus(self) -> Corpus:
        """The data. Raises ValueError if they are unavailable."""
        return _corpus(self.data, self.units, self.speaker, self.longest, self.seed)


@lru_cache(maxsize=1)
def _corpus(data: str, units: str, speaker: str, longest: int, seed: int) -> Corpus:
    return corpora.load(data, units=units, speaker=speaker, longest=longest, seed=seed)


def points(settings: Settings) -> list[Row]:
    """The trainings; then steps by length. Raises ValueError if the requested GPU is missing."""
    check_device(settings.device)
    trainings = [{"what": "training", "encoder": name} for name in settings.names()]
    return [*trainings, *({"what": "step", "frames": count} for count in settings.lengths)]


def measure(settings: Settings, point: Row, place: Place) -> Row:
    """One training, or the steps of all encoders at one length.

    Of a training: ``parameters``, the fields of ``speech_train.learn``, ``errors``: the error rates of each held-out
    part, of labels and words, greedy and by beam search. An attention's model is then a checkpoint in the experiment's
    folder, for ``longspan transcribe``. Of steps: ``seconds`` by encoder, ``rejected`` and ``disturbed`` samples.
    """
    if point["what"] == "training":
        return train(settings, point["encoder"], place)
    return steps(settings, point["frames"], place)


def train(settings: Settings, encoder: str, place: Place) -> Row:
    """See ``measure``."""
    corpus = settings.corpus()
    model = speech_train.build(encoder, settings.config(encoder, corpus), settings.seed).to(settings.device)
    training = Training(slug(encoder), **settings.same("epochs", "batch", "learning_rate", "evaluate_every", "seed"))
    found = speech_train.learn(model, corpus, training, place)
    if isinstance(model, Transcriber):
        kind = settings.data.partition(":")[0]
        run = {"data": kind, "units": settings.units, "seed": settings.seed, "epochs": settings.epochs}
        checkpoint.save(model, place.folder / slug(encoder), extra={"run": run})
    errors = {
        part: {how: _rounded(speech_train.errors(model, held, corpus.labels, beams)) for how, beams in _ways(settings)}
        for part, held in corpus.held.items()
    }
    return {"parameters": parameters(model), **found, "errors": errors}


def _ways(settings: Settings) -> list[tuple[str, int]]:
    return [("greedy", 0), ("beam", settings.beams)]


def _rounded(rates: dict[str, float]) -> dict[str, float]:
    return {name: round(one, 5) for name, one in rates.items()}


def steps(settings: Settings, frames: int, place: Place) -> Row:
    """Seconds of a training step, of fresh models, which take turns."""
    corpus = settings.corpus()
    batch = speech_train.concatenated(corpus, frames, settings.step_batch)
    samplers = {}
    for name in settings.names():
        config = replace(settings.config(name, corpus), stride=settings.step_stride)
        model = speech_train.build(name, config, settings.seed).to(settings.device)
        samplers[name] = case.bound(speech_train.stepper(model, batch))
    figures, failed = case.take(samplers, settings.rounds, f"steps of {frames} frames", place.track)
    if failed:
        raise ValueError("; ".join(failed.values()))
    return {
        "seconds": {name: figure.seconds for name, figure in figures.items()},
        "rejected": sum(figure.rejected for figure in figures.values()),
        "disturbed": sum(figure.disturbed for figure in figures.values()),
    }


EXPERIMENT = Experiment(
    about="speech recognition with CTC by encoders of equal size: errors on unseen speakers, training time",
    scales=Settings.scales("gpu", "paper"),
    quick=Settings.at("quick"),
    points=points,
    measure=measure,
    tables=speech_report.tables,
    draw=speech_report.draw,
    source=published.SPEECH_SOURCE,
    differs=(
        "The publication uses 80 hours of the Wall Street Journal, which are not free: phonemes, and 40 filter banks "
        "of utterances of 800 frames on average and 2400 at most, on a GPU. Here strings of digits from the Free "
        "Spoken Digit Dataset are joined up to the same lengths, with 40 filter banks and letters as labels. One "
        "speaker is in no part of the training and few others exist, so the errors are those of a small data set. AN4 "
        "(`--data an4:FOLDER`) has 13 cepstral coefficients per frame. `tones`, the data of `--quick`, are not speech. "
        "The models have 3 layers of width 96 instead of 9 of 6 heads, and the LSTM has as many parameters. All train "
        "alike, by AdamW with a cosine schedule for some minutes, and two frames make a token. The time of an epoch "
        "is that of its updates on a CPU. Steps by length are timed with one token per frame."
    ),
    data=lambda settings: {settings.data.partition(":")[0]: settings.corpus().checksum},
    minutes=30.0,
)
