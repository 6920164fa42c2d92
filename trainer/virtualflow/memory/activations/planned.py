"""Activations under a budget of memory: blocks are found and measured, and from then on run under a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from virtualflow._arguments import checked_class
from virtualflow.errors import ConfigurationError
from virtualflow.memory import (
    Action,
    BlockPlan,
    Budget,
    DoesNotFit,
    Placement,
    Plan,
    Planner,
    Point,
    Profile,
    Wait,
    divided_profile,
    parse_bytes,
    profile_for,
)
from virtualflow.memory.activations.blocks import find_blocks
from virtualflow.memory.activations.copies import open_copies
from virtualflow.memory.activations.executor import Divided, Executor
from virtualflow.memory.activations.measuring import Probe, chain_profile
from virtualflow.memory.settings import ActivationSettings
from virtualflow.protocol.device_profile import ChainProfile
from virtualflow.protocol.settings import ActivationsChoice
from virtualflow.protocol.wording import counted
from virtualflow.reduction import OWN_TYPES, Precision

# What a user says about memory: :class:`Memory`, an argument of :func:`virtualflow.elastic`.

Order = Literal["node-major", "layer-major"]


@checked_class("vf.Memory")
@dataclass(frozen=True)
class Memory:
    """How much memory a worker may use, what becomes of activations, and where the optimizer is.

    No bits depend on it but for ``optimizer``, so each worker may have its own, and another one after a restart.

    Args:
        device: the device's memory for this training, like ``"24GiB"``, or bytes. Without it, all activations are kept.
        host: the host's memory for what is swapped, and for an optimizer that is there; without it, as much as is
            needed.
        activations: ``"auto"``: for each block of the model what makes steps shortest within this memory. ``"keep"``,
            ``"recompute"`` or ``"swap"``: the same for all blocks, refused if it does not fit.
        blocks: the model's blocks, in the order in which they run: modules, or their names. Without them, those
            of an ``nn.ModuleList`` or ``nn.Sequential`` that cut the model best, and others of the same class.
        optimizer: ``"host"``: its state is in the host's memory, and it steps there. That may round otherwise than the
            device does, so it is the same in all workers, for a job's life. It changes nothing where a device has no
            memory of its own, like the CPU.
        order: ``"node-major"``: one virtual node after the other goes through the whole model. ``"layer-major"``: one
            block after the other runs for all virtual nodes of a worker, for models whose weights do not fit. The model
            is a sequence of blocks, stays on the host, and is trained by :meth:`virtualflow.Step.layer_major`.
        scratch: a directory on a disk. On a CPU, sums of gradients that are not needed soon wait there in files without
            names, so that memory does not grow with the number of virtual nodes: two wait in memory.

    Raises:
        ConfigurationError: a size or a word makes no sense, or there is nothing to do.
    """

    device: str | int | None = None
    host: str | int | None = None
    activations: ActivationsChoice = "auto"
    blocks: Sequence[str | nn.Module] | None = None
    optimizer: Placement = "device"
    order: Order = "node-major"
    scratch: str | Path | None = None

    def __post_init__(self) -> None:
        for name, word, known in (
            ("activations", self.activations, get_args(ActivationsChoice)),
            ("optimizer", self.optimizer, get_args(Placement)),
            ("order", self.order, get_args(Order)),
        ):
            if word not in known:
                words = ", ".join(f'"{one}"' for one in known)
                raise ConfigurationError(f"{name} is {word!r}; it must be one of {words}")
        if self.layer_major and self.activations in ("keep", "swap"):
            raise ConfigurationError(
                f'activations is "{self.activations}", and in layer-major order every block is recomputed; leave it out'
            )
        if self.device is not None:
            _ = self.budget
        elif self.layer_major:
            raise ConfigurationError('layer-major order needs the size of the device; pass device="24GiB"')
        elif self.activations != "auto" or self.host is not None or self.blocks is not None:
            raise ConfigurationError(
                'vf.Memory plans activations for a size of device memory; pass device="24GiB", or whatever there is'
            )
        elif self.optimizer == "device" and self.scratch is None:
            raise ConfigurationError(
                'vf.Memory() says nothing; pass device="24GiB" to plan activations, optimizer="host", or '
                'scratch="/tmp" for sums of gradients'
            )

    @property
    def plans_activations(self) -> bool:
        """Whether a plan says what becomes of activations."""
        return self.device is not None and not self.layer_major

    @property
    def layer_major(self) -> bool:
        """Whether blocks come before virtual nodes."""
        return self.order == "layer-major"

    @property
    def budget(self) -> Budget:
        """The same in bytes, where activations are planned."""
        assert self.device is not None
        return Budget(_bytes(self.device), None if self.host is None else _bytes(self.host), self.optimizer)


def limit(
    said: Memory | None,
    device: int | None,
    host: int | None,
    activations: ActivationsChoice | None = None,
    optimizer: Placement | None = None,
) -> Memory | None:
    """What a script says of memory, with what whoever runs it says instead; ``None``: nobody says anything."""
    words = {"device": device, "host": host, "activations": activations, "optimizer": optimizer}
    instead: dict[str, Any] = {name: word for name, word in words.items() if word is not None}
    if instead == {"optimizer": "device"} and (said is None or (said.device is None and said.scratch is None)):
        return None  # where it is anyway; a script without a size says no more than another place
    if said is None:
        return Memory(**instead) if instead else None
    return replace(said, **instead)


def _bytes(size: str | int) -> int:
    return parse_bytes(size) if isinstance(size, str) else size


logger = logging.getLogger("virtualflow.worker")

_KEEP = BlockPlan(Action.KEEP)


class Activations:
    """What becomes of a model's activations in one worker.

    Until enough is measured, each block is recomputed, which needs the least memory; or all are treated as the user
    says.

    Args:
        optimizer_bytes: asks for the bytes of the optimizer's state, where ``memory`` has it; of all workers together,
            where parameters are divided.
        divided: the parameters, where they are divided over workers. Each change of their number changes what is left
            for activations, and with it the plan.
        copies: how many workers keep each of them then.
        precision: in which gradients are summed up.
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
        divided: Divided | None = None,
        copies: int = 1,
        precision: Precision = OWN_TYPES,
    ) -> None:
        blocks, said = find_blocks(model, memory.blocks)
        self._memory, self._micro_batch, self._virtual_nodes = memory, micro_batch, virtual_nodes
        self._optimizer_bytes, self._settings = optimizer_bytes, settings
        self._divided, self._copies, self._precision = divided, copies, precision
        self._length = len(blocks)
        self.plan: Plan | None = None
        """``None``: not enough is measured yet."""
        self._planned_for = 0
        """Over how many workers parameters were divided when it was made."""
        self._chain: ChainProfile | None = None
        self._planner: Planner | None = None
        self.profile: Profile | None = None
        first = Action.RECOMPUTE if memory.activations == "auto" else Action(memory.activations)
        self._probe = Probe(model, blocks, device, again=first is Action.RECOMPUTE, divided=divided)
        self.executor = Executor(model, blocks, device, open_copies(device), divided=divided)
        self.executor.observer = self._probe
        segments = [block if first is Action.RECOMPUTE else None for block in range(len(blocks))]
        self.executor.follow([BlockPlan(first, segment) for segment in segments], memory.budget.host)
        self._said = said

    def close(self) -> None:
        self.executor.close()

    def begin(self) -> None:
        self.executor.begin()
        self._probe.begin_micro_batch()

    def end(self, size: int) -> None:
        """A pass is over.

        Args:
            size: its samples; 0 if it did not go through all blocks, so that it shows nothing.
        """
        self.executor.end()
        if self.plan is None and size == self._micro_batch:
            self._probe.end_micro_batch()

    def committed(self) -> Plan | None:
        """A step is made, so that the optimizer has its state: make the plan, once enough is measured, and return it.

        Raises:
            DoesNotFit: there is none within the budget.
        """
        settings = self._settings
        if self.plan is not None or self._probe.micro_batches < settings.warm_up + settings.samples:
            return None
        size = self._probe.size(self._micro_batch, settings.warm_up)
        copies = self.executor.ledger.copies
        limit, copies.ring.limit = copies.ring.limit, None
        state, scratch = self._optimizer_bytes(), self._memory.scratch is not None
        self._chain = chain_profile(
            self._probe, [size], copies, settings, optimizer=state, scratch=scratch, precision=self._precision
        )
        copies.ring.limit = limit
        copies.ring.forget()  # how fast copies are was measured by one that is larger than most
        self.executor.observer = None
        return self._follow(self._choose(self._plan_for(self._workers)))

    def entered(self) -> Plan | None:
        """A generation is entered: make another plan, if parameters are divided over another number of workers.

        If there is none within the budget any more, training goes on with the plan that needs the least.
        """
        if self.plan is None or self._planned_for == self._workers:
            return None
        planner = self._plan_for(self._workers)
        try:
            return self._follow(self._choose(planner))
        except DoesNotFit as error:
            if error.smallest is None:
                raise
            logger.warning("memory: with %s now, %s", counted(self._workers, "worker"), error)
            return self._follow(self._choose(planner, error.smallest))

    @property
    def _workers(self) -> int:
        return 1 if self._divided is None else self._divided.workers

    def _plan_for(self, workers: int) -> Planner:
        """What plans beside all else that one of so many workers has."""
        assert self._chain is not None
        of_job = self._chain, self._micro_batch, self._virtual_nodes
        if workers == 1:
            self.profile = profile_for(*of_job)
            return Planner(self.profile, self._settings.planner)
        self.profile = divided_profile(*of_job, workers, self._copies)
        if self._planner is None:
            self._planner = Planner(self.profile, self._settings.planner)
        self._planner = self._planner.beside(self.profile.fixed_bytes)
        return self._planner

    def _choose(self, planner: Planner, device: int | None = None) -> Plan:
        """The plan that is wanted, for so many bytes of the device in place of those that may be used."""
        assert self._chain is not None
        chosen, budget = self._memory.activations, self._memory.budget
        if device is not None:
            budget = replace(budget, device=device)
        if chosen != "auto":
            return planner.uniform(Action(chosen), budget)
        return planner.plan(replace(budget, host=self._chain.host_bytes) if budget.host is None else budget)

    def _follow(self, plan: Plan) -> Plan:
        assert self.profile is not None
        self.plan, self._planned_for = plan, self._workers
        ran, host = self._probe.ran, self._memory.budget.host
        if host is None and self._memory.activations == "auto":
            assert self._chain is not None
            host = self._chain.host_bytes
        whole = [_KEEP] * self._length
        for number, of_block in zip(ran, renumber(plan, ran), strict=True):
            whole[number] = of_block
        waits = [Wait(Point(wait.point.kind, ran[wait.point.block]), wait.leaving) for wait in plan.waits]
        state = self.profile.optimizer_bytes if self._memory.optimizer == "host" else 0
        self.executor.follow(whole, None if host is None else host - state, waits)
        logger.warning("memory: %s; %s", self._said, plan.reason)
        return plan


def renumber(plan: Plan, ran: list[int]) -> Iterable[BlockPlan]:
    """The plans of blocks, with the numbers that these have among all: not every one may have run."""
    for block in plan.blocks:
        prefetch = block.prefetch
        yield BlockPlan(
            block.action,
            None if block.segment is None else ran[block.segment],
            None if prefetch is None else Point(prefetch.kind, ran[prefetch.block]),
        )


def bytes_of_state(states: Iterable[Mapping[str, Any]], device: torch.device) -> int:
    """Bytes of an optimizer's states on that device."""
    return sum(
        value.nbytes
        for state in states
        for value in state.values()
        if isinstance(value, Tensor) and value.device == device
    )
