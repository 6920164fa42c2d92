"""What the end of a worker's process means. A pure function: facts in, verdict with its reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from virtualflow.launcher.supervisor import describe_exit
from virtualflow.protocol.termination_message import EXIT_EVICTED


@dataclass(frozen=True)
class Verdict:
    """Whether a worker is to be replaced (``lost``) or done without (``refused``), or the job has failed, or neither,
    or it cannot be told yet.
    """

    kind: Literal["fine", "lost", "refused", "failed", "open"]
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ExitFacts:
    """What is known of a worker whose process has ended, and of its job."""

    worker: str
    """Its name."""
    code: int
    """Return code as ``subprocess`` gives it."""
    over: bool
    """The job is ending already, whatever the reason."""
    done: bool
    """The training is complete."""
    joined: bool
    """The coordinator knew the worker."""
    left: bool
    """It was asked to leave, or had seen the end of the training."""
    killed: bool
    """The runner killed it on purpose."""
    declared_lost: bool
    """By the coordinator."""
    refused: str | None
    """Why the coordinator has not admitted it, if so. What it looks at (library, settings of the script, machine) is
    the same when the process is started again."""
    unknown: bool
    """The coordinator's status of after the end says nothing of it."""
    expired: bool
    """The status had time to explain the end, and did not."""


def judge(facts: ExitFacts) -> Verdict:
    """What it means that the process of a worker has ended."""
    worker, code, refused = facts.worker, facts.code, facts.refused
    how = describe_exit(code)
    if facts.done:
        if code == 0 or facts.killed or refused is not None:
            return Verdict("fine")
        return Verdict("failed", f"{worker} ended after the training: {how}")
    if facts.over:
        return Verdict("fine")
    if code < 0 or facts.killed or facts.declared_lost:
        return Verdict("lost", how)
    if refused is not None:
        return Verdict("refused", refused)
    if code == EXIT_EVICTED:
        # Of one that was never admitted, the reason may be on its way.
        return Verdict("lost", how) if facts.joined or facts.expired else Verdict("open")
    if code == 0 and facts.left:
        return Verdict("fine")
    if code > 0 and not facts.joined and facts.unknown:
        return Verdict("failed", f"{worker} ended before it could join: {how}")
    if not facts.expired:
        return Verdict("open")  # An error is on its way to the status, with its traceback; or the end of the training.
    if code > 0:
        return Verdict("failed", f"{worker} ended with {how}")
    if facts.joined:
        return Verdict("failed", f"{worker} ended before the training was complete")
    return Verdict("failed", f"{worker} ended without training; the script must iterate over vf.elastic(...)")
