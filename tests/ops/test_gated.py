"""Decay and the delta rule: the definition in a dense form, chunks and spans of the form in torch, and refusals.

``test_op_laws.py`` compares all forms with the definition.
"""

import itertools

import pytest
import torch

import longspan
from longspan import backend
from longspan.ops import gated
from longspan.ops.gated import chunks, definition
from longspan.ops.gated import native as kernels
from longspan.ops.gated.operands import Recurrence
from longspan.ops.native.call import available
from longspan.ops.segments import cut
from longspan.testing.pairs import all_pairs
from ops.families import FAMILIES, assert_close, packing, upstream

needs_kernels = pytest.mark.skipif(not available("gated"), reason="no native kernels here")
DECAYS = ("none", "head", "channel")
KINDS = list(itertools.product(DECAYS, (False, True)))


def arguments(n, decay="head", delta=True, **options):
    return FAMILIES[f"{'delta' if delta else 'decay'}-{decay}"].operands(n, **options)


def recurrence(given, **options):
    """The operands as the forms take them."""
    names = {"query": "q", "key": "k", "value": "v"}
    given = {"log_decay": None, "beta": None} | {names.get(name, name): t for name, t in given.items()}
    return Recurrence(**given, **{"scale": 0.7} | options)


def outcome(form, given, **options):
    """Outputs, the state and the gradients of all operands by a form."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in given.items()}
    found = form(recurrence(leaves, **options))
    return [*found, *torch.autograd.grad(found, list(leaves.values()), upstream(found, options.get("mask"), 2))]


def dense(query, key, value, state, log_decay=None, beta=None, scale=1.0):
    """Every output as a sum over all tokens before it, from explicit products of D by D transition matrices."""
    (batch, heads, n, e), d = value.shape, query.shape[-1]
    query, key = (t.repeat_interleave(heads // key.shape[1], 1) for t in (query, key))
    eye = torch.eye(d, dtype=value.dtype)
    decay = torch.zeros(batch, heads, n, d, dtype=value.dtype) if log_decay is None else log_decay
    decay = decay[..., None].expand(-1, -1, -1, d) if decay.dim() == 3 else decay
    erase = torch.zeros(batch, heads, n, dtype=value.dtype) if beta is None else beta
    moves = (eye - erase[..., None, None] * key[..., :, None] * key[..., None, :]) @ torch.diag_embed(decay.exp())
    writes = value if beta is None else beta[..., None] * value
    out = []
    for t in range(n):
        read, o = query[:, :, t, None, :] * scale, torch.zeros(batch, heads, 1, e, dtype=value.dtype)
        for s in range(t, -1, -1):
            o = o + (read @ key[:, :, s, :, None]) * writes[:, :, s, None, :]
            read = read @ moves[:, :, s]
        out.append(o + read @ state)
    return torch.cat(out, 2)


@pytest.mark.parametrize(("decay", "delta"), KINDS)
def test_the_definition_equals_the_dense_form(decay, delta):
    given = arguments(11, decay, delta)
    o, _ = definition.attend(recurrence(given))
    assert_close([o], [dense(**given, scale=0.7)], 1e-12)


@pytest.mark.whole
@pytest.mark.parametrize(
    "row",
    all_pairs(
        kind=KINDS,
        chunk=(8, 1, 2, 16, 128),
        n=(67, 29, 139, 2),
        around=("plain", "mask", "segments", "mask+segments"),
        repeats=(1, 2),
    ),
    ids=lambda row: "-".join(map(str, row.values())),
)
def test_any_chunk_gives_one_answer(row):
    given = arguments(row["n"], *row["kind"], repeats=row["repeats"])
    options = packing(row["around"], row["n"], 2)
    found = outcome(lambda r: chunks.chunked(r, chunk=row["chunk"]), given, **options)
    assert_close(found, outcome(definition.attend, given, **options), 1e-12)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("packed", [False, True])
def test_states_of_more_chunks_than_one_product_holds(decay, packed, monkeypatch):
    """As on a GPU, where a span is the whole sequence."""
    monkeypatch.setattr(chunks, "GROUP", 3)
    monkeypatch.setattr(chunks.Chunked, "places", property(lambda r: cut(r.q.shape[2], r.chunk, r.q.shape[2])))
    segments = (torch.arange(67) // 13)[None].expand(2, -1) if packed else None
    given = arguments(67, decay, delta=False)
    found, expected = (outcome(form, given, segments=segments) for form in (chunks.attend, definition.attend))
    assert_close(found, expected, 1e-12)


@pytest.mark.parametrize("row", all_pairs(kind=KINDS[2:], packed=(False, True), spans=(1, 3)), ids=str)
def test_any_span_gives_one_answer(monkeypatch, row):
    monkeypatch.setattr(chunks, "SPAN", row["spans"] * 16 * 4)
    # Of the packed sequences some begin where spans do.
    segments = torch.arange(139).div(48, rounding_mode="floor").expand(2, -1) if row["packed"] else None
    given = arguments(139, *row["kind"])
    found = outcome(lambda r: chunks.chunked(r, chunk=16), given, segments=segments)
    assert_close(found, outcome(definition.attend, given, segments=segments), 1e-12)


def test_second_derivatives_survive_a_strong_decay():
    """Above the diagonal e^(G_i - G_j) would be infinite, and 0 times it is NaN in a derivative."""
    given = arguments(29)
    given["log_decay"] *= 500.0
    inputs = [t.requires_grad_() for t in given.values()]
    o, _ = chunks.attend(recurrence(given))
    first = torch.autograd.grad(o.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(t.square().sum() for t in first), inputs)
    assert all(t.isfinite().all() for t in (*first, *second))


def kept_for_backward(function, given):
    """What autograd saves beyond the operands."""
    kept, own = [], {t.data_ptr() for t in given.values()}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        function({name: t.requires_grad_() for name, t in given.items()})
    return [t for t in kept if t.data_ptr() not in own]


def test_the_backward_pass_keeps_the_inputs_and_a_state_per_span(monkeypatch):
    monkeypatch.setattr(chunks, "SPAN", 64 * 4)
    given = arguments(257, "channel", repeats=1)
    (starts,) = kept_for_backward(lambda leaves: chunks.attend(recurrence(leaves)), given)
    assert starts.shape == (4, *given["state"].shape)


@needs_kernels
def test_the_kernels_keep_no_normalized_copies():
    given = arguments(67, dtype=torch.float32)
    with backend("native"):
        (starts,) = kept_for_backward(lambda leaves: longspan.delta_rule(**leaves, normalize="l2"), given)
    assert starts.shape[2] == -(-67 // kernels.SPAN)


@pytest.mark.parametrize("name", ["torch", "native"])
@pytest.mark.parametrize(("decay", "delta"), KINDS)
def test_normalized_inside_equals_normalized_before(name, decay, delta):
    """Also keys as short as the root's 1e-6."""
    if name == "native" and not available("gated"):
        pytest.skip("no native kernels here")
    family = FAMILIES[f"{'delta' if delta else 'decay'}-{decay}"]
    for n in (1, 29):
        given = family.operands(n, dtype=torch.float32 if name == "native" else torch.float64)
        given["key"] = given["key"] * torch.logspace(-5, 2, n, dtype=given["key"].dtype)[:, None]
        exact = {which: t.double().requires_grad_() for which, t in given.items()}
        short = {x: exact[x] / (exact[x].square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in ("query", "key")}
        outputs = definition.attend(recurrence(exact | short))
        grads = torch.autograd.grad(outputs, list(exact.values()), upstream(outputs, None, 2))
        found = family.outcome(name, given, scale=0.7, normalize="l2")
        assert_close(list(found.values()), [*outputs, *grads], family.rounded if name == "native" else 1e-12)


@needs_kernels
def test_operands_in_the_layout_of_projections_give_outputs_in_it():
    """Heads taken from the channels of one projection, (B,N,H D)."""
    for n, dtype in ((67, torch.float32), (1, torch.float32), (1, torch.bfloat16)):
        mixed = torch.randn(3, n, 2 * 8 * 2 + 4 * 16).to(dtype)
        q, k, v = (
            part.unflatten(-1, (heads, -1)).transpose(1, 2)
            for part, heads in zip(mixed.split([16, 16, 64], -1), (2, 2, 4), strict=True)
        )
        decay, beta = -torch.rand(3, n, 4).mT, torch.rand(3, n, 4).mT
        given = {"log_decay": decay, "beta": beta, "state": torch.randn(3, 4, 8, 16), "normalize": "l2"}
        with torch.no_grad(), backend("native"):
            found = gated.recur(q, k, v, **given)
            expected = gated.recur(*(t.contiguous() for t in (q, k, v)), **given)
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
        assert found[0].transpose(1, 2).is_contiguous()


def test_the_scale_is_one_over_the_root_of_d():
    given = arguments(13, sizes=(5, 3))
    found = longspan.delta_rule(**given)
    torch.testing.assert_close(found, longspan.delta_rule(**given | {"query": given["query"] * 5**-0.5}, scale=1.0))


WHOLE = {
    "query": torch.zeros(2, 2, 7, 5),
    "key": torch.zeros(2, 2, 7, 5),
    "value": torch.zeros(2, 4, 7, 3),
    "beta": torch.zeros(2, 4, 7),
}
TOKEN = {name: t[:, :, :1] for name, t in WHOLE.items()} | {"state": torch.zeros(2, 4, 5, 3)}
PACKED = {name: torch.zeros(1, 2, 7, 5) for name in ("query", "key", "value")} | {"beta": torch.ones(1, 2, 7)}


def cuts(*offsets):
    return torch.tensor(offsets, dtype=torch.int32)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("given", "changes", "message"),
    [
        (WHOLE, {"query": torch.zeros(2, 2, 7)}, r"^query .*torch.float32 \(2, 2, 7\)"),
        (
            WHOLE,
            {"value": torch.zeros(2, 3, 7, 3)},
            r"^beta must be a floating-point tensor \(2, 3, 7\), not torch.float32 \(2, 4, 7\)",
        ),
        (WHOLE, {"key": torch.zeros(2, 2, 6, 5)}, "do not fit"),
        (WHOLE, {"log_decay": torch.zeros(2, 4, 6)}, r"^log_decay .*\(2, 4, 7\) or \(2, 4, 7, 5\).*\(2, 4, 6\)"),
        (WHOLE, {"log_decay": torch.zeros(2, 2, 7)}, r"not torch.float32 \(2, 2, 7\)"),
        (WHOLE, {"beta": torch.zeros(2, 4, 7, 1)}, r"^beta .*\(2, 4, 7\).*\(2, 4, 7, 1\)"),
        (
            TOKEN,
            {"value": torch.zeros(2, 3, 1, 3), "beta": torch.zeros(2, 3, 1), "state": torch.zeros(2, 3, 5, 3)},
            "do not fit",
        ),
        (TOKEN, {"key": torch.zeros(2, 2, 1, 4)}, "do not fit"),
        (TOKEN, {"log_decay": torch.zeros(2, 2, 1)}, r"not torch.float32 \(2, 2, 1\)"),
        (TOKEN, {"beta": torch.zeros(2, 4, 1, 1)}, r"^beta .*\(2, 4, 1\).*\(2, 4, 1, 1\)"),
        (TOKEN, {"normalize": "L2"}, "unknown norm"),
        (PACKED, {"normalize": "l1"}, "unknown norm of queries and keys 'l1'.*; known: l2"),
    ],
)
def test_what_does_not_fit_is_refused(given, changes, message):
    with pytest.raises(ValueError, match=message):
        longspan.delta_rule(**given | changes)


def test_without_a_state_each_packed_sequence_gets_one():
    _, state = longspan.delta_rule(**PACKED, cu_seqlens=cuts(0, 3, 3, 7), return_state=True)
    assert state.shape == (3, 2, 5, 5)
