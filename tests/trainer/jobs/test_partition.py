"""Two workers, two coordinators and a network that parts them: at most one half goes on, and to the same bits.

Each half is a network namespace with a coordinator of its own under one address, as when a cluster replaces a
coordinator that it does not reach any more.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from namespaces import INSIDE, can_part_networks, enter, ip

import programs
from virtualflow.protocol.messages import NO_GENERATION
from virtualflow.state.checkpoint_order import Mark, complete

ROOT = Path(__file__).parents[3]
SERVICE, PORT = "10.77.0.9", 7000
HOSTS = ("10.77.0.1", "10.77.0.2")
STEPS = 200
SCRIPT = """
import sys, time
import torch, virtualflow as vf
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
optimizer = torch.optim.Adam(model.parameters())
with vf.elastic(model, optimizer, data, batch_size=16, steps=STEPS, virtual_nodes=4) as run:
    for step in run:
        for x, y in step:
            torch.nn.functional.mse_loss(model(x), y).backward()
        time.sleep(PAUSE)
        if run.leader:
            print("led", *run.fence, step.number, flush=True)
"""


def call(path: str, body: str) -> dict[str, Any]:
    """What the coordinator answers that this thread reaches; empty while none does."""
    connection = http.client.HTTPConnection(SERVICE, PORT, timeout=5)
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    try:
        connection.request("POST" if body else "GET", f"/v1/{path}", body or None, headers)
        answer = connection.getresponse()
        text = answer.read()
    except (OSError, http.client.HTTPException):
        return {}
    finally:
        connection.close()
    return json.loads(text) if answer.status == 200 else {}


@dataclass
class Islands:
    """Two hosts that can be parted; ``SERVICE`` leads to the coordinator of the first, or to each one's own."""

    tmp_path: Path
    names: tuple[str, str] = (f"vf-a-{os.getpid()}", f"vf-b-{os.getpid()}")
    processes: list[programs.Program] = field(default_factory=list)
    insiders: list[ThreadPoolExecutor] = field(default_factory=list)
    """For each island a thread that lives in it."""

    def make(self) -> None:
        links = ("vfa", "vfb")
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", "vfa", "netns", self.names[0], "type", "veth", "peer", "name", "vfb", "netns", self.names[1])
        for name, link, host in zip(self.names, links, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{host}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")
        ip("-n", self.names[0], "addr", "add", f"{SERVICE}/32", "dev", "lo")
        self.insiders += [ThreadPoolExecutor(1, initializer=enter, initargs=(name,)) for name in self.names]

    def part(self) -> None:
        ip("-n", self.names[1], "link", "set", "vfb", "down")
        ip("-n", self.names[1], "addr", "add", f"{SERVICE}/32", "dev", "lo")

    def heal(self) -> None:
        ip("-n", self.names[1], "addr", "del", f"{SERVICE}/32", "dev", "lo")
        ip("-n", self.names[1], "link", "set", "vfb", "up")

    def start(self, island: int, *command: str, **environment: str) -> programs.Program:
        log = (self.tmp_path / f"log-{len(self.processes)}").open("wb")
        variables = {**os.environ, "PYTHONPATH": str(ROOT / "trainer"), "VIRTUALFLOW_TOKEN": "secret", **environment}
        process = programs.Program(
            [sys.executable, "-c", INSIDE, f"/run/netns/{self.names[island]}", *command],
            env=variables,
            stdout=log,
            stderr=log,
        )
        self.processes.append(process)
        return process

    def coordinator(self, island: int, **environment: str) -> programs.Program:
        words = ("--host", SERVICE, "--port", str(PORT), "--wanted", "2", "--minimum", "2", "--heartbeat-limit", "1")
        return self.start(island, "-m", "virtualflow", "coordinator", *words, **environment)

    def worker(self, island: int, script: Path, name: str = "") -> programs.Program:
        return self.start(
            island,
            str(script),
            VIRTUALFLOW_COORDINATOR=f"http://{SERVICE}:{PORT}",
            VIRTUALFLOW_WORKER=name or f"worker-{island}",
            VIRTUALFLOW_ADDRESS=HOSTS[island],
            VIRTUALFLOW_VIRTUAL_NODES="4",
            VIRTUALFLOW_CHECKPOINT_DIR=str(self.checkpoints),
            VIRTUALFLOW_CHECKPOINT_STEPS="3",
            VIRTUALFLOW_CHECKPOINT_KEEP="2",
        )

    @property
    def checkpoints(self) -> Path:
        """Where the workers of both halves write: what they share is not parted."""
        return self.tmp_path / "checkpoints"

    def ask(self, island: int, path: str, body: str = "") -> dict[str, Any]:
        """What the coordinator that this island reaches answers; empty while none does."""
        return self.insiders[island].submit(call, path, body).result()

    def status(self, island: int) -> dict[str, Any]:
        """What the coordinator that this island reaches tells, which runs."""
        found: list[dict[str, Any]] = []
        until("a coordinator answers", lambda: found.append(self.ask(island, "status")) or found[-1])
        return found[-1]

    def say_who_may_train(self, island: int, *others: str) -> None:
        """The word of whoever runs the workers, to the coordinator of an island."""
        ticket = self.status(island)["startTicket"]
        self.ask(island, "begin", json.dumps({"ticket": ticket, "others": [{"worker": name} for name in others]}))

    def close(self) -> None:
        for insider in self.insiders:
            insider.shutdown()
        for process in self.processes:
            process.kill()
            process.wait()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.fixture
def islands(tmp_path: Path) -> Iterator[Islands]:
    if not can_part_networks():
        pytest.skip("needs root and iproute2: it parts network namespaces")
    made = Islands(tmp_path)
    try:
        made.make()
        yield made
    finally:
        made.close()


def until(what: str, check: Callable[[], object], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, int(os.environ.get("RUNS", "3"))))]
)
def test_two_halves_with_a_coordinator_each_never_both_go_on(islands: Islands, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("STEPS", str(STEPS)).replace("PAUSE", "0.02"))
    former = islands.coordinator(0)
    workers = [islands.worker(island, script) for island in range(2)]
    moment = chance.randint(5, 60)
    until("both train", lambda: islands.ask(0, "status").get("step", 0) >= moment)
    time.sleep(chance.uniform(0.0, 0.1))  # anywhere in a step
    islands.part()
    islands.coordinator(1)
    for island in range(2):
        until(
            f"half {island} waits",
            lambda island=island: "no majority" in islands.ask(island, "status").get("reason", ""),
        )
    steps = [islands.status(island)["step"] for island in range(2)]
    until("no checkpoint is being written", lambda: not list(islands.checkpoints.glob(".step-*")))
    before = complete(islands.checkpoints)

    # Whoever runs the workers decides which half goes on. The other one is alive all the while, and makes no step.
    kept = chance.randrange(2)
    gone = 1 - kept
    lost = next(one for one in islands.status(kept)["lost"] if one["worker"] == f"worker-{gone}")
    word = json.dumps({"worker": lost["worker"], "incarnation": lost["incarnation"], "reason": "cut off"})
    islands.ask(kept, "gone", word)
    until("the training is complete", lambda: islands.ask(kept, "status").get("phase") == "done", 120)
    left_out = islands.status(gone)
    assert (left_out["step"], left_out["phase"]) == (steps[gone], "training")
    assert "no majority" in left_out["reason"]
    assert workers[gone].poll() is None
    status = islands.status(kept)
    assert (status["step"], status["repeatedSteps"] <= 1) == (STEPS, True)
    assert status["digest"] == undisturbed(script, tmp_path)
    assert former.poll() is None
    assert_one_lineage(before, complete(islands.checkpoints), [f"log-{n}" for n in range(3)], tmp_path)


