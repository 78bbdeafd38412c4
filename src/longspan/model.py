"""Models: a stack of blocks; a decoder that predicts tokens; an encoder that sees whole sequences."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import likelihood, spec, weights
from .attention import Attention
from .attention.arguments import check_mask, check_record, check_x, settle
from .attention.base import make
from .config import Config, EncoderConfig, StackConfig
from .layers import FeedForward, check_counts, norm, sinusoid
from .ops.operands import same_device
from .ops.tensors import positions

ROTARY_BASE = 10000.0


class Block(nn.Module):
    """Attention and a feed-forward network, each with a residual path around it (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: StackConfig, attention: Attention):
        super().__init__()
        self.prenorm = config.prenorm
        self.attention = attention
        self.feedforward = FeedForward(config.dim, config.feedforward, config.activation)
        self.norm1, self.norm2 = norm(config.norm, config.dim), norm(config.norm, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: Any = None, *, carry: Any = None, **arguments: Any) -> tuple[Tensor, Any, Any]:
        """x (B,N,dim), the attention's state, carry and arguments -> x (B,N,dim), state, carry.

        An attention that carries gets what the layer below handed on, or as the first one its own beginning.
        """
        read = self.norm1(x) if self.prenorm else x
        if not self.attention.carries:
            y, state = self.attention(read, state, **arguments)
        else:
            if carry is None:
                carry = self.attention.init_carry(read, arguments.get("mask"))
            y, state, carry = self.attention(read, state, carry=carry, **arguments)
        if self.prenorm:
            x = x + self.dropout(y)
            return x + self.dropout(self.feedforward(self.norm2(x))), state, carry
        x = self.norm1(x + self.dropout(y))
        return self.norm2(x + self.dropout(self.feedforward(x))), state, carry


class Stack(nn.Module):
    """``depth`` blocks, whose attentions are the config's specs tiled over the depth; the signature of an attention.

    >>> import torch, longspan
    >>> stack = longspan.Stack(longspan.StackConfig(dim=8, depth=3, heads=2, feedforward=16, attention="gla; softmax"))
    >>> [attention.name for attention in stack.attentions()]
    ['gla', 'softmax', 'gla']
    >>> y, state = stack(torch.randn(1, 5, 8), stack.init_state(1))
    >>> len(state)
    3

    ``y, state = stack(x, state, mask=, segments=, prefix=, record=, donate=)``: x (B,N,dim) -> y (B,N,dim); the state
    is the tuple of the layers' states. ``record`` asks every layer that takes one: it gets ``layers``, a dict for each
    layer, empty where that can tell nothing, and the sums of theirs: ``penalty``, where a mechanism has a loss of its
    own, and ``log_prob`` (B,), where one draws what it reads. ``rotary`` is the base of rotary positions for
    attentions whose spec gives none.

    Raises ValueError for a spec that cannot be built, for weights that would take more memory than this machine has,
    and for arguments that one of the attentions does not support.
    """

    def __init__(self, config: StackConfig, *, causal: bool = True, rotary: float = 0.0):
        super().__init__()
        _afford(config, lambda few: Stack(few, causal=causal, rotary=rotary))
        specs = spec.split(config.attention)
        self.dim, self.causal = config.dim, causal
        self.blocks = nn.ModuleList(
            Block(
                config,
                make(
                    specs[i % len(specs)],
                    config.dim,
                    config.heads,
                    causal=causal,
                    layer=i,
                    depth=config.depth,
                    rotary=rotary,
                ),
            )
            for i in range(config.depth)
        )
        self.norm = norm(config.norm, config.dim) if config.prenorm else nn.Identity()

    def attentions(self) -> list[Attention]:
        """The attention of each layer."""
        return [block.attention for block in self.blocks]  # type: ignore[misc]

    def init_state(self, batch: int, capacity: int | None = None) -> tuple:
        """The states before the first token; see ``Attention.init_state``."""
        return tuple(attention.init_state(batch, capacity) for attention in self.attentions())

    def forward(
        self,
        x: Tensor,
        state: tuple | None = None,
        *,
        mask: Tensor | None = None,
        segments: Tensor | None = None,
        prefix: Tensor | None = None,
        record: dict | None = None,
        donate: bool = False,
    ) -> tuple[Tensor, tuple | None]:
        """See the class; arguments as in ``Attention.forward``."""
        check_x(self, self.dim, x)
        if mask is not None:
            check_mask("mask", mask, tuple(x.shape[:2]))
        if state is not None and (not isinstance(state, tuple) or len(state) != len(self.blocks)):
            came = len(state) if isinstance(state, tuple) else type(state).__name__
            raise ValueError(f"the state of this stack is a tuple of {len(self.blocks)} states, not {came}")
        if record is not None:
            check_record(record)
        arguments = settle(self.attentions()[0], x, {"mask": mask, "segments": segments, "prefix": prefix})
        if mask is not None:
            # What a masked token holds must not go around the attentions either, by residuals into weights' gradients.
            x = x.masked_fill(~mask[..., None], 0.0)
        new, carries, layers = [], {}, []
        for i, block in enumerate(self.blocks):
            before, kind = None if state is None else state[i], block.attention.name  # type: ignore[union-attr]
            asked = dict(record) if record is not None and "record" in block.attention.takes else None  # type: ignore
            x, after, carry = block(x, before, carry=carries.get(kind), record=asked, donate=donate, **arguments)
            layers.append(asked or {})
            # What a layer hands on is for the next one of its own kind.
            carries[kind] = carry
            new.append(after)
        x = self.norm(x)
        if mask is not None:
            x = x.masked_fill(~mask[..., None], 0.0)
        if record is not None:
            record.clear()
            record["layers"] = layers
            for name in ("penalty", "log_prob"):
                if told := [layer[name] for layer in layers if name in layer]:
                    record[name] = torch.stack(told).sum(0)
        return x, None if state is None else tuple(new)


