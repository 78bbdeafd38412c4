"""longspan: efficient transformers behind one call, ``y, state = attention(x, state)``."""

from . import patterns as patterns
from .attention import Attention, build, clone, detach, examples, load_state, names, nbytes, save_state, select
from .beams import beam_search
from .checkpoint import load, save
from .checks import check_attention
from .config import Config, EncoderConfig, Seq2SeqConfig, StackConfig, TranscriberConfig
from .generate import generate, score
from .model import Decoder, Encoder
from .multihead import MultiheadAttention
from .ops import backend
from .ops.convolution import causal_convolution
from .ops.gated import decay_attention, delta_rule
from .ops.linear import linear_attention
from .ops.sparse import sparse_attention
from .seq2seq import Seq2Seq
from .sets import ISAB, MAB, PMA, SAB
from .speech import Transcriber
from .stacks import Stack
from .version import VERSION

__version__ = VERSION

__all__ = [
    "ISAB", "MAB", "PMA", "SAB", "Attention", "Config", "Decoder", "Encoder", "EncoderConfig", "MultiheadAttention",
    "Seq2Seq", "Seq2SeqConfig", "Stack", "StackConfig", "Transcriber", "TranscriberConfig", "backend",
    "beam_search", "build", "causal_convolution", "check_attention", "clone",
    "decay_attention", "delta_rule", "detach", "examples", "generate", "linear_attention", "load", "load_state",
    "names", "nbytes", "save", "save_state", "score", "select", "sparse_attention",
]  # fmt: skip
