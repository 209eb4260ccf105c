"""Measured series of peaks and latencies by batch size.

Source: LiuXiaoxuanPKU/papaya, V100 16 GB. The errors are those of a straight line
fitted to the same points; a series with a knee is held to far less than a line's.
"""

from __future__ import annotations

import numpy as np
import pytest

from mimose.predictors import EnvelopeRegressor, PolynomialRegressor

# name: batch:value ..., mean absolute percentage error of a line, noise of a reading
SERIES = {
    "BERT-L plain MiB": (
        "4:6030.8 12:7677.7 20:9629.6 28:11176.8 36:12761.6 44:14364.8",
        0.94,
        5.0,
    ),
    "BERT-L plain ms": (
        "4:114.7 12:115.5 20:146.8 28:184.3 36:225.1 44:268.4",
        7.5,
        0.0,
    ),
    "GPT3-S plain ms": (
        "1:61.0 2:62.8 3:67.3 4:73.4 5:81.2 6:89.6 7:99.0 8:106.9 9:116.2 10:128.2 "
        "12:148.7 14:164.7 16:184.4 18:204.1 19:213.7",
        3.4,
        0.0,
    ),
    "GPT3-S plain MB": (
        "1:2905.5 2:3569.3 4:4887.9 8:7528.5 12:10166.6 16:12807.0 19:14810.6",
        0.1,
        5.0,
    ),
    "BERT-L ckpt MiB": (
        "4:5306.5 12:5456.9 20:6068.3 28:6187.5 36:6302.2 44:6429.6 52:6109.1 "
        "60:6227.3 64:6715.7 96:6837.1 128:7971.5 160:8683.7 192:9395.8 224:9685.8 "
        "256:10820.2 288:11533.8 320:12246.0 352:12533.7 384:13669.3",
        2.65,
        5.0,
    ),
    "BERT-L quant L1 MiB": (
        "4:5191.0 12:6475.7 20:6812.7 28:6641.9 36:7493.3 44:6960.8 52:7670.0 "
        "60:7996.2 64:8556.7 96:9549.8 128:11304.1 160:12714.5",
        3.91,
        5.0,
    ),
}
KNEES = {
    "Swin-L ckpt MB": (
        "4:4482.7 8:4488.8 12:4491.5 16:4500.5 20:4495.1 24:4513.5 28:4563.0 "
        "32:4698.6 36:4843.6 40:4988.0 60:5673.3 80:6374.6 120:7765.3 160:9156.1 "
        "200:10531.9 240:11919.6 264:12759.0",
        0.35,
    ),
    "GPT3-S ckpt MB": (
        "1:2993.4 2:3005.9 3:3207.7 4:3526.0 5:3846.9 8:4807.7 12:6089.4 16:7368.8 "
        "24:9929.4 32:12491.6 37:14091.7",
        0.76,
    ),
}
DTR = (
    "4:991.9 12:1821.2 20:2669.4 28:3503.0 36:4341.1 44:5179.9 52:6035.7 60:6887.5 "
    "64:7339.9 96:10772.4 128:14232.4 160:14353.3 192:10094.5 200:10103.0"
)


def read(text):
    """Return X (n_samples, 1) batch sizes and y (n_samples,) values."""
    points = np.array([[float(v) for v in p.split(":")] for p in text.split()])
    return points[:, :1], points[:, 1]


def error_percent(predictor, X, y):
    """Return the mean absolute percentage error."""
    return float(np.mean(np.abs(predictor.predict(X) - y) / y)) * 100


@pytest.mark.parametrize("name", SERIES)
def test_no_worse_than_a_line(name):
    """A polynomial fits each series within the error of a straight line."""
    text, percent, noise = SERIES[name]
    X, y = read(text)

    assert error_percent(PolynomialRegressor(noise=noise).fit(X, y), X, y) <= percent


@pytest.mark.parametrize("noise", [0.0, 5.0, 20.0])
@pytest.mark.parametrize("name", KNEES)
def test_floor_then_line(name, noise):
    """A floor that turns into a line is fitted as two pieces, the samples covered."""
    text, percent = KNEES[name]
    X, y = read(text)

    fitted = EnvelopeRegressor(noise=noise).fit(X, y)

    assert 2 == len(fitted.pieces_)
    assert error_percent(fitted, X, y) <= percent
    assert (fitted.predict(X) >= y * (1 - 1e-12)).all()


def test_straight_series_is_trusted():
    """A series that is a line within its noise is trusted."""
    X, y = read(SERIES["GPT3-S plain MB"][0])

    fitted = PolynomialRegressor(noise=5.0).fit(X, y)

    assert {(0,), (1,)} == set(fitted.monomials_)
    assert fitted.trusted_


@pytest.mark.parametrize("noise", [0.0, 5.0, 50.0, 200.0])
@pytest.mark.parametrize("kind", [PolynomialRegressor, EnvelopeRegressor])
def test_saturating_series_is_refused(kind, noise):
    """A series that saturates and then falls is not trusted."""
    assert not kind(noise=noise).fit(*read(DTR)).trusted_
