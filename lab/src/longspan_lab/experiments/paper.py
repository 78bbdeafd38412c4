"""The linear transformer's published tables, each with its source."""

from typing import NamedTuple

from longspan._utils import spec
from longspan.attention import build

# Katharopoulos et al. 2020 (2006.16236 v3): images per second and bits from tables 1, 2 and 4, on one GPU, as many
# images at once as fit; seconds of one image at batch 1 from table 5.
IMAGES_SOURCE = "Katharopoulos et al. 2020 (2006.16236), sections 4.2.1 and 4.2.2, tables 1, 2, 4 and 5"


class Method(NamedTuple):
    """One row of the tables on images."""

    name: str
    bits: float  # per dim
    images_per_second: float
    cpu: float  # seconds of one image
    gpu: float
    state: bool  # whether it generates from a state rather than from the prefix


IMAGES: dict[str, tuple[Method, ...]] = {
    "mnist": (
        Method("linear", 0.644, 142.8, 5.5, 7.3, True),
        Method("softmax", 0.621, 7.56, 7.4, 10.4, True),
        Method("softmax", 0.621, 0.45, 72.6, 10.2, False),
        Method("lsh-1", 0.745, 0.68, 46.0, 19.2, False),
        Method("lsh-4", 0.676, 0.27, 112.0, 55.8, False),
    ),
    "cifar10": (
        Method("linear", 3.40, 17.85, 45.1, 61.3, True),
        Method("softmax", 3.47, 0.32, 71.9, 70.4, True),
        Method("softmax", 3.47, 0.004, 8651.4, 300.1, False),
        Method("lsh-1", 3.39, 0.015, 2318.9, 221.6, False),
        Method("lsh-4", 3.51, 0.005, 5263.7, 683.9, False),
    ),
}


# lsh-X stands for Reformer with X rounds of hashing (section 4).
LSH = "reformer(rounds=1); reformer(rounds=4)"
# Section 4.2.1: 64 buckets, and 27 chunks of 29 pixels.
LSH_IMAGES = "reformer(chunk=29, buckets=64, rounds=1); reformer(chunk=29, buckets=64, rounds=4)"


def called(attention: str) -> str:
    """Return the publication's name for the attention of a spec; the spec itself if it has none.

    >>> called("reformer(rounds=1)"), called("softmax")
    ('lsh-1', 'softmax')
    """
    return f"lsh-{build(attention, 2, 1).rounds}" if spec.head(attention) == "reformer" else attention


def title(attention: str) -> str:
    """Return the spec, preceded by the publication's name if that differs.

    >>> title("reformer(rounds=4)"), title("softmax")
    ('lsh-4, reformer(rounds=4)', 'softmax')
    """
    return attention if called(attention) == attention else f"{called(attention)}, {attention}"


def recomputed(attention: str) -> bool:
    """Whether the publication also recomputes the prefix for every pixel."""
    return any(row.name == called(attention) and not row.state for rows in IMAGES.values() for row in rows)


def methods(data: str) -> tuple[Method, ...]:
    """The rows for a data set, ``mnist:FOLDER`` being ``mnist``; none where nothing was published."""
    return IMAGES.get(data.partition(":")[0], ())
