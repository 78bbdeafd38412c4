"""Fine-tuning: rows, losses and steps beside transformers and peft, resumes, and what it writes."""

import csv
import io
import json
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import longspan
from longspan import adapt, finetune
from longspan.cli.entry import main
from longspan.finetune import FinetuneConfig, Tuned, completions, tuned
from longspan.models import checkpoint
from longspan.models.sampling import Sampling
from longspan.serving import Pool
from longspan.serving.requests import RequestError
from longspan.serving.text import Bytes
from longspan.train import TrainConfig
from support.runs import press_at
from training_process import weights

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = longspan.DecoderConfig(
    dim=16, depth=2, heads=2, feedforward=32, vocab=256, attention="gla; softmax", positions="none"
)
LINES = [{"prompt": f"{i} and {i}", "completion": f" are {2 * i}."} for i in range(14)] + [{"text": "one and one"}]


class Chats:
    """A chat template that leaves out what earlier answers thought."""

    ends = ()

    def render(self, messages, *, add_generation_prompt=False, tools=()):
        last = max(i for i, one in enumerate(messages) if one["role"] == "user")
        found = "".join(f"[{tool}]" for tool in tools)
        for i, one in enumerate(messages):
            if one["role"] == "system":
                raise RequestError("the chat template refuses these messages: no system", "messages")
            words = one["content"]
            found += f"<{one['role'][0]}>{words if i > last else words.rpartition('|')[2]}</>"
        return found + "<a>" * add_generation_prompt


class Codec(Bytes):
    """Bytes with an end and a template; ``vocab`` makes them fit a small model."""

    ends = (2,)
    template = Chats()

    def __init__(self, vocab=256):
        self.vocab = vocab

    def encode_more(self, text):
        return [byte % self.vocab for byte in text.encode()]

    def encode(self, text):
        return [1, *self.encode_more(text)]


def written(folder, lines, name="data.jsonl"):
    path = folder / name
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def loaded(path, codec=None, **options):
    """Data for a model without a start token; the defaults of the command otherwise."""
    codec = codec or Codec()
    usual = {"vocab": codec.vocab, "start": None, "length": 64, "held": 0.1, "every": False, "packed": True}
    return completions.load(path, codec, **(usual | options))


def run_of(folder, data, **fields):
    usual = {"steps": 7, "batch": 2, "evaluate_every": 3, "save_every": 3, "learning_rate": 0.01}
    return TrainConfig(data=data.name, length=data.length, out=str(folder / "run"), **(usual | fields))


def decoder(folder):
    """A checkpoint of a small decoder with lively weights, and its path."""
    torch.manual_seed(0)
    model = longspan.Decoder(TINY)
    longspan.save(model, folder / "base", extra={"run": {"data": "text", "length": 64}})
    return longspan.load(folder / "base"), str(folder / "base")


def texts(data, split="train"):
    """The sequences of a split as text, with a mark for each place without a loss: its inputs, and its targets."""
    batch = data.take(split, torch.arange(data.count(split)))
    found = []
    for inputs, targets, segments in zip(batch.inputs, batch.targets, batch.segments, strict=True):
        for number in segments.unique_consecutive().tolist():
            if number < data.length:  # padding
                here = segments == number
                inside = bytes(inputs[here].tolist()).decode()
                found.append((inside, "".join("_" if t < 0 else chr(t) for t in targets[here].tolist())))
    return found


