"""The command line, and a job as processes of this machine: what ``virtualflow run`` does. It needs no torch.

What it exports is for commands of other parts of the project, so that they complain as its own do.
"""

from virtualflow.launcher.usage import EXIT_FAILED, EXIT_USAGE, Number, Parser, complain
from virtualflow.progress import ProgressBar

__all__ = [
    "EXIT_FAILED",
    "EXIT_USAGE",
    "Number",
    "Parser",
    "ProgressBar",
    "complain",
]
