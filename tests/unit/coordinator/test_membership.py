"""Who is in the next generation, and why: the rules for the initial start, losses and broken communicators."""

from __future__ import annotations

import pytest
from memberships import (
    DRAINS,
    FIRST,
    HEARTBEAT,
    NOW,
    RECONNECT,
    SECOND,
    SETTINGS,
    SILENCE,
    SUSPICION,
    cluster,
    in_words,
    member,
    plan,
    silent,
    training,
    worker,
)

from virtualflow.coordinator.membership import decide
from virtualflow.coordinator.snapshot import Cluster, listed
from virtualflow.protocol.messages import Generation

OLDER = plan(Generation(7, 0), "a d e", "recovery")
JOINED = plan(Generation(7, 0), "a d e", "recovery", "d e")
"""One that a worker knows of and that may count."""

TABLE = [
    # --- the initial start
    pytest.param(cluster(), None, "waiting for workers: 0 of 2 ready", None, id="nobody is there"),
    pytest.param(
        cluster(worker("a"), waiting_since=NOW - 10),
        None,
        "waiting for workers: 1 of 2 ready",
        NOW + 110,
        id="one of two waits until the start-up grace is over",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 120), waiting_since=NOW - 120),
        "recovery a +a start",
        "starting with 1 worker",
        None,
        id="and starts then",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 10), waiting_since=NOW - 600),
        None,
        "waiting for workers: 1 of 2 ready",
        NOW + 110,
        id="the start-up grace begins when there are enough workers to start",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 600), minimum=2, wanted=3),
        None,
        "waiting for workers: 1 of 3 ready, at least 2 needed",
        None,
        id="with fewer than the minimum nothing begins however long it takes",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 600), worker("b", ready_at=NOW - 20), minimum=2, wanted=3),
        None,
        "waiting for workers: 2 of 3 ready",
        NOW + 100,
        id="with the minimum the others are waited for",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 600), worker("b", ready_at=NOW - 120), minimum=2, wanted=3),
        "recovery a b +a b start",
        "starting with 2 workers",
        None,
        id="until the start-up grace is over",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 600), minimum=2, trained=True),
        None,
        "no worker survived; waiting for workers: 1 of 2 ready, at least 2 needed",
        None,
        id="the minimum counts again after all are lost",
    ),
    pytest.param(
        cluster(worker("a"), minimum=2, wanted=1),
        None,
        "waiting for workers: 1 of 2 ready, at least 2 needed",
        None,
        id="also where fewer are wanted",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), minimum=5, wanted=6, virtual_nodes=2),
        "recovery a b +a b start",
        "starting with 2 workers",
        None,
        id="but no more than there are virtual nodes",
    ),
    pytest.param(
        training(member("a"), member("b", gone="killed"), minimum=2),
        "recovery a lost",
        "b lost: killed",
        None,
        id="a training goes on below the minimum",
    ),
    pytest.param(
        cluster(worker("a"), worker("b", gone="killed"), proposed=plan(FIRST, "a b", "recovery", "a b"), minimum=2),
        "over",
        "b lost: killed; at least 2 workers needed to start",
        None,
        id="an initial start that loses too many waits for others",
    ),
    pytest.param(
        cluster(
            worker("a"),
            worker("b", gone="killed"),
            proposed=plan(FIRST, "a b", "recovery", "a b", "start"),
            prepared=True,
            minimum=2,
        ),
        "recovery a +a start",
        "b lost: killed",
        None,
        id="unless somebody may be in it already",
    ),
    pytest.param(
        cluster(
            worker("a", last_heard=NOW - SILENCE, **silent(SILENCE)),
            worker("b"),
            proposed=plan(FIRST, "a", "recovery", "a", "start"),
        ),
        None,
        "a lost: not connected for 300 s; 0 workers left, which is no majority: waiting for the word of whoever runs a "
        "that it has ended",
        None,
        id="who was to begin may have, unheard",
    ),
    pytest.param(
        cluster(worker("w-10"), worker("w-9", ready_at=NOW)),
        "recovery w-9 w-10 +w-9 w-10 start",
        "starting with 2 workers",
        None,
        id="the wanted workers start at once in the order of their numbers",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), waiting_since=NOW - 0.5),
        None,
        "listening for workers that train already",
        NOW + 1.5,
        id="a new coordinator first listens for a training that goes on",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), waiting_since=NOW, confirmed=True),
        "recovery a b +a b start",
        "starting with 2 workers",
        None,
        id="unless it was told that nobody else may train",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), unheard=None),
        None,
        "2 workers ready; waiting for the word of whoever runs the workers that nobody trains elsewhere",
        None,
        id="nothing begins before the word that nobody else may train",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), worker("c"), unheard=frozenset({"x"})),
        None,
        "3 workers ready; x may train elsewhere: waiting for it to come, or for the word of whoever runs it that "
        "it has ended",
        None,
        id="nor while somebody else may",
    ),
    pytest.param(
        cluster(worker("a"), unheard=frozenset({"y", "x"}), trained=True, wanted=1),
        None,
        "no worker survived; 1 worker ready; x, y may train elsewhere: waiting for them to come, or for the word "
        "of whoever runs them that they have ended",
        None,
        id="also if this coordinator knows of a training that is over",
    ),
    pytest.param(
        cluster(worker("a"), unheard=None),
        None,
        "waiting for workers: 1 of 2 ready",
        NOW + 60,
        id="while there are too few workers, that is what is said",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), waiting_since=NOW, trained=True),
        "recovery a b +a b restart",
        "no worker survived; starting with 2 workers",
        None,
        id="after all are lost the next begin anew at once",
    ),
    pytest.param(
        cluster(
            worker("a"),
            worker("b", ready_at=None),
            worker("c", **DRAINS),
            worker("d", **silent(1)),
            waiting_since=NOW - 10,
        ),
        None,
        "waiting for workers: 1 of 2 ready",
        NOW + 110,
        id="who boots, drains or is not connected founds nothing",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), worker("c"), virtual_nodes=2, wanted=3),
        "recovery a b +a b start",
        "starting with 2 workers",
        None,
        id="no more workers than virtual nodes",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), stop="enough"),
        None,
        "stopping: enough",
        None,
        id="a stopped job is not begun",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), proposed=plan(FIRST, "a b", "recovery", "a b", "start")),
        None,
        "the pending reason",
        None,
        id="an initial start under way is waited for",
    ),
    pytest.param(
        cluster(worker("a"), worker("b", gone="killed"), proposed=plan(FIRST, "a b", "recovery", "a b", "start")),
        "recovery a +a start",
        "b lost: killed",
        None,
        id="an initial start that loses a worker goes on with the others",
    ),
    pytest.param(
        cluster(worker("b", gone="killed"), proposed=plan(FIRST, "b", "recovery", "b", "start")),
        "over",
        "no worker survived",
        None,
        id="an initial start that loses all is over",
    ),
    # --- losses
    pytest.param(
        training(member("a"), member("b", last_heard=NOW - HEARTBEAT), member("c")),
        "recovery a c lost",
        "b lost: no sign of life for 5 s",
        None,
        id="the survivors of a hung worker recover",
    ),
    pytest.param(
        training(member("a"), member("b", last_heard=NOW - HEARTBEAT)),
        None,
        "b lost: no sign of life for 5 s; 1 worker left, which is no majority: waiting for the word of whoever runs b "
        "that it has ended",
        None,
        id="the survivor of two waits, as the other may go on as well",
    ),
    pytest.param(
        training(member("a"), member("b", last_heard=NOW - HEARTBEAT), ended=frozenset("b")),
        "recovery a lost",
        "b lost: no sign of life for 5 s",
        None,
        id="until the end of that one is confirmed",
    ),
    pytest.param(
        training(member("a", last_heard=NOW - SILENCE), worker("b")),
        None,
        "a lost: no sign of life for 300 s; 0 workers left, which is no majority: waiting for the word of whoever runs "
        "a that it has ended",
        None,
        id="nobody begins anew while the only one may go on",
    ),
    pytest.param(
        training(member("a"), member("b"), member("c", **silent(0.0)), broken={FIRST: NOW}, contested=(OLDER,)),
        None,
        "c lost: its connections closed; 2 workers left, which is no majority: waiting for the word of whoever runs "
        "d; e that they have ended",
        None,
        id="nor those that know of others who may go on",
    ),
    pytest.param(
        training(member("a"), member("b"), member("c", **silent(0.0)), broken={FIRST: NOW}, contested=(JOINED,)),
        "recovery a b lost",
        "c lost: its connections closed",
        None,
        id="of whom joiners do not count while it is not settled",
    ),
    pytest.param(
        training(
            member("a"),
            member("b"),
            member("c", **silent(0.0)),
            broken={FIRST: NOW},
            contested=(JOINED,),
            settled=JOINED.generation,
        ),
        None,
        "c lost: its connections closed; 2 workers left, which is no majority: waiting for the word of whoever runs "
        "d; e that they have ended",
        None,
        id="and do once it is",
    ),
    pytest.param(
        training(member("a"), member("b", last_heard=NOW - HEARTBEAT + 0.5)),
        None,
        "2 workers training",
        None,
        id="a short silence is none",
    ),
    pytest.param(
        training(member("a"), member("b", **silent(HEARTBEAT - 1))),
        None,
        "2 workers training",
        None,
        id="a connection that is lost means nothing while the training goes on",
    ),
    pytest.param(
        training(member("a"), member("b", **silent(HEARTBEAT)), member("c")),
        "recovery a c lost",
        "b lost: not connected for 5 s",
        None,
        id="unless it stays away",
    ),
    pytest.param(
        training(member("a"), member("b", **silent(0.0)), member("c"), broken={FIRST: NOW}),
        "recovery a c lost",
        "b lost: its connections closed",
        None,
        id="a connection that closed while a collective broke is a death",
    ),
    pytest.param(
        training(member("a"), member("b", **silent(0.5), known_in_person=False), broken={FIRST: NOW}),
        None,
        "a collective broke; waiting for news of b",
        NOW + 0.5,
        id="one that a new coordinator has only heard of may be on its way",
    ),
    pytest.param(
        training(member("a", **DRAINS), member("b", gone="killed"), worker("c")),
        "recovery a lost",
        "b lost: killed",
        None,
        id="one that drains recovers too and a joiner does not",
    ),
    pytest.param(
        training(member("a", gone="killed"), member("b", gone="killed"), worker("c")),
        "over",
        "no worker survived",
        None,
        id="the loss of all ends the generation",
    ),
    pytest.param(
        cluster(member("a", gone="killed"), worker("b"), running=plan(FIRST, "a b", joiners="b"), trained=True),
        "over",
        "nobody who has the state of the training survived",
        None,
        id="so does the loss of all who have the state",
    ),
    pytest.param(
        training(member("a"), member("b", gone="killed"), member("c", done=True, **silent(60)), ended=frozenset("b")),
        "recovery a lost",
        "b lost: killed",
        None,
        id="nobody waits for one that is through and away",
    ),
    pytest.param(
        training(member("a"), member("b"), proposed=plan(SECOND, "a b", "recovery", cause="lost")),
        None,
        "the pending reason",
        None,
        id="a recovery under way is waited for whoever would join",
    ),
    pytest.param(
        training(member("a"), member("b"), worker("c"), proposed=plan(SECOND, "a b", "recovery", cause="lost")),
        None,
        "the pending reason",
        None,
        id="also with a joiner: a planned change would hide the recovery from its members",
    ),
    pytest.param(
        training(
            member("a"),
            member("b", **silent(RECONNECT)),
            member("c"),
            proposed=plan(SECOND, "a b c", "recovery", cause="lost"),
        ),
        "recovery a c lost",
        "b lost: not connected when it was needed",
        None,
        id="a survivor that goes missing meanwhile is not waited for long",
    ),
    # --- a broken communicator
    pytest.param(
        training(member("a"), member("b", left=True, deserted=True, draining=True), broken={FIRST: NOW}),
        "recovery a lost",
        "b left",
        None,
        id="one that has left without the others' agreement is not waited for",
    ),
    pytest.param(
        training(member("a"), member("b", left=True, draining=True), broken={FIRST: NOW}),
        None,
        "a collective broke; waiting for the news of who is lost",
        1_000.25,
        id="one that has left with it may have left others in the next generation, of which news is on its way",
    ),
    pytest.param(
        training(member("a"), member("b", left=True, draining=True)),
        "planned a drain",
        "b drains",
        None,
        id="nor is anything broken by one that has left by a generation to come",
    ),
    pytest.param(
        training(member("a"), member("b"), broken={FIRST: NOW}),
        None,
        "a collective broke; waiting for the news of who is lost",
        NOW + SUSPICION,
        id="a broken collective waits for the news of a death",
    ),
    pytest.param(
        training(member("a"), member("b"), worker("c"), broken={FIRST: NOW - SUSPICION}),
        "recovery a b broken",
        "the communicator broke with nobody lost: rebuilding it",
        None,
        id="and is rebuilt over the same members when there is none",
    ),
    pytest.param(
        training(member("a"), member("b"), broken={FIRST: NOW - 1}, rebuilds=8),
        "fail",
        "the communicator between the workers broke 8 times in a row with nobody lost; "
        "check that the workers reach each other's addresses",
        None,
        id="but not for ever",
    ),
    pytest.param(
        training(member("a"), worker("b", failures=3)),
        None,
        "1 worker training",
        None,
        id="one that could never be connected is declared lost",
    ),
]


@pytest.mark.parametrize(("state", "expected", "reason", "wake_at"), TABLE)
def test_the_rules(state: Cluster, expected: str | None, reason: str, wake_at: float | None) -> None:
    decision = decide(NOW, state, SETTINGS)
    assert (in_words(decision), decision.reason, decision.wake_at) == (expected, reason, wake_at)


def test_a_reason_stays_short_however_many_are_lost() -> None:
    assert len(listed(["x" * 4_000] * 4_000)) < 4_000
