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
from virtualflow.protocol.exchange_report import BucketReport, ExchangeReport, read_report, write_report

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


def test_the_way_of_each_bucket_is_printed_with_its_reasons(tmp_path: Path) -> None:
    done = explain(tmp_path, width=8)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    verdict = "288 B of gradients travel in a step, by gather, none of it beside the backward pass; predicted: "
    assert lines[0].startswith(verdict)
    assert lines[2] == "step 2: 2 workers that contribute 1, 1 sums, 1 bucket"
    assert "assumed, since so little is not measured" in lines[3]
    assert "bucket 1: 288 B of float32 (bias, weight)" in lines
    assert any(line.startswith("  gather, behind the step headers; predicted to be the fastest") for line in lines)
    assert any("no further overlap: all buckets together are predicted to save" in line for line in lines)
    assert not list(tmp_path.glob("virtualflow-*/*")), "it has left something"


@pytest.mark.slow
def test_large_gradients_are_measured_and_an_expert_gets_what_is_asked_for(tmp_path: Path) -> None:
    options = ', exchange=vf.Exchange("reduce-scatter", bucket_bytes=1 << 18, overlap=True)'
    done = explain(tmp_path, "--json", width=600, options=options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["measured"] is True
    assert [bucket["tensors"] for bucket in report["buckets"]] == [["bias"], ["weight"]]
    assert all(bucket["overlapped"] and bucket["way"] == "reduce-scatter" for bucket in report["buckets"])
    assert all("shard_optimizer=False" in bucket["refused"]["reorder"] for bucket in report["buckets"])


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


def test_one_worker_has_nothing_to_explain() -> None:
    assert "nothing travels" in describe_exchange(ExchangeReport(2, [1], False, {}, []))


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    bucket = BucketReport(
        ["a", "b", "c", "d"], 3 << 20, "float32", "stages", "gather", True, "why", {"gather": 1e-3}, {}
    )
    numbers = ("latency", "byte", "add_byte")
    report = ExchangeReport(2, [2, 1], True, dict.fromkeys(numbers, 1e-9) | {"add_byte": 0.0, "hidden": 0.25}, [bucket])
    write_report(tmp_path / "report", report)
    assert read_report(tmp_path / "report") == report
    text = describe_exchange(report)
    verdict = "3.00 MiB of gradients travel in a step, by gather, all of it beside the backward pass; predicted: 1 ms"
    assert text.splitlines()[0] == verdict
    assert "2 workers that contribute 2, 1 sums" in text
    assert "beside a backward pass 25% of that is hidden" in text
    assert "bucket 1: 3.00 MiB of float32 (a, b, c and 1 more)" in text
    assert "  gather, beside the backward pass; why" in text
    assert "  predicted: gather 1 ms" in text
