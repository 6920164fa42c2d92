"""``VirtualFlowJob`` objects of a namespace by their API server: create them and find them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import urllib3
import yaml
from kubernetes import client as kubernetes
from kubernetes import config as kubeconfigs

from virtualflow._arguments import checked, checked_class
from virtualflow.atomic_file import read_regular
from virtualflow.cluster.api import GROUP, KIND, PLURAL, REQUEST_SECONDS, VERSION, Object, said
from virtualflow.cluster.job import Job, deadline_after
from virtualflow.cluster.logs import Line
from virtualflow.cluster.scripts import submission
from virtualflow.errors import ConfigurationError
from virtualflow.launcher.documents import describe_fault, parse_yaml
from virtualflow.protocol.live_view import PageFrame
from virtualflow.protocol.settings import MAX_MANIFEST


@checked_class("Client")
class Client:
    """The jobs of one namespace.

    Args:
        kubeconfig: as of ``kubectl --kubeconfig``; by default that of the environment, or of the pod that this runs in.
        context: as of ``kubectl --context``.
        namespace: by default the context's.

    Raises:
        ConfigurationError: there is no cluster to talk to.
    """

    def __init__(
        self, *, kubeconfig: str | Path | None = None, context: str | None = None, namespace: str | None = None
    ) -> None:
        file = None if kubeconfig is None else str(kubeconfig)
        self._file, self._context = file, context
        try:
            self.api = kubeconfigs.new_client_from_config(file, context)
            self.namespace = namespace or _namespace_of(file, context)
        except kubeconfigs.ConfigException as error:
            if file is not None or context is not None:
                raise ConfigurationError(f"no cluster: {error}") from None
            self.api, self.namespace = _from_within(error), namespace or _namespace_within()
        self._jobs = kubernetes.CustomObjectsApi(self.api)
        self.core = kubernetes.CoreV1Api(self.api)

    def close(self) -> None:
        """Give the connections back."""
        self.api.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @checked("submit")
    def submit(
        self,
        train: Mapping[str, Any] | Callable[[], object] | str | Path,
        *,
        image: str | None = None,
        replicas: int = 1,
        name: str | None = None,
        files: Sequence[str | Path] = (),
        args: Sequence[str] = (),
        resources: Mapping[str, str | int] | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> Job:
        """Create a job.

        Args:
            train: a ``VirtualFlowJob``, or the path of a YAML file with one, which says all else by itself. Or the path
                of a script, or a function, which goes to the workers as its source: it takes no arguments, and imports
                what it uses. These are files of a ``ConfigMap`` that ends with the job, of 1 MiB at most.
            image: with Python, torch and virtualflow, for a script or a function.
            replicas: workers.
            name: of the job; by default made from that of the script or the function.
            files: more of them, which lie beside the script: modules that it imports.
            args: of the script.
            resources: what a worker requests, as in a manifest, and may take of all but ``cpu``:
                ``{"nvidia.com/gpu": 1, "memory": "8Gi"}``.
            spec: more of the job's ``spec``: ``{"virtualNodes": 16, "maxReplicas": 8}``.

        Raises:
            ConfigurationError: it is no such thing, or the API server refuses it.
        """
        script = callable(train) or (isinstance(train, str | Path) and Path(train).suffix == ".py")
        if not script:
            if any((image, replicas != 1, name, files, args, resources, spec)):
                raise ConfigurationError("a manifest says all by itself; leave out the other arguments, or change it")
            assert not callable(train)
            body = read_manifest(train)
            with said(f"create the job {body['metadata']['name']}"):
                return self._create(body)
        if image is None:
            raise ConfigurationError("a script needs an image with torch and virtualflow to run in; say image=...")
        assert not isinstance(train, Mapping)
        job, shipped = submission(
            train,
            image=image,
            replicas=replicas,
            name=name,
            files=files,
            args=args,
            resources=resources or {},
            spec=spec or {},
        )
        with said(f"create the job {job['metadata']['name']}"):
            made = self._create(job)
            owner = {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": made.name}
            shipped["metadata"]["ownerReferences"] = [owner | {"uid": made.body["metadata"]["uid"]}]
            try:  # its pods wait for it
                self.core.create_namespaced_config_map(made.namespace, shipped, _request_timeout=REQUEST_SECONDS)
            except (kubernetes.ApiException, urllib3.exceptions.HTTPError):
                made.delete()
                raise
        return made

    def job(self, name: str) -> Job:
        """The job of that name.

        Raises:
            ConfigurationError: there is none, or it may not be read.
        """
        with said(f"read the job {name} in the namespace {self.namespace}"):
            found: Object = self._jobs.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, name, _request_timeout=REQUEST_SECONDS
            )
        return self._job(found)

    def jobs(self, *, everywhere: bool = False) -> list[Job]:
        """All jobs, by name.

        Args:
            everywhere: of all namespaces.
        """
        with said("list jobs"):
            if everywhere:
                found = self._jobs.list_cluster_custom_object(GROUP, VERSION, PLURAL, _request_timeout=REQUEST_SECONDS)
            else:
                found = self._jobs.list_namespaced_custom_object(
                    GROUP, VERSION, self.namespace, PLURAL, _request_timeout=REQUEST_SECONDS
                )
        return sorted((self._job(item) for item in found["items"]), key=lambda job: (job.namespace, job.name))

    def live_page(self, name: str, *, height: int = 700) -> PageFrame:
        """The live page of a job, for a notebook: a cell's value shows it, as long as this process and the job last.

        The way there is ``kubectl port-forward``, so the browser must be on this machine, too, or reach its ports.

        Args:
            name: of the job.
            height: in pixels.

        Raises:
            VirtualFlowError: no coordinator runs, or it is out of this user's reach; the message says why.
        """
        from virtualflow.cluster.tunnel import PortForward

        return PageFrame(PortForward(self.job(name), self.kubectl).address(), height)

    def kubectl(self) -> list[str]:
        """The beginning of a kubectl command to the same cluster.

        Raises:
            ConfigurationError: there is no kubectl.
        """
        from virtualflow.cluster.tunnel import kubectl

        return kubectl(kubeconfig=self._file, context=self._context)

    def _create(self, body: Object) -> Job:
        namespace = self.namespace_for(body)
        made = self._jobs.create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, body, _request_timeout=REQUEST_SECONDS
        )
        return self._job(made)

    def _job(self, body: Object) -> Job:
        return Job(self.api, body)

    def namespace_for(self, body: Mapping[str, Any]) -> str:
        """The namespace of an object that is to be created: its own, or this one."""
        return str(body["metadata"].get("namespace") or self.namespace)


def read_manifest(manifest: Mapping[str, Any] | str | Path) -> Object:
    """A ``VirtualFlowJob``, as it is or from a YAML file.

    Raises:
        ConfigurationError: it is none.
    """
    if isinstance(manifest, Mapping):
        body: Any = dict(manifest)
    else:
        try:
            documents = parse_yaml(read_regular(Path(manifest), MAX_MANIFEST))
        except OSError as error:
            raise ConfigurationError(f"{manifest} cannot be read: {error.strerror}") from None
        except (yaml.YAMLError, UnicodeError, RecursionError) as error:
            raise ConfigurationError(f"{manifest} is not YAML: {describe_fault(error)}") from None
        if len(documents) > 1:
            raise ConfigurationError(f"{manifest} must hold exactly one document, a {KIND}; it holds {len(documents)}")
        body = documents[0] if documents else None
    metadata = body.get("metadata") if isinstance(body, dict) and body.get("kind") == KIND else None
    if not isinstance(body, dict) or not isinstance(metadata, dict) or not metadata.get("name"):
        raise ConfigurationError(f"that is no {KIND} with a metadata.name")
    return body


def _namespace_of(file: str | None, context: str | None) -> str:
    contexts, current = kubeconfigs.list_kube_config_contexts(file)
    chosen = current if context is None else next(each for each in contexts if each["name"] == context)
    return str((chosen.get("context") or {}).get("namespace") or "default")


def _from_within(error: Exception) -> kubernetes.ApiClient:
    configuration = kubernetes.Configuration()
    try:
        kubeconfigs.load_incluster_config(configuration)
    except kubeconfigs.ConfigException:
        raise ConfigurationError(f"no cluster: {error}; give a kubeconfig, or set KUBECONFIG") from None
    return kubernetes.ApiClient(configuration)


def _namespace_within() -> str:
    return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()


# --- the same for programs with an event loop: each request is made in a thread, and nothing blocks the loop ----------
#
# Who stops waiting leaves a request to itself, which ends within REQUEST_SECONDS.


class AsyncClient:
    """The jobs of one namespace.

    Args:
        options: as of :class:`virtualflow.cluster.Client`.

    Raises:
        ConfigurationError: there is no cluster to talk to.
    """

    def __init__(self, **options: Any) -> None:
        self._client = Client(**options)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Give the connections back."""
        await asyncio.to_thread(self._client.close)

    async def submit(self, train: Any, **options: Any) -> AsyncJob:
        """As :meth:`virtualflow.cluster.Client.submit`."""
        return AsyncJob(await asyncio.to_thread(self._client.submit, train, **options))

    async def job(self, name: str) -> AsyncJob:
        """The job of that name.

        Raises:
            ConfigurationError: there is none, or it may not be read.
        """
        return AsyncJob(await asyncio.to_thread(self._client.job, name))

    async def jobs(self, *, everywhere: bool = False) -> list[AsyncJob]:
        """All jobs, by name; ``everywhere``: of all namespaces."""
        return [AsyncJob(job) for job in await asyncio.to_thread(self._client.jobs, everywhere=everywhere)]


