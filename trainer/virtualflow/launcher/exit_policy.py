"""What the end of a worker's process means. A pure function: facts in, verdict with its reason out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from virtualflow.launcher.supervisor import describe_exit
from virtualflow.protocol.termination_message import EXIT_EVICTED


@dataclass(frozen=True)
class ExitVerdict:
    """Whether a worker is to be replaced (``lost``) or done without (``refused``), or the job has failed, or neither,
    or it cannot be told yet.
    """

    kind: Literal["fine", "lost", "refused", "failed", "open"]
    reason: str = ""


def judge(
    worker: str,
    code: int,
    *,
    over: bool,
    done: bool,
    alone: bool,
    joined: bool,
    left: bool,
    killed: bool,
    declared_lost: bool,
    refused: str | None,
    fault: str | None,
    others_well: bool,
    said: str,
    unknown: bool,
    expired: bool,
) -> ExitVerdict:
    """What it means that the process of a worker has ended.

    Args:
        worker: its name.
        code: return code as ``subprocess`` gives it.
        over: the job is ending already, whatever the reason.
        done: the training is complete; the script may go on to another one.
        alone: no other worker's process lives.
        joined: the coordinator knew the worker.
        left: it was asked to leave, or had seen the end of the training.
        killed: the runner killed it on purpose.
        declared_lost: by the coordinator.
        refused: why the coordinator has not admitted it, if so. What it looks at (library, settings of the script,
            machine, memory) is the same when the process is started again.
        fault: of its machine, which has ended it, if so: the next one may be spared.
        others_well: some other worker has not met one, or not before it joined. Before it joins, a fault that all meet
            ends the job, as one does in the training if nobody else is there.
        said: the sentence with which the library has ended its script; empty: it did not.
        unknown: the coordinator's status of after the end says nothing of it.
        expired: the status had time to explain the end, and did not.
    """
    how = describe_exit(code)
    if done:
        if code == 0 or killed or refused is not None or fault is not None:
            return ExitVerdict("fine")
        if code < 0 and not alone:
            return ExitVerdict("open")  # in another run of the script, others may do without it or have it replaced
        return ExitVerdict("failed", f"{worker} ended after the training: {how}")
    if over:
        return ExitVerdict("fine")
    if code < 0 or killed or declared_lost:
        return ExitVerdict("lost", how)
    if fault is not None and joined:
        return ExitVerdict("lost", fault)
    if refused is not None:
        return ExitVerdict("refused", refused)
    if code == EXIT_EVICTED:
        # Of one that was never admitted, the reason may be on its way.
        return ExitVerdict("lost", how) if joined or unknown or expired else ExitVerdict("open")
    if code == 0 and left:
        return ExitVerdict("fine")
    if code > 0 and not joined and unknown:
        if fault is not None and others_well:
            return ExitVerdict("lost", fault)
        return ExitVerdict("failed", f"{worker} ended before it could join: {fault or said or how}")
    if not expired:
        return ExitVerdict(
            "open"
        )  # An error is on its way to the status, with its traceback; or the end of the training.
    if code > 0:
        return ExitVerdict("failed", f"{worker} ended with {how}")
    if joined:
        return ExitVerdict("failed", f"{worker} ended before the training was complete")
    return ExitVerdict("failed", f"{worker} ended without training; the script must iterate over vf.elastic(...)")
