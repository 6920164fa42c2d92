"""The registry: what is measured, and how each figure is told and drawn.

A figure's ``measure(quick)`` returns a JSON-able object with ``rows``, a list of flat objects: the table. The rest
(``settings``, single samples, ...) is kept in its file for those who want to look closer. ``skipped`` in place of rows
says why this machine could not measure it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    soak,
    steps,
    workloads,
)
from benchmarks.jobs import LIMIT

HOURS = 4 * 3_600.0
"""Seconds after which a program that is measured on demand is taken to hang."""
Result = dict[str, Any]
Row = Mapping[str, Any]


def number(value: float, unit: str = "") -> str:
    """A number with as many digits as mean something."""
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}{unit}"


def milliseconds(key: str) -> Callable[[Row], str]:
    """The cell of a duration."""
    return lambda row: number(row[key], " ms") if key in row else ""


def plain_text(key: str) -> Callable[[Row], str]:
    """The cell of a name or a count."""
    return lambda row: str(row[key])


def ratio(key: str, spread: str) -> Callable[[Row], str]:
    """The cell of a ratio, with its range."""
    return lambda row: f"**{row[key]:.2f}** ({row[spread][0]:.2f} to {row[spread][1]:.2f})" if key in row else ""


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
    on_demand: bool = False
    """It takes long, and is measured only when it is named."""


EXCHANGE_TEXT = """\
A step whose gradients have a given size and cost next to nothing, so that little but their exchange is timed. What is
chosen by default takes turns with each schedule that can be asked for: by slices or gathered whole, behind the step
headers or beside the backward pass. The ratio of the default to the best of them is taken in each round; the table has
its median. 1 is as good as exhaustion."""

INTEGRATIONS_TEXT = """\
The processor time of a step of a script that an integration has made elastic, over that of the same script with the
library by itself: of the process that trains, with all its threads, so that other work on the machine does not pass for
overhead. One process each; both take turns as above, over two starts. Equal on both sides: model, optimizer, global
batch, eight micro-batches a step, one thread. The elastic side is the only worker of a job of `virtualflow run`, and
has the deterministic algorithms that equal bits take, and the launcher's settings of memory: huge pages make its step
some 4 % shorter. The median of the rounds' ratios, and their 10 % to 90 % range. In the first four rows the step is a
short one, so what is done around it counts as much as it ever does."""

INTEGRITY_TEXT = """\
A `bitwise` step with two workers, which hash all that they send and receive and compare their states part by part, over
one without any of it. Every second step of a job is one without, and each step with is divided by the mean of its two
neighbours; the median, and the range over the starts of the job, since whole processes differ by more than is measured
here. *Of CPU time* is the same of the leader's CPU time. *A checked step* is one in which a second worker computes one
of the eight virtual nodes, over its neighbours that are not; *with spot checks* is what that makes of all steps with
`--verify 0.01`."""

HOST_UPDATE_TEXT = """\
A `bitwise` step of eight virtual nodes whose optimizer is on the host, over one whose optimizer is on the device; both
take turns as above; the median of the rounds' ratios, and their 10 % to 90 % range. The device is the CPU, and its
copies take as long as at 12 GB/s in each direction; the CPU copies, too, so the ratio is an upper bound for what copies
cost. What it leaves out is that a real device steps faster than its host."""

STEPS_TEXT = """\
All sides live at once and take turns of about a second; the ratio is taken in each round, and the table shows its
median (and the 10 % to 90 % range) over three starts of all processes, since one and the same program is up to 5 %
faster or slower from start to start. Above 1, VirtualFlow makes more steps a second. Equal on all sides: model, initial
weights, optimizer, global batch, eight micro-batches a step, one thread a worker, samples loaded in the training
process. *Plain* is PyTorch as its users run it: a shuffling `DataLoader`, gradients accumulated over the micro-batches,
and no deterministic algorithms, also beside `bitwise`, which pays for them. With two workers it is
DistributedDataParallel in its default settings over gloo, all micro-batches but the last under `no_sync`. VirtualFlow
runs as a job of `virtualflow run`, with its coordinator on the same cores and the launcher's
[settings of memory](performance.md#memory-and-start), without which plain PyTorch's users run. `statistical` computes
several virtual nodes as one micro-batch, which plain PyTorch could do, too, if the memory allows; here its micro-batch
stays the same. The 25 M transformer, whose steps take a second, is measured in one start and without `statistical`."""

CHANGES_TEXT = """\
The digits job changes between two and three workers, and loses some by SIGKILL. The pause is from the last step before
a change to the first after it, that step included, at the survivor that waited longest; its unit is an undisturbed step
of DistributedDataParallel with two workers. Beside it the same training under `torchrun` (three agents, `--nnodes 2:3`,
c10d rendezvous), with a snapshot each ten steps, which its processes load after the restart that each change means
there; the same kind of pause, read from the log of the training. Its wait for latecomers is set to 1 s; the default
of 30 s would come on top of each change that leaves fewer than three workers. Agents do not share a store
(`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`): with torch 2.13's default a third agent never gets in. Steps that it repeats
since the last snapshot come on top."""

OVERLAP_TEXT = """\
As the first figure, with two workers and one start of all processes, on a network namespace whose loopback is limited
to the speed of a link. With 24 MB and 82 MB of gradients the wire counts here and not the overhead, and
DistributedDataParallel overlaps it with the backward pass of its last micro-batch."""

JOINER_TEXT = """\
One worker trains the digits job on one core. The ratio of its median step time after something begins on the other core
to that before; a stranger boots the same script but has nothing to do with the job, which shows what cores share."""


MEMORY_TEXT = """\
Forward and backward pass of one micro-batch on a device that is played: one core computes, and copies leave and return
on two lanes of 160 MB/s each, beside it. That is as many bytes for what is computed as with a V100 on PCIe 3: to copy
out all activations of ResNet-50 takes as long as 2.5 of its steps. Time is CPU time of the thread that computes, and
what it waits for copies. *Keep all* is plain PyTorch, and its peak is 100 %. *Recompute all* is
`torch.utils.checkpoint` around each block, *swap all* copies all that autograd saves out and back as `save_on_cpu`
does; each with the least budget into which it fits. A plan is made for each budget from 100 % down to 20 %, from a
profile that is measured anew in each turn; then all take turns. *Over the best* is the longest step of a plan over the
fastest of the other three that fits into the same budget. *Predicted* is a plan's time over the measured one, *peak*
its peak over the bytes that were counted (each storage once, as far as torch's operations show it), from the lowest to
the highest budget. All have the same gradients, to the bit.

Two blocks of VGG-16 need three quarters of its memory by themselves, so there is little to plan. A U-Net is no chain,
since its skips enter a second block. A plan is measured in its second micro-batch: in its first it finds out which
blocks save what another one copies out."""

SOAK_TEXT = """\
One job that changes between two and three workers all the time: it grows, loses its newest worker by SIGKILL, shrinks,
and loses one again, evenly over its steps, with an exchange of the same size in each of them. A line through what each
process had after the first tenth of the steps says how much it grows over the whole run, with its 95 % confidence
interval; the worker is the one that lives all the time, and sees all changes. *Flat* is memory that grows by no
more than 2 %, and a count that grows by no more than 5, whatever the interval holds; *unclear* is what may have grown
by more, or not at all."""


def _growth(row: Row) -> str:
    return f"{row['growth'][0]:+.2f} to {row['growth'][1]:+.2f}" if "growth" in row else ""


def throughput_columns() -> dict[str, Callable[[Row], str]]:
    """Columns of a comparison with plain PyTorch."""
    return {
        "workers": plain_text("workers"),
        "batch": plain_text("batch"),
        "plain": milliseconds("plain_ms"),
        "bitwise": milliseconds("bitwise_ms"),
        "bitwise, throughput": ratio("bitwise_ratio", "bitwise_range"),
        "statistical": milliseconds("statistical_ms"),
        "statistical, throughput": ratio("statistical_ratio", "statistical_range"),
    }


def _program(module: str, title: str, *, on_demand: bool = False) -> dict[str, Figure]:
    """A figure that is a program of its own, if it is there."""
    if not external.exists(module):
        return {}
    limit = HOURS if on_demand else LIMIT
    return {module: Figure(title, partial(external.measure, module, limit=limit), "", draw=None, on_demand=on_demand)}


FIGURES: dict[str, Figure] = {
    "steps": Figure(
        "A step, beside plain PyTorch and DDP",
        steps.measure,
        STEPS_TEXT,
        {"model": plain_text("model"), **throughput_columns()},
        plots.throughput,
    ),
    "overlap": Figure(
        "On a slow network",
        overlap.measure,
        OVERLAP_TEXT,
        {"link": plain_text("link"), "model": plain_text("model"), **throughput_columns()},
        plots.throughput,
    ),
    "exchange": Figure(
        "The chosen exchange, beside the best",
        exchange.measure,
        EXCHANGE_TEXT,
        {
            "workers": plain_text("workers"),
            "gradients": lambda row: f"{row['kib']:,} KiB",
            "chosen": milliseconds("auto_ms"),
            "best": lambda row: f"{number(row['best_ms'], ' ms')} ({row['best']})",
            "worst": milliseconds("worst_ms"),
            "chosen / best": lambda row: f"**{row['ratio']:.3f}**",
        },
    ),
    "integrations": Figure(
        "Other libraries' loops, made elastic",
        integrations.measure,
        INTEGRATIONS_TEXT,
        {
            "library": plain_text("library"),
            "model": plain_text("model"),
            "by itself": milliseconds("own_ms"),
            "elastic": milliseconds("elastic_ms"),
            "load of the machine": lambda row: f"{row['load'][0]:.0f} to {row['load'][1]:.0f}",
            "ratio": lambda row: f"**{row['ratio']:.3f}** ({row['range'][0]:.3f} to {row['range'][1]:.3f})",
        },
    ),
    "integrity": Figure(
        "What hashing costs",
        integrity.measure,
        INTEGRITY_TEXT,
        {
            "model": plain_text("model"),
            "without": milliseconds("unguarded_ms"),
            "with": milliseconds("guarded_ms"),
            "ratio": lambda row: f"**{row['ratio']:.3f}** ({row['range'][0]:.3f} to {row['range'][1]:.3f})",
            "of CPU time": lambda row: "{:.3f} ({:.3f} to {:.3f})".format(row["cpu_ratio"], *row["cpu_range"]),
            "a checked step": lambda row: f"{row['checked_step']:.2f}",
            "with spot checks": lambda row: f"{row['verified_ratio']:.4f}",
        },
    ),
    "host_update": Figure(
        "The optimizer on the host",
        host_update.measure,
        HOST_UPDATE_TEXT,
        {
            "model": plain_text("model"),
            "workers": plain_text("workers"),
            "on the device": milliseconds("device_ms"),
            "on the host": milliseconds("host_ms"),
            "ratio": lambda row: f"**{row['ratio']:.3f}** ({row['range'][0]:.3f} to {row['range'][1]:.3f})",
        },
    ),
    "memory": Figure(
        "Plans of memory, beside keeping, recomputing and swapping everything",
        partial(external.measure, "memory"),
        MEMORY_TEXT,
        {
            "model": plain_text("model"),
            "keep all": lambda row: f"{number(row['keep_mb'], ' MB')}, {number(row['keep_ms'], ' ms')}",
            "recompute all": lambda row: f"x {row['recompute']:.2f} from {row['recompute_share']:.0%}",
            "swap all": lambda row: f"x {row['swap']:.1f} from {row['swap_share']:.0%}",
            "plan": lambda row: ", ".join(f"{share}: x {took:.2f}" for share, took in row["plan"].items()),
            "over the best": lambda row: f"**{row['over_best']:.2f}**",
            "recompute all over the plan at 70, 60, 50 %": lambda row: ", ".join(
                f"{each:.2f}" for each in row["middle"]
            ),
            "predicted": lambda row: f"{row['predicted'][0]:.2f} to {row['predicted'][1]:.2f}",
            "peak": lambda row: f"{row['peaks'][0]:.3f} to {row['peaks'][1]:.3f}",
        },
        plots.budgets,
    ),
    "changes": Figure(
        "A change of the workers, beside torchrun",
        changes.measure,
        CHANGES_TEXT,
        {
            "change": plain_text("change"),
            "pause": lambda row: (
                f"{number(row['pause_ms'], ' ms')} ({row['range_ms'][0]:.0f} to {row['range_ms'][1]:.0f})"
            ),
            "in plain steps": lambda row: number(row["plain_steps"]),
            "changes": plain_text("changes"),
            "torchrun": lambda row: number(row["torchrun_ms"] / 1_000, " s"),
            "times as long": lambda row: f"**{row['ratio']:,.0f}**",
            "steps it repeats": lambda row: f"{row['torchrun_repeated']:.0f}",
        },
        plots.pauses,
    ),
    "packing": Figure(
        "Two jobs on one core, in turns",
        packing.measure,
        packing.TEXT,
        {
            "jobs": plain_text("jobs"),
            "network": lambda row: " and ".join(f"{each} Mbit/s" for each in row["megabits"]),
            "a step alone": lambda row: " and ".join(number(each, " ms") for each in row["alone_ms"]),
            "in turns": lambda row: " and ".join(number(each, " ms") for each in row["turns_ms"]),
            "in turns, throughput": ratio("turns_ratio", "turns_range"),
            "without turns": lambda row: " and ".join(number(each, " ms") for each in row["shared_ms"]),
            "without turns, throughput": ratio("shared_ratio", "shared_range"),
            "digests": lambda row: " and ".join(map(str, row["digests"])),
        },
    ),
    "packing_simulated": Figure(
        "Jobs that share the devices of a cluster, simulated",
        packing_simulated.measure,
        packing_simulated.TEXT,
        {
            "jobs": plain_text("jobs"),
            "policy": plain_text("policy"),
            "on a device, at most": plain_text("most"),
            "more work": lambda row: (
                f"**{row['work']:+.1%}** ({row['work_range'][0]:+.1%} to {row['work_range'][1]:+.1%})"
            ),
            "completion": lambda row: f"{row['completion']:+.1%}",
            "devices compute": lambda row: f"{row['computing'][0]:.0%}, then {row['computing'][1]:.0%}",
            "longest slowdown": lambda row: f"{row['slowest']:.2f}",
            "beside fixed sizes without packing": lambda row: f"{row['beside']:+.1%}",
        },
    ),
    **_program("state_transfer", "A joiner with 50 million parameters"),
    **_program("memory_copy", "A copy in the coordinator's memory"),
    **_program("layer_major", "A model that is streamed block by block"),
    **_program("partial_backward", "Backward passes that end early"),
    **_program("uneven", "Workers of unequal speed"),
    **_program("heterogeneous", "The paper's heterogeneous case"),
    **_program("scheduling_traces", "Sharing a cluster: the paper's 20 jobs"),
    **_program("scheduling_devices", "Sharing kinds of device"),
    **_program("coordinator", "A thousand workers"),
    **_program("scheduling", "A decision about a thousand queued jobs"),
    **_program("simulator_scale", "Ten thousand jobs and devices, simulated", on_demand=True),
    **_program("operator_scale", "A thousand jobs and eight thousand pods on an API server", on_demand=True),
    "soak": Figure(
        "A long job",
        soak.measure,
        SOAK_TEXT,
        {
            "process": plain_text("process"),
            "of it": lambda row: {"memory_mb": "memory, MB"}.get(row["measure"], row["measure"]),
            "mean": lambda row: number(row["mean"]) if "mean" in row else "",
            "in 1,000 steps": lambda row: f"{row['per_thousand']:+.4f}" if "per_thousand" in row else "",
            "over the run": _growth,
            "verdict": lambda row: f"**{row['verdict']}**",
        },
        plots.memory,
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
            "model and data": plain_text("model"),
            "parameters": lambda row: f"{row['parameters']:,}",
            "steps": plain_text("steps"),
            "at the end": lambda row: f"{row['metric']} {row['value']}",
            "1, 2, 4 workers": lambda row: ", ".join(f"{row['seconds'][side]:.0f}" for side in ("1", "2", "4")) + " s",
            "changing": lambda row: f"{row['seconds']['changing']:.0f} s",
            "pauses": lambda row: ", ".join(f"{each['pause_ms']:.0f}" for each in row["changes"]) + " ms",
            "steps repeated": plain_text("repeated_steps"),
            "digest, of all four": lambda row: f"`{row['digest'][:12]}`",
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
        JOINER_TEXT,
        {"on the other core": plain_text("other_core"), "step time": ratio("ratio", "range")},
    ),
}
