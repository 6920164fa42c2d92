"""A job without processes and sockets: workers that follow the protocol of a session, around the real state of a job.

Time stands still but for :meth:`World.pass_time`. Messages wait on both sides until they are delivered, and are lost
with the connection. What the model knows of the numerics is who has the state of which training, and at which step.
"""

from __future__ import annotations

from driven import Driven
from simulated_worker import VIRTUAL_NODES, Worker

from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.state import JobState
from virtualflow.protocol import framing, http_api
from virtualflow.protocol import messages as m
from virtualflow.protocol.lineage import find_objection

SETTINGS = MembershipSettings()
BUILD_LIMIT = 10.0
REPORTED = ("another process has taken its name", "reported gone")
"""Why a worker that lives is declared lost all the same: by the word of whoever starts the processes."""


class World(Driven):
    """The workers, and the coordinator that they talk to."""

    def __init__(self, wanted: int, minimum: int = 1, patient: bool = False) -> None:
        super().__init__(1_001, wanted, SETTINGS, now=1_000.0)
        self.patient = patient
        """The coordinator decides on what is said at one moment together, instead of after each message."""
        self.undecided = False
        self.wanted = wanted
        self.minimum = minimum
        self.workers: dict[str, Worker] = {}
        self.lineages = 0
        self.plans: dict[m.Generation, m.Plan] = {}
        self.wake_at: float | None = None
        self.coordinators = 0
        self.authority = True
        """Whoever runs the workers confirms the end of each that is declared lost."""
        self.start_coordinator()

    # --- what happens to a job ---------------------------------------------------------------------------------------

    def start_coordinator(self) -> None:
        self.coordinators += 1
        self.state = JobState(1_000 + self.coordinators, self.wanted, SETTINGS, self.now, self.minimum)
        for worker in self.workers.values():
            self.disconnect(worker, tell=False, pause=1.0)

    def start_worker(self, name: str) -> Worker:
        worker = Worker(name, f"{name}.{len(self.workers)}")
        self.workers[worker.incarnation] = worker
        return worker

    def disconnect(self, worker: Worker, tell: bool = True, pause: float = 0.05) -> None:
        if worker.connected and tell:
            self.lose_connection(worker.incarnation)
        worker.connected, worker.reconnect_at = False, self.now + pause
        worker.out.clear()
        worker.inbox.clear()
        self.turn_soon()

    def kill(self, worker: Worker) -> None:
        worker.alive = False
        self.disconnect(worker)

    def drain(self, worker: Worker) -> None:
        """A signal to the process itself."""
        if not worker.draining:
            worker.draining, worker.deadline = True, self.now + SETTINGS.drain_grace
            worker.say(m.DrainRequest("SIGTERM"), keep=True)

    def measure(self, worker: Worker, seconds: float) -> None:
        """The worker has measured how long it computes for a virtual node."""
        if worker.plan is not None and worker.synced:
            worker.say(m.Pace(worker.generation, seconds, 0.9 * seconds, 1.1 * seconds, 0.001, 10), keep=True)

    # --- the coordinator ----------------------------------------------------------------------------------------------

    def turn_soon(self) -> None:
        if self.patient:
            self.undecided = True
        else:
            self.turn()

    def turn(self) -> None:
        self.undecided = False
        begun = self.state.running is not None or self.state.proposed is not None
        self.wake_at = self.decide()
        initial = self.state.proposed
        if not begun and initial is not None and self.state.running is None:
            assert len(initial.members) >= min(self.state.minimum, VIRTUAL_NODES), "too few to begin"
        assert self.wake_at is None or self.wake_at > self.now, "a busy loop"
        self.send()

    def send(self) -> None:
        for incarnation, message in self.take_outbox():
            framing.unpack_to_worker(framing.pack(message))
            worker = self.workers[incarnation]
            if isinstance(message, m.Plan):
                known = self.plans.setdefault(message.generation, message)
                assert known == message, "a number is used twice"
                self.check(message)
            if worker.connected and worker.alive:
                worker.inbox.append(message)
            if isinstance(message, m.Refuse):
                self.lose_connection(incarnation)  # the server closes that connection, half open or not

    def check(self, plan: m.Plan) -> None:
        assert len(plan.members) <= VIRTUAL_NODES
        assigned = [node for member in plan.members for node in member.virtual_nodes]
        assert assigned == (list(range(VIRTUAL_NODES)) if plan.members else [])
        assert plan.members or plan.mode == "planned"

    def pass_time(self, seconds: float) -> None:
        """Let time pass, with heartbeats and with the coordinator's own limits."""
        end = self.now + seconds
        while self.now < end:
            soon = min(end, self.now + 0.5, *([self.wake_at] if self.wake_at is not None else []))
            self.now = max(soon, self.now + 1e-6)
            for worker in self.workers.values():
                if worker.connected and worker.alive and not worker.hung and worker.over is None:
                    self.hear(worker.incarnation, m.Heartbeat())
            self.turn()
            self.confirm_ends()
            for worker in list(self.workers.values()):
                self.advance(worker)

    def confirm_ends(self) -> None:
        """Do as the operator and the runner do, who see to it that a process ends whose end they confirm."""
        open_ = [lost for lost in self.status().lost if not lost.ended] if self.authority else []
        for lost in open_:
            self.call(http_api.GoneCall(lost.worker, lost.incarnation, lost.reason))
        if open_:
            self.turn()

    # --- a worker -----------------------------------------------------------------------------------------------------

    def advance(self, worker: Worker) -> bool:
        """Let a worker do the next thing that it can do; whether there was any."""
        if not worker.runs:
            if worker.connected and worker.over is not None:
                self.disconnect(worker)
            return False
        return (
            self.connect(worker)
            or self.deliver(worker)
            or self.build(worker)
            or self.switch(worker)
            or self.enter(worker)
            or self.synchronize(worker)
            or self.notice(worker)
        )

    def connect(self, worker: Worker) -> bool:
        if worker.connected or self.now < worker.reconnect_at:
            return False
        self.send()  # what a former connection was still to be told is not for this one
        worker.connected = True
        refusal = self.admit(worker.hello(self.now))
        if refusal is not None:
            worker.over, worker.connected = f"refused: {refusal}", False
        else:
            worker.out.extend(worker.kept.values())
        self.turn_soon()
        return True

    def deliver(self, worker: Worker) -> bool:
        if worker.out and worker.connected:
            message = framing.unpack_from_worker(framing.pack(worker.out.popleft()))
            self.hear(worker.incarnation, message)
            self.turn_soon()
            return True
        if not worker.inbox:
            return False
        match worker.inbox.popleft():
            case m.Plan() as plan:
                if worker.newest is None or plan.generation > worker.newest.generation:
                    worker.newest, worker.newest_at = plan, self.now
                    if plan.includes(worker.incarnation) and plan.generation > worker.generation and worker.builds:
                        worker.say(m.Publish(plan.generation, "0", b"address"), keep=True)
            case m.Drain(deadline, _):
                worker.draining, worker.deadline = True, self.now + deadline
            case m.Refuse(reason):
                worker.over = f"refused: {reason}"
            case m.End(failed, reason):
                worker.over = f"ended: {failed} {reason}"
            case m.Release():
                worker.over = "left" if worker.leaving else "released"
        return True

    def build(self, worker: Worker) -> bool:
        plan = worker.newest
        if plan is None or not plan.includes(worker.incarnation) or plan.generation <= worker.generation:
            return False
        if plan.generation in worker.prepared or plan.generation in worker.reported or not worker.builds:
            return False
        others = [self.workers[member.incarnation] for member in plan.members]
        meets = all(
            other.runs
            and other.builds
            and (
                plan.generation in other.prepared
                or other.newest is plan
                or (other.newest is not None and other.newest.generation == plan.generation)
            )
            for other in others
        )
        if meets:
            # A mesh stands for all its members or for none.
            for other in others:
                if plan.generation not in other.prepared:
                    other.prepared.add(plan.generation)
                    other.say(m.Prepared(plan.generation), keep=True)
            return True
        if self.now - worker.newest_at < BUILD_LIMIT:
            return False
        worker.reported.add(plan.generation)
        worker.say(m.Broken(plan.generation, worker.step, "not built"))
        return True

    def enterable(self, worker: Worker) -> m.Plan | None:
        plan = worker.newest
        if plan is None or plan.generation <= worker.generation or plan.generation not in worker.prepared:
            return None
        return plan if plan.mode == "recovery" or not worker.has_state else None

    def interrupted(self, worker: Worker) -> bool:
        plan = worker.newest
        if plan is None or worker.plan is None or plan.generation <= worker.generation:
            return False
        return plan.mode == "recovery" or not worker.has_state

    def enter(self, worker: Worker) -> bool:
        if not worker.awaiting or not worker.ready or worker.leaving:
            return False
        plan = self.enterable(worker)
        if plan is not None:
            self.begin(worker, plan)
            return True
        if worker.draining and not worker.has_state:
            self.leave(worker, m.NO_GENERATION)
            return True
        return False

    def begin(self, worker: Worker, plan: m.Plan) -> None:
        worker.plan, worker.synced, worker.awaiting, worker.agreed = plan, False, False, None
        worker.claims.attempt(plan)
        worker.kept.pop(m.Prepared, None)
        worker.kept.pop(m.Broken, None)
        if worker.has_state:
            worker.say(m.Entered(plan, worker.step, False))

    def leave(self, worker: Worker, generation: m.Generation) -> None:
        worker.leaving, worker.awaiting = True, True
        worker.say(m.Left(generation, worker.step), keep=True)

    def members(self, plan: m.Plan) -> list[Worker]:
        return [self.workers[member.incarnation] for member in plan.members]

    def synchronize(self, worker: Worker) -> bool:
        """All members are in the generation: those without a state get one."""
        plan = worker.plan
        if plan is None or worker.synced or worker.awaiting:
            return False
        members = self.members(plan)
        if not all(x.runs and x.plan == plan and not x.awaiting for x in members):
            return False
        contested = find_objection([x.claims.claim(plan) for x in members])
        if contested is not None:
            for member in members:
                member.awaiting = True
                known = member.claims.plan_of(contested)
                member.say(m.Broken(plan.generation, member.step, "no majority", known), keep=True)
            return True
        donors = [x for x in members if x.has_state]
        if donors:
            assert len({donor.lineage for donor in donors}) == 1, "two trainings met"
            donor = max(donors, key=lambda x: x.step)
            lineage, step = donor.lineage, donor.step
        else:
            # One that wakes up or comes back just then was not to be known of: either this generation is withdrawn and
            # its members are declared lost when they say that they are in it, or it is refused itself.
            known = plan.generation not in self.state.withdrawn
            alive = [
                x
                for x in self.workers.values()
                if x.runs
                and x.connected
                and x.has_state
                and not x.leaving
                # One that was reported to be gone is refused, and may not have read that yet.
                and self.state.roster.refusal(x.incarnation) not in REPORTED
            ]
            assert not (known and alive), f"began anew while {[x.name for x in alive]} had the state"
            self.lineages += 1
            lineage, step = self.lineages, 0
        for member in members:
            fresh = not member.has_state
            member.has_state, member.lineage, member.step, member.synced = True, lineage, step, True
            member.claims.count(plan, "counted")
            if fresh:
                member.say(m.Entered(plan, step, False))
        return True

    def notice(self, worker: Worker) -> bool:
        """A collective has failed: a peer's sockets are closed, or the coordinator says so."""
        plan = worker.plan
        if plan is None or worker.awaiting or worker.agreed is not None:
            return False
        abandoned = any(
            not x.alive
            or x.over is not None
            or (x.plan != plan and x.generation > plan.generation)
            or (x.plan == plan and x.awaiting)
            or (not x.has_state and x.newest is not None and x.newest.generation > plan.generation)
            for x in self.members(plan)
        )
        interrupted = self.interrupted(worker)
        if not abandoned and not interrupted:
            return False
        worker.awaiting = True
        if not interrupted or not worker.has_state:
            worker.say(m.Broken(plan.generation, worker.step, "connection closed by peer"), keep=True)
        return True

    def switch(self, worker: Worker) -> bool:
        """Carry out what was agreed on in the last step."""
        plan, worker.agreed = worker.agreed, None
        if plan is None:
            return False
        if plan.includes(worker.incarnation):
            self.begin(worker, plan)
        else:
            self.leave(worker, plan.generation)
        return True

    def train(self) -> bool:
        """A step of whichever generation can make one; whether there was any."""
        for plan in {worker.generation: worker.plan for worker in self.workers.values() if worker.plan}.values():
            members = self.members(plan)
            if not all(x.runs and x.plan == plan and x.synced and not x.awaiting and not x.agreed for x in members):
                continue
            if any(self.interrupted(x) for x in members):
                continue
            for member in members:
                member.step += 1
                member.claims.settle(plan.generation)
            if members[0].connected:
                members[0].say(m.Progress(plan.generation, members[0].step, 0, None, {}, 1.0, "training"))
            offers = [self.offer(member) for member in members]
            agreed = offers[0] if all(offer == offers[0] for offer in offers) else None
            for member, offer in zip(members, offers, strict=True):
                if agreed is not None:
                    member.agreed = agreed
                    member.claims.count(agreed, "attempted")
                elif offer is not None:
                    member.claims.attempt(offer)
                    member.claims.refute(offer)
            return True
        return False

    def offer(self, worker: Worker) -> m.Plan | None:
        plan = worker.newest
        if plan is None or plan.mode != "planned" or plan.generation <= worker.generation:
            return None
        return plan if not plan.includes(worker.incarnation) or plan.generation in worker.prepared else None

    # --- the end ------------------------------------------------------------------------------------------------------

    def settle(self, seconds: float) -> None:
        """Let everybody go on for so long."""
        end = self.now + seconds
        while self.now < end:
            for _ in range(200):
                moved = [self.advance(worker) for worker in list(self.workers.values())]
                if self.undecided:
                    self.turn()
                elif not any(moved):
                    break
            else:
                raise AssertionError("the workers never come to rest")
            self.train()
            self.pass_time(0.25)


def assert_together(world: World, living: list[Worker]) -> None:
    """All of ``living`` are in one generation, or wait for a place in it."""
    running = world.state.running
    assert running is not None, world.state.reason
    inside = [worker for worker in living if worker.plan == running]
    assert {worker.incarnation for worker in inside} == {x.incarnation for x in running.members}
    assert all(worker.synced and not worker.awaiting for worker in inside)
    assert len(inside) == min(len(living), VIRTUAL_NODES)
    assert not any(worker.draining for worker in living)
    assert len(world.state.roster.workers) <= len(living) + 1, "the dead are remembered for ever"
    before = inside[0].step
    world.settle(1.0)
    assert inside[0].step > before, "the training stands still"


def running_world(workers: int = 2) -> World:
    world = World(wanted=workers)
    for number in range(workers):
        world.start_worker(f"worker-{number}").ready = True
    world.settle(5.0)
    assert world.state.phase == "training"
    return world


def generation(counter: int, incarnation: int = 1_001) -> m.Generation:
    return m.Generation(incarnation, counter)


def done(step: int, digest: str = "d") -> m.Done:
    return m.Done(step, digest, digest, {}, 1.0, step)
