"""Signed checkpoints: whatever is altered, left out or somebody else's is refused, and what is sound stays there."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import IDENTITY, Counted, checkpoint_of, flip, steps_in, truncate
from elastic_jobs import ElasticJob, alone, trained
from signing import KINDS, write_key
from torch import nn
from torch.utils.data import TensorDataset

import virtualflow as vf
from virtualflow.protocol.settings import ENV_SIGN, ENV_TRUST
from virtualflow.state import Checkpointer, JobIdentity

MANIFEST, STATE = "manifest.json", "state.safetensors"


class Signers:
    """Whoever writes checkpoints: the job's owner, the same one's other job, and a stranger."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder = folder
        self.key, self.public = write_key(folder, "mine", kind)
        self.strange, self.strange_public = write_key(folder, "stranger", kind)

    def checkpointer(
        self,
        place: str = "job",
        told: list[str] | None = None,
        identity: JobIdentity = IDENTITY,
        **keys: Path | None,
    ) -> Checkpointer:
        said = [] if told is None else told
        policy = vf.CheckpointPolicy(self.folder / place, keep=2, **({"sign": self.key} | keys))
        return Checkpointer(policy, identity, lambda kind, text: said.append(text), lambda state: None)

    def write(self, step: int, place: str = "job", identity: JobIdentity = IDENTITY, **keys: Path | None) -> Path:
        writer = self.checkpointer(place, identity=identity, **keys)
        writer.save_final(Counted(step))
        assert writer.failure is None
        return checkpoint_of(self.folder / place, step)


@pytest.fixture(params=KINDS)
def signers(request: pytest.FixtureRequest, tmp_path: Path) -> Signers:
    return Signers(tmp_path, request.param)


def begin(checkpointer: Checkpointer) -> int:
    """The step that it begins from, as workers do it: -1 from none."""
    while (mark := checkpointer.find()).step >= 0:
        if checkpointer.read():
            training = Counted(0)
            checkpointer.restore(training)
            return training.completed_steps
        checkpointer.discard(mark.step)
    return -1


def test_a_signed_checkpoint_is_taken_by_who_signs_or_trusts_and_by_who_does_not_ask(signers: Signers) -> None:
    signers.write(1)
    told: list[str] = []
    both = {"sign": signers.strange, "trust": signers.public}
    for keys in ({}, both, {"sign": None}):
        assert begin(signers.checkpointer("job", told, **keys)) == 1
    assert not told


def test_an_unsigned_checkpoint_is_what_it_was_before(signers: Signers) -> None:
    unsigned, signed = signers.write(1, "plain", sign=None), signers.write(1)
    assert (unsigned / STATE).read_bytes() == (signed / STATE).read_bytes()
    plain, sealed = (json.loads((path / MANIFEST).read_bytes()) for path in (unsigned, signed))
    assert list(plain) == ["checksum", "manifest"]
    assert {**plain, "signature": sealed["signature"]} == sealed


# --- alterations: of the newer one of two ----------------------------------------------------------------------------

Alteration = Callable[[Path, Signers], object]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and its signature, with a checksum that holds."""
    envelope = json.loads((path / MANIFEST).read_bytes())
    change(envelope)
    content = json.dumps(envelope["manifest"])
    envelope["checksum"] = hashlib.sha256(content.encode()).hexdigest()
    (path / MANIFEST).write_text(json.dumps(envelope))


def say(**said: Any) -> Alteration:
    return lambda path, signers: edit(path, lambda envelope: envelope["manifest"].update(said))


def another_state(path: Path, signers: Signers) -> None:
    """With its size and checksum in the manifest: all that fits but the signature."""
    flip(path / STATE, -1)
    say(state_sha256=hashlib.sha256((path / STATE).read_bytes()).hexdigest())(path, signers)


def another_value(change: Callable[[bytes], bytes]) -> Alteration:
    def alter(envelope: dict[str, Any]) -> None:
        value = base64.b64decode(envelope["signature"]["value"])
        envelope["signature"]["value"] = base64.b64encode(change(value)).decode()

    return lambda path, signers: edit_signature(path, alter)


def edit_signature(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a signature; the manifest stays byte for byte what it was."""
    before = (path / MANIFEST).read_bytes()
    envelope = json.loads(before)
    head, _, _ = before.rpartition(b',"signature":')
    change(envelope)
    rest = b',"signature":' + json.dumps(envelope["signature"]).encode() if "signature" in envelope else b""
    (path / MANIFEST).write_bytes(head + rest + b"}")


