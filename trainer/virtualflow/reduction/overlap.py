"""Whether a step's reduction may begin while its last backward pass still runs, and whether that was right.

A gradient is final when autograd has accumulated it, unless the user's code changes it afterwards (clips it, calls
``backward`` once more). So the first step of a generation only watches: each worker tells in its step header whether
its gradients stayed as autograd left them. If all did, the next step's reduction begins with the first gradients, which
all workers decide alike since they have read the same headers. If a step then surprises somebody, its header says so,
and all repeat the attempt with a reduction behind the headers. A model that does other things than before (freezes a
layer, skips a branch) surprises nobody: what was expected and does not come is zero, what comes unexpected is reduced
behind the headers. Where gradients are many and small, nothing is watched: all set out together behind the backward
pass, before the headers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from virtualflow.reduction.accumulation import Accumulator, multiply
from virtualflow.reduction.early import Early
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.transport import Collectives

_QUIET = 64
"""Synchronizations after a surprise in which nothing begins early."""


class AttemptSpoiled(Exception):
    """A gradient changed after it had set out: all workers repeat the attempt, and wait for its end this time."""


class Overlap:
    """The early beginning of reductions, in one worker.

    Args:
        parameters: all of the model's; they are known by their place among them.
        reducer: that of the updates.
        settings: which gradients are worth it.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], reducer: Reducer, settings: ReductionSettings) -> None:
        self._parameters = parameters
        self._reducer = reducer
        size = sum(p.numel() * p.itemsize for p in parameters)
        self._worthwhile = size > settings.small_exchange // 2
        """Whether gradients are so large that they should not wait for the headers."""
        self._one_by_one = size >= settings.one_by_one * len(parameters) and len({p.device for p in parameters}) == 1
        """Whether they are so large, each, that it pays to take it as soon as it is there: the first bucket sets out
        before the last is full, and the last addition writes the message. Else all are taken together behind the
        backward pass; so are those of several devices, for each of which autograd has a thread that calls hooks."""
        self._hooks: list[RemovableHandle] = []
        self._expected: tuple[int, ...] = ()
        """What the last step of this generation reduced, if it showed that the next one may begin early."""
        self._quiet_until = 0
        self._early: Early | None = None
        self._deferred = False
        self._watching = False
        self._stream: torch.cuda.Stream | None = None
        """The one on which this worker adds up gradients."""
        self._seen: dict[int, tuple[Tensor, int]] = {}
        """Each gradient as autograd left it, with its version."""

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """The attempt is aborted, or the next one begins."""
        self._watching = False
        self._seen.clear()
        if self._early is not None:
            self._early.pipeline.abandon()
            self._early = None
            self._reducer.forget()  # what is under way may still write to its buffers

    def watch(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        accumulator: Accumulator,
        *,
        last: int,
        weight: float,
        scale: float | None,
    ) -> None:
        """The last virtual node of this worker's range is about to run.

        Args:
            collectives: the communicator.
            holdings: the virtual nodes of each of its members.
            accumulator: the sums of this worker's virtual nodes but for the last.
            last: that one.
            weight: the factor of its gradients.
            scale: the factor of the sum over all; ``None``: not known before the headers.
        """
        self._watching, self._deferred = collectives.size > 1, scale is None
        if self._watching and self._worthwhile and self._one_by_one:
            self._stream = _stream(self._parameters[0])
            if not self._hooks:
                self._hook()
        if self._expected:
            self._early = self._reducer.begin(
                collectives,
                holdings,
                accumulator,
                last=last,
                weight=weight,
                templates=self._parameters,
                places=self._expected,
                scale=scale or 1.0,
            )

    @property
    def watching(self) -> bool:
        """Whether the last virtual node runs."""
        return self._watching

    def _hook(self) -> None:
        for place, parameter in enumerate(self._parameters):
            if parameter.requires_grad:
                register: Callable[..., RemovableHandle] = parameter.register_post_accumulate_grad_hook
                self._hooks.append(register(partial(self._on_gradient, place)))

    def _on_gradient(self, place: int, parameter: Tensor) -> None:
        gradient = parameter.grad
        if not self._watching or gradient is None or gradient.is_sparse or place in self._seen:
            return
        if _stream(gradient) != self._stream:
            return  # a kernel of another stream has perhaps not ended; behind the backward pass, autograd sees to that
        self._seen[place] = (gradient, gradient._version)
        if self._early is not None and place in self._early.places:
            self._early.give(place, gradient.detach())

    def settle(self) -> tuple[frozenset[int], bool]:
        """The last virtual node has run: which gradients have set out, and whether all stayed as autograd left them."""
        self._watching = False
        steady = all(
            self._parameters[place].grad is gradient and gradient._version == version
            for place, (gradient, version) in self._seen.items()
        )
        given = set(self._seen)
        self._seen.clear()
        if self._early is None:
            return frozenset(), steady
        rest = {place: self._parameters[place].grad for place in self._early.places - given}
        # What has not set out yet is the user's no more, and is used up.
        self._early.give_rest({place: None if left is None else left.detach() for place, left in rest.items()})
        return self._early.places, steady

    # --- the reduction ------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether this attempt's reduction has begun already."""
        return self._early is not None

    @property
    def early(self) -> Early | None:
        """It, in that case."""
        return self._early

    @property
    def places(self) -> frozenset[int]:
        """What is under way."""
        return frozenset() if self._early is None else self._early.places

    def headers(self, block: Tensor) -> Tensor:
        """Exchange the headers behind what is under way."""
        assert self._early is not None
        return self._early.pipeline.exchange_headers(block)

    def results(self, scale: float, steady: bool) -> Iterator[tuple[dict[int, Tensor], bool]]:
        """Wait for what is under way: sums by place, bucket by bucket, and whether the others are there, too.

        Args:
            scale: the factor of the sums.
            steady: whether all workers' gradients stayed as they were.

        Raises:
            AttemptSpoiled: they did not.
            CommunicatorBroken: a peer is lost.
        """
        early = self._early
        if early is None:
            return
        for found in early.results():
            if steady:
                multiply(found.values(), scale if self._deferred else 1.0)
                yield found, early.pipeline.complete
        self._early = None
        if not steady:
            raise AttemptSpoiled

    def await_all(self) -> None:
        """Wait for what is under way, and forget what it brings: nothing of it is used.

        Raises:
            CommunicatorBroken: a peer is lost.
        """
        if self._early is not None:
            for _ in self._early.results():
                pass
            self._early = None

    def learn(self, number: int, reduced: Iterable[int], steady: bool) -> None:
        """All workers know the same of a synchronization: how the next one begins.

        Args:
            number: of this one.
            reduced: what it reduced.
            steady: whether all workers' gradients stayed as autograd left them.
        """
        if not steady:
            self._quiet_until = number + _QUIET
        ready = steady and self._worthwhile and number >= self._quiet_until
        # A backward pass finishes them roughly in the reverse order of their registration.
        self._expected = tuple(sorted(reduced, reverse=True)) if ready else ()

    def enter(self) -> None:
        """A generation begins: not all of its members know what the last one has shown."""
        self.abandon()
        self._expected, self._quiet_until = (), 0
        self._unhook()  # a worker that is alone has no use for them

    def close(self) -> None:
        """Leave the model as it was."""
        self.abandon()
        self._reducer.close()
        self._unhook()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _stream(tensor: Tensor) -> torch.cuda.Stream | None:
    """Where this thread launches kernels on a tensor; autograd's threads do it where the forward pass was."""
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
