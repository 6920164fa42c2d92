"""``virtualflow export``: a checkpoint as files that others read without this library.

``safetensors`` and ``hf`` hold the model's weights under the names of its ``state_dict()``, ``dcp`` (torch's
distributed checkpoints) also the optimizer's state under the names of the parameters, as
``torch.distributed.checkpoint.state_dict`` has it. All bits are those of the checkpoint. Of one that many workers have
written, parameters are read and written one after the other, so that a model need not fit into the memory here.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import Parser
from virtualflow.protocol.signatures import SigningKeys
from virtualflow.state import FoundCheckpoint, SavedPiece, find_by_path, load, load_undivided, skipped
from virtualflow.state.checkpoint_order import complete
from virtualflow.state.codec import NAMES

WEIGHTS = "model.safetensors"
"""As Transformers, Diffusers and timm call it."""
CONFIG = "config.json"
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
}
"""What safetensors calls types."""


def main(arguments: Sequence[str]) -> int:
    """Export, and say what was written; the exit code.

    Raises:
        ConfigurationError: the request makes no sense, or there is no such checkpoint; one sentence says what to do.
    """
    given = parser().parse_args(arguments)
    if given.format == "hf" and given.config is None:
        raise ConfigurationError(
            f"--format hf needs the model's {CONFIG}: give --config DIR, as model.config.save_pretrained(DIR) writes it"
        )
    if given.config is not None and not (given.config / CONFIG).is_file():
        raise ConfigurationError(f"there is no {CONFIG} in {given.config}; --config is a folder with the model's one")
    if given.output.exists():
        raise ConfigurationError(f"{given.output} exists already; give another --output, or remove it")
    keys = SigningKeys.read(None, given.trust)
    found, content = _read(_directory_of_run(given.checkpoint, given.run), given.step, keys)
    try:
        with _appearing(given.output) as place:
            _WRITERS[given.format](place, content, given)
    except ConfigurationError:
        raise
    except (OSError, ValueError) as error:  # shares are read again, and may have changed
        raise ConfigurationError(f"{given.output} cannot be written: {error}") from None
    count = sum(tensor.numel() for tensor in content.parameters.values())
    of_run = f"{found.path.parent.name}, " if found.path.parent.name in _runs_in(given.checkpoint) else ""
    print(f"{given.output}: {of_run}step {found.step}, {len(content.parameters)} parameters with {count:,} elements")
    return 0


def parser() -> Parser:
    """What may be said."""
    made = Parser(
        prog="virtualflow export",
        description="Write a checkpoint's weights as files that others read without this library.",
        examples=(
            "virtualflow export checkpoints --output model.safetensors",
            "virtualflow export checkpoints --format hf --config config --output model",
        ),
        allow_abbrev=False,
    )
    made.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="the directory of --checkpoint-dir, or one of those in it"
    )
    made.add_argument(
        "--format",
        choices=list(_WRITERS),
        default="safetensors",
        help="safetensors: one file of weights; hf: a folder for from_pretrained; dcp: a folder of torch's distributed "
        "checkpoints, with the optimizer's state (default: safetensors)",
    )
    made.add_argument("--output", type=Path, required=True, metavar="PATH", help="of the new file or folder")
    made.add_argument("--step", type=int, metavar="N", help="of that checkpoint (default: the newest)")
    made.add_argument(
        "--run", type=int, metavar="N", help="of that run of a script that trains several times (default: the last)"
    )
    made.add_argument(
        "--trust", type=Path, metavar="PUBLIC.pem", help="of checkpoints, take those alone that these keys have signed"
    )
    made.add_argument(
        "--config", type=Path, metavar="DIR", help="for hf: its files that are no weights are copied, as config.json"
    )
    return made


class Content:
    """What a checkpoint holds; where it is divided, one parameter of it after the other.

    Raises:
        ValueError: it is not what was written; every byte is read for that.
    """

    def __init__(self, found: FoundCheckpoint) -> None:
        self.signature: Mapping[str, Any] = found.identity.signature
        self._shares = found.open_shares if found.shares else None
        self._tree = load(found) if self._shares is None else load_undivided(found)
        self._names = [name for group in self.signature["groups"] for name in group]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self._last: SavedPiece | None = None
        self.parameters: dict[str, Tensor] = {}
        """Without their values: on the ``meta`` device."""
        self._states: dict[str, Any] = {}
        for name in self.signature["parameters"] if self._shares is not None else self._tree["parameters"]:
            value, state = self._read(name)
            self.parameters[name] = _without_values(value)
            if state is not None:
                self._states[name] = {key: _without_values(of) for key, of in state.items()}

    def model_state(self) -> dict[str, Tensor]:
        """The tensors of the model's ``state_dict()``, parameters without their values."""
        transient = set(self.signature.get("transient", ()))
        state = self.parameters | {name: self.parameters[first] for name, first in self._ties.items()}
        state |= {name: buffer for name, buffer in self._tree["buffers"].items() if name not in transient}
        return state | {name: value for name, value in self._tree["other"].items() if isinstance(value, Tensor)}

    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's ``state_dict()`` with names in the place of numbers, for ``set_optimizer_state_dict``.

        Tensors are without their values.
        """
        groups = [
            {**group, "params": [self._names[n] for n in group["params"]]}
            for group in self._tree["optimizer"]["param_groups"]
        ]
        return {"state": self._states, "param_groups": groups}

    def value(self, name: str) -> Tensor:
        """That of an entry of the model's state."""
        name = self._ties.get(name, name)
        if name in self.parameters:
            return self._read(name)[0]
        value: Tensor = (self._tree["buffers"] | self._tree["other"])[name]
        return value

    def state(self, name: str) -> dict[str, Any]:
        """A parameter's."""
        state = self._read(name)[1]
        assert state is not None
        return state

    @property
    def _ties(self) -> Mapping[str, str]:
        ties: Mapping[str, str] = self.signature.get("ties", {})
        return ties

    def _read(self, name: str) -> tuple[Tensor, dict[str, Any] | None]:
        if self._shares is None:
            return self._tree["parameters"][name], self._tree["optimizer"]["state"].get(self._numbers.get(name))
        if self._last is None or self._last.name != name:
            self._last = None  # before the next one is read
            self._last = self._shares.read_whole(name)
        return self._last.value, self._last.state


