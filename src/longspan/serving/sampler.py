"""Sampling of many rows at once, each with its own options and its own random numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._utils.typecheck import check_fields


@dataclass(frozen=True)
class Sampling:
    """How a stream draws its tokens.

    Raises:
        ValueError: For a temperature that is negative or not finite, top_k < 0, and top_p outside (0, 1].
    """

    temperature: float = 1.0
    """sharpens the distribution below 1 and flattens it above; 0 takes the most likely token"""
    top_k: int = 0
    """samples from the k most likely tokens; 0 samples from all"""
    top_p: float = 1.0
    """samples from the most likely tokens that reach this probability; 1 samples from all"""
    seed: int = 0
    """token i of a stream depends on its seed and i, not on other streams or on its place in the batch"""

    def __post_init__(self):
        check_fields(self)
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature={self.temperature} must be a finite number >= 0; 0 takes the mode")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be >= 0; 0 keeps all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps all tokens")
        if not -(2**63) <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be a 64-bit integer")


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
    chosen = [i for i, row in enumerate(rows) if row.temperature and (row.top_k or row.top_p < 1)]
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
    if all(row.temperature == 1 for row in rows):
        shares = scores.softmax(-1)
    else:
        shares = _shares(scores, [row.temperature or 1.0 for row in rows])
    drawn = _drawn(shares, rows, positions)
    greedy = [row.temperature == 0 for row in rows]
    return torch.where(torch.tensor(greedy, device=scores.device), scores.argmax(-1), drawn) if any(greedy) else drawn


def _among_likely(scores: Tensor, rows: Sequence[Sampling], positions: Tensor) -> Tensor:
    """Draw from the tokens that top_k and top_p leave."""
    levels = scores.shape[1]
    top_k = torch.tensor([[row.top_k or levels] for row in rows], device=scores.device)
    ordered, tokens = scores.sort(dim=-1, descending=True, stable=True)
    dropped = torch.arange(levels, device=scores.device) >= top_k
    shares = _shares(ordered.masked_fill(dropped, -math.inf), [row.temperature for row in rows])
    # A token is kept while the mass before it is below top_p.
    shares = shares.masked_fill(shares.cumsum(-1) - shares >= _column([row.top_p for row in rows], scores), 0.0)
    return tokens.gather(-1, _drawn(shares, rows, positions)[:, None])[:, 0]


def _shares(scores: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return the probabilities (B,V) at each row's temperature, which is above 0."""
    # The best score is 0, so that no quotient of it overflows.
    return ((scores - scores.amax(-1, keepdim=True)) / _column(temperatures, scores)).softmax(-1)


def _drawn(shares: Tensor, rows: Sequence[Sampling], positions: Tensor) -> Tensor:
    """Draw a place of each row by its shares (B,V), which need not sum to 1 -> (B,)."""
    mass = shares.cumsum(-1)
    seeds = torch.tensor([row.seed for row in rows], device=shares.device)
    wanted = uniforms(seeds, positions)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, wanted, right=True)[:, 0].clamp(max=shares.shape[1] - 1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    """Return positive numbers as a column, at least the smallest normal one: a processor may read smaller ones as 0."""
    column = torch.tensor([float(value) for value in values], dtype=like.dtype, device=like.device)[:, None]
    return column.clamp(min=torch.finfo(like.dtype).tiny)
