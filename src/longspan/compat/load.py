"""``longspan.load``."""

from pathlib import Path
from typing import Any

from ..models import checkpoint


def load(folder: str | Path) -> Any:
    """Load the model of a checkpoint, of the best checkpoint of a training run, or of a GGUF file.

    The global random number generator does not change.

    Args:
        folder: A checkpoint, the folder of a training run, or a ``.gguf`` file.

    Returns:
        A ``Decoder``, ``Encoder``, ``Seq2Seq`` or ``Transcriber`` in eval mode on the CPU. For a GGUF file, a model of
        transformers under ``longspan.compat.transformers.accelerate``, or RWKV-7 of flash-linear-attention.

    Raises:
        ImportError: If transformers is not installed, which GGUF files require.
        ValueError: If the folder is missing or not a checkpoint, has another format, or has a file that was changed; if
            the weights do not fit the config, are not floating-point numbers or are NaN; if a GGUF file is damaged or
            has an architecture or type of weights that is not supported.

    >>> import tempfile
    >>> import longspan
    >>> model = longspan.Decoder(longspan.DecoderConfig(dim=16, depth=1, heads=2, feedforward=32, vocab=5))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     longspan.save(model, f"{folder}/model")
    ...     loaded = longspan.load(f"{folder}/model")
    >>> loaded.config == model.config
    True
    """
    if not isinstance(folder, str | Path) or Path(folder).suffix.lower() != ".gguf":
        return checkpoint.load(folder)
    from . import gguf  # only here, since it takes time to import

    return gguf.load(folder)
