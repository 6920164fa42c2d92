"""Measures a model's blocks for ``virtualflow profile``, at one size of micro-batches after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from virtualflow.errors import ConfigurationError
from virtualflow.memory import Action, BlockPlan
from virtualflow.memory.activations.blocks import Named, find_blocks
from virtualflow.memory.activations.copies import open_copies
from virtualflow.memory.activations.executor import Executor
from virtualflow.memory.activations.measuring import Probe, chain_profile
from virtualflow.memory.activations.settings import ActivationSettings
from virtualflow.protocol.chain_profile import ChainProfile, ChainSize
from virtualflow.protocol.wording import counted


class ChainMeasurement:
    """What a profile says of a model's blocks. While they are measured everything is kept, and
    computed again as well, to see what that takes.

    A model whose blocks cannot be measured is no error: :attr:`said` says why.

    Args:
        model: whose blocks.
        device: of the model.
        wanted: its blocks, as the user says; ``None``: they are found.
        settings: how copies are measured, and how many micro-batches do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        wanted: Sequence[str | nn.Module] | None,
        settings: ActivationSettings,
    ) -> None:
        self._model, self._device, self._settings = model, device, settings
        self._blocks: list[Named] = []
        self._sizes: list[ChainSize] = []
        self._probe: Probe | None = None
        """Of the last size."""
        self.said = ""
        """Which blocks are measured, or why there are none."""
        try:
            self._blocks, self.said = find_blocks(model, wanted)
        except ConfigurationError as error:
            self._give_up(str(error))

    @property
    def wanted(self) -> bool:
        """Whether there is something to measure."""
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
            self._give_up(str(error))
            return
        names = [block.name for block in size.blocks]
        if self._sizes and names != [block.name for block in self._sizes[0].blocks]:
            self._give_up(f"other blocks run in micro-batches of {counted(micro_batch, 'sample')} than in smaller ones")
            return
        self._probe = probe
        self._sizes.append(size)

    def finish(self, optimizer_bytes: Callable[[], int]) -> ChainProfile | None:
        """What was measured; ``None``: no blocks were.

        Args:
            optimizer_bytes: asks for those of the optimizer's state on the device.
        """
        if self._probe is None:
            return None
        copies = open_copies(self._device)
        try:
            return chain_profile(self._probe, self._sizes, copies, self._settings, optimizer=optimizer_bytes())
        except torch.OutOfMemoryError:
            self._give_up("the optimizer's state does not fit beside them")
            return None

    def _give_up(self, why: str) -> None:
        self._blocks, self._sizes, self._probe = [], [], None
        self.said = f"no blocks were measured, so that no memory can be planned: {why}"
