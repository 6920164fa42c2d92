"""The search for plans: a pool of choices for a whole model, of which each budget takes the fastest that fits. Pure.

The pool depends on the model alone and not on a budget. A choice is never slower with more memory (see
:mod:`virtualflow.memory.simulation`), and more memory only adds choices that fit: so more memory never gives a slower
plan.

It begins with regular choices: the last blocks are kept, since they are needed first; of the others some are swapped,
which costs nothing as long as the copies are hidden, and the rest is recomputed (KARMA, Wahib et al., SC 2020). To
these come the fastest without copies (:mod:`virtualflow.memory.cuts`), for so many sizes of memory that those in
between gain little. At a few sizes the fastest are then improved by local moves; all that is tried enters the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from virtualflow.memory.cuts import Cuts
from virtualflow.memory.settings import PlannerSettings
from virtualflow.memory.simulation import (
    JOIN,
    KEEP,
    RECOMPUTE,
    REFETCH,
    SWAP,
    Actions,
    ChainArrays,
    least_capacity,
    schedule,
)

_CHEAPEST = (KEEP, SWAP, RECOMPUTE, REFETCH, JOIN)
"""What is tried first: with what costs no time there is most to gain."""


@dataclass(frozen=True)
class Found:
    actions: Actions
    seconds: float


@dataclass(frozen=True)
class _Choice:
    actions: Actions
    bound: float
    """It takes no fewer seconds, whatever the capacity."""
    least: int
    """Bytes of the device that it needs at least, beyond what is resident,"""
    host: int
    """and of the host."""


class Pool:
    def __init__(self, chain: ChainArrays, settings: PlannerSettings) -> None:
        self._chain = chain
        self._settings = settings
        self._choices: dict[Actions, _Choice] = {}
        for actions in _regular(chain, settings):
            self._enter(actions)
        self._cut()
        self._improve()
        self._sorted = self._in_order()

    def best(self, capacity: int, host: int) -> Found | None:
        return self._fastest(self._sorted, capacity, host)

    def least(self, host: int) -> int:
        """The fewest bytes of the device for which there is a choice with so many of the host's."""
        return min(choice.least for choice in self._choices.values() if choice.host <= host)

    # --- how it is filled ---------------------------------------------------------------------------------------------

    def _enter(self, actions: Actions) -> _Choice:
        choice = self._choices.get(actions)
        if choice is None:
            chain = self._chain
            choice = _Choice(actions, bound(chain, actions), least_capacity(chain, actions), chain.host_bytes(actions))
            self._choices[actions] = choice
        return choice

    def _in_order(self) -> list[_Choice]:
        """Those that could be fastest first; of equals those that swap least, so that nothing is copied for nothing."""
        return sorted(self._choices.values(), key=lambda choice: (choice.bound, choice.host, choice.actions))

    def _fastest(self, choices: list[_Choice], capacity: int, host: int) -> Found | None:
        best: Found | None = None
        for choice in choices:
            if best is not None and choice.bound >= best.seconds:
                break
            if choice.least > capacity or choice.host > host:
                continue
            limit = float("inf") if best is None else best.seconds
            found = schedule(self._chain, choice.actions, capacity, limit)
            if found is not None and found.seconds < limit:
                best = Found(choice.actions, found.seconds)
        return best

    def _cut(self) -> None:
        """Enter the fastest choices without the host's memory, until no size of the device's is left for which what is
        there may be slower by more than is worth while."""
        chain, settings = self._chain, self._settings
        cuts = Cuts(chain, settings.followed)
        self._enter(cuts.least())

        def fastest(capacity: int) -> _Choice:
            best = min(self._without_host(capacity), key=lambda choice: choice.bound)
            found = cuts.fastest(capacity, best.bound - computed)
            return best if found is None else self._enter(found)

        computed = chain.forward_until[-1] + chain.backward_until[-1]
        everything = self._enter(bytes([KEEP] * chain.length))
        least = self.least(0)
        # Between a size and a larger one with a faster choice: that takes its own least at most.
        between = [(least, fastest(least), everything)]
        for _ in range(settings.cuts):
            between = [gap for gap in between if gap[0] + 1 < gap[2].least]
            between.sort(key=lambda gap: gap[1].bound / gap[2].bound)
            if not between or between[-1][1].bound <= between[-1][2].bound * (1 + settings.worth):
                return
            low, slower, faster = between.pop()
            middle = (low + faster.least) // 2
            found = fastest(middle)
            between += [(low, slower, found), (middle, found, faster)]

    def _without_host(self, capacity: int) -> Iterator[_Choice]:
        return (choice for choice in self._choices.values() if choice.host == 0 and choice.least <= capacity)

    def _improve(self) -> None:
        """Improve the fastest choice at each size of the device's memory, with some of the host's and with all; and
        without it where cuts are not exact, because of skips."""
        chain, rungs = self._chain, self._settings.rungs
        enough = least_capacity(chain, bytes([KEEP] * chain.length))
        sizes = (*([0] if chain.skips else []), chain.host_most // 4, chain.host_most)
        corners = [(host, self.least(host)) for host in sizes]
        # Closer to one another where there is little memory: there plans differ most.
        places = {
            (least + (enough - least) * rung * rung // (rungs * rungs), host)
            for host, least in corners
            for rung in range(rungs)
        }
        tries = max(1, self._settings.moves // (chain.length * len(places)))
        for capacity, host in sorted(places):
            begin = self._fastest(self._in_order(), capacity, host)
            if begin is not None:
                self._climb(begin, capacity, host, tries)

    def _climb(self, best: Found, capacity: int, host: int, tries: int) -> None:
        """Take each move that helps, until none does or all tries are used."""
        moved = True
        while moved:
            moved = False
            for actions in _neighbours(best.actions, self._chain.joins, self._settings.pairs):
                if actions in self._choices:
                    choice = self._choices[actions]
                else:
                    if tries == 0:
                        return
                    tries -= 1
                    choice = self._enter(actions)
                if choice.bound >= best.seconds or choice.least > capacity or choice.host > host:
                    continue
                found = schedule(self._chain, actions, capacity, best.seconds)
                if found is not None and found.seconds < best.seconds:
                    best, moved = Found(actions, found.seconds), True
                    break


def bound(chain: ChainArrays, actions: Actions) -> float:
    """Seconds below which that choice does not come, whatever the capacity.

    Everything is computed one after the other; and what is swapped comes back one block after the other, behind the
    last copy out, and then all below it is still to be done.
    """
    computed = chain.forward_until[-1]
    swapped = [block for block, action in enumerate(actions) if action in (SWAP, REFETCH)]
    engine = 0.0
    for block in swapped:
        engine = max(engine, chain.forward_until[block + 1]) + chain.out_seconds[actions[block]][block]
    engine = max(engine, computed)
    below = chain.backward_until[-1] + sum(
        seconds for seconds, action in zip(chain.again, actions, strict=True) if action >= RECOMPUTE
    )
    least = computed + below
    following = chain.length
    for block in reversed(swapped):
        engine += chain.in_seconds[actions[block]][block]
        for done in range(block + 1, following):
            below -= chain.backward[done] + (chain.again[done] if actions[done] >= RECOMPUTE else 0.0)
        following = block + 1
        least = max(least, engine + below)
    return least


def _regular(chain: ChainArrays, settings: PlannerSettings) -> Iterator[Actions]:
    """Choices to begin with.

    Kept are the last blocks, or those whose recomputation costs most for the bytes that it would free. Of the others
    some are swapped (those dear to compute and cheap to copy, or the first, or evenly spread), and the rest is
    recomputed in segments, whose boundaries stay or are swapped.
    """
    blocks = range(chain.length)
    saving = sorted(blocks, key=lambda block: (-chain.again[block] / max(1, chain.saved[block]), block))
    copying = sorted(blocks, key=lambda block: (-chain.again[block] / max(1, chain.both[block]), block))
    for count in _spread(chain.length, settings.kept):
        for kept in (frozenset(blocks[chain.length - count :]), frozenset(saving[:count])):
            others = [block for block in blocks if block not in kept]
            ranked = [block for block in copying if block not in kept]
            for number in _spread(len(others), settings.shares):
                for swapped in (ranked[:number], others[:number], _even(others, number)):
                    for most in settings.segments:
                        for begin in (RECOMPUTE, REFETCH):
                            yield _segmented(chain.joins, kept, frozenset(swapped), most, begin)


def _segmented(joins: Sequence[bool], kept: frozenset[int], swapped: frozenset[int], most: int, begin: int) -> Actions:
    actions = bytearray(len(joins))
    run = 0
    for block, joined in enumerate(joins):
        if block in kept or block in swapped:
            actions[block], run = KEEP if block in kept else SWAP, 0
        else:
            run = run if joined else 0
            actions[block] = JOIN if run % most else begin
            run += 1
    return bytes(actions)


def _spread(most: int, count: int) -> list[int]:
    return sorted({most * step // count for step in range(count + 1)})


def _even(blocks: Sequence[int], count: int) -> list[int]:
    return [blocks[len(blocks) * number // count] for number in range(count)]


def _neighbours(actions: Actions, joins: Sequence[bool], pairs: int) -> Iterator[Actions]:
    """All that differ in one block; that have the actions of two exchanged; and that differ in two blocks, of any
    distance up to ``pairs`` blocks in all."""
    length = len(actions)
    for action in _CHEAPEST:
        for block in range(length):
            if actions[block] != action:
                yield _changed(actions, joins, (block, action))
    for one, two in combinations(range(length), 2):
        if actions[one] != actions[two]:
            yield _changed(actions, joins, (one, actions[two]), (two, actions[one]))
    reach = length if length <= pairs else 2
    for one, two in combinations(range(length), 2):
        if two - one < reach:
            for first in _others(actions[one]):
                for second in _others(actions[two]):
                    yield _changed(actions, joins, (one, first), (two, second))


def _others(action: int) -> tuple[int, ...]:
    return tuple(other for other in _CHEAPEST if other != action)


def _changed(actions: Actions, joins: Sequence[bool], *changes: tuple[int, int]) -> Actions:
    """With other actions for some blocks; one that has nothing to join begins a segment."""
    result = bytearray(actions)
    for block, action in changes:
        result[block] = action
    for block, action in enumerate(result):
        if action == JOIN and (block == 0 or result[block - 1] < RECOMPUTE or not joins[block]):
            result[block] = RECOMPUTE
    return bytes(result)
