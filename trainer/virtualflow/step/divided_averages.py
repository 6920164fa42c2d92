"""An average of weights that is divided over the workers as the parameters are (``torch.optim.swa_utils``).

The script makes one of the whole model, gives it in ``state=``, and calls ``update_parameters`` behind a step. Each
worker then averages what it keeps. Who is to begin a generation with others may be behind them by an update of the
average, as the script's code behind a step runs when a worker comes to it. So each counts the updates that its slices
have seen: in a new generation all catch up with the newest, from values that are those of the same step, and the
script's own call does not average a second time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from virtualflow.errors import ConfigurationError
from virtualflow.reduction import Row, Stretch
from virtualflow.state import StayingHook
from virtualflow.step.sliced_values import SlicedValues, refuse_reading

_CUTS = (0, 1, 3)
"""Where slices begin in a trial, in units."""
_UPDATES = 4


def check_averages(model: nn.Module, objects: Mapping[str, Any]) -> dict[str, AveragedModel]:
    """Those of a script's objects that are averages of a model's weights, to be divided as these are.

    Raises:
        ConfigurationError: one cannot be, or another object has tensors that follow the parameters.
    """
    found = {}
    parameters = dict(model.named_parameters())
    shapes = {parameter.shape for parameter in parameters.values() if parameter.numel() > 1}
    for name, given in objects.items():
        if not isinstance(given, AveragedModel):
            if isinstance(given, nn.Module) or any(tensor.shape in shapes for tensor in _tensors(given.state_dict())):
                raise ConfigurationError(
                    f"state holds {name}, a {type(given).__name__} with tensors like the model's, which no worker has "
                    'whole with shard="parameters"; average weights by torch.optim.swa_utils.AveragedModel, or leave '
                    "one of the two out"
                )
            continue
        layouts = [
            {key: (parameter.shape, parameter.stride()) for key, parameter in each.named_parameters()}
            for each in (model, given.module)
        ]
        if type(given).update_parameters is not AveragedModel.update_parameters or layouts[0] != layouts[1]:
            raise ConfigurationError(
                f'state holds {name}, which with shard="parameters" must be an AveragedModel of the model that '
                "vf.elastic gets, with torch's own update_parameters"
            )
        if any(parameter.is_meta for parameter in [*parameters.values(), *given.parameters()]):
            raise ConfigurationError(
                f"state holds {name}, an average of a model on the meta device, which has no weights yet; build the "
                "model on a real device, or leave the average out"
            )
        found[name] = given
    return found


class DividedAverage:
    """One worker's part of an average; in the state of a training it stands for the script's object.

    Args:
        current: the model's values, of which the same is kept.
        pieces: what is kept.

    Raises:
        ConfigurationError: it does not average each element for itself.
    """

    def __init__(
        self,
        name: str,
        average: AveragedModel,
        row: Row,
        current: SlicedValues,
        pieces: Callable[[], Sequence[Stretch]],
    ) -> None:
        self.name, self.average = name, average
        named = list(average.module.named_parameters())
        self.values = SlicedValues([key for key, _ in named], [each for _, each in named], row)
        self.made = int(average.n_averaged)
        """Updates that the slices have seen; the script's code behind a step may be behind that."""
        self.repeats: Callable[[], bool] = lambda: False
        """Whether what the script does now has been done already, in a state that was received."""
        self._row, self._current, self._pieces = row, current, pieces
        self._try()
        average.update_parameters = self._update  # type: ignore[method-assign]
        refuse_reading(average.module, self.values, f"{name}.state_dict()")
        average.module.register_forward_pre_hook(StayingHook(self._refuse_running))

    def close(self) -> None:
        """Let the script's object have its own method again."""
        if vars(self.average).get("update_parameters") == self._update:
            del self.average.update_parameters

    def catch_up(self, updates: int) -> None:
        """Let the slices see all updates up to this one, which others have made behind the last step."""
        count = int(self.average.n_averaged)
        for number in range(self.made, updates):
            self.average.n_averaged.fill_(number)
            self._average(self._pieces(), [], [])
        self.average.n_averaged.fill_(count)
        self.made = max(self.made, updates)

    # --- in place of the object ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all workers, by reference: all but the averages of parameters."""
        divided = {f"module.{key}" for key, _ in self.average.module.named_parameters(remove_duplicate=False)}
        return {key: value for key, value in self.average.state_dict().items() if key not in divided}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, or from a state with the averages of parameters, where there is room for all."""
        self.average.load_state_dict(state, strict=False)

    def _update(self, model: nn.Module) -> None:
        """Average the model's present weights: what the script calls."""
        repeats, count = self.repeats(), int(self.average.n_averaged)
        pieces = () if repeats or self.made > count else self._pieces()
        self._average(pieces, list(self.average.module.buffers()), list(model.buffers()))
        if not repeats:
            self.made = max(self.made, count + 1)

    def _average(self, pieces: Sequence[Stretch], buffers: list[Tensor], others: list[Tensor]) -> None:
        averaged, current = ([values.read(piece) for piece in pieces] for values in (self.values, self._current))
        _run(self.average, _Listed(averaged, buffers), _Listed(current, others))

    def _refuse_running(self, *_: object) -> None:
        if not self.values.is_whole:
            raise ConfigurationError(
                f'{self.name} is divided over the workers (shard="parameters"), so none of them can run it; evaluate '
                "it in a script of one worker that begins from the checkpoint"
            )

    def _try(self) -> None:
        """See that slices come to the bits of the whole: it may be anybody's function."""
        count, draw = int(self.average.n_averaged), torch.Generator().manual_seed(0)
        units = {
            (self.values.dtype(place), self._current.dtype(place), self.values.device(place)): unit
            for place, unit in enumerate(self._row.units)
            if unit
        }
        for (own, others, device), unit in units.items():
            whole = torch.randn((3, 2 * unit + 1), generator=draw).to(device, own)
            flat = whole.clone().view(-1)
            bounds = list(itertools.pairwise([*(at * unit for at in _CUTS), len(flat)]))
            for number in range(_UPDATES):
                given = torch.randn(whole.shape, generator=draw).to(device, others)
                self.average.n_averaged.fill_(number)
                _run(self.average, _Listed([whole], []), _Listed([given], []))
                self.average.n_averaged.fill_(number)
                pieces = [[of.view(-1)[begin:end] for begin, end in bounds] for of in (flat, given)]
                _run(self.average, _Listed(pieces[0], []), _Listed(pieces[1], []))
            if not torch.equal(whole.view(-1), flat):
                raise ConfigurationError(
                    f'{self.name} does not average each element for itself, and with shard="parameters" it is made of '
                    "slices; use torch.optim.swa_utils.get_ema_multi_avg_fn, or leave one of the two out"
                )
        self.average.n_averaged.fill_(count)


class _Listed(nn.Module):
    """Stands for a module with these parameters and buffers."""

    def __init__(self, parameters: Sequence[Tensor], buffers: Sequence[Tensor]) -> None:
        super().__init__()
        for number, value in enumerate(parameters):
            self.register_parameter(str(number), nn.Parameter(value, requires_grad=False))
        self._listed = tuple(buffers)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        return iter(self._listed)


def _run(average: AveragedModel, averaged: _Listed, current: _Listed) -> None:
    module, average._modules["module"] = average._modules["module"], averaged
    try:
        AveragedModel.update_parameters(average, current)
    finally:
        average._modules["module"] = module


def _tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from _tensors(value)
