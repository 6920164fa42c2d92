"""One lineage: what a majority is, and that no two sets of workers go on, whatever is lost, cut off or proposed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tiers import examples
from virtualflow.protocol.lineage import Claim, Lineage, Stage, find_objection, open_members
from virtualflow.protocol.messages import NO_GENERATION, Generation, Member, Plan


def plan(counter: int, members: str, *, joiners: str = "", ended: str = "", mode: str = "recovery") -> Plan:
    places = tuple(Member(name, name, "127.0.0.1", n, n + 1) for n, name in enumerate(members.split()))
    number = Generation(1, counter)
    return Plan(number, mode, places, tuple(joiners.split()), "lost", "", tuple(ended.split()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("members", "joiners", "stage", "present", "ended", "missing"),
    [
        pytest.param("a b c", "", "settled", "a b", "", "", id="two of three go on"),
        pytest.param("a b c", "", "settled", "a", "", "b c", id="one of three does not"),
        pytest.param("a b c", "", "settled", "a", "b c", "", id="unless the end of the others is confirmed"),
        pytest.param("a b c", "", "settled", "a", "b", "c", id="of all that could go on"),
        pytest.param("a b", "", "settled", "a", "", "b", id="a half is no majority"),
        pytest.param("a b", "", "settled", "a", "b", "", id="the survivor of two goes on when the other has ended"),
        pytest.param("a", "", "settled", "", "", "a", id="nobody is no majority of one"),
        pytest.param("a", "", "settled", "", "a", "", id="when all have ended nobody objects"),
        pytest.param("a b c", "b c", "attempted", "a", "", "", id="joiners that may lack the state do not matter"),
        pytest.param("a b c", "b c", "attempted", "b c", "", "a", id="the one that had it does"),
        pytest.param("a b c", "b c", "counted", "a", "", "b c", id="those who may have it by now matter"),
        pytest.param("a b c", "b c", "counted", "b c", "", "a", id="and so does who had it before"),
        pytest.param("a b c", "b c", "settled", "b c", "", "", id="after a step all members are equal"),
        pytest.param("a b c", "a b c", "attempted", "a b", "", "", id="in the beginning all join"),
    ],
)
def test_a_majority(members: str, joiners: str, stage: Stage, present: str, ended: str, missing: str) -> None:
    found = open_members(plan(1, members, joiners=joiners), stage, set(present.split()), set(ended.split()))
    assert found == set(missing.split())


def test_a_generation_that_may_count_is_asked_as_well() -> None:
    """The survivor of five has seen that three of them were about to go on."""
    lineage = Lineage()
    lineage.count(plan(1, "a b c d e"), "counted")
    lineage.settle(Generation(1, 1))
    lineage.attempt(plan(2, "a b c"))
    alone = lineage.claim(plan(3, "c d e"))
    assert (alone.supported, alone.unsupported) == (True, Generation(1, 2))
    assert find_objection([alone]) == Generation(1, 2)
    told = lineage.claim(plan(3, "c d e", ended="a b"))
    assert find_objection([told]) is None


def test_an_exchange_settles_the_generation_that_it_is_of() -> None:
    """All have agreed on the second one, and evaluate first: of it, a majority of the veterans is still enough."""
    lineage = Lineage()
    lineage.count(plan(2, "a b c", joiners="b c"), "attempted")
    lineage.settle(Generation(1, 1))
    assert lineage.claim(plan(3, "a")).supported
    lineage.settle(Generation(1, 2))
    assert not lineage.claim(plan(3, "a")).supported


def test_the_newest_generation_that_counts_decides() -> None:
    old = Claim(Generation(1, 1), False, NO_GENERATION)
    new = Claim(Generation(1, 2), True, NO_GENERATION)
    assert find_objection([old, new]) is None
    assert find_objection([new, Claim(Generation(1, 2), False, NO_GENERATION)]) == Generation(1, 2)
    assert find_objection([new, Claim(NO_GENERATION, True, Generation(1, 1))]) is None


def test_what_was_confirmed_once_is_remembered() -> None:
    lineage = Lineage()
    lineage.count(plan(1, "a b c d"), "counted")
    lineage.attempt(plan(2, "a b", ended="c d"))
    assert lineage.claim(plan(3, "a", ended="b")).supported


# --- whatever happens -------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A worker: its lineage, and the generation of each step that it has applied."""

    name: str
    lineage: Lineage = field(default_factory=Lineage)
    alive: bool = True
    plan: Plan | None = None
    counted: bool = False
    history: tuple[int, ...] | None = None
    """``None``: it has no state yet."""
    offered: Plan | None = None
    agreed: Plan | None = None
    sent: bool = False
    """It has contributed to the step that is under way."""


