"""The loop that a user's script iterates: ``with vf.elastic(...) as run: for step in run: for batch in step: ...``.

This is the only place that knows all the others. Between two steps stands everything that the user does not see: the
exchange and the update (``update``), the membership (``session``), the state that a joiner gets (``synchronization``),
checkpoints and reports. An attempt that fails is repeated inside the inner loop: after it, the step is committed, and
code that follows runs exactly once a step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from types import FrameType, TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from virtualflow import messages as m
from virtualflow import self_test
from virtualflow.allocation import keep_freed_memory
from virtualflow.audit import Audit
from virtualflow.checkpoint_files import JobIdentity
from virtualflow.contribution import Head
from virtualflow.determinism import Pinned, describe_device, device_of, fingerprint, pin
from virtualflow.digests import signature as signature_of
from virtualflow.ending import agree_on_end, complete_leader
from virtualflow.environment import WorkerEnvironment
from virtualflow.errors import CommunicatorBroken, Drained, VirtualFlowError, show_errors_plainly
from virtualflow.fusing import Fusing
from virtualflow.keeper import Keeper, choose_policy
from virtualflow.last_word import LastWordWriter
from virtualflow.loading import MicroBatch, Source, open_source
from virtualflow.options import (
    Options,
    check_optimizer,
    check_reproducibility,
    check_scheduler,
    check_sharding,
    check_sizes,
)
from virtualflow.overlap import AttemptSpoiled
from virtualflow.pace import Pace
from virtualflow.participation import Participation
from virtualflow.profiling import Profiling, describe_situation, foretell_pace, open_profiling
from virtualflow.randomness import seed_virtual_node
from virtualflow.reporter import Reporter, report_failure
from virtualflow.sampling import micro_batch
from virtualflow.session import NOTHING, Facts, Session
from virtualflow.settings import (
    LOADER_GRACE,
    STOP_GRACE,
    AllocationSettings,
    CommunicatorSettings,
    LinkSettings,
    MembershipSettings,
)
from virtualflow.step import Step
from virtualflow.stopwatch import Stopwatch
from virtualflow.streams import fuse
from virtualflow.training import Training
from virtualflow.update import Outcome, Update

logger = logging.getLogger("virtualflow.worker")

_active: list[Run] = []
"""The run whose ``with`` block this process is in: one at most."""


class Run:
    """A training in progress, in one worker; made by :func:`virtualflow.elastic`."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, dataset: Any, options: Options) -> None:
        self._model = model
        self._optimizer = optimizer
        self._dataset = dataset
        self._options = options
        self._last_word = LastWordWriter()
        try:
            self._environment = WorkerEnvironment.read()
        except VirtualFlowError as error:
            self._last_word.ended(error)
            raise
        self.virtual_nodes = self._environment.virtual_nodes or options.virtual_nodes
        self.reproducibility = self._environment.reproducibility or options.reproducibility
        """Whether the result is the same to the bit on any number of workers, or in distribution."""
        self._stopwatch = Stopwatch()
        self._pace = Pace()
        self._session: Session | None = None
        self._source: Source | None = None
        self._keeper: Keeper | None = None
        self._audit: Audit | None = None
        self._profiling: Profiling | None = None
        self._warning: str | None = None
        self._pinned: Pinned | None = None
        self._device = device_of(model)
        self._running = False
        self._trained = False
        self._stop_requested = False
        self._metrics: dict[str, float | Tensor] = {}
        self._peeked: dict[tuple[int, int, int], MicroBatch] = {}
        self._loaded_width = 1
        """What the source has been told of the chunks to come."""
        self._open_step: Step | None = None
        self._fusing: Fusing | None = None
        self._handlers: dict[int, Any] = {}
        self._cleanup = ExitStack()

    # --- the with block -----------------------------------------------------------------------------------------------

    def __enter__(self) -> Run:
        if _active:
            raise VirtualFlowError("a run is active already; leave its with block before the next vf.elastic")
        environment, device = self._environment, self._device
        facts = Facts(
            max(1, self.virtual_nodes),
            fingerprint(environment.threads, self.reproducibility),
            reproducibility=self.reproducibility,
            device=describe_device(device),
        )
        self._pinned = pin(environment.threads, self.reproducibility)
        self._cleanup.callback(keep_freed_memory(AllocationSettings()))
        if environment.coordinator is not None and environment.profile_out is None:
            self._session = Session(environment, facts, LinkSettings(), CommunicatorSettings())
        try:
            # First what forks loader processes, then what opens connections that they should not inherit.
            self._open()
            if self._session is not None:
                if self.reproducibility == "bitwise":
                    facts.self_test = self_test.digest(device)
                self._running = self._session.start().running
                if self._warning is not None:
                    self._session.link.send(m.Note("warning", self._warning[:4_000]))
        except BaseException as error:
            self._last_word.ended(error)
            if isinstance(error, VirtualFlowError):
                report_failure(self._session, error)
            self._close()
            raise
        _active.append(self)
        return self

    def _open(self) -> None:
        """Check what the user asked for, and open everything that the loop needs.

        Raises:
            ConfigurationError: it cannot be done.
        """
        options = self._options
        check_sizes(options.batch_size, self.virtual_nodes, options.epochs, options.steps)
        check_reproducibility(self.reproducibility, options.max_fused, options.batch_norm)
        check_optimizer(self._model, self._optimizer)
        check_scheduler(options.scheduler, options.scheduler_interval)
        if options.shard_optimizer:
            check_sharding(self._optimizer, options.scaler)
        self._source = open_source(
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
        self._micro_batch = micro_batch(options.batch_size, self.virtual_nodes)
        self.update = Update(
            self._model,
            self._optimizer,
            options.scheduler,
            options.scheduler_interval,
            options.scaler,
            options.clip_grad_norm,
            options.clip_grad_value,
            self.virtual_nodes,
            self._micro_batch,
            CommunicatorSettings.alignment,
            self.reproducibility == "bitwise",
            options.shard_optimizer,
        )
        self._cleanup.callback(self.update.close)
        self._fusing = self._open_fusing(self._source)
        self._cleanup.callback(self._fusing.close)
        self.training = Training(self._model, self._optimizer, options.scheduler, options.scaler, self.update)
        signature = signature_of(self._model, self._optimizer)
        size = len(self._dataset) if self._source.steps_per_epoch is not None else None
        identity = JobIdentity(self.virtual_nodes, options.seed, options.batch_size, size, signature)
        situation = describe_situation(self._model, options, self._environment, self.virtual_nodes, signature)
        if self._environment.profile_out is not None:
            self._profiling = open_profiling(
                self._model, self._dataset, options, self._environment, self.virtual_nodes, self._source, situation
            )
        if options.shard_optimizer:  # which checkpoints need not know
            signature = {**signature, "optimizer": f"{signature['optimizer']}, sharded"}
        policy = None if self._profiling is not None else choose_policy(options.checkpoint, self._environment)
        self._keeper = Keeper(policy, identity, None if self._session is None else self._tell_checkpoint)
        self.participation = Participation(
            self._session, self.training, self._keeper, signature, self.virtual_nodes, self._stopwatch, self._on_entry
        )
        self.reporter = Reporter(self._session, self.training, self._stopwatch, self.total_steps)
        if self._session is not None:
            self._session.facts.total_steps = self.total_steps
            self._session.facts.changes = self.training.changes
            self._session.facts.pace, self._warning = foretell_pace(self._environment, situation)
            if self._environment.audit_dir is not None:
                self._audit = Audit(self._environment.audit_dir, self._session.worker, self._session.incarnation)
        if threading.current_thread() is threading.main_thread():
            self._handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._on_sigterm)

    def _open_fusing(self, source: Source) -> Fusing:
        cap = self._environment.max_fused or self._options.max_fused
        if self.reproducibility == "bitwise" or not source.fuses:
            cap = 1
        return Fusing(
            self._model, cap, micro_batch(self._options.batch_size, self.virtual_nodes), self._options.batch_norm
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _active.clear()
        try:
            if error is None:
                self._finish()
            else:
                self._fail(error)
        finally:
            self._close()
        if error is None and self._session is None and self._keeper is not None and self._keeper.failure is not None:
            failure = VirtualFlowError(self._keeper.failure)
            self._say_last(failure)
            raise failure

    def _fail(self, error: BaseException) -> None:
        """The ``with`` block ended with an exception: say so, first where no coordinator is needed for it."""
        if self._fusing is not None:
            self._fusing.explain(error)
        if self._profiling is not None:
            self._profiling.explain(error)
        self._say_last(error)
        if isinstance(error, Exception):
            report_failure(self._session, error)

    def _say_last(self, error: BaseException) -> None:
        training = self.training
        self._last_word.ended(error, training.completed_steps, self.total_steps, training.numbers)

    def _finish(self) -> None:
        """The end of the ``with`` block: report the result and wait until nobody needs this worker."""
        try:
            self._report_result()
        except BaseException as error:
            self._say_last(error)
            raise

    def _report_result(self) -> None:
        if not self._trained:
            logger.warning("the with block ended after %d steps, before the last one", self.training.completed_steps)
        if self.participation.has_state:
            complete_leader(self.participation, self.training)
            agree_on_end(self._session, self.participation, self.training)
            if self._session is None and not self._last_word.wanted:
                return
            result = self.reporter.result()
            self._last_word.done(result, self.total_steps)
            if self._session is not None:
                broken = CommunicatorBroken("a peer needs help to finish")
                self._session.report_done(result, lambda: self.participation.recover(broken))

    def _close(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()
        self._cleanup.close()
        if self._keeper is not None:
            self._keeper.flush(STOP_GRACE)
        if self._source is not None:
            self._source.close()
        if self._session is not None:
            self._session.close()
        if self._audit is not None:
            self._audit.close()
            self._audit = None
        if self._pinned is not None:
            self._pinned.undo()

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        if self._session is not None:
            self._session.request_drain("SIGTERM", MembershipSettings.drain_grace)
        self._stop_requested = True

    # --- what a user's script sees ------------------------------------------------------------------------------------

    @property
    def leader(self) -> bool:
        """Whether this worker carries virtual node 0, which exactly one does: the one that prints."""
        return self.participation.leader

    @property
    def metrics(self) -> dict[str, float]:
        """The combined metrics of the last step."""
        return self.training.metrics

    @property
    def completed_steps(self) -> int:
        """Updates that have been applied."""
        return self.training.completed_steps

    @property
    def total_steps(self) -> int | None:
        """How many updates the training takes; ``None`` when the length of the streams decides."""
        return self._options.total_steps(self._steps_per_epoch)

    def log(self, **metrics: float) -> None:
        """Add numbers about the whole job (a test accuracy) to its report; every worker logs the same."""
        self.training.logged.update({name: float(value) for name, value in metrics.items()})

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps that remain; a worker that leaves is ended here, see :class:`virtualflow.Drained`."""
        if self not in _active:
            raise VirtualFlowError("iterate over the run inside its with block: with vf.elastic(...) as run: ...")
        if not self._running:
            self.participation.join()
        while not self.participation.has_state or not self._is_over():
            self._between_steps()
            step = self._open_step = Step(self)
            yield step
            if not step.complete:
                raise VirtualFlowError(
                    "a step was left before its end; iterate over all its micro-batches: for batch in step: ..."
                )
        self._trained = True
        complete_leader(self.participation, self.training)
        if self.leader and self._keeper is not None:
            self._keeper.save_final(self.training)
        self.reporter.progress(now=True)

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def _steps_per_epoch(self) -> int | None:
        return None if self._source is None else self._source.steps_per_epoch

    def _samples_of_step(self, epoch_step: int) -> int | None:
        """Of the whole global batch; ``None`` for streams, which must be read to know."""
        return None if self._source is None else self._source.samples(epoch_step)

    def _is_over(self) -> bool:
        return self._options.is_over(self.training.completed_steps, self.training.position[0])

    def _between_steps(self) -> None:
        """What happens between two steps beside the update: leave or enter a generation."""
        if self._session is None and self._stop_requested:
            if self._keeper is not None:
                self._keeper.save_final(self.training)
            raise Drained("SIGTERM")
        self.participation.switch_if_agreed()

    def seed_between_steps(self) -> None:
        """Let random numbers of the user's code after a step or an evaluation be the same on all workers."""
        seed_virtual_node(self._options.seed, self.training.exchanges, self.virtual_nodes + 1)

    def log_metrics(self, metrics: dict[str, float | Tensor]) -> None:
        """Note metrics of the present virtual node (``Step.log``)."""
        for name, value in metrics.items():
            self._metrics[name] = value.detach() if isinstance(value, Tensor) else float(value)

    def carry(self, number: int) -> Iterator[Any]:
        """Attempt the step ``number`` until it is committed here or brought by a donor."""
        if self._profiling is not None:
            yield from self._profiling.measure()
        part = self.participation
        while self.training.completed_steps < number and not self._is_over():
            try:
                self._wait_while_held()
                yield from self._attempt(number)
                offer = NOTHING if number == self.total_steps else part.offer(evaluating=False)
                exchange = self.training.exchanges + 1
                outcome = self.update.exchange(
                    part.communicator, part.ranges, exchange, offer, self._peek(), self._saves_after(number)
                )
            except CommunicatorBroken as error:
                self._stopwatch.fail()
                generation = self._generation
                if part.recover(error) and self._audit is not None:
                    self._audit.committed(generation, number)
            except AttemptSpoiled:
                self.update.abandon()
                self._on_entry()
            else:
                self._commit(number, outcome)

    @property
    def _generation(self) -> m.Generation:
        return NOTHING if self._session is None else self._session.generation

    def _saves_after(self, number: int) -> bool:
        """Whether this worker writes a checkpoint after the step ``number`` and needs others' help with it."""
        return (
            self.update.shards is not None and self.leader and self._keeper is not None and self._keeper.is_due(number)
        )

    def _attempt(self, number: int) -> Iterator[Any]:
        part = self.participation
        part.check()
        self._stopwatch.attempt(number)
        self.update.begin(part.carried, max(len(carried) for carried in part.ranges))
        epoch, epoch_step = self.training.position
        fusing = self._require_fusing()
        self._pace.begin(time.monotonic(), len(part.carried))
        if fusing.exploring:
            self._pace.disregard()
        for nodes in fusing.begin():
            part.check()
            batch = self._fetch(epoch, epoch_step, nodes)
            if batch.size < self._micro_batch * len(nodes):
                self._pace.disregard()
            if self._audit is not None and self._session is not None:
                for node, samples in batch.apart():
                    self._audit.carried(self._session.generation, epoch, number, node, samples)
            if nodes.stop == part.carried.stop:
                self.update.expect_last(part.communicator, part.ranges, batch.size, self._samples_of_step(epoch_step))
            yield from self._present(batch, number)
            if nodes.stop == part.carried.stop:
                self._end_computing()
            self.update.take(batch.size, self._metrics, len(nodes))
        fusing.end()

    def _end_computing(self) -> None:
        """The user's code is through with the last virtual node: see how long all of them took."""
        if self._session is not None:
            if self._device.type == "cuda":
                # Kernels run on behind the script. The exchange needs their results at once: this wait is no other.
                torch.cuda.synchronize(self._device)
            self._pace.end(time.monotonic())

    def _present(self, batch: MicroBatch, number: int) -> Iterator[Any]:
        """Give a micro-batch to the user's code, with the random streams of its (first) virtual node."""
        self._metrics = {}
        if batch.size:
            self._require_fusing().present(batch)
            seed_virtual_node(self._options.seed, number, batch.virtual_node)
            yield batch.data

    def _require_fusing(self) -> Fusing:
        assert self._fusing is not None
        return self._fusing

    def rehearse(self) -> Iterator[Any]:
        """Let a joiner's first forward and backward pass happen before anybody waits for it.

        It gets one micro-batch through the user's loop and forgets what came of it: kernels are chosen, allocators
        and loader processes are warm when it enters.
        """
        if self.participation.has_state or self._source is None:
            return
        self._source.assign(range(1), 0, 0)
        batch = self._source.fetch(0, 0, 0)
        self.update.begin(range(1))
        yield from self._present(batch, 0)
        self.update.abandon()

    def _fetch(self, epoch: int, epoch_step: int, nodes: range) -> MicroBatch:
        source = self._source
        assert source is not None
        if not self._peeked:
            return source.fetch(epoch, epoch_step, nodes.start, len(nodes))
        peeked = [self._peeked.pop((epoch, epoch_step, node), None) for node in nodes]
        return fuse([at or source.fetch(epoch, epoch_step, node) for node, at in zip(nodes, peeked, strict=True)])

    def _peek(self) -> bool:
        """Whether this worker has samples for a further step of the epoch; streams must be read to know."""
        epoch, epoch_step = self.training.position
        if self._steps_per_epoch is not None:
            return epoch_step + 1 < self._steps_per_epoch
        carried = self.participation.carried
        batches = [self._fetch(epoch, epoch_step + 1, range(node, node + 1)) for node in carried]
        self._peeked = {(epoch, epoch_step + 1, batch.virtual_node): batch for batch in batches}
        return any(batch.size for batch in batches)

    def _load_as_needed(self) -> None:
        """Load the coming steps in other chunks, if other virtual nodes are now put together."""
        width = self._require_fusing().width
        if width != self._loaded_width and self._steps_per_epoch is not None and not self._is_over():
            assert self._source is not None
            self._source.assign(self.participation.carried, *self.training.position, width)
            self._loaded_width = width

    def _wait_while_held(self) -> None:
        session, completed = self._session, self.training.completed_steps
        if session is None or session.link.hold is None or completed < session.link.hold:
            return
        self.reporter.progress(now=True)
        self._stopwatch.hold(session.await_hold(completed))
        self._pace.interrupt()

    def _commit(self, number: int, outcome: Outcome) -> None:
        """Apply a complete exchange and do all that belongs between two steps."""
        training, session, before = self.training, self._session, self.training.members
        # An optimizer may draw at random, and so may the user's code after the step: the same on all workers.
        seed_virtual_node(self._options.seed, number, self.virtual_nodes)
        training.commit(outcome, len(self.participation.ranges))
        self._load_as_needed()
        generation = self._generation
        now = time.monotonic()
        change = self._stopwatch.commit(now, number, before, generation)
        self._pace.commit(now)
        if session is not None:
            session.facts.step = number
            if self._audit is not None:
                self._audit.committed(generation, number)
            if change is not None:
                session.remember(change)
            self.participation.note_offers(head.offer for head in outcome.heads)
            self.reporter.progress(now=self._is_over())
            self.reporter.pace(self._pace.estimate)
            session.tidy()
        if self.update.shards is not None and self._session is not None:
            self._save_together(any(head.saves for head in outcome.heads))
        elif self.leader and self._keeper is not None:
            self._keeper.save_if_due(training)

    def _save_together(self, due: bool) -> None:
        """The state of a sharded optimizer is brought together for a checkpoint, if one is ``due``."""
        if not due:
            return
        part = self.participation
        try:
            part.complete_leader()
        except CommunicatorBroken as error:
            part.recover(error)  # the next checkpoint that is due tries again
            return
        if self.leader and self._keeper is not None:
            self._keeper.save_if_due(self.training)
        part.keep_share()

    # --- callbacks ----------------------------------------------------------------------------------------------------

    def _on_entry(self) -> None:
        """This worker carries other virtual nodes, or begins again from where the others are."""
        self._peeked.clear()
        self._require_fusing().carry(self.participation.carried)
        if self._source is not None and not self._is_over():
            self._loaded_width = self._require_fusing().width
            self._source.assign(self.participation.carried, *self.training.position, self._loaded_width)
        self._pace.enter()
        self.reporter.entered()

    def _tell_checkpoint(self, kind: Literal["checkpoint", "checkpoint-failed", "warning"], text: str) -> None:
        assert self._session is not None
        self._session.link.send(m.Note(kind, text[:4_000]))

    # --- evaluations --------------------------------------------------------------------------------------------------

    @property
    def seed(self) -> int:
        """The seed of the job."""
        return self._options.seed

    def begin_evaluation(self) -> None:
        """Refuse an evaluation where a joiner could not take part in it; tell that one begins.

        Raises:
            VirtualFlowError: it is called before a step's micro-batches.
        """
        if self._open_step is not None and not self._open_step.complete:
            raise VirtualFlowError("call vf.evaluate after the micro-batches of a step, or after the last step")
        if not self.participation.has_state:
            raise VirtualFlowError("call vf.evaluate after the first step: a worker that joins later cannot repeat it")
        self.reporter.phase("evaluating")

    def commit_evaluation(self, blocks: list[Tensor], heads: Sequence[Head]) -> None:
        """An exchange of an evaluation is complete; members that drain leave now."""
        self.training.evaluated = blocks
        self.training.exchanges += 1
        self.participation.note_offers(head.offer for head in heads)
        self.participation.switch_if_agreed()

    def end_evaluation(self) -> None:
        """The evaluation is over: joiners may come."""
        self.seed_between_steps()
        self.reporter.phase("training")


def active_run() -> Run | None:
    """The run whose ``with`` block this process is in."""
    return _active[0] if _active else None


show_errors_plainly()
