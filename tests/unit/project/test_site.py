"""The documentation site in a browser: its search, as a file and from a server, and its references on a phone."""

from __future__ import annotations

import asyncio
import functools
import http.server
import inspect
import shutil
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import chromium
import pytest
import yaml

import virtualflow as vf

pytest.importorskip("material", reason="needs mkdocs-material: install the extra docs")
pytest.importorskip("mkdocstrings", reason="needs mkdocstrings: install the extra docs")
pytestmark = pytest.mark.skipif(chromium.PROGRAM is None, reason=chromium.HOW)

ROOT = Path(__file__).parents[3]
PAGES = ("reference/python.md", "reference/resource.md", "how-to/kubectl.md")
FOUND = "[...document.querySelectorAll('.md-search-result__link')].map(e => new URL(e.href).pathname.split('/').pop())"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some pages, built as all of them are."""
    folder = tmp_path_factory.mktemp("site")
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    del config["nav"], config["validation"]
    config |= {"docs_dir": "docs", "site_dir": "built", "hooks": [str(ROOT / "docs/site/hooks.py")]}
    (documented,) = [plugin["mkdocstrings"] for plugin in config["plugins"] if isinstance(plugin, dict)]
    documented["handlers"]["python"]["paths"] = [str(ROOT / "trainer")]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config))
    shutil.copytree(ROOT / "docs/site", folder / "docs/site")
    (folder / "docs/index.md").write_text("# VirtualFlow\n")
    for page in PAGES:
        (folder / "docs" / page).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "docs" / page, folder / "docs" / page)
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    return folder / "built"


@pytest.fixture(params=["file", "http"])
def address(request: pytest.FixtureRequest, site: Path) -> Iterator[str]:
    if request.param == "file":
        yield site.as_uri()
        return
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def look(story: Callable[[chromium.Tab], Awaitable[None]]) -> None:
    async def play() -> None:
        async with asyncio.timeout(120), chromium.browser() as tab:
            await story(tab)
            assert tab.complaints == []

    asyncio.run(play())


@pytest.mark.slow
def test_the_search_finds_a_word_and_asks_no_other_host(address: str) -> None:
    async def story(tab: chromium.Tab) -> None:
        await tab.look(1_280)
        await tab.open(f"{address}/index.html")
        await tab.value("document.querySelector('#__search').click()")
        typed = "dispatchEvent(new KeyboardEvent('keyup', {bubbles: true}))"
        await tab.value(f"var i = document.querySelector('.md-search__input'); i.value = 'goodput'; i.{typed}")
        await tab.until(f"{FOUND}.some(name => name.startsWith('kubectl.html'))")
        assert [one for one in tab.requests if not one.startswith((address, "data:", "about:"))] == []

    look(story)


@pytest.mark.slow
def test_references_are_short_on_top_and_as_wide_as_a_phone(site: Path) -> None:
    async def story(tab: chromium.Tab) -> None:
        await tab.look(390)
        wide = "[...document.querySelectorAll('table')].filter(e => e.scrollWidth > 390).length"
        folded = "[...document.querySelectorAll('details:not([open]) > summary')].map(e => e.textContent)"
        await tab.open(f"{site.as_uri()}/reference/resource.html")
        assert await tab.value(wide) == 0
        fields = "[...document.querySelector('table').querySelectorAll('td:first-child')].map(e => e.textContent)"
        assert await tab.value(fields) == ["workerGroups", "virtualNodes", "replicas", "minReplicas", "checkpoint"]
        assert len(await tab.value(folded)) == 2
        await tab.open(f"{site.as_uri()}/reference/python.html")
        arguments = (
            "[...document.querySelector('.doc-contents ul').children].map(e => e.querySelector('b').textContent)"
        )
        assert await tab.value(arguments) == ["model", "optimizer", "dataset", "batch_size", "epochs"]
        named = [one for one in inspect.signature(vf.elastic).parameters.values() if one.kind != one.VAR_KEYWORD]
        more = len(named) - 5
        assert (await tab.value(folded))[:2] == ["Its signature", f"{more} more arguments"]
        assert await tab.value("document.body.textContent.includes(':func:')") is False

    look(story)
