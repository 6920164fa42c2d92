"""Numbers of a training as they travel and are shown: JSON has no NaN and no infinity, so these are words.

The words are those of Kubernetes and of protobuf's JSON; ``float`` reads each of them back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Literal

import msgspec

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.settings import MAX_METRICS, MAX_NAME

NotFinite = Literal["NaN", "Infinity", "-Infinity"]
Metric = float | NotFinite
MetricName = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Metrics = Annotated[dict[MetricName, Metric], msgspec.Meta(max_length=MAX_METRICS)]
"""By name, as they travel."""


def check_metric_name(name: str, call: str) -> None:
    """See that a number's name is short enough to travel.

    Args:
        name: what the script calls it.
        call: by what it logs it.

    Raises:
        ConfigurationError: it is too long.
    """
    if len(name) > MAX_NAME:
        raise ConfigurationError(
            f"{call} got a name of {len(name)} characters ({name[:40]!r}...); give names of at most {MAX_NAME}"
        )


def not_finite(value: float) -> NotFinite | None:
    """The word for a number that is not finite; ``None`` for one that is."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return None


def as_metrics(values: Mapping[str, Metric]) -> dict[str, Metric]:
    """The first ``MAX_METRICS`` of ``values``, as they travel."""
    return {name: not_finite(float(value)) or value for name, value in islice(values.items(), MAX_METRICS)}


def show_metric(value: Metric, digits: int = 6) -> str:
    return value if isinstance(value, str) else f"{value:.{digits}g}"
