"""Encoder and decoder: the encoder sees the whole source, and the decoder writes the target with it in view."""

from typing import Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._utils.aliases import refuse
from . import likelihood
from .config import EncoderConfig, Seq2SeqConfig
from .decoder import DecoderState
from .embedding import Embedding, check_position, check_tokens, initialise
from .stacks import Stack, check_fits_in_memory


class Seq2Seq(nn.Module):
    """Writes a target with a source in view; trains in parallel, generates as an RNN (Vaswani et al. 2017, section 3).

    >>> import torch, longspan
    >>> model = longspan.Seq2Seq(longspan.Seq2SeqConfig(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
    >>> source, target = torch.tensor([[3, 1, 4]]), torch.tensor([[1, 4]])
    >>> outputs = model(source, model.shift(target))
    >>> model.likelihood.log_prob(outputs, target).shape
    torch.Size([1, 2])

    ``outputs = model(source, tokens)``: source (B,M) and tokens (B,N) int64, where ``vocab`` itself is the start token
    of the target, to the parameters (B,N,likelihood.size) of the next token's distribution. To write token by token,
    ``state = model.init_state(source)`` reads the source once, and ``outputs, state = model.step(tokens, state)`` goes
    on: the cross attentions keep what they made of the source, be it its keys and values or a sum.

    Raises ValueError for a spec that cannot be built, a cross attention that reads no context, and weights that would
    take more memory than this machine has.
    """

    def __init__(self, config: Seq2SeqConfig):
        super().__init__()
        check_fits_in_memory(config, Seq2Seq)
        self.config = config
        self.likelihood = likelihood.build(config.likelihood, config.vocab)
        self.embedding = Embedding(config.vocab + 1, config)
        shared = not config.source_vocab
        # The shared table's last row is the start token, which no source has.
        self.source_embedding = self.embedding if shared else Embedding(config.source_vocab, config)
        self.encoder = Stack(_encoder(config), causal=False, positions=config.positions)
        self.stack = Stack(config, positions=config.positions, cross=config.cross_attention)
        if not config.tied:
            self.head = nn.Linear(config.dim, self.likelihood.size)
        initialise(self, config.depth)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.parameters()).device

    @property
    def start(self) -> int:
        """The start token, which comes before the target's first one."""
        return self.config.vocab

    def shift(self, tokens: Tensor) -> Tensor:
        """The inputs whose targets are ``tokens`` (B,N): the start token in front, the last token dropped."""
        return F.pad(tokens, (1, 0), value=self.start)[:, : tokens.shape[1]]

    def encode(self, source: Tensor, *, mask: Tensor | None = None, record: dict | None = None) -> Tensor:
        """source (B,M) int64, mask (B,M) -> its features (B,M,dim), 0 where nothing real is.

        Raises ValueError for tokens of a wrong kind or out of range.
        """
        check_tokens(source, (self.config.source_vocab or self.config.vocab) - 1, mask)
        x, _ = self.source_embedding(source, mask=mask)
        return self.encoder(x, mask=mask, record=record)[0]

    def init_state(
        self, source: Tensor, *, source_mask: Tensor | None = None, capacity: int | None = None
    ) -> DecoderState:
        """The state before the start token, with the source (B,M) read; ``capacity`` as in ``Attention.init_state``."""
        context = self.encode(source, mask=source_mask)
        layers = self.stack.init_state(len(source), capacity, context=context, context_mask=source_mask)
        return DecoderState(torch.zeros(len(source), dtype=torch.long, device=self.device), layers)

    def step(
        self, tokens: Tensor, state: DecoderState, *, mask: Tensor | None = None, donate: bool = False
    ) -> tuple[Tensor, DecoderState]:
        """Some more tokens (B,N) of the target -> outputs (B,N,size), state; see ``Decoder``.

        Raises ValueError for a state of another kind, and for tokens of a wrong kind or out of range.
        """
        if not isinstance(state, DecoderState):
            raise ValueError(f"the state of this model is what init_state(source) gives, not {type(state).__name__}")
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
        """See the class; the masks (B,M) and (B,N) are True on real tokens.

        ``record`` is asked of both stacks: it gets ``encoder`` and ``decoder``, what ``Stack`` tells, and the sum of
        their penalties. Raises ValueError for tokens of a wrong kind or out of range.
        """
        if unknown:
            refuse("Seq2Seq", unknown, ("source", "tokens", "source_mask", "mask", "record"))
        told = [None if record is None else dict(record) for _ in range(2)]
        context = self.encode(source, mask=source_mask, record=told[0])
        check_tokens(tokens, self.start, mask)
        x, _ = self.embedding(tokens, mask=mask)
        x, _ = self.stack(x, mask=mask, context=context, context_mask=source_mask, record=told[1])
        if record is not None:
            record.clear()
            record.update(encoder=told[0], decoder=told[1])
            if penalties := [one["penalty"] for one in told if one and "penalty" in one]:
                record["penalty"] = torch.stack(penalties).sum()
        return self._outputs(x)

    def loss(self, outputs: Tensor, targets: Tensor, *, mask: Tensor | None = None) -> Tensor:
        """Mean nats per real token, with the label smoothing of the config: outputs (B,N,size), targets (B,N) -> ().

        Source: Szegedy et al. 2015 (1512.00567), section 7.
        """
        nats = -self.likelihood.log_prob(outputs, targets)
        if self.config.smoothing:
            flat = -outputs.float().log_softmax(-1).mean(-1)
            nats = (1 - self.config.smoothing) * nats + self.config.smoothing * flat
        return nats.mean() if mask is None else nats.masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)

    def _outputs(self, x: Tensor) -> Tensor:
        # Tokens are embedded here; Embedding allows vectors, too, whose map has no weight.
        return F.linear(x, self.embedding.tokens.weight[:-1]) if self.config.tied else self.head(x)  # type: ignore[index]


def _encoder(config: Seq2SeqConfig) -> EncoderConfig:
    """The encoder's config: the decoder's sizes, attentions and a depth of its own."""
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
