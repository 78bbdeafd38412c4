"""Benchmarks with interleaved candidates, rejection of disturbed samples, and ratios within one run."""
