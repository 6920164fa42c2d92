"""``virtualflow run``: keeps a job's processes as they should be until the job has ended.

Level-triggered: every piece of news (a status, the end of a process, a signal, a tick) leads to the same look
at everything, and what is not as it should be is mended: missing workers are started, surplus ones drained,
hung ones killed, dead ones reported. What the coordinator was told before it died is told again to the next
one.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from virtualflow.errors import remedy
from virtualflow.launcher import registry
from virtualflow.launcher.console import JobConsole, Snapshot, open_console
from virtualflow.launcher.coordinator_process import CoordinatorFailed, CoordinatorProcess
from virtualflow.launcher.fault_injection import FaultInjector, Throttle
from virtualflow.launcher.job_control import CoordinatorCalls, JobControl, RunState
from virtualflow.launcher.log_relay import LogRelay, last_traceback
from virtualflow.launcher.options import RunOptions
from virtualflow.launcher.report import JobHistory, build_report, newest_checkpoint, origin_of, write_results
from virtualflow.launcher.shutdown import JobOutcome, Shutdown, conclude, next_shutdown
from virtualflow.launcher.supervisor import Process, Supervisor, describe_exit
from virtualflow.launcher.usage import complain
from virtualflow.launcher.worker_table import WorkerProcess, WorkerTable, mentions
from virtualflow.launcher.workforce import VERDICT_GRACE, WorkerCommand, Workforce
from virtualflow.protocol.http_api import ENDED, Event, GoneCall, HoldCall, Status, StopCall
from virtualflow.protocol.http_client import CallRefused, CoordinatorClient, CoordinatorUnreachable
from virtualflow.protocol.job_view import describe_change
from virtualflow.protocol.live_view import page_address
from virtualflow.protocol.settings import SignalSettings
from virtualflow.protocol.termination_message import EXIT_EVICTED
from virtualflow.protocol.wording import counted, printable

_SIGNALS = SignalSettings()
_TICK = 0.2
"""The runner looks at everything at least this often, whether or not news arrived."""
CERTIFICATE_LIFETIME = 12 * 3_600.0
"""A certificate of the processes of a job is valid for this long,"""
CERTIFICATE_RENEWAL = 6 * 3_600.0
"""and a new one is there after this long."""
_LISTING_GRACE = 10.0
"""A worker that a restarted coordinator has not heard from, beyond the heartbeat limit, is taken for hung."""
_TRACEBACK_GRACE = 2.0
"""A traceback on a worker's standard error is withheld this long: if it ends the job it is shown at the end."""
_REPLAY = 1.5
"""When another worker's output is relayed from now on: how far back its lines are caught up on."""
_SLOW_PERIOD = 0.01
"""A worker that a fault schedule slows down is stopped once in this time: seldom enough to be exact, often enough
for its heartbeats."""
_TAIL = 200
"""Last lines of a worker's standard error that are kept for the message of its failure."""

_SHOWN_OTHERWISE = ("change", "failed", "generation")
"""Kinds of events that are shown in another form."""


def run(options: RunOptions) -> int:
    """Run a job to its end; the exit code.

    Raises:
        ConfigurationError: the job's name is taken.
    """
    job = registry.claim(options.name, options.suggestion)
    directory = Path(tempfile.mkdtemp(prefix="virtualflow-"))
    kept: Path | None = None
    console = open_console(options.plain)

    async def run_here() -> int:
        nonlocal kept
        runner = Runner(options, job, directory, console)
        code = await runner.run()
        kept = runner.kept_logs
        return code

    try:
        return asyncio.run(run_here())
    finally:
        console.close()
        registry.release(job)
        if kept is None or kept.parent != directory:
            shutil.rmtree(directory, ignore_errors=True)
        else:
            for path in directory.iterdir():
                if path != kept:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()


