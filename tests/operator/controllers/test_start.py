"""An operator that cannot start as it was told says so in one line and ends, and nothing is watched."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path

import pytest
from fake_api import Fault
from running import COMMAND, write_kubeconfig
from stage import KEY, TOKEN, Stage, play

from virtualflow_operator.k8s.client import JOBS, PODS


@pytest.mark.slow
def test_a_port_that_is_taken_ends_the_operator_with_a_sentence(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        (tmp_path / "key").write_text(KEY)
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", stage.server.url, TOKEN)
        with socket.socket() as taken:
            taken.bind(("0.0.0.0", 0))
            taken.listen()
            port = taken.getsockname()[1]
            arguments = ["--image=operator:test", f"--health-port={port}", "--metrics-port=0"]
            ended = await asyncio.to_thread(
                subprocess.run,
                [*COMMAND, *arguments, f"--key-file={tmp_path / 'key'}"],
                env=os.environ | {"KUBECONFIG": str(kubeconfig)},
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        assert ended.returncode == 2
        last = ended.stderr.splitlines()[-1]
        assert last.startswith(f"virtualflow-operator: port {port} is taken"), ended.stderr
        assert "Traceback" not in ended.stderr
        assert not stage.server.watches(JOBS)

    play(tmp_path, story)


def test_an_operator_without_the_definition_of_jobs_says_so_and_begins_when_it_is_there(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.server.inject(Fault(code=404, message="404 page not found", resource="virtualflowjobs", times=None))
        process = stage.start()
        await stage.until(lambda: "the cluster has no definition of VirtualFlowJob" in process.output())
        assert not stage.server.watches(PODS), "kopf, which reads the definitions once, has not begun"
        stage.server.heal()
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))

    play(tmp_path, story)
