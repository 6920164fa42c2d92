"""Random models as chains of blocks, and what is true of them by trying everything or counting tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from virtualflow.memory import Action, Block, BlockPlan, Plan, Profile, Skip, Span
from virtualflow.memory.search import bound
from virtualflow.memory.simulation import JOIN, RECOMPUTE, Actions, ChainArrays, least_capacity, schedule


def is_valid(actions: Actions) -> bool:
    """Whether each block that joins a segment follows one that is recomputed."""
    return all(
        action != JOIN or (index > 0 and actions[index - 1] >= RECOMPUTE) for index, action in enumerate(actions)
    )


def blocks(index: int, boundary: int) -> st.SearchStrategy[Block]:
    return st.builds(
        Block,
        name=st.just(f"block {index}"),
        forward_seconds=st.integers(1, 20).map(lambda tenths: tenths / 10),
        backward_seconds=st.integers(1, 40).map(lambda tenths: tenths / 10),
        saved_bytes=st.integers(0, 100),
        boundary_bytes=st.integers(0, boundary),
        parameter_bytes=st.integers(0, 20),
        gradient_bytes=st.integers(0, 20),
        workspace_bytes=st.integers(0, 8),
        backward_workspace_bytes=st.none() | st.integers(-20, 8),
        output_bytes=st.integers(0, 5),
        overhead_seconds=st.sampled_from([0.0, 0.1, 1.0]),
    )


@st.composite
def profiles(draw: st.DrawFn, most: int = 5, least: int = 1, *, skips: int = 0) -> Profile:
    """Draw models of up to so many blocks, with boundaries small or as large as the rest, and copies slow or fast.

    Those of up to so many ``skips`` are a part of a boundary, or all of it.
    """
    length, boundary = draw(st.integers(least, most)), draw(st.sampled_from([5, 80]))
    bandwidth = draw(st.sampled_from([5.0, 30.0, 100.0, 1_000.0]))
    chain = tuple(draw(blocks(index, boundary)) for index in range(length))
    ways = [(first, last) for first in range(length) for last in range(first + 1, length)]
    chosen = draw(st.lists(st.sampled_from(ways), max_size=skips, unique_by=lambda way: way[0])) if ways else []
    return Profile(
        chain,
        bandwidth,
        bandwidth * draw(st.sampled_from([0.5, 1.0, 2.0])),
        optimizer_bytes=draw(st.integers(0, 50)),
        fixed_bytes=draw(st.integers(0, 50)),
        skips=tuple(
            Skip(*way, draw(st.integers(0, chain[way[0]].boundary_bytes)), draw(st.integers(0, 80))) for way in chosen
        ),
    )


def every_choice(length: int) -> Iterator[Actions]:
    return (actions for each in product(range(JOIN + 1), repeat=length) if is_valid(actions := bytes(each)))


def least_of_all(chain: ChainArrays, host: int) -> int:
    return min(least_capacity(chain, each) for each in every_choice(chain.length) if chain.host_bytes(each) <= host)


def optimum(chain: ChainArrays, capacity: int, host: int) -> float:
    """Return the seconds of the fastest choice there is."""
    found = (schedule(chain, each, capacity) for each in every_choice(chain.length) if chain.host_bytes(each) <= host)
    return min(each.seconds for each in found if each is not None)


def optimum_of_many(chain: ChainArrays, capacity: int, host: int) -> float:
    """Return the same for longer chains: what cannot be faster than the best so far is not simulated."""
    best = float("inf")
    for least, actions in sorted((bound(chain, each), each) for each in every_choice(chain.length)):
        if least >= best:
            break
        if chain.host_bytes(actions) <= host and (found := schedule(chain, actions, capacity)) is not None:
            best = min(best, found.seconds)
    return best


def bytes_over_time(profile: Profile, plan: Plan) -> list[int]:
    """Return what is in memory as each span begins and ends, tensor by tensor: when it is made, and when it goes."""
    spans = {(span.kind, span.block): span for span in plan.timeline.spans}
    lives = [life for index in range(len(profile.blocks)) for life in _lives(profile, plan, spans, index)]
    lives += [life for skip in profile.skips for life in _lives_of_skip(skip, plan, spans)]
    moments = [moment for span in plan.timeline.spans for moment in (span.start, span.end)]
    return [sum(size for size, begin, end in lives if begin <= moment < end) for moment in moments]


def _lives(
    profile: Profile, plan: Plan, spans: dict[tuple[str, int], Span], index: int
) -> Iterator[tuple[int, float, float]]:
    """Yield the bytes, the beginning and the end of each tensor of a block."""
    block, treated = profile.blocks[index], plan.blocks[index]
    forward, backward = spans["forward", index], spans["backward", index]
    again, out, back = (spans.get((kind, index)) for kind in ("recompute", "swap-out", "swap-in"))
    yield block.gradient_bytes, backward.start, float("inf")
    if index:
        yield block.boundary_bytes, backward.start, spans["backward", index - 1].end  # its gradient
    for span in filter(None, (forward, again)):
        yield block.workspace_bytes, span.start, span.end
    less = max(block.backward_workspace_bytes or 0, -block.gradient_bytes - (block.boundary_bytes if index else 0))
    yield block.workspace_bytes if block.backward_workspace_bytes is None else less, backward.start, backward.end
    if again is not None and ("recompute", index + 1) not in _of_segment(plan, treated):
        yield block.output_bytes, again.start, again.end
    made = spans["forward", index - 1].start if index else 0.0
    joined = treated.segment is not None and treated.segment != index
    taken = 0.0
    if back is not None and treated.prefetch is not None:
        # Its memory is taken when it is issued and nothing is leaving any more, perhaps before the engine comes to it.
        gone = max(span.end for (kind, _), span in spans.items() if kind == "swap-out")
        taken = min(back.start, max(spans[treated.prefetch.kind, treated.prefetch.block].start, gone))
    if out is not None and back is not None:
        yield block.boundary_bytes, made, out.end
        yield block.boundary_bytes, taken, backward.end
    elif joined:
        yield block.boundary_bytes, made, forward.end
        yield block.boundary_bytes, spans["recompute", index - 1].start, backward.end
    else:
        yield block.boundary_bytes, made, backward.end
    if again is not None:
        yield block.saved_bytes, forward.start, forward.end
        yield block.saved_bytes, again.start, backward.end
    elif out is not None and back is not None:
        yield block.saved_bytes, forward.start, out.end
        yield block.saved_bytes, taken, backward.end
    else:
        yield block.saved_bytes, forward.start, backward.end


def _of_segment(plan: Plan, treated: BlockPlan) -> set[tuple[str, int]]:
    """Return the recomputations of its segment."""
    return {("recompute", index) for index, each in enumerate(plan.blocks) if each.segment == treated.segment}


def _lives_of_skip(skip: Skip, plan: Plan, spans: dict[tuple[str, int], Span]) -> Iterator[tuple[int, float, float]]:
    """Yield the same of a skip and its gradient, beside the boundary that it is a part of."""
    backward, treated = spans["backward", skip.last], plan.blocks[skip.first]
    yield skip.gradient_bytes, backward.end, spans["backward", skip.first].end
    stays = ("swap-out", skip.first) not in spans and treated.segment in (None, skip.first)
    if not stays:
        again = plan.blocks[skip.last].action is Action.RECOMPUTE
        yield (
            skip.skip_bytes,
            spans["forward", skip.first + 1].start,
            backward.end if again else spans["forward", skip.last].end,
        )