class Runner:
    """One job; see the module. Everything runs in one thread and one event loop, in which it is made."""

    def __init__(
        self,
        options: RunOptions,
        job: registry.RunningJob,
        directory: Path,
        console: JobConsole,
    ) -> None:
        self._options, self._job, self._console = options, job, console
        self.kept_logs: Path | None = None
        """The directory of the processes' output, where that explains a failure."""
        self._logs = options.log_dir or directory / "logs"
        self._fragments = directory / "audit"
        self._logs.mkdir(exist_ok=True)
        self._fragments.mkdir()
        # Now: who edits the script while it trains changes nothing of the run.
        self._origin = origin_of(options.command) if options.report is not None else {}
        self._started = time.monotonic()
        self._state = RunState(options.workers)
        self._history = JobHistory()
        self._table = WorkerTable(options.heartbeat_limit + _LISTING_GRACE)
        self._throttle = Throttle(_SLOW_PERIOD)
        self._relay = LogRelay(console.line, time.monotonic, replay=_REPLAY, grace=_TRACEBACK_GRACE)
        self._wake = asyncio.Event()
        self._asking: list[asyncio.Task[None]] = []
        """Why workers ended before they joined, as far as was seen."""
        self._calls = CoordinatorCalls(console.event, self._wake.set)
        self._control = JobControl(
            state=self._state,
            table=self._table,
            calls=self._calls,
            relay=self._relay,
            tell=console.event,
            patience=_SIGNALS.patience,
        )
        self._faults = FaultInjector(
            options.schedule,
            self._control,
            throttle=self._throttle,
            kill_coordinator=self._kill_coordinator,
            stop_after=options.stop_after,
        )
        self._supervisor = Supervisor(self._process_ended, _TAIL)
        lifetime = None if options.insecure_plaintext else CERTIFICATE_LIFETIME
        self._access = registry.JobAccess(job, lifetime)
        self._renewed = time.time()
        """By the clock that certificates are valid by, which goes on while the machine sleeps."""
        self._coordinator = CoordinatorProcess(
            self._supervisor,
            access=self._access,
            port=options.port,
            heartbeat_limit=options.heartbeat_limit,
            rebalance_gain=options.rebalance_gain,
            hang_seconds=options.hang_seconds,
            directory=self._logs,
        )

    # --- from start to end --------------------------------------------------------------------------------

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt, number)
        try:
            await self._coordinator.start(lambda: self._state.wanted)
            access, url = self._access, self._coordinator.url
            registry.publish(replace(self._job, url=url, token=access.token, identity=access.control))
            self._console.event(
                f"{self._job.name}: coordinator at {url}, {counted(self._state.wanted, 'worker')} wanted"
            )
            if self._options.web:
                address = page_address(url, access.token, self._job.name)
                self._console.line("stderr", f"live page: {address}")
            async with CoordinatorClient(url, access.credential, _SIGNALS) as client:
                return await self._run_with(client)
        except CoordinatorFailed as error:
            self._state.shutdown = Shutdown("failed", time.monotonic(), str(error), started=False)
            return await self._conclude(self._state.shutdown)
        finally:
            self._supervisor.close()

    async def _run_with(self, client: CoordinatorClient) -> int:
        self._client = self._calls.client = client
        self._workforce = self._make_workforce()
        watching = asyncio.create_task(self._watch())
        keeping = asyncio.create_task(self._keep_coordinator())
        try:
            while True:
                shutdown = self._state.shutdown
                if shutdown is not None and not self._table.living() and not self._table.unexplained():
                    break
                self._reconcile()
                await self._news()
            keeping.cancel()  # From now on the coordinator may end.
            await self._last_status()
            await self._coordinator.stop()
            return await self._conclude(shutdown)
        finally:
            watching.cancel()
            keeping.cancel()
            for asking in self._asking:
                asking.cancel()
            self._throttle.end()
            self._calls.close()

    def _make_workforce(self) -> Workforce:
        command = WorkerCommand(
            command=self._options.command,
            environment=self._options.environment,
            coordinator=self._coordinator.url,
            access=self._access,
            logs=self._logs,
            processes=self._options.processes_per_worker,
            audit=self._fragments if self._options.audit is not None else None,
        )
        return Workforce(
            self._control,
            job=self._job.name,
            command=command,
            supervisor=self._supervisor,
            history=self._history,
            backoff_limit=self._options.backoff_limit,
        )

    async def _news(self) -> None:
        try:
            async with asyncio.timeout(_TICK):
                await self._wake.wait()
        except TimeoutError:
            pass
        self._wake.clear()

    async def _watch(self) -> None:
        try:
            async for status in self._client.watch():
                if status.incarnation not in self._state.dead_coordinators:
                    self._take(status)
        except CallRefused as error:
            self._control.fail(str(error))

    def _take(self, status: Status) -> None:
        shutdown, known = self._state.shutdown, self._state.status
        done = shutdown is not None and shutdown.kind == "done" and known is not None and known.phase == "done"
        if done and known is not None and status.run <= known.run and status.phase not in ENDED:
            return  # of a coordinator that has not heard of the end
        self._state.status = status
        again = self._history.began_again(status)
        if again is not None:
            self._console.event(again)
        changes, events = self._history.take(status, time.time())
        for event in events:
            self._take_event(event)
        for change in changes:
            self._console.event(describe_change(change))
        self._wake.set()

    def _take_event(self, event: Event) -> None:
        if event.refusal is not None:
            self._table.note_refusal(event.refusal)
        if event.kind not in _SHOWN_OTHERWISE or (event.kind == "generation" and not self._history.changes):
            self._console.event(event.text)

    async def _keep_coordinator(self) -> None:
        while True:
            process = self._coordinator.process
            assert process is not None
            await process.ended.wait()
            self._state.elders = len(self._table.workers)
            status = self._state.status
            if status is not None and status.phase in ENDED and not self._table.living():
                return
            self._state.forget_coordinator()
            self._console.event(f"the coordinator ended ({describe_exit(process.code or 0)}); starting it again")
            try:
                await self._coordinator.start(lambda: self._state.wanted)
                await self._client.send(HoldCall(self._hold()))
            except CoordinatorFailed as error:
                self._control.fail(str(error))
                return
            except (CoordinatorUnreachable, CallRefused):
                pass  # It is gone again: the next round starts the next one.
            self._wake.set()

    def _kill_coordinator(self) -> None:
        self._coordinator.kill()
        self._state.forget_coordinator()

    def _process_ended(self, process: Process) -> None:
        worker = next((worker for worker in self._table.workers if worker.process is process), None)
        if worker is not None:
            worker.ended_at = time.monotonic()
            code = process.code or 0
            self._relay.ended(worker, with_error=code > 0 and code != EXIT_EVICTED)
            shutdown = self._state.shutdown
            if code < 0 and (shutdown is None or shutdown.kind == "stopped"):
                # At once and before anything else: survivors wait for nothing but this.
                call = GoneCall(worker.name, worker.incarnation, describe_exit(code))
                self._calls.make(("gone", worker.number), call, 0.0 if worker.incarnation is None else None)
            elif code > 0 and worker.incarnation is None:
                # It may have joined, and said why it ends, since the last status.
                self._asking.append(asyncio.create_task(self._ask_why(worker)))
        self._wake.set()

    async def _ask_why(self, worker: WorkerProcess) -> None:
        try:
            status = await self._client.status(VERDICT_GRACE)
        except (CoordinatorUnreachable, CallRefused):
            return  # What is known when the time for a verdict has passed will do.
        if status.phase in ENDED:
            self._take(status)
        # What it says of one that has joined comes with the watch, in the order in which it happened.
        worker.unknown = not mentions(status, worker)
        self._wake.set()

    def _interrupt(self, number: signal.Signals) -> None:
        state, now = self._state, time.monotonic()
        state.interrupts += 1
        if state.interrupts > 1:
            for worker in self._table.living():
                worker.kill()
            state.shutdown = Shutdown("stopped", now, "asked twice: ended at once", number)
        elif state.shutdown is None:
            state.shutdown = Shutdown("stopped", now, f"{number.name} received", number)
            self._console.event(f"{number.name}: all workers leave at the same step; once more ends them at once")
        elif state.shutdown.kind == "done":
            state.shutdown.impatient_since = now
            self._console.event(f"{number.name}: the training is complete; scripts that go on are ended in a moment")
        self._wake.set()

    # --- the look at everything ---------------------------------------------------------------------------

    def _reconcile(self) -> None:
        now, state = time.monotonic(), self._state
        self._renew()
        self._workforce.take(now)
        self._notice_end(now)
        if state.shutdown is None:
            if state.follow_wanted(now):
                self._table.barred.clear()  # Whoever asks for another number has mended what there was to mend.
            self._faults.advance(now)
            self._workforce.mend(now)
            self._calls.ensure("hold", HoldCall(self._hold()), state.status)
            if self._faults.is_time_to_stop:
                reason = f"no step after {self._options.stop_after} was wanted"
                state.shutdown = Shutdown("stopped", now, reason, planned=True)
                self._wake.set()
        else:
            self._end(state.shutdown, now)
        self._choose_output()
        self._relay.tick()
        self._show()

    def _renew(self) -> None:
        now = time.time()
        if abs(now - self._renewed) >= CERTIFICATE_RENEWAL:  # also if the clock was set
            self._renewed = now
            self._access.renew({str(worker.number) for worker in self._table.workers if not worker.alive})

    def _show(self) -> None:
        processes = {worker.name: worker.speaker for worker in self._table.living()}
        note = self._state.shutdown.note if self._state.shutdown is not None else ""
        self._console.update(Snapshot(self._job.name, self._state.status, processes, note))

    def _notice_end(self, now: float) -> None:
        if self._state.status is not None:
            self._state.shutdown = shutdown = next_shutdown(self._state.shutdown, self._state.status, now)
            if shutdown is not None and shutdown.kind == "failed":
                self._relay.withholding = True

    def _hold(self) -> int | None:
        return None if self._state.shutdown is not None else self._faults.hold()

    def _choose_output(self) -> None:
        living = self._table.living()
        leader = next((worker for worker in living if worker.leads), None)
        if leader is None and self._relay.chosen not in living and living:
            leader = living[0]
        self._relay.choose(leader)

    # --- the end ------------------------------------------------------------------------------------------

    def _end(self, shutdown: Shutdown, now: float) -> None:
        self._throttle.end()
        if shutdown.kind == "stopped":
            # Told again to a new coordinator.
            status = self._state.status
            self._calls.ensure("stop", StopCall(shutdown.reason), status)
            if not shutdown.planned or (status is not None and status.proposed and not status.proposed_workers):
                # Nothing is held any more. Where the stop was planned, all have heard of it before the last step.
                self._calls.ensure("hold", HoldCall(None), status)
            # Those who are left may be no majority, and reach the last step only if they know who has ended.
            self._workforce.report()
        self._workforce.end(shutdown, now)

    async def _last_status(self) -> None:
        for worker in self._table.workers:
            await self._supervisor.flush(worker.process)
        try:
            status = await self._client.status(patience=1.0)
        except (CoordinatorUnreachable, CallRefused):
            return
        if status.phase in ENDED or self._state.status is None:
            self._take(status)

    async def _conclude(self, shutdown: Shutdown) -> int:
        """Write report and audit, and say how it went; the exit code. All processes have ended."""
        status, options = self._state.status, self._options
        if shutdown.kind == "stopped" and status is not None and status.phase == "done":
            shutdown.kind = "done"  # It was complete before the signal reached it.
        seconds = time.monotonic() - self._started
        report = build_report(self._history, status, self._job.name, seconds, self._origin)
        unwritten = None
        if shutdown.started:
            unwritten = write_results(report, options.report, options.audit, self._fragments)
        shutdown.concluded = True
        if shutdown.kind != "failed":
            for worker in self._table.workers:
                self._relay.ended(worker, with_error=False)
        self._show()
        self._console.close()
        if shutdown.kind == "failed":
            self._show_traceback(shutdown)
            self.kept_logs = self._logs if shutdown.started and self._table.workers else None
        directory = options.checkpoint_dir
        conclusion = conclude(
            JobOutcome(
                shutdown=shutdown,
                status=status,
                seconds=seconds,
                training_seconds=self._history.training_seconds,
                resumed=self._history.resumed,
                changes=self._history.ordered_changes(),
                last_checkpoint=self._history.last_checkpoint,
                checkpoint_dir=directory,
                newest_checkpoint=newest_checkpoint(directory, status.run if status is not None else 1)
                if directory is not None
                else None,
                unreached=[group.step for group in self._faults.unreached],
                unwritten=unwritten,
                logs=self.kept_logs,
            )
        )
        for sentence in conclusion.sentences:
            complain(sentence)
        return conclusion.code

    def _show_traceback(self, shutdown: Shutdown) -> None:
        traceback = shutdown.traceback
        if not traceback and shutdown.witness is not None:
            traceback = last_traceback(shutdown.witness.said)
        lines = traceback.rstrip("\n").split("\n") if traceback.strip() else []
        repeated = len(lines) == 1 and lines[0].removeprefix("virtualflow: ") in shutdown.reason
        if lines and not repeated and not self._relay.has_shown(lines[-1]):
            print(printable("\n".join(lines)), file=sys.stderr)
        advice = remedy(traceback)
        if advice is not None and advice not in f"{traceback} {shutdown.reason}":
            print(f"what to do: {advice}", file=sys.stderr)
