"""The paper's workloads as they were published, and how fast each is with other numbers of GPUs.

VirtualFlow (Or, Zhang and Freedman, MLSys 2022, arXiv 2009.09523) evaluates elasticity with ResNet-56 on CIFAR-10,
ResNet-50 on ImageNet, BERT-base on GLUE and Transformer on WMT. Its authors have published the traces
(github.com/andrewor14/models, deploy/scheduler_traces) and the logs of both runs of each, with the paper's elastic
policy and with priorities (github.com/andrewor14/tf-logs, 9-14-2 for 20 jobs on 8 V100s, 9-13 for 3 jobs on 4). Jobs,
arrivals, priorities, demands and the duration of each job at its demand are from there.

What the logs do not have is each job's speed with other numbers of GPUs. Step time is modelled per family as
``compute * batch / workers + exchange(workers)``, fitted by hand to what the two 20-job logs show of its jobs at
different sizes; then each job's curve is scaled so that at its demand it takes exactly as long as the log says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

START_UP = 70.0
"""Seconds that a job of one GPU takes to its first step; for the others the logs say it (58 to 105 s)."""


@dataclass(frozen=True)
class Family:
    """How the step time of a model grows with the batch and shrinks with the workers."""

    compute: float
    """Seconds for a sample (a token), on one GPU."""
    exchange: dict[int, float]
    """Seconds that a step takes beyond that, by workers."""

    def step_seconds(self, batch: int, workers: int) -> float:
        """How long a step takes."""
        return self.compute * batch / workers + self._exchange(workers)

    def _exchange(self, workers: int) -> float:
        # On a line over the logarithm of the number of workers, which is what the measured ones are close to; beyond
        # 8 it goes on as from 4 to 8.
        if workers == 1:
            return 0.0
        low = 2 ** min(2, math.floor(math.log2(workers)))
        part = math.log2(workers / low)
        return self.exchange[low] + part * (self.exchange[2 * low] - self.exchange[low])


FAMILIES = {
    # jobs 9 of the 20 and 1 of the three; it was never run with more than two
    "cifar10": Family(0.000368, {2: 0.024, 4: 0.024, 8: 0.024}),
    # jobs 0, 6, 10, 12, 15; with these the logs' 938 and 469 steps of jobs 6 and 15 come out as 912 and 468
    "imagenet": Family(0.00105, {2: 0.02, 4: 0.2, 8: 0.25}),
    # jobs 3, 4, 5, 7, 8, 11, 14, 16, 18: hardly faster with more GPUs, and job 5 was slower with two than with one
    "glue": Family(0.011, {2: 0.12, 4: 0.225, 8: 0.31}),
    # jobs 1, 2, 13, 19; batches are in tokens
    "wmt": Family(0.00012, {2: 0.3, 4: 0.4, 8: 0.5}),
}
SAMPLES = {"cifar10": 50_000, "imagenet": 1_281_167, "CoLA": 8_551, "SST-2": 67_349, "QNLI": 104_743}


@dataclass(frozen=True)
class Workload:
    """One kind of job: what is trained, and how long the log says it took at its demand."""

    model: str
    family: str
    demand: int
    """GPUs that it asks for."""
    batch: int
    steps: int
    seconds: float
    """Of training at its demand, without the start."""

    def throughput(self, workers: int = 0) -> dict[int, float]:
        """Steps per second, by workers up to ``workers`` or its demand."""
        family = FAMILIES[self.family]
        scale = self.seconds / self.steps / family.step_seconds(self.batch, self.demand)
        numbers = range(1, max(self.demand, workers) + 1)
        return {n: 1 / (scale * family.step_seconds(self.batch, n)) for n in numbers}

    @property
    def fit(self) -> float:
        """How much longer a step was at its demand than the family's model says."""
        return self.seconds / self.steps / FAMILIES[self.family].step_seconds(self.batch, self.demand)


def _epochs(data: str, batch: int, epochs: int) -> int:
    return math.ceil(SAMPLES[data] / batch) * epochs


@dataclass(frozen=True)
class Submission:
    """A workload that comes at a time, with a priority."""

    arrival: float
    priority: int
    workload: Workload


def _resnet(data: str, demand: int, batch: int, epochs: int, seconds: float) -> Workload:
    model = {"cifar10": "resnet56", "imagenet": "resnet50"}[data]
    return Workload(f"{model}-{data}", data, demand, batch, _epochs(data, batch, epochs), seconds)


def _bert(task: str, demand: int, batch: int, epochs: int, seconds: float) -> Workload:
    return Workload(f"bert-{task.lower()}", "glue", demand, batch, _epochs(task, batch, epochs), seconds)


