"""The metrics that a running operator serves, as numbers by name and labels."""

from __future__ import annotations

import re
import urllib.request
from collections import Counter


def scrape(port: int) -> dict[str, float]:
    """All of them, by name with labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


def requests(sample: dict[str, float]) -> Counter[str]:
    """How many requests the operator has made, by method and resource."""
    made: Counter[str] = Counter()
    for name, value in sample.items():
        if name.startswith("virtualflow_api_requests_total{"):
            labels = dict(re.findall(r'(\w+)="([^"]*)"', name))
            made[f"{labels['method']} {labels['resource']}"] += int(value)
    return made
