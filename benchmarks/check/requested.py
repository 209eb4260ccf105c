"""How far allocated bytes are from what is asked for, once many blocks were cut."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.check.line import Line, told
from benchmarks.check.training import DeviceLoop, jumping
from benchmarks.proofs.numbers import mebibytes
from mimose.measure.meters.usage import read_usage

_STEPS = 30


def allocated_over_requested(device: torch.device) -> Iterator[Line]:
    """Compare allocated and requested bytes of plain training."""
    training = DeviceLoop(device)
    peaks, levels = [], []
    for _ in training.train(jumping(training.scale, _STEPS)):
        usage = read_usage(device.index)
        peaks.append(usage.allocated_peak_bytes - usage.requested_peak_bytes)
        levels.append(usage.allocated_bytes - usage.requested_bytes)
    what = f"allocated minus requested, {_STEPS} jumping lengths"
    yield told(f"{what}: peaks, at most", f"{mebibytes(max(peaks))} MiB")
    yield told(f"{what}: between steps, at most", f"{mebibytes(max(levels))} MiB")


CHECKS = (allocated_over_requested,)
