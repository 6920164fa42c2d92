"""A split of the virtual nodes that a measurement asks for, and that stays: workers are given profiles that ask for it,
and tell no pace that they measure.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import msgspec

from virtualflow.protocol.device_profile import encode, read_profile
from virtualflow.protocol.settings import ENV_PROFILE
from virtualflow.worker.pace import PaceReportPolicy


def write_profiles(profile: Path, counts: Sequence[int], directory: Path) -> None:
    """Write a profile for each worker, by its number: by these, all are through with their ``counts`` at once.

    Args:
        profile: one that fits the workers.
    """
    measured = read_profile(profile)
    for number, count in enumerate(counts):
        seconds = 1 / count
        sizes = (msgspec.structs.replace(measured.sizes[0], seconds=seconds),)
        (directory / f"{number}.json").write_bytes(encode(msgspec.structs.replace(measured, sizes=sizes)))


def take(directory: Path, number: int) -> None:
    """Take the profile of worker ``number`` for this process, and tell no other pace from now on."""
    os.environ[ENV_PROFILE] = str(directory / f"{number}.json")
    patch.object(PaceReportPolicy, "is_due", return_value=False).start()
