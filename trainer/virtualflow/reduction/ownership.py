"""Who owns the optimizer's state of which parameter when it is sharded, and who passes it on: pure decisions.

Parameters are not cut: an optimizer that steps whole parameters computes the bits that it computes without sharding
(the ends of vectorised loops need not), and a norm of each is one number. So shares are as equal as whole parameters
allow. Every parameter has two owners, who both step it: when one is lost, the other still has the state.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

Owners = tuple[tuple[int, ...], ...]
"""For each parameter the ranks that own its state; the first one sends its new value to all."""


def plan_owners(sizes: Sequence[int], members: int) -> Owners:
    """Share parameters of ``sizes`` bytes out: the largest first, each to whoever has least (Graham, 1969).

    The second owner follows the first, so that a worker has its own share and that of the one before it.
    """
    loads = [0] * members
    first = [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        rank = loads.index(min(loads))
        first[place] = rank
        loads[rank] += sizes[place]
    return tuple((rank,) if members == 1 else (rank, (rank + 1) % members) for rank in first)


def owned_by(rank: int, owners: Owners) -> frozenset[int]:
    """Which parameters that rank owns."""
    return frozenset(place for place, ranks in enumerate(owners) if rank in ranks)


@dataclass(frozen=True)
class Move:
    """One member passes something of a parameter on to another."""

    donor: int
    receiver: int
    place: int


def lost(have: Sequence[Collection[int]], places: int) -> list[int]:
    """Parameters of which no member has what is asked for, of so many."""
    there = {place for places_here in have for place in places_here}
    return [place for place in range(places) if place not in there]


def plan_moves(have: Sequence[Collection[int]], want: Sequence[Collection[int]], sizes: Sequence[int]) -> list[Move]:
    """Who passes what on, so that each member has what it wants; the same on all members.

    Args:
        have: the parameters of which each member has it; what nobody has is not moved.
        want: those of which each member is to have it.
        sizes: of the parameters: each donor is to send about as much as the others.
    """
    donors: list[list[int]] = [[] for _ in sizes]
    for rank, places in enumerate(have):
        for place in sorted(places):
            donors[place].append(rank)
    sent = [0] * len(have)
    moves = []
    for receiver, places in enumerate(want):
        for place in sorted(set(places) - set(have[receiver])):
            if donors[place]:
                donor = min(donors[place], key=lambda rank: (sent[rank], rank))
                sent[donor] += sizes[place]
                moves.append(Move(donor, receiver, place))
    return moves


def plan_hand_over(owners: Owners, coming: Owners, stay: Sequence[int], members: int) -> list[list[int]]:
    """What each member has to get before others leave, so that two who stay have every state, or the only one who does.

    One who stays may be lost before the coming generation stands, when those who leave are gone already.

    Args:
        owners: of the generation that ends.
        coming: of the generation to come, by the ranks in the one that ends; only those who stay. They are preferred.
        stay: ranks of the members that stay; at least one.
        members: how many the ending generation has.
    """
    want: list[list[int]] = [[] for _ in range(members)]
    for place, (ranks, preferred) in enumerate(zip(owners, coming, strict=True)):
        have = [rank for rank in ranks if rank in stay]
        others = [*preferred, *(stay[(place + turn) % len(stay)] for turn in range(len(stay)))]
        for rank in others:
            if len(have) >= min(2, len(stay)):
                break
            if rank not in have:
                have.append(rank)
                want[rank].append(place)
    return want