class TestRows:
    def test_completions_have_a_loss_and_prompts_do_not(self, tmp_path):
        path = written(tmp_path, [{"prompt": "ab", "completion": "cd"}, "", {"text": "efg"}])
        pair, plain = ("\x01abcd", "__cd\x02"), ("\x01efg", "efg\x02")
        assert texts(loaded(path, held=0)) == [pair, plain]
        assert texts(loaded(path, held=0, every=True)) == [("\x01abcd", "abcd\x02"), plain]
        started = loaded(path, Bytes(), start=7, held=0)
        assert texts(started) == [("\x07abc", "__cd"), ("\x07ef", "efg")]

    def test_turns_of_the_assistant_follow_their_prompts(self, tmp_path):
        def said(role, content):
            return {"role": role, "content": content}

        simple = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]
        thought = [said("user", "a"), said("assistant", "x|b"), said("user", "c"), said("assistant", "y|d")]
        path = written(tmp_path, [{"messages": simple, "tools": ["t"]}, {"messages": thought}])
        whole = "[t]<u>a</><a>b</><u>c</><a>d</>"
        first, second = "<u>a</><a>x|b</>", "<u>a</><a>b</><u>c</><a>y|d</>"
        assert texts(loaded(path, held=0)) == [
            (whole[:-1], "_" * 12 + "b</>" + "_" * 10 + "d</>"),
            (first[:-1], "_" * 9 + "x|b</>"),
            (second[:-1], "_" * 23 + "y|d</>"),
        ]
        assert texts(loaded(path, held=0, every=True))[0] == (whole[:-1], whole[1:])

    def test_rows_have_whole_sequences_and_only_longer_ones_are_cut(self, tmp_path):
        (tmp_path / "long.txt").write_text("x" * 150)
        written(tmp_path, [{"prompt": "p" * n, "completion": "c"} for n in (30, 40, 20, 50, 70)])
        data = loaded(str(tmp_path), held=0)
        assert (data.documents, data.cut) == (6, 2)
        sizes = sorted(len(inputs) for inputs, _ in texts(data))
        assert sizes == [8, 22, 23, 32, 42, 52, 64, 64]  # 64 of a prompt of 70 have no loss
        rows = data.splits["train"].inputs.ends.diff()
        assert int(rows.max()) <= 64
        assert len(rows) == 6
        split = loaded(str(tmp_path), held=0.3)
        assert len(texts(split, "validation")) == 2
        assert sorted(texts(split) + texts(split, "validation")) == sorted(texts(data))

    @pytest.mark.parametrize(
        ("line", "said"),
        [
            ('{"prompt": "a", "answer": "b"}', "line 2 of .* must be an object with .*'prompt', 'answer'"),
            ("{", "line 2 of .* is not JSON"),
            ("[]", r"line 2 of .* must be an object with .*not \[\]"),
            ({"prompt": "a", "completion": 3}, "line 2 of .*: its completion must be a text, not 3"),
            ({"prompt": "a", "completion": "\ud800"}, "line 2 of .* cannot be encoded"),
            ({"messages": []}, "line 2 of .* has no message of the assistant"),
            ({"messages": ["a"]}, "line 2 of .*: its messages must be a list of objects"),
            (
                {"messages": [{"role": "system", "content": ""}, {"role": "user", "content": ""}]},
                "line 2 of .* has no message of the assistant",
            ),
            (
                {"messages": [{"role": r, "content": ""} for r in ("system", "user", "assistant")]},
                "line 2 of .*: the chat template refuses these messages: no system",
            ),
            ("", "1 sequence, and validation needs one too"),
        ],
    )
    def test_a_wrong_line_is_one_error(self, tmp_path, line, said):
        with pytest.raises(ValueError, match=said):
            loaded(written(tmp_path, [{"text": "a"}, line]))

    def test_what_the_model_cannot_encode(self, tmp_path):
        path = written(tmp_path, [{"messages": [{"role": "user", "content": "a"}]}])
        with pytest.raises(ValueError, match="need a chat template, and the model has none"):
            loaded(path, Bytes())
        with pytest.raises(ValueError, match="line 1 of .* has no token with a loss: its text or completion is empty"):
            loaded(written(tmp_path, [{"prompt": "a", "completion": ""}]), Bytes())
        with pytest.raises(ValueError, match="no data at"):
            loaded(str(tmp_path / "none"))


