"""Numbers of a training as they travel and are shown: JSON has no NaN and no infinity, so these are words.

The words are those of Kubernetes and of protobuf's JSON; ``float`` reads each of them back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

NotFinite = Literal["NaN", "Infinity", "-Infinity"]
Metric = float | NotFinite


def not_finite(value: float) -> NotFinite | None:
    """The word for a number that is not finite; ``None`` for one that is."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return None


def as_metrics(values: Mapping[str, Metric]) -> dict[str, Metric]:
    """``values`` as they travel."""
    return {name: not_finite(float(value)) or value for name, value in values.items()}


def show_metric(value: Metric, digits: int = 6) -> str:
    """A metric for people, with so many significant digits."""
    return value if isinstance(value, str) else f"{value:.{digits}g}"
