"""One virtual node in time: when each block is computed and copied under a plan, and what is in memory then. Pure.

The device computes the blocks forward, then backward, in one order. The rules, after KARMA (Wahib et al., SC 2020:
capacity-based prefetching, recomputation interleaved with copies):

1. A copy out is queued when the block's forward pass is over. Its memory is free when the copy is.
2. What computes waits until its memory is free. Only copies out can free memory beside the computation, so it waits for
   these alone. A block that will be recomputed needs as much in its forward pass as one that is kept, for a moment.
3. A copy back is issued, in the order in which the backward pass needs them, at the first point of the backward pass
   from which on its memory is free until it is used: *when the capacity allows it*. It begins when the last copy out is
   over, so that it never takes memory for which the computation waits.
4. A segment is recomputed right before the backward pass of its last block.

From these it follows that a given choice of actions is never slower with more memory: every wait of 2 ends as early or
earlier, every point of 3 is as early or earlier, and nothing issued early delays the computation.

Actions are bytes here, one a block: :data:`KEEP`, :data:`SWAP`, :data:`RECOMPUTE` (from its own boundary, which stays
on the device), :data:`REFETCH` (from its own boundary, which is swapped) and :data:`JOIN` (in the segment of the block
before it).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from virtualflow.memory.model import Block, Kind, Point, Profile, Skip, Span, Timeline, Wait

KEEP, SWAP, RECOMPUTE, REFETCH, JOIN = range(5)

Actions = bytes
"""One of the five a block."""


class ChainArrays:
    """A profile as the arrays that the simulation reads; what is resident whatever the plan is not in it."""

    def __init__(self, profile: Profile) -> None:
        blocks = profile.blocks
        self.length = len(blocks)
        self.forward = [block.forward_seconds for block in blocks]
        self.backward = [block.backward_seconds for block in blocks]
        self.again = [block.forward_seconds + block.overhead_seconds for block in blocks]
        """Seconds of a recomputation."""
        self.saved = [block.saved_bytes for block in blocks]
        self.joins = [block.joins for block in blocks]
        self.boundary = [*(block.boundary_bytes for block in blocks), 0]
        """Entry ``i`` enters block ``i``; the model's output belongs to the last block."""
        self.gradient = [block.gradient_bytes for block in blocks]
        self.workspace = [block.workspace_bytes for block in blocks]
        self.output = [block.output_bytes for block in blocks]
        self.backward_workspace = [_backward_workspace(block, index) for index, block in enumerate(blocks)]
        self.both = [block.saved_bytes + block.boundary_bytes for block in blocks]
        nothing = [0] * self.length
        self.moved = [nothing, self.both, nothing, self.boundary[:-1], nothing]
        """Bytes that are swapped, by action and block."""
        self.out_seconds = [[size / profile.out_bytes_per_second for size in sizes] for sizes in self.moved]
        self.in_seconds = [[size / profile.in_bytes_per_second for size in sizes] for sizes in self.moved]
        self.forward_until = [0.0, *accumulate(self.forward)]
        self.backward_until = [0.0, *accumulate(self.backward)]
        self.host_most = sum(self.both)
        self.skips = profile.skips

    def host_bytes(self, actions: Actions) -> int:
        return sum(self.moved[action][block] for block, action in enumerate(actions))


def _backward_workspace(block: Block, index: int) -> int:
    if block.backward_workspace_bytes is None:
        return block.workspace_bytes
    # Whatever goes early: what is there when the pass begins is there.
    return max(block.backward_workspace_bytes, -block.gradient_bytes - (block.boundary_bytes if index else 0))


class Passing:
    """Bytes of skips in use beside the boundaries, under a choice of actions.

    A skip is on the device until the later block has run, whatever becomes of the boundary that it is a part of; and
    where that one is recomputed, until it has run backward. A boundary that stays is the skip itself.
    """

    def __init__(self, chain: ChainArrays, actions: Actions) -> None:
        self.forward = [0] * chain.length
        """In each forward pass,"""
        self.backward = [0] * chain.length
        """and in each backward pass, also while what it needs is computed again."""
        for skip in chain.skips:
            for block in range(skip.first, skip.last):
                self.backward[block] += skip.gradient_bytes
            if _parts(actions[skip.first]):
                for block in range(skip.first + 1, chain.length if _again(actions, skip) else skip.last + 1):
                    self.forward[block] += skip.skip_bytes
                for block in range(skip.last, chain.length if _again(actions, skip) else 0):
                    self.backward[block] += skip.skip_bytes


