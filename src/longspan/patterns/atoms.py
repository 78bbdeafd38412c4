"""Patterns along one dimension: windows, strides, blocks, summaries, globals, random keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .._utils.constants import constant
from .algebra import Pattern
from .blocks import Certain, Grid
from .numbers import whole


class _Diagonal(Pattern):
    """A function of i - j."""

    @property
    def kind(self) -> str:
        return "diagonal"


class _Column(Pattern):
    """A function of j."""

    @property
    def kind(self) -> str:
        return "column"


@dataclass(frozen=True)
class causal(_Diagonal):
    """Each query sees itself and every key before it: j <= i."""

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, 0

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return j <= i


@dataclass(frozen=True)
class band(_Diagonal):
    """Query i sees the keys i - left to i + right, itself included."""

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        whole("left", self.left, 0)
        whole("right", self.right, 0)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return self.left, self.right

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return (i - j <= self.left) & (j - i <= self.right)


@dataclass(frozen=True)
class dilated(_Diagonal):
    """Query i sees itself and ``window`` keys on each side, ``stride`` apart."""

    window: int
    stride: int

    def __post_init__(self) -> None:
        whole("window", self.window, 0)
        whole("stride", self.stride, 1)

    @property
    def apart(self) -> int:
        return self.stride

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return self.window * self.stride, self.window * self.stride

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return ((i - j) % self.stride == 0) & ((i - j).abs() <= self.window * self.stride)


@dataclass(frozen=True)
class strided(_Diagonal):
    """Query i sees itself and every ``stride``-th key from there, on both sides.

    With ``band(stride - 1)`` it is the strided pattern of Child et al. 2019 (1904.10509), section 4.2; alone it is the
    A(2) of that paper.
    """

    stride: int

    def __post_init__(self) -> None:
        whole("stride", self.stride, 1)

    @property
    def apart(self) -> int:
        return self.stride

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, None

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return (i - j) % self.stride == 0


@dataclass(frozen=True)
class prefix(_Column):
    """Every query sees the first n keys.

    ``causal() | prefix(n)`` is the prefix mask of Dong et al. 2019 (1905.03197), section 2.3.
    """

    n: int

    def __post_init__(self) -> None:
        whole("n", self.n, 1)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, self.n - 1

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return j < self.n


@dataclass(frozen=True)
class fixed(_Column):
    """Every query sees the last ``summary`` keys of each block: j % block >= block - summary.

    It is the A(2) of Child et al. 2019 (1904.10509), section 4.2. The whole fixed pattern of the paper is
    ``block(l) | fixed(l, c)``.
    """

    block: int
    summary: int

    def __post_init__(self) -> None:
        whole("block", self.block, 1)
        whole("summary", self.summary, 1)
        if self.summary > self.block:
            raise ValueError(f"summary={self.summary} must be at most block={self.block}")

    @property
    def period(self) -> int:
        return self.block

    @property
    def grains(self) -> frozenset[int]:
        return frozenset((self.block,))

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, None

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return j % self.block >= self.block - self.summary


@dataclass(frozen=True)
class globals(Pattern):
    """Global positions G see every key, and every query sees them; a number g means the first g positions.

    These are tokens of the sequence, "internal" global nodes (Lin et al. 2021, 2106.04554, section 4.1.1).
    """

    indices: int | tuple[int, ...]

    def __post_init__(self) -> None:
        if isinstance(self.indices, (tuple, list)):
            for index in self.indices:
                whole("index", index, 0)
            ordered = tuple(sorted(set(self.indices)))
            count = len(ordered)
            object.__setattr__(self, "indices", count if ordered == tuple(range(count)) else ordered)
        if not isinstance(self.indices, tuple):
            whole("number of globals", self.indices, 1)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, None

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return self._among(i) | self._among(j)

    def _among(self, x: Tensor) -> Tensor:
        if isinstance(self.indices, int):
            return (x >= 0) & (x < self.indices)
        return torch.isin(x, constant(self.indices, torch.int64, x.device))

    def _count(self, first: Tensor, last: Tensor) -> Tensor:
        """Number of global positions in first ... last."""
        if isinstance(self.indices, int):
            return last.clamp(max=self.indices - 1) - first.clamp(max=self.indices) + 1
        points = torch.tensor(self.indices)
        return torch.searchsorted(points, last, right=True) - torch.searchsorted(points, first)

    def near(self, grid: Grid) -> Tensor | None:
        rows = self._count(grid.first, grid.last) > 0
        if isinstance(self.indices, int):
            blocks = torch.arange(-(-min(self.indices, grid.total) // grid.size))
        else:
            blocks = torch.tensor(sorted({p // grid.size for p in self.indices if p < grid.total}), dtype=torch.int64)
        columns = blocks.expand(len(rows), -1)
        if not rows.any():
            return columns
        across = grid.low + torch.arange(int((grid.high - grid.low)[rows].max()) + 1)
        return torch.cat([columns, torch.where(rows & (across <= grid.high), across, -1)], 1)

    def tiles(self, grid: Grid, blocks: Tensor) -> Certain:
        begin, end = grid.keys(blocks)
        rows, columns = self._count(grid.first, grid.last), self._count(begin, end)
        return Certain.counted(rows, grid.last - grid.first + 1).either(Certain.counted(columns, end - begin + 1))


class Blocked(Pattern):
    """Base of the patterns whose queries see the same keys throughout a block of ``unit`` tokens."""

    @property
    def unit(self) -> int:
        """The number of tokens of a block."""
        raise NotImplementedError

    @property
    def period(self) -> int:
        return self.unit

    @property
    def grains(self) -> frozenset[int]:
        return frozenset((self.unit,))


@dataclass(frozen=True)
class block(Blocked):
    """Each query sees the keys of the same block of ``size``: i // size == j // size."""

    size: int

    def __post_init__(self) -> None:
        whole("size", self.size, 1)

    @property
    def unit(self) -> int:
        return self.size

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return self.size - 1, self.size - 1

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return i // self.size == j // self.size

    def spans(self, units: Tensor, head: int, layer: int) -> tuple[Tensor, Tensor]:
        return units[:, None] * self.size, (units[:, None] + 1) * self.size


