"""The loop over the steps: what stands between two steps, and the attempts at one.

Between two steps stands everything that the user does not see: the synchronization and the update (``update``), the
membership, the state that a joiner gets, checkpoints and reports. An attempt that fails is repeated inside the inner
loop: after it, the step is committed, and code that follows runs exactly once a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from virtualflow.data import MicroBatch, seed_virtual_node
from virtualflow.device import device_of
from virtualflow.errors import CommunicatorBroken, ConfigurationError, NonFiniteMetric, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.protocol.wording import counted
from virtualflow.reduction import AttemptSpoiled
from virtualflow.step import (
    LOOKS_AHEAD,
    Diverged,
    Doubted,
    Reduced,
    Repetition,
    StepHeader,
    copy_data,
    forget_cached_weights,
)
from virtualflow.worker.cautions import Cautions
from virtualflow.worker.divergence import end_by_divergence
from virtualflow.worker.explaining import write_explanation
from virtualflow.worker.finish import complete_leader
from virtualflow.worker.layers import LayeredAttempts
from virtualflow.worker.resuming import check_schedule
from virtualflow.worker.script import check_averages
from virtualflow.worker.setup import Context
from virtualflow.worker.spans import span
from virtualflow.worker.spot_checking import SpotChecking
from virtualflow.worker.step import Step, Told, read_weight

_LOOKS, _MORE_LOOKS = 8, 16
"""How often the first micro-batch without a gradient is given again, and how many of the others are, once each."""

BETWEEN = "running the script's code after the inner loop"
SAVING = "saving a checkpoint"


class Loop:
    """The steps of one run, made of the parts of its ``context``."""

    def __init__(self, context: Context, look: Callable[[], None]) -> None:
        self.context = context
        self._look = look
        """At what the script may have changed since the last step."""
        self.trained = False
        """Whether this worker has seen the last step."""
        self._state = context.session.state
        self._activity = context.session.activity
        self._seed = context.request.options.seed
        self._virtual_nodes = context.request.virtual_nodes
        self._micro_batch = context.request.micro_batch
        self._told = Told()
        """What the script has told of the present virtual node."""
        self._open_step: Step | None = None
        self._spot_checking = SpotChecking(context, self._present, lambda: self._told.weight)
        self._repetition = Repetition(context.request.model)
        self._layers = None if context.layers is None else LayeredAttempts(context, *context.layers, self._listen)
        self._unproven = context.request.bitwise and context.session.coordinated
        """Whether no virtual node was computed twice yet."""
        self._cautions = Cautions(context.session)
        self._looks, self._more_looks = _LOOKS, _MORE_LOOKS
        self._step_is_new = False
        """Whether a step was made since a checkpoint was thought of."""
        self._committed_in = m.NO_GENERATION
        self._saves_together = False
        """Whether a checkpoint that takes all is to follow the step that was committed in that generation."""
        self._stream = (0, 0)
        """What the random streams of the script's present code follow from, beside the seed."""
        device = device_of(context.request.model)
        waits_for_kernels = context.session.coordinated or context.turns.shared
        self._kernels_on = device if device.type == "cuda" and waits_for_kernels else None

    # --- for the user's code ------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield the steps that remain."""
        context = self.context
        check_averages(context.training.companions.knows)
        self._unproven = self._unproven and not self._state.running
        if not self._state.running:
            context.membership.join()
            self._look_ahead()
        while not self._state.has_state or not context.is_over:
            self._between_steps()
            step = self._open_step = Step(self)
            with context.guard.within("between steps"):
                yield step
            if not step.complete:
                raise VirtualFlowError(
                    "a step was left before its end; iterate over all its micro-batches: for batch in step: ..."
                )
        self.trained = True
        context.training.arrive()
        context.tracking.note()
        self._note_beginning()
        complete_leader(context.membership, context.training)
        if self._state.leader:
            self._activity.mark(SAVING, context.training.completed_steps)
            context.checkpointer.save_final(context.training)
        self._activity.mark(BETWEEN, context.training.completed_steps)
        context.reporter.progress(now=True)

    def _look_ahead(self) -> None:
        """The training begins here, perhaps from a checkpoint: see that it can go to its end.

        Raises:
            ConfigurationError: a schedule ends before.
        """
        context, done = self.context, self.context.training.completed_steps
        options, epoch = context.request.options, context.training.position[0]
        if context.is_over:
            if self._state.leader:
                context.session.note(
                    "info",
                    f"the training was complete before: its checkpoint has all {counted(done, 'step')}, and "
                    "nothing is left "
                    "to train; raise steps= or epochs= to go on, or use another checkpoint directory",
                )
        elif options.scheduler_interval == "step" and context.total_steps is not None:
            last = context.total_steps
            check_schedule(options.scheduler, last - done, last, "step", resumed=done > 0)
        elif options.scheduler_interval == "epoch" and options.epochs is not None and options.steps is None:
            check_schedule(options.scheduler, options.epochs - epoch, options.epochs, "epoch", resumed=done > 0)

    def _between_steps(self) -> None:
        """What happens between two steps, behind the user's code after the first: save, leave or enter a generation."""
        context = self.context
        self._look()
        context.guard.check_after_step()
        context.training.arrive()
        context.tracking.note()
        self._note_beginning()
        # Who leaves, or no longer leads behind this, hands over nothing that it could have written.
        context.tracking.flush(now=context.session.stopping or context.membership.switches)
        self.save_if_due()
        if context.session.stopping:
            context.checkpointer.save_final(context.training)
            context.session.leave(m.NO_GENERATION)
        context.membership.switch_if_agreed()
        if self._state.has_state:
            context.guard.between()

    def join(self) -> tuple[int, int]:
        """Become a member, if this worker is none yet; the number of the step to come, and its epoch."""
        self.context.membership.join()
        return self.context.training.completed_steps + 1, self.context.training.position[0]

    @property
    def between_steps(self) -> bool:
        """Whether the script has run through the latest step's inner loop."""
        return self._open_step is not None and self._open_step.complete

    @property
    def layer_major(self) -> bool:
        """Whether all virtual nodes are computed together, block by block."""
        return self._layers is not None

    def _listen(self, data: Any, *, weighs: bool = True) -> Told:
        """The script is about to compute a micro-batch: where to note what it tells of it."""
        self._told = Told()
        weight = self.context.request.options.weight
        if weight is not None and weighs:
            self.weigh(read_weight(weight(data)))
        return self._told

    def log_metrics(self, metrics: dict[str, float | Tensor]) -> None:
        """Note metrics of the present virtual node (``Step.log``)."""
        for name, value in metrics.items():
            self._told.metrics[name] = value.detach() if isinstance(value, Tensor) else float(value)

    def weigh(self, weight: float) -> None:
        """Note what the present virtual node counts by (``Step.weight``)."""
        self._told.weight = weight
        self.context.update.sync.weigh(weight)

    def warm_up(self) -> Iterator[Any]:
        """Let a joiner's first forward and backward pass happen before anybody waits for it.

        It gets one micro-batch through the user's loop and forgets what came of it: kernels are chosen, allocators
        and loader processes are warm when it enters.
        """
        if self._state.has_state:
            return
        self._activity.mark("warming up", 0)
        batch = self.context.loading.first()
        self.context.update.begin(range(1))
        with self.context.turns.within():
            self.context.turns.take(0, lambda: None)
            self._activity.mark("warming up", 0)
            yield from self._present(batch, 0) if self._layers is None else self._layers.warm_up(batch)
        self.context.update.abandon()

    def make(self, number: int) -> Iterator[Any]:
        """Attempt the step ``number`` until it is committed here or brought by a donor."""
        with self.context.guard.within("library"):
            yield from self._make(number)

    def _make(self, number: int) -> Iterator[Any]:
        context, training = self.context, self.context.training
        if context.profiling is not None:
            yield from context.profiling.measure()
        membership = context.membership
        context.tracking.begin(number)
        self._note_beginning()  # of one that has just joined
        while training.completed_steps < number and not context.is_over:
            try:
                self._wait_while_held()
                yield from self._attempt(number)
                if context.trace is not None and context.trace.repeats(number):
                    raise AttemptSpoiled
                reduced = yield from self._synchronize(number)
            except CommunicatorBroken as error:
                context.stopwatch.fail()
                generation = context.session.generation
                if membership.recover(error):
                    self._note_commit(generation, number)
            except Diverged as error:
                members = membership.communicator.plan.members
                raise end_by_divergence(error.found, members, context.checkpointer) from None
            except AttemptSpoiled:
                context.update.abandon()
                context.on_entry()
            else:
                with span("commit"):
                    self._commit(number, reduced)
        self._step_is_new = True
        context.guard.committed()
        self._seed_between_steps()
        self._activity.mark(BETWEEN, number)

    def _synchronize(self, number: int) -> Generator[Any, None, Reduced]:
        """Reduce with the others what the attempt has come to.

        Raises:
            VirtualFlowError: as ``Update.synchronize``; a member that was wrong is ``Convicted``.
        """
        context = self.context
        self._activity.mark("synchronizing", number)
        offer = m.NO_GENERATION if number == context.total_steps else context.session.offer(evaluating=False)
        self._state.lease.begin()
        try:
            with span("exchange"):
                return context.update.synchronize(
                    context.membership.communicator,
                    self._state.holdings,
                    context.training.exchanges + 1,
                    offer,
                    more=context.loading.peek(self._state.assigned),
                    saves=self._saves_after(number),
                    repairs=self._state.repair is not None,
                )
        except Doubted as error:
            doubted = error
        raise (yield from self._spot_checking.settle(number, doubted))

    @property
    def metrics(self) -> dict[str, float]:
        """The combined metrics of the last step."""
        return self.context.training.metrics

    def check_finite(self) -> None:
        """Tell of a metric that is not finite; end the training where that is wanted, before its next checkpoint.

        Raises:
            NonFiniteMetric: the job is to stop then.
        """
        context = self.context
        context.reporter.non_finite()
        found = context.training.non_finite
        if found is not None and context.request.environment.on_non_finite == "Stop":
            raise NonFiniteMetric(
                f"{found}, and the job is to stop then: lower the learning rate, clip gradients or look at the data; "
                "its checkpoints are from before"
            )

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def _wait_while_held(self) -> None:
        context, completed = self.context, self.context.training.completed_steps
        if context.session.held(completed):
            context.reporter.progress(now=True)
            context.stopwatch.hold(context.session.await_hold(completed))
            context.pace.interrupt()

    def _attempt(self, number: int) -> Iterator[Any]:
        context, state = self.context, self._state
        update, fusion, pace, computes = context.update, context.fusion, context.pace, state.computes
        context.membership.check()
        context.stopwatch.attempt(number)
        repairs, most = state.repair is not None, max(len(nodes) for nodes in state.holdings)
        context.guard.begin()
        self._repetition.forget()
        if update.cut is not None:
            update.cut.begin(number)
        compared = context.request.bitwise and len(state.ranges) > 1
        planned, watched = context.loading.samples(), number if compared else None
        update.begin(computes, most, resumes=repairs, watched=watched, planned=planned)
        work = len(computes) if update.cut is None else update.cut.work(computes, number)
        pace.begin(time.monotonic(), work)
        if fusion.exploring or repairs:
            pace.disregard()
        if state.repair is not None and context.audit is not None:
            context.audit.kept(context.session.generation, number, update.sync.kept)
        with context.turns.within():
            yield from self._spot_checking.begin(number)
            yield from self._one_by_one(number) if self._layers is None else self._layers.attempt(computes, number)
        context.guard.forget()  # also where nothing was left to compute
        fusion.end()
        if len(state.ranges) > 1:
            context.loading.read_ahead()

    def _one_by_one(self, number: int) -> Iterator[Any]:
        """Give this worker's micro-batches to the script, and contribute what comes of each."""
        context, state = self.context, self._state
        update, fusion, pace, computes = context.update, context.fusion, context.pace, state.computes
        for nodes in fusion.begin() if state.repair is None else [range(node, node + 1) for node in computes]:
            context.membership.check()
            self._activity.mark("loading samples", number)
            batch = context.loading.fetch(nodes)
            context.turns.take(number, context.membership.check)
            self._activity.mark("computing", number)
            if batch.size < self._micro_batch * len(nodes):
                pace.disregard()
            if context.audit is not None:
                for node, samples in batch.apart():
                    context.audit.computed(
                        context.session.generation, context.training.position[0], number, node, samples
                    )
            if context.trace is not None:
                context.trace.loaded(batch)
            if self._unproven and batch.kept:
                yield from self._compute_once_more(batch, number)
            last = nodes.stop == computes[-1] + 1
            if context.trace is not None:
                update.sync.begin_late()  # when its gradients have been read
            elif last:
                of_step, communicator = context.loading.samples(), context.membership.communicator
                update.sync.expect_last(communicator, state.holdings, batch.kept, of_step, len(nodes))
            else:
                update.sync.expect(batch.kept, len(nodes))
            yield from self._present(batch, number)
            if self._looks and batch.kept and not update.sync.begun:
                yield from self._look_again(nodes, number)
            context.loading.send_ahead(nodes)
            self._spot_checking.note(batch.virtual_node)  # before gradients are used up
            update.sync.computed()
            context.guard.check(last=last)
            if self._repetition.under_way:
                self._repetition.compare()
            if last:
                if self._kernels_on is not None:
                    # Kernels run on behind the script. The exchange needs their results at once: this is no other wait.
                    torch.cuda.current_stream(self._kernels_on).synchronize()
                pace.end(time.monotonic())
            if context.trace is not None:
                context.trace.computed(context.session.generation, number, batch.virtual_node, self._told)
            self._cautions.look_at(batch, self._told)
            holds = batch.kept if self._told.weight is None else batch.size
            update.sync.take(holds, self._told.metrics, len(nodes), self._told.weight)

    def _compute_once_more(self, batch: MicroBatch, number: int) -> Iterator[Any]:
        """Load and compute the first virtual node of all an additional time before.

        A joiner runs what others have run so.
        """
        self._unproven = False
        self.context.pace.disregard()
        self.context.loading.check_reading(self.context.request.dataset, batch)
        yield from self._present(replace(batch, data=copy_data(batch.data)), number)
        self.context.guard.check(look=True)
        self._repetition.note()
        self.context.update.sync.discard()

    def _look_again(self, nodes: range, number: int) -> Iterator[Any]:
        """No gradient has come of a micro-batch: give it again. A script that skips it will skip it again.

        Raises:
            ConfigurationError: one came, since the script has computed another micro-batch than the one in hand.
        """
        sync = self.context.update.sync
        for _ in range(self._looks):
            self.context.pace.disregard()
            sync.discard()
            yield from self._present(self.context.loading.fetch(nodes), number)
            if sync.begun:
                raise ConfigurationError(LOOKS_AHEAD)
        self._looks, self._more_looks = min(1, self._more_looks), self._more_looks - 1

    def _present(self, batch: MicroBatch, number: int) -> Iterator[Any]:
        """Give a micro-batch to the user's code, with the random streams of its (first) virtual node."""
        self._told = Told()
        if batch.size:
            self.context.fusion.present(batch)
            activations, cut = self.context.activations, self.context.update.cut
            if activations is not None:
                activations.begin()
            self._stream = number, batch.virtual_node
            self.seed_script()
            forget_cached_weights()
            ends = nullcontext(True) if cut is None else cut.within(batch.virtual_node, number)
            with span("virtual node", batch.virtual_node), self.context.guard.within("inner loop"), ends as whole:
                self._listen(batch.data, weighs=batch.kept > 0)
                yield batch.data
            if activations is not None and whole:  # a plan is for the longest
                activations.end(batch.size)

    def _seed_between_steps(self) -> None:
        """Let random numbers of the user's code after a step or an evaluation be the same on all workers."""
        self._stream = self.context.training.exchanges, self._virtual_nodes + 1
        self.seed_script()

    def seed_script(self) -> None:
        """Let the random streams of the script's present code begin, again where something has drawn from them."""
        seed_virtual_node(self._seed, *self._stream)

    # --- its end ------------------------------------------------------------------------------------------------------

    def _commit(self, number: int, reduced: Reduced) -> None:
        """Apply a complete exchange and do all that belongs between two steps."""
        context, training, session = self.context, self.context.training, self.context.session
        before = training.members
        if len(self._state.ranges) > 1:
            self._state.lease.renew()
        # An optimizer may draw at random, and so may the user's code after the step: the same on all workers.
        seed_virtual_node(self._seed, number, self._virtual_nodes)
        with span("update"):
            training.commit(reduced, len(self._state.ranges))
            forget_cached_weights()  # the script's code after the step sees the new ones
        self._state.repair = None
        context.loading.adjust(self._state.assigned)
        now = time.monotonic()
        change = context.stopwatch.commit(now, number, before, session.generation)
        context.pace.commit(now)
        self._state.step = number
        self._activity.first, self._activity.slowest = False, context.stopwatch.slowest
        self._note_commit(session.generation, number)
        self._cautions.tell_of_copied(reduced.copied)
        explained = context.request.environment.explain_out
        if explained is not None and self._state.leader:
            write_explanation(explained, context.request.model, context.update, number)
        if context.activations is not None:
            plan = context.activations.committed()
            if plan is not None:
                context.reporter.plan(plan)
        if change is not None:
            session.remember(change)
        context.membership.note_offers(header.offer for header in reduced.headers)
        self.check_finite()
        context.reporter.progress(now=context.is_over)
        context.reporter.pace(context.pace.estimate)
        session.tidy()
        self._committed_in = session.generation
        self._saves_together = any(header.saves for header in reduced.headers)

    def _note_beginning(self) -> None:
        """All code before the step to come has run."""
        if self.context.trace is not None and self._state.has_state:
            self.context.trace.began(self.context.training.completed_steps + 1)

    def _note_commit(self, generation: m.Generation, number: int) -> None:
        """The attempt at that step in that generation has counted."""
        if self.context.audit is not None:
            self.context.audit.committed(generation, number)
        if self.context.trace is not None:
            self.context.trace.committed(generation, number)

    def _saves_after(self, number: int) -> bool:
        """Whether this worker writes a checkpoint after the step ``number`` and needs others' help with it."""
        return (
            self.context.update.shards is not None and self._state.leader and self.context.checkpointer.is_due(number)
        )

    def save_if_due(self) -> None:
        """Write a checkpoint when the user's code after a step has run: whoever begins from it will not run it."""
        context, together = self.context, self._saves_together
        step_is_new, self._step_is_new, self._saves_together = self._step_is_new, False, False
        if context.update.shards is None:
            if step_is_new and self._state.leader:
                self._activity.mark(SAVING, context.training.completed_steps)
                context.checkpointer.save_if_due(context.training)
                if len(self._state.ranges) == 1 and not context.is_over:
                    context.checkpointer.copy_if_due(context.training, context.session.generation)
        elif together and self._committed_in == context.session.generation:
            self._save_together()

    def _save_together(self) -> None:
        """The state of a sharded optimizer is brought together for a checkpoint."""
        membership = self.context.membership
        try:
            membership.complete_leader()
        except CommunicatorBroken as error:
            membership.recover(error)  # the next checkpoint that is due tries again
            return
        if self._state.leader:
            self.context.checkpointer.save_if_due(self.context.training)
        membership.keep_share()

    # --- evaluations --------------------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Refuse an evaluation where a joiner could not take part in it; tell that one begins.

        Raises:
            VirtualFlowError: it is called before a step's micro-batches.
        """
        if self._open_step is not None and not self._open_step.complete:
            raise VirtualFlowError("call vf.evaluate after the micro-batches of a step, or after the last step")
        if not self._state.has_state:
            raise VirtualFlowError("call vf.evaluate after the first step: a worker that joins later cannot repeat it")
        self.context.reporter.phase("evaluating")

    def commit_evaluation(self, blocks: list[Tensor], headers: Sequence[StepHeader]) -> None:
        """An exchange of an evaluation is complete; members that drain leave now."""
        self.context.training.complete_exchange(blocks)
        self.context.membership.note_offers(header.offer for header in headers)
        self.context.membership.switch_if_agreed()

    def end_evaluation(self) -> None:
        """The evaluation is over: joiners may come."""
        self._seed_between_steps()
        self._activity.mark(BETWEEN, self.context.training.completed_steps)
        self.context.reporter.phase("training")
