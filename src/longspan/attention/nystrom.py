"""Softmax attention through landmarks: three small softmax matrices and a pseudo-inverse replace the large one."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops import rows
from ..ops.compress.inverse import inverse
from ..ops.compress.landmarks import segment_means, segments_of
from ..ops.operands import zero_masked
from ..ops.softmax import dense
from ..ops.tensors import merge, split, upcast_half, visible
from .base import Attention


class Nystrom(Attention):
    r"""Softmax attention through landmarks, the means of segments of queries and keys (Nyström's method).

    ``landmarks``: m, the number of segments of a sequence; a sequence of fewer tokens has one landmark per token.
    ``iterations``: steps of the iteration towards the pseudo-inverse $A^+$; 0: the exact one, by a singular value
    decomposition. ``convolution``: width of a convolution of the values along the tokens, with one learned filter c per
    head, which is added to the output (0: none).

    The sizes of the segments differ by at most one. The iteration starts from $A^\top / (\lVert A \rVert_1 \lVert A
    \rVert_\infty)$, with the norms of each row's and head's matrix. Landmarks are means over real tokens, and the
    convolution sees only real tokens.

    With as many landmarks as tokens, the result is softmax attention once the iteration has converged. The paper's 6
    steps leave an error of 3e-2 at 128 tokens; 20 steps leave no visible error. If landmarks resemble each other, A is
    nearly singular. The exact pseudo-inverse then magnifies rounding errors; a few steps magnify them much less. There
    is no causal form, since landmarks are means over the whole sequence.

    Source: Xiong et al. 2021, eqs 8, 11 and 13.

    Raises:
        ValueError: For landmarks < 1, iterations < 0, or a convolution of even width.
    """

    name, paper, cost = "nystrom", "2102.03902", "N m D + m^3"
    family = "compressed"
    equations = (
        r"O = \mathrm{softmax}\left(\frac{Q \tilde K^\top}{\sqrt D}\right) A^+ "
        r"\mathrm{softmax}\left(\frac{\tilde Q K^\top}{\sqrt D}\right) V, \quad "
        r"A = \mathrm{softmax}\left(\frac{\tilde Q \tilde K^\top}{\sqrt D}\right)",
        r"\tilde q_s, \tilde k_s \text{: the means of segment } s = 1, \ldots, m",
        r"A^+ \approx Z \leftarrow \frac{1}{4} Z (13 I - A Z (15 I - A Z (7 I - A Z)))",
    )
    citation = (
        "Xiong, Yunyang and Zeng, Zhanpeng and Chakraborty, Rudrasis and Tan, Mingxing and Fung, Glenn and "
        "Li, Yin and Singh, Vikas",
        "Nyströmformer: A Nyström-Based Algorithm for Approximating Self-Attention",
        2021,
    )
    examples = ("nystrom(landmarks=5)", "nystrom(landmarks=3, iterations=2, convolution=5)")
    directions = ("bidirectional",)

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        causal: bool = False,
        landmarks: int = 64,
        iterations: int = 6,
        convolution: int = 0,
    ):
        super().__init__(dim, heads, causal=causal)
        if landmarks < 1:
            raise ValueError(f"landmarks={landmarks} must be at least 1")
        if iterations < 0:
            raise ValueError(f"iterations={iterations} must be positive, or 0 for the exact pseudo-inverse")
        if convolution < 0 or (convolution and convolution % 2 == 0):
            raise ValueError(f"convolution={convolution} must be an odd width, or 0 for no convolution")
        self.landmarks, self.iterations, self.convolution = landmarks, iterations, convolution
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        if convolution:
            self.filters = nn.Parameter(torch.empty(heads, convolution))
            nn.init.uniform_(self.filters, -(convolution**-0.5), convolution**-0.5)

    @property
    def positional(self) -> bool:
        return True

    def attend(
        self,
        x: Tensor,
        state: None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict[str, Any] | None = None,
    ) -> tuple[Tensor, None]:
        q, k, v = (split(part(x), self.heads) for part in (self.query, self.key, self.value))
        if record is not None:
            # The output is linear in the values, so the output for unit vectors is the attention matrix.
            unit = torch.eye(x.shape[1], dtype=v.dtype, device=v.device).expand(*v.shape[:3], -1)
            record["mask"] = visible(x, causal=False, mask=mask, segments=segments).expand(-1, -1, x.shape[1], -1)
            record["matrix"] = self._read(q, k, unit, mask, segments)
        return self.out(merge(self._read(q, k, v, mask, segments))), state

    def _read(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, segments: Tensor | None) -> Tensor:
        if segments is not None:
            return rows.ragged(q, k, v, self._whole, mask, segments, exact=True)
        q, k, v = zero_masked(mask, q, k, v)
        return self._whole(q, k, v, mask)

    def _whole(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q, k (B,H,N,D), v (B,H,N,E), zero where mask (B,N) is False -> (B,H,N,E)."""
        if not q.shape[2]:
            return v
        members = segments_of(q, min(self.landmarks, q.shape[2]), mask)
        few_q, few_k = segment_means(q, members), segment_means(k, members)
        # Only padding can leave a segment empty.
        real, there = (None, None) if mask is None else (mask[:, None, None], members.any(-1)[:, None, None])
        a, _ = dense.weights(upcast_half(few_q), upcast_half(few_k), mask=there)
        if there is not None:
            a = a * there.mT
        read = upcast_half(dense.attend(few_q, k, v, mask=real))
        with torch.autocast(q.device.type, enabled=False):
            slots = (inverse(a, self.iterations) @ read).to(v.dtype)
        o = dense.attend(q, few_k, slots, mask=there)
        return o + convolve(v, self.filters, mask) if self.convolution else o


def convolve(v: Tensor, filters: Tensor, mask: Tensor | None) -> Tensor:
    """Convolve values along real tokens: v (B,H,N,E), filters (H,width), mask (B,N) -> (B,H,N,E)."""
    heads, _, channels = v.shape[1:]
    tokens = merge(rows.gather_valid(mask, *zero_masked(mask, v), axis=2)[0]).mT  # (B,H*E,N)
    weight = filters.to(v.dtype).repeat_interleave(channels, 0)[:, None]
    found = F.conv1d(tokens, weight, padding=filters.shape[1] // 2, groups=heads * channels).mT
    return rows.scatter_back(mask, split(found, heads), axis=2)
