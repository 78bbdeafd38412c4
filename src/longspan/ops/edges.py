"""Attention over edges that a policy has picked, and the gradient by which the policy learns from a reward."""

import torch
from torch import Tensor

from .backends import select_backend
from .softmax import dense
from .tensors import upcast_half

OP = "attention over picked edges"
LEVELS = 16  # distances from 2^15 on are one


def pick(scores: Tensor, allowed: Tensor, draw: bool) -> tuple[Tensor, Tensor]:
    """One of M for each row of scores (..., M), of those that are allowed: index (...) and the log of its probability.

    ``draw``: by the softmax of the scores, with torch's own generator; otherwise the likeliest. A row that is allowed
    nothing gets index 0, and 0 for the log. Only the log has a gradient.
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
    """A loss whose gradient is, on average over the picks, that of minus the expected reward: a scalar.

    log_prob (B,), of the picks of each row, as ``record["log_prob"]`` has them, and the reward (B,) that they led to,
    of which no gradient is taken. ``baseline``: what is taken off the reward to lessen the noise, which must not depend
    on the row's own picks; None: the mean reward of the other rows, 0 for a single one.

    >>> import torch, longspan
    >>> from longspan.ops.edges import reinforce
    >>> attention, x = longspan.build("sac(edges=2)", dim=8, heads=2).train(), torch.randn(4, 5, 8)
    >>> record = {"log_prob": None}
    >>> y, _ = attention(x, record=record)
    >>> reward = -y.square().mean((1, 2))  # in training, the log-likelihood of each row
    >>> loss = -reward.mean() + reinforce(record["log_prob"], reward)
    >>> loss.backward()

    Source: Williams 1992, "Simple statistical gradient-following algorithms for connectionist reinforcement learning".
    Raises ValueError for a reward of another shape.
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
    """The kind of a distance of at least 1: floor(log2), at most LEVELS - 1."""
    return torch.bucketize(distance, 2 ** torch.arange(1, LEVELS, device=distance.device), right=True)


def once(index: Tensor, there: Tensor) -> Tensor:
    """``there`` without what is there already: index (..., C), bool (..., C) -> bool (..., C)."""
    same = (index[..., :, None] == index[..., None, :]) & there[..., None, :]
    return there & ~same.tril(-1).any(-1)


def attend(q: Tensor, k: Tensor, v: Tensor, index: Tensor, there: Tensor) -> Tensor:
    """Each query over the keys of its own: q (B,H,N,D), k (B,H,M,D), v (B,H,M,E), index, there (B,N,C) -> (B,H,N,E).

    A key that is named twice counts once; one whose ``there`` is False does not count. A query without keys gets 0.
    Float32 at least; O(N C D).
    """
    q, k, v = (upcast_half(x) for x in (q, k, v))
    if select_backend(OP) == "reference":
        return dense.attend(q, k, v, mask=mask_of(index, there, k.shape[2])[:, None])
    there = once(index, there)[:, None]  # (B,1,N,C)
    logits = (q[..., None, :] * _taken(k, index)).sum(-1) * q.shape[-1] ** -0.5
    p = logits.masked_fill(~there, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(~there, 0.0)
    return (p[..., None] * _taken(v, index)).sum(-2)


def mask_of(index: Tensor, there: Tensor, keys: int) -> Tensor:
    """Which keys are named, index, there (B,N,C) -> bool (B,N,M)."""
    named = torch.zeros(*index.shape[:2], keys, dtype=torch.int32, device=index.device)
    return named.scatter_add(2, index, there.int()) > 0


def _taken(x: Tensor, index: Tensor) -> Tensor:
    """x (B,H,M,D), index (B,N,C) -> (B,H,N,C,D)."""
    flat = index.flatten(1)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1])
    return x.gather(2, flat).unflatten(2, index.shape[1:])
