"""``torch.compile``: the same bits on any workers, though each process compiles for itself what it comes across."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from elastic_jobs import ElasticJob, Trained, alone, trained
from habit_scripts import loop, mlp, sgd, squares, start
from torch import nn

import virtualflow as vf

PATIENCE = 300.0
"""Seconds until the workers must have compiled."""

COMPILER = os.environ.get("CXX", "g++")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"needs a C++ compiler: torch.compile calls {COMPILER}"),
]


def a_compiled_model_beside_the_one_that_is_given() -> Trained:
    model = mlp(nn.Dropout(0.2))
    optimizer = sgd(model)
    compiled = torch.compile(model)
    with start(model, optimizer) as run:
        loop(run, model, loss=lambda x, y: squares(compiled(x), y))
    return trained(run, model, optimizer)


def a_compiled_model_that_is_given() -> Trained:
    model = mlp(nn.BatchNorm1d(7), nn.Dropout(0.2))
    compiled = torch.compile(model)
    optimizer = sgd(model)
    with start(compiled, optimizer) as run:  # type: ignore[arg-type]
        loop(run, compiled)  # type: ignore[arg-type]
    return trained(run, model, optimizer)


def a_compiled_model_whose_backward_passes_end_early() -> Trained:
    model = mlp(nn.Dropout(0.2))
    optimizer = sgd(model)
    compiled = torch.compile(model)
    with start(model, optimizer, backward=vf.PartialBackward((1, 0.5))) as run:
        loop(run, model, loss=lambda x, y: squares(compiled(x), y))
    return trained(run, model, optimizer)


@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize(
    "script",
    [
        a_compiled_model_beside_the_one_that_is_given,
        a_compiled_model_that_is_given,
        a_compiled_model_whose_backward_passes_end_early,
    ],
    ids=lambda script: script.__name__.replace("_", " "),
)
def test_it_gives_the_same_bits(
    script: Callable[[], Trained], start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    # What is compiled alone is there for the workers: a compiler is slow, and who waits for a step is impatient.
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    reference = alone(script, environment=environment)
    job = start_job(script, workers=2, hold=2, environment=environment)
    # By then they have compiled for full micro-batches and for short ones.
    job.wait_for(lambda status: status.step == 2 and status.phase == "training", "step 2", PATIENCE)
    assert job.results() == [reference], "worker-1 is killed in step 6"
