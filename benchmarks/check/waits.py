"""How often a step makes the host wait for its device, beyond the bare model's."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from benchmarks.check.line import Line, at_most, equal, impossible, told
from benchmarks.check.training import bare, run_once, scale_of
from benchmarks.proofs.common import AMPLE_BYTES
from mimose.records import StepRecord
from mimose.session import attach

_LENGTHS = 8
_PASSES = 5
"""All lengths, again and again: plans come from the cache in the last one."""
_EXPLICIT = (
    (torch.accelerator, "synchronize"),
    (torch.accelerator, "empty_cache"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "empty_cache"),
)


def of_a_step(device: torch.device) -> Iterator[Line]:
    """Count the waits of bare, measured and planned steps."""
    if device.type not in ("cuda", "sim"):
        yield impossible("waits", f"nothing counts them on {device.type}")
        return
    low, high = scale_of(device).lengths
    lengths = torch.linspace(low, high // 2, _LENGTHS).int().tolist()
    model, batches = bare(device, lengths)
    own = [_waits(device, partial(run_once, model, b)) for b in batches * 2]
    most = max(own[_LENGTHS:])
    yield told("waits of a bare step", f"{most} at most")
    with attach(model, AMPLE_BYTES) as session:
        steps = [
            (_waits(device, partial(run_once, model, b)), session.records[-1])
            for b in batches * _PASSES
        ]
    yield from _told(steps, most)


CHECKS = (of_a_step,)


def _told(steps: Sequence[tuple[int, StepRecord]], bare: int) -> Iterator[Line]:
    def beyond(of: Callable[[StepRecord], bool]) -> list[int]:
        return [n - bare for n, record in steps if of(record)]

    measured = beyond(lambda record: record.phase == "collect")
    planned = beyond(lambda r: r.phase == "plan" and r.cache_hit)[-_LENGTHS:]
    yield told("waits of the first measured step, beyond bare", measured[0])
    worst = max(measured[1:])
    yield at_most("waits of a later measured step, beyond bare", 1, worst, "{:g}")
    seen = ", ".join(f"{n} in {k} steps" for n, k in Counter(planned).items())
    yield equal("waits of a planned step, beyond bare", f"0 in {_LENGTHS} steps", seen)


def _waits(device: torch.device, step: Callable[[], None]) -> int:
    if device.type == "sim":
        module: Any = torch.get_device_module(device)
        before = module.waits()
        step()
        return int(module.waits() - before)
    return _cuda_waits(step)


def _cuda_waits(step: Callable[[], None]) -> int:
    """Count warnings of operators that wait, and calls that wait by their name.

    CUDA's mode warns of the former only; a warning in backward is told at its end.
    """
    counted: Counter[str] = Counter()
    with ExitStack() as stack:
        for place, name in _EXPLICIT:
            stack.callback(setattr, place, name, getattr(place, name))
            setattr(place, name, _counting(getattr(place, name), counted))
        found = stack.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        stack.callback(torch.cuda.set_sync_debug_mode, torch.cuda.get_sync_debug_mode())
        torch.cuda.set_sync_debug_mode("warn")
        step()
    told = [str(each.message) for each in found]
    return counted.total() + sum("synchronizing CUDA" in text for text in told)


def _counting(call: Callable[..., Any], counted: Counter[str]) -> Callable[..., Any]:
    def also(*args: Any, **kwargs: Any) -> Any:
        counted["calls"] += 1
        return call(*args, **kwargs)

    return also
