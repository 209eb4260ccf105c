"""What a session costs the host where nothing is recomputed."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.check.line import Line, told
from benchmarks.check.training import bare, run_once, scale_of
from benchmarks.proofs.common import AMPLE_BYTES
from mimose.bench.zoo import Batch
from mimose.session import attach

_WARM_UP_STEPS = 10
_ROUNDS, _STEPS = 12, 5


class _Seconds(NamedTuple):
    """Of a step until its last kernel is given to the device."""

    host: float
    processor: float
    """Of all the process's threads."""


def of_a_session(device: torch.device) -> Iterator[Line]:
    """Time a bare model and one whose session keeps everything, by turns."""
    plain, (batch,) = bare(device, scale_of(device).lengths[:1])
    model = copy.deepcopy(plain)
    with attach(model, AMPLE_BYTES, planner="none"):
        for each in (plain, model) * _WARM_UP_STEPS:
            run_once(each, batch)
        rounds = [(_time(plain, batch), _time(model, batch)) for _ in range(_ROUNDS)]
    yield _told("host", [(before.host, after.host) for before, after in rounds])
    both = [(before.processor, after.processor) for before, after in rounds]
    yield _told("processor", both)


CHECKS = (of_a_session,)


def _time(model: nn.Module, batch: Batch) -> _Seconds:
    torch.accelerator.synchronize()
    host, processor = time.perf_counter(), time.process_time()
    for _ in range(_STEPS):
        run_once(model, batch)
    seconds = time.perf_counter() - host, time.process_time() - processor
    torch.accelerator.synchronize()
    return _Seconds(*(each / _STEPS for each in seconds))


def _told(what: str, rounds: Sequence[tuple[float, float]]) -> Line:
    before, after = map(statistics.median, zip(*rounds, strict=True))
    return told(
        f"{what} time of a step that keeps everything, over the bare model's",
        f"{after / before:.3f} ({1e3 * before:.2f} and {1e3 * after:.2f} ms)",
    )
