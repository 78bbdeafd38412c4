"""Forecasts of several hours at once: a small Informer around any attention, and simple baselines."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan._utils import spec
from longspan.attention import build
from longspan.models.config import StackConfig
from longspan.models.stacks import Stack
from longspan.modules.sinusoidal import sinusoid

DAY = 24
# Validation selects one of these; each is multiplied by the number of examples.
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)


class Embedding(nn.Module):
    """Numbers of an hour to a vector: a convolution over three hours, the hour's place and its date.

    values (B,N,C), times (B,N,4) -> (B,N,dim). Source: Zhou et al. 2021 (2012.07436), appendix B.
    """

    def __init__(self, channels: int, dim: int):
        super().__init__()
        self.dim = dim
        self.values = nn.Conv1d(channels, dim, 3, padding=1, padding_mode="circular", bias=False)
        self.times = nn.Linear(4, dim, bias=False)

    def forward(self, values: Tensor, times: Tensor) -> Tensor:
        """Apply the model; the class documents the shapes."""
        at = torch.arange(values.shape[1], device=values.device)[None]
        return self.values(values.mT).mT + self.times(times) + sinusoid(at, self.dim, values.dtype)


class Distilling(nn.Module):
    """Half as many vectors: a convolution over three, ELU, and the largest of three at every other place.

    x (B,N,dim) -> (B,ceil(N/2),dim). Source: Zhou et al. 2021 (2012.07436), eq. 5.
    """

    def __init__(self, dim: int):
        super().__init__()
        self.convolution = nn.Conv1d(dim, dim, 3, padding=1, padding_mode="circular")

    def forward(self, x: Tensor) -> Tensor:
        """Apply the model; the class documents the shapes."""
        return F.max_pool1d(F.elu(self.convolution(x.mT)), 3, 2, 1).mT


class Forecaster(nn.Module):
    """An encoder of the known hours, and a decoder that predicts all hours in one pass (Zhou et al. 2021, figure 2).

    ``forward(known, times, label)``: known (B,reads,C), times (B,reads+horizon,4) -> (B,horizon,C). The encoder has
    ``depth`` blocks, each but the last followed by distilling, and sees its input in both directions, unless the
    attention has the causal form alone. The decoder's one block reads the last ``label`` known hours and zeros for
    those to come, causally, and the encoder by softmax attention.

    Raises ValueError for an attention that cannot be built and sizes that do not fit each other.
    """

    def __init__(self, attention: str, channels: int, *, dim: int, heads: int, depth: int, feedforward: int):
        super().__init__()
        config = StackConfig(dim=dim, depth=1, heads=heads, attention=attention, feedforward=feedforward)
        causal = not sees_both_ways(attention, dim, heads)
        self.source, self.target = Embedding(channels, dim), Embedding(channels, dim)
        self.encoder = nn.ModuleList(Stack(config, causal=causal) for _ in range(depth))
        self.distilling = nn.ModuleList(Distilling(dim) for _ in range(depth - 1))
        self.decoder = Stack(config, cross="softmax")
        self.head = nn.Linear(dim, channels)

    def forward(self, known: Tensor, times: Tensor, label: int) -> Tensor:
        """Apply the model; the class documents the shapes."""
        reads = known.shape[1]
        horizon = times.shape[1] - reads
        x = self.source(known, times[:, :reads])
        for i, stack in enumerate(self.encoder):
            x, _ = stack(x)
            if i < len(self.distilling):
                x = self.distilling[i](x)
        begun = F.pad(known[:, reads - label :], (0, 0, 0, horizon))
        y, _ = self.decoder(self.target(begun, times[:, reads - label :]), context=x)
        return self.head(y[:, label:])


def sees_both_ways(attention: str, dim: int, heads: int) -> bool:
    """Whether an attention has a bidirectional form. Raises ValueError for a spec that cannot be built."""
    (one,) = spec.split(attention)
    return "bidirectional" in type(build(one, dim, heads)).directions


def last_value(known: Tensor, horizon: int) -> Tensor:
    """known (B,reads,C) -> its last hour, repeated (B,horizon,C)."""
    return known[:, -1:].expand(-1, horizon, -1)


def last_day(known: Tensor, horizon: int) -> Tensor:
    """known (B,reads,C) -> its last 24 hours or fewer, repeated (B,horizon,C)."""
    day = known[:, -DAY:]
    return day[:, torch.arange(horizon) % day.shape[1]]


class Ridge:
    """A linear map from the hours that are read to those to come, the same for every series, by least squares.

    The last value is subtracted and added again, so the map predicts changes; there is a constant term.
    It minimizes the squared error over all windows of the training part plus ``penalty`` times their number times the
    squared weights. Source: Zeng et al. 2022 (2205.13504), section 4, NLinear, there trained by gradient descent.
    """

    def __init__(self, values: Tensor, begins: range, reads: int, horizon: int):
        """values (T,C), the hours at which forecasts begin."""
        self.reads, self.horizon, self.count = reads, horizon, 0
        self.gram = torch.zeros(reads + 1, reads + 1, dtype=torch.float64)
        self.moment = torch.zeros(reads + 1, horizon, dtype=torch.float64)
        first, size = begins[0] - reads, reads + horizon
        # A series at a time: all windows of all of them would be gigabytes.
        for one in values[first : begins[-1] + horizon].double().T:
            windows = one.unfold(0, size, 1)
            last = windows[:, reads - 1 : reads]
            x = torch.cat([windows[:, :reads] - last, torch.ones_like(last)], 1)
            self.gram += x.T @ x
            self.moment += x.T @ (windows[:, reads:] - last)
            self.count += len(x)

    def weights(self, penalty: float) -> Tensor:
        """(reads+1,horizon) float64; the constant, which has no penalty, comes last."""
        added = torch.full((self.reads + 1,), penalty * self.count, dtype=torch.float64)
        added[-1] = 0.0
        # The last value minus itself is zero, so without a penalty its weight would be arbitrary.
        added[self.reads - 1] += 1.0
        return torch.linalg.solve(self.gram + added.diag(), self.moment)

    @staticmethod
    def foretold(weights: Tensor, known: Tensor) -> Tensor:
        """known (B,reads,C) -> (B,horizon,C)."""
        last = known[:, -1:]
        x = F.pad((known - last).mT, (0, 1), value=1.0)  # (B,C,reads+1)
        return (x @ weights.to(x.dtype)).mT + last
