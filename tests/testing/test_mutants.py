"""Planted bugs, each of which a law must catch."""

import pytest
import torch

from longspan import testing
from longspan.attention import linear as linear_module
from longspan.attention import validation as arguments
from longspan.attention.adaptive_span import AdaptiveSpan
from longspan.ops import isolated, linear, prefix
from longspan.ops.gated import chunks
from longspan.ops.linear import causal as spans
from longspan.ops.linear import native as sequence
from longspan.ops.linear import workspace
from longspan.ops.native.call import available
from longspan.ops.softmax import dense
from longspan.ops.tensors import positions
from longspan.states import kv_cache
from longspan.states.kv_cache import CacheView


def leaky_triangle(products, diagonal=0, original=torch.Tensor.tril):
    return original(products, diagonal + 1)


def state_of_the_span_unread(self, parts, name, *, reverse=False, original=workspace.Rows.running):
    return original(self, parts, name, reverse=reverse).mul_(0.9 if reverse else 1.0)


def last_token_unwritten_by_spans(q, k, v, *, state=None, mask=None, original=spans.attend, **options):
    out, after = original(q, k, v, state=state, mask=mask, **options)
    if q.shape[2] > 1:
        mask = None if mask is None else mask[:, :-1]
        after = original(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], state=state, mask=mask, **options)[1]
    return out, after


FORWARD, BACKWARD = 9, 14  # tensors that the kernels take


def natively_without(tensors, position, original=sequence.pointers):
    """A kernel that never sees one of its tensors."""

    def without(*given):
        return original(*given[:position], None, *given[position + 1 :]) if len(given) == tensors else original(*given)

    return without


def native_gradient_of_the_state_lost(*given, original=sequence.pointers):
    if len(given) == BACKWARD:
        given[10].zero_()
    return original(*given)


def leaky_softmax(q, k, v, *, mask=None, causal=False, dropout=0.0, original=dense.attend):
    if causal:
        mask, causal = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(1), False
    return original(q, k, v, mask=mask, causal=causal, dropout=dropout)


def no_padding_in_view(k, v, *, causal, mask=None, segments=None, prefix=None, original=kv_cache.within):
    return original(k, v, causal=causal, segments=segments, prefix=prefix)


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


def cache_in_place(cache_, k, v, used, donate, original=kv_cache._extend_even):
    with torch.no_grad():
        return original(cache_, k, v, used, True)


def mean_instead_of_normalizer(read, eps):
    return read[..., :-1] / (read[..., -1:].mean(-2, keepdim=True) + eps)


def sums_in_half_precision(parts, whole, state, original=chunks._sums):
    parts = parts.bfloat16().float() if parts.dtype is torch.float32 else parts
    return original(parts, whole, state)


def positions_from_one(x, start=None, *, mask=None, segments=None, original=positions):
    at, end = original(x, start, mask=mask, segments=segments)
    return at, end + (0 if start is None else 1)


def cache_one_short(cache_, k, v, used, donate, original=kv_cache._extend_even):
    view, added = original(cache_, k, v, used, donate)
    return view, added._replace(length=added.length - (1 if k.shape[2] > 1 else 0))


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


CUT = "parallel_is_recurrent"
SPANS = "adaptive_span(span=7, ramp=3, initial=2.5)"


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


ROTARY = "linear(rotary=100.0)"  # uses the scan; others have separate forms
MUTANTS = {
    "a leaky mask in the quadratic form": (torch.Tensor, "tril", leaky_triangle, "linear", "causal"),
    "a leaky mask in softmax": (dense, "attend", leaky_softmax, "softmax", "causal"),
    "a dropped padding mask in softmax": (kv_cache, "within", no_padding_in_view, "softmax", "padding"),
    "a span that forgets gradients from later ones": (
        workspace.Rows,
        "running",
        state_of_the_span_unread,
        "linear",
        "oracle",
    ),
    "a cache changed in place": (kv_cache, "_extend_even", cache_in_place, "softmax", "state"),
    "a wrong normalizer": (linear, "normalize", mean_instead_of_normalizer, ROTARY, "attention_matrix"),
    "sums in half precision": (chunks, "_sums", sums_in_half_precision, ROTARY, "oracle"),
    # With so few features that roundings are magnified.
    "sums in half precision, in a denominator": (chunks, "_sums", sums_in_half_precision, "rfa", "oracle"),
    "a prefill of spans that forgets its last token": (spans, "attend", last_token_unwritten_by_spans, "linear", CUT),
    "a prefill one position off": (linear_module, "positions", positions_from_one, ROTARY, CUT),
    "a cache one slot short": (kv_cache, "_extend_even", cache_one_short, "softmax", CUT),
    "a step blind to its own token": (kv_cache, "_extend_even", blind_to_itself, "softmax", CUT),
    "packed sequences that start with a state": (isolated, "_alone", starting_with_the_state, "linear", "content"),
    "a gradient that is clamped": (AdaptiveSpan, "_fixed", spans_clamped_backwards, SPANS, "additive"),
    "a prefix that is written twice": (prefix, "fold", prefix_written_twice, "linear", "prefix_mode"),
    "a prefix that counts padding": (arguments, "inside", prefix_counting_padding, "linear", "prefix_mode"),
    "a prefix that stays causal": (kv_cache, "join", causal_prefix, "softmax", "prefix_mode"),
    "a prefix blind to the past": (kv_cache, "extend", prefix_blind_to_the_past, "softmax", "prefix_mode"),
}


NATIVE = {
    "no padding": natively_without(FORWARD, 7),
    "no segments in the gradients": natively_without(BACKWARD, 13),
    "no gradient through the last state": native_gradient_of_the_state_lost,
}


def catches(mutant, monkeypatch, module, name, replacement, spec, law):
    assert testing.check(law, spec).status == "passed"
    monkeypatch.setattr(module, name, replacement)
    assert testing.check(law, spec).status == "failed", mutant


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_law_catches(mutant, monkeypatch):
    catches(mutant, monkeypatch, *MUTANTS[mutant])


@pytest.mark.skipif(not available(), reason="there are no native kernels here")
@pytest.mark.parametrize("mutant", NATIVE)
def test_a_law_catches_natively(mutant, monkeypatch):
    catches(mutant, monkeypatch, sequence, "pointers", NATIVE[mutant], "linear", "oracle")
