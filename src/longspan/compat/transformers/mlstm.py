"""xLSTM's matrix memory (mLSTM) as attention with a decay per head, and a column that adds up the keys."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.gated import decay_attention
from ...ops.tensors import upcast_half
from .packing import real, sequences
from .running import BEFORE, at_most_zero, largest


def forward(
    self,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    c_initial: Tensor | None = None,
    n_initial: Tensor | None = None,
    m_initial: Tensor | None = None,
    return_last_states: bool | None = None,
    mode: str | None = None,
):
    """Replace ``xLSTMBackend.forward``, in float32 or wider; packed rows stay separate, and padding is skipped.

    query and key (B,H,N,D), value (B,H,N,E), igate (B,H,N), the logarithms of the input gates, fgate (B,H,N), the
    forget gates before the sigmoid, and the first states: memory (B,H,D,E), sum of the keys (B,H,D), and the exponent
    that scales both (B,H,1) -> (B,H,N,E) in the query's dtype, and the last states in float32 or wider. Modes with
    "train" in the name return them only with ``return_last_states``. The configuration has the default of both.

    References:
        Beck et al. 2024 (2405.04517), eq. 19 to 27.
    """
    batch, heads, n, size = query.shape
    q, k, v, i, f = (upcast_half(t) for t in (query, key, value, igate, fgate))
    ids = sequences(batch, n)
    starts = None if ids is None else F.pad(ids[:, 1:] != ids[:, :-1], (1, 0))
    zero = i.new_zeros(batch, heads, 1)
    m0 = zero if m_initial is None else m_initial
    # The small constant in the denominator makes outputs depend on m, if little, so m has gradients.
    log_f, mask = F.logsigmoid(f.double()), real(batch, n)
    if mask is not None:
        i, log_f = i.masked_fill(~mask[:, None], BEFORE), log_f.masked_fill(~mask[:, None], 0.0)
    m, before = (t.mT for t in largest(i.mT, log_f.mT, m0.squeeze(-1), starts, 0.0))
    g = at_most_zero(log_f + before - m).to(v.dtype)
    scaled = (i.double() - m).to(v.dtype).exp()[..., None]
    state = None
    if c_initial is not None:
        n0 = v.new_zeros(batch, heads, size) if n_initial is None else n_initial
        state = torch.cat([c_initial, n0[..., None]], -1).to(v.dtype)
    o, state = decay_attention(
        q,
        k,
        torch.cat([v * scaled, scaled], -1),
        log_decay=g,
        scale=size**-0.5,
        segments=ids,
        return_state=True,
        state=state,
    )
    low = (-m).exp().to(v.dtype)[..., None]
    h = (o[..., :-1] / (torch.maximum(o[..., -1:].abs(), low) + self.config.eps)).to(query.dtype)
    mode = self.config.mode if mode is None else mode
    wanted = self.config.return_last_states if return_last_states is None else return_last_states
    if "train" in mode and not wanted:
        return h
    # The state is exact for the exponent as a cache rounds it.
    end = m[:, :, -1:].to(v.dtype if m_initial is None else m_initial.dtype)
    state = state * (m[:, :, -1:] - end.double()).exp().to(v.dtype)[..., None]
    return h, (state[..., :-1], state[..., -1], end.to(v.dtype))


def reordered(original: None) -> Callable:
    """Give ``xLSTMForCausalLM`` a method that reorders states for beam search, which the original refuses."""
    del original

    def _reorder_cache(self, cache, beam_idx: Tensor):
        cache.rnn_state = {
            layer: tuple(one.index_select(0, beam_idx.to(one.device)) for one in states)
            for layer, states in cache.rnn_state.items()
        }
        return cache

    return _reorder_cache