def trained(folder, method, data, resume=False, **fields):
    """Fine-tune the small decoder -> the result."""
    model, source = decoder(folder)
    config = FinetuneConfig(source=source, method=method)
    run = run_of(folder, data, **({"learning_rate": 1.0} if method == "state" else {}) | fields)
    return finetune.finetune(model, data, config, run, merge=method == "lora", resume=resume, progress=False)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows for the small decoder."""
    path = written(tmp_path_factory.mktemp("rows"), LINES)
    return loaded(path, Bytes(), start=TINY.vocab)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rows):
    """Fine-tunings of the small decoder from beginning to end, by method."""
    pytest.importorskip("peft")
    folders = {method: tmp_path_factory.mktemp(method) for method in finetune.METHODS}
    for method, folder in folders.items():
        trained(folder, method, rows, accumulate=2)
    return folders


@pytest.mark.parametrize("method", finetune.METHODS)
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, rows, whole, method, monkeypatch):
    with monkeypatch.context() as patch:
        press_at(patch, 9)
        with pytest.raises(KeyboardInterrupt, match="interrupted at step 5; step-00000005 is saved"):
            trained(tmp_path, method, rows, accumulate=2)
    assert trained(tmp_path, method, rows, accumulate=2, resume=True).steps == 7
    assert weights(tmp_path) == weights(whole[method])


def test_packed_rows_do_not_leak(tmp_path, rows):
    model, source = decoder(tmp_path)
    batch = rows.take("train", torch.arange(rows.count("train")))
    alone = loaded(rows.name.partition(":")[2], Bytes(), start=TINY.vocab, packed=False)
    apart = alone.take("train", torch.arange(alone.count("train")))
    assert len(batch.inputs) < len(apart.inputs)
    for method in ("full", "state"):
        made = Tuned(model, FinetuneConfig(source=source, method=method))
        with torch.no_grad():
            assert float(made.nats(batch)) == pytest.approx(float(made.nats(apart)), rel=1e-5)


def test_what_is_written_is_the_tuned_model(tmp_path, whole):
    from peft import PeftModel

    from longspan.compat.transformers import LongspanForCausalLM

    tokens = torch.arange(40).view(2, 20) * 5 % 256
    base, source = decoder(tmp_path)
    before = base(base.shift(tokens))[0]
    adapted = PeftModel.from_pretrained(LongspanForCausalLM.from_longspan(source), whole["lora"] / "run/adapter")
    merged = longspan.load(whole["lora"] / "run/model")
    expected = adapted.get_base_model().decoder(base.shift(tokens))[0]
    assert torch.allclose(merged(merged.shift(tokens))[0], expected, atol=1e-5)
    assert not torch.allclose(before, expected, atol=1e-2)
    full = longspan.load(whole["full"] / "run/model")
    best = checkpoint.read(whole["full"] / "run")[2]
    assert all(torch.equal(best[f"trained.{name}"], value) for name, value in full.state_dict().items())
    # Commands find the kind of data.
    assert checkpoint.read_config(whole["full"] / "run/model")["run"]["data"] == "text"
    with pytest.raises(ValueError, match="is of a fine-tuning: it has what changes, not a model"):
        longspan.load(whole["lora"] / "run")


def test_a_pool_serves_tuned_states(tmp_path, whole):
    base, _ = decoder(tmp_path)
    adapter = adapt.load(whole["state"] / "run/adapter.safetensors", base)
    best = checkpoint.read(whole["state"] / "run")[2]
    assert all(torch.equal(best[f"trained.{name}"], value) for name, value in adapter.named_parameters())
    pool = Pool(base, slots=2, capacity=32)
    options = {"max_new_tokens": 9, "sampling": Sampling(temperature=0), "keep_state": True}
    (plain,) = pool.submit([1, 2], **options)
    (other,) = pool.submit([1, 2], **options, adapter=adapter.frozen())
    pool.run()
    drawn = longspan.generate(base, torch.tensor([[1, 2]]), max_new_tokens=9, temperature=0, state=adapter.states(1))
    assert other.tokens == drawn[0].tolist()
    assert (plain.state.layers[0].sums - other.state.layers[0].sums).abs().max() > 0.01


def test_commands_take_the_result(tmp_path, whole, capsys, monkeypatch):
    _, source = decoder(tmp_path)
    folders = {"lora": whole["lora"] / "run/adapter", "state": whole["state"] / "run/adapter.safetensors"}
    options, texts = ["--temperature", "0", "--tokens", "40"], {}
    for method, path in (("none", ""), *folders.items(), ("merged", "")):
        model = str(whole["lora"] / "run/model") if method == "merged" else source
        assert main(["generate", model, *options, "--prompt", "one", "--adapter", str(path)]) == 0
        texts[method] = capsys.readouterr().out.removeprefix("one")
        monkeypatch.setattr("sys.stdin", io.StringIO("one\n"))
        assert main(["chat", model, *options, "--adapter", str(path)]) == 0
        assert capsys.readouterr().out == texts[method]
    assert texts["lora"] == texts["merged"]
    assert len(set(texts.values())) == 3
    (tmp_path / "odd").mkdir()
    for path, words, message in (
        (tmp_path / "odd", [], "odd is not the folder of an adapter: it has no adapter_config.json"),
        (tmp_path / "none.safetensors", [], "no state file"),
        (folders["state"], ["--beams", "2"], "--beams cannot start from the states of --adapter"),
    ):
        assert main(["generate", source, "--adapter", str(path), *words]) == 2
        assert message in capsys.readouterr().err
    for path, message in (
        (folders["lora"], "adapter is damaged, or the adapter of another model: "),
        (folders["state"], "is an adapter of another model, which has dim=16 in place of "),
    ):
        assert main(["generate", "text", "--adapter", str(path)]) == 2
        assert message in capsys.readouterr().err
    assert main(["generate", "mnist", "--adapter", str(folders["lora"])]) == 2
    assert "--adapter requires text; mnist has mnist" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_losses_are_those_of_a_plain_loop(tmp_path):
    """Of transformers' own code and peft, which reads each sequence alone."""
    peft = pytest.importorskip("peft")
    import hybrids
    from longspan.compat import transformers as on_cpu

    hybrids.served("qwen3_5")
    data = loaded(written(tmp_path, LINES), Codec(hybrids.VOCAB), held=0.2)
    kinds = ["linear_attention", "full_attention"]
    model = hybrids.model("qwen3_5", num_hidden_layers=2, layer_types=kinds)
    model.save_pretrained(tmp_path / "base")
    on_cpu.accelerate(model)
    config = FinetuneConfig(source=str(tmp_path / "base"), rank=4)
    run = run_of(tmp_path, data, accumulate=2, evaluate_every=1, schedule="constant", steps=5)
    finetune.finetune(model, data, config, run, merge=True, progress=False)
    with open(tmp_path / "run/metrics.csv", newline="") as file:
        found = [float(row["loss"]) for row in csv.DictReader(file)]

    on_cpu.restore()
    targets = json.loads((tmp_path / "run/adapter/adapter_config.json").read_text())["target_modules"]
    torch.manual_seed(run.seed)
    stock = peft.get_peft_model(
        hybrids.model("qwen3_5", num_hidden_layers=2, layer_types=kinds),
        peft.LoraConfig(r=4, lora_alpha=16, target_modules=sorted(targets), task_type="CAUSAL_LM"),
    ).train()
    own = [p for p in stock.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(own, lr=run.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    objective = finetune.CompletionLoss(run, data)
    expected = []
    for step in range(run.steps):
        total, count = 0.0, 0
        for batch in (objective.batch(2 * step + i, 0, 1) for i in range(2)):
            for inputs, labels, segments in zip(batch.inputs, batch.targets, batch.segments, strict=True):
                for number in segments.unique():
                    here = segments == number
                    logits = stock(input_ids=inputs[here][None]).logits[0]
                    total = total + torch.nn.functional.cross_entropy(logits, labels[here], reduction="sum")
                    count += int((labels[here] >= 0).sum())
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(own, run.clip)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(total) / count)
    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < expected[0] - 0.1
    tokens = hybrids.tokens(1, 20)
    merged = type(model).from_pretrained(tmp_path / "run/model").eval()
    base = type(model).from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "run/adapter").eval()
    assert torch.allclose(merged(tokens).logits, again(tokens).logits, atol=1e-4)


