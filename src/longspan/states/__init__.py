"""Recurrent states and KV caches, and what works on all of them: clone, detach, select, nbytes, save, load."""

from .utils import clone, detach, load, nbytes, save, select

__all__ = ["clone", "detach", "load", "nbytes", "save", "select"]
