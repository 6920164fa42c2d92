"""``virtualflow run``: keeps a job's processes as they should be until the job has ended.

Level-triggered: every piece of news (a status, the end of a process, a signal, a tick) leads to the same look
at everything, and what is not as it should be is mended: missing workers are started, surplus ones drained,
hung ones killed, dead ones reported. What the coordinator was told before it died is told again to the next
one.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from virtualflow import settings as s
from virtualflow.calls import DrainCall, FailCall, GoneCall, HoldCall, ScaleCall, Status, StopCall
from virtualflow.local import registry
from virtualflow.local.control import HOST, CoordinatorFailed, CoordinatorProcess
from virtualflow.local.crew import Crew, Worker
from virtualflow.local.ending import Ending, conclude
from virtualflow.local.options import RunOptions
from virtualflow.local.output import Relay, last_traceback
from virtualflow.local.processes import Process, Supervisor, describe_exit
from virtualflow.local.rehearsal import Rehearsal
from virtualflow.local.report import Chronicle
from virtualflow.local.slowing import Slowing
from virtualflow.local.telling import Teller
from virtualflow.local.verdict import EXIT_EVICTED, judge
from virtualflow.local.view import Snapshot, View, describe_change, open_view
from virtualflow.signals import CallRefused, CoordinatorClient, CoordinatorUnreachable

_TOLD_OTHERWISE = ("change", "failed", "generation")
"""Kinds of events that are shown in another form."""


def run(options: RunOptions) -> int:
    """Run a job to its end; the exit code.

    Raises:
        ConfigurationError: the job's name is taken.
    """
    job = registry.claim(options.name, options.suggestion)
    directory = Path(tempfile.mkdtemp(prefix="virtualflow-"))
    settings = s.LocalSettings()
    view = open_view(options.plain, settings)
    runner = Runner(options, settings, job, directory, view)
    try:
        return asyncio.run(runner.run())
    finally:
        view.close()
        registry.release(job)
        if runner.keep_logs and options.log_dir is None:
            for path in directory.iterdir():
                if path != runner.logs:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        else:
            shutil.rmtree(directory, ignore_errors=True)


class Runner:
    """One job; see the module. Everything runs in one thread and one event loop."""

    def __init__(
        self,
        options: RunOptions,
        settings: s.LocalSettings,
        job: registry.RunningJob,
        directory: Path,
        view: View,
    ) -> None:
        self.options, self.settings, self.job, self.directory, self.view = (
            options,
            settings,
            job,
            directory,
            view,
        )
        self.keep_logs = False
        self.logs = options.log_dir or directory / "logs"
        self.fragments = directory / "audit"
        self.logs.mkdir(exist_ok=True)
        self.fragments.mkdir()
        self.token = secrets.token_urlsafe(32)
        self.started = time.monotonic()
        self.status: Status | None = None
        self.chronicle = Chronicle()
        self.crew = Crew(options.heartbeat_limit + settings.listing_grace)
        self.rehearsal = Rehearsal(options.schedule)
        self.slowing = Slowing(settings.slow_period)
        self.relay = Relay(view.line, settings.replay, settings.traceback_grace, time.monotonic)
        self.wanted = options.workers
        self.ending: Ending | None = None
        self._expected_wanted: tuple[int, float] | None = None
        self._dead_coordinators: set[int] = set()
        self._deaths: dict[int, int] = {}
        self._highest_step = 0
        self._spawn_after = 0.0
        self._interrupts = 0

    # --- from start to end --------------------------------------------------------------------------------

    async def run(self) -> int:
        """Everything; the exit code."""
        loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self.supervisor = Supervisor(self._process_ended, self.settings.tail)
        self.coordinator = CoordinatorProcess(
            self.supervisor,
            self.token,
            self.options.port,
            self.options.heartbeat_limit,
            self.options.rebalance_gain,
            self.logs,
            self.settings,
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            await self.coordinator.start(lambda: self.wanted)
            self.job = replace(self.job, url=self.coordinator.url, token=self.token)
            registry.publish(self.job)
            self.view.event(f"{self.job.name}: coordinator at {self.job.url}, {self.wanted} workers wanted")
            async with CoordinatorClient(self.job.url, self.token, s.SignalSettings()) as client:
                return await self._run_with(client)
        except CoordinatorFailed as error:
            self.ending = Ending("failed", reason=str(error), started=False)
            return await conclude(self)
        finally:
            self.supervisor.close()

    async def _run_with(self, client: CoordinatorClient) -> int:
        self.client, self.teller = client, Teller(client, self.view.event, self._wake.set)
        tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._keep_coordinator())]
        try:
            while not self._is_over():
                self._reconcile()
                await self._news()
            tasks[1].cancel()  # From now on the coordinator may end.
            return await conclude(self)
        finally:
            for task in tasks:
                task.cancel()
            self.slowing.end()
            self.teller.close()

    async def _news(self) -> None:
        try:
            async with asyncio.timeout(self.settings.tick):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    def _is_over(self) -> bool:
        return self.ending is not None and not self.crew.living() and not self.crew.unexplained()

    async def _watch(self) -> None:
        try:
            async for status in self.client.watch():
                if status.incarnation not in self._dead_coordinators:
                    self.take(status)
        except CallRefused as error:
            self.fail(str(error))

    def take(self, status: Status) -> None:
        """A status has arrived."""
        self.status = status
        changes, events = self.chronicle.take(status)
        for event in events:
            if event.kind == "refused":
                self.crew.note_refusal(event.text)
            if event.kind not in _TOLD_OTHERWISE or (event.kind == "generation" and not self.chronicle.changes):
                self.view.event(event.text)
        for change in changes:
            self.view.event(describe_change(change))
        if status.step > self._highest_step:
            self._highest_step = status.step
            self._deaths.clear()
        self._wake.set()

    async def _keep_coordinator(self) -> None:
        while True:
            process = self.coordinator.process
            over = self.status is not None and self.status.phase in ("done", "stopped", "failed")
            if process is not None and not process.alive and not over:
                self.forget_coordinator()
                self.view.event(f"the coordinator ended ({describe_exit(process.code or 0)}); starting it again")
                try:
                    await self.coordinator.start(lambda: self.wanted)
                    await self.client.send(HoldCall(self._hold()))
                except CoordinatorFailed as error:
                    self.fail(str(error))
                    return
                except (CoordinatorUnreachable, CallRefused):
                    pass  # It is gone again: the next round starts the next one.
                self._wake.set()
            await asyncio.sleep(0.01)

    def forget_coordinator(self) -> None:
        """The coordinator is dead or dying: what it last said no longer holds."""
        if self.status is not None:
            self._dead_coordinators.add(self.status.incarnation)
        self.status = None

    def _process_ended(self, process: Process) -> None:
        for worker in self.crew.workers:
            if worker.process is process:
                worker.ended_at = time.monotonic()
                code = process.code or 0
                self.relay.ended(worker, with_error=code > 0 and code != EXIT_EVICTED)
                if code < 0 and self.ending is None:
                    # At once and before anything else: survivors wait for nothing but this.
                    patience = 0.0 if worker.incarnation is None else None
                    call = GoneCall(worker.name, worker.incarnation, describe_exit(code))
                    self.teller.post(("gone", worker.number), call, patience)
        self._wake.set()

    def _interrupt(self, number: signal.Signals) -> None:
        self._interrupts += 1
        if self._interrupts > 1:
            for worker in self.crew.living():
                worker.kill()
            self.ending = Ending("stopped", number, "asked twice: ended at once")
        elif self.ending is None:
            self.ending = Ending("stopped", number, f"{number.name} received")
            self.view.event(f"{number.name}: all workers leave at the same step; once more ends them at once")
        elif self.ending.kind == "done":
            self.ending.impatient_since = time.monotonic()
            self.view.event(f"{number.name}: the training is complete; scripts that go on are ended in a moment")
        self._wake.set()

    # --- the look at everything ---------------------------------------------------------------------------

    def _reconcile(self) -> None:
        now = time.monotonic()
        if self.status is not None:
            self.crew.take(self.status, now)
        self._judge_exits(now)
        self._notice_end()
        if self.ending is None:
            self._follow_wanted(now)
            self._report_gone()
            self._kill_given_up(now)
            self.rehearsal.advance(self)
            self._drain_surplus()
            self._start_missing(now)
            self.teller.tell("hold", HoldCall(self._hold()), self.status)
        else:
            self.slowing.end()
            self.ending.enforce(self, now)
        self._choose_output()
        self.relay.tick()
        self.show()

    def show(self) -> None:
        """Let the view know how things are."""
        processes = {worker.name: worker.process.pid for worker in self.crew.living()}
        note = self.ending.note if self.ending is not None else ""
        self.view.update(Snapshot(self.job.name, self.status, processes, self.wanted, note))

    def _judge_exits(self, now: float) -> None:
        refused: list[Worker] = []
        for worker in self.crew.unexplained():
            code = worker.process.code or 0
            verdict = judge(
                worker.name,
                code,
                over=self.ending is not None,
                done=self.status is not None and self.status.phase == "done",
                joined=worker.incarnation is not None,
                left=worker.draining or worker.state == "done",
                killed=worker.doomed,
                dropped=worker.dropped,
                refused=worker.refused,
                expired=now - (worker.ended_at or now) > self.settings.verdict_grace,
            )
            worker.judged = verdict.kind != "open"
            if verdict.kind == "lost":
                self._lose(worker, verdict.reason, now)
            elif verdict.kind == "refused" and not worker.draining:
                refused.append(worker)
            elif verdict.kind == "failed":
                self.fail(verdict.reason, worker)
        if refused:
            self._do_without(refused)

    def _do_without(self, refused: list[Worker]) -> None:
        """Go on with fewer workers: these would be refused again."""
        fewer = self.wanted - len(refused)
        if fewer < 1:
            self.fail(f"{refused[0].name} was refused: {refused[0].refused}", refused[0])
            return
        barred = self.crew.barred | {worker.ordinal for worker in refused}
        self.scale(fewer)
        self.crew.barred = barred
        names = ", ".join(worker.name for worker in refused)
        self.view.event(
            f"{names} would be refused again: not started any more, {fewer} worker{'s' * (fewer != 1)} wanted from now "
            f"on; once the reason is mended, run: virtualflow scale {fewer + len(refused)} --job {self.job.name}"
        )

    def _lose(self, worker: Worker, how: str, now: float) -> None:
        if worker.incarnation is None:
            self.view.event(f"{worker.name} ended before it joined: {how}")
        if worker.doomed:
            return
        self._deaths[worker.ordinal] = deaths = self._deaths.get(worker.ordinal, 0) + 1
        if deaths > s.BACKOFF_LIMIT:
            self.fail(
                f"{worker.name} ended {deaths} times in a row without a step of progress, at last by: {how}",
                worker,
            )
        elif deaths > 1:
            delay = self.settings.backoff_first * 2 ** (deaths - 2)
            self._spawn_after = max(self._spawn_after, now + min(delay, self.settings.backoff_most))

    def _notice_end(self) -> None:
        status = self.status
        if status is None:
            return
        if status.phase == "failed" and (self.ending is None or self.ending.kind == "done"):
            self.relay.withholding = True
            self.ending = Ending("failed", reason=status.error or status.reason, traceback=status.traceback or "")
        elif status.phase == "done" and (self.ending is None or self.ending.kind == "stopped"):
            self.ending = Ending("done")
        elif status.phase == "stopped" and self.ending is None:
            self.ending = Ending("stopped", reason="asked to stop")

    def _follow_wanted(self, now: float) -> None:
        if self.status is None:
            return
        if self._expected_wanted is not None:
            expected, until = self._expected_wanted
            if self.status.wanted != expected and now < until:
                return
            self._expected_wanted = None
        if self.status.wanted != self.wanted:
            self.wanted = self.status.wanted
            self.crew.barred.clear()  # Whoever asks for another number has mended what there was to mend.

    def scale(self, workers: int) -> None:
        """Provide that many workers from now on, and tell the coordinator."""
        self.wanted = workers
        self.crew.barred.clear()
        self._expected_wanted = (workers, time.monotonic() + s.SignalSettings().patience)
        self.teller.post(("scale", workers, time.monotonic()), ScaleCall(workers), None)

    def _report_gone(self) -> None:
        for worker in self.crew.workers:
            if not worker.alive and worker.judged and worker.listed and worker.state != "done":
                call = GoneCall(worker.name, worker.incarnation, describe_exit(worker.process.code or 0))
                self.teller.tell(("gone", worker.number), call, self.status)

    def _kill_given_up(self, now: float) -> None:
        for worker in self.crew.living():
            if worker.dropped and not worker.doomed:
                self.view.event(f"{worker.name} was given up; its process {worker.process.pid} is killed")
                worker.kill()
            elif (
                worker.draining and worker.unlisted_at and not worker.listed and now - worker.unlisted_at > s.STOP_GRACE
            ):
                worker.kill()

    def _drain_surplus(self) -> None:
        staying = sorted((w for w in self.crew.staying() if w.alive and not w.doomed), key=lambda w: w.ordinal)
        for worker in staying[self.wanted :]:
            worker.draining = worker.surplus = True
            if worker.incarnation is None:
                worker.kill()
        for worker in self.crew.living():
            if worker.surplus and worker.listed and worker.state in ("starting", "ready", "training"):
                call = DrainCall((worker.name,), None, f"{self.wanted} workers wanted")
                self.teller.tell(("drain", worker.number), call, self.status)

    def _start_missing(self, now: float) -> None:
        if now < self._spawn_after:
            return
        while self.ending is None and len(self.crew.staying()) < self.wanted:
            self._spawn()

    def _spawn(self) -> None:
        ordinal, number = self.crew.free_ordinal(), len(self.crew.workers)
        name = f"worker-{ordinal}"
        inherited = {key: value for key, value in os.environ.items() if key != s.ENV_AUDIT_DIR}
        environment = {
            **inherited,
            "PYTHONUNBUFFERED": "1",
            **self.options.environment,
            s.ENV_COORDINATOR: self.coordinator.url,
            s.ENV_TOKEN: self.token,
            s.ENV_WORKER: name,
            s.ENV_ADDRESS: HOST,
        }
        if self.options.audit is not None:
            environment[s.ENV_AUDIT_DIR] = str(self.fragments)
        held: list[Worker] = []
        try:
            process = self.supervisor.start(
                name,
                self.options.command,
                environment,
                self.logs / f"{name}.log",
                lambda stream, text: self.relay.line(held[0], stream, text),
            )
        except OSError as error:
            self.fail(f"{self.options.command[0]} cannot be executed: {error.strerror}")
            return
        worker = Worker(name, ordinal, number, process, process.pid)
        held.append(worker)
        self.crew.workers.append(worker)
        self.chronicle.add_process(name, process.pid)

    def _hold(self) -> int | None:
        return None if self.ending is not None else self.rehearsal.hold(self.status)

    def _choose_output(self) -> None:
        living = self.crew.living()
        leader = None
        if self.status is not None:
            leaders = {entry.incarnation for entry in self.status.workers if entry.first == 0 and entry.last > 0}
            leader = next((worker for worker in living if worker.incarnation in leaders), None)
        if leader is None and self.relay.chosen not in living and living:
            leader = living[0]
        self.relay.choose(leader)

    # --- talking to the coordinator -----------------------------------------------------------------------

    def fail(self, reason: str, worker: Worker | None = None) -> None:
        """Give the job up; that worker's error is the reason."""
        if self.ending is not None and self.ending.kind != "done":
            return
        self.relay.withholding = True
        self.ending = Ending("failed", reason=reason, witness=worker)
        self.teller.post("fail", FailCall(reason[:4_000]), None)
        self._wake.set()

    def traceback_of(self, worker: Worker) -> str:
        """What a worker said last on its standard error."""
        return last_traceback([line for line in worker.process.tail if line.strip()])

    def tell_stop(self, reason: str) -> None:
        """Ask the coordinator, again if it is a new one, to let all workers leave; nothing is held any
        more.
        """
        self.teller.tell("hold", HoldCall(None), self.status)
        self.teller.tell("stop", StopCall(reason), self.status)
