"""What is done with gradients while a backward pass still runs, and whether that was right.

Two things can be. Within a worker, a virtual node's gradients are added to the sums before them as they come (``hot``):
no agreement is needed for that. Between workers, the reduction can begin with the last virtual node of each.

A gradient is final when autograd has accumulated it, unless the user's code changes it afterwards (clips it, calls
``backward`` once more). So the first step only watches (``handover``). If the gradients of a worker stayed as autograd
left them, its next attempts are hot. If a script then surprises it, it repeats its attempt: nothing has set out yet.
Each worker tells in its step header whether its gradients stayed as they were. If all did, the next step's reduction
begins with the first gradients of the last virtual nodes, which all workers decide alike since they have read the same
headers. If a step then surprises somebody, its header says so, and all repeat the attempt with a reduction behind the
headers. Where a worker computes block by block (layer-major order), the sums over all its virtual nodes set out block
by block in place of the last one's gradients, and nobody could have changed them. A model that does other things than
before (freezes a layer, skips a branch) surprises nobody: what was expected and does not come is zero, what comes
unexpected is added and reduced afterwards. Where gradients are many and small, nothing is watched: all set out together
behind the backward pass, before the headers. Whether it is worth it to begin a reduction early, the schedule of its
exchange says (``schedule``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from virtualflow.reduction.accumulation import Accumulator, Addition, Tensors, multiply
from virtualflow.reduction.buckets import Reach
from virtualflow.reduction.handover import UNWATCHED, Handover
from virtualflow.reduction.pipeline import Early
from virtualflow.reduction.reducer import Reducer
from virtualflow.reduction.settings import ReductionSettings
from virtualflow.transport import Collectives

_QUIET = 64
"""Synchronizations after a surprise in which nothing is done early."""


@dataclass(frozen=True)
class Settled:
    """What has come of a virtual node's gradients by the end of its backward pass; the others are in ``.grad``."""

    sent: frozenset[int] = frozenset()
    """Places that have set out, also those at which it has none."""
    added: Mapping[int, Tensor] = field(default_factory=dict)
    """Sums that they have been added to as they came, by place."""
    gone: frozenset[int] = frozenset()
    """Places at which ``.grad`` does not hold them any more."""


_UNTOUCHED = Settled()


class AttemptSpoiled(Exception):
    """A gradient was looked at or changed after it had been added up or had set out: the attempt is repeated without.

    By all workers if it comes out of a synchronization, else by this one alone.
    """


