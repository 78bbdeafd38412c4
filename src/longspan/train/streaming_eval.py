"""Evaluation along a text: with states carried from window to window, or with sliding windows."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..data import Dataset, Tokens
from ..data.streams import Stream, stretches
from ..models.decoder import Decoder
from ..states.utils import select
from . import tbptt
from .evaluate import WHOLE, Share, default_batch_size, evaluating
from .sequence import Rows

Track = Callable[[Iterable[Any], int, str], Iterable[Any]]


def rows(dataset: Dataset | Tokens, split: str, examples: int = 0) -> int:
    """Number of stretches read in parallel: at most ``default_batch_size``, with at least 16 windows each."""
    count = Stream(dataset, split).count
    return max(1, min(default_batch_size(dataset.length, dataset.vocab), min(examples or count, count) // 16))


@torch.no_grad()
def carried(
    model: Decoder,
    dataset: Dataset | Tokens,
    split: str,
    rows: int,
    share: Share = WHOLE,
    track: Track = lambda items, total, label: items,
) -> Tensor:
    """Score a text with carried states, over the rows of a share.

    The split is cut into ``rows`` stretches of whole windows, of which about ``share.examples`` are read (0: all). A
    row starts with a fresh state and carries it from window to window; a new document resets it. Each token is computed
    once, with all the context in the state (Dai et al. 2019, section 3.2).

    Returns:
        Negative log-likelihood in nats and number of tokens, (2,) float64.

    Raises:
        ValueError: for more rows than windows, and as in ``tbptt.check``.
    """
    tbptt.check(model.config)
    stream = Stream(dataset, split)
    # The longest first, so that the rows still being read are a prefix.
    parts = sorted(_stretches(stream, rows, share.examples)[share.rank :: share.world], key=len, reverse=True)
    nats, tokens, state = torch.zeros((), dtype=torch.float64, device=model.device), 0, None
    steps = len(parts[0]) if parts else 0
    with evaluating(model):
        for step in track(range(steps), steps, "windows"):
            windows = torch.tensor([part[step] for part in parts if step < len(part)])
            stretch = stream.take(windows, fresh=step == 0)
            new = model.init_state(len(windows))
            if state is None:
                state = new
            elif len(windows) < len(state.position):
                state = select(state, range(len(windows)))
            state = tbptt.renewed(state, new, stretch.fresh.to(model.device))
            segments = None if stretch.segments is None else stretch.segments.to(model.device)
            outputs, state = model(stretch.inputs.to(model.device), state, segments=segments)
            nats -= model.likelihood.log_prob(outputs, stretch.targets.to(model.device)).double().sum()
            tokens += stretch.targets.numel()
    return torch.tensor([nats.item(), tokens], dtype=torch.float64)


@torch.no_grad()
def sliding(
    model: Decoder,
    dataset: Dataset | Tokens,
    split: str,
    stride: int,
    rows: int,
    examples: int = 0,
    track: Track = lambda items, total, label: items,
) -> Tensor:
    """Score the tokens that ``carried`` reads with sliding windows that carry no state.

    A window advances by ``stride`` tokens. All tokens of the first window in a stretch count, and the last ``stride``
    of every other one. With a stride of 1 each token has a whole window as context and costs a whole window (Al-Rfou
    et al. 2018, section 4).

    Returns:
        Negative log-likelihood in nats and number of tokens, (2,) float64.

    Raises:
        ValueError: for a stride outside 1 ... length, and for more rows than windows.
    """
    if not 1 <= stride <= dataset.length:
        raise ValueError(f"stride={stride} must be from 1 to {dataset.length}, the tokens per window")
    stream, n = Stream(dataset, split), dataset.length
    begins, skips = [], []
    for part in _stretches(stream, rows, examples):
        begin = torch.arange(0, len(part) * n - n + stride, stride).clamp(max=len(part) * n - n)
        begins.append(begin + part.start * n)
        # Tokens scored by the previous window.
        skips.append(torch.cat([begin[:1], begin[:-1] + n - begin[1:]]))
    batch = default_batch_size(n, dataset.vocab)
    batches = list(zip(torch.cat(begins).split(batch), torch.cat(skips).split(batch), strict=True))
    nats, tokens = torch.zeros((), dtype=torch.float64, device=model.device), 0
    at = torch.arange(n)
    with evaluating(model):
        for begin, skip in track(batches, len(batches), "windows"):
            targets = stream.text[begin[:, None] + at].long().to(model.device)
            outputs, _ = model(model.shift(targets))
            counts = (at >= skip[:, None]).to(model.device)
            nats -= model.likelihood.log_prob(outputs, targets).double()[counts].sum()
            tokens += int(counts.sum())
    return torch.tensor([nats.item(), tokens], dtype=torch.float64)


@torch.no_grad()
def apart(
    model: Decoder, dataset: Dataset | Tokens, split: str, batch: int, share: Share = WHOLE, shared: Rows | None = None
) -> Tensor:
    """Score the disjoint windows of a split independently, with the documents of a window kept apart.

    Each document of a window begins with the start token, as the window itself does.

    ``shared``: the processes that share each window, each of which counts its own tokens; None: this one alone.

    Returns:
        Negative log-likelihood in nats and number of tokens, (2,) float64, over the windows of a share.
    """
    stream, shared, counted = Stream(dataset, split), shared or Rows(), 0
    indices = share.chosen(stream.count)
    nats = torch.zeros((), dtype=torch.float64, device=model.device)
    with evaluating(model), shared.shared(model):
        for part in indices.split(batch):
            stretch = stream.take(part, fresh=True)
            segments = None if stretch.segments is None else shared.part(stretch.segments).to(model.device)
            targets = shared.part(stretch.targets).to(model.device)
            outputs, _ = model(shared.part(stretch.inputs).to(model.device), segments=segments)
            nats -= model.likelihood.log_prob(outputs, targets).double().sum()
            counted += targets.numel()
    return torch.tensor([nats.item(), counted], dtype=torch.float64)


def _stretches(stream: Stream, rows: int, examples: int) -> list[range]:
    chosen = min(examples or stream.count, stream.count)
    if not 1 <= rows <= chosen:
        raise ValueError(f"rows={rows} must be from 1 to {chosen}, the number of windows read")
    return stretches(stream.count, rows, chosen)
