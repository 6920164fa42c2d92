"""Each pod of a job has an identity, replaced in time; a job in plaintext has none. Pure.

The certificates of all pods of a job are replaced together. When, is in the job's status, so an operator that has just
started replaces none too early. A pod that is made meanwhile has a later one, and gets its next one with the others.
"""

from __future__ import annotations

from collections.abc import Iterable

from virtualflow_operator.api import CertificateStatus, Job, JobStatus, Pod, format_time, identity_prefix, parse_time
from virtualflow_operator.jobs.actions import Draft, IssueIdentity
from virtualflow_operator.jobs.manifests import hash_of
from virtualflow_operator.jobs.scene import JobFacts
from virtualflow_operator.settings import DELIVERY, OperatorSettings


def in_plaintext(facts: JobFacts) -> bool:
    """Whether the job does without certificates: as it has begun, else as its user wants it."""
    job = facts.job
    if job.status.plaintext is not None:
        return job.status.plaintext
    if _holders(facts):
        return False
    # An operator that has a coordinator and says nothing of it knew of no certificates. A pod without any says nothing:
    # anybody may have made it, so that the job begins in plaintext.
    return job.status.coordinator is not None or facts.spec.security.plaintext


def refuse_plaintext(facts: JobFacts) -> str:
    """Why the job does not begin, in a sentence, as its user wants what the cluster does not allow; else empty."""
    begun = facts.job.status.plaintext is not None or facts.job.status.coordinator is not None
    if begun or facts.settings.allow_plaintext or not facts.spec.security.plaintext:
        return ""
    return (
        "spec.security.plaintext is not allowed here: remove it, or have whoever runs the cluster set the chart's "
        "value jobs.allowPlaintext"
    )


def identity_name(job: Job, pod: str, now: float) -> str:
    """The name of the Secret with the identity of a pod that is made now; no other pod of that name has the same."""
    return f"{identity_prefix(pod)}{hash_of([job.uid, pod, now])[:8]}"


def name_identity(facts: JobFacts, pod: str) -> str:
    """The Secret of the identity of a pod that is to be made; empty: it gets none."""
    return "" if in_plaintext(facts) else identity_name(facts.job, pod, facts.now)


def issue_identities(facts: JobFacts, draft: Draft) -> None:
    """See to it that each pod has an identity, and a new one in time."""
    pods = _holders(facts)
    if not pods:
        return
    issued, known = facts.scene.issued, draft.status.certificates
    renewal = (parse_time(known.renewal_time) or 0.0) if known is not None else 0.0
    due = known is None or facts.now >= renewal or known.keys != facts.settings.key_ids
    # What this process has issued is by the present keys: it is replaced only once it is old.
    aged = facts.now - facts.settings.certificates.renew_after
    oldest = max(renewal, aged) if facts.now >= renewal else aged
    lacking = [pod for pod in pods if _lacks(pod, issued.get(pod.uid), oldest if due else None)]
    for pod in lacking:
        draft.actions.append(IssueIdentity(pod, renew=due))
    if due and not lacking:
        first = min(issued[pod.uid] for pod in pods)
        known = describe_certificates(first, facts.settings)
        draft.amend(certificates=known)
    if known is not None:
        draft.wake(parse_time(known.renewal_time))
        draft.wake(_late_at(known))


def restore_identities(facts: JobFacts, draft: Draft, pods: Iterable[Pod]) -> None:
    """Make the identities of pods again whose Secrets may be gone; one that is there stays."""
    given = {action.pod.uid for action in draft.actions if isinstance(action, IssueIdentity)}
    wanted = {pod.uid for pod in pods} - given
    draft.actions += [IssueIdentity(pod, renew=False) for pod in _holders(facts) if pod.uid in wanted]


def _holders(facts: JobFacts) -> list[Pod]:
    return [pod for pod in facts.scene.pods if pod.identity and pod.owner == facts.job.uid and pod.live]


def _late_at(known: CertificateStatus) -> float | None:
    """When certificates that are not replaced are late; in time they take a moment."""
    renewal = parse_time(known.renewal_time)
    return None if renewal is None else renewal + DELIVERY


def describe_late_renewal(facts: JobFacts, status: JobStatus) -> str:
    """What is the matter with certificates that are to be replaced for some minutes, in sentences; else empty."""
    known = status.certificates
    late_at = None if known is None else _late_at(known)
    # Without a failure nobody has tried yet: the operator has just started.
    why = facts.scene.failure
    if known is None or late_at is None or facts.now < late_at or not why or not _holders(facts):
        return ""
    return (
        f"Since {known.renewal_time} the pods have got no new certificates: {why.rstrip('.')}. The first of the "
        f"present ones expires at {known.expiry_time}; then pods refuse each other, and nothing replaces a lost one."
    )


def _lacks(pod: Pod, issued: float | None, oldest: float | None) -> bool:
    """Whether a pod needs an identity.

    Args:
        issued: when this process has given it one; ``None``: it has not.
        oldest: when those were issued that are no longer new enough, all before; ``None``: none is to be replaced.
    """
    if issued is None:
        return oldest is not None or pod.phase == "Pending"  # one that has begun has one, by whichever operator
    return oldest is not None and issued < oldest


def describe_certificates(issued: float, settings: OperatorSettings) -> CertificateStatus:
    """What a status says of certificates, the first of which was issued then."""
    spans = settings.certificates
    return CertificateStatus(
        renewal_time=format_time(issued + spans.renew_after),
        expiry_time=format_time(issued + spans.lifetime),
        keys=settings.key_ids,
    )
