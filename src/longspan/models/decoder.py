"""Models: a decoder that predicts tokens, an encoder that sees whole sequences, each around a stack of blocks."""

from typing import NamedTuple, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.aliases import refuse
from . import likelihood
from .config import DecoderConfig
from .embedding import Embedding, check_position, check_tokens, initialise
from .stacks import Stack, check_fits_in_memory


class DecoderState(NamedTuple):
    position: Tensor  # (B,) int64, tokens read so far, the start token included
    layers: tuple  # one state per block


class Decoder(nn.Module):
    """Predicts each token of a sequence from the ones before it; trains in parallel, generates as an RNN.

    >>> import torch, longspan
    >>> model = longspan.Decoder(longspan.DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
    >>> tokens = torch.tensor([[3, 1, 4, 1]])
    >>> outputs, _ = model(model.shift(tokens))  # each one about the token at its place
    >>> model.likelihood.log_prob(outputs, tokens).shape
    torch.Size([1, 4])

    ``outputs, state = decoder(tokens, state)``: tokens (B,N) int64, where ``vocab`` itself is the start token, to the
    parameters (B,N,likelihood.size) of the next token's distribution. Attention and state as in ``Stack``, and so is
    what building it raises.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        check_fits_in_memory(config, Decoder)
        self.config = config
        self.likelihood = likelihood.build(config.likelihood, config.vocab)
        self.embedding = Embedding(config.vocab + 1, config)
        self.stack = Stack(config, positions=config.positions)
        if not config.tied:
            self.head = nn.Linear(config.dim, self.likelihood.size)
        initialise(self, config.depth)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def start(self) -> int:
        """The start token, which comes before the first one."""
        return self.config.vocab

    def shift(self, tokens: Tensor) -> Tensor:
        """The inputs whose targets are ``tokens`` (B,N): the start token in front, the last token dropped."""
        return F.pad(tokens, (1, 0), value=self.start)[:, : tokens.shape[1]]

    def init_state(self, batch: int, capacity: int | None = None) -> DecoderState:
        """The state before the start token; ``capacity`` as in ``Attention.init_state``."""
        layers = self.stack.init_state(batch, capacity)
        return DecoderState(torch.zeros(batch, dtype=torch.long, device=self.device), layers)

    def forward(
        self,
        tokens: Tensor,
        state: DecoderState | None = None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        record: dict | None = None,
        donate: bool = False,
        **unknown: Never,
    ) -> tuple[Tensor, DecoderState | None]:
        """See the class; mask, segments, prefix and donate as in ``Attention.forward``, record as in ``Stack``.

        ``prefix`` counts the start token like any other. Its outputs but the last have seen the tokens that they
        predict, so they belong in no loss.

        Raises ValueError for tokens of a wrong kind or out of range, a position beyond a learned table, and whatever
        the attentions refuse.
        """
        if unknown:
            refuse("Decoder", unknown, ("tokens", "state", "mask", "segments", "prefix", "record", "donate"))
        check_tokens(tokens, self.start, mask, segments)
        if state is not None and not isinstance(state, DecoderState):
            raise ValueError(f"a decoder continues a DecoderState, not {type(state).__name__}")
        position, layers = state if state is not None else (None, None)
        if position is not None:
            check_position(position, tokens)
        x, end = self.embedding(tokens, position, mask=mask, segments=segments)
        x, layers = self.stack(x, layers, mask=mask, segments=segments, prefix=prefix, record=record, donate=donate)
        # Tokens are embedded here; Embedding allows vectors, too, whose map has no weight.
        outputs = F.linear(x, self.embedding.tokens.weight[:-1]) if self.config.tied else self.head(x)  # type: ignore[index]
        return outputs, None if layers is None else DecoderState(end, layers)
