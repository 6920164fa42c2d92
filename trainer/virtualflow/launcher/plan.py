"""``virtualflow plan``: from profiles to what fits into a device's memory, and to the devices worth asking for.

A script is profiled first, as ``virtualflow profile`` does it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from virtualflow.atomic_file import write_whole
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.launcher.options import check_target, check_trainer
from virtualflow.launcher.profile import measure, target_of
from virtualflow.launcher.training_program import TrainingProgram
from virtualflow.launcher.usage import complain
from virtualflow.memory import (
    Action,
    Advice,
    Budget,
    DeviceType,
    Division,
    DoesNotFit,
    Fit,
    Interconnect,
    Plan,
    ShardedFit,
    Timeline,
    advise,
    fit,
    format_bytes,
    parse_bytes,
    what_fits,
    what_fits_sharded,
)
from virtualflow.memory.settings import PlannerSettings
from virtualflow.progress import ProgressBar
from virtualflow.protocol.device_profile import ChainProfile, DeviceProfile, read_profile, seconds_for
from virtualflow.protocol.settings import MAX_WORKERS, Redundancy
from virtualflow.protocol.wording import counted, milliseconds

_MORE_FITS = 4
"""Numbers of virtual nodes that ``virtualflow plan`` shows above the smallest that fits."""
_TIMELINE_COLUMNS = 72
"""Columns of its picture of the time."""

ACCELERATORS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""One of them is there wherever torch finds a GPU: with NVIDIA's driver, on Jetson, under WSL, with ROCm."""

_ROWS = {"compute": 1, "copy-out": 2, "copy-in": 3}
_MICROSECONDS = 1e6


@dataclass(frozen=True)
class DeviceFit:
    device: str
    batch: int
    budget: Budget
    fits: tuple[Fit, ...]
    """By the number of virtual nodes; those that fit are the last ones."""


@dataclass(frozen=True)
class ShardedPlan:
    """One device, by the number of workers that have such a one each."""

    device: str
    batch: int
    virtual_nodes: int
    device_bytes: int
    redundancy: Redundancy
    fits: tuple[ShardedFit, ...]


@dataclass(frozen=True)
class PlanAnswer:
    """All that ``virtualflow plan`` found, as ``--json`` prints it."""

    memory: tuple[DeviceFit, ...]
    """Of each profile that has blocks."""
    advice: Advice | None
    """If devices were named."""
    left_out: tuple[str, ...]
    """Why devices that were named take no part."""
    sharded: tuple[ShardedPlan, ...] = ()
    """If parameters are divided: of each profile."""


def plan(arguments: Namespace) -> int:
    """Print what fits; the exit code.

    Raises:
        ConfigurationError: a profile or a size makes no sense, or nothing fits; the sentence says what would.
    """
    names, program, given = split(arguments.profiles, arguments.module)
    files = [Path(name) for name in names]
    profiles = [read_profile(file) for file in files]
    _check_words(arguments)
    if program is not None:
        program.check()
        check_trainer()
        _check_device(arguments)
        target = target_of(program)
        # What the script prints is none of the answer.
        measured = measure(program, given, target, virtual_nodes=arguments.virtual_nodes, output=sys.stderr.buffer)
        complain(f"the profile is written to {target}")
        files, profiles = [target, *files], [measured, *profiles]
    answer = answer_for(profiles, files, arguments)
    if arguments.trace is not None:
        _write_trace(Path(arguments.trace), answer, profiles)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=1).decode())
        return 0
    parts = [describe_fits(each.device, each.batch, each.budget, each.fits) for each in answer.memory]
    parts += [describe_sharded(each) for each in answer.sharded]
    if answer.advice is not None:
        parts.insert(0, "\n".join([describe_advice(answer.advice), *answer.left_out]))
    elif program is not None and answer.sharded:
        parts.append(describe_sharded_command(answer.sharded[0], [*program.words, *given], arguments.host))
    elif program is not None:
        first = answer.memory[0]  # that of the script
        device = arguments.device or str(first.budget.device)
        parts.append(describe_command(first.fits, [*program.words, *given], device, arguments.host))
    print("\n\n".join(parts))
    return 0


