"""What launches, the allocator's calls and copies take, beside what is assumed of them.

These are the constants of the hollow card (`benchmarks.sim.hollow`), which judges
what the library does at true size.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.check.line import Line, impossible, told
from benchmarks.proofs.numbers import MIB
from benchmarks.sim.hollow import CARDS
from mimose.measure.meters.usage import has_expandable_segments

_GIB = 2**30
_LAUNCHES = 2000
_ROUNDS = 5
_SEGMENTS = (20 * MIB, 256 * MIB, 2 * _GIB, 8 * _GIB)
_PRODUCTS = (1024, 4096, 8192)
_TOKENS = 8192
_CARD = CARDS["h200"]


def of_the_allocator(device: torch.device) -> Iterator[Line]:
    """Time segments taken from the device and given back."""
    if device.type != "cuda":
        yield impossible("the allocator's calls", f"{device.type} takes no time")
        return
    _seconds(partial(torch.empty, 0, device=device))
    for size in _SEGMENTS:
        yield from _of_a_segment(device, size)


def of_kernels(device: torch.device) -> Iterator[Line]:
    """Time small kernels, products, and copies within the device and to the host."""
    if device.type != "cuda":
        yield impossible("kernels", f"{device.type} takes no time")
        return
    if has_expandable_segments():
        return
    one = torch.zeros(1, device=device)
    launch = _seconds(lambda: [one.add_(1) for _ in range(_LAUNCHES)]) / _LAUNCHES
    yield told("a small kernel, launched from Python", f"{1e6 * launch:.1f} µs")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            one.add_(1)
    alone = _seconds(graph.replay) / _LAUNCHES
    assumed = f"{1e6 * _CARD.launch:.0f} µs"
    yield told("a small kernel on the device", f"{1e6 * alone:.2f} µs", assumed)
    for dtype, rate in (
        (torch.bfloat16, _CARD.half_flops),
        (torch.float32, _CARD.single_flops),
    ):
        for width in _PRODUCTS:
            yield _of_a_product(device, dtype, width, rate)
    large = torch.empty(2 * _GIB, dtype=torch.uint8, device=device)
    other = torch.empty_like(large)
    within = _rate(lambda: other.copy_(large), 2 * large.nbytes)
    yield told("bytes read and written", within, f"{_CARD.memory_bytes / 1e9:.0f} GB/s")
    host = torch.empty(large.nbytes, dtype=torch.uint8, pin_memory=True)
    for name, copying in (
        ("to", lambda: host.copy_(large, non_blocking=True)),
        ("from", lambda: large.copy_(host, non_blocking=True)),
    ):
        copied = _rate(copying, large.nbytes)
        expected = f"{_CARD.host_bytes / 1e9:.0f} GB/s"
        yield told(f"copies {name} pinned memory", copied, expected)


def _of_a_segment(device: torch.device, size: int) -> Iterator[Line]:
    taken, freed = [], []
    for _ in range(_ROUNDS):
        torch.cuda.empty_cache()
        held: list[torch.Tensor] = []
        taken.append(_once(partial(_take, held, size, device)))
        held.clear()
        freed.append(_once(torch.cuda.empty_cache))
    kind = "taking" if not has_expandable_segments() else "mapping"
    assumed = _CARD.segment + _CARD.segment_byte * size
    if has_expandable_segments():
        assumed = _CARD.granule * size / (20 * MIB)
    name = f"{size // MIB} MiB"
    for what, times in ((kind, taken), (f"un{kind}", freed)):
        seen = f"{1e6 * statistics.median(times):.0f} µs"
        yield told(f"{what} {name}", seen, f"{1e6 * assumed:.0f} µs")


def _take(held: list[torch.Tensor], size: int, device: torch.device) -> None:
    held.append(torch.empty(size, dtype=torch.uint8, device=device))


def _of_a_product(
    device: torch.device, dtype: torch.dtype, width: int, assumed: float
) -> Line:
    rows = torch.randn(_TOKENS, width, dtype=dtype, device=device)
    weights = torch.randn(width, 4 * width, dtype=dtype, device=device)
    seconds = _seconds(lambda: [rows @ weights for _ in range(10)]) / 10
    reached = 2.0 * _TOKENS * width * 4 * width / seconds
    name = f"a product of {_TOKENS} rows, {width} to {4 * width}, {dtype}"
    return told(name, f"{reached / 1e12:.0f} TFLOP/s", f"{assumed / 1e12:.0f}")


def _rate(copy: Callable[[], object], n_bytes: int) -> str:
    return f"{n_bytes / _seconds(copy) / 1e9:.0f} GB/s"


def _seconds(run: Callable[[], object]) -> float:
    """Return the seconds of a run, the device's included, in the median."""
    run()
    return statistics.median(_once(run) for _ in range(_ROUNDS))


def _once(run: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - began


CHECKS = (of_the_allocator, of_kernels)
