"""Convert an encoder of the fast-transformers interface to a ``longspan.Stack`` with the same weights."""

import torch.nn.functional as F
from torch import nn

from ..models.config import StackConfig
from ..models.stacks import Stack
from .fast_transformers.attention.attention_layer import Projections
from .fast_transformers.attention.causal_linear_attention import CausalLinearAttention
from .fast_transformers.attention.full_attention import FullAttention
from .fast_transformers.attention.linear_attention import LinearAttention, Sums
from .fast_transformers.recurrent.attention import RecurrentFullAttention, RecurrentLinearAttention
from .fast_transformers.recurrent.transformers import RecurrentTransformerEncoder
from .fast_transformers.transformers import EncoderParts, TransformerEncoder
from .fast_transformers.weight_mapper import RegexRule, SimpleMapper

# Names of an encoder's weights in fast-transformers, as regular expressions, and in longspan.
KEYS = (
    (r"^layers\.(\d+)\.attention\.(query|key|value|out)_projection\.", r"blocks.\1.attention.\2."),
    (r"^layers\.(\d+)\.linear1\.", r"blocks.\1.feedforward.expand."),
    (r"^layers\.(\d+)\.linear2\.", r"blocks.\1.feedforward.contract."),
    (r"^layers\.(\d+)\.(norm1|norm2)\.", r"blocks.\1.\2."),
    (r"^norm\.", r"norm."),
)
ACTIVATIONS = {F.relu: "relu", F.gelu: "gelu"}


class NativeMapper(SimpleMapper):
    """Rename the state dict of an encoder to the names of a ``longspan.Stack``."""

    def __init__(self):
        super().__init__([RegexRule(*rule) for rule in KEYS], add_identity=False)


def to_native(encoder: TransformerEncoder | RecurrentTransformerEncoder, *, causal: bool) -> Stack:
    """Return a ``longspan.Stack`` with copies of the encoder's weights and equal outputs in evaluation.

    In training one difference remains: a stack has dropout after each part, the encoder also inside the feed-forward
    network.

    Args:
        encoder: an encoder with at least one layer.
        causal: True if the encoder was called with ``TriangularCausalMask`` or is a recurrent encoder.

    Returns:
        The stack, on the encoder's device and in its dtype and mode.

    Raises:
        ValueError: the encoder has no equivalent stack. A stack has the attentions linear, causal-linear and full with
            the feature map elu(x) + 1 and no ``softmax_temp``, heads that together are as wide as the model, and the
            activation relu or gelu. The error is also raised where the attention does not support ``causal``.
    """
    if not isinstance(encoder, TransformerEncoder | RecurrentTransformerEncoder) or not len(encoder.layers):
        raise ValueError(f"to_native takes an encoder with at least one layer, not {type(encoder).__name__}")
    specs = []
    for layer in encoder.layers:
        if not isinstance(layer, EncoderParts) or not isinstance(layer.attention, Projections):
            raise ValueError(
                f"layer {type(layer).__name__} has no counterpart in a longspan.Stack; to_native converts the encoder "
                f"layers of longspan.compat.fast_transformers"
            )
        specs.append(_spec(layer.attention, causal))
    first: EncoderParts = encoder.layers[0]  # pyright: ignore[reportAssignmentType] (torch types items as Module)
    if first.activation not in ACTIVATIONS:
        raise ValueError(f"activation {first.activation.__name__!r} has no counterpart; use relu or gelu")
    config = StackConfig(
        dim=first.norm1.normalized_shape[0],
        depth=len(specs),
        heads=first.attention.n_heads,  # pyright: ignore[reportArgumentType] (an int)
        attention=specs[0] if len(set(specs)) == 1 else "; ".join(specs),
        feedforward=first.linear1.out_features,
        activation=ACTIVATIONS[first.activation],
        prenorm=False,
        dropout=first.dropout.p,
    )
    stack = Stack(config, causal=causal)
    if encoder.norm is not None:
        stack.norm = nn.LayerNorm(config.dim)
    weight = first.linear1.weight
    stack.to(weight.device, weight.dtype).train(encoder.training)
    stack.load_state_dict(NativeMapper().map(encoder.state_dict()))
    return stack


def _spec(layer: Projections, causal: bool) -> str:
    """Return the spec of a layer's attention."""
    inner, dim = layer.inner_attention, layer.query_projection.in_features
    widths = {p.out_features for p in (layer.query_projection, layer.key_projection, layer.value_projection)}
    if widths != {dim} or layer.key_projection.in_features != dim:
        raise ValueError(f"all heads together are {sorted(widths)} wide; a longspan.Stack of dim={dim} needs {dim}")
    match inner:
        case Sums() if not inner.elu:
            raise ValueError(
                "only the feature map elu(x) + 1 converts to longspan; `longspan show linear` prints longspan's maps"
            )
        case LinearAttention() if not causal:
            return f"linear(eps={inner.eps!r})"
        case CausalLinearAttention() | RecurrentLinearAttention() if causal:
            return f"linear(eps={inner.eps!r})"
        case Sums():
            raise ValueError(f"{type(inner).__name__} cannot be causal={causal}")
        case RecurrentFullAttention() if not causal:
            raise ValueError("RecurrentFullAttention cannot be causal=False")
        case FullAttention() | RecurrentFullAttention() if inner.softmax_temp is None:
            return f"softmax(dropout={inner.dropout.p!r})"
        case FullAttention() | RecurrentFullAttention():
            raise ValueError(f"softmax_temp={inner.softmax_temp} has no counterpart; longspan uses 1 / sqrt(E)")
    raise ValueError(f"{type(inner).__name__} has no counterpart in a longspan.Stack; use linear or full attention")