def signature_of(other: Path) -> dict[str, str]:
    signature: dict[str, str] = json.loads((other / MANIFEST).read_bytes())["signature"]
    return signature


def take_signature(make: Callable[[Signers], Path]) -> Alteration:
    def alter(path: Path, signers: Signers) -> None:
        taken = signature_of(make(signers))
        edit_signature(path, lambda envelope: envelope.update(signature=taken))

    return alter


def of_the_stranger_in_the_owners_name(path: Path, signers: Signers) -> None:
    value = signature_of(signers.write(2, "strange", sign=signers.strange))["value"]
    edit_signature(path, lambda envelope: envelope["signature"].update(value=value))


def replaced_by(make: Callable[[Signers], Path]) -> Alteration:
    def alter(path: Path, signers: Signers) -> None:
        other = make(signers)
        shutil.rmtree(path)
        shutil.copytree(other, path)

    return alter


OTHER_JOB = dataclasses.replace(IDENTITY, seed=7)
CHANGED = "it is not what the key [0-9a-f]{16} has signed: somebody has changed it, or put"

DAMAGED: dict[str, tuple[Alteration, str]] = {
    "a flipped bit of the state": (lambda path, _: flip(path / STATE, -1), "SHA-256 differs"),
    "another state that the manifest knows": (another_state, CHANGED),
    "another numerics": (say(numerics=99), CHANGED),
    "a later format": (say(format=99), CHANGED),
    "another step in the manifest": (say(step=3), CHANGED),
    "another identity": (lambda path, _: edit(path, lambda said: said["manifest"]["identity"].update(seed=1)), CHANGED),
    "spaces in the manifest": (lambda path, _: edit(path, lambda envelope: None), CHANGED),
    "the state cut": (lambda path, _: truncate(path / STATE, 100), "bytes instead of"),
    "the manifest cut": (lambda path, _: truncate(path / MANIFEST, 100), "cannot be understood"),
    "the signature cut": (another_value(lambda value: value[:-4]), CHANGED),
    "an empty signature": (another_value(lambda value: b""), CHANGED),
    "a flipped bit of the signature": (another_value(lambda value: value[:-1] + bytes([value[-1] ^ 1])), CHANGED),
    "no object as a signature": (
        lambda path, _: edit_signature(path, lambda envelope: envelope.update(signature="mine")),
        "cannot be understood",
    ),
    "another step's signature": (take_signature(lambda signers: checkpoint_of(signers.folder / "job", 1)), CHANGED),
    "another job's signature": (
        take_signature(lambda signers: signers.write(2, "other", identity=OTHER_JOB)),
        CHANGED,
    ),
    "a stranger's signature in the owner's name": (of_the_stranger_in_the_owners_name, CHANGED),
    "another step's checkpoint": (
        replaced_by(lambda signers: checkpoint_of(signers.folder / "job", 1)),
        "manifest.json is of step 1",
    ),
}


@pytest.mark.parametrize(("alter", "why"), DAMAGED.values(), ids=DAMAGED)
def test_an_altered_one_is_skipped_as_a_damaged_one_and_the_older_one_counts(
    alter: Alteration, why: str, signers: Signers
) -> None:
    signers.write(1)
    path = signers.write(2)
    alter(path, signers)
    told: list[str] = []
    assert begin(signers.checkpointer("job", told)) == 1
    (sentence,) = told
    assert sentence.startswith(f"skipped the damaged checkpoint {path}: ")
    assert re.search(why, sentence)
    assert steps_in(signers.folder / "job") == [1, 2], "nothing is lost"


