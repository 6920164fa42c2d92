"""This process as a worker: its name, which belongs to one process and not to all that inherit it, and SIGTERM.

Whoever starts a worker tells it its name in the environment, which its children get as well: loader processes, an
evaluation script, a second process beside the first. To the coordinator, the latest process of a name is a restarted
worker, so a child that came forward under its parent's would take its place. Hence a process claims its name on its
machine before it does: the kernel lets go of the claim when the process ends, however it does.
"""

from __future__ import annotations

import errno
import hashlib
import inspect
import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from virtualflow._process import end_at_once
from virtualflow.data import attributes_of
from virtualflow.errors import ConfigurationError, Drained, ScriptExited
from virtualflow.protocol.environment import WorkerEnvironment
from virtualflow.step import add_bits

logger = logging.getLogger("virtualflow.worker")


class NameTaken(ConfigurationError):
    """This process is none that may speak for the worker, not even to say why it ends."""


_claims: dict[bytes, socket.socket] = {}
"""Of this process."""


def _let_go() -> None:
    for claim in _claims.values():
        claim.close()
    _claims.clear()


os.register_at_fork(after_in_child=_let_go)


def claim_name(environment: WorkerEnvironment) -> None:
    """See that this process is the one that may come forward under the worker's name.

    Raises:
        NameTaken: it only runs the script again to begin as a child, or another process has the name.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise NameTaken(
            f"this process (pid {os.getpid()}) is no worker but a child of process {os.getppid()}, and runs the script "
            'again to begin: put its training under if __name__ == "__main__":, as Python asks of scripts whose '
            "processes are spawned"
        )
    coordinator = environment.coordinator
    if coordinator is None or environment.profile_out is not None or sys.platform != "linux":
        return
    place = environment.place
    which = () if place is None else (str(place),)
    job = "\n".join((coordinator, environment.job, environment.worker, *which))
    name = b"\0virtualflow-" + hashlib.sha256(job.encode()).hexdigest()[:40].encode()
    if name in _claims:
        return
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(name)
        claim.listen(1)
    except OSError as error:
        claim.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise NameTaken(
            f"this process (pid {os.getpid()}) has inherited the name {environment.worker}, which process "
            f"{_holder(name)} trains under: only one process of a worker may use vf.elastic; to train here beside the "
            "job, start this script without it, by: env -u VIRTUALFLOW_COORDINATOR -u VIRTUALFLOW_CHECKPOINT_DIR ..."
        ) from None
    _claims[name] = claim


def _holder(name: bytes) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(name)
            credentials = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        except OSError:
            return "another"
    return str(struct.unpack("3i", credentials)[0])


# SIGTERM while a run lasts: it asks for a drain, and then does what the script's own handler does.
#
# Batch systems send it before they take a machine away, and scripts have handlers of their own for that, which set a
# flag or write a file. Both are to know, wherever the script has set its handler: one that it sets inside the run is
# found between two steps.

_look_up: Callable[[int], Any] = import_module("_signal").getsignal
"""``signal.getsignal``, without the making of enums, which takes longer than all else between two steps."""


_SIGTERM = int(signal.SIGTERM)


class Sigterm:
    """The handler of one run."""

    def __init__(self, drain: Callable[[], None], warn: Callable[[str], None]) -> None:
        self._drain, self._warn = drain, warn
        self._process = os.getpid()
        self._former: Any = None
        """The script's handler, or what stood in its place."""
        self._handler = self._handle  # one object, to be known again
        self._open = self._calling = False
        self._told: Any = None

    def open(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._former, self._open = signal.signal(signal.SIGTERM, self._handler), True

    def look(self) -> None:
        """Find a handler that the script has set since, and call it after ours."""
        if self._open and _look_up(_SIGTERM) is not self._handler:
            self._replaced()

    def close(self) -> None:
        if self._open and signal.getsignal(signal.SIGTERM) is self._handler:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._former is None else self._former)
        self._open = False

    def _replaced(self) -> None:
        found = signal.getsignal(signal.SIGTERM)
        if callable(found):
            if threading.current_thread() is threading.main_thread():
                self._former = found
                signal.signal(signal.SIGTERM, self._handler)
        elif found is not self._told:
            self._told = found
            what = "is ignored" if found == signal.SIG_IGN else "ends this process at once"
            self._warn(
                f"SIGTERM {what} since the script has set signal.{getattr(found, 'name', 'a handler')} inside the run: "
                "it no longer asks for a drain, and the worker will be killed; leave SIGTERM as it is there, or set a "
                "handler, which is called as well"
            )

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._pass_on(number, frame)
            return
        self._drain()
        # A handler that calls the one before it comes back here.
        if self._calling or not callable(self._former) or self._former is end_at_once:
            return
        self._calling = True
        try:
            self._former(number, frame)
        except (SystemExit, KeyboardInterrupt):
            pass  # It is to end, and does so by the drain, in order.
        except Exception as error:  # noqa: BLE001 - raised here, it would strike between any two lines
            logger.warning("the script's SIGTERM handler raised %r; this worker drains", error)
        finally:
            self._calling = False

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """A process that the script has forked is no worker: do there what would be done without a run."""
        if callable(self._former):
            self._former(number, frame)
        elif self._former != signal.SIG_IGN:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)


