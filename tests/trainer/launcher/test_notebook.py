"""The live page in a notebook: the example is executed, and the page lets itself be shown in a frame."""

from __future__ import annotations

import asyncio
import functools
import http.server
import re
import shutil
import threading
from pathlib import Path

import chromium
import pytest
from coordinator_server import SETTINGS, TOKEN, serving
from large_job import fill, train

import virtualflow as vf
from virtualflow.coordinator.settings import CoordinatorSettings, LivePageSettings
from virtualflow.protocol.live_view import PageFrame, page_address

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_runs_and_shows_the_live_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it but what needs a cluster, which a test with an API server does."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient: make test-all installs it")
    pytest.importorskip("ipykernel", reason="needs ipykernel: make test-all installs it")
    import nbformat

    for script in EXAMPLES.glob("*.py"):
        shutil.copy(script, tmp_path)
    trainer = str(EXAMPLES.parent / "trainer")
    monkeypatch.setenv("PYTHONPATH", trainer, prepend=":")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    nbformat.validate(notebook)
    notebook.cells = [cell for cell in notebook.cells if "cluster" not in cell.metadata.get("tags", ())]
    done = nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *_, shown, ended = [cell.outputs for cell in done.cells if cell.cell_type == "code"]
    assert re.search(r'src="http://127.0.0.1:\d+/ui#token=\w+&amp;job=notebook"', shown[-1]["data"]["text/html"])
    assert re.fullmatch(r"[0-9a-f]{64}\n", ended[-1]["text"])


def test_a_job_that_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(vf.ConfigurationError, match="no job called 'late' is running on this machine"):
        vf.live_page("late", wait=0.3)


@pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.HOW)
@pytest.mark.slow
def test_the_page_may_be_shown_in_a_frame_of_a_notebook_of_this_machine(tmp_path: Path) -> None:
    settings = CoordinatorSettings(membership=SETTINGS.membership, live_page=LivePageSettings(interval=0.05))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))

    async def look(notebook: str) -> None:
        async with asyncio.timeout(120), serving(settings) as server, chromium.browser() as tab:
            fill(server.state, 2, 8, 1)
            train(server.state, 5)
            page = PageFrame(page_address(server.url, TOKEN, "<digits>"), 700)
            head = '<!doctype html><link rel="icon" href="data:,"><p>a cell</p>'
            (tmp_path / "notebook.html").write_text(f"{head}{page._repr_html_()}")
            await tab.open(f"{notebook}/notebook.html")
            followed = f"{server.url}/v1/view?have={server.state.incarnation}-"
            while not any(address.startswith(followed) for address in tab.requests):  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.02)
            assert tab.complaints == []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        asyncio.run(look(f"http://127.0.0.1:{server.server_port}"))
        server.shutdown()
