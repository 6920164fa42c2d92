"""The report's section of ``docs/explanation/gpu.md``, and the file of numbers from which it is made.

The page is only written by a whole run on a GPU; any other leaves its report in ``build/``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu.parts import PARTS, Outcome, Result, Row
from benchmarks.jobs import ROOT
from benchmarks.results import commit

PAGE = ROOT / "docs" / "explanation" / "gpu.md"
NUMBERS = Path(__file__).with_name("report.json")
ASIDE = ROOT / "build" / "gpu.md"
BEGIN = "<!-- python -m benchmarks.gpu writes from here -->"
END = "<!-- to here -->"
NEVER = "None of this has ever run on a GPU."


def absent() -> str:
    """What stands in place of a report."""
    rows = [f"| {part.title} | {part.shows} |" for part in PARTS]
    head = ["| part | what it shows |", "| --- | --- |"]
    return "\n".join([f"**{NEVER}** It waits for a machine that has one:", "", *head, *rows])


def render(result: Result) -> str:
    """The report as Markdown."""
    found = {outcome.name: outcome for outcome in result.outcomes}
    lines = [f"{', '.join(f'{key} {value}' for key, value in result.made.items())}.", ""]
    if not result.devices:
        lines += [f"No CUDA device was seen. {NEVER}", ""]
    elif result.small:
        lines += ["Small sizes, only to see that it works.", ""]
    for part in PARTS:
        outcome = found.get(part.name)
        if outcome is None:
            continue
        lines += [f"### {part.title}", "", _verdict(outcome), ""]
        if outcome.rows:
            lines += [*table(outcome.rows), ""]
    return "\n".join(lines).rstrip()


def _verdict(outcome: Outcome) -> str:
    took = f" ({outcome.seconds:.0f} s)" if outcome.seconds else ""
    if outcome.status == "failed":
        return f"**Failed**{took}:\n\n```text\n{outcome.why}\n```"
    return f"{outcome.status.capitalize()}{took}{f': {outcome.why}' if outcome.why else ''}."


def table(rows: Sequence[Row]) -> list[str]:
    """Lines of a Markdown table with all that any row has."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(key, "")) for key in columns] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")


def splice(page: str, section: str) -> str:
    """The page with this section in place of the one that it has."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{after}"


def made() -> Mapping[str, str]:
    """When and of which commit a report is made."""
    date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"Made on": date, "commit": f"`{commit()}`"}


def write(result: Result, page: Path = PAGE, numbers: Path = NUMBERS, aside: Path = ASIDE) -> list[Path]:
    """Write the report to where it belongs; what was written."""
    section = render(result)
    if not result.complete:
        aside.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(section + "\n")
        return [aside]
    page.write_text(splice(page.read_text(), section))
    numbers.write_text(json.dumps(asdict(result), indent=1) + "\n")
    return [page, numbers]
