"""Hourly time series, standardized by their training part, in three consecutive parts.

| name | numbers | training / validation / test |
|---|---|---|
| ``ett`` | ETTh1: six loads and the oil temperature of an electricity transformer, hourly; downloaded once | hours 0 to 8639, 2880 more, 2880 more: 12, 4 and 4 months of 30 days |
| ``ett:FILE``, ``ett:FOLDER`` | the same from a file, or from ETTh1.csv in a folder; other hourly tables with a date do as well | the same |
| ``synthetic`` | seven series of days, weeks and drift, made from the seed | 60, 20 and 20 % |
"""  # noqa: E501 - a table's rows cannot be broken

import csv
import hashlib
import math
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

import torch
from torch import Tensor

from longspan._utils import atomic_io
from longspan._utils.cache_dirs import cache_folder, expanded
from longspan._utils.spec import known
from longspan.data.download import fetch, read

ETT = ("https://raw.githubusercontent.com/zhouhaoyi/ETDataset/main/ETT-small/ETTh1.csv",)
ETT_SHA256 = "f18de3ad269cef59bb07b5438d79bb3042d3be49bdeecf01c1cd6d29695ee066"
MONTH = 30 * 24
# Hours after which the training, the validation and the test part end.
ETT_ENDS = (12 * MONTH, 16 * MONTH, 20 * MONTH)
SPLITS = ("train", "validation", "test")
SYNTHETIC_HOURS = 1200


@dataclass(frozen=True, eq=False)
class Series:
    """Several series of hourly values, with mean 0 and standard deviation 1 over the training part."""

    name: str
    names: tuple[str, ...]
    """what each series is called"""
    values: Tensor = field(repr=False)
    """(T,C) float32, standardized"""
    times: Tensor = field(repr=False)
    """(T,4) float32: hour of the day, day of the week, of the month and of the year, each from -0.5 to 0.5"""
    ends: tuple[int, int, int]
    """hours after which the training, the validation and the test part end"""
    checksum: str
    """sha256 (hex) of the file without a byte order mark; "" for what a seed makes"""

    def windows(self, split: str, reads: int, horizon: int) -> range:
        """The hours at which forecasts of a split begin, from ``reads`` hours before to ``horizon`` hours after.

        Forecast hours are in the split; input hours may be in the previous one, as published.

        Raises ValueError for a split that does not exist, and one too short for a single forecast.
        """
        part = SPLITS.index(known(split, dict.fromkeys(SPLITS), "split"))
        begin = max(self.ends[part - 1] if part else 0, reads)
        found = range(begin, self.ends[part] - horizon + 1)
        if not found:
            raise ValueError(
                f"{split} of {self.name} ends after {self.ends[part]} hours, too few to forecast {horizon} hours "
                f"from {reads}; pass a shorter horizon"
            )
        return found

    def only(self, name: str) -> "Series":
        """One of the series, or all of them for "all". Raises ValueError for a name that there is not."""
        if name == "all":
            return self
        at = self.names.index(known(name, dict.fromkeys(self.names), "series"))
        return Series(self.name, (name,), self.values[:, at : at + 1], self.times, self.ends, self.checksum)


def load(name: str, seed: int = 0) -> Series:
    """The series of one of the names in the table above; ``seed`` makes the synthetic ones.

    Raises ValueError for an unknown name, a missing or foreign file, and a download that fails; ImportError where pooch
    is missing for a download.
    """
    kind, source = parsed(name)
    if kind == "synthetic":
        return synthetic(seed)
    if source:
        path = expanded(source)
        path = path / "ETTh1.csv" if path.is_dir() else path
    else:
        path = fetch(ETT, ETT_SHA256, cache_folder() / "ett")
    return table(name, path)


def parsed(name: str) -> tuple[str, str]:
    """Kind and path of a name in the table above. Raises ValueError for another."""
    kind, colon, source = name.partition(":")
    known(kind, {"ett": 0, "synthetic": 0}, "series data")
    if colon and (kind == "synthetic" or not source):
        raise ValueError(f"data={name}: write ett, ett:FILE, ett:FOLDER or synthetic")
    return kind, source


