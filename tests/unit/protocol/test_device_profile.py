"""Device profiles: what a file may hold, whether it fits a worker, and the speed that it foretells."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from virtualflow.errors import ConfigurationError
from virtualflow.protocol.device_profile import (
    BlockProfile,
    ChainProfile,
    ChainSize,
    DeviceProfile,
    Situation,
    SizeProfile,
    block_seconds,
    describe,
    encode,
    misfit,
    read_fitting,
    read_profile,
    seconds_for,
)


def size(virtual_nodes: int, seconds: float) -> SizeProfile:
    return SizeProfile(virtual_nodes, 16 * virtual_nodes, 30, seconds, seconds * 0.9, seconds * 1.2, 0.0, 1 << 20)


PROFILE = DeviceProfile(
    device_type="cpu",
    device="A CPU",
    torch="2.13.0",
    threads=1,
    reproducibility="bitwise",
    signature="abc",
    script="train.py",
    batch_size=128,
    virtual_nodes=8,
    created="2026-01-01T00:00:00+00:00",
    stopped="all were measured",
    sizes=(size(1, 0.010), size(2, 0.018), size(8, 0.060)),
)
HERE = Situation("cpu", "A CPU", 1, "abc", 16)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(encode(PROFILE))
    assert read_profile(path) == PROFILE
    assert read_fitting(path, HERE) == PROFILE
    table = describe(PROFILE).splitlines()
    assert len(table) == 2 + len(PROFILE.sizes) + 1
    assert "10.00" in table[2]


def test_a_file_of_a_newer_version_is_read(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(encode(PROFILE).replace(b"{", b'{"addedLater": 1,'))
    assert path.read_bytes().count(b"addedLater") == 1 + len(PROFILE.sizes)
    assert read_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        pytest.param({}, None, id="it fits"),
        pytest.param({"device": "Another"}, "of the device A CPU, and this is Another", id="another device"),
        pytest.param({"device_type": "cuda"}, "of the type of device cpu", id="another type"),
        pytest.param({"signature": "def"}, "of another model or optimizer", id="another model"),
        pytest.param({"threads": 2}, "of 1 thread, and here are 2", id="other threads"),
        pytest.param({"micro_batch": 8}, "micro-batches of 16 to 128 samples, and here they have 8", id="too small"),
        pytest.param({"micro_batch": 256}, "and here they have 256", id="too large"),
        pytest.param({"micro_batch": 100}, None, id="between two sizes"),
    ],
)
def test_a_profile_fits_or_there_is_a_reason(changed: dict[str, object], reason: str | None) -> None:
    found = misfit(PROFILE, msgspec.structs.replace(HERE, **changed))
    assert (found is None) is (reason is None)
    assert reason is None or (found is not None and reason in found)


@given(st.integers(16, 128))
def test_between_two_sizes_the_time_lies_between_theirs(micro_batch: int) -> None:
    below = max(s.seconds for s in PROFILE.sizes if s.micro_batch <= micro_batch)
    above = min(s.seconds for s in PROFILE.sizes if s.micro_batch >= micro_batch)
    assert below <= seconds_for(PROFILE, micro_batch) <= above


def test_seconds_of_blocks_are_those_of_the_nearest_measured_size() -> None:
    def block(name: str, seconds: float) -> BlockProfile:
        sizes = dict.fromkeys(("saved_bytes", "boundary_bytes", "parameter_bytes", "gradient_bytes"), 0)
        return BlockProfile(name=name, forward_seconds=seconds, backward_seconds=2 * seconds, **sizes)

    sizes = tuple(ChainSize(16 * n, (block("0", 1e-3 * n), block("2", 3e-3 * n))) for n in (1, 8))
    chain = ChainProfile(
        out_bytes_per_second=1.0, in_bytes_per_second=1.0, optimizer_bytes=0, fixed_bytes=0, sizes=sizes
    )
    profile = msgspec.structs.replace(PROFILE, chain=chain)
    assert block_seconds(profile, 32, ["0", "2"]) == [(1e-3, 2e-3), (3e-3, 6e-3)]
    assert block_seconds(profile, 128, ["2"]) == [(24e-3, 48e-3)]
    assert block_seconds(profile, 32, ["0", "1"]) == [], "of another choice of blocks"
    assert block_seconds(PROFILE, 32, ["0"]) == []


@pytest.mark.parametrize("micro_batch", [15, 129])
def test_beyond_what_was_measured_there_is_no_guess(micro_batch: int) -> None:
    with pytest.raises(ValueError, match="not measured"):
        seconds_for(PROFILE, micro_batch)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\xff\xfe", id="no text"),
        pytest.param(b"[]", id="something else"),
        pytest.param(b"[" * 5_000, id="a deep nest"),
        pytest.param(b" " * (1 << 21), id="far too much"),
        pytest.param(encode(PROFILE).replace(b'"version": 1', b'"version": 2'), id="a later version"),
        pytest.param(encode(PROFILE).replace(b'"seconds": 0.01,', b'"seconds": -1,'), id="a negative time"),
        pytest.param(encode(msgspec.structs.replace(PROFILE, sizes=())), id="without sizes"),
        pytest.param(encode(PROFILE).replace(b'"threads"', b'"thraeds"'), id="a field that is none"),
    ],
)
def test_what_is_no_profile_is_refused_in_a_sentence(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"no device profile .* make one with virtualflow profile SCRIPT"):
        read_profile(path)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_what_cannot_be_read_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"cannot be read .* make one with virtualflow profile SCRIPT"):
        read_profile(tmp_path / name)
