"""What a worker takes from its environment."""

from __future__ import annotations

import pytest

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.environment import LocalPlace, WorkerEnvironment
from virtualflow.protocol.settings import (
    ENV_ACTIVATIONS,
    ENV_BACKWARD,
    ENV_CHECKPOINT_MEMORY,
    ENV_CHECKPOINT_SECONDS,
    ENV_DEVICE_MEMORY,
    ENV_HOST_MEMORY,
    ENV_LAUNCH,
    ENV_ON_NON_FINITE,
    ENV_OPTIMIZER_PLACEMENT,
    ENV_REDUNDANCY,
    ENV_REPRODUCIBILITY,
    ENV_SHARD,
    ENV_VERIFY,
)


@pytest.mark.parametrize(
    ("value", "reproducibility"),
    [(None, None), ("", None), ("Bitwise", "bitwise"), (" Statistical ", "statistical")],
)
def test_how_equal_the_bits_must_be_is_said_by_the_environment(
    value: str | None, reproducibility: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(ENV_REPRODUCIBILITY, raising=False)
    if value is not None:
        monkeypatch.setenv(ENV_REPRODUCIBILITY, value)
    assert WorkerEnvironment.read().reproducibility == reproducibility


@pytest.mark.parametrize("value", ["bitwise", "true", "Exact"])
def test_another_word_for_it_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_REPRODUCIBILITY, value)
    with pytest.raises(ConfigurationError, match=f"{value!r} must be Bitwise or Statistical"):
        WorkerEnvironment.read()


@pytest.mark.parametrize("value", ["0", "0.0", "-1", "nan", "soon"])
def test_checkpoints_without_time_between_them_are_refused_as_on_the_command_line(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CHECKPOINT_SECONDS, value)
    with pytest.raises(ConfigurationError, match=f"{ENV_CHECKPOINT_SECONDS}='{value}' must be a number above 0"):
        WorkerEnvironment.read()


def test_the_host_s_memory_is_beside_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_HOST_MEMORY, "8000")
    with pytest.raises(ConfigurationError, match=f"{ENV_HOST_MEMORY} is set but {ENV_DEVICE_MEMORY} is not"):
        WorkerEnvironment.read()
    monkeypatch.setenv(ENV_DEVICE_MEMORY, "4000")
    read = WorkerEnvironment.read()
    assert (read.device_memory, read.host_memory) == (4000, 8000)


@pytest.mark.parametrize(
    ("word", "found"),
    [("Auto", "auto"), ("Keep", "keep"), ("Recompute", "recompute"), ("Swap", "swap"), ("", None)],
)
def test_a_worker_is_told_what_becomes_of_activations(
    word: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_DEVICE_MEMORY, "4000")
    monkeypatch.setenv(ENV_ACTIVATIONS, word)
    assert WorkerEnvironment.read().activations == found


def test_activations_are_treated_within_some_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ACTIVATIONS, "Swap")
    with pytest.raises(ConfigurationError, match=f"{ENV_ACTIVATIONS} is set but {ENV_DEVICE_MEMORY} is not"):
        WorkerEnvironment.read()


@pytest.mark.parametrize(("word", "found"), [("Device", "device"), ("Host", "host"), ("", None)])
def test_a_worker_is_told_where_the_optimizer_steps(
    word: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_OPTIMIZER_PLACEMENT, word)
    assert WorkerEnvironment.read().optimizer == found


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("Parameters", "Checkpoint"), ("parameters", "checkpoint")),
        (("Optimizer", "Peer"), ("optimizer", "peer")),
        (("None", ""), ("none", None)),
        (("", "None"), (None, "none")),
    ],
)
def test_a_worker_is_told_what_is_divided(
    words: tuple[str, str], found: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, word in zip((ENV_SHARD, ENV_REDUNDANCY), words, strict=True):
        monkeypatch.setenv(name, word)
    read = WorkerEnvironment.read()
    assert (read.shard, read.redundancy) == found


@pytest.mark.parametrize("name", [ENV_ACTIVATIONS, ENV_OPTIMIZER_PLACEMENT, ENV_SHARD, ENV_REDUNDANCY])
def test_a_word_that_nobody_knows_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_DEVICE_MEMORY, "4000")
    monkeypatch.setenv(name, "host")
    with pytest.raises(ConfigurationError, match=f"{name}='host' must be "):
        WorkerEnvironment.read()


@pytest.mark.parametrize("said", ["half", "{}", '{"fractions": [2]}', '{"fractions": [1], "scale": "mean"}'])
def test_backward_passes_that_make_no_sense_are_refused(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_BACKWARD, said)
    with pytest.raises(ConfigurationError, match=f"{ENV_BACKWARD}=.* must be spec.backward of a job as JSON"):
        WorkerEnvironment.read()


def test_any_time_between_checkpoints_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_CHECKPOINT_SECONDS, "0.25")
    assert WorkerEnvironment.read().checkpoint_seconds == 0.25


@pytest.mark.parametrize(("value", "found"), [("", "Continue"), ("Continue", "Continue"), ("Stop", "Stop")])
def test_what_to_do_about_a_loss_of_nan_is_said_by_the_environment(
    value: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_ON_NON_FINITE, value)
    assert WorkerEnvironment.read().on_non_finite == found


@pytest.mark.parametrize(("value", "found"), [("", 0.0), ("0", 0.0), ("0.01", 0.01), ("1", 1.0)])
def test_how_much_is_verified_is_said_by_the_environment(
    value: str, found: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_VERIFY, value)
    assert WorkerEnvironment.read().verify == found


@pytest.mark.parametrize("value", ["-0.1", "1.5", "nan", "inf", "some"])
def test_another_share_to_verify_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_VERIFY, value)
    with pytest.raises(ConfigurationError, match=f"{ENV_VERIFY}=.*must be a number"):
        WorkerEnvironment.read()


def test_another_word_for_what_to_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_ON_NON_FINITE, "stop")
    with pytest.raises(ConfigurationError, match="'stop' must be Continue or Stop"):
        WorkerEnvironment.read()


@pytest.mark.parametrize(("value", "found"), [("", False), ("0", False), ("1", True)])
def test_a_copy_in_memory_is_asked_for_by_the_environment(
    value: str, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ENV_CHECKPOINT_MEMORY, value)
    assert WorkerEnvironment.read().checkpoint_memory is found


def test_a_process_of_a_worker_of_several_is_told_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")  # of another launcher, which is not asked
    assert WorkerEnvironment.read().place is None
    monkeypatch.setenv(ENV_LAUNCH, "a1b2/1/2")
    assert WorkerEnvironment.read().place == LocalPlace("a1b2", 1, 2)
    assert str(LocalPlace("a1b2", 1, 2)) == "a1b2/1/2"


@pytest.mark.parametrize("value", ["a", "a/1", "a/2/2", "a/0/1", "/0/2", "a/-1/2", "a/0/65", "a/b/c"])
def test_a_place_that_cannot_be_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENV_LAUNCH, value)
    with pytest.raises(ConfigurationError, match=f"{ENV_LAUNCH}='{value}' does not say which process"):
        WorkerEnvironment.read()
