"""One measured training step: a dataclass, and a line of a CSV file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from mimose.bench import csv_file


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """One training step of one strategy, and where and with what it ran."""

    run: str
    """Which part of an experiment: ``"compare"``, ``"limit"`` …"""
    strategy: str
    """``"none"``, ``"full"``, ``"static"`` or ``"mimose"``."""
    step: int
    """Counts from 0."""
    phase: str
    """The session's phase; empty without a session."""
    texts: int
    """Members of the batch."""
    length: int
    """Tokens of the longest member."""
    start_bytes: int
    """Held when the step began."""
    peak_bytes: int
    """The most held at any moment until the optimizer had stepped."""
    predicted_peak_bytes: float | None
    """What the plan said the peak would be."""
    budget_bytes: int | None
    """The most the strategy was asked to hold; none for plain training."""
    limit_bytes: int | None
    """Hard limit that the system enforced, in the terms of `budget_bytes`."""
    seconds: float
    """Forward, backward and optimizer step."""
    plan_seconds: float
    """The part of it spent to decide on a plan."""
    cache_hit: bool
    """Whether the plan came from the cache."""
    recomputed_flops: int
    """Forward work done a second time."""
    retries: int
    """How often the step was begun again after running out of memory."""
    loss: float
    """Mean over the batch."""
    accuracy: float | None
    """On held-out texts after this step, where it was asked for."""
    load_average: float
    """Of the machine over the last minute, this process included."""
    seed: int
    date: str
    """When the experiment began, ISO 8601."""
    device: str
    threads: int
    python: str
    torch: str
    transformers: str
    mimose: str

    @property
    def growth_bytes(self) -> int:
        """The peak over what was held when the step began."""
        return self.peak_bytes - self.start_bytes

    @property
    def predicted_growth_bytes(self) -> float | None:
        """The predicted peak over what was held when the step began."""
        if self.predicted_peak_bytes is None:
            return None
        return self.predicted_peak_bytes - self.start_bytes


def write_rows(path: Path, rows: Iterable[StepRow]) -> None:
    """Write rows to a CSV file; None becomes an empty field."""
    csv_file.write(path, StepRow, rows)


def read_rows(path: Path) -> list[StepRow]:
    """Read what `write_rows` wrote.

    Raises:
        ValueError: The columns are not those of `StepRow`.
    """
    return csv_file.read(path, StepRow)