# The mixers' layers that are trained, by type: never those of decays, nor those that peft refuses.
MIXERS = {
    "qwen3_5": "out_proj in_proj_qkv in_proj_z q_proj k_proj v_proj o_proj",
    "mamba2": "in_proj",
    "jamba": "in_proj x_proj out_proj q_proj k_proj v_proj o_proj",
    "bailing_hybrid": "q_proj k_proj v_proj o_proj g_proj kv_a_proj_with_mqa kv_b_proj",
}


@pytest.mark.parametrize("kind", MIXERS)
def test_the_layers_of_all_mixers_are_trained(kind):
    import hybrids

    model = hybrids.model(kind)
    layers = tuned._layers(model, FinetuneConfig(rank=3))
    names = {name.rpartition(".")[2] for name in layers.chosen if "mlp" not in name and "feed_forward" not in name}
    if kind == "qwen3_5":
        names.discard("in_proj_b")  # 4 outputs are more than the rank
    assert names - {"b_proj"} == set(MIXERS[kind].split())


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_frozen_weights_of_few_bits(tmp_path, weights):
    pytest.importorskip("peft")
    model = longspan.Decoder(longspan.DecoderConfig(**(TINY.to_dict() | {"dim": 64})))
    made = Tuned(model, FinetuneConfig(weights=weights, source=str(tmp_path)))
    batch = loaded(written(tmp_path, LINES), Bytes(), start=256).take("train", torch.tensor([0, 1]))
    made.nats(batch).backward()
    assert len(checkpoint.quantization.described(model)) >= 8
    grown = [name for name, p in made.trained.named_parameters() if "lora_B" in name and bool(p.grad.any())]
    assert len(grown) == sum("lora_B" in name for name in made.trained.state_dict())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"method": "lora", "targets": "querry"}, "no linear layer is named 'querry' .did you mean 'query'"),
        ({"method": "qlora"}, "unknown method 'qlora' .did you mean 'lora'"),
        ({"method": "full", "targets": "query"}, "requires method='lora'"),
        ({"method": "full", "weights": "int8"}, "method='full' trains all"),
        ({"method": "state", "checkpointing": True}, "checkpointing=True has no effect"),
        ({"rank": 0}, "rank=0"),
    ],
)
def test_what_is_refused(fields, said):
    with pytest.raises(ValueError, match=said):
        Tuned(longspan.Decoder(TINY), FinetuneConfig(**fields))


