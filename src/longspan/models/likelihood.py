"""Likelihoods: distributions of the next token, parametrized by the outputs of a model."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from .._utils import spec, typecheck
from .sampling import Sampling, SamplingOptions, keep_likely, values_of, with_sampling_options


@dataclass(frozen=True)
class Likelihood(ABC):
    """A distribution over the tokens 0 ... levels-1, parametrized by the last dimension of a model's outputs.

    Raises:
        ValueError: For fewer than two levels, and fields of another type than annotated.
    """

    levels: int

    def __post_init__(self):
        typecheck.check_fields(self)
        if self.levels < 2:
            raise ValueError(f"levels={self.levels!r} must be at least 2, e.g. 256 for bytes")

    @property
    @abstractmethod
    def size(self) -> int:
        """The number of outputs per token."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the log-probability of each target in nats; divide by ln 2 for bits.

        Args:
            outputs: (..., size), any floating-point dtype.
            targets: (...) int64.

        Returns:
            (...) in float32, or float64 for float64 outputs.

        Raises:
            ValueError: For outputs of another size, and targets of another shape, another dtype or outside
                0 ... levels-1. The range is not checked while the call is being compiled.
        """
        outputs = self._outputs(outputs)
        self.check_targets(targets, outputs.shape[:-1])
        return self._log_prob(outputs, targets)

    def check_targets(self, targets: Tensor, shape: tuple[int, ...]) -> None:
        """Raise ValueError unless targets are int64 of this shape, in 0 ... levels-1."""
        if targets.dtype != torch.int64 or targets.shape != shape:
            came = f"{targets.dtype} {tuple(targets.shape)}"
            raise ValueError(f"targets must be int64 {tuple(shape)}, one per row of outputs, not {came}")
        if not torch.compiler.is_compiling() and targets.numel():
            low, high = (int(end) for end in targets.aminmax())
            if low < 0 or high >= self.levels:
                raise ValueError(f"targets must be in 0 ... {self.levels - 1}, not {low} ... {high}")

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return the log-probabilities of all levels in nats: (..., size) -> (..., levels), at least float32.

        Raises:
            ValueError: For outputs of another size.
        """
        return self._table(self._outputs(outputs)).log_softmax(-1)

    @with_sampling_options
    def sample(
        self, outputs: Tensor, *, generator: torch.Generator | None = None, **options: Unpack[SamplingOptions]
    ) -> Tensor:
        """Sample one token per row.

        The options apply in the order temperature, top_k, top_p. Of equally probable levels, the lower one counts as
        more probable.

        Args:
            outputs: (..., size), any floating-point dtype.
            generator: On the device of ``outputs``; None uses the global generator of the device.
            **options: As in ``longspan.serving.Sampling``.

        Returns:
            (...) int64.

        Raises:
            ValueError: For outputs of another size, and an option out of range.

        References:
            Holtzman et al. 2020 (1904.09751), section 3.1, for top_p.
        """
        return self.draw(outputs, Sampling(**options), generator)

    def draw(self, outputs: Tensor, sampling: Sampling, generator: torch.Generator | None = None) -> Tensor:
        """Sample one token per row, as ``sample`` does with these options; their seed is not used."""
        outputs = self._outputs(outputs)
        if sampling.temperature == 0:
            return self._table(outputs).argmax(-1)
        restricts = sampling.restricts(self.levels)
        if sampling.temperature == 1 and not restricts:
            return self._sample(outputs, generator)
        scores = self._table(outputs)
        keep = None
        if restricts:
            ordered, order = scores.sort(dim=-1, descending=True, stable=True)
            kept, _ = keep_likely(ordered, sampling)
            keep = torch.zeros_like(kept).scatter(-1, order, kept)
        return _draw(scores, float(values_of(sampling, lambda way: way.temperature, scores)), keep, generator)

    def _outputs(self, outputs: Tensor) -> Tensor:
        if outputs.ndim < 1 or outputs.shape[-1] != self.size or not outputs.is_floating_point():
            raise ValueError(
                f"outputs of {self} must be floating-point (..., {self.size}), "
                f"not {outputs.dtype} {tuple(outputs.shape)}"
            )
        return outputs if outputs.dtype == torch.float64 else outputs.float()

    @abstractmethod
    def _log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """``log_prob`` after the checks."""

    @abstractmethod
    def _table(self, outputs: Tensor) -> Tensor:
        """Log-probabilities of all levels, up to a constant per row: ``(..., size) -> (..., levels)``."""

    @abstractmethod
    def _sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        """One exact draw per row, with every option off."""


