"""How the VirtualFlow authors' own scheduler shared GPUs: a baseline to compare with, not a policy of the operator.

What their paper says of sharing is in ``scheduling.weighted_fair_share``. This is the rule of the scheduler that they
have published with it and that their logs are of (Or, Zhang and Freedman, MLSys 2022; github.com/andrewor14/models,
deploy/scheduler.py as of September 2020):

- *Sizes* are powers of two, or what a job asks for. Everybody's share by weight is rounded down to one; what is too
  much then is halved away, from the lightest job on. Whose share covers what it asks for gets just that, and the others
  share the rest anew. What is left over in the end doubles jobs, the heaviest first.
- *Admission* is from the head of the queue, by priority, then age: it is let in unless somebody who runs and has a
  higher priority would get less for it. The first who is not let in holds back all behind it. Nobody is stopped.

So a light job waits for as long as heavier ones come, and units may stay idle: which is what it is a baseline for.
"""

from __future__ import annotations

from collections.abc import Sequence

from virtualflow.protocol.wording import counted
from virtualflow_operator.scheduling import Allocation, Capacity, Demand
from virtualflow_operator.scheduling.demand import sort_out
from virtualflow_operator.settings import SchedulingSettings


def power_of_two_share(
    now: float, demands: Sequence[Demand], capacity: Capacity, settings: SchedulingSettings
) -> dict[str, Allocation]:
    """Share capacity by weight in powers of two; a :data:`.scheduling.Policy`.

    It knows neither limits of namespaces nor spot capacity, as the original does not. Where capacity has vanished under
    those that run, the lowest priority goes back to the queue, the last who came first.
    """
    del settings
    able, result = sort_out(demands, Capacity(capacity.total))

    def by_start(demand: Demand) -> tuple[float, float, float, str]:
        return (demand.began if demand.allocated else now, *_in_queue(demand))

    running = sorted((demand for demand in able if demand.allocated), key=by_start)
    waiting = [demand for demand in able if not demand.allocated]
    while (sizes := _shares(running, capacity.total)) is None:
        last = max(running, key=lambda demand: (-demand.priority, *by_start(demand)))
        running.remove(last)
        waiting.append(last)

    admitted = list(running)
    ahead: Demand | None = None
    for demand in sorted(waiting, key=_in_queue):
        if ahead is not None:
            result[demand.name] = Allocation(0, f"waits behind {ahead.name}")
            continue
        tried = _shares(sorted([*admitted, demand], key=by_start), capacity.total)
        wronged = None if tried is None else _wronged(running, demand, sizes, tried)
        if tried is None or wronged is not None:
            ahead = demand
            what = "there is room for its minimum" if wronged is None else f"{wronged.name} need not give way to it"
            result[demand.name] = Allocation(0, f"waits, first in the queue, until {what}")
            continue
        sizes = tried
        admitted.append(demand)
    for demand in admitted:
        result[demand.name] = Allocation(sizes[demand.name], _why(demand, sizes[demand.name]))
    return result


def _in_queue(demand: Demand) -> tuple[float, float, str]:
    return -demand.priority, demand.submitted, demand.name


def _wronged(
    running: Sequence[Demand], newcomer: Demand, before: dict[str, int], after: dict[str, int]
) -> Demand | None:
    """One who runs, has a higher priority than the newcomer and would get less for it."""
    return next((d for d in running if d.priority > newcomer.priority and after[d.name] < before[d.name]), None)


def _shares(jobs: Sequence[Demand], units: int) -> dict[str, int] | None:
    """Workers by job; ``None`` if not even the minimums fit. Of equal weights the first in order halves first."""
    sizes: dict[str, int] = {}
    left = units
    sharing = list(jobs)
    while sharing:
        found = _rounded(sharing, left)
        if found is None:
            return None
        content = [demand for demand in sharing if found[demand.name] >= demand.fixed]
        for demand in content or sharing:
            sizes[demand.name] = min(found[demand.name], demand.fixed)
            left -= sizes[demand.name] * demand.units
        sharing = [demand for demand in sharing if demand.name not in sizes]
    for demand in sorted(jobs, key=lambda demand: -demand.weight):
        size = sizes[demand.name]
        while 2 * size <= demand.fixed and size * demand.units <= left:
            left -= size * demand.units
            size *= 2
        sizes[demand.name] = size
    return sizes


def _rounded(jobs: Sequence[Demand], units: int) -> dict[str, int] | None:
    """Shares by weight in powers of two, what a job asks for aside; ``None`` if not even the minimums fit."""
    weights = sum(demand.weight for demand in jobs)
    sizes = {
        demand.name: max(demand.minimum, _power_of_two(units * demand.weight / weights / demand.units))
        for demand in jobs
    }
    over = sum(sizes[demand.name] * demand.units for demand in jobs) - units
    for demand in sorted(jobs, key=lambda demand: demand.weight):
        size = sizes[demand.name]
        while over > 0 and size > demand.minimum:
            less = max(demand.minimum, size // 2)
            over -= (size - less) * demand.units
            size = less
        sizes[demand.name] = size
    return sizes if over <= 0 else None


def _power_of_two(share: float) -> int:
    """The largest that the share covers; 1 for a share below 1."""
    return 1 << max(1, int(share)).bit_length() - 1


def _why(demand: Demand, workers: int) -> str:
    if workers == demand.fixed:
        return "has what it asks for"
    return f"has its share by weight {demand.weight:g}, in powers of two: {counted(workers, 'worker')}"
