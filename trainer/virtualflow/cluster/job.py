"""One ``VirtualFlowJob`` by its API server: look at it, change it, read its logs, wait for it."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import urllib3
from kubernetes import client as kubernetes
from kubernetes import watch

from virtualflow.cluster.api import (
    COORDINATOR,
    GROUP,
    LABEL_JOB,
    LABEL_ROLE,
    PLURAL,
    REQUEST_SECONDS,
    VERSION,
    WORKER,
    Object,
    said,
    why,
)
from virtualflow.cluster.logs import BrokenOff, Line, followed, merged
from virtualflow.errors import ConfigurationError, VirtualFlowError
from virtualflow.protocol.identity import PAGE_TOKEN
from virtualflow.protocol.settings import ENV_TOKEN
from virtualflow.protocol.wording import counted


@dataclass(frozen=True)
class Coordinator:
    """The coordinator of a job, in the cluster."""

    pod: str
    port: int
    token: str = field(repr=False)
    """The job's: it opens the live page, or all of a job in plaintext."""


class Job:
    """One job, as it was last seen; ``refresh`` looks again. ``virtualflow.cluster.Client`` finds and creates jobs."""

    def __init__(self, api: kubernetes.ApiClient, body: Object) -> None:
        self._jobs, self._core = kubernetes.CustomObjectsApi(api), kubernetes.CoreV1Api(api)
        self.body = body

    def __repr__(self) -> str:
        return f"Job({self.namespace}/{self.name}: {self.phase})"

    @property
    def name(self) -> str:
        """``metadata.name``."""
        return str(self.body["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """``metadata.namespace``."""
        return str(self.body["metadata"]["namespace"])

    @property
    def status(self) -> Object:
        """``status``; empty while no operator has seen the job."""
        return self.body.get("status") or {}

    @property
    def phase(self) -> str:
        """``status.phase``."""
        return str(self.status.get("phase") or "Pending")

    @property
    def finished(self) -> bool:
        """Whether it is over for good."""
        return self.phase in ("Complete", "Failed")

    def refresh(self) -> Job:
        """Look again; this object."""
        with said(f"read the job {self.name} in the namespace {self.namespace}"):
            self.body = self._jobs.get_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, self.name, _request_timeout=REQUEST_SECONDS
            )
        return self

    def scale(self, workers: int) -> None:
        """Ask for that many workers; they join and leave while the others train."""
        self._patch({"spec": {"replicas": workers}}, f"scale {self.name} to {counted(workers, 'worker')}", "scale")

    def lost_by_suspension(self) -> str:
        """What a suspension would lose, as a sentence without its point; empty: nothing."""
        steps = (self.status.get("earlierSteps") or 0) + (self.status.get("step") or 0)
        if self.body["spec"].get("checkpoint") or not steps or self.finished:
            return ""
        return f"{self.name} has no spec.checkpoint: a suspension loses {counted(steps, 'step')} of training"

    def suspend(self) -> None:
        """Stop behind a step, with a checkpoint if the job has ``spec.checkpoint``, and give all pods back.

        Without one its training is lost, see :meth:`lost_by_suspension`, and it begins anew when it is resumed.
        """
        self._patch({"spec": {"suspend": True}}, f"suspend {self.name}")

    def resume(self) -> None:
        """Go on after a suspension."""
        self._patch({"spec": {"suspend": False}}, f"resume {self.name}")

    def drain(self, worker: str) -> None:
        """Let a worker hand over what it has and leave; another one takes its place.

        Args:
            worker: the name of its pod.
        """
        if worker not in self.workers():
            raise ConfigurationError(
                f"{worker} is no worker of {self.name}; it has {', '.join(self.workers()) or 'none'}"
            )
        body = kubernetes.V1Eviction(metadata=kubernetes.V1ObjectMeta(name=worker, namespace=self.namespace))
        with said(f"evict {worker}"):
            self._core.create_namespaced_pod_eviction(worker, self.namespace, body, _request_timeout=REQUEST_SECONDS)

    def delete(self) -> None:
        """Delete it, with all that belongs to it."""
        with said(f"delete {self.name}"):
            self._jobs.delete_namespaced_custom_object(
                GROUP, VERSION, self.namespace, PLURAL, self.name, _request_timeout=REQUEST_SECONDS
            )

    def coordinator(self) -> Coordinator | None:
        """Where its coordinator is, and what it asks for; ``None``: none runs at present.

        Raises:
            ConfigurationError: the API server lets its user not read the pod, or the job's Secret.
        """
        running = [pod for pod in self._pods(COORDINATOR) if pod.status.phase == "Running" and not _ends(pod)]
        if not running:
            return None
        named = [pod for pod in running if pod.metadata.name == self.status.get("coordinator")]
        pod = (named or running)[0]
        container = next(each for each in pod.spec.containers if each.name == COORDINATOR)
        name, key = _place_of_token(pod, container)
        with said(f"read the Secret {name}, which has the job's token"):
            secret = self._core.read_namespaced_secret(name, self.namespace, _request_timeout=REQUEST_SECONDS)
        token = base64.b64decode(secret.data[key]).decode()
        return Coordinator(str(pod.metadata.name), int(container.ports[0].container_port), token)

    def workers(self) -> list[str]:
        """Names of the worker pods that are there, also of those that have ended."""
        return [str(pod.metadata.name) for pod in self._pods()]

    def wait(self, seconds: float | None = None) -> Job:
        """Wait until it is over; this object.

        Args:
            seconds: how long at most.

        Raises:
            TimeoutError: it is not over by then.
            VirtualFlowError: it has failed, or was deleted; the message says why.
        """
        deadline = deadline_after(seconds)
        while not self.wait_a_while(deadline):
            pass
        return self

    def wait_a_while(self, deadline: float | None) -> bool:
        """Look, and wait for the next change unless it is over; whether it is.

        Args:
            deadline: by the monotonic clock; ``None``: there is none.

        Raises:
            TimeoutError: it was not over by then.
            VirtualFlowError: it has failed, or was deleted.
        """
        version = self._look()
        if self.phase == "Failed":
            told = [c["message"] for c in self.status.get("conditions", ()) if c["type"] == "Failed"]
            raise VirtualFlowError(f"{self.name} has failed: {told[0] if told else 'its status does not say why'}")
        if self.finished:
            return True
        left = REQUEST_SECONDS if deadline is None else min(REQUEST_SECONDS, deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError(f"{self.name} is {self.phase}, and the time to wait for it is over")
        self._await_a_change(version, left)
        return False

    def events(self) -> list[Object]:
        """Events of the job, the latest last: ``type``, ``reason``, ``message``, ``count``, ``time``."""
        with said(f"list events of {self.name}"):
            found = self._core.list_namespaced_event(
                self.namespace,
                field_selector=f"involvedObject.uid={self.body['metadata']['uid']}",
                _request_timeout=REQUEST_SECONDS,
            )
        shown = [
            {
                "type": event.type,
                "reason": event.reason,
                "message": event.message,
                "count": event.count or (event.series.count if event.series else 1),
                "time": event.last_timestamp or event.event_time or event.first_timestamp,
            }
            for event in found.items
        ]
        return sorted(shown, key=lambda event: str(event["time"] or ""))

    def logs(self, *, follow: bool = False, tail: int | None = None) -> Iterator[Line]:
        """The lines of all workers, by time; those of workers that have ended too, as long as their pods are there.

        Args:
            follow: go on until the job is over; lines come as they are written.
            tail: only so many of the latest of each worker.
        """
        if not follow:
            yield from merged({name: self._log(name, tail) for name in self.workers()})
            return
        yield from followed(
            lambda: {str(pod.metadata.name): pod.status.phase in ("Pending", "Running") for pod in self._pods()},
            lambda name, since: self._stream(name, since, tail),
            lambda: self.refresh().finished,
        )

    def _log(self, worker: str, tail: int | None) -> str:
        with said(f"read the log of {worker}"):
            try:
                found = self._core.read_namespaced_pod_log(
                    worker, self.namespace, timestamps=True, tail_lines=tail, _request_timeout=REQUEST_SECONDS
                )
                return str(found or "")  # nothing at all of one that has no node yet
            except kubernetes.ApiException as error:
                if error.status in (400, 404):  # it has not begun, or is gone meanwhile
                    return ""
                raise

    def _stream(self, worker: str, since: str | None, tail: int | None) -> Iterator[str]:
        """Lines of a worker as they come; it ends with the container.

        Raises:
            BrokenOff: after some silence, or as the connection is lost.
        """
        try:
            answer = self._core.read_namespaced_pod_log(
                worker,
                self.namespace,
                timestamps=True,
                follow=True,
                tail_lines=tail if since is None else None,
                since_seconds=None if since is None else 3_600,
                _preload_content=False,
                _request_timeout=(REQUEST_SECONDS, REQUEST_SECONDS),
            )
        except kubernetes.ApiException as error:
            if error.status in (400, 404):  # it has not begun, or is gone meanwhile
                return
            raise ConfigurationError(f"cannot read the log of {worker}: {why(error)}") from None
        except urllib3.exceptions.HTTPError as error:
            raise BrokenOff from error
        try:
            rest = b""
            for chunk in answer.stream(65_536):
                *lines, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in lines)
            if rest:
                yield rest.decode(errors="replace")
        except urllib3.exceptions.HTTPError as error:
            raise BrokenOff from error
        finally:
            answer.release_conn()

    def _pods(self, role: str = WORKER) -> list[Any]:
        with said(f"list the pods of {self.name}"):
            found = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=f"{LABEL_JOB}={self.name},{LABEL_ROLE}={role}",
                _request_timeout=REQUEST_SECONDS,
            )
        return list(found.items)

    def _look(self) -> str:
        """Look again; since which version of the whole list to watch (the job's own may be long forgotten)."""
        with said(f"read the job {self.name} in the namespace {self.namespace}"):
            found = self._jobs.list_namespaced_custom_object(
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                field_selector=f"metadata.name={self.name}",
                _request_timeout=REQUEST_SECONDS,
            )
        if not found["items"]:
            raise VirtualFlowError(f"{self.name} is not there any more: it was deleted")
        self.body = found["items"][0]
        return str(found["metadata"]["resourceVersion"])

    def _await_a_change(self, version: str, seconds: float) -> None:
        with said(f"watch {self.name}"):
            stream = watch.Watch().stream(
                self._jobs.list_namespaced_custom_object,
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                field_selector=f"metadata.name={self.name}",
                resource_version=version,
                timeout_seconds=max(1, int(seconds)),
                _request_timeout=seconds + REQUEST_SECONDS,
            )
            next(iter(stream), None)

    def _patch(self, body: Object, what: str, subresource: str = "") -> None:
        with said(what):
            if subresource == "scale":
                self._jobs.patch_namespaced_custom_object_scale(
                    GROUP, VERSION, self.namespace, PLURAL, self.name, body, _request_timeout=REQUEST_SECONDS
                )
            else:
                self._jobs.patch_namespaced_custom_object(
                    GROUP, VERSION, self.namespace, PLURAL, self.name, body, _request_timeout=REQUEST_SECONDS
                )


def deadline_after(seconds: float | None) -> float | None:
    """So many seconds from now, by the monotonic clock."""
    return None if seconds is None else time.monotonic() + seconds


def _place_of_token(pod: Any, container: Any) -> tuple[str, str]:
    """The Secret, and its entry, with a coordinator's token: a file of its identity, or else a variable."""
    projected = (volume.projected for volume in pod.spec.volumes or () if volume.projected)
    for source in (source.secret for volume in projected for source in volume.sources if source.secret):
        for item in source.items or ():
            if item.path == PAGE_TOKEN:
                return str(source.name), str(item.key)
    reference = next(each.value_from.secret_key_ref for each in container.env if each.name == ENV_TOKEN)
    return str(reference.name), str(reference.key)


def _ends(pod: Any) -> bool:
    return pod.metadata.deletion_timestamp is not None
