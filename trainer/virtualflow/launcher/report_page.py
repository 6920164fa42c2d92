"""A job's report as a page: one file that loads nothing, for a browser, a mail or an archive. Pure.

It is readable without colours and by a screen reader: what a picture shows stands in a table, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape

import msgspec

from virtualflow.coordinator.page.files import drawing, policy
from virtualflow.launcher.report import Report
from virtualflow.launcher.report_comparison import ORIGIN, compare, rows
from virtualflow.protocol.job_view import (
    CHANGE_COLUMNS,
    ChangeEntry,
    Fact,
    nodes_fact,
    step_time,
    view_change,
)
from virtualflow.protocol.wording import (
    counted,
    describe_end,
    describe_steps,
    duration,
    milliseconds,
    show_metric,
)

_YEAR_10000 = 253_402_300_800
"""Unix time at which no calendar goes on."""

_DRAW = """
const told = JSON.parse(find("run").textContent), curves = new Curves(find("curves"), told.job);
if (told.under) curves.under = {...runOf(told.under.series, null), name: told.under.job, changes: told.under.changes};
curves.take({...told, nonFinite: told.series.nonFinite ?? null, live: null});
"""
_BEGIN = """
explainWords();
for (const {dataset, lastElementChild} of document.querySelectorAll("[data-copy]")) {
  lastElementChild.append(copying(() => dataset.copy));
}
"""


def page(report: Report, other: Report | None = None) -> str:
    """The whole page, as HTML; beside ``other``, if there is one."""
    if other is not None and other.job == report.job:
        report = msgspec.structs.replace(report, job=f"{report.job} (first)")
        other = msgspec.structs.replace(other, job=f"{other.job} (second)")
    parts, draw = [_head(report), _facts(report)] if other is None else [_comparison(report, other)], ""
    if report.error:
        parts.append(_section("Error", f"<p>{escape(report.error)}</p>"))
    if report.series is not None and report.series.steps:
        curves, draw = _curves(report, other)
        parts.append(curves)
    for one in (report,) if other is None else (report, other):
        if one.changes:
            parts.append(_changes(one.changes, "" if other is None else f" of {one.job}"))
    if other is None:
        parts += _details(report)
    title, code = escape(_title(report, other)), drawing()
    scripts = (code.library, code.basics + code.script + draw + _BEGIN) if draw else (code.basics + _BEGIN,)
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


def _title(report: Report, other: Report | None) -> str:
    return f"{report.job}: {report.phase}" if other is None else f"{report.job} and {other.job}"


def _details(report: Report) -> list[str]:
    parts = []
    if report.pace_ms:
        parts.append(_paces(report.pace_ms))
    if report.metrics:
        metrics = [(name, "not finite" if v is None else show_metric(v)) for name, v in sorted(report.metrics.items())]
        parts.append(_section("Metrics of the last step", _table(("metric", "value"), metrics, numbers={1})))
    made = [(label, report.origin[name]) for name, label in ORIGIN.items() if report.origin.get(name)]
    if made:
        why = "<p>Equal bits depend on it.</p>"
        parts.append(_section("What it was made of", why + _table(("what", "which"), made, long={1})))
    return parts


def _comparison(one: Report, other: Report) -> str:
    """What both have, beside each other; what differs is marked."""
    verdict, *more = compare(one, other)
    known, told = rows(one), rows(other)
    lines = [
        (name, "differs" if known.get(name, "") != told.get(name, "") else "", known.get(name, ""), told.get(name, ""))
        for name in {**known, **told}
        if known.get(name) or told.get(name)
    ]
    sentences = "".join(f"<p>{escape(sentence)}</p>" for sentence in more)
    return (
        f"<header><h1>{escape(_title(one, other))}</h1><p><strong>{escape(verdict)}</strong></p>{sentences}</header>"
        + _section("Beside each other", _table(("what", "", one.job, other.job), lines, long={2, 3}))
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
    if report.series is not None and (found := report.series.non_finite) is not None:
        facts.insert(0, Fact("Not finite", found.metric, f"{found.value} in step {found.step}"))
    if report.series is not None and 0 <= (report.series.began or -1) < _YEAR_10000:
        facts.append(Fact("Started", f"{datetime.fromtimestamp(report.series.began or 0, UTC):%d %b %Y, %H:%M} UTC"))
    facts += nodes_fact(report.virtual_nodes, report.reproducibility)
    facts += step_time(report.step_ms, report.predicted_step_ms)
    facts.append(Fact("Virtual nodes again", str(report.repeated_virtual_nodes)))
    items = "".join(
        f"<div{_marks(fact)}><dt>{escape(fact.name)}</dt><dd><span>{escape(fact.value)}</span>"
        f"<small>{escape(fact.note)}</small></dd></div>"
        for fact in facts
    )
    return f"<dl>{items}</dl>"


def _marks(fact: Fact) -> str:
    if fact.name == "Digest":
        return f' class="whole" data-copy="{escape(fact.value)}"'
    return ' class="odd"' if fact.name == "Not finite" else ""


def _curves(report: Report, other: Report | None) -> tuple[str, str]:
    """The place of the curves, and the script that draws them; nothing of the report is in the script."""
    told = _drawn(report)
    if other is not None and other.series is not None and other.series.steps:
        told["under"] = _drawn(other)
    data = msgspec.json.encode(told).decode().replace("<", "\\u003c")
    place = f'<div id="curves"></div><script type="application/json" id="run">{data}</script>'
    return _section("Curves", place + "<noscript><p>Curves need JavaScript.</p></noscript>"), _DRAW


def _drawn(report: Report) -> dict[str, object]:
    changes = [view_change(change) for change in report.changes]
    return {"job": report.job, "series": report.series, "changes": changes}


def _changes(changes: Sequence[ChangeEntry], whose: str) -> str:
    columns = _table(CHANGE_COLUMNS, [view_change(change).row for change in changes], numbers={0, 4, 5, 6, 7}, long={3})
    return _section(f"Membership changes{whose}", columns)


def _paces(paces: dict[str, float]) -> str:
    slowest = max(paces.values()) or 1.0
    lines = [
        (name, milliseconds(value), f'<span class="bar" style="width:{100 * value / slowest:.0f}%"></span>')
        for name, value in sorted(paces.items())
    ]
    return _section("Milliseconds a virtual node", _table(("worker", "pace", ""), lines, numbers={1}, raw={2}))


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _table(
    names: Sequence[str],
    lines: Iterable[Sequence[str]],
    *,
    numbers: Iterable[int] = (),
    long: Iterable[int] = (),
    raw: Iterable[int] = (),
) -> str:
    """A table that scrolls by itself where it is too wide.

    Args:
        names: of its columns.
        lines: of as many texts.
        numbers: columns that are set to the right.
        long: columns that have a line of their own on a phone.
        raw: columns that are HTML already.
    """
    plain = set(raw)
    classes = {**dict.fromkeys(numbers, ' class="number"'), **dict.fromkeys(long, ' class="why"')}
    head = "".join(f'<th scope="col"{classes.get(place, "")}>{escape(name)}</th>' for place, name in enumerate(names))
    body = "".join(
        "<tr>"
        + "".join(
            f'<td data-head="{escape(names[place])}"{classes.get(place, "")}>'
            f"{cell if place in plain else escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in lines
    )
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
