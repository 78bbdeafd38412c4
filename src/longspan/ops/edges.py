"""Attention over sampled edges, and the policy gradient that trains the sampler from a reward."""

import torch
from torch import Tensor

from .backends import select_backend
from .softmax import dense
from .tensors import upcast_half

OP = "attention over picked edges"
LEVELS = 16  # all distances from 2^15 on share the last level


def pick(scores: Tensor, allowed: Tensor, draw: bool) -> tuple[Tensor, Tensor]:
    """Pick one allowed entry of each row of scores.

    Args:
        scores: (..., M).
        allowed: (..., M) bool, True = may be picked.
        draw: Samples from the softmax of the scores with torch's generator; False picks the largest score.

    Returns:
        The index (...) and the log of its probability (...). Only the log has a gradient. A row without allowed
        entries gets index 0 and log 0.
    """
    logs = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min).log_softmax(-1)
    if draw:
        index = logs.detach().exp().flatten(0, -2).multinomial(1).view(scores.shape[:-1])
    else:
        index = logs.argmax(-1)
    some = allowed.any(-1)
    index = index.masked_fill(~some, 0)
    return index, logs.gather(-1, index[..., None])[..., 0].masked_fill(~some, 0.0)


def reinforce(log_prob: Tensor, reward: Tensor, baseline: Tensor | float | None = None) -> Tensor:
    """Return a loss whose expected gradient is that of minus the expected reward (REINFORCE).

    Args:
        log_prob: (B,), the log-probability of the picks of each row, from ``record["log_prob"]``.
        reward: (B,), the reward of each row. It gets no gradient.
        baseline: Subtracted from the reward to reduce variance. It must not depend on the picks of its own row. None
            is the mean reward of the other rows, and 0 for a single row.

    Returns:
        A scalar.

    Raises:
        ValueError: log_prob and reward are not both (B,).

    Example:
        >>> import torch, longspan
        >>> from longspan.ops.edges import reinforce
        >>> attention, x = longspan.build("sac(edges=2)", dim=8, heads=2).train(), torch.randn(4, 5, 8)
        >>> record = {"log_prob": None}
        >>> y, _ = attention(x, record=record)
        >>> reward = -y.square().mean((1, 2))  # in training, the log-likelihood of each row
        >>> loss = -reward.mean() + reinforce(record["log_prob"], reward)
        >>> loss.backward()

    References:
        Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
    """
    if log_prob.shape != reward.shape or log_prob.dim() != 1:
        raise ValueError(
            f"log_prob and reward must be (B,), one per row, not {tuple(log_prob.shape)} and {tuple(reward.shape)}"
        )
    reward = reward.detach()
    if baseline is None:
        baseline = (reward.sum() - reward) / max(len(reward) - 1, 1)
    return -((reward - baseline) * log_prob).mean()


def level(distance: Tensor) -> Tensor:
    """Return floor(log2(distance)) for distances of at least 1, at most LEVELS - 1."""
    return torch.bucketize(distance, 2 ** torch.arange(1, LEVELS, device=distance.device), right=True)


def once(index: Tensor, there: Tensor) -> Tensor:
    """Clear ``there`` (..., C) at entries whose index (..., C) occurred before: -> bool (..., C)."""
    same = (index[..., :, None] == index[..., None, :]) & there[..., None, :]
    return there & ~same.tril(-1).any(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor, there: Tensor) -> Tensor:
    """Softmax attention of each query over its own list of keys, in float32 at least. Time is O(N C D).

    Args:
        q: (B,H,N,D).
        k: (B,H,M,D).
        v: (B,H,M,E).
        index: (B,N,C) int64, the keys of each query. A key that is listed twice counts once.
        there: (B,N,C) bool, False = the entry does not count.

    Returns:
        (B,H,N,E); 0 for a query without keys.
    """
    q, k, v = (upcast_half(x) for x in (q, k, v))
    if select_backend(OP) == "reference":
        return dense.attend(q, k, v, mask=mask_of(index, there, k.shape[2])[:, None])
    there = once(index, there)[:, None]  # (B,1,N,C)
    logits = (q[..., None, :] * _taken(k, index)).sum(-1) * q.shape[-1] ** -0.5
    p = logits.masked_fill(~there, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(~there, 0.0)
    return (p[..., None] * _taken(v, index)).sum(-2)


def mask_of(index: Tensor, there: Tensor, keys: int) -> Tensor:
    """Return which keys are listed: index, there (B,N,C) -> bool (B,N,M)."""
    named = torch.zeros(*index.shape[:2], keys, dtype=torch.int32, device=index.device)
    return named.scatter_add(2, index, there.int()) > 0


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x (B,H,M,D), index (B,N,C) -> (B,H,N,C,D)."""
    flat = index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, flat).unflatten(2, index.shape[1:])
