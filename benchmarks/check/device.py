"""Checks what is installed, what calls of the device take, and what makes it wait."""

from __future__ import annotations

import os
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.check import Line, equal, impossible, judged, told
from benchmarks.check.training import DeviceLoop, scale_of
from benchmarks.proofs import common
from benchmarks.proofs.numbers import MIB
from mimose.bench.zoo import Batch, moved
from mimose.memory.wall import has_expandable_segments
from mimose.session import attach
from mimose.sim.hollow import CARDS

_LAUNCHES, _ROUNDS = 2000, 5
_SEGMENTS = (20 * MIB, 256 * MIB, 2**31, 2**33)
_PRODUCTS, _TOKENS = (1024, 4096, 8192), 8192
_CARD = CARDS["h200"]

_LENGTHS, _PASSES = 8, 5
"""All lengths, again and again: plans come from the cache in the last one."""
_WAITING = (
    *((torch.accelerator, "synchronize"), (torch.accelerator, "empty_cache")),
    *((torch.cuda, "synchronize"), (torch.cuda, "empty_cache")),
)


def versions(device: torch.device) -> Iterator[Line]:
    """Name versions, the device and its allocator."""
    number = tuple(int(part) for part in torch.__version__.split(".")[:2])
    yield judged("torch", "2.9 or newer", torch.__version__, number >= (2, 9))
    module = torch.get_device_module(device)
    free, total = module.mem_get_info(device)
    yield told("memory", f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    yield told("settings", os.environ.get("PYTORCH_ALLOC_CONF", "none"))
    if device.type == "cuda":
        # Private, for nothing public tells the driver's version without nvidia-smi.
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()
        yield told("driver", f"CUDA {driver}; torch is built for {torch.version.cuda}")
        yield equal("allocator", "native", torch.cuda.get_allocator_backend())


# ------------------------------------------------------------------ what calls take


def calls(device: torch.device) -> Iterator[Line]:
    """Time the allocator's calls, small kernels, products and copies.

    What is expected are the constants of the hollow card (`mimose.sim.hollow`),
    which judges what the library does at true size. Where the environment asks for
    segments that grow, mapping is timed in place of cudaMalloc, and nothing else.
    """
    if device.type != "cuda":
        yield impossible("calls", f"{device.type} takes no time")
        return
    yield from _segments(device)
    if has_expandable_segments():
        return
    one = torch.zeros(1, device=device)
    launch = _seconds(partial(one.add_, 1), times=_LAUNCHES)
    yield told("a small kernel, launched from Python", f"{1e6 * launch:.1f} µs")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            one.add_(1)
    alone = _seconds(graph.replay) / _LAUNCHES
    assumed = f"{1e6 * _CARD.launch:.0f} µs"
    yield told("a small kernel on the device", f"{1e6 * alone:.2f} µs", assumed)
    rates = {torch.bfloat16: _CARD.half_flops, torch.float32: _CARD.single_flops}
    for dtype, rate in rates.items():
        for width in _PRODUCTS:
            rows = torch.randn(_TOKENS, width, dtype=dtype, device=device)
            weights = torch.randn(width, 4 * width, dtype=dtype, device=device)
            seconds = _seconds(partial(torch.mm, rows, weights), times=10)
            reached = 2 * rows.numel() * 4 * width / seconds
            what = f"a product of {_TOKENS} rows, {width} to {4 * width}, {dtype}"
            yield told(what, f"{reached / 1e12:.0f} TFLOP/s", f"{rate / 1e12:.0f}")
    large = torch.empty(2**31, dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    host = torch.empty(large.nbytes, dtype=torch.uint8, pin_memory=True)
    for what, target, source, n_bytes, rate in (
        ("read and written", other, large, 2 * large.nbytes, _CARD.memory_bytes),
        ("copied to pinned memory", host, large, large.nbytes, _CARD.host_bytes),
        ("copied from pinned memory", large, host, large.nbytes, _CARD.host_bytes),
    ):
        seconds = _seconds(partial(target.copy_, source, non_blocking=True))
        seen = f"{n_bytes / seconds / 1e9:.0f} GB/s"
        yield told(f"bytes {what}", seen, f"{rate / 1e9:.0f} GB/s")


def _segments(device: torch.device) -> Iterator[Line]:
    is_mapping = has_expandable_segments()
    what = "mapping" if is_mapping else "taking"
    torch.empty(0, device=device)
    for size in _SEGMENTS:
        taken, freed = [], []
        for _ in range(_ROUNDS):
            torch.cuda.empty_cache()
            held: list[torch.Tensor] = []
            taken.append(_once(partial(_take, held, size, device)))
            held.clear()
            freed.append(_once(torch.cuda.empty_cache))
        for name, times in ((what, taken), (f"un{what}", freed)):
            seen = f"{1e6 * statistics.median(times):.0f} µs"
            assumed = _CARD.segment + _CARD.segment_byte * size
            if is_mapping:
                assumed = _CARD.granule * size / (20 * MIB)
            yield told(f"{name} {size // MIB} MiB", seen, f"{1e6 * assumed:.0f} µs")


def _take(held: list[torch.Tensor], size: int, device: torch.device) -> None:
    held.append(torch.empty(size, dtype=torch.uint8, device=device))


def _seconds(run: Callable[[], object], times: int = 1) -> float:
    """Return the seconds of a run, the device's included, in the median of rounds."""
    _once(run, times)
    return statistics.median(_once(run, times) for _ in range(_ROUNDS))


def _once(run: Callable[[], object], times: int = 1) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


# ------------------------------------------------------------------ waits


def waits(device: torch.device) -> Iterator[Line]:
    """Count how often bare, measured and planned steps make the host wait."""
    low, high = scale_of(device).lengths
    lengths = torch.linspace(low, high // 2, _LENGTHS).int().tolist()
    training = DeviceLoop(device)
    batches = [moved(training.batch(length), device) for length in lengths]

    def waited(batch: Batch) -> int:
        n_waits = _waits(device, partial(training.forward_and_backward, batch))
        training.optimizer.zero_grad()
        return n_waits

    most = max([waited(batch) for batch in batches * 2][_LENGTHS:])
    yield told("waits of a bare step", f"{most} at most")
    with attach(training.model, common.AMPLE_BYTES) as session:
        steps = [
            (waited(batch) - most, session.records[-1]) for batch in batches * _PASSES
        ]
    measured = [n for n, record in steps if record.phase == "collect"]
    yield told("waits of the first measured step, beyond bare", measured[0])
    later = max(measured[1:])
    what = "waits of a later measured step, beyond bare"
    yield judged(what, "≤ 1", later, later <= 1)
    planned = [n for n, r in steps if r.phase == "plan" and r.cache_hit][-_LENGTHS:]
    seen = ", ".join(f"{n} in {k} steps" for n, k in Counter(planned).items())
    yield equal("waits of a planned step, beyond bare", f"0 in {_LENGTHS} steps", seen)


def _waits(device: torch.device, step: Callable[[], None]) -> int:
    if device.type != "sim":
        return cuda_waits(step)
    module: Any = torch.get_device_module(device)
    before = module.waits()
    step()
    return int(module.waits() - before)


def cuda_waits(step: Callable[[], None]) -> int:
    """Count warnings of operators that wait, and calls that wait by their name.

    CUDA's mode warns of the former only; a warning in backward is reported at its end.
    """
    with ExitStack() as stack:
        calls = [
            stack.enter_context(patch.object(place, name, wraps=getattr(place, name)))
            for place, name in _WAITING
        ]
        found = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")
        step()
    n_told = sum("synchronizing CUDA" in str(each.message) for each in found)
    return n_told + sum(call.call_count for call in calls)
