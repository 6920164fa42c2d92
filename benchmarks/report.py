"""``docs/explanation/benchmarks.md`` and its plots, made from the files of the figures that have been measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import plots
from benchmarks.figures import FIGURES, Figure, number
from benchmarks.jobs import ROOT

DOCUMENT = ROOT / "docs" / "explanation" / "benchmarks.md"
PICTURES = "../images/benchmarks"

OPENING = """\
# Benchmarks

What VirtualFlow costs and saves beside the usual alternatives. [Performance](performance.md) explains where the time
goes. The sides of a figure take turns on one machine, so ratios hold better than absolute times.

`make bench` measures the figures that take minutes and writes this page. `python -m benchmarks steps --quick` measures
one in fewer rounds; `report` only writes the page. `benchmarks/results/` has every sample. Long figures must be named:
`soak`, `sharded_steps`, `simulator_scale`, `workloads` (extra `peft`), as root `larger_than_worker`, `planned_devices`
and `packing_limits`, `replica_groups` (with torchft), and with `kube-apiserver` and `etcd` `operator_scale`,
`hostile_tenants`, `api_faults`.

{common}
"""


def table(rows: Sequence[Mapping[str, Any]], figure: Figure) -> list[str]:
    """Lines of a Markdown table; columns without any content are left out."""
    if figure.lay is not None:
        laid = figure.lay(rows)
        cells = {heading: [line[heading] for line in laid] for heading in laid[0]}
    else:
        columns = figure.columns or {key: _cell(key) for key in dict.fromkeys(key for row in rows for key in row)}
        cells = {heading: [show(row) for row in rows] for heading, show in columns.items()}
    filled = {heading: texts for heading, texts in cells.items() if any(texts)}
    lines = [list(filled), ["---"] * len(filled), *map(list, zip(*filled.values(), strict=True))]
    return [f"| {' | '.join(line)} |" for line in lines]


def _cell(key: str) -> Any:
    def show(row: Mapping[str, Any]) -> str:
        value = row.get(key, "")
        return number(value) if isinstance(value, float) else str(value).replace("|", "\\|")

    return show


def platform(facts: Mapping[str, Any]) -> str:
    """On what figures were measured, in words."""
    return (
        f"{facts['cores']} cores, {facts['memory_gib']} GiB, {facts['kernel']}, Python {facts['python']}, "
        f"torch {facts['torch']}"
    )


def made(facts: Mapping[str, Any], common: str) -> str:
    """Where and when a figure was measured, as far as it is not common to all."""
    here = platform(facts)
    quick = " **Quick: few rounds, only to see that it works.**" if facts["quick"] else ""
    day, _, _ = facts["date"].partition(" ")
    special = "" if here == common else f"{here}, "
    processor = re.sub(r"^(AMD|Intel) | Processor$", "", facts["cpu"].replace("(R)", ""))
    return f"{processor}, {special}`{facts['commit']}`, {day}.{quick}"


def section(name: str, figure: Figure, result: Mapping[str, Any], common: str = "") -> list[str]:
    """Lines about one figure."""
    lines = [f"## {figure.title}", ""]
    text = result.get("text") or figure.text
    lines += [text, ""] if text else []
    if result.get("skipped"):
        return [*lines, f"Not measured: {result['skipped']}", ""]
    lines += [*table(result["rows"], figure), ""]
    if figure.draw is not None:
        lines += [f"![Plot]({PICTURES}/{name}.png)", ""]
    return [*lines, f"`{name}`: {made(result['made'], common)}", ""]


def page(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The document about these figures, in the order of the registry."""
    platforms = {platform(result["made"]) for result in measured.values()}
    common = platforms.pop() if len(platforms) == 1 else ""
    said = f"Measured with all processes on {common}.\n" if common else ""
    lines = [OPENING.format(common=f"{said}Below each figure: name, processor, commit, day.")]
    for name, figure in FIGURES.items():
        if name in measured and figure.on_page:
            lines += section(name, figure, measured[name], common)
    return "\n".join(lines).rstrip() + "\n"


def write(measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the page and the plots."""
    pictures = DOCUMENT.parent / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        if figure.draw is not None and measured.get(name, {}).get("rows"):
            plots.save(pictures / f"{name}.png", figure.draw, measured[name])
    DOCUMENT.write_text(page(measured))
