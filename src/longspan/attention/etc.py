"""ETC: local attention of a long input, with learned global tokens that connect distant tokens."""

from typing import Any, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import sparse
from ..ops.tensors import merge, split, upcast_half
from ..patterns import Pattern, band
from ..patterns import globals as reaching
from .base import Attention


class Etc(Attention[Never]):
    r"""Each token sees a window and a few learned global tokens, which see all tokens.

    A global token attends to all global and all long tokens. A long token attends to all global tokens, and to the long
    tokens within a radius; positions count real tokens. Each pair has a label with a learned vector r. The label is the
    clipped distance j - i if both tokens are long or both are global, and one common label otherwise.

    ``globals``: G, the number of global tokens, which are not part of the input. ``radius``: $\rho$, the largest
    distance between two long tokens. ``clip``: c, the largest distance with a separate label.

    A layer adds learned vectors to the global tokens g of the layer below (``carry``, (B,globals,dim), zeros in the
    first layer). It returns norm(g + out(o)) as the next carry, where o is the output of the global tokens and the norm
    has no weights. Global and long tokens share their projections. Long tokens read the updated global tokens in the
    next layer; a single layer connects long tokens within ``radius`` only.

    Source: Ainslie et al. 2020, section 3, with one label for all pairs of a global and a long token. Raises ValueError
    for globals < 1, radius < 0, clip < 0 and for a carry of another shape.
    """

    name, paper, cost = "etc", "2004.08483", "N W D"
    family = "sparse"
    equations = (
        r"o_i = \sum_{j \in P_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in P_i} \frac{q_i \cdot (k_j + r_{l(i, j)})}{\sqrt D}",
        r"i \text{ long:} \quad P_i = G \cup \lbrace j : \lvert i - j \rvert \le \rho \rbrace, \quad "
        r"i \text{ global:} \quad \text{all } j",
        r"l(i, j) = \min(\max(j - i, -c), c), \quad \text{or } c + 1 \text{ for a pair of both kinds}",
    )
    citation = (
        "Ainslie, Joshua and Ontanon, Santiago and Alberti, Chris and Cvicek, Vaclav and Fisher, Zachary and "
        "Pham, Philip and Ravula, Anirudh and Sanghai, Sumit and Wang, Qifan and Yang, Li",
        "ETC: Encoding Long and Structured Inputs in Transformers",
        2020,
    )
    examples = ("etc(globals=3, radius=5, clip=2)",)
    directions, has_layer_carry = ("bidirectional",), True
    no_decay = ("tokens", "labels")

    def __init__(
        self, dim: int, heads: int, *, causal: bool = False, globals: int = 32, radius: int = 84, clip: int = 12
    ):
        super().__init__(dim, heads, causal=causal)
        for option, value, least in (("globals", globals, 1), ("radius", radius, 0), ("clip", clip, 0)):
            if value < least:
                raise ValueError(f"{option}={value} must be at least {least}")
        self.globals, self.radius, self.clip, self.num_prefix_tokens = globals, radius, clip, globals
        self.key_pattern: Pattern = reaching(globals) | band(radius, right=radius)  # pyright: ignore[reportIncompatibleVariableOverride] never None here
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.tokens = nn.Parameter(torch.randn(globals, dim))
        self.labels = nn.Parameter(torch.randn(2 * clip + 2, dim) * (dim // heads) ** -0.5)

    @property
    def positional(self) -> bool:
        return True

    def init_carry(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return zeros (B,globals,dim)."""
        return x.new_zeros(len(x), self.globals, self.dim)

    def attend(
        self, x: Tensor, state: None, *, mask: Tensor | None = None, carry: Any = None
    ) -> tuple[Tensor, None] | tuple[Tensor, None, Tensor]:
        first = self.init_carry(x, mask)
        if carry is not None and (not isinstance(carry, Tensor) or carry.shape != first.shape):
            found = tuple(carry.shape) if isinstance(carry, Tensor) else type(carry).__name__
            raise ValueError(f"carry must be the global tokens {tuple(first.shape)} of the layer below, not {found}")
        g = (first if carry is None else carry) + self.tokens
        both = torch.cat([g.to(x.dtype), x], 1)
        if mask is not None or torch.compiler.is_compiling():
            mask = x.new_ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
            mask = F.pad(mask, (self.globals, 0), value=True)
        q, k, v = (split(part(both), self.heads) for part in (self.query, self.key, self.value))
        labels = self.labels.unflatten(-1, (self.heads, -1)).transpose(0, 1)
        o = sparse.attend(q, k, v, self.key_pattern, mask=mask, bias=_Labels(labels, self.globals, self.clip))
        y = self.out(merge(o))
        if carry is None:
            return y[:, self.globals :], state
        following = F.layer_norm(g + y[:, : self.globals], (self.dim,))
        return y[:, self.globals :], state, following


class _Labels:
    """q_i.r / sqrt D with the vector r, labels (H,2 clip + 2,D), of each pair's label."""

    def __init__(self, labels: Tensor, count: int, clip: int):
        self.labels, self.count, self.clip = labels, count, clip

    def score(self, q_tile: Tensor, i: Tensor, j: Tensor) -> Tensor:
        products = (
            upcast_half(q_tile @ self.labels.to(q_tile.dtype).mT) * q_tile.shape[-1] ** -0.5
        )  # (B,H,n,2 clip + 2)
        i, j = i[:, None], j[None]
        label = torch.where((i < self.count) == (j < self.count), (j - i).clamp(-self.clip, self.clip), self.clip + 1)
        return products.gather(-1, (label + self.clip).expand(*products.shape[:2], -1, -1))
