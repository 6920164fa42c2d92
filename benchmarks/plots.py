"""The plots: bars that can be read on a light and on a dark page, with the number at each bar."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from matplotlib.axes import Axes

GREY, BLUE, ORANGE = "#8b949e", "#2f81f7", "#d4742c"
INK = "#7d8590"
"""Grey enough for both backgrounds."""
WIDTH, DPI = 8.0, 110
"""Inches, and pixels an inch."""
BAR = 0.3
COLOURS = 128
"""Of a picture."""


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
    axes.set_yticks(range(len(rows)), [_name(row) for row in rows])
    axes.set_xlim(0, 1.12 * max(row[f"{mode}_range"][1] for row in rows for mode, _ in modes if f"{mode}_range" in row))
    axes.set_xlabel("steps a second over plain PyTorch (1 worker) or DDP (2)")
    axes.set_ylim(-0.6, len(rows) - 0.4)
    if len(modes) > 1:
        axes.legend(frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.4, 1.1), ncols=len(modes))


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
    axes.axvline(step, color=ORANGE, linewidth=1.2, linestyle="--", label=f"a plain step ({step:.0f} ms)")
    axes.set_xscale("log")
    axes.set_xlim(step / 3, 4 * max(row["torchrun_ms"] for row in rows))
    axes.set_yticks(range(len(rows)), [row["change"] for row in rows])
    axes.set_xlabel("pause in milliseconds, logarithmic")
    axes.legend(frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.45, 1.2), ncols=3)


def memory(axes: Axes, result: Mapping[str, Any]) -> None:
    """What each kind of process had, over the steps of a job."""
    for (kind, points), colour in zip(result["memory_mb"].items(), (BLUE, ORANGE, GREY), strict=False):
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=colour, linewidth=1.0, label=kind)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("steps")
    axes.set_ylabel("resident memory, MB")
    axes.legend(frameon=False, labelcolor=INK, loc="upper center", bbox_to_anchor=(0.45, 1.1), ncols=3)


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
            figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", frameon=False, ncols=4)
        if place % 3 == 0:
            panel.set_ylabel("step, keep-all = 1")
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
    for name, key, style in (("plan", "measured", "o-"), ("its prediction", "predicted", ":")):
        heights = [statistics.median(each[key]) / keep for each in found["budgets"]]
        axes.plot(shares, heights, style, color=BLUE, linewidth=1.4, markersize=3.5, label=name)
    swap = statistics.median(found["seconds"]["swap"]) / keep
    axes.set_title(f"{found['family']} (swap all: {swap:.1f})", fontsize=9, color=INK)
    axes.set_xlim(104, 16)
    axes.set_ylim(0.9, 1.9)
    axes.spines[["top", "right"]].set_visible(False)


def _three_resources(axes: Axes, found: Mapping[str, Any]) -> None:
    """As it was above as it was predicted."""
    colours = {"forward": BLUE, "backward": "#1f5fb0", "recompute": ORANGE, "swap-out": GREY, "swap-in": GREY, "": GREY}
    lanes = [(kind, lane) for kind in ("measured", "predicted") for lane in ("compute", "copy-out", "copy-in")]
    for place, (kind, lane) in enumerate(lanes):
        for resource, what, start, end in found["trace"][kind]:
            if resource == lane:
                axes.barh(-place, end - start, 0.75, start, color=colours[what], edgecolor="white", linewidth=0.3)
    axes.set_yticks([-place for place in range(len(lanes))], [f"{lane}, {kind}" for kind, lane in lanes], fontsize=8)
    for name in ("forward", "backward", "recompute"):
        axes.barh(0, 0, color=colours[name], label=name)
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelbottom=False)


def _memory_in_use(axes: Axes, found: Mapping[str, Any]) -> None:
    """The most bytes in each pass over a block, as counted and as predicted, below what it takes to keep everything."""
    end = max(end for kind in ("measured", "predicted") for _, _, _, end in found["trace"][kind])
    for kind, colour, style in (("measured", BLUE, "-"), ("predicted", INK, ":")):
        points = [*found["trace"]["memory"][kind]]
        seconds, used = [second for second, _ in points], [size / 1e6 for _, size in points]
        axes.step([*seconds, end], [*used, used[-1]], style, where="post", color=colour, linewidth=1.4, label=kind)
    for share, name in ((1.0, "keep all"), (0.5, "budget")):
        height = share * found["keep_bytes"] / 1e6
        axes.axhline(height, color=ORANGE if share < 1 else GREY, linewidth=1.0)
        axes.text(end, height, name, fontsize=8, ha="right", va="bottom", color=INK)
    axes.set_ylim(0, 1.15 * found["keep_bytes"] / 1e6)
    axes.set_ylabel("MB in use", fontsize=8)
    axes.legend(frameon=False, ncols=2, loc="upper left", bbox_to_anchor=(0.0, 0.98), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
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
        for name, side, colour in (("2 workers", "undisturbed", BLUE), ("changing", "disturbed", ORANGE)):
            seconds, values = zip(*found[side]["points"], strict=True)
            panel.plot(seconds, values, "o-", color=colour, linewidth=1.4, markersize=3, label=name)
        for number, (second, change) in enumerate(found["disturbed"]["changes"]):
            panel.axvline(second, color=GREY, linewidth=1.0, linestyle=":")
            panel.annotate(
                change,
                (second, 1.0 - 0.25 * (number % 2)),  # one change may follow on the heels of another
                (2, -2),
                xycoords=("data", "axes fraction"),
                textcoords="offset points",
                fontsize=7,
                rotation=90,
                va="top",
                color=INK,
            )
        panel.set_title(f"{found['name']}: {found['disturbed']['drawn']}", fontsize=9, color=INK)
        panel.set_xlim(left=0)
        panel.spines[["top", "right"]].set_visible(False)
        if place == 0:
            figure.legend(*panel.get_legend_handles_labels(), loc="outside upper center", frameon=False, ncols=2)
        if place >= len(panels) - 2:
            panel.set_xlabel("seconds since the job was started")


def save(path: Path, draw: Callable[[Axes, Mapping[str, Any]], None], result: Mapping[str, Any]) -> None:
    """Draw a figure into a PNG file with a transparent background."""
    import matplotlib as mpl
    from PIL import Image

    mpl.use("agg")
    from matplotlib import pyplot as plt

    inks = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    with mpl.rc_context(dict.fromkeys(inks, INK)):
        figure, axes = plt.subplots(figsize=(WIDTH, 1.2 + 0.62 * len(result["rows"])), layout="constrained")
        draw(axes, result)
        axes.spines[["top", "right"]].set_visible(False)
        drawn = io.BytesIO()
        figure.savefig(drawn, dpi=DPI, transparent=True)
        plt.close(figure)
    # A palette takes a third of the bytes; this way of choosing it knows of transparency.
    Image.open(drawn).quantize(COLOURS, method=Image.Quantize.FASTOCTREE).save(path, optimize=True)
