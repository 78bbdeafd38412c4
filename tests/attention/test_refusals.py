"""What mechanisms refuse at construction: one row for each spec, and the forms that a mechanism does not have."""

import re

import pytest
import torch

import longspan
from longspan.attention.base import REGISTRY
from longspan.attention.registry import list_mechanisms, mechanism_examples

CAUSAL = (
    ("abc(expand_k=0.3)", "expand_k=0.3 times a head dimension of 4"),
    ("abc(slots=0)", "slots=0 must be at least 1"),
    ("adaptive_span(initial=-1.0)", "initial=-1.0 .*must lie between 0 and span=1024"),
    ("adaptive_span(initial=2.0, dynamic=True)", "initial=2.0 .*dynamic=False"),
    ("adaptive_span(ramp=0)", "ramp=0 .*must be at least 1"),
    ("adaptive_span(span=0)", "span=0 .*must be at least 1"),
    ("adaptive_span(span=4, initial=5.0)", "initial=5.0 .*must lie between 0 and span=4"),
    ("average(inner=-1)", "inner=-1 .*must be positive, or 0 for 4 dim"),
    ("axial(kind='lines')", "unknown kind of axial attention 'lines'; known: cross, sequential, shifted, summed"),
    ("axial(width=0)", "width=0 must be a whole number of at least 1"),
    ("bigbird(block=0)", "block=0 must be at least 1"),
    ("bigbird(globals=-1)", "globals=-1 and random=3 .*must not be negative"),
    ("bigbird(window=-1)", "window=-1 must be odd"),
    ("bigbird(window=2)", "window=2 must be odd"),
    ("bp(k=0)", "k=0 must be at least 1"),
    ("bp(levels=0)", "levels=0 must be at least 1"),
    ("compressive(compressed=0)", "compressed=0 must be a whole number of at least 1"),
    ("compressive(compressed=9223372036854775807)", "compressed=9223372036854775807 must be at most 1073741823"),
    ("compressive(memory=0)", "memory=0 must be a whole number of at least 1"),
    ("compressive(memory=1073741824)", "memory=1073741824 must be at most 1073741823"),
    ("compressive(pool='sum')", "unknown pool 'sum'; known: convolution, max, mean"),
    ("compressive(rate=0)", "rate=0 must be a whole number of at least 1"),
    ("deltanet(convolution=1)", "width=1 must be at least 2"),
    ("dsa(index_dim=0)", "index_dim=0 must be at least 1"),
    ("dsa(index_heads=0)", "index_heads=0 must be at least 1"),
    ("dsa(keys=0)", "keys=0 must be at least 1"),
    ("exact_topk(keys=0)", "keys=0 must be at least 1"),
    ("fast_weights(eps=1.0)", "eps=1.0 .*rule='sum', not 'delta'"),
    ("fast_weights(feature_map='dpfq')", r"unknown feature map 'dpfq' \(did you mean 'dpfp'\?\)"),
    ("fast_weights(feature_map='elu', nu=2)", "nu=2 .*feature_map='dpfp', not 'elu'"),
    ("fast_weights(nu=8)", "nu=8 pairs each of 8 numbers"),
    ("fast_weights(rule='product')", "unknown rule 'product'; known: delta, sum"),
    ("fast_weights(rule='sum', eps=0.0)", "eps=0.0 must be positive"),
    ("forgetting(kv_heads=3)", "kv_heads=3 must divide heads=2"),
    ("fourier(bandwidth=0.0)", "bandwidth=0.0 must be positive"),
    ("fourier(eps=0.0)", "eps=0.0 must be positive: the denominator can vanish"),
    ("fourier(features=-1)", "features=-1 is a number of rows"),
    ("gated_deltanet(expand_k=0.0)", "expand_k=0.0 times a head dimension of 4"),
    ("gated_deltanet(expand_v=0.3)", "expand_v=0.3 times a head dimension of 4"),
    ("gated_deltanet(key_heads=-1)", "key_heads=-1 must divide heads=2"),
    ("gated_deltanet(key_heads=3)", "key_heads=3 must divide heads=2"),
    ("gaussian(kind='laplace')", "unknown kind of window 'laplace'; known: fixed, learned"),
    ("gla(expand_k=0.1)", "expand_k=0.1 times a head dimension of 4"),
    ("gla(expand_v=0.1)", "expand_v=0.1 times a head dimension of 4"),
    ("gla(rank=0)", "rank=0 .*must be at least 1"),
    ("gla(temperature=0.0)", "temperature=0.0 must be positive"),
    ("gsa(expand_v=0.1)", "expand_v=0.1 times a head dimension of 4"),
    ("gsa(slots=0)", "slots=0 must be at least 1"),
    ("gsa(temperature=0.0)", "temperature=0.0 must be positive"),
    ("hedgehog(eps=-1.0)", "eps=-1.0 must not be negative"),
    ("hedgehog(head_dim=-1)", "head_dim=-1 and qk_norm=0.0 must not be negative"),
    ("hedgehog(window=-1)", "window=-1 must be at least 1"),
    ("image(block=(2, 3))", r"block=\(2, 3\) must be a whole number of at least 1"),
    ("image(kind='2d', block=(2, 3), memory=(1, 1), width=8)", "width=8 is not a multiple of the block's width 3"),
    ("image(kind='2d', block=(2, 4), memory=(1, 1))", "width=0 must be a whole number of at least 1"),
    ("image(kind='2d', block=(2, 4), width=8)", r"memory=128 must be \(height, width\)"),
    ("image(kind='2d', width=8)", r"block=128 must be \(height, width\)"),
    ("image(kind='3d')", "unknown kind of image attention '3d'; known: 1d, 2d"),
    ("image(width=8)", "width=8 .*kind='2d'"),
    ("infini(eps=0.0)", "eps=0.0 must be positive"),
    ("infini(segment=0)", "segment=0 must be at least 1"),
    ("informer(factor=0)", "factor=0 must be at least 1"),
    ("kda(lower_bound=5.0)", "lower_bound=5.0 must be negative, or 0"),
    ("log_linear(channels=0)", "channels=0 .*at least 1"),
    ("log_linear(convolution=1)", "width=1 must be at least 2"),
    ("log_linear(key_heads=3)", "key_heads=3 must divide heads=2"),
    ("log_linear(levels=1)", "levels=1 must be between 2 and 63"),
    ("3", "'3' names no attention"),
    ("linaer", r"unknown name 'linaer' \(did you mean 'linear'\?\); known: .*kernel, .*linear, .*softmax"),
    ("linear(causal=False)", "linear has no option 'causal'"),
    ("linear(eps=-1.0)", "eps=-1.0 must not be negative"),
    ("linear(feature_map='cosine')", "unknown feature map 'cosine'.*known: elu, exp, relu, squared_relu"),
    ("linear(rotary=-1.0)", "rotary=-1.0 must be positive"),
    ("linear(window=3)", "linear has no option 'window'; it has feature_map, eps, rotary, rotary_layout, context_dim"),
    ("kernel(bandwidth=2.0)", "bandwidth=2.0 .*similarity='rbf', not 'exp'"),
    ("kernel(degree=4)", "similarity='polynomial', not 'exp'"),
    ("kernel(dropout=2.0)", r"dropout=2.0 must be in \[0, 1\)"),
    ("kernel(similarity='cosine')", "unknown similarity 'cosine'"),
    ("kernel(similarity='polynomial', degree=3)", "degree=3 must be even and positive"),
    ("kernel(similarity='rbf', bandwidth=0.0)", "bandwidth=0.0 must be positive"),
    ("softmax(dropout=1.0)", r"dropout=1.0 must be in \[0, 1\)"),
    ("softmax(kv_heads=3)", "kv_heads=3 must divide heads=2"),
    ("longhorn(channels=0)", "channels=0 .*at least 1"),
    ("longhorn(convolution=1)", "width=1 must be at least 2"),
    ("longhorn(expand=0.1)", "expand=0.1 times a head dimension of 4"),
    ("lowrank_band(rank=0)", "rank=0 must be at least 1"),
    ("lowrank_band(window=0)", "window=0 must be at least 1"),
    ("mamba(conv=1)", "width=1 must be at least 2"),
    ("mamba(dt_rank='full')", "dt_rank='full' must be a whole number or 'auto'"),
    ("mamba(dt_rank=0)", "dt_rank=0 must be at least 1"),
    ("mamba(expand=0)", "expand=0 must be at least 1"),
    ("mamba(state_dim=0)", "state_dim=0 must be at least 1"),
    ("mamba3(channels=2)", "rotation=0.5 of channels=2 must be at least two channels"),
    ("mamba3(expand_v=0.1)", "expand_v=0.1 times a head dimension of 4"),
    ("mamba3(key_heads=3)", "key_heads=3 must divide heads=2"),
    ("mamba3(rotation=1.5)", "rotation=1.5 of channels=128 must be .* at most all"),
    ("memory_compressed(pool='maximum')", "unknown pool 'maximum'; known: conv, mean"),
    ("memory_compressed(stride=0)", "stride=0 .*at least 1"),
    ("mesa(convolution=1)", "width=1 must be at least 2"),
    ("mesa(steps=0)", "steps=0 .*at least 1"),
    ("mlstm(cap=-1.0)", "cap=-1.0 must be 0"),
    ("mlstm(expand_k=0.3)", "expand_k=0.3 times a head dimension of 4"),
    ("mlstm(expand_v=0.3)", "expand_v=0.3 times a head dimension of 4"),
    ("mlstm(norm='layer')", "norm='layer'"),
    ("moba(block=0)", "block=0 must be at least 1"),
    ("moba(kv_heads=3)", "kv_heads=3 must divide heads=2"),
    ("moba(top=0)", "top=0 must be at least 1"),
    ("nsa(block=0)", "block=0 must be at least 1"),
    ("nsa(top=2)", "top=2 must be at least 3"),
    ("nsa(window=0)", "window=0 must be at least 1"),
    ("path(convolution=1)", "width=1 must be at least 2"),
    ("path(rank=-1)", "rank=-1 must be positive, or 0"),
    ("performer(eps=0.0)", "eps=0.0 must be positive: the denominator can vanish"),
    ("performer(features=-1)", "features=-1 must be positive"),
    ("performer(floor=0.1)", "floor belongs to map='relu', not 'positive'"),
    ("performer(map='cosine')", "unknown map 'cosine'; known: exp, hyperbolic, positive, relu, trigonometric"),
    ("performer(map='relu', floor=-1.0)", "floor=-1.0 must not be negative"),
    ("performer(radii='one')", "unknown radii 'one'; known: chi, midpoints, quantiles, sqrt"),
    ("performer(rows='random')", "unknown rows 'random'; known: iid, orthogonal"),
    ("poolingformer(kernel=3, stride=0)", "stride=0 must be between 1 and kernel=3"),
    ("poolingformer(kernel=3, stride=2, far_window=2)", "far_window=2 must be at least kernel . stride - 2 = 3"),
    ("poolingformer(kernel=3, stride=4)", "stride=4 must be between 1 and kernel=3"),
    ("poolingformer(pool='sum')", "unknown pool 'sum'; known: dynamic, max, mean"),
    ("poolingformer(window=-1)", "left=-1 must be a whole number of at least 0"),
    ("power(channels=-1)", "channels=-1 must be positive"),
    ("power(degree=3)", "degree=3"),
    ("power(eps=-1.0)", "eps=-1.0 .*must not be negative"),
    ("preconditioned_deltanet(expand_v=0.1)", "expand_v=0.1 times a head dimension of 4"),
    ("preconditioned_deltanet(span=2.5)", "span=2.5 must be above 1 and at most 2"),
    ("reformer(buckets=0)", "buckets=0 .*even number"),
    ("reformer(buckets=7)", "buckets=7 .*even number"),
    ("reformer(chunk=0)", "chunk=0 must be at least 1"),
    ("reformer(cross=True)", "cross=True.* needs published=True"),
    ("reformer(factor=3, buckets=12)", "factor=3 must be even"),
    ("reformer(factor=4, buckets=12)", "factor=4 must be even, and buckets=12"),
    ("reformer(rounds=0)", "rounds=0 must be at least 1"),
    ("reformer(rounds=257)", "rounds=257 .*at most 256"),
    ("relative(clamp=-1)", "clamp=-1"),
    ("retention(expand_v=0.25)", "expand_v=0.25 leaves each head 1 value channel"),
    ("retention(expand_v=0.3)", "expand_v=0.3 times a head dimension of 4"),
    ("retention(rotary=-1.0)", "rotary=-1.0 must be positive"),
    ("rfa(eps=0.0)", "eps=0.0 must be positive: the denominator can vanish"),
    ("rfa(features=-1)", "features=-1 must be positive, or 0"),
    ("rfa(map='cosine')", "unknown map 'cosine'; known: arccos, gaussian"),
    ("rfa(rows='sobol')", "unknown rows 'sobol'; known: iid, orthogonal"),
    ("routing(clusters=0)", "clusters=0 must be at least 1"),
    ("routing(decay=1.0)", "decay=1.0 .*0 <= decay < 1"),
    ("routing(window=0)", "window=0 must be at least 1"),
    ("sac(edges=0)", "edges=0 .*at least 1"),
    ("sinkhorn(cut=2)", "sinkhorn has no causal form; it has: bidirectional"),
    ("softmax(qk_norm=-1.0)", "head_dim=0 and qk_norm=-1.0 must not be negative"),
    ("sparse_transformer(block=0)", "must be a whole number of at least"),
    ("sparse_transformer(integration='sum')", "unknown integration 'sum'; known: interleaved, merged, per_head"),
    ("sparse_transformer(kind='fixed', block=3, summary=0)", "summary=0 must be a whole number of at least 1"),
    ("sparse_transformer(kind='fixed', block=3, summary=4)", "summary=4 .* block=3"),
    ("sparse_transformer(kind='free')", "unknown kind of sparse transformer 'free'; known: fixed, strided"),
    ("sparse_transformer(summary=3)", "summary belongs to kind='fixed', not 'strided'"),
    ("ssd(channels=0)", "channels=0 .*at least 1"),
    ("ssd(convolution=1)", "width=1 must be at least 2"),
    ("ssd(expand_v=0.1)", "expand_v=0.1 times a head dimension of 4"),
    ("ssd(key_heads=3)", "key_heads=3 must divide heads=2"),
    ("synthesizer(kind='dense+')", "unknown kind of scores ''; known: dense, dot"),
    ("synthesizer(kind='dense+dot+dense')", r"kind='dense\+dot\+dense' has the same kind twice"),
    ("synthesizer(kind='dense+sparse')", "unknown kind of scores 'sparse'.*known: dense, dot, factored_dense"),
    ("synthesizer(kind='dot')", "kind='dot' alone is softmax attention"),
    ("synthesizer(kind='factored_random', rank=0)", "rank=0 must be positive"),
    ("synthesizer(kind='random', length=7, rank=3)", "rank belongs to kind='factored_random', not 'random'"),
    ("synthesizer(kind='random+dot', rank=3)", r"rank belongs to kind='factored_random', not 'random\+dot'"),
    ("synthesizer(kind='sparse')", "unknown kind of scores 'sparse'.*known: dense, dot, factored_dense, .*random"),
    ("synthesizer(length=0)", "length=0 .*must be positive"),
    ("transformer_xl(clamp=-1)", "clamp=-1 must be .*or 0"),
    ("transformer_xl(memory=0)", "memory=0 .*at least 1"),
    ("transformer_xl(same_length=False)", "segment=0 must be at least 1"),
    ("transformer_xl(segment=3)", "segment=3 needs same_length=False"),
)
BIDIRECTIONAL = (
    ("bidirectional(3)", "bidirectional: of=3 must be a spec"),
    ("bidirectional(bidirectional(gla))", "and bidirectional has no causal form"),
    ("bidirectional(glla)", "unknown attention 'glla' .did you mean 'gla'"),
    ("bidirectional(gla(ranks=3))", "gla has no option 'ranks'"),
    ("bidirectional(luna)", "luna .*a carry for the next layer"),
    ("bidirectional(nystrom)", "and nystrom has no causal form; it has: bidirectional"),
    ("bidirectional(routing)", "routing .*a loss"),
    ("bidirectional(softmax)", "state of fixed size, and the state of softmax grows"),
    ("bigbird(block=0)", "block=0 must be at least 1"),
    ("bigbird(globals=-1)", "globals=-1 and random=3 .*must not be negative"),
    ("bigbird(window=-1)", "window=-1 must be odd"),
    ("bigbird(window=2)", "window=2 must be odd"),
    ("clustered(bits=0)", "bits=0 of a hash must be from 1 to 63"),
    ("clustered(clusters=0)", "clusters=0 and iterations=10 are counts; both must be at least 1"),
    ("etc(clip=-1)", "clip=-1 must be at least 0"),
    ("etc(globals=0)", "globals=0 must be at least 1"),
    ("etc(radius=-1)", "radius=-1 must be at least 0"),
    ("improved_clustered(bits=64)", "bits=64 of a hash must be from 1 to 63"),
    ("improved_clustered(iterations=0)", "clusters=100 and iterations=0 are counts; both must be at least 1"),
    ("improved_clustered(topk=0)", "topk=0 must be at least 1"),
    ("informer(published=True)", "published=True needs causal=True"),
    ("linformer(length=0)", "length=0 must be at least 1"),
    ("linformer(share='layerwise')", "unknown .*'layerwise'; known: headwise, key-value, none"),
    ("linformer(slots=0)", "slots=0 must be at least 1"),
    ("nystrom(convolution=-1)", "convolution=-1 must be .*odd"),
    ("nystrom(convolution=4)", "convolution=4 must be .*odd"),
    ("nystrom(iterations=-1)", "iterations=-1 .* or 0"),
    ("nystrom(landmarks=0)", "landmarks=0 must be at least 1"),
    ("reformer(published=True)", "published=True needs causal=True"),
    ("routing(published=True)", "published=True needs causal=True"),
    ("sinkhorn(block=0)", "block=0 .*at least 1"),
    ("sinkhorn(cut=-1)", "cut=-1 must be positive, or 0"),
    ("sinkhorn(iterations=-1)", "iterations=-1 must be positive, or 0"),
    ("sinkhorn(noise=-1.0)", "noise=-1.0 must be positive, or 0"),
    ("sinkhorn(temperature=0.0)", "temperature=0.0 .*positive"),
    ("star(cycles=0)", "cycles=0 must be from 1 to 1000"),
    ("star(kind='open')", "unknown kind of ring 'open'; known: cyclic, truncated"),
    ("transformer_xl(same_length=False, segment=3)", "a bidirectional form has no state"),
    ("transformer_xl(stop_gradient=False)", "a bidirectional form has no state"),
)


