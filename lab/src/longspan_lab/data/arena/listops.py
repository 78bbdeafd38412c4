"""ListOps: nested lists of digits under MIN, MAX, MED and SM; the task is to predict the value.

Source: Nangia and Bowman 2018 (1804.06028); the sizes of Tay et al. 2020 (2011.04006), section 2.2.1, by the rules of
google-research/long-range-arena, cd31e5c.
"""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from longspan._utils import atomic_io as files
from longspan._utils.cache_dirs import expanded
from longspan.data.download import read

from .sequences import SPLITS, Arena, Sequences, arena, rows

CLOSE = "]"
OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    # The mean of the two in the middle, truncated.
    "[MED": lambda values: _median(sorted(values)),
    "[SM": lambda values: sum(values) % 10,
}
OPENS = tuple(OPERATORS)
SYMBOLS = (*map(str, range(10)), *OPERATORS, CLOSE)
NUMBERS = {symbol: number for number, symbol in enumerate(SYMBOLS)}
# LRA's: the depth of a tree, the children of a node, and how often a child is a node.
DEPTH, CHILDREN, NODES = 10, 10, 0.25
SHORTEST = 0.25  # of the longest, as LRA's 500 of 2000
PARTS = dict(zip(SPLITS, ("train", "val", "test"), strict=True))
ENDS = (".tsv", ".tsv.gz", ".tsv.xz")


def load(source: str, length: int, examples: int, tests: int, seed: int) -> Arena:
    """Expressions of at most ``length`` tokens, without parentheses: those that ``made`` draws, or a folder's.

    ``listops:FOLDER`` has three files, ``NAME_train.tsv``, ``NAME_val.tsv`` and ``NAME_test.tsv``, plain, .gz or .xz,
    in the layout of LRA or in that of the publication's own test set (see ``parse``); longer expressions are cut, as by
    LRA's reader.

    Raises ValueError for another source, missing or ambiguous files, and a line that is no example.
    """
    kind, colon, folder = source.partition(":")
    if source == "made":
        splits = _made(length, {"train": examples, "validation": tests, "test": tests}, seed)
    elif kind == "listops" and colon and folder:
        most = {"train": examples, "validation": tests, "test": tests}
        splits = {split: _read(path, length, most[split]) for split, path in _files(expanded(folder)).items()}
    else:
        raise ValueError(f"listops={source}: expected made, or listops:FOLDER with TSV files")
    return arena(f"listops, {source}", len(SYMBOLS), length, 10, splits)


def evaluate(symbols: list[str]) -> int:
    """The value of an expression without parentheses, such as ``[MAX 2 9 [MIN 4 7 ] 0 ]``.

    >>> evaluate("[MAX 2 9 [MIN 4 7 ] 0 ]".split()), evaluate("[MED 1 8 2 4 ]".split())
    (9, 3)

    Raises ValueError for something else than one whole expression.
    """
    open_: list[tuple[str, list[int]]] = [("", [])]
    for symbol in symbols:
        if symbol in OPERATORS:
            open_.append((symbol, []))
        elif symbol == CLOSE and len(open_) > 1 and open_[-1][1]:
            operator, values = open_.pop()
            open_[-1][1].append(OPERATORS[operator](values))
        elif symbol.isdigit() and len(symbol) == 1:
            open_[-1][1].append(int(symbol))
        else:
            raise ValueError(f"{symbol!r} is not allowed here in the expression {' '.join(symbols[:20])} ...")
    if len(open_) > 1 or len(open_[0][1]) != 1:
        raise ValueError(f"{' '.join(symbols[:20])} ... is not a complete expression")
    return open_[0][1][0]


def tree(dice: random.Random, most: int) -> list[str]:
    """An expression of more than one token by LRA's rules; [] for one of more than ``most`` tokens."""
    symbols: list[str] = []
    return symbols if _grow(dice, 1, symbols, most) else []