# What the library knows of a script: what it has at hand that ought to be known, and why it ends itself. Pure.

_OURS = "virtualflow."
_LIBRARIES = (_OURS, "torch.")
_HELD_BY_US = 3
"""References to a frame's copy of its variables: the frame's, ours, and the count's. The script has one by locals()."""
_REACH = 2
"""How many objects away from a variable something is still looked for."""
_IN_ORDER = (None, 0, 128 + signal.SIGTERM)
"""Exit codes of a script that ends because SIGTERM has told it to."""


def check_left_behind(known: Callable[[object], bool], optimizers: Sequence[Optimizer]) -> None:
    """See that nothing in reach of the script would be left behind that is part of the training.

    Args:
        known: whether an object is part of the state.
        optimizers: of the training.
    """
    for name, value in _variables(sys._getframe(1)):
        if isinstance(value, AveragedModel) and not known(value):
            raise ConfigurationError(
                f"the script keeps an average of weights in {name}, which a worker that joins or a checkpoint would "
                f'not have; pass it to vf.elastic: state={{"{name}": {name}}}'
            )
        ours = isinstance(value, LRScheduler) and any(getattr(value, "optimizer", None) is one for one in optimizers)
        if ours and not known(value):
            raise ConfigurationError(
                f"the script has a learning rate scheduler in {name}, whose state a worker that joins or a checkpoint "
                'would not have; pass it to vf.elastic as scheduler=, with scheduler_interval="manual" if the script '
                f'steps it, or as state={{"{name}": {name}}}'
            )


_FIRST_LOOKS, _EVERY = 8, 100
"""Behind so many steps at the beginning it is looked for weights beside the model, and then behind two of so many."""
_TENSORS, _SAMPLED = 16, 1 << 16
"""Of such weights, so many tensors of so many elements are compared."""


class WeightsBeside:
    """Finds weights that a script averages or copies by hand: a teacher, a target network, shadows in a dict.

    What tells them from weights that stay as they are, and from those that are made anew where they are used, is that
    the same module, dict or list has held other values twice, which are not those of the model.

    Args:
        known: what is part of the state, with all that it holds.
    """

    def __init__(self, model: nn.Module, known: Callable[[], Iterable[object]]) -> None:
        self._own = list(model.parameters())
        self._trained = [parameter for parameter in self._own if parameter.requires_grad]
        self._shapes = sorted(tuple(parameter.shape) for parameter in self._trained)
        self._known = known
        self._step = 0
        """That it was last looked behind."""
        self._sums: list[list[int]] = []
        """The model's then."""
        self._found: dict[int, tuple[weakref.ref[nn.Module] | None, list[int], int]] = {}
        """By identity: the module, if it is one, its contents, and how often they had changed."""

    def look(self, step: int) -> str | None:
        """A sentence about weights that change; ``None``: there are none, or it is not looked now."""
        if step > _FIRST_LOOKS and step % _EVERY > 1:
            return None
        passed = [*self._own, *_with_parts(self._known())]
        places = {
            _place_of(each) for each in passed if isinstance(each, Tensor) and type(each) in (Tensor, nn.Parameter)
        }
        looked, found, changing = set(map(id, passed)), {}, None
        sums = [_sums(self._own), _sums(self._trained)]
        for name, value in _variables(sys._getframe(1)):
            if id(value) in looked:
                continue
            looked.add(id(value))
            try:
                held = self._weights_in(value)
                if not held or not places.isdisjoint(map(_place_of, held)):
                    continue
                now = _sums(held)
            except Exception:  # noqa: BLE001 - it may be anything, and nobody has asked for this look
                continue
            former, before, times = self._found.get(id(value), (None, now, 0))
            if former() is not value if former is not None else self._step != step - 1:
                before, times = now, 0  # another one has had its identity, as far as is known
            times += before != now and now not in sums and now not in self._sums
            found[id(value)] = weakref.ref(value) if isinstance(value, nn.Module) else None, now, times
            if times > 1:
                changing = changing or _beside(name, value)
        self._step, self._sums, self._found = step, sums, found
        return changing

    def _weights_in(self, value: object) -> list[Tensor]:
        if isinstance(value, nn.Module):
            return list(value.parameters())
        held: list[Any] = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        fit = len(held) == len(self._shapes) and all(isinstance(each, Tensor) for each in held)
        return held if fit and sorted(tuple(each.shape) for each in held) == self._shapes else []


