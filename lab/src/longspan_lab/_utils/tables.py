"""Tables as aligned text, and durations with units."""

import textwrap
from collections.abc import Collection

Table = list[list[str]]
GAP = "  "
CELL = 30  # smallest width at which cells are wrapped


def aligned(table: Table, width: int | None = None) -> str:
    """Text with aligned columns: the first one to the left, the others to the right.

    Args:
        table: rows of cells, the first row is the head.
        width: columns of text. A wider table is printed in parts, one below the other. Each part repeats the leading
            columns that identify a row. None: no limit.
    """
    lines = _lines(table, _widths(table))
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    return "\n\n".join("\n".join(part).rstrip() for part in _parts(table, width))


def _widths(table: Table) -> list[int]:
    columns = max(map(len, table))
    return [max(len(row[i]) for row in table if i < len(row)) for i in range(columns)]


def _lines(table: Table, widths: list[int], left: Collection[int] = (0,)) -> list[str]:
    return [
        GAP.join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in table
    ]


def _wrapped(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_long_words=False, break_on_hyphens=False) or [""]


def _parts(table: Table, width: int) -> list[list[str]]:
    """The lines of each part of a table that is too wide."""
    (title, *head), *rows = table
    keys = next((k for k in range(1, len(head) + 1) if len({tuple(row[:k]) for row in rows}) == len(rows)), 1)
    above: list[str] = []
    if len(title) > max((len(row[0]) for row in rows), default=0):
        # A long title stands above the part, so that the column is as narrow as its names.
        above, title = _wrapped(title, width), ""
    limit = max(CELL, width // (keys + 1))
    cells = [[_wrapped(cell, limit) for cell in row[:keys]] for row in ([title, *head], *rows)]
    widths = [max(len(line) for row in cells for line in row[i]) for i in range(keys)]
    used = sum(widths) + len(GAP) * (keys - 1)
    # Other cells are wrapped only if they do not fit next to the keys.
    room = max(CELL, width - used - len(GAP))
    for row, whole in zip(cells, ([title, *head], *rows), strict=True):
        row += [_wrapped(cell, room) for cell in whole[keys:]]
    widths = [max(len(line) for row in cells if i < len(row) for line in row[i]) for i in range(max(map(len, cells)))]
    text = {i for row in cells[1:] for i, lines in enumerate(row) if len(lines) > 1}
    groups: list[list[int]] = []
    taken = width
    for i in range(keys, len(widths)):
        if taken + len(GAP) + widths[i] > width:
            groups.append([*range(keys)])
            taken = used
        groups[-1].append(i)
        taken += len(GAP) + widths[i]
    parts = []
    for group in groups or [[*range(keys)]]:
        expanded = []
        for row in cells:
            chosen = [row[i] if i < len(row) else [""] for i in group]
            height = max(map(len, chosen))
            expanded += [[lines[n] if n < len(lines) else "" for lines in chosen] for n in range(height)]
        left = {n for n, i in enumerate(group) if i < keys or i in text}
        parts.append([*above, *_lines(expanded, [widths[i] for i in group], left)])
    return parts


def duration(seconds: float) -> str:
    """A time with a unit that leaves few digits.

    >>> duration(0.0123), duration(4.3e-6), duration(12.0), duration(3365.0)
    ('12.3 ms', '4.3 us', '12 s', '3,365 s')
    """
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.3g} {unit}"
