"""A session's numbers over time, for loggers and for TensorBoard."""

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
    """Returns a session's metrics since its last call.

    Args:
        session: The session. It may be detached.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._next_step = 0

    def read(self) -> dict[str, float]:
        """Return the metrics of the steps since the last call; {} if there were none.

        ``mimose/peak_bytes``
            The highest observed peak, in bytes (missing if the meter reads no peak).
        ``mimose/budget_use``
            The highest peak as a share of its step's budget.
        ``mimose/recompute_share``
            The share of all layer calls that were not kept.
        ``mimose/cache_hit_rate``
            The share of steps whose plan existed before.
        ``mimose/phase``
            The phase of the last step: 0 collect, 1 step_down, 2 plan, 3 fallback.
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
    """Return the metrics of some steps, with names without ``mimose/``.

    See `MetricsReader.read`.

    Args:
        latest_first: The records, at least one, the latest first.
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
    """Write the metrics of every step for TensorBoard, as far as they are known.

    They replace what an earlier call has written there. For a single step
    ``mimose/cache_hit_rate`` is 0 or 1; TensorBoard's smoothing shows the rate.

    Args:
        records: The steps. If they are of several runs, each run gets a folder,
            ``run-1`` and so on.
        folder: The folder for ``tensorboard --logdir``.

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
