"""One decision about one job: what is there, what should be, and what to do next. Pure and level-triggered.

The same arguments give the same plan, every action may be repeated, and nothing is remembered but in the job's status.
Read from top to bottom, first match wins:

1. A job that is over: let its workers end, take the rest away, and in the end the job itself.
2. Tell the coordinator whom it will lose and whom it has lost, whatever else is the matter.
3. Training complete, or the job failed too often or took too long: write down how it ended.
4. The job as a whole failed: begin again, from the newest checkpoint, after a wait.
5. A specification that makes no sense changes nothing that runs.
6. Suspended, or without workers by its queue's decision: stop behind the same step, then take the pods away.
7. Otherwise: a coordinator, its service, and as many workers as the job is to have.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from virtualflow.calls import Status
from virtualflow_operator import phases, reasons, resources
from virtualflow_operator.constants import COORDINATOR, MANAGER, WORKER
from virtualflow_operator.decision import FAILED_GRACE, Decision, Scene, listed
from virtualflow_operator.disruptions import TERMINATION_TAINTS
from virtualflow_operator.failures import count_crash, count_failed_attempt, count_refusal
from virtualflow_operator.job_status import JobStatus
from virtualflow_operator.placement import choose_grounds, confine, tells_apart
from virtualflow_operator.plan import (
    CheckTemplates,
    CreatePod,
    CreateService,
    DeleteJob,
    Plan,
    PointService,
    TellScale,
    TellStop,
)
from virtualflow_operator.settings import OperatorSettings
from virtualflow_operator.view import Node, Pod, format_time, parse_time
from virtualflow_operator.workforce import Workforce, plan_workforce

_COORDINATOR_AGAIN = 10.0
"""Seconds between two coordinators of which the first ended by itself."""


def reconcile(scene: Scene, now: float, settings: OperatorSettings) -> Plan:
    """Decide about a job at ``now`` (Unix seconds); see the module's text for the rules."""
    if scene.job.spec.managed_by not in (None, "", MANAGER):
        return Plan(scene.job.status)
    return _Reconciliation(scene, now, settings).decide()


