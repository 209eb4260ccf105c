"""One quantity: when its fit is trusted, and what it says."""

import math

import numpy as np
import pytest

from mimose.cost.samples import Kind, Samples
from mimose.cost.series import Series
from mimose.predictors import (
    EXTRAPOLATION,
    EnvelopeRegressor,
    PolynomialRegressor,
    make_predictor,
)


class _Growing:
    """Samples that come one by one, each time read as the series they make."""

    def __init__(self, make, noise, *, nonnegative, is_excess=False):
        kind = Kind(make, noise, nonnegative=nonnegative, is_excess=is_excess)
        self.samples = Samples(kind)
        self.scale = 0.0

    def add(self, sizes, value):
        """Take in one reading."""
        self.samples = self.samples.with_readings([(sizes, value)], self.scale)

    def __len__(self):
        return len(self._series)

    def __getattr__(self, name):
        return getattr(self._series, name)

    @property
    def _series(self):
        return Series(self.samples, self.scale)


def _exact(nonnegative=True):
    def make(noise):
        return make_predictor("polynomial", noise=noise, nonnegative=nonnegative)

    return _Growing(make, 0.0, nonnegative=nonnegative)


def _polynomial(noise):
    return PolynomialRegressor(noise=noise)


def _net(noise):
    return _Growing(_polynomial, noise, nonnegative=False)


def _excess(noise):
    def make(noise):
        return EnvelopeRegressor(noise=noise)

    return _Growing(make, noise, nonnegative=True, is_excess=True)


def _square(n):
    return 3.0 * n * n + 5.0 * n


def test_a_noisy_reading_needs_repeating():
    """A reading with noise answers for its shape once it was repeated."""
    series = _excess(8.0)
    series.add((4,), 100.0)
    assert series.doubt((4,))
    series.add((4,), 104.0)
    assert "" == series.doubt((4,))
    assert 104.0 == series.predict((4,))


def test_a_polynomial_is_found_and_trusted():
    """With more shapes than monomials the fit is exact, also between the shapes."""
    series = _exact()
    for n in (4, 10, 16, 22, 31):
        series.add((2, n), _square(n))
    assert "" == series.doubt((2, 19))
    assert _square(19) == pytest.approx(series.predict((2, 19)), rel=1e-9)


def test_a_fit_is_trusted_somewhat_beyond_what_was_seen():
    """Up to the stretch, and not further."""
    series = _exact()
    for n in (4, 10, 40):
        series.add((n,), _square(n))
    assert "" == series.doubt((int(40 * EXTRAPOLATION),))
    beyond = int(40 * EXTRAPOLATION) + 1
    assert f"{beyond} is beyond 40, the most measured" == series.doubt((beyond,))


def test_a_surprise_is_taken_in():
    """A value that the trusted fit got wrong makes it fit again."""
    series = _exact()
    for n in (4, 10, 16, 22, 31):
        series.add((n,), 5.0 * n)
    assert 100.0 == pytest.approx(series.predict((20,)))
    for n in (40, 50, 60, 70):
        series.add((n,), _square(n))
    assert _square(60) == pytest.approx(series.predict((60,)), rel=0.01)


def test_the_number_of_shapes_is_bounded():
    """Shapes that the fit predicts well are not kept without end."""
    series = _exact()
    for n in range(1, 200):
        series.add((n,), 7.0 * n)
        series.predict((n,))
    assert len(series) <= 64
    assert "" == series.doubt((199,))
    assert 7.0 * 150 == pytest.approx(series.predict((150,)))


class _Failing:
    """A predictor that fails in one of its methods."""

    n_shapes_ = 9
    exact_ = True
    trusted_ = True

    def __init__(self, where):
        self._where = where

    def _maybe_fail(self, where):
        if self._where == where:
            msg = f"not in {where}"
            raise ValueError(msg)

    def fit(self, X, y):
        """Learn nothing."""
        self._maybe_fail("fit")
        self._n_asked = 0

    def predict_one(self, sizes):
        """Say 5, or NaN; fail at once or from the second time on."""
        self._n_asked += 1
        self._maybe_fail("predict")
        if self._n_asked > 1:
            self._maybe_fail("predict later")
        return math.nan if self._where == "nan" else 5.0

    @property
    def loo_error_(self):
        """Nothing is known of it."""
        self._maybe_fail("error")
        return 0.0


@pytest.mark.parametrize("where", ["fit", "predict", "predict later", "nan"])
def test_a_predictor_that_fails_is_doubted(where):
    """It never raises; the doubt says what it did, and readings stand in for it."""
    series = _Growing(lambda _: _Failing(where), 0.0, nonnegative=True)
    for n in (4, 8, 12, 12):
        series.add((n,), 10.0 * n)
    assert 120.0 == series.predict((10,))
    assert series.predict((4,)) in (5.0, 40.0)
    why = "it predicted nan" if where == "nan" else f"ValueError: not in {where}"
    assert f"the predictor failed: {why}" == series.doubt((10,))
    series.add((16,), 160.0)
    assert 160.0 == series.predict((10,))


def _scattered(by, *, nonnegative):
    """Return a series in which errors of 20 are tolerated, and its doubts."""
    random = np.random.default_rng(0)
    series = _Growing(_polynomial, 1.0, nonnegative=nonnegative, is_excess=nonnegative)
    doubts = []
    for n in range(100, 160, 2):
        series.add((n,), 3.0 * n + random.choice((-by, by)))
        doubts.append(bool(series.doubt((n + 1,))))
    return series, doubts


def test_scatter_that_many_shapes_show_raises_predictions():
    """A fit that is off by more than is tolerated is raised by that, and trusted."""
    series, doubts = _scattered(30.0, nonnegative=True)
    assert all(doubts[3:7])
    assert not any(doubts[7:])
    assert all(series.predict((n,)) >= 3.0 * n + 30.0 for n in range(101, 141, 2))


def test_a_coarse_fit_serves_where_a_fine_one_is_not_settled():
    """Scatter beyond the meter's noise is not explained by more and more monomials."""
    random = np.random.default_rng(1)
    series = _net(1.0)
    for n, m in random.integers(20, 200, (9, 2)).tolist():
        series.add((n, m), 2.0 * n + 5.0 * m + random.choice((-4.0, 4.0)))
    assert "" == series.doubt((100, 100))
    assert 700.0 == pytest.approx(series.predict((100, 100)), abs=20.0)


@pytest.mark.parametrize("stride", [2, 32])
def test_sizes_that_a_stride_has_halved_are_found(stride):
    """A height over a stride, rounded up, is no polynomial of the height, and fits."""
    random = np.random.default_rng(0)
    series = _exact()
    series.scale = 1e6
    shapes = [tuple(map(int, random.integers(64, 200, 2))) for _ in range(24)]

    def value(height, width):
        return 64.0 * -(-height // stride) * -(-width // stride) + 100.0

    for shape in shapes[:16]:
        series.add(shape, value(*shape))
    assert [value(*shape) for shape in shapes] == pytest.approx(
        [series.predict(shape) for shape in shapes], rel=1e-9
    )


@pytest.mark.parametrize("n_before", [0, 3])
def test_what_happened_once_in_an_early_reading_is_forgotten(n_before):
    """A workspace taken, or a bucket let go, once is no part of what follows."""
    series = _net(0.0)
    series.scale = 1e6
    for size in range(10, 22):
        once = 5e5 if size == 10 + n_before else 0.0
        series.add((size,), 3.0 * size + once)
    assert 3.0 * 40 == pytest.approx(series.predict((40,)))
    assert "" == series.doubt((30,))
