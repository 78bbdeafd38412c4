"""The laboratory of longspan: benchmarks, reproduced papers and the demo, as further commands of ``longspan``."""
