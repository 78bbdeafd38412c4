"""The decoder: predicts tokens, in parallel or one by one."""

from typing import Any, NamedTuple, Never, cast

import torch
from torch import Tensor, nn

from .._utils.aliases import refuse
from ..ops.cross_entropy import linear_cross_entropy
from ..states.journal import Journal
from . import likelihood
from .config import DecoderConfig
from .embedding import Embedding, Generator, TiedHead, check_position, check_tokens, initialize, outputs_of
from .stacks import Stack, check_fits_in_memory

LARGE = 2**27  # outputs that are 0.5 GiB in float32


class DecoderState(NamedTuple):
    """The state of a decoder, and of the target side of an encoder-decoder."""

    position: Tensor  # (B,) int64, tokens read so far, the start token included
    layers: tuple  # one state per block


class Decoder(Generator):
    """Predicts each token of a sequence from the ones before it; trains in parallel, generates as an RNN.

    ``outputs, state = decoder(tokens, state)`` maps tokens (B,N) to the parameters (B,N,likelihood.size) of the
    distributions of the next tokens. The start token is ``vocab``; ``shift`` puts it in front.

    Args:
        config: Sizes, attention, positions and likelihood.

    Raises:
        ValueError: For a spec that cannot be built, and weights that do not fit into memory.

    Example:
        >>> import torch, longspan
        >>> model = longspan.Decoder(longspan.DecoderConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
        >>> tokens = torch.tensor([[3, 1, 4, 1]])
        >>> outputs, _ = model(model.shift(tokens))  # each output predicts the token at its place
        >>> model.likelihood.log_prob(outputs, tokens).shape
        torch.Size([1, 4])
    """

    tokenizer = ""
    """content of the tokenizer.json of its tokens, which checkpoints keep; "" for a model without a tokenizer"""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig):
        super().__init__()
        check_fits_in_memory(config, Decoder)
        self.config = config
        self.likelihood = likelihood.build(config.likelihood, config.vocab)
        self.embedding = Embedding(config.vocab + 1, config)
        self.stack = Stack(config, positions=config.positions)
        # Always an nn.Embedding here; for vectors it would be an nn.Identity.
        tokens = cast(nn.Embedding, self.embedding.tokens)
        self.head = TiedHead(tokens) if config.tied else nn.Linear(config.dim, self.likelihood.size)
        initialize(self, config.depth)

    def init_state(self, batch: int, capacity: int | None = None) -> DecoderState:
        """Return the state before the start token; ``capacity`` is that of ``Attention.init_state``."""
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
        targets: Tensor | None = None,
        record: dict | None = None,
        donate: bool = False,
        **unknown: Never,
    ) -> tuple[Tensor, DecoderState | None]:
        """Read tokens, from the start or after a state.

        Args:
            tokens: (B,N) int64; ``vocab`` is the start token.
            state: The state before these tokens, or None for whole sequences.
            mask: (B,N) bool, True on real tokens.
            segments: (B,N) int64, the sequence of each token in a packed row.
            prefix: (B,) int64, the number of first tokens that see each other, counting the start token. All outputs of
                the prefix but the last have seen their targets, so leave them out of the loss.
            targets: (B,N) int64. The result is then the log-probability (B,N) of each in nats, in place of the outputs,
                of which only a part is in memory at a time if they are many.
            record: Filled as by ``Stack``.
            donate: Allow the state to be overwritten.

        Returns:
            Outputs (B,N,likelihood.size), and the next state, None without a state.

        Raises:
            ValueError: For tokens and targets of another dtype or out of range, a position beyond the table of learned
                positions, and arguments that the attentions do not accept.
        """
        if unknown:
            refuse("Decoder", unknown, ("tokens", "state", "mask", "segments", "prefix", "targets", "record", "donate"))
        check_tokens(tokens, self.start, mask, segments)
        if isinstance(state, Journal):
            given = {"mask": mask, "segments": segments, "prefix": prefix, "targets": targets, "record": record}
            given["donate"] = donate or None
            return state.read(self, tokens, given)
        if state is not None and not isinstance(state, DecoderState):
            raise ValueError(f"state must be a DecoderState, not {type(state).__name__}")
        position, layers = state if state is not None else (None, None)
        if position is not None:
            check_position(position, tokens)
        x, end = self.embedding(tokens, position, mask=mask, segments=segments)
        x, layers = self.stack(x, layers, mask=mask, segments=segments, prefix=prefix, record=record, donate=donate)
        found = outputs_of(self.head, x) if targets is None else self._log_prob(x, targets)
        return found, None if layers is None else DecoderState(end, layers)

    def _log_prob(self, x: Tensor, targets: Tensor) -> Tensor:
        weight: Any = self.head.weight
        # FSDP2 shards the weights of a layer, and gathers them when it runs.
        plain = (
            type(weight) in (Tensor, nn.Parameter) and not weight.is_meta and type(self.head) in (nn.Linear, TiedHead)
        )
        size, many = self.likelihood.size, self.likelihood.size * targets.numel() > LARGE
        if not (many and plain and isinstance(self.likelihood, likelihood.Categorical)):
            return self.likelihood.log_prob(outputs_of(self.head, x), targets)
        self.likelihood.check_targets(targets, x.shape[:-1])
        bias: Any = getattr(self.head, "bias", None)
        return -linear_cross_entropy(x, weight[:size], targets, bias, reduction="none")
