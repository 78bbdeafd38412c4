"""Recurrent states and KV caches, and functions on every state, such as clone, select, join, save and load."""

from .utils import clone, detach, fix_capacity, join, load, nbytes, put, read_metadata, save, select

__all__ = ["clone", "detach", "fix_capacity", "join", "load", "nbytes", "put", "read_metadata", "save", "select"]
