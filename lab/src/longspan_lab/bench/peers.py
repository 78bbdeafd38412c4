"""Other libraries as subjects of ``worker.py``; runs in the environment that holds them and needs nothing of ours.

``ft`` is pytorch-fast-transformers, ``performer`` is performer-pytorch, whose causal form without CUDA is measured.
"""

import importlib
import importlib.metadata
from typing import Any

import torch
from torch import Tensor, nn


def ft_attention(task: dict[str, Any]) -> Any:
    """``CausalLinearAttention``, which takes (B,N,H,D)."""
    masking = importlib.import_module("fast_transformers.masking")
    module = importlib.import_module("fast_transformers.attention").CausalLinearAttention(task["size"])
    shape: tuple[int, int] = (0, 0)
    masks: Any = None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal shape, masks
        if q.shape[:2] != shape:
            # A caller keeps its masks, so they are not part of what is timed.
            shape = (q.shape[0], q.shape[1])
            masks = masking.TriangularCausalMask(shape[1]), masking.LengthMask(torch.full((shape[0],), shape[1]))
        return module(q, k, v, masks[0], masks[1], masks[1]).flatten(2)

    return attend


def ft_step(task: dict[str, Any]) -> Any:
    """``RecurrentLinearAttention``, which takes (B,H,D) and updates its state in place."""
    recurrent = importlib.import_module("fast_transformers.recurrent.attention")
    module, state = recurrent.RecurrentLinearAttention(task["size"]), None

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal state
        o, state = module(q[:, :, 0], k[:, :, 0], v[:, :, 0], state)
        return o[:, :, None]

    return step


def ft_model(task: dict[str, Any], weights: dict[str, Tensor] | None) -> Any:
    """A decoder of the same shape: embedding, ``RecurrentTransformerEncoder``, head. It normalizes after sub-layers."""
    builders = importlib.import_module("fast_transformers.builders")
    size = task["dim"] // task["heads"]
    model = nn.ModuleDict(
        {
            "embedding": nn.Embedding(task["vocab"] + 1, task["dim"]),
            "encoder": builders.RecurrentEncoderBuilder.from_kwargs(
                attention_type="linear",
                n_layers=task["depth"],
                n_heads=task["heads"],
                query_dimensions=size,
                value_dimensions=size,
                feed_forward_dimensions=task["feedforward"],
                activation="gelu",
                dropout=0.0,
                final_normalization=False,
            ).get(),
            "head": nn.Linear(task["dim"], task["vocab"]),
        }
    ).eval()
    if weights is not None:
        model.load_state_dict({_ft_name(name): tensor for name, tensor in weights.items()})

    def begin() -> Any:
        state = None

        def step(tokens: Tensor) -> Tensor:
            nonlocal state
            x, state = model["encoder"](model["embedding"](tokens[:, 0]), state)
            return model["head"](x)

        return step

    return begin


def _ft_name(name: str) -> str:
    """What it calls a weight that our decoder calls ``name``."""
    for ours, theirs in {
        "embedding.tokens": "embedding",
        "stack.blocks": "encoder.layers",
        "query": "query_projection",
        "key": "key_projection",
        "value": "value_projection",
        "out": "out_projection",
        "feedforward.expand": "linear1",
        "feedforward.contract": "linear2",
    }.items():
        name = f".{name}.".replace(f".{ours}.", f".{theirs}.").strip(".")
    return name


def performer_attention(task: dict[str, Any]) -> Any:
    """``causal_linear_attention_noncuda`` on features elu(x) + 1; it takes (B,H,N,D)."""
    attend = importlib.import_module("performer_pytorch.performer_pytorch").causal_linear_attention_noncuda

    def phi(x: Tensor) -> Tensor:
        return nn.functional.elu(x) + 1

    def performer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return attend(phi(q), phi(k), v).transpose(1, 2).flatten(2)

    return performer


def about() -> dict[str, str]:
    """Versions."""
    return {name: importlib.metadata.version(name) for name in ("pytorch-fast-transformers", "performer-pytorch")}


SUBJECTS = {
    "ft": {"attention": ft_attention, "step": ft_step, "model": ft_model},
    "performer": {"attention": performer_attention},
}
