"""The live page in a real Chromium: what opens, what is said aloud, what stays silent, and what a day of it costs."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import elastic_jobs
import msgspec
import psutil
import pytest
import torch
from chromium import HOW, PROGRAM, Tab, browser
from coordinator_server import SETTINGS, TOKEN, Server, serving
from elastic_jobs import ElasticJob
from large_job import fill, happen, train

import virtualflow as vf
from virtualflow.coordinator.page.files import WORDS
from virtualflow.coordinator.settings import CoordinatorSettings, LivePageSettings
from virtualflow.launcher.report import Report
from virtualflow.launcher.report_page import page
from virtualflow.protocol import messages as m
from virtualflow.protocol.job_record import Break
from virtualflow.protocol.live_view import ViewSeries, page_address

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=HOW)

SHOWN = "!document.getElementById('all').hidden"
DAY = 86_400
COUNTING = """
var asked = 0, timers = 0;
const [fetching, waiting] = [window.fetch, window.setTimeout];
window.fetch = (...all) => { asked += 1; return fetching(...all); };
window.setTimeout = (...all) => { timers += 1; return waiting(...all); };
"""
"""Put before a page's own script: what it does to ask again is done when it has said its sentence."""


def with_browser(
    story: Callable[[Server, Tab], Awaitable[None]],
    seconds: float = 120.0,
    interval: float = 0.05,
    logs: Path | None = None,
    share: float = LivePageSettings.share,
) -> None:
    shown = LivePageSettings(interval=interval, logs=logs, share=share)
    settings = CoordinatorSettings(membership=SETTINGS.membership, live_page=shown)

    async def play() -> None:
        async with asyncio.timeout(seconds), serving(settings) as server, browser() as tab:
            await story(server, tab)

    asyncio.run(play())


async def show(server: Server, tab: Tab, job: str = "digits") -> None:
    """Open the page of a job whose goodput is known, as it is after a while, and wait until the job is to be seen."""
    goodput = server.state.history.goodput
    goodput.paid, goodput.used = goodput.paid + 100.0, goodput.used + 90.0
    await tab.open(page_address(server.url, TOKEN, job))
    await tab.until(SHOWN)


def text(identifier: str) -> str:
    return f"document.getElementById('{identifier}').textContent"


@pytest.mark.slow
def test_a_large_job_opens_without_a_complaint_and_asks_nobody_else() -> None:
    async def story(server: Server, tab: Tab) -> None:
        fill(server.state, 64, 1_000, 10_000)
        for step in range(1, 30_000, 3):
            train(server.state, step, metrics=8)
        await tab.open("about:blank")
        began = time.monotonic()
        await show(server, tab)
        opened = time.monotonic() - began
        print(f"opened within {opened:.3f} s")
        assert await tab.value(text("counted")) == ("10000 changes, 3334 steps repeated, the latest 100 of them below.")
        assert await tab.value("document.querySelectorAll('#strip i').length") == 64
        assert await tab.value("document.querySelectorAll('#workers tr').length") == 64
        assert await tab.value("document.querySelectorAll('#changes tr').length") == 100
        assert await tab.value("document.querySelectorAll('figure').length") == 10
        assert tab.complaints == []
        assert [address for address in tab.requests if not address.startswith((server.url, "about:", "data:"))] == []

    with_browser(story)


@pytest.mark.slow
def test_the_token_leaves_the_address_and_is_in_no_request() -> None:
    async def story(server: Server, tab: Tab) -> None:
        await show(server, tab)
        assert await tab.value("location.href") == f"{server.url}/ui"
        assert all("token" not in address for address in tab.requests)
        await tab.open(f"{server.url}/ui")
        await tab.until(SHOWN)
        assert await tab.value(text("name")) == "digits", "it survives that the page is loaded again"

    with_browser(story)


def test_without_a_token_or_with_a_wrong_one_the_page_says_where_to_get_it() -> None:
    async def story(server: Server, tab: Tab) -> None:
        await tab.open(f"{server.url}/ui")
        await tab.until(f"{text('trouble')}.startsWith('This page has no token. Open the address')")
        await tab.open("about:blank")
        await tab.say("Page.addScriptToEvaluateOnNewDocument", source=COUNTING)
        await tab.open(f"{server.url}/ui#token=wrong&job=x")
        await tab.until(f"{text('trouble')}.startsWith('The token is wrong. Open the address')")
        assert await tab.value("sessionStorage.getItem('token')") is None
        assert await tab.value("[asked, timers]") == [1, 0], "it does not ask again, now or later"

    with_browser(story)


