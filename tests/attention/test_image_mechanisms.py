"""Attention over images: axes and local blocks against their coordinates, in the order of generation."""

import pytest
import torch
from test_sparse_mechanisms import agree, build, data, dense, heads_of, pairs, past, product, softmax

from longspan import patterns
from longspan.states.cache import KeyValues

N, C = 37, 7  # the last row of pixels is cut short


def column(i, j):
    return i % C == j % C


def row(i, j):
    return i // C == j // C


class TestAxial:
    @pytest.mark.parametrize("causal", [True, False])
    def test_it_equals_its_coordinates(self, causal):
        order = past(N) if causal else torch.ones(N, N, dtype=torch.bool)
        for layer, line in enumerate((column, row, column)):
            agree(build(f"axial(width={C})", causal=causal, layer=layer), data(N), pairs(N, line) & order)
        cross = pairs(N, lambda i, j: column(i, j) or row(i, j)) & order
        agree(build(f"axial(width={C}, kind='cross')", causal=causal), data(N), cross)

    @pytest.mark.parametrize("causal", [True, False])
    def test_the_sum_is_of_two_softmaxes(self, causal):
        module, x, record = build(f"axial(width={C}, kind='summed')", causal=causal), data(N), {}
        order = past(N) if causal else torch.ones(N, N, dtype=torch.bool)
        qkv = tuple(heads_of(module, x, "query", "key", "value"))
        o = softmax(pairs(N, column) & order, *qkv) + softmax(pairs(N, row) & order, *qkv)
        y, _ = module(x, record=record)
        torch.testing.assert_close(y, module.out(o.transpose(1, 2).flatten(-2)), rtol=0, atol=1e-10)
        torch.testing.assert_close(record["matrix"].sum(-1), torch.full((2, 2, N), 2.0).double())
        assert record["mask"][0, 1].equal(pairs(N, lambda i, j: column(i, j) or row(i, j)) & order)
        assert sorted(record) == ["mask", "matrix"]

    def test_whole_lines_are_attention_on_reshaped_batches(self):
        x = data(5 * C)
        grid = x.view(2, 5, C, 6)
        for layer, lines in enumerate((grid.transpose(1, 2), grid)):
            module = build(f"axial(width={C})", causal=False, layer=layer)
            alone = lines.flatten(0, 1)
            full = torch.ones(alone.shape[1], alone.shape[1], dtype=torch.bool)
            expected = dense(module, alone, full).unflatten(0, (2, -1))
            expected = (expected if layer else expected.transpose(1, 2)).flatten(1, 2)
            torch.testing.assert_close(module(x)[0], expected, rtol=0, atol=1e-10)

    def test_causal_columns_are_the_strided_step(self):
        other = build(f"sparse_transformer(block={C}, integration='interleaved')", layer=1)
        assert build(f"axial(width={C})").sees == other.sees

    def test_what_two_steps_reach(self):
        """Without direction everything; causally what is above and left: the rest is why the paper shifts rows."""
        columns, rows = (build(f"axial(width={C})", causal=False, layer=i).sees.dense(5 * C)[0] for i in (0, 1))
        assert product(rows, columns).all()
        assert product(columns, rows).all()
        columns, rows = (build(f"axial(width={C})", layer=i).sees.dense(N)[0] for i in (0, 1))
        assert product(columns, rows).equal(pairs(N, lambda i, j: j // C <= i // C and j % C <= i % C))

    def test_one_row_or_one_column_is_causal_softmax(self):
        agree(build("axial(width=1)"), data(N), past(N))
        agree(build("axial(width=41)", layer=1), data(N), past(N))
        agree(build("axial(width=1, kind='cross')"), data(N), past(N))

    def test_layers_of_rows_keep_one_row(self):
        assert build(f"axial(width={C})", layer=1).init_state(2).keys.shape[2] == C
        assert isinstance(build(f"axial(width={C})").init_state(2), KeyValues)

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (
                "axial(kind='lines')",
                "unknown kind of axial attention 'lines'; known: cross, sequential, shifted, summed",
            ),
            ("axial(width=0)", "width=0 must be a whole number of at least 1"),
        ],
    )
    def test_bad_options_are_refused(self, spec, message):
        with pytest.raises(ValueError, match=message):
            build(spec)


