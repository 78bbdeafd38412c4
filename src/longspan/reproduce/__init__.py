"""Published results, had again at the scale of a laptop: one module, one experiment."""

from . import approximation, capacity, mqar, transfer
from .experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    "approximation": approximation.EXPERIMENT,
    "capacity": capacity.EXPERIMENT,
    "mqar": mqar.EXPERIMENT,
    "transfer": transfer.EXPERIMENT,
}
