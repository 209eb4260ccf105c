"""What repeated readings of one method support, and what noise leaves open."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from .lines import fit_series, r2_score
from .residuals import Residuals
from .throughput import MethodModel, compare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import ArrayLike, NDArray

    Floats = NDArray[np.float64]

_MOST_SPLITS = 500
"""With more ways to halve the rounds some are drawn."""
LEAST_ROUNDS = 5
"""For an interval. All readings lie on one side of their true median in one case of
``2**(rounds - 1)``: of three rounds in a quarter of all cases, of five in 6%."""
MEMORY_TOLERANCE = 0.05
"""Of memory, at points left out: bytes repeat, so what is off is the form."""


@dataclass(frozen=True, slots=True)
class Readings:
    """One method's steps, measured in rounds over the same batches."""

    batches: Floats
    """(n_points,) samples."""
    memory: Floats
    """(n_rounds, n_points) bytes at the peak."""
    seconds: Floats
    """(n_rounds, n_points) of a step."""

    def __post_init__(self) -> None:
        """Refuse arrays that do not belong together."""
        shape = self.seconds.shape
        is_table = self.seconds.ndim == 2 and shape[0] > 0
        if (
            not is_table
            or self.memory.shape != shape
            or self.batches.shape != shape[1:]
        ):
            msg = (
                f"batches {self.batches.shape}, memory {self.memory.shape}, seconds "
                f"{shape}: give (n_points,), and twice (n_rounds, n_points)"
            )
            raise ValueError(msg)


def fit_model(
    name: str, readings: Readings, *, plain: MethodModel | None = None
) -> MethodModel:
    """Fit both series of a method to the medians over rounds.

    Args:
        name: The method's.
        readings: Its steps.
        plain: The plain model, whose fixed time is taken where the method's comes out
            negative.
    """
    memory = np.median(readings.memory, axis=0)
    seconds = np.median(readings.seconds, axis=0)
    return MethodModel(
        name,
        fit_series(readings.batches, memory, tolerance=MEMORY_TOLERANCE),
        fit_series(readings.batches, seconds, intercept=_fixed(plain)),
    )


def noise_ceiling(rounds: ArrayLike, x: ArrayLike) -> float:
    """Return the R² of throughput that nothing but the noise leaves to a prediction.

    The rounds are split into two halves (of an odd number the second one has one
    more). Throughput is ``x`` over the median seconds
    of a half; the R² is that of the first half's as a prediction of the second's.
    All splits are taken where there are up to 500, or else 500 drawn with a fixed seed;
    the median over them is returned. A half is noisier than all rounds together, so
    this is rather too low than too high.

    Args:
        rounds: (n_rounds, n_points) seconds, two rounds or more, of the same points.
        x: (n_points,) samples of each.

    Raises:
        ValueError: There are not two rounds of two points.
    """
    seconds, batches = np.asarray(rounds, np.float64), np.asarray(x, np.float64)
    if (
        seconds.ndim != 2
        or batches.shape != seconds.shape[1:]
        or min(seconds.shape) < 2
    ):
        msg = (
            f"rounds {seconds.shape} and x {batches.shape}: give (n_rounds, n_points) "
            "seconds and (n_points,) batch sizes, two or more of both"
        )
        raise ValueError(msg)

    def rate(half: list[int]) -> Floats:
        found: Floats = batches / np.median(seconds[half], axis=0)
        return found

    return median(
        r2_score(rate(second), rate(first)) for first, second in _halves(len(seconds))
    )


def _halves(n_rounds: int) -> Iterator[tuple[list[int], list[int]]]:
    half, every = n_rounds // 2, range(n_rounds)
    if math.comb(n_rounds, half) <= _MOST_SPLITS:
        for first in itertools.combinations(every, half):
            yield list(first), [each for each in every if each not in first]
        return
    rng = np.random.default_rng(0)
    for _ in range(_MOST_SPLITS):
        order = rng.permutation(n_rounds).tolist()
        yield order[:half], order[half:]


def ratio_interval(
    plain: Readings,
    method: Readings,
    memory_bytes: float,
    *,
    share: float = 0.95,
    draws: int = 400,
    seed: int = 0,
    whole: bool = True,
    batches: tuple[float, float] | None = None,
) -> tuple[float, float]:
    """Return an interval of the ratio of the best throughputs, by resampling rounds.

    Each draw takes rounds with replacement, fits all four series to their medians, in
    the forms that the whole has, and compares. Where both were measured in as many
    rounds, these took turns, and a draw takes the same ones of both: what slowed one
    round slowed both.

    Args:
        plain: Without the method.
        method: With it.
        memory_bytes: What there is for both.
        share: Of the draws that the interval holds.
        draws: How often.
        seed: Of the draws.
        whole: Whether samples are whole.
        batches: Plain training's and the method's, at which to compare their
            throughputs instead, whatever fits, by fits moved through each draw's
            medians; None for the best ones of each draw, by the fits alone.

    Returns:
        Its ends; both nan where neither fits in any draw.

    Raises:
        ValueError: There are fewer than five rounds.
    """
    if min(len(plain.seconds), len(method.seconds)) < LEAST_ROUNDS:
        msg = (
            f"{len(plain.seconds)} rounds of plain training and {len(method.seconds)} "
            f"of the method: measure {LEAST_ROUNDS} or more, fewer do not bound what "
            "they vary about"
        )
        raise ValueError(msg)
    rng = np.random.default_rng(seed)
    whole_plain = fit_model("plain", plain)
    whole_method = fit_model("method", method, plain=whole_plain)
    ratios = []
    for _ in range(draws):
        mine = theirs = rng.integers(len(plain.seconds), size=len(plain.seconds))
        if len(method.seconds) != len(plain.seconds):
            theirs = rng.integers(len(method.seconds), size=len(method.seconds))
        one = _again(whole_plain, plain, mine, None)
        other = _again(whole_method, method, theirs, one)
        if batches is None:
            ratios.append(compare(one, other, memory_bytes, whole=whole).ratio)
        else:
            own = _rate(one, plain, mine, batches[0])
            ratios.append(_rate(other, method, theirs, batches[1]) / own)
    known = np.array([ratio for ratio in ratios if not math.isnan(ratio)])
    if not len(known):
        return math.nan, math.nan
    known.sort()
    left = (1.0 - share) / 2.0
    last = len(known) - 1
    return float(known[round(left * last)]), float(known[round((1.0 - left) * last)])


def _rate(
    model: MethodModel, readings: Readings, rows: NDArray[np.int64], batch: float
) -> float:
    """Return samples a second by a fit moved through the medians of its rounds.

    Not a number where the time is not above 0.
    """
    sizes, seconds = readings.batches, np.median(readings.seconds[rows], axis=0)
    residuals = Residuals.of(sizes, model.seconds.predict(sizes), seconds)
    taken = residuals.at(batch) * model.step_seconds(batch)
    return batch / taken if taken > 0.0 else math.nan


def _again(
    model: MethodModel,
    readings: Readings,
    rows: NDArray[np.int64],
    plain: MethodModel | None,
) -> MethodModel:
    """Fit some rounds in the forms that all rounds have."""
    memory = np.median(readings.memory[rows], axis=0)
    seconds = np.median(readings.seconds[rows], axis=0)
    return MethodModel(
        model.name,
        model.memory.refitted(readings.batches, memory),
        model.seconds.refitted(readings.batches, seconds, intercept=_fixed(plain)),
    )


def _fixed(plain: MethodModel | None) -> float | None:
    """Return the plain model's fixed time, if it has one."""
    if plain is None or plain.seconds.intercept <= 0.0:
        return None
    return plain.seconds.intercept
