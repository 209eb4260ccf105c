"""Raising predictions that come out too low."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from mimose.predictors import Calibration

GB = 1e9


def feed(calibration, residuals):
    """Observe growths of 1 GB that came out off by the given fractions."""
    for residual in residuals:
        calibration.observe(GB, GB * (1.0 + residual))
    return calibration


def test_nothing_is_raised_at_first():
    """Seven observations are too few, eight are enough."""
    calibration = feed(Calibration(), [0.01] * 7)
    assert 1.0 == calibration.factor
    assert 1.01 == pytest.approx(feed(calibration, [0.01]).factor)


@pytest.mark.parametrize("quantile", [0.5, 0.8, 0.9])
def test_a_share_lies_at_or_below(quantile):
    """Of the remembered observations, that share is at or below the corrected one."""
    residuals = np.random.default_rng(0).uniform(0.0, 0.03, 64)
    factor = feed(Calibration(quantile), residuals).factor
    below = np.mean(1.0 + residuals <= factor + 1e-12)
    assert quantile <= below <= quantile + 1 / 64


def test_predictions_are_never_lowered():
    """Growths far below their prediction change nothing."""
    assert 1.0 == feed(Calibration(), [-0.3] * 100).factor


def test_there_is_a_most():
    """However far off, no more is added than asked for."""
    assert 1.02 == pytest.approx(feed(Calibration(most=0.02), [0.5] * 10).factor)


def test_old_observations_are_forgotten():
    """After a window of good predictions the factor is 1 again."""
    calibration = feed(Calibration(window=16), [0.02] * 16)
    assert 1.0 == feed(calibration, [0.0] * 16).factor


@pytest.mark.parametrize(
    ("predicted", "observed"),
    [(0.0, GB), (-1.0, GB), (math.nan, GB), (math.inf, GB), (GB, math.nan)],
)
def test_nonsense_is_passed_over(predicted, observed):
    """Numbers that say nothing leave no trace."""
    calibration = Calibration()
    for _ in range(20):
        calibration.observe(predicted, observed)
    assert Calibration().state_dict() == calibration.state_dict()


def test_state_survives_json():
    """A state that went through JSON gives the same factor."""
    calibration = feed(Calibration(), [0.001 * n for n in range(20)])
    other = Calibration()
    other.load_state_dict(json.loads(json.dumps(calibration.state_dict())))
    assert calibration.factor == other.factor


@pytest.mark.parametrize(
    "wrong", [{"quantile": 0.0}, {"quantile": 1.0}, {"window": 7}, {"most": -0.1}]
)
def test_parameters_out_of_range(wrong):
    """A parameter that makes no sense is refused."""
    with pytest.raises(ValueError, match="quantile"):
        Calibration(**wrong)