def _write_trace(path: Path, answer: PlanAnswer, profiles: Sequence[DeviceProfile]) -> None:
    """Write down how the first device spends a virtual node."""
    if not answer.memory:
        raise ConfigurationError("--trace shows what becomes of blocks; name a profile that has some")
    memory = answer.memory[0]
    chain = next(each.chain for each in profiles if each.chain is not None and each.device == memory.device)
    fastest, _ = fastest_of(memory.fits)
    trace = trace_of(memory.device, fastest, [block.name for block in chain.sizes[0].blocks])
    try:
        write_whole(path, msgspec.json.encode(trace))
    except OSError as error:
        raise VirtualFlowError(f"the trace cannot be written to {path}: {error.strerror}") from error


def split(
    words: Sequence[str], module: Sequence[str] | None = None
) -> tuple[list[str], TrainingProgram | None, list[str]]:
    """The profiles, what is to be measured, and its arguments.

    What ends in ``.py`` is a script, and all behind it is its own. Beside ``-m`` words that end in ``.json`` are
    profiles, up to the first that does not; all others are the module's.
    """
    if module is not None:
        names = list(takewhile(lambda word: word.endswith(".json"), words))
        return names, TrainingProgram(module[0], is_module=True), [*module[1:], *words[len(names) :]]
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    if not words:
        raise ConfigurationError("say what to plan for: profiles, a script that ends in .py, or -m with a module")
    program = TrainingProgram(words[script]) if script < len(words) else None
    return list(words[:script]), program, list(words[script + 1 :])


def _check_device(arguments: Namespace) -> None:
    """Refuse to measure for a plan of memory whose size nobody knows: a CPU does not say which part of its is meant."""
    if arguments.device is None and arguments.devices is None and not any(map(os.path.exists, ACCELERATORS)):
        raise ConfigurationError(
            "on a machine without a GPU nothing says how much memory the device has; give --device, like 24GiB"
        )


def _check_words(arguments: Namespace) -> None:
    """Refuse what makes no sense before a script is measured for it."""
    for size in (arguments.device, arguments.host):
        if size is not None:
            parse_bytes(size)
    if arguments.devices is not None:
        parse_devices(arguments.devices)
    if arguments.bandwidth is not None:
        parse_bandwidth(arguments.bandwidth)
        if arguments.devices is None and arguments.shard is None:
            raise ConfigurationError("--bandwidth is that between devices; name them by --devices, or leave it out")
    if arguments.trace is not None:
        check_target(Path(arguments.trace), "--trace")
    if arguments.shard is None:
        if arguments.redundancy is not None:
            raise ConfigurationError("--redundancy is about shares; give --shard parameters, or leave it out")
        return
    beside = {
        "--devices": arguments.devices,
        "--bandwidth": arguments.bandwidth,
        "--trace": arguments.trace,
        "--optimizer host": arguments.optimizer == "host" or None,
    }
    given = [name for name, value in beside.items() if value is not None]
    if given:
        raise ConfigurationError(
            f"{given[0]} has nothing to say where parameters are divided over workers of one type of device; leave it "
            "out, or leave out --shard"
        )


