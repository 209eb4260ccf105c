"""A session's numbers over time, for loggers and for TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from mimose.records import PHASES, StepRecord, split_runs
from mimose.report.page import headline

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
        latest_first = reversed(self._session.records)
        fresh = [*takewhile(lambda r: r.step >= self._next_step, latest_first)]
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
    numbers = headline(latest_first)
    found = {
        "recompute_share": numbers.recompute_share,
        "cache_hit_rate": numbers.cache_hit_rate,
        "phase": float(PHASES.index(latest_first[0].phase)),
        "peak_bytes": numbers.peak_bytes,
        "budget_use": numbers.budget_use,
    }
    return {name: float(x) for name, x in found.items() if x is not None}


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
    from torch.utils.tensorboard import SummaryWriter

    runs = split_runs(records)
    for number, run in enumerate(runs, start=1):
        run.sort(key=lambda record: record.step)
        place = Path(folder) / f"run-{number}" if len(runs) > 1 else Path(folder)
        with SummaryWriter(str(place), purge_step=run[0].step) as writer:
            for record in run:
                numbers = metrics([record]) | {
                    "plan_seconds": record.plan_seconds,
                    "predicted_peak_bytes": record.predicted_peak_bytes,
                }
                for name, value in numbers.items():
                    if value is not None:
                        writer.add_scalar(PREFIX + name, value, record.step)
