"""The example of digits with a training thread that hangs, once in the job: ``digits_hanging.py HOW MARKER ...``.

MARKER is a file that whoever hangs makes first. HOW is ``lock`` (never given back), ``dataset`` (sleeps for ever),
``loader`` (a loader process is stopped), ``between`` (code after a step), or ``joiner`` (its warm-up; not once, but in
every process of worker-2).
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

from torch import Tensor, nn
from torch.utils.data import Dataset

import virtualflow as vf
from virtualflow.protocol.settings import ENV_WORKER

EXAMPLES = Path(__file__).parents[2] / "examples"
HOW, MARKER = sys.argv[1], Path(sys.argv[2])
AT = 5
"""The step."""


def first_time() -> bool:
    """Whether nobody has hung yet."""
    try:
        MARKER.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def hang() -> None:
    """Take a lock that is not given back."""
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Samples(Dataset):
    """Those of another dataset; one of them cannot be had, once."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset, self.taken = dataset, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.taken += 1
        if self.taken > AT * 64 and HOW in ("dataset", "loader") and first_time():
            if HOW == "loader":
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)
        return self.dataset[index]


def watch(model: nn.Module, *_: object) -> None:
    """Hang in a forward pass."""
    model.passes = getattr(model, "passes", 0) + 1
    joins = os.environ.get(ENV_WORKER) == "worker-2"
    if (HOW == "joiner" and joins) or (HOW == "lock" and model.passes == 4 * AT and first_time()):
        hang()


def elastic(model: nn.Module, optimizer: object, dataset: Dataset, **options: object) -> object:
    """``vf.elastic`` with what hangs."""
    model.register_forward_pre_hook(watch)
    if HOW in ("dataset", "loader"):
        dataset = Samples(dataset)
    if HOW == "loader":
        options["num_workers"] = 1
    return vf_elastic(model, optimizer, dataset, **options)


def steps(run: vf.Run) -> object:
    """The steps, and code after each."""
    for step in run_steps(run):
        yield step
        if HOW == "between" and step.number == AT and first_time():
            hang()


if __name__ == "__main__":
    vf_elastic, run_steps = vf.elastic, vf.Run.__iter__
    vf.elastic, vf.Run.__iter__ = elastic, steps
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[1:3] = []
    runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
