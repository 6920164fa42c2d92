"""Activations under a budget of memory: blocks are found and measured, and from then on run under a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from virtualflow.memory import Action, BlockPlan, Plan, Planner, Point, Profile, Wait, profile_for
from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.copies import open_copies
from virtualflow.memory.activations.executor import Executor
from virtualflow.memory.activations.measuring import Probe, chain_profile
from virtualflow.memory.activations.options import Memory
from virtualflow.memory.activations.settings import ActivationSettings

logger = logging.getLogger("virtualflow.worker")

_KEEP = BlockPlan(Action.KEEP)


class Activations:
    """What becomes of a model's activations in one worker.

    Until enough is measured, each block is recomputed, which needs the least memory; or all are treated as the user
    says.

    Args:
        model: whose blocks.
        device: of the model.
        memory: what the user says.
        micro_batch: samples of a virtual node.
        virtual_nodes: of the job.
        optimizer_bytes: asks for the bytes of the optimizer's state, where ``memory`` has it.
        settings: how much is measured.

    Raises:
        ConfigurationError: the model has no such blocks.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        memory: Memory,
        *,
        micro_batch: int,
        virtual_nodes: int,
        optimizer_bytes: Callable[[], int],
        settings: ActivationSettings,
    ) -> None:
        blocks, said = find_blocks(model, memory.blocks)
        self._memory, self._micro_batch, self._virtual_nodes = memory, micro_batch, virtual_nodes
        self._optimizer_bytes, self._settings = optimizer_bytes, settings
        self._length = len(blocks)
        self.plan: Plan | None = None
        """``None``: not enough is measured yet."""
        self.profile: Profile | None = None
        first = Action.RECOMPUTE if memory.activations == "auto" else Action(memory.activations)
        self._probe = Probe(model, blocks, device, again=first is Action.RECOMPUTE)
        self.executor = Executor(model, blocks, device, open_copies(device))
        self.executor.observer = self._probe
        segments = [block if first is Action.RECOMPUTE else None for block in range(len(blocks))]
        self.executor.follow([BlockPlan(first, segment) for segment in segments], memory.budget.host)
        self._said = said

    def close(self) -> None:
        """Leave the model as it was."""
        self.executor.close()

    def begin(self) -> None:
        """The user's code gets a micro-batch."""
        self.executor.begin()
        self._probe.begin_micro_batch()

    def end(self, size: int) -> None:
        """It has computed on one of ``size`` samples."""
        if self.plan is None and size == self._micro_batch:
            self._probe.end_micro_batch()

    def committed(self) -> Plan | None:
        """A step is made, so that the optimizer has its state: make the plan, once enough is measured, and return it.

        Raises:
            DoesNotFit: there is none within the budget.
            ConfigurationError: no block has run.
        """
        settings = self._settings
        if self.plan is not None or self._probe.micro_batches < settings.warm_up + settings.samples:
            return None
        size = self._probe.size(self._micro_batch, settings.warm_up)
        ran, budget = self._probe.ran, self._memory.budget
        copies = self.executor.ledger.copies
        limit, copies.ring.limit = copies.ring.limit, None
        chain = chain_profile(self._probe, [size], copies, settings, optimizer=self._optimizer_bytes())
        copies.ring.limit = limit
        self.profile = profile_for(chain, self._micro_batch, self._virtual_nodes)
        planner = Planner(self.profile, settings.planner)
        chosen = self._memory.activations
        if chosen == "auto" and budget.host is None:
            budget = replace(budget, host=chain.host_bytes)
        self.plan = planner.plan(budget) if chosen == "auto" else planner.uniform(Action(chosen), budget)
        self.executor.observer = None
        whole = [_KEEP] * self._length
        for number, of_block in zip(ran, renumber(self.plan, ran), strict=True):
            whole[number] = of_block
        waits = [Wait(Point(wait.point.kind, ran[wait.point.block]), wait.leaving) for wait in self.plan.waits]
        state = self.profile.optimizer_bytes if budget.optimizer == "host" else 0
        self.executor.follow(whole, None if budget.host is None else budget.host - state, waits)
        logger.warning("memory: %s; %s", self._said, self.plan.reason)
        return self.plan


def renumber(plan: Plan, ran: list[int]) -> Iterable[BlockPlan]:
    """The plans of blocks, with the numbers that these have among all: not every one may have run."""
    for block in plan.blocks:
        prefetch = block.prefetch
        yield BlockPlan(
            block.action,
            None if block.segment is None else ran[block.segment],
            None if prefetch is None else Point(prefetch.kind, ran[prefetch.block]),
        )


def bytes_of_state(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Bytes of the optimizer's state on that device."""
    return sum(
        value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.device == device
    )
