"""The order of training examples, a pure function, so that a resume needs no saved order."""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor


def batch_indices(count: int, seed: int, index: int, batch: int, rank: int = 0, world: int = 1) -> Tensor:
    """The examples of a micro-batch.

    A run reads a permutation of all examples per epoch, which depends only on ``seed`` and the epoch. Each micro-batch
    takes the next ``batch * world`` examples; a rank gets every ``world``-th of them. So all ranks together read the
    batch of a single process with ``batch * world``.

    Args:
        count: number of examples in the data set.
        seed: seed of the permutations.
        index: number of the micro-batch, from 0.
        batch: examples per rank.
        rank: the rank, from 0.
        world: number of ranks.

    Returns:
        (batch,) int64 in 0 ... count-1.

    Raises:
        ValueError: for count, batch or world < 1, index < 0, and rank outside 0 ... world-1.

    >>> batch_indices(5, seed=0, index=0, batch=5).sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    for name, value in (("count", count), ("batch", batch), ("world", world)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be >= 1")
    if index < 0:
        raise ValueError(f"index={index}: must be >= 0")
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank}: must lie in 0 ... {world - 1} (world={world})")
    places = index * batch * world + rank + world * torch.arange(batch)
    epochs, offsets = places.div(count, rounding_mode="floor"), places % count
    indices = torch.empty_like(places)
    for epoch in epochs.unique().tolist():
        here = epochs == epoch
        indices[here] = _permutation(count, seed, epoch)[offsets[here]]
    return indices


# Two, since a batch can span two epochs.
@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    # Hashed, because seed + epoch would give seed 1 the same first epoch as seed 0's second.
    key = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
    return torch.randperm(count, generator=generator)
