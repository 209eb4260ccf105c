"""What a look at the allocator costs the host, in time of its thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.check.line import Line, judged, told
from mimose.measure.meters import AllocatorMeter, usage

_TIMES = 500
_ROUNDS = 5


def costs(device: torch.device) -> Iterator[Line]:
    """Time readings and a reset."""
    index = device.index
    meter = AllocatorMeter(device)
    nested = _micros(lambda: usage.read_usage(index))
    flat = _micros(lambda: torch.accelerator.memory_stats(index))
    yield judged(
        "one nested reading",
        "cheaper than a flattened one",
        f"{nested:.1f} µs, flattened {flat:.1f} µs",
        nested < flat,
    )
    one = _micros(lambda: torch.accelerator.memory_allocated(index))
    yield told("torch.accelerator.memory_allocated", f"{one:.1f} µs")
    yield told("a reset of the peaks", f"{_micros(meter.reset_peak):.1f} µs")


CHECKS = (costs,)


def _micros(call: Callable[[], object]) -> float:
    """Return the best round's time a call."""
    call()
    return min(_round(call) for _ in range(_ROUNDS)) * 1e6


def _round(call: Callable[[], object]) -> float:
    began = time.thread_time()
    for _ in range(_TIMES):
        call()
    return (time.thread_time() - began) / _TIMES
