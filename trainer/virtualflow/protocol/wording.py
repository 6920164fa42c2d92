"""How sentences for people say what all parts say alike."""

from __future__ import annotations

from collections.abc import Iterable

_ALIKE = 0.65
"""Of 1: two words of three letters that differ in one are alike."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 worker`` and ``2 workers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the question whether the word that is most like one was meant, to be put behind it; empty: none is."""
    from difflib import get_close_matches  # nobody needs it before there is a mistake

    alike = {each.lower().lstrip("-"): each for each in known}
    found = get_close_matches(word.lower().lstrip("-"), alike, n=1, cutoff=_ALIKE)
    return f" (did you mean {alike[found[0]]}?)" if found else ""


def describe_end(step: int, total_steps: int | None, stopped_early: bool) -> str:
    """How a training has ended, as in ``training complete after 80 steps``; or its script has left the loop before."""
    if not stopped_early:
        return f"training complete after {counted(step, 'step')}"
    steps = counted(step, "step") if total_steps is None else f"{step} of {counted(total_steps, 'step')}"
    return f"training stopped early by the script, {steps}"
