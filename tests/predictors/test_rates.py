"""Rates of work, fitted to times."""

import numpy as np
import pytest

from mimose.predictors import fit_rates

RATES = 3e-3, 2e-11, 4e-10
WORK = np.array([(1.0, 1e8 * n, 2e5 * n * n) for n in range(1, 20)])


def test_exact_times_give_their_rates():
    """What is a sum of works is found, whatever the units of these are."""
    assert RATES == pytest.approx(fit_rates(WORK, WORK @ RATES), rel=1e-6)


def test_errors_are_shares():
    """Noise of a tenth is a tenth of small times as of large ones."""
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(WORK))
    fitted = WORK @ fit_rates(WORK, noise * (WORK @ RATES))
    assert WORK @ RATES == pytest.approx(fitted, rel=0.1)


def test_a_busy_machine_moves_little():
    """One time in five is three times too long; the rest is found to a few per cent."""
    times = WORK @ RATES
    times[::5] *= 3.0
    assert WORK @ RATES == pytest.approx(WORK @ fit_rates(WORK, times), rel=0.05)


def test_rates_are_never_negative():
    """Times that fall with work make that work free."""
    work = np.array([(1.0, n) for n in range(5)])
    rates = fit_rates(work, np.array([5.0, 4.0, 3.0, 2.0, 1.0]))
    assert 0.0 == rates[1]
    assert rates[0] > 0.0