def _without_values(value: Any) -> Any:
    return torch.empty_like(value, device="meta") if isinstance(value, Tensor) else value


def _runs_in(directory: Path) -> dict[str, int]:
    """The directories inside for later runs of a script that have checkpoints, and the numbers of these runs."""
    found = ((path, path.name.removeprefix("run-")) for path in directory.glob("run-*"))
    return {path.name: int(number) for path, number in found if number.isdecimal() and complete(path)}


def _directory_of_run(path: Path, run: int | None) -> Path:
    """Where the checkpoints of a run are, or of the last one; the first to use a directory has no name inside."""
    inside = {number: path / name for name, number in _runs_in(path).items()}
    if run is None:
        return inside[max(inside)] if inside else path
    if run in inside or run == 1:
        return inside.get(run, path)
    known = "".join(f", {number}" for number in sorted(inside))
    raise ConfigurationError(f"there is no checkpoint of run {run} in {path}; --run is one of 1{known}")


def _read(path: Path, step: int | None, keys: SigningKeys) -> tuple[FoundCheckpoint, Content]:
    """The checkpoint that is meant, of which every byte was checked, and what it holds."""

    def tell(event: str) -> None:
        print(f"virtualflow: {event}", file=sys.stderr)

    damaged: set[int] = set()
    while True:
        found = find_by_path(path, tell, step=step, damaged=damaged, keys=keys)
        if found is None:
            which = "" if step is None else f" of step {step}"
            why = "; those that are there are damaged" if damaged else ""
            raise ConfigurationError(f"there is no complete checkpoint{which} in {path}{why}")
        try:
            return found, Content(found)
        except ValueError as error:
            tell(skipped(found.path, error))
            damaged.add(found.step)


@contextmanager
def _appearing(output: Path) -> Iterator[Path]:
    """A path to write a file or a folder at, which is at ``output`` after the block, or nowhere."""
    if not output.parent.is_dir():
        raise ConfigurationError(f"there is no folder {output.parent}; make it, or give another --output")
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as beside:
        place = Path(beside) / output.name
        yield place
        os.rename(place, output)


def _write_safetensors(place: Path, content: Content, _: argparse.Namespace) -> None:
    _write_file(place, content, content.model_state(), {})


def _write_hf(place: Path, content: Content, given: argparse.Namespace) -> None:
    """As ``save_pretrained`` does: without the names that ``from_pretrained`` ties again."""
    place.mkdir()
    for path in sorted(given.config.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and ".index." not in path.name:
            shutil.copyfile(path, place / path.name)
    ties = content.signature.get("ties", {})
    state = {name: of for name, of in content.model_state().items() if name not in ties}
    _write_file(place / WEIGHTS, content, state, {"format": "pt"})


def _write_file(place: Path, content: Content, state: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """Write safetensors: the length of a header, the header, and the tensors one after the other."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    names, at = sorted(state, key=lambda name: (-state[name].itemsize, name)), 0  # so that each is aligned
    for name in names:
        kind, size = _TYPES.get(NAMES[state[name].dtype]), state[name].numel() * state[name].itemsize
        if kind is None:
            raise ConfigurationError(
                f"{name} is of {state[name].dtype}, which safetensors does not have; export with --format dcp"
            )
        header[name] = {"dtype": kind, "shape": list(state[name].shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with place.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(content.value(name).contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _write_dcp(place: Path, content: Content, _: argparse.Namespace) -> None:
    state = {"model": content.model_state(), "optimizer": content.optimizer_state()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        save(state, checkpoint_id=place, planner=_Planner(content))


class _Planner(DefaultSavePlanner):
    """Fetches the values of parameters and their states when they are written."""

    def __init__(self, content: Content) -> None:
        super().__init__()
        self._content = content

    def lookup_object(self, index: MetadataIndex) -> Any:
        match self.mappings[index.fqn]:
            case ("model", str(name)):
                return self._content.value(name)
            case ("optimizer", "state", str(name), str(key)):
                return self._content.state(name)[key]
        return super().lookup_object(index)


_Writer = Callable[[Path, Content, argparse.Namespace], None]
_WRITERS: Mapping[str, _Writer] = {"safetensors": _write_safetensors, "hf": _write_hf, "dcp": _write_dcp}
