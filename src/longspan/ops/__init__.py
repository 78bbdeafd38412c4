"""Pure functions on tensors. Every op has a readable ``reference`` beside it; ``with backend("reference")`` selects it.

Shapes, here and everywhere: ``B`` batch, ``H`` heads, ``N`` queries, ``M`` keys, ``D`` key dimension, ``E`` value
dimension, ``F`` features, ``C`` chunk. The layout is that of ``F.scaled_dot_product_attention``: ``(B, H, N, D)``.
"""

from .backends import BACKENDS, Served, backend, chosen, constant, refuse_tracing, tell, wanted, watch

__all__ = ["BACKENDS", "Served", "backend", "chosen", "constant", "refuse_tracing", "tell", "wanted", "watch"]
