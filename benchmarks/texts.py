"""What stands above the tables of the page: what was compared, and how to read the table."""

STEPS = """\
All sides have the same model, weights, optimizer, global batch (128, 256, 32 and 8), eight micro-batches a step and one
thread a worker. Ratios are medians of the rounds over three starts (25M: one), with the 10 % to 90 % range; above 1,
VirtualFlow is faster. One program differs by up to 5 % between starts.

*Plain* has a shuffling `DataLoader` and no deterministic algorithms. With two workers it is DistributedDataParallel
over gloo, with `no_sync` until the last micro-batch. VirtualFlow includes its coordinator and the launcher's [memory
settings](performance.md#memory-and-start). [`statistical`](../how-to/statistical-mode.md) jobs trade bits for speed."""

OVERLAP = """\
The first figure again, with two workers, one start, and a loopback limited to the speed of a link. With 24 MB and 82 MB
of gradients the wire dominates; DistributedDataParallel overlaps it with its last backward pass."""

EXCHANGE = """\
Steps that do little but exchange. The default takes turns with every selectable schedule. Cells: milliseconds of the
default, the best and the worst schedule; median ratio of default to best. *Late*: begun behind the backward pass."""

INTEGRATIONS = """\
CPU milliseconds of a step in the library's own loop and in the same loop made elastic; their ratio, with its 10 % to 90
% range. Two starts, one thread, eight micro-batches. Only the elastic loop has deterministic algorithms, and huge
pages, which save it some 4 %."""

INTEGRITY = """\
Two `bitwise` workers. Every second step goes without checksums and state hashes; ranges are over starts. *CPU time* is
the leader's. In *a checked step* a second worker computes one of the eight virtual nodes; *with spot checks* is
`--verify 0.01` over all steps."""

SEALING = """\
Messages each way between two processes on the loopback, and steps: in plaintext with a checksum, and sealed by
AES-256-GCM. *CPU time* is one process's. A core seals 10 GB/s. A message is hashed once, but sealed for each peer.
Three workers leave no core idle for that.

Below them, pauses of changes (jobs of both kinds by turns): of the digits job between two and three workers, and where
the third one gets 604 MB of state, with what that takes beside the training (*transfer*). These are medians of six to
twelve changes, and rough."""

HOST_UPDATE = """\
Milliseconds of a `bitwise` step with the optimizer on the device and on the host. A CPU plays the device and makes the
copies (12 GB/s each way), so ratios are upper bounds of their cost. They ignore that a device steps faster than its
host."""

MEMORY = """\
Forward and backward pass of one micro-batch in CPU time, plus waits for copies. One core plays the device and two lanes
of 160 MB/s its copy engines, in the proportion of a V100 on PCIe 3. All gradients are equal to the bit.

Times and budgets are relative to *keep all*: plain PyTorch. *Recompute all* is `torch.utils.checkpoint` around each
block, *swap all* `save_on_cpu`, with the smallest budget in brackets. *Over the best* is the worst ratio of a plan's
time to the fastest other side's within the same budget; *predicted* is over measured time, *peak* over counted
bytes."""

CHANGES = """\
The digits job changes between two and three workers and loses some by SIGKILL. A pause lasts from the last step before
a change to the first after it, at the survivor that waits longest. *Plain steps* are DistributedDataParallel's with two
workers.

`torchrun` runs the same training with three agents (`--nnodes 2:3`, c10d) and a snapshot every ten steps; its pause
excludes repeated steps. It waits 1 s for latecomers instead of 30, and has `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`,
without which no third agent can join (torch 2.13)."""

REPLICA_GROUPS = """\
The same changes under torchft 0.2.0 with three replicas of one process over gloo, whose gradients `Manager.allreduce`
averages; in turn with VirtualFlow. A lost replica is noticed when its heartbeat is 1 s late (5 s by default). A replica
that is told to end is lost, too: a shrink is not announced. The step in which it is lost is given up: its samples are
not used. Bits follow the number of replicas."""

STATE = """\
A job of 50.4 million parameters with AdamW grows and shrinks. Beyond the transfer, the pause is mostly the first step
of one more worker on the same cores."""

UNEVEN = """\
One of two workers is stopped two thirds of the time for a while (10 ms by 10 ms). *Possible* is the fastest of these
splits. *Theory* is what both speeds allow without any exchange; the stopped worker exchanges and updates slowly too.
Medians of two runs."""

UNEVEN_DEVICES = """\
Workers with devices of unequal speed share 16 virtual nodes. A worker plays its device by a fixed wait for each virtual
node, so many share two cores; it also computes a small model. *Possible*: the best whole-number split of all, as a job
that always has it. All weights are equal."""

PLANNED_DEVICES = """\
Devices are processes with a CPU quota, which is granted anew every 5 ms (containers: 100 ms). Before each random mix
`virtualflow profile` measures its kinds, all devices at once. `virtualflow plan --devices` gives split and step. The
mix trains with that split and with its *best neighbour*: of all splits that move one virtual node, the one that is the
fastest by the profiles. *Over the split*: the neighbour's speed over the split's; below 1 the planned split is faster.
The model has 18 kB of gradients, and the plan leaves out the exchange. *Played* devices wait a fixed time for each
virtual node (30 ms divided by the number in the first column) and compute next to nothing. They are as fast when the
mix trains as when it was measured, which cores of a shared machine are not."""

HETEROGENEOUS = """\
Published throughputs of ResNet-50 training (sources: `benchmarks/heterogeneous.py`), 64 virtual nodes of 128 images
split by speed, 25 Gbit/s without overlap. Cells: images a second, gain over the fast devices alone, gain over an even
split. The paper measured up to 42 % more (V100, P100; other conditions)."""

COORDINATOR = """\
One process simulates the workers, with 2,000 virtual nodes; each has its own certificate, and its connection is
sealed. Cells: seconds (the coordinator's CPU seconds, megabytes sent). *Decided and sent* ends when the last worker
has the plan; *heartbeats* and *steps* last 20 s. The coordinator has up to 200 MB, in plaintext 80. The restart loses
nobody."""

SOAK = """\
One job keeps changing between two and three workers: it grows, loses its newest by SIGKILL, shrinks, loses one again.
Cells: mean, 95 % confidence interval of the growth after the run's first tenth, verdict. *Flat*: memory grows by at
most 2 %, a count by at most 5. The worker lives throughout."""

JOINER = """\
One worker trains the digits job on one core while another process starts on the other core. The ratio is the step time
during that start over the step time before. A stranger boots the same script without joining: it shows what cores
share."""
