"""Who admits which job: its queue, Kueue, or nobody. The one place where the operator knows of the two.

What there is for queues and for Kueue is loaded with the first job or queue that needs it, so an operator that takes
care of plain jobs only has none of it in its memory; and one that was installed without it says what is missing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from virtualflow_operator.api import Job, JobStatus, kueue_queue
from virtualflow_operator.controllers.coordinator_links import CoordinatorLinks
from virtualflow_operator.jobs import AT_ONCE, Admission, AdmissionAction
from virtualflow_operator.k8s import Key, KubeApi, Store
from virtualflow_operator.observability import Metrics
from virtualflow_operator.settings import OperatorSettings

if TYPE_CHECKING:
    from virtualflow_operator.controllers.kueue_controller import KueueController
    from virtualflow_operator.controllers.queue_controller import QueueController

logger = logging.getLogger(__name__)

SATELLITES = tuple(f"virtualflow_operator.{name}" for name in ("kueue", "queues", "scheduling"))
"""What an operator may be installed without."""


@dataclass(frozen=True)
class Wakes:
    """How the work-queue is told of news."""

    job: Callable[[Key], None]
    queue: Callable[[str | None], None]
    admitted: Callable[[Key | None], None]
    """A job of which a Workload has changed; ``None``: all that name a queue of Kueue's."""


class Admissions:
    """The operator's dealings with whoever admits jobs."""

    def __init__(
        self,
        *,
        api: KubeApi,
        store: Store,
        links: CoordinatorLinks,
        metrics: Metrics,
        wakes: Wakes,
        settings: OperatorSettings,
    ) -> None:
        self._api, self._store, self._links = api, store, links
        self._metrics, self._wakes, self._settings = metrics, wakes, settings
        self._queues: QueueController | None = None
        self._kueue: KueueController | None = None
        self._missing: dict[str, str] = {}
        """What is not installed, and what to do about it, by what it is for."""

    def start(self) -> None:
        """Follow Kueue's Workloads, if the operator is to."""
        if self._settings.kueue and (kueue := self._load_kueue()) is not None:
            kueue.workloads.want(True)

    async def close(self) -> None:
        if self._kueue is not None:
            await self._kueue.workloads.close()

    def missing(self, job: Job) -> str:
        """What is not installed that it takes to admit a job, in a sentence; empty: nothing."""
        if job.spec.queue and self._load_queues() is None:
            return self._missing["queues"]
        return self._missing["kueue"] if kueue_queue(job) and self._load_kueue() is None else ""

    async def of(self, key: Key, job: Job) -> Admission:
        """Who admits a job, with all that was decided about it."""
        admission = AT_ONCE
        if job.spec.queue and (queues := self._load_queues()) is not None:
            admission = queues.admission(key, job)
        if (self._settings.kueue or kueue_queue(job)) and (kueue := self._load_kueue()) is not None:
            return await kueue.admission(key, job, admission)
        return admission

    async def carry_out(self, job: Job, action: AdmissionAction) -> bool:
        """Do what an admission asks for; whether something new is to be told of it."""
        kueue = self._load_kueue()
        return kueue is not None and await kueue.carry_out(job, action)

    def note_status(self, job: Job, status: JobStatus) -> None:
        if self._queues is not None:
            self._queues.note_status(job, status)

    def note_nodes(self) -> None:
        """Nodes have changed: workers that found none may find one now."""
        if self._queues is not None:
            self._queues.try_again()

    async def decide(self, key: Key) -> float | None:
        """Decide about a queue; in how many seconds to do it again, if so."""
        queues = self._load_queues()
        return None if queues is None else await queues.decide(key)

    def _load_queues(self) -> QueueController | None:
        if self._queues is None and "queues" not in self._missing:
            try:
                from virtualflow_operator.controllers.queue_controller import QueueController
            except ModuleNotFoundError as error:
                self._note_missing("queues", error, "spec.queue")
                return None
            self._queues = QueueController(
                api=self._api,
                store=self._store,
                links=self._links,
                metrics=self._metrics,
                wake=self._wakes.job,
                wake_queue=self._wakes.queue,
                settings=self._settings,
            )
        return self._queues

    def _load_kueue(self) -> KueueController | None:
        if self._kueue is None and "kueue" not in self._missing:
            try:
                from virtualflow_operator.controllers.kueue_controller import KueueController
            except ModuleNotFoundError as error:
                self._note_missing("kueue", error, "the label of Kueue's queue")
                return None
            self._kueue = KueueController(self._api, self._wakes.admitted, self._settings)
        return self._kueue

    def _note_missing(self, what: str, error: ModuleNotFoundError, remove: str) -> None:
        """Say once what is not installed."""
        name = error.name or ""
        if not name.startswith(SATELLITES):
            raise error
        self._missing[what] = (
            f"this operator was installed without {name}, which {remove} needs; install all of virtualflow, or remove "
            f"{remove}"
        )
        logger.warning("%s", self._missing[what])
