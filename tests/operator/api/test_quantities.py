"""What a pod takes of its node, counted as the scheduler does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow_operator.api.validation import pod_requests, total


def container(cpu: str | None = None, limit: str | None = None, **rest: Any) -> dict[str, Any]:
    requests = {"requests": {"cpu": cpu}} if cpu else {}
    limits = {"limits": {"cpu": limit}} if limit else {}
    return {"name": "c", "resources": requests | limits, **rest}


ALWAYS = {"restartPolicy": "Always"}
PODS: dict[str, tuple[dict[str, Any], str]] = {
    "containers run together": ({"containers": [container("1"), container("500m"), container()]}, "1.5"),
    "a limit is the request where there is none": ({"containers": [container(None, "2"), container("1", "4")]}, "3"),
    "an init container runs before them": ({"initContainers": [container("1")], "containers": [container("2")]}, "2"),
    "one that needs more counts instead": ({"initContainers": [container("4")], "containers": [container("1")]}, "4"),
    "init containers run one after the other": (
        {"initContainers": [container("3"), container("4")], "containers": [container("1")]}, "4",
    ),
    "a sidecar runs beside them": (
        {"initContainers": [container("1", **ALWAYS)], "containers": [container("2")]}, "3",
    ),
    "a sidecar runs beside init containers after it": (
        {"initContainers": [container("1", **ALWAYS), container("3")], "containers": [container("1")]}, "4",
    ),
    "not beside those before it": (
        {"initContainers": [container("3"), container("1", **ALWAYS)], "containers": [container("1")]}, "3",
    ),
    "the overhead of a runtime comes on top": (
        {"initContainers": [container("2")], "containers": [container("1")], "overhead": {"cpu": "250m"}}, "2.25",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("spec", "cpu"), PODS.values(), ids=PODS.keys())
def test_a_pod_takes_what_the_scheduler_reserves(spec: dict[str, Any], cpu: str) -> None:
    assert str(total(pod_requests(spec), "cpu").normalize()) == cpu
    assert total(pod_requests(spec), "memory") == 0


WORDS = st.sampled_from(
    ["containers", "initContainers", "resources", "requests", "limits", "cpu", "overhead", "restartPolicy", "Always"]
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=20,
)


@given(ANYTHING)
def test_whatever_a_user_writes_is_read_without_an_error(spec: object) -> None:
    assert total(pod_requests(spec), "cpu").is_finite()