@pytest.mark.slow
def test_what_users_have_named_is_text_and_nothing_else() -> None:
    async def story(server: Server, tab: Tab) -> None:
        evil = "<img src=x onerror=\"document.title='taken'\">"
        fill(server.state, 2, 8, 2)
        server.state.history.tell("info", evil)
        server.state.wanted_reason = evil
        assert server.state.running is not None
        train(server.state, 5)
        assert server.state.history.progress is not None
        server.state.history.progress.metrics[evil] = 1.0
        server.state.fail(evil, evil)
        await show(server, tab, job=evil)
        assert await tab.value(text("error")) == evil
        assert await tab.value(text("traceback")) == evil
        assert await tab.value("document.querySelectorAll('img').length") == 0
        assert await tab.value("document.title") == f"{evil}: failed, 0 %"
        assert tab.complaints == []

    with_browser(story)


def test_the_page_follows_the_job_and_says_aloud_only_what_matters() -> None:
    async def story(server: Server, tab: Tab) -> None:
        fill(server.state, 4, 16, 2)
        train(server.state, 20)
        await show(server, tab)
        for step in (21, 22, 23):
            train(server.state, step)
            await tab.until(f"{text('progress')}.startsWith('step {step} of')")
        assert await tab.value("document.getElementById('bar').getAttribute('aria-valuenow')") == "23"
        assert await tab.value(text("said")) == "", "steps are not read out"
        happen(server.state, 3, 24, 4)
        await tab.until(f"{text('said')}.includes('at step 24 (worker-3 needs 12.5 ms')")
        server.state.fail("ValueError: no")
        await tab.until(f"{text('phase')} === 'failed'")
        await tab.until("!document.getElementById('failure').hidden")
        assert tab.complaints == []

    with_browser(story)


def test_everything_can_be_reached_by_keyboard_and_has_a_name() -> None:
    async def story(server: Server, tab: Tab) -> None:
        fill(server.state, 4, 16, 5)
        for step in range(1, 200):
            train(server.state, step)
        await show(server, tab)
        told = await tab.say("Accessibility.getFullAXTree")
        roles: dict[str, list[str]] = {}
        for node in told["nodes"]:
            role = node.get("role", {}).get("value", "")
            roles.setdefault(role, []).append(node.get("name", {}).get("value", ""))
        assert len(roles["table"]) >= 4
        assert all(name for role in ("image", "progressbar", "region", "heading") for name in roles[role]), roles
        scrolls = (
            "[...document.querySelectorAll('*')].filter("
            "e => e.clientHeight && getComputedStyle(e).overflowX === 'auto' && e.tabIndex < 0).length"
        )
        assert await tab.value(scrolls) == 0, "what scrolls can be focused"
        assert all(name for role in ("button", "combobox", "slider") for name in roles[role]), roles
        reached = await tab.walk()
        assert reached[:2] == ["Skip to the job", "Goodput"]
        assert {"What the curves are over", "log", "worker-3", "Workers", "Membership changes"} <= set(reached)
        await tab.value("document.querySelector('figure [role=img]').focus()")
        await tab.say("Input.dispatchKeyEvent", type="keyDown", key="Home")
        heads = "[...document.querySelectorAll('figcaption .value')].map(e => e.textContent)"
        assert [head.partition(" ")[2] for head in await tab.value(heads)] == ["at step 1"] * 4, "all tell of one step"
        assert (await tab.value(heads))[1] == "9 at step 1"
        await tab.say("Input.dispatchKeyEvent", type="keyDown", key="ArrowRight")
        assert (await tab.value(heads))[0].endswith("at step 2")
        for key, spans in (("+", 99), ("ArrowRight", 99), ("0", 198)):
            await tab.say("Input.dispatchKeyEvent", type="keyDown", key=key, modifiers=8 if key == "ArrowRight" else 0)
            low, high = await tab.value("shown.curves.range")
            assert high - low == pytest.approx(spans, abs=1)

    with_browser(story)


CURVES = """
const plotOf = (name) => shown.curves.figures.get(name).plot;
const numbers = (name) => plotOf(name).data[2].filter((value) => typeof value === "number");
const latest = (name) => shown.curves.figures.get(name).value;
"""


