"""Whether a step's reduction may begin while its last backward pass still runs, and whether that was right.

A gradient is final when autograd has accumulated it, unless the user's code changes it afterwards (clips it, calls
``backward`` once more). So the first step of a generation only watches: each worker tells in its head whether its
gradients stayed as autograd left them. If all did, the next step's exchange begins with the first gradients, which all
workers decide alike since they have read the same heads. If a step then surprises somebody, its head says so, and
all repeat the attempt with an exchange behind the heads. A model that does other things than before (freezes a layer,
skips a branch) surprises nobody: what was expected and does not come is zero, what comes unexpected is exchanged behind
the heads. Where gradients are many and small, nothing is watched: all set out together behind the backward pass, before
the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from virtualflow.accumulation import Accumulator
from virtualflow.collectives import Collectives
from virtualflow.pipeline import Early
from virtualflow.reduction import Reducer

_QUIET = 64
"""Exchanges after a surprise in which nothing begins early."""


class AttemptSpoiled(Exception):
    """A gradient changed after it had set out: all workers repeat the attempt, and wait for its end this time."""


class Overlap:
    """The early beginning of reductions, in one worker.

    Args:
        parameters: all of the model's; they are known by their place among them.
        reducer: that of the updates.
        worthwhile: whether gradients are so large that they should not wait for the heads.
        one_by_one: whether they are so large, each, that it pays to take it as soon as it is there: the first bucket
            sets out before the last is full, and the last addition writes the message. Else all are taken together
            behind the backward pass.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], reducer: Reducer, worthwhile: bool, one_by_one: bool
    ) -> None:
        self._parameters = parameters
        self._reducer = reducer
        self._worthwhile = worthwhile
        self._one_by_one = one_by_one
        self._hooks: list[RemovableHandle] = []
        self._expected: tuple[int, ...] = ()
        """What the last exchange of this generation reduced, if it showed that the next one may begin early."""
        self._quiet_until = 0
        self._early: Early | None = None
        self._deferred = False
        self._weight = 1.0
        self._watching = False
        self._seen: dict[int, tuple[Tensor, int]] = {}
        """Each gradient as autograd left it, with its version."""

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def abandon(self) -> None:
        """The attempt is void, or the next one begins."""
        self._watching = False
        self._seen.clear()
        if self._early is not None:
            self._early.abandon()
            self._early = None
            self._reducer.forget()  # what is under way may still write to its buffers

    def watch(
        self,
        collectives: Collectives,
        ranges: Sequence[range],
        accumulator: Accumulator,
        last: int,
        weight: float,
        scale: float | None,
    ) -> None:
        """The last virtual node of this worker's range is about to run.

        Args:
            collectives: the communicator; its members carry ``ranges``.
            ranges: see above.
            accumulator: the sums of the range but for the last virtual node.
            last: that one.
            weight: the factor of its gradients.
            scale: the factor of the sum over all; ``None``: not known before the heads.
        """
        self._watching, self._weight, self._deferred = collectives.size > 1, weight, scale is None
        if self._watching and self._worthwhile and self._one_by_one and not self._hooks:
            self._hook()
        if self._expected:
            self._early = self._reducer.begin(
                collectives, ranges, accumulator, last, self._parameters, self._expected, scale or 1.0
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
        self._seen[place] = (gradient, gradient._version)
        if self._early is not None and place in self._early.places:
            self._early.give(place, self._weighted(gradient))

    def _weighted(self, gradient: Tensor) -> Tensor:
        return gradient.detach() if self._weight == 1.0 else gradient.detach() * self._weight

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
        if self._weight != 1.0:
            for gradient in rest.values():
                if gradient is not None:  # they are the user's no more
                    gradient.detach().mul_(self._weight)
        self._early.give_rest({place: None if left is None else left.detach() for place, left in rest.items()})
        return self._early.places, steady

    # --- the exchange -------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        """Whether this attempt's exchange has begun already."""
        return self._early is not None

    @property
    def places(self) -> frozenset[int]:
        """What is under way."""
        return frozenset() if self._early is None else self._early.places

    def heads(self, block: Tensor) -> Tensor:
        """Exchange the heads behind what is under way."""
        assert self._early is not None
        return self._early.heads(block)

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
            if steady and self._deferred and scale != 1.0:
                for tensor in found.values():
                    tensor.mul_(scale)
            if steady:
                yield found, early.complete
        self._early = None
        if not steady:
            raise AttemptSpoiled

    def learn(self, exchange: int, reduced: Iterable[int], steady: bool) -> None:
        """All workers know the same of an exchange: how the next one begins.

        Args:
            exchange: its number.
            reduced: what it reduced.
            steady: whether all workers' gradients stayed as autograd left them.
        """
        if not steady:
            self._quiet_until = exchange + _QUIET
        ready = steady and self._worthwhile and exchange >= self._quiet_until
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
