"""Memory that is kept for the next tensor, and memory that goes back to the system."""

import json
import subprocess
import sys

import pytest
import torch

import longspan
from longspan.ops import buffers

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it belongs to glibc, and /proc reports it")
RESIDENT = """
import json, sys, torch
from longspan.ops import buffers as memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

getattr(memory, sys.argv[1])()
"""
MANY = """
blocks = [torch.zeros(2**20, dtype=torch.uint8) + 1 for _ in range(64)]
full = resident()
last = blocks[-1]  # what is freed lies below it
del blocks
print(json.dumps(full - resident()))
"""
LARGEST = """
block = torch.empty(memory.KEPT, dtype=torch.uint8).fill_(1)  # one alone: two at the top of the heap would go back
full = resident()
del block
print(json.dumps(full - resident()))
"""


def freed(code: str, name: str) -> int:
    """Bytes that go back to the system where ``code`` frees some, after ``memory.NAME()``."""
    done = subprocess.run([sys.executable, "-c", RESIDENT + code, name], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.full
@linux
def test_freed_blocks_are_kept_or_go_back():
    assert freed(MANY, "return_pages") > 60 * 2**20
    assert freed(MANY, "reuse_pages") < 4 * 2**20


@pytest.mark.full
@linux
def test_what_is_too_large_to_be_kept_is_fetched_in_large_pages(monkeypatch):
    """And nothing lies between: tensors of 32 MB, such as 32768 tokens of 256 numbers, were neither."""
    assert freed(LARGEST, "reuse_pages") < 4 * 2**20
    advised = []
    monkeypatch.setattr(buffers, "_madvise", lambda: lambda start, size, advice: advised.append(size))
    buffers.fresh_like(torch.empty(buffers.KEPT, dtype=torch.uint8))
    assert not advised
    buffers.fresh_like(torch.empty(buffers.KEPT + 1, dtype=torch.uint8))
    assert len(advised) == 1
    assert 0 <= advised[0] - buffers.KEPT < buffers.LARGE_PAGE


@linux
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_tensors_are_like_others_but_begin_at_a_large_page(monkeypatch, dtype):
    monkeypatch.setattr(buffers, "KEPT", 1000)
    for x in (
        torch.empty(3, 50, 8, dtype=dtype).transpose(0, 1),
        torch.empty(1001, dtype=dtype)[1:],
        torch.empty(5, 1, dtype=dtype).expand(5, 300),
        torch.nn.Parameter(torch.empty(900, 2, dtype=dtype)),
    ):
        y, usual = buffers.fresh_like(x), torch.empty_like(x)
        assert y.shape == usual.shape
        assert y.stride() == usual.stride()
        assert y.dtype == dtype
        assert y.data_ptr() % buffers.LARGE_PAGE == 0
        assert not y._is_view()
        y.fill_(2.0)
        assert y.sum(dtype=torch.float64) == 2 * y.numel()


@linux
@pytest.mark.parametrize("known", [True, False])
def test_only_what_tensors_fill_moves_to_large_pages(monkeypatch, known):
    page = buffers.LARGE_PAGE
    memory = torch.empty(6 * page, dtype=torch.uint8)
    base = memory.data_ptr() + (-memory.data_ptr()) % page
    start, asked = base - memory.data_ptr(), []
    monkeypatch.setattr(buffers, "_madvise", lambda: lambda *given: asked.append(given) or int(not known))
    parts = [(0.5, 1.2), (1.21, 2.5), (3.2, 3.9), (4.0, 5.0)]  # in pages; the first two have little between them
    made = [memory[start + int(begin * page) : start + int(end * page)] for begin, end in parts]
    buffers.use_large_pages(
        [*reversed(made), torch.empty(0), torch.empty(2 * page, 2)[:, 0], torch.empty(9, device="meta")]
    )
    ranges = [(base + page, page), (base + 4 * page, page)]
    advice = [buffers.COLLAPSE] if known else [buffers.COLLAPSE, buffers.ADVICE]
    assert asked == [(*one, what) for one in ranges for what in advice]


@linux
def test_large_pages_keep_the_numbers():
    x = torch.randn(3 * buffers.LARGE_PAGE)
    kept, at = x.clone(), x.data_ptr()
    buffers.use_large_pages([x])
    assert torch.equal(x, kept)
    assert x.data_ptr() == at


def test_large_outputs_can_be_changed_in_place(monkeypatch):
    monkeypatch.setattr(buffers, "KEPT", 1000)
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    beta = torch.rand(1, 2, 40)
    expected = torch.autograd.grad(2 * longspan.delta_rule(q, k, v, beta=beta).sum(), q)[0]
    assert torch.equal(torch.autograd.grad(longspan.delta_rule(q, k, v, beta=beta).mul_(2).sum(), q)[0], expected)
