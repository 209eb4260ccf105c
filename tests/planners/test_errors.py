"""The error of a budget that no plan can keep."""

import pickle

import pytest

from mimose.planners import InfeasibleBudgetError
from mimose.planners.errors import format_bytes

GIB = 2**30
HOLDERS = {"activations held": 0.5 * GIB, "held at start": 2.0 * GIB}


def test_message():
    """It says what happened, with numbers, and what to change."""
    expected = (
        "No plan keeps the budget of 2.00 GiB: the lowest reachable peak is 2.50 "
        "GiB, 512.0 MiB more. Held at that peak: held at start: 2.00 GiB; activations "
        "held: 512.0 MiB. Raise the budget to at least 2.50 GiB, use a smaller batch "
        "or shorter inputs, or allow actions that hold less."
    )
    assert expected == str(InfeasibleBudgetError(2.0 * GIB, 2.5 * GIB, HOLDERS))


def test_message_without_holders():
    """Where nothing is known of the holders, nothing is said of them."""
    assert "Held at" not in str(InfeasibleBudgetError(1.0, 2.0, {}))


def test_is_a_value_error():
    """It can be caught as what it is, a value that cannot be."""
    assert issubclass(InfeasibleBudgetError, ValueError)


class _BudgetError(Exception):
    """A base of somebody else's."""


class _OtherInfeasibleError(_BudgetError, InfeasibleBudgetError):
    """The error with another base in front."""


@pytest.mark.parametrize("kind", [InfeasibleBudgetError, _OtherInfeasibleError])
def test_pickles(kind):
    """It crosses processes with its numbers, also with another base."""
    error = kind(2.0 * GIB, 2.5 * GIB, HOLDERS)
    copy = pickle.loads(pickle.dumps(error))
    assert type(error) is type(copy)
    assert str(error) == str(copy)
    expected = (error.budget_bytes, error.least_peak_bytes, error.holders)
    assert expected == (copy.budget_bytes, copy.least_peak_bytes, copy.holders)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1536, "1.5 KiB"),
        (310.2 * 2**20, "310.2 MiB"),
        (-1.5 * GIB, "-1.50 GiB"),
    ],
)
def test_format_bytes(count, expected):
    """Bytes are written in the largest unit they fill."""
    assert expected == format_bytes(count)
