"""The Triton kernels of the causal convolution equal the definition, in values, states and gradients."""

import pytest
import torch
from ahead import LIMITS, compiled_all, request

from longspan import backend, causal_convolution
from longspan.ops import watch
from longspan.testing.pairs import all_pairs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROUNDED = 5e-7


def arguments(n=29, channels=37, taps=4, *, rows=None, batch=2, bias=True, dtype=torch.float32, states=None):
    generator = torch.Generator().manual_seed(n + channels)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(DEVICE, dtype)

    return {
        "x": random(batch, n, channels),
        "weight": random(channels, taps) / taps,
        "bias": random(channels) if bias else None,
        "state": random(states or batch, taps - 1 if rows is None else rows, channels),
    }


def to(given, dtype):
    return {name: None if t is None else t.to(dtype) for name, t in given.items()}


def outcome(given, name, **options):
    """y, the state and the gradients of all inputs from random ones of both, by a backend."""
    inputs = {which: None if t is None else t.detach().requires_grad_() for which, t in given.items()}
    with backend(name):
        outputs = causal_convolution(**inputs, **options)
    generator = torch.Generator().manual_seed(9)
    # Exact in every type.
    upstream = [torch.randn(t.shape, generator=generator).bfloat16().to(t) for t in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [t for t in inputs.values() if t is not None], upstream)]


