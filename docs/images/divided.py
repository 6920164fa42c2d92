"""Draws divided.svg: a model of five blocks over three workers, at rest and while a block is needed.

python docs/images/divided.py > docs/images/divided.svg

The colours are chosen to be readable on a light and on a dark page; there is no background.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

BLOCKS = 5
CELL_WIDTH, CELL_HEIGHT, GAP = 74, 20, 10
PITCH = CELL_WIDTH + GAP
LEFT, TOP, ROW = 110, 76, 3 * CELL_HEIGHT + 40
COLOURS = {"worker-0": "#2f81f7", "worker-1": "#d4742c", "worker-2": "#2da07a"}
IN_USE = {"worker-0": 1, "worker-1": 2, "worker-2": 1}
"""The block that each worker computes with; workers need not be at the same one."""
GREY = "#8b949e"
WIDTH, HEIGHT = LEFT + BLOCKS * PITCH + 300, TOP + 3 * ROW + 30

STYLE = """
text { font: 14px ui-sans-serif, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #656d76; }
.title { font-size: 16px; font-weight: 600; }
@media (prefers-color-scheme: dark) { text { fill: #b1bac4; } }
"""


def slices(x: float, y: float, worker: str, number: int) -> Iterator[str]:
    """What a worker has of a block: what it keeps is filled, what it has asked for is pale."""
    needed = number - IN_USE[worker]
    for place, keeper in enumerate(COLOURS):
        here = y + place * CELL_HEIGHT
        shape = f'x="{x:g}" y="{here:g}" width="{CELL_WIDTH}" height="{CELL_HEIGHT - 2}" rx="3"'
        if keeper == worker:
            yield f'<rect {shape} fill="{COLOURS[keeper]}"/>'
        elif needed == 0:
            yield f'<rect {shape} fill="{COLOURS[keeper]}" fill-opacity="0.45"/>'
        elif needed == 1:
            colour = COLOURS[keeper]
            yield f'<rect {shape} fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"/>'
    if needed == 0:
        edge = f'width="{CELL_WIDTH + 6}" height="{3 * CELL_HEIGHT + 4}" rx="5"'
        yield f'<rect x="{x - 3:g}" y="{y - 3:g}" {edge} fill="none" stroke="{GREY}" stroke-width="2"/>'


def legend(x: float, y: float) -> Iterator[str]:
    """What the three kinds of cells mean."""
    colour, size = COLOURS["worker-1"], f'width="26" height="{CELL_HEIGHT - 2}" rx="3"'
    kinds = (
        (f'fill="{colour}"', "kept: values, optimizer's state"),
        (f'fill="{colour}" fill-opacity="0.45"', "gathered: a block in use"),
        (f'fill="none" stroke="{colour}" stroke-width="1.5" stroke-dasharray="4 3"', "on its way: the next block"),
    )
    for number, (look, text) in enumerate(kinds):
        here = y + number * 34
        yield f'<rect x="{x:g}" y="{here:g}" {size} {look}/>'
        yield f'<text x="{x + 36:g}" y="{here + 14:g}">{text}</text>'


def draw() -> Iterator[str]:
    """The whole picture."""
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
    yield "<title>Five blocks over three workers: each keeps a third of each, and gathers the block in use</title>"
    yield f"<style>{STYLE}</style>"
    for number in range(BLOCKS):
        x = LEFT + number * PITCH + CELL_WIDTH / 2
        yield f'<text class="title" x="{x:g}" y="{TOP - 24}" text-anchor="middle">block {number}</text>'
    for row, worker in enumerate(COLOURS):
        y = TOP + row * ROW
        yield f'<text x="{LEFT - 16}" y="{y + 1.5 * CELL_HEIGHT + 4:g}" text-anchor="end">{worker}</text>'
        for number in range(BLOCKS):
            yield from slices(LEFT + number * PITCH, y, worker, number)
    yield from legend(LEFT + BLOCKS * PITCH + 24, TOP)
    yield "</svg>"


if __name__ == "__main__":
    sys.stdout.write("\n".join(draw()) + "\n")
