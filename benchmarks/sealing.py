"""What sealing costs: messages and steps whose frames are sealed beside those that are sent under a checksum.

Messages are exchanged by two processes on the loopback, each of which takes one message of either kind by turns. Steps
are measured within one job, as those with hashes are (``benchmarks/integrity.py``). Changes are those of
``benchmarks/changes.py`` and ``benchmarks/state_transfer.py``, in jobs of both kinds by turns.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

from benchmarks import changes, state_transfer
from benchmarks.integrity import WARM_UP, ratios, times_of
from benchmarks.tasks import TASKS, VIRTUAL_NODES

SIZES = (1 << 12, 1 << 16, 1 << 20, 25_000_000)
"""Bytes that go each way."""
BYTES = 1 << 30
"""That are exchanged of each size, in at most so many messages:"""
MESSAGES = 4_000
STEPS = {"digits": 1_600, "charlm": 640, "mlp": 256}
WORKERS = (2, 3)
CHANGE_RUNS = 2
"""Jobs of each kind; a change is measured several times in each,"""
JOINS, GAP = 3, 10
"""a join of 604 MB so often, with so many steps, each of a second, before the next change."""
KINDS = {"plain": ("--insecure-plaintext",), "sealed": ()}


def exchange(connections: dict[bool, socket.socket], size: int, messages: int) -> dict[bool, tuple[float, float]]:
    """Exchange messages over a plain and a sealed connection by turns; seconds of the clock and the CPU of one."""
    from virtualflow.transport.channel import Channel, FrameExchange, Lane, SealedChannel, checksum
    from virtualflow.transport.settings import CommunicatorSettings

    key, own, found = bytes(32), memoryview(os.urandom(size)), memoryview(bytearray(size))
    lanes = {
        sealed: Lane(
            {0: SealedChannel(one, "the other", key, key) if sealed else Channel(one, "the other")},
            lambda: None,
            CommunicatorSettings(),
        )
        for sealed, one in connections.items()
    }
    times: dict[bool, list[tuple[float, float]]] = {sealed: [] for sealed in lanes}
    for number in range(2 * messages):
        sealed = bool(number % 2)
        clock, cpu, under_way = time.perf_counter(), time.process_time(), FrameExchange()
        lanes[sealed].expect(0, found, under_way)
        lanes[sealed].send(0, own, 0 if sealed else checksum(own), under_way)
        lanes[sealed].wait(lambda under_way=under_way: not under_way.left, 60.0)  # type: ignore[misc]
        times[sealed].append((time.perf_counter() - clock, time.process_time() - cpu))
    for lane in lanes.values():
        lane.close()
    return {sealed: tuple(map(statistics.median, zip(*taken, strict=True))) for sealed, taken in times.items()}  # type: ignore[misc]


def _other_end(address: tuple[str, int], size: int, messages: int) -> None:
    exchange({sealed: socket.create_connection(address) for sealed in (False, True)}, size, messages)


def measure_messages(size: int, quick: bool) -> dict[str, Any]:
    """One size; a row of the figure."""
    messages = min(MESSAGES, BYTES // size) // (4 if quick else 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        arguments = (listener.getsockname(), size, messages)
        other = multiprocessing.get_context("spawn").Process(target=_other_end, args=arguments)
        other.start()
        found = exchange({sealed: listener.accept()[0] for sealed in (False, True)}, size, messages)
        other.join()
    (plain, plain_cpu), (sealed, sealed_cpu) = found[False], found[True]
    title = f"{size / 1e6:.3g} MB each way" if size > 1 << 20 else f"{size >> 10} KiB each way"
    return _row(title, 2, (1e3 * plain, 1e3 * sealed), sealed / plain, sealed_cpu / plain_cpu)


def measure_steps(task: str, workers: int, steps: int) -> dict[str, Any]:
    """One task; a row of the figure."""
    from benchmarks.unguarded import guarded

    times = times_of(task, steps, "--seal", workers=workers)
    marked = [step for step in times if guarded(step)]
    clock, cpu = ratios(times, marked)
    others = times.keys() - set(marked)
    medians = [1e3 * statistics.median(times[step][0] for step in chosen) for chosen in (others, marked)]
    return _row(TASKS[task].title, workers, (medians[0], medians[1]), clock, cpu)


def measure_changes(runs: int) -> list[dict[str, Any]]:
    """Pauses of the digits job's changes, and of joins of 604 MB with what their state takes beside the training."""
    found: dict[str, dict[str, list[float]]] = {kind: {} for kind in KINDS}
    for _ in range(runs):
        for kind, options in KINDS.items():
            pauses: dict[str, list[float]] = {}
            changes.ours(pauses, *options)
            for change, taken in pauses.items():
                found[kind].setdefault(f"digits CNN, 21k: {change}", []).extend(taken)
        for kind, options in KINDS.items():
            for change in state_transfer.measure(JOINS, GAP, *options)["changes"]:
                if change["to"] > change["from"] and change["over_ms"] is not None:
                    found[kind].setdefault("604 MB of state: grow", []).append(change["pause_ms"])
                    found[kind].setdefault("604 MB of state: transfer", []).append(change["state_ms"])
    rows = []
    for what, plain in found["plain"].items():
        ms = statistics.median(plain), statistics.median(found["sealed"][what])
        rows.append(_row(what, 3, ms, ms[1] / ms[0], None))
    return rows


def _row(what: str, workers: int, ms: tuple[float, float], clock: float, cpu: float | None) -> dict[str, Any]:
    of_cpu = "" if cpu is None else f", CPU x {cpu:.3f}"
    print(f"  {what:32} {workers}: {ms[0]:.3f} ms, sealed {ms[1]:.3f}, x {clock:.3f}{of_cpu}", flush=True)
    names = ("model", "workers", "plain_ms", "sealed_ms", "ratio", "cpu_ratio")
    return dict(zip(names, (what, workers, *ms, clock, cpu), strict=True))


def measure(quick: bool) -> dict[str, Any]:
    """All sizes and tasks."""
    rows = [measure_messages(size, quick) for size in SIZES]
    for task, steps in STEPS.items():
        measured = (steps - WARM_UP) // (4 if quick else 1)
        rows += [measure_steps(task, workers, WARM_UP + measured) for workers in WORKERS]
    rows += measure_changes(1 if quick else CHANGE_RUNS)
    return {"settings": {"virtual_nodes": VIRTUAL_NODES}, "rows": rows}
