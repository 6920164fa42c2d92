"""The states of a job that people see first, in a real Chromium: accessible, without a complaint, and as pictures.

``VIRTUALFLOW_REWRITE=1`` writes the pictures that the documents show.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from chromium import CHECKER, HOW, HOW_CHECKER, PROGRAM, Tab, browser
from coordinator_server import SETTINGS, TOKEN, hello, serving
from large_job import fill, train

from virtualflow.coordinator.admission import admit
from virtualflow.coordinator.settings import CoordinatorSettings, LivePageSettings
from virtualflow.coordinator.state import JobState
from virtualflow.coordinator.worker_messages import handle
from virtualflow.protocol import messages as m
from virtualflow.protocol.live_view import page_address

pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason=HOW),
    pytest.mark.skipif(not CHECKER, reason=HOW_CHECKER),
]

PICTURES = Path(__file__).parents[3] / "docs" / "images" / "page"
MOST = 150_000
"""Bytes of a picture."""
TRACEBACK = """Traceback (most recent call last):
  File "/home/me/train.py", line 19, in main
    rate = rates[run.step]
           ~~~~~^^^^^^^^^^
IndexError: list index out of range
"""


PACE, REST = 0.010, 0.002
"""Seconds that a virtual node takes in ``fill``, and of a step that are no computing."""
START = 1.5
"""Seconds from the workers' connection to the first step."""


