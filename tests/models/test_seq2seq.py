"""Encoder and decoder: one answer in parallel and step by step, padding that does not exist, an exact beam."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import longspan
from longspan import Decoder, DecoderConfig, Seq2Seq, Seq2SeqConfig, beam_search
from longspan.generation import beam_search as beams
from longspan.models.stacks import STACKS

SMALL = {"dim": 16, "depth": 2, "heads": 2, "feedforward": 24, "vocab": 7}
KINDS = (
    {},
    {"cross_attention": "linear"},
    {"attention": "softmax", "encoder_attention": "softmax; linear", "encoder_depth": 2, "positions": "rotary"},
    {"attention": "gated_deltanet", "source_vocab": 11, "encoder_depth": 1},
    {"prenorm": False, "tied": True},
    {"residual": "gru"},
    {"stack": "universal(steps=2)", "positions": "none"},
    {"stack": "act(steps=3)", "positions": "none"},
    {"stack": "reversible"},
    {"checkpointing": True},
)


def build(seed=0, **fields):
    torch.manual_seed(seed)
    model = Seq2Seq(Seq2SeqConfig(**SMALL | fields)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.4)
    return model


def pair(m=6, n=5, batch=2, seed=0):
    dice = torch.Generator().manual_seed(seed)
    return torch.randint(0, 7, (batch, m), generator=dice), torch.randint(0, 7, (batch, n), generator=dice)


def test_every_stack_is_tried():
    assert {fields.get("stack", "plain").split("(")[0] for fields in KINDS} == set(STACKS)


@pytest.mark.parametrize("fields", KINDS, ids=str)
class TestLaws:
    def test_steps_are_the_whole(self, fields):
        model, (source, target) = build(**fields), pair()
        whole = model(source, model.shift(target))
        for cuts in ((1,) * 5, (2, 3)):
            state, parts = model.init_state(source), []
            for part in model.shift(target).split(cuts, 1):
                outputs, state = model.step(part, state)
                parts.append(outputs)
            torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)

    def test_padding_does_not_exist(self, fields):
        model, (source, target) = build(**fields), pair()
        alone = model(source, model.shift(target))
        mask = F.pad(torch.ones(2, 6, dtype=torch.bool), (2, 1))
        padded = F.pad(source, (2, 1), value=3)
        torch.testing.assert_close(model(padded, model.shift(target), source_mask=mask), alone, rtol=1e-9, atol=1e-9)
        state = model.init_state(padded, source_mask=mask)
        torch.testing.assert_close(model.step(model.shift(target), state)[0], alone, rtol=1e-9, atol=1e-9)

    def test_the_target_sees_no_later_token_and_all_of_the_source(self, fields):
        model, (source, target) = build(**fields), pair()
        whole = model(source, model.shift(target))
        later = target.clone()
        later[:, 3] = (later[:, 3] + 1) % 7
        moved = (model(source, model.shift(later)) - whole).abs().amax((0, 2))
        assert (moved[:4] < 1e-12).all()
        assert moved[4] > 1e-9
        for j in range(6):
            other = source.clone()
            other[:, j] = (other[:, j] + 1) % 7
            assert ((model(other, model.shift(target)) - whole).abs().amax((0, 2)) > 1e-12).all()

    def test_every_parameter_has_a_gradient(self, fields):
        model, (source, target) = build(**fields).train(), pair()
        record = {}
        outputs = model(source, model.shift(target), record=record)
        (model.loss(outputs, target) + record.get("penalty", 0.0)).backward()
        assert not [name for name, p in model.named_parameters() if p.grad is None]

    def test_saved_and_loaded(self, fields, tmp_path):
        model, (source, target) = build(**fields).eval(), pair()
        longspan.save(model, tmp_path / "m")
        again = longspan.load(tmp_path / "m")
        assert torch.equal(again(source, again.shift(target)), model(source, model.shift(target)))


def test_reversible_gradients_reach_the_source():
    """Gradients of the encoder, which the reversible decoder reads as an argument, are those of the plain way."""
    grads = []
    model, (source, target) = build(stack="reversible", dropout=0.2).train(), pair()
    for way in range(2):
        torch.manual_seed(4)
        if way:  # with a state the blocks are walked through by autograd
            state = model.init_state(source)
            outputs, _ = model.step(model.shift(target), state)
        else:
            outputs = model(source, model.shift(target))
        grads.append(
            torch.autograd.grad(model.loss(outputs, target), list(model.encoder.parameters()), allow_unused=True)
        )
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_smoothing_by_hand():
    model = build(smoothing=0.3)
    outputs, target = torch.randn(1, 2, 7, dtype=torch.float64), torch.tensor([[2, 5]])
    logs = outputs.log_softmax(-1)
    expected = 0.7 * -(logs[0, 0, 2] + logs[0, 1, 5]) / 2 + 0.3 * -logs.mean()
    torch.testing.assert_close(model.loss(outputs, target).double(), expected, rtol=1e-6, atol=1e-6)
    real = torch.tensor([[True, False]])
    expected = 0.7 * -logs[0, 0, 2] + 0.3 * -logs[0, 0].mean()
    torch.testing.assert_close(model.loss(outputs, target, mask=real).double(), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def every(model, source, tokens, stop, penalty):
    """All sequences, scored by the parallel form, the best one first."""
    found = []
    for n in range(1, tokens + 1):
        for sequence in itertools.product(range(model.config.vocab), repeat=n):
            ended = sequence[-1] == stop
            if stop in sequence[:-1] or not (ended or n == tokens):
                continue
            target = torch.tensor([sequence])
            logs = model.likelihood.log_prob(model(source, model.shift(target)), target).sum()
            found.append((float(logs) / ((5 + n) / 6) ** penalty, sequence))
    return sorted(found, reverse=True)


def beam_by_lists(model, source, tokens, beams, stop, penalty):
    """Beam search over lists of one row: each hypothesis is read anew in every step."""
    begun = [((), 0.0)]

    def score(one):
        return one[1] / ((5 + len(one[0])) / 6) ** penalty

    for _ in range(tokens):
        found = []
        for sequence, total in begun:
            if stop in sequence:
                found.append((sequence, total))
                continue
            # The last token is only a place to predict at.
            outputs = model(source, model.shift(torch.tensor([[*sequence, 0]])))
            logs = model.likelihood.log_probs(outputs)[0, -1].tolist()
            found += [((*sequence, token), total + log) for token, log in enumerate(logs)]
        begun = sorted(found, key=score, reverse=True)[:beams]
    return [(sequence, score((sequence, total))) for sequence, total in begun]


class TestBeams:
    @pytest.mark.parametrize("penalty", [0.0, 1.0])
    @pytest.mark.parametrize("fields", [{}, {"cross_attention": "linear", "attention": "softmax"}], ids=str)
    def test_as_wide_as_the_tree_is_exhaustive(self, penalty, fields):
        model, (source, _) = build(**fields | {"vocab": 3}).eval(), pair(batch=1)
        source = source % 3
        # 3 tokens of 3, of which one ends it: at most 15 sequences at a time.
        best = every(model, source, 3, 1, penalty)
        found = beam_search(model, source=source, max_new_tokens=3, beams=27, best=5, length_penalty=penalty, stop=1)
        for k, (score, sequence) in enumerate(best[:5]):
            assert found.lengths[0, k] == len(sequence)
            assert tuple(found.tokens[0, k, : len(sequence)].tolist()) == sequence
            assert found.scores[0, k].item() == pytest.approx(score, rel=1e-9)

    @pytest.mark.parametrize("penalty", [0.0, 1.5])
    @pytest.mark.parametrize("seed", range(4))
    @torch.no_grad()
    def test_is_a_search_over_lists(self, seed, penalty):
        """A narrow beam in which ended hypotheses change places with those that go on."""
        model, (source, _) = build(seed=seed, vocab=4).eval(), pair(batch=2, seed=seed)
        source = source % 4
        found = beam_search(model, source=source, max_new_tokens=5, beams=3, best=3, length_penalty=penalty, stop=1)
        for row in range(2):
            for k, (sequence, score) in enumerate(beam_by_lists(model, source[row][None], 5, 3, 1, penalty)):
                assert found.lengths[row, k] == len(sequence)
                assert tuple(found.tokens[row, k, : len(sequence)].tolist()) == sequence
                assert (found.tokens[row, k, len(sequence) :] == 1).all()
                assert found.scores[row, k].item() == pytest.approx(score, rel=1e-9)

    @torch.no_grad()
    def test_states_are_selected_and_never_shared(self):
        """The states of a beam give what reading each of its sequences anew gives."""
        model, (source, _) = build(attention="gated_deltanet; softmax").eval(), pair(batch=3)
        found = beam_search(model, source=source, max_new_tokens=6, beams=4, best=4)
        for row in range(3):
            for k in range(4):
                target = found.tokens[row, k][None]
                logs = model.likelihood.log_prob(model(source[row][None], model.shift(target)), target).sum()
                assert found.scores[row, k].item() == pytest.approx(float(logs), rel=1e-9)
        assert (found.scores.diff(dim=1) <= 0).all()

    def test_one_beam_is_greedy(self):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**SMALL)).double().eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.4)
        prompt = torch.tensor([[3, 1, 4], [1, 5, 2]])
        greedy = longspan.generate(model, prompt, max_new_tokens=8, temperature=0.0)
        assert torch.equal(beam_search(model, prompt, max_new_tokens=8, beams=1).tokens[:, 0], greedy)

    def test_prompts_of_different_lengths(self):
        torch.manual_seed(0)
        model = Decoder(DecoderConfig(**SMALL, attention="softmax")).double().eval()
        for p in model.parameters():
            torch.nn.init.normal_(p, std=0.4)
        short, long = torch.tensor([[3, 1]]), torch.tensor([[1, 5, 2, 2]])
        mask = torch.tensor([[False, False, True, True], [True] * 4])
        both = beam_search(model, torch.cat([F.pad(short, (2, 0)), long]), mask=mask, max_new_tokens=4, beams=3, best=3)
        for row, prompt in enumerate((short, long)):
            alone = beam_search(model, prompt, max_new_tokens=4, beams=3, best=3)
            assert torch.equal(both.tokens[row], alone.tokens[0])
            torch.testing.assert_close(both.scores[row], alone.scores[0], rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"beams": 0}, "beams=0 must be at least 1"),
            ({"best": 5}, "best=5 .* beams=4"),
            ({"stop": 7}, "stop=7"),
            ({"length_penalty": -1.0}, "length_penalty=-1.0 must be"),
            ({"max_new_tokens": 0}, "tokens=0 must be at least 1"),
            ({"source": None}, "pass source="),
            ({"beams": 1.5}, "beams=1.5 must be a whole number"),
            ({"best": 1.5}, "best=1.5 must be a whole number"),
            ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be a whole number"),
        ],
    )
    def test_wrong_options(self, options, message):
        model, (source, _) = build(), pair()
        with pytest.raises(ValueError, match=message):
            beam_search(model, **{"source": source, "max_new_tokens": 3} | options)

    def test_wrong_models(self):
        decoder, (source, _) = Decoder(DecoderConfig(**SMALL)), pair()
        for options, message in (({"source": source}, "source="), ({}, "prompt=")):
            with pytest.raises(ValueError, match=message):
                beam_search(decoder, **options, max_new_tokens=3)
        with pytest.raises(ValueError, match="a Decoder or a Seq2Seq, not Linear"):
            beam_search(torch.nn.Linear(2, 2), max_new_tokens=3)


def test_what_cannot_be_built_or_called():
    with pytest.raises(ValueError, match="local .* cross attention"):
        build(cross_attention="local(window=3)")
    with pytest.raises(ValueError, match="more than depth=1"):
        Seq2SeqConfig(**SMALL | {"encoder_depth": 1}, encoder_attention="linear; softmax")
    model, (source, target) = build(), pair()
    with pytest.raises(ValueError, match="init_state"):
        model.step(target, None)
    with pytest.raises(ValueError, match="tokens .* 0 to 9"):
        model(source * 0 + torch.tensor([0, 9, 1, 1, 1, 1]), target)
    with pytest.raises(ValueError, match="context"):
        model.stack(torch.zeros(1, 3, 16, dtype=torch.float64))


@pytest.fixture(scope="module")
def eleven():
    torch.manual_seed(0)
    return Seq2Seq(Seq2SeqConfig(dim=16, depth=1, heads=2, feedforward=32, vocab=11)).eval()


SOURCE = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("penalty", [100.0, 300.0, 400.0, 4000.0, 1e38])
def test_huge_length_penalties_give_scores_and_the_order_by_logarithms(eleven, penalty):
    found = longspan.beam_search(
        eleven, source=SOURCE, max_new_tokens=30, length_penalty=penalty, stop=0, beams=4, best=4
    )
    assert not found.scores.isnan().any()
    assert (found.scores[:, :-1] >= found.scores[:, 1:]).all()
    # With such a penalty the length decides.
    assert (found.lengths[:, :-1] >= found.lengths[:, 1:]).all()


def test_the_order_does_not_change_where_penalties_leave_float64(eleven):
    """220 is within float64 for 30 tokens, and by logarithms the order is the same."""
    total = -torch.rand(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 40
    lengths = torch.randint(1, 31, (2, 50), generator=torch.Generator().manual_seed(1))
    total[0, 3] = -torch.inf
    plain = beams._scored(total, lengths, 30.0, 30).argsort(dim=1, descending=True, stable=True)
    assert torch.equal(plain, beams._best_first(total, lengths, 30.0, 30))
    assert not beams._overflows(30.0, 30)
    assert beams._overflows(30.0, 10**12)
    assert torch.equal(plain, beams._best_first(total, lengths, 30.0, 10**12))
    scores = beams._scored(total, lengths, 30.0, 30)
    torch.testing.assert_close(beams._scored(total, lengths, 30.0, 10**12), scores, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("max_new_tokens", "stop", "count"), [(1, None, 11), (1, 0, 11), (2, None, 121), (2, 3, 111)])
def test_best_is_at_most_the_number_of_sequences(eleven, max_new_tokens, stop, count):
    options = {"source": SOURCE, "max_new_tokens": max_new_tokens, "stop": stop, "beams": count + 1}
    found = longspan.beam_search(eleven, best=count, **options)
    assert found.scores.isfinite().all()
    assert len({tuple(row) for row in found.tokens[0].tolist()}) == count
    with pytest.raises(ValueError, match=f"best={count + 1}, but a model of 11 tokens has only {count} different"):
        longspan.beam_search(eleven, best=count + 1, **options)
