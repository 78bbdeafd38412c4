"""One file, one mechanism: ``y, state = attention(x, state)``.

Each mechanism's class can be imported from here: ``from longspan.attention import GatedDeltaNet``.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from .base import REGISTRY, Attention
from .build import build
from .registry import list_mechanisms, mechanism_examples

if TYPE_CHECKING:
    from .abc import ABC as ABC
    from .adaptive_span import AdaptiveSpan as AdaptiveSpan
    from .alibi import Alibi as Alibi
    from .average import Average as Average
    from .axial import Axial as Axial
    from .bidirectional import Bidirectional as Bidirectional
    from .bigbird import BigBird as BigBird
    from .bp import BinaryPartition as BinaryPartition
    from .clustered import Clustered as Clustered
    from .compressive import Compressive as Compressive
    from .deltanet import DeltaNet as DeltaNet
    from .dsa import DSA as DSA
    from .etc import Etc as Etc
    from .exact_topk import ExactTopK as ExactTopK
    from .fast_weights import FastWeights as FastWeights
    from .forgetting import Forgetting as Forgetting
    from .fourier import Fourier as Fourier
    from .gated_deltanet import GatedDeltaNet as GatedDeltaNet
    from .gaussian import Gaussian as Gaussian
    from .gla import GLA as GLA
    from .gsa import GSA as GSA
    from .hedgehog import Hedgehog as Hedgehog
    from .image import Image as Image
    from .improved_clustered import ImprovedClustered as ImprovedClustered
    from .infini import Infini as Infini
    from .informer import Informer as Informer
    from .kda import KDA as KDA
    from .kernel import Kernel as Kernel
    from .linear import Linear as Linear
    from .linformer import Linformer as Linformer
    from .local import Local as Local
    from .log_linear import LogLinear as LogLinear
    from .longformer import Longformer as Longformer
    from .longhorn import Longhorn as Longhorn
    from .lowrank_band import LowRankBand as LowRankBand
    from .luna import Luna as Luna
    from .mamba import Mamba as Mamba
    from .mamba3 import Mamba3 as Mamba3
    from .memory_compressed import MemoryCompressed as MemoryCompressed
    from .mesa import Mesa as Mesa
    from .mlstm import MLSTM as MLSTM
    from .moba import MoBA as MoBA
    from .nsa import NSA as NSA
    from .nystrom import Nystrom as Nystrom
    from .path import PaTH as PaTH
    from .performer import Performer as Performer
    from .polynomial import Polynomial as Polynomial
    from .poolingformer import Poolingformer as Poolingformer
    from .power import Power as Power
    from .preconditioned_deltanet import PreconditionedDeltaNet as PreconditionedDeltaNet
    from .realformer import RealFormer as RealFormer
    from .reformer import Reformer as Reformer
    from .relative import Relative as Relative
    from .retention import Retention as Retention
    from .rfa import RFA as RFA
    from .routing import Routing as Routing
    from .rwkv7 import RWKV7 as RWKV7
    from .sac import SparseAdaptive as SparseAdaptive
    from .set_transformer import SetTransformer as SetTransformer
    from .sinkhorn import Sinkhorn as Sinkhorn
    from .softmax import Softmax as Softmax
    from .sparse import Sparse as Sparse
    from .sparse_transformer import SparseTransformer as SparseTransformer
    from .ssd import SSD as SSD
    from .star import Star as Star
    from .stick_breaking import StickBreaking as StickBreaking
    from .synthesizer import Synthesizer as Synthesizer
    from .talking_heads import TalkingHeads as TalkingHeads
    from .transformer_xl import TransformerXL as TransformerXL

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["REGISTRY", "Attention", "build", "list_mechanisms", "mechanism_examples"]


def __getattr__(name: str) -> Any:
    """The class of a registered mechanism by its name."""
    for cls in REGISTRY.values():
        if cls.__name__ == name:
            return cls
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *(cls.__name__ for cls in REGISTRY.values())})
