"""Who is in the next generation, and why: the rules as a table, and what holds whatever the state is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from virtualflow.assignment import assign
from virtualflow.cluster import Cluster, Decision, Proposal, Worker, listed
from virtualflow.membership import decide, find_lost, next_limit
from virtualflow.messages import Cause, Generation, Member, Plan
from virtualflow.settings import MembershipSettings

NOW = 1_000.0
SETTINGS = MembershipSettings()
FIRST, SECOND = Generation(7, 1), Generation(7, 2)


def worker(name: str, **facts: object) -> Worker:
    usual = Worker(name, name, last_heard=NOW, ready_at=NOW - 60.0)
    return dataclasses.replace(usual, **facts)  # type: ignore[arg-type]


def member(name: str, **facts: object) -> Worker:
    return worker(name, **{"entered": FIRST, **facts})


def silent(seconds: float) -> dict[str, object]:
    return {"connected": False, "disconnected_at": NOW - seconds}


def plan(generation: Generation, names: str, mode: str = "planned", joiners: str = "", cause: Cause = "join") -> Plan:
    parts = names.split()
    members = tuple(
        Member(name, name, "127.0.0.1", r.start, r.stop)
        for name, r in zip(parts, assign(8, [1.0] * len(parts)) if parts else [], strict=True)
    )
    return Plan(generation, mode, members, tuple(joiners.split()), cause, "the pending reason")  # type: ignore[arg-type]


def cluster(*workers: Worker, **facts: object) -> Cluster:
    usual = Cluster(8, 2, NOW - 300.0, {one.incarnation: one for one in workers})
    return dataclasses.replace(usual, **facts)  # type: ignore[arg-type]


def training(*workers: Worker, **facts: object) -> Cluster:
    names = " ".join(one.name for one in workers if one.entered is not None)
    return cluster(*workers, **{"running": plan(FIRST, names), "trained": True, **facts})


def pending(names: str, joiners: str = "", **facts: object) -> dict[str, object]:
    return {"proposed": plan(SECOND, names, "planned", joiners), "proposed_at": NOW - 1.0, **facts}


HEARTBEAT, RECONNECT, SUSPICION = SETTINGS.heartbeat_limit, SETTINGS.reconnect_grace, SETTINGS.suspicion_grace
DRAINS = {"draining": True, "deadline": NOW + 30.0}

TABLE = [
    # --- founding
    pytest.param(cluster(), None, "waiting for workers: 0 of 2 ready", None, id="nobody is there"),
    pytest.param(
        cluster(worker("a"), founded_at=NOW - 10),
        None,
        "waiting for workers: 1 of 2 ready",
        NOW + 110,
        id="one of two waits until the start-up grace is over",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 120), founded_at=NOW - 120),
        "recovery a +a start",
        "starting with 1 worker",
        None,
        id="and starts then",
    ),
    pytest.param(
        cluster(worker("a", ready_at=NOW - 10), founded_at=NOW - 600),
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
        id="a founding that loses too many waits for others",
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
        cluster(worker("w-10"), worker("w-9", ready_at=NOW)),
        "recovery w-9 w-10 +w-9 w-10 start",
        "starting with 2 workers",
        None,
        id="the wanted workers start at once in the order of their numbers",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), founded_at=NOW - 0.5),
        None,
        "listening for workers that train already",
        NOW + 1.5,
        id="a new coordinator first listens for a training that goes on",
    ),
    pytest.param(
        cluster(worker("a"), worker("b"), founded_at=NOW, trained=True),
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
            founded_at=NOW - 10,
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
        id="a founding under way is waited for",
    ),
    pytest.param(
        cluster(worker("a"), worker("b", gone="killed"), proposed=plan(FIRST, "a b", "recovery", "a b", "start")),
        "recovery a +a start",
        "b lost: killed",
        None,
        id="a founding that loses a worker goes on with the others",
    ),
    pytest.param(
        cluster(worker("b", gone="killed"), proposed=plan(FIRST, "b", "recovery", "b", "start")),
        "over",
        "no worker survived",
        None,
        id="a founding that loses all is over",
    ),
    # --- losses
    pytest.param(
        training(member("a"), member("b", last_heard=NOW - HEARTBEAT)),
        "recovery a lost",
        "b lost: no sign of life for 5 s",
        None,
        id="the survivors of a hung worker recover",
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
        training(member("a"), member("b", **silent(HEARTBEAT))),
        "recovery a lost",
        "b lost: not connected for 5 s",
        None,
        id="unless it stays away",
    ),
    pytest.param(
        training(member("a"), member("b", **silent(0.0)), broken={FIRST: NOW}),
        "recovery a lost",
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
        training(member("a"), member("b", gone="killed"), member("c", done=True, **silent(60))),
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
        training(member("a"), member("b", **silent(RECONNECT)), proposed=plan(SECOND, "a b", "recovery", cause="lost")),
        "recovery a lost",
        "b lost: not connected when it was needed",
        None,
        id="a survivor that goes missing meanwhile is not waited for long",
    ),
    # --- a broken communicator
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
        id="one that could never be connected is given up",
    ),
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


def in_words(decision: Decision) -> str | None:
    """A decision as the table writes it: mode, members, joiners, cause."""
    if decision.over or decision.fail:
        return "over" if decision.over else "fail"
    if decision.proposal is None:
        return None
    proposal = decision.proposal
    joiners = f" +{' '.join(proposal.joiners)}" if proposal.joiners else ""
    return f"{proposal.mode} {' '.join(proposal.members) or '-'}{joiners} {proposal.cause}"


@pytest.mark.parametrize(("state", "expected", "reason", "wake_at"), TABLE)
def test_the_rules(state: Cluster, expected: str | None, reason: str, wake_at: float | None) -> None:
    decision = decide(NOW, state, SETTINGS)
    assert (in_words(decision), decision.reason, decision.wake_at) == (expected, reason, wake_at)


def test_a_worker_that_is_silent_is_given_up_at_the_moment_that_was_named() -> None:
    state = training(member("a"), member("b", last_heard=NOW - 0.1), member("c", **silent(0.3)))
    moment = next_limit(NOW, state, SETTINGS)
    assert moment is not None
    assert list(find_lost(moment, state, SETTINGS)) == ["c"]


def test_a_reason_stays_short_however_many_are_lost() -> None:
    assert len(listed(["x" * 4_000] * 4_000)) < 4_000


# --- whatever the state is --------------------------------------------------------------------------------------------

TIMES = st.sampled_from([NOW - 400.0, NOW - 6.0, NOW - 1.5, NOW - 0.5, NOW])
NODES = 4


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = [f"w{number}" for number in range(draw(st.integers(0, 6)))]
    workers = {}
    for name in names:
        draining = draw(st.booleans()) and draw(st.booleans())
        workers[name] = Worker(
            name,
            name,
            last_heard=draw(TIMES),
            connected=draw(st.booleans()) or draw(st.booleans()),
            disconnected_at=draw(TIMES),
            known_in_person=draw(st.integers(0, 5)) > 0,
            entered=draw(st.sampled_from([None, FIRST, FIRST, SECOND])),
            ready_at=draw(st.none() | TIMES),
            draining=draining,
            deadline=draw(st.sampled_from([None, NOW - 1, NOW + 3, NOW + 30])) if draining else None,
            failures=draw(st.sampled_from([0, 0, 0, 1, 3])),
            gone=draw(st.sampled_from([None, None, None, "killed"])),
            left=draw(st.integers(0, 7)) == 0,
            done=draw(st.integers(0, 7)) == 0,
        )

    def some(generation: Generation, modes: list[str]) -> Plan | None:
        if not names or draw(st.integers(0, 3)) == 0:
            return None
        chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=NODES))
        mode = draw(st.sampled_from(modes)) if chosen else "planned"
        ranges = assign(NODES, [1.0] * len(chosen)) if chosen else []
        members = tuple(Member(n, n, "h", r.start, r.stop) for n, r in zip(chosen, ranges, strict=True))
        return Plan(generation, mode, members, (), "join", "pending")  # type: ignore[arg-type]

    running = some(FIRST, ["planned"])
    proposed = some(SECOND, ["planned", "recovery"] if running is not None else ["recovery"])
    return Cluster(
        virtual_nodes=NODES if names else None,
        wanted=draw(st.integers(1, 6)),
        founded_at=draw(TIMES),
        workers=workers,
        running=running,
        proposed=proposed,
        proposed_at=draw(TIMES),
        prepared=draw(st.booleans()),
        broken=draw(st.dictionaries(st.sampled_from([FIRST, SECOND]), TIMES, max_size=2)),
        rebuilds=draw(st.sampled_from([0, 7, 8])),
        evaluating=draw(st.booleans()),
        stop=draw(st.sampled_from([None, None, "enough"])),
        trained=running is not None or draw(st.booleans()),
        minimum=draw(st.sampled_from([1, 1, 2, 6])),
    )


def carry_out(state: Cluster, decision: Decision, counter: int) -> Cluster:
    """The state after the decision was carried out, as the job does."""
    workers: Mapping[str, Worker] = {
        i: dataclasses.replace(one, gone=decision.lost.get(i, one.gone)) for i, one in state.workers.items()
    }
    state = dataclasses.replace(state, workers=workers)
    if decision.over:
        return dataclasses.replace(
            state, running=None, proposed=None, founded_at=NOW, trained=state.trained or state.running is not None
        )
    if decision.proposal is None:
        return state
    return dataclasses.replace(
        state, proposed=as_plan(decision.proposal, counter), proposed_at=NOW, prepared=False, rebuilds=0
    )


def as_plan(proposal: Proposal, counter: int) -> Plan:
    ranges = assign(NODES, [1.0] * len(proposal.members)) if proposal.members else []
    members = tuple(Member(i, i, "h", r.start, r.stop) for i, r in zip(proposal.members, ranges, strict=True))
    return Plan(Generation(7, counter), proposal.mode, members, proposal.joiners, proposal.cause, "made")


@settings(max_examples=500, deadline=None)
@given(clusters())
def test_whatever_the_state_is_a_decision_makes_sense_and_the_rules_come_to_rest(state: Cluster) -> None:
    for counter in range(3, 8):
        decision = decide(NOW, state, SETTINGS)
        assert decision == decide(NOW, state, SETTINGS)
        assert decision.reason
        assert decision.wake_at is None or decision.wake_at > NOW
        proposal = decision.proposal
        if proposal is not None:
            assert not decision.over
            makes_sense(state, decision, proposal)
        if proposal is None and not decision.over:
            event(f"at rest after {counter - 3} decisions")
            return
        state = carry_out(state, decision, counter)
    raise AssertionError("the rules do not come to rest")


def makes_sense(state: Cluster, decision: Decision, proposal: Proposal) -> None:
    assert len(set(proposal.members)) == len(proposal.members) <= NODES
    assert set(proposal.joiners) <= set(proposal.members)
    running = {one.incarnation for one in state.running.members} if state.running else set()
    for incarnation in proposal.members:
        one = state.workers[incarnation]
        assert incarnation not in decision.lost
        assert not one.left
        assert not (one.done and incarnation in proposal.joiners and state.running is not None)
    if proposal.mode == "recovery":
        assert proposal.members
        if state.running is not None:
            assert any(state.workers[i].may_have_state for i in proposal.members)
        elif not state.prepared:
            known = state.proposed is not None and set(proposal.members) == {
                x.incarnation for x in state.proposed.members
            }
            assert known or len(proposal.members) >= min(state.minimum, NODES)
        return
    assert state.running is not None
    drained = [i for i in proposal.members if state.workers[i].draining]
    others = [i for i in running if not (state.workers[i].draining or state.workers[i].left)]
    assert not drained or not others, "one that drains stays only where nobody else has the state"
    if proposal.members:
        assert running & set(proposal.members), "nobody would have the state"
