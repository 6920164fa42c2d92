"""The files of the pages, put together as ones that load nothing."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from importlib.resources import files

_FOLDER = files(__package__)


@dataclass(frozen=True)
class Page:
    """The page as it is served."""

    html: bytes
    policy: str
    """Its Content-Security-Policy: these scripts and this style, answers of the same server, and nothing else."""


@dataclass(frozen=True)
class Drawing:
    """What a page needs to draw the curves of a job."""

    style: str
    """That all pages of the project share, and that of the curves."""
    library: str
    """uPlot, as its authors publish it."""
    script: str


def drawing() -> Drawing:
    """The drawing code of all pages."""
    return Drawing(
        style=_read("uplot/uPlot.min.css") + _read("look.css") + _read("curves.css"),
        library=_read("uplot/uPlot.iife.min.js"),
        script=_read("basics.js") + _read("drawn.js") + _read("curves.js"),
    )


def build() -> Page:
    """Put the live page together."""
    curves = drawing()
    style, script = curves.style + _read("page.css"), curves.script + _read("page.js")
    html = _read("page.html")
    for place, content in (("STYLE", style), ("LIBRARY", curves.library), ("SCRIPT", script)):
        html = html.replace(f"/*{place}*/", content)
    return Page(html.encode(), f"{policy(style, curves.library, script)}; frame-ancestors 'none'")


def policy(style: str, *scripts: str, attributes: bool = False) -> str:
    """A Content-Security-Policy that allows these, and answers of the server that the page is from.

    Args:
        style: of the page.
        scripts: of the page, as they stand in it.
        attributes: whether ``style`` attributes are allowed.
    """
    allowed = " ".join(map(_hash, scripts)) or "'none'"
    rules = f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; connect-src 'self'; img-src data:"
    if attributes:
        rules += "; style-src-attr 'unsafe-inline'"
    return f"{rules}; base-uri 'none'; form-action 'none'"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
