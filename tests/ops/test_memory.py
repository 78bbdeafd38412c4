"""Memory that is kept for the next tensor, and memory that goes back to the system."""

import json
import subprocess
import sys

import pytest

CODE = """
import json, sys, torch
from longspan.ops import memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

getattr(memory, sys.argv[1])()
blocks = [torch.zeros(2**20, dtype=torch.uint8) + 1 for _ in range(64)]
full = resident()
last = blocks[-1]  # what is freed lies below it
del blocks
print(json.dumps(full - resident()))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it is the C library's, and told by /proc")
def test_freed_blocks_are_kept_or_go_back():
    freed = {}
    for name in ("reuse_pages", "return_pages"):
        done = subprocess.run([sys.executable, "-c", CODE, name], capture_output=True, text=True, check=True)
        freed[name] = json.loads(done.stdout)
    assert freed["return_pages"] > 60 * 2**20
    assert freed["reuse_pages"] < 4 * 2**20
