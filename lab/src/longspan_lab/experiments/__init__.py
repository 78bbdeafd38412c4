"""Published results, reproduced at laptop scale: one module, one experiment."""

from . import (
    approximation,
    capacity,
    copying,
    forecast,
    images,
    language,
    lengths,
    lra,
    memory,
    mqar,
    pattern,
    ponder,
    protein,
    scaling,
    segments,
    spans,
    speech,
    transfer,
)
from .experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "approximation": approximation.EXPERIMENT,
    "capacity": capacity.EXPERIMENT,
    "copy": copying.EXPERIMENT,
    "forecast": forecast.EXPERIMENT,
    "images": images.EXPERIMENT,
    "language": language.EXPERIMENT,
    "lengths": lengths.EXPERIMENT,
    "lra": lra.EXPERIMENT,
    "memory": memory.EXPERIMENT,
    "mqar": mqar.EXPERIMENT,
    "pattern": pattern.EXPERIMENT,
    "ponder": ponder.EXPERIMENT,
    "protein": protein.EXPERIMENT,
    "scaling": scaling.EXPERIMENT,
    "segments": segments.EXPERIMENT,
    "spans": spans.EXPERIMENT,
    "speech": speech.EXPERIMENT,
    "transfer": transfer.EXPERIMENT,
}
