"""Python programs of tests, as forks of the server that has imported torch: what ``python ...`` does, without its boot.

A program gets its command line, environment, directory, streams and session, as from ``subprocess``, and it is a
process of its own; programs that it starts itself are its forks and its children, with everything that this means for
signals and ends. What a fork cannot give: hashes of texts are the same in all of them, and a library reads no variable
again that it reads when it is loaded (``ATEN_CPU_CAPABILITY``). Tests of such things, and those that make sure that
nothing of it matters, start real interpreters.
"""

from __future__ import annotations

import asyncio
import atexit
import io
import itertools
import logging
import multiprocessing
import os
import random
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import process as processes
from multiprocessing import reduction
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from forking import FORKING, PATHS, start

_Main: Any = type(processes.current_process())
"""Imported by a main process, here and in the server; a fork of the server is one of another class."""

_LOADED = ("ATEN_CPU_CAPABILITY", "LD_PRELOAD", "PYTHONHASHSEED")
"""Variables that act when a program is loaded."""

_FLAGS = ("-u", "-P")
"""Of the interpreter: output unbuffered, and no look at the present directory for modules."""


class Program(subprocess.Popen[str]):
    """Like ``subprocess.Popen`` of ``[sys.executable, ...]`` with ``text=True``."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        assert _is_ours(command, options.get("env") or os.environ), command
        super().__init__(command, text=True, **options)

    def _execute_child(self, args: Any, executable: Any, *more: Any) -> None:
        _, _, _, cwd, env, _, _, _, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest = more
        streams = [_Stream(ours if ours != -1 else n) for n, ours in enumerate((p2cread, c2pwrite, errwrite))]
        session = bool(rest[5])
        arguments = (list(args), dict(env or os.environ), str(cwd or Path.cwd()), streams, session)
        self._process = FORKING.Process(target=_become, args=arguments)
        start(self._process)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and (code := self._process.exitcode) is not None:
            self.returncode = code
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            self._process.join(timeout)
            code = self._process.exitcode
            if code is None:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = code
        return self.returncode


def run(command: Sequence[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, as ``subprocess.run`` with ``capture_output=True`` and ``text=True``."""
    with Program(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as program:
        try:
            out, err = program.communicate(timeout=timeout)
        except BaseException:
            program.kill()
            raise
        return subprocess.CompletedProcess(command, program.returncode, out, err)


class _Stream:
    """A descriptor on its way to the server."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _detached, (reduction.DupFd(self.number),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _is_ours(command: Any, environment: Mapping[str, str]) -> bool:
    if isinstance(command, (str, bytes, os.PathLike)) or command[0] != sys.executable or len(command) < 2:
        return False
    if any(environment.get(name) != os.environ.get(name) for name in _LOADED):
        return False
    words = [word for word in command[1:] if word not in _FLAGS]
    return bool(words) and (words[0] in ("-m", "-c") or not words[0].startswith("-"))


# --- in the fork ------------------------------------------------------------------------------------------------------


def _become(command: list[str], environment: dict[str, str], cwd: str, streams: list[int], session: bool) -> NoReturn:
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    for stream in streams:
        if stream > 2:
            os.close(stream)
    if session:
        os.setsid()
    os.chdir(cwd)
    _interpret(command, environment)


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork(self: Any, args: Any, executable: Any, preexec: Any, *more: Any) -> None:
    """``Popen._execute_child`` of a process that is a fork already: Python programs become forks of it."""
    _, keep, cwd, env, _, _, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest = more
    if shell or executable is not None or not _is_ours(args, env if env is not None else os.environ):
        _execute(self, args, executable, preexec, *more)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    self.pid = os.fork()
    if self.pid == 0:
        try:
            _take_streams([p2cread, c2pwrite, errwrite], keep)
            if rest[5]:
                os.setsid()
            if cwd is not None:
                os.chdir(cwd)
            if preexec is not None:
                preexec()
            _reset_signals()
            signal.pthread_sigmask(signal.SIG_SETMASK, former)
            _interpret([os.fsdecode(word) for word in args], dict(env if env is not None else os.environ))
        except BaseException:  # noqa: BLE001 - it must not come back into the parent's code
            traceback.print_exc()
        finally:
            os._exit(255)
    signal.pthread_sigmask(signal.SIG_SETMASK, former)
    self._child_created = True
    self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


def _take_streams(streams: list[int], keep: Sequence[int]) -> None:
    """Put the standard streams in their places; all else that the parent has open leads nowhere from here.

    It is not closed: objects of the parent's would later close what then has the same number.
    """
    high = [os.dup(stream) if stream != -1 else os.dup(target) for target, stream in enumerate(streams)]
    for target, stream in enumerate(high):
        os.dup2(stream, target)
        os.close(stream)
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        if number > 2 and number != nothing and number not in keep:
            try:
                os.fstat(number)
            except OSError:  # the listing's own
                continue
            os.dup2(nothing, number, inheritable=False)
    os.close(nothing)


def _reset_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        handler = {signal.SIGINT: signal.default_int_handler, signal.SIGPIPE: signal.SIG_IGN}.get(number)
        if signal.getsignal(number) is not None:
            signal.signal(number, handler or signal.SIG_DFL)


def _forget_the_parent() -> None:
    """Leave nothing in Python's own modules that tells of the process that this is a fork of."""
    _reset_signals()
    asyncio.events._set_running_loop(None)
    asyncio.set_event_loop_policy(None)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.detach()
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined]
    atexit._clear()
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    processes._current_process = _Main()  # type: ignore[attr-defined]
    processes._parent_process = None  # type: ignore[attr-defined]
    processes._children = set()  # type: ignore[attr-defined]
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined]
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    tempfile.tempdir = None
    random.seed()


