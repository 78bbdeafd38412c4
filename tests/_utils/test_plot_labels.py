"""Labels in a picture: next to their marks, inside the axis, without overlap."""

from itertools import combinations

import pytest

pytest.importorskip("matplotlib", reason="pictures: pip install longspan[plot]")

from matplotlib.text import Text

from longspan_lab._utils import plot_labels, plots


@pytest.fixture
def crowd():
    """Twelve marks of which many lie nearly on each other, two at the very edge; -> axis, names, places, sizes."""
    plt = plots.pyplot()
    figure, axis = plt.subplots(figsize=(6, 4))
    x = [1.0, 1.0, 1.1, 1.1, 1.2, 1.2, 1.3, 1.3, 1.4, 5.0, 10.0, 10.0]
    y = [50.0, 50.1, 50.0, 50.2, 50.1, 50.3, 50.0, 50.2, 50.1, 20.0, 0.0, 100.0]
    axis.set(xlim=(0, 10), ylim=(0, 100))
    names = [f"mechanism {i}" for i in range(len(x))]
    yield axis, names, x, y, [30.0] * 9 + [900.0] + [30.0] * 2
    plt.close(figure)


def boxes(axis, names):
    found = {one.get_text(): one for one in axis.texts}
    assert set(found) == set(names)
    # Of the words alone, without the line.
    return {name: plot_labels._box(Text.get_window_extent(found[name])) for name in names}


def test_no_name_covers_another_or_leaves_the_axis(crowd):
    axis, names, *_ = crowd
    plot_labels.put(*crowd)
    axis.figure.canvas.draw()
    found = boxes(axis, names)
    for one, other in combinations(names, 2):
        assert found[one].covers(found[other]) == 0, (one, other)
    inside = plot_labels._box(axis.bbox)
    for name, box in found.items():
        assert inside.covers(box) == pytest.approx((box.right - box.left) * (box.top - box.bottom)), name


def test_names_that_went_far_are_led_back_to_their_marks_and_a_lonely_one_is_not(crowd):
    axis, names, x, y, _ = crowd
    plot_labels.put(*crowd)
    put = {one.get_text(): one for one in axis.texts}
    assert {put[name].xy for name in names} == set(zip(x, y, strict=True))
    assert put["mechanism 9"].arrow_patch is None
    assert any(put[name].arrow_patch is not None for name in names)


def test_no_name_lies_on_a_large_mark(crowd):
    axis, names, *_ = crowd
    plot_labels.put(*crowd)
    axis.figure.canvas.draw()
    (a, b), radius = axis.transData.transform((5.0, 20.0)), (900 / 3.14159) ** 0.5 * axis.figure.dpi / 72
    mark = plot_labels.Box(a - radius, b - radius, a + radius, b + radius)
    assert all(mark.covers(box) == 0 for box in boxes(axis, names).values())
