"""``virtualflow simulate``: traces that make sense and others, what is printed and written, and how it is found."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

import progress_seen
from virtualflow import launcher
from virtualflow.errors import ConfigurationError
from virtualflow.launcher import cli
from virtualflow.launcher.subcommands import EXTERNAL
from virtualflow_operator.simulator import command
from virtualflow_operator.simulator.command import main
from virtualflow_operator.simulator.trace import GoneEvent, JobEvent, JobTrace, NodeEvent, read, write

ROOT = Path(__file__).parents[3]
GOOD = """\
# who comes when
event,time,name,steps,throughput,min,max,weight,priority,units,on_demand,spot,join

node,0,steady,,,,,,,4,,,
job,1.5,first,100,1:1.0 4:3.0,2,3,2.5,7,2,true,,
node,2,extra,,,,,,,8,,true,
gone,9,extra,,,,,,,,,,
job,3,second,10,1:2,,,,,,,,7.5
"""
HEADING = "event,time,name,steps,throughput,min,max,requested,weight,units\n"
NODE = "node,0,n,,,,,,,4\n"
EARLY = "event,time,name,steps,throughput,backward,virtual_nodes,statistical,batch,min_batch,max_batch\n"
EARLY += "job,1,j,10,1:1 2:1.5,"


def given(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_csv_trace_is_read_by_time(tmp_path: Path) -> None:
    trace = read(given(tmp_path, GOOD))
    first = JobEvent(1.5, "first", 100, {1: 1.0, 4: 3.0}, min=2, max=3, weight=2.5, priority=7, units=2, on_demand=True)
    second = JobEvent(3.0, "second", 10, {1: 2.0}, join=7.5)
    extra = NodeEvent(2.0, "extra", 8, spot=True)
    assert trace == JobTrace((NodeEvent(0.0, "steady", 4), first, extra, second, GoneEvent(9.0, "extra")))
    assert (first.maximum, second.maximum) == (3, 1)


def test_a_json_trace_says_the_same(tmp_path: Path) -> None:
    trace = read(given(tmp_path, GOOD))
    text = msgspec.json.encode(JobTrace(trace.events, ["made for a test"])).decode()
    assert read(given(tmp_path, text, "trace.json")) == trace


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    trace = read(given(tmp_path, GOOD))
    write(trace, tmp_path / "again.csv", ["a comment", "of two lines"])
    assert read(tmp_path / "again.csv") == trace


@pytest.mark.parametrize(
    ("workers", "speed"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (6, 5), (8, 6), (9, 6), (100, 6)]
)
def test_speeds_between_the_known_ones_are_on_a_line(workers: int, speed: float) -> None:
    assert JobEvent(0.0, "j", 1, {2: 2.0, 4: 4.0, 8: 6.0}).speed(workers) == speed


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty; begin with a line of column names"),
        ("# only a comment\n", "is empty"),
        ("event,time,nome\n", "line 1: there is no column 'nome'; choose column names from event,"),
        ("event,name\n", "line 1: event, time and name must be there, once"),
        (HEADING, "there are no jobs in it; add rows with event=job"),
        (HEADING + NODE, "there are no jobs in it"),
        (HEADING + "job,1\n", "line 2: 2 cells; give 10, as in the first line"),
        (HEADING + "walk,1,j,,,,,,,\n", "line 2: event=walk: give job, node or gone"),
        (HEADING + "job,soon,j,10,1:1,,,,,\n", "line 2: time=soon: give a number$"),
        (HEADING + "job,-1,j,10,1:1,,,,,\n", "line 2: time=-1: give seconds from 0"),
        (HEADING + "job,nan,j,10,1:1,,,,,\n", "line 2: time=nan: give seconds from 0"),
        (HEADING + ",1,j,10,1:1,,,,,\n", "line 2: event=: give job, node or gone"),
        (HEADING + "job,1,,10,1:1,,,,,\n", "line 2: name is empty; a job needs it"),
        (HEADING + "job,1,j,,1:1,,,,,\n", "line 2: steps is empty; a job needs it"),
        (HEADING + "job,1,j,0,1:1,,,,,\n", "line 2: steps=0: give 1 or more"),
        (HEADING + "job,1,j,1.5,1:1,,,,,\n", "line 2: steps=1.5: give a whole number"),
        (HEADING + "job,1,j,10,fast,,,,,\n", "line 2: throughput=fast: write workers:steps per second"),
        (HEADING + "job,1,j,10,one:1,,,,,\n", "line 2: throughput=one:1: write workers:steps per second"),
        (HEADING + "job,1,j,10,1:fast,,,,,\n", "line 2: throughput=1:fast: write workers:steps per second"),
        (HEADING + "node,1,n,10,,,,,,4\n", "line 2: steps=10: a node has no steps; leave the cell empty"),
        ("event,time,name,spot\nnode,1,n,maybe\n", "line 2: spot=maybe: give true or false"),
        (HEADING + "job,1,j,10,1:0,,,,,\n", "line 2: throughput: give ascending numbers of workers"),
        (HEADING + "job,1,j,10,2:1 1:1,,,,,\n", "line 2: throughput: give ascending"),
        (HEADING + "job,1,j,10,1:1 1:2,,,,,\n", "line 2: throughput=1:1 1:2: give each number of workers once"),
        (HEADING + "job,1,j,10,1:1,3,2,,,\n", "line 2: min=3, max=2: give 1 <= min <= max"),
        (HEADING + "job,1,j,10,1:1,1,2,3,,\n", "line 2: requested=3: give a number from min=1 to max=2"),
        (HEADING + "job,1,j,10,1:1,,,,0,\n", "line 2: weight=0: give a number above 0"),
        (HEADING + "job,1,j,10,1:1,,,,,0\n", "line 2: units=0: give 1 or more"),
        ("event,time,name,steps,throughput,join\njob,1,j,10,1:1,-1\n", "line 2: join=-1: give seconds from 0"),
        ("event,time,name,steps,throughput,join\njob,1,j,10,1:1,soon\n", "line 2: join=soon: give a number"),
        (HEADING + "job,1,j,10,1:1,,,,,\n# again\njob,2,j,10,1:1,,,,,\n", "line 4: there are two jobs j; give each"),
        (HEADING + NODE + NODE, "line 3: node n is already there; let it be gone first"),
        (HEADING + "gone,0,n,,,,,,,\n", "line 2: there is no node n then; name one that has joined"),
        (HEADING + "node,0,n,,,,,,,0\n", "line 2: units=0: give 1 or more"),
        (
            EARLY + "1 half,2,,,,\n",
            "line 2: backward=1 half: give fractions above 0, at most 1, such as 1 0.75 0.5 0.25",
        ),
        (EARLY + "1 0,2,,,,\n", "line 2: backward: give fractions above 0, at most 1, such as 1 0.75 0.5 0.25"),
        (EARLY + "1 0.5,1,,,,\n", "line 2: virtual_nodes=1: give one or more for each of 2 workers"),
        (EARLY + ",,,8,,16\n", "line 2: min_batch, max_batch: a bitwise job never changes its batch; give statistical"),
        (EARLY + ",,true,,8,16\n", "line 2: batch=0: give 1 <= min_batch=8 <= batch <= max_batch=16"),
        (EARLY + ",,true,8,16,16\n", "line 2: batch=8: give 1 <= min_batch=16 <= batch <= max_batch=16"),
    ],
)
def test_a_trace_that_makes_no_sense_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence) as refused:
        read(given(tmp_path, text))
    assert str(tmp_path / "trace.csv") in str(refused.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[", "see docs/explanation/simulator.md for the format"),
        ('{"jobs": []}', "Object contains unknown field `jobs`"),
        ('{"events": [{"event": "job", "time": 1, "name": "j", "steps": "many"}]}', r"at `\$.events\[0\].steps`"),
        ('{"events": [{"event": "node", "time": 1, "name": "n", "units": 0}]}', r"events\[0\]: units=0: give 1"),
    ],
)
def test_json_that_makes_no_sense_is_refused(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigurationError, match=sentence):
        read(given(tmp_path, text, "trace.json"))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none.csv: cannot be read \(No such file or directory\)"):
        read(tmp_path / "none.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="it is not text in UTF-8"):
        read(tmp_path / "binary.csv")


def test_a_table_has_a_line_for_each_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = given(tmp_path, HEADING + NODE + "job,0,j,100,1:1 4:4,,,,,\njob,0,k,100,1:1 4:4,,,,,\n")
    arguments = [str(trace), "--policy", "FIFO", "--policy", "WeightedFairShare", "--join", "0", "--pause", "0"]
    assert main([*arguments, "--json", str(tmp_path / "out.json")]) == 0
    about, heading, fifo, shares = capsys.readouterr().out.splitlines()
    assert "2 jobs; a change pauses the job for 0 s, a new worker counts after 0 s" in about
    assert heading.split()[:2] == ["policy", "makespan"]
    assert re.split(r"\s{2,}", fifo)[:3] == ["FIFO", "50 s", "38 s"]
    assert re.split(r"\s{2,}", shares)[:3] == ["WeightedFairShare", "50 s", "50 s"]
    written = json.loads((tmp_path / "out.json").read_text())
    assert list(written) == ["FIFO", "WeightedFairShare"]
    assert written["FIFO"]["mean_queueing"] == 12.5


def test_a_restart_is_a_price_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = given(tmp_path, HEADING + NODE + "job,0,j,100,1:1 4:4,,,,,\n")
    assert main([str(trace), "--policy", "FIFO", "--restart", "--join", "40"]) == 0
    assert "each change restarts the job, which takes 40 s" in capsys.readouterr().out
    with pytest.raises(ConfigurationError, match="leave out --pause"):
        main([str(trace), "--restart", "--pause", "1"])


def test_decisions_can_be_carried_out_in_turn_and_a_baseline_be_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = given(tmp_path, HEADING + NODE + "job,0,j,100,1:1 4:4,,,,,\njob,10,k,100,1:1 4:4,,,,,\n")
    arguments = [str(trace), "--policy", "PowerOfTwoShare", "--join", "0", "--pause", "0"]
    for release, waited in (([], "0 s"), (["--release", "6"], "3 s")):
        assert main([*arguments, *release]) == 0
        about, _, row = capsys.readouterr().out.splitlines()
        assert about.endswith("; decisions in turn, units rest for 6 s") == bool(release)
        assert re.split(r"\s{2,}", row)[5] == waited


def test_waiting_jobs_compute_on_devices_of_others_where_they_may(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = "".join(f"job,0,{name},100,1:1 2:1,2,,,,\n" for name in "ab")
    path = given(tmp_path, HEADING + "node,0,n,,,,,,,2\n" + jobs)
    for packing, found in (([], None), (["--packing", "2"], r"100%\s+1\s+1.00 x$")):
        assert main([str(path), "--policy", "FIFO", *packing, "--json", str(tmp_path / "found.json")]) == 0
        printed = capsys.readouterr().out.strip()
        assert ("lodgers" in printed) == bool(packing)
        assert found is None or re.search(found.replace("100", r"9\d"), printed)
    measured = json.loads((tmp_path / "found.json").read_text())["FIFO"]
    assert (measured["lodgers"], measured["longest_slowdown"]) == (1, 1.0)


def test_a_statistical_job_has_the_batch_that_is_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two workers it exchanges for half of a step, and for a ninth with a batch that is eight times as large."""
    path = given(tmp_path, EARLY.replace("2:1.5", "2:1").replace("j,10,", "j,1000,") + ",,true,8,,64\n")
    for fixed, completion in (([], "562 s"), (["--fixed-batches"], "1,000 s")):
        main([str(path), "--capacity", "2", "--policy", "FIFO", "--join", "0", *fixed])
        assert completion in capsys.readouterr().out


