"""PaTH attention: products of Householder maps, which depend on the tokens, in place of rotations."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..modules.short_conv import ShortConvolution
from ..ops.operands import zero_masked
from ..ops.softmax import path
from ..ops.tensors import merge, split, unit, upcast_half
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .cached import Cached


class PaTHState(NamedTuple):
    """All tokens so far, with keys that the maps of all later tokens have moved, and the inputs of the convolution."""

    past: KeyValues  # keys in float32 or better
    recent: Tensor  # (B,width-1,G D), float32 or better


class PaTH(Cached[PaTHState]):
    r"""Softmax attention whose positions are learned from the tokens between query and key.

    Each token has a map $H_l$, which moves the keys of all earlier tokens: with $\beta = 0$ not at all, with
    $\beta = 1$ it removes their part along w, with $\beta = 2$ it reflects it. Rotary positions move keys as well, but
    by the same rotation at every token.

    ``kv_heads``: heads of keys, values and maps, each shared by heads / kv_heads query heads (0: as many as heads).
    ``rank``: the number of rows of $W_1$ (0: one matrix in place of two). ``convolution``: width of the convolution of
    w (0: none).

    The state is all keys and values. A step moves all keys, O(N D).

    Source: Yang et al. 2025, section 3.

    Raises:
        ValueError: For ``kv_heads`` that do not divide heads, a negative rank, or a convolution of width 1.
    """

    name, paper, cost = "path", "2505.16381", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j \le i} p_{ij} v_j, \quad p_{ij} = \mathrm{softmax}_{j \le i} "
        r"\frac{q_i \cdot (H_i \cdots H_{j + 1} k_j)}{\sqrt D}, \quad H_l = I - \beta_l w_l w_l^\top",
        r"\beta_l = 2 \sigma(u \cdot x_l + b), \quad w_l = \frac{z_l}{\lVert z_l \rVert}, \quad "
        r"z_l = \mathrm{silu}(\mathrm{convolution}(W_2 W_1 x)_l)",
    )
    citation = (
        "Yang, Songlin and Shen, Yikang and Wen, Kaiyue and Tan, Shawn and Mishra, Mayank and Ren, Liliang and "
        "Panda, Rameswar and Kim, Yoon",
        "PaTH Attention: Position Encoding via Accumulating Householder Transformations",
        2025,
    )
    examples = ("path(rank=3)", "path(kv_heads=1, rank=0, convolution=0)")
    states = (PaTHState,)

    def __init__(
        self, dim: int, heads: int, *, causal: bool = True, kv_heads: int = 0, rank: int = 32, convolution: int = 3
    ):
        super().__init__(dim, heads, causal=causal)
        if rank < 0:
            raise ValueError(f"rank={rank} must be positive, or 0 for one matrix")
        self.create(kv_heads)
        self.rank, self.convolution = rank, convolution
        width = dim // heads * self.groups
        sizes = [dim, *([rank] if rank else []), width]
        self.direction = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(sizes)))
        self.mix = ShortConvolution(width, convolution) if convolution else None
        self.rate = nn.Linear(dim, self.groups)

    def start(self, batch: int, capacity: int) -> PaTHState:
        like = self.weight_like
        past = kv_cache.empty(batch, self.groups, capacity, self.dim // self.heads, like)
        recent = (
            self.mix.start(batch) if self.mix else upcast_half(past.keys.new_zeros(batch, 0, self.key.out_features))
        )
        return PaTHState(past._replace(keys=upcast_half(past.keys)), recent)

    def _run(
        self, x: Tensor, state: PaTHState | None, real: Tensor | None, donate: bool
    ) -> tuple[Tensor, PaTHState | None]:
        q, k, v = self.heads_of(x, real=real)
        past, recent = self.start(len(x), 0) if state is None else state
        w = self.direction(x)
        if self.mix is not None:
            w, recent = self.mix(w, recent, activation="silu", mask=real, donate=donate)
        w = unit(split(upcast_half(w), self.groups))
        beta = 2 * upcast_half(self.rate(x)).sigmoid().mT  # (B,G,N)
        w, beta = zero_masked(real, w, beta)
        if state is None:
            return self.out(merge(path.causal(q, k, v, w, beta))), None
        slots = torch.arange(past.keys.shape[2], device=x.device)
        seen = slots < past.length[:, None]
        o, old, new = path.attend(q, k, v, w, beta, path.Past(past.keys, past.values, seen))
        after = kv_cache.extend(past._replace(keys=old), new, v, mask=real, donate=donate)[1]
        return self.out(merge(o)), PaTHState(after, recent)
