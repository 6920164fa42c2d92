"""Plans of memory carried out: what autograd saves in a model's blocks is kept, swapped to the host or computed again.

Plans are made in :mod:`virtualflow.memory`; here blocks are found (:mod:`blocks`), measured (:mod:`measuring`; for a
profile :mod:`chain_measurement`) and run under a plan (:mod:`executor`), in the user's own loop; or block by block for
all virtual nodes (:mod:`layer_major`). No bits depend on any of it. What may enter: what knows of torch's autograd and
of memory, and nothing of workers.
"""

from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.carrier import Carrier
from virtualflow.memory.activations.chain import Chain
from virtualflow.memory.activations.chain_measurement import ChainMeasurement
from virtualflow.memory.activations.layer_major import Flight, LayerMajor, Loss, Summed
from virtualflow.memory.activations.options import Memory, limit
from virtualflow.memory.activations.planned import Activations, bytes_of_state
from virtualflow.memory.activations.settings import ActivationSettings

__all__ = [
    "ActivationSettings",
    "Activations",
    "Carrier",
    "Chain",
    "ChainMeasurement",
    "Flight",
    "LayerMajor",
    "Loss",
    "Memory",
    "Summed",
    "bytes_of_state",
    "find_blocks",
    "limit",
]
