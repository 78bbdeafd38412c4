"""The public interface of pytorch-fast-transformers 0.4.0 on longspan's operations, with equal parameter names.

After ``longspan.compat.install()``, ``import fast_transformers`` finds it. Shapes in this folder are the original's,
batch first with the heads third: ``N`` batch, ``L`` queries, ``S`` keys, ``H`` heads, ``E`` query and key channels,
``D`` value channels, ``F`` features.
"""

__title__ = "longspan.compat.fast_transformers"
__version__ = "0.4.0"
