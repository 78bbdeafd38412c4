"""States that are carried along a text: in training, which resumes them to the last bit, and in evaluation."""

import itertools
import math
import shutil
from dataclasses import replace

import pytest
import torch

import longspan
from longspan import data
from longspan.data.streams import Stream
from longspan.models import checkpoint
from longspan.models.config import DecoderConfig
from longspan.models.decoder import Decoder
from longspan.train import fit, streaming_eval, tbptt
from longspan.train.evaluate import Share
from longspan.train.objectives import Streams
from support.runs import trained
from training_process import tiny, weights

pytestmark = pytest.mark.usefixtures("one_thread")

SPECS = (
    "transformer_xl(memory=9)",
    "linear; local(window=5)",
    "gated_deltanet",
    "compressive(memory=5, compressed=3, rate=2)",
    "infini(segment=6)",
)
XL = DecoderConfig(
    dim=8, depth=2, heads=2, feedforward=12, attention=SPECS[0], vocab=256, positions="none", dropout=0.1
)
LENGTH = 11


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Files of 500 to 900 bytes: documents that begin at windows and within them."""
    folder = tmp_path_factory.mktemp("text")
    for i, size in enumerate((770, 500, 640, 900, 811)):
        numbers = torch.randint(32, 120, (size,), generator=torch.Generator().manual_seed(i))
        (folder / f"{i}.txt").write_bytes(bytes(numbers.tolist()))
    return f"text:{folder}"


def run(folder, text, **fields):
    return tiny(folder, **{"data": text, "length": LENGTH, "stream": True, "batch": 3} | fields)


def job(text, **fields):
    """The fields of a run in another process."""
    stream = {"data": text, "length": LENGTH, "stream": True, "batch": 3}
    return stream | {"model": XL.to_dict() | {"dropout": 0.0}} | fields


class TestObjective:
    @pytest.mark.parametrize("spec", SPECS)
    def test_micro_batches_read_what_one_pass_over_each_document_does(self, tmp_path, text, spec):
        """Likelihoods in the stretches of 75 micro-batches, against each document of each row by itself."""
        torch.manual_seed(0)
        model = Decoder(replace(XL, attention=spec)).double().eval()
        dataset, settings = data.load(text, LENGTH), run(tmp_path, text)
        made, likelihoods, inputs, targets, borders = Streams(settings, dataset), [], [], [], []
        with torch.no_grad():
            for index in range(75):
                stretch = made.batch(index, 0, 1)
                found, wanted, _ = made.read(model, stretch, None)
                assert torch.equal(wanted, stretch.targets)
                likelihoods.append(found)
                targets.append(wanted)
                inputs.append(stretch.inputs)
                borders.append(stretch.inputs == model.start)
            found, inputs, targets, borders = (torch.cat(parts, 1) for parts in (likelihoods, inputs, targets, borders))
            assert borders[:, 0].all()
            assert borders.sum() > 4
            for row in range(3):
                begins = [*borders[row].nonzero()[:, 0].tolist(), inputs.shape[1]]
                for begin, end in itertools.pairwise(begins):
                    part = slice(row, row + 1), slice(begin, end)
                    whole, _ = model(inputs[part], model.init_state(1), targets=targets[part])
                    torch.testing.assert_close(found[part], whole, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("spec", SPECS)
    def test_no_gradient_goes_into_earlier_micro_batches(self, tmp_path, text, spec):
        torch.manual_seed(0)
        model = Decoder(replace(XL, attention=spec, dropout=0.0)).double()
        made = Streams(run(tmp_path, text), data.load(text, LENGTH))
        made.loss(model, made.batch(0, 0, 1))
        before = made.carry.state
        assert not any(leaf.requires_grad for leaf in torch.utils._pytree.tree_leaves(before))
        stretch = made.batch(1, 0, 1)
        found = torch.autograd.grad(made.loss(model, stretch).total, model.parameters(), allow_unused=True)
        state = longspan.states.detach(before)
        state = tbptt.renewed(state, model.init_state(3), stretch.fresh)
        outputs, _ = model(stretch.inputs, state, segments=stretch.segments)
        loss = -model.likelihood.log_prob(outputs, stretch.targets).mean()
        for one, other in zip(found, torch.autograd.grad(loss, model.parameters(), allow_unused=True), strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other)

    def test_the_state_of_a_rank_is_every_other_row_of_one_process(self, tmp_path, text):
        torch.manual_seed(0)
        model = Decoder(XL).eval()
        dataset = data.load(text, LENGTH)
        alone = Streams(run(tmp_path, text, batch=6), dataset)
        ranks = [Streams(run(tmp_path, text), dataset) for _ in "ab"]
        with torch.no_grad():
            for index in range(5):
                alone.read(model, alone.batch(index, 0, 1), None)
                for rank, one in enumerate(ranks):
                    one.read(model, one.batch(index, rank, 2), None)
        every = alone.get_extra_state()["leaves"]
        for rank, one in enumerate(ranks):
            other = tbptt.Carry(model, 3)
            other.restore(every, rank, 2)
            for mine, leaf in zip(one.get_extra_state()["leaves"], other.leaves(), strict=True):
                torch.testing.assert_close(mine, leaf)

    def test_states_of_other_rows_are_refused(self, tmp_path, text):
        model = Decoder(XL)
        other = tbptt.Carry(model, 4)
        other.end(other.begin(torch.ones(4) > 0))
        with pytest.raises(ValueError, match=r"are 5 tensors of 4 rows.* 5 of 3"):
            tbptt.Carry(model, 3).restore(other.leaves())

    def test_a_state_lasts_while_spans_grow(self, tmp_path, text):
        config = replace(XL, attention="adaptive_span(span=30, ramp=4)", dropout=0.0)
        torch.manual_seed(0)
        model = Decoder(config).double()
        made, dataset = [], data.load(text, LENGTH)
        for grows in (True, False):
            one = Streams(run(tmp_path, text), dataset)
            with torch.no_grad():
                for attention in model.stack.attentions():
                    attention.fraction.fill_(0.05 if grows else 0.9)
            one.loss(model, one.batch(0, 0, 1))
            made.append(one)
        # The state that was made with short spans has all that long ones read: the first layer's keys are alike.
        first, other = (one.carry.state.layers[0] for one in made)
        assert torch.equal(first.keys, other.keys)
        assert first.keys.shape[2] == 34
        made[0].loss(model, made[0].batch(1, 0, 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("whole")
    fit(XL, run(folder, text), progress=False)
    return folder


class TestTraining:
    def test_accumulated_micro_batches_are_one_row_after_the_other(self, tmp_path, text, monkeypatch):
        seen, read = [], Streams.batch
        monkeypatch.setattr(Streams, "batch", lambda self, *place: seen.append(place[0]) or read(self, *place))
        fit(XL, run(tmp_path, text, steps=2, accumulate=3), progress=False)
        assert seen[:6] == list(range(6))
        assert states(tmp_path)[0].tolist() == positions(data.load(text, LENGTH), 6, 3)

    def test_the_state_changes_what_is_learned(self, tmp_path, text, whole, monkeypatch):
        def forgets(self, state):
            self.state = tbptt.first(self.model, self.batch)

        monkeypatch.setattr(tbptt.Carry, "end", forgets)
        fit(XL, run(tmp_path, text), progress=False)
        assert weights(tmp_path) != weights(whole)

    def test_the_reported_bits_are_those_of_carried_states(self, tmp_path, text):
        result = fit(XL, run(tmp_path, text, steps=2, evaluate_examples=0), progress=False)
        dataset, model = data.load(text, LENGTH), longspan.load(tmp_path / "run")
        for split in ("validation", "test"):
            nats, tokens = streaming_eval.carried(model, dataset, split, 1).tolist()
            assert result.bits[split] == pytest.approx(nats / tokens / math.log(2))

    def test_other_devices_have_other_rows(self, tmp_path, text, whole):
        with pytest.raises(ValueError, match=r"with other settings: run.devices \(1 -> 2\)"):
            fit(XL, run(whole, text, devices=2), resume=True, progress=False)


class TestProcesses:
    @pytest.mark.slow
    def test_two_processes_read_the_rows_of_one_and_go_on_with_them(self, tmp_path, text):
        fields = job(text, steps=8, save_every=4)
        two, cut, one = tmp_path / "two", tmp_path / "cut", tmp_path / "one"
        trained(two, **fields | {"devices": 2})
        trained(one, **fields | {"batch": 6})
        assert torch.equal(states(two)[0], states(one)[0])
        for mine, other in zip(states(two), states(one), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-4)
        shutil.copytree(two, cut)
        shutil.rmtree(cut / "run" / "checkpoints" / "step-00000008")
        for pointer in ("best", "last"):
            (cut / "run" / "checkpoints" / pointer).write_text("step-00000004\n")
        trained(cut, resume=True, **fields | {"devices": 2})
        assert weights(cut) == weights(two)
        assert all(torch.equal(a, b) for a, b in zip(states(cut), states(two), strict=True))


class TestEvaluation:
    def test_states_carried_are_one_pass_over_each_document(self, text):
        torch.manual_seed(0)
        model, dataset = Decoder(XL).double(), data.load(text, LENGTH)
        stream = Stream(dataset, "train")
        for rows, examples in ((1, 0), (4, 0), (3, 50)):
            found = streaming_eval.carried(model, dataset, "train", rows, Share(examples))
            nats, count = 0.0, 0
            model.eval()
            for part in streaming_eval.stretches(stream.count, rows, examples or stream.count):
                begin, end = part.start * LENGTH, part.stop * LENGTH
                marks = [begin, *(d for d in dataset.documents["train"].tolist() if begin < d < end), end]
                for first, last in itertools.pairwise(marks):
                    tokens = dataset.splits["train"][None, first:last].long()
                    nats -= longspan.log_likelihood(model, tokens).item()
                    count += last - first
            model.train()
            assert found.tolist() == pytest.approx([nats, count])
        assert model.training

    def test_the_ranks_shares_make_the_whole(self, text):
        torch.manual_seed(0)
        model, dataset = Decoder(XL).double(), data.load(text, LENGTH)
        whole = streaming_eval.carried(model, dataset, "train", 7, Share(60))
        shares = sum(streaming_eval.carried(model, dataset, "train", 7, Share(60, rank, 3)) for rank in range(3))
        torch.testing.assert_close(shares, whole)

    @pytest.mark.parametrize("stride", [1, 4, LENGTH])
    def test_of_a_window_that_slides_each_token_counts_once(self, text, stride):
        torch.manual_seed(0)
        config = replace(XL, attention="softmax", positions="learned", length=LENGTH)
        model, dataset = Decoder(config).double().eval(), data.load(text, LENGTH)
        found = streaming_eval.sliding(model, dataset, "validation", stride, 2, 8)
        nats = 0.0
        for part in streaming_eval.stretches(Stream(dataset, "validation").count, 2, 8):
            tokens = dataset.splits["validation"][part.start * LENGTH : part.stop * LENGTH].long()
            for at in range(len(tokens)):
                # The first window in which the token stands.
                begin = max(0, -(-(at - LENGTH + 1) // stride) * stride)
                begin = min(begin, len(tokens) - LENGTH)
                window = tokens[None, begin : begin + LENGTH]
                outputs, _ = model(model.shift(window))
                nats -= model.likelihood.log_prob(outputs, window)[0, at - begin].item()
        assert found.tolist() == pytest.approx([nats, 8 * LENGTH])

    def test_refused(self, text):
        dataset = data.load(text, LENGTH)
        with pytest.raises(ValueError, match="stride=12 must be from 1 to 11"):
            streaming_eval.sliding(Decoder(XL), dataset, "test", 12, 1)
        with pytest.raises(ValueError, match="rows=9 must be from 1 to 7"):
            streaming_eval.sliding(Decoder(XL), dataset, "test", 1, 9, 7)
        with pytest.raises(ValueError, match="the state of softmax keeps every token"):
            streaming_eval.carried(Decoder(replace(XL, attention="softmax")), dataset, "test", 1)


def states(folder):
    kept = checkpoint.load_training(checkpoint.resolve(folder / "run", prefer="last"))
    return kept["objective"]["objective._extra_state"]["leaves"]


def positions(dataset, micro, rows):
    """Tokens that each row has read of its last document after ``count`` micro-batches; the start token counts."""
    stream = Stream(dataset, "train")
    found = []
    for row in range(rows):
        end = (row * stream.count // rows + micro) * LENGTH
        begins = [d for d in dataset.documents["train"].tolist() if d < end] + [row * stream.count // rows * LENGTH]
        found.append(end - max(begins))
    return found