def _transformer(demand: int, batch: int, steps: int, seconds: float) -> Workload:
    return Workload("transformer-wmt", "wmt", demand, batch, steps, seconds)


# Seconds: from "successfully resized" (or the start and START_UP) to "finished", in the log of the priority scheduler.
TWENTY = (
    Submission(1, 5, _resnet("imagenet", 8, 2_048, 2, 659.9 - 81.9)),
    Submission(187, 5, _transformer(4, 32_768, 1_000, 2_110.1 - 760.7)),
    Submission(361, 5, _transformer(4, 16_384, 1_000, 2_809.9 - 2_121.8)),
    Submission(458, 10, _bert("CoLA", 2, 16, 10, 2_006.3 - 740.4)),
    Submission(499, 5, _bert("SST-2", 1, 8, 1, 833.0 - START_UP)),
    Submission(668, 1, _bert("SST-2", 2, 16, 1, 9_388.0 - 8_487.1)),
    Submission(730, 1, _resnet("imagenet", 8, 4_096, 3, 10_226.0 - 9_483.7)),
    Submission(1_188, 5, _bert("CoLA", 4, 32, 10, 3_876.4 - 3_033.2)),
    Submission(1_239, 1, _bert("CoLA", 1, 16, 10, 949.6 - START_UP)),
    Submission(1_499, 5, _resnet("cifar10", 1, 128, 20, 437.9 - START_UP)),
    Submission(1_520, 5, _resnet("imagenet", 1, 256, 1, 1_415.0 - START_UP)),
    Submission(1_843, 5, _bert("CoLA", 4, 64, 20, 5_042.9 - 3_980.2)),
    Submission(1_999, 5, _resnet("imagenet", 2, 2_048, 1, 4_644.3 - 3_961.3)),
    Submission(2_676, 10, _transformer(4, 16_384, 500, 3_339.8 - 2_896.1)),
    Submission(2_874, 1, _bert("SST-2", 2, 32, 1, 10_917.7 - 10_315.9)),
    Submission(2_888, 1, _resnet("imagenet", 8, 8_192, 3, 11_929.3 - 11_274.0)),
    Submission(3_834, 5, _bert("SST-2", 8, 128, 2, 7_795.7 - 7_281.3)),
    Submission(4_742, 10, _resnet("imagenet", 1, 512, 1, 1_333.1 - START_UP)),
    Submission(4_767, 5, _bert("CoLA", 8, 64, 10, 8_412.4 - 7_879.2)),
    Submission(5_032, 10, _transformer(8, 32_768, 1_000, 7_180.2 - 6_189.8)),
)

# The first and the last had 105 and 327 steps an epoch, with an evaluation after each, which is in their seconds.
THREE = (
    Submission(1, 1, Workload("bert-sst-2", "glue", 4, 64, 105 * 10, 591.3 - 74.3)),
    Submission(240, 5, _resnet("cifar10", 2, 128, 100, 2_522.2 - 662.6)),
    Submission(1_020, 10, Workload("bert-qnli", "glue", 4, 64, 327 * 15, 4_964.2 - 2_585.1)),
)


@dataclass(frozen=True)
class Recorded:
    """What a published log shows: when each job got its first GPUs and when it ended, by the order of arrival."""

    started: tuple[float, ...]
    finished: tuple[float, ...]


# fmt: off
RECORDED_PRIORITY = Recorded(
    (4.5, 670.2, 2016.6, 670.2, 2120.7, 8423.4, 9398.4, 2964.6, 10236.4, 3350.0,
     3350.0, 3886.6, 3886.6, 2820.5, 10236.4, 11196.4, 7191.1, 4743.5, 7805.7, 6086.9),
    (659.9, 2110.1, 2809.9, 2006.3, 2953.8, 9388.0, 10226.0, 3876.4, 11185.9, 3787.9,
     4765.0, 5042.9, 4644.3, 3339.8, 10917.7, 11929.3, 7795.7, 6076.6, 8412.4, 7180.2),
)
RECORDED_FAIR_SHARE = Recorded(
    (4.7, 199.0, 374.2, 470.3, 511.4, 2468.6, 2687.9, 1200.1, 3327.6, 1511.4,
     1532.4, 1855.8, 2147.2, 2747.0, 3401.7, 3401.7, 3849.2, 4755.2, 4781.3, 5043.6),
    (1217.6, 2642.5, 2446.7, 1916.6, 1386.9, 3283.5, 5522.4, 2139.3, 4339.9, 1966.4,
     2928.8, 3505.2, 3391.0, 3316.9, 4186.2, 6249.4, 4534.6, 6138.7, 5649.7, 6494.5),
)
# fmt: on
"""Of the 20 jobs, on 8 V100s."""
