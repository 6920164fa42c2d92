"""Histories of a job as dialogues: commands, and what the coordinator and the workers make of them.

A file in ``coordinator/testdata`` holds scenarios. Each begins with ``== its name``, may say more in lines with ``#``,
and is a sequence of steps: command lines, a line ``----``, and what is different then. ``VIRTUALFLOW_REWRITE=1`` writes
what is different into the files instead of comparing it, for ``git diff`` to show.

A scenario begins with one of these commands; ``wanted=`` and ``minimum=`` are numbers of workers:

    simulation [wanted=2] [minimum=1] [no-authority]   workers follow the protocol by themselves (``simulated``)
    job [wanted=1] [minimum=1] [SETTING=..] [ticket=]  workers say only what the scenario lets them say

What a command is called is what its method here is called, and what it does is what that says. In a ``job`` the
coordinator decides once at the end of each step; time passes by ``pass`` only, with heartbeats of whoever is connected.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coordinator_server import hello
from driven import Driven
from simulated import SETTINGS, Worker, World

from virtualflow.coordinator.generations import excuse
from virtualflow.coordinator.roster import UnknownWorker
from virtualflow.protocol import http_api
from virtualflow.protocol import messages as m

TICK = 0.5
"""Seconds between two heartbeats."""


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """Some commands and what is different afterwards."""

    commands: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)


@dataclass
class Scenario:
    """A named history."""

    name: str
    lines: list[str]

    def steps(self) -> Iterator[Step]:
        step, told = Step(), False
        for line in [*self.lines, ""]:
            if line == "----":
                told = True
            elif told and line:
                step.expected.append(line)
            elif told:
                yield step
                step, told = Step(), False
            elif line and not line.startswith("#"):
                step.commands.append(line)
        assert not step.commands, f"{self.name}: no ---- behind {step.commands}"

    def written(self, told: list[list[str]]) -> list[str]:
        """The lines with what each step ``told``."""
        lines: list[str] = []
        answers, skip = iter(told), False
        for line in [*self.lines, ""]:
            if line == "----":
                lines += [line, *next(answers)]
                skip = True
            elif not line or not skip:
                skip = False
                lines.append(line)
        return lines[:-1]


def read(path: Path) -> list[Scenario]:
    """The scenarios of a file; the first one is its head, without a name."""
    found = [Scenario("", [])]
    for line in path.read_text().splitlines():
        if line.startswith("== "):
            found.append(Scenario(line.removeprefix("== "), []))
        else:
            found[-1].lines.append(line)
    return found


def write(path: Path, scenarios: list[Scenario]) -> None:
    lines = [line for one in scenarios for line in ([f"== {one.name}"] if one.name else []) + one.lines]
    path.write_text("\n".join(lines).rstrip() + "\n")


def play(scenario: Scenario) -> list[tuple[Step, list[str]]]:
    """What each step tells."""
    story = Story()
    return [(step, story.take(step.commands)) for step in scenario.steps()]


# --- what is different ------------------------------------------------------------------------------------------------


def assigned(plan: m.Plan) -> str:
    joiners = "".join(f" +{name}" for name in plan.joiners if plan.cause not in ("start", "restart"))
    members = ", ".join(f"{x.worker} {x.first}-{x.last - 1}" for x in plan.members) or "nobody"
    return f"{members}{joiners}"


class _Recorded(Driven):
    """A job whose coordinator's messages are written down."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.lines: list[str] = []
        self.seen: dict[m.Generation, m.Plan] = {}
        super().__init__(*arguments, **options)

    def take_outbox(self) -> list[tuple[str, m.ToWorker]]:
        messages = super().take_outbox()
        for incarnation, message in messages:
            match message:
                case m.Plan() as plan if plan.generation not in self.seen:
                    self.seen[plan.generation] = plan
                    ended = f"; ended: {', '.join(plan.ended)}" if plan.ended else ""
                    self.lines.append(
                        f"plan {plan.generation}, {plan.mode}: {assigned(plan)} ({plan.cause}: {plan.reason}{ended})"
                    )
                case m.Refuse(reason):
                    self.lines.append(f"to {incarnation}: refused, {reason}")
                case m.End(_, reason):
                    self.lines.append(f"to {incarnation}: the end, {reason}")
                case m.Drain(_, reason):
                    self.lines.append(f"to {incarnation}: drain, {reason}")
                case m.Release() | m.ShowStacks():
                    self.lines.append(f"to {incarnation}: {type(message).__name__}")
        return messages


