"""What ``ElasticTrainer`` needs beside the ``Trainer``: what travels to joiners, which data, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from virtualflow.errors import ConfigurationError
from virtualflow.integrations.loaders import seed_collate

STATE = "trainer_state.json"
"""The last file of a checkpoint that the ``Trainer`` writes."""

# --- what travels with the model --------------------------------------------------------------------------------------

_OWN = {"is_local_process_zero", "is_world_process_zero", "stateful_callbacks"}
"""Of a ``TrainerState``, what is of one process."""
_TIMES = ("_runtime", "_per_second")


class Story:
    """How far a trainer has come, for joiners and checkpoints: its state, and that of its callbacks.

    Args:
        trainer: whose.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> dict[str, str]:
        """Return it, the same on all workers: without the times that each has taken."""
        trainer = self._trainer
        state = {name: value for name, value in asdict(trainer.state).items() if name not in _OWN}
        state["log_history"] = [
            {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
            for entry in state["log_history"]
        ]
        callbacks = {name: each.state()["attributes"] for name, each in self._callbacks.items()}
        losses = [trainer._tr_loss.item(), trainer._total_loss_scalar, trainer._globalstep_last_logged]
        return {"told": json.dumps({"state": state, "callbacks": callbacks, "losses": losses}, sort_keys=True)}

    def load_state_dict(self, saved: Mapping[str, str]) -> None:
        """Become what :meth:`state_dict` gave."""
        trainer, told = self._trainer, json.loads(saved["told"])
        callbacks = self._callbacks
        pairs = [(callbacks[name], attributes) for name, attributes in told["callbacks"].items()]
        for holder, values in [(trainer.state, told["state"]), *pairs]:
            for name, value in values.items():
                setattr(holder, name, value)
        unlogged, trainer._total_loss_scalar, trainer._globalstep_last_logged = told["losses"]
        trainer._tr_loss.fill_(unlogged)

    @property
    def _callbacks(self) -> dict[str, ExportableState]:
        """Those that have a state, by a name that all workers have for it."""
        found: dict[str, ExportableState] = {}
        for each in self._trainer.callback_handler.callbacks:
            if isinstance(each, ExportableState):
                count = sum(type(other) is type(each) for other in found.values())
                found[f"{type(each).__name__} {count}"] = each
        return found


# --- data -------------------------------------------------------------------------------------------------------------


class Batches(torch.utils.data.Dataset[Any]):
    """The batches of a loader, by number, collated.

    Args:
        loader: of a map-style dataset.
    """

    def __init__(self, loader: Any) -> None:
        self._dataset, self._indices = loader.dataset, list(loader.batch_sampler)
        self._collate = seed_collate(loader.collate_fn)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, number: int) -> Any:
        indices = self._indices[number]
        if hasattr(self._dataset, "__getitems__"):
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])


def take_only(batches: list[Any]) -> Any:
    """A batch of one batch."""
    (batch,) = batches
    return batch


def on_host(nest: Any) -> Any:
    """A nest of tensors, on the CPU."""
    if isinstance(nest, Tensor):
        return nest.detach().cpu()
    if isinstance(nest, Mapping):
        return {name: on_host(value) for name, value in nest.items()}
    return tuple(map(on_host, nest)) if isinstance(nest, tuple | list) else nest


# --- decisions --------------------------------------------------------------------------------------------------------


def newest_checkpoint(directory: Path) -> str:
    """The newest complete checkpoint in a directory: whoever writes one may be killed in the middle of it.

    Raises:
        ConfigurationError: there is none.
    """
    names = (re.fullmatch(r"checkpoint-(\d+)", path.parent.name) for path in directory.glob(f"checkpoint-*/{STATE}"))
    steps = [int(name[1]) for name in names if name]
    if not steps:
        raise ConfigurationError(f"{directory} has no complete checkpoint; leave out resume_from_checkpoint")
    return str(directory / f"checkpoint-{max(steps)}")


def overrides(callback: TrainerCallback, *events: str) -> bool:
    """Whether a callback does something at one of these events."""
    return any(getattr(type(callback), event) is not getattr(TrainerCallback, event) for event in events)


def refuse(args: Any, callbacks: Sequence[Any], dataset: Any, trial: Any) -> None:
    """Check that a training can be elastic.

    Raises:
        ConfigurationError: it cannot.
    """
    for given, sentence in (
        (
            args.world_size > 1 or args.n_gpu > 1,
            "the script was started as a distributed one, or sees several GPUs; start it with virtualflow run or the "
            "operator, and let each worker see one GPU",
        ),
        (args.fp16, "fp16 needs a scaler that ElasticTrainer does not have; use bf16=True"),
        (args.deepspeed, "deepspeed divides the model by itself; leave it out"),
        (args.fsdp, "fsdp divides the model by itself; leave it out"),
        (args.auto_find_batch_size, "auto_find_batch_size would change the result; set per_device_train_batch_size"),
        (args.eval_on_start, "eval_on_start is before a joiner's first step; call trainer.evaluate() before train()"),
        (args.push_to_hub, "push_to_hub would push from every worker; call it for what was saved, when all is done"),
        (args.ignore_data_skip, "ignore_data_skip would use samples twice; leave it out"),
        (
            args.include_num_input_tokens_seen not in (False, "no"),
            "include_num_input_tokens_seen counts the tokens of one worker; leave it out",
        ),
        (trial is not None, "a search for hyperparameters trains several models; start a job for each"),
        (
            not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")),
            "ElasticTrainer needs a dataset with __len__ and __getitem__; for a stream write the loop with vf.elastic",
        ),
    ):
        if given:
            raise ConfigurationError(sentence)
    for callback in callbacks:
        for event in ("on_substep_end", "on_pre_optimizer_step"):
            if overrides(callback, event):
                raise ConfigurationError(
                    f"{type(callback).__name__} has {event}, which has no place between workers: micro-batches may be "
                    "computed again, and the gradient is applied when it arrives; use on_optimizer_step or on_step_end"
                )
