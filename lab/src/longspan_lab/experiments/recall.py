"""Multi-query associative recall: key-value pairs, then the keys again, whose values must be predicted."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspan.models.config import StackConfig
from longspan.models.stacks import Stack
from longspan.modules.short_conv import ShortConvolution
from longspan.states import nbytes

CONVOLUTION = 4
# Exponent of the power law of the distances between queries and pairs, plus one.
POWER = 0.01


class Sequences(NamedTuple):
    """Tokens (B,N), and the target value of each, -1 for none: (B,N)."""

    tokens: Tensor
    targets: Tensor


def draw(count: int, pairs: int, length: int, vocab: int, generator: torch.Generator) -> Sequences:
    """k_1 v_1 ... k_n v_n, then every key again in another order, blanks (the token ``vocab``) in between.

    Keys are the lower half of the vocabulary, values the upper; none comes twice among the pairs. Behind the last value
    every second token may be a query: the g-th such place is drawn, without replacement, with a weight of g^(0.01 - 1).

    Source: Arora et al. 2023 (2312.04927), section 3 and figure 2; the places and the blanks are those of its code,
    github.com/HazyResearch/zoology, d88d6f5.
    """
    first, half = 2 * pairs, vocab // 2
    keys, others = torch.rand(2, count, half, generator=generator).argsort(-1)[..., :pairs]
    values = half + others
    gaps = torch.arange(1, (length - first) // 2 + 1, dtype=torch.float64) ** (POWER - 1)
    at = first + 2 * torch.multinomial(gaps.expand(count, -1), pairs, generator=generator)
    tokens = torch.full((count, length), vocab)
    tokens[:, :first] = torch.stack([keys, values], -1).flatten(1)
    tokens.scatter_(1, at, keys)
    return Sequences(tokens, torch.full((count, length), -1).scatter_(1, at, values))


class Recaller(nn.Module):
    """Embedding, one short convolution with a residual path around it, a stack, and the embedding again as output.

    tokens (B,N) in 0 ... vocab -> scores (B,N,vocab). There are no positions. The convolution lets a value's token see
    its key, for every mechanism alike, so that the stack only has to remember and one block is enough; published models
    have two, and convolutions in some mechanisms only. ``feedforward``: width of the feed-forward networks (0: 2 dim).

    Raises ValueError for specs and sizes that cannot be built.
    """

    def __init__(self, attention: str, dim: int, heads: int, depth: int, vocab: int, feedforward: int = 0):
        super().__init__()
        inner = feedforward or 2 * dim
        config = StackConfig(dim=dim, depth=depth, heads=heads, attention=attention, feedforward=inner)
        self.embedding = nn.Embedding(vocab + 1, dim)
        # So that scores, products with a normalized vector, begin at a deviation of one.
        nn.init.normal_(self.embedding.weight, std=dim**-0.5)
        self.convolution = ShortConvolution(dim, CONVOLUTION)
        self.stack = Stack(config)
        # Layers that choose tokens may learn how from a penalty alone.
        self.penalized = any(attention.penalty for attention in self.stack.attentions())

    def forward(self, tokens: Tensor, record: dict[str, Any] | None = None) -> Tensor:
        x = self.embedding(tokens)
        y, _ = self.stack(x + self.convolution(x)[0], record=record)
        return F.linear(y, self.embedding.weight[:-1])

    def state_bytes(self, length: int) -> int:
        """Bytes of the state after ``length`` tokens."""
        return nbytes((self.stack.init_state(1, length), self.convolution.start(1)))

    def loss(self, sequences: Sequences) -> Tensor:
        """Cross entropy of the target values, in nats, and the penalties of the layers."""
        asked = sequences.targets >= 0
        record: dict[str, Any] | None = {"penalty": None} if self.penalized else None
        nats = F.cross_entropy(self(sequences.tokens, record)[asked], sequences.targets[asked])
        return nats + record["penalty"] if record else nats

    @torch.no_grad()
    def accuracy(self, sequences: Sequences) -> float:
        """Share of the queries whose value has the highest score."""
        asked = sequences.targets >= 0
        return (self(sequences.tokens).argmax(-1) == sequences.targets)[asked].double().mean().item()