class _Reconciliation(Decision):
    """The rules, in their order."""

    def decide(self) -> Plan:
        if self.status.finished:
            self.clear_up()
            return self.plan(self.status)
        self.tell()
        self.clean()
        ended = self.completed() or self.out_of_time() or self.attempt_failed()
        if ended is not None:
            return self.plan(ended)
        given_up = self.count_crashes()
        if given_up is not None:
            return self.plan(given_up)
        faults = "; ".join(self.faults)
        if self.faults and not self.scene.job.spec.suspend and not (self.granted.waits and not self.survey.workers):
            self.wakes += [at for at in [parse_time(self.status.failures.retry_time)] if at is not None]
            return self.plan(phases.invalid(self.portray(), self.job, faults, self.now))
        self.settle()
        if self.spec.suspend:
            status = self.suspend()
            return self.plan(phases.invalid(status, self.job, faults, self.now) if faults else status)
        workforce = self.run()
        return self.plan(self.portray(workforce))

    # --- 1. a job that is over ---------------------------------------------------------------------------------------

    def clear_up(self) -> None:
        finished_at = parse_time(self.status.completion_time) or self.now
        grace_ends = finished_at + self.settings.finish_grace
        patient = self.status.phase == "Complete" and self.now < grace_ends
        waited_for = False
        for placed in self.survey.workers:
            if not placed.pod.live:
                waited_for = waited_for or (placed.pod.terminating and not placed.pod.finished and patient)
            elif patient and placed.standing in ("training", "draining", "done"):
                waited_for = True
            else:
                self.delete(placed.pod, "the job is over", "finished", FAILED_GRACE)
        if waited_for:
            self.wakes.append(grace_ends)
        for pod in self.survey.stale:
            if not pod.terminating:
                self.delete(pod, "of an earlier attempt", "attempt")
        for pod in self.survey.coordinators:
            if not pod.terminating and not waited_for:
                self.delete(pod, "the job is over", "finished")
        if self.spec.ttl_seconds_after_finished is not None:
            expires = finished_at + self.spec.ttl_seconds_after_finished
            self.wakes.append(expires)
            if self.now >= expires:
                self.actions.append(DeleteJob())

    # --- 2. news for the coordinator ---------------------------------------------------------------------------------

    # --- 3. and 4. how it ends ---------------------------------------------------------------------------------------

    def completed(self) -> JobStatus | None:
        """The status of a training that is complete, by the coordinator's word or else by its workers' last ones."""
        remote = self.remote
        if remote is not None and remote.phase == "done":
            return phases.complete(
                self.portray(), self.job, remote.digest, remote.optimizer_digest, remote.step, remote.metrics, self.now
            )
        ended = [placed for placed in self.survey.workers if placed.pod.finished and self.ends_job(placed)]
        if not ended or any(placed.pod.live and placed.standing != "absent" for placed in self.survey.workers):
            return None
        exit_ = ended[0].pod.exit
        word = exit_.last_word if exit_ is not None else None
        assert word is not None
        return phases.complete(
            self.portray(), self.job, word.digest, word.optimizer_digest, word.step, word.metrics, self.now
        )

    def out_of_time(self) -> JobStatus | None:
        limit, started = self.spec.active_deadline_seconds, parse_time(self.status.start_time)
        if limit is None or started is None or self.spec.suspend:
            return None
        self.wakes.append(started + limit)
        if self.now < started + limit:
            return None
        message = f"the job was not done {limit} s after its start (activeDeadlineSeconds)"
        return phases.failed(self.portray(), self.job, reasons.DEADLINE, message, self.now)

    def attempt_failed(self) -> JobStatus | None:
        """The next attempt's status, or the last one's, when the coordinator says that the job has failed."""
        remote = self.remote
        if remote is None or remote.phase != "failed":
            return None
        message = _explain_failure(remote)
        crashed = [placed.pod for placed in self.survey.of("crashed")]
        failures = count_failed_attempt(
            self.status.failures, crashed, self.step(), message, self.now, self.settings.crashes
        )
        self.status = msgspec.structs.replace(self.status, failures=failures)
        if failures.count > self.spec.backoff_limit:
            return self.give_up(failures.count, message)
        self.notice(reasons.CRASHED, f"attempt {self.status.attempt + 1} failed: {message}", warning=True)
        attempt = self.status.attempt + 1
        self.status = msgspec.structs.replace(self.status, attempt=attempt, coordinator=None)
        self.wakes.append(self.now + 0.01)
        self.link = self.remote = None
        self.connected = False
        return phases.back_off(self.portray(), self.job, self.now)

    def give_up(self, count: int, message: str) -> JobStatus:
        text = (
            f"it failed {count} times without progress in between (backoffLimit {self.spec.backoff_limit}): {message}"
        )
        return phases.failed(self.portray(), self.job, reasons.BACK_OFF_LIMIT, text, self.now)

    def count_crashes(self) -> JobStatus | None:
        """Put crashed pods into the books; they are deleted once that is written. The last status if it is too much."""
        placed, refused = self.survey.of("crashed"), self.survey.of("refused")
        crashed = [p.pod for p in placed]
        if not crashed and not refused and not self.status.failures.counted:
            return None
        fresh = [p for p in placed if p.pod.uid not in self.status.failures.counted]
        message = fresh[0].reason if fresh else ""
        failures = count_crash(self.status.failures, crashed, self.step(), message, self.now, self.settings.crashes)
        for p in fresh:
            self.notice(reasons.CRASHED, p.reason, warning=True)
        for p in refused:
            if p.pod.uid not in self.status.failures.counted:
                self.notice(reasons.LOST, f"{p.pod.name} is lost: {p.reason}", warning=True)
        why = next((p.reason for p in refused if p.pod.uid not in self.status.failures.counted), message)
        failures = count_refusal(failures, crashed, [p.pod for p in refused], why, self.now, self.settings.crashes)
        self.status = msgspec.structs.replace(self.status, failures=failures)
        if fresh and failures.count > self.spec.backoff_limit:
            return self.give_up(failures.count, message)
        return None

    # --- 5. what makes no sense --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Write down what a job keeps for life, and since when it runs."""
        start = self.status.start_time or (None if self.spec.suspend else format_time(self.now))
        self.status = msgspec.structs.replace(
            self.status,
            virtual_nodes=self.status.virtual_nodes or self.spec.virtual_nodes,
            reproducibility=self.status.reproducibility or self.spec.reproducibility,
            selector=resources.selector(self.job),
            start_time=start,
        )

    # --- 6. suspended ------------------------------------------------------------------------------------------------

    def suspend(self) -> JobStatus:
        """Stop behind a step with a checkpoint, then take all pods away."""
        live = [placed for placed in self.survey.workers if placed.pod.live]
        remote, grace = self.remote, float(self.spec.elasticity.drain_grace_seconds)
        # A suspended job is one of which no worker is wanted, and less are wanted since then.
        since = (parse_time(self.status.scale_down_since) if self.status.phase == "Suspending" else None) or self.now
        self.status = msgspec.structs.replace(self.status, scale_down_since=format_time(since))
        in_training = remote is not None and remote.phase in ("training", "evaluating")
        if live and in_training and self.connected and self.now < since + grace:
            self.calls.append(TellStop(self.rest))
            self.wakes.append(since + grace)
            return phases.suspending(self.portray(), self.job, self.now)
        for placed in live:
            handed_over = (
                remote is not None and remote.phase == "stopped" and placed.standing in ("training", "draining")
            )
            if not handed_over or self.now >= since + grace:
                self.delete(placed.pod, self.rest, "suspend")
            else:
                self.wakes.append(since + grace)
        running = [p for p in self.survey.workers if not p.pod.finished and p.fate != "lost"]
        if running:
            return phases.suspending(self.portray(), self.job, self.now)
        for pod in (*self.survey.coordinators, *self.survey.stale):
            if not pod.terminating:
                self.delete(pod, self.rest, "suspend")
        status = self.portray()
        if self.granted.waits:
            return phases.queued(status, self.job, self.granted.waits, self.now)
        return phases.suspended(status, self.job, self.now)

    # --- 7. running --------------------------------------------------------------------------------------------------

    def run(self) -> Workforce | None:
        """See to a coordinator and to workers."""
        for pod in self.survey.stale:
            if not pod.terminating:
                grace = None if pod.finished else FAILED_GRACE
                self.delete(pod, "of an earlier attempt", "attempt", grace)
        accepted = self.templates_accepted()
        if self.status.template_hash is None:
            return None
        retry_at = parse_time(self.status.failures.retry_time)
        waiting = retry_at is not None and self.now < retry_at
        if waiting and retry_at is not None:
            self.wakes.append(retry_at)
        here = [p for p in self.survey.workers if p.pod.live]
        if waiting and not here:
            return None
        self.keep_coordinator(accepted)
        self.scale()
        self.wake_for_stuck()
        if not accepted:
            return None  # what runs goes on as it is; what is lost meanwhile cannot be replaced
        workforce = plan_workforce(
            self.spec.desired,
            self.survey.workers,
            self.spec.worker_groups,
            self.survey.names,
            self.job.name,
            refused=bool(self.scene.trouble),
        )
        address = self.scene.service.address if self.scene.service is not None else ""
        refused = self.link is not None and self.link.refused  # such a coordinator refuses new workers as well
        if address and not waiting and not refused:
            grounds = self.grounds(len(workforce.create))
            for (group, ordinal), ground in zip(workforce.create, grounds, strict=True):
                manifest = resources.worker_pod(self.settled_job(), group, ordinal, address, self.settings)
                if self.scene.queue is not None:
                    confine(manifest, self.scene.queue, ground)
                resources.keep_off(manifest, self.leaving_nodes())
                self.actions.append(CreatePod(WORKER, manifest))
        for placed in workforce.withdraw:
            mended = placed.fate == "planned"
            self.delete(placed.pod, placed.reason if mended else "others have taken its place", "withdrawn")
        self.retire(workforce)
        made = [action.name for action in self.actions if isinstance(action, CreatePod) and action.role == WORKER]
        if made:
            self.notice(reasons.CREATED, f"creating {listed(made)}")
        return workforce

    def grounds(self, count: int) -> list[str]:
        """Whether each of so many new workers is made for on-demand or for spot nodes; empty where that is all one."""
        if not tells_apart(self.spec, self.scene.queue):
            return [""] * count
        return choose_grounds(count, self.spec, self.survey.workers)

    def leaving_nodes(self) -> Mapping[str, Node]:
        """Nodes from which workers are taken away."""
        taints = {*TERMINATION_TAINTS, *self.settings.extra_taints}
        return {
            name: node
            for name, node in (self.scene.nodes or {}).items()
            if not node.gone and (node.cordoned or taints.intersection(node.taints))
        }

    def templates_accepted(self) -> bool:
        """Whether the API server takes pods of these templates; without an answer, ask."""
        wanted, verdict = resources.templates_hash(self.job), self.scene.verdict
        if self.status.template_hash == wanted:
            return True
        if verdict is not None and verdict.template_hash == wanted:
            if not verdict.error:
                self.status = msgspec.structs.replace(self.status, template_hash=wanted)
                return True
            retry = verdict.at + self.settings.template_retry
            if self.now < retry:
                self.wakes.append(retry)
                return False
        pods = [
            resources.worker_pod(self.settled_job(), group, 0, "127.0.0.1", self.settings)
            for group in self.spec.worker_groups
        ]
        pods.append(resources.coordinator_pod(self.settled_job(), 0, self.settings))
        for pod in pods:
            pod["metadata"]["name"] += "-check"  # no worker is called so: the dry run meets no existing pod
        self.actions.append(CheckTemplates(tuple(pods), wanted))
        return False

    def keep_coordinator(self, accepted: bool) -> None:
        """Keep exactly one coordinator, with a service that leads to it."""
        here = [pod for pod in self.survey.coordinators if pod.live and not self.coordinator_lost(pod, accepted)]
        leads_to = self.scene.service.ordinal if self.scene.service is not None else None
        chosen = next((pod for pod in here if pod.ordinal == leads_to), here[0] if here else None)
        for pod in self.survey.coordinators:
            if pod.finished and chosen is None and self.now < pod.created + _COORDINATOR_AGAIN:
                self.wakes.append(pod.created + _COORDINATOR_AGAIN)
                return  # the kubelet has refused it, and would refuse the next one as quickly
            if pod is not chosen and not pod.terminating:
                self.delete(pod, "it is lost or not needed", "coordinator", FAILED_GRACE if pod not in here else None)
        if chosen is not None:
            ordinal = chosen.ordinal
        else:
            prefix = resources.coordinator_name(self.job)
            ordinal = next(n for n in range(len(self.survey.names) + 1) if f"{prefix}-{n}" not in self.survey.names)
            pod_manifest = resources.coordinator_pod(self.settled_job(), ordinal, self.settings)
            self.actions.append(CreatePod(COORDINATOR, pod_manifest))
            if self.survey.coordinators:
                self.notice(
                    reasons.COORDINATOR_LOST, "the coordinator is replaced; training goes on without it meanwhile"
                )
        if self.scene.service is None:
            self.actions.append(CreateService(resources.service(self.job, ordinal)))
        elif leads_to != ordinal:
            selector = resources.service_selector(self.job, ordinal)
            self.actions.append(PointService(resources.coordinator_name(self.job), selector))
        name = f"{resources.coordinator_name(self.job)}-{ordinal}"
        self.status = msgspec.structs.replace(self.status, coordinator=name)

    def coordinator_lost(self, pod: Pod, accepted: bool) -> bool:
        """Whether a coordinator that should run is of no use any more; a new template must be accepted for that."""
        if accepted and pod.template != resources.coordinator_hash(self.job):
            return True
        ours = self.link is not None and self.link.pod == pod.uid
        if ours and self.connected:
            return self.remote is not None and self.remote.phase == "stopped"
        nodes = self.scene.nodes
        if nodes is not None and pod.node:
            node = nodes.get(pod.node)
            if node is not None and node.gone:
                return True
            if node is not None and not node.ready and not node.shutting_down:
                # Right after an outage of the API server all nodes look lost: let it answer first.
                answer_by = self.link.since + self.settings.coordinator_patience if ours and self.link else self.now
                self.wakes.append(answer_by)
                return self.now >= answer_by
        if not ours or self.link is None or self.link.status is None or pod.phase != "Running":
            return False  # one that has never answered may be starting, or out of the operator's reach
        gives_up_at = self.link.since + self.settings.coordinator_patience
        self.wakes.append(gives_up_at)
        return self.now >= gives_up_at

    def wake_for_stuck(self) -> None:
        for placed in self.survey.workers:
            if placed.pod.live and placed.pod.unschedulable_since is not None:
                self.wakes.append(placed.pod.unschedulable_since + self.settings.unschedulable_patience)

    def retire(self, workforce: Workforce) -> None:
        """Relieve workers: fewer are wanted, or a successor is ready. Both by a drain, so that no step is repeated."""
        surplus = workforce.retire
        fewer = any(placed.fate != "planned" for placed in surplus)
        delay = self.spec.elasticity.scale_down_delay_seconds
        if fewer and delay:
            since = parse_time(self.status.scale_down_since) or self.now
            self.status = msgspec.structs.replace(self.status, scale_down_since=format_time(since))
            self.wakes.append(since + delay)
            if self.now < since + delay:
                return
        else:
            self.status = msgspec.structs.replace(self.status, scale_down_since=None)
        for placed in surplus:
            reason = placed.reason or f"{self.spec.desired} workers are wanted"
            self.drain([placed], reason)
            # One that the coordinator does not know has nothing to hand over.
            unknown = self.connected and placed.standing == "absent"
            self.delete(placed.pod, reason, "drain" if placed.fate == "planned" else "scale", 1.0 if unknown else None)

    def scale(self) -> None:
        if not self.connected or self.remote is None or self.remote.phase in ("done", "stopped", "failed"):
            return
        desired, minimum = self.spec.desired, min(self.spec.min_replicas, self.spec.most)
        if (self.remote.wanted, self.remote.minimum) != (desired, minimum):
            self.calls.append(TellScale(desired, minimum))

    # --- how it looks ------------------------------------------------------------------------------------------------


def _explain_failure(remote: Status) -> str:
    """The error, and the traceback's last lines."""
    message = remote.error or "the workers do not say why"
    lines = (remote.traceback or "").rstrip().splitlines()[-12:]
    return "\n".join([message, *lines]) if lines else message