FOREIGN: dict[str, tuple[Alteration, str]] = {
    "without its signature": (
        lambda path, _: edit_signature(path, lambda envelope: envelope.pop("signature")),
        "bears no signature, and signed ones alone are trusted here .*; move it away, or",
    ),
    "an unsigned one": (
        replaced_by(lambda signers: signers.write(2, "plain", sign=None)),
        "bears no signature, and signed ones alone are trusted here .*; move it away, or",
    ),
    "a stranger's": (
        replaced_by(lambda signers: signers.write(2, "strange", sign=signers.strange)),
        "is signed by the key [0-9a-f]{16}, which is not trusted here; move it away, or",
    ),
    "with a stranger's signature": (
        take_signature(lambda signers: signers.write(2, "strange", sign=signers.strange)),
        "is signed by the key [0-9a-f]{16}, which is not trusted here; move it away, or",
    ),
    "the owner's other job's": (
        replaced_by(lambda signers: signers.write(2, "other", identity=OTHER_JOB)),
        "belongs to another job: the seed is 0 here and 7 there; use another",
    ),
}


@pytest.mark.parametrize(("alter", "why"), FOREIGN.values(), ids=FOREIGN)
def test_one_of_nobody_who_is_trusted_is_refused_and_everything_stays(
    alter: Alteration, why: str, signers: Signers
) -> None:
    signers.write(1)
    path = signers.write(2)
    alter(path, signers)
    before = contents(signers.folder / "job")
    with pytest.raises(vf.ConfigurationError, match=f"the checkpoint {path} {why}"):
        begin(signers.checkpointer())
    assert contents(signers.folder / "job") == before


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_unsigned_ones_do_not_keep_signed_ones_from_remaining(signers: Signers) -> None:
    signers.write(1)
    shutil.copytree(signers.write(2, "plain", sign=None), signers.folder / "job" / "step-00000002")
    signers.write(3)
    assert steps_in(signers.folder / "job") == [1, 3], "the last two that it would take"


def test_an_untrusted_one_in_the_place_of_its_own_is_written_anew(signers: Signers) -> None:
    shutil.copytree(signers.write(2, "plain", sign=None), signers.folder / "job" / "step-00000002")
    signers.write(2)
    assert begin(signers.checkpointer()) == 2


def test_a_job_that_could_not_take_its_own_checkpoints_does_not_begin(signers: Signers) -> None:
    with pytest.raises(vf.ConfigurationError, match=r"does not sign its own, .*; give it a key, too \(--sign\)"):
        signers.checkpointer(sign=None, trust=signers.public)


# --- a whole job ------------------------------------------------------------------------------------------------------

STEPS = 6


def train(directory: str = "", sign: str | None = None) -> Any:
    torch.manual_seed(3)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    draw = torch.Generator().manual_seed(0)
    dataset = TensorDataset(torch.randn(24, 4, generator=draw), torch.randn(24, 1, generator=draw))
    policy = vf.CheckpointPolicy(directory, every_steps=1, sign=sign) if directory else None
    steps: list[int] = []
    with vf.elastic(model, optimizer, dataset, batch_size=12, steps=STEPS, virtual_nodes=4, checkpoint=policy) as run:
        for step in run:
            for x, y in step:
                nn.functional.mse_loss(model(x), y).backward()
            steps.append(step.number)
    return trained(run, model, optimizer), steps


def test_a_job_resumes_from_what_it_has_signed_and_from_nothing_else(
    tmp_path: Path, start_job: Callable[..., ElasticJob]
) -> None:
    key, public = write_key(tmp_path, "mine")
    stranger, _ = write_key(tmp_path, "stranger", "p256")
    wanted, _ = alone(train)
    directory = tmp_path / "kept"
    job = start_job(train, str(directory), str(key), workers=2, hold=3)
    job.reach(3)
    job.call("stop", reason="the test says so")
    job.finish()
    newest = max(steps_in(directory))

    refused = start_job(train, str(directory), workers=2, environment={ENV_SIGN: str(stranger)}).finish()
    assert {outcome.kind for outcome in refused.values()} == {"ConfigurationError"}
    assert all("which is not trusted here; move it away, or" in outcome.text for outcome in refused.values())

    trusting = {ENV_SIGN: str(stranger), ENV_TRUST: str(public)}
    results = start_job(train, str(directory), workers=2, environment=trusting).results()
    assert [found for found, _ in results] == [wanted] * 2
    assert min(seen[0] for _, seen in results) == newest + 1
