"""Measures how long micro-batches of a user's own script take on this device, and how much memory.

``virtualflow profile`` runs the script as it is, in this mode: its inner loop gets micro-batches of one size after the
other, whose gradients are added up as in a training and thrown away, and then those of whole steps, which show what a
step takes beside them. It never gets behind its inner loop: when enough is known the profile is written and the script
is ended, before its code that follows a step or a training would run on half of one.
"""

from __future__ import annotations

import datetime
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import msgspec
import torch
from torch import Tensor, nn

from virtualflow.atomic_file import write_whole
from virtualflow.data import MicroBatch, Source, micro_batch, open_source, seed_virtual_node
from virtualflow.device import device_name, device_of, free_bytes
from virtualflow.errors import ConfigurationError, Profiled, describe, installed
from virtualflow.progress import ProgressBar
from virtualflow.protocol.device_profile import DeviceProfile, Situation, SizeProfile, encode, read_fitting
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.protocol.wording import counted
from virtualflow.reduction import Precision
from virtualflow.step import HOST
from virtualflow.worker.loading import Staging
from virtualflow.worker.options import Options
from virtualflow.worker.settings import WorkerSettings
from virtualflow.worker.train_state import signature_hash

logger = logging.getLogger("virtualflow.worker")

# How much is measured for each size of micro-batches.

_WARM_UP = 3
"""Micro-batches that do not count: kernels are chosen and memory is taken in them."""
_SAMPLE = 0.2
"""A sample covers at least this long: shorter micro-batches are put together. A container's CPU quota is granted by the
tenth of a second. Most micro-batches that are shorter never see it used up, and some last as long as the stop."""
_SAMPLES = 10
"""Samples at the most: the median no longer moves much."""
_LEAST = 5
"""In any case: with fewer, quartiles mean nothing."""
_SECONDS = 3.0
"""When this has passed and the least are there, a size is done."""
_STEPS = 50
"""Whole steps at the most, and the least and the seconds as above; the first one does not count."""
_LONGEST = 60.0
"""A size that would take longer, by what the last one took, is not begun, and neither are steps."""
_MEMORY = 0.8
"""The share of free memory up to which a size is tried: an estimate may be wrong, and others use memory, too."""


def _script() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return os.path.basename(sys.argv[0]) if spec is None else f"-m {spec.name.removesuffix('.__main__')}"


def describe_situation(
    model: nn.Module, options: Options, environment: WorkerEnvironment, virtual_nodes: int, signature: dict[str, Any]
) -> Situation:
    device = device_of(model)
    return Situation(
        device.type,
        device_name(device),
        environment.threads,
        f"{signature_hash(signature):x}",
        micro_batch(options.batch_size, virtual_nodes),
    )


def given_profile(environment: WorkerEnvironment, situation: Situation) -> tuple[DeviceProfile | None, str | None]:
    """The profile that this worker was given, and a warning if that says nothing of it."""
    if environment.profile is None:
        return None, None
    try:
        return read_fitting(environment.profile, situation), None
    except ConfigurationError as error:
        logger.warning("%s", error)
        return None, str(error)


def sizes_to_measure(virtual_nodes: int, micro_batch: int, samples: int | None, asked: tuple[int, ...]) -> list[int]:
    """How many virtual nodes' samples to put into a micro-batch, from the smallest: 1, 2, 4, ... and all of them."""
    powers = [1 << power for power in range(virtual_nodes.bit_length()) if 1 << power < virtual_nodes]
    sizes = sorted({*(asked or (*powers, virtual_nodes))})
    if sizes[-1] > virtual_nodes:
        raise ConfigurationError(
            f"a size of {counted(sizes[-1], 'virtual node')} is asked for, and the job has {virtual_nodes}; "
            "ask for at most that"
        )
    possible = [size for size in sizes if samples is None or size * micro_batch <= samples]
    if not possible:
        raise ConfigurationError(
            f"the dataset has {counted(samples or 0, 'sample')}, fewer than the {sizes[0] * micro_batch} of one "
            "micro-batch; give a larger dataset or ask for a smaller size"
        )
    return possible


@dataclass(frozen=True)
class _Sample:
    """The mean of some micro-batches, in seconds."""

    whole: float
    loading: float


