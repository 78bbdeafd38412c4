"""The diagonal and the selective scan: the definition equals the equations, -inf clears, memory, and refusals.

``test_op_laws.py`` compares all forms with the definition.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from longspan import diagonal_scan, selective_scan
from longspan.ops.native.call import available
from longspan.testing.pairs import all_pairs
from ops.families import FAMILIES, SEQUENCES, assert_close, packing

needs_kernels = pytest.mark.skipif(not available("scan"), reason="no native kernels here")
FORMS = ["reference", "torch", pytest.param("native", marks=needs_kernels)]
DIAGONAL, SELECTIVE = FAMILIES["diagonal"], FAMILIES["selective"]
KINDS = ("diagonal", "selective")
SCANS = {"diagonal": diagonal_scan, "selective": selective_scan}
TOKENS = DIAGONAL.tokens


def defined(given, mask=None, segments=None, cu_seqlens=None, softplus=None):
    """The scan of one number after the other, from the equations: output and last state."""
    softplus = "dt_bias" in given if softplus is None else softplus
    x, state, out = given["x"], given["state"], []
    if cu_seqlens is not None:
        ends, states = cu_seqlens.tolist(), []
        for s in range(len(ends) - 1):
            here = {k: t[:, ends[s] : ends[s + 1]] if k in TOKENS else t for k, t in given.items()}
            real = None if mask is None else mask[:, ends[s] : ends[s + 1]]
            y, last = defined(here | {"state": state[s : s + 1]}, real, softplus=softplus)
            out.append(y)
            states.append(last)
        return torch.cat(out, 1), torch.cat(states)
    for t in range(x.shape[1]):
        if segments is not None and t:
            new = segments[:, t] != segments[:, t - 1]
            state = torch.where(new.view(-1, *[1] * (state.dim() - 1)), 0.0, state)
        if "log_decay" in given:
            y = after = given["log_decay"][:, t].exp() * state + x[:, t]
        else:
            dt = given["dt"][:, t] + given.get("dt_bias", 0.0)
            dt = (torch.logaddexp(dt, torch.zeros_like(dt)) if softplus else dt)[..., None]
            row = given["B"][:, t, None]
            after = (dt * given["A"]).exp() * state if "A" in given else (1 - dt * row**2) * state
            after = after + dt * row * x[:, t, :, None]
            y = torch.einsum("bcs,bs->bc", after, given["C"][:, t]) + given.get("D", 0.0) * x[:, t]
            y = y * F.silu(given["z"][:, t]) if "z" in given else y
        if mask is not None:
            y = torch.where(mask[:, t, None], y, 0.0)
            after = torch.where(mask[:, t].view(-1, *[1] * (after.dim() - 1)), after, state)
        state = after
        out.append(y)
    return torch.stack(out, 1) if out else torch.zeros_like(x), state


@pytest.mark.whole
@pytest.mark.parametrize(
    "row",
    all_pairs(
        kind=KINDS,
        bare=(False, True),
        rates=(True, False),
        n=(1, 9, 67),
        around=("plain", "mask", "segments", "cu_seqlens", "mask+segments", "mask+cu_seqlens"),
    ),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_the_definition_equals_the_equations(row):
    """In values and gradients."""
    family, packed = FAMILIES[row["kind"]], "cu_seqlens" in row["around"]
    shapes = {name: row[name] for name in family.shapes}
    given = family.operands(row["n"], (3, 2), batch=1 if packed else 2, states=SEQUENCES if packed else None, **shapes)
    options = packing(row["around"], row["n"], 1 if packed else 2)
    expected = family._replace(call=defined).outcome("reference", given, **options)
    assert_close(family.outcome("reference", given, **options), expected, family.exact)


@pytest.mark.parametrize("name", FORMS)
def test_minus_infinity_clears_a_state_of_infinity_and_nan(name):
    """Their gradients stay on their side."""
    for bad in (torch.inf, torch.nan):
        given = DIAGONAL.operands(9, (3, 1), dtype=torch.float32)
        given["log_decay"][:, 5] = -torch.inf
        clean = DIAGONAL.outcome(name, given)
        given["x"][:, 2] = bad
        found = DIAGONAL.outcome(name, given)
        assert not found["output"][:, 4].isfinite().any()
        for part in ("output", "x", "log_decay"):
            assert found[part][:, 5:].equal(clean[part][:, 5:])
        assert found["x"].equal(clean["x"])
        assert found["log_decay"][:, 5].eq(0).all()


def test_the_state_may_not_overlap_what_is_read():
    state = torch.zeros(1, 5)
    with pytest.raises(ValueError, match="overwrites the state, which shares memory with x"):
        diagonal_scan(state[None], torch.zeros(1, 1, 5), state=state, donate=True)
    state = torch.zeros(1, 5, 4)
    token, states = torch.zeros(1, 1, 5), torch.zeros(1, 1, 4)
    with pytest.raises(ValueError, match="overwrites the state, which shares memory with A"):
        selective_scan(token, token, state[0], states, states, state=state, donate=True)


@needs_kernels
def test_training_keeps_a_small_part_of_the_states():
    """At 2048 tokens: what the graph keeps beyond the operands, in numbers of B N channels S."""
    n, channels, size = 2048, 64, 16
    given, kept = SELECTIVE.operands(n, (channels, size), batch=1, dtype=torch.float32), {}
    leaves = {k: t.requires_grad_() for k, t in given.items()}

    def keep(t):
        kept[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        selective_scan(**leaves, softplus=True)
    own = {t.data_ptr() for t in leaves.values()}
    numbers = sum(t.numel() for place, t in kept.items() if place not in own)
    assert 0 < numbers <= n * channels * size / 64 + 2 * n * size


TRAINING = """
import torch, longspan

