"""Attentions: a layer with projections and heads, and the attentions that it can contain."""

from .aft_attention import AFTFullAttention, AFTSimpleAttention
from .attention_layer import AttentionLayer
from .causal_linear_attention import CausalLinearAttention
from .clustered_attention import ClusteredAttention, ImprovedClusteredAttention, ImprovedClusteredCausalAttention
from .conditional_full_attention import ConditionalFullAttention
from .exact_topk_attention import ExactTopKAttention
from .full_attention import FullAttention
from .linear_attention import LinearAttention
from .local_attention import LocalAttention
from .reformer_attention import ReformerAttention

__all__ = [
    "AFTFullAttention",
    "AFTSimpleAttention",
    "AttentionLayer",
    "CausalLinearAttention",
    "ClusteredAttention",
    "ConditionalFullAttention",
    "ExactTopKAttention",
    "FullAttention",
    "ImprovedClusteredAttention",
    "ImprovedClusteredCausalAttention",
    "LinearAttention",
    "LocalAttention",
    "ReformerAttention",
]
