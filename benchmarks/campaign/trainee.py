"""The training of a campaign: tiny, and it writes down each step that it has seen."""

import hashlib
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch

import virtualflow as vf

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
name = os.environ.get("VIRTUALFLOW_WORKER", "alone")
log = os.open(Path(os.environ["CAMPAIGN_LOG"]) / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
hang = os.environ.get("CAMPAIGN_HANG")

with vf.elastic(model, optimizer, data, batch_size=16, steps=int(sys.argv[1]), virtual_nodes=4) as run:
    for step in run:
        for x, y in step:
            if hang and Path(hang).exists():
                threading.Event().wait()
            torch.nn.functional.mse_loss(model(x), y).backward()
        weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
        state = run.context.session.state
        line = {
            "generation": [state.plan.generation.incarnation, state.plan.generation.counter] if state.plan else [0, 0],
            "step": run.completed_steps,
            "leader": run.leader,
            "digest": hashlib.sha256(weights).hexdigest(),
            "at": time.monotonic(),
        }
        os.write(log, (json.dumps(line) + "\n").encode())
        time.sleep(float(sys.argv[2]))
