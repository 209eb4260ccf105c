"""How fast the machine runs just now, by a little work that is always the same.

A shared CPU changes its speed within seconds, by more than most methods differ, and
alternating turns are too long to meet the same speed. Work that is timed right before
and after a step has met it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from mimose.bench.device import SIM, is_cpu, kind_of

_SIDE, _PRODUCTS = 96, 20
_ELEMENTS, _SWEEPS = 200_000, 4
_CALLS = 150


def keeps_no_pace(device: str) -> bool:
    """Tell a device whose speed depends on what else a CPU does."""
    return is_cpu(device) or kind_of(device) == SIM


def pace_of(device: torch.device) -> Callable[[], float]:
    """Return what tells the seconds of the same little work, now.

    On a CPU, which the simulated accelerator computes on as well: some products, some
    passes over a larger tensor and many small calls, together a few milliseconds. An
    accelerator of its own keeps its speed; there it is 1 always.
    """
    if not keeps_no_pace(device.type):
        return lambda: 1.0
    matrix, product = torch.ones(_SIDE, _SIDE), torch.ones(_SIDE, _SIDE)
    long, raised = torch.ones(_ELEMENTS), torch.ones(_ELEMENTS)
    row, added = torch.ones(_SIDE), torch.ones(_SIDE)

    # Nothing is allocated: what that costs depends on how a method left the heap.
    def pace() -> float:
        began = time.perf_counter()
        for _ in range(_PRODUCTS):
            torch.matmul(matrix, matrix, out=product)
            product.tanh_()
        for _ in range(_SWEEPS):
            torch.mul(long, 1.01, out=raised)
            raised.add_(1.0)
        for _ in range(_CALLS):
            torch.add(row, 1.0, out=added)
        return time.perf_counter() - began

    pace()
    return pace
