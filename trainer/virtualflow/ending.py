"""The end of a training: what its workers do together when the last step is made.

Each of these is an exchange like a step's: counted, and repeated with others if somebody is lost meanwhile.
"""

from __future__ import annotations

from virtualflow.contribution import Kind, read_heads
from virtualflow.errors import CommunicatorBroken, VirtualFlowError
from virtualflow.participation import Participation
from virtualflow.reporter import report_failure
from virtualflow.session import NOTHING, Session
from virtualflow.training import Training


def complete_leader(part: Participation, training: Training) -> None:
    """Let whoever is the leader have the whole state of a sharded optimizer, from now on."""
    shards = training.update.shards
    if shards is None or shards.finishing:
        return
    shards.finishing, number = True, training.exchanges + 1
    while training.exchanges < number:
        try:
            part.complete_leader()
        except CommunicatorBroken as error:
            part.recover(error)
        else:
            training.exchanges, training.evaluated = number, None


def agree_on_end(session: Session | None, part: Participation, training: Training) -> None:
    """See that all workers are at the end.

    Raises:
        VirtualFlowError: one still trains or evaluates, which only the leader was told to do.
    """
    number = training.exchanges + 1
    while training.exchanges < number:
        form = training.update.head_format(part.ranges)
        head = form.write(form.tell(Kind.FINISH, number, 0, NOTHING, False, False, True, [], []))
        try:
            read_heads(form, part.communicator.all_gather(head), Kind.FINISH, number)
        except CommunicatorBroken as error:
            part.recover(error)
        except VirtualFlowError as error:
            report_failure(session, error)
            raise
        else:
            training.exchanges, training.evaluated = number, None
