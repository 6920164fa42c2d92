"""What a schedule means, and how far a scheduled job may run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from statuses import coordinator_status
from virtualflow.errors import ConfigurationError
from virtualflow.launcher.fault_schedule import (
    Fast,
    Group,
    Hang,
    Kill,
    KillAll,
    KillCoordinator,
    Resize,
    Slow,
    Term,
    hold_step,
    in_effect,
    most_workers,
    parse_schedule,
)
from virtualflow.protocol.http_api import Status, WorkerStatus


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        pytest.param("", (), id="nothing"),
        pytest.param("20:=4", (Group(20, (Resize(4),)),), id="resize"),
        pytest.param("20:kill", (Group(20, (Kill(1),)),), id="kill one"),
        pytest.param("45:kill:2", (Group(45, (Kill(2),)),), id="kill two"),
        pytest.param("1:term", (Group(1, (Term(),)),), id="term at the first step"),
        pytest.param("9:hang", (Group(9, (Hang(),)),), id="hang"),
        pytest.param("9:slow:3", (Group(9, (Slow(3),)),), id="slow one down"),
        pytest.param("9:fast", (Group(9, (Fast(),)),), id="let all run"),
        pytest.param("9:coordinator", (Group(9, (KillCoordinator(),)),), id="coordinator"),
        pytest.param("50:all", (Group(50, (KillAll(),)),), id="all"),
        pytest.param(" 40:=1 , 20:=4", (Group(20, (Resize(4),)), Group(40, (Resize(1),))), id="sorted, blanks allowed"),
        pytest.param(
            "7:kill,7:coordinator,3:term",
            (Group(3, (Term(),)), Group(7, (Kill(1), KillCoordinator()))),
            id="several actions of a step keep their order",
        ),
    ],
)
def test_a_schedule_is_read(text: str, groups: tuple[Group, ...]) -> None:
    assert parse_schedule(text) == groups


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("kill", "is not understood", id="no step"),
        pytest.param("20:", "is not understood", id="no action"),
        pytest.param("20:=4,", "is not understood", id="an empty entry"),
        pytest.param("-1:kill", "is not understood", id="a negative step"),
        pytest.param("0:kill", "first step", id="step zero"),
        pytest.param("5:explode", "no action 'explode'", id="an unknown action"),
        pytest.param("5:=0", "at least 1", id="no workers"),
        pytest.param("5:kill:0", "at least 1", id="kill nobody"),
        pytest.param("5:slow:0", "factor must be at least 1", id="not at all"),
        pytest.param("5:slow", "no action 'slow'", id="how much slower is not said"),
        pytest.param("5:term:2", "no action", id="an argument that the action does not take"),
    ],
)
def test_nonsense_in_a_schedule_is_named_in_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as caught:
        parse_schedule(text)
    assert "\n" not in str(caught.value)


def test_the_most_workers_of_a_job_are_those_of_its_start_or_of_a_resize() -> None:
    assert most_workers(3, parse_schedule("5:=2,9:kill:7")) == 3
    assert most_workers(3, parse_schedule("5:=2,9:=6,12:=1")) == 6


@pytest.mark.parametrize(
    ("fired", "settled", "hold"),
    [
        pytest.param(0, True, 39, id="before the first action the job may run up to the second"),
        pytest.param(1, False, 39, id="it waits there for the first to take effect"),
        pytest.param(1, True, 59, id="then the second may take place"),
        pytest.param(2, False, 59, id="and is waited for in its turn"),
        pytest.param(2, True, 118, id="behind the last action, two steps before the end"),
        pytest.param(3, False, 118, id="until it is in effect"),
        pytest.param(3, True, None, id="when all is in effect nothing is held"),
    ],
)
def test_a_job_is_held_before_the_step_of_the_next_action(fired: int, settled: bool, hold: int | None) -> None:
    assert hold_step([20, 40, 60], fired, settled, 120) == hold


@pytest.mark.parametrize(
    ("fired", "riding", "hold"),
    [
        pytest.param(1, 39, 40, id="a part of the change gets the step that it rides on"),
        pytest.param(1, 40, 41, id="the next part as well"),
        pytest.param(1, 25, 39, id="where steps are left anyway, nothing changes"),
        pytest.param(3, 118, 119, id="behind the last action, too"),
        pytest.param(3, 119, None, id="the job may end"),
    ],
)
def test_what_is_ready_is_not_held(fired: int, riding: int, hold: int | None) -> None:
    assert hold_step([20, 40, 60], fired, False, 120, riding) == hold


def test_a_job_of_unknown_length_is_held_where_its_last_action_fires() -> None:
    assert hold_step([20], 0, True, None) == 20


def test_an_action_beyond_the_end_holds_nothing() -> None:
    assert hold_step([20, 500], 1, True, 120) is None


def test_a_job_without_a_schedule_is_never_held() -> None:
    assert hold_step([], 0, True, 120) is None


@given(
    steps=st.lists(st.integers(1, 60), unique=True, min_size=1, max_size=6).map(sorted),
    total=st.one_of(st.none(), st.integers(1, 70)),
    patience=st.integers(0, 3),
)
def test_no_hold_keeps_a_schedule_from_going_on(steps: list[int], total: int | None, patience: int) -> None:
    """Every action within the job fires at its step, and before the one after it only once it is in effect."""
    length = total if total is not None else 60
    step = fired = waited = 0
    settled = True
    fired_at = []
    for _ in range(1_000):
        if not settled and waited == patience:
            settled = True
        waited += 1
        if settled and fired < len(steps) and step >= steps[fired]:
            fired_at.append(step)
            fired, settled, waited = fired + 1, False, 0
        hold = hold_step(steps, fired, settled, total)
        if step < length and (hold is None or step < hold):
            step += 1
    assert step == length
    within = [one for one in steps if one <= length]
    assert fired_at[: len(within)] == [one for one in within if one in fired_at or one < length][: len(fired_at)]
    assert all(one in fired_at for one in within if one < length)


def _status(carrying: str, *, proposed: str | None = None, prepared: bool = False, state: str = "training") -> Status:
    """A status whose members are the letters of ``carrying``: their incarnations."""
    workers = tuple(
        WorkerStatus(f"worker-{letter}", letter, "127.0.0.1", 1, state, index, index + 1)  # type: ignore[arg-type]
        for index, letter in enumerate(carrying)
    )
    generation = None if proposed is None else 2
    facts = {"proposed": generation, "proposed_workers": tuple(proposed or ""), "prepared": prepared}
    return coordinator_status("training", *workers, wanted=len(carrying), step=20, total_steps=120, **facts)


def _incarnations(letters: str) -> list[str | None]:
    return [None if letter == "?" else letter for letter in letters]


@pytest.mark.parametrize(
    ("status", "processes", "wanted", "expected"),
    [
        pytest.param(_status("ab"), "ab", 2, True, id="the members are who should be there"),
        pytest.param(_status("ab"), "ba", 2, True, id="in any order"),
        pytest.param(None, "ab", 2, False, id="no coordinator"),
        pytest.param(_status("ab"), "abc", 3, False, id="a joiner is not a member yet"),
        pytest.param(_status("ab"), "ab?", 3, False, id="a joiner has not connected yet"),
        pytest.param(_status("abc"), "bc", 3, False, id="a dead member is not replaced yet"),
        pytest.param(_status("abc"), "bcd", 3, False, id="a replacement is there but a dead process is a member"),
        pytest.param(_status("abc", proposed="bcd"), "bcd", 3, False, id="the next generation is not ready"),
        pytest.param(_status("abc", proposed="bcd", prepared=True), "bcd", 3, True, id="it rides on the next step"),
        pytest.param(_status("abc", proposed="c", prepared=True), "c", 1, True, id="drains take effect likewise"),
        pytest.param(_status("ab", state="silent"), "ab", 2, False, id="a member is silent"),
        pytest.param(_status("abcdefgh"), "abcdefghi", 9, True, id="more workers than virtual nodes"),
    ],
)
def test_an_action_is_in_effect_when_the_members_are_who_should_be(
    status: Status | None, processes: str, wanted: int, expected: bool
) -> None:
    assert in_effect(status, _incarnations(processes), wanted) is expected
