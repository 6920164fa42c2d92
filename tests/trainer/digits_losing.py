"""A script of digits, of which one process is killed once: ``digits_losing.py MARKER SCRIPT ...``.

It is the second process of the second worker, as soon as step 18 is made. The marker says which one that was.
"""

import os
import runpy
import signal
import sys
from pathlib import Path

from torch.optim import lr_scheduler

EXAMPLES = Path(__file__).parents[2] / "examples"
MARKER = Path(sys.argv.pop(1))
LOST_AFTER = 18


class Losing(lr_scheduler.CosineAnnealingLR):
    """The script's schedule, which every process steps once a step."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        victim = (os.environ.get("VIRTUALFLOW_WORKER"), os.environ.get("LOCAL_RANK")) == ("worker-1", "1")
        if victim and self.last_epoch == LOST_AFTER and not MARKER.exists():
            MARKER.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    del sys.argv[0]
    lr_scheduler.CosineAnnealingLR = Losing  # type: ignore[misc]
    sys.path.insert(0, str(EXAMPLES))
    runpy.run_path(sys.argv[0], run_name="__main__")