def _parts(action: int) -> bool:
    return action in (SWAP, REFETCH, JOIN)


def _again(actions: Actions, skip: Skip) -> bool:
    return actions[skip.last] >= RECOMPUTE


@dataclass(slots=True)
class _Operation:
    block: int
    recompute: bool
    need: int
    """Bytes in use meanwhile, without those that are swapped."""
    made: int
    """Bytes of them that it allocates, and that stay,"""
    for_moment: int
    """and that it needs beyond these, for a moment."""
    until: int
    """The last operation that needs what is fetched for this one."""


@dataclass(slots=True)
class _Back:
    block: int
    operation: int
    """At which it is issued."""
    allocated: float
    """When it takes memory: then, unless something is still leaving."""
    start: float
    """When the engine comes to it."""


@dataclass(slots=True)
class Schedule:
    """When everything happens under a choice of actions and a capacity; seconds."""

    forward: list[float]
    """Starts of the forward passes."""
    out: list[tuple[int, float]]
    """Block and start of each copy out."""
    operations: list[_Operation]
    """The backward pass."""
    starts: list[float]
    """Of these."""
    back: list[_Back]
    seconds: float
    """When all is computed."""


def least_capacity(chain: ChainArrays, actions: Actions) -> int:
    """The fewest bytes with which that choice can be carried out, everything being fetched as late as possible."""
    forward, held = _forward_needs(chain, actions)
    operations = _backward(chain, actions, held)
    needs = [operation.need for operation in operations]
    for index, operation in enumerate(operations):
        if _fetches(operation, actions):
            for taken in range(index, operation.until + 1):
                needs[taken] += chain.moved[actions[operation.block]][operation.block]
    return max(*forward, *needs)


def waits(chain: ChainArrays, actions: Actions, capacity: int) -> tuple[Wait, ...]:
    """Rule 2: where the device may have to wait for copies out, and how many bytes of them it need not wait for."""
    forward, held = _forward_needs(chain, actions)
    needs = [(Point("forward", block), need) for block, need in enumerate(forward)]
    for operation in _backward(chain, actions, held):
        needs.append((Point("recompute" if operation.recompute else "backward", operation.block), operation.need))
    most = chain.host_bytes(actions)
    return tuple(Wait(point, capacity - need) for point, need in needs if capacity - need < most)


def schedule(chain: ChainArrays, actions: Actions, capacity: int, limit: float = float("inf")) -> Schedule | None:
    """When everything happens; ``None`` if it needs more memory, or is seen not to end before ``limit``.

    Args:
        capacity: bytes, beyond what is resident whatever the plan.
        limit: seconds; a schedule that takes longer may be given all the same.
    """
    turn = _forward(chain, actions, capacity)
    if turn is None or turn.time + chain.backward_until[-1] >= limit:
        return None
    operations = _backward(chain, actions, turn.held)
    issued = _issue(chain, actions, operations, capacity)
    if issued is None:
        return None
    time, leaving, flying = turn.time, turn.leaving, turn.flying
    last_out = leaving[-1][0] if leaving else 0.0
    starts: list[float] = []
    back: list[_Back] = []
    ready: dict[int, float] = {}
    gone, following, engine = turn.gone, 0, 0.0
    for index, operation in enumerate(operations):
        while flying and (leaving[gone][0] <= time or operation.need + flying > capacity):
            end, size = leaving[gone]
            time = max(time, end)
            flying -= size
            gone += 1
        while following < len(issued) and issued[following][1] == index:
            block = issued[following][0]
            begin = max(time, last_out)
            engine = max(begin, engine)
            back.append(_Back(block, index, begin, engine))
            engine += chain.in_seconds[actions[block]][block]
            ready[block] = engine
            following += 1
        block = operation.block
        time = max(time, ready.get(block, 0.0))
        starts.append(time)
        time += chain.again[block] if operation.recompute else chain.backward[block]
    return Schedule(turn.starts, turn.out, operations, starts, back, time)


