"""Configs: one frozen dataclass of plain fields per kind of model; the flags of the command line and the recipes."""

from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from .._utils import typecheck
from .._utils.aliases import refuse
from .._utils.spec import known, split
from ..modules import positions

ACTIVATIONS = ("relu", "gelu", "silu", "squared_relu", "geglu", "swiglu")
NORMS = ("layer", "rms")
POOLS = ("none", "mean", "first")
# Blocks cost time to build, whatever their weights are; the deepest networks that were ever trained have 1000.
DEEPEST = 10_000


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _choose(field: str, value: str, choices: tuple[str, ...]) -> None:
    known(value, dict.fromkeys(choices), field)


class _Fields:
    def __new__(cls, *values: Any, **options: Any) -> Self:
        """An argument that is no field is refused by name, with the field that was meant."""
        # Every subclass is a dataclass, which this base does not show.
        names = [field.name for field in fields(cls)]  # type: ignore[arg-type]
        refuse(cls.__name__, options, names)
        return super().__new__(cls)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build from plain values. Raises ValueError for a field that does not exist, naming those that do."""
        if not isinstance(values, dict):
            raise ValueError(
                f"{cls.__name__} is made from a dict of its fields, not from {typecheck.format_value(values)}"
            )
        names = {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
        for name in values:
            known(name, names, f"field of {cls.__name__}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, ready for JSON or YAML."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True)
class StackConfig(_Fields):
    """A stack of blocks, each one attention and one feed-forward network (Vaswani et al. 2017, section 3).

    >>> import longspan
    >>> longspan.StackConfig(depth=6, attention="linear; linear; softmax").to_dict()["depth"]
    6
    """

    dim: int = 256
    """width of the residual stream"""
    depth: int = 4
    """number of blocks"""
    heads: int = 8
    """attention heads; dim must be a multiple of it"""
    attention: str = "linear"
    """one spec, or several (at most depth) separated by ';' and tiled over the depth: 'linear; linear; softmax'"""
    feedforward: int = 1024
    """inner width of the feed-forward network"""
    activation: str = "gelu"
    """relu | gelu | silu | squared_relu | geglu | swiglu (the last two are gated: three matrices)"""
    norm: str = "layer"
    """layer | rms"""
    prenorm: bool = True
    """normalise before each sub-layer (and once at the end) instead of after it"""
    dropout: float = 0.0
    """dropout on the embedding and each sub-layer's output; attention weights have theirs: 'softmax(dropout=0.1)'"""
    stack: str = "plain"
    """plain | universal(steps=6) | act(steps=12, threshold=0.01) | reversible: how the blocks are run"""
    residual: str = "add"
    """add | gru(bias=2.0) | input | output | highway | sigtanh: how a sub-layer's output joins the stream"""
    checkpointing: bool = False
    """keep each block's input alone for the backward, and compute the block again there: less memory, more time"""
    feedforward_chunk: int = 0
    """tokens that the feed-forward network takes at a time, which bounds its memory; 0: all at once"""

    def __post_init__(self):
        typecheck.check_fields(self)
        for name in ("dim", "depth", "heads", "feedforward"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        _require(self.depth <= DEEPEST, f"depth={self.depth} must be at most {DEEPEST}")
        _require(self.dim % self.heads == 0, f"dim={self.dim} is not a multiple of heads={self.heads}")
        _require(0 <= self.dropout < 1, f"dropout={self.dropout} must be in [0, 1)")
        _require(self.feedforward_chunk >= 0, f"feedforward_chunk={self.feedforward_chunk} must not be negative")
        _choose("activation", self.activation, ACTIVATIONS)
        _choose("norm", self.norm, NORMS)
        specs = split(self.attention)
        _require(
            len(specs) <= self.depth,
            f"attention={self.attention!r} names {len(specs)} layers, more than depth={self.depth}; specs are "
            f"tiled over the depth, and none is left out",
        )


@dataclass(frozen=True)
class DecoderConfig(StackConfig):
    """A decoder: predicts each token of a sequence from the ones before it.

    >>> import longspan
    >>> config = longspan.DecoderConfig(dim=64, depth=3, heads=4, attention="linear; linear; softmax", vocab=17)
    >>> config.positions
    'learned'
    """

    vocab: int = 256
    """number of different tokens; the start token comes on top of it"""
    likelihood: str = "categorical"
    """categorical | logistics(mixtures=10): the distribution of the next token"""
    positions: str = "learned"
    """none | sinusoidal(layout='interleaved') | learned | rotary(layout='halves', base=10000.0) | relative | alibi"""
    length: int = 1024
    """tokens in the table of learned positions; other positions have no limit and do not read it"""
    tied: bool = False
    """use the embedding as output matrix too (categorical only)"""

    def __post_init__(self):
        super().__post_init__()
        _require(self.vocab >= 2, f"vocab={self.vocab} must be at least 2")
        _require(self.length >= 1, f"length={self.length} must be at least 1")
        positions.parse(self.positions)
        _require(
            not self.tied or self.likelihood.startswith("categorical"),
            f"tied=True needs one output per token, so likelihood='categorical', not {self.likelihood!r}",
        )


@dataclass(frozen=True)
class EncoderConfig(StackConfig):
    """An encoder: every token sees every other one. Tokens or vectors in, features or outputs out.

    >>> import longspan
    >>> config = longspan.EncoderConfig(dim=64, heads=4, attention="performer", vocab=17, outputs=2, pool="mean")
    >>> config.pool
    'mean'
    """

    vocab: int = 0
    """number of different tokens; 0: the input is vectors (B, N, dim)"""
    outputs: int = 0
    """outputs of a linear head; 0: no head, the features themselves"""
    pool: str = "none"
    """none: one output per token; mean: one per sequence, the mean over its real tokens; first: its first real token"""
    labels: str = ""
    """of a classifier: the names of the outputs, with spaces between; one for each of outputs"""
    positions: str = "sinusoidal"
    """none | sinusoidal(layout='interleaved') | learned | rotary(layout='halves', base=10000.0) | relative | alibi"""
    length: int = 1024
    """tokens in the table of learned positions; other positions have no limit and do not read it"""

    def __post_init__(self):
        super().__post_init__()
        _require(self.vocab >= 0, f"vocab={self.vocab} must not be negative")
        _require(self.outputs >= 0, f"outputs={self.outputs} must not be negative")
        _require(self.length >= 1, f"length={self.length} must be at least 1")
        positions.parse(self.positions)
        _choose("pool", self.pool, POOLS)
        found = self.labels.split()
        _require(
            not found or len(found) == self.outputs,
            f"labels={self.labels!r} are {len(found)} names of outputs={self.outputs}; give one for each output",
        )
        _require(len(set(found)) == len(found), f"labels={self.labels!r} has a name twice")


@dataclass(frozen=True)
class Seq2SeqConfig(DecoderConfig):
    """An encoder that sees the whole source, and a decoder that reads it by cross attention.

    >>> import longspan
    >>> longspan.Seq2SeqConfig(dim=64, heads=4, encoder_attention="linear", vocab=17).cross_attention
    'softmax'

    The fields of ``DecoderConfig`` are the decoder's; the encoder shares the sizes.
    """

    encoder_attention: str = "linear"
    """specs of the encoder's attentions, tiled over its depth"""
    cross_attention: str = "softmax"
    """specs of the attentions by which the decoder reads the source, tiled over its depth"""
    encoder_depth: int = 0
    """blocks of the encoder; 0: as many as the decoder has"""
    source_vocab: int = 0
    """number of different source tokens; 0: those of the target, with which the embedding is shared"""
    smoothing: float = 0.0
    """label smoothing: the part of each target's probability that training spreads over all tokens"""

    def __post_init__(self):
        super().__post_init__()
        for name in ("encoder_depth", "source_vocab"):
            _require(getattr(self, name) >= 0, f"{name}={getattr(self, name)} must not be negative")
        _require(self.encoder_depth <= DEEPEST, f"encoder_depth={self.encoder_depth} must be at most {DEEPEST}")
        _require(0 <= self.smoothing < 1, f"smoothing={self.smoothing} must be in [0, 1)")
        _require(
            not self.smoothing or self.likelihood.startswith("categorical"),
            f"smoothing spreads probability over tokens, so likelihood='categorical', not {self.likelihood!r}",
        )
        for field, depth in (("encoder_attention", self.encoder_depth or self.depth), ("cross_attention", self.depth)):
            count = len(split(getattr(self, field)))
            _require(count <= depth, f"{field}={getattr(self, field)!r} names {count} layers, more than depth={depth}")


@dataclass(frozen=True)
class TranscriberConfig(StackConfig):
    """A transcriber: frames of speech in, and for every few of them the label that is heard there, or none.

    >>> import longspan
    >>> longspan.TranscriberConfig(dim=64, heads=4, attention="gla", causal=True, labels="one two").stride
    2
    """

    labels: str = "| a b c d e f g h i j k l m n o p q r s t u v w x y z"
    """names with spaces between; with '|' among them, which stands between words, the others are parts of words"""
    features: int = 40
    """numbers that a frame has"""
    stride: int = 2
    """frames from one token to the next"""
    context: int = 8
    """frames that a token reads: its own ones and those before"""
    causal: bool = False
    """whether a token sees earlier tokens only, so that the speech can be transcribed while it is heard"""
    rate: int = 8000
    """samples per second of the recordings whose filter banks the frames are; 0: no recordings' frames, other ones"""
    positions: str = "sinusoidal"
    """none | sinusoidal(layout='interleaved') | learned | rotary(layout='halves', base=10000.0) | relative | alibi"""
    length: int = 1024
    """tokens in the table of learned positions; other positions have no limit and do not read it"""

    def __post_init__(self):
        super().__post_init__()
        for name in ("features", "stride", "length"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        _require(self.rate >= 0, f"rate={self.rate} must not be negative")
        _require(
            self.context >= self.stride,
            f"context={self.context} must be at least stride={self.stride}, so that every frame is read",
        )
        found = self.labels.split()
        _require(
            0 < len(found) == len(set(found)),
            f"labels={self.labels!r} must be names with spaces between, each of them once",
        )
        positions.parse(self.positions)
