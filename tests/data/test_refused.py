"""Files that hold no data of their kind: one table of contents, and what the error says of each."""

import gzip
import json
import lzma

import pytest

from longspan import data

PAIRS = b"".join(b"%d\tx\n" % i for i in range(10, 74))
LAST = b"\nlast\tline"
LONG_SOURCE, LONG_TARGET = PAIRS + b"x" * 9 + b"\tb" + LAST, PAIRS + b"b\t" + b"x" * 8 + LAST


def jsonl(*labels):
    return "".join(json.dumps({"text": f"text {i}", "label": label}) + "\n" for i, label in enumerate(labels))


# The kind of data, a file and its content (None for no file), and the message.
CASES = [
    ("labels", "a.txt", "x", "expected a .jsonl, .tsv or .csv file"),
    ("labels", "a.jsonl", '{"text": "x", "label": 1}\nno', "line 2 of .*a.jsonl is not JSON"),
    ("labels", "a.jsonl", "[1]\n", "line 1 of .*a.jsonl must be an object"),
    ("labels", "a.jsonl", '{"text": "", "label": 1}\n', "line 1 of .*: its text must be .*''"),
    ("labels", "a.jsonl", '{"label": 1}\n', "line 1 of .*: its text must be .*None"),
    ("labels", "a.jsonl", '{"text": "x", "label": "so good"}\n', "line 1 .*: its label must be a word .*'so good'"),
    ("labels", "a.jsonl", '{"text": "x", "label": true}\n', "line 1 .*: its label must be a word .*True"),
    ("labels", "a.jsonl", '{"text": "x", "label": ""}\n', "line 1 .*: its label must be a word .*''"),
    ("labels", "a.tsv", "words\tlabel\nx\ty\n", "line 1 of .*a.tsv must name the columns.*'text'"),
    ("labels", "a.tsv", "", "line 1 of .*a.tsv must name the columns"),
    ("labels", "a.tsv", "text\tlabel\nx\ty\tz\n", "line 2 of .*a.tsv has more columns than line 1"),
    ("labels", "a.tsv", "text\tlabel\nx\n", "line 2 of .*a.tsv: its label must be a word"),
    ("labels", "a.tsv", 'text\tlabel\n"x\ty\n', "a.tsv .*excel-tab.*unexpected end of data"),
    ("labels", "a.jsonl", jsonl(1, 2, 1, 2, 1), "has 5 texts"),
    ("labels", "a.jsonl", jsonl(*["same"] * 64), "has one label, 'same'"),
    ("labels", "nothing", None, "no labeled texts at .*nothing: there is no such file or folder"),
    ("labels", "a.jsonl", b'{"text": "x", "label": 1}\n{"text": "\xff"}\n', "a.jsonl is not UTF-8: byte 0xff"),
    ("pairs", "words.tsv", PAIRS + b"abc" + LAST, r"line 65 of .*words.tsv has 1 columns"),
    ("pairs", "words.tsv", PAIRS + b"a\tb\tc" + LAST, "line 65 of .* has 3 columns"),
    ("pairs", "words.tsv", PAIRS + LAST, "line 65 of .* has 1 columns"),
    ("pairs", "words.tsv", PAIRS + b"\tb" + LAST, "line 65 of .*: its source is empty"),
    ("pairs", "words.tsv", PAIRS + b"ab\xff\tc" + LAST, "line 65 of .* is not UTF-8: byte 0xff at place 3"),
    ("pairs", "words.tsv", LONG_SOURCE, "line 65 of .*: its source has 9 bytes, more than length=8; shorten it, or"),
    ("pairs", "words.tsv", LONG_TARGET, "line 65 of .*: its target has 8 bytes and the stop token, more than length=8"),
    ("pairs", "n.jsonl", "{", "line 1 of .* is not JSON: Expecting"),
    ("pairs", "n.jsonl", "[[1], [2]]", r"line 1 of .* must be \{\"source\": .* \[\[1\], \[2\]\]"),
    ("pairs", "n.jsonl", '{"source": 3, "target": [1]}', "line 1 of .*: its source must be a list of integers, got 3"),
    ("pairs", "n.jsonl", '{"source": [1], "target": [true]}', "line 1 of .*: its target has True; tokens are integers"),
    ("pairs", "n.jsonl", '{"source": [-1], "target": []}', "line 1 of .*: its source has -1; tokens are"),
    ("pairs", "n.jsonl", '{"source": [1.5], "target": []}', "line 1 of .*: its source has 1.5; tokens are"),
    ("pairs", "n.jsonl", '{"source": [], "target": [1]}', "line 1 of .*: its source is empty"),
    ("pairs", "none", None, "no pairs at .*/none: there is no such file.*: dates"),
    ("pairs", "packed", gzip.compress(PAIRS), "packed by gzip; unpack it first"),
    ("pairs", "few", "a\tb\n", "has 1 pairs.* validation.* 20"),
    ("text", "absent.txt", None, "no text at .*/absent.txt: there is no such file or folder"),
    ("text", "", None, r"no text in the folder .*: looked for \*.txt, \*.txt.gz, \*.txt.xz"),
    ("text", "a.gz", gzip.compress(b"abc" * 5000)[:-9], "a.gz is truncated or corrupt .*; its sha256 is [0-9a-f]{64}$"),
    ("text", "a.xz", lzma.compress(b"abc" * 5000)[:-9], "a.xz is truncated or corrupt .*; its sha256 is [0-9a-f]{64}$"),
    ("text", "a.txt", "a" * 159, "has 159 bytes; windows of 8 need at least 160"),
]


@pytest.mark.parametrize(("kind", "name", "content", "message"), CASES)
def test_what_cannot_be_loaded_is_named(kind, name, content, message, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        data.load(f"{kind}:{path}", 8)
