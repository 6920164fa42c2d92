"""The loop over the steps: what stands between two steps, and the attempts at one.

Between two steps stands everything that the user does not see: the synchronization and the update (``update``), the
membership, the state that a joiner gets, checkpoints and reports. An attempt that fails is repeated inside the inner
loop: after it, the step is committed, and code that follows runs exactly once a step. What may be on or off takes part
by hooks, in the order of ``parts``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from virtualflow.data import ALL, MicroBatch, read_generators, seed_virtual_node
from virtualflow.device import device_of
from virtualflow.errors import CommunicatorBroken, ConfigurationError, NonFiniteMetric, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.protocol.wording import counted
from virtualflow.reduction import AttemptSpoiled
from virtualflow.state import optimizers_of
from virtualflow.step import (
    LOOKS_AHEAD,
    Attempt,
    Diverged,
    Doubted,
    Reduced,
    Repetition,
    Told,
    copy_data,
)
from virtualflow.worker.divergence import SpotChecking, end_by_divergence
from virtualflow.worker.process import WeightsBeside, check_left_behind
from virtualflow.worker.reporter import Cautions
from virtualflow.worker.resuming import check_schedule
from virtualflow.worker.saving import SAVING, Saving, complete_leader
from virtualflow.worker.setup import Context
from virtualflow.worker.step import Step, forget_cached_weights, profiled, read_weight, span

if TYPE_CHECKING:
    from virtualflow.worker.layers import LayeredAttempts
    from virtualflow.worker.profiling import Profiling

_LOOKS, _MORE_LOOKS = 8, 16
"""How often the first micro-batch without a gradient is given again, and how many of the others are, once each."""

_ANOTHER_PASS = (
    'the script goes through its run again, in which no step is left: "for step in run" goes through the steps of all '
    "epochs; leave out the loop around it, and use step.epoch and step.ends_epoch"
)
_EARLY_DRAWS = (
    "the script draws random numbers before the micro-batches of a step, and {worker} drew others for its first one, "
    "as nobody had told the coordinator of that; read step.number before they are drawn, or draw them in the loop over "
    "the micro-batches"
)
_FIRST_STEPS = 3
"""Of a worker, in which it looks for early draws."""
BETWEEN = "running the script's code after the inner loop"
_NOTHING = nullcontext()


class Loop:
    """The steps of one run."""

    def __init__(self, context: Context, look: Callable[[], None]) -> None:
        self.context = context
        self._look = look
        """At what the script may have changed since the last step."""
        self.trained = False
        """Whether this worker has seen the last step."""
        self._passes = 0
        """How often the script has begun to go through the run."""
        self._predictions = "", 0
        self._parts, self._guard, self._sync = context.parts, context.guard, context.update.sync
        self._state = context.session.state
        self._activity = context.session.activity
        self._seed = context.request.options.seed
        self._weight = context.request.options.weight
        self._virtual_nodes = context.request.virtual_nodes
        self._micro_batch = context.request.micro_batch
        self.told = Told()
        """What the script has told of the present virtual node."""
        self._open_step: Step | None = None
        checker = context.update.spot_checker
        self._spot_checking = None if checker is None else SpotChecking(checker, context, self._present)
        self._layers: LayeredAttempts | None = None
        if context.layers is not None:
            from virtualflow.worker.layers import LayeredAttempts

            self._layers = LayeredAttempts(context, *context.layers, self._listen)
        self.layer_major = self._layers is not None
        """Whether all virtual nodes are computed together, block by block."""
        divided = context.update.sharded is not None
        proves = context.request.bitwise and context.session.coordinated and not divided
        self._repetition = Repetition(context.request.model) if proves else None
        """Computes two virtual nodes twice, once in a training."""
        self._cautions = Cautions(context.session)
        self._weights_beside: WeightsBeside | None = None
        if proves or (context.checkpointer.writes and not divided):
            self._weights_beside = WeightsBeside(context.request.model, context.training.known)
        self._looks, self._more_looks = _LOOKS, _MORE_LOOKS
        self._saving: Saving | None = None
        # For a sharded optimizer's checkpoint all are needed, whoever writes it.
        if context.checkpointer.writes or context.update.shards is not None:
            self._saving = Saving(context.checkpointer, context.session, context.membership, context.training)
        self._undrawn: tuple[object, ...] | None = None
        """Where the random streams were at the beginning of the present step, while early draws are looked for."""
        self._stream = (0, 0)
        """What the random streams of the script's present code follow from, beside the seed."""
        device = device_of(context.request.model)
        waits_for_kernels = context.session.coordinated or context.turns is not None
        self._kernels_on = device if device.type == "cuda" and waits_for_kernels else None
        self._copies_beside = context.loading.copies_beside

    # --- for the user's code ------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        context = self.context
        self._passes += 1
        if self.trained:
            # A script that breaks off at each epoch's end asks more often, and rightly.
            if self._passes == 2 and self._state.leader:
                context.session.note("warning", _ANOTHER_PASS)
            return
        check_left_behind(context.training.knows, optimizers_of(context.training.optimizer))
        if self._state.running:
            self._repetition = None  # others have proved it
        if not self._state.running or self._state.draws_early:
            context.membership.join()
        if not self._state.running:
            self._look_ahead()
        looks = _FIRST_STEPS if context.session.coordinated and context.request.bitwise else 0
        while not self._state.has_state or not context.training.is_over:
            self._between_steps()
            step = self._open_step = Step(self)
            if self._state.has_state:
                self._seed_before_step()
            self._undrawn = read_generators() if looks and not self._state.draws_early else None
            looks = max(0, looks - 1)
            self._guard.place = "between steps"
            try:
                yield step
            finally:
                self._guard.place = "library"
            if not step._complete:
                raise VirtualFlowError(
                    "a step was left before its end; iterate over all its micro-batches: for batch in step: ..."
                )
        self.trained = True
        context.training.arrive()
        for after in self._parts.after_script:
            after(leaves=False)
        complete_leader(context.membership, context.training, saves=True)
        if self._state.leader and context.update.sharded is None:
            self._activity.mark(SAVING, context.training.completed_steps)
            context.checkpointer.save_final(context.training)
        self._activity.mark(BETWEEN, context.training.completed_steps)
        context.reporter.progress(now=True)

    def _look_ahead(self) -> None:
        context, done = self.context, self.context.training.completed_steps
        options, epoch = context.request.options, context.training.position[0]
        if context.training.is_over:
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
        if self._weights_beside is not None:
            found = self._weights_beside.look(context.training.completed_steps)
            if found is not None:
                self._weights_beside = None
                context.session.note("warning", found)
        self._guard.check_after_step()
        self._guard.look_at_gradients()
        context.training.arrive()
        if self._parts.after_script and self._state.has_state:
            leaves = context.session.stopping or context.membership.agreed is not None
            for after in self._parts.after_script:
                after(leaves=leaves)
        self.save_if_due()
        if context.session.stopping:
            context.membership.save_final()
            context.session.leave(m.NO_GENERATION)
        if context.membership.agreed is not None:
            context.membership.switch()
        if self._state.has_state:
            self._guard.between()

    def save_if_due(self) -> None:
        if self._saving is not None:
            self._saving.save_if_due(over=self.context.training.is_over)

    def join(self) -> tuple[int, int]:
        self._look_for_draws()
        enters = not self._state.has_state
        self.context.membership.join()
        if enters:
            self._seed_before_step()
        return self.context.training.completed_steps + 1, self.context.training.position[0]

    def name_prediction(self) -> str:
        """The same when a job is resumed in front of it, so exchanges do not count: a checkpoint may take some."""
        training, (last, number) = self.context.training, self._predictions
        place = f"{training.id}-{training.completed_steps}{'-end' if self.trained else ''}"
        self._predictions = place, number + 1 if place == last else 1
        return f"{place}-{self._predictions[1]}"

    @property
    def between_steps(self) -> bool:
        return self._open_step is not None and self._open_step._complete

    @property
    def inside_step(self) -> bool:
        """Whether the script has taken a step from the run and not run through its inner loop."""
        return self._open_step is not None and not self._open_step._complete

    def _listen(self, data: Any) -> Told:
        self.told = Told()
        if self._weight is not None:
            self.weigh(read_weight(self._weight(data)))
        return self.told

    def weigh(self, weight: float) -> None:
        self.told.weight = weight
        self._sync.weigh(weight)

    def warm_up(self) -> Iterator[Any]:
        """Let a joiner's first forward and backward pass happen before anybody waits for it.

        It gets one micro-batch through the user's loop and forgets what came of it: kernels are chosen, allocators
        and loader processes are warm when it enters.
        """
        self._look_for_draws()
        if self._state.has_state:
            return
        self._activity.mark("warming up", 0)
        attempt = Attempt(0, batch=self.context.loading.first())
        self.context.update.begin(range(1))
        try:
            if self._layers is None:
                yield from self._present(attempt)
            else:
                yield from self._layers.warm_up(attempt)
        finally:
            self._guard.place = "between steps"
        self._abandon()

    def _look_for_draws(self) -> None:
        """Whether the script has drawn random numbers since it got the step, which a joiner has not joined yet."""
        undrawn, self._undrawn = self._undrawn, None
        if undrawn is None or undrawn == read_generators():
            return
        self._state.draws_early = True
        if self._state.has_state:
            self.context.reporter.progress(now=True)
        else:
            self.context.session.note("warning", _EARLY_DRAWS.format(worker=self.context.session.worker))

    def _abandon(self) -> None:
        self.context.update.abandon()
        for abandon in self._parts.abandon:
            abandon()

    def _repeat(self) -> None:
        """Begin an attempt anew that has to be made in another way."""
        self._abandon()
        self.context.loading.enter(self._state.assigned)

    def make(self, number: int) -> Iterator[Any]:
        """Attempt the step ``number`` until it is committed here or brought by a donor."""
        context, training, membership = self.context, self.context.training, self.context.membership
        self._guard.place = "library"
        try:
            if context.profiling is not None:
                yield from self._profile(context.profiling)
            while training.completed_steps < number and not training.is_over:
                try:
                    self._wait_while_held()
                    attempt = yield from self._attempt(number)
                    reduced = yield from self._synchronize(attempt)
                except CommunicatorBroken as error:
                    context.stopwatch.fail()
                    generation = context.session.generation
                    if membership.recover(error):
                        for counts in self._parts.counted:
                            counts(generation, number)
                except Diverged as error:
                    members = membership.communicator.plan.members
                    raise end_by_divergence(error.found, members, context.checkpointer) from None
                except AttemptSpoiled:
                    self._repeat()
                else:
                    with span("commit") if profiled() else _NOTHING:
                        self._commit(attempt, reduced)
            if self._saving is not None:
                self._saving.step_is_new = True
            if self._guard.sharded:
                self._guard.between()
            self._guard.after_update()
            self.seed_between_steps()
            self._activity.mark(BETWEEN, number)
        finally:
            self._guard.place = "between steps"

    def _profile(self, profiling: Profiling) -> Iterator[Any]:
        """Measure instead of training, and end the script; its code behind the inner loop sees no step."""
        yield from profiling.measure()
        training = self.context.training
        while profiling.wants_step and not training.is_over:
            try:
                attempt = yield from self._attempt(training.completed_steps + 1)
                with profiling.step():
                    self._commit(attempt, (yield from self._synchronize(attempt)))
            except AttemptSpoiled:
                self._repeat()
        profiling.finish()

    @property
    def metrics(self) -> dict[str, float]:
        return self.context.training.metrics

    @property
    def epoch_is_over(self) -> bool:
        return self.context.training.position[1] == 0

    def check_finite(self) -> None:
        """Tell of a metric that is not finite; end the training where that is wanted, before its next checkpoint."""
        context, found = self.context, self.context.training.non_finite
        if found is None:
            return
        context.reporter.non_finite()
        if context.request.environment.on_non_finite == "Stop":
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
            if context.pacing is not None:
                context.pacing.pace.interrupt()

    def _attempt(self, number: int) -> Generator[Any, None, Attempt]:
        """Compute what this worker contributes to the step."""
        context, state = self.context, self._state
        context.membership.check()
        context.stopwatch.attempt(number)
        if self._repetition is not None and self._repetition.under_way:
            self._repetition.forget()
            self._repetition = None
        computes, holdings, repairs = state.computes, state.holdings, state.repair is not None
        attempt = Attempt(
            number,
            computes,
            holdings,
            context.session.generation,
            context.training.position[0],
            repairs,
            portions=[range(node, node + 1) for node in computes],
            work=len(computes),
            timed=not repairs,
        )
        samples = context.loading.samples()
        context.update.begin(computes, max(map(len, holdings)), resumes=repairs, planned=samples)
        for begin in self._parts.begin:
            begin(attempt)
        if self._spot_checking is not None:
            yield from self._spot_checking.begin(attempt)
        layers = self._layers
        yield from self._one_by_one(attempt, samples) if layers is None else layers.attempt(attempt, samples)
        for computed in self._parts.computed:
            computed(attempt)
        if len(holdings) > 1:
            context.loading.read_ahead()
        return attempt

    def _one_by_one(self, attempt: Attempt, of_step: int | None) -> Iterator[Any]:
        """Give this worker's micro-batches to the script, and contribute what comes of each."""
        context, sync, parts, guard = self.context, self._sync, self._parts, self._guard
        mark, number = self._activity.mark, attempt.number
        for nodes in attempt.portions:
            context.membership.check()
            mark("loading samples", number)
            batch = attempt.batch = context.loading.fetch(nodes)
            kept, width, last = batch.kept, len(nodes), nodes.stop == attempt.computes[-1] + 1
            if batch.size < self._micro_batch * width:
                attempt.timed = False
            for before in parts.before_node:
                before(attempt)
            if self._repetition is not None and kept:
                yield from self._compute_once_more(attempt, batch, self._repetition)
            if attempt.late:
                sync.begin_late()
            elif last:
                sync.expect_last(context.membership.communicator, attempt.holdings, kept, of_step, width)
            else:
                sync.expect(kept, width)
            yield from self._present(attempt)
            if self._looks and kept and not sync.begun:
                yield from self._look_again(attempt, nodes)
            if self._copies_beside:
                context.loading.send_ahead(nodes)
            for after in parts.after_node:
                after(attempt)
            if guard.looks:
                guard.check()
            if self._repetition is not None and self._repetition.under_way:
                self._repetition.compare(attempt.told.metrics)
                self._repetition = None if self._repetition.is_over else self._repetition
            if last and self._kernels_on is not None:
                # Kernels run on behind the script. The exchange needs their results at once: this is no other wait.
                torch.cuda.current_stream(self._kernels_on).synchronize()
            told = attempt.told
            if batch.count is not ALL:
                self._cautions.look_at(batch, told)
            sync.take(kept if told.weight is None else batch.size, told.metrics, width, told.weight)

    def _compute_once_more(self, attempt: Attempt, batch: MicroBatch, repetition: Repetition) -> Iterator[Any]:
        """Load and compute a virtual node an additional time before.

        A joiner runs what others have run so.
        """
        attempt.timed = False
        self.context.loading.check_reading(self.context.request.dataset, batch)
        attempt.batch = replace(batch, data=copy_data(batch.data))
        yield from self._present(attempt)
        attempt.batch = batch
        self._guard.check(look=True)
        repetition.note(attempt.told.metrics)
        self._sync.discard()

    def _look_again(self, attempt: Attempt, nodes: range) -> Iterator[Any]:
        """No gradient has come of a micro-batch: give it again. A script that skips it will skip it again.

        Raises:
            ConfigurationError: one came, since the script has computed another micro-batch than the one in hand.
        """
        for _ in range(self._looks):
            attempt.timed = False
            self._sync.discard()
            attempt.batch = self.context.loading.fetch(nodes)
            yield from self._present(attempt)
            if self._sync.begun:
                raise ConfigurationError(LOOKS_AHEAD)
        self._looks, self._more_looks = min(1, self._more_looks), self._more_looks - 1

    def _present(self, attempt: Attempt) -> Iterator[Any]:
        """Give the micro-batch in hand to the user's code, with the random streams of its (first) virtual node."""
        self.told = attempt.told = Told()
        batch = attempt.batch
        if batch is None or not batch.size:
            return
        for before in self._parts.before_pass:
            before(attempt)
        self._activity.mark("computing" if attempt.number else "warming up", attempt.number)
        self._stream = attempt.number, batch.virtual_node
        seed_virtual_node(self._seed, attempt.number, batch.virtual_node)
        forget_cached_weights()
        self._guard.place = "inner loop"
        try:
            with span("virtual node", batch.virtual_node) if profiled() else _NOTHING:
                if self._weight is not None and batch.kept:
                    self.weigh(read_weight(self._weight(batch.data)))
                yield batch.data
        finally:
            self._guard.place = "library"
        for after in self._parts.after_pass:
            after(attempt)

    def seed_between_steps(self) -> None:
        """Let random numbers of the user's code after a step or an evaluation be the same on all workers."""
        self._stream = self.context.training.exchanges, self._virtual_nodes + 1
        self.seed_script()

    def _seed_before_step(self) -> None:
        """The same for its code before the micro-batches of a step, whatever was drawn after the last one."""
        self._stream = self.context.training.exchanges, self._virtual_nodes + 2
        self.seed_script()

    def seed_script(self) -> None:
        """Let the random streams of the script's present code begin, again where something has drawn from them."""
        seed_virtual_node(self._seed, *self._stream)

    # --- its end ------------------------------------------------------------------------------------------------------

    def _synchronize(self, attempt: Attempt) -> Generator[Any, None, Reduced]:
        """Reduce with the others what the attempt has come to."""
        context, number = self.context, attempt.number
        self._activity.mark("synchronizing", number)
        offer = m.NO_GENERATION if number == context.total_steps else context.session.offer(evaluating=False)
        self._state.lease.begin()
        try:
            with span("exchange") if profiled() else _NOTHING:
                return context.update.synchronize(
                    context.membership.communicator,
                    attempt.holdings,
                    context.training.exchanges + 1,
                    offer,
                    more=context.loading.peek(self._state.assigned),
                    saves=self._saving is not None and self._saving.needs_all(number),
                    repairs=attempt.repairs,
                )
        except Doubted as error:
            doubted = error
        assert self._spot_checking is not None
        raise (yield from self._spot_checking.settle(attempt, doubted))

    def _commit(self, attempt: Attempt, reduced: Reduced) -> None:
        """Apply a complete exchange and do all that belongs between two steps."""
        context, training, session = self.context, self.context.training, self.context.session
        before, number = training.workers, attempt.number
        if len(attempt.holdings) > 1:
            self._state.lease.renew()
        # An optimizer may draw at random, and so may the user's code after the step: the same on all workers.
        seed_virtual_node(self._seed, number, self._virtual_nodes)
        with span("update") if profiled() else _NOTHING:
            training.commit(reduced, self._state.workers)
            forget_cached_weights()  # the script's code after the step sees the new ones
        self._state.repair = None
        if context.fusion is not None:
            context.loading.adjust(context.fusion.width)
        change = context.stopwatch.commit(time.monotonic(), number, before, session.generation)
        self._state.step = number
        self._activity.first, self._activity.slowest = False, context.stopwatch.slowest
        for counts in self._parts.counted:
            counts(session.generation, number)
        for commit in self._parts.commit:
            commit(attempt)
        if reduced.copied:
            self._cautions.tell_of_copied(reduced.copied)
        if reduced.averaged:
            self._cautions.tell_of_averaged(reduced.averaged)
        if change is not None:
            session.remember(change)
        context.membership.note_offers(header.offer for header in reduced.headers)
        self.check_finite()
        context.reporter.progress(now=context.training.is_over)
        session.tidy()
        if self._saving is not None:
            self._saving.commit(reduced)
