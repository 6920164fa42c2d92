"""The loop that a user's script iterates: ``with vf.elastic(...) as run: for step in run: for batch in step: ...``.

This is the only place that knows all the others. Between two steps stands everything that the user does not see: the
exchange and the update (``update``), the membership (``session``), the state that a joiner gets (``synchronization``),
checkpoints and reports. An attempt that fails is repeated inside the inner loop: after it, the step is committed, and
code that follows runs exactly once a step.
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import statistics
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Unpack

import msgspec
import torch
from torch import Tensor, nn

from virtualflow import messages as m
from virtualflow import state
from virtualflow.alone import ALONE
from virtualflow.audit import Audit
from virtualflow.checkpoint import CheckpointPolicy, CheckpointWriter, Found, JobIdentity, find_newest, load
from virtualflow.checks import check_optimizer, check_scheduler, check_sizes
from virtualflow.communicator import Communicator
from virtualflow.contribution import Head, Schema
from virtualflow.determinism import fingerprint, pin
from virtualflow.errors import CommunicatorBroken, ConfigurationError, Drained, VirtualFlowError
from virtualflow.loading import LoaderOptions, Source, open_source
from virtualflow.randomness import seed_virtual_node
from virtualflow.sampling import micro_batch
from virtualflow.session import NOTHING, Facts, Session
from virtualflow.settings import (
    CHECKPOINT_KEEP,
    CHECKPOINT_SECONDS,
    LOADER_GRACE,
    MAX_STEP_TIMES,
    STOP_GRACE,
    VIRTUAL_NODES,
    CommunicatorSettings,
    LinkSettings,
    MembershipSettings,
    WorkerEnvironment,
)
from virtualflow.synchronization import Standing, Transfer, move, plan_transfer
from virtualflow.update import Outcome, SchedulerInterval, Update, gather_bytes

logger = logging.getLogger("virtualflow.worker")

_active: Run | None = None
"""The run whose ``with`` block this process is in."""


def elastic(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    *,
    batch_size: int,
    epochs: int | None = None,
    steps: int | None = None,
    virtual_nodes: int = VIRTUAL_NODES,
    seed: int = 0,
    shuffle: bool = True,
    drop_last: bool = False,
    scheduler: Any = None,
    scheduler_interval: SchedulerInterval = "step",
    scaler: Any = None,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    checkpoint: CheckpointPolicy | Path | str | None = None,
    deterministic: bool = True,
    **loader: Unpack[LoaderOptions],
) -> Run:
    """Make a training loop elastic; use the result as ``with vf.elastic(...) as run:``.

    Args:
        model: built and seeded the same in every worker.
        optimizer: over the model's parameters; one that needs a closure is refused.
        dataset: map-style, or iterable with the shard protocol (``loading.Shardable``).
        batch_size: samples of a global batch, divisible by the number of virtual nodes.
        epochs: how often to go through the dataset; with ``steps`` too, whichever ends first. At least one is needed.
        steps: how many optimizer updates to make.
        virtual_nodes: equal slices of every global batch; the command line or the manifest overrides it.
        seed: what the order of the samples and all random streams follow from.
        shuffle: a new order every epoch.
        drop_last: leave out a last short batch, which otherwise weighs by its samples.
        scheduler: a learning rate scheduler, stepped once an update (``scheduler_interval="step"``), once an epoch
            (``"epoch"``), or by your own code after the virtual nodes of a step (``"manual"``).
        scaler: a ``GradScaler``; your code calls ``scaler.scale(loss).backward()``, the rest is the library's.
        clip_grad_norm: the most that the norm of the reduced gradient may be.
        clip_grad_value: the most that each element of the reduced gradient may be.
        checkpoint: a directory or a policy; ``VIRTUALFLOW_CHECKPOINT_DIR`` and its kin override it.
        deterministic: refuse kernels and workers that would give other bits.
        **loader: passed through to the ``DataLoader``.

    Returns:
        The run; iterate over it inside its ``with`` block.
    """
    return Run(
        model,
        optimizer,
        dataset,
        Options(
            batch_size,
            epochs,
            steps,
            virtual_nodes,
            seed,
            shuffle,
            drop_last,
            scheduler,
            scheduler_interval,
            scaler,
            clip_grad_norm,
            clip_grad_value,
            checkpoint,
            deterministic,
            loader,
        ),
    )


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`elastic` beside the model, the optimizer and the dataset."""

    batch_size: int
    epochs: int | None
    steps: int | None
    virtual_nodes: int
    seed: int
    shuffle: bool
    drop_last: bool
    scheduler: Any
    scheduler_interval: SchedulerInterval
    scaler: Any
    clip_grad_norm: float | None
    clip_grad_value: float | None
    checkpoint: CheckpointPolicy | Path | str | None
    deterministic: bool
    loader: LoaderOptions


