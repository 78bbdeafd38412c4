"""Tokens on disk: what is written, a killed run, damaged files, and windows that need no memory."""

import gzip
import hashlib
import json
import re
import resource

import numpy as np
import pytest
import torch

from longspan._utils import sealed_dir
from longspan.cli.entry import main
from longspan.data import documents, load, token_shards, tokenization
from longspan.data.order import batch_indices
from longspan.data.streams import Stream

WORDS = ["the", "state", "reads", "each", "token", "once", "größer", "and", "forgets", "\n"]


def sentence(seed, words=60):
    chosen = np.random.default_rng(seed).integers(0, len(WORDS), words)
    return " ".join(WORDS[i] for i in chosen) + "."


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Three inputs of 12 documents in two formats, and a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("<sep>".join(sentence(i) for i in range(5)), encoding="utf-8")
    with gzip.open(folder / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": sentence(i), "id": i}) + "\n" for i in range(5, 11))
    (folder / "c.txt").write_text(sentence(11), encoding="utf-8")
    inputs = documents.sources([str(folder)])
    tokenizer = tokenization.train_bpe(inputs, 300, field="body", separator="<sep>")
    return inputs, tokenizer


def written(folder, texts, shard=100, **options):
    inputs, tokenizer = texts
    with token_shards.new_or_continued(folder):
        return tokenization.write(
            folder, inputs, tokenizer, end=tokenization.END, field="body", separator="<sep>", shard=shard, **options
        )


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_shards_hold_all_documents(texts, tmp_path):
    index = written(tmp_path, texts)
    tokenizer = tokenization.parsed(texts[1])
    end = tokenizer.token_to_id(tokenization.END)
    data = load(f"tokens:{tmp_path}", 8)
    assert (index["vocab"], index["documents"], data.vocab, data.unit) == (300, 12, 300, "token")
    assert len(index["shards"]) > 3
    tokens = np.concatenate([np.fromfile(tmp_path / one["name"], "<u2") for one in index["shards"]])
    starts = np.fromfile(tmp_path / "documents.bin", "<i8")
    ends = [*starts[1:], len(tokens)]
    for i, (begin, after) in enumerate(zip(starts, ends, strict=True)):
        assert tokens[after - 1] == end
        assert tokenizer.decode(tokens[begin : after - 1].tolist()) == sentence(i)
    # The splits are the stream in its order.
    sizes = [len(data.splits[split]) for split in ("train", "validation", "test")]
    assert sizes == [len(tokens) - 2 * (len(tokens) // 20), len(tokens) // 20, len(tokens) // 20]
    parts = [data.splits[split][torch.arange(size)] for split, size in zip(data.splits, sizes, strict=True)]
    assert torch.cat(parts).tolist() == tokens.tolist()
    for (split, begins), low in zip(data.documents.items(), (0, sizes[0], sizes[0] + sizes[1]), strict=True):
        inside = [s - low for s in starts.tolist() if low <= s < low + len(data.splits[split])]
        assert begins.tolist() == sorted({0, *inside})


def test_windows_cross_shards(texts, tmp_path):
    written(tmp_path, texts)
    data = load(f"tokens:{tmp_path}", 16)
    rows = data.take("train", torch.arange(data.count("train")))
    assert rows.flatten().equal(data.splits["train"][torch.arange(rows.numel())])
    assert data.count("train") == len(data.splits["train"]) // 16
    with pytest.raises(ValueError, match="outside 0"):
        data.take("train", torch.tensor([data.count("train")]))
    stretch = Stream(data, "train").take(torch.arange(4))
    assert stretch.targets.flatten().equal(rows[:4].flatten())
    assert stretch.segments is not None
    assert (stretch.inputs == 300).sum() == (data.documents["train"] < 64).sum()


class Killed(Exception):
    pass


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_killed_run_continues_with_the_same_bytes(texts, tmp_path, monkeypatch, at):
    written(tmp_path / "whole", texts)
    write = token_shards.Writer._write_index
    calls = 0

    def killed(self, changes):
        nonlocal calls
        calls += 1
        # After the shard's file, before the index names it.
        if calls == at + 1:
            raise Killed
        write(self, changes)

    with monkeypatch.context() as patch:
        patch.setattr(token_shards.Writer, "_write_index", killed)
        with pytest.raises(Killed):
            written(tmp_path / "part", texts)
    with pytest.raises(ValueError, match=f"incomplete: {at} shards are finished"):
        load(f"tokens:{tmp_path / 'part'}", 8)
    kept = tmp_path / "part" / "shard-00000.tokens"
    before = kept.stat().st_mtime_ns
    written(tmp_path / "part", texts)
    assert kept.stat().st_mtime_ns == before
    assert content(tmp_path / "part") == content(tmp_path / "whole")


NAMED = "GPT-2 ends documents by <|endoftext|> and goes on."


@pytest.mark.parametrize("special", [False, True])
def test_the_name_of_a_special_token_in_a_document_is_text_unless_asked_for(texts, tmp_path, special):
    (tmp_path / "a.txt").write_text(NAMED, encoding="utf-8")
    inputs = documents.sources([str(tmp_path / "a.txt")])
    written(tmp_path / "tokens", (inputs, texts[1]), special=special)
    tokens = np.fromfile(tmp_path / "tokens" / "shard-00000.tokens", "<u2").tolist()
    made = tokenization.parsed(texts[1])
    assert made.decode(tokens, skip_special_tokens=False) == NAMED + tokenization.END
    assert tokens.count(made.token_to_id(tokenization.END)) == 1 + special
    with pytest.raises(ValueError, match="different: special"):
        written(tmp_path / "tokens", (inputs, texts[1]), special=not special)


# Parts of tokenizers at which the library panics: a regular expression that backtracks without end, and others.
PANICS = {
    "backtracks": {
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    },
    "replaces nothing": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": " "}},
}


@pytest.mark.parametrize("name", PANICS)
def test_what_a_tokenizer_cannot_encode_is_named(texts, tmp_path, name):
    content = json.loads(texts[1]) | PANICS[name]
    (tmp_path / "a.txt").write_text("a" * 40 + "b", encoding="utf-8")
    inputs = documents.sources([str(tmp_path / "a.txt")])
    with pytest.raises(ValueError, match=r"a\.txt cannot be encoded: the tokenizer failed"):
        written(tmp_path / "tokens", (inputs, json.dumps(content)))


def test_another_tokenizer_or_option_is_refused(texts, tmp_path):
    written(tmp_path, texts)
    assert written(tmp_path, texts)["complete"]
    with pytest.raises(ValueError, match="different: shard"):
        written(tmp_path, texts, shard=200)
    other = tokenization.train_bpe(texts[0], 270, field="body")
    with pytest.raises(ValueError, match=r"different: tokenizer\.json"):
        written(tmp_path, (texts[0], other))


def test_damage_is_found(texts, tmp_path):
    written(tmp_path, texts)
    assert token_shards.verify(tmp_path)["complete"]
    path = tmp_path / "shard-00001.tokens"
    good = path.read_bytes()
    path.write_bytes(good[:-2] + bytes([good[-2] ^ 1, good[-1]]))
    load(f"tokens:{tmp_path}", 8)
    with pytest.raises(ValueError, match=r"shard-00001\.tokens was changed or damaged"):
        token_shards.verify(tmp_path)
    path.write_bytes(good[:-2])
    with pytest.raises(ValueError, match=r"shard-00001\.tokens has \d+ bytes, and index\.json records"):
        load(f"tokens:{tmp_path}", 8)
    path.unlink()
    with pytest.raises(ValueError, match="shard-00001"):
        load(f"tokens:{tmp_path}", 8)
    path.write_bytes(good)
    # Of the same size, with another number of a token.
    path = tmp_path / "tokenizer.json"
    good = path.read_text(encoding="utf-8")
    number = re.search(r'"a": ?(\d+)', good)
    path.write_text(good[: number.start(1)] + str(int(number[1]) ^ 1) + good[number.end(1) :], encoding="utf-8")
    assert (path.stat().st_size, path.read_text(encoding="utf-8") != good) == (len(good.encode()), True)
    with pytest.raises(ValueError, match=r"tokenizer\.json was changed or damaged"):
        load(f"tokens:{tmp_path}", 8)
    path.write_text(good, encoding="utf-8")
    index = tmp_path / "index.json"
    index.write_text(index.read_text().replace('"vocab": 300', '"vocab": 301'))
    with pytest.raises(ValueError, match=r"index\.json was changed or damaged"):
        load(f"tokens:{tmp_path}", 8)


@pytest.mark.full
def test_ten_gigabytes_start_at_once(tmp_path):
    """Sparse files: nobody has written them, so reading them all would take their size."""
    tokens, shards = 2**29, 10
    for i in range(shards):
        with (tmp_path / f"shard-{i:05d}.tokens").open("wb") as file:
            file.truncate(2 * tokens)
    with (tmp_path / "documents.bin").open("wb") as file:
        file.write(np.arange(0, tokens * shards, 2**20, dtype="<i8").tobytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    entries = [{"name": f"shard-{i:05d}.tokens", "bytes": 2 * tokens, "tokens": tokens} for i in range(shards)]
    sizes = [{"name": name, "bytes": (tmp_path / name).stat().st_size} for name in ("documents.bin", "tokenizer.json")]
    index = {"format": 1, "complete": True, "vocab": 2**16, "dtype": "uint16", "tokens": tokens * shards}
    index |= {"tokenizer": hashlib.sha256(b"{}").hexdigest()}
    index |= {"shards": entries, "files": entries + sizes}
    (tmp_path / "index.json").write_text(json.dumps(index | {"sha256": sealed_dir.digest(index)}))
    # A place in the last shard, so that windows have something to show.
    with (tmp_path / f"shard-{shards - 1:05d}.tokens").open("r+b") as file:
        file.seek(2 * (tokens - 2**25 - 1))
        file.write(b"\x07\x00")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    data = load(f"tokens:{tmp_path}", 4096)
    count = data.count("train")
    rows = [data.take("train", batch_indices(count, 0, i, 4, keyed=True)) for i in range(50)]
    stretch = Stream(data, "train").take(torch.tensor([0, count - 1]))
    # In kB; an order in memory would have 10 MB, a window of bytes each 10 GB.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000
    assert count == (tokens * shards - 2**25) // 4096
    assert int(torch.stack(rows).max()) == 0
    assert stretch.targets[1, -1] == 7


@pytest.mark.parametrize("separator", ["", "<sep>"])
def test_long_texts_come_in_pieces(tmp_path, monkeypatch, separator):
    monkeypatch.setattr(documents, "LONGEST", 50)
    whole = ["\n".join(sentence(i, 20) for i in range(9)), sentence(20, 5), "", "x" * 400]
    (tmp_path / "a.txt").write_text("<sep>".join(whole), encoding="utf-8")
    (source,) = documents.sources([str(tmp_path)])
    found, current = [], ""
    for piece in documents.pieces(source, separator=separator):
        assert piece.begins == (current == "")
        current += piece.text
        if piece.ends:
            found.append(current)
            current = ""
    assert current == ""
    assert found == ([text for text in whole if text] if separator else ["<sep>".join(whole)])


def test_wide_vocabularies_take_four_bytes():
    assert [token_shards.dtype_of(vocab) for vocab in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]


def test_parquet(tmp_path, texts):
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": [1, 2], "text": ["one", "two"]}), tmp_path / "a.parquet")
    (source,) = documents.sources([str(tmp_path)])
    assert [piece.text for piece in documents.pieces(source)] == ["one", "two"]
    with pytest.raises(ValueError, match="no column 'body': its columns are id, text"):
        list(documents.pieces(source, "body"))
    with pytest.raises(ValueError, match="row 1: the field 'id' is not a text, but int"):
        list(documents.pieces(source, "id"))


@pytest.mark.parametrize(("name", "package"), [("a.parquet", "pyarrow"), ("set/dataset_info.json", "datasets")])
def test_missing_packages_are_named(tmp_path, monkeypatch, name, package):
    monkeypatch.setattr("longspan._utils.optional_deps.find_spec", lambda name: None)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"")
    (source,) = documents.sources([str((tmp_path / name) if package == "pyarrow" else tmp_path / "set")])
    with pytest.raises(ImportError, match=rf'{package}; pip install "\.\[parquet\]"'):
        list(documents.pieces(source))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"body": "b"}\n', r"line 2 has no field 'text': its fields are body; pass --field"),
        (b'{"text": "a"}\n\n[1]\n', r"line 3 has no field 'text': it is no object"),
        (b'{"text": "a"}\n{"text"\n', "line 2 is not JSON"),
        (b'{"text": "\xff"}\n', "is not UTF-8"),
        (b'{"text": "a"}\n\n{"text": "\\udc80"}\n', "line 3: the field 'text' has half of a surrogate pair"),
        (b'{"text": 3}\n', "line 1: the field 'text' is not a text, but int"),
    ],
)
def test_wrong_lines_are_named(tmp_path, content, message):
    (tmp_path / "a.jsonl").write_bytes(content)
    (source,) = documents.sources([str(tmp_path / "a.jsonl")])
    with pytest.raises(ValueError, match=message):
        list(documents.pieces(source))


