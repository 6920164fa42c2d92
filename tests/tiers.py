"""The tiers of the tests: ``make test`` before every change, ``make test-slow`` before it is taken, ``make test-all``.

A test is marked ``slow`` where it takes more than a second of a processor and quicker ones stand beside it: a whole
story of the operator, a measurement, a killing at each place, most of what a browser looks at. ``make test-slow`` runs
these alone, ``.ci/run`` both. What stays in ``make test`` whatever it takes is a kill, a resize and a loss of each kind
of training, and the models of lineage.

``make test-all`` runs everything every night.

A test is marked ``nightly`` where another one, of the default tier, would notice what it would notice: more of the same
parameters, longer runs, real interpreters where a fork does (see ``programs``). A test that tries examples tries an
eighth as many by day.

The numbers of a training are mostly proven without processes: workers are threads over collectives in memory (see
``thread_collectives``; test_reducer and test_broken_collectives). Jobs of processes stand beside them for sockets,
signals and ends. These go the whole way through the command line (*: in ``make test-slow``):

| job of processes (``tests/trainer``) | what it proves |
| --- | --- |
| jobs/test_jobs: three workers * | the bits of one worker, every sample once |
| jobs/test_jobs: resized up and down * | announced changes repeat nothing, survivors stay |
| jobs/test_jobs: all that can happen | SIGTERM, SIGKILL, SIGSTOP, no coordinator: a step repeated at most |
| jobs/test_jobs: the loss of all; without checkpoints * | the newest counts, or it starts anew and says so |
| jobs/test_jobs: a transformer; seven virtual nodes * | the same bits for other models and divisions |
| jobs/test_jobs: a manifest * | it trains like its script |
| launcher/test_library_satellites * | interpreters of their own, in which nothing is shared by a fork |
| jobs/test_chaos: one random schedule * | what nobody has thought of |
| launcher/test_cli: sleepers; an interrupted run * | nothing outlives its runner; Ctrl-C, and on from the checkpoint |
| worker/test_bad_input: a wrong token; other files * | one line and nothing lost: a full disk, others' checkpoints |
| launcher/test_demo * | the demo and the scripts of the documents run as they stand |

The others (``start_job``) are forks with a coordinator in a thread of the test: one for each kind of training
(test_features), and a kill, a drain, a join and a broken collective of each kind of optimizer and of reproducibility.
By night come: gradients that are sent late in each of those trainings, all numbers of workers, kills at every few
collectives of a real connection, eight workers, real interpreters, a second random schedule.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(count: int) -> int:
    """Return how many examples a test tries, of which it would try ``count`` if others tried 100."""
    return max(1, count * settings.default.max_examples // 100)


def nightly(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - pytest's name
    """Give ``pytest.param`` of the nightly tier."""
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)


def slow(*values: Any, id: str | None = None) -> Any:  # noqa: A002 - pytest's name
    """Give ``pytest.param`` of the slow tier."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def needs(package: str, why_not: str = "make test-all installs it") -> pytest.MarkDecorator:
    """Mark what is skipped where a package of others is not there."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"needs {package}: {why_not}")


def needs_newer(owner: object, name: str) -> pytest.MarkDecorator:
    """Mark what is skipped on a torch that is older than a name of its."""
    return pytest.mark.skipif(not hasattr(owner, name), reason=f"needs a newer torch: this one has no {name}")


def not_run(reasons: Iterable[str]) -> str:
    """Sum up in one line why tests were skipped; empty if none was.

    A reason that reads ``needs helm: put it on PATH`` counts for helm. All others are counted together.
    """
    needed: Counter[str] = Counter()
    others = 0
    for reason in reasons:
        if reason.startswith("needs "):
            needed[reason.removeprefix("needs ").partition(":")[0]] += 1
        else:
            others += 1
    total = needed.total() + others
    if not total:
        return ""
    parts = [f"{count} {what}" for what, count in needed.most_common()]
    if parts:
        most, _, what = parts[0].partition(" ")
        parts[0] = f"{most} {'needs' if most == '1' else 'need'} {what}"
    if others:
        parts.append(f"{others} for other reasons")
    return f"{total} test{'' if total == 1 else 's'} not run here: {', '.join(parts)} (-rs lists them)"
