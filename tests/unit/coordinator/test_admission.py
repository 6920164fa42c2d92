"""Which machines may take part in a job: those that compute the same bits, or any where bits need not be equal."""

from __future__ import annotations

import msgspec
import pytest
from simulated import Worker, World

from virtualflow.protocol import messages as m
from virtualflow.protocol.settings import Reproducibility

V100, P100 = "Tesla V100-SXM2-16GB, CUDA 12.6", "Tesla P100-PCIE-16GB, CUDA 12.6"


def hello(name: str, device: str, digest: str, reproducibility: Reproducibility = "bitwise") -> m.Hello:
    said = Worker(name, f"{name}.0").hello(0.0)
    return msgspec.structs.replace(said, device=device, self_test=digest, reproducibility=reproducibility)


@pytest.mark.parametrize(
    ("newcomer", "admitted"),
    [
        pytest.param(hello("b", V100, "11"), True, id="the same device, the same bits"),
        pytest.param(hello("b", P100, "11"), True, id="another device, the same bits"),
        pytest.param(hello("b", P100, "22"), False, id="another device, other bits"),
        pytest.param(hello("b", V100, "22"), False, id="the same device, other bits"),
        pytest.param(hello("b", V100, ""), False, id="no self-test where the others have one"),
    ],
)
def test_a_bitwise_job_takes_whoever_computes_the_same_bits(newcomer: m.Hello, admitted: bool) -> None:
    world = World(wanted=2)
    assert world.admit(hello("a", V100, "11")) is None
    refusal = world.admit(newcomer)
    assert (refusal is None) is admitted
    assert world.status().reproducibility == "bitwise"
    if refusal is not None:
        assert V100 in refusal
        assert newcomer.device in refusal
        assert "use one machine type, or ask for statistical reproducibility" in refusal


def test_a_statistical_job_takes_any_device() -> None:
    world = World(wanted=2)
    assert world.admit(hello("a", V100, "", "statistical")) is None
    assert world.admit(hello("b", P100, "", "statistical")) is None
    assert world.status().reproducibility == "statistical"


def test_without_a_self_test_the_names_of_the_devices_decide() -> None:
    world = World(wanted=2)
    assert world.admit(hello("a", V100, "")) is None
    assert world.admit(hello("b", V100, "")) is None
    assert world.admit(hello("c", P100, "")) is not None


def test_who_could_not_run_the_self_test_is_not_said_to_have_other_bits() -> None:
    world = World(wanted=2)
    assert world.admit(hello("a", V100, "11")) is None
    refusal = world.admit(hello("b", V100, "")) or ""
    assert "not both could run the self-test" in refusal
    assert "gave other bits" not in refusal


@pytest.mark.parametrize("device", [V100, P100])
def test_who_has_failed_before_its_self_test_is_heard(device: str) -> None:
    world = World(wanted=2)
    assert world.admit(hello("a", V100, "11")) is None
    assert world.admit(msgspec.structs.replace(hello("b", device, ""), failing=True)) is None
    # Nor is anybody compared with it.
    assert world.admit(hello("c", V100, "11")) is None
    world.hear("b.0", m.Failed(0, "no such file: data.bin", ""))
    world.decide()
    assert world.state.phase == "failed"
    assert world.status().error == "no such file: data.bin"


def test_who_has_failed_in_another_kind_of_process_is_refused_still() -> None:
    world = World(wanted=2)
    assert world.admit(hello("a", V100, "11")) is None
    other = msgspec.structs.replace(hello("b", V100, ""), failing=True, fingerprint="another torch")
    assert "another torch" in (world.admit(other) or "")


def test_all_workers_of_a_job_are_of_one_kind() -> None:
    world = World(wanted=2)
    assert world.admit(hello("a", V100, "", "statistical")) is None
    refusal = world.admit(hello("b", V100, "11"))
    assert refusal == "b is bitwise and the job statistical; give all workers the same reproducibility"
