"""Models: a decoder that predicts tokens, an encoder that sees whole sequences, each around a stack of blocks."""

from collections.abc import Sequence
from typing import NamedTuple, Never

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import likelihood
from .aliases import refuse
from .attention.arguments import check_mask, check_segments, check_x, real_segments
from .config import Config, EncoderConfig
from .layers import check_counts, sinusoid
from .ops.operands import check_stored, same_device
from .ops.tensors import positions, widen
from .positions import Learned, Sinusoidal, parse
from .stacks import Stack, afford


class Embedding(nn.Module):
    """Tokens to vectors, plus their positions (none, sinusoidal or learned; others are the attention's)."""

    def __init__(self, tokens: int, config: Config | EncoderConfig):
        super().__init__()
        self.positions, self.length = parse(config.positions), config.length
        self.tokens = nn.Embedding(tokens, config.dim) if tokens else nn.Identity()
        if isinstance(self.positions, Learned):
            self.table = nn.Embedding(config.length, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, start=None, *, mask=None, segments=None) -> tuple[Tensor, Tensor]:
        """tokens (B,N) or vectors (B,N,dim), start (B,) positions -> (B,N,dim), next positions (B,)."""
        # A masked token's id would be a border between its neighbours, and its position is nobody's.
        segments = None if segments is None else real_segments(segments, mask)
        at, end = positions(tokens, start, mask=mask, segments=segments)
        x = self.tokens(tokens)
        if isinstance(self.positions, Learned):
            at = at if mask is None else at.masked_fill(~mask, 0)
            if not torch.compiler.is_compiling() and at.numel() and (last := int(at.max())) >= self.length:
                raise ValueError(
                    f"position {last} is beyond the table of {self.length} learned positions; "
                    f"shorten the sequence, or train with a larger length= or with other positions"
                )
            x = x + self.table(at)
        elif isinstance(self.positions, Sinusoidal):
            kind = self.positions
            x = x + sinusoid(at, x.shape[-1], x.dtype, layout=kind.layout, base=kind.base)
        return self.dropout(x), end


class DecoderState(NamedTuple):
    position: Tensor  # (B,) int64, tokens read so far, the start token included
    layers: tuple  # one state per block


class Decoder(nn.Module):
    """Predicts each token of a sequence from the ones before it; trains in parallel, generates as an RNN.

    >>> import torch, longspan
    >>> model = longspan.Decoder(longspan.Config(dim=8, depth=2, heads=2, feedforward=16, vocab=5))
    >>> tokens = torch.tensor([[3, 1, 4, 1]])
    >>> outputs, _ = model(model.shift(tokens))  # each one about the token at its place
    >>> model.likelihood.log_prob(outputs, tokens).shape
    torch.Size([1, 4])

    ``outputs, state = decoder(tokens, state)``: tokens (B,N) int64, where ``vocab`` itself is the start token, to the
    parameters (B,N,likelihood.size) of the next token's distribution. Attention and state as in ``Stack``, and so is
    what building it raises.
    """

    def __init__(self, config: Config):
        super().__init__()
        afford(config, Decoder)
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
        outputs = F.linear(x, self.embedding.tokens.weight[:-1]) if self.config.tied else self.head(x)  # type: ignore
        return outputs, None if layers is None else DecoderState(end, layers)


class Classes(NamedTuple):
    """What a classifier says of texts."""

    labels: list[str]  # the likeliest one of each text
    probabilities: Tensor  # (B, labels), float32 at least


