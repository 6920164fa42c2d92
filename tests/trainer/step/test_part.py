"""What takes part in a step: hooks are called in the order of the parts, and only those that a part has."""

from __future__ import annotations

from typing import Any

from virtualflow.protocol.messages import NO_GENERATION
from virtualflow.step import Attempt, Parts, StepPart


class Heard(StepPart):
    """Notes that it was called, and says as whom."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def begin(self, attempt: Attempt) -> None:
        """Note it."""
        self.heard.append(f"{self.name} begins {attempt.number}")


class Counting(Heard):
    """Has a further hook, and that of its base."""

    def counted(self, generation: Any, number: int) -> None:
        """Note it."""
        self.heard.append(f"{self.name} counts {number}")


def test_hooks_are_called_in_the_order_of_the_parts() -> None:
    heard: list[str] = []
    parts = Parts([Counting("a", heard), Heard("b", heard), Counting("c", heard)])
    for begin in parts.begin:
        begin(Attempt(3))
    for counted in parts.counted:
        counted(NO_GENERATION, 3)
    assert heard == ["a begins 3", "b begins 3", "c begins 3", "a counts 3", "c counts 3"]


def test_a_hook_that_no_part_has_costs_no_call() -> None:
    parts = Parts([Heard("a", []), StepPart()])
    assert len(parts.begin) == 1
    hooks = ("enter", "before_node", "before_pass", "after_pass", "after_node", "computed", "commit", "counted")
    for hook in (*hooks, "abandon", "after_script"):
        assert getattr(parts, hook) == (), hook
