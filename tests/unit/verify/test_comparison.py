"""The first difference between two traces: found where it is, told in the order of causes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.verify import (
    BESIDE,
    Began,
    Committed,
    Computed,
    Difference,
    Incomparable,
    Opened,
    Record,
    Trace,
    describe,
    describe_shortly,
    explain,
    first_difference,
    guess_variation,
    merge_trace,
    other_surroundings,
)

STEPS, NODES = 4, 4
Run = list[list[Record]]
"""The records of each worker process."""


def opened(worker: str, **changes: Any) -> Opened:
    facts = {"seed": 0, "batch_size": 16, "reproducibility": "bitwise", "torch": "2.9", "hash_seed": "0"}
    return Opened(worker, f"{worker}'s", NODES, **(facts | changes))


def computed(step: int, node: int, generation: tuple[int, int] = (1, 1)) -> Computed:
    gradients = {"a": f"ga{step}{node}", "b": f"gb{step}{node}"}
    return Computed(
        generation,
        step,
        node,
        f"s{step}{node}",
        f"d{step}{node}",
        "r",
        gradients,
        {"m": f"m{step}{node}"},
        {"loss": "1.5"},
    )


def state(step: int) -> dict[str, str]:
    return {"optimizer's lr in group 0": "0.1", "parameter a": f"a{step}", "buffer m": f"m{step}", f"{BESIDE}EMA": "e"}


def recorded(workers: int = 1, **changes: Any) -> Run:
    """The records of a run in which everything is as it should be."""
    run: Run = []
    for rank in range(workers):
        records: list[Record] = [opened(f"worker-{rank}", **changes)]
        for step in range(1, STEPS + 1):
            records.append(Began(step, state(step - 1)))
            records += [computed(step, node) for node in range(NODES) if node * workers // NODES == rank]
            records.append(Committed((1, 1), step, state(step), {"loss": "1.5"}))
        run.append(records)
    return run


def compare(one: Run, two: Run) -> Difference | None:
    return first_difference(merge_trace(one), merge_trace(two))


def change(run: Run, kind: type[Record], step: int, field: str, value: Any, node: int | None = None) -> None:
    """Change what all (or the one that computed ``node``) have noted of a step."""
    for records in run:
        for place, record in enumerate(records):
            if type(record) is not kind or record.step != step:  # type: ignore[union-attr]
                continue
            if node is None or getattr(record, "virtual_node", None) == node:
                former = getattr(record, field)
                records[place] = msgspec.structs.replace(record, **{field: _with(former, value)})


def _with(former: Any, value: Any) -> Any:
    return former | value if isinstance(former, dict) else value


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_runs_on_any_number_of_workers_are_equal(workers: int) -> None:
    assert compare(recorded(), recorded(workers)) is None


CASES: dict[str, tuple[Callable[[Run], None], str, str]] = {
    "another model from the start": (
        lambda run: change(run, Began, 1, "state", {"parameter a": "x"}),
        "before the first step: parameter a",
        "seed with torch.manual_seed(0)",
    ),
    "a name of each run's own": (
        lambda run: change(run, Began, 1, "state", {"state of logger, folder": "'run-7'"}),
        "before the first step: state of logger, folder",
        "keep that name out of the state",
    ),
    "code after a step": (
        lambda run: change(run, Began, 3, "state", {"parameter a": "x"}),
        "step 2, after the code behind it: parameter a",
        "change the model in all workers alike",
    ),
    "an average beside the model": (
        lambda run: change(run, Began, 3, "state", {f"{BESIDE}EMA": "x"}),
        "step 2, after the code behind it: beside the model: EMA",
        "make it part of the model",
    ),
    "other samples": (
        lambda run: change(run, Computed, 2, "samples", "x", node=1),
        "step 2, virtual node 1: its samples",
        "a fixed seed=",
    ),
    "the same samples made otherwise": (
        lambda run: change(run, Computed, 2, "data", "x", node=3),
        "step 2, virtual node 3: the data of its samples",
        "follow from its index alone",
    ),
    "another gradient": (
        lambda run: change(run, Computed, 2, "gradients", {"b": "x"}, node=3),
        "step 2, virtual node 3: gradient of b",
        "draw from torch's global generator",
    ),
    "a gradient that only one run has": (
        lambda run: change(run, Computed, 2, "gradients", {"c": "x"}, node=3),
        "step 2, virtual node 3: gradient of c",
        "draw from torch's global generator",
    ),
    "a buffer": (
        lambda run: change(run, Computed, 2, "buffers", {"m": "x"}, node=0),
        "step 2, virtual node 0: buffer m",
        "its former value",
    ),
    "nothing but a metric": (
        lambda run: change(run, Computed, 2, "metrics", {"loss": "2.5"}, node=0),
        "step 2, virtual node 0: metric loss",
        "the value of the present micro-batch",
    ),
    "random numbers": (
        lambda run: change(run, Computed, 2, "random", "x", node=0),
        "step 2, virtual node 0: the random numbers drawn",
        "draw the same for every micro-batch",
    ),
    "the sum": (
        lambda run: change(run, Committed, 2, "metrics", {"loss": "x"}),
        "step 2, over all virtual nodes: loss",
        "please report it",
    ),
    "a scheduler that the inner loop has stepped": (
        lambda run: change(run, Committed, 2, "state", {"optimizer's lr in group 0": "0.2", "parameter a": "x"}),
        "step 2, after the update: optimizer's lr in group 0",
        "scheduler=",
    ),
    "the update": (
        lambda run: change(run, Committed, 2, "state", {"parameter a": "x"}),
        "step 2, after the update: parameter a",
        "after the inner loop",
    ),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("spoil", "where", "remedy"), CASES.values(), ids=CASES.keys())
def test_the_first_difference_is_named_with_what_to_do(
    spoil: Callable[[Run], None], where: str, remedy: str, workers: int
) -> None:
    other = recorded(workers)
    spoil(other)
    for later in (Computed, Committed):  # what follows from it
        change(other, later, 4, "metrics", {"loss": "9"})
    found = compare(recorded(), other)
    assert found is not None
    assert describe_shortly(found) == where
    assert remedy in explain(found, "workers").remedy


@given(
    step=st.integers(1, STEPS),
    node=st.integers(0, NODES - 1),
    field=st.sampled_from(["samples", "data", "random", "gradients", "buffers", "metrics"]),
    workers=st.sampled_from([1, 2, 4]),
    noise=st.lists(st.tuples(st.integers(1, STEPS), st.integers(0, NODES - 1)), max_size=5),
)
def test_no_difference_escapes_and_none_is_before_the_first(
    step: int, node: int, field: str, workers: int, noise: list[tuple[int, int]]
) -> None:
    other = recorded(workers)
    former = getattr(computed(1, 0), field)
    change(other, Computed, step, field, dict.fromkeys(former, "x") if isinstance(former, dict) else "x", node=node)
    for at, of in noise:
        if at >= step:
            change(other, Computed, at, "metrics", {"loss": "9"}, node=of)
    found = compare(recorded(), other)
    assert found is not None
    others = [of for at, of in noise if at == step]
    assert found.step == step
    assert found.virtual_node == (node if field in ("samples", "data") else min([node, *others]))


def test_a_worker_that_differs_from_the_others_of_its_run_is_named() -> None:
    other = recorded(2)
    change(other[1:], Began, 3, "state", {"parameter a": "x"})
    found = compare(recorded(), other)
    assert found is not None
    assert (found.within, found.workers, found.stage) == (1, ("worker-0", "worker-1"), "behind")
    where = "step 2, after the code behind it: parameter a"
    assert describe(found, ("A", "B")) == f"{where}: a2 in worker-0, x in worker-1 of B"
    found = compare(other, recorded())
    assert found is not None
    assert found.within == 0


def test_both_values_are_shown_and_the_others_counted() -> None:
    other = recorded()
    change(other, Computed, 1, "gradients", {"a": "x", "b": "y"}, node=2)
    found = compare(recorded(), other)
    assert found is not None
    assert describe(found, ("A", "B")) == "step 1, virtual node 2: gradient of a and 1 more: ga12 in A, x in B"


def test_only_the_steps_that_both_have_made_are_compared() -> None:
    shorter, other = recorded(), recorded()
    del shorter[0][-1]  # the commit of the last step
    change(other, Computed, STEPS, "data", "x")
    assert compare(shorter, other) is None
    assert first_difference(merge_trace(recorded()), merge_trace(other), last=STEPS - 1) is None


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"seed": 7}, "0 as its seed and the other 7", id="seed"),
        pytest.param({"batch_size": 32}, "16 samples in a batch and the other 32", id="batch"),
        pytest.param({"reproducibility": "statistical"}, "VIRTUALFLOW_REPRODUCIBILITY=Bitwise", id="statistical"),
    ],
)
def test_different_trainings_are_not_compared(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Incomparable, match=sentence):
        compare(recorded(), recorded(**changes))


def test_runs_without_a_common_step_are_not_compared() -> None:
    with pytest.raises(Incomparable, match="no committed step in common"):
        compare(recorded(), [[opened("worker-0")]])


@pytest.mark.parametrize(
    ("two", "variation"),
    [
        pytest.param(recorded(), "nothing", id="nothing"),
        pytest.param(recorded(hash_seed="1"), "hash seed", id="another hash seed"),
        pytest.param(recorded(hash_seed=""), "workers", id="a hash seed that nobody knows"),
        pytest.param(recorded(2), "workers", id="another number of workers"),
    ],
)
def test_in_what_two_runs_were_not_the_same_is_guessed(two: Run, variation: str) -> None:
    assert guess_variation(merge_trace(recorded()), merge_trace(two)) == variation


def test_another_torch_and_another_hash_seed_are_told() -> None:
    def told(**changes: Any) -> list[str]:
        return other_surroundings(merge_trace(recorded()), merge_trace(recorded(**changes)))

    assert told() == []
    assert told(torch="2.10") == ["torch 2.9 here, torch 2.10 there"]
    assert told(hash_seed="1") == ["PYTHONHASHSEED was 0 and 1"]
    assert "not set everywhere" in told(hash_seed="")[0]


def test_a_schedule_that_differs_in_a_joiner_alone_follows_from_a_count_that_was_not_kept() -> None:
    other = recorded(2)
    change(other[1:], Committed, 2, "state", {"optimizer's lr in group 0": "0.2"})
    found = compare(recorded(), other)
    assert found is not None
    assert "LambdaLR" in explain(found, "workers").what


def test_with_another_hash_seed_or_nothing_changed_the_cause_is_that() -> None:
    other = recorded()
    change(other, Computed, 1, "data", "x")
    found = compare(recorded(), copy.deepcopy(other))
    assert found is not None
    assert "sort it" in explain(found, "hash seed").remedy
    assert "torch.manual_seed" in explain(found, "nothing").remedy
    assert "buffer" in explain(found, "resume").remedy


# --- traces -----------------------------------------------------------------------------------------------------------


def test_an_attempt_that_was_aborted_is_not_in_the_trace() -> None:
    run = recorded()
    aborted = msgspec.structs.replace(computed(2, 1), data="aborted")
    place = run[0].index(computed(2, 1))
    run[0].insert(place, aborted)  # it was repeated in the same generation
    trace = merge_trace(run)
    assert trace.nodes[2][1][1] == computed(2, 1)
    assert trace.attempts[2, 1] == 2
    assert first_difference(merge_trace(recorded()), trace) is None


def test_a_step_counts_in_the_highest_generation_that_committed_it() -> None:
    dead = [opened("worker-1"), msgspec.structs.replace(computed(2, 1, (1, 2)), data="of the dead")]
    later = [opened("worker-2"), computed(3, 0, (1, 3)), Committed((1, 3), 3, state(3), {"loss": "1.5"})]
    trace = merge_trace([*recorded(), dead, later])
    assert trace.nodes[2][1][1].data == "d21"  # generation 2 never committed the step
    assert trace.nodes[3][0][0] == ("worker-2", "worker-2's")
    assert trace.nodes[3][1][0] == ("worker-0", "worker-0's")  # kept from the generation before
    assert list(trace.after[3]) == [("worker-2", "worker-2's")]


def test_an_attempt_without_a_commit_is_not_compared() -> None:
    run = recorded()
    run[0].append(computed(STEPS + 1, 0))
    trace = merge_trace(run)
    assert trace.steps == list(range(1, STEPS + 1))
    assert STEPS + 1 not in trace.nodes


def test_a_trace_is_a_value() -> None:
    assert merge_trace([]) == Trace()
