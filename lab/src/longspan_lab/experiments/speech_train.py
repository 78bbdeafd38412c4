"""The encoders of the speech experiment, equal in size, and their resumable training."""

import math
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from longspan.generation.transcription import classes
from longspan.models.config import TranscriberConfig
from longspan.models.transcriber import Front, Transcriber, tokens_of
from longspan.speech import ctc
from longspan.speech.labels import words
from longspan.train import TrainConfig, rate

from ..speech.corpus import Corpus, Utterance, batches, padded
from ..speech.errors import rate as error_rate
from . import learning
from .experiment import Place, Row, drawing
from .learning import closest, keep, parameters, resumed

LSTM = "lstm"
# Number of masked bands of channels per batch, and the widest as a part of all (Park et al. 2019).
BANDS, WIDEST = 2, 0.15


class Recurrent(nn.Module):
    """The LSTM baseline: front and head of the transcribers, with LSTM layers of one or two directions between.

    frames (B,T,features), lengths (B,) -> logits (B,N,classes), tokens (B,), as ``Transcriber``.
    """

    def __init__(self, config: TranscriberConfig, hidden: int):
        super().__init__()
        self.config = config
        self.front = Front(config.features, config.stride, config.context, config.dim)
        both = not config.causal
        self.layers = nn.LSTM(config.dim, hidden, config.depth, batch_first=True, bidirectional=both)
        self.head = nn.Linear((1 + both) * hidden, 1 + len(config.labels.split()))

    def forward(self, frames: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Apply the model; the class documents the shapes."""
        frames, tokens, _ = tokens_of(frames, lengths, self.config.features, self.config.stride)
        x, _ = self.front(frames, self.front.start(len(frames)))
        packed = pack_padded_sequence(x, tokens.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True, total_length=x.shape[1])
        return self.head(x), tokens


def build(encoder: str, config: TranscriberConfig, seed: int) -> Any:
    """A model with weights that depend on the seed alone: the transcriber of a config, or the LSTM of its size."""
    with drawing(seed, "weights"):
        model = Transcriber(config)
        return Recurrent(config, hidden(config, parameters(model))) if encoder == LSTM else model


def hidden(config: TranscriberConfig, wanted: int) -> int:
    """The width of the LSTM's layers whose parameter count is closest to the given one."""

    def count(width: int) -> int:
        with torch.device("meta"):
            return parameters(Recurrent(config, width))

    return closest(count, wanted)


class Training(NamedTuple):
    """How a model is trained; ``name``: the file in which it is saved."""

    name: str
    epochs: int
    batch: int
    learning_rate: float
    evaluate_every: int
    seed: int


def learn(model: Any, corpus: Corpus, training: Training, place: Place) -> Row:
    """Train with AdamW, a warm-up of a tenth and a cosine -> ``curve``: [epochs made, nats per label, validation's
    label errors]; ``seconds``: of an epoch's updates, the median over the last quarter of them; ``updates`` and
    ``frames`` of the last one.

    Resumes an interrupted training with the same numbers.
    """
    model.front.calibrate(torch.cat([one.frames for one in corpus.train(0)]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    # Built for every epoch, so counted in the first one.
    run = TrainConfig(steps=training.epochs, learning_rate=training.learning_rate, warmup=max(1, training.epochs // 10))
    first, curve, seconds = 0, [], []
    if kept := resumed(place, training.name, model=model, optimizer=optimizer):
        first, curve, seconds = kept["epoch"], kept["curve"], kept["seconds"]
    for epoch in place.track(range(first, training.epochs), training.epochs - first, training.name):
        groups = batches(corpus.train(epoch), training.batch, (training.seed, 4, epoch))
        spent, nats = 0.0, 0.0
        for i, group in enumerate(groups):
            # Between two epochs' rates, so that a warm-up of few epochs has no jumps.
            part = (epoch + i / len(groups)) % 1
            optimizer.param_groups[0]["lr"] = (1 - part) * rate(run, epoch) + part * rate(run, epoch + 1)
            frames, lengths, targets = padded(group)
            hide(frames, model.front.mean.cpu(), np.random.default_rng([training.seed, 5, epoch, i]))
            begin = time.perf_counter()
            with drawing(training.seed, "step", epoch, i):
                nats += update(model, optimizer, frames, lengths, targets)
            spent += time.perf_counter() - begin
        seconds.append(spent)
        done = epoch + 1
        if not math.isfinite(nats):
            raise ValueError(f"the loss of {training.name} is {nats} in epoch {done}; try a lower learning_rate")
        if done % training.evaluate_every == 0 or done == training.epochs:
            found = errors(model, corpus.held["validation"], corpus.labels)
            curve.append([done, round(nats / len(groups), 4), round(found["labels"], 5)])
        now = {"epoch": done, "curve": curve, "seconds": seconds}
        keep(place, training.name, now, model=model, optimizer=optimizer)
    model.eval()
    last = corpus.train(training.epochs - 1)
    return {
        "curve": curve,
        "seconds": median(seconds[-max(1, training.epochs // 4) :]),
        "updates": -(-len(last) // training.batch),
        "frames": sum(len(one.frames) for one in last),
    }


def update(model: Any, optimizer: Any, frames: Tensor, lengths: Tensor, targets: list[list[int]]) -> float:
    """One step of the optimizer -> the loss before it."""
    device = place_of(model)
    logits, counts = model(frames.to(device), lengths.to(device))
    loss = ctc.loss(logits, counts, targets)
    learning.update(model, optimizer, loss)
    return loss.item()


def place_of(model: Any) -> torch.device:
    """Where the weights are."""
    return model.front.mean.device


def hide(frames: Tensor, mean: Tensor, random: np.random.Generator) -> None:
    """Replace random bands of channels of frames (B,T,features) by the mean."""
    features = frames.shape[-1]
    for row in frames:
        for _ in range(BANDS):
            width = int(random.integers(0, max(1, round(WIDEST * features)) + 1))
            begin = int(random.integers(0, features - width + 1))
            row[:, begin : begin + width] = mean[begin : begin + width]


def errors(model: Any, utterances: list[Utterance], labels: str, beams: int = 0) -> dict[str, float]:
    """Error rates on utterances: of labels, and of whole words."""
    pairs = [
        (classes(scores, beams), one.target) for one, scores in zip(utterances, scored(model, utterances), strict=True)
    ]
    spelt = [(words(found, labels), words(true, labels)) for found, true in pairs]
    return {"labels": error_rate(pairs), "words": error_rate(spelt)}


def scored(model: Any, utterances: list[Utterance]) -> list[Tensor]:
    """The log-probabilities (N,classes) of each."""
    found = []
    with torch.no_grad():
        for one in utterances:
            device = place_of(model)
            logits, _ = model(one.frames[None].to(device), torch.tensor([len(one.frames)], device=device))
            found.append(logits[0].log_softmax(-1).cpu())
    return found


def concatenated(corpus: Corpus, count: int, rows: int) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Utterances of the training one after the other: ``rows`` of exactly ``count`` frames, with the targets of those
    that are whole."""
    source = _endless(corpus)
    made = []
    for _ in range(rows):
        parts, target, total = [], [], 0
        while total < count:
            one = next(source)
            parts.append(one.frames)
            total += len(one.frames)
            target += one.target if total <= count else []
        made.append(Utterance("", torch.cat(parts)[:count], target))
    return padded(made)


def _endless(corpus: Corpus) -> Any:
    epoch = 0
    while True:
        yield from sorted(corpus.train(epoch), key=lambda one: len(one.frames))
        epoch += 1


def stepper(
    model: Any, batch: tuple[Tensor, Tensor, list[list[int]]], learning_rate: float = 1e-4
) -> Callable[[], object]:
    """A training step on a fixed batch, for timing."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    return lambda: update(model, optimizer, *batch)
