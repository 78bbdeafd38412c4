"""The tokens of one span at a time, in buffers that all spans share."""

import contextlib
import math
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from ..buffers import Buffers, fresh_like
from ..segments import borders_of
from .features import SLOPES, WRITERS

# Bytes for the buffers of a span, about the share of a core in the last-level cache. Many or wide heads reduce the
# tokens or rows of a span.
BUDGET = 12 * 2**20
# Numbers of the states of a chunk, per thread, from which one sum per chunk is faster than a product for all chunks.
SUM = 2**13


def narrow_products() -> bool:
    """Return whether torch multiplies by MKL without AVX-512, which MKL uses on processors of Intel only."""
    if not torch.backends.mkl.is_available():
        return False
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        # The lines of one processor; others are alike.
        text = "".join(takewhile(str.strip, file))
        return "GenuineIntel" not in text or "avx512f" not in text
    return False


def groups(batch: int, rows: int) -> list[slice]:
    """Split the rows of a batch into groups of up to ``rows``, at least one."""
    rows = max(rows, 1)
    return [slice(first, min(first + rows, batch)) for first in range(0, batch, rows)]


def outputs(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate o (B,H,N,E), the last state (B,H,D,E+1) and the denominators (B,H,N,1).

    o has the layout of v if N = M; else the heads of a token are adjacent, so that merging them is a view.
    """
    (batch, heads, n, d), e, wide = q.shape, v.shape[-1], torch.promote_types(q.dtype, torch.float32)
    o = fresh_like(v) if v.shape[2] == n else v.new_empty(batch, n, heads, e).transpose(1, 2)
    return o, q.new_empty(batch, heads, d, e + 1, dtype=wide), q.new_empty(batch, heads, n, 1, dtype=wide)


class _Borders(NamedTuple):
    """``segments.Borders`` with the chunks first, and how the states of a span depend on each other."""

    same: Tensor  # (G,B,1,C,C)
    first: Tensor  # (G,B,1,C,1)
    last: Tensor  # (G,B,1,C,1)
    chain: Tensor  # (B,G+1,G+1) 1 if the sum added at j is still in the state at i


def _borders(segments: Tensor, start: int, chunks: int, width: int, like: Tensor) -> _Borders:
    found = borders_of(segments, start, chunks, width, like)
    stop = start + chunks * width
    ends = torch.cat(
        [segments[:, max(start - 1, 0), None], segments[:, start + width - 1 : stop : width]], 1
    )  # (B,G+1)
    chain = (ends[:, :, None] == ends[:, None, :]).tril().to(like)
    same, first, last = (t.movedim(2, 0) for t in found[:3])
    return _Borders(same, first, last, chain)


class Rows:
    """A group of batch rows that is processed together, span by span.

    ``spans`` are (start, chunks, tokens per chunk), ``part`` selects the rows; ``mask`` and ``segments`` are (B,N) or
    None. ``tensors`` (B,H,N,.) by name are q and k before the feature map, v, and others with one entry per token.
    ``gpu`` chooses the operations that are fast there. ``operands`` is the dtype of v if products of such numbers are
    faster than those of the buffers: the other operands of products are then split into two such numbers.
    Letters as in ``causal.py``; ``heads`` is B H of these rows.
    """

    def __init__(
        self,
        buffers: Buffers,
        feature_map: str,
        spans: list[tuple[int, int, int]],
        part: slice,
        mask: Tensor | None,
        segments: Tensor | None,
        tensors: dict[str, Tensor],
        *,
        gpu: bool = False,
        operands: torch.dtype | None = None,
    ):
        self.buffers, self.feature_map, self.masked = buffers, feature_map, mask is not None
        self.gpu = gpu
        self.narrowed = None if operands is None else Buffers(buffers.like.new_empty(0, dtype=operands))
        self.segments = None if segments is None else segments[part]
        self.borders: _Borders | None = None
        if mask is not None:
            tensors = {**tensors, "hidden": ~mask[:, None, :, None]}
        tensors = {name: x[part] for name, x in tensors.items()}
        self.lead = tuple(next(iter(tensors.values())).shape[:2])
        self.heads = math.prod(self.lead)
        self.sizes = {name: x.shape[-1] for name, x in tensors.items()}
        # All chunks have the same width, except the last, which may be narrower.
        self.first = {width: start for start, _, width in reversed(spans)}
        # All chunks of one width, as views (chunks,B,H,C,.)
        self.views = {
            (name, width): x[:, :, start:].unfold(2, width, width).permute(2, 0, 1, 4, 3)
            for name, x in tensors.items()
            for width, start in self.first.items()
        }

    def enter(self, start: int, chunks: int, width: int) -> None:
        """Move to a span."""
        self.chunks, self.width, self.chunk = chunks, width, (start - self.first[width]) // width
        if self.segments is not None:
            self.borders = _borders(self.segments, start, chunks, width, self.buffers.like)

    def features(self, name: str) -> Tensor:
        """Return phi of the span's q or k, (R,C,D); 0 for masked keys."""
        x, features = self.near(name), self.tokens(f"span {name}", self.sizes[name])
        out, spare = self.wide(features), self.wide(self.tokens("spare", self.sizes[name]))
        # Half precision is converted before the map.
        WRITERS[self.feature_map](x if x.dtype == out.dtype else out.copy_(x), out, spare)
        # phi(0) is not 0, so padding is removed after the feature map.
        return self._hide(features) if name == "k" else features

    def values(self) -> Tensor:
        """Return the span's v, (R,C,E), in the narrow dtype if there is one; 0 for masked keys."""
        values = (self.narrowed or self.buffers)("span v", self.chunks * self.heads, self.width, self.sizes["v"])
        self.wide(values).copy_(self.near("v"))
        return self._hide(values)

    def _hide(self, x: Tensor) -> Tensor:
        if self.masked:
            self.wide(x).masked_fill_(self.at("hidden"), 0.0)
        return x

    def at(self, name: str) -> Tensor:
        """Return the span's part of a tensor as a view (G,B,H,C,.)."""
        return self.views[name, self.width].narrow(0, self.chunk, self.chunks)

    def near(self, name: str) -> Tensor:
        """Return ``at``, copied if the heads of a token are adjacent, until the next call.

        Head by head, a processor waits for memory; a copy in the order of the memory does not, and stays in the cache.
        """
        x = self.at(name)
        if self.gpu or x.dtype != self.buffers.like.dtype or not 0 < x.stride(2) < x.stride(3):
            return x
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        copy = self.buffers("near", *(x.shape[i] for i in order))
        return copy.permute(sorted(range(x.dim()), key=order.__getitem__)).copy_(x)

    def output_gradients(self) -> tuple[Tensor, Tensor]:
        """Return G (R,C,E) and w (R,C,1), the gradients of numerator and denominator.

        With g = dL/do: G = g / denominator and w = -(g . o) / denominator = -(G . o).
        """
        size = self.sizes["o"]
        above, products = self.tokens("grad", size), self.tokens("dv", size)
        torch.div(self.near("grad"), self.at("below"), out=self.wide(above))
        torch.mul(self.wide(above), self.near("o"), out=self.wide(products))
        return above, torch.sum(products, -1, keepdim=True, out=self.tokens("below", 1)).neg_()

    def store(self, name: str, change: Tensor, features: Tensor) -> None:
        """Store the gradient of q or k, given that of their features (R,C,D), which are overwritten."""
        slope = SLOPES[self.feature_map](self.at(name), self.wide(features))
        torch.mul(self.wide(change), slope, out=self.at(f"d{name}"))

    def tokens(self, name: str, size: int) -> Tensor:
        """Return a buffer (R,C,size)."""
        return self.buffers(name, self.chunks * self.heads, self.width, size)

    def product(self, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Write the products of matrices (.,I,J) and (.,J,K) to ``out`` (.,I,K)."""
        return torch.bmm(a, b, out=out) if self.narrowed is None else self._split_product(a, b, out, add=False)

    def add_product(self, to: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Add ``product`` to ``to``, in place."""
        return to.baddbmm_(a, b) if self.narrowed is None else self._split_product(a, b, to, add=True)

    def _split_product(self, a: Tensor, b: Tensor, out: Tensor, *, add: bool) -> Tensor:
        """``product`` from products of narrow numbers, summed in the dtype of ``out``: a_1 b_1 + a_1 b_2 + a_2 b_1."""
        for i, x in enumerate(self._halves(a)):
            for y in self._halves(b)[: 2 - i]:
                if not a.is_cuda and not b.is_cuda:
                    x, y = x.to(out.dtype), y.to(out.dtype)
                    out = out.baddbmm_(x, y) if add else torch.bmm(x, y, out=out)
                elif add:
                    torch.ops.aten.baddbmm.dtype_out(out, x, y, out.dtype, out=out)
                else:
                    torch.ops.aten.bmm.dtype_out(x, y, out.dtype, out=out)
                add = True
        return out

    def _halves(self, x: Tensor) -> list[Tensor]:
        """Return narrow numbers whose sum is x, up to the square of their precision."""
        assert self.narrowed is not None
        narrow = self.narrowed.like.dtype
        if x.dtype == narrow:
            return [x]
        first = x.to(narrow)
        return [first, (x - first).to(narrow)]

    def add_dots(self, to: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """Add to (R,C,1) the dot products of x (R,C,D) and one row per matrix (R,1,D), in place."""
        if self.gpu:
            # A product there may be less precise than float32.
            return to.add_(torch.mul(x, rows, out=self.tokens("spare", x.shape[-1])).sum(-1, keepdim=True))
        return to.baddbmm_(x, rows.mT)

    def states(self, name: str, *shape: int) -> Tensor:
        """Return a buffer ((G+1) B H, ...) for the states before each chunk and after the last."""
        return self.buffers(name, (self.chunks + 1) * self.heads, *shape)

    def wide(self, x: Tensor) -> Tensor:
        """View (R,C,.) as (G,B,H,C,.)."""
        return x.view(self.chunks, *self.lead, *x.shape[1:])

    def causal(self, products: Tensor) -> Tensor:
        """Zero the products (R,C,C) of queries and keys that must not meet; in place."""
        return self._times(products.tril_(), self.borders and self.borders.same, products)

    def written(self, keys: Tensor) -> Tensor:
        """Return the keys (R,C,D) that are in the state after their chunk; the others are 0."""
        return self._times(keys, self.borders and self.borders.last, self.tokens("spare", keys.shape[-1]))

    def read(self, queries: Tensor) -> Tensor:
        """Return the queries (R,C,D) that read the state before their chunk; the others are 0."""
        return self._times(queries, self.borders and self.borders.first, self.tokens("spare", queries.shape[-1]))

    def times_first(self, x: Tensor) -> Tensor:
        """Zero (R,C,.) of queries that do not read the state before their chunk; in place."""
        return self._times(x, self.borders and self.borders.first, x)

    def times_last(self, x: Tensor) -> Tensor:
        """Zero (R,C,.) of keys that are not in the state after their chunk; in place."""
        return self._times(x, self.borders and self.borders.last, x)

    def _times(self, x: Tensor, border: Tensor | None, out: Tensor) -> Tensor:
        if border is None:
            return x
        torch.mul(self.wide(x), border, out=self.wide(out))
        return out

    def running(self, parts: Tensor, name: str, *, reverse: bool = False) -> Tensor:
        """Return running sums of parts ((G+1) B H, ...), from the end with ``reverse``; parts may be overwritten."""
        if self.borders is None and self.gpu:
            flat = parts.view(self.chunks + 1, -1)
            if reverse:
                flat.copy_(flat.flip(0).cumsum_(0).flip(0))
            else:
                flat.cumsum_(0)
            return parts
        flat = parts.view(self.chunks + 1, -1)
        if self.borders is None and flat.shape[1] >= SUM * torch.get_num_threads():
            states = flat.unbind()
            for before, after in pairwise(reversed(states) if reverse else states):
                after.add_(before)
            return parts
        sums = self.states(f"running {name}", *parts.shape[1:])
        out = sums.view(self.chunks + 1, -1)
        if self.borders is not None:
            chain = self.borders.chain.mT if reverse else self.borders.chain
            rows = (self.chunks + 1, len(chain), -1)
            out.view(rows).copy_((chain @ flat.view(rows).transpose(0, 1)).transpose(0, 1))
        else:
            # A product with a triangle of ones is much faster than cumsum here, and than one small sum per chunk.
            ones = torch.ones(len(flat), len(flat), dtype=flat.dtype, device=flat.device).tril_()
            torch.mm(ones.mT if reverse else ones, flat, out=out)
        return sums
