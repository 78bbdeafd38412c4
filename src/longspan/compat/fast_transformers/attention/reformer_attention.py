"""Softmax attention inside chunks of tokens that are sorted by random hashes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention_registry import AttentionRegistry, Bool, Int, Optional
from ..events import EventDispatcher
from ..masking import Masks, keys_of
from .attention_layer import SequenceAttention
from .full_attention import SOFTMAX_PARAMETERS, Softmax


class ReformerAttention(Softmax, SequenceAttention):
    """Each query sees the tokens of its chunk and of the previous one, after sorting by a random hash.

    Keys are the queries, normalized to length 1; ``keys`` are ignored. In each round the hash is the nearest of random
    directions and their opposites. All heads share the directions, and every call draws new ones. Tokens of one chunk
    see each other whatever their hashes are. The outputs of the rounds are averaged. A query that sees no key gets
    zero.

    Under a causal mask it leaks: later tokens decide where a chunk begins. ``longspan.build("reformer(...)")`` is
    another mechanism, strictly causal and the same in every call.

    Args:
        chunk_size: tokens of a chunk.
        bits: number of random directions.
        rounds: number of rounds.
        masked: a query sees itself only if it sees nothing else.
        softmax_temp: factor of the products; None means 1 / sqrt(E).
        attention_dropout: probability of dropout of the weights.
        event_dispatcher: a dispatcher, or its name.

    Raises:
        ValueError: ``chunk_size``, ``bits`` or ``rounds`` is below one.
    """

    def __init__(
        self,
        chunk_size: int = 32,
        bits: int = 8,
        rounds: int = 4,
        masked: bool = False,
        softmax_temp: float | None = None,
        attention_dropout: float = 0.1,
        event_dispatcher: str | EventDispatcher = "",
    ):
        super().__init__(softmax_temp, attention_dropout, event_dispatcher)
        for name, value in (("chunk_size", chunk_size), ("bits", bits), ("rounds", rounds)):
            if value < 1:
                raise ValueError(f"{name}={value} must be at least 1")
        self.chunk_size, self.bits, self.rounds, self.masked = chunk_size, bits, rounds, masked

    def compute(self, queries: Tensor, keys: Tensor, values: Tensor, masks: Masks) -> Tensor:
        """Return (N,L,H,D) for queries and keys (N,L,H,E) and values (N,L,H,D).

        Raises:
            ValueError: the numbers of queries and keys differ.
        """
        if keys.shape[1] != queries.shape[1]:
            raise ValueError(f"{queries.shape[1]} queries and {keys.shape[1]} keys: reformer needs equal numbers")
        if not values.numel():
            return torch.zeros_like(values)
        k = F.normalize(queries, dim=-1)
        real = keys_of(masks.keys)
        allowed = None if masks.attention.all_ones else masks.attention.bool_matrix
        q, k, v = (x.transpose(1, 2) for x in (queries, k, values))
        out = torch.zeros_like(v)
        for _ in range(self.rounds):
            out = out + self._round(q, k, v, self._order(k, real), allowed, real) / self.rounds
        return out.transpose(1, 2).contiguous()

    def _order(self, k: Tensor, real: Tensor | None) -> Tensor:
        """Sort tokens by a new random hash, and then by position: k (N,H,L,E) -> (N,H,L)."""
        planes = torch.randn(self.bits, k.shape[-1], dtype=k.dtype, device=k.device)
        near = k.detach() @ planes.mT
        found = torch.cat([near, -near], -1).argmax(-1)
        if real is not None:
            # Padding comes last, so that it does not shift other chunks.
            found = found.masked_fill(~real[:, None], 2 * self.bits)
        return found.argsort(dim=-1, stable=True)

    def _round(self, q, k, v, order: Tensor, allowed: Tensor | None, real: Tensor | None) -> Tensor:
        batch, heads, length = order.shape
        size = min(self.chunk_size, length)
        chunks = -(-length // size)
        own = F.pad(order, (0, chunks * size - length), value=-1).unflatten(-1, (chunks, size))  # (N,H,C,m)
        near = torch.cat([F.pad(own[:, :, :-1], (0, 0, 1, 0), value=-1), own], -1)  # (N,H,C,2m)
        i, j = own.clamp(min=0), near.clamp(min=0)
        seen = (near >= 0)[..., None, :].expand(*own.shape, -1)
        if allowed is not None:
            seen = seen & allowed[i[..., :, None], j[..., None, :]]
        if real is not None:
            rows = torch.arange(batch, device=q.device)[:, None, None, None]
            seen = seen & real[rows, j][..., None, :]
        if self.masked:
            itself = i[..., :, None] == j[..., None, :]
            others = seen & ~itself
            seen = others | (seen & ~others.any(-1, keepdim=True))
        q, k, v = (_take(x, at) for x, at in ((q, i), (k, j), (v, j)))
        out = self.read(q, k, v, seen.flatten(0, 1)).unflatten(0, (batch, heads)).flatten(2, 3)[:, :, :length]
        index = order[..., None].expand(-1, -1, -1, out.shape[-1])
        return torch.zeros_like(out).scatter(2, index, out)


def _take(x: Tensor, at: Tensor) -> Tensor:
    """Take rows of x (N,H,L,E) at (N,H,C,m) -> (N H,C,m,E)."""
    index = at.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index).unflatten(2, at.shape[2:]).flatten(0, 1)


AttentionRegistry.register(
    "reformer",
    ReformerAttention,
    [
        *SOFTMAX_PARAMETERS,
        ("chunk_size", Optional(Int, 32)),
        ("bits", Optional(Int, 63)),
        ("rounds", Optional(Int, 4)),
        ("masked", Optional(Bool, False)),
    ],
)
