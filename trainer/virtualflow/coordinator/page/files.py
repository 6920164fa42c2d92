"""The files of the live page, put together as one that loads nothing."""

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
    """Its Content-Security-Policy: this script and this style, answers of the same server, and nothing else."""


def look() -> str:
    """The style that all pages of the project share."""
    return _read("look.css")


def build() -> Page:
    """Put the page together."""
    style, script = look() + _read("page.css"), _read("page.js")
    html = _read("page.html").replace("/*STYLE*/", style).replace("/*SCRIPT*/", script)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
