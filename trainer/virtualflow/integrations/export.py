"""``virtualflow export``: a checkpoint as files that others read without this library.

``safetensors`` and ``hf`` hold the model's weights under the names of its ``state_dict()``, ``dcp`` (torch's
distributed checkpoints) also the optimizer's state under the names of the parameters, as
``torch.distributed.checkpoint.state_dict`` has it. All bits are those of the checkpoint.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import Parser
from virtualflow.protocol.signatures import SigningKeys
from virtualflow.state import FoundCheckpoint, find_by_path, load, skipped
from virtualflow.state.checkpoint_order import complete

WEIGHTS = "model.safetensors"
"""As Transformers, Diffusers and timm call it."""
CONFIG = "config.json"


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
    found, tree = _read(_directory_of_run(given.checkpoint, given.run), given.step, keys)
    signature = found.identity.signature
    try:
        with _appearing(given.output) as place:
            _WRITERS[given.format](place, tree, signature, given)
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{given.output} cannot be written: {error}") from None
    count = sum(tensor.numel() for tensor in tree["parameters"].values())
    of_run = f"{found.path.parent.name}, " if found.path.parent.name in _runs_in(given.checkpoint) else ""
    print(f"{given.output}: {of_run}step {found.step}, {len(tree['parameters'])} parameters with {count:,} elements")
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


def model_state(tree: Mapping[str, Any], signature: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of the model's ``state_dict()``; those of tied parameters are the same object."""
    parameters: Mapping[str, Tensor] = tree["parameters"]
    transient = set(signature.get("transient", ()))
    state = dict(parameters)
    state |= {name: parameters[first] for name, first in signature.get("ties", {}).items()}
    state |= {name: buffer for name, buffer in tree["buffers"].items() if name not in transient}
    return state | {name: value for name, value in tree["other"].items() if isinstance(value, Tensor)}


def optimizer_state(tree: Mapping[str, Any], signature: Mapping[str, Any]) -> dict[str, Any]:
    """The optimizer's ``state_dict()`` with names in the place of numbers, for ``set_optimizer_state_dict``."""
    names = [name for group in signature["groups"] for name in group]
    saved: Mapping[str, Any] = tree["optimizer"]
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in saved["param_groups"]]
    return {"state": {names[n]: of for n, of in saved["state"].items()}, "param_groups": groups}


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


def _read(path: Path, step: int | None, keys: SigningKeys) -> tuple[FoundCheckpoint, dict[str, Any]]:
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
            return found, load(found)
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


def _write_safetensors(place: Path, tree: dict[str, Any], signature: Mapping[str, Any], _: argparse.Namespace) -> None:
    state = model_state(tree, signature)
    apart = {name: state[name].clone() for name in signature.get("ties", {})}  # the format knows no ties
    save_file({name: tensor.contiguous() for name, tensor in (state | apart).items()}, place)


def _write_hf(place: Path, tree: dict[str, Any], signature: Mapping[str, Any], given: argparse.Namespace) -> None:
    """As ``save_pretrained`` does: without the names that ``from_pretrained`` ties again."""
    place.mkdir()
    for path in sorted(given.config.iterdir()):
        if path.is_file() and path.suffix in (".json", ".txt", ".model", ".jinja") and ".index." not in path.name:
            shutil.copyfile(path, place / path.name)
    ties = signature.get("ties", {})
    state = {name: of.contiguous() for name, of in model_state(tree, signature).items() if name not in ties}
    save_file(state, place / WEIGHTS, metadata={"format": "pt"})


def _write_dcp(place: Path, tree: dict[str, Any], signature: Mapping[str, Any], _: argparse.Namespace) -> None:
    state = {"model": model_state(tree, signature), "optimizer": optimizer_state(tree, signature)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this is one process
        save(state, checkpoint_id=place)


_Writer = Callable[[Path, dict[str, Any], Mapping[str, Any], argparse.Namespace], None]
_WRITERS: Mapping[str, _Writer] = {"safetensors": _write_safetensors, "hf": _write_hf, "dcp": _write_dcp}