def _open_streams(unbuffered: bool) -> None:
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - as long as the process
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.FileIO(number, "w", closefd=False)
        buffered = raw if unbuffered else io.BufferedWriter(raw)
        errors = "backslashreplace" if number == 2 else "strict"
        plain: Any = buffered
        stream = io.TextIOWrapper(
            plain, encoding="utf-8", errors=errors, line_buffering=number == 2, write_through=unbuffered
        )
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _interpret(command: list[str], environment: dict[str, str]) -> NoReturn:
    """Do what the interpreter does, and end the process as it does."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        _forget_the_parent()
        if "virtualflow._start" in sys.modules:
            vars(sys.modules["virtualflow._start"])["_DIRECTORY"] = os.getcwd()
        if "torch" in sys.modules and environment.get("OMP_NUM_THREADS"):
            sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
        subprocess.Popen._execute_child = _fork  # type: ignore[attr-defined]
        flags = list(itertools.takewhile(_FLAGS.__contains__, command[1:]))
        _open_streams("-u" in flags)
        safe = "-P" in flags or bool(environment.get("PYTHONSAFEPATH"))
        code = _main(command[1 + len(flags) :], environment, safe)
    except BaseException:  # noqa: BLE001 - the process ends here, whatever happens
        traceback.print_exc()
    finally:
        _end(code)


def _main(words: list[str], environment: Mapping[str, str], safe: bool) -> int:
    what, arguments = words[0], words[1:]
    main = sys.modules["__main__"] = ModuleType("__main__")
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    own = {"-m": os.getcwd(), "-c": ""}.get(what, os.path.dirname(os.path.realpath(what)))
    sys.path[:] = [*([] if safe else [own]), *given, *(path for path in sys.path if path not in PATHS)]
    sys.argv[:] = [what, *(arguments[1:] if what == "-c" else arguments)]
    try:
        if what == "-m":
            sys.argv[:] = ["-m", *arguments[1:]]
            runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        elif what == "-c":
            exec(compile(arguments[0], "<string>", "exec"), vars(main))
        else:
            main.__file__ = what
            try:
                source = Path(what).read_bytes()
            except OSError as error:
                path = os.path.abspath(what)
                print(f"{sys.executable}: can't open file {path!r}: {error}", file=sys.stderr)
                return 2
            exec(compile(source, what, "exec"), vars(main))
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - shown as the interpreter shows it
        trace = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        if isinstance(error, KeyboardInterrupt):
            return -signal.SIGINT
        return 1
    return 0


def _end(code: int) -> NoReturn:
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except BaseException:  # noqa: BLE001 - the process ends here, whatever happens
        traceback.print_exc()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code)
