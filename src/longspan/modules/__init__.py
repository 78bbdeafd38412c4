"""Modules that mechanisms and models share: norms, feed-forward, short convolution, positions."""
