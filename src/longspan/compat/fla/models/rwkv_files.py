"""Files of RWKV-7 in other formats: the ``.pth`` files of its author, and older checkpoints.

The author's group norm has the constant eps 64e-5, that of flash-linear-attention has head_dim * norm_eps: the same for
heads of 64 channels. For others, the values are scaled by c = sqrt(head_dim / 64). State and output are linear in them,
so that the norm gets c o instead of o, and norm(c o, c^2 eps) = norm(o, eps). The bonus keeps its scale by ``r_k`` / c.
"""

import math
import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .catalog import supported

_TOP = {
    "emb.weight": "model.embeddings.weight",
    "head.weight": "lm_head.weight",
    "ln_out.weight": "model.norm.weight",
    "ln_out.bias": "model.norm.bias",
}
_NORMS = {"ln0": "pre_norm", "ln1": "attn_norm", "ln2": "ffn_norm"}
_ATT = {
    "receptance.weight": "r_proj.weight",
    "key.weight": "k_proj.weight",
    "value.weight": "v_proj.weight",
    "output.weight": "o_proj.weight",
    "ln_x.weight": "g_norm.weight",
    "ln_x.bias": "g_norm.bias",
    **{f"x_{name}": f"x_{name}" for name in "rwkvag"},
    **{name: name for name in ("k_k", "k_a", "r_k")},
    **{f"{name}0": f"{name}_lora.lora.2.bias" for name in "wav"},
    **{f"{name}1": f"{name}_lora.lora.0.weight" for name in "wavg"},
    **{f"{name}2": f"{name}_lora.lora.2.weight" for name in "wavg"},
}
_FFN = {name: name for name in ("x_k", "key.weight", "value.weight")}
SIZE = 64  # channels of a head for which both norms have the same eps
EPS = 1e-5  # of the author's LayerNorms
_NAME = re.compile(r"blocks\.(\d+)\.(\w+)\.(.+)")
_TRANSPOSED = re.compile(r"[wavg][12]")


