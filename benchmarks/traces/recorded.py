"""What the published logs of the VirtualFlow authors' elastic policy show: what was decided, and who had which GPUs.

github.com/andrewor14/tf-logs, branch 9-3-scheduler: ``9-14-2/elasticity-20jobs-WFS.log`` for the 20 jobs on 8 V100s and
``9-13/elasticity-3jobs-WFS.log`` for the three on 4. Jobs are numbered as there, which is by arrival; times are seconds
from the start of the log. README.md says where the jobs themselves are from.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.traces.workloads import START_UP, THREE, TWENTY, Submission

PAUSES = (18.8, 22.1, 20.0, 20.9)
"""Seconds from a job's growth to its next step, in which it rebuilds its graph. Four requests to shrink came before
that step and had to wait for it: 2,003.5 to 2,022.3, 2,115.1 to 2,137.2, 2,220.4 to 2,240.4, 2,715.5 to 2,736.4."""

Span = tuple[float, float | None, int]
"""When a job was given so many GPUs, and when it said that it had "successfully resized" to them; ``None``: it never
did, or the log does not say, which is so of jobs that start with one GPU. A job that shrinks gives its GPUs up when it
says so."""

Decision = tuple[float, str, str]
"""When the scheduler decided, what it says that everybody had and was to have: the ``job:GPUs`` pairs of the log."""


@dataclass(frozen=True)
class Log:
    """One run."""

    trace: str
    """The file of its jobs here."""
    jobs: tuple[Submission, ...]
    gpus: int
    release: float
    """Seconds for which it let GPUs rest that a job had given up, as the log repeats."""
    spans: tuple[tuple[Span, ...], ...]
    finished: tuple[float, ...]
    decisions: tuple[Decision, ...]

    def ready(self, job: int) -> list[tuple[float, int]]:
        """From when on the job trained with how many GPUs; for a start that the log leaves out, ``START_UP`` later."""
        given, said, gpus = self.spans[job][0]
        first = (given + START_UP if said is None else said, gpus)
        return [first, *((said, gpus) for _, said, gpus in self.spans[job][1:] if said is not None)]

    def joins(self, job: int) -> list[float]:
        """Seconds that the job's new workers took, where it did not have to wait for an earlier change."""
        found, ready = [], 0.0
        for given, said, _ in self.spans[job]:
            if said is not None and said > given >= ready:
                found.append(said - given)
            ready = max(ready, said or given)
        return found


