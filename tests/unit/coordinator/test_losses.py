"""Who is declared lost, and whose failures are counted: what silence and closed connections tell of a worker."""

from __future__ import annotations

from dataclasses import replace

import pytest
from memberships import (
    FIRST,
    HEARTBEAT,
    NOW,
    RECONNECT,
    SECOND,
    SETTINGS,
    SILENCE,
    cluster,
    member,
    plan,
    silent,
    training,
    worker,
)

from virtualflow.coordinator.membership import find_lost, find_suspects, next_limit
from virtualflow.coordinator.snapshot import Worker


def test_a_worker_that_is_silent_is_declared_lost_at_the_moment_that_was_named() -> None:
    state = training(member("a"), member("b", last_heard=NOW - 0.1), member("c", **silent(0.3)))
    moment = next_limit(NOW, state, SETTINGS)
    assert moment is not None
    assert not find_lost(moment, state, SETTINGS), "the others are silent as well"
    heard = [replace(one, last_heard=NOW + 3.0) for one in state.workers.values() if one.connected]
    state = training(*heard, state.workers["c"])
    assert list(find_lost(moment, state, SETTINGS)) == ["c"]


TEN = 10 * HEARTBEAT
ISOLATED = [
    pytest.param([member("a", last_heard=NOW - TEN), member("b", **silent(TEN))], "", id="nobody is heard of"),
    pytest.param([member("a", last_heard=NOW - TEN), worker("b")], "", id="but for one that does not train"),
    pytest.param([member("a", last_heard=NOW - TEN), worker("b", last_heard=NOW - 6)], "", id="nor that one"),
    pytest.param([member("a"), member("b", **silent(TEN)), worker("c", last_heard=NOW - 6)], "b c", id="one is"),
    pytest.param(
        [member("a", last_heard=NOW - TEN, known_in_person=False), member("b", **silent(TEN), last_heard=NOW - TEN)],
        "",
        id="one that was only named was not heard of",
    ),
    pytest.param(
        [member("a", last_heard=NOW - SILENCE), member("b", **silent(SILENCE), last_heard=NOW - SILENCE)],
        "a b",
        id="but not for ever",
    ),
]


@pytest.mark.parametrize(("workers", "lost"), ISOLATED)
def test_silence_counts_only_while_somebody_who_trains_is_heard_of(workers: list[Worker], lost: str) -> None:
    workers = [one if one.connected else replace(one, last_heard=one.disconnected_at) for one in workers]
    assert " ".join(find_lost(NOW, training(*workers), SETTINGS)) == lost


def test_those_who_have_yet_to_get_the_state_tell_nothing_of_the_one_who_has_it() -> None:
    holder, joiner = member("a", **silent(TEN), last_heard=NOW - TEN), worker("b")
    state = cluster(holder, joiner, running=plan(FIRST, "a b", "planned", "b"), broken={FIRST: NOW - RECONNECT})
    assert not find_lost(NOW, state, SETTINGS)
    both = cluster(holder, replace(joiner, entered=FIRST), running=state.running, broken=state.broken)
    assert list(find_lost(NOW, both, SETTINGS)) == ["a"]


def test_a_closed_connection_tells_nothing_where_nobody_who_trains_is_heard_of() -> None:
    """One that is connected may have died with its machine, unnoticed."""
    closed, awaited = (
        member("b", **silent(2 * HEARTBEAT), last_heard=NOW - 2 * HEARTBEAT),
        plan(SECOND, "a b", "recovery"),
    )
    for silence, lost in ((2 * HEARTBEAT, []), (0.0, ["b"])):
        state = training(member("a", last_heard=NOW - silence), closed, proposed=awaited)
        assert list(find_lost(NOW, state, SETTINGS)) == lost


@pytest.mark.parametrize(
    ("unheard", "lost"),
    [(frozenset(), "a"), (frozenset("a"), ""), (frozenset("b"), "a"), (None, "")],
    ids=["nobody trains elsewhere", "it may", "another one may", "whoever runs the workers has yet to say"],
)
def test_who_may_train_elsewhere_is_not_lost_for_its_silence_here(unheard: frozenset[str] | None, lost: str) -> None:
    state = cluster(worker("a", **silent(TEN)), trained=True, unheard=unheard)
    assert " ".join(find_lost(NOW, state, SETTINGS)) == lost


