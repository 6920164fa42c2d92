"""Sets of places in a row, as spans: what somebody has of a long row of elements, or lacks. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

Span = tuple[int, int]
"""Where a stretch begins and ends, half open; never empty."""
Spans = tuple[Span, ...]
"""Ascending, and apart from one another: two that meet are one."""


def union(*sets: Iterable[Span]) -> Spans:
    """What is in any of them; their spans may be in any order, may overlap or be empty."""
    merged: list[Span] = []
    for begin, end in sorted(span for spans in sets for span in spans):
        if begin == end:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return tuple(merged)


def intersection(left: Spans, right: Spans) -> Spans:
    """What is in both."""
    found, at = [], 0
    for begin, end in left:
        while at < len(right) and right[at][1] <= begin:
            at += 1
        for other_begin, other_end in right[at:]:
            if other_begin >= end:
                break
            found.append((max(begin, other_begin), min(end, other_end)))
    return tuple(found)


def difference(left: Spans, right: Spans) -> Spans:
    """What is in the left one only."""
    if not left:
        return ()
    edges = [0, *(edge for span in right for edge in span), max(left[-1][1], right[-1][1] if right else 0)]
    gaps = [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if begin < end]
    return intersection(left, tuple(gaps))


def covers(spans: Spans, span: Span) -> bool:
    """Whether all of a span is among them."""
    return intersection(spans, (span,)) == (span,)


def refine(*sets: Iterable[Span]) -> Iterator[Span]:
    """The stretches between all places where any of the spans begins or ends, those in none of them as well."""
    edges = sorted({edge for spans in sets for span in spans for edge in span})
    return pairwise(edges)
