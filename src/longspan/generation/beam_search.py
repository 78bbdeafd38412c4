"""Beam search over the most likely continuations."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .._utils import model_memory
from .._utils.aliases import hinted
from .._utils.typecheck import check_type
from ..attention.validation import check_mask
from ..models.decoder import Decoder
from ..models.seq2seq import Seq2Seq
from ..states.utils import select
from .sampling import afford_rows, begun, check_source


class Beams(NamedTuple):
    """The best continuations of each row, best first."""

    tokens: Tensor  # (B,K,T) int64, padded with the stop token
    scores: Tensor  # (B,K) log-probability, in nats, divided by the length penalty
    lengths: Tensor  # (B,K) int64, number of tokens, including the stop token


@hinted
@torch.no_grad()
def beam_search(
    model: Decoder | Seq2Seq,
    prompt: Tensor | None = None,
    *,
    source: Tensor | None = None,
    source_mask: Tensor | None = None,
    mask: Tensor | None = None,
    max_new_tokens: int,
    beams: int = 4,
    best: int = 1,
    length_penalty: float = 0.0,
    stop: int | None = None,
) -> Beams:
    r"""Search for the most likely continuations with a beam.

    In each step, the ``beams`` best of all continuations are kept; their states are selected, never recomputed.
    Sequences are compared by $\log p / ((5 + n) / 6)^\alpha$, with n tokens and $\alpha$ the ``length_penalty``. One
    beam is greedy search.

    Args:
        model: A ``Decoder``, or a ``Seq2Seq``, which writes the target of each ``source``.
        prompt: (B,P) int64, required for a ``Decoder``; P may be 0.
        source: (B,M) int64, the source of a ``Seq2Seq``.
        source_mask: (B,M) bool, True on real tokens, if sources differ in length.
        mask: (B,P) bool, True on real tokens, if prompts differ in length.
        max_new_tokens: The largest number of new tokens.
        beams: Number of sequences to keep per row.
        best: Number of sequences to return per row, at most ``beams``.
        length_penalty: 0 compares by probability; larger values favor longer sequences.
        stop: The token that ends a sequence, which then keeps its score.

    Returns:
        Tokens, scores and lengths of the best sequences of each row.

    Raises:
        ValueError: For a prompt, source or option out of range.

    Example:
        >>> import torch, longspan
        >>> model = longspan.Seq2Seq(longspan.Seq2SeqConfig(dim=8, depth=1, heads=2, feedforward=16, vocab=5)).eval()
        >>> found = longspan.beam_search(model, source=torch.tensor([[3, 1, 4]]), max_new_tokens=6, beams=3, stop=0)
        >>> found.tokens.shape[:2], found.scores.shape
        (torch.Size([1, 1]), torch.Size([1, 1]))

    References:
        Wu et al. 2016 (1609.08144), section 7, eq. 14, for the length penalty.
    """
    tokens = max_new_tokens
    _check(model, prompt, source, mask, source_mask, tokens, beams, best, length_penalty, stop)
    if prompt is None:
        assert source is not None
        prompt = source.new_zeros(len(source), 0)
    if isinstance(model, Decoder):
        rows = len(prompt) * beams
        afford_rows(model, rows, prompt.shape[1] + tokens, f"the states of beams={beams}")
    model_memory.check_fits_in_memory(
        len(prompt) * beams * model.likelihood.levels * 8, f"the candidates of beams={beams}"
    )
    outputs, state, step = begun(model, prompt, mask, source, source_mask, tokens)
    batch, levels = len(outputs), model.likelihood.levels
    logs = model.likelihood.log_probs(outputs).double()  # (B,V)
    # One hypothesis per row at first: the others start at -inf, so that the first step extends the first one alone.
    total = torch.full((batch, beams), -torch.inf, dtype=torch.float64, device=logs.device)
    total[:, 0] = 0.0
    logs = logs[:, None].expand(-1, beams, -1)
    rows = torch.arange(batch, device=logs.device)[:, None]
    state = select(state, rows.expand(-1, beams).flatten())
    written = torch.zeros(batch, beams, 0, dtype=torch.long, device=logs.device)
    done = torch.zeros(batch, beams, dtype=torch.bool, device=logs.device)
    lengths = torch.zeros(batch, beams, dtype=torch.long, device=logs.device)
    for i in range(tokens):
        if stop is not None:
            # An ended sequence has one continuation, at no cost.
            ended = torch.full_like(logs, -torch.inf)
            ended[..., stop] = 0.0
            logs = torch.where(done[..., None], ended, logs)
        found = (total[..., None] + logs).flatten(1)  # (B,K V)
        longer = (lengths + (~done).long())[..., None].expand(-1, -1, levels).flatten(1)
        order = _best_first(found, longer, length_penalty, tokens)[:, :beams]
        parent, token = order // levels, order % levels
        total, lengths = found.gather(1, order), longer.gather(1, order)
        written = torch.cat([written[rows, parent], token[..., None]], 2)
        done = done[rows, parent] | (token == stop if stop is not None else False)
        if i + 1 == tokens or bool((done | (total == -torch.inf)).all()):
            break
        state = select(state, (rows * beams + parent).flatten())
        outputs, state = step(token.flatten()[:, None], state)
        logs = model.likelihood.log_probs(outputs[:, 0]).double().unflatten(0, (batch, beams))
    order = _best_first(total, lengths, length_penalty, tokens)[:, :best]
    scores = _scored(total, lengths, length_penalty, tokens)
    return Beams(written[rows, order], scores.gather(1, order), lengths.gather(1, order))


def _overflows(penalty: float, tokens: int) -> bool:
    """Whether the length penalty of the longest sequence may overflow float64."""
    return penalty * math.log((5 + tokens) / 6) > 700


def _scored(total: Tensor, lengths: Tensor, penalty: float, tokens: int) -> Tensor:
    """Scores (B,K), by logarithms if float64 overflows; they may underflow to 0 but are never NaN."""
    if not _overflows(penalty, tokens):
        return total / ((5 + lengths.double()) / 6) ** penalty
    scores = -(torch.log(-total) - penalty * torch.log((5 + lengths.double()) / 6)).exp()
    return torch.where(total == -torch.inf, total, scores)


def _best_first(total: Tensor, lengths: Tensor, penalty: float, tokens: int) -> Tensor:
    """Indices (B,K) of sequences sorted by score; the sort is stable."""
    if not _overflows(penalty, tokens):
        return _scored(total, lengths, penalty, tokens).sort(dim=1, descending=True, stable=True).indices
    # The same order by the logarithm of the negative score over the penalty, and by probability for equal lengths.
    order = total.sort(dim=1, descending=True, stable=True).indices
    total, lengths = total.gather(1, order), lengths.gather(1, order)
    ranks = torch.log(-total) / penalty - torch.log((5 + lengths.double()) / 6)
    return order.gather(1, ranks.sort(dim=1, stable=True).indices)


def _check(model, prompt, source, mask, source_mask, tokens, beams, best, length_penalty, stop) -> None:
    """Raise ValueError for invalid arguments of ``beam_search``."""
    check_source(model, prompt, mask, source, source_mask)
    if source is None:
        if prompt is None:
            raise ValueError("a Decoder needs a prompt; pass prompt=(B,P) int64, P may be 0")
        if mask is not None:
            check_mask("mask", mask, tuple(prompt.shape))
    check_type("length_penalty", length_penalty, float)
    check_type("stop", stop, int | None)
    for name, value in (("max_new_tokens", tokens), ("beams", beams), ("best", best)):
        check_type(name, value, int)
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if best > beams:
        raise ValueError(f"best={best} must be at most beams={beams}")
    if length_penalty < 0:
        raise ValueError(f"length_penalty={length_penalty} must be at least 0")
    levels = model.likelihood.levels
    if stop is not None and not 0 <= stop < levels:
        raise ValueError(f"stop={stop} is not a token; this model has 0 to {levels - 1}")
    if (count := _sequences(levels, tokens, stop, best)) < best:
        raise ValueError(
            f"best={best}, but a model of {levels} tokens has only {count} different sequences of at most {tokens} "
            f"tokens; pass best={count} or less"
        )


def _sequences(levels: int, tokens: int, stop: int | None, enough: int) -> int:
    """Number of different sequences that a search can return, counted up to ``enough``."""
    going, ended = 1, 0
    for _ in range(tokens):
        ended += 0 if stop is None else going
        going *= levels if stop is None else levels - 1
        if going + ended >= enough or not going:
            break
    return going + ended
