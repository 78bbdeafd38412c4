"""The model of poems inside the package, and the script that makes its texts and measures it."""

# ruff: noqa: RUF001 (punctuation of Chinese)

import importlib.util
import json
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")

from longspan.cli.entry import WRONG, main
from longspan.data import tokenization
from longspan.generation.sampling import log_likelihood
from longspan.models import pretrained
from longspan.serving.tokenized import Tokenized

SPEC = importlib.util.spec_from_file_location("poems", Path(__file__).parents[2] / "examples" / "poems.py")
poems = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(poems)

TOWER = "五絕《登鸛雀樓》\n白日依山盡，黃河入海流。\n欲窮千里目，更上一層樓。"
SIZES = {"五絕": (4, 5), "七絕": (4, 7), "五律": (8, 5), "七律": (8, 7)}


@pytest.fixture(scope="module")
def model():
    return pretrained.load("poems")


@pytest.fixture(scope="module")
def codec(model):
    return Tokenized(model.tokenizer, ends=(0,))


@pytest.mark.parametrize("form", SIZES)
def test_poems_have_the_lines_of_their_form(model, codec, form):
    texts, _ = poems.draw(model, codec, [form + "《春夜》\n"] * 16, seed=0, temperature=0.7)
    assert len(set(texts)) > 8
    right = [text for text in texts if shape(text.partition("》")[2]) == SIZES[form]]
    # One in twenty is not.
    assert len(right) >= 12


def shape(body):
    """The lines of a poem and the characters of each, written out again."""
    found = re.findall(r"[^，。？！；、：\n]+", body)
    return (len(found), len(found[0])) if len({len(line) for line in found}) == 1 else None


def test_a_poem_is_written_and_ends(capsys):
    words = ["generate", "poems", "--prompt", "七絕《春夜》", "--temperature", "0.7", "--seed"]
    seen = []
    for seed in ("1", "1", "2"):
        assert main([*words, seed]) == 0
        seen.append(capsys.readouterr().out)
    assert seen[0] == seen[1] != seen[2]
    for text in seen:
        assert text.startswith("七絕《春夜》")
        assert tokenization.END not in text
        assert len(text) < 100


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("五绝《春夜》", "must begin with a form, 五絕, 七絕, 五律, 七律 or 詩, and a title: 五絕《春夜》"),
        ("春夜", "must begin with a form"),
        ("七律春夜", "must begin with a form"),
        ("七律《Spring》", "no token for 'Sginpr'"),
    ],
)
def test_other_prompts_are_refused(capsys, prompt, message):
    assert main(["generate", "poems", "--prompt", prompt]) == WRONG
    assert message in capsys.readouterr().err


def test_only_poems_have_forms():
    found = {name: pretrained.forms(name) for name in pretrained.names()}
    assert found.pop("poems") == (*SIZES, "詩")
    assert set(found.values()) == {()}
    assert pretrained.forms("runs/poems") == ()


def test_order_matters_to_it(model, codec):
    """A poem is likelier than its characters in another order of lines or of characters."""
    tokens = torch.tensor([codec.encode(TOWER)])
    order = torch.arange(tokens.shape[1])
    order[11:] = 11 + torch.randperm(len(order) - 11, generator=torch.Generator().manual_seed(0))
    assert log_likelihood(model, tokens) > log_likelihood(model, tokens[:, order]) + 10


def test_texts_are_made_of_the_package(tmp_path, capsys):
    folder = tmp_path / "package" / "dist" / "quantangshi"
    folder.mkdir(parents=True)
    lines = TOWER.split("\n")[1:]
    found = [
        {"title": "登鸛雀樓", "paragraphs": lines},
        {"title": "登鸛雀樓（一作）", "paragraphs": lines},
        {"title": "依山", "paragraphs": lines},
        {"title": "", "paragraphs": ["白日依山盡。"]},
        {"title": "", "paragraphs": ["依山盡。"]},
        {"title": "登鸛雀樓", "paragraphs": ["依山盡。"]},
        {"title": "句", "paragraphs": ["□日依山盡。"]},
        {"title": "長", "paragraphs": ["白日依山盡。"] * 30},
        {"title": "句", "paragraphs": ["罕見。"]},
    ]
    (folder / "poet.tang.0.json").write_text(json.dumps(found), encoding="utf-8")
    common = len(set(TOWER + "詩無題"))
    words = ["prepare", str(tmp_path / "package"), "--out", str(tmp_path / "out"), "--characters", str(common + 1)]
    poems.main(words)
    made = (tmp_path / "out" / "poems.jsonl").read_text(encoding="utf-8").splitlines()
    short = {f"詩《{text}" for text in ("無題》\n白日依山盡。", "無題》\n依山盡。", "登鸛雀樓》\n依山盡。")}
    expected = {TOWER, TOWER.replace("登鸛雀樓", "依山"), *short}
    assert {json.loads(line)["text"] for line in made} == expected
    assert f"5 poems, {sum(map(len, expected))} characters; 1 poems are left out" in capsys.readouterr().out
    tokenizer = tokenization.encoder((tmp_path / "out" / "tokenizer.json").read_text(encoding="utf-8"))
    assert tokenizer.decode(tokenization.encode(tokenizer, [TOWER])[0]) == TOWER
    assert tokenization.vocab_of(tokenizer) == common + 1
    with pytest.raises(ValueError, match="no token for '罕見'"):
        tokenization.encode(tokenizer, [TOWER, "罕見"])
    (folder / "poet.tang.0.json").unlink()
    with pytest.raises(SystemExit, match="no poems"):
        poems.main(words)


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([TOWER], (100, 100, 100)),
        ([TOWER, TOWER.replace("層樓", "層山")], (100, 50, 50)),
        ([TOWER.replace("海流", "海樓")], (100, 0, 0)),
        ([TOWER.replace("海流", "流"), TOWER], (50, 100, 100)),
        ([TOWER.replace("五絕", "七絕")], (0, 0, 0)),
        (["五律《樓》" + TOWER.partition("》")[2] * 2], (100, 67, 0)),
    ],
)
def test_form_and_rhyme_are_judged(texts, expected):
    known = poems.table([TOWER] * 3 + [TOWER.replace("層樓", "層山")] * 2)
    assert known == {("樓", "流")}
    found = re.findall(r"([\d.]+)%", poems.judge(texts, known))
    assert tuple(round(float(share)) for share in found) == expected
