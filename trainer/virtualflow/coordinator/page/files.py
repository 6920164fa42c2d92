"""The files of the pages, put together as ones that load nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import dataclass
from importlib.resources import files

_FOLDER = files(__package__)
_FRAMES = "http://localhost:* http://127.0.0.1:*"
"""Who may show a page in a frame: notebooks of the same machine. There is nothing on a page that acts."""

WORDS = {
    "bitwise": "a job with the same bits for any workers",
    "coordinator": "one small process per job without torch. It knows the workers, decides on generations, takes "
    "signals and answers status",
    "digest": "the SHA-256 of the final weights; equal digests mean equal bits",
    "generation": "one membership with its assignment; its number (incarnation of the coordinator, counter) only grows",
    "goodput": "the share of the workers' time that went into steps that count",
    "held": "of a job: it makes no step after this one until it is let go, as fault schedules ask for",
    "predicted": "of a step: how long it should take by the workers' paces and assignments",
    "statistical": "a faster job with the same result in distribution",
    "steps repeated": "aborted attempts at a step: the workers that were left made the step again",
    "virtual nodes": "one of V equal slices of every global batch; V never changes in a job's life",
    "virtual nodes again": "virtual nodes that were computed once more for a repeated step; what the survivors had "
    "computed of it was kept",
}
"""What the pages explain where it stands, in the words of the glossary."""


@dataclass(frozen=True)
class Page:
    """A page as it is served."""

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
    basics: str
    """Words and nodes, for a page with curves or without."""
    script: str
    """It goes behind ``basics``."""


def drawing() -> Drawing:
    """The drawing code of all pages."""
    return Drawing(
        style=_read("uplot/uPlot.min.css") + _read("look.css") + _read("curves.css"),
        library=_read("uplot/uPlot.iife.min.js"),
        basics=f"const WORDS = {json.dumps(WORDS)};\n{_script('basics.js')}",
        script=_script("drawn.js") + _script("curves.js"),
    )


def build() -> Page:
    """Put the live page together."""
    curves = drawing()
    script = curves.basics + curves.script + _script("asking.js") + _script("page.js")
    return _page("page.html", curves.style + _read("page.css"), LIBRARY=curves.library, SCRIPT=script)


def jobs_page() -> Page:
    """Put the page of all jobs together."""
    style = _read("look.css") + _read("jobs.css")
    return _page("jobs.html", style, SCRIPT=drawing().basics + _script("asking.js") + _script("jobs.js"))


def _page(name: str, style: str, **scripts: str) -> Page:
    html = _read(name)
    for place, content in {"STYLE": style, **scripts}.items():
        html = html.replace(f"/*{place}*/", content)
    return Page(html.encode(), f"{policy(style, *scripts.values())}; frame-ancestors {_FRAMES}")


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


def _script(name: str) -> str:
    """One of our own, without comments and indentation, which no browser needs."""
    return re.sub(r"^\s*(?://.*\n)?", "", _read(name), flags=re.MULTILINE)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
