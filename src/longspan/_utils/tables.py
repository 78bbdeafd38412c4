"""Tables as aligned text, and durations in words."""

Table = list[list[str]]


def aligned(table: Table) -> str:
    """Columns of equal width, the first to the left, the others to the right."""
    columns = max(map(len, table))
    widths = [max(len(row[i]) for row in table if i < len(row)) for i in range(columns)]
    lines = [[f"{row[0]:<{widths[0]}}", *map("{:>{}}".format, row[1:], widths[1:])] for row in table]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def duration(seconds: float) -> str:
    """With a unit that leaves few digits.

    >>> duration(0.0123), duration(4.3e-6), duration(12.0), duration(3365.0)
    ('12.3 ms', '4.3 us', '12 s', '3,365 s')
    """
    if seconds >= 1000:
        return f"{seconds:,.0f} s"
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * factor:.3g} {unit}"
