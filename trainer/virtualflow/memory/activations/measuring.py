"""Measures a model as a chain of blocks, while the user's own loop runs: times, and the bytes of what autograd saves.

Sizes are those of storages, each once. What a block has saved of its own output is the input of the next one, and is
counted there; the block itself needs it in its backward pass, when it has come to be of nobody else's use, so it is a
part of its *workspace* there, and where it is computed again. Workspace is counted in the first micro-batch
(:mod:`live_bytes`).

What a plan asks for beside computing (autograd's tensors are put away and given back, what a block finds is noted and
put back) is no part of a block's forward and backward time. Where the block is computed again meanwhile, that and what
the second forward pass takes beyond the first one are its *overhead*. On CUDA what is beside has no time of its own:
it is done while the device computes.

What enters a second block later (a skip) is counted in the first one, and told beside: it is there until the second one
has it, whatever becomes of the first, and so is its gradient from the second one's backward pass to the first one's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from virtualflow.errors import ConfigurationError
from virtualflow.memory import Action, BlockPlan, Point
from virtualflow.memory.activations.blocks import Named, find_blocks
from virtualflow.memory.activations.copies import Copies, open_copies
from virtualflow.memory.activations.executor import Divided, Executor
from virtualflow.memory.activations.ledger import Kept, Packed, key_of
from virtualflow.memory.activations.live_bytes import Peaks, count_peaks
from virtualflow.memory.activations.visits import Visit, all_here, as_it_is
from virtualflow.memory.settings import SMALL_BUFFER, ActivationSettings
from virtualflow.protocol.device_profile import BlockProfile, ChainProfile, ChainSize, SkipProfile
from virtualflow.protocol.wording import counted
from virtualflow.reduction import OWN_TYPES, Precision

_Made = TypeVar("_Made")
_LEAST = 1e-9
"""Seconds that anything takes."""


@dataclass
class _Seen:
    forward: float = 0.0
    backward: float = 0.0
    again: float = 0.0
    """Of the second forward pass, if there was one,"""
    beside: float = 0.0
    """and what the plan took beside all these."""
    saved: int = 0
    boundary: int = 0
    peaks: Peaks | None = None
    workspace: int = 0
    backward_workspace: int | None = None
    output: int = 0
    """Bytes that it has saved of its outputs."""
    joins: bool = False
    ahead: int = 0
    """Gradients in the pass back through what was saved outside of blocks right before it."""

    @property
    def overhead(self) -> float:
        """What it took to compute the block again, beyond its forward pass; 0 if it was not."""
        return self.again + self.beside - self.forward if self.again else 0.0


class _Outside:
    """Storages of what autograd has saved outside of blocks, each once, as long as it needs them."""

    def __init__(self) -> None:
        self.bytes = self.peak = 0
        self._times: dict[int, int] = {}

    def __contains__(self, key: int) -> bool:
        return key in self._times

    def add(self, key: int, size: int) -> None:
        self._times[key] = self._times.get(key, 0) + 1
        if self._times[key] == 1:
            self.bytes += size
            self.peak = max(self.peak, self.bytes)

    def remove(self, key: int, size: int) -> None:
        self._times[key] -= 1
        if not self._times[key]:
            del self._times[key]
            self.bytes -= size


class _Held(Kept):
    """A tensor that autograd has saved outside of blocks."""

    __slots__ = ("_known", "_outside")

    def __init__(self, tensor: Tensor, outside: _Outside) -> None:
        super().__init__(tensor)
        self._outside, self._known = outside, (key_of(tensor), tensor.untyped_storage().nbytes())
        outside.add(*self._known)

    def __del__(self) -> None:
        self._outside.remove(*self._known)


@dataclass
class _MicroBatch:
    blocks: list[_Seen]
    inputs: dict[int, int] = field(default_factory=dict)
    """Bytes of the user's data that enter blocks."""
    skips: dict[int, SkipProfile] = field(default_factory=dict)
    """What enters a second block; blocks are numbered as among all."""
    left: int = 0
    """Bytes that blocks have saved of outputs that no block gets."""
    outside: _Outside = field(default_factory=_Outside)
    before: int = 0
    """Bytes of these when the last block began, so that they are there as long as blocks run,"""
    largest: int = 0
    """and the largest storage that was saved since."""

    @property
    def gradients(self) -> int:
        """The most at a time in the pass back through what was saved since: two, none larger than the largest of it."""
        return 2 * self.largest

    @property
    def behind(self) -> int:
        """The most that what follows the blocks needs at a time, while they wait for it."""
        return self.outside.peak - self.before + self.gradients


