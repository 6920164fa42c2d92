"""The training of a campaign: tiny, and it writes down each step that it has seen, and whether it led then."""

import hashlib
import json
import os
import struct
import sys
import time
from pathlib import Path

import torch

import virtualflow as vf
from faults.injected import hang_if_told

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
name = os.environ.get("VIRTUALFLOW_WORKER", "alone")
log = os.open(Path(os.environ["CAMPAIGN_LOG"]) / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
news = int(os.environ.get("CAMPAIGN_NEWS", "-1"))
steps, pause = int(sys.argv[1]), float(sys.argv[2])


def note(**values: object) -> None:
    """A line about the step that is complete. Whether this worker leads is asked after the clock."""
    line = {"generation": run.fence, "step": run.completed_steps, "asked": time.monotonic(), "leader": run.leader}
    os.write(log, (json.dumps({**line, **values}) + "\n").encode())


with vf.elastic(model, optimizer, data, batch_size=16, steps=steps, virtual_nodes=4) as run:
    for step in run:
        for x, y in step:
            hang_if_told()
            torch.nn.functional.mse_loss(model(x), y).backward()
        at = time.monotonic()
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        note(digest=hashlib.sha256(weights).hexdigest(), at=at)
        if news >= 0:
            os.write(news, struct.pack("=qd", run.completed_steps, at))
        if pause:
            time.sleep(pause)  # where it may be stopped, and wake up when others have gone on
            note()
