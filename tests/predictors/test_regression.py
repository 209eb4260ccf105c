"""Fits of quantities by sizes: exact where they can be, believed where they may be."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression
from sklearn.tree import DecisionTreeRegressor

from mimose.predictors import Fit, LeastSquares

QUANTITIES = {
    "attention": lambda b, t: 34 * 1024 * 2 * b * t + 5 * 16 * 2 * b * t * t,
    "flash attention": lambda b, t: 12 * 4096 * 2 * b * t,
    "a mask": lambda b, t: 4096 * b * t + 4 * t * t + 8,
    "a loss without the first token": lambda b, t: 4 * 50257 * b * (t - 1),
    "cross attention": lambda b, s, t: (
        2048 * b * t + 160 * b * t * t + 160 * b * s * t + 2048 * b * s
    ),
}


def shapes(n, n_sizes, seed=0):
    """Return n distinct shapes: a batch, and lengths."""
    draw = random.Random(seed)
    found = {}
    while len(found) < n:
        lengths = [draw.randint(16, 512) for _ in range(n_sizes - 1)]
        found[(draw.randint(2, 16), *lengths)] = None
    return list(found)


@pytest.mark.parametrize("name", QUANTITIES)
def test_counts_are_told_to_the_byte(name):
    """From ten shapes on, at shapes that were not measured and four times as large."""
    count = QUANTITIES[name]
    n_sizes = count.__code__.co_argcount
    known, others = shapes(10, n_sizes), shapes(20, n_sizes, seed=1)
    fit = Fit(LeastSquares(), {s: [count(*s)] for s in known}, 0.0, is_peak=False)
    assert fit.is_settled
    assert fit.is_trusted(0.0)
    for shape in [*others, tuple(4 * size for size in known[0])]:
        assert abs(fit.predict(shape) - count(*shape)) < 0.01


def test_few_shapes_settle_few_terms():
    """One more than there are; before, nothing is believed."""
    count, known = QUANTITIES["attention"], shapes(6, 2)
    trusted = []
    for n in range(1, 7):
        readings = {s: [count(*s)] for s in known[:n]}
        fit = Fit(LeastSquares(), readings, 0.0, is_peak=False)
        trusted.append(fit.is_trusted(0.0))
    assert [False, False] == trusted[:2]
    assert all(trusted[4:])


def test_a_peak_is_raised_by_what_it_misses():
    """The higher of two sums is no polynomial: no shape lies above its fit."""

    def peak(b, t):
        return max(3e6 * b, 4096 * b * t, 20 * b * t * t)

    readings = {s: [float(peak(*s))] for s in shapes(20, 2)}
    scale = 20.0 * max(map(max, readings.values()))
    fit = Fit(LeastSquares(), readings, 0.0, is_peak=True)
    assert not fit.is_exact
    assert fit.is_trusted(scale)
    for shape, (value,) in readings.items():
        assert value <= fit.predict(shape, scale) * (1.0 + 1e-9)
        assert fit.predict(shape, scale) - value < 0.02 * scale


def test_three_samples_show_a_line():
    """Also where another term alone explains more of them than either of its two."""
    bytes_of = {t: 1588248.0 * t - 872447990.0 for t in (746, 783, 836)}
    fit = Fit(
        LeastSquares(), {(t,): [n] for t, n in bytes_of.items()}, 0.0, is_peak=False
    )
    assert fit.is_exact
    assert fit.predict((558,)) == pytest.approx(1588248.0 * 558 - 872447990.0)


def test_a_peak_of_several_sums_is_told_between_samples():
    """Whichever sum decides there: no polynomial tells it so near."""

    def peak(t):
        return max(9e8 - 3e5 * t, 7e8 - 3e4 * t, 5e8 + 1e5 * t, 60.0 * t * t)

    sizes = [round(200 * 1.2**i) for i in range(17)]
    readings = {(t,): [peak(t)] for t in sizes}
    fit = Fit(LeastSquares(), readings, 0.0, is_peak=True)
    assert not fit.is_exact
    for t in range(min(sizes), max(sizes), 7):
        assert 0 <= fit.predict((t,)) - peak(t) + 1.0 < 0.02 * peak(t)
    assert all(fit.predict((t,)) >= 0.99 * peak(t) for t in (150, 3900))


def test_a_chord_of_far_samples_bounds_what_is_between():
    """A layer's backward under FSDP2 in MiB, by length: no polynomial tells it."""
    peaks = {376: 3119.9, 755: 2974.7, 968: 2893.0, 1236: 2790.3, 1661: 2664.6}
    peaks |= {3067: 2750.9, 8192: 3872.0}
    readings = {(t,): [n] for t, n in peaks.items()}
    fit = Fit(LeastSquares(), readings, 0.0, is_peak=True)
    for t, n in peaks.items():
        assert fit.predict((t,), 6e4) == pytest.approx(n)
    assert 2584.5 <= fit.predict((2306,), 6e4) < 2705.0
    assert fit.predict((9000,), 6e4) >= 4000.0


