"""One quantity: when its fit is trusted, and what it says."""

import json
import math

import numpy as np
import pytest

from mimose.cost.series import Kind, Series, kinds_of
from mimose.predictors import LeastSquares


class _Growing:
    """A series whose samples come one by one."""

    def __init__(self, kind, scale=0.0):
        self.samples = Series(kind)
        self.scale = scale

    def add(self, sizes, value):
        """Take in one reading."""
        self.samples = self.samples.with_readings([(sizes, value)])

    def predict(self, sizes):
        """Return what it says of sizes."""
        return self.samples.predict(sizes, self.scale)

    def why_unknown(self, sizes):
        """Return why it says nothing of sizes."""
        return self.samples.why_unknown(sizes, self.scale)


def _exact():
    return _Growing(kinds_of(None, 0.0)["exact"])


def _square(n):
    return 3.0 * n * n + 5.0 * n


def test_a_noisy_reading_needs_repeating():
    """A reading with noise answers for its shape once it was repeated."""
    series = _Growing(kinds_of(None, 8.0)["transient"])
    series.add((4,), 100.0)
    assert series.why_unknown((4,))
    series.add((4,), 104.0)
    assert "" == series.why_unknown((4,))
    assert 104.0 == series.predict((4,))


class _Failing:
    """An estimator that fails in one of its methods."""

    def __init__(self, where):
        self._where = where
        self._n_asked = 0

    def _maybe_fail(self, where):
        if self._where == where:
            msg = f"not in {where}"
            raise ValueError(msg)

    def fit(self, X, y):
        """Learn nothing."""
        self._maybe_fail("fit")
        self.loo_errors_ = np.zeros(len(y))

    def predict(self, X):
        """Say 5, or NaN; fail at once or from the second time on."""
        self._n_asked += 1
        self._maybe_fail("predict")
        if self._n_asked > 1:
            self._maybe_fail("predict later")
        value = math.nan if self._where == "nan" else 5.0
        return np.full(len(X), value)


@pytest.mark.parametrize("where", ["fit", "predict", "predict later", "nan"])
def test_an_estimator_that_fails_is_doubted(where):
    """It never raises; the doubt says what it did, and readings stand in for it."""
    series = _Growing(Kind(_Failing(where)))
    for n in (4, 8, 12, 12):
        series.add((n,), 10.0 * n)
    assert 120.0 == series.predict((10,))
    assert series.predict((4,)) in (5.0, 40.0)
    why = "it says nan" if where == "nan" else f"ValueError: not in {where}"
    assert f"the predictor failed: {why}" == series.why_unknown((10,))
    series.add((16,), 160.0)
    assert 160.0 == series.predict((10,))


def test_scatter_that_many_shapes_show_raises_predictions():
    """A fit that is off by more than is tolerated is raised by that, and trusted."""
    random = np.random.default_rng(0)
    series, doubts = _Growing(kinds_of(LeastSquares(), 1.0)["transient"]), []
    for n in range(100, 160, 2):
        series.add((n,), 3.0 * n + random.choice((-30.0, 30.0)))
        doubts.append(bool(series.why_unknown((n + 1,))))
    assert all(doubts[3:7])
    assert not any(doubts[7:])
    assert all(series.predict((n,)) >= 3.0 * n + 30.0 for n in range(101, 141, 2))


def test_state_is_samples():
    """What is loaded is fitted again, by whatever estimator is used then."""
    series = _exact()
    for n in (4, 10, 16, 22, 31):
        series.add((n,), _square(n))
    state = json.loads(json.dumps(series.samples.state_dict()))
    again = _exact()
    again.samples = Series.from_state(again.samples.kind, state)
    assert series.predict((19,)) == again.predict((19,))
    assert "" == again.why_unknown((100,))
