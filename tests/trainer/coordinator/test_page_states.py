"""The states of a job that people see first, in a real Chromium: accessible, without a complaint, and as pictures.

``VIRTUALFLOW_REWRITE=1`` writes the pictures that the documents show.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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


def make_steps(state: JobState, first: int, last: int, speed: float, workers: int, odd: int | None = None) -> None:
    """Let ``workers`` make these steps, the last of them now if the job ends here."""
    series, running = state.history.series, state.running
    assert running is not None
    now = series.latest or time.time() - 30.0
    state.history.began = state.history.began or now
    for step in range(first, last + 1):
        now += 1 / speed
        loss: m.Metric = "NaN" if odd is not None and step >= odd else 2.3 / (1 + step / 25) + 0.01 * (step * 7919 % 13)
        series.add(step, speed, workers, {"loss": loss, "accuracy": 1 - 1 / (1 + step / 40)}, now)
    state.history.wall = now
    paid = workers * (last - first + 1) / speed
    state.history.goodput.paid, state.history.goodput.used = paid, 0.93 * paid
    told = m.Progress(
        running.generation, last, 0, 400, {"loss": loss, "accuracy": 0.85}, speed, "training", 1e3 / speed
    )
    handle(state, running.members[0].incarnation, told, time.monotonic())


def training(state: JobState) -> None:
    fill(state, 3, 8, 0, total_steps=400)
    for number, contact in enumerate(state.roster.contacts.values()):
        contact.usage = m.Usage(1.02 + 0.01 * number, 661.0 + number, 410 << 20)
    make_steps(state, 1, 240, 31.0, 3)


def with_a_kill(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, 1, 110, 31.0, 3)
    state.history.series.add(111, 0.0, 2, {"loss": 0.5}, (state.history.series.latest or 0) + 2.4)
    kill = m.Change(m.Generation(state.incarnation, 1), 111, 3, 2, "lost", "worker-2 lost: killed", 2_400.0, 1)
    state.history.merge_change(kill)
    make_steps(state, 112, 190, 23.5, 2)


def starting(state: JobState) -> None:
    state.wanted = 3
    admit(state, hello("worker-0"), time.monotonic())


def without_coordinator(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, 1, 110, 23.5, 2)
    state.history.series.miss()
    state.history.series.add(240, 23.5, 2, {"loss": 0.2}, (state.history.series.latest or 0) + 9.0)
    make_steps(state, 241, 300, 23.5, 2)


def slow(state: JobState) -> None:
    """One of three takes twice as long."""
    training(state)
    pace = state.roster.workers["worker-1.0"].pace
    assert pace is not None
    state.roster.update("worker-1.0", pace=msgspec.structs.replace(pace, median=0.05, low=0.048))


def not_finite(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, 1, 150, 23.5, 2, odd=121)
    state.note_non_finite(m.NonFinite("loss", "NaN", 121))


def failed(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, 1, 150, 23.5, 2)
    for member in state.running.members if state.running is not None else ():
        told = m.Failed(151, "IndexError: list index out of range", TRACEBACK)
        handle(state, member.incarnation, told, time.monotonic())


def done(state: JobState) -> None:
    fill(state, 2, 8, 0, total_steps=400)
    make_steps(state, 1, 400, 23.5, 2)
    for member in state.running.members if state.running is not None else ():
        result = m.Done(400, "5eb2afcb" * 8, "", {"loss": 0.17, "accuracy": 0.91}, 42.6, 399)
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
    found: list[str] = []
    for width, dark in ((1_280, False), (1_280, True), (390, False)):
        found += [f"{name}, {one}" for one in await tab.violations(width, dark=dark)]
        if (width, dark) == (1_280, False):
            await tab.look(width, height=900)
            picture = folder / f"{name}.png"
            await tab.picture(picture, whole=False)
            assert 10_000 < picture.stat().st_size < MOST
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
            if state_of is training:  # and then nobody is there any more
                await tab.until("document.getElementById('phase').textContent.startsWith('no news since ')")
                found += await look_at(tab, "gone", folder)
            assert found == []

    asyncio.run(story())