@pytest.mark.nightly  # test_one_lineage has the same in a model of the network
def test_fresh_workers_with_a_new_coordinator_begin_nothing_beside_those_who_are_cut_off(
    islands: Islands, tmp_path: Path
) -> None:
    """The old coordinator and all of its workers are on one side, and train on; nobody on the other has seen them."""
    scripts = {pause: tmp_path / f"train-{pause}.py" for pause in ("0.2", "0.02")}
    for pause, path in scripts.items():
        path.write_text(SCRIPT.replace("STEPS", str(STEPS)).replace("PAUSE", pause))
    old = [islands.coordinator(0, VIRTUALFLOW_CONFIRMED_START="1")]
    old += [islands.worker(0, scripts["0.2"], f"old-{n}") for n in range(2)]
    until("the coordinator listens", lambda: islands.ask(0, "status"))
    islands.say_who_may_train(0)
    until("both train", lambda: islands.ask(0, "status").get("step", 0) >= 5)
    assert "startTicket" not in {key for key, value in islands.ask(0, "status").items() if value is not None}
    islands.part()
    islands.coordinator(1, VIRTUALFLOW_CONFIRMED_START="1")
    fresh = [islands.worker(1, scripts["0.02"], f"fresh-{n}") for n in range(2)]
    until("the other coordinator listens", lambda: islands.ask(1, "status"))
    until("it would begin", lambda: "waiting for the word" in islands.ask(1, "status").get("reason", ""))
    islands.say_who_may_train(1, "old-0", "old-1", "fresh-0", "fresh-1")
    until("it says for whom it waits", lambda: "old-0, old-1 may train" in islands.ask(1, "status").get("reason", ""))
    step = islands.status(0)["step"]
    until("the old ones train on", lambda: islands.status(0)["step"] > step + 5)
    waiting = islands.status(1)
    assert (waiting["phase"], waiting["step"], waiting["generation"]) == ("waiting", 0, 0)

    # They end, and whoever runs them says so: the others go on from their checkpoint.
    for process in old:
        process.kill()
        process.wait()
    islands.say_who_may_train(1, "fresh-0", "fresh-1")
    until("the training is complete", lambda: islands.ask(1, "status").get("phase") == "done", 120)
    status = islands.status(1)
    assert status["digest"] == undisturbed(scripts["0.02"], tmp_path)
    assert any(event["kind"] == "restored" for event in status["events"])
    assert [process.wait(30) for process in fresh] == [0, 0]


