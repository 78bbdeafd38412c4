"""BP-Transformer: softmax attention over a binary tree, in spans that grow with the distance."""

import torch
from torch import Tensor, nn

from ..ops.softmax import tree
from ..ops.tensors import merge, positions, split, upcast_half
from .base import Attention


class BinaryPartition(Attention[tree.Nodes]):
    """Each token reads near tokens one by one, and farther ones in growing spans of a binary tree.

    A node u is span m of level l. Positions count real tokens. A token reads itself and, on each level and side, ``k``
    nodes, which start where the level below ends. These nodes $T_i$ cover every token exactly once. The causal form
    reads the left side only. In the bidirectional form the last spans may be incomplete, so that this holds for any
    length.

    The key and value of a node are the weighted means of those of its tokens. The weights $a_u$ are a softmax with a
    learned query $g_h$ per head. A vector r is learned for each kind of edge: level, side and place among the k. All
    computations are in float32 or better.

    ``k``: the number of nodes per level and side. ``levels``: the number of levels with separate edge vectors; higher
    levels share those of the last one.

    The paper updates the nodes from layer to layer; here each layer computes them from its tokens, like the first layer
    of the paper. The state is the last 2 k nodes of each of 24 levels, and a step costs O(k log N).

    Nodes are gathered in torch level by level, and their gradients scattered. Training is slower than fused softmax
    even at 16384 tokens.

    Source: Ye et al. 2019, sections 3.1-3.3. Raises ValueError for k < 1 or levels < 1, and for more
    than $2^{24}$ tokens with a state.
    """

    name, paper, cost = "bp", "1911.04070", "N log N D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{u \in T_i} p_{iu} \bar v_u, \quad "
        r"p_{iu} = \mathrm{softmax}_{u \in T_i} \frac{q_i \cdot (\bar k_u + r_{iu})}{\sqrt D}",
        r"\bar k_u = \sum_{j \in u} a_{uj} k_j, \quad \bar v_u = \sum_{j \in u} a_{uj} v_j, \quad "
        r"a_{uj} = \mathrm{softmax}_{j \in u} \frac{g_h \cdot k_j}{\sqrt D}",
        r"u = \lbrace m 2^l, \ldots, (m + 1) 2^l - 1 \rbrace",
    )
    citation = (
        "Ye, Zihao and Guo, Qipeng and Gan, Quan and Qiu, Xipeng and Zhang, Zheng",
        "BP-Transformer: Modeling Long-Range Context via Binary Partitioning",
        2019,
    )
    examples = ("bp(k=1, levels=2)", "bp(k=2)")
    states = (tree.Nodes,)
    no_decay = ("edges",)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, k: int = 4, levels: int = 6):
        super().__init__(dim, heads, causal=causal)
        for option, value in (("k", k), ("levels", levels)):
            if value < 1:
                raise ValueError(f"{option}={value} must be at least 1")
        self.k, self.levels = k, levels
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        size = dim // heads
        self.pool = nn.Parameter(torch.randn(heads, size))
        self.edges = nn.Parameter(torch.randn(1 + levels * k * (1 if causal else 2), size) * size**-0.5)

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> tree.Nodes:
        return tree.empty(batch, self.heads, self.k, self.dim // self.heads, self.weight_like)

    def attend(
        self,
        x: Tensor,
        state: tree.Nodes | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, tree.Nodes | None]:
        if segments is not None and x.numel():
            return self._packed(x, state, mask, segments, donate)
        order = None
        if mask is not None:
            # Real tokens first, in their order.
            order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
            x = x.gather(1, order[..., None].expand_as(x))
        _, lengths = positions(x, mask=mask)
        q, k, v = (split(upcast_half(part(x)), self.heads) for part in (self.query, self.key, self.value))
        scale = q.shape[-1] ** -0.5
        pool = (k * upcast_half(self.pool)[:, None]).sum(-1) * scale
        with torch.autocast(x.device.type, enabled=False):
            edges = q @ upcast_half(self.edges).mT * scale
        o, after = tree.attend(q, k, v, pool, edges, self.k, lengths, state, causal=self.causal)
        y = self.out(merge(o).to(x.dtype))
        if order is not None:
            y = torch.zeros_like(y).scatter(1, order[..., None].expand_as(y), y)
        return y, None if after is None or state is None else _written(state, after, donate)

    def _packed(
        self, x: Tensor, state: tree.Nodes | None, mask: Tensor | None, segments: Tensor, donate: bool
    ) -> tuple[Tensor, tree.Nodes | None]:
        """``attend`` with each packed sequence in a separate row."""
        tokens = torch.arange(x.shape[1], device=x.device).expand_as(segments)
        border = torch.ones_like(segments, dtype=torch.bool)
        border[:, 1:] = segments[:, 1:] != segments[:, :-1]
        row = border.flatten().cumsum(0).view_as(segments) - 1  # (B,N), counted over the whole batch
        place = tokens - torch.where(border, tokens, 0).cummax(1).values
        rows, longest = int(row[-1, -1]) + 1, int(place.max()) + 1
        real = torch.zeros(rows, longest, dtype=torch.bool, device=x.device)
        real[row, place] = True if mask is None else mask
        before = None
        if state is not None:
            fresh = self.start(rows, 0)
            before = tree.Nodes(*(new.index_copy(0, row[:, 0], old) for new, old in zip(fresh, state, strict=True)))
        apart = x.new_zeros(rows, longest, self.dim).index_put((row, place), x)
        y, after = self.attend(apart, before, mask=real)
        if state is not None and after is not None:
            after = _written(state, tree.Nodes(*(part[row[:, -1]] for part in after)), donate)
        return y[row, place], after


def _written(state: tree.Nodes, after: tree.Nodes, donate: bool) -> tree.Nodes:
    """The new nodes, written into the memory of a donated state."""
    if not donate or torch.compiler.is_compiling():
        return after
    return tree.Nodes(*(old.copy_(new) for old, new in zip(state, after, strict=True)))
