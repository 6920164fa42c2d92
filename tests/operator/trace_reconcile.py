"""How far one decision about a job walks: the modules of the operator that it passes, and how often it changes file.

    PYTHONPATH=tests:tests/operator python tests/operator/trace_reconcile.py

A job without a queue trains on two workers. ``sys.setprofile`` counts the calls of three stretches: ``reconcile`` of
the job at rest, ``reconcile`` after ``kubectl scale``, and the whole way of that scale, from the watch through the
work-queue to the pod that is made. ``--modules`` lists the modules.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from scenes import NOW, SETTINGS, Spec, Stage, edit, training

import virtualflow_operator
from virtualflow_operator.controllers.coordinator_links import _Line
from virtualflow_operator.controllers.manager import Manager
from virtualflow_operator.jobs import manifests
from virtualflow_operator.jobs.reconcile import reconcile
from virtualflow_operator.k8s import TokenBucket
from virtualflow_operator.observability import Metrics

ROOT = Path(virtualflow_operator.__file__).parent
KEY = ("ml", "digits")
ONCE = ("most", "desired", "hash_of")
"""What is to be computed once for each thing that it is computed of."""


@dataclass
class Trace:
    """What was passed between ``start`` and ``stop``."""

    modules: Counter[str] = field(default_factory=Counter)
    """Calls into each, by its path in the operator."""
    changes: int = 0
    """Calls from one of the operator's files into another."""
    computed: Counter[str] = field(default_factory=Counter)
    """How often what stands in ``ONCE``."""

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        here = _module(frame)
        if event != "call" or not here:
            return
        self.modules[here] += 1
        if frame.f_code.co_name in ONCE:
            self.computed[frame.f_code.co_name] += 1
        caller = frame.f_back
        while caller is not None and not _module(caller):
            caller = caller.f_back
        self.changes += caller is None or _module(caller) != here

    def __str__(self) -> str:
        often = ", ".join(f"{name} {count} times" for name, count in sorted(self.computed.items()))
        return f"{len(self.modules)} modules, {self.changes} changes of file; {often}"


def _module(frame: FrameType) -> str:
    """The path of a frame's file in the operator; empty: it is not the operator's."""
    name = frame.f_code.co_filename
    return name.removeprefix(f"{ROOT}/") if name.startswith(f"{ROOT}/") else ""


def trace_reconcile(make: Callable[[], Stage]) -> Trace:
    """One decision; another one before it, of another job, has imported everything."""
    reconcile(make().scene, NOW, SETTINGS)
    scene, trace = make().scene, Trace()
    trace.start()
    try:
        reconcile(scene, NOW, SETTINGS)
    finally:
        trace.stop()
    return trace


def at_rest() -> Stage:
    """Nothing is to be done."""
    return training(2)


def scaled() -> Stage:
    """One more worker is wanted."""
    return edit(training(2), replicas=3)


class _Api:
    """An API server that takes everything."""

    def __init__(self, job: Spec) -> None:
        self.job = job
        self.made: list[str] = []

    async def create(self, _: object, __: str, body: Spec, **___: object) -> Spec:
        self.made.append(body["metadata"]["name"])
        return _stored(body)

    async def patch(self, _: object, __: str, ___: str, body: Spec, *____: object) -> Spec:
        return _stored(self.job | {"status": self.job["status"] | body["status"]})


class _Coordinator:
    """The client of a coordinator that does as it is told."""

    async def send(self, _: object) -> None:
        pass


def _stored(body: Spec, version: str = "3") -> Spec:
    stored = copy.deepcopy(body)
    stored["metadata"] = {"uid": stored["metadata"]["name"]} | stored["metadata"] | {"resourceVersion": version}
    return stored


async def trace_scale() -> tuple[Trace, list[str]]:
    """From the watch's word of a scale to what is made for it; the names of that."""
    trace, before, after, unused = Trace(), training(2), _stored(scaled().raw, "2"), None
    api: Any = _Api(after)
    manager = Manager(SETTINGS, api, unused, [b"k" * 64], Metrics(job_metrics=True), unused)  # type: ignore[arg-type]
    service = _stored(manifests.service(before.job, 0))
    service["spec"]["clusterIP"] = "10.0.0.1"
    manager.store.services.put(service)
    manager.store.jobs.put(before.raw)
    manager.store._pods_of[KEY] = {pod.name: pod for pod in before.pods}
    assert before.link is not None
    coordinator: Any = _Coordinator()
    bucket = TokenBucket(100.0, 100.0)
    manager.links._lines[KEY] = _Line(
        before.link, before.pods[0].ip, lambda: coordinator, coordinator, 1 << 16, bucket, bucket
    )
    done = asyncio.Event()

    async def process(key: tuple[str, str]) -> float | None:
        try:
            return await manager._process(key)
        finally:
            trace.stop()
            done.set()

    running = asyncio.create_task(manager.queue.run(process))
    await asyncio.sleep(0)
    trace.start()  # this thread's: what the loop runs between the watch and the end of the process is counted, too
    manager.see_job("MODIFIED", after)
    await asyncio.wait_for(done.wait(), 30)
    manager.queue.stop()
    await running
    return trace, api.made


def main() -> None:
    """Print the counts."""
    asyncio.run(trace_scale())  # imports everything
    traces = {"reconcile at rest": trace_reconcile(at_rest), "reconcile of a scale": trace_reconcile(scaled)}
    traces["a whole scale"], made = asyncio.run(trace_scale())
    assert "digits-workers-2" in made, made
    for name, trace in traces.items():
        print(f"{name}: {trace}")
        if "--modules" in sys.argv:
            print("".join(f"    {module}: {calls}\n" for module, calls in sorted(trace.modules.items())), end="")


if __name__ == "__main__":
    main()
