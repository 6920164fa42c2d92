"""How the workers of a generation reach each other and the coordinator: the interface of the collectives, the
connections between workers behind it, and the one to the coordinator. It knows nothing of what is sent.
"""

from virtualflow.transport.activity import Activity
from virtualflow.transport.answers import Answers, Give, Take
from virtualflow.transport.communicator import Communicator
from virtualflow.transport.copy_client import CopyClient, CopyRefused
from virtualflow.transport.exchanger import Exchanger
from virtualflow.transport.interface import DONE, Collectives, Message, Pending, as_bytes, gather_bytes
from virtualflow.transport.key_agreement import Signer
from virtualflow.transport.link import Link
from virtualflow.transport.process_groups import GroupCollectives, find_obstacle, open_groups
from virtualflow.transport.turns import Turns

__all__ = [
    "DONE",
    "Activity",
    "Answers",
    "Collectives",
    "Communicator",
    "CopyClient",
    "CopyRefused",
    "Exchanger",
    "Give",
    "GroupCollectives",
    "Link",
    "Message",
    "Pending",
    "Signer",
    "Take",
    "Turns",
    "as_bytes",
    "find_obstacle",
    "gather_bytes",
    "open_groups",
]
