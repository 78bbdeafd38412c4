"""The self-test of newly compiled decode kernels; importing this module registers it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.config import DecoderConfig
from ..models.decoder import Decoder
from ..models.quantization import quantize
from ..ops.backends import backend
from ..ops.native.build.selftest import COMPARISONS, Comparisons, Parts
from .native_decoder import Engine

CASES = (
    ("linear", torch.float32),
    ("softmax", torch.float32),
    ("linear", torch.bfloat16),
    ("gated_deltanet", torch.float32),
    ("kda; ssd(channels=20)", torch.float32),
    ("retention; gla", torch.float32),
)
QUANTIZED = (("linear", "int8"), ("softmax", "int4"))


def _decoders(parts: Parts) -> Comparisons:
    """Decode steps of whole decoders, in both dtypes of weights, and with quantized ones."""
    cases = (*((*case, "") for case in CASES), *((kind, torch.float32, weights) for kind, weights in QUANTIZED))
    for attention, dtype, weights in cases:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Decoder(DecoderConfig(vocab=9, length=8, dim=96, heads=3, depth=2, attention=attention))
        model, tokens = model.to(dtype).eval(), torch.arange(1, 9) % 9
        if weights:
            quantize(model, weights)
        tokens = torch.stack([tokens, tokens.flip(0)])
        found = _stepped(Engine(model), model.init_state(2), tokens)
        model.double()
        with backend("reference"), torch.no_grad():
            right = _stepped(model, model.init_state(2), tokens)
        yield f"a decoder's step with {attention} attention in {weights or dtype}", found, right


def _stepped(decoder: Callable[..., Any], state: Any, tokens: Tensor) -> Tensor:
    """The outputs for tokens (B,N), one after the other."""
    outputs = []
    for token in tokens.split(1, dim=1):
        output, state = decoder(token, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


COMPARISONS["decode"] = _decoders
