"""Recurrent states and KV caches, and functions on every state, such as clone, select, save and load."""

from .utils import clone, detach, fix_capacity, load, nbytes, save, select

__all__ = ["clone", "detach", "fix_capacity", "load", "nbytes", "save", "select"]
