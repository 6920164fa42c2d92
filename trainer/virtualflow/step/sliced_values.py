"""The values of the parameters of which one worker keeps a share: slices at rest, whole while a block needs them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from virtualflow.errors import ConfigurationError
from virtualflow.reduction import Row, Spans, Stretch
from virtualflow.state import StayingHook
from virtualflow.step.meta_parameters import MetaModel, hollow


class SlicedValues:
    """The values of what one worker keeps of a row of parameters; at first of everything.

    A parameter that is here as a whole is where it always was. Of another one there are slices, and memory for the
    whole while a block needs it; else it shows NaN, so that whoever looks at it then does not go wrong in silence.

    Args:
        meta: makes those that have no values yet, as far as they are kept; ``None``: all have values.

    Raises:
        ConfigurationError: a parameter lies in memory in such a way that it cannot be taken apart.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[nn.Parameter], row: Row, meta: MetaModel | None = None
    ) -> None:
        self._parameters = parameters
        self._row = row
        self.spans: Spans = row.all
        self._meta = meta
        unmade = frozenset[int]() if meta is None else meta.places
        for place, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
            if place not in unmade and not _is_dense(parameter):
                raise ConfigurationError(
                    f"parameter {name} has gaps in memory, so its values cannot be divided; make it contiguous, or "
                    'leave out shard="parameters"'
                )
        self._whole = [parameter.data for parameter in parameters]
        self._hollow = [hollow(parameter, parameter.device) for parameter in parameters]
        self._slices: list[dict[Stretch, Tensor]] = [{} for _ in parameters]
        self._here = set(range(len(parameters))) - unmade
        """Places of parameters that are kept as a whole."""
        for place in unmade:
            of = parameters[place]
            self._whole[place] = torch.empty(of.shape, dtype=of.dtype, device=of.device)
            self.free(place)
        self._tidy = not unmade
        """Whether what is here is what was last to be kept."""

    @property
    def is_whole(self) -> bool:
        """Whether all of them are here."""
        return len(self._here) == len(self._parameters)

    def is_kept(self, place: int) -> bool:
        """Whether the whole parameter is."""
        return place in self._here

    def read(self, piece: Stretch) -> Tensor:
        """The values of what is kept, ``[n]`` or, of a whole parameter, in its shape; they may be shared."""
        place, begin, end = piece
        if place in self._here:
            whole = self._whole[place]
            return whole if self._row.is_whole(piece) else in_memory(whole)[begin:end]
        slices = self._slices[place]
        if piece in slices:
            return slices[piece]
        parts = [
            value[max(begin, at.begin) - at.begin : min(end, at.end) - at.begin]
            for at, value in sorted(slices.items(), key=lambda item: item[0])
            if at.begin < end and begin < at.end
        ]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.as_strided(*_layout(self._whole[place])) if self._row.is_whole(piece) else joined

    def put(self, piece: Stretch, value: Tensor) -> None:
        """Values have come, ``[n]`` or in the parameter's shape; they count with the next :meth:`keep`."""
        place, begin, end = piece
        if place in self._here:
            in_memory(self._whole[place])[begin:end].copy_(in_memory(value))
        else:
            self._slices[place][piece] = in_memory(value).to(self._whole[place].device, copy=True)
        self._tidy = False

    def keep(self, spans: Spans) -> None:
        """Forget what is not within ``spans``, all of which is here, and free its memory."""
        if self._tidy and spans == self.spans:
            return
        pieces: list[list[Stretch]] = [[] for _ in self._parameters]
        for piece in self._row.pieces(spans):
            pieces[piece.place].append(piece)
        if self._meta is not None:
            self._make(self._meta, pieces)
            self._meta = None  # from now on somebody has them
        for place, kept in enumerate(pieces):
            if any(map(self._row.is_whole, kept)):
                if place not in self._here:
                    self.open(place)
                    self._here.add(place)
                    self._slices[place] = {}
                    self.show(place)
                continue
            slices = {piece: self.read(piece).clone(memory_format=torch.contiguous_format) for piece in kept}
            self._slices[place] = slices
            self._give_up(place)
            self.free(place)
        self.spans, self._tidy = spans, True

    def _give_up(self, place: int) -> None:
        if place in self._here:
            self._here.discard(place)
            # Memory that numpy has once seen cannot be given back while its tensor lives.
            self._parameters[place].data = self._hollow[place]
            self._whole[place] = self.like(place)

    def _make(self, meta: MetaModel, pieces: Sequence[Sequence[Stretch]]) -> None:
        """Make what is to be kept of parameters that nobody has yet, one module after the other."""
        left = {place for place in meta.places if pieces[place] and not self._slices[place]}
        for module in meta.needed(frozenset(left)):
            for place in module.places:
                if place in self._here:  # another module has made it
                    self._parameters[place].data = self.like(place)
                else:
                    self.open(place)
                    self.show(place)
            meta.make(module)
            for place in module.places:
                if place in left and any(map(self._row.is_whole, pieces[place])):
                    self._here.add(place)
                elif place in left:
                    whole = in_memory(self._whole[place])
                    self._slices[place] = {piece: whole[piece.begin : piece.end].clone() for piece in pieces[place]}
                left.discard(place)
                if place in self._here:
                    self.show(place)
                self.free(place)

    def forget(self) -> None:
        """Let nothing be here, because other values come."""
        self._meta = None
        for place in range(len(self._parameters)):
            self._slices[place] = {}
            self._give_up(place)
            self.free(place)
        self.spans, self._tidy = (), False

    def reopen(self) -> None:
        """Let every parameter be here as a whole, with any content, because a whole state comes."""
        self._meta = None
        for place in range(len(self._parameters)):
            if place not in self._here:
                self._slices[place] = {}
                self.zero(place)
                self.show(place)
                self._here.add(place)
        self.spans, self._tidy = self._row.all, False

    # --- for a block --------------------------------------------------------------------------------------------------

    def open(self, place: int) -> None:
        """Make memory for a parameter that is not kept as a whole, with what is here of it."""
        whole = self._whole[place]
        whole.untyped_storage().resize_(whole.nbytes)
        for piece, value in self._slices[place].items():
            self.fill(piece, value)

    def fill(self, piece: Stretch, value: Tensor) -> None:
        """Write values into the memory of a parameter that is open."""
        in_memory(self._whole[piece.place])[piece.begin : piece.end].copy_(in_memory(value))

    def show(self, place: int) -> None:
        """Let the model see what was filled in."""
        self._parameters[place].data = self._whole[place]

    def zero(self, place: int) -> None:
        whole = self._whole[place]
        whole.untyped_storage().resize_(whole.nbytes)
        whole.zero_()

    def free(self, place: int) -> None:
        if place not in self._here:
            self._parameters[place].data = self._hollow[place]
            self._whole[place].untyped_storage().resize_(0)

    def memory(self) -> list[Tensor]:
        """All memory that parameters may show, with some or none in it."""
        return [*self._whole, *self._hollow]

    def like(self, place: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for something of the whole parameter's, laid out as that is; of its type unless another is wanted."""
        dtype = dtype or self.dtype(place)
        return torch.empty_strided(*_layout(self._whole[place]), dtype=dtype, device=self.device(place))

    def dtype(self, place: int) -> torch.dtype:
        return self._whole[place].dtype

    def device(self, place: int) -> torch.device:
        return self._whole[place].device

    def as_laid_out(self, place: int, gradient: Tensor) -> Tensor:
        """A gradient of the whole parameter in the order in which that lies in memory, ``[n]``."""
        if gradient.stride() != self._whole[place].stride():
            gradient = self.like(place).copy_(gradient)
        return in_memory(gradient)


def refuse_reading(module: nn.Module, values: SlicedValues, what: str) -> None:
    """Let ``state_dict()`` of a module raise in a script that would take NaN for what other workers keep.

    It stays so behind the run: what is not here then does not come any more. The library knows what the values are.
    """

    def refuse(*_: object) -> None:
        if values.is_whole:
            return
        frame: FrameType | None = sys._getframe(2)  # whoever has called torch, which has called the hook
        while frame is not None and _module_of(frame).startswith("torch."):
            frame = frame.f_back
        if frame is None or not _module_of(frame).startswith("virtualflow."):
            raise ConfigurationError(
                f'{what} would have NaN for what other workers keep (shard="parameters"); write a checkpoint, and '
                "read it by virtualflow export"
            )

    _before_reading(module, StayingHook(refuse))


_before_reading: Callable[[nn.Module, Callable[..., None]], RemovableHandle] = nn.Module.register_state_dict_pre_hook


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def in_memory(tensor: Tensor) -> Tensor:
    """The elements of a dense tensor in the order in which they lie in memory, ``[n]``."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _layout(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...]]:
    return tensor.shape, tensor.stride()


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda each: each[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True