def table(name: str, path: Path) -> Series:
    """The series of a file of comma-separated values, whose first column is a date and the others numbers.

    Raises ValueError for a missing file, another heading, fields that are no numbers, hours that do not follow one
    another, a series that never changes in training, and fewer hours than the three parts have.
    """
    data = atomic_io.without_mark(read(path, ETT_SHA256))
    heading, *rows = csv.reader(data.decode("utf-8", errors="replace").splitlines() or [""])
    if len(heading) < 2 or heading[0] != "date":
        raise ValueError(f"{path} begins with {','.join(heading)[:40]!r}; expected date,NAME,NAME,...")
    if len(rows) < ETT_ENDS[-1]:
        raise ValueError(f"{path} has {len(rows)} hours; training, validation and test together are {ETT_ENDS[-1]}")
    dates, numbers = [], []
    for line, row in enumerate(rows, start=2):
        try:
            dates.append(datetime.fromisoformat(row[0]))
            numbers.append([float(word) for word in row[1:]])
        except (ValueError, IndexError) as error:
            raise ValueError(f"{path}, line {line}: {error}; expected a date and {len(heading) - 1} numbers") from error
        if len(row) != len(heading) or not all(map(math.isfinite, numbers[-1])):
            raise ValueError(f"{path}, line {line}: expected a date and {len(heading) - 1} finite numbers")
        if len(dates) > 1 and dates[-1] - dates[-2] != timedelta(hours=1):
            raise ValueError(f"{path}, line {line}: {dates[-1]} does not come an hour after {dates[-2]}")
    checksum = hashlib.sha256(data).hexdigest()
    values = torch.tensor(numbers, dtype=torch.float64)
    flat = values[: ETT_ENDS[0]].std(0) == 0
    if flat.any():
        constant = heading[1 + int(flat.nonzero()[0])]
        raise ValueError(f"{path}: {constant} is constant in the training part, so it cannot be standardized")
    return Series(name, tuple(heading[1:]), standardized(values, ETT_ENDS[0]), marks(dates), ETT_ENDS, checksum)


def standardized(values: Tensor, train: int) -> Tensor:
    """(T,C) less the mean of the first ``train`` hours, over their deviation: -> (T,C) float32."""
    part = values[:train]
    return ((values - part.mean(0)) / part.std(0, correction=0)).float()


def marks(dates: list[datetime]) -> Tensor:
    """(T,4) float32: hour of the day, day of the week, of the month and of the year, each from -0.5 to 0.5."""
    found = [
        (date.hour / 23, date.weekday() / 6, (date.day - 1) / 30, (date.timetuple().tm_yday - 1) / 365)
        for date in dates
    ]
    return torch.tensor(found) - 0.5


def synthetic(seed: int) -> Series:
    """Seven series, each a daily and a weekly wave with a random phase, a random walk and noise, from 2016-07-01."""
    random = torch.Generator().manual_seed(seed)
    hours = torch.arange(SYNTHETIC_HOURS, dtype=torch.float64)[:, None]
    phase = 2 * math.pi * torch.rand(2, 7, generator=random, dtype=torch.float64)
    noise = torch.randn(2, SYNTHETIC_HOURS, 7, generator=random, dtype=torch.float64)
    day, week = (torch.sin(2 * math.pi * hours / length + phase[i]) for i, length in enumerate((24, 168)))
    values = 2 * day + week + 0.05 * noise[0].cumsum(0) + 0.3 * noise[1]
    begin = datetime(2016, 7, 1)
    dates = [begin + timedelta(hours=hour) for hour in range(SYNTHETIC_HOURS)]
    ends = (SYNTHETIC_HOURS * 3 // 5, SYNTHETIC_HOURS * 4 // 5, SYNTHETIC_HOURS)
    names = ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
    return Series("synthetic", names, standardized(values, ends[0]), marks(dates), ends, "")
