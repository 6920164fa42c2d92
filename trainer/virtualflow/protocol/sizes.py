"""Sizes of memory as people write them: ``24GiB``, ``512M``, a number of bytes."""

from __future__ import annotations

import math
import re

from virtualflow.errors import ConfigurationError

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

    Raises:
        ConfigurationError: it is no size above 0.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.strip(), flags=re.IGNORECASE)
    size = 0 if found is None else int(float(found[1]) * _UNITS[(found[2] or "").lower()])
    if size <= 0:
        raise ConfigurationError(f"{text!r} is no size of memory; write one like 24GiB or 800MiB")
    return size


def format_bytes(size: int, *, up: bool = False) -> str:
    """A size for people, in three digits or a few more.

    Args:
        size: bytes.
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
