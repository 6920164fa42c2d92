"""Plans of memory carried out: what autograd saves in a model's blocks is kept, swapped to the host or computed again.

Plans are made in :mod:`virtualflow.memory`; here blocks are found (:mod:`blocks`), measured (:mod:`measuring`)
and run under a plan (:mod:`executor`), in the user's own loop; or block by block for all virtual nodes
(:mod:`layer_major`). No bits depend on any of it. What may enter: what knows of torch's autograd and
of memory, and nothing of workers.
"""

from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.chain import Carrier, Chain
from virtualflow.memory.activations.layer_major import Complete, Flight, LayerMajor, Summed
from virtualflow.memory.activations.measuring import ChainMeasurement
from virtualflow.memory.activations.planned import Activations, Memory, bytes_of_state, limit
from virtualflow.memory.settings import ActivationSettings
