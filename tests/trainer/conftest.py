"""Fixtures of the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from elastic_jobs import ElasticJob, prepare_forkserver

# Whichever test starts the server process first, it serves all.
prepare_forkserver()


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