# fmt: off
TWENTY_SHARED = Log(
    "paper-20.csv", TWENTY, gpus=8, release=10.0,
    spans=(
        ((4.7, 99.6, 8), (188.3, 188.3, 4), (459.4, 459.4, 2)),  # 0
        ((199.0, 299.7, 4), (363.3, 363.3, 2), (1_189.7, 1_189.7, 1), (1_228.1, 1_301.1, 2),
         (1_845.4, 1_845.4, 1), (1_926.9, 2_008.9, 2), (2_033.0, 2_115.1, 4), (2_137.2, 2_137.2, 2),
         (2_251.4, 2_330.4, 4), (2_457.8, 2_457.8, 2)),  # 1
        ((374.2, 457.5, 2), (501.1, 501.1, 1), (1_228.1, 1_302.1, 2), (1_521.7, 1_521.7, 1),
         (1_926.9, 2_003.5, 2), (2_022.3, 2_022.3, 1), (2_147.2, 2_220.4, 2), (2_240.4, 2_240.4, 1)),  # 2
        ((470.3, 576.1, 2),),  # 3
        ((511.4, None, 1),),  # 4
        ((2_468.6, None, 1),),  # 5
        ((2_687.9, None, 1), (3_515.8, 3_581.4, 2), (3_836.4, 3_836.4, 1), (4_196.6, 4_260.0, 2),
         (4_544.9, 4_656.0, 4), (4_769.4, 4_769.4, 2), (5_032.9, 5_032.9, 1)),  # 6
        ((1_200.1, None, 1), (1_397.3, 1_454.9, 2), (1_500.5, 1_500.5, 1)),  # 7
        ((3_327.6, None, 1),),  # 8
        ((1_511.4, None, 1),),  # 9
        ((1_532.5, None, 1),),  # 10
        ((1_855.8, None, 1), (2_457.6, 2_522.5, 2), (2_652.8, 2_715.5, 4), (2_736.4, 2_736.4, 2),
         (2_939.5, 2_939.5, 1), (3_293.5, 3_363.3, 2), (3_327.6, 3_457.8, 4)),  # 11
        ((2_147.2, None, 1), (2_468.6, 2_532.3, 2), (2_677.5, 2_677.5, 1), (3_327.6, None, 2)),  # 12
        ((2_747.0, 2_833.4, 2), (2_950.2, 3_038.7, 4)),  # 13
        ((3_401.7, None, 1), (3_515.8, 3_577.4, 2), (3_835.4, 3_835.4, 1)),  # 14
        ((3_401.7, None, 1), (3_515.8, 3_587.7, 2), (3_838.7, 3_838.7, 1), (4_350.7, 4_441.0, 2),
         (4_544.9, 4_664.2, 4), (4_744.8, 4_744.8, 2), (4_770.4, 4_770.4, 1), (5_660.2, 5_732.0, 2),
         (6_149.7, 6_229.7, 4)),  # 15
        ((3_849.2, 3_918.9, 4),),  # 16
        ((4_755.2, None, 1),),  # 17
        ((4_781.3, 4_855.3, 4), (5_032.9, 5_032.9, 1), (5_533.1, 5_602.1, 2)),  # 18
        ((5_043.6, 5_133.0, 4), (6_259.8, 6_337.4, 8)),  # 19
    ),
    finished=(1_217.6, 2_642.5, 2_446.7, 1_916.6, 1_386.9, 3_283.5, 5_522.4, 2_139.3, 4_339.9, 1_966.4,
        2_928.8, 3_505.2, 3_391.0, 3_316.9, 4_186.2, 6_249.4, 4_534.6, 6_138.7, 5_649.7, 6_494.5),
    decisions=(
        (2.0, "", "0:8"),
        (187.9, "0:8", "0:4 1:4"),
        (362.1, "0:4 1:4", "0:4 1:2 2:2"),
        (459.3, "0:4 1:2 2:2", "0:2 1:2 2:2 3:2"),
        (500.3, "0:2 1:2 2:2 3:2", "0:2 1:2 2:1 3:2 4:1"),
        (669.5, "0:2 1:2 2:1 3:2 4:1", "0:2 1:2 2:1 3:2 4:1"),
        (731.6, "0:2 1:2 2:1 3:2 4:1", "0:2 1:2 2:1 3:2 4:1"),
        (1_189.1, "0:2 1:2 2:1 3:2 4:1", "0:2 1:1 2:1 3:2 4:1 7:1"),
        (1_228.1, "1:1 2:1 3:2 4:1 7:1", "1:2 2:2 3:2 4:1 7:1"),
        (1_240.1, "1:2 2:2 3:2 4:1 7:1", "1:2 2:2 3:2 4:1 7:1"),
        (1_397.3, "1:2 2:2 3:2 7:1", "1:2 2:2 3:2 7:2"),
        (1_500.4, "1:2 2:2 3:2 7:2", "1:2 2:2 3:2 7:1 9:1"),
        (1_521.4, "1:2 2:2 3:2 7:1 9:1", "1:2 2:1 3:2 7:1 9:1 10:1"),
        (1_844.8, "1:2 2:1 3:2 7:1 9:1 10:1", "1:1 2:1 3:2 7:1 9:1 10:1 11:1"),
        (1_926.9, "1:1 2:1 7:1 9:1 10:1 11:1", "1:2 2:2 7:1 9:1 10:1 11:1"),
        (1_976.9, "1:2 2:2 7:1 10:1 11:1", "1:4 2:1 7:1 10:1 11:1"),
        (2_034.0, "1:4 2:1 7:1 10:1 11:1", "1:2 2:2 7:1 10:1 11:1 12:1"),
        (2_150.2, "1:2 2:2 10:1 11:1 12:1", "1:4 2:1 10:1 11:1 12:1"),
        (2_457.6, "1:4 10:1 11:1 12:1", "1:2 5:1 10:1 11:2 12:2"),
        (2_652.8, "5:1 10:1 11:2 12:2", "5:1 10:1 11:4 12:2"),
        (2_676.8, "5:1 10:1 11:4 12:2", "5:1 6:1 10:1 11:2 12:1 13:2"),
        (2_875.1, "5:1 6:1 10:1 11:2 12:1 13:2", "5:1 6:1 10:1 11:2 12:1 13:2"),
        (2_889.1, "5:1 6:1 10:1 11:2 12:1 13:2", "5:1 6:1 10:1 11:2 12:1 13:2"),
        (2_939.2, "5:1 6:1 11:2 12:1 13:2", "5:1 6:1 11:1 12:1 13:4"),
        (3_293.5, "6:1 11:1 12:1 13:4", "6:1 11:2 12:1 13:4"),
        (3_327.6, "6:1 11:2 12:1", "6:1 8:1 11:4 12:2"),
        (3_401.7, "6:1 8:1 11:4", "6:1 8:1 11:4 14:1 15:1"),
        (3_515.8, "6:1 8:1 14:1 15:1", "6:2 8:1 14:2 15:2"),
        (3_835.2, "6:2 8:1 14:2 15:2", "6:1 8:1 14:1 15:1 16:4"),
        (4_196.6, "6:1 8:1 15:1 16:4", "6:2 8:1 15:1 16:4"),
        (4_350.7, "6:2 15:1 16:4", "6:2 15:2 16:4"),
        (4_544.9, "6:2 15:2", "6:4 15:4"),
        (4_743.2, "6:4 15:4", "6:4 15:2 17:1"),
        (4_768.2, "6:4 15:2 17:1", "6:2 15:1 17:1 18:4"),
        (5_032.5, "6:2 15:1 17:1 18:4", "6:1 15:1 17:1 18:1 19:4"),
        (5_533.1, "15:1 17:1 18:1 19:4", "15:1 17:1 18:2 19:4"),
        (5_660.2, "15:1 17:1 19:4", "15:2 17:1 19:4"),
        (6_149.7, "15:2 19:4", "15:4 19:4"),
        (6_259.8, "19:4", "19:8"),
    ),
)
"""The 20 jobs on 8 V100s."""

THREE_SHARED = Log(
    "paper-3.csv", THREE, gpus=4, release=0.0,
    spans=(
        ((4.7, 66.3, 4), (241.1, 241.1, 2)),  # 0
        ((242.0, 300.0, 2),),  # 1
        ((1_020.9, 1_093.2, 2), (2_185.1, 2_249.1, 4)),  # 2
    ),
    finished=(611.2, 2_184.7, 3_511.3),
    decisions=(
        (2.0, "", "0:4"),
        (241.0, "0:4", "0:2 1:2"),
        (611.4, "1:2", "1:2"),
        (1_020.9, "1:2", "1:2 2:2"),
        (2_185.1, "2:2", "2:4"),
    ),
)
"""The three jobs on 4."""
# fmt: on
