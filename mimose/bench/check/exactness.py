"""Whether weights after some steps with dropout are the bare model's, to the bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch

from mimose.bench.check.line import Line, impossible, judged
from mimose.bench.check.training import (
    AMPLE_BYTES,
    EAGER,
    FUSED,
    Subject,
    Training,
    subjects,
)
from mimose.session import Session, attach

_STEPS = 5


def in_single(device: torch.device) -> Iterator[Line]:
    """Compare every model there is, with both kinds of attention."""
    for subject in (*subjects(), EAGER):
        yield _compared(device, subject, None)


def under_autocast(device: torch.device) -> Iterator[Line]:
    """Compare in bf16."""
    yield _compared(device, FUSED, torch.bfloat16)


CHECKS = (in_single, under_autocast)


def same_weights(
    what: str,
    bare: Sequence[torch.Tensor],
    again: Sequence[torch.Tensor],
    other: Sequence[torch.Tensor],
) -> Line:
    """Tell whether a run's weights are the bare model's.

    Args:
        what: What was run.
        bare: The weights of a bare run.
        again: Those of another bare run: where they differ, no more can be told.
        other: Those of the run.
    """
    off = f"off by at most {_distance(bare, other):.2g}"
    if not all(map(torch.equal, bare, again)):
        by = _distance(bare, again)
        return impossible(what, f"two bare runs differ, by at most {by:.2g}", off)
    is_equal = all(map(torch.equal, bare, other))
    return judged(what, "equal", "equal" if is_equal else off, is_equal)


def be_deterministic() -> None:
    """Let torch choose algorithms that repeat, and warn where it has none."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def _compared(
    device: torch.device, subject: Subject, dtype: torch.dtype | None
) -> Line:
    be_deterministic()
    bare, again = (_weights(device, subject, dtype, is_bare=True) for _ in range(2))
    other = _weights(device, subject, dtype, is_bare=False)
    kind = "fp32" if dtype is None else "bf16 autocast"
    what = f"weights after {_STEPS} recomputing steps: {subject.name}, {kind}"
    return same_weights(what, bare, again, other)


def _weights(
    device: torch.device, subject: Subject, dtype: torch.dtype | None, *, is_bare: bool
) -> list[torch.Tensor]:
    training = Training(device, subject, dtype)
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