@pytest.mark.slow
def test_the_curves_of_a_killed_worker_are_true_at_once() -> None:
    """Three workers, one of which is killed in step 111: it takes 4 s until the next step, and two are slower."""

    async def story(server: Server, tab: Tab) -> None:
        state = server.state
        fill(state, 3, 8, 0)
        series, now = state.history.series, 1_000.0
        for step in range(1, 117):
            killed = step >= 111
            now += (0.25 if killed else 0.1) + 4.0 * (step == 111)
            speed = 0.0 if step == 111 else 4.0 if killed else 10.0
            series.add(step, speed, 2 if killed else 3, {"loss": 1 / step, "odd": 60.0 if step < 50 else "NaN"}, now)
        kill = m.Change(m.Generation(state.incarnation, 1), 111, 3, 2, "lost", "worker-2 lost: killed", 4_250.0, 1)
        state.history.merge_change(kill, fresh=False)
        state.note_non_finite(m.NonFinite("odd", "NaN", 50))
        figures: dict[str, m.Metric] = {"loss": 1 / 116, "odd": "NaN"}
        running = state.running
        assert running is not None
        state.history.take_progress(m.Progress(running.generation, 116, 0, 1_000, figures, 4.0, "evaluating"))
        await tab.look(1_280, height=1_600)
        await show(server, tab)
        await tab.value(f"{CURVES} 0")
        assert await tab.value("[...shown.curves.figures.keys()]") == ["loss", "Steps a second", "Workers", "odd"]
        assert await tab.value("[...new Set(numbers('Steps a second'))]") == [10, 4], "no slope between the two"
        assert await tab.value("[...new Set(numbers('Workers'))]") == [3, 2]
        assert await tab.value("plotOf('Workers').data[0][numbers('Workers').indexOf(2) + 1]") == 111, "behind a gap"
        assert await tab.value("plotOf('loss').data[2].filter((value) => value === null).length") == 1, "a break"
        (band,) = await tab.value("shown.curves.bands")
        assert (band["kind"], band["until"] - band["since"]) == ("pause", pytest.approx(4.25, abs=0.02))
        assert await tab.value("[...document.querySelectorAll('.legend li')].map(e => e.textContent)") == [
            "a worker is lost",
            "nobody completes a step",
            "a metric is not finite",
        ]
        assert await tab.value("latest('odd').textContent") == "NaN since step 50"
        assert await tab.value("latest('odd').className") == "value bad"
        assert await tab.value("document.querySelector('#facts div').textContent") == "Not finiteoddNaN in step 50"
        over = "document.querySelector('figure .u-over').getBoundingClientRect()"
        x, y = await tab.value(f"[{over}.left + plotOf('loss').valToPos(111, 'x'), {over}.top + 20]")
        await tab.say("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await tab.until("!shown.curves.tip.hidden")
        told = await tab.value("shown.curves.tip.textContent")
        assert "3 workers → 2 workers at step 111 (worker-2 lost: killed): pause 4.25 s, 1 step repeated" in told
        assert "Nobody completed a step for 4 s." in told
        await tab.value("showCurves(shown.now, shown.log, shown.series)")
        assert await tab.value("shown.curves.tip.textContent") == told, "it stays when news come"
        assert tab.complaints == []

    with_browser(story)


@pytest.mark.slow
def test_what_people_ask_first_comes_first_and_nothing_of_it_is_cut_off() -> None:
    async def story(server: Server, tab: Tab) -> None:
        state = server.state
        fill(state, 3, 8, 6)
        for step in range(1, 50):
            train(state, step, total_steps=100)
        state.history.began = state.history.wall - 600
        for contact in state.roster.contacts.values():
            contact.usage = m.Usage(1.0, 640.0, 410 << 20)
        state.history.tell(
            "warning", "worker-2 makes no progress: it is\n" + '  File "' + "long/" * 90 + 'a.py", line 2'
        )
        await tab.look(390, height=844)
        await show(server, tab)
        names = await tab.value("[...document.querySelectorAll('#facts dt')].map(e => e.textContent)")
        assert names[:6] == ["loss", "Progress", "Started", "Speed", "Goodput", "Workers"]
        assert await tab.value(text("progress")) == "step 49 of 100, epoch 0"
        assert (await tab.value("document.querySelector('.course small').textContent")).startswith(
            "10 min so far, about "
        )
        columns = (
            "[...document.querySelectorAll('table:has(#workers) th')].filter(e => !e.hidden).map(e => e.textContent)"
        )
        assert (await tab.value(columns))[4:] == ["ms each", "samples/s", "CPU", "memory"], "nobody has a GPU"
        contact.usage = m.Usage(1.0, 640.0, 410 << 20, 5 << 30)
        await tab.until(f"{columns}.at(-1) === 'GPU memory'")
        filled = "document.querySelector('#bar span').getBoundingClientRect()"
        assert await tab.value(f"{filled}.height > 5 && {filled}.width > 100")
        cells = "#changes td.why, #changes td.cause, #workers td:nth-child(4), #events td.why > span"
        assert await tab.value(
            f"[...document.querySelectorAll('{cells}')].every(e => e.getBoundingClientRect().right < innerWidth)"
        ), "a phone shows why, and how many"
        assert await tab.value("(e => e.scrollWidth > e.clientWidth)(document.querySelector('#events pre'))")
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth"), "what is long scrolls by itself"
        hues = await tab.value("Array.from({length: 4096}, (_, number) => hue(`worker-${number}`))")
        assert (min(hues) >= 40, max(hues) <= 320) == (True, True), "none is red"
        label = "one => one.label instanceof Function ? one.label() : one.label"
        labels = await tab.value(f"[...shown.curves.figures.values()].map(e => e.plot.axes.map({label}))")
        assert labels[:3] == [["step", "loss"], ["step", "steps/s"], ["step", "workers"]]
        series = "{steps: [1, 2, 3, 4], times: [1, 2, 3, 4], speed: [9, 9, 7, 7], workers: [2, 2, 1, 1], metrics: {}}"
        speeds = f"drawn(runOf({series}, null), SPEED, {{weight: 0, changes: [{{step: 3}}]}}).map((row) => row[3])"
        assert await tab.value(speeds) == [9, 9, None, 7], (
            "no line leads from the speed before a change to that after it"
        )
        assert tab.complaints == []

    with_browser(story)


OTHER = {
    "steps": [1, 200],
    "speed": [1, 2],
    "workers": [1, 1],
    "metrics": {"loss": [9, 8]},
    "times": [5, 25],
    "began": 5,
}


@pytest.mark.slow
def test_curves_can_be_zoomed_smoothed_compared_and_taken_along(tmp_path: Path) -> None:
    async def story(server: Server, tab: Tab) -> None:
        state = server.state
        fill(state, 2, 8, 0)
        for step in range(1, 301):
            state.history.series.add(step, 10.0, 2, {"loss": 1.0 + step % 2}, 1_000.0 + step / 10)
        running = state.running
        assert running is not None
        state.history.take_progress(m.Progress(running.generation, 300, 0, 1_000, {"loss": 1.0}, 10.0, "evaluating"))
        await tab.look(1_280, height=1_600)
        await show(server, tab)
        await tab.value(f"{CURVES} 0")
        over = "document.querySelector('figure .u-over').getBoundingClientRect()"
        left, top, width = await tab.value(f"[{over}.left, {over}.top, {over}.width]")
        mouse = {"button": "left", "clickCount": 1, "y": top + 20}
        await tab.say("Input.dispatchMouseEvent", type="mousePressed", x=left + width / 4, **mouse)
        for share in (0.4, 0.5):
            await tab.say("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, x=left + width * share, **mouse)
        await tab.say("Input.dispatchMouseEvent", type="mouseReleased", x=left + width / 2, **mouse)
        await tab.until("shown.curves.zoomed !== null")
        low, high = await tab.value("[plotOf('Workers').scales.x.min, plotOf('Workers').scales.x.max]")
        assert (low, high) == (pytest.approx(76, abs=3), pytest.approx(151, abs=3)), "all are zoomed"
        await tab.value("shown.curves.zoom(null)")
        for control, event, value in (("input[type=range]", "input", "0.9"), ("select", "change", "time")):
            node = f"document.querySelector('.tools {control}')"
            await tab.value(f"{node}.value = '{value}'; {node}.dispatchEvent(new Event('{event}'))")
        assert await tab.value("plotOf('loss').data[0].at(-2)") == pytest.approx(29.9, abs=0.2), "seconds"
        assert await tab.value("Math.abs(plotOf('loss').data[2].at(-3) - 1.5) < 0.1"), "smoothed"
        assert await tab.value("plotOf('loss').data[1].slice(-4, -1).sort()") != [], "and what it was behind it"
        await tab.value("document.querySelector('figure button').click()")
        assert await tab.value("plotOf('loss').scales.y.distr") == 3
        report = json.dumps({"job": "other", "series": OTHER})
        lay = "shown.curves.lay(new File([{}], '{}'))"
        await tab.value(lay.format(f"`{report}`", "job.json"))
        assert await tab.value("plotOf('loss').data[3].filter(Boolean)") == [9, pytest.approx(8.47, abs=0.01)]
        html = f"<!doctype html><script type='application/json' id='run'>{report}</script>"
        await tab.value("document.querySelectorAll('.tools button')[6].click()")
        await tab.value(lay.format(f"`{html}`", "job.html"))
        assert (
            await tab.value("[...document.querySelectorAll('.legend li')].at(-1).textContent")
            == "the run laid under: other"
        )
        await tab.value(lay.format("`{}`", "odd.json"))
        assert (await tab.value("shown.curves.said.textContent")).startswith("odd.json has no curves: choose what")
        await tab.say(
            "Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path), browserContextId=tab.context
        )
        await tab.value("[...document.querySelectorAll('button')].find(e => e.textContent === 'CSV').click()")
        await tab.value("[...document.querySelectorAll('figure button')].find(e => e.textContent === 'PNG').click()")
        async with asyncio.timeout(30):
            while not {"digits.csv", "digits-loss.png"} <= {path.name for path in tmp_path.iterdir()}:  # noqa: ASYNC110, ASYNC240
                await asyncio.sleep(0.02)
        lines = (tmp_path / "digits.csv").read_text().splitlines()
        assert lines[:2] == ['"step","time","loss","Steps a second","Workers"', "1,1970-01-01T00:16:40.100Z,2,10,2"]
        assert (tmp_path / "digits-loss.png").read_bytes().startswith(b"\x89PNG")
        assert tab.complaints == []

    with_browser(story)


@pytest.mark.slow
def test_words_are_explained_on_hover_and_by_keyboard_and_a_log_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "worker-1.log").write_text("<b>bold</b>\nlast line\n")

    async def story(server: Server, tab: Tab) -> None:
        fill(server.state, 2, 8, 2)
        train(server.state, 3)
        server.state.hold, server.state.history.goodput.paid = 7, 1.0
        await tab.look(1_280, height=900)
        await show(server, tab)
        words = await tab.value("[...document.querySelectorAll('.word')].map(e => e.textContent.toLowerCase())")
        assert {"held", "goodput", "generation", "predicted", "bitwise", "virtual nodes again"} <= set(words)
        tip, goodput = "document.querySelector('.meaning')", "document.querySelectorAll('#facts .word')[0]"
        assert await tab.value(f"{tip}.hidden")
        await tab.say("Emulation.setFocusEmulationEnabled", enabled=True)
        await tab.value(f"{goodput}.focus()")
        assert await tab.value(f"[{tip}.hidden, {tip}.textContent]") == [False, WORDS["goodput"]]
        await tab.say("Input.dispatchKeyEvent", type="keyDown", key="Escape")
        assert await tab.value(f"{tip}.hidden")
        again = "[...document.querySelectorAll('th .word')].at(-1)"
        await tab.value(f"{again}.scrollIntoView()")
        x, y = await tab.value(f"(at => [at.left + 5, at.top + 5])({again}.getBoundingClientRect())")
        await tab.say("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await tab.until(f"{tip}.textContent === {json.dumps(WORDS['virtual nodes again'])} && !{tip}.hidden")
        told = await tab.say("Accessibility.getFullAXTree")
        described = {node.get("description", {}).get("value") for node in told["nodes"]}
        assert WORDS["goodput"] in described, "a screen reader reads it"
        worker = "[...document.querySelectorAll('.name button')]"
        await tab.value(f"{worker}[1].click()")
        await tab.until("document.getElementById('lines').textContent === '<b>bold</b>\\nlast line'")
        (tmp_path / "worker-1.log").write_text("newer\n")
        await tab.until("document.getElementById('lines').textContent === 'newer'")
        await tab.value(f"{worker}[0].click()")
        await tab.until("document.getElementById('lines').textContent.startsWith('no worker of that name has printed')")
        await tab.value("document.getElementById('unlog').click()")
        assert await tab.value("document.getElementById('log').hidden")
        assert [one for one in tab.complaints if "404" not in one] == []

    with_browser(story, logs=tmp_path)


@pytest.mark.slow
def test_a_reports_page_copies_its_digest_fits_a_phone_and_lays_another_run_under_it(tmp_path: Path) -> None:
    series = msgspec.convert(OTHER, ViewSeries)
    one = Report("one", "done", 200, 20.0, digest="ab" * 32, series=series, origin={"command": "python train.py " * 9})
    (tmp_path / "one.html").write_text(page(one))
    (tmp_path / "two.html").write_text(page(one, msgspec.structs.replace(one, job="other", digest="cd" * 32)))
    figures = {"speed": (2.0,) * 3, "workers": (1.0,) * 3, "metrics": {"loss": (5.0, 4.0, 3.0)}}
    paused = ViewSeries(
        steps=(1, 10, 20), times=(5.0, 6.0, 20.0), began=5.0, breaks=(Break(10, 20, 6.0, 20.0, False),), **figures
    )
    between = msgspec.structs.replace(paused, steps=(1, 12, 18), times=(5.0, 6.0, 7.0), breaks=())
    (tmp_path / "same.html").write_text(
        page(msgspec.structs.replace(one, series=paused), msgspec.structs.replace(one, series=between))
    )

    async def story(server: Server, tab: Tab) -> None:
        await tab.look(390, height=844)
        await tab.open(f"file://{tmp_path}/one.html")
        await tab.value("navigator.clipboard.writeText = async (text) => { window.copied = text; }; 0")
        await tab.value("document.querySelector('.copy').click()")
        await tab.until(f"window.copied === '{'ab' * 32}'")
        assert await tab.value("[...document.querySelectorAll('.tools option')].map(e => e.value)") == ["", "time"]
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        await tab.open(f"file://{tmp_path}/two.html")
        assert await tab.value("[...curves.figures.values()][0].plot.data[3].filter(Boolean)") == [9, 8]
        assert await tab.value("document.querySelector('.legend').textContent") == "the run laid under: other"
        assert await tab.value("document.documentElement.scrollWidth <= innerWidth")
        await tab.open(f"file://{tmp_path}/same.html")
        assert await tab.value(
            "document.querySelector('.legend').textContent.endsWith('the run laid under: one (second)')"
        )
        line = "[...curves.figures.values()][0].plot.data[2]"
        assert await tab.value(f"{line}.map((value) => value === null)") == [False, False, True, True, True, False], (
            "also where the other run has points, a line ends at a pause"
        )
        assert tab.complaints == []

    with_browser(story)


@pytest.mark.slow
def test_a_coordinator_that_is_away_is_said_and_found_again() -> None:
    async def story(server: Server, tab: Tab) -> None:
        fill(server.state, 2, 8, 1)
        train(server.state, 3)
        await show(server, tab)
        # As it looks to the page: no answer, then one of another coordinator.
        await tab.say(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        await tab.until(
            f"{text('trouble')}.startsWith('The coordinator does not answer. What you see was last known at')"
        )
        await tab.until(f"{text('phase')}.startsWith('no news since ')")
        pairs = "[...document.querySelectorAll('#facts > div')].map((tile) => ['dt', 'small'].map((one) => "
        stale = f"Object.fromEntries({pairs} tile.querySelector(one).textContent)))"
        said = await tab.value(stale)
        since = (await tab.value(text("phase"))).removeprefix("no news since ")
        assert all(said[name].startswith(f"at {since}") for name in ("Progress", "Speed", "Workers", "Goodput")), said
        assert said["Virtual nodes"] == "bitwise", "it stays true"
        assert await tab.value("document.title") == "digits: no news"
        server.state.incarnation += 1
        train(server.state, 9)
        await tab.say(
            "Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1
        )
        await tab.until(f"{text('progress')}.startsWith('step 9 of')")
        assert await tab.value("document.getElementById('trouble').hidden")
        assert await tab.value(text("phase")) == "training"
        assert since not in str(await tab.value(stale))

    with_browser(story)


def resting(steps: int) -> None:
    """Train in steps that take a known time, so that a speed is true or not."""
    model = torch.nn.Linear(8, 1)
    data = torch.utils.data.TensorDataset(torch.zeros(96, 8), torch.zeros(96, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with vf.elastic(model, optimizer, data, batch_size=48, steps=steps, virtual_nodes=12) as run:
        for step in run:
            for x, y in step:
                time.sleep(0.01)
                torch.nn.functional.mse_loss(model(x), y).backward()


@pytest.mark.nightly
def test_a_kill_is_seen_and_the_speed_after_it_is_that_of_the_steps_since(start_job: Callable[..., ElasticJob]) -> None:
    """Three workers that train; it prints how soon a page shows the kill, and how true the speed is five steps on."""
    job = start_job(resting, 100_000, workers=3)

    async def story() -> None:
        async with asyncio.timeout(120), browser() as tab:
            await tab.open(page_address(job.url, elastic_jobs.TOKEN, "resting"))
            await tab.until("shown.now && shown.now.step > 50")
            killed = time.monotonic()
            os.kill(job.workers["worker-2"].process.pid, signal.SIGKILL)
            await tab.until("shown.now.training === 2 && shown.log.latest.includes('worker-2')")
            print(f"the kill is on the page after {time.monotonic() - killed:.2f} s")
            assert await tab.value("document.querySelector('#changes .cause').textContent") == "lost"
            first = await tab.value("shown.log.changes.at(-1).step")
            since = f"shown.series.steps.findIndex((step) => step >= {first})"
            await tab.until(f"shown.now.step >= {first + 5} && {since} >= 0")
            told, *true = await tab.value(
                f"[shown.now.stepsPerSecond, shown.now.step, shown.now.stepTime,"
                f" shown.series.steps[{since}], shown.series.times[{since}]]"
            )
            really = (true[0] - true[2]) / (true[1] - true[3])
            print(f"at step {first} + {true[0] - first} it says {told:.2f} steps/s; {really:.2f} are true")
            assert told > 0

    asyncio.run(story())


@pytest.mark.parametrize(
    "updates",
    [
        pytest.param(120, id="two minutes"),
        pytest.param(DAY, id="a day", marks=[pytest.mark.nightly, pytest.mark.timeout(4 * 3_600)]),
    ],
)
@pytest.mark.slow
def test_page_and_coordinator_do_not_grow_with_the_updates(updates: int) -> None:
    """Each update is one answer that the page asked for, decoded and drawn; with changes, of which there are 10,000."""

    async def story(server: Server, tab: Tab) -> None:
        state, us = server.state, psutil.Process(os.getpid())
        fill(state, 64, 1_000, 500)
        for step in range(1, 2_000):
            train(state, step, total_steps=10**7)
        # Another way to tell what has been shown: each answer that is taken counts.
        await show(server, tab)
        await tab.say("Network.disable")  # it remembers what it has seen
        counting = "{ const old = showCurves; showCurves = (...all) => { old(...all); window.taken += 1; }; }"
        await tab.value(f"window.taken = 0; {counting} 0")
        step, number = 2_000, 500
        sizes: list[tuple[int, int, int, int, int]] = []
        taken, told = 0, 0
        while taken < updates:
            for _ in range(5):
                step += 1
                train(state, step, total_steps=10**7)
                told += 1
                if told % 9 == 0:
                    number += 1
                    happen(state, number, step, 64)
                await asyncio.sleep(0)
            if told % 50 == 0:
                taken = await tab.value("window.taken")
                while len(sizes) < 11 and taken >= updates * (len(sizes) + 1) / 12:
                    heap, nodes, resident = await tab.costs()
                    sizes.append((taken, heap, nodes, resident, us.memory_info().rss))
                    said = f"heap {heap:,} B, {nodes} nodes, renderer {resident:,} B, coordinator {sizes[-1][4]:,} B"
                    print(f"{taken} updates, step {step}: {said}", flush=True)
        # What is under way when it is looked at comes and goes: growth would show in the least of each half.
        early, late = ([min(column) for column in zip(*half, strict=True)] for half in (sizes[1:6], sizes[6:]))
        assert late[1] < early[1] * 1.1 + 100_000, "the heap of the page"
        assert late[2] < early[2] * 1.02 + 50, "its nodes"
        assert late[3] < early[3] * 1.2 + 20_000_000, "its process"
        assert late[4] < early[4] * 1.02 + 1_000_000, "the coordinator"
        assert tab.complaints == []

    # An answer whenever one is asked for: a day of them has to fit into minutes, and nobody trains here.
    with_browser(story, seconds=4 * 3_500.0, interval=0.0005, share=1.0)
