"""Reads the values of command-line options, and raises errors for wrong ones.

The functions are types of argparse. It shows users the message of an
`ArgumentTypeError`, and for other errors only the name of the function.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from typing import NoReturn

_MOST_SEED = 2**32 - 1
"""The largest seed of NumPy's older generators."""


class UsageError(Exception):
    """A command cannot do what its options say; the message is one line."""


def need(extra: str, *packages: str) -> None:
    """Make sure that packages are installed.

    Args:
        extra: The extra of mimose that installs them.
        packages: Their import names.

    Raises:
        UsageError: A package is missing; the message has the command to install it.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        msg = f"{', '.join(missing)} {are} missing: pip install 'mimose[{extra}]'"
        raise UsageError(msg)


def at_least_one(text: str) -> int:
    """Read an integer of at least 1."""
    number = _number(text)
    if number % 1 or not number >= 1:
        _fail("a whole number of at least 1", text)
    return int(number)


def seed(text: str) -> int:
    """Read a seed."""
    number = _number(text)
    if number % 1 or not 0 <= number <= _MOST_SEED:
        _fail(f"a whole number from 0 to {_MOST_SEED}", text)
    return int(number)


def positive(text: str) -> float:
    """Read a number above 0."""
    number = _number(text)
    if not 0 < number < math.inf:
        _fail("a number above 0", text)
    return number


def names(text: str) -> list[str]:
    """Read a list of names."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        _fail("names separated by commas", text)
    return found


def shares(text: str) -> tuple[float, ...]:
    """Read a list of budgets of a comparison.

    They are shares, not bytes, because a share has the same meaning for every model and
    its lengths, and does not contain what a process holds before its first step.
    """
    found = tuple(map(_number, text.split(",")))
    if not all(0 < share <= 1 for share in found):
        _fail(
            "shares above 0 and up to 1, such as 0.35,0.5 (0 is what the longest batch "
            "needs if everything is recomputed, 1 if everything is kept)",
            text,
        )
    return found


def _number(text: str) -> float:
    """Return the number in a text; NaN if it is not a number."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _fail(what: str, text: str) -> NoReturn:
    msg = f"must be {what}, got {text!r}"
    raise argparse.ArgumentTypeError(msg)
