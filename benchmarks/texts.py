"""What stands above the tables of the page: what was compared, and how to read the table."""

STEPS = """\
All sides run at once and take turns of about a second. The ratio is the median of the rounds, with its 10 % to 90 %
range, over three starts of all processes, since one program is up to 5 % faster or slower from start to start. Above 1,
VirtualFlow is faster. Model, initial weights, optimizer, global batch, eight micro-batches a step and one thread a
worker are the same on all sides.

*Plain* is PyTorch as people run it: a shuffling `DataLoader`, gradient accumulation, no deterministic algorithms. With
two workers it is DistributedDataParallel over gloo, with `no_sync` for all micro-batches but the last. VirtualFlow runs
as a job of `virtualflow run`: its coordinator shares the cores, and its workers have the launcher's [memory
settings](performance.md#memory-and-start). `statistical` computes several virtual nodes as one micro-batch, which plain
PyTorch does not do here. The 25 M transformer has one start, and no `statistical` side."""

OVERLAP = """\
The first figure again, with two workers, one start, and a loopback limited to the speed of a link. With 24 MB and 82 MB
of gradients the wire dominates; DistributedDataParallel overlaps it with the backward pass of its last micro-batch."""

EXCHANGE = """\
A step whose gradients have a given size and take next to no time, so that the exchange dominates. The default takes
turns with every schedule that can be asked for: slices or whole buckets, behind the headers or beside the backward
pass. Each cell has milliseconds: the default, the best schedule, the worst, and the median ratio of the default to the
best."""

INTEGRATIONS = """\
CPU time of a step of the training process: the library's own loop, and the same loop made elastic. Both sides take
turns, over two starts, with one thread and eight micro-batches a step. The elastic side is the only worker of a job; it
uses deterministic algorithms, and the launcher's huge pages shorten its step by some 4 %. The ratio is the median of
the rounds, with its 10 % to 90 % range."""

INTEGRITY = """\
A `bitwise` step of two workers with all checksums and state hashes, over a step without them: every second step of one
job goes without. The range is over the starts of the job. *CPU time* is the leader's. In *a checked step* a second
worker computes one of the eight virtual nodes; *with spot checks* is the cost over all steps with `--verify 0.01`."""

HOST_UPDATE = """\
A `bitwise` step of eight virtual nodes with the optimizer on the host, over a step with the optimizer on the device. A
CPU plays the device, with copies at 12 GB/s in each direction. The CPU makes the copies itself, so the ratio is an
upper bound for their cost. A real device steps faster than its host, which this leaves out."""

MEMORY = """\
Forward and backward pass of one micro-batch. One core plays the device, and two lanes of 160 MB/s play its copy
engines: as much bandwidth for its speed as a V100 has on PCIe 3. Time is CPU time of the computing thread plus its
waits for copies.

| word | meaning |
| --- | --- |
| keep all | plain PyTorch; its peak is 100 % |
| recompute all | `torch.utils.checkpoint` around each block, with the smallest budget that fits |
| swap all | `save_on_cpu`, with the smallest budget that fits |
| plan | a plan for each budget from 100 % down to 20 %; the plot has all of them |
| over the best | the slowest plan over the fastest of the other three that fits the same budget |
| predicted, peak | predicted over measured time, and predicted peak over counted bytes, over all budgets |

All gradients are equal to the bit. Two blocks of VGG-16 need three quarters of its memory, which leaves little to plan.
A plan is measured in its second micro-batch: the first finds out which blocks save what another block copies out."""

CHANGES = """\
The digits job changes between two and three workers, and loses some by SIGKILL. A pause lasts from the last step before
a change to the first step after it, at the survivor that waits longest. *Plain steps* are undisturbed steps of
DistributedDataParallel with two workers.

`torchrun` runs the same training with three agents (`--nnodes 2:3`, c10d rendezvous) and a snapshot every ten steps.
Its wait for latecomers is 1 s; the default of 30 s would be added to each change that leaves fewer than three workers.
Steps repeated since the last snapshot are not in its pause. `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` is set: with the
default of torch 2.13 a third agent cannot join."""

STATE = """\
A job of 50.4 million parameters with AdamW grows and shrinks; a joiner receives 604 MB. The first step of another
worker on the same two cores is most of the pause that is not transfer."""

UNEVEN = """\
Two workers of unequal speed. *Share*: the speed beside the best split there is, with virtual nodes split by speed, and
evenly. *Steady*: equal workers are never rebalanced because of noise."""

HETEROGENEOUS = """\
Simulated: published throughputs of single devices in training ResNet-50 (`benchmarks/heterogeneous.py` names the
sources), 64 virtual nodes of 128 images split by speed, and an exchange over 25 Gbit/s that overlaps with nothing. Each
column is a number of fast and slow devices; each cell has images a second, and the gain over the fast devices alone and
over an even split. The paper measured up to 42 % more on V100 with P100; its counts, software and network differ."""

COORDINATOR = """\
1,000 simulated workers in one process, 2,000 virtual nodes, and the coordinator beside them on the same two cores. Each
cell has seconds, and in brackets the coordinator's CPU seconds and what it sends. *Decided and sent*: from the last
message that calls for a generation to its plan at the last worker. *Heartbeats* and *steps* are 20 s of each. The
process has 63 to 70 MB throughout. After the restart nobody was declared lost."""

SOAK = """\
One job changes all the time between two and three workers: it grows, loses its newest worker by SIGKILL, shrinks, and
loses one again, evenly over its steps. A line fitted behind the first tenth of the steps gives the growth over the run,
with its 95 % confidence interval. The worker is the one that lives throughout. *Flat*: memory grows by at most 2 %, a
count by at most 5. *Unclear*: it may have grown by more, or not at all."""

JOINER = """\
One worker trains the digits job on one core while another process starts on the other core. The ratio is the step time
during that start over the step time before. A stranger boots the same script without joining: it shows what cores
share."""
