"""Mechanisms on the recurrence with decay: worked by hand, and as a matrix of all pairs written from the paper."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longspan
from longspan.ops import gated
from longspan.ops.linear.features import dpfp

B, N, DIM, HEADS = 2, 13, 8, 2


class Bare(nn.Module):
    """In place of a norm, which would hide what it is given."""

    def forward(self, x, gate):
        return x


def seeded(spec, dim=DIM, heads=HEADS, seed=0, **options):
    """An attention in float64 with weights from the seed, and some inputs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = longspan.build(spec, dim, heads, **options).double()
        return module, torch.randn(B, N, dim, dtype=torch.float64)


@torch.no_grad()
def fill(module, **weights):
    """Set parameters by name, ``__`` for a dot: a number for all entries, or what has the parameter's shape."""
    for name, value in weights.items():
        parameter = module.get_parameter(name.replace("__", "."))
        parameter.copy_(torch.as_tensor(value, dtype=parameter.dtype).expand_as(parameter))


def tokens(*rows):
    return torch.tensor([rows], dtype=torch.float64)


def heads_of(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def beside(x):
    return x.transpose(1, 2).flatten(-2)


class TestRetention:
    def test_by_hand(self):
        module = longspan.build("retention(rotary=0.0, expand_v=1.0)", 2, 1).double()
        for part in ("query", "key", "value", "out"):
            fill(module, **{f"{part}__weight": torch.eye(2)})
        module.norm = Bare()
        # S_1 = [[1, 0], [0, 0]], S_2 = 31/32 S_1 + [[1, 1], [1, 1]].
        expected = tokens((1, 0), (95 / 32, 2)) / math.sqrt(2)
        torch.testing.assert_close(module(tokens((1, 0), (1, 1)))[0], expected)

    @pytest.mark.parametrize("rotary", [0.0, 10000.0])
    def test_is_the_matrix_of_all_pairs(self, rotary):
        """Eqs 5 to 8 of the paper, with positions as complex numbers."""
        module, x = seeded(f"retention(rotary={rotary})", 16)
        q, k, v = (heads_of(project(x)) for project in (module.query, module.key, module.value))
        gap = torch.arange(N)[:, None] - torch.arange(N)
        gamma = 1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=torch.float64))
        decay = torch.where(gap >= 0, gamma[:, None, None] ** gap.clamp(min=0), 0.0)
        rates = 10000.0 ** (-torch.arange(4, dtype=torch.float64) / 4) * bool(rotary)
        a, b = (torch.complex(*t.chunk(2, -1)) for t in (q, k))
        turned = torch.polar(torch.ones(N, N, 4, dtype=torch.float64), gap[..., None] * rates)
        scores = torch.einsum("bhnd,nmd,bhmd->bhnm", a, turned, b.conj()).real / math.sqrt(8)
        o = beside((scores * decay) @ v)
        o = F.group_norm(o.flatten(0, 1), HEADS).view_as(o)
        torch.testing.assert_close(module(x)[0], module.out(F.silu(module.gate(x)) * o))

    def test_is_scalar_decay_with_a_constant(self):
        module, x = seeded("retention(rotary=0.0)")
        q, k, v = (heads_of(project(x)) for project in (module.query, module.key, module.value))
        log_decay = torch.tensor([31 / 32, 63 / 64], dtype=torch.float64).log()[:, None].expand(B, HEADS, N)
        o = gated.decay_attention(q, k, v, log_decay=log_decay)
        module.norm = Bare()
        torch.testing.assert_close(module(x)[0], module.out(beside(o)))

    def test_rates_are_defined_for_any_number_of_heads(self):
        rates = longspan.build("retention(rotary=0.0)", 100, 100).log_decay
        assert rates == sorted(rates)
        assert rates[-1] < 0
        assert rates[3] == pytest.approx(math.log(1 - 2**-8))

    def test_initialisation(self):
        module, _ = seeded("retention", 256, 4)
        found = [getattr(module, part).weight.abs().max().item() for part in ("query", "value", "out")]
        bounds = [(6 / 512) ** 0.5 * 2**-2.5, (6 / 768) ** 0.5 * 2**-2.5, (6 / 768) ** 0.5]
        assert found == pytest.approx(bounds, rel=0.01)


