"""One token of decay attention and the delta rule by the Triton kernel, against the definition in float64."""

import itertools

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


def exact(given, **options):
    return run("reference", {name: t if t is None else t.double() for name, t in given.items()}, **options)


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("decay", "delta", "normalize"), list(itertools.product(KINDS, (False, True), (None, "l2"))), ids=str
)
def test_step_is_the_definition(decay, delta, normalize):
    for sizes, repeats, scale in (((17, 33), 2, None), ((64, 1), 1, 0.7), ((1, 130), 3, 2)):
        given = arguments(decay, delta, sizes=sizes, repeats=repeats)
        with longspan.ops.watch() as seen:
            found = run("triton", given, normalize=normalize, scale=scale)
        assert [use.backend for use in seen] == ["triton"]
        expected = exact(given, normalize=normalize, scale=scale)
        assert all(error(a, b) < LIMIT for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("delta", [False, True])
def test_half_precision_rounds_only_the_output(delta, dtype):
    given = arguments("channel", delta, dtype=dtype, gates=dtype)
    (o, state), (plain, _), (exact_o, exact_state) = run("triton", given), run("torch", given), exact(given)
    assert o.dtype == dtype
    assert state.dtype == torch.float32
    assert error(state, exact_state) < LIMIT
    assert error(o, exact_o) <= 1.5 * error(plain, exact_o)


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


def test_public_ops_take_the_step():
    given = arguments("head", delta=True)
    q, k, v, rest = given["q"], given["k"], given["v"], {"log_decay": given["log_decay"], "return_state": True}
    with longspan.backend("triton"):
        for op, gates in ((longspan.decay_attention, {}), (longspan.delta_rule, {"beta": given["beta"]})):
            state = given["state"].clone()
            o, after = op(q, k, v, state=state, donate=True, **gates, **rest)
            assert after is state
            expected = exact(given | {"beta": gates.get("beta")})
            assert error(o, expected[0]) < LIMIT
            assert error(after, expected[1]) < LIMIT


@pytest.mark.parametrize("decay", ["head", "channel"])
def test_minus_infinity_clears_the_state(decay):
    given = arguments(decay)
    given["log_decay"] = torch.full_like(given["log_decay"], -torch.inf)
    o, state = run("triton", given, scale=1.0)
    cleared = exact(given | {"state": torch.zeros_like(given["state"])}, scale=1.0)
    assert error(o, cleared[0]) < LIMIT
    assert error(state, cleared[1]) < LIMIT


def test_two_runs_give_the_same_bits():
    given = arguments("channel", delta=True, sizes=(64, 128))
    assert all(torch.equal(a, b) for a, b in zip(run("triton", given), run("triton", given), strict=True))


def test_operands_that_do_not_fit_raise_as_elsewhere():
    given = arguments("head")
    with longspan.backend("triton"), pytest.raises(ValueError, match="log_decay"):
        longspan.decay_attention(
            given["q"], given["k"], given["v"], log_decay=given["log_decay"][:, 1:], state=given["state"]
        )


@pytest.mark.full
def test_builds_fit_a_gpu():
    """In one pass: no registers spill for heads of up to 256 channels."""
    names = [f"{t}s_{axis}" for t in "qkvg" for axis in "bhd"] + ["bs_b", "bs_h", "ss_b", "ss_h", "ss_d", "ss_e"]
    ones = {"qs_d": 1, "ks_d": 1, "vs_d": 1, "gs_d": 1, "ss_e": 1}
    pointers = dict.fromkeys(("q", "k", "v", "out"), "*bf16") | dict.fromkeys(("state", "decay", "beta"), "*fp32")
    requests = [
        request(
            "longspan.ops.triton.gated_step:step_kernel",
            pointers | {"after": "*fp32"},
            ones | {"CHANNELS": True, "NORMALIZE": True, "DONATE": True, "WIDE": False, "BD": size, "BE": 2048 // size},
            floats=["scale"],
            multiples=[name for name in names if name not in ones] + ["D", "E"],
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