def _grow(dice: random.Random, depth: int, symbols: list[str], most: int) -> bool:
    """Append an operator with its children, unless there would be too many tokens in the end."""
    children = 2 + _below(dice, CHILDREN - 1)
    symbols.append(OPENS[_below(dice, len(OPENS))])
    for _ in range(children):
        if depth + 1 < DEPTH and dice.random() < NODES:
            if not _grow(dice, depth + 1, symbols, most):
                return False
        else:
            symbols.append(SYMBOLS[_below(dice, 10)])
        # So large a tree is not wanted, and most of its tokens are never drawn.
        if len(symbols) + depth > most:
            return False
    symbols.append(CLOSE)
    return True


def parse(line: str, where: str) -> tuple[list[str], int] | None:
    """The symbols and the value of a line, with a tab between them in either order; None for LRA's header.

    Raises ValueError for a line of another kind.
    """
    columns = line.rstrip("\r\n").split("\t")
    if columns == ["Source", "Target"]:
        return None
    if len(columns) == 2 and columns[0].isdigit():
        columns.reverse()
    if len(columns) != 2 or columns[1] not in NUMBERS or not columns[1].isdigit():
        raise ValueError(f"{where}: expected an expression and a digit with a tab between them, not {line[:60]!r}")
    symbols = [symbol for symbol in columns[0].split() if symbol not in "()"]
    if odd := [symbol for symbol in symbols if symbol not in NUMBERS]:
        raise ValueError(f"{where}: unknown symbol {odd[0]!r}; known: {' '.join(SYMBOLS)}")
    return symbols, int(columns[1])


def lines(path: Path) -> Iterator[tuple[list[str], int]]:
    """The expressions of a file, with their values. Raises ValueError for a line that is no example."""
    for number, line in enumerate(files.without_mark(read(path)).decode("utf-8", "replace").splitlines(), 1):
        if line and (found := parse(line, f"line {number} of {path}")):
            yield found


def _made(length: int, counts: dict[str, int], seed: int) -> dict[str, Sequences]:
    if length < 8:
        raise ValueError(f"length={length} of listops must be at least 8, or there are few different expressions")
    dice = random.Random(seed)
    shortest, seen = math.ceil(SHORTEST * length), set()
    splits = {}
    for split, count in counts.items():
        found = []
        while len(found) < count:
            symbols = tree(dice, length)
            content = bytes(NUMBERS[symbol] for symbol in symbols)
            # None comes twice, so that no test is among what was learned.
            if shortest <= len(content) <= length and content not in seen:
                seen.add(content)
                found.append(((content,), evaluate(symbols)))
        splits[split] = rows(found, length)
    return splits


def _files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise ValueError(f"no ListOps at {folder.absolute()}: there is no such folder")
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.iterdir()):
        for split, part in PARTS.items():
            for end in ENDS:
                if path.name.endswith(f"_{part}{end}"):
                    found.setdefault(path.name.removesuffix(f"_{part}{end}"), {})[split] = path
    whole = {name: {split: files[split] for split in SPLITS} for name, files in found.items() if len(files) == 3}
    if len(whole) != 1:
        has = f"has {', '.join(whole)}" if whole else "has none"
        raise ValueError(f"{folder}: expected one NAME with NAME_train.tsv, NAME_val.tsv and NAME_test.tsv; it {has}")
    return next(iter(whole.values()))


def _read(path: Path, length: int, most: int) -> Sequences:
    found = []
    for symbols, value in lines(path):
        if len(found) == most:
            break
        found.append(((bytes(NUMBERS[symbol] for symbol in symbols),), value))
    return rows(found, length)


def _median(values: list[int]) -> int:
    half = len(values) // 2
    return values[half] if len(values) % 2 else (values[half - 1] + values[half]) // 2


def _below(dice: random.Random, count: int) -> int:
    # Of random() alone, whose numbers are the same in every version of Python.
    return int(dice.random() * count)
