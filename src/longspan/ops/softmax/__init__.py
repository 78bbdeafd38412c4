"""Softmax attention over the keys that a mask allows, from scores or similarities, and over a tree of spans."""
