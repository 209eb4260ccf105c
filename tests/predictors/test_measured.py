"""Measured series of peaks and latencies by batch size.

Source: LiuXiaoxuanPKU/papaya, V100 16 GB. The errors are those of a straight line
fitted to the same points; a series with a knee is held to far less than a line's.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.proofs.papaya import SERIES as PUBLISHED
from benchmarks.proofs.papaya import UNITS
from mimose.predictors import EnvelopeRegressor, PolynomialRegressor

# Model, method, unit: mean absolute percentage error of a line, noise of a reading.
SERIES = {
    ("BERT-L", "plain", "MiB"): (0.94, 5.0),
    ("BERT-L", "plain", "ms"): (7.5, 0.0),
    ("GPT3-S", "plain", "ms"): (3.4, 0.0),
    ("GPT3-S", "plain", "MB"): (0.1, 5.0),
    ("BERT-L", "ckpt", "MiB"): (2.65, 5.0),
    ("BERT-L", "quant L1", "MiB"): (3.91, 5.0),
}
KNEES = {
    ("Swin-L", "ckpt", "MB"): 0.35,
    ("GPT3-S", "ckpt", "MB"): 0.76,
}
DTR = ("WRN-50-2", "DTR", "MiB")


def read(model, method, unit):
    """Return X (n_samples, 1) batch sizes and y (n_samples,) values in a unit."""
    kind = (model, method, unit != "ms")
    found = next(each for each in PUBLISHED if kind == each[:3])
    return found.batches[:, None], found.values / UNITS[unit]


def error_percent(predictor, X, y):
    """Return the mean absolute percentage error."""
    return float(np.mean(np.abs(predictor.predict(X) - y) / y)) * 100


@pytest.mark.parametrize("name", SERIES, ids=str)
def test_no_worse_than_a_line(name):
    """A polynomial fits each series within the error of a straight line."""
    percent, noise = SERIES[name]
    X, y = read(*name)

    assert error_percent(PolynomialRegressor(noise=noise).fit(X, y), X, y) <= percent


@pytest.mark.parametrize("noise", [0.0, 20.0])
@pytest.mark.parametrize("name", KNEES, ids=str)
def test_floor_then_line(name, noise):
    """A floor that turns into a line is fitted as two pieces, the samples covered."""
    percent = KNEES[name]
    X, y = read(*name)

    fitted = EnvelopeRegressor(noise=noise).fit(X, y)

    assert 2 == len(fitted.pieces_)
    assert error_percent(fitted, X, y) <= percent
    assert (fitted.predict(X) >= y * (1 - 1e-12)).all()


@pytest.mark.parametrize("noise", [0.0, 200.0])
@pytest.mark.parametrize("kind", [PolynomialRegressor, EnvelopeRegressor])
def test_saturating_series_is_refused(kind, noise):
    """A series that saturates and then falls is not trusted."""
    assert not kind(noise=noise).fit(*read(*DTR)).trusted_
