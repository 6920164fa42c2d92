"""Plans of memory carried out: what autograd saves in a model's blocks is kept, swapped to the host or computed again.

Plans are made in :mod:`virtualflow.memory`; here blocks are found (:mod:`blocks`), measured (:mod:`measuring`; for a
profile :mod:`chain`) and run under a plan (:mod:`executor`), in the user's own loop. No bits depend on any of it. What
may enter: what knows of torch's autograd and of memory, and nothing of workers.
"""

from virtualflow.activations.chain import ChainMeasurement
from virtualflow.activations.options import Memory, limit
from virtualflow.activations.planned import Activations, bytes_of_state
from virtualflow.activations.settings import ActivationSettings

__all__ = ["ActivationSettings", "Activations", "ChainMeasurement", "Memory", "bytes_of_state", "limit"]
