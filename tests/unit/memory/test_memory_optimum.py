"""Plans of chains that are too long to try all choices: the optimum of an integer program, without the host's memory.

Without copies a choice is a cut of the chain into blocks that are kept and segments that are recomputed. Its time is a
sum over these, and what each of them needs is a number that depends on it alone, beside the bytes that those below it
hold. So the best cut is the answer of a linear program with a variable of 0 or 1 for each, which HiGHS solves.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from chains import profiles
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from tiers import examples, nightly
from virtualflow.memory import Budget, Planner, Profile
from virtualflow.memory.simulation import JOIN, KEEP, RECOMPUTE, Actions, ChainArrays, least_capacity, schedule

Part = tuple[int, int, bool]
"""First and last block, and whether they are recomputed."""


def parts_of(length: int) -> list[Part]:
    segments = [(first, last, True) for first in range(length) for last in range(first, length)]
    return [(block, block, False) for block in range(length)] + segments


def actions_of(parts: list[Part], length: int) -> Actions:
    actions = bytearray([JOIN] * length)
    for first, _, recomputed in parts:
        actions[first] = RECOMPUTE if recomputed else KEEP
    return bytes(actions)


def held_by(chain: ChainArrays, part: Part) -> int:
    """Return the bytes that it holds while others compute."""
    first, _, recomputed = part
    return chain.boundary[first] + (0 if recomputed else chain.saved[first])


def need_of(profile: Profile, part: Part) -> int:
    """Return what it needs beyond those below it: of the chain that begins with it, and in which no more is held above.

    What is above it has run backward by then, and left its gradients; in the forward pass it has not run at all.
    """
    first, last, recomputed = part
    chain = ChainArrays(profile)
    boundary, workspace = chain.boundary, chain.workspace
    gradients = sum(chain.gradient[last + 1 :])
    beyond = boundary[last + 1]
    needs: list[int] = []
    held = boundary[first]
    for block in range(first, last + 1):  # forward: the boundaries within go as they are used
        needs.append(held + chain.saved[block] + boundary[block + 1] + workspace[block])
        held = boundary[first] + boundary[block + 1]
    held = boundary[first] + beyond + gradients
    made = 0
    for block in range(first, last + 1) if recomputed else ():
        made += chain.saved[block] + (boundary[block + 1] if block < last else 0)
        needs.append(held + made + workspace[block] + (chain.output[block] if block == last else 0))
    held += made if recomputed else chain.saved[first]
    for block in range(last, first - 1, -1):
        held += (boundary[block] if block else 0) + chain.gradient[block]
        needs.append(held + chain.backward_workspace[block])
        held -= chain.saved[block] + boundary[block] + boundary[block + 1]
    return max(needs)


def optimum(profile: Profile, capacity: int) -> tuple[float, Actions]:
    """Return the seconds of the fastest choice without the host, and the choice."""
    chain = ChainArrays(profile)
    parts = parts_of(chain.length)
    seconds = [sum(chain.again[first : last + 1]) if recomputed else 0.0 for first, last, recomputed in parts]
    rows: list[tuple[int, int, float]] = []
    below, above = [], []
    for block in range(chain.length):  # each block is in one of them
        rows += [(len(below), place, 1.0) for place, (first, last, _) in enumerate(parts) if first <= block <= last]
        below.append(1.0)
        above.append(1.0)
    most = float(sum(chain.both) + max(need_of(profile, part) for part in parts))
    for place, part in enumerate(parts):  # if it is chosen, it fits beside those below it
        rows += [
            (len(below), other, float(held_by(chain, each))) for other, each in enumerate(parts) if each[1] < part[0]
        ]
        rows.append((len(below), place, most))
        below.append(-np.inf)
        above.append(capacity - need_of(profile, part) + most)
    row, column, value = zip(*rows, strict=True)
    matrix = coo_array((value, (row, column)), shape=(len(below), len(parts)))
    found = milp(
        seconds,
        constraints=LinearConstraint(matrix, below, above),
        integrality=np.ones(len(parts)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    assert found.success, found.message
    chosen = [part for part, value in zip(parts, found.x, strict=True) if value > 0.5]
    total = chain.forward_until[-1] + chain.backward_until[-1] + found.fun
    return total, actions_of(chosen, chain.length)


def cuts(length: int) -> st.SearchStrategy[list[Part]]:
    def parts(borders: list[tuple[bool, bool]]) -> Iterator[Part]:
        first = 0
        for last, (ends, recomputed) in enumerate(borders):
            if ends or not recomputed or last == length - 1:
                if not recomputed:
                    yield from ((block, block, False) for block in range(first, last + 1))
                else:
                    yield first, last, True
                first = last + 1

    border = st.tuples(st.booleans(), st.booleans())
    return st.lists(border, min_size=length, max_size=length).map(lambda borders: list(parts(borders)))


@settings(max_examples=examples(100))
@given(profiles(12, 12), cuts(12))
def test_a_choice_needs_what_the_program_says(profile: Profile, parts: list[Part]) -> None:
    chain = ChainArrays(profile)
    below = [sum(held_by(chain, each) for each in parts if each[1] < part[0]) for part in parts]
    most = max(held + need_of(profile, part) for held, part in zip(below, parts, strict=True))
    assert least_capacity(chain, actions_of(parts, chain.length)) == most


@pytest.mark.parametrize(
    ("length", "count"), [(8, 1), nightly(10, 20), nightly(14, 20), nightly(20, 15), nightly(30, 5)]
)
def test_a_plan_without_the_host_takes_at_most_2_percent_more_than_the_optimum(length: int, count: int) -> None:
    @settings(max_examples=count, phases=(Phase.explicit, Phase.generate), deadline=None)
    @given(profiles(length, length), st.integers(5, 60))
    def try_some(profile: Profile, share: int) -> None:
        planner = Planner(profile)
        least, most = planner.smallest(Budget(1, 0)), planner.keep_bytes(Budget(1, 0))
        budget = Budget(max(1, least + max(0, most - least) * share // 100), 0)
        capacity = budget.device - profile.resident_bytes("device")
        best, actions = optimum(profile, capacity)
        simulated = schedule(ChainArrays(profile), actions, capacity)
        assert simulated is not None, "the program has chosen what does not fit"
        assert simulated.seconds == pytest.approx(best)
        assert 1 - 1e-9 <= planner.plan(budget).seconds / best <= 1.02

    try_some()
