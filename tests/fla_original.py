"""Functions and models of flash-linear-attention on inputs drawn from seeds, to compare longspan's with them.

As a program it runs the original's kernels on the CPU, in Triton's interpreter, and writes their results:

    PYTHONPATH=<its source> TRITON_INTERPRET=1 python tests/fla_original.py FILE.npz [channels of keys, of values]

``tests/compat/fla_original.npz`` was written this way with flash-linear-attention 0.6.0 and Triton 3.9, with 6 and 4
channels. The interpreter of Triton 3.6 needs numpy before 2.4 for it.
"""

import importlib
import json
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

B, T, H, HV = 1, 9, 2, 4
SIZES = 6, 4  # channels of keys and of values
IDS = torch.arange(8)[None] * 5 % 12
RECORDED = json.loads((Path(__file__).parent / "compat" / "fla_names.json").read_text(encoding="utf-8"))
# Model types whose layers run in the interpreter. The others: log_linear_mamba2 and mamba3 require CUDA, lightnet has
# a scan that the interpreter does not have, mamba and mamba2 are transformers' own classes here.
MODELS = (
    *("gla", "delta_net", "gated_deltanet", "kda", "gated_deltaproduct", "comba"),
    *("retnet", "linear_attn", "hgrn", "hgrn2", "rwkv6", "rwkv7"),
)


class Function(NamedTuple):
    """A function of the original."""

    module: str  # below fla.ops
    name: str
    tensors: str  # its tensors; ``argument=operand`` where the names differ
    options: Mapping[str, Any] = MappingProxyType({})
    differentiable: bool = True
    through_state: bool = True  # whether gradients of the last state reach the operands


RULES = "q k=unit v beta initial_state=state"
FUNCTIONS = {
    "linear_attn": Function("linear_attn", "fused_recurrent_linear_attn", "q k v initial_state=state"),
    "linear_attn-normalized": Function(
        "linear_attn", "fused_recurrent_linear_attn", "q=weights k=keys v", {"normalize": True}
    ),
    "retention": Function("retention", "fused_recurrent_retention", "q k v initial_state=state"),
    "lightning": Function(
        "lightning_attn",
        "fused_recurrent_lightning_attn",
        "q k v initial_state=state",
        {"layer_idx": 1, "num_layers": 3},
    ),
    "simple_gla": Function("simple_gla", "fused_recurrent_simple_gla", "q k v g initial_state=state", {"scale": 0.7}),
    "gla": Function("gla", "fused_recurrent_gla", "q k v gk initial_state=state"),
    "hgrn": Function("hgrn", "fused_recurrent_hgrn", "x g=gates initial_state=last"),
    "rwkv6": Function(
        "rwkv6", "fused_recurrent_rwkv6", "r=q k v w=gk u initial_state=state", {"scale": 1.0}, through_state=False
    ),
    "delta_rule": Function("delta_rule", "fused_recurrent_delta_rule", RULES),
    "delta_rule-normalized": Function(
        "delta_rule", "fused_recurrent_delta_rule", "q k v beta", {"use_qk_l2norm_in_kernel": True}
    ),
    "gated_delta_rule": Function(
        "gated_delta_rule", "fused_recurrent_gated_delta_rule", f"{RULES} g", differentiable=False
    ),
    "gated_delta_rule-shared": Function(
        "gated_delta_rule",
        "fused_recurrent_gated_delta_rule",
        "q k v=v4 beta=beta4 g=g4 gk=gk4 initial_state=state4",
        {"use_qk_l2norm_in_kernel": True},
        False,
    ),
    "kda": Function("kda", "fused_recurrent_kda", "q k=unit v beta g=gk initial_state=state", {}, False),
    "comba": Function("comba", "fused_recurrent_comba", f"{RULES} p g", {}, False),
    "iplr": Function("generalized_delta_rule", "fused_recurrent_iplr_delta_rule", "q k v a=p b initial_state=state"),
    "dplr": Function(
        "generalized_delta_rule", "fused_recurrent_dplr_delta_rule", "q k v a=p b gk initial_state=state", {}, False
    ),
    "rwkv7": Function(
        "rwkv7", "fused_mul_recurrent_rwkv7", "r=q w=gk k v kk=unit a=rates initial_state=state", {}, False
    ),
}


