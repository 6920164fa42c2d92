"""What a worker writes down of its steps where somebody asks for it: an audit, a trace, how gradients travelled.

Each worker writes files of its own, each line in one write before the attempt can count, so that a SIGKILL loses
nothing. Without these parts there is nothing of this module in a step.

The *audit* says which worker ran which samples: a line for each attempt at a virtual node, and one for each attempt
that counted. What a worker has kept of an aborted attempt, it writes again for the next one, to which it contributes
it, too. Which attempts counted is known to any worker that applied the update; ``virtualflow run --audit`` joins both.

The *trace* has all that is computed as hashes, for ``virtualflow check`` and ``bisect`` to compare. It reads all
gradients and the whole state in every step, so it costs as much as writing a checkpoint in each.

The *explanation* is for ``virtualflow explain``.
"""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from virtualflow.protocol import messages as m
from virtualflow.protocol.exchange_report import BucketReport, ExchangeReport, Traffic, write_report
from virtualflow.reduction import AttemptSpoiled, Passage, Scheduled, stages, summarize
from virtualflow.state import content_hash, optimizers_of
from virtualflow.step import Attempt, StepPart
from virtualflow.verify import BESIDE, Began, Committed, Computed, Opened, Record, encode
from virtualflow.worker.standalone import AnySession
from virtualflow.worker.train_state import Training

_COLLECTED_WITHIN = 5.0
"""Seconds that a collection of another thread may take: what it finalizes may be slow, or never come to an end."""


