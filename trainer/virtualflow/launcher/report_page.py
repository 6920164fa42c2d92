"""A job's report as a page: one file that loads nothing, for a browser, a mail or an archive. Pure.

It is readable without colours and by a screen reader: what a picture shows stands in a table, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import msgspec

from virtualflow.coordinator.page.files import drawing, policy
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.job_view import (
    CHANGE_COLUMNS,
    ChangeEntry,
    Fact,
    nodes_fact,
    step_time,
    view_change,
)
from virtualflow.protocol.live_view import ViewSeries
from virtualflow.protocol.wording import (
    Metric,
    counted,
    describe_end,
    describe_steps,
    duration,
    milliseconds,
    show_metric,
)

MAX_REPORT = 256 << 20
"""Bytes of a file that could be a report."""


class Report(msgspec.Struct, frozen=True):
    """What a page shows of a report; what else is in it is left out."""

    job: str
    phase: str
    steps: int
    seconds: float
    training_seconds: float | None = None
    digest: str | None = None
    total_steps: int | None = None
    stopped_early: bool = False
    virtual_nodes: int | None = None
    reproducibility: str | None = None
    changes: list[ChangeEntry] = []
    repeated_steps: int = 0
    repeated_virtual_nodes: int = 0
    step_ms: float | None = None
    predicted_step_ms: float | None = None
    pace_ms: dict[str, float] = {}
    metrics: dict[str, Metric | None] = {}
    error: str | None = None
    series: ViewSeries | None = None


_DRAW = """
const told = JSON.parse(find("run").textContent);
new Curves(find("curves"), told.job).take({...told, nonFinite: null, live: null});
"""


def read_report(content: bytes, name: str) -> Report:
    """What ``virtualflow run --report`` wrote.

    Args:
        content: of the file.
        name: what it is called in a complaint.

    Raises:
        ConfigurationError: it is no report.
    """
    try:
        return msgspec.json.decode(content, type=Report)
    except msgspec.MsgspecError as error:
        raise ConfigurationError(f"{name} is no report of virtualflow run --report: {error}") from None


def page(report: Report) -> str:
    """The whole page, as HTML."""
    parts, draw = [_head(report), _facts(report)], ""
    if report.error:
        parts.append(f"<section><h2>Error</h2><pre>{escape(report.error)}</pre></section>")
    if report.series is not None and report.series.steps:
        curves, draw = _curves(report)
        parts.append(curves)
    if report.changes:
        parts.append(_changes(report.changes))
    if report.pace_ms:
        parts.append(_paces(report.pace_ms))
    if report.metrics:
        rows = [(name, "not finite" if v is None else show_metric(v)) for name, v in sorted(report.metrics.items())]
        parts.append(_section("Metrics of the last step", _table(("metric", "value"), rows, numbers={1})))
    title, code = escape(f"{report.job}: {report.phase}"), drawing()
    scripts = (code.library, code.basics + code.script + draw) if draw else ()
    rule = policy(code.style, *scripts, attributes=True)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">\n'
        f"<style>{code.style}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(parts)
        + "\n</main>\n"
        + "".join(f"<script>{script}</script>\n" for script in scripts)
        + "</body>\n</html>\n"
    )


def _head(report: Report) -> str:
    sizes = {size for change in report.changes for size in (change.from_, change.to) if size}
    workers = f" on {min(sizes)} to {counted(max(sizes), 'worker')}" if len(sizes) > 1 else ""
    repeated = f"{counted(report.repeated_steps, 'step')} repeated"
    trained = "" if report.training_seconds is None else f", {duration(report.training_seconds)} of it training,"
    made = describe_steps(report.steps, report.total_steps, stopped_early=True)
    if report.phase == "done":
        made = describe_end(report.steps, report.total_steps, report.stopped_early)
    changes = counted(len(report.changes), "membership change")
    sentence = f"{made} in {duration(report.seconds)}{trained}{workers}: {changes}, {repeated}."
    sentence = f"{sentence[0].upper()}{sentence[1:]}"
    name, phase = escape(report.job), escape(report.phase)
    return f'<header><h1>{name} <span class="phase {phase}">{phase}</span></h1><p>{escape(sentence)}</p></header>'


def _facts(report: Report) -> str:
    facts = [Fact("Digest", report.digest)] if report.digest else []
    facts += nodes_fact(report.virtual_nodes, report.reproducibility)
    facts += step_time(report.step_ms, report.predicted_step_ms)
    facts.append(Fact("Virtual nodes computed again", str(report.repeated_virtual_nodes)))
    items = "".join(f"<div><dt>{escape(fact.name)}</dt><dd>{escape(fact.said)}</dd></div>" for fact in facts)
    return f"<dl>{items}</dl>"


def _curves(report: Report) -> tuple[str, str]:
    """The place of the curves, and the script that draws them; nothing of the report is in the script."""
    told = {"job": report.job, "series": report.series, "changes": [view_change(change) for change in report.changes]}
    data = msgspec.json.encode(told).decode().replace("<", "\\u003c")
    place = f'<div id="curves"></div><script type="application/json" id="run">{data}</script>'
    return _section("Curves", place + "<noscript><p>Curves need JavaScript.</p></noscript>"), _DRAW


def _changes(changes: Sequence[ChangeEntry]) -> str:
    rows = [view_change(change).row for change in changes]
    columns = _table(CHANGE_COLUMNS, rows, numbers={0, 4, 5, 6, 7})
    return _section("Membership changes", columns)


def _paces(paces: dict[str, float]) -> str:
    slowest = max(paces.values()) or 1.0
    rows = [
        (name, milliseconds(value), f'<span class="bar" style="width:{100 * value / slowest:.0f}%"></span>')
        for name, value in sorted(paces.items())
    ]
    return _section("Milliseconds a virtual node", _table(("worker", "pace", ""), rows, numbers={1}, raw={2}))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(
    names: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    raw: Iterable[int] = (),
) -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        names: of its columns.
        rows: of as many texts.
        numbers: columns that are set to the right.
        raw: columns that are HTML already.
    """
    right, plain = set(numbers), set(raw)
    head = "".join(f'<th scope="col"{_class(place in right)}>{escape(name)}</th>' for place, name in enumerate(names))
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(place in right)}>{cell if place in plain else escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _class(right: bool) -> str:
    return ' class="number"' if right else ""
