"""A corpus: training utterances, drawn for each epoch, and held-out ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Utterance(NamedTuple):
    """The features of an utterance and its labels."""

    speaker: str
    frames: Tensor  # (T,features)
    target: list[int]  # classes, from 1 on


class Corpus(NamedTuple):
    """A corpus of speech. ``train(epoch)`` returns the utterances of an epoch, the same for the same epoch.

    ``held`` has the held-out parts by name; the speakers of ``test`` are not in the training part.
    """

    name: str
    about: str
    checksum: str
    labels: str
    features: int
    rate: int
    train: Callable[[int], list[Utterance]]
    held: dict[str, list[Utterance]]


def padded(utterances: Sequence[Utterance]) -> tuple[Tensor, Tensor, list[list[int]]]:
    """Pad utterances to a batch: frames (B, T, features), lengths (B,), targets."""
    lengths = torch.tensor([len(one.frames) for one in utterances])
    frames = torch.zeros(len(utterances), int(lengths.max()), utterances[0].frames.shape[1])
    for row, one in zip(frames, utterances, strict=True):
        row[: len(one.frames)] = one.frames
    return frames, lengths, [one.target for one in utterances]


def batches(utterances: Sequence[Utterance], size: int, seed: Sequence[int]) -> list[list[Utterance]]:
    """Batches of utterances of similar lengths, which limits padding, in a random order given by the seed."""
    random = np.random.default_rng(list(seed))
    order = sorted(random.permutation(len(utterances)), key=lambda i: len(utterances[i].frames))
    groups = [[utterances[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
    return [groups[i] for i in random.permutation(len(groups))]
