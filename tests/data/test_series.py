"""Series: what is known before a forecast, in which part it lies, and what a table of hours must look like."""

import hashlib
from datetime import datetime, timedelta

import pytest
import torch

from data_files import shared
from longspan_lab.data import series
from longspan_lab.data.series import ETT_ENDS, ETT_SHA256, SPLITS

HOURS = ETT_ENDS[-1] + 20
BEGIN = datetime(2016, 7, 1)


def lines() -> list[str]:
    """A table of three series; the second falls from 2 to 1 where training ends."""
    found = ["date,A,B,C"]
    for hour in range(HOURS):
        step = (hour % 2) + (2 if hour < ETT_ENDS[0] else 1)
        found.append(f"{BEGIN + timedelta(hours=hour)},{hour % 24},{step},{-0.5 * hour}")
    return found


@pytest.fixture(scope="module")
def content():
    return lines()


@pytest.fixture
def file(content, tmp_path):
    path = tmp_path / "hours.csv"
    path.write_text("\n".join(content) + "\n")
    return path


def test_only_the_training_part_standardizes(file):
    found = series.load(f"ett:{file}")
    assert found.names == ("A", "B", "C")
    assert found.values.shape == (HOURS, 3)
    train = found.values[: ETT_ENDS[0]].double()
    torch.testing.assert_close(train.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-5, rtol=0)
    torch.testing.assert_close(train.std(0, correction=0), torch.ones(3, dtype=torch.float64), atol=1e-5, rtol=0)
    # 2 and 3 by turns have the mean 2.5 and the deviation 0.5.
    assert sorted(found.values[ETT_ENDS[0] :, 1].unique().tolist()) == pytest.approx([-3.0, -1.0])
    assert found.checksum == hashlib.sha256(file.read_bytes()).hexdigest()


def test_dates_are_numbers_from_minus_a_half_to_a_half(file):
    times = series.load(f"ett:{file}").times
    assert times.shape == (HOURS, 4)
    # 2016-07-01 was a Friday and day 183 of its year.
    assert times[0].tolist() == pytest.approx([-0.5, 4 / 6 - 0.5, -0.5, 182 / 365 - 0.5])
    assert times[23, 0] == 0.5
    assert times[24 * 30, 2].item() == pytest.approx(0.5)
    assert times.abs().max() <= 0.5


def test_what_is_foretold_lies_in_its_split_and_what_is_read_may_reach_back(file):
    found = series.load(f"ett:{file}")
    windows = {split: found.windows(split, 48, 24) for split in SPLITS}
    assert (windows["train"][0], windows["train"][-1] + 24) == (48, 8640)
    assert (windows["validation"][0], windows["validation"][-1] + 24) == (8640, 11520)
    # 2880 - 24 + 1 of them, as published.
    assert (windows["test"][0], windows["test"][-1] + 24, len(windows["test"])) == (11520, 14400, 2857)
    with pytest.raises(ValueError, match="shorter horizon"):
        found.windows("test", 48, 2881)
    with pytest.raises(ValueError, match="unknown split 'tset'"):
        found.windows("tset", 48, 24)


@pytest.mark.full
def test_one_series_is_that_column(file):
    found = series.load(f"ett:{file}")
    one = found.only("B")
    assert one.names == ("B",)
    assert torch.equal(one.values, found.values[:, 1:2])
    assert found.only("all") is found
    with pytest.raises(ValueError, match="unknown series 'OT'"):
        found.only("OT")


def replaced(content, number, line):
    return [*content[:number], line, *content[number + 1 :]]


MISTAKES = {
    "empty": (lambda rows: [], "hours.csv begins with ''; expected date,NAME"),
    "heading": (lambda rows: replaced(rows, 0, "time,A,B,C"), "begins with 'time,A,B,C'; expected date,NAME"),
    "short": (lambda rows: rows[:14000], "has 13999 hours; training, validation and test together are 14400"),
    "date": (lambda rows: replaced(rows, 9, "July,1,2,3"), "line 10: Invalid isoformat string: 'July'"),
    "word": (lambda rows: replaced(rows, 9, rows[9].replace(",8,", ",x,")), "line 10: could not convert string"),
    "fewer": (lambda rows: replaced(rows, 9, rows[9].rpartition(",")[0]), "line 10: expected a date and 3 finite"),
    "infinite": (lambda rows: replaced(rows, 9, rows[9].replace(",8,", ",inf,")), "line 10: expected a date and 3"),
    "gap": (lambda rows: [*rows[:9], *rows[10:]], "line 10: 2016-07-01 09:00:00 does not come an hour after"),
    "constant": (
        lambda rows: [rows[0], *(f"{row.split(',')[0]},1,1,{i}" for i, row in enumerate(rows[1:]))],
        "A is constant",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_table_is_refused_with_its_line(name, content, tmp_path):
    change, message = MISTAKES[name]
    path = tmp_path / "hours.csv"
    path.write_text("\n".join(change(content)))
    with pytest.raises(ValueError, match="hours.csv") as caught:
        series.load(f"ett:{path}")
    assert message in str(caught.value)


def test_without_a_file_the_published_one_is_fetched_and_checked(monkeypatch, file):
    asked = []
    monkeypatch.setattr(series, "fetch", lambda *words: asked.append(words) or file)
    assert series.load("ett").names == ("A", "B", "C")
    ((urls, checksum, folder),) = asked
    assert urls == ("https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTh1.csv",)
    assert (checksum, folder.name) == (ETT_SHA256, "ett")


def test_the_published_table():
    found = series.load(f"ett:{shared('ett')}")
    assert found.checksum == ETT_SHA256
    assert found.names == ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
    assert found.values.shape == (17420, 7)


def test_synthetic_series_follow_from_the_seed():
    one, two, other = series.load("synthetic", 3), series.load("synthetic", 3), series.load("synthetic", 4)
    assert torch.equal(one.values, two.values)
    assert not torch.equal(one.values, other.values)
    assert (one.checksum, len(one.names), one.ends) == ("", 7, (720, 960, 1200))
    # A day's wave is in all of them.
    day = (one.values[24:] * one.values[:-24]).mean(0) / one.values.square().mean(0)
    assert (day > 0.5).all()
