"""What a command line may hold, and how it is told what it cannot.

The functions that read an option's value are argparse's types: it shows the message of
their `ArgumentTypeError` to people, and for any other error the function's own name.
"""

from __future__ import annotations

import argparse
import importlib.util
import math

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
    """Read a number of things.

    Raises:
        ArgumentTypeError: It is no whole number, or less than 1.
    """
    number = _whole(text)
    if number is None or number < 1:
        msg = f"must be a whole number of at least 1, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return number


def seed(text: str) -> int:
    """Read a seed.

    Raises:
        ArgumentTypeError: It is no whole number, or not one that generators take.
    """
    number = _whole(text)
    if number is None or not 0 <= number <= _MOST_SEED:
        msg = f"must be a whole number from 0 to {_MOST_SEED}, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return number


def positive(text: str) -> float:
    """Read a quantity such as a time.

    Raises:
        ArgumentTypeError: It is no number, or not above 0.
    """
    number = _number(text)
    if number is None or not 0 < number < math.inf:
        msg = f"must be a number above 0, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return number


def names(text: str) -> list[str]:
    """Read names with commas between them.

    Raises:
        ArgumentTypeError: There are none.
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    if not found:
        msg = f"must be names with commas between them, got {text!r}"
        raise argparse.ArgumentTypeError(msg)
    return found


def shares(text: str) -> tuple[float, ...]:
    """Read the budgets of a comparison, with commas between them.

    They are no bytes: one share means something for every model and its lengths, and
    what a process holds before its first step is in none of them.

    Raises:
        ArgumentTypeError: One is no number over 0 and at most 1.
    """
    found = [_number(share) for share in text.split(",")]
    known = [share for share in found if share is not None and 0 < share <= 1]
    if len(known) < len(found):
        msg = (
            f"must be over 0 and at most 1, such as 0.35,0.5; got {text!r}. Budgets "
            f"are no bytes here: near 0 is what the longest batch needs when "
            f"everything is recomputed, 1 what it needs when everything is kept"
        )
        raise argparse.ArgumentTypeError(msg)
    return tuple(known)


def _whole(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