class Step:
    """One optimizer update of the whole job: iterate over it once for the micro-batches that this worker carries.

    After the iteration the update is applied, and :attr:`metrics` holds what was logged, combined over all virtual nodes.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._number: int | None = None
        self._epoch = 0
        self.metrics: dict[str, float] = {}
        self.complete = False

    @property
    def number(self) -> int:
        """The number of this update, from 1."""
        return self.bind()._number or 0

    @property
    def epoch(self) -> int:
        """The epoch that its samples belong to, from 0."""
        return self.bind()._epoch

    def bind(self) -> Step:
        """Learn which step this is; a worker that is about to join does so now, without warming up."""
        if self._number is None:
            self._run.join()
            self._number, self._epoch = self._run.completed_steps + 1, self._run.position[0]
        return self

    def log(self, **metrics: float | Tensor) -> None:
        """Log numbers of the present micro-batch: their means over all samples of the step are :attr:`metrics`."""
        self._run.log_metrics(metrics)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches that this worker carries, again when an attempt was void; then the step is committed."""
        if self.complete:
            raise VirtualFlowError(f"step {self._number} was iterated over twice; take the next one from the run")
        if self._number is None:
            yield from self._run.rehearse()
        self.bind()
        yield from self._run.carry(self.number)
        self.metrics = dict(self._run.metrics)
        self.complete = True


