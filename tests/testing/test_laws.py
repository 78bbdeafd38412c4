"""Each assertion of a law is needed: a mechanism that is wrong in one way fails that assertion."""

import pytest
import torch
from torch import nn

from longspan import testing
from longspan.attention import Attention, base
from longspan.attention.linear import Linear
from longspan.attention.routing import Routing
from longspan.attention.softmax import Softmax
from longspan.ops import gated, isolated, sparse
from longspan.states import lookback
from longspan.testing import Broken, Gauge, numeric
from longspan.testing.gauge import DIM, Subject


def step_in_place(r, donate, original=gated.chunks._step):
    return original(r, donate=True)


def masked_as_the_first_row(self, x, state, *, mask=None, original=Linear.attend, **arguments):
    return original(self, x, state, mask=None if mask is None else mask & mask[:1], **arguments)


def packed_without_padding(self, x, state, *, mask=None, segments=None, original=Linear.attend, **arguments):
    return original(self, x, state, mask=mask if segments is None else None, segments=segments, **arguments)


def cut_off_from_the_past(self, x, state, *, original=Linear.attend, **arguments):
    return original(self, x, state and type(state)(*(t.detach() for t in state)), **arguments)


def with_an_idle_weight(self, *arguments, original=Softmax.__init__, **options):
    original(self, *arguments, **options)
    self.idle = nn.Parameter(torch.ones(3))


class Leak(torch.autograd.Function):
    """0, with a gradient for every number."""

    @staticmethod
    def forward(ctx, x):
        ctx.size = x.shape
        return x.new_zeros(())

    @staticmethod
    def backward(ctx, grad):
        return grad.expand(ctx.size)


def leaking_gradients(self, x, state=None, original=Attention.forward, **arguments):
    y, *rest = original(self, x, state, **arguments)
    return y + Leak.apply(x), *rest


def penalty_summed_over_rows(self, record, tokens, mask, original=Routing._count):
    original(self, record, tokens, mask)
    record["penalty"] = record["penalty"] * len(tokens[0])


def statistics_averaged_over_rows(self, record, tokens, mask, original=Routing._count):
    original(self, record, tokens, mask)
    record["statistics"] = type(record["statistics"])(*(t / len(tokens[0]) for t in record["statistics"]))


def reading_masked_tokens(self, x, state=None, original=Attention.forward, **arguments):
    y, *rest = original(self, x, state, **arguments)
    return y + 0.0 * x.sum((1, 2), keepdim=True), *rest


def fresh_if_some_row_is(state, n, mask, segments, record):
    return n > 1 and mask is None and segments is None and record is None and not bool(state.position.all())


def meeting_in_long_rows(q, k, v, pattern, *, segments=None, original=sparse.attend, **options):
    return original(q, k, v, pattern, segments=None if q.shape[2] > 100 else segments, **options)


def wrong_where_nothing_is_recorded(self, x, state, *, original=Linear.attend, **arguments):
    y, after = original(self, x, state, **arguments)
    return y if torch.is_grad_enabled() or arguments.get("segments") is None else 1.01 * y, after


def wrong_from_nothing(q, k, v, pattern, *, original=sparse.blockwise.attend, **options):
    out, *rest = original(q, k, v, pattern, **options)
    return 1.01 * out, *rest


def looking_at_what_comes_in(packed, tokens, state=None, carry=None, original=base.isolated, **options):
    if all(t.isfinite().all() for t in tokens):
        return packed.run(tokens, state, carry, None)
    return original(packed, tokens, state, carry, **options)


