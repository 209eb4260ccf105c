"""Meters read back what is known to be held."""

import logging
import mmap
import os
import subprocess
import sys

import pytest
import torch

import mimose
from mimose import BudgetError
from mimose.measure.meters import (
    AllocatorMeter,
    PredictionMeter,
    ProcessMeter,
    make_meter,
)

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
    meter.reset_peak()
    assert abs(meter.peak_bytes() - before) < SLACK


@on_linux
def test_the_rough_peak_is_never_far_off():
    """The fast reading follows the exact one."""
    meter = ProcessMeter()
    meter.reset_peak()
    held = _touched(64 * MIB)
    assert abs(meter.rough_peak_bytes() - meter.peak_bytes()) < SLACK
    held.close()


@on_linux
def test_one_reading_tells_all():
    """Live, peak and mapped files come together and fit each other."""
    meter = ProcessMeter()
    held = _touched(8 * MIB)
    held.close()
    live, peak, files = meter.read()
    assert 0 < files < live
    assert live + 8 * MIB - SLACK < peak
    assert abs(live - meter.live_bytes()) < SLACK


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
    meter._next_trim = float("inf")
    assert live == meter.settled_bytes(1)  # the last one took too long to do another
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
from mimose.measure.meters import ProcessMeter

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


_TRAINING = """
import re
import torch
from mimose.measure.meters import ProcessMeter

MIB = 2**20
meter = ProcessMeter()
pins = []
for _ in range(60):
    small = [torch.ones(4096) for _ in range(640)]  # 16 KiB each: 10 MiB of gradients
    pins.append(small[320])
    del small  # a hole, as large as they were, in which large blocks would go
    before = meter.settled_bytes(0)
    block = torch.ones(8 * MIB // 4)
    grown = meter.live_bytes() - before
    del block
    print(grown / MIB, (meter.live_bytes() - before) / MIB)
print(int(re.search(r"VmData:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024)
"""


@on_linux
def test_holes_of_freed_gradients_are_not_used():
    """Large blocks come and go whatever was freed before; holes are bounded."""
    lines = _run(_TRAINING).splitlines()
    readings = [list(map(float, line.split())) for line in lines[:-1]]
    assert len(readings) == 60
    for grown, left in readings[:20]:
        assert 7.5 <= grown <= 9
        assert left <= 1
    assert float(lines[-1]) < 600  # of addresses


_WITHOUT_MAPPING = """
import torch
from mimose.measure.meters import ProcessMeter

blocks = [torch.ones(4096) for _ in range(2000)]
pins = blocks[::100]
del blocks
meter = ProcessMeter()
print(sum(1 for _ in meter._filler._blocks))
"""


@on_linux
def test_an_allocator_that_never_maps_is_left_alone():
    """The heap is not made to grow by what is taken from it."""
    environment = {**os.environ, "MALLOC_MMAP_MAX_": "0"}
    assert int(_run(_WITHOUT_MAPPING, environment)) < 100


@on_linux
def test_holes_are_left_when_the_session_ends():
    """To whoever needs memory then."""
    meter = ProcessMeter()
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    with mimose.attach(model, "1TiB", meter=meter, units=[torch.nn.Linear]):
        meter.clean_up()
    assert [] == meter._filler._blocks


@on_linux
def test_files_are_closed():
    """Meters that are gone hold no file open, and none complains at exit."""
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a count)
    for _ in range(20):
        ProcessMeter()
    assert before == len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    code = "from mimose.measure.meters import ProcessMeter; meter = ProcessMeter()"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert "" == done.stderr


@on_linux
def test_the_machine_tells_its_memory():
    """A fraction of the budget has something to be a fraction of."""
    total = ProcessMeter().total_bytes()
    assert 2**28 < total <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@on_linux