EXCUSED = [
    pytest.param([silent(0.5), {}], NOW - 0.4, "", id="it closed while the coordinator did not run"),
    pytest.param([silent(0.5), {}], NOW - 1.4, "", id="or that was read when it ran again"),
    pytest.param([silent(0.5), {}], NOW - 1.6, "a", id="it closed later"),
    pytest.param([silent(2.1), {}], NOW - 2.0, "a", id="it has not come back"),
    pytest.param([silent(0.5), silent(0.5)], NOW - 60, "", id="all have closed"),
]


@pytest.mark.parametrize(("facts", "excused_at", "lost"), EXCUSED)
def test_a_closed_connection_is_a_death_only_if_the_coordinator_was_there(
    facts: list[dict[str, object]], excused_at: float, lost: str
) -> None:
    workers = [member(name, **known) for name, known in zip("ab", facts, strict=True)]
    state = training(*workers, broken={FIRST: NOW - 0.4}, excused_at=excused_at)
    assert " ".join(find_lost(NOW, state, SETTINGS)) == lost


AWAY = 1.5 * HEARTBEAT
ON_THEIR_WAY = [
    pytest.param({"known_in_person": False}, {"returned_at": NOW - 0.9 * HEARTBEAT}, "", id="a new coordinator's come"),
    pytest.param({"known_in_person": False}, {"returned_at": NOW - HEARTBEAT}, "b", id="no more of them come"),
    pytest.param({"known_in_person": False}, {}, "b", id="none has come"),
    pytest.param({}, {"returned_at": NOW - 0.1, "excused_at": NOW - AWAY}, "", id="those who were cut off come back"),
    pytest.param({}, {"returned_at": NOW - 0.1, "excused_at": NOW - 2 * AWAY}, "b", id="it was gone before that"),
    pytest.param({"connected": True}, {"returned_at": NOW - 0.1}, "b", id="it is connected, and silent"),
]


@pytest.mark.parametrize(("facts", "known", "lost"), ON_THEIR_WAY)
def test_while_others_come_back_whoever_was_cut_off_with_them_may_be_next(
    facts: dict[str, object], known: dict[str, object], lost: str
) -> None:
    state = training(member("a"), member("b", **silent(AWAY) | {"last_heard": NOW - AWAY} | facts), **known)
    assert " ".join(find_lost(NOW, state, SETTINGS)) == lost


JOINED = plan(SECOND, "a b c", "planned", "c")
REBUILT = plan(SECOND, "a b", "recovery")
SUSPECTS = [
    pytest.param({"proposed": JOINED}, None, id="nothing is broken"),
    pytest.param({"proposed": JOINED, "broken": {SECOND: NOW - 0.1}}, None, id="it broke only just now"),
    pytest.param({"proposed": JOINED, "broken": {SECOND: NOW - RECONNECT}}, {"c"}, id="whoever was to arrive"),
    pytest.param(
        {"proposed": JOINED, "broken": {SECOND: NOW - RECONNECT}, "failures_counted": SECOND}, None, id="once only"
    ),
    pytest.param(
        {"proposed": REBUILT, "broken": {SECOND: NOW - HEARTBEAT}, "absent": frozenset("b")}, {"b"}, id="the absent"
    ),
    pytest.param(
        {"proposed": REBUILT, "broken": {SECOND: NOW - HEARTBEAT}, "absent": frozenset("ab")},
        set(),
        id="not all at once",
    ),
    pytest.param(
        {"proposed": REBUILT, "broken": {SECOND: NOW - 1.0}, "absent": frozenset("b"), "proposed_at": NOW - 1.0},
        set(),
        id="nor who had too little time",
    ),
]


@pytest.mark.parametrize(("facts", "expected"), SUSPECTS)
def test_whom_a_generation_that_cannot_be_built_is_counted_against(
    facts: dict[str, object], expected: set[str] | None
) -> None:
    state = training(member("a"), member("b"), worker("c"), **{"proposed_at": NOW - HEARTBEAT, **facts})
    assert find_suspects(NOW, state, SETTINGS) == expected
