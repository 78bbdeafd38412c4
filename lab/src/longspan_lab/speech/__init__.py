"""Recorded speech for experiments: corpora, their labels and error rates."""
