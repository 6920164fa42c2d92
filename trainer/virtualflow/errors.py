"""The errors that the library raises on purpose, so that callers can tell them from defects."""

from __future__ import annotations

import os
import re
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

_NOT_THE_SCRIPT = tuple(
    os.path.realpath(path) + os.sep for path in (os.path.dirname(__file__), sysconfig.get_path("stdlib"))
)
"""Where code lies that is no line of a user's: this library and Python's own,"""
_INSTALLED = ("site-packages", "dist-packages")
"""and folders with what was installed."""


class VirtualFlowError(Exception):
    """Base of every error that the library raises on purpose."""

    shown = False
    """Whether the user has read it already (:func:`show`)."""
    of_script = True
    """Whether it is about what the script asks for, so that its line is worth naming."""


class ConfigurationError(VirtualFlowError, ValueError):
    """Something that the user asked for cannot be done; the message is one sentence that says what to do."""


@contextmanager
def installed() -> Iterator[None]:
    """What is imported meanwhile may be a part of the library that this installation does not have."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("virtualflow."):
            raise
        raise ConfigurationError(
            f"this was installed without {error.name}, which that needs; install all of virtualflow"
        ) from None


class DoesNotFit(ConfigurationError):
    """No plan of memory fits into a budget."""

    of_script = False

    def __init__(self, sentence: str, smallest: int | None) -> None:
        super().__init__(sentence)
        self.smallest = smallest
        """Bytes of the device that would be enough, with the same memory of the host; ``None``: it is the host's memory
        that is not enough."""


class CoordinatorAbsent(ConfigurationError):
    """No coordinator answers where one was named."""

    of_script = False


class CommunicatorBroken(VirtualFlowError):
    """A collective failed or was abandoned: the attempt is aborted and the next generation repeats it."""

    of_script = False


def release_frames(error: BaseException) -> None:
    """Let go of what the functions held that an error came through: nobody needs their variables any more.

    An error that somebody keeps, as a :class:`~concurrent.futures.Future` does, keeps its traceback, and that the local
    variables of all those functions, often with the future among them. Such a circle waits for Python's collector of
    circles, which comes by how many objects there are, not by their bytes: a worker of 25 MB of gradients kept some
    300 MB more in this way.
    """
    known: set[int] = set()
    open_: list[BaseException | None] = [error]
    while open_:
        each = open_.pop()
        if each is not None and id(each) not in known:
            known.add(id(each))
            traceback.clear_frames(each.__traceback__)
            open_ += [each.__cause__, each.__context__]


class Damaged(CommunicatorBroken):
    """What has arrived is not what was sent."""


class Convicted(CommunicatorBroken):
    """A member came to wrong gradients: the others repeat the attempt without it."""

    def __init__(self, incarnation: str, reason: str) -> None:
        super().__init__(reason)
        self.incarnation = incarnation
        """Its process."""


class StatesDiffer(VirtualFlowError):
    """The workers have come to hold different states: nothing of the attempt was applied, and the job ends."""

    of_script = False

    def __init__(self, reason: str, odd: Sequence[str]) -> None:
        super().__init__(reason)
        self.odd = tuple(odd)
        """The processes that differ from what more than half of all have; empty: there is no such majority."""


class NonFiniteMetric(VirtualFlowError):
    """A metric became NaN or infinite, and the job is to stop then."""

    of_script = False


class LoaderEnded(VirtualFlowError, RuntimeError):
    """A process that loads samples has ended by itself, with an exit code: there is something in the script."""


class LoaderKilled(VirtualFlowError, RuntimeError):
    """A process that loads samples was killed by a signal, most often because its machine had run out of memory."""


class ScriptExited(VirtualFlowError):
    """The script ended itself by ``sys.exit()`` in the middle of the training."""


class Leave(SystemExit):
    """This worker's part is over before the end of the script; the process ends with ``code``.

    It is raised by iterating over the run, so that code after the training loop (saving the model, printing results)
    runs only in workers that saw the end of the training. ``finally`` blocks and context managers run as usual.
    """

    exit_code = 0

    def __init__(self, reason: str) -> None:
        super().__init__(self.exit_code)
        self.reason = reason


class Drained(Leave):
    """This worker was asked to leave and has handed over: exit code 0."""


class Profiled(Leave):
    """The device profile is written, which is all that the script was run for: exit code 0."""


class JobEnded(Leave):
    """The job was completed or stopped while this worker waited to join it: exit code 0."""


class JobFailed(Leave):
    """The job has failed elsewhere: exit code 1."""

    exit_code = 1


class Evicted(Leave):
    """The coordinator declared this process lost or refused it; it may be started again: exit code 75 (EX_TEMPFAIL)."""

    exit_code = 75


def describe(error: BaseException) -> str:
    """An error in one line: one of the library's own as its sentence and the line of the script that it is about, any
    other one by its name, with what to do behind it, where that is known.
    """
    if isinstance(error, VirtualFlowError):
        place = line_of_script(error) if error.of_script else None
        return str(error) if place is None else f"{error} ({place})"
    told = traceback.TracebackException.from_exception(error)
    notes, told.__notes__ = list(getattr(error, "__notes__", ())), None
    return "; ".join([[*told.format_exception_only()][-1].strip(), *map(str, notes)])


def line_of_script(error: BaseException) -> str | None:
    """The innermost line outside of this library, Python and what is installed that an error came through, or that has
    called what it came through, as ``train.py:31``; ``None``: there is none, or the error was not raised.
    """
    trace, found = error.__traceback__, None
    if trace is None:
        return None
    callers = _outward(trace.tb_frame.f_back)
    while trace is not None:
        if _is_script(trace.tb_frame):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    if found is None:
        found = next(((each.f_code.co_filename, each.f_lineno) for each in callers if _is_script(each)), None)
    if found is None:
        return None
    path, line = found
    beneath = os.path.relpath(path) if path.startswith(os.getcwd() + os.sep) else os.path.basename(path)
    return f"{beneath}:{line}"


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_script(frame: FrameType) -> bool:
    path = os.path.realpath(frame.f_code.co_filename)
    installed = any(name in path.split(os.sep) for name in _INSTALLED)
    return os.path.exists(path) and not installed and not path.startswith(_NOT_THE_SCRIPT)


def advise(error: BaseException) -> None:
    """Put behind an error of PyTorch or Python what to do about it, where that is known."""
    if isinstance(error, Exception) and not isinstance(error, VirtualFlowError):
        advice = remedy("".join(traceback.format_exception(error)))
        if advice is not None and not getattr(error, "__notes__", ()):  # who knew more has said it
            error.add_note(f"what to do: {advice}")


def show(error: VirtualFlowError) -> None:
    """Print an error that the library raised on purpose as its sentence, once."""
    if not error.shown:
        print(f"virtualflow: {describe(error)}", file=sys.stderr, flush=True)
        error.shown = True


class _PlainErrors:
    """The hook of :func:`show_errors_plainly`."""

    def __init__(self, former: Callable[[type[BaseException], BaseException, TracebackType | None], object]) -> None:
        self._former = former

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _hear_no_child()
        if isinstance(error, VirtualFlowError):
            show(error)
        else:
            advise(error)
            self._former(kind, error, trace)


def _hear_no_child() -> None:
    """torch's handler of SIGCHLD raises where a loader process was shot, and would end the telling of why all ends."""
    if threading.current_thread() is threading.main_thread():
        while callable(signal.getsignal(signal.SIGCHLD)):
            with suppress(RuntimeError):
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def show_errors_plainly() -> None:
    """Let an error that the library raised on purpose end a script with its sentence, and tell of others what to do."""
    if not isinstance(sys.excepthook, _PlainErrors):
        sys.excepthook = _PlainErrors(sys.excepthook)


