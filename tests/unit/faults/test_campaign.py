"""The campaign's checker and its faults: what it calls wrong, and that a seed says what happens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from faults.checker import CheckResult, Commit, Rename, check, check_moves
from faults.kinds import KINDS, draw
from faults.report import CampaignReport, JobFindings

import terminals

BITS = [f"bits-{step}" for step in range(1, 10)]


def audit(*branches: tuple[int, int, int]) -> list[Commit]:
    """Of generations: the counter, the first and the last step."""
    return [Commit("w", (1, counter), step) for counter, first, last in branches for step in range(first, last + 1)]


def judged(*branches: tuple[int, int, int], anew: Mapping[int, int] | None = None) -> CheckResult:
    return check(audit(*branches), [], BITS, {(1, counter): step for counter, step in (anew or {}).items()})


def seen(*log: Commit, lease: float = 1.0) -> CheckResult:
    """A script's log, and an audit that has the same steps."""
    return check([Commit(line.process, line.generation, line.step) for line in log], log, BITS, lease=lease)


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
        pytest.param([(1, 2, 5)], 1, 0, "began with step 2", id="a beginning that is none"),
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


@pytest.mark.parametrize(
    ("anew", "wrong"),
    [
        pytest.param({2: 2}, "", id="from the checkpoint that it begun from"),
        pytest.param({2: 1}, "the checkpoint of step 1, and began with step 3", id="from elsewhere"),
        pytest.param({4: 2}, "two lineages", id="another generation had the right to"),
    ],
)
def test_who_begins_anew_may_go_back_to_its_checkpoint(anew: Mapping[int, int], wrong: str) -> None:
    found = judged((1, 1, 7), (2, 3, 5), anew=anew).faults
    assert bool(found) == bool(wrong)
    assert wrong in "".join(found)


def test_a_generation_that_begins_anew_and_makes_no_step_leaves_the_right_to_go_back_to_the_next_one() -> None:
    assert judged((1, 1, 7), (3, 3, 5), anew={2: 2}).faults == []


def test_two_leaders_of_one_step_are_seen() -> None:
    log = [Commit(name, (1, 1), 1, leader=True, digest=BITS[0]) for name in ("a", "b")]
    assert seen(*log).faults == ["step 1 of generation 1 has the leaders a, b"]
    assert seen(log[0], replace(log[1], generation=(1, 2))).faults == []


def test_a_branch_that_only_the_script_has_seen_is_seen() -> None:
    log = [Commit("a", (1, counter), step) for counter, steps in ((1, (1, 2, 3)), (2, (2,))) for step in steps]
    found = check(audit((1, 1, 5)), log, BITS).faults
    assert any("in the script's log" in sentence and "two lineages" in sentence for sentence in found)


@pytest.mark.parametrize(
    ("generation", "step", "wrong"),
    [(2, 3, False), (2, 4, True), (1, 5, True)],
    ids=["copied by who was a step behind", "of nobody", "before it was committed"],
)
def test_a_step_that_the_script_sees_was_committed(generation: int, step: int, wrong: bool) -> None:
    found = check(audit((1, 1, 3), (2, 5, 5)), [Commit("a", (1, generation), step)], BITS).faults
    assert any("nobody had committed it" in sentence for sentence in found) == wrong


@pytest.mark.parametrize(
    ("asked", "newer", "wrong"),
    [
        pytest.param(50.9, 50.5, False, id="within its lease"),
        pytest.param(51.5, 51.2, True, id="after it"),
        pytest.param(51.5, 51.6, False, id="after it, and nobody has gone on"),
    ],
)
def test_who_leads_after_others_have_gone_on_is_seen(asked: float, newer: float, wrong: bool) -> None:
    first, other = Commit("a", (1, 1), 1, leader=True, asked=50.0), Commit("b", (1, 2), 2, asked=newer)
    stale = replace(first, asked=asked)
    said = "a took itself for the leader of generation 1 1.5 s after its last step, and 0.3 s after others had gone on"
    assert seen(first, other, stale).faults == ([said] if wrong else [])
    assert seen(first, other, replace(stale, leader=False)).faults == []


def test_other_weights_are_seen() -> None:
    log = (Commit("a", (1, 1), 1, digest=BITS[0]), *(Commit("b", (1, 1), step, digest="others") for step in (2, 3)))
    verdict = seen(*log)
    assert (verdict.digests, verdict.faults) == (3, ["b has other weights after 2 steps, first after step 2"])


def test_what_cannot_be_compared_is_not_passed_over() -> None:
    verdict = seen(*(Commit("a", (1, 1), step, digest=(*BITS, "")[step - 1] or "new") for step in range(1, 11)))
    assert (verdict.digests, verdict.faults) == (
        9,
        ["step 10 cannot be compared: the undisturbed run is shorter"],
    )


def name(step: int, counter: int) -> str:
    """Of a checkpoint."""
    return f"step-{step:08d}.1.{counter}"


def wrote(step: int, counter: int, at: float, looked: float | None, process: str = "a") -> Rename:
    return Rename(process, at, at + 0.1, ".step-0.0", name(step, counter), looked)


STEPS = {(1, 1): range(1, 6), (1, 2): range(5, 10)}


