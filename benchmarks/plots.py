"""The plots, in the style of those of ``virtualflow simulate``: each says what is better, and what its lines are."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from virtualflow_operator.simulator.command import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, STYLE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

WIDTH = 8.0
"""Inches."""
BAR = 0.3
COLOURS = 128
"""Of a picture."""
BESIDE = 0.06
"""Of a panel's width: marks nearer to each other than that have one label."""


def throughput(axes: Axes, result: Mapping[str, Any]) -> None:
    """Ratios of throughput as bars from the left, a group a row, with a line at plain PyTorch."""
    rows = list(reversed(result["rows"]))
    modes = [
        (mode, colour) for mode, colour in (("bitwise", BLUE), ("statistical", ORANGE)) if f"{mode}_ratio" in rows[-1]
    ]
    for place, row in enumerate(rows):
        for index, (mode, colour) in enumerate(modes):
            if f"{mode}_ratio" not in row:
                continue
            value, (low, high) = row[f"{mode}_ratio"], row[f"{mode}_range"]
            at = place - BAR * (index - (len(modes) - 1) / 2)
            axes.barh(at, value, BAR * 0.9, color=colour, label=mode if place == len(rows) - 1 else None)
            axes.plot([low, high], [at, at], color=INK, linewidth=1.2)
            axes.annotate(f"{value:.2f}", (max(value, high), at), (5, 0), textcoords="offset points", va="center")
    axes.axvline(1.0, color=GREY, linewidth=1.2, linestyle="--")
    axes.annotate("plain PyTorch, or DDP", (1.0, len(rows) - 0.45), ha="center", va="bottom", fontsize=9)
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set_xlim(0, 1.12 * max(row[f"{mode}_range"][1] for row in rows for mode, _ in modes if f"{mode}_range" in row))
    axes.set_xlabel("steps a second over those of plain PyTorch (1 worker) or DDP (2): higher is better")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    if len(modes) > 1:
        axes.legend(loc="lower right")


def _name(row: Mapping[str, Any]) -> str:
    workers = "1 worker" if row["workers"] == 1 else f"{row['workers']} workers"
    model, _, size = row["model"].removesuffix(" parameters").partition(", ")
    return f"{model}, {size}\n{row.get('link', workers)}"


def pauses(axes: Axes, result: Mapping[str, Any]) -> None:
    """Pauses of both on a logarithmic scale, with the plain step as a line."""
    rows = list(reversed(result["rows"]))
    for place, row in enumerate(rows):
        pairs = [("VirtualFlow", row["pause_ms"], BLUE, BAR / 2), ("torchrun", row["torchrun_ms"], GREY, -BAR / 2)]
        for name, value, colour, offset in pairs:
            axes.barh(place + offset, value, BAR * 0.9, color=colour, label=name if place == 0 else None)
            text = f"{value:.0f} ms" if value < 1_000 else f"{value / 1_000:.1f} s"
            axes.annotate(text, (value, place + offset), (5, 0), textcoords="offset points", va="center")
    step = result["plain_step_ms"]
    axes.axvline(step, color=ORANGE, linewidth=1.2, linestyle="--")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g} ms" if value < 1_000 else f"{value / 1_000:g} s")
    axes.set_xlim(step / 3, 4 * max(row["torchrun_ms"] for row in rows))
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_yticks(range(len(rows)), [row["change"] for row in rows])
    axes.set_xlabel("pause, on a logarithmic scale: lower is better")
    axes.annotate(
        f"a plain step, {step:.0f} ms",
        (step, len(rows) - 0.5),
        ha="center",
        va="bottom",
        fontsize=9,
        annotation_clip=False,
    )
    axes.legend(loc="lower center", bbox_to_anchor=(0.6, 1.0), ncols=2)


