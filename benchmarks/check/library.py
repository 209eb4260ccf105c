"""Checks mimose on the device: exact, and once more where memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.check import Line, equal, impossible, judged, told
from benchmarks.check.training import DeviceLoop, jumping, measure_headroom
from benchmarks.proofs import common
from mimose.memory.wall import Wall
from mimose.session import attach

_EXACT_STEPS, _STEPS = 5, 30
_AMPLE_SHARE, _LEFT_SHARE = 1.2, 0.6
"""Shares of plain training's growth: what the budget leaves, and what is left later."""


def exactness(device: torch.device) -> Iterator[Line]:
    """Compare weights after some recomputing steps with dropout to the bare model's."""
    training = DeviceLoop(device, dtype=torch.bfloat16)
    with attach(training.model, common.AMPLE_BYTES, planner="full") as session:
        list(training.train(training.scale.lengths[:1]))  # the first attention there is
        kept = len(session.summary().kept_units)
    yield equal("layers that could not be recomputed", 0, kept)
    for dtype in (None, torch.bfloat16):
        for is_fused in (True, False):
            what = f"weights after {_EXACT_STEPS} recomputing steps, "
            what += f"{'fused' if is_fused else 'eager'} attention, "
            what += "fp32" if dtype is None else "bf16 autocast"
            fused = nullcontext() if is_fused else sdpa_kernel(SDPBackend.MATH)
            with fused:
                yield same_weights(what, partial(_recomputed, device, dtype))


def _recomputed(
    device: torch.device, dtype: torch.dtype | None, is_bare: bool
) -> list[torch.Tensor]:
    own = DeviceLoop(device, dtype=dtype)
    low, high = own.scale.lengths
    lengths = torch.linspace(low, (low + high) // 2, _EXACT_STEPS).int()
    planned: Any = nullcontext()
    if not is_bare:
        planned = attach(own.model, common.AMPLE_BYTES, planner="full")
    with planned:
        list(own.train(lengths.tolist()))
    return own.weights()


def same_weights(what: str, run: Callable[[bool], Sequence[torch.Tensor]]) -> Line:
    """Check whether a run's weights equal the bare model's.

    Args:
        what: What was run.
        run: Trains, bare if asked to, and returns the weights. The bare run is made
            again where weights differ: if the bare runs differ, nothing can be said.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    expected, other = run(True), run(False)
    if all(map(torch.equal, expected, other)):
        return judged(what, "equal", "equal", holds=True)
    off = f"off by at most {_distance(expected, other):.2g}"
    again = run(True)
    if all(map(torch.equal, expected, again)):
        return judged(what, "equal", off, holds=False)
    by = _distance(expected, again)
    return impossible(what, f"two bare runs differ, by at most {by:.2g}", off)


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)


def out_of_memory(device: torch.device) -> Iterator[Line]:
    """Take memory away in mid-run: it is paid for once, and changes no result."""
    failures: list[int] = []

    def weights(is_bare: bool) -> list[torch.Tensor]:
        training = DeviceLoop(device)
        base_bytes, growth_bytes = measure_headroom(training)
        lengths = jumping(training.scale, _STEPS)
        if is_bare:
            list(training.train(lengths))
            return training.weights()
        budget_bytes = base_bytes + round(_AMPLE_SHARE * growth_bytes)
        left_bytes = base_bytes + round(_LEFT_SHARE * growth_bytes)
        with attach(training.model, budget_bytes, meter=training.meter) as session:
            training.run = session.step
            list(training.train(lengths[: len(lengths) // 2]))
            wall = Wall(training.reserved)
            wall.activate(left_bytes)
            try:
                for length in lengths[len(lengths) // 2 :]:
                    before = training.reserved.usage().n_ooms
                    list(training.train((length,)))
                    failures.append(training.reserved.usage().n_ooms - before)
            finally:
                wall.deactivate()
        return training.weights()

    same = same_weights("weights, memory taken away in mid-run", weights)
    failed = sum(count > 0 for count in failures)
    what = "steps in which memory ran out, once there was less"
    yield judged(what, "≤ 1", failed, failed <= 1)
    yield told("out-of-memory errors in them", sum(failures))
    yield same