@pytest.mark.parametrize(
    ("moves", "wrong", "late"),
    [
        pytest.param([wrote(2, 1, 1, 1), wrote(6, 2, 2, 2, "b")], "", 0, id="in order"),
        pytest.param(
            [wrote(6, 2, 2, 2, "b"), wrote(4, 1, 3, 2.9)], "where there was one of generation 2", 0, id="late"
        ),
        pytest.param([wrote(6, 2, 2, 2, "b"), wrote(4, 1, 3, None)], "where there was one", 0, id="without a look"),
        pytest.param([wrote(6, 2, 2, 2, "b"), wrote(4, 1, 3, 1.9)], "", 1, id="stopped between look and rename"),
        pytest.param([wrote(7, 1, 1, 1)], "nobody had come to that step", 0, id="of a step that is not"),
        pytest.param(
            [wrote(4, 1, 1, 1), Rename("b", 2, 2.1, name(4, 1), name(4, 2), 2), wrote(3, 1, 3, 2.9)],
            "where there was one of generation 2",
            0,
            id="after others have begun from one",
        ),
        pytest.param(
            [wrote(2, 1, 1, 1), wrote(6, 2, 2, 2, "b"), Rename("a", 3, 3.1, name(6, 2), ".step-0.1", 3)],
            "bears a higher number than its own",
            0,
            id="removes a newer one",
        ),
        pytest.param(
            [wrote(6, 2, 2, 2, "b"), Rename("b", 3, 3.1, name(6, 2), ".step-0.1", 3), wrote(4, 1, 4, 3.9)],
            "",
            0,
            id="none of a newer one is left",
        ),
        pytest.param(
            [wrote(4, 1, 1, 1), Rename("b", 2, 2.1, name(4, 1), name(5, 2), 2)], "has made", 0, id="another step of it"
        ),
        pytest.param(
            [wrote(6, 2, 1, 1), Rename("b", 2, 2.1, name(6, 2), name(6, 1), 2)],
            "has made",
            0,
            id="back to an older one",
        ),
    ],
)
def test_a_checkpoint_of_who_was_left_behind(moves: list[Rename], wrong: str, late: int) -> None:
    storage = check_moves(moves, STEPS)
    assert bool(storage.faults) == bool(wrong)
    assert wrong in "".join(storage.faults)
    assert storage.late == late


def test_which_checkpoint_a_generation_has_begun_from() -> None:
    moves = [wrote(4, 1, 1, 1), Rename("b", 2, 2.1, name(4, 1), name(4, 2), 2)]
    assert check_moves(moves, STEPS).begun == {(1, 2): 4}


def test_a_seed_says_what_happens_and_every_kind_comes() -> None:
    kinds = tuple(KINDS)
    strikes = draw(7, len(kinds), kinds, 0.5)
    assert strikes == draw(7, len(kinds), kinds, 0.5)
    assert strikes != draw(8, len(kinds), kinds, 0.5)
    assert {fault.kind for strike in strikes for fault in strike} == set(kinds)
    assert {len(strike) for strike in strikes} == {1, 2}


def test_two_faults_at_once_befall_different_parts() -> None:
    strikes = [strike for seed in range(50) for strike in draw(seed, 20, tuple(KINDS), 1.0)]
    assert all(len({fault.part for fault in strike}) == len(strike) for strike in strikes)
    assert sum(map(len, strikes)) == 50 * 20


def test_a_campaign_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    first = CampaignReport(tmp_path / "campaign.json")
    first.add(JobFindings(0, [(["cut"], 1.5), (["cut", "clock"], 2.5)], lineages=1))
    second = CampaignReport(tmp_path / "campaign.json")
    assert second.faults == 3
    second.add(JobFindings(1, [(["cut"], 0.5)], lineages=2, wrong=["two lineages"]))
    found = second.summary()
    assert found["kinds"]["cut"] == {"faults": 3, "with_another": 1, "median_pause": 1.5, "longest_pause": 2.5}
    assert (found["lineages"], found["wrong"]) == (2, ["seed 1: two lineages"])


JOB = """
import json, sys, time
from pathlib import Path
wanted = json.loads(sys.argv[-1])
while not Path(wanted["keep"], f"shown-{wanted['seed']}").exists():
    time.sleep(0.01)  # until the bar has been drawn with what was there before
print("seed", wanted["seed"], "says so", file=sys.stderr)
print(json.dumps({"seed": wanted["seed"], "strikes": [[["cut"], 1.5]] * wanted["count"]}))
"""
CAMPAIGN = """
import sys
from pathlib import Path
from virtualflow import progress
import faults.__main__ as campaign

class Telling(progress.ProgressBar):
    def reach(self, done):
        super().reach(done)
        (report.parent / f"shown-{done // 2}").touch()

progress.SHOWN_AFTER = progress.FRAME = 0.0
report, job = Path(sys.argv.pop()), sys.argv.pop()
campaign.ProgressBar = Telling
campaign.ALONE = [sys.executable, "-c", job]
campaign.why_not = lambda: None
campaign.undisturbed = lambda directory, steps: directory
sys.argv += ["--faults=6", "--per-job=2", "--jobs=1", f"--out={report}"]
sys.exit(campaign.main())
"""


def test_a_campaign_on_a_terminal_has_a_bar_below_its_lines(tmp_path: Path) -> None:
    seen = terminals.run(["-c", CAMPAIGN, JOB, str(tmp_path / "campaign.json")], piped=True)
    assert seen.code == 0, seen.words
    shares = re.findall(r"the campaign \S.*? (\d+) %, 0:\d\d left", seen.words)
    assert list(dict.fromkeys(shares)) == ["33", "67", "100"]
    lines = {re.sub(r"\d+ a minute", "some a minute", line) for line in seen.left}
    done = {f"{faults} faults, some a minute; 0 things wrong" for faults in (2, 4, 6)}
    assert lines == done | {f"seed {seed} says so" for seed in range(3)}
    assert seen.cursor
    assert seen.piped == CampaignReport(tmp_path / "campaign.json").table()
