"""Pictures: many small images in one PNG."""

import io
import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor

from . import atomic_io


def save(path: str | Path, images: Tensor, *, columns: int = 0, size: int = 64) -> None:
    """Write images side by side: (B,h,w) or (B,h,w,3) uint8, 0 ... 255, as one PNG, whole or not at all.

    ``columns``: images per row; 0 makes a square. Small images are enlarged by a whole factor until they are ``size``
    pixels high, each pixel a sharp square.

    Raises ValueError for images of another kind and a path that cannot be written, ImportError without Pillow.
    """
    path = Path(path)
    check(path)
    canvas = _grid(images, columns, size)
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(canvas).save(content, format="PNG")
    try:
        atomic_io.write(path, content.getvalue())
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror or error}") from error


def check(path: str | Path) -> None:
    """See to it, before the work that makes a picture, that it can be written there.

    Raises ValueError where it cannot or the name is no .png, ImportError without Pillow.
    """
    path = Path(path)
    if path.suffix.lower() != ".png":
        raise ValueError(f"pictures are PNG files, so their names end in .png, unlike {path}")
    atomic_io.check_output(path)
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {path.parent}")
    _probe(path.parent)
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError('pictures need Pillow: pip install "longspan[data]"') from error


def claim_folder(path: str | Path) -> None:
    """Make a folder, where there is none, and see to it that files can be written into it. Raises ValueError."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {path}: {error.strerror or error}") from error
    _probe(path)


def _probe(folder: Path) -> None:
    # Asking for permissions is not enough: a disk may be read-only, and root has every permission.
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write into {folder}: {error.strerror or error}") from error


def _grid(images: Tensor, columns: int, size: int) -> np.ndarray:
    array = images.cpu().numpy()
    if array.dtype != np.uint8 or array.ndim not in (3, 4) or array.shape[3:] not in ((), (3,)) or not array.size:
        raise ValueError(f"images must be uint8 (B, h, w) or (B, h, w, 3), not {images.dtype} {tuple(images.shape)}")
    count, height, width = array.shape[:3]
    columns = columns or round(count**0.5 + 0.49)
    rows, factor = -(-count // columns), max(1, -(-size // height))
    array = array.repeat(factor, 1).repeat(factor, 2)
    gap = 4
    high, wide = height * factor + gap, width * factor + gap
    canvas = np.full((rows * high + gap, columns * wide + gap, *array.shape[3:]), 96, np.uint8)
    for i, image in enumerate(array):
        top, left = gap + i // columns * high, gap + i % columns * wide
        canvas[top : top + high - gap, left : left + wide - gap] = image
    return canvas
