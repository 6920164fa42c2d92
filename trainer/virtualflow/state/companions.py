"""What a script keeps beside the model and wants to travel with it: an average of weights, a teacher, a queue of keys.

Everything with ``state_dict`` and ``load_state_dict`` will do. It is part of a state that a joiner gets and that a
checkpoint holds, and of the digest that workers compare at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from virtualflow.errors import ConfigurationError
from virtualflow.state.codec import Tree, flatten, snapshot


class Companions:
    """Objects of a script, by name.

    Args:
        objects: see above.

    Raises:
        ConfigurationError: one of them has no state, or one that cannot be described exactly.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._objects = dict(objects)
        for name, given in self._objects.items():
            if not (callable(getattr(given, "state_dict", None)) and callable(getattr(given, "load_state_dict", None))):
                raise ConfigurationError(
                    f"state holds {name}, a {type(given).__name__}, which has no state_dict and load_state_dict; give "
                    "it both, or make it part of the model"
                )
        flatten(self.capture())

    def __bool__(self) -> bool:
        return bool(self._objects)

    @property
    def names(self) -> list[str]:
        """Their names, in order."""
        return sorted(self._objects)

    def knows(self, thing: object) -> bool:
        """Whether it is one of them."""
        return any(thing is known for known in self._objects.values())

    def capture(self) -> dict[str, Any]:
        """Their states, by reference."""
        return {name: self._objects[name].state_dict() for name in self.names}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Let them load what :meth:`capture` gave, on the devices where their tensors are; nothing is shared."""
        for name in self.names:
            given = self._objects[name]
            try:
                given.load_state_dict(_placed(snapshot(saved[name]), given.state_dict()))
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise ConfigurationError(f"{name}, which state holds, could not load its state: {error}") from error

    def check_fit(self, saved: Mapping[str, Any]) -> None:
        """Whether there is a state for each of them, and no other.

        Raises:
            ConfigurationError: it is not so.
        """
        if sorted(saved) != self.names:
            raise ConfigurationError(
                f"the state has {_listed(sorted(saved))} beside the model, and this process {_listed(self.names)}; "
                "pass the same state= to vf.elastic everywhere"
            )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or "nothing"


def _placed(saved: Tree, present: Tree) -> Tree:
    """``saved`` with each tensor where ``present`` has one."""
    if isinstance(saved, Tensor):
        return saved.to(present.device) if isinstance(present, Tensor) else saved
    if isinstance(saved, dict):
        inner = present if isinstance(present, dict) else {}
        for key in saved:
            saved[key] = _placed(saved[key], inner.get(key))
    elif isinstance(saved, list):
        others = present if isinstance(present, list) and len(present) == len(saved) else [None] * len(saved)
        saved[:] = [_placed(value, other) for value, other in zip(saved, others, strict=True)]
    return saved
