"""Beam search: the likeliest continuations, of which several are followed at a time."""

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
    """The best continuations of each row, the best one first."""

    tokens: Tensor  # (B,K,T) int64; what follows the stop token is the stop token again
    scores: Tensor  # (B,K) log-probability, in nats, divided by the length penalty
    lengths: Tensor  # (B,K) int64, tokens up to and with the stop token


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
    r"""The likeliest sequences of at most ``max_new_tokens`` more tokens, as far as a beam of ``beams`` finds them.

    >>> import torch, longspan
    >>> model = longspan.Seq2Seq(longspan.Seq2SeqConfig(dim=8, depth=1, heads=2, feedforward=16, vocab=5)).eval()
    >>> found = longspan.beam_search(model, source=torch.tensor([[3, 1, 4]]), max_new_tokens=6, beams=3, stop=0)
    >>> found.tokens.shape[:2], found.scores.shape
    (torch.Size([1, 1]), torch.Size([1, 1]))

    A ``Decoder`` continues ``prompt`` (B,P) int64, with ``mask`` (B,P) where rows differ in length; a ``Seq2Seq``
    writes the target of ``source`` (B,M), ``source_mask`` (B,M), from its start or from a ``prompt``. In each step the
    ``beams`` best of all continuations go on, each with the state of the one that it continues, which is selected and
    never computed again. One that ends with ``stop`` keeps its score. Sequences are compared by
    $\log p / ((5 + n) / 6)^\alpha$, n their number of tokens and $\alpha$ the ``length_penalty``; 0 compares by
    probability, larger ones favour longer sequences (Wu et al. 2016, 1609.08144, section 7, eq. 14). ``best``: how many
    are returned, at most ``beams``. One beam is greedy search; as many as there are sequences, the exact answer.

    Raises ValueError for a prompt, source or option out of range.
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
    # One hypothesis a row at first: the others begin at -inf, so that the first step draws from the first one alone.
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
            # What has ended goes on in one way only, which costs nothing.
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
    """Whether the length penalty of the longest sequence may be beyond float64."""
    return penalty * math.log((5 + tokens) / 6) > 700


def _scored(total: Tensor, lengths: Tensor, penalty: float, tokens: int) -> Tensor:
    """Scores (B,K); beyond float64 by logarithms, where they may underflow to 0 but are never NaN."""
    if not _overflows(penalty, tokens):
        return total / ((5 + lengths.double()) / 6) ** penalty
    scores = -(torch.log(-total) - penalty * torch.log((5 + lengths.double()) / 6)).exp()
    return torch.where(total == -torch.inf, total, scores)


def _best_first(total: Tensor, lengths: Tensor, penalty: float, tokens: int) -> Tensor:
    """The order of sequences by their scores, (B,K) indices; ties keep theirs."""
    if not _overflows(penalty, tokens):
        return _scored(total, lengths, penalty, tokens).sort(dim=1, descending=True, stable=True).indices
    # The same order, by the logarithm of the negative score over the penalty; of equal lengths by probability.
    order = total.sort(dim=1, descending=True, stable=True).indices
    total, lengths = total.gather(1, order), lengths.gather(1, order)
    ranks = torch.log(-total) / penalty - torch.log((5 + lengths.double()) / 6)
    return order.gather(1, ranks.sort(dim=1, stable=True).indices)


def _check(model, prompt, source, mask, source_mask, tokens, beams, best, length_penalty, stop) -> None:
    """Raise ValueError for what ``beam_search`` refuses."""
    check_source(model, prompt, mask, source, source_mask)
    if source is None:
        if prompt is None:
            raise ValueError("a Decoder continues a prompt; give prompt=(B,P) int64, P may be 0")
        if mask is not None:
            check_mask("mask", mask, tuple(prompt.shape))
    check_type("length_penalty", length_penalty, float)
    check_type("stop", stop, int | None)
    for name, value in (("max_new_tokens", tokens), ("beams", beams), ("best", best)):
        check_type(name, value, int)
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if best > beams:
        raise ValueError(f"best={best} of beams={beams}: a beam returns at most as many as it follows")
    if length_penalty < 0:
        raise ValueError(f"length_penalty={length_penalty} must be at least 0")
    levels = model.likelihood.levels
    if stop is not None and not 0 <= stop < levels:
        raise ValueError(f"stop={stop} is no token; this model has 0 to {levels - 1}")
    if (count := _sequences(levels, tokens, stop, best)) < best:
        raise ValueError(
            f"best={best}, but a model of {levels} tokens has only {count} different sequences of at most {tokens} "
            f"tokens; pass best={count} or fewer"
        )


def _sequences(levels: int, tokens: int, stop: int | None, enough: int) -> int:
    """How many different sequences a search can return, counted up to ``enough``."""
    going, ended = 1, 0
    for _ in range(tokens):
        ended += 0 if stop is None else going
        going *= levels if stop is None else levels - 1
        if going + ended >= enough or not going:
            break
    return going + ended
