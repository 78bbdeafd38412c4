"""Decay attention by the Triton kernels: values and gradients of the definition in float64, and builds for GPUs."""

import importlib

import pytest
import torch
from ahead import LIMITS, compiled_all, request

from ops.families import FAMILIES, cast

LIMIT = 5e-7
DECAY = importlib.import_module("longspan.ops.triton.decay")
FAMILY = FAMILIES["decay-head"]


@pytest.fixture(autouse=True)
def _short_spans(monkeypatch):
    """A few chunks then have several spans."""
    monkeypatch.setattr(DECAY, "SPAN", 64)


def arguments(n, strength=0.1, **options):
    given = FAMILY.operands(n, **{"sizes": (16, 24), "repeats": 1, "dtype": torch.float32} | options)
    given["log_decay"] *= strength
    return given


def error(found, expected):
    """The relative error; of gradients that decays have made as good as 0, the absolute one."""
    difference, size = (found.double() - expected).norm(), expected.norm()
    return float(difference / size) if size > 1e-20 else float(difference)


def assert_exact(given, family=FAMILY, **options):
    found = family.outcome("triton", given, **options)
    expected = family.outcome("reference", cast(given, torch.float64), **options)
    errors = {name: error(found[name], expected[name]) for name in expected}
    assert all(e <= LIMIT for e in errors.values()), errors  # NaN fails too


@pytest.mark.parametrize("strength", [None, 1e-4, 1.0, 20.0, 1e4], ids=str)
def test_kernels_are_the_definition(strength, monkeypatch):
    """Of two spans, the first of which has two chunks."""
    monkeypatch.setattr(DECAY, "SPAN", 128)
    given = arguments(130, strength or 0.0, batch=1)
    if strength is None:
        del given["log_decay"]
    assert_exact(given, FAMILIES["decay-none"] if strength is None else FAMILY)


@pytest.mark.parametrize(
    ("n", "sizes", "repeats"), [(63, (3, 33), 3), (150, (17, 5), 2), (65, (128, 72), 1), (67, (40, 128), 1)]
)
def test_sizes_beyond_those_of_the_laws(n, sizes, repeats):
    given = arguments(n, 0.3, batch=1, repeats=repeats, sizes=sizes)
    assert_exact(given, normalize="l2" if n > 65 else None, scale=0.7)


def test_gradients_of_one_number_for_all_tokens():
    """As those of a sum, whose strides are 0."""
    given = arguments(70)
    given["query"].requires_grad_()
    (grad,) = torch.autograd.grad(FAMILY.run("triton", given)[0].sum(), given["query"])
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_log_decays_of_any_dtype(dtype):
    given = arguments(70)
    given["log_decay"] = given["log_decay"].to(dtype)
    found = FAMILY.outcome("triton", given)
    assert found["log_decay"].dtype == dtype
    # The gradient is rounded to the dtype; all others see the rounded decays.
    expected = FAMILY.outcome("reference", cast(given, torch.float64))
    rounding = {"log_decay": 4e-3} if dtype == torch.bfloat16 else {}
    assert all(error(found[name], expected[name]) < rounding.get(name, LIMIT) for name in expected)


def built(dtype, size, capability):
    """Builds of all kernels for heads of ``size`` channels, with gradients of decays, as a launch chooses tiles."""
    pointer, wide = f"*{'fp32' if dtype == 'float32' else 'bf16'}", dtype == "float32"
    block, warps = (64 if capability == 90 and not wide else 32), 8
    after = block if size <= 64 else 32
    requests = []

    def add(name, pointers, states, *, keys=False, **constants):
        tile = {"C": 32 if wide else 64, "SPAN": 256, "FINE": "tf32x3" if wide else "tf32"}
        tile |= {"BD": min(size, after) if keys else size, "BE": size if keys else min(size, block)}
        if name != "sums_kernel":
            tile["PRECISION"] = "tf32x3" if wide else "ieee"
        strides = *(("s_b", "s_h", "s_n", 1) for _ in pointers), ("s_b", "s_h", 1)
        tuples = {"strides": strides, "sizes": ("n", "H", "R", "D", "E", "NP"), "gates": ("*fp32", None, None, None)}
        if name == "sums_kernel":
            constants["unit"] = None
        else:
            tuples["units"] = (None, None)
        types = dict.fromkeys(pointers, pointer) | dict.fromkeys(states, "*fp32")
        requests.append(
            request(
                f"longspan.ops.triton.decay:{name}",
                types,
                tile | constants,
                tuples=tuples,
                floats=["scale"],
                multiples=("s_b", "s_h", "s_n", "D", "E"),
                capability=capability,
                num_warps=warps,
                num_stages=2,
            )
        )

    for reverse in (False, True):
        add("sums_kernel", "xy", ("sums", "wholes"), REVERSE=reverse)
    add("outputs_kernel", "qkvo", ("starts",))
    add("values_backward_kernel", ("q", "k", "grad", "dv"), ("ends",))
    for name, into, states in (("keys", "dk", "ends"), ("queries", "dq", "starts")):
        add(f"{name}_backward_kernel", ("q", "k", "v", "grad", into), ("ddecay", states, "ahead"), keys=True)
    return compiled_all(requests)


# Bytes of the stack that registers spill to, with Triton 3.6 and 3.9: of the kernels up to the outputs, and of the
# gradients of q, k, v.
SPILLS = {
    ("bfloat16", 64, 90): (0, 96),
    ("bfloat16", 128, 90): (120, 256),
    ("bfloat16", 64, 80): (8, 192),
    ("float32", 64, 90): (56, 344),
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("dtype", "size", "capability"),
    [pytest.param(*case, marks=[pytest.mark.slow] if number else []) for number, case in enumerate(SPILLS)],
)
def test_builds_fit_a_gpu(dtype, size, capability):
    forward, backward = SPILLS[dtype, size, capability]
    for build in built(dtype, size, capability):
        allowed = backward if "backward" in build.kernel else forward
        assert build.stack <= allowed, (build.kernel, build.stack)
        assert build.shared <= LIMITS[capability]
        assert "cp.async" in build.ptx, build.kernel
        if capability == 90 and dtype == "bfloat16":
            assert "wgmma.mma_async" in build.ptx, build.kernel
