"""Whether this release works: what `helm test` runs, with the operator's image, account and nothing else.

No cluster DNS is needed: the kubelet writes the Service's address into the environment.
"""

import json
import os
import ssl
import sys
import time
import urllib.request
from pathlib import Path

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
LIMIT = 60.0
"""Seconds that a release which was just installed may take until it works."""
PAUSE = 1.0
"""Seconds between two tries."""


def get(url: str, *, token: str | None = None, context: ssl.SSLContext | None = None) -> str:
    """Fetch one address within five seconds.

    Raises:
        OSError: nobody answered, or with an error; it says where.
    """
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=5, context=context) as answer:
            return str(answer.read().decode())
    except OSError as error:
        raise OSError(f"{url}: {error}") from None


def ask(path: str) -> str:
    """Fetch one path of the API server, by the account of this pod."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    context = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    return get(f"https://{host}:{port}{path}", token=(ACCOUNT / "token").read_text().strip(), context=context)


def check() -> None:
    """Look at each part once.

    Raises:
        OSError: something does not answer.
        ValueError: something answers what it should not; a sentence that says what to do.
    """
    service = os.environ["SERVICE"]
    host = os.environ.get(service.upper().replace("-", "_") + "_SERVICE_HOST", service)
    host = f"[{host}]" if ":" in host else host
    get(f"http://{host}:8081/healthz")
    get(f"http://{host}:8081/readyz")
    shown = os.environ.get("METRICS_AUTHENTICATION") != "true"  # they are for others, and no token is sent in the clear
    if shown and "virtualflow_build_info" not in get(f"http://{host}:8080/metrics"):
        raise ValueError(f"the metrics of {service} are not the operator's: see what else its selector finds")
    served = json.loads(ask("/apis/virtualflow.dev/v1alpha1"))
    if "virtualflowjobs" not in {resource["name"] for resource in served["resources"]}:
        raise ValueError("the cluster does not serve virtualflowjobs: install the chart with crds.install=true")
    lease = json.loads(ask(f"/apis/coordination.k8s.io/v1/namespaces/{os.environ['NAMESPACE']}/leases/{service}"))
    if not lease["spec"].get("holderIdentity"):
        raise ValueError(f"no operator leads: see kubectl logs deployment/{service}")


def main() -> int:
    """Try until everything works or the time is over; the exit code."""
    end = time.monotonic() + LIMIT
    while True:
        try:
            check()
        except (OSError, ValueError) as error:
            late = time.monotonic() > end
            sys.stdout.write(f"{'failed' if late else 'not yet'}: {error}\n")
            if late:
                return 1
            time.sleep(PAUSE)
        else:
            sys.stdout.write("an operator leads and serves its metrics, and the cluster serves virtualflowjobs\n")
            return 0


if __name__ == "__main__":
    sys.exit(main())
