"""lm-evaluation-harness: a model has the same figures in Python, accelerated, and through the server."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")
pytest.importorskip("transformers")
if importlib.util.find_spec("lm_eval") is None:
    pytest.skip("lm-eval is not installed", allow_module_level=True)

import adapted_models
import servers

import hybrids
from lm_eval_process import SENTENCES, write_tasks
from longspan.cli import main
from longspan.cli.serve import loaded
from longspan.compat.transformers import LongspanConfig, LongspanForCausalLM
from longspan.data import documents, tokenization

TESTS = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("restored")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("\n".join(SENTENCES), encoding="utf-8")
    return tokenization.train_bpe(documents.sources([str(file)]), 300)


def evaluated(folder, *ways):
    """The figures of the tasks, and the log-probabilities of the choices, in each of several ways; in one process."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    tasks = folder / "tasks"
    tasks.mkdir(exist_ok=True)
    write_tasks(tasks)
    command = [sys.executable, str(TESTS / "lm_eval_process.py"), str(folder), str(tasks), *ways]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((tasks / "results.json").read_text(encoding="utf-8"))


def check(folder, *ways, **pool):
    """Equal accuracies, log-probabilities and perplexities equal up to rounding in all ways and from a server."""
    model, codec, *_ = loaded(str(folder), "")
    with servers.Running(model, codec=codec, name=str(folder), pool={"slots": 4, "queue": 64} | pool) as running:
        expected, *others = evaluated(folder, *ways, running.url)
    assert {"choices acc", "choices acc_norm", "text word_perplexity", "text bits_per_byte"} <= set(expected["figures"])
    assert 1 < expected["figures"]["text byte_perplexity"] < 100
    assert len(others) == len(ways)
    for found in others:
        assert found["figures"] == pytest.approx(expected["figures"], rel=1e-4)
        for a, b in zip(found["answers"], expected["answers"], strict=True):
            assert a == pytest.approx(b, rel=1e-4)


@pytest.mark.parametrize("kind", [pytest.param("mamba2", marks=pytest.mark.slow), "qwen3_5"])
def test_a_model_of_transformers_has_equal_figures_in_four_ways(kind, tokenizer, tmp_path):
    adapted_models.in_pools(kind)
    vocab = tokenization.vocab_of(tokenization.parsed(tokenizer))
    hybrids.model(kind, vocab_size=vocab).save_pretrained(tmp_path)
    _with_tokenizer(tmp_path, tokenizer)
    check(tmp_path, "stock", "pool", "accelerated", capacity=300)


@pytest.mark.slow
def test_a_decoder_of_ours_has_equal_figures_in_three_ways(tokenizer, tmp_path):
    vocab = tokenization.vocab_of(tokenization.parsed(tokenizer))
    torch.manual_seed(0)
    sizes = {"dim": 16, "depth": 2, "heads": 2, "positions": "none", "attention": "gated_deltanet"}
    LongspanForCausalLM(LongspanConfig(vocab=vocab, **sizes)).save_pretrained(tmp_path)
    _with_tokenizer(tmp_path, tokenizer)
    check(tmp_path, "stock", "pool")


def test_the_command_prints_the_metrics(tmp_path, monkeypatch, capsys):
    task = {"output_type": "generate_until", "generation_kwargs": {"until": ["\n"], "max_gen_toks": 7}}
    task |= {"task": "words", "test_split": "test", "doc_to_text": "{{text}}", "doc_to_target": "{{text}}"}
    task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "words.jsonl")}}}
    task |= {"metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}]}
    (tmp_path / "words.jsonl").write_text("".join(json.dumps({"text": f"The {n} "}) + "\n" for n in range(3)))
    (tmp_path / "words.yaml").write_text(json.dumps(task), encoding="utf-8")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    options = ["--tasks", "words", "--task-path", str(tmp_path), "--examples", "2"]
    assert main(["eval", "text", *options]) == 0
    assert re.search(r"words +exact_match +0.0000 ± ", capsys.readouterr().out)
    for words, message in (
        (["eval", "text", "--tasks", "no_such_task"], "unknown task 'no_such_task'"),
        (["eval", "text", "--shots", "2"], "--shots requires --tasks"),
        (["eval", "text", "--tasks", "words", "--stream"], "--stream cannot be combined with --tasks"),
        (["eval", "mnist", "--tasks", "words"], "mnist has no text"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def _with_tokenizer(folder, content):
    """Add the files that ``AutoTokenizer`` reads."""
    from transformers import PreTrainedTokenizerFast

    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    file = str(folder / "tokenizer.json")
    PreTrainedTokenizerFast(tokenizer_file=file, eos_token=tokenization.END).save_pretrained(folder)
