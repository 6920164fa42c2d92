"""An operator that was installed without queues, Kueue, policies and simulator: plain jobs never miss them.

The operator is a process that imports a copy of its package, from which folders are removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
from running import COMMAND, OperatorProcess, write_kubeconfig
from stage import FLAGS, KEY, NAMESPACE, TOKEN, Stage, job, play

import virtualflow_operator
from virtualflow_operator.constants import LABEL_KUEUE_QUEUE, WORKER
from virtualflow_operator.k8s.client import PODS

SATELLITES = ("kueue", "queues", "scheduling", "simulator")


def install(directory: Path, *without: str) -> Path:
    """A copy of the operator without these packages; where Python is to look for it."""
    source = Path(virtualflow_operator.__file__).parent
    shutil.copytree(source, directory / source.name, ignore=shutil.ignore_patterns("__pycache__", *without))
    return directory


class Installed(OperatorProcess):
    """An operator as a shell starts it, of such a copy."""

    def __init__(self, directory: Path, kubeconfig: Path, arguments: list[str], without: tuple[str, ...]) -> None:
        self.log = directory / "log"
        environment = os.environ | {
            "PYTHONPATH": str(install(directory / "site", *without)),
            "KUBECONFIG": str(kubeconfig),
        }
        self._output: IO[bytes] = self.log.open("wb")
        self._started = subprocess.Popen(
            [*COMMAND, *arguments], env=environment, stdout=self._output, stderr=self._output
        )

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def exit_code(self) -> int | None:
        return self._started.poll()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self._started.kill()

    async def ended(self, seconds: float = 30.0) -> int:
        code = await asyncio.to_thread(self._started.wait, seconds)
        self._output.close()
        return code


def begin(stage: Stage, directory: Path, without: tuple[str, ...]) -> Installed:
    (directory / "key").write_text(KEY)
    kubeconfig = write_kubeconfig(directory / "kubeconfig", stage.server.url, TOKEN)
    process = Installed(directory, kubeconfig, [*FLAGS, f"--key-file={directory / 'key'}"], without)
    stage.operators.append(process)
    return process


@pytest.mark.slow
@pytest.mark.parametrize(
    "without",
    [
        pytest.param(SATELLITES, id="all"),
        *(pytest.param((name,), id=name, marks=pytest.mark.nightly) for name in SATELLITES),
    ],
)
def test_a_job_without_a_queue_lives_as_before_and_one_with_a_queue_is_told_what_is_missing(
    tmp_path: Path, without: tuple[str, ...]
) -> None:
    async def story(stage: Stage) -> None:
        begin(stage, tmp_path, without)
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        stage.change("digits", replicas=3)
        await stage.until(lambda: stage.trains("digits", 3))
        lost = stage.pods("digits", WORKER)[0]["metadata"]
        stage.server.remove(PODS, NAMESPACE, lost["name"])
        await stage.until(lambda: stage.trains("digits", 3) and lost["uid"] not in str(stage.pods("digits", WORKER)))

        stage.apply("queued", queue="shared")
        labelled = job("labelled")
        labelled["metadata"]["labels"] = {LABEL_KUEUE_QUEUE: "team"}
        stage.server.add(labelled)
        missing = {"queued": {"queues", "scheduling"} & {*without}, "labelled": {"kueue"} & {*without}}
        for name, packages in missing.items():
            said = await stage.until(lambda name=name: stage.condition(name, "Progressing"))  # type: ignore[misc]
            if packages:
                assert said["reason"] == "InvalidSpec"
                assert any(
                    f"this operator was installed without virtualflow_operator.{package}" in said["message"]
                    for package in packages
                )
                assert "install all of virtualflow" in said["message"]
            else:
                assert "installed without" not in said["message"]
            assert stage.pods(name) == []

        stage.change("digits", suspend=True)
        await stage.until(lambda: stage.status("digits").get("phase") == "Suspended")
        stage.delete("digits")
        await stage.until(lambda: stage.nothing_left("digits"))

    play(tmp_path, story)


@pytest.mark.slow
def test_an_operator_has_no_satellite_in_its_memory_before_a_job_needs_one() -> None:
    code = (
        "import sys\n"
        "from virtualflow_operator.controllers import watches\n"
        "loaded = {name.split('.')[1] for name in sys.modules if name.startswith('virtualflow_operator.')}\n"
        f"print(sorted(loaded & {set(SATELLITES)}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr


@pytest.mark.parametrize("name", ["scheduling", "simulator"])
def test_the_simulator_says_what_is_not_installed(tmp_path: Path, name: str) -> None:
    source = Path(virtualflow_operator.__file__).parents[1]
    code = (
        "import sys\n"
        f"sys.path[:] = [{str(install(tmp_path, name))!r}, *(p for p in sys.path if p != {str(source)!r})]\n"
        "from virtualflow.__main__ import main\n"
        "sys.argv = ['virtualflow', 'simulate', 'trace.csv']\n"
        "sys.exit(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2
    assert "a part of the project that this installation does not have" in ended.stderr
    assert "Traceback" not in ended.stderr