@dataclass(slots=True)
class _Turn:
    time: float
    """When it is over."""
    starts: list[float]
    out: list[tuple[int, float]]
    """Block and start of each copy out,"""
    leaving: list[tuple[float, int]]
    """its end and its bytes."""
    gone: int
    """How many of them are over,"""
    flying: int
    """and the bytes of the others."""
    held: int
    """Bytes in use without those that are swapped."""


def _forward(chain: ChainArrays, actions: Actions, capacity: int) -> _Turn | None:
    time, engine, used = 0.0, 0.0, chain.boundary[0]
    passing = Passing(chain, actions).forward
    turn = _Turn(0.0, [], [], [], 0, 0, 0)
    leaving = turn.leaving
    for block, action in enumerate(actions):
        stays = chain.boundary[block + 1] + (chain.saved[block] if action <= SWAP else 0)
        need = chain.boundary[block + 1] + chain.saved[block] + chain.workspace[block] + passing[block]
        while turn.gone < len(leaving) and (leaving[turn.gone][0] <= time or used + need > capacity):
            end, size = leaving[turn.gone]
            time = max(time, end)
            used -= size
            turn.flying -= size
            turn.gone += 1
        if used + need > capacity:
            return None
        turn.starts.append(time)
        time += chain.forward[block]
        used += stays
        if action in (SWAP, REFETCH):
            engine = max(time, engine)
            turn.out.append((block, engine))
            engine += chain.out_seconds[action][block]
            leaving.append((engine, chain.moved[action][block]))
            turn.flying += chain.moved[action][block]
        elif action == JOIN:
            used -= chain.boundary[block]
    turn.time, turn.held = time, used - turn.flying
    return turn


def _forward_needs(chain: ChainArrays, actions: Actions) -> tuple[list[int], int]:
    """Bytes in use in each forward pass, and after the last one, without those that are swapped."""
    boundary, saved, workspace = chain.boundary, chain.saved, chain.workspace
    held, needs, passing = boundary[0], [], Passing(chain, actions).forward
    for block, action in enumerate(actions):
        stays = boundary[block + 1] + (saved[block] if action <= SWAP else 0)
        needs.append(held + boundary[block + 1] + saved[block] + workspace[block] + passing[block])
        held += stays
        if action == SWAP:
            held -= chain.both[block]
        elif action in (REFETCH, JOIN):
            held -= boundary[block]
    return needs, held


def _backward(chain: ChainArrays, actions: Actions, held: int) -> list[_Operation]:
    """What is computed after the forward pass, in order; ``held`` are the bytes then, without those swapped."""
    boundary, saved, gradient, workspace = chain.boundary, chain.saved, chain.gradient, chain.workspace
    operations: list[_Operation] = []
    block, passing = chain.length - 1, Passing(chain, actions).backward
    while block >= 0:
        first, aside = block, passing[block]
        if actions[block] >= RECOMPUTE:
            while actions[first] == JOIN:
                first -= 1
            for again in range(first, block + 1):
                made = saved[again] + (boundary[again + 1] if again < block else 0)
                until = len(operations) + 2 * (block - first) + 1  # for the first of them: its own backward pass
                for_moment = workspace[again] + (chain.output[again] if again == block else 0)
                operations.append(_Operation(again, True, held + made + for_moment + aside, made, for_moment, until))
                held += made
        for done in range(block, first - 1, -1):
            made = (boundary[done] if done else 0) + gradient[done]  # nobody wants the gradient of the samples
            held += made
            for_moment = chain.backward_workspace[done]
            need = held + for_moment + passing[done]
            operations.append(_Operation(done, False, need, made, for_moment, len(operations)))
            held -= boundary[done + 1] + chain.both[done] - chain.moved[actions[done]][done]
        block = first - 1
    return operations


