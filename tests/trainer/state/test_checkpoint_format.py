"""What a checkpoint holds, to the bit, and which one counts: not a damaged one, nor another job's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import IDENTITY, SIGNATURE, WEIGHT, assert_holds, flip, newest, tree_of, truncate, writer_to
from safetensors import safe_open

import progress_seen
from virtualflow.errors import ConfigurationError
from virtualflow.protocol.versions import NUMERICS
from virtualflow.state import checkpoint_format, codec
from virtualflow.state.checkpoint_format import find_newest, load

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def test_a_checkpoint_holds_every_dtype_bit_by_bit(tmp_path: Path, events: list[str]) -> None:
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tensors: dict[str, Any] = {name: raw.view(dtype) for name, dtype in codec.DTYPES.items() if name != "bool"}
    shared = torch.arange(6.0)
    tensors |= {
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(math_pi := 3.141592653589793, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
        "empty-complex": torch.zeros(0, 3, dtype=torch.complex128),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "views-of-one": [shared[:4], shared[2:], shared],
    }
    tree = {**tensors, "plain": {0: (1, None, float("inf")), "pi": math_pi}}
    writer = writer_to(tmp_path, events)
    assert writer.save_now(1, tree)
    assert writer.failure is None
    assert writer.newest == 1
    assert codec.pack(load(newest(tmp_path, events))).equal(codec.pack(tree))
    assert events == []


def test_the_files_are_what_they_say_and_readable_by_whom_the_umask_admits(tmp_path: Path, events: list[str]) -> None:
    before = os.umask(0o027)
    try:
        writer_to(tmp_path / "a" / "b", events).save_now(120, tree_of(120))
    finally:
        os.umask(before)
    path = tmp_path / "a" / "b" / "step-00000120"
    assert {entry.name: oct(entry.stat().st_mode & 0o777) for entry in path.iterdir()} == {
        "manifest.json": "0o640",
        "state.safetensors": "0o640",
    }
    assert path.stat().st_mode & 0o777 == 0o750
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    assert (manifest["format"], manifest["step"], manifest["identity"]["virtual_nodes"]) == (1, 120, 8)
    assert manifest["torch"] == torch.__version__
    with safe_open(path / "state.safetensors", "pt") as file:
        assert file.keys() == ["t0"]
        assert "skeleton" in file.metadata()


def test_a_loaded_state_outlives_its_checkpoint(tmp_path: Path, events: list[str]) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    found = newest(tmp_path, events)
    tree = load(found)
    (found.path / "state.safetensors").write_bytes(b"")
    assert torch.equal(tree["weight"], torch.full((1000,), 1.0))
    with pytest.raises(ValueError, match="cannot be read"):
        load(found)


def test_reading_tells_how_much_of_the_file_is_read(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer_to(tmp_path, events).save_now(1, {"a": torch.zeros(50_000), "b": torch.zeros(150_000)})
    found = newest(tmp_path, events)
    monkeypatch.setattr(progress_seen, "SEEN", [])
    monkeypatch.setattr(checkpoint_format, "ProgressBar", progress_seen.Seen)
    load(found)
    (seen,) = progress_seen.SEEN
    assert seen.what == f"reading {found.path.name}"
    assert seen.shares == pytest.approx([0.25, 1.0], abs=0.01)


def test_where_nothing_is_nothing_is_found(tmp_path: Path, events: list[str]) -> None:
    assert find_newest(tmp_path / "nowhere", events.append) is None
    assert find_newest(tmp_path, events.append) is None
    (tmp_path / "step-12").mkdir()
    (tmp_path / ".step-00000012.0123abcd").mkdir()
    assert find_newest(tmp_path, events.append) is None
    assert events == []


def in_place_of(file: Path, make: Any) -> None:
    file.unlink()
    make(file)


DAMAGE = {
    "state-flipped-in-the-middle": lambda path: flip(path / "state.safetensors", 3000),
    "state-flipped-in-the-header": lambda path: flip(path / "state.safetensors", 20),
    "state-cut": lambda path: truncate(path / "state.safetensors", 3000),
    "state-empty": lambda path: truncate(path / "state.safetensors", 0),
    "state-missing": lambda path: (path / "state.safetensors").unlink(),
    "manifest-cut": lambda path: truncate(path / "manifest.json", 100),
    "manifest-empty": lambda path: truncate(path / "manifest.json", 0),
    "manifest-missing": lambda path: (path / "manifest.json").unlink(),
    "manifest-of-another-step": lambda path: path.rename(path.parent / "step-00000003"),
    "manifest-a-pipe": lambda path: in_place_of(path / "manifest.json", os.mkfifo),
    "manifest-endless": lambda path: in_place_of(path / "manifest.json", lambda file: file.symlink_to("/dev/zero")),
    "manifest-of-a-tebibyte": lambda path: truncate(path / "manifest.json", 1 << 40),
    "state-a-pipe": lambda path: in_place_of(path / "state.safetensors", os.mkfifo),
    "state-endless": lambda path: in_place_of(path / "state.safetensors", lambda file: file.symlink_to("/dev/zero")),
    "all-missing": lambda path: [entry.unlink() for entry in path.iterdir()],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_checkpoint_is_skipped_with_its_path_and_the_older_one_counts(
    damage: Any, tmp_path: Path, events: list[str]
) -> None:
    writer = writer_to(tmp_path, events)
    writer.save_now(1, tree_of(1))
    writer.save_now(2, tree_of(2))
    damage(tmp_path / "step-00000002")
    assert_holds(newest(tmp_path, events), 1)
    assert len(events) == 1
    assert re.match(rf"skipped the damaged checkpoint {re.escape(str(tmp_path))}/step-0000000[23]: .", events[0])


@pytest.mark.slow
def test_no_single_flipped_bit_of_a_manifest_passes_for_another_job(tmp_path: Path, events: list[str]) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    manifest = tmp_path / "step-00000001" / "manifest.json"
    intact = manifest.read_bytes()
    for position in range(len(intact)):
        for mask in (1, 2, 4, 16, 32):
            manifest.write_bytes(intact[:position] + bytes([intact[position] ^ mask]) + intact[position + 1 :])
            events.clear()
            assert find_newest(tmp_path, events.append, IDENTITY) is None
            assert len(events) == 1


@pytest.mark.slow
def test_no_single_flipped_bit_of_the_states_header_is_anything_but_damage(tmp_path: Path, events: list[str]) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    found, state = newest(tmp_path, events), tmp_path / "step-00000001" / "state.safetensors"
    intact = state.read_bytes()
    for bit in range(8 * (8 + int.from_bytes(intact[:8], "little"))):
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        state.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"state\.safetensors"):
            load(found)


def test_a_checkpoint_of_a_newer_format_is_refused_and_not_taken_for_damage(tmp_path: Path, events: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_format, "FORMAT", 3)
        writer_to(tmp_path, events).save_now(1, tree_of(1))
    with pytest.raises(
        ConfigurationError, match="has format 3 and this version of VirtualFlow reads 1 and 2; use the version"
    ):
        find_newest(tmp_path, events.append)


def test_a_checkpoint_of_another_torch_counts_with_a_warning(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "__version__", "2.0.0")
        writer_to(tmp_path, events).save_now(1, tree_of(1))
    assert_holds(newest(tmp_path, events), 1)
    assert len(events) == 1
    assert "was written by torch 2.0.0 and this is" in events[0]


def test_a_checkpoint_of_other_numerics_counts_with_a_warning(
    tmp_path: Path, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    monkeypatch.setattr(checkpoint_format, "NUMERICS", NUMERICS + 1)
    assert_holds(newest(tmp_path, events), 1)
    (event,) = events
    assert f"was written by a virtualflow with numerics {NUMERICS} and this has {NUMERICS + 1}" in event


@pytest.mark.parametrize(
    ("change", "warnings"),
    [
        pytest.param({"addedLater": {"by": "a newer version"}}, [], id="a newer one"),
        pytest.param({"numerics": None}, ["with numerics 1"], id="one from before there were numerics"),
    ],
)
def test_a_checkpoint_of_another_version_counts(
    change: dict[str, Any], warnings: list[str], tmp_path: Path, events: list[str]
) -> None:
    writer_to(tmp_path, events).save_now(1, tree_of(1))
    path = tmp_path / "step-00000001" / "manifest.json"
    said = {key: value for key, value in (json.loads(path.read_text())["manifest"] | change).items() if value}
    content = json.dumps(said)
    checksum = hashlib.sha256(content.encode()).hexdigest()
    path.write_text(f'{{"checksum": "{checksum}", "manifest": {content}}}')
    assert_holds(newest(tmp_path, events), 1)
    assert len(events) == len(warnings)
    assert all(words in event for words, event in zip(warnings, events, strict=True))


OTHERS = {
    "virtual-nodes": ({"virtual_nodes": 4}, "the number of virtual nodes is 4 here and 8 there"),
    "seed": ({"seed": 7}, "the seed is 7 here and 0 there"),
    "batch-size": ({"batch_size": 32}, "the batch size is 32 here and 64 there"),
    "dataset": (
        {"dataset_size": None},
        "the number of samples in the dataset is unknown (a stream) here and 1000 there",
    ),
    "model": (
        {
            "signature": {
                **SIGNATURE,
                "parameters": {"fc.weight": {**WEIGHT, "shape": [1]}},
            }
        },
        "parameter fc.weight is [1] here and [10, 64] there",
    ),
    "optimizer": (
        {"signature": {**SIGNATURE, "optimizer": "Adam"}},
        "the optimizer is Adam here and SGD there",
    ),
}


@pytest.mark.parametrize(("change", "sentence"), OTHERS.values(), ids=OTHERS.keys())
def test_a_checkpoint_of_another_job_is_refused_with_what_differs_and_what_to_do(
    change: dict[str, Any], sentence: str, tmp_path: Path, events: list[str]
) -> None:
    writer_to(tmp_path, events).save_now(5, tree_of(5))
    other = dataclasses.replace(IDENTITY, **change)
    with pytest.raises(ConfigurationError) as caught:
        find_newest(tmp_path, events.append, other)
    assert str(caught.value) == (
        f"the checkpoint {tmp_path}/step-00000005 belongs to another job: {sentence}; use another "
        "--checkpoint-dir, or go back to the old value"
    )
    found = find_newest(tmp_path, events.append)
    assert found is not None
    assert found.identity == IDENTITY
    assert events == []
