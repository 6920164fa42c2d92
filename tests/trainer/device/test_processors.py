"""How many processors a process has: by affinity, and by what its container is granted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from virtualflow.device import count_processors, has_spare_processor


@pytest.mark.parametrize(
    ("files", "granted"),
    [
        pytest.param({}, None, id="no container"),
        pytest.param({"cpu.max": "max 100000\n"}, None, id="version 2, no limit"),
        pytest.param({"cpu.max": "250000 100000\n"}, 2, id="version 2"),
        pytest.param({"cpu.max": "10000 100000\n"}, 1, id="version 2, a part of one"),
        pytest.param(
            {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None, id="version 1, no limit"
        ),
        pytest.param({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1, id="version 1"),
        pytest.param({"cpu.max": "nonsense"}, None, id="what nobody can read"),
    ],
)
def test_processors_are_those_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], granted: int | None
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert count_processors(tmp_path) == (granted or 64)


def test_an_accelerator_leaves_processors_to_the_exchange_and_threads_that_take_all_do_not() -> None:
    processors = count_processors()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(processors)
        assert has_spare_processor(torch.device("cuda"), 8)
        assert not has_spare_processor(torch.device("cpu"), 1)
        torch.set_num_threads(1)
        assert not has_spare_processor(torch.device("cpu"), processors)
        assert has_spare_processor(torch.device("cpu"), processors - 1) is (processors > 1)
    finally:
        torch.set_num_threads(before)
