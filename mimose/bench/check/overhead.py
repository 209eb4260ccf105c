"""What a session costs the host where nothing is recomputed."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from mimose.bench.check.line import Line, told
from mimose.bench.check.training import AMPLE_BYTES, FUSED, scale_of
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
    scale = scale_of(device)
    torch.manual_seed(0)
    bare = FUSED.build(scale).to(device)
    model = copy.deepcopy(bare)
    made = FUSED.batch(scale, scale.lengths[0], torch.Generator().manual_seed(0))
    batch = {name: tensor.to(device) for name, tensor in made.items()}
    with attach(model, AMPLE_BYTES, planner="none"):
        for each in (bare, model) * _WARM_UP_STEPS:
            _step(each, batch)
        rounds = [(_time(bare, batch), _time(model, batch)) for _ in range(_ROUNDS)]
    yield _told("host", [(before.host, after.host) for before, after in rounds])
    both = [(before.processor, after.processor) for before, after in rounds]
    yield _told("processor", both)


CHECKS = (of_a_session,)


def _step(model: nn.Module, batch: Batch) -> None:
    model(**batch).loss.backward()
    model.zero_grad(set_to_none=True)


def _time(model: nn.Module, batch: Batch) -> _Seconds:
    torch.accelerator.synchronize()
    host, processor = time.perf_counter(), time.process_time()
    for _ in range(_STEPS):
        _step(model, batch)
    seconds = time.perf_counter() - host, time.process_time() - processor
    torch.accelerator.synchronize()
    return _Seconds(*(each / _STEPS for each in seconds))


def _told(what: str, rounds: Sequence[tuple[float, float]]) -> Line:
    before, after = map(statistics.median, zip(*rounds, strict=True))
    return told(
        f"{what} time of a step that keeps everything, over the bare model's",
        f"{after / before:.3f} ({1e3 * before:.2f} and {1e3 * after:.2f} ms)",
    )