# What to do about errors that are not the library's own: PyTorch's and Python's, as scripts new to it meet them.
#
# A table from what a traceback ends with to a sentence, which is put behind the original error. It knows only errors
# that say little about their cause, or whose usual remedy is another one with this library.

_GROUP = (
    "a script needs no process group here, no RANK and no WORLD_SIZE: give vf.elastic the plain model and the whole "
    "dataset, and the library divides each batch among the workers and sums their gradients; remove "
    "init_process_group, DistributedDataParallel, FSDP and DistributedSampler, let run.leader say who prints, and "
    "start the script with: virtualflow run --workers N"
)
_DTYPE = (
    "the batch and the model, or the loss and its target, are of different types; convert the samples in the dataset "
    "(NumPy's numbers are float64: tensor.float()), or the model before its optimizer is made (model.double())"
)
_DEVICE = (
    "the batch and the model are on different devices; move the model before its optimizer is made, and pass device= "
    "to vf.elastic, which brings each micro-batch there"
)
_COLLATE = (
    "samples of these shapes or types make no batch by themselves; pass collate_fn= to vf.elastic, as to a "
    "DataLoader: it gets a list of samples and pads or converts them"
)
_NO_GRADIENT = (
    "the loss depends on nothing that is trained; look for torch.no_grad(), .detach(), .item() or parameters with "
    "requires_grad=False between the model and the loss"
)
_SECOND_BACKWARD = (
    "the loss depends on something that an earlier micro-batch has computed; compute it anew in the inner loop, or "
    "detach() what is kept"
)
_UNPACKING = (
    "the inner loop gets one micro-batch at a time, as collate_fn makes it of the dataset's samples: it has as many "
    "parts as a sample has"
)
_ONE_SAMPLE = (
    "a virtual node has a single sample, and batch norm needs two; use a larger batch_size, fewer virtual_nodes, or "
    "drop_last=True if it is the last batch of an epoch"
)
_MEMORY = (
    "a virtual node's micro-batch does not fit; use more virtual_nodes, which makes it smaller and leaves the batch "
    "as it is, or memory=vf.Memory(...) (virtualflow plan shows what would fit)"
)
_TORCH_FUNC = (
    "vf.Memory looks in the first steps at what autograd saves, which torch refuses to functions of torch.func; leave "
    "these out of the training loop, or memory= out of vf.elastic"
)
_FORKED = 'start loader processes anew instead of by fork: pass multiprocessing_context="spawn" to vf.elastic'

