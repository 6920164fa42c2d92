"""What a script must not do around a step is found where it happens: parameters, groups and optimizers that it changes.

A virtual node must find what every other one finds, wherever it is computed. Buffers are put back for each of them
(``buffers``); parameters are not, so nothing may change them between the beginning of an attempt and its
synchronization. Nor may a worker do what another one would not: step an optimizer that the library does not know, since
a joiner gets no state for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import optimizer as base

from virtualflow.errors import ConfigurationError
from virtualflow.state import optimizers_of
from virtualflow.step.part import Attempt, StepPart
from virtualflow.step.partial_step import HARMLESS
from virtualflow.step.state_watch import settings_of

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size of an element, types as which the bits of others can be added up."""

_BETWEEN_NODES = "it has changed between the micro-batches of a step, so the result would depend on who computes which"

Place = Literal["library", "inner loop", "between steps"]


@dataclass(frozen=True)
class GuardSettings:
    """How often the contents of parameters are compared, to find code that changes them inside of a step.

    What torch counts (``tensor._version``) is looked at behind the last virtual node of every attempt, and behind each
    one where contents are compared. Code can get round that, by ``parameter.data``.
    """

    first: int = 3
    """Attempts at the beginning whose contents are compared."""
    every: int = 100
    """Later, those of one attempt in as many are."""


