"""Axial attention: softmax over the rows and columns of an image."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import patterns
from .._utils.spec import known
from ..ops.tensors import merge, split
from ..patterns import Pattern
from ..states import lookback
from ..states.kv_cache import KeyValues
from ..states.window import Window
from .base import Attention, TokenArguments


class AxialState(NamedTuple):
    """The state of ``shifted``: the pixels so far, and the outputs of the column attention for the row above."""

    lines: KeyValues
    above: Window  # keys of the column outputs, and the outputs themselves, of 2C pixels
    queries: Tensor  # (B,H,C,D), of the last C column outputs, oldest first


class Axial(Attention[Window | KeyValues | AxialState]):
    r"""Each pixel of an image in raster order sees its own column and row.

    Pixel i is in row $\lfloor i / C \rfloor$ and column $i \bmod C$. The last row may be incomplete.

    ``width``: C, the number of pixels per row. ``kind``: ``sequential``, a softmax over the column in even layers and
    over the row in odd layers, as in the paper; ``summed``, the sum of both, in which the pixel itself counts twice;
    ``cross``, one softmax over both lines; or ``shifted``, the sum of the row and of what the row above reads of all
    columns, for causal models only.

    A causal layer sees the earlier pixels of these lines. Two causal layers of the first three kinds reach only the
    pixels above and to the left. ``shifted`` reaches all earlier pixels in one layer, like the paper's autoregressive
    model. Its outer decoder is a softmax over the column so far, with output h, then one over whole rows of h. The
    result is shifted down by one row: pixel (r, c) gets that of (r - 1, c), and the first row gets none. Its inner
    decoder is a softmax over the row so far. Both are added, where the paper stacks layers of each. Columns and rows
    share the projections of x; ``above_query`` and ``above_key`` project h, and the values are h itself, per head.

    ``record`` of ``shifted`` gets one matrix over all earlier pixels: row plus composed column and row above. With a
    state the matrix covers the keys read in this call; ``carried`` (B,H,N,2C) holds the weights on h of earlier calls.

    The state of layers that see rows only is a ring of C keys and values; other layers keep all keys and values.
    ``shifted`` also keeps a ring of 2C keys and values of h, and C queries. Time is $N^{1.5} D$ for square images.

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
        self.states = (AxialState,) if kind == "shifted" else lookback.STATES
        column, row = patterns.columns(width), patterns.rows(width)
        match kind:
            case "sequential":
                lines = row if layer % 2 else column
            case "cross":
                lines = column | row
            case _:
                lines = patterns.by_head(column, row)
        self.lines: Pattern = lines & patterns.causal() if causal else lines
        self.key_pattern = self.lines
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if kind == "shifted":
            if not causal:
                raise ValueError(
                    "kind='shifted' reads only the rows above and needs causal=True; "
                    "a bidirectional model sees every pixel with two layers of kind='sequential'"
                )
            self.directions = ("causal",)
            # All pixels of the row above come earlier, so that the result is causal.
            self.above: Pattern = (patterns.local1d(width, width) - row) & patterns.causal()
            self.key_pattern = patterns.causal()
            self.above_query, self.above_key = (nn.Linear(dim, dim) for _ in range(2))

    def start(self, batch: int, capacity: int) -> Window | KeyValues | AxialState:
        size, like = self.dim // self.heads, self.weight_like
        lines = lookback.empty(self.lines, batch, self.heads, capacity, size, like)
        if self.kind != "shifted":
            return lines
        above = cast(Window, lookback.empty(self.above, batch, self.heads, 0, size, like))
        queries = like.new_zeros(batch, self.heads, self.width, size)
        return AxialState(cast(KeyValues, lines), above, queries)

    def attend(
        self,
        x: Tensor,
        state: Window | KeyValues | AxialState | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, Window | KeyValues | AxialState | None]:
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        given: TokenArguments = {"mask": mask, "segments": segments, "donate": donate}
        if self.kind == "shifted":
            o, state = self._shifted(q, k, v, cast(AxialState | None, state), record, given)
            return self.out(merge(o)), state
        state = cast(Window | KeyValues | None, state)
        if self.kind == "summed":
            o, state = lookback.attend(_twice(q), k, v, state, self.lines, record=record, **given)
            o = o.unflatten(1, (-1, 2)).sum(2)
            if record is not None:
                pairs, matrix = (record[name].unflatten(1, (-1, 2)) for name in ("mask", "matrix"))
                record.update(mask=pairs.any(2), matrix=matrix.sum(2))
                del record["lse"]  # each of the two softmaxes has its own
        else:
            o, state = lookback.attend(q, k, v, state, self.lines, record=record, **given)
        return self.out(merge(o)), state

    def _shifted(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: AxialState | None,
        record: dict[str, Any] | None,
        given: TokenArguments,
    ) -> tuple[Tensor, AxialState | None]:
        """The output of the heads (B,H,N,D), and the state after these tokens."""
        lines, above, queries = (None, None, None) if state is None else state
        past: dict[str, Any] | None = None if record is None else {}
        pairs: dict[str, Any] | None = None if record is None else {}
        step: dict[str, Any] | None = None if record is None else {}
        if record is not None:
            # The mask of all earlier pixels, in the layout of the lines.
            lookback.attend(
                q, k, v, lines, patterns.causal(), record=past, mask=given.get("mask"), segments=given.get("segments")
            )
        o, lines = lookback.attend(_twice(q), k, v, lines, self.lines, record=pairs, **given)
        h, row = o.unflatten(1, (-1, 2)).unbind(2)
        query, key = (split(part(merge(h)), self.heads) for part in (self.above_query, self.above_key))
        query, queries = _delayed(query, queries, self.width, given.get("mask"))
        upper, above = lookback.attend(query, key, h, above, self.above, record=step, **given)
        if record is not None and past is not None and pairs is not None and step is not None:
            _fill(record, past, pairs, step, 0 if state is None else state.above.keys.shape[2])
        return row + upper, None if state is None else AxialState(lines, above, queries)


