"""What stands above the tables of the page: what was compared, and how to read the table."""

STEPS = """\
All sides run at once and take turns of about a second. The ratio is the median of the rounds over three starts, with
its 10 % to 90 % range; above 1, VirtualFlow is faster. One program differs by up to 5 % from start to start. All sides
have the same model, weights, optimizer, global batch (128, 256, 32 and 8), eight micro-batches a step and one thread a
worker.

*Plain* is PyTorch as people run it, with a shuffling `DataLoader` and without deterministic algorithms; with two
workers DistributedDataParallel over gloo, with `no_sync` for all micro-batches but the last. VirtualFlow runs with its
coordinator on the same cores and the launcher's [memory settings](performance.md#memory-and-start). `statistical`
computes several virtual nodes at once. The 25 M transformer has one start."""

OVERLAP = """\
The first figure again, with two workers, one start, and a loopback limited to the speed of a link. With 24 MB and 82 MB
of gradients the wire dominates; DistributedDataParallel overlaps it with its last backward pass."""

EXCHANGE = """\
A step of almost nothing but its exchange. The default takes turns with every schedule that can be asked for. Cells have
milliseconds of the default, the best schedule and the worst, and the median ratio of default to best."""

INTEGRATIONS = """\
CPU milliseconds of a step: the library's own loop, and the same loop made elastic, in turns over two starts, with one
thread and eight micro-batches a step. The elastic side uses deterministic algorithms, and the launcher's huge pages
shorten its step by some 4 %. Ratio: median, 10 % to 90 % range."""

INTEGRITY = """\
A `bitwise` step of two workers with all checksums and state hashes, over the job's every second step, which goes
without; range over its starts. *CPU time* is the leader's. In *a checked step* a second worker computes one of the
eight virtual nodes; *with spot checks* is `--verify 0.01` over all steps."""

SEALING = """\
Messages of two processes on the loopback, and steps, in plaintext under a checksum and sealed by AES-256-GCM, by turns.
*CPU time* is that of one process. A core seals 10 GB/s, and seals for each peer what it hashes once for all. Three
workers on two cores leave no processor free to do so meanwhile."""

HOST_UPDATE = """\
Milliseconds of a `bitwise` step with the optimizer on the device and on the host. A CPU plays the device, with copies
at 12 GB/s each way, which it makes itself: the ratio is an upper bound for their cost. It leaves out that a device
steps faster than its host."""

MEMORY = """\
Forward and backward pass of one micro-batch. One core plays the device, two lanes of 160 MB/s its copy engines: for its
speed the bandwidth of a V100 on PCIe 3. Time is CPU time plus waits for copies. All gradients are equal to the bit.
Times and budgets are in units of *keep all*, which is plain PyTorch. *Recompute all* is `torch.utils.checkpoint` around
each block, *swap all* `save_on_cpu`, each with its smallest budget. *Over the best*: the slowest plan over the fastest
other side within the same budget. *Predicted* time is over the measured one, *peak* over counted bytes. The plot has
all budgets. Two blocks of VGG-16 need three quarters of its memory."""

CHANGES = """\
The digits job changes between two and three workers, and loses some by SIGKILL. A pause lasts from the last step before
a change to the first after it, at the survivor that waits longest. *Plain steps* are DistributedDataParallel's, with
two workers.

`torchrun` runs the same training with three agents (`--nnodes 2:3`, c10d) and a snapshot every ten steps; repeated
steps are not in its pause. It waits 1 s for latecomers instead of 30, and does not share its store
(`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`), since with torch 2.13 a third agent cannot join otherwise."""

STATE = """\
A job of 50.4 million parameters with AdamW grows and shrinks. Most of the pause beyond the transfer is the first step
of one more worker on the same two cores."""

UNEVEN = """\
Two workers, one of them slowed to a third for a while. *Share*: of the theoretical speed, with virtual nodes split by
speed, and evenly. *Steady*: the same pair undisturbed, where nothing should move."""

HETEROGENEOUS = """\
Published throughputs in training ResNet-50 (sources: `benchmarks/heterogeneous.py`), 64 virtual nodes of 128 images
split by speed, 25 Gbit/s without overlap. Columns: numbers of fast and slow devices. Cells: images a second, gain over
the fast devices alone, gain over an even split. The paper measured up to 42 % more on V100 with P100, with other
counts, software and network."""

COORDINATOR = """\
1,000 simulated workers in one process, 2,000 virtual nodes, and the coordinator on the same two cores. Cells: seconds,
and in brackets the coordinator's CPU seconds and megabytes sent. *Decided and sent* ends when the last worker has the
plan. *Heartbeats* and *steps* are 20 s of each. The process has 63 to 70 MB. The restart loses nobody."""

SOAK = """\
One job changes all the time between two and three workers: it grows, loses its newest worker by SIGKILL, shrinks, loses
one again. Cells: mean, 95 % confidence interval of the growth over the run (without its first tenth), verdict. *Flat*:
memory grows by at most 2 %, a count by at most 5. The worker is the one that lives throughout."""

JOINER = """\
One worker trains the digits job on one core while another process starts on the other core. The ratio is the step time
during that start over the step time before. A stranger boots the same script without joining: it shows what cores
share."""