def answer_for(profiles: Sequence[DeviceProfile], files: Sequence[Path], arguments: Namespace) -> PlanAnswer:
    without = [profile for profile in profiles if profile.chain is None]
    if without and arguments.devices is None:
        raise ConfigurationError(
            f"the profile of {without[0].device} says nothing of the model's blocks: "
            f"{without[0].blocks or 'it is an old one, so measure it anew'}; give --devices to divide virtual nodes by "
            "speed alone"
        )
    if arguments.shard is not None:
        sharded = [_sharded(profile, profile.chain, arguments) for profile in profiles if profile.chain]
        return PlanAnswer((), None, (), tuple(sharded))
    if arguments.devices is None:
        planned = [_memory(profile, profile.chain, arguments) for profile in profiles if profile.chain]
        return PlanAnswer(tuple(planned), None, ())
    asked = parse_devices(arguments.devices)
    found = {name: _profile_of(name, profiles, files) for name in asked}
    memory: list[DeviceFit] = []
    kinds: list[DeviceType] = []
    left_out: list[str] = []
    virtual_nodes = arguments.virtual_nodes or profiles[0].virtual_nodes
    batch = arguments.batch or profiles[0].batch_size
    for name, count in asked.items():
        try:
            seconds, planned_memory = _speeds(found[name], batch, virtual_nodes, arguments)
        except DoesNotFit as error:
            left_out.append(f"{name} takes no part: {error}")
            continue
        memory += planned_memory
        kinds.append(DeviceType(name, count, seconds, found[name].step_seconds or 0.0))
    if not kinds:
        raise ConfigurationError("; ".join(left_out))
    advice = advise(virtual_nodes, kinds, _network(list(found.values()), arguments.bandwidth))
    unknown = [kind.name for kind in kinds if found[kind.name].step_seconds is None]
    if unknown:
        reason = (
            f"{advice.reason}; what {' and '.join(unknown)} takes beside micro-batches was not measured (by an old "
            "profile, or in steps of a minute and more): measure it anew, if need be with fewer virtual nodes"
        )
        advice = replace(advice, reason=reason)
    return PlanAnswer(tuple(memory), advice, tuple(left_out))


def _network(profiles: Sequence[DeviceProfile], bandwidth: str | None) -> Interconnect | None:
    if bandwidth is None:
        return None
    gradients = max(profile.sum_bytes for profile in profiles)
    if not gradients:
        raise ConfigurationError(
            f"--bandwidth: the profile of {profiles[0].device} is an old one, which says nothing of the gradients' "
            "bytes; measure it anew with virtualflow profile"
        )
    by_tree = all(profile.reproducibility == "bitwise" for profile in profiles)
    return Interconnect(gradients, parse_bandwidth(bandwidth), by_tree)


