"""``virtualflow plan``: from profiles to what fits, as a table and as data, and one sentence for bad input."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import terminals
from tiers import needs
from virtualflow.errors import ConfigurationError
from virtualflow.launcher import cli, plan
from virtualflow.launcher.plan import parse_bandwidth, split
from virtualflow.launcher.training_program import TrainingProgram
from virtualflow.memory import parse_bytes
from virtualflow.protocol.device_profile import (
    BlockProfile,
    ChainProfile,
    ChainSize,
    DeviceProfile,
    SizeProfile,
    encode,
    read_profile,
)

MIB = 1 << 20


def measured(micro_batch: int, slowness: float) -> ChainSize:
    one = BlockProfile(
        name="layer",
        forward_seconds=0.001 * micro_batch * slowness,
        backward_seconds=0.002 * micro_batch * slowness,
        saved_bytes=40 * MIB * micro_batch,
        boundary_bytes=2 * MIB * micro_batch,
        parameter_bytes=30 * MIB,
        gradient_bytes=30 * MIB,
    )
    return ChainSize(micro_batch, (one,) * 6)


def profile(device: str, slowness: float, *, chain: bool = True, **changes: object) -> DeviceProfile:
    """Return one of 8 virtual nodes of 8 samples each."""
    of_blocks = ChainProfile(
        out_bytes_per_second=12e9,
        in_bytes_per_second=12e9,
        optimizer_bytes=360 * MIB,
        fixed_bytes=100 * MIB,
        device_bytes=2 << 30,
        host_bytes=32 << 30,
        sizes=(measured(4, slowness), measured(16, slowness)),
    )
    made = DeviceProfile(
        device_type="cuda",
        device=device,
        torch="2.13.0",
        threads=1,
        reproducibility="bitwise",
        signature="abc",
        script="train.py",
        batch_size=64,
        virtual_nodes=8,
        created="2026-01-01T00:00:00+00:00",
        stopped="all were measured",
        sizes=tuple(
            SizeProfile(width, 8 * width, 30, 0.1 * slowness * (1 + width), 0.1, 0.9, 0.0, None) for width in (1, 2, 4)
        ),
        chain=of_blocks if chain else None,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the profiles of this module to a directory of their own, and go there."""
    monkeypatch.chdir(tmp_path)
    for name, content in {
        "v100": profile("Tesla V100-SXM2-16GB", 1.0),
        "t4": profile("Tesla T4", 3.0),
        "v100-times": profile("Tesla V100-SXM2-16GB", 1.0, chain=False, reproducibility="statistical"),
        "t4-times": profile("Tesla T4", 3.0, chain=False),
    }.items():
        Path(f"{name}.json").write_bytes(encode(content))
    Path("train.json").write_text("{}\n")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert cli.main(["plan", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


pytestmark = pytest.mark.usefixtures("files")


def test_a_profile_with_blocks_is_read_as_it_was_written() -> None:
    assert read_profile(Path("v100.json")) == profile("Tesla V100-SXM2-16GB", 1.0)
    assert read_profile(Path("t4-times.json")).chain is None


def test_the_table_has_the_smallest_number_of_virtual_nodes_and_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "v100.json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    verdict = (
        "a batch of 64 fits into 2.00 GiB from 4 virtual nodes on; the step is shortest with 16: 1.15 s on one device"
    )
    assert lines[0] == f"Tesla V100-SXM2-16GB: {verdict}"
    assert lines[1] == "memory: 2.00 GiB on the device, 32.0 GiB on the host; the optimizer's state is on the device"
    assert [line.split()[0] for line in lines if line.endswith("does not fit")] == ["2"]
    assert len({len(line) for line in lines[3:9] if not line.endswith("does not fit")}) == 1, (
        "columns stand below another"
    )
    assert [line.split("|")[0].strip() for line in lines if line.endswith("%")] == ["compute", "copy-out", "copy-in"]


def test_the_data_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "v100.json", "--device", "1500MiB", "--host", "4GiB", "--virtual-nodes", "8")
    ((memory,), advice) = found["memory"], found["advice"]
    assert advice is None
    assert memory["budget"] == {"device": parse_bytes("1500MiB"), "host": 4 << 30, "optimizer": "device"}
    (row,) = memory["fits"]
    assert (row["virtual_nodes"], row["micro_batch"]) == (8, 8)
    plan = row["plan"]
    assert plan["peak_bytes"] <= parse_bytes("1500MiB") < row["keep_bytes"]
    assert {block["action"] for block in plan["blocks"]} > {"keep"}
    assert plan["seconds"] == max(span["end"] for span in plan["timeline"]["spans"] if span["resource"] == "compute")


