"""Which parameters a script trains, where it freezes and unfreezes them in the inner loop.

``requires_grad`` is treated as a buffer is: each virtual node begins with what the step began with, and after the step
what the first one has left holds. So it depends on no worker which parameters a virtual node trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

from torch import nn

from virtualflow.errors import ConfigurationError

_NONE: frozenset[int] = frozenset()
_trained = attrgetter("requires_grad")


class Switches:
    """``requires_grad`` of one worker's parameters.

    Args:
        named: all of the model's; they are known by their place among them.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.trained: tuple[bool, ...] = ()
        """Which parameters are trained when a virtual node of the present attempt begins."""
        self._named = named
        self._parameters = [parameter for _, parameter in named]
        self._ever: set[int] = set()
        """Those that an inner loop has ever left otherwise than it found them: part of the state."""

    def begin(self) -> None:
        """An attempt begins."""
        self.trained = self._read()

    def _read(self) -> tuple[bool, ...]:
        return tuple(map(_trained, self._parameters))

    def put_back(self) -> frozenset[int]:
        """Let the next virtual node begin as each did; the places that the script has frozen or unfrozen meanwhile."""
        now = self._read()
        if now == self.trained:
            return _NONE
        places = frozenset(place for place, trained in enumerate(self.trained) if now[place] is not trained)
        for place in places:
            self._parameters[place].requires_grad_(self.trained[place])
        return places

    def refuse(self) -> None:
        """Blocks have been loaded as they were frozen when the attempt began, for all virtual nodes.

        Raises:
            ConfigurationError: the script has frozen or unfrozen a parameter since.
        """
        for (name, parameter), before in zip(self._named, self.trained, strict=True):
            if parameter.requires_grad is not before:
                raise ConfigurationError(
                    f"the loss of step.layer_major has {'frozen' if before else 'unfrozen'} parameter {name}, and in "
                    "layer-major order all virtual nodes run through a block together; freeze and unfreeze by "
                    "step.number, before step.layer_major"
                )

    def commit(self, switched: frozenset[int]) -> None:
        """The step is made, and its first virtual node has frozen or unfrozen these."""
        for place in switched:
            self._parameters[place].requires_grad_(not self.trained[place])
        self._ever |= switched

    def steadily(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are trained when a virtual node begins, with their names."""
        return (named for named, trained in zip(self._named, self.trained, strict=True) if trained)

    @property
    def state(self) -> dict[str, bool]:
        """Of the parameters that an inner loop has ever switched: which are trained."""
        return {name: parameter.requires_grad for name, parameter in (self._named[n] for n in sorted(self._ever))}

    def restore(self, state: Mapping[str, bool]) -> None:
        """Take them over from a state that was restored."""
        for place, (name, parameter) in enumerate(self._named):
            if name in state:
                self._ever.add(place)
                parameter.requires_grad_(state[name])