def test_the_command(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n\n".join(sentence(i) for i in range(30)), encoding="utf-8")
    command = ["tokenize", str(tmp_path / "a.txt"), "--train-bpe", "280", "--out", str(tmp_path / "out")]
    assert main([*command, "--separator", "\n\n"]) == 0
    said = capsys.readouterr().out
    assert "of 30 documents in 1 shards" in said
    assert "vocabulary 280" in said
    assert main([*command, "--separator", "\n\n"]) == 0
    assert capsys.readouterr().out == said
    assert main(["tokenize", "--verify", str(tmp_path / "out")]) == 0
    for wrong, message in (
        (["tokenize"], "no inputs"),
        (["tokenize", "x"], "--out is missing"),
        (["tokenize", "x", "--out", "y"], "either --tokenizer FILE or --train-bpe"),
        ([*command[:3], "100", "--out", str(tmp_path / "z")], "vocabulary of 100 is too small"),
        (command, "different: separator"),
        (["tokenize", str(tmp_path), "--tokenizer", str(tmp_path / "a.txt"), "--out", "y"], "is not a tokenizer"),
    ):
        capsys.readouterr()
        assert main(wrong) == 2
        assert message in capsys.readouterr().err


def test_a_given_tokenizer_and_its_end(tmp_path, texts, capsys):
    (tmp_path / "tokenizer.json").write_text(texts[1], encoding="utf-8")
    (tmp_path / "a.txt").write_text(sentence(1, 300), encoding="utf-8")
    command = ["tokenize", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path)]
    assert main([*command, "--out", str(tmp_path / "x")]) == 0
    assert main([*command, "--out", str(tmp_path / "y"), "--end", "<|endoftext|>"]) == 0
    sizes = [token_shards.read_index(tmp_path / name)["tokens"] for name in "xy"]
    assert sizes[1] == sizes[0] + 1
    capsys.readouterr()
    assert main([*command, "--out", str(tmp_path / "z"), "--end", "</s>"]) == 2
    assert "has no token '</s>'; its special tokens are <|endoftext|>" in capsys.readouterr().err
