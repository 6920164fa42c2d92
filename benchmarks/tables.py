"""Wide tables of the page, made of the long rows that a program has written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Cell = Callable[[Row], str]
Layout = Callable[[Sequence[Row]], list[dict[str, str]]]


def crossed(lines: Mapping[str, Cell], column: Cell, value: Cell) -> Layout:
    """Lay rows out in two dimensions: one line for what ``lines`` say, one column for what ``column`` says."""

    def lay(rows: Sequence[Row]) -> list[dict[str, str]]:
        headings = list(dict.fromkeys(column(row) for row in rows))
        found: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            line = {heading: show(row) for heading, show in lines.items()}
            empty = line | dict.fromkeys(headings, "")
            found.setdefault(tuple(line.values()), empty)[column(row)] = value(row)
        return list(found.values())

    return lay


def exchanged(row: Row) -> str:
    """What was chosen, the best, the worst, and the first over the second."""
    best = f"{row['best_ms']:.3g} ({row['best']})"
    return f"{row['auto_ms']:.3g}, {best}, {row['worst_ms']:.3g}: **{row['ratio']:.3f}**"


def split(row: Row) -> str:
    """Images a second of devices that share by speed, and what that is worth."""
    alone, even = (row["split"] / row[other] - 1 for other in ("fast_alone", "even"))
    return f"{row['split']:,.0f} ({alone:+.0%}, {even:+.0%})"


def event(row: Row) -> str:
    """What the coordinator was measured at."""
    return str(row["what"]).partition(":")[0].replace("founding", "first generation")


def phase(row: Row) -> str:
    """The part of the event that a row is about."""
    _, _, part = str(row["what"]).partition(": ")
    return part if part in ("decided and sent", "all have entered", "settled") else "takes"


def cost(row: Row) -> str:
    """Seconds, of which the coordinator computes, and megabytes that leave it."""
    sent = f", {row['to_workers_bytes'] / 1e6:.0f} MB" if row["to_workers_bytes"] else ""
    return f"{row['seconds']:.2f} ({abs(row['cpu_seconds']):.2f}{sent})"
