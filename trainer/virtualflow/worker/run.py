"""What a user's script holds: ``with vf.elastic(...) as run: for step in run: for batch in step: ...``."""

from __future__ import annotations

import faulthandler
import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, NoReturn

import torch
from torch import nn

from virtualflow.data import hear_of_ends
from virtualflow.errors import (
    CommunicatorBroken,
    ConfigurationError,
    DoesNotFit,
    Drained,
    Evicted,
    Leave,
    ScriptExited,
    StatesDiffer,
    VirtualFlowError,
    advise,
    show,
    show_errors_plainly,
)
from virtualflow.protocol import messages as m
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.settings import MAX_NAME
from virtualflow.protocol.termination_message import TerminationMessageWriter
from virtualflow.protocol.wording import as_metrics, describe_end, too_long
from virtualflow.state import join_optimizers
from virtualflow.step import MetaModel
from virtualflow.worker.loop import Loop
from virtualflow.worker.options import Options, check_model
from virtualflow.worker.process import NameTaken, Sigterm, claim_name, read_exit
from virtualflow.worker.reporter import report_failure
from virtualflow.worker.request import FormerRun, Request
from virtualflow.worker.saving import agree_on_end, complete_leader
from virtualflow.worker.session import RunIsOver
from virtualflow.worker.settings import WorkerSettings
from virtualflow.worker.setup import Context, connect, open_session, set_up
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.step import Step

logger = logging.getLogger("virtualflow.worker")

_active: list[Run] = []
"""The run whose ``with`` block this process is in: one at most."""


