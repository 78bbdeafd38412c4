"""longspan: efficient transformers behind one call, ``y, state = attention(x, state)``."""

from . import patterns as patterns
from ._utils.version import VERSION
from .attention import Attention, build, clone, detach, examples, load_state, names, nbytes, save_state, select
from .attention.multihead import MultiheadAttention
from .generation.beam_search import beam_search
from .generation.sampling import generate, score
from .models.checkpoint import load, save
from .models.config import Config, EncoderConfig, Seq2SeqConfig, StackConfig, TranscriberConfig
from .models.decoder import Decoder
from .models.encoder import Encoder
from .models.seq2seq import Seq2Seq
from .models.stacks import Stack
from .models.transcriber import Transcriber
from .modules.set_blocks import ISAB, MAB, PMA, SAB
from .ops.backends import backend
from .ops.convolution import causal_convolution
from .ops.gated import decay_attention, delta_rule
from .ops.linear import linear_attention
from .ops.sparse import sparse_attention
from .testing import check_attention

__version__ = VERSION

__all__ = [
    "ISAB", "MAB", "PMA", "SAB", "Attention", "Config", "Decoder", "Encoder", "EncoderConfig", "MultiheadAttention",
    "Seq2Seq", "Seq2SeqConfig", "Stack", "StackConfig", "Transcriber", "TranscriberConfig", "backend",
    "beam_search", "build", "causal_convolution", "check_attention", "clone",
    "decay_attention", "delta_rule", "detach", "examples", "generate", "linear_attention", "load", "load_state",
    "names", "nbytes", "save", "save_state", "score", "select", "sparse_attention",
]  # fmt: skip
