"""Published results, had again at the scale of a laptop: one module, one experiment."""

from . import (
    approximation,
    capacity,
    copying,
    images,
    lengths,
    memory,
    mqar,
    pattern,
    ponder,
    scaling,
    segments,
    spans,
    transfer,
)
from .experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "approximation": approximation.EXPERIMENT,
    "capacity": capacity.EXPERIMENT,
    "copy": copying.EXPERIMENT,
    "images": images.EXPERIMENT,
    "lengths": lengths.EXPERIMENT,
    "memory": memory.EXPERIMENT,
    "mqar": mqar.EXPERIMENT,
    "pattern": pattern.EXPERIMENT,
    "ponder": ponder.EXPERIMENT,
    "scaling": scaling.EXPERIMENT,
    "segments": segments.EXPERIMENT,
    "spans": spans.EXPERIMENT,
    "transfer": transfer.EXPERIMENT,
}
