"""Builders of models from named parameters."""

from .attention_builders import AttentionBuilder, RecurrentAttentionBuilder, RecurrentCrossAttentionBuilder
from .transformer_builders import (
    RecurrentDecoderBuilder,
    RecurrentEncoderBuilder,
    TransformerDecoderBuilder,
    TransformerEncoderBuilder,
)

__all__ = [
    "AttentionBuilder",
    "RecurrentAttentionBuilder",
    "RecurrentCrossAttentionBuilder",
    "RecurrentDecoderBuilder",
    "RecurrentEncoderBuilder",
    "TransformerDecoderBuilder",
    "TransformerEncoderBuilder",
]
