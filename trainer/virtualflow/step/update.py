"""One optimizer update of the whole job, as one worker sees it: contribute, synchronize, apply.

Coordinates the two halves: ``gradient_sync`` collects and reduces, ``optimizer_step`` applies when the whole reduced
gradient has arrived. Until then nothing of the model, the optimizer or the scheduler has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from virtualflow.device import device_of, has_spare_processor
from virtualflow.protocol import messages as m
from virtualflow.reduction import Choose, Exchange, Landing, Reducer, Row, Summation, choose_ways
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.step.backward_cut import BackwardCut
from virtualflow.step.gradient_sync import GradientSync, Reduced
from virtualflow.step.header import Schema
from virtualflow.step.optimizer_step import OptimizerOptions, OptimizerStep
from virtualflow.step.sharded_parameters import ShardedParameters
from virtualflow.step.sliced_values import SlicedValues
from virtualflow.step.spot_checker import SpotChecker
from virtualflow.step.state_watch import StateWatch, StateWatchSettings
from virtualflow.transport import Collectives, Communicator, open_groups


class Update:
    """What a worker keeps for the sake of its updates.

    Args:
        watch: how often states are compared; ``None``: never.
        cut: lets backward passes end early; ``None``: all are whole.
        sharded: makes what gathers parameters of which each worker keeps a share; ``None``: each keeps all.
    """

    def __init__(
        self,
        model: nn.Module,
        options: OptimizerOptions,
        summation: Summation,
        *,
        micro_batch: int,
        reduction: ReductionSettings,
        watch: StateWatchSettings | None = None,
        spot_checker: SpotChecker | None = None,
        choose: Choose = choose_ways,
        cut: BackwardCut | None = None,
        sums: Sequence[str] = (),
        sharded: Callable[[SlicedValues, Row], ShardedParameters] | None = None,
    ) -> None:
        landing = None if options.host is None else Landing(options.host, len(list(model.parameters())))
        self.reducer = Reducer(summation, reduction, choose, landing)
        self.sync = GradientSync(model, summation, micro_batch, reduction, self.reducer, sums)
        """Takes what each virtual node has left in the model."""
        self.optimizer_step = OptimizerStep(model, options, reduction)
        self.watch: StateWatch | None = None
        if watch is not None:
            self.watch = StateWatch(model, options.optimizer, shares=self.optimizer_step.shards, settings=watch)
        self.spot_checker = spot_checker
        """Compares the gradients of one virtual node with those that another worker came to."""
        self.cut = self.sync.cut = cut
        self.sync.listen(self.watch, spot_checker)
        self.shards = self.optimizer_step.shards
        self.sharded: ShardedParameters | None = None
        """Gathers parameters that are divided; ``None``: every worker has all of them."""
        if sharded is not None:
            assert self.shards is not None
            assert self.shards.sliced is not None
            self.sharded = self.sync.sharded = sharded(self.shards.sliced, self.shards.row)
        self.contributed = False
        """Whether this worker has taken part in a synchronization, so that it is no joiner any more."""
        self.pending: Reduced | None = None
        """A complete synchronization whose step may count already, though it has not been applied here (sharded)."""
        self._pending_schema = Schema()
        self._device = device_of(model)

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def begin(
        self, computes: Sequence[int], most: int = 1, *, resumes: bool = False, planned: int | None = None
    ) -> None:
        self.sync.begin(computes, most, resumes=resumes, planned=planned)
        self.optimizer_step.begin()

    def synchronize(
        self,
        communicator: Collectives,
        holdings: Sequence[Sequence[int]],
        number: int,
        offer: m.Generation,
        *,
        more: bool,
        saves: bool = False,
        repairs: bool = False,
    ) -> Reduced:
        """Reduce everything with the other workers.

        Args:
            number: of this synchronization, counted the same by all workers.
            offer: the generation that this worker could enter next, (0, 0) for none.
            more: whether this worker has samples for a further step of the epoch.
            saves: whether it needs the whole state after this step.
            repairs: whether some of the virtual nodes were kept from an aborted attempt.

        Raises:
            AttemptSpoiled: it is to be repeated by all.
            Diverged: the states were different before it.
            Doubted: two workers came to different gradients of one virtual node.
            VirtualFlowError: the workers do not run the same code.
        """
        self.contributed = True
        reduced = self.sync.synchronize(
            communicator,
            holdings,
            number,
            offer,
            more=more,
            saves=saves,
            repairs=repairs,
            portion=self.optimizer_step.portion,
        )
        if self.shards is not None and communicator.size > 1:
            self.pending, self._pending_schema = reduced, self.sync.schema
            self.shards.prepare(reduced.gradients, reduced.present)
            self.shards.decide(communicator)
            self.shards.step()
            if self.sharded is None:
                self.shards.spread(communicator)
            else:
                self.sharded.move_on(number)
        return reduced

    def abandon(self, *, keep: bool = False) -> None:
        # What is under way ends before anything is put back.
        self.sync.abandon(keep=keep)
        if self.optimizer_step.in_portions is not None:
            self.optimizer_step.undo()

    # --- the update ---------------------------------------------------------------------------------------------------

    def apply(self, reduced: Reduced, epoch_ends: bool) -> None:
        """Apply a complete synchronization: clip, optimizer, scaler, buffers, scheduler."""
        if reduced is self.pending:
            self.forget_pending()
        else:
            self.optimizer_step.step(reduced.gradients)
        self.optimizer_step.commit(reduced.gradients)
        self.sync.commit(reduced.buffers, reduced.switched)
        self.optimizer_step.schedule(epoch_ends)

    def complete_pending(self, norm: float | None) -> Reduced:
        """The step that is pending counts, as others know: step this worker's share; it is to be committed."""
        assert self.pending is not None
        assert self.shards is not None
        self.shards.step(norm)
        self.sync.schema = self._pending_schema
        return self.pending

    def forget_pending(self) -> None:
        self.pending = None
        if self.shards is not None:
            self.shards.settle()

    # --- a life -------------------------------------------------------------------------------------------------------

    def agree(self, communicator: Communicator, wish: Exchange, holdings: Sequence[Sequence[int]]) -> None:
        """A generation is about to begin: settle with its members what schedules of it follow from."""
        spare = communicator.size > 1 and has_spare_processor(self._device, communicator.size)
        backend = wish.backend if communicator.size > 1 else None
        groups = None if backend is None else open_groups(communicator, backend, self._device)
        self.reducer.agree(communicator, wish, holdings, self.sync.templates, spare=spare, groups=groups)

    def enter(self) -> None:
        self.sync.enter(None if self.shards is None else self.shards.shares.portions)

    def close(self) -> None:
        if self.sharded is not None:
            self.sharded.close()
        self.sync.close()
        self.optimizer_step.undo()
