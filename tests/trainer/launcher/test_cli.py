"""The command line with real processes: what it says, how it ends, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from programs import Program

TRAINING = """\
import sys, time
import torch
import torch.nn.functional as F
import virtualflow as vf

steps, pace, fail_at = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
torch.manual_seed(0)
inputs = torch.randn(96, 4)
dataset = torch.utils.data.TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
print("model built")
with vf.elastic(model, optimizer, dataset, batch_size=16, steps=steps) as run:
    for step in run:
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.log(loss=loss)
        if step.number == fail_at:
            raise RuntimeError("the data ran sour")
        time.sleep(pace)
print("all trained")
"""

OTHER_THREADS = """\
import os
worker = os.environ["VIRTUALFLOW_WORKER"]
with open({started!r}, "a") as file:
    file.write(worker + " ")
os.environ["VIRTUALFLOW_THREADS"] = "1" if worker == "worker-0" else "2"
"""
"""The beginning of a script whose workers do not fit together."""

EXITS_WITH_75 = """\
import os, sys
if os.environ["VIRTUALFLOW_WORKER"] == "worker-1":
    with open({started!r}, "a") as file:
        file.write("worker-1 ")
    sys.exit(75)
"""
"""The beginning of a script of which one worker always ends as if it had been refused."""

WAITS_IN_STEP_5 = """
            if step.number == 5 and os.environ["VIRTUALFLOW_WORKER"] == "worker-1":
                with open({there!r}, "w") as file:
                    file.write(str(os.getpid()) + "\\n")
                time.sleep(600)
