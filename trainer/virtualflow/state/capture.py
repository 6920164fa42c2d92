"""Everything that a step depends on, taken from a job's objects and put back into others, exact to the bit.

A donor sends it to a joiner, and a checkpoint holds it; afterwards the receiver must go on with the very same bits as
if it had trained all along. Where torch's own ``load_state_dict`` loses some (buffers outside of it, casts, devices),
this module does not. What becomes of the tree on its way is the matter of ``codec``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from virtualflow.errors import ConfigurationError
from virtualflow.state.codec import Tree, flatten, snapshot, unflatten
from virtualflow.state.digests import difference, tensor_signature
from virtualflow.state.several import Optimizers, misfit
from virtualflow.state.striping import Path


class Stateful(Protocol):
    """What schedulers and gradient scalers have in common."""

    def state_dict(self) -> dict[str, Any]:
        """Everything that it keeps from step to step."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Go on from there."""
        ...


def capture(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None,
    scaler: Stateful | None,
    extra: dict[str, Any],
) -> dict[str, Any]:
    """The whole state between two steps, by reference: ``codec.pack`` or ``codec.snapshot`` it before the next step.

    Buffers come from ``named_buffers``, so those that ``state_dict`` leaves out (``persistent=False``) are in
    it; the ``state_dict`` adds what neither parameters nor buffers hold (``get_extra_state``, entries of
    custom hooks).
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    state = optimizer.state_dict()
    return {
        "parameters": {name: parameter.detach() for name, parameter in model.named_parameters()},
        "buffers": dict(model.named_buffers()),
        "other": {name: value for name, value in model.state_dict().items() if name not in known},
        "optimizer": state,
        "hosted": _hosted(optimizer, state),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "extra": extra,
    }


def _hosted(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> list[list[Any]]:
    """A few optimizers keep scalars on the CPU beside parameters of an accelerator; the receiver must do the same."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [
        [n, key]
        for n, parameter in enumerate(parameters)
        for key, value in _entries(state["state"].get(n))
        if isinstance(value, Tensor) and value.device.type == "cpu" != parameter.device.type
    ]


def _entries(state: Any) -> list[tuple[Any, Any]]:
    return list(state.items()) if isinstance(state, dict) else []


def restore(
    tree: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None,
    scaler: Stateful | None,
    *,
    given: bool = False,
) -> dict[str, Any]:
    """Put a captured state into these objects, bit for bit, and return its ``extra``.

    Parameters and buffers are overwritten in place and keep their identity, device, layout and
    ``requires_grad``; nothing here aliases the tree afterwards, unless the tree is ``given`` away: then the optimizer
    keeps its tensors, and those that are the model's own already (see ``own_tensors``) stay as they are.
    ConfigurationError, before anything has changed, if the state does not fit.
    """
    parameters = dict(model.named_parameters())
    check_fit(tree, model, optimizer, scheduler, scaler)
    keep = _as_it_is if given else snapshot
    with torch.no_grad():
        for name, parameter in parameters.items():
            _overwrite(parameter, tree["parameters"][name])
        _restore_buffers(model, tree["buffers"])
        if tree["other"]:
            # Whatever a module stores in its own way, it loads in its own way; its tensors are in place
            # already.
            model.load_state_dict({**model.state_dict(), **keep(tree["other"])})
    _restore_optimizer(optimizer, keep(tree["optimizer"]), {(n, key) for n, key in tree["hosted"]})
    for part, saved in ((scheduler, tree["scheduler"]), (scaler, tree["scaler"])):
        if part is not None:
            part.load_state_dict(keep(saved))
    extra: dict[str, Any] = tree["extra"]
    return extra


def copy_optimizer_state(source: torch.optim.Optimizer, target: torch.optim.Optimizer) -> None:
    """Give one optimizer the state of another one, as a joiner gets it."""
    state = source.state_dict()
    _restore_optimizer(target, snapshot(state), {(n, key) for n, key in _hosted(source, state)})


def _as_it_is(tree: Tree) -> Tree:
    return tree