def parse_bandwidth(text: str) -> float:
    """The bytes a second of ``10Gbit``, ``10Gbps``, ``10Gb/s`` or ``1.25GB/s``: a small b is a bit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMGT]?)(bit|b|B)(?:/s|ps)?", text.strip())
    speed = 0.0
    if found is not None:
        speed = float(found[1]) * 1_000 ** " kMGT".index(found[2] or " ") / (1 if found[3] == "B" else 8)
    if not speed:
        raise ConfigurationError(f"--bandwidth {text}: write one like 10Gbit/s or 1.25GB/s")
    return speed


def parse_devices(text: str) -> dict[str, int]:
    """Names and counts from ``V100:2,T4:4``; without a number it is one."""
    devices: dict[str, int] = {}
    for part in text.split(","):
        name, colon, number = part.strip().rpartition(":")
        if not colon:
            name, number = number, "1"
        count = int(number) if number.isdecimal() and len(number) < 6 else 0
        if not name or name in devices or not 1 <= count <= MAX_WORKERS:
            raise ConfigurationError(f"--devices {text}: write each type once with its number, like V100:2,T4:4")
        devices[name] = count
    return devices


def _profile_of(name: str, profiles: Sequence[DeviceProfile], files: Sequence[Path]) -> DeviceProfile:
    """That of a device of this name, else that in a file of this name: a processor has one name under any CPU limit."""
    fitting = [profile for profile in profiles if name.lower() in profile.device.lower()]
    by_file = [profile for profile, file in zip(profiles, files, strict=True) if name.lower() in file.name.lower()]
    if len(fitting) != 1 and len(by_file) == 1:
        return by_file[0]
    if len(fitting) != 1:
        known = ", ".join(profile.device for profile in profiles)
        found = "no profile is" if not fitting else f"{counted(len(fitting), 'profile')} are"
        raise ConfigurationError(
            f"--devices: {found} of a device {name} (there are: {known}); measure one with virtualflow profile on such "
            "a device, and name it by a part of its own name or of its file's"
        )
    return fitting[0]


def _budget(chain: ChainProfile, arguments: Namespace) -> Budget:
    device = parse_bytes(arguments.device) if arguments.device is not None else chain.device_bytes
    if device is None:
        raise ConfigurationError("the profile does not say how much memory the device has; give --device, like 24GiB")
    host = parse_bytes(arguments.host) if arguments.host is not None else chain.host_bytes
    return Budget(device, host, arguments.optimizer)


def _memory(profile: DeviceProfile, chain: ChainProfile, arguments: Namespace) -> DeviceFit:
    budget, batch = _budget(chain, arguments), arguments.batch or profile.batch_size
    if arguments.virtual_nodes is None:
        with ProgressBar(f"planning for {profile.device}", 1.0) as progress:
            fits = what_fits(chain, batch, budget, PlannerSettings(), more=_MORE_FITS, tell=progress.reach)
    else:
        fits = (fit_or_refuse(chain, batch, arguments.virtual_nodes, budget),)
    return DeviceFit(profile.device, batch, budget, fits)


def _sharded(profile: DeviceProfile, chain: ChainProfile, arguments: Namespace) -> ShardedPlan:
    virtual_nodes, batch = arguments.virtual_nodes or profile.virtual_nodes, arguments.batch or profile.batch_size
    budget = _budget(chain, arguments)
    redundancy: Redundancy = arguments.redundancy or "peer"
    copies = 2 if redundancy == "peer" else 1
    fits = what_fits_sharded(chain, batch, virtual_nodes, budget, copies, more=_MORE_FITS)
    return ShardedPlan(profile.device, batch, virtual_nodes, budget.device, redundancy, fits)


def _speeds(
    profile: DeviceProfile, batch: int, virtual_nodes: int, arguments: Namespace
) -> tuple[Mapping[int, float], list[DeviceFit]]:
    """Seconds of a micro-batch by how many virtual nodes are fused into it, and what fits of one alone.

    Only a ``statistical`` job fuses, and only as many as fit with a plan.
    """
    micro_batch, left = divmod(batch, virtual_nodes)
    if left or not micro_batch:
        raise ConfigurationError(
            f"{counted(virtual_nodes, 'virtual node')} do not divide a batch of {batch}; give --virtual-nodes"
        )
    widths = (
        [1] if profile.reproducibility == "bitwise" else [1 << power for power in range(virtual_nodes.bit_length())]
    )
    widths = [width for width in widths if width <= virtual_nodes]
    unknown = profile.chain is not None and profile.chain.device_bytes is None and arguments.device is None
    if profile.chain is None or unknown:  # that all fits is then the user's business
        measured = range(profile.sizes[0].micro_batch, profile.sizes[-1].micro_batch + 1)
        if micro_batch not in measured:
            raise ConfigurationError(
                f"the profile of {profile.device} is of micro-batches of {measured[0]} to {measured[-1]} samples, "
                f"and virtual nodes have {micro_batch}; give --virtual-nodes {profile.virtual_nodes}, or measure anew"
            )
        inside = [width for width in widths if micro_batch * width in measured]
        return {width: seconds_for(profile, micro_batch * width) for width in inside}, []
    budget = _budget(profile.chain, arguments)
    one = fit_or_refuse(profile.chain, batch, virtual_nodes, budget)
    seconds: dict[int, float] = {}
    for width in widths:
        fused = one if width == 1 else fit(profile.chain, batch, virtual_nodes, budget, PlannerSettings(), fused=width)
        if fused.plan is None:
            break
        seconds[width] = fused.plan.seconds
    return seconds, [DeviceFit(profile.device, batch, budget, (one,))]


def fit_or_refuse(chain: ChainProfile, batch: int, virtual_nodes: int, budget: Budget) -> Fit:
    found = fit(chain, batch, virtual_nodes, budget, PlannerSettings())
    if found.plan is None:
        raise DoesNotFit(found.reason, found.smallest_bytes)
    return found


def trace_of(device: str, fit: Fit, names: Sequence[str]) -> dict[str, Any]:
    """A plan's virtual node as a Chrome trace: what computes and copies when, and the memory over it. Pure.

    The format is the "Trace Event Format" of the Chromium project, which chrome://tracing and https://ui.perfetto.dev
    open.
    """
    plan = fit.plan
    assert plan is not None
    events: list[dict[str, Any]] = [
        _named("process_name", 0, f"{device}: one of {counted(fit.virtual_nodes, 'virtual node')}")
    ]
    events += [_named("thread_name", row, resource) for resource, row in _ROWS.items()]
    events += [
        {
            "name": f"{span.kind} {names[span.block]}",
            "cat": span.kind,
            "ph": "X",
            "pid": 0,
            "tid": _ROWS[span.resource],
            "ts": span.start * _MICROSECONDS,
            "dur": (span.end - span.start) * _MICROSECONDS,
        }
        for span in plan.timeline.spans
    ]
    events += [
        {"name": "memory", "ph": "C", "pid": 0, "ts": moment * _MICROSECONDS, "args": {"bytes": used}}
        for moment, used in plan.timeline.memory
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _named(what: str, row: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": 0, "tid": row, "args": {"name": name}}


# What ``virtualflow plan`` says, for people. Pure.

_COLUMNS = (
    ("virtual", "nodes", 7),
    ("samples", "each", 7),
    ("memory", "to keep all", 11),
    ("memory", "at least", 9),
    ("blocks", "kept", 6),
    ("blocks", "swapped", 7),
    ("blocks", "recomputed", 10),
    ("memory", "at its peak", 11),
    ("memory", "on the host", 11),
    ("time of a", "virtual node", 12),
    ("time of a step", "of one device", 14),
)
"""Headings of two lines, and widths."""
_SIGNS = {"forward": "f", "recompute": "r", "backward": "b", "swap-out": "o", "swap-in": "i"}


def describe_fits(device: str, batch: int, budget: Budget, fits: Sequence[Fit]) -> str:
    """The table of the numbers of virtual nodes, and the plan of the fastest of them."""
    room, smallest = format_bytes(budget.device), next(fit for fit in fits if fit.plan is not None)
    fastest, plan = fastest_of(fits)
    number = counted(fastest.virtual_nodes, "virtual node")
    where = f"with {number}"
    if len(fits) > 1:
        first = counted(smallest.virtual_nodes, "virtual node")
        where = f"from {first} on; the step is shortest with {fastest.virtual_nodes}"
    step = milliseconds(1e3 * plan.seconds * fastest.virtual_nodes)
    host = "as much on the host as is needed" if budget.host is None else f"{format_bytes(budget.host)} on the host"
    lines = [
        f"{device}: a batch of {batch} fits into {room} {where}: {step} on one device",
        f"memory: {room} on the device, {host}; the optimizer's state is on the {budget.optimizer}",
        "",
        "  ".join(f"{first:>{width}}" for first, _, width in _COLUMNS),
        "  ".join(f"{second:>{width}}" for _, second, width in _COLUMNS),
    ]
    lines += [_row(fit) for fit in fits]
    lines += ["", f"with {number}: {plan.reason}"]
    return "\n".join([*lines, *describe_plan(plan), *draw(plan.timeline, _TIMELINE_COLUMNS)])


def describe_command(fits: Sequence[Fit], command: Sequence[str], device: str, host: str | None) -> str:
    """How to run a script with the fastest number of virtual nodes, and within this memory."""
    fastest, plan = fastest_of(fits)
    words = ["virtualflow", "run", "--workers", "1", "--virtual-nodes", str(fastest.virtual_nodes)]
    if plan.count(Action.KEEP) < len(plan.blocks):
        words += ["--device-memory", device]
        words += ["--host-memory", host] if host is not None else []
    return f"to run it so: {shlex.join([*words, *command])}"


_SHARDED_COLUMNS = (
    ("workers", "", 7),
    ("parameters", "and states", 10),
    ("waiting", "sums", 8),
    ("parameters", "gathered", 10),
    ("gradients", "of blocks", 9),
    ("", "activations", 11),
    ("messages", "(host)", 8),
    ("memory of", "a worker", 9),
    ("at least,", "by a plan", 9),
)
"""Headings of two lines, and widths."""


def describe_sharded(plan: ShardedPlan) -> str:
    """The table of the numbers of workers that parameters can be divided over."""
    room, first = format_bytes(plan.device_bytes), fewest_of(plan)
    nodes = counted(plan.virtual_nodes, "virtual node")
    enough = "from 1 worker on, so nothing has to be divided" if first == 1 else f"from {first} workers on"
    keeping = next((row.workers for row in plan.fits if row.device_bytes <= plan.device_bytes), None)
    stay = "all activations stay" if keeping == first else "activations have a plan"
    if keeping is not None and keeping > first:
        stay += f", and all stay from {keeping} workers on"
    keepers = "two workers" if plan.redundancy == "peer" else f"one worker (redundancy {plan.redundancy})"
    lines = [
        f"{plan.device}: a batch of {plan.batch} in {nodes} fits into workers of {room} {enough}",
        f"memory: parameters and the optimizer's state are divided, each share is kept by {keepers}; {stay}",
        "",
        "  ".join(f"{above:>{width}}" for above, _, width in _SHARDED_COLUMNS),
        "  ".join(f"{below:>{width}}" for _, below, width in _SHARDED_COLUMNS),
    ]
    for row in plan.fits:
        parts = (row.kept_bytes, row.sums_bytes, row.gathered_bytes, row.gradient_bytes, row.activation_bytes)
        sizes = (*parts, row.message_bytes, row.device_bytes, row.planned_bytes)
        shown = [format_bytes(size, up=True) for size in sizes]
        cells = zip([str(row.workers), *shown], _SHARDED_COLUMNS, strict=True)
        line = "  ".join(f"{cell:>{width}}" for cell, (_, _, width) in cells)
        fits = "" if row.device_bytes <= plan.device_bytes else "  fits by a plan"
        lines.append(line + ("  does not fit" if row.planned_bytes > plan.device_bytes else fits))
    return "\n".join(lines)


def describe_sharded_command(plan: ShardedPlan, command: Sequence[str], host: str | None) -> str:
    """How to run a script on the fewest workers that are enough."""
    words = ["virtualflow", "run", "--workers", str(fewest_of(plan)), "--virtual-nodes", str(plan.virtual_nodes)]
    if fewest_of(plan) > 1:
        words += ["--shard", "parameters", "--redundancy", plan.redundancy]
    if next(row for row in plan.fits if row.workers == fewest_of(plan)).device_bytes > plan.device_bytes:
        words += ["--device-memory", str(plan.device_bytes), *([] if host is None else ["--host-memory", host])]
    return f"to run it so: {shlex.join([*words, *command])}"


def fewest_of(plan: ShardedPlan) -> int:
    return next(row.workers for row in plan.fits if row.planned_bytes <= plan.device_bytes)


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
    head = f"{'':<15} {'devices':<28} {'virtual nodes each':<28} {'fused':<10} {'exchange':>10} {'step':>10}"
    return "\n".join([advice.reason, "", head, *(_division(name, division) for name, division in rows)])


def _division(name: str, division: Division) -> str:
    devices = " + ".join(f"{len(share.virtual_nodes)} {share.name}" for share in division.shares)
    nodes = ", ".join(_counts(share.virtual_nodes) for share in division.shares)
    fused = ", ".join(str(share.fused) for share in division.shares)
    exchange, step = milliseconds(1e3 * division.exchange), milliseconds(1e3 * division.seconds)
    if division.devices > 1 and not division.exchange:
        exchange = "?"
    return f"{name:<15} {devices:<28} {nodes:<28} {fused:<10} {exchange:>10} {step:>10}"


def _counts(virtual_nodes: Sequence[int]) -> str:
    low, high = min(virtual_nodes), max(virtual_nodes)
    return str(low) if low == high else f"{low} to {high}"


def _row(fit: Fit) -> str:
    cells = [str(fit.virtual_nodes), str(fit.micro_batch)]
    cells += [format_bytes(size, up=True) for size in (fit.keep_bytes, fit.smallest_bytes)]
    plan = fit.plan
    if plan is not None:
        cells += [str(plan.count(action)) for action in (Action.KEEP, Action.SWAP, Action.RECOMPUTE)]
        cells += [format_bytes(size, up=True) for size in (plan.peak_bytes, plan.host_bytes)]
        cells += [milliseconds(1e3 * seconds) for seconds in (plan.seconds, plan.seconds * fit.virtual_nodes)]
    shown = "  ".join(f"{cell:>{width}}" for cell, (_, _, width) in zip(cells, _COLUMNS, strict=False))
    return shown if plan is not None else f"{shown}  does not fit"
