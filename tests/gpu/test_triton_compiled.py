"""The kernels of linear attention, compiled for GPUs that are not here: spills, shared memory, instructions."""

from typing import Any

import pytest
import torch
from ahead import LIMITS, TYPES, Build, Request, compiled_all, request

from longspan.ops.linear import triton as linear
from longspan.ops.triton import tiles

MODULE = "longspan.ops.triton.linear"
EDGES = {"mask": "*i1", "segments": "*i64"}
POINTERS = {
    "sums": ("kv", ("parts",)),
    "outputs": ("qkvo", ("rest", "below", "starts")),
    "grad_sums": ("qog", ("rest", "below", "weights", "parts")),
    "grad_q": ("qkvg", ("dq", "below", "weights", "starts")),
    "grad_k": ("qkvg", ("dk", "below", "weights", "ends")),
    "grad_v": ("qkg", ("dv", "below", "ends")),
}
TOKENS = ("q", "k", "v", "o", "g", "dq", "dk", "dv")
STRIDES = ("_b", "_h", "_n", 1)


def wanted(kernel: str, size: int, dtype: torch.dtype, capability: int, *, bare: bool) -> Request:
    """A kernel as ``ops/linear/triton.py`` launches it in training; ``bare``: without mask and segments."""
    kind = TYPES[str(dtype).removeprefix("torch.")]
    tokens, others = POINTERS[kernel]
    tokens = [*tokens, *(name for name in others if name in TOKENS)]
    pointers = dict.fromkeys(tokens, kind) | {name: "*fp32" for name in others if name not in TOKENS}
    constants: dict[str, Any] = linear.constants(kernel, size, size, dtype, capability)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    # Not as the interpreter runs them.
    constants |= {"PRECISION": "tf32x3" if dtype == torch.float32 else "ieee"}
    constants |= {"SPAN": 1024, "MAP": 0}
    if "sums" not in kernel:
        constants["CAUSAL"] = True
    if "rest" in pointers and dtype == torch.float32:
        del pointers["rest"]
        constants["rest"] = None
    elif "rest" in pointers:
        pointers["rest"] = "*bf16"
    edges = {"segments": EDGES["segments"]} if kernel == "grad_sums" else EDGES
    strides = *(STRIDES for _ in tokens), *(("_b", "_n" if bare else 1) for _ in edges)
    if bare:
        constants |= dict.fromkeys(edges)
    else:
        pointers |= edges
    how = {"tuples": {"strides": strides}, "floats": ["eps"], "capability": capability}
    return request(f"{MODULE}:{kernel}_kernel", pointers, constants, **how, **options)


def wanted_prefix(size: int, capability: int, *, reverse: bool) -> Request:
    constants = {"D": size, "E": size, "SPAN": 1024, "BLOCK": linear.PREFIX, "CAUSAL": True, "REVERSE": reverse}
    pointers = dict.fromkeys(("parts", "given", "end"), "*fp32") | {"segments": EDGES["segments"]}
    tuples = {"strides": (("_b", "_h", "_d", 1), ("_b", 1))}
    return request(f"{MODULE}:prefix_kernel", pointers, constants, tuples=tuples, capability=capability)


def wanted_step(size: int, capability: int) -> Request:
    constants = linear.step_constants(size, size, "elu")
    options = {"num_warps": constants.pop("num_warps")}
    head, state = ("_b", "_h", 1), ("_b", "_h", "_d", 1)
    tuples = {"strides": (head, head, head, state, state, head)}
    pointers = dict.fromkeys("qkvo", "*bf16") | dict.fromkeys(("state", "after"), "*fp32")
    how = {"tuples": tuples, "floats": ["eps"], "capability": capability}
    return request(f"{MODULE}:step_kernel", pointers, constants, **how, **options)


def check(requests: list[Request], stack: int) -> None:
    """The kernels spill little, fit into shared memory, load through cp.async, and in bfloat16 use wgmma on Hopper."""
    for wish, built in zip(requests, compiled_all(requests), strict=True):
        assert built.stack <= stack, wish
        assert built.shared <= LIMITS[wish.capability], wish
        if "HALF" not in wish.constants:
            continue  # neither prefix nor step has products
        assert loads_ahead(built), wish
        if wish.capability == 90 and wish.constants["HALF"]:
            assert built.count("wgmma.mma_async"), wish


def loads_ahead(built: Build) -> bool:
    return bool(built.count("cp.async.cg") + built.count("cp.async.ca"))


def test_one_kernel_fits_a_gpu():
    check([wanted("outputs", 64, torch.bfloat16, 90, bare=True)], stack=8)


# Bytes of the stack that registers of a thread spill to, with Triton 3.6 and 3.9. A thread has 1 kB of registers.
STACKS = {
    (64, torch.bfloat16, 90, True): 16,
    (128, torch.bfloat16, 90, True): 88,
    (64, torch.bfloat16, 80, False): 208,
    (64, torch.float32, 90, True): 192,
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "dtype", "capability", "bare"),
    # Each takes a minute to build.
    [pytest.param(*case, marks=[pytest.mark.slow] if number else []) for number, case in enumerate(STACKS)],
    ids=str,
)
def test_kernels_fit_a_gpu(size, dtype, capability, bare):
    requests = [wanted(kernel, size, dtype, capability, bare=bare) for kernel in tiles.SPLIT]
    check(requests, STACKS[size, dtype, capability, bare])


@pytest.mark.full
def test_kernels_without_products_fit_a_gpu():
    requests = [wanted_prefix(128, 90, reverse=reverse) for reverse in (False, True)]
    check([*requests, *(wanted_step(size, 80) for size in (64, 128))], stack=0)
