"""The simulation of mixed devices: the solver's split is never worse than either of its alternatives."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from benchmarks import heterogeneous as h
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("counts", h.COUNTS, ids=str)
@pytest.mark.parametrize("pair", h.PAIRS, ids=lambda pair: f"{pair[0].name} with {pair[1].name}")
def test_the_split_beats_the_even_one_and_the_fast_devices_alone(
    pair: tuple[h.Device, h.Device], counts: tuple[int, int]
) -> None:
    row = h.compare(*pair, counts, virtual_nodes=64, samples=128, gigabits=25.0)
    assert row.even < row.split < row.bound
    assert row.fast_alone < row.split


@given(ratio=st.floats(1.0, 20.0), fast=st.integers(1, 8), slow=st.integers(1, 8), virtual_nodes=st.integers(16, 128))
def test_of_all_splits_over_the_devices_it_is_never_worse_than_the_even_one(
    ratio: float, fast: int, slow: int, virtual_nodes: int
) -> None:
    devices = h.Device("fast", 100.0 * ratio, "made up"), h.Device("slow", 100.0, "made up")
    row = h.compare(*devices, (fast, slow), virtual_nodes, samples=32, gigabits=0.0)
    assert row.split >= row.even * (1 - 1e-9)
    assert row.split <= row.bound * (1 + 1e-9)


def test_a_step_is_the_slowest_worker_and_the_exchange() -> None:
    device = h.Device("one", 100.0, "made up")
    assert h.step_seconds([3], [device], samples=50, gigabits=25.0) == 1.5
    two = h.step_seconds([3, 1], [device, device], samples=50, gigabits=8.0)
    assert math.isclose(two, 1.5 + 4 * h.PARAMETERS / 1e9 + 2 * h.LATENCY)


def test_the_table_and_its_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    h.main(["--json", str(path)])
    printed = capsys.readouterr().out
    assert "2 V100 + 8 P100" in printed
    content = json.loads(path.read_text())
    assert len(content["rows"]) == len(h.PAIRS) * len(h.COUNTS)
    assert all(device["source"] for device in content["devices"].values())
