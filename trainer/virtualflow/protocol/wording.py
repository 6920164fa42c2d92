"""How sentences for people say what all parts say alike: counts, guesses of what was meant, sizes of memory."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Literal

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import MAX_METRICS, MAX_NAME

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""All that moves a cursor, commands a terminal or turns the order of letters, but line feeds and tabs; and halves of
characters, which cannot be written at all."""
PLAINTEXT = "nothing that its processes say is encrypted, and one token opens everything"
"""What is to be known of a job without certificates."""
_ALIKE = 0.65
"""Of 1: two words of three letters that differ in one are alike."""


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, as in ``1 worker`` and ``2 workers``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def printable(text: str) -> str:
    """Escape what a terminal would obey in words of others, as in ``\\x1b[2J``; lines stay lines."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def figure(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point: ``3.08``, ``1,234``."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Return a time such as ``12.4 s``, ``12 min``, ``3.5 h`` or ``2.1 days``."""
    for unit, size, digits in (("days", 86_400, 1), ("h", 3_600, 1), ("min", 60, 0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{figure(seconds)} s"


def milliseconds(value: float) -> str:
    """Return a time such as ``12.4 ms`` or ``1.23 s``."""
    return f"{figure(value)} ms" if value < 999.5 else duration(value / 1_000)


def table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("   ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def suggest(word: str, known: Iterable[str]) -> str:
    """Return the question whether the word that is most like one was meant, to be put behind it; empty: none is."""
    from difflib import get_close_matches  # nobody needs it before there is a mistake

    alike = {each.lower().lstrip("-"): each for each in known}
    found = get_close_matches(word.lower().lstrip("-"), alike, n=1, cutoff=_ALIKE)
    return f" (did you mean {alike[found[0]]}?)" if found else ""


def describe_steps(step: int, total_steps: int | None, stopped_early: bool) -> str:
    """How many steps a training has made, as in ``80 steps`` or, if its script left the loop, ``5 of 80 steps``."""
    if not stopped_early or total_steps is None:
        return counted(step, "step")
    return f"{step} of {counted(total_steps, 'step')}"


def describe_end(step: int, total_steps: int | None, stopped_early: bool) -> str:
    """How a training has ended, as in ``training complete after 80 steps``; or its script has left the loop before."""
    steps = describe_steps(step, total_steps, stopped_early)
    return f"training stopped early by the script, {steps}" if stopped_early else f"training complete after {steps}"


# Sizes of memory as people write them: ``24GiB``, ``512M``, a number of bytes.

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 1 << 10,
    "mi": 1 << 20,
    "gi": 1 << 30,
    "ti": 1 << 40,
}


def parse_bytes(text: str) -> int:
    """The bytes that a size stands for: a number, with K, M, G or T for powers of 1000 and Ki, Mi, Gi or Ti for those
    of 1024; a B behind it is allowed.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.strip(), flags=re.IGNORECASE)
    size = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if size <= 0:
        raise ConfigurationError(f"{text!r} is no size of memory; write one like 24GiB or 800MiB")
    return size


def format_bytes(size: int, *, up: bool = False) -> str:
    """A size for people, in three digits or a few more.

    Args:
        up: never less than ``size``, for what must be enough.
    """
    unit = next((unit for unit in ("ti", "gi", "mi", "ki") if size >= _UNITS[unit]), "")
    if not unit:
        return f"{size} B"
    scaled = size / _UNITS[unit]
    digits = 2 if scaled < 10 else 1 if scaled < 100 else 0
    tens = 10**digits
    number = -(-size * tens // _UNITS[unit]) / tens if up else math.floor(scaled * tens + 0.5) / tens
    return f"{number:.{digits}f} {unit.capitalize()}B"


# Numbers of a training as they travel and are shown: JSON has no NaN and no infinity, so these are words.
#
# The words are those of Kubernetes and of protobuf's JSON; ``float`` reads each of them back.

NotFinite = Literal["NaN", "Infinity", "-Infinity"]
Metric = float | NotFinite
MetricName = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Metrics = Annotated[dict[MetricName, Metric], msgspec.Meta(max_length=MAX_METRICS)]
"""By name, as they travel."""


def too_long(name: str, call: str) -> str:
    """That the name of a number, which a script logs by ``call``, has more than ``MAX_NAME`` characters."""
    return f"{call} got a name of {len(name)} characters ({name[:40]!r}...); give names of at most {MAX_NAME}"


def not_finite(value: float) -> NotFinite | None:
    """The word for a number that is not finite; ``None`` for one that is."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return None


def as_metrics(values: Mapping[str, Metric]) -> dict[str, Metric]:
    return {name: not_finite(float(value)) or value for name, value in islice(values.items(), MAX_METRICS)}


def show_metric(value: Metric, digits: int = 6) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"
