"""What all tests share: a place for passing files that goes away with them."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from multiprocessing.util import Finalize

import pytest


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