class Audit(StepPart):
    """The audit file of one worker process."""

    def __init__(self, directory: Path, session: AnySession, training: Training, run: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{session.worker}-{session.incarnation}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._worker, self._training, self._run = session.worker, training, run
        self._latest: dict[int, dict[str, Any]] = {}
        """What this worker has run last of each virtual node."""

    def begin(self, attempt: Attempt) -> None:
        for node in self._training.update.sync.kept if attempt.repairs else ():
            # One without samples was not run.
            if node in self._latest and self._latest[node]["step"] == attempt.number:
                self._write("kept", attempt.generation, **self._latest[node])

    def before_node(self, attempt: Attempt) -> None:
        facts: dict[str, Any] = {"epoch": attempt.epoch, "step": attempt.number}
        for node, samples in attempt.present.apart():
            told = facts | {"virtual_node": node, "worker": self._worker, "samples": list(samples)}
            self._latest[node] = told
            self._write("computed", attempt.generation, **told)

    def counted(self, generation: m.Generation, number: int) -> None:
        self._write("committed", generation, step=number)

    def _write(self, kind: str, generation: m.Generation, **values: Any) -> None:
        number = [generation.incarnation, generation.counter]
        os.write(
            self._descriptor, (json.dumps({kind: {"run": self._run, "generation": number, **values}}) + "\n").encode()
        )

    def close(self) -> None:
        os.close(self._descriptor)


_READABLE = 200
"""Characters of a name."""
_RECENT = 50
"""Steps that medians of an exchange are over, at most."""


class _Exchanged(NamedTuple):
    """What was measured in one step."""

    passages: list[Passage]
    sent: int
    received: int


class Explanation(StepPart):
    """How the exchanges of the latest steps went. The leader writes it down at the end, so that none waits for that."""

    def __init__(self, path: Path, session: AnySession, training: Training) -> None:
        self._path, self._session, self._training = path, session, training
        self._step = self._rank = 0
        self._leads = False
        self._generation, self._schedule = m.NO_GENERATION, list[Scheduled]()
        self._latest: deque[_Exchanged] = deque(maxlen=_RECENT)
        """Steps of that generation and schedule."""
        self._before = 0, 0

    def begin(self, attempt: Attempt) -> None:
        self._before = self._traffic()

    def commit(self, attempt: Attempt) -> None:
        reducer, (sent, received) = self._training.update.reducer, self._traffic()
        if (attempt.generation, reducer.schedule) != (self._generation, self._schedule):
            self._generation, self._schedule = attempt.generation, reducer.schedule
            self._latest.clear()
        self._latest.append(_Exchanged(reducer.passages(), sent - self._before[0], received - self._before[1]))
        self._step, self._rank, self._leads = attempt.number, self._session.rank, self._session.state.leader

    def close(self) -> None:
        if self._leads:
            write_report(self._path, self._report())

    def _traffic(self) -> tuple[int, int]:
        communicator = self._session.communicator
        assert communicator is not None
        return communicator.traffic

    def _report(self) -> ExchangeReport:
        update, schedule, latest = self._training.update, self._schedule, self._latest
        whole_passes = update.reducer.schedule_if_whole() if schedule else []
        terms, rows = update.reducer.terms, whole_passes[0].shape.rows if whole_passes else (1,)
        names = [*(name for name, _ in self._training.model.named_parameters()), *update.sync.settled.averaged]
        planned = [one.moved(self._rank) for one in schedule]
        buckets = [
            _describe(one, names, summarize(planned[at : at + 1], [step.passages[at : at + 1] for step in latest]))
            for at, one in enumerate(schedule)
        ]
        whole = summarize(planned, [step.passages for step in latest])
        sent = statistics.median_low(step.sent for step in latest)
        received = statistics.median_low(step.received for step in latest)
        return ExchangeReport(
            step=self._step,
            worker=self._session.worker,
            steps=len(latest),
            rows=list(rows),
            measured=terms.measured,
            network=asdict(terms.network),
            buckets=buckets,
            traffic=whole,
            beside=(sent - whole.sent, received - whole.received),
            sent=_sent(schedule, len(rows)),
            sent_if_whole=_sent(whole_passes, len(rows)),
        )


def _sent(schedule: Sequence[Scheduled], workers: int) -> list[int]:
    """Bytes that each of so many workers sends."""
    return [sum(one.moved(rank)[0] for one in schedule) for rank in range(workers)]


def _describe(one: Scheduled, names: Sequence[str], traffic: Traffic) -> BucketReport:
    choice = one.choice
    return BucketReport(
        tensors=[names[place] for place in one.bucket.places],
        bytes=one.shape.size,
        dtype=str(one.bucket.dtype).removeprefix("torch."),
        program=stages(choice, one.shape),
        way=str(choice.way),
        overlapped=choice.overlapped,
        reason=choice.reason,
        predicted=dict(choice.predicted),
        refused=dict(choice.refused),
        traffic=traffic,
    )


class TraceWriter(StepPart):
    """The trace of one worker process.

    Args:
        repeated_step: attempt this one twice; ``None``: none of them.
        earlier_steps: those of the runs of the script before this one: steps are counted over all of them.
    """

    def __init__(
        self, directory: Path, opened: Opened, training: Training, repeated_step: int | None, earlier_steps: int = 0
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"{opened.worker}-{opened.incarnation}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._training = training
        self._repeated_step = repeated_step
        self._earlier = earlier_steps
        self._companions: list[tuple[str, Callable[[], Any]]] | None = None
        self._inputs = "", ""
        self._begun = 0
        self._write(opened)

    def after_script(self, *, leaves: bool) -> None:
        self._began(self._training.completed_steps + 1)

    def begin(self, attempt: Attempt) -> None:
        """Gradients are read when all of them are there. A joiner has run no code behind a step."""
        attempt.late = True
        self._began(attempt.number)

    def _began(self, step: int) -> None:
        if step <= self._begun:
            return
        self._begun = step
        if self._companions is None:
            self._companions = list(_find_companions(self._training))
        self._write(Began(self._earlier + step, {**self._state(), **self._beside()}))

    def before_node(self, attempt: Attempt) -> None:
        """The samples of a virtual node are here, and the user's code has not seen them yet."""
        batch = attempt.present
        self._inputs = content_hash(batch.samples), content_hash(batch.data)

    def after_node(self, attempt: Attempt) -> None:
        """The user's code has run a virtual node: its gradients and buffers are as it has left them."""
        told, generation = attempt.told, attempt.generation
        model = self._training.model
        gradients = {name: content_hash(p.grad) for name, p in model.named_parameters() if p.grad is not None}
        buffers = {name: content_hash(buffer) for name, buffer in model.named_buffers()}
        samples, data = self._inputs
        metrics = told.metrics if told.weight is None else {**told.metrics, "its weight": told.weight}
        self._write(
            Computed(
                (generation.incarnation, generation.counter),
                self._earlier + attempt.number,
                attempt.present.virtual_node,
                samples,
                data,
                _hash_generators(),
                gradients,
                buffers,
                {name: _number(value) for name, value in metrics.items()},
            )
        )

    def computed(self, attempt: Attempt) -> None:
        if self._earlier + attempt.number == self._repeated_step:
            self._repeated_step = None
            raise AttemptSpoiled

    def counted(self, generation: m.Generation, number: int) -> None:
        metrics = {name: _number(value) for name, value in self._training.metrics.items()}
        place = generation.incarnation, generation.counter
        self._write(Committed(place, self._earlier + number, self._state(), metrics))

    def close(self) -> None:
        os.close(self._descriptor)

    def _write(self, record: Record) -> None:
        os.write(self._descriptor, encode(record))

    def _state(self) -> dict[str, str]:
        training = self._training
        tree = training.capture(states=training.update.shards is None)
        optimizer = tree.pop("optimizer")
        names = _names_of_states(training)
        state: dict[str, str] = {}
        for n, group in enumerate(optimizer["param_groups"]):
            state |= {f"optimizer's {key} in group {n}": _text(of) for key, of in group.items() if key != "params"}
        for part in ("scheduler", "scaler"):
            state |= {f"{part}'s {key}": _text(value) for key, value in (tree.pop(part) or {}).items()}
        for part, noun in (("parameters", "parameter"), ("buffers", "buffer"), ("other", "model's")):
            state |= {f"{noun} {name}": content_hash(value) for name, value in tree.pop(part).items()}
        for index, values in optimizer["state"].items():
            for key, value in values.items():
                state[f"optimizer's {key} of {names.get(index, index)}"] = _text(value)
        state |= {f"logged {name}": _number(value) for name, value in training.logged.items()}
        for name, held in training.companions.results().items():
            state |= {place: _text(value) for place, value in _leaves(f"state of {name}", held)}
        return state | {key: content_hash(of) for key, of in tree.items() if key not in ("state", "extra", "hosted")}

    def _beside(self) -> dict[str, str]:
        found = {}
        for name, reference in self._companions or ():
            companion = reference()
            if companion is not None:
                found[f"{BESIDE}{name}"] = content_hash(companion.state_dict())
        return found


def _names_of_states(training: Training) -> dict[int, str]:
    known = {id(parameter): name for name, parameter in training.model.named_parameters()}
    parameters = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    return {n: known.get(id(parameter), str(n)) for n, parameter in enumerate(parameters)}


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What is in nested dictionaries, by its place."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(f"{place}, {key}", inner)
    else:
        yield place, value


def _text(value: Any) -> str:
    """A number or a name as itself, so that people can read it; anything else by its hash."""
    readable = isinstance(value, bool | int | float | None) or (isinstance(value, str) and len(value) <= _READABLE)
    return repr(value) if readable else content_hash(value)


def _number(value: float | Tensor) -> str:
    return repr(value.item() if isinstance(value, Tensor) else value)


def _hash_generators() -> str:
    states: list[Any] = [torch.get_rng_state(), random.getstate()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states.append(torch.cuda.get_rng_state_all())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states.append(numpy.random.get_state())
    return content_hash(states)


def _collect_garbage() -> None:
    """Collect all; ``gc.collect`` returns at once, with nothing done, while another thread collects."""
    collected, mine = False, threading.get_ident()

    def note(phase: str, told: dict[str, int]) -> None:
        nonlocal collected
        collected = collected or (phase == "stop" and told["generation"] == 2 and threading.get_ident() == mine)

    gc.callbacks.append(note)
    try:
        limit = time.monotonic() + _COLLECTED_WITHIN
        gc.collect()
        while not collected and time.monotonic() < limit:
            time.sleep(0.001)
            gc.collect()
    finally:
        gc.callbacks.remove(note)


def _find_companions(training: Training) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Modules and optimizers with a state that the script keeps beside its model: averages, teachers, adversaries.

    Nobody told the library of them, so the garbage collector is asked. By class: properties of foreign objects must not
    run.
    """
    kinds = (nn.Module, torch.optim.Optimizer)
    _collect_garbage()  # what is only waiting for it is not kept by anybody
    found = [each for each in gc.get_objects() if issubclass(type(each), kinds)]
    modules = [each for each in found if isinstance(each, nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    own = {id(tensor) for tensor in [*training.model.parameters(), *training.model.buffers()]}
    optimizers = {id(each) for each in (training.optimizer, *optimizers_of(training.optimizer))}
    counts: dict[str, int] = {}
    for each in found:
        if each is training.model or id(each) in optimizers or id(each) in inner:
            continue
        if isinstance(each, nn.Module):
            tensors = [*each.parameters(), *each.buffers()]
            if all(id(tensor) in own for tensor in tensors):
                continue
        kind = type(each).__name__
        counts[kind] = counts.get(kind, 0) + 1
        yield kind if counts[kind] == 1 else f"{kind} number {counts[kind]}", weakref.ref(each)
