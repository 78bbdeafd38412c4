"""Transformers for one token at a time, with a state."""
