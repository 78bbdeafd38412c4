"""Attention on a ring of tokens around one relay, which connects distant tokens."""

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.backends import select_backend
from ..ops.tensors import merge, positions, split, upcast_half
from .base import Attention

BOUNDARIES = {
    "cyclic": "the last token is a neighbor of the first",
    "truncated": "the first and the last token have one neighbor",
}


class Star(Attention):
    r"""Each token sees its two neighbors, its input and one relay that sees all tokens, in several cycles.

    A cycle updates all tokens h together, then the relay s from the new tokens. $\mathrm{attend}(a; b_1, \ldots)$ is
    multi-head softmax attention, with the query of a and keys and values of the b. y is h after the last cycle, whose
    relay is not computed. Each cycle has separate weights, and each of its attentions separate projections.

    ``cycles``: the number of cycles. ``kind``: cyclic, where the tokens form a ring, so that rolling the input rolls
    the output; or truncated, where the ends have one neighbor.

    A neighbor that is the token itself or the other neighbor (N = 1, 2) is seen once. Neighbors are real tokens.
    Attention is float32 or wider.

    Source: Guo et al. 2019, section 3, algorithm 1.

    Raises:
        ValueError: For cycles outside 1 to 1000, or an unknown kind.
    """

    name, paper, cost = "star", "1902.09113", "N D"
    family = "sparse"
    equations = (
        r"h_i \leftarrow \mathrm{norm}(\mathrm{relu}(\mathrm{attend}(h_i; \, h_{i-1}, h_i, h_{i+1}, e_i, s))), "
        r"\quad "
        r"i = 1, \ldots, N",
        r"s \leftarrow \mathrm{norm}(\mathrm{relu}(\mathrm{attend}(s; \, s, h_1, \ldots, h_N)))",
        r"\text{at first} \quad h_i = e_i = x_i, \quad s = \frac{1}{N} \sum_i x_i",
    )
    citation = (
        "Guo, Qipeng and Qiu, Xipeng and Liu, Pengfei and Shao, Yunfan and Xue, Xiangyang and Zhang, Zheng",
        "Star-Transformer",
        2019,
    )
    examples = ("star", "star(cycles=3, kind='truncated')")
    directions = ("bidirectional",)

    def __init__(self, dim: int, heads: int, *, causal: bool = False, cycles: int = 2, kind: str = "cyclic"):
        super().__init__(dim, heads, causal=causal)
        if not 1 <= cycles <= 1000:
            raise ValueError(f"cycles={cycles} must be from 1 to 1000, since each has separate weights")
        self.cycles, self.kind = cycles, known(kind, BOUNDARIES, "kind of ring")
        self.rings = nn.ModuleList(_Part(dim, heads) for _ in range(cycles))
        self.relays = nn.ModuleList(_Part(dim, heads) for _ in range(cycles - 1))

    @property
    def positional(self) -> bool:
        return True

    def attend(self, x: Tensor, state: None, *, mask: Tensor | None = None) -> tuple[Tensor, None]:
        select_backend("attention on a star")
        order = None
        if mask is not None:
            # Real tokens first, in their order.
            order = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
            x = x.gather(1, order[..., None].expand_as(x))
        _, count = positions(x, mask=mask)
        at = torch.arange(x.shape[1], device=x.device)
        real = at < count[:, None]  # (B,N)
        before, after = self._neighbors(at, count[:, None])
        there = torch.stack([before >= 0, real, after >= 0, real, real], -1)  # (B,N,5)
        # Their indices in the concatenation of tokens, inputs and relay.
        own, n = at.expand_as(before), x.shape[1]
        place = torch.stack([before, own, after, n + own, torch.full_like(own, 2 * n)], -1).clamp(min=0)
        everything, some = torch.arange(n + 1, device=x.device)[None, None], nn.functional.pad(real, (1, 0), value=True)
        h, x = x, torch.where(real[..., None], x, 0.0)
        relay = (upcast_half(x).sum(1, keepdim=True) / count.clamp(min=1)[:, None, None]).to(x.dtype)
        for cycle, ring in enumerate(self.rings):
            h = ring(h, torch.cat([h, x, relay], 1), place, there)
            if cycle < self.cycles - 1:
                relay = self.relays[cycle](relay, torch.cat([relay, h], 1), everything, some[:, None])
        return h if order is None else torch.zeros_like(h).scatter(1, order[..., None].expand_as(h), h), state

    def _neighbors(self, at: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Positions (B,N) of the tokens before and after each; -1 if there is none or it is seen already."""
        before, after = (at - 1).expand(len(count), -1), torch.where(at + 1 < count, at + 1, -1)
        if self.kind == "truncated":
            return before, after
        return torch.where(before < 0, count - 1, before).where(count > 1, -1), torch.where(after < 0, 0, after).where(
            count > 2, -1
        )


class _Part(nn.Module):
    """norm(relu(out(attention))), where each query has its own list of keys."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, nodes: Tensor, place: Tensor, there: Tensor) -> Tensor:
        """x (B,N,dim), nodes (B,T,dim), place (B|1,N,M) the nodes of each query, there bool (B,N,M) -> (B,N,dim)."""
        q = split(upcast_half(self.query(x)), self.heads)[..., None, :]  # (B,H,N,1,D)
        k, v = (_take(split(upcast_half(part(nodes)), self.heads), place) for part in (self.key, self.value))
        logits = (q * k).sum(-1) * q.shape[-1] ** -0.5  # (B,H,N,M)
        p = logits.masked_fill(~there[:, None], torch.finfo(logits.dtype).min).softmax(-1)
        o = (p[..., None] * v).sum(-2).to(x.dtype)
        return self.norm(self.out(merge(o)).relu())


def _take(x: Tensor, place: Tensor) -> Tensor:
    """x (B,H,T,D), place (B|1,N,M) -> (B,H,N,M,D)."""
    picked = place.flatten(1)[:, None, :, None].expand(*x.shape[:2], -1, x.shape[-1])
    return x.gather(2, picked).unflatten(2, place.shape[1:])
