"""Do two lines for each method predict which methods are faster, on PAPAYA's data?

Nothing is trained. The data of Liu et al. ("An Evaluation of Memory Optimization
Methods for Training Neural Networks", https://github.com/LiuXiaoxuanPKU/papaya), from a
V100 of 16 GB, are in this folder: least-squares lines over all batch sizes of a model
under a method (``papaya_lines.csv``), and the points of some (``papaya_points.csv``;
Swin-L's are of another mixed precision than its lines).

First the lines: for each of 20 methods, is the best throughput within the device's
memory above plain training's, by the two whole models and by the p-score, compared with
the best measured one? Then the points: each series is fitted to four of them, evenly
spaced with both ends, and predicts the others.

    python -m benchmarks.proofs papaya
"""

from __future__ import annotations

import csv
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import r2_score

from benchmarks.proofs.common import Answer, Bar, Options, Row, Settings
from mimose.predictors import Series, fit_series
from mimose.predictors.throughput import MEMORY_TOLERANCE, TOLERANCE

QUESTION = "Do two lines tell which memory-saving methods are faster, as PAPAYA found?"
OPTIONS = ()

UNITS: Mapping[str, float] = {"MiB": 2.0**20, "MB": 1e6, "ms": 1e-3}
"""In bytes or seconds."""
_MEMORY = 0.8 * 16_000
"""What the rule takes the device to have, in a model's unit: the share of it that
is free of fragmentation."""
FITTED = 4
"""Points of a series that are fitted."""
_R2_BAR, _ERROR_BAR = 0.98, 0.01
_TOLD = (
    *("model", "method", "times_plain", "measured_times_plain", "is_right", "error"),
    *("quantity", "form", "points", "r2", "throughput_r2", "refused"),
)

# ------------------------------------------------------------------ published


class Published(NamedTuple):
    """One model under one method."""

    model: str
    method: str
    memory: Series
    """The line of bytes over all points."""
    seconds: Series
    """The line of seconds."""
    memory_bytes: float
    """What the rule takes the device to have."""
    most_batch: int
    """The largest that was trained."""
    most_throughput: float
    """The most samples a second that were measured, at any batch."""


class Points(NamedTuple):
    """One series of readings."""

    model: str
    method: str
    is_memory: bool
    batches: NDArray[np.float64]
    """(n_points,) samples."""
    values: NDArray[np.float64]
    """(n_points,) bytes, or seconds."""


def _lines_of(name: str) -> Iterator[dict[str, str]]:
    with Path(__file__).with_name(f"papaya_{name}.csv").open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _measured(model: str, method: str, unit: str, *told: str) -> Published:
    memory, fixed, cost, fixed_cost, most_batch, most_throughput = map(float, told)
    size, milli = UNITS[unit], UNITS["ms"]
    held = Series(slope=size * memory, intercept=size * fixed)
    took = Series(slope=milli * cost, intercept=milli * fixed_cost)
    most = int(most_batch), most_throughput
    return Published(model, method, held, took, _MEMORY * size, *most)


def _points(key: tuple[str, str, str], lines: Iterator[Mapping[str, str]]) -> Points:
    points = np.array([(float(each["batch"]), float(each["value"])) for each in lines])
    values = UNITS[key[2]] * points[:, 1]
    return Points(*key[:2], key[2] != "ms", points[:, 0], values)


ROWS = [_measured(*line.values()) for line in _lines_of("lines")]
"""By model, the plain one first."""
SERIES = [
    _points(key, lines)
    for key, lines in itertools.groupby(
        _lines_of("points"), lambda line: (line["model"], line["method"], line["unit"])
    )
]


def pairs() -> list[tuple[Published, Published]]:
    """Return every method, after the plain row of its model."""
    plain = {row.model: row for row in ROWS if row.method == "plain"}
    return [(plain[row.model], row) for row in ROWS if row.method != "plain"]


# ------------------------------------------------------------------ the question


def ask(settings: Settings, _: Options) -> Answer:
    """Predict and compare; nothing is run."""
    methods = [_method(*pair) for pair in pairs()]
    series = [_series(points) for points in SERIES]
    rows = [{**row, **settings.provenance()} for row in methods + series]
    answer = Answer(rows=rows, bars=list(_judge(methods, series)))
    answer.table = [{name: row.get(name) for name in _TOLD} for row in rows]
    return answer


def _method(plain: Published, mine: Published) -> Row:
    """Compare a method's best throughput within the memory with plain training's."""
    least, most = (each.memory.inverse(plain.memory_bytes) for each in (plain, mine))
    best = most / mine.seconds.predict(most)
    times_plain = best / (least / plain.seconds.predict(least))
    saved = plain.memory.slope - mine.memory.slope
    score = saved / (mine.seconds.slope - plain.seconds.slope)
    free = plain.memory_bytes - plain.memory.intercept
    point = free / plain.seconds.intercept
    measured = mine.most_throughput / plain.most_throughput
    return {
        "part": "method",
        "model": mine.model,
        "method": mine.method,
        "plain_batch": least,
        "batch": most,
        "score_to_point": score / point,
        "times_plain": times_plain,
        "measured_times_plain": measured,
        "is_right": (times_plain > 1.0) == (measured > 1.0),
        "is_right_by_score": (score > point) == (measured > 1.0),
        "error": best / mine.most_throughput - 1.0,
    }


def _series(points: Points) -> Row:
    x, y = points.batches, points.values
    tolerance = MEMORY_TOLERANCE if points.is_memory else TOLERANCE
    chosen = spread(len(x))
    others = np.setdiff1d(np.arange(len(x)), chosen)
    fitted = fit_series(x[chosen], y[chosen], tolerance=tolerance)
    predicted = fitted.predict(x[others])
    own = {
        "part": "series",
        "model": points.model,
        "method": points.method,
        "quantity": "bytes" if points.is_memory else "seconds",
        "form": "knee" if fitted.knee else "line",
        "points": len(x),
        "fitted": len(chosen),
        "loo_error": fitted.loo_error,
        "r2": r2_score(y[others], predicted),
        "refused": fitted.refused,
    }
    if not points.is_memory:
        rates = x[others] / y[others], x[others] / predicted
        own["throughput_r2"] = r2_score(*rates)
    return own


def spread(n_points: int) -> NDArray[np.int64]:
    """Return the places of the points that are fitted, of so many."""
    return np.linspace(0, n_points - 1, FITTED).round().astype(np.int64)


# ------------------------------------------------------------------ reporting


def _name(row: Row) -> str:
    return f"{row['model']} {row['method']}, {row['quantity']}"


def _judge(methods: Sequence[Row], series: Sequence[Row]) -> Iterator[Bar]:
    wrong, otherwise = (
        sum(not row[name] for row in methods)
        for name in ("is_right", "is_right_by_score")
    )
    yield Bar("verdicts that are wrong", wrong, 0)
    yield Bar("p-scores that say otherwise than was measured", otherwise, 0)
    error = statistics.median(abs(row["error"]) for row in methods)
    yield Bar("error of a best throughput, median", error, _ERROR_BAR, is_share=True)
    for row in series:
        if "throughput_r2" in row:
            what = f"{_name(row)}: R² of throughput"
            yield Bar(what, row["throughput_r2"], at_least=_R2_BAR)
        elif not row["refused"]:
            yield Bar(f"{_name(row)}: R²", row["r2"], at_least=_R2_BAR)
