"""Models of flash-linear-attention on longspan's operations, from their published checkpoints.

``load(folder)`` reads a checkpoint that flash-linear-attention has written: the modules here have the original's
parameter names, so weights need no conversion, and ``save_pretrained`` writes the same format. ``register()`` adds the
model types to ``AutoConfig`` and ``AutoModelForCausalLM`` of transformers.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...._utils.typecheck import format_value
from .catalog import supported

__all__ = ["load", "refusal", "register", "save_pth", "supported"]

if TYPE_CHECKING:
    from .causal_lm import FlaForCausalLM


def register() -> None:
    """Add the model types of flash-linear-attention to ``AutoConfig`` and ``AutoModelForCausalLM``.

    ``AutoModelForCausalLM.from_pretrained`` then loads them on longspan's operations. A second call changes nothing.

    Raises:
        ImportError: transformers is not installed.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    from ...transformers.loading import shift_smoothed_labels

    for family in supported().values():
        if not family.of_transformers:
            AutoConfig.register(family.model_type, family.config, exist_ok=True)
            AutoModelForCausalLM.register(family.config, family.model, exist_ok=True)
            shift_smoothed_labels(family.model_type, family.model.__name__)


def load(source: str | os.PathLike[str], **options: Any) -> "FlaForCausalLM":
    """Load a causal language model that flash-linear-attention has trained.

    Args:
        source: A folder with ``config.json`` and weights, a name on the Hugging Face Hub, or a ``.pth`` file of RWKV-7
            as its author publishes them.
        options: Keyword arguments of ``from_pretrained``, such as ``dtype``.

    Returns:
        The model, in evaluation mode. Every tensor of the checkpoint is used.

    Raises:
        FileNotFoundError: The ``.pth`` file does not exist.
        ImportError: transformers is not installed.
        ValueError: The model type is not supported, the config has an option that is not or a damaged one, weights are
            missing, unexpected or of another shape, or there are far fewer weights than the config describes.
    """
    known = supported()
    if Path(source).suffix == ".pth":
        from .rwkv_files import load_pth

        return load_pth(source, **options)
    from ...transformers.loading import check_files, folder_of, read_config, readable

    config = read_config(source, options)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"{os.fspath(source)} has model_type {format_value(kind)}, {refusal(kind)}; supported: "
            f"{', '.join(sorted(known))}"
        )
    folder = folder_of(source, options)
    assert folder is not None
    check_files(folder)
    with readable(source):
        return known[kind].load(source, config, **options)


def save_pth(model: "FlaForCausalLM", path: str | os.PathLike[str]) -> None:
    """Write a model of RWKV-7 as a ``.pth`` file in its author's format, which ``load`` reads.

    Args:
        model: A model of ``load``, with the model type ``rwkv7``.
        path: The file, which is replaced.

    Raises:
        ValueError: The model is not RWKV-7, has weights that the format has no place for, has another ``norm_eps`` than
            1e-5, or has heads of other than 64 channels whose values half precision would round.
    """
    from . import rwkv_files

    rwkv_files.save_pth(model, path)


def refusal(kind: Any) -> str:
    """Return why a model type is not supported."""
    from .unserved import UNSERVED

    return UNSERVED.get(str(kind), "which is not a model type of flash-linear-attention that longspan knows")
