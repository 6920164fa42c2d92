"""VirtualFlow: elastic training over a fixed number of virtual nodes, to the same bits on any number of workers.

``import virtualflow as vf`` is light: torch is imported when a name that needs it is first used. In a worker that is
process 1 of a container it makes SIGTERM end the process, which Linux would not do by itself; a script that takes long
to import does well to import it first. Anywhere else it changes nothing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from virtualflow.errors import ConfigurationError, Drained, VirtualFlowError

if TYPE_CHECKING:
    from virtualflow.checkpoint import CheckpointPolicy
    from virtualflow.entry import elastic
    from virtualflow.evaluation import evaluate
    from virtualflow.loop import Run
    from virtualflow.step import Step

__all__ = [
    "CheckpointPolicy",
    "ConfigurationError",
    "Drained",
    "Run",
    "Step",
    "VirtualFlowError",
    "elastic",
    "evaluate",
]
__version__ = "0.1.0"

_LAZY = {
    "CheckpointPolicy": "virtualflow.checkpoint",
    "Run": "virtualflow.loop",
    "Step": "virtualflow.step",
    "elastic": "virtualflow.entry",
    "evaluate": "virtualflow.evaluation",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'virtualflow' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


if os.getpid() == 1:
    from virtualflow.first_process import prepare_worker

    prepare_worker()
