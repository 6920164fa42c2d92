"""What workers do together for a checkpoint, and at the end of a training.

The leader writes checkpoints, when the script's code behind a step has run: whoever begins from one will not run it. Of
a sharded optimizer it needs the states of all for that; where parameters are divided, each worker writes its share.
Each exchange at the end is one like a step's: counted, and repeated with others if somebody is lost meanwhile.
"""

from __future__ import annotations

from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.state import Checkpointer
from virtualflow.step import HOW_TO_END, Kind, Reduced, read_headers
from virtualflow.worker.membership import Membership
from virtualflow.worker.reporter import report_failure
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.tracking import Tracking
from virtualflow.worker.train_state import Training

SAVING = "saving a checkpoint"


class Saving:
    """The checkpoints between the steps of one run."""

    def __init__(
        self, checkpointer: Checkpointer, session: AnySession, membership: Membership, training: Training
    ) -> None:
        self._checkpointer, self._session, self._membership = checkpointer, session, membership
        self._training, self._state = training, session.state
        self._alone = training.update.shards is None
        self.step_is_new = False
        """Whether a step was made since a checkpoint was thought of."""
        self._together_in: m.Generation | None = None
        """The generation in which a step was committed that a checkpoint is to follow which takes all."""

    def needs_all(self, number: int) -> bool:
        """Whether this worker writes a checkpoint after that step and needs others' help with it."""
        return not self._alone and self._state.leader and self._checkpointer.is_due(number)

    def commit(self, reduced: Reduced) -> None:
        if not self._alone:
            together = any(header.saves for header in reduced.headers)
            self._together_in = self._session.generation if together else None

    def save_if_due(self, *, over: bool) -> None:
        """Write a checkpoint; ``over``: no step follows."""
        step_is_new, self.step_is_new = self.step_is_new, False
        together_in, self._together_in = self._together_in, None
        if self._alone:
            if step_is_new and self._state.leader:
                self._session.activity.mark(SAVING, self._training.completed_steps)
                self._checkpointer.save_if_due(self._training)
                if len(self._state.ranges) == 1 and not over:
                    self._checkpointer.copy_if_due(self._training, self._session.generation)
        elif together_in == self._session.generation:
            self._save_together()

    def _save_together(self) -> None:
        self._session.activity.mark(SAVING, self._training.completed_steps)
        try:
            if self._training.update.sharded is not None:
                self._membership.save_shares()
                return
            self._membership.complete_leader()
        except CommunicatorBroken as error:
            self._membership.recover(error)  # the next checkpoint that is due tries again
            return
        if self._state.leader:
            self._checkpointer.save_if_due(self._training)
        self._membership.keep_share()


def complete_leader(membership: Membership, training: Training, *, saves: bool = False) -> None:
    """Let whoever is the leader have the whole state of a sharded optimizer, from now on.

    Args:
        saves: whether all write a checkpoint where nobody can have the whole, since parameters are divided.
    """
    shards = training.update.shards
    if shards is None or shards.finishing:
        return
    shards.finishing, number = True, training.exchanges + 1
    training.arrive()
    while training.exchanges < number:
        try:
            membership.complete_leader()
            if saves and training.update.sharded is not None:
                membership.save_final()
        except CommunicatorBroken as error:
            membership.recover(error)
        else:
            training.complete_exchange(None)


def agree_on_end(
    session: AnySession, membership: Membership, training: Training, trained: bool, tracking: Tracking | None
) -> None:
    """See that all workers are at the end; this one has ``trained`` to it, or left the loop before.

    Whoever leads then has written all steps to the trackers before.

    Raises:
        VirtualFlowError: one still trains or evaluates, which only the leader was told to do.
    """
    number = training.exchanges + 1
    training.arrive()
    while training.exchanges < number:
        if tracking is not None:
            tracking.flush(now=True)
        form = training.update.sync.header_format(session.state.ranges)
        header = form.write(form.tell(Kind.FINISH, number, m.NO_GENERATION))
        try:
            read_headers(form, membership.communicator.all_gather(header), Kind.FINISH, number)
        except CommunicatorBroken as error:
            membership.recover(error)
        except VirtualFlowError as found:
            early = VirtualFlowError(
                f"this worker left the loop after step {training.completed_steps}, and others go on; {HOW_TO_END}"
            )
            told = found if trained else early
            report_failure(session, told)
            raise told from None
        else:
            training.complete_exchange(None)