@dataclass(frozen=True)
class blockwise(Blocked):
    """Each query sees its own block of ``size`` and ``side`` blocks before and after it.

    Zaheer et al. 2020 (2007.14062), appendix D; their window of w blocks is ``side = (w - 1) / 2``.
    """

    size: int
    side: int

    def __post_init__(self) -> None:
        whole("size", self.size, 1)
        whole("side", self.side, 0)

    @property
    def unit(self) -> int:
        return self.size

    @property
    def reach(self) -> tuple[int | None, int | None]:
        far = (self.side + 1) * self.size - 1
        return far, far

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        return (i // self.size - j // self.size).abs() <= self.side

    def spans(self, units: Tensor, head: int, layer: int) -> tuple[Tensor, Tensor]:
        units = units[:, None]
        return (units - self.side) * self.size, (units + self.side + 1) * self.size


@dataclass(frozen=True)
class local1d(Blocked):
    """Each query sees its own block and the ``memory`` keys before it, [p block - memory, (p + 1) block).

    Parmar et al. 2018 (1802.05751), section 3.2.1, "1D local attention"; the paper also hides later keys, as
    ``causal()`` does.
    """

    block: int
    memory: int

    def __post_init__(self) -> None:
        whole("block", self.block, 1)
        whole("memory", self.memory, 0)

    @property
    def unit(self) -> int:
        return self.block

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return self.block - 1 + self.memory, self.block - 1

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        begin = i // self.block * self.block
        return (j >= begin - self.memory) & (j < begin + self.block)

    def spans(self, units: Tensor, head: int, layer: int) -> tuple[Tensor, Tensor]:
        begin = units[:, None] * self.block
        return begin - self.memory, begin + self.block


@dataclass(frozen=True)
class random(Pattern):
    """Query i sees ``keys`` different keys drawn uniformly from 0 ... i, or all of them if there are fewer.

    The draws are a hash of (seed, layer, head, row, slot). No random generator is used, and appending tokens does not
    change earlier rows.

    With ``block``, blocks of queries see whole blocks of keys, as in BigBird (Zaheer et al. 2020, 2007.14062, section
    2). Here they are drawn from earlier blocks and the query's own, whose later keys are visible too unless the pattern
    is combined with ``causal()``.
    """

    keys: int
    seed: int = 0
    block: int = 1

    def __post_init__(self) -> None:
        # The time of a draw grows with the square of its number.
        whole("keys", self.keys, 1, 1024)
        whole("seed", self.seed, 0, (1 << 32) - 1)
        whole("block", self.block, 1)

    @property
    def unit(self) -> int:
        return self.block

    @property
    def per_head(self) -> bool:
        return True

    @property
    def grains(self) -> frozenset[int]:
        return frozenset((self.block,))

    @property
    def reach(self) -> tuple[int | None, int | None]:
        return None, self.block - 1

    def see(self, i: Tensor, j: Tensor, head: int, layer: int) -> Tensor:
        drawn = self.draws(i // self.block, head, layer)
        key = j // self.block
        seen = drawn[..., 0] == key
        for slot in range(1, self.keys):
            seen = seen | (drawn[..., slot] == key)
        return seen

    def spans(self, units: Tensor, head: int, layer: int) -> tuple[Tensor, Tensor]:
        drawn = self.draws(units, head, layer)
        return drawn * self.block, torch.where(drawn < 0, drawn, drawn + 1) * self.block

    def draws(self, rows: Tensor, head: int, layer: int) -> Tensor:
        """Draw keys for rows: (...,) -> (..., keys) int64, different numbers of 0 ... row; -1 if there are no more."""
        rows = rows.long()
        state = _mix(_mix(constant((self.seed,), torch.int64, rows.device)[0]) + layer)
        state = _mix(_mix(state + head) + rows)
        drawn: list[Tensor] = []
        for slot in range(self.keys):
            # Floyd's sampling without replacement: a repeated number is replaced by the largest number allowed.
            most = rows - self.keys + 1 + slot
            draw = _mix(state + slot) * (most + 1) >> 32
            for before in drawn:
                draw = torch.where(draw == before, most, draw)
            drawn.append(torch.where(most < 0, -1, draw))
        return torch.stack(drawn, -1)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit hash: the finalizer of Appleby's MurmurHash3, after an addition so that 0 does not map to 0."""
    x = (x + 0x9E3779B9) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
