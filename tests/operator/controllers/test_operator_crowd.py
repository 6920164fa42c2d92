"""Thousands of jobs in one namespace, on a real API server: they do not delay the job of another one."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest import mock

import pytest
from contract import NAMESPACES, begin, define
from running import OperatorProcess
from stage import FLAGS, job

import kube_apiserver
from virtualflow_operator.constants import LABEL_JOB
from virtualflow_operator.k8s.client import JOBS, PODS, SERVICES, KubeApi
from virtualflow_operator.settings import ApiSettings

CROWD = int(os.environ.get("VIRTUALFLOW_CROWD", "1000"))
"""Jobs of the one namespace."""
AT_ONCE = 16
"""Of them are being created at a time."""
TIMES = 5
"""How often a job is made, alone and beside the crowd; the slowest counts."""
SLOWER = 30.0
"""Beside the crowd a first pod takes at most so many times as long: operator, API server and etcd share the cores."""
LEAST = 10.0
"""Seconds that it may take in any case, on a machine that is busy with other things: in turn it would wait a minute."""
LIMIT = 60.0
"""Seconds in which a job alone has its first pod, with the operator's own start."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1_800),
    pytest.mark.skipif(not kube_apiserver.at_hand(), reason=kube_apiserver.HOW),
]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    with kube_apiserver.api_server(tmp_path) as path:
        yield path


@asynccontextmanager
async def operated(kubeconfig: Path, folder: Path) -> AsyncIterator[KubeApi]:
    """A cluster in which an operator runs."""
    with mock.patch.dict(os.environ, KUBECONFIG=str(kubeconfig)):
        api = await KubeApi.connect(ApiSettings(request_timeout=LIMIT))
    (folder / "key").write_text("k" * 64)
    async with api:
        await define(api)
        flags = [*FLAGS, "--lease-namespace=default", f"--key-file={folder / 'key'}"]
        operator = OperatorProcess(kubeconfig, folder / "operator.log", flags, {})
        try:
            yield api
        except (AssertionError, TimeoutError) as error:
            error.add_note(operator.output()[-4_000:])
            raise
        finally:
            operator.kill()
            await operator.ended()


async def new_namespace(api: KubeApi, name: str) -> None:
    await api.create(NAMESPACES, None, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})


async def create(api: KubeApi, namespace: str, name: str) -> None:
    body = job(name)
    await api.create(JOBS, namespace, body | {"metadata": {"name": name, "namespace": namespace}})


async def first_pod(api: KubeApi, namespace: str, name: str) -> float:
    """Seconds from the creation of a job until its first pod is seen."""
    began = time.monotonic()
    async with asyncio.timeout(LIMIT):
        await create(api, namespace, name)
        _, watch = await begin(lambda: api.watch(PODS, namespace, f"{LABEL_JOB}={name}", "", LIMIT))
        seconds = time.monotonic() - began
        await watch.aclose()
    return seconds


async def fill(api: KubeApi, namespace: str, count: int) -> None:
    """Create so many jobs, as fast as the API server takes them."""
    numbers = iter(range(count))

    async def some() -> None:
        for number in numbers:
            await create(api, namespace, f"junk-{number}")

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(some())


def test_a_crowd_in_one_namespace_does_not_delay_the_job_of_another(
    kubeconfig: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> tuple[list[float], list[float], float, int]:
        async with operated(kubeconfig, tmp_path) as api:
            for namespace in ("junk", "tenant"):
                await new_namespace(api, namespace)
            await first_pod(api, "tenant", "first")  # the operator leads
            alone = [await first_pod(api, "tenant", f"alone-{number}") for number in range(TIMES)]
            began = time.monotonic()
            await fill(api, "junk", CROWD)
            filled = time.monotonic() - began
            beside = [await first_pod(api, "tenant", f"beside-{number}") for number in range(TIMES)]
            return alone, beside, filled, len(await api.list(SERVICES, "junk"))

    alone, beside, filled, begun = asyncio.run(story())
    with capsys.disabled():
        print(
            f"\n{CROWD} jobs, created in {filled:.1f} s; first pod of another namespace's: alone {max(alone):.2f} s, "
            f"beside them {max(beside):.2f} s ({', '.join(f'{s:.2f}' for s in beside)}); {begun} of them had begun"
        )
    assert begun < CROWD, "the crowd is to keep the operator busy all the time"
    assert max(beside) <= max(LEAST, SLOWER * max(alone))
