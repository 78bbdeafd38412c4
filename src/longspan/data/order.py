"""The order of training examples, a pure function, so that a resume needs no saved order."""

import hashlib
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

ROUNDS = 8  # of the Feistel network


def batch_indices(
    count: int, seed: int, index: int, batch: int, rank: int = 0, world: int = 1, *, keyed: bool = False
) -> Tensor:
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
        keyed: compute each place of the permutation with ``keyed_permutation``, which stores nothing, instead of
            drawing the whole permutation. The order is another one.

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
        if keyed:
            indices[here] = keyed_permutation(count, seed, epoch, offsets[here])
        else:
            indices[here] = _permutation(count, seed, epoch)[offsets[here]]
    return indices


def keyed_permutation(count: int, seed: int, epoch: int, places: Tensor) -> Tensor:
    """The values at ``places`` of a pseudo-random permutation of 0 ... count-1, without its other values.

    A Feistel network permutes the numbers of as many bits as ``count - 1`` has; a value outside 0 ... count-1 enters
    it again, until it is inside. That is less than twice per place on average.

    Args:
        count: number of values, at most $2^{62}$.
        seed: seed of the run.
        epoch: number of the permutation.
        places: (B,) int64 in 0 ... count-1.

    Returns:
        (B,) int64; equal arguments give equal values.

    References:
        Luby and Rackoff 1988 (the network). Black and Rogaway 2002, "Ciphers with arbitrary finite domains", section 3
        (cycle walking).

    >>> keyed_permutation(5, 0, 0, torch.arange(5)).sort().values.tolist()
    [0, 1, 2, 3, 4]
    """
    bits = max(2, (count - 1).bit_length())
    low = np.uint64(bits // 2)
    masks = np.uint64((1 << (bits - bits // 2)) - 1), np.uint64((1 << (bits // 2)) - 1)
    digest = hashlib.sha512(f"order {seed} {epoch}".encode()).digest()
    keys = np.frombuffer(digest, "<u8").astype(np.uint64)
    values = places.numpy().astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        # Two halves of a and b bits, a - b in (0, 1); each round adds a hash of one half to the other.
        high, rest = values[outside] >> low, values[outside] & masks[1]
        for i in range(ROUNDS):
            if i % 2:
                rest ^= _mixed(high ^ keys[i]) & masks[1]
            else:
                high ^= _mixed(rest ^ keys[i]) & masks[0]
        values[outside] = high << low | rest
        outside[outside] = values[outside] >= np.uint64(count)
    return torch.from_numpy(values.astype(np.int64))


def _mixed(x: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each number: the finalizer of splitmix64 (Steele et al. 2014, figure 16, variant 13)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# Two, since a batch can span two epochs.
@lru_cache(maxsize=2)
def _permutation(count: int, seed: int, epoch: int) -> Tensor:
    # Hashed, because seed + epoch would give seed 1 the same first epoch as seed 0's second.
    key = hashlib.sha256(f"{seed} {epoch}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
    return torch.randperm(count, generator=generator)
