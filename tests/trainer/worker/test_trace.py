"""What a worker notes of its steps: the same from run to run, and not when something outlives a virtual node."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import habits
import numpy as np
import pytest
import torch

from tiers import nightly
from virtualflow.state import content_hash
from virtualflow.verify import Trace, describe_shortly, first_difference, read_trace


@pytest.fixture
def trace_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """The trace of a habit's script, run alone in this process; one of its steps twice if that is asked for."""
    runs = 0

    def run(habit: str, repeat: int | None = None) -> Trace:
        nonlocal runs
        runs += 1
        directory = tmp_path / f"trace-{runs}"
        monkeypatch.setenv("VIRTUALFLOW_TRACE_DIR", str(directory))
        monkeypatch.delenv("VIRTUALFLOW_TRACE_REPEAT", raising=False)
        if repeat is not None:
            monkeypatch.setenv("VIRTUALFLOW_TRACE_REPEAT", str(repeat))
        habits.main(habit)
        return read_trace(directory)

    return run


def test_a_sound_script_has_the_same_trace_again_also_when_a_step_is_repeated(trace_of) -> None:  # type: ignore[no-untyped-def]
    first, again, repeated = trace_of("none"), trace_of("none"), trace_of("none", repeat=3)
    assert first.steps == repeated.steps == list(range(1, habits.STEPS + 1))
    assert first_difference(first, again) is None
    assert first_difference(first, repeated) is None
    assert set(first.attempts.values()) == {1}
    assert {key for key, count in repeated.attempts.items() if count == 2} == {(3, 0), (3, 1)}


@pytest.mark.parametrize(
    ("habit", "found"),
    [
        pytest.param("counter", "step 3, virtual node 0: gradient of first.weight", id="a counter in forward"),
        nightly("generator", "step 3, virtual node 0: gradient of first.weight", id="its own generator"),
        nightly("recurrent", "step 3, virtual node 0: gradient of first.weight", id="a hidden state"),
        nightly("criterion", "step 3, virtual node 0: gradient of first.weight", id="a criterion with a state"),
        pytest.param("counting dataset", "step 3, virtual node 0: the data of its samples", id="a counting dataset"),
        pytest.param("running metric", "step 3, virtual node 0: metric loss", id="a running metric"),
        nightly("draws", "step 3, virtual node 0: the random numbers drawn", id="more random numbers each time"),
    ],
)
def test_what_outlives_a_virtual_node_shows_when_a_step_is_repeated(trace_of, habit: str, found: str) -> None:  # type: ignore[no-untyped-def]
    difference = first_difference(trace_of(habit), trace_of(habit, repeat=3))
    assert difference is not None
    assert describe_shortly(difference) == found


def test_a_model_that_is_built_anew_each_time_differs_before_the_first_step(trace_of) -> None:  # type: ignore[no-untyped-def]
    first = trace_of("unseeded")
    difference = first_difference(first, trace_of("unseeded"))
    assert difference is not None
    assert describe_shortly(difference) == "before the first step: parameter first.weight"


def test_an_average_beside_the_model_is_noticed(trace_of) -> None:  # type: ignore[no-untyped-def]
    def beside(habit: str) -> set[str]:
        return {name for name in next(iter(trace_of(habit).before[2].values())) if name.startswith("beside")}

    gc.collect()
    assert beside("average") - beside("none") == {"beside the model: Plain"}  # other tests may have left some, too


class Forgotten(torch.nn.Module):
    """A model in a circle of references, which only a collection frees."""

    itself: list[Forgotten]

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))


class Finalized:
    """A circle of references whose collection waits, with the interpreter free for others."""

    def __init__(self, begun: threading.Event, ends: threading.Event) -> None:
        self.itself, self.begun, self.ends = self, begun, ends

    def __del__(self) -> None:
        self.begun.set()
        self.ends.wait(60)


def test_a_model_that_nobody_keeps_is_not_beside_while_another_thread_collects_garbage(
    trace_of,  # type: ignore[no-untyped-def]
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ends = threading.Event(), threading.Event()

    def collect_elsewhere() -> None:
        Finalized(begun, ends)
        gc.collect()

    def collect() -> int:
        found = really_collect()
        ends.set()  # the first call has done nothing
        return found

    gc.collect()
    really_collect = gc.collect
    other = threading.Thread(target=collect_elsewhere, daemon=True)
    other.start()
    assert begun.wait(60)
    forgotten = Forgotten()
    forgotten.itself = [forgotten]
    del forgotten
    monkeypatch.setattr("virtualflow.worker.records.gc.collect", collect)
    gc.disable()  # nobody else collects it
    try:
        before = next(iter(trace_of("none").before[2].values()))
    finally:
        gc.enable()
    assert not [name for name in before if "Forgotten" in name]
    other.join(60)


def test_without_a_trace_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VIRTUALFLOW_TRACE_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    habits.main("none")
    assert list(tmp_path.iterdir()) == []


# --- hashes -----------------------------------------------------------------------------------------------------------


class Point:
    """An object of a user."""

    def __init__(self, x: float) -> None:
        self.x = x


EQUAL = {
    "a tensor and its copy in another layout": (torch.eye(3), torch.eye(3).t().contiguous()),
    "a sparse tensor": (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
    "an empty tensor": (torch.empty(0, 3), torch.empty(0, 3)),
    "dictionaries in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "sets": ({"x", "y", "z"}, {"z", "y", "x"}),
    "not a number": (torch.tensor(float("nan")), torch.tensor(float("nan"))),
    "objects": (Point(1.0), Point(1.0)),
    "arrays": (np.arange(4), np.arange(4)),
    "arrays of objects": (np.array([Point(1.0)]), np.array([Point(1.0)])),
}
DIFFERENT = {
    "one bit": (torch.tensor([1.0]), torch.tensor([1.0]).nextafter(torch.tensor([2.0]))),
    "minus zero": (torch.tensor([0.0]), torch.tensor([-0.0])),
    "another shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "another type": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "an integer and a text": (1, "1"),
    "nests": ([[1], [2]], [[1, 2]]),
    "a list in another order": ([1, 2], [2, 1]),
    "objects": (Point(1.0), Point(2.0)),
    "arrays": (np.arange(4), np.arange(4)[::-1]),
}


@pytest.mark.parametrize(("one", "other"), EQUAL.values(), ids=EQUAL.keys())
def test_equal_content_has_equal_hashes(one: object, other: object) -> None:
    assert content_hash(one) == content_hash(other)


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT.keys())
def test_other_content_has_another_hash(one: object, other: object) -> None:
    assert content_hash(one) != content_hash(other)


def test_what_contains_itself_has_a_hash() -> None:
    nest: list[object] = [random.Random(0)]
    nest.append(nest)
    assert len(content_hash(nest)) == 16
