"""``docs/explanation/benchmarks.md`` and its plots, made from the files of the figures that have been measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import plots
from benchmarks.figures import FIGURES, Figure, number
from benchmarks.jobs import ROOT

DOCUMENT = ROOT / "docs" / "explanation" / "benchmarks.md"
PICTURES = "../images/benchmarks"

OPENING = """\
# Benchmarks

VirtualFlow beside what one would run instead, on one machine, in one run. `make bench` measures all figures again and
writes this page. `python -m benchmarks steps --quick` measures one of them with fewer rounds. `python -m benchmarks
report` only writes the page, from the files in `benchmarks/results/`, which hold every single sample. Ratios are
between two sides that took turns; absolute times say little about other machines. [Performance](performance.md) says
where the time goes. `python -m benchmarks soak` runs for hours, and so only when it is named: it shows whether the
memory, the descriptors and the threads of a job's processes grow over many steps and changes (`--steps`, `--changes`,
`--bytes`). So it is with `workloads`, which needs the extra `peft`, with `simulator_scale`, and with `operator_scale`,
which needs `kube-apiserver` and `etcd` on the PATH. The figures of faults are another campaign's: `make campaign`.
"""


def table(rows: Sequence[Mapping[str, Any]], figure: Figure) -> list[str]:
    """Lines of a Markdown table; columns without any content are left out."""
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


def made(facts: Mapping[str, Any]) -> str:
    """Where and when a figure was measured, in a sentence."""
    quick = " **Quick: few rounds, only to see that it works.**" if facts["quick"] else ""
    return (
        f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['kernel']}, Python "
        f"{facts['python']}, torch {facts['torch']} (CPU), commit `{facts['commit']}`, {facts['date']}, "
        f"{facts['seconds']} s.{quick}"
    )


def section(name: str, figure: Figure, result: Mapping[str, Any]) -> list[str]:
    """Lines about one figure."""
    lines = [f"## {figure.title}", ""]
    text = result.get("text") or figure.text
    lines += [text, ""] if text else []
    if result.get("skipped"):
        return [*lines, f"Not measured: {result['skipped']}", ""]
    lines += [*table(result["rows"], figure), ""]
    if figure.draw is not None:
        lines += [f"![{figure.title}]({PICTURES}/{name}.png)", ""]
    return [*lines, f"`python -m benchmarks {name}`: {made(result['made'])}", ""]


def page(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """The document about these figures, in the order of the registry."""
    lines = [OPENING]
    for name, figure in FIGURES.items():
        if name in measured:
            lines += section(name, figure, measured[name])
    return "\n".join(lines).rstrip() + "\n"


def write(measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the page and the plots."""
    pictures = DOCUMENT.parent / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for name, figure in FIGURES.items():
        if figure.draw is not None and measured.get(name, {}).get("rows"):
            plots.save(pictures / f"{name}.png", figure.draw, measured[name])
    DOCUMENT.write_text(page(measured))
