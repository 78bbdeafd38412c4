"""Evaluation on a split: bits per dimension, byte, token or label, exact match, and accuracy."""

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data import Dataset, Labeled, Pairs, Tokens
from ..data.pairs import Batch
from ..generation.beam_search import beam_search
from ..generation.sampling import generate
from ..models.checkpoint import is_sharded
from ..models.decoder import Decoder
from ..models.encoder import Encoder
from ..models.seq2seq import Seq2Seq
from .sequence import Rows


class Share(NamedTuple):
    """The examples that one process scores: every ``world``-th of ``examples`` evenly spaced ones."""

    examples: int = 0  # 0: the whole split
    rank: int = 0
    world: int = 1

    def chosen(self, count: int) -> Tensor:
        """Return the indices among ``count`` examples."""
        chosen = min(self.examples or count, count)
        return (torch.arange(chosen) * count).div(max(1, chosen), rounding_mode="floor")[self.rank :: self.world]


WHOLE = Share()


def bits(model: Decoder, dataset: Dataset | Tokens, split: str, batch: int = 64, *, examples: int = 0) -> float:
    """Mean negative log2-likelihood per token, in bits per dimension (images), byte (text) or token.

    The start token is not counted. The model is in eval mode during the call. Sums are in float64.

    Args:
        model: a decoder.
        dataset: images, a text or tokens.
        split: "train", "validation" or "test".
        batch: examples per forward pass.
        examples: number of evenly spaced examples; 0: the whole split.

    Returns:
        Bits per token.

    Raises:
        ValueError: for a batch < 1, and for a split that does not exist or is empty.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}: must be >= 1")
    nats, tokens = total(model, dataset, split, batch, Share(examples)).tolist()
    if not tokens:
        raise ValueError(f"split {split!r} of {dataset.name} has no examples")
    return nats / tokens / math.log(2)


@torch.no_grad()
def total(
    model: Decoder, dataset: Dataset | Tokens, split: str, batch: int, share: Share = WHOLE, rows: Rows | None = None
) -> Tensor:
    """Negative log-likelihood in nats and number of tokens, (2,) float64, over the examples of a share.

    ``rows``: the processes that share each example, each of which counts its own tokens; None: this one alone.
    """
    rows = rows or Rows()
    counted = 0
    with evaluating(model), rows.shared(model):
        nats = torch.zeros((), dtype=torch.float64, device=model.device)
        for part, own in _batches(dataset.count(split), batch, share, is_sharded(model)):
            tokens = dataset.take(split, part).to(model.device)
            outputs, _ = model(rows.part(model.shift(tokens)))
            targets = rows.part(tokens)
            nats -= model.likelihood.log_prob(outputs, targets)[:own].double().sum()
            counted += targets[:own].numel()
    return torch.tensor([nats.item(), counted], dtype=torch.float64)


@torch.no_grad()
def evaluate_seq2seq(
    model: Seq2Seq,
    dataset: Pairs,
    split: str,
    batch: int,
    share: Share = WHOLE,
    *,
    beams: int = 0,
    length_penalty: float = 0.0,
) -> Tensor:
    """Negative log-likelihood in nats, tokens, exact targets and pairs, (4,) float64, over the pairs of a share.

    A target is exact if all tokens match, including the stop token, by greedy decoding or by a beam search with
    ``beams`` beams.
    """
    indices = share.chosen(dataset.count(split))
    with evaluating(model):
        sums = torch.zeros(3, dtype=torch.float64, device=model.device)
        for part in indices.split(batch):
            pairs = Batch(*(t.to(model.device) for t in dataset.take(split, part)))
            outputs = model(pairs.source, model.shift(pairs.target), source_mask=pairs.source_mask, mask=pairs.mask)
            likelihood = model.likelihood.log_prob(outputs, pairs.target).double()
            written = _written(model, pairs, dataset.stop, beams, length_penalty)
            exact = ((written == pairs.target) | ~pairs.mask).all(1)
            sums += torch.stack([-likelihood[pairs.mask].sum(), pairs.mask.sum().double(), exact.sum().double()])
    return torch.tensor([*sums.tolist(), len(indices)], dtype=torch.float64)


@torch.no_grad()
def classified(model: Encoder, dataset: Labeled, split: str, batch: int, share: Share = WHOLE) -> Tensor:
    """Cross-entropy in nats, correct labels and texts, (3,) float64, over the texts of a share."""
    device = next(model.parameters()).device
    with evaluating(model):
        sums, counted = torch.zeros(2, dtype=torch.float64, device=device), 0
        for part, own in _batches(dataset.count(split), batch, share, is_sharded(model)):
            tokens, mask, labels = (t.to(device) for t in dataset.take(split, part))
            logits, labels = model(tokens, mask=mask)[:own].double(), labels[:own]
            right = (logits.argmax(-1) == labels).sum().double()
            sums += torch.stack([F.cross_entropy(logits, labels, reduction="sum"), right])
            counted += own
    return torch.tensor([*sums.tolist(), counted], dtype=torch.float64)


def _written(model: Seq2Seq, pairs: Batch, stop: int, beams: int, length_penalty: float) -> Tensor:
    """The targets (B, N) that the model generates, as long as the longest true one."""
    given = {
        "source": pairs.source,
        "source_mask": pairs.source_mask,
        "max_new_tokens": pairs.target.shape[1],
        "stop": stop,
    }
    if beams:
        found = beam_search(model, **given, beams=beams, length_penalty=length_penalty).tokens[:, 0]
    else:
        found = generate(model, **given, temperature=0.0)
    # If all have ended early, pad with the stop token.
    return F.pad(found, (0, pairs.target.shape[1] - found.shape[1]), value=stop)


def _batches(count: int, batch: int, share: Share, together: bool) -> Iterator[tuple[Tensor, int]]:
    """Yield the indices of a share of ``count`` examples, at most ``batch`` at a time, and how many of them to score.

    With ``together`` all processes get as many parts, since they run a sharded model together: a process without an
    example repeats the first one, which is not scored.
    """
    indices = share.chosen(count)
    parts = list(indices.split(batch)) if len(indices) else []
    yield from ((part, len(part)) for part in parts)
    most = -(-len(share._replace(rank=0).chosen(count)) // batch) if together else 0
    yield from [(torch.zeros(1, dtype=torch.long), 0)] * (most - len(parts))


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and restore its mode afterwards."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def default_batch_size(length: int, vocab: int = 256) -> int:
    """Examples per batch of an evaluation: 64, or fewer if ``length`` or ``vocab`` is large.

    A batch has at most 12,800 tokens: with 256 float32 outputs per token, larger blocks would be fresh pages in every
    call, even after ``reuse_pages`` (docs/results/lab.md). With more outputs per token it has fewer tokens.
    """
    return max(1, min(64, 12_800 * 256 // max(256, vocab) // length))
