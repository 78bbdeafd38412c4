"""One token of decay attention and the delta rule by the Triton kernel, against the definition in float64."""

import pytest
import torch
from ahead import LIMITS, compiled_all, request

import longspan
from longspan.ops.gated import recur

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
KINDS = ("none", "head", "channel")
LIMIT = 5e-7


def arguments(
    decay="head", delta=False, *, sizes=(17, 33), repeats=2, dtype=torch.float32, gates=torch.float32, seed=0
):
    """Operands of one token, B = 2, of transposed layouts; the gates and the state keep their dtypes."""
    generator, (d, e), heads = torch.Generator().manual_seed(seed), sizes, 2 * repeats

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    q, k = (draw(2, 1, 2, d).to(dtype).transpose(1, 2) for _ in range(2))
    v = draw(2, 1, heads, e).to(dtype).transpose(1, 2)
    given = {"log_decay": None, "beta": None, "state": draw(2, heads, d, e)}
    if decay != "none":
        shape = (2, 1, heads, d) if decay == "channel" else (2, 1, heads)
        given["log_decay"] = -draw(*shape).abs().to(gates).transpose(1, 2)
    if delta:
        given["beta"] = draw(2, 1, heads).sigmoid().to(gates).transpose(1, 2)
        k = k / d**0.5
    return {"q": q, "k": k, "v": v, **given}


def run(backend, given, **options):
    with longspan.backend(backend):
        return recur(**given, **options)


def test_donate_overwrites_the_state():
    given = arguments("head", delta=True)
    before, expected = given["state"].clone(), run("triton", given)
    assert torch.equal(given["state"], before)
    # A part of a larger tensor, all of which stays where it is.
    large = torch.full((2, 4, 17, 40), 7.0, device=DEVICE)
    given["state"] = state = large[..., :33].copy_(before)
    version = state._version
    found = run("triton", given, donate=True)
    assert found[1] is state
    assert state._version > version
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert bool((large[..., 33:] == 7.0).all())


def test_operands_that_do_not_fit_raise_as_elsewhere():
    given = arguments("head")
    with longspan.backend("triton"), pytest.raises(ValueError, match="log_decay"):
        longspan.decay_attention(
            given["q"], given["k"], given["v"], log_decay=given["log_decay"][:, 1:], state=given["state"]
        )


@pytest.mark.full
def test_builds_fit_a_gpu():
    """In one pass: no registers spill for heads of up to 256 channels."""
    tuples = {f"{name}s": ("s_b", "s_h", 1) for name in "qkvg"}
    tuples |= {"bs": ("s_b", "s_h"), "ss": ("s_b", "s_h", "s_d", 1)}
    pointers = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | dict.fromkeys(("state", "decay", "beta"), "*fp32")
    requests = [
        request(
            "longspan.ops.triton.gated_step:step_kernel",
            pointers | {"after": "*fp32"},
            {"CHANNELS": True, "NORMALIZE": True, "DONATE": True, "WIDE": False, "BD": size, "BE": 2048 // size},
            tuples=tuples,
            floats=["scale"],
            multiples=("s_b", "s_h", "s_d", "D", "E"),
            capability=capability,
            num_warps=4,
        )
        for size in (64, 256)
        for capability in (80, 90)
    ]
    for build in compiled_all(requests):
        assert build.stack == 0
        assert build.shared <= LIMITS[80]
        assert ".v4" in build.ptx  # the state is read and written in wide accesses