ROTARY = "linear(rotary=100.0)"
ROUTING = "routing(clusters=3, window=5)"
LOCAL = "local(window=5)"
MISTAKES = {
    "the state after two steps that continued it": ("state", ROTARY, gated.chunks, "_step", step_in_place),
    "padding on the left: the other row": ("padding", "linear", Linear, "attend", masked_as_the_first_row),
    "a packed segment with padding": ("packed", "linear", Linear, "attend", packed_without_padding),
    "a packed segment: differ": ("packed", "linear", Linear, "attend", wrong_where_nothing_is_recorded),
    "gradients through states": ("gradients", "linear", Linear, "attend", cut_off_from_the_past),
    "a parameter gets no gradient": ("gradients", "softmax", Softmax, "__init__", with_an_idle_weight),
    "gradients of two half batches": ("additive", ROUTING, Routing, "_count", penalty_summed_over_rows),
    "statistics of two half batches": ("additive", ROUTING, Routing, "_count", statistics_averaged_over_rows),
    "NaN and infinity in masked tokens": ("content", "linear", Attention, "forward", reading_masked_tokens),
    "a masked token's gradient is not zero": ("content", "linear", Attention, "forward", leaking_gradients),
    "NaN and infinity in a packed neighbor": ("content", "softmax", isolated, "finite", lambda *given: True),
    "the largest numbers in a packed neighbor": ("content", "softmax", base, "isolated", looking_at_what_comes_in),
    "NaN in the gradients of a packed neighbor": ("content", "softmax", isolated, "_keep", lambda *given: None),
    "a used row next to another: one call": ("mixed_rows", LOCAL, lookback, "_from_nothing", fresh_if_some_row_is),
    "300 tokens, packed, from nothing": ("blocks", LOCAL, sparse, "attend", meeting_in_long_rows),
    "packed, from nothing, without gradients": (
        "blocks",
        "linear",
        Linear,
        "attend",
        wrong_where_nothing_is_recorded,
    ),
    "torch.float64 with no arguments": ("oracle", LOCAL, sparse.blockwise, "attend", wrong_from_nothing),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_an_assertion_is_needed(words, monkeypatch):
    law, spec, where, name, mistake = MISTAKES[words]
    monkeypatch.setattr(where, name, mistake)
    row = testing.check(law, spec)
    assert row.status == "failed"
    assert words in row.note


def test_a_report_is_ok_where_no_law_failed():
    passed, failed = (testing.Row("causal", status, 0.0, 0.0, "") for status in ("passed", "failed"))
    assert testing.Report("linear", (passed, passed)).ok
    assert not testing.Report("linear", (passed, failed)).ok


def test_errors_are_relative_to_the_largest_number_and_absolute_below_one():
    gauge, large = Gauge(), torch.tensor([1e6, 0.0], dtype=torch.float64)
    gauge.close(large + 1e-5, large, "large numbers")
    assert gauge.error == pytest.approx(1e-11, rel=1e-3)
    with pytest.raises(Broken, match="large numbers: differ by 1.00e-09, allowed 1e-10"):
        gauge.close(large + 1e-3, large, "large numbers")
    small = torch.tensor([1e-6], dtype=torch.float64)
    gauge.close(small + 1e-11, small, "small numbers")
    with pytest.raises(Broken, match="small numbers: differ by 1.00e-09"):
        gauge.close(small + 1e-9, small, "small numbers")


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.ones(3, 1), torch.ones(3, 3), r"shape \(3, 1\) where \(3, 3\)"),
        ([torch.ones(3)], [torch.ones(3), torch.ones(3)], "1 tensors where 2"),
        (torch.full((3,), torch.nan), torch.ones(3), "differ by nan"),
        (torch.ones(3), torch.full((3,), torch.nan), "differ by nan"),
    ],
)
def test_what_cannot_be_equal_is_not_close(actual, expected, message):
    with pytest.raises(Broken, match=message):
        Gauge().close(actual, expected, "these")


class Astray(Subject):
    """A subject whose decode steps differ from one call."""

    def make(self, **options):
        module = super().make(**options)
        module.register_forward_hook(lambda module, given, out: (out[0] + (given[0].shape[1] == 1), out[1]))
        return module


def test_of_a_last_step_only_a_choice_that_a_rounding_turned_is_excused(monkeypatch):
    monkeypatch.setattr(numeric, "LONG", 40)
    spec, gauge, y = "reformer(chunk=3, buckets=4, rounds=3)", Gauge(), torch.randn(2, 1, DIM)
    numeric._last_step(Subject(spec), gauge, y + 1e-3, y)
    assert gauge.excused == pytest.approx(1e-3 / float(y.abs().max().clamp(min=1)), rel=1e-3)
    with pytest.raises(Broken, match="40 tokens: the last one as a step, in float64: differ by 1"):
        numeric._last_step(Astray(spec), Gauge(), y + 1e-3, y)
    with pytest.raises(Broken, match="40 tokens: the last one as a step: differ by "):
        numeric._last_step(Subject("linear"), Gauge(), y + 1e-3, y)
