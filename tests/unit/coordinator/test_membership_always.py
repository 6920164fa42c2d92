"""What holds for every decision, whatever the state is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hypothesis import event, given, settings
from hypothesis import strategies as st
from memberships import FIRST, NOW, SECOND, SETTINGS

from tiers import examples
from virtualflow.coordinator.assignment import assign
from virtualflow.coordinator.membership import decide, find_lost
from virtualflow.coordinator.snapshot import Cluster, Decision, Proposal, Worker
from virtualflow.protocol.messages import Generation, Member, Pace, Plan

# --- whatever the state is --------------------------------------------------------------------------------------------

TIMES = st.sampled_from([NOW - 400.0, NOW - 6.0, NOW - 1.5, NOW - 0.5, NOW])
NODES = 4


def paced(generation: Generation, seconds: float) -> Pace:
    return Pace(generation, seconds, seconds, seconds, 0.0, 10)


PACES = st.builds(paced, st.sampled_from([FIRST, SECOND]), st.sampled_from([0.01, 0.02, 0.1]))


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
            pace=draw(st.none() | PACES),
        )

    def some(generation: Generation, modes: list[str]) -> Plan | None:
        if not names or draw(st.integers(0, 3)) == 0:
            return None
        chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=NODES))
        mode = draw(st.sampled_from(modes)) if chosen else "planned"
        speeds = draw(st.sampled_from([[1.0] * NODES, [1.0, 5.0, 9.0, 9.0]]))[: len(chosen)]
        ranges = assign(NODES, speeds) if chosen else []
        members = tuple(Member(n, n, "h", r.start, r.stop) for n, r in zip(chosen, ranges, strict=True))
        return Plan(generation, mode, members, (), "join", "pending")  # type: ignore[arg-type]

    running = some(FIRST, ["planned"])
    proposed = some(SECOND, ["planned", "recovery"] if running is not None else ["recovery"])
    return Cluster(
        virtual_nodes=NODES if names else None,
        wanted=draw(st.integers(1, 6)),
        waiting_since=draw(TIMES),
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
        unheard=draw(st.sampled_from([frozenset(), frozenset(), None, frozenset({"elsewhere"})])),
    )


def carry_out(state: Cluster, decision: Decision, counter: int) -> Cluster:
    """The state after the decision was carried out, as the job does."""
    lost = find_lost(NOW, state, SETTINGS)
    workers: Mapping[str, Worker] = {
        i: dataclasses.replace(one, gone=lost.get(i, one.gone)) for i, one in state.workers.items()
    }
    state = dataclasses.replace(state, workers=workers)
    if decision.over:
        return dataclasses.replace(
            state, running=None, proposed=None, waiting_since=NOW, trained=state.trained or state.running is not None
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


@settings(max_examples=examples(500), deadline=None)
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
    assert running or state.proposed is not None or state.unheard == frozenset(), "begun beside those who may train"
    lost = find_lost(NOW, state, SETTINGS)
    for incarnation in proposal.members:
        one = state.workers[incarnation]
        assert incarnation not in lost
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
