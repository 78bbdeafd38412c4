"""The laws of the operations with a state, on the forms for CPUs."""

from ops.laws import *  # noqa: F403

FORMS = ("reference", "torch", "native")
