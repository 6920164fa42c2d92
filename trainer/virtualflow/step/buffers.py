"""What every virtual node of a step starts from alike: the model's buffers, and which parameters are trained.

What each has changed is collected, and put back for the next one.

A buffer of numbers that can be averaged (batch norm's statistics) is exchanged like a gradient; any other travels in
the header, and one worker's counts. What the script has named as a sum is added up.

``requires_grad`` is treated as a buffer is, where a script freezes and unfreezes parameters in the inner loop: after
the step, what the first virtual node has left holds. So it depends on no worker which parameters a virtual node trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import compress
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from virtualflow.errors import ConfigurationError
from virtualflow.reduction import Summation
from virtualflow.step.header import Schema, StepHeader, numbered

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size, types as which the bits of others can be compared."""
SUMMED_AS = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Types in which a buffer is averaged that are not its own: half precision would overflow, and lose most of a sum."""
_NONE: frozenset[int] = frozenset()
_trained = attrgetter("requires_grad")


@dataclass
class _Buffer:
    module: nn.Module
    attribute: str
    tensor: Tensor
    baseline: Tensor

    def differs(self) -> bool:
        """Whether the module's present value is another one than the baseline.

        By content: batch norm's kernels write to its statistics without raising the tensor's version counter.
        """
        present = self.module._buffers[self.attribute]
        return present is not self.tensor or not _same_bytes(self.tensor, self.baseline)

    def has_grown(self) -> bool:
        present = self.module._buffers[self.attribute]
        cache = self.attribute in self.module._non_persistent_buffers_set
        return cache and present is not None and present.shape != self.tensor.shape

    def keep(self) -> None:
        """Let a cache that has grown stay, because its module remembers elsewhere how far it reaches."""
        present = self.module._buffers[self.attribute]
        self.tensor = self.tensor if present is None else present
        self.baseline = self.tensor.detach().clone()

    def put(self, value: Tensor) -> None:
        with torch.no_grad():
            self.tensor.copy_(value)
        self.module._buffers[self.attribute] = self.tensor


@dataclass(frozen=True)
class _Routine:
    """What :meth:`BufferTracker.collect` does as long as every buffer of a schema is changed in its place."""

    schema: Schema
    buffers: list[_Buffer]
    """Of the schema: the averaged ones, then the copied ones."""
    others: list[_Buffer]
    tensors: list[Tensor]
    baselines: list[Tensor]

    def applies(self) -> bool:
        """Whether nothing else has happened, and autograd takes no notice of what is done to them."""
        for buffer in self.buffers:
            if buffer.module._buffers[buffer.attribute] is not buffer.tensor or buffer.tensor.requires_grad:
                return False
        return not (self.others and any(_differ(self.others)))

    def collect(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        middle, found = len(self.schema.averaged), []
        for names, kind in ((self.schema.averaged, slice(middle)), (self.schema.copied, slice(middle, None))):
            values = []
            if names:
                # Of one type, as they mostly are, all are copied at once.
                tensors = self.tensors[kind]
                values = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
                torch._foreach_copy_(values, tensors)
                torch._foreach_copy_(tensors, self.baselines[kind])
            found.append(dict(zip(names, values, strict=True)))
        return found[0], found[1]


class BufferTracker:
    """Lets every virtual node start from the same buffers, and collects what it changed."""

    def __init__(self, model: nn.Module, sums: Sequence[str] = ()) -> None:
        self.begun = False
        """Whether an attempt at the coming step has begun. Before, buffers hold what a donor, or the script's code
        after a step, has left in them, and no baseline has that: nothing is to be put back."""
        self._routine: _Routine | None = None
        self._buffers: dict[str, _Buffer] = {}
        self._modules = list(model.named_modules())
        self._ties: list[tuple[str, nn.Module, str, str]] = []
        """Further places of a tensor: the name, the module and its attribute, and the name of the first place."""
        self._tied_names: set[str] = set()
        seen: dict[int, str] = {}
        for prefix, module in self._modules:
            for attribute, tensor in module._buffers.items():
                if tensor is None:
                    continue
                name = f"{prefix}.{attribute}" if prefix else attribute
                if id(tensor) in seen:
                    self._ties.append((name, module, attribute, seen[id(tensor)]))
                    self._tied_names.add(name)
                    continue
                seen[id(tensor)] = name
                self._buffers[name] = _Buffer(module, attribute, tensor, tensor.detach().clone())
        self._sums = {name: self._buffers[name] for name in sums}
        self.sums: Sequence[str] = tuple(self._sums)

    def begin(self) -> None:
        """Take the present values as those that every virtual node of the coming step starts from."""
        self.begun = True
        buffers = list(self._buffers.values())
        for buffer, differs in zip(buffers, _differ(buffers), strict=True):
            if differs:
                present = buffer.module._buffers[buffer.attribute]
                buffer.tensor = buffer.tensor if present is None else present
                buffer.baseline = buffer.tensor.detach().clone()
                self._routine = None

    def collect(self, schema: Schema) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """New values of (averaged, copied) buffers after a virtual node, and the baseline put back.

        Buffers of the schema are always among them; the values are copies.
        """
        if not self._buffers:
            return {}, {}
        routine = self._routine
        if routine is None or routine.schema is not schema:
            routine = self._routine = self._prepare(schema)
        if routine.applies():
            return routine.collect()
        self._routine = None
        averaged: dict[str, Tensor] = {}
        copied: dict[str, Tensor] = {}
        in_place: list[_Buffer] = []
        values: list[Tensor] = []
        known = {*schema.averaged, *schema.copied}
        differing = _differ(list(self._buffers.values()))
        for (name, buffer), differs in zip(self._buffers.items(), differing, strict=True):
            if name in self._sums or (name not in known and not differs):
                continue
            present = buffer.module._buffers[buffer.attribute]
            target = averaged if _averages(buffer.tensor) else copied
            if present is buffer.tensor:
                target[name] = torch.empty_like(present, memory_format=torch.contiguous_format)
                in_place.append(buffer)
                values.append(target[name])
                continue
            value = buffer.baseline if present is None else present.detach()
            if value.shape != buffer.tensor.shape:
                if buffer.attribute not in buffer.module._non_persistent_buffers_set or name in known:
                    raise _reshaped(name, buffer, value)
                buffer.keep()
                continue
            target[name] = value.to(buffer.tensor.dtype, copy=True).reshape(buffer.tensor.shape)
            buffer.put(buffer.baseline)
        if in_place:
            with torch.no_grad():
                torch._foreach_copy_(values, [buffer.tensor for buffer in in_place])
                torch._foreach_copy_([buffer.tensor for buffer in in_place], [buffer.baseline for buffer in in_place])
        return averaged, copied

    def collect_sums(self) -> dict[str, Tensor]:
        """By how much a virtual node has changed those that are added up; the baseline is put back."""
        changes = {}
        for name, buffer in self._sums.items():
            if not buffer.differs():
                continue
            present = buffer.module._buffers[buffer.attribute]
            value = buffer.baseline if present is None else present.detach()
            if value.shape != buffer.tensor.shape:
                raise _reshaped(name, buffer, value)
            dtype = SUMMED_AS.get(buffer.tensor.dtype, buffer.tensor.dtype)
            changes[name] = value.to(dtype) - buffer.baseline.to(dtype)
            buffer.put(buffer.baseline)
        return changes

    @property
    def sum_templates(self) -> list[Tensor]:
        """One tensor for each of those that are added up: without content, of its shape and its changes' type."""
        return [
            torch.empty(tensor.shape, dtype=SUMMED_AS.get(tensor.dtype, tensor.dtype), device="meta")
            for tensor in (buffer.tensor for buffer in self._sums.values())
        ]

    def added(self, changes: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            name: (buffer.baseline.to(change.dtype) + change.to(buffer.baseline.device)).to(buffer.tensor.dtype)
            for (name, buffer), change in zip(self._sums.items(), changes, strict=True)
        }

    def counts_silently(self, name: str) -> bool:
        """Whether one virtual node's change of a buffer is to count: batch norm's count of its own calls."""
        return self._buffers[name].attribute == "num_batches_tracked"

    def is_statistic(self, name: str) -> bool:
        """Whether a buffer is known to be one whose mean over virtual nodes is right: those of torch's own modules."""
        module = self._buffers[name].module
        return isinstance(module, nn.modules.batchnorm._NormBase) or type(module).__module__.startswith("torch.")

    def _prepare(self, schema: Schema) -> _Routine:
        known = (*schema.averaged, *schema.copied)
        buffers = [self._buffers[name] for name in known]
        others = [buffer for name, buffer in self._buffers.items() if name not in known and name not in self._sums]
        return _Routine(schema, buffers, others, [b.tensor for b in buffers], [b.baseline for b in buffers])

    def refuse_strangers(self) -> None:
        """Refuse what no virtual node could start anew from: buffers that came, and tied ones that were replaced."""
        for prefix, module in self._modules:
            for attribute, tensor in module._buffers.items():
                name = f"{prefix}.{attribute}" if prefix else attribute
                if tensor is None or name in self._buffers or name in self._tied_names:
                    continue
                if attribute not in module._non_persistent_buffers_set:
                    raise ConfigurationError(
                        f"buffer {name} has come since vf.elastic got the model, so virtual nodes cannot start from "
                        "the same value; register it with a tensor before, or with persistent=False if it is a cache"
                    )
        for name, module, attribute, first in self._ties:
            if module._buffers.get(attribute) is not self._buffers[first].tensor:
                raise ConfigurationError(
                    f"buffer {name} shares its tensor with {first} and was replaced; change it in place"
                )

    def changed(self, values: Mapping[str, Tensor]) -> set[str]:
        same = _same(list(values.values()), [self._buffers[name].baseline for name in values])
        return {name for name, equal in zip(values, same, strict=True) if not equal}

    def baseline(self, name: str) -> Tensor:
        return self._buffers[name].baseline.clone()

    def restore(self) -> None:
        for buffer in self._buffers.values():
            if buffer.has_grown():
                buffer.keep()
            elif buffer.differs():
                buffer.put(buffer.baseline)

    def commit(self, values: Mapping[str, Tensor]) -> None:
        if not values:
            return
        buffers = [self._buffers[name] for name in values]
        shaped = [value.reshape(buffer.tensor.shape) for buffer, value in zip(buffers, values.values(), strict=True)]
        with torch.no_grad():
            torch._foreach_copy_([buffer.baseline for buffer in buffers], shaped)
            torch._foreach_copy_([buffer.tensor for buffer in buffers], [buffer.baseline for buffer in buffers])
        for buffer in buffers:
            buffer.module._buffers[buffer.attribute] = buffer.tensor

    def templates(self, names: Sequence[str]) -> list[Tensor]:
        return [self._buffers[name].tensor for name in names]

    def copied_bytes(self, schema: Schema) -> int:
        return sum(tensor.nbytes for tensor in self.templates(schema.copied))

    def read_copied(self, schema: Schema, raw: bytes) -> dict[str, Tensor]:
        values, at = {}, 0
        for name, tensor in zip(schema.copied, self.templates(schema.copied), strict=True):
            part = bytearray(raw[at : at + tensor.nbytes])
            at += tensor.nbytes
            if part:
                values[name] = torch.frombuffer(part, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
        return values


def _reshaped(name: str, buffer: _Buffer, value: Tensor) -> ConfigurationError:
    return ConfigurationError(
        f"buffer {name} has changed its shape from {list(buffer.tensor.shape)} to {list(value.shape)} in a forward "
        "pass, so virtual nodes cannot be averaged; give it its shape from the start"
    )


def _averages(tensor: Tensor) -> bool:
    """Whether virtual nodes' values of that type are averaged (float8 has no addition)."""
    return (tensor.is_floating_point() and tensor.dtype.itemsize > 1) or tensor.is_complex()


def _differ(buffers: Sequence[_Buffer]) -> list[bool]:
    if not buffers or buffers[0].tensor.is_cpu:
        return [buffer.differs() for buffer in buffers]
    here = [buffer for buffer in buffers if buffer.module._buffers[buffer.attribute] is buffer.tensor]
    same = dict(zip(map(id, here), _same([b.tensor for b in here], [b.baseline for b in here]), strict=True))
    return [not same.get(id(buffer), False) for buffer in buffers]


def _same(left: Sequence[Tensor], right: Sequence[Tensor]) -> list[bool]:
    """:func:`_same_bytes` of each pair; on an accelerator the host waits once, and not for each of them."""
    pairs = list(zip(left, right, strict=True))
    if not pairs or left[0].is_cpu or len({tensor.device for tensor in left}) > 1:
        return [_same_bytes(a, b) for a, b in pairs]
    return same_at_once(pairs)


def same_at_once(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[bool]:
    """Which pairs of tensors, all of one device, hold the same bits."""
    shaped = [a.shape == b.shape for a, b in pairs]  # observers resize theirs
    differences = [(one != other).any() for one, other in (_as_bits(*pair) for pair in compress(pairs, shaped))]
    differ = iter(torch.stack(differences).tolist() if differences else [])
    return [alike and not next(differ) for alike in shaped]


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape and type hold the same bits (a NaN equals itself here)."""
    return a.data_ptr() == b.data_ptr() or torch.equal(*_as_bits(a, b))


def _as_bits(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    bits = _BITS.get(a.dtype.itemsize)
    if bits is not None:
        return a.detach().view(bits), b.detach().view(bits)
    return a.detach().contiguous().view(-1).view(torch.uint8), b.detach().contiguous().view(-1).view(torch.uint8)


class Switches:
    """``requires_grad`` of one worker's parameters."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        self.trained: tuple[bool, ...] = ()
        """Which parameters are trained when a virtual node of the present attempt begins."""
        self._named = named
        self._parameters = [parameter for _, parameter in named]
        self._built = self._read()
        self._ever: set[int] = set()
        """Those that an inner loop has ever left otherwise than it found them: part of the state."""

    def begin(self) -> None:
        self.trained = self._read()

    def _read(self) -> tuple[bool, ...]:
        return tuple(map(_trained, self._parameters))

    def put_back(self) -> frozenset[int]:
        """Let the next virtual node begin as each did; the places that the script has frozen or unfrozen meanwhile."""
        now = self._read()
        if now == self.trained:
            return _NONE
        places = frozenset(place for place, trained in enumerate(self.trained) if now[place] is not trained)
        for place in places:
            self._parameters[place].requires_grad_(self.trained[place])
        return places

    def refuse(self) -> None:
        """Blocks have been loaded as they were frozen when the attempt began, for all virtual nodes."""
        for (name, parameter), before in zip(self._named, self.trained, strict=True):
            if parameter.requires_grad is not before:
                raise ConfigurationError(
                    f"the loss of step.layer_major has {'frozen' if before else 'unfrozen'} parameter {name}, and in "
                    "layer-major order all virtual nodes run through a block together; freeze and unfreeze by "
                    "step.number, before step.layer_major"
                )

    def commit(self, switched: frozenset[int]) -> None:
        for place in switched:
            self._parameters[place].requires_grad_(not self.trained[place])
        self._ever |= switched

    def steadily(self) -> Iterator[tuple[str, nn.Parameter]]:
        return (named for named, trained in zip(self._named, self.trained, strict=True) if trained)

    @property
    def state(self) -> dict[str, bool]:
        """Those that the script has switched since it built the model, perhaps once, which nobody else will repeat."""
        pairs = zip(self._read(), self._built, strict=True)
        switched = self._ever | {place for place, (now, built) in enumerate(pairs) if now is not built}
        return {name: parameter.requires_grad for name, parameter in (self._named[place] for place in sorted(switched))}

    def restore(self, state: Mapping[str, bool]) -> None:
        for place, (name, parameter) in enumerate(self._named):
            if name in state:
                self._ever.add(place)
                parameter.requires_grad_(state[name])


class Modes:
    """``training`` of the modules of one worker's model, which a script may change once and for good (``bn.eval()``).

    A joiner and a resumed worker do not see that done. Nor may they get the modes of an evaluation that the script is
    in the middle of, or leaves to the next step to end: while the whole model is in another mode than in the last
    attempt, those of that attempt count.
    """

    def __init__(self, model: nn.Module) -> None:
        named = list(model.named_modules())
        self._modules = [module for _, module in named]
        self._names = [name for name, _ in named]
        places = {name: place for place, name in enumerate(self._names)}
        self._parents = [places[name.rpartition(".")[0]] for name in self._names]
        """By place; the model's own is itself."""
        self._built = self._read()
        self._begun: list[bool] | None = None
        """When the last attempt began."""

    def begin(self) -> None:
        self._begun = self._read()

    def _read(self) -> list[bool]:
        return [module.training for module in self._modules]

    @property
    def state(self) -> dict[str, bool]:
        """Modes that the script has changed since it built the model: by module, for what is in it but for others."""
        if self._begun is None:
            return {}
        now = self._read()
        modes = now if now[0] is self._begun[0] else self._begun
        told, covered = dict[str, bool](), list[bool]()
        for name, mode, built, parent in zip(self._names, modes, self._built, self._parents, strict=True):
            inherits = bool(name) and covered[parent]
            if (mode is not modes[parent]) if inherits else (mode is not built):
                told[name] = mode
            covered.append(inherits or name in told)
        return told

    def restore(self, state: Mapping[str, bool]) -> None:
        """Become that. Modules change by their own ``train``, which may do more than to set the mode."""
        modes, covered = list[bool](), list[bool]()
        for name, mode, parent in zip(self._names, self._read(), self._parents, strict=True):
            inherits = bool(name) and covered[parent]
            modes.append(state[name] if name in state else modes[parent] if inherits else mode)
            covered.append(inherits or name in state)
        for module, mode in zip(self._modules, modes, strict=True):
            if module.training is not mode:
                module.train(mode)
        for module, mode in zip(self._modules, modes, strict=True):
            module.training = mode  # one that is in two others has got the second one's
        self._begun = modes


# Buffers that count: what the virtual nodes of a step add to one is added up, and not averaged.
#
# ``vf.elastic(buffers={"seen": "sum"})`` names them. Each virtual node tells its own change in its worker's step
# header, and all workers add the changes up in the order of the tree: the same bits for any number of them.

BufferKind = Literal["sum"]
"""What becomes of a buffer's changes in a step: they are added up."""

_ARGUMENT = "vf.elastic(buffers=...)"


def choose_sums(model: nn.Module, kinds: Mapping[str, BufferKind] | None) -> tuple[str, ...]:
    """The names of the buffers whose changes are added up, in the model's order.

    Args:
        kinds: what a script says, by names or patterns such as ``"*.load"``.
    """
    given: Any = {} if kinds is None else kinds
    if not isinstance(given, Mapping):
        raise ConfigurationError(f'{_ARGUMENT} got {given!r}; it takes a dict such as {{"seen": "sum"}}')
    buffers = dict(model.named_buffers())
    chosen = set[str]()
    for pattern, kind in given.items():
        if kind != "sum":
            raise ConfigurationError(f'{_ARGUMENT}: the kind of {pattern!r} is {kind!r}; it must be "sum"')
        found = [name for name in buffers if name == pattern or fnmatchcase(name, str(pattern))]
        if not found:
            close = get_close_matches(str(pattern), buffers, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(buffers) or 'none'}"
            raise ConfigurationError(f"{_ARGUMENT}: the model has no buffer {pattern!r}; {hint}")
        chosen.update(found)
    for name in chosen:
        dtype = buffers[name].dtype
        if dtype is torch.bool or (dtype.is_floating_point and dtype.itemsize == 1):
            raise ConfigurationError(f"{_ARGUMENT}: buffer {name} is of {dtype}, which cannot be added up")
    return tuple(name for name in buffers if name in chosen)


def add_up_changes(
    templates: Sequence[Tensor],
    summation: Summation,
    headers: Sequence[StepHeader],
    holdings: Sequence[Sequence[int]] | None,
) -> list[Tensor]:
    """The sums of all virtual nodes' changes, on the host.

    Args:
        templates: one for each buffer, of its shape and the type of its changes.
        holdings: the virtual nodes of their records, ascending; ``None``: the records are in the order to add them up.
    """
    told = [changes for header in headers for changes in header.summed]
    parts = {
        (node, node + 1): _read(templates, changes)
        for node, changes in zip(numbered(len(told), holdings), told, strict=True)
    }
    return summation.add_up(parts, lambda left, right: [a + b for a, b in zip(left, right, strict=True)])


def write_changes(templates: Sequence[Tensor], changes: Sequence[Tensor | None]) -> bytes:
    """One virtual node's, for a header; ``None`` where it changed nothing."""
    raw = b""
    for template, change in zip(templates, changes, strict=True):
        if change is None:
            raw += bytes(template.nbytes)
        else:
            raw += change.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return raw


def _read(templates: Sequence[Tensor], raw: bytes) -> list[Tensor]:
    found, at = [], 0
    for template in templates:
        part = bytearray(raw[at : at + template.nbytes])
        at += template.nbytes
        flat = torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8)
        found.append(flat.view(template.dtype).view(template.shape))
    return found
