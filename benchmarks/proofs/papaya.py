"""Do two lines a method tell which ones are faster, on PAPAYA's figures?

Nothing is trained: its measurements are in `papaya_published`. First its lines over all
points: of each of 20 methods, whether the best throughput within the device's memory is
above plain training's, by the two whole models and by the p-score, beside the best that
was measured. Then each series of which there are points: four of them, evenly spread
by index with both ends, are fitted, and the others predicted.

    python -m benchmarks.proofs papaya
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.proofs.common import Answer, Bar, Settings
from benchmarks.proofs.numbers import percent
from benchmarks.proofs.papaya_published import SERIES, Measured, Points, pairs
from mimose.bench.rows import Row
from mimose.predictors import compare, fit_series, p_point, p_score
from mimose.predictors.lines import TOLERANCE, r2_score
from mimose.predictors.noise import MEMORY_TOLERANCE

QUESTION = "Do two lines tell which memory-saving methods are faster, as PAPAYA found?"
OPTIONS = ()

FITTED = 4
"""Points of a series that are fitted."""
_R2_BAR, _ERROR_BAR = 0.98, 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class PapayaRow(Row):
    """One method beside plain training, or one series."""

    part: str
    """``"method"`` or ``"series"``, which each has columns of its own."""
    model: str
    method: str
    p_score: float | None = None
    """Bytes a second."""
    p_point: float | None = None
    plain_batch: float | None = None
    """The largest within the memory."""
    batch: float | None = None
    plain_throughput: float | None = None
    """The best within the memory, predicted, in samples a second."""
    throughput: float | None = None
    measured_plain_throughput: float | None = None
    """The best at any batch that was trained."""
    measured_throughput: float | None = None
    quantity: str = ""
    """Of a series: ``"bytes"`` or ``"seconds"``."""
    form: str = ""
    points: int | None = None
    """Of the series."""
    fitted: int | None = None
    loo_error: float | None = None
    """Mean relative error at points left out of those fitted."""
    r2: float | None = None
    """At the points not fitted."""
    throughput_r2: float | None = None
    """The same, of samples a second."""
    refused: str = ""
    """Why the fit was refused."""

    @property
    def is_faster(self) -> bool:
        """Whether the method's best was above plain training's."""
        return _ratio(self.measured_throughput, self.measured_plain_throughput) > 1.0

    @property
    def is_told(self) -> bool:
        """Whether the two models say so."""
        return self.is_faster == (_ratio(self.throughput, self.plain_throughput) > 1.0)

    @property
    def is_scored(self) -> bool:
        """Whether the p-score says so."""
        return self.is_faster == (_ratio(self.p_score, self.p_point) > 1.0)

    @property
    def error(self) -> float:
        """Of the method's predicted best throughput, as a share."""
        return _ratio(self.throughput, self.measured_throughput) - 1.0


def _ratio(one: float | None, other: float | None) -> float:
    assert one is not None
    assert other is not None
    return one / other


def ask(settings: Settings, _: argparse.Namespace) -> Answer:
    """Predict and compare; nothing is run."""
    told = settings.provenance()
    methods = [PapayaRow(**_method(*pair), **told) for pair in pairs()]
    series = [PapayaRow(**_series(points), **told) for points in SERIES]
    return Answer(
        rows=[*methods, *series],
        table=[_line(row) for row in methods],
        notes=[*map(_note, series), *_dearest(methods)],
        bars=list(_judge(methods, series)),
    )


def _method(plain: Measured, mine: Measured) -> Mapping[str, Any]:
    # As published: a batch is (M - beta) / alpha samples, not whole ones.
    verdict = compare(plain.fitted, mine.fitted, plain.memory_bytes, whole=False)
    return {
        "part": "method",
        "model": mine.model,
        "method": mine.method,
        "p_score": p_score(plain.fitted, mine.fitted),
        "p_point": p_point(plain.fitted, plain.memory_bytes),
        "plain_batch": verdict.plain_batch,
        "batch": verdict.method_batch,
        "plain_throughput": verdict.plain_best.samples_per_second,
        "throughput": verdict.method_best.samples_per_second,
        "measured_plain_throughput": plain.most_throughput,
        "measured_throughput": mine.most_throughput,
    }


def _series(points: Points) -> Mapping[str, Any]:
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
        "form": fitted.form,
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


# ------------------------------------------------------------------ telling


def _line(row: PapayaRow) -> dict[str, object]:
    return {
        "model": row.model,
        "method": row.method,
        "batch": f"{row.plain_batch:.0f} to {row.batch:.0f}",
        "score / point": _ratio(row.p_score, row.p_point),
        "times plain": _ratio(row.throughput, row.plain_throughput),
        "measured": _ratio(row.measured_throughput, row.measured_plain_throughput),
        "right": row.is_told,
        "by score": row.is_scored,
        "samples/s off": percent(row.error, 1),
    }


def _note(row: PapayaRow) -> str:
    said = f"R² {row.r2:.4f}"
    if row.throughput_r2 is not None:
        said += f", of throughput {row.throughput_r2:.4f}"
    if row.refused:
        said += f"; refused: {row.refused}"
    others = (row.points or 0) - FITTED
    what = f"{row.model} {row.method}, {row.quantity}"
    return f"{what}: {row.form} by {FITTED} points, at {others} others {said}"


def _dearest(rows: Sequence[PapayaRow]) -> Iterator[str]:
    """Tell where the most throughput is lost, and by what."""
    row = min(rows, key=lambda row: _ratio(row.throughput, row.plain_throughput))
    plain, mine = next(
        (plain, mine)
        for plain, mine in pairs()
        if (mine.model, mine.method) == (row.model, row.method)
    )
    cost = plain.fitted.seconds
    share = cost.intercept / cost.predict(row.plain_batch or 0.0)
    yield (
        f"The dearest is {row.method} of {row.model}, "
        f"{_ratio(row.plain_throughput, row.throughput):.1f} times slower (measured "
        f"{_ratio(row.measured_plain_throughput, row.measured_throughput):.1f}): a "
        f"sample takes {mine.fitted.seconds.slope / cost.slope:.1f} times as long, and "
        f"larger batches save at most the {share:.1%} of a plain step that is fixed"
    )


def _judge(methods: Sequence[PapayaRow], series: Sequence[PapayaRow]) -> Iterator[Bar]:
    yield Bar("verdicts that are wrong", sum(not row.is_told for row in methods), 0)
    what = "p-scores that say otherwise than was measured"
    yield Bar(what, sum(not row.is_scored for row in methods), 0)
    error = statistics.median(abs(row.error) for row in methods)
    yield Bar("error of a best throughput, median", error, _ERROR_BAR, is_share=True)
    for row in series:
        name = f"{row.model} {row.method}, {row.quantity}"
        if row.throughput_r2 is not None:
            yield Bar(f"{name}: R² of throughput", row.throughput_r2, at_least=_R2_BAR)
        elif not row.refused:
            yield Bar(f"{name}: R²", row.r2, at_least=_R2_BAR)