class Cluster(RuleBasedStateMachine):
    """Any coordinator may propose anything to anybody at any time, and a worker may stop or lag anywhere.

    Only what is confirmed to have ended has ended. Of two histories that part, one has a single step at most after
    that: the one that was applied by who was lost with it, and that the others repeat.
    """

    @initialize(workers=st.integers(1, 5))
    def begin(self, workers: int) -> None:
        self.processes = [Process(f"w{n}") for n in range(workers)]
        self.plans: list[Plan] = []
        self.first: dict[int, dict[str, tuple[Claim, tuple[int, ...] | None]]] = {}
        """What was contributed to the first exchange of a generation."""
        self.steps: dict[tuple[int, int], dict[str, Plan | None]] = {}
        """What was offered in a step of a generation."""
        self.confirmed: set[str] = set()
        self.propose(self.processes, "recovery")
        self.go_on(self.processes, 2)

    # --- what a worker does -------------------------------------------------------------------------------------------

    def propose(self, members: list[Process], mode: str) -> None:
        names = " ".join(process.name for process in members)
        joiners = " ".join(process.name for process in members if process.history is None)
        self.plans.append(
            plan(len(self.plans) + 1, names, joiners=joiners, ended=" ".join(sorted(self.confirmed)), mode=mode)
        )

    def enterable(self, process: Process) -> list[Plan]:
        number = process.plan.generation if process.plan is not None else NO_GENERATION
        return [
            known
            for known in self.plans
            if known.includes(process.name)
            and known.generation > number
            and (known.mode == "recovery" or process.history is None or known == process.agreed)
        ]

    def enter(self, process: Process, chosen: Plan) -> None:
        process.plan, process.counted, process.sent, process.offered, process.agreed = chosen, False, False, None, None
        process.lineage.attempt(chosen)
        contribution = process.lineage.claim(chosen), process.history
        self.first.setdefault(chosen.generation.counter, {})[process.name] = contribution

    def gather(self, process: Process) -> None:
        """Take the first exchange of a generation, if it is whole."""
        if process.plan is None or process.counted:
            return
        told = self.first[process.plan.generation.counter]
        if len(told) == len(process.plan.members) and find_objection([claim for claim, _ in told.values()]) is None:
            process.lineage.count(process.plan, "counted")
            process.counted = True
            process.history = max((history or () for _, history in told.values()), key=len)

    def contribute(self, process: Process, offers: bool) -> None:
        """Contribute to the next step, and offer to enter the newest planned generation."""
        if process.plan is None or process.history is None or not process.counted or process.sent or process.agreed:
            return
        planned = [x for x in self.plans if x.mode == "planned" and x.generation > process.plan.generation]
        process.sent, process.offered = True, planned[-1] if planned and offers else None
        if process.offered is not None:
            process.lineage.attempt(process.offered)
        step = process.plan.generation.counter, len(process.history)
        self.steps.setdefault(step, {})[process.name] = process.offered

    def complete(self, process: Process) -> None:
        """Apply a step to which all have contributed."""
        if process.plan is None or process.history is None or not process.sent:
            return
        told = self.steps[process.plan.generation.counter, len(process.history)]
        if len(told) < len(process.plan.members):
            return
        process.history, process.sent = (*process.history, process.plan.generation.counter), False
        process.lineage.settle(process.plan.generation)
        offered = process.offered
        if offered is not None and all(offer == offered for offer in told.values()):
            process.lineage.count(offered, "attempted")
            process.agreed = offered
        elif offered is not None:
            process.lineage.refute(offered)

    def go_on(self, processes: list[Process], times: int) -> None:
        """Nothing is lost or held up for a while."""
        for _ in range(times):
            for process in processes:
                options = self.enterable(process)
                if options:
                    self.enter(process, options[-1])
            for process in processes:
                self.gather(process)
            for process in processes:
                self.contribute(process, offers=True)
            for process in processes:
                self.complete(process)

    # --- what happens -------------------------------------------------------------------------------------------------

    def some(self, data: st.DataObject) -> list[Process]:
        alive = [process for process in self.processes if process.alive]
        return data.draw(st.lists(st.sampled_from(alive), min_size=1, unique_by=lambda p: p.name)) if alive else []

    @precondition(lambda self: len(self.processes) < 9)
    @rule()
    def one_more_starts(self) -> None:
        self.processes.append(Process(f"w{len(self.processes)}"))

    @rule(data=st.data(), mode=st.sampled_from(["recovery", "planned"]), at_once=st.booleans())
    def somebody_proposes(self, data: st.DataObject, mode: str, at_once: bool) -> None:
        chosen = self.some(data)
        if any(process.history is not None for process in chosen):  # to begin anew is for who knows that all have ended
            self.propose(chosen, mode)
            if at_once:
                self.go_on(chosen, 3)

    @rule(data=st.data())
    def some_enter(self, data: st.DataObject) -> None:
        for process in self.some(data):
            options = self.enterable(process)
            if options:
                self.enter(process, options[-1])

    @rule(data=st.data())
    def some_have_the_first_exchange(self, data: st.DataObject) -> None:
        for process in self.some(data):
            self.gather(process)

    @rule(data=st.data(), offers=st.booleans())
    def some_contribute(self, data: st.DataObject, offers: bool) -> None:
        for process in self.some(data):
            self.contribute(process, offers)

    @rule(data=st.data())
    def some_complete_the_step(self, data: st.DataObject) -> None:
        for process in self.some(data):
            self.complete(process)

    @rule(data=st.data(), times=st.integers(1, 3))
    def some_go_on(self, data: st.DataObject, times: int) -> None:
        self.go_on(self.some(data), times)

    @rule(data=st.data(), confirmed=st.booleans())
    def one_ends(self, data: st.DataObject, confirmed: bool) -> None:
        for process in self.some(data)[:1]:
            process.alive = False
            if confirmed:
                self.confirmed.add(process.name)

    @invariant()
    def there_is_one_lineage(self) -> None:
        histories = {process.history for process in getattr(self, "processes", []) if process.history}
        for one, other in combinations(histories, 2):
            shorter = min(len(one), len(other))
            same = next((n for n in range(shorter) if one[n] != other[n]), shorter)
            assert shorter - same <= 1, f"two lineages: {one} and {other}"


TestCluster = Cluster.TestCase
TestCluster.settings = settings(
    max_examples=examples(400), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
