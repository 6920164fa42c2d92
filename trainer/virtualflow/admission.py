"""Whether a process that says Hello may take part in the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from virtualflow import messages as m

if TYPE_CHECKING:
    from virtualflow.record import Record
    from virtualflow.roster import Contact

_LARGEST = 2**53 - 2**20
"""Numbers of generations end here, so that one can always be counted on from."""


def refuse(job: Record, hello: m.Hello) -> str | None:
    """Why the process that says ``hello`` must not take part in ``job``, in one sentence; ``None``: it may."""
    if hello.protocol != m.PROTOCOL:
        return (
            f"this worker speaks protocol {hello.protocol} and the coordinator {m.PROTOCOL}; "
            "use one version of virtualflow"
        )
    over = job.roster.refusal(hello.incarnation)
    if over is not None:
        return over
    known = job.roster.workers.get(hello.incarnation)
    if known is not None and known.name != hello.worker:
        return f"this process was called {known.name} before"
    if job.virtual_nodes is not None and hello.virtual_nodes != job.virtual_nodes and _bound(job, hello):
        return (
            f"this worker has {hello.virtual_nodes} virtual nodes and the job {job.virtual_nodes}; "
            "their number is fixed for a job's life"
        )
    differing = _other_reproducibility(job, hello) or _foreign_machine(job, hello)
    if differing is not None:
        return differing
    if hello.plan is None:
        return None
    fault = fault_in_plan(hello.plan, hello.virtual_nodes)
    if fault is None and hello.plan.rank_of(hello.worker, hello.incarnation) is None:
        fault = "it is no member of it"
    if fault is not None:
        return f"the generation that this worker names cannot be: {fault}"
    newest = [plan for plan in (job.running, job.proposed) if plan is not None]
    left_behind = job.running is not None and hello.plan.generation < job.running.generation
    if left_behind and not hello.draining and not any(is_member(plan, hello.incarnation) for plan in newest):
        return f"the job went on in generation {job.running_generation} without this process"
    return None


def describe_refusal(worker: str, why: str = "") -> str:
    """How the event of kind ``refused`` says that ``worker`` was not admitted; without ``why``, how it begins."""
    return f"{worker} refused: {why}"


def fault_in_plan(plan: m.Plan, virtual_nodes: int | None) -> str | None:
    """What is wrong with a generation that somebody says to be in, if anything."""
    if not 0 < plan.generation.counter < _LARGEST or not 0 < plan.generation.incarnation < _LARGEST:
        return "no such generation is ever made"
    if not plan.members:
        return "it has no members"
    if len({member.incarnation for member in plan.members}) != len(plan.members):
        return "a member is in it twice"
    first = 0
    for member in plan.members:
        if member.first != first or member.last <= member.first:
            return "its virtual nodes are not divided among its members"
        first = member.last
    if virtual_nodes is not None and first != virtual_nodes:
        return f"it is about {first} virtual nodes"
    return None


def _bound(job: Record, hello: m.Hello) -> bool:
    """Whether the job's number of virtual nodes is more than the word of a process that is gone again."""
    return job.trained or any(
        incarnation != hello.incarnation and not job.roster.is_lost(incarnation) for incarnation in job.roster.workers
    )


def is_member(plan: m.Plan, incarnation: str) -> bool:
    """Whether that process is in ``plan``."""
    return any(member.incarnation == incarnation for member in plan.members)


def _other_reproducibility(job: Record, hello: m.Hello) -> str | None:
    """A sentence when a worker was started for a job of the other kind."""
    if job.reproducibility in (None, hello.reproducibility) or not _bound(job, hello):
        return None
    return (
        f"{hello.worker} is {hello.reproducibility} and the job {job.reproducibility}; give all workers the same "
        "reproducibility"
    )


def _foreign_machine(job: Record, hello: m.Hello) -> str | None:
    """A sentence when a worker's machine does not fit those that are there, or would not give the same bits."""
    for incarnation, contact in job.roster.contacts.items():
        # What is cheap first: a thousand workers are each compared with a thousand.
        other_bits = hello.reproducibility == "bitwise" and not computes_the_same(hello, contact)
        if contact.fingerprint == "" or (contact.fingerprint == hello.fingerprint and not other_bits):
            continue
        if incarnation == hello.incarnation or job.roster.is_lost(incarnation):
            continue
        if contact.fingerprint != hello.fingerprint:
            return (
                f"{hello.worker} runs [{hello.fingerprint[:400]}] and the job [{contact.fingerprint[:400]}]: "
                "the results would differ; use one image and one VIRTUALFLOW_THREADS for all workers"
            )
        there = contact.device[:400]
        where = f"{hello.worker} runs on [{hello.device[:400]}] and the job on [{there}]"
        if hello.device == contact.device:
            where = f"{hello.worker} and the job both run on [{there}]"
        return (
            f"{where}, and a self-test gave other bits: the bits of the training would differ; use one machine "
            "type, or ask for statistical reproducibility"
        )
    return None


def computes_the_same(one: m.Hello | Contact, other: m.Hello | Contact) -> bool:
    """Whether two workers compute the same bits, as far as their self-tests tell.

    Equal digests admit different devices, and different digests refuse what looks like the same one. Without a
    self-test, the names of the devices decide.
    """
    return one.self_test == other.self_test and (bool(one.self_test) or one.device == other.device)
