"""The general delta rule: its limits, long and cut sequences, and what it refuses."""

import pytest
import torch

import longspan
from longspan import general_delta_rule
from longspan.ops.gated import chunks, general, general_chunks
from longspan.ops.native.call import available
from ops.families import FAMILIES, assert_close, cast

FORMS = ("reference", "torch", *(["native"] if available("general") else []))
EARLY = {"read_before_decay": True}
FAMILY = FAMILIES["general-channel"]


def made(n, **options):
    """Operands with reads of length 1 and erasures of 0 to 1 times the reads."""
    return FAMILY.operands(n, **{"sizes": (6, 5), "repeats": 1} | options)


def test_the_delta_rule_is_a_case():
    given = made(70, repeats=1)
    q, k, v = (given[name] for name in ("query", "read", "value"))
    beta, options = torch.rand(2, 2, 70).double(), {"log_decay": given["log_decay"], "state": given["state"]}
    expected = longspan.delta_rule(q, k, v, beta=beta, **options, return_state=True)
    rate = beta[..., None]
    found = general_delta_rule(q, k, rate * v, read=k, erase=rate * k, **options, return_state=True)
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("early", [False, True])
def test_what_is_forgotten_is_gone(early):
    """The state before -inf has no effect, except on a token that reads before its decay."""
    given = made(3)
    given["log_decay"][:, :, 1] = -torch.inf
    same = {**given, "state": given["state"] * 0, "read": given["read"].clone()}
    same["read"][:, :, :2] = given["read"][:, :, :2] = 0.0
    found = [general_delta_rule(**one, read_before_decay=early)[:, :, 1:] for one in (given, same)]
    assert_close(found[:1], found[1:], 1e-12)


@pytest.mark.parametrize("form", FORMS[1:])
@pytest.mark.parametrize("rates", [[0.0, 1.0], [0.0], [1.0]], ids=str)
def test_the_decay_of_rwkv7_over_a_long_sequence(form, rates):
    """At the strongest decay e^-0.6065 of each token and channel, for 4096 tokens, with a = 0 and a = 1."""
    given = made(4096, batch=1, sizes=(8, 8), dtype=torch.float32)
    given["log_decay"] = torch.full_like(given["log_decay"], -0.60653066)
    given["erase"] = given["read"] * torch.tensor(rates).repeat(8 // len(rates))
    exact = cast(given, torch.float64)
    expected = FAMILY.outcome("torch", exact, **EARLY)
    assert_close(FAMILY.outcome(form, given, **EARLY), expected, FAMILY.rounded if form == "native" else 2e-5)
    if len(rates) == 2:
        assert_close([expected["output"]], [FAMILY.run("reference", exact, **EARLY)[0]], 1e-12)


def test_spans_and_chunks_give_one_answer(monkeypatch):
    given = made(150, repeats=2)
    expected = FAMILY.outcome("reference", given, **EARLY)
    monkeypatch.setattr(chunks, "SPAN", 2 * 2 * 2 * 64)
    assert_close(FAMILY.outcome("torch", given, **EARLY), expected, 1e-12)
    operands = {{"query": "q", "key": "k", "value": "v"}.get(name, name): t for name, t in given.items()}
    r = general.GeneralRecurrence(**operands, scale=6**-0.5, early=True)
    for chunk in (1, 2, 8, 32):
        found = general_chunks.composed(r, chunk=chunk)
        assert_close(found, list(expected.values())[:2], 1e-12)


def test_the_exported_operation_keeps_the_rules_of_torch():
    given = {name: t.requires_grad_() for name, t in made(4).items()}
    ordered = [given[name] for name in ("query", "key", "value", "read", "erase", "log_decay", "state")]
    wanted = ("test_schema", "test_autograd_registration", "test_faketensor")
    operation = torch.ops.longspan.general_recurrence
    torch.library.opcheck(operation, (*ordered, None, None, None, 0.5, True), test_utils=wanted)


def test_a_donated_state_that_is_also_read_is_refused():
    state = torch.zeros(1, 1, 4, 4)
    x = state[:, :, :1]
    with pytest.raises(ValueError, match="shares memory with query"):
        general_delta_rule(x, x, x, read=x, erase=x, state=state, donate=True)


def test_heads_without_channels_read_nothing():
    out, end = general_delta_rule(**made(4, sizes=(0, 3)), return_state=True)
    assert out.shape == (2, 2, 4, 3)
    assert not out.any()
    assert end.shape == (2, 2, 0, 3)


@pytest.mark.skipif("native" not in FORMS, reason="no native kernels here")
def test_kernels_refuse_reads_of_another_dtype():
    mixed = made(5, dtype=torch.float32)
    mixed["read"] = mixed["read"].bfloat16()
    message = "cannot serve this call of the general delta rule: they take reads and erasures"
    with longspan.backend("native"), pytest.raises(ValueError, match=message):
        general_delta_rule(**mixed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"read": torch.zeros(2, 2, 4, 5)}, "read must be a floating-point tensor"),
        ({"erase": torch.zeros(2, 2, 4, 6, dtype=torch.long)}, "erase must be a floating-point tensor"),
        ({"value": torch.zeros(2, 3, 4, 5)}, r"^log_decay must be .*\(2, 3, 4\) or \(2, 3, 4, 6\), not"),
        ({"log_decay": torch.zeros(2, 2, 4, 5)}, "log_decay must be a floating-point tensor"),
        ({"scale": float("nan")}, "must be a finite number"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        general_delta_rule(**made(4, dtype=torch.float32) | changes)