def drawn(name: str, *shape: int) -> Tensor:
    """Normally distributed numbers that depend on the name only, the same in every version of numpy."""
    return torch.from_numpy(np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)).float()


def operands(keys: int, values: int) -> dict[str, Tensor]:
    """The tensors of ``FUNCTIONS`` by name, in the original's layout (B,T,H,channels)."""
    found = {name: drawn(name, B, T, H, keys) for name in ("q", "k", "p", "b", "weights", "keys", "rates")}
    found |= {name: found[name].exp() for name in ("weights", "keys")}
    found |= {name: 0.3 * found[name] for name in ("p", "b")}
    found["rates"] = found["rates"].sigmoid()
    found["unit"] = torch.nn.functional.normalize(found["k"], dim=-1)
    for heads, suffix in ((H, ""), (HV, "4")):
        found |= {
            f"v{suffix}": drawn(f"v{suffix}", B, T, heads, values),
            f"g{suffix}": -drawn(f"g{suffix}", B, T, heads).exp(),
            f"gk{suffix}": -drawn(f"gk{suffix}", B, T, heads, keys).exp(),
            f"beta{suffix}": drawn(f"beta{suffix}", B, T, heads).sigmoid(),
            f"state{suffix}": drawn(f"state{suffix}", B, heads, keys, values),
        }
    found |= {"u": drawn("u", H, keys), "x": drawn("x", B, T, keys), "last": drawn("last", B, keys)}
    found["gates"] = -drawn("gates", B, T, keys).exp()
    return found


def arguments(case: Function, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a function by the names of its arguments, each one a leaf."""
    pairs = (pair.partition("=") for pair in case.tensors.split())
    return {name: given[other or name].clone().requires_grad_(case.differentiable) for name, _, other in pairs}


def results(case: Function, out: Tensor, end: Any, leaves: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Outputs, last states, and the gradients of a sum of sines of them."""
    ends = end if isinstance(end, tuple) else (end,)
    yield "out", out
    yield from ((f"state{i}", one) for i, one in enumerate(ends))
    needed = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    if needed:
        read = (out, *ends) if case.through_state else (out,)
        grads = torch.autograd.grad(sum(one.sin().sum() for one in read), list(needed.values()))
        yield from ((f"grad_{name}", grad) for name, grad in zip(needed, grads, strict=True))


def model_cases() -> list[tuple[str, int]]:
    """Model type and number of the recorded options."""
    return [(name, i) for name in MODELS for i in range(len(RECORDED[name]["models"]))]


def model_options(name: str, case: int) -> dict[str, Any]:
    """Options of a small model."""
    return RECORDED[name]["models"][case]["options"] | {"vocab_size": 12, "num_hidden_layers": 2}


def fill(model: Any) -> Any:
    """Give every parameter of a model numbers that depend on its name."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Weights of norms near 1, so that no layer vanishes.
            scale, mean = 0.3 if parameter.dim() > 1 else 0.25, 1.0 if name.endswith("norm.weight") else 0.0
            parameter.copy_(scale * drawn(name, *parameter.shape) + mean)
    return model.eval()


def main(path: str, keys: int, values: int) -> None:
    """Run the original and write its results."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from triton.runtime.autotuner import Autotuner

    # Without a device nothing can be timed, so that each kernel runs with the first of its configs.
    whole = Autotuner.__init__
    Autotuner.__init__ = lambda self, fn, names, configs, *more, **options: whole(
        self, fn, names, configs[:1], *more, **options
    )
    importlib.import_module("fla.models")
    found = {}
    given = operands(keys, values)
    for name, case in FUNCTIONS.items():
        function = getattr(importlib.import_module(f"fla.ops.{case.module}"), case.name)
        leaves = arguments(case, given)
        out, end = function(**leaves, **case.options, output_final_state=True)
        found |= {f"{name}/{part}": value for part, value in results(case, out, end, leaves)}
    for name, case in model_cases():
        model = fill(AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **model_options(name, case))))
        with torch.no_grad():
            found[f"model-{name}/{case}/logits"] = model(IDS, use_cache=False).logits
    np.savez_compressed(path, **{name: value.detach().numpy() for name, value in found.items()})


if __name__ == "__main__":
    main(sys.argv[1], *(map(int, sys.argv[2:]) if len(sys.argv) > 2 else SIZES))