class AsyncJob:
    """One job.

    Args:
        seen: as it was last seen: its name, status and phase.
    """

    def __init__(self, seen: Job) -> None:
        self.seen = seen

    async def refresh(self) -> AsyncJob:
        """Look again; this object."""
        await asyncio.to_thread(self.seen.refresh)
        return self

    async def scale(self, workers: int) -> None:
        """Ask for that many workers."""
        await asyncio.to_thread(self.seen.scale, workers)

    async def suspend(self) -> None:
        """Stop behind a step, with a checkpoint, and give all pods back."""
        await asyncio.to_thread(self.seen.suspend)

    async def resume(self) -> None:
        """Go on after a suspension."""
        await asyncio.to_thread(self.seen.resume)

    async def drain(self, worker: str) -> None:
        """Let a worker hand over and leave."""
        await asyncio.to_thread(self.seen.drain, worker)

    async def delete(self) -> None:
        """Delete it, with all that belongs to it."""
        await asyncio.to_thread(self.seen.delete)

    async def workers(self) -> list[str]:
        """Names of the worker pods that are there."""
        return await asyncio.to_thread(self.seen.workers)

    async def wait(self, seconds: float | None = None) -> AsyncJob:
        """Wait until it is over; this object.

        Raises:
            TimeoutError: it is not over after so many seconds.
            VirtualFlowError: it has failed, or was deleted.
        """
        deadline = deadline_after(seconds)
        while not await asyncio.to_thread(self.seen.wait_a_while, deadline):
            pass
        return self

    async def logs(self, *, follow: bool = False, tail: int | None = None) -> AsyncIterator[Line]:
        """The lines of all workers, by time; see :meth:`virtualflow.cluster.job.Job.logs`."""
        lines = self.seen.logs(follow=follow, tail=tail)
        while (line := await asyncio.to_thread(next, lines, None)) is not None:
            yield line