def measured_step(workers: int) -> float:
    """Seconds that a step takes with so many workers that share eight virtual nodes, a little more than predicted."""
    return -(-8 // workers) * PACE + REST + 0.0004


def make_steps(
    state: JobState, *spells: tuple[int, int], before: float = 0.0, odd: int | None = None, ended: bool = False
) -> None:
    """Let a job make its steps in real proportions, the last of them now.

    Args:
        spells: up to which step how many workers made them.
        before: seconds of pause in front of each spell but the first.
        odd: the step from which on the loss is not a number.
        ended: whether the job ends now, as its leader then says by itself.
    """
    history, running = state.history, state.running
    assert running is not None
    lengths = [last - first for (first, _), (last, _) in pairwise([(0, 0), *spells])]
    paid = sum(many * workers * measured_step(workers) for many, (_, workers) in zip(lengths, spells, strict=True))
    trained = sum(many * measured_step(workers) for many, (_, workers) in zip(lengths, spells, strict=True))
    trained += before * (len(spells) - 1)
    now = history.began = time.time() - trained
    for (first, _), (last, workers) in pairwise([(0, 0), *spells]):
        now += before * (first > 0)
        for step in range(first + 1, last + 1):
            now += measured_step(workers) * (1 + 0.02 * ((step * 31 % 7) - 3) / 3)
            loss: m.Metric = "NaN" if odd is not None and step >= odd else round(2.3 / (1 + step / 25) + wave(step), 6)
            metrics: dict[str, m.Metric] = {"loss": loss, "accuracy": round(1 - 1 / (1 + step / 40), 4)}
            speed = 1 / measured_step(workers)
            history.series.add(step, speed * (1 + 0.02 * (step * 17 % 5 - 2) / 2), workers, metrics, now)
    history.wall = time.time()
    history.goodput.used = paid
    history.goodput.paid = paid + START * spells[0][1] + before * sum(workers for _, workers in spells[1:])
    if not ended:
        told = m.Progress(running.generation, step, 0, 400, metrics, speed, "training", 1e3 / speed)
        handle(state, running.members[0].incarnation, told, time.monotonic())


def wave(step: int) -> float:
    """A noise."""
    return 0.01 * (step * 7919 % 13 - 6) / 6


def save(state: JobState, step: int, age: float) -> None:
    """The checkpoint of that step was written so many seconds ago."""
    saved = m.CheckpointState(time.time() - age, step, time.time() - age, directory="checkpoints")
    state.history.take_checkpoint(saved)


def training(state: JobState) -> None:
    fill(state, 3, 8, 0, total_steps=400)
    for number, contact in enumerate(state.roster.contacts.values()):
        contact.usage = m.Usage(1.02 + 0.01 * number, 661.0 + number, 410 << 20)
    make_steps(state, (240, 3))
    save(state, 200, 40 * measured_step(3))


def with_a_kill(state: JobState) -> None:
    """One of three, which is being replaced."""
    fill(state, 2, 8, 0, total_steps=400)
    second = m.Generation(state.incarnation, 2)
    assert state.running is not None
    lost = "worker-2 lost: killed by signal 9 (SIGKILL)"
    state.running = msgspec.structs.replace(state.running, generation=second, cause="lost", reason=lost)
    for incarnation, worker in list(state.roster.workers.items()):
        assert worker.pace is not None
        pace = msgspec.structs.replace(worker.pace, generation=second)
        state.roster.update(incarnation, entered=m.Generation(state.incarnation, 1), pace=pace)
    state.wanted = 3
    state.roster.note_lost("worker-2", "worker-2.0", "10.0.0.1", "killed by signal 9 (SIGKILL)")
    state.history.merge_change(m.Change(second, 111, 3, 2, "lost", lost, 118.0, 1))
    admit(state, hello("worker-2"), time.monotonic())
    make_steps(state, (110, 3), (190, 2), before=0.118)
    save(state, 100, 0.118 + 80 * measured_step(2) + 10 * measured_step(3))


def starting(state: JobState) -> None:
    state.wanted = 3
    admit(state, hello("worker-0"), time.monotonic())


def without_coordinator(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, (110, 2))
    state.history.series.miss()
    state.history.series.add(240, 23.5, 2, {"loss": 0.2}, (state.history.series.latest or 0) + 9.0)
    state.history.series.add(300, 23.5, 2, {"loss": 0.2}, (state.history.series.latest or 0) + 3.0)


def slow(state: JobState) -> None:
    """One of three takes five times as long."""
    training(state)
    pace = state.roster.workers["worker-1.0"].pace
    assert pace is not None
    state.roster.update("worker-1.0", pace=msgspec.structs.replace(pace, median=0.05, low=0.048))


def not_finite(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, (150, 2), odd=121)
    state.note_non_finite(m.NonFinite("loss", "NaN", 121))


def failed(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, (150, 2))
    save(state, 100, 50 * measured_step(2))
    for member in state.running.members if state.running is not None else ():
        told = m.Failed(151, "IndexError: list index out of range", TRACEBACK)
        handle(state, member.incarnation, told, time.monotonic())


def done(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, (400, 2), ended=True)
    save(state, 400, 0)
    digest = hashlib.sha256(b"weights").hexdigest()
    for member in state.running.members if state.running is not None else ():
        result = m.Done(400, digest, "", {"loss": 0.135294, "accuracy": 0.9091}, 1e3 * measured_step(2), 399)
        handle(state, member.incarnation, result, time.monotonic())


def large(state: JobState) -> None:
    fill(state, 64, 1_000, 10_000)
    for step in range(1, 500):
        train(state, step)


SHOWN = (training, with_a_kill, not_finite, failed, done)
"""Those that the documents show, too."""


@asynccontextmanager
async def shown(state_of: Callable[[JobState], None], tab: Tab) -> AsyncIterator[None]:
    """The page of a job in that state."""
    async with serving(CoordinatorSettings(SETTINGS.membership, live_page=LivePageSettings(interval=0.05))) as server:
        state_of(server.state)
        await tab.open(page_address(server.url, TOKEN, "digits"))
        await tab.until("!document.getElementById('all').hidden")
        yield


async def look_at(tab: Tab, name: str, folder: Path) -> list[str]:
    """On a desk, in the dark and on a phone; what a checker of accessibility finds in them."""
    await tab.look(1_280, height=900)
    picture = folder / f"{name}.png"
    await tab.picture(picture, whole=False)  # before time goes by in which the job makes no step
    assert 10_000 < picture.stat().st_size < MOST
    found: list[str] = []
    for width, dark in ((1_280, False), (1_280, True), (390, False)):
        found += [f"{name}, {one}" for one in await tab.violations(width, dark=dark)]
    return found


@pytest.mark.parametrize(
    "state_of",
    [
        *(pytest.param(state, marks=pytest.mark.slow) for state in SHOWN),
        *(pytest.param(state, marks=pytest.mark.nightly) for state in (starting, without_coordinator, slow, large)),
    ],
)
def test_a_state_is_accessible_and_fits_a_desk_a_phone_and_the_dark(
    state_of: Callable[[JobState], None], tmp_path: Path
) -> None:
    folder = PICTURES if os.environ.get("VIRTUALFLOW_REWRITE") and state_of in SHOWN else tmp_path

    async def story() -> None:
        async with asyncio.timeout(120), browser() as tab:
            async with shown(state_of, tab):
                found = await look_at(tab, state_of.__name__.replace("_", "-"), folder)
                assert tab.complaints == []
            if state_of is training:
                async with shown(state_of, tab):
                    pass
                # Nobody is there any more.
                await tab.until("document.getElementById('phase').textContent.startsWith('no news since ')")
                found += await look_at(tab, "gone", folder)
            assert found == []

    asyncio.run(story())
