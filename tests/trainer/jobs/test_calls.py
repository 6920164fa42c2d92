"""How far a step and a recovery walk through the library: less than they did, and it stays so."""

from __future__ import annotations

import pytest

import trace_calls


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("arguments", "modules", "changes"),
    [pytest.param((), 36, 260, id="a step"), pytest.param(("--kill",), 31, 95, id="a recovery")],
)
def test_a_walk_through_the_library_stays_short(arguments: tuple[str, ...], modules: int, changes: int) -> None:
    calls = trace_calls.watch(*arguments)
    assert calls
    assert len({file for file, _ in calls}) <= modules, trace_calls.describe(calls)
    assert trace_calls.count_changes(calls) <= changes, trace_calls.describe(calls)