def errors(found, expected):
    """The largest difference of each, relative to the largest value."""
    assert [t.shape for t in found] == [t.shape for t in expected]
    pairs = [(a.double(), b.double()) for a, b in zip(found, expected, strict=True) if a.numel()]
    return [((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in pairs]


def packing(kind, n, batch):
    """The arguments that mark the starts of sequences, empty ones included."""
    if kind == "plain":
        return {}
    if kind == "segments":
        generator = torch.Generator().manual_seed(n)
        return {"segments": (torch.randint(0, 2, (batch, n), generator=generator).cumsum(1) // 3).to(DEVICE)}
    two = min(2, n)
    cuts = [0, 0, two, two, max(n // 2, two), max(n // 2, two) + (n > 40), n, n]
    return {"cu_seqlens": torch.tensor(cuts, dtype=torch.int32, device=DEVICE)}


KINDS = ("plain", "segments", "cu_seqlens")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [64, 200])
def test_blocks_within_one_sequence_take_no_borders(kind, n):
    """Long sequences, whose inner blocks take the shorter form; borders exactly between blocks."""
    packed = {
        "plain": {},
        "segments": {"segments": (torch.arange(n, device=DEVICE) // 96)[None]},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, n // 2, n // 2, n], device=DEVICE)},
    }[kind]
    given = arguments(n, 5, rows=4, batch=1, states=3 if kind == "cu_seqlens" else 1)
    expected = outcome(to(given, torch.float64), "reference", activation="silu", **packed)
    assert max(errors(outcome(given, "triton", activation="silu", **packed), expected)) <= ROUNDED


def test_sequences_do_not_see_each_other():
    """Exactly: NaN in one sequence reaches no other."""
    given, packed = arguments(67, 5, batch=1, states=7), packing("cu_seqlens", 67, 1)
    cuts = packed["cu_seqlens"].tolist()
    y, *_ = clean = outcome(given, "triton", activation="silu", **packed)
    spoilt = {name: t.clone() for name, t in given.items()}
    spoilt["x"][:, : cuts[4]] = torch.nan
    spoilt["state"][:4] = torch.nan
    after, ends, dx, *_, first = outcome(spoilt, "triton", activation="silu", **packed)
    assert after[:, cuts[4] :].equal(y[:, cuts[4] :])
    assert ends[4:].equal(clean[1][4:])
    assert dx[:, cuts[4] :].equal(clean[2][:, cuts[4] :])
    assert first[4:].equal(clean[-1][4:])


LAYOUTS = {
    "tokens last": lambda t: t.mT.contiguous().mT,
    "every other channel": lambda t: torch.stack([t, t], -1).flatten(-2)[..., ::2],
    "rows reversed in memory": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_read_where_they_are(layout):
    given = arguments(67, 37)
    moved = {name: LAYOUTS[layout](t) if t.dim() == 3 else t for name, t in given.items()}
    moved["weight"] = given["weight"].mT.contiguous().mT
    expected = outcome(to(given, torch.float64), "reference", activation="silu")
    found = outcome(moved, "triton", activation="silu")
    assert max(errors(found, expected)) <= ROUNDED
    if layout != "every other channel":
        assert found[0].stride() == moved["x"].stride()


def test_each_operand_keeps_its_dtype():
    given = arguments(29, 37)
    given |= {"x": given["x"].bfloat16(), "weight": given["weight"].half()}
    exact = outcome(to(given, torch.float64), "reference", activation="silu")
    found = outcome(given, "triton", activation="silu")
    half, wide = torch.bfloat16, torch.float32
    assert [t.dtype for t in found] == [half, wide, half, torch.float16, wide, wide]
    for t, error in zip(found, errors(found, exact), strict=True):
        assert error <= (ROUNDED if t.dtype is wide else torch.finfo(t.dtype).eps)


STEPS = all_pairs(
    dtypes=((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2),
    sizes=((5, 3), (300, 3), (37, 6)),
    tokens_last=(False, True),
    donate=(False, True),
    activation=("silu", None),
)


def test_a_step_takes_states_of_any_strides_and_dtype():
    for row in STEPS:
        (dtype, kept), (channels, rows), tokens_last, donate, activation = row.values()
        given = arguments(1, channels, rows=rows, batch=3, dtype=dtype, bias=not tokens_last)
        given["state"] = given["state"].to(kept)
        if tokens_last:
            given["state"], given["weight"] = (given[t].mT.contiguous().mT for t in ("state", "weight"))
        with backend("reference"):
            exact = causal_convolution(**to(given, torch.float64), activation=activation)
        before = given["state"].clone()
        with torch.no_grad(), backend("triton"), watch() as seen:
            y, state = causal_convolution(**given, activation=activation, donate=donate)
        assert [use.backend for use in seen] == ["triton"]
        assert y.dtype is dtype
        assert errors([y], exact[:1])[0] <= (ROUNDED if dtype is torch.float32 else torch.finfo(dtype).eps)
        assert state.double().equal(exact[1])
        assert state.dtype is kept
        assert state.stride() == given["state"].stride()
        assert (state.data_ptr() == given["state"].data_ptr()) is donate
        assert donate or given["state"].equal(before)


def test_a_step_without_a_state_to_keep():
    given = arguments(1, 5, 1)
    with torch.no_grad(), backend("triton"):
        y, state = causal_convolution(**given)
    assert errors([y], [given["x"] * given["weight"].mT + given["bias"]])[0] <= ROUNDED
    assert state.shape == (2, 0, 5)


def test_the_backward_pass_keeps_the_inputs_alone():
    given, kept = arguments(67), []
    leaves = [t.requires_grad_() for t in given.values()]
    with backend("triton"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        causal_convolution(*leaves, activation="silu")
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in leaves}


@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_for_the_compiler_are_described_right(kind):
    """Strides, dtypes and shapes of the fake implementations, and no operand changed."""
    batch = 1 if kind == "cu_seqlens" else 2
    packed = packing(kind, 9, batch)
    given = arguments(9, 5, batch=batch, states=7 if kind == "cu_seqlens" else None, dtype=torch.bfloat16)
    given["x"] = given["x"].mT.contiguous().mT
    marks = packed.get("segments"), packed.get("cu_seqlens")
    checks = ("test_schema", "test_faketensor")
    with backend("triton"):
        operands = (*given.values(), None, *marks, True)
        torch.library.opcheck(
            torch.ops.longspan.triton_convolution_forward.default, (*operands, True), test_utils=checks
        )
        grads = torch.randn_like(given["x"]), torch.randn_like(given["state"])
        given = (*grads, *operands, [True] * 4)
        torch.library.opcheck(torch.ops.longspan.triton_convolution_backward.default, given, test_utils=checks)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"x": torch.zeros(1, 5, 2, dtype=torch.float64)}, "they take float32, bfloat16 or float16"),
        ({"weight": torch.zeros(2, 9)}, "they take at most 8 taps"),
        ({"x": torch.zeros(1, 0, 2)}, "there is nothing to compute"),
    ],
)
def test_what_the_kernels_cannot_serve_is_refused(changes, reason):
    given = {"x": torch.zeros(1, 5, 2), "weight": torch.zeros(2, 4)} | changes
    given = {name: t.to(DEVICE) for name, t in given.items()}
    with (
        backend("triton"),
        pytest.raises(ValueError, match=f"cannot serve this call of the causal convolution: {reason}"),
    ):
        causal_convolution(**given)
    assert causal_convolution(**given)[0].shape == given["x"].shape


@pytest.mark.full
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_kernels_compile_without_spilling(capability):
    """For contiguous operands of 16 bytes, loads are wide: no scalar loads but those of borders."""
    module = "longspan.ops.triton.convolution"
    marks = {"ids": "*i64", "offsets": "*i32"}
    data = dict.fromkeys(("x", "weight", "bias", "state"), "*bf16")
    options = {"SILU": True, "C": 64}
    tuples = {"x_strides": ("_b", "_n", 1), "sizes": ("tokens", "channels", "rows", "sequences")}
    more = {"grad": "*bf16", "after": "*bf16"}
    requests = []
    for taps, kind in ((4, "offsets"), (8, "ids")):
        common = options | {"K": taps, "STEPS": 3, "ids" if kind == "offsets" else "offsets": None}
        forward, backward = common | {"T": 32}, common | {"T": 16 if taps > 4 else 32}
        given = data | {kind: marks[kind]}
        for name, pointers, constants, strides, warps in (
            ("forward", given | {"y": "*bf16"}, forward, ("y",), 4),
            ("backward", given | more | {"dx": "*bf16", "sums": "*fp32"}, backward, ("grad", "dx"), 8),
        ):
            requests.append(
                request(
                    f"{module}:{name}",
                    pointers,
                    constants,
                    tuples=tuples | {f"{name}_strides": ("_b", "_n", 1) for name in strides},
                    multiples=("_b", "_n", "channels"),
                    capability=capability,
                    num_warps=warps,
                )
            )
    constants = options | {"T": 8, "ids": None}
    states = {"x": "*bf16", "state": "*fp32", "offsets": marks["offsets"]}
    starts = data | states | {"grad": "*bf16", "after": "*fp32", "first": "*fp32"}
    grads = {"grad_strides": ("_b", "_n", 1)}
    for name, pointers, left_out, strides in (
        ("ends", states | {"last": "*fp32"}, ("SILU",), {}),
        ("starts", starts, (), grads),
    ):
        chosen = {key: value for key, value in constants.items() if key not in left_out}
        chosen |= {} if name == "ends" else {"K": 4}
        how = {"tuples": tuples | strides, "capability": capability, "num_warps": 4}
        requests.append(request(f"{module}:{name}", pointers, chosen, **how))
    strides = {"x_strides": ("_b", 1), "weight_strides": ("_c", 1)}
    strides |= {f"{name}_strides": ("_b", "_r", 1) for name in ("state", "after")}
    pointers, constants = data | {"y": "*bf16", "after": "*bf16"}, options | {"K": 4, "R": 4, "C": 128, "bias_c": 1}
    how = {"tuples": strides, "capability": capability, "num_warps": 4}
    requests.append(request(f"{module}:step", pointers, constants, **how))
    for built in compiled_all(requests):
        assert built.stack <= 64, built.kernel
        assert built.shared <= LIMITS[capability], built.kernel
        if built.kernel.endswith(("forward", "backward")):
            assert built.count("ld.global.b16") == 0, built.kernel
            assert built.count("ld.global.v2.b32") + built.count("ld.global.v4.b32") > 20, built.kernel
