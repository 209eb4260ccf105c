"""A session's numbers over time: for loggers, and from its records for TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.records import PHASES, StepRecord
from mimose.report.shapes import split_runs

if TYPE_CHECKING:
    from mimose.session import Session

PREFIX = "mimose/"


class MetricsReader:
    """Reads what a session did since the last reading.

    Args:
        session: The session; it may be detached meanwhile.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next_step = 0

    def read(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call; {} if there were none.

        ``mimose/peak_bytes``
            The highest peak observed, in bytes (left out where the meter tells none).
        ``mimose/budget_use``
            The most that a peak took of its step's budget, as a share.
        ``mimose/recompute_share``
            Of all layer calls, the share that was recomputed.
        ``mimose/cache_hit_rate``
            Of the steps, the share whose plan came from the cache.
        ``mimose/phase``
            Of the last step: 0 collect, 1 step_down, 2 plan, 3 fallback.
        """
        records = self._session.records
        fresh = []
        for record in reversed(records):
            if record.step < self._next_step:
                break
            fresh.append(record)
        if not fresh:
            return {}
        self._next_step = fresh[0].step + 1
        return {PREFIX + name: value for name, value in metrics(fresh).items()}


def metrics(latest_first: Sequence[StepRecord]) -> dict[str, float]:
    """Return what `MetricsReader.read` does, of some steps; names without the prefix.

    Args:
        latest_first: At least one record.
    """
    n_calls = sum(len(record.actions) for record in latest_first)
    n_recomputed = sum(record.n_recomputed for record in latest_first)
    n_hits = sum(record.cache_hit for record in latest_first)
    metrics = {
        "recompute_share": n_recomputed / max(1, n_calls),
        "cache_hit_rate": n_hits / len(latest_first),
        "phase": float(PHASES.index(latest_first[0].phase)),
    }
    peaks = [r.highest_bytes for r in latest_first if r.highest_bytes is not None]
    if peaks:
        metrics["peak_bytes"] = float(max(peaks))
        metrics["budget_use"] = max(r.budget_use or 0.0 for r in latest_first)
    return metrics


def write_scalars(records: Sequence[StepRecord], folder: str | PathLike[str]) -> None:
    """Write a few numbers of every step; what is not known of a step is left out.

    What was written there before is hidden from the first step on. Of a single step,
    ``mimose/cache_hit_rate`` is 0 or 1: TensorBoard's smoothing makes a rate of it.

    Args:
        records: The steps; those of several runs go to a folder each, ``run-1`` …
        folder: Where TensorBoard looks for runs (``tensorboard --logdir``).

    Raises:
        ImportError: tensorboard is missing (``pip install 'mimose[tensorboard]'``).
        OSError: The folder cannot be written.
    """
    runs = split_runs(records)
    for number, run in enumerate(runs, start=1):
        place = Path(folder) / f"run-{number}" if len(runs) > 1 else Path(folder)
        _write_run(sorted(run, key=lambda record: record.step), place)


def _write_run(records: Sequence[StepRecord], folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder), purge_step=records[0].step) as writer:
        for record in records:
            for name, value in _scalars(record):
                writer.add_scalar(PREFIX + name, value, record.step)


def _scalars(record: StepRecord) -> Iterator[tuple[str, float]]:
    yield from metrics([record]).items()
    yield "plan_seconds", record.plan_seconds
    if record.predicted_peak_bytes is not None:
        yield "predicted_peak_bytes", record.predicted_peak_bytes
