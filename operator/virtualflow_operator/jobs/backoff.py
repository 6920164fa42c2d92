"""Which ends of pods are crashes in the user's code, and a job's books of them: ``status.failures``. Pure.

``virtualflow.protocol.crashes`` says what a crash counts for, and how long is waited after it. A worker that the
coordinator refused or declared lost (exit code 75), or that hangs or was found to be wrong, counts as one; disruptions
never come here.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from virtualflow.protocol.crashes import Crashes
from virtualflow_operator.api import Failures, Pod, format_time, parse_time
from virtualflow_operator.settings import CrashSettings


def uncounted(failures: Failures, crashed: Collection[Pod]) -> list[Pod]:
    return [pod for pod in crashed if pod.uid not in failures.counted]


def count_crash(
    failures: Failures, crashed: Collection[Pod], step: int, message: str, now: float, settings: CrashSettings
) -> Failures:
    """Put these crashed pods into the books.

    Args:
        crashed: all crashed pods that still exist; the counted ones stay in the books as long as they do.
    """
    uids = tuple(sorted({*failures.counted, *(pod.uid for pod in crashed)}))
    if not _of_another_round(failures, crashed):
        return msgspec.structs.replace(failures, counted=uids)
    # The first of a streak is replaced at once, as the kubelet restarts a container.
    return _count(failures, step, message, now, settings, uids, at_once=1)


def count_refusal(
    failures: Failures,
    crashed: Collection[Pod],
    refused: Collection[Pod],
    message: str,
    now: float,
    settings: CrashSettings,
) -> Failures:
    """Put workers into the books that a kubelet has refused.

    That is nobody's crash, but one that is refused again and again is waited for longer and longer.

    Args:
        refused: all refused ones that still exist.
    """
    uids = tuple(sorted(pod.uid for pod in (*crashed, *refused) if pod.uid in failures.counted or pod in refused))
    if not uncounted(failures, refused):
        return msgspec.structs.replace(failures, counted=uids)
    counted = _count(failures, failures.step, message, now, settings, uids, at_once=1)
    return msgspec.structs.replace(counted, count=failures.count)


def count_failed_attempt(
    failures: Failures, crashed: Collection[Pod], step: int, message: str, now: float, settings: CrashSettings
) -> Failures:
    """The job as a whole has failed: all workers start again after a wait.

    A failure whose worker was counted as a crashed pod already is not counted twice.
    """
    raised = [pod for pod in crashed if pod.exit and pod.exit.last_word and pod.exit.last_word.kind == "failed"]
    if raised and not _of_another_round(failures, raised):
        waiting = _read(failures).waiting(now, settings.waits)
        return _write(failures, waiting, message, ())
    return _count(failures, step, message, now, settings, (), at_once=0)


def _of_another_round(failures: Failures, crashed: Collection[Pod]) -> bool:
    """Whether one of these is in no book and was made after the last crash that is."""
    return _read(failures).begins_round(pod.created for pod in uncounted(failures, crashed))


def _count(
    failures: Failures,
    step: int,
    message: str,
    now: float,
    settings: CrashSettings,
    uids: tuple[str, ...],
    at_once: int,
) -> Failures:
    return _write(failures, _read(failures).after(step, now, settings.waits, at_once=at_once), message, uids)


def _read(failures: Failures) -> Crashes:
    last, retry = parse_time(failures.last_time), parse_time(failures.retry_time)
    return Crashes(failures.count, failures.streak, failures.step, last, retry)


def _write(failures: Failures, crashes: Crashes, message: str, uids: tuple[str, ...]) -> Failures:
    return msgspec.structs.replace(
        failures,
        count=crashes.count,
        streak=crashes.streak,
        step=crashes.step,
        last_time=None if crashes.last is None else format_time(crashes.last),
        retry_time=None if crashes.retry is None else format_time(crashes.retry),
        message=message,
        counted=uids,
    )
