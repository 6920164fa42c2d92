"""Real ``torch.utils.data.DataLoader``s whose processes cannot outlive, outstay or give away their owner.

A loader process is a fork of a worker. Left alone, it survives the worker's SIGKILL for seconds and holds a
copy of the worker's sockets, so peers would not see the connection close and a dead worker would look like a
slow one. Both kinds of source (`map_source`, `iterable_source`) open their loaders here.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
import stat
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from types import FrameType, FunctionType, MethodType, ModuleType
from typing import Any, Literal, Protocol, TypedDict

import numpy as np
import torch
import torch.multiprocessing
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data import dataloader as torch_dataloader
from torch.utils.data._utils import signal_handling

from virtualflow.data.counting import ALL, Count
from virtualflow.errors import ConfigurationError, LoaderEnded, LoaderKilled

logger = logging.getLogger("virtualflow.worker")

Collate = Callable[[list[Any]], Any]

Early = Literal["nothing", "step", "epoch"]
"""What may be fetched before its turn, and be forgotten again, without anybody noticing: nothing, because the user's
code would run in this process at another time; the rest of a step, because beyond it one might have to wait; the epoch.
"""

_PR_SET_PDEATHSIG = 1
GRACE = 5.0
"""Seconds that a loader process may take to finish the batch in hand before it is killed."""

_START_METHODS = ("fork", "spawn")
"""Ways to start a loader process by which it can be tied to the life of its worker; a fork server is none."""


class LoaderOptions(TypedDict, total=False):
    """Arguments of ``torch.utils.data.DataLoader`` that pass through unchanged, with torch's own defaults."""

    num_workers: int
    collate_fn: Collate | None
    pin_memory: bool
    prefetch_factor: int | None
    worker_init_fn: Callable[[int], None] | None
    multiprocessing_context: str | BaseContext | None
    timeout: float


