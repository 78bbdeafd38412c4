"""The largest exponent so far, by which recurrences with exponential gates are scaled."""

import torch
from torch import Tensor

BEFORE = -1e38  # the largest exponent of no token


def largest(added: Tensor, decay: Tensor, before: Tensor, starts: Tensor | None, after: float) -> tuple[Tensor, Tensor]:
    r"""Return the running maximum $m_t = \max(m_{t-1} + f_t, i_t)$ without a loop over tokens.

    It is the cumulative maximum of $i_t - F_t$, plus $F_t$, with $F_t = f_1 + \dots + f_t$. Both grow with the length,
    and their sum does not, so they are in float64.

    Args:
        added: $i_t$, (B,N,...).
        decay: $f_t \le 0$, (B,N,...).
        before: $m_0$, (B,...).
        starts: (B,N) bool, the tokens that begin another sequence of a packed row, or None.
        after: $m$ before each of these tokens.

    Returns:
        $m_t$ and $m_{t-1}$, (B,N,...) in float64.
    """
    added, decay, before = added.double(), decay.double(), before.double()
    total = decay.cumsum(1)
    over = added - total
    # The value before the first token: m_0 + f_1 - F_1 = m_0.
    over = torch.cat([torch.maximum(over[:, :1], before[:, None]), over[:, 1:]], 1)
    if starts is None:
        m = over.cummax(1).values + total
        return m, torch.cat([before[:, None], m[:, :-1]], 1)
    first = starts.view(*starts.shape, *[1] * (added.dim() - 2))
    over = torch.where(first, torch.maximum(over, decay + after - total), over)
    # Each sequence is above all values of those before it.
    low, high = over.detach().amin(), over.detach().amax()
    step = first.cumsum(1) * (high - low + 1)
    m = (over + step).cummax(1).values - step + total
    previous = torch.cat([before[:, None], m[:, :-1]], 1)
    return m, torch.where(first, torch.full_like(previous, after), previous)


def at_most_zero(log_decay: Tensor) -> Tensor:
    """Return (...) without what rounding leaves above 0, with all of its gradient.

    Logarithms of decays are 0 up to rounding wherever the maximum stays the same. ``clamp`` has no gradient there.
    """
    return log_decay - log_decay.detach().clamp(min=0)
