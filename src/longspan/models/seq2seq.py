"""The encoder-decoder: an encoder of the source, and a decoder of the target that reads it by cross attention."""

from typing import Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.aliases import refuse
from . import likelihood
from .config import EncoderConfig, Seq2SeqConfig
from .decoder import DecoderState
from .embedding import Embedding, Generator, check_position, check_tokens, initialize, outputs_of
from .stacks import Stack, check_fits_in_memory


class Seq2Seq(Generator):
    """Predicts the target of a source; trains in parallel, generates as an RNN.

    ``outputs = model(source, tokens)`` maps source (B,M) and tokens (B,N) to the parameters (B,N,likelihood.size) of
    the distributions of the next tokens. The start token of the target is ``vocab``. To decode token by token,
    ``state = model.init_state(source)`` reads the source once, and ``outputs, state = model.step(tokens, state)``
    continues. The state contains what the cross attentions need from the source: keys and values, or a sum.

    Args:
        config: Sizes, attentions, positions and likelihood.

    Raises:
        ValueError: For a spec that cannot be built, a cross attention without ``context=``, and weights that do not fit
            into memory.

    Example:
        >>> import torch, longspan
        >>> model = longspan.Seq2Seq(longspan.Seq2SeqConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
        >>> source, target = torch.tensor([[3, 1, 4]]), torch.tensor([[1, 4]])
        >>> outputs = model(source, model.shift(target))
        >>> model.likelihood.log_prob(outputs, target).shape
        torch.Size([1, 2])

    References:
        Vaswani et al. 2017 (1706.03762), section 3.
    """

    config: Seq2SeqConfig

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        check_fits_in_memory(config, Seq2Seq)
        self.config = config
        self.likelihood = likelihood.build(config.likelihood, config.vocab)
        self.embedding = Embedding(config.vocab + 1, config)
        shared = not config.source_vocab
        # The last row of a shared table is the start token, which does not occur in sources.
        self.source_embedding = self.embedding if shared else Embedding(config.source_vocab, config)
        self.encoder = Stack(_encoder(config), causal=False, positions=config.positions)
        self.stack = Stack(config, positions=config.positions, cross=config.cross_attention)
        if not config.tied:
            self.head = nn.Linear(config.dim, self.likelihood.size)
        initialize(self, config.depth)

    def encode(self, source: Tensor, *, mask: Tensor | None = None, record: dict | None = None) -> Tensor:
        """Encode a source.

        Args:
            source: (B,M) int64.
            mask: (B,M) bool, True on real tokens.
            record: Filled as by ``Stack``.

        Returns:
            Features (B,M,dim), 0 on masked tokens.

        Raises:
            ValueError: For tokens of another dtype or out of range.
        """
        check_tokens(source, (self.config.source_vocab or self.config.vocab) - 1, mask)
        x, _ = self.source_embedding(source, mask=mask)
        return self.encoder(x, mask=mask, record=record)[0]

    def init_state(
        self, source: Tensor, *, source_mask: Tensor | None = None, capacity: int | None = None
    ) -> DecoderState:
        """Read the source and return the state before the start token.

        Args:
            source: (B,M) int64.
            source_mask: (B,M) bool, True on real tokens.
            capacity: As in ``Attention.init_state``.

        Raises:
            ValueError: For tokens of another dtype or out of range.
        """
        context = self.encode(source, mask=source_mask)
        layers = self.stack.init_state(len(source), capacity, context=context, context_mask=source_mask)
        return DecoderState(torch.zeros(len(source), dtype=torch.long, device=self.device), layers)

    def step(
        self, tokens: Tensor, state: DecoderState, *, mask: Tensor | None = None, donate: bool = False
    ) -> tuple[Tensor, DecoderState]:
        """Read the next tokens of the target.

        Args:
            tokens: (B,N) int64.
            state: The state of ``init_state`` or of an earlier step.
            mask: (B,N) bool, True on real tokens.
            donate: Allow the state to be overwritten.

        Returns:
            Outputs (B,N,likelihood.size) and the next state.

        Raises:
            ValueError: For a state of another type, and tokens of another dtype or out of range.
        """
        if not isinstance(state, DecoderState):
            raise ValueError(f"state must be a DecoderState, as init_state(source) returns, not {type(state).__name__}")
        check_tokens(tokens, self.start, mask)
        check_position(state.position, tokens)
        x, end = self.embedding(tokens, state.position, mask=mask)
        x, layers = self.stack(x, state.layers, mask=mask, donate=donate)
        return self._outputs(x), DecoderState(end, layers)

    def forward(
        self,
        source: Tensor,
        tokens: Tensor,
        *,
        source_mask: Tensor | None = None,
        mask: Tensor | None = None,
        record: dict | None = None,
        **unknown: Never,
    ) -> Tensor:
        """Map a source and the inputs of a target to outputs.

        Args:
            source: (B,M) int64.
            tokens: (B,N) int64, see ``shift``.
            source_mask: (B,M) bool, True on real tokens.
            mask: (B,N) bool, True on real tokens.
            record: Gets ``encoder`` and ``decoder``, the records of both stacks, and the sum of their penalties.

        Returns:
            Outputs (B,N,likelihood.size).

        Raises:
            ValueError: For tokens of another dtype or out of range.
        """
        if unknown:
            refuse("Seq2Seq", unknown, ("source", "tokens", "source_mask", "mask", "record"))
        records = [None if record is None else dict(record) for _ in range(2)]
        context = self.encode(source, mask=source_mask, record=records[0])
        check_tokens(tokens, self.start, mask)
        x, _ = self.embedding(tokens, mask=mask)
        x, _ = self.stack(x, mask=mask, context=context, context_mask=source_mask, record=records[1])
        if record is not None:
            record.clear()
            record.update(encoder=records[0], decoder=records[1])
            if penalties := [one["penalty"] for one in records if one and "penalty" in one]:
                record["penalty"] = torch.stack(penalties).sum()
        return self._outputs(x)

    def loss(self, outputs: Tensor, targets: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats per real token, with the label smoothing of the config.

        Args:
            outputs: (B,N,likelihood.size).
            targets: (B,N) int64.
            mask: (B,N) bool, True on real tokens.

        Returns:
            A scalar.

        References:
            Szegedy et al. 2015 (1512.00567), section 7, for label smoothing.
        """
        nats = -self.likelihood.log_prob(outputs, targets)
        if self.config.smoothing:
            flat = -outputs.float().log_softmax(-1).mean(-1)
            nats = (1 - self.config.smoothing) * nats + self.config.smoothing * flat
        return nats.mean() if mask is None else nats.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)

    def _outputs(self, x: Tensor) -> Tensor:
        # Always an nn.Embedding here; for vectors it would be an nn.Identity without a weight.
        return F.linear(x, self.embedding.tokens.weight[:-1]) if self.config.tied else outputs_of(self.head, x)  # pyright: ignore[reportIndexIssue] (a Parameter)


def _encoder(config: Seq2SeqConfig) -> EncoderConfig:
    """The encoder's config: the sizes of the decoder, with separate attention and depth."""
    names = (
        "dim",
        "heads",
        "feedforward",
        "activation",
        "norm",
        "prenorm",
        "dropout",
        "residual",
        "checkpointing",
        "feedforward_chunk",
        "stack",
    )
    depth = config.encoder_depth or config.depth
    shared = {name: getattr(config, name) for name in names}
    return EncoderConfig(**shared, depth=depth, attention=config.encoder_attention)
