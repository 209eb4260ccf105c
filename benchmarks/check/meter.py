"""Whether known allocations are read back to the byte."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.check.line import Line, equal, judged
from mimose.measure.meters import AllocatorMeter

_SIZES = {"64 MiB": 2**26, "1000 bytes": 1000}


def level(device: torch.device) -> Iterator[Line]:
    """Allocate, free, and read requested bytes in between."""
    meter = AllocatorMeter(device)
    for name, size in _SIZES.items():
        before = meter.live_bytes()
        meter.reset_peak()
        held = torch.empty(size, dtype=torch.uint8, device=device)
        yield equal(f"{name}: requested", size, meter.live_bytes() - before)
        del held
        yield equal(f"{name}: freed", 0, meter.live_bytes() - before)
        yield equal(f"{name}: peak", size, meter.peak_bytes() - before)
        meter.reset_peak()
        yield equal(f"{name}: peak after a reset", 0, meter.peak_bytes() - before)


def beside(device: torch.device) -> Iterator[Line]:
    """Read allocated and reserved bytes of an allocation, and all given back."""
    meter = AllocatorMeter(device)
    meter.give_back()
    before = meter.usage()
    held = torch.empty(1000, dtype=torch.uint8, device=device)
    blocks = meter.usage().allocated_bytes - before.allocated_bytes
    yield equal("1000 bytes: the block is a multiple of 512", 1024, blocks)
    del held
    held = torch.empty(2**26, dtype=torch.uint8, device=device)
    taken = meter.usage().reserved_bytes - before.reserved_bytes
    yield judged("64 MiB: reserved", f"≥ {2**26}", taken, taken >= 2**26)
    del held
    meter.give_back()
    left = meter.usage().reserved_bytes - before.reserved_bytes
    yield equal("free blocks given back: reserved", 0, left)


CHECKS = (level, beside)