class Overlap:
    """What one worker does with gradients before a backward pass has ended.

    Args:
        templates: of the sums of each parameter's gradients, as :meth:`Reducer.reduce` gets them.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        templates: Sequence[Tensor],
        reducer: Reducer,
        settings: ReductionSettings,
    ) -> None:
        self._parameters = parameters
        self._templates = templates
        self._reducer = reducer
        size = sum(p.numel() * p.itemsize for p in parameters)
        self.one_by_one = size >= settings.one_by_one * len(parameters) and len({p.device for p in parameters}) == 1
        """Whether they are so large, each, that it pays to take it as soon as it is there: additions find it in a
        cache, the first bucket sets out before the last is full, and the last addition writes the message. Else all
        are taken together behind the backward pass; so are those of several devices, for each of which autograd has a
        thread that calls hooks."""
        self._handover = Handover(parameters)
        self._expected: tuple[int, ...] = ()
        """What the last step of this generation reduced, if it showed that the next one may begin early."""
        self._quiet_until = 0
        self._cold_until = 0
        """The same for what this worker does by itself."""
        self._learned = False
        """Whether this worker's gradients have been seen to stay as autograd left them."""
        self._surprised = False
        self._hot = False
        self._watched = self._all_steady = False
        """Of the present attempt, up to the last virtual node that has run."""
        self.steady = True
        """Of that virtual node: whether its gradients stayed as they were left, if they were watched."""
        self.early: Early | None = None
        self._addition: Addition | None = None
        self._deferred = False
        self.running = False
        self._hands_over = False
        """Whether the handover has to do with the gradients of the virtual node that runs."""

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def begin(self, *, resumes: bool) -> None:
        """An attempt begins.

        Args:
            resumes: whether with sums of another one, which could not be made once more.
        """
        self.abandon()
        if self.one_by_one:
            self._handover.hook()
        self._hot = self._learned and not resumes
        self._watched, self.steady, self._all_steady = False, True, True

    def abandon(self) -> None:
        self.running = False
        self._reducer.abandon()
        if self._hands_over:
            self._hands_over = False
            self._handover.end()
        self._addition = None
        if self.early is not None:
            self.early.pipeline.abandon()
            self.early = None
            self._reducer.forget()  # what is under way may still write to its buffers

    def watch(
        self,
        accumulator: Accumulator,
        virtual_node: int,
        *,
        count: int = 1,
        weight: float,
        plain: bool = False,
        told: bool = False,
    ) -> None:
        """A virtual node is about to run: add up its gradients as they come, if it is known that this is right.

        Args:
            plain: whether they are to be seen in ``.grad``.
            told: whether others are told if they stay as they are.
        """
        self.running = True
        if self._hot:
            addition = accumulator.prepare(virtual_node, count, weight=weight)
            self._addition = addition if addition.merged else None
        adds = self._addition is not None
        # Gradients that become a sum as they are need nobody's attention, once their script is known.
        if self.one_by_one and (adds or told or not self._hot):
            self._handover.begin(self._addition, plain=plain or (self._hot and not adds))
            self._watched = self._hands_over = True

    def watch_last(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        accumulator: Accumulator,
        *,
        last: int,
        count: int = 1,
        weight: float,
        scale: float | None,
        plain: bool = False,
        reach: Reach | None = None,
    ) -> None:
        """The same for the last virtual node of this worker's range, with which the reduction may begin.

        Args:
            scale: the factor of the sum over all; ``None``: not known before the headers.
            plain: whether they are to be seen in ``.grad``.
            reach: see :meth:`Reducer.reduce`.
        """
        self._begin_early(
            collectives, holdings, accumulator, last=last, count=count, weight=weight, scale=scale, reach=reach
        )
        if self.early is None:
            # Others need to know of gradients that could set out early in a step to come.
            told = self.one_by_one and self._reducer.overlaps(collectives, holdings, self._templates, reach)
            self.watch(accumulator, last, count=count, weight=weight, plain=plain, told=told)
            return
        self.running = True
        if self.one_by_one:
            # Until it is known that the script looks at none, it gets to see all.
            self._handover.begin(self.early, plain=plain or not self._hot)
            self._watched = self._hands_over = True

    def watch_together(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        accumulator: Accumulator,
        *,
        last: int,
        scale: float | None,
    ) -> None:
        """All virtual nodes of this worker are about to run together, none of whose gradients a script sees."""
        self._begin_early(collectives, holdings, accumulator, last=last, weight=1.0, scale=scale)
        self.running = True

    def give_sums(self, places: Sequence[int], rows: Sequence[Tensors]) -> None:
        """The sums over all of them at some places are complete; those that set out are taken out of ``rows``."""
        if self.early is not None:
            self.early.give_sums(places, rows)

    def _begin_early(
        self,
        collectives: Collectives,
        holdings: Sequence[Sequence[int]],
        accumulator: Accumulator,
        *,
        last: int,
        count: int = 1,
        weight: float,
        scale: float | None,
        reach: Reach | None = None,
    ) -> None:
        self._deferred = scale is None
        if self._expected:
            self.early = self._reducer.begin(
                collectives,
                holdings,
                accumulator,
                last=last,
                count=count,
                weight=weight,
                templates=self._templates,
                places=self._expected,
                scale=scale,
                reach=reach,
            )

    def weigh(self, weight: float) -> None:
        """The virtual node that runs counts by a factor that its script has told only now.

        Those of its gradients that were handed over before count as changed behind the backward pass. So do all that
        set out with a scale that goes by samples.
        """
        if not self.running:
            return
        if self.begun or (self.early is not None and not self._deferred):
            self._handover.unsettle()
            self._hands_over = True
        elif self.early is not None:
            self.early.weigh(weight)
        elif self._addition is not None:
            self._addition.weight = weight

    @property
    def torn(self) -> bool:
        """Whether some places of a sum may be ahead of others."""
        return self.running and (self.early is not None or (self._addition is not None and bool(self._addition.sums)))

    def settle(self) -> Settled:
        addition, early, self._addition, self.running = self._addition, self.early, None, False
        found = self._handover.end() if self._hands_over else UNWATCHED
        self._hands_over = False
        self.steady, self._all_steady = found.steady, self._all_steady and found.steady
        if not found.steady and (addition is not None or early is not None):
            self._surprised, self._hot, self._learned = True, False, False
        if addition is not None:
            if not found.steady:
                raise AttemptSpoiled
            return Settled(frozenset(), addition.sums, found.gone)
        if early is None:
            return _UNTOUCHED
        rest = {place: self._parameters[place].grad for place in early.missing}
        # What has not set out yet is the user's no more, and is used up.
        early.give_rest({place: None if left is None else left.detach() for place, left in rest.items()})
        return Settled(early.places, {}, found.gone)

    @property
    def begun(self) -> bool:
        return self._hands_over and self._handover.begun

    # --- the reduction ------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> bool:
        return self.early is not None

    @property
    def places(self) -> frozenset[int]:
        return frozenset() if self.early is None else self.early.places

    def headers(self, block: Tensor) -> Tensor:
        assert self.early is not None
        return self.early.pipeline.exchange_headers(block)

    def results(self, scale: float, steady: bool) -> Iterator[tuple[dict[int, Tensor], bool]]:
        """Wait for what is under way: sums by place, bucket by bucket, and whether the others are there, too.

        Args:
            steady: whether all workers' gradients stayed as they were.

        Raises:
            AttemptSpoiled: they did not.
        """
        early = self.early
        if early is None:
            return
        for found in early.results():
            if steady:
                multiply(found.values(), scale if self._deferred else 1.0)
                yield found, early.pipeline.complete
        self.early = None
        if not steady:
            raise AttemptSpoiled

    def await_all(self) -> None:
        """Wait for what is under way, and forget what it brings: nothing of it is used."""
        if self.early is not None:
            for _ in self.early.results():
                pass
            self.early = None

    def learn(self, number: int, reduced: Iterable[int], steady: bool) -> None:
        if not steady:
            self._quiet_until = number + _QUIET
        ready = steady and number >= self._quiet_until
        # A backward pass finishes them roughly in the reverse order of their registration.
        self._expected = tuple(sorted(reduced, reverse=True)) if ready else ()
        if self._surprised:
            self._surprised, self._cold_until = False, number + _QUIET
        if self._watched:
            self._learned = self._all_steady and number >= self._cold_until

    def enter(self) -> None:
        self.abandon()
        self._expected, self._quiet_until = (), 0

    def close(self) -> None:
        self.abandon()
        self._reducer.close()
        self._handover.unhook()