def _fill(record: dict[str, Any], past: dict[str, Any], pairs: dict[str, Any], step: dict[str, Any], old: int) -> None:
    """Fill the record of ``shifted`` from those of its parts; ``step`` begins with ``old`` columns of the state."""
    column, row = pairs["matrix"].unflatten(1, (-1, 2)).unbind(2)
    # A single token with a state overwrites an old column, and is not in the row above itself.
    carried, new = step["matrix"].split([old, step["matrix"].shape[-1] - old], -1)
    record.update(mask=past["mask"], matrix=row + new @ column[:, :, : new.shape[-1]])
    if old:
        record["carried"] = carried


def _twice(q: Tensor) -> Tensor:
    """Duplicate each head: one copy for the column, one for the row."""
    return q.repeat_interleave(2, 1)


def _delayed(q: Tensor, before: Tensor | None, by: int, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return for each token the query of the real token ``by`` places earlier, and the last ``by`` queries.

    q (B,H,N,D), before (B,H,by,D), mask (B,N). The first ``by`` tokens of a sequence get arbitrary values.
    """
    before = q.new_zeros(*q.shape[:2], by, q.shape[-1]) if before is None else before
    if mask is None:
        both = torch.cat([before, q.to(before.dtype)], 2)
        # A copy: a view would keep the memory of all tokens.
        return both[:, :, : q.shape[2]].to(q.dtype), both[:, :, q.shape[2] :].clone()
    # Real tokens first, in their order.
    order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
    both = torch.cat([before, _pick(q, order).to(before.dtype)], 2)
    end = mask.sum(1, keepdim=True) + torch.arange(by, device=q.device)
    return _pick(both, (mask.cumsum(1) - 1).clamp(min=0)).to(q.dtype), _pick(both, end)


def _pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Gather tokens of each row by index: x (B,H,N,D), tokens (B,M) -> (B,H,M,D)."""
    return x.gather(2, tokens[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))
