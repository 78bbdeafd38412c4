"""The delta rule and decay per channel with Triton kernels: values and gradients against the loop in float64."""

from functools import partial

import ahead
import pytest
import torch

from longspan.ops.gated import chunks
from longspan.ops.triton import interpreted
from ops.families import DEVICE, FAMILIES, cast, error

pytest.importorskip("triton")

# Compiled, a product of float32 is three of TF32, summed in another order.
LIMIT = 5e-7 if interpreted() else 3e-6


def assert_exact(name, n, sizes=(5, 3), *, strength=1.0, **options):
    """The kernels must be as close to the loop in float64 as the torch form in float32, or within the limit.

    Without decay a rounding error stays in the state, so that the torch form in float32 can be beyond the limit itself.
    """
    family = FAMILIES[name]
    given = family.operands(n, sizes, repeats=1, dtype=torch.float32, **options)
    if "log_decay" in given:
        given["log_decay"] *= strength
    expected = family.outcome("reference", cast(given, torch.float64), scale=0.7)

    def worst(form):
        found = family.outcome(form, given, scale=0.7)
        return max(error(found[part], right) for part, right in expected.items())

    assert (found := worst("triton")) <= LIMIT or found <= 1.5 * worst("torch")


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(chunks, "chunked", partial(chunks.chunked, chunk=16))


@pytest.mark.parametrize("sizes", [(1, 1), (17, 33), (65, 20), (128, 128)])
@pytest.mark.parametrize("name", ["delta-channel", "delta-none"])
def test_sizes(sizes, name, short_chunks):
    assert_exact(name, 20, sizes, strength=0.1, batch=1)


@pytest.mark.parametrize("n", [15, 16, 65, 129])
def test_lengths(n):
    assert_exact("delta-head", n, batch=1)


@pytest.mark.parametrize("name", ["delta-none", "delta-head", "delta-channel", "decay-channel"])
def test_states_pass_from_span_to_span(name, short_chunks, monkeypatch):
    monkeypatch.setattr(chunks, "SPAN", 32 * 4)
    monkeypatch.setattr(chunks, "TOGETHER", 0)
    n = 150 if DEVICE == "cpu" else 2000
    q, v = torch.zeros(2, 2, n, 5), torch.zeros(2, 2, n, 3)
    parts = chunks.Chunked(q, q, v, None, None, torch.zeros(2, 2, 5, 3), None, None, 1.0, chunk=16)
    assert len(parts.places) > 2
    assert_exact(name, n, strength=0.1)


def test_heads_of_more_than_128_channels_are_refused():
    family = FAMILIES["delta-none"]
    with pytest.raises(ValueError, match="128 channels"):
        family.run("triton", family.operands(20, (129, 3), dtype=torch.float32))


@pytest.mark.full
def test_kernels_compile_for_both_generations_of_cards():
    from longspan.ops.triton import delta

    first = "u w keys whole first states values end".split()
    second = "upstream reads w keys whole after ahead values before".split()
    wanted, limits = [], []
    for capability in (80, 90):
        for channels in (64, 128):
            tile = delta.tiles(channels, channels)
            constants = {"DELTA": True, "DECAY": 2, "TURNS": 0, "BC": 64, "BD": 64, "TWO": channels > 64}
            constants |= {"BE": tile.value_block, "PREC": "tf32x3"}
            how = {"multiples": ["width", "channels", "size"], "capability": capability}
            how |= {"tuples": {"sizes": ("chunks", "width", "channels", "size", 1)}}
            how |= {"num_warps": tile.warps, "num_stages": tile.stages}
            for name, pointers in (("forward_kernel", first), ("backward_kernel", second)):
                kernel, types = f"longspan.ops.triton.delta:{name}", dict.fromkeys(pointers, "*fp32")
                wanted.append(ahead.request(kernel, types, constants, **how))
                limits.append((ahead.LIMITS[capability], 64 if channels == 64 or capability == 90 else 128))
    for build, (shared, stack) in zip(ahead.compiled_all(wanted), limits, strict=True):
        assert build.shared <= shared
        assert build.stack <= stack
        assert build.count("cp.async.cg.shared.global") + build.count("cp.async.ca.shared.global") > 0
