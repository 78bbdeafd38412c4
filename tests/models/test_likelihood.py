"""Laws of the likelihoods: probabilities that sum to one, exact edges, finite gradients, samplers that follow them."""

import math

import pytest
import torch
from torch import Tensor

from longspan.models import sampling
from longspan.models.likelihood import Categorical, Likelihood, Logistics, build
from longspan.models.sampling import Sampling, SamplingOptions, keep_likely
from longspan.testing.pairs import all_pairs

KINDS = [Categorical(17), Logistics(17), Categorical(256), Logistics(256, 3), Logistics(2, 1)]


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def every_log_prob(kind: Likelihood, outputs: Tensor) -> Tensor:
    """(..., size) -> (..., levels)"""
    targets = torch.arange(kind.levels).expand(*outputs.shape[:-1], kind.levels)
    return kind.log_prob(outputs[..., None, :].expand(*targets.shape, kind.size), targets)


def table(kind: Logistics, outputs: Tensor) -> Tensor:
    """The probabilities of eq. 2 of 1701.05517 as it is printed, by differences of sigmoids in fp64."""
    weights, means, log_scales = outputs.chunk(3, -1)
    half = 1 / (kind.levels - 1)
    probabilities = []
    for level in range(kind.levels):
        x = 2 * level * half - 1
        upper = 1.0 if level == kind.levels - 1 else torch.sigmoid((x + half - means) / log_scales.exp())
        lower = 0.0 if level == 0 else torch.sigmoid((x - half - means) / log_scales.exp())
        probabilities.append((weights.softmax(-1) * (upper - lower)).sum(-1))
    return torch.stack(probabilities, -1)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_probabilities_sum_to_one(kind, scale):
    total = every_log_prob(kind, randn(7, kind.size, scale=scale)).exp().sum(-1)
    assert (total - 1).abs().max() <= 1e-12


@pytest.mark.parametrize("kind", [k for k in KINDS if isinstance(k, Logistics)], ids=str)
def test_logistics_equal_the_printed_formula(kind):
    outputs = randn(7, kind.size)
    assert torch.allclose(every_log_prob(kind, outputs).exp(), table(kind, outputs), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("log_scale", [30.0, 1e4])
def test_an_infinitely_wide_logistic_puts_half_on_each_edge(dtype, log_scale):
    outputs = torch.tensor([0.0, 0.3, log_scale], dtype=dtype, requires_grad=True)
    found = every_log_prob(Logistics(256, 1), outputs)
    found.sum().backward()
    assert found.exp()[[0, -1]].tolist() == pytest.approx([0.5, 0.5], abs=1e-6)
    assert found.exp()[1:-1].max() < 1e-6
    assert found.isfinite().all()
    assert outputs.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [-1e4, -3.0, -1.0, 0.0, 0.3, 1.0, 3.0, 1e4])
@pytest.mark.parametrize("log_scale", [-100.0, -7.0, 0.0])
def test_gradients_are_finite_for_extreme_outputs(dtype, mean, log_scale):
    outputs = torch.tensor([0.0, mean, log_scale], dtype=dtype, requires_grad=True)
    found = every_log_prob(Logistics(256, 1), outputs)
    (gradient,) = torch.autograd.grad(found.sum(), outputs)
    assert found.isfinite().all()
    assert gradient.isfinite().all()


def test_scales_end_at_exp_minus_seven():
    least, less = (torch.tensor([0.0, 0.1, value], dtype=torch.float64) for value in (-7.0, -9.0))
    above = torch.tensor([0.0, 0.1, -6.9], dtype=torch.float64)
    kind = Logistics(256, 1)
    assert torch.equal(every_log_prob(kind, least), every_log_prob(kind, less))
    assert not torch.equal(every_log_prob(kind, least), every_log_prob(kind, above))