"""
"""Lines of the inner loop in which one worker stays."""

SLEEPING = "import time\nprint('asleep')\ntime.sleep(120)\n"


@dataclass
class CommandLine:
    """Runs ``virtualflow`` in a place of its own."""

    home: Path
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def script(self, name: str, text: str) -> str:
        path = self.home / name
        path.write_text(text)
        return str(path)

    def start(self, *arguments: str, interpreter: bool = False) -> subprocess.Popen[str]:
        """Start it as a fork that has imported torch, or in an interpreter of its own, whose workers bear names."""
        runtime, temporary = self.home / "runtime", self.home / "tmp"
        runtime.mkdir(exist_ok=True)
        temporary.mkdir(exist_ok=True)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("VIRTUALFLOW_")}
        trainer = str(Path(__file__).parents[3] / "trainer")
        start: Any = partial(subprocess.Popen, text=True) if interpreter else Program
        process: subprocess.Popen[str] = start(
            [sys.executable, "-m", "virtualflow", *arguments],
            cwd=self.home,
            env={
                **inherited,
                "XDG_RUNTIME_DIR": str(runtime),
                "TMPDIR": str(temporary),
                "PYTHONPATH": trainer,
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.running.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def leftovers(self) -> list[str]:
        """Files in the places for passing ones."""
        places = (self.home / "tmp", self.home / "runtime" / "virtualflow")
        found = [path.name for place in places if place.exists() for path in place.iterdir()]
        return sorted(name for name in found if not name.startswith("torchinductor"))  # torch makes it on import


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[CommandLine]:
    command_line = CommandLine(tmp_path)
    yield command_line
    for process in command_line.running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_until(what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:g} s for: {what}"
        time.sleep(0.02)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """All processes that it has started."""
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def sleepers(process: subprocess.Popen[str], script: str) -> list[psutil.Process]:
    """The workers of a job; a process that is only just being started still has its parent's command line."""
    found = []
    for child in family(process):
        try:
            command = child.cmdline()
            if script in command and "virtualflow" not in command:
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        pytest.param(["run"], "say what to run", id="nothing to run"),
        pytest.param(["run", "missing.py"], "there is no script missing.py", id="no such script"),
        pytest.param(["run", "."], "is a directory", id="the script is a directory"),
        pytest.param(["run", "--workers", "0", "a.py"], "at least one worker", id="no workers"),
        pytest.param(["run", "--workers", "two", "a.py"], "invalid int value", id="workers are no number"),
        pytest.param(["run", "--virtual-nodes", "0", "a.py"], "at least one virtual node", id="no virtual nodes"),
        pytest.param(
            ["run", "--workers", "9", "--virtual-nodes", "8", "a.py"], "cannot share 8", id="too many workers"
        ),
        pytest.param(
            ["run", "--workers", "3", "--processes-per-worker", "3", "--virtual-nodes", "8", "a.py"],
            "3 workers of 3 processes cannot share 8",
            id="too many processes",
        ),
        pytest.param(["processes", "2", "--"], "say what to run", id="processes of nothing"),
        pytest.param(
            ["run", "--virtual-nodes", "4", "--schedule", "5:=5", "a.py"], "cannot share 4", id="too many later on"
        ),
        pytest.param(["run", "--schedule", "5:dance", "a.py"], "no action 'dance'", id="an unknown action"),
        pytest.param(["run", "--report", "no/where/r.json", "a.py"], "cannot be written", id="no place for a report"),
        pytest.param(["run", "--audit", ".", "a.py"], "is a directory", id="the audit is a directory"),
        pytest.param(["run", "--checkpoint-dir", "a.py/x", "a.py"], "no files can be", id="no place for checkpoints"),
        pytest.param(["run", "--heartbeat-limit", "0", "a.py"], "must be between", id="no patience at all"),
        pytest.param(["run", "--hang-seconds", "0.1", "a.py"], "must be between", id="no patience with slow ones"),
        pytest.param(["run", "--port", "70000", "a.py"], "a port is between", id="no such port"),
        pytest.param(["run", "--name", "../etc", "a.py"], "cannot be called", id="a name that is a path"),
        pytest.param(["run", "-f", "missing.yaml"], "cannot read the manifest", id="no such manifest"),
        pytest.param(["run", "-f", "a.py"], "a.py", id="a manifest that is none"),
        pytest.param(
            ["run", "--frobnicate", "a.py"],
            "there is no option --frobnicate; see virtualflow run --help",
            id="an unknown option",
        ),
        pytest.param(["dance"], "there is no command dance; see virtualflow --help", id="an unknown command"),
        pytest.param(["status"], "no job is running", id="no job to ask"),
        pytest.param(["scale", "0"], "between 1 and", id="scale to nothing"),
        pytest.param(["coordinator", "--host", "127.0.0.1", "--port", "0"], "VIRTUALFLOW_TOKEN", id="no token"),
    ],
)
def test_bad_input_gets_one_line_and_starts_nothing(command_line: CommandLine, arguments: list[str], said: str) -> None:
    command_line.script("a.py", "open('started', 'w')\n")
    code, out, err = command_line.run(*arguments)
    assert code == 2
    assert said in err
    assert err.startswith("virtualflow: ")
    assert err.count("\n") == 1
    assert not out
    assert not (command_line.home / "started").exists()
    assert command_line.leftovers() == []


def test_the_command_line_imports_neither_torch_nor_the_network_before_it_must(command_line: CommandLine) -> None:
    unwanted = ("torch", "aiohttp", "rich", "numpy")
    code = f"import sys, virtualflow.launcher.cli; print([m for m in {unwanted} if m in sys.modules])"
    trainer = str(Path(__file__).parents[3] / "trainer")
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": trainer},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "[]"


