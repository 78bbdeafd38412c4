"""Resampling by a windowed sinc, also streaming."""

import math

import torch
from torch import Tensor

ZEROS = 16  # zeros of the sinc on each side
ROOM = 0.95  # end of the pass band, as a part of half the lower rate
PHASES = 256  # rows of the weight table computed at a time


class Resampler:
    """Resample from ``source`` to ``target`` samples per second, the same for any cut into calls.

    >>> import torch
    >>> resampler = Resampler(16000, 8000)
    >>> heard = torch.cat([resampler.feed(torch.zeros(90)), resampler.feed(torch.zeros(70)), resampler.finish()])
    >>> len(heard)
    80

    Output m is the sum of the samples around the time m / target, weighted by a sinc with the bandwidth of the
    lower rate in a Hann window of ``ZEROS`` of its zeros on each side (Smith, Digital Audio Resampling, sections
    "theory" and "implementation"). Before the first and after the last sample there is silence.

    Raises ValueError for rates below 1.
    """

    def __init__(self, source: int, target: int):
        if source < 1 or target < 1:
            raise ValueError(f"source={source} and target={target} samples per second must be at least 1")
        common = math.gcd(source, target)
        self.up, self.down = target // common, source // common
        self.same = source == target
        self.half = math.ceil(ZEROS * max(1.0, source / target))
        self.band = ROOM * min(1.0, target / source)
        # A table row for each of up to ``target`` phases, a few at a time, as they are made in double precision.
        self.weights = torch.cat([self._weights(phases) for phases in torch.arange(self.up).split(PHASES)])
        self.kept = torch.zeros(self.half - 1)  # the samples that are still needed
        self.first = 1 - self.half  # the number of the first of them
        self.read = self.made = 0

    def feed(self, samples: Tensor) -> Tensor:
        """Read samples (N,); return all outputs (M,) that are known now."""
        self.read += len(samples)
        if self.same:
            return samples
        self.kept = torch.cat([self.kept, samples])
        # An output whose time lies in [t, t+1) reads up to sample t + half.
        seen = self.read - self.half
        return self._until(-(-seen * self.up // self.down) if seen > 0 else 0)

    def finish(self) -> Tensor:
        """The remaining outputs; silence follows the last sample."""
        if self.same:
            return self.kept[:0]
        self.kept = torch.cat([self.kept, torch.zeros(self.half + 1)])
        return self._until(-(-self.read * self.up // self.down))

    def _weights(self, phases: Tensor) -> Tensor:
        """Weights (P, 2 half) of the samples -half+1 ... half around times that lie phase / up after sample 0."""
        time = torch.arange(-self.half + 1, self.half + 1) - phases[:, None] / self.up
        window = 0.5 + 0.5 * torch.cos(math.pi * (time / self.half).clamp(-1, 1).double())
        weights = self.band * torch.special.sinc(self.band * time.double()) * window
        return (weights / weights.sum(1, keepdim=True)).float()

    def _until(self, count: int) -> Tensor:
        """The outputs before number ``count``."""
        if count <= self.made:
            return self.kept[:0]
        place = torch.arange(self.made, count) * self.down
        begin = place // self.up - self.half + 1 - self.first
        rows = self.kept.unfold(0, 2 * self.half, 1)[begin]  # (M, 2 half)
        self.made = count
        needed = count * self.down // self.up - self.half + 1
        self.kept, self.first = self.kept[needed - self.first :], needed
        return (rows * self.weights[place % self.up]).sum(1)


def resampled(samples: Tensor, source: int, target: int) -> Tensor:
    """Resample a whole recording (N,) to (M,), where M = ceil(N target / source)."""
    resampler = Resampler(source, target)
    return torch.cat([resampler.feed(samples), resampler.finish()])
