"""What is measured of memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from virtualflow.device.memory_gauge import MemoryGauge, group_room
from virtualflow.launcher.training_program import ALLOCATOR_ENVIRONMENT

MEGABYTE = 1 << 20


def test_the_peak_is_measured_and_forgotten() -> None:
    gauge = MemoryGauge(torch.device("cpu"))
    gauge.begin()
    large = torch.ones(200 * MEGABYTE // 4)
    del large
    usage = gauge.end()
    assert usage is not None
    assert 190 * MEGABYTE < usage.used < 400 * MEGABYTE
    gauge.begin()
    small = torch.ones(20 * MEGABYTE // 4)
    again = gauge.end()
    assert again is not None
    assert again.used < 150 * MEGABYTE
    assert again.room > small.nbytes


_SCRIPT = """
import torch
from virtualflow.device import MemoryGauge
gauge = MemoryGauge(torch.device("cpu"))
for _ in range(3):
    gauge.begin()
    blocks = [torch.ones(2 << 20) for _ in range(20)]
    del blocks
    print(gauge.end().used >> 20)
"""


@pytest.mark.slow
def test_what_was_freed_and_kept_before_is_used_all_the_same() -> None:
    environment = {**os.environ, **ALLOCATOR_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=120)
    used = [int(line) for line in done.stdout.split()]
    assert len(used) == 3
    assert all(150 < megabytes < 250 for megabytes in used), used


def test_an_end_without_a_beginning_tells_nothing() -> None:
    assert MemoryGauge(torch.device("cpu")).end() is None


def test_of_other_devices_nothing_is_known() -> None:
    gauge = MemoryGauge(torch.device("meta"))
    gauge.begin()
    assert gauge.end() is None


@pytest.mark.parametrize(
    ("limit", "room"),
    [
        pytest.param("1000000", 1_000_000 - 700_000 + 200_000, id="a limit"),
        pytest.param("100000", 0, id="a limit that is exceeded"),
        pytest.param("max", None, id="none"),
        pytest.param("9223372036854771712", None, id="none, as version 1 says it"),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_the_room_in_a_control_group(version: int, limit: str, room: int | None, tmp_path: Path) -> None:
    names = {
        1: (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
        2: ("memory.max", "memory.current", "memory.stat", "inactive_file"),
    }
    (tmp_path / "memory").mkdir()
    most, usage, stat, cache = names[version]
    (tmp_path / most).write_text(limit + "\n")
    (tmp_path / usage).write_text("700000\n")
    (tmp_path / stat).write_text(f"anon 500000\n{cache} 200000\n")
    assert group_room(tmp_path) == room


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert group_room(tmp_path) is None
