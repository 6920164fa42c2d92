"""The registry: what is measured, and how each figure is told and drawn.

A figure's ``measure(quick)`` returns a JSON-able object with ``rows``, a list of flat objects: the table. The rest
(``settings``, single samples, ...) is kept in its file for those who want to look closer. ``skipped`` in place of rows
says why this machine could not measure it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from benchmarks import (
    batch_sizes,
    changes,
    exchange,
    external,
    host_update,
    integrations,
    integrity,
    joiner,
    overlap,
    packing,
    packing_simulated,
    plots,
    replica_groups,
    sealing,
    soak,
    steps,
    texts,
    workloads,
)
from benchmarks.jobs import LIMIT
from benchmarks.tables import Cell, Layout, Row, cost, crossed, event, exchanged, phase, split

HOURS = 4 * 3_600.0
"""Seconds after which a program that is measured on demand is taken to hang."""
Result = dict[str, Any]


def number(value: float, unit: str = "") -> str:
    """A number with as many digits as mean something."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{unit}"


def rounded(key: str) -> Cell:
    """The cell of a number that some rows lack."""
    return lambda row: number(row[key]) if key in row else ""


def span(ends: Sequence[float], form: str = ".2f") -> str:
    """A range."""
    return f"{ends[0]:{form}}–{ends[1]:{form}}"


def both(one: str, other: str) -> Cell:
    """The cell of two durations and the ratio of the second to the first."""

    def show(row: Row) -> str:
        return f"{number(row[one])}, {number(row[other])}: **{row['ratio']:.3f}** ({span(row['range'], '.3f')})"

    return show


def sized(models: str) -> str:
    """Names of models with their sizes, in short: ``137k``."""
    return re.sub(r" (?=[kM] parameters)| parameters", "", models).replace(" x ", " × ")


def model(row: Row) -> str:
    """The cell of a model."""
    return sized(str(row["model"]))


def milliseconds(key: str) -> Callable[[Row], str]:
    """The cell of a duration."""
    return rounded(key)


def plain_text(key: str) -> Callable[[Row], str]:
    """The cell of a name or a count."""
    return lambda row: str(row[key])


def ratio(key: str, spread: str) -> Callable[[Row], str]:
    """The cell of a ratio, with its range."""
    return lambda row: f"**{row[key]:.2f}** ({span(row[spread])})" if key in row else ""


@dataclass(frozen=True)
class Figure:
    """One measurement."""

    title: str
    measure: Callable[..., Result]
    """Takes ``quick``, and the ``options`` by their names."""
    text: str
    """Markdown above its table: what was compared, and what to read in it."""
    columns: Mapping[str, Callable[[Row], str]] = field(default_factory=dict)
    """Heading and cell; empty for the keys of the rows."""
    draw: Callable[[Any, Mapping[str, Any]], None] | None = None
    """Draws the figure into axes."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Whole numbers that may be given on the command line, and what they are."""
    lay: Layout | None = None
    """Makes the lines of the table of all rows at once, in place of ``columns``."""
    on_demand: bool = False
    """It takes long, and is measured only when it is named."""
    on_page: bool = True
    """Otherwise the page of the simulator has its figures."""


def _growth(row: Row) -> str:
    return f"[{row['growth'][0]:+.2f}, {row['growth'][1]:+.2f}]" if "growth" in row else ""


def throughput_columns() -> dict[str, Callable[[Row], str]]:
    """Columns of a comparison with plain PyTorch."""
    return {
        "workers": plain_text("workers"),
        "plain, ms": milliseconds("plain_ms"),
        "bitwise, ms": milliseconds("bitwise_ms"),
        "bitwise, throughput": ratio("bitwise_ratio", "bitwise_range"),
        "statistical, ms": milliseconds("statistical_ms"),
        "statistical, throughput": ratio("statistical_ratio", "statistical_range"),
    }


def packed_columns() -> dict[str, Callable[[Row], str]]:
    """Columns of jobs that share a device, in turns and without."""
    return {
        "jobs": lambda row: sized(row["jobs"]),
        "network, Mbit/s": lambda row: ", ".join(map(str, row["megabits"])),
        "computing": lambda row: ", ".join(f"{share:.0%}" for share in row.get("computing", ())),
        "a step alone, ms": lambda row: ", ".join(map(number, row["alone_ms"])),
        "in turns, ms": lambda row: ", ".join(map(number, row["turns_ms"])),
        "in turns, throughput": ratio("turns_ratio", "turns_range"),
        "without turns, ms": lambda row: ", ".join(map(number, row["shared_ms"])),
        "without turns, throughput": ratio("shared_ratio", "shared_range"),
        "killed": lambda row: "{turns}, **{shared}**".format(**row["killed"]) if "killed" in row else "",
        "digests": lambda row: ", ".join(map(str, row["digests"])),
    }


