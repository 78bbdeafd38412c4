"""Random features in the original's scaling, so that a checkpoint's ``omega`` means the same."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ....ops.linear import random_features
from ....ops.tensors import upcast_half
from .base import FeatureMap


def orthogonal_random_matrix_(w: Tensor) -> None:
    """Fill w (E, columns) with Gaussian columns that are at right angles in blocks of E.

    Uniform over rotations and reflections (Choromanski et al. 2020, section 2.4), which the original's are not.
    """
    with torch.no_grad():
        w.copy_(_draw(*w.shape, orthogonal=True))


def _draw(size: int, columns: int, *, orthogonal: bool) -> Tensor:
    """(size, columns) float64 from torch's global generator, as users of ``torch.manual_seed`` expect."""
    rows = "orthogonal" if orthogonal else "iid"
    generator = torch.default_generator
    return random_features.sample(1, columns, size, rows=rows, radii="chi", generator=generator)[0].mT


class RandomFourierFeatures(FeatureMap):
    """sqrt(2 / n_dims) [cos, sin](omega^T x sqrt(softmax_temp)): a Gaussian kernel on average; may turn negative.

    ``n_dims`` features (None: query_dimensions); ``softmax_temp`` (None: 1 / sqrt(query_dimensions)); ``orthogonal``
    columns; a new ``omega`` every ``redraw`` sequences, with ``deterministic_eval`` only in training. ``omega``
    (query_dimensions, n_dims // 2) is a buffer, drawn at construction. Features of half-precision input are float32.

    Source: Rahimi and Recht 2007, "Random Features for Large-Scale Kernel Machines", algorithm 1.
    Raises ValueError for ``redraw`` below one and for ``n_dims`` below two.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        super().__init__(query_dimensions)
        self.query_dimensions = query_dimensions
        self.n_dims = n_dims or query_dimensions
        if redraw < 1 or self.n_dims < 2:
            raise ValueError(f"redraw={redraw} must be at least 1, and n_dims={self.n_dims} at least 2")
        self.softmax_temp = query_dimensions**-0.5 if softmax_temp is None else softmax_temp
        self.orthogonal, self.redraw, self.deterministic_eval = orthogonal, redraw, deterministic_eval
        # Never zeros, with which every feature would be a constant.
        omega = _draw(query_dimensions, self.n_dims // 2, orthogonal=orthogonal)
        self.register_buffer("omega", omega.to(torch.get_default_dtype()))
        self._calls = -1

    def new_feature_map(self, device: torch.device) -> None:
        """Draw ``omega`` anew where it is due."""
        if self.deterministic_eval and not self.training:
            return
        self._calls += 1
        if self._calls % self.redraw == 0:
            omega = _draw(self.query_dimensions, self.n_dims // 2, orthogonal=self.orthogonal)
            # A new tensor, since gradients of earlier calls may still need the old one.
            self.omega = omega.to(device, self.omega.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., 2 (n_dims // 2))."""
        _, u = self._project(x)
        return torch.cat([u.cos(), u.sin()], -1) * math.sqrt(2 / self.n_dims)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x sqrt(softmax_temp) and its products with ``omega``, in float32 at least."""
        with torch.autocast(x.device.type, enabled=False):
            x = upcast_half(x) * math.sqrt(self.softmax_temp)
            return x, x @ self.omega.to(x.dtype)


class SmoothedRandomFourierFeatures(RandomFourierFeatures):
    """Random Fourier features and a constant one, ``smoothing``, so that a kernel plus smoothing^2 is estimated.

    ``n_dims`` (None: query_dimensions) counts the constant. All else as in ``RandomFourierFeatures``.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = False,
        smoothing: float = 1.0,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        size = (query_dimensions if n_dims is None else n_dims) - 1
        super().__init__(query_dimensions, size, softmax_temp, orthogonal, redraw, deterministic_eval)
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., 2 (n_dims // 2) + 1)."""
        y = super().forward(x)
        return torch.cat([y, torch.full_like(y[..., :1], self.smoothing)], -1)


class Favor(RandomFourierFeatures):
    """n_dims^(-1/2) e^(+-omega^T x - |x|^2/2), x scaled by sqrt(softmax_temp): the softmax kernel on average.

    ``stabilize`` divides by e^(the largest |x|^2 of the sequence), per head, a factor that the normaliser cancels up to
    its eps; a step of a recurrent model sees no sequence, so there it raises ValueError. All else as in
    ``RandomFourierFeatures``.

    Source: Choromanski et al. 2020 (2009.14794), lemma 1, SM^hyp+.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float | None = None,
        orthogonal: bool = True,
        stabilize: bool = False,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        super().__init__(query_dimensions, n_dims, softmax_temp, orthogonal, redraw, deterministic_eval)
        self.stabilize = stabilize

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E), with ``stabilize`` (N,L,H,E) -> (..., 2 (n_dims // 2))."""
        x, u = self._project(x)
        squares = x.square().sum(-1, keepdim=True)
        offset = squares / 2 + math.log(self.n_dims) / 2
        if self.stabilize:
            if x.dim() != 4:
                raise ValueError(
                    f"Favor(stabilize=True) looks at whole sequences (N, L, H, E), not at {tuple(x.shape)}; "
                    f"recurrent models need stabilize=False"
                )
            offset = offset + squares.amax(1, keepdim=True)
        return torch.cat([(u - offset).exp(), (-u - offset).exp()], -1)


class GeneralizedRandomFeatures(RandomFourierFeatures):
    """kernel_fn(omega^T x): the kernel E f(w.q) f(w.k), whatever that is; ``n_dims`` features (None: query_dimensions).

    All else as in ``RandomFourierFeatures``. Source: Choromanski et al. 2020 (2009.14794), section 2.2.
    """

    def __init__(
        self,
        query_dimensions: int,
        n_dims: int | None = None,
        softmax_temp: float = 1.0,
        orthogonal: bool = True,
        kernel_fn: Callable[[Tensor], Tensor] = torch.relu,
        redraw: int = 1,
        deterministic_eval: bool = False,
    ):
        # Twice, since half of n_dims is the number of columns.
        size = 2 * (query_dimensions if n_dims is None else n_dims)
        super().__init__(query_dimensions, size, softmax_temp, orthogonal, redraw, deterministic_eval)
        self.kernel_fn = kernel_fn

    def forward(self, x: Tensor) -> Tensor:
        """x (..., E) -> (..., n_dims)."""
        _, u = self._project(x)
        return self.kernel_fn(u)
