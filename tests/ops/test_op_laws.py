"""The laws of the operations with a state, on the forms for CPUs."""

from ops.laws import collected

FORMS = ("reference", "torch", "native")
globals().update(collected(FORMS))