@dataclass(frozen=True)
class Categorical(Likelihood):
    """One logit per level, without an order of the levels."""

    @property
    def size(self) -> int:
        return self.levels

    def _log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.log_softmax(-1).gather(-1, targets[..., None])[..., 0]

    def _table(self, outputs: Tensor) -> Tensor:
        return outputs

    def _sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return _draw(outputs, 1.0, None, generator)


@dataclass(frozen=True)
class Logistics(Likelihood):
    """A mixture of logistic densities with one bin per level, so that nearby levels share probability.

    Level x is at 2x/(levels-1) - 1 in [-1, 1]. Its bin reaches 1/(levels-1) to both sides, and the outermost bins reach
    to infinity, so that the probabilities sum to 1. The outputs of a token are the logits, the means and the log-scales
    of the ``mixtures`` components; log-scales are clamped to at least -7, as in the paper's code.

    Raises:
        ValueError: For mixtures < 1.

    References:
        Salimans et al. 2017 (1701.05517), section 2.1, eq. 2.
    """

    mixtures: int = 10

    def __post_init__(self):
        super().__post_init__()
        if self.mixtures < 1:
            raise ValueError(f"mixtures={self.mixtures!r} must be at least 1")

    @property
    def size(self) -> int:
        return 3 * self.mixtures

    def _split(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, means, log_scales = outputs.chunk(3, -1)
        # exp(-40) is far from underflow even in fp32, and a logistic that wide is flat over [-1, 1] to rounding.
        return logits.log_softmax(-1), means, log_scales.clamp(-7.0, 40.0)

    def _log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        log_weights, means, log_scales = self._split(outputs)
        half, targets = 1 / (self.levels - 1), targets[..., None]
        x = targets.to(outputs.dtype) * (2 * half) - 1
        rate = (-log_scales).exp()
        upper, lower = (x + half - means) * rate, (x - half - means) * rate
        # With sigma the logistic function, sigma(u) - sigma(l) = sigma(u) sigma(-l) (1 - exp(l - u)). This avoids the
        # difference of nearly equal numbers, and every branch below is finite with its gradient.
        below, above = F.logsigmoid(upper), F.logsigmoid(-lower)
        inside = below + above + (-torch.expm1(-2 * half * rate)).log()
        log_bins = torch.where(targets == 0, below, torch.where(targets == self.levels - 1, above, inside))
        return (log_weights + log_bins).logsumexp(-1)

    def _table(self, outputs: Tensor) -> Tensor:
        levels = torch.arange(self.levels, device=outputs.device).expand(*outputs.shape[:-1], self.levels)
        return self._log_prob(outputs[..., None, :], levels)

    def _sample(self, outputs: Tensor, generator: torch.Generator | None) -> Tensor:
        log_weights, means, log_scales = self._split(outputs)
        part = _draw(log_weights, 1.0, None, generator)[..., None]
        mean, log_scale = (values.gather(-1, part)[..., 0] for values in (means, log_scales))
        uniform = torch.rand(mean.shape, dtype=mean.dtype, device=mean.device, generator=generator)
        # The borders of the bins are half-way between levels, so rounding a sample of the density samples the bins. A
        # uniform of exactly 0 gives minus infinity, which is clamped to level 0.
        x = mean + log_scale.exp() * torch.logit(uniform)
        return ((x + 1) * ((self.levels - 1) / 2)).round().clamp(0, self.levels - 1).long()


LIKELIHOODS: Mapping[str, type[Likelihood]] = {"categorical": Categorical, "logistics": Logistics}


def build(text: str, levels: int) -> Likelihood:
    """Build the likelihood of a spec, ``"categorical"`` or ``"logistics(mixtures=10)"``, over ``levels`` levels.

    Raises:
        ValueError: For an unknown name or option, levels < 2, and mixtures < 1.

    Example:
        >>> build("logistics(mixtures=5)", 256).size
        15
    """
    made = spec.parse(text, {name: partial(kind, levels) for name, kind in LIKELIHOODS.items()})
    if not isinstance(made, Likelihood):
        raise ValueError(f"{text!r} is not a likelihood; known: {', '.join(sorted(LIKELIHOODS))}")
    return made


def _draw(scores: Tensor, temperature: float, keep: Tensor | None, generator: torch.Generator | None) -> Tensor:
    """Sample from softmax(scores / temperature) over the kept entries: ``(..., levels) -> (...)``."""
    # argmax(scores / T + Gumbel noise) is such a sample, and so is argmax(scores + T noise). The first cannot overflow
    # for large T, the second for small ones. The logarithm of an exponential variable is the negative of a Gumbel one.
    race = torch.empty_like(scores).exponential_(generator=generator)
    noise = race.clamp_(min=torch.finfo(race.dtype).tiny).log_()
    keys = scores / temperature - noise if temperature > 1 else scores - temperature * noise
    return (keys if keep is None else keys.masked_fill(~keep, -math.inf)).argmax(-1)
