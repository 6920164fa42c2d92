"""Fixtures of the trainer's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import tree_of, writer_to
from elastic_jobs import ElasticJob

from virtualflow.state import checkpoint_format, transfer
from virtualflow.state.checkpoint_writer import CheckpointWriter
from virtualflow.worker import run


@pytest.fixture(autouse=True)
def each_training_is_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second training of one script is another run of its job; what a test trains again stands for a new process."""
    monkeypatch.setattr(run, "this_script", run.Script)


@pytest.fixture
def one_script(each_training_is_of_another_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the test trains in this process is the runs of one script."""
    script = run.Script()
    monkeypatch.setattr(run, "this_script", lambda: script)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small tensors of tests travel as large ones do."""
    monkeypatch.setattr(transfer, "STRIPE", 16)
    monkeypatch.setattr(transfer, "PIECE", 64)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., ElasticJob]]:
    """Start a job: ``start_job(script, *arguments, workers=3, hold=4, environment={...})``."""
    jobs: list[ElasticJob] = []

    def start(script: Callable[..., object], *arguments: object, **options: object) -> ElasticJob:
        directory = tmp_path / f"job-{len(jobs)}"
        directory.mkdir()
        job = ElasticJob(directory, script, arguments, **options)  # type: ignore[arg-type]
        jobs.append(job)
        return job

    yield start
    errors = []
    for job in jobs:
        try:
            job.close()
        except AssertionError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@pytest.fixture
def events() -> list[str]:
    """What a writer or a reader of checkpoints has told."""
    return []


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A disk that is as slow as the test wants: (it has started to write, let it go on)."""
    started, go_on = threading.Event(), threading.Event()
    write = checkpoint_format.save_file

    def slow(*args: Any, **options: Any) -> None:
        started.set()
        assert go_on.wait(60)
        write(*args, **options)

    monkeypatch.setattr(checkpoint_format, "save_file", slow)
    yield started, go_on
    go_on.set()


@pytest.fixture
def writing(
    gate: tuple[threading.Event, threading.Event], tmp_path: Path, events: list[str]
) -> tuple[CheckpointWriter, threading.Event]:
    """A writer in the middle of the checkpoint of step 1 in ``tmp_path``, and what lets it go on."""
    started, go_on = gate
    writer = writer_to(tmp_path, events)
    writer.save(1, tree_of(1))
    assert started.wait(60)
    return writer, go_on
