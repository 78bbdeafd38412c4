"""Evaluation: bits per dimension or byte of a model on a split."""

import math

import torch
from torch import Tensor

from ..data import Dataset
from ..model import Decoder


def bits(model: Decoder, dataset: Dataset, split: str, batch: int = 64, *, examples: int = 0) -> float:
    """Mean negative log2-likelihood per token, in bits per dimension (images) or byte (text), start token not counted.

    ``examples`` evenly spaced examples are looked at; 0 means all of the split. The model is put into eval mode for the
    call. Log-likelihoods are summed in fp64.

    Raises ValueError for a batch < 1 and for a split that does not exist or is empty.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}: must be >= 1")
    nats, tokens = total(model, dataset, split, batch, examples).tolist()
    if not tokens:
        raise ValueError(f"split {split!r} of {dataset.name} has no examples")
    return nats / tokens / math.log(2)


@torch.no_grad()
def total(
    model: Decoder, dataset: Dataset, split: str, batch: int, examples: int = 0, rank: int = 0, world: int = 1
) -> Tensor:
    """Negative log-likelihood in nats and number of tokens, ``-> (2,) float64``, of ``rank``'s part of the examples."""
    count = dataset.count(split)
    chosen = min(examples or count, count)
    indices = (torch.arange(chosen) * count).div(max(1, chosen), rounding_mode="floor")[rank::world]
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        nats = torch.zeros((), dtype=torch.float64, device=device)
        for part in indices.split(batch):
            tokens = dataset.take(split, part).to(device)
            outputs, _ = model(model.shift(tokens))
            nats -= model.likelihood.log_prob(outputs, tokens).double().sum()
    finally:
        model.train(training)
    return torch.tensor([nats.item(), len(indices) * dataset.length], dtype=torch.float64)


def roomy(length: int) -> int:
    """Examples per batch of an evaluation: 64, fewer where they are long.

    At most 12,800 tokens: larger blocks of 256 fp32 outputs a token would be fresh pages in every call, even after
    ``reuse_pages`` (docs/lab.md).
    """
    return max(1, min(64, 12_800 // length))