class Guard(StepPart):
    """Watches the user's code in one worker.

    Args:
        travels: whether a joiner gets an object's state, so that the script may step it between two steps.
        sharded: whether each worker keeps a share of the optimizer only.
        divided: whether each worker keeps a share of the parameters only, which are nothing that a script could change.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        travels: Callable[[object], bool],
        schedulers: Sequence[Any],
        sharded: bool,
        divided: bool,
        settings: GuardSettings,
        warn: Callable[[str], None],
    ) -> None:
        self._model = model
        named = [] if divided else list(model.named_parameters())
        self._names, self._parameters = [name for name, _ in named], [parameter for _, parameter in named]
        self._optimizer, self._travels = optimizer, travels
        self._optimizers = optimizers_of(optimizer)
        self._schedulers, self.sharded, self._settings = schedulers, sharded, settings
        self._groups = self._describe_groups()
        self._built = _parameters_by_name(model)
        self._note_layers()
        self.place: Place = "library"
        """Whose code runs; the loop says it."""
        self._warn: Callable[[str], None] | None = warn
        self._gradients: list[tuple[Tensor | None, int]] | None = None
        """Behind a step that is looked at, what its update was made from, each with its version."""
        self._set: list[Any] | None = None
        """The optimizer's settings behind the first virtual node of an attempt."""
        self._attempts = 0
        self._versions: list[int] = []
        self._sums: list[Tensor] | None = None
        self.looks = False
        """Whether contents are looked at, so that :meth:`check` can tell which virtual node has changed them."""
        self._hook = _watch_steps(self._on_step)

    def close(self) -> None:
        self._hook.remove()

    # --- parameters ---------------------------------------------------------------------------------------------------

    def begin(self, attempt: Attempt) -> None:
        self._check_optimizer()
        self._check_layers()
        if self._versions:
            self._refuse_change(
                "code before the micro-batches of a step changes it, and a worker that joins has run that code already "
                "when it gets the state"
            )
        self._attempts += 1
        self._note()

    def check(self, *, look: bool = False) -> None:
        """A virtual node has been computed; ``look`` at the contents whether or not torch has counted a change."""
        if look or (self._sums is not None and self._changed()):
            self._refuse_change(_BETWEEN_NODES)
        present = settings_of(self._optimizer)
        if self._set is None:
            self._set = present
        elif present != self._set:
            raise ConfigurationError(
                "the script sets the learning rate, or another setting of the optimizer, to different values for the "
                "micro-batches of one step, and the update uses the last one, which depends on who computes which; set "
                "it once a step, from step.number, or after the step from step.metrics"
            )

    def computed(self, attempt: Attempt) -> None:
        """All virtual nodes have been computed. Versions only grow, so they tell of all of them."""
        self._refuse_change(_BETWEEN_NODES)
        self.forget()

    def enter(self, assigned: Sequence[int]) -> None:
        """The state may be a donor's."""
        self.forget()

    def abandon(self) -> None:
        """The next attempt looks anew."""
        self.forget()

    def check_after_step(self) -> None:
        """The script's code behind a step has run."""
        if self.sharded and self._versions:
            self._refuse_change(
                "with shard_optimizer, code after a step must not change parameters", "do without one of the two"
            )
        self.forget()

    def between(self) -> None:
        """The script's code between two steps comes.

        Before the micro-batches of a step it must not change parameters. Behind a step it may, unless they are
        ``sharded`` out with the optimizer: a survivor gets each from its keeper, which may have run that code, or not.
        """
        self._note()

    def forget(self) -> None:
        """The state is another one, for good reason."""
        self._versions, self._sums, self.looks, self._set = [], None, False, None

    # --- gradients ----------------------------------------------------------------------------------------------------

    def after_update(self) -> None:
        """A step was made: what the script does to its gradients from here on comes too late."""
        if self._warn is not None and self._is_looked_at():
            self._gradients = [(p.grad, -1 if p.grad is None else p.grad._version) for p in self._parameters]

    def look_at_gradients(self) -> None:
        """The script's code behind the step has run: warn, once, of gradients that it has changed for nothing."""
        noted, self._gradients = self._gradients, None
        if noted is None or self._warn is None:
            return
        for name, parameter, (before, version) in zip(self._names, self._parameters, noted, strict=True):
            gradient = parameter.grad
            if gradient is None or (gradient is before and gradient._version == version) or not gradient.any():
                continue
            self._warn(
                f"the script has changed the gradient of {name} after the step, whose update was made before, so that "
                "has no effect on the training; clip by clip_grad_norm= or clip_grad_value= of vf.elastic, and call "
                "backward in the loop over the micro-batches"
            )
            self._warn = None
            return

    def _is_looked_at(self) -> bool:
        return self._attempts <= self._settings.first or self._attempts % self._settings.every == 0

    def _note(self) -> None:
        looks = self.looks = self._is_looked_at()
        self._versions = [parameter._version for parameter in self._parameters]
        self._sums = [add_bits(parameter) for parameter in self._parameters] if looks else None

    def _changed(self) -> bool:
        return [parameter._version for parameter in self._parameters] != self._versions

    def _refuse_change(self, what: str, remedy: str = "move that code behind the loop over the micro-batches") -> None:
        if self._sums is None:
            if self._changed():
                # Perhaps it was put back, to the bit: the next attempts look at the contents.
                self._attempts = 0
                self.forget()
            return
        now = [add_bits(parameter) for parameter in self._parameters]
        if now and not now[0].is_cpu and len({each.device for each in now}) == 1:
            # One wait for the device, and not one for each parameter.
            now, self._sums = list(torch.stack(now).cpu()), list(torch.stack(self._sums).cpu())
        for name, present, before in zip(self._names, now, self._sums, strict=True):
            if not torch.equal(present, before):
                raise ConfigurationError(f"parameter {name}: {what}; {remedy}")

    # --- layers -------------------------------------------------------------------------------------------------------

    def _check_layers(self) -> None:
        """Refuse parameters that the model has got since: nobody steps them, and a joiner builds it without them."""
        same = len(self._places) == sum(map(len, self._held))
        if same and all(held.get(name) is of for held, name, of in self._places):
            return
        for name, parameter in _parameters_by_name(self._model).items():
            if parameter is not self._built.get(name):
                raise ConfigurationError(
                    f"parameter {name} {'is another one' if name in self._built else 'has come'} since vf.elastic got "
                    "the model (a layer was replaced, added or pruned), so the optimizer does not step it and a worker "
                    "that joins builds the model without it; make all layers before vf.elastic, and use, freeze or "
                    "mask them by step.number"
                )
        self._note_layers()  # one has come that has no parameters, or one has gone

    def _note_layers(self) -> None:
        """Note where modules hold their parameters and other modules; those of TorchScript cannot be changed."""
        held: list[Any] = [part for module in self._model.modules() for part in (module._parameters, module._modules)]
        self._held: list[dict[str, Any]] = [part for part in held if isinstance(part, dict)]
        self._places = [(part, name, of) for part in self._held for name, of in part.items()]

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def _describe_groups(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _check_optimizer(self) -> None:
        groups = self._describe_groups()
        if groups != self._groups:
            raise ConfigurationError(
                f"the optimizer's groups hold {groups} parameters and held {self._groups} at the start; a worker that "
                "joins has those of the start: give the optimizer all parameters from the start, and freeze them with "
                "requires_grad_(False) until their step.number has come"
            )
        parts = self._optimizers
        for part in parts:
            step: Any = vars(part).get("step")
            wrapped = hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter")
            # One optimizer's own scheduler may be hidden in something that does not say whose it is.
            known = any(len(parts) == 1 or getattr(each, "optimizer", part) is part for each in self._schedulers)
            if wrapped and not known:
                which = "the optimizer" if len(parts) == 1 else f"the optimizer {type(part).__name__}"
                raise ConfigurationError(
                    f"a learning rate scheduler was made for {which}, and a worker that joins would not get its "
                    'state; pass it to vf.elastic as scheduler=, with scheduler_interval="manual" if the script steps '
                    "it, or as state="
                )

    def _on_step(self, optimizer: torch.optim.Optimizer) -> None:
        name = type(optimizer).__name__
        if self.place == "library" or (self.place == "between steps" and self._travels(optimizer)):
            return
        if _in_scaler():
            raise ConfigurationError(
                "the script has called GradScaler.step(), and the library steps the optimizer when the gradients of "
                "all micro-batches are there; pass scaler= to vf.elastic and keep scaler.scale(loss), but remove the "
                "calls of unscale_, step and update (clip by clip_grad_norm=)"
            )
        if any(optimizer is part for part in self._optimizers):
            # What the next zero_grad() would have thrown away counts without the calls.
            several = (
                "; gradients that another optimizer's loss leaves in its parameters count, too: freeze those meanwhile "
                "by requires_grad_(False)"
            )
            raise ConfigurationError(
                f"the script has called {name}.step(), and the library steps the optimizer when the gradients of all "
                f"micro-batches are there; remove the call{several if len(self._optimizers) > 1 else ''}"
            )
        raise ConfigurationError(
            f"the script has stepped an optimizer ({name}) that the library does not know, so a worker that joins "
            "would not get its state; pass it to vf.elastic, in a list with the other one, and remove the call"
        )


def _parameters_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _in_scaler() -> bool:
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch.amp.grad_scaler":
            return True
    return False


def _watch_steps(told: Callable[[torch.optim.Optimizer], None]) -> Any:
    def hook(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        told(optimizer)

    hook.__dict__[HARMLESS] = True
    return base.register_optimizer_step_pre_hook(hook)


def add_bits(tensor: Tensor) -> Tensor:
    """The sum of a tensor's bits, read as integers: int64 ``[]`` on its device."""
    plain = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return plain.view(_BITS[plain.itemsize]).sum(dtype=torch.int64)
