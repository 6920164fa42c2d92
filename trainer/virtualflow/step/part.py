"""A part of a step: a feature that takes part in each step where it is on, and costs no call where it is off.

The loop goes through a step from top to bottom and calls the hooks of its parts, in the order of one tuple
(``worker.parts``). A part implements the hooks that it needs. Beside the eight of an attempt there are five that some
part cannot do without, each with its reason in its docstring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from virtualflow.data import MicroBatch
from virtualflow.protocol import messages as m
from virtualflow.transport import Collectives

if TYPE_CHECKING:
    from virtualflow.step.header import StepHeader


@dataclass
class Told:
    """What the script has told of a micro-batch."""

    metrics: dict[str, float | Tensor] = field(default_factory=dict)
    weight: float | None = None
    """What it counts by, if not by its samples."""


@dataclass
class Attempt:
    """An attempt at a step in one worker, and where in it the worker is."""

    number: int
    """Of the step; 0: a joiner warms up."""
    computes: Sequence[int] = ()
    holdings: Sequence[Sequence[int]] = ()
    """Those that each member contributes, in the order of their ranks."""
    generation: m.Generation = m.NO_GENERATION
    epoch: int = 0
    repairs: bool = False
    """Whether some virtual nodes were kept from an aborted attempt."""
    portions: Sequence[range] = ()
    """The virtual nodes that are computed as one micro-batch each; a part may say that when the attempt begins."""
    work: float = 0.0
    """How many virtual nodes with a whole backward pass take as long; a part may say that when the attempt begins."""
    timed: bool = True
    """Whether the time that it takes says how fast this worker is."""
    late: bool = False
    """Whether gradients are needed until all are there, so that no exchange may begin early."""
    batch: MicroBatch | None = None
    told: Told = field(default_factory=Told)
    whole: bool = True
    """Whether its backward pass goes through the whole model."""

    @property
    def present(self) -> MicroBatch:
        assert self.batch is not None
        return self.batch


Moment = Callable[[Attempt], None]
"""A hook that is called at a moment of an attempt."""


class AfterScript(Protocol):
    """:meth:`StepPart.after_script`, bound."""

    def __call__(self, *, leaves: bool) -> None:
        """Call it."""


class StepPart:
    """Takes part in each step. What a class does not override is never called."""

    def enter(self, assigned: Sequence[int]) -> None:
        """A generation is entered: other virtual nodes are assigned to this worker, its state may be a donor's."""

    def begin(self, attempt: Attempt) -> None:
        """An attempt begins; the update is ready for it."""

    def before_node(self, attempt: Attempt) -> None:
        """The samples of a virtual node are here, which this worker contributes."""

    def before_pass(self, attempt: Attempt) -> None:
        """The script gets a micro-batch. One virtual node may go through it more than once, and others for a check."""

    def after_pass(self, attempt: Attempt) -> None:
        """The script has run the micro-batch."""

    def after_node(self, attempt: Attempt) -> None:
        """A virtual node has run that this worker contributes; its gradients are as autograd left them."""

    def computed(self, attempt: Attempt) -> None:
        """This worker has computed all of its virtual nodes, if it had any: the exchange comes next."""

    def header(self) -> Mapping[str, int]:
        """What this worker says in its step header, by the header's fields."""
        return {}

    def check_headers(self, communicator: Collectives, headers: Sequence[StepHeader]) -> None:
        """All members' headers are here, before anything is reduced by them."""

    def commit(self, attempt: Attempt) -> None:
        """The attempt is applied here."""

    def counted(self, generation: m.Generation, number: int) -> None:
        """An attempt at that step in that generation counts: it is applied here, or others have said so."""

    def abandon(self) -> None:
        """The attempt is aborted, or the script has left it: leave no trace of it."""

    def after_script(self, *, leaves: bool) -> None:
        """The script's code behind a step has run; ``leaves``: a generation comes that this worker may not be in."""

    def close(self) -> None:
        """The run is over: leave the model and torch as they were."""


class Parts:
    """The parts of a run in their order: for each hook, those that have it."""

    def __init__(self, parts: Sequence[StepPart]) -> None:
        self.all = tuple(parts)
        self.enter: Sequence[Callable[[Sequence[int]], None]] = _having(parts, StepPart.enter)
        self.begin: Sequence[Moment] = _having(parts, StepPart.begin)
        self.before_node: Sequence[Moment] = _having(parts, StepPart.before_node)
        self.before_pass: Sequence[Moment] = _having(parts, StepPart.before_pass)
        self.after_pass: Sequence[Moment] = _having(parts, StepPart.after_pass)
        self.after_node: Sequence[Moment] = _having(parts, StepPart.after_node)
        self.computed: Sequence[Moment] = _having(parts, StepPart.computed)
        self.commit: Sequence[Moment] = _having(parts, StepPart.commit)
        self.counted: Sequence[Callable[[m.Generation, int], None]] = _having(parts, StepPart.counted)
        self.abandon: Sequence[Callable[[], None]] = _having(parts, StepPart.abandon)
        self.after_script: Sequence[AfterScript] = _having(parts, StepPart.after_script)


def _having(parts: Sequence[StepPart], hook: Callable[..., None]) -> tuple[Any, ...]:
    name = hook.__name__
    return tuple(getattr(part, name) for part in parts if getattr(type(part), name) is not hook)
