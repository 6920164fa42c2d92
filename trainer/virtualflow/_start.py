"""Where this process was when it imported the library: relative paths in its environment are meant from there.

Scripts change their working directory (hydra does for each run), and whoever wrote the environment could not know to
which.
"""

from __future__ import annotations

import os
from pathlib import Path


def _here() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted: relative paths stay what they are
        return ""


_DIRECTORY = _here()


def from_start(path: str) -> Path:
    """``path``, taken from there unless it is absolute."""
    return Path(_DIRECTORY, path)