class Probe:
    """Observes the blocks of an executor.

    Args:
        again: whether a block may be called once more, to count what it needs for a moment.
        divided: ``None``: every parameter is where it is.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[Named],
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        *,
        again: bool = True,
        divided: Divided | None = None,
    ) -> None:
        self._model, self._blocks, self._device, self._clock = model, blocks, device, clock
        self._count, self._divided = again, divided
        self._measured: list[_MicroBatch] = []
        self._held: dict[int, Tensor] = {}
        """What the running block has saved: held, so that no two of them get the same place."""
        self._handed: dict[int, int] = {}
        """What the last block has saved of its outputs, in bytes."""
        self._entering: dict[int, tuple[ref[Tensor], int]] = {}
        """What has entered a block, and which."""
        self._began = 0.0
        self._current: int | None = None
        """The block whose backward pass runs."""
        self._repeated: tuple[int, float] | None = None
        """The block that is computed again, and since when."""
        self._again = self._aside = 0.0
        """Seconds of that since ``_began``, and of what is not the model's."""
        self.begin_micro_batch()

    @property
    def micro_batches(self) -> int:
        return len(self._measured)

    def begin_micro_batch(self) -> None:
        self._now = _MicroBatch([_Seen() for _ in self._blocks])
        self._held.clear()
        self._handed.clear()
        self._entering.clear()
        self._current = self._repeated = None

    def end_micro_batch(self) -> None:
        self._now.left += sum(self._handed.values())
        self._measured.append(self._now)
        self.begin_micro_batch()

    # --- what an executor tells ---------------------------------------------------------------------------------------

    def begin(self, visit: Visit, inputs: list[Tensor], arguments: Any, options: Any, *, joins: bool) -> None:
        seen, boundary = self._now.blocks[visit.block], {}
        seen.joins = joins
        seen.ahead = max(seen.ahead, self._now.gradients)
        self._now.before, self._now.largest = self._now.outside.bytes, 0
        later: dict[int, tuple[int, int]] = {}
        for place, tensor in enumerate(inputs):
            key, size = key_of(tensor), tensor.untyped_storage().nbytes()
            if tensor.grad_fn is not None:
                before = self._entering.get(key)
                if before is not None and before[0]() is not None:
                    later[key] = place, size
                else:
                    boundary[key] = size
                    self._entering[key] = ref(tensor), visit.block
            elif key not in visit.permanent and key not in self._now.outside:
                self._now.inputs[key] = size
        seen.boundary += sum(boundary.values())
        for key, size in self._handed.items():
            if key not in boundary:
                self._now.left += size
        self._handed = {}
        if self._count and not self._measured:
            divided = self._divided
            memory = None if divided is None else divided.memory()
            gathered = all_here(visit.module) if divided is None else divided.gathered(visit.module)
            # What this one more call saves is not outside of blocks, and gone at once.
            with gathered, saved_tensors_hooks(as_it_is, as_it_is):
                seen.peaks = count_peaks(visit.module, arguments, options, self._device, memory)
        for key, (place, size) in later.items():
            self._note_skip(key, size, visit.block, size if seen.peaks is None else seen.peaks.gradients[place])
        self._entered = boundary
        self._began, self._aside = self._time(), 0.0

    def _note_skip(self, key: int, size: int, block: int, gradient: int) -> None:
        first = self._entering[key][1]
        known = self._now.skips.get(key)
        if block <= first:  # of blocks in another order nothing is known
            self._now.left += size
            return
        gradient = max(gradient, known.gradient_bytes if known is not None else 0)
        size = 0 if key in self._now.outside else size
        self._now.skips[key] = SkipProfile(first, block, size, gradient)

    def outside(self, tensor: Tensor) -> Packed:
        key = key_of(tensor)
        if key in self._now.inputs:
            return Kept(tensor)
        self._handed.pop(key, None)
        if tensor.is_floating_point() or tensor.is_complex():
            self._now.largest = max(self._now.largest, tensor.untyped_storage().nbytes())
        return _Held(tensor, self._now.outside)

    def saved(self, visit: Visit, tensor: Tensor) -> None:
        _, took = self._timed(partial(self._hold, visit, tensor))
        self._aside += took

    def _hold(self, visit: Visit, tensor: Tensor) -> None:
        if visit.counts(tensor):
            self._held[key_of(tensor)] = tensor.detach()

    def beside(self, block: int, do: Callable[[], _Made]) -> _Made:
        again = self._again
        made, took = self._timed(do)
        took = max(0.0, took - (self._again - again))
        self._aside += took
        self._now.blocks[block].beside += took
        return made

    def _timed(self, do: Callable[[], _Made]) -> tuple[_Made, float]:
        if self._device.type == "cuda":
            return do(), 0.0
        began = self._clock()
        made = do()
        return made, self._clock() - began

    def end(self, visit: Visit, outputs: list[Tensor]) -> None:
        seen = self._now.blocks[visit.block]
        out = {key_of(tensor): tensor.untyped_storage().nbytes() for tensor in outputs}
        saved = 0
        seen.forward += self._time() - self._began - self._aside
        for key, tensor in self._held.items():
            size = tensor.untyped_storage().nbytes()
            if key in self._entered:
                continue
            if key in out:
                self._handed[key] = size
            else:
                saved += size
        self._held = {}
        seen.saved += saved
        seen.output = max(seen.output, sum(self._handed.values()))
        if seen.peaks is not None:
            made = sum(out.values())
            gradients = sum(each.nbytes for each in visit.module.parameters() if each.requires_grad)
            through = made + sum(self._entered.values()) + gradients
            seen.workspace = max(seen.workspace, seen.peaks.forward - made - saved)
            beyond = seen.peaks.backward - through - saved
            known = seen.backward_workspace
            seen.backward_workspace, seen.peaks = beyond if known is None else max(known, beyond), None

    def reach(self, point: Point) -> None:
        now = self._time()
        if point.kind == "recompute":
            self._end_again(now)
            self._repeated = point.block, now
            return
        if self._current is None:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        self._close(now)
        self._current = point.block

    def recomputed(self) -> None:
        self._end_again(self._time())

    def _end_again(self, now: float) -> None:
        if self._repeated is not None:
            block, began = self._repeated
            self._now.blocks[block].again += now - began
            self._again += now - began
            self._repeated = None

    def _end_backward(self) -> None:
        self._close(self._time())
        self._current = None

    def _close(self, now: float) -> None:
        if self._current is not None:
            self._now.blocks[self._current].backward += now - self._began - self._again - self._aside
        self._began, self._again, self._aside = now, 0.0, 0.0

    def _time(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()

    # --- what it comes to ---------------------------------------------------------------------------------------------

    @property
    def ran(self) -> list[int]:
        found = [
            block for block in range(len(self._blocks)) if any(each.blocks[block].forward for each in self._measured)
        ]
        if not found:
            raise ConfigurationError(
                "none of the model's blocks has run in a micro-batch; name those that do: "
                'vf.Memory(..., blocks=["first", "second"])'
            )
        return found

    def size(self, micro_batch: int, warm_up: int) -> ChainSize:
        """All blocks that have run, for micro-batches of so many samples.

        Times are without those of the first ``warm_up`` micro-batches.
        """
        timed = self._measured[warm_up:] or self._measured
        rows = []
        behind = max(each.behind for each in self._measured)
        for block in self.ran:
            name, module = self._blocks[block]
            parameters = list(module.parameters())

            def most(read: Callable[[_Seen], int], block: int = block) -> int:
                return max(read(each.blocks[block]) for each in self._measured)

            def median(read: Callable[[_Seen], float], block: int = block) -> float:
                return max(_LEAST, statistics.median(read(each.blocks[block]) for each in timed))

            rows.append(
                BlockProfile(
                    name=name,
                    forward_seconds=median(lambda seen: seen.forward),
                    backward_seconds=median(lambda seen: seen.backward),
                    saved_bytes=most(lambda seen: seen.saved),
                    boundary_bytes=most(lambda seen: seen.boundary),
                    parameter_bytes=sum(parameter.nbytes for parameter in parameters),
                    gradient_bytes=sum(parameter.nbytes for parameter in parameters if parameter.requires_grad),
                    workspace_bytes=max(most(lambda seen: seen.workspace), behind if block == self.ran[-1] else 0),
                    backward_workspace_bytes=self._backward_workspace(block),
                    output_bytes=most(lambda seen: seen.output),
                    overhead_seconds=max(0.0, statistics.median(each.blocks[block].overhead for each in timed)),
                    joins=all(each.blocks[block].joins for each in self._measured),
                )
            )
        other = max(sum(each.inputs.values()) + each.left + each.before for each in self._measured)
        return ChainSize(micro_batch, tuple(rows), other, self._skips())

    def _backward_workspace(self, block: int) -> int:
        """As counted; if it was not, the outputs that are still needed are known.

        What is outside right before it has its turn when what the block has saved is gone.
        """
        seen = [each.blocks[block] for each in self._measured]
        counted = [each.backward_workspace for each in seen if each.backward_workspace is not None]
        inside = max(counted, default=max(each.output for each in seen))
        return max(inside, *(each.ahead - each.saved for each in seen))

    def _skips(self) -> tuple[SkipProfile, ...]:
        """The most bytes from a block to a later one, in any micro-batch; numbered as among those that have run."""
        place = {block: number for number, block in enumerate(self.ran)}
        most: dict[tuple[int, int], SkipProfile] = {}
        for each in self._measured:
            sums: dict[tuple[int, int], SkipProfile] = {}
            for skip in each.skips.values():
                way = place[skip.first], place[skip.last]
                before = sums.get(way, SkipProfile(*way, 0, 0))
                sums[way] = SkipProfile(
                    *way, before.skip_bytes + skip.skip_bytes, before.gradient_bytes + skip.gradient_bytes
                )
            for way, skip in sums.items():
                known = most.get(way, skip)
                size = max(known.skip_bytes, skip.skip_bytes)
                most[way] = SkipProfile(*way, size, max(known.gradient_bytes, skip.gradient_bytes))
        return tuple(most[way] for way in sorted(most))

    def fixed_bytes(self) -> int:
        """What else is on the device all the time: parameters outside of blocks with their gradients, and buffers.

        Of small buffers a block that is computed again has copies; they are counted whether it is or not.
        """
        inside = {id(parameter) for block in self.ran for parameter in self._blocks[block][1].parameters()}
        outside = [parameter for parameter in self._model.parameters() if id(parameter) not in inside]
        copied = {id(buffer): buffer for block in self.ran for buffer in self._blocks[block][1].buffers()}.values()
        return (
            sum(parameter.nbytes * (2 if parameter.requires_grad else 1) for parameter in outside)
            + sum(buffer.nbytes for buffer in self._model.buffers())
            + sum(buffer.nbytes for buffer in copied if buffer.nbytes <= SMALL_BUFFER)
        )

    def sum_bytes(self, precision: Precision) -> int:
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        return sum(parameter.numel() * precision.of(parameter.dtype).itemsize for parameter in trained)


def measure_copies(copies: Copies, settings: ActivationSettings) -> tuple[float, float]:
    """Bytes per second from the device to the host, and back."""
    source = torch.zeros(settings.probe, dtype=torch.uint8, device=copies.device)
    out, back = [], []

    def now() -> float:
        if copies.device.type == "cuda":
            torch.cuda.synchronize(copies.device)
        return time.perf_counter()

    for _ in range(settings.copies + 1):  # the first one makes the buffer
        began = now()
        copy = copies.out(source, lambda size: None)
        assert copy is not None
        copies.reclaim()
        gone = now()
        copies.arrive(copies.back(copy))
        out.append(gone - began)
        back.append(now() - gone)
    return settings.probe / statistics.median(out[1:]), settings.probe / statistics.median(back[1:])


def chain_profile(
    probe: Probe,
    sizes: Sequence[ChainSize],
    copies: Copies,
    settings: ActivationSettings,
    *,
    optimizer: int,
    scratch: bool = False,
    precision: Precision = OWN_TYPES,
) -> ChainProfile:
    out, back = measure_copies(copies, settings)
    gradients, sums = (probe.sum_bytes(of) for of in (OWN_TYPES, precision))
    return ChainProfile(
        out_bytes_per_second=out,
        in_bytes_per_second=back,
        optimizer_bytes=optimizer,
        fixed_bytes=probe.fixed_bytes(),
        sum_bytes=sums,
        gradient_bytes=None if gradients == sums else gradients,
        scratch=scratch,
        device_bytes=torch.cuda.get_device_properties(copies.device).total_memory
        if copies.device.type == "cuda"
        else None,
        # A copy of what is on a CPU would lie in the same memory.
        host_bytes=0 if copies.device.type == "cpu" else None,
        sizes=tuple(sizes),
    )


# Measures a model's blocks for ``virtualflow profile``, at one size of micro-batches after the other.


class ChainMeasurement:
    """What a profile says of a model's blocks. While they are measured everything is kept, and
    computed again as well, to see what that takes.

    A model whose blocks cannot be measured is no error: :attr:`said` says why.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        wanted: Sequence[str | nn.Module] | None,
        settings: ActivationSettings,
        *,
        scratch: bool = False,
        precision: Precision = OWN_TYPES,
    ) -> None:
        self._model, self._device, self._settings = model, device, settings
        self._scratch, self._precision = scratch, precision
        self._blocks: list[Named] = []
        self._sizes: list[ChainSize] = []
        self._probe: Probe | None = None
        self.said = ""
        """Which blocks are measured, or why there are none."""
        try:
            self._blocks, self.said = find_blocks(model, wanted)
        except ConfigurationError as error:
            self.give_up(str(error))

    @property
    def wanted(self) -> bool:
        return bool(self._blocks)

    @contextmanager
    def size(self, micro_batch: int) -> Iterator[Callable[[], None]]:
        """All that the user's code computes meanwhile is measured, as micro-batches of so many samples.

        Yields:
            What is to be called between two of them, and behind the last one.
        """
        executor = Executor(self._model, self._blocks, self._device, rehearses=True)
        executor.follow([BlockPlan(Action.RECOMPUTE, block) for block in range(len(self._blocks))])
        probe = executor.observer = Probe(self._model, self._blocks, self._device)
        executor.begin()

        def done() -> None:
            probe.end_micro_batch()
            executor.begin()

        try:
            yield done
        finally:
            executor.close()
        try:
            size = probe.size(micro_batch, self._settings.warm_up)
        except ConfigurationError as error:
            self.give_up(str(error))
            return
        names = [block.name for block in size.blocks]
        if self._sizes and names != [block.name for block in self._sizes[0].blocks]:
            self.give_up(f"other blocks run in micro-batches of {counted(micro_batch, 'sample')} than in smaller ones")
            return
        self._probe = probe
        self._sizes.append(size)

    def finish(self, optimizer_bytes: Callable[[], int]) -> ChainProfile | None:
        if self._probe is None:
            return None
        copies = open_copies(self._device)
        try:
            state = optimizer_bytes()
            return chain_profile(
                self._probe,
                self._sizes,
                copies,
                self._settings,
                optimizer=state,
                scratch=self._scratch,
                precision=self._precision,
            )
        except torch.OutOfMemoryError:
            self.give_up("the optimizer's state does not fit beside them")
            return None

    def give_up(self, why: str) -> None:
        """Say why nothing is measured."""
        self._blocks, self._sizes, self._probe = [], [], None
        self.said = f"no blocks were measured, so that no memory can be planned: {why}"