@dataclass(frozen=True)
class MicroBatch:
    """What one virtual node computes on in one step."""

    virtual_node: int
    data: Any
    """What ``collate_fn`` returned; ``None`` when there is no sample for this virtual node."""
    loaded: tuple[int, ...] | torch.Tensor
    """What was really loaded, as `samples` says it, or as a tensor."""
    sizes: tuple[int, ...] = ()
    """Samples of each of its virtual nodes, of which ``virtual_node`` is the first; empty where it is of that one."""
    count: Count = ALL
    """What its ``collate_fn`` has kept of them."""

    @property
    def samples(self) -> tuple[int, ...]:
        """What was really loaded, in order: indices into the dataset; for a stream, positions in its shard."""
        return self.loaded if isinstance(self.loaded, tuple) else tuple(self.loaded.tolist())

    @cached_property
    def size(self) -> int:
        return sum(self.sizes) if self.sizes else len(self.loaded)

    @property
    def kept(self) -> int:
        """How many of them it holds: it weighs by this, also the short last batch of an epoch."""
        return self.size if self.count.kept is None else self.count.kept

    @property
    def counts(self) -> tuple[int, ...]:
        return self.sizes or (self.size,)

    def apart(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        passed, samples = 0, self.samples
        for offset, size in enumerate(self.counts):
            yield self.virtual_node + offset, samples[passed : passed + size]
            passed += size


class Source(Protocol):
    """Where a worker's micro-batches come from. A position is (epoch, step in the epoch), counted from 0."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps in an epoch; ``None`` for streams, whose epoch ends when all of them are at their end."""

    def samples(self, epoch_step: int) -> int | None:
        """How many samples the global batch of a step has; ``None`` for streams, which must be read to know."""

    @property
    def fuses(self) -> bool:
        """Whether the samples of several virtual nodes can be had as one micro-batch."""

    @property
    def early(self) -> Early:
        """What may be fetched before its turn."""

    @property
    def version(self) -> object:
        """Another value tells that what was fetched before its turn may not be what it would be now."""

    def assign(self, virtual_nodes: Sequence[int], epoch: int, epoch_step: int, width: int = 1) -> None:
        """From this position on, this worker is assigned these virtual nodes. The same position again repeats the step.

        They will be fetched in the chunks that ``sampling.chunks`` makes of them with this ``width``.
        """

    def fetch(self, epoch: int, epoch_step: int, virtual_node: int, count: int = 1) -> MicroBatch:
        """Return one micro-batch, of ``count`` neighbouring virtual nodes.

        Calls come in the order of what is needed; fetching again loads again.

        Raises:
            Exception: what the dataset or ``collate_fn`` raised; from a loader process with its traceback as
                text. LoaderKilled: a loader process was killed. LoaderEnded: one ended by itself. RuntimeError: one
                timed out, or the source is closed.
        """

    def read_again(self, batch: MicroBatch, epoch: int, epoch_step: int) -> tuple[MicroBatch, MicroBatch] | None:
        """The same micro-batch twice: once as it was read in turn, and once as by somebody who reads nothing else.

        The two differ where the dataset or ``collate_fn`` remembers what it has given.

        Returns:
            ``None`` if they cannot differ, or reading again takes too long.
        """

    def look(self, index: int, see: Callable[[Any], Any]) -> Any:
        """What ``see`` (which can be pickled) says of a sample, wherever samples are read, before ``collate_fn``.

        Returns:
            ``None`` if there are no such samples, this one cannot be read, or ``see`` says something else of it when it
            is read again.
        """

    def close(self) -> None:
        """End the loader processes and threads; harmless when called again."""


def check_options(options: LoaderOptions) -> None:
    known = LoaderOptions.__annotations__
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise ConfigurationError(
            f"{', '.join(unknown)} cannot be passed to the data loader; these can: {', '.join(known)}"
        )
    processes = options.get("num_workers", 0)
    if processes < 0:
        raise ConfigurationError(f"num_workers is {processes}; use 0 to load in the training process")
    if options.get("timeout", 0) < 0:
        raise ConfigurationError("timeout must not be negative; use 0 to wait as long as it takes")
    prefetch = options.get("prefetch_factor")
    if prefetch is not None and prefetch < 1:
        raise ConfigurationError(f"prefetch_factor is {prefetch}; use at least 1 or leave it out")
    if not processes:
        concurrent = ("prefetch_factor", "multiprocessing_context", "timeout")
        idle = [name for name in concurrent if options.get(name)]
        if idle:
            raise ConfigurationError(f"{', '.join(idle)} needs loader processes; set num_workers above 0")
    context = options.get("multiprocessing_context")
    method = context if context is None or isinstance(context, str) else context.get_start_method()
    if processes and (method or torch.multiprocessing.get_start_method()) not in _START_METHODS:
        raise ConfigurationError(
            f"multiprocessing_context {method or torch.multiprocessing.get_start_method()!r} is not supported, because "
            f"such loader processes would outlive a worker that is killed; use one of {', '.join(_START_METHODS)}"
        )


def collate_of(options: LoaderOptions) -> Collate:
    return options.get("collate_fn") or default_collate


def open_loader(
    adapter: Dataset[Any],
    dataset: object,
    options: LoaderOptions,
    *,
    collate: Callable[[Any], Any],
    sampler: Iterable[Any] | None,
    batch_size: int | None,
) -> Iterator[Any]:
    """Start iterating a new ``DataLoader`` over ``adapter``, which wraps the user's ``dataset``.

    With loader processes, they start now, and they die with the thread that calls this: call it from the main
    thread.
    """
    loader: DataLoader[Any] = DataLoader(
        adapter,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=options.get("num_workers", 0),
        collate_fn=collate,
        pin_memory=options.get("pin_memory", False),
        timeout=options.get("timeout", 0),
        prefetch_factor=options.get("prefetch_factor"),
        multiprocessing_context=options.get("multiprocessing_context"),
        worker_init_fn=_Arrival(options.get("worker_init_fn"), dataset, _parentage(options)),
        # Only the base seed of loader processes comes from it; without one, torch would draw from the global
        # generator.
        generator=torch.Generator(),
    )
    try:
        return iter(loader)
    except BrokenPipeError as error:
        raise LoaderEnded("a loader process ended before it had begun: what it wrote says why") from error


def close_loader(iterator: Iterator[Any]) -> None:
    """End a loader's processes and threads; a process still busy after ``GRACE`` seconds is killed."""
    # torch ends loaders when they are collected, which a traceback can put off, and waits five seconds for
    # each process. Its own order of shutting down is kept (it does not lock up on a half-written message);
    # only the patience is ours.
    shut_down = getattr(iterator, "_shutdown_workers", None)
    if shut_down is None:
        return
    processes = list(getattr(iterator, "_workers", ()))

    def kill() -> None:
        # Else torch would report the killed as failures.
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        vars(iterator)["_worker_pids_set"] = False
        for process in processes:
            process.kill()

    impatience = threading.Timer(GRACE, kill)
    impatience.start()
    try:
        shut_down()
    finally:
        impatience.cancel()
        impatience.join()
    for process in processes:
        process.join()


@dataclass(frozen=True)
class _Parentage:
    parent: int | None
    """The process to die with; ``None`` when that is none of our business or cannot be told."""
    forked: bool
    """It holds whatever its parent had open."""


def _parentage(options: LoaderOptions) -> _Parentage:
    context = options.get("multiprocessing_context")
    if context is None:
        method = torch.multiprocessing.get_start_method()
    else:
        method = context if isinstance(context, str) else context.get_start_method()
    # Linux ties a child to the thread that started it.
    tied = sys.platform == "linux" and threading.current_thread() is threading.main_thread()
    return _Parentage(parent=os.getpid() if tied else None, forked=method == "fork")


@dataclass(frozen=True)
class _Arrival:
    """What a loader process does first: cut the wrong ties, then call the user's ``worker_init_fn``."""

    user: Callable[[int], None] | None
    dataset: object
    parentage: _Parentage

    def __call__(self, worker_id: int) -> None:
        # Ctrl-C reaches the whole process group; the worker decides what it means, its loaders do not.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.parentage.parent is not None:
            _die_with(self.parentage.parent)
        if self.parentage.forked:
            _let_go_of_connections()
        info = get_worker_info()
        if info is not None:
            # As with any DataLoader, the user's function finds the user's dataset there, not our adapter. The
            # class forbids plain assignment.
            object.__setattr__(info, "dataset", self.dataset)
        if self.user is not None:
            self.user(worker_id)


def _die_with(parent: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before it could be asked for
        os._exit(1)


def _let_go_of_connections() -> None:
    """Point every inherited TCP socket at /dev/null, so that the parent's death closes its connections.

    They are overwritten, not closed: the objects that own these numbers live on in this process, and would
    close whatever had been given the number since.
    """
    listing = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        for number in [int(name) for name in os.listdir(listing)]:
            try:
                if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_internet(number):
                    os.dup2(null, number, inheritable=False)
            except OSError:
                continue  # the listing's own descriptor, or a kind of socket that Python does not know
    finally:
        os.close(null)


def _is_internet(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as duplicate:
        return duplicate.family in (socket.AF_INET, socket.AF_INET6)


# What the end of a loader process means, and where it may interrupt this one.
#
# torch tells of it by an exception out of a signal handler: between any two lines of the main thread, also of this
# library's, where it would leave locks taken and messages half sent. While a run lasts, it may come only out of code
# that reads from a ``DataLoader``, ours or the script's: there it ends a wait that might have no end. What a dead
# process means elsewhere, the next read says.

Handler = Callable[[int, FrameType | None], Any]

_READING = torch_dataloader.__file__, "_get_data"
"""The code of a ``DataLoader`` that waits for its processes: file and function."""

_ends = 0
"""How often a child process of this one has ended, or stopped, while a run lasted."""

_DYING = 1.0
"""Seconds until a process that has closed its connections must have ended."""

_LOOK = 0.001
"""Seconds between two looks at it."""


def read(iterator: Iterator[Any], seen: int) -> tuple[Any, int]:
    """The next item of a ``DataLoader``'s ``iterator``, and how many ends of child processes it takes account of.

    Raises:
        LoaderKilled: a process of the loader was killed.
        LoaderEnded: it has ended by itself.
        Exception: what the loader raised otherwise.
    """
    if _ends != seen:
        seen = _ends
        _explain(iterator, None)
    try:
        return next(iterator), seen
    except StopIteration:
        raise
    except Exception as error:
        # A connection may break a moment before its process has ended.
        dying = _DYING if isinstance(error, ConnectionError | EOFError | FileNotFoundError) else 0.0
        _explain(iterator, error, dying)
        raise


def _explain(iterator: Iterator[Any], error: Exception | None, dying: float = 0.0) -> None:
    processes: list[BaseProcess] = list(getattr(iterator, "_workers", ()))
    if not processes:
        return
    _await_end(processes, dying)
    failed = [process for process in processes if process.exitcode is not None]
    # Those that end behind the first have found that it is gone.
    killed = next((process for process in failed if (process.exitcode or 0) < 0), None)
    if killed is not None:
        number = -(killed.exitcode or 0)
        raise LoaderKilled(
            f"a loader process (pid {killed.pid}) was killed by {_name(number)}{_CAUSES.get(number, '')}"
        ) from error
    stopped = next((process for process in failed if process.exitcode), None)
    if stopped is not None or (failed and error is not None):
        process = stopped or failed[0]
        raise LoaderEnded(
            f"a loader process (pid {process.pid}) ended by itself with exit code {process.exitcode}: what it wrote "
            "says why; a dataset must not call sys.exit(), and where processes are spawned the script must train under "
            'if __name__ == "__main__":'
        ) from error


def _await_end(processes: list[BaseProcess], patience: float) -> None:
    deadline = time.monotonic() + patience
    closed = set(connection.wait([process.sentinel for process in processes], patience))
    for process in processes:
        # What it had open is closed a moment before its exit code is there.
        while process.sentinel in closed and process.exitcode is None and time.monotonic() < deadline:
            time.sleep(_LOOK)


_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", most likely because memory ran out; use fewer num_workers or a smaller prefetch_factor if it "
    "happens again",
    signal.SIGBUS: ", most likely because shared memory (/dev/shm) is full; give the container more of it if it "
    "happens again",
}


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def hear_of_ends() -> Callable[[], None]:
    """From now on, let ends of loader processes raise only where a ``DataLoader`` is read; what undoes that."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    signal_handling._set_SIGCHLD_handler()  # else a later loader would put it before ours
    former = signal.getsignal(signal.SIGCHLD)
    if not callable(former):
        return lambda: None
    handler = _at_reads(former)
    signal.signal(signal.SIGCHLD, handler)

    def undo() -> None:
        if signal.getsignal(signal.SIGCHLD) is handler:
            signal.signal(signal.SIGCHLD, former)

    return undo


def _at_reads(former: Handler) -> Handler:
    def handle(number: int, frame: FrameType | None) -> None:
        global _ends  # noqa: PLW0603 - there is one handler, and one main thread
        _ends += 1
        try:
            former(number, frame)
        except RuntimeError:
            if _reads(frame):
                raise

    return handle


def _reads(frame: FrameType | None) -> bool:
    """Whether the code under way there, or what has called it, waits for the processes of a ``DataLoader``."""
    while frame is not None:
        if (frame.f_code.co_filename, frame.f_code.co_name) == _READING:
            return True
        frame = frame.f_back
    return False


# What a script sets on its dataset while it trains (set_epoch, a curriculum, a new transform) does not reach loader
# processes, which have copies. PyTorch starts new ones in every epoch, so there it does; these live as long as the job.

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_NO_HOLDERS = (Tensor, nn.Module, ModuleType, FunctionType, MethodType, type)
_ABSENT = (object(), None)
_DEPTH, _MOST = 8, 64
"""How far from the dataset objects are looked at, and how many; of a container with more elements than that, none."""


class Watched:
    """The attributes of a dataset and a ``collate_fn``, and of objects in them: whether the script has set any since.

    What changes within an array, a dict or an attribute that is no plain value is not seen, and neither are resources
    that are opened late.
    """

    def __init__(self, *roots: object) -> None:
        self._roots, self._told = roots, False
        self._noted: list[tuple[str, dict[str, Any], dict[str, tuple[Any, int | None]]]] = []
        self._note()

    def have_changed(self, within_epoch: bool) -> bool:
        """Whether loader processes are to begin anew, to have what the script has set since this was last asked.

        Args:
            within_epoch: PyTorch would start none here, and scripts do not expect it.
        """
        changed = self.changed
        if changed is None:
            return False
        self._note()
        if within_epoch and not self._told:
            self._told = True
            logger.warning(
                "the script has changed %s within an epoch, and loader processes begin anew to have it, each time: "
                "change it when an epoch begins, or use num_workers=0",
                changed,
            )
        return True

    @property
    def changed(self) -> str | None:
        """An attribute that the script has set; ``None``: there is none."""
        return next((f"{name}.{key}" for name, holder, noted in self._noted if (key := _differs(holder, noted))), None)

    def _note(self) -> None:
        self._noted = [
            (name, holder, {key: (value, _state_of(value)) for key, value in holder.items()})
            for name, holder in _holders(self._roots)
        ]


def _differs(holder: dict[str, Any], noted: dict[str, tuple[Any, int | None]]) -> str | None:
    present = list(holder.items())  # at once: another thread may set some
    for name, value in present:
        before, state = noted.get(name, _ABSENT)
        if value is before:
            if state is not None and _state_of(value) not in (state, None):
                return name
        elif _are_equal(value, before, state):
            noted[name] = value, _state_of(value)
        elif not ((before is None or name not in noted) and _is_resource(value)):
            return name
    return None if len(present) == len(noted) else next((name for name in noted if name not in holder), None)


def _state_of(value: Any) -> int | None:
    """What shows that it was written to; ``None``: nothing does, or loader processes see what is written."""
    if type(value) in weakref.ProxyTypes:  # of what may be gone, which a look at it would tell
        return None
    if (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_meta)
    ):
        return None if value.is_inference() or value.is_shared() else value._version
    return len(value) if isinstance(value, list | set) else None


def _are_equal(value: Any, before: Any, state: int | None) -> bool:
    """Whether it is the same value made anew, as ``set_epoch`` does that a script calls in each step."""
    if type(value) is not type(before) or (state is not None and _state_of(before) not in (state, None)):
        return False
    plain = (*_PLAIN, np.generic)
    try:
        if isinstance(value, Tensor):
            alike = (value.shape, value.dtype, value.device) == (before.shape, before.dtype, before.device)
            return alike and torch.equal(value, before)
        if isinstance(value, np.memmap):
            return (value.filename, value.offset, value.shape) == (before.filename, before.offset, before.shape)
        if isinstance(value, np.ndarray):
            return value.dtype == before.dtype and np.array_equal(value, before)
        if isinstance(value, list | tuple) and all(isinstance(each, plain) for each in (*value, *before)):
            return bool(value == before)
        return isinstance(value, plain) and bool(value == before)
    except (RuntimeError, TypeError, ValueError):  # of kinds that cannot be compared: meta, nested, of arrays
        return False


def _is_resource(value: Any) -> bool:
    """Whether it is an open file or the like, which each process opens for itself, and not what a script sets."""
    if isinstance(value, (*_PLAIN, *_NO_HOLDERS, np.ndarray)) or type(value) in weakref.ProxyTypes:
        return False
    try:
        value.__reduce_ex__(2)
    except Exception:  # noqa: BLE001 - it may be anybody's
        return True
    return False


def _holders(roots: Iterable[object]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The attributes of the objects in reach, nearest first, each with its class."""
    seen, level = set[int](), list(roots)
    for _ in range(_DEPTH):
        following: list[object] = []
        for each in level:
            if id(each) in seen or type(each) in weakref.ProxyTypes or isinstance(each, (*_PLAIN, *_NO_HOLDERS)):
                continue
            seen.add(id(each))
            if len(seen) > _MOST:
                return
            if isinstance(each, list | tuple | dict):
                if len(each) <= _MOST:
                    following += each.values() if isinstance(each, dict) else each
            elif (held := attributes_of(each)) is not None:
                yield type(each).__name__, held
                following += held.values()
        level = following


def attributes_of(value: object) -> dict[str, Any] | None:
    """The attributes that an object has of its own, without its own word on it."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return held if isinstance(held, dict) else None
