"""Rows that read a text in its order, and where its documents begin."""

import pytest
import torch

from longspan.data import load
from longspan.data.streams import Stream, row_windows, stretches


@pytest.fixture
def folder(tmp_path):
    """Three files of 70, 50 and 80 bytes: 180 for training, 10 for validation, 10 for the test."""
    for name, size in (("a", 70), ("b", 50), ("c", 80)):
        (tmp_path / f"{name}.txt").write_bytes(bytes(32 + i % 90 for i in range(size)))
    return tmp_path


def test_documents_begin_where_files_do(folder):
    data = load(f"text:{folder}", 7)
    found = {split: begins.tolist() for split, begins in data.documents.items()}
    assert found == {"train": [0, 70, 120], "validation": [0], "test": [0]}
    (folder / "d.txt").write_bytes(b"x" * 12)
    data = load(f"text:{folder}", 7)
    # 192, 10, 10 bytes: the last file begins in the validation part.
    found = {split: begins.tolist() for split, begins in data.documents.items()}
    assert found == {"train": [0, 70, 120], "validation": [0, 8], "test": [0]}
    assert data.splits["validation"][8:].tolist() == [ord("x")] * 2


def test_an_empty_file_is_no_document(folder):
    (folder / "b2.txt").write_bytes(b"")
    assert load(f"text:{folder}", 7).documents["train"].tolist() == [0, 70, 120]


def test_rows_go_on_where_they_were_and_into_the_next_ones_stretch():
    for count, batch, world in ((23, 3, 1), (23, 2, 3), (6, 2, 3)):
        rows = torch.stack(
            [
                torch.stack([row_windows(count, index, batch, rank, world) for rank in range(world)], 1).flatten()
                for index in range(2 * count)
            ]
        )
        assert ((rows[1:] - rows[:-1]) % count == 1).all()
        assert rows[0].tolist() == [row * count // (batch * world) for row in range(batch * world)]
        # At each moment all rows are at different places, and each reads all.
        assert all(len(set(row.tolist())) == batch * world for row in rows)
        assert all(set(rows[:count, i].tolist()) == set(range(count)) for i in range(batch * world))


def test_ranks_have_every_row_of_one_process_with_the_double_batch():
    for index in range(9):
        alone = row_windows(23, index, 6)
        for rank in (0, 1):
            assert row_windows(23, index, 3, rank, 2).tolist() == alone[rank::2].tolist()


def test_too_many_rows():
    with pytest.raises(ValueError, match=r"12 rows \(batch x devices\) .* 11 windows"):
        row_windows(11, 0, 6, 1, 2)


def test_inputs_are_the_tokens_before_and_documents_begin_anew(folder):
    data = load(f"text:{folder}", 7)
    stream, text = Stream(data, "train"), data.splits["train"].long()
    assert stream.count == 25
    stretch = stream.take(torch.tensor([0, 3, 10, 17]))
    for row, begin in enumerate((0, 21, 70, 119)):
        assert stretch.targets[row].tolist() == text[begin : begin + 7].tolist()
    assert stretch.inputs[0].tolist() == [256, *text[:6].tolist()]
    assert stretch.inputs[1].tolist() == text[20:27].tolist()
    assert stretch.inputs[2].tolist() == [256, *text[70:76].tolist()]
    # The third document begins within this row, at its second token.
    assert stretch.inputs[3].tolist() == [text[118].item(), 256, *text[120:125].tolist()]
    assert stretch.fresh.tolist() == [True, False, True, False]
    assert stretch.segments is not None
    assert stretch.segments.tolist() == [[0] * 7] * 3 + [[0] + [1] * 6]
    assert stream.take(torch.tensor([0, 3])).segments is None
    begun = stream.take(torch.tensor([3, 17]), fresh=True)
    assert begun.inputs[:, 0].tolist() == [256, 256]
    assert begun.fresh.tolist() == [True, True]


def test_stretches_are_disjoint_and_all_of_it_where_all_is_asked():
    for count in (1, 5, 18, 29):
        for rows in range(1, min(count, 7) + 1):
            whole = stretches(count, rows, count)
            assert [window for part in whole for window in part] == list(range(count))
            for chosen in range(rows, count):
                some = [window for part in stretches(count, rows, chosen) for window in part]
                assert sorted(set(some)) == some
                assert len(some) == chosen


def test_images_are_no_stream():
    with pytest.raises(ValueError, match="digits contains images"):
        Stream(load("digits"), "train")
    with pytest.raises(ValueError, match="unknown split 'tset'"):
        Stream(load("text:stdlib"), "tset")
