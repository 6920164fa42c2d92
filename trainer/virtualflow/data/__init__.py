"""Which samples a virtual node gets, how they are read, and with which random numbers: functions of the seed, the
epoch, the step and the virtual node.
"""

from virtualflow.data.counting import ALL, CountWatch
from virtualflow.data.dataloader import LoaderOptions, MicroBatch, Source, attributes_of, hear_of_ends
from virtualflow.data.iterable_source import fuse
from virtualflow.data.map_source import check_dataset, open_source
from virtualflow.data.rng import derive_seed, read_generators, seed_virtual_node, seeded
from virtualflow.data.sampling import Orders, Sampler, check_whole, chunks, has_indices, micro_batch, open_orders
