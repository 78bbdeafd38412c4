"""Softmax attention over an image's rows and columns: two lines of pixels in place of all."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import patterns
from .._utils.spec import known
from ..ops.tensors import merge, split
from ..patterns import Pattern
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from .base import Attention


class AxialState(NamedTuple):
    """Of ``shifted``: the pixels so far, and what the row above a pixel needs of the columns' reads."""

    lines: KeyValues
    above: Window  # keys of reads, and the reads, of 2C pixels
    queries: Tensor  # (B,H,C,D), of the last C reads, the oldest first


class Axial(Attention):
    r"""Each pixel of an image in raster order sees its own column and row, one after the other or both at once.

    Pixel i is in row $\lfloor i / C \rfloor$ and column $i \bmod C$. ``width``: C; the last row may be cut short.
    ``kind``: ``sequential`` sees the column in even layers and the row in odd ones, as the paper does; ``summed`` adds
    up a softmax over the column and one over the row, so that the pixel itself counts in both; ``cross`` is one softmax
    over both lines; ``shifted``, for causal models alone, adds up the row and what the row above has read of all
    columns.

    A causal one sees what came before in these lines. Two causal steps do not reach all of the past, but only pixels
    above and left of their own. ``shifted`` reaches it in one layer, in the way of the paper's autoregressive model.
    The outer decoder is a softmax over the column so far, h, and then one over whole rows of h, whose outcome is
    shifted down by one row: pixel (r, c) gets that of (r - 1, c), and the first row nothing. The inner decoder is a
    softmax over the row so far. Both are added up; the paper stacks layers of each. Columns and rows share the
    projections of x; ``above_query`` and ``above_key`` project h, and its values are h itself, head by head.

    ``record`` of ``shifted``: one matrix, row + above column, over all of the past. With a state it is that of the keys
    that this call's tokens have read; ``carried`` (B,H,N,2C) are their weights on older h, whose own are not kept.

    The state is a ring of C keys and values in the layers of rows alone, else all of them; ``shifted`` keeps rings of
    2C keys and values and of C queries of h besides. Time is $N^{1.5} D$ for square images.

    Source: Ho et al. 2019, section 2.2, and for ``shifted`` its section on the autoregressive model. The sum is
    lucidrains/axial-attention's, the cross that of Huang et al. 2018 (1811.11721), with the pixel itself counted once.
    Raises ValueError for an unknown kind, a width below 1 and a bidirectional ``shifted``.
    """

    name, paper, cost = "axial", "1912.12180", "N^2 D / C"
    family = "sparse"
    equations = (
        r"C_i = \lbrace j \in \mathcal{A}_i : j \bmod C = i \bmod C \rbrace, \quad "
        r"R_i = \lbrace j \in \mathcal{A}_i : \lfloor j / C \rfloor = \lfloor i / C \rfloor \rbrace",
        r"\mathrm{read}_i(P) = \sum_{j \in P} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in P} \frac{q_i \cdot k_j}{\sqrt D}",
        r"\text{sequential:} \quad o_i = \mathrm{read}_i(C_i) \text{ or } \mathrm{read}_i(R_i), \quad "
        r"\text{summed:} \quad \mathrm{read}_i(C_i) + \mathrm{read}_i(R_i), \quad "
        r"\text{cross:} \quad \mathrm{read}_i(C_i \cup R_i)",
        r"\text{shifted:} \quad o_i = \mathrm{read}_i(R_i) + \sum_{j \in U_i} p_{ij}^\prime h_j, \quad "
        r"h_j = \mathrm{read}_j(C_j), \quad "
        r"p_{ij}^\prime = \mathrm{softmax}_{j \in U_i} \frac{q_{i-C}^\prime \cdot k_j^\prime}{\sqrt D}",
        r"q_i^\prime = W_q^\prime h_i, \quad k_j^\prime = W_k^\prime h_j, \quad "
        r"U_i = \lbrace j : \lfloor j / C \rfloor = \lfloor i / C \rfloor - 1 \rbrace",
    )
    citation = (
        "Ho, Jonathan and Kalchbrenner, Nal and Weissenborn, Dirk and Salimans, Tim",
        "Axial Attention in Multidimensional Transformers",
        2019,
    )
    examples = (
        "axial(width=7)",
        "axial(width=4, kind='summed')",
        "axial(width=7, kind='cross')",
        "axial(width=7, kind='shifted')",
    )
    states = (*lookback.STATES, AxialState)

    def __init__(
        self, dim: int, heads: int, *, causal: bool = True, layer: int = 0, width: int = 64, kind: str = "sequential"
    ):
        super().__init__(dim, heads, causal=causal)
        known(kind, dict.fromkeys(("sequential", "summed", "cross", "shifted")), "kind of axial attention")
        self.layer, self.width, self.kind = layer, width, kind
        self.states = (AxialState,) if kind == "shifted" else lookback.STATES  # type: ignore[misc]
        column, row = patterns.columns(width), patterns.rows(width)
        match kind:
            case "sequential":
                lines = row if layer % 2 else column
            case "cross":
                lines = column | row
            case _:
                lines = patterns.by_head(column, row)
        self.lines: Pattern = lines & patterns.causal() if causal else lines
        self.key_pattern: Pattern = self.lines
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if kind == "shifted":
            if not causal:
                raise ValueError(
                    "kind='shifted' reads the rows above its own, an order that no bidirectional model has; "
                    "that reaches every pixel by two layers of kind='sequential'"
                )
            self.directions = ("causal",)
            # Every pixel of the row above came before, so this is the order of a causal model.
            self.above: Pattern = (patterns.local1d(width, width) - row) & patterns.causal()
            self.key_pattern = patterns.causal()
            self.above_query, self.above_key = (nn.Linear(dim, dim) for _ in range(2))

    def start(self, batch, capacity):
        size, like = self.dim // self.heads, self.weight_like
        lines = lookback.empty(self.lines, batch, self.heads, capacity, size, like)
        if self.kind != "shifted":
            return lines
        above = lookback.empty(self.above, batch, self.heads, 0, size, like)
        return AxialState(lines, above, like.new_zeros(batch, self.heads, self.width, size))  # type: ignore[arg-type]

    def attend(self, x, state, *, mask=None, segments=None, record=None, donate=False):
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        given = {"mask": mask, "segments": segments, "donate": donate}
        if self.kind == "shifted":
            o, state = self._shifted(q, k, v, state, record, given)
        elif self.kind == "summed":
            o, state = lookback.attend(_twice(q), k, v, state, self.lines, record=record, **given)
            o = o.unflatten(1, (-1, 2)).sum(2)
            if record is not None:
                pairs, matrix = (record[name].unflatten(1, (-1, 2)) for name in ("mask", "matrix"))
                record.update(mask=pairs.any(2), matrix=matrix.sum(2))
                del record["lse"]  # there are two
        else:
            o, state = lookback.attend(q, k, v, state, self.lines, record=record, **given)
        return self.out(merge(o)), state

    def _shifted(self, q, k, v, state, record, given):
        """What the heads read (B,H,N,D), and the state after these tokens."""
        lines, above, queries = (None, None, None) if state is None else state
        past, pairs, step = (None if record is None else {} for _ in range(3))
        if record is not None:
            # Which keys there are in the past, laid out as those of the lines.
            lookback.attend(q, k, v, lines, patterns.causal(), record=past, **given | {"donate": False})
        o, lines = lookback.attend(_twice(q), k, v, lines, self.lines, record=pairs, **given)
        h, row = o.unflatten(1, (-1, 2)).unbind(2)
        ask, key = (split(part(merge(h)), self.heads) for part in (self.above_query, self.above_key))
        ask, queries = _delayed(ask, queries, self.width, given["mask"])
        upper, above = lookback.attend(ask, key, h, above, self.above, record=step, **given)
        if record is not None:
            _tell(record, past, pairs, step, 0 if state is None else state.above.keys.shape[2])
        return row + upper, None if state is None else AxialState(lines, above, queries)


