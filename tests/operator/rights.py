"""The operator's rights as docs/how-to/security.md has them: the chart grants these, and it uses no others."""

from __future__ import annotations

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "docs" / "how-to" / "security.md"

WITH_AUTHENTICATION = "everywhere, with metrics.authentication"
WITH_KUEUE = ("where its jobs are, with kueue.enabled", "everywhere, with kueue.enabled")
"""Where the operator has rights only with that value of the chart."""

Rule = tuple[str, str, str, str]
"""API group, resource, verb, and the only name that it holds for (empty: any)."""


def documented(where: str) -> set[Rule]:
    """Return the rights that the table of docs/how-to/security.md gives the operator there."""
    rules = set()
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip().replace("`", "") for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[3] == where:
            resource, _, name = cells[1].partition(" named ")
            group = "" if cells[0] == "core" else cells[0]
            rules |= {(group, resource, verb, name) for verb in cells[2].split(", ")}
    assert rules, f"docs/how-to/security.md has no rights {where!r}"
    return rules