def test_other_capacity_replaces_the_nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = given(tmp_path, HEADING + "job,0,j,100,1:1 4:4,,,,,\n")
    assert main([str(trace), "--policy", "FIFO", "--capacity", "2", "--join", "0"]) == 0
    assert "50 s" in capsys.readouterr().out
    for wrong, sentence in ((["--capacity", "0"], "--capacity 0: give 1 or more"), ([], "or give --capacity")):
        with pytest.raises(ConfigurationError, match=sentence):
            main([str(trace), *wrong])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--policy", "Lottery"], "there is no policy 'Lottery'; give one of FIFO, Priority"),
        (["--join", "-1"], "a resize takes 0 seconds or more"),
        (["--release", "-1"], "units are free after 0 seconds or more, not release=-1"),
        (["--every", "0"], "decide every 0 seconds: give 1 or more"),
        (["--json", "/nowhere/at/all.json"], "--json /nowhere/at/all.json: No such file or directory"),
    ],
)
def test_what_makes_no_sense_is_said_in_a_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    trace = given(tmp_path, HEADING + NODE + "job,0,j,100,1:1 4:4,,,,,\n")
    with pytest.raises(ConfigurationError, match=re.escape(sentence)):
        main([str(trace), *arguments])


def test_a_job_that_never_ends_is_named_and_the_exit_code_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = given(tmp_path, HEADING + NODE + "job,0,j,10,1:1,,,,,\njob,0,big,10,8:1,5,,,,\n")
    assert main([str(trace), "--policy", "WeightedFairShare"]) == launcher.EXIT_FAILED
    assert "WeightedFairShare: big never ended: cannot run: its minimum of 5 workers" in capsys.readouterr().out


