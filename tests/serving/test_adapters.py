"""Models of transformers, of flash-linear-attention and of the hub in a pool: every stream is that of ``generate``."""

import copy
import functools

import pytest
import torch
from torch.utils import _pytree as pytree

import longspan
from longspan import states
from longspan.compat.servable import servable
from longspan.models.decoder import DecoderState
from longspan.models.likelihood import Categorical
from longspan.serving import Pool, Sampling, Servable

pytest.importorskip("transformers")

from adapted_models import FLA, fla, generated, hybrid
from pools import spoiled

import hybrids
from longspan.compat import transformers as on_cpu

pytestmark = pytest.mark.usefixtures("restored")

GREEDY = Sampling(temperature=0.0)
NEW = 7
RECURRENT = ("mamba", "falcon_mamba", "mamba2", "rwkv", "xlstm")


def prompts(vocab, count=7, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = [1 + int(torch.randint(0, 12, (), generator=generator)) for _ in range(count)]
    return [torch.randint(1, vocab, (n,), generator=generator).tolist() for n in lengths]


def alone(model, prompt, n=NEW):
    return generated(model, prompt, n)


def pool(model, **options):
    return spoiled(Pool(model, **({"slots": 3, "capacity": 40, "prefill": 5} | options)))


def crowded(model, vocab, **options):
    """Prompts of several lengths that arrive one by one, in fewer slots than prompts; and known beginnings."""
    given = prompts(vocab)
    expected = [alone(model, prompt) for prompt in given]
    crowd = pool(model, prefix_bytes=1 << 24, **options)
    streams = []
    for prompt in given:
        streams += crowd.submit(prompt, max_new_tokens=NEW, sampling=GREEDY)
        crowd.step()
    crowd.run()
    assert {stream.error for stream in streams} == {""}
    assert [stream.tokens for stream in streams] == expected
    # Two streams of a known prompt, one of which ends earlier.
    forks = crowd.submit(given[1], max_new_tokens=NEW, sampling=[GREEDY, Sampling(seed=3)])
    again = crowd.submit(given[2], max_new_tokens=3, sampling=GREEDY)
    crowd.run()
    assert forks[0].tokens == expected[1]
    assert again[0].tokens == expected[2][:3]
    assert forks[0].cached == len(given[1])
    # Prompts that are read in one call, and one that is not.
    given = [[*range(1, 9)], [*range(2, 10)], [1, 2, 3]]
    streams = [crowd.submit(prompt, max_new_tokens=NEW, sampling=GREEDY)[0] for prompt in given]
    crowd.run()
    assert [stream.tokens for stream in streams] == [alone(model, prompt) for prompt in given]


def continued(model, vocab):
    """A kept state goes on as if the text had been read whole, and stays as it is."""
    first, second = prompts(vocab, 2, seed=1)
    crowd = pool(model)
    (kept,) = crowd.submit(first, max_new_tokens=4, sampling=GREEDY, keep_state=True)
    crowd.submit([1] * (len(first) + 1), max_new_tokens=2)
    crowd.run()
    assert kept.state.position.tolist() == [len(first) + 3]
    before = copy.deepcopy(kept.state)
    more = [kept.tokens[-1], *second]
    other, *streams = (
        crowd.submit(given, max_new_tokens=4, sampling=GREEDY, state=state)[0]
        for given, state in ((first, None), (more, kept.state), (more, kept.state))
    )
    crowd.run()
    assert other.tokens == kept.tokens
    assert [stream.tokens for stream in streams] == [alone(model, [*first, *kept.tokens, *second], 4)] * 2
    assert all(map(torch.equal, pytree.tree_leaves(kept.state), pytree.tree_leaves(before)))


@pytest.mark.parametrize("kind", hybrids.KINDS)
def test_hybrids_in_a_crowd(kind):
    made = hybrid(kind)
    crowded(made, hybrids.VOCAB)
    continued(made, hybrids.VOCAB)


@pytest.mark.parametrize("kind", hybrids.KINDS)
def test_rows_of_equal_length_are_read_in_one_call(kind, monkeypatch):
    """In any order of the rows; and states lie in memory as those of the model do."""
    model, calls = servable(hybrid(kind)), []
    # Other numbers of rows are added up in another order, in float32.
    near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    forward = type(model)._forward
    monkeypatch.setattr(type(model), "_forward", lambda *args: (calls.append(len(args[1])), forward(*args))[1])
    tokens = torch.arange(1, 13).reshape(4, 3)
    mask = torch.tensor([[True] * 3, [True, True, False], [True] * 3, [True, True, False]])
    state = model.init_state(4, 9)
    outputs, state = model(tokens, state, mask=mask)
    assert calls == [2, 2]
    more, state = model(tokens, state)
    assert calls == [2, 2, 2, 2]
    for row, n in enumerate((3, 2, 3, 2)):
        one, after = model(tokens[row : row + 1, :n], model.init_state(1, 9))
        near(outputs[row, -1], one[0, -1])
        one, after = model(tokens[row : row + 1], after)
        near(more[row, -1], one[0, -1])
        for a, b in zip(pytree.tree_leaves(states.select(state, [row])), pytree.tree_leaves(after), strict=True):
            near(a, b)
    for fresh, found in zip(
        pytree.tree_leaves(model.init_state(1, 9)),
        pytree.tree_leaves(model(tokens[:1], model.init_state(1, 9))[1]),
        strict=True,
    ):
        assert fresh.stride()[1:] == found.stride()[1:]


@pytest.mark.parametrize("name", FLA)
def test_models_of_fla_in_a_crowd(name):
    made = fla(name)
    crowded(made, 41)
    continued(made, 41)


def test_models_without_a_kv_cache_need_no_capacity():
    for kind in RECURRENT:
        crowded(hybrid(kind), hybrids.VOCAB, capacity=0)
    crowded(fla("gated_deltanet"), 41, capacity=0)
    for made in (hybrid("qwen3_next"), fla("hybrid"), fla("rwkv-hybrid")):
        with pytest.raises(ValueError, match="capacity="):
            Pool(made, slots=2)
        crowd = pool(made, capacity=9)
        with pytest.raises(ValueError, match="capacity has 9"):
            crowd.submit([1, 2, 3], max_new_tokens=8)


def test_windows_of_keys_are_those_of_the_model():
    """Texts longer than a sliding window, read in pieces longer and shorter than it."""
    for kind, more in (("lfm3", {"sliding_window": 4}), ("recurrent_gemma", {"attention_window_size": 4})):
        made = hybrid(kind, **more)
        crowded(made, hybrids.VOCAB, prefill=3)
        crowded(made, hybrids.VOCAB, prefill=7)


def test_states_are_saved_and_loaded(tmp_path):
    for made in (hybrid("falcon_h1"), fla("rwkv-hybrid")):
        crowd = pool(made)
        (kept,) = crowd.submit([3, 1, 4], max_new_tokens=4, sampling=GREEDY, keep_state=True)
        crowd.run()
        states.save(kept.state, tmp_path / "state.safetensors")
        like = servable(made).init_state(1, 40)
        state = states.load(tmp_path / "state.safetensors", like=states.fix_capacity(like, 40))
        crowd = pool(made, capacity=20)
        (stream,) = crowd.submit([kept.tokens[-1]], max_new_tokens=4, sampling=GREEDY, state=state)
        crowd.run()
        assert stream.tokens == alone(made, [3, 1, 4, *kept.tokens], 4)


def test_states_stay_as_they_are_unless_donated():
    for made in (hybrid("jamba"), hybrid("rwkv"), hybrid("xlstm"), fla("hybrid")):
        model = servable(made)
        with torch.no_grad():
            tokens = torch.tensor([[3, 1, 4], [2, 7, 0]])
            mask = torch.tensor([[True, True, True], [True, True, False]])
            _, state = model(tokens, model.init_state(2, 9), mask=mask)
            before = states.clone(state)
            model(torch.tensor([[5], [6]]), state)
        assert all(map(torch.equal, pytree.tree_leaves(state), pytree.tree_leaves(before)))


def test_a_model_of_the_hub_is_its_decoder(tmp_path):
    config = longspan.DecoderConfig(vocab=13, dim=16, heads=2, depth=2, attention="gla; softmax", positions="none")
    torch.manual_seed(0)
    made = on_cpu.LongspanForCausalLM.from_longspan(longspan.Decoder(config).eval())
    made.save_pretrained(tmp_path)
    again = on_cpu.LongspanForCausalLM.from_pretrained(tmp_path)
    for one in (made, again):
        assert servable(one) is one.decoder
        crowd = pool(one)
        (stream,) = crowd.submit([3, 1, 4], max_new_tokens=NEW, sampling=GREEDY)
        crowd.run()
        assert stream.tokens == alone(made, [3, 1, 4])


def test_prompts_need_a_token_where_there_is_no_start_token():
    crowd = pool(fla("gla"))
    with pytest.raises(ValueError, match="no start token"):
        crowd.submit([], max_new_tokens=3)
    with pytest.raises(ValueError, match="token 41 is not among 0 to 40"):
        crowd.submit([41], max_new_tokens=3)


def test_what_cannot_be_served_is_refused_by_name():
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=11, **small)).eval()
    with pytest.raises(ValueError, match="LlamaForCausalLM: the model type llama is not one with recurrent layers"):
        Pool(llama)
    made = hybrids.model("mamba2")
    with pytest.raises(ValueError, match=r"accelerate\(model\) first"):
        Pool(made)
    on_cpu.accelerate(made)
    with pytest.raises(ValueError, match="training mode"):
        Pool(made.train())
    with pytest.raises(ValueError, match="no output layer"):
        Pool(made.eval().backbone)
    with pytest.raises(ValueError, match=r"must be a Decoder.*, not Linear"):
        Pool(torch.nn.Linear(2, 2))
    pairs = longspan.Seq2Seq(longspan.Seq2SeqConfig(vocab=5, source_vocab=5, dim=8, heads=2, depth=1)).eval()
    with pytest.raises(ValueError, match="not Seq2Seq"):
        Pool(pairs)


def test_any_model_with_the_interface_is_served():
    class Counting:
        """The next token is the last one and 1, modulo 5."""

        training, device, start = False, torch.device("cpu"), None
        likelihood = Categorical(5)

        def init_state(self, batch, capacity=None):
            return DecoderState(torch.zeros(batch, dtype=torch.long), (torch.zeros(batch, 1),))

        def __call__(self, tokens, state, *, mask=None, donate=False):
            count = tokens.shape[1] if mask is None else mask.sum(1)
            outputs = torch.nn.functional.one_hot((tokens + 1) % 5, 5).float()
            return outputs, state._replace(position=state.position + count)

    model = Counting()
    assert isinstance(model, Servable)
    assert isinstance(longspan.Decoder(longspan.DecoderConfig(vocab=5, dim=8, heads=2, depth=1)), Servable)
    crowd = pool(model)
    streams = [crowd.submit([i] * (i + 1), max_new_tokens=4, sampling=GREEDY)[0] for i in range(5)]
    crowd.run()
    assert [stream.tokens for stream in streams] == [[(i + j) % 5 for j in range(1, 5)] for i in range(5)]
