"""Each assertion of a law is needed: a mechanism with a planted bug fails that assertion."""

import pytest
import torch
from torch import nn

from longspan import testing
from longspan.attention import Attention, base
from longspan.attention import linear as linear_module
from longspan.attention import validation as arguments
from longspan.attention.adaptive_span import AdaptiveSpan
from longspan.attention.linear import Linear
from longspan.attention.routing import Routing
from longspan.attention.softmax import Softmax
from longspan.ops import gated, isolated, linear, prefix, sparse
from longspan.ops.linear import native, workspace
from longspan.ops.native.call import available
from longspan.ops.tensors import positions
from longspan.states import kv_cache, lookback
from longspan.states.kv_cache import CacheView
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


def leaky_triangle(products, diagonal=0, original=torch.Tensor.tril):
    return original(products, diagonal + 1)


def state_of_the_span_unread(self, parts, name, *, reverse=False, original=workspace.Rows.running):
    return original(self, parts, name, reverse=reverse).mul_(0.9 if reverse else 1.0)


FORWARD, BACKWARD = 9, 14  # tensors that the kernels take


def natively_without(tensors, position, original=native.pointers):
    """A kernel that never sees one of its tensors."""

    def without(*given):
        return original(*given[:position], None, *given[position + 1 :]) if len(given) == tensors else original(*given)

    return without


def native_gradient_of_the_state_lost(*given, original=native.pointers):
    if len(given) == BACKWARD:
        given[10].zero_()
    return original(*given)


def prefix_written_twice(k, v, inside, state=None, mask=None, original=prefix.fold):
    return original(k, v, inside, state)[0], torch.ones_like(inside) if mask is None else mask


def prefix_counting_padding(lengths, n, mask=None, original=prefix.inside):
    return original(lengths, n)


def causal_prefix(allowed, inside):
    return allowed


def prefix_blind_to_the_past(cache_, k, v, *, prefix=None, original=kv_cache.extend, **options):
    view, added = original(cache_, k, v, prefix=prefix, **options)
    if prefix is None or cache_.length.max() == 0:
        return view, added
    return view._replace(mask=view.mask & (torch.arange(view.keys.shape[2]) > 0)), added


def mean_instead_of_normalizer(read, eps):
    return read[..., :-1] / (read[..., -1:].mean(-2, keepdim=True) + eps)


def sums_in_half_precision(parts, whole, state, original=gated.chunks._sums):
    parts = parts.bfloat16().float() if parts.dtype is torch.float32 else parts
    return original(parts, whole, state)


def positions_from_one(x, start=None, *, mask=None, segments=None, original=positions):
    at, end = original(x, start, mask=mask, segments=segments)
    return at, end + (0 if start is None else 1)


def blind_to_itself(cache_, k, v, used, donate, original=kv_cache._extend_even):
    view, added = original(cache_, k, v, used, donate)
    return (
        CacheView(view.keys[:, :, :-1], view.values[:, :, :-1], None, False) if used and k.shape[2] == 1 else view
    ), added


def starting_with_the_state(packed, tokens, state, carry, original=isolated._alone):
    return original(
        packed._replace(fresh=lambda: None if state is None else state._replace(sums=state.sums[:1] + 1)),
        tokens,
        state,
        carry,
    )


class ClampedBackwards(torch.autograd.Function):
    """A clamp to [0, 1] that drops the gradients which lead farther out: not linear in them."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clamp(0, 1)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad.masked_fill(((x <= 0) & (grad > 0)) | ((x >= 1) & (grad < 0)), 0.0)


def spans_clamped_backwards(self):
    return self.span * ClampedBackwards.apply(self.fraction)[:, None, None]


ROTARY = "linear(rotary=100.0)"
ROUTING = "routing(clusters=3, window=5)"
LOCAL = "local(window=5)"
SPANS = "adaptive_span(span=7, ramp=3, initial=2.5)"
CUT = "parallel_is_recurrent"
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
    "torch in torch.float32 with no arguments": ("oracle", ROTARY, gated.chunks, "_sums", sums_in_half_precision),
    "with no arguments": ("oracle", "linear", workspace.Rows, "running", state_of_the_span_unread),
    "with mask": ("oracle", "linear", native, "pointers", natively_without(FORWARD, 7)),
    "with segments": ("oracle", "linear", native, "pointers", natively_without(BACKWARD, 13)),
    "with a state": ("oracle", "linear", native, "pointers", native_gradient_of_the_state_lost),
    "outputs before token 1": ("causal", "linear", torch.Tensor, "tril", leaky_triangle),
    "the recorded matrix times": ("attention_matrix", ROTARY, linear, "normalize", mean_instead_of_normalizer),
    "1] tokens": (CUT, ROTARY, linear_module, "positions", positions_from_one),
    "1] tokens: differ": (CUT, "softmax", kv_cache, "_extend_even", blind_to_itself),
    "NaN and infinity in a packed": ("content", "linear", isolated, "_alone", starting_with_the_state),
    "weights far from initialization": ("additive", SPANS, AdaptiveSpan, "_fixed", spans_clamped_backwards),
    "what comes after the prefix": ("prefix_mode", "linear", prefix, "fold", prefix_written_twice),
    "a padded prefix": ("prefix_mode", "linear", arguments, "inside", prefix_counting_padding),
    "not see the last one of the prefix": ("prefix_mode", "softmax", kv_cache, "join", causal_prefix),
    "a prefix after a state": ("prefix_mode", "softmax", kv_cache, "extend", prefix_blind_to_the_past),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_an_assertion_is_needed(words, monkeypatch):
    law, spec, where, name, mistake = MISTAKES[words]
    if where is native and not available():
        pytest.skip("there are no native kernels here")
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
