"""What to do where a model's activations do not fit on a device: for each block keep, swap or recompute.

The decision is pure: from a profile of the model as a chain of blocks and a budget (:mod:`model`) to a plan
(:mod:`planner`), by a simulation of the device and its two copy engines (:mod:`simulation`) and a search
(:mod:`search`); which number of virtual nodes fits (:mod:`fitting`), which devices are worth asking for
(:mod:`devices`), and how many where parameters are divided (:mod:`sharding`). No plan changes a bit of the result, so
each worker may have its own. What may enter: values and decisions about them, no torch, no clock; what carries plans
out is in :mod:`virtualflow.memory.activations`, which this package does not import. docs/explanation/memory.md has the
model.
"""

from virtualflow.errors import DoesNotFit
from virtualflow.memory.devices import Advice, DeviceType, Division, Interconnect, advise, costs, divide
from virtualflow.memory.fitting import Fit, fit, profile_for, what_fits
from virtualflow.memory.model import Action, Block, BlockPlan, Budget, Plan, Point, Profile, Skip, Span, Timeline, Wait
from virtualflow.memory.planner import Planner, plan
from virtualflow.memory.sharding import ShardedFit, divided_profile, fit_sharded, what_fits_sharded
from virtualflow.protocol.settings import Placement
from virtualflow.protocol.wording import format_bytes, parse_bytes