def test_a_limit_on_the_group_counts(monkeypatch, tmp_path):
    """Where the cgroup allows less than the machine has, that is the total."""
    from mimose.measure.meters import process

    monkeypatch.setattr(process, "_cgroup_limits", lambda: [123 * MIB])
    assert 123 * MIB == ProcessMeter().total_bytes()


def test_prediction_meter_knows_no_peak():
    """It reads what is held, and says that peaks are not to be had."""
    meter = PredictionMeter(CPU)
    assert not meter.reads_peak
    live, peak, files = meter.read()
    assert live == peak
    assert 0 == files
    meter.reset_peak()
    assert abs(live - meter.peak_bytes()) < SLACK
    assert abs(live - meter.rough_peak_bytes()) < SLACK


def test_prediction_meter_without_a_kernel_to_ask(monkeypatch):
    """Where not even what is held can be read, it is 0 throughout."""

    def refuse(*_, **__):
        raise OSError

    monkeypatch.setattr("builtins.open", refuse)
    assert 0 == PredictionMeter(CPU).live_bytes()


def test_meters_by_name():
    """Each name makes its meter; an object is taken as it is."""
    own = PredictionMeter(CPU)
    assert own is make_meter(own, CPU)
    assert isinstance(make_meter("prediction", CPU), PredictionMeter)
    assert isinstance(make_meter("allocator", torch.device("cuda", 0)), AllocatorMeter)
    assert isinstance(make_meter(None, torch.device("cuda", 0)), AllocatorMeter)


@on_linux
def test_the_process_meter_is_the_default_on_a_cpu():
    """On Linux the resident set is read unless told otherwise."""
    assert isinstance(make_meter(None, CPU), ProcessMeter)
    assert isinstance(make_meter("process", CPU), ProcessMeter)


def test_an_unknown_meter_is_refused():
    """The error names what there is."""
    with pytest.raises(BudgetError, match=r"'rss' is unknown.*'process'"):
        make_meter("rss", CPU)


def test_a_system_that_tells_no_peak_is_warned_about(monkeypatch, caplog):
    """Without the kernel's files planning goes on by prediction, with one warning."""

    def refuse(*_, **__):
        msg = "no such file"
        raise OSError(msg)

    monkeypatch.setattr("mimose.measure.meters.process.os.open", refuse)
    with caplog.at_level(logging.WARNING, logger="mimose"):
        meter = make_meter(None, CPU)
    assert isinstance(meter, PredictionMeter)
    assert 1 == len(caplog.records)
    assert "cannot be read here (OSError: no such file)" in caplog.text


class _OwnMeter:
    """The least that a user's meter has to do."""

    def __init__(self):
        self.resets = 0

    def live_bytes(self):
        return 5

    def peak_bytes(self):
        return 7

    def reset_peak(self):
        self.resets += 1


def test_a_meter_of_ones_own_needs_three_methods():
    """What it does not do itself has a default; what it does is used."""
    own = _OwnMeter()
    meter = make_meter(own, CPU)
    meter.reset_peak()
    assert 1 == own.resets
    assert (5, 7, 0) == meter.read()
    assert 5 == meter.settled_bytes(0)
    assert 7 == meter.rough_peak_bytes()
    assert meter.total_bytes() is None
    assert meter.reads_peak
    own.total_bytes = lambda: 99
    assert 99 == make_meter(own, CPU).total_bytes()


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
    """Numbers, classes, objects without the methods and unknown names are told so."""
    with pytest.raises(BudgetError, match="live_bytes, peak_bytes, reset_peak"):
        make_meter(meter, CPU)


@on_linux
def test_a_fork_reads_its_own_memory():
    """The files of the parent are closed in the child, and its own are opened."""
    meter = ProcessMeter()
    before = meter.live_bytes()
    child = os.fork()
    if child == 0:
        first = meter.live_bytes()
        block = bytearray(b"x") * (64 * MIB)
        grown = meter.live_bytes() - first
        os._exit(0 if grown > 48 * MIB and block else 1)
    assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert abs(meter.live_bytes() - before) < 16 * MIB
