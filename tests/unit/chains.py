"""Random models as chains of blocks, and what is true of them by trying everything or counting tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from hypothesis import strategies as st

from virtualflow.memory import Block, Plan, Profile, Span
from virtualflow.memory.search import bound
from virtualflow.memory.simulation import JOIN, Actions, Chain, is_valid, least_capacity, schedule


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
    )


@st.composite
def profiles(draw: st.DrawFn, most: int = 5, least: int = 1) -> Profile:
    """Draw models of up to so many blocks, with boundaries small or as large as the rest, and copies slow or fast."""
    length, boundary = draw(st.integers(least, most)), draw(st.sampled_from([5, 80]))
    bandwidth = draw(st.sampled_from([5.0, 30.0, 100.0, 1_000.0]))
    return Profile(
        tuple(draw(blocks(index, boundary)) for index in range(length)),
        bandwidth,
        bandwidth * draw(st.sampled_from([0.5, 1.0, 2.0])),
        optimizer_bytes=draw(st.integers(0, 50)),
        fixed_bytes=draw(st.integers(0, 50)),
    )


def every_choice(length: int) -> Iterator[Actions]:
    return (actions for each in product(range(JOIN + 1), repeat=length) if is_valid(actions := bytes(each)))


def least_of_all(chain: Chain, host: int) -> int:
    return min(least_capacity(chain, each) for each in every_choice(chain.length) if chain.host_bytes(each) <= host)


def optimum(chain: Chain, capacity: int, host: int) -> float:
    """Return the seconds of the fastest choice there is."""
    found = (schedule(chain, each, capacity) for each in every_choice(chain.length) if chain.host_bytes(each) <= host)
    return min(each.seconds for each in found if each is not None)


def optimum_of_many(chain: Chain, capacity: int, host: int) -> float:
    """Return the same for longer chains: what cannot be faster than the best so far is not simulated."""
    best = float("inf")
    for least, actions in sorted((bound(chain, each), each) for each in every_choice(chain.length)):
        if least >= best:
            break
        if chain.host_bytes(actions) <= host and (found := schedule(chain, actions, capacity)) is not None:
            best = min(best, found.seconds)
    return best


def bytes_over_time(profile: Profile, plan: Plan) -> list[int]:
    """Return what is in memory at the start of each span, tensor by tensor: when each is made, and when it goes."""
    spans = {(span.kind, span.block): span for span in plan.timeline.spans}
    lives = [life for index in range(len(profile.blocks)) for life in _lives(profile, plan, spans, index)]
    return [sum(size for size, begin, end in lives if begin <= span.start < end) for span in plan.timeline.spans]


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
    for span in filter(None, (forward, again, backward)):
        yield block.workspace_bytes, span.start, span.end
    made = spans["forward", index - 1].start if index else 0.0
    joined = treated.segment is not None and treated.segment != index
    if out is not None and back is not None:
        yield block.boundary_bytes, made, out.end
        yield block.boundary_bytes, back.start, backward.end
    elif joined:
        yield block.boundary_bytes, made, forward.end
        yield block.boundary_bytes, spans["recompute", index - 1].start, backward.end
    else:
        yield block.boundary_bytes, made, backward.end
    if again is not None:
        yield block.saved_bytes, again.start, backward.end
    elif out is not None and back is not None:
        yield block.saved_bytes, forward.start, out.end
        yield block.saved_bytes, back.start, backward.end
    else:
        yield block.saved_bytes, forward.start, backward.end
