"""Measurements that mean something: interleaved candidates, contention noticed, ratios within one run."""
