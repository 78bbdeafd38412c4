"""Both directions of a causal mechanism: worked by hand, and equal to runs over sequences reversed one by one."""

import pytest
import torch

import longspan
from support.mechanisms import DIM, HEADS, B, N, seeded

CAUSAL_ONLY = [
    "average",
    "deltanet",
    "fast_weights",
    "gated_deltanet",
    "gla(rank=3)",
    "image(block=5, memory=3)",
    "infini(segment=4)",
    "kda",
    "retention",
    "rfa(gate=True)",
    "ssd(channels=5)",
]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("spec", CAUSAL_ONLY)
def test_is_a_run_over_each_sequence_and_its_reverse(spec, share):
    module, x = seeded(f"bidirectional({spec}, share={share})", causal=False)
    x = x.requires_grad_()
    segments = torch.tensor([[0] * 5 + [4] * 1 + [7] * 7, [2] * 8 + [3] * 5])
    mask = torch.ones(B, N, dtype=torch.bool)
    mask[0, [0, 6, 7]] = mask[1, [3, 8, 12]] = False
    y, state = module(x, mask=mask, segments=segments)
    expected = torch.zeros_like(y)
    for row in range(B):
        for segment in segments[row].unique():
            at = ((segments[row] == segment) & mask[row]).nonzero()[:, 0]
            back = at.flip(0)
            expected = expected.index_put((torch.tensor(row), at), module.forwards(x[row, at][None])[0][0])
            reverse = (module.backwards or module.forwards)(x[row, back][None])[0][0]
            expected = expected.index_put((torch.tensor(row), back), reverse, accumulate=True)
    assert state is None
    torch.testing.assert_close(y, expected)
    upstream = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    weights = [x, *module.parameters()]
    got, wanted = (torch.autograd.grad(out, weights, upstream, materialize_grads=True) for out in (y, expected))
    torch.testing.assert_close(got, wanted)
    assert all(g.abs().sum() > 0 for g in got[1:])


def test_segments_never_decrease_in_the_reversed_run():
    """As ``attend`` promises every mechanism."""
    module, x = seeded("bidirectional(gla)", causal=False)
    given = []
    module.backwards.register_forward_pre_hook(
        lambda _, args, kwargs: given.append(kwargs["segments"]), with_kwargs=True
    )
    limits = torch.iinfo(torch.int64)
    segments = torch.tensor([[limits.min] * 4 + [0] * 4 + [limits.max] * 5, [3] * N])
    module(x, segments=segments)
    assert (given[0][:, 1:] >= given[0][:, :-1]).all()
    assert torch.equal(given[0].diff(dim=1) != 0, segments.flip(1).diff(dim=1) != 0)


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("bidirectional", "bidirectional"),
        ("bidirectional(gla)", "bidirectional"),
        ("bidirectional('ssd(channels=5)', share=True)", "bidirectional(ssd(channels=5), share=True)"),
        ("bidirectional(share=True, of=kda)", "bidirectional(kda, share=True)"),
        ("bidirectional(rfa(gate=True, map='arccos'))", "bidirectional(rfa(map='arccos', gate=True))"),
    ],
)
def test_the_spec_builds_it_again(text, spec):
    module, x = seeded(text, causal=False)
    again = longspan.build(module.spec, DIM, HEADS, causal=False).double()
    again.load_state_dict(module.state_dict())
    assert module.spec == spec == again.spec
    assert torch.equal(module(x)[0], again(x)[0])


def test_causal_only_mechanisms_name_the_wrapper():
    with pytest.raises(ValueError, match=r"gla has no bidirectional form; .*'bidirectional\(gla\)' runs it in both"):
        longspan.build("gla", DIM, HEADS, causal=False)
    with pytest.raises(ValueError, match="adaptive_span has no bidirectional form; it has: causal$"):
        longspan.build("adaptive_span", DIM, HEADS, causal=False)
