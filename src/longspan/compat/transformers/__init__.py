"""Hugging Face transformers on longspan's CPU kernels: recurrent layers of its models, and masks of softmax layers.

    import longspan.compat.transformers as on_cpu

    on_cpu.accelerate()                 # before or after a model is loaded; restore() undoes it
    print(on_cpu.status())              # what was replaced, what served each call, and what stays untouched

transformers (5.5 or later) is imported by these calls, not before: it is an optional extra of longspan.
"""

from .replace import accelerate, restore
from .report import Status, status
from .softmax import register

__all__ = ["Status", "accelerate", "register", "restore", "status"]
