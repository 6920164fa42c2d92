"""Gradients are taken over while they are in a cache: when autograd hands each one over, inside of the backward pass.

A gradient that has been added up is gone, and its memory is free for the next one. So it must be known that the script
does not look at it, nor change it, before the next virtual node. Changes show in the gradient's identity and version;
to see a look, ``.grad`` holds a stand-in meanwhile (:class:`StandIn`), a tensor that tells when it is used. A script is
watched first, with stand-ins for gradients that are still there, so that it reads what it should.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle


class Receiver(Protocol):
    """Who adds up gradients as they come."""

    def takes(self, place: int) -> bool:
        """Whether it wants that place."""

    def give(self, place: int, tensor: Tensor, *, own: bool) -> Tensor:
        """Add up a gradient, which need not be kept if it is its ``own``.

        Returns:
            What ``.grad`` may hold from now on: the gradient as it was, or, of an ``own`` one, memory of its shape that
            nobody else reads, unless it has stayed as it was left.
        """


class StandIn(Tensor):
    """What ``.grad`` of a parameter holds in place of ``kept``, and tells whoever ``used`` it.

    It shares the memory of ``kept``, so autograd adds to it as to any gradient. Whatever Python does with it goes by
    ``__torch_function__`` and is done with ``kept``.
    """

    kept: Tensor
    used: Callable[[], None]

    @staticmethod
    def of(kept: Tensor, used: Callable[[], None]) -> StandIn:
        made = kept.as_subclass(StandIn)
        made.kept, made.used = kept, used
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def reveal(found: StandIn) -> Tensor:
            found.used()
            return found.kept

        real_args, real_kwargs = pytree.tree_map_only(StandIn, reveal, (args, kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*real_args, **real_kwargs)


@dataclass(frozen=True)
class HandedOver:
    """What has come of a virtual node's gradients."""

    seen: frozenset[int]
    """The places that autograd has handed over."""
    gone: frozenset[int]
    """Those of them that have been used up."""
    steady: bool
    """Whether all stayed as they were left."""


UNWATCHED = HandedOver(frozenset(), frozenset(), steady=True)
"""Of a virtual node that nobody has watched."""


@dataclass(frozen=True)
class _Seen:
    """A gradient as it was left behind when autograd had handed it over."""

    left: Tensor
    """What ``.grad`` holds since."""
    real: Tensor
    """The same without disguise."""
    version: int
    gone: bool
    """Whether it has been used up."""


class Handover:
    """The gradients of one virtual node after another, as autograd hands them over.

    Args:
        parameters: all of the model's; they are known by their place among them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.looked = False
        """Whether the script has ever looked at a gradient behind the backward pass: it needs them as they are."""
        self._parameters = parameters
        self._hooks: dict[int, RemovableHandle] = {}
        self._receiver: Receiver | None = None
        self._plain = False
        self._watching = False
        self._stream: torch.cuda.Stream | None = None
        """The one on which this worker adds up gradients."""
        self._steady = True
        self._seen: dict[int, _Seen] = {}

    def hook(self) -> None:
        """An attempt begins. What is frozen by now cannot be hooked: its gradients are found behind the pass."""
        for place, parameter in enumerate(self._parameters):
            if place not in self._hooks and parameter.requires_grad:
                register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
                self._hooks[place] = register(partial(self._on_gradient, place))

    def unhook(self) -> None:
        for hook in self._hooks.values():
            hook.remove()
        self._hooks = {}

    # --- a virtual node -----------------------------------------------------------------------------------------------

    def begin(self, receiver: Receiver | None, *, plain: bool = False) -> None:
        """A virtual node is about to run.

        Args:
            receiver: who adds up its gradients as they come; ``None``: they are only watched.
            plain: whether ``.grad`` is to hold them as autograd left them, since the library itself looks at them.
        """
        self._seen.clear()
        self._receiver, self._plain = receiver, plain
        self._stream = _stream(self._parameters[0])
        self._watching = self._steady = True

    @property
    def begun(self) -> bool:
        return bool(self._seen)

    def unsettle(self) -> None:
        """The gradients of the virtual node that runs were not what was to be added up."""
        self._steady = False

    def _on_gradient(self, place: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self._watching or gradient is None:
            return
        # A second backward pass shows in the identity or the version of what the first one has left.
        if place in self._seen or gradient.is_sparse:
            return
        if _stream(gradient) != self._stream:
            return  # a kernel of another stream has perhaps not ended; behind the backward pass, autograd sees to that
        if gradient.requires_grad:
            self.looked = True  # create_graph: the script is to differentiate it
        hidden = not (self._plain or self.looked) and type(gradient) is Tensor  # other classes have an own protocol
        given = gradient.detach()
        kept = given
        if self._receiver is not None and self._receiver.takes(place):
            kept = self._receiver.give(place, given, own=hidden)
        gone = kept is not given
        self._note(place, parameter, kept if gone else gradient, hidden=hidden, gone=gone)

    def _note(self, place: int, parameter: Tensor, real: Tensor, *, hidden: bool, gone: bool) -> None:
        left = real
        if hidden:
            real = real.data  # gradients may be views of one tensor, and would count each other's versions
            left = StandIn.of(real, partial(self._on_use, gone))
            parameter.grad = left
        self._seen[place] = _Seen(left, real, real._version, gone)

    def _on_use(self, gone: bool) -> None:
        self.looked = True
        if gone and self._watching:
            self._steady = False  # it was not shown what it should have been

    def end(self) -> HandedOver:
        """The virtual node has run, and ``.grad`` holds what is still there: what has come of its gradients."""
        if not self._watching and self._steady:
            return UNWATCHED
        self._watching, self._receiver = False, None
        seen, gone = frozenset(self._seen), frozenset(place for place, left in self._seen.items() if left.gone)
        stand_ins = [(weakref.ref(left.left), left.gone) for left in self._seen.values() if type(left.left) is StandIn]
        while self._seen:
            self._take_leave(*self._seen.popitem())
        for stand_in, was_gone in stand_ins:
            if stand_in() is not None:  # the script holds it, and may look whenever it likes
                self.looked = True
                self._steady = self._steady and not was_gone
        steady, self._steady = self._steady, True
        return HandedOver(seen, gone, steady)

    def _take_leave(self, place: int, seen: _Seen) -> None:
        parameter = self._parameters[place]
        if parameter.grad is not seen.left or seen.real._version != seen.version:
            self._steady = False
        if type(parameter.grad) is StandIn:
            parameter.grad = None if seen.gone else parameter.grad.kept


def _stream(tensor: Tensor) -> torch.cuda.Stream | None:
    """Where this thread launches kernels on a tensor; autograd's threads do it where the forward pass was."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
