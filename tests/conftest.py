"""What all tests share: a place for passing files that goes away with them, and which examples hypothesis tries."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize

import pytest
from hypothesis import HealthCheck, settings

# The same examples in every run, so that a failure is a change's; VIRTUALFLOW_RANDOM_EXAMPLES=1 looks for others.
# How long an example takes says more about the machine than about the change.
for name, derandomize in (("same", True), ("random", False)):
    settings.register_profile(
        name, derandomize=derandomize, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
settings.load_profile("random" if os.environ.get("VIRTUALFLOW_RANDOM_EXAMPLES") else "same")


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