class _Times:
    """Of micro-batches that make one sample, in seconds."""

    def __init__(self) -> None:
        self.micro_batches = 0
        self.whole = self.loading = 0.0

    def add(self, whole: float, loading: float) -> None:
        self.micro_batches += 1
        self.whole += whole
        self.loading += loading

    def sample(self) -> _Sample:
        return _Sample(self.whole / self.micro_batches, self.loading / self.micro_batches)


class Profiling:
    """The profiling of one run: each size has a source of its own, and whole steps read from the run's.

    Args:
        samples: of the dataset; ``None`` for a stream.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        options: Options,
        environment: WorkerEnvironment,
        *,
        virtual_nodes: int,
        situation: Situation,
        samples: int | None,
        settings: WorkerSettings,
    ) -> None:
        assert environment.profile_out is not None
        self._model, self._optimizer = model, optimizer
        self._dataset = dataset
        self._options = options
        self._device = device_of(model)
        self._staging = Staging(None if options.device is None else self._device)
        self._indexed = samples is not None
        self._micro_batch = situation.micro_batch
        self._sizes = sizes_to_measure(virtual_nodes, self._micro_batch, samples, environment.profile_sizes)
        self._path = environment.profile_out
        self._measured: list[SizeProfile] = []
        self._stopped = "all were measured"
        self._sums: list[Tensor] = []
        self._sum_bytes = 0
        self._precision = Precision(options.reduce_dtype)
        self._steps: list[float] = []
        """Of each whole step the seconds beside its micro-batches."""
        self._steps_began = 0.0
        self._besides: Literal["", "blocks", "steps"] = ""
        """What is being measured beside sizes: an error in it leaves these."""
        wanted = None if options.memory is None else options.memory.blocks
        with installed():
            from virtualflow.memory.activations import ActivationSettings, ChainMeasurement
        activations = settings.activations or ActivationSettings()
        scratch = options.memory is not None and options.memory.scratch is not None
        self._chain = ChainMeasurement(
            model, self._device, wanted, activations, scratch=scratch, precision=self._precision
        )
        self._warm_up = activations.warm_up
        self._blank = DeviceProfile(
            device_type=situation.device_type,
            device=situation.device,
            torch=str(torch.__version__),
            threads=situation.threads,
            reproducibility=environment.reproducibility or options.reproducibility,
            signature=situation.signature,
            script=_script(),
            batch_size=options.batch_size,
            virtual_nodes=virtual_nodes,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            stopped="",
            sizes=(),
        )
        """All of the profile but the sizes and why they end."""

    def measure(self) -> Iterator[Any]:
        """Yield micro-batches of all sizes to the user's inner loop."""
        with ProgressBar("measuring", len(self._sizes)) as progress:  # each takes about as long, at most
            for number, size in enumerate(self._sizes):
                reason = self._reason_to_stop(size)
                if reason is not None:
                    self._stopped = reason
                    break
                began = time.perf_counter()
                for batch in self._measure_size(size):
                    progress.reach(number + min(1.0, (time.perf_counter() - began) / _SECONDS))
                    yield batch
        self._steps_began, self._besides = time.perf_counter(), "steps"

    @property
    def wants_step(self) -> bool:
        """Whether a whole step is to be made behind all sizes; see :meth:`step`."""
        seconds = self._blank.virtual_nodes * self._measured[0].seconds_per_virtual_node
        if not self._steps:
            return (_LEAST + 1) * seconds <= _LONGEST
        spent = time.perf_counter() - self._steps_began
        return len(self._steps) <= _LEAST or (len(self._steps) <= _STEPS and spent < _SECONDS)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A step in which the micro-batches are computed; the block does all else that belongs to it."""
        self._wait_for_device()
        began = time.perf_counter()
        yield
        self._wait_for_device()
        self._steps.append(time.perf_counter() - began)

    def finish(self, stopped: str = "") -> NoReturn:
        """Write the profile; ends the script.

        Args:
            stopped: why no larger sizes were measured; empty: as is known.
        """
        chain = self._chain.finish(self._optimizer_bytes) if self._chain.wanted else None
        profile = msgspec.structs.replace(
            self._blank,
            sizes=tuple(self._measured),
            stopped=stopped or self._stopped,
            chain=chain,
            blocks=self._chain.said,
            sum_bytes=self._sum_bytes,
            # A mean: a container's CPU quota stops few steps, and those for long.
            step_seconds=statistics.fmean(self._steps[1:]) if len(self._steps) > 1 else None,
        )
        try:
            write_whole(self._path, encode(profile))
        except OSError as error:
            raise ConfigurationError(f"the profile cannot be written to {self._path}: {error.strerror}") from error
        raise Profiled(f"the profile is written to {self._path}")

    def explain(self, error: BaseException) -> None:
        """The script ended with ``error``: what is known is written down, if the error leaves that as it is."""
        full = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not (full or (self._besides and isinstance(error, Exception))):
            return
        if not self._measured:
            raise ConfigurationError(
                f"a micro-batch of {counted(self._micro_batch, 'sample')} does not fit into the memory of "
                f"{self._blank.device}; use more virtual nodes or a smaller batch size"
            ) from error
        self._sums = []
        why = f"the script ended with {describe(error)}"
        if self._besides == "steps":
            logger.warning("what a step takes beside its micro-batches is not in the profile: %s", why)
            self.finish()
        if full:
            self.finish(f"{2 * self._measured[-1].virtual_nodes} or fewer virtual nodes do not fit into memory")
        logger.warning("blocks and larger sizes are not in the profile: %s", why)
        self._chain.give_up(why)
        self.finish("the model's blocks cannot be measured")

    # --- one size -----------------------------------------------------------------------------------------------------

    def _measure_size(self, size: int) -> Iterator[Any]:
        source = self._open_source(size * self._micro_batch)
        batches = whole_batches(source, size * self._micro_batch)
        samples: list[_Sample] = []
        micro_batches = 0
        began = time.perf_counter()
        try:
            for _ in range(_WARM_UP):
                yield from self._one(batches, _Times())
            peak: list[int | None] = [None]
            if not self._cannot_count:
                yield from self._one_counted(batches, peak)
            while len(samples) < _SAMPLES and (len(samples) < _LEAST or time.perf_counter() - began < _SECONDS):
                times = _Times()
                while times.whole < _SAMPLE:
                    yield from self._one(batches, times)
                samples.append(times.sample())
                micro_batches += times.micro_batches
            whole = [each.whole for each in samples]
            low, _, high = statistics.quantiles(whole, n=4, method="inclusive")
            self._measured.append(
                SizeProfile(
                    virtual_nodes=size,
                    micro_batch=size * self._micro_batch,
                    samples=micro_batches,
                    seconds=statistics.median(whole),
                    seconds_low=low,
                    seconds_high=high,
                    loading_seconds=statistics.median(each.loading for each in samples),
                    peak_bytes=peak[0],
                )
            )
            if self._chain.wanted:
                self._besides = "blocks"
                yield from self._measure_blocks(batches, size * self._micro_batch)
                self._besides = ""
        finally:
            source.close()
            self._sums = []

    def _measure_blocks(self, batches: Iterator[MicroBatch], samples: int) -> Iterator[Any]:
        with self._chain.size(samples) as done:
            for _ in range(self._warm_up + _LEAST):
                yield from self._one(batches, _Times())
                done()

    def _optimizer_bytes(self) -> int:
        """Of its state, which it makes in its first step: the script is over, and nobody will see the weights."""
        if not self._optimizer.state:
            for parameter in self._model.parameters():
                if parameter.requires_grad and parameter.grad is None:  # the script has ended before its backward pass
                    parameter.grad = torch.zeros_like(parameter)
            self._optimizer.step()
        from virtualflow.memory.activations import bytes_of_state

        # Whole steps leave it on the host where the script wants the optimizer there.
        return max(bytes_of_state(self._optimizer.state.values(), each) for each in {self._device, HOST})

    def _open_source(self, samples: int) -> Source:
        return open_source(
            self._dataset,
            batch_size=samples,
            virtual_nodes=1,
            seed=self._options.seed,
            shuffle=self._options.shuffle,
            drop_last=self._indexed,
            epochs=None,
            options=self._options.loader,
        )

    def _one(self, batches: Iterator[MicroBatch], times: _Times) -> Iterator[Any]:
        """Let the user's code compute on one micro-batch, add up its gradients, and note how long it took."""
        for parameter in self._model.parameters():
            parameter.grad = None
        self._wait_for_device()
        began = time.perf_counter()
        batch = self._staging.move(next(batches))
        loaded = time.perf_counter()
        seed_virtual_node(self._options.seed, 1, 0)
        yield batch.data
        gradients = [p.grad for p in self._model.parameters() if p.grad is not None]
        if not gradients:
            raise ConfigurationError(
                "no parameter got a gradient from a micro-batch; call loss.backward() for each micro-batch of the step"
            )
        if len(self._sums) == len(gradients):
            torch._foreach_add_(self._sums, gradients)
        else:
            self._sums = gradients
            self._sum_bytes = sum(each.numel() * self._precision.of(each.dtype).itemsize for each in gradients)
        self._wait_for_device()
        times.add(time.perf_counter() - began, loaded - began)

    def _wait_for_device(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    # --- memory -------------------------------------------------------------------------------------------------------

    @property
    def _cannot_count(self) -> bool:
        return self._device.type != "cuda" and (
            self._device.type != "cpu" or torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        )

    def _one_counted(self, batches: Iterator[MicroBatch], peak: list[int | None]) -> Iterator[Any]:
        """As :meth:`_one`, and count bytes; slower, so that its time does not count."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            before = torch.cuda.memory_allocated(self._device)
            yield from self._one(batches, _Times())
            peak[0] = max(0, torch.cuda.max_memory_allocated(self._device) - before)
            return
        # Gradients of the micro-batch before must not be freed while bytes are counted from zero.
        for parameter in self._model.parameters():
            parameter.grad = None
        profiler = torch.autograd.profiler.profile(profile_memory=True, use_cpu=True)
        with profiler:
            yield from self._one(batches, _Times())
        peak[0] = peak_of_cpu(profiler)

    def _reason_to_stop(self, size: int) -> str | None:
        """Why a size is not even tried: by what the last one took."""
        if not self._measured:
            return None
        last = self._measured[-1]
        growth = size / last.virtual_nodes
        rounds = _LEAST + _WARM_UP
        if last.seconds * growth * rounds > _LONGEST:
            return f"{counted(size, 'virtual node')} at a time would take more than {_LONGEST:g} s to measure"
        free = free_bytes(self._device)
        if free is not None and last.peak_bytes is not None and last.peak_bytes * growth > _MEMORY * free:
            return (
                f"{counted(size, 'virtual node')} at a time would need about "
                f"{last.peak_bytes * growth / 2**20:.0f} MiB of the "
                f"{free / 2**20:.0f} MiB that are free"
            )
        return None


def whole_batches(source: Source, samples: int) -> Iterator[MicroBatch]:
    """Micro-batches of exactly so many samples, epoch after epoch, without end."""
    epoch = 0
    while True:
        source.assign(range(1), epoch, 0)
        found, step = False, 0
        while source.steps_per_epoch is None or step < source.steps_per_epoch:
            batch = source.fetch(epoch, step, 0)
            if batch.size == samples:
                found = True
                yield batch
            elif not batch.size:
                break
            step += 1
        if not found:
            raise ConfigurationError(
                f"an epoch of the dataset has no micro-batch of {counted(samples, 'sample')}; ask for smaller --sizes"
            )
        epoch += 1


def peak_of_cpu(profiler: Any) -> int | None:
    """The most bytes that torch's allocator had handed out at a time since the profiler began.

    Blocks are told apart by their addresses: now and then torch reports the end of a block that was handed out before
    it was asked to report, with the size of another one that had that address in an earlier measurement.
    """
    changes = sorted(
        _allocations(profiler.kineto_results.experimental_event_tree()), key=lambda event: int(event.start_time_ns)
    )
    held: dict[int, int] = {}
    total = most = 0
    for change in changes:
        address, size = change.extra_fields.ptr, change.extra_fields.alloc_size
        total -= held.pop(address, 0)
        if size > 0:
            held[address] = size
            total += size
            most = max(most, total)
    return most if changes else None


def _allocations(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        fields = event.extra_fields
        if isinstance(fields, torch._C._profiler._ExtraFields_Allocation) and fields.device.type == "cpu":
            yield event
        yield from _allocations(event.children)
