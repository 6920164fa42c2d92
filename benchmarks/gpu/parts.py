"""The parts of the report, in the order of their worth: those at the end are the first for which time is up."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = Mapping[str, Any]
Note = Callable[[Row], None]
"""Takes one row of a part's table as soon as it is known."""

Status = Literal["passed", "failed", "cut off", "skipped", "not run"]

LIBRARY = ("torch", "numpy", "msgspec", "aiohttp", "yaml", "rich", "xxhash", "safetensors")
"""What importing the library and running a job takes."""
TESTS = ("pytest", "pytest_timeout", "hypothesis")


class Wrong(Exception):
    """A part came to a result that must not be; the message is a sentence."""


@dataclass(frozen=True)
class Setting:
    """What a part is to run on."""

    device: Literal["cuda", "cpu"]
    small: bool
    """Sizes that only show that the code works: always so on the CPU."""


@dataclass(frozen=True)
class Part:
    """One thing to find out."""

    name: str
    title: str
    shows: str
    """What it shows, for the table of what has not run yet."""
    module: str
    needs: tuple[str, ...]
    """Names by which packages are imported."""
    least: float
    """Seconds below which it is not begun."""
    most: float
    """Seconds after which it is ended; the rows that it has by then count."""


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    name: str
    status: Status
    why: str = ""
    """A sentence, where the status alone does not say it."""
    rows: Sequence[Row] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class Result:
    """A whole run."""

    devices: int
    """How many CUDA devices there are."""
    small: bool
    outcomes: Sequence[Outcome]
    made: Mapping[str, str] = field(default_factory=dict)
    """When, and of which commit."""

    @property
    def complete(self) -> bool:
        """Whether it may stand on the page: all parts were asked for at full size on a device, with all they need."""
        skipped = any(outcome.status == "skipped" for outcome in self.outcomes)
        return self.devices > 0 and not self.small and not skipped and len(self.outcomes) == len(PARTS)


ENVIRONMENT = "environment"

PARTS = (
    Part(
        ENVIRONMENT,
        "Environment",
        "device, driver, CUDA, torch, and what changes bits",
        "benchmarks.gpu.environment",
        ("torch",),
        least=5,
        most=60,
    ),
    Part(
        "tests",
        "Tests on the device",
        "`tests/gpu`: kernels, random streams, gradients, state, mixed precision, compiled models, prefetching",
        "benchmarks.gpu.device_tests",
        (*LIBRARY, *TESTS),
        least=20,
        most=150,
    ),
    Part(
        "bits",
        "Equal bits on one device",
        "one digest over 1, 2 and 4 processes that share the device, through a resize and a kill",
        "benchmarks.gpu.equal_bits",
        LIBRARY,
        least=40,
        most=180,
    ),
    Part(
        "steps",
        "Step time beside plain PyTorch",
        "one worker beside plain PyTorch with fused AdamW, taking turns; wanted: a ratio of at most 1.03",
        "benchmarks.gpu.step_time",
        LIBRARY,
        least=40,
        most=200,
    ),
    Part(
        "sums",
        "Bandwidth of the tree's sums",
        "bytes a second of the tree's additions beside a copy on the device; wanted: at least 0.8",
        "benchmarks.gpu.tree_sum",
        LIBRARY,
        least=10,
        most=40,
    ),
    Part(
        "pauses",
        "Pauses",
        "how long growing, shrinking and a kill hold up a job whose workers share the device",
        "benchmarks.gpu.pauses",
        LIBRARY,
        least=30,
        most=140,
    ),
    Part(
        "memory",
        "Peak memory",
        "device memory of a step with 8 and with 64 virtual nodes",
        "benchmarks.gpu.peak_memory",
        LIBRARY,
        least=10,
        most=50,
    ),
    Part(
        "copies",
        "Copies beside the computation",
        "plans of memory whose copies run on CUDA streams, beside copies that are waited for and recomputation",
        "benchmarks.gpu.copies",
        LIBRARY,
        least=20,
        most=70,
    ),
    Part(
        "sharing",
        "Between processes on one device",
        "whether NCCL takes two ranks on one device; CUDA IPC beside staging through the host",
        "benchmarks.gpu.sharing",
        LIBRARY,
        least=20,
        most=60,
    ),
    Part(
        "invariance",
        "Batch-invariant matrix products",
        "what equal bits between two batch splits cost",
        "benchmarks.gpu.batch_invariance",
        ("torch",),
        least=15,
        most=60,
    ),
)
