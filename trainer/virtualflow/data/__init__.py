"""Which samples a virtual node gets, how they are read, and with which random numbers: functions of the seed, the
epoch, the step and the virtual node.
"""

from virtualflow.data.iterable_source import fuse
from virtualflow.data.map_source import LoaderOptions, MicroBatch, Source, open_source
from virtualflow.data.rng import seed_virtual_node
from virtualflow.data.sampling import chunks, micro_batch

__all__ = [
    "LoaderOptions",
    "MicroBatch",
    "Source",
    "chunks",
    "fuse",
    "micro_batch",
    "open_source",
    "seed_virtual_node",
]