class Script:
    """What this process remembers from one run of its script to the next; a process that it forks begins anew."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self.process = os.getpid()
        self.incarnation = uuid.uuid4().hex
        """Names this process, in all runs."""
        self.former: tuple[FormerRun, ...] = ()


_script = Script()


def this_script() -> Script:
    if _script.process != os.getpid():
        _script.begin()
    return _script


class Run:
    """A training in progress, in one worker; made by :func:`virtualflow.elastic`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        dataset: Any,
        options: Options,
        settings: WorkerSettings,
    ) -> None:
        show_errors_plainly()
        self._termination_message = TerminationMessageWriter()
        try:
            environment = _read_environment()
            claim_name(environment)
            options = options.told(environment)
            check_model(model)
            meta = None
            if options.shards_parameters and any(parameter.is_meta for parameter in model.parameters()):
                meta = MetaModel(model, options.device or torch.device("cpu"), options.seed)
            one = join_optimizers(optimizer)
        except NameTaken:
            raise
        except VirtualFlowError as error:
            self._termination_message.ended(error, does_not_fit=isinstance(error, DoesNotFit))
            raise
        self._request = Request(model, one, dataset, options, environment, settings, meta=meta)
        self._loop: Loop | None = None
        self._resources = ExitStack()
        """All that is to be given back when the ``with`` block ends."""

    # --- the with block -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        if _active:
            raise VirtualFlowError("a run is active already; leave its with block before the next vf.elastic")
        self._request = replace(self._request, former=this_script().former)
        if self._request.former:
            self._termination_message.clear()  # what it says is about the run before
        try:
            self._open()
        except RunIsOver as found:
            self._resources.close()
            self._resources = ExitStack()
            self._request = replace(self._request, over=found.over)
            self._open()
        _active.append(self)
        return self

    def _open(self) -> None:
        """Set everything up, and enter the job.

        Raises:
            RunIsOver: the job is in a later run of the script.
        """
        session: AnySession | None = None
        try:
            self._resources.callback(hear_of_ends())
            session = open_session(self._request, self._resources, this_script().incarnation)
            context = set_up(self._request, session, self._resources)
            self._sigterm = self._obey_sigterm(session)  # which what is forked before must not inherit
            connect(context)
            self._loop = Loop(context, self._sigterm.look)
            session.give_up = partial(self._give_up, context)
        except RunIsOver:
            raise
        except BaseException as error:
            advise(error)
            self._termination_message.ended(error)
            if isinstance(error, Exception) and session is not None and session.coordinated:
                if isinstance(error, VirtualFlowError):
                    show(error)  # before waiting for a coordinator that may never come
                report_failure(session, error)
            self._resources.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.clear()
        context = self._context
        for abandon in context.parts.abandon:  # the script may have left its inner loop in the middle
            abandon()
        with self._resources:
            raised = error
            if isinstance(error, SystemExit) and not isinstance(error, Leave):
                error = self._read_exit(context, error)
            if error is not None:
                self._fail(context, error)
                if isinstance(error, Drained | ScriptExited) and error is not raised:
                    raise error
                return
            try:
                self._report_result(context)
            except BaseException as failure:
                self._say_last(context, failure)
                raise
        if not context.session.coordinated and context.checkpointer.failure is not None:
            unsaved = VirtualFlowError(context.checkpointer.failure)
            self._say_last(context, unsaved)
            raise unsaved

    def _obey_sigterm(self, session: AnySession) -> Sigterm:
        """SIGTERM asks for a drain, as long as the run lasts."""
        drain = partial(session.request_drain, "SIGTERM", self._request.settings.drain_grace)
        sigterm = Sigterm(drain, partial(session.note, "warning"))
        sigterm.open()
        self._resources.callback(sigterm.close)
        return sigterm

    def _read_exit(self, context: Context, error: SystemExit) -> BaseException | None:
        """What it means that the script ends itself by ``sys.exit()``; ``None``: nothing, all is done."""
        session, training = context.session, context.training
        assert self._loop is not None
        if self._loop.trained:
            return None
        told = read_exit(error, training.completed_steps, context.total_steps, session.draining, session.coordinated)
        if isinstance(told, Drained):
            if len(session.state.ranges) == 1 and self._loop.between_steps:
                training.arrive()
                context.membership.save_final()
            session.leave_alone()
        return told

    def _fail(self, context: Context, error: BaseException) -> None:
        """The ``with`` block ended with an exception: say so, first where no coordinator is needed for it."""
        if context.fusion is not None:
            context.fusion.explain(error)
        advise(error)
        if context.profiling is not None:
            context.profiling.explain(error)
        self._say_last(context, error)
        if isinstance(error, Exception):
            report_failure(context.session, error, context.training)
        if context.tracking is not None and not isinstance(error, Drained | Evicted):  # whose place others have taken
            context.tracking.flush(now=True)

    def _give_up(self, context: Context, leave: Leave) -> NoReturn:
        """End this process from behind a training thread that hangs: nothing that it may hold is waited for."""
        place = context.session.activity.stacks()
        self._say_last(context, leave, place.text)
        said = f"virtualflow: {leave.reason}; its training thread does not hear of it, so the process is ended here\n"
        with suppress(OSError):
            os.write(2, said.encode())
            faulthandler.dump_traceback(2)
        os._exit(leave.exit_code)

    def _say_last(self, context: Context, error: BaseException, stacks: str | None = None) -> None:
        training, session = context.training, context.session
        odd = error.odd if isinstance(error, StatesDiffer) else ()
        self._termination_message.ended(
            error,
            training.completed_steps,
            context.total_steps,
            training.numbers,
            training.non_finite,
            context.checkpointer.newest,
            stacks,
            session.state.convicted or session.incarnation in odd,
            isinstance(error, DoesNotFit),
        )

    def _report_result(self, context: Context) -> None:
        """Report the result and wait until nobody needs this worker."""
        session, membership, training = context.session, context.membership, context.training
        session.activity.mark("reporting the result", training.completed_steps)
        assert self._loop is not None
        trained = self._loop.trained
        if not session.state.has_state:
            logger.warning("the script has not iterated over the run, so nothing was trained: for step in run: ...")
            return
        early = not training.is_over
        if early and not session.coordinated:
            logger.warning("%s", describe_end(training.completed_steps, context.total_steps, stopped_early=True))
        training.arrive()
        if context.tracking is not None:
            context.tracking.note()
        if not trained:
            self._loop.save_if_due()
        complete_leader(membership, training)
        agree_on_end(session, membership, training, trained, context.tracking)
        if context.tracking is not None:
            context.tracking.end()
        digest, over = "", self._request.over
        if session.coordinated or self._termination_message.wanted or over is not None:
            result = context.reporter.result(early)
            digest = result.digest
        if over is not None:
            _compare(over, digest, bitwise=self._request.bitwise)
        elif digest:
            self._termination_message.done(result, context.total_steps)
            broken = CommunicatorBroken("a peer needs help to finish")
            session.report_done(result, lambda: membership.recover(broken))
        session.state.lease.keep()
        metrics = as_metrics(training.numbers)
        ended = m.RunResult(self._request.run, training.completed_steps, context.total_steps, digest, metrics, early)
        this_script().former += (FormerRun(ended, context.checkpointer.directory),)

    # --- what a user's script sees ------------------------------------------------------------------------------------

    @property
    def _context(self) -> Context:
        """The parts of this run.

        Raises:
            VirtualFlowError: its ``with`` block has not begun.
        """
        if self._loop is None:
            raise VirtualFlowError("use the run inside its with block: with vf.elastic(...) as run: ...")
        return self._loop.context

    @property
    def leader(self) -> bool:
        """Whether virtual node 0 is assigned to this worker, as it is to one of each generation: the one that prints.

        A worker that was stopped or cut off for longer than the heartbeat limit, so that others may have gone on
        without it, is no leader until the coordinator has confirmed that they have not; this waits for it a while.
        Between two looks the world may change: what must not be written by two gets :attr:`fence` to compare.
        """
        session = self._context.session
        return session.state.leader and session.holds_lease()

    @property
    def fence(self) -> tuple[int, int]:
        """The number of this worker's generation, which only grows; the checkpoints bear it, too.

        Two generations never have the same, so a store that keeps the highest with what is written, and refuses
        what comes with a lower one, has one writer at a time.
        """
        generation = self._context.session.generation
        return generation.incarnation, generation.counter

    @property
    def id(self) -> str:
        """What names this training, on all its workers and for good: joiners get it, and checkpoints hold it.

        Raises:
            VirtualFlowError: this worker has no part in the training yet.
        """
        found = self._context.training.id
        if not found:
            raise VirtualFlowError("run.id is known once a step has begun; read it behind the micro-batches of a step")
        return found

    @property
    def metrics(self) -> dict[str, float]:
        """The combined metrics of the last step."""
        return self._context.training.metrics

    @property
    def completed_steps(self) -> int:
        """Updates that have been applied."""
        return self._context.training.completed_steps

    @property
    def total_steps(self) -> int | None:
        """How many updates the training takes; ``None`` when the length of the streams decides."""
        return self._context.total_steps

    def log(self, **metrics: float) -> None:
        """Add numbers about the whole job (a test accuracy) to its report, and to the last step in its trackers.

        Every worker logs the same.

        Raises:
            ConfigurationError: a name is too long.
        """
        training = self._context.training
        for name in metrics:
            if len(name) > MAX_NAME:
                raise ConfigurationError(too_long(name, "run.log"))
        numbers = {name: float(value) for name, value in metrics.items()}
        training.logged.update(numbers)
        training.note_non_finite(numbers)
        if self._context.tracking is not None:
            self._context.tracking.log(numbers)
        if self._loop is not None:
            self._loop.check_finite()

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that remain; a worker that leaves is ended here, see :class:`virtualflow.Drained`."""
        if self not in _active or self._loop is None:
            raise VirtualFlowError("iterate over the run inside its with block: with vf.elastic(...) as run: ...")
        return self._loop.steps()


def _compare(over: m.RunOver, digest: str, *, bitwise: bool) -> None:
    told = over.result
    if bitwise and told is not None and told.digest and told.digest != digest:
        raise VirtualFlowError(
            f"run {told.run} of the script ended with weights {told.digest[:12]}, and this worker, which came later, "
            f"arrives at {digest[:12]}: what the script does behind that run would differ here; keep checkpoints "
            "(--checkpoint-dir), and see with virtualflow check that a run depends on the script and its data alone"
        )


def _read_environment() -> WorkerEnvironment:
    try:
        return WorkerEnvironment.read()
    except VirtualFlowError as error:
        error.of_script = False
        raise


def active_loop() -> Loop | None:
    return _active[0]._loop if _active else None
