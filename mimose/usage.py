"""What a command line may hold, and the errors for what it may not.

The functions that read an option's value are argparse's types: it shows the message of
their `ArgumentTypeError` to people, and for any other error the function's own name.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from typing import NoReturn

_MOST_SEED = 2**32 - 1
"""More than this NumPy's older generators do not take."""


class UsageError(Exception):
    """What was asked for cannot be done; the message is one line for people."""


def need(extra: str, *packages: str) -> None:
    """Make sure that packages are installed.

    Args:
        extra: Which of mimose's extras brings them.
        packages: As they are imported.

    Raises:
        UsageError: Some are not; the message has the command that installs them.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        are = "is" if len(missing) == 1 else "are"
        msg = f"{', '.join(missing)} {are} missing: pip install 'mimose[{extra}]'"
        raise UsageError(msg)


def at_least_one(text: str) -> int:
    """Read a number of things."""
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
    """Read a quantity such as a time."""
    number = _number(text)
    if not 0 < number < math.inf:
        _fail("a number above 0", text)
    return number


def names(text: str) -> list[str]:
    """Read names with commas between them."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        _fail("names with commas between them", text)
    return found


def shares(text: str) -> tuple[float, ...]:
    """Read the budgets of a comparison, with commas between them.

    They are no bytes: one share means something for every model and its lengths, and
    what a process holds before its first step is in none of them.
    """
    found = tuple(map(_number, text.split(",")))
    if not all(0 < share <= 1 for share in found):
        _fail(
            "over 0 and at most 1, such as 0.35,0.5 (near 0 is what the longest batch "
            "needs when everything is recomputed, 1 when everything is kept)",
            text,
        )
    return found


def _number(text: str) -> float:
    """Return the number that a text is; not a number where it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _fail(what: str, text: str) -> NoReturn:
    msg = f"must be {what}, got {text!r}"
    raise argparse.ArgumentTypeError(msg)
