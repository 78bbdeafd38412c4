"""``longspan show --draw``: the picture is what the attention sees, and the page on patterns is up to date."""

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("PIL", reason="pictures need Pillow: pip install longspan[data]")

from PIL import Image

import longspan
from longspan import patterns
from longspan.attention import specs
from longspan.attention.base import REGISTRY
from longspan.cli import describe
from longspan.cli.entry import WRONG, main
from longspan.patterns.picture import SEEN

ROOT = Path(__file__).parents[2]
PAGE, IMAGES = ROOT / "docs" / "how-to" / "sparse-patterns.md", ROOT / "docs" / "images"
HAVING = [name for name in longspan.list_mechanisms() if describe._has_pattern(name)]
SPECS = [spec for name in HAVING for spec in REGISTRY[name].examples]


@pytest.fixture(autouse=True)
def at(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(capsys, *words, code=0):
    assert main(["show", *words]) == code
    out, err = capsys.readouterr()
    return err if code else out


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image)


def drawn(path, tokens, heads=1):
    """The pictures in a file, one number a pair: (heads, tokens, tokens)."""
    canvas, gap, factor = pixels(path), 4, -(-256 // tokens)
    side = tokens * factor
    assert canvas.shape == (side + 2 * gap, heads * (side + gap) + gap)
    each = [canvas[gap : gap + side, gap + h * (side + gap) :][:, :side] for h in range(heads)]
    for image in each:
        squares = image[::factor, ::factor].repeat(factor, 0).repeat(factor, 1)
        assert np.array_equal(image, squares)
    return torch.from_numpy(np.stack(each)[:, ::factor, ::factor].copy())


def test_one_head_is_drawn(capsys):
    text = "causal & (band(3) | strided(8))"
    out = said(capsys, text, "--draw", "p.png", "--tokens", "47")
    assert torch.equal(drawn("p.png", 47), patterns.picture(patterns.parse(text), 47))
    assert out.splitlines()[0] == f"{text}: a pattern"
    assert re.search("look-back +unbounded; look-ahead 0\n", out)
    mean = patterns.parse(text).dense(47).sum(-1).double().mean()
    assert f"keys        {mean:.4g} per query at 47 tokens, from 1 to 9" in out


def test_heads_stand_side_by_side(capsys):
    text = "by_head(band(2), random(2)) & causal"
    out = said(capsys, text, "--draw", "p.png", "--heads", "4", "--tokens", "19")
    found = drawn("p.png", 19, 4)
    assert torch.equal(found, patterns.picture(patterns.parse(text), 19, heads=4))
    assert len(found.unique(dim=0)) == 3
    assert "; heads differ\n" in out


def test_a_mechanism_is_drawn_as_it_is_built(capsys):
    out = said(capsys, "sparse(pattern='band(2, right=9)')", "--draw", "p.png", "--tokens", "23")
    assert torch.equal(drawn("p.png", 23), patterns.picture(patterns.band(2), 23))
    assert "https://arxiv.org/abs/1904.10509" in out
    assert "look-back   2; look-ahead 0\n" in out
    assert "keys        2.87 per query at 23 tokens, from 1 to 3" in out


def seen_by(spec, causal, n):
    """Which tokens change which outputs, by other random numbers in the place of each: bool (n,n)."""
    torch.manual_seed(0)
    attention = longspan.build(spec, 12, 2, causal=causal).double()
    x = torch.randn(1, n, 12, dtype=torch.float64)
    others = x.repeat(n, 1, 1)
    others[range(n), range(n)] = torch.randn(n, 12, dtype=torch.float64)
    with torch.no_grad():
        before, after = attention(x)[0], attention(others)[0]
    return (after - before).abs().amax(-1).mT > 1e-12


@pytest.mark.parametrize("spec", SPECS)
def test_what_is_drawn_is_what_is_seen(spec):
    """By any head; a token's own key is indistinguishable from its query."""
    ((_, cls),) = specs.parts(spec)
    own = cls.name == "etc" and 3  # global tokens that the example adds before the input
    n = 24
    seen = (describe.picture(spec, 12, 2, n + own) == SEEN).any(0)[own:, own:]
    eye = torch.eye(n, dtype=torch.bool)
    assert torch.equal(seen | eye, seen_by(spec, "causal" in cls.directions, n) | eye)


def test_an_attention_that_reads_all_keys_has_nothing_to_draw():
    with pytest.raises(ValueError, match=r"^lowrank_band.*: axial, "):
        describe.picture("lowrank_band(rank=2, window=5)", 12, 2)


def test_facts_tell_of_patterns_where_there_are_some(capsys):
    one, two, three = json.loads(
        said(capsys, "local(window=5); linear; band(8, right=1)", "--dim=12", "--heads=2", "--tokens=7", "--json")
    )
    assert one["view"] == {
        "pattern": "band(left=4, right=0)",
        "lookback": 4,
        "lookahead": 0,
        "per_head": False,
        "tokens": 7,
        "keys": {"fewest": 1, "mean": pytest.approx(25 / 7), "most": 5},
    }
    assert two["view"] is None
    assert three == {"spec": "band(8, right=1)", "view": describe.view("band(8, right=1)", 12, 2, 7)}


@pytest.mark.parametrize("spec", ["sparse(pattern='band(5)')", "longformer(window=4)"])
def test_a_state_as_large_as_a_look_back_is_measured(spec):
    (facts,) = describe.facts(spec, 12, 2)
    size = longspan.states.nbytes(longspan.build(spec, 12, 2).init_state(1))
    assert {count["state"] for count in facts["counts"]} == {size}


@pytest.mark.parametrize("name", HAVING)
def test_a_picture_has_a_size_at_which_there_is_something_to_see(name, capsys):
    """Neither all of the order is seen nor nothing but oneself; 64 tokens lie inside the window of many a mechanism."""
    out = said(capsys, name, "--draw", "p.png")
    tokens = describe.view(name, 256, 8)["tokens"]
    assert f"per query at {tokens} tokens" in out

    def telling(n):
        seen = describe.picture(name, 256, 8, n) == SEEN
        pairs = n * (n + 1) / 2 if "causal" in REGISTRY[name].directions else n * n
        return bool(2 * seen.sum() < len(seen) * pairs and (seen.sum(-1) >= 4).any())

    # The sizes are powers of two from 64 on, and no larger than need be.
    assert [telling(n) for n in (64, 128, 256, 512, 1024) if n <= tokens].index(True) == (tokens // 64).bit_length() - 1


@pytest.mark.parametrize("text", ["everywhere", "nowhere", "causal"])
def test_a_pattern_of_which_no_size_shows_more_is_drawn_small(text):
    assert patterns.picture_size(patterns.parse(text)) == 64


# Words of a command line -> values that the message names, separated by " & ".
MISTAKES = {
    (
        "linear",
        "--draw",
        "p.png",
    ): "linear & axial, bigbird, etc",
    ("band(2); linear", "--draw", "p.png"): "--draw & 2 & 'band(2); linear'",
    ("band(2)", "--draw", "p.jpg"): "pictures are PNG files, so their names end in .png, unlike p.jpg",
    ("band(2)", "--draw", "no/p.png"): "cannot write no/p.png: there is no folder no",
    ("band(2)", "--tokens", "0"): "--tokens=0 must be at least 1",
    ("band(2)", "--draw", "p.png", "--tokens", "4097"): "tokens=4097 must be from 1 to 4096",
    ("band(2) | nothing",): "unknown name 'nothing'; known: band, block",
    ("band(2) | linear",): "unknown name 'linear'; known: band, block",
    ("linear & band(2)",): "unknown name 'band'",
    ("random",): "cannot build 'random'",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(words, capsys, at):
    err = said(capsys, *words, code=WRONG)
    assert all(part in err for part in MISTAKES[words].split(" & "))
    assert err.count("\n") == 1
    assert not list(at.iterdir())


def test_no_pattern_is_called_like_a_mechanism():
    assert set(patterns.NAMES) & set(longspan.list_mechanisms()) == set()


def table(head):
    """The cells of a table of the page."""
    text = PAGE.read_text(encoding="utf-8")
    rows = text[text.index(f"| {head} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", row.strip("|"))] for row in rows]


def test_the_page_has_every_atom_and_its_reach():
    found = {}
    for example, _, back, ahead in table("example"):
        text = example.strip("`")
        pattern = patterns.parse(text)
        assert [back, ahead] == ["all" if b is None else str(b) for b in (pattern.lookback, pattern.lookahead)], text
        found[text.partition("(")[0]] = pattern
    assert set(found) == set(patterns.NAMES)


def test_the_combinations_of_the_page_are_patterns():
    assert [patterns.parse(example.strip("`")) for example, _ in table("pattern")]


def test_the_pictures_of_the_page_are_what_its_commands_draw(at, capsys, blocks):
    commands = [line[2:] for block in blocks(PAGE, "console") for line in block.splitlines()]
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0
    shown = re.findall(r"!\[.*?\]\((?:\.\./)?images/(.*?)\)", PAGE.read_text(encoding="utf-8"))
    assert (
        sorted(shown) == sorted(path.name for path in at.iterdir()) == sorted(p.name for p in IMAGES.glob("pattern-*"))
    )
    for name in shown:
        assert np.array_equal(pixels(at / name), pixels(IMAGES / name))
        assert (IMAGES / name).stat().st_size < 10_000
