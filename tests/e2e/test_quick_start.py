"""What the README promises to somebody who begins: install, apply, and the same bits as on a laptop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from cluster import Object
from cluster_jobs import MANIFEST, Job
from installation import Installed


def test_from_helm_install_to_the_first_reconciled_job_is_a_minute_at_most(installed: Installed) -> None:
    if installed.first_job_seconds is None:
        pytest.skip("the operator was installed before; run without VIRTUALFLOW_E2E_KEEP to time its installation")
    print(f"from helm install to the first reconciled job: {installed.first_job_seconds:.1f} s")
    assert installed.first_job_seconds <= 60


def test_the_example_trains_to_the_digest_of_a_run_on_this_machine(
    installed: Installed, namespace: str, reference: Callable[[Object], str]
) -> None:
    job = Job(installed.cluster, namespace, "digits").create(MANIFEST)
    status = job.wait_phase("Complete", 240)
    assert status["digest"] == reference(yaml.safe_load(MANIFEST.read_text()))
    assert (status["step"], status["totalSteps"], status.get("repeatedSteps", 0)) == (600, 600, 0)
    assert job.condition("Complete")["status"] == "True"
    shown = job.kubectl("get", "vfj", "digits").splitlines()
    assert shown[0].split() == ["NAME", "PHASE", "WORKERS", "STEP", "LOSS", "AGE"]
    assert shown[1].split()[:2] == ["digits", "Complete"]
