"""Pathfinder: two discs in a picture of dashed paths; do they lie on the two ends of one path?

Source: Linsley et al. 2018 (1805.08315), section 2; the sizes of Tay et al. 2020 (2011.04006), section 2.2.5. Pictures
are our own: every path is as long as the other, and pairs of discs are equally far apart whether they belong together
or not, so that neither reveals the answer.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .sequences import SPLITS, Arena, arena, images

PATH, DISC = 1, 2  # levels of pixels; 0 is the ground
PERIOD = 3  # of dashes: two pixels, then one that is dark
REACH = 2  # pixels so near belong together: a dash and the next one
TURN = 0.35  # radians that a path may turn at each pixel
ROUNDS = 60  # trials of a path before its picture is given up
POOL = 1024  # pictures drawn at once, at most
LEAST = 12


def load(source: str, length: int, examples: int, tests: int, seed: int) -> Arena:
    """Pictures of ``length`` pixels, a square number, half of them of each class.

    Raises ValueError for another source, and for a length that is no square or too small.
    """
    if source != "made":
        raise ValueError(f"pathfinder={source}: pictures are generated; pass pathfinder=made")
    size = math.isqrt(length)
    if size * size != length or size < LEAST:
        raise ValueError(f"length={length} of pathfinder must be a square of {LEAST} or more, such as 256 or 1024")
    counts = dict(zip(SPLITS, (examples, tests, tests), strict=True))
    generator = torch.Generator().manual_seed(seed)
    splits = {split: images(*draw(count, size, generator)) for split, count in counts.items()}
    return arena(f"pathfinder, {source}", 3, length, 2, splits, (size, size))


def draw(count: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Pictures (count,size,size) uint8 of the levels 0, PATH and DISC, and classes (count,): 1, then 0, in turn."""
    pictures, labels, have = [], [], 0
    while have < count:
        # About one in eight is kept.
        found, classes, apart = _scenes(min(POOL, 16 * count), size, generator)
        one, other = _alike(classes, apart)
        pairs = torch.stack([one, other], 1).flatten()
        pictures.append(found[pairs])
        labels.append(classes[pairs])
        have += len(pairs)
    return torch.cat(pictures)[:count], torch.cat(labels)[:count]


def connected(pictures: Tensor) -> Tensor:
    """Pictures (n,size,size) -> bool (n,): whether all discs are reached from one of them, going from dash to dash."""
    lit = pictures > 0
    disc = pictures == DISC
    first = disc.flatten(1).int().argmax(1)
    seen = F.one_hot(first, lit[0].numel()).bool().view_as(lit)
    for _ in range(lit.shape[-1] ** 2):
        more = _wide(seen, REACH) & lit
        if torch.equal(more, seen):
            break
        seen = more
    return (seen | ~disc).flatten(1).all(1)


def _scenes(pool: int, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures, their classes, and how far apart the two discs are, in whole pixels: ``pool`` of them at most."""
    # Published pictures of 32 x 32 have paths of 14 dashes and 5 distractors of a third of that.
    steps, distractors = size * 3 // 4, round(5 * size**2 / 32**2)
    free = torch.ones(pool, size, size, dtype=torch.bool)
    lit = torch.zeros_like(free)
    good = torch.ones(pool, dtype=torch.bool)
    paths = []
    for length in (steps, steps, *[max(steps // 3, 4)] * distractors):
        path, placed = _placed(free, length, generator)
        good &= placed
        shown = torch.arange(length) % PERIOD < PERIOD - 1
        lit |= _pixels(path[:, shown], size)
        free &= ~_wide(_pixels(path, size), REACH)
        paths.append(path)
    classes = torch.arange(pool) % 2
    turned = torch.randint(2, (pool, 2), generator=generator)
    # A path's first or last pixel; those of one path, or one of each.
    begin = _end(paths[0], turned[:, 0])
    end = torch.where(classes[:, None] == 1, _end(paths[0], 1 - turned[:, 0]), _end(paths[1], turned[:, 1]))
    apart = (begin - end).float().norm(dim=1).round().long()
    discs = _wide(_pixels(torch.stack([begin, end], 1), size), 1, cross=True)
    pictures = torch.where(discs, DISC, torch.where(lit, PATH, 0)).to(torch.uint8)
    # A disc may touch what its path keeps away from.
    good &= connected(pictures) == (classes == 1)
    return pictures[good], classes[good], apart[good]


def _placed(free: Tensor, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A path of pixels in each picture (B,length,2), and where one was found: free pixels inside the picture's edge."""
    count, size = len(free), free.shape[-1]
    paths, placed = torch.zeros(count, length, 2, dtype=torch.long), torch.zeros(count, dtype=torch.bool)
    for _ in range(ROUNDS):
        todo = (~placed).nonzero()[:, 0]
        if not len(todo):
            break
        begin = torch.rand(len(todo), 1, 2, generator=generator) * (size - 2) + 0.5
        turns = (2 * torch.rand(len(todo), length - 1, generator=generator) - 1) * TURN
        turns[:, 0] = torch.rand(len(todo), generator=generator) * 2 * math.pi
        angle = turns.cumsum(1)
        path = torch.cat([begin, begin + torch.stack([angle.cos(), angle.sin()], 2).cumsum(1)], 1).round().long()
        inside = ((path >= 1) & (path <= size - 2)).flatten(1).all(1)
        at = path.clamp(0, size - 1)
        room = free[todo[:, None], at[..., 0], at[..., 1]].all(1)
        # Not curled up.
        straight = (path[:, 0] - path[:, -1]).float().norm(dim=1) >= length / 2
        good = inside & room & straight
        paths[todo[good]], placed[todo[good]] = path[good], True
    return paths, placed


def _alike(classes: Tensor, apart: Tensor) -> tuple[Tensor, Tensor]:
    """Pictures of both classes, as many of each at every distance between the discs: their numbers, pair by pair."""
    one, other = [], []
    for distance in apart.unique():
        found = [((classes == label) & (apart == distance)).nonzero()[:, 0] for label in (1, 0)]
        few = min(map(len, found))
        one.append(found[0][:few])
        other.append(found[1][:few])
    ones, others = torch.cat(one), torch.cat(other)
    # In the order in which they were drawn, not that of their distances.
    order = ones.argsort()
    return ones[order], others[order]


def _end(path: Tensor, last: Tensor) -> Tensor:
    return torch.where(last[:, None] == 1, path[:, -1], path[:, 0])


def _pixels(path: Tensor, size: int) -> Tensor:
    """Paths (B,n,2) as pictures, bool (B,size,size)."""
    flat = torch.zeros(len(path), size * size, dtype=torch.bool)
    return flat.scatter_(1, path[..., 0] * size + path[..., 1], True).view(-1, size, size)


def _wide(lit: Tensor, reach: int, cross: bool = False) -> Tensor:
    """Pixels within ``reach`` of lit ones, in rows, columns and diagonals; ``cross``: not in diagonals."""
    rows = _along(lit, reach)
    return rows | _along(lit.mT, reach).mT if cross else _along(rows.mT, reach).mT


def _along(lit: Tensor, reach: int) -> Tensor:
    size = lit.shape[-1]
    padded, found = F.pad(lit, (reach, reach)), lit.clone()
    for shift in range(2 * reach + 1):
        found |= padded[..., shift : shift + size]
    return found