def _issue(
    chain: ChainArrays, actions: Actions, operations: list[_Operation], capacity: int
) -> list[tuple[int, int]] | None:
    """Each swapped block in the order of the backward pass, and the operation at which its copy back is issued.

    That is the first from which on its memory is free until it is used, but not before that of the block needed sooner;
    ``None`` if something does not fit at all.
    """
    needs = [operation.need for operation in operations]
    if max(needs) > capacity:
        return None
    issued: list[tuple[int, int]] = []
    earliest = 0
    for index, operation in enumerate(operations):
        if not _fetches(operation, actions):
            continue
        block = operation.block
        size = chain.moved[actions[block]][block]
        room = capacity - size
        if max(needs[index : operation.until + 1]) > room:
            return None
        point = index
        while point > earliest and needs[point - 1] <= room:
            point -= 1
        for taken in range(point, operation.until + 1):
            needs[taken] += size
        issued.append((block, point))
        earliest = point
    return issued


def most_backward(chain: ChainArrays, actions: Actions, found: Schedule) -> int:
    """The most bytes in use in the backward pass, however fast copies are: each copy back takes its memory when it is
    issued. Where the last copy out ends later than that, it takes it later."""
    needs = [operation.need for operation in found.operations]
    used_in = {
        operation.block: index for index, operation in enumerate(found.operations) if _fetches(operation, actions)
    }
    for back in found.back:
        size = chain.moved[actions[back.block]][back.block]
        for taken in range(back.operation, found.operations[used_in[back.block]].until + 1):
            needs[taken] += size
    return max(needs)


def _fetches(operation: _Operation, actions: Actions) -> bool:
    return actions[operation.block] == (REFETCH if operation.recompute else SWAP)


def timeline(chain: ChainArrays, actions: Actions, found: Schedule, resident: int) -> Timeline:
    """The same as spans of the three resources, with the bytes in use at every change.

    Memory is counted anew from the spans: what a span allocates from its start on, what it frees at its end.
    """
    spans: list[Span] = []
    changes: list[tuple[float, int]] = [(0.0, resident + chain.boundary[0])]
    ends = {
        operation.block: start + chain.backward[operation.block]
        for operation, start in zip(found.operations, found.starts, strict=True)
        if not operation.recompute
    }
    for skip in chain.skips:
        changes += [(ends[skip.last], skip.gradient_bytes), (ends[skip.first], -skip.gradient_bytes)]
        if _parts(actions[skip.first]):
            through = found.forward[skip.last] + chain.forward[skip.last]
            changes.append((found.forward[skip.first + 1], skip.skip_bytes))
            changes.append((ends[skip.last] if _again(actions, skip) else through, -skip.skip_bytes))
    for block, start in enumerate(found.forward):
        action, end = actions[block], start + chain.forward[block]
        spans.append(Span("compute", "forward", block, start, end))
        stays = chain.boundary[block + 1] + (chain.saved[block] if action <= SWAP else 0)
        drop = chain.boundary[block] if action == JOIN else 0
        need = chain.boundary[block + 1] + chain.saved[block] + chain.workspace[block]
        changes += [(start, need), (end, stays - need - drop)]
    for operation, start in zip(found.operations, found.starts, strict=True):
        block = operation.block
        seconds = chain.again[block] if operation.recompute else chain.backward[block]
        freed = 0 if operation.recompute else chain.both[block] + chain.boundary[block + 1]
        kind: Kind = "recompute" if operation.recompute else "backward"
        spans.append(Span("compute", kind, block, start, start + seconds))
        changes += [(start, operation.made + operation.for_moment), (start + seconds, -operation.for_moment - freed)]
    for block, start in found.out:
        end = start + chain.out_seconds[actions[block]][block]
        spans.append(Span("copy-out", "swap-out", block, start, end))
        changes.append((end, -chain.moved[actions[block]][block]))
    for each in found.back:
        block, end = each.block, each.start + chain.in_seconds[actions[each.block]][each.block]
        spans.append(Span("copy-in", "swap-in", block, each.start, end))
        changes.append((each.allocated, chain.moved[actions[block]][block]))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.resource, span.start))), _curve(changes))


def _curve(changes: list[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Bytes in use from each second on at which they change; what is freed at a moment is freed before it is used."""
    used_from: dict[float, int] = {}
    used = 0
    for time, change in sorted(changes):
        used += change
        used_from[time] = used
    curve: list[tuple[float, int]] = []
    for time, used in used_from.items():
        if not curve or curve[-1][1] != used:
            curve.append((time, used))
    return tuple(curve)