def test_a_trace_has_every_span_and_the_memory_of_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["v100.json", "--device", "1500MiB", "--virtual-nodes", "8", "--trace", "trace.json"]
    plan = answer(capsys, *words)["memory"][0]["fits"][0]["plan"]
    events = json.loads(Path("trace.json").read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    drawn = [
        (rows[event["tid"]], event["name"], event["ts"], event["ts"] + event["dur"])
        for event in events
        if event["ph"] == "X"
    ]
    spans = plan["timeline"]["spans"]
    assert {span["resource"] for span in spans} == set(rows.values()) == {"compute", "copy-out", "copy-in"}
    assert drawn == [
        (
            span["resource"],
            f"{span['kind']} layer",
            pytest.approx(1e6 * span["start"]),
            pytest.approx(1e6 * span["end"]),
        )
        for span in spans
    ]
    assert max(event["args"]["bytes"] for event in events if event["ph"] == "C") == plan["peak_bytes"]


def test_the_optimizer_on_the_host_frees_its_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["v100.json", "--virtual-nodes", "64"]
    device, host = (
        answer(capsys, *words, "--optimizer", where)["memory"][0]["fits"][0] for where in ("device", "host")
    )
    assert device["keep_bytes"] - host["keep_bytes"] == 360 * MIB
    assert host["plan"]["host_bytes"] - device["plan"]["host_bytes"] == 360 * MIB


def test_devices_share_the_virtual_nodes_by_their_plans(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "v100.json", "t4.json", "--devices", "V100:1,t4:2")
    shares = found["advice"]["best"]["shares"]
    assert [(share["name"], share["virtual_nodes"]) for share in shares] == [("V100", [5]), ("t4", [2, 1])]
    assert [each["device"] for each in found["memory"]] == ["Tesla V100-SXM2-16GB", "Tesla T4"]


def test_devices_of_one_name_are_told_apart_by_the_names_of_their_files(capsys: pytest.CaptureFixture[str]) -> None:
    for name, slowness in (("whole", 1.0), ("third", 3.0)):
        Path(f"{name}-core.json").write_bytes(encode(profile("EPYC", slowness, chain=False)))
    found = answer(capsys, "whole-core.json", "third-core.json", "--devices", "whole,third")
    whole, third = found["advice"]["everything"]["shares"]
    assert (whole["virtual_nodes"], third["virtual_nodes"]) == ([6], [2])


def test_whose_update_was_not_measured_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    for name, seconds in (("v100", 0.1), ("t4", None)):
        measured = msgspec.structs.replace(profile(name, 1.0, chain=False), step_seconds=seconds)
        Path(f"{name}-beside.json").write_bytes(encode(measured))
    found = answer(capsys, "v100-beside.json", "t4-beside.json", "--devices", "V100,T4")
    assert "; what T4 takes beside micro-batches was not measured" in found["advice"]["reason"]
    assert found["advice"]["reason"].endswith("measure it anew, if need be with fewer virtual nodes")


def test_the_update_and_the_exchange_are_part_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    for name, slowness in (("v100", 1.0), ("t4", 3.0)):
        whole = profile(name, slowness, chain=False)
        whole = msgspec.structs.replace(whole, step_seconds=0.1 * slowness, sum_bytes=100_000_000)
        Path(f"{name}-whole.json").write_bytes(encode(whole))
    words = ["v100-whole.json", "t4-whole.json", "--devices", "V100,T4"]
    without = answer(capsys, *words)["advice"]["everything"]
    assert [share["virtual_nodes"] for share in without["shares"]] == [[7], [1]]
    assert (without["seconds"], without["exchange"]) == (pytest.approx(1.5), 0.0)
    found = answer(capsys, *words, "--bandwidth", "8Gbit/s")["advice"]["everything"]
    assert found["exchange"] == pytest.approx(0.2), "of three sums and one, half of each goes, and half of one returns"
    assert found["seconds"] == pytest.approx(1.7)
    assert answer(capsys, *words, "--bandwidth", "1GB")["advice"]["everything"] == found
    assert cli.main(["plan", *words]) == 0
    assert "--bandwidth" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("text", "bytes_per_second"),
    [
        ("10Gbit", 1.25e9),
        ("10Gbit/s", 1.25e9),
        ("10Gbps", 1.25e9),
        ("10 Gb/s", 1.25e9),
        ("1.25GB/s", 1.25e9),
        ("100Mbit", 12.5e6),
        ("800kbps", 1e5),
    ],
)
def test_a_bandwidth_is_in_bits_or_in_bytes(text: str, bytes_per_second: float) -> None:
    assert parse_bandwidth(text) == bytes_per_second


