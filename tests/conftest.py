"""What all tests share: a place for passing files that goes away with them, and which examples hypothesis tries."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize

import pytest
from hypothesis import HealthCheck, settings

from tiers import not_run

os.environ.setdefault("PYTHONHASHSEED", "0")  # that of workers, or none of those that tests start could be a fork
# Several processes test side by side: more threads than cores would wait for each other, and spin while they do.
os.environ["OMP_NUM_THREADS"] = "1"

EXAMPLES = {"default": 20, "nightly": 200}
"""What hypothesis tries where a test does not say otherwise; one that does, says it for 100 (see ``tiers``)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that choose the tier (see ``tiers``)."""
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")
    parser.addoption("--nightly", action="store_true", help="run all tests, and try more examples")


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples are tried, before any test is imported.

    They are the same in every run, so that a failure is a change's; VIRTUALFLOW_RANDOM_EXAMPLES=1 looks for others.
    How long an example takes says more about the machine than about the change.
    """
    settings.register_profile(
        "chosen",
        max_examples=EXAMPLES["nightly" if config.getoption("nightly") else "default"],
        derandomize=not os.environ.get("VIRTUALFLOW_RANDOM_EXAMPLES"),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("chosen")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without the garbage collector, and let it pass over what there is then: modules, tests, parameters.

    All of that stays, and it would walk through it again and again.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what belongs to a tier that was not asked for."""
    if config.getoption("nightly"):
        return
    above = {"nightly"} if config.getoption("slow") else {"nightly", "slow"}
    left_out = [item for item in items if any(mark.name in above for mark in item.iter_markers())]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        kept = set(items).difference(left_out)
        items[:] = [item for item in items if item in kept]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line what was not run for want of a program or a package; ``-rs`` lists each test."""
    skipped = [report.longrepr for report in terminalreporter.getreports("skipped")]
    line = not_run(reason[2].removeprefix("Skipped: ") for reason in skipped if isinstance(reason, tuple))
    if line:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def passing_files() -> Iterator[None]:
    """Give this process and all that it starts a temporary directory of their own: what is killed leaves things there.

    Its name is short, because sockets go into it.
    """
    former = os.environ.get("TMPDIR")
    directory = tempfile.mkdtemp(prefix="vf-")
    # After multiprocessing has removed its own part of it, which it does at a priority of -100.
    Finalize(None, shutil.rmtree, args=(directory,), kwargs={"ignore_errors": True}, exitpriority=-200)
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    yield
    tempfile.tempdir = None
    if former is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = former
