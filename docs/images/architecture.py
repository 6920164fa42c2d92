"""Draws architecture.svg: the boxes of a job, and who talks to whom.

python docs/images/architecture.py > docs/images/architecture.svg

Every box has a fill of its own, and what stands outside boxes is of a grey that is readable on a light and on a dark
page; there is no background.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

WIDTH, HEIGHT = 1000, 560
BLUE, DARK_BLUE, GREEN, GREY, LINE = "#2563a8", "#174a80", "#1f7a5c", "#59626c", "#737d88"

STYLE = """
text { font: 14px ui-sans-serif, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #ffffff; }
.name { font-size: 15px; font-weight: 600; }
.outside { fill: #737d88; }
"""


@dataclass(frozen=True)
class Box:
    """A rectangle with a name and what it does."""

    x: int
    y: int
    width: int
    height: int
    colour: str
    name: str
    text: str = ""


WORKER_X, WORKER_WIDTH = 40, 520
LEFT, HALF = WORKER_X + 20, 232
RIGHT = LEFT + HALF + 16
FULL = 2 * HALF + 16
SIDE, SIDE_WIDTH = 670, 310

BOXES = (
    Box(LEFT, 68, FULL, 52, GREY, "your script", "model, loss, backward"),
    Box(LEFT, 136, FULL, 52, BLUE, "worker", "loop, membership, recovery, leaving"),
    Box(LEFT, 204, HALF, 52, BLUE, "step", "header, update, metrics"),
    Box(RIGHT, 204, HALF, 52, BLUE, "data and device", "samples, random numbers"),
    Box(LEFT, 272, HALF, 52, BLUE, "reduction", "sums in the shape of the tree"),
    Box(RIGHT, 272, HALF, 52, BLUE, "state", "checkpoints and transfer"),
    Box(LEFT, 340, FULL, 52, BLUE, "transport", "communicator of a generation"),
    Box(LEFT, 478, FULL, 52, DARK_BLUE, "other workers", "the same, with other virtual nodes"),
    Box(SIDE, 290, SIDE_WIDTH, 66, GREEN, "coordinator", "members, assignment, generations"),
    Box(SIDE, 136, SIDE_WIDTH, 66, GREEN, "operator, or virtualflow run", "processes: as many as wanted"),
    Box(SIDE, 20, SIDE_WIDTH, 52, GREY, "Kubernetes API, or this machine", "jobs, queues, pods, nodes"),
)


def box(drawn: Box) -> Iterator[str]:
    """A box with its two lines of text."""
    middle, centre = drawn.x + drawn.width / 2, drawn.y + drawn.height / 2
    yield (
        f'<rect x="{drawn.x}" y="{drawn.y}" width="{drawn.width}" height="{drawn.height}" rx="7" '
        f'fill="{drawn.colour}"/>'
    )
    yield f'<text class="name" x="{middle:g}" y="{centre - 4:g}" text-anchor="middle">{drawn.name}</text>'
    yield f'<text x="{middle:g}" y="{centre + 15:g}" text-anchor="middle">{drawn.text}</text>'


def arrow(points: str, text: str, x: float, y: float, anchor: str = "start") -> Iterator[str]:
    """A line with a point at both ends, and what travels on it."""
    yield (
        f'<path d="{points}" fill="none" stroke="{LINE}" stroke-width="2.5" marker-end="url(#end)" '
        'marker-start="url(#start)"/>'
    )
    for number, line in enumerate(text.split("\n")):
        yield f'<text class="outside" x="{x:g}" y="{y + 18 * number:g}" text-anchor="{anchor}">{line}</text>'


def picture() -> Iterator[str]:
    """The lines of the file."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="A job: the user\'s script in each worker, the coordinator beside them, the operator '
        'above">'
    )
    yield f"<style>{STYLE}</style><defs>"
    for name, path in (("end", "M0 0 L8 4 L0 8 z"), ("start", "M8 0 L0 4 L8 8 z")):
        reference = 7 if name == "end" else 1
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="{reference}" refY="4" markerWidth="5" markerHeight="5" '
            f'orient="auto"><path d="{path}" fill="{LINE}"/></marker>'
        )
    yield "</defs>"
    yield (
        f'<rect x="{WORKER_X}" y="20" width="{WORKER_WIDTH}" height="390" rx="10" fill="none" stroke="{LINE}" '
        'stroke-width="1.5" stroke-dasharray="6 5"/>'
    )
    yield f'<text class="outside name" x="{LEFT}" y="50">a worker: one process, one device</text>'
    for drawn in BOXES:
        yield from box(drawn)
    middle = LEFT + FULL / 2
    yield from arrow(f"M{middle:g} 394 V476", "gradients, headers, state: directly, by TCP", middle + 14, 446)
    centre = SIDE + SIDE_WIDTH / 2
    yield from arrow(f"M{centre:g} 74 V134", "watch, create, delete", centre + 12, 110)
    yield from arrow(f"M{centre:g} 204 V288", "HTTP: drain, gone,\nscale, stop; status", centre + 12, 242)
    yield from arrow(f"M562 323 H{SIDE - 2}", "WebSocket:\nplans,\nreports", 616, 350, "middle")
    yield from arrow(f"M{centre:g} 358 V504 H{LEFT + FULL + 2}", "the same, to each of them", centre - 12, 490, "end")
    yield f'<text class="outside" x="{SIDE}" y="540">The coordinator is never in the path of a step.</text>'
    yield "</svg>"


if __name__ == "__main__":
    sys.stdout.write("\n".join(picture()) + "\n")
