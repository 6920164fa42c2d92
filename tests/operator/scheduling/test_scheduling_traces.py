"""The traces that come with the project, and what the benchmark says of the paper's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks import scheduling_traces as benchmark
from benchmarks.traces import generate
from benchmarks.traces.workloads import THREE, TWENTY, Submission

from virtualflow_operator.simulator.trace import GoneEvent, NodeEvent, read

ROOT = Path(__file__).parents[3]


def test_the_files_are_what_the_generator_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    committed = generate.DIRECTORY
    monkeypatch.setattr(generate, "DIRECTORY", tmp_path)
    generate.main([])
    written = sorted(path.name for path in tmp_path.iterdir())
    assert written == sorted(path.name for path in committed.glob("*.csv"))
    for name in written:
        assert (tmp_path / name).read_bytes() == (committed / name).read_bytes(), name


@pytest.mark.parametrize("submission", [*TWENTY, *THREE], ids=lambda submission: submission.workload.model)
def test_a_published_job_takes_as_long_at_its_demand_as_its_log_says(submission: Submission) -> None:
    workload = submission.workload
    assert workload.steps / workload.throughput()[workload.demand] == pytest.approx(workload.seconds)
    assert 0.75 < workload.fit < 1.25


def test_priorities_with_the_papers_start_up_come_out_as_its_log_shows() -> None:
    log, found = benchmark.recorded(benchmark.RECORDED_PRIORITY), benchmark.reproduced()
    for figure, value in log.items():
        assert found[figure] == pytest.approx(value, rel=0.06), figure


def test_the_published_logs_show_what_the_paper_reports() -> None:
    """Up to 48 % lower completion times, the abstract says."""
    before = benchmark.recorded(benchmark.RECORDED_PRIORITY)
    after = benchmark.recorded(benchmark.RECORDED_FAIR_SHARE)
    assert 1 - after["median_completion"] / before["median_completion"] == pytest.approx(0.474, abs=0.001)
    assert 1 - after["median_queueing"] / before["median_queueing"] == pytest.approx(0.993, abs=0.001)


def test_elastic_policies_beat_priorities_on_the_papers_trace_by_what_is_promised() -> None:
    rows = {(row.policy, row.cost): row for row in benchmark.compare(seeds=2)}
    share = rows["WeightedFairShare", "resize"]
    assert share.less_completion >= 0.48
    assert share.less_median_queueing >= 0.95
    assert share.less_mean_queueing >= 0.95
    assert max(row.less_completion for (_, cost), row in rows.items() if cost == "resize") >= 0.55


def test_a_trace_of_another_seed_can_be_written(tmp_path: Path) -> None:
    generate.main(["--like-paper", "7", str(tmp_path / "seven.csv")])
    jobs = read(tmp_path / "seven.csv").jobs
    assert [job.name for job in jobs] == [job.name for job in generate.like_paper(7).jobs]


def test_the_table_of_the_document_is_what_comes_out() -> None:
    found = {(row.policy, row.cost): row for row in benchmark.compare(seeds=1)}
    lines = (ROOT / "docs" / "explanation" / "simulator.md").read_text().splitlines()
    told = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    rows = {cells[0]: cells[1:] for cells in told if cells[0] in benchmark.POLICIES}
    assert set(rows) == set(benchmark.POLICIES) - {"FIFO"}
    for policy, cells in rows.items():
        for cost, (median, shorter, _) in zip(("resize", "restart"), (cells[:3], cells[3:]), strict=True):
            row = found[policy, cost]
            assert median == f"{row.median_completion:,.0f} s", (policy, cost)
            assert shorter == (f"{100 * row.less_completion:.0f} %" if policy != benchmark.BASELINE else "")


def test_seeds_give_different_traces_and_the_same_seed_the_same() -> None:
    assert generate.like_paper(1) == generate.like_paper(1)
    assert generate.like_paper(1) != generate.like_paper(2)


def test_the_large_trace_has_a_heavy_tail_and_the_spot_trace_revocations() -> None:
    jobs = read(generate.DIRECTORY / "thousand.csv").jobs
    work = sorted((job.steps / job.speed(1) for job in jobs), reverse=True)
    assert len(jobs) == 1_000
    assert sum(work[:100]) > sum(work) / 2
    spot = read(generate.DIRECTORY / "spot.csv")
    assert sum(isinstance(event, GoneEvent) for event in spot.events) > 10
    assert any(isinstance(event, NodeEvent) and not event.spot for event in spot.events)


@pytest.mark.slow
def test_the_benchmark_writes_rows_for_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    benchmark.main(["--quick", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["policy"] for row in found["rows"]} == set(benchmark.POLICIES)
    assert "recorded, priorities: makespan 11,928 s, median completion 2,667 s" in capsys.readouterr().out
