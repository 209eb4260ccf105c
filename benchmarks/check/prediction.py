"""How far growth in requested bytes is from what was predicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.check.line import Line, at_most, judged, told
from benchmarks.check.training import (
    DeviceLoop,
    Subject,
    jumping,
    measure_room,
    subjects,
)
from benchmarks.proofs.numbers import percent, quantile, worst
from mimose.records import StepRecord
from mimose.session import attach

_STEPS = 60
_SHARE = 0.6
_ERROR_BAR, _LOW_BAR = 0.02, 0.01
"""Those of the proof of predictions."""
_FIRST = 10
"""Planned steps that are told apart: what kept layers need is learned in them."""


def in_single(device: torch.device) -> Iterator[Line]:
    """Train every model there is in fp32."""
    for subject in subjects():
        yield from _errors(device, subject, None)


def under_autocast(device: torch.device) -> Iterator[Line]:
    """Train in bf16."""
    yield from _errors(device, subjects()[0], torch.bfloat16)


CHECKS = (in_single, under_autocast)


def errors_told(name: str, records: Sequence[StepRecord]) -> Iterator[Line]:
    """Judge the errors of planned steps."""
    planned = [record for record in records if record.phase == "plan"]
    errors = [r.prediction_error for r in planned if r.prediction_error is not None]
    least = len(records) // 2
    seen = len(errors)
    yield judged(f"{name}: planned steps", f"≥ {least}", seen, seen >= least)
    first, later = errors[:_FIRST], errors[_FIRST:]
    yield told(
        f"{name}: error, worst of the first {_FIRST}", percent(worst(_sizes(first)))
    )
    what = f"{name}: later error, p99 (p50 {percent(quantile(_sizes(later), 0.5))})"
    yield at_most(what, _ERROR_BAR, quantile(_sizes(later), 0.99), "{:.2%}")
    low = quantile((max(0.0, error) for error in later), 0.99)
    yield at_most(f"{name}: later too low, p99", _LOW_BAR, low, "{:.2%}")


def _sizes(errors: Sequence[float]) -> list[float]:
    return [abs(error) for error in errors]


def _errors(
    device: torch.device, subject: Subject, dtype: torch.dtype | None
) -> Iterator[Line]:
    training = DeviceLoop(device, subject, dtype)
    budget_bytes = measure_room(training).budget(_SHARE)
    with attach(training.model, budget_bytes, meter=training.meter) as session:
        list(training.train(jumping(training.scale, _STEPS)))
    kind = "fp32" if dtype is None else "bf16 autocast"
    yield from errors_told(f"{subject.name}, {kind}", session.records)
