"""Random features with the original's scaling, so that they accept ``omega`` of a checkpoint."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ....ops.linear import random_features
from ....ops.tensors import upcast_half
from .base import FeatureMap


def orthogonal_random_matrix_(w: Tensor) -> None:
    """Fill w (E, columns) with Gaussian columns that are orthogonal in blocks of E.

    They are uniform over rotations and reflections, unlike the original's.

    References:
        Choromanski et al. 2020 (2009.14794), section 2.4.
    """
    with torch.no_grad():
        w.copy_(_draw(*w.shape, orthogonal=True))


def _draw(size: int, columns: int, *, orthogonal: bool) -> Tensor:
    """Draw (size, columns) float64 from torch's global generator, which ``torch.manual_seed`` seeds."""
    rows = "orthogonal" if orthogonal else "iid"
    generator = torch.default_generator
    return random_features.sample(1, columns, size, rows=rows, radii="chi", generator=generator)[0].mT


class RandomFourierFeatures(FeatureMap):
    """sqrt(2 / n_dims) [cos, sin](omega^T x sqrt(softmax_temp)): a Gaussian kernel on average; may be negative.

    ``omega`` (query_dimensions, n_dims // 2) is a buffer, drawn at construction. Features of half-precision input are
    float32.

    Args:
        query_dimensions: channels of a head.
        n_dims: number of features; None means query_dimensions.
        softmax_temp: factor of the products; None means 1 / sqrt(query_dimensions).
        orthogonal: draw orthogonal columns.
        redraw: draw a new ``omega`` every N sequences.
        deterministic_eval: draw in training only.

    Raises:
        ValueError: ``redraw`` is below one, or ``n_dims`` below two.

    References:
        Rahimi and Recht 2007, "Random Features for Large-Scale Kernel Machines", algorithm 1.
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
        # Not zeros, with which every feature would be constant.
        omega = _draw(query_dimensions, self.n_dims // 2, orthogonal=orthogonal)
        self.register_buffer("omega", omega.to(torch.get_default_dtype()))
        self._calls = -1

    def new_feature_map(self, device: torch.device) -> None:
        """Draw a new ``omega`` if it is due."""
        if self.deterministic_eval and not self.training:
            return
        self._calls += 1
        if self._calls % self.redraw == 0:
            omega = _draw(self.query_dimensions, self.n_dims // 2, orthogonal=self.orthogonal)
            # A new tensor, because gradients of earlier calls may need the old one.
            self.omega = omega.to(device, self.omega.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return features: (..., E) -> (..., 2 (n_dims // 2))."""
        _, u = self._project(x)
        return torch.cat([u.cos(), u.sin()], -1) * math.sqrt(2 / self.n_dims)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x sqrt(softmax_temp) and its products with ``omega``, in float32 or wider."""
        with torch.autocast(x.device.type, enabled=False):
            x = upcast_half(x) * math.sqrt(self.softmax_temp)
            return x, x @ self.omega.to(x.dtype)


class SmoothedRandomFourierFeatures(RandomFourierFeatures):
    """Random Fourier features and a constant feature ``smoothing``, which adds smoothing^2 to the kernel.

    ``n_dims`` (None: query_dimensions) includes the constant. Other arguments are as in ``RandomFourierFeatures``.
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
        """Return features: (..., E) -> (..., 2 (n_dims // 2) + 1)."""
        y = super().forward(x)
        return torch.cat([y, torch.full_like(y[..., :1], self.smoothing)], -1)


class Favor(RandomFourierFeatures):
    """n_dims^(-1/2) e^(+-omega^T x - |x|^2/2), x scaled by sqrt(softmax_temp): the softmax kernel on average.

    Args:
        stabilize: divide by e^(the largest |x|^2 of the sequence), per head. The normalizer cancels this factor up to
            its eps. Recurrent models do not support it, because a step does not see the sequence. Other arguments are
            as in ``RandomFourierFeatures``.

    References:
        Choromanski et al. 2020 (2009.14794), lemma 1, SM^hyp+.
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
        """Return features: (..., E), with ``stabilize`` (N,L,H,E) -> (..., 2 (n_dims // 2)).

        Raises:
            ValueError: ``stabilize`` is set and ``x`` does not have four dimensions.
        """
        x, u = self._project(x)
        squares = x.square().sum(-1, keepdim=True)
        offset = squares / 2 + math.log(self.n_dims) / 2
        if self.stabilize:
            if x.dim() != 4:
                raise ValueError(
                    f"Favor(stabilize=True) needs whole sequences (N, L, H, E), not {tuple(x.shape)}; "
                    f"recurrent models need stabilize=False"
                )
            offset = offset + squares.amax(1, keepdim=True)
        return torch.cat([(u - offset).exp(), (-u - offset).exp()], -1)


class GeneralizedRandomFeatures(RandomFourierFeatures):
    """kernel_fn(omega^T x): the kernel E f(w.q) f(w.k) of any function f.

    Args:
        n_dims: number of features; None means query_dimensions.
        kernel_fn: the function f. Other arguments are as in ``RandomFourierFeatures``.

    References:
        Choromanski et al. 2020 (2009.14794), section 2.2.
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
        # Twice, because the number of columns is half of n_dims.
        size = 2 * (query_dimensions if n_dims is None else n_dims)
        super().__init__(query_dimensions, size, softmax_temp, orthogonal, redraw, deterministic_eval)
        self.kernel_fn = kernel_fn

    def forward(self, x: Tensor) -> Tensor:
        """Return features: (..., E) -> (..., n_dims)."""
        _, u = self._project(x)
        return self.kernel_fn(u)
