"""Grids of small images as PNG files."""

import io
import tempfile
from pathlib import Path

import numpy as np
from torch import Tensor

from . import atomic_io
from .optional_deps import install


def save(path: str | Path, images: Tensor, *, columns: int = 0, size: int = 64) -> None:
    """Write a grid of images, (B,h,w) or (B,h,w,3) uint8, as one PNG, atomically.

    ``columns`` is the number of images per row; 0 makes a square. Images smaller than ``size`` pixels in height are
    enlarged by an integer factor without smoothing.

    Raises ValueError for images of another dtype or shape, or a path that cannot be written; ImportError without
    Pillow.
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
    """Check the path of a picture before the work that makes it.

    Raises ValueError if it cannot be written or does not end in .png, ImportError without Pillow.
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
        raise ImportError(f"pictures need Pillow: {install('data')}") from error


def claim_folder(path: str | Path) -> None:
    """Make a folder if it does not exist, and check that it is writable. Raises ValueError."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot make the folder {path}: {error.strerror or error}") from error
    _probe(path)


def _probe(folder: Path) -> None:
    # Checking permissions is not enough: a disk may be read-only, and root has every permission.
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