def own_tensors(model: torch.nn.Module, stripes: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
    """The model's parameters among the tensors of a state, those into which the bytes can be written as they come."""
    found = {}
    for name, parameter in model.named_parameters():
        path: Path = ("parameters", name)
        if path in stripes and parameter.is_contiguous() and not (parameter.is_conj() or parameter.is_neg()):
            found[path] = parameter.detach()
    return found


def check_fit(
    tree: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Stateful | None,
    scaler: Stateful | None,
) -> None:
    def described(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        return {"parameters": {name: tensor_signature(tensor) for name, tensor in tensors.items()}}

    problem = difference(described(dict(model.named_parameters())), described(tree["parameters"]))
    if problem:
        raise ConfigurationError(f"the state is of another model: {problem}")
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in tree["buffers"]:
        owner, _, leaf = name.rpartition(".")
        if owner not in modules or leaf not in modules[owner]._buffers:
            raise ConfigurationError(
                f"the state has a buffer {name}, which this model does not register; register it from the start"
            )
    groups = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in tree["optimizer"]["param_groups"]]
    if groups != saved:
        raise ConfigurationError(f"the optimizer's groups hold {groups} parameters here and {saved} in the state")
    problem = misfit(optimizer, scheduler, tree)
    if problem:
        raise ConfigurationError(problem)
    for name, part in (("scheduler", scheduler), ("scaler", scaler)):
        # A disabled GradScaler has an empty state, and an enabled one does not load it.
        here, there = bool(part is not None and part.state_dict()), bool(tree[name])
        if here != there:
            raise ConfigurationError(
                f"the state has {'a' if there else 'no'} {name} and this process has "
                f"{'one' if here else 'none'}; run the same script everywhere"
            )


def _overwrite(target: Tensor, source: Tensor) -> None:
    if source.is_set_to(target):
        return  # it was received in place
    # A tensor made by expand() shows one element several times, and torch refuses to write to it as a whole.
    for dimension, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if size > 1 and stride == 0:
            target, source = target.narrow(dimension, 0, 1), source.narrow(dimension, 0, 1)
    target.copy_(source)


def _restore_buffers(model: torch.nn.Module, saved: dict[str, Tensor]) -> None:
    buffers = dict(model.named_buffers())
    for name in sorted(buffers.keys() | saved.keys()):
        target, source = buffers.get(name), saved.get(name)
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        if target is not None and source is not None:
            if target.shape != source.shape and leaf in module._non_persistent_buffers_set:
                continue  # a cache, and its module remembers elsewhere how far its own one reaches
            if target.shape == source.shape and target.dtype == source.dtype:
                _overwrite(target, source)
            else:  # Observers and caches grow while they run.
                target.data = source.to(target.device, copy=True)
            continue
        # It is None on one side: a buffer that its module fills or drops while it runs.
        device = next((tensor.device for tensor in [*module.parameters(), *model.parameters()]), None)
        setattr(module, leaf, None if source is None else source.to(device or "cpu", copy=True))


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], hosted: set[tuple[int, str]]) -> None:
    if isinstance(optimizer, Optimizers):
        for part, own, numbers in optimizer.divide(saved):
            _restore_optimizer(part, own, {(n - numbers.start, key) for n, key in hosted if n in numbers})
        return
    for group, loaded in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        for key, value in loaded.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                loaded[key] = value.to(group[key].device)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in saved["param_groups"] for index in group["params"]]
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        optimizer.load_state_dict(saved)
        return  # It knows better what its state means.
    # torch casts state to its parameter's dtype, which loses bits where an optimizer keeps another one, and moves all
    # but "step" to its device, where there may be no room for it; so it loads only what is not of a parameter.
    exact = {index for index in indices if isinstance(saved["state"].get(index), dict)}
    rest = {key: value for key, value in saved["state"].items() if key not in exact}
    optimizer.load_state_dict({**saved, "state": rest})
    for index, parameter in zip(indices, parameters, strict=True):
        if index in exact:
            optimizer.state[parameter] = {
                key: placed(value, torch.device("cpu") if (index, key) in hosted else parameter.device)
                for key, value in saved["state"][index].items()
            }


def placed(tree: Tree, device: torch.device) -> Tree:
    """The same with its tensors on a device; those that are there already are not copied."""
    skeleton, tensors = flatten(tree)
    return unflatten(skeleton, [tensor.to(device) for tensor in tensors])


# What a script keeps beside the model and wants to travel with it: an average of weights, a teacher, a queue of keys.
#
# Everything with ``state_dict`` and ``load_state_dict`` will do. It is part of a state that a joiner gets and that a
# checkpoint holds, and of the digest that workers compare at the end.


class Companions:
    """Objects of a script, by name.

    Args:
        instead: what has the states of some of them, in their place.

    Raises:
        ConfigurationError: one of them has no state, or one that cannot be described exactly.
    """

    def __init__(self, objects: Mapping[str, Any], instead: Mapping[str, Any] | None = None) -> None:
        self._given = dict(objects)
        self._objects = {**objects, **(instead or {})}
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
        return sorted(self._objects)

    def knows(self, thing: object) -> bool:
        return any(thing is known for known in self._given.values())

    @property
    def objects(self) -> list[Any]:
        return list(self._given.values())

    def capture(self) -> dict[str, Any]:
        """Their states, by reference."""
        return {name: self._objects[name].state_dict() for name in self.names}

    def results(self) -> dict[str, Any]:
        """Of their states what two runs of a script have in common, so not where each has written its files.

        An object that holds more has a ``result_dict`` beside its ``state_dict``.
        """
        objects = ((name, self._objects[name]) for name in self.names)
        return {name: getattr(given, "result_dict", given.state_dict)() for name, given in objects}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Let them load what :meth:`capture` gave, on the devices where their tensors are; nothing is shared."""
        for name in self.names:
            given = self._objects[name]
            try:
                given.load_state_dict(_placed(snapshot(saved[name]), given.state_dict()))
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise ConfigurationError(f"{name}, which state holds, could not load its state: {error}") from error

    def check_fit(self, saved: Mapping[str, Any]) -> None:
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


# Hooks on a user's modules that stay behind when the model is copied or written: the copy is somebody else's.


class StayingHook:
    """A hook that does nothing on a copy."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> None:
        self._call(*arguments)

    def __reduce__(self) -> tuple[object, ...]:
        return StayingHook, (_ignore,)


def _ignore(*arguments: Any) -> None:
    """What a copy's hooks do."""
