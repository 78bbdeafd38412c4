"""Synthetic frames in place of speech: each digit is two moving peaks at the pitch of its speaker."""

import hashlib

import numpy as np
import torch

from .corpus import Corpus, Utterance
from .digits import SPOKEN, labels_of, target

FEATURES, EPOCH, HELD = 16, 24, 8
SPEAKERS = ("low", "middle", "high", "held out")


def load(units: str, longest: int, seed: int) -> Corpus:
    """Strings of 1 to ``longest`` digits, generated from the seed; the fourth speaker is only in the test."""

    def utterances(count: int, speakers: tuple[int, ...], *names: int) -> list[Utterance]:
        random = np.random.default_rng([seed, *names])
        return [_utterance(random, speakers[i % len(speakers)], units, longest) for i in range(count)]

    held = {"validation": utterances(HELD, (0, 1, 2), 1), "test": utterances(HELD, (3,), 2)}
    return Corpus(
        "tones",
        "synthetic moving tones, generated from the seed",
        hashlib.sha256(b"tones").hexdigest(),
        labels_of(units),
        FEATURES,
        0,
        lambda epoch: utterances(EPOCH, (0, 1, 2), 3, epoch),
        held,
    )


def _utterance(random: np.random.Generator, speaker: int, units: str, longest: int) -> Utterance:
    digits = random.integers(0, len(SPOKEN), random.integers(1, longest + 1)).tolist()
    pieces = [_silence(random)]
    for digit in digits:
        pieces += [_spoken(random, digit, speaker), _silence(random)]
    frames = np.concatenate(pieces)
    frames = frames + 0.1 * random.standard_normal(frames.shape)
    return Utterance(SPEAKERS[speaker], torch.from_numpy(frames.astype(np.float32)), target(digits, units))


def _silence(random: np.random.Generator) -> np.ndarray:
    return np.zeros((random.integers(3, 9), FEATURES))


def _spoken(random: np.random.Generator, digit: int, speaker: int) -> np.ndarray:
    count = random.integers(16, 22) + 2 * (speaker % 2)
    time = np.linspace(0, 1, count)[:, None]
    first, second = 1 + digit % 5 * 1.5, 8 + digit // 5 * 3
    bins = np.arange(FEATURES) - 0.15 * speaker
    return np.exp(-((bins - first - time) ** 2)) + np.exp(-((bins - second + time) ** 2))
