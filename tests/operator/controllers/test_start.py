"""An operator that cannot start as it was told says so in one line and ends, and nothing is watched."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path

from running import COMMAND, write_kubeconfig
from stage import KEY, TOKEN, Stage, play

from virtualflow_operator.k8s.client import JOBS


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