def memory(axes: Axes, result: Mapping[str, Any]) -> None:
    """What each kind of process had over the steps of a job, a panel each, with the mean and what the verdict is."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.remove()
    judged = {row["process"]: row for row in result["rows"] if row["measure"] == "memory_mb"}
    figure.set_size_inches(WIDTH, 0.6 + 1.7 * len(judged))
    panels = figure.subplots(len(judged), 1, sharex=True, squeeze=False)[:, 0]
    for panel, (kind, row), colour in zip(panels, judged.items(), (BLUE, ORANGE, GREEN), strict=False):
        steps, values = zip(*result["memory_mb"][kind], strict=True)
        panel.plot(steps, values, color=colour, linewidth=1.0)
        panel.axhline(row["mean"], color=INK, linewidth=1.2, linestyle="--")
        low, high = row["growth"]
        panel.set_title(
            f"{kind}: {row['verdict']}; mean {row['mean']:.0f} MB (dashed), {low:+.1f} to {high:+.1f} MB over the job",
            loc="left",
            fontsize=9,
        )
        panel.set_ylim(0, 1.15 * max(values))
        panel.set_xlim(left=0)
    panels[len(panels) // 2].set_ylabel("resident memory, MB")
    panels[-1].set_xlabel("steps")


def budgets(axes: Axes, result: Mapping[str, Any]) -> None:
    """A step over budgets of memory, a panel a family; below, what three resources do under one plan."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.remove()
    figure.set_size_inches(WIDTH, 8.8)
    families = result["families"]
    grid = figure.add_gridspec(5, 3, height_ratios=[1.0, 1.0, 0.05, 0.75, 0.6])
    for place, found in enumerate(families):
        panel = figure.add_subplot(grid[place // 3, place % 3])
        _over_budgets(panel, found)
        if place == 0:
            figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=4)
        if place % 3 == 0:
            panel.set_ylabel("step, keep-all = 1\n(lower is better)")
        if place // 3 == 1:
            panel.set_xlabel("budget, keep-all = 100 %")
    if families[0]["trace"]:
        resources = figure.add_subplot(grid[3, :])
        _three_resources(resources, families[0])
        _memory_in_use(figure.add_subplot(grid[4, :], sharex=resources), families[0])


def _over_budgets(axes: Axes, found: Mapping[str, Any]) -> None:
    import statistics

    keep = statistics.median(found["seconds"]["keep"])
    for name, side, colour in (("keep all", "keep", INK), ("torch.utils.checkpoint", "recompute", ORANGE)):
        height = statistics.median(found["seconds"][side]) / keep
        axes.plot([100 * found["shares"][side], 104], [height, height], color=colour, linewidth=1.6, label=name)
        axes.plot(100 * found["shares"][side], height, "|", color=colour, markersize=9)
    shares = [100 * each["share"] for each in found["budgets"]]
    kinds = (("plan", "measured", "o-", BLUE), ("its prediction", "predicted", ":", PURPLE))
    for name, key, style, colour in kinds:
        heights = [statistics.median(each[key]) / keep for each in found["budgets"]]
        axes.plot(shares, heights, style, color=colour, linewidth=1.6, markersize=3.5, label=name)
    swap = statistics.median(found["seconds"]["swap"]) / keep
    axes.set_title(f"{found['family']}; swap all: {swap:.1f} ×", fontsize=9)
    axes.set_xlim(16, 104)
    axes.set_ylim(0.9, 1.9)


def _three_resources(axes: Axes, found: Mapping[str, Any]) -> None:
    """As it was above as it was predicted."""
    colours = {"forward": BLUE, "backward": GREEN, "recompute": ORANGE, "swap-out": GREY, "swap-in": GREY, "": GREY}
    lanes = [(kind, lane) for kind in ("measured", "predicted") for lane in ("compute", "copy-out", "copy-in")]
    for place, (kind, lane) in enumerate(lanes):
        for resource, what, start, end in found["trace"][kind]:
            if resource == lane:
                axes.barh(-place, end - start, 0.75, start, color=colours[what], edgecolor="white", linewidth=0.3)
    axes.set_yticks([-place for place in range(len(lanes))], [f"{lane}, {kind}" for kind, lane in lanes], fontsize=8)
    for name in ("forward", "backward", "recompute"):
        axes.barh(0, 0, color=colours[name], label=name)
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    axes.tick_params(labelbottom=False)


def _memory_in_use(axes: Axes, found: Mapping[str, Any]) -> None:
    """The most bytes in each pass over a block, as counted and as predicted, below what it takes to keep everything."""
    end = max(end for kind in ("measured", "predicted") for _, _, _, end in found["trace"][kind])
    for kind, colour, style in (("measured", BLUE, "-"), ("predicted", PURPLE, ":")):
        points = [*found["trace"]["memory"][kind]]
        seconds, used = [second for second, _ in points], [size / 1e6 for _, size in points]
        axes.step([*seconds, end], [*used, used[-1]], style, where="post", color=colour, linewidth=1.4, label=kind)
    for share, name in ((1.0, "keep all"), (0.5, "budget")):
        height = share * found["keep_bytes"] / 1e6
        axes.axhline(height, color=ORANGE if share < 1 else GREY, linewidth=1.2, linestyle="--")
        axes.text(end, height, name, fontsize=8, ha="right", va="bottom")
    axes.set_ylim(0, 1.2 * found["keep_bytes"] / 1e6)
    axes.set_ylabel("MB in use", fontsize=8)
    axes.legend(ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    axes.set_xlabel(f"seconds of one step of {found['family']} within 50 %")


def workloads(axes: Axes, result: Mapping[str, Any]) -> None:
    """How good a model is over the clock, a panel a workload: undisturbed, and through changes of the workers."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.remove()
    panels = result["panels"]
    figure.set_size_inches(WIDTH, 0.4 + 2.3 * ((len(panels) + 1) // 2))
    grid = figure.add_gridspec((len(panels) + 1) // 2, 2)
    for place, found in enumerate(panels):
        panel = figure.add_subplot(grid[place // 2, place % 2])
        for name, side, colour in (
            ("2 workers", "undisturbed", BLUE),
            ("changing (above: how many workers)", "disturbed", ORANGE),
        ):
            seconds, values = zip(*found[side]["points"], strict=True)
            panel.plot(seconds, values, "o-", color=colour, linewidth=1.4, markersize=3, label=name)
        panel.set_xlim(left=0)
        _mark_changes(panel, found["disturbed"]["changes"])
        better = "higher" if "accuracy" in found["disturbed"]["drawn"] else "lower"
        panel.set_title(f"{found['name']}: {found['disturbed']['drawn']}, {better} is better", fontsize=9, pad=14)
        if place == 0:
            figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", ncols=2)
        if place >= len(panels) - 2:
            panel.set_xlabel("seconds since the job was started")


def _mark_changes(panel: Axes, changes: Sequence[tuple[float, str]]) -> None:
    """Lines where workers came and went, and above them how many there were; neighbours share a label."""
    width, labels = panel.get_xlim()[1], list[tuple[float, str]]()
    for second, change in changes:
        panel.axvline(second, color=GREY, linewidth=1.0, linestyle=":")
        if labels and second - labels[-1][0] < BESIDE * width:
            labels[-1] = (second, labels[-1][1] + change[1:])
        else:
            labels.append((second, change))
    for second, label in labels:
        panel.annotate(
            label,
            (second, 1.0),
            (0, 3),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            fontsize=7,
            ha="center",
        )


def save(path: Path, draw: Callable[[Axes, Mapping[str, Any]], None], result: Mapping[str, Any]) -> None:
    """Draw a figure into a PNG file with a transparent background."""
    import matplotlib as mpl
    from PIL import Image

    mpl.use("agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.62 * len(result["rows"])), layout="constrained")
        draw(axes, result)
        drawn = io.BytesIO()
        figure.savefig(drawn)
        plt.close(figure)
    # A palette takes a third of the bytes; this way of choosing it knows of transparency.
    Image.open(drawn).quantize(COLOURS, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