def assert_one_lineage(
    before: list[tuple[Mark, Path]], after: list[tuple[Mark, Path]], logs: list[str], at: Path
) -> None:
    """The half that was left out has written nothing since, removed nothing, and led no step that the other led."""
    found, common = [mark for mark, _ in after], max((mark.fence for mark, _ in before), default=NO_GENERATION)
    assert found[0].step == STEPS
    assert found[0].fence > common
    assert len(found) <= 2 + 2, "as many as are kept, and two more while a state may turn out to be wrong"
    assert {mark for mark in found if mark.fence == common} <= {mark for mark, _ in before}
    led: dict[int, set[tuple[int, int]]] = {}
    for name in logs:
        for line in (at / name).read_text().splitlines():
            if line.startswith("led "):
                incarnation, counter, step = (int(word) for word in line.split()[1:])
                led.setdefault(step, set()).add((incarnation, counter))
    # The step in which the network was parted: one half may have it and the other not, so it is led once, twice (by the
    # leader before and by the one after, who repeats it) or not at all (the other half had it, and was not the leader).
    assert len(led) >= STEPS - 1
    assert sum(len(fences) for fences in led.values()) <= STEPS + 1


def undisturbed(script: Path, tmp_path: Path) -> str:
    """The digest of a run of one worker that nothing happens to."""
    report = tmp_path / "report.json"
    words = ("run", "--plain", "--virtual-nodes", "4", "--report", str(report), str(script))
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "trainer")}
    done = programs.run([sys.executable, "-m", "virtualflow", *words], env=environment, timeout=90)
    assert done.returncode == 0, done.stderr
    digest: str = json.loads(report.read_text())["digest"]
    return digest
