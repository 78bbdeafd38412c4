"""What the commands are made of: facts about mechanisms, pictures, bars."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import longspan
from longspan import data
from longspan._utils import png
from longspan.attention import REGISTRY, Attention, specs
from longspan.attention import citation as citation_module
from longspan.cli import describe, dispatch, trained

SHARED = Path(__file__).parents[3] / "shared" / "data"


def test_every_mechanism_has_its_row():
    rows = describe.mechanisms()
    assert [row["name"] for row in rows] == longspan.list_mechanisms()
    for row in rows:
        assert row["summary"].endswith((".", ":"))
        assert set(row["forms"]) <= {"causal", "bidirectional", "cross", "packed", "prefix"}
        assert "causal" in row["forms"] or "bidirectional" in row["forms"]


@pytest.mark.parametrize(
    ("text", "forms"),
    [
        ("rfa", ["causal", "bidirectional", "cross", "packed", "prefix"]),
        ("rfa(gate=True)", ["causal", "packed"]),
        ("axial(kind='shifted')", ["causal", "packed"]),
    ],
)
def test_options_may_rule_forms_out(text, forms):
    (found,) = describe.facts(text, 64, 4)
    assert found["forms"] == forms


def test_parts_are_distinct_specs_with_their_classes():
    found = specs.parts("linear; softmax(kv_heads=1); linear; softmax")
    assert [text for text, _ in found] == ["linear", "softmax(kv_heads=1)", "softmax"]
    assert [cls.name for _, cls in found] == ["linear", "softmax", "softmax"]
    # Nothing is built, so sizes that would not fit do not matter.
    assert specs.parts("softmax(kv_heads=997)")[0][1].name == "softmax"


def test_options_tell_value_default_and_meaning():
    options = {o["name"]: o for o in describe.options(longspan.build("softmax(kv_heads=2)", 8, 4))}
    assert list(options) == ["kv_heads", "dropout", "rotary", "rotary_layout", "context_dim", "head_dim", "qk_norm"]
    assert (options["kv_heads"]["value"], options["kv_heads"]["default"]) == (2, 0)
    assert options["kv_heads"]["meaning"].startswith("heads of keys and values")
    assert options["rotary"]["meaning"] == "base of rotary positions (0: none)."


@pytest.mark.parametrize("name", longspan.list_mechanisms())
def test_every_option_means_something(name):
    attention = longspan.build(name, 8, 2, causal="causal" in REGISTRY[name].directions)
    for option in describe.options(attention):
        assert option["meaning"], f"the docstring of {name} does not say what {option['name']} is"
        assert "``" not in option["meaning"]


class Documented(Attention):
    """First line with ``alpha``.

    ``alpha``: maps (..., D) to (..., F). ``beta``: another one. Then ``gamma`` and ``delta`` share a sentence.

    x = y + epsilon
    """


@pytest.mark.parametrize(
    ("option", "meaning"),
    [
        ("alpha", "maps (..., D) to (..., F)."),
        ("beta", "another one."),
        ("gamma", "Then gamma and delta share a sentence."),
        ("epsilon", "x = y + epsilon"),
        ("zeta", ""),
    ],
)
def test_meanings_are_the_docstrings_words(option, meaning):
    assert describe.meaning(Documented, option) == meaning


def test_softmax_counts_are_those_of_its_formula():
    dim = 12
    for count in describe.counts(longspan.build("softmax", dim, 3), inner=7, tokens=(11, 256, 8191)):
        n = count.tokens
        assert count.projections == 2 * 4 * n * dim**2
        assert count.mixing == 2 * 2 * n**2 * dim
        assert count.feedforward == 2 * 2 * n * dim * 7
        # Keys and values in float32, and one int64 for the length.
        assert count.state == 2 * n * dim * 4 + 8
        assert count.measured == (n <= 4096)


@pytest.mark.parametrize("spec", ["linear", "linear(rotary=100.0)", "kernel"])
def test_continued_counts_equal_measured_ones(spec):
    attention = longspan.build(spec, 8, 2)
    (count,) = describe.counts(attention, tokens=(16384,))
    assert not count.measured
    assert (count.projections, count.mixing) == describe._flops(attention, 16384)


def test_what_goes_from_token_to_token_is_watched_up_to_1024(monkeypatch):
    attention = longspan.build("softmax", 8, 2)
    watched = describe.counts(attention, tokens=(256, 4096))
    monkeypatch.setattr(describe, "STEPWISE", 0)
    continued = describe.counts(attention, tokens=(256, 4096))
    assert [count.measured for count in continued] == [True, False]
    assert [count.mixing for count in continued] == [count.mixing for count in watched]
    monkeypatch.undo()
    calls = describe._calls()
    with calls:
        longspan.build("sac", 8, 2)(torch.randn(1, 64, 8))
    assert calls.made >= describe.STEPWISE * 64


def test_a_pattern_counts_the_products_of_its_blocks():
    # Blocks of 32: each of 16 rows meets its own block and, but for the first, the one before.
    (count,) = describe.counts(longspan.build("local(window=20)", 24, 3), tokens=(512,))
    assert count.mixing == 2 * (8 + 8) * 3 * (16 + 15) * 32**2
    # 16 classes of 16 tokens.
    (count,) = describe.counts(longspan.build("sparse(pattern='strided(16)')", 24, 3), tokens=(256,))
    assert count.mixing == 2 * (8 + 8) * 3 * 16 * 16**2


def test_linear_costs_linear_time_and_a_constant_state():
    first, second = describe.counts(longspan.build("linear", 8, 2), tokens=(2048, 4096))
    assert second.mixing == 2 * first.mixing
    assert second.state == first.state == longspan.states.nbytes(longspan.build("linear", 8, 2).init_state(1))


def test_bidirectional_attention_has_no_state():
    (count,) = describe.counts(longspan.build("linear", 8, 2, causal=False), tokens=(29,))
    assert count.state is None


class Peeking(Attention):
    """Looks at its input before it decides what to do, so that it cannot run on tensors without contents."""

    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.out = nn.Linear(dim, dim)

    def start(self, batch, capacity):
        return self.out.weight.new_zeros(batch, 3)

    def attend(self, x, state):
        if x.abs().max().item() == 0:
            return x, state
        return self.out(x @ (x.mT @ x)), state


def test_a_course_that_depends_on_the_input_is_counted_by_running():
    dim = 6
    for count in describe.counts(Peeking(dim, 2), tokens=(29, 4096)):
        assert count.projections == 2 * count.tokens * dim**2
        assert count.mixing == 2 * 2 * count.tokens * dim**2
        assert count.measured == (count.tokens <= 1024)


def test_counting_leaves_the_random_numbers_alone():
    before = torch.get_rng_state()
    describe.facts("softmax(dropout=0.5)", 6, 2)
    assert torch.equal(torch.get_rng_state(), before)


def test_bibtex_entries_are_whole_and_their_keys_differ():
    entries = [citation_module.bibtex(cls) for cls in REGISTRY.values()]
    # Mechanisms of one paper share its entry.
    assert len({entry.partition(",")[0] for entry in entries}) == len({cls.paper for cls in REGISTRY.values()})
    assert len(set(entries)) == len({cls.paper for cls in REGISTRY.values()})
    for cls, entry in zip(REGISTRY.values(), entries, strict=True):
        assert entry.count("{") == entry.count("}")
        assert cls.citation[0] in entry
        assert cls.citation[1] in entry
        assert f"eprint = {{{cls.paper}}}" in entry


def test_bibtex_keys_are_plain_letters():
    class Cited(Attention):
        """Not registered."""

        citation, paper = ("Çağla-Öz, Ada and Other, Bob", "On the Düal of It", 2021), "2101.00001"

    assert citation_module.bibtex(Cited).startswith("@misc{caglaoz2021dual,")


def test_a_grid_shows_each_image_sharp_and_in_order(tmp_path):
    from PIL import Image

    images = torch.arange(5 * 2 * 3, dtype=torch.uint8).view(5, 2, 3)
    png.save(tmp_path / "a.png", images, columns=2, size=5)
    with Image.open(tmp_path / "a.png") as image:
        canvas = np.asarray(image)
    # Factor 3 makes 6x9 pixels of 2x3, and gaps are 4 wide.
    assert canvas.shape == (3 * 10 + 4, 2 * 13 + 4)
    for i, picture in enumerate(images.numpy()):
        top, left = 4 + i // 2 * 10, 4 + i % 2 * 13
        np.testing.assert_array_equal(canvas[top : top + 6, left : left + 9], picture.repeat(3, 0).repeat(3, 1))


def test_colors_stay_and_large_images_are_not_enlarged(tmp_path):
    from PIL import Image

    images = torch.randint(256, (3, 7, 5, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    png.save(tmp_path / "a.png", images, size=7)
    with Image.open(tmp_path / "a.png") as image:
        canvas = np.asarray(image)
    assert canvas.shape == (2 * 11 + 4, 2 * 9 + 4, 3)
    np.testing.assert_array_equal(canvas[4:11, 13:18], images[1].numpy())
    assert list(tmp_path.iterdir()) == [tmp_path / "a.png"]


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 3, 3), torch.zeros(3, 3, dtype=torch.uint8), torch.zeros(0, 3, 3).byte()]
)
def test_other_things_are_no_pictures(images, tmp_path):
    with pytest.raises(ValueError, match="images must be uint8"):
        png.save(tmp_path / "a.png", images)


def test_places_that_cannot_be_written_are_refused_at_once(tmp_path, monkeypatch):
    for name, message in (("a.gif", "end in .png"), ("none/a.png", "no folder"), ("d.png", "Is a directory")):
        (tmp_path / "d.png").mkdir(exist_ok=True)
        with pytest.raises(ValueError, match=message):
            png.check(tmp_path / name)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot make the folder"):
        png.claim_folder(tmp_path / "file" / "below")

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    with pytest.raises(ValueError, match="cannot write into .*No space left"):
        png.check(tmp_path / "a.png")
    with pytest.raises(ValueError, match="cannot write into"):
        png.claim_folder(Path(tmp_path))


@pytest.mark.parametrize("name", ["digits", "mnist", "cifar10"])
def test_shapes_are_those_of_the_data(name):
    folder = SHARED / name
    if name != "digits" and not folder.is_dir():
        pytest.skip(f"no {name} files next to the repository")
    found = data.load(name if name == "digits" else f"{name}:{folder}")
    assert trained.SHAPES[name] == (found.grid, found.vocab)


@pytest.mark.parametrize(
    ("spec", "calls", "tokens"),
    [
        ("synthesizer(kind='random', length=64)", {"whole sequences", "steps"}, [64]),
        ("reformer(chunk=4, buckets=4, rounds=1, published=True)", {"whole sequences"}, [300]),
        ("informer(published=True)", {"whole sequences"}, [300]),
    ],
)
def test_what_has_a_longest_sequence_or_no_state_is_described_too(spec, calls, tokens):
    attention = longspan.build(spec, 8, 2)
    assert [row.tokens for row in describe.counts(attention, tokens=(300,))] == tokens
    assert set(dispatch.probe_backends(spec, 8, 2, causal=True)["calls"]) == calls
