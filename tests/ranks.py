"""Gloo processes that run functions of test modules together: ``with ranks.pool(3) as run: run(2, function, ...)``."""

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import traceback
import warnings
from pathlib import Path

TIMEOUT = 30  # seconds


def _serve(rank, size, store, timeout, connection):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    warnings.simplefilter("error")
    options = {"timeout": datetime.timedelta(seconds=timeout)}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, **options)
    groups = [None, *(dist.new_group(list(range(n)), **options) for n in range(1, size + 1))]
    while (job := connection.recv()) is not None:
        function, count, arguments, named = job
        try:
            if rank < count:
                connection.send((True, function(groups[count], *arguments, **named)))
            else:
                connection.send((True, None))
        except BaseException as error:
            connection.send((False, f"rank {rank}: {type(error).__name__}: {error}\n{traceback.format_exc()}"))
    dist.destroy_process_group()
    os._exit(0)  # without the seconds that the end of an interpreter takes


class RankError(AssertionError):
    """A rank raised; the message has the error and the traceback of each."""


@contextlib.contextmanager
def pool(size, timeout=TIMEOUT):
    """Yield ``run(count, function, *arguments)``: what ``function(group, *arguments)`` returns on each."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store, ends, processes = Path(folder) / "store", [], []
        for rank in range(size):
            ours, theirs = spawn.Pipe()
            processes.append(spawn.Process(target=_serve, args=(rank, size, store, timeout, theirs), daemon=True))
            processes[-1].start()
            ends.append(ours)

        def run(count, function, *arguments, **named):
            for end in ends:
                end.send((function, count, arguments, named))
            found = []
            for end in ends:
                assert end.poll(4 * timeout + 60), f"{function.__name__} did not return"
                found.append(end.recv())
            if wrong := [text for fine, text in found if not fine]:
                raise RankError("\n".join(wrong))
            return [value for _, value in found[:count]]

        try:
            yield run
        finally:
            for end in ends:
                with contextlib.suppress(OSError):
                    end.send(None)
            for process in processes:
                process.join(5)
                process.kill()
