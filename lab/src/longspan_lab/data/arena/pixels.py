"""Images as sequences of grey pixels, row by row.

Source: Tay et al. 2020 (2011.04006), section 2.2.4, which takes CIFAR-10.
"""

import torch
from torch import Tensor

from longspan._utils.spec import known
from longspan.data import images as loaders
from longspan.data.dataset import Dataset

from .sequences import SPLITS, Arena, arena, balanced, images

SOURCES = {"digits": loaders.digits, "mnist": loaders.mnist, "cifar10": loaders.cifar10}
# Luma of ITU-R BT.601.
GREY = (0.299, 0.587, 0.114)


def load(source: str, length: int, examples: int, tests: int, seed: int) -> Arena:
    """The images of a data set, colors as grey, in its own splits; ``length`` and ``seed`` play no part.

    Raises ValueError for another data set, and what its loader raises.
    """
    kind, _, folder = source.partition(":")
    data = SOURCES[known(kind, SOURCES, "data set of images")](folder)
    most = dict(zip(SPLITS, (examples, tests, tests), strict=True))
    splits = {}
    for split in SPLITS:
        chosen = balanced(data.labels[split], most[split])
        splits[split] = images(grey(data, data.splits[split][chosen]), data.labels[split][chosen])
    return arena(f"image, {source}", data.vocab, data.grid[0] * data.grid[1], 10, splits, data.grid[:2])


def grey(data: Dataset, pictures: Tensor) -> Tensor:
    """Rows (count,length) uint8 of a data set as (count,height,width) uint8, three colors as one grey."""
    shaped = pictures.unflatten(1, data.grid)
    if len(data.grid) == 2:
        return shaped
    return (shaped.float() @ torch.tensor(GREY)).round().clamp(0, data.vocab - 1).to(torch.uint8)
