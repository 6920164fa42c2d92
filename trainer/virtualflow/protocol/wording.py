"""How sentences for people say what all parts say alike."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 worker`` and ``2 workers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
