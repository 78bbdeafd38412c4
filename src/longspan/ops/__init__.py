"""Functions on tensors. Every op has a readable ``reference`` form, which ``with backend("reference")`` selects.

Shape legend: ``B`` batch, ``H`` heads, ``N`` queries, ``M`` keys, ``D`` key dimension, ``E`` value
dimension, ``F`` features, ``C`` chunk. The layout is that of ``F.scaled_dot_product_attention``: ``(B, H, N, D)``.
"""

from .backends import (
    BACKENDS,
    BackendUse,
    backend,
    log_backend,
    mark_dynamo_constant,
    refuse_tracing,
    resolve_backend,
    select_backend,
    watch,
)

__all__ = [
    "BACKENDS",
    "BackendUse",
    "backend",
    "log_backend",
    "mark_dynamo_constant",
    "refuse_tracing",
    "resolve_backend",
    "select_backend",
    "watch",
]