def test_a_term_for_one_shape_alone_is_left_out():
    """Nothing would check it: what is nearly the same everywhere is believed so."""
    lengths = (2890, 731, 1089, 1748, 2531, 1990, 1427, 498, 942, 450)
    readings = {(8, t): [2e8 + 40.0 * t] for t in lengths} | {(4, 805): [2e8 + 16100.0]}
    readings |= {(3, 10646): [2.61e8], (5, 5576): [2.28e8]}
    fit = Fit(LeastSquares(), readings, 0.0, is_peak=True)
    assert fit.is_trusted(2e10)
    for shape, (value,) in readings.items():
        assert 0.999 * value <= fit.predict(shape, 2e10) < value + 1e8


def test_what_a_fit_misses_beyond_is_not_added_between():
    """A DeBERTa layer's peak in MiB, by length: at 512 it is another moment's."""
    lengths = (82, 111, 117, 127, 131, 137, 139, 159, 162, 188, 235)
    peaks = (334, 432, 452, 488, 502, 524, 531, 605, 617, 718, 913)
    readings = {(t,): [float(n)] for t, n in zip(lengths, peaks, strict=True)}
    fit = Fit(LeastSquares(), {**readings, (512,): [2815.0]}, 0.0, is_peak=True)
    scale = 15e3
    assert 337 == pytest.approx(fit.predict((83,), scale), rel=0.06)
    assert 1501 == pytest.approx(fit.predict((346,), scale), rel=0.06)
    assert fit.predict((600,), scale) >= 3600


def test_noise_is_no_term():
    """Readings of a process's memory are told to their noise, by a simple fit."""
    draw = np.random.default_rng(0)
    readings = {s: [5.0 * s[0] * s[1] + draw.normal(0.0, 10.0)] for s in shapes(24, 2)}
    fit = Fit(LeastSquares(noise=10.0), readings, 10.0, is_peak=False)
    assert fit.is_trusted(0.0)
    assert fit.predict((9, 301)) == pytest.approx(5.0 * 9 * 301, abs=30.0)


def test_what_one_reading_of_many_shows_is_shrugged_off():
    """Equal layers read the same shape; the median counts."""
    readings = {s: [7.0 * s[1]] * 4 + [1e9] for s in shapes(8, 2)}
    fit = Fit(LeastSquares(), readings, 0.0, is_peak=False)
    assert fit.predict((4, 100)) == pytest.approx(700.0)


def test_shapes_unlike_those_measured_are_told():
    """Sizes that never varied, or were always equal, and those far beyond."""
    readings = {(4, n, 64, n): [3.0 * n] for n in (10, 30)}
    fit = Fit(LeastSquares(), readings, 0.0, is_peak=False)
    high = (4, 30, 64, 30)
    assert "" == fit.outside((4, 45, 64, 45), high)
    assert fit.outside((4, 46, 64, 46), high).startswith("46 is beyond 30, the largest")
    assert "5, where only 4 was measured" == fit.outside((5, 20, 64, 20), high)
    assert "differ" in fit.outside((4, 20, 64, 21), high)
    readings[4, 16, 64, 16] = [48.0]
    fit = Fit(LeastSquares(), readings, 0.0, is_peak=False)
    assert "" == fit.outside((4, 120, 64, 120), high)
    assert "largest size measured" in fit.outside((4, 900, 64, 900), high)
    assert "" == fit.outside((4, 900, 64, 900), high, scale=1e9)


def test_any_estimator_serves():
    """It is copied, and believed where it tells shapes that were left out."""
    readings = {(n,): [5.0 * n + 1.0] for n in range(10, 40)}
    line, tree = LinearRegression(), DecisionTreeRegressor(max_depth=1)
    fit = Fit(line, readings, 0.0, is_peak=False)
    assert not hasattr(line, "coef_")
    assert fit.is_trusted(100.0)
    assert fit.predict((25,)) == pytest.approx(126.0)
    assert not Fit(tree, readings, 0.0, is_peak=False).is_trusted(100.0)
    few = {(n,): [5.0 * n] for n in range(4)}
    assert math.isinf(Fit(tree, few, 0.0, is_peak=False).error)