class TestGLA:
    def test_by_hand(self):
        module = longspan.build("gla(rank=1, temperature=1.0, expand_k=1.0)", 2, 1).double()
        for part in ("query", "key", "value", "out"):
            fill(module, **{f"{part}__weight": torch.eye(2)})
        # alpha = sigmoid(0) = 1/2 in the first channel, sigmoid(log 3) = 3/4 in the second.
        fill(module, decay__0__weight=0.0, decay__1__bias=[0.0, math.log(3)])
        module.norm = Bare()
        # S_1 = [[1, 1], [1, 1]], S_2 = [[1/2, 1/2], [3/4, 3/4]] + [[1, 2], [2, 4]].
        expected = tokens((2, 2), (1.5 + 5.5, 2.5 + 9.5)) / math.sqrt(2)
        torch.testing.assert_close(module(tokens((1, 1), (1, 2)))[0], expected)

    def test_is_the_matrix_of_all_pairs(self):
        """Eq. 4 of the paper: every pair of tokens with the product of the factors between them."""
        module, x = seeded("gla(rank=3, temperature=2.0, expand_k=1.0, expand_v=1.5)")
        fill(module, norm__weight=torch.linspace(0.5, 1.5, 6))
        q, k, v = (heads_of(project(x)) for project in (module.query, module.key, module.value))
        first, second = module.decay
        alpha = heads_of((x @ first.weight.T @ second.weight.T + second.bias).sigmoid() ** 0.5)
        scores = torch.zeros(B, HEADS, N, N, dtype=torch.float64)
        for i in range(N):
            for j in range(i + 1):
                scores[:, :, i, j] = (q[:, :, i] * k[:, :, j] * alpha[:, :, j + 1 : i + 1].prod(2)).sum(-1) / 2
        o = F.rms_norm(scores @ v, (6,), module.norm.weight, 1e-5)
        torch.testing.assert_close(module(x)[0], module.out(F.silu(module.gate(x)) * beside(o)))

    def test_sizes_follow_the_paper(self):
        module = longspan.build("gla", 64, 4)
        assert [module.key.out_features, module.value.out_features, module.decay[0].out_features] == [32, 64, 16]