@pytest.mark.parametrize("kind", [Categorical(5), Logistics(5, 2)], ids=str)
def test_gradcheck(kind):
    outputs = randn(5, kind.size).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kind.log_prob(x, torch.arange(5)), outputs)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_outputs_are_read_in_fp32(kind, dtype):
    outputs = randn(7, kind.size).to(dtype)
    found, exact = every_log_prob(kind, outputs), every_log_prob(kind, outputs.double())
    assert found.dtype == torch.float32
    # A probability of exp(-20) is a difference of fp32 numbers near 1 times exp(7), the steepest slope.
    assert torch.allclose(found.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_log_prob_compiles_whole(kind):
    outputs, targets = randn(3, 5, kind.size), torch.arange(15).reshape(3, 5) % kind.levels
    compiled = torch.compile(kind.log_prob, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(outputs, targets), kind.log_prob(outputs, targets), rtol=1e-12)


def chi_square_fits(tokens: Tensor, probabilities: Tensor) -> None:
    """Pearson's statistic over levels expected 5 times or more (the rest pooled) within 5 standard deviations."""
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * len(tokens)
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    # The statistic's mean is its degrees of freedom, its variance twice that.
    assert statistic <= freedom + 5 * math.sqrt(2 * freedom) + 5


def filtered(p: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """The documented meaning of the options, by hand, on one row of probabilities."""
    p = p ** (1 / temperature)
    p = p / p.sum()
    order = sorted(range(len(p)), key=lambda level: (-float(p[level]), level))
    order = order[: top_k or len(p)]
    kept, mass, total = [], 0.0, float(p[order].sum())
    for level in order:
        if mass >= top_p * total and top_p < 1:
            break
        kept.append(level)
        mass += float(p[level])
    out = torch.zeros_like(p)
    out[kept] = p[kept]
    return out / out.sum()


OPTIONS = [
    {},
    {"temperature": 0.5},
    {"temperature": 1.7},
    {"top_k": 3},
    {"top_p": 0.6},
    {"temperature": 1.3, "top_k": 11, "top_p": 0.8},
    {"top_k": 1000},
]


SAMPLED = {"kind": [Categorical(17), Logistics(17, 3), Logistics(61, 2)], "dtype": [torch.float32, torch.float64]}


@pytest.mark.parametrize("row", all_pairs(**SAMPLED, options=OPTIONS), ids=str)
def test_samples_follow_the_probabilities(row):
    kind, dtype, options = row.values()
    outputs = randn(kind.size, seed=1)
    p = filtered(every_log_prob(kind, outputs).exp(), **({"temperature": 1.0, "top_k": 0, "top_p": 1.0} | options))
    generator = torch.Generator().manual_seed(2)
    tokens = kind.sample(outputs.to(dtype).expand(20011, -1), generator=generator, **options)
    assert tokens.dtype == torch.int64
    chi_square_fits(tokens, p)


@pytest.mark.parametrize("outputs", [[0.0, -3.0, 0.5], [0.0, 0.99, -7.0], [0.0, 0.0, 9.0], [0.0, 1.0, -2.0]])
def test_the_fast_sampler_draws_from_the_bins(outputs):
    kind, outputs = Logistics(256, 1), torch.tensor(outputs)
    tokens = kind.sample(outputs.expand(20011, -1), generator=torch.Generator().manual_seed(3))
    chi_square_fits(tokens, every_log_prob(kind, outputs.double()).exp())


def test_a_uniform_of_exactly_zero_is_level_zero(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.zeros(shape))
    assert Logistics(256).sample(randn(5, 30).float()).tolist() == [0] * 5


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 1e-310, 5e-324])
def test_temperature_towards_zero_is_the_mode(kind, temperature):
    outputs = randn(3, 5, kind.size)
    mode = every_log_prob(kind, outputs).argmax(-1)
    assert torch.equal(kind.sample(outputs, temperature=temperature), mode)
    assert torch.equal(kind.sample(outputs.float(), temperature=temperature, top_p=0.9, top_k=4), mode)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [1e-9, 1e-46, 1e-310, 5e-324])
def test_the_nucleus_keeps_at_least_one_level(top_p, dtype):
    outputs = randn(13, 17).to(dtype)
    assert torch.equal(Categorical(17).sample(outputs, top_p=top_p), outputs.argmax(-1))
    assert torch.equal(Categorical(17).sample(outputs, top_p=top_p, temperature=1e-310), outputs.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [10**30, 3.4e38, 1e300, 10**400])
def test_temperature_towards_infinity_is_uniform(temperature, dtype):
    outputs = torch.cat([torch.tensor([5.0, -torch.inf]), torch.zeros(9)]).to(dtype).expand(20011, -1)
    generator = torch.Generator().manual_seed(2)
    for options in ({}, {"top_p": 1 - 1e-16}, {"top_k": 2**63 - 1}):
        tokens = Categorical(11).sample(outputs, temperature=temperature, generator=generator, **options)
        chi_square_fits(tokens, torch.tensor([0.1, 0.0] + [0.1] * 9, dtype=torch.float64))


def test_top_p_of_one_keeps_what_rounding_hides():
    # In fp32 the first level's mass rounds to 1, yet the others keep theirs.
    scores = torch.tensor([0.0, -18.0, -19.0, -20.0])
    kept, _ = keep_likely(scores, Sampling(top_k=3))
    assert kept.tolist() == [True, True, True, False]


