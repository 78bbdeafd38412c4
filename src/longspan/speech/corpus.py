"""What a corpus is: utterances with their labels, drawn anew for each epoch of training, and others held out."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Utterance(NamedTuple):
    """Something said, and what it is."""

    speaker: str
    frames: Tensor  # (T,features)
    target: list[int]  # classes, from 1 on


class Corpus(NamedTuple):
    """Speech to learn from. ``train(epoch)`` gives the utterances of an epoch, the same for the same epoch.

    ``held``: name -> utterances that are not in the training; those of ``test`` are of speakers who are not in it.
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
    """Utterances as one batch: frames (B,T,features) with zeros after each one's end, lengths (B,), targets."""
    lengths = torch.tensor([len(one.frames) for one in utterances])
    frames = torch.zeros(len(utterances), int(lengths.max()), utterances[0].frames.shape[1])
    for row, one in zip(frames, utterances, strict=True):
        row[: len(one.frames)] = one.frames
    return frames, lengths, [one.target for one in utterances]


def batches(utterances: Sequence[Utterance], size: int, seed: Sequence[int]) -> list[list[Utterance]]:
    """Batches of utterances of similar lengths, so that little is padded, in an order that the seed draws."""
    random = np.random.default_rng(list(seed))
    order = sorted(random.permutation(len(utterances)), key=lambda i: len(utterances[i].frames))
    groups = [[utterances[i] for i in order[at : at + size]] for at in range(0, len(order), size)]
    return [groups[i] for i in random.permutation(len(groups))]
