"""Leader election as a table: what a candidate does about a lease that it sees, and how it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from leases import A

from virtualflow_operator.k8s.leader_election import Observation, Record, decide, micro_time, observe, steady_clock

MINE = "2026-01-01T00:00:00.000001Z"
OTHER = "2026-01-01T00:00:00.000002Z"


def record(holder: str, acquired: str = OTHER, duration: float | None = 10.0) -> Record:
    return Record(holder, duration, 3, acquired, "2026-01-01T00:00:05.000000Z")


@pytest.mark.parametrize(
    ("seen", "age", "action", "wait"),
    [
        pytest.param(record(""), 0.0, "take", 0.0, id="released"),
        pytest.param(record("operator-b"), 0.0, "wait", 2.0, id="another leads"),
        pytest.param(record("operator-b"), 8.5, "wait", 1.5, id="another's runs out before the next look"),
        pytest.param(record("operator-b"), 10.0, "take", 0.0, id="another's has run out"),
        pytest.param(record("operator-b", duration=30.0), 12.0, "wait", 2.0, id="another promised a longer duration"),
        pytest.param(record("operator-b", duration=None), 9.0, "wait", 1.0, id="no duration in the record"),
        pytest.param(record("operator-a", MINE), 0.0, "renew", 0.0, id="ours"),
        pytest.param(record("operator-a", MINE), 99.0, "renew", 0.0, id="ours, late"),
        pytest.param(record("operator-a"), 1.0, "wait", 2.0, id="a namesake's, seen just now"),
        pytest.param(record("operator-a"), 3.0, "take", 0.0, id="a namesake's that stands still: our predecessor"),
        pytest.param(record("operator-b", MINE), 0.0, "wait", 2.0, id="another's of the same moment"),
    ],
)
def test_what_a_candidate_does(seen: Record | None, age: float, action: str, wait: float) -> None:
    decision = decide(Observation(seen, 100.0), MINE, 100.0 + age, A)
    assert (decision.action, decision.wait) == (action, pytest.approx(wait))
    assert decision.reason


def lease(holder: str = "x", renewed: str = "1", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": holder, "renewTime": renewed, **spec}}


def test_only_a_change_of_the_record_counts_as_a_renewal() -> None:
    first = observe(None, lease(), 5.0)
    labelled = lease()
    labelled["metadata"] = {"resourceVersion": "8", "labels": {"a": "b"}}
    assert observe(first, labelled, 9.0) == first
    assert observe(first, lease(renewed="2"), 9.0).since == 9.0
    gone = observe(first, None, 9.0)
    assert gone == Observation(None, 9.0)
    assert decide(gone, None, 12.0, A).action == "wait", "its holder may live"
    assert decide(gone, None, 19.0, A).action == "create"
    assert decide(observe(None, None, 9.0), None, 9.0, A).action == "create"


@pytest.mark.parametrize(
    "spec",
    [None, 5, {}, {"holderIdentity": None, "leaseDurationSeconds": "ten", "leaseTransitions": -3, "renewTime": 5}],
    ids=["null", "a number", "empty", "wrong types"],
)
def test_a_malformed_lease_counts_as_free(spec: object) -> None:
    seen = observe(None, {"spec": spec}, 0.0)
    assert decide(seen, None, 0.0, A).action == "take"


def test_times_are_written_as_the_api_writes_them() -> None:
    assert micro_time(datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)) == "2026-01-02T03:04:05.000006Z"
    assert steady_clock() <= steady_clock()


@pytest.mark.slow
def test_leaving_at_once_says_why_and_cleans_up_nothing() -> None:
    script = (
        "import atexit, logging\n"
        "from virtualflow_operator.k8s.leader_election import leave_the_lease\n"
        "logging.basicConfig()\n"
        "atexit.register(print, 'cleaned up')\n"
        "try:\n"
        "    leave_the_lease('another leads')\n"
        "finally:\n"
        "    print('cleaned up')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "lost the lease: another leads; leaving at once" in ended.stderr
