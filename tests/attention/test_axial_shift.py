"""The autoregressive arrangement of axial attention, against loops over the pixels of a grid."""

import pytest
import torch

import longspan
from support.sparse import build, data
from support.tensors import close, same

N, WIDTHS = 17, (1, 3, 5, 19)  # one column; whole rows and a last one cut short; one row


def shifted(width, **place):
    return build(f"axial(width={width}, kind='shifted')", **place)


def read(q, keys, values):
    """One query (H,D) over keys and values (M,H,D)."""
    scores = torch.einsum("hd,mhd->hm", q, keys) * q.shape[-1] ** -0.5
    return torch.einsum("hm,mhd->hd", scores.softmax(-1), values)


def decoders(module, x):
    """What outer and inner decoder give one sequence x (N,dim): each (N,H,D), pixel by pixel."""
    n, width = len(x), module.width
    q, k, v = (part(x).unflatten(-1, (module.heads, -1)) for part in (module.query, module.key, module.value))
    column = [[j for j in range(i + 1) if j % width == i % width] for i in range(n)]
    row = [[j for j in range(n) if j // width == i // width] for i in range(n)]
    h = torch.stack([read(q[i], k[column[i]], v[column[i]]) for i in range(n)])
    query, key = (part(h.flatten(1)).view_as(h) for part in (module.above_query, module.above_key))
    whole = [read(query[i], key[row[i]], h[row[i]]) for i in range(n)]
    outer = torch.stack([whole[i - width] if i >= width else torch.zeros_like(h[0]) for i in range(n)])
    own = [[j for j in row[i] if j <= i] for i in range(n)]
    return outer, torch.stack([read(q[i], k[own[i]], v[own[i]]) for i in range(n)])


def loops(module, x):
    """x (N,dim) -> (N,dim)."""
    outer, inner = decoders(module, x)
    return module.out((outer + inner).flatten(1))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_it_equals_loops_over_the_grid(width, backend):
    for n in (N, 15, 1):
        module, x = shifted(width), data(n)
        with longspan.backend(backend):
            same(module(x)[0], torch.stack([loops(module, row) for row in x]), module.parameters())


@pytest.mark.parametrize("width", WIDTHS)
def test_the_row_above_does_not_see_the_current_row(width):
    module, x, seen = shifted(width), data(N, batch=1).requires_grad_(), {}
    module.out.register_forward_pre_hook(lambda _, o: seen.update(o=o[0]))
    module(x)
    above = seen["o"][0] - decoders(module, x[0])[1].flatten(1)
    for i in range(N):
        (found,) = torch.autograd.grad(above[i].square().sum(), x, retain_graph=True)
        assert (found[0].abs() > 1e-12).any(-1).equal(torch.arange(N) // width < i // width)


class TestRecord:
    @pytest.mark.parametrize("cut", [1, 8])
    @pytest.mark.parametrize("masked", [False, True])
    def test_with_a_state_older_pixels_are_carried(self, cut, masked):
        """matrix x values + carried x older reads = what the heads read."""
        module, x, record, seen = shifted(3), data(N), {}, {}
        _, state = module(x[:, :9], module.init_state(2))
        module.out.register_forward_pre_hook(lambda _, o: seen.update(o=o[0]))
        mask = torch.arange(cut).expand(2, -1) != 2 if masked else None
        _, after = module(x[:, 9 : 9 + cut], state, mask=mask, record=record)
        keys = record["matrix"].shape[-1]
        o = record["matrix"] @ after.lines.values[:, :, :keys] + record["carried"] @ state.above.values
        real = torch.ones(2, cut, dtype=torch.bool) if mask is None else mask
        close(o.transpose(1, 2).flatten(-2)[real], seen["o"][real])
        assert record["carried"].abs().sum() > 0
        slots, at = torch.arange(keys), 9 + real.cumsum(1) - 1
        expected = (slots <= at[:, :, None])[:, None]
        assert record["mask"].expand_as(expected).equal(expected & (slots < after.lines.length[:, None])[:, None, None])


def test_states_of_other_kinds_are_refused():
    one, other, x = shifted(5), build("axial(width=5)"), data(N)
    with pytest.raises(ValueError, match=r"axial cannot continue kv_cache.KeyValues; its states are axial.AxialState"):
        one(x, other.init_state(2))
    with pytest.raises(ValueError, match=r"axial.AxialState; its states are window.Window, kv_cache"):
        other(x, one.init_state(2))
