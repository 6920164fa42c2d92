"""One optimizer update: what every virtual node contributes, the header that goes before the gradients, the model's
buffers, how far each backward pass goes, the optimizer's step whole, in portions or sharded, and virtual nodes that are
run as one micro-batch.
"""

from virtualflow.step.backward_cut import BackwardCut
from virtualflow.step.buffers import BufferKind, choose_sums
from virtualflow.step.divided_averages import check_averages
from virtualflow.step.gradient_sync import Reduced
from virtualflow.step.guard import Guard, add_bits
from virtualflow.step.header import HOW_TO_END, Kind, Schema, read_headers
from virtualflow.step.lost_state import find_lost_state, walk_objects
from virtualflow.step.meta_parameters import MetaModel
from virtualflow.step.microbatch_fusion import BatchNorm, MicrobatchFusion
from virtualflow.step.optimizer_step import OptimizerOptions, SchedulerInterval
from virtualflow.step.part import Attempt, Parts, StepPart, Told
from virtualflow.step.partial_backward import PartialBackward, agreed
from virtualflow.step.partial_step import is_separable, why_not_separable
from virtualflow.step.placement import HOST
from virtualflow.step.repetition import LOOKS_AHEAD, Repetition, copy_data
from virtualflow.step.sharded_optimizer import Holding, Shards
from virtualflow.step.sharded_parameters import ShardedParameters
from virtualflow.step.sliced_values import SlicedValues
from virtualflow.step.spot_checker import Doubted, SpotChecker
from virtualflow.step.spot_checks import choose_judges, describe_open_doubt, judge
from virtualflow.step.state_watch import SETTINGS, Diverged, Divergence
from virtualflow.step.update import Update