class Encoder(nn.Module):
    """Sees whole sequences: tokens (B,N) or vectors (B,N,dim) -> features (B,N,dim), or outputs of a linear head.

    >>> import torch, longspan
    >>> config = longspan.EncoderConfig(dim=8, depth=2, heads=2, feedforward=16, outputs=3, pool="mean")
    >>> longspan.Encoder(config)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 3])

    With ``pool="mean"`` the result is one per sequence, (B,dim) or (B,outputs): the mean over its real tokens;
    with ``pool="first"`` it is that of the first real token. With ``labels``, names of the outputs, it is a classifier:
    the outputs are logits, and ``classify`` reads texts. Building it raises what ``Stack`` raises.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        afford(config, Encoder)
        self.config = config
        self.embedding = Embedding(config.vocab, config)
        self.stack = Stack(config, causal=False, positions=config.positions)
        self.head = nn.Linear(config.dim, config.outputs) if config.outputs else nn.Identity()
        initialise(self, config.depth)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        record: dict | None = None,
        **unknown: Never,
    ) -> Tensor:
        """See the class; mask and segments as in ``Attention.forward``, record as in ``Stack``.

        Raises ValueError for input of a wrong kind.
        """
        if unknown:
            refuse("Encoder", unknown, ("x", "mask", "segments", "record"))
        if self.config.vocab:
            check_tokens(x, self.config.vocab - 1, mask, segments)
        else:
            check_x(self, self.config.dim, x)
            _check_own(x, mask, segments)
        if segments is not None and self.config.pool != "none":
            raise ValueError(f"pool={self.config.pool!r} gives one output per row, so it cannot serve packed segments=")
        x, _ = self.embedding(x, mask=mask, segments=segments)
        x, _ = self.stack(x, mask=mask, segments=segments, record=record)
        if self.config.pool != "none":
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
            if self.config.pool == "first":
                real = real & (real.cumsum(1) == 1)
            weights = real.to(x.dtype)
            x = (x * weights[..., None]).sum(1) / weights.sum(1, keepdim=True).clamp(min=1)
        return self.head(x)

    @torch.no_grad()
    def classify(self, texts: Sequence[str], *, length: int = 0, batch: int = 64) -> Classes:
        """The labels of ``texts``, by a classifier of UTF-8 bytes such as ``longspan train`` trains on ``labels:FILE``.

        >>> import longspan
        >>> sizes = {"dim": 8, "depth": 1, "heads": 2, "feedforward": 16}
        >>> config = longspan.EncoderConfig(**sizes, vocab=256, outputs=2, labels="bad good", pool="mean")
        >>> labels, probabilities = longspan.Encoder(config).eval().classify(["a fine film", "dull"])
        >>> len(labels), probabilities.shape
        (2, torch.Size([2, 2]))

        Returns the likeliest label of each text, and the probabilities (B, labels) in the order of ``config.labels``.
        ``length``: bytes of a text that are read; 0: all, or with learned positions as many as their table has. Pass
        the ``run.length`` of the training to read as much of a text as it did. ``batch``: texts per call, which changes
        speed and memory only.

        Raises ValueError for a model without labels, with one output per token or another vocabulary than bytes, for
        texts that are no strings or empty, for a negative length and a batch below 1.
        """
        config = self.config
        names = config.labels.split()
        if not names or config.pool == "none" or config.vocab != 256:
            raise ValueError(
                "classify needs a model of bytes with labels and one output per text: vocab=256, labels and "
                f"pool='mean' or 'first', not vocab={config.vocab}, labels={config.labels!r}, pool={config.pool!r}"
            )
        if isinstance(texts, str) or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("texts must be a list of strings that are not empty")
        if length < 0 or batch < 1:
            raise ValueError(f"length={length} must not be negative, and batch={batch} must be at least 1")
        if isinstance(self.embedding.positions, Learned):
            length = min(length or config.length, config.length)
        device = next(self.parameters()).device
        found = []
        for begin in range(0, len(texts), batch):
            rows = [torch.tensor(list(text.encode()[: length or None])) for text in texts[begin : begin + batch]]
            tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            mask = torch.arange(tokens.shape[1]) < torch.tensor([len(row) for row in rows])[:, None]
            found.append(widen(self(tokens.to(device), mask=mask.to(device))).softmax(-1))
        probabilities = torch.cat(found) if found else torch.zeros(0, len(names), device=device)
        return Classes([names[i] for i in probabilities.argmax(-1).tolist()], probabilities)


def check_tokens(tokens: Tensor, highest: int, mask: Tensor | None, segments: Tensor | None = None) -> None:
    """Raise ValueError unless tokens are int64 (B,N) in 0..highest, and mask and segments fit."""
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2:
        came = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be int64 (B, N), not {came}")
    _check_own(tokens, mask, segments)
    if torch.compiler.is_compiling() or not tokens.numel():
        return
    low, high = (int(t) for t in tokens.aminmax())
    if low < 0 or high > highest:
        raise ValueError(f"tokens run from {low} to {high}; this model knows 0 to {highest}")


def _check_own(x: Tensor, mask: Tensor | None, segments: Tensor | None) -> None:
    batch, n = x.shape[:2]
    if mask is not None:
        check_mask("mask", mask, (batch, n))
    if segments is not None:
        check_segments(segments, (batch, n))


def check_position(position: Tensor, tokens: Tensor) -> None:
    """Raise ValueError unless these are counts of tokens, int64 (B,), as a decoder's state has them."""
    batch = tokens.shape[0]
    if not isinstance(position, Tensor) or position.dtype != torch.int64 or tuple(position.shape) != (batch,):
        came = f"{position.dtype} {tuple(position.shape)}" if isinstance(position, Tensor) else type(position).__name__
        raise ValueError(f"the position of this decoder's state must be int64 {(batch,)}, not {came}")
    same_device(tokens=tokens, state=position)
    check_stored("the state", position)
    check_counts("position", position)


def initialise(model: nn.Module, depth: int) -> None:
    """Normal weights of deviation 0.02, smaller by sqrt(2 depth) where they write into the residual (GPT-2's rule)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            residual = name.endswith(("attention.out", "feedforward.contract"))
            nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if residual else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