def load_pth(source: str | os.PathLike[str], **options: Any) -> Any:
    """Load a ``.pth`` file of RWKV-7.

    Args:
        source: The file.
        options: Keyword arguments of ``from_pretrained``, such as ``dtype``; the default dtype is that of the file.

    Returns:
        The model, in evaluation mode.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is not a state dict of RWKV-7, has tensors that longspan does not know, or its values
            cannot be scaled in half precision.
    """
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        # Files of old versions of torch cannot be mapped into memory.
        weights = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"cannot load {path}: {(str(error) or 'the file is empty').splitlines()[0]}") from error
    if not isinstance(weights, Mapping) or not all(isinstance(t, Tensor) for t in weights.values()):
        raise ValueError(f"{path} does not contain a state dict")
    try:
        config, weights = converted(weights)
        dtype = str(options.get("dtype", options.get("torch_dtype")))
        widened = dtype.endswith(("float32", "float64"))
        weights = _scaled(weights, config["head_dim"], 1, widened, "pass dtype=torch.float32")
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    family = supported()["rwkv7"]
    try:
        return family.model.from_pretrained(None, config=family.config(**config), state_dict=weights, **options)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def save_pth(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a ``.pth`` file; arguments as in ``longspan.compat.fla.save_pth``."""
    kind = getattr(model.config, "model_type", type(model).__name__)
    if kind != "rwkv7":
        raise ValueError(f"only models of the type rwkv7 have this format, not {kind}")
    if model.config.norm_eps != EPS:
        raise ValueError(f"norm_eps={model.config.norm_eps} must be {EPS}, which the author's code has")
    found = {}
    weights = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    size = model.model.layers[0].attn.sizes[0]
    for name, tensor in _scaled(weights, size, -1, False, "convert the model with model.float()").items():
        new = _original(name)
        if new is None:
            raise ValueError(f"the format of .pth files has no place for {name}")
        value = tensor
        if _TRANSPOSED.fullmatch(new.rpartition(".")[2]):
            value = value.T
        elif value.dim() == 1 and re.search(r"\.(att|ffn)\.(?!ln)", new):
            value = value[None, None]
        found[new] = value.contiguous()
    torch.save(found, path)


def converted(weights: Mapping[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the options of the config, and the weights under the names of flash-linear-attention.

    Args:
        weights: The content of a ``.pth`` file.

    Raises:
        ValueError: It is not RWKV-7, or has tensors that longspan does not know.
    """
    required = (
        "emb.weight",
        "blocks.0.att.r_k",
        "blocks.0.ffn.key.weight",
        *(f"blocks.0.att.{name}1" for name in "wag"),
    )
    if missing := [name for name in required if name not in weights]:
        raise ValueError(f"not a file of RWKV-7, which would have {missing[0]}")
    for name, tensor in weights.items():
        if name in required or _TRANSPOSED.fullmatch(name.rpartition(".")[2]):
            if tensor.dim() != 2 or not tensor.numel():
                raise ValueError(f"{name} must have 2 dimensions, none of size 0, not {tuple(tensor.shape)}")
    found, unknown = {}, []
    for name, tensor in weights.items():
        # The first layer has nothing to mix its values with; some files have these tensors, but nothing reads them.
        if re.fullmatch(r"blocks\.0\.att\.v[012]", name):
            continue
        new = _renamed(name)
        if new is None:
            unknown.append(name)
        elif _TRANSPOSED.fullmatch(name.rpartition(".")[2]):
            found[new] = tensor.T.contiguous()
        elif tensor.dim() == 3 and not re.search(r"attn\.x_.$", new):
            found[new] = tensor.flatten()
        else:
            found[new] = tensor
    if unknown:
        raise ValueError(
            f"{len(unknown)} tensors are not of RWKV-7: {', '.join(unknown[:3])}; its variants with further tensors "
            "(v7a and v7b, DeepEmbed) are not supported"
        )
    width, hidden = weights["blocks.0.ffn.key.weight"].shape
    numbers = {int(match[1]) for match in map(_NAME.match, weights) if match}
    layers = len(numbers)
    if numbers != set(range(layers)):
        raise ValueError(f"the {layers} blocks must have the numbers 0 to {layers - 1}, not {max(numbers)}")
    ranks = {"decay": "w1", "gate": "g1", "a": "a1", "v": "v1"}
    config = {
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "head_dim": weights["blocks.0.att.r_k"].shape[1],
        "vocab_size": len(weights["emb.weight"]),
        "norm_first": "blocks.0.ln0.weight" in weights,
        # The author's code divides keys by their length as F.normalize does.
        "fuse_norm": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    for option, short in ranks.items():
        layer = f"blocks.{int(short == 'v1')}.att.{short}"
        if layer in weights:
            config[f"{option}_low_rank_dim"] = weights[layer].shape[1]
    return config, found


def _scaled(weights: dict[str, Tensor], size: int, power: int, widened: bool, hint: str) -> dict[str, Tensor]:
    """Scale the values by c^power; see above.

    Args:
        weights: By the names of flash-linear-attention.
        size: Channels of a head.
        power: 1 from the author's format, -1 into it.
        widened: Whether the model will have float32, whatever the weights have.
        hint: What to do if half precision would round.

    Raises:
        ValueError: c is not a power of 2, and the weights stay in half precision.
    """
    if size == SIZE:
        return weights
    factor = math.sqrt(size / SIZE) ** power
    found = dict(weights)
    for name, tensor in weights.items():
        share = {"v_proj.weight": factor, "r_k": 1 / factor}.get(name.partition(".attn.")[2])
        if share is not None:
            half = tensor.dtype in (torch.float16, torch.bfloat16)
            if half and not widened and math.frexp(factor)[0] != 0.5:
                raise ValueError(
                    f"heads of {size} channels need values that are scaled by {factor:.4f}, which {tensor.dtype} would "
                    f"round; {hint}"
                )
            scaled = tensor.double() * share
            found[name] = scaled if half and widened else scaled.to(tensor.dtype)
    return found


def _renamed(name: str) -> str | None:
    """Return the name in flash-linear-attention; None if there is none."""
    if name in _TOP:
        return _TOP[name]
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    layer, part, rest = match.groups()
    if part in _NORMS and rest in ("weight", "bias"):
        return f"model.layers.{layer}.{_NORMS[part]}.{rest}"
    new = {"att": _ATT, "ffn": _FFN}.get(part, {}).get(rest)
    return None if new is None else f"model.layers.{layer}.{'attn' if part == 'att' else 'ffn'}.{new}"


def _original(name: str) -> str | None:
    """Return the name in the author's files; None if there is none."""
    for theirs, ours in _TOP.items():
        if name == ours:
            return theirs
    match = re.fullmatch(r"model\.layers\.(\d+)\.(\w+)\.(.+)", name)
    if match is None:
        return None
    layer, part, rest = match.groups()
    for theirs, ours in _NORMS.items():
        if part == ours:
            return f"blocks.{layer}.{theirs}.{rest}"
    short, names = {"attn": ("att", _ATT), "ffn": ("ffn", _FFN)}.get(part, ("", {}))
    return next((f"blocks.{layer}.{short}.{theirs}" for theirs, ours in names.items() if ours == rest), None)


def split_mixes(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights in which the ``x_x`` (6,hidden) of older checkpoints are six vectors."""
    found = {}
    for name, tensor in weights.items():
        if name.endswith(".attn.x_x"):
            if tensor.dim() != 2 or len(tensor) != 6:
                raise ValueError(f"{name} must be (6, hidden), not {tuple(tensor.shape)}")
            found |= {f"{name[:-1]}{one}": row[None, None] for one, row in zip("rwkvag", tensor, strict=True)}
        else:
            found[name] = tensor
    return found
