"""The kernels of linear attention, compiled for GPUs that are not here: spills, shared memory, instructions."""

from typing import Any

import pytest
import torch
from ahead import LIMITS, TYPES, Request, compiled_all, request

from longspan.ops.linear import triton as linear
from longspan.ops.triton import tiles

STACK = 288  # bytes of spills a thread, which holds 1 kB in registers
POINTERS = {
    "sums": ("kv", ("parts",)),
    "outputs": ("qkvo", ("below", "starts")),
    "grad_sums": ("qog", ("below", "weights", "parts")),
    "grad_q": ("qkvg", ("dq", "below", "weights", "starts")),
    "grad_k": ("qkvg", ("dk", "below", "weights", "ends")),
    "grad_v": ("qkg", ("dv", "below", "ends")),
}
LAST = {"q": "q_d", "k": "k_d", "v": "v_e", "o": "o_e", "g": "g_e", "dq": "dq_d", "dk": "dk_d", "dv": "dv_e"}


def wanted(kernel: str, size: int, dtype: torch.dtype, capability: int, *, bare: bool = True) -> Request:
    """A kernel as ``ops/linear/triton.py`` launches it; ``bare``: without mask and segments."""
    kind = TYPES[str(dtype).removeprefix("torch.")]
    tokens, sums = POINTERS[kernel]
    tokens = [*tokens, *(name for name in sums if name in LAST)]
    pointers = {name: kind for name in tokens} | {name: "*fp32" for name in sums if name not in LAST}
    constants: dict[str, Any] = linear.constants(kernel, size, size, dtype, capability)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    # Not as the interpreter runs them.
    constants |= {"WIDE": False, "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee"}
    constants |= {"SPAN": 1024, "MAP": 0} | {LAST[name]: 1 for name in tokens}
    if "sums" not in kernel:
        constants["CAUSAL"] = True
    edges = ["segments"] if kernel == "grad_sums" else ["mask", "segments"]
    if bare:
        constants |= {edge: None for edge in edges}
    else:
        pointers |= {"mask": "*i1", "segments": "*i64"} if "mask" in edges else {"segments": "*i64"}
    return request(
        f"longspan.ops.triton.linear:{kernel}_kernel",
        pointers,
        constants,
        floats=["eps"],
        capability=capability,
        **options,
    )


def check(requests: list[Request]) -> None:
    """The kernels spill little, fit into shared memory, load through cp.async, and in bfloat16 use wgmma on Hopper."""
    for wish, built in zip(requests, compiled_all(requests), strict=True):
        assert built.stack <= STACK, wish
        assert built.shared <= LIMITS[wish.capability], wish
        assert built.count("cp.async.cg") + built.count("cp.async.ca"), wish
        if wish.capability == 90 and wish.constants["HALF"]:
            assert built.count("wgmma.mma_async"), wish


def test_kernels_fit_a_gpu():
    check([wanted(kernel, 64, torch.bfloat16, 90) for kernel in ("outputs", "grad_v")])


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [64, 128])
def test_all_kernels_fit_a_gpu(size, dtype, capability):
    check([wanted(kernel, size, dtype, capability) for kernel in tiles.SPLIT])


@pytest.mark.full
def test_kernels_with_mask_and_segments_compile():
    check([wanted(kernel, 64, torch.bfloat16, 90, bare=False) for kernel in tiles.SPLIT])