def _tell(record, past, pairs, step, old):
    """The record of ``shifted`` from those of its parts, of which ``step`` begins with ``old`` places of a state."""
    column, row = pairs["matrix"].unflatten(1, (-1, 2)).unbind(2)
    # A single token with a state takes one of the old places; it is not in the row above its own.
    carried, new = step["matrix"].split([old, step["matrix"].shape[-1] - old], -1)
    record.update(mask=past["mask"], matrix=row + new @ column[:, :, : new.shape[-1]])
    if old:
        record["carried"] = carried


def _twice(q: Tensor) -> Tensor:
    """Every head as two beside each other that share its keys: one for the column, one for the row."""
    return q.repeat_interleave(2, 1)


def _delayed(q: Tensor, before: Tensor | None, by: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """For each real token the query of the one ``by`` real tokens before it, and the last ``by`` of them.

    q (B,H,N,D), before (B,H,by,D), mask (B,N). Where there is none, in a sequence's first tokens, any may come.
    """
    before = q.new_zeros(*q.shape[:2], by, q.shape[-1]) if before is None else before
    if mask is None:
        both = torch.cat([before, q.to(before.dtype)], 2)
        # A copy, since a view would keep all tokens alive.
        return both[:, :, : q.shape[2]].to(q.dtype), both[:, :, q.shape[2] :].clone()
    # Real tokens side by side, in their order; the others after them.
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    both = torch.cat([before, _pick(q, order).to(before.dtype)], 2)
    end = mask.sum(1, keepdim=True) + torch.arange(by, device=q.device)
    return _pick(both, (mask.cumsum(1) - 1).clamp(min=0)).to(q.dtype), _pick(both, end)


def _pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Row by row the tokens of these numbers: x (B,H,N,D), tokens (B,M) -> (B,H,M,D)."""
    return x.gather(2, tokens[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))
