"""A run's records as scalars for TensorBoard, named as in `mimose.report.metrics`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike
from pathlib import Path

from mimose.records import StepRecord
from mimose.report.metrics import PREFIX, metrics
from mimose.report.shapes import split_runs


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
