"""Attention to fewer keys or from fewer queries: projections, pooling, landmarks, clusters, selection and sorting."""
