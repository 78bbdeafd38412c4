"""The time mixing of RWKV-7: a state that erases along one vector and writes along another."""

import math
from typing import Literal, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.token_shift import shift, shift_start
from ..ops.gated import general
from ..ops.tensors import merge, split, upcast_half
from .base import Attention, TokenArguments


class RWKV7State(NamedTuple):
    """The matrix of each head, and the last input."""

    sums: Tensor  # (B,H,D,D): sums^T k is the value stored for a key k, float32 or wider
    last: Tensor  # (B,1,dim), float32 or wider


class RWKV7(Attention[RWKV7State]):
    r"""RWKV-7: a decay per channel, and separate keys for what a token erases and what it writes.

    $\bar x_t$ mixes a token with the one before it, by six learned weights per channel. The decays $w_t$ lie between
    $e^{-e^{-1/2}} = 0.545$ and 1, the rates $a_t$ between 0 and 1. Each head erases along the unit vector
    $\hat\kappa_t$, writes along $\tilde k_t$, and adds a bonus for the token itself. $f_w$, $f_a$ and $f_g$ are maps of
    low rank; the norm is a LayerNorm per head. In RWKV-7 models, layers after the first also mix their values with
    those of the first. A single attention has no other layer, so this is left out here; ``longspan.compat.fla.load``
    loads complete models.

    ``decay_rank``: the rank of $f_w$; auto is 2.5 times the root of dim, rounded to a multiple of 32, at least 32.
    ``rate_rank``: the rank of $f_a$; auto as ``decay_rank``. ``gate_rank``: the rank of $f_g$; auto with 5 times the
    root.

    Initialization: the bias of $f_w$ rises from -5.5 to 0.5 along the channels, that of $f_a$ is -0.19; $\theta$ is
    0.71, $\alpha$ 1.02 and $\rho$ -0.04. $\mu$ is that of the middle layer of the authors' models.

    Source: Peng et al. 2025 (2503.14456), section 4 and appendix; initialization as in the authors' training code.

    Raises:
        ValueError: For a rank below 1.
    """

    name, paper, cost = "rwkv7", "2503.14456", "N D^2"
    family = "gated"
    learned_state = ("sums", "last")
    equations = (
        r"S_t = \mathrm{Diag}(w_t) S_{t-1} - (\hat\kappa_t \odot a_t) (S_{t-1}^\top \hat\kappa_t)^\top + "
        r"\tilde k_t v_t^\top, \quad o_t = S_t^\top r_t",
        r"\bar x_t = x_t + (x_{t-1} - x_t) \odot \mu, \quad r_t = W_r \bar x^r_t, \quad k_t = W_k \bar x^k_t, \quad "
        r"v_t = W_v \bar x^v_t",
        r"\log w_t = -e^{-1/2} \, \sigma(f_w(\bar x^w_t)), \quad a_t = \sigma(f_a(\bar x^a_t))",
        r"\hat\kappa_t = \frac{k_t \odot \theta}{\lVert k_t \odot \theta \rVert}, \quad "
        r"\tilde k_t = k_t \odot (1 + (a_t - 1) \odot \alpha)",
        r"y_t = W_o \, \left( \left( \mathrm{norm}(o_t) + (r_t \cdot (\rho \odot \tilde k_t)) \, v_t \right) \odot "
        r"f_g(\bar x^g_t) \right)",
    )
    citation = (
        "Peng, Bo and Zhang, Ruichong and Goldstein, Daniel and Alcaide, Eric and Du, Xingjian and Hou, Haowen and "
        "Lin, Jiaju and Liu, Jiaxing and Lu, Janna and Merrill, William and Song, Guangyu and Tan, Kaifeng and "
        "Utpala, Saiteja and Wilce, Nathan and Wind, Johan S. and Wu, Tianyi and Wuttke, Daniel and Zhou-Zheng, "
        "Christian",
        'RWKV-7 "Goose" with Expressive Dynamic State Evolution',
        2025,
    )
    examples = ("rwkv7", "rwkv7(decay_rank=3, rate_rank=2, gate_rank=5)")
    directions, states = ("causal",), (RWKV7State,)
    no_decay = ("mixes", "bonus")

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = True,
        decay_rank: int | Literal["auto"] = "auto",
        rate_rank: int | Literal["auto"] = "auto",
        gate_rank: int | Literal["auto"] = "auto",
    ):
        super().__init__(dim, heads, causal=causal)
        self.decay_rank, self.rate_rank, self.gate_rank = decay_rank, rate_rank, gate_rank
        ranks = []
        for option, given, factor in (
            ("decay_rank", decay_rank, 2.5),
            ("rate_rank", rate_rank, 2.5),
            ("gate_rank", gate_rank, 5.0),
        ):
            rank = max(32, 32 * round(factor * math.sqrt(dim) / 32)) if isinstance(given, str) else given
            if rank < 1:
                raise ValueError(f"{option}={rank} must be at least 1")
            ranks.append(rank)
        powers = torch.stack(
            [torch.full((), power) for power in (0.1, 0.45, 0.35, 0.35, 0.45, 0.1)]
        )  # r, w, k, v, a, g
        # transformers, which builds models on the meta device, makes linspace on the CPU.
        along = torch.linspace(0, 1, dim).to(powers.device)
        self.mixes = nn.Parameter(1 - along ** powers[:, None])
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.decay, self.rate = (
            nn.ModuleList([nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim)]) for rank in ranks[:2]
        )
        self.gate = nn.ModuleList([nn.Linear(dim, ranks[2], bias=False), nn.Linear(ranks[2], dim, bias=False)])
        with torch.no_grad():
            self.decay[1].get_parameter("bias").copy_(6 * along**1.8 - 5.5)
            self.rate[1].get_parameter("bias").fill_(-0.19)
        self.removal = nn.Parameter(torch.full((dim,), 0.71))
        self.boost = nn.Parameter(torch.full((dim,), 1.02))
        self.bonus = nn.Parameter(torch.full((heads, dim // heads), -0.04))
        self.norm = nn.GroupNorm(heads, dim, 1e-5 * (dim // heads))
        self.out = nn.Linear(dim, dim, bias=False)

    def start(self, batch: int, capacity: int) -> RWKV7State:
        size, like = self.dim // self.heads, self.weight_like
        sums = upcast_half(like.new_zeros(batch, self.heads, size, size))
        return RWKV7State(sums, shift_start(like, batch, self.dim))

    def attend(
        self, x: Tensor, state: RWKV7State | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, RWKV7State | None]:
        sums, last = self.start(x.shape[0], 0) if state is None else state
        before, last = shift(x, last, **given)
        delta = before - x
        xr, xw, xk, xv, xa, xg = (torch.addcmul(x, delta, mu) for mu in self.mixes)
        k, v = self.key(xk), split(self.value(xv), self.heads)
        w1, w2 = self.decay
        log_decay = -math.exp(-0.5) * upcast_half(w2(w1(xw).tanh())).sigmoid()
        a1, a2 = self.rate
        a = a2(a1(xa)).sigmoid()
        erased = F.normalize(upcast_half(split(k * self.removal, self.heads)), dim=-1).to(k.dtype)
        written = split(torch.addcmul(k, k * (a - 1), self.boost), self.heads)
        r = split(self.query(xr), self.heads)
        o, sums = general.recur(
            r,
            written,
            v,
            read=erased,
            erase=erased * split(a, self.heads),
            log_decay=split(log_decay, self.heads),
            scale=1.0,
            read_before_decay=True,
            state=sums,
            **given,
        )
        own = (r * written * self.bonus[:, None]).sum(-1, keepdim=True) * v
        g1, g2 = self.gate
        normed = self.norm(merge(o).flatten(0, 1)).view_as(x)
        y = self.out((normed + merge(own)) * g2(g1(xg).sigmoid()))
        return y, None if state is None else RWKV7State(sums, last)
