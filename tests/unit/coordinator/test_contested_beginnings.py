"""Several coordinators have each called some workers to begin: who begins, and when nobody does."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
from hypothesis import given
from memberships import NOW, SECOND, SETTINGS, cluster, in_words, plan, worker

from virtualflow.coordinator.membership import decide
from virtualflow.coordinator.snapshot import Cluster, Worker
from virtualflow.protocol.lineage import open_members
from virtualflow.protocol.messages import Generation


def begun(called: str, *contested: str, here: str, virtual_nodes: int = 4, **facts: object) -> Cluster:
    """``called`` are to begin and cannot, because of the beginnings ``contested``; ``here`` are connected."""
    names = sorted({name for names in (called, *contested) for name in names.split()} | {*here.split()})
    workers: list[Worker] = [worker(name) for name in names if name in here.split()]
    return replace(
        cluster(*workers, proposed=plan(SECOND, called, "recovery", called, "start"), broken={SECOND: NOW - 60.0}),
        virtual_nodes=virtual_nodes,
        contested=tuple(
            plan(Generation(6, n), names, "recovery", names, "start") for n, names in enumerate(contested, 1)
        ),
        **facts,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        pytest.param(
            begun("a b e f", "a b c d", here="a b c d e f"),
            "recovery a b c e +a b c e start",
            id="a majority of both",
        ),
        pytest.param(
            begun("e f", "a b c", here="a b c e f"), "recovery a b e f +a b e f start", id="of which none was called"
        ),
        pytest.param(
            begun("c d", "a b", here="a b c d", virtual_nodes=3),
            "recovery a b c +a b c start",
            id="not more than virtual nodes",
        ),
        pytest.param(begun("c", "a b", here="a c"), None, id="one of two that may have begun is not here"),
        pytest.param(
            begun("c d", "a b", here="a b c d", virtual_nodes=1), None, id="there are not enough virtual nodes for both"
        ),
        pytest.param(
            begun("c", "a b", here="a c", ended=frozenset("b")),
            "recovery a c +a c start",
            id="its end is confirmed",
        ),
        pytest.param(
            begun("c", "a b", here="a c", ended=frozenset("b"), unheard=frozenset({"x"})),
            None,
            id="but it may have handed the training on before",
        ),
    ],
)
def test_a_beginning_that_others_contest_takes_a_majority_of_them_in(state: Cluster, expected: str | None) -> None:
    assert in_words(decide(NOW, state, SETTINGS)) == expected


NAMES = st.sets(st.sampled_from("abcdefgh"), min_size=1, max_size=5).map(lambda names: " ".join(sorted(names)))


@given(called=NAMES, contested=st.lists(NAMES, max_size=3), more=NAMES, virtual_nodes=st.integers(1, 8))
def test_nobody_objects_to_a_beginning_that_is_proposed_and_all_of_it_are_here(
    called: str, contested: list[str], more: str, virtual_nodes: int
) -> None:
    state = begun(called, *contested, here=f"{called} {more}", virtual_nodes=virtual_nodes)
    proposal = decide(NOW, state, SETTINGS).proposal
    if proposal is None or set(proposal.members) == set(called.split()):
        return
    assert len(proposal.members) <= virtual_nodes
    assert set(proposal.members) <= state.workers.keys()
    for other in state.contested:
        assert not open_members(other, "attempted", proposal.members, ())
