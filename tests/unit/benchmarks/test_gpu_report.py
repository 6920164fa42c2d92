"""``make gpu``: what is run within the time, what is skipped and why, and what comes onto the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.gpu import report
from benchmarks.gpu.device_tests import rows_of
from benchmarks.gpu.parts import ENVIRONMENT, PARTS, Outcome, Part, Result, Setting
from benchmarks.gpu.runner import DEVICES, advice, missing, run_parts

ROOT = Path(__file__).parents[3]


def part(name: str, least: float = 10, most: float = 50, needs: tuple[str, ...] = ()) -> Part:
    return Part(name, name.title(), f"what {name} shows", f"no.module.{name}", needs, least, most)


class Machine:
    """Runs parts without running anything; each takes 40 seconds."""

    def __init__(self, devices: int, ends: dict[str, Outcome] | None = None) -> None:
        self.devices, self.ends = devices, ends or {}
        self.now = 0.0
        self.ran: list[tuple[str, Setting, float]] = []

    def clock(self) -> float:
        return self.now

    def execute(self, part: Part, setting: Setting, seconds: float) -> Outcome:
        self.ran.append((part.name, setting, seconds))
        self.now += 40
        rows = [{"what": DEVICES, "value": self.devices}] if part.name == ENVIRONMENT else [{"what": part.name}]
        return self.ends.get(part.name, Outcome(part.name, "passed", "", rows, 40))

    def run(self, parts: Sequence[Part], budget: float, asked: Sequence[str] | None = None) -> list[Outcome]:
        names = [each.name for each in parts] if asked is None else asked
        self.found, outcomes = run_parts(
            parts, names, small=False, budget=budget, execute=self.execute, clock=self.clock
        )
        return outcomes


THREE = (part(ENVIRONMENT), part("first"), part("second"))


def test_on_a_device_all_parts_run_at_full_size() -> None:
    machine = Machine(devices=1)
    assert [outcome.status for outcome in machine.run(THREE, 500)] == ["passed"] * 3
    assert machine.found == 1
    assert [setting for _, setting, _ in machine.ran[1:]] == [Setting("cuda", small=False)] * 2


def test_without_a_device_each_part_is_skipped_by_name_after_its_code_has_run_on_the_cpu() -> None:
    machine = Machine(devices=0)
    outcomes = machine.run(THREE, 500)
    assert [outcome.status for outcome in outcomes] == ["passed", "skipped", "skipped"]
    assert all("no CUDA device" in outcome.why and not outcome.rows for outcome in outcomes[1:])
    assert [setting for _, setting, _ in machine.ran] == [Setting("cpu", small=True)] * 3


def test_code_that_does_not_even_run_on_the_cpu_has_failed() -> None:
    machine = Machine(devices=0, ends={"first": Outcome("first", "failed", "a typing error")})
    (_, failed, _) = machine.run(THREE, 500)
    assert (failed.status, failed.why) == ("failed", "on the CPU, for want of a CUDA device: a typing error")


@pytest.mark.parametrize(
    ("budget", "statuses", "limits"),
    [
        (500, ["passed", "passed", "passed"], [50, 50, 50]),
        (100, ["passed", "passed", "passed"], [50, 50, 20]),
        (85, ["passed", "passed", "not run"], [50, 45]),
        (45, ["passed", "not run", "not run"], [45]),
    ],
    ids=["enough", "the last is cut short", "none for the last", "none but for the first"],
)
def test_what_does_not_fit_into_the_time_is_not_run(budget: float, statuses: list[str], limits: list[float]) -> None:
    machine = Machine(devices=1)
    outcomes = machine.run(THREE, budget)
    assert [outcome.status for outcome in outcomes] == statuses
    assert all(outcome.why == "no time left" for outcome in outcomes if outcome.status == "not run")
    assert [seconds for _, _, seconds in machine.ran] == limits


def test_only_what_is_asked_for_runs_and_the_environment_always() -> None:
    machine = Machine(devices=1)
    machine.run(THREE, 500, asked=["second"])
    assert [name for name, _, _ in machine.ran] == [ENVIRONMENT, "second"]


def test_a_part_whose_packages_are_missing_says_which_and_what_to_do() -> None:
    lacking = part("first", needs=("json", "no_such_package", "yaml_that_is_not_there"))
    _, outcome = Machine(devices=1).run([THREE[0], lacking], 500)
    assert outcome.status == "skipped"
    assert outcome.why == "missing here: no_such_package, yaml_that_is_not_there"
    assert "pip install pyyaml msgspec'" in advice(["pyyaml", "msgspec"])
    assert missing(["json"]) == []


OUTCOMES = [Outcome(each.name, "passed", "", [{"what": "speed", "value": 1.23456}], 3.0) for each in PARTS]


@pytest.mark.parametrize(
    ("result", "complete"),
    [
        (Result(1, small=False, outcomes=OUTCOMES), True),
        (Result(0, small=False, outcomes=OUTCOMES), False),
        (Result(1, small=True, outcomes=OUTCOMES), False),
        (Result(1, small=False, outcomes=OUTCOMES[:-1]), False),
        (Result(1, small=False, outcomes=[*OUTCOMES[:-1], Outcome(PARTS[-1].name, "skipped", "x")]), False),
    ],
    ids=["a whole run on a GPU", "no GPU", "small sizes", "some parts", "missing packages"],
)
def test_only_a_whole_run_on_a_device_is_written_onto_the_page(result: Result, complete: bool, tmp_path: Path) -> None:
    page, numbers, aside = tmp_path / "gpu.md", tmp_path / "gpu.json", tmp_path / "build" / "gpu.md"
    former = report.splice(f"# Top\n\n{report.BEGIN}\n{report.END}\n\nBelow.\n", "a real report")
    page.write_text(former)
    written = report.write(result, page, numbers, aside)
    if complete:
        assert written == [page, numbers]
        assert page.read_text() == report.splice(former, report.render(result))
        assert "a real report" not in page.read_text()
        assert page.read_text().startswith("# Top\n")
        assert page.read_text().endswith("\n\nBelow.\n")
        assert len(json.loads(numbers.read_text())["outcomes"]) == len(PARTS)
    else:
        assert written == [aside]
        assert page.read_text() == former
        assert report.render(result) + "\n" == aside.read_text()


def test_the_report_has_each_part_with_its_verdict_and_its_rows() -> None:
    outcomes = [
        Outcome("environment", "passed", "", [{"what": "CUDA devices", "value": 1}], 2.0),
        Outcome("tests", "failed", "one | two\nlines", [{"test": "a|b", "came to": "failed"}], 5.0),
        Outcome("bits", "cut off", "ended after 50 s, its time", [{"run": "first"}, {"run": "second", "digest": "x"}]),
        Outcome("steps", "not run", "no time left"),
    ]
    text = report.render(Result(1, small=False, outcomes=outcomes))
    assert "### Environment\n\nPassed (2 s)." in text
    assert "**Failed** (5 s):\n\n```text\none | two\nlines\n```" in text
    assert "| a\\|b | failed |" in text
    assert "Cut off: ended after 50 s, its time." in text
    assert "| run | digest |\n| --- | --- |\n| first |  |\n| second | x |" in text
    assert "### Step time beside plain PyTorch\n\nNot run: no time left." in text


def test_the_page_and_the_readme_say_that_nothing_has_run_until_a_report_is_there() -> None:
    page, readme = report.PAGE.read_text(), (ROOT / "README.md").read_text()
    never = not report.NUMBERS.exists()
    if never:
        assert report.splice(page, report.absent()) == page
    assert (report.NEVER in page) == never
    assert ("has never run on a GPU" in " ".join(readme.split())) == never


def test_each_part_says_what_it_needs_and_all_fit_into_ten_minutes_at_least_in_part() -> None:
    assert PARTS[0].name == ENVIRONMENT
    assert len({each.name for each in PARTS}) == len(PARTS)
    assert all(0 < each.least < each.most for each in PARTS)
    assert sum(each.least for each in PARTS) < 500
    assert all((ROOT / f"{each.module.replace('.', '/')}.py").exists() for each in PARTS)


def test_passed_tests_of_the_device_are_counted_and_others_are_rows_by_name() -> None:
    output = (
        "...\nPASSED tests/gpu/test_device_parts.py::test_sums[cuda]\n"
        "PASSED tests/gpu/test_device_parts.py::test_more\n"
        "FAILED tests/gpu/test_device_parts.py::test_other - AssertionError: 1\nSKIPPED [1] conftest.py:3: no TF32\n"
    )
    assert rows_of(output) == [
        {"test": "`test_device_parts`", "came to": "2 passed"},
        {"test": "`test_device_parts: test_other`", "came to": "failed AssertionError: 1"},
        {"test": "[1] conftest.py:3: no TF32", "came to": "skipped"},
    ]