_RANKS = "(?:RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|NODE_RANK|MASTER_ADDR|MASTER_PORT)"
_CARETS = r"\n(?:[ ~^]*\n)?"
"""Between a line of source and the error that it raised."""

_TABLE = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (rf"environment variable {_RANKS} expected", _GROUP),
        (r"Error initializing torch\.distributed", _GROUP),
        (r"Default process group has not been initialized", _GROUP),
        (rf"KeyError: '{_RANKS}'", _GROUP),
        (rf"{_RANKS}\b[^\n]*{_CARETS}TypeError: int\(\) argument", _GROUP),
        (r"Expected all tensors to be on the same device|is not on the expected device", _DEVICE),
        (r"Input type \([^)]*cuda[^)]*\) and|(?:weight|bias) type \([^)]*cuda", _DEVICE),
        (r"have the same dtype, but got|expected (?:target dtype|scalar type)|Found dtype \w+ but expected", _DTYPE),
        (r"following scalar types: |Input type \([^)]*\) and (?:weight|bias) type", _DTYPE),
        (r"input dtype \([^)]*\) does not match weight dtype", _DTYPE),
        (r"default_collate: batch must contain|each element in list of batch should be of equal size", _COLLATE),
        (r"stack expects each tensor to be equal size", _COLLATE),
        (r"does not require grad and does not have a grad_fn", _NO_GRADIENT),
        (r"Trying to backward through the graph a second time", _SECOND_BACKWARD),
        (rf"for [^\n]+ in [^\n]*\bstep\b[^\n]*{_CARETS}ValueError: (?:not enough|too many) values", _UNPACKING),
        (r"Expected more than 1 value per channel when training", _ONE_SAMPLE),
        (r"CUDA out of memory", _MEMORY),
        (r"don't yet support saved tensor hooks", _TORCH_FUNC),
        (r"Cannot re-initialize CUDA in forked subprocess", _FORKED),
    )
)


def remedy(traceback: str) -> str | None:
    """What to do about the error that a traceback ends with, as one sentence; ``None``: it is not known here."""
    _, _, raised = traceback.rpartition('\n  File "')
    return next((sentence for pattern, sentence in _TABLE if pattern.search(raised)), None)