@pytest.mark.slow
def test_pictures_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: install the extra plots")
    trace = given(tmp_path, GOOD)
    assert main([str(trace), "--plots", str(tmp_path / "new" / "plots")]) == 0
    for name in ("allocation.png", "completion.png"):
        assert (tmp_path / "new" / "plots" / name).read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_table_is_there_and_a_sentence_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    told = "the plots need matplotlib, not installed here; run: pip install 'virtualflow[plots]'"
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        main([str(given(tmp_path, GOOD)), "--plots", str(tmp_path)])
    assert "WeightedFairShare" in capsys.readouterr().out


def test_the_traces_of_the_document_are_read(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "explanation" / "simulator.md").read_text()
    (example,) = re.findall(r"^```csv\n(.*?)^```$", document, flags=re.MULTILINE | re.DOTALL)
    assert [job.name for job in read(given(tmp_path, example)).jobs] == ["bert", "resnet"]
    (shape,) = re.findall(r"`(\{\"events\".*?)`", document, flags=re.DOTALL)
    text = shape.replace(", ...", "")
    assert [job.name for job in read(given(tmp_path, text, "trace.json")).jobs] == ["bert"]


def test_every_option_is_in_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    options = set(re.findall(r"^  (--[a-z]+)", capsys.readouterr().out, flags=re.MULTILINE))
    document = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert "--policy" in options
    assert {option for option in options if f"`{option}" not in document} == set()


