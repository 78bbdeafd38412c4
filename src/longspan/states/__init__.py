"""Recurrent states and KV caches, and functions on every state: clone, detach, select, nbytes, save, load."""

from .utils import clone, detach, load, nbytes, save, select

__all__ = ["clone", "detach", "load", "nbytes", "save", "select"]
