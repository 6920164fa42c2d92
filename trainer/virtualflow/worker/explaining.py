"""Tells ``virtualflow explain`` how the gradients of a step travelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from torch import nn

from virtualflow.protocol.exchange_report import BucketReport, ExchangeReport, write_report
from virtualflow.reduction import Scheduled
from virtualflow.step import Update


def write_explanation(path: Path, model: nn.Module, update: Update, step: int) -> None:
    """Write down how the exchange of the step that was just committed went; the next one overwrites it."""
    terms, schedule = update.reducer.terms, update.reducer.schedule
    names = [*(name for name, _ in model.named_parameters()), *update.sync.settled.averaged]
    rows = list(schedule[0].shape.rows) if schedule else [1]
    buckets = [_describe(one, names) for one in schedule]
    write_report(path, ExchangeReport(step, rows, terms.measured, asdict(terms.network), buckets))


def _describe(one: Scheduled, names: Sequence[str]) -> BucketReport:
    choice = one.choice
    return BucketReport(
        tensors=[names[place] for place in one.bucket.places],
        bytes=one.shape.size,
        dtype=str(one.bucket.dtype).removeprefix("torch."),
        program=str(choice.program),
        way=str(choice.route.way),
        overlapped=choice.route.overlapped,
        reason=choice.reason,
        predicted=dict(choice.predicted),
        refused=dict(choice.refused),
    )
