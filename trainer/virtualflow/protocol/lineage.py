"""One lineage: which set of workers may go on with a job. Pure.

A generation *counts* once all its members have exchanged where they stand. Another may follow it by agreement of all
its members (a planned change), or if it has a majority of them. Any two majorities share a worker, and a worker is in
one generation at a time. Members whose end is confirmed are left out: whoever runs the workers (the operator, the
runner) has said that the process has ended.

A worker may be lost at any moment, so what a member knows of a generation has three stages:

- *attempted*: it has contributed to the first exchange or offered to enter, and does not know whether all others have.
  The generation may count. It takes a majority of those members that had the training's state before.
- *counted*: it has the whole first exchange. Others may know more or less than that, so it takes both majorities.
- *settled*: it has a later exchange. All know by then that it counts, so it takes a majority of all members.

This is dynamic voting (Yeger Lotem, Keidar and Dolev, "Dynamic Voting for Consistent Primary Components", PODC 1997)
with joiners that bring nothing, and with the authority's word in place of what a lost worker cannot say. Nothing is
kept on disk: a process that has ended never comes back under its incarnation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from virtualflow.protocol.messages import NO_GENERATION, Generation, Plan

Stage = Literal["attempted", "counted", "settled"]

LAST_INCARNATION = 2**43
"""Milliseconds since 1970 in the year 2248: no clock that an incarnation is read from is that far ahead."""
LAST_COUNTER = 2**53 - 2**20
"""One can always be counted on from."""


def is_possible(number: Generation) -> bool:
    """Whether a coordinator may have made it; else it is a slip or a forgery, which nothing is to come behind."""
    return 0 < number.incarnation <= LAST_INCARNATION and 0 < number.counter <= LAST_COUNTER


def number_above(floor: Generation, now: float) -> Generation:
    """The number of a first generation that is above ``floor``, whatever the clock says.

    Args:
        now: Unix time in seconds. It makes the numbers of two who know nothing of each other differ.
    """
    # A counter near the last one begins anew: the incarnation is above.
    counter = floor.counter if floor.counter < LAST_COUNTER // 2 else 0
    return Generation(min(max(int(now * 1000), floor.incarnation + 1), LAST_INCARNATION), counter + 1)


def open_members(plan: Plan, stage: Stage, present: Collection[str], ended: Collection[str]) -> frozenset[str]:
    """Members of ``plan`` that could go on with it without those who are ``present``, all by incarnation.

    Empty if those present have the majorities that they need. To confirm that all others have ended is always enough.
    """
    joiners, present, ended = frozenset(plan.joiners), frozenset(present), frozenset(ended)
    everyone = [member.incarnation for member in plan.members]
    veterans = [member.incarnation for member in plan.members if member.worker not in joiners] or everyone
    electorates = {"attempted": [veterans], "counted": [veterans, everyone], "settled": [everyone]}[stage]
    missing: set[str] = set()
    for electorate in electorates:
        voters = [member for member in electorate if member not in ended]
        absent = [member for member in voters if member not in present]
        if 2 * len(absent) >= len(voters):
            missing.update(absent)
    return frozenset(missing)


@dataclass(frozen=True)
class Claim:
    """What a member knows of the generations before the one that it is about to enter."""

    counted: Generation
    """The newest that it knows to count; ``NO_GENERATION``: none, as it has not had a state yet."""
    supported: bool
    """The new one has the majority of it that it needs."""
    unsupported: Generation
    """The newest that was attempted and of which the new one lacks a majority; ``NO_GENERATION``: there is none."""


class Lineage:
    """The generations that one worker knows to count, or that may. Only the training thread writes it."""

    def __init__(self) -> None:
        self._counted: Plan | None = None
        self.stage: Stage = "attempted"
        self._attempted: dict[Generation, Plan] = {}
        self._ended: frozenset[str] = frozenset()

    def attempt(self, plan: Plan) -> None:
        """This worker is about to contribute to what could make ``plan`` count."""
        self._ended |= frozenset(plan.ended)
        if self._counted is None or plan.generation > self._counted.generation:
            self._attempted[plan.generation] = plan

    def refute(self, plan: Plan) -> None:
        """It is known that nobody has entered ``plan``: not all have offered to."""
        self._attempted.pop(plan.generation, None)

    def count(self, plan: Plan, stage: Stage) -> None:
        """``plan`` counts: it was agreed on (``attempted``), or all of its members have come (``counted``)."""
        self._counted, self.stage = plan, stage
        self._attempted = {n: known for n, known in self._attempted.items() if n > plan.generation}
        known = (self._counted, *self._attempted.values())
        self._ended &= frozenset(member.incarnation for plan in known for member in plan.members)

    def settle(self, generation: Generation) -> None:
        """A later exchange of that generation is complete; of the one agreed on after it, that tells nothing."""
        if self._counted is not None and self._counted.generation == generation:
            self.stage = "settled"

    def claim(self, plan: Plan) -> Claim:
        """What to tell the other members of ``plan``."""
        present = frozenset(member.incarnation for member in plan.members)
        ended = self._ended | frozenset(plan.ended)
        counted = self._counted
        opposed = [
            number
            for number, known in self._attempted.items()
            if number != plan.generation and open_members(known, "attempted", present, ended)
        ]
        return Claim(
            counted.generation if counted is not None else NO_GENERATION,
            counted is None
            or counted.generation == plan.generation
            or not open_members(counted, self.stage, present, ended),
            max(opposed, default=NO_GENERATION),
        )

    def plan_of(self, generation: Generation) -> Plan | None:
        if self._counted is not None and self._counted.generation == generation:
            return self._counted
        return self._attempted.get(generation)


def find_objection(claims: Sequence[Claim]) -> Generation | None:
    """The generation of which a new one needs a majority and has none; ``None``: the new one counts."""
    newest = max(claim.counted for claim in claims)
    if not all(claim.supported for claim in claims if claim.counted == newest):
        return newest
    unsupported = max(claim.unsupported for claim in claims)
    return unsupported if unsupported > newest else None
