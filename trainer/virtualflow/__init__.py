"""VirtualFlow: elastic training over a fixed number of virtual nodes, to the same bits on any number of workers.

``import virtualflow as vf`` is light: torch is imported when a name that needs it is first used. In a worker that is
process 1 of a container it makes SIGTERM end the process, which Linux would not do by itself; a script that takes long
to import does well to import it first. An error that nobody catches is shown as before, with what to do behind it where
that is known, and the library's own as one sentence (``sys.excepthook``). Nothing else is changed.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from virtualflow import _start  # it remembers where the process began
from virtualflow._imports import load
from virtualflow._version import __version__ as __version__
from virtualflow.errors import ConfigurationError, Drained, VirtualFlowError, show_errors_plainly

if TYPE_CHECKING:
    from virtualflow.launcher.registry import live_page as live_page
    from virtualflow.memory.activations import Memory
    from virtualflow.reduction.settings import Exchange
    from virtualflow.state import CheckpointPolicy
    from virtualflow.step import PartialBackward
    from virtualflow.worker.entry import elastic
    from virtualflow.worker.evaluation import evaluate
    from virtualflow.worker.options import ShardParameters
    from virtualflow.worker.prediction import predict
    from virtualflow.worker.run import Run
    from virtualflow.worker.step import Step

__all__ = [
    "CheckpointPolicy",
    "ConfigurationError",
    "Drained",
    "Exchange",
    "Memory",
    "PartialBackward",
    "Run",
    "ShardParameters",
    "Step",
    "VirtualFlowError",
    "elastic",
    "evaluate",
    "predict",
]

_LAZY = {
    "CheckpointPolicy": "virtualflow.state.checkpoint_writer",
    "Exchange": "virtualflow.reduction.settings",
    "Memory": "virtualflow.memory.activations.planned",
    "PartialBackward": "virtualflow.step.partial_backward",
    "Run": "virtualflow.worker.run",
    "ShardParameters": "virtualflow.worker.options",
    "Step": "virtualflow.worker.step",
    "elastic": "virtualflow.worker.entry",
    "evaluate": "virtualflow.worker.evaluation",
    "live_page": "virtualflow.launcher.registry",
    "predict": "virtualflow.worker.prediction",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'virtualflow' has no attribute {name!r}")
    return load(_LAZY[name], name)


show_errors_plainly()
if os.getpid() == 1:
    from virtualflow._process import prepare_worker

    prepare_worker()
