"""Crashes in the user's code: each is counted once, waited after, and in the end too many. Pure.

A crash without a step since the last one counts against ``backoffLimit``; crashes close to each other make the wait
grow. A worker that the coordinator refused or declared lost (exit code 75), or that hangs or was found to be wrong,
counts as one; disruptions never come here.
Workers that were made before the last counted crash belong to the same round: eight workers that all miss a module are
one failure, not eight.
"""

from __future__ import annotations

from collections.abc import Collection

from virtualflow_operator.api import Failures, Pod, format_time, parse_time
from virtualflow_operator.settings import CrashSettings


def uncounted(failures: Failures, crashed: Collection[Pod]) -> list[Pod]:
    """Crashed pods that are not in the books yet."""
    return [pod for pod in crashed if pod.uid not in failures.counted]


def count_crash(
    failures: Failures, crashed: Collection[Pod], step: int, message: str, now: float, settings: CrashSettings
) -> Failures:
    """Put these crashed pods into the books.

    Args:
        failures: what was counted before.
        crashed: all crashed pods that still exist; the counted ones stay in the books as long as they do.
        step: the step that the job has reached.
        message: why, in words.
        now: Unix seconds.
        settings: the back-off.
    """
    uids = tuple(sorted({*failures.counted, *(pod.uid for pod in crashed)}))
    if not _of_another_round(failures, crashed):
        return _replace(failures, counted=uids)
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
        failures: what was counted before.
        crashed: all crashed pods that still exist.
        refused: all refused ones that still exist.
        message: why, in words.
        now: Unix seconds.
        settings: the back-off.
    """
    uids = tuple(sorted(pod.uid for pod in (*crashed, *refused) if pod.uid in failures.counted or pod in refused))
    if not uncounted(failures, refused):
        return _replace(failures, counted=uids)
    counted = _count(failures, failures.step, message, now, settings, uids, at_once=1)
    return _replace(counted, count=failures.count)


def count_failed_attempt(
    failures: Failures, crashed: Collection[Pod], step: int, message: str, now: float, settings: CrashSettings
) -> Failures:
    """The job as a whole has failed: all workers start again after a wait.

    A failure whose worker was counted as a crashed pod already is not counted twice.
    """
    raised = [pod for pod in crashed if pod.exit and pod.exit.last_word and pod.exit.last_word.kind == "failed"]
    if raised and not _of_another_round(failures, raised):
        retry = now + _delay(failures.streak, settings, at_once=0)
        return _replace(failures, counted=(), message=message, retry_time=format_time(retry))
    return _count(failures, step, message, now, settings, (), at_once=0)


def _of_another_round(failures: Failures, crashed: Collection[Pod]) -> bool:
    """Whether one of these is in no book and was made after the last crash that is."""
    last = parse_time(failures.last_time)
    return any(last is None or pod.created >= last for pod in uncounted(failures, crashed))


def _count(
    failures: Failures,
    step: int,
    message: str,
    now: float,
    settings: CrashSettings,
    uids: tuple[str, ...],
    at_once: int,
) -> Failures:
    last = parse_time(failures.last_time)
    streak = failures.streak + 1 if last is not None and now < last + settings.reset else 1
    count = failures.count + 1 if step <= failures.step else 1
    retry = now + _delay(streak, settings, at_once)
    return Failures(
        count=count,
        streak=streak,
        step=step,
        last_time=format_time(now),
        retry_time=format_time(retry),
        message=message,
        counted=uids,
        nodes=failures.nodes,
        unfit=failures.unfit,
    )


def _delay(streak: int, settings: CrashSettings, at_once: int) -> float:
    """Seconds to wait after the ``streak``-th crash in a row, of which the first ``at_once`` need no wait."""
    doublings = streak - 1 - at_once
    return 0.0 if doublings < 0 else float(min(settings.backoff_first * 2 ** min(doublings, 32), settings.backoff_most))


def _replace(failures: Failures, **changes: object) -> Failures:
    values = {name: getattr(failures, name) for name in failures.__struct_fields__}
    return Failures(**(values | changes))