def test_the_lower_of_equal_levels_goes_first():
    # Enough of them that an unstable sort changes their order.
    for kind, top_p in ((Categorical(7), 0.3), (Categorical(700), 0.0029)):
        outputs = torch.zeros(999, kind.levels)
        assert kind.sample(outputs, top_k=2).unique().tolist() == [0, 1]
        assert kind.sample(outputs, top_p=top_p).unique().tolist() == [0, 1, 2]
        assert kind.sample(outputs, temperature=0).unique().tolist() == [0]


@pytest.mark.parametrize("kind", KINDS[1:3], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_samples_depend_on_the_generator_alone(kind, options):
    outputs = randn(7, kind.size)
    before = torch.get_rng_state()
    first, again = (kind.sample(outputs, generator=torch.Generator().manual_seed(5), **options) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(torch.get_rng_state(), before)


def test_build_by_spec():
    assert build("categorical", 17) == Categorical(17)
    assert build("logistics", 256) == Logistics(256, 10)
    assert build("logistics(mixtures=3)", 256).size == 9
    assert build("categorical", 17).size == 17


@pytest.mark.parametrize(
    ("text", "levels", "message"),
    [
        ("categorial", 256, "unknown name 'categorial' .did you mean 'categorical'.*known: categorical, logistics"),
        ("logistics(parts=3)", 256, "logistics has no option 'parts'; it has mixtures"),
        ("logistics(mixtures=0)", 256, "mixtures=0 must be at least 1"),
        ("logistics(mixtures='a')", 256, "mixtures='a'"),
        ("categorical", 1, "levels=1 must be at least 2"),
        ("3", 256, "'3' .*; known: categorical, logistics"),
    ],
)
def test_build_refuses(text, levels, message):
    with pytest.raises(ValueError, match=message):
        build(text, levels)


@pytest.mark.parametrize("kind", [Categorical(17), Logistics(17)], ids=str)
def test_wrong_outputs_and_targets_are_refused(kind):
    outputs, targets = torch.zeros(3, 5, kind.size), torch.zeros(3, 5, dtype=torch.int64)
    for call in (lambda x: kind.log_prob(x, targets), kind.sample):
        with pytest.raises(ValueError, match=rf"floating-point .*{kind.size}.*\(3, 5, 7\)"):
            call(torch.zeros(3, 5, 7))
        with pytest.raises(ValueError, match=r"floating-point .*not torch.int64"):
            call(outputs.long())
    with pytest.raises(ValueError, match=r"targets must be .*not torch.int64 \(3,\)"):
        kind.log_prob(outputs, targets[:, 0])
    with pytest.raises(ValueError, match=r"targets must be int64.*not torch.int32"):
        kind.log_prob(outputs, targets.int())
    for wrong in (-1, 17):
        with pytest.raises(ValueError, match=rf"targets must be in 0 ... 16, not .*{wrong}"):
            kind.log_prob(outputs, torch.full_like(targets, wrong))


@pytest.mark.parametrize("kind", [Categorical(17), Logistics(17)], ids=str)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0 must be a finite number >= 0"),
        ({"temperature": math.inf}, "temperature=inf"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": -1}, "top_k=-1 must be >= 0"),
        ({"top_p": 0.0}, r"top_p=0.0 must be in \(0, 1\]"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_wrong_options_are_refused(kind, options, message):
    with pytest.raises(ValueError, match=message):
        kind.sample(torch.zeros(3, kind.size), **options)


@pytest.mark.parametrize(("levels", "top_p", "kept"), [(2, 0.5, 1), (4, 0.5, 2), (4, 0.75, 3), (8, 0.125, 1)])
def test_top_p_at_a_tie_keeps_the_smallest_set(levels, top_p, kept):
    """Where the mass of the levels so far is top_p exactly, the next one is not needed."""
    stays, _ = keep_likely(torch.zeros(levels, dtype=torch.float64), Sampling(top_p=top_p))
    assert stays.tolist() == [True] * kept + [False] * (levels - kept)


def test_the_tables_of_options_agree():
    assert (
        [one.name for one in sampling.OPTIONS] == [*SamplingOptions.__annotations__] == [*vars(Sampling(seed=1))][:-1]
    )
    for one in sampling.OPTIONS:
        assert one.low <= one.default <= one.high
        assert Sampling(**{one.name: one.low}) != Sampling(**{one.name: one.high})
        assert one.sentence in (Sampling.__doc__ or "")
        assert one.sentence in (Likelihood.sample.__doc__ or "")


def test_no_top_k_is_all():
    assert Sampling(top_k=None) == Sampling(top_k=0) == Sampling()
