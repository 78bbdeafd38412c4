"""Sequence parallelism: rows of tokens that are spread over processes, with the results of one process.

It runs on ``torch.distributed``: start the processes with torchrun, and combine it with DDP or FSDP2 over the other
dimension of a device mesh.
"""

from .parallel import mean_over_ranks, sequence_parallel, shard, shard_inputs

__all__ = ["mean_over_ranks", "sequence_parallel", "shard", "shard_inputs"]
