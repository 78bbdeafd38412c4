"""Recurrent states and KV caches, and functions on every state, such as clone, select, join, rewind, save and load."""

from .journal import journal, rewind, rewindable, settle
from .utils import clone, detach, fix_capacity, join, load, nbytes, put, read_metadata, save, select

__all__ = [
    "clone",
    "detach",
    "fix_capacity",
    "join",
    "journal",
    "load",
    "nbytes",
    "put",
    "read_metadata",
    "rewind",
    "rewindable",
    "save",
    "select",
    "settle",
]
