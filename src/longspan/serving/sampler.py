"""Sampling of many rows at once, each with its own options and its own random numbers."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..models.sampling import Sampling, keep_likely, values_of


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return one number in [0, 1) for each seed and position, the same on every machine.

    It is the counter-based generator SplitMix64: position i of a seed's stream, with the seed mixed first so that
    neighboring seeds give unrelated streams.

    Args:
        seeds: (B,) int64.
        positions: (B,) int64, the number of tokens drawn before.

    Returns:
        (B,) float64.

    References:
        Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    mixed = _mix(_mix(seeds) + (positions + 1) * _GOLDEN)
    return _shifted(mixed, 11).double() * 2.0**-53


def _signed(value: int) -> int:
    """A 64-bit pattern as a signed integer, since torch has no unsigned arithmetic."""
    return value - 2**64 if value >= 2**63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST, _SECOND = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)


def _mix(x: Tensor) -> Tensor:
    """The finalizer of SplitMix64; products wrap around."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right without copies of the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def sample(scores: Tensor, rows: Sequence[Sampling], positions: Tensor) -> Tensor:
    """Draw one token per row.

    The options apply in the order temperature, top_k, top_p, as in ``Likelihood.sample``. Of equally probable tokens,
    the lower one counts as more probable.

    Args:
        scores: (B,V) log-probabilities, up to a constant per row.
        rows: The options of each row.
        positions: (B,) int64, the number of tokens that each row has drawn before.

    Returns:
        (B,) int64.
    """
    scores = scores.double()
    if all(row.temperature == 0 for row in rows):
        return scores.argmax(-1)
    chosen = [i for i, row in enumerate(rows) if row.temperature and row.restricts()]
    if len(chosen) == len(rows):
        return _among_likely(scores, rows, positions)
    # Sorting takes longer than all else, so only rows that need it are sorted. A row draws the same token in any batch.
    tokens = _among_all(scores, rows, positions)
    if chosen:
        at = torch.tensor(chosen, device=scores.device)
        tokens[at] = _among_likely(scores[at], [rows[i] for i in chosen], positions[at])
    return tokens


def _among_all(scores: Tensor, rows: Sequence[Sampling], positions: Tensor) -> Tensor:
    """Draw from all tokens, or take the most likely one where the temperature is 0."""
    sharp = scores
    if any(row.temperature != 1 for row in rows):
        # The best score is 0, so that no quotient of it overflows.
        sharp = (scores - scores.amax(-1, keepdim=True)) / values_of(rows, lambda row: row.temperature, scores)
    drawn = _drawn(sharp.softmax(-1), rows, positions)
    greedy = [row.temperature == 0 for row in rows]
    return torch.where(torch.tensor(greedy, device=scores.device), scores.argmax(-1), drawn) if any(greedy) else drawn


def _among_likely(scores: Tensor, rows: Sequence[Sampling], positions: Tensor) -> Tensor:
    """Draw from the tokens that the options keep."""
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    kept, shares = keep_likely(ordered, rows)
    return tokens.gather(-1, _drawn(shares.masked_fill(~kept, 0.0), rows, positions)[:, None])[:, 0]


def _drawn(shares: Tensor, rows: Sequence[Sampling], positions: Tensor) -> Tensor:
    """Draw a place of each row by its shares (B,V), which need not sum to 1 -> (B,)."""
    mass = shares.cumsum(-1)
    seeds = torch.tensor([row.seed for row in rows], device=shares.device)
    wanted = uniforms(seeds, positions)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, wanted, right=True)[:, 0].clamp(max=shares.shape[1] - 1)
