"""The public names of the package, which ``longspan`` has."""

from . import adapt, patterns, states, testing
from .attention import Attention, build, list_mechanisms, mechanism_examples
from .attention.multihead import MultiheadAttention
from .compat.load import load
from .generation.beam_search import beam_search
from .generation.sampling import generate, log_likelihood
from .models.checkpoint import save
from .models.config import DecoderConfig, EncoderConfig, Seq2SeqConfig, StackConfig, TranscriberConfig
from .models.decoder import Decoder
from .models.encoder import Encoder
from .models.quantization import quantize
from .models.seq2seq import Seq2Seq
from .models.stacks import Stack
from .models.transcriber import Transcriber
from .modules.set_blocks import ISAB, MAB, PMA, SAB
from .ops.backends import backend
from .ops.convolution import causal_convolution
from .ops.cross_entropy import linear_cross_entropy
from .ops.gated import decay_attention, delta_rule
from .ops.gated.general import general_delta_rule
from .ops.linear import linear_attention
from .ops.quantized import quantized_linear
from .ops.scan import diagonal_scan, selective_scan
from .ops.sparse import sparse_attention
from .testing import check_attention

__all__ = [
    "ISAB",
    "MAB",
    "PMA",
    "SAB",
    "Attention",
    "Decoder",
    "DecoderConfig",
    "Encoder",
    "EncoderConfig",
    "MultiheadAttention",
    "Seq2Seq",
    "Seq2SeqConfig",
    "Stack",
    "StackConfig",
    "Transcriber",
    "TranscriberConfig",
    "adapt",
    "backend",
    "beam_search",
    "build",
    "causal_convolution",
    "check_attention",
    "decay_attention",
    "delta_rule",
    "diagonal_scan",
    "general_delta_rule",
    "generate",
    "linear_attention",
    "linear_cross_entropy",
    "list_mechanisms",
    "load",
    "log_likelihood",
    "mechanism_examples",
    "patterns",
    "quantize",
    "quantized_linear",
    "save",
    "selective_scan",
    "sparse_attention",
    "states",
    "testing",
]
