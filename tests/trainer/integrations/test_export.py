"""A checkpoint as files of others: plain PyTorch goes on from them with the same bits."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import checkpoint_of, flip, steps_in
from safetensors.torch import load_file
from signing import write_key
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import virtualflow as vf
from tiers import needs
from virtualflow.integrations import export
from virtualflow.launcher import cli

STEPS = 4


class Tied(nn.Module):
    """An output layer that is its embedding's weight, and buffers of both kinds."""

    scale: Tensor
    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("mask", torch.ones(6), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(tokens) * self.scale * self.mask))


class Tokens(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, n: int) -> tuple[Tensor, Tensor]:
        return torch.tensor(n % 11), torch.tensor((n + 1) % 11)


def make(seed: int) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied()
    biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": others}, {"params": biases, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tied, torch.optim.AdamW]:
    """Checkpoints of all steps, and the objects after the last."""
    directory = tmp_path_factory.mktemp("trained") / "checkpoints"
    model, optimizer = make(1)
    policy = vf.CheckpointPolicy(directory, every_steps=1, keep=STEPS)
    with vf.elastic(model, optimizer, Tokens(), batch_size=16, steps=STEPS, virtual_nodes=4, checkpoint=policy) as run:
        for step in run:
            for tokens, targets in step:
                nn.functional.cross_entropy(model(tokens), targets).backward()
    return directory, model, optimizer


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_of_several_trainings_in_a_script_the_last_ones_weights_are_taken(
    trained: tuple[Path, Tied, torch.optim.AdamW], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = tmp_path / "both"
    shutil.copytree(trained[0], both)
    earlier, *_, last = steps_in(both)
    shutil.copytree(checkpoint_of(both, earlier), both / "run-2" / checkpoint_of(both, earlier).name)
    (both / "run-3").mkdir()  # has not come as far as a checkpoint

    def export_(*options: str) -> tuple[int, str]:
        code = cli.main(["export", str(both), "--output", str(tmp_path / "-".join(["model", *options])), *options])
        said = capsys.readouterr()
        return code, said.out + said.err

    assert f"run-2, step {earlier}, 4 parameters" in export_()[1]
    assert f": step {last}, 4 parameters" in export_("--run", "1")[1]
    code, said = export_("--run", "3")
    assert code == 2
    assert f"there is no checkpoint of run 3 in {both}; --run is one of 1, 2" in said


def test_a_plain_model_takes_the_weights_of_a_file(
    trained: tuple[Path, Tied, torch.optim.AdamW], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, model, _ = trained
    assert cli.main(["export", str(directory), "--output", str(tmp_path / "model.safetensors")]) == 0
    assert "step 4, 4 parameters with 89 elements" in capsys.readouterr().out
    plain, _ = make(2)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert_equal(plain.state_dict(), model.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"], "and nothing else is left"


@pytest.mark.parametrize("by", ["number", "path"])
def test_an_older_checkpoint_is_taken_where_it_is_named(
    by: str, trained: tuple[Path, Tied, torch.optim.AdamW], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, _, _ = trained
    older = steps_in(directory)[0]
    assert older < STEPS
    named = [str(directory), "--step", str(older)] if by == "number" else [str(checkpoint_of(directory, older))]
    assert export.main([*named, "--output", str(tmp_path / "model.safetensors")]) == 0
    assert f"step {older}," in capsys.readouterr().out


def test_plain_pytorch_goes_on_from_a_distributed_checkpoint(
    trained: tuple[Path, Tied, torch.optim.AdamW], tmp_path: Path
) -> None:
    directory, model, optimizer = copy.deepcopy(trained)
    assert export.main([str(directory), "--format", "dcp", "--output", str(tmp_path / "dcp")]) == 0
    plain, stepping = make(2)
    for parameter in plain.parameters():  # as torch's own users do, to have states to load into
        parameter.grad = torch.zeros_like(parameter)
    stepping.step()
    state = {"model": plain.state_dict(), "optimizer": get_optimizer_state_dict(plain, stepping)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    plain.load_state_dict(state["model"])
    set_optimizer_state_dict(plain, stepping, state["optimizer"])
    tokens, targets = torch.arange(11), torch.arange(11).flip(0)
    for each, step in ((model, optimizer), (plain, stepping)):
        step.zero_grad()
        nn.functional.cross_entropy(each(tokens), targets).backward()
        step.step()
    assert_equal(plain.state_dict(), model.state_dict())


def test_the_weights_of_nobody_who_is_trusted_are_not_exported(
    trained: tuple[Path, Tied, torch.optim.AdamW], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, public = write_key(tmp_path, "mine")
    target = tmp_path / "model.safetensors"
    assert cli.main(["export", str(trained[0]), "--trust", str(public), "--output", str(target)]) == 2
    assert "bears no signature, and signed ones alone are trusted here" in capsys.readouterr().err
    assert not target.exists()


@needs("transformers")
@pytest.mark.nightly
def test_transformers_reads_what_was_trained_without_its_trainer(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=32, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    rows = torch.randint(0, 32, (32, 8))
    with vf.elastic(
        model, torch.optim.SGD(model.parameters(), 0.1), rows, batch_size=8, steps=2, checkpoint=str(tmp_path / "c")
    ) as run:
        for step in run:
            for batch in step:
                model(input_ids=batch, labels=batch).loss.backward()
    config.save_pretrained(tmp_path / "config")
    arguments = ["--format", "hf", "--config", str(tmp_path / "config"), "--output", str(tmp_path / "hf")]
    assert export.main([str(tmp_path / "c"), *arguments]) == 0
    assert_equal(GPT2LMHeadModel.from_pretrained(tmp_path / "hf").state_dict(), model.state_dict())


def test_a_folder_for_transformers_has_the_files_beside_the_weights(
    trained: tuple[Path, Tied, torch.optim.AdamW], tmp_path: Path
) -> None:
    directory, model, _ = trained
    (tmp_path / "config").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / "config" / name).write_text("{}")
    arguments = ["--format", "hf", "--config", str(tmp_path / "config"), "--output", str(tmp_path / "hf")]
    assert export.main([str(directory), *arguments]) == 0
    assert {path.name for path in (tmp_path / "hf").iterdir()} == {"config.json", "tokenizer.json", export.WEIGHTS}
    found = load_file(tmp_path / "hf" / export.WEIGHTS)
    assert_equal(found, {name: of for name, of in model.state_dict().items() if name != "head.weight"})
    with (tmp_path / "hf" / export.WEIGHTS).open("rb") as file:
        assert json.loads(file.read(int.from_bytes(file.read(8), "little")))["__metadata__"] == {"format": "pt"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--output", "."], "exists already; give another --output"),
        (["--output", "gone/model.safetensors"], "there is no folder gone"),
        (["--output", "hf", "--format", "hf"], "needs the model's config.json: give --config DIR"),
        (["--output", "hf", "--format", "hf", "--config", "."], "there is no config.json in ."),
        (["--output", "x", "--step", "77"], "there is no complete checkpoint of step 77 in"),
    ],
    ids=["it exists", "no folder", "no config", "not a config", "no such step"],
)
def test_what_makes_no_sense_is_said_in_one_line(
    arguments: list[str],
    sentence: str,
    trained: tuple[Path, Tied, torch.optim.AdamW],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(trained[0]), *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_one_is_skipped_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], trained: tuple[Path, Tied, torch.optim.AdamW]
) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(trained[0], directory)
    steps = steps_in(directory)
    state = checkpoint_of(directory, STEPS) / "state.safetensors"
    flip(state, state.stat().st_size - 1)
    assert export.main([str(directory), "--output", str(tmp_path / "m")]) == 0
    said = capsys.readouterr()
    assert f"step {steps[-2]}," in said.out
    assert "skipped the damaged checkpoint" in said.err
    assert steps_in(directory) == steps, "nothing was changed"
