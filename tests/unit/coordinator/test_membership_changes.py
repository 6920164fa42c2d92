"""Who is in the next generation, and why: the rules for joiners, drains and stops as a table."""

from __future__ import annotations

import pytest
from memberships import DRAINS, FIRST, NOW, SECOND, SETTINGS, cluster, in_words, member, pending, plan, training, worker

from virtualflow.coordinator.membership import decide
from virtualflow.coordinator.snapshot import Cluster

TABLE = [
    # --- joiners
    pytest.param(
        training(member("a"), worker("b")), "planned a b +b join", "b joins", None, id="a joiner that is ready enters"
    ),
    pytest.param(
        training(member("a"), worker("b", ready_at=NOW - 0.25), wanted=3),
        None,
        "1 worker training",
        NOW + 0.75,
        id="one of two that are wanted waits a moment for the other",
    ),
    pytest.param(
        training(member("a"), worker("b", ready_at=NOW - 1), wanted=3),
        "planned a b +b join",
        "b joins",
        None,
        id="but not longer",
    ),
    pytest.param(
        training(member("a"), member("b"), worker("c"), virtual_nodes=2),
        None,
        "2 workers training",
        None,
        id="where every virtual node has a worker nobody joins",
    ),
    pytest.param(
        training(member("a"), worker("b"), evaluating=True),
        None,
        "1 worker evaluating; changes wait",
        None,
        id="during an evaluation nobody joins",
    ),
    pytest.param(
        training(member("a"), worker("b"), worker("c"), **pending("a b", "b")),
        None,
        "the pending reason",
        None,
        id="a pending change is not disturbed by a further joiner",
    ),
    pytest.param(
        training(member("a"), worker("b", gone="killed"), **pending("a b", "b")),
        "planned a broken",
        "1 worker training on without b",
        None,
        id="a pending change whose joiner is lost is replaced",
    ),
    pytest.param(
        training(member("a"), worker("b"), broken={SECOND: NOW - 0.5}, **pending("a b", "b")),
        None,
        "the pending reason",
        NOW + 0.5,
        id="one that could not be built is tried again",
    ),
    pytest.param(
        training(member("a"), worker("b", failures=1), broken={SECOND: NOW - 1}, **pending("a b", "b")),
        "planned a b +b join",
        "b joins",
        None,
        id="after a moment",
    ),
    pytest.param(
        training(member("a"), worker("b", failures=1), worker("c"), broken={SECOND: NOW - 1}, **pending("a b", "b")),
        "planned a c +c join",
        "c joins",
        None,
        id="without the one that failed where there is another",
    ),
    pytest.param(
        cluster(member("a"), worker("b"), worker("c"), running=plan(FIRST, "a b", joiners="b"), trained=True),
        None,
        "generation 1: waiting for b to enter",
        None,
        id="nothing changes while a joiner receives the state",
    ),
    # --- drains
    pytest.param(
        training(member("a"), member("b", **DRAINS)), "planned a drain", "b drains", None, id="one that drains leaves"
    ),
    pytest.param(
        training(member("a"), member("b", **DRAINS), evaluating=True),
        "planned a drain",
        "b drains",
        None,
        id="also during an evaluation",
    ),
    pytest.param(
        training(member("a"), member("b", **DRAINS), worker("c")),
        "planned a c +c resize",
        "c joins; b drains",
        None,
        id="its replacement enters with the same change",
    ),
    pytest.param(
        training(member("a"), member("b", draining=True, deadline=NOW + 4), worker("c")),
        "planned a drain",
        "b drains",
        None,
        id="unless there is no time for that",
    ),
    pytest.param(
        training(member("a"), member("b", **DRAINS), worker("c"), **pending("a c", "c")),
        None,
        "the pending reason",
        NOW + 1,
        id="a slow replacement is waited for",
    ),
    pytest.param(
        training(member("a"), member("b", **DRAINS), worker("c"), **pending("a c", "c", proposed_at=NOW - 2)),
        "planned a drain",
        "b drains",
        None,
        id="but not for long",
    ),
    pytest.param(
        training(member("a"), member("b", **DRAINS), worker("c"), **pending("a c", "c", proposed_at=0, prepared=True)),
        None,
        "the pending reason",
        NOW + 25,
        id="one that is prepared everywhere is, until the deadline nears",
    ),
    pytest.param(
        training(member("a"), member("b", **DRAINS), worker("c"), **pending("a")),
        None,
        "the pending reason",
        None,
        id="a relief under way is not put off for a joiner",
    ),
    pytest.param(
        training(member("a"), member("b", **DRAINS), worker("c"), **pending("a b c", "c")),
        "planned a c +c resize",
        "c joins; b drains",
        None,
        id="a pending change that keeps it is replaced",
    ),
    pytest.param(
        training(member("a", **DRAINS)),
        None,
        "a drains and nobody else is there: training on until a replacement is ready",
        NOW + 25,
        id="the last one trains on",
    ),
    pytest.param(
        training(member("a", draining=True, deadline=NOW + 5)),
        "planned - drain",
        "the last worker leaves",
        None,
        id="until it must go",
    ),
    pytest.param(
        training(member("a", **DRAINS), worker("b")),
        "planned a b +b join",
        "b joins",
        NOW + 25,
        id="its replacement first receives the state from it",
    ),
    pytest.param(
        training(member("a", **DRAINS), member("b")),
        "planned b drain",
        "a drains",
        None,
        id="and then it leaves",
    ),
    pytest.param(
        training(member("a", **DRAINS), worker("b"), virtual_nodes=1),
        None,
        "a drains and nobody else is there: training on until a replacement is ready",
        NOW + 25,
        id="a single virtual node has no place for two",
    ),
    # --- stops
    pytest.param(
        training(member("a"), member("b"), worker("c"), stop="enough"),
        "planned - stop",
        "stopping: enough",
        None,
        id="at a stop all leave at the same step",
    ),
    pytest.param(
        training(member("a"), stop="enough", **pending("")), None, "stopping: enough", None, id="and it is said once"
    ),
    pytest.param(
        cluster(member("a", left=True), member("b"), running=plan(SECOND, ""), trained=True),
        None,
        "waiting for b to leave",
        None,
        id="the last generation is over when all have left",
    ),
    pytest.param(
        cluster(member("a", left=True), running=plan(SECOND, ""), trained=True),
        "over",
        "the last worker has left",
        None,
        id="then the job waits for workers",
    ),
]


@pytest.mark.parametrize(("state", "expected", "reason", "wake_at"), TABLE)
def test_the_rules(state: Cluster, expected: str | None, reason: str, wake_at: float | None) -> None:
    decision = decide(NOW, state, SETTINGS)
    assert (in_words(decision), decision.reason, decision.wake_at) == (expected, reason, wake_at)
