"""Pictures for light and for dark pages."""

from pathlib import Path

import pytest

from longspan_lab._utils import palette, plots

pytest.importorskip("matplotlib", reason="the pictures are drawn with matplotlib: pip install longspan[plot]")

from matplotlib.colors import to_rgb
from PIL import Image


def luminance(color):
    """The relative luminance of WCAG 2, from 0 to 1."""
    parts = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in to_rgb(color))
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def on_dark(name):
    return palette.on_dark((*to_rgb(name), 1.0))[:3]


COLORS = [*palette.TABLE, *palette.IMPLEMENTATIONS.values(), palette.BASELINE, "black"]


@pytest.mark.parametrize("name", dict.fromkeys(COLORS))
def test_each_color_stands_out_on_a_dark_page(name):
    assert contrast(on_dark(name), palette.BACKGROUND) >= 3


def test_no_color_of_other_series_belongs_to_one_mechanism_alone():
    assert palette.OTHERS == tuple(color for color, names in palette.TABLE.items() if len(names) > 1)


def test_colors_stay_apart_on_a_dark_page():
    assert len({on_dark(name) for name in palette.TABLE}) == len(palette.TABLE)


@pytest.fixture
def figure():
    figure, axis = plots.pyplot().subplots(figsize=(3, 2))
    axis.plot([0, 1], [0, 1], "o-", color=palette.color("linear"), markerfacecolor="white", label="linear")
    axis.bar([0.5], [0.5], color=palette.color("softmax"))
    axis.scatter([0.2], [0.8], color=palette.color("gla"))
    axis.set(title="a title", xlabel="tokens")
    axis.legend()
    return figure


def test_everything_in_a_dark_figure_can_be_seen(figure):
    figure.canvas.draw()
    plots.darken(figure)
    (axis,) = figure.axes
    (line,), texts = (
        axis.get_lines(),
        [axis.title, axis.xaxis.label, *axis.get_xticklabels(), *axis.legend_.get_texts()],
    )
    (bar,), (marks,) = axis.patches, axis.collections
    assert to_rgb(figure.get_facecolor()) == pytest.approx(to_rgb(palette.BACKGROUND))
    assert to_rgb(line.get_markerfacecolor()) == pytest.approx(to_rgb(palette.BACKGROUND))
    seen = [*(text.get_color() for text in texts), line.get_color(), bar.get_facecolor(), *marks.get_facecolor()]
    assert all(contrast(color, palette.BACKGROUND) >= 3 for color in seen)


def test_a_picture_is_written_for_both_pages(figure, tmp_path):
    path = tmp_path / "one.png"
    plots.save(plots.pyplot(), figure, path, dark=True)
    pages = {file.name: Image.open(file).convert("RGB") for file in (path, plots.dark_path(path))}
    assert sorted(pages) == ["one-dark.png", "one.png"]
    assert pages["one.png"].size == pages["one-dark.png"].size
    # The margin has the color of the page.
    assert pages["one.png"].getpixel((0, 0)) == (255, 255, 255)
    assert pages["one-dark.png"].getpixel((0, 0)) == tuple(round(255 * part) for part in to_rgb(palette.BACKGROUND))


def test_a_picture_is_written_for_light_pages_unless_asked(figure, tmp_path):
    plots.save(plots.pyplot(), figure, tmp_path / "one.png")
    assert [path.name for path in Path(tmp_path).iterdir()] == ["one.png"]
