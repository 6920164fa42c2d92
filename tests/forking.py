"""Processes of tests come from one server that has imported already what they need: torch alone takes two seconds.

Python has one such server for all that ask for it, so what it imports is said here for all of them, too.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path

FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",  # what the first optimizer of a process imports, for two seconds
        "numpy",
        "sklearn.datasets",  # of the examples
        "virtualflow.worker.prediction",
        "safetensors.torch",
        "pytest",
        "hypothesis.stateful",
        "elastic_jobs",
        "virtualflow_operator.controllers.watches",
        "kopf",
        "kubernetes.config",
        "running",
        "programs",
        "frozen",
    ]
)

_HERE = Path(__file__).parent
PATHS = [str(_HERE / "trainer"), str(_HERE / "operator"), str(_HERE)]
"""Where modules of tests lie that several of them share."""
_PRODUCT = [str(_HERE.parent / "trainer"), str(_HERE.parent / "operator")]


def start(process: BaseProcess) -> None:
    """Start a process; the first brings the server with it."""
    with _importable():
        process.start()


@contextmanager
def _importable() -> Iterator[None]:
    # Before Python 3.13 the server does not take over sys.path.
    former = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*PATHS, *_PRODUCT, *([former] if former else [])])
    try:
        yield
    finally:
        if former is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = former
