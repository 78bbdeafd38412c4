"""Data sets of experiments, in addition to those of ``longspan.data``."""
