"""The example of digits on a device that is wrong once: ``digits_flipping.py MARKER ...``; an empty one: never.

In the first step after the tenth in which the second of three workers computes what another one computes as well, a bit
flips in each of its gradients of one weight. MARKER is a file that it makes then.
"""

import os
import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import virtualflow as vf
from virtualflow.protocol.settings import ENV_WORKER
from virtualflow.step.spot_checks import choose_check

EXAMPLES = Path(__file__).parents[2] / "examples"
MARKER = sys.argv[1]
HELD = [range(2), range(2, 4), range(4, 6)]
present = {"step": 0}


def checked(step: int) -> bool:
    """Whether the second worker's gradients are compared in this step."""
    check = choose_check(0, step, 6, 1.0, HELD)
    return check is not None and 1 in check.pair


AT = next(step for step in range(11, 40) if checked(step))
flips = bool(MARKER) and os.environ.get(ENV_WORKER) == "worker-1" and not Path(MARKER).exists()


def flip(gradient: Tensor) -> Tensor:
    """Another gradient, in that step."""
    if not flips or present["step"] != AT:
        return gradient
    Path(MARKER).touch()
    changed = gradient.clone()
    changed.view(torch.int32).view(-1)[7] ^= 1 << 5
    return changed


def elastic(model: nn.Module, optimizer: object, dataset: object, **options: object) -> object:
    """``vf.elastic`` with what flips."""
    next(model.parameters()).register_hook(flip)
    return vf_elastic(model, optimizer, dataset, **options)


def steps(run: vf.Run) -> object:
    """The steps, and which one is present."""
    for step in run_steps(run):
        present["step"] = step.number
        yield step


if __name__ == "__main__":
    vf_elastic, run_steps = vf.elastic, vf.Run.__iter__
    vf.elastic, vf.Run.__iter__ = elastic, steps
    sys.path.insert(0, str(EXAMPLES))
    sys.argv[1:2] = []
    runpy.run_path(str(EXAMPLES / "digits.py"), run_name="__main__")
