"""Configs: a frozen dataclass per kind of model; its fields are also the entries of recipes and the flags."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from .._utils import typecheck
from .._utils.aliases import refuse
from .._utils.spec import known, split
from ..modules import norms, positions

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "squared_relu", "geglu", "swiglu")
POOLS = ("none", "mean", "first")
# Blocks take time to build at any width; the deepest networks in the literature have 1000.
DEEPEST = 10_000


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _choose(field: str, value: str, choices: tuple[str, ...]) -> None:
    known(value, dict.fromkeys(choices), field)


class _Fields:
    def __new__(cls, *values: Any, **options: Any) -> Self:
        """Raise TypeError for an unknown argument and suggest a field."""
        # Every subclass is a dataclass, but the type checker only sees this base.
        names = [field.name for field in fields(cls)]  # pyright: ignore[reportArgumentType] (subclasses are dataclasses)
        refuse(cls.__name__, options, names)
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a config from a dict of its fields.

        Raises:
            ValueError: For an unknown field, and for a value of another type or out of range.
        """
        if not isinstance(values, dict):
            raise ValueError(f"{cls.__name__}.from_dict takes a dict of fields, not {typecheck.format_value(values)}")
        names = {field.name: field for field in fields(cls)}  # pyright: ignore[reportArgumentType] (subclasses are dataclasses)
        for name in values:
            known(name, names, f"field of {cls.__name__}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of plain values, for JSON or YAML."""
        return asdict(self)  # pyright: ignore[reportArgumentType] (subclasses are dataclasses)


@dataclass(frozen=True)
class StackConfig(_Fields):
    """A stack of blocks, each with one attention and one feed-forward network.

    Raises:
        TypeError: For an unknown argument.
        ValueError: For a value of another type or out of range.

    Example:
        >>> import longspan
        >>> longspan.StackConfig(depth=6, attention="linear; linear; softmax").to_dict()["depth"]
        6

    References:
        Vaswani et al. 2017 (1706.03762), section 3.
    """

    dim: int = 256
    """width of the residual stream"""
    depth: int = 4
    """number of blocks"""
    heads: int = 8
    """number of attention heads; must divide dim"""
    attention: str = "linear"
    """one spec, or up to depth specs separated by ';' and tiled over the depth: 'linear; linear; softmax'"""
    feedforward: int = 1024
    """inner width of the feed-forward network"""
    activation: str = "gelu"
    """relu | gelu | gelu_tanh | silu | squared_relu | geglu | swiglu; the last two are gated, with three matrices"""
    norm: str = "layer"
    """layer | rms, each with its eps: 'rms(eps=1e-05)'"""
    prenorm: bool = True
    """normalize before each sub-layer and at the end, instead of after each sub-layer"""
    dropout: float = 0.0
    """dropout of the embedding and each sub-layer's output; for attention weights use 'softmax(dropout=0.1)'"""
    stack: str = "plain"
    """how the blocks are run: plain | universal(steps=6) | act(steps=12, threshold=0.01) | reversible"""
    residual: str = "add"
    """how a sub-layer's output joins the stream: add | gru(bias=2.0) | input | output | highway | sigtanh"""
    checkpointing: bool = False
    """keep only the input of each block and recompute the block in the backward pass: less memory, more time"""
    feedforward_chunk: int = 0
    """tokens per call of the feed-forward network, which bounds its memory; 0: all tokens"""

    def __post_init__(self):
        typecheck.check_fields(self)
        for name in ("dim", "depth", "heads", "feedforward"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        _require(self.depth <= DEEPEST, f"depth={self.depth} must be at most {DEEPEST}")
        _require(self.dim % self.heads == 0, f"dim={self.dim} is not a multiple of heads={self.heads}")
        _require(0 <= self.dropout < 1, f"dropout={self.dropout} must be in [0, 1)")
        _require(self.feedforward_chunk >= 0, f"feedforward_chunk={self.feedforward_chunk} must not be negative")
        _choose("activation", self.activation, ACTIVATIONS)
        norms.parsed(self.norm)
        specs = split(self.attention)
        _require(
            len(specs) <= self.depth,
            f"attention={self.attention!r} has {len(specs)} specs, more than depth={self.depth}",
        )


@dataclass(frozen=True)
class DecoderConfig(StackConfig):
    """A decoder: predicts each token of a sequence from the ones before it.

    Example:
        >>> import longspan
        >>> config = longspan.DecoderConfig(dim=64, depth=3, heads=4, attention="linear; linear; softmax", vocab=17)
        >>> config.positions
        'learned'
    """

    vocab: int = 256
    """number of tokens in the vocabulary, without the start token"""
    likelihood: str = "categorical"
    """the distribution of the next token: categorical | logistics(mixtures=10)"""
    positions: str = "learned"
    """none | sinusoidal(layout='interleaved') | learned | rotary(layout='halves', base=10000.0) | relative | alibi"""
    length: int = 1024
    """size of the table of learned positions; other positions ignore it"""
    tied: bool = False
    """share the weights of the embedding and the output layer (categorical only)"""

    def __post_init__(self):
        super().__post_init__()
        _require(self.vocab >= 2, f"vocab={self.vocab} must be at least 2")
        _require(self.length >= 1, f"length={self.length} must be at least 1")
        positions.parse(self.positions)
        _require(
            not self.tied or self.likelihood.startswith("categorical"),
            f"tied=True needs likelihood='categorical', not {self.likelihood!r}",
        )


@dataclass(frozen=True)
class EncoderConfig(StackConfig):
    """A bidirectional encoder of tokens or vectors, with optional pooling and a linear head.

    Example:
        >>> import longspan
        >>> config = longspan.EncoderConfig(dim=64, heads=4, attention="performer", vocab=17, outputs=2, pool="mean")
        >>> config.pool
        'mean'
    """

    vocab: int = 0
    """number of tokens in the vocabulary; 0: the input is vectors (B, N, dim)"""
    outputs: int = 0
    """size of the linear head; 0: no head, the model returns features"""
    pool: str = "none"
    """none: one output per token; mean: the mean over the real tokens; first: the first real token"""
    labels: str = ""
    """names of a classifier's outputs, separated by spaces; one for each output"""
    embedding_norm: bool = False
    """normalize the embeddings before the first block, as BERT does; with prenorm, the first attention reads them
    without another norm, as ModernBERT's does"""
    positions: str = "sinusoidal"
    """none | sinusoidal(layout='interleaved') | learned | rotary(layout='halves', base=10000.0) | relative | alibi"""
    length: int = 1024
    """size of the table of learned positions; other positions ignore it"""

    def __post_init__(self):
        super().__post_init__()
        _require(self.vocab >= 0, f"vocab={self.vocab} must not be negative")
        _require(self.outputs >= 0, f"outputs={self.outputs} must not be negative")
        _require(self.length >= 1, f"length={self.length} must be at least 1")
        positions.parse(self.positions)
        _require(
            not (self.embedding_norm and self.prenorm) or self.stack in ("plain", "reversible"),
            f"embedding_norm=True and prenorm=True take the norm from the first block, which stack={self.stack!r} "
            "repeats; pass prenorm=False or stack='plain'",
        )
        _choose("pool", self.pool, POOLS)
        found = self.labels.split()
        _require(
            not found or len(found) == self.outputs,
            f"labels={self.labels!r} has {len(found)} names, but outputs={self.outputs}; give one name per output",
        )
        _require(len(set(found)) == len(found), f"labels={self.labels!r} has a duplicate name")


@dataclass(frozen=True)
class Seq2SeqConfig(DecoderConfig):
    """An encoder of the source, and a decoder that reads it by cross attention.

    The fields of ``DecoderConfig`` describe the decoder; the encoder has the same sizes.

    Example:
        >>> import longspan
        >>> longspan.Seq2SeqConfig(dim=64, heads=4, encoder_attention="linear", vocab=17).cross_attention
        'softmax'
    """

    encoder_attention: str = "linear"
    """specs of the encoder's self-attention, tiled over its depth"""
    cross_attention: str = "softmax"
    """specs of the decoder's cross attention, tiled over its depth"""
    encoder_depth: int = 0
    """number of encoder blocks; 0: the same as the decoder"""
    source_vocab: int = 0
    """number of tokens in the source vocabulary; 0: shared with the target, and so is the embedding"""
    smoothing: float = 0.0
    """label smoothing: the probability mass that training spreads over all tokens"""

    def __post_init__(self):
        super().__post_init__()
        for name in ("encoder_depth", "source_vocab"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        _require(self.encoder_depth <= DEEPEST, f"encoder_depth={self.encoder_depth} must be at most {DEEPEST}")
        _require(0 <= self.smoothing < 1, f"smoothing={self.smoothing} must be in [0, 1)")
        _require(
            not self.smoothing or self.likelihood.startswith("categorical"),
            f"smoothing={self.smoothing} needs likelihood='categorical', not {self.likelihood!r}",
        )
        for field, depth in (("encoder_attention", self.encoder_depth or self.depth), ("cross_attention", self.depth)):
            count = len(split(getattr(self, field)))
            _require(count <= depth, f"{field}={getattr(self, field)!r} has {count} specs, more than depth={depth}")


@dataclass(frozen=True)
class TranscriberConfig(StackConfig):
    """A transcriber: maps frames of speech to labels, trained with CTC.

    Example:
        >>> import longspan
        >>> longspan.TranscriberConfig(dim=64, heads=4, attention="gla", causal=True, labels="one two").stride
        2
    """

    labels: str = "| a b c d e f g h i j k l m n o p q r s t u v w x y z"
    """names separated by spaces; if '|' is among them, it separates words and the others are parts of words"""
    features: int = 40
    """channels of a frame"""
    stride: int = 2
    """frames per token"""
    context: int = 8
    """frames that each token reads: its own and earlier ones"""
    causal: bool = False
    """tokens see earlier tokens only, so that speech can be transcribed as a stream"""
    rate: int = 8000
    """sample rate in Hz of the recordings that the filter banks are computed from; 0: frames of another kind"""
    positions: str = "sinusoidal"
    """none | sinusoidal(layout='interleaved') | learned | rotary(layout='halves', base=10000.0) | relative | alibi"""
    length: int = 1024
    """size of the table of learned positions; other positions ignore it"""

    def __post_init__(self):
        super().__post_init__()
        for name in ("features", "stride", "length"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        _require(self.rate >= 0, f"rate={self.rate} must not be negative")
        _require(
            self.context >= self.stride,
            f"context={self.context} must be at least stride={self.stride}",
        )
        found = self.labels.split()
        _require(
            0 < len(found) == len(set(found)),
            f"labels={self.labels!r} must be distinct names separated by spaces",
        )
        positions.parse(self.positions)
