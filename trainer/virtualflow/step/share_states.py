"""The optimizer's states that one worker keeps of a sharded optimizer: of whole parameters, and of slices of some.

The state of a whole parameter is where the optimizer has it. That of a slice is kept here, since to the optimizer the
slice is a parameter for no longer than a step takes. What a state has for each element, or for each block of some, is
cut with the elements. Anything else, such as a count of steps, is the same for all slices: ``elementwise`` has found
out which is which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from virtualflow.reduction import Row, Spans, Stretch, covers, difference, intersection, union
from virtualflow.state import cut_state, join_states, optimizers_of

State = dict[str, Any]


class ShareStates:
    """States of what stands in some spans of a row of parameters; at first of everything.

    Args:
        grains: for each parameter how its state is cut with it (``elementwise.Verdict``).
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        row: Row,
        grains: Sequence[Mapping[str, int]],
    ) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._row = row
        self._grains = grains
        self.spans: Spans = row.all
        """Of what the states are here."""
        self._borrowed: Spans = ()
        """What of it is here, in host memory, only to be written down."""
        self._slices: dict[int, dict[Stretch, State]] = {}
        """Those of slices, by the parameter's place; a parameter that was never stepped has none."""
        self._tidy = True
        """Whether slices that meet are one."""

    # --- what is here -------------------------------------------------------------------------------------------------

    def claim(self, spans: Spans) -> None:
        """The optimizer has states of whole parameters, of another origin: those of ``spans`` count, and no others."""
        self._slices.clear()
        self.spans, self._borrowed, self._tidy = self._row.all, (), False
        self.keep(spans)

    def keep(self, spans: Spans) -> None:
        """Forget what is not within ``spans``, and make one of slices that meet."""
        spans = intersection(self.spans, spans)
        if self._tidy and spans == self.spans:
            return
        states = {piece: self.read(piece) for piece in self._row.pieces(spans)}
        whole = {piece.place: state for piece, state in states.items() if self._row.is_whole(piece)}
        self._slices = {}
        for piece, state in states.items():
            if state is not None and not self._row.is_whole(piece):
                self._put_slice(piece, state)
        for place, parameter in enumerate(self._parameters):
            state = whole.get(place)
            if state is None:
                self._optimizer.state.pop(parameter, None)
            elif self._optimizer.state.get(parameter) is not state:
                self._optimizer.state[parameter] = state
        self.spans, self._borrowed, self._tidy = spans, intersection(self._borrowed, spans), True

    def put(self, states: Mapping[Stretch, State | None], spans: Spans, *, borrowed: bool) -> None:
        """States of what stands in ``spans`` have come; ``borrowed``: only to be written down, and in host memory."""
        for piece, state in states.items():
            if state is not None and self._row.is_whole(piece):
                self._optimizer.state[self._parameters[piece.place]] = state
            elif state is not None:
                self._put_slice(piece, state)
        self.spans, self._tidy = union(self.spans, spans), False
        if not borrowed:
            self.keep(self.spans)
            return
        self._borrowed = union(self._borrowed, spans)
        for place in self._slices:
            whole = Stretch(place, 0, self._row.numels[place])
            if covers(self.spans, self._row.span(place)) and (state := self.read(whole)) is not None:
                self._optimizer.state[self._parameters[place]] = state  # beside those of its slices

    def begin(self, states: Mapping[Stretch, State | None], spans: Spans) -> None:
        """States of what stands in ``spans`` have come from elsewhere: they count, and no others."""
        self._optimizer.state.clear()
        self._slices.clear()
        self.spans = self._borrowed = ()
        self.put(states, spans, borrowed=False)

    def drop_borrowed(self) -> None:
        if self._borrowed:
            self.keep(difference(self.spans, self._borrowed))

    def read(self, piece: Stretch) -> State | None:
        """The state of a slice, or of a whole parameter; it may be shared with what is kept."""
        slices = self._slices.get(piece.place, {})
        if piece in slices:
            return slices[piece]
        parts = [(slice_, slices[slice_]) for slice_ in sorted(slices) if _overlap(slice_, piece)]
        if not parts:
            parameter = self._parameters[piece.place]
            state = self._optimizer.state.get(parameter)
            if state is None or self._row.is_whole(piece):
                return state
            return self._cut(Stretch(piece.place, 0, parameter.numel()), state, piece)
        cut = [self._cut(slice_, state, piece) for slice_, state in parts]
        return cut[0] if len(cut) == 1 else self._join(cut, piece)

    def here(self) -> Iterator[State]:
        """All states that are here."""
        yield from self._optimizer.state.values()
        for slices in self._slices.values():
            yield from slices.values()

    def _put_slice(self, piece: Stretch, state: State) -> None:
        self._slices.setdefault(piece.place, {})[piece] = state

    def _cut(self, known: Stretch, state: State, piece: Stretch) -> State:
        """The state of what ``piece`` has of a stretch that has this state."""
        begin, end = max(piece.begin, known.begin) - known.begin, min(piece.end, known.end) - known.begin
        return cut_state(state, partial(self._grain, piece.place), begin, end, known.end - known.begin)

    def _join(self, states: Sequence[State], piece: Stretch) -> State:
        shape = self._parameters[piece.place].shape if self._row.is_whole(piece) else None
        return join_states(states, partial(self._grain, piece.place), shape)

    def grains(self, place: int, state: State) -> dict[str, int]:
        """For each tensor of a state how many elements of the parameter one of its own is for."""
        return {key: self._grain(place, key, value) for key, value in state.items() if isinstance(value, Tensor)}

    def _grain(self, place: int, key: str, value: Tensor) -> int:
        """How many elements one in this tensor of a state is for; 0: it is the same for all slices.

        One that the trial did not see, since it came into being later, is taken for what a state usually has.
        """
        return self._grains[place].get(key, 0 if value.numel() == 1 else 1)

    # --- a step -------------------------------------------------------------------------------------------------------

    def open(self, piece: Stretch, values: Tensor) -> nn.Parameter:
        """What the optimizer is to step for a piece: the parameter, or one that is a slice of it, in its memory.

        Args:
            values: this memory.
        """
        return self._parameters[piece.place] if self._row.is_whole(piece) else nn.Parameter(values)

    def step(self, gradients: Mapping[nn.Parameter, tuple[Stretch, Tensor]]) -> None:
        """Let the optimizer step what was opened; the states of all of it are here, of these very pieces."""
        slices: dict[int, list[tuple[Stretch, nn.Parameter]]] = {}
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, (piece, gradient) in gradients.items():
            parameter.grad = gradient.to(parameter.dtype)
            if not self._row.is_whole(piece):
                slices.setdefault(id(self._parameters[piece.place]), []).append((piece, parameter))
        for part in optimizers_of(self._optimizer):
            self._step_part(part, slices)

    def _step_part(
        self, optimizer: torch.optim.Optimizer, slices: Mapping[int, list[tuple[Stretch, nn.Parameter]]]
    ) -> None:
        groups = optimizer.param_groups
        before = [group["params"] for group in groups]
        mine = [each for parameters in before for parameter in parameters for each in slices.get(id(parameter), ())]
        for piece, view in mine:
            state = self._slices.get(piece.place, {}).get(piece)
            if state is not None:
                optimizer.state[view] = state
        try:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = [
                    each
                    for parameter in parameters
                    for each in ([view for _, view in slices.get(id(parameter), ())] or [parameter])
                ]
            optimizer.step()
        finally:
            for group, parameters in zip(groups, before, strict=True):
                group["params"] = parameters
            for piece, view in mine:
                state = optimizer.state.pop(view, None)
                if state is not None:
                    self._put_slice(piece, state)


def _overlap(left: Stretch, right: Stretch) -> bool:
    """Of one parameter."""
    return left.begin < right.end and right.begin < left.end
