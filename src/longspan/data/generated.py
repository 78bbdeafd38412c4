"""Generated data: pairs (dates to ISO 8601, reversed words) and labeled texts (the more frequent letter)."""

import datetime
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

COUNT = 20_000
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
UNITS = (
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
    "ninth",
    "tenth",
    "eleventh",
    "twelfth",
    "thirteenth",
    "fourteenth",
    "fifteenth",
    "sixteenth",
    "seventeenth",
    "eighteenth",
    "nineteenth",
)
FIRST, LAST = datetime.date(1950, 1, 1), datetime.date(2049, 12, 31)
# Written forms of a date; each part in braces has several spellings.
FORMS = (
    "{day} {month} {year}",
    "{month} {nth}, {year}",
    "the {nth} of {month}, {year}",
    "{weekday}, {day} {month} {year}",
    "{weekday} {month} {nth} {year}",
    "{weekday} the {nth} of {month} '{short}",
    "{day} {month} '{short}",
    "{d}.{m}.{year}",
    "{d}.{m}.{short}",
    "{m}/{d}/{year}",
    "{m}/{d}/{short}",
    "{year}/{m}/{d}",
    "{dd}-{month}-{year}",
    "{year}{mm}{dd}",
    "{year}, {month} {day}",
    "{month} {year}, the {nth}",
)


def dates(seed: int = 0, count: int = COUNT) -> Iterator[tuple[str, str]]:
    """Yield ``count`` dates from 1950 to 2049, each in one of many forms and in ISO 8601.

    With dots the day comes first; with slashes the month, unless the year does. Two-digit years are those from 1950 to
    2049.

    >>> list(dates(0, 3))[0]
    ('11-June-2034', '2034-06-11')
    """
    draw = _draws(seed)
    days = (LAST - FIRST).days + 1
    for _ in range(count):
        date = FIRST + datetime.timedelta(draw(range(days)))
        form = draw(FORMS)
        text = form.format_map(_Parts(date, draw))
        yield draw((str, str, str.lower, str.upper))(text), date.isoformat()


def reverse(seed: int = 0, count: int = COUNT) -> Iterator[tuple[str, str]]:
    """Yield ``count`` random words of 4 to 16 letters, each with its reverse.

    >>> all(target == source[::-1] for source, target in reverse(0, 100))
    True
    """
    draw = _draws(seed)
    for _ in range(count):
        word = "".join(draw("abcdefghijklmnopqrstuvwxyz") for _ in range(draw(range(4, 17))))
        yield word, word[::-1]


def majority(seed: int = 0, count: int = 4000) -> Iterator[tuple[str, str]]:
    """Yield ``count`` texts of 5 to 25 letters a and b, each with the more frequent letter.

    >>> list(majority(0, 2))
    [('baababaabbbabbabbbbabbb', 'b'), ('aabbbababbababb', 'b')]
    """
    draw = _draws(seed)
    for _ in range(count):
        letters = "".join(draw("ab") for _ in range(draw(range(5, 26, 2))))
        yield letters, max("ab", key=letters.count)


LABELED: Mapping[str, Callable[[], Iterator[tuple[str, str]]]] = {"majority": majority}
TASKS: Mapping[str, Callable[[], Iterator[tuple[str, str]]]] = {"dates": dates, "reverse": reverse}


class _Parts(dict):
    """The parts of a date by name, each drawn on access."""

    def __init__(self, date: datetime.date, draw: Callable[[Any], Any]):
        self.date, self.draw = date, draw

    def __missing__(self, name: str) -> str:
        day, month, year = self.date.day, self.date.month, self.date.year
        full = MONTHS[month - 1]
        match name:
            case "year":
                return str(year)
            case "short":
                return f"{year % 100:02}"
            case "month":
                return self.draw((full, full, full[:3]))
            case "weekday":
                weekday = WEEKDAYS[self.date.weekday()]
                return self.draw((weekday, weekday[:3]))
            case "nth":
                return self.draw((f"{day}{_ending(day)}", _ordinal(day)))
            case "day" | "d":
                return self.draw((str(day), f"{day:02}"))
            case "m":
                return self.draw((str(month), f"{month:02}"))
            case "dd":
                return f"{day:02}"
            case "mm":
                return f"{month:02}"
        raise KeyError(name)


def _ending(day: int) -> str:
    return "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")


def _ordinal(day: int) -> str:
    """A day of a month in words: first, twentieth, thirty-first."""
    if day < 20:
        return UNITS[day - 1]
    if day % 10 == 0:
        return "twentieth" if day == 20 else "thirtieth"
    return f"{'twenty' if day < 30 else 'thirty'}-{UNITS[day % 10 - 1]}"


def _draws(seed: int) -> Callable[[Any], Any]:
    """A function that draws from a sequence by ``Random.random`` only, which is stable across Python versions."""
    dice = random.Random(seed)
    return lambda sequence: sequence[int(dice.random() * len(sequence))]
