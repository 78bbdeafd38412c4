"""Clustering of hashes."""
