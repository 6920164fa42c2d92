"""What the tests of the membership are made of: workers, plans and clusters in few words; a decision in one line."""

from __future__ import annotations

import dataclasses

import msgspec

from virtualflow.coordinator.assignment import assign
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import Cluster, Decision, Worker
from virtualflow.protocol.messages import Cause, Generation, Member, Plan

NOW = 1_000.0
SETTINGS = MembershipSettings()
FIRST, SECOND = Generation(7, 1), Generation(7, 2)


def worker(name: str, **facts: object) -> Worker:
    usual = Worker(name, name, last_heard=NOW, ready_at=NOW - 60.0)
    return dataclasses.replace(usual, **facts)  # type: ignore[arg-type]


def member(name: str, **facts: object) -> Worker:
    return worker(name, **{"entered": FIRST, **facts})


def processes(name: str, count: int = 2, **facts: object) -> list[Worker]:
    """A worker of so many processes: of ``a``, these are a0 and a1."""
    made = (dataclasses.replace(worker(f"{name}{rank}", **facts), name=name) for rank in range(count))
    return [
        dataclasses.replace(one, launch=name, local_rank=rank, local_world_size=count) for rank, one in enumerate(made)
    ]


def silent(seconds: float) -> dict[str, object]:
    return {"connected": False, "disconnected_at": NOW - seconds}


def plan(generation: Generation, names: str, mode: str = "planned", joiners: str = "", cause: Cause = "join") -> Plan:
    parts = names.split()
    members = tuple(
        Member(name, name, "127.0.0.1", r.start, r.stop)
        for name, r in zip(parts, assign(8, [1.0] * len(parts)) if parts else [], strict=True)
    )
    return Plan(generation, mode, members, tuple(joiners.split()), cause, "the pending reason")  # type: ignore[arg-type]


def cluster(*workers: Worker, **facts: object) -> Cluster:
    ended = frozenset(one.incarnation for one in workers if one.gone is not None)
    usual = Cluster(8, 2, NOW - 300.0, {one.incarnation: one for one in workers}, ended=ended)
    return dataclasses.replace(usual, **facts)  # type: ignore[arg-type]


def training(*workers: Worker, **facts: object) -> Cluster:
    members = [one for one in workers if one.entered is not None]
    running = plan(FIRST, " ".join(one.incarnation for one in members))
    told = zip(running.members, members, strict=True)
    named = tuple(msgspec.structs.replace(member, worker=one.name, launch=one.launch) for member, one in told)
    running = msgspec.structs.replace(running, members=named)
    return cluster(*workers, **{"running": running, "trained": True, **facts})


def pending(names: str, joiners: str = "", **facts: object) -> dict[str, object]:
    return {"proposed": plan(SECOND, names, "planned", joiners), "proposed_at": NOW - 1.0, **facts}


HEARTBEAT, RECONNECT, SUSPICION = SETTINGS.heartbeat_limit, SETTINGS.reconnect_grace, SETTINGS.suspicion_grace
SILENCE = SETTINGS.silence_patience * HEARTBEAT
DRAINS = {"draining": True, "deadline": NOW + 30.0}


def in_words(decision: Decision) -> str | None:
    """A decision as the table writes it: mode, members, joiners, cause."""
    if decision.over or decision.fail:
        return "over" if decision.over else "fail"
    if decision.proposal is None:
        return None
    proposal = decision.proposal
    joiners = f" +{' '.join(proposal.joiners)}" if proposal.joiners else ""
    return f"{proposal.mode} {' '.join(proposal.members) or '-'}{joiners} {proposal.cause}"