# --- how the command line finds it ------------------------------------------------------------------------------------


def entries() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = project["entry-points"][cli.COMMANDS]
    return found


def install(monkeypatch: pytest.MonkeyPatch, commands: dict[str, str]) -> None:
    """Have an installation with these commands, whatever this one was made from."""

    def entry_points(group: str, name: str) -> list[importlib.metadata.EntryPoint]:
        assert group == cli.COMMANDS
        return [importlib.metadata.EntryPoint(name, commands[name], group)] if name in commands else []

    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points)


def test_the_project_declares_every_command_that_the_library_names() -> None:
    assert set(entries()) == set(EXTERNAL)


def test_virtualflow_simulate_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, entries())
    assert cli.main(["simulate", str(given(tmp_path, GOOD)), "--policy", "FIFO"]) == 0
    assert "FIFO" in capsys.readouterr().out
    assert cli.main(["simulate", "none.csv"]) == launcher.EXIT_USAGE
    assert "virtualflow: none.csv: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "commands", [{}, {"simulate": "virtualflow_absent.simulator:main"}], ids=["not declared", "not there"]
)
def test_without_the_operators_part_a_sentence_says_what_to_install(
    commands: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, commands)
    assert cli.main(["simulate", "trace.csv"]) == launcher.EXIT_USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "virtualflow simulate is in a part of the project" in line
    assert "install the whole project with pip" in line


def test_it_needs_nothing_that_talks_to_a_cluster_nor_torch() -> None:
    """As in the trainer's image, where the operator's requirements are not installed."""
    absent = ("kopf", "kubernetes", "prometheus_client", "torch", "numpy", "matplotlib")
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({absent!r}))\n"
        "from virtualflow_operator.simulator.command import main\n"
        f"sys.exit(main(['{ROOT / 'benchmarks' / 'traces' / 'paper-3.csv'}']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "MaxThroughput" in done.stdout


def test_how_far_it_is_goes_from_nothing_to_all_over_all_policies_and_changes_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(given(tmp_path, GOOD)), "--policy", "FIFO", "--policy", "WeightedFairShare"]
    main(arguments)
    plain = capsys.readouterr()
    monkeypatch.setattr(progress_seen, "SEEN", [])
    monkeypatch.setattr(command, "ProgressBar", progress_seen.Seen)
    main(arguments)
    assert capsys.readouterr() == plain
    (seen,) = progress_seen.SEEN
    assert (seen.what, seen.total) == ("simulating", 2 * 2)
    assert seen.reached == sorted(seen.reached)
    assert {1.0, 2.0, 3.0, 4.0} <= set(seen.reached) <= {0.0, 1.0, 2.0, 3.0, 4.0}
