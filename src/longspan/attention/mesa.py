"""MesaNet: a layer that solves a regression on all tokens so far, anew for each token."""

from typing import NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.norms import HeadNorm
from ..modules.short_conv import ShortConvolution
from ..ops.gated import mesa as op
from ..ops.tensors import merge, softplus, split, unit, upcast_half
from .base import Attention, TokenArguments

FLOOR = 0.25  # of the ridge


class MesaState(NamedTuple):
    """Both sums and the tokens of the short convolution, in float32 or better."""

    sums: Tensor  # (B,H,D,2D) decayed sums of beta k k^T, and of beta k v^T
    recent: Tensor  # (B,convolution-1,2 dim) the last projected queries and keys, concatenated


class Mesa(Attention[MesaState]):
    r"""Each token reads the ridge regression from keys to values over all tokens so far, solved to its optimum.

    $\gamma_t$ and $\beta_t$ are one number per head, $\lambda$ is one number per channel of the keys; the norm is RMS.
    Conjugate gradients solve the systems of all tokens together. The gradients are those of the exact solution, so they
    are as exact as the systems are solved: ``residual`` measures that.

    ``steps``: the most steps of conjugate gradients; D steps are exact but for rounding, and a solved system takes no
    more. ``convolution``: the width of the short convolution in tokens (0: none).

    $\lambda$ is at least 0.25, and 1 at first.

    Source: von Oswald et al. 2025 (2506.05233), eq. 6 to 8 and section 3, whose number of steps is the default.

    Raises:
        ValueError: For steps < 1, or convolution = 1.
    """

    name, paper, cost = "mesa", "2506.05233", "N D^2"
    family = "gated"
    # The sum of k k^T must stay symmetric, and positive.
    learned_state = ("recent",)
    equations = (
        r"o_t = G_t^\top \left(H_t + \mathrm{Diag}(\lambda)\right)^{-1} q_t, \quad "
        r"H_t = \gamma_t H_{t-1} + \beta_t k_t k_t^\top, \quad G_t = \gamma_t G_{t-1} + \beta_t k_t v_t^\top",
        r"\gamma_t = \sigma(u \cdot x_t + a), \quad \beta_t = \sigma(w \cdot x_t + b), \quad "
        r"y_t = W_o \, \mathrm{norm}(o_t)",
        r"[q_t; k_t] = \mathrm{silu}(\mathrm{convolution}(W x)_t), \quad "
        r"q_t \leftarrow \frac{q_t}{\lVert q_t \rVert}, \quad k_t \leftarrow \frac{k_t}{\lVert k_t \rVert}",
    )
    citation = (
        "von Oswald, Johannes and Scherrer, Nino and Kobayashi, Seijin and Versari, Luca and Yang, Songlin and "
        "Schlegel, Maximilian and Maile, Kaitlin and Schimpf, Yanick and Sieberling, Oliver and Meulemans, "
        "Alexander and Saurous, Rif A. and Lajoie, Guillaume and Frenkel, Charlotte and Pascanu, Razvan and "
        "Agüera y Arcas, Blaise and Sacramento, João",
        "MesaNet: Sequence Modeling by Locally Optimal Test-Time Training",
        2025,
    )
    examples = ("mesa", "mesa(steps=12, convolution=0)")
    directions, states = ("causal",), (MesaState,)
    kernels = ("convolution", "gated")

    def __init__(self, dim: int, heads: int, *, causal: bool = True, steps: int = 30, convolution: int = 4):
        super().__init__(dim, heads, causal=causal)
        if steps < 1:
            raise ValueError(f"steps={steps} of conjugate gradients must be at least 1")
        self.steps, self.convolution = steps, convolution
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.decay, self.rate = nn.Linear(dim, heads), nn.Linear(dim, heads)
        # softplus of it, plus the floor, is 1.
        self.ridge = nn.Parameter(torch.full((dim,), 1 - FLOOR).expm1().log())
        self.mix = ShortConvolution(2 * dim, convolution) if convolution else None
        self.norm = HeadNorm(dim // heads)
        self.out = nn.Linear(dim, dim, bias=False)

    def start(self, batch: int, capacity: int) -> MesaState:
        size, like = self.dim // self.heads, self.weight_like
        sums, none = like.new_zeros(batch, self.heads, size, 2 * size), like.new_zeros(batch, 0, 2 * self.dim)
        return MesaState(upcast_half(sums), self.mix.start(batch) if self.mix else upcast_half(none))

    def attend(
        self, x: Tensor, state: MesaState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, MesaState | None]:
        o, _, after = self._solve(x, state, **given)
        return self.out(merge(self.norm(o)).to(x.dtype)), None if state is None else after

    def residual(self, x: Tensor, state: MesaState | None = None, *, mask: Tensor | None = None) -> Tensor:
        """Return how far the last step is from the solution, relative to the length of the query.

        Args:
            x: (B,N,dim).
            state: The state before x, or None.
            mask: (B,N) bool, True on real tokens.

        Returns:
            (B,H,N), 0 for a system that is solved, and for masked tokens.

        Example:
            >>> import torch, longspan
            >>> mesa = longspan.build("mesa", dim=16, heads=2)
            >>> bool(mesa.residual(torch.randn(1, 50, 16)).max() < 1e-4)
            True
        """
        x = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
        with torch.no_grad():
            return self._solve(x, state, mask=mask)[1]

    def _solve(
        self, x: Tensor, state: MesaState | None, **given: Unpack[TokenArguments]
    ) -> tuple[Tensor, Tensor, MesaState]:
        sums, recent = self.start(x.shape[0], 0) if state is None else state
        mixed = torch.cat([self.query(x), self.key(x)], -1)
        if self.mix is not None:
            mixed, recent = self.mix(mixed, recent, activation="silu", **given)
        else:
            mixed = F.silu(mixed)
        q, k = (unit(split(t, self.heads)) for t in upcast_half(mixed).chunk(2, -1))
        o, residual, sums = op.attend(
            q,
            k,
            upcast_half(split(self.value(x), self.heads)),
            beta=upcast_half(self.rate(x)).sigmoid().mT,
            log_decay=F.logsigmoid(upcast_half(self.decay(x))).mT,
            ridge=(softplus(upcast_half(self.ridge)) + FLOOR).unflatten(0, (self.heads, -1)),
            steps=self.steps,
            state=sums,
            **given,
        )
        return o, residual, MesaState(sums, recent)