class Embedding(nn.Module):
    """Tokens to vectors, plus their positions (none, sinusoidal or learned; rotary ones are the attention's)."""

    def __init__(self, tokens: int, config: Config | EncoderConfig):
        super().__init__()
        self.kind, self.length = config.positions, config.length
        self.tokens = nn.Embedding(tokens, config.dim) if tokens else nn.Identity()
        if self.kind == "learned":
            self.table = nn.Embedding(config.length, config.dim)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, start=None, *, mask=None, segments=None) -> tuple[Tensor, Tensor]:
        """tokens (B,N) or vectors (B,N,dim), start (B,) positions -> (B,N,dim), next positions (B,)."""
        at, end = positions(tokens, start, mask=mask, segments=segments)
        x = self.tokens(tokens)
        if self.kind == "learned":
            if not torch.compiler.is_compiling() and at.numel() and (last := int(at.max())) >= self.length:
                raise ValueError(
                    f"position {last} is beyond the table of {self.length} learned positions; "
                    f"shorten the sequence, or train with a larger length= or with other positions"
                )
            x = x + self.table(at)
        elif self.kind == "sinusoidal":
            x = x + sinusoid(at, x.shape[-1], x.dtype)
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
        _afford(config, Decoder)
        self.config = config
        self.likelihood = likelihood.build(config.likelihood, config.vocab)
        self.embedding = Embedding(config.vocab + 1, config)
        self.stack = Stack(config, rotary=ROTARY_BASE if config.positions == "rotary" else 0.0)
        if not config.tied:
            self.head = nn.Linear(config.dim, self.likelihood.size)
        _initialise(self, config.depth)

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
    ) -> tuple[Tensor, DecoderState | None]:
        """See the class; mask, segments, prefix and donate as in ``Attention.forward``, record as in ``Stack``.

        ``prefix`` counts the start token like any other. Its outputs but the last have seen the tokens that they
        predict, so they belong in no loss.

        Raises ValueError for tokens of a wrong kind or out of range, a position beyond a learned table, and whatever
        the attentions refuse.
        """
        check_tokens(tokens, self.start, mask)
        if state is not None and not isinstance(state, DecoderState):
            raise ValueError(f"a decoder continues a DecoderState, not {type(state).__name__}")
        position, layers = state if state is not None else (None, None)
        if position is not None:
            _check_position(position, tokens)
        x, end = self.embedding(tokens, position, mask=mask, segments=segments)
        x, layers = self.stack(x, layers, mask=mask, segments=segments, prefix=prefix, record=record, donate=donate)
        outputs = F.linear(x, self.embedding.tokens.weight[:-1]) if self.config.tied else self.head(x)  # type: ignore
        return outputs, None if layers is None else DecoderState(end, layers)


