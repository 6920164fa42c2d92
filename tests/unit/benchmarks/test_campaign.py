"""The campaign's checker and its faults: what it calls wrong, and that a seed says what happens."""

from __future__ import annotations

import pytest
from benchmarks.campaign.checker import Commit, Verdict, check
from benchmarks.campaign.faults import HANGS, KINDS, draw

BITS = [f"bits-{step}" for step in range(1, 10)]


def audit(*branches: tuple[int, int, int]) -> list[Commit]:
    """Of generations: the counter, the first and the last step."""
    return [Commit("w", (1, counter), step) for counter, first, last in branches for step in range(first, last + 1)]


def judged(*branches: tuple[int, int, int], log: tuple[Commit, ...] = (), anew: tuple[int, ...] = ()) -> Verdict:
    return check(audit(*branches), log, BITS, frozenset((1, counter) for counter in anew))


@pytest.mark.parametrize(
    ("branches", "lineages", "repeated", "wrong"),
    [
        pytest.param([(1, 1, 5)], 1, 0, "", id="one generation"),
        pytest.param([(1, 1, 5), (2, 6, 9)], 1, 0, "", id="one after the other"),
        pytest.param([(1, 1, 5), (3, 6, 9)], 1, 0, "", id="a generation that made no step"),
        pytest.param([(1, 1, 5), (2, 5, 9)], 1, 1, "", id="the last step of who was lost is repeated"),
        pytest.param([(1, 1, 5), (2, 4, 9)], 2, 0, "two lineages", id="a branch of two steps"),
        pytest.param([(1, 1, 9), (2, 3, 5)], 2, 0, "two lineages", id="a short branch beside a long one"),
        pytest.param([(1, 1, 3), (2, 6, 9)], 1, 0, "nobody has committed", id="steps that nobody made"),
        pytest.param([], 0, 0, "", id="nothing"),
    ],
)
def test_one_lineage(branches: list[tuple[int, int, int]], lineages: int, repeated: int, wrong: str) -> None:
    verdict = judged(*branches)
    assert (verdict.lineages, verdict.repeated) == (lineages, repeated)
    assert bool(verdict.faults) == bool(wrong)
    assert all(wrong in sentence for sentence in verdict.faults)


def test_a_step_that_a_generation_leaves_out_is_seen() -> None:
    lines = [Commit("w", (1, 1), step) for step in (1, 2, 4)]
    assert "left out a step" in check(lines, [], BITS).faults[0]


def test_who_begins_anew_may_go_back() -> None:
    assert judged((1, 1, 7), (2, 3, 5), anew=(2,)).faults == []


def test_two_leaders_of_one_step_are_seen() -> None:
    log = tuple(Commit(name, (1, 1), 3, leader=True, digest=BITS[2]) for name in ("a", "b"))
    assert judged((1, 1, 5), log=log).faults == ["step 3 of generation 1 has the leaders a, b"]
    repeated = (log[0], Commit("b", (1, 2), 3, leader=True, digest=BITS[2]))
    assert judged((1, 1, 3), (2, 3, 5), log=repeated).faults == []


def test_other_weights_are_seen() -> None:
    log = (Commit("a", (1, 1), 2, digest=BITS[1]), Commit("b", (1, 1), 3, digest="others"))
    verdict = judged((1, 1, 5), log=log)
    assert (verdict.digests, verdict.faults) == (2, ["b has other weights after step 3"])


def test_a_seed_says_what_happens_and_every_kind_comes() -> None:
    kinds = tuple(kind for kind in KINDS if kind != HANGS)
    faults = draw(7, len(kinds), kinds)
    assert faults == draw(7, len(kinds), kinds)
    assert faults != draw(8, len(kinds), kinds)
    assert {fault.kind for fault in faults} == set(kinds)
