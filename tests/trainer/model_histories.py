"""Histories of the model of one lineage: whatever may happen, in any order, and what must hold at the end."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from model_network import MESHES_FAIL, Coordinator, Network, opened
from model_worker import VIRTUAL_NODES, Worker

from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.protocol import http_api

HOUR = 3_600


class Lineages(RuleBasedStateMachine):
    """Anything may happen at any moment; then it stops, and one generation holds all who live."""

    @initialize(workers=st.integers(1, 4), second=st.booleans(), steps=st.integers(0, 14))
    def begin(self, workers: int, second: bool, steps: int) -> None:
        self.network = Network(workers)
        self.model = opened(self.network)
        self.model.__enter__()
        self.network.start_coordinator(0)
        for number in range(workers):
            self.network.start_worker(f"worker-{number}", 0)
        self.go_on(steps)
        if second:
            self.network.start_coordinator(1)

    def go_on(self, rounds: int, seconds: float = 0.3) -> None:
        for _ in range(rounds):
            for worker in list(self.network.workers.values()):
                self.network.advance(worker)
            self.network.pass_time(seconds)

    @property
    def living(self) -> list[Worker]:
        return [worker for worker in self.network.workers.values() if worker.alive and not worker.strand.over]

    def pick(self, number: int) -> Worker | None:
        living = self.living
        return living[number % len(living)] if living else None

    # --- workers ------------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.living) < 6)
    @rule(where=st.integers(0, 1))
    def a_worker_starts(self, where: int) -> None:
        taken = {worker.name for worker in self.living}
        name = next(name for n in range(9) if (name := f"worker-{n}") not in taken)
        self.network.start_worker(name, where)

    @rule(which=st.integers(0, 5), lose=st.booleans(), silent=st.booleans())
    def a_worker_dies(self, which: int, lose: bool, silent: bool) -> None:
        worker = self.pick(which)
        if worker is not None:
            self.network.kill(worker, lose=lose, silent=silent)

    @rule(which=st.integers(0, 5))
    def a_worker_stops_or_wakes_up(self, which: int) -> None:
        worker = self.pick(which)
        if worker is not None:
            worker.stopped, worker.touched = not worker.stopped, True
            worker.harmed_at = self.network.now

    @rule(which=st.integers(0, 5), act=st.sampled_from(["connect", "deliver", "build", "think", "speak", "advance"]))
    def a_worker_goes_on(self, which: int, act: str) -> None:
        worker = self.pick(which)
        if worker is not None and worker.runs:
            getattr(self.network, act)(worker)

    @rule(which=st.integers(0, 5), coordinator=st.integers(0, 1))
    def a_drain_is_announced(self, which: int, coordinator: int) -> None:
        worker, told = self.pick(which), self.network.coordinators[coordinator]
        if worker is not None and told is not None and told.frozen_at is None:
            worker.touched, worker.harmed_at = True, self.network.now
            try:
                told.call(http_api.DrainCall((worker.name,), 20.0))
            except UnknownWorker:
                return
            self.network.decide(told)

    # --- coordinators -------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, 1), ahead=st.sampled_from([0, 0, HOUR, -HOUR]))
    def a_coordinator_starts(self, which: int, ahead: int) -> None:
        self.network.start_coordinator(which, ahead)

    @rule(which=st.integers(0, 1))
    def a_coordinator_dies(self, which: int) -> None:
        self.network.end_coordinator(which)

    @rule(which=st.integers(0, 1))
    def a_coordinator_stands_still_or_runs_again(self, which: int) -> None:
        coordinator = self.network.coordinators[which]
        if coordinator is not None and coordinator.frozen_at is None:
            self.network.freeze(coordinator)
        elif coordinator is not None:
            self.network.thaw(coordinator)

    # --- the network --------------------------------------------------------------------------------------------------

    @rule(
        side=st.integers(1, 31), one_way=st.sampled_from(["", "", "in", "out"]), lose=st.booleans(), where=st.booleans()
    )
    def the_network_parts(self, side: int, one_way: str, lose: bool, where: bool) -> None:
        """Some are on one side, with the other coordinator if ``where``, and all others on the other side."""
        this = [worker for n, worker in enumerate(self.living) if side >> n & 1]
        that = [worker for worker in self.living if worker not in this]
        pairs = [(a, b) for a in this for b in that if one_way != "out"]
        pairs += [(b, a) for a in this for b in that if one_way != "in"]
        self.network.part(pairs, lose=lose)
        for worker in this:
            self.network.lead(worker, 1 if where else None)

    @rule(one=st.integers(0, 5), other=st.integers(0, 5), lose=st.booleans())
    def a_connection_breaks(self, one: int, other: int, lose: bool) -> None:
        a, b = self.pick(one), self.pick(other)
        if a is not None and b is not None and a is not b:
            self.network.part([(a, b), (b, a)], lose=lose, silent=False)
            self.network.heal()

    @rule(which=st.integers(0, 5))
    def what_a_worker_tells_its_coordinator_is_held_up(self, which: int) -> None:
        worker = self.pick(which)
        if worker is not None:
            worker.mute = worker.touched = True

    @rule()
    def the_network_heals(self) -> None:
        self.network.heal()

    @rule(which=st.integers(0, 5), where=st.sampled_from([0, 1, None]))
    def the_address_leads_elsewhere(self, which: int, where: int | None) -> None:
        worker = self.pick(which)
        if worker is not None:
            self.network.lead(worker, where)

    @rule(which=st.integers(0, 5))
    def a_worker_is_cut_off_from_its_coordinator_for_a_moment(self, which: int) -> None:
        worker = self.pick(which)
        if worker is not None:
            self.network.hang_up(worker)

    # --- the authority ------------------------------------------------------------------------------------------------

    @rule()
    def ends_are_confirmed(self) -> None:
        self.network.confirm_ends()

    @precondition(lambda self: not self.network.false_words)
    @rule()
    def the_authority_turns_to_the_other_coordinator(self) -> None:
        self.network.ear = 1 - self.network.ear
        self.network.say_who_lives()

    @rule(which=st.integers(0, 5), within=st.sampled_from([1.0, 20.0]))
    def an_end_is_confirmed_beforehand(self, which: int, within: float) -> None:
        worker = self.pick(which)
        if worker is not None:
            self.network.say_gone_beforehand(worker, within)

    # --- time ---------------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.0, 6.0, 12.0]))
    def time_passes(self, seconds: float) -> None:
        self.network.pass_time(seconds)

    @rule(rounds=st.integers(1, 8))
    def all_go_on(self, rounds: int) -> None:
        self.go_on(rounds)

    def teardown(self) -> None:
        if hasattr(self, "network"):
            try:
                self.settle()
            finally:
                self.model.__exit__(None, None, None)

    def settle(self) -> None:
        """The faults are over: one coordinator, a whole network, and an authority that says what is true."""
        network = self.network
        for worker in self.living:
            worker.stopped = False
            if worker.doomed:
                network.kill(worker)
        for one in network.coordinators:
            if one is not None and one.frozen_at is not None:
                network.thaw(one)
        which = network.ear if network.coordinators[network.ear] is not None else 1 - network.ear
        if network.coordinators[which] is None:
            network.start_coordinator(which)
        network.ear = which
        network.end_coordinator(1 - which)
        network.heal()
        for worker in self.living:
            network.lead(worker, which)
        coordinator = network.coordinators[which]
        assert coordinator is not None
        if not self.come_together(coordinator) and not coordinator.state.failed:
            # All others may have had to go; then those who come now must find each other.
            coordinator.call(http_api.ScaleCall(2, 2))
            for number in range(2):
                network.start_worker(f"late-{number}", which)
            self.come_together(coordinator)
        state = coordinator.state
        if state.failed and MESHES_FAIL in state.reason:
            return
        assert not state.failed, state.reason
        assert self.all_are_inside(coordinator), state.reason
        before = max(worker.history.completed_steps for worker in self.living)
        self.go_on(6)
        members = [network.workers[one.incarnation] for one in state.running.members] if state.running else []
        assert members, "nobody trains"
        assert min(x.history.completed_steps for x in members) > before, "the training stands still"

    def come_together(self, coordinator: Coordinator) -> bool:
        for _ in range(12):
            self.go_on(6, 0.5)
            self.network.confirm_ends()
            if self.all_are_inside(coordinator):
                return True
        return False

    def all_are_inside(self, coordinator: Coordinator) -> bool:
        running = coordinator.state.running
        inside = {member.incarnation for member in running.members} if running is not None else set()
        living = {worker.incarnation for worker in self.living}
        entered = all(
            self.network.workers[one].plan == running and self.network.workers[one].history.steps for one in inside
        )
        leaves = any(worker.session.draining for worker in self.living)
        whole = inside <= living and len(inside) == min(len(living), VIRTUAL_NODES)
        return bool(inside) and entered and whole and not leaves
