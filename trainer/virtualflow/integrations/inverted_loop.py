"""Steps for scripts that drive the loop by themselves: ``for batch in loader: ...; backward(loss); optimizer.step()``.

The body of such a loop runs once for each micro-batch. Its ``optimizer.step()`` asks for the next one. If there is
none, the step has been made by then, and the rest of the body finds the new weights, as in a plain loop. If there is
one, since this worker has more virtual nodes, or an attempt is repeated, nothing has happened yet. So every body calls
it, once.

All workers run the code behind a step that was made. One that had no sample in it gets a micro-batch on loan, and what
comes of that is forgotten.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.settings import ENV_COORDINATOR
from virtualflow.worker.run import Run, active_loop
from virtualflow.worker.step import Step

_NONE = object()


class InvertedLoop:
    """The run of a script that drives its loop.

    Args:
        make: makes the run, given the number of epochs and of steps.
        lend: gives a micro-batch of this worker's dataset that no step has asked for.
    """

    def __init__(self, make: Callable[[int, int | None], Run], lend: Callable[[], Any]) -> None:
        self._make, self._lend = make, lend
        self._run: Run | None = None
        self._steps: Iterator[Step] = iter(())
        self._inner: Iterator[Any] | None = None
        self._step: Step | None = None
        self._epoch = self._iterated = -1
        """The epoch that the script is in, and the last one whose micro-batches it has asked for."""
        self._next: Any = _NONE
        """The micro-batch that the coming body gets."""
        self._on_loan: list[tuple[Tensor, Tensor | None, bool]] | None = None
        """What a micro-batch on loan must leave as it was: buffers, and parameters with their gradients, each with
        whether it is trained."""
        self._asked = True
        """Whether the present body has called ``optimizer.step()``."""
        self.stepped = True
        """Whether that has made the step: the script stands between two steps, where all workers are alike."""
        self._leads, self._place = ENV_COORDINATOR not in os.environ, {"step": 0, "steps_per_epoch": 0}
        """As long as there is no run."""
        self._former_hook = sys.excepthook

    # --- what the script asks -----------------------------------------------------------------------------------------

    @property
    def run(self) -> Run:
        """The run.

        Raises:
            ConfigurationError: the script has not begun it, or has ended it.
        """
        if self._run is None:
            raise ConfigurationError(
                "the training has no epochs yet, or is over; let the loop over the epochs be "
                "'for epoch in ....epochs(count):', on what came from virtualflow.integrations"
            )
        return self._run

    @property
    def leader(self) -> bool:
        """Whether this worker is the one that writes and prints; also when all is over."""
        return self._leads if self._run is None else self._run.leader

    @property
    def place(self) -> dict[str, int]:
        """How far the training is, for a state of the script's own to bear; also when all is over."""
        if self._run is None:
            return self._place
        steps_per_epoch = self._run._context.loading.steps_per_epoch
        return {"step": self._run.completed_steps, "steps_per_epoch": steps_per_epoch or 0}

    def begin_at(self, place: dict[str, int]) -> None:
        """Begin where that was: the script has loaded the state that bears it, alike on all workers."""
        self._place = place

    @property
    def step_under_way(self) -> Step | None:
        """The step that the body's micro-batch counts for, if it does."""
        return None if self._on_loan is not None else self._step

    def refuse_behind_step(self) -> None:
        """See that the body has a micro-batch for which ``optimizer.step()`` is still to be called."""
        _ = self.run
        if self._asked:
            raise ConfigurationError(
                "backward() was called behind optimizer.step(), or outside of the loop; call it before"
            )

    def refuse_before_step(self, what: str) -> None:
        """See that the script stands between two steps."""
        if self._run is not None and not self.stepped:
            raise ConfigurationError(
                f"{what} was called in the middle of a step, where workers differ; call it behind optimizer.step() "
                "once the step is made, or behind the loop over the micro-batches"
            )

    # --- the loops ----------------------------------------------------------------------------------------------------

    def epochs(self, count: int, steps: int | None = None) -> Iterator[int]:
        """Yield the epochs that remain, from 0: a worker that joins begins with the present one.

        Args:
            count: of the whole training.
            steps: the most optimizer updates of it.
        """
        if self._run is not None:
            raise ConfigurationError("epochs() was called twice; a training has one loop over its epochs")
        run = self._make(count, steps)
        run.__enter__()
        self._run, self._steps, self._former_hook = run, iter(run), sys.excepthook
        sys.excepthook = self._report
        atexit.register(self.finish)
        with self._closing():
            self._go_to(self._place)
        while self._begin_step():
            epoch = run._context.training.position[0]
            if epoch == self._epoch:
                raise ConfigurationError(
                    f"the loop over the micro-batches of epoch {epoch} was left before its end; to stop early leave "
                    "the loop over the epochs, too, or pass steps= to epochs()"
                )
            self._epoch = epoch
            yield epoch
        self.finish()

    def micro_batches(self) -> Iterator[Any]:
        """Yield this worker's micro-batches of the present epoch.

        Raises:
            ConfigurationError: there is no epoch, or a body has not called ``optimizer.step()``.
        """
        context = self.run._context
        if self._iterated == self._epoch:
            raise ConfigurationError(
                f"the micro-batches of epoch {self._epoch} were iterated over twice; once is what an epoch is"
            )
        self._iterated = self._epoch
        while self._inner is not None or (context.training.position[0] == self._epoch and not context.training.is_over):
            self._begin_step()
            if self._next is _NONE and not self._advance():
                self._borrow()
            batch, self._next = self._next, _NONE
            self._asked = self.stepped = False
            self._seed()
            yield batch
            if not self._asked:
                raise ConfigurationError(
                    "optimizer.step() was not called for a micro-batch; call it for each, before the next one is asked "
                    "for: the update is made when those of all workers are there, and accumulates nothing beyond that"
                )

    def step(self, *, closure: bool = False) -> None:
        """What ``optimizer.step()`` does: ask for the next micro-batch; the step may be made by that.

        Raises:
            ConfigurationError: there is a closure, or no micro-batch that it could be for.
        """
        if closure:
            raise ConfigurationError("optimizer.step() got a closure, which would be computed by one worker; leave it")
        _ = self.run
        if self._asked:
            raise ConfigurationError(
                "optimizer.step() was called again, or before the first micro-batch; call it once for each of them"
            )
        self._asked = True
        if self._on_loan is not None:
            self._return_loan(self._on_loan)
        self.stepped = self._inner is None or not self._advance()

    def finish(self) -> None:
        """The training is over, or was left by ``break``."""
        if self._run is not None:
            self._leads = self._run.leader
            self._close(None)

    def _go_to(self, place: dict[str, int]) -> None:
        training, steps = self.run._context.training, self.place["steps_per_epoch"]
        if place["step"] and place["steps_per_epoch"] != steps:
            raise ConfigurationError(
                f"the state that was loaded has {place['steps_per_epoch']} steps in an epoch, and this training {steps}"
                "; go on with the same dataset and batch size"
            )
        if place["step"] and not training.completed_steps:  # no checkpoint of the library's own goes before
            training.begin_behind(place["step"], steps)

    # --- steps --------------------------------------------------------------------------------------------------------

    def _begin_step(self) -> bool:
        if self._inner is None:
            with self._closing():
                step = next(self._steps, None)
                if step is None:
                    return False
                self._step = step._bind()  # a joiner enters here: what it says of the epoch must be right
                self._inner = iter(step)
        return True

    def _advance(self) -> bool:
        assert self._inner is not None
        with self._closing():
            self._next = next(self._inner, _NONE)
        if self._next is _NONE:
            self._inner = None
        return self._inner is not None

    def _seed(self) -> None:
        """Let the body draw what belongs to its micro-batch, whatever the rest of the last one has drawn."""
        loop = active_loop()
        assert loop is not None
        loop.seed_script()

    def _borrow(self) -> None:
        """The step was made without this worker: let it go through the body all the same."""
        model = self.run._context.request.model
        kept: list[tuple[Tensor, Tensor | None, bool]] = [(buffer, buffer.clone(), False) for buffer in model.buffers()]
        for parameter in model.parameters():
            kept.append((parameter, parameter.grad, parameter.requires_grad))
            parameter.grad = None
        self._on_loan, self._next = kept, self._lend()

    def _return_loan(self, kept: list[tuple[Tensor, Tensor | None, bool]]) -> None:
        with torch.no_grad():
            for tensor, value, trained in kept:
                if isinstance(tensor, torch.nn.Parameter):
                    tensor.grad = value
                    tensor.requires_grad_(trained)
                elif value is not None:
                    tensor.copy_(value)
        self._on_loan = None
        self._seed()

    # --- the end ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Leave the run with whatever ends it: a drain, or an error of its own."""
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise

    def _close(self, error: BaseException | None) -> None:
        self._place = self.place
        run, self._run = self.run, None
        for under_way in (self._inner, self._steps):
            if isinstance(under_way, Generator):
                under_way.close()
        sys.excepthook = self._former_hook
        atexit.unregister(self.finish)
        run.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)

    def _report(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """The script ends by an error of its own: no ``with`` block hears of it."""
        former = self._former_hook
        if self._run is not None:
            self._leads = False
            try:
                self._close(error)
            except VirtualFlowError as failure:
                former(type(failure), failure, failure.__traceback__)
        former(kind, error, trace)
