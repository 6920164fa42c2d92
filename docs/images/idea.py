"""Draws idea.svg: one global batch over the same eight virtual nodes, before and after a worker is lost.

python docs/images/idea.py > docs/images/idea.svg

The colours are chosen to be readable on a light and on a dark page; there is no background.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

VIRTUAL_NODES = 8
CELL, GAP = 40, 8
PITCH = CELL + GAP
PANEL = VIRTUAL_NODES * PITCH - GAP
LEFT, BETWEEN, TOP = 24, 112, 84
LEVEL = 46
WIDTH, HEIGHT = 2 * (LEFT + PANEL) + BETWEEN, 376
COLOURS = {"worker-0": "#2f81f7", "worker-1": "#d4742c", "worker-2": "#2da07a"}
SHARED = "#8b949e"

STYLE = """
text { font: 14px ui-sans-serif, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #656d76; }
.title { font-size: 16px; font-weight: 600; }
.cell { fill: #ffffff; font-weight: 600; }
@media (prefers-color-scheme: dark) { text { fill: #b1bac4; } .cell { fill: #ffffff; } }
"""

Carried = Sequence[tuple[str, range]]


def owner(carried: Carried, left: int, right: int) -> str | None:
    """Who carries all of [left, right), if anybody does."""
    return next((name for name, nodes in carried if nodes.start <= left and right <= nodes.stop), None)


def centre(x: float, left: int, right: int) -> float:
    """The middle of the virtual nodes [left, right) in the panel at `x`."""
    return x + ((left + right - 1) / 2) * PITCH + CELL / 2


def tree(x: float, y: float, carried: Carried, left: int, right: int) -> Iterator[str]:
    """The sums over [left, right), deepest first; the root is the lowest in the picture."""
    if right - left == 1:
        return
    middle = (left + right) // 2
    depth = (right - left).bit_length() - 1
    here = (centre(x, left, right), y + CELL + depth * LEVEL)
    whose = owner(carried, left, right)
    colour = COLOURS[whose] if whose else SHARED
    for low, high in ((left, middle), (middle, right)):
        child_depth = (high - low).bit_length() - 1
        child = (centre(x, low, high), y + CELL + child_depth * LEVEL + (8 if child_depth else 0))
        yield (
            f'<path d="M{child[0]:g} {child[1]:g} V{(child[1] + here[1]) / 2:g} H{here[0]:g} V{here[1] - 11:g}" '
            f'fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>'
        )
    for low, high in ((left, middle), (middle, right)):
        yield from tree(x, y, carried, low, high)
    yield f'<circle cx="{here[0]:g}" cy="{here[1]:g}" r="11" fill="{colour}"/>'
    plus = f"M{here[0] - 5:g} {here[1]:g} h10 M{here[0]:g} {here[1] - 5:g} v10"
    yield f'<path d="{plus}" stroke="#ffffff" stroke-width="2"/>'


def panel(x: float, title: str, carried: Carried) -> Iterator[str]:
    """Who carries which virtual nodes, and the tree beneath."""
    yield f'<text class="title" x="{x + PANEL / 2:g}" y="26" text-anchor="middle">{title}</text>'
    for name, nodes in carried:
        colour = COLOURS[name]
        first, last = x + nodes.start * PITCH, x + nodes.stop * PITCH - GAP
        yield f'<text x="{(first + last) / 2:g}" y="56" text-anchor="middle">{name}</text>'
        yield f'<path d="M{first:g} 74 V66 H{last:g} V74" fill="none" stroke="{colour}" stroke-width="2"/>'
        for node in nodes:
            left = x + node * PITCH
            yield f'<rect x="{left:g}" y="{TOP}" width="{CELL}" height="{CELL}" rx="6" fill="{colour}"/>'
            yield f'<text class="cell" x="{left + CELL / 2:g}" y="{TOP + 25}" text-anchor="middle">{node}</text>'
    yield from tree(x, TOP, carried, 0, VIRTUAL_NODES)
    root = (x + PANEL / 2, TOP + CELL + 3 * LEVEL)
    yield f'<path d="M{root[0]:g} {root[1] + 11:g} v24" stroke="{SHARED}" stroke-width="2"/>'
    yield f'<text x="{root[0]:g}" y="{root[1] + 54:g}" text-anchor="middle">gradient, the same bits</text>'


def picture() -> Iterator[str]:
    """The lines of the file."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'role="img" aria-label="Eight virtual nodes over three workers, then over two: the same tree of sums">'
    )
    yield f"<style>{STYLE}</style>"
    before = (("worker-0", range(3)), ("worker-1", range(3, 6)), ("worker-2", range(6, 8)))
    after = (("worker-0", range(4)), ("worker-2", range(4, 8)))
    yield from panel(LEFT, "three workers", before)
    yield from panel(LEFT + PANEL + BETWEEN, "worker-1 is lost: two workers", after)
    middle, y = LEFT + PANEL + BETWEEN / 2, TOP + CELL / 2
    arrow = f"M{middle - 30:g} {y:g} h54 m-10 -8 l10 8 l-10 8"
    yield f'<path d="{arrow}" fill="none" stroke="{SHARED}" stroke-width="2.5"/>'
    yield f'<circle cx="{WIDTH / 2 - 348:g}" cy="{HEIGHT - 23}" r="8" fill="{SHARED}"/>'
    yield (
        f'<text x="{WIDTH / 2 - 332:g}" y="{HEIGHT - 18}">grey: added between workers. Who adds changes; what '
        "is added, and in which order, never does.</text>"
    )
    yield "</svg>"


if __name__ == "__main__":
    sys.stdout.write("\n".join(picture()) + "\n")
