"""Operators that are killed, replaced, cut off and frozen: the same outcome, nothing twice, one leader at a time."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from fake_api import Fault
from running import COMMAND, OperatorProcess, Wire, write_kubeconfig
from stage import NAMESPACE, TOKEN, WRITES, Stage, play

from operator_metrics import scrape
from ports import free_port
from tiers import slow
from virtualflow_operator.constants import COORDINATOR, WORKER
from virtualflow_operator.k8s.client import JOBS, LEASES, PODS


@dataclass
class KilledAt(Fault):
    """No fault of the API server: the operator is killed when its n-th write about a job has arrived, unanswered."""

    number: int = 1
    job: str = ""
    process: OperatorProcess | None = None
    done: bool = False

    def strikes(self, method: str, verb: str, resource: str, namespace: str | None, name: str | None) -> bool:
        ours = name is not None and f"{name}-".startswith((f"{self.job}-", f"{self.job}."))
        if verb in WRITES and ours:
            self.hits += 1
            if self.hits == self.number and self.process is not None:
                self.done = True
                self.process.kill()
        return False


async def kill_at_every_write(
    stage: Stage,
    begin: Callable[[str], object],
    ended: Callable[[str], bool],
    prepare: Callable[[str], object] | None = None,
    prepared: Callable[[str], bool] = lambda _: True,
) -> int:
    """Begin something with a job after another, and kill the operator one write later each time; how many writes.

    Args:
        stage: the cluster.
        begin: what the user does with the job of that name.
        ended: how it ends.
        prepare: what is done with the job before.
        prepared: how that ends.
    """
    process = stage.start()
    await stage.watching()
    for number in range(1, 60):
        name = f"job-{number}"
        if prepare is not None:
            prepare(name)
            await stage.until(lambda name=name: prepared(name))
            await asyncio.sleep(0.3)  # for what is still written about that
        fault = KilledAt(number=number, process=process, job=name)
        stage.server.inject(fault)
        begin(name)
        await stage.until(lambda fault=fault, name=name: fault.done or ended(name))
        if not fault.done:
            for former in range(1, number):
                await stage.until(lambda former=former: stage.nothing_left(f"job-{former}"))
            return number
        stage.server.heal()
        process = await stage.replace(process)
        await stage.until(lambda name=name: ended(name))
        stage.delete(name)
    raise AssertionError("it never comes to an end")


@pytest.mark.nightly
def test_an_operator_killed_at_any_write_of_a_jobs_creation_leaves_work_that_another_ends(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        writes = await kill_at_every_write(stage, stage.apply, stage.trains)
        print(f"killed at each of {writes - 1} writes")
        assert writes > 9
        assert stage.made_twice() == set()
        assert {most for (role, _), most in stage.most.items() if role == WORKER} == {2}
        assert {most for (role, _), most in stage.most.items() if role == COORDINATOR} == {1}

    play(tmp_path, story)


@pytest.mark.nightly
def test_an_operator_killed_at_any_write_of_a_resize_leaves_work_that_another_ends(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        writes = await kill_at_every_write(
            stage,
            lambda name: stage.change(name, replicas=1),
            lambda name: stage.trains(name, 1) and len(stage.pods(name, WORKER)) == 1,
            lambda name: stage.apply(name, replicas=3),
            lambda name: stage.trains(name, 3),
        )
        print(f"killed at each of {writes - 1} writes")
        assert writes > 3
        assert stage.made_twice() == set()

    play(tmp_path, story)


@pytest.mark.nightly
def test_an_operator_killed_at_any_write_of_a_suspension_leaves_work_that_another_ends(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        writes = await kill_at_every_write(
            stage,
            lambda name: stage.change(name, suspend=True),
            lambda name: stage.status(name).get("phase") == "Suspended" and not stage.pods(name),
            stage.apply,
            stage.trains,
        )
        print(f"killed at each of {writes - 1} writes")
        assert writes > 3
        assert stage.made_twice() == set()

    play(tmp_path, story)


def test_a_restart_disturbs_no_training(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        for name in ("digits", "letters"):
            stage.apply(name)
        for name in ("digits", "letters"):
            await stage.until(lambda name=name: stage.trains(name))
        made, step = stage.made.copy(), stage.kubelet.training(NAMESPACE, "digits").step
        process.kill()
        stage.server.remove(PODS, NAMESPACE, "letters-w-0", 0)
        process = await stage.replace(process)
        since = len(stage.server.requests)
        await stage.until(lambda: stage.made.total() == made.total() + 1 and stage.trains("letters"))
        await stage.until(lambda: (stage.status("digits").get("step") or 0) > step)
        assert stage.trains("digits")
        assert not {"delete pods", "delete secrets"} & set(stage.writes(since))
        assert stage.kubelet.training(NAMESPACE, "digits").step > step

    play(tmp_path, story)


# --- the lease --------------------------------------------------------------------------------------------------------


def holder(stage: Stage) -> str:
    """Who leads by the Lease; empty: nobody."""
    lease = stage.server.find(LEASES, NAMESPACE, "virtualflow-operator")
    return "" if lease is None else str(lease["spec"].get("holderIdentity") or "")


@pytest.mark.slow
def test_a_leader_that_is_cut_off_exits_and_another_takes_over(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with Wire(stage.server.port) as one, Wire(stage.server.port) as two:
            first = stage.start("--lease-seconds=10", url=one.url)  # the default
            await stage.until(lambda: holder(stage) == "replica-0")
            second = stage.start("--lease-seconds=10", url=two.url)
            stage.apply("digits")
            await stage.until(lambda: stage.trains("digits"))
            assert not two.writes
            one.cut = True
            stage.change("digits", replicas=3)
            assert await first.ended(15.0) == 1
            assert holder(stage) == "replica-0", "it is gone before another may lead"
            await stage.until(lambda: holder(stage) == "replica-1")
            await stage.until(lambda: stage.trains("digits", 3))
            assert max(one.writes) < min(two.writes)
            assert second.exit_code is None
            assert "lost the lease" in first.output()
            assert stage.made.total() == 4

    play(tmp_path, story)


@pytest.mark.slow
def test_a_leader_that_was_frozen_writes_nothing_when_it_wakes(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with Wire(stage.server.port) as one, Wire(stage.server.port) as two:
            first = stage.start("--lease-seconds=10", url=one.url)
            await stage.until(lambda: holder(stage) == "replica-0")
            stage.start("--lease-seconds=10", url=two.url)
            names = [f"job-{number}" for number in range(4)]
            for name in names:
                stage.apply(name)
            for name in names:
                await stage.until(lambda name=name: stage.trains(name))
            os.kill(first.pid, signal.SIGSTOP)
            await stage.until(lambda: holder(stage) == "replica-1")
            taken_over = asyncio.get_running_loop().time()  # what was sent before the stop has long been read
            for name in names:
                stage.change(name, replicas=3)  # the frozen one will hear of it first of all
            for name in names:
                await stage.until(lambda name=name: stage.trains(name, 3))
            os.kill(first.pid, signal.SIGCONT)
            assert await first.ended() == 1
            late = [write for write in one.writes if write[0] > taken_over]
            assert not late
            assert stage.made_twice() == set()

    play(tmp_path, story)


@pytest.mark.slow
def test_a_leader_that_is_asked_to_end_gives_the_lease_back(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        first = stage.start("--lease-seconds=3600")
        await stage.until(lambda: holder(stage) == "replica-0")
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        stage.start("--lease-seconds=3600")
        first.terminate()
        assert await first.ended() == 0
        # Long before the lease would be over.
        await stage.until(lambda: holder(stage) == "replica-1")
        stage.change("digits", replicas=1)
        await stage.until(lambda: stage.trains("digits", 1))

    play(tmp_path, story)


@pytest.mark.slow
def test_one_that_stands_by_can_be_asked_to_end(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.start()
        await stage.until(lambda: holder(stage) == "replica-0")
        second = stage.start()
        await stage.until(lambda: "standing by" in second.output())
        second.terminate()
        assert await second.ended(8.0) == 0
        assert holder(stage) == "replica-0"

    play(tmp_path, story)


def ready(port: int) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.slow
@pytest.mark.parametrize("orderly", [True, False], ids=["the first ends", "the first is killed"])
def test_a_second_release_for_every_namespace_says_so_and_does_nothing_until_the_first_has_ended(
    tmp_path: Path, orderly: bool
) -> None:
    async def story(stage: Stage) -> None:
        first = stage.start("--lease-seconds=6")
        stage.apply("digits")
        await stage.until(lambda: stage.trains("digits"))
        health, metrics = free_port(), free_port()
        async with Wire(stage.server.port) as wire:
            flags = [f"--health-port={health}", f"--metrics-port={metrics}"]
            second = stage.start("--lease-name=another", "--lease-seconds=6", *flags, url=wire.url)
            await stage.until(lambda: "another release takes care of every namespace" in second.output())
            assert "held by default/virtualflow-operator" in second.output()
            code, said = await asyncio.to_thread(ready, health)
            assert (code, "or give one of the two `namespaces`" in said) == (503, True)
            sample = await asyncio.to_thread(scrape, metrics)
            assert (sample["virtualflow_other_release"], sample["virtualflow_leader"]) == (1, 0)
            apart = stage.start("--lease-name=apart", "--namespaces=kube-public")
            await stage.until(lambda: "this process leads" in apart.output())
            stage.change("digits", replicas=3)
            await stage.until(lambda: stage.trains("digits", 3))
            assert not wire.writes
            if orderly:
                first.terminate()
                assert await first.ended() == 0
            else:
                first.kill()
            stage.change("digits", replicas=2)
            await stage.until(lambda: stage.trains("digits", 2))
            assert wire.writes
            assert (await asyncio.to_thread(ready, health))[0] == 200
            assert (await asyncio.to_thread(scrape, metrics))["virtualflow_other_release"] == 0
            second.terminate()
            assert await second.ended() == 0

    play(tmp_path, story)


@pytest.mark.slow
def test_a_second_release_that_waits_can_be_asked_to_end(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        first = stage.start()
        await stage.until(lambda: "this process leads" in first.output())
        second = stage.start("--lease-name=another")
        await stage.until(lambda: "another release" in second.output())
        second.terminate()
        assert await second.ended(8.0) == 0
        lease = stage.server.find(LEASES, NAMESPACE, "another")
        assert lease is not None
        assert lease["spec"]["holderIdentity"] == ""

    play(tmp_path, story)


# --- as users start it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(COMMAND, id="virtualflow-operator"),
        slow(
            [sys.executable, "-m", "kopf", "run", "-m", "virtualflow_operator.controllers.watches", "-A"], id="kopf run"
        ),
    ],
)
def test_it_starts_as_users_start_it_and_ends_when_asked_to(tmp_path: Path, command: list[str]) -> None:
    async def story(stage: Stage) -> None:
        kubeconfig = write_kubeconfig(tmp_path / "kubeconfig", stage.server.url, TOKEN)
        settings = {
            "IMAGE": "operator:test",
            "KEY_FILE": str(tmp_path / "key"),
            "HEALTH_PORT": str(free_port()),
            "METRICS_PORT": str(free_port()),
            "IDENTITY": "by-hand",
        }
        environment = os.environ | {f"VIRTUALFLOW_OPERATOR_{name}": value for name, value in settings.items()}
        environment["KUBECONFIG"] = str(kubeconfig)
        with (tmp_path / "output").open("wb") as output:
            process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=output, stderr=output)
        try:
            stage.apply("digits")
            await stage.until(lambda: stage.trains("digits"))
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
            print((tmp_path / "output").read_text()[-4_000:])
        assert holder(stage) == ""
        assert "Traceback" not in (tmp_path / "output").read_text()

    play(tmp_path, story)


@pytest.mark.slow
def test_one_whose_definitions_are_deleted_ends_to_be_started_again(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        process = stage.start()
        await stage.watching()
        served = stage.server.store.kinds
        for jobs_or_queues in [kind for kind in served if kind[0] == JOBS.group]:
            del served[jobs_or_queues]
        stage.server.drop_watches()
        assert await process.ended() == 1
        stage.operators.remove(process)  # kopf tells with a traceback what it was answered

    play(tmp_path, story)
