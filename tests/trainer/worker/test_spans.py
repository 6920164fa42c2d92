"""A profiler shows the parts of a step under their names; without one they cost one look each."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from broken_collectives import regression
from elastic_jobs import trained
from torch.profiler import ProfilerActivity, profile

import virtualflow as vf

STEPS, VIRTUAL_NODES = 3, 6


def train() -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with vf.elastic(model, optimizer, regression(), batch_size=12, virtual_nodes=VIRTUAL_NODES, steps=STEPS) as run:
        for step in run:
            for x, y in step:
                F.mse_loss(model(x).squeeze(1), y).backward()
    return trained(run, model, optimizer).digest


def test_a_profiler_shows_virtual_nodes_exchanges_updates_and_commits() -> None:
    reference = train()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert train() == reference
    events = [event for event in profiler.events() if event.name.startswith("virtualflow: ")]
    assert Counter(event.name.removeprefix("virtualflow: ") for event in events) == {
        "virtual node": STEPS * VIRTUAL_NODES,
        "exchange": STEPS,
        "update": STEPS,
        "commit": STEPS,
    }
    for event in events:
        within = {child.name for child in event.cpu_children}
        if event.name == "virtualflow: virtual node":
            assert "aten::linear" in within
        if event.name == "virtualflow: commit":
            assert "virtualflow: update" in within


def test_without_a_profiler_no_span_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    train()
