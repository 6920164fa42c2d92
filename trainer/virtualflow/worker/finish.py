"""The end of a training: what its workers do together when the last step is made.

Each of these is an exchange like a step's: counted, and repeated with others if somebody is lost meanwhile.
"""

from __future__ import annotations

from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.protocol import messages as m
from virtualflow.step import Kind, read_headers
from virtualflow.worker.membership import Membership
from virtualflow.worker.reporter import report_failure
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.tracking import Tracking
from virtualflow.worker.train_state import Training


def complete_leader(membership: Membership, training: Training) -> None:
    """Let whoever is the leader have the whole state of a sharded optimizer, from now on."""
    shards = training.update.shards
    if shards is None or shards.finishing:
        return
    shards.finishing, number = True, training.exchanges + 1
    training.arrive()
    while training.exchanges < number:
        try:
            membership.complete_leader()
        except CommunicatorBroken as error:
            membership.recover(error)
        else:
            training.complete_exchange(None)


def agree_on_end(
    session: AnySession, membership: Membership, training: Training, trained: bool, tracking: Tracking
) -> None:
    """See that all workers are at the end; this one has ``trained`` to it, or left the loop before.

    Whoever leads then has written all steps to the trackers before.

    Raises:
        VirtualFlowError: one still trains or evaluates, which only the leader was told to do.
    """
    number = training.exchanges + 1
    training.arrive()
    while training.exchanges < number:
        tracking.flush(now=True)
        form = training.update.sync.header_format(session.state.ranges)
        header = form.write(form.tell(Kind.FINISH, number, m.NO_GENERATION))
        try:
            read_headers(form, membership.communicator.all_gather(header), Kind.FINISH, number)
        except CommunicatorBroken as error:
            membership.recover(error)
        except VirtualFlowError as found:
            early = VirtualFlowError(
                f"this worker left the loop after step {training.completed_steps}, and others go on; end the training "
                "by steps= or step.number: a counter of the script's own begins anew in a joiner"
            )
            told = found if trained else early
            report_failure(session, told)
            raise told from None
        else:
            training.complete_exchange(None)
