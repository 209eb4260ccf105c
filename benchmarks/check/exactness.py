"""Whether weights after some steps with dropout are the bare model's, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import TypeAlias

import torch

from benchmarks.check.line import Line, equal, impossible, judged
from benchmarks.check.training import EAGER, FUSED, DeviceLoop, Subject, subjects
from benchmarks.proofs.common import AMPLE_BYTES
from mimose.session import Session, attach

_STEPS = 5

Train: TypeAlias = Callable[[], "list[torch.Tensor]"]
"""Trains, and returns the weights."""


def first_attention(device: torch.device) -> Iterator[Line]:
    """Recompute the process's first attention, in bf16: torch settles kernels there."""
    training = DeviceLoop(device, FUSED, torch.bfloat16)
    with attach(training.model, AMPLE_BYTES, planner="full") as session:
        list(training.train(training.scale.lengths[:1]))
        kept = len(session.summary().kept_units)
    yield equal("layers that could not be recomputed", 0, kept)


def in_single(device: torch.device) -> Iterator[Line]:
    """Compare every model there is, with both kinds of attention."""
    for subject in (*subjects(), EAGER):
        yield _compared(device, subject, None)


def under_autocast(device: torch.device) -> Iterator[Line]:
    """Compare in bf16."""
    for subject in (FUSED, EAGER):
        yield _compared(device, subject, torch.bfloat16)


CHECKS = (first_attention, in_single, under_autocast)


def same_weights(what: str, train: Train, train_bare: Train) -> Line:
    """Tell whether a run's weights are the bare model's.

    Args:
        what: What was run.
        train: The run; returns its weights.
        train_bare: The same without a session. It is run again where weights differ:
            if its own do, no more can be told.
    """
    bare, other = train_bare(), train()
    if all(map(torch.equal, bare, other)):
        return judged(what, "equal", "equal", holds=True)
    off = f"off by at most {_distance(bare, other):.2g}"
    again = train_bare()
    if all(map(torch.equal, bare, again)):
        return judged(what, "equal", off, holds=False)
    by = _distance(bare, again)
    return impossible(what, f"two bare runs differ, by at most {by:.2g}", off)


def be_deterministic() -> None:
    """Let torch choose algorithms that repeat, and warn where it has none."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def _compared(
    device: torch.device, subject: Subject, dtype: torch.dtype | None
) -> Line:
    be_deterministic()
    kind = "fp32" if dtype is None else "bf16 autocast"
    return same_weights(
        f"weights after {_STEPS} recomputing steps: {subject.name}, {kind}",
        lambda: _weights(device, subject, dtype, is_bare=False),
        lambda: _weights(device, subject, dtype, is_bare=True),
    )


def _weights(
    device: torch.device, subject: Subject, dtype: torch.dtype | None, *, is_bare: bool
) -> list[torch.Tensor]:
    training = DeviceLoop(device, subject, dtype)
    low, high = training.scale.lengths
    lengths = torch.linspace(low, (low + high) // 2, _STEPS).int().tolist()
    session: nullcontext[None] | Session = nullcontext()
    if not is_bare:
        session = attach(training.model, AMPLE_BYTES, planner="full")
    with session:
        list(training.train(lengths))
    return training.weights()


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    pairs = zip(some, others, strict=True)
    return max(float((one - other).abs().max()) for one, other in pairs)
