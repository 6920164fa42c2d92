"""How far a decision about a job without a queue walks: few modules, and none of what admits other jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from scenes import Stage
from trace_reconcile import Trace, at_rest, scaled, trace_reconcile, trace_scale

SATELLITES = ("kueue", "queues", "scheduling", "simulator")


def check(trace: Trace) -> None:
    assert not [module for module in trace.modules if module.startswith(SATELLITES)]
    assert trace.computed["most"] == trace.computed["desired"] == 1
    assert trace.computed["hash_of"] <= 4, "each template's once, all of them once, and a new pod's own"


@pytest.mark.parametrize("make", [at_rest, scaled])
def test_a_decision_passes_few_modules_and_computes_nothing_twice(make: Callable[[], Stage]) -> None:
    trace = trace_reconcile(make)
    assert len(trace.modules) <= 15, sorted(trace.modules)
    check(trace)


def test_a_scale_from_the_watch_to_the_pod_passes_no_code_of_queues() -> None:
    asyncio.run(trace_scale())  # imports everything
    trace, made = asyncio.run(trace_scale())
    assert "digits-workers-2" in made
    assert len(trace.modules) <= 30, sorted(trace.modules)
    check(trace)