def test_runs_that_are_refused(tmp_path, rows):
    model, source = decoder(tmp_path)
    config = FinetuneConfig(source=source, method="state")
    for fields, said in (({"ema": 0.9}, "ema=0.9; pass ema=0"), ({"devices": 2}, "devices=2; pass devices=1")):
        run: Any = SimpleNamespace(**{**vars(run_of(tmp_path, rows)), **fields})
        with pytest.raises(ValueError, match=said):
            finetune._Tuning(model, rows, config).make(run, None)
    with pytest.raises(ValueError, match="merge=True requires method='lora'"):
        finetune.finetune(model, rows, config, run_of(tmp_path, rows), merge=True)


def test_the_command(tmp_path, capsys):
    path = written(tmp_path, LINES)
    out = str(tmp_path / "run")
    command = ["finetune", "text", "--data", path, "--method", "state", "--length", "48", "--steps", "1", "--out", out]
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"{out}: 1 steps, ")
    assert "training the initial states of 4 of 4 layers: " in said.err
    assert (tmp_path / "run/adapter.safetensors").exists()
    assert main(command) == 2
    assert "resume it with `longspan finetune ... --resume`" in capsys.readouterr().err
    assert main(["chat", out]) == 2
    assert "has the result, in adapter/" in capsys.readouterr().err
    for words, wrong in (
        (["mnist", "--data", path], "mnist has no text"),
        (["text", "--data", path, "--method", "state", "--rank", "4"], "rank=4 requires method='lora', not 'state'"),
        (["text", "--data", path, "--merge", "--weights", "int8"], "--merge requires --method lora without --weights"),
        (["text", "--data", str(tmp_path / "none")], "no data at"),
    ):
        assert main(["finetune", *words, "--out", str(tmp_path / "other")]) == 2
        assert wrong in capsys.readouterr().err
    with open(tmp_path / "run/metrics.csv", newline="") as file:
        assert math.isfinite(float(next(csv.DictReader(file))["validation_bits"]))