@pytest.mark.whole
@pytest.mark.parametrize(("spec", "message"), CAUSAL)
def test_options_that_do_not_fit_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        longspan.build(spec, 8, 2)


@pytest.mark.parametrize("name", ["informer", "reformer", "routing"])
def test_published_forms_have_no_state(name):
    module, state = longspan.build(f"{name}(published=True)", 8, 2), longspan.build(name, 8, 2).init_state(2)
    with pytest.raises(ValueError, match="published=True .*has no state"):
        module.init_state(2)
    with pytest.raises(ValueError, match=f"{name} cannot continue"):
        module(torch.zeros(2, 3, 8), state)


@pytest.mark.whole
@pytest.mark.parametrize(("spec", "message"), BIDIRECTIONAL)
def test_options_that_do_not_fit_a_bidirectional_form_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        longspan.build(spec, 8, 2, causal=False)


DIRECTIONS = [
    (name, direction)
    for name in list_mechanisms()
    for direction in ("causal", "bidirectional")
    if direction not in REGISTRY[name].directions
]


@pytest.mark.whole
@pytest.mark.parametrize(("name", "direction"), DIRECTIONS)
def test_a_form_that_does_not_exist_is_refused(name, direction):
    """The message names those that do."""
    message = f"{name} has no {direction} form; it has: {', '.join(REGISTRY[name].directions)}"
    with pytest.raises(ValueError, match=re.escape(message)):
        longspan.build(mechanism_examples(name)[0], 8, 2, causal=direction == "causal")
