"""The Triton kernels of the causal convolution equal the definition, in values, states and gradients."""

import pytest
import torch
from ahead import LIMITS, compiled_all, request

from longspan import backend, causal_convolution
from longspan.testing.pairs import all_pairs
from ops.families import DEVICE, FAMILIES, SEQUENCES, TRITON, assert_close, cast, error, packing
from support.convolutions import check_step
from support.tensors import data

FAMILY = FAMILIES["convolution"]
KINDS = ("plain", "segments", "cu_seqlens")


def made(n, channels=37, taps=4, dtype=torch.float32, **options):
    return FAMILY.operands(n, (channels, taps), dtype=dtype, **options)


def outcome(form, given, **options):
    """The output, the state, and gradients from random ones, whose sums over the tokens do not cancel."""
    leaves = [t.detach().requires_grad_() for t in given.values()]
    found = FAMILY.run(form, dict(zip(given, leaves, strict=True)), activation="silu", **options)
    above = [data(*t.shape, seed=9).bfloat16().to(t) for t in found]
    return [*(t.detach() for t in found), *torch.autograd.grad(found, leaves, above)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [64, 200])
def test_blocks_within_one_sequence_take_no_borders(kind, n):
    """Long sequences, whose inner blocks take the shorter form; borders exactly between blocks."""
    packed = {
        "plain": {},
        "segments": {"segments": (torch.arange(n, device=DEVICE) // 96)[None]},
        "cu_seqlens": {"cu_seqlens": torch.tensor([0, n // 2, n // 2, n], device=DEVICE)},
    }[kind]
    given = made(n, 5, batch=1, more=1, states=3 if kind == "cu_seqlens" else 1)
    expected = outcome("reference", cast(given, torch.float64), **packed)
    assert_close(outcome("triton", given, **packed), expected, TRITON)


def test_sequences_do_not_see_each_other():
    """Exactly: NaN in one sequence reaches no other."""
    given, packed = made(67, 5, batch=1, states=SEQUENCES), packing("cu_seqlens", 67, 1)
    cut = packed["cu_seqlens"].tolist()[3]
    clean = FAMILY.outcome("triton", given, activation="silu", **packed)
    spoilt = {name: t.clone() for name, t in given.items()}
    spoilt["x"][:, :cut] = torch.nan
    spoilt["state"][:3] = torch.nan
    found = FAMILY.outcome("triton", spoilt, activation="silu", **packed)
    for name in ("output", "x"):
        assert found[name][:, cut:].equal(clean[name][:, cut:])
    for name in ("end", "state"):
        assert found[name][3:].equal(clean[name][3:])


def test_each_operand_keeps_its_dtype():
    given = made(29)
    given |= {"x": given["x"].bfloat16(), "weight": given["weight"].half()}
    exact = FAMILY.outcome("reference", cast(given, torch.float64), activation="silu")
    found = FAMILY.outcome("triton", given, activation="silu")
    dtypes = {name: t.dtype for name, t in given.items()} | {"output": torch.bfloat16, "end": torch.float32}
    assert {name: t.dtype for name, t in found.items()} == dtypes
    for name, t in found.items():
        assert error(t, exact[name]) <= (TRITON if t.dtype is torch.float32 else torch.finfo(t.dtype).eps)


STEPS = all_pairs(
    dtypes=((torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.bfloat16, torch.float32), (torch.float16,) * 2),
    sizes=((5, 4), (300, 4), (37, 7)),
    tokens_last=(False, True),
    donate=(False, True),
    activation=("silu", None),
)


def test_a_step_takes_states_of_any_strides_and_dtype():
    for row in STEPS:
        check_step("triton", **row, taps_first=row["tokens_last"])


def test_a_step_without_a_state_to_keep():
    given = made(1, 5, 1)
    with torch.no_grad():
        y, state = FAMILY.run("triton", given)
    assert_close([y], [given["x"] * given["weight"].mT + given["bias"]], TRITON)
    assert state.shape == (2, 0, 5)


def test_the_backward_pass_keeps_the_inputs_alone():
    given, kept = made(67), []
    leaves = [t.requires_grad_() for t in given.values()]
    with backend("triton"), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        causal_convolution(*leaves, activation="silu")
    assert {t.data_ptr() for t in kept} <= {t.data_ptr() for t in leaves}


@pytest.mark.parametrize("kind", KINDS)
def test_the_operations_for_the_compiler_are_described_right(kind):
    """Strides, dtypes and shapes of the fake implementations, and no operand changed."""
    batch = 1 if kind == "cu_seqlens" else 2
    packed = packing(kind, 9, batch)
    given = made(9, 5, batch=batch, states=SEQUENCES if kind == "cu_seqlens" else None, dtype=torch.bfloat16)
    given["state"] = given["state"].bfloat16()
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
    data = dict.fromkeys(("x", "state"), "*bf16")
    options = {"SILU": True, "C": 64}
    tuples = {"sizes": ("tokens", "channels", "rows", "sequences"), "taps": ("*bf16", "*bf16")}
    token = ("_b", "_n", 1)
    more = {"grad": "*bf16", "after": "*bf16"}
    requests = []
    for taps, kind in ((4, "offsets"), (8, "ids")):
        common = options | {"K": taps, "STEPS": 3, "ids" if kind == "offsets" else "offsets": None}
        forward, backward = common | {"T": 32}, common | {"T": 16 if taps > 4 else 32}
        given = data | {kind: marks[kind]}
        for name, pointers, constants, strides, warps in (
            ("forward", given | {"y": "*bf16"}, forward, (token, token), 4),
            ("backward", given | more | {"dx": "*bf16", "sums": "*fp32"}, backward, (token, token, token), 8),
        ):
            requests.append(
                request(
                    f"{module}:{name}",
                    pointers,
                    constants,
                    tuples=tuples | {"strides": strides},
                    multiples=("_b", "_n", "channels"),
                    capability=capability,
                    num_warps=warps,
                )
            )
    constants = options | {"T": 8, "ids": None}
    states = {"x": "*bf16", "state": "*fp32", "offsets": marks["offsets"]}
    starts = data | states | {"grad": "*bf16", "after": "*fp32", "first": "*fp32"}
    for name, pointers, left_out, more in (
        ("ends", states | {"last": "*fp32"}, ("SILU",), {"sizes": tuples["sizes"], "x_strides": token}),
        ("starts", starts, (), tuples | {"strides": (token, token)}),
    ):
        chosen = {key: value for key, value in constants.items() if key not in left_out}
        chosen |= {} if name == "ends" else {"K": 4}
        how = {"tuples": more, "capability": capability, "num_warps": 4}
        requests.append(request(f"{module}:{name}", pointers, chosen, **how))
    strides = ("_b", 1), ("_b", "_r", 1), ("_b", "_r", 1), ("_c", 1), 1
    pointers, constants = data | {"y": "*bf16", "after": "*bf16"}, options | {"K": 4, "R": 4, "C": 128}
    how = {"tuples": {"strides": strides, "taps": tuples["taps"]}, "capability": capability, "num_warps": 4}
    requests.append(request(f"{module}:step", pointers, constants, **how))
    for built in compiled_all(requests):
        assert built.stack <= 64, built.kernel
        assert built.shared <= LIMITS[capability], built.kernel
        if built.kernel.endswith(("forward", "backward")):
            assert built.count("ld.global.b16") == 0, built.kernel
            assert built.count("ld.global.v2.b32") + built.count("ld.global.v4.b32") > 20, built.kernel
