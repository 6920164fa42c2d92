"""``virtualflow profile``: real scripts are measured and not trained, and a profile tells how fast a worker will be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from elastic_jobs import ElasticJob, alone
from torch.utils.data import TensorDataset

import programs
import virtualflow as vf
from virtualflow.errors import ConfigurationError, Profiled, describe
from virtualflow.protocol.device_profile import DeviceProfile, encode, read_profile
from virtualflow.protocol.settings import ENV_PROFILE, ENV_PROFILE_OUT
from virtualflow.worker import profiling
from virtualflow.worker.profiling import sizes_to_measure

TRAINER = str(Path(__file__).parents[3] / "trainer")

SCRIPT = """\
import sys
import torch
import virtualflow as vf

batch = int(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters())
dataset = torch.utils.data.TensorDataset(torch.randn(100, 64))
with vf.elastic(model, optimizer, dataset, batch_size=batch, epochs=2, checkpoint="checkpoints") as run:
    for step in run:
        for (x,) in step:
            loss = model(x).square().mean()
            loss.backward()
            step.log(loss=loss)
        print("a step was made")
print("the training is over")
"""


def profile(directory: Path, *arguments: str, interpreter: bool = False) -> tuple[int, str, str]:
    """Run it, as a fork or in an interpreter of its own, where all memory is the script's."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUALFLOW_")}
    command = [sys.executable, "-m", "virtualflow", "profile", *arguments]
    own = {**inherited, "PYTHONPATH": TRAINER, "TMPDIR": str(directory)}
    if interpreter:
        done = subprocess.run(command, cwd=directory, env=own, capture_output=True, text=True, timeout=280, check=False)
    else:
        done = programs.run(command, cwd=directory, env=own, timeout=280)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_script_is_measured_as_it_is_and_gets_behind_no_step(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    code, out, err = profile(tmp_path, "train.py", "32", interpreter=True)
    assert (code, err) == (0, "")
    found = read_profile(tmp_path / "train.profile.json")
    assert [(size.virtual_nodes, size.micro_batch) for size in found.sizes] == [(1, 4), (2, 8), (4, 16), (8, 32)]
    for size in found.sizes:
        assert 0 <= size.loading_seconds <= size.seconds
        assert size.seconds_low <= size.seconds <= size.seconds_high
    gradients = 4 * (64 * 32 + 32 + 2 * 32 + 32 * 2 + 2)
    peaks = [size.peak_bytes or 0 for size in found.sizes]
    assert peaks[0] > gradients
    # More samples take more memory, and each at least its own.
    assert peaks[3] - peaks[2] >= 8 * 64 * 4
    assert peaks == sorted(peaks)
    assert (found.script, found.threads, found.batch_size, found.virtual_nodes) == ("train.py", 1, 32, 8)
    assert (found.device_type, found.reproducibility, found.stopped) == ("cpu", "bitwise", "all were measured")
    assert found.blocks == "the blocks are the 3 modules in the model itself"
    chain = found.chain
    assert chain is not None
    assert [size.micro_batch for size in chain.sizes] == [4, 8, 16, 32]
    for size in chain.sizes:
        linear, norm, last = size.blocks
        assert (linear.name, norm.boundary_bytes, last.boundary_bytes) == ("0", *(2 * [4 * 32 * size.micro_batch]))
        assert size.other_bytes == 4 * 64 * size.micro_batch, "its samples"
    assert (chain.sum_bytes, chain.optimizer_bytes) == (gradients, 2 * gradients + 6 * 4), "AdamW's moments, and steps"
    assert chain.fixed_bytes == 2 * (4 * 2 * 32 + 8), "batch norm's buffers, and what a block is computed again from"
    assert chain.host_bytes == 0, "a CPU swaps nothing"
    assert found.sum_bytes == gradients
    assert found.step_seconds is not None
    assert found.step_seconds > 0
    assert "beside its micro-batches" in out
    assert found.blocks in out
    assert "written to train.profile.json" in out
    assert "a step was made" not in out
    assert "the training is over" not in out
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("torchinductor")) == [
        "train.profile.json",
        "train.py",
    ]


