"""What fits: for each number of virtual nodes that divides a batch, the plan of one device. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from virtualflow.errors import ConfigurationError, DoesNotFit
from virtualflow.memory.measured import profile_for
from virtualflow.memory.model import Budget, Plan
from virtualflow.memory.planner import Planner
from virtualflow.memory.settings import PlannerSettings
from virtualflow.protocol.chain_profile import ChainProfile
from virtualflow.protocol.settings import MAX_VIRTUAL_NODES
from virtualflow.protocol.sizes import format_bytes
from virtualflow.protocol.wording import counted


@dataclass(frozen=True)
class Fit:
    """One number of virtual nodes on one device."""

    virtual_nodes: int
    micro_batch: int
    keep_bytes: int
    """What would be needed without a plan."""
    smallest_bytes: int
    """What would be needed at least."""
    plan: Plan | None
    """``None``: nothing fits."""
    reason: str
    """Of the plan, or why there is none."""

    @property
    def step_seconds(self) -> float | None:
        """A step's computing, if one device computes all virtual nodes."""
        return None if self.plan is None else self.plan.seconds * self.virtual_nodes


def fit(
    chain: ChainProfile, batch: int, virtual_nodes: int, budget: Budget, settings: PlannerSettings, *, fused: int = 1
) -> Fit:
    """What becomes of that many virtual nodes, which divide the batch.

    Args:
        chain: as measured.
        batch: samples of a step.
        virtual_nodes: of the job.
        budget: what may be used.
        settings: how hard the search tries.
        fused: how many of them are computed as one micro-batch.

    Raises:
        ConfigurationError: they do not, or the profile makes no sense.
    """
    micro_batch, left = divmod(batch, virtual_nodes)
    if left or not micro_batch:
        raise ConfigurationError(
            f"{counted(virtual_nodes, 'virtual node')} do not divide a batch of {batch}; name a divisor of it"
        )
    micro_batch *= fused
    planner = Planner(profile_for(chain, micro_batch, virtual_nodes), settings)
    try:
        plan = planner.plan(budget)
    except DoesNotFit as error:
        if error.smallest is None:
            raise
        return Fit(virtual_nodes, micro_batch, planner.keep_bytes(budget), error.smallest, None, str(error))
    return Fit(virtual_nodes, micro_batch, planner.keep_bytes(budget), planner.smallest(budget), plan, plan.reason)


def what_fits(
    chain: ChainProfile,
    batch: int,
    budget: Budget,
    settings: PlannerSettings,
    *,
    more: int,
    tell: Callable[[float], None] = lambda share: None,
) -> tuple[Fit, ...]:
    """Each number of virtual nodes from one that does not fit, if there is one, to the smallest that does and ``more``
    above it: their micro-batches are smaller, so that less must be swapped or computed again. But each doubling has one
    more sum of gradients at rest, so that in the end nothing fits again. ``tell`` hears which share of the numbers is
    done; there may be no need for all.

    Raises:
        DoesNotFit: not even micro-batches of one sample fit.
    """
    rows: list[Fit] = []
    smallest: list[int] = []
    numbers = [number for number in range(1, min(batch, MAX_VIRTUAL_NODES) + 1) if batch % number == 0]
    for place, virtual_nodes in enumerate(numbers):
        tell(place / len(numbers))
        row = fit(chain, batch, virtual_nodes, budget, settings)
        smallest.append(row.smallest_bytes)
        if row.plan is None:
            if any(each.plan is not None for each in rows):
                break
            rows = [row]
            continue
        rows.append(row)
        if sum(each.plan is not None for each in rows) > more or row.keep_bytes <= budget.device:
            break
    if rows[-1].plan is None:
        raise DoesNotFit(
            f"not even micro-batches of {rows[-1].micro_batch} fit into {format_bytes(budget.device)}: the smallest "
            f"budget that works is {format_bytes(min(smallest), up=True)}; use a larger device, or put the "
            "optimizer's state on the host",
            min(smallest),
        )
    return tuple(rows)
