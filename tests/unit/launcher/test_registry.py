"""How a running job is found from another terminal, and what is said when it is not."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow.launcher import registry
from virtualflow.protocol.identity import OWN, Identity

HOUR = 3_600.0


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "virtualflow"


def running(name: str) -> registry.RunningJob:
    """A job of this process whose coordinator listens."""
    job = dataclasses.replace(registry.claim(name, "job"), url="http://127.0.0.1:1", token="secret")
    registry.publish(job)
    return job


def test_the_only_job_needs_no_name() -> None:
    job = running("digits")
    assert registry.find(None) == registry.find("digits") == job


@pytest.mark.parametrize(
    ("jobs", "name", "said"),
    [
        pytest.param([], None, "no job is running on this machine; start one with", id="none"),
        pytest.param([], "digits", "no job called 'digits' is running on this machine (none is running)", id="not it"),
        pytest.param(["mlp"], "digits", "(running: mlp)", id="another"),
        pytest.param(["digits", "mlp"], None, "several jobs are running (digits, mlp); say which one", id="several"),
    ],
)
def test_what_is_said_where_none_is_found(jobs: list[str], name: str | None, said: str) -> None:
    for job in jobs:
        running(job)
    with pytest.raises(ConfigurationError) as error:
        registry.find(name)
    assert said in str(error.value)


@pytest.mark.parametrize("name", [None, "digits"])
def test_a_job_without_an_address_yet_is_said_to_be_starting(name: str | None) -> None:
    registry.claim("digits", "job")
    with pytest.raises(ConfigurationError, match="digits is only just starting; ask again in a moment"):
        registry.find(name)


def test_a_name_is_taken_while_its_job_runs_and_then_free_again(place: Path) -> None:
    job = running("digits")
    with pytest.raises(ConfigurationError, match="a job called 'digits' is running already"):
        registry.claim("digits", "job")
    assert registry.claim(None, "digits").name == "digits-2"
    registry.release(job)
    assert registry.claim("digits", "job").name == "digits"


def test_what_a_killed_runner_left_is_removed(place: Path) -> None:
    job = running("digits")
    registry.JobAccess(job, HOUR).environment("worker", "worker-0", "0")
    registry.publish(dataclasses.replace(job, born=1))  # The pid is somebody else's by now.
    assert registry.running_jobs() == []
    assert list(place.iterdir()) == []


def test_who_takes_part_in_a_job_is_told_where_its_identity_is_and_no_secret(place: Path) -> None:
    access = registry.JobAccess(running("digits"), HOUR)
    told = access.environment("worker", "worker-0", "3")
    assert told == {"VIRTUALFLOW_IDENTITY": str(place / "digits.identity" / "worker-0.3")}
    party = Identity(Path(told["VIRTUALFLOW_IDENTITY"])).party
    assert (party.role, party.name, party.uid) == ("worker", "worker-0", "3")
    registry.release(running("mlp"))
    assert (place / "digits.identity").is_dir(), "another job's end is none of its business"


def test_a_job_that_ends_while_it_is_asked_for_is_said_to_have_ended(place: Path) -> None:
    job = running("digits")
    access = registry.JobAccess(job, HOUR)
    job = dataclasses.replace(job, identity=access.control)
    assert isinstance(job.credential, Identity)
    (Path(access.control) / OWN).unlink()  # the first of its files that goes
    with pytest.raises(ConfigurationError, match=r"^digits has just ended$"):
        _ = job.credential


def test_certificates_of_those_who_live_are_renewed(place: Path) -> None:
    access = registry.JobAccess(running("digits"), HOUR)
    folders = [Path(access.environment("worker", "worker-0", uid)["VIRTUALFLOW_IDENTITY"]) for uid in ("0", "1")]
    folders.append(Path(access.environment("coordinator", "coordinator")["VIRTUALFLOW_IDENTITY"]))
    before = [(folder / OWN).read_bytes() for folder in folders]
    access.renew({"0"})
    changed = [(folder / OWN).read_bytes() != content for folder, content in zip(folders, before, strict=True)]
    assert changed == [False, True, True]


def test_a_job_in_plaintext_has_one_token_and_no_certificates(place: Path) -> None:
    access = registry.JobAccess(running("digits"), None)
    assert access.environment("worker", "worker-0") == access.environment("coordinator", "coordinator")
    assert access.environment("worker", "worker-0") == {"VIRTUALFLOW_TOKEN": access.credential}
    access.renew(())
    assert [path.name for path in place.iterdir()] == ["digits.json"]
