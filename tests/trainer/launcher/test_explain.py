"""``virtualflow explain``: the schedule of a script's gradients, in lines for people."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import LIMIT, ROOT

import programs
from virtualflow.launcher.profile import describe_exchange
from virtualflow.protocol.exchange_report import BucketReport, ExchangeReport, Traffic, read_report, write_report

SCRIPT = """
import torch, virtualflow as vf
model = torch.nn.Linear({width}, {width})
optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = torch.utils.data.TensorDataset(torch.ones(32, {width}))
with vf.elastic(model, optimizer, data, batch_size=8, steps=5, virtual_nodes=4{options}) as run:
    for step in run:
        for (x,) in step:
            model(x).square().mean().backward()
"""


def explain(directory: Path, *arguments: str, width: int, options: str = "") -> subprocess.CompletedProcess[str]:
    (directory / "train.py").write_text(SCRIPT.format(width=width, options=options))
    whole = [sys.executable, "-m", "virtualflow", "explain", *arguments, "train.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "TMPDIR": str(directory)}
    return programs.run(whole, cwd=directory, env=environment, timeout=LIMIT)


def test_the_way_of_each_bucket_is_printed_with_its_reasons_and_what_it_took(tmp_path: Path) -> None:
    done = explain(tmp_path, width=8)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("the exchange sends 288 B a step, the schedule's bound is 288 B; it takes ")
    assert lines[0].endswith(", none of it hidden beside the backward pass")
    assert lines[2] == "step 5: 2 workers that contribute 1, 1 sums of 288 B, 1 bucket, by gather"
    assert lines[3].startswith(
        "measured by worker-0: the median of 5 steps with this schedule; beside the buckets it sends"
    )
    assert "assumed, since so little is not measured" in lines[4]
    assert "bucket 1: 288 B of float32 (bias, weight)" in lines
    assert any(line.startswith("  gather, behind the step headers; predicted to be the fastest") for line in lines)
    assert "  measured: 288 B sent and 288 B received, as planned" in lines
    assert any("no further overlap: all buckets together are predicted to save" in line for line in lines)
    assert not list(tmp_path.glob("virtualflow-*/*")), "it has left something"


@pytest.mark.slow
def test_large_gradients_are_measured_and_an_expert_gets_what_is_asked_for(tmp_path: Path) -> None:
    options = ', exchange=vf.Exchange("reduce-scatter", bucket_bytes=1 << 18, overlap=True)'
    done = explain(tmp_path, "--json", "--steps", "4", width=600, options=options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["measured"] is True
    assert (report["step"], report["steps"]) == (4, 3), "in the first one nothing begins early"
    assert [bucket["tensors"] for bucket in report["buckets"]] == [["bias"], ["weight"]]
    assert all(bucket["overlapped"] and bucket["way"] == "reduce-scatter" for bucket in report["buckets"])
    assert all("shard_optimizer=False" in bucket["refused"]["reorder"] for bucket in report["buckets"])
    for traffic in (report["traffic"], *(bucket["traffic"] for bucket in report["buckets"])):
        assert (traffic["sent"], traffic["received"]) == (traffic["plannedSent"], traffic["plannedReceived"])
        assert 0 <= traffic["exposed"] <= traffic["seconds"]
    assert report["traffic"]["sent"] == 4 * (600 * 600 + 600), "half of it out, and half back"
    assert min(report["beside"]) > 0, "headers"


def test_what_goes_over_gloo_is_measured_and_said_to_need_plaintext(tmp_path: Path) -> None:
    options = ', exchange=vf.Exchange("reduce-scatter", backend="gloo")'
    done = explain(tmp_path, width=8, options=options)
    assert done.returncode == 1
    assert "--insecure-plaintext" in done.stderr
    done = explain(tmp_path, "--insecure-plaintext", width=8, options=options)
    assert done.returncode == 0, done.stderr
    assert "  measured: 288 B sent and 288 B received, as planned" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("print('hello')", "must iterate over", id="trains nothing"),
        pytest.param("raise OSError('no such disk')", "OSError: no such disk", id="fails"),
    ],
)
def test_a_script_that_cannot_be_run_is_told_in_a_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "train.py").write_text(text)
    whole = [sys.executable, "-m", "virtualflow", "explain", "train.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "trainer"), "TMPDIR": str(tmp_path)}
    done = programs.run(whole, cwd=tmp_path, env=environment, timeout=LIMIT)
    assert done.returncode == 1
    assert says in done.stderr


def report_of(buckets: list[BucketReport], rows: list[int], traffic: Traffic) -> ExchangeReport:
    numbers = {"latency": 1e-9, "byte": 1e-9, "add_byte": 0.0, "hidden": 0.25}
    sent, whole = [2 << 20, 1 << 20], [2 << 20, 2 << 20]
    return ExchangeReport(10, "worker-0", 9, rows, True, numbers, buckets, traffic, (2_048, 1_024), sent, whole)


def test_one_worker_has_nothing_to_explain() -> None:
    assert "nothing travels" in describe_exchange(report_of([], [1], Traffic(0, 0, 0, 0, 0.0, 0.0)))


def bucket_of(tensors: list[str], seconds: float, sent: int = 3 << 20) -> BucketReport:
    traffic = Traffic(sent, 1 << 20, 3 << 20, 1 << 20, seconds, seconds / 4)
    predicted = {"gather": seconds / 2}
    return BucketReport(tensors, 3 << 20, "float32", "stages", "gather", True, "why", predicted, {}, traffic)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    buckets = [bucket_of(["a", "b", "c", "d"], 2e-3)]
    report = report_of(buckets, [2, 1], Traffic(3 << 20, 1 << 20, 3 << 20, 1 << 20, 2e-3, 5e-4))
    write_report(tmp_path / "report", report)
    assert read_report(tmp_path / "report") == report
    assert describe_exchange(report).splitlines() == [
        "the exchange sends 3.00 MiB a step, the schedule's bound is 3.00 MiB; it takes 2 ms (predicted: 1 ms), 1.5 ms "
        "of it hidden beside the backward pass",
        "",
        "step 10: 2 workers that contribute 2, 1 sums of 3.00 MiB, 1 bucket, by gather",
        "measured by worker-0: the median of 9 steps with this schedule; beside the buckets it sends 2.00 KiB and "
        "receives 1.00 KiB: headers, and new values of a sharded optimizer",
        "network, measured when the last worker joined: messages take 1e-06 ms and bring 1 GB/s; additions no time a "
        "byte; beside a backward pass 25% of that is hidden",
        "since backward passes end early, all workers together send 3.00 MiB of gradients, 75% of 4.00 MiB (by worker: "
        "2.00 MiB, 1.00 MiB)",
        "",
        "bucket 1: 3.00 MiB of float32 (a, b, c and 1 more)",
        "  gather, beside the backward pass; why",
        "  stages: stages",
        "  measured: 3.00 MiB sent and 1.00 MiB received, as planned",
        "  measured: 2 ms from setting out to the sums, 1.5 ms of it hidden",
        "  predicted: gather 1 ms",
    ]


def test_buckets_that_are_alike_are_told_together() -> None:
    buckets = [bucket_of([name], seconds, 2 << 20) for name, seconds in (("a", 4e-3), ("b", 2e-3), ("c", 9e-3))]
    whole = Traffic(6 << 20, 3 << 20, 9 << 20, 3 << 20, 15e-3, 15e-3)
    assert describe_exchange(report_of(buckets, [1, 1], whole)).splitlines()[7:] == [
        "buckets 1 to 3: 9.00 MiB of float32 (a, b, c)",
        "  gather, beside the backward pass; why",
        "  stages: stages",
        "  measured: 6.00 MiB sent and 3.00 MiB received, planned: 9.00 MiB sent and 3.00 MiB received",
        "  measured (each, the median): 4 ms from setting out to the sums, 3 ms of it hidden",
        "  predicted (each, the median): gather 2 ms",
    ]
