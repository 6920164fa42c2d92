"""The example of digits as it is, but worker-3 begins when the job is about to go on, or goes on, with worker-2."""

import json
import os
import runpy
import sys
import time
import urllib.request
from pathlib import Path

from virtualflow.protocol.settings import ENV_COORDINATOR, ENV_TOKEN, ENV_WORKER

EXAMPLES = Path(__file__).parents[2] / "examples"


def has_entered(worker: str) -> bool:
    """Whether a generation with that worker stands or is ready to be entered."""
    request = urllib.request.Request(
        f"{os.environ[ENV_COORDINATOR]}/v1/status", headers={"Authorization": f"Bearer {os.environ[ENV_TOKEN]}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:
        status = json.load(answer)
    carrying = any(w["worker"] == worker and w["first"] < w["last"] for w in status["workers"])
    return carrying or (status["proposed"] is not None and status["prepared"])


if __name__ == "__main__":
    while os.environ.get(ENV_WORKER) == "worker-3" and not has_entered("worker-2"):
        time.sleep(0.05)
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
