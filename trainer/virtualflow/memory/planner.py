"""From a profile and a budget to a plan, or to the sentence that says what would fit. Pure.

The plan is the fastest of all that were tried (:mod:`virtualflow.memory.search`) that fits into the budget, as the
simulation (:mod:`virtualflow.memory.simulation`) has it.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import cached_property

from virtualflow.errors import DoesNotFit
from virtualflow.memory.model import Action, BlockPlan, Budget, Plan, Point, Profile
from virtualflow.memory.search import Pool
from virtualflow.memory.settings import PlannerSettings
from virtualflow.memory.simulation import (
    JOIN,
    KEEP,
    RECOMPUTE,
    REFETCH,
    SWAP,
    Actions,
    ChainArrays,
    Schedule,
    least_capacity,
    most_backward,
    schedule,
    timeline,
    waits,
)
from virtualflow.protocol.wording import format_bytes

_UNIFORM = {Action.KEEP: KEEP, Action.SWAP: SWAP, Action.RECOMPUTE: RECOMPUTE}


class Planner:
    """All that can be planned for one profile.

    Making one costs nothing; the first plan that is not obvious starts the search, whose result serves all budgets.
    """

    def __init__(self, profile: Profile, settings: PlannerSettings | None = None) -> None:
        self._profile = profile
        self._settings = settings or PlannerSettings()
        self._chain = ChainArrays(profile)

    def beside(self, fixed_bytes: int) -> Planner:
        """The same for these blocks beside another fixed part: what was searched serves again."""
        other = copy(self)
        other._profile = replace(self._profile, fixed_bytes=fixed_bytes)
        return other

    def plan(self, budget: Budget) -> Plan:
        """The fastest plan for that budget; of a larger budget it is never slower."""
        capacity, host = self._capacity(budget), self._host(budget)
        everything = self._uniform(KEEP)
        if least_capacity(self._chain, everything) <= capacity:
            return self._finish(everything, budget, "everything fits")
        # No choice needs less than to swap everything, so this says at once what no search would find.
        found = self._pool.best(capacity, host) if self._least <= capacity else None
        if found is None:
            raise self._refusal(budget)
        chosen = self._finish(found.actions, budget, "")
        return replace(chosen, reason=self._explain(chosen, budget))

    def uniform(self, action: Action, budget: Budget) -> Plan:
        """The plan that treats all blocks alike: each is recomputed alone."""
        actions = self._uniform(_UNIFORM[action])
        least, host = least_capacity(self._chain, actions), self._chain.host_bytes(actions)
        if host > self._host(budget):
            raise self._too_little_host(host, budget)
        if least > self._capacity(budget):
            smallest = least + self._resident(budget)
            raise DoesNotFit(
                f"to {action.value} every block takes {format_bytes(smallest, up=True)} of the device's memory, and "
                f'the budget is {format_bytes(budget.device)}; use activations="auto", or more virtual nodes',
                smallest,
            )
        return self._finish(actions, budget, f"every block: {action.value}")

    def smallest(self, budget: Budget) -> int:
        """The fewest bytes of the device that are enough for some plan, with the host's memory of that budget."""
        host = self._host(budget)
        swapped = self._uniform(SWAP)
        least = self._least if self._chain.host_bytes(swapped) <= host else self._pool.least(host)
        return least + self._resident(budget)

    def keep_bytes(self, budget: Budget) -> int:
        return least_capacity(self._chain, self._uniform(KEEP)) + self._resident(budget)

    # --- parts --------------------------------------------------------------------------------------------------------

    @cached_property
    def _pool(self) -> Pool:
        return Pool(self._chain, self._settings)

    @cached_property
    def _least(self) -> int:
        return least_capacity(self._chain, self._uniform(SWAP))

    def _uniform(self, action: int) -> Actions:
        return bytes([action] * self._chain.length)

    def _resident(self, budget: Budget) -> int:
        return self._profile.resident_bytes(budget.optimizer)

    def _capacity(self, budget: Budget) -> int:
        return budget.device - self._resident(budget)

    def _host(self, budget: Budget) -> int:
        if budget.host is None:
            return self._chain.host_most
        state = self._profile.optimizer_bytes if budget.optimizer == "host" else 0
        if state > budget.host:
            raise self._too_little_host(0, budget)
        return min(budget.host - state, self._chain.host_most)

    def _too_little_host(self, swapped: int, budget: Budget) -> DoesNotFit:
        assert budget.host is not None
        state = self._profile.optimizer_bytes if budget.optimizer == "host" else 0
        parts = [f"what is swapped takes {format_bytes(swapped, up=True)}"] if swapped else []
        parts += [f"the optimizer's state takes {format_bytes(state, up=True)}"] if state else []
        return DoesNotFit(
            f"the host's memory is too small: {' and '.join(parts)}, and the budget is {format_bytes(budget.host)}; "
            f"give it {format_bytes(swapped + state, up=True)}",
            None,
        )

    def _refusal(self, budget: Budget) -> DoesNotFit:
        smallest = self.smallest(budget)
        unlimited = self.smallest(Budget(budget.device, None, budget.optimizer))
        more_host = ""
        if unlimited < smallest:
            state = self._profile.optimizer_bytes if budget.optimizer == "host" else 0
            host = format_bytes(self._chain.host_most + state, up=True)
            more_host = f" ({format_bytes(unlimited, up=True)} with {host} of the host's)"
        return DoesNotFit(
            f"the model does not fit into {format_bytes(budget.device)} of the device's memory: the smallest budget "
            f"that works is {format_bytes(smallest, up=True)}{more_host}; use more virtual nodes, which makes "
            "micro-batches smaller, or a larger device",
            smallest,
        )

    def _explain(self, plan: Plan, budget: Budget) -> str:
        computed = self._chain.forward_until[-1] + self._chain.backward_until[-1]
        again = sum(span.end - span.start for span in plan.timeline.spans if span.kind == "recompute")
        overhead = sum(
            block.overhead_seconds
            for block, treated in zip(self._profile.blocks, plan.blocks, strict=True)
            if treated.action is Action.RECOMPUTE
        )
        of_it = f" ({overhead / computed:.1%} overhead)" if overhead else ""
        waiting = max(0.0, plan.seconds - computed - again)
        return (
            f"to keep everything takes {format_bytes(self.keep_bytes(budget), up=True)}; of {len(plan.blocks)} blocks "
            f"{plan.count(Action.KEEP)} stay, {plan.count(Action.SWAP)} are swapped and "
            f"{plan.count(Action.RECOMPUTE)} recomputed, for {again / computed:.1%} more computing{of_it} and "
            f"{waiting / computed:.1%} of waiting for copies"
        )

    def _finish(self, actions: Actions, budget: Budget, reason: str) -> Plan:
        found = schedule(self._chain, actions, self._capacity(budget))
        assert found is not None
        resident = self._resident(budget)
        times = timeline(self._chain, actions, found, resident)
        # Copies may be faster than foretold, and slower: then what computes waits for them rather than take more.
        peak = max(times.peak - resident, most_backward(self._chain, actions, found))
        state = self._profile.optimizer_bytes if budget.optimizer == "host" else 0
        return Plan(
            _block_plans(actions, found),
            found.seconds,
            resident + peak,
            self._chain.host_bytes(actions) + state,
            reason,
            times,
            waits(self._chain, actions, peak),
        )


def _block_plans(actions: Actions, found: Schedule) -> tuple[BlockPlan, ...]:
    points = {back.block: found.operations[back.operation] for back in found.back}
    plans: list[BlockPlan] = []
    first = 0
    for block, action in enumerate(actions):
        prefetch: Point | None = None
        if action in (SWAP, REFETCH):
            point = points[block]
            prefetch = Point("recompute" if point.recompute else "backward", point.block)
        if action <= SWAP:
            plans.append(BlockPlan(Action.KEEP if action == KEEP else Action.SWAP, prefetch=prefetch))
        else:
            first = first if action == JOIN else block
            plans.append(BlockPlan(Action.RECOMPUTE, segment=first, prefetch=prefetch))
    return tuple(plans)


def plan(profile: Profile, budget: Budget, settings: PlannerSettings | None = None) -> Plan:
    """The fastest plan for one budget; :class:`Planner` serves many budgets of one profile."""
    return Planner(profile, settings).plan(budget)
