"""Softmax attention with a Gaussian bias around a position that each token chooses."""

from typing import Any

import torch
from torch import Tensor, nn

from .._utils.spec import known
from ..ops.softmax import scores, similarity
from ..ops.tensors import merge, positions, split, upcast_half
from ..states import kv_cache
from ..states.kv_cache import KeyValues
from .base import Attention

CENTERS = {"learned": "each token chooses center and width", "fixed": "centered on the token"}
NARROWEST = 1e-6  # tokens


class Gaussian(Attention[KeyValues]):
    """Softmax attention with a Gaussian bias, whose center and width each token chooses.

    ``kind``: learned, where the queries of all heads determine center $P_i$ and standard deviation $s_i$; or fixed,
    with one w and b per head.

    The fixed bias is initialized to a standard deviation of 10 tokens. $u_p$ and $u_d$ are vectors per head. Positions
    i and j count real tokens. $I_i$ is the number of tokens that token i sees: the length of the sequence in the
    bidirectional form, as published, and i + 1 in the causal form. $2 s_i$ is at least 1e-6 tokens. The bias is
    computed in float32 or better. The scores are materialized, so this is slower than fused softmax at every length.

    Source: Yang et al. 2018, section 3, with windows for each query; fixed: Guo et al. 2019, "Gaussian Transformer: A
    Lightweight Approach for Natural Language Inference" (AAAI), with one pair of numbers per layer. Raises ValueError
    for an unknown kind.
    """

    name, paper, cost = "gaussian", "1810.10182", "N^2 D"
    family = "softmax"
    equations = (
        r"o_i = \sum_{j \in \mathcal{A}_i} p_{ij} v_j, \quad "
        r"p_{ij} = \mathrm{softmax}_{j \in \mathcal{A}_i}\left(\frac{q_i \cdot k_j}{\sqrt D} + G_{ij}\right)",
        r"\text{learned:} \quad G_{ij} = -\frac{(j - P_i)^2}{2 s_i^2}, \quad "
        r"P_i = I_i \, \sigma(u_p \cdot \tanh(W q_i)), \quad s_i = \frac{I_i}{2} \, \sigma(u_d \cdot \tanh(W q_i))",
        r"\text{fixed:} \quad G_{ij} = -\lvert w (i - j)^2 + b \rvert",
    )
    citation = (
        "Yang, Baosong and Tu, Zhaopeng and Wong, Derek F. and Meng, Fandong and Chao, Lidia S. and Zhang, Tong",
        "Modeling Localness for Self-Attention Networks",
        2018,
    )
    examples = ("gaussian", "gaussian(kind='fixed')")
    states = (KeyValues,)

    def __init__(self, dim: int, heads: int, *, causal: bool = True, kind: str = "learned"):
        super().__init__(dim, heads, causal=causal)
        self.kind = known(kind, CENTERS, "kind of window")
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if kind == "learned":
            self.hidden = nn.Linear(dim, dim, bias=False)
            self.centre, self.width = (nn.Linear(dim, heads, bias=False) for _ in range(2))
        else:
            # Not b = 0: there |w d^2 + b| has no gradient at d = 0.
            self.w, self.b = nn.Parameter(torch.full((heads,), 0.005)), nn.Parameter(torch.full((heads,), -0.01))

    @property
    def positional(self) -> bool:
        return True

    def start(self, batch: int, capacity: int) -> KeyValues:
        return kv_cache.empty(batch, self.heads, capacity, self.dim // self.heads, self.weight_like)

    def attend(
        self,
        x: Tensor,
        state: KeyValues | None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        record: dict[str, Any] | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, KeyValues | None]:
        query = self.query(x)
        q, k, v = (split(y, self.heads) for y in (query, self.key(x), self.value(x)))
        at, _ = positions(x, state and state.length, mask=mask, segments=segments)
        kept = state is not None
        given: kv_cache.Visible = {"mask": mask, "segments": segments, "prefix": prefix}
        view, state = kv_cache.continued(k, v, state, causal=self.causal, donate=donate, **given)
        allowed = view.allowed(q.shape[2])
        places = scores.key_positions(at, view.keys.shape[2], kept=kept, packed=segments is not None)
        if self.kind == "learned":
            bias = self._learned(query, places, allowed.sum(-1, keepdim=True))
        else:
            bias = self._fixed(at, places)
        p = scores.weights(scores.products(q, view.keys) + bias, allowed)
        if record is not None:
            record.update(mask=allowed, matrix=p)
        return self.out(merge(similarity.attend(p, view.values))), state

    def _learned(self, query: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        """query (B,N,dim), positions of keys (B,M), number of visible keys (B|1,1,N,1) -> bias (B,H,N,M)."""
        hidden = self.hidden(query).tanh()
        centre, width = (upcast_half(part(hidden)).mT[..., None].sigmoid() * seen for part in (self.centre, self.width))
        # With s = D / 2, (j - P)^2 / (2 s^2) is 2 ((j - P) / D)^2.
        return -2 * ((places[:, None, None, :] - centre) / width.clamp(min=NARROWEST)).square()

    def _fixed(self, at: Tensor, places: Tensor) -> Tensor:
        """Positions of queries (B,N) and of keys (B,M) -> bias (B,H,N,M)."""
        w, b = upcast_half(self.w)[:, None, None], upcast_half(self.b)[:, None, None]
        return -(w * (at[:, :, None] - places[:, None, :])[:, None].square() + b).abs()
