"""States that no decoder made: the engine and the plain decoder refuse them, and read no memory that is not theirs."""

import subprocess
import sys

import pytest
import torch
from test_engine import MODELS, decoder, needs_kernels, plain, run
from torch.utils import _pytree as pytree

import longspan
from longspan.generation.native_decoder import Engine
from longspan.models.decoder import DecoderState

TOKEN = torch.zeros(2, 1, dtype=torch.long)


def change(state: DecoderState, layer: int, **parts) -> DecoderState:
    layers = list(state.layers)
    layers[layer] = layers[layer]._replace(**parts)
    return state._replace(layers=tuple(layers))


@pytest.fixture(params=["engine", "plain"])
def made(request):
    """A decoder of linear and softmax layers with rotary positions, its state after four tokens, and a step."""
    if request.param == "engine" and needs_kernels.args[0]:
        pytest.skip(needs_kernels.kwargs["reason"])
    model = decoder(MODELS[2])
    _, state = run(plain(model), model.init_state(2, 8), torch.zeros(2, 4, dtype=torch.long))
    return state, Engine(model) if request.param == "engine" else plain(model)


@pytest.mark.parametrize(("count", "row"), [(-(10**6), 0), (-1, 1), (9, 0), (9, 1), (10**12, 1)])
def test_a_cache_that_counts_what_it_cannot_hold(made, count, row):
    state, step = made
    length = state.layers[1].length.clone()
    length[row] = count
    with pytest.raises(ValueError, match=rf"the state's (length|counter) is {count}"):
        step(TOKEN, change(state, 1, length=length))


def test_positions_below_zero(made):
    state, step = made
    with pytest.raises(ValueError, match="is -1, .* at least 0"):
        step(TOKEN, change(state, 0, position=torch.tensor([3, -1])))
    with pytest.raises(ValueError, match="the state's position is -5"):
        step(TOKEN, state._replace(position=torch.tensor([-5, 3])))


@pytest.mark.parametrize(
    "counts",
    [
        torch.zeros(0, dtype=torch.long),
        torch.zeros(1, dtype=torch.long),
        torch.zeros(2, 1, dtype=torch.long),
        torch.tensor(3),
        torch.full((2,), 4, dtype=torch.int32),
        torch.full((2,), 4, dtype=torch.int8),
        torch.full((2,), 4.0),
        torch.full((2,), 4, device="meta"),
    ],
    ids=lambda t: f"{t.dtype}-{tuple(t.shape)}-{t.device}",
)
def test_counters_of_another_kind(made, counts):
    state, step = made
    for odd in (change(state, 0, position=counts), change(state, 1, length=counts), state._replace(position=counts)):
        with pytest.raises(ValueError, match="state"):
            step(TOKEN, odd)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t: torch.empty_like(t, device="meta"),
        torch.Tensor.double,
        torch.Tensor.long,
        lambda t: t[:1],
        lambda t: t[..., :-1],
        lambda t: t[0],
        lambda t: t.to_sparse(),
    ],
    ids=["meta", "double", "integer", "fewer rows", "fewer channels", "no batch", "sparse"],
)
@pytest.mark.parametrize("part", ["sums", "keys", "values"])
@needs_kernels
def test_the_engine_takes_numbers_of_its_kind_only(part, spoil):
    model = decoder(MODELS[2])
    state = model.init_state(2, 4)
    layer = 0 if part == "sums" else 1
    odd = change(state, layer, **{part: spoil(getattr(state.layers[layer], part))})
    with pytest.raises(ValueError, match="the state does not fit this decoder"):
        Engine(model)(TOKEN, odd)


@needs_kernels
class TestEngine:
    def test_rows_of_a_full_and_a_roomy_cache(self):
        """The row that is full may be any: each cache grows before a token is written beyond it."""
        model = decoder(MODELS[1])
        prompt = torch.randint(0, 37, (2, 8), generator=torch.Generator().manual_seed(0))
        for short in (0, 1):
            mask = torch.ones(2, 8, dtype=torch.bool)
            mask[short, 3:] = False
            with torch.no_grad():
                _, state = model(prompt, model.init_state(2, 8), mask=mask)
                wanted, _ = model(TOKEN, longspan.states.clone(state))
            assert state.layers[0].keys.shape[2] == state.layers[0].length.max() == 8
            found, after = Engine(model)(TOKEN, longspan.states.clone(state))
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=2e-5)
            assert after.layers[0].keys.shape[2] == 16

    def test_a_counter_changed_between_its_own_calls(self):
        model = decoder(MODELS[2])
        engine = Engine(model)
        _, state = engine(TOKEN, model.init_state(2, 4))
        kept = longspan.states.clone(state)
        for count in (-(10**6), 10**12):
            state.layers[1].length[1] = count
            with pytest.raises(ValueError, match=f"the state's length is {count}"):
                engine(TOKEN, state)
        state.layers[1].length[1] = 1
        assert all(
            torch.equal(a, b) for x, y in zip(state.layers, kept.layers, strict=True) for a, b in zip(x, y, strict=True)
        )

    def test_layers_that_share_memory(self):
        model = decoder(MODELS[2])
        state = model.init_state(2, 4)
        with pytest.raises(ValueError, match="parts of which share memory"):
            Engine(model)(TOKEN, change(state, 1, values=state.layers[1].keys))
        with pytest.raises(ValueError, match="parts of which share memory"):
            Engine(model)(TOKEN, state._replace(layers=(state.layers[0], state.layers[1], state.layers[0])))

    def test_negated_views_and_views(self):
        model = decoder(MODELS[2])
        with torch.no_grad():
            _, state = model(torch.ones(2, 3, dtype=torch.long), model.init_state(2, 4))
        wanted, _ = Engine(model)(TOKEN, longspan.states.clone(state))
        for view in (lambda sums: torch._neg_view(-sums), lambda sums: sums.mT.contiguous().mT):
            own = longspan.states.clone(state)
            odd = change(own, 0, sums=view(own.layers[0].sums))
            assert torch.equal(Engine(model)(TOKEN, odd)[0], wanted)
        # Counters that do not lie side by side.
        position = torch.stack([state.position] * 2, 1)[:, 0]
        assert torch.equal(Engine(model)(TOKEN, longspan.states.clone(state)._replace(position=position))[0], wanted)

    def test_no_state_at_all_and_tokens_without_memory(self):
        model = decoder(MODELS[2])
        for odd in (None, (), model.init_state(2).layers, model.init_state(2)._replace(layers=None)):
            with pytest.raises(ValueError, match="the state does not fit this decoder"):
                Engine(model)(TOKEN, odd)
        with pytest.raises(ValueError, match="tokens must be int64"):
            Engine(model)(TOKEN.to("meta"), model.init_state(2))


