"""``virtualflow profile``: run a user's script as one process of this machine, to measure it and not to train."""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from virtualflow.atomic_file import write_whole
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.launcher.options import check_target, check_trainer
from virtualflow.launcher.settings import ALLOCATOR_ENVIRONMENT
from virtualflow.launcher.supervisor import describe_exit, run_to_end
from virtualflow.launcher.training_program import TrainingProgram
from virtualflow.protocol.device_profile import DeviceProfile, describe, encode, read_profile
from virtualflow.protocol.settings import (
    ENV_AUDIT_DIR,
    ENV_COORDINATOR,
    ENV_PROFILE,
    ENV_PROFILE_OUT,
    ENV_PROFILE_SIZES,
    ENV_TERMINATION_LOG,
    ENV_TOKEN,
    ENV_VIRTUAL_NODES,
    ENV_WORKER,
)

_NOT_FOR_IT = (ENV_COORDINATOR, ENV_TOKEN, ENV_WORKER, ENV_PROFILE, ENV_AUDIT_DIR, ENV_TERMINATION_LOG)
"""What the environment may say about workers of a job, of which there is none here."""

_QUIET = ALLOCATOR_ENVIRONMENT | {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Memory as workers have it; torch counts it by its profiler, which talks about itself otherwise."""


def profile(arguments: Namespace) -> int:
    """Measure a script and write its profile; the exit code.

    Raises:
        ConfigurationError: something cannot be done; nothing has been started.
        VirtualFlowError: the script failed, or trained nothing.
    """
    program = TrainingProgram(arguments.script, arguments.module)
    target = target_of(program) if arguments.out is None else Path(arguments.out)
    measured = measure(program, arguments.args, target, virtual_nodes=arguments.virtual_nodes, sizes=arguments.sizes)
    print(describe(measured))
    print(f"written to {target}: name it with virtualflow run --profile, or as the profile of a worker group")
    return 0


def target_of(program: TrainingProgram) -> Path:
    """Where the profile of a script goes unless a user says otherwise."""
    return Path(f"{program.title}.profile.json")


def measure(
    program: TrainingProgram,
    arguments: Sequence[str],
    target: Path,
    *,
    virtual_nodes: int | None = None,
    sizes: str | None = None,
    output: IO[bytes] | None = None,
) -> DeviceProfile:
    """Measure a script and write its profile.

    Args:
        sizes: in virtual nodes, with commas between them, instead of those that suggest themselves.
        output: where what the script writes goes; ``None``: where ours goes.

    Raises:
        ConfigurationError: something cannot be done; nothing has been started.
        VirtualFlowError: the script failed, or trained nothing.
    """
    program.check()
    check_trainer()
    check_target(target, "--out")
    environment = _QUIET | {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT}
    if virtual_nodes is not None:
        environment[ENV_VIRTUAL_NODES] = str(virtual_nodes)
    if sizes is not None:
        if not all(word.strip().isdecimal() and int(word) > 0 for word in sizes.split(",")):
            raise ConfigurationError(f"--sizes {sizes}: write numbers of virtual nodes like 1,2,4")
        environment[ENV_PROFILE_SIZES] = sizes
    with tempfile.TemporaryDirectory(prefix="virtualflow-") as directory:
        written = Path(directory) / "profile.json"
        environment[ENV_PROFILE_OUT] = str(written)
        code = run_to_end([sys.executable, "-u", *program.words, *arguments], environment, output=output)
        if code != 0:
            raise VirtualFlowError(
                f"{program} ended with {describe_exit(code)} before it was measured; no profile was written"
            )
        if not written.exists():
            raise VirtualFlowError(
                f"{program} ended without training anything, so there is nothing to measure; it must iterate over the "
                "run of vf.elastic and over the micro-batches of its steps"
            )
        measured = read_profile(written)
    try:
        write_whole(target, encode(measured))
    except OSError as error:
        raise VirtualFlowError(f"the profile cannot be written to {target}: {error.strerror}") from error
    return measured