class TestSSD:
    def test_by_hand(self):
        module = longspan.build("ssd(channels=1, expand_v=1.0, convolution=0)", 1, 1).double()
        for part in ("query", "key", "value", "out", "gate"):
            fill(module, **{f"{part}__weight": 1.0})
        # dt = softplus(log(e - 1)) = 1 and e^(dt A) = e^-2 for every token; D = 3.
        fill(module, step__weight=0.0, dt_bias=math.log(math.e - 1), a_log=math.log(2), skip=3.0)
        x = tokens((1,), (2,))
        s, t = (float(F.silu(torch.tensor(n, dtype=torch.float64))) for n in (1.0, 2.0))
        o = [s**3 + 3 * s, (math.exp(-2) * s**2 + t**2) * t + 3 * t]
        gated_ = [o[0] * s, o[1] * t]
        expected = tokens(*((g / math.sqrt(g * g + 1e-5),) for g in gated_))
        torch.testing.assert_close(module(x)[0], expected)

    @pytest.mark.parametrize(("key_heads", "heads"), [(1, 2), (2, 4)])
    def test_is_the_semiseparable_matrix(self, key_heads, heads):
        """Y = (L * C B^T) (dt X) + D X with L_ij = exp(sum of dt A over i, ..., j + 1), and the block around it."""
        module, u = seeded(f"ssd(channels=5, key_heads={key_heads})", 8, heads)
        scale = torch.linspace(0.5, 1.5, 16, dtype=torch.float64)
        fill(module, scale=scale, skip=torch.linspace(-1, 2, heads))
        mixed = torch.cat([module.value(u), module.key(u), module.query(u)], -1).mT
        mixed = F.conv1d(F.pad(mixed, (3, 0)), module.mix.weight[:, None], module.shift, groups=mixed.shape[1]).mT
        x, b, c = F.silu(mixed).split([16, 5 * key_heads, 5 * key_heads], -1)
        x = x.unflatten(-1, (heads, -1))
        b, c = (t.unflatten(-1, (key_heads, -1)).repeat_interleave(heads // key_heads, 2) for t in (b, c))
        dt = F.softplus(module.step(u) + module.dt_bias)
        y = torch.zeros_like(x)
        for i in range(N):
            for j in range(i + 1):
                decay = (-module.a_log.exp() * dt[:, j + 1 : i + 1].sum(1)).exp()
                y[:, i] += ((c[:, i] * b[:, j]).sum(-1) * decay * dt[:, j])[..., None] * x[:, j]
        y = (y + module.skip[:, None] * x).flatten(-2) * F.silu(module.gate(u))
        y = F.rms_norm(y.unflatten(-1, (key_heads, -1)), (16 // key_heads,), None, 1e-5).flatten(-2)
        torch.testing.assert_close(module(u)[0], module.out(y * scale))

    def test_initialisation(self):
        module, _ = seeded("ssd", 64, 64, seed=1)
        a, dt = module.a_log.exp(), F.softplus(module.dt_bias)
        assert (module.channels, module.key_heads, module.value.out_features) == (128, 1, 128)
        assert 1 <= a.min() < 2
        assert 15 < a.max() <= 16
        assert 1e-3 <= dt.min() < 2e-3
        assert 0.05 < dt.max() <= 0.1
        assert module.skip.eq(1).all()


class TestAverage:
    def test_by_hand(self):
        module = longspan.build("average(inner=1)", 1, 1).double()
        fill(module, gates__weight=0.0, gates__bias=[0.0, math.log(3)])  # i = 1/2, f = 3/4
        fill(module, feedforward__expand__weight=1.0, feedforward__expand__bias=0.0)
        fill(module, feedforward__contract__weight=2.0, feedforward__contract__bias=1.0)
        # Means 1, 2, 0 become 3, 5, 1.
        expected = tokens((0.5 + 2.25,), (1.5 + 3.75,), (-2.0 + 0.75,))
        torch.testing.assert_close(module(tokens((1,), (3,), (-4,)))[0], expected)

    def test_is_the_paper_s_equations(self):
        module, x = seeded("average")
        g = module.feedforward(torch.stack([x[:, : t + 1].mean(1) for t in range(N)], 1))
        i, f = (torch.cat([x, g], -1) @ module.gates.weight.T + module.gates.bias).sigmoid().chunk(2, -1)
        torch.testing.assert_close(module(x)[0], i * x + f * g)
        assert module.feedforward.expand.out_features == 4 * DIM

    def test_heads_play_no_part(self):
        (one, x), (other, _) = seeded("average", heads=1), seeded("average", heads=4, seed=1)
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(x)[0], other(x)[0])

    def test_the_state_is_a_sum_and_a_count(self):
        module, x = seeded("average")
        mask = torch.ones(B, N, dtype=torch.bool)
        mask[0, [0, 5]] = False
        _, state = module(x, module.init_state(B), mask=mask)
        assert state.count.tolist() == [N - 2, N]
        torch.testing.assert_close(state.total, (x * mask[..., None]).sum(1))

    def test_a_segment_does_not_suffer_from_a_large_one_before_it(self):
        module, x = seeded("average")
        module, x = module.float(), x.float()
        row = torch.cat([1e6 * x, x], 1)
        segments = torch.arange(2).repeat_interleave(N).expand(B, -1)
        torch.testing.assert_close(module(row, segments=segments)[0][:, N:], module(x)[0], rtol=1e-6, atol=1e-6)


class TestFastWeights:
    def bare(self, beta_bias):
        module = longspan.build("fast_weights(feature_map='relu')", 2, 1).double()
        for part in ("query", "key", "value", "out"):
            fill(module, **{f"{part}__weight": torch.eye(2)})
        fill(module, rate__weight=0.0, rate__bias=beta_bias)
        return module

    def test_by_hand(self):
        # beta = 1/2. W_1 = [[1/2, 0], [0, 0]]; then k = q = (1/2, 1/2) reads (1/4, 0), so the error is (3/4, 1) and
        # W_2 = W_1 + [[3/16, 1/4], [3/16, 1/4]].
        expected = tokens((0.5, 0), (7 / 16, 1 / 4))
        torch.testing.assert_close(self.bare(0.0)(tokens((1, 0), (1, 1)))[0], expected)

    def test_with_a_step_size_of_one_a_key_returns_its_last_value(self):
        module = self.bare(50.0)
        y, state = module(tokens((3, 0), (0, 5), (7, 0)), module.init_state(1))
        torch.testing.assert_close(y, tokens((3, 0), (0, 5), (7, 0)))
        torch.testing.assert_close(state.weights[0, 0], tokens((7, 0), (0, 5))[0])

    def test_is_the_loop_of_the_paper(self):
        module, x = seeded("fast_weights")
        q, k, v = (heads_of(project(x)) for project in (module.query, module.key, module.value))
        q, k = (dpfp(t, 3) / dpfp(t, 3).sum(-1, keepdim=True) for t in (q, k))
        beta, w = module.rate(x).sigmoid().mT, torch.zeros(B, HEADS, 4, 24, dtype=torch.float64)
        y = []
        for t in range(N):
            old = torch.einsum("bhef,bhf->bhe", w, k[:, :, t])
            new = beta[:, :, t, None] * v[:, :, t] + (1 - beta[:, :, t, None]) * old
            w = w + torch.einsum("bhe,bhf->bhef", new - old, k[:, :, t])
            y.append(torch.einsum("bhef,bhf->bhe", w, q[:, :, t]))
        torch.testing.assert_close(module(x)[0], module.out(beside(torch.stack(y, 2))))

    def test_the_sum_rule_is_linear_attention(self):
        (module, x), (linear, _) = seeded("fast_weights(rule='sum', feature_map='elu')"), seeded("linear")
        linear.load_state_dict(module.state_dict(), strict=False)
        fill(linear, **{f"{part}__bias": 0.0 for part in ("query", "key", "value", "out")})
        torch.testing.assert_close(module(x)[0], linear(x)[0])

    @pytest.mark.parametrize("spec", ["fast_weights", "fast_weights(rule='sum', nu=1)"])
    def test_a_token_without_features_reads_and_writes_nothing(self, spec):
        module, x = seeded(spec)
        holes = x.clone()
        holes[:, [0, 4, 5]] = 0.0
        holes.requires_grad_()
        y, state = module(holes, module.init_state(B))
        assert not y[:, [0, 4, 5]].any()
        rest = torch.tensor([t for t in range(N) if t not in (0, 4, 5)])
        expected, after = module(x[:, rest], module.init_state(B))
        torch.testing.assert_close((y[:, rest], state), (expected, after))
        y.square().sum().backward()
        assert holes.grad.isfinite().all()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("retention(rotary=-1.0)", "rotary=-1.0 is the base of the angles"),
        ("retention(expand_v=0.3)", "expand_v=0.3 times heads of 4 channels is no whole number"),
        ("retention(expand_v=0.25)", "expand_v=0.25 leaves each head 1 channel, of which the norm leaves 0"),
        ("gla(rank=0)", "rank=0 of the decay's projection must be at least 1"),
        ("gla(temperature=0.0)", "temperature=0.0 divides the logarithm of the decay and must be positive"),
        ("gla(expand_k=0.1)", "expand_k=0.1 times heads of 4 channels is no whole number"),
        ("gla(expand_v=0.1)", "expand_v=0.1 times heads of 4 channels is no whole number"),
        ("ssd(channels=0)", "channels=0 of B and C can hold nothing; at least 1 is needed"),
        ("ssd(key_heads=3)", "key_heads=3 must divide heads=2"),
        ("ssd(expand_v=0.1)", "expand_v=0.1 times heads of 4 channels is no whole number"),
        ("ssd(convolution=1)", "a convolution of width=1 reaches no earlier token"),
        ("average(inner=-1)", "inner=-1 is a width; it must be positive, or 0 for 4 dim"),
        ("fast_weights(rule='product')", "unknown rule 'product'; known: delta, sum"),
        ("fast_weights(feature_map='dpfq')", r"unknown feature map 'dpfq' \(did you mean 'dpfp'\?\)"),
        ("fast_weights(feature_map='elu', nu=2)", "nu belongs to feature_map='dpfp', not 'elu'"),
        ("fast_weights(nu=8)", "nu=8 pairs each of 8 numbers"),
        ("fast_weights(eps=1.0)", "eps belongs to rule='sum', not 'delta'"),
        ("fast_weights(rule='sum', eps=0.0)", "eps=0.0 is added to a denominator that can be 0"),
    ],
)
def test_bad_specs_are_refused(spec, message):
    with pytest.raises(ValueError, match=message):
        longspan.build(spec, DIM, HEADS)


@pytest.mark.parametrize("name", ["average", "fast_weights", "gla", "retention", "ssd"])
def test_there_is_no_bidirectional_form(name):
    with pytest.raises(ValueError, match=f"{name} has no bidirectional form; it has: causal"):
        longspan.build(name, 8, 2, causal=False)
