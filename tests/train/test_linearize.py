"""Linearization: the weights carried over, both stages, resumes, what is measured and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import longspan
from longspan import data
from longspan.cli.entry import main
from longspan.linearize import LinearizeConfig, linearize, measure, plan, student_of
from longspan.linearize.mapping import left_out
from longspan.linearize.stages import Layers, Logits, Vectors, errors, pairs
from longspan.linearize.tasks import Embeddings, task_of
from longspan.models import checkpoint
from longspan.train import TrainConfig
from support.runs import press_at

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = "".join(f"{i} and {i} are {2 * i}. " for i in range(400))
SIZES: dict[str, Any] = {"dim": 16, "depth": 3, "heads": 4, "feedforward": 24, "vocab": 256}


@torch.no_grad()
def teacher(attention="softmax(kv_heads=2)", positions="rotary(base=100.0)", **fields: Any) -> longspan.Decoder:
    """A small decoder with lively weights and biases."""
    torch.manual_seed(0)
    fields = SIZES | {"attention": attention, "positions": positions} | fields
    made = longspan.Decoder(longspan.DecoderConfig(**fields))
    for p in made.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return made.eval()


@torch.no_grad()
def encoder(**fields: Any) -> longspan.Encoder:
    """A small encoder of bytes as BERT has it, with lively weights."""
    torch.manual_seed(0)
    usual: dict[str, Any] = {"attention": "softmax", "pool": "mean", "positions": "learned", "length": 32}
    usual |= {"prenorm": False}
    made = longspan.Encoder(longspan.EncoderConfig(**SIZES | usual | {"embedding_norm": True} | fields))
    for p in made.parameters():
        p.add_(0.1 * torch.randn_like(p))
    return made.eval()


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text(TEXT)
    return data.load(f"text:{path}", 16)


# What ModernBERT has: a norm in place of the first block's, windows and rotary positions, and gates.
MODERN: dict[str, Any] = {"attention": "softmax(rotary=50.0); local(window=3, rotary=7.0)", "positions": "none"}
MODERN |= {"prenorm": True, "activation": "geglu"}


def run_of(folder, **fields):
    usual = {"steps": 8, "batch": 2, "evaluate_every": 3, "save_every": 2, "learning_rate": 0.01, "logger": "csv"}
    return TrainConfig(out=str(folder / "run"), evaluate_examples=8, **(usual | fields))


def attentions(one, chosen):
    return student_of(one, chosen).stack.attentions()


class TestCarriedOver:
    @pytest.mark.parametrize("kv_heads", [0, 1, 2])
    def test_a_window_of_all_tokens_is_the_teacher(self, kv_heads):
        """The same function with other layers shows that groups, rotary positions and biases are carried over."""
        one = teacher(f"softmax(kv_heads={kv_heads})" if kv_heads else "softmax")
        tokens = torch.randint(256, (2, 11), generator=torch.Generator().manual_seed(1))
        for spec in ("hedgehog(window=20)", "local(window=20)", "hedgehog(window=20); softmax"):
            student = student_of(one, plan(one, spec))
            torch.testing.assert_close(student(tokens)[0], one(tokens)[0], rtol=1e-4, atol=1e-4)

    def test_norms_and_wide_heads_are_carried_over(self):
        one = teacher("softmax(kv_heads=2, head_dim=6, qk_norm=1e-06)")
        tokens = torch.randint(256, (2, 11), generator=torch.Generator().manual_seed(1))
        student = student_of(one, plan(one, "hedgehog(window=20)"))
        torch.testing.assert_close(student(tokens)[0], one(tokens)[0], rtol=1e-4, atol=1e-4)
        specs = plan(one, "gated_deltanet").specs
        assert specs == ("gated_deltanet(expand_k=1.5, expand_v=1.5)",) * 3

    def test_options_that_a_spec_leaves_out_are_the_teachers(self):
        one = teacher()
        chosen = plan(one, "linear; gated_deltanet; softmax")
        lost = [left_out(cast(Any, a), b) for a, b in zip(one.stack.attentions(), attentions(one, chosen), strict=True)]
        assert lost[0] == ()
        assert lost[1] == ("query bias", "key bias", "value bias", "out bias", "rotary positions")
        assert chosen.specs == (
            "linear(rotary=100.0)",
            "gated_deltanet(expand_v=1.0)",
            "softmax(kv_heads=2, rotary=100.0)",
        )
        assert chosen.converted == (0, 1)
        assert chosen.config.positions == "none"
        assert plan(one, "linear(rotary=7.0)", kept=(1,)).config.attention == (
            "linear(rotary=7.0); softmax(kv_heads=2, rotary=100.0)"
        )
        assert plan(teacher("softmax", "learned"), "linear").config.positions == "learned"

    def test_layers_with_other_attentions_stay(self):
        one = encoder(**MODERN)
        chosen = plan(one, "hedgehog; linear(rotary=1.0)")
        assert chosen.specs == ("hedgehog(rotary=50.0)", "local(window=3, rotary=7.0)", "linear(rotary=1.0)")
        assert chosen.converted == (0, 2)
        own, given = student_of(one, chosen).state_dict(), one.state_dict()
        assert all(torch.equal(own[name], given[name]) for name in given if "blocks.1." in name)
        with pytest.raises(ValueError, match="layer 1 cannot be kept; the softmax layers are 0, 2"):
            plan(one, "linear", kept=[1])

    def test_the_rest_is_copied_and_drawn_by_the_seed(self):
        one = teacher()
        torch.manual_seed(3)
        student = student_of(one, plan(one, "gated_deltanet; softmax"))
        own, given = student.state_dict(), one.state_dict()
        kept = [name for name in given if ".attention." not in name or "blocks.1." in name]
        assert all(torch.equal(own[name], given[name]) for name in kept)
        keys = given["stack.blocks.0.attention.key.weight"].unflatten(0, (2, 1, 4)).expand(2, 2, 4, 16).flatten(0, 2)
        assert torch.equal(own["stack.blocks.0.attention.key.weight"], keys)

    @pytest.mark.parametrize(
        ("attention", "given", "said"),
        [
            ("softmax", {}, "keeps all layers of the teacher"),
            ("lineer", {}, "unknown name 'lineer' .did you mean 'linear'"),
            ("linear; linear; linear; linear", {}, "4 specs, more than the 3 softmax layers"),
            ("average", {}, "layer 0: average has no query projection"),
            ("gla(expand_k=0.5)", {}, "layer 0: the query projection of gla is 8 x 16, and the teacher's"),
            ("nystrom", {}, "nystrom has no causal form"),
            ("linear", {"attention": "gla", "positions": "none"}, "no softmax layers that can become others: .*'gla'"),
            (
                "linear; gla",
                {"attention": "gla; softmax", "positions": "none"},
                "2 specs, more than the 1 softmax layers",
            ),
            ("linear", {"stack": "universal(steps=2)"}, "stack='universal.steps=2.'"),
        ],
    )
    def test_what_cannot_be_mapped_is_refused(self, attention, given, said):
        with pytest.raises(ValueError, match=said):
            plan(teacher(**{"attention": "softmax", **given}), attention)


def test_each_layer_is_compared_on_the_teachers_inputs():
    one, tokens = teacher(), torch.arange(22).view(2, 11)
    found, blocks = pairs(one, tokens, (0, 2)), cast(list[Any], list(one.stack.blocks))
    x, _ = one.embedding(tokens)
    for layer, block in enumerate(blocks):
        read = block.norm1(x)
        if layer != 1:
            pair = found[layer // 2]
            torch.testing.assert_close(pair.inputs, read)
            torch.testing.assert_close(pair.outputs, block.attention(read)[0])
        x = block(x)[0]


def test_losses_are_those_of_their_definitions(tmp_path, text):
    one = teacher()
    chosen = plan(one, "linear; softmax")
    student, batch = student_of(one, chosen), text.take("train", torch.arange(3))
    first = Layers(run_of(tmp_path), task_of(one, text), chosen.converted)
    expected = []
    for layer, pair in zip((0, 2), pairs(one, one.shift(batch), (0, 2)), strict=True):
        y = student.stack.attentions()[layer](pair.inputs)[0]
        expected.append(((y - pair.outputs).square().sum() / pair.outputs.square().sum()).item())
    loss = first.loss(student, batch)
    assert loss.total.item() == pytest.approx(sum(expected))
    assert float(loss.parts["loss"]) == pytest.approx(sum(expected) / 2)
    inputs = one.shift(batch)
    wanted, found = (model(inputs)[0].double().log_softmax(-1) for model in (one, student))
    kl = torch.nn.functional.kl_div(found, wanted, log_target=True, reduction="sum") / batch.numel()
    nats = torch.nn.functional.cross_entropy(found.flatten(0, 1), batch.flatten())
    for share in (0.0, 0.25, 1.0):
        total = Logits(run_of(tmp_path), task_of(one, text), share).loss(student, batch).total
        assert total.item() == pytest.approx(((1 - share) * kl + share * nats).item(), rel=1e-4)
    same = Logits(run_of(tmp_path), task_of(one, text), 0.0).loss(one, batch).total
    assert same.item() == pytest.approx(0, abs=1e-6)


def test_the_first_stage_lowers_the_errors(tmp_path, text):
    one = teacher()
    chosen = plan(one, "hedgehog; gated_deltanet")
    student, batch = student_of(one, chosen), text.take("train", torch.arange(4))
    objective = Layers(run_of(tmp_path), task_of(one, text), chosen.converted)
    optimizer = torch.optim.Adam(student.stack.parameters(), lr=3e-3)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = objective.loss(student, batch)
        loss.total.backward()
        optimizer.step()
        losses.append(loss.total.item())
    assert losses[-1] < 0.5 * losses[0]


CONFIG = LinearizeConfig(attention="hedgehog; gated_deltanet", keep=1, layer_steps=5)
# Kind -> teacher, config and the name of the second stage.
KINDS: dict[str, tuple[Any, LinearizeConfig, str]] = {
    "decoder": (teacher, CONFIG, "logits"),
    "encoder": (encoder, replace(CONFIG, attention="hedgehog(window=3); linear", positions=40), "embeddings"),
    "windows": (lambda: encoder(**MODERN), replace(CONFIG, attention="hedgehog; linear"), "embeddings"),
}


def linearized(kind, text, folder, **options):
    make, config, _ = KINDS[kind]
    return linearize(make(), text, config, run_of(folder), progress=False, **options)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory, text):
    """For each kind a linearization from beginning to end: its folder and its result."""
    pytest.importorskip("lightning")
    folder = tmp_path_factory.mktemp("whole")
    return {kind: (folder / kind, linearized(kind, text, folder / kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def whole(wholes):
    return wholes["decoder"]


# The micro-batch at which a signal comes: in the first stage, and in the second one, which is longer.
@pytest.mark.parametrize("at", [3, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, text, wholes, kind, at, monkeypatch):
    folder, expected = wholes[kind]
    with monkeypatch.context() as patch:
        press_at(patch, at)
        with pytest.raises(KeyboardInterrupt, match="interrupted at step"):
            linearized(kind, text, tmp_path)
    assert not (tmp_path / "run/model").exists()
    found = linearized(kind, text, tmp_path, resume=True)
    for stage in ("layers", KINDS[kind][2]):
        assert checkpoint.read(tmp_path / "run" / stage)[2].keys() == checkpoint.read(folder / "run" / stage)[2].keys()
    mine, theirs = (checkpoint.read(place / "run/model")[2] for place in (tmp_path, folder))
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    assert replace(found, folder=expected.folder) == expected


def test_a_finished_one_is_read_again(tmp_path, text, whole):
    folder, expected = whole
    again = linearize(teacher(), text, CONFIG, run_of(folder), resume=True, progress=False)
    assert again == expected


def test_the_result(whole, text):
    folder, found = whole
    one, student = teacher(), longspan.load(folder / "run/model")
    (kept,) = (layer["layer"] for layer in found.layers if layer["kept"])
    assert student.config.attention == found.attention
    specs = [a.spec for a in student.stack.attentions()]
    assert specs[kept] == "softmax(kv_heads=2, rotary=100.0)"
    assert sum(spec == specs[kept] for spec in specs) == 1
    # The layer whose return to softmax lowers the loss most.
    assert kept == max(found.layers, key=lambda layer: layer["gain"])["layer"]
    measured = [(longspan.load(folder / "run/logits"), "logits"), (one, "teacher"), (student, found.best)]
    for model, name in measured:
        assert found.losses[name] == pytest.approx(measure.loss_of(model, task_of(one, text), "test", 8))
    report = json.loads((folder / "run/report.json").read_text())
    assert report["losses"] == found.losses
    assert "| logits |" in (folder / "run/report.md").read_text()
    first, last = map(json.loads, (folder / "run/layers/learned.jsonl").read_text().splitlines())
    assert (first["step"], last["step"]) == (3, 5)
    assert [layer for layer, _ in last["errors"]] == [0, 1, 2]
    last, task = longspan.load(folder / "run/logits"), task_of(one, text)
    objective, batch = Logits(run_of(folder), task, 0.0), text.take("test", torch.arange(20))
    before, after = (
        objective.loss(model, batch).total.item() for model in (longspan.load(folder / "run/layers"), last)
    )
    assert after < before


@pytest.mark.parametrize(("rate", "best"), [(0.003, "logits"), (3.0, "layers")])
def test_the_better_stage_is_the_result(tmp_path, text, rate, best, capsys):
    one, job = teacher(), LinearizeConfig(attention="linear", layer_steps=4, layer_learning_rate=0.003)
    found = linearize(one, text, job, run_of(tmp_path, learning_rate=rate, evaluate_every=8))
    weights = (checkpoint.read(tmp_path / "run" / place)[2] for place in ("model", best))
    mine, theirs = weights
    assert found.best == best
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    report = (tmp_path / "run/report.md").read_text()
    for said in (capsys.readouterr().err, report):
        assert ("model/ is the student" in said) == (best == "layers")
    start, end = found.losses["carried over"], found.losses[best]
    gap = start - found.losses["teacher"]
    assert found.closed == (pytest.approx((start - end) / gap) if gap > 0 else None)


def test_costs_and_gains_are_losses_of_mixed_models(text):
    one = teacher()
    chosen, task = plan(one, "linear"), task_of(one, text)
    student = student_of(one, chosen)
    found = measure.measure(student, task, chosen.converted, 2, 8)

    def bits(converted):
        config: Any = plan(one, "linear", [i for i in range(3) if i not in converted]).config
        mixed = longspan.Decoder(config)
        own = one.state_dict()
        for i in converted:
            place = f"stack.blocks.{i}.attention."
            own = {name: value for name, value in own.items() if not name.startswith(place)}
            own |= {name: value for name, value in student.state_dict().items() if name.startswith(place)}
        mixed.load_state_dict(own)
        return measure.loss_of(mixed, task, "validation", 8)

    teachers, students = measure.loss_of(one, task, "validation", 8), bits([0, 1, 2])
    for i, layer in enumerate(found.layers):
        assert layer["cost"] == pytest.approx(bits([i]) - teachers)
        assert layer["gain"] == pytest.approx(students - bits([j for j in range(3) if j != i]))
    first, second = found.kept
    left = [j for j in range(3) if j != first]
    assert first == min(range(3), key=lambda i: bits([j for j in range(3) if j != i]))
    assert second == min(left, key=lambda i: bits([j for j in left if j != i]))
    assert found.layers[0]["error"] == errors(student, task, [0], "validation", 8)[0]


class TestEncoders:
    @pytest.mark.parametrize("fields", [{}, MODERN])
    def test_a_window_of_all_tokens_is_the_teacher(self, fields):
        one = encoder(**fields)
        tokens, mask = torch.randint(256, (2, 11), generator=torch.Generator().manual_seed(1)), torch.ones(2, 11) > 0
        mask[1, 7:] = False
        for spec in ("hedgehog(window=20)", "local(window=41)", "hedgehog(window=20); softmax"):
            student = student_of(one, plan(one, spec))
            torch.testing.assert_close(student(tokens, mask=mask), one(tokens, mask=mask), rtol=1e-4, atol=1e-4)

    def test_positions_beyond_the_table_repeat_it_without_the_first(self):
        one = encoder(length=5)
        table: Any = student_of(one, plan(one, "linear", positions=14)).embedding.table.weight
        at = [0, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1]
        assert torch.equal(table, one.embedding.table.weight[at])

    def test_texts_have_special_tokens_and_lengths_that_are_halved(self, text):
        task = task_of(encoder(length=64), replace(text, length=64))
        assert isinstance(task, Embeddings)
        task = replace(task, before=(7,), after=(8, 9))
        batch = torch.arange(128).view(2, 64)
        assert task.sizes == [64, 32, 16]
        for number, size in enumerate([64, 32, 16, 64]):
            found = task.framed(batch, number)
            expected = [[7, *row[: size - 3], 8, 9] for row in batch.view(-1, size).tolist()]
            assert found.tolist() == expected

    def test_losses_are_those_of_their_definitions(self, tmp_path, text):
        one = encoder()
        student, task = student_of(one, plan(one, "linear")), task_of(one, text)
        batch = text.take("train", torch.arange(3))
        found, wanted = (model.features(batch) for model in (student, one))
        near = torch.nn.functional.cosine_similarity(student(batch), one(batch)).mean().item()
        error = ((found - wanted).square().sum() / wanted.square().sum()).item()
        for share in (0.0, 0.25, 1.0):
            total = Vectors(run_of(tmp_path), task, share).loss(student, batch).total.item()
            assert total == pytest.approx((1 - share) * (1 - near) + share * error, rel=1e-4)
        rows = text.take("test", torch.arange(text.count("test")))
        near = torch.nn.functional.cosine_similarity(student(rows), one(rows)).mean().item()
        assert measure.loss_of(student, task, "test", 0) == pytest.approx(1 - near, rel=1e-4)
        assert measure.loss_of(one, task, "test", 0) == pytest.approx(0, abs=1e-6)

    def test_the_result(self, wholes):
        folder, found = wholes["encoder"]
        student = longspan.load(folder / "run/model")
        assert student.config.length == 40
        assert set(found.losses) == {"teacher", "carried over", "layers", "kept", "embeddings"}
        assert found.losses["layers"] < found.losses["carried over"]
        # Embeddings of tokens and positions stay.
        name = "embedding.tokens.weight"
        assert torch.equal(student.state_dict()[name], encoder().state_dict()[name])
        assert "| embeddings |" in (folder / "run/report.md").read_text()
        assert student.embed(["a text", "another one"]).shape == (2, 16)


@pytest.mark.parametrize(
    ("make", "fields", "config", "said"),
    [
        (encoder, {"pool": "none"}, {}, "the teacher has pool='none'"),
        (encoder, {"vocab": 0}, {}, "the teacher has vocab=0, but"),
        (encoder, {"attention": "linear"}, {}, "the teacher has no softmax layers"),
        (encoder, {}, {"text": 0.5}, "text=0.5 is a share of the loss of a decoder"),
        (encoder, {}, {"tokens": 2.0}, "tokens=2.0 must be in"),
        (encoder, {}, {"positions": 8}, "positions=8 requires an encoder .*This Encoder has"),
        (encoder, {"positions": "sinusoidal"}, {"positions": 64}, "has positions='sinusoidal'"),
        (encoder, {}, {"attention": "gated_deltanet"}, "gated_deltanet has no bidirectional form"),
        (teacher, {"vocab": 17}, {}, "the teacher has vocab=17"),
        (teacher, {}, {"positions": 64}, "positions=64 requires an encoder .*This Decoder has"),
        (teacher, {}, {"keep": 3}, "keep=3 must be less than the 3 layers"),
        (teacher, {}, {"keep": 1, "layer_steps": 0}, "which layer_steps=0 leaves out"),
        (teacher, {}, {"keep_layers": (3,)}, "layer 3 cannot be kept; the softmax layers are 0, 1, 2"),
        (teacher, {}, {"text": 1.5}, "text=1.5 must be in"),
        (teacher, {}, {"layer_steps": -1}, "layer_steps=-1 must not be negative"),
    ],
)
def test_what_is_refused(tmp_path, text, make, fields, config, said):
    given = {"attention": "hedgehog", **config}
    with pytest.raises(ValueError, match=said):
        linearize(make(**fields), text, LinearizeConfig(**given), run_of(tmp_path), progress=False)
    assert not (tmp_path / "run").exists()


def test_teachers_and_folders_that_are_refused(tmp_path, text, whole):
    folder, _ = whole
    given: dict[str, Any] = {"progress": False}
    with pytest.raises(ValueError, match=r"must be a longspan\.Decoder or longspan\.Encoder, not Linear"):
        linearize(torch.nn.Linear(1, 1), text, CONFIG, run_of(tmp_path), **given)  # pyright: ignore
    with pytest.raises(ValueError, match="holds a linearization; resume it with"):
        linearize(teacher(), text, CONFIG, run_of(folder), **given)
    with pytest.raises(ValueError, match="with other settings: attention .hedgehog; gated_deltanet -> linear"):
        linearize(teacher(), text, replace(CONFIG, attention="linear"), run_of(folder), resume=True, **given)
    with pytest.raises(ValueError, match="with other settings: teacher_sha256"):
        linearize(teacher(norm="rms"), text, CONFIG, run_of(folder), resume=True, **given)
    with pytest.raises(ValueError, match="a linearization does not support ema=0.9"):
        linearize(teacher(), text, CONFIG, run_of(tmp_path, ema=0.9), **given)
    with pytest.raises(ValueError, match="seconds=1.0 would end a stage"):
        linearize(teacher(), text, CONFIG, run_of(tmp_path, seconds=1.0), **given)
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    with pytest.raises(ValueError, match="is not empty and holds no linearization"):
        linearize(teacher(), text, CONFIG, replace(run_of(tmp_path), out=str(tmp_path / "other")), **given)


def test_the_command(tmp_path, capsys):
    path, out = tmp_path / "book.txt", str(tmp_path / "run")
    path.write_text(TEXT)
    longspan.save(teacher(), tmp_path / "base", extra={"run": {"data": f"text:{path}", "length": 16}})
    command = ["linearize", str(tmp_path / "base"), "--data", f"text:{path}", "--keep-layers", "1", "--out", out]
    command += ["--layer-steps", "2", "--steps", "2", "--batch", "2", "--evaluate-examples", "4"]
    assert main([*command, "--attention", "linear"]) == 0
    said = capsys.readouterr()
    assert "| weights carried over |" in said.out
    assert said.out.endswith(f"{Path(out) / 'model'}: linear(rotary=100.0); softmax(kv_heads=2, rotary=100.0)\n")
    assert "errors of layers 0: " in said.err
    assert main(["generate", f"{out}/model", "--tokens", "3", "--prompt", "1 and"]) == 0
    capsys.readouterr()
    for words, wrong in (
        (command, "holds a linearization; resume it with the same command and --resume"),
        (
            [*command[:3], f"text:{path}", "--attention", "average", "--out", f"{out}2"],
            "average has no query projection",
        ),
        ([*command[:3], f"text:{path}", "--keep-layers", "a", "--out", f"{out}2"], "--keep-layers='a' must be layers"),
        (["linearize", "mnist", "--data", f"text:{path}", "--out", f"{out}2"], "the teacher has no softmax layers"),
        (["linearize", str(tmp_path), "--data", f"text:{path}"], "is neither a checkpoint"),
    ):
        assert main(words) == 2
        assert wrong in capsys.readouterr().err