def _place_of(tensor: Tensor) -> int | None:
    """Where its memory is; ``None``: it has none of its own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and not tensor.is_nested else None


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    floating = [each.detach() for each in tensors if each.is_floating_point()]
    smallest = sorted(floating, key=Tensor.numel)[:_TENSORS]
    return [int(add_bits(each.reshape(-1)[:_SAMPLED])) for each in smallest]


def _with_parts(objects: Iterable[object]) -> Iterator[object]:
    """These, and what is in the modules among them."""
    for each in objects:
        yield each
        for module in each.modules() if isinstance(each, nn.Module) else ():
            yield from (module, *module.parameters(recurse=False), *module.buffers(recurse=False))
            for held in vars(module).values():
                yield held
                yield from held.values() if isinstance(held, dict) else ()


def _beside(name: str, value: object) -> str:
    if isinstance(value, nn.Module):
        remedy = f'pass it to vf.elastic: state={{"{name}": {name}}}'
    else:
        remedy = (
            "keep them in an object with state_dict and load_state_dict, such as "
            'torch.optim.swa_utils.AveragedModel, and pass that to vf.elastic: state={"ema": ema}'
        )
    return (
        f"the script keeps weights in {name} ({type(value).__name__}) that change as it trains, and that a worker that "
        f"joins or a checkpoint would not have; {remedy}"
    )


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """The variables of the script's functions that are running, and the attributes of objects in them, and in those."""
    seen = dict[int, int]()
    while frame is not None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_OURS):
            variables = frame.f_locals
            named = [*variables.items()]
            code, copied = frame.f_code, sys.version_info < (3, 13) and sys.getrefcount(variables) <= _HELD_BY_US
            if copied and code.co_flags & inspect.CO_OPTIMIZED:
                for name in (*code.co_varnames, *code.co_cellvars, *code.co_freevars):
                    variables.pop(name, None)  # the frame would keep the copy, and all that is in it with it
            yield from _in_reach(named, _REACH, seen)
        frame = frame.f_back


def _in_reach(named: Iterable[tuple[str, Any]], reach: int, seen: dict[int, int]) -> Iterator[tuple[str, Any]]:
    for name, value in named:
        if type(value) in weakref.ProxyTypes:  # of what may be gone, which a look at it would tell
            continue
        yield name, value
        if seen.get(id(value), 0) >= reach:
            continue
        seen[id(value)] = reach
        held = None if isinstance(value, ModuleType | type) else attributes_of(value)
        if isinstance(held, dict) and not type(value).__module__.startswith(_LIBRARIES):
            yield from _in_reach([*held.items()], reach - 1, seen)


def read_exit(
    error: SystemExit, completed_steps: int, total_steps: int | None, draining: bool, coordinated: bool
) -> BaseException:
    """What ends the training, as the library understands it.

    Returns:
        ``Drained`` for one that was to leave; ``error`` itself for a script that runs alone, which may end when it
        likes; else ``ScriptExited``.
    """
    if draining and error.code in _IN_ORDER:
        drained = Drained("the script ended itself while this worker drained")
        drained.__cause__ = error
        return drained
    if not coordinated:
        return error
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    of_all = "" if total_steps is None else f" of {total_steps}"
    exited = ScriptExited(
        f"the script ended itself by sys.exit({'' if error.code is None else repr(error.code)}) after step "
        f"{completed_steps}{of_all}{where}, before the training was complete: leave the loop with break to stop all "
        "workers early, or raise an error"
    )
    exited.__cause__ = error
    return exited