class TestFreedMemory:
    """``untyped_storage().resize_(0)``, with which sharding and offloading free memory, leaves a tensor's shape."""

    @pytest.mark.parametrize("which", range(6))
    @pytest.mark.parametrize("returned", [False, True], ids=["any state", "what the last call returned"])
    def test_a_state_whose_memory_was_freed(self, made, which, returned):
        state, step = made
        if returned:
            _, state = step(TOKEN, state)
        pytree.tree_leaves(state)[which].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="whose storage holds 0 bytes"):
            step(TOKEN, state)

    def test_a_view_into_freed_memory(self, made):
        state, step = made
        both = torch.cat([state.layers[0].sums] * 2)
        view = both[2:]
        both.untyped_storage().resize_(both.nbytes // 2)
        with pytest.raises(ValueError, match="not all of its elements"):
            step(TOKEN, change(state, 0, sums=view))

    def test_memory_that_was_replaced_is_the_one_that_counts(self, made):
        state, step = made
        _, known = step(TOKEN, longspan.states.clone(state))
        other = longspan.states.clone(known)
        for tensor in pytree.tree_leaves(other):
            if tensor.is_floating_point():
                tensor.mul_(0.5)
        wanted, _ = step(TOKEN, longspan.states.clone(other))
        _, known = step(TOKEN, longspan.states.clone(state))
        for old, new in zip(pytree.tree_leaves(known), pytree.tree_leaves(other), strict=True):
            old.data = new
        torch.testing.assert_close(step(TOKEN, known)[0], wanted)

    @pytest.mark.parametrize("spec", ["local(window=3)", "gated_deltanet", "performer", "transformer_xl(memory=4)"])
    def test_other_mechanisms(self, spec):
        attention = longspan.build(spec, 16, 2)
        x = torch.randn(2, 1, 16)
        for which in range(len(pytree.tree_leaves(attention.init_state(2, 4)))):
            with torch.no_grad():
                _, state = attention(x, attention.init_state(2, 4))
                pytree.tree_leaves(state)[which].untyped_storage().resize_(0)
                with pytest.raises(ValueError, match="whose storage holds 0 bytes"):
                    attention(x, state)
        for function in (longspan.states.clone, lambda state: longspan.states.select(state, [0])):
            with pytest.raises(ValueError, match="whose storage holds 0 bytes"):
                function(state)

    def test_operations(self):
        x, ones = torch.randn(2, 2, 1, 8), torch.ones(2, 2, 1)
        calls = {
            "linear": lambda s: longspan.linear_attention(x, x, x, state=s),
            "decay": lambda s: longspan.decay_attention(x, x, x, log_decay=-ones, state=s),
            "delta": lambda s: longspan.delta_rule(x, x, x, beta=ones, state=s),
            "convolution": lambda s: longspan.causal_convolution(x[:, 0], torch.ones(8, 4), state=s),
        }
        for name, call in calls.items():
            shape = {"linear": (2, 2, 8, 9), "convolution": (2, 3, 8)}.get(name, (2, 2, 8, 8))
            state = torch.randn(*shape)
            state.untyped_storage().resize_(0)
            with pytest.raises(ValueError, match="whose storage holds 0 bytes"):
                call(state)


def test_a_step_compiles_although_counters_are_checked():
    model = decoder(MODELS[2], depth=2)
    with torch.no_grad():
        wanted, _ = model(TOKEN, model.init_state(2, 4))
        found, _ = torch.compile(model, backend="eager", fullgraph=True)(TOKEN, model.init_state(2, 4))
    torch.testing.assert_close(found, wanted)


@needs_kernels
def test_the_process_survives():
    """As a whole program, where a read beyond the end would end it."""
    code = (
        "import torch, longspan\nfrom longspan.generation.native_decoder import Engine\n"
        "config = longspan.DecoderConfig(dim=8, heads=2, depth=1, vocab=5, attention='softmax', length=8)\n"
        "model = longspan.Decoder(config).eval()\nstate = model.init_state(1, 4)\n"
        "state.layers[0].length.fill_(-10**6)\n"
        "try:\n    Engine(model)(torch.zeros(1, 1, dtype=torch.long), state)\nexcept ValueError:\n"
        "    print('refused')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