class _Simulation(_Recorded, World):
    pass


class Story:
    """The job of a scenario, and the commands."""

    job: _Recorded

    def __init__(self) -> None:
        self._told: list[str] = []
        self._states: dict[str, str | None] = {}
        self._silent: set[str] = set()

    def take(self, commands: list[str]) -> list[str]:
        for line in commands:
            words = shlex.split(line)
            options = {
                key.replace("-", "_"): value for key, _, value in (word.partition("=") for word in words[1:]) if value
            }
            method: Callable[..., str | None] = getattr(self, "do_" + words[0].replace("-", "_"))
            answer = method(*(word for word in words[1:] if "=" not in word), **options)
            if answer:
                self.job.lines.append(answer)
        if isinstance(self.job, World):
            self.job.turn()
        else:
            self.job.decide()
            self.job.take_outbox()
        lines, self.job.lines = [*self.job.lines, *self._changes()], []
        return [line.rstrip() for line in lines]

    def _changes(self) -> Iterator[str]:
        """Where simulated workers are, who is lost, what people are told, and the phase with its reason."""
        status = self.job.status()
        workers = self.job.workers.values() if isinstance(self.job, World) else ()
        moved: dict[str, list[str]] = {}
        for worker in workers:
            state = _state(worker)
            if state is not None and self._states.get(worker.incarnation) != state:
                moved.setdefault(state, []).append(worker.incarnation)
        self._states = {worker.incarnation: _state(worker) for worker in workers}
        events = [f"{event.kind}: {event.text}" for event in status.events if event.kind in ("warning", "done")]
        planned = any(plan.reason == status.reason for plan in self.job.seen.values())
        facts = [f"{', '.join(names)}: {state}" for state, names in moved.items()]
        facts += [f"lost {lost.incarnation}: {_lost(lost)}" for lost in status.lost] + events
        facts.append(f"{status.phase}{'' if planned or not status.reason else f': {status.reason}'}")
        facts += [f"error: {status.error}"] if status.error else []
        for fact in facts:
            if fact not in self._told or fact in facts[: len(moved)]:
                yield fact
        self._told = facts

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def do_simulation(self, *flags: str, wanted: str = "2", minimum: str = "1") -> None:
        self.job = world = _Simulation(int(wanted), int(minimum))
        world.authority = "no-authority" not in flags

    def do_job(self, wanted: str = "1", minimum: str = "1", ticket: str = "", **settings: str) -> None:
        chosen = dataclasses.replace(SETTINGS, **{name: float(value) for name, value in settings.items()})
        self.job = _Recorded(1_000, int(wanted), chosen)
        self.job.state.minimum = int(minimum)
        if ticket:
            self.job.state.ticket, self.job.state.next_ticket = int(ticket), int(ticket) + 1

    def do_train(self, *workers: str, processes: str = "1") -> None:
        """These are ready, begin, and train; of several processes, a worker's ``launch`` is called like it."""
        if isinstance(self.job, World):
            self.do_start(*workers)
            self.do_settle("5")
            return
        for worker in workers:
            if processes == "1":
                self.do_hello(worker, "ready")
            for rank in range(int(processes)) if processes != "1" else ():
                self.do_hello(f"{worker}.{rank}", "ready", process=f"{rank}/{processes}", launch=worker)
        self.do_pass("3")
        plan = self.job.state.proposed
        assert plan is not None
        for member in plan.members:
            self.do_entered(member.incarnation, str(plan.generation), "0")

    @property
    def world(self) -> World:
        assert isinstance(self.job, World), "only workers of a simulation do that"
        return self.job

    # --- time and the coordinator -------------------------------------------------------------------------------------

    def do_pass(self, seconds: str) -> None:
        """Time passes, and nobody does anything but to give signs of life."""
        if isinstance(self.job, World):
            self.job.pass_time(float(seconds))
            return
        end = self.job.now + float(seconds)
        while self.job.now < end:
            self.job.now = min(end, self.job.now + TICK)
            for incarnation, worker in list(self.job.state.roster.workers.items()):
                if worker.connected and worker.gone is None and incarnation not in self._silent:
                    self.job.hear(incarnation, m.Heartbeat())
            self.job.decide()
            self.job.take_outbox()

    def do_clock(self, seconds: str) -> None:
        """It is so much later; nobody has given a sign of life."""
        self.job.now += float(seconds)

    def do_settle(self, seconds: str) -> None:
        """Everybody goes on for so long."""
        self.world.settle(float(seconds))

    def do_new_coordinator(self) -> None:
        """It takes the place of the former one, and knows nothing."""
        self.world.start_coordinator()

    def do_paused(self, seconds: str) -> None:
        """The coordinator did not run for so long."""
        self.job.now += float(seconds)
        excuse(self.job.state, float(seconds), self.job.now)

    def do_call(self, name: str, *words: str, **options: str) -> str:
        """A call of whoever runs the workers, or of a user."""
        match name:
            case "gone":
                worker, _, number = words[0].partition(".")
                process = options.get("incarnation", words[0] if number else None)
                call: http_api.Call = http_api.GoneCall(worker, process, *words[1:])
            case "drain":
                deadline = options.get("deadline")
                call = http_api.DrainCall(words, float(deadline) if deadline else None)
            case "scale":
                minimum = options.get("minimum")
                call = http_api.ScaleCall(int(words[0]), int(minimum) if minimum else None)
            case "stop":
                call = http_api.StopCall(words[0])
            case "begin":
                others = (word.partition("@") for word in words)
                call = http_api.BeginCall(
                    int(options["ticket"]), tuple(http_api.LivingWorker(worker, host) for worker, _, host in others)
                )
            case _:
                raise AssertionError(f"there is no call {name}")
        try:
            return f"answer: {self.job.call(call)}"
        except UnknownWorker as error:
            return f"unknown worker: {error}"

    def do_statistical(self) -> None:
        """Workers may come to different bits."""
        self.job.state.reproducibility = "statistical"

    def do_paces(self) -> str:
        """What the status tells of how long everybody computes."""
        status = self.job.status()
        paces = ", ".join(f"{worker.worker} {worker.pace_ms:g}" for worker in status.workers)
        step = f"{status.predicted_step_ms:g}, {status.computing_ms:g} computing"
        return f"ms for a virtual node: {paces}; for a step {step}"

    def do_known(self) -> str:
        """Which workers the coordinator remembers that are not lost."""
        return f"known: {', '.join(worker.incarnation for worker in self.job.status().workers)}"

    # --- workers of a simulation --------------------------------------------------------------------------------------

    def _one(self, name: str) -> Worker:
        """By its incarnation, or the latest of that name."""
        return [x for x in self.world.workers.values() if name in (x.incarnation, x.name)][-1]

    def do_start(self, *names: str, ready: str = "yes", builds: str = "yes", guess: str = "") -> None:
        for name in names:
            worker = self.world.start_worker(name)
            worker.ready, worker.builds = ready == "yes", builds == "yes"
            worker.guess = float(guess) if guess else None

    def do_kill(self, *names: str) -> None:
        for name in names:
            self.world.kill(self._one(name))

    def do_hang(self, *names: str) -> None:
        """Neither its training goes on nor its connection."""
        for name in names:
            self._one(name).hung = True

    def do_wake(self, *names: str) -> None:
        for name in names:
            self._one(name).hung = False

    def do_connect(self, *names: str) -> None:
        """One after the other, now."""
        for name in names:
            self._one(name).reconnect_at = self.world.now
            self.world.connect(self._one(name))

    def do_drain(self, name: str) -> None:
        """A signal to the process itself."""
        self.world.drain(self._one(name))

    def do_measure(self, *words: str, **paces: str) -> None:
        """Its seconds for a virtual node, of each of the workers 0, 1, 2."""
        for worker, seconds in zip(self.world.workers.values(), words, strict=False):
            self.world.measure(worker, float(seconds))

    def do_will_say_done(self, name: str, step: str) -> None:
        """It is through, and says so whenever it connects."""
        self._one(name).kept[m.Done] = m.Done(int(step), "d", "d", {}, 1.0, int(step))

    # --- what a worker says -------------------------------------------------------------------------------------------

    def _incarnation(self, name: str) -> str:
        if isinstance(self.job, World) and "." not in name:
            return self._one(name).incarnation
        return name if "." in name else f"{name}.0"

    def _plan(self, number: str) -> m.Plan:
        return next(plan for plan in self.job.seen.values() if str(plan.generation) == number)

    def _generation(self, number: str) -> m.Generation:
        """Also one that nobody has told the coordinator of."""
        known = {str(plan.generation): plan.generation for plan in self.job.seen.values()}
        return known.get(number) or m.Generation(self.job.state.incarnation, int(number))

    def do_hello(
        self,
        name: str,
        *flags: str,
        inside: str = "",
        alone_in: str = "",
        address: str = "h",
        launch: str = "",
        process: str = "",
    ) -> str | None:
        """It connects: ``inside`` a generation of this coordinator, or ``alone_in`` one of a former one.

        It is a ``process``, as in 0/2, of a worker that was started by that ``launch``.
        """
        worker = name.partition(".")[0]
        plan = self._plan(inside) if inside else None
        if alone_in:
            member = m.Member(worker, self._incarnation(name), address, 0, 8)
            plan = m.Plan(m.Generation(900, int(alone_in)), "planned", (member,), (), "start", "")
        facts: dict[str, object] = {"ready": "ready" in flags, "plan": plan, "address": address}
        if process:
            rank, _, size = process.partition("/")
            facts |= {"launch": launch, "local_rank": int(rank), "local_world_size": int(size)}
        refusal = self.job.admit(hello(worker, self._incarnation(name), **facts))
        return f"{name} is not admitted: {refusal}" if refusal is not None else None

    def do_closed(self, *names: str) -> None:
        """The connections of these have closed."""
        for name in names:
            self.job.lose_connection(self._incarnation(name))

    def do_entered(self, name: str, generation: str, step: str) -> None:
        self.job.hear(self._incarnation(name), m.Entered(self._plan(generation), int(step), False))

    def do_broken(
        self, name: str, generation: str, step: str, detail: str, convicts: str = "", contested: str = ""
    ) -> None:
        """A collective of that generation failed; it ``convicts`` another, or one is ``contested``."""
        number = self._generation(generation)
        without = self._plan(contested) if contested else None
        convicted = self._incarnation(convicts) if convicts else None
        self.job.hear(self._incarnation(name), m.Broken(number, int(step), detail, without, convicted))

    def do_progress(self, name: str, generation: str, step: str) -> None:
        number = self._plan(generation).generation
        self.job.hear(self._incarnation(name), m.Progress(number, int(step), 0, 100, {}, 1.0, "training"))

    def do_left(self, name: str, generation: str, step: str) -> None:
        """It says that the others went on without it in that generation, or that it left by itself, in ``none``."""
        number = m.NO_GENERATION if generation == "none" else self._generation(generation)
        self.job.hear(self._incarnation(name), m.Left(number, int(step)))

    def do_done(self, name: str, step: str, digest: str = "d") -> None:
        self.job.hear(self._incarnation(name), m.Done(int(step), digest, digest, {}, 1.0, int(step)))

    def do_failed(self, name: str, error: str, odd: str = "") -> None:
        """It ends with an error; the states of those who are ``odd`` differ from most."""
        known = tuple(self._incarnation(one) for one in odd.split(",") if one)
        self.job.hear(self._incarnation(name), m.Failed(0, error, "", odd=known))

    def do_doing(self, name: str, stage: str, step: str, seconds: str, *flags: str) -> None:
        """What its training thread does since so many seconds; ``waits``: for others."""
        doing = m.Doing(stage, int(step), float(seconds), waits="waits" in flags)
        self.job.hear(self._incarnation(name), m.Heartbeat(doing))

    def do_drain_request(self, name: str, reason: str) -> None:
        self.job.hear(self._incarnation(name), m.DrainRequest(reason))

    def do_workers(self) -> str:
        """What the status tells of each worker."""

        def told(worker: http_api.WorkerStatus) -> str:
            nodes = ", ".join(f"{part.start}-{part.stop - 1}" for part in worker.ranges)
            return f"{worker.worker} {worker.state}{f' {nodes}' if nodes else ''}"

        return f"workers: {'; '.join(map(told, self.job.status().workers)) or 'none'}"

    def do_note(self, name: str, text: str) -> None:
        self.job.hear(self._incarnation(name), m.Note("info", text))

    def do_silent(self, name: str) -> None:
        """It gives no sign of life any more."""
        self._silent.add(self._incarnation(name))

    def do_stacks(self, name: str, place: str, text: str) -> None:
        """It answers where its threads are."""
        self.job.hear(self._incarnation(name), m.Stacks(place, text))


def _lost(lost: http_api.LostWorker) -> str:
    marks = [name for name in ("ended", "hung", "convicted") if getattr(lost, name)]
    return f"{lost.reason}{''.join(f' [{mark}]' for mark in marks)}"


def _state(worker: Worker) -> str | None:
    """Where a simulated worker is; nothing of one that only waits, or is away."""
    if worker.over is not None:
        return f"{worker.over} at step {worker.step}"
    if not worker.runs or worker.plan is None or not worker.synced or worker.awaiting:
        return None
    return f"in generation {worker.generation} of training {worker.lineage}"
