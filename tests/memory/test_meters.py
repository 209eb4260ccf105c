"""Meters read back what is known to be held."""

import gc
import mmap
import os
import subprocess
import sys

import pytest
import torch

import mimose
from mimose import BudgetError
from mimose.memory.meters import AllocatorMeter, ProcessMeter, make_meter

MIB = 2**20
SLACK = 2 * MIB
CPU = torch.device("cpu")

on_linux = pytest.mark.skipif(
    not os.path.exists("/proc/self/clear_refs"),  # noqa: PTH110 (at import)
    reason="the kernel tells no resident set here",
)


def _touched(n_bytes):
    """Map memory and write to each page of it."""
    held = mmap.mmap(-1, n_bytes)
    for offset in range(0, n_bytes, mmap.PAGESIZE):
        held[offset] = 1
    return held


@on_linux
def test_a_known_allocation_is_read_back():
    """What is allocated and freed shows in the resident set, within the slack."""
    meter = ProcessMeter()
    before = meter.live_bytes()
    held = _touched(64 * MIB)
    assert abs(meter.live_bytes() - before - 64 * MIB) < SLACK
    held.close()
    assert abs(meter.live_bytes() - before) < SLACK


@on_linux
def test_tensors_are_read_back():
    """A freed tensor goes back to the system at once, also a middling one."""
    meter = ProcessMeter()
    torch.ones(MIB)
    before = meter.live_bytes()
    held = [torch.ones(64 * 1024) for _ in range(256)]
    # The heap may have room left from before the thresholds were set.
    assert 48 * MIB < meter.live_bytes() - before < 64 * MIB + SLACK
    full = meter.live_bytes()
    del held
    assert 48 * MIB < full - meter.live_bytes() < 64 * MIB + SLACK


@on_linux
def test_the_peak_stays_until_it_is_reset():
    """The high-water mark outlives what made it, and starts anew when told."""
    meter = ProcessMeter()
    meter.reset_peak()
    before = meter.peak_bytes()
    _touched(64 * MIB).close()
    assert abs(meter.peak_bytes() - before - 64 * MIB) < SLACK
    live, peak = meter.read()
    assert 0 < live < peak - 64 * MIB + SLACK
    meter.reset_peak()
    assert abs(meter.peak_bytes() - before) < SLACK


@on_linux
def test_freed_memory_that_stays_resident_is_given_back():
    """Small blocks below living ones stay resident until the meter settles."""
    meter = ProcessMeter()
    meter.settled_bytes(0)
    blocks = [torch.ones(8192) for _ in range(640)]  # 32 KiB each
    kept = blocks[15::16]
    del blocks
    live = meter.live_bytes()
    assert live == meter.settled_bytes(64 * MIB)
    settled = meter.settled_bytes(0)  # but where a step is to be measured
    assert live - 20 * MIB - SLACK < settled < live - 10 * MIB
    assert abs(settled - meter.live_bytes()) < SLACK
    assert 40 * 8192 == sum(float(block.sum()) for block in kept)


def _run(code, environment=None):
    """Return what a program prints."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
    )
    return done.stdout


_TRAINED_BEFORE = """
import torch
from mimose.memory.meters import ProcessMeter

def ones(n_bytes):
    return torch.ones(n_bytes // 4)

MIB = 2**20
first = ones(30 * MIB)
del first  # glibc's thresholds rise to what was freed
blocks = [ones(n) for _ in range(4) for n in (20 * MIB, 4096)]
del blocks[::2]  # four holes, pinned by the small blocks behind them
meter = ProcessMeter()
before = meter.settled_bytes(0)
block = ones(16 * MIB)
grown = meter.live_bytes() - before
del block
left = meter.live_bytes() - before
print(grown / MIB, left / MIB)
"""


@on_linux
def test_holes_from_before_are_not_used():
    """In a process that has trained already, large blocks still come and go."""
    grown, left = map(float, _run(_TRAINED_BEFORE).split())
    assert 15 <= grown <= 18
    assert left <= 2


@pytest.mark.gpu
def test_the_allocator_is_read_back():
    """A known allocation on the accelerator shows exactly, and its peak stays."""
    device = torch.accelerator.current_accelerator()
    meter = AllocatorMeter(device)
    before = meter.live_bytes()
    held = torch.ones(MIB, device=device)
    assert 4 * MIB == meter.live_bytes() - before
    del held
    assert 0 == meter.live_bytes() - before
    assert 4 * MIB <= meter.peak_bytes() - before
    meter.reset_peak()
    assert before == meter.peak_bytes()


@pytest.mark.parametrize("meter", [5, ProcessMeter, object(), "scales"])
def test_what_is_no_meter_is_refused(meter):
    """Numbers, classes, other objects and unknown names."""
    with pytest.raises(BudgetError, match=r"mimose\.memory\.meters\.Meter"):
        make_meter(meter, CPU)


@on_linux
def test_attaching_again_and_again_opens_no_files(toys):
    """A session that was detached and dropped holds nothing open."""
    model = toys.chain(2)
    mimose.attach(model, "1TiB").detach()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a count)
    for _ in range(10):
        mimose.attach(model, "1TiB").detach()
    gc.collect()
    assert before == len(os.listdir("/proc/self/fd"))  # noqa: PTH208