class Encoder(nn.Module):
    """Sees whole sequences: tokens (B,N) or vectors (B,N,dim) -> features (B,N,dim), or outputs of a linear head.

    >>> import torch, longspan
    >>> config = longspan.EncoderConfig(dim=8, depth=2, heads=2, feedforward=16, outputs=3, pool="mean")
    >>> longspan.Encoder(config)(torch.randn(2, 5, 8)).shape
    torch.Size([2, 3])

    With ``pool="mean"`` the result is one per sequence, (B,dim) or (B,outputs): the mean over its real tokens.
    Building it raises what ``Stack`` raises.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        _afford(config, Encoder)
        self.config = config
        self.embedding = Embedding(config.vocab, config)
        self.stack = Stack(config, causal=False, rotary=ROTARY_BASE if config.positions == "rotary" else 0.0)
        self.head = nn.Linear(config.dim, config.outputs) if config.outputs else nn.Identity()
        _initialise(self, config.depth)

    def forward(
        self, x: Tensor, *, mask: Tensor | None = None, segments: Tensor | None = None, record: dict | None = None
    ) -> Tensor:
        """See the class; mask and segments as in ``Attention.forward``, record as in ``Stack``.

        Raises ValueError for input of a wrong kind.
        """
        if self.config.vocab:
            check_tokens(x, self.config.vocab - 1, mask)
        elif x.dim() != 3 or x.shape[-1] != self.config.dim:
            raise ValueError(f"vectors must be (B, N, {self.config.dim}), not {tuple(x.shape)}")
        if segments is not None and self.config.pool != "none":
            raise ValueError(f"pool={self.config.pool!r} gives one output per row, so it cannot serve packed segments=")
        x, _ = self.embedding(x, mask=mask, segments=segments)
        x, _ = self.stack(x, mask=mask, segments=segments, record=record)
        if self.config.pool == "mean":
            real = x.new_ones(x.shape[:2]) if mask is None else mask.to(x.dtype)
            x = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1)
        return self.head(x)


def check_tokens(tokens: Tensor, highest: int, mask: Tensor | None) -> None:
    """Raise ValueError unless tokens are int64 (B,N) in 0..highest and the mask fits."""
    if not isinstance(tokens, Tensor) or tokens.dtype != torch.int64 or tokens.dim() != 2:
        came = f"{tokens.dtype} {tuple(tokens.shape)}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"tokens must be int64 (B, N), not {came}")
    if mask is not None:
        check_mask("mask", mask, tuple(tokens.shape))
    if torch.compiler.is_compiling() or not tokens.numel():
        return
    low, high = (int(t) for t in tokens.aminmax())
    if low < 0 or high > highest:
        raise ValueError(f"tokens run from {low} to {high}; this model knows 0 to {highest}")


def weigh(make: Callable[[Any], nn.Module], config: StackConfig) -> int:
    """Bytes of the weights of a model, ``make(config)``, of which nothing is built but shapes."""
    # One round of the specs shows what all of them take.
    few = min(config.depth, len(spec.split(config.attention)))
    model = weights.shapes(lambda: make(replace(config, depth=few)))
    blocks: Any = getattr(model, "stack", model).blocks
    return weights.nbytes(model) + weights.nbytes(blocks) * (config.depth - few) // few


def _afford(config: StackConfig, make: Callable[[Any], nn.Module]) -> None:
    """Raise ValueError where a model's weights would take more memory than there is, before any of it is taken."""
    if weights.wanted():
        what = f"weights of dim={config.dim}, feedforward={config.feedforward}, depth={config.depth}"
        weights.afford(weigh(make, config), what)


def _check_position(position: Tensor, tokens: Tensor) -> None:
    """Raise ValueError unless these are counts of tokens, int64 (B,), as a decoder's state has them."""
    batch = len(tokens)
    if not isinstance(position, Tensor) or position.dtype != torch.int64 or tuple(position.shape) != (batch,):
        came = f"{position.dtype} {tuple(position.shape)}" if isinstance(position, Tensor) else type(position).__name__
        raise ValueError(f"the position of this decoder's state must be int64 {(batch,)}, not {came}")
    same_device(tokens=tokens, state=position)
    check_counts("position", position)


def _initialise(model: nn.Module, depth: int) -> None:
    """Normal weights of deviation 0.02, smaller by sqrt(2 depth) where they write into the residual (GPT-2's rule)."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        elif isinstance(module, nn.Linear):
            residual = name.endswith(("attention.out", "feedforward.contract"))
            nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if residual else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
