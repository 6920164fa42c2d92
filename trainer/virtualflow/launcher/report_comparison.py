"""Two reports beside each other: whether both runs ended with the same bits and, if not, what differs first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from virtualflow.launcher.report import Report
from virtualflow.protocol.live_view import ViewSeries
from virtualflow.protocol.wording import duration, milliseconds, show_metric

ORIGIN = {
    "command": "Command",
    "script": "Script",
    "script_sha256": "SHA-256 of the script",
    "git_commit": "Git commit",
    "virtualflow": "virtualflow",
    "python": "Python",
    "workers": "All workers",
    "devices": "Devices",
    "cpu": "CPU",
}
"""What a run was made of, in the words of a report; by its fields."""


def rows(run: Report) -> dict[str, str]:
    """What is known of a run, by its name, in the order in which one thing follows from another."""
    known = {"Digest": run.digest or ""} | {label: run.origin.get(name, "") for name, label in ORIGIN.items()}
    known["Virtual nodes"] = "" if run.virtual_nodes is None else str(run.virtual_nodes)
    known["Bits"] = run.reproducibility or ""
    known |= {"Phase": run.phase, "Steps": str(run.steps), "Steps repeated": str(run.repeated_steps)}
    known |= {"Took": duration(run.seconds), "Median step": "" if run.step_ms is None else milliseconds(run.step_ms)}
    return known | {
        f"{name} at the end": "not finite" if value is None else show_metric(value)
        for name, value in run.metrics.items()
    }


def compare(one: Report, other: Report) -> list[str]:
    """Sentences on what differs, the verdict first."""
    if one.digest is None or other.digest is None:
        sentences = ["A run without a digest has not come to its end, so its bits are not compared."]
    elif one.digest == other.digest:
        return ["The digests are equal: both runs ended with the same bits."]
    else:
        sentences = ["The digests differ: the runs ended with other bits."]
    sentences += _curves(one.series, other.series)
    made = [label for name, label in ORIGIN.items() if one.origin.get(name, "") != other.origin.get(name, "")]
    made += ["virtual nodes"] * (one.virtual_nodes != other.virtual_nodes)
    made += ["bits"] * (one.reproducibility != other.reproducibility)
    if made:
        sentences.append(f"What they were made of differs, first in this: {', '.join(made)}.")
    elif one.origin and other.origin:
        sentences.append("All that is known of what they were made of is the same.")
    return sentences


def _curves(one: ViewSeries | None, other: ViewSeries | None) -> list[str]:
    """Where the curves part, as far as that can be told."""
    if one is None or other is None:
        return []
    if one.width != 1 or other.width != 1:
        how = "run both with --trace, and virtualflow bisect finds the first step that differs"
        return [f"Points of their curves are means of several steps: {how}."]
    equal: int | None = None
    for step, name, value, told in _pairs(one, other):
        if value != told:
            before = "" if equal is None else f"The curves are equal to step {equal}. "
            return [f"{before}The first figure that differs is {name} in step {step}: {value:g} and {told:g}."]
        equal = step
    return [] if equal is None else [f"No figure that both have told differs, to step {equal}."]


def _pairs(one: ViewSeries, other: ViewSeries) -> Iterator[tuple[int, str, float, float]]:
    """The metrics that both have told of the same steps."""
    places = {step: place for place, step in enumerate(other.steps)}
    for place, step in enumerate(one.steps):
        if step not in places:
            continue
        for name, values in one.metrics.items():
            value, told = values[place], other.metrics[name][places[step]] if name in other.metrics else None
            if value is not None and told is not None:
                yield step, name, value, told