def _program(
    module: str,
    title: str,
    text: str = "",
    columns: Mapping[str, Cell] | None = None,
    *,
    lay: Layout | None = None,
    on_demand: bool = False,
    on_page: bool = True,
) -> dict[str, Figure]:
    """A figure that is a program of its own, if it is there."""
    if not external.exists(module):
        return {}
    limit = HOURS if on_demand else LIMIT
    measure = partial(external.measure, module, limit=limit)
    return {module: Figure(title, measure, text, columns or {}, lay=lay, on_demand=on_demand, on_page=on_page)}


FIGURES: dict[str, Figure] = {
    "steps": Figure(
        "Step time beside PyTorch and DDP",
        steps.measure,
        texts.STEPS,
        {"model": model, **throughput_columns()},
        plots.throughput,
    ),
    "overlap": Figure(
        "On a slow network",
        overlap.measure,
        texts.OVERLAP,
        {"link": plain_text("link"), "model": model, **throughput_columns()},
        plots.throughput,
    ),
    "exchange": Figure(
        "Choice of the exchange",
        exchange.measure,
        texts.EXCHANGE,
        lay=crossed(
            {"gradients, KiB": lambda row: f"{row['kib']:,}"}, lambda row: f"{row['workers']} workers", exchanged
        ),
    ),
    "integrations": Figure(
        "Integrations",
        integrations.measure,
        texts.INTEGRATIONS,
        lay=crossed(
            {"library": lambda row: row["library"].removesuffix(", a loop of one's own")},
            model,
            both("own_ms", "elastic_ms"),
        ),
    ),
    "integrity": Figure(
        "Cost of checksums and spot checks",
        integrity.measure,
        texts.INTEGRITY,
        {
            "model": model,
            "without, ms": milliseconds("unguarded_ms"),
            "with, ms": milliseconds("guarded_ms"),
            "ratio": lambda row: f"**{row['ratio']:.3f}** ({span(row['range'], '.3f')})",
            "of CPU time": lambda row: f"{row['cpu_ratio']:.3f} ({span(row['cpu_range'], '.3f')})",
            "a checked step": lambda row: f"{row['checked_step']:.2f}",
            "with spot checks": lambda row: f"{row['verified_ratio']:.4f}",
        },
    ),
    "sealing": Figure(
        "Cost of sealing",
        sealing.measure,
        texts.SEALING,
        {
            "what": lambda row: model(row).removesuffix(" each way"),
            "workers": plain_text("workers"),
            "plaintext, ms": milliseconds("plain_ms"),
            "sealed, ms": milliseconds("sealed_ms"),
            "ratio": lambda row: f"**{row['ratio']:.3f}**",
            "of CPU time": lambda row: "" if row["cpu_ratio"] is None else f"{row['cpu_ratio']:.3f}",
        },
    ),
    "host_update": Figure(
        "Optimizer on the host",
        host_update.measure,
        texts.HOST_UPDATE,
        lay=crossed(
            {"model": model},
            lambda row: f"{row['workers']} worker" + "s" * (row["workers"] > 1),
            both("device_ms", "host_ms"),
        ),
    ),
    "memory": Figure(
        "Memory plans",
        partial(external.measure, "memory"),
        texts.MEMORY,
        {
            "model": model,
            "keep all: MB, ms": lambda row: f"{number(row['keep_mb'])}, {number(row['keep_ms'])}",
            "recompute all": lambda row: f"{row['recompute']:.2f} ({row['recompute_share']:.0%})",
            "swap all": lambda row: f"{row['swap']:.1f} ({row['swap_share']:.0%})",
            "plan at 100, 70, 50, 30 %": lambda row: ", ".join(
                f"{row['plan'][share]:.2f}" for share in ("100%", "70%", "50%", "30%") if share in row["plan"]
            ),
            "over the best": lambda row: f"**{row['over_best']:.2f}**",
            "predicted": lambda row: span(row["predicted"]),
            "peak": lambda row: span(row["peaks"], ".3f"),
        },
        plots.budgets,
    ),
    "changes": Figure(
        "Membership changes beside torchrun",
        changes.measure,
        texts.CHANGES,
        {
            "change": plain_text("change"),
            "pause, ms": lambda row: f"{number(row['pause_ms'])} ({span(row['range_ms'], '.0f')})",
            "in plain steps": lambda row: number(row["plain_steps"]),
            "changes": plain_text("changes"),
            "torchrun, s": lambda row: number(row["torchrun_ms"] / 1_000),
            "times as long": lambda row: f"**{row['ratio']:,.0f}**",
            "steps it repeats": lambda row: f"{row['torchrun_repeated']:.0f}",
        },
        plots.pauses,
    ),
    "replica_groups": Figure(
        "Membership changes beside torchft",
        replica_groups.measure,
        texts.REPLICA_GROUPS,
        {
            "change": plain_text("change"),
            "pause, ms": rounded("pause_ms"),
            "torchft, ms": rounded("torchft_ms"),
            "times as long": lambda row: f"**{number(row['ratio'])}**",
            "steps it gives up": lambda row: f"{row['given_up']:.0f}",
        },
        on_demand=True,
    ),
    "packing": Figure(
        "Two jobs on one core, in turns",
        partial(packing.measure, packing.CASES, packing.TEXT),
        packing.TEXT,
        packed_columns(),
    ),
    "packing_limits": Figure(
        "Limited memory and no preemption, in turns",
        partial(packing.measure, packing.LIMITED, packing.LIMITS),
        packing.LIMITS,
        packed_columns(),
        on_demand=True,
    ),
    "packing_simulated": Figure(
        "Packing jobs on devices, simulated",
        packing_simulated.measure,
        "",
        lay=crossed(
            {"jobs": plain_text("jobs"), "policy": plain_text("policy")},
            lambda row: f"{row['most']} jobs a device",
            lambda row: "**{:+.0%}** ({:+.0%}–{:+.0%}), {:+.0%}, {:.0%} → {:.0%}".format(
                *(round(part, 2) + 0.0 for part in (row["work"], *row["work_range"], row["completion"])),  # no -0 %
                *row["computing"],
            ),
        ),
    ),
    **_program(
        "state_transfer",
        "State transfer",
        texts.STATE,
        {
            "change": plain_text("what"),
            "changes": plain_text("count"),
            "pause, ms": milliseconds("pause_ms"),
            "pause beyond a step, ms": milliseconds("over_ms"),
            "transfer, ms": milliseconds("state_ms"),
            "state, MB": rounded("state_mb"),
            "donors": rounded("donors"),
        },
    ),
    **_program("memory_copy", "Copies in the coordinator's memory"),
    **_program(
        "layer_major",
        "Layer-major order",
        columns={
            "workers": plain_text("workers"),
            "virtual nodes": plain_text("virtual_nodes"),
            "ordinary step, ms": milliseconds("kept_ms"),
            "layer-major step, ms": milliseconds("layer_major_ms"),
            "estimate, ms": milliseconds("estimate_ms"),
            "over the estimate": rounded("ratio"),
            "ahead, ms": milliseconds("ahead_ms"),
            "phased, ms": milliseconds("phased_ms"),
            "weights copied, MB": rounded("weights_mb"),
            "weights, node by node, MB": rounded("node_major_mb"),
            "all copied, MB": rounded("all_mb"),
        },
    ),
    **_program(
        "partial_backward",
        "Backward passes that end early",
        lay=crossed(
            {"recipe": plain_text("recipe")},
            plain_text("task"),
            lambda row: f"{row['time of a step']}: {row['loss'].replace(' to ', '–')}, {row['beside whole']}",
        ),
    ),
    **_program("partial_bytes", "Bytes of backward passes that end early"),
    **_program("waiting_sums", "Sums that wait in files"),
    **_program("sharded_bytes", "Parameters that are divided: bytes and memory"),
    **_program("sharded_steps", "Parameters that are divided: steps beside FSDP2", on_demand=True),
    **_program("sharded_changes", "Parameters that are divided: changes"),
    **_program("larger_than_worker", "A model larger than a worker", on_demand=True),
    **_program(
        "uneven",
        "Uneven workers",
        texts.UNEVEN,
        {
            "split": plain_text("split"),
            "step while slow, ms": rounded("step_ms"),
            "share of the possible": rounded("possible"),
            "of theory": rounded("theory"),
            "moves": plain_text("moves"),
        },
    ),
    **_program(
        "uneven_devices",
        "Uneven devices, played",
        texts.UNEVEN_DEVICES,
        {
            "times as long": plain_text("devices"),
            "best split": plain_text("best"),
            "split found": plain_text("got"),
            "share of the possible": rounded("share"),
            "with an even split": rounded("share_even"),
            "steps/s": rounded("steps_per_second"),
            "moves": plain_text("moves"),
        },
    ),
    **_program(
        "planned_devices",
        "Unequal devices as planned",
        texts.PLANNED_DEVICES,
        {
            "cores": plain_text("devices"),
            "split": plain_text("split"),
            "planned, samples/s": rounded("planned"),
            "measured": rounded("measured"),
            "measured / planned": lambda row: f"**{row['ratio']:.2f}**",
            "best neighbour": plain_text("neighbour"),
            "over the split": rounded("neighbour_measured"),
            "played: split": lambda row: row["played"]["split"],
            "played: measured / planned": lambda row: f"**{row['played']['ratio']:.2f}**",
            "played: best neighbour": lambda row: row["played"]["neighbour"],
            "played: over the split": lambda row: number(row["played"]["neighbour_measured"]),
        },
        on_demand=True,
    ),
    **_program(
        "heterogeneous",
        "Heterogeneous devices, simulated",
        texts.HETEROGENEOUS,
        lay=crossed(
            {"fast and slow": lambda row: f"{row['fast']}, {row['slow']}"},
            lambda row: f"{row['fast_count']} + {row['slow_count']}",
            split,
        ),
    ),
    **_program("scheduling_traces", "Scheduling the paper's 20 jobs", on_page=False),
    **_program("scheduling_devices", "Scheduling on kinds of device", on_page=False),
    **_program("scheduling_prediction", "Jobs of unknown length"),
    **_program("node_sleep", "Nodes that sleep"),
    **_program(
        "scheduling_batches",
        "Batches chosen beside devices",
        lay=crossed({"line": plain_text("line")}, plain_text("load"), plain_text("cell")),
    ),
    **_program(
        "coordinator", "A coordinator with 1,000 workers", texts.COORDINATOR, lay=crossed({"event": event}, phase, cost)
    ),
    **_program(
        "scheduling",
        "Decisions about 1,000 queued jobs",
        lay=crossed(
            {"queue": plain_text("queue"), "jobs": plain_text("jobs"), "units": plain_text("units")},
            plain_text("policy"),
            plain_text("longest ms"),
        ),
    ),
    **_program("simulator_scale", "Simulator speed", on_demand=True, on_page=False),
    **_program("operator_scale", "An operator with 1,000 jobs", on_demand=True),
    **_program("hostile_tenants", "An operator beside hostile coordinators", on_demand=True),
    **_program("api_faults", "An operator whose API server is in trouble", on_demand=True),
    "soak": Figure(
        "Leaks over a long job",
        soak.measure,
        texts.SOAK,
        lay=crossed(
            {"process": plain_text("process")},
            lambda row: str(row["measure"]).replace("memory_mb", "memory, MB"),
            lambda row: f"{number(row['mean'])} {_growth(row)}: **{row['verdict']}**" if "mean" in row else "",
        ),
        draw=plots.memory,
        options={
            "steps": f"of the job ({soak.STEPS:,})",
            "changes": f"of its workers ({soak.CHANGES:,})",
            "bytes": f"that each step exchanges ({soak.BYTES:,})",
        },
        on_demand=True,
    ),
    "workloads": Figure(
        "Trainings as people run them",
        workloads.measure,
        workloads.TEXT,
        {
            "workload": plain_text("workload"),
            "parameters": lambda row: f"{row['parameters']:,}",
            "steps": plain_text("steps"),
            "at the end": lambda row: f"{row['metric']} {row['value']}",
            "pauses, ms": lambda row: ", ".join(f"{each['pause_ms']:.0f}" for each in row["changes"]),
            "steps repeated": plain_text("repeated_steps"),
            "digest": lambda row: f"`{row['digest'][:12]}`",
        },
        plots.workloads,
        on_demand=True,
    ),
    "batch_sizes": Figure(
        "Global batches tried on one device",
        batch_sizes.measure,
        batch_sizes.TEXT,
        {
            "global batch": plain_text("batch"),
            "virtual nodes": plain_text("virtual_nodes"),
            "steps": plain_text("steps"),
            "test accuracy": lambda row: f"**{row['accuracy']:.4f}**",
            "digest": lambda row: f"`{row['digest'][:12]}`",
        },
    ),
    "joiner": Figure(
        "A joiner's start",
        joiner.measure,
        texts.JOINER,
        {"on the other core": plain_text("other_core"), "step time": ratio("ratio", "range")},
    ),
}