SHAPE, BLOCK, MEMORY = (6, 12), (2, 3), (3, 2)  # pixels of an image, of a block, and seen around one


def rectangle(i, j):
    """What a query at raster pixel i may see of j, drawn before or after: from coordinates alone."""
    (y, x), (v, u) = divmod(i, SHAPE[1]), divmod(j, SHAPE[1])
    top, left = y // BLOCK[0] * BLOCK[0], x // BLOCK[1] * BLOCK[1]
    above = top - MEMORY[0] <= v < top and left - MEMORY[1] <= u < left + BLOCK[1] + MEMORY[1]
    beside = top <= v < top + BLOCK[0] and left - MEMORY[1] <= u < left + BLOCK[1]
    return above or beside


class TestImage:
    spec = f"image(kind='2d', block={BLOCK}, memory={MEMORY}, width={SHAPE[1]})"

    @pytest.mark.parametrize(("block", "memory"), [(5, 3), (4, 4), (3, 0), (7, 11)])
    def test_one_dimension_equals_the_papers_memory(self, block, memory):
        expected = pairs(N, lambda i, j: j >= i // block * block - memory) & past(N)
        agree(build(f"image(block={block}, memory={memory})"), data(N), expected)
        assert build(f"image(block={block}, memory={memory})").init_state(1).keys.shape[2] == block + memory

    def test_two_dimensions_equal_their_rectangles(self):
        order = patterns.block_order(*SHAPE, BLOCK)
        n = len(order)
        expected = pairs(n, rectangle)[order][:, order] & past(n)
        agree(build(self.spec), data(n), expected)

    def test_it_is_causal_in_the_order_of_blocks_and_not_in_raster_order(self):
        module, order = build(self.spec), patterns.block_order(*SHAPE, BLOCK)
        seen = module.sees.dense(len(order))[0]
        assert not seen.triu(1).any()
        place = order.argsort()
        assert seen[place][:, place].triu(1).any()
        flat = build("image(kind='2d', block=(1, 3), memory=(3, 2), width=12)").sees.dense(len(order))[0]
        place = patterns.block_order(*SHAPE, (1, 3)).argsort()
        assert not flat[place][:, place].triu(1).any()

    def test_one_block_that_covers_the_image_is_causal_softmax(self):
        agree(build(f"image(block={N}, memory=0)"), data(N), past(N))
        agree(build("image(kind='2d', block=(6, 12), memory=(0, 0), width=12)"), data(72), past(72))

    def test_blocks_of_one_pixel_are_a_band(self):
        agree(build("image(block=1, memory=4)"), data(N), patterns.band(4).dense(N)[0])

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("image(kind='3d')", "unknown kind of image attention '3d'; known: 1d, 2d"),
            ("image(width=8)", "width=8 belongs to kind='2d', not '1d', which knows no rows"),
            ("image(block=(2, 3))", r"block=\(2, 3\) must be a whole number of at least 1"),
            ("image(kind='2d', width=8)", r"block=128 must be \(height, width\)"),
            ("image(kind='2d', block=(2, 4), width=8)", r"memory=128 must be \(height, width\)"),
            ("image(kind='2d', block=(2, 4), memory=(1, 1))", "width=0 must be a whole number of at least 1"),
            (
                "image(kind='2d', block=(2, 3), memory=(1, 1), width=8)",
                "width=8 is not a multiple of the block's width 3",
            ),
        ],
    )
    def test_bad_options_are_refused(self, spec, message):
        with pytest.raises(ValueError, match=message):
            build(spec)

    def test_there_is_no_bidirectional_form(self):
        with pytest.raises(ValueError, match="image has no bidirectional form; it has: causal"):
            build("image", causal=False)