@pytest.mark.parametrize("text", ["10", "10G", "fast", "0bit", "1.2.3Gbit", "10GiB", "-1Gbit", ""])
def test_what_is_no_bandwidth_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f"--bandwidth {text}: write one like 10Gbit/s")):
        parse_bandwidth(text)


def test_without_blocks_they_share_by_measured_speed_and_fuse_where_the_job_may(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = answer(capsys, "v100-times.json", "t4-times.json", "--devices", "V100,T4")
    assert found["memory"] == []
    fast, slow = found["advice"]["everything"]["shares"]
    assert fast == {"name": "V100", "virtual_nodes": [7], "fused": 4, "seconds": pytest.approx(0.9)}
    assert slow == {"name": "T4", "virtual_nodes": [1], "fused": 1, "seconds": pytest.approx(0.6)}


def test_sums_of_gradients_grow_with_the_virtual_nodes_and_samples_with_the_micro_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plain = profile("Tesla T4", 3.0)
    chain = plain.chain
    assert chain is not None
    sizes = tuple(ChainSize(size.micro_batch, size.blocks, MIB * size.micro_batch) for size in chain.sizes)
    fuller = msgspec.structs.replace(chain, sum_bytes=180 * MIB, sizes=sizes)
    Path("fuller.json").write_bytes(encode(msgspec.structs.replace(plain, chain=fuller)))
    for virtual_nodes, micro_batch, sums in ((4, 16, 2), (8, 8, 3), (64, 1, 6)):
        words = ("--device", "1TiB", "--virtual-nodes", str(virtual_nodes))
        (less,), (more,) = (answer(capsys, name, *words)["memory"][0]["fits"] for name in ("t4.json", "fuller.json"))
        assert more["keep_bytes"] - less["keep_bytes"] == (180 * sums + micro_batch) * MIB


@pytest.mark.parametrize(
    ("words", "module", "profiles", "program", "arguments"),
    [
        (["a.json", "b.json"], None, ["a.json", "b.json"], None, []),
        (["train.py", "3", "--fast"], None, [], TrainingProgram("train.py"), ["3", "--fast"]),
        (["t4.json", "train.py", "c.json"], None, ["t4.json"], TrainingProgram("train.py"), ["c.json"]),
        (["t4.json"], ["pkg.train", "3"], ["t4.json"], TrainingProgram("pkg.train", is_module=True), ["3"]),
        (
            ["--fast", "c.json"],
            ["pkg.train", "3"],
            [],
            TrainingProgram("pkg.train", is_module=True),
            ["3", "--fast", "c.json"],
        ),
    ],
)
def test_profiles_stand_before_a_script_and_its_arguments_behind(
    words: list[str],
    module: list[str] | None,
    profiles: list[str],
    program: TrainingProgram | None,
    arguments: list[str],
) -> None:
    assert split(words, module) == (profiles, program, arguments)


@pytest.mark.slow
def test_nobody_who_reads_the_answer_is_no_traceback() -> None:
    """As ``| head`` does: the pipe is closed before anything is written."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "virtualflow", "plan", "v100.json"]
    own = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[2])}
    with os.fdopen(writes, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, env=own, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_without_a_size_of_memory_they_share_by_measured_speed_too(capsys: pytest.CaptureFixture[str]) -> None:
    """As on CPUs, whose profiles have blocks but no memory of the device."""
    known = read_profile(Path("t4.json"))
    assert known.chain is not None
    unknown = msgspec.structs.replace(known, chain=msgspec.structs.replace(known.chain, device_bytes=None))
    Path("t4.json").write_bytes(encode(unknown))
    found = [answer(capsys, name, "--devices", "T4") for name in ("t4.json", "t4-times.json")]
    assert found[0] == found[1]
    assert answer(capsys, "t4.json", "--devices", "T4", "--device", "2GiB")["memory"] != []


def test_in_a_bitwise_job_nothing_is_fused(capsys: pytest.CaptureFixture[str]) -> None:
    (share,) = answer(capsys, "t4-times.json", "--devices", "T4")["advice"]["best"]["shares"]
    assert share == {"name": "T4", "virtual_nodes": [8], "fused": 1, "seconds": pytest.approx(4.8)}


def test_a_device_that_is_too_small_is_left_out_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    small = profile("Tesla T4", 3.0)
    assert small.chain is not None
    small = msgspec.structs.replace(small, chain=msgspec.structs.replace(small.chain, device_bytes=700 * MIB))
    Path("t4.json").write_bytes(encode(small))
    assert cli.main(["plan", "v100.json", "t4.json", "--devices", "V100:2,T4:2"]) == 0
    out = capsys.readouterr().out
    assert "T4 takes no part: the model does not fit into 700 MiB" in out
    assert "ask for 2 V100" in out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        pytest.param(["absent.json"], "cannot be read", id="no file"),
        pytest.param(["train.json"], "train.json is no device profile", id="no profile"),
        pytest.param(["nowhere.py"], "there is no script nowhere.py", id="no script"),
        pytest.param(["nowhere.py", "--device", "0"], "'0' is no size of memory", id="no size for a script"),
        pytest.param(["nowhere.json", "nowhere.py"], "cannot be read", id="no profile before a script"),
        pytest.param(["v100-times.json"], "says nothing of the model's blocks: it is an old one", id="no blocks"),
        pytest.param(["t4-times.json", "--devices", "T4", "--trace", "x"], "name a profile that has", id="no trace"),
        pytest.param(["v100.json", "--trace", "no/x"], "--trace no/x: it cannot be written", id="no place for it"),
        pytest.param(["v100.json", "--device", "much"], "'much' is no size of memory", id="no size"),
        pytest.param(
            ["v100.json", "--device", "600MiB"], "not even micro-batches of 1 fit into 600 MiB", id="too small"
        ),
        pytest.param(
            ["v100.json", "--device", "700MiB", "--virtual-nodes", "8"],
            "the smallest budget that works",
            id="for these",
        ),
        pytest.param(["v100.json", "--virtual-nodes", "7"], "7 virtual nodes do not divide a batch of 64", id="uneven"),
        pytest.param(["v100.json", "--devices", "V100:0"], "like V100:2,T4:4", id="none of a type"),
        pytest.param(["v100.json", "--devices", "V100:x"], "like V100:2,T4:4", id="no number"),
        pytest.param(["v100.json", "--devices", "V100,V100"], "like V100:2,T4:4", id="twice"),
        pytest.param(["v100.json", "--bandwidth", "10Gbit"], "name them by --devices", id="a network of nobody"),
        pytest.param(
            ["v100.json", "--devices", "V100", "--bandwidth", "fast"], "write one like 10Gbit/s or", id="no bandwidth"
        ),
        pytest.param(
            ["v100.json", "--devices", "V100", "--bandwidth", "10Gbit"], "measure it anew", id="no bytes of gradients"
        ),
        pytest.param(["v100.json", "--devices", "A100:2"], "no profile is of a device A100", id="not measured"),
        pytest.param(
            ["v100.json", "t4.json", "--devices", "Tesla"], "2 profiles are of a device Tesla", id="ambiguous"
        ),
        pytest.param(
            ["t4-times.json", "--devices", "T4", "--virtual-nodes", "64"],
            "of micro-batches of 8 to 32",
            id="other sizes",
        ),
        pytest.param(
            ["v100.json", "--host", "1MiB", "--optimizer", "host"], "host's memory is too small", id="the host"
        ),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


PLAN = """
import sys
from virtualflow import progress
progress.SHOWN_AFTER = progress.FRAME = 0.0
from virtualflow.launcher import cli, plan
sys.exit(cli.main(["plan", "v100.json"]))
"""


@pytest.mark.slow
def test_on_a_terminal_a_bar_shows_how_far_the_planning_is_and_leaves_the_answer_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["plan", "v100.json"]) == 0
    wanted = capsys.readouterr().out
    piped = terminals.run(["-c", PLAN], piped=True, cwd=Path.cwd())
    assert (piped.code, piped.piped) == (0, wanted)
    shares = [
        int(share) for share in re.findall(r"planning for Tesla V100-SXM2-16GB .*?(\d+) %, 0:\d\d left", piped.words)
    ]
    assert shares == sorted(shares)
    assert len(set(shares)) > 3
    assert (piped.left, piped.cursor) == ([], True)
    both = terminals.run(["-c", PLAN], piped=False, cwd=Path.cwd())
    assert "planning for" in both.words
    assert both.left == [line.rstrip() for line in wanted.splitlines() if line.strip()]


@needs("torch", "make venv installs it")
def test_a_script_is_not_measured_for_a_plan_of_memory_whose_size_nobody_knows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("train.py").write_text("open('started', 'w')\n")
    monkeypatch.setattr(plan, "ACCELERATORS", ())
    assert cli.main(["plan", "train.py"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("nothing says how much memory the device has; give --device, like 24GiB")
    assert not Path("started").exists()


def test_divided_parameters_say_how_many_workers_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["v100.json", "--shard", "parameters", "--device", "800MiB", "--virtual-nodes", "16"]
    assert cli.main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == (
        "Tesla V100-SXM2-16GB: a batch of 64 in 16 virtual nodes fits into workers of 800 MiB from 7 workers on"
    )
    assert lines[1].endswith("each share is kept by two workers; activations have a plan")
    bare = [line.removesuffix("  does not fit").removesuffix("  fits by a plan") for line in lines[3:]]
    assert len({len(line) for line in bare}) == 1, "columns stand below another"
    assert [line.removeprefix(cut) for line, cut in zip(lines[5:8], bare[2:5], strict=True)] == [
        "  does not fit",
        "  does not fit",
        "  fits by a plan",
    ]
    roomy = ["v100.json", "--shard", "parameters", "--virtual-nodes", "16"]
    assert cli.main(["plan", *roomy, "--device", "1550MiB"]) == 0
    assert "activations have a plan, and all stay from 8 workers on" in capsys.readouterr().out
    assert cli.main(["plan", *roomy, "--device", "1800MiB"]) == 0
    assert "kept by two workers; all activations stay" in capsys.readouterr().out
    found = answer(capsys, *words, "--redundancy", "none")
    (sharded,) = found["sharded"]
    assert (sharded["redundancy"], sharded["device_bytes"]) == ("none", 800 * MIB)
    assert [each["workers"] for each in sharded["fits"]] == [1, 4, 5, 6, 7, 8, 9]
    assert sharded["fits"][1]["kept_bytes"] == (6 * 30 + 100 + 360) * MIB // 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--redundancy", "none"], "--redundancy is about shares; give --shard parameters"),
        (["--shard", "parameters", "--devices", "V100:2"], "--devices has nothing to say where parameters are divided"),
        (["--shard", "parameters", "--bandwidth", "10Gbit"], "--bandwidth has nothing to say"),
        (["--shard", "parameters", "--optimizer", "host"], "--optimizer host has nothing to say"),
        (["--shard", "parameters", "--device", "1MiB"], "not even 8 workers of 1.00 MiB are enough: each would need"),
    ],
)
def test_what_does_not_go_with_divided_parameters_is_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "v100.json", *words]) == 2
    assert sentence in capsys.readouterr().err
