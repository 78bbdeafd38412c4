"""Work of a training step: floating-point operations per token, and their share of what a device can do."""

from typing import Any

import torch
from torch import nn

from ..models.decoder import Decoder

# Dense bfloat16 TFLOP/s of data sheets, by a part of the device's name; the first match counts.
PEAKS = {
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A10G": 70.0,
    "A10": 125.0,
    "RTX 4090": 165.0,
    "RTX 3090": 71.0,
}


def flops_per_token(model: Decoder) -> float:
    """Operations of the forward and backward pass per token in products with weights: 6 for each weight.

    Embeddings and position tables are looked up, so they have none, except an embedding that is also the head. Blocks
    that run several times count as often. Products without weights, such as those of attention or of states, and
    passes that checkpointing repeats are not counted.

    References:
        Kaplan et al. 2020, 2001.08361, section 2.1. Chowdhery et al. 2022, 2204.02311, appendix B (MFU).
    """
    looked_up = {
        id(part)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for part in module.parameters(recurse=False)
    }
    blocks = {id(part) for part in model.stack.blocks.parameters()}
    total = 0
    for part in model.parameters():
        if part.ndim >= 2 and id(part) not in looked_up:
            total += part.numel() * (model.stack.run.steps if id(part) in blocks else 1)
    if model.config.tied:
        total += model.config.dim * model.config.vocab
    return 6.0 * total


def peak_of(run: Any) -> float:
    """The peak of one device in TFLOP/s: ``run.peak_tflops``, or that of a known GPU in bf16; 0 if it is unknown."""
    if run.peak_tflops or run.precision != "bf16" or not torch.cuda.is_available():
        return run.peak_tflops
    name = torch.cuda.get_device_name()
    return next((peak for part, peak in PEAKS.items() if part in name), 0.0)
