"""Whose training thread hangs: who does not come is declared lost, never who waits."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st
from memberships import FIRST, NOW, SECOND, SETTINGS, cluster, member, pending, plan, training, worker

from virtualflow.coordinator.hangs import find_delays, find_hung
from virtualflow.coordinator.membership import decide, find_lost
from virtualflow.coordinator.settings import MembershipSettings
from virtualflow.coordinator.snapshot import Cluster, Worker
from virtualflow.protocol import messages as m
from virtualflow.protocol.turns import STAGE as AWAITING_TURN

FLOOR, PATIENT = SETTINGS.hang_floor, SETTINGS.hang_floor * SETTINGS.hang_patience
WAITS = m.Doing("synchronizing", 7, 1.0, waits=True)


def busy(seconds: float, stage: str = "computing", **facts: object) -> dict[str, object]:
    return {"doing": m.Doing(stage, 7, seconds, **facts)}  # type: ignore[arg-type]


def waiting(name: str, **facts: object) -> Worker:
    return member(name, doing=WAITS, **facts)


TABLE = [
    pytest.param(training(member("a", **busy(FLOOR)), waiting("b")), "a", id="one that another waits for"),
    pytest.param(training(member("a", **busy(FLOOR - 1)), waiting("b")), "", id="not yet"),
    pytest.param(
        training(member("a", **busy(FLOOR)), member("c", **busy(FLOOR)), waiting("b")), "a c", id="two of them"
    ),
    pytest.param(training(waiting("a"), waiting("b")), "", id="all wait, which is the network's fault"),
    pytest.param(
        training(member("a", **busy(FLOOR)), member("b", **busy(1.0))), "", id="nobody waits: the other is busy too"
    ),
    pytest.param(training(member("a", **busy(FLOOR)), member("b")), "", id="an older worker does not tell"),
    pytest.param(
        training(member("a", **busy(FLOOR)), waiting("b", connected=False)), "", id="the other's connection is gone"
    ),
    # --- a device that other jobs have, too
    pytest.param(
        training(member("a", **busy(FLOOR)), member("b", **busy(86_400.0, AWAITING_TURN, waits=True))),
        "",
        id="the other waits for its turn, and not for this one",
    ),
    pytest.param(
        training(member("a", **busy(FLOOR)), member("b", **busy(0.1, AWAITING_TURN, waits=True)), waiting("c")),
        "a",
        id="one of the others waits for its turn",
    ),
    # --- what takes long by nature
    *(
        pytest.param(
            training(member("a", **busy(seconds, stage)), waiting("b")), who, id=f"{stage}, {seconds:g} s, one waits"
        )
        for stage in (
            "saving a checkpoint",
            "evaluating",
            "running the script's code after the inner loop",
            "entering",
            "new",
        )
        for seconds, who in ((PATIENT - 1, ""), (PATIENT, "a"))
    ),
    pytest.param(training(member("a", **busy(PATIENT - 1, first=True)), waiting("b")), "", id="a first step is long"),
    pytest.param(training(member("a", **busy(PATIENT, first=True)), waiting("b")), "a", id="but not for ever"),
    pytest.param(
        training(member("a", **busy(86_400.0, "evaluating")), member("b", **busy(86_400.0, "evaluating"))),
        "",
        id="what takes long on all may",
    ),
    pytest.param(training(member("a", **busy(86_400.0, "evaluating"))), "", id="and on one alone, too"),
    # --- nobody is left to wait
    pytest.param(training(member("a", **busy(PATIENT - 1))), "", id="one alone, within its longer limit"),
    pytest.param(training(member("a", **busy(PATIENT))), "a", id="one alone within a step"),
    pytest.param(training(member("a", **busy(PATIENT)), member("b", **busy(PATIENT))), "a b", id="all within a step"),
    pytest.param(
        training(member("a", **busy(PATIENT)), member("b", **busy(1.0, "evaluating"))), "", id="one between steps"
    ),
    # --- the job's own steps
    pytest.param(training(member("a", **busy(499.0, slowest=1.0)), waiting("b")), "a", id="quick steps"),
    pytest.param(
        training(member("a", **busy(499.0, slowest=100.0)), waiting("b")), "", id="five times the slowest step"
    ),
    pytest.param(training(member("a", **busy(500.0, slowest=100.0)), waiting("b")), "a", id="and no longer"),
    # --- joiners
    pytest.param(
        training(waiting("a"), worker("j", ready_at=None, **busy(PATIENT, "warming up"))),
        "j",
        id="a joiner that does not become ready",
    ),
    pytest.param(
        training(waiting("a"), worker("j", ready_at=None, **busy(PATIENT - 1, "warming up"))), "", id="it has time"
    ),
    pytest.param(
        training(member("a", **busy(PATIENT, "evaluating")), worker("j", doing=WAITS), **pending("a j", "j")),
        "",
        id="joiners wait for all, and nobody is evicted for their sake",
    ),
    pytest.param(
        cluster(worker("a", **busy(PATIENT, "starting"), ready_at=None), worker("b", doing=WAITS)),
        "a",
        id="one that never becomes ready at the initial start",
    ),
    pytest.param(
        cluster(
            worker("a", **busy(PATIENT, "entering a generation")),
            worker("b", doing=WAITS),
            proposed=plan(FIRST, "a b", "recovery", "a b", "start"),
        ),
        "a",
        id="one that does not enter the first generation",
    ),
    pytest.param(
        training(member("a", **busy(PATIENT, "entering a generation")), waiting("b"), proposed=plan(SECOND, "a b")),
        "a",
        id="one that does not enter a further one",
    ),
    # --- who is of no concern any more
    pytest.param(training(member("a", **busy(PATIENT), done=True), waiting("b")), "", id="it is done"),
    pytest.param(training(member("a", **busy(PATIENT), gone="gone"), waiting("b")), "", id="it is lost already"),
    pytest.param(
        training(member("a", **busy(FLOOR)), waiting("b"), worker("x", entered=FIRST, **busy(PATIENT))),
        "a",
        id="no member any more",
    ),
]


@pytest.mark.parametrize(("known", "hung"), TABLE)
def test_who_hangs(known: Cluster, hung: str) -> None:
    if "x" in known.workers:
        known = dataclasses.replace(known, running=plan(FIRST, "a b"))
    assert " ".join(sorted(find_hung(known, SETTINGS))) == hung


def test_a_limit_that_is_set_counts_whatever_the_steps_say() -> None:
    settings = MembershipSettings(hang_limit=2.0)
    known = training(member("a", **busy(2.0, slowest=100.0)), waiting("b"))
    assert list(find_hung(known, settings)) == ["a"]


def test_the_reason_names_what_it_does_for_how_long_where_and_who_waits() -> None:
    known = training(member("a", **busy(301.0), place="data.py:3 in read"), waiting("b"), waiting("c"))
    assert find_lost(NOW, known, SETTINGS) == {
        "a": "its training thread hangs: computing in step 7 for 301 s (limit 300 s), while 2 workers wait for it, "
        "at data.py:3 in read"
    }
    assert decide(NOW, known, SETTINGS).proposal is not None


def test_who_is_lost_for_another_reason_keeps_it() -> None:
    known = training(member("a", **busy(301.0), last_heard=NOW - 100.0), waiting("b"))
    assert "no sign of life" in find_lost(NOW, known, SETTINGS)["a"]


_doing = st.builds(
    m.Doing,
    stage=st.sampled_from(["computing", "loading samples", "synchronizing", "evaluating", "starting"]),
    step=st.just(3),
    seconds=st.floats(0.0, 4 * PATIENT),
    waits=st.booleans(),
    first=st.booleans(),
    slowest=st.floats(0.0, 1_000.0),
)


@given(st.lists(st.tuples(st.none() | _doing, st.booleans()), min_size=1, max_size=5))
def test_never_one_that_waits_nor_one_that_comes_on_nor_for_nobodys_sake(
    told: list[tuple[m.Doing | None, bool]],
) -> None:
    workers = [(member if is_member else worker)(f"w{n}", doing=doing) for n, (doing, is_member) in enumerate(told)]
    known = training(*workers)
    for incarnation, delay in find_delays(known, SETTINGS).items():
        doing, entered = known.workers[incarnation].doing, known.workers[incarnation].entered
        assert doing is not None
        assert not doing.waits
        assert delay.share < 1 or doing.seconds >= FLOOR
        others = [one.doing for one in workers if one.entered and one.incarnation != incarnation]
        somebody_waits = any(other is not None and other.waits for other in others)
        assert entered is None or somebody_waits or all(o and o.stage != "evaluating" for o in [doing, *others])
