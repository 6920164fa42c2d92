"""What ``virtualflow plan`` says, for people. Pure."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence

from virtualflow.launcher.settings import LauncherSettings
from virtualflow.memory import Action, Advice, Budget, Division, Fit, Plan, Timeline, format_bytes
from virtualflow.protocol.wording import counted

_SIGNS = {"forward": "f", "recompute": "r", "backward": "b", "swap-out": "o", "swap-in": "i"}
_MIXED = "+"


def describe_fits(device: str, batch: int, budget: Budget, fits: Sequence[Fit], settings: LauncherSettings) -> str:
    """The table of the numbers of virtual nodes, and the plan of the fastest of them."""
    host = "as much of the host's as is needed" if budget.host is None else f"{format_bytes(budget.host)} of the host's"
    lines = [
        f"{device}: a batch of {batch} in {format_bytes(budget.device)} of its memory, and {host}; "
        f"the optimizer's state is on the {budget.optimizer}",
        f"{'virtual nodes':>13}  {'samples each':>12}  {'to keep all':>11}  {'at least':>9}  {'kept':>5} "
        f"{'swapped':>7} {'recomputed':>10}  {'peak':>9}  {'on the host':>11}  {'virtual node':>12}  "
        f"{'step of one device':>18}",
    ]
    lines += [_row(fit) for fit in fits]
    planned = [(fit, fit.plan) for fit in fits if fit.plan is not None]
    smallest, _ = planned[0]
    fastest, plan = fastest_of(fits)
    if len(planned) > 1:
        lines.append(
            f"the smallest number of virtual nodes that fits is {smallest.virtual_nodes}; the step is shortest with "
            f"{fastest.virtual_nodes}"
        )
    lines += ["", f"with {counted(fastest.virtual_nodes, 'virtual node')}: {plan.reason}"]
    return "\n".join([*lines, *describe_plan(plan), *draw(plan.timeline, settings.plan_width)])


def describe_command(fits: Sequence[Fit], command: Sequence[str], device: str, host: str | None) -> str:
    """How to run a script with the fastest number of virtual nodes, and within this memory."""
    fastest, plan = fastest_of(fits)
    words = ["virtualflow", "run", "--workers", "1", "--virtual-nodes", str(fastest.virtual_nodes)]
    if plan.count(Action.KEEP) < len(plan.blocks):
        words += ["--device-memory", device]
        words += ["--host-memory", host] if host is not None else []
    return f"to run it so: {shlex.join([*words, *command])}"


def fastest_of(fits: Sequence[Fit]) -> tuple[Fit, Plan]:
    """The number of virtual nodes with the shortest step, and its plan."""
    planned = [(fit, fit.plan) for fit in fits if fit.plan is not None]
    return min(planned, key=lambda each: each[1].seconds * each[0].virtual_nodes)


def describe_plan(plan: Plan) -> list[str]:
    """Which blocks are kept, swapped and recomputed; what is recomputed at once stands together."""
    stretches: dict[str, list[str]] = {}
    first = 0
    for behind in range(1, len(plan.blocks) + 1):
        block = plan.blocks[first]
        following = plan.blocks[behind] if behind < len(plan.blocks) else None
        if following is not None and following.action is block.action and following.segment == block.segment:
            continue
        name = block.action.value
        if block.action is Action.RECOMPUTE and block.prefetch is not None:
            name = "recompute from a swapped boundary"
        stretches.setdefault(name, []).append(str(first) if behind == first + 1 else f"{first}-{behind - 1}")
        first = behind
    return [f"  {name}: {', '.join(stretches[name])}" for name in sorted(stretches)]


def draw(timeline: Timeline, width: int) -> list[str]:
    """The three resources over the time of a virtual node, a line each, and what the letters mean."""
    total = timeline.seconds
    lines: list[str] = []
    for resource in ("compute", "copy-out", "copy-in"):
        cells = [Counter[str]() for _ in range(width)]
        for span in timeline.spans:
            if span.resource != resource:
                continue
            begin, end = (min(width, moment / total * width) for moment in (span.start, span.end))
            for cell in range(int(begin), min(width, int(end) + 1)):
                cells[cell][_SIGNS[span.kind]] += max(0.0, min(end, cell + 1) - max(begin, cell))  # type: ignore[assignment]
        drawn = "".join(_sign(cell) for cell in cells)
        lines.append(f"  {resource:>8} |{drawn}| {timeline.busy(resource) / total:4.0%}")
    return [*lines, "  f forward, r recompute, b backward, o copy out, i copy in; a dot is less than half of the time"]


def _sign(cell: Counter[str]) -> str:
    busy = sum(cell.values())
    if busy < 0.5:
        return "." if busy > 0.05 else " "
    return cell.most_common(1)[0][0]


def describe_advice(advice: Advice) -> str:
    """The devices to ask for, and what other sets of them come to."""
    rows = [("asked for", advice.best)]
    if advice.everything is not None:
        rows.append(("all of them", advice.everything))
    rows += [("one type alone", each) for each in advice.alone]
    lines = [f"{'':<15} {'devices':<28} {'virtual nodes each':<28} {'fused':<10} {'computing of a step':>19}"]
    lines += [_division(name, division) for name, division in rows]
    return "\n".join([*lines, advice.reason])


def _division(name: str, division: Division) -> str:
    devices = " + ".join(f"{len(share.virtual_nodes)} {share.name}" for share in division.shares)
    nodes = ", ".join(_counts(share.virtual_nodes) for share in division.shares)
    fused = ", ".join(str(share.fused) for share in division.shares)
    return f"{name:<15} {devices:<28} {nodes:<28} {fused:<10} {_seconds(division.seconds):>19}"


def _counts(virtual_nodes: Sequence[int]) -> str:
    low, high = min(virtual_nodes), max(virtual_nodes)
    return str(low) if low == high else f"{low} to {high}"


def _row(fit: Fit) -> str:
    start = (
        f"{fit.virtual_nodes:>13}  {fit.micro_batch:>12}  {format_bytes(fit.keep_bytes, up=True):>11}  "
        f"{format_bytes(fit.smallest_bytes, up=True):>9}  "
    )
    plan = fit.plan
    if plan is None:
        return f"{start}does not fit"
    return (
        f"{start}{plan.count(Action.KEEP):>5} {plan.count(Action.SWAP):>7} {plan.count(Action.RECOMPUTE):>10}  "
        f"{format_bytes(plan.peak_bytes, up=True):>9}  {format_bytes(plan.host_bytes, up=True):>11}  "
        f"{_seconds(plan.seconds):>12}  {_seconds(plan.seconds * fit.virtual_nodes):>18}"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1_000 * seconds:.3g} ms"
