"""``virtualflow check`` and ``bisect``: does a script come to the same bits however it is run, and where does it not?

A check runs the script a few times through ``virtualflow run``, each time with one thing changed, and compares the
traces. The runs are processes of their own, because a runner owns the signals of its process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.launcher.options import check_trainer
from virtualflow.launcher.shutdown import FAILURE_GRACE
from virtualflow.launcher.supervisor import describe_exit, die_with, ourselves
from virtualflow.launcher.training_program import TrainingProgram
from virtualflow.launcher.usage import EXIT_FAILED, EXIT_USAGE, complain
from virtualflow.progress import FRAME, ProgressBar
from virtualflow.protocol.settings import ENV_TRACE_REPEAT
from virtualflow.protocol.wording import counted
from virtualflow.verify import (
    AGAIN,
    REFERENCE,
    Cause,
    Difference,
    Trace,
    Trial,
    describe,
    describe_shortly,
    explain,
    first_difference,
    guess_variation,
    other_surroundings,
    plan_trials,
    read_trace,
)

EXIT_DIFFERS = EXIT_FAILED
"""Two runs are not equal."""

_TRACEBACK = "Traceback (most recent call last):"
_REPORT = "report.json"
_NEVER = "31536000"
"""Seconds between two checkpoints of a trial: only the last one is written, where the job stops."""


class TrialFailed(VirtualFlowError):
    """The script could not be run in that way."""

    def __init__(self, trial: Trial, error: str, traceback: str = "") -> None:
        super().__init__(f"{trial.name}: {error}")
        self.error, self.traceback = error, traceback


def bisect(arguments: Namespace) -> int:
    """Compare two traces and say where they begin to differ; the exit code.

    Raises:
        ConfigurationError: one is no trace, or they are of different trainings.
    """
    directories = Path(arguments.one), Path(arguments.two)
    one, two = (read_trace(directory) for directory in directories)
    found = first_difference(one, two)
    common = [step for step in one.steps if step in two.after]
    for directory, trace in zip(directories, (one, two), strict=True):
        if trace.steps != common:
            print(f"{directory} has {_range(trace.steps)}; compared were {_range(common)}")
    if found is None:
        print(f"equal: {_range(common)}")
        return 0
    print(f"first difference: {describe(found, (str(directories[0]), str(directories[1])))}")
    for sentence in other_surroundings(one, two):
        print(f"besides: {sentence}")
    _print_cause(explain(found, guess_variation(one, two)))
    return EXIT_DIFFERS


def _print_cause(cause: Cause) -> None:
    print(f"usual cause: {cause.what}")
    print(f"what to do: {cause.remedy}")


def _range(steps: list[int]) -> str:
    return f"steps {steps[0]} to {steps[-1]}" if len(steps) > 1 else f"step {steps[0]}" if steps else "no step"


def check(arguments: Namespace) -> int:
    """Run a script in several ways and compare; the exit code."""
    program = TrainingProgram(arguments.script, arguments.module)
    program.check()
    check_trainer()
    with tempfile.TemporaryDirectory(prefix="virtualflow-", ignore_cleanup_errors=True) as directory:
        checking = ScriptCheck(arguments, program, Path(directory))
        try:
            return asyncio.run(checking.run())
        except asyncio.CancelledError:
            return 128 + signal.SIGTERM
        except TrialFailed as failed:
            if failed.traceback:
                print(failed.traceback, file=sys.stderr)
            complain(f"{program} could not be checked; {failed}")
            return EXIT_USAGE


@dataclass(frozen=True)
class Finding:
    trial: Trial
    difference: Difference | None = None
    failed: TrialFailed | None = None

    @property
    def text(self) -> str:
        if self.failed is not None:
            return f"failed: {self.failed.error}"
        return "equal" if self.difference is None else f"differs: {describe_shortly(self.difference)}"


def conclude(findings: list[Finding], steps: int) -> int:
    """Say what came of all trials of ``steps`` steps; the exit code.

    Raises:
        TrialFailed: one could not be made, and no other has shown a difference.
    """
    found = [(each.difference.step, each.trial, each.difference) for each in findings if each.difference]
    if found:
        _, trial, difference = min(found, key=lambda entry: entry[0])  # the first of the plan where several are
        print(f"\nfirst difference: {describe(difference, (REFERENCE.name, trial.name))}")
        _print_cause(explain(difference, trial.variation))
        return EXIT_DIFFERS
    for finding in findings:
        if finding.failed is not None:
            raise finding.failed
    made = f"{steps} steps were" if steps != 1 else "the step was"
    print(f"\nequal: {made} the same in all {len(findings) + 1} runs: samples, gradients, state and metrics")
    if steps < 3:
        print("a worker that joins or is killed was not tried, because that takes 3 steps")
    return 0


class ScriptCheck:
    """One check of one script; see the module.

    Args:
        directory: for traces, and for whatever the trials leave.
    """

    def __init__(self, arguments: Namespace, program: TrainingProgram, directory: Path) -> None:
        self._arguments, self._program, self._directory = arguments, program, directory
        self._cores = arguments.processes or os.cpu_count() or 1
        self._free = self._cores
        self._freed = asyncio.Condition()
        self._width = 0
        self._made = 0
        self._warnings: list[str] = []
        """What the workers of the first one have warned of."""

    async def run(self) -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with ProgressBar(f"running {self._program}") as progress:
            watching = asyncio.create_task(self._watch(progress))
            try:
                findings, steps = await self._make_all(progress)
            finally:
                watching.cancel()
        for warning in self._warnings:
            print(f"\nwarning: {warning}")
        return conclude(findings, steps)

    async def _watch(self, progress: ProgressBar) -> None:
        while True:
            progress.reach(self._made)
            await asyncio.sleep(FRAME)

    async def _make_all(self, progress: ProgressBar) -> tuple[list[Finding], int]:
        """What came of all trials, and of how many steps."""
        steps = int(self._arguments.steps)
        reference = await self._trace_of(REFERENCE, steps)
        virtual_nodes = next(iter(reference.opened.values())).virtual_nodes
        steps = min(steps, len(reference.steps))
        first_difference(reference, reference, steps)  # a statistical run cannot be compared, not even with itself
        if virtual_nodes < 2:
            raise TrialFailed(
                REFERENCE, "with one virtual node there is nothing to split; give more by --virtual-nodes"
            )
        trials = plan_trials(virtual_nodes, steps, self._arguments.workers)
        progress.total = 1 + len(trials)
        self._width = max(len(trial.name) for trial in (REFERENCE, *trials))
        self._tell(REFERENCE, f"{counted(steps, 'step')}, {counted(virtual_nodes, 'virtual node')}")
        running = [asyncio.create_task(self._compare(trial, reference, steps)) for trial in trials]
        try:
            findings = list(await asyncio.gather(*running))
        finally:
            for each in running:
                each.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        if findings[0].difference is not None:
            progress.total += 1
            findings.insert(0, await self._compare(AGAIN, reference, steps))
        return findings, steps

    def _tell(self, trial: Trial, text: str) -> None:
        print(f"{trial.name:<{self._width}}  {text}", flush=True)

    async def _compare(self, trial: Trial, reference: Trace, steps: int) -> Finding:
        try:
            finding = Finding(trial, first_difference(reference, await self._trace_of(trial, steps), steps))
        except TrialFailed as failed:
            finding = Finding(trial, failed=failed)
        self._tell(trial, finding.text)
        return finding

    async def _trace_of(self, trial: Trial, steps: int) -> Trace:
        """Run the script in that way, as soon as there are cores for it; its trace."""
        cores = min(trial.most_workers, self._cores)
        async with self._freed:
            await self._freed.wait_for(lambda: self._free >= cores)
            self._free -= cores
        try:
            with tempfile.TemporaryDirectory(dir=self._directory, ignore_cleanup_errors=True) as directory:
                if trial.resumes_after is not None:
                    await self._run(trial, trial.resumes_after, Path(directory), traced=False)
                await self._run(trial, steps, Path(directory))
                if trial is REFERENCE:
                    self._warnings = json.loads((Path(directory) / _REPORT).read_text())["warnings"]
                self._made += 1
                return read_trace(Path(directory) / "trace")
        except ConfigurationError as error:
            raise TrialFailed(trial, str(error)) from error
        finally:
            async with self._freed:
                self._free += cores
                self._freed.notify_all()

    async def _run(self, trial: Trial, steps: int, directory: Path, *, traced: bool = True) -> None:
        report, errors = directory / _REPORT, directory / "errors"
        environment = os.environ | {"PYTHONHASHSEED": trial.hash_seed}
        environment.pop(ENV_TRACE_REPEAT, None)
        if trial.repeated_step is not None:
            environment[ENV_TRACE_REPEAT] = str(trial.repeated_step)
        with errors.open("wb") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command(trial, steps, directory, report, traced),
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with(os.getpid()),
            )
        limit = self._arguments.timeout
        try:
            async with asyncio.timeout(limit):
                code = await process.wait()
        except TimeoutError:
            raise TrialFailed(
                trial,
                f"it has not made {counted(steps, 'step')} in {limit:g} s; ask for fewer --steps or a longer --timeout",
            ) from None
        finally:
            await self._end(process)
        if code != 0:
            said = errors.read_text("utf-8", "replace").strip()
            raise TrialFailed(trial, _reason(report, said, code), _traceback(said))

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is not None:
            return
        for patience in (0.2, FAILURE_GRACE):  # asked twice, it ends at once and tidies up
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                process.terminate()
                async with asyncio.timeout(patience):
                    await process.wait()
                    return
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # its workers and its coordinator die with it
        await process.wait()

    def _command(self, trial: Trial, steps: int, directory: Path, report: Path, traced: bool) -> list[str]:
        given = self._arguments
        command = ourselves("run", "--plain", "--workers", str(trial.workers))
        command += ["--stop-after", str(steps), "--report", str(report), "--rebalance-gain", "1"]
        command += ["--log-dir", str(directory / ("logs" if traced else "first-logs"))]
        if traced:
            command += ["--trace", str(directory / "trace")]
        # The script's own directory of checkpoints is neither read nor written.
        command += ["--checkpoint-dir", str(directory / "checkpoints"), "--checkpoint-seconds", _NEVER]
        if trial.schedule:
            command += ["--schedule", trial.schedule]
        command += ["--insecure-plaintext"] * given.insecure_plaintext
        if given.virtual_nodes is not None:
            command += ["--virtual-nodes", str(given.virtual_nodes)]
        return [*command, *self._program.words, *given.args]


def _reason(report: Path, said: str, code: int) -> str:
    """Why a run has failed: its report, with the exception where that does not name it; else its last words."""
    error = ""
    with contextlib.suppress(OSError, ValueError):
        content: dict[str, Any] = json.loads(report.read_text())
        error = str(content.get("error") or "")
    raised = _traceback(said).rpartition("\n")[2]
    if error:
        return error if raised in error else f"{error} ({raised})"
    last = said.rpartition("\n")[2].removeprefix("virtualflow: ")
    return raised or last or f"virtualflow run ended with {describe_exit(code)}"


def _traceback(said: str) -> str:
    """The last traceback of a run's output, without what the runner says behind it."""
    _, found, rest = said.rpartition(_TRACEBACK)
    lines = [line for line in rest.split("\n") if not line.startswith(("virtualflow: ", "[virtualflow "))]
    return (_TRACEBACK + "\n".join(lines)).rstrip() if found else ""
