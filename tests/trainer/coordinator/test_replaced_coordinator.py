"""What a live page shows goes on when the coordinator is killed: real processes, and a real kill."""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import aiohttp
import msgspec
import pytest
import torch
from coordinator_process import CoordinatorProcess
from elastic_jobs import PATIENCE, TOKEN, ElasticJob, Trained, alone, trained
from injected import inject
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from other_version import Version
from tiers import nightly
from virtualflow.protocol.job_record import JobRecord
from virtualflow.protocol.job_view import ViewLog, ViewNow
from virtualflow.protocol.live_view import VIEW_PATH, View, ViewSeries, view_token
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.transport.link import RecordKeeper

HELD = 12
STEPS = 24


def wait_for(condition: Callable[[], bool]) -> None:
    # A story of many seconds where the machine is busy, and workers wait for its end.
    deadline = time.monotonic() + 5 * PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def paid(now: ViewNow) -> float:
    """Seconds of workers' time, as the page has them in words."""
    note = next(fact.note for fact in now.facts if fact.name == "Goodput")
    return float(note.split()[1])


def keep_eagerly(gates: Path) -> None:
    """Let this worker fetch all the time, and tell once it keeps a record of the step before the held one."""
    keep, fetch = RecordKeeper.keep, RecordKeeper._fetch

    async def keep_often(self: RecordKeeper, session: aiohttp.ClientSession, interval: float) -> None:
        await keep(self, session, 0.02)

    async def tell(self: RecordKeeper, session: aiohttp.ClientSession) -> None:
        await fetch(self, session)
        if self._record is not None:
            record = msgspec.json.decode(self._record, type=JobRecord)
            if record.series.steps[-1:] >= (HELD - 1,) and record.goodput.step is not None:
                (gates / f"kept-{os.environ[ENV_WORKER]}").touch()

    RecordKeeper.keep, RecordKeeper._fetch = keep_often, tell  # type: ignore[method-assign]


def train(gates: str = "") -> Trained:
    """Train; before a step in the middle, tell that this worker is there and wait until it may go on."""
    inject(link={"progress": 0.0})
    if gates:
        keep_eagerly(Path(gates))
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    dataset = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(1)))
    with vf.elastic(model, optimizer, dataset, batch_size=8, steps=STEPS, virtual_nodes=4) as run:
        for step in run:
            if gates and step.number == HELD:
                (Path(gates) / f"held-{os.environ[ENV_WORKER]}").touch()
                wait_for((Path(gates) / "open").exists)
            for (x,) in step:
                loss = model(x).square().mean()
                loss.backward()
                step.log(loss=loss)
    return trained(run, model, optimizer, metrics=dict(run.metrics))


class Shown(NamedTuple):
    """What a page shows."""

    now: ViewNow
    log: ViewLog
    series: ViewSeries

    @property
    def texts(self) -> list[str]:
        return [event.text for event in self.log.events]


def look(coordinator: CoordinatorProcess) -> Shown:
    request = urllib.request.Request(
        f"{coordinator.url}{VIEW_PATH}", headers={"Authorization": f"Bearer {view_token(TOKEN)}"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        view = msgspec.json.decode(answer.read(), type=View)
    return Shown(
        msgspec.json.decode(view.now, type=ViewNow),
        msgspec.json.decode(view.log, type=ViewLog),
        msgspec.json.decode(view.series, type=ViewSeries),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("this", "this", id="of this version"),
        nightly("newer", "this", id="of a newer version and then of this one"),
        nightly("this", "newer", id="of this version and then of a newer one"),
    ],
)
def test_curves_goodput_and_events_go_on_after_the_coordinator_was_killed(
    before: Version, after: Version, start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    coordinator = CoordinatorProcess(tmp_path, before)
    job = start_job(train, str(tmp_path), workers=2, coordinator=coordinator)
    for worker in ("worker-0", "worker-1"):
        wait_for((tmp_path / f"held-{worker}").exists)
        wait_for((tmp_path / f"kept-{worker}").exists)
    earlier = look(coordinator)
    assert earlier.series.steps
    began = next(text for text in earlier.texts if text.startswith("generation"))

    coordinator.replace(after)
    found: list[Shown] = []

    def goes_on() -> bool:
        found.append(look(coordinator))
        return found[-1].series.steps[: len(earlier.series.steps)] == earlier.series.steps

    wait_for(lambda: coordinator.status().phase == "training")
    wait_for(goes_on)
    later = found[-1]
    assert later.series.metrics["loss"][: len(earlier.series.steps)] == earlier.series.metrics["loss"]
    assert later.series.speed[: len(earlier.series.steps)] == earlier.series.speed
    assert paid(later.now) > paid(earlier.now), "also the time without a coordinator was paid"
    assert began in later.texts
    assert later.log.changes == earlier.log.changes, "workers tell those themselves"

    (tmp_path / "open").touch()
    results = job.results()
    assert [result.digest for result in results] == [alone(train).digest] * 2

    def through() -> bool:
        # Steps that follow each other closely are told together, so there may be few more points.
        steps = look(coordinator).series.steps
        return steps[: len(earlier.series.steps)] == earlier.series.steps and len(steps) > len(earlier.series.steps)

    wait_for(through)


@pytest.mark.slow
def test_a_coordinator_that_knows_no_records_takes_over_all_the_same(
    start_job: Callable[..., ElasticJob], tmp_path: Path
) -> None:
    coordinator = CoordinatorProcess(tmp_path, "older")
    job = start_job(train, str(tmp_path), workers=2, coordinator=coordinator)
    for worker in ("worker-0", "worker-1"):
        wait_for((tmp_path / f"held-{worker}").exists)
    coordinator.replace("older")
    wait_for(lambda: coordinator.status().phase == "training")
    (tmp_path / "open").touch()
    results = job.results()
    assert [result.digest for result in results] == [alone(train).digest] * 2
    assert not list(tmp_path.glob("kept-*")), "nobody was asked to keep anything"