class Run:
    """A training in progress, in one worker; made by :func:`elastic`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, options: Options) -> None:
        self._model = model
        self._optimizer = optimizer
        self._dataset = dataset
        self._options = options
        self._environment = WorkerEnvironment.read()
        self.virtual_nodes = self._environment.virtual_nodes or options.virtual_nodes
        self.completed_steps = 0
        """Updates that have been applied."""
        self.position = (0, 0)
        """Epoch and step in the epoch of the next update, both from 0."""
        self.exchanges = 0
        """Exchanges of any kind that are complete; the same on all workers between two of them."""
        self.metrics: dict[str, float] = {}
        """The combined metrics of the last step."""
        self.logged: dict[str, float] = {}
        """Numbers of the whole job, from :meth:`log`."""
        self.evaluated: list[Tensor] | None = None
        """What the last exchange brought, if it was one of an evaluation: others may need it again."""
        self._metrics: dict[str, float | Tensor] = {}
        self._session: Session | None = None
        self._has_state = False
        self._carried = range(0)
        self._ranges: tuple[range, ...] = ()
        self._agreed: m.Plan | None = None
        self._attempted = 0
        self._failed_attempts = 0
        self._causes: list[m.Plan] = []
        self._members_at_commit: int | None = None
        self._committed_at: float | None = None
        self._held = 0.0
        self._step_times: deque[float] = deque(maxlen=MAX_STEP_TIMES)
        self._reported_at = 0.0
        self._trained = False
        self._phase: Any = "training"
        self._peeked: dict[tuple[int, int, int], Any] = {}
        self._audit: Audit | None = None
        self._checkpoints: CheckpointWriter | None = None
        self._saved_step = -1
        self._found: Found | None = None
        self._handlers: dict[int, Any] = {}
        self._stop_requested = False
        self._open_step: Step | None = None

    # --- the with block -------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        global _active
        if _active is not None:
            raise VirtualFlowError("a run is active already; leave its with block before the next vf.elastic")
        options, environment = self._options, self._environment
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        facts = Facts(max(1, self.virtual_nodes), fingerprint(device, environment.threads, options.deterministic))
        if environment.coordinator is not None:
            self._session = Session(environment, facts, LinkSettings(), CommunicatorSettings())
        self._pinned = pin(environment.threads, options.deterministic)
        self._running = False
        try:
            # First what forks loader processes, then what opens connections that they should not inherit.
            self._open(device)
            if self._session is not None:
                self._running = self._session.start().running
        except VirtualFlowError as error:
            self._report_failure(error)
            self._close()
            raise
        except BaseException:
            self._close()
            raise
        _active = self
        return self

    def _open(self, device: torch.device) -> None:
        """Check what the user asked for, and open everything that the loop needs.

        Raises:
            ConfigurationError: it cannot be done.
        """
        options = self._options
        check_sizes(options.batch_size, self.virtual_nodes, options.epochs, options.steps)
        check_optimizer(self._model, self._optimizer)
        check_scheduler(options.scheduler, options.scheduler_interval)
        micro = micro_batch(options.batch_size, self.virtual_nodes)
        self._source: Source = open_source(
            self._dataset,
            batch_size=options.batch_size,
            virtual_nodes=self.virtual_nodes,
            seed=options.seed,
            shuffle=options.shuffle,
            drop_last=options.drop_last,
            epochs=options.epochs,
            options=options.loader,
            close_grace=LOADER_GRACE,
        )
        self._update = Update(
            self._model,
            self._optimizer,
            options.scheduler,
            options.scheduler_interval,
            options.scaler,
            options.clip_grad_norm,
            options.clip_grad_value,
            self.virtual_nodes,
            micro,
            CommunicatorSettings.alignment,
        )
        self._signature = state.signature(self._model, self._optimizer)
        size = len(self._dataset) if self._source.steps_per_epoch is not None else None
        self._identity = JobIdentity(
            self.virtual_nodes, options.seed, options.batch_size, size, self._signature
        )
        policy = self._checkpoint_policy()
        if policy is not None:
            self._checkpoints = CheckpointWriter(policy, self._identity, self._tell_checkpoint, time.monotonic)
            self._checkpoints.check_writable()
        if self._session is not None:
            self._session.facts.total_steps = self.total_steps
            if self._environment.audit_dir is not None:
                self._audit = Audit(self._environment.audit_dir, self._session.worker, self._session.incarnation)
        if threading.current_thread() is threading.main_thread():
            self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_sigterm)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None
        try:
            if error is None:
                self._finish()
            elif isinstance(error, Exception):
                self._report_failure(error)
        finally:
            self._close()
        if error is None and self._session is None and self._checkpoints is not None and self._checkpoints.failure:
            raise VirtualFlowError(self._checkpoints.failure)

    def _finish(self) -> None:
        """The end of the ``with`` block: report the result and wait until nobody needs this worker."""
        if not self._trained:
            logger.warning("the with block ended after %d steps, before the training was through", self.completed_steps)
        if self._session is None or not self._has_state:
            return
        times = [*self._step_times]
        done = m.Done(
            step=self.completed_steps,
            digest=state.digest(self._model.state_dict()),
            optimizer_digest=state.optimizer_digest(self._optimizer),
            metrics={**self.metrics, **self.logged},
            step_ms=1_000 * statistics.median(times) if times else None,
            timed_steps=len(times),
        )
        self._session.report_done(done, lambda: self._recover(CommunicatorBroken("a peer needs help to finish")))

    def _report_failure(self, error: Exception) -> None:
        if self._session is None or not self._session.connect():
            return
        line = traceback.format_exception_only(error)[-1].strip()
        if isinstance(error, VirtualFlowError):
            self._session.report_failed(str(error), "")
        else:
            self._session.report_failed(line, "".join(traceback.format_exception(error)))

    def _close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        if self._checkpoints is not None:
            self._checkpoints.flush(STOP_GRACE)
        if hasattr(self, "_source"):
            self._source.close()
        if self._session is not None:
            self._session.close()
        if self._audit is not None:
            self._audit.close()
            self._audit = None
        self._pinned.undo()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._session is not None:
            self._session.request_drain("SIGTERM", MembershipSettings.drain_grace)
        self._stop_requested = True

    # --- what a user's script sees ----------------------------------------------------------------------------------------------

    @property
    def leader(self) -> bool:
        """Whether this worker carries virtual node 0: the one that prints, on exactly one worker."""
        return 0 in self._carried or self._session is None

    @property
    def total_steps(self) -> int | None:
        """How many updates the training takes; ``None`` when the length of the streams decides."""
        options, per_epoch = self._options, self._source.steps_per_epoch
        by_epochs = options.epochs * per_epoch if options.epochs is not None and per_epoch is not None else None
        limits = [limit for limit in (by_epochs, options.steps) if limit is not None]
        return min(limits, default=None) if per_epoch is not None or options.epochs is None else None

    def log(self, **metrics: float) -> None:
        """Add numbers about the whole job (a test accuracy) to its report; every worker logs the same."""
        self.logged.update({name: float(value) for name, value in metrics.items()})

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that remain; a worker that leaves is ended here, see :class:`virtualflow.errors.Drained`."""
        if _active is not self:
            raise VirtualFlowError("iterate over the run inside its with block: with vf.elastic(...) as run: ...")
        if not self._running:
            self.join()
        while not self._has_state or not self._is_over():
            self._between_steps()
            step = self._open_step = Step(self)
            yield step
            if not step.complete:
                raise VirtualFlowError(
                    "a step was left before its end; iterate over all its micro-batches: for batch in step: ..."
                )
        self._complete_training()

    # --- a step ---------------------------------------------------------------------------------------------------------------------

    def _is_over(self) -> bool:
        options, (epoch, _) = self._options, self.position
        return (options.steps is not None and self.completed_steps >= options.steps) or (
            options.epochs is not None and epoch >= options.epochs
        )

    def log_metrics(self, metrics: dict[str, float | Tensor]) -> None:
        """Note metrics of the present virtual node (``Step.log``)."""
        for name, value in metrics.items():
            self._metrics[name] = value.detach() if isinstance(value, Tensor) else float(value)

    def carry(self, number: int) -> Iterator[Any]:
        """Attempt the step ``number`` until it is committed here or brought by a donor."""
        while self.completed_steps < number and not self._is_over():
            try:
                self._hold()
                yield from self._attempt(number)
                session = self._session
                offer = session.offer(evaluating=False) if session is not None and not self._is_last(number) else NOTHING
                outcome = self._update.exchange(
                    self._communicator, self._ranges, self.exchanges + 1, offer, self._peek()
                )
            except CommunicatorBroken as error:
                self._failed_attempts = self._failed_attempts + 1 if self._attempted == number else 0
                self._recover(error)
            else:
                self._commit(number, outcome)

    def _attempt(self, number: int) -> Iterator[Any]:
        if number != self._attempted:
            self._failed_attempts = 0
        self._update.begin(self._carried)
        self._check_interruption()
        self._attempted = number
        epoch, epoch_step = self.position
        for node in self._carried:
            self._check_interruption()
            batch = self._peeked.pop((epoch, epoch_step, node), None) or self._source.fetch(epoch, epoch_step, node)
            if self._audit is not None and self._session is not None:
                self._audit.carried(self._session.generation, epoch, number, node, batch.samples)
            self._metrics = {}
            if batch.size:
                self._update.clear_gradients()
                seed_virtual_node(self._options.seed, number, node)
                yield batch.data
            self._update.take(batch.size, self._metrics)

    def _peek(self) -> bool:
        """Whether this worker has samples for a further step of the epoch; streams must be read to know."""
        epoch, epoch_step = self.position
        if self._source.steps_per_epoch is not None:
            return epoch_step + 1 < self._source.steps_per_epoch
        for node in self._carried:
            key = (epoch, epoch_step + 1, node)
            if key not in self._peeked:
                self._peeked[key] = self._source.fetch(*key)
        return any(self._peeked[epoch, epoch_step + 1, node].size for node in self._carried)

    def _check_interruption(self) -> None:
        if self._session is None:
            return
        reason = self._session.interruption(self._session.plan)
        if reason is not None:
            raise CommunicatorBroken(reason)

    def _hold(self) -> None:
        if self._session is None:
            return
        hold = self._session.link.hold
        if hold is not None and self.completed_steps >= hold:
            self._report(now=True)
            self._held += self._session.await_hold(self.completed_steps)

    def _is_last(self, number: int) -> bool:
        total = self.total_steps
        return total is not None and number >= total

    def _commit(self, number: int, outcome: Outcome) -> None:
        """Apply a complete exchange and do all that belongs between two steps."""
        epoch, epoch_step = self.position
        epoch_ends = not any(head.more for head in outcome.heads)
        self._update.apply(outcome, epoch_ends)
        self.completed_steps, self.exchanges = number, self.exchanges + 1
        self.position = (epoch + 1, 0) if epoch_ends else (epoch, epoch_step + 1)
        self.metrics, self.evaluated = outcome.metrics, None
        now = time.monotonic()
        self._time_step(now)
        session = self._session
        if session is not None:
            session.facts.step = number
            if self._audit is not None:
                self._audit.committed(session.generation, number)
            self._agreed = session.agreed_plan(head.offer for head in outcome.heads)
            self._report(now=self._is_over())
            session.tidy()
        writer = self._checkpoints
        if writer is not None and self.leader and writer.due(number):
            writer.save(number, self._capture())
            self._saved_step = number

    def _time_step(self, now: float) -> None:
        """Take the time since the last commit: of a step, or the pause of a membership change."""
        held, self._held = self._held, 0.0
        passed = None if self._committed_at is None else now - self._committed_at - held
        session = self._session
        if session is not None and self._causes:
            plan, former = self._causes[-1], self._members_at_commit
            restart = next((cause for cause in self._causes if cause.cause == "restart"), None)
            if former is not None or (restart is not None and session.rank == 0):
                session.remember(
                    m.Change(
                        generation=plan.generation,
                        step=self.completed_steps,
                        from_=len(plan.members) if former is None else former,
                        to=len(plan.members),
                        cause=(restart or self._causes[0]).cause,
                        reason="; ".join(cause.reason for cause in self._causes)[:4_000],
                        pause_ms=None if passed is None else 1_000 * passed,
                        repeated_steps=self._failed_attempts,
                    )
                )
        elif passed is not None:
            self._step_times.append(passed)
        if session is not None and session.plan is not None:
            self._members_at_commit = len(session.plan.members)
        self._causes, self._failed_attempts = [], 0
        self._committed_at = now

    def _report(self, now: bool = False) -> None:
        """Tell the coordinator where the training is (the leader, and not too often)."""
        session = self._session
        moment = time.monotonic()
        if session is None or session.rank != 0 or (not now and moment - self._reported_at < LinkSettings.progress):
            return
        self._reported_at = moment
        recent = list(self._step_times)[-50:]
        rate = len(recent) / sum(recent) if recent and sum(recent) > 0 else 0.0
        session.link.send(
            m.Progress(
                session.generation,
                self.completed_steps,
                self.position[0],
                self.total_steps,
                {**self.metrics, **self.logged},
                rate,
                self._phase,
            )
        )

    def set_phase(self, phase: str) -> None:
        """Training or evaluating: decides which membership changes can be made."""
        self._phase = phase
        self._report(now=True)

    # --- between steps: membership ----------------------------------------------------------------------------------------------------

    @property
    def _communicator(self) -> Any:
        session = self._session
        return ALONE if session is None or session.communicator is None else session.communicator

    @property
    def communicator(self) -> Any:
        """The collectives of the running generation."""
        return self._communicator

    @property
    def ranges(self) -> tuple[range, ...]:
        """What each member of the running generation carries, in the order of the ranks."""
        return self._ranges

    @property
    def carried(self) -> range:
        """What this worker carries."""
        return self._carried

    @property
    def update(self) -> Update:
        """The numerics of a step."""
        return self._update

    @property
    def seed(self) -> int:
        """The seed of the job."""
        return self._options.seed

    def require_state(self) -> None:
        """Refuse an evaluation where a joiner could not take part in it.

        Raises:
            VirtualFlowError: it is called before a step's micro-batches.
        """
        if self._open_step is not None and not self._open_step.complete:
            raise VirtualFlowError("call vf.evaluate after the micro-batches of a step, or after the last step")
        if not self._has_state:
            raise VirtualFlowError("call vf.evaluate after the first step: a worker that joins later could not repeat it")

    def recover(self, error: CommunicatorBroken) -> None:
        """The exchange is void: go on under the next generation."""
        self._recover(error)

    def commit_evaluation(self, blocks: list[Tensor], heads: tuple[Head, ...]) -> None:
        """An exchange of an evaluation is complete; members that drain leave now."""
        self.evaluated, self.exchanges = blocks, self.exchanges + 1
        if self._session is not None:
            plan = self._session.agreed_plan(head.offer for head in heads)
            if plan is not None:
                self.switch(plan)

    def offer_to_switch(self) -> m.Generation:
        """The generation that this worker could enter during an evaluation."""
        return NOTHING if self._session is None else self._session.offer(evaluating=True)

    def rehearse(self) -> Iterator[Any]:
        """Let a joiner's first forward and backward pass happen before anybody waits for it.

        It gets one micro-batch through the user's loop and forgets what came of it: kernels are chosen, allocators
        and loader processes are warm when it enters.
        """
        if self._has_state:
            return
        self._source.assign(range(1), 0, 0)
        batch = self._source.fetch(0, 0, 0)
        self._metrics = {}
        self._update.begin(range(1))
        if batch.size:
            seed_virtual_node(self._options.seed, 0, 0)
            yield batch.data
        self._update.abandon()

    def join(self) -> None:
        """Become a member, with a state; returns at once when this worker has one."""
        if self._has_state:
            return
        if self._session is None:
            self._stand_alone()
            return
        self._session.be_ready()
        self._enter(self._session.await_entry())

    def _between_steps(self) -> None:
        """Switch to the generation that all have agreed on, or leave by it."""
        plan, self._agreed = self._agreed, None
        if self._session is None:
            if self._stop_requested:
                self._save_final()
                self._close()
                raise Drained("SIGTERM")
        elif plan is not None:
            self.switch(plan)

    def switch(self, plan: m.Plan) -> None:
        """Enter a planned generation with all others, or leave by it.

        Raises:
            Drained: this worker is not in it.
        """
        assert self._session is not None
        if not self._session.is_member(plan):
            if not plan.members and self._session.rank == 0:
                self._save_final()
            self._session.leave(plan.generation)
        self._enter(plan)

    def _recover(self, error: CommunicatorBroken) -> None:
        """The attempt is void: wait for the generation that takes over, and enter it."""
        assert self._session is not None
        session = self._session
        self._update.abandon()
        if session.interruption(session.plan) is None:
            logger.info("%s: generation %s broke: %s", session.worker, session.generation, error)
            session.say_broken(session.generation, str(error))
        self._enter(session.await_entry())

    def _enter(self, plan: m.Plan) -> None:
        """Enter ``plan``, or whichever takes over from it, and come to one state with its members."""
        assert self._session is not None
        session = self._session
        while True:
            self._causes.append(plan)
            try:
                self._synchronize(session.enter(plan), plan)
                break
            except CommunicatorBroken as error:
                if session.interruption(plan) is None or not self._has_state:
                    session.say_broken(plan.generation, str(error))
                plan = session.await_entry()
        self._carried = plan.members[session.rank].virtual_nodes
        self._ranges = tuple(member.virtual_nodes for member in plan.members)
        self._agreed = None
        self._peeked.clear()
        if not self._is_over():
            self._source.assign(self._carried, *self.position)
        self._update.forget_buffers()
        self._report(now=True)

    def _synchronize(self, communicator: Communicator, plan: m.Plan) -> None:
        """Come to one state with the other members of a generation.

        Raises:
            CommunicatorBroken: a member was lost meanwhile.
            ConfigurationError: the members do not fit together.
        """
        assert self._session is not None
        if not self._has_state and self._found is None:
            self._found = self._find_checkpoint()
        standing = Standing(
            has_state=self._has_state,
            exchanges=self.exchanges,
            step=self.completed_steps,
            checkpoint=-1 if self._found is None else self._found.step,
            model=0 if self._has_state else int(state.digest(self._model.state_dict())[:15], 16),
            signature=int(hashlib.sha256(json.dumps(self._signature, sort_keys=True).encode()).hexdigest()[:15], 16),
        )
        standings = [Standing.from_bytes(block) for block in communicator.all_gather(standing.to_bytes())]
        if len({other.signature for other in standings}) > 1:
            self._explain_difference(communicator)
        transfer = plan_transfer(standings)
        restored = self._bring_state(communicator, transfer)
        if not self._has_state:
            self._has_state = self._session.has_state = True
            self._session.facts.step = self.completed_steps
            self._session.say_entered(restored)

    def _bring_state(self, communicator: Communicator, transfer: Transfer) -> bool:
        """Restore a checkpoint, give or receive the state as the transfer says; whether a checkpoint was restored."""
        rank = communicator.rank
        if transfer.restorer == rank:
            assert self._found is not None
            self._restore(load(self._found))
        givers = {donor for pairs in transfer.rounds[:1] for donor, _ in pairs}
        later = {donor for pairs in transfer.rounds[1:] for donor, _ in pairs} - transfer.receivers
        if transfer.rounds:
            packed = state.pack(self._capture()) if rank in givers | later else None
            received = move(communicator, transfer, packed)
            if received is not None:
                self._restore(state.unpack(received))
        return transfer.restorer is not None

    def _explain_difference(self, communicator: Communicator) -> None:
        raw = gather_bytes(
            communicator,
            torch.frombuffer(bytearray(msgspec.json.encode(self._signature)), dtype=torch.uint8),
            CommunicatorSettings.alignment,
        )
        signatures = [msgspec.json.decode(block.numpy().tobytes()) for block in raw]
        for other in signatures:
            found = state.difference(signatures[0], other)
            if found is not None:
                raise ConfigurationError(f"the workers run different models: {found}; start all of them from one script")

    def _stand_alone(self) -> None:
        """Run without a coordinator: this process carries everything."""
        self._has_state = True
        found = self._find_checkpoint()
        if found is not None:
            self._restore(load(found))
            logger.warning("resumed from the checkpoint of step %d in %s", found.step, found.path.parent)
        self._carried = range(self.virtual_nodes)
        self._ranges = (self._carried,)
        if not self._is_over():
            self._source.assign(self._carried, *self.position)

    # --- state --------------------------------------------------------------------------------------------------------------------------

    def _capture(self) -> dict[str, Any]:
        changes = [] if self._session is None else list(self._session.facts.changes.values())
        extra = {
            "step": self.completed_steps,
            "position": self.position,
            "exchanges": self.exchanges,
            "schema": self._update.schema.to_json(),
            "metrics": self.metrics,
            "logged": self.logged,
            "evaluated": self.evaluated,
            "changes": msgspec.to_builtins(changes),
        }
        options = self._options
        return state.capture(self._model, self._optimizer, options.scheduler, options.scaler, extra)

    def _restore(self, tree: dict[str, Any]) -> None:
        options = self._options
        extra = state.restore(tree, self._model, self._optimizer, options.scheduler, options.scaler)
        self.completed_steps = extra["step"]
        self.position = (extra["position"][0], extra["position"][1])
        self.exchanges = extra["exchanges"]
        self._update.schema = Schema.from_json(extra["schema"])
        self.metrics, self.logged, self.evaluated = extra["metrics"], extra["logged"], extra["evaluated"]
        if self._session is not None:
            self._session.facts.step = self.completed_steps
            for change in msgspec.convert(extra["changes"], list[m.Change]):
                self._session.facts.changes.setdefault(change.generation, change)

    def _checkpoint_policy(self) -> CheckpointPolicy | None:
        given, environment = self._options.checkpoint, self._environment
        policy = given if isinstance(given, CheckpointPolicy) else None
        directory = environment.checkpoint_dir or (policy.directory if policy else Path(given) if given else None)  # type: ignore[arg-type]
        if directory is None:
            return None
        every_steps = environment.checkpoint_steps or (policy.every_steps if policy else None)
        every_seconds = environment.checkpoint_seconds or (policy.every_seconds if policy else None)
        if every_steps is None and every_seconds is None:
            every_seconds = CHECKPOINT_SECONDS
        keep = environment.checkpoint_keep or (policy.keep if policy else CHECKPOINT_KEEP)
        return CheckpointPolicy(directory, every_steps, every_seconds, keep)

    def _find_checkpoint(self) -> Found | None:
        policy = self._checkpoint_policy()
        if policy is None:
            return None
        return find_newest(policy.directory, self._tell_checkpoint, self._identity)

    def _tell_checkpoint(self, text: str) -> None:
        failed = self._checkpoints is not None and self._checkpoints.failure == text
        if self._session is None:
            (logger.warning if failed else logger.info)("%s", text)
        else:
            self._session.link.send(m.Note("checkpoint-failed" if failed else "checkpoint", text[:4_000]))

    def _save_final(self) -> None:
        """Write a checkpoint of the present step, and wait for it."""
        if self._checkpoints is not None and self._saved_step != self.completed_steps:
            self._checkpoints.flush(None)
            self._checkpoints.save_now(self.completed_steps, self._capture())
            self._saved_step = self.completed_steps

    def _complete_training(self) -> None:
        self._trained = True
        if self.leader:
            self._save_final()
        self._report(now=True)


def active_run() -> Run | None:
    """The run whose ``with`` block this process is in."""
    return _active