def train(n, channels=128, size=64):
    x, dt, B, C = (torch.randn(1, n, width, requires_grad=True) for width in (channels, channels, size, size))
    A = -torch.rand(channels, size).requires_grad_()
    longspan.selective_scan(x, dt, A, B, C, softplus=True).sum().backward()

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))

train(65)
before = peak()
train(2048)
print((peak() - before) * 1024 / (2048 * 128 * 64 * 4))
"""


@pytest.mark.full
@needs_kernels
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc reports the peak")
def test_the_peak_of_training_is_a_small_part_of_the_states():
    """At 2048 tokens: operands, outputs and gradients are 6 times 1/64 of B N channels S numbers, and B and C 1/32."""
    done = subprocess.run([sys.executable, "-c", TRAINING], capture_output=True, text=True, check=True)
    assert 0.02 < float(done.stdout) < 0.25


def test_a_scan_without_states_is_the_skip():
    given = SELECTIVE.operands(3, (5, 0))
    y, state = SELECTIVE.run("auto", given)
    torch.testing.assert_close(y, given["D"] * given["x"] * F.silu(given["z"]))
    assert state.shape == (2, 5, 0)


@needs_kernels
def test_kernels_refuse_more_than_64_states():
    with pytest.raises(ValueError, match="they take at most 64 states of a channel"):
        SELECTIVE.run("native", SELECTIVE.operands(5, (5, 65), dtype=torch.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_no_channels_give_no_output(kind):
    y, _ = FAMILIES[kind].run("auto", FAMILIES[kind].operands(3, (0, 4), dtype=torch.float32))
    assert y.shape == (2, 3, 0)


TOKEN, STATE = torch.zeros(2, 7, 5), torch.zeros(2, 7, 4)


@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("diagonal", {"x": torch.zeros(2, 7)}, r"^x must be .*\(B, N, C\), not torch.float32 \(2, 7\)"),
        ("diagonal", {"log_decay": TOKEN[..., :4]}, r"^log_decay must be a floating-point tensor \(2, \d, 5\)"),
        ("selective", {"dt": TOKEN[..., :4]}, r"^dt must be a floating-point tensor \(2, \d, 5\)"),
        ("selective", {"z": TOKEN[..., :4]}, r"^z must be"),
        ("selective", {"A": torch.zeros(4, 4)}, r"^A must be .*\(channels, S\) = \(5, S\)"),
        ("selective", {"B": STATE[..., :3]}, r"^B must be a floating-point tensor \(2, \d, 4\)"),
        ("selective", {"C": STATE[..., :3]}, r"^C must be a floating-point tensor \(2, \d, 4\)"),
        ("selective", {"D": torch.zeros(4)}, r"^D must be a floating-point tensor \(5,\)"),
        ("selective", {"dt_bias": torch.zeros(4)}, r"^dt_bias must be a floating-point tensor \(5,\)"),
        ("selective", {"state": torch.zeros(2, 5, 3)}, r"state must be .*\(B, channels, S\) = \(2, 5, 4\), not"),
    ],
)
def test_what_does_not_fit_is_refused(kind, changes, message, tokens):
    if kind == "diagonal":
        given = {"x": TOKEN, "log_decay": TOKEN, "state": torch.zeros(2, 5)}
    else:
        given = {"x": TOKEN, "dt": TOKEN, "A": torch.zeros(5, 4), "B": STATE, "C": STATE, "state": torch.zeros(2, 5, 4)}
    given = {k: t[:, :tokens] if k in TOKENS and t.dim() == 3 else t for k, t in (given | changes).items()}
    with pytest.raises(ValueError, match=message):
        SCANS[kind](**given)
