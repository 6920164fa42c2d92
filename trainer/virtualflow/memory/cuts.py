"""Plans without copies: cuts of a chain into blocks that are kept and segments that are recomputed. Pure.

Without copies a plan takes the seconds of what is computed again, whatever the capacity; and what a part of the cut
needs depends on that part alone, beside the bytes that those below it hold. So the fastest cut that fits is found block
by block: of two that end at the same border, one that holds more and takes longer is not followed. Such programs over
memory are known of chains that may be recomputed more than once (Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova,
"Optimal checkpointing for heterogeneous chains", 2019). Here nothing is, and bytes are not rounded.

A skip that begins within a segment is taken to be on the device until the end: no cut is thought to need less than it
does, but some more.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from virtualflow.memory.simulation import JOIN, KEEP, RECOMPUTE, Actions, ChainArrays, least_capacity


@dataclass(slots=True)
class _State:
    held: int
    """Bytes of them that are on the device after their forward pass."""
    seconds: float
    """What of them is computed again takes."""
    first: int
    """Where its last part begins,"""
    action: int
    """what becomes of that,"""
    below: _State | None
    """and the cut of what is below; ``None`` at the first border."""


class Cuts:
    """The parts of all cuts of a model.

    Args:
        most: so many cuts of what is below a border are followed; of more, those that promise most.
    """

    def __init__(self, chain: ChainArrays, most: int) -> None:
        self._chain = chain
        self._most = most
        self._parted = [0] * chain.length
        gradients = [0] * chain.length
        for skip in chain.skips:
            self._parted[skip.first] += skip.skip_bytes
            for block in range(skip.first, skip.last):
                gradients[block] += skip.gradient_bytes
        self._gradients = [each + own for each, own in zip(_from_there_on(chain.gradient), gradients, strict=True)]
        """Bytes of gradients while a block runs backward."""
        self._segments = [self._needs_of_segments(end) for end in range(chain.length)]
        self._kept = [self._need_of_kept(block) for block in range(chain.length)]
        self._freed = [_Freed(chain, border) for border in range(chain.length + 1)]

    def least(self) -> Actions:
        """The cut that needs the least memory.

        Recomputing a block alone may need more memory than keeping it only where that makes a copy of its output. For a
        given capacity, the cuts that leave the fewest bytes are found block by block: that is exact, since fewer bytes
        below never hurt what is above. The capacity is found by bisection.
        """
        best = bytes([RECOMPUTE] * self._chain.length)
        low, high = 0, least_capacity(self._chain, best)
        while low < high:
            middle = (low + high) // 2
            found = self._follow(middle, float("inf"), 1)
            if found is None:
                low = middle + 1
            else:
                best, high = found, min(middle, least_capacity(self._chain, found))
        return best

    def fastest(self, capacity: int, limit: float) -> Actions | None:
        """The cut whose recomputation takes the least time.

        Returns:
            ``None``: none fits that takes less than the limit.
        """
        return self._follow(capacity, limit, self._most)

    def _follow(self, capacity: int, limit: float, most: int) -> Actions | None:
        chain = self._chain
        fronts = [[_State(0, 0.0, 0, KEEP, None)]]
        for end in range(chain.length):
            reached: list[_State] = []
            room = capacity - self._kept[end]
            for state in fronts[end]:
                if state.held > room:
                    break
                reached.append(_State(state.held + chain.both[end], state.seconds, end, KEEP, state))
            parted, again = 0, 0.0
            for first in range(end, -1, -1):
                again += chain.again[first]
                room, holds = capacity - self._segments[end][first], chain.boundary[first] + parted
                for state in fronts[first]:
                    if state.held > room:
                        break
                    reached.append(_State(state.held + holds, state.seconds + again, first, RECOMPUTE, state))
                parted += self._parted[first]
                if not chain.joins[first]:
                    break
            fronts.append(self._best(reached, end + 1, capacity, limit, most))
        if not fronts[-1]:
            return None
        return self._actions(min(fronts[-1], key=lambda state: state.seconds))

    def _best(self, reached: list[_State], border: int, capacity: int, limit: float, most: int) -> list[_State]:
        """Those that hold less than all that are as fast, and of which something faster than the limit can come."""
        front: list[_State] = []
        fastest = float("inf")
        promised: list[float] = []
        for state in sorted(reached, key=lambda state: (state.held, state.seconds)):
            if state.seconds < fastest:
                fastest = state.seconds
                promise = state.seconds + self._freed[border].seconds(capacity - state.held)
                if promise < limit:
                    front.append(state)
                    promised.append(promise)
        if len(front) > most == 1:
            return front[:1]  # it holds the fewest bytes
        if len(front) > most:
            worst = sorted(promised)[most]
            return [state for state, promise in zip(front, promised, strict=True) if promise < worst]
        return front

    def _actions(self, last: _State) -> Actions:
        actions = bytearray([JOIN] * self._chain.length)
        state: _State | None = last
        while state is not None and state.below is not None:
            actions[state.first] = state.action
            state = state.below
        return bytes(actions)

    def _needs_of_segments(self, end: int) -> list[int]:
        """The bytes that each segment that ends there needs beyond what is held of those below it; by its first block.

        In the forward pass its boundaries go as they are used. Then all of it is computed again, and runs backward.
        """
        chain, gradients = self._chain, self._gradients
        boundary, workspace = chain.boundary, chain.workspace
        until = [0, *accumulate(chain.both)]
        above = gradients[end] - chain.gradient[end]
        needs = [0] * (end + 1)
        computed = passed = parted = 0
        for first in range(end, -1, -1):
            handed = boundary[first + 1] if first < end else chain.output[end]
            again = until[first + 1] + handed + workspace[first] + boundary[end + 1] + above
            through = until[first + 1] + boundary[first + 1] + (boundary[first] if first else 0)
            computed = max(computed, again, through + gradients[first] + chain.backward_workspace[first])
            beginning = boundary[first] + boundary[first + 1] + workspace[first] + chain.saved[first]
            needs[first] = max(computed - until[first], beginning, boundary[first] + passed) + parted
            passed = max(passed, beginning)
            parted += self._parted[first]
        return needs

    def _need_of_kept(self, block: int) -> int:
        """The bytes that a block needs if it is kept, beyond what is held of those below it."""
        chain = self._chain
        backward = (chain.boundary[block] if block else 0) + self._gradients[block] + chain.backward_workspace[block]
        return chain.both[block] + chain.boundary[block + 1] + max(chain.workspace[block], backward)


class _Freed:
    """The fewest seconds in which the blocks from a border on can be computed again to free so many bytes.

    Parts of blocks being allowed and boundaries taking nothing: it is never more than what a cut takes.
    """

    def __init__(self, chain: ChainArrays, border: int) -> None:
        blocks = [block for block in range(border, chain.length) if chain.both[block]]
        blocks.sort(key=lambda block: chain.again[block] / chain.both[block])
        self._bytes = [0, *accumulate(chain.both[block] for block in blocks)]
        self._seconds = [0.0, *accumulate(chain.again[block] for block in blocks)]

    def seconds(self, room: int) -> float:
        missing = self._bytes[-1] - room
        if missing <= 0:
            return 0.0
        place = bisect_left(self._bytes, missing)
        if place == len(self._bytes):
            return float("inf")
        before, after = self._bytes[place - 1], self._bytes[place]
        share = (missing - before) / (after - before)
        return self._seconds[place - 1] + share * (self._seconds[place] - self._seconds[place - 1])


def _from_there_on(sizes: Sequence[int]) -> list[int]:
    return [*accumulate(reversed(sizes))][::-1]
