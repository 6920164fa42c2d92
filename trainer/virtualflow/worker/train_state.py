"""The state of a training between two steps, as a whole: what a joiner gets, and what a checkpoint holds."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import MAX_NAME
from virtualflow.protocol.wording import not_finite
from virtualflow.state import (
    Companions,
    OwnShare,
    Path,
    Reserve,
    capture,
    codec,
    digests,
    optimizers_of,
    schedulers_of,
    size_of,
    split,
    transfer,
)
from virtualflow.step import Reduced, Schema, Update, walk_objects
from virtualflow.worker import tracker
from virtualflow.worker.tracker import Entry

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")
"""What learning rate schedulers, torch's own and hand-written ones, change in a parameter group."""


@dataclass
class Training:
    """The model and its companions, and how far the training has come."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any
    update: Update
    companions: Companions = field(default_factory=lambda: Companions({}))
    """What the script keeps beside them."""
    last_step: int | None = None
    """After which it is through,"""
    epochs: int | None = None
    """or after so many."""
    completed_steps: int = 0
    position: tuple[int, int] = (0, 0)
    """Epoch and step in the epoch of the next update, both from 0."""
    exchanges: int = 0
    """Exchanges of any kind that are complete; the same on all workers between two of them."""
    metrics: dict[str, float] = field(default_factory=dict)
    logged: dict[str, float] = field(default_factory=dict)
    """Numbers of the whole job."""
    non_finite: m.NonFinite | None = None
    """The first of these two that was not finite."""
    evaluated: list[Tensor] | None = None
    """What the last exchange brought, if it was one of an evaluation: others may need it again."""
    arrived: bool = True
    """Whether the user's code between the last exchange and the next one has run here, with all that it may change."""
    workers: int | None = None
    """How many workers made the last step."""
    changes: dict[m.Generation, m.Change] = field(default_factory=dict)
    """Membership changes so far, for coordinators and members to come."""
    id: str = ""
    """What names it; empty: it has not begun."""
    built: dict[str, str] = field(default_factory=dict)
    """How optimizer and scheduler were built when it began; empty: a checkpoint of an earlier version does not say."""
    digest: str = ""
    """Of the model at the end, where nobody has all of it; else empty."""
    tracked: dict[int, Entry] = field(default_factory=dict)
    """Steps that trackers may not have yet, by number."""

    def __post_init__(self) -> None:
        self._received: dict[str, Any] | None = None

    def begin_behind(self, step: int, steps_per_epoch: int) -> None:
        """Begin behind a step that was made elsewhere: the objects have its state already, alike on all workers.

        It holds where nobody has a state yet, and there is no checkpoint of the library's own.
        """
        self.completed_steps = self.exchanges = step
        self.position = divmod(step, steps_per_epoch)

    def knows(self, thing: object) -> bool:
        """Whether an object is part of the state: one of the companions, or a scheduler, also inside of another one."""
        return self.companions.knows(thing) or any(
            each is thing for each in walk_objects(schedulers_of(self.scheduler))
        )

    def known(self) -> Iterator[object]:
        """The objects that are part of the state beside the model, and what they hold."""
        return walk_objects([*self.companions.objects, *schedulers_of(self.scheduler), *optimizers_of(self.optimizer)])

    @property
    def is_over(self) -> bool:
        return (self.last_step is not None and self.completed_steps >= self.last_step) or (
            self.epochs is not None and self.position[0] >= self.epochs
        )

    @property
    def numbers(self) -> dict[str, float]:
        return {**self.metrics, **self.logged}

    def commit(self, reduced: Reduced, workers: int) -> None:
        epoch, epoch_step = self.position
        epoch_ends = not any(header.more for header in reduced.headers)
        self.update.apply(reduced, epoch_ends)
        self.completed_steps += 1
        self.complete_exchange(None)
        self.position = (epoch + 1, 0) if epoch_ends else (epoch, epoch_step + 1)
        self.metrics, self.workers = reduced.metrics, workers
        self.note_non_finite(reduced.metrics)

    def complete_exchange(self, evaluated: list[Tensor] | None) -> None:
        """One more exchange is complete, and the user's code behind it is still to run."""
        self.exchanges += 1
        self.evaluated, self.arrived = evaluated, False

    def arrive(self) -> None:
        """The user's code before the next exchange has run: stand where all others stand.

        A survivor that lacked an exchange has got the state of one that had arrived here already, and has then run its
        own code between the two on top of it. What that code has changed it has changed twice; so the state is taken
        again.
        """
        received, self._received = self._received, None
        if received is not None:
            shards = self.update.shards
            states = None if shards is None else shards.detach_states()
            self._become(received)
            if shards is not None and states is not None:
                shards.attach_states(states)
        self.arrived = True

    def _become(self, tree: dict[str, Any], *, given: bool = False) -> dict[str, Any]:
        extra = capture.restore(
            self._with_values(tree), self.model, self.optimizer, self.scheduler, self.scaler, given=given
        )
        self.companions.restore(tree.get("state", {}))
        self.update.sync.switches.restore(extra.get("switched", {}))
        if not self.exchanges:  # else its own script has set them, and may be in the middle of an evaluation
            self.update.sync.modes.restore(extra.get("modes", {}))
        return extra

    @property
    def repeats(self) -> bool:
        """Whether what the script does now has been done already, in a state that was received: see :meth:`arrive`."""
        return self._received is not None

    def note_non_finite(self, numbers: Mapping[str, float]) -> None:
        if self.non_finite is None:
            for name, value in numbers.items():
                word = None if math.isfinite(value) else not_finite(value)
                if word is not None:
                    self.non_finite = m.NonFinite(name[:MAX_NAME], word, self.completed_steps)
                    return

    def capture(self, *, states: bool = True) -> dict[str, Any]:
        """Everything, by reference: to be packed or copied before the next step."""
        extra = {
            "step": self.completed_steps,
            "position": self.position,
            "exchanges": self.exchanges,
            "schema": self.update.sync.settled.to_json(),
            "metrics": self.metrics,
            "logged": self.logged,
            "nonFinite": msgspec.to_builtins(self.non_finite),
            "evaluated": self.evaluated,
            "members": self.workers,
            "changes": msgspec.to_builtins(list(self.changes.values())),
            "id": self.id,
            "built": self.built,
        }
        if self.tracked:
            extra["tracked"] = tracker.pack(list(self.tracked.values()))
        if not self.arrived:
            extra["arrived"] = False
        if switched := self.update.sync.switches.state:
            extra["switched"] = switched
        if modes := self.update.sync.modes.state:
            extra["modes"] = modes
        tree = capture.capture(self.model, self.optimizer, self.scheduler, self.scaler, extra)
        if self.companions:
            tree["state"] = self.companions.capture()
        if not states:
            tree |= {"optimizer": {**tree["optimizer"], "state": {}}, "hosted": []}
            if self._divided:
                tree["parameters"] = {}
        return tree

    def capture_undivided(self) -> dict[str, Any]:
        """What is the same on all workers where each has a share of the parameters, by reference."""
        return self.capture(states=False)

    def capture_share(self) -> OwnShare:
        """What this worker has first of what is divided, by reference."""
        assert self.update.shards is not None
        return self.update.shards.capture()

    @property
    def _divided(self) -> bool:
        """Whether the values of parameters do not travel with the rest."""
        return self.update.sharded is not None

    def _with_values(self, tree: dict[str, Any]) -> dict[str, Any]:
        """A state that has come without the values of parameters: they stay as they are."""
        if self._divided and not tree["parameters"]:
            tree["parameters"] = {name: parameter.detach() for name, parameter in self.model.named_parameters()}
        return tree

    def room(self) -> tuple[int, ...]:
        """Sizes in bytes of the large tensors of a state that a joiner will have to make memory for."""
        if self.update.shards is not None:
            return ()
        _, stripes = split(self.capture(), transfer.STRIPE)
        return tuple(size_of(tensor) for path, tensor in stripes.items() if path[0] == "optimizer")

    def land(
        self, tree: dict[str, Any], stripes: dict[Path, Tensor], reserve: Reserve, in_place: bool
    ) -> dict[Path, Tensor]:
        """Where the large tensors of a state that arrives are to be written, before :meth:`restore`.

        Args:
            reserve: memory for what is not the model's own.
            in_place: into the model's own parameters where they are dense. Only for a worker that has no state to lose:
                if the rest does not arrive, its model is spoiled.
        """
        capture.check_fit(self._with_values(tree), self.model, self.optimizer, self.scheduler, self.scaler)
        self.companions.check_fit(tree.get("state", {}))
        own = capture.own_tensors(self.model, stripes) if in_place else {}
        return {path: own[path] if path in own else reserve.take(like) for path, like in stripes.items()}

    def restore(self, tree: dict[str, Any], *, given: bool = False) -> None:
        """Become what :meth:`capture` gave, here or elsewhere; a tree that is ``given`` away is not copied.

        A survivor that lacks the last exchange gets it from one that has gone on, through the user's code after the
        step. Its own code after that step is still to come, and is to see the learning rate that it would have seen
        (see also :meth:`arrive`).
        """
        survivor = self.update.contributed
        by_hand = survivor and not self.update.optimizer_step.steps_scheduler
        kept = [{key: group[key] for key in _SCHEDULED if key in group} for group in self.optimizer.param_groups]
        schedule = codec.snapshot(self.scheduler.state_dict()) if by_hand and self.scheduler is not None else None
        extra = self._become(tree, given=given)
        if survivor and extra.get("arrived", True):
            # In the host's memory, as long as the user's code up to the next exchange runs.
            self._received = codec.unpack(codec.pack(self.capture(states=self.update.shards is None)))
        if by_hand:
            for group, values in zip(self.optimizer.param_groups, kept, strict=True):
                group.update(values)
        if schedule is not None:
            self.scheduler.load_state_dict(schedule)
        self.arrived = not survivor
        self.completed_steps, self.exchanges = extra["step"], extra["exchanges"]
        self.position = (extra["position"][0], extra["position"][1])
        self.update.sync.settle(Schema.from_json(extra["schema"]))
        self.metrics, self.logged, self.workers = extra["metrics"], extra["logged"], extra["members"]
        # A checkpoint of an earlier version does not say it.
        self.non_finite = msgspec.convert(extra.get("nonFinite"), m.NonFinite | None)
        self.evaluated = None if extra["evaluated"] is None else [block.clone() for block in extra["evaluated"]]
        for change in msgspec.convert(extra["changes"], list[m.Change]):
            self.changes.setdefault(change.generation, change)
        self.id, self.built = extra.get("id", ""), extra.get("built", {})
        for entry in tracker.unpack(extra["tracked"]) if "tracked" in extra else ():
            self.tracked.setdefault(entry.step, entry)

    def restore_but_states(self, tree: dict[str, Any]) -> None:
        """Become what ``capture(states=False)`` gave, which is given away; the optimizer keeps its states."""
        shards = self.update.shards
        assert shards is not None
        kept = shards.detach_states()
        self.restore(tree, given=True)
        shards.attach_states(kept)
        if shards.sliced is None:
            shards.values = shards.all

    def complete_pending(self, norm: float | None, workers: int) -> None:
        """Commit the step that is pending, because it counts for others (``shards``)."""
        self.commit(self.update.complete_pending(norm), workers)

    def model_hash(self) -> int:
        beside = {f"state of {name}": value for name, value in self.companions.capture().items()}
        model = self.model.state_dict()
        if self._divided:  # those that are still to be made follow from the seed
            hollow = {name for name, p in self.model.named_parameters(remove_duplicate=False) if 0 in p.stride()}
            model = {name: value for name, value in model.items() if name not in hollow}
        return int(digests.digest({**model, **beside})[:15], 16)

    def companion_digest(self) -> str:
        """SHA-256 (hex) of the optimizer's state and, where the script keeps something beside the model, of that."""
        if not self.companions:
            return digests.optimizer_digest(self.optimizer)
        return digests.digest({"optimizer": self.optimizer.state_dict(), **self.companions.results()})


def signature_hash(signature: dict[str, Any]) -> int:
    """A number that differs when two signatures (``digests.signature``) do."""
    text = json.dumps(signature, sort_keys=True)
    return int(hashlib.sha256(text.encode()).hexdigest()[:15], 16)