@pytest.mark.parametrize(
    ("text", "arguments", "code", "sentence"),
    [
        pytest.param("print('hello')", (), 1, "ended without training anything", id="no training"),
        pytest.param("raise RuntimeError('sour')", (), 1, "script.py ended with exit code 1 before", id="an error"),
        pytest.param(SCRIPT, ("--sizes", "16"), 1, "16 virtual nodes is asked for, and the job has 8", id="big"),
        pytest.param("", ("--sizes", "1,x"), 2, "write numbers of virtual nodes like 1,2,4", id="no numbers"),
        pytest.param("", ("--virtual-nodes", "0"), 2, "a job has between 1 and", id="no virtual nodes"),
        pytest.param(None, (), 2, "there is no script script.py", id="no script"),
        pytest.param("", ("--out", "nowhere/file"), 2, "--out nowhere/file: it cannot be written", id="no place"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_sentence(
    text: str | None, arguments: tuple[str, ...], code: int, sentence: str, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "script.py").write_text(text)
    ended, _, err = profile(tmp_path, *arguments, "script.py", "32")
    assert ended == code, err
    assert sentence in err
    assert not (tmp_path / "script.profile.json").exists()


@pytest.fixture
def short_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that look at anything but the times."""
    monkeypatch.setattr(profiling, "_SAMPLE", 0.001)


class Numbers:
    def shard(self, index: int, count: int, epoch: int, start: int) -> Iterator[tuple[torch.Tensor]]:
        for number in range(index + start * count, 50, count):
            yield (torch.full((3,), float(number)),)


def train(
    dataset: Any, seen: list[tuple[int, bool]] | None = None, fail_above: int = 10**9, virtual_nodes: int = 4
) -> None:
    """Note of each micro-batch how many samples it has, and whether something was trained before."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()
    with vf.elastic(
        model, optimizer, dataset, batch_size=4 * virtual_nodes, steps=5, virtual_nodes=virtual_nodes
    ) as run:
        for step in run:
            for (x,) in step:
                if len(x) > fail_above:
                    raise MemoryError("as torch would say on a GPU")
                if seen is not None:
                    seen.append((len(x), not torch.equal(model.weight, before)))
                model(x).square().mean().backward()


def measured(path: Path, script: Callable[[], None]) -> DeviceProfile:
    with pytest.raises(Profiled) as ended:
        alone(script, environment={ENV_PROFILE_OUT: str(path)})
    assert ended.value.code == 0
    return read_profile(path)


@pytest.mark.usefixtures("short_samples")
@pytest.mark.parametrize(
    "dataset", [pytest.param(TensorDataset(torch.ones(50, 3)), id="map"), pytest.param(Numbers(), id="stream")]
)
def test_short_micro_batches_are_not_measured_and_whole_steps_come_last(dataset: Any, tmp_path: Path) -> None:
    seen: list[tuple[int, bool]] = []
    found = measured(tmp_path / "p.json", lambda: train(dataset, seen))
    assert found.chain is None
    assert "no blocks were measured, so that no memory can be planned: the model has no nn.ModuleList" in found.blocks
    assert [size.micro_batch for size in found.sizes] == [4, 8, 16]
    trained = [each for _, each in seen]
    assert trained == sorted(trained)
    assert trained[-1]
    sizes = [size for size, _ in seen[: trained.index(True) - 4]]  # the first whole step has the first weights, too
    assert set(sizes) == {4, 8, 16}
    assert sizes == sorted(sizes)
    assert found.sum_bytes == 4 * (3 + 1)
    assert found.step_seconds is not None


class Played:
    """The clock of a process that stands still whenever it has used up its part of a tenth of a second."""

    def __init__(self, runs: float, stands: float) -> None:
        self.runs, self.stands = runs, stands
        self.now = self.used = 0.0

    def perf_counter(self) -> float:
        return self.now

    def compute(self, seconds: float) -> None:
        stops, self.used = divmod(self.used + seconds, self.runs)
        self.now += seconds + stops * self.stands


@pytest.mark.parametrize(("runs", "stands"), [(0.05, 0.05), (0.02, 0.08)], ids=["half a core", "a fifth"])
def test_a_quota_of_a_processor_counts_though_most_micro_batches_do_not_see_it(
    runs: float, stands: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    played, needs, updates = Played(runs, stands), 0.003, 0.02
    monkeypatch.setattr(profiling, "time", played)

    class Slow(torch.optim.SGD):
        def step(self, *args: Any, **kwargs: Any) -> Any:
            played.compute(updates)
            return super().step(*args, **kwargs)

    def script() -> None:
        model = torch.nn.Linear(3, 1)
        data = TensorDataset(torch.ones(8, 3))
        with vf.elastic(model, Slow(model.parameters(), 0.1), data, batch_size=8, steps=99, virtual_nodes=2) as run:
            for step in run:
                for (x,) in step:
                    played.compute(needs * len(x) / 4)
                    model(x).square().mean().backward()

    found, slower = measured(tmp_path / "p.json", script), (runs + stands) / runs
    for size in found.sizes:
        assert size.seconds_per_virtual_node == pytest.approx(needs * slower, rel=0.1)
    assert found.step_seconds == pytest.approx(updates * slower, rel=0.1), "once a step, and not once a virtual node"


@pytest.mark.usefixtures("short_samples")
def test_memory_that_is_used_up_ends_the_measurement_and_not_the_profile(tmp_path: Path) -> None:
    dataset = TensorDataset(torch.ones(50, 3))
    found = measured(tmp_path / "p.json", lambda: train(dataset, fail_above=8))
    assert [size.micro_batch for size in found.sizes] == [4, 8]
    assert "do not fit into memory" in found.stopped
    with pytest.raises(ConfigurationError, match=r"4 samples does not fit into the memory .*; use more virtual nodes"):
        alone(lambda: train(dataset, fail_above=3), environment={ENV_PROFILE_OUT: str(tmp_path / "q.json")})
    assert not (tmp_path / "q.json").exists()


@pytest.mark.usefixtures("short_samples")
@pytest.mark.parametrize("error", [MemoryError("as torch would say on a GPU"), ValueError("a batch that is too short")])
def test_an_error_in_a_whole_step_costs_nothing_but_what_such_steps_take(
    error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script() -> None:
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        before = model.weight.detach().clone()
        data = TensorDataset(torch.ones(50, 3))
        with vf.elastic(model, optimizer, data, batch_size=8, steps=5, virtual_nodes=2) as run:
            for step in run:
                for (x,) in step:
                    if not torch.equal(model.weight, before):
                        raise error
                    model(x).square().mean().backward()

    found = measured(tmp_path / "p.json", script)
    assert [size.micro_batch for size in found.sizes] == [4, 8]
    assert (found.stopped, found.step_seconds) == ("all were measured", None)
    assert f"is not in the profile: the script ended with {describe(error)}" in caplog.text


@pytest.mark.usefixtures("short_samples")
def test_a_loss_that_torch_has_without_hooks_only_costs_the_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = TensorDataset(torch.ones(8, 3))
        with vf.elastic(model, optimizer, data, batch_size=8, steps=5, virtual_nodes=2) as run:
            for step in run:
                for (x,) in step:
                    slope = torch.func.grad(lambda at: at.square().sum())(torch.ones(3))
                    (model(x) * slope).square().mean().backward()

    found = measured(tmp_path / "p.json", script)
    assert found.chain is None
    assert [size.micro_batch for size in found.sizes] == [4]
    assert "saved tensor hooks" in found.blocks
    assert "blocks and larger sizes are not in the profile: the script ended with" in caplog.text


def test_a_script_that_looks_at_gradients_now_and_then_is_measured_through(tmp_path: Path) -> None:
    """Steps in which a gradient is seen that was added up already are made again."""
    looked = []

    def script() -> None:
        model = torch.nn.Linear(128, 128, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = TensorDataset(torch.ones(8, 128))
        before = model.weight.detach().clone()
        with vf.elastic(model, optimizer, data, batch_size=8, steps=99, virtual_nodes=2) as run:
            for step in run:
                for count, (x,) in enumerate(step):
                    model(x).square().mean().backward()
                    if count % 7 == 0 and not torch.equal(model.weight, before):
                        assert model.weight.grad is not None
                        looked.append(float(model.weight.grad.norm()))

    found = measured(tmp_path / "p.json", script)
    assert len(looked) > 2
    assert found.step_seconds is not None


@pytest.mark.usefixtures("short_samples")
def test_where_memory_is_used_up_the_blocks_and_the_optimizer_are_known_as_well(tmp_path: Path) -> None:
    def script() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        data = TensorDataset(torch.ones(8, 3))
        with vf.elastic(model, optimizer, data, batch_size=8, steps=5, virtual_nodes=2) as run:
            for step in run:
                for (x,) in step:
                    if len(x) > 4:
                        raise MemoryError("as torch would say on a GPU")
                    model(x).square().mean().backward()

    chain = measured(tmp_path / "p.json", script).chain
    assert chain is not None
    assert [size.micro_batch for size in chain.sizes] == [4]
    assert chain.optimizer_bytes == 2 * 4 * (3 * 3 + 3)


class Growing(torch.nn.Module):
    """Larger micro-batches go through one more of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts[: 2 if len(x) < 8 else 3]:
            x = part(x)
        return x


@pytest.mark.usefixtures("short_samples")
def test_blocks_that_differ_between_sizes_are_no_chain(tmp_path: Path) -> None:
    def script() -> None:
        model = Growing()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with vf.elastic(
            model, optimizer, TensorDataset(torch.ones(8, 3)), batch_size=8, steps=5, virtual_nodes=2
        ) as run:
            for step in run:
                for (x,) in step:
                    model(x).square().mean().backward()

    found = measured(tmp_path / "p.json", script)
    assert found.chain is None
    assert found.blocks.endswith("other blocks run in micro-batches of 8 samples than in smaller ones")
    assert [size.micro_batch for size in found.sizes] == [4, 8]


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        pytest.param((8, 4, 1_000, ()), [1, 2, 4, 8], id="powers of two"),
        pytest.param((6, 4, None, ()), [1, 2, 4, 6], id="and all of them"),
        pytest.param((8, 4, 9, ()), [1, 2], id="as far as the dataset goes"),
        pytest.param((8, 4, 1_000, (3, 1)), [1, 3], id="as asked for"),
        pytest.param((1, 4, 1_000, ()), [1], id="one virtual node"),
    ],
)
def test_sizes_that_are_worth_measuring(arguments: Any, sizes: list[int]) -> None:
    assert sizes_to_measure(*arguments) == sizes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [((8, 4, 3, ()), "fewer than the 4 of one micro-batch"), ((8, 4, 99, (9,)), "the job has 8; ask for at most that")],
)
def test_sizes_that_cannot_be_are_refused(arguments: Any, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        sizes_to_measure(*arguments)


@pytest.mark.slow
def test_workers_tell_what_fits_and_warn_of_the_rest(
    tmp_path: Path, start_job: Callable[..., ElasticJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator is asked what it was told; a profile of another model is a warning among the job's events."""
    fitting, foreign = tmp_path / "fitting.json", tmp_path / "foreign.json"
    found = measured(fitting, lambda: train(TensorDataset(torch.ones(50, 3))))
    import msgspec

    foreign.write_bytes(encode(msgspec.structs.replace(found, signature="another")))
    from virtualflow.coordinator import server
    from virtualflow.coordinator.admission import admit

    told: dict[str, float | None] = {}

    def listen(state: Any, said: Any, now: float) -> str | None:
        told[said.worker] = said.pace
        return admit(state, said, now)

    monkeypatch.setattr(server, "admit", listen)
    for path, pace in ((fitting, found.sizes[0].seconds), (foreign, None), (tmp_path / "missing.json", None)):
        told.clear()
        job = start_job(train, TensorDataset(torch.ones(50, 3)), workers=2, environment={ENV_PROFILE: str(path)})
        job.results()
        assert told == {"worker-0": pace, "worker-1": pace}
        warnings = [event.text for event in job.status().events if event.kind == "warning"]
        assert len(warnings) == (0 if pace is not None else 2)
        assert all(str(path) in text and "virtualflow profile" in text for text in warnings)
