"""Lets pages of the site link to files beside docs/, as they do in a checkout, and references be read on a phone.

A link that leads out of ``docs/`` (an example, the chart's README) works where somebody reads the repository. The site
publishes such a file under ``repository/``, and links are written anew to lead there.
"""

from __future__ import annotations

import os.path
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
PUBLISHED = "repository"
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FEW = 5
"""Arguments of a function that are not folded: the first ones, which everybody gives."""
ARGUMENTS = re.compile(r"(Parameters:</span></p>\s*<ul>)(.*?)</ul>", flags=re.DOTALL)
ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):(?=<code>)")
"""What docstrings put before a name, for other tools."""
SIGNATURE = re.compile(r'<div class="doc-signature highlight">.*?</div>', flags=re.DOTALL)
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", flags=re.MULTILINE | re.DOTALL)


def place(path: str) -> str:
    """Where a page of the site stands in the repository."""
    return path.removeprefix(f"{PUBLISHED}/") if path.startswith(f"{PUBLISHED}/") else f"docs/{path}"


def target(link: str, page: str) -> str | None:
    """The file of the repository that a relative link of a page leads to, if there is one."""
    if "://" in link or link.startswith(("/", "mailto:")):
        return None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(place(page)), link))
    return path if not path.startswith("..") and (ROOT / path).is_file() else None


def published(path: str) -> str:
    """Where the site has a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else f"{PUBLISHED}/{path}"


def on_files(files: Files, config: Any) -> Files:
    """Publish every file of the repository that a page links to, and what those link to."""
    waiting = [file for file in files if file.is_documentation_page()]
    while waiting:
        page = waiting.pop()
        for _, link, _ in LINK.findall(CODE.sub("", page.content_string)):
            path = target(link, page.src_uri)
            if path is None or path.startswith("docs/") or files.get_file_from_path(published(path)):
                continue
            added = File.generated(config, published(path), abs_src_path=str(ROOT / path))
            files.append(added)
            if added.is_documentation_page():
                waiting.append(added)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to files of the repository to where the site has them."""
    here = page.file.src_uri

    def lead(found: re.Match[str]) -> str:
        path = target(found[2], here)
        if path is None:
            return found[0]
        return found[1] + os.path.relpath(published(path), posixpath.dirname(here) or ".") + found[3]

    parts = CODE.split(markdown)
    return "".join(part if index % 2 else LINK.sub(lead, part) for index, part in enumerate(parts))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Fold long lists of arguments, and tell each cell of a reference's tables its column, for narrow screens."""
    if not page.file.src_uri.startswith("reference/"):
        return html
    folded = ARGUMENTS.sub(_folded, SIGNATURE.sub(_short, ROLE.sub("", html)))
    return re.sub(r"<table>.*?</table>", _named_cells, folded, flags=re.DOTALL)


def _folded(found: re.Match[str]) -> str:
    items = re.findall(r"<li.*?</li>", found[2], flags=re.DOTALL)
    if len(items) <= 2 * FEW:
        return found[0]
    more = f"<details><summary>{len(items) - FEW} more arguments</summary><ul>{''.join(items[FEW:])}</ul></details>"
    return f"{found[1]}{''.join(items[:FEW])}</ul>{more}"


def _short(found: re.Match[str]) -> str:
    lines = found[0].count("\n")
    return found[0] if lines <= 2 * FEW else f"<details><summary>Its signature</summary>{found[0]}</details>"


def _named_cells(found: re.Match[str]) -> str:
    names = re.findall(r"<th[^>]*>(.*?)</th>", found[0], flags=re.DOTALL)
    rows = re.split(r"(?=<tr>)", found[0])
    for place, row in enumerate(rows):
        columns = iter(names)
        rows[place] = re.sub("<td", lambda _: f'<td data-name="{next(columns)}"', row)  # noqa: B023 - used at once
    return "".join(rows).replace("<table>", '<table class="stacked">')
