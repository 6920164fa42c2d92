"""A real Chromium without a window, driven by its DevTools protocol: what people see, and what it costs."""

from __future__ import annotations

import asyncio
import atexit
import base64
import contextlib
import functools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from virtualflow.launcher.supervisor import die_with

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOW = "needs chromium: put it on PATH"
AXE = "axe_core_python"
CHECKER = find_spec(AXE) is not None
HOW_CHECKER = "needs axe-core-python: pip install axe-core-python"
VIOLATIONS = """
axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "best-practice"]}).then(({violations}) => violations.map(
  (one) => `${one.id}: ${one.nodes.slice(0, 3).map((node) => node.html.slice(0, 120)).join(" ")}`))
"""
FOCUS = """
(({activeElement: node}) => node === document.body ? null : {
  name: node.ariaLabel || (node.labels && node.labels.length ? node.labels[0] : node).textContent.trim(),
  seen: getComputedStyle(node).outlineStyle !== "none" && node.getBoundingClientRect().height > 0,
})(document)
"""
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
START = 60.0
ANSWER = 60.0


class Tab:
    """The one page of a browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, pid: int) -> None:
        self._socket, self._browser = socket, psutil.Process(pid)
        self.context = ""
        """Of the browser's, what this one's is called."""
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.complaints: list[str] = []
        """What the page wrote to its console beyond information: errors, warnings, exceptions, refused loads."""
        self.requests: list[str] = []
        """Addresses that it asked for."""
        self.loaded = asyncio.Event()

    async def say(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Make a call of the protocol; its result."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER):
            return await answer

    async def listen(self) -> None:
        """Take what comes, until the browser has ended."""
        async for frame in self._socket:
            said = frame.json()
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if not answer.done():
                    if "error" in said:
                        answer.set_exception(AssertionError(said["error"]))
                    else:
                        answer.set_result(said["result"])
                continue
            told = said["params"]
            match said["method"]:
                case "Page.loadEventFired":
                    self.loaded.set()
                case "Network.requestWillBeSent":
                    self.requests.append(told["request"]["url"])
                case "Log.entryAdded" if told["entry"]["level"] != "info":
                    # Another program has added an interface: the request is broken off, and the page asks again.
                    if not told["entry"]["text"].endswith("net::ERR_NETWORK_CHANGED"):
                        self.complaints.append(told["entry"]["text"])
                case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                    self.complaints.append(str(told["args"]))
                case "Runtime.exceptionThrown":
                    self.complaints.append(str(told["exceptionDetails"]))

    async def open(self, address: str) -> None:
        """Go there, and wait until it is loaded."""
        self.loaded.clear()
        await self.say("Page.navigate", url=address)
        async with asyncio.timeout(ANSWER):
            await self.loaded.wait()

    async def value(self, expression: str) -> Any:
        """What an expression comes to in the page; of a promise, what that comes to."""
        told = await self.say("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        async with asyncio.timeout(ANSWER):
            while not await self.value(expression):  # noqa: ASYNC110 - it looks at another process
                await asyncio.sleep(0.02)

    async def look(self, width: int, *, dark: bool = False, height: int = 900) -> None:
        """Be a screen of that width in CSS pixels, and of somebody who likes it dark."""
        await self.say(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.say("Emulation.setEmulatedMedia", features=[scheme])

    async def violations(self, width: int, *, dark: bool = False) -> list[str]:
        """What a checker of accessibility finds on a screen of that width."""
        await self.value(f"{(files(AXE) / 'axe.min.js').read_text()}\n0")
        await self.look(width, dark=dark, height=6_000)  # it sees what is on the screen
        assert await self.value("document.documentElement.scrollWidth <= innerWidth"), "only tables scroll sideways"
        await self.value("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        return [f"{width}, {'dark' if dark else 'light'}: {one}" for one in await self.value(VIOLATIONS)]

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key, as the keyboard does."""
        for kind in ("keyDown", "keyUp"):
            said = {"key": key, "code": key, "windowsVirtualKeyCode": code, "text": text if kind == "keyDown" else ""}
            await self.say("Input.dispatchKeyEvent", type=kind, **said)

    async def walk(self) -> list[str]:
        """Go through the page by the Tab key: the names of all that can be reached, in order; where one is, is seen."""
        await self.say("Emulation.setFocusEmulationEnabled", enabled=True)
        names: list[str] = []
        while True:
            await self.press("Tab", 9)
            at = await self.value(FOCUS)
            if at is None:
                return names
            assert at["name"], f"what comes after {names[-1:]} has no name"
            assert at["seen"], f"nobody sees that {at['name']} is focused"
            names.append(at["name"])
            assert len(names) < 500, "Tab never leaves the page"

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write the whole page as a PNG, or what a screen shows of it."""
        told = await self.say("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(told["data"]))  # noqa: ASYNC240 - nothing else waits

    async def costs(self) -> tuple[int, int, int]:
        """Bytes of its scripts' heap after a collection, nodes of its documents, and bytes of its process."""
        await self.say("HeapProfiler.collectGarbage")
        metrics = {one["name"]: one["value"] for one in (await self.say("Performance.getMetrics"))["metrics"]}
        processes = [one for one in self._browser.children(recursive=True) if "--type=renderer" in one.cmdline()]
        resident = max(one.memory_info().rss for one in processes)
        return int(metrics["JSHeapUsedSize"]), int(metrics["Nodes"]), resident


@functools.cache
def _chromium() -> tuple[int, int]:
    """The one that all tests of this process share, which ends with it: its pid, and its port."""
    assert PROGRAM is not None, HOW
    folder = Path(tempfile.mkdtemp(prefix="chromium-"))
    process = subprocess.Popen(
        [PROGRAM, *OPTIONS, f"--user-data-dir={folder}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=die_with(os.getpid()),  # noqa: PLW1509
    )
    atexit.register(_end, process, folder)  # who is killed does not come to it: see above
    ready, deadline = folder / "DevToolsActivePort", time.monotonic() + START
    while not (ready.exists() and ready.read_text().strip()):
        assert process.poll() is None, "chromium has ended at once"
        assert time.monotonic() < deadline, f"chromium is not ready within {START:g} s"
        time.sleep(0.02)
    return process.pid, int(ready.read_text().split()[0])


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def _connected(session: aiohttp.ClientSession, address: str, pid: int) -> AsyncIterator[Tab]:
    async with session.ws_connect(address, max_msg_size=0) as socket:
        tab = Tab(socket, pid)
        listening = asyncio.create_task(tab.listen())
        try:
            yield tab
        finally:
            listening.cancel()


@contextlib.asynccontextmanager
async def browser() -> AsyncIterator[Tab]:
    """A browser that knows nothing, with one empty page: to start one takes as long as most of these tests."""
    pid, port = _chromium()
    devtools = f"127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{devtools}/json/version") as answer:
            address = (await answer.json())["webSocketDebuggerUrl"]
        async with _connected(session, address, pid) as whole:
            context = (await whole.say("Target.createBrowserContext"))["browserContextId"]
            page = (await whole.say("Target.createTarget", url="about:blank", browserContextId=context))["targetId"]
            try:
                async with _connected(session, f"ws://{devtools}/devtools/page/{page}", pid) as tab:
                    tab.context = context
                    for domain in ("Page", "Runtime", "Log", "Network", "Performance"):
                        await tab.say(f"{domain}.enable")
                    yield tab
            finally:
                await whole.say("Target.disposeBrowserContext", browserContextId=context)
