"""The self-test: what it notices, and what becomes of workers whose machines compute other bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from elastic_jobs import MEMBERSHIP, PATIENCE, TOKEN, ElasticJob

from virtualflow.device import determinism
from virtualflow.device.determinism import describe_device, pin
from virtualflow.protocol.settings import ENV_COORDINATOR, ENV_REPRODUCIBILITY, ENV_TOKEN, ENV_WORKER

TRAINER = str(Path(__file__).parents[3] / "trainer")
CPU = torch.device("cpu")
BOOT = 4 * PATIENCE
"""A worker that is no fork of the tests' server imports torch itself, which takes long on a busy machine."""

SCRIPT = """\
import torch
import virtualflow as vf

torch.manual_seed(0)
model = torch.nn.Linear(300, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 300, generator=torch.Generator().manual_seed(1)))
with vf.elastic(model, optimizer, dataset, batch_size=16, steps=6, virtual_nodes=4) as run:
    for step in run:
        for (x,) in step:
            model(x).square().mean().backward()
"""


@pytest.fixture
def digest() -> str:
    pinned = pin(1, True)
    try:
        return determinism.probe_bits(CPU)
    finally:
        pinned.undo()


def test_it_is_the_same_every_time_and_draws_no_random_numbers(digest: str) -> None:
    state = torch.random.get_rng_state()
    torch.manual_seed(17)
    pinned = pin(1, True)
    try:
        assert determinism.probe_bits(CPU) == digest
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            assert determinism.probe_bits(CPU) == digest
        for dtype in (torch.float64, torch.bfloat16, torch.float32):
            torch.set_default_dtype(dtype)
            assert determinism.probe_bits(CPU) == digest
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(17))
    finally:
        pinned.undo()
        torch.set_default_dtype(torch.float32)
        torch.random.set_rng_state(state)


def test_a_device_that_cannot_compute_it_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: torch.device) -> list[torch.Tensor]:
        raise RuntimeError(f"no such kernel on {device}")

    monkeypatch.setattr(determinism, "_halves", broken)
    assert determinism.probe_bits(CPU) == ""


def in_another_process(**environment: str) -> str:
    code = (
        "import torch; from virtualflow.device import determinism; determinism.pin(1, True);"
        "print(determinism.probe_bits(torch.device('cpu')), determinism.describe_device(torch.device('cpu')), sep='|')"
    )
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": TRAINER, **environment},
        capture_output=True,
        text=True,
        timeout=BOOT,
        check=True,
    ).stdout.strip()


@pytest.mark.nightly
def test_another_process_of_the_machine_has_the_same_digest(digest: str) -> None:
    assert in_another_process() == f"{digest}|{describe_device(CPU)}"


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no vectors to do without"
)
def test_other_vector_instructions_give_another_digest(digest: str) -> None:
    told, _, device = in_another_process(ATEN_CPU_CAPABILITY="default").partition("|")
    assert len(told) == 64
    assert told != digest
    assert device == "cpu, CPU capability DEFAULT, ATEN_CPU_CAPABILITY=default"


def work(job: ElasticJob, script: Path, name: str, **environment: str) -> subprocess.Popen[str]:
    """A worker with an interpreter of its own, so that torch chooses its kernels by that worker's environment."""
    return subprocess.Popen(
        [sys.executable, str(script)],
        env={
            **os.environ,
            "PYTHONPATH": TRAINER,
            ENV_COORDINATOR: job.url,
            ENV_TOKEN: TOKEN,
            ENV_WORKER: name,
            **environment,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="this CPU has no vectors to do without"
)
@pytest.mark.nightly
@pytest.mark.parametrize("reproducibility", ["Bitwise", "Statistical"])
def test_machines_that_compute_other_bits_share_only_a_statistical_job(tmp_path: Path, reproducibility: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    kind = {ENV_REPRODUCIBILITY: reproducibility}
    job = ElasticJob(tmp_path, lambda: None, (), workers=0, membership=MEMBERSHIP)
    workers: list[subprocess.Popen[str]] = []
    try:
        job.call("scale", workers=2, minimum=2)
        workers.append(work(job, script, "a", **kind))
        job.wait_for(lambda status: bool(status.workers), "the first worker", BOOT)
        workers.append(work(job, script, "b", ATEN_CPU_CAPABILITY="default", **kind))
        _, errors = workers[1].communicate(timeout=BOOT)
        if reproducibility == "Statistical":
            assert workers[1].returncode == 0, errors
            _, errors = workers[0].communicate(timeout=BOOT)
            assert workers[0].returncode == 0, errors
            status = job.status()
            assert (status.phase, status.step, status.reproducibility) == ("done", 6, "statistical")
        else:
            assert workers[1].returncode == 75
            assert "b runs on [cpu, CPU capability DEFAULT" in errors
            assert "use one machine type, or ask for statistical reproducibility" in errors
            assert job.status().reproducibility == "bitwise"
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
        job.close()