def test_a_taken_port_is_one_line(command_line: CommandLine) -> None:
    script = command_line.script("a.py", "open('started', 'w')\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = command_line.run("run", "--port", str(port), script)
    assert code == 1
    assert err.count("\n") == 1
    assert f"port {port}" in err
    assert not (command_line.home / "started").exists()
    assert command_line.leftovers() == []


@pytest.mark.parametrize(
    ("text", "last_line"),
    [
        pytest.param("import no_such_module\n", "ModuleNotFoundError: No module named 'no_such_module'", id="import"),
        pytest.param("x = (\n", "SyntaxError: '(' was never closed", id="syntax"),
    ],
)
def test_a_script_that_cannot_be_imported_shows_its_traceback_once(
    command_line: CommandLine, text: str, last_line: str
) -> None:
    script = command_line.script("broken.py", text)
    code, _, err = command_line.run("run", "--workers", "3", "--log-dir", "logs", script)
    assert code == 1
    *above, conclusion = err.splitlines()
    assert above.count(last_line) == 1
    assert conclusion.startswith("virtualflow: the job failed: worker-")
    assert f" ended before it could join: {last_line} (" in conclusion
    assert command_line.leftovers() == []


def test_a_script_that_never_trains_is_told_so(command_line: CommandLine) -> None:
    script = command_line.script("idle.py", "print('hello')\n")
    code, out, err = command_line.run("run", "--log-dir", "logs", script)
    assert code == 1
    assert out == "hello\n"
    assert "must iterate over vf.elastic" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_worker_that_always_crashes_is_not_replaced_for_ever(command_line: CommandLine) -> None:
    script = command_line.script("crash.py", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    code, _, err = command_line.run("run", "--workers", "1", "--log-dir", "logs", script)
    assert code == 1
    assert "7 times in a row" in err
    assert "SIGSEGV" in err.splitlines()[-1]


@pytest.mark.slow
def test_a_worker_that_always_exits_with_75_is_not_replaced_for_ever_while_others_train(
    command_line: CommandLine,
) -> None:
    started = command_line.home / "started"
    script = command_line.script("train.py", EXITS_WITH_75.format(started=str(started)) + TRAINING)
    process = command_line.start("run", "--workers", "1", "--name", "flaky", script, "1000000", "0.001", "0")

    def status() -> dict[str, Any]:
        code, out, _ = command_line.run("status", "flaky", "--json")
        return dict(json.loads(out)) if code == 0 else {"step": 0, "wanted": 0}

    wait_until("the training", lambda: status()["step"] > 0)
    assert command_line.run("scale", "2", "--job", "flaky")[0] == 0
    wait_until("the job to do without it", lambda: status()["wanted"] == 1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert started.read_text().split() == ["worker-1"] * 7
    assert "worker-1 ended 7 times in a row without taking part in a step, at last by exit code 75" in err
    assert "once the reason is mended, run: virtualflow scale 2 --job flaky" in err


@pytest.mark.slow
@pytest.mark.parametrize("where", ["start", "training"])
def test_a_worker_that_would_be_refused_again_is_done_without(command_line: CommandLine, where: str) -> None:
    started = command_line.home / "started"
    script = command_line.script("train.py", OTHER_THREADS.format(started=str(started)) + TRAINING)
    schedule = ["--schedule", "3:=2"] if where == "training" else []
    workers = "1" if schedule else "2"
    options = ["--workers", workers, *schedule, "--name", "uneven", "--report", "report.json"]
    code, _, err = command_line.run("run", *options, script, "12", "0.02", "0")
    assert code == 0, err
    assert sorted(started.read_text().split()) == ["worker-0", "worker-1"]
    assert err.count(" refused: ") == 1
    assert "use one image, one VIRTUALFLOW_THREADS and one PYTHONHASHSEED for all workers" in err
    refused = json.loads((command_line.home / "report.json").read_text())["pids"]
    [other] = [
        name for name in refused if f"{name} would be refused again: not started any more, 1 worker wanted" in err
    ]
    assert other == "worker-1" or where == "start"
    assert "once the reason is mended, run: virtualflow scale 2 --job uneven" in err
    assert command_line.leftovers() == []


def test_where_all_are_refused_the_job_fails_with_the_reason(command_line: CommandLine) -> None:
    script = command_line.script(
        "train.py",
        "from virtualflow.protocol import versions\nversions.PROTOCOL = versions.OLDEST_PROTOCOL = 1\n" + TRAINING,
    )
    code, _, err = command_line.run("run", "--workers", "2", "--log-dir", "logs", script, "12", "0.02", "0")
    assert code == 1
    said = err.splitlines()[-1]
    assert said.startswith("virtualflow: the job failed: worker-")
    assert " speaks protocol 1 (virtualflow " in said
    assert " a newer virtualflow, or the coordinator an older one (" in said


def test_nothing_outlives_a_runner_that_is_killed(command_line: CommandLine) -> None:
    script = command_line.script("sleep.py", SLEEPING)
    process = command_line.start("run", "--workers", "2", "--name", "doomed", script, interpreter=True)
    wait_until("both workers", lambda: len(sleepers(process, script)) == 2)
    children = family(process)
    assert len(children) == 3
    process.kill()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    code, _, err = command_line.run("status")
    assert (code, "no job is running" in err) == (2, True)


@pytest.mark.slow
def test_a_running_job_is_found_scaled_and_stopped(command_line: CommandLine) -> None:
    script = command_line.script("sleep.py", SLEEPING)
    process = command_line.start("run", "--workers", "1", "--name", "nap", script, interpreter=True)
    wait_until("the worker", lambda: len(sleepers(process, script)) == 1)
    files = (command_line.home / "runtime" / "virtualflow").rglob("*")
    modes = {path.name: path.stat().st_mode & 0o777 for path in files}
    private = dict.fromkeys(("nap.json", "identity.pem", "authorities.pem", "page-token"), 0o600)
    assert modes == private | dict.fromkeys(("nap.identity", "control", "coordinator", "worker-0.0"), 0o700)
    told = [child.environ() for child in family(process)]
    assert len([each for each in told if "VIRTUALFLOW_IDENTITY" in each]) >= 2, "the coordinator and the worker"
    hidden = json.loads((command_line.home / "runtime" / "virtualflow" / "nap.json").read_text())["token"]
    assert not [each for each in told if "VIRTUALFLOW_TOKEN" in each or hidden in each.values()]

    code, out, _ = command_line.run("status", "nap", "--json")
    assert code == 0
    assert (json.loads(out)["phase"], json.loads(out)["wanted"]) == ("waiting", 1)
    code, _, err = command_line.run("run", "--name", "nap", script)
    assert (code, "running already" in err) == (2, True)
    code, _, err = command_line.run("drain", "worker-7")
    assert (code, "worker-7" in err, err.count("\n")) == (1, True, 1)
    code, _, err = command_line.run("status", "other")
    assert (code, "running: nap" in err) == (2, True)

    code, out, _ = command_line.run("scale", "2")
    assert (code, out) == (0, "nap: 2 workers wanted\n")
    wait_until("the second worker", lambda: len(sleepers(process, script)) == 2)
    victim = sleepers(process, script)[0]
    victim.kill()
    wait_until("a replacement", lambda: len(set(sleepers(process, script)) - {victim}) == 2)

    children = family(process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    assert command_line.leftovers() == []


@pytest.mark.slow
def test_a_run_with_a_page_says_where_it_is_and_the_page_may_only_look(command_line: CommandLine) -> None:
    script = command_line.script("sleep.py", SLEEPING)
    process = command_line.start("run", "--web", "--workers", "1", "--name", "nap", script, interpreter=True)
    assert process.stderr is not None
    address = next(line for line in process.stderr if line.startswith("live page: "))
    page, _, fragment = address.removeprefix("live page: ").strip().partition("#")
    token, job = (value for _, value in urllib.parse.parse_qsl(fragment))
    assert job == "nap"
    with urllib.request.urlopen(page, timeout=30) as answer:
        assert "text/html" in answer.headers["Content-Type"]
    said = {"Authorization": f"Bearer {token}"}
    view = urllib.request.Request(page.replace("/ui", "/v1/view"), headers=said)
    with urllib.request.urlopen(view, timeout=30) as answer:
        assert json.load(answer)["now"]["phase"] == "waiting"
    stop = urllib.request.Request(page.replace("/ui", "/v1/stop"), headers=said, data=b"{}")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(stop, timeout=30)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert command_line.leftovers() == []


def _options(pace: float = 0.0, steps: int = 12, fail_at: int = 0) -> list[str]:
    return [str(steps), str(pace), str(fail_at)]


@pytest.mark.slow
def test_a_run_leaves_a_report_and_an_audit_and_prints_once(command_line: CommandLine) -> None:
    script = command_line.script("train.py", TRAINING)
    code, out, err = command_line.run("run", "--workers", "1", "--report", "one.json", script, *_options())
    assert code == 0, err
    schedule = ["--schedule", "3:=3,6:kill"]
    files = ["--report", "two.json", "--audit", "audit.jsonl"]
    code, out, err = command_line.run("run", "--workers", "2", *schedule, *files, script, *_options())
    assert code == 0, err
    assert out == "model built\nall trained\n"
    one = json.loads((command_line.home / "one.json").read_text())
    two = json.loads((command_line.home / "two.json").read_text())
    assert one["digest"] == two["digest"]
    assert one["optimizer_digest"] == two["optimizer_digest"]
    assert one["changes"] == []
    # The kill may come before the joiner has made a step: then both are one change, by its graver cause.
    causes = [change["cause"] for change in two["changes"]]
    assert "lost" in causes
    assert set(causes) <= {"join", "lost"}
    assert two["steps"] == 12
    assert two["digest"] in err.splitlines()[-1]
    rows = [json.loads(line) for line in (command_line.home / "audit.jsonl").read_text().splitlines()]
    assert [(row["step"], row["virtual_node"]) for row in rows] == [(s, v) for s in range(1, 13) for v in range(8)]
    for epoch in (0, 1):
        samples = [sample for row in rows if row["epoch"] == epoch for sample in row["samples"]]
        assert sorted(samples) == list(range(96))
    assert command_line.leftovers() == []


def test_an_exception_in_a_step_fails_the_job_with_one_traceback(command_line: CommandLine) -> None:
    script = command_line.script("train.py", TRAINING)
    code, _, err = command_line.run("run", "--workers", "2", "--log-dir", "logs", script, *_options(fail_at=3))
    assert code == 1
    assert err.count("Traceback (most recent call last)") == 1
    assert err.count('raise RuntimeError("the data ran sour")') == 1
    lines = err.splitlines()
    reason = "virtualflow: the job failed: RuntimeError: the data ran sour"
    (told,) = [number for number, line in enumerate(lines) if line.startswith(reason)]
    # What is left is said of steps that the coordinator has heard of, and a job that fails so early may be quicker.
    left = "virtualflow: without --checkpoint-dir no checkpoint was written: the next run starts from step 1"
    assert lines[told + 1 :] in ([], [left])
    assert command_line.leftovers() == []


@pytest.mark.slow
def test_a_worker_that_dies_while_the_job_is_being_stopped_takes_nothing_with_it(command_line: CommandLine) -> None:
    there = command_line.home / "there"
    inner = "        for x, y in step:\n"
    text = TRAINING.replace(inner, inner.rstrip("\n") + WAITS_IN_STEP_5.format(there=str(there)))
    script = command_line.script("train.py", "import os\n" + text)
    options = ["--workers", "2", "--checkpoint-dir", "checkpoints"]
    process = command_line.start("run", *options, script, *_options(steps=60))
    wait_until("a worker to stay in a step", lambda: there.exists() and there.read_text().endswith("\n"))
    process.send_signal(signal.SIGINT)
    os.kill(int(there.read_text()), signal.SIGKILL)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    # The survivor is no majority: it goes on because the end of the other one is confirmed.
    assert "resumes" in err.splitlines()[-1], err
    assert list((command_line.home / "checkpoints").glob("step-*")), err


@pytest.mark.slow
def test_an_interrupted_run_goes_on_where_it_was_stopped(command_line: CommandLine) -> None:
    script = command_line.script("train.py", TRAINING)
    code, _, err = command_line.run("run", "--workers", "1", "--report", "one.json", script, *_options(steps=60))
    assert code == 0, err
    again = ["--workers", "2", "--checkpoint-dir", "checkpoints", script]
    process = command_line.start("run", "--name", "paused", *again, *_options(pace=0.5, steps=60))

    def step() -> int:
        code, out, _ = command_line.run("status", "paused", "--json")
        return int(json.loads(out)["step"]) if code == 0 else 0

    wait_until("some steps", lambda: step() >= 3)
    children = family(process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped after step" in err.splitlines()[-1]
    assert "resumes" in err.splitlines()[-1]
    _, alive = psutil.wait_procs(children, timeout=30)
    assert alive == []
    code, _, err = command_line.run("run", "--report", "two.json", *again, *_options(steps=60))
    assert code == 0, err
    assert "resumed from the checkpoint" in err
    one, two = (json.loads((command_line.home / name).read_text()) for name in ("one.json", "two.json"))
    assert one["digest"] == two["digest"]
    assert command_line.leftovers() == []
